// Uploads of model files in the fleet view: a form, with a zone for a dropped file and a progress bar.

import * as api from "./api.js";
import { $, el, setText } from "./dom.js";
import { errorMessage } from "./errors.js";
import { withKey } from "./key.js";

const MIB = 1 << 20;
let file = null;
let request = null; // in progress
let onUploaded = () => {};
let existingModels = [];

export function start(whenUploaded) {
  onUploaded = whenUploaded;
  const zone = $("upload-form");
  zone.addEventListener("dragover", (event) => { event.preventDefault(); zone.classList.add("over"); });
  zone.addEventListener("dragleave", () => zone.classList.remove("over"));
  zone.addEventListener("drop", (event) => {
    event.preventDefault();
    zone.classList.remove("over");
    const dropped = event.dataTransfer.files;
    if (dropped.length > 1) showResult("Drop one file: a model, or a .zip or .tar.gz file of its folder.", true);
    else if (dropped.length) selectFile(dropped[0]);
  });
  $("upload-file").addEventListener("change", (event) => event.target.files.length && selectFile(event.target.files[0]));
  zone.addEventListener("submit", (event) => {
    event.preventDefault();
    upload();
  });
  $("upload-cancel").addEventListener("click", () => request?.abort());
  $("upload-name").addEventListener("input", announceExisting);
}

export function setExistingModels(names) {
  existingModels = names;
  announceExisting();
}

/** The next version of a model that exists takes over its requests. */
function announceExisting() {
  const name = $("upload-name").value.trim();
  const isExisting = existingModels.includes(name);
  $("upload-existing").hidden = !isExisting;
  if (!isExisting) $("upload-store-only").checked = false;
  setText($("upload-existing-text"), isExisting ? `${name} exists: this becomes its next version, and answers its requests as soon as it is loaded.` : "");
}

export function reset() {
  request?.abort();
  selectFile(null);
  showResult("");
}

/** Use a file that was chosen or dropped, and suggest its name for the model. */
function selectFile(selected) {
  if (request) return;
  file = selected;
  setText($("upload-selected"), file ? `${file.name}, ${formatSize(file.size)}` : "");
  $("upload-details").hidden = !file;
  if (!file) {
    $("upload-file").value = "";
    return;
  }
  $("upload-name").value = suggestName(file.name);
  announceExisting();
  showResult("");
  $("upload-name").focus();
}

export const suggestName = (name) =>
  name.replace(/\.(onnx|plan|engine|trt|xml|pt2?|zip|tar|tar\.gz|tgz)$/i, "")
    .replace(/^[^A-Za-z0-9_]/, "_").replace(/[^A-Za-z0-9_.+-]/g, "_").slice(0, 128);

export const formatSize = (size) => (size < MIB ? `${size} bytes` : `${(size / MIB).toFixed(1)} MiB`);

async function upload() {
  if (request) return;
  const model = $("upload-name").value.trim();
  if (!model) return showResult("Enter a name for the model.", true);
  setBusy(true);
  showResult("");
  try {
    const isLoaded = !$("upload-store-only").checked;
    const { version } = await withKey(() => send(model, isLoaded));
    setBusy(false);
    selectFile(null);
    showUploaded(model, version, isLoaded);
  } catch (error) {
    setBusy(false);
    showResult(error.name === "AbortError" ? "The upload was cancelled." : errorMessage(error), error.name !== "AbortError");
  }
  await onUploaded();
}

function send(model, isLoaded) {
  const sent = api.uploadModel(model, file, isLoaded, showProgress);
  request = sent.request;
  return sent.response.finally(() => (request = null));
}

function showProgress(fraction) {
  $("upload-progress").value = fraction;
  setText($("upload-state"), fraction < 1 ? `${Math.floor(fraction * 100)} %` : "checking and loading…");
}

function setBusy(isBusy) {
  $("upload-busy").hidden = !isBusy;
  $("upload-file").disabled = $("upload-name").disabled = $("upload-start").disabled = isBusy;
  if (isBusy) showProgress(0);
}

function showUploaded(model, version, isLoaded) {
  showResult(`${model} version ${version} is ${isLoaded ? "loaded" : "stored"}. `);
  if (!isLoaded) return;
  const name = encodeURIComponent(model);
  $("upload-result").append(el("a", { href: `#try/${name}`, text: "Try it" }), " ", el("a", { href: `/docs?model=${name}`, text: "Its API" }));
}

function showResult(text, isError = false) {
  setText($("upload-result"), text);
  $("upload-result").className = isError ? "bad" : "";
}
