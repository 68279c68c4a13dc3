// Parsing of metrics in Prometheus' text format, and calculations with them.

const SAMPLE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)/;
const LABEL = /([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"/g;
const ESCAPES = { "\\n": "\n", '\\"': '"', "\\\\": "\\" };

/** Return the samples of these metrics: a map from each name to `[{labels, value}]`. */
export function parseSamples(page, names) {
  const result = new Map(names.map((name) => [name, []]));
  for (const line of page.split("\n")) {
    const name = line.slice(0, line.search(/[{ ]/));
    if (!result.has(name)) continue;
    const [, , labels = "", value] = SAMPLE.exec(line) ?? [];
    if (value === undefined) continue;
    const pairs = [...labels.matchAll(LABEL)].map(([, key, text]) => [key, text.replace(/\\[n"\\]/g, (escape) => ESCAPES[escape])]);
    result.get(name).push({ labels: Object.fromEntries(pairs), value: Number(value.replace("Inf", "Infinity")) });
  }
  return result;
}

/** Sum samples by a key made of their labels. Samples with a null key are ignored. */
export function sumBy(list, keyOf) {
  const result = new Map();
  for (const { labels, value } of list) {
    const key = keyOf(labels);
    if (key !== null) result.set(key, (result.get(key) ?? 0) + value);
  }
  return result;
}

/** Return the increase of a counter, which starts at 0 again after a restart. */
export const increase = (now, before, key) => {
  const [a, b] = [before.get(key) ?? 0, now.get(key) ?? 0];
  return b >= a ? b - a : b;
};

/** Return the bounds of the bucket that contains the quantile, which is all that a histogram knows; null if empty. */
export function quantileRange(q, buckets) {
  const sorted = [...buckets].sort(([a], [b]) => a - b);
  const total = sorted.at(-1)?.[1] ?? 0;
  if (!total) return null;
  const index = sorted.findIndex(([, count]) => count >= q * total);
  return [index ? sorted[index - 1][0] : 0, sorted[index][0]];
}

/** Format a range of seconds in ms: `10–25`, `< 1` or `> 10000`. */
export function formatRange(range) {
  if (!range) return "–";
  const [low, high] = range.map((seconds) => Number((seconds * 1000).toPrecision(3)));
  return high === Infinity ? `> ${low}` : low === 0 ? `< ${high}` : `${low}–${high}`;
}

/** Interpolate linearly, as histogram_quantile does. `buckets` is `[[upper bound, cumulative count]]`. */
export function quantile(q, buckets) {
  const sorted = [...buckets].sort(([a], [b]) => a - b);
  const total = sorted.at(-1)?.[1] ?? 0;
  if (!total) return null;
  let [below, counted] = [0, 0];
  for (const [bound, count] of sorted) {
    if (count >= q * total) {
      return bound === Infinity ? below : below + ((bound - below) * (q * total - counted)) / (count - counted || 1);
    }
    [below, counted] = [bound, count];
  }
  return below;
}
