import { Newest, ask, question } from "../api.js";
import { h, setText } from "../dom.js";
import { bytes, count, many, moment, percent, seconds, share, short } from "../format.js";
import { savedOf, tenantsOf, withSaved } from "../model.js";
import { Table, paintBar } from "../table.js";
import { iso } from "../time.js";

const AGAIN_MS = 15000;
const HOUR_MS = 3600000;
const SAVED_HOURS = 24;
const label = (row) => (row.tenant === "*" ? "* (all others)" : row.tenant || "(no tenant)");
// What a tenant holds in a tier; what it may have of each instance's pool is said where the pointer rests.
function paintTier(cell, row, name) {
  const held = row.byTier && row.byTier[name], most = row.most && row.most[name];
  setText(cell, held ? (held.bytes === null ? `${short(held.blocks)} bl` : bytes(held.bytes)) : "–");
  const title = most ? `at most ${bytes(most)} of each instance's ${name}` : "";
  if (cell.title !== title) cell.title = title;
}
const tier = (name, at) => ({ key: name, label: name, title: `Bytes held in ${name}`, width: "84px", num: true, isBlank: (row) => !(row.byTier && row.byTier[name]), value: (row) => (row.byTier && row.byTier[name] ? row.byTier[name].bytes : null), paint: (cell, row) => paintTier(cell, row, name), at });

const unrated = (saved) => (saved && saved.unrated ? `${count(saved.unrated)} of ${many(saved.tokens, "saved token")} came while no prefill rate was known: they count no GPU time` : "");

// Usage of some clock hours, all pages of it.
async function usage(from, until) {
  const hours = [];
  for (let next = ""; ;) {
    const answer = await ask(question("v1/usage", { from: iso(from), to: iso(until), next }));
    hours.push(...(answer.hours || []));
    if (!answer.next) return { from, until, hours };
    next = answer.next;
  }
}

export class Tenants {
  constructor(app) {
    this.app = app;
    this.search = h("input", { type: "search", id: "filter", placeholder: "Filter tenants", "aria-label": "Filter tenants", oninput: () => this.table.filter(this.search.value), onkeydown: (event) => { if (event.key === "ArrowDown") { event.preventDefault(); this.table.body.focus(); } } });
    this.counted = h("span", { class: "dim", role: "status" });
    this.note = h("p", { class: "dim" });
    this.table = new Table([
      { key: "tenant", label: "Tenant", width: "minmax(140px, 1.4fr)", value: label, text: label },
      tier("HBM"), tier("HOST"), tier("NVME"),
      { key: "held", label: "Object pools", title: "Bytes that lie in object pools by what is claimed, whoever has put them: reckoned by the size of a block and by what compression saves", width: "92px", num: true, isBlank: (row) => row.held === null || row.held === undefined, value: (row) => row.held ?? null, text: (row) => bytes(row.held) },
      { key: "quota", label: "Quota", title: "Bytes that it may have in object pools, as the catalog's settings say, or its database; the janitor keeps it", width: "80px", num: true, isBlank: (row) => !row.quota, value: (row) => row.quota ?? null, text: (row) => bytes(row.quota) },
      { key: "used", label: "Of quota", width: "116px", num: true, isBlank: (row) => !row.quota, value: (row) => (row.quota ? share(row.held, row.quota) : null), paint: (cell, row) => paintBar(cell, row.quota ? share(row.held, row.quota) : null, row.quota ? percent(share(row.held, row.quota)) : "–", row.quota ? `${bytes(row.held)} of ${bytes(row.quota)}` : "no quota is known") },
      { key: "rate", label: "Hit rate", title: "Blocks that were found, of those that prompts asked for", width: "116px", num: true, isBlank: (row) => row.asked === null || row.asked === undefined, value: (row) => share(row.found, row.asked), paint: (cell, row) => { cell.classList.add("tier2"); paintBar(cell, share(row.found, row.asked), percent(share(row.found, row.asked)), `${count(row.found)} of ${count(row.asked)} blocks`); } },
      { key: "prompts", label: "Prompts", title: "That engines have told of since the catalog began, reckoned up from a sample", width: "68px", num: true, spare: 2, isBlank: (row) => row.prompts === null || row.prompts === undefined, value: (row) => row.prompts ?? null, text: (row) => short(row.prompts) },
      { key: "found", label: "Hit blocks", width: "72px", num: true, spare: 3, isBlank: (row) => row.found === null || row.found === undefined, value: (row) => row.found ?? null, text: (row) => short(row.found) },
      { key: "tokens", label: "Saved tokens", title: "Tokens of prompts that needed no computing, in the 24 clock hours before the moment shown", width: "90px", num: true, isBlank: (row) => !row.saved, value: (row) => (row.saved ? row.saved.tokens : null), text: (row) => (row.saved ? short(row.saved.tokens) : "–") },
      { key: "gpu", label: "GPU time saved", title: "What computing them would have taken the engines, at the prefill rate that they had measured", width: "104px", num: true, isBlank: (row) => !row.saved, value: (row) => (row.saved ? row.saved.us : null), paint: (cell, row) => { setText(cell, row.saved ? seconds(row.saved.us / 1e6) : "–"); const title = unrated(row.saved); if (cell.title !== title) cell.title = title; } },
      { key: "namespaces", label: "Namespaces", width: "82px", num: true, spare: 5, isBlank: (row) => row.namespaces === undefined, value: (row) => row.namespaces ?? null, text: (row) => count(row.namespaces) },
      { key: "instances", label: "Instances", width: "68px", num: true, spare: 4, value: (row) => row.instances, text: (row) => count(row.instances) },
    ], { name: "Tenants", sort: "tenant", empty: "No tenant is known.", counted: (shown, all) => setText(this.counted, `${shown === all ? "" : `${count(shown)} of `}${many(all, "tenant")}`) });
    this.node = h("div", { class: "view" }, h("section", { class: "panel grow", "aria-label": "Tenants" }, h("header", null, h("h2", null, "Tenants"), h("div", { class: "filters" }, this.search, this.counted)), this.table.node, this.note));
    this.asking = new Newest((answer) => { this.byTier = tenantsOf(answer.tenants); this.merge(); }, () => { this.byTier = null; });
    this.counting = new Newest((answer) => { this.saved = savedOf(answer); this.why = ""; this.merge(); }, (error) => { this.why = `${error.message}. ${error.remedy}`; this.merge(); });
  }

