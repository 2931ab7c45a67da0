// The path of a token through layers and ranks: which experts computed it, and where they are.

import { byId, svg } from "./dom.js";
import { count } from "./format.js";

const LABEL = 36;
const HEADER = 22;
const CURVED = 20; // the least height of a row with curves
const PLAY = 160; // milliseconds per token
const HINT = "Ask something: this shows which experts computed each token of the answer, and on which ranks.";

// The height of a layer's row: 48 layers must fit a screen, three must not look lost.
const rowHeight = (layers) => Math.max(13, Math.min(46, Math.round(400 / layers)));

// The answer's routing: `experts(token, layer)` are logical ids, best first.
class Routing {
  constructor(text, { num_layers: layers, top_k: width }) {
    const bytes = Uint8Array.from(atob(text), (char) => char.charCodeAt(0));
    this.ids = new Int32Array(bytes.buffer);
    this.layers = layers;
    this.width = width;
    this.tokens = Math.floor(this.ids.length / (layers * width));
  }

  experts(token, layer) {
    const begin = (token * this.layers + layer) * this.width;
    return this.ids.subarray(begin, begin + this.width);
  }
}

// Where experts are. `mesh`: [{rank, replica, group, ep}]; `held`: the layers of each rank, and the experts in each of them.
class Placement {
  constructor(mesh, held, group) {
    const home = mesh.find((one) => one.group === group) ?? (mesh.every((one) => one.group === mesh[0].group) ? mesh[0] : null);
    this.group = home?.group ?? null;
    this.members = mesh.filter((one) => home === null || one.replica === home.replica);
    this.holds = held.map(({ layers, experts }) => new Map(layers.map((layer, place) => [layer, new Set(experts[place])])));
  }

  // Whether some ranks have the token and others do not.
  get hasOwn() {
    return this.group !== null && this.members.some((one) => one.group !== this.group);
  }

  get ranks() { return this.members.map((one) => one.rank); }

  // The ranks that have a layer and compute the attention of the request's group.
  home(layer) {
    return this.members.filter(({ rank, group }) => group === this.group && this.holds[rank].has(layer)).map((one) => one.rank);
  }

  // The ranks that have an expert; `sure` if all of them compute it, else one of them does.
  find(layer, expert) {
    const found = this.members.filter(({ rank }) => this.holds[rank].get(layer)?.has(expert));
    const copies = new Set(found.map(({ replica, ep }) => `${replica} ${ep}`));
    return { ranks: found.map((one) => one.rank), sure: copies.size < 2 };
  }
}

export class Path {
  constructor(root) {
    this.root = root;
    this.place = root.querySelector(".lanes");
    this.slider = byId("token");
    this.cell = byId("path-cell");
    this.slider.addEventListener("input", () => { this.pause(); this.draw(); });
    byId("play").addEventListener("click", () => (this.timer ? this.pause() : this.play()));
    this.place.addEventListener("keydown", (event) => this.press(event));
    new ResizeObserver(() => this.fit()).observe(this.place);
    this.clear();
  }

  // `data`: the page's data.
  know(data) {
    this.data = data;
    this.root.hidden = !data.experts.number;
  }

  clear() {
    this.tell(HINT);
  }

  refuse(message) {
    this.refusal = `No path: the server refused to return routed experts (${message}).`;
  }

  tell(text) {
    this.routing = null;
    this.pause();
    byId("path-hint").textContent = text;
    byId("path-hint").hidden = false;
    byId("path-view").hidden = true;
    byId("path-keys").hidden = true;
  }

  // `text`: the routing as the server sends it; `pieces`: the text of tokens; `group`: that served them.
  take(text, pieces, group) {
    const routing = this.data?.routing;
    if (!text || !routing || !this.mesh) {
      this.tell(this.refusal ?? "No path: this answer came without its routed experts.");
      return;
    }
    this.refusal = null;
    this.layers = [...new Set(routing.ranks.flatMap((rank) => rank.layers))].sort((one, other) => one - other);
    this.routing = new Routing(text, routing);
    this.placement = new Placement(this.mesh, routing.ranks, group);
    this.pieces = pieces;
    if (!this.routing.tokens) return;
    byId("path-hint").hidden = true;
    byId("path-view").hidden = false;
    this.slider.max = this.routing.tokens;
    this.slider.value = this.routing.tokens;
    this.draw();
  }

  fit() {
    if (this.routing && this.place.clientWidth !== this.width) this.draw();
  }

