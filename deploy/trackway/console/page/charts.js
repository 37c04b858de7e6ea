// Charts as SVG: lines, columns, bars. Colours come from the style sheet, so they follow the colour scheme.

import { h, number, tip, hideTip } from "./dom.js";

const LEFT = 46, RIGHT = 10, TOP = 10, BOTTOM = 22;
/** Least height of an axis of rewards, in which a change of -0.007 looks as small as it is. */
export const REWARDS = 0.2;
const COLOURS = { gen: 0, model: 0, rollout: 0, chat: 0, tools: 1, execute_tool: 1, update_actor: 2, scorer: 3, reward: 3, update_weights: 4, testing: 6, save_checkpoint: 7, values: 8, update_critic: 9 };

/** Class with the colour of a phase of a step, an activity of a rollout or a service: the same on every page, grey for others. */
export const colour = (name) => `p${COLOURS[name] ?? 5}`;

/** Round values that divide a range into about `count` parts. */
export function ticks(least, most, count = 4) {
  const span = most - least || Math.abs(most) || 1;
  const rough = span / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((size) => size >= rough * 0.999);
  const found = [];
  for (let value = Math.ceil(least / step - 1e-9) * step; value <= most + step * 1e-6; value += step)
    found.push(Number(value.toPrecision(12)));
  return found;
}

/** An element that draws itself at its width, and again when that changes. */
function drawn(height, label, draw) {
  const box = h("div", { class: "chart", style: { height: `${height}px` }, role: "img", "aria-label": label });
  let width = 0;
  const observer = new ResizeObserver(([entry]) => {
    const now = Math.floor(entry.contentRect.width);
    if (now && now !== width) {
      width = now;
      box.replaceChildren(draw(width));
    }
  });
  observer.observe(box);
  return h("div", { class: "chart-box" }, box, h("button", { type: "button", class: "plain", title: "save this chart as a picture", onclick: () => save(box, label) }, "PNG"));
}

const PNG_SCALE = 2;
const MOST_PIXELS = 16_000;
/** Of a side of a picture, which a canvas may have. */
const STYLES = ["fill", "stroke", "stroke-width", "stroke-dasharray", "font", "opacity", "visibility"];

/** Saves the chart of a box with the colours that it has now. */
async function save(box, label) {
  const svg = box.querySelector("svg");
  const copy = svg.cloneNode(true);
  const [shown, copied] = [[svg, ...svg.querySelectorAll("*")], [copy, ...copy.querySelectorAll("*")]];
  shown.forEach((node, index) => {
    const style = getComputedStyle(node);
    STYLES.forEach((name) => copied[index].style.setProperty(name, style.getPropertyValue(name)));
  });
  copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  const source = URL.createObjectURL(new Blob([new XMLSerializer().serializeToString(copy)], { type: "image/svg+xml" }));
  const image = new Image();
  image.src = source;
  await image.decode();
  await saved(box, svg.clientWidth, svg.clientHeight, label, (context) => context.drawImage(image, 0, 0, svg.clientWidth, svg.clientHeight));
  URL.revokeObjectURL(source);
}

/** Saves a picture of a width and a height in CSS pixels, on the background of the panel. */
async function saved(box, width, height, label, draw) {
  const scale = Math.min(PNG_SCALE, MOST_PIXELS / Math.max(width, height));
  const canvas = h("canvas", { width: width * scale, height: height * scale });
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  context.fillStyle = getComputedStyle(box.closest(".panel") ?? document.body).backgroundColor;
  context.fillRect(0, 0, width, height);
  draw(context);
  const picture = URL.createObjectURL(await new Promise((done) => canvas.toBlob(done, "image/png")));
  h("a", { href: picture, download: `${label.split(":")[0].replaceAll(/[^\w-]+/g, "-").slice(0, 60)}.png` }).click();
  setTimeout(() => URL.revokeObjectURL(picture), 60_000);
}

/** A button that saves a picture of the boxes and texts of an element; find() gives it when the button is pressed. */
export const pictureButton = (find, label) => h("button", { type: "button", class: "plain", title: "save a picture of it", onclick: () => {
  const box = find(), whole = box.getBoundingClientRect();
  return saved(box, whole.width, whole.height, label, (context) => box.querySelectorAll("*").forEach((node) => paint(context, node, whole)));
} }, "PNG");

