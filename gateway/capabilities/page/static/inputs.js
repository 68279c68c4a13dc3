// Form fields for the inputs of any model, generated from its signature, with their examples and the options of a request.

import { el, icon, iconButton, setText } from "./dom.js";
import { Drawing } from "./draw.js";
import { asJson } from "./request.js";

const LABELS = { file: "Upload", draw: "Draw", text: "Text", values: "Values" };
const MAX_FILES = 256;
const MAX_STAGE_RATIO = 1.2; // height by width; a longer stage would push the button off the screen
const MIN_STAGE_RATIO = 0.3;
const PREVIEW = /^image\/(png|jpeg|webp|gif)$/;
const MISSING = { file: "choose a file", draw: "draw something", text: "enter a text", values: "enter values", number: "enter a number" };

export const formatShape = (tensor) => `${tensor.datatype} [${tensor.shape.map((size) => (size < 0 ? "any" : size)).join(", ")}]`;

const isArray = (tensor) => tensor.datatype !== "BYTES";

/** Describe in words what an input takes: `one image`, `4 numbers`, `image, 3 × 224 × 224`. */
export function describeInput(tensor) {
  const sizes = tensor.shape.map((size) => (size < 0 ? "any" : size)).join(" × ");
  const isSingle = tensor.shape.every((size) => size === 1);
  if (tensor.image) return `image, ${sizes}`;
  if (tensor.datatype === "BOOL") return isSingle ? "yes or no" : `${sizes} truth values`;
  if (isArray(tensor)) {
    const kind = /INT/.test(tensor.datatype) ? "whole number" : "number";
    return isSingle ? `one ${kind}` : sizes === "any" ? `any number of ${kind}s` : `${sizes} ${kind}s`;
  }
  const type = tensor.content_type ?? "";
  if (!isSingle) return `${sizes} texts`;
  if (type.startsWith("image/")) return "one image";
  if (type === "application/json") return "JSON";
  return type.startsWith("text/") ? "text" : "text or file";
}

