// The try view: a form for the model, its answer, and the same request in code.

import * as answer from "./answer.js";
import * as api from "./api.js";
import { $, el, isMac, setText, showNotice } from "./dom.js";
import { Field, RequestOptions, listExamples, placeholderValue, renderExamples } from "./inputs.js";
import * as models from "./models.js";
import { buildRequest, showCode, startCodeTabs } from "./request.js";

const MIN_VISIBLE_RESPONSE_PX = 280;
const SKELETON_AFTER_MS = 150;
const SHOW_TIME_AFTER_MS = 300; // of a running request, on its button
const LIVE_BELOW_MS = 150; // a model that answers faster runs while the user draws
const LIVE_PAUSE_MS = 300; // after the last stroke
const VISITED_KEY = "triton-gateway-visited";
let description = null;
let chosenVersion = ""; // empty for the one that the gateway chooses
let fields = [];
let options = null; // RequestOptions
let running = null; // the AbortController of the request in progress
let generation = 0; // of the form: responses for an older one are ignored
let liveTimer = null;
let restored = null; // the entry of the history whose model is being opened

export function start() {
  $("version").addEventListener("change", () => openModel(models.getCurrent(), $("version").value));
  $("try-form").addEventListener("submit", (event) => { event.preventDefault(); submit(); });
  $("try-form").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) submit();
  });
  answer.start();
  startCodeTabs();
  document.addEventListener("paste", handlePaste);
  for (const name of ["dragover", "drop"]) document.addEventListener(name, (event) => event.preventDefault());
}

export function reset() {
  answer.resetHistory();
  clear();
}

/** Show a model, or the chosen one; `query` may name its version. */
export async function show(requestedModel, query) {
  const skeleton = setTimeout(() => { $("try-skeleton").hidden = Boolean(description); }, SKELETON_AFTER_MS);
  try {
    const model = await models.open(requestedModel, $("try-notice"));
    const version = query?.get("version") ?? chosenVersion;
    if (!model) showNoModel(requestedModel);
    else if (!models.isUsable(model)) showUnloaded(model);
    else if (description?.name !== model.name || version !== chosenVersion) await openModel(model.name, query?.get("version") ?? "");
    else await reopenIfChanged();
  } catch (error) {
    showError(error);
  } finally {
    clearTimeout(skeleton);
    $("try-skeleton").hidden = true;
  }
}

function showUnloaded(model) {
  clear();
  $("try-body").hidden = true;
  showNotice($("try-notice"));
  models.showHead(model);
  $("try-unloaded").hidden = false;
  $("try-unloaded").replaceChildren(models.renderUnloaded(model, () => show(model.name)));
}

/** The notice says why there is none; without any model, there are ways to the first one. */
function showNoModel(requested) {
  clear();
  $("try-body").hidden = true;
  models.showHead(requested ? { name: requested } : null);
  $("try-unloaded").hidden = models.listVisible().length > 0;
  $("try-unloaded").replaceChildren(models.renderFirstSteps());
}

async function openModel(model, version = "") {
  clear();
  const current = generation;
  chosenVersion = version;
  if (models.findModel(model)?.ready === false) showNotice($("try-notice"), `Loading ${model}…`);
  try {
    const newDescription = await api.withKey(() => api.describeModel(model, version));
    if (current !== generation) return;
    description = newDescription;
    showNotice($("try-notice"));
    $("try-body").hidden = false;
    showModelInfo();
    buildForm();
  } catch (error) {
    if (current === generation) showError(error);
  }
}

const signatureOf = ({ versions, platform, max_batch_size: batch, decoupled, inputs, outputs }) =>
  JSON.stringify([versions, platform, batch, decoupled, inputs, outputs]);

/** A model may have been reloaded with another signature. If it was not, the entered values are kept. */
async function reopenIfChanged() {
  const { name } = description;
  const isThere = models.findModel(name)?.versions.some(({ version }) => version === chosenVersion);
  const newDescription = await api.describeModel(name, isThere ? chosenVersion : "");
  if (signatureOf(newDescription) !== signatureOf(description)) await openModel(name);
  else showReady(newDescription.ready);
}

function showReady(ready) {
  description.ready = ready;
  models.showHead(description);
}

function showError(error) {
  $("try-body").hidden = !description;
  api.showErrorNotice($("try-notice"), error);
  if (error.body?.code !== "NO_REPLICA") return;
  models.renderNoReplica().then((element) => {
    $("try-unloaded").hidden = Boolean(description);
    $("try-unloaded").replaceChildren(element);
  });
}

