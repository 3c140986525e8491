import { Newest, ask, question } from "../api.js";
import { histogram, small, spark } from "../charts.js";
import { h, replace, setText } from "../dom.js";
import { EXCLUDED, TIERS, WHY_MISSED, bytes, clocks, colourOf, count, isNumber, many, median, percent, seconds, share, short, told } from "../format.js";
import { Table, paintBar, paintState } from "../table.js";
import { iso } from "../time.js";

const REST_MS = 300; // after a step of the slider, before what is slower to answer is asked for
const CHIPS = [["is:live", "Live"], ["is:excluded", "Left out"], ["is:stopped", "Stopped"], ["is:suspect", "Suspect"], ["is:trouble", "In trouble"]];

export const note = (row, nowMs) => {
  if (row.excluded === "silent" && row.heard) return `silent for ${seconds(Math.max(0, nowMs / 1000 - row.heard))}: ${EXCLUDED.silent}`;
  if (row.excluded === "stopped") return EXCLUDED.stopped;
  if (row.excluded) return `${row.excluded}: ${EXCLUDED[row.excluded] || ""}`;
  return [row.trouble, row.suspicion].filter(Boolean).join("; ");
};

const tierColumn = (tier) => ({
  key: tier, label: `${TIERS[tier]} fill`, title: `${TIERS[tier]}: blocks held, of the slots of the pool`, width: "minmax(88px, 1fr)", num: true,
  isBlank: (row) => !row.slots[tier] && !row.blocks[tier],
  value: (row) => row.fill[tier],
  paint: (cell, row) => {
    cell.classList.add(`tier${tier}`);
    paintBar(cell, row.fill[tier], row.fill[tier] === null ? (row.blocks[tier] ? short(row.blocks[tier]) : "–") : percent(row.fill[tier]),
      `${count(row.blocks[tier])} of ${count(row.slots[tier])} blocks of ${bytes(row.blockBytes[tier])}`);
  },
});

export class Overview {
  constructor(app) {
    this.app = app;
    this.now = 0;
    this.tiles = h("dl", { class: "tiles" });
    this.tiers = h("div");
    this.ages = h("div", { class: "ages" });
    this.stream = h("div");
    this.trouble = h("div");
    this.missed = h("div");
    this.search = h("input", { type: "search", id: "filter", placeholder: "Filter by words; -word leaves out", "aria-label": "Filter instances", oninput: () => this.filter(), onkeydown: (event) => { if (event.key === "ArrowDown") { event.preventDefault(); this.table.body.focus(); } } });
    this.chips = CHIPS.map(([word, label]) => h("button", { type: "button", class: "chip", "aria-pressed": "false", onclick: () => this.chip(word) }, label));
    this.counted = h("span", { class: "dim", role: "status" });
    const nowMs = () => (this.now || Date.now());
    this.table = new Table([
      { key: "instance", label: "Instance", width: "minmax(130px, 1.3fr)", value: (row) => row.instance, text: (row) => row.instance },
      { key: "state", label: "State", width: "136px", value: (row) => (row.excluded || (row.suspect ? "~suspect" : row.state)), paint: (cell, row) => paintState(cell, row.suspect && !row.excluded ? "suspect" : row.state, row.suspect && !row.excluded ? "suspect" : row.words || row.state) },
      tierColumn(0), tierColumn(1), tierColumn(2),
      { key: "bytes", label: "Held", title: "Bytes of all blocks held in pools of its own", width: "76px", num: true, spare: 1, isBlank: (row) => row.bytes === null, value: (row) => row.bytes, text: (row) => bytes(row.bytes) },
      { key: "queued", label: "Queued tok", title: "Prompt tokens that wait for their prefill", width: "72px", num: true, spare: 2, isBlank: (row) => row.queued === null, value: (row) => row.queued, text: (row) => count(row.queued) },
      { key: "running", label: "Running", title: "Requests that run", width: "58px", num: true, spare: 3, isBlank: (row) => row.running === null, value: (row) => row.running, text: (row) => count(row.running) },
      { key: "unread", label: "Unread ev", title: "Events that it has decided and that the catalog has not read", width: "68px", num: true, spare: 4, isBlank: (row) => row.unread === null, value: (row) => row.unread, text: (row) => count(row.unread) },
      { key: "epoch", label: "Epoch", width: "50px", num: true, spare: 5, value: (row) => row.epoch, text: (row) => count(row.epoch) },
      { key: "place", label: "Place", title: "Topology, outermost first", width: "minmax(120px, 1.1fr)", spare: 6, isBlank: (row) => !row.place, value: (row) => row.place, text: (row) => row.place || "–" },
      { key: "note", label: "Why left out, trouble, suspicion", width: "minmax(190px, 2.2fr)", value: (row) => note(row, 0), text: (row) => note(row, nowMs()) },
    ], { name: "Instances", open: (row) => app.go(`instance/${encodeURIComponent(row.instance)}`), sort: "instance", empty: "No instance is known.", mark: (row) => (row.excluded || row.state === "stopped" || row.state === "ended" ? "off" : ""), counted: (shown, all) => setText(this.counted, shown === all ? `${many(all, "instance")}` : `${count(shown)} of ${many(all, "instance")}`) });
    this.hits = h("p", { class: "dim under" });
    this.over = h("section", { class: "panel", "aria-label": "Tiers" }, h("h2", null, "Tiers"), this.tiers, this.hits);
    this.pools = { at: null, timer: 0, told: null, asking: new Newest((answer) => this.takePools(answer), (error) => this.takePools({ why: `${error.message}. ${error.remedy}` })) };
    this.detail = h("div", { class: "cols" },
      h("section", { class: "panel", "aria-label": "Ages" }, h("h2", null, "Ages at hit and at eviction"), this.ages),
      h("section", { class: "panel", "aria-label": "Event stream" }, h("h2", null, "Event stream"), this.stream),
      h("section", { class: "panel", "aria-label": "Trouble" }, h("h2", null, "Left out and misses"), this.trouble, this.missed));
    this.node = h("div", { class: "view" }, this.tiles, this.over, this.detail,
      h("section", { class: "panel grow", "aria-label": "Instances" }, h("header", null, h("h2", null, "Instances"), h("div", { class: "filters" }, this.search, this.chips, this.counted)), this.table.node));
  }

