// All runs of the outputs folder.

import { link } from "../api.js";
import { lines, spark } from "../charts.js";
import { ago, compact, empty, h, number, panel, plural, roving, seconds, visible } from "../dom.js";
import { csv, isLive, stateChip } from "./parts.js";

const PAGE = 50;
const MOST_COMPARED = 4;
const COLUMNS = ["run", "state", "step", "total_steps", "reward", "accuracy", "failed", "seconds", "tokens", "gpu_seconds"];

export default async function runs(visit) {
  const offset = Number(visit.parameters.offset ?? 0);
  const list = await visit.get("runs", { offset, limit: PAGE });
  if (!list.total)
    return [h("h1", {}, "Runs"), empty(`There is no run in ${list.outputs}.`,
      "Start one with `trackway demo` or `trackway train`, or give another folder: trackway console --outputs DIR. This page looks again when you reload it.")];
  const chosen = new Set((visit.parameters.compare ?? "").split(",").filter(Boolean));
  if (!chosen.size) list.runs.slice(0, 2).forEach((run) => chosen.add(run.key));
  const curves = h("div", { class: "two" });
  const draw = () => {
    const shown = list.runs.filter((run) => chosen.has(run.key));
    const series = (of, points) => shown.map((run) => ({ name: run.key, ...run[of], points }));
    curves.replaceChildren(
      panel("Reward", { aside: key(shown) }, lines({ series: series("reward"), label: "mean reward" })),
      panel("Validation accuracy", { aside: key(shown) }, lines({ series: series("accuracy"), label: "validation accuracy" })));
  };
  draw();
  const live = list.runs.some(isLive);
  if (live) {
    const again = setTimeout(() => !visit.signal.aborted && dispatchEvent(new Event("hashchange")), 5000);
    visit.timers.push(again);
  }
  const body = h("tbody", {}, list.runs.map((run) => row(run, chosen.has(run.key), (on) => {
    on ? chosen.add(run.key) : chosen.delete(run.key);
    while (chosen.size > MOST_COMPARED) chosen.delete([...chosen][0]);
    history.replaceState(null, "", link("runs", { offset: offset || null, compare: [...chosen].join(",") }));
    body.querySelectorAll("input").forEach((box) => (box.checked = chosen.has(box.value)));
    draw();
  })));
  const pages = list.total > PAGE && h("p", { class: "row" },
    offset > 0 && h("a", { class: "button", href: link("runs", { offset: Math.max(0, offset - PAGE) }) }, "← newer"),
    h("span", { class: "dim" }, `${offset + 1} to ${offset + list.runs.length} of ${list.total}`),
    offset + PAGE < list.total && h("a", { class: "button", href: link("runs", { offset: offset + PAGE }) }, "older →"));
  return [
    h("div", { class: "title" }, h("h1", {}, "Runs"), h("span", { class: "dim" }, `${plural(list.total, "run")} in `, h("code", {}, visible(list.outputs))), h("span", { class: "spacer" }),
      csv("runs", COLUMNS, () => list.runs.map((run) => [run.key, run.state, run.step, run.total_steps, run.reward.values.at(-1), run.accuracy.values.at(-1), run.failed, run.seconds, run.tokens, run.gpu_seconds]))),
    curves,
    h("div", { class: "panel flush scroll" }, h("table", { class: "runs" },
      h("thead", {}, h("tr", {}, ["shown", "run", "state", "step", "reward", "accuracy", "failed", "cost", "changed"].map((name, index) => h("th", { scope: "col", class: index > 5 ? "num" : null }, name)))),
      roving(body, "a.open"))),
    pages,
  ];
}

const key = (shown) => h("ul", { class: "legend" }, shown.map((run, index) => h("li", {}, h("i", { class: `swatch s${index}` }), visible(run.key))));

function row(run, isChosen, choose) {
  const accuracy = run.accuracy.values.filter((value) => value !== null);
  return h("tr", { class: "click", onclick: (event) => { if (!event.target.closest("a, input, label")) location.hash = link("run", { run: run.key }); } },
    h("td", {}, h("input", { type: "checkbox", value: run.key, checked: isChosen, "aria-label": `show ${run.key} in the charts`, onchange: (event) => choose(event.target.checked) })),
    h("td", {}, h("a", { class: "open strong", href: link("run", { run: run.key }) }, visible(run.key)),
      run.message && h("div", { class: "dim clip", title: run.message }, visible(run.message))),
    h("td", {}, stateChip(run), run.restarts > 0 && h("span", { class: "dim" }, ` ${plural(run.restarts, "restart")}`)),
    h("td", { class: "nowrap" }, `${number(run.step)} / ${number(run.total_steps)}`),
    h("td", { class: "nowrap" }, spark(run.reward.values, "reward"), " ", h("b", {}, number(run.reward.values.at(-1), 2))),
    h("td", { class: "nowrap" }, accuracy.length > 1 ? [number(accuracy[0], 2), h("span", { class: "dim" }, " → "), h("b", {}, number(accuracy.at(-1), 2))] : h("b", {}, number(accuracy[0], 2))),
    h("td", { class: `num ${run.failed ? "bad-text" : ""}` }, number(run.failed)),
    h("td", { class: "num nowrap" }, seconds(run.seconds), run.tokens !== null && h("div", { class: "dim small" }, `${compact(run.tokens)} tokens`),
      run.gpu_seconds !== null && h("div", { class: "dim small" }, `GPUs ${seconds(run.gpu_seconds)}`)),
    h("td", { class: "num nowrap dim" }, run.changed ? ago(run.changed) : "–"));
}
