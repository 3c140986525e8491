"""What tenants have saved, on the page: of the 24 clock hours before now or before an earlier moment, and to whom."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import NamedTuple

import pytest
import urllib3

import kvbm.catalog.access.callers
from kvbm.assembly.history import history_options
from kvbm.catalog.access.callers import AccessOptions
from kvbm.catalog.access.file import NewToken, add_token
from kvbm.config import load_settings
from kvbm.core.ids import Tier
from kvbm.core.usage import HOUR_MS, begin_of_hour, time_text
from kvbm.streams.nats.stream import NatsStream
from tests.browser import Browser
from tests.eventually import WAIT_S, eventually
from tests.nats_fixture import patient
from tests.usage_instances import INSTANCE, SPACES, Clock, driven
from tests.web_callers import begin, enter
from tests.web_site import CLUSTER, WebSite

ACME, NOBODY = SPACES[0], SPACES[1]
RATE = 16.0  # tokens a second: a block takes one
HOURS = 30


class Saved(NamedTuple):
    """A catalog with a history of thirty hours, its tokens, and where its last clock hour ends."""

    site: WebSite
    tokens: dict[str, str]
    end_ms: int


def publish_hours(server: str, end_ms: int) -> None:
    """In its first hour acme saves 4 blocks; in the third from the end 2, and who has no name 5 that are not rated."""
    clock = Clock()
    clock.ms = end_ms - HOURS * HOUR_MS
    one = driven(clock=clock)
    one.take()
    for hour in range(HOURS):
        if hour in (0, HOURS - 3):
            one.account.prefill_tokens_per_s = RATE
            one.account.read_locked(ACME.id, {Tier.HOST: 2 if hour else 4})
        if hour == HOURS - 3:
            one.account.prefill_tokens_per_s = 0.0
            one.account.read_locked(NOBODY.id, {Tier.HBM: 5})
        clock.ms += HOUR_MS
        one.take()

    async def send() -> None:
        stream = patient(await NatsStream.connect(server, WAIT_S))
        try:
            for frame in one.frames:
                await stream.publish(CLUSTER, INSTANCE, frame.data)
        finally:
            await stream.close()

    asyncio.run(send())


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Saved]:
    folder = tmp_path_factory.mktemp("saved")
    access = folder / "access.toml"
    tokens = {
        "ops": add_token(access, NewToken("ops", "operator"), time.time()),
        "acme": add_token(access, NewToken("acme", "router", ["acme"]), time.time()),
    }
    loaded = load_settings(
        flags={"catalog.archive": str(folder / "archive"), "catalog.history": str(folder / "history")}
    )
    with ExitStack() as opened, pytest.MonkeyPatch.context() as patched:
        patched.setattr(kvbm.catalog.access.callers, "LOOK_S", 0.0)
        more = {"archive": loaded.catalog.archive, "history": history_options(loaded), "liveness_s": 10 * WAIT_S}
        site = WebSite(folder / "site", opened, access=AccessOptions(file=str(access)), **more)
        end_ms = begin_of_hour(time.time_ns() // 1_000_000)
        publish_hours(site.server.url, end_ms)
        until = time_text(end_ms)[:16]

        def is_kept() -> bool:
            headers = {"authorization": f"Bearer {tokens['ops']}"}
            told = urllib3.request("GET", site.url + "/v1/history", headers=headers, timeout=WAIT_S).json()
            return bool(told["ready"] and told["until"] >= until)

        eventually(is_kept, "the history does not reach the last event")
        yield Saved(site, tokens, end_ms)


def saved_of(window: Browser) -> dict[str, tuple[str, str]]:
    return {row[0]: (row[10], row[11]) for row in window.rows("Tenants")}


def test_an_operator_sees_what_each_tenant_has_saved_now_and_then(window: Browser, saved: Saved) -> None:
    begin(window, saved.site)
    enter(window, saved.tokens["ops"])
    window.find("#time input")
    window.go("tenants")
    expected = {"acme": ("32", "2.00 s"), "(no tenant)": ("80", "0 s")}
    window.until(lambda: saved_of(window).items() >= expected.items(), "other numbers of now")
    hours = f"{time_text(saved.end_ms - 24 * HOUR_MS)} to {time_text(saved.end_ms)}".replace("T", " ").replace("Z", "")
    window.reads(f"Saved tokens and GPU time are of {hours} UTC")
    window.reads("80 of 112 saved tokens came while no prefill rate was known: they count no GPU time.")
    titles = window.run("return [...document.querySelectorAll('[role=gridcell]')].map((one) => one.title)")
    assert "80 of 80 saved tokens came while no prefill rate was known: they count no GPU time" in titles

    window.run(
        "const i = document.querySelector('#time input'); i.value = arguments[0]; i.dispatchEvent(new Event('input'))",
        saved.end_ms - (HOURS - 2) * HOUR_MS + 1800_000,
    )
    window.until(lambda: saved_of(window) == {"acme": ("64", "4.00 s")}, "other numbers of an earlier moment")
    assert "no prefill rate" not in window.text()
    window.press("l")
    window.until(lambda: saved_of(window).items() >= expected.items(), "the earlier moment's numbers stay")


def test_a_tenants_token_sees_what_it_has_saved_alone(window: Browser, saved: Saved) -> None:
    begin(window, saved.site)
    enter(window, saved.tokens["acme"])
    window.go("tenants")
    window.until(lambda: saved_of(window) == {"acme": ("32", "2.00 s")}, "other tenants show, or not its own")
    assert "no prefill rate" not in window.text()
