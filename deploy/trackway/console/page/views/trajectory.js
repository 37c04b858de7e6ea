// One trajectory: its conversation with tool calls, where its time went, and its reward.

import { addressed, compareLink, link, trajectoryLink } from "../api.js";
import { colour } from "../charts.js";
import { busy, h, number, panel, plural, redraw, seconds, tip, visible } from "../dom.js";
import { markdown } from "../markdown.js";
import { cell, download, exported, facts, fileName, folded, outside, pager, range, scoreChip } from "./parts.js";

const MOST_OPEN = 12, OPEN_FIRST = 5, OPEN_LAST = 3;
/** Turns that are all open at first; in a longer trajectory these first and last ones are. */
const SHORT = 10, LONG = 60;
/** Lines of a text that is shown whole: a system prompt or a tool's result, and anything else. */

let asWritten = false;
/** Whether texts are shown without drawing their Markdown, until the page is closed. */

export default async function trajectory(visit) {
  const { run } = visit.parameters;
  const page = await visit.get("trajectory", addressed(visit.parameters));
  const to = (address) => address && trajectoryLink("trajectory", run, address);
  const members = page.group.map((member) => ({ ...member, score: member.score ?? member.advantage }));
  const own = members.find(({ rollout }) => rollout === page.address.rollout);
  const measure = members.some(({ advantage }) => advantage !== null) ? "advantage" : "reward";
  const scale = range(members.map(({ score }) => score));
  const texts = h("div", { class: "conversation" }, conversation(page));
  const source = h("button", { type: "button", "aria-pressed": String(asWritten), title: "texts without drawing their Markdown, key m", onclick: () => {
    asWritten = !asWritten;
    source.setAttribute("aria-pressed", String(asWritten));
    redraw(texts, conversation(page));
  } }, "As written");
  visit.keys.m = () => source.click();
  visit.keys.t = () => (location.hash = trajectoryLink("tokens", run, page.address));
  return h("div", { class: "stack" },
    h("div", { class: "title" },
      h("h1", {}, visible(`${page.address.sample} · ${page.address.rollout}`)), scoreChip(own.score, scale, measure),
      h("span", { class: `chip ${page.error ? "bad" : ""}` }, page.stop_reason), page.incidents.map((incident) => h("span", { class: "chip warn" }, visible([incident.replaceAll("_", " "), page.incident_services[incident]?.join(", ")].filter(Boolean).join(": ")))),
      h("span", { class: "spacer" }),
      page.trace && outside(page.trace, "MLflow"), page.weave && outside(page.weave, "Weave"), !page.trace && !page.weave && page.trace_id && h("code", { class: "dim", title: "its trace" }, page.trace_id),
      source, download("export", exported(run, page.address), `${fileName(run)}-${page.address.step}-${page.address.sample}-${page.address.rollout}.jsonl`, "JSONL"),
      page.group.length > 1 && h("a", { class: "button", href: compareLink(run, group(page)) }, "Compare group"),
      h("a", { class: "button", href: compareLink(run, [page.address]), title: "the same row in another run" }, "Other runs"),
      h("a", { class: "button", href: link("prompt", { run, sample: page.address.sample, val: page.address.validation }) }, "Over steps"),
      h("a", { class: "button", href: trajectoryLink("tokens", run, page.address), title: "key t" }, "Tokens"),
      pager(visit, to(page.previous), to(page.next), "rollout")),
    page.group.length > 1 && h("div", { class: "cells strip" }, members.map(({ rollout, score, error, is_baseline: isBaseline }) =>
      cell(run, { ...page.address, rollout }, { score, error, isBaseline, title: `rollout ${rollout} of this prompt${isBaseline ? ", its greedy baseline" : ""}\n${error ?? (score === null ? `no ${measure}` : `${measure} ${number(score)}`)}`, current: rollout === page.address.rollout }, scale))),
    page.error && h("div", { class: "note bad" }, h("b", {}, page.error.code), " ", visible(page.error.message),
      h("div", { class: "small" }, h("a", { href: link("search", { run, error: page.error.code }) }, "all trajectories with this error"))),
    page.shortened && h("p", { class: "note" }, "A long text lost its middle here; the file has all of it."),
    h("div", { class: `split ${page.turns.length > 2 ? "outlined" : ""}` }, page.turns.length > 2 && outline(page), texts,
      h("div", { class: "stack" }, swimlane(visit, page), rewards(page, own), about(page, run))));
}

