// The models: one list for all views, from which the sidebar chooses, and the heading of the chosen one.

import * as api from "./api.js";
import { $, el, renderCommand, setText, showNotice } from "./dom.js";

const GROUPS = [["failed", "Failed"], ["ready", "Ready"], ["asleep", "On demand"], ["off", "Not loaded"]];
const DOTS = { failed: "dot bad", ready: "dot", asleep: "dot asleep", off: "dot off" };
const SKELETON_AFTER_MS = 150;
const MAX_UNSPLIT_NAME = 24; // a longer name is shortened in the middle
const NAME_END = 8;
const MIN_LIKENESS = 0.3;
const MAX_SIMILAR = 3;
let listed = [];
let current = ""; // the name of the chosen model, in every view
let drawn = ""; // what the sidebar shows
let areStepsShown = false;
let active = -1; // the option that the keyboard would choose

export const getCurrent = () => current;
export const findModel = (name) => listed.find((model) => model.name === name);
export const isUsable = (model) => model.ready || Boolean(model.on_demand);
export const findFailure = (model) =>
  model.last_error ?? model.versions.map(({ reason }) => reason).find((reason) => reason && reason !== "unloaded");

/** Return `ready`, `asleep` (loaded by its next request), `failed` or `off`. */
export function findState(model) {
  if (model.ready) return "ready";
  if (model.on_demand) return "asleep";
  return findFailure(model) ? "failed" : "off";
}

/** Models that people choose: without hidden ones. Steps of pipelines are in a list of their own. */
export const listVisible = () => listed.filter((model) => !model.hidden);
export const findSteps = () => new Set(listed.flatMap((model) => model.steps ?? []));

export function start() {
  const search = $("model-search");
  search.addEventListener("input", () => { active = -1; draw(); });
  search.addEventListener("keydown", handleKey);
  search.addEventListener("blur", () => activate(-1));
  for (const id of ["model-list", "step-list"]) $(id).addEventListener("mousedown", (event) => event.preventDefault());
  $("steps-toggle").addEventListener("click", () => { areStepsShown = !areStepsShown; draw(); });
  $("model-button").addEventListener("click", () => (document.body.classList.contains("choosing") ? closeSheet() : focusSearch()));
  for (const id of ["veil", "sheet-close"]) $(id).addEventListener("click", closeSheet);
  $("sidebar").addEventListener("focusout", ({ relatedTarget }) => {
    if (relatedTarget && !$("sidebar").contains(relatedTarget)) closeSheet();
  });
  document.querySelector(".view-tabs [data-view=files]").hidden = !api.hasFeature("files");
  document.addEventListener("keydown", (event) => {
    const isTyping = event.target.matches("input, textarea, select");
    if (event.key !== "/" || isTyping || event.ctrlKey || document.querySelector("dialog[open]")) return;
    event.preventDefault();
    focusSearch();
  });
}

export function reset() {
  listed = [];
  current = "";
  drawn = "";
  $("model-list").replaceChildren();
  $("step-list").replaceChildren();
  showHead(null);
}

/** Read the list, for which the gateway first reads the titles of models that it does not know yet. */
export async function load() {
  const skeleton = setTimeout(() => { $("sidebar-skeleton").hidden = listed.length > 0; }, SKELETON_AFTER_MS);
  try {
    listed = await api.withKey(() => api.listModels(true));
  } finally {
    clearTimeout(skeleton);
    $("sidebar-skeleton").hidden = true;
  }
  draw();
  return listed;
}

/** Return the model to show first: a loaded one, best a pipeline, or else one that has a title. */
function findDefault() {
  const steps = findSteps();
  const ready = listVisible().filter((model) => model.ready && !steps.has(model.name));
  return (ready.find((model) => model.steps) ?? ready.find((model) => model.title) ?? ready[0])?.name ?? "";
}

/** Read the list again, without a prompt for a key. */
export async function refresh() {
  listed = await api.listModels();
  draw();
  return listed;
}

/** Return the model that was chosen in another view, or else the one to show first. */
export const findChosen = () => findModel(current)?.name ?? findDefault();

