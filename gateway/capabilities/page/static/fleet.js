// The fleet view: replicas and models with their states, loading and unloading.

import * as api from "./api.js";
import { $, confirmAction, el, removeToasts, setText, showNotice, showToast, updateChildren, updateRows } from "./dom.js";
import * as events from "./events.js";
import * as models from "./models.js";
import * as upload from "./upload.js";
import { describeLabels } from "./versions.js";

// What a button says, what it says meanwhile, and what was done.
const MAINTENANCE = {
  cordon: ["Cordon", "Cordoning…", "gets no new requests."],
  drain: ["Drain", "Draining…", "is drained: it has no requests, and gets no new ones."],
  uncordon: ["Uncordon", "Uncordoning…", "gets requests again."],
};
const silences = new Map(); // replica → when it answered last
const maintained = new Map(); // replica → action in progress
const ACTIONS = { load: ["Load", "loading…"], unload: ["Unload", "unloading…"] };
const buttons = new Map(); // by model; kept between refreshes, so that the focus stays
const names = new Map(); // by model: the cell with its link and its report, for the same reason
const reports = new Map(); // model → {summary, replicas} of its last action, until the view is shown again
const busy = new Map(); // model → action in progress
const MAX_NAMED = 5; // models that could not be loaded
const FILTERS = { all: "All", failed: "Failed", ready: "Ready", asleep: "On demand", off: "Not loaded" };
let stateFilter = "all";
let shownModels = [];
let columns = null;
let canManage = false; // without this right, buttons that would be refused are not there

export function start() {
  $("filter").addEventListener("input", filter);
  $("state-filter").append(...Object.keys(FILTERS).map((state) => el("label", { hidden: state !== "all" },
    el("input", { type: "radio", name: "state-filter", value: state, checked: state === stateFilter, onchange: () => { stateFilter = state; filter(); } }),
    el("span"))));
  upload.start();
  events.start();
}

export function show() {
  reports.clear();
  return refresh(api.withKey);
}

/** Remove everything that was loaded with another key. */
export function reset() {
  $("models").tBodies[0].replaceChildren();
  for (const id of ["replicas", "tiles"]) $(id).replaceChildren();
  $("problems").hidden = true;
  buttons.clear();
  reports.clear();
  removeToasts();
  columns = null;
  shownModels = [];
  upload.reset();
  events.reset();
}

/** Without a replica that works, the models are unknown, but the replicas say why. `ask` may prompt for a key. */
export async function refresh(ask = (action) => action()) {
  const [listed] = await Promise.allSettled([ask(() => models.refresh())]);
  const [replicas] = await Promise.allSettled([api.listReplicas()]);
  const isRefused = Boolean(replicas.reason?.needsKey);
  const error = listed.reason ?? (isRefused ? null : replicas.reason);
  shownModels = listed.value ?? shownModels;
  await events.refresh(Boolean(replicas.value));
  if (replicas.value || !error) draw(shownModels, replicas.value ?? null);
  if (error) api.showErrorNotice($("fleet-notice"), error);
  else if (isRefused) api.showErrorNotice($("fleet-notice"), new api.ApiError(403, { error: "Viewing replicas requires an administrator's key." }));
  else showNotice($("fleet-notice"), shownModels.length ? "" : api.hasFeature("files") ? "The repository has no models yet. Drop a model file here, or choose one." : "The repository has no models yet.");
}

function draw(listed, replicas) {
  canManage = replicas !== null;
  $("replicas-part").hidden = !canManage;
  $("upload-open").hidden = !canManage || !api.hasFeature("files");
  if (!$("upload-open").hidden && !$("fleet").hidden) upload.allow(refresh);
  drawTiles(listed, replicas ?? []);
  drawProblems(listed, replicas ?? []);
  drawReplicas(replicas ?? []);
  // The states on the only replica are those of the versions.
  const addresses = replicas?.length > 1 ? replicas.map((replica) => replica.address) : [];
  updateColumns(addresses);
  const sorted = [...listed].sort((a, b) => Number(isFailed(b)) - Number(isFailed(a)));
  updateRows($("models").tBodies[0], sorted, (model) => model.name, (model) => modelCells(model, addresses));
  labelCells();
  filter();
}

const isFailed = (model) => models.findState(model) === "failed";
const countOf = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;

