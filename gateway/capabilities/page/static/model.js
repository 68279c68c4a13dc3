// The performance of one model: where its time goes, its tensors, and the graph of an ensemble.

import * as api from "./api.js";
import { $, el, showNotice, updateRows } from "./dom.js";
import { formatShape } from "./inputs.js";
import { parseSamples, sumBy } from "./metrics.js";
import * as models from "./models.js";

const DURATION_SUM = "gateway_request_duration_seconds_sum";
const DURATION_COUNT = "gateway_request_duration_seconds_count";
const PHASE_SUM = "gateway_request_phase_seconds_sum";
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
let maySeeMetrics = true; // until the key is refused them

export function start() {}

export function reset() {
  shownModel = "";
  maySeeMetrics = true;
  description = config = null;
  $("model-body").hidden = true;
}

export async function show(requested) {
  try {
    const model = await models.open(requested, $("model-view-notice"));
    const isUnloaded = Boolean(model) && !models.isUsable(model);
    $("model-unloaded").hidden = !isUnloaded;
    if (isUnloaded) {
      models.showHead(model);
      showNotice($("model-view-notice"));
      $("model-unloaded").replaceChildren(models.renderUnloaded(model, () => show(model.name)));
    }
    if (!model || isUnloaded) return reset();
    const { name } = model;
    if (name !== shownModel) for (const id of ["model-time", "model-graph"]) $(id).replaceChildren();
    shownModel = name;
    description = await api.withKey(() => api.describeModel(name));
    config = await readConfig(name);
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
  api.showErrorNotice($("model-view-notice"), error);
}

function drawTensors() {
  const { inputs, outputs } = description;
  models.showHead(description);
  const tensors = [...inputs.map((tensor) => [tensor, "input"]), ...outputs.map((tensor) => [tensor, "output"])];
  updateRows($("model-tensors").tBodies[0], tensors, ([tensor, side]) => `${side} ${tensor.name}`, ([tensor, side]) =>
    [tensor.name, side + (tensor.optional ? ", optional" : ""), formatShape(tensor)]);
}

const readConfig = (name) => api.getJson(`v2/models/${encodeURIComponent(name)}/config`);
const readStatistics = async (name) => summarize(await api.getJson(`v2/models/${encodeURIComponent(name)}/stats`));

/** Read the statistics of a model and of the steps of an ensemble, by model; null for a step that is unknown. */
async function readTimes(name, steps, withGateway = true) {
  const [own, gatewayMs] = await Promise.all([readStatistics(name), withGateway ? readGatewayTime(name) : undefined]);
  const parts = new Map(await Promise.all([...new Set(steps.map((step) => step.model_name))].map(async (model) =>
    [model, await readStatistics(model).catch(() => null)])));
  return { own, gatewayMs, parts };
}

const listSteps = (modelConfig) => modelConfig.ensemble_scheduling?.step ?? [];

export async function refresh() {
  if (!description) return;
  const name = shownModel;
  try {
    const steps = listSteps(config);
    const { own, gatewayMs, parts } = await readTimes(name, steps);
    if (name !== shownModel) return;
    showNotice($("model-view-notice"));
    drawTime(own, gatewayMs, steps.length > 0);
    $("model-graph").hidden = !steps.length;
    $("model-graph").replaceChildren(...(steps.length ? [renderGraph(steps, parts)] : []));
  } catch (error) {
    if (name === shownModel) showError(error);
  }
}

/** Render a bar with the shares of the time of a model's requests, by step or by phase; null if nothing was measured. */
export async function renderShares(name) {
  const steps = listSteps(await readConfig(name));
  // A key for inference may not see the time in the gateway, nor the replicas.
  const { own, gatewayMs, parts } = await readTimes(name, steps, Boolean(models.findModel(name)?.replicas));
  if (!own.count) return null;
  const phases = PHASES.filter(([phase]) => phase !== "gateway").map(([phase, kind, label]) => [kind, label, own.phases[phase]]);
  // Steps may have been loaded at different times: their shares are those of what the ensemble takes.
  const shares = shareTime(new Map([...parts].map(([model, stats]) => [model, stats?.totalMs ?? null])));
  const inTriton = steps.length ? [...shares].map(([model, share], index) => [`step-${index % 4}`, model, (share ?? 0) * own.totalMs]) : phases;
  const rows = [["gateway", "gateway", gatewayMs ?? 0], ...inTriton].filter(([, , ms]) => ms > 0);
  const sum = rows.reduce((total, [, , ms]) => total + ms, 0);
  return el("div", {}, renderBar(rows, sum), el("p", { class: "small shares" }, ...rows.map(([kind, label, ms]) =>
    el("span", {}, el("span", { class: `dot ${kind}` }), `${label} ${formatShare(ms / sum)}`))));
}

const formatShare = (share) => (share < 0.01 ? "< 1 %" : `${Math.round(share * 100)} %`);

const renderBar = (rows, sum) => el("div", { class: "phases", "aria-hidden": "true" }, ...rows.map(([kind, , ms]) => {
  const part = el("span", { class: kind });
  part.style.width = `${((ms ?? 0) / sum) * 100}%`;
  return part;
}));

/** Return the mean time in the gateway in ms; null without requests, undefined without the right to see metrics. */
async function readGatewayTime(name) {
  if (!maySeeMetrics) return undefined;
  let page;
  try {
    page = await (await api.call("metrics", { headers: { Accept: "text/plain" } })).text();
  } catch (error) {
    if (!error.needsKey) throw error;
    maySeeMetrics = false;
    return undefined;
  }
  const samples = parseSamples(page, [DURATION_SUM, DURATION_COUNT, PHASE_SUM]);
  const ofModel = (labels) => (labels.model === name && /(infer|:predict|generate|generate_stream)$|^\/predictions\//.test(labels.route) ? "" : null);
  const [sum, count] = [DURATION_SUM, DURATION_COUNT].map((metric) => sumBy(samples.get(metric), ofModel).get("") ?? 0);
  const upstream = sumBy(samples.get(PHASE_SUM), ({ model, phase }) => (model === name ? phase : null)).get("upstream") ?? 0;
  return count ? Math.max(sum - upstream, 0) * 1000 / count : null;
}

function drawTime({ count, totalMs, phases }, gatewayMs, isEnsemble) {
  if (!count) {
    $("model-time").replaceChildren(el("p", { class: "quiet", text: "No request yet. Send one under Try, and see here where its time goes." }));
    return;
  }
  const rest = { gateway: gatewayMs, ...phases };
  const rows = PHASES.filter(([phase]) => phase === "gateway" || !isEnsemble).map(([phase, kind, label]) => [kind, label, rest[phase]]);
  if (isEnsemble) rows.push(["compute", "in Triton, all steps", totalMs]);
  const sum = rows.reduce((total, [, , ms]) => total + (ms ?? 0), 0) || 1;
  const lines = rows.map(([kind, label, ms]) => [
    el("dt", {}, el("span", { class: `dot ${kind}` }), label),
    el("dd", { "data-phase": kind, text: ms === undefined ? "requires a key with the role metrics" : formatMs(ms) }),
  ]).flat();
  $("model-time").replaceChildren(renderBar(rows, sum), el("dl", {}, ...lines),
    el("p", { class: "small", text: `Means of ${count} requests since the model was loaded, on the replica that answered; the gateway's since it started.` }));
}

// The graph of an ensemble: its steps from left to right, each with its share of the time.

/** @param {Map<string, object>} statistics of each step's model, from `summarize`; null if unknown */
function renderGraph(steps, statistics) {
  const times = new Map([...statistics].map(([model, stats]) => [model, stats?.totalMs ?? null]));
  const shares = shareTime(times);
  const highest = Math.max(...[...shares.values()].map((share) => share ?? 0));
  const levels = arrangeSteps(steps).map((nodes) => el("li", {}, ...nodes.map((node) =>
    renderStep(node, shares.get(node.model), highest))));
  return el("div", {},
    el("h3", { text: "Steps" }),
    el("ol", { class: "graph", "aria-label": "Steps of the ensemble, from its inputs to its outputs" }, ...levels),
    el("p", { class: "small", text: "Shares of the mean times of all requests to these models since each was loaded. A step's own page has its times." }));
}

function renderStep({ model, reads, writes }, share, highest) {
  const isSlowest = share !== null && share > 0 && share === highest;
  const bar = el("span");
  bar.style.width = `${(share ?? 0) * 100}%`;
  const percent = share === null ? "not measured yet" : `${Math.round(share * 100)} % of the time`;
  return el("div", { class: isSlowest ? "step slowest" : "step", "data-step": model },
    el("h4", {}, el("a", { href: `#model/${encodeURIComponent(model)}`, text: model })),
    el("div", { text: isSlowest ? `${percent}, the slowest` : percent }),
    el("span", { class: "share", "aria-hidden": "true" }, bar),
    el("div", { class: "small", text: `${reads.join(", ")} → ${writes.join(", ")}` }));
}

// Calculations with Triton's statistics and configs of models. Pure.

const TRITON_PHASES = ["queue", "compute_input", "compute_infer", "compute_output"];
const NS_PER_MS = 1e6;

/**
 * Sum the statistics of a model's versions: requests, and the mean of each phase in ms.
 * @param {object} document of `GET /v2/models/M/stats`
 */
function summarize(document) {
  const total = { count: 0, ns: 0, phases: Object.fromEntries(TRITON_PHASES.map((phase) => [phase, 0])) };
  for (const { inference_stats: stats } of document.model_stats ?? []) {
    total.count += Number(stats.success?.count ?? 0);
    total.ns += Number(stats.success?.ns ?? 0);
    for (const phase of TRITON_PHASES) total.phases[phase] += Number(stats[phase]?.ns ?? 0);
  }
  const mean = (ns) => (total.count ? ns / total.count / NS_PER_MS : null);
  return {
    count: total.count,
    totalMs: mean(total.ns),
    phases: Object.fromEntries(TRITON_PHASES.map((phase) => [phase, mean(total.phases[phase])])),
  };
}

/**
 * Arrange the steps of an ensemble in levels: each step is one level after the last one that it needs.
 * Returns `[[{model, reads, writes}]]`.
 */
export function arrangeSteps(steps) {
  const nodes = steps.map(({ model_name: model, input_map: inputs = {}, output_map: outputs = {} }) => ({
    model, reads: [...new Set(Object.values(inputs))], writes: [...new Set(Object.values(outputs))],
  }));
  const producers = new Map(nodes.flatMap((node) => node.writes.map((tensor) => [tensor, node])));
  const levels = new Map();
  const levelOf = (node, visited = new Set()) => {
    if (levels.has(node) || visited.has(node)) return levels.get(node) ?? 0;
    visited.add(node);
    const before = node.reads.map((tensor) => producers.get(tensor)).filter((each) => each && each !== node);
    const level = before.reduce((highest, each) => Math.max(highest, levelOf(each, visited) + 1), 0);
    levels.set(node, level);
    return level;
  };
  const arranged = [];
  for (const node of nodes) (arranged[levelOf(node)] ??= []).push(node);
  return arranged.filter(Boolean);
}

/** Return each step's share of the time of all steps, by model; null while nothing was measured. */
function shareTime(timesMs) {
  const sum = [...timesMs.values()].reduce((total, time) => total + (time ?? 0), 0);
  return new Map([...timesMs].map(([model, time]) => [model, sum && time !== null ? time / sum : null]));
}

/** Format milliseconds with the digits that a mean of many requests has. */
const formatMs = (ms) =>
  ms === null || ms === undefined || Number.isNaN(ms) ? "–" : ms >= 100 ? `${ms.toFixed(0)} ms` : ms >= 1 ? `${ms.toFixed(1)} ms` : `${(ms * 1000).toFixed(0)} µs`;
