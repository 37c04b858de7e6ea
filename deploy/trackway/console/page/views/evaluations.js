// Evaluations of the same rows side by side; each cell leads to the rollouts behind it.

import { compareLink, link } from "../api.js";
import { h, number, panel, plural, roving, tip, visible } from "../dom.js";
import { csv, fileName, range, scored, short } from "./parts.js";

const PAGE = 200;

export default async function evaluations(visit) {
  const { run } = visit.parameters, offset = Number(visit.parameters.offset ?? 0);
  const page = await visit.get("evaluations", { run, offset, limit: PAGE });
  const scale = range(page.tasks.flatMap((task) => task.results.map((result) => result?.score ?? null)));
  const to = (from) => link("evaluations", { run, offset: from || null });
  return h("div", { class: "stack" },
    h("div", { class: "title" }, h("h1", {}, "Rows by evaluation"), h("span", { class: "dim" }, `${plural(page.total, "row")}, the hardest first`), h("span", { class: "spacer" }),
      csv(`${fileName(run)}-rows`, ["sample", "prompt", ...page.columns.map((column) => column.key)], () => page.tasks.map((task) => [task.sample, task.prompt, ...task.results.map((result) => result?.score)]))),
    h("div", { class: "panel flush scroll" }, h("table", { class: "evaluations" },
      h("thead", {},
        h("tr", {}, h("th", { scope: "col" }, "row"), page.columns.map(({ key, evaluation }) => h("th", { scope: "col" },
          h("a", { href: link("run", { run: key }) }, visible(key)), h("div", { class: "dim" }, visible(evaluation.model))))),
        LINES.map(([name, value]) => h("tr", {}, h("th", { scope: "row" }, name), page.columns.map((column) => h("td", {}, value(column)))))),
      roving(h("tbody", {}, page.tasks.map((task) => h("tr", {},
        h("th", { scope: "row", class: "clip", title: visible(task.prompt) }, page.columns.length > 1 ? h("a", { class: "strong", href: sideBySide(page.columns, task), title: "the first rollout of each, side by side" }, visible(task.sample)) : h("span", { class: "dim" }, visible(task.sample)), " ", visible(task.prompt)),
        task.results.map((result, index) => h("td", {}, cell(page.columns[index].key, task, result, scale)))))), "a.cell"))),
    (page.total > PAGE || offset > 0) && h("p", { class: "row" },
      offset > 0 && h("a", { class: "button", href: to(Math.max(0, offset - PAGE)) }, "← harder"),
      h("span", { class: "dim" }, `${number(offset + 1)} to ${number(offset + page.tasks.length)} of ${number(page.total)}`),
      offset + PAGE < page.total && h("a", { class: "button", href: to(offset + PAGE) }, "easier →")),
    panel("", {}, h("p", { class: "dim small" }, "Evaluations of the same files. Each cell has the mean score of a row's rollouts. ± is the standard error over rows; a difference is taken row by row.")));
}

const sideBySide = (columns, { sample, results }) => compareLink(columns[0].key, columns.filter((_, index) => results[index]).map(({ key }) => ({ run: key, step: 0, validation: true, sample, rollout: 0 })));

const estimate = (value) => (value ? `${number(value.value, 3)}${value.std_err === null ? "" : ` ± ${number(value.std_err, 2)}`}` : "–");
const widest = (estimates) => Object.keys(estimates ?? {}).map(Number).sort((a, b) => b - a)[0];

const LINES = [
  ["score", ({ evaluation }) => h("b", {}, estimate(evaluation.summary?.score))],
  ["pass@1", ({ evaluation }) => estimate(evaluation.summary?.pass_at[1])],
  ["pass@n", ({ evaluation: { summary } }) => `${estimate(summary?.pass_at[widest(summary.pass_at)])} (n = ${widest(summary?.pass_at) ?? 0})`],
  ["against the first", ({ difference }) => (difference ? `${difference.value > 0 ? "+" : ""}${estimate(difference)}` : "–")],
];

function cell(run, task, result, scale) {
  if (!result) return h("span", { class: "dim" }, "–");
  const { class: kind, share } = scored(result.score, scale);
  const title = `${result.passed} of ${plural(result.rollouts, "rollout")} passed${result.failed ? `, ${result.failed} failed` : ""}`;
  return tip(h("a", { class: `cell ${kind} ${result.failed ? "error" : ""}`, style: { "--share": share }, "aria-label": `${run}, row ${task.sample}: ${title}`, href: link("prompt", { run, sample: task.sample, val: 1 }) },
    result.score === null ? "!" : short(result.score)), title);
}
