// Sending the form's requests, and showing their responses in the ways that suit them.

import * as api from "./api.js";
import { startTurn } from "./chat.js";
import { $, el, setText } from "./dom.js";
import { renderError } from "./errors.js";
import { withKey } from "./key.js";
import { cosineSimilarity, isNumbers, renderVector } from "./plot.js";
import { renderJson, renderOutputs } from "./response.js";
import { readEvents } from "./stream.js";

const send = ({ url, options }, signal) => withKey(() => api.call(url, { ...options, signal }));
export const elapsed = (started) => `${(performance.now() - started).toFixed(0)} ms`;

export function showRequestError(error, started) {
  const isStopped = error.name === "AbortError";
  setText($("response-state"), isStopped ? `stopped after ${elapsed(started)}` : `failed after ${elapsed(started)}`);
  if (isStopped) return;
  const { code, request_id: id } = error.body ?? {};
  $("response-body").append(
    renderError(error),
    code ? el("p", { class: "quiet", text: `${error.status} ${code}, request ${id}` }) : "");
}

export async function runSingle(description, request, signal, started) {
  const document = await (await send(request, signal)).json();
  setText($("response-state"), `${elapsed(started)}, version ${document.version}`);
  $("response-body").replaceChildren(renderOutputs(document, description));
}

export async function runComparison(description, requests, signal, started) {
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

/** Show the response of each file of a batch beside its thumbnail. */
export async function runBatch(description, request, files, signal, started) {
  const document = await (await send(request, signal)).json();
  setText($("response-state"), `${elapsed(started)} for ${files.length} files, version ${document.version}`);
  const items = files.map((file, index) => {
    const outputs = Object.fromEntries(Object.entries(document.outputs).map(([name, list]) => [name, list[index]]));
    const image = file.type.startsWith("image/") ? el("img", { src: URL.createObjectURL(file), alt: "" }) : null;
    return el("li", {}, image, el("div", { class: "name", text: file.name }), renderOutputs({ outputs }, description, false));
  });
  $("response-body").replaceChildren(el("ol", { class: "batch" }, ...items), renderJson(document));
}

/** Show each response as it arrives. Texts are also joined, because generated text arrives in pieces. */
export async function runStream(description, request, signal, started) {
  const turn = startTurn(description, request);
  const list = el("ol", { id: "events" });
  const region = el("div", { class: "events", tabindex: "0", role: "region", "aria-label": "Responses" }, list);
  const documents = [];
  const response = await send(request, signal);
  const pieces = turn ? el("details", {}, el("summary", { text: "Pieces" }), region) : region;
  $("response-body").replaceChildren(...(turn ? [turn.element] : []), pieces, renderJson(documents));
  for await (const { event, data } of readEvents(response)) {
    if (event === "end") break;
    const document = JSON.parse(data);
    if (event === "error") throw new api.ApiError(response.status, document);
    documents.push(document);
    setText($("response-state"), `${documents.length} so far, ${elapsed(started)}`);
    const texts = Object.values(document.outputs).flat(Infinity).filter((value) => typeof value === "string");
    turn?.append(texts);
    list.append(el("li", {}, el("span", { class: "quiet", text: elapsed(started) }), renderOutputs(document, description, false)));
  }
  turn?.end();
  setText($("response-state"), `${documents.length} ${documents.length === 1 ? "response" : "responses"} in ${elapsed(started)}`);
}
