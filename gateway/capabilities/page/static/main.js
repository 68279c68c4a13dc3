// The frame: navigation between the views, the health of the fleet, and whether the gateway answers.
// Views are loaded when they are shown; the visible one is refreshed periodically.

import * as api from "./api.js";
import { $, setText, showToast } from "./dom.js";
import * as models from "./models.js";
import * as search from "./search.js";

const VIEWS = {
  try: { section: "try", link: "#try", load: () => import("./try.js") },
  model: { section: "model-view", link: "#try", load: () => import("./model.js") },
  api: { section: "api-view", link: "#try", load: () => import("./reference.js") },
  versions: { section: "versions-view", link: "#try", load: () => import("./versions.js") },
  files: { section: "files-view", link: "#try", load: () => import("./files.js") },
  fleet: { section: "fleet", link: "#fleet", load: () => import("./fleet.js") },
  jobs: { section: "jobs", link: "#jobs", load: () => import("./jobs.js") },
  live: { section: "live", link: "#live", load: () => import("./live.js") },
};
const REFRESH_MS = 2000;
const HEALTH_INTERVAL = 3; // refreshes of a view for one of the header
const LOAD_OTHERS_AFTER_MS = 1500;
const loaded = new Map(); // view → its module, which is started
let visible = "";

/** Parse `#fleet`, `#try/NAME` for a model, or `#try/NAME?version=2`. Names have no question marks, because they are quoted. */
function parseHash() {
  const [path, query = ""] = location.hash.slice(1).split("?");
  const [view, ...rest] = path.split("/");
  return view in VIEWS ? [view, decode(rest.join("/")), new URLSearchParams(query)] : ["try", "", new URLSearchParams()];
}

function decode(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return "";
  }
}

const mark = (link, isCurrent) => (isCurrent ? link.setAttribute("aria-current", "page") : link.removeAttribute("aria-current"));

async function show() {
  const [view, detail, query] = parseHash();
  const { section, link } = VIEWS[view];
  const isOfModel = link === "#try";
  visible = view;
  for (const each of Object.values(VIEWS)) $(each.section).hidden = each.section !== section;
  for (const each of document.querySelectorAll(".top nav a")) mark(each, each.getAttribute("href") === link);
  for (const each of document.querySelectorAll(".view-tabs a")) mark(each, each.dataset.view === view);
  document.body.classList.toggle("with-models", isOfModel);
  document.body.dataset.view = view;
  $("model-head").hidden = !isOfModel;
  if (!isOfModel) models.closeSheet();
  const module = await loadView(view);
  if (module && visible === view) await module.show(detail, query);
}

/** Load and start a view. Returns undefined if the gateway does not answer, which is shown above every view. */
async function loadView(view) {
  if (!loaded.has(view)) {
    const module = await VIEWS[view].load().catch(() => undefined);
    if (module && !loaded.has(view)) {
      module.start();
      loaded.set(view, module);
    }
  }
  return loaded.get(view);
}

/** The other views are there when they are wanted, also without the gateway. */
async function loadOthers() {
  await new Promise((resolve) => setTimeout(resolve, LOAD_OTHERS_AFTER_MS));
  for (const view of Object.keys(VIEWS)) await loadView(view);
}

async function refreshPeriodically() {
  for (let count = 0; ; count += 1) {
    if (!document.hidden && !api.isLocked() && count % HEALTH_INTERVAL === 1) await refreshHealth();
    await new Promise((resolve) => setTimeout(resolve, REFRESH_MS));
    if (document.hidden || api.isLocked()) continue;
    await loaded.get(visible)?.refresh?.();
    if (count % HEALTH_INTERVAL === 2 && visible !== "live") await loaded.get("live")?.record();
  }
}

// The health of the fleet, in the header and in the tab of the browser.

const healthyIcon = $("icon").href;
const ALERT_ICON = "data:image/svg+xml," + encodeURIComponent(
  '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 32 32"><rect width="32" height="32" rx="8" fill="#0b6e5f"/><circle cx="23" cy="9" r="8" fill="#d92d20"/></svg>');

