// The fleet view: replicas and models with their states, loading and unloading.

import * as api from "./api.js";
import { $, el, setText, showNotice, updateChildren, updateRows } from "./dom.js";
import * as events from "./events.js";
import { errorMessage, showErrorNotice, toSentence } from "./errors.js";
import { isWorking } from "./health.js";
import { promptForKey, withKey } from "./key.js";
import { describeLabels } from "./labels.js";
import { findFailure } from "./models.js";
import { removeToasts, showToast } from "./toast.js";
import * as upload from "./upload.js";

const ACTIONS = { load: ["Load", "loading…"], unload: ["Unload", "unloading…"] };
const buttons = new Map(); // by model; kept between refreshes, so that the focus stays
const names = new Map(); // by model: the cell with its link and its report, for the same reason
const reports = new Map(); // model → {text, isFailure} of its last action, until the view is shown again
const busy = new Map(); // model → action in progress
let shownModels = [];
let columns = null;
let canManage = false; // without this right, buttons that would be refused are not there

export function start() {
  $("filter").addEventListener("input", filter);
  $("unload-cancel").addEventListener("click", () => $("unload-dialog").close());
  upload.start(refresh);
  events.start();
}

export function show() {
  reports.clear();
  return refresh();
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

/** Without a replica that works, the models are unknown, but the replicas say why. */
export async function refresh() {
  const [models, replicas] = await Promise.allSettled([api.listModels(), api.listReplicas()]);
  const isRefused = Boolean(replicas.reason?.needsKey);
  const error = models.reason ?? (isRefused ? null : replicas.reason);
  shownModels = models.value ?? shownModels;
  upload.setExistingModels(shownModels.map(({ name }) => name));
  if (replicas.value || !error) draw(shownModels, replicas.value ?? null);
  await events.refresh(Boolean(replicas.value));
  if (error) showErrorNotice($("fleet-notice"), error, useAnotherKey);
  else if (isRefused) showNotice($("fleet-notice"), "Viewing replicas requires an administrator's key.", "Use another key", useAnotherKey);
  else showNotice($("fleet-notice"), shownModels.length ? "" : "The repository has no models yet. Drop a model file at the end of this page.");
}

async function useAnotherKey() {
  if (await promptForKey()) {
    reset();
    await refresh();
  }
}

function draw(models, replicas) {
  canManage = replicas !== null;
  $("upload-part").hidden = $("replicas-part").hidden = !canManage;
  drawTiles(models, replicas ?? []);
  drawProblems(models, replicas ?? []);
  drawReplicas(replicas ?? []);
  // The states on the only replica are those of the versions.
  const addresses = replicas?.length > 1 ? replicas.map((replica) => replica.address) : [];
  updateColumns(addresses);
  const sorted = [...models].sort((a, b) => Number(isFailed(b)) - Number(isFailed(a)));
  updateRows($("models").tBodies[0], sorted, (model) => model.name, (model) => modelCells(model, addresses));
  labelCells();
  setText($("models-count"), models.length ? `${models.filter((model) => model.ready).length} of ${models.length} ready` : "");
  filter();
}

/** A model that is intentionally not loaded is not a failure. */
const isFailed = (model) => !model.ready && Boolean(findFailure(model));
const countOf = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;

function drawTiles(models, replicas) {
  const working = replicas.filter(isWorking).length;
  const failed = models.filter(isFailed).length;
  const tiles = [
    replicas.length ? ["Replicas", `${working} / ${replicas.length}`, working < replicas.length ? "warn" : ""] : null,
    ["Models ready", `${models.filter((model) => model.ready).length} / ${models.length}`, ""],
    replicas.length ? ["Requests in flight", String(replicas.reduce((sum, { outstanding }) => sum + outstanding, 0)), ""] : null,
    ["Failed models", String(failed), failed ? "bad" : ""],
  ].filter(Boolean);
  updateChildren($("tiles"), tiles, ([label]) => label, ([label, value, kind], tile) => {
    tile.className = "card tile";
    tile.replaceChildren(el("div", { class: "small", text: label }), el("div", { class: `tile-value ${kind}`, text: value }));
  });
}

/** Say what is wrong first, in one place. */
function drawProblems(models, replicas) {
  const lost = replicas.filter(({ state }) => state === "DOWN");
  const others = replicas.length - lost.length;
  const failed = models.filter(isFailed).map(({ name }) => name);
  const sentences = [
    ...lost.map(({ address, reason }) => toSentence(`${address} is down${reason ? `: ${reason}` : ""}`)),
    lost.length ? `Requests go to ${others ? `the other ${countOf(others, "replica")}` : "no replica"}.` : "",
    failed.length ? `${countOf(failed.length, "model")} could not be loaded: ${failed.join(", ")}.` : "",
  ].filter(Boolean);
  $("problems").hidden = !sentences.length;
  setText($("problems").lastElementChild, sentences.join(" "));
}

const STATE_WORDS = { UP: "Up", SLOW: "Slow", EJECTED: "Ejected", DOWN: "Down" };
const STATE_KINDS = { UP: "", SLOW: "warn", EJECTED: "warn", DOWN: "bad" };

function drawReplicas(replicas) {
  updateChildren($("replicas"), replicas, ({ address }) => address, (replica, card) => {
    const { address, state, cordoned } = replica;
    const ready = Object.values(replica.models).filter((each) => each === "READY").length;
    const ejection = replica.ejected_for_s === undefined ? "" : ` for ${replica.ejected_for_s} s`;
    const facts = [["In flight", replica.outstanding], ["Latency", `${replica.slowness.toFixed(2)}×`], ["Ready models", ready]];
    const action = cordoned ? "uncordon" : "cordon";
    if (!card.firstChild) {
      const button = el("button", { type: "button", onclick: () => changeMaintenance(address, button.dataset.action) });
      card.className = "card replica";
      card.append(el("div"), el("dl"), el("p", { class: "small long" }), button);
    }
    const [head, list, reason, button] = card.children;
    head.replaceChildren(el("span", { class: `dot ${cordoned ? "off" : STATE_KINDS[state]}` }), el("strong", { text: address }),
      el("span", { class: `state ${STATE_KINDS[state] || "quiet"}`, text: (STATE_WORDS[state] ?? state) + ejection + (cordoned ? ", cordoned" : "") }));
    list.replaceChildren(...facts.map(([name, value]) => el("div", {}, el("dt", { class: "small", text: name }), el("dd", { text: String(value) }))));
    list.title = "Latency is relative to the other replicas.";
    setText(reason, replicaReason(replica));
    button.dataset.action = action;
    setText(button, cordoned ? "Uncordon" : "Cordon");
    button.setAttribute("aria-label", `${button.textContent} ${address}`);
  });
}

/** Take a replica out of service, or back. */
async function changeMaintenance(address, action) {
  try {
    await withKey(() => api.changeReplica(address, action));
    showToast(`${address} ${action === "cordon" ? "gets no new requests." : "gets requests again."}`);
  } catch (error) {
    showToast(`${address}: ${errorMessage(error)}`, true);
  }
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
    names.set(name, el("div", {}, link, el("div", { class: "small" }), el("div", { class: "report long bad" }), el("div")));
  }
  const [, heading, failure, line] = names.get(name).children;
  setText(heading, title);
  setText(failure, model.last_error ?? findFailure(model) ?? "");
  const { text = "", isFailure = false } = reports.get(name) ?? {};
  line.className = isFailure ? "report long bad" : "report long";
  line.hidden = !text;
  setText(line, text);
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

function filter() {
  const query = $("filter").value.trim().toLowerCase();
  for (const row of $("models").tBodies[0].rows) row.hidden = !row.dataset.key.toLowerCase().includes(query);
}

/** Ask for confirmation, because unloading affects all users. */
function confirmUnload(model) {
  setText($("unload-text"), `${model} will be unloaded from every replica, and requests to it will be rejected.`);
  $("unload-dependents").checked = false;
  $("unload-form").onsubmit = (event) => {
    event.preventDefault();
    $("unload-dialog").close();
    runAction(model, "unload", $("unload-dependents").checked ? { unload_dependents: true } : {});
  };
  $("unload-dialog").showModal();
}

async function runAction(model, action, parameters = {}) {
  if (busy.has(model)) return;
  busy.set(model, action);
  reports.delete(model);
  await refresh();
  try {
    showReport(model, action, await withKey(() => api.changeModel(model, action, parameters)));
  } catch (error) {
    showReport(model, action, error.body ?? {}, errorMessage(error));
  } finally {
    busy.delete(model);
    await refresh();
  }
}

/** Show the result on each replica in the row of the model, and as a toast. Failures can have a report, too. */
function showReport(model, action, document, failure = "") {
  const participle = action === "load" ? "loaded" : "unloaded";
  const heading = failure ? `could not be ${participle} on every replica` : `is ${participle} on every replica`;
  const replicas = Object.entries(document.replicas ?? {}).map(([address, { state, reason }]) => `${address} ${state}${reason ? ` (${reason})` : ""}`);
  const text = [`${heading}:`, failure, replicas.join(", ")].filter(Boolean).join(" ");
  reports.set(model, { text: `${text[0].toUpperCase()}${text.slice(1)}`, isFailure: Boolean(failure) });
  showToast(failure ? `${model} ${heading}: ${failure}` : `${model} ${heading}.`, Boolean(failure));
}
