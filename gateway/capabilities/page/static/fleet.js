// The fleet view: replicas and models with their states, loading and unloading.

import * as api from "./api.js";
import { $, el, setText, showNotice, updateRows } from "./dom.js";
import { errorMessage, showErrorNotice } from "./errors.js";
import { promptForKey, withKey } from "./key.js";
import { describeLabels } from "./labels.js";
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
}

export function show() {
  reports.clear();
  return refresh();
}

/** Remove everything that was loaded with another key. */
export function reset() {
  for (const table of ["models", "replicas"]) $(table).tBodies[0].replaceChildren();
  buttons.clear();
  reports.clear();
  removeToasts();
  columns = null;
  shownModels = [];
  upload.reset();
}

/** Without a replica that works, the models are unknown, but the replicas say why. */
export async function refresh() {
  const [models, replicas] = await Promise.allSettled([api.listModels(), api.listReplicas()]);
  const isRefused = Boolean(replicas.reason?.needsKey);
  const error = models.reason ?? (isRefused ? null : replicas.reason);
  shownModels = models.value ?? shownModels;
  upload.setExistingModels(shownModels.map(({ name }) => name));
  if (replicas.value || !error) draw(shownModels, replicas.value ?? null);
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
  updateRows($("replicas").tBodies[0], replicas ?? [], (replica) => replica.address, replicaCells);
  // The states on the only replica are those of the versions.
  const addresses = replicas?.length > 1 ? replicas.map((replica) => replica.address) : [];
  updateColumns(addresses);
  updateRows($("models").tBodies[0], models, (model) => model.name, (model) => modelCells(model, addresses));
  labelCells();
  setText($("models-count"), models.length ? `${models.filter((model) => model.ready).length} of ${models.length} ready` : "");
  filter();
}

/** On a phone, each row is a card, and its cells have the names of their columns. */
function labelCells() {
  const names = [...$("models").tHead.rows[0].cells].map((cell) => cell.textContent);
  for (const row of $("models").tBodies[0].rows) {
    for (const cell of row.cells) if (cell.cellIndex < row.cells.length - 1) cell.dataset.label = names[cell.cellIndex];
  }
}

function replicaCells(replica) {
  const ready = Object.values(replica.models).filter((state) => state === "READY").length;
  const ejection = replica.ejected_for_s === undefined ? "" : ` (for ${replica.ejected_for_s} s)`;
  return [
    replica.address,
    stateCell(replica.state, ejection),
    { text: String(replica.outstanding), class: "number" },
    { text: replica.slowness.toFixed(2), class: "number" },
    { text: String(ready), class: "number" },
    { text: replicaReason(replica), class: "long" },
  ];
}

function replicaReason(replica) {
  const failing = replica.failing_models ? `fails requests of ${replica.failing_models.join(", ")}` : "";
  return [failing, replica.reason].filter(Boolean).join("; ");
}

/** A model that is intentionally not loaded is not a failure. */
function replicaStateCell(model, address) {
  const name = model.replicas?.[address] ?? "–";
  if (name === "ON_DEMAND") return { text: "on demand", class: "state quiet" };
  const isIntended = name === "UNAVAILABLE" && !model.last_error && !model.declared && model.wished !== "loaded";
  return isIntended ? { text: "not loaded", class: "state quiet" } : stateCell(name);
}

function nameCell(name) {
  if (!names.has(name)) {
    const link = el("a", { href: `#model/${encodeURIComponent(name)}`, text: name });
    names.set(name, el("div", {}, link, el("div")));
  }
  const line = names.get(name).lastChild;
  const { text = "", isFailure = false } = reports.get(name) ?? {};
  line.className = isFailure ? "report long bad" : "report long";
  line.hidden = !text;
  setText(line, text);
  return names.get(name);
}

const GOOD = new Set(["READY", "UP"]);

function stateCell(name, more = "") {
  const kind = GOOD.has(name) ? "good" : /UNAVAILABLE|UNREACHABLE|DOWN|EJECTED/.test(name) ? "bad" : "quiet";
  return { text: name + more, class: `state ${kind}` };
}

function updateColumns(addresses) {
  const names = ["Model", "Versions", "Labels", ...addresses, "Last error", "Actions"];
  if (columns === names.join("\n")) return;
  columns = names.join("\n");
  $("models").tHead.rows[0].replaceChildren(...names.map((name) => el("th", { scope: "col", text: name })));
  $("models").tBodies[0].replaceChildren();
}

function modelCells(model, addresses) {
  const isUnloaded = ({ state, reason }) => state === "UNAVAILABLE" && (!reason || reason === "unloaded");
  const versions = model.versions.map((entry) => {
    const state = isUnloaded(entry) ? "not loaded" : entry.state === "ON_DEMAND" ? "on demand" : entry.state ?? "";
    return entry.version ? `${entry.version} ${state}` : state;
  });
  const missing = model.wished === "loaded" && !model.ready;
  const reasons = model.versions.map((version) => version.reason).filter((reason) => reason && reason !== "unloaded");
  const text = versions.join(", ") || (model.on_demand ? "on demand" : "not loaded");
  return [
    nameCell(model.name),
    describePartialState(model, addresses) ?? { text: text + (missing ? ", load pending" : ""), class: model.ready ? "state good" : "state quiet" },
    { text: describeLabels(model.labels), class: "long" },
    ...addresses.map((address) => replicaStateCell(model, address)),
    { text: model.last_error ?? reasons[0] ?? "", class: "long" },
    actionButtons(model.name, model.ready, missing, model.on_demand),
  ];
}

/** Return a cell for a model that some replicas lack; null for another. An on-demand model is loaded where it is requested. */
function describePartialState(model, addresses) {
  const count = addresses.filter((address) => model.replicas?.[address] === "READY").length;
  if (model.on_demand || count === 0 || count === addresses.length) return null;
  const versions = model.versions.map(({ version }) => version).filter(Boolean).join(", ");
  return { text: `${versions} ready on ${count} of ${addresses.length}`.trim(), class: "state warn" };
}

/** Unloading a missing model cancels the pending load. */
function actionButtons(model, ready, missing, onDemand) {
  if (!buttons.has(model)) {
    const makeButton = (action) =>
      el("button", {
        type: "button",
        text: ACTIONS[action][0],
        "aria-label": `${ACTIONS[action][0]} ${model}`,
        onclick: () => (action === "unload" ? confirmUnload(model) : runAction(model, action)),
      });
    const status = el("span", { class: "small" });
    const trial = el("a", { href: `#try/${encodeURIComponent(model)}`, text: "Try", "aria-label": `Try ${model}` });
    buttons.set(model, el("div", { class: "buttons" }, makeButton("load"), makeButton("unload"), trial, status));
  }
  const [load, unload, trial, status] = buttons.get(model).children;
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
