// Calculations with Triton's statistics and configs of models. Pure.

const PHASES = ["queue", "compute_input", "compute_infer", "compute_output"];
const NS_PER_MS = 1e6;

/**
 * Sum the statistics of a model's versions: requests, and the mean of each phase in ms.
 * @param {object} document of `GET /v2/models/M/stats`
 */
export function summarize(document) {
  const total = { count: 0, ns: 0, phases: Object.fromEntries(PHASES.map((phase) => [phase, 0])) };
  for (const { inference_stats: stats } of document.model_stats ?? []) {
    total.count += Number(stats.success?.count ?? 0);
    total.ns += Number(stats.success?.ns ?? 0);
    for (const phase of PHASES) total.phases[phase] += Number(stats[phase]?.ns ?? 0);
  }
  const mean = (ns) => (total.count ? ns / total.count / NS_PER_MS : null);
  return {
    count: total.count,
    totalMs: mean(total.ns),
    phases: Object.fromEntries(PHASES.map((phase) => [phase, mean(total.phases[phase])])),
  };
}

/**
 * Arrange the steps of an ensemble in levels: each step is one level after the last one that it needs.
 * Returns `[[{model, reads, writes}]]`.
 */
export function arrangeSteps(steps) {
  const nodes = steps.map(({ model_name: model, input_map: inputs = {}, output_map: outputs = {} }) => ({
    model, reads: [...new Set(Object.values(inputs))], writes: [...new Set(Object.values(outputs))],
  }));
  const producers = new Map(nodes.flatMap((node) => node.writes.map((tensor) => [tensor, node])));
  const levels = new Map();
  const levelOf = (node, visited = new Set()) => {
    if (levels.has(node) || visited.has(node)) return levels.get(node) ?? 0;
    visited.add(node);
    const before = node.reads.map((tensor) => producers.get(tensor)).filter((each) => each && each !== node);
    const level = before.reduce((highest, each) => Math.max(highest, levelOf(each, visited) + 1), 0);
    levels.set(node, level);
    return level;
  };
  const arranged = [];
  for (const node of nodes) (arranged[levelOf(node)] ??= []).push(node);
  return arranged.filter(Boolean);
}

/** Return each step's share of the time of all steps, by model; null while nothing was measured. */
export function shareTime(timesMs) {
  const sum = [...timesMs.values()].reduce((total, time) => total + (time ?? 0), 0);
  return new Map([...timesMs].map(([model, time]) => [model, sum && time !== null ? time / sum : null]));
}

/** Format milliseconds with the digits that a mean of many requests has. */
export const formatMs = (ms) =>
  ms === null || ms === undefined || Number.isNaN(ms) ? "–" : ms >= 100 ? `${ms.toFixed(0)} ms` : ms >= 1 ? `${ms.toFixed(1)} ms` : `${(ms * 1000).toFixed(0)} µs`;
