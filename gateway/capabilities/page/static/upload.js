// The dialog that uploads a model: a file, an archive or a folder, also dropped on the window.

import * as api from "./api.js";
import { $, el, formatSize, setText } from "./dom.js";
import * as models from "./models.js";

const MAX_FOLDER_FILES = 10_000; // as many as the gateway reads from an archive
let isStarted = false;
let file = null;
let fixedName = ""; // of the model whose version is uploaded
let request = null; // in progress
let onUploaded = null; // of the view that shows the models; null if this key may not upload

export function start() {
  if (isStarted) return;
  isStarted = true;
  $("upload-open").addEventListener("click", () => open());
  $("upload-close").addEventListener("click", () => $("upload-dialog").close());
  $("upload-dialog").addEventListener("cancel", (event) => { if (request) event.preventDefault(); });
  $("upload-file").addEventListener("change", ({ target }) => selectFile(target.files[0] ?? null));
  $("upload-folder").addEventListener("change", ({ target }) =>
    selectFolder([...target.files].map((each) => ({ path: each.webkitRelativePath, file: each }))));
  $("upload-name").addEventListener("input", announceExisting);
  $("upload-cancel").addEventListener("click", () => request?.abort());
  $("upload-form").addEventListener("submit", (event) => {
    event.preventDefault();
    upload();
  });
  watchDrops();
}

/** Let this view upload, also by dropping: new models, or versions of one model. */
export function allow(whenUploaded, model = "") {
  onUploaded = whenUploaded;
  fixedName = model;
}

/** Forget everything that belongs to another key. */
export function reset() {
  onUploaded = null;
  request?.abort();
  selectFile(null);
  $("upload-dialog").close();
}

export function open(model = fixedName) {
  if (request) return $("upload-dialog").showModal();
  fixedName = model;
  selectFile(null);
  setText($("upload-heading"), model ? `Upload a version of ${model}` : "Upload a model");
  $("upload-dialog").showModal();
  return undefined;
}

// Choosing: the whole window is the zone while a view may upload.

const canDrop = () => onUploaded !== null && !($("fleet").hidden && $("files-view").hidden) && !document.querySelector("dialog[open]:not(#upload-dialog)");

function watchDrops() {
  const showVeil = (isShown) => { $("drop-veil").hidden = !isShown; };
  addEventListener("dragover", (event) => {
    if (!canDrop() || request || !event.dataTransfer.types.includes("Files")) return;
    event.preventDefault();
    showVeil(!$("upload-dialog").open);
    $("upload-zone").classList.toggle("over", $("upload-dialog").open);
  });
  for (const name of ["dragleave", "drop"]) {
    addEventListener(name, (event) => {
      if (name === "dragleave" && event.relatedTarget) return; // still over the window
      showVeil(false);
      $("upload-zone").classList.remove("over");
    });
  }
  addEventListener("drop", (event) => {
    if (!canDrop() || request) return;
    event.preventDefault();
    const entries = [...event.dataTransfer.items].map((item) => item.webkitGetAsEntry?.());
    const files = [...event.dataTransfer.files];
    if (!$("upload-dialog").open) open(fixedName);
    if (files.length > 1) showResult("Drop one file, or the folder of one model.", true);
    else if (entries[0]?.isDirectory) readFolder(entries[0]).then(selectFolder, (error) => showResult(error.message, true));
    else if (files.length) selectFile(files[0]);
  });
}

/** Return `{path, file}` of all files in a dropped folder. */
async function readFolder(folder) {
  const found = [];
  for (const folders = [folder]; folders.length; ) {
    const reader = folders.pop().createReader();
    for (let entries; (entries = await new Promise((resolve, reject) => reader.readEntries(resolve, reject))).length; ) {
      for (const entry of entries) {
        if (entry.isDirectory) folders.push(entry);
        else found.push({ path: entry.fullPath.slice(1), file: await new Promise((resolve, reject) => entry.file(resolve, reject)) });
      }
      if (found.length > MAX_FOLDER_FILES) throw new Error(`The folder has more than ${MAX_FOLDER_FILES} files.`);
    }
  }
  return found;
}

/** Use the files of a folder, without hidden ones, as an archive. */
function selectFolder(found) {
  const files = found.filter(({ path }) => !path.split("/").some((part) => part.startsWith(".")));
  const [folder = ""] = (files[0]?.path ?? "").split("/");
  try {
    if (!files.length) throw new Error("The folder is empty.");
    selectFile(packFolder(folder, files), `${folder}, ${files.length} ${files.length === 1 ? "file" : "files"}`);
  } catch (error) {
    selectFile(null);
    showResult(error.message, true);
  }
}

/** Use a file, and suggest its name for the model. */
function selectFile(selected, description = selected?.name) {
  if (request) return;
  file = selected;
  $("upload-details").hidden = $("upload-start").hidden = !file;
  for (const id of ["upload-file", "upload-folder"]) $(id).value = "";
  showResult("");
  if (!file) return;
  setText($("upload-selected"), `${description}, ${formatSize(file.size)}`);
  $("upload-name").value = fixedName || suggestName(file.name);
  announceExisting();
  $("upload-name").focus();
}

