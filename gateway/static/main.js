// The views, of which one is shown; each is refreshed while it is looked at.

import { $ } from "./dom.js";
import * as fleet from "./fleet.js";
import { listen } from "./key.js";
import * as live from "./live.js";
import * as trial from "./try.js";

const VIEWS = { try: trial, fleet, live };
const EVERY_MS = 2000;
let shown = "";

/** `#fleet`; `#try/NAME` for a model. */
function where() {
  const [view, ...rest] = location.hash.slice(1).split("/");
  return view in VIEWS ? [view, decoded(rest.join("/"))] : ["try", ""];
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return "";
  }
}

function show() {
  const [view, detail] = where();
  for (const name of Object.keys(VIEWS)) {
    $(name).hidden = name !== view;
    const link = document.querySelector(`nav a[href^="#${name}"]`);
    if (name === view) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  shown = view;
  VIEWS[view].show(detail);
}

async function keepFresh() {
  for (;;) {
    await new Promise((resolve) => setTimeout(resolve, EVERY_MS));
    if (!document.hidden) await VIEWS[shown].refresh?.();
  }
}

for (const view of Object.values(VIEWS)) view.start();
listen(() => {
  for (const view of Object.values(VIEWS)) view.forget();
  show();
});
addEventListener("hashchange", show);
show();
keepFresh();
