"use strict";
const TABS = document.getElementById("tabs"), MAIN = document.getElementById("main");

/** Open a view. argument: passed to its render function. */
function show(id, argument = null) {
  const view = VIEWS.find((candidate) => candidate.id === id) || VIEWS[0];
  for (const tab of TABS.children) {
    const selected = tab.dataset.view === view.id;
    tab.setAttribute("aria-selected", String(selected));
    tab.tabIndex = selected ? 0 : -1;
  }
  MAIN.setAttribute("aria-labelledby", `tab-${view.id}`);
  MAIN.replaceChildren();
  view.render(MAIN, argument);
  if (location.hash !== `#${view.id}`) history.replaceState(null, "", `#${view.id}`);
}

function start() {
  const { model, environment } = DATA;
  document.getElementById("title").textContent = `${model.architecture}, ${model.layers} layers`;
  document.getElementById("subtitle").textContent =
    `${model.dtype} on ${environment.device} (${environment.capability}), torch ${environment.torch.split(" ")[0]}`;
  for (const view of VIEWS) {
    TABS.append(h("button", { type: "button", role: "tab", id: `tab-${view.id}`, "data-view": view.id,
      "aria-controls": "main", click: () => show(view.id) }, view.title));
  }
  TABS.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const tabs = [...TABS.children];
    const next = tabs[(tabs.indexOf(document.activeElement) + step + tabs.length) % tabs.length];
    next.focus();
    next.click();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "/" && !/INPUT|SELECT|TEXTAREA/.test(document.activeElement.tagName)) {
      event.preventDefault();
      if (!document.getElementById("search")) show("graph");
      document.getElementById("search").focus();
    }
  });
  window.addEventListener("hashchange", () => { if (location.hash !== "#main") show(location.hash.slice(1)); });
  show(location.hash.slice(1));
}
start();
