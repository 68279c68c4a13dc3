// Asking for a key.

import { key } from "./api.js";
import { $, say } from "./dom.js";

let settle = null;

export function shown() {
  say($("key-button"), key.get() ? "Key: set" : "Key: none");
}

/** Ask for a key, and say why; whether there is another one now. One question at a time. */
export function ask(why = "") {
  if (settle) return Promise.resolve(false);
  say($("key-reason"), why);
  say($("key-wrong"), "");
  $("key-reason").hidden = !why;
  $("key-forget").hidden = !key.get();
  $("key").value = "";
  $("key-dialog").showModal();
  return new Promise((resolve) => (settle = resolve));
}

function close(changed) {
  const answer = settle;
  settle = null;
  $("key-dialog").close();
  shown();
  answer?.(changed);
}

export function listen(changed) {
  $("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    const typed = $("key").value.trim();
    if (!/^[\x21-\x7e]+$/.test(typed)) {
      say($("key-wrong"), "A key is one word of letters, digits and signs.");
      return;
    }
    key.set(typed);
    close(true);
  });
  $("key-forget").addEventListener("click", () => {
    key.set("");
    close(true);
  });
  $("key-cancel").addEventListener("click", () => close(false));
  $("key-dialog").addEventListener("cancel", (event) => {
    event.preventDefault();
    close(false);
  });
  $("key-button").addEventListener("click", async () => (await ask()) && changed());
  shown();
}

/** Do it; and where a key is missing or not enough, ask for one and do it again. */
export async function withKey(action) {
  for (;;) {
    try {
      return await action();
    } catch (error) {
      if (!error.wantsKey || !(await ask(error.message))) throw error;
    }
  }
}
