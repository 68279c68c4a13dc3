// The versions of one model: their states, and the labels that decide which one answers.

import * as api from "./api.js";
import { $, confirmAction, el, showNotice, showToast } from "./dom.js";
import * as models from "./models.js";

let shownModel = "";
let drawn = ""; // what is shown, so that a refresh does not disturb what the user enters

export function start() {}

export function reset() {
  shownModel = drawn = "";
  $("versions-body").replaceChildren();
}

export async function show(requested) {
  try {
    const model = await models.open(requested, $("versions-view-notice"));
    if (!model) return reset();
    models.showHead(models.isUsable(model) ? await api.withKey(() => api.describeModel(model.name)) : model);
    showNotice($("versions-view-notice"));
    shownModel = model.name;
    drawn = "";
    draw(model);
  } catch (error) {
    reset();
    api.showErrorNotice($("versions-view-notice"), error);
  }
}

export async function refresh() {
  await models.refresh().catch(() => {});
  const model = models.findModel(shownModel);
  if (model) draw(model);
}

const STATES = { READY: "Ready", LOADING: "Loading", UNLOADING: "Unloading", UNAVAILABLE: "Not loaded", ON_DEMAND: "On demand" };

function draw(model) {
  const state = JSON.stringify([model.versions, model.labels]);
  if (state === drawn) return;
  drawn = state;
  const canManage = Boolean(model.replicas); // the states on the replicas are listed for keys that may load models
  const versions = model.versions.filter(({ version }) => version).sort((a, b) => Number(b.version) - Number(a.version));
  const parts = [renderVersions(model, versions)];
  if (api.hasFeature("labels")) parts.push(renderLabels(model, versions, canManage));
  $("versions-body").replaceChildren(...parts);
}

function renderVersions({ name, labels }, versions) {
  const withLabels = api.hasFeature("labels");
  const rows = versions.map(({ version, state, reason }) => {
    const isReady = state === "READY";
    const failure = reason && reason !== "unloaded" ? el("div", { class: "report long bad", text: api.toSentence(reason) }) : null;
    return el("tr", {},
      el("th", { scope: "row", text: `v${version}` }),
      el("td", {}, el("span", { class: failure ? "state bad" : isReady ? "state" : "state quiet", text: STATES[state] ?? state }), failure),
      withLabels ? el("td", { class: "chips" }, ...describeVersion(labels, version).map((text) => el("span", { class: "pill", text }))) : null,
      el("td", { class: "actions" }, isReady ? el("a", { href: `#try/${encodeURIComponent(name)}?version=${version}`, text: "Try", "aria-label": `Try version ${version}` }) : null));
  });
  const columns = ["Version", "State", ...(withLabels ? ["Labels"] : []), "Actions"];
  return el("div", { class: "card" }, el("h3", { text: "Versions" }),
    versions.length
      ? el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Versions" },
        el("table", { id: "version-list" }, el("thead", {}, el("tr", {}, ...columns.map((text) => el("th", { scope: "col", text })))), el("tbody", {}, ...rows)))
      : el("p", { class: "quiet", text: "No version is loaded. Triton lists the versions of a model when it loads it." }));
}

function renderLabels(model, versions, canManage) {
  const { name, labels = {} } = model;
  const ready = versions.filter(({ state }) => state === "READY").map(({ version }) => version);
  const rows = Object.entries(labels).map(([label, value]) => el("tr", { "data-label-name": label },
    el("th", { scope: "row", text: label }),
    el("td", { class: "long", text: describeLabel(value) + (value.declared ? " (in the models file)" : "") }),
    el("td", { class: "actions" },
      canManage && !value.declared ? el("button", { type: "button", class: "ghost", text: "Delete", "aria-label": `Delete label ${label}`, onclick: () => deleteLabel(name, label) }) : null)));
  return el("div", { class: "card panel" },
    el("h3", { text: "Labels" }),
    el("p", { class: "quiet", text: "A label is a name for a version. Requests to it follow when it is changed, and can be split between versions." }),
    rows.length ? el("table", { id: "label-list" }, el("thead", {}, el("tr", {}, ...["Label", "Versions", "Actions"].map((text) => el("th", { scope: "col", text })))), el("tbody", {}, ...rows)) : null,
    canManage && ready.length ? renderLabelForm(name, ready) : null);
}

