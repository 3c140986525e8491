"""Words stand out from what is behind them (WCAG 2, AA): on every view, now and of a moment before, in both themes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.browser import Browser
from tests.catalog_site import HASHES, SPACE
from tests.web_past import Past, move, past

__all__ = ["past"]
BLOCK = f"block?hash={HASHES[:16].hex()}&ns={SPACE.id.hex()}"
VIEWS = {
    "overview": "Event stream",
    "instance/one": "Pools",
    BLOCK: "Who holds the block",
    "tenants": "(no tenant)",
    "routes": "Where a prompt would go",
}
THEN = {"overview": "As of", "instance/one": "Then: epoch 1", BLOCK: "life", "tenants": "Of an earlier moment"}

# Of every element with words of its own, and every field: the ratio of its colour to what is behind it. What is half
# transparent is laid over what is behind it, words of a faded element too.
CONTRAST = """
const rgba = (text) => {
  const n = text.match(/[\\d.]+/g).map(Number), by = text.startsWith('color(') ? 255 : 1;
  return [n[0] * by, n[1] * by, n[2] * by, n.length < 4 ? 1 : n[3]];
};
const over = (top, low) => [0, 1, 2].map((i) => top[i] * top[3] + low[i] * (1 - top[3]));
const linear = (v) => (v / 255 <= 0.04045 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4);
const light = (c) => 0.2126 * linear(c[0]) + 0.7152 * linear(c[1]) + 0.0722 * linear(c[2]);
const behind = (e) => {
  const layers = [];
  for (let one = e; one; one = one.parentElement) layers.push(rgba(getComputedStyle(one).backgroundColor));
  return layers.reverse().reduce((low, top) => over(top, low), [255, 255, 255]);
};
const found = [], seen = new Set();
const look = (e, pseudo, words) => {
  const own = getComputedStyle(e, pseudo), box = e.getClientRects();
  if (!box.length || own.visibility !== 'visible') return;
  if (e.matches(':disabled, .skip') || e.closest('[hidden], svg')) return;
  const back = behind(e), color = rgba(own.color);
  for (let one = e; one; one = one.parentElement) color[3] *= Number(getComputedStyle(one).opacity);
  const two = [light(over(color, back)), light(back)], size = Number.parseFloat(own.fontSize);
  const isLarge = size >= 24 || (size >= 18.66 && Number(own.fontWeight) >= 700);
  const ratio = (Math.max(...two) + 0.05) / (Math.min(...two) + 0.05);
  seen.add(e.tagName);
  const least = isLarge ? 3 : 4.5, name = `${e.tagName}.${e.className}: ${words.slice(0, 40)}`;
  if (ratio < least) found.push(`${name}: ${ratio.toFixed(2)}`);
};
for (const e of document.querySelectorAll('body *')) {
  if (e.matches('input:not([type=range]), textarea, select')) {
    look(e, e.value ? null : '::placeholder', e.value || e.placeholder || '');
  }
  const texts = [...e.childNodes].filter((n) => n.nodeType === 3);
  const words = texts.map((n) => n.textContent.trim()).join('');
  if (words) look(e, null, words);
}
return [found, seen.size, document.querySelectorAll('body *').length];
"""


@pytest.fixture(params=["light", "dark"])
def themed(window: Browser, past: Past, request: pytest.FixtureRequest) -> Iterator[Browser]:
    """The page of a catalog with a history, in a theme."""
    window.forget()
    window.open(past.site.url + "/")
    window.run("localStorage.setItem('kvbm.theme', arguments[0])", request.param)
    window.driver.refresh()
    window.reads(f"Theme: {request.param}", "#theme")
    window.find("#time input")
    yield window
    window.run("localStorage.clear()")
    assert [one for one in window.said() if "instances/nobody" not in one] == []


def check(window: Browser, where: str, first: str = "") -> None:
    """Nothing here is pale. Args: first: what is done to the page just before."""
    pale, kinds, elements = window.run(first + CONTRAST)
    assert pale == [], where
    assert kinds >= 4 and elements > 40, where


def test_words_of_every_view_are_legible_now_and_then(themed: Browser, past: Past) -> None:
    for view, words in VIEWS.items():
        themed.go(view)
        themed.reads(words)
        check(themed, view)
    themed.press("?")
    themed.find("dialog[open]")
    check(themed, "the keys")
    themed.find("dialog button").click()
    themed.go("overview")
    themed.reads("Event stream")
    move(themed, past.at(6))
    for view, words in THEN.items():
        themed.go(view)
        themed.reads(words, "body")
        check(themed, f"{view}, of an earlier moment")


def test_what_is_wrong_is_legible_too(themed: Browser, past: Past) -> None:
    """Who is left out, a filter that finds nothing, a field with words that are none, a banner of trouble."""
    themed.reads("Event stream")
    check(themed, "a row left out", "document.querySelector('.space .tr').className += ' off';")
    banner = (
        "const b = document.querySelector('#banner'); b.hidden = false; b.textContent = 'Degraded'; b.className = '%s';"
    )
    for kind in ("banner", "banner bad"):
        check(themed, kind, banner % kind)
    for kind in ("live", "past", "away", ""):
        check(themed, f"the pill {kind}", f"document.querySelector('#link').className = 'pill {kind}';")
    for kind in ("good", "bad", "warn"):
        check(themed, f"a tile that is {kind}", f"document.querySelector('.tile dd').className = '{kind}';")
    themed.go("block")
    themed.fill("textarea", "hello")
    themed.find("form button.primary").click()
    themed.reads("neither a hash")
    check(themed, "a refusal")
    themed.go("instance/nobody")
    themed.reads("No instance nobody")
    check(themed, "nobody")
