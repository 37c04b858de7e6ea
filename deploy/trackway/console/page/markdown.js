// The Markdown that models write, drawn from elements and text nodes: nothing of it becomes markup. Links stay text.

import { h, visible } from "./dom.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})(.*)/;
const KINDS = [
  ["table", /^\s*\|.*\|\s*$/],
  ["heading", /^#{1,6} \S/],
  ["quote", /^> ?/],
  ["item", /^(\s*)([-*+•]|\d{1,3}[.)])\s+(?=\S)/],
];
const INLINE = /(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)|(?<![\w*])\*\*(?=\S)([^*]+?)(?<=\S)\*\*(?![\w*])/g;

/** Blocks of a text: fenced code, headings with their signs, list items, quotes, tables as code, and paragraphs with their newlines. */
export function markdown(text) {
  const blocks = [];
  const lines = text.split("\n");
  for (let at = 0; at < lines.length; at += 1) {
    const fence = lines[at].match(FENCE);
    if (fence && !fence[2].includes("`")) {
      const from = at + 1;
      do at += 1;
      while (at < lines.length && !closes(lines[at], fence[1]));
      blocks.push({ kind: "code", language: fence[2].trim(), lines: lines.slice(from, at) });
      continue;
    }
    const kind = KINDS.find(([, sign]) => sign.test(lines[at]))?.[0] ?? "text";
    if (["table", "quote", "text"].includes(kind) && blocks.at(-1)?.kind === kind) blocks.at(-1).lines.push(lines[at]);
    else blocks.push({ kind, lines: [lines[at]] });
  }
  return h("div", { class: "prose" }, blocks.map(drawn));
}

function closes(line, fence) {
  const [, marks, rest] = line.match(FENCE) ?? [null, "", ""];
  return marks[0] === fence[0] && marks.length >= fence.length && !rest.trim();
}

function drawn({ kind, language, lines }) {
  const text = lines.join("\n");
  if (kind === "code") return h("pre", { class: "code", "data-language": visible(language) || null }, visible(text));
  if (kind === "table") return h("pre", { class: "code" }, visible(text));
  if (kind === "heading") return h("p", { class: "strong" }, inline(text));
  if (kind === "quote") return h("p", { class: "quote" }, inline(text.replaceAll(/^> ?/gm, "")));
  if (kind === "text") return text.trim() ? h("p", {}, inline(text.trimEnd().replace(/^\n+/, ""))) : null;
  const [sign, blanks, mark] = text.match(KINDS.find(([name]) => name === "item")[1]);
  return h("p", { class: "item", style: { "--depth": Math.min(8, Math.floor(blanks.length / 2)) } }, h("span", { class: "dim" }, mark), h("span", {}, inline(text.slice(sign.length))));
}

function inline(text) {
  const parts = [];
  let from = 0;
  for (const found of text.matchAll(INLINE)) {
    parts.push(visible(text.slice(from, found.index)), found[1] ? h("code", {}, visible(found[2])) : h("b", {}, visible(found[3])));
    from = found.index + found[0].length;
  }
  return [...parts, visible(text.slice(from))];
}