  play() {
    if (this.slider.value === this.slider.max) this.slider.value = 1;
    byId("play").textContent = "Pause";
    this.timer = setInterval(() => {
      if (this.slider.value === this.slider.max) { this.pause(); return; }
      this.slider.value = Number(this.slider.value) + 1;
      this.draw();
    }, PLAY);
    this.draw();
  }

  pause() {
    clearInterval(this.timer);
    this.timer = null;
    byId("play").textContent = "Play";
  }

  draw() {
    this.width = this.place.clientWidth;
    if (!this.width) return; // not in sight
    const token = Number(this.slider.value) - 1;
    const visits = this.layers.map((layer) => this.visits(token, layer));
    this.picture = new Picture(this.width, this.layers, this.placement, (text) => { this.cell.textContent = text || this.summary; });
    visits.forEach((row, index) => this.picture.row(index, row));
    this.summary = summary(visits, this.placement);
    byId("path-keys").hidden = !this.placement.hasOwn;
    this.cell.textContent = this.summary;
    this.picture.root.setAttribute("aria-label", `Path of token ${token + 1}: ${this.summary}`);
    this.place.replaceChildren(this.picture.root);
    this.name(token);
  }

  visits(token, layer) {
    const home = new Set(this.placement.group === null ? this.placement.ranks : this.placement.home(layer));
    return [...this.routing.experts(token, layer)].flatMap((expert, order) => {
      const { ranks, sure } = this.placement.find(layer, expert);
      return ranks.map((rank) => ({ layer, expert, order, rank, sure, home: home.has(rank), copies: ranks.length }));
    });
  }

  name(token) {
    const index = this.pieces.findIndex((piece) => piece.upTo > token);
    const { text, upTo } = this.pieces[index] ?? {};
    const begin = this.pieces[index - 1]?.upTo ?? 0;
    const together = text && upTo - begin > 1 ? `tokens ${count(begin + 1)} to ${count(upTo)}: ` : "";
    byId("token-number").textContent = `${count(token + 1)} of ${count(this.routing.tokens)}`;
    byId("token-text").textContent = text ? together + text.replaceAll("\n", "⏎").replaceAll(" ", "␣") : "end of the answer";
    byId("token-text").className = text ? "" : "none";
  }

  press(event) {
    const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (!step || !this.picture) return;
    event.preventDefault();
    this.picture.step(...step);
  }
}

// Layers from top to bottom, ranks from left to right.
class Picture {
  constructor(width, layers, placement, tell) {
    this.layers = layers;
    this.placement = placement;
    this.tell = tell;
    this.ranks = placement.ranks;
    this.lane = (width - LABEL) / this.ranks.length;
    this.high = rowHeight(layers.length);
    this.dots = [];
    this.root = svg("svg", { viewBox: `0 0 ${width} ${HEADER + layers.length * this.high + 4}`, role: "img" });
    this.ground();
    this.trunk();
    this.root.addEventListener("pointerover", (event) => this.point(event.target.closest?.(".dot")));
    this.root.addEventListener("pointerdown", (event) => this.point(event.target.closest?.(".dot")));
    // A finger leaves when it is lifted.
    this.root.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") this.point(null); });
  }

  x(rank) { return LABEL + (this.ranks.indexOf(rank) + 0.5) * this.lane; }

  y(row) { return HEADER + (row + 0.5) * this.high; }

  ground() {
    const every = Math.max(1, Math.ceil(20 / this.lane));
    const homes = new Set(this.placement.hasOwn ? this.layers.flatMap((layer) => this.placement.home(layer)) : []);
    this.ranks.forEach((rank, index) => {
      const gap = Math.min(4, this.lane * 0.12);
      const box = { x: LABEL + index * this.lane + gap / 2, y: HEADER - 2, width: this.lane - gap, height: this.layers.length * this.high + 4, rx: Math.min(6, gap) };
      this.root.append(svg("rect", { ...box, class: homes.has(rank) ? "lane home" : "lane" }));
      if (index % every === 0) this.root.append(label(this.x(rank), 9, rankName(rank, this.lane), homes.has(rank) ? "middle strong" : "middle"));
    });
    this.root.append(label(LABEL - 8, 9, "layer", "end"));
    this.layers.forEach((layer, row) => this.root.append(label(LABEL - 8, this.y(row), layer, "end")));
  }

