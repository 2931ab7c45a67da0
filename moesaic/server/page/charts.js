// Curves over the last minutes, drawn as SVG.

import { html, svg } from "./dom.js";

const SPAN = 300; // seconds, once there are as many
const SHORTEST = 60;
const WIDE = 300;
const HIGH = 100;

export class Chart {
  // `series`: [{label, value: sample => number or null}], drawn in the colours a and b.
  constructor(plot, series, format, { least = 0, axis = true } = {}) {
    this.plot = plot;
    this.series = series;
    this.format = format;
    this.least = least;
    this.samples = [];
    this.paths = series.map((_, index) => svg("path", { class: "ab"[index] }));
    this.area = svg("path", { class: "area" });
    const grid = [0, HIGH / 2, HIGH].map((y) => svg("line", { x1: 0, x2: WIDE, y1: y, y2: y }));
    const picture = svg("svg", { viewBox: `0 0 ${WIDE} ${HIGH}`, preserveAspectRatio: "none", "aria-hidden": "true" });
    picture.append(...grid, this.area, ...this.paths);
    this.top = html("span", { className: "top" });
    plot.append(picture, this.top);
    if (axis) {
      this.from = html("span", { className: "when from" });
      plot.append(this.from);
      plot.append(html("span", { className: "when to", textContent: "now" }));
    }
    plot.addEventListener("pointermove", (event) => this.point(event));
    plot.addEventListener("pointerleave", () => this.leave());
  }

  draw(samples, now) {
    this.samples = samples;
    this.now = now;
    this.span = Math.min(SPAN, Math.max(SHORTEST, samples.length ? now - samples[0].when : 0));
    if (this.from) this.from.textContent = this.span >= 120 ? `${Math.round(this.span / 60)} min ago` : `${Math.round(this.span)} s ago`;
    const values = samples.flatMap((sample) => this.series.map((one) => one.value(sample) ?? 0));
    this.max = niceMax(1.05 * Math.max(this.least, ...values));
    this.top.textContent = this.max ? this.format(this.max) : "";
    this.series.forEach((one, index) => this.paths[index].setAttribute("d", this.line(one.value)));
    this.area.setAttribute("d", this.filled(this.series[0].value));
  }

  x(sample) { return WIDE * (1 - (this.now - sample.when) / this.span); }

  y(value) { return HIGH - (this.max ? (value / this.max) * HIGH : 0); }

  line(value) {
    let path = "";
    let pen = "M";
    for (const sample of this.samples) {
      const here = value(sample);
      if (here === null || here === undefined || this.x(sample) < 0) { pen = "M"; continue; }
      path += `${pen}${this.x(sample).toFixed(1)} ${this.y(here).toFixed(1)}`;
      pen = "L";
    }
    return path;
  }

  // Each piece without gaps gets an area of its own.
  filled(value) {
    return this.line(value).split("M").filter(Boolean).map((piece) => {
      const xs = piece.split("L").map((point) => point.split(" ")[0]);
      return `M${xs[0]} ${HIGH}L${piece}L${xs[xs.length - 1]} ${HIGH}Z`;
    }).join("");
  }

  point(event) {
    const box = this.plot.getBoundingClientRect();
    const share = (event.clientX - box.left) / box.width;
    const wanted = this.now - this.span * (1 - share);
    let near = null;
    for (const sample of this.samples) {
      if (near === null || Math.abs(sample.when - wanted) < Math.abs(near.when - wanted)) near = sample;
    }
    this.leave();
    if (near === null || Math.abs(near.when - wanted) > 5) return;
    const left = (this.x(near) / WIDE) * box.width;
    const ago = Math.max(0, Math.round(this.now - near.when));
    const told = this.series.map((one) => `${one.label} ${this.format(one.value(near))}`);
    const tip = html("div", { className: "tip", textContent: [`${ago} s ago`, ...told].join("\n") });
    const cursor = html("div", { className: "cursor" });
    cursor.style.left = `${left}px`;
    tip.style[left < box.width / 2 ? "left" : "right"] = `${(left < box.width / 2 ? left : box.width - left) + 8}px`;
    this.plot.append(cursor, tip);
  }

  leave() { this.plot.querySelectorAll(".cursor, .tip").forEach((element) => element.remove()); }
}

function niceMax(value) {
  if (!(value > 0)) return 0;
  const unit = 10 ** Math.floor(Math.log10(value));
  return [1, 1.5, 2, 3, 4, 5, 6, 8, 10].map((step) => step * unit).find((step) => step >= value * 0.999);
}
