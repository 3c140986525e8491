"""What somebody who keeps a cluster sees at first sight: nothing cut, the line at the top short, an upgrade told."""

from __future__ import annotations

from pathlib import Path

import pytest

import kvbm.catalog.edge.server
from tests.browser import Browser
from tests.web_site import WebSite, hashes_of

WIDER = """
return [...document.querySelectorAll('main .scroll, main .tbody')]
  .filter((one) => one.scrollWidth > one.clientWidth + 1)
  .map((one) => [one.getAttribute('aria-label') || one.parentElement.getAttribute('aria-label'), one.scrollWidth,
                 one.clientWidth])
"""
SHOWN = "return [...document.querySelectorAll('main .th')].filter((one) => one.offsetWidth).map((one) => one.innerText)"
VIEWS = {
    "overview": "3 instances",
    "tenants": "acme",
    f"block?hash={hashes_of(1, 8)[16 * 7 :].hex()}": "Who holds the block",
    "instance/gpu-b": "Pools",
}


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize(("wide", "high"), [(1400, 1000), (900, 1000)])
def test_no_table_is_wider_than_the_window(page: Browser, theme: str, wide: int, high: int) -> None:
    page.driver.set_window_size(wide, high)
    while page.run("return document.documentElement.dataset.theme") != theme:
        page.press("t")
    for view, words in VIEWS.items():
        page.go(view)
        page.reads(words)
        page.until(lambda: page.run(WIDER) == [], f"a table of {view} is cut: {page.run(WIDER)}")
        page.shot(Path("build/web") / f"layout-{view.split('?')[0].replace('/', '-')}-{wide}-{theme}.png")
    page.go("overview")
    assert page.run("return document.documentElement.scrollWidth") <= wide
    shown = page.until(lambda: page.run(SHOWN), "no head shows")
    assert {"Instance", "State", "HBM fill", "Why left out, trouble, suspicion"} <= {one.strip(" ▴▾") for one in shown}
    page.driver.set_window_size(1440, 900)


def test_a_column_without_anything_in_it_is_left_out(page: Browser) -> None:
    page.go("tenants")
    page.reads("acme")
    heads = page.run(SHOWN)
    assert "Quota" not in heads and "Hit rate" not in heads and "Object pools" in heads


def test_who_has_stopped_cleanly_counts_apart_from_who_is_left_out(page: Browser, site: WebSite) -> None:
    page.reads("Left out 0 nobody")
    engine = site.instance("gpu-d")
    engine.compute(40, 2)
    page.reads("4 instances")
    page.until(lambda: [row[1] for row in page.rows("Instances")] == ["live"] * 4, "gpu-d is not live")
    engine.manager.close()
    page.reads("Left out 0 1 stopped cleanly")
    page.until(lambda: page.rows("Instances")[3][-1] == "stopped cleanly", "the reason says something else")
    assert page.run("return document.querySelectorAll('.tile dd.bad').length") == 0


def test_an_upgrade_of_the_catalog_is_told_and_the_page_reloads(
    page: Browser, site: WebSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    page.until(lambda: page.text("#version"), "no version shows")
    own = page.text("#version")
    assert page.run("return document.querySelector('#upgrade').hidden")
    monkeypatch.setattr(kvbm.catalog.edge.server, "_own_version", lambda: "9.8.7")
    site.restart()
    page.reads(f"This page is of {own}, the catalog of 9.8.7: reload.", "#upgrade")
    page.go("tenants")
    page.run("window.isOld = true; arguments[0].click()", page.find("#upgrade button"))
    page.until(lambda: page.run("return !window.isOld"), "it has not loaded anew")
    page.reads("acme")  # where it was
    page.until(lambda: page.text("#version") == "9.8.7", "it is of the old version")
    assert page.run("return document.querySelector('#upgrade').hidden")
    page.said()  # the catalog was away


def test_a_degraded_catalog_is_not_called_live_and_its_reasons_take_a_line(page: Browser, site: WebSite) -> None:
    """Last in this file: the stream does not come back."""
    site.server.stop()
    page.reads("degraded", "#link")
    page.reads("Degraded:", "#banner")
    line = page.find("#banner span")
    assert len(line.text) < 160 and line.size["height"] < 25, line.text
    page.find("#banner summary").click()
    parts = page.run("return [...document.querySelectorAll('#banner li')].map((one) => one.innerText)")
    assert len(parts) == len(set(parts)) and parts
    page.until(lambda: page.find("#banner li").is_displayed(), "the rest does not open")
    page.shot(Path("build/web/degraded.png"))
