"use strict";
const CONTEXT = 4; // unchanged lines shown around a change

VIEWS.push({
  id: "diff", title: "Before and after",
  render(main, index) {
    const passes = DATA.graphs.map((graph, i) => [graph, i]).slice(1);
    if (!passes.length) { main.append(h("p", {}, "No pass ran.")); return; }
    const changed = passes.filter(([, i]) => DATA.texts[i] !== DATA.texts[i - 1]);
    let current = index ?? (changed.at(-1) || passes[0])[1];
    const select = h("select", { id: "diff-pass", change: () => { current = Number(select.value); draw(); } },
      passes.map(([graph, i]) => h("option", { value: i }, graph.name)));
    const holder = h("div");
    main.append(h("div", { class: "toolbar" }, h("label", { for: "diff-pass" }, "Pass"), select,
      h("span", { class: "soft" }, "Each distinct piece is shown once.")), holder);
    function draw() {
      select.value = String(current);
      const name = DATA.graphs[current].name;
      const result = DATA.compilation.passes.find((row) => row.name === name);
      const rows = sideBySide(DATA.texts[current - 1], DATA.texts[current]);
      const changes = rows.filter((row) => row.changed).length;
      const summary = changes
        ? `${name}: ${result.matched} of ${result.expected} sites, ${changes} changed lines` : `${name} changed nothing`;
      holder.replaceChildren(h("h2", {}, summary), changes ? diffTable(name, rows) : "");
      announce(summary);
    }
    draw();
  },
});

/** The rows of a side-by-side diff: {left, right, changed}. left and right are {line, text} or null. */
function sideBySide(before, after) {
  const rows = [];
  let left = 0, right = 0, removed = [];
  const lines = (part) => part.value.replace(/\n$/, "").split("\n");
  const flush = (added) => {
    for (let i = 0; i < Math.max(removed.length, added.length); i += 1) {
      rows.push({ changed: true,
        left: i < removed.length ? { line: ++left, text: removed[i] } : null,
        right: i < added.length ? { line: ++right, text: added[i] } : null });
    }
    removed = [];
  };
  for (const part of Diff.diffLines(before + "\n", after + "\n")) {
    if (part.removed) { removed = lines(part); continue; }
    if (part.added) { flush(lines(part)); continue; }
    flush([]);
    for (const text of lines(part)) {
      rows.push({ changed: false, left: { line: ++left, text }, right: { line: ++right, text } });
    }
  }
  flush([]);
  return rows;
}

function diffTable(name, rows) {
  const near = rows.map((_, i) => rows.slice(Math.max(0, i - CONTEXT), i + CONTEXT + 1).some((row) => row.changed));
  const body = h("tbody");
  for (let i = 0; i < rows.length; i += 1) {
    if (near[i]) { body.append(diffRow(rows[i])); continue; }
    const end = near.indexOf(true, i), hidden = rows.slice(i, end < 0 ? rows.length : end);
    const fold = h("tr", { class: "fold" }, h("td", { colspan: 4 },
      linkTo(`${hidden.length} unchanged lines`, () => fold.replaceWith(...hidden.map(diffRow)))));
    body.append(fold);
    i += hidden.length - 1;
  }
  return h("table", { class: "diff" }, h("caption", {}, `Graph before and after ${name}`),
    h("colgroup", {}, h("col", { class: "line" }), h("col"), h("col", { class: "line" }), h("col")),
    h("thead", {}, h("tr", {}, ["", "before", "", "after"].map((text) => h("th", { scope: "col" }, text)))), body);
}

function diffRow(row) {
  let [left, right] = [row.left?.text ?? "", row.right?.text ?? ""];
  if (row.changed && row.left && row.right && left.length + right.length < 2000) {
    const words = Diff.diffWordsWithSpace(left, right);
    left = words.filter((word) => !word.added).map((word) => (word.removed ? h("mark", {}, word.value) : word.value));
    right = words.filter((word) => !word.removed).map((word) => (word.added ? h("mark", {}, word.value) : word.value));
  }
  const spoken = (text) => (row.changed ? h("span", { class: "hidden" }, text) : null); // for screen readers
  return h("tr", {},
    h("td", { class: "line" }, row.left ? String(row.left.line) : ""),
    h("td", { class: row.changed && row.left ? "removed" : null }, row.left ? spoken("removed: ") : null, left),
    h("td", { class: "line" }, row.right ? String(row.right.line) : ""),
    h("td", { class: row.changed && row.right ? "added" : null }, row.right ? spoken("added: ") : null, right));
}
