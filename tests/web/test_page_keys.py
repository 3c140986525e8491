"""The page without a mouse, in the dark, and for who looks at it with other eyes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.browser import Browser, Keys

PICTURES = Path("build/web")


def test_everything_is_reached_by_keys_alone(page: Browser) -> None:
    page.run("document.body.focus()")
    page.press(Keys.TAB)
    assert page.focused.text == "Skip to the view"
    page.press(Keys.ENTER)
    assert page.focused.get_attribute("id") == "main"
    page.press("/")
    assert page.focused.get_attribute("id") == "filter"
    page.press("gpu-", Keys.ARROW_DOWN)
    assert page.focused.get_attribute("aria-label") == "Instances"
    page.press(Keys.ARROW_DOWN)
    page.until(lambda: page.active_row() == "gpu-b", "the second row is not active")
    page.press(Keys.END)
    page.until(lambda: page.active_row() == "gpu-c", "the last row is not active")
    page.press(Keys.HOME, Keys.ARROW_DOWN, Keys.ENTER)
    page.reads("‹ Overview gpu-b")
    page.press(Keys.ESCAPE)
    page.reads("3 instances")
    page.press("2")
    page.reads("Blocks of a prompt")
    page.press("/", "12", Keys.ESCAPE, "3")
    page.reads("Tenants")
    page.press("4")
    page.reads("Where a prompt would go")
    page.press("1")
    page.reads("Event stream")


def test_the_keys_are_told(page: Browser) -> None:
    page.press("?")
    page.reads("a step back in time", "dialog")
    page.press(Keys.ESCAPE)
    page.until(lambda: not page.all("dialog"), "the keys stay")
    page.press("?")
    page.find("dialog button").click()
    page.until(lambda: not page.all("dialog"), "the keys stay")


def test_a_head_sorts_by_keys_and_says_so(page: Browser) -> None:
    head = page.find(".th button[title^='HBM']")
    page.run("arguments[0].focus()", head)
    page.press(Keys.ENTER)
    page.until(lambda: [row[0] for row in page.rows("Instances")] == ["gpu-c", "gpu-b", "gpu-a"], "it is not sorted")
    assert page.run("return arguments[0].parentElement.getAttribute('aria-sort')", head) == "descending"
    page.press(Keys.ENTER)
    page.until(lambda: [row[0] for row in page.rows("Instances")] == ["gpu-a", "gpu-b", "gpu-c"], "it is not sorted")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_themes_change_every_colour_and_words_stay_legible(page: Browser, theme: str) -> None:
    page.reads("3 instances")
    for _ in range(3):
        if page.run("return document.documentElement.dataset.theme || ''") == theme:
            break
        page.press("t")
    page.reads(f"Theme: {theme}", "#theme")
    light = page.run(
        "return getComputedStyle(document.body).backgroundColor.match(/\\d+/g).reduce((a, b) => a + +b, 0)"
    )
    assert (light > 600) == (theme == "light")
    page.shot(PICTURES / f"overview-{theme}.png")
    assert page.run(CONTRAST) == []
    page.driver.refresh()
    page.reads("live", "#link")
    assert page.run("return document.documentElement.dataset.theme") == theme  # it is remembered
    page.press("t", "t")


# Of every element with text of its own: its ratio to the first opaque background behind it, by WCAG 2.
CONTRAST = """
const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
const linear = (v) => (v / 255 <= 0.03928 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4);
const light = (c) => 0.2126 * linear(c[0]) + 0.7152 * linear(c[1]) + 0.0722 * linear(c[2]);
const found = [];
for (const e of document.querySelectorAll('body *')) {
  const hasText = [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
  if (!hasText || !e.getClientRects().length || e.matches(':disabled, .skip')) continue;
  let behind = e, back = [0, 0, 0, 0];
  while (behind && back.length === 4 && back[3] === 0) {
    back = rgb(getComputedStyle(behind).backgroundColor);
    behind = behind.parentElement;
  }
  const one = light(rgb(getComputedStyle(e).color)), other = light(back);
  const ratio = (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
  if (ratio < 4.5) found.push(`${e.tagName}.${e.className}: ${e.textContent.slice(0, 30)}: ${ratio.toFixed(2)}`);
}
return found;
"""


def test_every_control_has_a_name_and_no_id_stands_twice(page: Browser) -> None:
    for view in ("overview", "block", "tenants", "routes", "instance/gpu-a"):
        page.go(view)
        page.until(lambda: page.text() != "", "the view is empty")
        nameless = page.run(
            "return [...document.querySelectorAll('button, input, select, textarea, [role=grid], svg[role=img]')]"
            ".filter("
            "(e) => !(e.getAttribute('aria-label') || e.innerText || (e.labels && e.labels.length))).map("
            "(e) => e.outerHTML.slice(0, 120))"
        )
        assert nameless == []
        twice = page.run(
            "const ids = [...document.querySelectorAll('[id]')].map((e) => e.id); "
            "return ids.filter((id, at) => ids.indexOf(id) !== at)"
        )
        assert twice == []


def test_a_narrow_window_scrolls_no_words_away(page: Browser) -> None:
    page.driver.set_window_size(600, 900)
    try:
        page.reads("3 instances")
        assert page.run("return document.documentElement.scrollWidth <= window.innerWidth")
    finally:
        page.driver.set_window_size(1440, 900)
