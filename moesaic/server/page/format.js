// How numbers and durations are written.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

export function count(value) {
  if (value === null || value === undefined) return "–";
  return Math.abs(value) >= 100000 ? short.format(value) : whole.format(value);
}

export function rate(value) {
  if (value === null || value === undefined) return "–";
  return value > 0 && value < 10 ? value.toFixed(1) : count(value);
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 0.01) return `${(value * 1000).toFixed(1)} ms`;
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  return value < 100 ? `${value.toFixed(value < 10 ? 2 : 1)} s` : `${Math.round(value)} s`;
}

export function percent(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  return `${(value * 100).toFixed(value > 0 && value < 0.1 ? 1 : 0)}%`;
}

export function bytes(value) {
  const units = ["B", "KB", "MB", "GB"];
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) { value /= 1000; unit += 1; }
  return `${value >= 100 || unit === 0 ? Math.round(value) : value.toFixed(1)} ${units[unit]}`;
}
