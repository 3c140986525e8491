import { AskError, Newest, ask } from "../api.js";
import { small } from "../charts.js";
import { h, replace } from "../dom.js";
import { EXCLUDED, clocks, count, many, seconds } from "../format.js";
import { stateThen } from "../model.js";
import { PromptForm } from "../prompts.js";
import { iso } from "../time.js";

const PARTS = [["recompute", "recompute_s", "computing what is missing"], ["fetch", "fetch_s", "fetching blocks"], ["queueing", "queueing_s", "waiting"], ["balance", "balance_s", "what was sent there lately"]];

// Why the first is the first, of the parts of its price and the next one's.
export function why(answer) {
  const [best, next] = answer.ranked, { blocks } = answer;
  const has = best.depth ? `it need not compute ${count(best.depth)} of ${many(blocks, "block")}${best.fetch_blocks ? `, of which it fetches ${count(best.fetch_blocks)}${best.peer_blocks ? ` (${count(best.peer_blocks)} from other instances, most from ${best.peer})` : ""}` : ""}` : "it has nothing of the prompt";
  const first = `${best.instance} costs ${seconds(best.cost_s)}: ${has}, and computes ${many(best.missing_tokens, "token")}.`;
  if (!next) return `${first} Nobody else was considered.`;
  const gap = next.cost_s - best.cost_s;
  if (gap <= 1e-9) return `${first} ${next.instance} costs the same: between equals the one to whom least waits, then the name decides.`;
  const most = PARTS.map(([, key, words]) => [next[key] - best[key], words]).sort((one, other) => other[0] - one[0])[0];
  return `${first} The next, ${next.instance}, costs ${seconds(gap)} more, most of it for ${most[1]} (${seconds(Math.max(0, most[0]))}).`;
}

// The same of an earlier moment, of which no load is known.
function whyThen(answer) {
  const [best, next] = answer.ranked, { without } = answer;
  const first = `${best.instance} would have cost ${seconds(best.cost_s)}: it had ${count(best.depth)} of ${many(answer.blocks, "block")}${best.fetch_blocks ? `, of which it had to fetch ${count(best.fetch_blocks)}` : ""}, and would have computed ${many(best.missing_tokens, "token")}.`;
  const other = next ? ` The next, ${next.instance}, ${next.cost_s - best.cost_s > 1e-9 ? `would have cost ${seconds(next.cost_s - best.cost_s)} more` : "would have cost the same"}.` : "";
  return `${first}${other} One that held nothing would have cost ${seconds(without.cost_s)}.`;
}

export class Routes {
  constructor(app) {
    this.app = app;
    this.tokens = h("input", { type: "number", min: "0", placeholder: "of the whole prompt; blocks × size without it", "aria-label": "Input tokens" });
    this.latency = h("select", { "aria-label": "Latency" }, ["standard", "interactive", "batch"].map((one) => h("option", { value: one }, one)));
    this.phase = h("select", { "aria-label": "Phase" }, ["both", "prefill", "decode"].map((one) => h("option", { value: one }, one)));
    this.form = new PromptForm({ title: "Where a prompt would go", button: "Rank", any: "choose one", placeholder: "Token ids of the prompt, or hashes of its full blocks", more: [h("label", null, "Input tokens (with hashes)", this.tokens), h("label", null, "Latency", this.latency), h("label", null, "Phase", this.phase)], ask: (asked, space) => this.take(asked, space) });
    this.found = h("div", { class: "view" });
    this.past = h("p", { class: "banner", hidden: true }, "Load then is not recorded: costs are those of idle engines.");
    this.node = h("div", { class: "view" }, this.past, this.form.node, this.found);
    this.asking = new Newest((answer) => this.draw(answer), (error) => { replace(this.found); this.form.fail(error); });
  }

  show() { this.form.fill(); }

  leave() { this.asking.drop(); }

  update(_, at) {
    this.past.hidden = at === null;
    if (this.question && at !== this.question.at) { this.asking.drop(); this.find(at); }
  }

  take(asked, space) {
    if (!space) { this.form.error.textContent = "Choose the namespace that the prompt is of."; return; }
    if (asked.prefix) { this.form.error.textContent = "A hash has 32 hex digits."; return; }
    const known = (this.form.found || []).find((one) => one.id === space), size = known ? known.fields.block_tokens : 16;
    const tokens = Number(this.tokens.value) || (asked.tokens ? asked.tokens.length : asked.hashes.length * size);
    const prompt = asked.tokens ? { tokens: asked.tokens } : { hashes: asked.hashes.join("") };
    this.asking.drop();
    this.question = { prompt: { ...prompt, namespace: space, input_tokens: tokens, latency: this.latency.value }, phase: this.phase.value };
    this.find(this.app.time.at);
  }

  find(at) {
    const { prompt, phase } = this.question;
    this.question.at = at;
    if (at === null) { this.asking.ask(() => ask("v1/route", { ...prompt, phase, remember: false, limit: 100 })); return; }
    this.asking.ask(async () => {
      if (!this.app.keepsHistory) throw new AskError(0, "", "There is no history", "go back to now");
      if (phase === "decode") throw new AskError(0, "", "What decoding costs is made of loads, and these are not recorded", "choose another phase, or go back to now");
      return { then: await ask("v1/history/route", { ...prompt, at: iso(at), limit: 100 }), at };
    });
  }

