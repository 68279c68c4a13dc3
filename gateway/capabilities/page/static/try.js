// The try view: a form for the model, its response, and the same request in code.

import * as api from "./api.js";
import * as codetabs from "./codetabs.js";
import { attachMatches } from "./combobox.js";
import { $, el, setText, showNotice } from "./dom.js";
import { showErrorNotice } from "./errors.js";
import * as history from "./history.js";
import { Field } from "./inputs.js";
import { promptForKey, withKey } from "./key.js";
import { RequestOptions } from "./options.js";
import { buildRequest } from "./request.js";
import * as results from "./results.js";
import { placeholderValue } from "./samples.js";
import { renderUnloaded } from "./unloaded.js";

const MIN_SEARCHED_MODELS = 6; // with fewer, the search is hidden
const MAX_DEFAULT_CANDIDATES = 12; // models that are examined to choose the default
const MIN_VISIBLE_RESPONSE_PX = 200;
let description = null;
let fields = [];
let options = null; // RequestOptions
let listedModels = []; // the names of those that are ready or load on demand
let sleepingModels = new Set(); // those that their first request loads
let running = null; // the AbortController of the request in progress
let generation = 0; // of the form: responses for an older one are ignored

export function start() {
  $("model").addEventListener("change", () => openAddress($("model").value));
  $("version").addEventListener("change", () => openModel($("model").value, $("version").value));
  $("try-form").addEventListener("submit", (event) => { event.preventDefault(); submit(); });
  $("try-form").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) submit();
  });
  attachMatches($("model-search"), $("model-matches"), findModels, openAddress);
  codetabs.start();
  document.addEventListener("paste", handlePaste);
  for (const name of ["dragover", "drop"]) document.addEventListener(name, (event) => event.preventDefault());
}

export function reset() {
  description = null;
  listedModels = [];
  sleepingModels.clear();
  $("model").replaceChildren();
  history.reset();
  clear();
}

function openAddress(model) {
  location.hash = `try/${encodeURIComponent(model)}`;
}

const modelLabel = (name) => name + (sleepingModels.has(name) ? " (loads on demand)" : "");

/** Return the models whose names contain the words; those that begin with them come first. */
function findModels(words) {
  const places = listedModels.map((name) => [name, name.toLowerCase().indexOf(words)]).filter(([, place]) => place >= 0);
  const sorted = places.sort(([, a], [, b]) => Math.sign(a) - Math.sign(b));
  return sorted.map(([name]) => ({ value: name, text: modelLabel(name) }));
}

function listModels() {
  $("model-search-part").hidden = listedModels.length < MIN_SEARCHED_MODELS;
  $("try-choice").hidden = listedModels.length === 0;
  const choice = description ? [] : [el("option", { value: "", text: "Choose a model", disabled: true, selected: true })];
  const options = listedModels.map((name) => el("option", { value: name, text: modelLabel(name) }));
  $("model").replaceChildren(...choice, ...options);
  if (description) $("model").value = description.name;
}

export async function show(requestedModel) {
  try {
    const allModels = await withKey(api.listModels);
    const models = allModels.filter((model) => model.ready || model.on_demand);
    listedModels = models.map((model) => model.name);
    sleepingModels = new Set(models.filter((model) => !model.ready).map((model) => model.name));
    listModels();
    // A model is not loaded only because somebody opens the page.
    const loaded = listedModels.filter((name) => !sleepingModels.has(name));
    const model = requestedModel || description?.name || (await chooseDefault(loaded));
    if (!model) {
      clear();
      showNoModel();
      return;
    }
    const unloaded = allModels.find(({ name, ready, on_demand: onDemand }) => name === model && !ready && !onDemand);
    if (unloaded) showUnloaded(unloaded);
    else if (description?.name !== model) await openModel(model);
    else await reopenIfChanged();
    listModels();
  } catch (error) {
    showError(error);
  }
}

