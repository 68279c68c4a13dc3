// Navigation between the views, which are loaded when they are shown. The visible view is refreshed periodically.

import * as connection from "./connection.js";
import { $ } from "./dom.js";
import * as health from "./health.js";
import * as key from "./key.js";
import * as models from "./models.js";

const VIEWS = {
  try: { section: "try", link: "#try", load: () => import("./try.js") },
  model: { section: "model-view", link: "#try", load: () => import("./model.js") },
  api: { section: "api-view", link: "#try", load: () => import("./reference.js") },
  fleet: { section: "fleet", link: "#fleet", load: () => import("./fleet.js") },
  live: { section: "live", link: "#live", load: () => import("./live.js") },
};
const REFRESH_MS = 2000;
const HEALTH_INTERVAL = 3; // refreshes of a view for one of the header
const LOAD_OTHERS_AFTER_MS = 1500;
const loaded = new Map(); // view → its module, which is started
let visible = "";

/** Parse `#fleet`, or `#try/NAME` for a model. */
function parseHash() {
  const [view, ...rest] = location.hash.slice(1).split("/");
  return view in VIEWS ? [view, decode(rest.join("/"))] : ["try", ""];
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
  const [view, detail] = parseHash();
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
  if (module && visible === view) await module.show(detail);
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
    if (!document.hidden && count % HEALTH_INTERVAL === 1) await health.refresh();
    await new Promise((resolve) => setTimeout(resolve, REFRESH_MS));
    if (!document.hidden) await loaded.get(visible)?.refresh?.();
  }
}

$("skip").addEventListener("click", (event) => {
  event.preventDefault(); // the address names the view
  $("main").focus();
});
models.start();
key.start(() => {
  models.reset();
  for (const view of loaded.values()) view.reset();
  show();
});
addEventListener("hashchange", show);
show();
connection.start(show);
refreshPeriodically();
loadOthers();
