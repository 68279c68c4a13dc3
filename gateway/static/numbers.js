// What is typed for numbers and lists becomes JSON. As text: an INT64 does not survive JavaScript's numbers.

const EXACT = /^-?(0|[1-9]\d*)(\.\d+)?(e[+-]?\d+)?$/i;

/** JSON for a tensor of this shape, of JSON or of numbers between blanks, commas and lines. Throws `Error`. */
export function asJson(typed, shape) {
  const text = typed.trim();
  try {
    JSON.parse(text);
    return shape.length > 0 && EXACT.test(text) && !single(shape) ? nested([text], shape) : text;
  } catch {
    // not JSON; perhaps plain numbers
  }
  const lines = text.split(/\r?\n/).filter((line) => line.trim());
  if (shape.length === 2 && lines.length > 1) return `[${lines.map((line) => list(tokens(line))).join(",")}]`;
  const found = tokens(text);
  return found.length === 1 && single(shape) ? found[0] : nested(found, shape);
}

const single = (shape) => shape.every((size) => size === 1) && shape.length < 2;
const list = (items) => `[${items.join(",")}]`;
const tokens = (text) => text.split(/[\s,;]+/).filter(Boolean).map(token);

function token(word) {
  if (EXACT.test(word) || word === "true" || word === "false") return word;
  if (Number.isFinite(Number(word))) return String(Number(word));
  throw new Error(`“${word.slice(0, 40)}” is neither JSON nor a number`);
}

/** In rows of the shape; of the unknown sizes the last takes what there is, the others are 1. */
function nested(values, shape) {
  const free = shape.lastIndexOf(-1);
  const sizes = shape.map((size, at) => (size < 0 && at !== free ? 1 : size));
  const known = sizes.reduce((product, size) => (size < 0 ? product : product * size), 1);
  const wanted = free < 0 ? known : Math.max(Math.ceil(values.length / known), 1) * known;
  if (values.length !== wanted) {
    throw new Error(`${free < 0 ? wanted : `a multiple of ${known}`} numbers are wanted, and ${values.length} are there`);
  }
  if (free >= 0) sizes[free] = wanted / known;
  let rows = values;
  for (const size of sizes.reverse()) {
    const longer = [];
    for (let at = 0; at < rows.length; at += size) longer.push(list(rows.slice(at, at + size)));
    rows = longer;
  }
  return rows[0];
}
