// A metrics page as numbers: the text format of Prometheus, and what lies between two of its pages.

const SAMPLE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)/;
const LABEL = /([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"/g;
const ESCAPED = { "\\n": "\n", '\\"': '"', "\\\\": "\\" };

/** Samples by name: `[{labels, value}]`. Only names that are wanted are read. */
export function samples(page, wanted) {
  const found = new Map(wanted.map((name) => [name, []]));
  for (const line of page.split("\n")) {
    const name = line.slice(0, line.search(/[{ ]/));
    if (!found.has(name)) continue;
    const [, , labels = "", value] = SAMPLE.exec(line) ?? [];
    if (value === undefined) continue;
    const read = [...labels.matchAll(LABEL)].map(([, key, text]) => [key, text.replace(/\\[n"\\]/g, (at) => ESCAPED[at])]);
    found.get(name).push({ labels: Object.fromEntries(read), value: Number(value.replace("Inf", "Infinity")) });
  }
  return found;
}

/** Sums of samples by a key made of their labels; samples whose key is null are left out. */
export function sums(list, keyOf) {
  const found = new Map();
  for (const { labels, value } of list) {
    const key = keyOf(labels);
    if (key !== null) found.set(key, (found.get(key) ?? 0) + value);
  }
  return found;
}

/** What a counter grew by; after a restart it began at 0 again. */
export const grown = (now, before, key) => {
  const [a, b] = [before.get(key) ?? 0, now.get(key) ?? 0];
  return b >= a ? b - a : b;
};

/** As Prometheus' histogram_quantile: linear within a bucket. `buckets`: `[[upper bound, cumulated count]]`. */
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
