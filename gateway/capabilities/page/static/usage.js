// The usage view: who used what, by caller and model; of all callers, or of this key alone.

import * as api from "./api.js";
import { $, el, formatSize, setText, showNotice, updateRows } from "./dom.js";

const PERIODS = [["7 days", 7], ["30 days", 30], ["1 year", 365]];
const DAY_MS = 24 * 3600 * 1000;
let days = PERIODS[1][1];

export function start() {
  $("usage-period").append(...PERIODS.map(([text, value]) => el("label", {},
    el("input", { type: "radio", name: "usage-period", value, checked: value === days, onchange: () => { days = value; show(); } }), text)));
  $("usage-download").addEventListener("click", () => download().catch(showError));
}

export function reset() {
  $("usage-table").tBodies[0].replaceChildren();
  $("usage-body").hidden = true;
}

export async function show() {
  try {
    const response = await call({ headers: { Accept: "application/json" } });
    draw(await response.json(), new URL(response.url).pathname.endsWith("/me"));
  } catch (error) {
    showError(error);
  }
}

/** Read the usage of all callers, or that of this key if it may not see the others. */
async function call(options) {
  const query = `?from=${new Date(Date.now() - (days - 1) * DAY_MS).toISOString().slice(0, 10)}`;
  return api.call(`/v1/usage${query}`, options).catch((error) => {
    if (error.status !== 403) throw error;
    return api.call(`/v1/usage/me${query}`, options);
  });
}

function showError(error) {
  api.showErrorNotice($("usage-notice"), error, async () => {
    if (!(await api.promptForKey())) return;
    reset();
    await show();
  });
}

function draw(usage, isOwn) {
  const rows = usage.total.sort((a, b) => b.inference_seconds - a.inference_seconds || b.requests - a.requests);
  showNotice($("usage-notice"), rows.length ? "" : "There were no requests in this time.");
  $("usage-body").hidden = !rows.length;
  setText($("usage-scope"), isOwn ? "Of this key, by UTC days." : "Of all keys, by UTC days.");
  updateRows($("usage-table").tBodies[0], rows, ({ caller, model }) => `${caller} ${model}`, cellsOf);
}

const numberCell = (text) => ({ text, class: "number" });
const cellsOf = (row) => [
  row.caller,
  row.model || { text: "no model", class: "quiet" },
  numberCell(row.requests.toLocaleString()),
  numberCell(row.rows.toLocaleString()),
  numberCell(`${row.inference_seconds.toLocaleString([], { maximumFractionDigits: 1 })} s`),
  numberCell(formatSize(row.bytes_in)),
  numberCell(formatSize(row.bytes_out)),
];

async function download() {
  const response = await call({ headers: { Accept: "text/csv" } });
  const href = URL.createObjectURL(await response.blob());
  el("a", { href, download: "usage.csv" }).click();
  URL.revokeObjectURL(href);
}
