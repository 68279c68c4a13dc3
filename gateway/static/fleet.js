// The fleet: every replica, every model, where it is ready and why not; loading and unloading.

import * as api from "./api.js";
import { $, el, fill, notice, say } from "./dom.js";
import { ask, withKey } from "./key.js";

const CHANGES = { load: ["Load", "loading…"], unload: ["Unload", "unloading…"] };
const buttons = new Map(); // by model: they stay, and with them the focus
const busy = new Map(); // model → what is being done to it
let columns = null;

export function start() {
  $("filter").addEventListener("input", filter);
  $("unload-cancel").addEventListener("click", () => $("unload-dialog").close());
}

export const show = () => refresh();

/** What another key may have seen goes. */
export function forget() {
  for (const table of ["models", "replicas"]) $(table).tBodies[0].replaceChildren();
  buttons.clear();
  columns = null;
  $("report").replaceChildren();
}

export async function refresh() {
  try {
    const models = await api.models();
    const replicas = await api.replicas().catch((error) => {
      if (error.wantsKey) return null;
      throw error;
    });
    draw(models, replicas);
    if (replicas) notice($("fleet-notice"));
    else notice($("fleet-notice"), "The replicas are for an administrator's key.", "Use another key", another);
  } catch (error) {
    notice($("fleet-notice"), api.reason(error), error.wantsKey ? "Use another key" : "", error.wantsKey ? another : null);
  }
}

async function another() {
  if (await ask()) {
    forget();
    await refresh();
  }
}

function draw(models, replicas) {
  fill($("replicas").tBodies[0], replicas ?? [], (replica) => replica.address, replicaCells);
  const addresses = (replicas ?? []).map((replica) => replica.address);
  head(addresses);
  fill($("models").tBodies[0], models, (model) => model.name, (model) => modelCells(model, addresses));
  filter();
}

function replicaCells(replica) {
  const ready = Object.values(replica.models).filter((state) => state === "READY").length;
  const away = replica.ejected_for_s === undefined ? "" : ` (for ${replica.ejected_for_s} s)`;
  return [
    replica.address,
    state(replica.state, away),
    { text: String(replica.outstanding), class: "number" },
    { text: replica.slowness.toFixed(2), class: "number" },
    { text: String(ready), class: "number" },
    { text: replica.reason ?? "", class: "long" },
  ];
}

const GOOD = new Set(["READY", "UP"]);

function state(name, more = "") {
  const kind = GOOD.has(name) ? "good" : /UNAVAILABLE|UNREACHABLE|DOWN|EJECTED/.test(name) ? "bad" : "quiet";
  return { text: name + more, class: `state ${kind}` };
}

function head(addresses) {
  const names = ["Model", "Versions", ...addresses, "Last error", "Change"];
  if (columns === names.join("\n")) return;
  columns = names.join("\n");
  $("models").tHead.rows[0].replaceChildren(...names.map((name) => el("th", { scope: "col", text: name })));
  $("models").tBodies[0].replaceChildren();
}

function modelCells(model, addresses) {
  const versions = model.versions.map(({ version, state: at }) => (version ? `${version} ${at ?? ""}` : at ?? ""));
  const missing = model.wished === "loaded" && !model.ready;
  const reasons = model.versions.map((version) => version.reason).filter((why) => why && why !== "unloaded");
  return [
    model.name,
    {
      text: (versions.join(", ") || "not loaded") + (missing ? ", to be loaded" : ""),
      class: model.ready ? "state good" : "state quiet",
    },
    ...addresses.map((address) => state(model.replicas?.[address] ?? "–")),
    { text: model.last_error ?? reasons[0] ?? "", class: "long" },
    changes(model.name, model.ready, missing),
  ];
}

/** A model that is missing can be unloaded as well: then it is no longer to be loaded. */
function changes(model, ready, missing) {
  if (!buttons.has(model)) {
    const make = (action) =>
      el("button", {
        type: "button",
        text: CHANGES[action][0],
        "aria-label": `${CHANGES[action][0]} ${model}`,
        onclick: () => (action === "unload" ? confirmed(model) : change(model, action)),
      });
    const doing = el("span", { class: "quiet" });
    const trial = el("a", { href: `#try/${encodeURIComponent(model)}`, text: "Try", "aria-label": `Try ${model}` });
    buttons.set(model, el("div", { class: "buttons" }, make("load"), make("unload"), trial, doing));
  }
  const [load, unload, trial, doing] = buttons.get(model).children;
  const action = busy.get(model);
  load.disabled = Boolean(action);
  unload.disabled = Boolean(action) || !(ready || missing);
  trial.hidden = !ready;
  say(load, ready ? "Reload" : "Load");
  load.setAttribute("aria-label", `${load.textContent} ${model}`);
  say(doing, action ? CHANGES[action][1] : "");
  return buttons.get(model);
}

function filter() {
  const wanted = $("filter").value.trim().toLowerCase();
  for (const row of $("models").tBodies[0].rows) row.hidden = !row.dataset.key.toLowerCase().includes(wanted);
}

/** An unload takes a model from everybody: it is asked for twice. */
function confirmed(model) {
  say($("unload-text"), `${model} will be unloaded from every replica, and its requests will be refused.`);
  $("unload-dependents").checked = false;
  $("unload-form").onsubmit = (event) => {
    event.preventDefault();
    $("unload-dialog").close();
    change(model, "unload", $("unload-dependents").checked ? { unload_dependents: true } : {});
  };
  $("unload-dialog").showModal();
}

async function change(model, action, parameters = {}) {
  if (busy.has(model)) return;
  busy.set(model, action);
  say($("report"), `${model}: ${CHANGES[action][1]}`);
  await refresh();
  try {
    report(model, action, await withKey(() => api.change(model, action, parameters)));
  } catch (error) {
    report(model, action, error.body ?? {}, api.reason(error));
  } finally {
    busy.delete(model);
    await refresh();
  }
}

/** What became of it on each replica; a failure has a report as well, when something was done. */
function report(model, action, document, failure = "") {
  const done = action === "load" ? "loaded" : "unloaded";
  const heading = failure ? `${model} was not ${done} everywhere` : `${model} is ${done} on every replica`;
  const rows = Object.entries(document.replicas ?? {}).map(([address, found]) =>
    el("tr", {},
      el("th", { scope: "row", text: address }),
      el("td", { class: state(found.state).class, text: found.state }),
      el("td", { class: "long", text: found.reason ?? "" })));
  const parts = [el("h3", { text: heading, class: failure ? "bad" : "" })];
  if (failure) parts.push(el("p", { text: failure }));
  if (rows.length) {
    const names = ["Replica", "State", "Reason"].map((name) => el("th", { scope: "col", text: name }));
    parts.push(el("div", { class: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, ...names)), el("tbody", {}, ...rows))));
  }
  $("report").replaceChildren(...parts);
}
