// The try view: a form for the model, its response, and the equivalent curl command.

import * as api from "./api.js";
import { $, el, setText, showNotice } from "./dom.js";
import { Field } from "./inputs.js";
import { promptForKey, withKey } from "./key.js";
import { cosineSimilarity, isNumbers, renderVector } from "./plot.js";
import { buildRequest } from "./request.js";
import { renderJson, renderOutputs } from "./response.js";
import { readEvents } from "./stream.js";

const MAX_DEFAULT_CANDIDATES = 12; // models that are examined to choose the default
let description = null;
let fields = [];
let running = null; // the AbortController of the request in progress
let generation = 0; // of the form: responses for an older one are ignored

export function start() {
  $("model").addEventListener("change", () => { location.hash = `try/${encodeURIComponent($("model").value)}`; });
  $("version").addEventListener("change", () => openModel($("model").value, $("version").value));
  $("try-form").addEventListener("submit", (event) => { event.preventDefault(); submit(); });
  $("try-form").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) submit();
  });
  $("curl-copy").addEventListener("click", copyCurl);
  document.addEventListener("paste", handlePaste);
  for (const name of ["dragover", "drop"]) document.addEventListener(name, (event) => event.preventDefault());
}

export function reset() {
  description = null;
  $("model").replaceChildren();
  clear();
}

export async function show(requestedModel) {
  try {
    const ready = (await withKey(api.listModels)).filter((model) => model.ready).map((model) => model.name);
    $("model").replaceChildren(...ready.map((name) => el("option", { value: name, text: name })));
    const model = requestedModel || description?.name || (await chooseDefault(ready));
    if (!model) {
      clear();
      showNotice($("try-notice"), "No model is ready. Administrators can load models under Fleet.");
      return;
    }
    $("model").value = model;
    if (description?.name !== model) await openModel(model);
    else await reopenIfChanged();
  } catch (error) {
    showError(error);
  }
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
  try {
    const newDescription = await withKey(() => api.describeModel(model, version));
    if (current !== generation) return;
    description = newDescription;
    showNotice($("try-notice"));
    showModelInfo(version);
    buildForm();
  } catch (error) {
    if (current === generation) showError(error);
  }
}

/** A model may have been reloaded with another signature. If it was not, the entered values are kept. */
async function reopenIfChanged() {
  const { name, versions } = description;
  const version = $("version").hidden ? "" : $("version").value;
  const newDescription = await api.describeModel(name, versions.includes(version) ? version : "");
  if (JSON.stringify(newDescription) !== JSON.stringify(description)) await openModel(name);
}

function showError(error) {
  const retry = async () => (await promptForKey()) && show("");
  showNotice($("try-notice"), api.errorMessage(error), error.needsKey ? "Use another key" : "", error.needsKey ? retry : null);
}

function clear() {
  running?.abort();
  description = null;
  fields = [];
  $("try-form").replaceChildren();
  $("response-body").replaceChildren();
  setText($("response-state"), "No request sent yet.");
  setText($("curl"), "");
}

function showModelInfo(version) {
  const { versions, platform, max_batch_size: batch, decoupled } = description;
  const several = versions.length > 1;
  $("version").hidden = $("version-label").hidden = !several;
  $("version").replaceChildren(...["", ...versions].map((name) => el("option", { value: name, text: name || "latest" })));
  $("version").value = version;
  setText($("model-facts"), [
    platform,
    several ? "" : `version ${versions[0] ?? ""}`,
    batch > 0 ? `max batch size ${batch}` : "",
    decoupled ? "streams responses" : "",
  ].filter(Boolean).join(" · "));
}

const isVector = (tensor) => /^(FP|BF)/.test(tensor.datatype) && tensor.shape.length === 1 && tensor.shape[0] !== 1;

function buildForm() {
  const required = description.inputs.filter((tensor) => !tensor.optional);
  const compares = required.length === 1 && !description.decoupled && description.outputs.some(isVector);
  fields = description.inputs.map((tensor, index) => new Field(tensor, index, compares && tensor === required[0], updateCurl));
  const infer = el("button", { class: "main", text: "Infer", id: "infer" });
  const stop = el("button", { type: "button", text: "Stop", id: "stop", hidden: true, onclick: () => running?.abort() });
  $("try-form").replaceChildren(...fields.map(({ element }) => element), el("div", { class: "line" }, infer, stop));
  updateCurl();
}

const path = () => api.modelPath(description.name, $("version").hidden ? "" : $("version").value);

/** Return the form's tensors and values. Shows all errors in the form, and throws the first one. */
async function readValues() {
  const results = await Promise.allSettled(fields.map((field) => field.value()));
  const failure = results.find(({ status }) => status === "rejected");
  if (failure) throw failure.reason;
  return fields.map((field, index) => [field.tensor, results[index].value]).filter(([, value]) => value);
}

