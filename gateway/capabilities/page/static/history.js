// The requests of this session and their responses, until the page is closed.

import { $, el } from "./dom.js";

const MAX_ENTRIES = 20;
let entries = [];

export function reset() {
  entries = [];
  draw();
}

/** @param {Element[]} nodes of the response; shown again when the entry is chosen */
export function addEntry(model, state, isFailure, nodes, onSelect) {
  const entry = { at: new Date(), model, state, isFailure, nodes, onSelect };
  entries = [entry, ...entries].slice(0, MAX_ENTRIES);
  draw();
}

function draw() {
  $("history").hidden = entries.length === 0;
  const items = entries.map(({ at, model, state, isFailure, nodes, onSelect }) => {
    const time = at.toLocaleTimeString([], { hourCycle: "h23" });
    const text = `${time}  ${model}: ${state}`;
    return el("li", {}, el("button", { type: "button", class: isFailure ? "bad" : "", text, onclick: () => onSelect(state, nodes) }));
  });
  $("history-list").replaceChildren(...items);
}
