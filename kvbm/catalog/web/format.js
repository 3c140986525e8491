// Numbers, sizes and times as people read them.

export const TIERS = ["HBM", "HOST", "NVME"];
const COLOURED = [...TIERS, "OBJECT"];
export const colourOf = (tier) => `tier${Math.max(0, COLOURED.indexOf(tier))}`;
const NONE = "–";
const SIZES = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
const GROUPS = new Intl.NumberFormat("en-US");

export const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
export const count = (value) => (isNumber(value) ? GROUPS.format(Math.round(value)) : NONE);

const three = (value) => (value >= 100 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value.toFixed(2));

// A count in three digits: 12.4 M.
export function short(value) {
  if (!isNumber(value)) return NONE;
  if (Math.abs(value) < 10000) return GROUPS.format(Math.round(value));
  for (const [unit, size] of [["T", 1e12], ["G", 1e9], ["M", 1e6], ["k", 1e3]]) if (value >= size) return `${three(value / size)} ${unit}`;
  return GROUPS.format(value);
}

export function bytes(value) {
  if (!isNumber(value)) return NONE;
  let unit = 0;
  while (value >= 1024 && unit < SIZES.length - 1) { value /= 1024; unit += 1; }
  return `${unit ? three(value) : Math.round(value)} ${SIZES[unit]}`;
}

export const percent = (part) => (isNumber(part) ? `${(100 * part).toFixed(1)} %` : NONE);
export const share = (part, whole) => (isNumber(part) && whole > 0 ? part / whole : null);

export function seconds(value) {
  if (!isNumber(value)) return NONE;
  if (value === 0) return "0 s";
  if (value < 0.001) return `${(value * 1e6).toFixed(0)} µs`;
  if (value < 1) return `${three(value * 1000)} ms`;
  if (value < 60) return `${value < 10 ? value.toFixed(2) : value.toFixed(0)} s`;
  if (value < 3600) return `${Math.floor(value / 60)} m ${Math.floor(value % 60)} s`;
  if (value < 86400) return `${Math.floor(value / 3600)} h ${Math.floor((value % 3600) / 60)} m`;
  return `${Math.floor(value / 86400)} d ${Math.floor((value % 86400) / 3600)} h`;
}

const two = (value) => String(value).padStart(2, "0");

// A moment in UTC, to the second: 2026-11-30 12:00:05.
export function moment(ms) {
  if (!isNumber(ms)) return NONE;
  const at = new Date(ms);
  return `${at.getUTCFullYear()}-${two(at.getUTCMonth() + 1)}-${two(at.getUTCDate())} ${clock(ms)}`;
}

// From when to when: the day once, where it is the same.
export const stretch = (from, until) => (moment(from).slice(0, 10) === moment(until).slice(0, 10) ? `${moment(from)} – ${clock(until)}` : `${moment(from)} – ${moment(until)}`);

export function clock(ms) {
  const at = new Date(ms);
  return `${two(at.getUTCHours())}:${two(at.getUTCMinutes())}:${two(at.getUTCSeconds())}`;
}

// Of a text of the history, without the zone and with milliseconds.
export const told = (text) => (text ? text.replace("T", " ").replace(/(\.\d{3})\d*Z$/, "$1") : NONE);

export const BUCKETS = (bounds) => [...bounds.map((bound) => `≤ ${coarse(bound)}`), `> ${coarse(bounds[bounds.length - 1])}`];
const coarse = (value) => (value < 60 ? `${value} s` : value < 3600 ? `${value / 60} m` : value < 86400 ? `${value / 3600} h` : `${value / 86400} d`);

// In which bucket the middle one lies, in words.
export function median(counts, bounds) {
  const all = counts.reduce((sum, one) => sum + one, 0);
  if (!all) return NONE;
  let seen = 0;
  for (let at = 0; at < counts.length; at += 1) {
    seen += counts[at];
    if (2 * seen >= all) return BUCKETS(bounds)[at];
  }
  return NONE;
}

const LINE = 110; // characters

// Of reasons with "; " between, the beginning for one line, and each of them once.
export function brief(reasons) {
  const all = [...new Set(reasons.split("; ").map((one) => one.trim()).filter(Boolean))];
  const parts = all.filter((one) => !all.some((other) => other !== one && other.includes(one)));
  const first = parts[0].length > LINE ? `${parts[0].slice(0, LINE).replace(/[\s,:]+\S*$/, "")} …` : parts[0];
  return { parts, line: parts.length > 1 ? `${first} (and ${parts.length - 1} more)` : first, isCut: parts.length > 1 || first !== parts[0] };
}

// Whose clocks the times of an answer are of, in words.
export const clocks = (answer) => (answer.clocks === "instances" ? "Times are those of the instances' clocks." : "");

export const EXCLUDED = {
  silent: "no heartbeat comes: left out of answers until it is heard",
  stopped: "stopped cleanly",
  restarted: "restarted: left out until its new epoch is read",
  newer: "a newer kvbm writes what this catalog cannot read",
};

export const WHY_MISSED = {
  no_full_block: "no full block",
  namespace_unknown: "namespace unknown",
  hashes_short: "hashes of longer blocks",
  excluded: "holders left out",
  not_held: "not held",
};

export const many = (n, one) => `${count(n)} ${one}${n === 1 ? "" : "s"}`;
