"""A catalog with a history of ten minutes, which the page's slider goes over."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import pytest
import urllib3

from kvbm.assembly.history import history_options
from kvbm.config import load_settings
from kvbm.core.events import PoolStated
from kvbm.core.ids import Epoch, Tier
from kvbm.reference.ledger import Ledger
from kvbm.streams.nats.stream import NatsStream
from tests.browser import Browser
from tests.catalog_site import HASHES, Instance
from tests.catalog_site import OTHER as ACME
from tests.catalog_site import SPACE as PLAIN
from tests.eventually import WAIT_S, eventually
from tests.web_site import CLUSTER, WebSite

STEP_S = 60
BLOCK = HASHES[:16].hex()


class Past(NamedTuple):
    """A catalog with a history of ten minutes; `at(n)`: half a minute after its step n, as the slider has it."""

    site: WebSite
    begin_s: int

    def at(self, step: float) -> int:
        return int((self.begin_s + step * STEP_S + STEP_S / 2) * 1000)


def told(instance: Instance, at_s: float, lose: bool = False) -> None:
    """Publish what it has decided since, as of a moment."""
    frames = [frame.data for frame in instance.ledger.take_frames(instance.name, int(at_s * 1e9))]

    async def send(stream: NatsStream) -> None:
        for data in frames:
            await stream.publish(CLUSTER, instance.name, data)

    if not lose:
        instance.run(send)


@pytest.fixture(scope="module")
def past(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Past]:
    folder = tmp_path_factory.mktemp("past")
    flags = {"catalog.archive": str(folder / "archive"), "catalog.history": str(folder / "history")}
    loaded = load_settings(flags=flags)
    with ExitStack() as opened:
        more = {"archive": loaded.catalog.archive, "history": history_options(loaded), "liveness_s": 10 * WAIT_S}
        site = WebSite(folder / "site", opened, **more)
        begin_s = int(time.time()) - 10 * STEP_S
        steps = iter(range(begin_s, begin_s + 10 * STEP_S, STEP_S))
        one, two = Instance(site.server.url, CLUSTER, "one"), Instance(site.server.url, CLUSTER, "two")
        one.ledger = Ledger([PoolStated(Tier.HBM, 16, 1 << 20), PoolStated(Tier.HOST, 32, 1 << 20)])
        one.ledger.start(Epoch(1), [PLAIN, ACME], ["zone-a", "rack-1"], "vllm", "0.32")
        told(one, next(steps))  # 0
        one.create(0, 4)
        told(one, next(steps))  # 1
        one.copy(Tier.HOST, 0, 2)
        told(one, next(steps))  # 2
        told(two, next(steps))  # 3: another begins
        two.create(0, 6)
        told(two, next(steps), lose=True)  # 4: nobody gets it
        two.copy(Tier.HOST, 0, 6)
        two.copy(Tier.OBJECT, 0, 3)
        told(two, next(steps))  # 5: so a hole shows
        one.create(4, 8)
        told(one, next(steps))  # 6
        one.beat()
        two.beat()

        def is_kept() -> bool:
            answer = urllib3.request("GET", site.url + "/v1/history", timeout=WAIT_S).json()
            end = datetime.fromtimestamp(begin_s + 6 * STEP_S, UTC).isoformat()[:19]
            return bool(answer.get("ready") and answer["until"] >= end)  # refused while it starts

        eventually(is_kept, "the history does not reach the last event")
        yield Past(site, begin_s)


@pytest.fixture
def slider(window: Browser, past: Past, request: pytest.FixtureRequest) -> Iterator[Browser]:
    """The page with its slider, live."""
    window.forget()
    window.open(past.site.url + "/")
    window.find("#time input")
    yield window
    window.shot(Path("build/web") / f"{request.node.name}.png")
    said = window.said()
    assert said == [], said


def move(window: Browser, at_ms: int) -> None:
    """The slider to a moment, and wait until that is on the screen."""
    asked = window.run(
        "const i = document.querySelector('#time input'); i.value = arguments[0]; i.dispatchEvent(new Event('input')); "
        "return document.documentElement.dataset.asked",
        at_ms,
    )
    window.until(lambda: window.run("return document.documentElement.dataset.shown") == asked, "it is not shown")


def held(window: Browser) -> dict[str, str]:
    return {row[0]: row[5] for row in window.rows("Instances")}
