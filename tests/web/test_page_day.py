"""A browser that is left open for a day: 86,400 answers of the feed, as fast as the page takes them.

What the page keeps at the end is held against what it kept after the first hour.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

from tests.browser import Browser
from tests.eventually import eventually
from tests.page_proxy import PageProxy
from tests.web_site import WebSite, overview_of

DAY, HOUR = 86_400, 3_600
SHOWN_S = 600.0  # that the page may take for a day of answers on a machine that is busy
INSTANCES = 20
TENANTS_EVERY = 10
COMES_EVERY = 60  # answers, from one instance that goes and another that comes to the next
MOST_MORE = 1 << 20  # bytes: each sample of a drawing has some 120, those of a day 10 MB
MOST_MORE_NODES = 400


class Kept(NamedTuple):
    """What a page holds once its garbage is gone."""

    heap: int
    nodes: int
    listeners: int


class Day:
    """Answers of a feed, made of a real one. It waits after the first hour until `go_on` is set."""

    def __init__(self, whole: dict[str, Any]) -> None:
        self._whole = whole
        self.go_on = threading.Event()

    def answers(self) -> Iterator[bytes]:
        """The feed's pieces, as the catalog sends them."""
        names = [f"pod-{number:05}" for number in range(INSTANCES)]
        yield self._event(0, names, base=None)
        for at in range(1, DAY + 1):
            gone: list[str] = []
            if at % COMES_EVERY == 0:
                gone = [names.pop(0)]
                names.append(f"pod-{INSTANCES + at:05}")
            told = [names[at % INSTANCES], names[-1]] if names[at % INSTANCES] != names[-1] else [names[-1]]
            yield self._event(at, told, at - 1, gone)
            while at == HOUR and not self.go_on.wait(1.0):
                yield b": keep-alive\n\n"
        while True:
            threading.Event().wait(1.0)
            yield b": keep-alive\n\n"

    def _event(self, at: int, names: list[str], base: int | None, gone: list[str] | None = None) -> bytes:
        whole, rows = self._whole, self._whole["rows"]
        words = [*rows["words"], f"journal full for {at} s: /data"]
        columns = {
            key: [values[0]] * len(names) for key, values in rows.items() if isinstance(values, list) and key != "words"
        }
        for key in ("blocks", "slots", "block_bytes"):
            columns[key] = [[tier[0] + (at if key == "blocks" else 0)] * len(names) for tier in rows[key]]
        columns |= {"instance": names, "words": words, "trouble": [len(words) - 1] * len(names)}
        answer = whole | {
            "version": at,
            "at_ms": whole["at_ms"] + 1000 * at,
            "catalog": whole["catalog"] | {"version": f"day {at}"},
            "events": whole["events"] | {"events": 1000 * at + at % 7},
            "states": {"live": INSTANCES},
            "rows": columns,
            "gone": gone or [],
        }
        if base is None:
            answer.pop("base", None)
        else:
            answer["base"] = base
        if at % TENANTS_EVERY:
            answer.pop("tenants")
        return f"event: overview\ndata: {json.dumps(answer)}\n\n".encode()


def kept(page: Browser) -> Kept:
    """Collect what is garbage, and look."""
    for _ in range(3):
        page.driver.execute_cdp_cmd("HeapProfiler.collectGarbage", {})
    found = page.driver.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
    numbers = {one["name"]: int(one["value"]) for one in found}
    return Kept(numbers["JSHeapUsedSize"], numbers["Nodes"], numbers["JSEventListeners"])


def test_a_day_of_answers_leaves_the_page_no_larger_than_the_first_hour(site: WebSite, window: Browser) -> None:
    with ExitStack() as opened:
        day = Day(overview_of(site.url))
        opened.callback(day.go_on.set)
        proxy = PageProxy(site.url, opened)
        proxy.streams["/v1/overview/feed"] = day.answers
        window.forget()
        window.driver.execute_cdp_cmd("Performance.enable", {})
        window.open(proxy.url + "/ui/")
        opened.callback(window.open, "about:blank")

        def shows(at: int) -> None:
            eventually(
                lambda: window.text("#version") == f"day {at}",
                f"answer {at} is not shown",
                SHOWN_S,
                state=lambda: window.text("#version"),
            )
            for view, words in (("tenants", "acme"), ("overview", "journal full for")):
                window.go(view)  # each view has drawn what it keeps
                window.reads(words)

        shows(HOUR)
        first = kept(window)
        day.go_on.set()
        shows(DAY)
        window.reads(f"journal full for {DAY} s")
        last = kept(window)
        print(f"after an hour {first}, after a day {last}")
        assert proxy.open.count("/v1/overview/feed") == 1  # all of it came by one feed
        assert last.heap - first.heap <= MOST_MORE, (first, last)
        assert last.nodes - first.nodes <= MOST_MORE_NODES, (first, last)
        assert last.listeners - first.listeners <= MOST_MORE_NODES, (first, last)
        assert window.said() == []
