"use strict";
const $ = (id) => document.getElementById(id);
const KINDS = {
  wait: ["waits in the queue", ["slots", "blocks", "budget", "prefix", "adapter_slots", "key", "group", "encoder", "prompt_logprobs", "step", "transport", "waiting", "preempted"]],
  prepare: ["is prepared", ["media", "media.room", "media.download", "media.decode", "media.preprocess", "tokenize", "grammar_check", "grammar", "adapter", "kv_load"]],
  prefill: ["computes its prompt", ["encode", "prefill", "recomputed"]], decode: ["generates", ["decode"]], send: ["is sent", ["sending", "detokenize"]],
};
const STEPS = { full: "as one CUDA graph", piecewise: "as graphs between attention", plain: "without graphs" };
const SAYS = JSON.parse(document.body.dataset.stages); // stage → a sentence without its subject
const KIND_OF = Object.fromEntries(Object.entries(KINDS).flatMap(([kind, [, names]]) => names.map((name) => [name, kind])));
const ended = new Map(); // began and id → request
const steps = new Map(); // replica and number → step
let live = [], now = 0, since = 0, paused = false, chosen = null, asking = false;
let pressed = false; // a button is down: what is drawn anew would lose the click
let opened = ""; // the request in the ledger, as JSON

function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value !== null) element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child !== null));
  return element;
}
const count = (number, what) => `${number} ${what}${number === 1 ? "" : "s"}`;
const keyOf = (request) => `${request.began} ${request.request_id}`;
const duration = (seconds) => (seconds >= 1 ? `${seconds.toFixed(2)} s` : `${(seconds * 1000).toFixed(1)} ms`);
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const total = (request, field) => request.sequences.reduce((sum, one) => sum + (one.tokens[field] ?? 0), 0);

async function ask() {
  if (paused || asking) return;
  asking = true;
  const key = $("key").value.trim();
  try {
    const response = await fetch(`requests/data?since=${since}`, { headers: key ? { Authorization: `Bearer ${key}` } : {} });
    const body = await response.json();
    if (!response.ok) throw new Error(body.error?.message ?? `The server answered with status ${response.status}.`);
    $("problem").textContent = "";
    if (!paused) take(body);
  } catch (error) {
    $("problem").textContent = error.message;
  }
  asking = false;
}

function take(body) {
  live = body.live;
  since = now = body.now;
  for (const request of body.ended) ended.set(keyOf(request), request);
  while (ended.size > 300) ended.delete(ended.keys().next().value);
  for (const step of body.steps) steps.set(`${step[0]} ${step[1]}`, step);
  while (steps.size > 6000) steps.delete(steps.keys().next().value);
  const rate = [...steps.values()].filter((step) => step[2] > now - 5).reduce((sum, step) => sum + step[4 + 1], 0) / 5;
  const waits = Object.entries(body.engine.waiting_for).map(([reason, [count, sentence]]) => h("p", { class: "soft", title: sentence }, `${count}: ${reason}`));
  $("cards").replaceChildren(
    h("div", { class: "card" }, h("b", {}, String(body.engine.running)), h("span", {}, "running")),
    h("div", { class: "card", id: "waiting" }, h("b", {}, String(body.engine.waiting)), h("span", {}, "waiting"), waits),
    h("div", { class: "card" }, h("b", {}, `${(100 * body.engine.kv_usage).toFixed(0)} %`), h("span", {}, `of ${body.engine.blocks} KV blocks`)),
    h("div", { class: "card" }, h("b", {}, rate.toFixed(0)), h("span", {}, "decodes per second")));
  if (!pressed) draw();
}

function shown() {
  const text = $("search").value.trim().toLowerCase();
  const all = [...live, ...[...ended.values()].reverse()];
  return text ? all.filter((request) => JSON.stringify(request).toLowerCase().includes(text)) : all;
}

function draw() {
  const span = Number($("window").value), requests = shown(), from = now - span;
  const rows = requests.filter((one) => one.began + one.total_seconds > from).sort((a, b) => a.began - b.began).slice(-80);
  $("timeline").replaceChildren(...rows.map((request) => {
    const track = h("div", { class: "track" });
    const row = h("div", { class: `row${keyOf(request) === chosen ? " chosen" : ""}`, title: `${request.request_id}: ${request.why}`, click: () => choose(request) },
      h("span", { class: "name" }, request.request_id), track);
    for (const part of request.timeline) {
      const begin = Math.max(0, (request.began + part.start - from) / span), end = (request.began + part.start + part.seconds - from) / span;
      if (end <= 0 || begin >= 1) continue;
      const bar = h("div", { class: `part ${KIND_OF[part.name] ?? "wait"}`, title: `${part.name}: ${duration(part.seconds)}` });
      bar.style.left = `${100 * begin}%`;
      bar.style.width = `${100 * (Math.min(1, end) - begin)}%`;
      track.append(bar);
    }
    return row;
  }));
  $("table").tBodies[0].replaceChildren(...requests.slice(0, 60).map((request) => h("tr",
    { class: keyOf(request) === chosen ? "chosen" : null, click: () => choose(request) },
    h("td", {}, h("button", { type: "button", class: "link" }, request.request_id)),
    h("td", { class: request.state === "failed" ? "bad" : null }, request.state),
    h("td", { class: "number" }, duration(request.total_seconds)),
    h("td", { class: "number" }, `${total(request, "prompt")} + ${total(request, "generated")}`),
    h("td", {}, request.why))));
  $("from").textContent = `${$("window").selectedOptions[0].text} ago`;
  drawSteps(from, span);
  drawMemory(from, span);
  const again = requests.find((request) => keyOf(request) === chosen);
  if (again && JSON.stringify(again) !== opened) openLedger(again);
}

