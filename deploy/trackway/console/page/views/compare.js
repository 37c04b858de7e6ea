// Two to eight trajectories side by side.

import { misfit } from "../address.js";
import { compareLink, link, MOST_COMPARED, trajectoryLink } from "../api.js";
import { differences } from "../diff.js";
import { empty, h, number, seconds, visible } from "../dom.js";
import { download, exported, fileName, folded, scoreChip } from "./parts.js";

function decoded(text) {
  const [, v, step, sample, rollout] = text.match(/^(v?)(\d{1,15})\/([^/]+)\/(\d{1,15})$/) ?? [];
  try {
    if (step !== undefined) return { step, validation: v ? true : undefined, sample: decodeURIComponent(sample), rollout };
  } catch {
    // a % that begins no character
  }
  throw misfit("step/sample/rollout in each part of of=…", JSON.stringify(text.slice(0, 60)), "open a trajectory of the run, then Compare");
}

export default async function compare(visit) {
  const { run, of = "" } = visit.parameters;
  const addresses = of.split(",").filter(Boolean).slice(0, MOST_COMPARED).map(decoded);
  if (addresses.length < 2) return empty("Two to eight trajectories can be compared.", h("a", { href: link("search", { run }) }, "Search for trajectories, and choose some of the hits"));
  const pages = await Promise.all(addresses.map((address) => visit.get("trajectory", { run, ...address })));
  const [first] = pages;
  const rows = [
    ["reward", (page) => number(page.reward?.score ?? null)], ["ended by", (page) => page.error?.code ?? page.stop_reason],
    ["time", (page) => seconds(page.timings.total)], ["response", (page) => `${number(page.response_tokens)} tokens`],
    ["weights", (page) => [...new Set(page.weight_versions.map((span) => span.version))].join(", ") || "–"],
    ["incidents", (page) => page.incidents.join(", ") || "–"],
  ];
  const turns = Math.max(...pages.map((page) => page.turns.length));
  const without = (index) => compareLink(run, pages.filter((_, other) => other !== index).map((page) => page.address));
  const cells = (draw) => pages.map((page, index) => h("div", { class: "column" }, draw(page, index)));
  const line = (name, draw) => [h("div", { class: "row-name" }, name), ...cells(draw)];
  const text = (page, of) => marked(of(page), page === first ? null : of(first));
  return [h("div", { class: "title" }, h("h1", {}, `${pages.length} trajectories`), h("span", { class: "dim" }, "what differs from the first is marked"), h("span", { class: "spacer" }),
    download("export", pages.map((page) => exported(run, page.address)), `${fileName(run)}-compared.jsonl`, "JSONL")),
    h("div", { class: "panel scroll compare", style: { "--columns": pages.length } },
      line("", (page, index) => [h("a", { class: "strong", href: trajectoryLink("trajectory", run, page.address) }, `${page.address.validation ? "v" : "step "}${page.address.step} · ${visible(page.address.sample)} · ${page.address.rollout}`),
        " ", scoreChip(page.reward?.score ?? null), pages.length > 2 && h("a", { class: "button small", href: without(index), "aria-label": "leave this one out" }, "×")]),
      rows.map(([name, of_]) => line(name, (page) => h("span", { class: of_(page) === of_(first) ? null : "differs" }, visible(of_(page))))),
      line("prompt", (page) => folded(h("pre", {}, text(page, asked)), asked(page), LONG)),
      Array.from({ length: turns }, (_, index) => line(`turn ${index + 1}`, (page) => page.turns[index]
        ? folded(h("pre", {}, text(page, (of_) => spoken(of_.turns[index]))), spoken(page.turns[index]), LONG) : h("p", { class: "dim" }, "no such turn"))))];
}

const LONG = 30;
/** Lines of a text that is shown whole. */
const asked = (page) => page.prompt_messages.map((message) => message.content).join("\n");

/** A turn as a text: what was said, what was called, what came back. */
const spoken = (turn) => turn === undefined ? "" : turn.messages.map((message) => [
  message.role === "tool" ? `→ ${message.content}` : message.content,
  ...(message.tool_calls ?? []).map((call) => `${call.function.name}(${call.function.arguments})`),
].filter(Boolean).join("\n")).join("\n");

/** The text with the words marked that the other lacks there; a sign where it lacks words of the other. */
function marked(text, other) {
  if (other === null || text === other) return visible(text);
  const pieces = differences(text, other);
  if (pieces.every(({ same }) => same)) return [visible(text), h("mark", { title: "words of the first are missing here" }, "∅")];
  return pieces.map((piece) => (piece.same ? visible(piece.text) : h("mark", {}, visible(piece.text))));
}
