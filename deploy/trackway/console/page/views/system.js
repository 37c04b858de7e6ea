// The running services: replicas, queues, weights and spans. Asked again every few seconds.

import { empty, h, number, panel, plural, redraw, visible } from "../dom.js";
import { csv } from "./parts.js";

const EVERY_MS = 5000;
const COLUMNS = ["replica", "pid", "ready", "reason", "version", "latest", "spans_ended", "spans_waiting", "spans_lost", "threads"];
const WORDS = { in_flight: ["request in progress", "requests in progress"], engine_running: ["running"], engine_waiting: ["waiting"], trajectories_running: ["trajectory", "trajectories"], trajectories_limit: ["most at once"], tool_instances: ["tool instance", "tool instances"] };
/** Of one, and of several. */

export default async function system(visit) {
  const root = h("div", { class: "stack" });
  const draw = (page) => redraw(root, [
    h("div", { class: "title" }, h("h1", {}, "System"), summary(page.services), h("span", { class: "spacer" }), h("span", { class: "dim small" }, `asked every ${EVERY_MS / 1000} s`),
      csv("replicas", ["service", ...COLUMNS], () => page.services.flatMap((service) => service.replicas.map((replica) => [service.service, ...COLUMNS.map((name) => replica[name])])))),
    cards(page.services), ...page.services.map(service)]);
  draw(await visit.get("system"));
  visit.follow("system", {}, draw, { every: EVERY_MS });
  return root;
}

const words = (key, value) => (value === 1 ? WORDS[key]?.[0] : WORDS[key]?.at(-1)) ?? key;
const replicas = (services) => services.flatMap((service) => service.replicas);
const sum = (values) => values.reduce((total, value) => total + (value ?? 0), 0);
const lag = (replica) => (replica.version === null ? 0 : Math.max(0, replica.latest - replica.version));

function summary(services) {
  const silent = services.filter((service) => !service.answers).length, unready = replicas(services).filter((replica) => !replica.ready).length;
  const bad = silent || unready;
  return h("span", { class: `chip ${bad ? "bad" : "good"}` }, silent ? `${silent} of ${services.length} do not answer` : unready ? `${plural(unready, "replica")} not ready` : "all ready");
}

function cards(services) {
  const all = replicas(services);
  const queue = (name) => sum(all.map((replica) => replica.queues[name]));
  const versions = all.filter((replica) => replica.version !== null);
  const card = (name, value, note, kind = "") => h("div", { class: `card ${kind}` }, h("span", {}, name), h("b", {}, value), h("small", {}, note));
  const behind = versions.filter((replica) => lag(replica) > 0).length, lost = sum(all.map((replica) => replica.spans_lost));
  return h("div", { class: "cards" },
    card("replicas", `${all.filter((replica) => replica.ready).length} of ${all.length}`, "ready"),
    card("generations", number(queue("engine_running")), `${number(queue("engine_waiting"))} waiting`),
    card("trajectories", number(queue("trajectories_running")), "running or waiting"),
    card("weights", versions.length ? `version ${Math.max(...versions.map((replica) => replica.latest))}` : "–", behind ? `${plural(behind, "replica")} behind` : versions.length ? "no replica is behind" : "no replica has any", behind ? "bad" : ""),
    card("spans lost", number(lost), `${number(sum(all.map((replica) => replica.spans_waiting)))} waiting`, lost ? "bad" : ""));
}

function service({ service: name, url, answers, message, replicas: list }) {
  const aside = h("code", { class: "dim" }, visible(url));
  if (!answers) return panel(name, { aside }, h("p", { class: "note bad" }, visible(message || "It does not answer.")));
  if (!list.length) return panel(name, { aside }, empty("It has no replica.", "Look at `trackway status`."));
  const weights = list.some((replica) => replica.version !== null);
  const head = ["replica", "ready", "queues", ...(weights ? ["weights"] : []), "spans lost", "waiting", "traces to", "threads"];
  return h("section", { class: "panel flush scroll", tabindex: 0, "aria-label": `replicas of ${name}` }, h("div", { class: "panel-head padded" }, h("h2", {}, name), aside), h("table", { class: "replicas" },
    h("thead", {}, h("tr", {}, head.map((text) => h("th", { scope: "col" }, text)))),
    h("tbody", {}, list.map((replica) => named(head, h("tr", {},
      h("td", {}, h("b", {}, visible(replica.replica)), h("div", { class: "dim small" }, `pid ${replica.pid}`)),
      h("td", {}, replica.ready ? [h("span", { class: "chip good" }, "ready"), replica.reason && h("div", { class: "dim small" }, visible(replica.reason))] : [h("span", { class: "chip bad" }, "not ready"), " ", visible(replica.reason)]),
      h("td", {}, Object.entries(replica.queues).map(([key, value]) => h("div", { class: "nowrap" }, `${number(value)} `, h("span", { class: "dim" }, words(key, value)))), !Object.keys(replica.queues).length && h("span", { class: "dim" }, "not reachable from here")),
      weights && h("td", { class: "nowrap" }, replica.version === null ? "–" : [`version ${replica.version} `, lag(replica) > 0 && h("span", { class: "chip warn" }, `${plural(lag(replica), "version")} behind`), replica.verdict && h("div", { class: "dim small" }, replica.verdict)]),
      h("td", { class: replica.spans_lost ? "bad-text strong" : null }, number(replica.spans_lost)), h("td", {}, number(replica.spans_waiting)),
      h("td", {}, replica.trace_backends.join(", ") || "–"), h("td", {}, number(replica.threads))))))));
}

/** The row whose cells have the names of their columns, which a phone shows above them. */
function named(head, row) {
  [...row.cells].forEach((cell, index) => (cell.dataset.name = head[index]));
  return row;
}
