// A drawing area for touch, mouse, pen and keyboard.

import { el, setText } from "./dom.js";

const SIDE = 280;
const LINE_WIDTH = 20;
const STEP = 10;
const MOVES = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

export class Drawing {
  /** @param {{height: number, width: number}} size of the model's images; -1 means any */
  constructor(name, size, onChange) {
    this.onChange = onChange;
    this.strokes = [];
    this.stroke = null; // the stroke in progress
    this.pen = { x: SIDE / 2, y: SIDE / 2, down: false, used: false };
    const ratio = size && size.height > 0 && size.width > 0 ? size.height / size.width : 1;
    this.canvas = el("canvas", {
      width: SIDE,
      height: Math.round(SIDE * Math.min(Math.max(ratio, 0.3), 1.5)),
      tabindex: "0",
      role: "img",
      "aria-label": `Drawing area for ${name}. Use the arrow keys to move the pen and Space to lower or lift it.`,
    });
    this.status = el("span", { class: "quiet", role: "status" });
    this.inverted = el("input", { type: "checkbox", onchange: () => this.paint() });
    this.element = el("div", { class: "drawing" },
      this.canvas,
      el("div", { class: "line" },
        el("button", { type: "button", text: "Undo", onclick: () => this.undo() }),
        el("button", { type: "button", text: "Clear", onclick: () => this.clear() }),
        el("button", { type: "button", text: "Save", "aria-label": "Save as drawing.png", onclick: () => this.save() }),
        el("label", {}, this.inverted, " light on dark"),
        this.status));
    this.addListeners();
    this.paint();
  }

  get isEmpty() {
    return this.strokes.length === 0;
  }

  addListeners() {
    const { canvas } = this;
    canvas.addEventListener("pointerdown", (event) => {
      if (event.button) return;
      canvas.setPointerCapture(event.pointerId);
      this.stroke = [this.position(event)];
      this.strokes.push(this.stroke);
      this.paint();
    });
    canvas.addEventListener("pointermove", (event) => {
      if (!this.stroke) return;
      this.stroke.push(this.position(event));
      this.paint();
    });
    for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, () => this.lift());
    canvas.addEventListener("keydown", (event) => this.handleKey(event));
    canvas.addEventListener("blur", () => this.lift());
  }

  position(event) {
    const bounds = this.canvas.getBoundingClientRect();
    return [
      ((event.clientX - bounds.left) * this.canvas.width) / bounds.width,
      ((event.clientY - bounds.top) * this.canvas.height) / bounds.height,
    ];
  }

  lift() {
    if (this.stroke) this.onChange();
    this.stroke = null;
    this.pen.down = false;
    this.paint();
  }

  handleKey(event) {
    const move = MOVES[event.key];
    if (!move && event.key !== " ") return;
    event.preventDefault();
    const { pen, canvas } = this;
    pen.used = true;
    if (!move && pen.down) {
      this.lift();
      setText(this.status, "pen up");
      return;
    }
    if (!move) {
      pen.down = true;
      this.stroke = [[pen.x, pen.y]];
      this.strokes.push(this.stroke);
      setText(this.status, "pen down");
    } else {
      pen.x = Math.min(Math.max(pen.x + move[0] * STEP, 0), canvas.width);
      pen.y = Math.min(Math.max(pen.y + move[1] * STEP, 0), canvas.height);
      if (pen.down) this.stroke.push([pen.x, pen.y]);
    }
    this.paint();
  }

  undo() {
    this.strokes.pop();
    this.paint();
    this.onChange();
  }

  clear() {
    this.strokes = [];
    this.paint();
    this.onChange();
  }

  /** Paint the strokes. The colours do not follow dark mode, because the model receives the drawing. */
  paint(withPen = true) {
    const context = this.canvas.getContext("2d");
    const [paper, ink] = this.inverted.checked ? ["#000", "#fff"] : ["#fff", "#000"];
    context.fillStyle = paper;
    context.fillRect(0, 0, this.canvas.width, this.canvas.height);
    context.strokeStyle = ink;
    context.lineWidth = LINE_WIDTH;
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
      context.strokeRect(this.pen.x - LINE_WIDTH / 2, this.pen.y - LINE_WIDTH / 2, LINE_WIDTH, LINE_WIDTH);
    }
  }

  async blob() {
    this.paint(false);
    const blob = new Promise((resolve) => this.canvas.toBlob(resolve, "image/png"));
    this.paint();
    return new File([await blob], "drawing.png", { type: "image/png" });
  }

  async save() {
    const url = URL.createObjectURL(await this.blob());
    el("a", { href: url, download: "drawing.png" }).click();
    setTimeout(() => URL.revokeObjectURL(url), 1000);
  }
}
