// The graph of an ensemble: its steps from left to right, each with its share of the time.

import { el } from "./dom.js";
import { arrangeSteps, formatMs, shareTime } from "./statistics.js";

/** @param {Map<string, object>} statistics of each step's model, from `summarize`; null if unknown */
export function renderGraph(steps, statistics) {
  const times = new Map([...statistics].map(([model, stats]) => [model, stats?.totalMs ?? null]));
  const shares = shareTime(times);
  const highest = Math.max(...[...shares.values()].map((share) => share ?? 0));
  const levels = arrangeSteps(steps).map((nodes) => el("li", {}, ...nodes.map((node) =>
    renderStep(node, statistics.get(node.model), shares.get(node.model), highest))));
  return el("div", {},
    el("h3", { text: "Steps" }),
    el("ol", { class: "graph", "aria-label": "Steps of the ensemble, from its inputs to its outputs" }, ...levels),
    el("p", { class: "small", text: "The time of a step is the mean of all requests to its model, those outside this ensemble included." }));
}

function renderStep({ model, reads, writes }, stats, share, highest) {
  const isSlowest = share !== null && share > 0 && share === highest;
  const bar = el("span");
  bar.style.width = `${(share ?? 0) * 100}%`;
  const percent = share === null ? "not measured yet" : `${Math.round(share * 100)} % of the time`;
  const details = stats?.count ? `queue ${formatMs(stats.phases.queue)}, compute ${formatMs(stats.phases.compute_infer)}` : "";
  return el("div", { class: isSlowest ? "step slowest" : "step", "data-step": model },
    el("h4", {}, el("a", { href: `#model/${encodeURIComponent(model)}`, text: model })),
    el("div", { text: share === null ? percent : `${formatMs(stats.totalMs)}, ${percent}${isSlowest ? ", the slowest" : ""}` }),
    el("span", { class: "share", "aria-hidden": "true" }, bar),
    el("div", { class: "small", text: details }),
    el("div", { class: "small", text: `${reads.join(", ")} → ${writes.join(", ")}` }));
}
