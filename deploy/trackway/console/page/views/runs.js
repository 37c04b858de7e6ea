// All runs of the outputs folder. Followed, so that a run that starts now appears.

import { link } from "../api.js";
import { lines, REWARDS, spark } from "../charts.js";
import { ago, busy, compact, empty, h, number, panel, plural, redraw, roving, seconds, visible } from "../dom.js";
import { csv, listed, nameField, stateChip, stepOf } from "./parts.js";

const PAGE = 50;
const MOST_COMPARED = 8, MOST_METRICS = 6;
const EVERY_MS = 5000;
const NONE = ",";
/** `compare` of an address once all runs were unchecked; without `compare` the first two are drawn. */
const COLUMNS = ["run", "state", "step", "total_steps", "reward", "accuracy", "failed", "seconds", "tokens", "gpu_seconds"];

export default async function runs(visit) {
  const offset = Number(visit.parameters.offset ?? 0);
  const query = { offset, limit: PAGE };
  let list = await visit.get("runs", query);
  let chosen = visit.parameters.compare === undefined ? null : new Set(listed(visit.parameters.compare));
  let metrics = listed(visit.parameters.metrics).slice(0, MOST_METRICS);
  let elsewhere = [], curves = new Map();
  const root = h("div", { class: "stack" });
  const compared = () => chosen ?? new Set(list.runs.slice(0, 2).map((run) => run.key));
  const to = (from) => link("runs", { offset: from || null, compare: chosen && ([...chosen].join(",") || NONE), metrics: metrics.join(",") });
  const draw = () => redraw(root, page(list, elsewhere, compared(), offset, to, choose, { metrics, curves, show }));
  const changed = async () => {
    history.replaceState(null, "", to(offset));
    draw();
    await busy(measure()).catch(() => {}); // the next poll says why
    draw();
  };
  const choose = (key, on) => {
    chosen = compared();
    on ? chosen.add(key) : chosen.delete(key);
    while (chosen.size > MOST_COMPARED) chosen.delete([...chosen][0]);
    return changed();
  };
  const show = (next) => {
    metrics = next.slice(-MOST_METRICS);
    return changed();
  };
  /** The names of the metrics of the chosen runs, and the values of those that are shown. */
  const measure = async () => {
    const chosenRuns = [...list.runs, ...elsewhere].filter(({ key }) => compared().has(key));
    curves = new Map(await Promise.all(chosenRuns.map(async ({ key, step }) => {
      const known = curves.get(key);
      const [names, found] = await Promise.all([known?.step === step ? known.names : visit.get("run", { run: key }).then((about) => Object.keys(about.metrics)),
        metrics.length ? visit.get("metrics", { run: key, name: metrics }) : { series: {} }]);
      return [key, { step, names, series: found.series }];
    })));
  };
  const load = async (next) => {
    list = next;
    elsewhere = (await Promise.all([...compared()].filter((key) => !list.runs.some((run) => run.key === key)).map((key) => summary(visit, key)))).filter(Boolean);
    await measure();
  };
  await load(list);
  draw();
  let drawn = JSON.stringify([list, elsewhere, [...curves]]);
  visit.follow("runs", query, async (next) => {
    await load(next);
    const now = JSON.stringify([list, elsewhere, [...curves]]);
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

function page(list, elsewhere, chosen, offset, to, choose, over) {
  if (!list.total)
    return [h("h1", {}, "Runs"), empty(`There is no run in ${list.outputs}.`,
      "Start one with `trackway demo` or `trackway train`, or give another folder: trackway console --outputs DIR. A run that starts is shown here at once.")];
  const shown = [...list.runs, ...elsewhere].filter((run) => chosen.has(run.key));
  const series = (of, points) => shown.map((run) => ({ name: run.key, ...run[of], points }));
  const key = () => h("ul", { class: "legend" }, shown.map((run, index) => h("li", {}, h("i", { class: `swatch s${index}` }), visible(run.key),
    elsewhere.includes(run) && h("button", { type: "button", class: "plain", "aria-label": `leave out ${run.key}`, onclick: () => choose(run.key, false) }, "×"))));
  const title = h("div", { class: "title" }, h("h1", {}, "Runs"), h("span", { class: "dim" }, `${plural(list.total, "run")} in `, h("code", {}, visible(list.outputs))), h("span", { class: "spacer" }),
    shown.length > 1 && h("a", { class: "button", href: link("config", { run: shown[0].key, with: shown.slice(1).map((run) => run.key).join(",") }) }, "Compare configurations"),
    csv("runs", COLUMNS, () => list.runs.map((run) => [run.key, run.state, run.step, run.total_steps, run.reward.values.at(-1), run.accuracy.values.at(-1), run.failed, run.seconds, run.tokens, run.gpu_seconds])));
  if (!list.runs.length) return [title, empty(`There are ${plural(list.total, "run")}, and none after the first ${number(offset)}.`, h("a", { href: to(0) }, "Show the newest"))];
  return [title,
    h("div", { class: "two" },
      panel("Reward", { aside: key() }, lines({ series: series("reward"), label: "mean reward", span: REWARDS })),
      panel("Validation accuracy", { aside: key() }, lines({ series: series("accuracy"), label: "validation accuracy", span: REWARDS }))),
    shown.length > 0 && metricsPanel(shown.map((run) => run.key), key, over),
    h("div", { class: "panel flush scroll" }, h("table", { class: "runs" },
      h("thead", {}, h("tr", {}, ["shown", "run", "state", "step", "reward", "accuracy", "failed rollouts", "cost", "changed"].map((name, index) => h("th", { scope: "col", class: index > 5 ? "num" : null }, name)))),
      roving(h("tbody", {}, list.runs.map((run) => row(run, chosen.has(run.key), (on) => choose(run.key, on)))), "a.open"))),
    (list.total > PAGE || offset > 0) && h("p", { class: "row" },
      offset > 0 && h("a", { class: "button", href: to(Math.max(0, offset - PAGE)) }, "← newer"),
      h("span", { class: "dim" }, `${offset + 1} to ${offset + list.runs.length} of ${list.total}`),
      offset + PAGE < list.total && h("a", { class: "button", href: to(offset + PAGE) }, "older →"))];
}

/** Any metric over the chosen runs, each in its own chart. */
function metricsPanel(runs, key, { metrics, curves, show }) {
  const names = [...new Set(runs.flatMap((run) => curves.get(run)?.names ?? []))].sort();
  const line = (run, name) => curves.get(run)?.series[name] ?? { steps: [], values: [] };
  const rows = () => runs.flatMap((run) => metrics.flatMap((name) => line(run, name).steps.map((step, index) => [run, name, step, line(run, name).values[index]])));
  return panel("Metrics over runs", { aside: h("span", { class: "row" }, nameField("metric", "add a metric: actor/…, timing_s/…", names, metrics, (name) => show([...metrics, name])), metrics.length > 0 && csv("runs-metrics", ["run", "metric", "step", "value"], rows)) },
    metrics.length ? [key(), h("div", { class: "two" }, metrics.map((name) => h("figure", {},
      h("figcaption", {}, h("span", { class: "clip", title: name }, visible(name)), h("button", { type: "button", class: "plain", "aria-label": `remove ${name}`, onclick: () => show(metrics.filter((other) => other !== name)) }, "×")),
      lines({ series: runs.map((run) => ({ name: run, ...line(run, name) })), label: name }))))]
      : h("p", { class: "dim small" }, `Choose a metric to draw it over the chosen runs, at most ${MOST_COMPARED}.`));
}

function row(run, isChosen, choose) {
  const [rewards, accuracy] = [run.reward, run.accuracy].map(({ values }) => values.filter((value) => value !== null));
  return h("tr", { class: "click", onclick: (event) => { if (!event.target.closest("a, input, label")) location.hash = link("run", { run: run.key }); } },
    h("td", {}, h("input", { type: "checkbox", value: run.key, checked: isChosen, "aria-label": `show ${run.key} in the charts`, onchange: (event) => choose(event.target.checked) })),
    h("td", {}, h("a", { class: "open strong", href: link("run", { run: run.key }) }, visible(run.key)),
      run.message && h("div", { class: "dim clip", title: run.message }, visible(run.message))),
    h("td", {}, stateChip(run), run.restarts > 0 && h("span", { class: "dim" }, ` ${plural(run.restarts, "restart")}`),
      run.policy && h("div", { class: "dim small clip", title: run.policy }, "policy ", visible(run.policy))),
    h("td", { class: "nowrap", "data-name": "step" }, stepOf(run, " / ")),
    h("td", { class: "nowrap", "data-name": "reward" }, rewards.length > 0 && [spark(run.reward.values, "reward"), " "], h("b", {}, number(rewards.at(-1), 2))),
    h("td", { class: "nowrap", "data-name": "accuracy" }, accuracy.length > 1 ? [number(accuracy[0], 2), h("span", { class: "dim" }, " → "), h("b", {}, number(accuracy.at(-1), 2))] : h("b", {}, number(accuracy[0], 2))),
    h("td", { class: `num ${run.failed ? "bad-text" : ""}`, "data-name": "failed rollouts" }, number(run.failed)),
    h("td", { class: "num nowrap" }, seconds(run.seconds), run.tokens !== null && h("div", { class: "dim small" }, `${compact(run.tokens)} tokens`),
      run.gpu_seconds !== null && h("div", { class: "dim small" }, `GPUs ${seconds(run.gpu_seconds)}`)),
    h("td", { class: "num nowrap dim", "data-changed": run.changed || null }, run.changed ? ago(run.changed) : "–"));
}
