"""The page behind a path of a reverse proxy, hidden, and before a history that does not answer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime

import pytest

from tests.browser import Browser
from tests.eventually import eventually
from tests.page_proxy import PageProxy
from tests.web_past import Past, move, past
from tests.web_site import SPACE, WebSite, hashes_of

__all__ = ["past"]
BELOW = "/tools/kvbm"
FEED = "/v1/overview/feed"


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_all_views_work_below_a_path_and_ask_for_nothing_beside_it(
    site: WebSite, window: Browser, opened: ExitStack
) -> None:
    proxy = PageProxy(site.url, opened, BELOW)
    window.forget()
    opened.callback(window.open, "about:blank")
    window.open(proxy.url + "/")
    assert window.driver.current_url.startswith(f"{proxy.url}/ui/")
    window.reads("live", "#link")
    window.reads("3 instances")
    window.click_row("Instances", "gpu-b")
    window.reads("zone-a / rack-2 / gpu-b")
    window.go(f"block?hash={hashes_of(1, 1).hex()}&ns={SPACE.id.hex()}")
    window.reads("Who holds the block")
    window.go("tenants")
    window.until(lambda: "acme" in [row[0] for row in window.rows("Tenants")], "tenants do not show")
    window.go("routes")
    window.choose(SPACE.id.hex())
    window.fill("textarea", "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16")
    window.find("form button.primary").click()
    window.reads("costs")
    site.engines["gpu-a"].compute(910, 5)
    window.go("overview")
    window.until(lambda: window.rows("Instances")[0][2] == "15.6 %", "what changes does not come through the proxy")
    assert proxy.strays == []
    assert [url for url in window.asked() if not url.startswith((f"{proxy.url}/ui/", f"{proxy.url}/v1/"))] == [
        f"{proxy.url}/"
    ]
    assert window.said() == []


def test_a_page_that_nobody_sees_lets_go_of_its_feed_and_takes_it_up_again(
    site: WebSite, window: Browser, opened: ExitStack
) -> None:
    proxy = PageProxy(site.url, opened)
    proxy.edits["/ui/app.js"] = ("const HIDDEN_MS = 60000;", "const HIDDEN_MS = 500;")
    window.forget()
    window.driver.execute_cdp_cmd("Network.setCacheDisabled", {"cacheDisabled": True})
    opened.callback(window.driver.execute_cdp_cmd, "Network.setCacheDisabled", {"cacheDisabled": False})
    window.open(proxy.url + "/ui/")
    window.reads("3 instances")
    assert proxy.open.count(FEED) == 1
    first = window.driver.current_window_handle
    window.driver.switch_to.new_window("tab")
    try:
        eventually(lambda: proxy.open.count(FEED) == 0, "a page that nobody sees keeps its feed")
        site.engines["gpu-b"].compute(920, 7)
    finally:
        window.driver.close()
        window.driver.switch_to.window(first)
    opened.callback(window.open, "about:blank")
    window.until(lambda: proxy.open.count(FEED) == 1, "the page takes no feed when somebody looks again")
    window.until(lambda: window.rows("Instances")[1][2] == "21.9 %", "what came meanwhile does not show")
    assert window.said() == []


def test_it_says_of_which_moment_it_still_is_while_the_history_does_not_answer(
    past: Past, window: Browser, opened: ExitStack
) -> None:
    proxy = PageProxy(past.site.url, opened)
    window.forget()
    opened.callback(window.open, "about:blank")
    window.open(proxy.url + "/ui/")
    window.find("#time input")
    move(window, past.at(1))
    proxy.refused.add("/v1/history/overview")
    window.run(
        "const i = document.querySelector('#time input'); i.value = arguments[0]; i.dispatchEvent(new Event('input'));",
        past.at(3),
    )
    still = f"{datetime.fromtimestamp(past.at(1) / 1000, UTC):%Y-%m-%d %H:%M:%S}"
    window.reads(f"still of {still} UTC", "#banner")
    assert {row[0] for row in window.rows("Instances")} == {"one"}  # as it was then: the other had not begun
    proxy.refused.clear()
    move(window, past.at(4))
    window.until(
        lambda: window.run("return document.getElementById('banner').hidden"),
        "the banner stays though the history answers again",
    )
    assert {row[0] for row in window.rows("Instances")} == {"one", "two"}
    proxy.refused.add("/v1/history/overview")
    window.press("l")
    window.until(lambda: window.text("#time .at") == "Now", "it is not of now")
    window.run(
        "const i = document.querySelector('#time input'); i.value = arguments[0]; i.dispatchEvent(new Event('input'));",
        past.at(3),
    )
    window.reads("still of now", "#banner")
