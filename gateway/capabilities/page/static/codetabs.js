// The tabs with the form's request in code, and the button that copies it.

import { key } from "./api.js";
import { splitTokens, writeCurl, writeJavaScript, writePython } from "./code.js";
import { $, el, setText } from "./dom.js";

const LANGUAGES = { curl: writeCurl, python: writePython, javascript: writeJavaScript };
const NAMES = Object.keys(LANGUAGES);
let selected = "curl";
let shown = { requests: [], note: "" };

export function start() {
  for (const name of NAMES) {
    $(`tab-${name}`).addEventListener("click", () => select(name));
    $(`tab-${name}`).addEventListener("keydown", handleKey);
  }
  $("curl-copy").addEventListener("click", copy);
  $("code-all").addEventListener("click", showAll);
  select(selected);
}

function select(name) {
  selected = name;
  for (const each of NAMES) {
    $(`tab-${each}`).setAttribute("aria-selected", String(each === name));
    $(`tab-${each}`).tabIndex = each === name ? 0 : -1;
  }
  $("curl").setAttribute("aria-labelledby", `tab-${name}`);
  update();
}

function handleKey(event) {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!step) return;
  const next = NAMES[(NAMES.indexOf(selected) + step + NAMES.length) % NAMES.length];
  select(next);
  $(`tab-${next}`).focus();
}

/** Show these requests; a note says if their values are placeholders. */
export function showCode(requests, note = "") {
  shown = { requests, note };
  update();
}

/** A phone shows the first lines. */
function showAll() {
  const isShort = $("code-all").closest(".code").classList.toggle("short");
  $("code-all").setAttribute("aria-expanded", String(!isShort));
  setText($("code-all"), isShort ? "Show all" : "Show less");
}

function update() {
  const write = LANGUAGES[selected];
  const code = shown.requests.map((request) => write(request, Boolean(key.get()))).join("\n");
  if ($("curl").textContent !== code) $("curl").replaceChildren(...renderCode(code, selected));
  setText($("code-note"), shown.note);
  setText($("curl-copied"), "");
}

async function copy() {
  try {
    await navigator.clipboard.writeText($("curl").textContent);
    setText($("curl-copied"), "copied");
  } catch {
    getSelection().selectAllChildren($("curl")); // pages without TLS cannot access the clipboard
    setText($("curl-copied"), "selected; use the keyboard to copy");
  }
}

export const renderCode = (code, language) =>
  splitTokens(code, language).map(([text, kind]) => (kind ? el("span", { class: `token-${kind}`, text }) : text));
