// Search over the trajectories of a run, the newest step first; hits appear as they come.

import { link, trajectoryLink } from "../api.js";
import { empty, h, number, panel, plural, roving, visible } from "../dom.js";
import { chooser, csv, fileName, queries, scoreChip } from "./parts.js";

const FIELDS = ["text", "regex", "tool", "tool_right", "error", "message", "incident", "service", "stop_reason", "least", "most", "first_step", "last_step", "validation", "span"];
const INCIDENTS = ["retried", "generation_cut", "weights_behind", "prompt_cut", "tool_failed", "tool_timeout", "instance_lost", "replica_lost"];
const ENOUGH = 50;
const COLUMNS = ["step", "validation", "sample_index", "rollout_n", "score", "stop_reason", "error", "tools", "found"];
const READY = [
  ["tool right, answer wrong", { tool_right: 1, most: 0 }, "a reward of 0 or less, though a call got a reward from its tool, or its result is the answer of a better rollout of the prompt"],
  ["response cut off", { stop_reason: "max_response" }, "the response reached its limit"],
  ["out of turns", { stop_reason: "max_turns" }, "the model still called tools"],
];

export default async function search(visit) {
  const { run } = visit.parameters;
  const about = await visit.get("run", { run });
  const asked = Object.fromEntries(FIELDS.filter((name) => visit.parameters[name]).map((name) => [name, visit.parameters[name]]));
  const results = h("div", { class: "stack" });
  const page = h("div", { class: "stack" }, h("div", { class: "title" }, h("h1", {}, "Search"), h("span", { class: "dim" }, `${plural(about.files.length, "file")} of trajectories`)), 
    queries(READY.map(([name, parameters, title]) => [name, link("search", { run, ...parameters }), title]), Object.keys(asked).length ? [words(asked), asked] : null,
      (parameters) => link("search", { run, ...parameters })),
    form(run, asked, about.metrics), results);
  if (!about.files.length) results.append(empty("No trajectories are written yet.", "They appear after the first step, or after the first validation."));
  else if (Object.keys(asked).length) read(visit, asked, results);
  else results.append(empty("Give a text, a tool, an error or a range of rewards.", "All that is given must fit; the newest step comes first."));
  return page;
}

/** A saved query's name: its values. */
const words = (asked) => Object.entries(asked).map(([name, value]) => (name === "text" ? value : `${name.replaceAll("_", " ")} ${value}`)).join(", ").slice(0, 60);

function form(run, asked, metrics) {
  const tools = [...new Set(Object.keys(metrics).map((name) => name.match(/^tools\/(.+)\/calls$/)?.[1]).filter(Boolean))];
  const field = (name, label, attributes = {}) => h("label", {}, h("span", {}, label), h("input", { name, value: asked[name] ?? "", autocomplete: "off", ...attributes }));
  const choice = (name, label, options) => h("label", {}, h("span", {}, label), h("select", { name }, options.map(([value, text]) => h("option", { value, selected: (asked[name] ?? "") === value }, text))));
  return h("form", { class: "panel search", onsubmit: (event) => {
    event.preventDefault();
    const values = Object.fromEntries([...new FormData(event.target)].map(([name, value]) => [name, name === "text" ? value : value.trim()]));
    const target = link("search", { run, ...values });
    if (target === location.hash) dispatchEvent(new Event("hashchange"));
    else location.hash = target;
  } },
    field("text", "text", { type: "search", class: "wide", "data-focus": true, placeholder: "in messages, tool calls and errors" }),
    choice("regex", "text is", [["", "plain"], ["1", "an expression"]]),
    choice("tool", "tool", [["", "any"], ...tools.map((tool) => [tool, tool])]),
    choice("tool_right", "a tool's result", [["", "any"], ["1", "was right"]]),
    field("error", "error code", { placeholder: "tool_timeout" }),
    asked.service && field("service", "by a call of", { maxlength: 100 }),
    asked.message && field("message", "its message, N for a number", { class: "wide", maxlength: 300 }),
    choice("incident", "recovered from", [["", "any"], ...INCIDENTS.map((incident) => [incident, incident.replaceAll("_", " ")])]),
    choice("stop_reason", "ended by", [["", "any"], ...["answered", "max_turns", "max_response", "max_prompt", "bad_call", "environment_done", "error"].map((reason) => [reason, reason])]),
    field("least", "reward from", { type: "number", step: "any" }), field("most", "reward to", { type: "number", step: "any" }),
    field("first_step", "step from", { type: "number", min: 0 }), field("last_step", "step to", { type: "number", min: 0 }),
    field("span", "span", { maxlength: 300, placeholder: "execute_tool search*", title: "name of a span of its trace in MLflow, an agent's framework's too; * matches any text" }),
    choice("validation", "rollouts of", [["", "training and validation"], ["false", "training"], ["true", "validation"]]),
    h("button", { class: "primary" }, "Search"));
}

