// A conversation with the model, over the same API that clients use. What the model says is only
// ever set as text.

import { html } from "./charts.js";

export class Chat {
  // `send(path, options)`: fetch with the key.
  constructor(send) {
    this.send = send;
    this.messages = [];
    this.list = document.getElementById("messages");
    this.prompt = document.getElementById("prompt");
    this.buttons = { send: document.getElementById("send"), stop: document.getElementById("stop"), clear: document.getElementById("clear") };
    document.getElementById("ask").addEventListener("submit", (event) => { event.preventDefault(); this.ask(); });
    this.prompt.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); this.ask(); }
      if (event.key === "Escape") this.abort?.abort();
    });
    this.buttons.stop.addEventListener("click", () => this.abort?.abort());
    this.buttons.clear.addEventListener("click", () => this.clear());
  }

  clear() {
    this.abort?.abort();
    this.messages = [];
    this.list.replaceChildren();
    this.buttons.clear.hidden = true;
  }

  async ask() {
    const text = this.prompt.value.trim();
    if (!text || this.abort) return;
    this.prompt.value = "";
    this.list.querySelector(".hint")?.remove();
    this.buttons.clear.hidden = false;
    this.messages.push({ role: "user", content: text });
    this.add("user").text.textContent = text;
    this.busy(true);
    const answer = this.add("assistant");
    try {
      await this.follow(answer);
    } catch (error) {
      if (error.name !== "AbortError") this.fail(answer, error.message);
      else answer.after.textContent = "stopped";
    } finally {
      if (answer.text.textContent) this.messages.push({ role: "assistant", content: answer.text.textContent });
      this.busy(false);
    }
  }

  async follow(answer) {
    this.model ??= await this.findModel();
    const response = await this.send("/v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      signal: this.abort.signal,
      body: JSON.stringify({
        model: this.model,
        messages: this.messages,
        temperature: Number(document.getElementById("temperature").value),
        max_tokens: Number(document.getElementById("max-tokens").value),
        stream: true,
        stream_options: { include_usage: true },
      }),
    });
    if (!response.ok) throw new Error(await problem(response));
    for await (const piece of events(response.body)) {
      if (piece.error) throw new Error(piece.error.message);
      this.take(answer, piece);
    }
  }

  take(answer, piece) {
    const choice = piece.choices?.[0];
    const { reasoning_content: thought, content } = choice?.delta ?? {};
    const low = this.list.scrollHeight - this.list.scrollTop - this.list.clientHeight < 40;
    if (thought) { answer.thinking.hidden = false; answer.thought.append(thought); }
    if (content) answer.text.append(content);
    if (choice?.finish_reason === "length") answer.reason = "cut at max tokens";
    if (piece.usage) answer.after.textContent = [`${piece.usage.completion_tokens} tokens`, answer.reason].filter(Boolean).join(", ");
    if (low) this.list.scrollTop = this.list.scrollHeight;
  }

  async findModel() {
    const response = await this.send("/v1/models", { signal: this.abort.signal });
    if (!response.ok) throw new Error(await problem(response));
    return (await response.json()).data[0].id;
  }

  fail(answer, message) {
    if (!answer.text.textContent) answer.root.remove();
    const box = this.add("error");
    box.root.setAttribute("role", "alert");
    box.text.textContent = message;
  }

  add(role) {
    const thought = html("div");
    const thinking = html("details", { hidden: true }, html("summary", { textContent: "Thoughts" }), thought);
    const text = html("div", { className: "text" });
    const after = html("div", { className: "after" });
    const root = html("div", { className: `message ${role}` }, thinking, text, after);
    this.list.append(root);
    this.list.scrollTop = this.list.scrollHeight;
    return { root, thinking, thought, text, after, reason: "" };
  }

  busy(yes) {
    this.abort = yes ? new AbortController() : null;
    this.buttons.send.hidden = yes;
    this.buttons.stop.hidden = !yes;
    if (!yes) this.prompt.focus({ preventScroll: true });
  }
}

async function problem(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answered with status ${response.status}`;
  }
}

// The JSON of server-sent events, up to [DONE].
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      const data = line.startsWith("data:") ? line.slice(5).trim() : "";
      if (data === "[DONE]") return;
      if (data) yield JSON.parse(data);
    }
  }
}