/** The rollout and others of its prompt; `compareLink` takes the first of them. */
const group = (page) => [page.address, ...page.group.map(({ rollout }) => ({ ...page.address, rollout })).filter(({ rollout }) => rollout !== page.address.rollout)];

/** Messages and turns by name, each an element that can be closed; turns amid a long trajectory are. */
function conversation(page) {
  const last = page.turns.length;
  const isOpen = (index) => last <= MOST_OPEN || index < OPEN_FIRST || index >= last - OPEN_LAST;
  return [
    ...page.prompt_messages.map((message, index) => part(`message-${index + 1}`, message.role, message.role, "", true, said(message.content, message.role === "system" ? SHORT : LONG) ?? h("p", { class: "dim" }, "no text"))),
    ...page.turns.map((turn, index) => part(`turn-${index + 1}`, "assistant", `assistant, turn ${index + 1}`, [turn.calls.some((call) => call.error) && h("span", { class: "chip bad" }, "a tool failed"),
      ` ${[...tools(turn), turn.generate_s ? seconds(turn.generate_s) : "", plural(turn.response_end - turn.response_start, "token"), turn.finish_reason].filter(Boolean).join(" · ")}`], isOpen(index), turnOf(turn))),
    !page.prompt_messages.length && !last && h("p", { class: "dim" }, "No messages were recorded. Its tokens were."),
    page.log && h("details", { class: "message" }, h("summary", {}, "log of the agent"), h("pre", {}, visible(page.log))),
  ];
}

const part = (id, kind, title, about, open, ...content) => h("details", { class: `message ${kind}`, id, open }, h("summary", {}, h("h2", {}, title, h("span", { class: "dim" }, about))), content);

/** The names of the tools that a turn called. */
const tools = (turn) => turn.messages.flatMap((message) => (message.role === "assistant" ? message.tool_calls ?? [] : [])).map((call) => visible(call.function.name));

/** A list of the messages and turns, each a way to its place. */
function outline(page) {
  const entry = (id, name, what, tokens, kind) => h("li", {}, h("button", { type: "button", class: `plain ${kind}`, onclick: () => {
    const place = document.getElementById(id);
    place.open = true;
    place.scrollIntoView();
    place.querySelector("summary").focus({ preventScroll: true });
  } }, h("span", { class: "dim" }, name), h("span", { class: "clip" }, what), h("span", { class: "dim" }, tokens)));
  return h("nav", { class: "panel outline", "aria-label": "Outline" }, h("div", { class: "panel-head" }, h("h2", {}, "Outline"),
    page.turns.length > MOST_OPEN && h("button", { type: "button", class: "plain", onclick: () => document.querySelectorAll(".conversation > details").forEach((node) => (node.open = true)) }, "open all")),
  h("ol", { tabindex: 0, "aria-label": "Messages and turns" },
    page.prompt_messages.map((message, index) => entry(`message-${index + 1}`, "", message.role, "", "")),
    page.turns.map((turn, index) => entry(`turn-${index + 1}`, index + 1, [...new Set(tools(turn))].join(", ") || turn.finish_reason, number(turn.response_end - turn.response_start), turn.calls.some((call) => call.error) ? "bad-text" : ""))));
}

/** A text as Markdown, or as it was written; folded if it is long. Null for no text. */
const said = (text, lines = LONG) => (!text ? null : folded(asWritten ? h("pre", {}, visible(text)) : markdown(text), text, lines));