function drawTiles(listed, replicas) {
  const working = replicas.filter(api.isWorking).length;
  const failed = listed.filter(isFailed).length;
  const tiles = [
    replicas.length ? ["Replicas", `${working} / ${replicas.length}`, working < replicas.length ? "warn" : ""] : null,
    ["Models ready", `${listed.filter((model) => model.ready).length} / ${listed.length}`, ""],
    replicas.length ? ["Requests in flight", String(replicas.reduce((sum, { outstanding }) => sum + outstanding, 0)), ""] : null,
    ["Failed models", String(failed), failed ? "bad" : ""],
  ].filter(Boolean);
  updateChildren($("tiles"), tiles, ([label]) => label, ([label, value, kind], tile) => {
    tile.className = "card tile";
    tile.replaceChildren(el("div", { class: "small", text: label }), el("div", { class: `tile-value ${kind}`, text: value }));
  });
}

/** Say what is wrong first, since when, and what happens to requests. */
function drawProblems(listed, replicas) {
  const working = replicas.filter(api.isWorking).length;
  const failed = listed.filter(isFailed);
  const problems = [
    ...replicas.filter((replica) => findSilence(replica) || replica.state !== "UP").map((replica) => renderReplicaProblem(replica, working)),
    ...failed.slice(0, MAX_NAMED).map(({ name }) => renderModelProblem(name)),
    failed.length > MAX_NAMED ? el("li", { text: `${failed.length - MAX_NAMED} more models could not be loaded.` }) : null,
  ].filter(Boolean);
  const list = $("problems").lastElementChild;
  $("problems").hidden = !problems.length;
  $("problems").classList.toggle("warn", replicas.length > 0 && working > 0 && !failed.length);
  // What has not changed is not drawn again, because screen readers read it aloud.
  if (list.textContent !== problems.map(({ textContent }) => textContent).join("")) list.replaceChildren(...problems);
}

const formatTime = (at) => at.toLocaleTimeString([], { hourCycle: "h23" });

/** Return since when a replica has not answered, which is computed once. */
function findSilence({ address, silent_for_s: silentS }) {
  if (silentS === undefined) silences.delete(address);
  else if (!silences.has(address)) silences.set(address, new Date(Date.now() - 1000 * silentS));
  return silences.has(address) ? ` since ${formatTime(silences.get(address))}` : "";
}

function renderReplicaProblem(replica, working) {
  const { address, state, reason = "" } = replica;
  const since = findSilence(replica);
  const words = { DOWN: ` is down${since}`, SLOW: ` has not answered probes${since}`, EJECTED: " gets no requests for a while, because they failed" }[state];
  const others = working ? `Requests go to the other ${working === 1 ? "replica" : `${working} replicas`}.` : "No replica answers requests.";
  return el("li", {}, el("strong", { text: address }), `${words}${state !== "SLOW" && reason ? `: ${reason}` : ""}. ${others}`);
}

function renderModelProblem(name) {
  const at = events.findFailureTime(name);
  return el("li", {}, el("a", { href: `#versions/${encodeURIComponent(name)}`, text: name }), ` could not be loaded${at ? ` at ${formatTime(at)}` : ""}.`);
}

const STATE_WORDS = { UP: "Up", SLOW: "Slow", EJECTED: "Ejected", DOWN: "Down" };
const STATE_KINDS = { UP: "", SLOW: "warn", EJECTED: "warn", DOWN: "bad" };

function drawReplicas(replicas) {
  updateChildren($("replicas"), replicas, ({ address }) => address, (replica, card) => {
    const { address, state, cordoned } = replica;
    const ready = Object.values(replica.models).filter((each) => each === "READY").length;
    const ejection = replica.ejected_for_s === undefined ? "" : ` for ${replica.ejected_for_s} s`;
    const facts = [["In flight", replica.outstanding], ["Ready models", ready]];
    if (!card.firstChild) {
      const makeButton = (action) => el("button", { type: "button", "data-action": action, text: MAINTENANCE[action][0],
        "aria-label": `${MAINTENANCE[action][0]} ${address}`, onclick: () => changeMaintenance(address, action) });
      card.className = "card replica";
      card.append(el("div"), el("div", { class: "probes", role: "img" }), el("dl"), el("p", { class: "small long" }),
        el("div", { class: "line" }, ...Object.keys(MAINTENANCE).map(makeButton)));
    }
    const [head, probes, list, reason, buttonLine] = card.children;
    head.replaceChildren(el("span", { class: `dot ${cordoned ? "off" : STATE_KINDS[state]}` }), el("strong", { text: address }),
      el("span", { class: `state ${STATE_KINDS[state] || "quiet"}`, text: (STATE_WORDS[state] ?? state) + ejection + (cordoned ? ", cordoned" : "") }));
    list.replaceChildren(...facts.map(([name, value]) => el("div", {}, el("dt", { class: "small", text: name }), el("dd", { text: String(value) }))));
    setText(reason, replicaReason(replica));
    drawProbes(probes, api.seenStates.get(address) ?? []);
    const inProgress = maintained.get(address);
    for (const button of buttonLine.children) {
      const { action } = button.dataset;
      button.hidden = action === (cordoned ? "cordon" : "uncordon") || (action === "drain" && state === "DOWN");
      button.disabled = Boolean(inProgress);
      setText(button, MAINTENANCE[action][inProgress === action ? 1 : 0]);
    }
  });
}

