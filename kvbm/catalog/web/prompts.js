// A prompt as somebody pastes it: hashes of blocks, or ids of tokens; and the namespace it is of.

import { AskError, ask } from "./api.js";
import { h } from "./dom.js";

const AGAIN_MS = 2000;
const HASH = /^[0-9a-fA-F]{32}$/;

// {hashes} or {tokens}, or {error}: what is wrong, in a sentence.
export function read(text) {
  const clean = text.trim();
  if (!clean) return { error: "Paste hashes (32 hex digits each) or token ids first." };
  const words = clean.replace(/^\s*\[|\]\s*$/g, "").split(/[\s,;"']+/).filter(Boolean);
  if (words.every((word) => /^[0-9]+$/.test(word) && word.length <= 10 && Number(word) < 2 ** 32)) return { tokens: words.map(Number) };
  const joined = words.map((word) => word.replace(/^0x/, "")).join("");
  if (/^[0-9a-fA-F]+$/.test(joined) && joined.length % 32 === 0) return { hashes: joined.toLowerCase().match(/.{32}/g) };
  if (words.length === 1 && /^[0-9a-fA-F]{8,31}$/.test(words[0])) return { prefix: words[0].toLowerCase() };
  const odd = words.find((word) => !HASH.test(word) && !/^[0-9]+$/.test(word)) || words[0];
  return { error: `"${odd.slice(0, 40)}" is neither a hash of 32 hex digits nor a token id.` };
}

let known = null;

export async function namespaces() {
  if (known) return known;
  try {
    known = (await ask("v1/namespaces?limit=500")).namespaces;
    setTimeout(() => { known = null; }, 10000);
    return known;
  } catch (error) {
    if (!(error instanceof AskError)) throw error;
    return [];
  }
}

export const nameOf = (fields) => [fields.model, fields.revision, fields.lora && `lora ${fields.lora}`, fields.tenant && `tenant ${fields.tenant}`, `${fields.block_tokens} tokens`, fields.kv_group && `group ${fields.kv_group}`].filter(Boolean).join(" · ");

export class PromptForm {
  constructor(options) {
    this.text = h("textarea", { rows: 5, spellcheck: "false", autocomplete: "off", "aria-label": "Hashes or token ids", placeholder: options.placeholder, onkeydown: (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); this.submit(); } } });
    this.space = h("select", { "aria-label": "Namespace", onchange: () => this.tell() }, h("option", { value: "" }, options.any));
    this.whole = h("span", { class: "whole", role: "status" }); // a list shows the beginning of long names
    this.button = h("button", { type: "submit", class: "primary" }, options.button);
    this.error = h("p", { class: "bad", role: "alert" });
    this.ask = options.ask;
    this.node = h("form", { class: "panel", onsubmit: (event) => { event.preventDefault(); this.submit(); } },
      h("h2", null, options.title),
      h("div", { class: "form" }, this.text, h("div", { class: "side" }, h("label", null, "Namespace", this.space), this.whole, options.more || [], h("div", null, this.button, " ", h("span", { class: "dim" }, "Ctrl + Enter")))), this.error);
    this.fill();
  }

  async fill() {
    clearTimeout(this.again);
    const found = await namespaces(), chosen = this.space.value;
    if (!found.length) this.again = setTimeout(() => { if (this.node.isConnected) this.fill(); }, AGAIN_MS); // none is named yet, or the catalog is away
    while (this.space.options.length > 1) this.space.remove(1);
    for (const one of found) this.space.append(h("option", { value: one.id }, `${one.id.slice(0, 8)} · ${nameOf(one.fields)}`));
    if (this.wanted && !found.some((one) => one.id === this.wanted)) this.space.append(h("option", { value: this.wanted }, this.wanted));
    this.space.value = this.wanted || chosen;
    this.found = found;
    this.tell();
  }

  // Which namespace is chosen, with its whole id.
  tell() {
    const id = this.space.value, one = (this.found || []).find((known) => known.id === id);
    this.whole.textContent = one ? `${id} ${nameOf(one.fields)}` : id;
  }

  choose(id) { this.wanted = id; this.fill(); }

  submit() {
    const asked = read(this.text.value);
    this.error.textContent = asked.error || "";
    if (!asked.error) this.ask(asked, this.space.value);
  }

  clear() { this.error.textContent = ""; }

  fail(error) { this.error.textContent = `${error.message}. ${error.remedy || ""}`; }
}
