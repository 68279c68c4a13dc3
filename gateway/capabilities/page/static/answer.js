// Sending the requests of a form, the card with the answer, and the requests of this session.

import * as api from "./api.js";
import { $, el, setText, svg } from "./dom.js";
import { cosineSimilarity, isNumbers, renderOutputs, renderSimilarity, renderVector, summarizeOutputs, wordFor } from "./response.js";

// The card: its state, its tools, and what it is before there is an answer.

const GHOST_WAVE = 48; // bars
const MAX_JSON_LENGTH = 200_000;
let shown = null; // the document of the answer
let isJson = false; // whether it is shown as JSON
let nodes = []; // the answer as it is shown otherwise

export function start() {
  $("json-button").addEventListener("click", () => showJson(!isJson));
  $("answer-copy").addEventListener("click", copy);
  $("answer-download").addEventListener("click", download);
  $("compare-button").addEventListener("click", () => compare(compared ? null : []));
}

export function clear() {
  show("", []);
}

/** Show these elements, and what is said of them; the tools offer the document. */
function show(state, elements, document = null) {
  setState(state);
  nodes = elements;
  shown = document;
  isJson = false;
  $("json-button").setAttribute("aria-pressed", "false");
  $("response-tools").hidden = document === null;
  $("response-body").replaceChildren(...elements);
  showTime(null);
}

/** Show where the time of this model goes; null hides it. */
export function showTime(shares) {
  $("response-time").hidden = !shares;
  $("response-time").replaceChildren(...(shares ? [el("h4", { text: "Where the time goes" }), shares] : []));
}

const setState = (state) => setText($("response-state"), state);

/** Say something of the answer beside its state. */
export const addNote = (note) => setState(`${note} · ${$("response-state").textContent}`);

export const save = () => ({ state: $("response-state").textContent, nodes, document: shown });

export function restore({ state, nodes: elements, document }) {
  show(`${state} (earlier)`, elements, document);
}

const format = () => JSON.stringify(shown, null, 1);

function showJson(isWanted) {
  isJson = isWanted;
  $("json-button").setAttribute("aria-pressed", String(isJson));
  if (!isJson) {
    $("response-body").replaceChildren(...nodes);
    return;
  }
  const text = format();
  const shortened = text.length > MAX_JSON_LENGTH ? `${text.slice(0, MAX_JSON_LENGTH)}\n… ${text.length - MAX_JSON_LENGTH} more characters` : text;
  $("response-body").replaceChildren(el("pre", { tabindex: "0", text: shortened }));
}

async function copy() {
  try {
    await navigator.clipboard.writeText(format());
    addNote("Copied");
  } catch {
    showJson(true); // pages without TLS cannot access the clipboard
    getSelection().selectAllChildren($("response-body"));
  }
}

