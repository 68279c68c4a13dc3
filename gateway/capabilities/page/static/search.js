// The search: models, and the headings and texts of the guide. It is a dialog, on the page and on those of the guide.

import * as api from "./api.js";
import { $, el, isMac, setText } from "./dom.js";

const MAX_MODELS = 6;
const MAX_SECTIONS = 12;
const EXCERPT = 140; // characters
const BEFORE = 40; // of them before the words
let sections = null; // of the guide, when the search was opened first
let models = [];
let active = 0;

const input = el("input", { type: "search", "aria-label": "Search models and the guide", placeholder: "Search models and the guide", autocomplete: "off", spellcheck: "false",
  role: "combobox", "aria-expanded": "true", "aria-controls": "search-results", "aria-autocomplete": "list" });
const results = el("div", { id: "search-results", role: "listbox", "aria-label": "Results" });
const status = el("p", { class: "quiet", role: "status" });
const dialog = el("dialog", { id: "search-dialog", "aria-label": "Search" }, input, results, status);

export function start() {
  document.body.append(dialog);
  setText($("search-keys"), isMac() ? "⌘ K" : "Ctrl K");
  $("search-button").addEventListener("click", open);
  input.addEventListener("input", draw);
  input.addEventListener("keydown", handleKey);
  results.addEventListener("click", () => dialog.close());
  dialog.addEventListener("click", ({ target }) => { if (target === dialog) dialog.close(); });
  document.addEventListener("keydown", (event) => {
    if (event.key !== "k" || !(event.ctrlKey || event.metaKey) || document.querySelector("dialog[open]")) return;
    event.preventDefault();
    open();
  });
}

async function open() {
  dialog.showModal();
  input.select();
  draw();
  // Without the right to list models, there are those of the guide.
  [sections, models] = await Promise.all([sections ?? readSections(), api.listModels().catch(() => [])]);
  draw();
}

async function readSections() {
  const response = await fetch(`${api.ROOT}guide/search.json`);
  return response.ok ? Object.entries(await response.json()).flatMap(splitDocument) : [];
}

/** Split a document at its headings, as the guide makes their anchors. */
function splitDocument([name, markdown]) {
  const found = [];
  let isCode = false;
  for (const line of markdown.split("\n")) {
    if (line.startsWith("```")) isCode = !isCode;
    const [, heading] = (!isCode && /^#{1,4} (.*)/.exec(line)) || [];
    if (heading) found.push({ name, title: found[0]?.heading ?? plain(heading), heading: plain(heading), anchor: found.length ? toAnchor(heading) : "", lines: [] });
    else found.at(-1)?.lines.push(line);
  }
  return found.map(({ lines, ...section }) => ({ ...section, text: plain(lines.join(" ")) }));
}

const toAnchor = (heading) => heading.toLowerCase().replace(/[^\p{L}\p{N}_\- ]/gu, "").replaceAll(" ", "-");

/** Return the words of Markdown without its marks. */
const plain = (markdown) => markdown.replace(/!?\[([^\]]*)\]\([^)]*\)/g, "$1").replace(/`|\*\*(?=\S)|[|]|^\s*[-#>*]+\s/gm, " ").replace(/-{3,}|\s+/g, " ").trim();

/** Return how well a section answers: its heading counts most, then its document's, then its text. 0 if a word is missing. */
export function rateSection({ heading, title, text }, words) {
  const [inHeading, inTitle, inText] = [heading, title, text].map((each) => each.toLowerCase());
  const rates = words.map((word) => (inHeading.includes(word) ? 8 : 0) + (inTitle.includes(word) ? 4 : 0) + (inText.includes(word) ? 2 : 0));
  if (rates.includes(0)) return 0;
  const phrase = words.join(" ");
  return rates.reduce((sum, rate) => sum + rate, 0) + (inHeading.includes(phrase) ? 12 : 0) + (inText.includes(phrase) ? 4 : 0);
}

/** Return the models whose names or titles have the words: pipelines and models for people first, steps of pipelines last. */
export function findModels(listed, words) {
  const steps = new Set(listed.flatMap((model) => model.steps ?? []));
  const place = (model) => Math.min(...words.map((word) => {
    const places = [model.name, model.title ?? ""].map((name) => name.toLowerCase().indexOf(word)).filter((each) => each >= 0);
    return places.length ? Math.sign(Math.min(...places)) : -1;
  }));
  return listed.filter((model) => !model.hidden && place(model) >= 0)
    .sort((a, b) => Number(steps.has(a.name)) - Number(steps.has(b.name)) || place(a) - place(b));
}

function draw() {
  const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
  const foundModels = (words.length ? findModels(models, words) : []).slice(0, MAX_MODELS);
  const rated = (words.length ? sections ?? [] : []).map((section) => [section, rateSection(section, words)]).filter(([, rate]) => rate);
  const foundSections = rated.sort(([, a], [, b]) => b - a).slice(0, MAX_SECTIONS).map(([section]) => section);
  results.replaceChildren(
    ...renderGroup("Models", foundModels.map((model) => renderOption(`${api.ROOT}#try/${encodeURIComponent(model.name)}`, [model.title || model.name], model.title ? model.name : "", words))),
    ...renderGroup("Guide", foundSections.map(({ name, anchor, title, heading, text }) =>
      renderOption(`${api.ROOT}guide/${name}${anchor && `#${anchor}`}`, title === heading ? [title] : [title, heading], text, words))));
  results.hidden = !results.childElementCount;
  setText(status, !words.length ? "Models by name, and everything in the guide." : results.hidden ? "Nothing was found. Try other words." : "");
  activate(0);
}

const renderGroup = (label, options) => (options.length
  ? [el("div", { role: "group", "aria-label": label }, el("div", { class: "group-name", role: "presentation", text: label }), ...options)] : []);

const renderOption = (href, names, text, words) => el("a", { role: "option", class: "found", href, "aria-selected": "false", tabindex: "-1" },
  el("span", { class: "name" }, ...mark(names.join(" › "), words)), text ? el("span", { class: "small" }, ...mark(cutOut(text, words), words)) : null);

/** Return the part of a text around the first of the words. */
function cutOut(text, words) {
  const places = words.map((word) => text.toLowerCase().indexOf(word)).filter((place) => place >= 0);
  const start = Math.max((places.length ? Math.min(...places) : 0) - BEFORE, 0);
  return `${start ? "…" : ""}${text.slice(start, start + EXCERPT)}${text.length > start + EXCERPT ? "…" : ""}`;
}

/** Return the text with the words marked. */
function mark(text, words) {
  const pattern = new RegExp(`(${words.map((word) => word.replace(/[.*+?^${}()|[\]\\]/g, "\\$&")).join("|")})`, "i");
  return text.split(pattern).map((part, index) => (index % 2 ? el("mark", { text: part }) : part));
}

const listOptions = () => [...results.querySelectorAll("[role=option]")];

function activate(index) {
  const options = listOptions();
  active = options.length ? (index + options.length) % options.length : 0;
  options.forEach((option, place) => {
    option.id = `found-${place}`;
    option.setAttribute("aria-selected", String(place === active));
  });
  options[active]?.scrollIntoView({ block: "nearest" });
  if (options.length) input.setAttribute("aria-activedescendant", options[active].id);
  else input.removeAttribute("aria-activedescendant");
}

function handleKey(event) {
  const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (step) activate(active + step);
  else if (event.key === "Enter") listOptions()[active]?.click();
  else return;
  event.preventDefault();
}