const requestFor = (values) => buildRequest(description, path(), values, Boolean(api.key.get()));

/** Return the form's request, or two requests if their results are compared. */
async function buildRequests() {
  const values = await readValues();
  const secondText = fields.find((field) => field.secondText)?.secondText;
  return secondText ? [requestFor(values), requestFor([[values[0][0], { text: secondText }]])] : [requestFor(values)];
}

/** Update the curl command, which is empty while the form is incomplete. Shows no errors. */
async function updateCurl() {
  const current = description;
  const entered = await Promise.all(fields.map((field) => field.enteredValue().catch(() => null)));
  if (current !== description || !current) return;
  const isComplete = fields.every((field, index) => entered[index] || field.tensor.optional);
  const values = fields.map((field, index) => [field.tensor, entered[index]]).filter(([, value]) => value);
  setText($("curl"), isComplete ? requestFor(values).curl : "");
  $("curl-copy").disabled = !isComplete;
}

async function copyCurl() {
  try {
    await navigator.clipboard.writeText($("curl").textContent);
    setText($("curl-copied"), "copied");
  } catch {
    getSelection().selectAllChildren($("curl")); // pages without TLS cannot access the clipboard
    setText($("curl-copied"), "selected; use the keyboard to copy");
  }
}

function handlePaste(event) {
  const file = [...(event.clipboardData?.files ?? [])][0];
  const field = fields.find(({ methods }) => methods.includes("file"));
  if (!file || !field || $("try").hidden) return;
  event.preventDefault();
  field.setFile(file);
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
  setText($("curl"), requests.map((request) => request.curl).join("\n"));
  setText($("response-state"), "waiting for the response…");
  $("response-body").replaceChildren();
  $("stop").hidden = false;
  const started = performance.now();
  try {
    if (description.decoupled) await runStream(requests[0], controller.signal, started);
    else if (requests.length === 2) await runComparison(requests, controller.signal, started);
    else await runSingle(requests[0], controller.signal, started);
  } catch (error) {
    if (running === controller) showRequestError(error, started);
  } finally {
    if (running === controller) {
      running = null;
      $("stop").hidden = true;
    }
  }
}

const send = ({ url, options }, signal) => withKey(() => api.call(url, { ...options, signal }));
const elapsed = (started) => `${(performance.now() - started).toFixed(0)} ms`;

function showRequestError(error, started) {
  const isStopped = error.name === "AbortError";
  setText($("response-state"), isStopped ? `stopped after ${elapsed(started)}` : `failed after ${elapsed(started)}`);
  if (isStopped) return;
  const { code, request_id: id } = error.body ?? {};
  $("response-body").append(
    el("p", { class: "bad", text: api.errorMessage(error) }),
    code ? el("p", { class: "quiet", text: `${error.status} ${code}, request ${id}` }) : "");
}

async function runSingle(request, signal, started) {
  const document = await (await send(request, signal)).json();
  setText($("response-state"), `${elapsed(started)}, version ${document.version}`);
  $("response-body").replaceChildren(renderOutputs(document, description));
}

async function runComparison(requests, signal, started) {
  const documents = await Promise.all(requests.map(async (request) => (await send(request, signal)).json()));
  setText($("response-state"), `${elapsed(started)} for both requests`);
  const parts = description.outputs.flatMap(({ name }) => {
    const [a, b] = documents.map((document) => document.outputs[name]);
    if (!isNumbers(a) || !isNumbers(b) || a.length !== b.length) return [];
    return [
      el("h4", { text: name }),
      el("p", { class: "figure", id: "cosine", text: `cosine similarity ${cosineSimilarity(a, b).toFixed(3)}` }),
      renderVector(a), renderVector(b),
    ];
  });
  $("response-body").replaceChildren(...parts, renderJson(documents));
}

/** Show each response as it arrives. Texts are also joined, because generated text arrives in pieces. */
async function runStream(request, signal, started) {
  const joinedText = el("p", { class: "text-output", id: "joined" });
  const list = el("ol", { id: "events" });
  const region = el("div", { class: "events", tabindex: "0", role: "region", "aria-label": "Responses" }, list);
  const documents = [];
  const response = await send(request, signal);
  $("response-body").replaceChildren(joinedText, region, renderJson(documents));
  for await (const { event, data } of readEvents(response)) {
    if (event === "end") break;
    const document = JSON.parse(data);
    if (event === "error") throw new api.ApiError(response.status, document);
    documents.push(document);
    setText($("response-state"), `${documents.length} so far, ${elapsed(started)}`);
    const texts = Object.values(document.outputs).flat(Infinity).filter((value) => typeof value === "string");
    joinedText.append(...texts);
    list.append(el("li", {}, el("span", { class: "quiet", text: elapsed(started) }), renderOutputs(document, description, false)));
  }
  setText($("response-state"), `${documents.length} ${documents.length === 1 ? "response" : "responses"} in ${elapsed(started)}`);
}
