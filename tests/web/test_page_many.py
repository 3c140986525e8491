"""Three thousand instances: few of them are elements, and they are sorted, filtered and walked at once."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvbm.bench.fleet import CLUSTER, Fleet, heartbeats, publish
from tests.browser import Browser, Keys
from tests.eventually import eventually
from tests.web_site import WebSite, overview_of

INSTANCES = 3000


@pytest.fixture(scope="module")
def crowd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebSite]:
    with ExitStack() as opened:
        site = WebSite(tmp_path_factory.mktemp("crowd"), opened, cluster=CLUSTER, liveness_s=60.0)
        offsets, _ = asyncio.run(publish(site.server.url, Fleet(INSTANCES, 60_000, 60_000)))
        command, words = heartbeats(site.server.url, offsets)
        beating = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)
        opened.callback(beating.wait)
        opened.callback(beating.kill)
        assert beating.stdin is not None
        beating.stdin.write(words)
        beating.stdin.flush()

        def are_live() -> bool:
            told = overview_of(site.url)
            return bool(told["states"].get("live") == INSTANCES and not told["suspect"])

        eventually(are_live, "not all are live and whole", 180.0)
        yield site


def test_thousands_are_shown_by_few_elements_and_reached_at_once(crowd: WebSite, window: Browser) -> None:
    window.forget()
    window.open(crowd.url + "/")
    window.reads("3,000 instances")
    window.reads("Instances live 3,000 of 3,000: all are heard")
    assert window.run("return document.querySelectorAll('*').length") < 2500
    grid = window.find("[role=grid]")
    assert grid.get_attribute("aria-rowcount") == "3001"
    window.run("arguments[0].focus()", grid)
    window.press(Keys.END)
    window.until(lambda: window.active_row() == "instance-02999", "the last one is not reached")
    assert len(window.rows("Instances")) < 100
    window.press("/", "rack-17 zone-2 -instance-00017")
    window.reads("49 of 3,000 instances")
    window.until(
        lambda: {row[10] for row in window.rows("Instances")} == {"zone-2 / rack-17"},
        "rows are not those of the filter",
    )
    window.press(Keys.ESCAPE)
    window.find("main .chip:nth-of-type(2)").click()
    window.reads("Nothing fits the filter.")
    window.run("const f = document.querySelector('#filter'); f.value = ''; f.dispatchEvent(new Event('input'))")
    head = window.find(".th button[title^='Prompt tokens']")
    head.click()

    def are_sorted() -> bool:
        queued = [int(row[6].replace(",", "")) for row in window.rows("Instances")]
        return queued == sorted(queued, reverse=True) and queued[0] > 4000

    window.until(are_sorted, "the rows are not sorted by what waits")
    window.shot(Path("build/web/many-light.png"))
    window.press("t", "t")
    window.shot(Path("build/web/many-dark.png"))
    window.run("localStorage.clear()")
    assert window.said() == []