  show() { Object.assign(this, { asked: 0, until: 0, countedAt: 0 }); }

  leave() { this.asking.drop(); this.counting.drop(); }

  update(seen) {
    this.seen = seen;
    if (!seen.past && this.app.keepsHistory && Date.now() - this.asked > AGAIN_MS) {
      this.asked = Date.now();
      this.asking.ask(() => ask("v1/history/tenants"));
    }
    this.count(seen.past ? seen.asked : seen.head.at_ms);
    this.merge();
  }

  // Ask what was saved in the last whole clock hours before a moment.
  count(at) {
    const until = Math.floor(at / HOUR_MS) * HOUR_MS;
    if (until === this.until && Date.now() - this.countedAt < AGAIN_MS) return;
    Object.assign(this, { until, countedAt: Date.now() });
    this.counting.ask(() => usage(Math.max(0, until - SAVED_HOURS * HOUR_MS), until));
  }

  merge() {
    const { seen } = this, saved = this.saved && this.saved.until === this.until ? this.saved : null;
    if (seen.past) {
      this.table.set(withSaved(seen.tenants.rows, saved));
      setText(this.note, ["Of an earlier moment the history tells bytes by tier, and usage what was saved; object pools, quotas and hits are of now alone.", ...this.told(saved)].join(" "));
      return;
    }
    const tiers = new Map((this.byTier ? this.byTier.rows : []).map((row) => [row.tenant, row.byTier]));
    for (const row of seen.tenants ? seen.tenants.rows : []) row.byTier = tiers.get(row.tenant);
    this.table.set(withSaved(seen.tenants ? seen.tenants.rows : [], saved));
    const notes = this.told(saved);
    if (!seen.head.catalog.history) notes.push("Bytes in HBM, HOST and NVMe by tenant need a history (--archive DIR --history DIR).");
    if (!seen.head.catalog.archive) notes.push("Prompts and hits need an archive (--archive DIR).");
    if (seen.tenants && seen.tenants.more) notes.push(`${count(seen.tenants.more)} more tenants are not shown.`);
    setText(this.note, notes.join(" "));
  }

  // What is saved, in words.
  told(saved) {
    if (this.why) return [`What was saved is not known: ${this.why}`];
    if (!saved) return [];
    const sum = { tokens: 0, unrated: 0 };
    for (const one of saved.tenants.values()) { sum.tokens += one.tokens; sum.unrated += one.unrated; }
    const words = unrated(sum);
    return [`Saved tokens and GPU time are of ${moment(saved.from)} to ${moment(saved.until)} UTC, as instances have recorded them; the hour under way is not in them.`, ...(words ? [`${words}.`] : [])];
  }
}
