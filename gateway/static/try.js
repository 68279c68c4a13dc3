// Try a model: its form, its answer, and the curl line that does the same.

import * as answers from "./answer.js";
import * as api from "./api.js";
import { $, el, notice, say } from "./dom.js";
import { Field } from "./inputs.js";
import { ask, withKey } from "./key.js";
import { cosine, isNumbers, short, vector } from "./plot.js";
import { request } from "./request.js";
import { events } from "./stream.js";

const LOOKED_AT = 12; // models, to find one that people have something for
let description = null;
let fields = [];
let running = null; // what ends the request that is under way
let turn = 0; // of drawing the form: only the last one counts

export function start() {
  $("model").addEventListener("change", () => { location.hash = `try/${encodeURIComponent($("model").value)}`; });
  $("version").addEventListener("change", () => open($("model").value, $("version").value));
  $("try-form").addEventListener("submit", (event) => { event.preventDefault(); submit(); });
  $("try-form").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) submit();
  });
  $("curl-copy").addEventListener("click", copy);
  document.addEventListener("paste", pasted);
  for (const name of ["dragover", "drop"]) document.addEventListener(name, (event) => event.preventDefault());
}

export function forget() {
  description = null;
  $("model").replaceChildren();
  clear();
}

export async function show(wanted) {
  try {
    const ready = (await withKey(api.models)).filter((model) => model.ready).map((model) => model.name);
    $("model").replaceChildren(...ready.map((name) => el("option", { value: name, text: name })));
    const model = wanted || description?.name || (await first(ready));
    if (!model) {
      clear();
      notice($("try-notice"), "No model is ready. An administrator loads one under Fleet.");
      return;
    }
    $("model").value = model;
    if (description?.name !== model) await open(model);
    else await renewed();
  } catch (error) {
    failed(error);
  }
}

/** One whose config says what people send to it; else any. */
async function first(ready) {
  const found = await Promise.all(ready.slice(0, LOOKED_AT).map((name) => api.describe(name).catch(() => null)));
  return (found.find((one) => one?.inputs.some((tensor) => tensor.content_type)) ?? found.find(Boolean))?.name ?? ready[0];
}

async function open(model, version = "") {
  const mine = (turn += 1);
  clear();
  try {
    const found = await withKey(() => api.describe(model, version));
    if (mine !== turn) return;
    description = found;
    notice($("try-notice"));
    facts(version);
    build();
  } catch (error) {
    if (mine === turn) failed(error);
  }
}

/** It may have been loaded anew, with another signature; what was typed stays if it was not. */
async function renewed() {
  const { name, versions } = description;
  const version = $("version").hidden ? "" : $("version").value;
  const found = await api.describe(name, versions.includes(version) ? version : "");
  if (JSON.stringify(found) !== JSON.stringify(description)) await open(name);
}

function failed(error) {
  const again = async () => (await ask()) && show("");
  notice($("try-notice"), api.reason(error), error.wantsKey ? "Use another key" : "", error.wantsKey ? again : null);
}

function clear() {
  running?.abort();
  description = null;
  fields = [];
  $("try-form").replaceChildren();
  $("answer-body").replaceChildren();
  say($("answer-state"), "Nothing was asked yet.");
  say($("curl"), "");
}

function facts(version) {
  const { versions, platform, max_batch_size: batch, decoupled } = description;
  const several = versions.length > 1;
  $("version").hidden = $("version-label").hidden = !several;
  $("version").replaceChildren(...["", ...versions].map((name) => el("option", { value: name, text: name || "newest" })));
  $("version").value = version;
  say($("model-facts"), [
    platform,
    several ? "" : `version ${versions[0] ?? ""}`,
    batch > 0 ? `batches of up to ${batch}` : "",
    decoupled ? "answers as they are made" : "",
  ].filter(Boolean).join(" · "));
}

const isVector = (tensor) => /^(FP|BF)/.test(tensor.datatype) && tensor.shape.length === 1 && tensor.shape[0] !== 1;

function build() {
  const required = description.inputs.filter((tensor) => !tensor.optional);
  const compares = required.length === 1 && !description.decoupled && description.outputs.some(isVector);
  fields = description.inputs.map((tensor, at) => new Field(tensor, at, compares && tensor === required[0], curl));
  const send = el("button", { class: "main", text: "Ask", id: "ask" });
  const stop = el("button", { type: "button", text: "Stop", id: "stop", hidden: true, onclick: () => running?.abort() });
  $("try-form").replaceChildren(...fields.map(({ element }) => element), el("div", { class: "line" }, send, stop));
  curl();
}

const path = () => api.pathOf(description.name, $("version").hidden ? "" : $("version").value);

/** The values of the form; all that is missing is said at once. Throws `Error`. */
async function given() {
  const found = await Promise.allSettled(fields.map((field) => field.value()));
  const wrong = found.find(({ status }) => status === "rejected");
  if (wrong) throw wrong.reason;
  return fields.map((field, at) => [field.tensor, found[at].value]).filter(([, value]) => value);
}

