// A form for any model, from its signature: datatype, shape, content type.

import { Drawing } from "./draw.js";
import { el, say } from "./dom.js";
import { asJson } from "./numbers.js";

const LABELS = { file: "File", draw: "Draw", text: "Text", values: "Values" };

export const shapeText = (tensor) => `${tensor.datatype} [${tensor.shape.map((size) => (size < 0 ? "any" : size)).join(", ")}]`;

/** The ways in which a person may give this input, the likeliest first. */
export function waysOf(tensor) {
  const type = tensor.content_type ?? "";
  if (tensor.datatype === "BYTES") {
    if (!tensor.shape.every((size) => size === 1 || size === -1)) return ["values"];
    const many = tensor.shape.includes(-1) ? ["values"] : [];
    if (type.startsWith("image/")) return ["draw", "file", ...many];
    if (type.startsWith("text/") || type === "application/json") return ["text", ...many];
    return ["text", "file", "draw", ...many];
  }
  if (!tensor.image) return ["values"];
  return tensor.image.layout === "NHW" ? ["values", "file", "draw"] : ["draw", "file", "values"];
}

export class Field {
  /** @param {boolean} compares whether a second text may be given, to be compared */
  constructor(tensor, number, compares, changed) {
    this.tensor = tensor;
    this.changed = changed;
    this.ways = waysOf(tensor);
    this.way = this.ways[0];
    this.chosen = null;
    this.id = `input-${number}`;
    this.wrong = el("p", { class: "bad", role: "alert", id: `${this.id}-wrong` });
    this.panels = Object.fromEntries(this.ways.map((way) => [way, this[way](compares && way === "text")]));
    this.element = el("fieldset", { "data-input": tensor.name },
      el("legend", {}, el("span", { class: "name", text: tensor.name }), " ",
        el("span", { class: "quiet", text: shapeText(tensor) + (tensor.optional ? ", optional" : "") })),
      this.ways.length > 1 ? this.choice() : null,
      ...Object.values(this.panels),
      this.wrong);
    this.choose(this.way);
  }

  choice() {
    const radios = this.ways.map((way) =>
      el("label", {},
        el("input", { type: "radio", name: `${this.id}-way`, value: way, checked: way === this.way,
          onchange: () => { this.choose(way); this.changed(); } }),
        ` ${LABELS[way]}`));
    return el("div", { class: "line", role: "radiogroup", "aria-label": `How ${this.tensor.name} is given` }, ...radios);
  }

  choose(way) {
    this.way = way;
    for (const [name, panel] of Object.entries(this.panels)) panel.hidden = name !== way;
    for (const radio of this.element.querySelectorAll(`input[name="${this.id}-way"]`)) radio.checked = radio.value === way;
  }

  // The panels.

  text(compares) {
    this.texts = [this.area("Text", 3)];
    if (compares) this.texts.push(this.area("A second text, to compare (optional)", 3));
    return el("div", {}, ...this.texts.map(({ element }) => element));
  }

  values() {
    const texts = this.tensor.datatype === "BYTES";
    this.typed = this.area(texts ? 'JSON: ["a text", "another"]' : "Numbers, with blanks, commas or lines between, or JSON",
      this.tensor.shape.every((size) => size === 1) ? 1 : 4);
    return el("div", {}, this.typed.element);
  }

  area(label, rows) {
    const id = `${this.id}-${label.split(" ").slice(0, 2).join("-").replace(/\W/g, "")}`;
    const area = el("textarea", { id, rows, spellcheck: "false", "aria-describedby": this.wrong.id, oninput: this.changed });
    return { area, element: el("div", {}, el("label", { for: id, text: label }), area) };
  }

  draw() {
    this.drawing = new Drawing(this.tensor.name, this.tensor.image, this.changed);
    return this.drawing.element;
  }

  file() {
    const image = this.ways.includes("draw");
    const pick = (attributes) =>
      el("input", { type: "file", accept: image ? "image/*" : null, ...attributes,
        onchange: (event) => this.take(event.target.files[0]) });
    this.preview = el("img", { alt: "What was chosen", hidden: true });
    this.named = el("span", { class: "quiet", role: "status", text: "Nothing is chosen yet." });
    const zone = el("div", { class: "drop" },
      el("label", {}, image ? "Choose an image, drop it here, or paste it" : "Choose a file, or drop it here", pick({})),
      image ? el("label", { class: "camera" }, "Take a photograph", pick({ capture: "environment" })) : null,
      this.named, this.preview);
    zone.addEventListener("dragover", (event) => { event.preventDefault(); zone.classList.add("over"); });
    zone.addEventListener("dragleave", () => zone.classList.remove("over"));
    zone.addEventListener("drop", (event) => {
      event.preventDefault();
      zone.classList.remove("over");
      this.take(event.dataTransfer.files[0]);
    });
    return zone;
  }

  /** A file that was chosen, dropped or pasted. */
  take(file) {
    if (!file) return;
    this.chosen = file;
    this.choose("file");
    say(this.named, `${file.name || "pasted"}, ${Math.max(Math.round(file.size / 1024), 1)} KB`);
    if (this.preview.src) URL.revokeObjectURL(this.preview.src);
    this.preview.hidden = !/^image\/(png|jpeg|webp|gif)$/.test(file.type);
    if (!this.preview.hidden) this.preview.src = URL.createObjectURL(file);
    this.changed();
  }

  // What was given.

  get second() {
    return this.way === "text" ? this.texts[1]?.area.value ?? "" : "";
  }

  /** `{file}`, `{text}`, `{json}`, or null for an optional input without a value. Throws `Error`. */
  async value() {
    say(this.wrong, "");
    try {
      const found = await this.given();
      if (found || this.tensor.optional) return found;
      throw new Error({ file: "choose a file", draw: "draw something", text: "write a text", values: "give the values" }[this.way]);
    } catch (error) {
      say(this.wrong, `${this.tensor.name}: ${error.message}.`);
      throw error;
    }
  }

  async given() {
    if (this.way === "file") return this.chosen ? { file: this.chosen } : null;
    if (this.way === "draw") return this.drawing.empty ? null : { file: await this.drawing.blob() };
    if (this.way === "text") return this.texts[0].area.value ? { text: this.texts[0].area.value } : null;
    const typed = this.typed.area.value;
    return typed.trim() ? { json: asJson(typed, this.tensor.shape) } : null;
  }
}
