// The live view: rates and latencies, calculated from /metrics.

import * as api from "./api.js";
import { Chart, formatTime } from "./chart.js";
import { $, el, renderEmpty, setText, showNotice, updateRows } from "./dom.js";
import { formatRange, increase, parseSamples, quantile, quantileRange, sumBy } from "./metrics.js";
import { describeVersion } from "./versions.js";

const BUCKET = "gateway_request_duration_seconds_bucket";
const COUNT = "gateway_request_duration_seconds_count";
const ATTEMPTS = "gateway_upstream_attempts_total";
const OUTSTANDING = "gateway_upstream_outstanding";
const QUEUE = ["gateway_queue_length", "gateway_queue_wait_seconds_count", "gateway_queue_wait_seconds_sum", "gateway_queue_refusals_total"];
const WAITED = "gateway_caller_queue_seconds_total";
const PRIORITIES = ["interactive", "normal", "background"];
const TOP_CALLERS = 3;
const QUANTILES = [0.5, 0.9, 0.99];
const RANGES = [["5 min", 300], ["15 min", 900], ["1 h", 3600]]; // in seconds
const KEPT_S = 3600;
const IDLE = { requests: 0, errors: 0, ranges: [], quantiles: QUANTILES.map(() => null) };
const ALL = "";
const FIRST_INTERVAL_MS = 400;
const LATENCY_SHARE = 0.95; // of the latencies that the axis has room for

let previous = null; // the last metrics: {at, samples}
let history = []; // {at, models}: since the view was first shown, also while another one is
let rangeS = RANGES[0][1];
let knownModels = []; // models with requests
let listedCount = 0; // of all models that this key may see
let charts = [];
let labelsOf = new Map(); // model → its version labels

export function start() {
  charts = [new Chart($("rate-chart"), ["bad", "accent"], showPoint), new Chart($("latency-chart"), ["accent", "accent dashed", "plain"], showPoint, LATENCY_SHARE)];
  $("live-model").addEventListener("change", draw);
  $("live-range").append(...RANGES.map(([text, seconds]) => el("label", {},
    el("input", { type: "radio", name: "live-range", value: seconds, checked: seconds === rangeS, onchange: () => { rangeS = seconds; draw(); } }), text)));
  $("live-empty").append(renderEmpty("No requests since this view was opened", "Send one, and see here how many there are, how long they take, and which replica answers them.",
    el("a", { class: "button", href: "#try", text: "Try a model" })));
}

export function reset() {
  previous = null;
  history = [];
  knownModels = [];
  $("live-model").replaceChildren(el("option", { value: ALL, text: "All models" }));
  for (const id of ["by-model", "by-priority", "by-version", "by-replica"]) $(id).tBodies[0].replaceChildren();
}

/** Fetch the metrics twice in quick succession at first, because rates need two pages. */
export async function show() {
  const isFirst = previous === null;
  draw();
  await refresh(api.withKey);
  if (isFirst) setTimeout(refresh, FIRST_INTERVAL_MS);
}

/** Continue the history while another view is shown. */
export async function record() {
  if (previous) await readMetrics().catch(() => {});
}

async function readMetrics() {
  const page = await (await api.call("metrics", { headers: { Accept: "text/plain" } })).text();
  addMetrics({ at: performance.now() / 1000, samples: parseSamples(page, [BUCKET, COUNT, ATTEMPTS, OUTSTANDING, WAITED, ...QUEUE]) });
}

/** `ask` may prompt for a key. */
export async function refresh(ask = (action) => action()) {
  try {
    labelsOf = await ask(readLabels);
    await readMetrics();
    showNotice($("live-notice"));
  } catch (error) {
    $("live-empty").hidden = true;
    api.showErrorNotice($("live-notice"), error);
  }
}

/** Return the version labels by model; none for a key that sees metrics only. */
async function readLabels() {
  const models = await api.listModels().catch((error) => {
    if (api.isLocked()) throw error;
    return [];
  });
  listedCount = models.length;
  return new Map(models.map((model) => [model.name, model.labels]));
}

const SEPARATOR = "\n";
const joinKey = (...parts) => parts.join(SEPARATOR);
/** Ignore requests without a model, such as those of this page. */
const modelName = (labels) => labels.model || null;
const VERSION_SEPARATOR = "\t";
const versionName = ({ model, version }) => (model && version ? model + VERSION_SEPARATOR + version : null);

