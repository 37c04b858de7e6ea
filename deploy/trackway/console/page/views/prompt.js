// One sample over all steps.

import { compareLink, link, trajectoryLink } from "../api.js";
import { lines, REWARDS } from "../charts.js";
import { empty, h, mean, panel, plural, roving, seconds, visible } from "../dom.js";
import { cell, cellChooser, CHOOSING, csv, fileName, growing, range } from "./parts.js";

const COLUMNS = ["step", "rollout", "score", "is_baseline", "stop_reason", "error", "seconds", "answer"];

export default async function prompt(visit) {
  const { run, sample, val } = visit.parameters;
  return growing(visit, "prompt", { run, sample, validation: val ? true : undefined }, (page) => overSteps(page, visit.parameters));
}

function overSteps(page, { run, sample, val }) {
  const steps = new Map();
  for (const rollout of page.rollouts) {
    if (!steps.has(rollout.step)) steps.set(rollout.step, []);
    steps.get(rollout.step).push(rollout);
  }
  const scale = range(page.rollouts.map((rollout) => rollout.score));
  const address = (rollout) => ({ step: rollout.step, validation: page.validation, sample, rollout: rollout.rollout });
  const sampled = (rollouts) => rollouts.filter((rollout) => !rollout.is_baseline);
  const means = [...steps].map(([step, rollouts]) => [step, mean(sampled(rollouts).map((rollout) => rollout.score))]);
  const before = new Map([...steps].map(([step], index, all) => [step, all[index - 1]?.[1]]));
  const choice = cellChooser(run);
  const chosen = spread([...steps.values()].map((rollouts) => rollouts[0]), 4);
  const damaged = page.unreadable.map((message) => h("p", { class: "note bad" }, visible(message)));
  const title = h("div", { class: "title" }, h("h1", {}, visible(`Sample ${sample}`)), h("span", { class: "dim" }, `${plural(page.rollouts.length, "rollout")} in ${plural(steps.size, page.validation ? "validation" : "step")}`),
    h("span", { class: "spacer" }),
    csv(`${fileName(run)}-sample-${sample}`, COLUMNS, () => page.rollouts.map((rollout) => COLUMNS.map((name) => rollout[name]))), chosen.length > 1 && h("a", { class: "button", href: compareLink(run, chosen.map(address)) }, "Compare over steps"));
  if (!page.rollouts.length && page.files_left) return [title, damaged];
  if (!page.rollouts.length)
    return [title, ...damaged, empty(`No ${page.validation ? "validation" : "step"} of this run has the sample.`, h("a", { href: link("run", { run }) }, "Open a step of the run to choose one"))];
  const older = page.truncated && h("p", { class: "note" }, `Only the newest ${plural(page.rollouts.length, "rollout")} are shown. Search by steps for others.`);
  return h("div", { class: "stack" }, title, damaged, older,
    h("article", { class: "message user" }, h("h2", {}, "user"), h("pre", {}, visible(page.prompt))),
    means.filter(([, value]) => value !== null).length > 1 && panel("Mean reward of its rollouts", {}, lines({ series: [{ name: "mean reward", steps: means.map(([step]) => step), values: means.map(([, value]) => value) }], height: 150, span: REWARDS, pick: (step) => (location.hash = link("step", { run, step, val })) })),
    panel("Rollouts by step", { aside: steps.size > 1 && h("span", { class: "dim small" }, "marked: an answer that the step before did not give") }, h("p", { class: "dim small" }, CHOOSING), choice.row, roving(choice.on(h("div", { class: "by-step" }, [...steps].map(([step, rollouts]) => h("div", { class: "by-step-row" },
      h("a", { href: link("step", { run, step, val }) }, `${page.validation ? "v" : "step "}${step}`),
      h("div", { class: "cells" }, rollouts.map((rollout) => choice.add(cell(run, address(rollout), { score: rollout.score, error: rollout.error, isBaseline: rollout.is_baseline, title: `step ${step}, rollout ${rollout.rollout}${rollout.is_baseline ? ", greedy baseline, in no mean" : ""}\n${rollout.stop_reason}, ${seconds(rollout.seconds)}\n${visible(rollout.answer)}` }, scale), address(rollout)))),
      h("span", { class: "clip found dim" }, answers(sampled(rollouts), before.get(step))))))), "a.cell")));
}

/** The answers of a step and how often each was given, the most frequent first; those that `before` lacks are marked. */
function answers(rollouts, before) {
  const counts = new Map();
  rollouts.forEach(({ answer }) => counts.set(answer, (counts.get(answer) ?? 0) + 1));
  const sorted = [...counts].sort((a, b) => b[1] - a[1]).slice(0, 4);
  return sorted.map(([answer, count], index) => {
    const text = `${visible(answer).replaceAll("\n", " ").slice(0, 60)}${count > 1 ? ` ×${count}` : ""}`;
    return [index > 0 && "   ", before?.every((rollout) => rollout.answer !== answer) ? h("mark", {}, text) : text];
  });
}

/** At most `count` of the items: the first, the last, and some between them. */
export function spread(items, count) {
  if (items.length <= count) return items;
  return Array.from({ length: count }, (_, index) => items[Math.round((index * (items.length - 1)) / (count - 1))]);
}
