// The dialog that prompts for the API key.

import { key } from "./api.js";
import { $, setText } from "./dom.js";
import { toSentence } from "./errors.js";

let resolvePrompt = null;

/** The API's advice about headers is for programs. */
const explain = (message) => toSentence(message.split(/[:;] /)[0]);

/** Who needs no key sees nothing of keys. */
function updateButton() {
  if (key.get() || resolvePrompt) $("key-button").hidden = false;
  setText($("key-button"), key.get() ? "Key: set" : "Key: none");
}

/** Prompt for a key. Resolves to true if the key was changed. Only one prompt can be open. */
export function promptForKey(message = "") {
  if (resolvePrompt) return Promise.resolve(false);
  setText($("key-reason"), explain(message));
  setText($("key-error"), "");
  $("key-reason").hidden = !message;
  $("key-remove").hidden = !key.get();
  $("key").value = "";
  $("key-dialog").showModal();
  return new Promise((resolve) => {
    resolvePrompt = resolve;
    updateButton();
  });
}

function close(isChanged) {
  const resolve = resolvePrompt;
  resolvePrompt = null;
  $("key-dialog").close();
  updateButton();
  resolve?.(isChanged);
}

export function start(onChange) {
  $("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    const entered = $("key").value.trim();
    if (!/^[\x21-\x7e]+$/.test(entered)) {
      setText($("key-error"), "A key consists of letters, digits and punctuation, without spaces.");
      return;
    }
    key.set(entered);
    close(true);
  });
  $("key-remove").addEventListener("click", () => {
    key.set("");
    close(true);
  });
  $("key-cancel").addEventListener("click", () => close(false));
  $("key-dialog").addEventListener("cancel", (event) => {
    event.preventDefault();
    close(false);
  });
  $("key-button").addEventListener("click", async () => (await promptForKey()) && onChange());
  updateButton();
}

/** Run the action. If the API rejects the key, prompt for another one and try again. */
export async function withKey(action) {
  for (;;) {
    try {
      return await action();
    } catch (error) {
      if (!error.needsKey || !(await promptForKey(error.message))) throw error;
    }
  }
}
