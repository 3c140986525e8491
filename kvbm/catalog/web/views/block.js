import { AskError, Newest, ask, question } from "../api.js";
import { small, strip } from "../charts.js";
import { h, replace } from "../dom.js";
import { clocks, count, many, percent, told } from "../format.js";
import { stateThen } from "../model.js";
import { PromptForm, namespaces } from "../prompts.js";
import { iso } from "../time.js";

const MOST_BLOCKS = 4096;
const MOST_SPACES = 50;
const AGAIN_MS = 2000, MANY_AGAIN_MS = 10000; // many: where it is looked for in all namespaces
const LIFE_AGAIN_MS = 15000;

const bitsOf = (hex) => (at) => (Number.parseInt(hex.slice(2 * (at >> 3), 2 * (at >> 3) + 2), 16) >> (at & 7)) & 1;

export class Block {
  constructor(app) {
    this.app = app;
    this.form = new PromptForm({ title: "Blocks of a prompt", button: "Who holds it", any: "any that is known", placeholder: "Hashes of blocks (32 hex digits each), or token ids of the prompt: 128000, 9906, …", ask: (asked, space) => this.take(asked, space) });
    this.found = h("div", { class: "view" });
    this.node = h("div", { class: "view" }, this.form.node, this.found);
    this.asking = new Newest((answer) => this.draw(answer), (error) => { replace(this.found); this.form.fail(error); });
  }

  show(params) {
    this.form.fill();
    if (params.hash) { this.form.text.value = params.hash; this.form.choose(params.ns || ""); this.take({ ...(params.hash.length === 32 ? { hashes: [params.hash] } : { prefix: params.hash }) }, params.ns || ""); }
  }

  leave() { this.asking.drop(); }

  take(asked, space) {
    this.question = { asked, space };
    this.seen = undefined;
    this.asking.drop();
    this.update(null, this.app.time.at);
  }

  update(_, at) {
    if (!this.question) return;
    const again = this.question.space ? AGAIN_MS : MANY_AGAIN_MS;
    if (at === this.seen && (at !== null || Date.now() - this.when < again)) return;
    if (at !== this.seen) this.asking.drop();
    this.seen = at;
    this.when = Date.now();
    const { asked, space } = this.question;
    this.asking.ask(() => this.find(asked, space, at));
  }

  async find(asked, space, at) {
    const keeps = this.app.keepsHistory;
    const one = asked.prefix || (asked.hashes && asked.hashes.length === 1 && asked.hashes[0]);
    const past = one && keeps ? this.life(one, at) : null;
    if (asked.prefix || at !== null) {
      if (!keeps) throw new AskError(0, "", asked.prefix ? "A part of a hash is found in the history alone" : "There is no history", "give all 32 digits");
      if (!one) return { then: await this.then(asked, space, at), asked, at };
      return { past: await past, asked, at };
    }
    if (asked.tokens && !space) throw new AskError(0, "", "Token ids are hashed within a namespace", "choose one");
    if (asked.hashes && asked.hashes.length > MOST_BLOCKS) throw new AskError(0, "", `These are ${count(asked.hashes.length)} hashes`, `paste ${count(MOST_BLOCKS)} at most`);
    const body = { ...(asked.tokens ? { tokens: asked.tokens } : { hashes: asked.hashes.join("") }), limit: 200 };
    const spaces = space ? [space] : (await namespaces()).slice(0, MOST_SPACES).map((known) => known.id);
    if (!spaces.length) throw new AskError(0, "", "No namespace is known yet", "wait for an instance to name one");
    const answers = await Promise.all(spaces.map((id) => ask("v1/presence", { ...body, namespace: id })));
    const best = answers.filter((answer) => answer.holders.length);
    return { answers: best.length ? best : answers.slice(0, 1), past: await past, asked, at };
  }