/** Asks page by page until there are enough hits, the end is reached or the search is cancelled. */
async function read(visit, asked, results) {
  const { run } = visit.parameters;
  const list = h("tbody");
  const state = h("span", { role: "status" });
  const more = h("button", { type: "button", hidden: true, onclick: () => go() }, "More");
  const stop = h("button", { type: "button", onclick: () => asking.abort() }, "Cancel");
  const table = h("div", { class: "panel flush scroll", hidden: true }, h("table", { class: "hits" },
    h("thead", {}, h("tr", {}, ["", "step", "rollout", "reward", "ended by", "tools", "found"].map((name) => h("th", { scope: "col" }, name)))), list));
  const damaged = h("div");
  const found = [];
  const choice = chooser(run, () => list.querySelectorAll("input").forEach((box, index) => (box.checked = choice.has(found[index].address))));
  const save = csv(`${fileName(run)}-hits`, COLUMNS, () => found.map(({ address, ...hit }) => [address.step, address.validation, address.sample, address.rollout, hit.score, hit.stop_reason, hit.error, hit.tools.join(" "), hit.snippet]));
  save.hidden = true;
  results.append(h("p", { class: "row" }, state, stop, more, save), choice.row, damaged, table);
  let cursor, hits = 0, files = 0, asking;
  visit.signal.addEventListener("abort", () => asking.abort());
  const go = async () => {
    asking = new AbortController();
    stop.hidden = false;
    more.hidden = true;
    const enough = hits + ENOUGH;
    do {
      state.textContent = `searching: ${plural(hits, "hit")} in ${plural(files, "file")} …`;
      let page;
      try {
        page = await visit.get("search", { run, ...asked, limit: enough - hits, cursor }, { signal: asking.signal });
      } catch (error) {
        if (visit.signal.aborted) return;
        if (asking.signal.aborted) break;
        stop.hidden = true;
        state.textContent = visible(error.message);
        return;
      }
      list.append(...page.hits.map((hit) => row(run, hit, choice)));
      found.push(...page.hits);
      save.hidden = !found.length;
      roving(list, "a.open");
      damaged.append(...page.unreadable.map((message) => h("p", { class: "note bad" }, visible(message))));
      hits += page.hits.length;
      files += page.files;
      cursor = page.cursor;
      table.hidden = !hits;
    } while (cursor && hits < enough);
    const isCancelled = asking.signal.aborted, isWhole = !cursor && !isCancelled;
    stop.hidden = true;
    more.hidden = isWhole;
    state.textContent = !hits && isWhole ? "Nothing fits. Give less, or a wider range." : `${plural(hits, "hit")}${isWhole ? "" : " so far"} in ${plural(files, "file")}${isCancelled ? ", cancelled" : ""}`;
  };
  go();
}

function row(run, hit, choice) {
  const { address } = hit;
  return h("tr", { class: "click", onclick: (event) => { if (!event.target.closest("a, input")) location.hash = trajectoryLink("trajectory", run, address); } },
    h("td", {}, h("input", { type: "checkbox", "aria-label": `choose step ${address.step}, ${visible(address.sample)} · ${address.rollout} to compare`, checked: choice.has(address), onchange: () => choice.toggle(address) })),
    h("td", {}, `${address.validation ? "v" : ""}${address.step}`),
    h("td", { class: "nowrap" }, h("a", { class: "open strong", href: trajectoryLink("trajectory", run, address) }, visible(`${address.sample} · ${address.rollout}`))),
    h("td", { class: "nowrap" }, scoreChip(hit.score)),
    h("td", {}, hit.stop_reason, hit.error && h("div", { class: "bad-text" }, hit.error)),
    h("td", {}, visible(hit.tools.join(", "))), h("td", { class: "found" }, marked(visible(hit.snippet), visible(hit.match))));
}

function marked(snippet, match) {
  const at = match ? snippet.indexOf(match) : -1;
  return at < 0 ? snippet : [snippet.slice(0, at), h("mark", {}, match), snippet.slice(at + match.length)];
}
