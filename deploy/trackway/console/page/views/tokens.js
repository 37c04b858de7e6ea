// Every token of a trajectory, tinted by what its row and the learner's values have for it.

import { addressed, link, trajectoryLink } from "../api.js";
import { empty, h, number, panel, plural, roving, visible } from "../dom.js";
import { csv, facts, fileName } from "./parts.js";

const PAGE = 2048;
const FAR = -6;
/** Nats at which the tint of a log-probability is full. */
const CLOSE = 0.01;
/** Nats of difference that are always pale: what rounding makes. */

const SOFT = 0.5;
/** Power of a log-probability's share of FAR in its tint: p = 0.37 differs visibly from p = 1. */

/** By name: its words, its value of a token, whether the learner's file has it, and the heading of those that the console ranks first. */
const TINTS = {
  logprob: { words: "sampler", value: (page, i) => page.logprobs[i], full: () => FAR, power: SOFT, listed: "Least likely" },
  learner: { words: "learner", needs: true, value: (page, i) => page.learner.logprobs[i], full: () => FAR, power: SOFT, listed: "Least likely to the learner" },
  difference: { words: "difference", needs: true, value: (page, i) => difference(page, i), full: (values) => Math.max(CLOSE, largest(values)), listed: "Sampler and learner disagree most" },
  entropy: { words: "entropy", needs: true, value: (page, i) => page.learner.entropies[i], full: (values) => largest(values) || 1, listed: "Highest entropy" },
  advantage: { words: "advantage", needs: true, value: (page, i) => page.learner.advantages[i], full: (values) => largest(values) || 1, listed: "Largest advantage" },
  teacher: { words: "teacher", value: (page, i) => taught(page, i), full: (values) => largest(values) || 1, listed: "Teacher and student disagree most" },
  clip: { words: "clip and filter", needs: true },
  mask: { words: "mask" },
  version: { words: "weight version" },
};

export default async function tokens(visit) {
  const { run } = visit.parameters;
  const row = Number(visit.parameters.row ?? 0), { place, at: asked } = visit.parameters;
  const from = Number(visit.parameters.offset ?? Math.floor(Number(asked ?? 0) / PAGE) * PAGE);
  const rank = TINTS[visit.parameters.tint]?.listed ? visit.parameters.tint : "logprob";
  const page = await visit.get("tokens", { ...addressed(visit.parameters), row, offset: from, limit: PAGE, place, rank });
  const { offset } = page;
  const at = place === undefined ? asked === undefined ? null : Number(asked) : page.prompt_tokens + Number(place);
  const names = Object.keys(TINTS).filter((name) => name === "teacher" ? page.teacher.length : !TINTS[name].needs || page.learner?.logprobs.length);
  const tint = names.includes(visit.parameters.tint) ? visit.parameters.tint : "logprob";
  const address = { step: Number(visit.parameters.step), validation: Boolean(visit.parameters.val), sample: visit.parameters.sample, rollout: visit.parameters.rollout };
  const to = (changes) => link("tokens", { ...visit.parameters, at, place: null, ...changes });
  visit.keys.t = () => (location.hash = trajectoryLink("trajectory", run, address));
  const details = h("div", { class: "token-details" });
  const versions = [...new Set(page.versions.filter((version) => version !== null))];
  const { value, power = 1 } = TINTS[tint];
  const values = page.ids.map((_, index) => (value ? value(page, index) : null));
  const full = value ? TINTS[tint].full(values) : 1;
  const show = (index) => details.replaceChildren(page.ids[index] === undefined ? h("p", { class: "dim" }, page.total ? `Token ${number(offset + index)} is not on this page.` : "There is none.") : about(page, index, offset));
  const nodes = page.ids.map((id, index) => {
    const piece = page.pieces ? page.pieces[index] : `${id}`;
    const strength = values[index] === null ? 0 : Math.round(Math.min(1, Math.abs(values[index] / full)) ** power * 100);
    const node = h("span", { class: `token ${kind(page, index, offset, tint, versions, values[index])} ${page.pieces ? "" : "id"}`, "data-index": index, style: { "--tint": `${strength}%` } }, shown(piece));
    return /\n/.test(piece) && page.pieces ? [node, h("br")] : node;
  });
  const text = roving(h("div", { class: "tokens", tabindex: null }, nodes), ".token");
  const look = (event) => event.target.dataset?.index !== undefined && show(Number(event.target.dataset.index));
  text.addEventListener("pointerover", look);
  text.addEventListener("focusin", look);
  show(at === null ? Math.max(0, page.mask.indexOf(1)) : at - offset);
  if (at !== null) text.querySelector(`[data-index="${at - offset}"]`)?.setAttribute("data-focus", "");
  return h("div", { class: "stack" },
    h("div", { class: "title" }, h("h1", {}, "Tokens"), h("span", { class: "dim" }, `${number(page.total)} tokens, ${number(page.prompt_tokens)} of them the prompt`), h("span", { class: "spacer" }),
      csv(`${fileName(run)}-${address.step}-${address.sample}-${address.rollout}-tokens`, COLUMNS, () => page.ids.map((_, index) => line(page, index, offset))),
      h("a", { class: "button", href: trajectoryLink("trajectory", run, address), title: "key t" }, "Conversation")),
    !page.pieces && h("p", { class: "note" }, "Ids are shown, because the tokenizer of the run's model is not on this machine, or the package tokenizers is not installed."),
    page.unreadable && h("p", { class: "note bad" }, visible(page.unreadable)),
    page.learner && page.learner.status !== "used" && h("p", { class: "note" }, `The learner did not train on it: ${page.learner.status.replaceAll("_", " ")}.`),
    h("div", { class: "split" },
      panel("", { class: "token-panel" }, h("div", { class: "row between" },
        h("div", { class: "segments", role: "group", "aria-label": "Tint" }, names.map((name) =>
          h("a", { href: to({ tint: name }), "aria-current": name === tint ? "true" : null }, TINTS[name].words))), key(tint, versions, full)),
        page.ids.length ? text : page.total ? empty(`This row has ${plural(page.total, "token")}, and none at ${number(offset)}.`, h("a", { href: to({ offset: null, at: null }) }, "Show the first ones")) : empty("This row has no tokens.", "The trajectory ended before any was written; its conversation has the error."), pages(page, row, offset, to)),
      h("div", { class: "stack sticky" }, panel("Token", { class: "token-now" }, details), extremes(page, text, tint, to),
        !page.learner && !page.unreadable && !address.validation && h("p", { class: "dim small" }, "The learner's values are here in runs with trackway.save_token_values=true, after the update."))));
}

