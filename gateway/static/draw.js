// A sheet of paper: drawn on with a finger, a mouse, a pen, or the keys.

import { el, say } from "./dom.js";

const SIDE = 280;
const INK = 20;
const STEP = 10;
const MOVES = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

export class Drawing {
  /** @param {{height: number, width: number}} size of the model's images; -1 is any */
  constructor(name, size, changed) {
    this.changed = changed;
    this.strokes = [];
    this.open = null; // the stroke that is being drawn
    this.pen = { x: SIDE / 2, y: SIDE / 2, down: false, used: false };
    const ratio = size && size.height > 0 && size.width > 0 ? size.height / size.width : 1;
    this.canvas = el("canvas", {
      width: SIDE,
      height: Math.round(SIDE * Math.min(Math.max(ratio, 0.3), 1.5)),
      tabindex: "0",
      role: "img",
      "aria-label": `Draw ${name}. With keys: arrows move the pen, Space puts it down and lifts it.`,
    });
    this.told = el("span", { class: "quiet", role: "status" });
    this.inverse = el("input", { type: "checkbox", onchange: () => this.paint() });
    this.element = el("div", { class: "drawing" },
      this.canvas,
      el("div", { class: "line" },
        el("button", { type: "button", text: "Undo", onclick: () => this.undo() }),
        el("button", { type: "button", text: "Clear", onclick: () => this.clear() }),
        el("button", { type: "button", text: "Save", "aria-label": "Save as drawing.png", onclick: () => this.save() }),
        el("label", {}, this.inverse, " light on dark"),
        this.told));
    this.listen();
    this.paint();
  }

  get empty() {
    return this.strokes.length === 0;
  }

  listen() {
    const { canvas } = this;
    canvas.addEventListener("pointerdown", (event) => {
      if (event.button) return;
      canvas.setPointerCapture(event.pointerId);
      this.open = [this.at(event)];
      this.strokes.push(this.open);
      this.paint();
    });
    canvas.addEventListener("pointermove", (event) => {
      if (!this.open) return;
      this.open.push(this.at(event));
      this.paint();
    });
    for (const end of ["pointerup", "pointercancel"]) canvas.addEventListener(end, () => this.lift());
    canvas.addEventListener("keydown", (event) => this.key(event));
    canvas.addEventListener("blur", () => this.lift());
  }

  at(event) {
    const box = this.canvas.getBoundingClientRect();
    return [
      ((event.clientX - box.left) * this.canvas.width) / box.width,
      ((event.clientY - box.top) * this.canvas.height) / box.height,
    ];
  }

  lift() {
    if (this.open) this.changed();
    this.open = null;
    this.pen.down = false;
    this.paint();
  }

  key(event) {
    const move = MOVES[event.key];
    if (!move && event.key !== " ") return;
    event.preventDefault();
    const { pen, canvas } = this;
    pen.used = true;
    if (!move && pen.down) {
      this.lift();
      say(this.told, "pen up");
      return;
    }
    if (!move) {
      pen.down = true;
      this.open = [[pen.x, pen.y]];
      this.strokes.push(this.open);
      say(this.told, "pen down");
    } else {
      pen.x = Math.min(Math.max(pen.x + move[0] * STEP, 0), canvas.width);
      pen.y = Math.min(Math.max(pen.y + move[1] * STEP, 0), canvas.height);
      if (pen.down) this.open.push([pen.x, pen.y]);
    }
    this.paint();
  }

  undo() {
    this.strokes.pop();
    this.paint();
    this.changed();
  }

  clear() {
    this.strokes = [];
    this.paint();
    this.changed();
  }

  /** The paper is white in the dark as well: the model sees it, not only its user. */
  paint(withPen = true) {
    const context = this.canvas.getContext("2d");
    const [paper, ink] = this.inverse.checked ? ["#000", "#fff"] : ["#fff", "#000"];
    context.fillStyle = paper;
    context.fillRect(0, 0, this.canvas.width, this.canvas.height);
    context.strokeStyle = ink;
    context.lineWidth = INK;
    context.lineCap = context.lineJoin = "round";
    for (const [first, ...others] of this.strokes) {
      context.beginPath();
      context.moveTo(...first);
      for (const point of others.length ? others : [first]) context.lineTo(...point);
      context.stroke();
    }
    if (withPen && this.pen.used && !this.pen.down) {
      context.strokeStyle = "#888";
      context.lineWidth = 2;
      context.strokeRect(this.pen.x - INK / 2, this.pen.y - INK / 2, INK, INK);
    }
  }

  async blob() {
    this.paint(false);
    const made = new Promise((resolve) => this.canvas.toBlob(resolve, "image/png"));
    this.paint();
    return new File([await made], "drawing.png", { type: "image/png" });
  }

  async save() {
    const url = URL.createObjectURL(await this.blob());
    el("a", { href: url, download: "drawing.png" }).click();
    setTimeout(() => URL.revokeObjectURL(url), 1000);
  }
}
