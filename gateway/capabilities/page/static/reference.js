// The API of one model: its address, the bodies that it takes, its inputs and outputs, and its errors.

import * as api from "./api.js";
import { $, copyText, el, showNotice } from "./dom.js";
import { describeInput, formatShape, placeholderValue } from "./inputs.js";
import * as models from "./models.js";
import { LANGUAGES, buildRequest, renderCode } from "./request.js";

const LANGUAGE_NAMES = { curl: "curl", python: "Python", javascript: "JavaScript" };
// What a client of any model must expect, with what helps.
const ERRORS = [
  ["400 MALFORMED_REQUEST", "The body cannot be read: fix the request."],
  ["401 UNAUTHENTICATED, 403 FORBIDDEN", "A key is missing, unknown, or may not use this model."],
  ["404 MODEL_NOT_FOUND", "No model or version has this name."],
  ["413 TOO_LARGE, 415 UNSUPPORTED_BODY", "The body is too large, or of a type that the inputs do not take."],
  ["422 DOES_NOT_FIT_MODEL", "A value does not fit its input; the message names it."],
  ["422 REFUSED_BY_MODEL", "The model itself refuses the values."],
  ["429 OVERLOADED, 503 NO_REPLICA", "Too many requests, or no replica: try again after the seconds in Retry-After."],
  ["504 DEADLINE_PASSED", "The answer took longer than the deadline."],
];
let shownModel = "";
let language = "curl";
let bodyType = "";

export function start() {}

export function reset() {
  shownModel = "";
  $("api-body").replaceChildren();
}

export async function show(requested) {
  try {
    const model = await models.open(requested, $("api-view-notice"));
    if (!model) return reset();
    const description = await api.withKey(() => api.describeModel(model.name));
    showNotice($("api-view-notice"));
    models.showHead(description);
    if (model.name !== shownModel) bodyType = "";
    shownModel = model.name;
    draw(description);
  } catch (error) {
    reset();
    api.showErrorNotice($("api-view-notice"), error);
  }
}

/** Return the ways to send the inputs, the natural one first: `[label, values]`. */
function listBodies({ inputs }) {
  const required = inputs.filter((tensor) => !tensor.optional);
  const used = required.length ? required : inputs.slice(0, 1);
  const valueOf = (tensor, method, methods) => placeholderValue({ tensor, method, methods });
  const asJson = used.map((tensor) => [tensor, jsonValue(tensor, valueOf)]);
  const [only] = used;
  if (used.length !== 1) return [["application/json", asJson]];
  const type = only.content_type ?? "";
  if (type.startsWith("image/") || only.image) return [["image/*", [[only, valueOf(only, "file", ["draw"])]]], ["application/json", asJson]];
  if (only.datatype === "BYTES") return [[type || "text/plain", [[only, valueOf(only, "text", ["text"])]]], ["application/json", asJson]];
  return [["application/json", asJson], ["application/x-npy", [[only, valueOf(only, "file", [])]]]];
}

function jsonValue(tensor, valueOf) {
  if ((tensor.content_type ?? "").startsWith("image/")) return { json: '{"b64": "iVBORw0KGgo…"}' };
  const { text, json } = valueOf(tensor, tensor.datatype === "BYTES" ? "text" : "values", []);
  return { json: json ?? JSON.stringify(text) };
}

function renderChoice(label, choices, chosen, onChoose) {
  const radios = choices.map(([value, text]) => el("label", {},
    el("input", { type: "radio", name: label, value, checked: value === chosen, onchange: () => onChoose(value) }), text));
  return el("div", { class: "segmented", role: "radiogroup", "aria-label": label }, ...radios);
}

function draw(description) {
  const bodies = listBodies(description);
  // The Python client chooses the body itself.
  const choices = language === "python" ? bodies.slice(0, 1) : bodies;
  const [label, values] = choices.find(([type]) => type === bodyType) ?? choices[0];
  const request = buildRequest(description, "", values);
  const code = LANGUAGES[language](request, Boolean(api.key.get()));
  const name = encodeURIComponent(description.name);
  const status = el("span", { class: "small", role: "status" });
  $("api-body").replaceChildren(
    el("div", { class: "card code" },
      el("div", { class: "code-head" },
        el("h3", {}, el("span", { class: "pill", text: "POST" }), " ", el("code", { text: `/v1/models/${name}/infer` })),
        choices.length > 1 ? renderChoice("Body", choices.map(([type]) => [type, type]), label, (type) => { bodyType = type; draw(description); }) : null,
        status,
        renderChoice("Language", Object.entries(LANGUAGE_NAMES), language, (chosen) => { language = chosen; draw(description); }),
        el("button", { type: "button", text: "Copy", onclick: () => copyText($("api-code"), status) })),
      el("pre", { tabindex: "0", id: "api-code", "aria-label": "Example request" }, ...renderCode(code, language))),
    renderTensors("Inputs", description.inputs, (tensor) => describeInput(tensor) + (tensor.optional ? ", optional" : "")),
    renderTensors("Outputs", description.outputs, (tensor) => tensor.content_type ?? ""),
    renderTable("Errors", ["Status and code", "Meaning"], ERRORS.map(([code, meaning]) => [el("code", { text: code }), meaning])),
    el("p", { class: "panel" }, el("a", { href: `docs?model=${name}`, text: "Open the full reference" })));
}

const renderTensors = (heading, tensors, describe) =>
  renderTable(heading, ["Name", "Datatype and shape", "Meaning"], tensors.map((tensor) => [tensor.name, el("code", { text: formatShape(tensor) }), describe(tensor)]));

function renderTable(heading, columns, rows) {
  return el("div", { class: "card panel" }, el("h3", { text: heading }),
    el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": heading },
      el("table", {},
        el("thead", {}, el("tr", {}, ...columns.map((text) => el("th", { scope: "col", text })))),
        el("tbody", {}, ...rows.map(([first, ...others]) => el("tr", {}, el("th", { scope: "row" }, first), ...others.map((cell) => el("td", { class: "long" }, cell))))))));
}
