// A table of thousands of rows, of which only those in sight are elements. Sorted by its heads, filtered by words, and
// walked with the arrow keys.

import { h, setText, setClass, atFrame } from "./dom.js";

const ROW = 26; // pixels, as in style.css
const SPARE = 6;
let tables = 0;

const compare = (one, other) => {
  if (one === other) return 0;
  if (one === null || one === undefined || one === "") return 1; // what is not known comes last, either way
  if (other === null || other === undefined || other === "") return -1;
  return one < other ? -1 : 1;
};

const leastOf = (column) => Number.parseInt((/(\d+)px/.exec(column.width) || [0, 80])[1], 10) || 80;

export class Table {
  // columns: {key, label, title, width, num, value(row), text(row), paint(cell, row), isBlank(row), spare}; options: {name,
  // open(row), empty, sort, down, most}. A column that `isBlank` in every row is left out, and where there is no room for
  // all, those with the highest `spare` are.
  constructor(columns, options) {
    this.columns = columns;
    this.options = options;
    this.id = `table-${(tables += 1)}`;
    this.all = [];
    this.shown = [];
    this.query = "";
    this.active = 0;
    this.activeRow = null;
    this.pool = [];
    this.sort = options.sort || columns[0].key;
    this.down = Boolean(options.down);
    this.paint = atFrame(() => this.draw());
    this.build();
  }

  build() {
    this.heads = this.columns.map((one) => h("button", { type: "button", class: one.num ? "head num" : "head", title: one.title || `Sort by ${one.label}`, onclick: () => this.sortBy(one.key) }, one.label, h("span", { class: "arrow", "aria-hidden": "true" })));
    const head = h("div", { class: "tr thead", role: "row" }, this.heads.map((button) => h("div", { role: "columnheader", class: "th" }, button)));
    this.space = h("div", { class: "space", role: "rowgroup" });
    this.empty = h("p", { class: "empty", hidden: true });
    this.body = h("div", { class: "tbody", role: "grid", "aria-label": this.options.name, tabindex: "0", onscroll: () => { this.paint(); }, onkeydown: (event) => this.key(event), onclick: (event) => this.click(event) }, h("div", { role: "rowgroup", class: "theads" }, head), this.space, this.empty);
    this.node = h("div", { class: "table" }, this.body);
    this.left = "-"; // which are left out
    this.fit();
    if (this.options.most) this.node.style.setProperty("--most", String(this.options.most));
    new ResizeObserver(() => { if (this.body.clientHeight) { this.fit(); this.paint(); } }).observe(this.body);
    this.markSort();
  }

  fit() {
    const { columns } = this, room = this.body.clientWidth, rows = this.all;
    const shown = columns.map((one) => !(one.isBlank && rows.length && rows.every(one.isBlank)));
    const least = () => columns.reduce((sum, one, at) => sum + (shown[at] ? leastOf(one) + 8 : 0), 8);
    const spare = columns.map((one, at) => [one.spare || 0, at]).filter(([rank, at]) => rank && shown[at]).sort((one, other) => other[0] - one[0]);
    while (room && spare.length && least() > room) shown[spare.shift()[1]] = false;
    const left = shown.map((one) => (one ? "" : "x")).join();
    if (left === this.left) return;
    this.left = left;
    this.isShown = shown;
    this.node.style.setProperty("--columns", columns.filter((_, at) => shown[at]).map((one) => one.width).join(" "));
    this.node.style.setProperty("--least", `${least()}px`);
    this.heads.forEach((head, at) => { head.parentElement.hidden = !shown[at]; });
    for (const { cells } of this.pool) cells.forEach((cell, at) => { cell.hidden = !shown[at]; });
  }

  set(rows) {
    this.all = rows;
    this.fit();
    this.arrange();
  }

  filter(query) {
    if (query === this.query) return;
    this.query = query;
    this.arrange();
    this.body.scrollTop = 0;
    this.active = 0;
  }

  sortBy(key) {
    if (this.sort === key) this.down = !this.down;
    else { this.sort = key; this.down = Boolean(this.columns.find((one) => one.key === key).num); }
    this.markSort();
    this.arrange();
  }

  markSort() {
    this.columns.forEach((one, at) => {
      const own = one.key === this.sort;
      this.heads[at].parentElement.setAttribute("aria-sort", own ? (this.down ? "descending" : "ascending") : "none");
      setText(this.heads[at].lastChild, own ? (this.down ? " ▾" : " ▴") : "");
    });
  }

  arrange() {
    const words = this.query.toLowerCase().split(/\s+/).filter(Boolean);
    const wanted = words.filter((one) => !one.startsWith("-")), unwanted = words.filter((one) => one.startsWith("-") && one.length > 1).map((one) => one.slice(1));
    const kept = words.length ? this.all.filter((row) => wanted.every((one) => row.hay.includes(one)) && !unwanted.some((one) => row.hay.includes(one))) : this.all.slice();
    const column = this.columns.find((one) => one.key === this.sort), first = this.columns[this.options.tie || 0];
    const keyed = kept.map((row) => [column.value(row), first.value(row), row]);
    const sign = this.down ? -1 : 1;
    keyed.sort((one, other) => {
      const missing = compare(one[0], other[0]);
      const blank = [one[0], other[0]].some((value) => value === null || value === undefined || value === "");
      return (blank ? missing : sign * missing) || compare(one[1], other[1]);
    });
    this.shown = keyed.map((one) => one[2]);
    if (this.activeRow) {
      const at = this.shown.indexOf(this.activeRow);
      if (at >= 0) this.active = at;
    }
    this.active = Math.max(0, Math.min(this.active, this.shown.length - 1));
    if (this.options.counted) this.options.counted(this.shown.length, this.all.length);
    this.paint();
  }

