// DOM helpers. Strings become text, never markup, because model names and outputs are untrusted.

export const $ = (id) => document.getElementById(id);

/** Create an element with attributes (`on…` adds a listener, `text` sets the text). Omits null children. */
export function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "text") element.textContent = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

export function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

export const isMac = () => /Mac|iPhone|iPad/.test(navigator.platform);

const ICONS = {
  undo: "M6 3 3 6l3 3M3 6h6.5a3.5 3.5 0 0 1 0 7H6",
  clear: "m4 4 8 8m0-8-8 8",
  save: "M8 2.5V10m-3-3 3 3 3-3M3 13.5h10",
  invert: "M8 2.5a5.5 5.5 0 1 0 0 11zM8 2.5a5.5 5.5 0 0 1 0 11",
  upload: "M8 11V3m-3 3 3-3 3 3M3 11v2h10v-2",
  camera: "M2 5.5h2.5l1-1.5h5l1 1.5H14v7.5H2zM8 11a2 2 0 1 0 0-4 2 2 0 0 0 0 4",
  replace: "M3 6.5a5 5 0 0 1 9-1.5l1 1.5m0-3.5v3.5H9.5M13 9.5a5 5 0 0 1-9 1.5l-1-1.5m0 3.5V9.5h3.5",
  alert: "M8 2 1.5 13.5h13zM8 6.5v3m0 2v.01",
};

/** Create an icon, which screen readers ignore. */
export const icon = (name) =>
  svg("svg", { class: "icon", viewBox: "0 0 16 16", "aria-hidden": "true" }, svg("path", { d: ICONS[name] }));

/** Create a button with an icon, and a text that narrow screens hide. */
export const iconButton = (name, label, onclick, attributes = {}) =>
  el("button", { type: "button", class: "ghost", title: label, "aria-label": label, onclick, ...attributes }, icon(name), el("span", { class: "wide", text: label }));

/** Set the text only if it differs, so that screen readers and the selection are not disturbed. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Copy the text of an element, or select it where the clipboard cannot be used, as on pages without TLS. */
export async function copyText(element, status) {
  try {
    await navigator.clipboard.writeText(element.textContent);
    setText(status, "copied");
  } catch {
    getSelection().selectAllChildren(element);
    setText(status, "selected; use the keyboard to copy");
  }
}

/** Render a command with a button that copies it. */
export function renderCommand(command) {
  const code = el("pre", { tabindex: "0", text: command });
  const status = el("span", { class: "small", role: "status" });
  return el("div", { class: "command" }, code, el("div", { class: "line" },
    el("button", { type: "button", text: "Copy", "aria-label": `Copy ${command.split("\n")[0]}`, onclick: () => copyText(code, status) }), status));
}

/** Render what a view shows while it has nothing: a sentence, a command, and a link. */
export const renderEmpty = (heading, sentence, ...rest) =>
  el("div", { class: "card empty" }, el("h3", { text: heading }), el("p", { class: "quiet", text: sentence }), ...rest);

/** Show a notice above a view, optionally with links and buttons. An empty text hides it. */
export function showNotice(element, text = "", ...remedies) {
  if (element.dataset.text === text) return;
  element.dataset.text = text;
  element.hidden = !text;
  element.replaceChildren(text, ...remedies);
}

/** Update the children of an element, one for each item. Children with the same key are reused, which keeps the focus. */
export function updateChildren(parent, items, keyOf, update) {
  const children = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  items.forEach((item, index) => {
    const key = keyOf(item);
    const child = children.get(key) ?? el("div", { "data-key": key });
    children.delete(key);
    update(item, child);
    if (parent.children[index] !== child) parent.insertBefore(child, parent.children[index] ?? null);
  });
  for (const child of children.values()) child.remove();
}

/**
 * Update the rows of a table's body. Rows with the same key are reused, which keeps the focus.
 * A cell is a text, `{text, class}` or an element.
 */
export function updateRows(body, items, keyOf, cellsOf) {
  const rows = new Map([...body.rows].map((row) => [row.dataset.key, row]));
  items.forEach((item, index) => {
    const key = keyOf(item);
    const row = rows.get(key) ?? el("tr", { "data-key": key });
    rows.delete(key);
    cellsOf(item).forEach((cell, column) => setCell(row, column, cell));
    if (body.rows[index] !== row) body.insertBefore(row, body.rows[index] ?? null);
  });
  for (const row of rows.values()) row.remove();
}

function setCell(row, column, cell) {
  const content = cell instanceof Element ? { element: cell } : typeof cell === "object" ? cell : { text: cell };
  const target = row.cells[column] ?? row.appendChild(el(column ? "td" : "th", column ? {} : { scope: "row" }));
  if (content.element) {
    if (target.firstChild !== content.element) target.replaceChildren(content.element);
    return;
  }
  setText(target, content.text ?? "");
  target.className = content.class ?? "";
}

const SIZE_UNITS = ["bytes", "KiB", "MiB", "GiB"];

/** Format a number of bytes: `12.3 MiB`. */
export function formatSize(bytes) {
  const power = Math.min(Math.floor(Math.log2(Math.max(bytes, 1)) / 10), SIZE_UNITS.length - 1);
  return `${power ? (bytes / 1024 ** power).toFixed(1) : Math.round(bytes)} ${SIZE_UNITS[power]}`;
}

/** Ask before an action that affects all users. Resolves to null, or to `{isChecked}` of the checkbox for the option. */
export function confirmAction({ heading, text, action, option = "" }) {
  const dialog = $("confirm-dialog");
  setText($("confirm-heading"), heading);
  setText($("confirm-text"), text);
  setText($("confirm-button"), action);
  setText($("confirm-option").querySelector("span"), option);
  $("confirm-option").hidden = !option;
  $("confirm-checkbox").checked = false;
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    $("confirm-cancel").onclick = () => dialog.close();
    $("confirm-form").onsubmit = (event) => {
      event.preventDefault();
      dialog.close("confirmed");
    };
    dialog.onclose = () => resolve(dialog.returnValue ? { isChecked: $("confirm-checkbox").checked } : null);
  });
}

// Short messages at the edge of the screen, wherever the reader is on the page.

const SHOWN_MS = 6000;

/** Show a message for six seconds; one that reports a failure stays until it is closed. */
export function showToast(text, isFailure = false) {
  const toast = el("div", { class: isFailure ? "toast bad" : "toast" }, el("span", { text }));
  toast.append(el("button", { type: "button", class: "ghost", text: "×", "aria-label": "Close", onclick: () => toast.remove() }));
  $("toasts").append(toast);
  if (!isFailure) setTimeout(() => toast.remove(), SHOWN_MS);
}

export const removeToasts = () => $("toasts").replaceChildren();
