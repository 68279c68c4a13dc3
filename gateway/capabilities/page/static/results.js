// Sending the form's requests, and showing their answers in the ways that suit them.

import * as answer from "./answer.js";
import * as api from "./api.js";
import { startTurn } from "./chat.js";
import { el } from "./dom.js";
import { renderError } from "./errors.js";
import { withKey } from "./key.js";
import { cosineSimilarity, isNumbers, renderSimilarity, renderVector, wordFor } from "./plot.js";
import { renderOutputs, summarizeOutputs } from "./response.js";
import { readEvents } from "./stream.js";

const send = ({ url, options }, signal) => withKey(() => api.call(url, { ...options, signal }));
const elapsed = (started) => `${(performance.now() - started).toFixed(0)} ms`;

// Each function returns what the history needs: `{summary, isFailure, isStopped}`.

export function showRequestError(error, started) {
  const isStopped = error.name === "AbortError";
  const state = `${isStopped ? "stopped" : "failed"} after ${elapsed(started)}`;
  // A stream that was stopped keeps what arrived.
  if (isStopped) answer.setState(state);
  else answer.show(state, [renderError(error)], error.body ?? null);
  return { summary: isStopped ? "stopped" : error.body?.code ?? "failed", isFailure: !isStopped, isStopped };
}

export async function runSingle(description, request, signal, started) {
  const document = await (await send(request, signal)).json();
  answer.show(`${elapsed(started)} · v${document.version}`, [renderOutputs(document, description)], document);
  return { summary: summarizeOutputs(document) };
}

export async function runComparison(description, requests, signal, started) {
  const documents = await Promise.all(requests.map(async (request) => (await send(request, signal)).json()));
  let summary = "";
  const parts = description.outputs.flatMap(({ name }) => {
    const [a, b] = documents.map((document) => document.outputs[name]);
    if (!isNumbers(a) || !isNumbers(b) || a.length !== b.length) return [];
    const similarity = cosineSimilarity(a, b);
    summary ||= `${similarity.toFixed(3)} ${wordFor(similarity)}`;
    return [
      el("div", { class: "output" }, el("h4", { text: name }), renderSimilarity(similarity),
        el("details", {}, el("summary", { text: "Both vectors" }), renderVector(a), renderVector(b))),
    ];
  });
  answer.show(`${elapsed(started)} for both requests`, parts, documents);
  return { summary };
}

/** Show the response of each file of a batch beside its thumbnail. */
export async function runBatch(description, request, files, signal, started) {
  const document = await (await send(request, signal)).json();
  const items = files.map((file, index) => {
    const outputs = Object.fromEntries(Object.entries(document.outputs).map(([name, list]) => [name, list[index]]));
    const image = file.type.startsWith("image/") ? el("img", { src: URL.createObjectURL(file), alt: "" }) : null;
    return el("li", {}, image, el("div", { class: "name", text: file.name }), renderOutputs({ outputs }, description));
  });
  answer.show(`${elapsed(started)} for ${files.length} files · v${document.version}`, [el("ol", { class: "batch" }, ...items)], document);
  return { summary: `${files.length} files` };
}

/** Show each response as it arrives. Texts are also joined, because generated text arrives in pieces. */
export async function runStream(description, request, signal, started) {
  const turn = startTurn(description, request);
  const list = el("ol", { id: "events" });
  const region = el("div", { class: "events", tabindex: "0", role: "region", "aria-label": "Responses" }, list);
  const documents = [];
  const response = await send(request, signal);
  const pieces = turn ? el("details", {}, el("summary", { text: "Pieces" }), region) : region;
  answer.show("", [...(turn ? [turn.element] : []), pieces], documents);
  for await (const { event, data } of readEvents(response)) {
    if (event === "end") break;
    const document = JSON.parse(data);
    if (event === "error") throw new api.ApiError(response.status, document);
    documents.push(document);
    answer.setState(`${documents.length} so far · ${elapsed(started)}`);
    const texts = Object.values(document.outputs).flat(Infinity).filter((value) => typeof value === "string");
    turn?.append(texts);
    list.append(el("li", {}, el("span", { class: "small", text: elapsed(started) }), renderOutputs(document, description)));
    if (!turn) region.scrollTop = region.scrollHeight;
  }
  turn?.end();
  const rate = (1000 * documents.length) / (performance.now() - started);
  answer.setState(`${documents.length} ${documents.length === 1 ? "response" : "responses"} in ${elapsed(started)}${documents.length > 1 ? ` · ${rate.toFixed(1)}/s` : ""}`);
  return { summary: turn?.text() || `${documents.length} responses` };
}