  draw() {
    const rows = this.shown, height = `${rows.length * ROW}px`;
    if (this.space.style.height !== height) this.space.style.height = height;
    this.body.setAttribute("aria-rowcount", String(rows.length + 1));
    this.empty.hidden = rows.length > 0;
    if (!rows.length) setText(this.empty, this.all.length ? "Nothing fits the filter." : this.options.empty || "Nothing here.");
    const top = this.body.scrollTop, seen = this.body.clientHeight || 600;
    const begin = Math.max(0, Math.floor(top / ROW) - SPARE), end = Math.min(rows.length, Math.ceil((top + seen) / ROW) + SPARE);
    while (this.pool.length < end - begin) this.pool.push(this.newRow());
    this.pool.forEach((entry, at) => {
      const number = begin + at;
      if (number >= end) { if (!entry.node.hidden) entry.node.hidden = true; return; }
      this.fill(entry, rows[number], number);
    });
    const active = this.options.open && rows.length && this.active >= begin && this.active < end ? `${this.id}-${this.active}` : "";
    if (active) this.body.setAttribute("aria-activedescendant", active);
    else this.body.removeAttribute("aria-activedescendant");
  }

  newRow() {
    const cells = this.columns.map((one) => h("div", { role: "gridcell", class: one.num ? "td num" : "td" }));
    cells.forEach((cell, at) => { cell.hidden = !this.isShown[at]; });
    const node = h("div", { class: "tr", role: "row" }, cells);
    this.space.append(node);
    return { node, cells };
  }

  fill(entry, row, number) {
    const { node, cells } = entry;
    if (node.hidden) node.hidden = false;
    const place = `translateY(${number * ROW}px)`;
    if (node.style.transform !== place) node.style.transform = place;
    const id = `${this.id}-${number}`;
    if (node.id !== id) { node.id = id; node.setAttribute("aria-rowindex", String(number + 2)); }
    const mark = this.options.mark ? this.options.mark(row) : "";
    setClass(node, `tr${number % 2 ? " odd" : ""}${this.options.open && number === this.active ? " active" : ""}${mark ? ` ${mark}` : ""}`);
    entry.row = row;
    this.columns.forEach((one, at) => {
      if (one.paint) one.paint(cells[at], row);
      else {
        const text = one.text(row);
        setText(cells[at], text);
        if (!one.num && cells[at].title !== text) cells[at].title = text;
      }
    });
  }

  move(to) {
    if (!this.shown.length) return;
    this.active = Math.max(0, Math.min(to, this.shown.length - 1));
    this.activeRow = this.shown[this.active];
    const top = this.active * ROW, head = ROW;
    if (top < this.body.scrollTop) this.body.scrollTop = top;
    else if (top + ROW + head > this.body.scrollTop + this.body.clientHeight) this.body.scrollTop = top + ROW + head - this.body.clientHeight;
    this.paint();
  }

  key(event) {
    if (event.target !== this.body || event.ctrlKey || event.metaKey || event.altKey) return;
    const page = Math.max(1, Math.floor(this.body.clientHeight / ROW) - 2);
    const to = { ArrowDown: this.active + 1, ArrowUp: this.active - 1, PageDown: this.active + page, PageUp: this.active - page, Home: 0, End: this.shown.length - 1 }[event.key];
    if (to !== undefined) { event.preventDefault(); this.move(to); }
    else if (event.key === "Enter" && this.options.open && this.shown[this.active]) { event.preventDefault(); this.options.open(this.shown[this.active]); }
  }

  click(event) {
    const entry = this.pool.find((one) => one.node.contains(event.target));
    if (!entry || !this.options.open) return;
    this.active = this.shown.indexOf(entry.row);
    this.activeRow = entry.row;
    this.options.open(entry.row);
  }
}

// Cells that are more than text; the same elements serve every row that is shown in them.
export function paintBar(cell, part, text, title) {
  if (!cell.firstElementChild) cell.append(h("span", { class: "bar" }, h("i")), h("span", { class: "of" }));
  const [bar, of] = cell.children, inner = bar.firstElementChild;
  const width = part === null ? "0%" : `${Math.min(100, 100 * part).toFixed(1)}%`;
  if (inner.style.width !== width) inner.style.width = width;
  setClass(bar, part === null ? "bar none" : "bar");
  setText(of, text);
  if (cell.title !== title) cell.title = title;
}

export function paintState(cell, name, words) {
  if (!cell.firstElementChild) cell.append(h("span", { class: "dot" }), h("span"));
  setClass(cell.firstElementChild, `dot ${name}`);
  setText(cell.lastElementChild, words);
}