function clear() {
  generation += 1; // what is being read of another model is not shown
  running?.abort();
  running = null;
  clearTimeout(liveTimer);
  description = null;
  fields = [];
  $("try-form").replaceChildren();
  answer.clear();
  showCode([]);
  models.showFacts([]);
  $("version").hidden = $("version-label").hidden = true;
  $("try-unloaded").hidden = true;
}

/** A description of one version names no others; the list does. */
function showModelInfo() {
  const listed = models.findModel(description.name)?.versions ?? [];
  const versions = listed.filter(({ state }) => state === "READY").map(({ version }) => version);
  $("version").hidden = $("version-label").hidden = versions.length < 2;
  $("version").replaceChildren(...["", ...versions].map((name) => el("option", { value: name, text: name ? `v${name}` : "latest" })));
  $("version").value = chosenVersion;
  models.showHead(description);
}

const isVector = (tensor) => /^(FP|BF)/.test(tensor.datatype) && tensor.shape.length === 1 && tensor.shape[0] !== 1;

function buildForm() {
  const required = description.inputs.filter((tensor) => !tensor.optional);
  const compares = required.length === 1 && !description.decoupled && description.outputs.some(isVector);
  const batches = description.max_batch_size > 0 && description.inputs.length === 1 && !description.decoupled;
  const events = { onChange: updateCode, onDrawn: runSoon };
  fields = description.inputs.map((tensor, index) =>
    new Field(tensor, index, { compares: compares && tensor === required[0], batches }, events));
  options = new RequestOptions(updateCode);
  const examples = listExamples(fields);
  const infer = el("button", { class: "main", id: "infer" }, el("span", { text: "Run" }));
  const stop = el("button", { type: "button", text: "Stop", id: "stop", hidden: true, onclick: () => running?.abort() });
  $("try-form").replaceChildren(
    el("div", { id: "try-fields" }, ...fields.map(({ element }) => element)),
    el("div", { id: "try-more" }, renderExamples(examples, (example) => example.isComplete && submit()), options.element),
    el("div", { class: "run-bar" }, infer, stop, el("kbd", { text: isMac() ? "⌘ ↵" : "Ctrl ↵" }), options.button));
  answer.showGhost(description);
  performance.mark("usable");
  updateCode();
  if (restored?.model === description.name) restore(restored);
  else runFirstExample(examples);
}

/** The first model of a tab shows what it answers, unless its config says otherwise. A model is not loaded for this. */
async function runFirstExample([example]) {
  if (sessionStorage.getItem(VISITED_KEY) || !example?.isComplete || !description.ready || description.example_run === false) return;
  sessionStorage.setItem(VISITED_KEY, "1");
  example.enter();
  const current = generation;
  await submit({ note: "Example" });
  if (current === generation) for (const field of fields) field.inviteDrawing();
}

/** Return the form's tensors and values. Shows all errors in the form, and throws the first one. */
async function readValues() {
  const settled = await Promise.allSettled(fields.map((field) => field.value()));
  const failure = settled.find(({ status }) => status === "rejected");
  if (failure) throw failure.reason;
  return fields.map((field, index) => [field.tensor, settled[index].value]).filter(([, value]) => value);
}

/** Return the form's request, or two requests if their results are compared. */
async function buildRequests() {
  const values = await readValues();
  const read = options.read();
  const secondText = fields.find((field) => field.secondText)?.secondText;
  const first = buildRequest(description, chosenVersion, values, read);
  return secondText ? [first, buildRequest(description, chosenVersion, [[values[0][0], { text: secondText }]], read)] : [first];
}

/** Update the code. Values that were not entered are placeholders. Shows no errors. */
async function updateCode() {
  const current = description;
  const entered = await Promise.all(fields.map((field) => field.enteredValue().catch(() => null)));
  if (current !== description || !current) return;
  const isComplete = fields.every((field, index) => entered[index] || field.tensor.optional);
  const values = fields.map((field, index) => [field.tensor, entered[index] ?? (field.tensor.optional ? null : placeholderValue(field))]);
  const present = values.filter(([, value]) => value);
  const used = present.length ? present : [[fields[0].tensor, placeholderValue(fields[0])]];
  let read = {};
  try {
    read = options.read();
  } catch {
    // The error is shown beside the parameters.
  }
  showCode([buildRequest(description, chosenVersion, used, read)], isComplete ? "" : "With placeholders for what is not entered yet.");
}

