// The cluster as the catalog tells it: now, kept by a feed, or as of a moment of the history.

import { TIERS, clock, many, moment } from "./format.js";

const SAMPLES = 180; // of what is drawn over time; a page that is open for a day keeps no more

const WORDS = ["cluster", "state", "excluded", "engine", "version", "place", "trouble", "suspicion"];
const QUIET_MS = 60000; // an instance that is not heard for so long may be gone

const PLAIN = ["epoch", "unread", "suspect", "heard", "queued", "running", "put"];

function derive(row) {
  row.fill = row.blocks.map((blocks, tier) => (row.slots[tier] ? blocks / row.slots[tier] : null));
  const isKnown = row.blocks.every((blocks, tier) => !blocks || row.blockBytes[tier]) && row.slots.some(Boolean);
  row.bytes = isKnown ? row.blocks.reduce((sum, blocks, tier) => sum + blocks * row.blockBytes[tier], 0) : null; // its start was not read, or is not told
  row.total = row.blocks.reduce((sum, one) => sum + one, 0);
  const marks = [row.suspect && "is:suspect", row.excluded && row.excluded !== "stopped" && "is:excluded", row.excluded === "stopped" && "is:stopped", row.trouble && "is:trouble", `is:${row.state}`];
  row.hay = [row.instance, row.cluster, row.state, row.excluded, row.engine, row.version, row.place, row.trouble, row.suspicion, ...marks].join("\n").toLowerCase();
  return row;
}

export class Live {
  constructor() {
    this.past = false;
    this.clear();
    this.samples = []; // {at, events, lag, blocks}
  }

  clear() {
    this.byName = new Map();
    this.rows = [];
    this.head = null;
    this.tenants = null;
  }

  // Take an answer. False: it does not go on from what is here, and a whole one is needed.
  take(answer) {
    const base = answer.base ?? null;
    if (base === null) this.clear();
    else if (!this.head || this.head.run !== answer.run || this.head.version !== base) return false;
    const { rows } = answer;
    for (let at = 0; at < rows.instance.length; at += 1) {
      const name = rows.instance[at];
      let row = this.byName.get(name);
      if (!row) {
        row = { instance: name };
        this.byName.set(name, row);
        this.rows.push(row);
      }
      for (const key of WORDS) row[key] = rows.words[rows[key][at]];
      for (const key of PLAIN) row[key] = rows[key][at];
      row.blocks = TIERS.map((_, tier) => rows.blocks[tier][at]);
      row.slots = TIERS.map((_, tier) => rows.slots[tier][at]);
      row.blockBytes = TIERS.map((_, tier) => rows.block_bytes[tier][at]);
      derive(row);
    }
    if (answer.gone && answer.gone.length) {
      for (const name of answer.gone) this.byName.delete(name);
      this.rows = this.rows.filter((row) => this.byName.has(row.instance));
    }
    if (answer.tenants) this.tenants = tenantRows(answer.tenants);
    this.head = { ...answer, rows: null };
    this.sample();
    return true;
  }

  sample() {
    const { head, samples } = this;
    if (!head.catalog.sees_all) return;
    const last = samples[samples.length - 1];
    if (last && last.run !== head.run) samples.length = 0;
    samples.push({ run: head.run, at: head.at_ms, events: head.events.events, lag: head.catalog.lag_messages, blocks: head.tiers.map((one) => one.blocks) });
    if (samples.length > SAMPLES) samples.shift();
  }
}

function tenantRows(columns) {
  const rows = columns.tenant.map((tenant, at) => ({
    tenant, namespaces: columns.namespaces[at], instances: columns.instances[at], held: columns.held[at], claimed: columns.blocks[at],
    quota: columns.quota[at], most: { HOST: columns.host_quota[at], NVME: columns.nvme_quota[at] }, prompts: columns.prompts[at], asked: columns.asked[at], found: columns.found[at], hay: tenant.toLowerCase(),
  }));
  return { rows, more: columns.more };
}

// How an instance was at a moment: {state, words, note}. A log does not say of one that was killed when it went: of one
// that has said nothing more in its epoch, and is not live in it now, only when it was heard last is known.
export function stateThen(one, at, now) {
  const last = Date.parse(one.last_frame), runs = now && now.state === "live" && now.epoch === one.epoch;
  if (one.state !== "running" || runs || at - last < QUIET_MS) return { state: one.state, words: one.state, note: one.stopped ? `stopped cleanly (${one.stopped})` : "" };
  return { state: "silent", words: `last heard ${at - last < 86400000 ? clock(last) : moment(last)}`, note: `last heard ${moment(last)} UTC: it was killed, or had nothing to say` };
}

