// The table of ranks: what each does now, and how its time went between two looks.

import { html } from "./dom.js";
import { bytes, percent, rate, seconds } from "./format.js";

const NAMES = ["rank", "state", "number steps", "number step", "busy", "number moved"];
const LABELS = { "number steps": "steps/s", "number step": "step", "number moved": "all-to-all" };

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
    const cells = NAMES.map((name) => {
      const cell = html("td", { className: name, textContent: name.startsWith("number") ? "–" : "" });
      cell.dataset.name = LABELS[name] ?? "";
      return cell;
    });
    const [first, , , , busy] = cells;
    const compute = html("i", { className: "compute" });
    const wait = html("i", { className: "wait" });
    const told = html("em");
    first.append(String(rank.rank), html("small", { textContent: place(rank.place) }));
    busy.append(html("div", { className: "bar" }, html("span", {}, compute, wait), told));
    const root = html("tr", {}, ...cells);
    root.dataset.rank = rank.rank;
    this.body.append(root);
    return { root, cells, compute, wait, told };
  }

  update(row, rank, now) {
    const last = this.before.get(rank.rank);
    const moved = total(rank);
    // An idle rank wakes up for every look of this page, so the age of that state says nothing.
    const long = rank.state !== "idle" && rank.state_age >= 1;
    row.cells[1].textContent = long ? `${rank.state} for ${seconds(rank.state_age)}` : rank.state;
    row.cells[1].dataset.state = rank.state;
    // Values that are read once a second may be the same twice.
    if (last && now - last.now < 0.9) return;
    this.before.set(rank.rank, { now, rank, moved });
    if (!last || rank.steps < last.rank.steps) return;
    const period = now - last.now;
    const steps = rank.steps - last.rank.steps;
    const compute = rank.compute_seconds - last.rank.compute_seconds;
    const wait = rank.wait_seconds - last.rank.wait_seconds;
    row.cells[2].textContent = rate(steps / period);
    row.cells[3].textContent = steps ? seconds((compute + wait) / steps) : "–";
    row.cells[5].textContent = `${bytes((moved - last.moved) / period)}/s`;
    const idle = !steps && rank.state === "idle"; // but for the query itself
    this.bar(row, idle ? 0 : compute / period, idle ? 0 : wait / period);
  }

  // Shares of the time; the rest of the bar is idle. Both are counted when a state ends, so a long
  // state may exceed the time between two looks.
  bar(row, compute, wait) {
    const whole = Math.max(1, compute + wait);
    row.compute.style.width = `${(100 * compute) / whole}%`;
    row.wait.style.width = `${(100 * wait) / whole}%`;
    row.told.textContent = compute + wait > 0 ? `${percent(compute / whole)}, wait ${percent(wait / whole)}` : "idle";
  }
}

function place(text) {
  const inner = /\((.*)\)/.exec(text);
  return inner ? inner[1] : "";
}

function total(rank) {
  return Object.values(rank.traffic).reduce((sum, one) => sum + one.dispatch_bytes + one.combine_bytes, 0);
}

// What a service that goes on without lost ranks says of them.
export function membership(told, number, losses) {
  const parts = [`${told.live.length} of ${number} ranks live`, `${told.lost} lost`, `${told.returned} returned`];
  const last = told.changes[told.changes.length - 1];
  if (last) {
    const ended = last.seconds === null ? "going on" : `adopted after ${seconds(last.seconds)}`;
    parts.push(`last: ${last.cause} (${ended})`);
  }
  const lost = losses && losses.last[losses.last.length - 1];
  if (lost) {
    parts.push(`HTTP process lost ${losses.http}, supervisor ${losses.supervisor} times`);
    const back = lost.seconds === null ? "is away" : `back after ${seconds(lost.seconds)}`;
    parts.push(`last: ${lost.cause} (${back})`);
  }
  return parts.join(" · ");
}