const built = (values) => request(description, path(), values, Boolean(api.key.get()));

/** The requests of the form: one, or two that are compared. */
async function requests() {
  const values = await given();
  const second = fields.find((field) => field.second)?.second;
  return second ? [built(values), built([[values[0][0], { text: second }]])] : [built(values)];
}

/** Kept as the form is; while that is not whole, nothing is said about it. */
async function curl() {
  const mine = description;
  const quiet = fields.map((field) => field.given().catch(() => null));
  const found = await Promise.all(quiet);
  if (mine !== description || !mine) return;
  const whole = fields.every((field, at) => found[at] || field.tensor.optional);
  const values = fields.map((field, at) => [field.tensor, found[at]]).filter(([, value]) => value);
  say($("curl"), whole ? built(values).curl : "");
  $("curl-copy").disabled = !whole;
}

async function copy() {
  try {
    await navigator.clipboard.writeText($("curl").textContent);
    say($("curl-copied"), "copied");
  } catch {
    getSelection().selectAllChildren($("curl")); // a page without TLS may not write there
    say($("curl-copied"), "selected; copy it with the keyboard");
  }
}

function pasted(event) {
  const file = [...(event.clipboardData?.files ?? [])][0];
  const field = fields.find(({ ways }) => ways.includes("file"));
  if (!file || !field || $("try").hidden) return;
  event.preventDefault();
  field.take(file);
}

async function submit() {
  let asked;
  try {
    asked = await requests();
  } catch {
    fields.find((field) => field.wrong.textContent)?.element.querySelector("textarea, input, canvas")?.focus();
    return;
  }
  running?.abort();
  const mine = (running = new AbortController());
  say($("curl"), asked.map((one) => one.curl).join("\n"));
  say($("answer-state"), "asking…");
  $("answer-body").replaceChildren();
  $("stop").hidden = false;
  const began = performance.now();
  try {
    if (description.decoupled) await streamed(asked[0], mine.signal, began);
    else if (asked.length === 2) await compared(asked, mine.signal, began);
    else await answered(asked[0], mine.signal, began);
  } catch (error) {
    if (running === mine) refused(error, began);
  } finally {
    if (running === mine) {
      running = null;
      $("stop").hidden = true;
    }
  }
}

const send = ({ url, options }, signal) => withKey(() => api.call(url, { ...options, signal }));
const took = (began) => `${(performance.now() - began).toFixed(0)} ms`;

function refused(error, began) {
  const stopped = error.name === "AbortError";
  say($("answer-state"), stopped ? `stopped after ${took(began)}` : `refused after ${took(began)}`);
  if (stopped) return;
  const { code, request_id: id } = error.body ?? {};
  $("answer-body").append(
    el("p", { class: "bad", text: api.reason(error) }),
    code ? el("p", { class: "quiet", text: `${error.status} ${code}, request ${id}` }) : "");
}

async function answered(one, signal, began) {
  const document = await (await send(one, signal)).json();
  say($("answer-state"), `${took(began)}, version ${document.version}`);
  $("answer-body").replaceChildren(answers.outputs(document, description));
}

async function compared(asked, signal, began) {
  const documents = await Promise.all(asked.map(async (one) => (await send(one, signal)).json()));
  say($("answer-state"), `${took(began)} for both`);
  const parts = description.outputs.flatMap(({ name }) => {
    const [a, b] = documents.map((document) => document.outputs[name]);
    if (!isNumbers(a) || !isNumbers(b) || a.length !== b.length) return [];
    return [
      el("h4", { text: name }),
      el("p", { class: "figure", id: "cosine", text: `cosine similarity ${cosine(a, b).toFixed(3)}` }),
      vector(a), vector(b),
    ];
  });
  $("answer-body").replaceChildren(...parts, answers.raw(documents));
}

/** Each answer when it comes; texts are also joined, as generated ones are read. */
async function streamed(one, signal, began) {
  const joined = el("p", { class: "said", id: "joined" });
  const list = el("ol", { id: "events" });
  const region = el("div", { class: "events", tabindex: "0", role: "region", "aria-label": "Answers" }, list);
  const documents = [];
  const answer = await send(one, signal);
  $("answer-body").replaceChildren(joined, region, answers.raw(documents));
  for await (const { event, data } of events(answer)) {
    if (event === "end") break;
    const document = JSON.parse(data);
    if (event === "error") throw new api.Refused(answer.status, document);
    documents.push(document);
    say($("answer-state"), `${documents.length} so far, ${took(began)}`);
    const texts = Object.values(document.outputs).flat(Infinity).filter((value) => typeof value === "string");
    joined.append(...texts);
    list.append(el("li", {}, el("span", { class: "quiet", text: took(began) }), answers.outputs(document, description, false)));
  }
  say($("answer-state"), `${documents.length} ${documents.length === 1 ? "answer" : "answers"} in ${took(began)}`);
}