  show(params) {
    if (params.q !== undefined && params.q !== this.search.value) { this.search.value = params.q; this.filter(); }
  }

  filter() {
    this.table.filter(this.search.value);
    const words = this.search.value.split(/\s+/);
    CHIPS.forEach(([word], at) => this.chips[at].setAttribute("aria-pressed", String(words.includes(word))));
  }

  chip(word) {
    const words = this.search.value.split(/\s+/).filter(Boolean);
    this.search.value = (words.includes(word) ? words.filter((one) => one !== word) : [...words, word]).join(" ");
    this.filter();
  }

  update(seen) {
    this.now = seen.past ? Date.parse(seen.at) : seen.head.at_ms;
    this.table.set(seen.rows);
    if (seen.past) this.showPast(seen);
    else { this.pools.at = null; this.showLive(seen); }
  }

  tile(name, value, more, kind = "") { return h("div", { class: "tile" }, h("dt", null, name), h("dd", { class: kind, title: value }, value), h("small", { title: more }, more || "")); }

  tierTable(tiers, pools, ages, bounds) {
    const rows = tiers.map((one) => {
      const age = ages.find((told) => told.tier === one.tier), full = share(one.bytes, one.capacity_bytes) ?? share(one.blocks, one.slots);
      const bar = h("span", { class: `bar ${colourOf(one.tier)}` }, h("i", { style: { width: full === null ? "0%" : `${Math.min(100, 100 * full).toFixed(1)}%` } }));
      const hits = age && age.hits.length ? age.hits.reduce((sum, n) => sum + n, 0) : null, evicted = age ? age.evicted.reduce((sum, n) => sum + n, 0) : null;
      return [one.tier, count(one.instances), short(one.blocks), bytes(one.bytes), one.capacity_bytes ? bytes(one.capacity_bytes) : "–", bar, percent(full), short(hits), age && age.hits.length ? median(age.hits, bounds) : "–", short(evicted), age ? median(age.evicted, bounds) : "–", age && evicted ? percent(share(age.unused, age.unused + age.reused)) : "–"];
    });
    for (const pool of pools) rows.push([h("span", { title: pool.pool }, pool.pool.length > 26 ? `${pool.pool.slice(0, 25)}…` : pool.pool), "–", short(pool.blocks), isNumber(pool.bytes) ? bytes(pool.bytes) : "–", "–", "", "–", "–", "–", "–", "–", "–"]);
    return small([["Tier"], ["Inst.", "num"], ["Blocks", "num"], ["Bytes", "num"], ["Room", "num"], ["Fill", "fill"], ["", "num"], ["Hits", "num"], ["age p50", "num"], ["Evicted", "num"], ["age p50", "num"], ["unused", "num"]], rows, "No pool is known.");
  }

