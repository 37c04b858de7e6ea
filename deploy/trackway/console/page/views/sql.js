// SQL over one run: ready-made questions, a query of one's own, and its rows, whose first cell opens what they are of.

import { link, trajectoryLink } from "../api.js";
import { empty, h, number, plural, visible } from "../dom.js";
import { csv, queries } from "./parts.js";

const TABLES = {
  trajectories: "step, validation, sample_index, rollout_n, score, is_baseline, stop_reason, num_turns, error, turns, timings, incidents, response_ids, response_logprobs, weight_versions, …",
  calls: "step, sample_index, rollout_n, validation, score, tool, seconds, reward, error, result",
  tokens: "step, sample_index, rollout_n, place, token_id, sampler_logprob, logprob, entropy, advantage, clipped, kept",
  token_values: "step, sample_index, rollout_n, row, status, logprobs, entropies, advantages, clipped, kept",
};

/** Questions with their SQL, from the run's steps. */
function ready(steps) {
  const [first, last] = [steps[0] ?? 1, steps.at(-1) ?? 1];
  return [
    ["prompts that got worse", `SELECT sample_index, avg(score) FILTER (step = ${first}) AS before, avg(score) FILTER (step = ${last}) AS after, after - before AS change\nFROM trajectories WHERE NOT validation AND is_baseline IS NOT TRUE AND step IN (${first}, ${last})\nGROUP BY sample_index HAVING change < 0 ORDER BY change`],
    ["sampler against learner", `SELECT step, sample_index, rollout_n, place, token_id, sampler_logprob, logprob, abs(sampler_logprob - logprob) AS difference\nFROM tokens WHERE NOT isnan(logprob) AND step = ${last} ORDER BY difference DESC LIMIT 100`],
    ["dropped, by reason", "SELECT step, status, count(*) AS rollouts FROM token_values WHERE row = 0 AND status <> 'used'\nGROUP BY step, status ORDER BY step DESC, rollouts DESC"],
    ["slowest calls", "SELECT step, sample_index, rollout_n, tool, seconds, error FROM calls ORDER BY seconds DESC LIMIT 100"],
    ["tools by step", "SELECT step, tool, count(*) AS calls, avg(seconds) AS seconds, count(error) AS failed FROM calls\nWHERE NOT validation GROUP BY step, tool ORDER BY step DESC, tool"],
  ];
}

export default async function sql(visit) {
  const { run, query = "" } = visit.parameters;
  const about = await visit.get("run", { run });
  const steps = about.files.filter((file) => !file.validation).map((file) => file.step);
  const results = h("div", { class: "stack" });
  const field = h("textarea", { name: "query", spellcheck: "false", "aria-label": "SQL", "data-focus": query ? null : true, placeholder: "SELECT step, avg(score) FROM trajectories GROUP BY step ORDER BY step" });
  field.value = query;
  const to = (text) => link("sql", { run, query: text });
  const ask = () => {
    const target = to(field.value.trim());
    if (target === location.hash) dispatchEvent(new Event("hashchange"));
    else location.hash = target;
  };
  field.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
    event.preventDefault();
    ask();
  });
  if (query) read(visit, run, query, results);
  else results.append(tables());
  return h("div", { class: "stack" },
    h("div", { class: "title" }, h("h1", {}, "SQL"), h("span", { class: "dim" }, "one SELECT over the run's trajectories, in DuckDB's language")),
    queries("sql", ready(steps).map(([name, text]) => [name, to(text), text]), query ? [query.replaceAll(/\s+/g, " ").slice(0, 60), { query }] : null, ({ query: text }) => to(text), [["Search", link("search", { run })]]),
    h("form", { class: "panel sql", onsubmit: (event) => { event.preventDefault(); ask(); } }, field,
      h("p", { class: "row" }, h("button", { class: "primary" }, "Run"), h("span", { class: "dim small" }, "Ctrl+Enter"))),
    results);
}

