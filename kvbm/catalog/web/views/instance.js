import { AskError, Newest, ask, question } from "../api.js";
import { histogram, small } from "../charts.js";
import { h, replace } from "../dom.js";
import { EXCLUDED, bytes, clocks, colourOf, count, isNumber, many, percent, seconds, share, short, told } from "../format.js";
import { stateThen } from "../model.js";
import { iso } from "../time.js";

const AGAIN_MS = 2000;
const CHANGES_MS = 300000;
const HISTORY_AGAIN_MS = 15000;

// null where there is no answer: what else is known shows without it.
async function orNone(work) {
  try { return await work; } catch (error) { if (error instanceof AskError) return null; throw error; }
}

const facts = (pairs) => h("dl", { class: "facts" }, pairs.filter(Boolean).map(([name, value]) => [h("dt", null, name), h("dd", null, value)]));
const fillBar = (part, tier) => h("span", { class: `bar wide ${colourOf(tier)}` }, h("i", { style: { width: part === null ? "0%" : `${Math.min(100, 100 * part).toFixed(1)}%` } }));

export class Instance {
  constructor(app) {
    this.app = app;
    this.title = h("h1");
    this.sub = h("span", { class: "dim" });
    this.body = h("div", { class: "view" });
    this.node = h("div", { class: "view" }, h("div", { class: "crumb" }, h("a", { href: "#/overview" }, "‹ Overview"), this.title, this.sub), this.body);
    this.asking = new Newest((answer) => this.draw(answer), (error) => this.fail(error));
  }

  show(params) {
    this.name = params.name;
    this.title.textContent = params.name;
    this.sub.textContent = "";
    this.asked = 0;
    this.asking.drop();
    replace(this.body, h("p", { class: "empty" }, "Asking …"));
  }

  leave() { this.asking.drop(); }

  fail(error) { replace(this.body, h("p", { class: "empty" }, `${error.message}. ${error.remedy}`)); }

  update(seen, at) {
    if (at === this.at && Date.now() - this.asked < AGAIN_MS) return;
    if (at !== null && at === this.at && this.asked) return;
    if (at !== this.at) this.asking.drop();
    this.at = at;
    this.asked = Date.now();
    const name = encodeURIComponent(this.name), keeps = this.app.keepsHistory;
    if (at !== null) { this.asking.ask(async () => ({ past: await ask(question(`v1/history/instances/${name}`, { at: iso(at) })), at })); return; }
    const seesAll = this.app.live.head && this.app.live.head.catalog.sees_all;
    this.asking.ask(async () => {
      const page = await ask(question("v1/instances", { name: this.name }));
      const isHeard = page.instances.length && page.instances[0].heartbeat_age_s !== null;
      const [detail, told] = await Promise.all([seesAll && isHeard ? this.details(name) : null, keeps ? this.lately(this.name) : null]);
      return { one: page.instances[0], detail, past: told && told.past, changes: told && told.changes, seesAll, at };
    });
  }

  // What its heartbeat tells more.
  async details(name) {
    if (this.app.isRefused) return null;
    try { return await ask(`v1/overview/instances/${name}`); } catch (error) {
      if (!(error instanceof AskError)) throw error;
      this.app.isRefused = error.status === 403;
      return null;
    }
  }

  // What the history says of it, asked for less often: it grows by pieces.
  async lately(name) {
    const { from, until } = this.app.time, known = this.known;
    if (known && known.name === name && Date.now() - known.when < HISTORY_AGAIN_MS) return known;
    const [past, changes] = await Promise.all([
      orNone(ask(`v1/history/instances/${encodeURIComponent(name)}`)),
      until ? orNone(ask(question("v1/history/changes", { from: iso(Math.max(from, until - CHANGES_MS)), instance: name }))) : null]);
    this.known = { name, past, changes, when: until ? Date.now() : 0 };
    return this.known;
  }

