// Examples of inputs, from `gateway.examples.<input>` in the model's config, and placeholders for code.

import { el } from "./dom.js";

/** Convert a data: URI to a file; null for another text. The page's policy forbids fetching such a URI. */
export function parseDataUri(text, name) {
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
