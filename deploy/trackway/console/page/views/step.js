// The rollouts of a step: prompts by rollouts, and how their rewards are spread.

import { link, trajectoryLink } from "../api.js";
import { histogram, pictureButton } from "../charts.js";
import { deviation, empty, h, mean, number, panel, plural, roving, seconds, visible } from "../dom.js";
import { cell, cellChooser, CHOOSING, download, fileName, pager, range, scoreChip, stepLinks } from "./parts.js";

const PAGE = 8192;
/** Rollouts of one reply of the console, and those that its last group has beyond them. */
const BINS = 12;
const SLOWEST = 6;
const SORTS = { order: "as trained", low: "lowest mean first", high: "highest mean first", spread: "widest spread first" };
const FILTERS = { "": "all", flat: "without variance", mixed: "with variance", failed: "with an error" };

export default async function step(visit) {
  const { run, val, sort = "order", show = "", since = "" } = visit.parameters;
  const number_ = Number(visit.parameters.step);
  const offset = Number(visit.parameters.offset ?? 0);
  const [page, about, past] = await Promise.all([
    visit.get("step", { run, step: number_, validation: val ? true : undefined, offset, limit: PAGE }),
    visit.get("run", { run }),
    since && means(visit, { run, step: Number(since), validation: val ? true : undefined, limit: PAGE }),
  ]);
  const measure = page.advantage.some((value) => value !== null) ? "advantage" : "reward";
  const rollouts = page.score.map((score, i) => ({
    score: score ?? page.advantage[i], measure, sample: page.sample_index[i], rollout: page.rollout_n[i], stop: page.stop_reason[i], error: page.error[i],
    turns: page.num_turns[i], tokens: page.tokens[i], seconds: page.seconds[i], parts: Object.fromEntries(Object.entries(page.parts).map(([name, values]) => [name, values[i]])), incidents: page.incidents[i], traced: page.traced[i], isBaseline: page.is_baseline[i],
    address: { step: page.step, validation: page.validation, sample: page.sample_index[i], rollout: page.rollout_n[i] },
  }));
  const counted = sampled(rollouts);
  const bins = binned(counted.map((rollout) => rollout.score));
  const bin = visit.parameters.bin === undefined ? null : Number(visit.parameters.bin);
  const to = (changes) => link("step", { run, step: number_, val, sort, show, since, bin: visit.parameters.bin, offset: offset || null, ...changes });
  const groups = grouped(rollouts, page.prompts, past || new Map());
  const { before, after } = stepLinks(run, about.files, number_, page.validation);
  const other = about.files.find((file) => file.step === number_ && file.validation !== page.validation);
  const matches = (rollout) => bin === null || (!rollout.isBaseline && rollout.score !== null && bins[bin]?.holds(rollout.score));
  const shown = sorted(groups.filter((group) => keep(group, show) && group.rollouts.some(matches) && (!past || group.change !== null)), past ? "change" : sort);
  const scale = range(rollouts.map((rollout) => rollout.score));
  const single = groups.length === rollouts.length;
  const choice = cellChooser(run);
  return h("div", { class: "stack" },
    h("div", { class: "title" }, h("h1", {}, page.validation ? `Validation after step ${page.step}` : `Step ${page.step}`),
      scoreChip(mean(counted.map((rollout) => rollout.score)), scale, measure), h("span", { class: "spacer" }),
      ["csv", "jsonl"].map((format) => download(`export`, { run, step: number_, validation: page.validation ? true : undefined, format }, `${fileName(run)}-${page.validation ? "val-" : ""}step-${number_}.${format}`, format.toUpperCase())),
      other && h("a", { class: "button", href: link("step", { run, step: number_, val: !page.validation }) }, page.validation ? `Training of step ${number_}` : `Validation after step ${number_}`),
      pager(visit, before, after, "step")),
    h("div", { class: "step-top" },
      panel(measure === "reward" ? "Rewards" : "Advantages", { class: "rewards", aside: bin !== null && h("a", { href: to({ bin: null }) }, "show all") },
        bins.length ? histogram({ bins, chosen: bin, pick: (index) => (location.hash = to({ bin: index === bin ? null : index })) }) : empty("No rollout has a reward.", counted.some((rollout) => rollout.error) ? "See the errors in the grid." : "")),
      panel("This step", {}, numbers(counted, groups, single, rollouts.length - counted.length)),
      panel("Slowest rollouts", {}, slowest(run, rollouts))),
    panel(single ? "Rollouts" : "Prompts by rollouts", { class: "rollouts", aside: controls(to, sort, show, single, since, about.files.filter((file) => file.validation === page.validation && file.step !== page.step).map((file) => file.step)) },
      shown.length ? [h("p", { class: "dim small" }, CHOOSING, " ", pictureButton(() => document.querySelector(".rollouts .groups, .rollouts .cells"), `${fileName(run)}-${page.validation ? "val-" : ""}step-${number_}-rollouts`)), choice.row, grid(run, shown, matches, scale, single, page.prompts, choice)]
        : !rollouts.length && page.total ? empty(`This step has ${plural(page.total, "rollout")}, and none after the first ${number(offset)}.`, h("a", { href: to({ offset: null, bin: null }) }, "Show the first ones"))
        : empty(past ? `No prompt of this step is in step ${since} too.` : "No rollout fits.", h("a", { href: to({ bin: null, show: "", since: null }) }, "Show all rollouts of the step"))),
    rollouts.length > 0 && page.total > rollouts.length && h("p", { class: "row" },
      offset > 0 && h("a", { class: "button", href: to({ offset: offset > PAGE ? offset - PAGE : null, bin: null }) }, "← earlier"),
      h("span", { class: "dim" }, `rollouts ${number(page.offset + 1)} to ${number(page.offset + rollouts.length)} of ${number(page.total)}`),
      page.offset + rollouts.length < page.total && h("a", { class: "button", href: to({ offset: offset + PAGE, bin: null }) }, "later →")));
}

