// Which experts and which ranks the tokens of each layer went to.

import { html, svg } from "./dom.js";
import { count } from "./format.js";

const LEVELS = 8;
const LABEL = 26;
const BALANCE = 120;

// 0 without tokens, the middle at the layer's mean, the last from four times that.
export function level(tokens, mean) {
  if (!tokens || !mean) return 0;
  const share = Math.log2(1 + tokens / mean) / Math.log2(5);
  return Math.max(1, Math.min(LEVELS, Math.round(share * LEVELS)));
}

export function scale(element) {
  for (let step = 0; step <= LEVELS; step += 1) element.append(html("i", { className: `h${step}` }));
}

class Grid {
  // `columns`: names; `name`: what one of them is; `room`: kept free on the right.
  constructor(place, layers, columns, name, room, tell) {
    this.place = place;
    this.columns = columns;
    this.name = name;
    const width = Math.max(200, place.clientWidth);
    const side = (width - LABEL - room) / columns.length;
    const high = layers.length <= 24 ? 17 : layers.length <= 48 ? 11 : 7;
    this.room = { x: width - room, end: width, high };
    this.root = svg("svg", { viewBox: `0 0 ${width} ${layers.length * high + 18}`, role: "img" });
    this.root.setAttribute("aria-label", `tokens by layer and ${name}`);
    this.cells = layers.map((layer, row) => this.row(layer, row, side, high));
    this.header(layers.length * high, side, width);
    this.root.addEventListener("pointerover", (event) => tell(event.target.dataset.told ?? ""));
    this.root.addEventListener("pointerleave", () => tell(""));
    place.replaceChildren(this.root);
  }

  row(layer, row, side, high) {
    const gap = side > 6 ? 1 : side > 3 ? 0.5 : 0;
    if (high >= 11 || row % 4 === 0) {
      const text = svg("text", { x: LABEL - 6, y: (row + 0.5) * high, class: "end" });
      text.textContent = layer;
      this.root.append(text);
    }
    return this.columns.map((_, column) => {
      const box = { x: LABEL + column * side, y: row * high, width: side - gap, height: high - gap };
      const cell = svg("rect", { ...box, rx: Math.min(2, side / 6), class: "cell h0" });
      this.root.append(cell);
      return cell;
    });
  }

  header(y, side, width) {
    const every = Math.max(1, Math.ceil(24 / side));
    this.columns.forEach((column, index) => {
      if (index % every || LABEL + (index + 0.5) * side > width - 8) return;
      const text = svg("text", { x: LABEL + (index + 0.5) * side, y: y + 9, class: "middle" });
      text.textContent = column;
      this.root.append(text);
    });
  }

  draw(layers, values) {
    layers.forEach((layer, row) => {
      const tokens = values(layer);
      const mean = tokens.reduce((sum, one) => sum + one, 0) / tokens.length;
      tokens.forEach((number, column) => {
        const cell = this.cells[row][column];
        if (cell.dataset.tokens === String(number)) return;
        const times = mean ? ` (${(number / mean).toFixed(2)}× the mean)` : "";
        cell.dataset.tokens = number;
        cell.dataset.told = `layer ${layer.layer}, ${this.name} ${this.columns[column]}: ${count(number)} tokens${times}`;
        cell.setAttribute("class", `cell h${level(number, mean)}`);
      });
    });
  }
}

export class ExpertMaps {
  constructor(experts, ranks, tell) {
    this.places = { experts, ranks };
    this.tell = tell;
    this.point = (text) => { this.pointed = text; tell(text || this.hottest); };
    this.shape = "";
    this.past = [];
    this.recent = false;
    new ResizeObserver(() => this.fit()).observe(experts);
  }

  // The drawing is made for a width.
  fit() {
    const width = this.places.experts.clientWidth;
    if (width === this.width) return;
    this.width = width;
    this.shape = "";
    if (this.last) this.show(...this.last);
  }

  show(load, now) {
    this.last = [load, now];
    if (!load.layers.length) return;
    const everybody = [...new Set(load.layers.flatMap((layer) => Object.keys(layer.ranks)))];
    const shape = JSON.stringify([load.layers.map((layer) => layer.layer), load.number, everybody]);
    if (shape !== this.shape) this.build(load, everybody, shape);
    this.remember(load, now);
    const layers = this.recent ? since(load.layers, this.past[0].layers) : load.layers;
    this.experts.draw(layers, (layer) => layer.experts);
    this.ranks.draw(layers, (layer) => everybody.map((rank) => layer.ranks[rank] ?? 0));
    layers.forEach((layer, row) => this.balance(row, layer.balancedness));
    this.hottest = hottest(layers);
    if (!this.pointed) this.tell(this.hottest);
  }

  build(load, everybody, shape) {
    this.shape = shape;
    if (shape !== this.known) this.past = [];
    this.known = shape;
    const layers = load.layers.map((layer) => layer.layer);
    const names = Array.from({ length: load.number }, (_, index) => index);
    this.experts = new Grid(this.places.experts, layers, names, "expert", 0, this.point);
    this.ranks = new Grid(this.places.ranks, layers, everybody, "rank", BALANCE, this.point);
    const { x, end, high } = this.ranks.room;
    this.bars = layers.map((_, row) => {
      const y = row * high;
      const back = svg("rect", { x: x + 10, y: y + high * 0.3, width: 70, height: high * 0.4, rx: 1 });
      const bar = svg("rect", { x: x + 10, y: y + high * 0.3, width: 0, height: high * 0.4, rx: 1, class: "balance" });
      const text = svg("text", { x: end - 4, y: y + high / 2, class: "end strong" });
      this.ranks.root.append(back, bar, text);
      return { bar, text, shown: high >= 11 || row % 4 === 0 };
    });
  }

  balance(row, value) {
    const { bar, text, shown } = this.bars[row];
    bar.setAttribute("width", 70 * (value ?? 0));
    bar.dataset.balancedness = value ?? "";
    text.textContent = shown && value !== null ? value.toFixed(2) : "";
  }

  remember(load, now) {
    const newest = this.past[this.past.length - 1];
    if (newest && total(load.layers) < total(newest.layers)) this.past = []; // another server
    if (!this.past.length || now - newest.now >= 5) this.past.push({ now, layers: load.layers });
    while (this.past.length > 1 && now - this.past[1].now >= 60) this.past.shift();
  }

  choose(recent) {
    this.recent = recent;
    if (this.last) this.show(...this.last);
  }
}

function total(layers) {
  return layers.reduce((sum, layer) => sum + layer.experts.reduce((one, other) => one + other, 0), 0);
}

function hottest(layers) {
  let found = null;
  for (const { layer, experts } of layers) {
    const mean = experts.reduce((sum, one) => sum + one, 0) / experts.length;
    const most = Math.max(...experts);
    if (mean && (!found || most / mean > found.times)) found = { layer, expert: experts.indexOf(most), times: most / mean };
  }
  return found ? `hottest: expert ${found.expert} of layer ${found.layer}, ${found.times.toFixed(1)}× the mean` : "";
}

function since(layers, before) {
  return layers.map((layer, row) => {
    const then = before[row];
    const ranks = {};
    for (const [rank, tokens] of Object.entries(layer.ranks)) ranks[rank] = tokens - (then.ranks[rank] ?? 0);
    const loads = Object.values(ranks);
    const most = Math.max(...loads);
    const mean = loads.reduce((sum, one) => sum + one, 0) / loads.length;
    const experts = layer.experts.map((tokens, expert) => tokens - then.experts[expert]);
    return { layer: layer.layer, experts, ranks, balancedness: most ? mean / most : null };
  });
}
