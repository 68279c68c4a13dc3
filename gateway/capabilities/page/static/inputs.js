// Form fields for the inputs of any model, generated from its signature.

import { Drawing } from "./draw.js";
import { el, setText } from "./dom.js";
import { asJson } from "./numbers.js";
import { useSample } from "./samples.js";

const LABELS = { file: "File", draw: "Draw", text: "Text", values: "Values" };
const MAX_FILES = 256;
const PREVIEW = /^image\/(png|jpeg|webp|gif)$/;

export const formatShape = (tensor) => `${tensor.datatype} [${tensor.shape.map((size) => (size < 0 ? "any" : size)).join(", ")}]`;

const isArray = (tensor) => tensor.datatype !== "BYTES";

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
  if (!tensor.image && tensor.shape.every((size) => size === 1)) {
    if (tensor.datatype !== "BOOL") return ["number"];
    return tensor.shape.length > 1 ? ["values"] : tensor.optional ? ["choice"] : ["flag"]; // a checkbox always has a value
  }
  if (!tensor.image) return ["values", "file"];
  return tensor.image.layout === "NHW" ? ["values", "file", "draw"] : ["draw", "file", "values"];
}

/** Return an image, which becomes a tile if the browser cannot decode the file. */
function renderPreview(file, alt) {
  const image = el("img", { alt, src: URL.createObjectURL(file) });
  const suffix = file.name.split(".").at(-1).slice(0, 5).toUpperCase();
  image.addEventListener("error", () => {
    URL.revokeObjectURL(image.src);
    image.replaceWith(el("span", { class: "tile", title: file.name }, el("strong", { text: suffix }), "cannot be shown"));
  });
  return image;
}

export class Field {
  /** @param {{compares: boolean, batches: boolean}} options: accept a second text, or several files */
  constructor(tensor, number, { compares, batches }, onChange) {
    this.tensor = tensor;
    this.batches = batches;
    this.onChange = onChange;
    this.methods = inputMethods(tensor);
    this.method = this.methods[0];
    this.selectedFiles = [];
    this.id = `input-${number}`;
    this.error = el("p", { class: "bad", role: "alert", id: `${this.id}-error` });
    this.panels = Object.fromEntries(this.methods.map((method) => [method, this[method](compares && method === "text")]));
    this.element = el("fieldset", { "data-input": tensor.name },
      el("legend", {}, el("span", { class: "name", text: tensor.name }), " ",
        el("span", { class: "quiet", text: formatShape(tensor) + (tensor.optional ? ", optional" : "") })),
      this.methods.length > 1 ? this.methodChoice() : null,
      tensor.example ? el("button", { type: "button", class: "sample-value", text: "Use the sample", onclick: () => useSample(this) }) : null,
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

  flag() {
    this.flagInput = el("input", { type: "checkbox", onchange: this.onChange });
    return el("label", {}, this.flagInput, " true");
  }

  choice() {
    this.choiceInput = el("select", { "aria-label": this.tensor.name, onchange: this.onChange },
      ...["", "true", "false"].map((value) => el("option", { value, text: value || "not sent" })));
    return el("div", {}, this.choiceInput);
  }

  number() {
    const id = `${this.id}-number`;
    const isInteger = /^U?INT/.test(this.tensor.datatype);
    this.numberInput = el("input", { type: "number", id, step: isInteger ? "1" : "any", min: this.tensor.datatype.startsWith("U") ? "0" : null,
      "aria-describedby": this.error.id, oninput: this.onChange });
    return el("div", {}, el("label", { for: id, text: isInteger ? "Whole number" : "Number" }), " ", this.numberInput);
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
    const accept = isImage ? "image/*" : isArray(this.tensor) ? ".npy" : null;
    const fileInput = (attributes) =>
      el("input", { type: "file", accept, multiple: this.batches, ...attributes,
        onchange: (event) => this.setFiles(event.target.files) });
    this.previews = el("div", { class: "thumbnails" });
    this.fileStatus = el("span", { class: "quiet", role: "status", text: "No file selected." });
    const zone = el("div", { class: "drop" },
      el("label", {}, this.fileHint(isImage), fileInput({})),
      isImage ? el("label", { class: "camera" }, "Take a photo", fileInput({ class: "visually-hidden", capture: "environment", multiple: null })) : null,
      this.fileStatus, this.previews);
    zone.addEventListener("dragover", (event) => { event.preventDefault(); zone.classList.add("over"); });
    zone.addEventListener("dragleave", () => zone.classList.remove("over"));
    zone.addEventListener("drop", (event) => {
      event.preventDefault();
      zone.classList.remove("over");
      this.setFiles(event.dataTransfer.files);
    });
    return zone;
  }

  fileHint(isImage) {
    if (!isImage && isArray(this.tensor)) return "Choose a NumPy file (.npy), or drop it here";
    if (this.batches) return isImage ? "Choose one or several images, drop them here, or paste one" : "Choose one or several files, or drop them here";
    return isImage ? "Choose an image, drop it here, or paste it" : "Choose a file, or drop it here";
  }

  /** Use files that were chosen, dropped or pasted. */
  setFiles(list) {
    const files = [...list].slice(0, this.batches ? MAX_FILES : 1);
    if (!files.length) return;
    this.selectedFiles = files;
    this.selectMethod("file");
    const size = files.reduce((sum, file) => sum + file.size, 0);
    const name = files.length > 1 ? `${files.length} files` : files[0].name || "pasted";
    setText(this.fileStatus, `${name}, ${Math.max(Math.round(size / 1024), 1)} KB`);
    for (const image of this.previews.querySelectorAll("img")) URL.revokeObjectURL(image.src);
    this.previews.replaceChildren(...files.filter(({ type }) => PREVIEW.test(type)).map((file) =>
      renderPreview(file, files.length > 1 ? file.name : "Selected image")));
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
      throw new Error({ file: "choose a file", draw: "draw something", text: "enter a text", values: "enter values", number: "enter a number" }[this.method]);
    } catch (error) {
      setText(this.error, `${this.tensor.name}: ${error.message}.`);
      throw error;
    }
  }

  async enteredValue() {
    if (this.method === "file") {
      const [file, ...more] = this.selectedFiles;
      return more.length ? { files: this.selectedFiles } : file ? { file } : null;
    }
    if (this.method === "flag") return { json: asJson(String(this.flagInput.checked), this.tensor.shape) };
    if (this.method === "choice") return this.choiceInput.value ? { json: asJson(this.choiceInput.value, this.tensor.shape) } : null;
    if (this.method === "number") {
      if (this.numberInput.validity.badInput) throw new Error("enter a number");
      return this.numberInput.value ? { json: asJson(this.numberInput.value, this.tensor.shape) } : null;
    }
    if (this.method === "draw") return this.drawing.isEmpty ? null : { file: await this.drawing.blob() };
    if (this.method === "text") return this.texts[0].area.value ? { text: this.texts[0].area.value } : null;
    const entered = this.valuesArea.area.value;
    return entered.trim() ? { json: asJson(entered, this.tensor.shape) } : null;
  }
}
