// The view of one model: where its time goes, its tensors, and the graph of an ensemble.

import * as api from "./api.js";
import { $, el, showNotice, updateRows } from "./dom.js";
import { showErrorNotice } from "./errors.js";
import { renderGraph } from "./graph.js";
import { formatShape } from "./inputs.js";
import { promptForKey, withKey } from "./key.js";
import * as models from "./models.js";
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

export function start() {}

export function reset() {
  shownModel = "";
  description = config = null;
  $("model-body").hidden = true;
}

export async function show(requested) {
  try {
    if (requested) models.choose(requested);
    const listed = await models.load();
    const name = requested || models.findChosen();
    if (name) models.choose(name);
    const unloaded = listed.find((model) => model.name === name && !models.isUsable(model));
    $("model-unloaded").hidden = !unloaded;
    if (!name || unloaded) reset();
    if (unloaded) {
      models.showHead(unloaded);
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
    drawTensors();
    await refresh();
  } catch (error) {
    showError(error);
  }
}

function showError(error) {
  $("model-body").hidden = !description;
  const retry = async () => (await promptForKey()) && show("");
  showErrorNotice($("model-view-notice"), error, retry);
}

function drawTensors() {
  const { inputs, outputs } = description;
  models.showHead(description);
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
    $("model-graph").hidden = !steps.length;
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
    el("p", { class: "small", text: `Means of ${count} requests since the model was loaded, on the replica that answered; the gateway's since it started.` }));
}
