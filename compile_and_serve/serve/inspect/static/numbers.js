"use strict";
VIEWS.push({
  id: "reasons", title: "Near misses",
  render(main) {
    const filter = h("input", { type: "search", id: "reason-filter", placeholder: "pass, node, reason …", input: draw });
    const holder = h("div");
    main.append(h("div", { class: "toolbar" }, h("label", { for: "reason-filter" }, "Filter"), filter), holder);
    const skipped = DATA.compilation.passes.filter((row) => row.skipped);
    const measured = DATA.compilation.passes.flatMap((row) => (row.measured || []).map((sentence) => [row.name, sentence]));
    function draw() {
      const wanted = filter.value.toLowerCase();
      const matches = (row) => JSON.stringify(row).toLowerCase().includes(wanted);
      const rows = DATA.near_misses.filter(matches);
      holder.replaceChildren(
        DATA.near_misses.length
          ? table("Sites that a pass almost matched and left unchanged", ["pass", "#times", "node", "source", "reason"],
            rows.map((row) => [row.pass, row.count, h("code", {}, row.nodes.slice(0, 3).join(", ") + (row.count > 3 ? " …" : "")),
              h("code", {}, row.source), row.reason]))
          : h("p", {}, "There are no near misses: every expected site was rewritten."),
        skipped.length
          ? table("Passes that did not run", ["pass", "reason"], skipped.map((row) => [row.name, row.skipped]).filter(matches))
          : "",
        measured.length ? table("Choices measured on this device", ["pass", "outcome"], measured) : "");
    }
    draw();
  },
}, {
  id: "numbers", title: "Verification",
  render(main) {
    const rows = DATA.compilation.passes.filter((row) => row.verification);
    if (!rows.length) {
      main.append(h("p", {}, "The passes were not verified. To verify them, compile with ", h("code", {}, "--verify-passes"), "."));
      return;
    }
    main.append(table("Outputs of the graph before and after each pass on the same random inputs, in float64",
      ["pass", "#max error", "#relative error", "#tolerance", "result"], rows.map(({ name, verification: v }) => [
        name, number(v.max_error, 2), number(v.relative_error, 2), number(v.tolerance, 2),
        v.reason ? h("span", { class: "bad" }, `wrong, skipped: ${v.reason}`) : h("span", { class: "good" }, "correct")])));
    for (const { name, verification } of rows) {
      if (!verification.sites.length) continue;
      main.append(h("details", {}, h("summary", {}, `${name}: ${verification.sites.length} sites compared`),
        table(name, ["site", "source", "#max error", "#relative error"], verification.sites.map((site) =>
          [h("code", {}, site.node), h("code", {}, site.source), number(site.max_error, 2), number(site.relative_error, 2)]))));
    }
  },
}, {
  id: "timings", title: "Timings",
  render(main) {
    const { profile } = DATA;
    if (!profile) {
      main.append(h("p", {}, "The pieces were not measured. To measure them, add ", h("code", {}, "--profile-pieces"), "."));
      return;
    }
    main.append(h("p", {}, `This device reaches ${number(profile.bandwidth / 1e9)} GB/s of memory bandwidth and `
      + `${number(profile.gemm_rate / 1e9)} GFLOP/s in ${profile.dtype} matrix products (measured).`),
    roofline(profile),
    table("Pieces and the ops between them", ["", "#times", "#tokens", "#ms", "#GB/s", "#bandwidth", "#GFLOP/s", "#compute"],
      profile.rows.map((row) => [row.name, `× ${row.count}`, row.tokens, number(row.seconds * 1e3),
        number(row.bytes / row.seconds / 1e9), percent(row.bytes / row.seconds / profile.bandwidth),
        number(row.flops / row.seconds / 1e9), percent(row.flops / row.seconds / profile.gemm_rate)])));
    if (profile.experts?.length) {
      main.append(table("Experts of a layer, with random weights", ["#tokens", "#layers", "#experts", "#with tokens", "#busiest / mean"],
        profile.experts.map((row) => [row.tokens, row.layers, row.experts, number(row.distinct), number(row.largest)])));
    }
    if (profile.steps?.length) {
      main.append(table("Whole steps, and the time between pieces and ops", ["#tokens", "#ms", "#between, ms", "#share"],
        profile.steps.map((row) => [row.tokens, number(row.seconds * 1e3), number(row.between * 1e3), percent(row.between / row.seconds)])));
    }
  },
}, {
  id: "memory", title: "Memory and CUDA graphs",
  render(main) {
    const { options, weights, engine } = DATA;
    const cudagraphs = engine?.cudagraphs && Object.keys(engine.cudagraphs).length ? engine.cudagraphs : null;
    const large = Object.entries(weights).map(([name, spec]) => ({ name, ...spec,
      bytes: spec.shape.reduce((size, n) => size * n, 1) * itemSize(spec.dtype) })).sort((a, b) => b.bytes - a.bytes);
    main.append(h("h2", {}, "CUDA graphs"));
    if (cudagraphs) main.append(factTable("CUDA graphs captured before serving began; others are captured on demand", cudagraphs));
    else {
      const sizes = options.capture_sizes ? options.capture_sizes.join(", ") : "chosen when serving starts";
      main.append(h("p", {}, DATA.environment.device === "cuda"
        ? `Mode: ${options.cudagraph_mode}; token counts: ${sizes}` : "The CPU has no CUDA graphs: pieces are called directly."));
    }
    if (engine) {
      main.append(h("h2", {}, "KV cache"), table(`Attention backend: ${engine.attention_backend}`, ["", "#"], [
        ["tokens", engine.kv_cache_tokens], ["size", bytes(engine.kv_cache_bytes)], ["tokens per block", engine.block_size]]));
    }
    main.append(h("h2", {}, "Weights"), table(`The 40 largest of ${large.length} tensors (${bytes(DATA.weight_bytes)} in total)`,
      ["name", "#size", "dtype", "shape", "computed from"], large.slice(0, 40).map((row) => [h("code", {}, row.name), bytes(row.bytes),
        row.dtype, `[${row.shape.join(", ")}]`, h("code", {}, expression(row.expression))])));
  },
});

