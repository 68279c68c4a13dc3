// The gateway's API: its calls, the key that they need, and its errors as sentences for people.

import { $, el, icon, setText, showNotice } from "./dom.js";

const STORAGE_KEY = "triton-gateway-key";

/** The relative path to `/`, which can be below the prefix of a proxy. */
export const ROOT = document.documentElement.dataset.root ?? "";

/** Whether GATEWAY_OIDC_CLIENT_ID is set. */
export const canSignIn = Boolean(document.documentElement.dataset.clientId);

export class ApiError extends Error {
  /** @param {number} status @param {object} body the gateway's error document: error, code, request_id and others */
  constructor(status, body) {
    super(body.error ?? `The gateway returned status ${status}.`);
    this.status = status;
    this.body = body;
  }
  get needsKey() {
    return this.status === 401 || this.status === 403;
  }
}

/** The gateway was not reached, or did not answer in time. */
class GatewayUnreachable extends Error {
  constructor(message = "The gateway does not answer.") {
    super(message);
  }
}

export const connection = { isLost: false, answeredAt: Date.now() };

function recordAnswer(isAnswered) {
  if (isAnswered) connection.answeredAt = Date.now();
  if (connection.isLost !== isAnswered) return;
  connection.isLost = !isAnswered;
  dispatchEvent(new Event("connectionchange"));
}

let token = ""; // of a sign-in, which ends with the page
let refusal = null; // the ApiError that refused the key, or that there is none

export const key = {
  get: () => token || (sessionStorage.getItem(STORAGE_KEY) ?? ""),
  set: (value) => {
    setRefusal(null);
    token = "";
    if (value) sessionStorage.setItem(STORAGE_KEY, value);
    else sessionStorage.removeItem(STORAGE_KEY);
  },
  setToken: (value) => {
    token = value;
  },
};

/** Whether the gateway wants another key, before which the page asks for nothing and shows nothing. */
export const isLocked = () => refusal !== null;

function setRefusal(error) {
  refusal = error;
  document.body.classList.toggle("locked", isLocked());
  updateKeyButton();
}

/**
 * Return a successful response. Paths are relative, because the page can be below the prefix of a proxy. Throws `ApiError` or
 * `GatewayUnreachable`, or an AbortError if the signal stops it.
 */
export async function call(path, options = {}) {
  if (refusal) throw refusal;
  const usedKey = key.get();
  const headers = new Headers(options.headers);
  if (usedKey) headers.set("Authorization", `Bearer ${usedKey}`);
  const response = await fetch(ROOT + path, { ...options, headers, credentials: "omit", cache: "no-store" }).catch((error) => {
    if (error.name === "AbortError") throw error;
    recordAnswer(false);
    throw new GatewayUnreachable();
  });
  recordAnswer(true);
  if (response.ok) return response;
  const error = new ApiError(response.status, await response.json().catch(() => ({})));
  if (error.status === 401 && usedKey === key.get()) setRefusal(error);
  throw error;
}

export const getJson = async (path, options) => (await call(path, options)).json();

const sendJson = (method, path, document) =>
  getJson(path, { method, headers: { "Content-Type": "application/json" }, body: JSON.stringify(document) });

export const modelPath = (model, version = "") =>
  `v1/models/${encodeURIComponent(model)}${version ? `/versions/${encodeURIComponent(version)}` : ""}`;

/** With `isComplete`, the gateway first reads the configs of models that were not described yet. */
export const listModels = async (isComplete = false) => (await getJson(`v1/models${isComplete ? "?describe=true" : ""}`)).models;

/** Replica → its last states that this page read, oldest first. */
export let seenStates = new Map();
export const MAX_SEEN_STATES = 60;

export const isWorking = (replica) => replica.state === "UP" && !replica.cordoned;

export async function listReplicas() {
  const { replicas } = await getJson("v1/replicas");
  seenStates = new Map(replicas.map(({ address, state }) => [address, [...(seenStates.get(address) ?? []), state].slice(-MAX_SEEN_STATES)]));
  return replicas;
}

export const describeModel = (model, version) => getJson(modelPath(model, version));

/** Capabilities of the gateway can be absent; the page names those that are there. */
export const hasFeature = (name) => document.documentElement.dataset.features.split(" ").includes(name);

export const changeReplica = (address, action) => getJson(`v1/replicas/${encodeURIComponent(address)}/${action}`, { method: "POST" });

export const changeModel = (model, action, parameters = {}) =>
  sendJson("POST", `v2/repository/models/${encodeURIComponent(model)}/${action}`, { parameters });

/** Remove the files of a version, or of a whole model. */
export const removeModel = (model, version) => getJson(modelPath(model, version), { method: "DELETE" });

const labelPath = (model, label) => `${modelPath(model)}/labels/${encodeURIComponent(label)}`;
export const deleteLabel = (model, label) => getJson(labelPath(model, label), { method: "DELETE" });
export const setLabel = (model, label, meaning) => sendJson("PUT", labelPath(model, label), meaning);

/**
 * Upload a file as the next version of a model, and load it if `isLoaded`. Returns the request, which can
 * be aborted, and a promise of the response; `onProgress` is called with the bytes that were sent. fetch() reports no progress.
 */
