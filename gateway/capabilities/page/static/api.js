// Client of the gateway's API. The user's key is stored for this tab and sent only to this gateway.

const STORAGE_KEY = "triton-gateway-key";

export class ApiError extends Error {
  /** @param {number} status @param {object} body the gateway's error document: error, code, request_id and others */
  constructor(status, body) {
    super(body.error ?? `The gateway returned status ${status}.`);
    this.status = status;
    this.body = body;
  }
  get needsKey() {
    return this.status === 401 || this.status === 403;
  }
}

/** The gateway was not reached, or did not answer in time. */
export class GatewayUnreachable extends Error {
  constructor(message = "The gateway does not answer.") {
    super(message);
  }
}

export const connection = { isLost: false, answeredAt: Date.now() };

function recordAnswer(isAnswered) {
  if (isAnswered) connection.answeredAt = Date.now();
  if (connection.isLost !== isAnswered) return;
  connection.isLost = !isAnswered;
  dispatchEvent(new Event("connectionchange"));
}

export const key = {
  get: () => sessionStorage.getItem(STORAGE_KEY) ?? "",
  set: (value) => (value ? sessionStorage.setItem(STORAGE_KEY, value) : sessionStorage.removeItem(STORAGE_KEY)),
};

/** Return a successful response. Throws `ApiError` or `GatewayUnreachable`, or an AbortError if the signal stops it. */
export async function call(path, options = {}) {
  const headers = new Headers(options.headers);
  if (key.get()) headers.set("Authorization", `Bearer ${key.get()}`);
  const response = await fetch(path, { ...options, headers, credentials: "omit", cache: "no-store" }).catch((error) => {
    if (error.name === "AbortError") throw error;
    recordAnswer(false);
    throw new GatewayUnreachable();
  });
  recordAnswer(true);
  if (response.ok) return response;
  throw new ApiError(response.status, await response.json().catch(() => ({})));
}

export const getJson = async (path, options) => (await call(path, options)).json();

export const modelPath = (model, version = "") =>
  `/v1/models/${encodeURIComponent(model)}${version ? `/versions/${encodeURIComponent(version)}` : ""}`;

/** With `isComplete`, the gateway first reads the configs of models that were not described yet. */
export const listModels = async (isComplete = false) => (await getJson(`/v1/models${isComplete ? "?describe=true" : ""}`)).models;
export const listReplicas = async () => (await getJson("/v1/replicas")).replicas;
export const describeModel = (model, version) => getJson(modelPath(model, version));

export const changeReplica = (address, action) => getJson(`/v1/replicas/${encodeURIComponent(address)}/${action}`, { method: "POST" });

export const changeModel = (model, action, parameters = {}) =>
  getJson(`/v2/repository/models/${encodeURIComponent(model)}/${action}`, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ parameters }),
  });

/**
 * Upload a file as the next version of a model, and load it if `isLoaded`. Returns the request, which can be aborted, and a promise of
 * the response; `onProgress` is called with the fraction that was sent. fetch() reports no progress.
 */
export function uploadModel(model, file, isLoaded, onProgress) {
  const request = new XMLHttpRequest();
  const response = new Promise((resolve, reject) => {
    request.open("PUT", `${modelPath(model)}?filename=${encodeURIComponent(file.name)}${isLoaded ? "" : "&load=false"}`);
    if (key.get()) request.setRequestHeader("Authorization", `Bearer ${key.get()}`);
    request.setRequestHeader("Content-Type", "application/octet-stream");
    request.responseType = "json";
    request.upload.addEventListener("progress", (event) => onProgress(event.total ? event.loaded / event.total : 1));
    request.addEventListener("load", () =>
      request.status < 300 ? resolve(request.response) : reject(new ApiError(request.status, request.response ?? {})));
    request.addEventListener("error", () => reject(new GatewayUnreachable("The connection failed during the upload.")));
    request.addEventListener("abort", () => reject(new DOMException("", "AbortError")));
    request.send(file);
  });
  return { request, response };
}
