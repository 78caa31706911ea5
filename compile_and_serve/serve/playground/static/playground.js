"use strict";

const $ = (id) => document.getElementById(id);
const needsKey = document.body.dataset.needsKey === "true";
const messages = []; // {role, content} as the API takes them
const images = []; // data: URLs of the next message
let running = null; // AbortController of the answer in progress

function headers() {
  const key = $("key").value.trim();
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

function element(tag, className, parent) {
  const made = document.createElement(tag);
  made.className = className;
  parent.append(made);
  return made;
}

function show(role, text, pictures = []) {
  const box = element("article", `message ${role}`, $("conversation"));
  for (const url of pictures) element("img", "", box).src = url;
  element("div", "text", box).textContent = text;
  return box;
}

function drawImages() {
  $("images").replaceChildren();
  images.forEach((url, index) => {
    const image = element("img", "", $("images"));
    image.src = url;
    image.title = "Click to remove";
    image.addEventListener("click", () => {
      images.splice(index, 1);
      drawImages();
    });
  });
}

function readUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

// Adds the images among some files to the next message. Returns whether there were any.
function addImages(files) {
  const found = [...files].filter((file) => file.type.startsWith("image/"));
  Promise.all(found.map(readUrl)).then((urls) => {
    images.push(...urls);
    drawImages();
  });
  return found.length > 0;
}

function errorText(status, body) {
  try {
    return JSON.parse(body).error.message;
  } catch {
    return `The server answered with status ${status}.`;
  }
}

async function loadModels() {
  const response = await fetch("v1/models", { headers: headers() });
  if (!response.ok) return;
  const names = (await response.json()).data.map((model) => model.id);
  const before = $("model").value;
  $("model").replaceChildren(...names.map((name) => new Option(name, name)));
  if (names.includes(before)) $("model").value = before;
}

// The JSON objects of a stream of server-sent events.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (!part.startsWith("data: ")) continue; // a comment
      const data = part.slice("data: ".length);
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

// Draws the answer at most once a frame, however many events arrive.
class Answer {
  constructor() {
    this.content = this.reasoning = "";
    this.tokens = this.inputTokens = 0;
    this.began = performance.now();
    this.first = this.last = null;
    this.box = show("assistant", "");
    this.figures = element("div", "figures", this.box);
    this.details = null;
    this.frame = null;
  }

  take(event) {
    if (event.error) throw new Error(event.error.message);
    if (event.usage) {
      this.tokens = event.usage.completion_tokens;
      this.inputTokens = event.usage.prompt_tokens;
    }
    const delta = event.choices[0]?.delta ?? {};
    const reasoning = delta.reasoning ?? "";
    if (delta.content || reasoning) {
      this.last = performance.now();
      this.first ??= this.last;
    }
    this.content += delta.content ?? "";
    this.reasoning += reasoning;
    this.frame ??= requestAnimationFrame(() => this.draw());
  }

  draw() {
    if (this.frame !== null) cancelAnimationFrame(this.frame);
    this.frame = null;
    const atEnd = innerHeight + scrollY >= document.body.scrollHeight - 40;
    this.box.querySelector(".text").textContent = this.content;
    if (this.reasoning) {
      if (!this.details) {
        this.details = document.createElement("details");
        this.details.open = true;
        element("summary", "", this.details).textContent = "Reasoning";
        element("div", "reasoning", this.details);
        this.box.prepend(this.details);
      }
      this.details.querySelector(".reasoning").textContent = this.reasoning;
    }
    if (this.first !== null) {
      const parts = [`first token after ${(this.first - this.began).toFixed(0)} ms`];
      const seconds = (this.last - this.first) / 1000;
      if (this.tokens > 1 && seconds > 0) parts.push(`${((this.tokens - 1) / seconds).toFixed(1)} tokens/s`);
      if (this.tokens) parts.push(`${this.inputTokens} + ${this.tokens} tokens`);
      this.figures.textContent = parts.join(" · ");
    }
    if (atEnd) scrollTo(0, document.body.scrollHeight);
  }
}

async function send(text) {
  const pictures = images.splice(0);
  drawImages();
  const parts = pictures.map((url) => ({ type: "image_url", image_url: { url } }));
  messages.push({ role: "user", content: pictures.length ? [...parts, { type: "text", text }] : text });
  show("user", text, pictures);
  running = new AbortController();
  $("send").disabled = true;
  $("stop").disabled = false;
  const answer = new Answer();
  try {
    const response = await fetch("v1/chat/completions", {
      method: "POST",
      headers: headers(),
      signal: running.signal,
      body: JSON.stringify({
        model: $("model").value || undefined,
        messages,
        temperature: Number.isNaN($("temperature").valueAsNumber) ? undefined : $("temperature").valueAsNumber,
        max_tokens: $("max-tokens").valueAsNumber || undefined,
        stream: true,
        stream_options: { include_usage: true, continuous_usage_stats: true },
      }),
    });
    if (!response.ok) throw new Error(errorText(response.status, await response.text()));
    for await (const event of events(response)) answer.take(event);
  } catch (error) {
    if (error.name !== "AbortError") {
      answer.box.classList.add("error");
      answer.content += `${answer.content ? "\n" : ""}${error.message}`;
    }
  }
  answer.draw();
  // An answer that failed is not part of the conversation.
  if (answer.content && !answer.box.classList.contains("error")) {
    messages.push({ role: "assistant", content: answer.content });
  } else {
    messages.pop();
  }
  running = null;
  $("send").disabled = false;
  $("stop").disabled = true;
}

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("prompt").value.trim();
  if ((!text && !images.length) || running) return;
  $("prompt").value = "";
  send(text);
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("form").requestSubmit();
});
$("prompt").addEventListener("paste", (event) => {
  if (addImages(event.clipboardData.files)) event.preventDefault();
});
$("add-image").addEventListener("click", () => $("file").click());
$("file").addEventListener("change", () => {
  addImages($("file").files);
  $("file").value = "";
});
document.addEventListener("dragover", (event) => {
  event.preventDefault();
  $("form").classList.add("dropping");
});
document.addEventListener("dragleave", () => $("form").classList.remove("dropping"));
document.addEventListener("drop", (event) => {
  event.preventDefault();
  $("form").classList.remove("dropping");
  addImages(event.dataTransfer.files);
});
$("stop").addEventListener("click", () => running?.abort());
$("clear").addEventListener("click", () => {
  running?.abort();
  messages.length = images.length = 0;
  drawImages();
  $("conversation").replaceChildren();
});
if (needsKey) {
  $("key-label").hidden = false;
  $("key").value = sessionStorage.getItem("key") ?? "";
  $("key").addEventListener("change", () => {
    sessionStorage.setItem("key", $("key").value);
    loadModels();
  });
}
if (!needsKey || $("key").value) loadModels();