/** Bins of equal width; one for each value where there are few. */
export function binned(scores) {
  const known = scores.filter((score) => score !== null);
  if (!known.length) return [];
  const values = [...new Set(known)].sort((a, b) => a - b);
  if (values.length <= 6)
    return values.map((value) => ({ from: value, to: value, count: known.filter((score) => score === value).length, holds: (score) => score === value }));
  const [least, most] = [values[0], values.at(-1)];
  const width = (most - least) / BINS;
  const index = (score) => Math.min(BINS - 1, Math.floor((score - least) / width));
  const counts = Array(BINS).fill(0);
  known.forEach((score) => (counts[index(score)] += 1));
  return counts.map((count, i) => ({ from: least + i * width, to: least + (i + 1) * width, count, holds: (score) => index(score) === i }));
}

/** Without the greedy rollouts, the baselines of ReMax, which the training counts in no mean. */
const sampled = (rollouts) => rollouts.filter((rollout) => !rollout.isBaseline);
const isFlat = (group) => group.spread === 0 && sampled(group.rollouts).length > 1;

/** Rollouts by prompt, in the order of their first one. */
export function grouped(rollouts, prompts, before = new Map()) {
  const groups = new Map();
  for (const rollout of rollouts) {
    if (!groups.has(rollout.sample)) groups.set(rollout.sample, { sample: rollout.sample, prompt: prompts[rollout.sample] ?? "", rollouts: [] });
    groups.get(rollout.sample).rollouts.push(rollout);
  }
  return [...groups.values()].map((group) => {
    const scores = sampled(group.rollouts).map((rollout) => rollout.score);
    const now = mean(scores), past = before.get(group.sample) ?? null;
    return { ...group, mean: now, past, change: now === null || past === null ? null : now - past, spread: deviation(scores), failed: group.rollouts.filter((rollout) => rollout.error).length };
  });
}

/** The mean score of each sample of a step, of all its pages. */
async function means(visit, step) {
  const scores = new Map();
  for (let offset = 0, page; !page || offset < page.total; offset += PAGE) {
    page = await visit.get("step", { ...step, offset });
    page.sample_index.forEach((sample, index) => page.is_baseline[index] || scores.set(sample, [...(scores.get(sample) ?? []), page.score[index]]));
  }
  return new Map([...scores].map(([sample, values]) => [sample, mean(values)]));
}

const keep = (group, show) =>
  show === "flat" ? isFlat(group) : show === "mixed" ? group.spread > 0 : show === "failed" ? group.failed > 0 : true;

function sorted(groups, by) {
  const last = (value) => value ?? Infinity;
  if (by === "low") return [...groups].sort((a, b) => last(a.mean) - last(b.mean));
  if (by === "high") return [...groups].sort((a, b) => last(b.mean === null ? null : -a.mean) - last(a.mean === null ? null : -b.mean) || b.mean - a.mean);
  if (by === "change") return [...groups].sort((a, b) => a.change - b.change);
  if (by === "spread") return [...groups].sort((a, b) => (b.spread ?? -1) - (a.spread ?? -1));
  return groups;
}

function numbers(rollouts, groups, single, baselines) {
  const flat = groups.filter(isFlat);
  const failed = rollouts.filter((rollout) => rollout.error);
  const row = (name, value, kind) => h("div", { class: kind ?? null }, h("dt", {}, name), h("dd", {}, value));
  return h("dl", { class: "numbers" },
    row("rollouts", number(rollouts.length)),
    baselines > 0 && row("greedy baselines, in no mean", number(baselines)),
    !single && row("prompts", number(groups.length)),
    !single && row("without variance", `${flat.length} of ${groups.length}`, flat.length > groups.length / 2 ? "warn-text" : null),
    row("ended by an error", number(failed.length), failed.length ? "bad-text" : null),
    row("retried or recovered", number(rollouts.filter((rollout) => rollout.incidents).length)),
    row("tokens, mean", number(mean(rollouts.map((rollout) => rollout.tokens)))),
    row("time, mean", seconds(mean(rollouts.map((rollout) => rollout.seconds)) || null)),
    row("traced", number(rollouts.filter((rollout) => rollout.traced).length)));
}

