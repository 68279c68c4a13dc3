// Inference requests, and the equivalent curl commands.

const EVENTS = "text/event-stream";
const JSON_TYPE = "application/json";
const KEY_VARIABLE = "$KEY";

/** Quote a text for a POSIX shell. */
const shellQuote = (text) => (/^[\w./:=@%+,-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`);
const header = (name, value) => `-H ${shellQuote(`${name}: ${value}`)}`;
const CLASS_COUNT = 5; // of an output with labels
const fileName = (file) => file.name || "file";

/**
 * @param {object} description of the model, as returned by the API
 * @param {Array<[object, object]>} values each input's tensor and value
 */
export function buildRequest(description, path, values, hasKey) {
  const required = description.inputs.filter((tensor) => !tensor.optional);
  const isSingle = values.length === 1 && required.length === 1 && values[0][0] === required[0];
  const buildBody = isSingle && !("json" in values[0][1]) ? singleBody : values.some(([, value]) => value.file) ? formBody : jsonBody;
  const { body, type, curlArguments } = buildBody(values);
  const query = description.outputs.some((tensor) => tensor.labels) ? `?classification=${CLASS_COUNT}` : "";
  const headers = { Accept: description.decoupled ? EVENTS : JSON_TYPE };
  if (type) headers["Content-Type"] = type;
  const command = [
    description.decoupled ? "curl -sN" : "curl -s",
    ...curlArguments,
    type ? header("Content-Type", type) : null,
    description.decoupled ? header("Accept", EVENTS) : null,
    hasKey ? `-H "Authorization: Bearer ${KEY_VARIABLE}"` : null, // the key itself is never shown
    shellQuote(`${location.origin}${path}/infer${query}`),
  ];
  return {
    url: `${path}/infer${query}`,
    options: { method: "POST", headers, body },
    curl: command.filter(Boolean).join(" "),
  };
}

/** Send a single value as the body itself. */
function singleBody([[, value]]) {
  if (value.file) {
    const type = value.file.type || "application/octet-stream";
    return { body: value.file, type, curlArguments: [`--data-binary ${shellQuote(`@${fileName(value.file)}`)}`] };
  }
  return { body: value.text, type: "text/plain", curlArguments: [`--data-raw ${shellQuote(value.text)}`] };
}

function jsonBody(values) {
  const inputs = values.map(([tensor, value]) => `${JSON.stringify(tensor.name)}: ${value.json ?? JSON.stringify(value.text)}`);
  const body = `{"inputs": {${inputs.join(", ")}}}`;
  return { body, type: JSON_TYPE, curlArguments: [`--data-raw ${shellQuote(body)}`] };
}

/** Send a form, if one of several values is a file. The browser sets the Content-Type with its boundary. */
function formBody(values) {
  const body = new FormData();
  const curlArguments = values.map(([{ name }, value]) => {
    if (value.file) {
      body.append(name, value.file, fileName(value.file));
      return `-F ${shellQuote(`${name}=@${fileName(value.file)}`)}`;
    }
    if (value.text !== undefined) {
      body.append(name, value.text);
      return `--form-string ${shellQuote(`${name}=${value.text}`)}`;
    }
    body.append(name, new Blob([value.json], { type: JSON_TYPE }), "values.json");
    return `-F ${shellQuote(`${name}=${value.json};type=${JSON_TYPE}`)}`;
  });
  return { body, type: "", curlArguments };
}