function download() {
  const link = el("a", { href: URL.createObjectURL(new Blob([format()], { type: "application/json" })), download: "response.json" });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

/** Show the shape of the answer that this model will give. */
export function showGhost(description) {
  const shape = el("div", { class: description.decoupled ? "ghost-shape bubbles" : "ghost-shape", "aria-hidden": "true" },
    ...(description.outputs.some(isVector) ? [drawWave()] : [el("i"), el("i"), el("i")]));
  show("", [el("div", { class: "ghost-answer" }, shape, el("p", { text: "The answer appears here" }))]);
}

const isVector = ({ datatype, shape }) => datatype !== "BYTES" && shape.some((size) => size > 16 || size < 0);

function drawWave() {
  const heights = Array.from({ length: GHOST_WAVE }, (_, index) => 30 * Math.abs(Math.sin(index * 0.9) * Math.cos(index * 0.23)) + 4);
  const path = heights.map((height, index) => `M${index * 7.5} ${36 - height}h5v${2 * height}h-5z`).join("");
  return svg("svg", { viewBox: "0 0 360 72", preserveAspectRatio: "none" }, svg("path", { d: path }));
}

// Requests. Each function returns what the history needs: `{summary, isFailure, isStopped}`.

const send = ({ url, options }, signal) => api.withKey(() => api.call(url, { ...options, signal }));
const elapsed = (started) => `${(performance.now() - started).toFixed(0)} ms`;

export function showRequestError(error, started) {
  const isStopped = error.name === "AbortError";
  const state = `${isStopped ? "stopped" : "failed"} after ${elapsed(started)}`;
  // A stream that was stopped keeps what arrived.
  if (isStopped) setState(state);
  else show(state, [api.renderError(error)], error.body ?? null);
  return { summary: isStopped ? "stopped" : error.body?.code ?? "failed", isFailure: !isStopped, isStopped };
}

export async function runSingle(description, request, signal, started) {
  const document = await (await send(request, signal)).json();
  show(`${elapsed(started)} · v${document.version}`, [renderOutputs(document, description)], document);
  return { summary: summarizeOutputs(document) };
}

export async function runComparison(description, requests, signal, started) {
  const documents = await Promise.all(requests.map(async (request) => (await send(request, signal)).json()));
  let summary = "";
  const parts = description.outputs.flatMap(({ name }) => {
    const [a, b] = documents.map((document) => document.outputs[name]);
    if (!isNumbers(a) || !isNumbers(b) || a.length !== b.length) return [];
    const similarity = cosineSimilarity(a, b);
    summary ||= `${similarity.toFixed(3)} ${wordFor(similarity)}`;
    return [
      el("div", { class: "output" }, el("h4", { text: name }), renderSimilarity(similarity),
        el("details", {}, el("summary", { text: "Both vectors" }), renderVector(a), renderVector(b))),
    ];
  });
  show(`${elapsed(started)} for both requests`, parts, documents);
  return { summary };
}

/** Show the response of each file of a batch beside its thumbnail. */
export async function runBatch(description, request, files, signal, started) {
  const document = await (await send(request, signal)).json();
  const items = files.map((file, index) => {
    const outputs = Object.fromEntries(Object.entries(document.outputs).map(([name, list]) => [name, list[index]]));
    const image = file.type.startsWith("image/") ? el("img", { src: URL.createObjectURL(file), alt: "" }) : null;
    return el("li", {}, image, el("div", { class: "name", text: file.name }), renderOutputs({ outputs }, description));
  });
  show(`${elapsed(started)} for ${files.length} files · v${document.version}`, [el("ol", { class: "batch" }, ...items)], document);
  return { summary: `${files.length} files` };
}

/** Show each response as it arrives. Texts are also joined, because generated text arrives in pieces. */
export async function runStream(description, request, signal, started) {
  const turn = startTurn(description, request);
  const list = el("ol", { id: "pieces" });
  const region = el("div", { class: "events", tabindex: "0", role: "region", "aria-label": "Responses" }, list);
  const documents = [];
  const response = await send(request, signal);
  const pieces = turn ? el("details", {}, el("summary", { text: "Pieces" }), region) : region;
  show("", [...(turn ? [turn.element] : []), pieces], documents);
  for await (const { event, data } of api.readEvents(response)) {
    if (event === "end") break;
    const document = JSON.parse(data);
    if (event === "error") throw new api.ApiError(response.status, document);
    documents.push(document);
    setState(`${documents.length} so far · ${elapsed(started)}`);
    const texts = Object.values(document.outputs).flat(Infinity).filter((value) => typeof value === "string");
    turn?.append(texts);
    list.append(el("li", {}, el("span", { class: "small", text: elapsed(started) }), renderOutputs(document, description)));
    if (!turn) region.scrollTop = region.scrollHeight;
  }
  turn?.end();
  const rate = (1000 * documents.length) / (performance.now() - started);
  setState(`${documents.length} ${documents.length === 1 ? "response" : "responses"} in ${elapsed(started)}${documents.length > 1 ? ` · ${rate.toFixed(1)}/s` : ""}`);
  return { summary: turn?.text() || `${documents.length} responses` };
}

// A conversation with a model that streams text: what was asked, and the answer as it grows.

const MAX_TURNS = 20;
let chatModel = "";
let turns = []; // elements

/** Start a turn. Returns null for a model whose streamed outputs are not texts. */
function startTurn(description, request) {
  if (!description.outputs.some((tensor) => tensor.datatype === "BYTES" && !(tensor.content_type ?? "").startsWith("image/"))) return null;
  if (chatModel !== description.name) [chatModel, turns] = [description.name, []];
  const asked = findQuestion(request.parts);
  const answer = el("p", { class: "answered", id: "joined", "aria-live": "polite" });
  for (const turn of turns) turn.querySelector("#joined")?.removeAttribute("id");
  const turn = el("div", { class: "chat" }, asked ? el("p", { class: "asked", text: asked }) : null, answer);
  const element = el("div", {}, ...turns, turn);
  turns = [...turns, turn].slice(-MAX_TURNS);
  const text = () => answer.textContent;
  const end = () => text() || answer.append("The model answered without text. Optional inputs can change that.");
  return { element, append: (texts) => answer.append(...(text() ? texts : [texts.join("").trimStart()])), end, text };
}

/** Return the first text of a request. */
function findQuestion({ kind, text, json, fields }) {
  if (kind === "text") return text;
  if (kind === "form") return fields.find((field) => field.text !== undefined && field.name !== "parameters")?.text ?? "";
  if (kind !== "json") return "";
  return Object.values(JSON.parse(json).inputs).flat(Infinity).find((value) => typeof value === "string") ?? "";
}

// The requests of this session and their answers, until the page is closed.

const MAX_ENTRIES = 20;
let entries = [];
let compared = null; // the entries that were chosen for a comparison, while the user chooses them

export function resetHistory() {
  entries = [];
  compare(null);
}

/** Add an entry; `onSelect` gets it when it is chosen. The requests of one drawing while it grows are one entry. */
export function addEntry(entry, onSelect) {
  const [last] = entries;
  const older = entry.isLive && last?.isLive && last.model === entry.model ? entries.slice(1) : entries;
  entries = [{ ...entry, onSelect, at: new Date() }, ...older].slice(0, MAX_ENTRIES);
  drawHistory();
}

const formatTime = (at) => at.toLocaleTimeString([], { hourCycle: "h23" });

function drawHistory() {
  $("history").hidden = entries.length === 0;
  $("compare-button").hidden = entries.length < 2;
  $("history-list").replaceChildren(...entries.map(renderEntry));
}

function renderEntry(entry) {
  const time = formatTime(entry.at);
  const pressed = compared ? String(compared.includes(entry)) : null;
  const onclick = () => (compared ? toggleCompared(entry) : entry.onSelect(entry));
  return el("li", {}, el("button", { type: "button", title: `${entry.model}, ${time}`, "aria-pressed": pressed, onclick },
    el("span", { class: "thumb", "aria-hidden": "true" }, renderThumbnail(entry.input)),
    el("span", { class: "summary" }, entry.isFailure ? el("span", { class: "dot bad" }) : null, el("span", { text: entry.summary || entry.model })),
    el("span", { class: "small", text: time })));
}

const findFile = (input) => input.find(({ method, files }) => method === "file" && files[0]?.type.startsWith("image/"))?.files[0];
const findDrawing = (input) => input.find(({ method }) => method === "draw")?.drawing?.picture;
const findText = (input) => input.map(({ method, texts, values, number }) => (method === "text" ? texts[0] : values ?? number ?? "")).find(Boolean) ?? "";

/** Return a picture of the input, or its first letters. */
function renderThumbnail(input) {
  const file = findFile(input);
  const picture = file ? URL.createObjectURL(file) : findDrawing(input);
  if (!picture) return findText(input).slice(0, 3) || "…";
  const image = el("img", { alt: "", src: picture });
  image.addEventListener("error", () => image.replaceWith("…"));
  return image;
}

/** Choose an entry for the comparison, or no longer; of more than two, the last ones. */
function toggleCompared(entry) {
  const index = entries.indexOf(entry);
  compare(compared.includes(entry) ? compared.filter((each) => each !== entry) : [...compared, entry].slice(-2));
  $("history-list").children[index].firstChild.focus();
}

/** Show two entries side by side; fewer ask for more, and null ends the comparison. */
function compare(chosen) {
  compared = chosen;
  $("compare-button").setAttribute("aria-pressed", String(Boolean(chosen)));
  setText($("compare-hint"), chosen && chosen.length < 2 ? "Choose two requests." : "");
  $("comparison").hidden = chosen?.length !== 2;
  $("comparison").replaceChildren(...(chosen?.length === 2 ? chosen.map(renderCompared) : []));
  drawHistory();
}

function renderCompared({ model, at, input, answer }) {
  return el("section", { class: "card", "aria-label": `${model}, ${formatTime(at)}` },
    el("div", { class: "card-head" }, el("h4", { text: model }), el("span", { class: "small", text: `${answer.state} · ${formatTime(at)}` })),
    el("div", { class: "compared-input" }, el("span", { class: "thumb" }, renderThumbnail(input)), el("span", { text: findText(input) })),
    ...answer.nodes.map(copyElement));
}

/** Copy an element with the pixels of its canvases, and without ids, which are unique. */
function copyElement(element) {
  const copied = element.cloneNode(true);
  for (const each of [copied, ...copied.querySelectorAll("[id]")]) each.removeAttribute("id");
  const canvases = element.querySelectorAll("canvas");
  copied.querySelectorAll("canvas").forEach((canvas, index) => canvas.getContext("2d").drawImage(canvases[index], 0, 0));
  return copied;
}
