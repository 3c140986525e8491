"""The slider over a real archive and its history: what was so, at each moment, and what is not known."""

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
from tests.browser import Browser, Keys
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
        told(two, next(steps))  # 5: so a hole shows
        one.create(4, 8)
        told(one, next(steps))  # 6
        one.beat()
        two.beat()

        def is_kept() -> bool:
            answer = urllib3.request("GET", site.url + "/v1/history", timeout=WAIT_S).json()
            end = datetime.fromtimestamp(begin_s + 6 * STEP_S, UTC).isoformat()[:19]
            return bool(answer["ready"] and answer["until"] >= end)

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
    assert window.said() == []


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


def test_the_overview_is_as_it_was_at_each_moment(slider: Browser, past: Past) -> None:
    seen = []
    for step in (0, 1, 2, 3, 6):
        move(slider, past.at(step))
        slider.until(lambda: slider.text("#time .at").startswith("As of"), "the moment is not told")
        seen.append(held(slider))
    assert seen[0] == {"one": "0 B"} and seen[1] == {"one": "4.00 MiB"} and seen[2] == {"one": "6.00 MiB"}
    assert seen[3]["one"] == "6.00 MiB" and set(seen[3]) == {"one", "two"}
    slider.reads("earlier moment", "#link")
    slider.press("l")
    slider.reads("Now", "#time")
    slider.reads("Event lag")


def test_a_hole_is_shown_as_a_hole(slider: Browser, past: Past) -> None:
    slider.until(lambda: slider.all("#time .hole"), "the slider draws no hole")
    move(slider, past.at(4))
    slider.reads("Holes 1 events are missing here")
    slider.reads("1 event missing, since")
    assert {row[0]: row[1] for row in slider.rows("Instances")}["two"] == "suspect"
    move(slider, past.at(1))
    slider.reads("Nothing is missing from the archive at this moment")


def test_an_instance_a_block_and_tenants_are_as_they_were(slider: Browser, past: Past) -> None:
    move(slider, past.at(2))
    slider.go("instance/one")
    slider.reads("Then: epoch 1, running")
    assert [(row[0], row[4]) for row in slider.table_rows("Pools")] == [("HBM", "4"), ("HOST", "2")]
    slider.reads("vllm 0.32")
    slider.go(f"block?hash={BLOCK}")
    slider.reads("Held then:")
    slider.reads("one in HOST since")
    sentences = slider.text(".life")
    times = slider.run("return [...document.querySelectorAll('.life li .mono')].map((one) => one.innerText)")
    assert len(times) > 1 and times == sorted(times, reverse=True)
    slider.reads("The newest first:")
    assert "one HBM" in sentences and "one HOST" in sentences and "offset" in sentences
    slider.go("tenants")
    slider.until(lambda: [row[0] for row in slider.rows("Tenants")] == ["(no tenant)"], "the tenants are others")
    assert slider.rows("Tenants")[0][1:3] == ["4.00 MiB", "2.00 MiB"]
    slider.go("routes")
    slider.reads("earlier moments have none")
    slider.go("instance/two")
    slider.reads("It had not started by then")


def test_of_a_block_that_is_held_now_its_life_says_since_when(slider: Browser) -> None:
    slider.go(f"block?hash={BLOCK}&ns={PLAIN.id.hex()}")
    slider.reads("Who holds the block")
    slider.until(
        lambda: (
            {row[2]: row[7][:2] for row in slider.table_rows("Holders") if row[0] == "one"}
            == {"HBM": "20", "HOST": "20"}
        ),
        "it is not told since when",
    )


def test_a_slider_that_is_dragged_wildly_ends_with_what_it_shows(slider: Browser, past: Past) -> None:
    last = slider.run(
        "const i = document.querySelector('#time input'); const [a, b, end] = arguments; "
        "for (let n = 0; n < 500; n += 1) { i.value = a + ((n * 7919) % 997) / 997 * (b - a); "
        "i.dispatchEvent(new Event('input')); } i.value = end; i.dispatchEvent(new Event('input')); "
        "return document.documentElement.dataset.asked",
        past.at(0),
        past.at(6),
        past.at(1),
    )
    slider.until(lambda: slider.run("return document.documentElement.dataset.shown") == last, "another moment shows")
    assert held(slider) == {"one": "4.00 MiB"}
    asked = [url for url in slider.asked() if "/v1/history/overview" in url]
    assert 1 <= len(asked) < 20  # of five hundred moments
    # Back to now while an answer is under way: it is dropped.
    slider.run("document.querySelector('#time input').focus()")
    slider.press(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, "l")
    slider.reads("Now", "#time")
    slider.reads("Event lag")
    slider.until(lambda: set(held(slider)) == {"one", "two"}, "what was dropped shows")


def test_keys_step_through_time(slider: Browser) -> None:
    slider.press("[")
    slider.reads("As of", "#time")
    first = slider.text("#time .at")
    slider.press("[")
    slider.until(lambda: slider.text("#time .at") < first, "it is no step back")
    slider.press("]")
    slider.until(lambda: slider.text("#time .at") == first, "it is no step on")
    slider.press("s")
    assert slider.focused.get_attribute("type") == "range"
    slider.press(Keys.PAGE_DOWN)
    slider.until(lambda: slider.text("#time .at") < first, "PgDn does not go back")
    slider.press("l")
    slider.reads("Now", "#time")


def test_an_instance_that_was_killed_is_told_to_be_last_heard_then(window: Browser, past: Past) -> None:
    """Last in this file: it adds to the history."""
    site, at_s = past.site, past.begin_s + 7 * STEP_S
    gone, one = Instance(site.server.url, CLUSTER, "gone"), Instance(site.server.url, CLUSTER, "kept")
    for instance, start_s in ((gone, at_s), (one, at_s), (one, at_s + 2 * STEP_S)):
        instance.create(0, 2) if start_s == at_s else instance.create(2, 4)
        told(instance, start_s)
    one.beat()
    end = datetime.fromtimestamp(at_s + 2 * STEP_S, UTC).isoformat()[:19]
    eventually(
        lambda: urllib3.request("GET", site.url + "/v1/history", timeout=WAIT_S).json()["until"] >= end,
        "the history does not reach the last event",
    )
    window.forget()
    window.open(site.url + "/")
    window.find("#time input")

    def states() -> dict[str, str]:
        return {row[0]: row[1] for row in window.rows("Instances")}

    heard = f"last heard {datetime.fromtimestamp(at_s, UTC):%H:%M:%S}"
    move(window, past.at(6.8))
    window.until(lambda: states()["gone"] == "running", "it is not told to run while it was heard")
    move(window, past.at(8.2))
    window.until(lambda: states()["gone"] == heard, "it is not told when it was heard last")
    assert states()["kept"] == states()["one"] == "running"
    window.go("instance/gone")
    window.reads(f"Then: epoch 1, {heard}")