function turnOf(turn) {
  const assistant = turn.messages.filter((message) => message.role === "assistant");
  const results = new Map(turn.messages.filter((message) => message.role === "tool").map((message) => [message.tool_call_id, message]));
  const records = new Map(turn.calls.map((call) => [call.tool_call_id, call]));
  const called = assistant.flatMap((message) => message.tool_calls ?? []);
  const answered = new Set(called.map((call) => call.id));
  const others = turn.messages.filter((message) => message.role !== "assistant" && !(message.role === "tool" && answered.has(message.tool_call_id)));
  return [assistant.map((message) => said(message.content)),
    called.map((call) => toolCard(call, records.get(call.id), results.get(call.id))),
    others.map((message) => h("div", { class: "tool-card" }, h("div", { class: "tool-head" }, h("b", {}, visible(message.name ?? message.role))), output(message.content)))];
}

const output = (text) => folded(h("pre", {}, visible(text)), text, SHORT);

function toolCard(call, record, result) {
  return h("div", { class: `tool-card ${record?.error ? "error" : ""}` },
    h("div", { class: "tool-head" }, h("b", {}, visible(call.function.name)),
      record ? h("span", { class: "dim" }, seconds(record.seconds)) : h("span", { class: "chip warn" }, "not sent"),
      record?.error && h("span", { class: "chip bad" }, record.error), record?.truncated && h("span", { class: "chip warn" }, "result cut"),
      record?.reward ? h("span", { class: "chip" }, `tool reward ${number(record.reward)}`) : null),
    folded(argumentsOf(call.function.arguments), call.function.arguments.replaceAll("\\n", "\n"), LONG),
    record?.message && !result?.content.includes(record.message) && h("p", { class: "note bad" }, visible(record.message)),
    result && h("div", { class: "result" }, h("span", { class: "dim" }, "result"), output(result.content)));
}

/** JSON with line breaks where it is longer than a line; arguments that have several lines are shown as these. */
function argumentsOf(text) {
  const plain = (shown) => h("pre", { class: "call" }, visible(shown));
  let value;
  try {
    value = JSON.parse(text);
  } catch {
    return plain(text);
  }
  const isCode = (item) => typeof item === "string" && item.includes("\n");
  if (asWritten || (text.length <= 60 && !text.includes("\\n"))) return plain(text);
  if (value === null || typeof value !== "object" || !Object.values(value).some(isCode)) return plain(JSON.stringify(value, null, 2));
  return h("dl", { class: "call" }, Object.entries(value).map(([name, item]) => [h("dt", { class: "dim" }, visible(name)),
    h("dd", {}, h("pre", { class: isCode(item) ? "code" : null }, visible(isCode(item) ? item : JSON.stringify(item))))]));
}

/** The turns in their order. The row has how long each part took, and not when it began: what no part measured is last. */
function swimlane(visit, page) {
  const { timings, turns } = page;
  const parts = turns.flatMap((turn) => [
    { lane: "model", name: `turn ${turn.index + 1}`, value: turn.generate_s },
    { lane: "tools", name: turn.calls.map((call) => call.tool).join(", ") || "tools", value: turn.tools_s },
  ]);
  const others = Object.entries(timings).filter(([name]) => !["total", "model", "tools"].includes(name));
  parts.push(...others.map(([name, value]) => ({ lane: name, name, value })));
  const known = parts.reduce((sum, part) => sum + part.value, 0);
  const total = Math.max(timings.total, known);
  if (!total) return panel("Time", {}, h("p", { class: "dim" }, "No times were recorded."), page.trace && spans(visit, page));
  parts.push({ lane: "rest", name: "measured as no activity: waiting, parsing, network", value: total - known });
  let at = 0;
  for (const part of parts) [part.at, at] = [at, at + part.value];
  const lanes = ["model", "tools", ...others.map(([name]) => name), "rest"];
  return panel("Time", { aside: h("b", {}, seconds(timings.total)) },
    h("div", { class: "lanes" }, lanes.map((lane) => {
      const own = parts.filter((part) => part.lane === lane && part.value > 0);
      return [h("span", { class: "dim" }, lane), h("div", { class: "lane" }, own.map((part) =>
        tip(h("i", { class: `${colour(lane)} ${lane}`, role: "img", tabindex: 0, "aria-label": `${part.name} ${seconds(part.value)}`, style: { left: `${(part.at / total) * 100}%`, width: `max(2px, ${(part.value / total) * 100}%)` } }), `${visible(part.name)}\n${seconds(part.value)}`))),
      h("b", {}, seconds(own.reduce((sum, part) => sum + part.value, 0)))];
    })), page.trace && spans(visit, page));
}

