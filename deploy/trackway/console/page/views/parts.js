// Parts that several views show.

import { compareLink, file, link, MOST_COMPARED, saved, trajectoryLink } from "../api.js";
import { busy, h, number, plural, redraw, tip, visible } from "../dom.js";

const ENDED = ["finished", "failed", "stopped", "unreadable"];
export const isLive = (summary) => !ENDED.includes(summary.state) && summary.alive !== false;

/** The run's state, which says in words when its process is gone. */
export function stateChip(summary) {
  const gone = summary.alive === false;
  const kind = gone || ["failed", "unreadable"].includes(summary.state) ? "bad" : summary.state === "finished" ? "good" : isLive(summary) ? "live" : "";
  return h("span", { class: `chip ${kind}` }, isLive(summary) && h("i", { class: "pulse" }), gone ? `${summary.state} · its process is gone` : summary.state);
}

/** Least and greatest score of a colour scale: 0 to 1 where the scores fit into it. */
export function range(scores) {
  const known = scores.filter((score) => score !== null);
  const least = Math.min(...known, 0);
  const most = Math.max(...known, 0);
  return least >= 0 && most <= 1 ? [0, 1] : [least, most];
}

/** Colour of a score as a share of the scale, and its text as the second sign. */
export function scored(score, [least, most]) {
  if (score === null) return { class: "none", share: "0%" };
  return { class: "", share: `${Math.round(((score - least) / (most - least || 1)) * 100)}%` };
}

/** A small cell of one rollout, which opens it. */
export function cell(run, address, { score, error, stop = "", title, text, current, isBaseline }, scale) {
  const { class: kind, share } = scored(score, scale);
  const shown = text ?? (error ? "!" : score === null ? "?" : short(score));
  return tip(h("a", {
    class: `cell ${kind} ${error ? "error" : ""} ${isBaseline ? "baseline" : ""} ${current ? "current" : ""}`, href: trajectoryLink("trajectory", run, address),
    style: { "--share": share }, "aria-label": title, "aria-current": current ? "true" : null, "data-stop": stop,
  }, shown), title);
}

export const short = (score) => (Number.isInteger(score) ? String(score) : score.toFixed(Math.abs(score) < 10 ? 2 : 0).replace(/^(-?)0\./, "$1."));

export const scoreChip = (score, scale = [0, 1], measure = "reward") =>
  h("span", { class: `score ${scored(score, scale).class}`, style: { "--share": scored(score, scale).share } }, score === null ? `no ${measure}` : `${measure} ${number(score)}`);

/** A run's step, and how many there will be if that is known. */
export const stepOf = ({ step, total_steps: total }, of) => (total ? `${number(step)}${of}${number(total)}` : number(step));

/** A list of names and values. */
export const facts = (rows) => h("dl", { class: "facts" }, rows.filter((row) => row && row[1] !== null && row[1] !== undefined).map(([name, value]) =>
  [h("dt", {}, name), h("dd", {}, typeof value === "string" ? visible(value) : value)]));

/** A link that leaves for MLflow or Weave. */
export const outside = (href, text) => h("a", { class: "button", href, target: "_blank", rel: "noreferrer noopener" }, text, h("span", { "aria-hidden": "true" }, " ↗"));

/** A command to copy. */
export function command(text) {
  const button = h("button", { type: "button", class: "plain", onclick: async () => {
    await navigator.clipboard?.writeText(text);
    button.textContent = "copied";
    setTimeout(() => (button.textContent = "copy"), 1500);
  } }, "copy");
  return h("span", { class: "command" }, h("code", {}, text), button);
}

const CHARS = 100;
/** Characters of a text that count as a line. */

/** The node, of which a text of more lines shows only the first ones until a button opens it. */
export function folded(node, text, lines) {
  const length = text.split("\n").reduce((sum, line) => sum + Math.ceil((line.length || 1) / CHARS), 0);
  if (length <= lines) return node;
  const box = h("div", { class: "fold closed" }, node, h("button", { type: "button", class: "plain", "aria-expanded": "false", onclick: (event) => {
    const isClosed = box.classList.toggle("closed");
    event.target.setAttribute("aria-expanded", String(!isClosed));
    event.target.textContent = isClosed ? words : "Show less";
  } }));
  const words = `Show all ${number(length)} lines`;
  box.lastChild.textContent = words;
  return box;
}

