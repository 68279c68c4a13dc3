// The same request as a curl command, a Python program and a JavaScript program. The key is never shown.

import { JSON_TYPE } from "./request.js";

/** Quote a text for a POSIX shell. */
const shellQuote = (text) => (/^[\w./:=@%+,-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`);
const curlHeader = ([name, value]) => `-H ${shellQuote(`${name}: ${value}`)}`;
/** Quote a text for Python and JavaScript, whose strings share JSON's escapes. */
const quote = (text) => JSON.stringify(text).replace(/[\u2028\u2029]/g, (end) => (end === "\u2028" ? "\\u2028" : "\\u2029"));
const absoluteUrl = (request) => `${location.origin}${request.url}`;

const MAX_LINE = 72; // a longer command is written in several lines

export function writeCurl(request, hasKey) {
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

export function writePython(request, hasKey) {
  const [argument, value] = pythonBody(request.parts);
  const headers = formatHeaders(request, hasKey ? '"Authorization": "Bearer " + os.environ["KEY"]' : "", ", ");
  const last = request.streams
    ? ["for line in response.iter_lines(decode_unicode=True):", "    print(line)"]
    : ['print(response.json()["outputs"])'];
  return [
    hasKey ? "import os" : null,
    "import requests",
    "",
    "response = requests.post(",
    `    ${quote(absoluteUrl(request))},`,
    `    ${argument}=${value},`,
    headers ? `    headers={${headers}},` : null,
    request.streams ? "    stream=True," : null,
    ")",
    "response.raise_for_status()",
    ...last,
  ].filter((line) => line !== null).join("\n");
}

function pythonBody({ kind, name, text, json, fields }) {
  if (kind === "file") return ["data", `open(${quote(name)}, "rb")`];
  if (kind === "text") return ["data", `${quote(text)}.encode()`];
  if (kind === "json") return ["data", `${quote(json)}`];
  const items = fields.map((field) => {
    if (field.file) return `(${quote(field.name)}, open(${quote(field.fileName)}, "rb"))`;
    if (field.text !== undefined) return `(${quote(field.name)}, (None, ${quote(field.text)}))`;
    return `(${quote(field.name)}, ("values.json", ${quote(field.json)}, "${JSON_TYPE}"))`;
  });
  return ["files", `[${items.join(", ")}]`];
}

export function writeJavaScript(request, hasKey) {
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
export function splitTokens(code, language) {
  const parts = [];
  let end = 0;
  for (const match of code.matchAll(TOKENS[language])) {
    const [kind] = Object.entries(match.groups).find(([, text]) => text !== undefined);
    parts.push([code.slice(end, match.index), ""], [match[0], kind]);
    end = match.index + match[0].length;
  }
  return [...parts, [code.slice(end), ""]].filter(([text]) => text);
}