  draw(answer) {
    if (answer.at !== null) { this.drawPast(answer.past, answer.at); return; }
    const { one, detail, past, changes, seesAll } = answer;
    if (!one) { replace(this.body, h("p", { class: "empty" }, `No instance ${this.name} is known now. An earlier moment may have it.`)); return; }
    this.sub.textContent = [one.cluster && `cluster ${one.cluster}`, one.engine && `${one.engine} ${one.version}`, one.topology.join(" / ")].filter(Boolean).join(" · ");
    const why = one.excluded === "stopped" ? EXCLUDED.stopped : one.excluded ? `${one.excluded}: ${EXCLUDED[one.excluded] || ""}` : "";
    const pools = one.pools.map((pool) => {
      const full = pool.slots ? share(pool.held_blocks, pool.slots) : null, free = one.free_slots ? one.free_slots[pool.tier] : null;
      return [pool.tier, pool.name || pool.reach.toLowerCase(), count(pool.slots || null), bytes(pool.block_bytes), count(pool.held_blocks), bytes(pool.held_blocks * pool.block_bytes), fillBar(full, pool.tier), percent(full), count(isNumber(free) ? free : null)];
    });
    const troubles = [why && h("li", { class: one.excluded === "stopped" ? "" : "bad" }, why), one.trouble && h("li", { class: "bad" }, one.trouble), ...one.suspicions.map((text) => h("li", { class: "warn" }, text)), one.partial && h("li", { class: "warn" }, "residencies of it were refused: the catalog is at its capacity")].filter(Boolean);
    replace(this.body,
      h("div", { class: "cols two" },
        h("section", { class: "panel", "aria-label": "State" }, h("h2", null, "State"), facts([
          ["State", h("span", null, h("span", { class: `dot ${one.suspect && !one.excluded ? "suspect" : one.state}` }), one.state, one.suspect ? ", suspect" : "")],
          ["Epoch", count(one.epoch)], seesAll && ["Run", h("code", null, one.run || "–")],
          seesAll && ["Events: decided, published, in the index", `${count(one.applied)}, ${count(one.published)}, ${count(one.offset)}`],
          ["Heartbeat", isNumber(one.heartbeat_age_s) ? `${seconds(one.heartbeat_age_s)} ago` : "none was heard"],
          seesAll && ["Waiting, running", `${count(one.queued_tokens)} tokens, ${count(one.running_requests)} requests`],
          detail && ["Prefill as measured", detail.prefill_tokens_per_s ? `${short(detail.prefill_tokens_per_s)} tokens/s` : "–"],
          seesAll && ["Digest", h("code", null, one.digest)], one.snapshot_asked_s !== null && ["Snapshot asked", `${seconds(one.snapshot_asked_s)} ago`]])),
        h("section", { class: "panel", "aria-label": "Trouble and suspicions" }, h("h2", null, "Trouble and suspicions"), troubles.length ? h("ul", { class: "notes" }, troubles) : h("p", { class: "good" }, seesAll ? "None: its blocks count, and what is held here is whole." : "It serves."))),
      seesAll ? h("section", { class: "panel", "aria-label": "Pools" }, h("h2", null, "Pools"), small([["Tier"], ["Pool"], ["Slots", "num"], ["Block", "num"], ["Held", "num"], ["Bytes", "num"], ["Fill", "fill"], ["", "num"], ["Free", "num"]], pools, "Its start was not read: pools are not known.")) : null,
      detail ? h("div", { class: "cols two" },
        h("section", { class: "panel", "aria-label": "Copies" }, h("h2", null, "Copies: to others, from others, to the object pool"), this.copies(detail)),
        h("section", { class: "panel", "aria-label": "Ages" }, h("h2", null, "Ages at hit and at eviction"), detail.ages.length ? h("div", { class: "ages" }, detail.ages.map((age) => h("div", null, h("h3", null, age.tier), histogram(age, detail.bounds_s)))) : h("p", { class: "dim" }, "It tells none."))) : null,
      changes ? h("section", { class: "panel", "aria-label": "Changes" }, h("h2", null, "Blocks that came and went in the last five minutes of the history"), this.changes(changes)) : null,
      detail ? h("section", { class: "panel", "aria-label": "Namespaces" }, h("h2", null, "Namespaces used lately"), small([["Namespace"], ["Model"], ["Tenant"], ["Put: raw", "num"], ["stored", "num"]], detail.namespaces.map((space) => [h("code", null, space.id), space.model ?? "not told", space.tenant || "–", bytes(space.put_raw), bytes(space.put_stored)]), "It has named none."), detail.more_namespaces ? h("p", { class: "dim" }, `and ${count(detail.more_namespaces)} more`) : null) : null,
      past ? this.epochs(past) : seesAll ? h("p", { class: "dim" }, "Its earlier epochs need a history: see the line below the head.") : null);
  }