/**
 * Read the list, and make the requested model, or else the chosen one, that of all views. Returns it as it is listed;
 * without one, a notice says why, and null is returned.
 */
export async function open(requested, notice) {
  if (requested) choose(requested);
  await load();
  const name = requested || findChosen();
  const model = findModel(name);
  $("model-head").classList.toggle("missing", !model);
  if (name) choose(name);
  if (model) return model;
  const link = el("a", { class: "button", href: "#fleet", text: "Open Fleet" });
  if (!name) showNotice(notice, listVisible().length ? "No model is loaded now. Choose one: it loads on demand." : "No model is ready yet.", link);
  else showMissing(notice, name);
  return null;
}

/** Say that there is no model of this name, and which ones have a similar one. */
function showMissing(notice, name) {
  const view = location.hash.slice(1).split("/")[0] || "try";
  const similar = listVisible().map((model) => [model, compareNames(name, model.name)]).filter(([, likeness]) => likeness > MIN_LIKENESS)
    .sort(([, a], [, b]) => b - a).slice(0, MAX_SIMILAR);
  const links = similar.map(([model]) => el("a", { class: "button", href: `#${view}/${encodeURIComponent(model.name)}`, text: model.name }));
  if (links.length) showNotice(notice, `There is no model ${name}. Did you mean`, ...links);
  else showNotice(notice, `There is no model ${name}.`, el("a", { class: "button", href: `#${view}`, text: "Choose another" }));
}

/** Return the share of pairs of letters that two names have in common (Dice's coefficient). */
function compareNames(a, b) {
  const pairsOf = (name) => new Set([...name.toLowerCase()].slice(1).map((letter, index) => name[index].toLowerCase() + letter));
  const [first, second] = [pairsOf(a), pairsOf(b)];
  const common = [...first].filter((pair) => second.has(pair)).length;
  return (2 * common) / (first.size + second.size || 1);
}

/** Make this the model of all views. What the list knows of it is shown at once. */
export function choose(name) {
  if (name !== current) showHead({ name, ...findModel(name) });
  current = name;
  draw();
}

// The heading.

/** Show the title, description and facts of a model of the list, or as the API describes it; null for none. */
export function showHead(model) {
  const { name = "", title = "", description = "" } = model ?? {};
  setText($("model-title"), title || name || "Models");
  setText($("model-name"), title ? name : "");
  setText($("model-description"), description);
  setText($("model-button-text"), title || name || "Choose a model");
  $("model-button").firstChild.className = DOTS[findState(findModel(name) ?? { versions: [] })];
  const alert = document.title.startsWith("(!)") ? "(!) " : "";
  document.title = alert + (name ? `${title || name} · triton-gateway` : "triton-gateway");
  for (const link of document.querySelectorAll(".view-tabs a")) link.href = `#${link.dataset.view}${name && `/${encodeURIComponent(name)}`}`;
  showFacts(model?.inputs ? listFacts(model) : []);
}

export function showFacts(facts) {
  $("model-facts").replaceChildren(...facts.filter(Boolean).map((text) => el("span", { class: "pill", text })));
}

function listFacts({ versions, max_batch_size: batch, decoupled, ready, steps }) {
  return [
    steps ? `Pipeline of ${steps.length} ${steps.length === 1 ? "model" : "models"}` : "",
    versions.length > 1 ? `${versions.length} versions` : `v${versions[0] ?? ""}`,
    batch > 0 ? `Batches up to ${batch}` : "",
    decoupled ? "Streams" : "",
    ready ? "" : "The next request loads it",
  ];
}

// The list.

/** Search from anywhere: in the sidebar, or in a sheet where the screen has no room for it. */
function focusSearch() {
  if (!document.body.classList.contains("with-models")) location.hash = current ? `try/${encodeURIComponent(current)}` : "try";
  document.body.classList.add("choosing", "with-models");
  $("model-button").setAttribute("aria-expanded", "true");
  $("model-search").focus();
  $("model-search").select();
}

export function closeSheet() {
  if (!document.body.classList.contains("choosing")) return;
  document.body.classList.remove("choosing");
  $("model-button").setAttribute("aria-expanded", "false");
  $("model-button").focus();
}