function addMetrics(current) {
  if (previous && current.at - previous.at > 0.2) {
    const seconds = current.at - previous.at;
    const models = byModel(current.samples, previous.samples, seconds);
    const at = Date.now() / 1000;
    history = [...history.filter((point) => point.at > at - KEPT_S), { at, models: keepBusy(models) }];
    updateTables(models, byReplica(current.samples, previous.samples, seconds));
    updateQueue(current.samples, previous.samples, seconds);
    updateVersions(byModel(current.samples, previous.samples, seconds, versionName));
    draw();
  }
  previous = current;
}

/** Return what the charts need of the models that have requests; an hour of histograms would need much memory. */
const keepBusy = (models) => new Map([...models].filter(([name, { requests }]) => name === ALL || requests > 0)
  .map(([name, { requests, errors, ranges, quantiles }]) => [name, { requests, errors, ranges, quantiles }]));

/** Return the requests and errors per second and the quantiles in ms, for each name and for all. */
function byModel(current, last, seconds, nameOf = modelName) {
  const keyOf = (rest) => (labels) => (nameOf(labels) === null ? null : joinKey(nameOf(labels), rest(labels)));
  const counts = [current, last].map((samples) => sumBy(samples.get(COUNT), keyOf(({ status }) => status)));
  const buckets = [current, last].map((samples) => sumBy(samples.get(BUCKET), keyOf(({ le }) => le)));
  const models = new Map();
  const entry = (model) => models.get(model) ?? models.set(model, { requests: 0, errors: 0, buckets: new Map() }).get(model);
  for (const key of counts[0].keys()) {
    const [model, status] = key.split(SEPARATOR);
    const rate = increase(...counts, key) / seconds;
    for (const stats of [entry(model), entry(ALL)]) {
      stats.requests += rate;
      if (status !== "2xx") stats.errors += rate;
    }
  }
  for (const key of buckets[0].keys()) {
    const [model, le] = key.split(SEPARATOR);
    const bound = le === "+Inf" ? Infinity : Number(le);
    for (const stats of [entry(model), entry(ALL)]) {
      stats.buckets.set(bound, (stats.buckets.get(bound) ?? 0) + increase(...buckets, key));
    }
  }
  for (const stats of models.values()) {
    stats.ranges = QUANTILES.map((q) => quantileRange(q, stats.buckets));
    stats.quantiles = QUANTILES.map((q) => quantile(q, stats.buckets)).map((value) => (value === null ? null : value * 1000));
  }
  return models;
}

function byReplica(current, last, seconds) {
  const counts = [current, last].map((samples) => sumBy(samples.get(ATTEMPTS), ({ replica, outcome }) => joinKey(replica, outcome)));
  const outstanding = sumBy(current.get(OUTSTANDING), ({ replica }) => replica);
  const replicas = new Map([...outstanding].map(([replica, count]) => [replica, { requests: 0, failed: 0, outstanding: count }]));
  for (const key of counts[0].keys()) {
    const [replica, outcome] = key.split(SEPARATOR);
    const stats = replicas.get(replica);
    if (!stats) continue; // the replica was removed
    const rate = increase(...counts, key) / seconds;
    stats.requests += rate;
    if (outcome !== "answered") stats.failed += rate;
  }
  return replicas;
}

const rangeCell = (range) => ({ text: formatRange(range), class: "number" });
const numberCell = (value, digits = 1) => ({ text: value === null || value === undefined ? "–" : value.toFixed(digits), class: "number" });

function updateTables(models, replicas) {
  const named = [...models].filter(([model]) => model !== ALL).sort(([a], [b]) => a.localeCompare(b));
  const totals = new Map(); // of the rates, by which the rows are sorted: the last ones alone would make them jump
  for (const point of listPoints()) {
    for (const [name, { requests }] of point.models) totals.set(name, (totals.get(name) ?? 0) + requests);
  }
  const busy = named.filter(([name]) => totals.has(name)).sort(([a], [b]) => totals.get(b) - totals.get(a));
  const idleCount = Math.max(listedCount, named.length) - busy.length;
  setText($("idle-models"), idleCount ? `${idleCount} ${idleCount === 1 ? "model" : "models"} without requests in this time` : "");
  updateRows($("by-model").tBodies[0], busy, ([model]) => model, ([model, stats]) =>
    [model, numberCell(stats.requests), numberCell(stats.errors), ...stats.ranges.map(rangeCell)]);
  updateRows($("by-replica").tBodies[0], [...replicas], ([replica]) => replica, ([replica, stats]) =>
    [replica, numberCell(stats.requests), numberCell(stats.failed), numberCell(stats.outstanding, 0)]);
  const newModels = named.map(([model]) => model).filter((model) => !knownModels.includes(model));
  knownModels = [...knownModels, ...newModels];
  $("live-model").append(...newModels.map((model) => el("option", { value: model, text: model })));
}