function surface(canvas) {
  canvas.width = canvas.clientWidth * devicePixelRatio;
  const context = canvas.getContext("2d");
  context.clearRect(0, 0, canvas.width, canvas.height);
  return context;
}

function drawSteps(from, span) {
  const canvas = $("steps"), context = surface(canvas);
  const found = [...steps.values()].filter((step) => step[2] + step[3] > from);
  const picked = shown().find((request) => keyOf(request) === chosen);
  if (picked) {
    context.fillStyle = color("good-back");
    context.fillRect(canvas.width * (picked.began - from) / span, 0, canvas.width * picked.total_seconds / span, canvas.height);
  }
  const most = Math.max(1, ...found.map((step) => Math.log2(1 + step[7])));
  for (const [, , began, seconds, kind, , prompts, tokens] of found) {
    const height = (canvas.height - 6) * Math.log2(1 + tokens) / most;
    context.fillStyle = color(kind);
    const x = canvas.width * (began - from) / span, width = Math.max(1, canvas.width * seconds / span);
    context.fillRect(x, canvas.height - height, width, height);
    if (prompts) { context.fillStyle = color("text"); context.fillRect(x, canvas.height - height, width, 3); }
  }
}

function drawMemory(from, span) {
  const canvas = $("memory"), context = surface(canvas);
  context.strokeStyle = color("accent");
  for (const replica of new Set([...steps.values()].map((step) => step[0]))) {
    context.beginPath();
    for (const [of, , began, , , , , , , , held] of steps.values()) {
      if (of === replica) context.lineTo(canvas.width * (began - from) / span, 2 + (canvas.height - 4) * (1 - held));
    }
    context.stroke();
  }
}

function choose(request) {
  chosen = keyOf(request);
  opened = "";
  draw();
  if (!opened) openLedger(request); // the search leaves it out
}

/** Who computed something during the longest stage of a request: [request, seconds, tokens of its prompt that were computed]. */
function meanwhile(request) {
  const [stage] = Object.entries(request.seconds).filter(([name]) => KIND_OF[name] && !name.includes(".")).sort((a, b) => b[1] - a[1])[0] ?? [];
  const parts = request.timeline.filter((part) => part.name === stage);
  if (!parts.length || ["prepare", "send"].includes(KIND_OF[stage])) return null;
  const begin = request.began + parts[0].start, end = request.began + parts.at(-1).start + parts.at(-1).seconds;
  const found = [];
  for (const other of [...live, ...ended.values()]) {
    if (keyOf(other) === keyOf(request)) continue;
    const ran = other.timeline.filter((part) => ["prefill", "decode"].includes(KIND_OF[part.name]));
    const overlap = (part) => Math.max(0, Math.min(end, other.began + part.start + part.seconds) - Math.max(begin, other.began + part.start));
    const seconds = ran.reduce((sum, part) => sum + overlap(part), 0);
    const computed = ran.some((part) => part.name === "prefill" && overlap(part) > 0) ? total(other, "computed") : 0;
    if (seconds > 0) found.push([other, seconds, computed]);
  }
  return { stage, found: found.sort((a, b) => b[1] - a[1]) };
}

function othersList(request) {
  const others = meanwhile(request);
  if (!others?.found.length) return null;
  const keys = new Map();
  for (const [other] of others.found) keys.set(other.tenant, (keys.get(other.tenant) ?? 0) + 1);
  const ofKeys = [...keys].filter(([name]) => name).map(([name, number]) => `${number} of key ${name}`).join(", ");
  const what = { wait: "waited", prefill: "computed its prompt", decode: "generated" }[KIND_OF[others.stage]];
  return h("section", {}, h("h3", {}, "Who ran meanwhile"),
    h("p", {}, `While it ${what}, ${count(others.found.length, "other request")} ran${ofKeys ? `: ${ofKeys}` : ""}.`),
    h("ul", {}, others.found.slice(0, 4).map(([other, seconds, computed]) => h("li", {},
      h("button", { type: "button", class: "link", click: () => choose(other) }, other.request_id),
      ` for ${duration(seconds)}${computed ? `, ${computed} tokens of its prompt computed` : ""}`))));
}