  // The token itself stays with the ranks of its group; copies of it travel to experts.
  trunk() {
    this.stems = this.layers.map((layer) => {
      const home = this.placement.home(layer);
      const all = home.length ? home : this.ranks;
      return all.reduce((sum, rank) => sum + this.x(rank), 0) / all.length;
    });
    const points = this.stems.map((x, row) => `${row ? "L" : "M"}${x} ${this.y(row) - this.high / 2}L${x} ${this.y(row) + this.high / 2}`);
    this.root.append(svg("path", { d: points.join(""), class: "trunk" }));
  }

  row(index, visits) {
    const lanes = grouped(visits);
    const radius = Math.min(this.high / 2 - 2.5, 13, this.lane / 2 - 2);
    const drawn = [];
    for (const [rank, here] of lanes) {
      const step = Math.min(2 * radius + 3, (this.lane - 2 * radius - 2) / Math.max(1, here.length - 1));
      here.forEach((visit, number) => {
        const x = this.x(rank) + (number - (here.length - 1) / 2) * step;
        drawn.push(this.dot(index, x, Math.max(1.5, radius), visit));
      });
    }
    drawn.sort((one, other) => one.at - other.at);
    this.root.append(...(this.high < CURVED ? this.line(index, drawn) : drawn.map((dot) => this.branch(index, dot))), ...drawn);
    this.dots.push(drawn);
  }

  // One line to all experts of a layer, where there is no room for one each.
  line(row, drawn) {
    const ends = [this.stems[row], ...drawn.map((dot) => dot.at)];
    const y = this.y(row);
    return [svg("path", { d: `M${Math.min(...ends)} ${y}L${Math.max(...ends)} ${y}`, class: "branch thin" })];
  }

  // Out to the expert, and back to the token.
  branch(row, { at: x, visit }) {
    const stem = this.stems[row];
    const [y, half] = [this.y(row), this.high / 2];
    const curve = (from, to) => `M${stem} ${from}C${stem} ${(from + y) / 2} ${x} ${(from + y) / 2} ${x} ${to}`;
    return svg("path", { d: curve(y - half, y) + curve(y + half, y), class: `branch ${kind(visit)}` });
  }

  dot(row, x, radius, visit) {
    const group = svg("g", { class: `dot ${kind(visit)}` });
    group.append(svg("circle", { cx: x, cy: this.y(row), r: radius }));
    if (radius >= 8.5) group.append(label(x, this.y(row), visit.expert, "middle"));
    Object.assign(group, { at: x, visit });
    Object.assign(group.dataset, { layer: visit.layer, expert: visit.expert, rank: visit.rank });
    return group;
  }

  point(dot) {
    this.root.querySelector(".pointed")?.classList.remove("pointed");
    dot?.classList.add("pointed");
    this.tell(dot ? told(dot.visit) : "");
  }

  // Moves the pointed dot, for keyboards.
  step(down, right) {
    const now = this.root.querySelector(".pointed");
    const row = Math.max(0, this.dots.findIndex((one) => one.includes(now)));
    const next = now ? Math.min(this.dots.length - 1, Math.max(0, row + down)) : 0;
    const column = now ? this.dots[row].indexOf(now) + right : 0;
    this.point(this.dots[next].at(Math.min(this.dots[next].length - 1, Math.max(0, column))));
  }
}

const kind = ({ home, sure }) => `${home ? "near" : "far"}${sure ? "" : " maybe"}`;

const rankName = (rank, lane) => (lane >= 48 ? `rank ${rank}` : String(rank));

function label(x, y, text, classes) {
  return svg("text", { x, y, class: classes }, String(text));
}

function grouped(visits) {
  const lanes = new Map();
  for (const visit of visits) lanes.set(visit.rank, [...(lanes.get(visit.rank) ?? []), visit]);
  return lanes;
}

function told({ layer, expert, order, rank, sure, copies }) {
  const where = sure ? `rank ${rank}` : `on rank ${rank}, or another of its ${copies} copies`;
  return `layer ${layer} · expert ${expert} (choice ${order + 1}) · ${where}`;
}

function summary(visits, placement) {
  const all = visits.flat();
  const distinct = (chosen) => new Set(chosen.map(({ layer, expert }) => `${layer} ${expert}`)).size;
  const ranks = new Set(all.map((one) => one.rank)).size;
  const everywhere = placement.group !== null && placement.ranks.length > 1 ? "; each rank has the token" : "";
  const travels = `; for ${count(distinct(all.filter((one) => !one.home)))} of them the token travels`;
  return `${count(distinct(all))} experts on ${ranks} ${ranks === 1 ? "rank" : "ranks"}${placement.hasOwn ? travels : everywhere}`;
}