/** The spans of its trace when they are asked for: MLflow may be gone, and the row has the sums. */
function spans(visit, { trace_id: trace, span_id: span }) {
  const box = h("div", { class: "spans" });
  const button = h("button", { type: "button", class: "plain", onclick: async () => {
    button.disabled = true;
    try {
      const page = await busy(visit.get("spans", { run: visit.parameters.run, trace, span }));
      const end = Math.max(...page.spans.map((span) => span.start + (span.seconds ?? 0))) || 1;
      box.replaceChildren(h("ol", { tabindex: 0, "aria-label": "Spans" }, page.spans.map((span) => h("li", { class: span.error ? "bad-text" : null },
        h("span", { class: "clip", style: { "padding-left": `${span.depth * 10}px` }, title: span.error || span.name }, visible(span.name), span.about && h("span", { class: "dim" }, ` ${visible(span.about)}`)),
        h("span", { class: "lane" }, h("i", { class: colour(span.service || span.kind), style: { left: `${(span.start / end) * 100}%`, width: `max(2px, ${((span.seconds ?? 0) / end) * 100}%)` } })),
        h("b", {}, span.seconds === null ? "open" : seconds(span.seconds))))), page.total > page.spans.length && h("p", { class: "dim small" }, `the first ${page.spans.length} of ${page.total} spans`) || "");
    } catch (error) {
      if (!visit.signal.aborted) box.replaceChildren(h("p", { class: "note bad" }, visible(error.message)));
    }
  } }, "Spans of its trace");
  box.append(button);
  return box;
}

function rewards({ reward, ground_truth: truth, tool_rewards: tools }, { advantage }) {
  const known = truth === null ? null : ["ground truth", h("code", {}, visible(truth))];
  if (!reward) return panel("Reward", {}, h("p", { class: "dim" }, "It was not scored."), facts([known, advantage === null ? null : ["advantage", number(advantage, 4)]]));
  const components = (ofTools) => Object.entries(reward.components).filter(([name]) => name.startsWith("tool/") === ofTools).map(([name, value]) => [visible(name.replace(/^tool\//, "")), number(value, 4)]);
  return panel("Reward", { aside: h("b", {}, number(reward.score, 4)) }, facts([
    known, reward.answer === undefined || reward.answer === null ? null : ["answer", h("code", {}, visible(reward.answer))],
    ...components(false),
    ...(reward.turn_scores ?? []).map((value, index) => [`of turn ${index + 1}`, number(value, 4)]),
  ]), (tools.length > 0 || components(true).length > 0) && [h("p", { class: "dim small" }, "Rewards of the tools, which a scorer may use:"),
    facts([...components(true), tools.length ? ["of each call", tools.map((value) => number(value)).join(", ")] : null])]);
}

function about(page, run) {
  const versions = [...new Set(page.weight_versions.map((span) => span.version))];
  return panel("About", {}, facts([
    ["id", h("code", {}, visible(page.id))],
    ["agent", page.agent_name], ["data source", page.data_source],
    ["tokens", `${number(page.prompt_tokens)} prompt, ${number(page.response_tokens)} response, ${number(page.model_tokens)} trained`],
    page.rows > 1 ? ["rows of tokens", number(page.rows)] : null,
    ["weights", versions.length ? `version ${versions.join(", ")}` : "unknown"],
    ["step", h("a", { href: link("step", { run, step: page.address.step, val: page.address.validation }) }, `${page.address.validation ? "validation after " : ""}step ${page.address.step}`)],
  ]));
}