/** The values of a list in an address. */
export const listed = (text) => (text ?? "").split(",").filter(Boolean);

/** A field for one of the names, which `add` gets once it is written or chosen; those that are chosen are not offered. */
export function nameField(id, words, names, chosen, add) {
  const field = h("input", { id, list: `${id}-names`, placeholder: words, "aria-label": words, autocomplete: "off" });
  const choose = (event) => {
    event.preventDefault();
    const name = field.value.trim();
    if (!names.includes(name) || chosen.includes(name)) return;
    field.value = "";
    add(name);
  };
  field.addEventListener("change", choose);
  return h("form", { class: "row", onsubmit: choose }, field, h("datalist", { id: `${id}-names` }, names.filter((name) => !chosen.includes(name)).map((name) => h("option", { value: name }))));
}

/** Links to the step before and after. */
export function stepLinks(run, files, step, validation) {
  const same = files.filter((file) => file.validation === validation).map((file) => file.step);
  const before = same.filter((other) => other < step).at(-1);
  const after = same.find((other) => other > step);
  const to = (other) => (other === undefined ? null : link("step", { run, step: other, val: validation }));
  return { before: to(before), after: to(after) };
}

/** Buttons for the one before and the one after, which the arrow keys press too. */
export function pager(visit, before, after, words) {
  visit.keys.ArrowLeft = () => before && (location.hash = before);
  visit.keys.ArrowRight = () => after && (location.hash = after);
  const button = (href, text, label) =>
    h("a", { class: `button ${href ? "" : "off"}`, href, "aria-disabled": href ? null : "true", title: label }, text);
  return h("span", { class: "pager" }, button(before, "←", `previous ${words}, key ←`), button(after, "→", `next ${words}, key →`));
}

/** A button that saves replies as one file: a single one by the browser itself, several or with a token from memory. */
export function download(path, every, name, text) {
  const button = h("button", { type: "button", title: `save ${name}`, onclick: async () => {
    button.disabled = true;
    try {
      const files = [every].flat(), address = files.length === 1 && (await busy(saved(path, files[0])));
      if (address) h("a", { href: address, download: name }).click();
      else save(new Blob(await busy(Promise.all(files.map((parameters) => file(path, parameters))))), name);
    } catch (error) {
      button.replaceWith(h("span", { class: "chip bad", role: "alert" }, error.message));
    } finally {
      button.disabled = false;
    }
  } }, text);
  return button;
}

