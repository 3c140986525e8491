// The time slider: over all that the history has, with what was held drawn below it and holes as holes.

import { AskError, Newest, ask, question } from "./api.js";
import { h, s, replace, setText, setClass } from "./dom.js";
import { many, moment, short, stretch } from "./format.js";

const EVERY_MS = 15000;
const STEP_MS = 1000;
const MOST_MARKS = 400;
const DRAWN_ANEW = 0.01; // when the history has grown by so much of it
const FOR_OPERATORS = "Earlier moments are for operators.";

export const parse = (text) => (text ? Date.parse(text) : null);
export const iso = (ms) => new Date(ms).toISOString();

export class Time {
  constructor(node, onchange) {
    Object.assign(this, { node, onchange, at: null, from: null, until: null, serial: 0, isOn: false, timer: 0, drawn: 0 });
    this.input = h("input", { type: "range", "aria-label": "Moment shown", min: 0, max: 1, step: STEP_MS, oninput: () => this.move(Number(this.input.value)), onkeydown: (event) => this.key(event) });
    this.drawing = s("svg", { viewBox: "0 0 1000 22", preserveAspectRatio: "none", "aria-hidden": "true" });
    this.now = h("button", { type: "button", class: "plain", title: "Back to now (l)", onclick: () => this.live() }, "Live");
    this.back = h("button", { type: "button", class: "plain", title: "A step back ([)", "aria-label": "A step back", onclick: () => this.step(-1) }, "◂");
    this.forth = h("button", { type: "button", class: "plain", title: "A step on (])", "aria-label": "A step on", onclick: () => this.step(1) }, "▸");
    this.text = h("span", { class: "at", "aria-live": "polite" });
    this.ends = h("span", { class: "ends" });
    this.note = h("span", { class: "off" });
    this.top = h("span");
    const key = (name, words) => h("span", null, h("i", { class: `key ${name}` }), words);
    this.legend = h("span", { class: "legend" }, h("span", null, h("i", { class: "key held" }), this.top), key("start", "start"), key("stop", "stop"), key("gap", "hole"));
    this.scale = h("div", { class: "scale", title: "The times are those of the instances' clocks, in UTC" }, this.ends, this.legend);
    this.lines = new Newest((answer) => this.draw(answer), () => replace(this.drawing));
  }

  // What is known of the history changes with who asks and with the catalog: begin anew.
  begin(isKept, hasArchive, seesAll) {
    clearTimeout(this.timer);
    this.serial += 1;
    this.isOn = isKept;
    if (isKept) { this.look(this.serial); return; }
    this.from = this.until = null;
    replace(this.node, h("span", { class: "off" }, !seesAll ? FOR_OPERATORS : hasArchive
      ? "No history: start the catalog with --history DIR (catalog.history) beside its archive, and this becomes a slider over all that the archive has."
      : "No history: start the catalog with --archive DIR --history DIR (catalog.archive, catalog.history), and this becomes a slider over all that was kept."));
    if (this.at !== null) this.live();
  }

  async look(serial) {
    try {
      if (!document.hidden) {
        const told = await ask("v1/history");
        if (serial === this.serial) this.take(told);
      }
    } catch (error) {
      if (!(error instanceof AskError)) throw error;
      if (serial === this.serial && error.status === 403) { this.isOn = false; replace(this.node, h("span", { class: "off" }, FOR_OPERATORS)); return; }
      if (serial === this.serial && this.from === null) replace(this.node, h("span", { class: "off" }, `History: ${error.message}. ${error.remedy}`));
    }
    if (serial === this.serial) this.timer = setTimeout(() => this.look(serial), this.from === null ? 2000 : EVERY_MS);
  }

