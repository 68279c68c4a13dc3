// Charts and images of numbers.

import { el, svg } from "./dom.js";

const WIDTH = 360;
const HEIGHT = 64;

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
  return el("figure", { class: "vector" },
    svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": summary, preserveAspectRatio: "none" },
      svg("path", { d: paths.join("") })),
    el("figcaption", { class: "quiet", text: summary }));
}

const formatShare = (share) => (share > 0 && share < 0.001 ? "< 0.1 %" : `${(share * 100).toFixed(1)} %`);

/** Draw a table of scores in descending order, with bars. The track of a share stands for 100 %. */
export function renderScores(rows, limit = 10) {
  const sorted = [...rows].sort((a, b) => b.score - a.score);
  const top = Math.max(...sorted.map(({ score }) => score), Number.MIN_VALUE);
  const areShares = sorted.every(({ score }) => score >= 0 && score <= 1);
  const scale = areShares ? 1 : top;
  const lines = sorted.slice(0, limit).map(({ label, score }) => {
    const bar = el("span", { class: "bar" });
    bar.style.width = `${Math.max(Math.min(score / scale, 1), 0) * 100}%`;
    return el("tr", {},
      el("th", { scope: "row", text: label }),
      el("td", { class: "share-cell" }, el("span", { class: "track" }, bar)),
      el("td", { class: "number", text: areShares ? formatShare(score) : formatNumber(score) }));
  });
  const names = ["Label", "", "Score"].map((name) => el(name ? "th" : "td", name ? { scope: "col", text: name } : {}));
  return el("div", {},
    el("table", { class: "scores" }, el("thead", { class: "visually-hidden" }, el("tr", {}, ...names)), el("tbody", {}, ...lines)),
    sorted.length > limit ? el("p", { class: "quiet", text: `and ${sorted.length - limit} more` }) : null);
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
  return el("figure", {}, canvas, el("figcaption", { class: "quiet", text: summary }));
}