/** Draw the last states as bars, those of the present at the right. */
function drawProbes(element, states) {
  const failures = states.filter((state) => state !== "UP").length;
  element.setAttribute("aria-label", `Up at ${states.length - failures} of the last ${states.length} looks of this page`);
  element.title = element.getAttribute("aria-label");
  const unseen = Array.from({ length: api.MAX_SEEN_STATES - states.length }, () => "none");
  element.replaceChildren(...[...unseen, ...states.map((state) => STATE_KINDS[state])].map((kind) => el("span", { class: kind })));
}

/** Take a replica out of service, at once or when its requests have ended, or back. */
async function changeMaintenance(address, action) {
  maintained.set(address, action);
  const change = api.withKey(() => api.changeReplica(address, action));
  const shown = refresh();
  try {
    await change;
    showToast(`${address} ${MAINTENANCE[action][2]}`);
  } catch (error) {
    showToast(`${address}: ${api.errorMessage(error)}`, true);
  } finally {
    maintained.delete(address);
  }
  await shown;
  await refresh();
}

/** On a phone, each row is a card, and its cells have the names of their columns. */
function labelCells() {
  const names = [...$("models").tHead.rows[0].cells].map((cell) => cell.textContent);
  for (const row of $("models").tBodies[0].rows) {
    for (const cell of row.cells) if (cell.cellIndex < row.cells.length - 1) cell.dataset.label = names[cell.cellIndex];
  }
}

function replicaReason(replica) {
  const failing = replica.failing_models ? `fails requests of ${replica.failing_models.join(", ")}` : "";
  return [failing, replica.reason].filter(Boolean).join("; ");
}

function nameCell(model) {
  const { name, title = "" } = model;
  if (!names.has(name)) {
    const link = el("a", { href: `#model/${encodeURIComponent(name)}`, text: name });
    names.set(name, el("div", {}, link, el("div", { class: "small" }), el("div", { class: "report long bad" }),
      el("details", { class: "report long" }, el("summary"), el("div"))));
  }
  const [, heading, failure, details] = names.get(name).children;
  const { summary = "", replicas = "" } = reports.get(name) ?? {};
  setText(heading, title);
  setText(failure, api.toSentence(models.findFailure(model) ?? ""));
  details.hidden = !summary;
  setText(details.firstChild, summary);
  setText(details.lastChild, replicas);
  return names.get(name);
}

function updateColumns(addresses) {
  const shown = ["Model", "State", "Versions", ...(addresses.length ? ["Replicas"] : []), "Actions"];
  if (columns === shown.join("\n")) return;
  columns = shown.join("\n");
  $("models").tHead.rows[0].replaceChildren(...shown.map((name) => el("th", { scope: "col", text: name })));
  $("models").tBodies[0].replaceChildren();
}

function modelCells(model, addresses) {
  const missing = model.wished === "loaded" && !model.ready;
  const versions = model.versions.map(({ version }) => version).filter(Boolean).map((version) => `v${version}`).join(", ");
  return [
    nameCell(model),
    stateCell(model, addresses, missing),
    { text: describeLabels(model.labels) || versions, class: "long" },
    ...(addresses.length ? [replicaDots(model, addresses)] : []),
    actionButtons(model.name, model.ready, missing, model.on_demand),
  ];
}

