// Watches whether the gateway answers, and says so above every view while it does not.

import * as api from "./api.js";
import { $, setText } from "./dom.js";

const INTERVAL_MS = 2000;
const TIMEOUT_MS = 4000;
const STALE_MS = 6000;

/** Calls `onReturn` when the gateway answers again. */
export function start(onReturn) {
  addEventListener("connectionchange", () => {
    draw();
    if (!api.connection.isLost) onReturn();
  });
  watch();
}

async function watch() {
  for (;;) {
    await new Promise((resolve) => setTimeout(resolve, INTERVAL_MS));
    if (document.hidden) continue;
    const { isLost, answeredAt } = api.connection;
    // Most views ask the gateway all the time, which is enough while it answers.
    if (isLost || Date.now() - answeredAt >= INTERVAL_MS) {
      await api.call("/livez", { signal: AbortSignal.timeout(TIMEOUT_MS) }).catch(() => {});
    }
    draw();
  }
}

function draw() {
  const { isLost, answeredAt } = api.connection;
  const isStale = isLost && Date.now() - answeredAt > STALE_MS;
  const time = new Date(answeredAt).toLocaleTimeString([], { hourCycle: "h23" });
  const sentences = ["The gateway does not answer. Trying again every 2 s.", isStale ? `What is shown is as of ${time}.` : ""];
  $("connection").hidden = !isLost;
  setText($("connection"), isLost ? sentences.join(" ").trim() : "");
  $("main").classList.toggle("stale", isStale);
}
