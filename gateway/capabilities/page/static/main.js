// Navigation between the views. The visible view is refreshed periodically.

import * as connection from "./connection.js";
import { $ } from "./dom.js";
import * as fleet from "./fleet.js";
import * as key from "./key.js";
import * as live from "./live.js";
import * as model from "./model.js";
import * as trial from "./try.js";

const VIEWS = { try: trial, model, fleet, live };
const SECTIONS = { try: "try", model: "model-view", fleet: "fleet", live: "live" };
const REFRESH_MS = 2000;
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

function show() {
  const [view, detail] = parseHash();
  for (const name of Object.keys(VIEWS)) {
    $(SECTIONS[name]).hidden = name !== view;
    const link = document.querySelector(`nav a[href="#${name}"]`);
    if (name === view) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  visible = view;
  VIEWS[view].show(detail);
}

async function refreshPeriodically() {
  for (;;) {
    await new Promise((resolve) => setTimeout(resolve, REFRESH_MS));
    if (!document.hidden) await VIEWS[visible].refresh?.();
  }
}

for (const view of Object.values(VIEWS)) view.start();
key.start(() => {
  for (const view of Object.values(VIEWS)) view.reset();
  show();
});
addEventListener("hashchange", show);
show();
connection.start(show);
refreshPeriodically();
