// The requests of this session and their answers, until the page is closed.

import { $, el } from "./dom.js";

const MAX_ENTRIES = 20;
let entries = [];

export function reset() {
  entries = [];
  draw();
}

/** Add an entry; `onSelect` gets it when it is chosen. The requests of one drawing while it grows are one entry. */
export function addEntry(entry, onSelect) {
  const [last] = entries;
  const older = entry.isLive && last?.isLive && last.model === entry.model ? entries.slice(1) : entries;
  entries = [{ ...entry, onSelect, at: new Date() }, ...older].slice(0, MAX_ENTRIES);
  draw();
}

function draw() {
  $("history").hidden = entries.length === 0;
  $("history-list").replaceChildren(...entries.map(renderEntry));
}

function renderEntry(entry) {
  const time = entry.at.toLocaleTimeString([], { hourCycle: "h23" });
  return el("li", {}, el("button", { type: "button", title: `${entry.model}, ${time}`, onclick: () => entry.onSelect(entry) },
    el("span", { class: "thumb", "aria-hidden": "true" }, renderThumbnail(entry.input)),
    el("span", { class: "summary" }, entry.isFailure ? el("span", { class: "dot bad" }) : null, el("span", { text: entry.summary || entry.model })),
    el("span", { class: "small", text: time })));
}

/** Return a picture of the input, or its first letters. */
function renderThumbnail(input) {
  const file = input.find(({ method, files }) => method === "file" && files[0]?.type.startsWith("image/"))?.files[0];
  if (file) return el("img", { alt: "", src: URL.createObjectURL(file) });
  const drawing = input.find(({ method }) => method === "draw")?.drawing;
  if (drawing?.picture) return el("img", { alt: "", src: drawing.picture });
  const [text = ""] = input.map(({ method, texts, values, number }) => (method === "text" ? texts[0] : values ?? number ?? "")).filter(Boolean);
  return text.slice(0, 3) || "…";
}
