// Charts and images of numbers.

import { el, svg } from "./dom.js";

const WIDTH = 360;
const HEIGHT = 72;
const SIMILAR = 0.7;
const RELATED = 0.4;
const LONG_LABEL = 12;

export const formatNumber = (value) =>
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
export const formatScore = (score) => (isShare(score) ? formatShare(score) : formatNumber(score));
let lastShares = new Map(); // by label: what the bars showed before, from which they move

/** Draw the best label large, and a table of scores in descending order with bars. The track of a share stands for 100 %. */
export function renderScores(rows, limit = 10) {
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
export function renderImage(rows, channelsFirst) {
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
