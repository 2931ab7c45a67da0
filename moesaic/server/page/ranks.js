// The table of ranks: what each does now, and how its time went between two looks.

import { html } from "./charts.js";
import { bytes, rate, seconds } from "./format.js";

export class Ranks {
  constructor(body) {
    this.body = body;
    this.before = new Map();
    this.rows = new Map();
  }

  show(ranks, now) {
    const seen = new Set(ranks.map((rank) => rank.rank));
    for (const [number, row] of this.rows) {
      if (!seen.has(number)) { row.root.remove(); this.rows.delete(number); }
    }
    for (const rank of ranks) {
      if (!this.rows.has(rank.rank)) this.rows.set(rank.rank, this.add(rank));
      this.update(this.rows.get(rank.rank), rank, now);
    }
  }

  add(rank) {
    const cells = Array.from({ length: 6 }, () => html("td"));
    [2, 3, 5].forEach((index) => cells[index].classList.add("number"));
    const share = html("i");
    const told = html("em");
    cells[0].append(String(rank.rank), html("small", { textContent: place(rank.place) }));
    cells[4].append(html("div", { className: "bar" }, html("span", {}, share), told));
    const root = html("tr", {}, ...cells);
    root.dataset.rank = rank.rank;
    this.body.append(root);
    return { root, cells, share, told };
  }

  update(row, rank, now) {
    const last = this.before.get(rank.rank);
    const moved = total(rank);
    row.cells[1].textContent = rank.state_age >= 1 ? `${rank.state} for ${seconds(rank.state_age)}` : rank.state;
    row.cells[1].dataset.state = rank.state;
    // Values that are read once a second may be the same twice.
    if (last && now - last.now < 0.9) return;
    this.before.set(rank.rank, { now, rank, moved });
    if (!last || rank.steps < last.rank.steps) return;
    const period = now - last.now;
    const steps = rank.steps - last.rank.steps;
    const compute = rank.compute_seconds - last.rank.compute_seconds;
    const busy = compute + rank.wait_seconds - last.rank.wait_seconds;
    row.cells[2].textContent = rate(steps / period);
    row.cells[3].textContent = steps ? seconds(busy / steps) : "–";
    row.cells[5].textContent = `${bytes((moved - last.moved) / period)}/s`;
    row.share.style.width = busy > 0 ? `${(100 * compute) / busy}%` : "0";
    row.told.textContent = busy > 0 ? `${Math.round((100 * (busy - compute)) / busy)}% wait` : "idle";
  }
}

function place(text) {
  const inner = /\((.*)\)/.exec(text);
  return inner ? inner[1] : "";
}

function total(rank) {
  return Object.values(rank.traffic).reduce((sum, one) => sum + one.dispatch_bytes + one.combine_bytes, 0);
}
