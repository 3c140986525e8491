import { Newest, ask } from "../api.js";
import { h, replace, setText } from "../dom.js";
import { bytes, count, many, percent, share, short } from "../format.js";
import { tenantsOf } from "../model.js";
import { Table, paintBar } from "../table.js";

const AGAIN_MS = 15000;
const label = (row) => row.tenant || "(no tenant)";
const tier = (name, at) => ({ key: name, label: name, title: `Bytes held in ${name}`, width: "96px", num: true, value: (row) => (row.byTier && row.byTier[name] ? row.byTier[name].bytes : null), text: (row) => (row.byTier && row.byTier[name] ? (row.byTier[name].bytes === null ? `${short(row.byTier[name].blocks)} bl` : bytes(row.byTier[name].bytes)) : "–"), at });

export class Tenants {
  constructor(app) {
    this.app = app;
    this.search = h("input", { type: "search", id: "filter", placeholder: "Filter tenants", "aria-label": "Filter tenants", oninput: () => this.table.filter(this.search.value), onkeydown: (event) => { if (event.key === "ArrowDown") { event.preventDefault(); this.table.body.focus(); } } });
    this.counted = h("span", { class: "dim", role: "status" });
    this.note = h("p", { class: "dim" });
    this.table = new Table([
      { key: "tenant", label: "Tenant", width: "minmax(160px, 1.4fr)", value: label, text: label },
      tier("HBM"), tier("HOST"), tier("NVME"),
      { key: "put", label: "Object pools", title: "Bytes that instances running now have put in object pools, as they lie in the store", width: "104px", num: true, value: (row) => row.put ?? null, text: (row) => bytes(row.put) },
      { key: "quota", label: "Quota", title: "Bytes that it may have in object pools", width: "90px", num: true, value: (row) => row.quota ?? null, text: (row) => bytes(row.quota) },
      { key: "used", label: "Of quota", width: "132px", num: true, value: (row) => (row.quota ? share(row.put, row.quota) : null), paint: (cell, row) => paintBar(cell, row.quota ? share(row.put, row.quota) : null, row.quota ? percent(share(row.put, row.quota)) : "–", row.quota ? `${bytes(row.put)} of ${bytes(row.quota)}` : "no quota is known") },
      { key: "rate", label: "Hit rate", title: "Blocks that were found, of those that prompts asked for", width: "132px", num: true, value: (row) => share(row.found, row.asked), paint: (cell, row) => { cell.classList.add("tier2"); paintBar(cell, share(row.found, row.asked), percent(share(row.found, row.asked)), `${count(row.found)} of ${count(row.asked)} blocks`); } },
      { key: "prompts", label: "Prompts", title: "That engines have told of since the catalog began, reckoned up from a sample", width: "80px", num: true, value: (row) => row.prompts ?? null, text: (row) => short(row.prompts) },
      { key: "found", label: "Hit blocks", width: "86px", num: true, value: (row) => row.found ?? null, text: (row) => short(row.found) },
      { key: "namespaces", label: "Namespaces", width: "92px", num: true, value: (row) => row.namespaces ?? null, text: (row) => count(row.namespaces) },
      { key: "instances", label: "Instances", width: "82px", num: true, value: (row) => row.instances, text: (row) => count(row.instances) },
    ], { name: "Tenants", sort: "tenant", empty: "No tenant is known.", counted: (shown, all) => setText(this.counted, `${shown === all ? "" : `${count(shown)} of `}${many(all, "tenant")}`) });
    this.node = h("div", { class: "view" }, h("section", { class: "panel grow", "aria-label": "Tenants" }, h("header", null, h("h2", null, "Tenants"), h("div", { class: "filters" }, this.search, this.counted)), this.table.node, this.note));
    this.asking = new Newest((answer) => { this.byTier = tenantsOf(answer.tenants); this.merge(); }, () => { this.byTier = null; });
  }

  show() { this.asked = 0; }

  leave() { this.asking.drop(); }

  update(seen) {
    this.seen = seen;
    if (!seen.past && this.app.keepsHistory && Date.now() - this.asked > AGAIN_MS) {
      this.asked = Date.now();
      this.asking.ask(() => ask("v1/history/tenants"));
    }
    this.merge();
  }

  merge() {
    const { seen } = this;
    if (seen.past) {
      this.table.set(seen.tenants.rows);
      setText(this.note, "Of an earlier moment the history tells bytes by tier; object pools, quotas and hits are of now alone.");
      return;
    }
    const tiers = new Map((this.byTier ? this.byTier.rows : []).map((row) => [row.tenant, row.byTier]));
    for (const row of seen.tenants ? seen.tenants.rows : []) row.byTier = tiers.get(row.tenant);
    this.table.set(seen.tenants ? seen.tenants.rows : []);
    const notes = [];
    if (!seen.head.catalog.history) notes.push("Bytes in HBM, HOST and NVMe by tenant need a history (--archive DIR --history DIR).");
    if (!seen.head.catalog.archive) notes.push("Prompts and hits need an archive (--archive DIR).");
    if (seen.tenants && seen.tenants.more) notes.push(`${count(seen.tenants.more)} more tenants are not shown.`);
    setText(this.note, notes.join(" "));
  }
}
