// Two to eight trajectories side by side, of one run or of several.

import { misfit } from "../address.js";
import { compareLink, link, MOST_COMPARED, trajectoryLink } from "../api.js";
import { differences } from "../diff.js";
import { busy, empty, h, number, seconds, visible } from "../dom.js";
import { download, exported, fileName, folded, nameField, scoreChip } from "./parts.js";

function decoded(text, own) {
  const [, v, step, sample, rollout, run] = text.match(/^(v?)(\d{1,15})\/([^/]+)\/(\d{1,15})(?:\/([^/]+))?$/) ?? [];
  try {
    if (step !== undefined) return { run: decodeURIComponent(run ?? own), step, validation: v ? true : undefined, sample: decodeURIComponent(sample), rollout };
  } catch {
    // a % that begins no character
  }
  throw misfit("step/sample/rollout in each part of of=…", JSON.stringify(text.slice(0, 60)), "open a trajectory of the run, then Compare");
}

export default async function compare(visit) {
  const { run, of = "" } = visit.parameters;
  const addresses = of.split(",").filter(Boolean).slice(0, MOST_COMPARED).map((text) => decoded(text, run));
  if (!addresses.length) return empty("Two to eight trajectories can be compared.", h("a", { href: link("search", { run }) }, "Search for trajectories, and choose some of the hits"));
  const [list, ...pages] = await Promise.all([visit.get("runs", { limit: 200 }), ...addresses.map((address) => visit.get("trajectory", address))]);
  const [first] = pages, runs = addresses.map((address) => address.run);
  const isOne = runs.every((key) => key === run);
  const rows = [
    ["reward", (page) => number(page.reward?.score ?? null)], ["answer", (page) => page.reward?.answer ?? "–"], ["ground truth", (page) => page.ground_truth ?? "–"], ["ended by", (page) => page.error?.code ?? page.stop_reason],
    ["time", (page) => seconds(page.timings.total)], ["response", (page) => `${number(page.response_tokens)} tokens`],
    ["weights", (page) => [...new Set(page.weight_versions.map((span) => span.version))].join(", ") || "–"],
    ["incidents", (page) => page.incidents.join(", ") || "–"],
  ];
  const turns = Math.max(...pages.map((page) => page.turns.length));
  const without = (index) => compareLink(run, addresses.filter((_, other) => other !== index));
  const cells = (draw) => pages.map((page, index) => h("div", { class: "column" }, draw(page, index)));
  const line = (name, draw) => [h("div", { class: "row-name" }, name), ...cells(draw)];
  const text = (page, of) => marked(of(page), page === first ? null : of(first));
  const told = h("p", { class: "note", role: "status", hidden: true });
  const add = async (key) => {
    const found = await busy(sameRow(visit, key, addresses[0])).catch((error) => error);
    if (visit.signal.aborted) return;
    if (found?.run) location.hash = compareLink(run, [...addresses, found]);
    told.textContent = visible(found?.message ?? `Run ${key} has no ${addresses[0].validation ? "validation" : "training"} rollout of sample ${addresses[0].sample}.`);
    told.hidden = Boolean(found?.run);
  };
  return [h("div", { class: "title" }, h("h1", {}, pages.length === 1 ? "1 trajectory" : `${pages.length} trajectories`), h("span", { class: "dim" }, pages.length > 1 ? "what differs from the first is marked" : "add another one"), h("span", { class: "spacer" }),
    pages.length < MOST_COMPARED && nameField("other", "add the same row of a run", list.runs.map(({ key }) => key), runs, add),
    download("export", pages.map((page, index) => exported(runs[index], page.address)), `${fileName(run)}-compared.jsonl`, "JSONL")), told,
    !isOne && pages.some((page) => asked(page) !== asked(first)) && h("p", { class: "note" }, "Their prompts differ: these runs may have other data files, in which a sample is another row."),
    h("div", { class: "panel scroll compare", style: { "--columns": pages.length } },
      line("", (page, index) => [!isOne && h("div", {}, visible(runs[index])), h("a", { class: "strong", href: trajectoryLink("trajectory", runs[index], page.address) }, `${page.address.validation ? "v" : "step "}${page.address.step} · ${visible(page.address.sample)} · ${page.address.rollout}`),
        " ", scoreChip(page.reward?.score ?? null), pages.length > 2 && h("a", { class: "button small", href: without(index), "aria-label": "leave this one out" }, "×")]),
      rows.map(([name, of_]) => line(name, (page) => h("span", { class: of_(page) === of_(first) ? null : "differs" }, visible(of_(page))))),
      line("prompt", (page) => folded(h("pre", {}, text(page, asked)), asked(page), LONG)),
      Array.from({ length: turns }, (_, index) => line(`turn ${index + 1}`, (page) => page.turns[index]
        ? folded(h("pre", {}, text(page, (of_) => spoken(of_.turns[index]))), spoken(page.turns[index]), LONG) : h("p", { class: "dim" }, "no such turn"))))];
}

const LONG = 30;
/** Lines of a text that is shown whole. */
const asked = (page) => page.prompt_messages.map((message) => message.content).join("\n");

/** The rollout of the same row in another run: of the same step, or else of its newest step that has the row; null for none. */
async function sameRow(visit, run, { step, validation, sample, rollout }) {
  let page;
  do page = await visit.get("prompt", { run, sample, validation });
  while (page.files_left > 0 && !page.rollouts.some((other) => other.step <= step)); // the newest files are read first
  const isIn = page.rollouts.some((other) => other.step === Number(step));
  const step_ = isIn ? Number(step) : page.rollouts.at(-1)?.step;
  const members = page.rollouts.filter((other) => other.step === step_);
  const found = members.find((other) => other.rollout === Number(rollout)) ?? members[0];
  return found ? { run, step: found.step, validation, sample, rollout: found.rollout } : null;
}

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
