// Texts for version labels.

/** Return the versions of a label with their shares in percent: a map from each version to a number. */
function shares(label) {
  const versions = Object.entries(label.versions ?? { [label.version]: 1 });
  const total = versions.reduce((sum, [, share]) => sum + share, 0);
  return new Map(versions.map(([version, share]) => [version, (100 * share) / total]));
}

const percent = (share) => `${Number(share.toPrecision(4))} %`;

/** Describe the labels of a model: `canary 1 (90 %), 2 (10 %); stable 1, shadow 2`. */
export function describeLabels(labels) {
  return Object.entries(labels ?? {}).map(([name, label]) => {
    const versions = [...shares(label)].map(([version, share]) => (share < 100 ? `${version} (${percent(share)})` : version));
    return `${name} ${versions.join(", ")}${label.shadow ? `, shadow ${label.shadow.version}` : ""}`;
  }).join("; ");
}

/** Describe the labels that mean a version: `canary 10 %, stable`. */
export function describeVersion(labels, version) {
  return Object.entries(labels ?? {}).flatMap(([name, label]) => {
    const share = shares(label).get(version);
    if (share !== undefined) return [share < 100 ? `${name} ${percent(share)}` : name];
    return label.shadow?.version === version ? [`shadow of ${name}`] : [];
  }).join(", ");
}