/** Return the input methods for a tensor, with the default first. */
function inputMethods(tensor) {
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

/** Return height by width of the stage for an input's images. */
function findStageRatio({ image }) {
  const ratio = image && image.height > 0 && image.width > 0 ? image.height / image.width : 1;
  return Math.min(Math.max(ratio, MIN_STAGE_RATIO), MAX_STAGE_RATIO);
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
  /**
   * @param {{compares: boolean, batches: boolean}} options: accept a second text, or several files
   * @param {{onChange: () => void, onDrawn: () => void}} events: any change; a finished stroke
   */
  constructor(tensor, number, { compares, batches }, events) {
    this.tensor = tensor;
    this.batches = batches;
    this.events = events;
    this.onChange = events.onChange;
    this.methods = inputMethods(tensor);
    this.method = this.methods[0];
    this.selectedFiles = [];
    this.id = `input-${number}`;
    this.error = el("p", { class: "bad", role: "alert", id: `${this.id}-error` });
    this.panels = Object.fromEntries(this.methods.map((method) => [method, this[method](compares && method === "text")]));
    const words = describeInput(tensor) + (tensor.optional ? ", optional" : "");
    this.element = el("fieldset", { "data-input": tensor.name, "aria-labelledby": `${this.id}-name` },
      el("div", { class: "field-head" },
        el("div", { id: `${this.id}-name`, title: formatShape(tensor) }, el("span", { class: "name", text: tensor.name }), " ", el("span", { class: "quiet", text: words })),
        this.methods.length > 1 ? this.methodChoice() : null),
      ...Object.values(this.panels),
      this.error);
    this.selectMethod(this.method);
  }

  methodChoice() {
    const radios = this.methods.map((method) =>
      el("label", {},
        el("input", { type: "radio", name: `${this.id}-method`, value: method, checked: method === this.method,
          onchange: () => { this.selectMethod(method); this.onChange(); } }),
        LABELS[method]));
    return el("div", { class: "segmented", role: "radiogroup", "aria-label": `Input method for ${this.tensor.name}` }, ...radios);
  }

  selectMethod(method) {
    this.method = method;
    for (const [name, panel] of Object.entries(this.panels)) panel.hidden = name !== method;
    for (const radio of this.element.querySelectorAll(`input[name="${this.id}-method"]`)) radio.checked = radio.value === method;
  }

  // Panels, one per input method.

  text(compares) {
    this.texts = [this.area("Text", 3)];
    const [first] = this.texts;
    const counter = el("span", { text: "0 characters" });
    first.area.addEventListener("input", () => setText(counter, `${first.area.value.length} characters`));
    const line = el("div", { class: "counter" }, counter);
    if (!compares) return el("div", { class: "field-text" }, first.element, line);
    const second = this.area("Second text for comparison", 3);
    this.texts.push(second);
    second.element.hidden = true;
    const compare = el("button", { type: "button", class: "ghost compare", text: "+ Compare with another text", onclick: () => this.showSecondText() });
    line.prepend(compare);
    this.compareButton = compare;
    return el("div", { class: "field-text" }, first.element, line, second.element);
  }

  showSecondText() {
    this.texts[1].element.hidden = false;
    this.compareButton.hidden = true;
    this.texts[1].area.focus();
  }

  values() {
    const isText = this.tensor.datatype === "BYTES";
    const hint = isText ? 'JSON: ["a text", "another"]' : "Numbers separated by spaces, commas or newlines, or JSON";
    this.valuesArea = this.area(hint, this.tensor.shape.every((size) => size === 1) ? 1 : 4, "values");
    return el("div", { class: "field-text" }, this.valuesArea.element);
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
    const isInteger = /^U?INT/.test(this.tensor.datatype);
    this.numberInput = el("input", { type: "number", "aria-label": this.tensor.name, step: isInteger ? "1" : "any", min: this.tensor.datatype.startsWith("U") ? "0" : null,
      "aria-describedby": this.error.id, oninput: this.onChange });
    return el("div", {}, this.numberInput);
  }

  area(label, rows, kind = null) {
    const id = `${this.id}-${label.split(" ").slice(0, 2).join("-").replace(/\W/g, "")}`;
    const area = el("textarea", { id, rows, class: kind, spellcheck: "false", "aria-describedby": this.error.id, oninput: this.onChange });
    return { area, element: el("div", {}, el("label", { for: id, text: label, class: label === "Text" ? "visually-hidden" : "quiet" }), area) };
  }

  draw() {
    this.drawing = new Drawing(this.tensor.name, findStageRatio(this.tensor), this.events);
    return this.drawing.element;
  }

  file() {
    const isImage = this.methods.includes("draw");
    const accept = isImage ? "image/*" : isArray(this.tensor) ? ".npy" : null;
    const fileInput = (attributes) =>
      el("input", { type: "file", class: "visually-hidden", "aria-label": `File for ${this.tensor.name}`, accept, multiple: this.batches, ...attributes,
        onchange: (event) => this.setFiles(event.target.files) });
    this.previews = el("div", { class: "thumbnails" });
    this.fileStatus = el("span", { class: "quiet", role: "status" });
    const input = fileInput({});
    const stage = el("div", { class: isImage ? "stage" : "stage plain" },
      el("label", { class: "choose" }, icon("upload"), el("span", {}, ...this.fileHint(isImage)), input),
      this.previews,
      el("div", { class: "corner" }, iconButton("replace", "Replace", () => input.click()), iconButton("clear", "Remove", () => this.clearFiles())));
    for (const button of stage.querySelectorAll(".corner button")) button.lastChild.remove();
    if (isImage) stage.style.aspectRatio = String(1 / findStageRatio(this.tensor));
    const camera = isImage ? el("label", { class: "camera button ghost" }, icon("camera"), "Take a photo", fileInput({ capture: "environment", multiple: null })) : null;
    this.zone = el("div", { class: "drop" }, stage, el("div", { class: "below-stage" }, camera, this.fileStatus));
    this.zone.addEventListener("dragover", (event) => { event.preventDefault(); this.zone.classList.add("over"); });
    this.zone.addEventListener("dragleave", () => this.zone.classList.remove("over"));
    this.zone.addEventListener("drop", (event) => {
      event.preventDefault();
      this.zone.classList.remove("over");
      this.setFiles(event.dataTransfer.files);
    });
    return this.zone;
  }

  fileHint(isImage) {
    const choose = el("b", { text: "choose" });
    if (!isImage) return [isArray(this.tensor) ? "Drop a NumPy file (.npy), or " : this.batches ? "Drop files, or " : "Drop a file, or ", choose];
    return [this.batches ? "Drop images, paste, or " : "Drop an image, paste, or ", choose];
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
    this.zone.classList.add("filled");
    this.showPreviews(files);
    this.onChange();
  }

  /** Let the user draw in place of the file of an example, which stays visible faintly. */
  inviteDrawing() {
    if (this.method !== "file" || !this.drawing?.isEmpty) return;
    this.drawing.showGhost(this.selectedFiles[0]);
    this.clearFiles();
    this.selectMethod("draw");
    this.onChange();
  }

  clearFiles() {
    this.selectedFiles = [];
    setText(this.fileStatus, "");
    this.zone.classList.remove("filled");
    this.showPreviews([]);
    this.onChange();
  }

  showPreviews(files) {
    for (const image of this.previews.querySelectorAll("img")) URL.revokeObjectURL(image.src);
    this.previews.replaceChildren(...files.filter(({ type }) => PREVIEW.test(type)).map((file) =>
      renderPreview(file, files.length > 1 ? file.name : "Selected image")));
  }

  // Values.

  get secondText() {
    return this.method === "text" ? this.texts[1]?.area.value ?? "" : "";
  }

  /** Return `{file}`, `{text}`, `{json}`, or null for an empty optional input. Shows and throws errors. */
  async value() {
    this.showError("");
    try {
      const value = await this.enteredValue();
      if (value || this.tensor.optional) return value;
      throw new Error(MISSING[this.method]);
    } catch (error) {
      this.showError(`${this.tensor.name}: ${error.message}.`);
      throw error;
    }
  }

  showError(text) {
    setText(this.error, text);
    this.element.classList.toggle("refused", Boolean(text));
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

  /** Return what is entered, for `restore`. */
  save() {
    return {
      method: this.method,
      files: this.selectedFiles,
      drawing: this.drawing?.save(),
      texts: this.texts?.map(({ area }) => area.value),
      values: this.valuesArea?.area.value,
      number: this.numberInput?.value,
      flag: this.flagInput?.checked,
      choice: this.choiceInput?.value,
    };
  }

  restore({ method, files, drawing, texts, values, number, flag, choice }) {
    if (files.length) this.setFiles(files);
    if (drawing) this.drawing.restore(drawing);
    texts?.forEach((text, index) => this.setText(text, index));
    if (this.valuesArea) this.valuesArea.area.value = values;
    if (this.numberInput) this.numberInput.value = number;
    if (this.flagInput) this.flagInput.checked = flag;
    if (this.choiceInput) this.choiceInput.value = choice;
    this.selectMethod(method);
    this.onChange();
  }

  setText(text, index = 0) {
    const { area } = this.texts[index];
    area.value = text;
    area.dispatchEvent(new Event("input"));
    if (index && text) this.showSecondText();
  }
}

// Examples, from `gateway.examples.<input>` in the model's config, and placeholders for code.

/** Convert a data: URI to a file; null for another text. The page's policy forbids fetching such a URI. */
function parseDataUri(text, name) {
  const [, type, base64, data] = /^data:([\w.+-]+\/[\w.+-]+)?(;base64)?,(.*)$/s.exec(text) ?? [];
  if (data === undefined) return null;
  try {
    const bytes = base64 ? Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0)) : new TextEncoder().encode(decodeURIComponent(data));
    return new File([bytes], `${name}.${(type ?? "").split("/")[1] || "bin"}`, { type: type ?? "" });
  } catch {
    return null;
  }
}