let isServed = true; // by a replica

/** Read the list of models, and the replicas if this key may see them. Never prompts for a key. */
async function refreshHealth() {
  try {
    const listed = await models.refresh();
    // The states on replicas are listed for keys that may see the fleet.
    const replicas = listed.some((model) => model.replicas) ? await api.listReplicas() : null;
    drawHealth(listed, replicas);
    if (!isServed) show(); // what could not be shown before
    isServed = true;
  } catch (error) {
    isServed = error.body?.code !== "NO_REPLICA";
    if (isServed) $("health").hidden = true;
    else showHealth("bad", "No replica");
  }
}

function drawHealth(listed, replicas) {
  const ready = listed.filter((model) => model.ready).length;
  const count = `${ready} ${ready === 1 ? "model" : "models"}`;
  if (!replicas) return showHealth("", count);
  const working = replicas.filter(api.isWorking).length;
  const isWhole = working === replicas.length;
  const text = `${working} of ${replicas.length}`;
  const noun = replicas.length === 1 ? "replica" : "replicas";
  showHealth(isWhole ? "" : working ? "warn" : "bad", text, isWhole ? `${noun} · ${count}` : noun);
}

/** Show the health; a narrow screen shows a problem without its second part. */
function showHealth(kind, text, rest = "") {
  $("health").hidden = false;
  $("health").className = `health ${kind}`;
  $("health").firstChild.className = `dot ${kind}`;
  $("health").title = `${text} ${rest}`.trim();
  setText($("health-text"), text);
  setText($("health-rest"), rest);
  const href = kind ? ALERT_ICON : healthyIcon;
  if ($("icon").href !== href) $("icon").href = href;
  document.title = document.title.replace(/^(\(!\) )?/, kind ? "(!) " : "");
}

// Whether the gateway answers; while it does not, a line above every view says so.

const WATCH_MS = 2000;
const RETRIES_MS = [1000, 2000, 4000, 8000];
const TIMEOUT_MS = 4000;
const STALE_MS = 6000;

async function watchConnection() {
  for (let failures = 0; ; ) {
    const pause = RETRIES_MS[Math.min(failures, RETRIES_MS.length) - 1] ?? WATCH_MS;
    await new Promise((resolve) => setTimeout(resolve, pause));
    if (document.hidden || api.isLocked()) continue;
    const { isLost, answeredAt } = api.connection;
    // Most views ask the gateway all the time, which is enough while it answers.
    if (isLost || Date.now() - answeredAt >= WATCH_MS) {
      await api.call("livez", { signal: AbortSignal.timeout(TIMEOUT_MS) }).catch(() => {});
    }
    failures = api.connection.isLost ? failures + 1 : 0;
    drawConnection();
  }
}

function drawConnection() {
  const { isLost, answeredAt } = api.connection;
  const isStale = isLost && Date.now() - answeredAt > STALE_MS;
  const time = new Date(answeredAt).toLocaleTimeString([], { hourCycle: "h23" });
  const sentences = ["The gateway does not answer. Trying again.", isStale ? `What is shown is as of ${time}.` : ""];
  $("connection").hidden = !isLost;
  setText($("connection"), isLost ? sentences.join(" ").trim() : "");
  $("main").classList.toggle("stale", isStale);
}

$("skip").addEventListener("click", (event) => {
  event.preventDefault(); // the address names the view
  $("main").focus();
});
addEventListener("connectionchange", () => {
  drawConnection();
  if (api.connection.isLost) return;
  showToast("The gateway answers again.");
  show();
});
$("jobs-link").hidden = !api.hasFeature("jobs");
models.start();
search.start();
if (api.canSignIn) {
  const { finishSignIn } = await import("./sign_in.js");
  await finishSignIn().then(api.key.setToken, (error) => showToast(error.message));
}
api.startKeyDialog(() => {
  models.reset();
  for (const view of loaded.values()) view.reset();
  show();
});
addEventListener("hashchange", show);
show();
watchConnection();
refreshPeriodically();
loadOthers();