  // Who held how much of a prompt at a moment.
  async then(asked, space, at) {
    if (asked.tokens && !space) throw new AskError(0, "", "Token ids are hashed within a namespace", "choose one");
    if (asked.hashes && asked.hashes.length > MOST_BLOCKS) throw new AskError(0, "", `These are ${count(asked.hashes.length)} hashes`, `paste ${count(MOST_BLOCKS)} at most`);
    const prompt = asked.tokens ? { tokens: asked.tokens } : { hashes: asked.hashes.join("") };
    let namespace = space;
    if (!namespace) {
      const { blocks } = await this.life(asked.hashes[0], at);
      if (blocks.length !== 1) throw new AskError(0, "", blocks.length ? "The first block is of several namespaces" : "The history does not know the first block", "choose the namespace");
      namespace = blocks[0].namespace;
    }
    return ask("v1/history/prompt", { ...prompt, namespace, at: iso(at), limit: 200 });
  }

  async life(prefix, at) {
    const known = this.known;
    if (at === null && known && known.prefix === prefix && Date.now() - known.when < LIFE_AGAIN_MS) return known.life;
    try {
      const life = await ask(question(`v1/history/block/${prefix}`, { at: at === null ? "" : iso(at) }));
      if (at === null) this.known = { prefix, life, when: Date.now() };
      return life;
    } catch (error) {
      if (error instanceof AskError && error.code === "block_unknown") return { blocks: [], holes: [], message: error.message };
      if (error instanceof AskError && at === null) return { blocks: [], holes: [], message: error.message };
      throw error;
    }
  }

  draw({ answers, past, then, asked, at }) {
    this.form.clear();
    const parts = then ? [this.heldThen(then, at)] : [];
    for (const answer of answers || []) parts.push(this.held(answer, asked, past));
    if (past) {
      for (const block of past.blocks) parts.push(this.lived(block, past, at));
      if (!past.blocks.length) parts.push(h("section", { class: "panel" }, h("h2", null, "Its life"), h("p", { class: "dim" }, past.message || "The history does not know it.")));
    } else if (answers && answers[0].blocks === 1) parts.push(h("p", { class: "dim" }, "Since when, and its life event by event, need a history: see the line below the head."));
    replace(this.found, parts);
  }

  held(answer, asked, past) {
    const { blocks } = answer, since = new Map();
    for (const block of past ? past.blocks : []) for (const one of block.held) since.set(`${one.instance}\n${one.tier}`, one.since);
    const rows = answer.holders.map((holder) => {
      const bits = bitsOf(holder.held);
      let n = 0;
      for (let block = 0; block < blocks; block += 1) n += bits(block);
      const name = holder.kind === "pool" ? holder.name : h("a", { href: `#/instance/${encodeURIComponent(holder.name)}` }, holder.name);
      const row = [name, holder.kind, holder.tier, `${count(n)} of ${count(blocks)}`, percent(n / blocks), strip(bits, blocks, holder.tier), holder.suspect ? h("span", { class: "warn" }, "suspect") : ""];
      if (blocks === 1) row.push(told(since.get(`${holder.name}\n${holder.tier}`)));
      return row;
    });
    const heads = [["Holder"], ["Kind"], ["Tier"], ["Blocks", "num"], ["", "num"], ["Which, from the first to the last", "fill"], [""]];
    if (blocks === 1) heads.push(["Since (UTC)"]);
    const none = answer.missed ? answer.missed.message : "Nobody holds any of it.";
    return h("section", { class: "panel", "aria-label": "Holders" }, h("header", null, h("h2", null, blocks === 1 ? "Who holds the block" : `Who holds the ${count(blocks)} full blocks`), h("code", { class: "dim" }, answer.namespace), answer.more ? h("span", { class: "dim" }, `${count(answer.more)} more instances have some`) : null), small(heads, rows, `${none[0].toUpperCase()}${none.slice(1)}.`),
      asked.hashes && asked.hashes.length > 1 ? h("details", { open: this.isOpen, ontoggle: (event) => { this.isOpen = event.target.open; } }, h("summary", { class: "dim" }, "One block of it"), h("p", { class: "mono" }, asked.hashes.slice(0, 200).map((hash, at) => [at ? " " : "", h("a", { href: `#/block?hash=${hash}&ns=${answer.namespace}`, title: `Block ${at}` }, hash.slice(0, 8))]))) : null);
  }

