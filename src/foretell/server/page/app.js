// The page: a chat whose tokens say where they come from, and the engine's numbers beside it.
// No build step and no library. Everything shown comes from /v1/chat/completions (report_drafts) and /stats.
"use strict";

const $ = (id) => document.getElementById(id);
const el = (tag, cls, text) => {
  const made = document.createElement(tag);
  if (cls) made.className = cls;
  if (text !== undefined) made.textContent = text;
  return made;
};
const messages = [];
const steps = []; // {report, spans} of the last answer
let shown = -1;
let running = null; // AbortController of the answer under way

// ---- Requests.

function headers() {
  const found = { "content-type": "application/json" };
  if ($("key").value) found.authorization = "Bearer " + $("key").value;
  return found;
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    held += value;
    for (let cut; (cut = held.indexOf("\n\n")) >= 0; held = held.slice(cut + 2)) {
      const line = held.slice(0, cut);
      if (line === "data: [DONE]") return;
      if (line.startsWith("data: ")) yield JSON.parse(line.slice(6));
    }
  }
}

function asked(extra) {
  const body = {
    messages, stream: true, report_drafts: true, stream_options: { include_usage: true },
    temperature: Number($("temperature").value) || 0,
    max_tokens: Math.max(1, Math.floor(Number($("max_tokens").value)) || 200),
    speculate: $("speculate").checked, ...extra,
  };
  if ($("seed").value !== "") body.seed = Math.floor(Number($("seed").value));
  return body;
}

async function ask(body, signal) {
  const response = await fetch("v1/chat/completions", {
    method: "POST", headers: headers(), body: JSON.stringify(body), signal,
  });
  if (response.ok) return response;
  const said = await response.json().catch(() => ({}));
  throw new Error(said.error ? said.error.message : "HTTP " + response.status);
}

// ---- The chat.

function turn(who) {
  const made = el("div", "turn " + who);
  made.append(el("div", "who", who === "user" ? "You" : "Model"));
  made.text = made.appendChild(el("div", "text"));
  $("log").append(made);
  return made;
}

// Gives the text that came to the tokens that made it. A character may be made by several tokens, so text and tokens
// meet again at the next token whose own text is whole.
class Painter {
  constructor(target) { this.target = target; this.text = ""; this.tokens = []; }

  add(text, report) {
    this.text += text || "";
    for (const [place, token] of (report ? report.tokens : []).entries()) {
      this.tokens.push({ ...token, kind: place < report.accepted ? "accepted" : report.last || "plain", step: steps.length - 1 });
    }
  }

  paint(last) {
    while (this.tokens.length) {
      let found = -1, at = 0;
      for (let i = 0; i < this.tokens.length && found < 0; i++) {
        const own = this.tokens[i].text;
        if (!own || own.includes("\ufffd")) continue;
        at = this.text.indexOf(own);
        if (at >= 0 && (i > 0 || this.text.slice(0, at).trim() === "")) found = i;
        else if (i === 0) break;
      }
      if (found < 0) break;
      const token = this.tokens[found];
      if (found === 0) this.span(this.text.slice(0, at + token.text.length), token);
      else this.span(this.text.slice(0, at), this.tokens[found - 1]);
      this.text = this.text.slice(found === 0 ? at + token.text.length : at);
      this.tokens.splice(0, found || 1);
    }
    if (last && this.text) this.span(this.text, this.tokens.at(-1) || { kind: "plain", step: steps.length - 1 });
  }

  span(text, token) {
    if (!text) return;
    const made = el("span", "t " + token.kind, text);
    made.title = { accepted: "drafted and accepted", corrected: "in place of a refused draft", bonus: "after drafts that were all right", plain: "no draft" }[token.kind];
    const step = token.step;
    made.addEventListener("click", () => show(step));
    if (steps[step]) steps[step].spans.push(made);
    this.target.append(made);
  }
}

async function send(text) {
  messages.push({ role: "user", content: text });
  turn("user").text.textContent = text;
  const answer = turn("assistant");
  const meta = el("div", "meta");
  answer.append(meta);
  const painter = new Painter(answer.text);
  steps.length = 0; shown = -1;
  running = new AbortController();
  busy(true);
  const start = performance.now();
  let first = 0, content = "", usage = null;
  try {
    for await (const chunk of events(await ask(asked(), running.signal))) {
      if (chunk.error) throw new Error(chunk.error.message);
      if (chunk.usage) usage = chunk.usage;
      for (const choice of chunk.choices) {
        for (const report of choice.steps || []) {
          if (!first) first = performance.now();
          steps.push({ report, spans: [] });
          painter.add("", report);
        }
        const delta = choice.delta.content || choice.delta.reasoning_content || "";
        content += delta;
        painter.add(delta, null);
        painter.paint(Boolean(choice.finish_reason));
      }
      show(steps.length - 1);
      follow();
    }
    const seconds = (performance.now() - start) / 1000;
    if (usage) {
      const ttft = ((first || performance.now()) - start) / 1000;
      meta.textContent = `${usage.completion_tokens} tokens in ${steps.length} steps, ${seconds.toFixed(2)} s, first after ${ttft.toFixed(2)} s`;
    }
  } catch (error) {
    painter.paint(true);
    const stopped = error.name === "AbortError";
    meta.textContent = stopped ? "stopped" : error.message;
    meta.classList.toggle("bad", !stopped);
  }
  messages.push({ role: "assistant", content });
  running = null;
  busy(false);
  refresh();
}