const tables = () => h("section", { class: "panel" }, h("h2", {}, "Tables"), h("dl", { class: "facts" }, Object.entries(TABLES).map(([name, columns]) => [h("dt", {}, h("code", {}, name)), h("dd", {}, columns)])),
  h("p", { class: "dim small" }, "turns, error and timings are JSON: json_extract_string(turns, '$[*].calls[*].tool'). tokens and token_values have rows in runs with trackway.save_token_values=true."));

/** Runs the query, with a button that cancels it. */
async function read(visit, run, query, results) {
  const controller = new AbortController();
  visit.signal.addEventListener("abort", () => controller.abort());
  const started = performance.now();
  const stop = h("button", { type: "button", onclick: () => controller.abort() }, "Cancel");
  const state = h("span", { role: "status" }, "running …");
  results.append(h("p", { class: "row" }, state, stop));
  try {
    const page = await visit.get("sql", { run, query }, { signal: controller.signal });
    state.textContent = `${plural(page.rows.length, "row")} in ${((performance.now() - started) / 1000).toFixed(2)} s`;
    results.append(...page.unreadable.map((message) => h("p", { class: "note bad" }, visible(message))));
    const lacks = lacking(page);
    if (lacks) results.append(h("p", { class: "note" }, `${lacks}, here and in the file.`));
    if (page.rows.length) results.append(table(run, page), h("p", {}, csv("query", page.columns.map(({ name }) => name), () => (lacks ? [...page.rows, [`# ${lacks}`]] : page.rows))));
    else results.append(empty("No row fits."));
  } catch (error) {
    if (visit.signal.aborted) return;
    state.textContent = error.name === "AbortError" ? "cancelled" : "";
    if (error.name !== "AbortError") results.append(h("p", { class: "note bad", role: "alert" }, visible(error.message)), tables());
  } finally {
    stop.remove();
  }
}

/** What a reply and its file leave out; empty for nothing. */
const lacking = ({ rows, truncated, cut }) => [truncated && `Only the first ${plural(rows.length, "row")} of more: add LIMIT and OFFSET for others`, cut && "Texts of over 2,000 characters end with … after these"].filter(Boolean).join("; ");

function table(run, { columns, rows }) {
  const at = Object.fromEntries(columns.map(({ name }, index) => [name, index]));
  const isNumber = columns.map((_, index) => rows.every((row) => row[index] === null || typeof row[index] === "number"));
  return h("div", { class: "panel flush scroll" }, h("table", { class: "sql-rows" },
    h("thead", {}, h("tr", {}, columns.map(({ name, type }, index) => h("th", { scope: "col", class: isNumber[index] ? "num" : null, title: type }, visible(name))))),
    h("tbody", {}, rows.map((row) => {
      const href = opens(run, at, row);
      return h("tr", {}, row.map((value, index) => {
        const text = value === null ? h("span", { class: "dim" }, "null") : typeof value === "number" ? number(value, 5) : visible(value);
        return h("td", { class: isNumber[index] ? "num" : null }, index === 0 && href ? h("a", { class: "open strong", href }, text) : text);
      }));
    }))));
}

/** The page of what a row is about: a token, a trajectory, a prompt or a step. */
function opens(run, at, row) {
  const value = (name) => (at[name] === undefined ? undefined : row[at[name]]);
  const [step, sample, rollout, validation, place] = ["step", "sample_index", "rollout_n", "validation", "place"].map(value);
  const isKnown = (part) => part !== undefined && part !== null;
  if ([step, sample, rollout].every(isKnown)) {
    const address = { step, sample, rollout, validation: validation === true };
    return isKnown(place) ? link("tokens", { run, step, sample, rollout, place, tint: "difference" }) : trajectoryLink("trajectory", run, address);
  }
  if (isKnown(sample)) return link("prompt", { run, sample, val: validation === true });
  return isKnown(step) ? link("step", { run, step, val: validation === true }) : null;
}
