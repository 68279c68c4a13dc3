// Rendering of responses by their shape: bars, images, plots, texts, and JSON on demand.

import { el } from "./dom.js";
import { formatNumber, formatScore, isNumbers, renderImage, renderScores, renderVector } from "./plot.js";

const IMAGES = [["iVBORw0KGgo", "png"], ["/9j/", "jpeg"], ["R0lGOD", "gif"], ["UklGR", "webp"]];
const MAX_LISTED_NUMBERS = 8;
const MAX_TABLE_SIDE = 12;
const MAX_DEPTH = 6;
const MAX_JSON_LENGTH = 200_000;
const MAX_SUMMARY_LENGTH = 24;

/** Render the outputs of a response, each under its name. */
export function renderOutputs(document, description) {
  const tensors = new Map(description.outputs.map((tensor) => [tensor.name, tensor]));
  const parts = Object.entries(document.outputs ?? {}).map(([name, value]) =>
    el("div", { class: "output", "data-output": name }, el("h4", { text: name }), renderValue(value, tensors.get(name))));
  return el("div", {}, ...parts);
}

/** Return the answer in a few words: the best label, a number, or the beginning of a text. */
export function summarizeOutputs(document) {
  const [value] = Object.values(document.outputs ?? {});
  return summarizeValue(squeeze(value)).slice(0, MAX_SUMMARY_LENGTH);
}

function summarizeValue(value) {
  if (isNumbers(value)) return value.length <= MAX_LISTED_NUMBERS ? value.map(formatNumber).join(" ") : `${value.length} numbers`;
  if (Array.isArray(value)) {
    const [best] = (findLabelledScores(value) ?? []).sort((a, b) => b.score - a.score);
    return best ? `${best.label} · ${formatScore(best.score)}` : `${value.length} values`;
  }
  if (isObject(value)) return value.b64 ? "a file" : summarizeValue(Object.values(value)[0] ?? "");
  return String(value ?? "");
}

function renderJson(document) {
  const pre = el("pre", { tabindex: "0", text: JSON.stringify(document, null, 1).slice(0, MAX_JSON_LENGTH) });
  return el("details", {}, el("summary", { text: "JSON" }), pre);
}

const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);

function renderValue(original, tensor = {}, depth = 0) {
  const value = squeeze(original);
  if (isObject(value) && typeof value.b64 === "string" && Object.keys(value).length === 1) return renderBytes(value.b64);
  if (typeof value === "string") return el("p", { class: "text-output", text: value });
  if (!Array.isArray(value) && !isObject(value)) return el("p", { class: "figure", text: formatNumber(value) });
  if (depth > MAX_DEPTH) return renderJson(value);
  if (Array.isArray(value)) return renderList(value, tensor, depth);
  return renderObject(value, depth);
}

/** Render the fields of an object below each other, and its truth values as a line of labels. */
function renderObject(value, depth) {
  const isFlag = ([, item]) => typeof item === "boolean";
  const entries = Object.entries(value);
  const others = entries.filter((entry) => !isFlag(entry));
  const flags = entries.filter(isFlag).map(([name, item]) => el("span", { class: item ? "pill warn" : "pill", text: `${name}: ${item ? "yes" : "no"}` }));
  return el("div", { class: "object" },
    ...others.map(([name, item]) => el("div", { class: "entry" }, others.length > 1 ? el("h4", { text: name }) : null, renderValue(item, {}, depth + 1))),
    flags.length ? el("div", { class: "line" }, ...flags) : null);
}

/** Remove the outer dimensions of size 1. */
function squeeze(value) {
  let inner = value;
  while (Array.isArray(inner) && inner.length === 1) [inner] = inner;
  return inner;
}

function renderList(value, tensor, depth) {
  if (value.length === 0) return el("p", { class: "quiet", text: "empty" });
  if (isNumbers(value)) return renderNumbers(value, tensor);
  const labelledScores = findLabelledScores(value);
  if (labelledScores) return renderScores(labelledScores);
  const sizes = findShape(value);
  if (sizes) return renderArray(value, sizes, tensor);
  const items = value.slice(0, 50).map((item) => el("li", {}, renderValue(item, {}, depth + 1)));
  return el("div", {}, el("ol", {}, ...items),
    value.length > 50 ? el("p", { class: "quiet", text: `and ${value.length - 50} more` }) : null);
}

/** Return labels and scores if every object has a text and a number under the same keys, else null. */
function findLabelledScores(rows) {
  if (!isObject(rows[0])) return null;
  const keys = Object.keys(rows[0]);
  const label = keys.find((key) => rows.every((row) => typeof row?.[key] === "string"));
  const score = keys.find((key) => rows.every((row) => typeof row?.[key] === "number"));
  const simple = rows.every((row) => isObject(row) && Object.values(row).every((item) => typeof item !== "object"));
  return label && score && simple ? rows.map((row) => ({ label: row[label], score: row[score] })) : null;
}

function renderNumbers(values, tensor) {
  const sum = values.reduce((total, value) => total + value, 0);
  const areProbabilities = values.length > 1 && values.length <= 10_000 && /^(FP|BF)/.test(tensor.datatype ?? "")
    && Math.abs(sum - 1) < 0.01 && values.every((value) => value >= 0 && value <= 1);
  if (areProbabilities) return renderScores(values.map((score, index) => ({ label: String(index), score })));
  if (values.length <= MAX_LISTED_NUMBERS) return el("p", { class: "figure", text: values.map(formatNumber).join("  ") });
  return renderVector(values);
}

/** Return the shape of nested lists of numbers, or null if it is irregular. */
function findShape(value) {
  const sizes = [];
  for (let inner = value; Array.isArray(inner); [inner] = inner) sizes.push(inner.length);
  const isRegular = (inner, axis) => (axis === sizes.length ? typeof inner === "number"
    : Array.isArray(inner) && inner.length === sizes[axis] && inner.every((item) => isRegular(item, axis + 1)));
  return sizes.length > 1 && isRegular(value, 0) ? sizes : null;
}

function renderArray(value, sizes, tensor) {
  const [first] = sizes;
  const last = sizes.at(-1);
  if (sizes.length === 3 && tensor.image) {
    const channelsFirst = tensor.image.layout === "NCHW";
    if ([1, 3, 4].includes(channelsFirst ? first : last)) return renderImage(value, channelsFirst);
  }
  if (sizes.length === 2 && first <= MAX_TABLE_SIDE && last <= MAX_TABLE_SIDE) return renderTable(value);
  if (sizes.length === 2 && tensor.image) return renderImage(value, false);
  return el("div", {}, el("p", { class: "quiet", text: sizes.join(" × ") }), renderVector(value.flat(Infinity)));
}

function renderTable(rows) {
  const lines = rows.map((row) => el("tr", {}, ...row.map((item) => el("td", { class: "number", text: formatNumber(item) }))));
  return el("div", { class: "scroll" }, el("table", {}, el("tbody", {}, ...lines)));
}

function renderBytes(b64) {
  const [, kind] = IMAGES.find(([start]) => b64.startsWith(start)) ?? [];
  const size = Math.floor((b64.length * 3) / 4);
  if (kind) return el("img", { src: `data:image/${kind};base64,${b64}`, alt: `Output image, ${size} bytes` });
  const href = `data:application/octet-stream;base64,${b64}`;
  return el("p", {}, el("a", { href, download: "output.bin", text: `${size} bytes` }));
}
