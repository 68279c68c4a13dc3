// The gateway's API, with the key that was typed. It is kept for this tab, and goes nowhere else.

const KEPT = "triton-gateway-key";

export class Refused extends Error {
  /** @param {number} status @param {object} body the gateway's own: error, code, request_id, perhaps more */
  constructor(status, body) {
    super(body.error ?? `The gateway answered ${status}.`);
    this.status = status;
    this.body = body;
  }
  get wantsKey() {
    return this.status === 401 || this.status === 403;
  }
}

export const key = {
  get: () => sessionStorage.getItem(KEPT) ?? "",
  set: (value) => (value ? sessionStorage.setItem(KEPT, value) : sessionStorage.removeItem(KEPT)),
};

/** The answer, if it is a good one. Throws `Refused`, and `TypeError` where the gateway is not reached. */
export async function call(path, options = {}) {
  const headers = new Headers(options.headers);
  if (key.get()) headers.set("Authorization", `Bearer ${key.get()}`);
  const answer = await fetch(path, { ...options, headers, credentials: "omit", cache: "no-store" });
  if (answer.ok) return answer;
  throw new Refused(answer.status, await answer.json().catch(() => ({})));
}

export const json = async (path, options) => (await call(path, options)).json();

export const pathOf = (model, version = "") =>
  `/v1/models/${encodeURIComponent(model)}${version ? `/versions/${encodeURIComponent(version)}` : ""}`;

export const models = async () => (await json("/v1/models")).models;
export const replicas = async () => (await json("/v1/replicas")).replicas;
export const describe = (model, version) => json(pathOf(model, version));

export const change = (model, action, parameters = {}) =>
  json(`/v2/repository/models/${encodeURIComponent(model)}/${action}`, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ parameters }),
  });

/** What went wrong, in a sentence. */
export const reason = (error) =>
  error instanceof Refused ? error.message : `The gateway cannot be reached: ${error.message}`;
