// Form fields for the inputs of any model, generated from its signature.

import { Drawing } from "./draw.js";
import { el, setText } from "./dom.js";
import { asJson } from "./numbers.js";

const LABELS = { file: "File", draw: "Draw", text: "Text", values: "Values" };

export const formatShape = (tensor) => `${tensor.datatype} [${tensor.shape.map((size) => (size < 0 ? "any" : size)).join(", ")}]`;

/** Return the input methods for a tensor, with the default first. */
export function inputMethods(tensor) {
  const type = tensor.content_type ?? "";
  if (tensor.datatype === "BYTES") {
    if (!tensor.shape.every((size) => size === 1 || size === -1)) return ["values"];
    const lists = tensor.shape.includes(-1) ? ["values"] : [];
    if (type.startsWith("image/")) return ["draw", "file", ...lists];
    if (type.startsWith("text/") || type === "application/json") return ["text", ...lists];
    return ["text", "file", "draw", ...lists];
  }
  if (!tensor.image) return ["values"];
  return tensor.image.layout === "NHW" ? ["values", "file", "draw"] : ["draw", "file", "values"];
}

export class Field {
  /** @param {boolean} compares whether a second text can be entered for comparison */
  constructor(tensor, number, compares, onChange) {
    this.tensor = tensor;
    this.onChange = onChange;
    this.methods = inputMethods(tensor);
    this.method = this.methods[0];
    this.selectedFile = null;
    this.id = `input-${number}`;
    this.error = el("p", { class: "bad", role: "alert", id: `${this.id}-error` });
    this.panels = Object.fromEntries(this.methods.map((method) => [method, this[method](compares && method === "text")]));
    this.element = el("fieldset", { "data-input": tensor.name },
      el("legend", {}, el("span", { class: "name", text: tensor.name }), " ",
        el("span", { class: "quiet", text: formatShape(tensor) + (tensor.optional ? ", optional" : "") })),
      this.methods.length > 1 ? this.methodChoice() : null,
      ...Object.values(this.panels),
      this.error);
    this.selectMethod(this.method);
  }

  methodChoice() {
    const radios = this.methods.map((method) =>
      el("label", {},
        el("input", { type: "radio", name: `${this.id}-method`, value: method, checked: method === this.method,
          onchange: () => { this.selectMethod(method); this.onChange(); } }),
        ` ${LABELS[method]}`));
    return el("div", { class: "line", role: "radiogroup", "aria-label": `Input method for ${this.tensor.name}` }, ...radios);
  }

  selectMethod(method) {
    this.method = method;
    for (const [name, panel] of Object.entries(this.panels)) panel.hidden = name !== method;
    for (const radio of this.element.querySelectorAll(`input[name="${this.id}-method"]`)) radio.checked = radio.value === method;
  }

  // Panels, one per input method.

  text(compares) {
    this.texts = [this.area("Text", 3)];
    if (compares) this.texts.push(this.area("Second text for comparison (optional)", 3));
    return el("div", {}, ...this.texts.map(({ element }) => element));
  }

  values() {
    const isText = this.tensor.datatype === "BYTES";
    this.valuesArea = this.area(isText ? 'JSON: ["a text", "another"]' : "Numbers separated by spaces, commas or newlines, or JSON",
      this.tensor.shape.every((size) => size === 1) ? 1 : 4);
    return el("div", {}, this.valuesArea.element);
  }

  area(label, rows) {
    const id = `${this.id}-${label.split(" ").slice(0, 2).join("-").replace(/\W/g, "")}`;
    const area = el("textarea", { id, rows, spellcheck: "false", "aria-describedby": this.error.id, oninput: this.onChange });
    return { area, element: el("div", {}, el("label", { for: id, text: label }), area) };
  }

  draw() {
    this.drawing = new Drawing(this.tensor.name, this.tensor.image, this.onChange);
    return this.drawing.element;
  }

  file() {
    const isImage = this.methods.includes("draw");
    const fileInput = (attributes) =>
      el("input", { type: "file", accept: isImage ? "image/*" : null, ...attributes,
        onchange: (event) => this.setFile(event.target.files[0]) });
    this.preview = el("img", { alt: "Selected image", hidden: true });
    this.fileStatus = el("span", { class: "quiet", role: "status", text: "No file selected." });
    const zone = el("div", { class: "drop" },
      el("label", {}, isImage ? "Choose an image, drop it here, or paste it" : "Choose a file, or drop it here", fileInput({})),
      isImage ? el("label", { class: "camera" }, "Take a photo", fileInput({ capture: "environment" })) : null,
      this.fileStatus, this.preview);
    zone.addEventListener("dragover", (event) => { event.preventDefault(); zone.classList.add("over"); });
    zone.addEventListener("dragleave", () => zone.classList.remove("over"));
    zone.addEventListener("drop", (event) => {
      event.preventDefault();
      zone.classList.remove("over");
      this.setFile(event.dataTransfer.files[0]);
    });
    return zone;
  }

  /** Use a file that was chosen, dropped or pasted. */
  setFile(file) {
    if (!file) return;
    this.selectedFile = file;
    this.selectMethod("file");
    setText(this.fileStatus, `${file.name || "pasted"}, ${Math.max(Math.round(file.size / 1024), 1)} KB`);
    if (this.preview.src) URL.revokeObjectURL(this.preview.src);
    this.preview.hidden = !/^image\/(png|jpeg|webp|gif)$/.test(file.type);
    if (!this.preview.hidden) this.preview.src = URL.createObjectURL(file);
    this.onChange();
  }

  // Values.

  get secondText() {
    return this.method === "text" ? this.texts[1]?.area.value ?? "" : "";
  }

  /** Return `{file}`, `{text}`, `{json}`, or null for an empty optional input. Shows and throws errors. */
  async value() {
    setText(this.error, "");
    try {
      const value = await this.enteredValue();
      if (value || this.tensor.optional) return value;
      throw new Error({ file: "choose a file", draw: "draw something", text: "enter a text", values: "enter values" }[this.method]);
    } catch (error) {
      setText(this.error, `${this.tensor.name}: ${error.message}.`);
      throw error;
    }
  }

  async enteredValue() {
    if (this.method === "file") return this.selectedFile ? { file: this.selectedFile } : null;
    if (this.method === "draw") return this.drawing.isEmpty ? null : { file: await this.drawing.blob() };
    if (this.method === "text") return this.texts[0].area.value ? { text: this.texts[0].area.value } : null;
    const entered = this.valuesArea.area.value;
    return entered.trim() ? { json: asJson(entered, this.tensor.shape) } : null;
  }
}
