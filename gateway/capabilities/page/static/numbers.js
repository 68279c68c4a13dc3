// Conversion of entered numbers to JSON, as text, because JavaScript's numbers are too small for INT64.

const EXACT = /^-?(0|[1-9]\d*)(\.\d+)?(e[+-]?\d+)?$/i;

/** Return JSON for a tensor of this shape, from JSON or separated numbers. Throws `Error`. */
export function asJson(entered, shape) {
  const text = entered.trim();
  try {
    JSON.parse(text);
    return shape.length > 0 && EXACT.test(text) && !isSingle(shape) ? nest([text], shape) : text;
  } catch {
    // The text is not JSON, but may be separated numbers.
  }
  const lines = text.split(/\r?\n/).filter((line) => line.trim());
  if (shape.length === 2 && lines.length > 1) return `[${lines.map((line) => toList(parseTokens(line))).join(",")}]`;
  const numbers = parseTokens(text);
  return numbers.length === 1 && isSingle(shape) ? numbers[0] : nest(numbers, shape);
}

const isSingle = (shape) => shape.every((size) => size === 1) && shape.length < 2;
const toList = (items) => `[${items.join(",")}]`;
const parseTokens = (text) => text.split(/[\s,;]+/).filter(Boolean).map(parseToken);

function parseToken(word) {
  if (EXACT.test(word) || word === "true" || word === "false") return word;
  if (Number.isFinite(Number(word))) return String(Number(word));
  throw new Error(`“${word.slice(0, 40)}” is neither JSON nor a number`);
}

/** Nest the values in lists of this shape. The last unknown size is computed, the others are 1. */
function nest(values, shape) {
  const free = shape.lastIndexOf(-1);
  const sizes = shape.map((size, index) => (size < 0 && index !== free ? 1 : size));
  const known = sizes.reduce((product, size) => (size < 0 ? product : product * size), 1);
  const expected = free < 0 ? known : Math.max(Math.ceil(values.length / known), 1) * known;
  if (values.length !== expected) {
    throw new Error(`expected ${free < 0 ? expected : `a multiple of ${known}`} numbers, got ${values.length}`);
  }
  if (free >= 0) sizes[free] = expected / known;
  let rows = values;
  for (const size of sizes.reverse()) {
    const nextRows = [];
    for (let start = 0; start < rows.length; start += size) nextRows.push(toList(rows.slice(start, start + size)));
    rows = nextRows;
  }
  return rows[0];
}