  copies(detail) {
    const rows = [];
    if (detail.put_raw) rows.push(["put in the object pool", bytes(detail.put_stored), `${bytes(detail.put_raw)} in memory`]);
    if (detail.lent) {
      for (const [way, size] of Object.entries(detail.lent.bytes)) if (size) rows.push([`lent by ${way}`, bytes(size), ""]);
      for (const [why, n] of Object.entries(detail.lent.refused)) if (n) rows.push([`not lent: ${why.replace("_", " ")}`, count(n), "times"]);
    }
    for (const one of detail.transfers.slice(0, 12)) rows.push([`read by ${one.transport}, distance ${one.distance}`, one.size ? bytes(one.size) : "failed", one.size && one.took_us ? `${bytes((one.size * 1e6) / one.took_us)}/s` : seconds(one.took_us / 1e6)]);
    const ways = Object.entries(detail.lends).map(([way, where]) => `${way} ${where}`).join(", ");
    return [small([["What"], ["How much", "num"], [""]], rows, "None told with its last heartbeat."), h("p", { class: "dim" }, ways ? `Lends by ${ways}.` : "It lends nothing.")];
  }

  changes(told_) {
    const rows = told_.changes.slice(0, 60).map((one) => [one.tier, one.event, one.cause || "–", count(one.blocks)]);
    return [small([["Tier"], ["Event"], ["Cause"], ["Blocks", "num"]], rows, "Nothing changed."), h("p", { class: "dim under" }, clocks(told_))];
  }

  epochs(past) {
    const rows = past.epochs.slice(-200).reverse().map((one) => [count(one.epoch), told(one.began), told(one.last_frame), one.stopped || "–", `${one.engine} ${one.version}`.trim() || "–"]);
    return h("section", { class: "panel", "aria-label": "Epochs" }, h("h2", null, "Epochs"), h("div", { class: "scroll tall" }, small([["Epoch", "num"], ["Began (UTC)"], ["Last frame"], ["Stopped"], ["Engine"]], rows, "None.")), this.holes(past.holes));
  }

  holes(list) { return list.length ? h("ul", { class: "notes" }, list.slice(0, 50).map((hole) => h("li", { class: "bad hole" }, `Hole in epoch ${hole.epoch}: ${many(hole.events, "event")} from offset ${count(hole.first_offset)} missing, ${hole.since ? told(hole.since) : "from the beginning"} to ${told(hole.until)}`))) : null; }

  drawPast(past, at) {
    const now = this.app.live.byName.get(this.name), then = (one) => stateThen(one, at, now);
    const parts = past.instances.map((one) => h("section", { class: "panel", "aria-label": "Pools" }, h("header", null, h("h2", null, `Then: epoch ${one.epoch}, ${then(one).words}${one.stopped ? ` (${one.stopped})` : ""}`), h("span", { class: "dim" }, `began ${told(one.began)}, last frame ${told(one.last_frame)}`)),
      small([["Tier"], ["Pool"], ["Slots", "num"], ["Block", "num"], ["Held", "num"], ["Bytes", "num"], ["Fill", "fill"], ["", "num"]], one.tiers.map((tier) => [tier.tier, tier.name || "–", count(tier.slots), bytes(tier.block_bytes), count(tier.blocks), bytes(tier.bytes), fillBar(share(tier.blocks, tier.slots), tier.tier), percent(share(tier.blocks, tier.slots))]))));
    this.sub.textContent = past.instances.length ? [`${past.instances[0].engine} ${past.instances[0].version}`, past.instances[0].topology.join(" / ")].filter(Boolean).join(" · ") : "";
    replace(this.body, parts.length ? parts : h("p", { class: "empty" }, "It had not started by then."),
      h("p", { class: "dim" }, clocks(past)), past.namespaces.length ? h("section", { class: "panel" }, h("h2", null, "What it held, by namespace"), small([["Tier"], ["Namespace"], ["Model"], ["Tenant"], ["Blocks", "num"], ["Bytes", "num"]], past.namespaces.slice(0, 200).map((one) => [one.tier, h("code", null, one.namespace), one.model ?? "not told", one.tenant || "–", count(one.blocks), bytes(one.bytes)]))) : null,
      this.epochs(past));
  }
}
