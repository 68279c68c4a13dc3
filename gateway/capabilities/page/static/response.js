// Rendering of responses by their shape: bars, images, plots, texts, and JSON on demand.

import { el, svg } from "./dom.js";

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

// Charts and images of numbers.

const WIDTH = 360;
const HEIGHT = 72;
const SIMILAR = 0.7;
const RELATED = 0.4;
const LONG_LABEL = 12;

const formatNumber = (value) =>
  typeof value !== "number" ? String(value)
    : Number.isInteger(value) && Math.abs(value) < 1e9 ? String(value)
      : Math.abs(value) >= 1e6 || Math.abs(value) < 1e-3 ? value.toExponential(2) : String(Number(value.toPrecision(4)));

export const isNumbers = (value) => Array.isArray(value) && value.length > 0 && value.every((item) => typeof item === "number");

const norm = (values) => Math.sqrt(values.reduce((sum, value) => sum + value * value, 0));

/** The vectors must have the same length. */
export const cosineSimilarity = (a, b) => a.reduce((sum, value, index) => sum + value * b[index], 0) / (norm(a) * norm(b));

/** Draw a vector as bars from zero, at most one per pixel. */
export function renderVector(values) {
  const bars = Math.min(values.length, WIDTH);
  const shown = Array.from({ length: bars }, (_, index) => values[Math.floor((index * values.length) / bars)]);
  const low = shown.reduce((lowest, value) => Math.min(lowest, value), 0);
  const high = shown.reduce((highest, value) => Math.max(highest, value), 0);
  const scale = HEIGHT / (high - low || 1);
  const step = WIDTH / bars;
  const paths = shown.map((value, index) =>
    `M${(index * step).toFixed(1)} ${(high * scale).toFixed(1)}h${(step * 0.8).toFixed(2)}v${(-value * scale).toFixed(1)}h${(-step * 0.8).toFixed(2)}z`);
  const summary = `${values.length} numbers from ${formatNumber(Math.min(...shown))} to ${formatNumber(Math.max(...shown))}, norm ${formatNumber(norm(values))}`;
  const caption = el("figcaption", { class: "small", text: summary });
  const plot = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": summary, preserveAspectRatio: "none" },
    svg("path", { d: paths.join("") }));
  plot.addEventListener("pointermove", ({ clientX }) => {
    const { left, width } = plot.getBoundingClientRect();
    const index = Math.min(Math.max(Math.floor(((clientX - left) / width) * values.length), 0), values.length - 1);
    caption.textContent = `[${index}] ${formatNumber(values[index])}`;
  });
  plot.addEventListener("pointerleave", () => { caption.textContent = summary; });
  return el("figure", { class: "vector" }, plot, caption);
}

export const wordFor = (similarity) => (similarity > SIMILAR ? "similar" : similarity > RELATED ? "related" : "unrelated");

/** Show a cosine similarity as a number, in words and on a scale from -1 to 1. */
export function renderSimilarity(similarity) {
  const bar = el("span");
  bar.style.left = `${50 + Math.min(similarity, 0) * 50}%`;
  bar.style.width = `${Math.abs(similarity) * 50}%`;
  return el("div", {},
    el("div", { class: "similarity" }, el("strong", { id: "cosine", text: similarity.toFixed(3) }), el("span", { class: "quiet", text: wordFor(similarity) })),
    el("div", { class: "scale", "aria-hidden": "true" }, bar),
    el("div", { class: "scale-ends small", "aria-hidden": "true" }, el("span", { text: "-1" }), el("span", { text: "cosine similarity" }), el("span", { text: "1" })));
}

const formatShare = (share) => (share > 0 && share < 0.001 ? "< 0.1 %" : `${(share * 100).toFixed(1)} %`);
const isShare = (score) => score >= 0 && score <= 1;
const formatScore = (score) => (isShare(score) ? formatShare(score) : formatNumber(score));
let lastShares = new Map(); // by label: what the bars showed before, from which they move

/** Draw the best label large, and a table of scores in descending order with bars. The track of a share stands for 100 %. */
function renderScores(rows, limit = 10) {
  const sorted = [...rows].sort((a, b) => b.score - a.score);
  const [best] = sorted;
  const areShares = sorted.every(({ score }) => isShare(score));
  const scale = areShares ? 1 : Math.max(best.score, Number.MIN_VALUE);
  const format = areShares ? formatShare : formatNumber;
  const shares = new Map(sorted.map(({ label, score }) => [label, Math.max(Math.min(score / scale, 1), 0)]));
  const lines = sorted.slice(0, limit).map(({ label, score }) => el("tr", {},
    el("th", { scope: "row", text: label }),
    el("td", { class: "share-cell" }, el("span", { class: "track" }, renderBar(lastShares.get(label) ?? 0, shares.get(label)))),
    el("td", { class: "number", text: format(score) })));
  lastShares = shares;
  const names = ["Label", "", "Score"].map((name) => el(name ? "th" : "td", name ? { scope: "col", text: name } : {}));
  return el("div", {},
    el("p", { class: best.label.length > LONG_LABEL ? "winner long-label" : "winner" }, el("span", { text: best.label }), el("span", { text: format(best.score) })),
    el("table", { class: "scores" }, el("thead", { class: "visually-hidden" }, el("tr", {}, ...names)), el("tbody", {}, ...lines)),
    sorted.length > limit ? el("p", { class: "small", text: `and ${sorted.length - limit} more` }) : null);
}

/** The bar moves from the old share to the new one. */
function renderBar(from, to) {
  const bar = el("span", { class: "bar" });
  bar.style.transform = `scaleX(${from})`;
  requestAnimationFrame(() => requestAnimationFrame(() => { bar.style.transform = `scaleX(${to})`; }));
  return bar;
}

/** Draw rows of grey values, or of channels, as an image. Values are scaled from the lowest to the highest. */
function renderImage(rows, channelsFirst) {
  const planes = channelsFirst ? rows : null;
  const grid = planes ? planes[0] : rows;
  const [height, width] = [grid.length, grid[0].length];
  const channels = planes ? planes.length : Array.isArray(grid[0][0]) ? grid[0][0].length : 1;
  const valueAt = (y, x, channel) => (planes ? planes[channel][y][x] : Array.isArray(grid[y][x]) ? grid[y][x][channel] : grid[y][x]);
  const flat = rows.flat(Infinity);
  const low = flat.reduce((lowest, value) => Math.min(lowest, value), Infinity);
  const high = flat.reduce((highest, value) => Math.max(highest, value), -Infinity);
  const summary = `${width} × ${height}, values from ${formatNumber(low)} to ${formatNumber(high)}`;
  const canvas = el("canvas", { width, height, role: "img", "aria-label": summary, class: "pixels" });
  const pixels = new ImageData(width, height);
  for (let y = 0; y < height; y += 1) {
    for (let x = 0; x < width; x += 1) {
      for (let channel = 0; channel < 4; channel += 1) {
        const value = channel === 3 && channels < 4 ? high : valueAt(y, x, channels < 3 ? 0 : channel);
        pixels.data[(y * width + x) * 4 + channel] = high === low ? (channel === 3 ? 255 : 128) : (255 * (value - low)) / (high - low);
      }
    }
  }
  canvas.getContext("2d").putImageData(pixels, 0, 0);
  return el("figure", {}, canvas, el("figcaption", { class: "small", text: summary }));
}
