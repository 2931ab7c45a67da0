// Asks the server once a second and shows what it says.

import { Chart } from "./charts.js";
import { Chat } from "./chat.js";
import { byId } from "./dom.js";
import { count, percent, rate, seconds } from "./format.js";
import { ExpertMaps, scale } from "./heatmap.js";
import { Path } from "./path.js";
import { Ranks, membership } from "./ranks.js";
import { askForKey, authorised, refused } from "./session.js";

const PERIOD = 1000;
const KEPT = 300;
const plot = (id) => byId(id).querySelector(".plot");

function status(state, text) {
  byId("status").dataset.state = state;
  byId("status").textContent = text;
}

class Page {
  constructor() {
    this.samples = [];
    this.charts = this.makeCharts();
    this.ranks = new Ranks(byId("ranks"));
    this.maps = new ExpertMaps(
      byId("expert-map").querySelector(".map"),
      byId("rank-map").querySelector(".map"),
      (text) => { byId("cell").textContent = text; },
    );
    scale(byId("scale"));
    this.path = new Path(byId("path"));
    this.chat = new Chat(this.path);
    byId("give-key").addEventListener("click", () => this.unlock());
    for (const button of document.querySelectorAll("[data-period]")) {
      button.addEventListener("click", () => this.choosePeriod(button));
    }
  }

  makeCharts() {
    const latency = (id) => new Chart(plot(id), [
      { label: "P50", value: (sample) => sample.latency[id][0] },
      { label: "P95", value: (sample) => sample.latency[id][1] },
    ], seconds, { axis: false });
    return [
      new Chart(plot("throughput"), [
        { label: "generated", value: (sample) => sample.generated_tokens },
        { label: "prompt", value: (sample) => sample.prompt_tokens },
      ], rate, { least: 9 }),
      new Chart(plot("queue"), [
        { label: "running", value: (sample) => sample.answering },
        { label: "waiting", value: (sample) => sample.open - sample.answering },
      ], count, { least: 3.8 }),
      latency("ttft"), latency("itl"), latency("e2e"),
      new Chart(plot("cache"), [{ label: "in use", value: (sample) => sample.pages_used }], percent, { least: 0.009, axis: false }),
    ];
  }

  choosePeriod(chosen) {
    for (const button of document.querySelectorAll("[data-period]")) {
      button.setAttribute("aria-pressed", String(button === chosen));
    }
    this.maps.choose(chosen.dataset.period === "recent");
  }

  async look() {
    const since = this.samples.length ? this.samples[this.samples.length - 1].when : 0;
    const response = await authorised(`/dashboard/data?since=${since}`);
    if (refused(response)) { await this.unlock(); return; }
    if (!response.ok) throw new Error(`status ${response.status}`);
    this.show(await response.json());
    if (!this.chat.facts) await this.chat.learn();
  }

  // Without a key there is nothing to ask for until the user gives one.
  async unlock() {
    this.locked = !await askForKey();
    byId("give-key").hidden = !this.locked;
    if (this.locked) status("late", "a key is needed");
  }

  show(data) {
    this.samples = [...this.samples, ...data.history].slice(-KEPT);
    const newest = this.samples[this.samples.length - 1];
    this.head(data);
    if (newest) {
      this.numbers(data, newest);
      for (const chart of this.charts) chart.draw(this.samples, newest.when);
    }
    this.ranks.show(data.ranks, data.when);
    byId("membership").hidden = !data.membership;
    byId("membership").textContent = data.membership ? membership(data.membership, data.ranks.length, data.losses) : "";
    this.maps.show(data.experts, data.when);
    this.chat.groups = data.groups;
    this.path.know(data);
  }

  head({ info, trouble, age }) {
    byId("model").textContent = info.model;
    document.title = `${info.model} · Moesaic`;
    const mode = info.mode === "auto" || info.a2a_backend === "none" ? "" : ` ${info.mode}`;
    const told = [info.mesh, `all-to-all ${info.a2a_backend}${mode}`, `runner ${info.runner_backend}`, `Moesaic ${info.version}`];
    byId("facts").textContent = told.join(" · ");
    if (trouble) status("down", trouble);
    else if (age > 5) status("late", `ranks silent for ${seconds(age)}`);
    else status("live", "live");
  }

  numbers({ requests, groups }, newest) {
    const sum = (key) => groups.reduce((total, group) => total + group[key], 0);
    const ended = Object.values(requests.ended).reduce((total, one) => total + one, 0);
    const badly = requests.ended.error;
    const pages = sum("pages_total");
    const texts = {
      "generated-rate": rate(newest.generated_tokens),
      "prompt-rate": rate(newest.prompt_tokens),
      "generated-total": count(requests.generated_tokens),
      running: groups.length ? count(sum("running")) : count(requests.answering),
      waiting: count(requests.open - requests.answering),
      ended: count(ended),
      "ended-badly": badly ? `${count(badly)} failed` : "",
      "cache-used": pages ? percent(sum("pages_used") / pages) : "–",
      "cache-hits": percent(requests.prompt_tokens ? requests.cached_tokens / requests.prompt_tokens : 0),
    };
    for (const [id, text] of Object.entries(texts)) byId(id).textContent = text;
    for (const id of ["ttft", "itl", "e2e"]) {
      for (const element of byId(id).querySelectorAll("[data-quantile]")) {
        element.textContent = seconds(newest.latency[id][element.dataset.quantile]);
      }
    }
  }

  async run() {
    for (;;) {
      const begun = performance.now();
      try {
        if (!document.hidden && !this.locked) await this.look();
      } catch (error) {
        status("down", "no answer from the server");
      }
      await new Promise((resolve) => { setTimeout(resolve, Math.max(100, PERIOD - (performance.now() - begun))); });
    }
  }
}

new Page().run();
