"use strict";
// The dump's data and the helpers that the views share.
const DATA = JSON.parse(document.getElementById("data").textContent);

/** Make an element. attributes: functions become event listeners. children: nodes or texts. */
function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  setAttributes(element, attributes);
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  setAttributes(element, attributes);
  element.append(...children.flat());
  return element;
}

function setAttributes(element, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value !== null && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
}

/** Make a table. columns: names; a leading "#" marks a column of numbers. rows: arrays of cells (nodes or texts). */
function table(caption, columns, rows) {
  const numeric = columns.map((column) => column.startsWith("#"));
  const cell = (tag, i, content, extra = {}) => h(tag, { class: numeric[i] ? "number" : null, ...extra }, content);
  return h("div", { class: "scroll" }, h("table", {},
    h("caption", {}, caption),
    h("thead", {}, h("tr", {}, columns.map((column, i) => cell("th", i, column.replace(/^#/, ""), { scope: "col" })))),
    h("tbody", {}, rows.map((row) => h("tr", {}, row.map((content, i) => cell("td", i, content)))))));
}

function announce(text) { document.getElementById("announce").textContent = text; }
function number(value, digits = 3) {
  if (value === null || value === undefined) return "not finite";
  if (value === 0) return "0";
  return Math.abs(value) >= 1e-3 && Math.abs(value) < 1e5 ? String(Number(value.toPrecision(digits))) : value.toExponential(1);
}
function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let i = 0;
  while (count >= 1024 && i < units.length - 1) { count /= 1024; i += 1; }
  return `${number(count)} ${units[i]}`;
}
function linkTo(text, action, label = null) {
  return h("button", { type: "button", class: "link", "aria-label": label, click: action }, text);
}
function shortTarget(target) {
  return target.replace(/^torch\.ops\.\w+\./, "").replace(/\.default$/, "").replace(/^(torch\.Tensor|torch|operator|F)\./, "");
}
const VIEWS = [];
