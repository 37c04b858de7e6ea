// What failed in the whole run, by cause.

import { link, trajectoryLink } from "../api.js";
import { spark } from "../charts.js";
import { empty, h, number, plural, roving, visible } from "../dom.js";
import { csv, fileName, growing } from "./parts.js";

const COLUMNS = ["kind", "code", "tool", "service", "infrastructure", "count", "rollouts", "validation", "message"];
/** By kind: its failures counted, and their heading. */
const KINDS = {
  trajectory: [(count) => `${plural(count, "rollout")} ended by an error`, "Errors that ended rollouts"],
  call: [(count) => plural(count, "failed tool call"), "Failed tool calls, which the model saw"],
  incident: [(count) => `${plural(count, "problem")} recovered from`, "Problems from which rollouts recovered"],
};

export default async function failures(visit) {
  const { run, only = "", service = "" } = visit.parameters;
  const about = await visit.get("run", { run });
  const steps = about.files.filter((file) => !file.validation).map((file) => file.step);
  return growing(visit, "failures", { run }, (page) => causes(page, run, only, service, steps));
}

function causes(page, run, only, service, steps) {
  const damaged = page.unreadable.map((message) => h("p", { class: "note bad" }, visible(message)));
  const kept = page.failures.filter((failure) => (!only || failure.infrastructure === (only === "infrastructure")) && (!service || failure.service === service));
  const services = [...new Set([...page.failures.map((failure) => failure.service), service])].filter(Boolean).sort();
  const filters = { "": "all", infrastructure: "infrastructure", own: "tools and rows" };
  const title = h("div", { class: "title" }, h("h1", {}, "Failures"), h("span", { class: "dim" }, Object.entries(KINDS).map(([kind, [counted]]) => counted(kept.reduce((sum, failure) => sum + (failure.kind === kind ? failure.count : 0), 0))).join(", ")), h("span", { class: "spacer" }),
    services.length > 0 && h("select", { "aria-label": "Which service", onchange: (event) => (location.hash = link("failures", { run, only, service: event.target.value })) },
      ["", ...services].map((name) => h("option", { value: name, selected: name === service }, name || "any service"))),
    h("div", { class: "segments", role: "group", "aria-label": "Which failures" }, Object.entries(filters).map(([name, words]) => h("a", { href: link("failures", { run, only: name, service }), "aria-current": name === only ? "true" : null }, words))),
    kept.length > 0 && csv(`${fileName(run)}-failures`, COLUMNS, () => kept.map((failure) => COLUMNS.map((name) => failure[name]))));
  if (!page.failures.length && page.files_left) return [title, ...damaged];
  if (!page.files) return [title, empty("No trajectories are written yet.", "They appear after the first step, or after the first validation.")];
  if (!page.failures.length) return [title, ...damaged, empty("Nothing failed: no rollout ended by an error, no call failed, nothing was tried again.", h("a", { href: link("run", { run }) }, "Open the run"))];
  if (!kept.length) return [title, ...damaged, empty("None of the failures is of this kind.", h("a", { href: link("failures", { run }) }, "Show all"))];
  return [title, ...damaged, ...Object.entries(KINDS).map(([kind, [, heading]]) => {
    const found = kept.filter((failure) => failure.kind === kind);
    return found.length > 0 && h("section", { class: "panel flush scroll" }, h("table", { class: "causes" },
      h("caption", {}, heading),
      h("thead", {}, h("tr", {}, ["what", "count", "by step", "newest", "search"].map((name, index) => h("th", { scope: "col", class: index === 1 ? "num" : null }, name)))),
      roving(h("tbody", {}, found.map((failure) => row(run, failure, steps))), "a.open")));
  })];
}

function row(run, failure, steps) {
  const { example } = failure;
  const bySteps = new Map(failure.steps.steps.map((step, index) => [step, failure.steps.values[index]]));
  const search = link("search", { run, ...{ trajectory: { error: failure.code, message: failure.pattern }, call: { error: failure.code, tool: failure.tool, message: failure.pattern }, incident: { incident: failure.code, service: failure.called } }[failure.kind] });
  return h("tr", {}, h("td", {}, h("b", {}, failure.code.replaceAll("_", " ")), failure.tool && ` · ${visible(failure.tool)}`, " ",
    failure.service && h("span", { class: "chip" }, failure.service), " ", failure.infrastructure && h("span", { class: "chip warn", title: "a service, a machine or the network failed" }, "infrastructure"), failure.message && h("div", { class: "found" }, visible(failure.message))),
    h("td", { class: "num strong" }, number(failure.count), failure.rollouts !== failure.count && h("div", { class: "dim small" }, `in ${plural(failure.rollouts, "rollout")}`)),
    h("td", { class: "nowrap" }, steps.length > 1 ? spark(steps.map((step) => bySteps.get(step) ?? 0), "failures", { floor: 0 }) : null, failure.validation > 0 && h("div", { class: "dim small" }, `${number(failure.validation)} in validation`)),
    h("td", { class: "nowrap" }, h("a", { class: "open", href: trajectoryLink("trajectory", run, example) }, `${example.validation ? "v" : "step "}${example.step} · ${visible(example.sample)} · ${example.rollout}`)),
    h("td", {}, h("a", { href: search }, "find all")));
}
