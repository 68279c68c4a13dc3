// Watches whether the gateway answers, and says so above every view while it does not.

import * as api from "./api.js";
import { $, setText } from "./dom.js";
import { showToast } from "./toast.js";

const INTERVAL_MS = 2000;
const RETRIES_MS = [1000, 2000, 4000, 8000];
const TIMEOUT_MS = 4000;
const STALE_MS = 6000;

/** Calls `onReturn` when the gateway answers again. */
export function start(onReturn) {
  addEventListener("connectionchange", () => {
    draw();
    if (api.connection.isLost) return;
    showToast("The gateway answers again.");
    onReturn();
  });
  watch();
}

async function watch() {
  for (let failures = 0; ; ) {
    const pause = RETRIES_MS[Math.min(failures, RETRIES_MS.length) - 1] ?? INTERVAL_MS;
    await new Promise((resolve) => setTimeout(resolve, pause));
    if (document.hidden) continue;
    const { isLost, answeredAt } = api.connection;
    // Most views ask the gateway all the time, which is enough while it answers.
    if (isLost || Date.now() - answeredAt >= INTERVAL_MS) {
      await api.call("/livez", { signal: AbortSignal.timeout(TIMEOUT_MS) }).catch(() => {});
    }
    failures = api.connection.isLost ? failures + 1 : 0;
    draw();
  }
}

function draw() {
  const { isLost, answeredAt } = api.connection;
  const isStale = isLost && Date.now() - answeredAt > STALE_MS;
  const time = new Date(answeredAt).toLocaleTimeString([], { hourCycle: "h23" });
  const sentences = ["The gateway does not answer. Trying again.", isStale ? `What is shown is as of ${time}.` : ""];
  $("connection").hidden = !isLost;
  setText($("connection"), isLost ? sentences.join(" ").trim() : "");
  $("main").classList.toggle("stale", isStale);
}