/** Enter an example of a field's tensor. */
function enterExample(field, example) {
  const file = parseDataUri(example, "sample");
  if (file && field.methods.includes("file")) field.setFiles([file]);
  else if (field.methods.includes("text")) {
    field.setText(example);
    field.selectMethod("text");
  } else if (field.methods.includes("number")) field.numberInput.value = example;
  else if (field.methods.includes("flag")) field.flagInput.checked = example === "true";
  else if (field.methods.includes("choice")) field.choiceInput.value = example;
  else {
    field.valuesArea.area.value = example;
    field.selectMethod("values");
  }
  field.onChange();
}

/** Return the examples of a form: functions that enter one, and whether all required inputs have one. */
export function listExamples(fields) {
  const withExamples = fields.filter(({ tensor }) => tensor.examples?.length);
  const count = Math.max(0, ...withExamples.map(({ tensor }) => tensor.examples.length));
  const exampleOf = ({ tensor }, index) => tensor.examples[Math.min(index, tensor.examples.length - 1)];
  return Array.from({ length: count }, (_, index) => ({
    values: withExamples.map((field) => exampleOf(field, index)),
    isComplete: fields.every((field) => field.tensor.optional || withExamples.includes(field)),
    enter: () => withExamples.forEach((field) => enterExample(field, exampleOf(field, index))),
  }));
}

