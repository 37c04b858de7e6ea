// Every token of a trajectory, tinted by what the row has for it.

import { addressed, link, trajectoryLink } from "../api.js";
import { empty, h, number, panel, roving, visible } from "../dom.js";
import { facts } from "./parts.js";

const TINTS = { logprob: "log-probability", mask: "mask", version: "weight version" };
const PAGE = 2048;
const WORST = 8;
const FAR = -6;
/** Nats at which the tint is full. */

export default async function tokens(visit) {
  const { run, tint = "logprob" } = visit.parameters;
  const row = Number(visit.parameters.row ?? 0), offset = Number(visit.parameters.offset ?? 0);
  const page = await visit.get("tokens", { ...addressed(visit.parameters), row, offset, limit: PAGE });
  const address = { step: Number(visit.parameters.step), validation: Boolean(visit.parameters.val), sample: visit.parameters.sample, rollout: visit.parameters.rollout };
  const to = (changes) => link("tokens", { ...visit.parameters, ...changes });
  visit.keys.t = () => (location.hash = trajectoryLink("trajectory", run, address));
  const details = h("div", { class: "token-details" });
  const versions = [...new Set(page.versions.filter((version) => version !== null))];
  const show = (index) => details.replaceChildren(facts([
    ["token", h("code", {}, page.pieces ? quoted(page.pieces[index]) : "–")], ["id", number(page.ids[index])],
    ["place", `${number(offset + index)} of ${number(page.total)}, ${offset + index < page.prompt_tokens ? "prompt" : "response"}`],
    ["log-probability", page.logprobs[index] === null ? "not sampled" : `${number(page.logprobs[index], 4)} nats`],
    ["probability", page.logprobs[index] === null ? null : number(Math.exp(page.logprobs[index]), 4)],
    ["mask", page.mask[index] ? "1: trained" : "0: not trained"],
    ["weights", page.versions[index] === null ? null : `version ${page.versions[index]}`],
  ]));
  const nodes = page.ids.map((id, index) => {
    const piece = page.pieces ? page.pieces[index] : `${id}`;
    const node = h("span", { class: `token ${kind(page, index, offset, tint, versions)} ${page.pieces ? "" : "id"}`, "data-index": index, style: { "--tint": `${strength(page.logprobs[index], tint)}%` } }, shown(piece));
    return /\n/.test(piece) && page.pieces ? [node, h("br")] : node;
  });
  const text = roving(h("div", { class: "tokens", tabindex: null }, nodes), ".token");
  const look = (event) => event.target.dataset?.index !== undefined && show(Number(event.target.dataset.index));
  text.addEventListener("pointerover", look);
  text.addEventListener("focusin", look);
  show(Math.max(0, page.mask.indexOf(1)));
  return h("div", { class: "stack" },
    h("div", { class: "title" }, h("h1", {}, "Tokens"), h("span", { class: "dim" }, `${number(page.total)} tokens, ${number(page.prompt_tokens)} of them the prompt`), h("span", { class: "spacer" }),
      h("a", { class: "button", href: trajectoryLink("trajectory", run, address), title: "key t" }, "Conversation")),
    !page.pieces && h("p", { class: "note" }, "Ids are shown, because the tokenizer of the run's model is not on this machine, or the package tokenizers is not installed."),
    h("div", { class: "split" },
      panel("", { class: "token-panel" }, h("div", { class: "row between" },
        h("div", { class: "segments", role: "group", "aria-label": "Tint" }, Object.entries(TINTS).map(([name, words]) =>
          h("a", { href: to({ tint: name }), "aria-current": name === tint ? "true" : null }, words))), key(tint, versions)),
        page.total ? text : empty("This row has no tokens."), pages(page, row, offset, to)),
      h("div", { class: "stack sticky" }, panel("Token", {}, details), worst(page, text))));
}

const shown = (piece) => visible(piece).replaceAll("\n", "↵").replaceAll("\t", "⇥") || "∅";
const quoted = (piece) => JSON.stringify(visible(piece));

function kind(page, index, offset, tint, versions) {
  const part = offset + index < page.prompt_tokens ? "prompt" : page.mask[index] ? "model" : "observation";
  const version = tint === "version" && page.versions[index] !== null ? `v${versions.indexOf(page.versions[index]) % 6}` : "";
  return `${part} tint-${tint} ${version}`;
}

const strength = (logprob, tint) => (tint !== "logprob" || logprob === null ? 0 : Math.round(Math.min(1, logprob / FAR) * 100));

function key(tint, versions) {
  const item = (style, text, kind = "") => h("li", {}, h("i", { class: `swatch token ${kind}`, style }), text);
  if (tint === "logprob") return h("ul", { class: "legend" }, item({ "--tint": "0%" }, "certain", "model tint-logprob"), item({ "--tint": "50%" }, `${FAR / 2} nats`, "model tint-logprob"), item({ "--tint": "100%" }, `${FAR} or less`, "model tint-logprob"), item({}, "not sampled", "observation"));
  if (tint === "mask") return h("ul", { class: "legend" }, item({}, "trained", "model tint-mask"), item({}, "not trained", "observation tint-mask"), item({}, "prompt", "prompt tint-mask"));
  return h("ul", { class: "legend" }, versions.map((version, index) => item({}, `version ${version}`, `model tint-version v${index % 6}`)));
}

/** The sampled tokens that were least likely. */
function worst(page, text) {
  const found = page.logprobs.map((logprob, index) => [logprob, index]).filter(([logprob]) => logprob !== null).sort((a, b) => a[0] - b[0]).slice(0, WORST);
  if (!found.length) return null;
  return panel("Least likely", {}, h("ol", { class: "least" }, found.map(([logprob, index]) => h("li", {},
    h("button", { type: "button", class: "plain", onclick: () => text.querySelector(`[data-index="${index}"]`).focus() }, h("code", {}, page.pieces ? quoted(page.pieces[index]) : String(page.ids[index]))),
    h("b", {}, number(logprob, 3))))));
}

function pages(page, row, offset, to) {
  const rows = page.rows > 1 && h("span", { class: "row" }, "row", Array.from({ length: page.rows }, (_, index) =>
    h("a", { class: "button", href: to({ row: index, offset: null }), "aria-current": index === row ? "true" : null }, String(index))));
  const more = page.total > page.ids.length && h("span", { class: "row" },
    offset > 0 && h("a", { class: "button", href: to({ offset: Math.max(0, offset - PAGE) }) }, "← before"),
    h("span", { class: "dim" }, `${number(offset)} to ${number(offset + page.ids.length)} of ${number(page.total)}`),
    offset + page.ids.length < page.total && h("a", { class: "button", href: to({ offset: offset + PAGE }) }, "after →"));
  return (rows || more) && h("p", { class: "row between" }, rows, more);
}
