// A conversation with a model that streams text: what was asked, and the answer as it grows.

import { el } from "./dom.js";

const MAX_TURNS = 20;
let model = "";
let turns = []; // elements

/** Start a turn. Returns null for a model whose streamed outputs are not texts. */
export function startTurn(description, request) {
  if (!description.outputs.some((tensor) => tensor.datatype === "BYTES" && !(tensor.content_type ?? "").startsWith("image/"))) return null;
  if (model !== description.name) [model, turns] = [description.name, []];
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
