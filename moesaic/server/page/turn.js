// One question with its answer: what it shows, and what it measured.

import { html } from "./dom.js";
import { count, rate, seconds } from "./format.js";
import { Markdown } from "./markdown.js";

export class Turn {
  constructor(list, question) {
    this.list = list;
    this.question = question;
    this.failed = false;
    this.ended = "";
    this.times = { sent: performance.now(), first: null };
    this.tokens = { prompt: 0, answer: 0 };
    this.pieces = []; // {upTo, text, at}: the text of the tokens before upTo, and when it came
    this.build();
  }

  build() {
    this.thought = html("div", { className: "text" });
    this.thinking = html("details", { hidden: true }, html("summary", { textContent: "Thoughts" }), this.thought);
    const text = html("div", { className: "text" });
    this.answer = new Markdown(text);
    this.after = html("div", { className: "after" });
    const asked = html("div", { className: "text" });
    const view = new Markdown(asked);
    view.append(this.question);
    view.render();
    this.nodes = {
      user: html("div", { className: "message user" }, asked),
      assistant: html("div", { className: "message assistant waiting" }, this.thinking, text, this.after),
    };
    this.list.append(this.nodes.user, this.nodes.assistant);
    this.toEnd();
  }

  // What later requests of the conversation repeat. A failed turn is not part of it.
  get messages() {
    if (this.failed || !this.answer.text) return [];
    return [{ role: "user", content: this.question }, { role: "assistant", content: this.answer.text }];
  }

  take(piece) {
    const choice = piece.choices?.[0];
    const { reasoning_content: thought, content } = choice?.delta ?? {};
    const low = this.list.scrollHeight - this.list.scrollTop - this.list.clientHeight < 40;
    if (thought || content) this.grow(thought, content);
    if (choice?.finish_reason === "length") this.ended = "cut at max tokens";
    if (piece.usage) this.measure(piece.usage, (thought ?? "") + (content ?? ""));
    if (low) this.toEnd();
  }

  // After the next frame has rendered what is new.
  toEnd() {
    requestAnimationFrame(() => { this.list.scrollTop = this.list.scrollHeight; });
  }

  grow(thought, content) {
    this.times.first ??= performance.now();
    this.nodes.assistant.classList.remove("waiting");
    if (thought) { this.thinking.hidden = false; this.thought.append(thought); }
    if (content) this.answer.append(content);
  }

  measure(usage, text) {
    this.tokens = { prompt: usage.prompt_tokens, answer: usage.completion_tokens };
    const told = this.pieces.at(-1)?.upTo ?? 0;
    if (usage.completion_tokens > told) this.pieces.push({ upTo: usage.completion_tokens, text, at: performance.now() });
    this.tell();
  }

  // Lines break between the parts only.
  tell() {
    const parts = this.summary().map((part) => html("span", { textContent: part }));
    this.after.replaceChildren(...parts.flatMap((part, index) => (index ? [" · ", part] : [part])));
  }

  // Of the tokens after the first piece, which may have several itself.
  get speed() {
    const [first, last] = [this.pieces[0], this.pieces.at(-1)];
    return first && last.at > first.at ? (last.upTo - first.upTo) / ((last.at - first.at) / 1000) : null;
  }

  summary() {
    const { sent, first } = this.times;
    const { answer } = this.tokens;
    const speed = this.speed === null ? "" : `${rate(this.speed)} tokens/s`;
    const begun = first === null ? "" : `first token after ${seconds((first - sent) / 1000)}`;
    return [answer ? `${count(answer)} tokens` : "", speed, begun, this.ended].filter(Boolean);
  }

  end(how = "") {
    this.ended = how || this.ended;
    this.answer.render();
    this.tell();
    this.nodes.assistant.classList.remove("waiting");
    if (!this.answer.text && !this.thought.textContent && !this.ended) this.after.textContent = "The answer is empty.";
  }

  // `actions`: [{label, act}], buttons below the reason.
  fail(message, actions) {
    this.failed = true;
    this.end("failed");
    this.nodes.user.classList.add("failed");
    if (!this.answer.text && !this.thought.textContent) this.nodes.assistant.remove();
    const buttons = actions.map(({ label, act }) => html("button", { type: "button", textContent: label, onclick: act }));
    const box = html("div", { className: "message error" }, html("div", { className: "text", textContent: message }), html("div", { className: "actions" }, ...buttons));
    box.setAttribute("role", "alert");
    this.nodes.error = box;
    this.list.append(box);
    this.toEnd();
  }

  remove() {
    for (const node of Object.values(this.nodes)) node.remove();
  }
}