/** A button that saves rows as CSV; rows() gives them when it is pressed. */
export function csv(name, columns, rows) {
  const cell = (value) => (value === null || value === undefined ? "" : /[",\n\r]/.test(String(value)) ? `"${String(value).replaceAll('"', '""')}"` : String(value));
  return h("button", { type: "button", title: `save ${name}.csv`, onclick: () => {
    const lines = [columns, ...rows()].map((row) => row.map(cell).join(","));
    save(new Blob([`${lines.join("\n")}\n`], { type: "text/csv" }), `${name}.csv`);
  } }, "CSV");
}

function save(blob, name) {
  const address = URL.createObjectURL(blob);
  h("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 60_000);
}

/** Parameters of a file of one trajectory. */
export const exported = (run, { step, validation, sample, rollout }) => ({ run, step, validation: validation || undefined, sample, rollout, format: "jsonl" });

const CHOSEN = new Map();
/** By run, the trajectories that are chosen to be compared, until the page is closed. */

/** Trajectories that are chosen to be compared: `toggle(address)`, `has(address)`, and a row that shows how many there are. */
export function chooser(run, changed) {
  const chosen = CHOSEN.get(run) ?? new Map();
  CHOSEN.set(run, chosen);
  const row = h("p", { class: "row chosen", role: "status", hidden: true });
  const name = ({ step, validation, sample, rollout }) => JSON.stringify([step, Boolean(validation), sample, rollout]);
  const draw = () => {
    row.hidden = !chosen.size;
    row.replaceChildren(`${chosen.size} chosen`, chosen.size > 1 ? h("a", { class: "button", href: compareLink(run, [...chosen.values()]) }, "Compare chosen") : h("span", { class: "dim" }, "choose another one to compare"),
      h("button", { type: "button", onclick: () => { chosen.clear(); draw(); changed(); } }, "Clear"));
  };
  const toggle = (address) => {
    if (!chosen.delete(name(address))) chosen.set(name(address), address);
    if (chosen.size > MOST_COMPARED) chosen.delete([...chosen.keys()][0]);
    draw();
    changed();
  };
  draw();
  return { row, toggle, has: (address) => chosen.has(name(address)) };
}

export const CHOOSING = "Shift and a click, or the key c, chooses rollouts to compare.";

/** A chooser of cells: `add(node, address)` returns the cell, `on(node)` the element in which cells are clicked. */
export function cellChooser(run) {
  const cells = new Map();
  const { row, toggle, has } = chooser(run, () => cells.forEach((address, node) => node.classList.toggle("chosen", has(address))));
  const choose = (event) => {
    const address = cells.get(event.target);
    if (!address || !(event.type === "click" ? event.shiftKey : event.key === "c" && !event.ctrlKey && !event.metaKey && !event.altKey)) return;
    event.preventDefault();
    toggle(address);
  };
  const add = (node, address) => {
    cells.set(node, address);
    node.classList.toggle("chosen", has(address));
    return node;
  };
  const on = (node) => {
    node.addEventListener("click", choose);
    node.addEventListener("keydown", choose);
    return node;
  };
  return { row, add, on };
}

/** What a run is called in names of files. */
export const fileName = (run) => run.replaceAll("/", "-");

const SAVED = "trackway-queries";
const MOST_SAVED = 30;

function kept() {
  try {
    const found = JSON.parse(localStorage.getItem(SAVED) ?? "[]");
    return Array.isArray(found) ? found.filter((entry) => typeof entry?.name === "string" && entry.parameters) : [];
  } catch {
    return [];
  }
}

/**
 * Ready-made queries, and those saved in this browser. ready: [[name, href, title]]; now: [name, parameters] of the
 * present query, which can be saved, or null; to(parameters): its address.
 */
export function queries(ready, now, to) {
  const row = h("div", { class: "queries" });
  const keep = (entries) => {
    localStorage.setItem(SAVED, JSON.stringify(entries.slice(-MOST_SAVED)));
    draw();
  };
  const draw = () => row.replaceChildren(
    ...ready.map(([name, href, title]) => h("a", { class: "button", href, title }, name)),
    ...kept().map((entry) => h("span", { class: "chip" }, h("a", { href: to(entry.parameters) }, visible(entry.name)),
      h("button", { type: "button", class: "plain", "aria-label": `forget ${entry.name}`, onclick: () => keep(kept().filter(({ name }) => name !== entry.name)) }, "×"))),
    ...(now && !kept().some(({ name }) => name === now[0])
      ? [h("button", { type: "button", title: "kept in this browser; its address can be sent too", onclick: () => keep([...kept(), { name: now[0], parameters: now[1] }]) }, "Save this")] : []));
  draw();
  return row;
}

/** What `draw(page)` shows of a reply that may lack files; it is asked and drawn again until all are read or it is cancelled. */
export async function growing(visit, path, parameters, draw) {
  const shown = h("div", { class: "stack" });
  let page = await visit.get(path, parameters);
  let state = "reading";
  const show = (words = "") => {
    const read = `${number(page.files - page.files_left)} of ${plural(page.files, "file")} read, the newest first`;
    const [text, act] = state === "reading" ? ["Cancel", () => show((state = "cancelled"))] : ["Go on", rest];
    const progress = h("p", { class: "row" }, h("span", { role: "status" }, state === "reading" ? `${read} …` : `${read}, ${visible(words)}`), h("button", { type: "button", onclick: act }, text));
    redraw(shown, [draw(page), page.files_left > 0 && progress]);
  };
  const rest = async () => {
    state = "reading";
    show();
    while (page.files_left > 0 && state === "reading") {
      try {
        page = await visit.get(path, parameters);
      } catch (error) {
        if (visit.signal.aborted) return;
        show((state = error.message));
        return;
      }
      show(state);
    }
  };
  rest();
  return shown;
}
