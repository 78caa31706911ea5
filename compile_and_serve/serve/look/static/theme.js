"use strict";
// Light or dark: as the system says, until the button is pressed; then as it was left, in all pages of the server.
{
  const prefersDark = matchMedia("(prefers-color-scheme: dark)");
  const chosen = () => { try { return localStorage.getItem("theme"); } catch { return null; } };
  const setTheme = (theme) => { document.documentElement.dataset.theme = theme; };
  setTheme(chosen() ?? (prefersDark.matches ? "dark" : "light"));
  prefersDark.addEventListener("change", (event) => { if (!chosen()) setTheme(event.matches ? "dark" : "light"); });
  document.addEventListener("click", (event) => {
    if (event.target.id !== "theme") return;
    const theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    setTheme(theme);
    try { localStorage.setItem("theme", theme); } catch { /* a page from a file may have no storage */ }
  });
}
