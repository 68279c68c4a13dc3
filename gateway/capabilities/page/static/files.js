// The files of one model in the gateway's repository: download, upload of a version, and removal.

import * as api from "./api.js";
import { $, confirmAction, el, formatSize, showNotice, showToast } from "./dom.js";
import * as models from "./models.js";
import * as upload from "./upload.js";

const SHOWN_CHECKSUM = 12; // of 64 digits

export function start() {
  upload.start();
}

export function reset() {
  upload.reset();
  $("files-body").replaceChildren();
}

export async function show(requested) {
  try {
    const model = await models.open(requested, $("files-view-notice"));
    if (!model) return reset();
    const { name } = model;
    models.showHead(models.isUsable(model) ? await api.withKey(() => api.describeModel(name)) : model);
    upload.allow(() => show(name), name);
    draw(name, (await api.withKey(() => api.getJson(`${api.modelPath(name)}/files`))).files);
    showNotice($("files-view-notice"));
  } catch (error) {
    reset();
    api.showErrorNotice($("files-view-notice"), error);
  }
}

/** Group the files by the folders of versions; those of the whole model come first. */
function groupFiles(files) {
  const groups = new Map([["", []]]);
  for (const file of files.filter(({ path }) => !path.endsWith("/.gitkeep"))) {
    const [folder, ...rest] = file.path.split("/");
    const version = rest.length && /^\d+$/.test(folder) ? folder : "";
    groups.set(version, [...(groups.get(version) ?? []), file]);
  }
  return [...groups].filter(([, members]) => members.length).sort(([a], [b]) => (a === "" ? -1 : b === "" ? 1 : Number(b) - Number(a)));
}

const sumSizes = (files) => formatSize(files.reduce((sum, { bytes }) => sum + bytes, 0));
const countFiles = (files) => `${files.length} ${files.length === 1 ? "file" : "files"}, ${sumSizes(files)}`;

function draw(model, files) {
  $("files-body").replaceChildren(
    el("div", { class: "card-head" },
      el("p", { class: "quiet", text: `${countFiles(files)} in the gateway's repository` }),
      el("button", { type: "button", id: "version-upload", text: "Upload a version", onclick: () => upload.open(model) }),
      el("button", { type: "button", class: "ghost danger", text: "Delete the model", onclick: () => remove(model) })),
    ...groupFiles(files).map(([version, members]) => renderGroup(model, version, members)));
}

function renderGroup(model, version, files) {
  const heading = version ? `Version ${version}` : "For all versions";
  const rows = files.map(({ path, bytes, sha256 }) => el("tr", {},
    el("th", { scope: "row", class: "long", text: path }),
    el("td", { class: "number", text: formatSize(bytes) }),
    el("td", {}, el("code", { title: sha256, text: sha256.slice(0, SHOWN_CHECKSUM) })),
    el("td", { class: "actions" }, el("button", { type: "button", class: "ghost", text: "Download", "aria-label": `Download ${path}`, onclick: () => download(model, path) }))));
  return el("div", { class: "card panel", "data-version": version },
    el("div", { class: "card-head" }, el("h3", { text: heading }), el("span", { class: "small", text: countFiles(files) }),
      version ? el("button", { type: "button", class: "ghost danger", text: "Delete", "aria-label": `Delete version ${version}`, onclick: () => remove(model, version) }) : null),
    el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": heading },
      el("table", { class: "files" },
        el("thead", {}, el("tr", {}, el("th", { scope: "col", text: "File" }), el("th", { scope: "col", class: "number", text: "Size" }),
          el("th", { scope: "col", text: "SHA-256" }), el("th", { scope: "col", text: "Actions" }))),
        el("tbody", {}, ...rows))));
}

async function download(model, path) {
  try {
    const address = `${api.modelPath(model)}/files/${path.split("/").map(encodeURIComponent).join("/")}`;
    await api.download(address, path.split("/").at(-1));
  } catch (error) {
    showToast(`${path}: ${api.errorMessage(error)}`, true);
  }
}

/** Delete a version, or without one the model, after a confirmation. */
async function remove(model, version = "") {
  const what = version ? `version ${version} of ${model}` : model;
  const text = version
    ? `The files of ${what} are deleted from the repository, and the model is loaded again without them.`
    : `${model} is unloaded from every replica, and its files are deleted. This cannot be undone.`;
  if (!(await confirmAction({ heading: `Delete ${what}?`, text, action: "Delete" }))) return;
  try {
    await api.withKey(() => api.removeModel(model, version));
    showToast(`${what} is deleted.`);
  } catch (error) {
    showToast(`${what}: ${api.errorMessage(error)}`, true);
  }
  if (version) await show(model);
  else location.hash = "fleet";
}
