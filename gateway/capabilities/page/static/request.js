// The request of a form: its body, and the same request in code. The key is never shown.

import { key, modelPath } from "./api.js";
import { $, copyText, el, setText } from "./dom.js";

const EVENTS = "text/event-stream";
const JSON_TYPE = "application/json";
const CLASS_COUNT = 5; // of an output with labels
const fileName = (file) => file.name || "file";
const filesOf = (value) => value.files ?? (value.file ? [value.file] : []);

/**
 * @param {object} description of the model, as returned by the API
 * @param {string} version empty for the one that the gateway chooses
 * @param {Array<[object, object]>} values each input's tensor and value: {file}, {files}, {text} or {json}
 * @param {{parameters?: string, sequence?: object}} options the request's parameters as JSON, and the headers of its sequence
 */
export function buildRequest(description, version, values, { parameters = "", sequence = {} } = {}) {
  const required = description.inputs.filter((tensor) => !tensor.optional);
  const isSingle = values.length === 1 && required.length === 1 && values[0][0] === required[0] && !values[0][1].files;
  const hasFiles = values.some(([, value]) => filesOf(value).length);
  const single = isSingle && !("json" in values[0][1]) && !parameters;
  const parts = single ? singleParts(values) : hasFiles ? formParts(values, parameters) : jsonParts(values, parameters);
  const classification = description.outputs.some((tensor) => tensor.labels) ? CLASS_COUNT : 0;
  const headers = { ...sequence };
  if (description.decoupled) headers.Accept = EVENTS;
  if (parts.type) headers["Content-Type"] = parts.type;
  return {
    model: description.name,
    version,
    values,
    alone: required.length === 1 ? required[0].name : "", // the input whose value needs no name
    parameters,
    classification,
    sequence,
    url: `${modelPath(description.name, version)}/infer${classification ? `?classification=${classification}` : ""}`,
    options: { method: "POST", headers: { Accept: JSON_TYPE, ...headers }, body: parts.body() },
    parts,
    headers,
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

// Conversion of entered numbers to JSON, as text, because JavaScript's numbers are too small for INT64.

const EXACT = /^-?(0|[1-9]\d*)(\.\d+)?(e[+-]?\d+)?$/i;

/** Return JSON for a tensor of this shape, from JSON or separated numbers. Throws `Error`. */
export function asJson(entered, shape) {
  const text = entered.trim();
  try {
    JSON.parse(text);
    return shape.length > 0 && EXACT.test(text) && !isSingle(shape) ? nest([text], shape) : text;
  } catch {
    // The text is not JSON, but may be separated numbers.
  }
  const lines = text.split(/\r?\n/).filter((line) => line.trim());
  if (shape.length === 2 && lines.length > 1) return `[${lines.map((line) => toList(parseTokens(line))).join(",")}]`;
  const numbers = parseTokens(text);
  return numbers.length === 1 && isSingle(shape) ? numbers[0] : nest(numbers, shape);
}

const isSingle = (shape) => shape.every((size) => size === 1) && shape.length < 2;
const toList = (items) => `[${items.join(",")}]`;
const parseTokens = (text) => text.split(/[\s,;]+/).filter(Boolean).map(parseToken);

function parseToken(word) {
  if (EXACT.test(word) || word === "true" || word === "false") return word;
  if (Number.isFinite(Number(word))) return String(Number(word));
  throw new Error(`“${word.slice(0, 40)}” is neither JSON nor a number`);
}

/** Nest the values in lists of this shape. The last unknown size is computed, the others are 1. */
function nest(values, shape) {
  const free = shape.lastIndexOf(-1);
  const sizes = shape.map((size, index) => (size < 0 && index !== free ? 1 : size));
  const known = sizes.reduce((product, size) => (size < 0 ? product : product * size), 1);
  const expected = free < 0 ? known : Math.max(Math.ceil(values.length / known), 1) * known;
  if (values.length !== expected) {
    throw new Error(`expected ${free < 0 ? expected : `a multiple of ${known}`} numbers, got ${values.length}`);
  }
  if (free >= 0) sizes[free] = expected / known;
  let rows = values;
  for (const size of sizes.reverse()) {
    const nextRows = [];
    for (let start = 0; start < rows.length; start += size) nextRows.push(toList(rows.slice(start, start + size)));
    rows = nextRows;
  }
  return rows[0];
}

// The request as a curl command, a Python program and a JavaScript program.

/** Quote a text for a POSIX shell. */
const shellQuote = (text) => (/^[\w./:=@%+,-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`);
const curlHeader = ([name, value]) => `-H ${shellQuote(`${name}: ${value}`)}`;
/** Quote a text for Python and JavaScript, whose strings share JSON's escapes. */
const quote = (text) => JSON.stringify(text).replace(/[\u2028\u2029]/g, (end) => (end === "\u2028" ? "\\u2028" : "\\u2029"));
const absoluteUrl = (request) => new URL(request.url, document.baseURI).href;
const gatewayUrl = () => new URL(".", document.baseURI).href.replace(/\/$/, "");

const MAX_LINE = 72; // a longer command is written in several lines

function writeCurl(request, hasKey) {
  const parts = [
    request.streams ? "curl -sN" : "curl -s",
    ...curlBody(request.parts),
    ...Object.entries(request.headers).sort(([a], [b]) => (a === "Content-Type" ? -1 : b === "Content-Type" ? 1 : 0)).map(curlHeader),
    hasKey ? '-H "Authorization: Bearer $KEY"' : null,
    shellQuote(absoluteUrl(request)),
  ].filter(Boolean);
  const line = parts.join(" ");
  return line.length > MAX_LINE ? parts.join(" \\\n  ") : line;
}

function curlBody({ kind, name, text, json, fields }) {
  if (kind === "file") return [`--data-binary ${shellQuote(`@${name}`)}`];
  if (kind === "text") return [`--data-raw ${shellQuote(text)}`];
  if (kind === "json") return [`--data-raw ${shellQuote(json)}`];
  return fields.map((field) => {
    if (field.file) return `-F ${shellQuote(`${field.name}=@${field.fileName}`)}`;
    if (field.text !== undefined) return `--form-string ${shellQuote(`${field.name}=${field.text}`)}`;
    return `-F ${shellQuote(`${field.name}=${field.json};type=${JSON_TYPE}`)}`;
  });
}

const formatHeaders = (request, keyLine, separator) =>
  [...Object.entries(request.headers).map(([name, value]) => `${quote(name)}: ${quote(value)}`), keyLine].filter(Boolean).join(separator);

const PYTHON_WORDS = new Set(("False None True and as assert async await break class continue def del elif else except finally for from global "
  + "if import in is lambda nonlocal not or pass raise return try while with yield").split(" "));
const CLIENT_OPTIONS = new Set(["version", "parameters", "classification", "headers", "timeout_s"]);
const isKeyword = (name) => /^[A-Za-z_]\w*$/.test(name) && !PYTHON_WORDS.has(name) && !CLIENT_OPTIONS.has(name);
const pythonDict = (items) => `{${items.map(([name, code]) => `${quote(name)}: ${code}`).join(", ")}}`;

/** Convert JSON to a literal of Python; numbers stay as they are written. */
const pythonLiteral = (json) =>
  json.replace(/"(?:[^"\\]|\\.)*"|true|false|null|…/g, (token) =>
    ({ true: "True", false: "False", null: "None", "…": "..." })[token] ?? quote(JSON.parse(token)));

function pythonValue({ file, files, text, json }) {
  if (files) return `[${files.map((each) => pythonValue({ file: each })).join(", ")}]`;
  if (file) return `Path(${quote(fileName(file))})`;
  return text === undefined ? pythonLiteral(json) : quote(text);
}

/** Write a program that uses the gateway's own client. */
function writePython({ model, version, values, alone, parameters, classification, sequence, streams }, hasKey) {
  const inputs = values.map(([{ name }, value]) => [name, pythonValue(value)]);
  // The client takes a mapping for inputs by name.
  const positional = inputs.find(([name, code]) => name === alone && !code.startsWith("{"));
  const others = inputs.filter((each) => each !== positional);
  const areKeywords = others.every(([name]) => isKeyword(name));
  const named = areKeywords ? others : inputs;
  const call = formatCall(streams ? "gw.stream" : "gw.infer", [
    quote(model),
    areKeywords ? positional?.[1] : pythonDict(named),
    ...(areKeywords ? named.map(([name, code]) => `${name}=${code}`) : []),
    version && `version=${quote(version)}`,
    classification && `classification=${classification}`,
    parameters && `parameters=${pythonLiteral(parameters)}`,
    Object.keys(sequence).length ? `headers=${pythonDict(Object.entries(sequence).map(([name, value]) => [name, quote(value)]))}` : "",
  ].filter(Boolean));
  const usesFiles = inputs.some(([, code]) => /^\[?Path\(/.test(code));
  return [
    hasKey ? "import os" : null,
    usesFiles ? "from pathlib import Path" : null,
    hasKey || usesFiles ? "" : null,
    "from gateway.client import Client",
    "",
    `gw = Client(${quote(gatewayUrl())}${hasKey ? ', key=os.environ["KEY"]' : ""})`,
    ...(streams ? [`for piece in ${call}:`, "    print(dict(piece))"] : [`result = ${call}`, "print(dict(result))"]),
  ].filter((line) => line !== null).join("\n");
}

function formatCall(name, args) {
  const line = `${name}(${args.join(", ")})`;
  return line.length > MAX_LINE ? `${name}(\n${args.map((each) => `    ${each},\n`).join("")})` : line;
}

function writeJavaScript(request, hasKey) {
  const { kind } = request.parts;
  const needsFiles = kind === "file" || (kind === "form" && request.parts.fields.some((field) => field.file));
  const headers = formatHeaders(request, hasKey ? '"Authorization": `Bearer ${process.env.KEY}`' : "", ", ");
  const last = request.streams
    ? ["for await (const piece of response.body.pipeThrough(new TextDecoderStream())) process.stdout.write(piece);"]
    : ["console.log(JSON.stringify((await response.json()).outputs));"];
  return [
    needsFiles ? 'import { openAsBlob } from "node:fs";\n' : null,
    ...javaScriptBody(request.parts),
    `const response = await fetch(${quote(absoluteUrl(request))}, {`,
    '  method: "POST",',
    headers ? `  headers: { ${headers} },` : null,
    "  body,",
    "});",
    "if (!response.ok) throw new Error(await response.text());",
    ...last,
  ].filter((line) => line !== null).join("\n");
}

function javaScriptBody({ kind, name, text, json, fields }) {
  if (kind === "file") return [`const body = await openAsBlob(${quote(name)});`];
  if (kind === "text") return [`const body = ${quote(text)};`];
  if (kind === "json") return [`const body = JSON.stringify(${json});`];
  const lines = fields.map((field) => {
    if (field.file) return `body.append(${quote(field.name)}, await openAsBlob(${quote(field.fileName)}), ${quote(field.fileName)});`;
    if (field.text !== undefined) return `body.append(${quote(field.name)}, ${quote(field.text)});`;
    return `body.append(${quote(field.name)}, new Blob([${quote(field.json)}], { type: "${JSON_TYPE}" }), "values.json");`;
  });
  return ["const body = new FormData();", ...lines];
}

const WORDS = "import|from|const|await|async|for|of|in|if|new|throw|not|def|return|print|with|as|True|False|None|true|false|null";
const TOKENS = {
  curl: /(?<string>'(?:[^']|'\\'')*'|"[^"]*")|(?<word>^curl)|(?<flag>(?<=\s)--?[\w-]+)/gm,
  python: new RegExp(`(?<string>"(?:[^"\\\\]|\\\\.)*")|(?<word>\\b(?:${WORDS})\\b)|(?<flag>\\b\\w+(?==[^=]))`, "g"),
  javascript: new RegExp(`(?<string>"(?:[^"\\\\]|\\\\.)*"|\`[^\`]*\`)|(?<word>\\b(?:${WORDS})\\b)|(?<flag>\\b\\w+(?=:))`, "g"),
};

/** Split code into `[text, kind]`: strings, words of the language, names of options and the rest. */
function splitTokens(code, language) {
  const parts = [];
  let end = 0;
  for (const match of code.matchAll(TOKENS[language])) {
    const [kind] = Object.entries(match.groups).find(([, text]) => text !== undefined);
    parts.push([code.slice(end, match.index), ""], [match[0], kind]);
    end = match.index + match[0].length;
  }
  return [...parts, [code.slice(end), ""]].filter(([text]) => text);
}

// The tabs with the code, and the button that copies it.

export const LANGUAGES = { curl: writeCurl, python: writePython, javascript: writeJavaScript };
const LANGUAGE_NAMES = Object.keys(LANGUAGES);
let selectedLanguage = "curl";
let shown = { requests: [], note: "" };

export function startCodeTabs() {
  for (const name of LANGUAGE_NAMES) {
    $(`tab-${name}`).addEventListener("click", () => select(name));
    $(`tab-${name}`).addEventListener("keydown", handleKey);
  }
  $("curl-copy").addEventListener("click", copy);
  select(selectedLanguage);
}

function select(name) {
  selectedLanguage = name;
  for (const each of LANGUAGE_NAMES) {
    $(`tab-${each}`).setAttribute("aria-selected", String(each === name));
    $(`tab-${each}`).tabIndex = each === name ? 0 : -1;
  }
  $("curl").setAttribute("aria-labelledby", `tab-${name}`);
  update();
}

function handleKey(event) {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!step) return;
  const next = LANGUAGE_NAMES[(LANGUAGE_NAMES.indexOf(selectedLanguage) + step + LANGUAGE_NAMES.length) % LANGUAGE_NAMES.length];
  select(next);
  $(`tab-${next}`).focus();
}

/** Show these requests; a note says if their values are placeholders. */
export function showCode(requests, note = "") {
  shown = { requests, note };
  update();
}

function update() {
  const write = LANGUAGES[selectedLanguage];
  const code = shown.requests.map((request) => write(request, Boolean(key.get()))).join("\n");
  if ($("curl").textContent !== code) $("curl").replaceChildren(...renderCode(code, selectedLanguage));
  setText($("code-note"), shown.note);
  setText($("curl-copied"), "");
}

const copy = () => copyText($("curl"), $("curl-copied"));

export const renderCode = (code, language) =>
  splitTokens(code, language).map(([text, kind]) => (kind ? el("span", { class: `token-${kind}`, text }) : text));