  showLive(seen) {
    const { head } = seen, { catalog } = head;
    // Who has stopped cleanly is left out, too, and nobody need look after it
    const states = head.states, live = states.live || 0, all = seen.rows.length, stopped = head.excluded.stopped || 0;
    const out = Object.values(head.excluded).reduce((sum, one) => sum + one, 0) - stopped, cleanly = stopped ? `${count(stopped)} stopped cleanly` : "";
    if (!catalog.sees_all) {
      replace(this.tiles, this.tile("Instances", count(all), `${count(live)} live`), this.tile("Left out", count(out), cleanly, out ? "warn" : ""), this.tile("Catalog", catalog.ready ? "ready" : "not ready", `version ${catalog.version}`));
      this.detail.hidden = this.over.hidden = true;
      return;
    }
    this.detail.hidden = this.over.hidden = false;
    const tiers = head.tiers, blocks = tiers.reduce((sum, one) => sum + one.blocks, 0), held = tiers.reduce((sum, one) => sum + one.bytes, 0), room = tiers.reduce((sum, one) => sum + one.capacity_bytes, 0);
    const found = head.sampled ? share(head.sampled.found, head.sampled.asked) : null;
    const queued = seen.rows.reduce((sum, row) => sum + (row.excluded ? 0 : row.queued || 0), 0), running = seen.rows.reduce((sum, row) => sum + (row.excluded ? 0 : row.running || 0), 0);
    const ev = head.events, lag = catalog.lag_messages;
    replace(this.tiles,
      this.tile("Instances live", count(live), live === all ? `of ${count(all)}: all are heard` : `of ${count(all)}: ${Object.entries(states).filter(([name]) => name !== "live").map(([name, n]) => `${count(n)} ${name}`).join(", ")}`, live < all ? "" : "good"),
      this.tile("Left out", count(out), [...Object.entries(head.excluded).filter(([why]) => why !== "stopped").map(([why, n]) => `${count(n)} ${why}`), ...(cleanly ? [cleanly] : [])].join(", ") || "nobody", out ? "bad" : ""),
      this.tile("Suspect", count(head.suspect), head.suspect ? "may hold more or less than told" : "all are whole", head.suspect ? "warn" : ""),
      this.tile("Blocks held", short(blocks), `in HBM, HOST, NVMe`),
      this.tile("Bytes held", bytes(held), room ? `${percent(share(held, room))} of ${bytes(room)}` : ""),
      this.tile("Prompt hit rate", percent(found), head.sampled ? `of ${short(head.sampled.asked)} blocks asked for` : "needs catalog.archive", ""),
      this.tile("Waiting", `${short(queued)} tok`, `${short(running)} requests run`),
      this.tile("Event lag", lag === null ? "not known" : `${short(lag)} msg`, lag ? seconds(catalog.lag_s) : lag === null ? "the stream does not say" : "read to its end", lag === null ? "bad" : lag > 1000 ? "warn" : ""),
      this.tile("Gaps", count(ev.gaps), `${count(ev.gaps_repaired)} repaired`, ev.gaps > ev.gaps_repaired ? "warn" : ""));
    replace(this.tiers, this.tierTable(tiers, head.pools, head.ages, head.bounds_s));
    replace(this.hits, head.sampled ? [h("strong", null, `Missed in all tiers: ${short(head.sampled.asked - head.sampled.found)} of ${short(head.sampled.asked)} blocks`), ` that prompts asked for since the catalog began, reckoned up from samples. Which tier the others were found in they do not say. Hits are what instances have counted since each of them began.`]
      : "Blocks that prompts asked for and no tier had are counted where the catalog keeps an archive (--archive DIR).");
    const told = head.ages.some((one) => [...one.hits, ...one.evicted].some(Boolean));
    replace(this.ages, !told ? h("p", { class: "dim" }, "Nothing was wanted again or evicted yet.") : head.ages.map((one) => h("div", null, h("h3", null, one.tier, " ", h("span", { class: "legend" }, one.hits.length ? h("span", null, h("i", { class: "key hit" }), "hits") : null, h("span", null, h("i", { class: "key evict" }), "evicted"))), histogram(one, head.bounds_s))));
    const rates = seen.samples.slice(1).map((one, at) => Math.max(0, (1000 * (one.events - seen.samples[at].events)) / Math.max(1, one.at - seen.samples[at].at)));
    replace(this.stream, spark(rates, "Events a second"), h("dl", { class: "facts nums" },
      h("dt", null, "Events a second"), h("dd", null, rates.length ? short(rates[rates.length - 1]) : "–"),
      h("dt", null, "Messages, events"), h("dd", null, `${short(ev.messages)}, ${short(ev.events)}`),
      h("dt", null, "Stream sequence"), h("dd", null, count(catalog.stream_sequence)),
      h("dt", null, "Lag"), h("dd", null, lag === null ? "not known" : `${short(lag)} msg, ${seconds(catalog.lag_s)}`),
      h("dt", null, "Gaps, repaired"), h("dd", null, `${count(ev.gaps)}, ${count(ev.gaps_repaired)}`),
      h("dt", null, "Holes waited for"), h("dd", null, count(ev.holes)),
      h("dt", null, "Digests off, repaired"), h("dd", null, `${count(ev.digest_mismatches + ev.digest_divergence)}, ${count(ev.digest_repaired)}`),
      h("dt", null, "Begun blind"), h("dd", null, count(ev.blind_starts)),
      h("dt", null, "Unreadable: poison, newer"), h("dd", null, `${count(ev.poison + ev.foreign)}, ${count(ev.newer)}`)));
    const left = seen.rows.filter((row) => row.excluded), first = (why) => left.filter((row) => row.excluded === why).slice(0, 6), reasons = Object.entries(head.excluded);
    replace(this.trouble, reasons.length
      ? h("ul", { class: "notes" }, reasons.map(([why, n]) => h("li", { class: why === "stopped" ? "dim" : "" }, h("strong", null, `${count(n)} ${why}`), ` – ${EXCLUDED[why] || ""}: `, first(why).map((row, at) => [at ? ", " : "", h("a", { href: `#/instance/${encodeURIComponent(row.instance)}` }, row.instance)]), n > 6 ? " …" : "")))
      : h("p", { class: "dim" }, "No instance is left out of answers."));
    const missed = [];
    for (const [asked, whys] of Object.entries(head.missed)) for (const [why, n] of Object.entries(whys)) missed.push([asked, WHY_MISSED[why] || why, count(n)]);
    replace(this.missed, h("h2", { class: "sub" }, "Questions that found nothing"), small([["Question"], ["Why"], ["Times", "num"]], missed.slice(0, 12), "None since the catalog began."));
  }