const suggestName = (name) =>
  name.replace(/\.(onnx|plan|engine|trt|xml|pt2?|zip|tar|tar\.gz|tgz)$/i, "")
    .replace(/^[^A-Za-z0-9_]/, "_").replace(/[^A-Za-z0-9_.+-]/g, "_").slice(0, 128);

/** The next version of a model that exists takes over its requests. */
function announceExisting() {
  const name = $("upload-name").value.trim();
  setText($("upload-existing-text"), models.findModel(name)
    ? `${name} exists: this becomes its next version, and answers its requests as soon as it is loaded.` : "");
}

// Sending.

async function upload() {
  if (request || !file) return;
  const model = $("upload-name").value.trim();
  if (!model) return showResult("Enter a name for the model.", true);
  setBusy(true);
  showResult("");
  const isLoaded = !$("upload-store-only").checked;
  try {
    const { version } = await api.withKey(() => send(model, isLoaded));
    setBusy(false);
    selectFile(null);
    showUploaded(model, version, isLoaded);
    await models.refresh();
  } catch (error) {
    setBusy(false); // and the file is kept
    if (error.name === "AbortError") showResult("The upload was cancelled.");
    else $("upload-result").replaceChildren(api.renderError(error));
  }
  await onUploaded?.();
}

function send(model, isLoaded) {
  const started = performance.now();
  const sent = api.uploadModel(model, file, isLoaded, (bytes, total) => showProgress(bytes, total, performance.now() - started));
  request = sent.request;
  return sent.response.finally(() => (request = null));
}

function showProgress(bytes, total, elapsedMs) {
  const rate = (1000 * bytes) / elapsedMs;
  const isSent = bytes >= total;
  if (isSent) $("upload-progress").removeAttribute("value");
  else $("upload-progress").value = bytes / total;
  const remaining = Math.ceil((total - bytes) / rate);
  setText($("upload-state"), isSent
    ? `${formatSize(total)} sent. The gateway checks ${$("upload-store-only").checked ? "the model" : "and loads the model"}…`
    : `${formatSize(bytes)} of ${formatSize(total)}, ${formatSize(rate)}/s, ${Number.isFinite(remaining) ? remaining : "–"} s left`);
}

function setBusy(isBusy) {
  $("upload-busy").hidden = $("upload-cancel").hidden = !isBusy;
  $("upload-zone").hidden = $("upload-close").hidden = isBusy;
  for (const id of ["upload-name", "upload-store-only", "upload-start"]) $(id).disabled = isBusy;
  $("upload-progress").value = 0;
  setText($("upload-state"), "");
}

function showUploaded(model, version, isLoaded) {
  showResult(`${model} version ${version} is ${isLoaded ? "loaded" : "stored"}. `);
  if (!isLoaded) return;
  const name = encodeURIComponent(model);
  const link = (href, text) => el("a", { href, text, onclick: () => $("upload-dialog").close() });
  $("upload-result").append(link(`#try/${name}`, "Try it"), " ", link(`#api/${name}`, "Its API"));
}

function showResult(text, isError = false) {
  $("upload-result").replaceChildren(text);
  $("upload-result").className = isError ? "bad" : "";
}

// Archives: a folder is sent as a tar file (POSIX.1-1988, "ustar"), which the browser reads from the disk while it sends.

const BLOCK_BYTES = 512;
const MAX_FILE_BYTES = 8 ** 11 - 1; // in the digits of a header

function packFolder(name, files) {
  const parts = files.flatMap(({ path, file: content }) => [
    buildTarHeader(path, content.size), content, new Uint8Array(-content.size & (BLOCK_BYTES - 1)),
  ]);
  return new File([...parts, new Uint8Array(2 * BLOCK_BYTES)], `${name}.tar`);
}

function buildTarHeader(path, size) {
  if (size > MAX_FILE_BYTES) throw new Error(`${path} is too large for an upload from a browser.`);
  const header = new Uint8Array(BLOCK_BYTES);
  const write = (text, offset) => header.set(new TextEncoder().encode(text), offset);
  const octal = (number, digits) => number.toString(8).padStart(digits, "0");
  const [prefix, rest] = splitPath(path);
  write(rest, 0);
  write(`${octal(0o644, 7)}\0${octal(0, 7)}\0${octal(0, 7)}\0${octal(size, 11)}\0${octal(0, 11)}\0        0`, 100);
  write("ustar\x0000", 257);
  write(prefix, 345);
  write(`${octal(header.reduce((sum, byte) => sum + byte, 0), 6)}\0 `, 148);
  return header;
}

/** Split a path into the two fields of a header, of at most 155 and 100 bytes. */
function splitPath(path) {
  const countBytes = (text) => new TextEncoder().encode(text).length;
  if (countBytes(path) <= 100) return ["", path];
  const slashes = [...path.matchAll(/\//g)].map(({ index }) => index);
  const at = slashes.find((index) => countBytes(path.slice(index + 1)) <= 100);
  if (at === undefined || countBytes(path.slice(0, at)) > 155) throw new Error(`The path ${path} is too long.`);
  return [path.slice(0, at), path.slice(at + 1)];
}
