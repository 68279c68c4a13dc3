// What a view shows of a model that is not loaded, or if there is no model.

import * as api from "./api.js";
import { el, setText } from "./dom.js";
import { errorMessage, toSentence } from "./errors.js";
import { withKey } from "./key.js";
import { findFailure } from "./models.js";

/** Render the model of `GET /v1/models` with its last error and a button. `onLoaded` is called when it is loaded. */
export function renderUnloaded(model, onLoaded) {
  const error = findFailure(model);
  const status = el("p", { role: "status" });
  const load = el("button", { type: "button", class: "main", text: "Load", "aria-label": `Load ${model.name}` });
  load.addEventListener("click", async () => {
    load.disabled = true;
    status.className = "quiet";
    setText(status, "Loading…");
    try {
      await withKey(() => api.changeModel(model.name, "load"));
      await onLoaded();
    } catch (failure) {
      load.disabled = false;
      status.className = "bad";
      setText(status, errorMessage(failure));
    }
  });
  // The states on the replicas are listed for keys that may load models.
  const remedy = model.replicas ? load : el("p", { text: "Ask an administrator of this gateway to load it, or choose another model." });
  return el("div", { class: "card unloaded" },
    el("p", {}, el("span", { class: error ? "pill bad" : "pill", text: "Not loaded" })),
    error ? el("p", { class: "bad long", text: toSentence(error) }) : null,
    remedy, status);
}

const COMMANDS = [
  ["Upload from a terminal", "triton-gateway push model.onnx"],
  ["Start the demonstration", "triton-gateway up"],
];

/** Render the ways to the first model. */
export function renderFirstSteps() {
  const card = (heading, ...children) => el("div", { class: "card first-step" }, el("h3", { text: heading }), ...children);
  const copy = (command) => el("button", { type: "button", text: "Copy", "aria-label": `Copy ${command}`, onclick: () => navigator.clipboard?.writeText(command) });
  return el("div", { class: "first-steps" },
    card("Upload a file", el("p", { class: "quiet", text: "ONNX, TensorRT, OpenVINO and PyTorch, or an archive of a model folder." }),
      el("a", { class: "button", href: "#fleet", text: "Choose a file" })),
    ...COMMANDS.map(([heading, command]) => card(heading, el("code", { text: command }), copy(command))));
}