function slowest(run, rollouts) {
  const found = rollouts.filter((rollout) => rollout.seconds).sort((a, b) => b.seconds - a.seconds).slice(0, SLOWEST);
  if (!found.length) return empty("No times were recorded.");
  const most = found[0].seconds;
  return h("ol", { class: "slowest" }, found.map((rollout) => h("li", {},
    h("a", { href: trajectoryLink("trajectory", run, rollout.address) }, visible(`${rollout.sample} · ${rollout.rollout}`)),
    h("span", { class: "track" }, h("i", { style: { width: `${(rollout.seconds / most) * 100}%` } })), h("b", {}, seconds(rollout.seconds)), h("span", { class: "dim small cause" }, cause(rollout)))));
}

/** What most of a rollout's time went to. */
function cause({ seconds: total, parts }) {
  const known = Object.values(parts).reduce((sum, value) => sum + (value ?? 0), 0);
  const all = { ...parts, rest: Math.max(0, total - known) };
  const [name, value] = Object.entries(all).sort((a, b) => b[1] - a[1])[0];
  return total ? `${Math.round((value / Math.max(total, known)) * 100)} % ${name}` : "";
}

function controls(to, sort, show, single, since, steps) {
  const select = (label, options, value, name) => h("select", { "aria-label": label, onchange: (event) => (location.hash = to({ [name]: event.target.value })) },
    Object.entries(options).map(([key, text]) => h("option", { value: key, selected: key === value }, text)));
  const filters = single ? { "": "all", failed: "with an error" } : FILTERS;
  return h("span", { class: "row" }, select("Which prompts", filters, show, "show"),
    since ? null : select("Order", SORTS, sort, "sort"),
    steps.length > 0 && sinceField(steps, since, (value) => (location.hash = to({ since: value }))));
}

/** The number of another step, to compare with; a run may have thousands. A number that is none of `steps` is refused. */
function sinceField(steps, since, choose) {
  const field = h("input", { type: "number", min: steps[0], max: steps.at(-1), value: since, placeholder: "step", "aria-label": "Change since a step", onchange: () => {
    const isKnown = !field.value || steps.includes(Number(field.value));
    field.setCustomValidity(isKnown ? "" : `There are no trajectories of step ${field.value} to compare with; choose from ${steps[0]} to ${steps.at(-1)}.`);
    if (field.reportValidity()) choose(field.value);
  }, oninput: () => field.setCustomValidity("") });
  return h("label", { class: "row dim" }, "change since", field);
}

function grid(run, groups, matches, scale, single, prompts, choice) {
  const one = (rollout) => {
    const node = cell(run, rollout.address, { ...rollout, title: words(rollout, single ? prompts : {}) }, scale);
    if (!matches(rollout)) node.classList.add("faded");
    return choice.add(node, rollout.address);
  };
  if (single) return roving(choice.on(h("div", { class: "cells" }, groups.flatMap((group) => group.rollouts.map(one)))), "a.cell");
  return roving(choice.on(h("div", { class: groups.length > 100 ? "groups many" : "groups" }, groups.map((group) => h("div", { class: `group ${isFlat(group) ? "flat" : ""}` },
    h("div", { class: "group-head" }, h("a", { class: "strong", href: link("prompt", { run, sample: group.sample, val: group.rollouts[0].address.validation }), tabindex: -1, title: "this prompt in all steps" }, visible(group.sample)), h("span", { class: "clip", title: group.prompt }, visible(group.prompt))),
    h("div", { class: "cells" }, group.rollouts.map(one)),
    h("div", { class: "group-foot" }, h("span", { class: group.change < 0 ? "bad-text" : null }, group.change === null ? `mean ${number(group.mean, 2)}` : `${number(group.past, 2)} → ${number(group.mean, 2)}, ${group.change < 0 ? "worse" : group.change > 0 ? "better" : "as before"}`),
      h("span", {}, isFlat(group) ? "no variance" : !group.spread ? "" : `± ${number(group.spread, 2)}`)))))), "a.cell");
}

function words(rollout, prompts) {
  const parts = [`sample ${rollout.sample}, rollout ${rollout.rollout}`, rollout.score === null ? `no ${rollout.measure}` : `${rollout.measure} ${number(rollout.score)}`,
    `${rollout.stop}${rollout.error ? `: ${rollout.error}` : ""}`, `${plural(rollout.tokens, "token")}${rollout.seconds ? `, ${seconds(rollout.seconds)}` : ""}`];
  if (rollout.incidents) parts.push(plural(rollout.incidents, "incident"));
  if (rollout.isBaseline) parts.push("greedy baseline of its prompt, in no mean");
  if (rollout.traced) parts.push("traced");
  if (prompts[rollout.sample]) parts.push(visible(prompts[rollout.sample]));
  return parts.join("\n");
}
