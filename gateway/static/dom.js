// Elements are made here, and their words are always text: a model's name or answer is never markup.

export const $ = (id) => document.getElementById(id);

/** An element with attributes (`on…` listens, `class`, `text`) and children; null children are left out. */
export function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "text") made.textContent = value;
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

export function svg(tag, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

/** Only what is another text: the screen reader and the selection are left alone. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** A line above a view, with a button; or, without a text, no line. */
export function notice(element, text = "", label = "", action = null) {
  if (element.dataset.text === text) return;
  element.dataset.text = text;
  element.hidden = !text;
  element.replaceChildren(text);
  if (action) element.append(" ", el("button", { type: "button", text: label, onclick: action }));
}

/**
 * Rows of a table's body, kept as long as their key is: the focus stays where it is.
 * A cell is a text, `{text, class}`, or an element that stays the same.
 */
export function fill(body, items, keyOf, cellsOf) {
  const known = new Map([...body.rows].map((row) => [row.dataset.key, row]));
  items.forEach((item, at) => {
    const key = keyOf(item);
    const row = known.get(key) ?? el("tr", { "data-key": key });
    known.delete(key);
    cellsOf(item).forEach((cell, column) => show(row, column, cell));
    if (body.rows[at] !== row) body.insertBefore(row, body.rows[at] ?? null);
  });
  for (const row of known.values()) row.remove();
}

function show(row, column, cell) {
  const wanted = cell instanceof Element ? { element: cell } : typeof cell === "object" ? cell : { text: cell };
  const at = row.cells[column] ?? row.appendChild(el(column ? "td" : "th", column ? {} : { scope: "row" }));
  if (wanted.element) {
    if (at.firstChild !== wanted.element) at.replaceChildren(wanted.element);
    return;
  }
  say(at, wanted.text ?? "");
  at.className = wanted.class ?? "";
}
