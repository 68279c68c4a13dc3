// What was given becomes a request, and the curl line that sends the same.

const EVENTS = "text/event-stream";
const JSON_TYPE = "application/json";
const PROMPT = "$KEY";

/** For a shell: nothing in it means anything. */
const quoted = (text) => (/^[\w./:=@%+,-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`);
const header = (name, value) => `-H ${quoted(`${name}: ${value}`)}`;
const fileName = (file) => file.name || "file";

/**
 * @param {object} description of the model, from the API
 * @param {Array<[object, object]>} given each input's tensor and value
 */
export function request(description, path, given, hasKey) {
  const required = description.inputs.filter((tensor) => !tensor.optional);
  const alone = given.length === 1 && required.length === 1 && given[0][0] === required[0];
  const form = alone && !("json" in given[0][1]) ? single : given.some(([, value]) => value.file) ? fields : document_;
  const { body, type, words } = form(given);
  const headers = { Accept: description.decoupled ? EVENTS : JSON_TYPE };
  if (type) headers["Content-Type"] = type;
  const line = [
    description.decoupled ? "curl -sN" : "curl -s",
    ...words,
    type ? header("Content-Type", type) : null,
    description.decoupled ? header("Accept", EVENTS) : null,
    hasKey ? `-H "Authorization: Bearer ${PROMPT}"` : null, // the key itself stands nowhere
    quoted(`${location.origin}${path}/infer`),
  ];
  return {
    url: `${path}/infer`,
    options: { method: "POST", headers, body },
    curl: line.filter(Boolean).join(" "),
  };
}

/** The only value as the body. */
function single([[, value]]) {
  if (value.file) {
    const type = value.file.type || "application/octet-stream";
    return { body: value.file, type, words: [`--data-binary ${quoted(`@${fileName(value.file)}`)}`] };
  }
  return { body: value.text, type: "text/plain", words: [`--data-raw ${quoted(value.text)}`] };
}

function document_(given) {
  const inputs = given.map(([tensor, value]) => `${JSON.stringify(tensor.name)}: ${value.json ?? JSON.stringify(value.text)}`);
  const body = `{"inputs": {${inputs.join(", ")}}}`;
  return { body, type: JSON_TYPE, words: [`--data-raw ${quoted(body)}`] };
}

/** A form, where there is a file among several values. The browser names the boundary. */
function fields(given) {
  const body = new FormData();
  const words = given.map(([{ name }, value]) => {
    if (value.file) {
      body.append(name, value.file, fileName(value.file));
      return `-F ${quoted(`${name}=@${fileName(value.file)}`)}`;
    }
    if (value.text !== undefined) {
      body.append(name, value.text);
      return `--form-string ${quoted(`${name}=${value.text}`)}`;
    }
    body.append(name, new Blob([value.json], { type: JSON_TYPE }), "values.json");
    return `-F ${quoted(`${name}=${value.json};type=${JSON_TYPE}`)}`;
  });
  return { body, type: "", words };
}
