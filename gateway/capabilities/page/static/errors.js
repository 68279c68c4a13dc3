// Errors as sentences for people. The messages of the API also have advice for programs.

import { ApiError, GatewayUnreachable } from "./api.js";
import { el, icon, showNotice } from "./dom.js";

const ADVICE_FOR_PROGRAMS = /[:;] (GET |send Authorization|send \{).*$/s;
const UNKNOWN_MODEL = /unknown model ?: '?([^']+?)'?(?: version '?([^']+?)'?)? is not found/;
const SENTENCES = {
  NO_REPLICA: () => "No Triton can be reached.",
  MODEL_NOT_FOUND: (message) => {
    const [, model, version] = UNKNOWN_MODEL.exec(message) ?? [];
    if (!model) return "";
    return version ? `The model ${model} has no version ${version}.` : `There is no model ${model}.`;
  },
};

/** Return the message without its advice for programs, with a capital letter and a full stop. */
export function toSentence(message) {
  const text = message.replace(ADVICE_FOR_PROGRAMS, "").trim();
  if (!text) return "";
  return text[0].toUpperCase() + text.slice(1) + (/[.!?…]$/.test(text) ? "" : ".");
}

export function errorMessage(error) {
  if (error instanceof ApiError) return SENTENCES[error.body.code]?.(error.message) || toSentence(error.message);
  // The browser's own words mean nothing to its user.
  return error instanceof TypeError ? "The connection to the gateway was lost." : toSentence(error.message);
}

/** Return what helps against an error: `[label, action]`; null if nothing on this page does. */
function findRemedy(error, useAnotherKey) {
  const [view] = location.hash.slice(1).split("/");
  if (error.needsKey) return useAnotherKey ? ["Use another key", useAnotherKey] : null;
  if (error.body?.code === "NO_REPLICA" && view !== "fleet") return ["Open Fleet", () => { location.hash = "fleet"; }];
  if (error.body?.code === "MODEL_NOT_FOUND") return ["Choose another", () => { location.hash = view === "model" ? "model" : "try"; }];
  return null;
}

/** Show an error above a view. A gateway that does not answer is shown above every view (connection.js). */
export function showErrorNotice(element, error, useAnotherKey) {
  if (error instanceof GatewayUnreachable) return;
  showNotice(element, errorMessage(error), ...(findRemedy(error, useAnotherKey) ?? []));
}

/** Return a box with the error, what helps against it, and its code. */
export function renderError(error) {
  const [label, action] = findRemedy(error) ?? [];
  const { code, request_id: id } = error.body ?? {};
  const copy = id ? el("button", { type: "button", text: "Copy request id", title: id, onclick: () => navigator.clipboard?.writeText(id) }) : null;
  return el("div", { class: "error-box" }, icon("alert"),
    el("div", {},
      el("strong", { text: errorMessage(error) }),
      el("div", { class: "line" },
        code ? el("code", { text: `${code} · ${error.status}` }) : null,
        action ? el("button", { type: "button", text: label, onclick: action }) : null,
        copy)));
}
