// A conversation with the model, over the same API that clients use.

import { byId, html } from "./dom.js";
import { count } from "./format.js";
import { askForKey, authorised, refused } from "./session.js";
import { events, Failure, failureOf, reached } from "./stream.js";
import { Turn } from "./turn.js";

const FINE = matchMedia("(pointer: fine)");
const ROUTED = "return_routed_experts";
const GROUP = "data_parallel_rank";
const FIELDS = { temperature: "temperature", max_tokens: "max-tokens" };

export class Chat {
  // `path`: shows where the tokens of an answer went.
  constructor(path) {
    this.path = path;
    this.turns = [];
    this.groups = []; // of the server, with their load
    this.group = null; // that serves the conversation
    this.refused = new Set(); // fields that the server does not know
    this.list = byId("messages");
    this.prompt = byId("prompt");
    byId("ask").addEventListener("submit", (event) => { event.preventDefault(); this.ask(this.prompt.value.trim()); });
    this.prompt.addEventListener("keydown", (event) => this.press(event));
    document.addEventListener("keydown", (event) => { if (event.key === "Escape") this.abort?.abort(); });
    byId("stop").addEventListener("click", () => this.abort?.abort());
    byId("clear").addEventListener("click", () => this.clear());
    byId("more-examples").addEventListener("click", () => this.learn());
  }

  press(event) {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    byId("ask").requestSubmit(); // which checks the fields
  }

  // The model's name, its defaults, and example questions.
  async learn() {
    const response = await authorised("/dashboard/chat");
    if (!response.ok) return;
    this.facts = await response.json();
    byId("temperature").placeholder = this.facts.temperature;
    byId("max-tokens").placeholder = count(this.facts.context_length);
    this.path.mesh = this.facts.mesh;
    this.offer(this.facts.examples);
  }

  offer(examples) {
    byId("examples").hidden = !examples.length;
    byId("example-list").replaceChildren(...examples.map(({ task, prompt }) => html(
      "button",
      { type: "button", title: prompt, onclick: () => this.ask(prompt) },
      html("b", { textContent: task }),
      html("span", { textContent: shortened(prompt) }),
    )));
  }

  clear() {
    this.abort?.abort();
    for (const turn of this.turns) turn.remove();
    this.turns = [];
    this.path.clear();
    byId("welcome").hidden = false;
    byId("clear").hidden = true;
    this.prompt.focus({ preventScroll: true });
  }

  async ask(text) {
    if (!text || this.abort) return;
    if (text === this.prompt.value.trim()) this.prompt.value = "";
    byId("welcome").hidden = true;
    byId("clear").hidden = false;
    if (!this.turns.length) this.chooseGroup();
    const messages = [...this.turns.flatMap((turn) => turn.messages), { role: "user", content: text }];
    const turn = new Turn(this.list, text);
    this.turns.push(turn);
    this.busy(true);
    try {
      await this.follow(turn, messages, this.abort.signal);
      turn.end();
    } catch (error) {
      if (error.name === "AbortError") turn.end("stopped");
      else this.fail(turn, error);
    } finally {
      this.busy(false);
    }
  }

  // One serving group for the whole conversation: it has the conversation's prefix, and its ranks are
  // the home of the tokens.
  chooseGroup() {
    const load = ({ running, waiting }) => running + waiting;
    const least = (best, one) => (load(one) < load(best) ? one : best);
    this.group = this.groups.length > 1 ? this.groups.reduce(least).group : null;
  }

  // The fields that only the path needs.
  get extras() {
    const limit = byId("max-tokens").value;
    if (this.refused.has(ROUTED + limit)) return {};
    const group = this.group === null || this.refused.has(GROUP) ? {} : { [GROUP]: this.group };
    return { [ROUTED]: true, routed_experts_start_len: -1, ...group };
  }

  async follow(turn, messages, signal) {
    const response = await this.send(messages, signal);
    const group = this.extras[GROUP];
    let routed = "";
    for await (const piece of events(response.body)) {
      if (piece.error) throw new Failure(piece.error.message, piece.error);
      turn.take(piece);
      routed = piece.sglext?.routed_experts ?? routed;
    }
    this.path.take(routed, turn.pieces, group);
  }

  // Without the fields that only the path needs, if the server refuses them.
  async send(messages, signal) {
    if (!this.facts) await reached(this.learn());
    const response = await reached(authorised("/v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      signal,
      body: JSON.stringify(this.body(messages)),
    }));
    if (response.ok) return response;
    if (refused(response) && await askForKey()) return this.send(messages, signal);
    const failure = await failureOf(response);
    if (!this.drop(failure)) throw failure;
    return this.send(messages, signal);
  }

  // Whether the server refused a field of the path, which the next requests leave out: the routed
  // experts until the user sets another limit, as too many tokens may be the reason.
  drop({ status, param, message }) {
    const name = [GROUP, ROUTED].find((one) => one in this.extras && (param === one || message.includes(one)));
    if (status !== 400 || !name) return false;
    this.refused.add(name === GROUP ? GROUP : ROUTED + byId("max-tokens").value);
    if (name === ROUTED) this.path.refuse(message);
    return true;
  }

  body(messages) {
    const given = Object.entries(FIELDS).filter(([, id]) => byId(id).value !== "");
    return {
      model: this.facts?.model ?? "default",
      messages,
      stream: true,
      stream_options: { include_usage: true, continuous_usage_stats: true },
      ...Object.fromEntries(given.map(([name, id]) => [name, Number(byId(id).value)])),
      ...this.extras,
    };
  }

  fail(turn, error) {
    const again = (anew) => () => {
      if (anew) this.clear();
      else { turn.remove(); this.turns = this.turns.filter((one) => one !== turn); }
      this.ask(turn.question);
    };
    const actions = [{ label: "Try again", act: again(false) }];
    if (error.code === "context_length_exceeded" && this.turns.length > 1) {
      actions.unshift({ label: "Ask in a new conversation", act: again(true) });
    }
    turn.fail(error.message, actions);
  }

  busy(yes) {
    this.abort = yes ? new AbortController() : null;
    byId("send").hidden = yes;
    byId("stop").hidden = !yes;
    this.list.setAttribute("aria-busy", String(yes));
    if (!yes && FINE.matches) this.prompt.focus({ preventScroll: true }); // a phone would show its keyboard
  }
}

// A prompt without its tables, in one line.
function shortened(prompt) {
  return prompt.split("\n").filter((line) => line && !line.startsWith("|")).join(" ") || prompt;
}