/** An image that is pasted anywhere on the page is run. */
function handlePaste(event) {
  const file = [...(event.clipboardData?.files ?? [])][0];
  const field = fields.find(({ methods }) => methods.includes("file"));
  if (!file || !field || $("try").hidden) return;
  event.preventDefault();
  field.setFiles([file]);
  if (fields.length === 1) submit();
}

/** Run after the last of several strokes. */
function runSoon() {
  clearTimeout(liveTimer);
  liveTimer = setTimeout(() => submit({ isLive: true }), LIVE_PAUSE_MS);
}

/** @param {{isLive: boolean, note: string}} options: sent while the user draws; what is said of the answer */
async function submit({ isLive = false, note = "" } = {}) {
  clearTimeout(liveTimer);
  const current = description;
  let requests;
  try {
    requests = await buildRequests();
  } catch {
    fields.find((field) => field.error.textContent)?.element.querySelector("textarea, input, canvas")?.focus();
    return;
  }
  if (current !== description) return;
  running?.abort();
  const controller = (running = new AbortController());
  const input = fields.map((field) => field.save());
  showCode(requests);
  const started = performance.now();
  const stopClock = showRunning(started);
  let result;
  try {
    result = await run(requests, controller.signal, started);
    if (running === controller && !description.ready) showReady(true);
  } catch (error) {
    if (running === controller) {
      result = answer.showRequestError(error, started);
      if (!result.isStopped) markRefused(error.message);
    }
  } finally {
    if (running === controller) {
      running = null;
      stopClock();
      if (note) answer.addNote(note);
      if (!isLive && !note) showResponse();
      if (!result.isFailure && performance.now() - started < LIVE_BELOW_MS && fields.length === 1) fields[0].drawing?.suggestLive();
      if (!result.isFailure && !isLive) showTime(current.name, controller);
      answer.addEntry({ model: description.name, version: requests[0].version, input, isLive, ...result, answer: answer.save() }, showAgain);
    }
  }
}

/** Show where the time of the model goes, below its answer. */
async function showTime(model, controller) {
  const { renderShares } = await import("./model.js");
  const shares = await renderShares(model).catch(() => null);
  if (running === null && description?.name === model && !controller.signal.aborted) answer.showTime(shares);
}

/** Show on the button that a request runs, and soon for how long. Returns a function that ends this. */
function showRunning(started) {
  const button = $("infer");
  const spinner = el("span", { class: "spinner", "aria-hidden": "true" });
  const label = el("span", { text: "Running" });
  const clock = setInterval(() => {
    const elapsed = performance.now() - started;
    if (elapsed > SHOW_TIME_AFTER_MS) setText(label, `Running ${(elapsed / 1000).toFixed(1)} s`);
  }, 100);
  // A quick answer does not make the button flicker.
  const delay = setTimeout(() => button.replaceChildren(spinner, label), LIVE_BELOW_MS);
  $("response").classList.add("running");
  $("stop").hidden = false;
  return () => {
    clearInterval(clock);
    clearTimeout(delay);
    button.replaceChildren(el("span", { text: "Run" }));
    $("response").classList.remove("running");
    $("stop").hidden = true;
  };
}

/** Mark the input that the gateway's message names. */
function markRefused(message) {
  const field = fields.find(({ tensor }) => message.includes(`'${tensor.name}'`));
  field?.element.classList.add("refused");
}

/** Scroll to the response if it begins below the screen, as it does on a phone. */
function showResponse() {
  const { top, bottom } = $("response").getBoundingClientRect();
  const isVisible = top >= 0 && Math.min(bottom, top + MIN_VISIBLE_RESPONSE_PX) <= innerHeight;
  if (!isVisible) $("response").scrollIntoView({ block: "nearest" });
}

function run(requests, signal, started) {
  const files = fields.map((field) => (field.method === "file" ? field.selectedFiles : [])).find((list) => list.length > 1);
  if (description.decoupled) return answer.runStream(description, requests[0], signal, started);
  if (requests.length === 2) return answer.runComparison(description, requests, signal, started);
  if (files) return answer.runBatch(description, requests[0], files, signal, started);
  return answer.runSingle(description, requests[0], signal, started);
}

/** Show an earlier request and its answer. */
function showAgain(entry) {
  if (entry.model === description?.name) return restore(entry);
  restored = entry;
  location.hash = `try/${encodeURIComponent(entry.model)}`;
}

function restore(entry) {
  restored = null;
  if ([...$("version").options].some(({ value }) => value === entry.version)) $("version").value = chosenVersion = entry.version;
  fields.forEach((field, index) => field.restore(entry.input[index]));
  answer.restore(entry.answer);
}