/** Show how many requests wait by priority, how long those waited that were admitted, and whose they are. */
function updateQueue(current, last, seconds) {
  const read = (samples) => QUEUE.map((name) => sumBy(samples.get(name), ({ priority }) => priority));
  const [lengths, ...now] = read(current);
  const [, ...before] = read(last);
  const rows = PRIORITIES.map((priority) => [priority, lengths.get(priority) ?? 0, ...now.map((counts, index) => increase(counts, before[index], priority))]);
  $("queue").hidden = rows.every(([, ...numbers]) => numbers.every((number) => !number));
  updateRows($("by-priority").tBodies[0], rows, ([priority]) => priority, ([priority, length, count, waited, refused]) =>
    [priority, numberCell(length, 0), numberCell(count ? 1000 * waited / count : null, 0), numberCell(refused / seconds)]);
  const [waits, waitsBefore] = [current, last].map((samples) => sumBy(samples.get(WAITED), ({ caller }) => caller));
  const callers = [...waits.keys()].map((caller) => [caller, increase(waits, waitsBefore, caller) / seconds]).filter(([, mean]) => mean > 0)
    .sort(([, a], [, b]) => b - a).slice(0, TOP_CALLERS);
  setText($("waiting-callers"), callers.length ? `Most of ${callers.map(([caller, mean]) => `${caller} (${mean.toFixed(1)})`).join(", ")}` : "");
}

/** Show the versions with requests, and what labels give them. */
function updateVersions(versions) {
  const named = [...versions].filter(([name]) => name !== ALL).sort(([a], [b]) => a.localeCompare(b, undefined, { numeric: true }));
  $("versions").hidden = named.length === 0;
  updateRows($("by-version").tBodies[0], named, ([name]) => name, ([name, stats]) => {
    const [model, version] = name.split(VERSION_SEPARATOR);
    const labels = describeVersion(labelsOf.get(model), version).join(", ");
    return [model, version, labels, numberCell(stats.requests), numberCell(stats.errors), rangeCell(stats.ranges.at(-1))];
  });
}

// Charts. The tables show the same data to screen readers.

/** Return the points of the chosen range. */
const listPoints = () => history.filter(({ at }) => at > Date.now() / 1000 - rangeS);

function draw() {
  const shown = listPoints();
  if ($("live").hidden || shown.length === 0) return;
  const model = $("live-model").value;
  const points = shown.map(({ models }) => models.get(model) ?? IDLE);
  const column = (select) => points.map(select);
  const isEmpty = !history.some(({ models }) => models.get(ALL)?.requests);
  $("live-charts").hidden = $("by-model-part").hidden = isEmpty;
  $("live-empty").hidden = !isEmpty;
  $("live-range").hidden = $("live-model").hidden = isEmpty;
  if (isEmpty) return;
  const times = shown.map((point) => point.at);
  const hasErrors = points.some(({ errors }) => errors > 0);
  $("errors-legend").hidden = !hasErrors;
  const data = [
    // Errors are drawn first, below the requests, and only if there were any: their line would hide the other at 0.
    [times, [hasErrors ? column((stats) => stats.errors) : [], column((stats) => stats.requests)]],
    [times, QUANTILES.map((_, index) => column((stats) => stats.quantiles[index]))],
  ];
  charts.forEach((chart, index) => chart.setData(...data[index]));
  showPoint(null);
}

/** Say the values at the point under the mouse, or else the last ones. */
function showPoint(index) {
  for (const chart of charts) chart.mark(index);
  const shown = listPoints();
  const point = shown[index ?? shown.length - 1];
  const stats = point && (point.models.get($("live-model").value) ?? IDLE);
  const [p50, , p99] = stats?.ranges ?? [];
  const ms = (range) => (range ? `${formatRange(range)} ms` : "–");
  const time = index === null ? "" : `${formatTime(point.at)}: `;
  setText($("live-now"), stats ? `${time}${stats.requests.toFixed(1)} requests/s, ${stats.errors.toFixed(1)} errors/s, p50 ${ms(p50)}, p99 ${ms(p99)}` : "");
}
