// A search field with its matches in a list below it (the combobox pattern of WAI-ARIA).

import { el } from "./dom.js";

const MAX_MATCHES = 50;

/** `findMatches(query)` returns `[{value, text}]`; `onChoose` gets the value of the chosen one. */
export function attachMatches(input, list, findMatches, onChoose) {
  let active = -1;

  const close = () => {
    active = -1;
    list.hidden = true;
    list.replaceChildren();
    input.setAttribute("aria-expanded", "false");
    input.removeAttribute("aria-activedescendant");
  };
  const choose = (value) => {
    input.value = "";
    close();
    onChoose(value);
  };
  const options = () => [...list.querySelectorAll("[data-value]")];
  const activate = (index) => {
    active = index;
    options().forEach((option, number) => option.setAttribute("aria-selected", String(number === active)));
    const option = options()[active];
    if (!option) return;
    input.setAttribute("aria-activedescendant", option.id);
    option.scrollIntoView({ block: "nearest" });
  };
  const open = () => {
    const query = input.value.trim().toLowerCase();
    if (!query) return close();
    const matches = findMatches(query).slice(0, MAX_MATCHES);
    const items = matches.map(({ value, text }, index) =>
      el("li", { role: "option", id: `${list.id}-${index}`, "data-value": value, "aria-selected": "false", text, onclick: () => choose(value) }));
    if (!items.length) items.push(el("li", { role: "option", "aria-disabled": "true", class: "quiet", text: `Nothing matches “${input.value.trim()}”.` }));
    list.replaceChildren(...items);
    list.hidden = false;
    input.setAttribute("aria-expanded", "true");
    activate(matches.length ? 0 : -1);
  };

  input.addEventListener("input", open);
  input.addEventListener("focus", open);
  input.addEventListener("blur", close);
  list.addEventListener("mousedown", (event) => event.preventDefault()); // the field keeps the focus until the click
  input.addEventListener("keydown", (event) => {
    const count = options().length;
    if (event.key === "Escape" && input.value) {
      input.value = "";
      close();
    } else if (event.key === "Enter" && options()[active]) choose(options()[active].dataset.value);
    else if (event.key === "ArrowDown" && count) activate((active + 1) % count);
    else if (event.key === "ArrowUp" && count) activate((active - 1 + count) % count);
    else return;
    event.preventDefault();
  });
}
