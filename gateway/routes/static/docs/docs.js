// The API description in Swagger UI: of the gateway, or of one model with /docs?model=NAME.

const model = new URLSearchParams(location.search).get("model");
const url = model ? `v1/models/${encodeURIComponent(model)}/openapi.json` : "openapi.json";
if (model) {
  document.title = `API of ${model}`;
  const link = document.getElementById("model");
  link.href = `./#try/${encodeURIComponent(model)}`;
  link.textContent = `Try ${model}`;
  link.hidden = false;
}

// The theme that was chosen on the page at `/`, else what the system prefers.
const theme = localStorage.getItem("triton-gateway-theme");
const system = matchMedia("(prefers-color-scheme: dark)");
const applyTheme = () => document.documentElement.classList.toggle("dark-mode", theme ? theme === "dark" : system.matches);
system.addEventListener("change", applyTheme);
applyTheme();

/** Add the key of the page at `/` to requests without one. */
function addKey(request) {
  const key = sessionStorage.getItem("triton-gateway-key");
  const isPresent = Object.keys(request.headers ?? {}).some((name) => /^(authorization|x-api-key)$/i.test(name));
  if (key && !isPresent) request.headers = { ...request.headers, "X-API-Key": key };
  return request;
}

/** Send the requests to the gateway of this page, which can be below the prefix of a proxy. */
function completeRequest(request) {
  const { pathname, search } = new URL(request.url, location.origin);
  if (!request.loadSpec) request.url = new URL(`.${pathname}${search}`, document.baseURI).href;
  return addKey(request);
}

window.SwaggerUIBundle({
  url,
  dom_id: "#api",
  deepLinking: true,
  docExpansion: model ? "full" : "list",
  defaultModelsExpandDepth: -1,
  displayRequestDuration: true,
  requestInterceptor: completeRequest,
  validatorUrl: null,
});
