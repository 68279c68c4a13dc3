// A drawing area for touch, mouse, pen and keyboard.

import { el, iconButton, setText } from "./dom.js";

const SIDE = 360;
const LINE_WIDTH = 26;
const STEP = 12;
const MOVES = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

export class Drawing {
  /** @param {number} ratio height by width; `onDrawn` is called after each stroke if the drawing runs while it grows */
  constructor(name, ratio, { onChange, onDrawn }) {
    this.onChange = onChange;
    this.onDrawn = onDrawn;
    this.strokes = [];
    this.stroke = null; // the stroke in progress
    this.pen = { x: SIDE / 2, y: (SIDE * ratio) / 2, down: false, used: false };
    this.canvas = el("canvas", {
      width: SIDE,
      height: Math.round(SIDE * ratio),
      tabindex: "0",
      role: "img",
      "aria-label": `Drawing area for ${name}. Use the arrow keys to move the pen and Space to lower or lift it.`,
    });
    this.hint = el("span", { class: "hint", "aria-hidden": "true", text: "Draw here" });
    this.status = el("span", { class: "visually-hidden", role: "status" });
    this.inverted = iconButton("invert", "Invert", () => this.invert(), { "aria-pressed": "false" });
    this.live = el("input", { type: "checkbox", onchange: () => { this.isLiveChosen = true; } });
    this.isLiveChosen = false; // by the user, which a fast model does not change
    this.stage = el("div", { class: "stage" }, this.canvas, this.hint);
    this.stage.style.aspectRatio = String(1 / ratio);
    this.element = el("div", { class: "drawing" }, this.stage,
      el("div", { class: "below-stage" },
        iconButton("undo", "Undo", () => this.undo()),
        iconButton("clear", "Clear", () => this.clear()),
        iconButton("save", "Save", () => this.download(), { "aria-label": "Save as drawing.png" }),
        this.inverted,
        el("label", { class: "switch" }, this.live, "Run while I draw"),
        this.status));
    this.addListeners();
    this.paint();
  }

  /** Show a picture faintly until the user draws. */
  showGhost(file) {
    const ghost = el("img", { class: "ghost", alt: "", src: URL.createObjectURL(file) });
    ghost.addEventListener("error", () => ghost.remove());
    this.stage.insertBefore(ghost, this.hint);
    setText(this.hint, "Draw your own");
  }

  /** Run while the user draws, unless the user chose otherwise: for a model that answers quickly. */
  suggestLive() {
    if (!this.isLiveChosen) this.live.checked = true;
  }

  invert() {
    this.inverted.setAttribute("aria-pressed", String(!this.isInverted));
    this.paint();
    this.onChange();
  }

  get isInverted() {
    return this.inverted.getAttribute("aria-pressed") === "true";
  }

  save() {
    return { strokes: [...this.strokes], isInverted: this.isInverted, picture: this.canvas.toDataURL() };
  }

  restore({ strokes, isInverted }) {
    this.strokes = [...strokes];
    this.inverted.setAttribute("aria-pressed", String(isInverted));
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
    const isStrokeEnd = Boolean(this.stroke);
    this.stroke = null;
    this.pen.down = false;
    this.paint();
    if (isStrokeEnd) this.report();
  }

  report() {
    this.onChange();
    if (this.live.checked && !this.isEmpty) this.onDrawn();
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
    this.report();
  }

  clear() {
    this.strokes = [];
    this.paint();
    this.onChange();
  }

  /** Paint the strokes. The colours do not follow dark mode, because the model receives the drawing. */
  paint(withPen = true) {
    const context = this.canvas.getContext("2d");
    const [paper, ink] = this.isInverted ? ["#000", "#fff"] : ["#fff", "#000"];
    this.hint.hidden = !this.isEmpty;
    if (!this.isEmpty) this.stage.querySelector(".ghost")?.remove();
    this.stage.classList.toggle("inverted", this.isInverted);
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

  async download() {
    const url = URL.createObjectURL(await this.blob());
    el("a", { href: url, download: "drawing.png" }).click();
    setTimeout(() => URL.revokeObjectURL(url), 1000);
  }
}
