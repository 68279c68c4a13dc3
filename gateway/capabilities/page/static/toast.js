// Short messages at the edge of the screen, wherever the reader is on the page.

import { $, el } from "./dom.js";

const SHOWN_MS = 6000;

/** Show a message for six seconds; one that reports a failure stays until it is closed. */
export function showToast(text, isFailure = false) {
  const toast = el("div", { class: isFailure ? "toast bad" : "toast" }, el("span", { text }));
  toast.append(el("button", { type: "button", class: "ghost", text: "×", "aria-label": "Close", onclick: () => toast.remove() }));
  $("toasts").append(toast);
  if (!isFailure) setTimeout(() => toast.remove(), SHOWN_MS);
}

export const removeToasts = () => $("toasts").replaceChildren();
