"use strict";
const LAYOUTS = new Map(); // fingerprint and whether weights are shown → layout of a piece
const GAP = 46; // pixels between steps

VIEWS.push({
  id: "graph", title: "Graph",
  render(main, index) {
    const state = { index: index ?? DATA.graphs.length - 1, weights: false, nodes: [], selected: null, box: null };
    const select = h("select", { id: "graph-stage", change() { state.index = Number(select.value); draw(); } },
      DATA.graphs.map((graph, i) => h("option", { value: i }, graph.kind === "pass" ? `after ${graph.name}` : graph.name)));
    const search = h("input", { id: "search", type: "search", placeholder: "op, weight, source line …", input: find,
      keydown(event) { if (event.key === "Enter") results.querySelector("button")?.click(); } });
    const weights = h("input", { type: "checkbox", id: "weights", change() { state.weights = weights.checked; draw(); } });
    const canvas = svg("svg", { id: "canvas", tabindex: 0, role: "group",
      "aria-label": "Graph. Arrow keys move between nodes, Enter shows a node, plus and minus zoom, 0 fits the graph." });
    const results = h("ul", { class: "results", "aria-label": "Search results" });
    const details = h("div", { id: "details" }, h("p", { class: "soft" }, "Select a node to see its call, source line and value."));
    const zoomButton = (text, label, action) => h("button", { type: "button", "aria-label": label, click: action }, text);
    main.append(
      h("div", { class: "toolbar" },
        h("label", { for: "graph-stage" }, "Stage"), select,
        h("label", { for: "search" }, "Search"), search,
        h("span", {}, weights, h("label", { for: "weights" }, " weights")),
        zoomButton("+", "Zoom in", () => zoom(0.8)), zoomButton("−", "Zoom out", () => zoom(1.25)),
        zoomButton("Fit", "Fit the graph", fit)),
      h("div", { class: "split" }, canvas, h("aside", { "aria-label": "Node" }, results, details)));

    function draw() {
      select.value = String(state.index);
      const drawing = layOut(DATA.graphs[state.index], state.weights);
      Object.assign(state, { nodes: drawing.nodes, selected: null, width: drawing.width, height: drawing.height });
      canvas.replaceChildren(arrowHead(), ...drawing.shapes, ...drawing.nodes.map((node) => node.element));
      for (const node of drawing.nodes) {
        node.element.addEventListener("click", () => choose(node));
        node.element.addEventListener("keydown", (event) => {
          if (event.key === "Enter" || event.key === " ") { event.preventDefault(); choose(node); }
        });
      }
      if (state.nodes.length) state.nodes[0].element.setAttribute("tabindex", "0");
      showTop();
      find();
    }
    function choose(node) {
      state.nodes.forEach((other) => {
        other.element.classList.toggle("selected", other === node);
        other.element.setAttribute("tabindex", other === node ? "0" : "-1");
      });
      state.selected = node;
      details.replaceChildren(...describe(node, state, choose));
      reveal(node);
      announce(node.element.getAttribute("aria-label"));
    }
    function find() {
      const wanted = search.value.trim().toLowerCase();
      const found = wanted ? state.nodes.filter((node) => node.words.includes(wanted)) : [];
      state.nodes.forEach((node) => node.element.classList.toggle("found", found.includes(node)));
      results.replaceChildren(...found.slice(0, 100).map((node) =>
        h("li", {}, linkTo(`${node.title} · ${node.row.name}`, () => choose(node)))));
      if (wanted) announce(`${found.length} nodes found`);
    }
    function setBox(box) {
      state.box = box;
      canvas.setAttribute("viewBox", `${box.x} ${box.y} ${box.width} ${box.height}`);
    }
    function aspect() { return canvas.clientHeight / Math.max(1, canvas.clientWidth); }
    function fit() {
      const width = Math.max(state.width, state.height / aspect()) + 40;
      setBox({ x: (state.width - width) / 2, y: -20, width, height: width * aspect() });
    }
    function showTop() {
      const width = Math.max(canvas.clientWidth, Math.min(canvas.clientWidth * 1.3, state.width + 60));
      setBox({ x: (state.width - width) / 2, y: -24, width, height: width * aspect() });
    }
    function zoom(factor, at = null) {
      const { x, y, width, height } = state.box, center = at || { x: x + width / 2, y: y + height / 2 };
      setBox({ x: center.x - (center.x - x) * factor, y: center.y - (center.y - y) * factor,
        width: width * factor, height: height * factor });
    }
    function reveal(node) {
      const { x, y, width, height } = state.box;
      if (node.x < x || node.x > x + width || node.y < y || node.y > y + height) {
        setBox({ x: node.x - width / 2, y: node.y - height / 2, width, height });
      }
    }
    function toGraph(event) {
      const point = canvas.createSVGPoint();
      [point.x, point.y] = [event.clientX, event.clientY];
      return point.matrixTransform(canvas.getScreenCTM().inverse());
    }
    canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      zoom(event.deltaY > 0 ? 1.12 : 0.89, toGraph(event));
    }, { passive: false });
    let drag = null;
    canvas.addEventListener("pointerdown", (event) => { drag = { x: event.clientX, y: event.clientY, box: state.box }; });
    canvas.addEventListener("pointermove", (event) => {
      if (!drag || !event.buttons) return;
      const scale = drag.box.width / canvas.clientWidth;
      setBox({ ...drag.box, x: drag.box.x - (event.clientX - drag.x) * scale, y: drag.box.y - (event.clientY - drag.y) * scale });
    });
    canvas.addEventListener("pointerup", () => { drag = null; });
    canvas.addEventListener("keydown", (event) => {
      const step = { ArrowDown: 1, ArrowRight: 1, ArrowUp: -1, ArrowLeft: -1 }[event.key];
      if (step && state.nodes.length) {
        event.preventDefault();
        const at = state.nodes.findIndex((node) => node.element === document.activeElement);
        const next = state.nodes[at < 0 ? 0 : Math.min(state.nodes.length - 1, Math.max(0, at + step))];
        next.element.focus({ preventScroll: true });
        reveal(next);
      } else if (event.key === "+") zoom(0.8);
      else if (event.key === "-") zoom(1.25);
      else if (event.key === "0") fit();
    });
    draw();
  },
});