  heldThen(answer, at) {
    const { blocks } = answer, rows = [], { byName } = this.app.live;
    for (const one of answer.holders) {
      const state = one.last_frame ? stateThen(one, at, byName.get(one.instance)) : { words: "its start is missing", note: "" };
      one.tiers.forEach((tier, n) => rows.push([n ? "" : h("a", { href: `#/instance/${encodeURIComponent(one.instance)}` }, one.instance), n ? "" : h("span", { title: state.note }, state.words), n ? "" : h("strong", null, `${count(one.depth)} of ${count(blocks)}`),
        tier.name, `${count(tier.blocks)} of ${count(blocks)}`, strip(bitsOf(tier.held), blocks, tier.name)]));
    }
    for (const pool of answer.pools) rows.push([pool.name || "OBJECT, of a start that is missing", "pool of the cluster", "", "OBJECT", `${count(pool.blocks)} of ${count(blocks)}`, strip(bitsOf(pool.held), blocks, "OBJECT")]);
    return h("section", { class: "panel", "aria-label": "Holders then" },
      h("header", null, h("h2", null, `Who held the ${many(blocks, "full block")} then, and how deep`), h("code", { class: "dim" }, answer.namespace), answer.more ? h("span", { class: "dim" }, `${count(answer.more)} more instances had some`) : null),
      small([["Holder"], ["State then"], ["Depth", "num"], ["Tier"], ["Blocks", "num"], ["Which, from the first to the last", "fill"]], rows, "Nobody held any of it then."),
      answer.holes.length ? h("p", { class: "bad hole" }, `${many(answer.holes.length, "hole")} at this moment: what these instances held is not certain: ${[...new Set(answer.holes.map((hole) => hole.instance))].slice(0, 12).join(", ")}.`) : null,
      h("p", { class: "dim" }, `Depth is of blocks from the first on, in any tier of the instance, without a hole. What a pool of the cluster had is as it was claimed. ${clocks(answer)}`));
  }

  lived(block, past, at) {
    return h("section", { class: "panel", "aria-label": "Its life" },
      h("header", null, h("h2", null, "Its life"), h("code", null, block.block), h("span", { class: "dim" }, [block.model, block.tenant && `tenant ${block.tenant}`].filter(Boolean).join(" · "))),
      h("p", null, block.held.length ? [at === null ? "Held at the end of the history: " : "Held then: ", block.held.map((one, n) => [n ? "; " : "", h("strong", null, one.instance), ` in ${one.tier} since ${told(one.since)}`])] : at === null ? "Nobody held it at the end of the history." : "Nobody held it then."),
      past.holes.length ? h("p", { class: "bad hole" }, `${many(past.holes.length, "hole")}: events of instances it was at are missing, so its life may be longer than this.`) : null,
      h("p", { class: "dim" }, `${clocks(past)} ${past.more ? "Its latest events, the newest first:" : "The newest first:"}`),
      h("ol", { class: "life", reversed: true }, [...block.events].reverse().map((event) => h("li", { class: at !== null && Date.parse(event.time) > at ? "dim" : "" }, h("span", { class: "mono" }, told(event.time)), h("span", { class: `dot ${event.event === "began" || event.event === "claimed" ? "live" : "silent"}` }), h("span", null, h("a", { href: `#/instance/${encodeURIComponent(event.instance)}` }, event.instance), ` ${event.tier} – ${event.sentence}`, h("span", { class: "dim" }, ` epoch ${event.epoch}, offset ${event.offset}`))))));
  }
}