  // What pools of the cluster had is asked for when the slider rests.
  askPools(seen) {
    const { pools } = this;
    if (pools.at === seen.at) return;
    Object.assign(pools, { at: seen.at, told: null });
    pools.asking.drop();
    clearTimeout(pools.timer);
    pools.timer = setTimeout(() => { if (pools.at === seen.at) pools.asking.ask(async () => ({ ...(await ask(question("v1/history/pools", { at: iso(seen.asked) }))), of: seen.at })); }, REST_MS);
  }

  takePools(told) {
    if (told.of && told.of !== this.pools.at) return;
    this.pools.told = told;
    if (this.pools.at !== null && this.app.past) this.update(this.app.past);
  }

  leave() { this.pools.asking.drop(); }

  showPast(seen) {
    const blocks = seen.tiers.reduce((sum, one) => sum + one.blocks, 0), held = seen.tiers.reduce((sum, one) => sum + (one.bytes || 0), 0), room = seen.tiers.reduce((sum, one) => sum + one.capacity_bytes, 0);
    this.detail.hidden = this.over.hidden = false;
    replace(this.tiles,
      this.tile("Instances running", count(seen.states.running || 0), `of ${count(seen.rows.length)}: ${Object.entries(seen.states).filter(([name]) => name !== "running").map(([name, n]) => `${count(n)} ${name}`).join(", ") || "all that had begun"}`),
      this.tile("Blocks held", short(blocks), `in HBM, HOST, NVMe`),
      this.tile("Bytes held", bytes(held), room ? `${percent(share(held, room))} of ${bytes(room)}` : ""),
      this.tile("Holes", count(seen.holes.length), seen.holes.length ? "events are missing here" : "the archive is whole here", seen.holes.length ? "bad" : "good"));
    this.askPools(seen);
    const claims = this.pools.told, known = claims && claims.pools ? claims.pools : seen.pools.map((pool) => ({ pool, blocks: null, bytes: null }));
    replace(this.tiers, this.tierTable(seen.tiers, known.map((one) => ({ ...one, pool: one.pool || "OBJECT, of a start that is missing" })), [], []));
    replace(this.hits, known.length ? (claims && claims.pools ? "What pools of the cluster have is of claims: blocks that instances have said to be in them. " : claims ? `What pools of the cluster had is not known: ${claims.why} ` : "") : "", "Hits and misses are of now alone. ", clocks(seen));
    replace(this.ages, h("p", { class: "dim" }, "Ages are counted from heartbeats, of now alone."));
    replace(this.stream, h("p", { class: "dim" }, "Lag and gaps are of now alone. What the archive lacks is to the right."));
    replace(this.trouble, seen.holes.length
      ? h("ul", { class: "notes" }, seen.holes.slice(0, 12).map((hole) => h("li", { class: "hole" }, h("a", { href: `#/instance/${encodeURIComponent(hole.instance)}` }, hole.instance), `: ${many(hole.events, "event")} missing, ${hole.since ? `since ${told(hole.since)}` : "from the beginning"} to ${told(hole.until)}`)))
      : h("p", { class: "dim" }, "Nothing is missing from the archive at this moment."));
    replace(this.missed);
  }
}
