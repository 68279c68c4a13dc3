// Parameters of a request and its place in a sequence, which most requests do not need.

import { el, setText } from "./dom.js";

export class RequestOptions {
  constructor(onChange) {
    this.parameters = el("textarea", { id: "parameters", class: "values", rows: 2, spellcheck: "false", "aria-describedby": "parameters-error", oninput: onChange });
    this.error = el("p", { class: "bad", role: "alert", id: "parameters-error" });
    this.sequence = el("input", { type: "text", id: "sequence-id", autocomplete: "off", spellcheck: "false", oninput: onChange });
    this.isFirst = el("input", { type: "checkbox", id: "sequence-start", onchange: onChange });
    this.isLast = el("input", { type: "checkbox", id: "sequence-end", onchange: onChange });
    this.element = el("div", { id: "request-options", class: "advanced", hidden: true },
      el("label", { for: "parameters", text: 'Parameters, as JSON: {"temperature": 0.5}' }), this.parameters, this.error,
      el("div", { class: "line" },
        el("label", { for: "sequence-id", text: "Sequence ID" }), this.sequence,
        el("label", {}, this.isFirst, " starts it"),
        el("label", {}, this.isLast, " ends it")));
    this.button = el("button", { type: "button", class: "ghost", id: "advanced-button", text: "Advanced", "aria-expanded": "false", "aria-controls": this.element.id,
      onclick: () => this.open(this.element.hidden) });
  }

  open(isOpen) {
    this.element.hidden = !isOpen;
    this.button.setAttribute("aria-expanded", String(isOpen));
  }

  /** Return the options of `buildRequest`. Shows and throws an error for parameters that are not JSON. */
  read() {
    setText(this.error, "");
    const parameters = this.parameters.value.trim();
    if (parameters && !isJsonObject(parameters)) {
      this.open(true);
      setText(this.error, 'Parameters are a JSON object, such as {"temperature": 0.5}.');
      throw new Error("invalid parameters");
    }
    const headers = {};
    const places = [this.isFirst.checked ? "start" : "", this.isLast.checked ? "end" : ""].filter(Boolean);
    if (this.sequence.value.trim()) headers["X-Sequence-ID"] = this.sequence.value.trim();
    if (this.sequence.value.trim() && places.length) headers["X-Sequence"] = places.join(", ");
    return { parameters, headers };
  }
}

function isJsonObject(text) {
  try {
    const value = JSON.parse(text);
    return typeof value === "object" && value !== null && !Array.isArray(value);
  } catch {
    return false;
  }
}