function paint(context, node, whole) {
  const at = node.getBoundingClientRect(), style = getComputedStyle(node);
  context.save();
  context.translate(-whole.left, -whole.top);
  context.globalAlpha = Number(style.opacity);
  const radius = parseFloat(style.borderTopLeftRadius) || 0, border = parseFloat(style.borderTopWidth);
  context.beginPath();
  context.roundRect(at.left, at.top, at.width, at.height, radius);
  context.fillStyle = style.backgroundColor;
  context.fill();
  if (style.backgroundImage.startsWith("repeating-linear-gradient")) stripes(context, at, style.backgroundImage);
  if (border) {
    context.beginPath();
    context.roundRect(at.left + border / 2, at.top + border / 2, at.width - border, at.height - border, Math.max(0, radius - border / 2));
    [context.strokeStyle, context.lineWidth] = [style.borderTopColor, border];
    context.setLineDash(style.borderTopStyle === "dashed" ? [3 * border, 3 * border] : []);
    context.stroke();
  }
  context.fillStyle = style.color;
  context.font = style.font;
  context.textBaseline = "middle";
  if (style.overflow === "hidden") {
    context.beginPath();
    context.rect(at.left, at.top, at.width, at.height);
    context.clip();
  }
  for (const text of node.childNodes) {
    if (text.nodeType !== Node.TEXT_NODE) continue;
    const range = document.createRange();
    range.selectNodeContents(text);
    const box = range.getBoundingClientRect();
    context.fillText(text.data, box.left, box.top + box.height / 2);
  }
  context.restore();
}

const STRIPE = 4;
/** CSS pixels of a stripe, as in the style sheet. */

/** The stripes of a box in the two colours of its gradient, within the path that was begun. */
function stripes(context, at, gradient) {
  const [first, second] = gradient.match(/(?:rgba?|color|oklab)\([^)]*\)/g).filter((colour, index, all) => all.indexOf(colour) === index);
  context.save();
  context.clip();
  context.fillStyle = first;
  context.fillRect(at.left, at.top, at.width, at.height);
  context.strokeStyle = second;
  context.lineWidth = STRIPE;
  for (let along = 1.5 * STRIPE * Math.SQRT2; along < at.width + at.height; along += 2 * STRIPE * Math.SQRT2) {
    context.beginPath();
    context.moveTo(at.left + along + STRIPE, at.top - STRIPE);
    context.lineTo(at.left + along - at.height - STRIPE, at.bottom + STRIPE);
    context.stroke();
  }
  context.restore();
}

/**
 * Lines over steps. series: [{name, steps, values, points}]; `points` draws marks without a line. The axis covers at least `span`.
 * pick(step) is called on a click.
 */