/** Render a form that sets a label: its name, and the share of each ready version. */
function renderLabelForm(model, ready) {
  const name = el("input", { type: "text", id: "label-name", maxlength: "64", placeholder: "stable", autocomplete: "off", spellcheck: "false" });
  const shares = ready.map((version, index) =>
    [version, el("input", { type: "number", id: `share-${version}`, min: "0", max: "1000", step: "1", value: index ? "0" : "100" })]);
  const result = el("p", { class: "bad", role: "alert" });
  const onsubmit = async (event) => {
    event.preventDefault();
    const given = shares.map(([version, input]) => [version, Number(input.value)]).filter(([, share]) => share > 0);
    if (!name.value.trim() || !given.length) {
      result.textContent = name.value.trim() ? "Give at least one version a share." : "Enter a name for the label.";
      return;
    }
    const body = given.length === 1 ? { version: given[0][0] } : { versions: Object.fromEntries(given) };
    result.textContent = "";
    try {
      await api.withKey(() => api.setLabel(model, name.value.trim(), body));
      showToast(`${name.value.trim()} of ${model} is set.`);
      await refresh();
    } catch (error) {
      result.textContent = api.errorMessage(error);
    }
  };
  return el("form", { id: "label-form", "aria-label": "Set a label", onsubmit },
    el("div", {}, el("label", { for: name.id, text: "Label" }), name),
    ...shares.map(([version, input]) => el("div", {}, el("label", { for: input.id, text: `Share of v${version}` }), input)),
    el("button", { class: "main", text: "Set label" }),
    result);
}

async function deleteLabel(model, label) {
  const text = `Requests to the label ${label} of ${model} will be refused.`;
  if (!(await confirmAction({ heading: `Delete the label ${label}?`, text, action: "Delete" }))) return;
  try {
    await api.withKey(() => api.deleteLabel(model, label));
    showToast(`The label ${label} of ${model} is deleted.`);
  } catch (error) {
    showToast(`${label}: ${api.errorMessage(error)}`, true);
  }
  await refresh();
}

// Texts for labels.

/** Return the versions of a label with their shares in percent: a map from each version to a number. */
function findShares(label) {
  const versions = Object.entries(label.versions ?? { [label.version]: 1 });
  const total = versions.reduce((sum, [, share]) => sum + share, 0);
  return new Map(versions.map(([version, share]) => [version, (100 * share) / total]));
}

const percent = (share) => `${Number(share.toPrecision(4))} %`;

/** Describe what a label means: `1 (90 %), 2 (10 %), shadow 3`. */
function describeLabel(label) {
  const versions = [...findShares(label)].map(([version, share]) => (share < 100 ? `${version} (${percent(share)})` : version));
  return `${versions.join(", ")}${label.shadow ? `, shadow ${label.shadow.version}` : ""}`;
}

/** Describe the labels of a model: `canary 1 (90 %), 2 (10 %); stable 1, shadow 2`. */
export const describeLabels = (labels) =>
  Object.entries(labels ?? {}).map(([name, label]) => `${name} ${describeLabel(label)}`).join("; ");

/** Describe the labels that mean a version: `["canary 10 %", "stable"]`. */
export function describeVersion(labels, version) {
  return Object.entries(labels ?? {}).flatMap(([name, label]) => {
    const share = findShares(label).get(version);
    if (share !== undefined) return [share < 100 ? `${name} ${percent(share)}` : name];
    return label.shadow?.version === version ? [`shadow of ${name}`] : [];
  });
}
