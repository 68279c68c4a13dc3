// Sample values of inputs, from `gateway.example.<input>` in the model's config, and placeholders for code.

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

/** Enter the sample of a field's tensor. */
export function useSample(field) {
  const { example } = field.tensor;
  const file = parseDataUri(example, "sample");
  if (file && field.methods.includes("file")) field.setFiles([file]);
  else if (field.methods.includes("text")) {
    field.texts[0].area.value = example;
    field.selectMethod("text");
  } else if (field.methods.includes("number")) field.numberInput.value = example;
  else if (field.methods.includes("flag")) field.flagInput.checked = example === "true";
  else if (field.methods.includes("choice")) field.choiceInput.value = example;
  else {
    field.valuesArea.value = example;
    field.selectMethod("values");
  }
  field.onChange();
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