/** Render a row of examples; a click enters one and calls `onEnter`. Returns null if there are none. */
export function renderExamples(examples, onEnter) {
  if (!examples.length) return null;
  const buttons = examples.map((example, index) => {
    const [first] = example.values;
    const label = example.values.filter((value) => !/^(data:|true$|false$)/.test(value)).join(" · ");
    const content = first.startsWith("data:image/") ? el("img", { src: first, alt: "" }) : el("span", { text: label || `Example ${index + 1}` });
    return el("button", { type: "button", class: "sample-value", "aria-label": `Run example ${index + 1}${label && `: ${label}`}`, onclick: () => { example.enter(); onEnter(example); } }, content);
  });
  return el("div", { class: "examples" }, el("h4", { text: "Examples" }), el("div", {}, ...buttons));
}

/** Return a value that stands for one that was not entered, so that the code is always complete. */
export function placeholderValue(field) {
  const { tensor, method } = field;
  if (method === "file" || method === "draw") {
    if (field.methods.includes("draw")) return { file: new File([], "image.png", { type: "image/png" }) };
    return { file: new File([], tensor.datatype === "BYTES" ? "file.bin" : "array.npy") };
  }
  if (method === "text") return { text: tensor.example && !tensor.example.startsWith("data:") ? tensor.example : "some text" };
  const one = { BYTES: '"some text"', BOOL: "true" }[tensor.datatype] ?? (/^(FP|BF)/.test(tensor.datatype) ? "0.5" : "1");
  const sizes = tensor.shape.map((size) => (size < 0 ? 2 : size));
  if (sizes.reduce((product, size) => product * size, 1) > 64) return { json: `[…]` };
  return { json: sizes.length === 1 && sizes[0] === 1 ? one : sizes.reduceRight((inner, size) => `[${Array(size).fill(inner).join(",")}]`, one) };
}

// Parameters of a request and its place in a sequence, which most requests do not need.

export class RequestOptions {
  constructor(onChange) {
    this.parameters = el("textarea", { id: "parameters", class: "values", rows: 2, spellcheck: "false", "aria-describedby": "parameters-error", oninput: onChange });
    this.error = el("p", { class: "bad", role: "alert", id: "parameters-error" });
    this.sequence = el("input", { type: "text", id: "sequence-id", autocomplete: "off", spellcheck: "false", oninput: onChange });
    this.isFirst = el("input", { type: "checkbox", id: "sequence-start", onchange: onChange });
    this.isLast = el("input", { type: "checkbox", id: "sequence-end", onchange: onChange });
    this.element = el("div", { id: "request-options", class: "advanced", hidden: true },
      el("label", { for: "parameters", text: 'Parameters, as JSON: {"temperature": 0.5}' }), this.parameters, this.error,
      el("div", { class: "line" },
        el("label", { for: "sequence-id", text: "Sequence ID" }), this.sequence,
        el("label", {}, this.isFirst, " starts it"),
        el("label", {}, this.isLast, " ends it")));
    this.button = el("button", { type: "button", class: "ghost", id: "advanced-button", text: "Advanced", "aria-expanded": "false", "aria-controls": this.element.id,
      onclick: () => this.open(this.element.hidden) });
  }

  open(isOpen) {
    this.element.hidden = !isOpen;
    this.button.setAttribute("aria-expanded", String(isOpen));
  }

  /** Return the options of `buildRequest`. Shows and throws an error for parameters that are not JSON. */
  read() {
    setText(this.error, "");
    const parameters = this.parameters.value.trim();
    if (parameters && !isJsonObject(parameters)) {
      this.open(true);
      setText(this.error, 'Parameters are a JSON object, such as {"temperature": 0.5}.');
      throw new Error("invalid parameters");
    }
    const sequence = {};
    const places = [this.isFirst.checked ? "start" : "", this.isLast.checked ? "end" : ""].filter(Boolean);
    if (this.sequence.value.trim()) sequence["X-Sequence-ID"] = this.sequence.value.trim();
    if (this.sequence.value.trim() && places.length) sequence["X-Sequence"] = places.join(", ");
    return { parameters, sequence };
  }
}

function isJsonObject(text) {
  try {
    const value = JSON.parse(text);
    return typeof value === "object" && value !== null && !Array.isArray(value);
  } catch {
    return false;
  }
}