  drawThen(answer, at) {
    const most = Math.max(1e-9, ...answer.ranked.map((one) => one.cost_s)), { byName } = this.app.live, parts = PARTS.slice(0, 2), left = answer.excluded;
    const rows = answer.ranked.map((one, n) => [count(n + 1), h("a", { href: `#/instance/${encodeURIComponent(one.instance)}` }, one.instance), seconds(one.cost_s),
      h("span", { class: "stack", title: parts.map(([name, key]) => `${name} ${seconds(one[key])}`).join(", ") }, parts.map(([name, key]) => h("i", { class: `c-${name}`, style: { width: `${((100 * Math.max(0, one[key])) / most).toFixed(2)}%` } }))),
      ...parts.map(([, key]) => seconds(one[key])), `${count(one.depth)} / ${count(answer.blocks)}`, count(one.missing_tokens), count(one.fetch_blocks),
      one.last_frame ? stateThen({ state: "running", last_frame: one.last_frame }, at, byName.get(one.instance)).words : "its start is missing"]);
    replace(this.found, h("section", { class: "panel", "aria-label": "Why" }, h("h2", null, "Why"), h("p", { class: "why" }, answer.ranked.length ? whyThen(answer) : `Nobody that ran then held any of it. Any instance would have cost ${seconds(answer.without.cost_s)}.`),
      left.length ? h("ul", { class: "notes" }, left.map((one) => h("li", null, h("strong", null, one.instance), `${one.stream ? ` (${one.stream})` : ""} held some of it and did not run: ${one.why}`))) : null,
      h("ul", { class: "notes" }, answer.not_known.map((one) => h("li", { class: "warn" }, `${one[0].toUpperCase()}${one.slice(1)}.`))),
      answer.holes.length ? h("p", { class: "bad hole" }, `${many(answer.holes.length, "hole")} at this moment: what instances held is not certain.`) : null, h("p", { class: "dim" }, clocks(answer))),
    h("section", { class: "panel", "aria-label": "Ranking" }, h("header", null, h("h2", null, "Ranking of idle engines"), h("span", { class: "legend" }, parts.map(([name, , words]) => h("span", null, h("i", { class: `key c-${name}` }), words))), answer.more ? h("span", { class: "dim" }, `${count(answer.more)} more held some`) : null),
      small([["#", "num"], ["Instance"], ["Cost", "num"], ["Of what", "fill"], ["Compute", "num"], ["Fetch", "num"], ["Depth", "num"], ["Missing tok", "num"], ["Fetched bl", "num"], ["State then"]], rows, "Nobody.")));
  }

  draw(answer) {
    this.form.clear();
    if (answer.then) { this.drawThen(answer.then, answer.at); return; }
    const most = Math.max(1e-9, ...answer.ranked.map((one) => one.cost_s));
    const rows = answer.ranked.map((one, at) => [count(at + 1), h("a", { href: `#/instance/${encodeURIComponent(one.instance)}` }, one.instance), seconds(one.cost_s),
      h("span", { class: "stack", title: PARTS.map(([name, key]) => `${name} ${seconds(one[key])}`).join(", ") }, PARTS.map(([name, key]) => h("i", { class: `c-${name}`, style: { width: `${((100 * Math.max(0, one[key])) / most).toFixed(2)}%` } }))),
      ...PARTS.map(([, key]) => seconds(one[key])), seconds(one.ttft_s), `${count(one.depth)} / ${count(answer.blocks)}`, count(one.missing_tokens), count(one.fetch_blocks), one.peer || "–",
      [one.admitted ? "" : h("span", { class: "bad" }, "not admitted "), one.suspect ? h("span", { class: "warn" }, "suspect ") : "", one.load_age_s === null ? h("span", { class: "warn" }, "no load heard") : one.load_age_s ? h("span", { class: "warn" }, `load ${seconds(one.load_age_s)} old`) : ""]]);
    const left = Object.entries(answer.excluded || {});
    replace(this.found, h("section", { class: "panel", "aria-label": "Why" }, h("h2", null, "Why"), answer.ranked.length ? h("p", { class: "why" }, why(answer)) : h("p", null, "Nobody can serve it."),
      answer.missed ? h("p", { class: "dim" }, `Nothing of it is held: ${answer.missed.message}.`) : null,
      answer.admitted ? null : h("p", { class: "bad" }, "It would not be admitted: its deadline cannot be kept, or it is of a batch and others wait."),
      left.length ? h("ul", { class: "notes" }, left.map(([name, reason]) => h("li", null, h("strong", null, name), ` has its first block and does not count: ${reason}${EXCLUDED[reason] ? ` (${EXCLUDED[reason]})` : ""}`))) : null),
    h("section", { class: "panel", "aria-label": "Ranking" }, h("header", null, h("h2", null, "Ranking"), h("span", { class: "legend" }, PARTS.map(([name, , words]) => h("span", null, h("i", { class: `key c-${name}` }), words))), answer.more ? h("span", { class: "dim" }, `${count(answer.more)} more are worse`) : null),
      small([["#", "num"], ["Instance"], ["Cost", "num"], ["Of what", "fill"], ["Compute", "num"], ["Fetch", "num"], ["Wait", "num"], ["Balance", "num"], ["First token", "num"], ["Depth", "num"], ["Missing tok", "num"], ["Fetched bl", "num"], ["From"], [""]], rows, "Nobody.")));
  }
}