function showUnloaded(model) {
  clear();
  $("try-body").hidden = true;
  showNotice($("try-notice"));
  $("try-unloaded").hidden = false;
  $("try-unloaded").replaceChildren(renderUnloaded(model, () => show(model.name)));
}

function showNoModel() {
  $("try-body").hidden = true;
  if (listedModels.length) showNotice($("try-notice"), "No model is loaded now. Choose one: it loads on demand.");
  else showNotice($("try-notice"), "No model is ready yet. Under Fleet, an administrator can load a model or drop a model file.", "Open Fleet", () => { location.hash = "fleet"; });
}

/** Prefer a model whose config declares a content type, because its inputs are easy to provide. */
async function chooseDefault(names) {
  const candidates = names.slice(0, MAX_DEFAULT_CANDIDATES);
  const descriptions = await Promise.all(candidates.map((name) => api.describeModel(name).catch(() => null)));
  const typed = descriptions.find((model) => model?.inputs.some((tensor) => tensor.content_type));
  return (typed ?? descriptions.find(Boolean))?.name ?? names[0];
}

async function openModel(model, version = "") {
  const current = (generation += 1);
  clear();
  if (sleepingModels.has(model)) showNotice($("try-notice"), `Loading ${model}…`);
  try {
    const newDescription = await withKey(() => api.describeModel(model, version));
    if (current !== generation) return;
    description = newDescription;
    showNotice($("try-notice"));
    $("try-body").hidden = false;
    showModelInfo(version);
    buildForm();
  } catch (error) {
    if (current === generation) showError(error);
  }
}

const signatureOf = ({ versions, platform, max_batch_size: batch, decoupled, inputs, outputs }) =>
  JSON.stringify([versions, platform, batch, decoupled, inputs, outputs]);

/** A model may have been reloaded with another signature. If it was not, the entered values are kept. */
async function reopenIfChanged() {
  const { name, versions } = description;
  const version = $("version").hidden ? "" : $("version").value;
  const newDescription = await api.describeModel(name, versions.includes(version) ? version : "");
  if (signatureOf(newDescription) !== signatureOf(description)) await openModel(name);
  else showReady(newDescription.ready);
}

function showReady(ready) {
  description.ready = ready;
  if (ready) sleepingModels.delete(description.name);
  listModels();
  showFacts();
}

function showError(error) {
  $("try-body").hidden = !description;
  const retry = async () => (await promptForKey()) && show("");
  showErrorNotice($("try-notice"), error, retry);
}

function clear() {
  running?.abort();
  running = null;
  description = null;
  fields = [];
  $("try-form").replaceChildren();
  $("response-body").replaceChildren();
  setText($("response-state"), "No request sent yet: enter an input, and press Infer or Ctrl+Enter.");
  codetabs.showCode([]);
  setText($("model-facts"), "");
  $("version").hidden = $("version-label").hidden = true;
  $("model-details").hidden = $("model-api").hidden = true;
  $("try-unloaded").hidden = true;
}

function showModelInfo(version) {
  const { versions } = description;
  const several = versions.length > 1;
  $("version").hidden = $("version-label").hidden = !several;
  $("version").replaceChildren(...["", ...versions].map((name) => el("option", { value: name, text: name || "latest" })));
  $("version").value = version;
  $("model-details").hidden = $("model-api").hidden = false;
  $("model-details").href = `#model/${encodeURIComponent(description.name)}`;
  $("model-api").href = `/docs?model=${encodeURIComponent(description.name)}`;
  showFacts();
}

function showFacts() {
  const { versions, platform, max_batch_size: batch, decoupled, ready } = description;
  setText($("model-facts"), [
    platform,
    versions.length > 1 ? "" : `version ${versions[0] ?? ""}`,
    batch > 0 ? `max batch size ${batch}` : "",
    decoupled ? "streams responses" : "",
    ready ? "" : "the next request loads it",
  ].filter(Boolean).join(" · "));
}

const isVector = (tensor) => /^(FP|BF)/.test(tensor.datatype) && tensor.shape.length === 1 && tensor.shape[0] !== 1;

