// fetch of JavaScript, as in node and in a page: Triton's JSON and binary tensors, and streams.

const targets = process.argv.slice(2);
const row = [...Array(16).keys()];
const input = (name, more = {}) => ({ name, datatype: "INT32", shape: [1, 16], data: row, ...more });
const numbers = { inputs: [input("INPUT0"), input("INPUT1")] };

function mask(text) {
  return text
    .replace(/"MADE":[0-9.]+/g, '"MADE":…')
    .replace(/0x[0-9a-f]+/g, "0x…")
    .replace(/\[request id: [^\]]*\] /g, "");
}

for (let number = 0; number * 3 < targets.length; number++) {
  const [http, , key] = targets.slice(3 * number, 3 * number + 3);
  const headers = { authorization: `Bearer ${key}` };
  const print = (call, outcomes) => console.log(JSON.stringify({ target: number, call, outcomes }));

  // The members that the gateway adds to Triton's errors are no difference to a client.
  function describe(status, text) {
    return text.startsWith('{"error"') ? `${status}: ${JSON.parse(text).error}` : `${status}: ${text}`;
  }

  async function send(call, path, options = {}) {
    const response = await fetch(`http://${http}${path}`, {
      ...options,
      headers: { ...headers, ...options.headers },
    });
    const text = mask(await response.text()).replaceAll(http, "ADDRESS");
    const type = response.headers.get("content-type");
    const length = response.headers.get("inference-header-content-length");
    if (!response.ok) {
      print(call, [describe(response.status, text)]);
    } else if (type?.startsWith("text/event-stream")) {
      const events = text.split("\n\n").filter((event) => event.trim() !== "");
      print(call, [`200 ${type}`, ...events.map((event) => describe("None", event.trim().replace("data: ", "")))]);
    } else {
      print(call, [`200 ${type} ${length}: ${text}`]);
    }
  }
  const post = (call, path, body, more = {}) =>
    send(call, path, { method: "POST", body: typeof body === "string" ? body : JSON.stringify(body), headers: more });

  await send("live", "/v2/health/live");
  await send("ready", "/v2/health/ready");
  await send("server metadata", "/v2");
  await send("model metadata", "/v2/models/simple");
  await send("model config", "/v2/models/simple/config");
  await send("metadata of unknown", "/v2/models/unknown");
  await send("ready of unknown", "/v2/models/unknown/ready");
  await send("metadata of version 9", "/v2/models/simple/versions/9");
  await send("metadata of version x", "/v2/models/simple/versions/x");
  await send("unknown path", "/v2/nothing");
  await send("wrong method", "/v2/models/simple/infer");
  await post("infer", "/v2/models/simple/infer", numbers);
  await post("infer version", "/v2/models/simple/versions/1/infer", numbers);
  await post("infer id", "/v2/models/simple/infer", { id: "mine", ...numbers });
  await post("infer unknown model", "/v2/models/unknown/infer", numbers);
  await post("infer no JSON", "/v2/models/simple/infer", "{");
  await post("infer nothing", "/v2/models/simple/infer", "");
  await post("infer no inputs", "/v2/models/simple/infer", {});
  await post("infer list", "/v2/models/simple/infer", []);
  await post("infer short data", "/v2/models/simple/infer", { inputs: [input("INPUT0", { data: [1] }), input("INPUT1")] });
  await post("infer wrong data", "/v2/models/simple/infer", { inputs: [input("INPUT0", { data: ["a"] }), input("INPUT1")] });
  await post("infer wrong shape", "/v2/models/simple/infer", { inputs: [input("INPUT0", { shape: [1, -16] }), input("INPUT1")] });
  await post("infer unknown datatype", "/v2/models/simple/infer", { inputs: [input("INPUT0", { datatype: "INT3" }), input("INPUT1")] });

  const binary = { parameters: { binary_data_size: 64 }, data: undefined };
  const json = JSON.stringify({
    inputs: [input("INPUT0", binary), input("INPUT1", binary)],
    outputs: [{ name: "OUTPUT0", parameters: { binary_data: true } }],
  });
  const body = new Blob([json, new Int32Array(row), new Int32Array(row)]);
  const length = { "inference-header-content-length": String(json.length) };
  await send("infer binary", "/v2/models/simple/infer", { method: "POST", body, headers: length });
  await send("infer short binary", "/v2/models/simple/infer", { method: "POST", body: body.slice(0, -4), headers: length });
  await send("infer header too long", "/v2/models/simple/infer", { method: "POST", body, headers: { "inference-header-content-length": "9999" } });

  await post("generate", "/v2/models/plain_text/generate", { X: "one" });
  await post("generate missing input", "/v2/models/plain_text/generate", {});
  await post("generate unknown model", "/v2/models/unknown/generate", { X: "one" });
  await post("generate_stream", "/v2/models/ticking/generate_stream", { COUNT: 3, SECONDS: 0.01 });
  await post("generate_stream that fails", "/v2/models/ticking/generate_stream", { COUNT: -2, SECONDS: 0.01 });
  await post("generate_stream that begins with an error", "/v2/models/ticking/generate_stream", { COUNT: "one", SECONDS: 0.01 });
  await post("generate_stream without responses", "/v2/models/ticking/generate_stream", { COUNT: 0, SECONDS: 0.01 });
}