const largest = (values) => Math.max(0, ...values.filter((value) => value !== null).map(Math.abs));

function difference(page, index) {
  const [sampler, learner] = [page.logprobs[index], page.learner.logprobs[index]];
  return sampler === null || learner === null ? null : learner - sampler;
}

/** The teacher's log-probability less the student's: below 0 where the student is surer of its token than the teacher. */
function taught(page, index) {
  const [student, teacher] = [page.logprobs[index], page.teacher[index] ?? null];
  return student === null || teacher === null ? null : teacher - student;
}

const shown = (piece) => visible(piece).replaceAll("\n", "↵").replaceAll("\t", "⇥") || "∅";
const quoted = (piece) => JSON.stringify(visible(piece));
const nats = (value) => (value === null || value === undefined ? null : `${number(value, 4)} nats`);

const COLUMNS = ["place", "id", "text", "mask", "logprob", "version", "learner_logprob", "entropy", "advantage", "clipped", "kept", "teacher_logprob"];

/** A token as a row of a file. */
const line = ({ ids, pieces, mask, logprobs, versions, learner, teacher }, index, offset) => [offset + index, ids[index], pieces?.[index], mask[index], logprobs[index], versions[index],
  ...["logprobs", "entropies", "advantages", "clipped", "kept"].map((name) => learner?.[name][index]), teacher[index]];

/** All that is known of one token. */
function about(page, index, offset) {
  const sampled = page.logprobs[index], learner = page.learner?.logprobs.length ? page.learner : null;
  return facts([
    ["token", h("code", {}, page.pieces ? quoted(page.pieces[index]) : "–")], ["id", number(page.ids[index])],
    ["place", `${number(offset + index)} of ${number(page.total)}, ${offset + index < page.prompt_tokens ? "prompt" : "response"}`],
    ["log-probability", sampled === null ? "not sampled" : nats(sampled)],
    ["probability", sampled === null ? null : number(Math.exp(sampled), 4)],
    page.teacher.length && ["teacher's", nats(page.teacher[index])],
    page.teacher.length && ["teacher less student", nats(taught(page, index))],
    learner && ["learner's", nats(learner.logprobs[index])],
    learner && ["difference", nats(difference(page, index))],
    learner && ["entropy", nats(learner.entropies[index])],
    learner && ["advantage", learner.advantages[index] === null ? null : number(learner.advantages[index], 4)],
    learner && page.mask[index] ? ["loss", learner.kept[index] ? (learner.clipped[index] ? "clipped: no gradient" : "trained") : "rejected: not in the loss"] : null,
    ["mask", page.mask[index] ? "1: trained" : "0: not trained"],
    ["weights", page.versions[index] === null ? null : `version ${page.versions[index]}`],
  ]);
}