function arrowHead() {
  return svg("defs", {}, svg("marker", { id: "arrow", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7,
    orient: "auto-start-reverse" }, svg("path", { d: "M0 0L8 4L0 8z", fill: "currentColor" })));
}

/** Lay out the whole graph from top to bottom, with a repeated group of steps once. → {shapes, nodes, width, height} */
function layOut(graph, weights) {
  const pieceNames = [...new Set(graph.blocks.flatMap((block) => block.steps.map((step) => step.piece)).filter(Boolean))];
  const parts = graph.blocks.map((block) => block.steps.map((step) =>
    (step.piece ? pieceLayout(step.piece, weights) : opLayout(step))));
  const width = Math.max(...parts.flat().map((part) => part.width)) + 120;
  const shapes = [], nodes = [];
  let y = 10;
  graph.blocks.forEach((block, b) => {
    const top = y, widest = Math.max(...parts[b].map((part) => part.width));
    if (block.count > 1) y += 34;
    block.steps.forEach((step, s) => {
      const part = parts[b][s], left = (width - part.width) / 2;
      if (y > 20) shapes.push(svg("path", { class: "edge", "marker-end": "url(#arrow)", d: `M${width / 2} ${y - GAP + 12}V${y - 2}` }));
      if (step.piece) {
        const title = `piece ${pieceNames.indexOf(step.piece)}`;
        shapes.push(svg("rect", { class: "piece", x: left, y, width: part.width, height: part.height, rx: 8 }),
          svg("text", { x: left + 10, y: y + 18 }, `${title} · ${step.piece.slice(0, 8)}`));
      }
      for (const edge of part.edges) {
        const points = edge.map((point) => `${point.x + left} ${point.y + y}`);
        shapes.push(svg("path", { class: "edge", "marker-end": "url(#arrow)", d: `M${points.join("L")}` }));
      }
      for (const item of part.items) {
        nodes.push(drawNode(item, item.x + left, item.y + y, { count: block.count, piece: step.piece || null }));
      }
      y += part.height + GAP;
    });
    if (block.count > 1) {
      const box = { x: (width - widest) / 2 - 22, y: top, width: widest + 44, height: y - GAP - top + 12 };
      shapes.push(svg("rect", { class: "group", rx: 12, ...box }),
        svg("text", { class: "badge", x: box.x + 14, y: top + 23 }, `× ${block.count}`));
      y += 14;
    }
  });
  return { shapes, nodes, width, height: y };
}

function sizeOf(row) {
  const longest = Math.max(titleOf(row).length * 7.3, row.value.length * 5.9);
  return { width: Math.max(70, Math.min(330, longest + 22)), height: 38 };
}

