// One request to the running services: a prompt, a tool call, a score, with the token of this browser's user.

import { keepToken, post } from "../api.js";
import { empty, h, number, panel, seconds, visible } from "../dom.js";
import { facts } from "./parts.js";

export default async function tryOut(visit) {
  const offer = await visit.get("try");
  const none = !offer.model && !offer.tools.length && !offer.scorers.length;
  return h("div", { class: "stack" },
    h("div", { class: "title" }, h("h1", {}, "Try"), h("span", { class: "dim" }, "sent to the running services; nothing is kept, and no run sees it")),
    none && empty("No service answers.", "Look at System, or start them with `trackway up`."),
    h("div", { class: "two" }, offer.model && prompt(visit, offer.model), offer.tools.length > 0 && tool(visit, offer.tools), offer.scorers.length > 0 && score(visit, offer.scorers), token()));
}

/** A form whose answer stands below it. ask(values): the request's body, or an error text. */
function form(visit, title, path, fields, ask) {
  const answer = h("div", { class: "answer", role: "status" });
  const send = h("button", { class: "primary" }, "Send");
  const element = h("form", { class: "try", onsubmit: async (event) => {
    event.preventDefault();
    send.disabled = true;
    answer.replaceChildren(h("p", { class: "dim" }, "waiting …"));
    const started = performance.now();
    try {
      const reply = await post(path, ask(Object.fromEntries(new FormData(element))), { signal: visit.signal });
      answer.replaceChildren(h("pre", {}, visible(reply.text) || "∅"), facts([...Object.entries(reply.facts).map(([name, value]) => [name, typeof value === "number" ? number(value, 4) : value]), ["took", seconds((performance.now() - started) / 1000)]]));
    } catch (error) {
      if (!visit.signal.aborted) answer.replaceChildren(h("p", { class: "note bad" }, visible(error.message)));
    } finally {
      send.disabled = false;
    }
  } }, fields, h("p", {}, send), answer);
  return panel(title, {}, element);
}

const labelled = (text, field) => h("label", {}, h("span", {}, text), field);

const prompt = (visit, model) => form(visit, "A prompt", "try/prompt", [
  labelled(`to ${model}`, h("textarea", { name: "prompt", required: true, rows: 4 })),
  h("div", { class: "row" }, labelled("tokens at most", h("input", { name: "max_tokens", type: "number", min: 1, max: 8192, value: 256 })), labelled("temperature", h("input", { name: "temperature", type: "number", min: 0, max: 10, step: "any", value: 1 }))),
], (values) => ({ prompt: values.prompt, max_tokens: Number(values.max_tokens), temperature: Number(values.temperature) }));

function tool(visit, tools) {
  const about = h("p", { class: "dim small" });
  const body = h("textarea", { name: "arguments", rows: 4, required: true, spellcheck: "false" });
  const choose = h("select", { name: "tool", onchange: () => fill() }, tools.map(({ function: { name } }) => h("option", { value: name }, name)));
  const fill = () => {
    const chosen = tools.find(({ function: { name } }) => name === choose.value).function;
    about.textContent = visible(chosen.description);
    body.value = JSON.stringify(Object.fromEntries(Object.entries(chosen.parameters.properties ?? {}).map(([name, schema]) => [name, schema.default ?? (["number", "integer"].includes(schema.type) ? 0 : "")])), null, 2);
  };
  fill();
  return form(visit, "A tool call", "try/tool", [labelled("tool", choose), about, labelled("arguments, as JSON", body),
    labelled("create_kwargs of the row, as JSON", h("input", { name: "create_kwargs", value: "{}", spellcheck: "false" }))],
  (values) => ({ tool: values.tool, arguments: json(values.arguments, "arguments"), create_kwargs: json(values.create_kwargs, "create_kwargs") }));
}

const score = (visit, scorers) => form(visit, "A score", "try/score", [
  labelled("data source", h("select", { name: "data_source" }, [...new Set(scorers.flatMap((scorer) => scorer.data_sources))].map((source) => h("option", {}, source)))),
  labelled("solution", h("textarea", { name: "solution_str", rows: 3 })),
  labelled("ground truth", h("input", { name: "ground_truth" })),
], (values) => values);

function json(text, name) {
  try {
    return JSON.parse(text || "{}");
  } catch (error) {
    throw new Error(`expected JSON in ${name}: ${error.message}`);
  }
}

function token() {
  const field = h("input", { type: "password", name: "token", autocomplete: "off", "aria-label": "Token" });
  const done = h("span", { role: "status" });
  return panel("Your token", {}, h("form", { class: "row", onsubmit: (event) => { event.preventDefault(); keepToken(field.value); field.value = ""; done.textContent = "kept until this tab is closed"; } },
    field, h("button", {}, "Use it"), done), h("p", { class: "dim small" }, "Needed where the services have tokens. It stays in this tab and is sent to this console only, which passes it to the services that it was started with."));
}