function kind(page, index, offset, tint, versions, value) {
  const part = offset + index < page.prompt_tokens ? "prompt" : page.mask[index] ? "model" : "observation";
  const more = tint === "version" && page.versions[index] !== null ? `v${versions.indexOf(page.versions[index]) % 6}`
    : tint === "clip" && part === "model" ? (page.learner.kept[index] ? (page.learner.clipped[index] ? "clipped" : "") : "rejected")
    : value !== null && value < 0 && ["advantage", "teacher"].includes(tint) ? "negative" : "";
  return `${part} tint-${["mask", "version", "clip"].includes(tint) ? tint : "value"} ${more}`;
}

function key(tint, versions, full) {
  const item = (style, text, kind) => h("li", {}, h("i", { class: `swatch token ${kind}`, style }), text);
  if (tint === "mask") return h("ul", { class: "legend" }, item({}, "trained", "model tint-mask"), item({}, "not trained", "observation tint-mask"), item({}, "prompt", "prompt tint-mask"));
  if (tint === "clip") return h("ul", { class: "legend" }, item({}, "trained", "model tint-clip"), item({}, "clipped", "model tint-clip clipped"), item({}, "rejected", "model tint-clip rejected"));
  if (tint === "version") return h("ul", { class: "legend" }, versions.map((version, index) => item({}, `version ${version}`, `model tint-version v${index % 6}`)));
  const least = { logprob: "certain", learner: "certain", entropy: "certain" }[tint] ?? "0";
  return h("ul", { class: "legend" }, item({ "--tint": "0%" }, least, "model tint-value"), item({ "--tint": "50%" }, number(full * 0.5 ** (1 / (TINTS[tint].power ?? 1))), "model tint-value"),
    item({ "--tint": "100%" }, `${number(full)}${tint === "logprob" || tint === "learner" ? " or less" : ""}`, "model tint-value"),
    tint === "advantage" || tint === "teacher" ? item({ "--tint": "100%" }, "negative", "model tint-value negative") : item({}, "not sampled", "observation"));
}

/** The tokens of the whole row with the most remarkable values. */
function extremes(page, text, tint, to) {
  const { listed } = TINTS[tint];
  if (!listed || !page.ranked.length) return null;
  const opener = ({ place, id, piece }) => {
    const index = place - page.offset, words = h("code", {}, piece === null ? String(id) : quoted(piece));
    return page.ids[index] === undefined ? h("a", { href: to({ at: place, offset: null }), title: `token ${number(place)}` }, words)
      : h("button", { type: "button", class: "plain", onclick: () => text.querySelector(`[data-index="${index}"]`).focus() }, words);
  };
  return panel(listed, {}, h("ol", { class: "least" }, page.ranked.map((token) => h("li", {}, opener(token), h("b", {}, number(token.value, 3))))));
}

function pages(page, row, offset, to) {
  const rows = page.rows > 1 && h("span", { class: "row" }, "row", Array.from({ length: page.rows }, (_, index) =>
    h("a", { class: "button", href: to({ row: index, offset: null, at: null }), "aria-current": index === row ? "true" : null }, String(index))));
  const more = page.ids.length > 0 && page.total > page.ids.length && h("span", { class: "row" },
    offset > 0 && h("a", { class: "button", href: to({ offset: Math.max(0, offset - PAGE), at: null }) }, "← before"),
    h("span", { class: "dim" }, `${number(offset)} to ${number(offset + page.ids.length - 1)} of ${number(page.total)}`),
    offset + page.ids.length < page.total && h("a", { class: "button", href: to({ offset: offset + PAGE, at: null }) }, "after →"));
  return (rows || more) && h("p", { class: "row between" }, rows, more);
}