export function lines({ series, height = 180, pick, label, span = 0 }) {
  const known = series.map((line) => ({ ...line, at: line.steps.map((step, i) => [step, line.values[i]]).filter(([, value]) => value !== null) }));
  const all = known.flatMap((line) => line.at);
  if (!all.length) return h("div", { class: "chart none", style: { height: `${height}px` } }, "no values");
  const steps = all.map(([step]) => step), values = all.map(([, value]) => value);
  const [first, last] = [Math.min(...steps), Math.max(...steps)];
  let [least, most] = [Math.min(...values), Math.max(...values)];
  if (least >= 0 && most <= 1 && most > 0.3) [least, most] = [0, 1];
  if (most - least < span) [least, most] = [(least + most - span) / 2, (least + most + span) / 2];
  if (least === most) [least, most] = [least - (Math.abs(least) || 1) * 0.1, most + (Math.abs(most) || 1) * 0.1];
  const grid = ticks(least, most);
  const summary = `${label ?? known.map((line) => line.name).join(", ")}: steps ${first} to ${last}, newest ${known.map((line) => number(line.at.at(-1)?.[1])).join(", ")}`;
  return drawn(height, summary, (width) => {
    const x = (step) => LEFT + ((step - first) / (last - first || 1)) * (width - LEFT - RIGHT);
    const y = (value) => TOP + (1 - (value - least) / (most - least)) * (height - TOP - BOTTOM);
    const rule = h("line", { class: "rule", y1: TOP, y2: height - BOTTOM, visibility: "hidden" });
    const dots = known.map((_, i) => h("circle", { class: `dot s${i}`, r: 4, visibility: "hidden" }));
    const svg = h("svg", { viewBox: `0 0 ${width} ${height}`, width, height, "aria-hidden": "true" },
      grid.map((value) => [
        h("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }),
        h("text", { class: "axis", x: LEFT - 7, y: y(value) + 4, "text-anchor": "end" }, number(value)),
      ]),
      wholes(first, last, Math.max(2, Math.floor(width / 90))).map((step) =>
        h("text", { class: "axis", x: x(step), y: height - 5, "text-anchor": step === last && last > first ? "end" : "middle" }, number(step))),
      known.map((line, i) => line.points
        ? line.at.map(([step, value]) => h("path", { class: `mark s${i}`, d: `M${x(step)} ${y(value) - 4}l4 4-4 4-4-4z` }))
        : [
            h("path", { class: `line s${i}`, d: line.at.map(([step, value], at) => `${at ? "L" : "M"}${x(step).toFixed(1)} ${y(value).toFixed(1)}`).join("") }),
            line.at.length === 1 && h("circle", { class: `dot s${i}`, r: 3, cx: x(line.at[0][0]), cy: y(line.at[0][1]) }),
          ]),
      rule, dots);
    const nearest = (event) => {
      const step = first + ((event.clientX - svg.getBoundingClientRect().left - LEFT) / (width - LEFT - RIGHT)) * (last - first);
      return steps.reduce((best, other) => (Math.abs(other - step) < Math.abs(best - step) ? other : best));
    };
    svg.addEventListener("pointermove", (event) => {
      const step = nearest(event);
      rule.setAttribute("x1", x(step));
      rule.setAttribute("x2", x(step));
      rule.setAttribute("visibility", "visible");
      const texts = [`step ${step}`];
      known.forEach((line, i) => {
        const point = line.at.find(([other]) => other === step);
        dots[i].setAttribute("visibility", point ? "visible" : "hidden");
        if (!point) return;
        dots[i].setAttribute("cx", x(step));
        dots[i].setAttribute("cy", y(point[1]));
        texts.push(`${line.name} ${number(point[1], 4)}`);
      });
      floating(svg, x(step), texts.join("\n"));
    });
    svg.addEventListener("pointerleave", () => {
      [rule, ...dots].forEach((node) => node.setAttribute("visibility", "hidden"));
      hideTip();
    });
    if (pick) {
      svg.classList.add("picks");
      svg.addEventListener("click", (event) => pick(nearest(event)));
    }
    return svg;
  });
}

const wholes = (first, last, count) => [...new Set(ticks(first, last, count).filter(Number.isInteger))];

function floating(svg, x, text) {
  const box = document.getElementById("tip");
  box.textContent = text;
  box.hidden = false;
  const at = svg.getBoundingClientRect();
  const left = at.left + x + (x > at.width / 2 ? -box.offsetWidth - 12 : 12);
  box.style.left = `${Math.min(Math.max(8, left), innerWidth - box.offsetWidth - 8)}px`;
  box.style.top = `${Math.max(8, at.top + 8)}px`;
}

/** A curve without axes, for a table or a card. */
export function spark(values, label, { floor = Infinity, width = 120, height = 30 } = {}) {
  const known = values.map((value, index) => [index, value]).filter(([, value]) => value !== null);
  if (!known.length) return h("span", { class: "dim" }, "–");
  const least = Math.min(floor, ...known.map(([, value]) => value)), most = Math.max(...known.map(([, value]) => value));
  const x = (index) => 2 + (index / (values.length - 1 || 1)) * (width - 6);
  const y = (value) => height - 3 - ((value - least) / (most - least || 1)) * (height - 6);
  const path = known.map(([index, value], i) => `${i ? "L" : "M"}${x(index).toFixed(1)} ${y(value).toFixed(1)}`).join("");
  const [end, value] = known.at(-1);
  return h("svg", { class: "spark", viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": `${label} from ${number(known[0][1])} to ${number(value)}` },
    h("path", { class: "line s0", d: path }), h("circle", { class: "dot s0", cx: x(end), cy: y(value), r: 2.5 }));
}

/** Columns of counts. bins: [{from, to, count}]; chosen: index or null; pick(index) on a click or Enter. */
export function histogram({ bins, chosen, pick }) {
  const most = Math.max(...bins.map((bin) => bin.count), 1);
  const columns = h("div", { class: "histogram", role: "group", "aria-label": "Rewards" }, bins.map((bin, index) =>
    tip(h("button", {
      type: "button", class: index === chosen ? "chosen" : null, "aria-pressed": index === chosen ? "true" : "false", disabled: !bin.count,
      "aria-label": `${bin.count} rollouts with a reward from ${number(bin.from)} to ${number(bin.to)}`, onclick: () => pick(index),
    }, h("span", { class: "column" }, h("span", { class: "bar", style: { height: bin.count ? `max(3px, ${(bin.count / most) * 100}%)` : "0" } },
      bin.count ? h("span", { class: "count" }, number(bin.count)) : null)),
    h("span", { class: "tick" }, index === 0 || index === bins.length - 1 || bins.length < 9 ? number(bin.from === bin.to || index === 0 ? bin.from : bin.to, 2) : "")),
    `${bin.count} rollouts, reward ${number(bin.from)} to ${number(bin.to)}`)));
  return h("div", { class: "chart-box" }, columns, pictureButton(() => columns, "rewards"));
}

/** Stacked columns, one per step. rows: [{step, parts: {name: seconds}}]; names in the order of the stack. */
export function stacked({ rows, names, height = 170, unit, pick }) {
  const most = Math.max(...rows.map((row) => names.reduce((sum, name) => sum + (row.parts[name] ?? 0), 0)), 1e-9);
  return drawn(height, `${names.join(", ")} of each step`, (width) => {
    const inner = width - LEFT - RIGHT;
    const slot = inner / rows.length;
    const y = (value) => TOP + (1 - value / most) * (height - TOP - BOTTOM);
    const every = Math.ceil(rows.length / Math.max(2, Math.floor(width / 60)));
    const svg = h("svg", { viewBox: `0 0 ${width} ${height}`, width, height, class: pick ? "picks" : null, "aria-hidden": "true" },
      ticks(0, most, 3).map((value) => [
        h("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }),
        h("text", { class: "axis", x: LEFT - 7, y: y(value) + 4, "text-anchor": "end" }, unit(value)),
      ]),
      rows.map((row, index) => {
        let sum = 0;
        return names.map((name) => {
          const value = row.parts[name] ?? 0;
          if (!value) return null;
          const from = y(sum);
          sum += value;
          return h("rect", { class: `part ${colour(name)}`, x: LEFT + index * slot + Math.min(1, slot * 0.1), width: Math.max(0.5, slot - Math.min(2, slot * 0.2)), y: y(sum), height: Math.max(0, from - y(sum)) });
        });
      }),
      rows.map((row, index) => index % every ? null : h("text", { class: "axis", x: LEFT + (index + 0.5) * slot, y: height - 5, "text-anchor": "middle" }, number(row.step))));
    const at = (event) => rows[Math.min(rows.length - 1, Math.max(0, Math.floor((event.clientX - svg.getBoundingClientRect().left - LEFT) / slot)))];
    svg.addEventListener("pointermove", (event) => {
      const row = at(event);
      floating(svg, LEFT + (rows.indexOf(row) + 0.5) * slot, [`step ${row.step}`, ...names.filter((name) => row.parts[name]).map((name) => `${name} ${unit(row.parts[name])}`)].join("\n"));
    });
    svg.addEventListener("pointerleave", hideTip);
    if (pick) svg.addEventListener("click", (event) => pick(at(event).step));
    return svg;
  });
}

/** One bar of parts. parts: [{name, value, kind}]. */
export function bar(parts, total = parts.reduce((sum, part) => sum + part.value, 0)) {
  return h("div", { class: "bar-row" }, parts.filter((part) => part.value > 0).map((part) =>
    tip(h("span", { class: `piece ${part.kind ?? ""}`, style: { "flex-grow": part.value / (total || 1) } }), `${part.name} ${part.shown ?? number(part.value)}`)));
}

export const legend = (items) => h("ul", { class: "legend" }, items.map(({ name, kind, value }) =>
  h("li", {}, h("i", { class: `swatch ${kind}` }), name, value !== undefined && h("b", {}, value))));
