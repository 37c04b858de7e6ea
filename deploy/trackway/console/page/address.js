// What an address of the page must have, so that a mistyped one is told in the words of the address.

import { ApiError } from "./api.js";

const PLACE = ["run", "step", "sample", "rollout"];
const NEEDS = { run: ["run"], step: ["run", "step"], trajectory: PLACE, tokens: PLACE, prompt: ["run", "sample"], compare: ["run"], search: ["run"], failures: ["run"], evaluations: ["run"], config: ["run"] };
const WHOLE = ["step", "rollout", "row", "offset", "at", "place", "bin", "since", "first_step", "last_step"];
const NUMBERS = ["least", "most"];
const CHOICES = { validation: ["true", "false"], regex: ["1"], tool_right: ["1"] };
const LONGEST = { run: 300, text: 1000, message: 300, query: 8000 };

/** A refusal that the page shows with a link back. */
export const misfit = (expected, got, remedy) => new ApiError(422, `expected ${expected} in the address, got ${got}; ${remedy}`);

/** Raises ApiError for an address that lacks what its view needs, or has a value that nothing can have. */
export function check(view, parameters) {
  for (const name of NEEDS[view] ?? [])
    if (!parameters[name]) throw misfit(`${name}=…`, "none", name === "run" ? "open the list of runs to choose one" : "open the run to choose one");
  for (const [name, text] of Object.entries(parameters)) {
    const expected = !text ? null
      : WHOLE.includes(name) && !/^\d{1,15}$/.test(text) ? `a whole number from 0 as ${name}`
      : NUMBERS.includes(name) && !Number.isFinite(Number(text)) ? `a number as ${name}`
      : CHOICES[name]?.includes(text) === false ? `${CHOICES[name].join(" or ")} as ${name}` : null;
    if (expected) throw misfit(expected, JSON.stringify(text.slice(0, 60)), "correct it, or go back");
    if (text.length > LONGEST[name]) throw misfit(`at most ${LONGEST[name]} characters as ${name}`, text.length, "shorten it, or go back");
  }
}