  take(told) {
    const begin = parse(told.from), until = parse(told.until);
    if (begin === null || until === null) {
      replace(this.node, h("span", { class: "off" }, `History: ${told.reason || "it has nothing yet"}.`));
      return;
    }
    const from = begin + 1, isNew = this.from === null; // times are told to the microsecond, and cut to the millisecond here
    const moved = isNew || this.from !== from || this.until !== until;
    Object.assign(this, { from, until, holes: told.holes });
    if (isNew) replace(this.node, this.back, this.forth, this.text, h("div", { class: "line" }, this.drawing, this.input), this.scale, this.now, this.note);
    if (moved) {
      this.input.min = String(Math.floor(from / STEP_MS) * STEP_MS);
      this.input.max = String(Math.ceil(until / STEP_MS) * STEP_MS);
      setText(this.ends, `${stretch(from, until)} UTC${told.clocks === "instances" ? ", by the instances' clocks" : ""}`);
      if (isNew || until - this.drawn > DRAWN_ANEW * (until - from)) { this.drawn = until; this.lines.ask(() => ask(question("v1/history/timeline", { steps: 200 }))); }
    }
    setText(this.note, told.reason ? told.reason : told.lags && told.lag_s > 60 ? `the history is ${Math.round(told.lag_s)} s behind` : "");
    if (this.at !== null) this.at = this.within(this.at);
    this.show();
  }

  within(ms) { return Math.max(this.from, Math.min(this.until, ms)); }

  draw(line) {
    const { from, until } = this, wide = Math.max(1, until - from), place = (ms) => (1000 * (ms - from)) / wide;
    const sums = line.steps.map((step) => Object.values(step.blocks).reduce((sum, one) => sum + one, 0)), top = Math.max(1, ...sums);
    setText(this.top, `blocks held, 0 to ${short(Math.max(0, ...sums))}`);
    let path = "M0 22";
    line.steps.forEach((step, at) => { path += `L${place(parse(step.time)).toFixed(1)} ${(22 - (20 * sums[at]) / top).toFixed(1)}`; });
    const holes = line.holes.slice(-MOST_MARKS).map((hole) => {
      const begin = Math.max(0, place(hole.since === null ? from : parse(hole.since))), end = Math.min(1000, place(parse(hole.until)));
      return s("g", { class: "hole" }, s("title", null, `${hole.instance}: ${many(hole.events, "event")} missing`), s("rect", { class: "gap", x: begin, y: 0, width: Math.max(1.5, end - begin), height: 5 }), s("line", { class: "gap-line", x1: begin, x2: begin, y1: 0, y2: 22 }));
    });
    const marks = (list, kind) => list.slice(-MOST_MARKS).map((one) => s("line", { class: kind, x1: place(parse(one.time)), x2: place(parse(one.time)), y1: 17, y2: 22 }));
    replace(this.drawing, s("path", { class: "held", d: `${path}L1000 22Z` }), marks(line.starts, "start"), marks(line.stops, "stop"), holes);
    this.node.dataset.holes = String(line.holes.length);
  }

  move(ms) { this.go(this.within(ms)); }

  step(by) {
    if (this.from === null) return;
    const size = Math.max(STEP_MS, Math.round((this.until - this.from) / 100 / STEP_MS) * STEP_MS);
    this.move((this.at === null ? this.until : this.at) + by * size);
  }

  key(event) {
    if (event.key !== "PageUp" && event.key !== "PageDown") return;
    event.preventDefault();
    this.step(event.key === "PageUp" ? 10 : -10);
  }

  live() { this.go(null); }

  go(at) {
    if (this.at === at) return;
    this.at = at;
    this.show();
    this.onchange(at);
  }

  show() {
    if (this.from === null) return;
    setText(this.text, this.at === null ? "Now" : `As of ${moment(this.at)} UTC`);
    setClass(this.text, this.at === null ? "at" : "at past");
    const value = String(this.at === null ? this.input.max : this.at);
    if (document.activeElement !== this.input || Number(this.input.value) !== Number(value)) this.input.value = value;
    this.input.setAttribute("aria-valuetext", this.at === null ? "now" : moment(this.at));
    this.now.disabled = this.at === null;
  }
}
