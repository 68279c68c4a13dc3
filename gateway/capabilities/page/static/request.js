// Inference requests. A request knows its parts, from which code.js writes the same request in a language.

const EVENTS = "text/event-stream";
export const JSON_TYPE = "application/json";
const CLASS_COUNT = 5; // of an output with labels
const fileName = (file) => file.name || "file";
const filesOf = (value) => value.files ?? (value.file ? [value.file] : []);

/**
 * @param {object} description of the model, as returned by the API
 * @param {Array<[object, object]>} values each input's tensor and value: {file}, {files}, {text} or {json}
 * @param {{parameters?: string, headers?: object}} options the request's parameters as JSON, and its sequence
 */
export function buildRequest(description, path, values, { parameters = "", headers = {} } = {}) {
  const required = description.inputs.filter((tensor) => !tensor.optional);
  const isSingle = values.length === 1 && required.length === 1 && values[0][0] === required[0] && !values[0][1].files;
  const hasFiles = values.some(([, value]) => filesOf(value).length);
  const single = isSingle && !("json" in values[0][1]) && !parameters;
  const parts = single ? singleParts(values) : hasFiles ? formParts(values, parameters) : jsonParts(values, parameters);
  const query = description.outputs.some((tensor) => tensor.labels) ? `?classification=${CLASS_COUNT}` : "";
  const sent = { ...headers };
  if (description.decoupled) sent.Accept = EVENTS;
  if (parts.type) sent["Content-Type"] = parts.type;
  return {
    url: `${path}/infer${query}`,
    options: { method: "POST", headers: { Accept: JSON_TYPE, ...sent }, body: parts.body() },
    parts,
    headers: sent,
    streams: description.decoupled,
  };
}

/** A single value is the body itself. */
function singleParts([[, value]]) {
  if (value.file) {
    const name = fileName(value.file);
    const type = value.file.type || (name.endsWith(".npy") ? "application/x-npy" : "application/octet-stream");
    return { kind: "file", type, name, body: () => value.file };
  }
  return { kind: "text", type: "text/plain", text: value.text, body: () => value.text };
}

function jsonParts(values, parameters) {
  const inputs = values.map(([tensor, value]) => `${JSON.stringify(tensor.name)}: ${value.json ?? JSON.stringify(value.text)}`);
  const json = `{"inputs": {${inputs.join(", ")}}${parameters ? `, "parameters": ${parameters}` : ""}}`;
  return { kind: "json", type: JSON_TYPE, json, body: () => json };
}

/** A form, if one of several values is a file. The browser sets the Content-Type with its boundary. */
function formParts(values, parameters) {
  const fields = values.flatMap(([{ name }, value]) => {
    const files = filesOf(value).map((file) => ({ name, file, fileName: fileName(file) }));
    if (files.length) return files;
    return value.text !== undefined ? [{ name, text: value.text }] : [{ name, json: value.json }];
  });
  if (parameters) fields.push({ name: "parameters", text: parameters });
  return { kind: "form", type: "", fields, body: () => buildForm(fields) };
}

function buildForm(fields) {
  const form = new FormData();
  for (const { name, file, fileName: named, text, json } of fields) {
    if (file) form.append(name, file, named);
    else if (text !== undefined) form.append(name, text);
    else form.append(name, new Blob([json], { type: JSON_TYPE }), "values.json");
  }
  return form;
}