function factTable(caption, facts) {
  return table(caption, ["", ""], Object.entries(facts).map(([name, value]) => [name.replaceAll("_", " "),
    /bytes$/.test(name) ? bytes(value) : typeof value === "object" ? JSON.stringify(value) : String(value)]));
}
function percent(share) { return `${number(share * 100, 2)} %`; }
function itemSize(dtype) { return { float64: 8, int64: 8, float32: 4, int32: 4, bfloat16: 2, float16: 2 }[dtype] || 1; }
function expression(value) {
  if (Array.isArray(value)) return `${value[0]}(${value.slice(1).map(expression).join(", ")})`;
  return `${value?.dtype ?? value?.text ?? value}`;
}

/** Achieved FLOP/s over FLOPs per byte, both logarithmic, with the device's measured limits. */
function roofline({ rows, bandwidth, gemm_rate: rate }) {
  const points = rows.filter((row) => row.flops > 0).map((row) => ({ ...row, x: row.flops / row.bytes, y: row.flops / row.seconds }));
  if (!points.length) return h("p", {}, "No measured piece performs floating-point operations.");
  const xs = [...points.map((p) => p.x), rate / bandwidth * 4], ys = [...points.map((p) => p.y), rate];
  const [x0, x1] = [Math.floor(Math.log10(Math.min(...xs))), Math.ceil(Math.log10(Math.max(...xs)))];
  const [y0, y1] = [Math.floor(Math.log10(Math.min(...ys))), Math.ceil(Math.log10(Math.max(...ys)))];
  const [width, height, left, bottom] = [760, 380, 70, 40];
  const X = (x) => left + ((Math.log10(x) - x0) / (x1 - x0)) * (width - left - 20);
  const Y = (y) => height - bottom - ((Math.log10(y) - y0) / (y1 - y0)) * (height - bottom - 20);
  const parts = [];
  for (let e = x0; e <= x1; e += 1) {
    parts.push(svg("path", { class: "axis", d: `M${X(10 ** e)} 20V${height - bottom}` }),
      svg("text", { x: X(10 ** e), y: height - bottom + 16, "text-anchor": "middle" }, String(Number((10 ** e).toPrecision(1)))));
  }
  for (let e = y0; e <= y1; e += 1) {
    parts.push(svg("path", { class: "axis", d: `M${left} ${Y(10 ** e)}H${width - 20}` }),
      svg("text", { x: left - 6, y: Y(10 ** e) + 4, "text-anchor": "end" }, `${Number((10 ** (e - 9)).toPrecision(1))} G`));
  }
  const ridge = rate / bandwidth, lowest = Math.max(10 ** x0, 10 ** y0 / bandwidth);
  parts.push(svg("path", { fill: "none", stroke: "var(--accent)", "stroke-width": 2,
    d: `M${X(lowest)} ${Y(lowest * bandwidth)}L${X(Math.min(ridge, 10 ** x1))} ${Y(rate)}L${width - 20} ${Y(rate)}` }),
  svg("text", { x: (left + width) / 2, y: height - 6, "text-anchor": "middle" }, "FLOPs per byte"),
  svg("text", { x: left, y: 12 }, "FLOP/s; the line is the device's measured limit"));
  const labels = []; // boxes of the labels so far; a new label moves down until it overlaps none
  for (const point of points.sort((a, b) => b.y - a.y)) {
    const label = `${point.name} · ${point.tokens}`, labelWidth = label.length * 6.5 + 10;
    const isAtEnd = X(point.x) + labelWidth > width;
    const box = { left: isAtEnd ? X(point.x) - labelWidth : X(point.x) + 8, top: Y(point.y) - 6 };
    while (labels.some((other) => Math.abs(other.left - box.left) < labelWidth && Math.abs(other.top - box.top) < 13)) box.top += 4;
    labels.push(box);
    const text = `${point.name}, ${point.tokens} tokens: ${number(point.y / 1e9)} GFLOP/s`;
    parts.push(svg("circle", { cx: X(point.x), cy: Y(point.y), r: 5, fill: "var(--good)" }, svg("title", {}, text)),
      svg("text", { class: "halo", x: box.left, y: box.top + 10 }, label));
  }
  return svg("svg", { width, height, role: "img", "aria-label": `Roofline: ${points.map((p) =>
    `${p.name} at ${p.tokens} tokens ${number(p.y / 1e9)} GFLOP/s`).join("; ")}` }, parts);
}
