// The theme: automatic, light or dark. A classic script in the head, so that the page never flashes.

(() => {
  const STORAGE_KEY = "triton-gateway-theme";
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

  apply();
  document.addEventListener("DOMContentLoaded", () => {
    document.getElementById("theme-button").addEventListener("click", selectNext);
    apply();
  });
})();
