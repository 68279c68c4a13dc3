// The jobs of this key, or with an administrator's key of all: their states, progress and results.

import * as api from "./api.js";
import { $, el, renderCommand, renderEmpty, setText, showNotice, showToast, updateRows } from "./dom.js";
import * as models from "./models.js";

const SHOWN = 100;
const COLUMNS = ["Job", "Model", "State", "Progress", "Created", "Actions"];
const STATES = { queued: "Queued", running: "Running", done: "Done", failed: "Failed", cancelled: "Cancelled", expired: "Expired" };
const KINDS = { queued: "quiet", cancelled: "quiet", failed: "bad", expired: "warn" };
const controls = new Map(); // by job: its bar and its buttons, which are kept between refreshes, so that the focus stays

const hasEnded = (job) => job.state !== "queued" && job.state !== "running";

export function start() {
  $("jobs-table").tHead.append(el("tr", {}, ...COLUMNS.map((text) => el("th", { scope: "col", text }))));
}

export async function show() {
  await refresh(api.withKey);
}

export function reset() {
  $("jobs-table").tBodies[0].replaceChildren();
  $("jobs-empty").replaceChildren();
  controls.clear();
}

export async function refresh(ask = (action) => action()) {
  try {
    const { jobs } = await ask(() => api.getJson(`v1/jobs?limit=${SHOWN}`));
    $("jobs-card").hidden = !jobs.length;
    $("jobs-empty").hidden = jobs.length > 0;
    if (!jobs.length && !$("jobs-empty").firstChild) await showNoJobs();
    updateRows($("jobs-table").tBodies[0], jobs, ({ id }) => id, cellsOf);
    showNotice($("jobs-notice"));
  } catch (error) {
    api.showErrorNotice($("jobs-notice"), error);
  }
}

/** Say how a request becomes a job, with one to copy. */
async function showNoJobs() {
  await models.load().catch(() => {}); // without the right to infer, there is no model to name
  const address = new URL(`v1/models/${models.findChosen() || "MODEL"}/infer`, document.baseURI).href;
  const authorization = api.key.get() ? ' -H "Authorization: Bearer $KEY"' : "";
  $("jobs-empty").replaceChildren(renderEmpty("No jobs yet", "A request with one more header becomes a job: its answer waits here until you fetch it, whatever happens to the connection.",
    renderCommand(`curl -H 'Prefer: respond-async'${authorization} \\\n  --data-binary @input \\\n  ${address}`),
    el("p", {}, el("a", { href: new URL("use/jobs.md", document.querySelector(".to-guide").href).href, text: "How jobs work" }))));
}

function cellsOf(job) {
  if (!controls.has(job.id)) controls.set(job.id, createControls(job.id));
  const { progress, actions } = controls.get(job.id);
  drawProgress(job, progress);
  drawActions(job, actions);
  const reason = job.error ? `: ${api.toSentence(job.error.message)}` : "";
  return [
    { text: job.id, class: "long" },
    job.model,
    { text: (STATES[job.state] ?? job.state) + reason, class: `state long ${KINDS[job.state] ?? ""}` },
    progress,
    new Date(job.created).toLocaleString(),
    actions,
  ];
}

function createControls(id) {
  const makeButton = (text, onclick) => el("button", { type: "button", class: "ghost", text, "aria-label": `${text} ${id}`, onclick });
  return {
    progress: el("div", {}, el("progress", { "aria-label": `Progress of ${id}` }), el("div", { class: "small" })),
    actions: el("div", { class: "buttons" }, makeButton("Result", () => save(id)), makeButton("Cancel", () => remove(id))),
  };
}

/** The progress of a single request is unknown while it runs. */
function drawProgress({ state, progress: { total, done, failed } }, element) {
  const [bar, text] = element.children;
  bar.max = total;
  if (state === "running" && total === 1) bar.removeAttribute("value");
  else bar.value = done + failed;
  bar.hidden = state === "queued" || (hasEnded({ state }) && total === 1);
  setText(text, total === 1 ? "" : `${done} of ${total}${failed ? `, ${failed} failed` : ""}`);
}

function drawActions(job, element) {
  const [result, cancel] = element.children;
  result.hidden = job.status === undefined;
  setText(cancel, hasEnded(job) ? "Delete" : "Cancel");
  cancel.setAttribute("aria-label", `${cancel.textContent} ${job.id}`);
}

async function save(id) {
  try {
    await api.download(`v1/jobs/${id}/result`, id);
  } catch (error) {
    showToast(api.errorMessage(error), true);
  }
}

async function remove(id) {
  try {
    await api.withKey(() => api.call(`v1/jobs/${id}`, { method: "DELETE" }));
  } catch (error) {
    showToast(api.errorMessage(error), true);
  }
  await refresh();
}
