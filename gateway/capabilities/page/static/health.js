// The health of the fleet, in the header of every view and in the tab of the browser.

import * as api from "./api.js";
import { $, setText } from "./dom.js";
import * as models from "./models.js";

const ALERT_ICON = "data:image/svg+xml," + encodeURIComponent(
  '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 32 32"><rect width="32" height="32" rx="8" fill="#0b6e5f"/><circle cx="23" cy="9" r="8" fill="#d92d20"/></svg>');
const WORKING = new Set(["UP", "SLOW"]);
const icon = document.querySelector("link[rel=icon]");
const healthyIcon = icon.href;

export const isWorking = (replica) => WORKING.has(replica.state) && !replica.cordoned;

/** Read the list of models, and the replicas if this key may see them. Never prompts for a key. */
export async function refresh() {
  try {
    const listed = await models.refresh();
    // The states on replicas are listed for keys that may see the fleet.
    const replicas = listed.some((model) => model.replicas) ? await api.listReplicas() : null;
    draw(listed, replicas);
  } catch (error) {
    if (error.body?.code === "NO_REPLICA") show("bad", "No replica");
    else $("health").hidden = true;
  }
}

function draw(listed, replicas) {
  const ready = listed.filter((model) => model.ready).length;
  const count = `${ready} ${ready === 1 ? "model" : "models"}`;
  if (!replicas) return show("", count);
  const working = replicas.filter(isWorking).length;
  const isWhole = working === replicas.length;
  const text = `${working} of ${replicas.length} ${replicas.length === 1 ? "replica" : "replicas"}`;
  show(isWhole ? "" : working ? "warn" : "bad", isWhole ? `${text} · ${count}` : text);
}

function show(kind, text) {
  $("health").hidden = false;
  $("health").className = `health ${kind}`;
  $("health").firstChild.className = `dot ${kind}`;
  $("health").title = text;
  setText($("health-text"), text);
  const href = kind ? ALERT_ICON : healthyIcon;
  if (icon.href !== href) icon.href = href;
  document.title = document.title.replace(/^(\(!\) )?/, kind ? "(!) " : "");
}
