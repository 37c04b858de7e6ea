// What differs between two texts, by words.

const MOST_CELLS = 4_000_000;
/** Of the table of a comparison; longer texts are compared as one piece each, after their common beginning and end. */

/** Pieces of `text`, in order: {text, same}; `same` is false for words that `other` lacks in that place. */
export function differences(text, other) {
  const words = split(text), others = split(other);
  let start = 0;
  while (start < Math.min(words.length, others.length) && words[start] === others[start]) start += 1;
  let end = 0;
  while (end < Math.min(words.length, others.length) - start && words.at(-1 - end) === others.at(-1 - end)) end += 1;
  const middle = words.slice(start, words.length - end), between = others.slice(start, others.length - end);
  const isSame = [...Array(start).fill(true), ...common(middle, between), ...Array(end).fill(true)];
  const pieces = [];
  words.forEach((word, index) => {
    if (pieces.at(-1)?.same === isSame[index]) pieces.at(-1).text += word;
    else pieces.push({ text: word, same: isSame[index] });
  });
  return pieces;
}

/** Words, each with the blanks after it, and signs by themselves. */
const split = (text) => text.match(/[\p{L}\p{N}_]+\s*|[^\p{L}\p{N}_]\s*/gu) ?? [];

/** Whether each word is in the longest common subsequence. */
function common(words, others) {
  const isSame = Array(words.length).fill(false);
  const width = others.length + 1;
  if (!words.length || !others.length || words.length * width > MOST_CELLS) return isSame;
  const longest = new Uint16Array((words.length + 1) * width);
  for (let i = words.length - 1; i >= 0; i -= 1)
    for (let j = others.length - 1; j >= 0; j -= 1)
      longest[i * width + j] = words[i] === others[j] ? longest[(i + 1) * width + j + 1] + 1 : Math.max(longest[(i + 1) * width + j], longest[i * width + j + 1]);
  for (let i = 0, j = 0; i < words.length && j < others.length; ) {
    if (words[i] === others[j]) {
      isSame[i] = true;
      [i, j] = [i + 1, j + 1];
    } else if (longest[(i + 1) * width + j] >= longest[i * width + j + 1]) i += 1;
    else j += 1;
  }
  return isSame;
}
