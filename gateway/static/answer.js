// An answer for people, by its shape alone: scores, pictures, vectors, texts; and JSON on demand.

import { el } from "./dom.js";
import { isNumbers, picture, scores, short, vector } from "./plot.js";

const IMAGES = [["iVBORw0KGgo", "png"], ["/9j/", "jpeg"], ["R0lGOD", "gif"], ["UklGR", "webp"]];
const FEW = 8; // numbers that are read one by one
const CELLS = 12; // of a table's side
const DEEP = 6;
const LONG = 200_000; // characters of JSON that are shown

/** The outputs of one answer, each under its name. */
export function outputs(document, description, withJson = true) {
  const known = new Map(description.outputs.map((tensor) => [tensor.name, tensor]));
  const parts = Object.entries(document.outputs ?? {}).map(([name, value]) =>
    el("div", { class: "output", "data-output": name }, el("h4", { text: name }), value_(value, known.get(name))));
  return el("div", {}, ...parts, withJson ? raw(document) : null);
}

export function raw(document) {
  const pre = el("pre", { tabindex: "0" });
  const details = el("details", {}, el("summary", { text: "JSON" }), pre);
  details.addEventListener("toggle", () => {
    const text = JSON.stringify(document, null, 1);
    pre.textContent = text.length > LONG ? `${text.slice(0, LONG)}\n… ${text.length - LONG} characters more` : text;
  }, { once: true });
  return details;
}

const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);

function value_(given, tensor = {}, depth = 0) {
  const value = squeezed(given);
  if (isObject(value) && typeof value.b64 === "string" && Object.keys(value).length === 1) return bytes(value.b64);
  if (typeof value === "string") return el("p", { class: "said", text: value });
  if (!Array.isArray(value) && !isObject(value)) return el("p", { class: "figure", text: short(value) });
  if (depth > DEEP) return raw(value);
  if (Array.isArray(value)) return list(value, tensor, depth);
  const items = Object.entries(value).flatMap(([name, item]) => [el("dt", { text: name }), el("dd", {}, value_(item, {}, depth + 1))]);
  return el("dl", {}, ...items);
}

/** Without the dimensions of size 1 around it. */
function squeezed(value) {
  let inner = value;
  while (Array.isArray(inner) && inner.length === 1) [inner] = inner;
  return inner;
}

function list(value, tensor, depth) {
  if (value.length === 0) return el("p", { class: "quiet", text: "empty" });
  if (isNumbers(value)) return numbers(value, tensor);
  const ranked = labelled(value);
  if (ranked) return scores(ranked);
  const sizes = dimensions(value);
  if (sizes) return array(value, sizes, tensor);
  const items = value.slice(0, 50).map((item) => el("li", {}, value_(item, {}, depth + 1)));
  return el("div", {}, el("ol", {}, ...items),
    value.length > 50 ? el("p", { class: "quiet", text: `and ${value.length - 50} more` }) : null);
}

/** Objects that each have a text and a number in the same places: names and their scores. */
function labelled(rows) {
  if (!isObject(rows[0])) return null;
  const keys = Object.keys(rows[0]);
  const label = keys.find((key) => rows.every((row) => typeof row?.[key] === "string"));
  const score = keys.find((key) => rows.every((row) => typeof row?.[key] === "number"));
  const simple = rows.every((row) => isObject(row) && Object.values(row).every((item) => typeof item !== "object"));
  return label && score && simple ? rows.map((row) => ({ label: row[label], score: row[score] })) : null;
}

function numbers(values, tensor) {
  const sum = values.reduce((total, value) => total + value, 0);
  const likely = values.length > 1 && values.length <= 10_000 && /^(FP|BF)/.test(tensor.datatype ?? "")
    && Math.abs(sum - 1) < 0.01 && values.every((value) => value >= 0 && value <= 1);
  if (likely) return scores(values.map((score, at) => ({ label: String(at), score })));
  if (values.length <= FEW) return el("p", { class: "figure", text: values.map(short).join("  ") });
  return vector(values);
}

/** The sizes of nested lists of numbers that are even; or null. */
function dimensions(value) {
  const sizes = [];
  for (let inner = value; Array.isArray(inner); [inner] = inner) sizes.push(inner.length);
  const even = (inner, at) => (at === sizes.length ? typeof inner === "number"
    : Array.isArray(inner) && inner.length === sizes[at] && inner.every((item) => even(item, at + 1)));
  return sizes.length > 1 && even(value, 0) ? sizes : null;
}

function array(value, sizes, tensor) {
  const [first] = sizes;
  const last = sizes.at(-1);
  if (sizes.length === 3 && tensor.image) {
    const channelsFirst = tensor.image.layout === "NCHW";
    if ([1, 3, 4].includes(channelsFirst ? first : last)) return picture(value, channelsFirst);
  }
  if (sizes.length === 2 && first <= CELLS && last <= CELLS) return table(value);
  if (sizes.length === 2 && tensor.image) return picture(value, false);
  return el("div", {}, el("p", { class: "quiet", text: sizes.join(" × ") }), vector(value.flat(Infinity)));
}

function table(rows) {
  const lines = rows.map((row) => el("tr", {}, ...row.map((item) => el("td", { class: "number", text: short(item) }))));
  return el("div", { class: "scroll" }, el("table", {}, el("tbody", {}, ...lines)));
}

function bytes(b64) {
  const [, kind] = IMAGES.find(([start]) => b64.startsWith(start)) ?? [];
  const size = Math.floor((b64.length * 3) / 4);
  if (kind) return el("img", { src: `data:image/${kind};base64,${b64}`, alt: `The answer, an image of ${size} bytes` });
  const href = `data:application/octet-stream;base64,${b64}`;
  return el("p", {}, el("a", { href, download: "answer.bin", text: `${size} bytes` }));
}
