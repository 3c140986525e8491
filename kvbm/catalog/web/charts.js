// Small drawings, of rectangles and one path each.

import { h, s } from "./dom.js";
import { BUCKETS, colourOf, count } from "./format.js";

// Two counts for each bucket of ages, side by side, each scaled by its own largest.
export function histogram(ages, bounds) {
  const names = BUCKETS(bounds), buckets = names.length, top = Math.max(1, ...ages.hits), most = Math.max(1, ...ages.evicted);
  const bars = [];
  names.forEach((name, at) => {
    const hits = Math.max(0, ages.hits[at] || 0), evicted = Math.max(0, ages.evicted[at] || 0); // as an instance tells them
    const tall = (56 * hits) / top, low = (56 * evicted) / most;
    bars.push(s("g", null, s("title", null, `${name}: ${count(hits)} hits, ${count(evicted)} evicted`),
      s("rect", { x: at * 20, y: 0, width: 20, height: 60, fill: "transparent" }),
      s("rect", { class: "hit", x: at * 20 + 2, y: 60 - tall, width: 7, height: tall }),
      s("rect", { class: "evict", x: at * 20 + 10, y: 60 - low, width: 7, height: low })));
  });
  const words = names.map((name, at) => `${name}: ${count(ages.hits[at] || 0)} hits, ${count(ages.evicted[at] || 0)} evicted`).join("; ");
  return h("div", null,
    s("svg", { class: "hist", viewBox: `0 0 ${buckets * 20} 62`, preserveAspectRatio: "none", role: "img", "aria-label": `Ages in ${ages.tier}: ${words}` }, bars, s("line", { class: "base", x1: 0, x2: buckets * 20, y1: 60.5, y2: 60.5 })),
    h("div", { class: "axis", "aria-hidden": "true" }, h("span", null, names[0]), h("span", null, names[Math.floor(buckets / 2)]), h("span", null, names[buckets - 1])));
}

export function spark(values, label) {
  const top = Math.max(1e-9, ...values), wide = Math.max(1, values.length - 1);
  const path = values.map((value, at) => `${at ? "L" : "M"}${((100 * at) / wide).toFixed(2)} ${(28 - (26 * value) / top).toFixed(2)}`).join("");
  return s("svg", { class: "spark", viewBox: "0 0 100 30", preserveAspectRatio: "none", role: "img", "aria-label": label }, path ? s("path", { d: path }) : null);
}

// Which of some blocks are held: neighbours are one rectangle.
export function strip(bits, blocks, tier) {
  const runs = [s("rect", { x: 0, y: 0, width: blocks, height: 1 })];
  for (let at = 0; at < blocks;) {
    if (!bits(at)) { at += 1; continue; }
    let end = at;
    while (end < blocks && bits(end)) end += 1;
    runs.push(s("rect", { class: colourOf(tier), x: at, y: 0, width: end - at, height: 1 }));
    at = end;
  }
  return s("svg", { class: "strip", viewBox: `0 0 ${blocks} 1`, preserveAspectRatio: "none", "aria-hidden": "true" }, runs);
}

export function small(heads, rows, empty) {
  if (!rows.length) return h("p", { class: "empty" }, empty || "Nothing here.");
  return h("div", { class: "scroll" }, h("table", { class: "small" },
    h("thead", null, h("tr", null, heads.map(([label, kind]) => h("th", { class: kind || "", scope: "col" }, label)))),
    h("tbody", null, rows.map((row) => h("tr", null, row.map((cell, at) => h("td", { class: heads[at][1] || "" }, cell)))))));
}