function busy(on) {
  $("log").setAttribute("aria-busy", on);
  $("send").textContent = on ? "Stop" : "Send";
  $("measure").disabled = on;
}

function follow() {
  const log = $("log");
  if (log.scrollHeight - log.scrollTop - log.clientHeight < 120) log.scrollTop = log.scrollHeight;
}

// ---- The tree of a step.

function show(place) {
  if (place < 0 || place >= steps.length) return;
  if (steps[shown]) for (const span of steps[shown].spans) span.classList.remove("shown");
  shown = place;
  if (place < steps.length - 1) for (const span of steps[place].spans) span.classList.add("shown");
  const report = steps[place].report;
  $("step-place").textContent = `${place + 1} of ${steps.length}`;
  draw(report);
  const drafted = report.tree.tokens.slice(1).filter((t) => t !== null).length;
  $("step-said").textContent = drafted
    ? `${drafted} drafted, ${report.accepted} accepted, ${report.tokens.length} tokens in this step`
    : "no draft: one token in this step";
}

const visible = (text, most) => (text === null ? "·" : text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replace(/^ | $/g, "␣").slice(0, most) || "∅");

function draw(report) {
  const nodes = report.tree.tokens.map((text, i) => ({ text, kind: i ? "refused" : "root", parent: i ? report.tree.parents[i] : -1, children: [] }));
  if (!nodes.length) return;
  for (const i of report.tree.accepted) nodes[i].kind = "accepted";
  const end = report.tree.accepted.at(-1) || 0;
  if (report.last) nodes.push({ text: report.tokens.at(-1).text, kind: report.last, parent: end, children: [] });
  const kept = nodes.map((node, i) => i === 0 || node.text !== null);
  nodes.forEach((node, i) => { if (i && kept[i]) nodes[node.parent].children.push(i); });
  let row = 0, deepest = 0;
  const put = (i, depth) => {
    const node = nodes[i];
    node.depth = depth; deepest = Math.max(deepest, depth);
    const best = node.children.sort((a, b) => (nodes[b].kind === "accepted") - (nodes[a].kind === "accepted"));
    if (!best.length) { node.row = row++; return; }
    best.forEach((child) => put(child, depth + 1));
    node.row = nodes[best[0]].row;
  };
  put(0, 0);
  const room = Math.floor(($("tree").clientWidth - 2) / (deepest + 1));
  const W = Math.max(60, Math.min(112, room)), H = 30, w = W - 12, h = 22, ns = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(ns, "svg");
  svg.setAttribute("width", (deepest + 1) * W);
  svg.setAttribute("height", row * H + 4);
  const make = (tag, attributes, parent) => {
    const made = document.createElementNS(ns, tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    return parent.appendChild(made);
  };
  nodes.forEach((node, i) => {
    if (!kept[i] || i === 0) return;
    const parent = nodes[node.parent];
    make("line", { x1: parent.depth * W + w, y1: parent.row * H + h / 2 + 2, x2: node.depth * W, y2: node.row * H + h / 2 + 2, class: node.kind === "accepted" ? "on" : "" }, svg);
  });
  nodes.forEach((node, i) => {
    if (!kept[i]) return;
    const group = make("g", { class: node.kind }, svg);
    make("title", {}, group).textContent = { root: "the text so far ends here", accepted: "drafted, accepted", refused: "drafted, refused", corrected: "the target's own token in place of the drafts", bonus: "the target's own token after the drafts", plain: "the target's own token" }[node.kind];
    make("rect", { x: node.depth * W + 1, y: node.row * H + 3, width: w - 2, height: h, rx: 5 }, group);
    make("text", { x: node.depth * W + 7, y: node.row * H + h / 2 + 7 }, group).textContent = visible(node.text, Math.floor((w - 10) / 7.3));
  });
  const box = $("tree");
  box.replaceChildren(svg);
  box.setAttribute("aria-label", `Draft tree: ${report.accepted} of ${nodes.length - 1 - Boolean(report.last)} drafted tokens accepted`);
}

// ---- Numbers.

const share = (value) => `${Math.round(100 * value)} %`;

function fill(id, part) { $(id).style.width = `${Math.max(0, Math.min(100, 100 * part))}%`; }

async function refresh() {
  let now;
  try {
    const response = await fetch("stats", { headers: headers() });
    if (!response.ok) throw new Error(response.status === 401 ? "key needed" : "HTTP " + response.status);
    now = await response.json();
  } catch (error) {
    health(false, error.message.startsWith("key") ? "key needed" : "no server");
    return;
  }
  health(now.alive, now.alive ? "ready" : "engine stopped");
  $("model").textContent = now.model;
  const most = Math.max(now.tokens_per_s, now.plain_tokens_per_s, 1e-9);
  $("now").textContent = now.tokens_per_s.toFixed(1);
  $("plain").textContent = now.plain_tokens_per_s.toFixed(1);
  $("plain-name").textContent = now.plain_measured ? "plain" : "plain, at least";
  fill("bar-now", now.tokens_per_s / most);
  fill("bar-plain", now.plain_tokens_per_s / most);
  $("speedup").textContent = now.plain_tokens_per_s ? `${now.plain_measured ? "" : "at most "}${(now.tokens_per_s / now.plain_tokens_per_s).toFixed(2)}× plain decoding${now.plain_measured ? " as measured" : ", not measured yet"}` : "";
  positions(now);
  $("batch").textContent = `${now.running} of ${now.max_num_seqs}`;
  fill("bar-batch", now.running / now.max_num_seqs);
  $("kv").textContent = share(now.kv_cache_usage);
  fill("bar-kv", now.kv_cache_usage);
  $("waiting").textContent = now.waiting;
  $("generated").textContent = now.generation_tokens;
}

function positions(now) {
  const box = $("positions");
  const rates = now.acceptance_rate_per_pos.slice(0, 16);
  box.replaceChildren(...rates.map((rate, i) => {
    const column = el("span", "", share(rate));
    const bar = el("i");
    bar.style.height = `${60 * rate}%`;
    column.append(bar, String(i + 1));
    return column;
  }));
  box.setAttribute("aria-label", rates.length ? rates.map((rate, i) => `position ${i + 1}: ${share(rate)}`).join(", ") : "No drafts yet");
  $("acceptance").textContent = now.num_drafts
    ? `${now.mean_acceptance_length.toFixed(2)} tokens a step with a draft; ${share(now.draft_acceptance_rate)} of ${now.num_draft_tokens} drafted tokens accepted`
    : now.drafts ? "no drafts yet" : "this engine has no drafter";
}

function health(good, said) {
  $("health").textContent = said;
  $("health").className = "health " + (good ? "good" : "bad");
}

async function measure() {
  busy(true);
  try {
    const probe = { messages: [{ role: "user", content: "Count from one to thirty." }], max_tokens: 24, speculate: false };
    for await (const chunk of events(await ask(asked(probe)))) if (chunk.error) throw new Error(chunk.error.message);
  } catch (error) {
    $("speedup").textContent = error.message;
  }
  busy(false);
  refresh();
}

// ---- Keys and buttons.

function submit() {
  if (running) { running.abort(); return; }
  const text = $("input").value.trim();
  if (!text) return;
  $("input").value = "";
  send(text);
}

$("form").addEventListener("submit", (event) => { event.preventDefault(); submit(); });
$("input").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); submit(); }
});
$("fresh").addEventListener("click", () => {
  if (running) running.abort();
  messages.length = steps.length = 0; shown = -1;
  $("log").replaceChildren(); $("tree").replaceChildren();
  $("step-place").textContent = $("step-said").textContent = "";
  $("input").focus();
});
$("measure").addEventListener("click", measure);
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && running) running.abort();
  if (event.altKey && event.key.toLowerCase() === "n") { event.preventDefault(); $("fresh").click(); }
  const typing = /^(INPUT|TEXTAREA)$/.test(document.activeElement.tagName);
  if (event.key === "/" && !typing) { event.preventDefault(); $("input").focus(); }
  if (!typing && steps.length && (event.key === "ArrowLeft" || event.key === "ArrowRight")) {
    show(Math.max(0, Math.min(steps.length - 1, shown + (event.key === "ArrowLeft" ? -1 : 1))));
  }
});
const themes = ["", "light", "dark"];
$("theme").addEventListener("click", () => {
  const next = themes[(themes.indexOf(document.documentElement.dataset.theme || "") + 1) % 3];
  if (next) document.documentElement.dataset.theme = next; else delete document.documentElement.dataset.theme;
  $("theme").setAttribute("aria-label", "Colours: " + (next || "as the system"));
});
$("key").addEventListener("change", refresh);
setInterval(() => { if (!document.hidden) refresh(); }, 1000);
refresh();
