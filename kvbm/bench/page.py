"""`kvbm bench page`: how soon the catalog's page shows its first rows, and how long a step of its slider takes, in real
Chromium; and what the questions behind it take over HTTP.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

import msgspec
import urllib3

from kvbm.bench.browser import chromium
from kvbm.bench.fleet import Fleet, heartbeats, publish
from kvbm.bench.measure import Found, Row, row_of
from kvbm.core.errors import KvbmError
from kvbm.locate.http import CatalogClient
from kvbm.streams.server import EmbeddedServer
from kvbm.workload.processes import start_catalog_process

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

_WAIT_S = 600.0
_GOALS = {
    "first_paint_ms": "≤ 1000",
    "slider_step_ms": "≤ 500",
    "asof_10m_s": "≤ 2",
    "block_life_s": "≤ 0.2",
}  # for 3,000 instances and 10 M residencies


class PageOptions(NamedTuple):
    """What `page` alone needs.

    Attributes:
        instances: how many. events: blocks named in events of the archive; 0: twice the residencies.
    """

    instances: int = 3000
    events: int = 0


def bench_page(samples: int, seed: int, live: int, options: PageOptions) -> Found:
    """See the module."""
    fleet = Fleet(options.instances, live, options.events or 2 * live, seed)
    with tempfile.TemporaryDirectory(prefix="kvbm-bench-") as folder, ExitStack() as opened:
        server = EmbeddedServer.start(Path(folder) / "nats")
        opened.callback(server.stop)
        settings = {"catalog.archive": Path(folder) / "archive", "catalog.history": Path(folder) / "history"}
        catalog, client = start_catalog_process(Path(folder) / "catalog", server.url, settings)
        opened.callback(catalog.stop)
        opened.callback(client.close)
        offsets, block = asyncio.run(publish(server.url, fleet))
        _beat(server.url, offsets, opened)
        _until(lambda: _live(client) == fleet.instances, "not all instances are live and whole")
        until = _until(lambda: _reached(client, offsets), "the history does not reach the end of the archive")
        window = chromium(opened)
        paints = [_first_paint_ms(window, client.url, fleet.instances) for _ in range(samples)]
        steps = _steps_ms(window, max(8, 2 * samples))
        asked = _history(client, until, block, samples)
    worst = max(steps)
    rows = [
        _row("page: first rows shown", "ms", paints, "first_paint_ms"),
        _row("slider: a step, from the question to the screen", "ms", steps, "slider_step_ms"),
        Row(what="… the longest", unit="ms", value=worst),
        *(_row(f"history over HTTP: {what}", "s", times, name) for what, (name, times) in asked.items()),
    ]
    numbers: dict[str, float | None] = {
        "first_paint_ms": statistics.median(paints),
        "slider_step_ms": statistics.median(steps),
        "slider_step_worst_ms": worst,
        **{name: statistics.median(times) for name, times in asked.values()},
    }
    note = (
        f"{fleet.instances:,} instances, {fleet.live:,} residencies and {fleet.events:,} block events over an hour; a "
        "heartbeat a second of each. Catalog, nats-server, heartbeats and Chromium share the machine's processors."
    )
    return Found(rows, numbers, (note,))


def _row(what: str, unit: str, values: list[float], name: str) -> Row:
    row = row_of(what, unit, values)
    row.goal = _GOALS.get(name, "")
    return row


def _beat(url: str, offsets: list[int], opened: ExitStack) -> None:
    command, words = heartbeats(url, offsets)
    process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)

    def stop() -> None:
        process.kill()
        process.wait()

    opened.callback(stop)
    assert process.stdin is not None
    process.stdin.write(words)
    process.stdin.flush()


def _until(look: Callable[[], Any], what: str) -> Any:
    end_s = time.monotonic() + _WAIT_S
    while not (found := look()):
        if time.monotonic() > end_s:
            raise TimeoutError(f"{what} after {_WAIT_S:g} s")
        time.sleep(0.2)
    return found


def _ask(client: CatalogClient, path: str) -> Any:
    answer = urllib3.request("GET", client.url + path, retries=False, timeout=60.0)
    if answer.status != 200:
        raise KvbmError(f"{path}: the catalog answered {answer.status}: {answer.data[:300].decode(errors='replace')}")
    return msgspec.json.decode(answer.data)


def _live(client: CatalogClient) -> int:
    told = _ask(client, "/v1/overview")
    return int(told["states"].get("live", 0)) - int(told["suspect"])


def _reached(client: CatalogClient, offsets: list[int]) -> str:
    """The end of the history, once nothing of the archive is left to read."""
    try:
        told = _ask(client, "/v1/history")
    except KvbmError:
        return ""
    is_whole = told["ready"] and not told["lags"] and told["epochs"] >= len(offsets)
    return str(told["until"]) if is_whole else ""


def _first_paint_ms(window: Chrome, url: str, instances: int) -> float:
    """From asking for the page, with nothing cached, to the frame that shows rows of all instances."""
    window.execute_cdp_cmd("Network.clearBrowserCache", {})
    window.get(f"{url}/ui/")
    shown = f"{instances:,} instances"
    _until(
        lambda: window.execute_script(
            "return document.documentElement.dataset.ready && document.querySelector('main').innerText.includes("
            "arguments[0]) && performance.getEntriesByName('kvbm:first-rows').length",
            shown,
        ),
        f"the page does not say {shown!r}",
    )
    return float(window.execute_script("return performance.getEntriesByName('kvbm:first-rows')[0].startTime"))


def _steps_ms(window: Chrome, steps: int) -> list[float]:
    """Moments all over the history, one after the other, in no order."""
    _until(lambda: window.execute_script("return document.querySelector('#time input')"), "there is no slider")
    found = []
    for step in range(steps):
        part = (step * 0.6180339887) % 1.0
        asked = window.execute_script(
            "const i = document.querySelector('#time input'); const v = Math.round((Number(i.min) + arguments[0] * "
            "(Number(i.max) - Number(i.min))) / 1000) * 1000; i.value = v; i.dispatchEvent(new Event('input')); "
            "return document.documentElement.dataset.asked",
            part,
        )
        _until(partial(_is_shown, window, asked), "the slider's step is not shown")
        found.append(float(window.execute_script("return document.documentElement.dataset.stepMs")))
    return found[1:]


def _is_shown(window: Chrome, moment: str) -> bool:
    return bool(window.execute_script("return document.documentElement.dataset.shown") == moment)


def _history(client: CatalogClient, until: str, block: bytes, samples: int) -> dict[str, tuple[str, list[float]]]:
    end = datetime.fromisoformat(until)
    half, five = (quote((end - timedelta(minutes=one)).isoformat()) for one in (30, 5))
    paths = {
        "the cluster half an hour ago": ("asof_10m_s", f"/v1/history/overview?at={half}"),
        "a block's life": ("block_life_s", f"/v1/history/block/{block.hex()}"),
        "what changed in five minutes": ("changes_5min_s", f"/v1/history/changes?from={five}"),
    }
    found: dict[str, tuple[str, list[float]]] = {}
    for what, (name, path) in paths.items():
        times = []
        for _ in range(samples + 1):
            begin_s = time.perf_counter()
            _ask(client, path)
            times.append(time.perf_counter() - begin_s)
        found[what] = name, times[1:]
    return found