function openFromList(name) {
  const [view] = location.hash.slice(1).split("/");
  $("model-search").value = "";
  closeSheet();
  location.hash = `${document.querySelector(`.view-tabs [data-view="${CSS.escape(view)}"]`) ? view : "try"}/${encodeURIComponent(name)}`;
  draw();
}

const listOptions = () => [...document.querySelectorAll("#model-list:not([hidden]) .option, #step-list:not([hidden]) .option")];

function activate(index) {
  const options = listOptions();
  options[active]?.classList.remove("active");
  active = index;
  const option = options[index];
  option?.classList.add("active");
  option?.scrollIntoView({ block: "nearest" });
  if (option) $("model-search").setAttribute("aria-activedescendant", option.id);
  else $("model-search").removeAttribute("aria-activedescendant");
}

function handleKey(event) {
  const options = listOptions();
  const chosen = options[active] ?? (event.target.value ? options[0] : null);
  if (event.key === "Escape" && event.target.value) {
    event.target.value = "";
    draw();
  } else if (event.key === "Escape") {
    event.target.blur();
    closeSheet();
  } else if (event.key === "Enter" && chosen) openFromList(chosen.dataset.value);
  else if (event.key === "ArrowDown" && options.length) activate((active + 1) % options.length);
  else if (event.key === "ArrowUp" && options.length) activate((active - 1 + options.length) % options.length);
  else return;
  event.preventDefault();
}

function draw() {
  const query = $("model-search").value.trim().toLowerCase();
  const isUnchanged = JSON.stringify([listed, current, query, areStepsShown]);
  if (drawn === isUnchanged) return;
  drawn = isUnchanged;
  const steps = findSteps();
  const visible = listVisible();
  const own = visible.filter((model) => !steps.has(model.name));
  const inner = visible.filter((model) => steps.has(model.name));
  const matches = query ? findMatches(visible, query) : [];
  const groups = query
    ? [["Matches", matches.filter((model) => !steps.has(model.name))], ["Steps of pipelines", matches.filter((model) => steps.has(model.name))]]
    : GROUPS.map(([state, label]) => [label, own.filter((model) => findState(model) === state)]);
  const isOpen = areStepsShown || steps.has(current);
  $("model-list").replaceChildren(...groups.filter(([, members]) => members.length).map(([label, members]) => renderGroup(label, members, query)));
  $("model-list").hidden = !$("model-list").childElementCount;
  $("step-list").replaceChildren(...(query ? [] : inner.map((model) => renderOption(model, ""))));
  $("step-list").hidden = !isOpen || Boolean(query) || !inner.length;
  $("steps-toggle").hidden = Boolean(query) || !inner.length;
  $("steps-toggle").setAttribute("aria-expanded", String(isOpen));
  setText($("steps-toggle").lastChild, `${inner.length} ${inner.length === 1 ? "step" : "steps"} of pipelines`);
  $("model-none").hidden = !query || matches.length > 0;
  if (query && !matches.length) {
    const clear = el("button", { type: "button", text: "Clear", onclick: () => { $("model-search").value = ""; draw(); $("model-search").focus(); } });
    $("model-none").replaceChildren(`Nothing matches “${$("model-search").value.trim()}”.`, clear);
  }
  activate(query && matches.length ? 0 : -1);
}

/** Return the models whose name or title contains the words; those that begin with them come first. */
export function findMatches(models, query) {
  const places = models.map((model) => {
    const found = [model.name, model.title ?? ""].map((text) => text.toLowerCase().indexOf(query)).filter((place) => place >= 0);
    return [model, found.length ? Math.min(...found) : -1];
  });
  return places.filter(([, place]) => place >= 0).sort(([, a], [, b]) => Math.sign(a) - Math.sign(b)).map(([model]) => model);
}

function renderGroup(label, members, query) {
  const id = `group-${label.replaceAll(" ", "-").toLowerCase()}`;
  return el("div", { role: "group", "aria-labelledby": id },
    el("div", { class: "group-name", id, role: "presentation", text: `${label} (${members.length})` }),
    ...members.map((model) => renderOption(model, query)));
}

