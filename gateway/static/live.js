// Live numbers, from the metrics page, as far as the key may see it.

import * as api from "./api.js";
import { $, el, fill, notice, say } from "./dom.js";
import { ask } from "./key.js";
import { grown, quantile, samples, sums } from "./metrics.js";

const BUCKET = "gateway_request_duration_seconds_bucket";
const COUNT = "gateway_request_duration_seconds_count";
const ATTEMPTS = "gateway_upstream_attempts_total";
const OUTSTANDING = "gateway_upstream_outstanding";
const QUANTILES = [0.5, 0.9, 0.99];
const KEPT = 150; // points: five minutes
const ALL = "";
const FIRST_MS = 400;

let before = null; // the last page
let history = []; // of what was seen: {at, models}
let seen = []; // models that had traffic
let charts = [];

export function start() {
  $("live-model").addEventListener("change", draw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { drop(); draw(); });
  addEventListener("resize", () => { drop(); draw(); });
}

export function forget() {
  before = null;
  history = [];
  seen = [];
  $("live-model").replaceChildren(el("option", { value: ALL, text: "all" }));
  for (const id of ["by-model", "by-replica"]) $(id).tBodies[0].replaceChildren();
  drop();
}

/** Two looks in short order: a rate lies between them. */
export async function show() {
  before = null;
  draw();
  await refresh();
  setTimeout(refresh, FIRST_MS);
}

export async function refresh() {
  try {
    const page = await (await api.call("/metrics", { headers: { Accept: "text/plain" } })).text();
    take({ at: performance.now() / 1000, found: samples(page, [BUCKET, COUNT, ATTEMPTS, OUTSTANDING]) });
    notice($("live-notice"));
  } catch (error) {
    const again = async () => { if (await ask()) { forget(); await refresh(); } };
    notice($("live-notice"), api.reason(error), error.wantsKey ? "Use another key" : "", error.wantsKey ? again : null);
  }
}

const SEPARATOR = "\n";
const joined = (...parts) => parts.join(SEPARATOR);
/** Requests to models; what watches, this page among it, has none. */
const ofModel = (rest) => (labels) => (labels.model ? joined(labels.model, rest(labels)) : null);

function take(now) {
  if (before && now.at - before.at > 0.2) {
    const seconds = now.at - before.at;
    const models = byModel(now.found, before.found, seconds);
    history = [...history, { at: Date.now() / 1000, models }].slice(-KEPT);
    tables(models, byReplica(now.found, before.found, seconds));
    draw();
  }
  before = now;
}

/** Of each model, and of all: requests and errors per second, and quantiles in ms. */
function byModel(now, then, seconds) {
  const counts = [now, then].map((found) => sums(found.get(COUNT), ofModel(({ status }) => status)));
  const buckets = [now, then].map((found) => sums(found.get(BUCKET), ofModel(({ le }) => le)));
  const models = new Map();
  const of = (model) => models.get(model) ?? models.set(model, { requests: 0, errors: 0, buckets: new Map() }).get(model);
  for (const key of counts[0].keys()) {
    const [model, status] = key.split(SEPARATOR);
    const rate = grown(...counts, key) / seconds;
    for (const one of [of(model), of(ALL)]) {
      one.requests += rate;
      if (status !== "2xx") one.errors += rate;
    }
  }
  for (const key of buckets[0].keys()) {
    const [model, le] = key.split(SEPARATOR);
    const bound = le === "+Inf" ? Infinity : Number(le);
    for (const one of [of(model), of(ALL)]) one.buckets.set(bound, (one.buckets.get(bound) ?? 0) + grown(...buckets, key));
  }
  for (const one of models.values()) {
    one.quantiles = QUANTILES.map((q) => quantile(q, one.buckets)).map((value) => (value === null ? null : value * 1000));
  }
  return models;
}

function byReplica(now, then, seconds) {
  const counts = [now, then].map((found) => sums(found.get(ATTEMPTS), ({ replica, outcome }) => joined(replica, outcome)));
  const outstanding = sums(now.get(OUTSTANDING), ({ replica }) => replica);
  const replicas = new Map([...outstanding].map(([replica, count]) => [replica, { requests: 0, failed: 0, outstanding: count }]));
  for (const key of counts[0].keys()) {
    const [replica, outcome] = key.split(SEPARATOR);
    const one = replicas.get(replica);
    if (!one) continue; // it left
    const rate = grown(...counts, key) / seconds;
    one.requests += rate;
    if (outcome !== "answered") one.failed += rate;
  }
  return replicas;
}

const number = (value, digits = 1) => ({ text: value === null || value === undefined ? "–" : value.toFixed(digits), class: "number" });

function tables(models, replicas) {
  const named = [...models].filter(([model]) => model !== ALL).sort(([a], [b]) => a.localeCompare(b));
  fill($("by-model").tBodies[0], named, ([model]) => model, ([model, one]) =>
    [model, number(one.requests), number(one.errors), ...one.quantiles.map((value) => number(value))]);
  fill($("by-replica").tBodies[0], [...replicas], ([replica]) => replica, ([replica, one]) =>
    [replica, number(one.requests), number(one.failed), number(one.outstanding, 0)]);
  const fresh = named.map(([model]) => model).filter((model) => !seen.includes(model));
  seen = [...seen, ...fresh];
  $("live-model").append(...fresh.map((model) => el("option", { value: model, text: model })));
}

// The charts. Whoever does not see them has the tables.

function draw() {
  if ($("live").hidden || history.length === 0) return;
  const model = $("live-model").value;
  const points = history.map(({ models }) => models.get(model));
  const column = (of) => points.map((one) => (one ? of(one) : null));
  const at = history.map((point) => point.at);
  const data = [
    [at, column((one) => one.requests), column((one) => one.errors)],
    [at, ...QUANTILES.map((_, index) => column((one) => one.quantiles[index]))],
  ];
  if (charts.length === 0) charts = [chart("rate-chart", [["accent"], ["bad"]]), chart("latency-chart", [["accent"], ["accent", [6, 4]], ["text"]])];
  charts.forEach((one, index) => one.setData(data[index]));
  const last = points.at(-1);
  const [p50, , p99] = last?.quantiles ?? [];
  const ms = (value) => (value === null || value === undefined ? "–" : `${value.toFixed(1)} ms`);
  say($("live-now"), last ? `${last.requests.toFixed(1)} requests/s, ${last.errors.toFixed(1)} errors/s, p50 ${ms(p50)}, p99 ${ms(p99)}` : "no requests");
}

function drop() {
  for (const one of charts) one.destroy();
  charts = [];
}

function chart(id, lines) {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(`--${name}`).trim();
  const axis = { stroke: colour("quiet"), grid: { stroke: colour("line"), width: 1 }, ticks: { show: false }, font: "12px system-ui" };
  const times = (_, splits) => splits.map((at) => new Date(at * 1000).toLocaleTimeString([], { hourCycle: "h23" }));
  const line = ([name, dash]) => ({ stroke: colour(name), width: 2, dash, points: { show: false } });
  const options = {
    width: $(id).clientWidth,
    height: 180,
    legend: { show: false },
    cursor: { show: false },
    scales: { y: { range: (_, __, high) => [0, Math.max(high * 1.1, 1)] } },
    axes: [{ ...axis, space: 90, values: times }, { ...axis, size: 52 }],
    series: [{}, ...lines.map(line)],
  };
  return new uPlot(options, [[], ...lines.map(() => [])], $(id));
}
