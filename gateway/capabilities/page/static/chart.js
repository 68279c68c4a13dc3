// A chart of lines over time, which follows the mouse. The tables below the charts show the same to screen readers.

import { svg } from "./dom.js";

const HEIGHT = 220;
const LEFT = 48;
const BOTTOM = 28;
const TOP = 8;
const LABEL_SPACE = 96; // of a time below the chart
const STEPS = [1, 2, 4, 8, 10];
const Y_TICKS = 4;

/** Return the lowest round number that is not below the value. */
function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return STEPS.find((step) => step * power >= value) * power;
}

export class Chart {
  /**
   * @param {Array<string>} kinds the class of each line; `onPoint` gets the index of the point under the mouse, or null
   * @param {number} share of the values that the axis must have room for: a single outlier does not flatten the rest
   */
  constructor(element, kinds, onPoint, share = 1) {
    this.kinds = kinds;
    this.share = share;
    this.times = [];
    this.columns = [];
    this.plot = svg("svg", { class: "chart", "aria-hidden": "true" });
    this.cursor = svg("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM });
    element.replaceChildren(this.plot);
    this.plot.addEventListener("pointermove", ({ clientX }) => onPoint(this.findIndex(clientX)));
    this.plot.addEventListener("pointerleave", () => onPoint(null));
    new ResizeObserver(() => this.draw()).observe(element);
  }

  setData(times, columns) {
    this.times = times;
    this.columns = columns;
    this.draw();
  }

  x(time) {
    const [first, last] = [this.times[0], this.times.at(-1)];
    return LEFT + ((time - first) / (last - first || 1)) * (this.width - LEFT - 8);
  }

  findIndex(clientX) {
    const x = clientX - this.plot.getBoundingClientRect().left;
    const distances = this.times.map((time) => Math.abs(this.x(time) - x));
    return distances.indexOf(Math.min(...distances));
  }

  /** Mark a point; null for none. */
  mark(index) {
    this.cursor.toggleAttribute("hidden", index === null);
    if (index === null || !this.times.length) return;
    for (const name of ["x1", "x2"]) this.cursor.setAttribute(name, this.x(this.times[index]));
  }

  draw() {
    this.width = this.plot.parentElement.clientWidth;
    if (!this.width || !this.times.length) return;
    const sorted = this.columns.flat().filter((value) => value !== null).sort((a, b) => a - b);
    const top = roundUp(Math.max(sorted[Math.ceil(sorted.length * this.share) - 1] ?? 0, 1));
    const y = (value) => TOP + (1 - Math.min(value / top, 1)) * (HEIGHT - TOP - BOTTOM);
    this.plot.setAttribute("viewBox", `0 0 ${this.width} ${HEIGHT}`);
    this.plot.replaceChildren(
      ...Array.from({ length: Y_TICKS + 1 }, (_, index) => drawLevel((top * index) / Y_TICKS, y, this.width)),
      ...this.drawTimes(),
      ...this.columns.map((values, index) => svg("path", { class: this.kinds[index], d: this.drawLine(values, y) })),
      this.cursor);
  }

  drawTimes() {
    const count = Math.max(Math.floor((this.width - LEFT) / LABEL_SPACE), 2);
    const [first, last] = [this.times[0], this.times.at(-1)];
    const times = [...new Set(Array.from({ length: count }, (_, index) => first + ((last - first) * index) / (count - 1)))];
    const anchor = (index) => (index === 0 ? "start" : index === times.length - 1 ? "end" : "middle");
    return times.map((time, index) => svg("text", { x: this.x(time), y: HEIGHT - 8, "text-anchor": anchor(index) }, formatTime(time)));
  }

  /** Draw a line, which is interrupted where there is no value. */
  drawLine(values, y) {
    return values.map((value, index) => {
      if (value === null) return "";
      const isStart = index === 0 || values[index - 1] === null;
      return `${isStart ? "M" : "L"}${this.x(this.times[index]).toFixed(1)} ${y(value).toFixed(1)}${isStart ? "h0.1" : ""}`;
    }).join("");
  }
}

const drawLevel = (value, y, width) => svg("g", {},
  svg("line", { class: "level", x1: LEFT, x2: width - 8, y1: y(value), y2: y(value) }),
  svg("text", { x: LEFT - 8, y: y(value) + 4, "text-anchor": "end" }, Number(value.toPrecision(3))));

export const formatTime = (at) => new Date(at * 1000).toLocaleTimeString([], { hourCycle: "h23" });