function buildForm() {
  const required = description.inputs.filter((tensor) => !tensor.optional);
  const compares = required.length === 1 && !description.decoupled && description.outputs.some(isVector);
  const batches = description.max_batch_size > 0 && description.inputs.length === 1 && !description.decoupled;
  fields = description.inputs.map((tensor, index) =>
    new Field(tensor, index, { compares: compares && tensor === required[0], batches }, updateCode));
  options = new RequestOptions(updateCode);
  const infer = el("button", { class: "main", text: "Infer", id: "infer" });
  const stop = el("button", { type: "button", text: "Stop", id: "stop", hidden: true, onclick: () => running?.abort() });
  $("try-form").replaceChildren(...fields.map(({ element }) => element), options.element, el("div", { class: "line" }, infer, stop));
  updateCode();
}

const path = () => api.modelPath(description.name, $("version").hidden ? "" : $("version").value);

/** Return the form's tensors and values. Shows all errors in the form, and throws the first one. */
async function readValues() {
  const results = await Promise.allSettled(fields.map((field) => field.value()));
  const failure = results.find(({ status }) => status === "rejected");
  if (failure) throw failure.reason;
  return fields.map((field, index) => [field.tensor, results[index].value]).filter(([, value]) => value);
}

/** Return the form's request, or two requests if their results are compared. */
async function buildRequests() {
  const values = await readValues();
  const read = options.read();
  const secondText = fields.find((field) => field.secondText)?.secondText;
  const first = buildRequest(description, path(), values, read);
  return secondText ? [first, buildRequest(description, path(), [[values[0][0], { text: secondText }]], read)] : [first];
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
  codetabs.showCode([buildRequest(description, path(), used, read)], isComplete ? "" : "With placeholders for what is not entered yet.");
}

function handlePaste(event) {
  const file = [...(event.clipboardData?.files ?? [])][0];
  const field = fields.find(({ methods }) => methods.includes("file"));
  if (!file || !field || $("try").hidden) return;
  event.preventDefault();
  field.setFiles([file]);
}

async function submit() {
  let requests;
  try {
    requests = await buildRequests();
  } catch {
    fields.find((field) => field.error.textContent)?.element.querySelector("textarea, input, canvas")?.focus();
    return;
  }
  running?.abort();
  const controller = (running = new AbortController());
  codetabs.showCode(requests);
  setText($("response-state"), "waiting for the response…");
  $("response-body").replaceChildren();
  $("stop").hidden = false;
  const started = performance.now();
  let isFailure = false;
  try {
    await run(requests, controller.signal, started);
    if (running === controller && !description.ready) showReady(true);
  } catch (error) {
    isFailure = true;
    if (running === controller) results.showRequestError(error, started);
  } finally {
    if (running === controller) {
      running = null;
      $("stop").hidden = true;
      showResponse();
      history.addEntry(description.name, $("response-state").textContent, isFailure, [...$("response-body").childNodes], showAgain);
    }
  }
}

/** Scroll to the response if it begins below the screen, as it does on a phone. */
function showResponse() {
  const { top, bottom } = $("response").getBoundingClientRect();
  const isVisible = top >= 0 && Math.min(bottom, top + MIN_VISIBLE_RESPONSE_PX) <= innerHeight;
  if (!isVisible) $("response").scrollIntoView({ block: "nearest" });
}

function run(requests, signal, started) {
  const files = fields.map((field) => (field.method === "file" ? field.selectedFiles : [])).find((list) => list.length > 1);
  if (description.decoupled) return results.runStream(description, requests[0], signal, started);
  if (requests.length === 2) return results.runComparison(description, requests, signal, started);
  if (files) return results.runBatch(description, requests[0], files, signal, started);
  return results.runSingle(description, requests[0], signal, started);
}

/** Show a response of the history. */
function showAgain(state, nodes) {
  setText($("response-state"), `${state} (earlier)`);
  $("response-body").replaceChildren(...nodes);
}
