// Sign-in with the OpenID provider: an authorization code with PKCE (RFC 7636). The token stays in memory.

const { issuer, clientId } = document.documentElement.dataset;
const PENDING_KEY = "triton-gateway-sign-in"; // while the browser is with the provider
const OPTIONS = { credentials: "omit", cache: "no-store" };

const toBase64Url = (buffer) =>
  btoa(String.fromCharCode(...new Uint8Array(buffer))).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
const createSecret = () => toBase64Url(crypto.getRandomValues(new Uint8Array(32)));
const findRedirectUri = () => location.origin + location.pathname;

async function ask(address, options = {}) {
  const response = await fetch(address, { ...OPTIONS, ...options }).catch(() => null);
  const document = await response?.json().catch(() => null);
  if (response?.ok && document) return document;
  throw new Error(document?.error_description ?? "The sign-in service cannot be reached from this page.");
}

const readConfiguration = () => ask(`${issuer.replace(/\/$/, "")}/.well-known/openid-configuration`);

/** Send the browser to the provider, which sends it back with a code. */
export async function signIn() {
  if (!isSecureContext) throw new Error("The sign-in requires HTTPS.");
  const verifier = createSecret();
  const state = createSecret();
  const address = new URL((await readConfiguration()).authorization_endpoint);
  const challenge = await crypto.subtle.digest("SHA-256", new TextEncoder().encode(verifier));
  const query = {
    response_type: "code",
    client_id: clientId,
    redirect_uri: findRedirectUri(),
    scope: "openid",
    state,
    code_challenge: toBase64Url(challenge),
    code_challenge_method: "S256",
  };
  for (const [name, value] of Object.entries(query)) address.searchParams.set(name, value);
  sessionStorage.setItem(PENDING_KEY, JSON.stringify({ state, verifier, hash: location.hash }));
  location.assign(address);
}

/** Return a token if the provider has sent the browser back to this tab, or "". */
export async function finishSignIn() {
  const pending = JSON.parse(sessionStorage.getItem(PENDING_KEY) ?? "null");
  const query = new URLSearchParams(location.search);
  if (!pending || query.get("state") !== pending.state) return "";
  sessionStorage.removeItem(PENDING_KEY);
  history.replaceState(null, "", location.pathname + pending.hash);
  if (query.has("error")) throw new Error(query.get("error_description") ?? query.get("error"));
  const body = new URLSearchParams({
    grant_type: "authorization_code",
    code: query.get("code"),
    redirect_uri: findRedirectUri(),
    client_id: clientId,
    code_verifier: pending.verifier,
  });
  return (await ask((await readConfiguration()).token_endpoint, { method: "POST", body })).access_token;
}
