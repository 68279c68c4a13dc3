// What changed, and by whom: the last events, at the end of the fleet view.

import * as api from "./api.js";
import { $, el, updateRows } from "./dom.js";

const SHOWN = 20;
const COLUMNS = ["Time", "Who", "What", "Changes", "Outcome"];
const body = el("tbody");
const heading = el("h3", { id: "events-heading", text: "Changes" });
const table = el("table", { id: "events" }, el("thead", {}, el("tr", {}, ...COLUMNS.map((text) => el("th", { scope: "col", text })))), body);
const card = el("div", { class: "card", hidden: true }, el("div", { class: "card-head" }, heading),
  el("div", { class: "scroll", tabindex: "0", role: "region", "aria-labelledby": heading.id }, table));

export const start = () => $("fleet").append(card);

/** Without the right to see the events, there is no list. */
export async function refresh(canManage) {
  const page = canManage ? await api.getJson(`v1/events?limit=${SHOWN}`).catch(() => null) : null;
  card.hidden = !page?.events.length;
  if (!card.hidden) updateRows(body, page.events.reverse(), keyOf, cellsOf);
}

export const reset = () => body.replaceChildren();

const keyOf = (event) => `${event.time} ${event.message}`;

function describe(value) {
  if (value === null) return "none";
  if (Array.isArray(value)) return value.map(describe).join(" ");
  if (typeof value !== "object") return String(value);
  return Object.entries(value).map(([name, each]) => `${name} ${describe(each)}`).join(", ");
}

const describeChange = (change) => `${change.subject}: ${describe(change.from)} → ${describe(change.to)}`;
const cellsOf = (event) => [
  new Date(event.time).toLocaleString(),
  event.caller ?? event.file ?? "",
  event.action,
  event.changes?.map(describeChange).join("; ") ?? event.model ?? "",
  { text: event.reason ? `${event.outcome}: ${event.reason}` : event.outcome, class: event.outcome === "failed" ? "bad" : "" },
];
