// The page: which view is shown, of which moment, and how the feed is kept.

import { AskError, Newest, ask, feed, hasToken, isTokenOld, keepToken, question } from "./api.js";
import { atFrame, h, replace, setClass, setText } from "./dom.js";
import { brief, moment } from "./format.js";
import { Live, asOf } from "./model.js";
import { Time, iso, parse } from "./time.js";
import { Block } from "./views/block.js";
import { Instance } from "./views/instance.js";
import { Overview } from "./views/overview.js";
import { Routes } from "./views/routes.js";
import { Tenants } from "./views/tenants.js";

const VIEWS = [["overview", "Overview", Overview], ["block", "Blocks", Block], ["tenants", "Tenants", Tenants], ["routes", "Routes", Routes], ["instance", null, Instance]];
const KEYS = [["1 2 3 4", "overview, blocks, tenants, routes"], ["/", "to the filter, or the field to paste into"], ["↑ ↓ PgUp PgDn Home End", "walk a table that has the focus"], ["Enter", "open the row"], ["Esc", "back to the overview; out of a field; close this"], ["[ ]", "a step back in time, a step on"], ["l", "back to now"], ["s", "to the time slider; ← → move it by a second"], ["t", "theme: as the system, light, dark"], ["?", "this"]];
const THEME = "kvbm.theme";
const HIDDEN_MS = 60000;
const WAIT_MS = [500, 1000, 2000, 4000, 8000];

const $ = (id) => document.getElementById(id);
const store = { get(key) { try { return localStorage.getItem(key) || ""; } catch { return ""; } }, set(key, value) { try { localStorage.setItem(key, value); } catch { /* storage is off */ } } };

class App {
  constructor() {
    this.live = new Live();
    this.past = null;
    this.views = new Map();
    this.view = null;
    this.params = {};
    this.time = new Time($("time"), (at) => this.onTime(at));
    this.paint = atFrame(() => this.draw());
    this.steps = new Newest((answer) => { if (this.time.at !== null) { this.past = answer; this.stepped(answer); this.paint(); } }, (error) => this.say(`What is below is still ${this.past ? `of ${moment(this.past.asked)} UTC` : "of now"}. The history has no answer: ${error.message}. ${error.remedy}`, true));
    this.kept = "";
    this.tries = 0;
    this.isRefused = false; // what is told of one instance is for operators, also where others see all instances
  }

  start() {
    this.theme(store.get(THEME));
    replace($("nav"), VIEWS.filter(([, label]) => label).map(([name, label], at) => h("a", { href: `#/${name}`, title: `${label} (${at + 1})`, "data-view": name }, label)));
    $("theme").addEventListener("click", () => this.nextTheme());
    $("keys").addEventListener("click", () => this.help());
    $("token").addEventListener("click", () => { keepToken(""); location.reload(); });
    $("token").hidden = !hasToken();
    for (const skip of document.querySelectorAll("[data-skip]")) skip.addEventListener("click", (event) => { event.preventDefault(); this.focus(skip.dataset.skip); });
    document.addEventListener("keydown", (event) => this.key(event));
    window.addEventListener("hashchange", () => this.route());
    window.addEventListener("pagehide", () => { this.isLeft = true; });
    window.addEventListener("pageshow", (event) => { this.isLeft = false; if (event.persisted && isTokenOld()) location.reload(); });
    this.route();
    this.follow();
  }

  // -- where we are ---------------------------------------------------------------------------------------------------

