// The theme (automatic, light or dark) and the density. A classic script in the head, so that nothing flashes.

(() => {
  const STORAGE_KEY = "triton-gateway-theme";
  const DENSITY_KEY = "triton-gateway-density";
  const THEMES = ["auto", "light", "dark"];
  const current = () => (THEMES.includes(localStorage.getItem(STORAGE_KEY)) ? localStorage.getItem(STORAGE_KEY) : "auto");

  function apply() {
    const theme = current();
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    const button = document.getElementById("theme-button");
    if (!button) return;
    button.textContent = { auto: "◐", light: "☀", dark: "☾" }[theme];
    button.setAttribute("aria-label", `Theme: ${theme}`);
    button.title = `Theme: ${theme}`;
  }

  function selectNext() {
    const next = THEMES[(THEMES.indexOf(current()) + 1) % THEMES.length];
    if (next === "auto") localStorage.removeItem(STORAGE_KEY);
    else localStorage.setItem(STORAGE_KEY, next);
    apply();
    dispatchEvent(new Event("themechange"));
  }

  function applyDensity() {
    const isCompact = localStorage.getItem(DENSITY_KEY) === "compact";
    if (isCompact) document.documentElement.dataset.density = "compact";
    else delete document.documentElement.dataset.density;
    document.getElementById("density-button")?.setAttribute("aria-pressed", String(isCompact));
  }

  function toggleDensity() {
    if (localStorage.getItem(DENSITY_KEY)) localStorage.removeItem(DENSITY_KEY);
    else localStorage.setItem(DENSITY_KEY, "compact");
    applyDensity();
  }

  apply();
  applyDensity();
  document.addEventListener("DOMContentLoaded", () => {
    document.getElementById("theme-button").addEventListener("click", selectNext);
    document.getElementById("density-button").addEventListener("click", toggleDensity);
    apply();
    applyDensity();
  });
})();
