// The page's frame: the address chooses the view, and a view may follow the run.

import { check } from "./address.js";
import { ApiError, get, keepToken, link, route, trajectoryLink } from "./api.js";
import { busy, h, hideTip, redraw, visible } from "./dom.js";

const VIEWS = ["runs", "run", "step", "trajectory", "tokens", "search", "prompt", "compare", "failures", "evaluations", "config", "system", "try"];
const POLL_MS = 2000;

const main = document.getElementById("main");
let open = null;
let services = null;
/** Whether the console was started beside running services; a promise until the first answer. */
let hasServices = false;

class Visit {
  /** What a view gets: its parameters, requests that end with it, and keys and polls that live as long as it. */
  constructor(parameters) {
    this.parameters = parameters;
    this.keys = {};
    this.controller = new AbortController();
    this.timers = [];
  }

  get signal() {
    return this.controller.signal;
  }

  async get(path, parameters, options) {
    return (await get(path, parameters, { signal: this.signal, ...options })).body;
  }

  /**
   * Calls `changed(body)` when the reply changes, until the visit ends; nothing is asked while the page is hidden. A failure is
   * told above the view until the next answer.
   */
  follow(path, parameters, changed, { tag, every = POLL_MS } = {}) {
    const trouble = document.getElementById("trouble");
    const poll = async () => {
      if (this.signal.aborted) return;
      try {
        if (!document.hidden) {
          const reply = await get(path, parameters, { signal: this.signal, tag });
          if (!reply.unchanged) {
            tag = reply.tag;
            await changed(reply.body);
          }
          trouble.hidden = true;
        }
      } catch (error) {
        if (this.signal.aborted) return;
        const words = `${visible(error.message)} It is asked again every ${every / 1000} s.`;
        if (trouble.hidden || trouble.textContent !== words) trouble.textContent = words;
        trouble.hidden = false;
      }
      if (!this.signal.aborted) this.timers.push(setTimeout(poll, every));
    };
    this.timers.push(setTimeout(poll, every));
  }

  end() {
    this.controller.abort();
    this.timers.forEach(clearTimeout);
  }
}

async function show() {
  const { view, parameters } = route(location.hash);
  const before = open;
  const visit = (open = new Visit(parameters));
  before?.end();
  hideTip();
  document.getElementById("trouble").hidden = true;
  let content;
  try {
    if (!VIEWS.includes(view)) throw new ApiError(404, `There is no view ${view}; start from the list of runs.`);
    check(view, parameters);
    services ??= visit.get("console").then((about) => about.services.length > 0);
    services.catch(() => (services = null)); // asked again with the next page
    if (["system", "try"].includes(view) && !(await services))
      throw new ApiError(404, "expected running services beside this console, got none; start them with `trackway up`, or start the console with `--services-url`");
    const drawn = import(`./views/${view}.js`).then((module) => module.default(visit));
    [content, hasServices] = await busy(Promise.all([drawn, services]));
  } catch (error) {
    if (visit.signal.aborted) return;
    content = problem(error, view, parameters);
  }
  if (visit !== open) return;
  frame(view, parameters);
  const same = before && main.dataset.view === view;
  main.dataset.view = view;
  redraw(main, content);
  if (!same) scrollTo(0, 0);
  main.querySelector("[data-focus]")?.focus({ preventScroll: true });
  main.dataset.ready = location.hash;
}

function frame(view, parameters) {
  const { run, step, val, sample, rollout } = parameters;
  const name = (text, href) => (href ? h("a", { href }, visible(text)) : h("span", { "aria-current": "page" }, visible(text)));
  const crumbs = [["Runs", link("runs")]];
  if (run) crumbs.push([run, link("run", { run })]);
  if (step !== undefined) crumbs.push([val ? `validation ${step}` : `step ${step}`, link("step", { run, step, val })]);
  if (sample !== undefined && rollout !== undefined) crumbs.push([`${sample} · ${rollout}`, trajectoryLink("trajectory", run, { step, validation: val, sample, rollout })]);
  if (["system", "try"].includes(view)) crumbs.push([view === "try" ? "Try" : "System", null]);
  if (view === "prompt") crumbs.push([`sample ${sample}`, null]);
  if (["tokens", "search", "compare", "failures", "evaluations", "config"].includes(view)) crumbs.push([view, null]);
  crumbs.at(-1)[1] = null;
  document.getElementById("crumbs").replaceChildren(...crumbs.map(([text, href]) => name(text, href)));
  const tools = [...(run ? [["Failures", "failures"], ["Search", "search"]] : []), ...(hasServices ? [["System", "system"], ["Try", "try"]] : [])];
  document.getElementById("tools").replaceChildren(...tools.map(([text, target]) =>
    h("a", { href: link(target, ["system", "try"].includes(target) ? {} : { run }), "aria-current": target === view ? "page" : null }, text)));
  document.title = `${crumbs.slice(1).map(([text]) => text).join(" · ") || "Runs"} – Trackway`;
}

function problem(error, view, parameters) {
  if (!(error instanceof ApiError)) console.error(error);
  if (error.status === 401) return signIn(error.message);
  const back = [parameters.run && view !== "run" && h("a", { href: link("run", { run: parameters.run }) }, "Open the run"), h("a", { href: link("runs") }, "Open the list of runs")].filter(Boolean);
  return h("div", { class: "problem", role: "alert" },
    h("h1", {}, { 404: "Not found", 422: "This address cannot be opened" }[error.status] ?? "This could not be shown"),
    h("p", {}, visible(error.message)),
    h("p", {}, back.map((way) => [way, " · "]),
      h("button", { type: "button", class: "plain", onclick: show }, "Try again")));
}

function signIn(message) {
  const field = h("input", { type: "password", name: "token", autocomplete: "off", required: true, "aria-label": "Token", "data-focus": true });
  return h("form", { class: "problem", onsubmit: (event) => { event.preventDefault(); keepToken(field.value); show(); } },
    h("h1", {}, "This console asks for a token"), h("p", {}, visible(message)),
    h("p", { class: "row" }, field, h("button", {}, "Open")), h("p", { class: "dim" }, "It is kept until this tab is closed."));
}

document.addEventListener("keydown", (event) => {
  if (event.altKey || event.ctrlKey || event.metaKey || event.target.closest?.("input, select, textarea")) return;
  const action = open?.keys[event.key];
  if (!action) return;
  event.preventDefault();
  action();
});
addEventListener("hashchange", show);
show();
