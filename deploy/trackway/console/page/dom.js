// Elements and texts. Every text of a run goes in by textContent: nothing that a model wrote becomes markup.

const SVG = "http://www.w3.org/2000/svg";
const SVG_TAGS = new Set(["svg", "g", "path", "line", "rect", "text", "circle", "polyline"]);

/** h("a", {href, class, onclick, style: {"--x": 1}}, ...children): an element; null and false children are left out. */
export function h(tag, attributes = {}, ...children) {
  const node = SVG_TAGS.has(tag) ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, part] of Object.entries(value)) node.style.setProperty(key, part);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

/** The text with control characters as visible signs, and characters that reorder text or cannot be seen as their code. */
export function visible(text) {
  return String(text)
    .replace(/[\u0000-\u0008\u000b-\u001f]/g, (sign) => String.fromCharCode(0x2400 + sign.charCodeAt(0)))
    .replace(/\u007f/g, "␡")
    .replace(/(?<![\p{Extended_Pictographic}\u{1f3fb}-\u{1f3ff}]\ufe0f?)\u200d|[\u0080-\u009f\u200b\u200c\u200e\u200f\u202a-\u202e\u2060-\u2069\ufeff]/gu,
      (sign) => `\\u${sign.charCodeAt(0).toString(16).padStart(4, "0")}`);
}

/** A number in at most `digits` significant digits; a dash for none. */
export function number(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  if (Number.isInteger(value) && Math.abs(value) < 1e15) return value.toLocaleString("en-US");
  const size = Math.abs(value);
  if (size >= 1e6 || (size < 1e-3 && size > 0)) return value.toExponential(digits - 1);
  return Number(value.toPrecision(Math.max(digits, Math.ceil(Math.log10(size || 1))))).toLocaleString("en-US", {
    maximumFractionDigits: 6,
  });
}

/** A count in at most three digits: 12,345,678 is "12.3 M". */
export const compact = (value) => value.toLocaleString("en-US", { notation: "compact", maximumSignificantDigits: 3 });

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 0) return `-${seconds(-value)}`;
  if (value === 0) return "0 s";
  if (value < 0.0995) return `${(value * 1000).toFixed(value < 0.00995 ? 1 : 0)} ms`;
  if (value < 120) return `${value.toFixed(value < 10 ? 2 : 1)} s`;
  const whole = Math.round(value), minutes = Math.round(value / 60);
  if (whole < 7200) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

export function ago(milliseconds, now = Date.now()) {
  const value = Math.max(0, (now - milliseconds) / 1000);
  if (value < 90) return `${Math.round(value)} s ago`;
  if (value < 5400) return `${Math.round(value / 60)} min ago`;
  if (value < 129600) return `${Math.round(value / 3600)} h ago`;
  return `${Math.round(value / 86400)} days ago`;
}

export function mean(values) {
  const known = values.filter((value) => value !== null && value !== undefined);
  return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
}

export function deviation(values) {
  const middle = mean(values);
  return middle === null ? null : Math.sqrt(mean(values.map((value) => (value - middle) ** 2)));
}

export const plural = (count, word) => `${number(count)} ${word}${count === 1 ? "" : "s"}`;

const nameOf = (node) => node.id || node.getAttribute("aria-label") || node.title || node.getAttribute("href");

/** Replaces what is in a node. The focus, and what is typed, stay with the element of the same id, label or address. */
export function redraw(node, children) {
  const focused = node.contains(document.activeElement) && nameOf(document.activeElement) ? document.activeElement : null;
  hideTip();
  node.replaceChildren(...[children].flat(Infinity).filter(Boolean));
  const again = focused && [...node.querySelectorAll(focused.tagName)].find((other) => nameOf(other) === nameOf(focused));
  if (again && again.matches("input:not([type=checkbox])")) again.value = focused.value;
  again?.focus({ preventScroll: true });
}

const LATE_MS = 250;
let waiting = 0;

/** The promise's value; the page says that it waits once that takes longer than LATE_MS. */
export async function busy(promise) {
  const bar = document.getElementById("progress");
  const late = setTimeout(() => (bar.hidden = false), LATE_MS);
  waiting += 1;
  try {
    return await promise;
  } finally {
    clearTimeout(late);
    waiting -= 1;
    if (!waiting) bar.hidden = true;
  }
}

/** A panel with a heading. */
export function panel(title, attributes, ...children) {
  const { aside = null, class: kind = "", ...rest } = attributes ?? {};
  const head = title && h("div", { class: "panel-head" }, h("h2", {}, title), aside);
  return h("section", { class: `panel ${kind}`, ...rest }, head, ...children);
}

/** What a place without content says: what is missing, and what to do. */
export const empty = (text, remedy) => h("div", { class: "empty" }, h("p", {}, text), remedy && h("p", { class: "dim" }, remedy));

/** A text that is shown while the pointer or the focus is on the node. */
export function tip(node, text) {
  const show = () => {
    const box = document.getElementById("tip");
    box.textContent = typeof text === "function" ? text() : text;
    box.hidden = false;
    const at = node.getBoundingClientRect();
    const left = Math.min(Math.max(8, at.left + at.width / 2 - box.offsetWidth / 2), innerWidth - box.offsetWidth - 8);
    const above = at.top - box.offsetHeight - 8;
    box.style.left = `${left}px`;
    box.style.top = `${above > 8 ? above : at.bottom + 8}px`;
  };
  node.addEventListener("pointerenter", show);
  node.addEventListener("focus", show);
  node.addEventListener("pointerleave", hideTip);
  node.addEventListener("blur", hideTip);
  return node;
}

export function hideTip() {
  document.getElementById("tip").hidden = true;
}

/** Arrow keys move the focus among the links of a grid; only one of them is a tab stop. */
export function roving(grid, selector) {
  const stops = () => [...grid.querySelectorAll(selector)];
  const first = stops();
  first.forEach((node, index) => node.setAttribute("tabindex", index ? "-1" : "0"));
  grid.addEventListener("focusin", (event) => {
    if (!event.target.matches(selector)) return;
    grid.querySelector(`${selector}[tabindex="0"]`)?.setAttribute("tabindex", "-1");
    event.target.setAttribute("tabindex", "0");
  });
  grid.addEventListener("keydown", (event) => {
    const from = event.target.closest?.(selector);
    if (!from || event.altKey || event.ctrlKey || event.metaKey) return;
    const nodes = stops();
    const at = nodes.indexOf(from);
    let next = null;
    if (event.key === "ArrowRight") next = nodes[at + 1];
    else if (event.key === "ArrowLeft") next = nodes[at - 1];
    else if (event.key === "Home") next = nodes[0];
    else if (event.key === "End") next = nodes.at(-1);
    else if (event.key === "ArrowDown" || event.key === "ArrowUp") next = vertical(nodes, from, event.key === "ArrowDown");
    else return;
    event.preventDefault();
    event.stopPropagation();
    next?.focus();
  });
  return grid;
}

function vertical(nodes, from, down) {
  const start = from.getBoundingClientRect();
  let best = null;
  let least = Infinity;
  for (const node of nodes) {
    const box = node.getBoundingClientRect();
    const rows = down ? box.top - start.top : start.top - box.top;
    if (rows < start.height / 2) continue;
    const distance = rows * 4 + Math.abs(box.left - start.left);
    if (distance < least) [best, least] = [node, distance];
  }
  return best;
}