// What the history says of a moment, in the shape of `Live`; `live` is what is so now.
export function asOf(answer, live) {
  const rows = answer.instances.map((one) => {
    const then = stateThen(one, Date.parse(answer.at), live.byName.get(one.instance));
    const row = {
      instance: one.instance, cluster: "", state: then.state, words: then.words, excluded: "", engine: one.engine, version: one.version, place: one.topology.join(" / "),
      trouble: "", suspicion: "", epoch: one.epoch, unread: null, suspect: 0, heard: null, queued: null, running: null, put: 0, stream: one.stream,
      began: one.began, lastFrame: one.last_frame, blocks: [0, 0, 0], slots: [0, 0, 0], blockBytes: [0, 0, 0], stopped: one.stopped,
    };
    for (const tier of one.tiers) {
      const at = TIERS.indexOf(tier.tier);
      if (at < 0) continue;
      row.blocks[at] = tier.blocks;
      row.slots[at] = tier.slots || 0;
      row.blockBytes[at] = tier.block_bytes || 0;
    }
    row.suspicion = then.note;
    return row;
  });
  const byName = new Map(rows.map((row) => [row.instance, row]));
  for (const hole of answer.holes) {
    const row = byName.get(hole.instance);
    if (row) { row.suspect = 1; row.suspicion = `${many(hole.events, "event")} missing from the archive: what it held then is not certain`; }
  }
  rows.forEach(derive);
  const tiers = answer.tiers.map((tier) => {
    const at = TIERS.indexOf(tier.tier);
    const capacity = rows.reduce((sum, row) => sum + (at < 0 ? 0 : row.slots[at] * row.blockBytes[at]), 0);
    const instances = rows.reduce((sum, row) => sum + (at >= 0 && row.slots[at] > 0 ? 1 : 0), 0);
    return { tier: tier.tier, blocks: tier.blocks, slots: tier.slots || 0, bytes: tier.bytes, capacity_bytes: capacity, instances };
  });
  const states = {};
  for (const row of rows) states[row.state] = (states[row.state] || 0) + 1;
  const pools = [...new Set(answer.instances.flatMap((one) => one.tiers.filter((tier) => tier.blocks === null).map((tier) => tier.name || tier.tier)))].sort();
  return { past: true, at: answer.at, clocks: answer.clocks, pools, holes: answer.holes, rows, byName, tiers, states, tenants: tenantsOf(answer.tenants) };
}

export function tenantsOf(told) {
  const found = new Map();
  for (const one of told) {
    const name = one.tenant === null ? "\u0000" : one.tenant;
    let row = found.get(name);
    if (!row) {
      row = { tenant: one.tenant === null ? "(not told)" : one.tenant, instances: 0, byTier: {}, bytes: 0, blocks: 0, hay: name.toLowerCase() };
      found.set(name, row);
    }
    row.byTier[one.tier] = { blocks: one.blocks, bytes: one.bytes };
    row.instances = Math.max(row.instances, one.instances);
    row.bytes += one.bytes || 0;
    row.blocks += one.blocks;
  }
  return { rows: [...found.values()], more: 0 };
}

// Usage of some hours, by tenant.
export function savedOf({ from, until, hours }) {
  const tenants = new Map();
  for (const hour of hours) {
    let sum = tenants.get(hour.tenant);
    if (!sum) { sum = { tokens: 0, unrated: 0, us: 0 }; tenants.set(hour.tenant, sum); }
    sum.tokens += hour.saved_tokens;
    sum.unrated += hour.unrated_tokens;
    sum.us += hour.saved_gpu_us;
  }
  return { from, until, tenants };
}

// Rows of tenants with what each has saved, and rows of those that have saved something and of whom nothing else is
// known. `saved` null: it is not known.
export function withSaved(rows, saved) {
  const names = new Set(rows.map((row) => row.tenant));
  for (const row of rows) row.saved = saved ? saved.tenants.get(row.tenant) || { tokens: 0, unrated: 0, us: 0 } : null;
  if (!saved) return rows;
  return [...rows, ...[...saved.tenants].filter(([tenant]) => !names.has(tenant)).map(([tenant, sum]) => ({ tenant, instances: null, saved: sum, hay: tenant.toLowerCase() }))];
}