/** Only exceptions are coloured. An on-demand model is loaded where it is requested. */
function stateCell(model, addresses, missing) {
  const count = addresses.filter((address) => model.replicas?.[address] === "READY").length;
  if (!model.on_demand && count > 0 && count < addresses.length) return { text: `Ready on ${count} of ${addresses.length}`, class: "state warn" };
  if (model.ready) return { text: "Ready", class: "state" };
  if (model.on_demand) return { text: "On demand", class: "state quiet" };
  if (model.versions.some(({ state }) => state === "LOADING")) return { text: "Loading", class: "state quiet" };
  if (isFailed(model)) return { text: missing ? "Failed, load pending" : "Failed", class: "state bad" };
  return { text: missing ? "Not loaded, load pending" : "Not loaded", class: "state quiet" };
}

function replicaDots(model, addresses) {
  const dots = addresses.map((address) => {
    const state = model.replicas?.[address] ?? "unknown";
    const kind = { READY: "", ON_DEMAND: "asleep", LOADING: "warn" }[state] ?? "off";
    return el("span", { class: `dot ${kind}`, title: `${address}: ${state.toLowerCase().replace("_", " ")}` });
  });
  return el("div", { class: "replica-dots" }, ...dots);
}

/** Unloading a missing model cancels the pending load. */
function actionButtons(model, ready, missing, onDemand) {
  if (!buttons.has(model)) {
    const makeButton = (action) =>
      el("button", {
        type: "button",
        class: "ghost",
        text: ACTIONS[action][0],
        "aria-label": `${ACTIONS[action][0]} ${model}`,
        onclick: () => (action === "unload" ? confirmUnload(model) : runAction(model, action)),
      });
    const status = el("span", { class: "small" });
    const trial = el("a", { href: `#try/${encodeURIComponent(model)}`, text: "Try", "aria-label": `Try ${model}` });
    buttons.set(model, el("div", { class: "buttons" }, status, trial, makeButton("load"), makeButton("unload")));
  }
  const [status, trial, load, unload] = buttons.get(model).children;
  const action = busy.get(model);
  load.hidden = unload.hidden = !canManage;
  load.disabled = Boolean(action);
  unload.disabled = Boolean(action) || !(ready || missing);
  trial.hidden = !(ready || onDemand);
  setText(load, ready ? "Reload" : "Load");
  load.setAttribute("aria-label", `${load.textContent} ${model}`);
  setText(status, action ? ACTIONS[action][1] : "");
  return buttons.get(model);
}

/** Show the models of the chosen state whose names contain the words, and how many are in each state. */
function filter() {
  const query = $("filter").value.trim().toLowerCase();
  const states = new Map(shownModels.map((model) => [model.name, models.findState(model)]));
  for (const { parentElement: label, value } of $("state-filter").querySelectorAll("input")) {
    const count = value === "all" ? states.size : [...states.values()].filter((state) => state === value).length;
    label.hidden = !count && value !== stateFilter;
    setText(label.lastChild, `${FILTERS[value]} ${count}`);
  }
  for (const row of $("models").tBodies[0].rows) {
    const { key } = row.dataset;
    row.hidden = !key.toLowerCase().includes(query) || (stateFilter !== "all" && states.get(key) !== stateFilter);
  }
}

/** Ask for confirmation, because unloading affects all users. */
async function confirmUnload(model) {
  const confirmed = await confirmAction({
    heading: `Unload ${model}?`,
    text: `${model} will be unloaded from every replica, and requests to it will be rejected.`,
    action: "Unload",
    option: "Also unload models that only this model needs",
  });
  if (confirmed) await runAction(model, "unload", confirmed.isChecked ? { unload_dependents: true } : {});
}

async function runAction(model, action, parameters = {}) {
  if (busy.has(model)) return;
  busy.set(model, action);
  reports.delete(model);
  await refresh();
  try {
    showReport(model, action, await api.withKey(() => api.changeModel(model, action, parameters)));
  } catch (error) {
    showReport(model, action, error.body ?? {}, api.errorMessage(error));
  } finally {
    busy.delete(model);
    await refresh();
  }
}

/** Show the result on each replica in the row of the model, which also has the reason of a failure, or else as a toast. */
function showReport(model, action, document, failure = "") {
  const participle = action === "load" ? "loaded" : "unloaded";
  const heading = failure ? `could not be ${participle}` : `is ${participle} on every replica`;
  const replicas = Object.entries(document.replicas ?? {}).map(([address, { state, reason }]) => `${address} ${state}${reason ? ` (${reason})` : ""}`);
  const summary = replicas.length ? countOf(replicas.length, "replica") : failure;
  reports.set(model, { summary, replicas: replicas.join("\n") });
  if (!failure) showToast(`${model} ${heading}.`);
  else if (!replicas.length) showToast(`${model} ${heading}: ${failure}`, true);
}
