// The configuration of a run, and what differs from that of others.

import { link } from "../api.js";
import { empty, h, number, plural, visible } from "../dom.js";
import { csv, fileName, listed, nameField } from "./parts.js";

const MOST = 4;

export default async function config(visit) {
  const { run, all } = visit.parameters;
  const runs = [...new Set([run, ...listed(visit.parameters.with)])].slice(0, MOST);
  const [list, ...pages] = await Promise.all([visit.get("runs", { limit: 200 }), ...runs.map((key) => visit.get("config", { run: key }))]);
  const columns = pages.map((page) => new Map(leaves(page.values)));
  const to = (others, changes) => link("config", { run, all, with: others.join(","), ...changes });
  const others = runs.slice(1);
  const names = [...new Set(columns.flatMap((column) => [...column.keys()]))];
  const differing = new Set(names.filter((name) => columns.some((column) => column.get(name) !== columns[0].get(name))));
  const isPart = others.length > 0 && !all;
  const shown = isPart ? names.filter((name) => differing.has(name)) : names;
  const rows = shown.map((name) => h("tr", {}, h("th", { scope: "row" }, visible(name)), columns.map((column, index) =>
    h("td", { class: index > 0 && column.get(name) !== columns[0].get(name) ? "differs" : null, "data-name": visible(runs[index]) }, visible(column.get(name) ?? "–")))));
  const filter = h("input", { type: "search", placeholder: "filter keys and values", "aria-label": "Filter", oninput: () =>
    rows.forEach((row) => (row.hidden = !row.textContent.toLowerCase().includes(filter.value.toLowerCase()))) });
  const head = (key, index) => h("th", { scope: "col" }, h("a", { href: link("run", { run: key }) }, visible(key)),
    index > 0 && h("a", { class: "button small", href: to(others.filter((other) => other !== key)), "aria-label": `leave out ${key}` }, "×"));
  return h("div", { class: "stack" },
    h("div", { class: "title" }, h("h1", {}, "Configuration"), h("span", { class: "dim" }, others.length ? `${number(differing.size)} of ${plural(names.length, "key")} differ` : plural(names.length, "key")), h("span", { class: "spacer" }),
      filter, others.length > 0 && h("a", { class: "button", href: to(others, { all: isPart ? 1 : null }) }, isPart ? "All keys" : "Only what differs"),
      runs.length < MOST && nameField("other", "compare with a run", list.runs.map(({ key }) => key), runs, (key) => (location.hash = to([...others, key]))),
      csv(`${fileName(run)}-configuration`, ["key", ...runs], () => shown.map((name) => [name, ...columns.map((column) => column.get(name))]))),
    rows.length ? h("div", { class: "panel flush" }, h("table", { class: "config", style: { "--columns": runs.length } }, h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "key"), runs.map(head))), h("tbody", {}, rows)))
      : names.length ? empty("Their configurations are equal.", h("a", { href: to(others, { all: 1 }) }, "Show all keys"))
      : empty("The run's configuration cannot be read.", "It is in the run's folder as config.json."));
}

/** Dotted keys and their values as text; an empty mapping is a value. */
const leaves = (values, prefix = "") => Object.entries(values).flatMap(([name, value]) =>
  value !== null && typeof value === "object" && !Array.isArray(value) && Object.keys(value).length ? leaves(value, `${prefix}${name}.`) : [[`${prefix}${name}`, typeof value === "string" ? value : JSON.stringify(value)]]);