  route() {
    const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
    const [name, ...rest] = path.split("/");
    const found = VIEWS.find(([one]) => one === name) || VIEWS[0], params = Object.fromEntries(new URLSearchParams(query || ""));
    if (found[0] === "instance") { try { params.name = decodeURIComponent(rest.join("/")); } catch { params.name = rest.join("/"); } }
    if (params.at && this.time.at === null) { const at = parse(params.at); if (Number.isFinite(at)) this.wanted = at; }
    let view = this.views.get(found[0]);
    if (!view) { view = new found[2](this); this.views.set(found[0], view); }
    if (this.view && this.view !== view && this.view.leave) this.view.leave();
    const isNew = this.view !== view;
    this.view = view;
    this.params = params;
    document.title = `${found[1] || params.name} · kvbm catalog`;
    for (const link of $("nav").children) {
      if (link.dataset.view === (found[0] === "instance" ? "overview" : found[0])) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
    if (isNew) replace($("main"), view.node);
    view.show(params);
    this.draw();
  }

  go(path) { location.hash = `#/${path}`; }

  draw() {
    const { time, live, view } = this;
    if (this.wanted !== undefined && time.from !== null) { const at = this.wanted; this.wanted = undefined; time.move(at); return; }
    if (time.at !== null && !this.past) return;
    const seen = time.at === null ? live : this.past;
    if (!seen || (time.at === null && !live.head)) return;
    view.update(seen, time.at);
    if (!this.painted) { this.painted = true; requestAnimationFrame(() => { performance.mark("kvbm:first-rows"); document.documentElement.dataset.ready = "1"; }); }
  }

  // -- time -----------------------------------------------------------------------------------------------------------

  onTime(at) {
    this.link();
    if (at === null) {
      this.steps.drop();
      this.past = null;
      this.say("");
      this.paint();
      return;
    }
    document.documentElement.dataset.asked = String(at);
    this.steps.ask(async () => {
      const begin = performance.now(), answer = asOf(await ask(question("v1/history/overview", { at: iso(at) })), this.live);
      return Object.assign(answer, { asked: at, begin });
    });
  }

  // A moment is on the screen: told to whoever measures, and to tests.
  stepped(answer) {
    this.say("");
    requestAnimationFrame(() => requestAnimationFrame(() => {
      document.documentElement.dataset.shown = String(answer.asked);
      document.documentElement.dataset.stepMs = (performance.now() - answer.begin).toFixed(1);
    }));
  }

  // -- the feed -------------------------------------------------------------------------------------------------------

  async follow() {
    for (;;) {
      await this.inSight();
      this.hid = false;
      let retryMs = 0;
      const stop = new AbortController(), watch = this.whenHidden(() => { this.hid = true; stop.abort(); });
      try {
        await feed("v1/overview/feed", (kind, data) => {
          if (kind === "ended") { this.ended = data; stop.abort(); return; }
          if (kind !== "overview") return;
          this.tries = 0;
          if (!this.live.take(data)) { stop.abort(); return; }
          this.onLive();
        }, stop.signal);
        if (this.hid) continue;
        this.lost(this.ended && !this.ended.may_return ? new AskError(401, "ended", this.ended.why, "") : new AskError(0, "ended", "the feed has ended", ""));
      } catch (error) {
        if (!(error instanceof AskError)) throw error;
        retryMs = 1000 * error.retryS;
        this.lost(error);
        if (error.status === 401) await this.login(hasToken() ? "The catalog does not know this token, or no longer." : "");
        else if (error.status === 403) await this.login(`${error.message}.`);
      } finally {
        watch();
      }
      this.ended = null;
      await new Promise((resolve) => { setTimeout(resolve, Math.max(retryMs, WAIT_MS[Math.min(this.tries, WAIT_MS.length - 1)]) * (0.75 + Math.random() / 2)); });
      this.tries += 1;
    }
  }

  // A page that nobody sees asks for nothing after a while, and one that was left at once, though the browser keeps it
  // for its button back: browsers open few connections to one server.
  inSight() {
    if (!document.hidden && !this.isLeft) return null;
    return new Promise((resolve) => {
      const look = () => {
        if (document.hidden || this.isLeft) return;
        document.removeEventListener("visibilitychange", look);
        window.removeEventListener("pageshow", look);
        resolve();
      };
      document.addEventListener("visibilitychange", look);
      window.addEventListener("pageshow", look);
    });
  }

  whenHidden(work) {
    let timer = 0;
    const look = () => { clearTimeout(timer); if (document.hidden) timer = setTimeout(work, HIDDEN_MS); };
    document.addEventListener("visibilitychange", look);
    window.addEventListener("pagehide", work);
    look();
    return () => {
      clearTimeout(timer);
      document.removeEventListener("visibilitychange", look);
      window.removeEventListener("pagehide", work);
    };
  }

  // Whether earlier moments can be asked for, by who asks.
  get keepsHistory() { return Boolean(this.live.head && this.live.head.catalog.history && this.time.isOn); }

  onLive() {
    const { catalog } = this.live.head;
    if (this.isAway && this.time.at !== null) this.say("");
    this.isAway = false;
    this.link();
    setText($("version"), catalog.version);
    this.compare(catalog.version);
    const kept = `${catalog.history} ${catalog.archive} ${catalog.sees_all}`;
    if (kept !== this.kept) { this.kept = kept; this.time.begin(catalog.history, catalog.archive, catalog.sees_all); }
    if (this.time.at === null) {
      const old = catalog.view_age_s ? `The view is ${catalog.view_age_s.toFixed(0)} s old. ` : "";
      if (!catalog.ready || catalog.degraded) this.say(catalog.ready ? "Degraded" : "Not ready", false, catalog.ready ? catalog.degraded : catalog.reason);
      else this.say(old || (catalog.sees_all ? "" : "You see the instances that serve your tenants. Numbers, places and trouble are for operators."));
    }
    if (this.time.at === null || !this.past) this.paint();
  }

  // The catalog may be another than the one whose files these are: they may not fit each other.
  compare(version) {
    this.version = this.version || version;
    const notice = $("upgrade"), isNewer = version !== this.version;
    if (isNewer && notice.dataset.version !== version) {
      replace(notice, h("span", null, `This page is of ${this.version}, the catalog of ${version}: reload.`), " ", h("button", { type: "button", class: "plain", onclick: () => location.reload() }, "Reload"));
      notice.dataset.version = version;
    }
    notice.hidden = !isNewer;
  }

  lost(error) {
    this.isAway = true;
    this.link();
    if (error.status !== 401 && error.code !== "ended") this.say(`${error.message}. ${error.remedy}`, true);
  }

  link() {
    const pill = $("link");
    const catalog = this.live.head && this.live.head.catalog;
    const [kind, text] = this.time.at !== null ? ["past", "earlier moment"] : this.isAway ? ["away", "not connected"] : !catalog ? ["", "connecting"] : !catalog.ready ? ["away", "not ready"] : catalog.degraded ? ["past", "degraded"] : ["live", "live"];
    setClass(pill, `pill ${kind}`);
    setText(pill, text);
  }

  // A line at the top. Of `reasons`, which may be many and long, the line has the beginning, and the rest opens below.
  say(text, isBad = false, reasons = "") {
    const banner = $("banner"), told = reasons ? brief(reasons) : null;
    if (!banner.firstElementChild) banner.append(h("span"), h("details", null, h("summary", null, "All of it"), h("ul")));
    const [line, more] = banner.children;
    banner.hidden = !text;
    setClass(banner, isBad ? "banner bad" : "banner");
    setText(line, told ? `${text}: ${told.line}` : text);
    more.hidden = !told || !told.isCut;
    if (!more.hidden) replace(more.lastElementChild, told.parts.map((part) => h("li", null, part)));
  }

  // Somebody else may ask from now on.
  begin() {
    this.tries = 0;
    this.kept = "";
    this.isRefused = false;
  }

  login(why) {
    return new Promise((resolve) => {
      const field = h("input", { type: "password", autocomplete: "off", spellcheck: "false", id: "token-field" });
      let isGiven = false;
      // Browsers close a dialog at the second Esc, whatever the page says of the first.
      const box = h("dialog", { "aria-labelledby": "token-title", oncancel: (event) => event.preventDefault(), onclose: () => { if (!isGiven) { box.showModal(); field.focus(); } } },
        h("form", { method: "dialog", onsubmit: (event) => { event.preventDefault(); if (!field.value.trim()) return; keepToken(field.value); $("token").hidden = false; this.begin(); isGiven = true; box.close(); box.remove(); resolve(); } },
          h("h2", { id: "token-title" }, "This catalog asks who you are"), why ? h("p", { class: "bad", role: "alert" }, why) : null,
          h("p", null, "Paste a token that kvbm-catalog token has made. It is kept for this tab alone and sent to this catalog alone."),
          h("label", null, "Token", field), h("div", null, h("button", { type: "submit", class: "primary" }, "Open"))));
      document.body.append(box);
      box.showModal();
      field.focus();
    });
  }

  // -- keys -----------------------------------------------------------------------------------------------------------

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
    const { target } = event, isField = target instanceof HTMLInputElement ? target.type !== "range" : target instanceof HTMLTextAreaElement || target instanceof HTMLSelectElement;
    if (document.querySelector("dialog[open]")) return;
    if (event.key === "Escape") {
      if (isField) target.blur();
      else if (location.hash && !location.hash.startsWith("#/overview")) this.go("overview");
      return;
    }
    if (isField) return;
    const work = {
      "/": () => this.focus("filter"), "?": () => this.help(), t: () => this.nextTheme(), l: () => this.time.live(), "[": () => this.time.step(-1), "]": () => this.time.step(1), s: () => this.focus("time"),
      1: () => this.go("overview"), 2: () => this.go("block"), 3: () => this.go("tenants"), 4: () => this.go("routes"),
    }[event.key];
    if (work) { event.preventDefault(); work(); }
  }

  focus(where) {
    const found = where === "time" ? document.querySelector("#time input") || $("time") : where === "filter" ? this.view.node.querySelector("input[type=search], textarea") : $(where);
    if (found) found.focus();
  }

  help() {
    const box = h("dialog", { "aria-labelledby": "keys-title", onclose: () => box.remove() }, h("h2", { id: "keys-title" }, "Keys"),
      h("dl", { class: "keys" }, KEYS.map(([keys, words]) => [h("dt", null, keys.split(" ").map((one) => [h("kbd", null, one), " "])), h("dd", null, words)])),
      h("form", { method: "dialog" }, h("button", { type: "submit", class: "primary" }, "Close")));
    document.body.append(box);
    box.showModal();
  }

  theme(name) {
    if (name === "light" || name === "dark") document.documentElement.dataset.theme = name;
    else delete document.documentElement.dataset.theme;
    setText($("theme"), `Theme: ${name || "system"}`);
    this.themeName = name;
  }

  nextTheme() {
    const names = ["", "light", "dark"], next = names[(names.indexOf(this.themeName) + 1) % names.length];
    store.set(THEME, next);
    this.theme(next);
  }
}

new App().start();
