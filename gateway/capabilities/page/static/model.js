// The view of one model: where its time goes, its tensors, and the graph of an ensemble.

import * as api from "./api.js";
import { $, el, setText, showNotice, updateRows } from "./dom.js";
import { showErrorNotice } from "./errors.js";
import { renderGraph } from "./graph.js";
import { formatShape } from "./inputs.js";
import { promptForKey, withKey } from "./key.js";
import { parseSamples, sumBy } from "./metrics.js";
import { formatMs, summarize } from "./statistics.js";
import { renderUnloaded } from "./unloaded.js";

const DURATION_SUM = "gateway_request_duration_seconds_sum";
const DURATION_COUNT = "gateway_request_duration_seconds_count";
const UPSTREAM = "gateway_request_upstream_seconds_total";
const PHASES = [
  ["gateway", "gateway", "in the gateway"],
  ["queue", "queue", "waiting in Triton's queue"],
  ["compute_input", "copy", "copying inputs"],
  ["compute_infer", "compute", "computing"],
  ["compute_output", "copy", "copying outputs"],
];
let shownModel = "";
let description = null;
let config = null;

export function start() {
  $("model-choice").addEventListener("change", () => { location.hash = `model/${encodeURIComponent($("model-choice").value)}`; });
}

export function reset() {
  shownModel = "";
  description = config = null;
  $("model-body").hidden = true;
  setText($("model-view-heading"), "Model");
  setText($("model-view-facts"), "");
  $("model-view-links").replaceChildren();
}

export async function show(requested) {
  try {
    const models = await withKey(api.listModels);
    const ready = models.filter((model) => model.ready).map((model) => model.name);
    const name = requested || shownModel || (await chooseFirst(ready));
    const listed = name && !ready.includes(name) ? [name, ...ready] : ready;
    $("model-choice").replaceChildren(...listed.map((each) => el("option", { value: each, text: each, selected: each === name })));
    $("model-choice-line").hidden = listed.length === 0;
    const unloaded = models.find((model) => model.name === name && !model.ready && !model.on_demand);
    $("model-unloaded").hidden = !unloaded;
    if (!name || unloaded) reset();
    if (unloaded) {
      showNotice($("model-view-notice"));
      $("model-unloaded").replaceChildren(renderUnloaded(unloaded, () => show(name)));
      return;
    }
    if (!name) {
      showNotice($("model-view-notice"), "No model is ready. An administrator can load one under Fleet.");
      return;
    }
    if (name !== shownModel) $("model-time").replaceChildren();
    if (name !== shownModel) $("model-graph").replaceChildren();
    shownModel = name;
    description = await withKey(() => api.describeModel(name));
    config = await api.getJson(`/v2/models/${encodeURIComponent(name)}/config`);
    showNotice($("model-view-notice"));
    $("model-body").hidden = false;
    drawFacts();
    await refresh();
  } catch (error) {
    showError(error);
  }
}

/** Prefer an ensemble, because it has a graph. */
async function chooseFirst(ready) {
  const descriptions = await Promise.all(ready.slice(0, 12).map((name) => api.describeModel(name).catch(() => null)));
  return descriptions.find((model) => model?.platform === "ensemble")?.name ?? ready[0] ?? "";
}

function showError(error) {
  $("model-body").hidden = !description;
  const retry = async () => (await promptForKey()) && show("");
  showErrorNotice($("model-view-notice"), error, retry);
}

function drawFacts() {
  const { name, platform, versions, max_batch_size: batch, decoupled, inputs, outputs } = description;
  setText($("model-view-heading"), name);
  setText($("model-view-facts"), [
    platform, `version ${versions.join(", ")}`, batch > 0 ? `max batch size ${batch}` : "no batches", decoupled ? "streams responses" : "",
  ].filter(Boolean).join(" · "));
  $("model-view-links").replaceChildren(
    el("a", { href: `#try/${encodeURIComponent(name)}`, text: "Try it" }),
    el("a", { href: `/docs?model=${encodeURIComponent(name)}`, text: "API of this model" }));
  const tensors = [...inputs.map((tensor) => [tensor, "input"]), ...outputs.map((tensor) => [tensor, "output"])];
  updateRows($("model-tensors").tBodies[0], tensors, ([tensor, side]) => `${side} ${tensor.name}`, ([tensor, side]) =>
    [tensor.name, side + (tensor.optional ? ", optional" : ""), formatShape(tensor)]);
}

const readStatistics = async (name) => summarize(await api.getJson(`/v2/models/${encodeURIComponent(name)}/stats`));

export async function refresh() {
  if (!description) return;
  const name = shownModel;
  try {
    const [own, gatewayMs] = await Promise.all([readStatistics(name), readGatewayTime(name)]);
    const steps = config.ensemble_scheduling?.step ?? [];
    const parts = new Map(await Promise.all([...new Set(steps.map((step) => step.model_name))].map(async (model) =>
      [model, await readStatistics(model).catch(() => null)])));
    if (name !== shownModel) return;
    showNotice($("model-view-notice"));
    drawTime(own, gatewayMs, steps.length > 0);
    $("model-graph").replaceChildren(...(steps.length ? [renderGraph(steps, parts)] : []));
  } catch (error) {
    if (name === shownModel) showError(error);
  }
}

/** Return the mean time in the gateway in ms; null without requests, undefined without the right to see metrics. */
async function readGatewayTime(name) {
  let page;
  try {
    page = await (await api.call("/metrics", { headers: { Accept: "text/plain" } })).text();
  } catch (error) {
    if (error.needsKey) return undefined;
    throw error;
  }
  const samples = parseSamples(page, [DURATION_SUM, DURATION_COUNT, UPSTREAM]);
  const ofModel = (labels) => (labels.model === name && /(infer|:predict|generate|generate_stream)$|^\/predictions\//.test(labels.route) ? "" : null);
  const [sum, count, upstream] = [DURATION_SUM, DURATION_COUNT, UPSTREAM].map((metric) => sumBy(samples.get(metric), ofModel).get("") ?? 0);
  return count ? Math.max(sum - upstream, 0) * 1000 / count : null;
}

function drawTime({ count, totalMs, phases }, gatewayMs, isEnsemble) {
  if (!count) {
    $("model-time").replaceChildren(el("p", { class: "quiet", text: "No request yet. Send one under Try it, and see here where its time goes." }));
    return;
  }
  const rest = { gateway: gatewayMs, ...phases };
  const rows = PHASES.filter(([phase]) => phase === "gateway" || !isEnsemble).map(([phase, kind, label]) => [kind, label, rest[phase]]);
  if (isEnsemble) rows.push(["compute", "in Triton, all steps", totalMs]);
  const sum = rows.reduce((total, [, , ms]) => total + (ms ?? 0), 0) || 1;
  const bar = el("div", { class: "phases", "aria-hidden": "true" }, ...rows.map(([kind, , ms]) => {
    const part = el("span", { class: kind });
    part.style.width = `${((ms ?? 0) / sum) * 100}%`;
    return part;
  }));
  const lines = rows.map(([kind, label, ms]) => [
    el("dt", {}, el("span", { class: `dot ${kind}` }), label),
    el("dd", { "data-phase": kind, text: ms === undefined ? "requires a key with the role metrics" : formatMs(ms) }),
  ]).flat();
  $("model-time").replaceChildren(bar, el("dl", {}, ...lines),
    el("p", { class: "quiet", text: `Means of ${count} requests since the model was loaded, on the replica that answered; the gateway's since it started.` }));
}
