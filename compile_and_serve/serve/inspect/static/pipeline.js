"use strict";
VIEWS.push({
  id: "pipeline", title: "Pipeline",
  render(main) {
    const { compilation } = DATA;
    const distinct = DATA.split.length, pieces = DATA.split.reduce((sum, row) => sum + row.count, 0);
    const seconds = Object.values(compilation.stages).reduce((sum, value) => sum + value, 0);
    const misses = DATA.near_misses.reduce((sum, row) => sum + row.count, 0);
    const failed = Object.keys(compilation.failed_passes || {});
    const card = (value, text) => h("div", { class: "card" }, h("b", {}, value), h("span", {}, text));
    main.append(h("div", { class: "cards" },
      card(`${number(seconds)} s`, "to compile"), card(`${distinct} of ${pieces}`, "pieces are distinct"),
      card(`${DATA.graphs[0].nodes} → ${DATA.graphs.at(-1).nodes}`, "calls, captured → final"),
      card(String(misses), "near misses"), card(bytes(DATA.weight_bytes), "of weights")));
    if (failed.length) main.append(h("p", { class: "bad" }, `Skipped because verification failed: ${failed.join(", ")}`));
    main.append(h("h2", {}, "Stages"), stageBars(compilation.stages));
    main.append(h("h2", {}, "Passes"), table("Sites that each pass rewrote, and its near misses",
      ["pass", "#matched", "#expected", "#calls after", "#seconds", "verified", "note", ""], compilation.passes.map(passRow)));
    main.append(h("h2", {}, "Pieces"), table("Equal pieces share one compilation",
      ["piece", "#times", "fingerprint", "#calls", "", "#seconds", ""], DATA.split.map(pieceRow)));
    main.append(h("h2", {}, "Files"), code("The function that calls the pieces", DATA.forward),
      code("The model's forward as Dynamo transformed it (decompiled)", DATA.bytecode));
  },
});

function passRow(row) {
  const index = DATA.graphs.findIndex((graph) => graph.kind === "pass" && graph.name === row.name);
  const misses = (row.near_misses || []).length;
  const { verification } = row;
  return [
    row.name, row.matched ?? "–", row.expected ?? "–", index < 0 ? "–" : DATA.graphs[index].nodes, number(row.seconds),
    !verification ? h("span", { class: "soft" }, "no")
      : verification.reason ? h("span", { class: "bad" }, "wrong")
        : h("span", { class: "good" }, `error ${number(verification.relative_error, 2)}`),
    row.skipped ? h("span", { class: "soft" }, row.skipped)
      : misses ? linkTo(`${misses} near miss${misses > 1 ? "es" : ""}`, () => show("reasons")) : "",
    index < 0 ? "" : linkTo("diff", () => show("diff", index), `Diff of pass ${row.name}`),
  ];
}

function pieceRow(row, i) {
  const calls = DATA.pieces[row.piece].nodes.filter((node) => node.kind === "call").length;
  return [`piece ${i}`, `× ${row.count}`, h("code", {}, row.piece.slice(0, 8)), calls, row.how || "", number(row.seconds ?? 0),
    linkTo("graph", () => show("graph", DATA.graphs.length - 1), `Graph of piece ${i}`)];
}

function stageBars(stages) {
  const entries = Object.entries(stages), longest = Math.max(...Object.values(stages), 1e-9);
  const height = 24 * entries.length;
  const label = entries.map(([name, seconds]) => `${name} ${number(seconds)} s`).join(", ");
  return svg("svg", { width: 720, height, role: "img", "aria-label": `Seconds of each stage: ${label}` },
    entries.flatMap(([name, seconds], i) => [
      svg("text", { x: 110, y: 24 * i + 16, "text-anchor": "end" }, name),
      svg("rect", { class: "bar", x: 120, y: 24 * i + 4, height: 16, rx: 3, width: Math.max(2, (seconds / longest) * 500) }),
      svg("text", { x: 128 + Math.max(2, (seconds / longest) * 500), y: 24 * i + 16 }, `${number(seconds)} s`)]));
}

/** A collapsed text, which is added to the page only when the reader opens it. */
function code(summary, text) {
  const pre = h("pre", { tabindex: 0 });
  return h("details", { toggle() { if (!pre.textContent) pre.textContent = text || "(none)"; } }, h("summary", {}, summary), pre);
}