function renderOption(model, query) {
  const newest = Math.max(0, ...model.versions.map(({ version }) => Number(version) || 0));
  const isLoading = model.versions.some(({ state }) => state === "LOADING");
  return el("div", {
    role: "option", class: "option", id: `option-${listed.indexOf(model)}`, "data-value": model.name, title: model.name,
    "aria-selected": String(model.name === current), onclick: () => openFromList(model.name),
  },
  el("span", { class: isLoading ? "spinner" : DOTS[findState(model)] }),
  el("span", {}, renderName(model.title || model.name, query), model.title ? renderName(model.name, query, "technical") : null),
  newest > 1 ? el("span", { class: "small", text: `v${newest}` }) : null);
}

/** Mark the words in a name, or shorten a long one in the middle, because names differ at their ends. */
function renderName(name, query, kind = "") {
  const at = query ? name.toLowerCase().indexOf(query) : -1;
  const end = at < 0 && name.length > MAX_UNSPLIT_NAME ? name.length - NAME_END : name.length;
  const first = at < 0 ? [name.slice(0, end)]
    : [name.slice(0, at), el("mark", { text: name.slice(at, at + query.length) }), name.slice(at + query.length)];
  return el("span", { class: `middle ${kind}` }, el("span", {}, ...first), end < name.length ? el("span", { text: name.slice(end) }) : null);
}

// What a view shows of a model that is not loaded, or if there is no model.

/** Render the model of `GET /v1/models` with its last error and a button. `onLoaded` is called when it is loaded. */
export function renderUnloaded(model, onLoaded) {
  const error = findFailure(model);
  const status = el("p", { role: "status" });
  const load = el("button", { type: "button", class: "main", text: "Load", "aria-label": `Load ${model.name}` });
  load.addEventListener("click", async () => {
    load.disabled = true;
    status.className = "quiet";
    setText(status, "Loading…");
    try {
      await api.withKey(() => api.changeModel(model.name, "load"));
      await onLoaded();
    } catch (failure) {
      load.disabled = false;
      status.className = "bad";
      setText(status, api.errorMessage(failure));
    }
  });
  // The states on the replicas are listed for keys that may load models.
  const remedy = model.replicas ? load : el("p", { text: "Ask an administrator of this gateway to load it, or choose another model." });
  return el("div", { class: "card unloaded" },
    el("p", {}, el("span", { class: error ? "pill bad" : "pill", text: error ? "Failed" : "Not loaded" })),
    error ? el("p", { class: "bad long", text: api.toSentence(error) }) : null,
    remedy, status);
}

const FIRST_COMMANDS = [
  ["Upload from a terminal", "triton-gateway push model.onnx"],
  ["Start the demonstration", "triton-gateway up"],
];
const REPAIR_COMMANDS = [
  ["Check the settings", "triton-gateway doctor"],
  ["Start a Triton here", "triton-gateway up"],
];

const renderCard = (heading, ...children) => el("div", { class: "card first-step" }, el("h3", { text: heading }), ...children);
const renderCommandCard = ([heading, command]) => renderCard(heading, renderCommand(command));

/** Render why no replica can serve anything, as far as this key may know, and what helps. */
export async function renderNoReplica() {
  const replicas = await api.listReplicas().catch(() => []);
  return el("div", { class: "first-steps" },
    ...replicas.map(({ address, reason = "" }) => renderCard(address,
      el("p", {}, el("span", { class: "pill bad", text: "Down" })), el("p", { class: "bad long", text: api.toSentence(reason) }))),
    ...REPAIR_COMMANDS.map(renderCommandCard));
}

/** Render the ways to the first model. */
export function renderFirstSteps() {
  const upload = renderCard("Upload a model", el("p", { class: "quiet", text: "ONNX, TensorRT, OpenVINO and PyTorch, or the folder of a model." }),
    el("a", { class: "button", href: "#fleet", text: "Choose a file" }));
  return el("div", { class: "first-steps" }, api.hasFeature("files") ? upload : null, ...FIRST_COMMANDS.map(renderCommandCard));
}