function openLedger(request) {
  const wasOpen = opened && $("ledger").querySelector("details[open]") ? "" : null;
  opened = JSON.stringify(request);
  const longest = Math.max(1e-9, ...Object.values(request.seconds));
  const meter = (name, seconds) => {
    const bar = h("div", { class: KIND_OF[name] ?? "wait" });
    bar.style.width = `${100 * seconds / longest}%`;
    return h("div", { class: "meter" }, bar);
  };
  const sorted = Object.entries(request.seconds).sort((a, b) => b[1] - a[1]);
  const stages = sorted.filter(([, seconds]) => seconds >= 0.01 * request.total_seconds), rest = sorted.slice(stages.length);
  if (rest.length) stages.push([rest.map(([name]) => name).join(", "), rest.reduce((sum, [, seconds]) => sum + seconds, 0)]);
  $("ledger").replaceChildren(
    h("h2", {}, request.request_id),
    h("p", { class: "why" }, request.why || "Nothing took long yet."),
    h("p", { class: "soft" }, `${request.path}, ${request.state}${request.tenant ? `, key ${request.tenant}` : ""}, ${new Date(request.began * 1000).toLocaleTimeString()}`),
    h("table", {}, h("caption", {}, "Where the time went"),
      h("tbody", {}, stages.map(([name, seconds]) => h("tr", {}, h("td", {}, name, h("p", { class: "soft" }, SAYS[name] ?? "")), h("td", { class: "number" }, duration(seconds)), h("td", {}, meter(name, seconds)))))),
    ...[othersList(request)].filter(Boolean),
    ...request.sequences.map((one) => h("section", {},
      h("h3", {}, one.engine_id),
      h("ul", {}, one.misses.map((miss) => h("li", { class: "miss" }, miss.sentence)),
        one.error ? h("li", { class: "bad" }, one.error) : null,
        one.preemptions ? h("li", {}, `Preempted ${count(one.preemptions.count, "time")}, because others needed its blocks of the KV cache: it waited ${duration(one.preemptions.seconds)} and computed ${one.preemptions.recomputed_tokens} tokens again.`) : null,
        one.with_prompts?.count ? h("li", {}, `${one.with_prompts.count} of its steps also computed prompts of others: ${duration(one.with_prompts.seconds)}.`) : null,
        h("li", {}, `Prompt of ${one.tokens.prompt} tokens: ${one.tokens.computed ?? "?"} computed in ${count(one.prefill.chunks, "part")} over ${count(one.prefill.steps, "step")}${one.prefill.beside_tokens ? ` (which computed ${one.prefill.beside_tokens} tokens of others too)` : ""}, the rest reused.`)),
      h("details", { open: wasOpen }, h("summary", {}, "All figures"), h("pre", {}, JSON.stringify(one, null, 1))))));
}

/** What Perfetto and chrome://tracing open. */
function trace() {
  const events = [{ name: "process_name", ph: "M", pid: 1, args: { name: "engine steps" } }, { name: "process_name", ph: "M", pid: 2, args: { name: "requests" } }];
  for (const [replica, number, began, seconds, kind, decodes, prompts, tokens, padded] of steps.values()) {
    events.push({ name: `${kind} step`, ph: "X", ts: began * 1e6, dur: seconds * 1e6, pid: 1, tid: replica, args: { number, decodes, prompts, tokens, padded } });
  }
  shown().forEach((request, tid) => {
    events.push({ name: "thread_name", ph: "M", pid: 2, tid, args: { name: request.request_id } });
    for (const part of request.timeline) {
      events.push({ name: part.name, ph: "X", ts: (request.began + part.start) * 1e6, dur: part.seconds * 1e6, pid: 2, tid, args: { why: request.why } });
    }
  });
  return { traceEvents: events };
}

addEventListener("pointerdown", () => { pressed = true; });
for (const name of ["pointerup", "pointercancel"]) addEventListener(name, () => { pressed = false; });
$("pause").addEventListener("click", () => {
  paused = !paused;
  $("pause").textContent = paused ? "Go on" : "Pause";
  $("pause").setAttribute("aria-pressed", String(paused));
});
$("tools").addEventListener("submit", (event) => event.preventDefault());
$("search").addEventListener("input", draw);
$("window").addEventListener("change", draw);
$("export").addEventListener("click", () => {
  const link = h("a", { href: URL.createObjectURL(new Blob([JSON.stringify(trace())], { type: "application/json" })), download: "requests.json" });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
});
const colors = (entries) => entries.flatMap(([kind, text]) => [h("span", { class: kind }), text]);
$("legend").append("A request", ...colors(Object.entries(KINDS).map(([kind, [text]]) => [kind, text])), h("br"),
  "A step of the engine", ...colors(Object.entries(STEPS)));
if (document.body.dataset.needsKey === "true") {
  $("key-label").hidden = false;
  $("key").value = sessionStorage.getItem("admin-key") ?? "";
  $("key").addEventListener("change", () => { sessionStorage.setItem("admin-key", $("key").value); ask(); });
}
setInterval(ask, 500);
ask();
