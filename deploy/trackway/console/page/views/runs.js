// All runs of the outputs folder. Followed, so that a run that starts now appears.

import { link } from "../api.js";
import { lines, REWARDS, spark } from "../charts.js";
import { ago, compact, empty, h, number, panel, plural, redraw, roving, seconds, visible } from "../dom.js";
import { csv, stateChip } from "./parts.js";

const PAGE = 50;
const MOST_COMPARED = 4;
const EVERY_MS = 5000;
const NONE = ",";
/** `compare` of an address once all runs were unchecked; without `compare` the first two are drawn. */
const COLUMNS = ["run", "state", "step", "total_steps", "reward", "accuracy", "failed", "seconds", "tokens", "gpu_seconds"];

export default async function runs(visit) {
  const offset = Number(visit.parameters.offset ?? 0);
  const query = { offset, limit: PAGE };
  let list = await visit.get("runs", query);
  let chosen = visit.parameters.compare === undefined ? null : new Set(visit.parameters.compare.split(",").filter(Boolean));
  let elsewhere = [];
  const root = h("div", { class: "stack" });
  const compared = () => chosen ?? new Set(list.runs.slice(0, 2).map((run) => run.key));
  const to = (from) => link("runs", { offset: from || null, compare: chosen && ([...chosen].join(",") || NONE) });
  const draw = () => redraw(root, page(list, elsewhere, compared(), offset, to, choose));
  const choose = (key, on) => {
    chosen = compared();
    on ? chosen.add(key) : chosen.delete(key);
    while (chosen.size > MOST_COMPARED) chosen.delete([...chosen][0]);
    history.replaceState(null, "", to(offset));
    draw();
  };
  const load = async (next) => {
    list = next;
    elsewhere = (await Promise.all([...compared()].filter((key) => !list.runs.some((run) => run.key === key)).map((key) => summary(visit, key)))).filter(Boolean);
  };
  await load(list);
  draw();
  let drawn = JSON.stringify([list, elsewhere]);
  visit.follow("runs", query, async (next) => {
    await load(next);
    const now = JSON.stringify([list, elsewhere]);
    if (now !== drawn) draw();
    drawn = now;
    root.querySelectorAll("[data-changed]").forEach((node) => (node.textContent = ago(Number(node.dataset.changed))));
  }, { every: EVERY_MS });
  return root;
}

/** A run that is not on this page of the list; null if there is no such run. */
const summary = (visit, key) => visit.get("run", { run: key }).then((page) => page.summary, (error) => {
  if (error.status === 404) return null;
  throw error;
});

function page(list, elsewhere, chosen, offset, to, choose) {
  if (!list.total)
    return [h("h1", {}, "Runs"), empty(`There is no run in ${list.outputs}.`,
      "Start one with `trackway demo` or `trackway train`, or give another folder: trackway console --outputs DIR. A run that starts is shown here at once.")];
  const shown = [...list.runs, ...elsewhere].filter((run) => chosen.has(run.key));
  const series = (of, points) => shown.map((run) => ({ name: run.key, ...run[of], points }));
  const key = () => h("ul", { class: "legend" }, shown.map((run, index) => h("li", {}, h("i", { class: `swatch s${index}` }), visible(run.key),
    elsewhere.includes(run) && h("button", { type: "button", class: "plain", "aria-label": `leave out ${run.key}`, onclick: () => choose(run.key, false) }, "×"))));
  const title = h("div", { class: "title" }, h("h1", {}, "Runs"), h("span", { class: "dim" }, `${plural(list.total, "run")} in `, h("code", {}, visible(list.outputs))), h("span", { class: "spacer" }),
    csv("runs", COLUMNS, () => list.runs.map((run) => [run.key, run.state, run.step, run.total_steps, run.reward.values.at(-1), run.accuracy.values.at(-1), run.failed, run.seconds, run.tokens, run.gpu_seconds])));
  if (!list.runs.length) return [title, empty(`There are ${plural(list.total, "run")}, and none after the first ${number(offset)}.`, h("a", { href: to(0) }, "Show the newest"))];
  return [title,
    h("div", { class: "two" },
      panel("Reward", { aside: key() }, lines({ series: series("reward"), label: "mean reward", span: REWARDS })),
      panel("Validation accuracy", { aside: key() }, lines({ series: series("accuracy"), label: "validation accuracy", span: REWARDS }))),
    h("div", { class: "panel flush scroll" }, h("table", { class: "runs" },
      h("thead", {}, h("tr", {}, ["shown", "run", "state", "step", "reward", "accuracy", "failed rollouts", "cost", "changed"].map((name, index) => h("th", { scope: "col", class: index > 5 ? "num" : null }, name)))),
      roving(h("tbody", {}, list.runs.map((run) => row(run, chosen.has(run.key), (on) => choose(run.key, on)))), "a.open"))),
    (list.total > PAGE || offset > 0) && h("p", { class: "row" },
      offset > 0 && h("a", { class: "button", href: to(Math.max(0, offset - PAGE)) }, "← newer"),
      h("span", { class: "dim" }, `${offset + 1} to ${offset + list.runs.length} of ${list.total}`),
      offset + PAGE < list.total && h("a", { class: "button", href: to(offset + PAGE) }, "older →"))];
}

function row(run, isChosen, choose) {
  const [rewards, accuracy] = [run.reward, run.accuracy].map(({ values }) => values.filter((value) => value !== null));
  return h("tr", { class: "click", onclick: (event) => { if (!event.target.closest("a, input, label")) location.hash = link("run", { run: run.key }); } },
    h("td", {}, h("input", { type: "checkbox", value: run.key, checked: isChosen, "aria-label": `show ${run.key} in the charts`, onchange: (event) => choose(event.target.checked) })),
    h("td", {}, h("a", { class: "open strong", href: link("run", { run: run.key }) }, visible(run.key)),
      run.message && h("div", { class: "dim clip", title: run.message }, visible(run.message))),
    h("td", {}, stateChip(run), run.restarts > 0 && h("span", { class: "dim" }, ` ${plural(run.restarts, "restart")}`)),
    h("td", { class: "nowrap", "data-name": "step" }, `${number(run.step)} / ${number(run.total_steps)}`),
    h("td", { class: "nowrap", "data-name": "reward" }, rewards.length > 0 && [spark(run.reward.values, "reward"), " "], h("b", {}, number(rewards.at(-1), 2))),
    h("td", { class: "nowrap", "data-name": "accuracy" }, accuracy.length > 1 ? [number(accuracy[0], 2), h("span", { class: "dim" }, " → "), h("b", {}, number(accuracy.at(-1), 2))] : h("b", {}, number(accuracy[0], 2))),
    h("td", { class: `num ${run.failed ? "bad-text" : ""}`, "data-name": "failed rollouts" }, number(run.failed)),
    h("td", { class: "num nowrap" }, seconds(run.seconds), run.tokens !== null && h("div", { class: "dim small" }, `${compact(run.tokens)} tokens`),
      run.gpu_seconds !== null && h("div", { class: "dim small" }, `GPUs ${seconds(run.gpu_seconds)}`)),
    h("td", { class: "num nowrap dim", "data-changed": run.changed || null }, run.changed ? ago(run.changed) : "–"));
}
