// The card with the answer of a model: its state, its tools, and what it is before there is one.

import { $, el, setText, svg } from "./dom.js";

const GHOST_WAVE = 48; // bars
let shown = null; // the document of the answer
let isJson = false; // whether it is shown as JSON
let nodes = []; // the answer as it is shown otherwise

export function start() {
  $("json-button").addEventListener("click", () => showJson(!isJson));
  $("answer-copy").addEventListener("click", copy);
  $("answer-download").addEventListener("click", download);
}

export function clear() {
  show("", []);
}

/** Show these elements, and what is said of them; the tools offer the document. */
export function show(state, elements, document = null) {
  setState(state);
  nodes = elements;
  shown = document;
  isJson = false;
  $("json-button").setAttribute("aria-pressed", "false");
  $("response-tools").hidden = document === null;
  $("response-body").replaceChildren(...elements);
}

export const setState = (state) => setText($("response-state"), state);

/** Say something of the answer beside its state. */
export const addNote = (note) => setState(`${note} · ${$("response-state").textContent}`);

export const save = () => ({ state: $("response-state").textContent, nodes, document: shown });

export function restore({ state, nodes: elements, document }) {
  show(`${state} (earlier)`, elements, document);
}

const format = () => JSON.stringify(shown, null, 1);
const MAX_JSON_LENGTH = 200_000;

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