function titleOf(row) { return row.kind === "call" ? shortTarget(row.target) : row.label; }

function opLayout(step) {
  const row = { kind: "op", ...step.node, target: step.op };
  const size = sizeOf({ ...row, kind: "call" });
  return { width: size.width + 40, height: size.height, edges: [],
    items: [{ row: { ...row, kind: "call", op: true }, ...size, x: size.width / 2 + 20, y: size.height / 2 }] };
}

function pieceLayout(fingerprint, weights) {
  const key = `${fingerprint} ${weights}`;
  if (LAYOUTS.has(key)) return LAYOUTS.get(key);
  const { nodes } = DATA.pieces[fingerprint];
  const shown = nodes.filter((row) => weights || row.kind !== "weight");
  const graph = new dagre.graphlib.Graph();
  graph.setGraph({ rankdir: "TB", nodesep: 16, ranksep: 26, marginx: 16, marginy: 14 });
  graph.setDefaultEdgeLabel(() => ({}));
  const names = new Set(shown.map((row) => row.name));
  for (const row of shown) graph.setNode(row.name, { row, ...sizeOf(row) });
  for (const row of shown) {
    for (const input of row.inputs || []) if (names.has(input)) graph.setEdge(input, row.name);
  }
  dagre.layout(graph);
  const { width, height } = graph.graph(), header = 26;
  const layout = {
    width: Math.max(width, 190), height: height + header,
    items: shown.map((row) => { const item = graph.node(row.name); return { ...item, row, y: item.y + header }; }),
    edges: graph.edges().map((edge) => graph.edge(edge).points.map(({ x, y }) => ({ x, y: y + header }))),
  };
  LAYOUTS.set(key, layout);
  return layout;
}

function kindClass(row) {
  if (row.op) return "op";
  if (row.kind !== "call") return row.kind;
  if (/linear|matmul|mm\b/.test(row.target)) return "linear";
  return /norm/.test(row.target) ? "norm" : "call";
}

function drawNode(item, x, y, place) {
  const { row, width, height } = item;
  const full = titleOf(row), maxLength = Math.floor((width - 14) / 7);
  const title = full.length > maxLength ? `${full.slice(0, maxLength - 1)}…` : full;
  const element = svg("g", { class: `node ${kindClass(row)}`, tabindex: -1, role: "button", "data-node": row.name,
    "aria-label": [full, row.value, row.source, place.count > 1 ? `${place.count} times` : ""].filter(Boolean).join(", ") },
  svg("rect", { x: x - width / 2, y: y - height / 2, width, height, rx: row.kind === "call" ? 5 : 18 }),
  svg("text", { x, y: y - 2, "text-anchor": "middle" }, title),
  svg("text", { class: "small", x, y: y + 13, "text-anchor": "middle" }, row.value));
  const words = [full, row.name, row.call, row.source, row.code, row.label].filter(Boolean).join(" ").toLowerCase();
  return { element, row, x, y, words, title: full, ...place };
}

/** The facts about a node, as elements for the side panel. */
function describe(node, state, choose) {
  const { row } = node;
  const near = state.nodes.filter((other) => other.piece === node.piece);
  const links = (names) => names.flatMap((name) => {
    const other = near.find((candidate) => candidate.row.name === name);
    return [other ? linkTo(name, () => choose(other)) : h("code", {}, name), h("br")];
  });
  const readers = near.filter((other) => (other.row.inputs || []).includes(row.name)).map((other) => other.row.name);
  const facts = [["Value", h("code", {}, row.value)]];
  if (row.call) facts.push(["Call", h("code", {}, row.call)]);
  if (row.source) facts.push(["Source", [h("code", {}, row.source), h("pre", {}, row.code || "")]]);
  if (row.kind !== "call") facts.push([row.kind === "weight" ? "Weight" : "Input", h("code", {}, row.label)]);
  if (row.inputs?.length) facts.push(["Reads", links(row.inputs)]);
  if (readers.length) facts.push(["Read by", links(readers)]);
  if (node.count > 1) facts.push(["Repeated", `× ${node.count}`]);
  const parts = [h("h2", {}, titleOf(row)), h("dl", {}, facts.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]))];
  const compiled = DATA.split.find((candidate) => candidate.piece === node.piece);
  if (compiled?.code) parts.push(code("Generated code of this piece", compiled.code));
  return parts;
}
