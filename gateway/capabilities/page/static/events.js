// What changed, and by whom: the last events, at the end of the fleet view.

import * as api from "./api.js";
import { $, el, updateRows } from "./dom.js";

const SHOWN = 20;
const COLUMNS = ["Time", "Who", "What", "Outcome"];
const DONE = { load: "Loaded", unload: "Unloaded", cordon: "Cordoned", uncordon: "Uncordoned", drain: "Drained" };
let last = []; // the last events, newest first
const body = el("tbody");
const heading = el("h3", { id: "events-heading", text: "Changes" });
const table = el("table", { id: "events" }, el("thead", {}, el("tr", {}, ...COLUMNS.map((text) => el("th", { scope: "col", text })))), body);
const card = el("div", { class: "card", hidden: true }, el("div", { class: "card-head" }, heading),
  el("div", { class: "scroll", tabindex: "0", role: "region", "aria-labelledby": heading.id }, table));

export const start = () => $("fleet").append(card);

/** Without the right to see the events, there is no list. */
export async function refresh(canManage) {
  const page = canManage ? await api.getJson(`v1/events?limit=${SHOWN}`).catch(() => null) : null;
  last = page?.events.reverse() ?? [];
  card.hidden = !last.length;
  if (!card.hidden) updateRows(body, last, keyOf, cellsOf);
}

/** Return when a model was last loaded in vain; undefined if the last events do not say. */
export function findFailureTime(model) {
  const event = last.find((each) => each.model === model && each.action === "load" && each.outcome === "failed");
  return event && new Date(event.time);
}

export function reset() {
  last = [];
  body.replaceChildren();
}

const keyOf = (event) => `${event.time} ${event.message}`;

function describe(value) {
  if (value === null) return "none";
  if (Array.isArray(value)) return value.map(describe).join(" ");
  if (typeof value !== "object") return String(value);
  return Object.entries(value).map(([name, each]) => `${name} ${describe(each)}`).join(", ");
}

/** What an action on a model changes, its name says. */
function describeEvent({ action, model, changes = [], outcome }) {
  if (action in DONE && outcome !== "failed" && model) return `${DONE[action]} ${model}`;
  const details = changes.map(({ subject, from, to }) => `${subject}: ${describe(from)} → ${describe(to)}`).join("; ");
  return [action, model && !details.includes(model) ? model : "", details].filter(Boolean).join(" ");
}

const cellsOf = (event) => [
  new Date(event.time).toLocaleString(),
  event.caller ?? event.file ?? "",
  { text: describeEvent(event), class: "long" },
  { text: event.reason ? `${event.outcome}: ${event.reason}` : event.outcome, class: event.outcome === "failed" ? "bad" : "" },
];