export function uploadModel(model, file, isLoaded, onProgress) {
  const request = new XMLHttpRequest();
  const response = new Promise((resolve, reject) => {
    request.open("PUT", `${modelPath(model)}?filename=${encodeURIComponent(file.name)}${isLoaded ? "" : "&load=false"}`);
    if (key.get()) request.setRequestHeader("Authorization", `Bearer ${key.get()}`);
    request.responseType = "json";
    request.upload.addEventListener("progress", (event) => onProgress(event.loaded, event.total));
    request.addEventListener("load", () =>
      request.status < 300 ? resolve(request.response) : reject(new ApiError(request.status, request.response ?? {})));
    request.addEventListener("error", () => reject(new GatewayUnreachable("The connection failed during the upload.")));
    request.addEventListener("abort", () => reject(new DOMException("", "AbortError")));
    request.setRequestHeader("Content-Type", "application/octet-stream");
    request.send(file);
  });
  return { request, response };
}

// Server-sent events in the response to a POST request, which EventSource does not support.

/** Yield `{event, data}` as they arrive (WHATWG HTML, section 9.2). */
export async function* readEvents(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffered = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const blocks = (buffered + value).split("\n\n");
      buffered = blocks.pop();
      yield* blocks.map(parseEvent);
    }
  } finally {
    await reader.cancel(); // cancels an inference in progress
  }
}

function parseEvent(block) {
  let event = "message";
  const data = [];
  for (const line of block.split("\n")) {
    if (line.startsWith("event: ")) event = line.slice(7);
    else if (line.startsWith("data: ")) data.push(line.slice(6));
  }
  return { event, data: data.join("\n") };
}

// Errors as sentences. The messages of the API also have advice for programs.

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

/** Save a file; a link could not send the key. */
export async function download(address, name) {
  const blob = await (await withKey(() => call(address))).blob();
  const link = el("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

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

/** Return what helps against an error; null if nothing on this page does. */
function renderRemedy(error) {
  if (error.needsKey) return el("button", { type: "button", text: key.get() ? "Use another key" : "Enter a key", onclick: changeKey });
  if (error.body?.code === "NO_REPLICA" && !location.hash.startsWith("#fleet")) return el("a", { class: "button", href: "#fleet", text: "Open Fleet" });
  return null;
}

/** Show an error above a view. A gateway that does not answer is shown above every view (main.js). */
export function showErrorNotice(element, error) {
  if (!(error instanceof GatewayUnreachable)) showNotice(element, errorMessage(error), renderRemedy(error) ?? "");
}

/** Return a box with the error, what helps against it, and its code. */
export function renderError(error) {
  const { code, request_id: id } = error.body ?? {};
  const copy = id ? el("button", { type: "button", text: "Copy request id", title: id, onclick: () => navigator.clipboard?.writeText(id) }) : null;
  return el("div", { class: "error-box" }, icon("alert"),
    el("div", {},
      el("strong", { text: errorMessage(error) }),
      el("div", { class: "line" }, code ? el("code", { text: `${code} · ${error.status}` }) : null, renderRemedy(error), copy)));
}

// The dialog that prompts for the key.

let resolvePrompt = null;
let onKeyChange = null;

/** Prompt for a key, and show everything again with it. */
export const changeKey = async () => (await promptForKey(refusal?.message)) && onKeyChange();

/** The API's advice about headers is for programs. */
const explain = (message) => toSentence(message.split(/[:;] /)[0]);

/** Who needs no key sees nothing of keys. */
function updateKeyButton() {
  if (!$("key-button")) return; // on a page of the guide
  if (key.get() || isLocked()) $("key-button").hidden = false;
  setText($("key-button"), !key.get() ? "Enter a key" : isLocked() ? "Key: not accepted" : "Key: set");
  $("key-button").classList.toggle("bad", isLocked() && Boolean(key.get()));
}

/** Prompt for a key. Resolves to true if the key was changed. Only one prompt can be open. */
export function promptForKey(message = "") {
  if (resolvePrompt) return Promise.resolve(false);
  const isWrongKey = isLocked() && Boolean(key.get());
  setText($("key-reason"), isWrongKey ? "" : explain(message));
  setText($("key-error"), isWrongKey ? `This key is not accepted. ${explain(refusal.message)}` : "");
  $("key-reason").hidden = !message || isWrongKey;
  $("key-remove").hidden = !key.get();
  $("key").value = "";
  $("key-dialog").showModal();
  return new Promise((resolve) => {
    resolvePrompt = resolve;
    updateKeyButton();
  });
}

function closePrompt(isChanged) {
  const resolve = resolvePrompt;
  resolvePrompt = null;
  $("key-dialog").close();
  updateKeyButton();
  resolve?.(isChanged);
}

/** `onChange` is called when the user sets or removes the key. */
export function startKeyDialog(onChange) {
  onKeyChange = onChange;
  $("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    const entered = $("key").value.trim();
    if (!/^[\x21-\x7e]+$/.test(entered)) {
      setText($("key-error"), "A key consists of letters, digits and punctuation, without spaces.");
      return;
    }
    key.set(entered);
    closePrompt(true);
  });
  $("key-remove").addEventListener("click", () => {
    key.set("");
    closePrompt(true);
  });
  $("key-sign-in").hidden = !canSignIn;
  $("key-sign-in").addEventListener("click", async () => {
    const { signIn } = await import("./sign_in.js");
    signIn().catch((error) => setText($("key-error"), error.message));
  });
  $("key-cancel").addEventListener("click", () => closePrompt(false));
  $("key-dialog").addEventListener("cancel", (event) => {
    event.preventDefault();
    closePrompt(false);
  });
  $("key-button").addEventListener("click", changeKey);
  updateKeyButton();
}

/** Run the action. If the API rejects the key, prompt for another one and try again. */
export async function withKey(action) {
  for (;;) {
    try {
      return await action();
    } catch (error) {
      if (!error.needsKey || !(await promptForKey(error.message))) throw error;
    }
  }
}
