"""`kvbm bench stream`: the whole line between instances and the catalog, each a process of its own over an embedded
nats-server.

visible     a run created in an instance → in the catalog's answer over HTTP, while others make it 1,000 frames a second
silent      an instance killed with -9 → left out of answers, with default and with quick heartbeats
restart     the catalog killed with -9 while its index holds `live` residencies and events go on → ready again
gap         a message that never arrives → its instance, with a million residencies, whole again by a snapshot
"""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np

from kvbm.assembly import NATIVE, NATIVE_INDEX, open_manager
from kvbm.bench.instance import BLOCK_BYTES, NAMESPACE, RUN_BLOCKS, create_run, fill
from kvbm.bench.measure import Row, percentile, row_of, until
from kvbm.catalog.service import CatalogService, ServiceSettings
from kvbm.config import load_settings
from kvbm.core.answers import PositionWanted
from kvbm.core.ids import HASH_BYTES, InstanceId
from kvbm.core.parts import ALL_PARTS
from kvbm.locate.http import CatalogClient
from kvbm.streams.base import EventReader, EventStream, StreamMessage, subject_names
from kvbm.streams.child import python
from kvbm.streams.nats.stream import NatsStream
from kvbm.streams.server import EmbeddedServer
from kvbm.workload.processes import Child, start_catalog, start_catalog_process

_WAIT_S = 60.0
_FILL_WAIT_S = 600.0
_LOADS = 4
_FRAMES_PER_S = 1000.0
_VISIBLE = 100  # runs timed for each sample asked for
_HOLDERS = 10
_GAP_BLOCKS = 1_000_000
LEAST_S = 2.0  # between two snapshots that readers ask for; the default is 10 s
_Part: TypeAlias = Callable[[Path, str, ExitStack, int, int, int], tuple[list[Row], dict[str, float]]]


def bench_stream(live: int, samples: int, seed: int) -> tuple[list[Row], dict[str, float]]:
    """All four; each with servers of its own."""
    rows: list[Row] = []
    numbers: dict[str, float] = {}
    for part in (_visible, _silent, _restart, _gap):
        found, named = _with_servers(part, live, samples, seed)
        rows += found
        numbers |= named
    return rows, numbers


def bench_visible(samples: int, seed: int) -> tuple[list[Row], dict[str, float]]:
    """The first alone."""
    return _with_servers(_visible, 0, samples, seed)


def _with_servers(part: _Part, live: int, samples: int, seed: int) -> tuple[list[Row], dict[str, float]]:
    with tempfile.TemporaryDirectory(prefix="kvbm-bench-") as folder, ExitStack() as opened:
        server = EmbeddedServer.start(Path(folder) / "nats")
        opened.callback(server.stop)
        return part(Path(folder), server.url, opened, live, samples, seed)


def _visible(
    folder: Path, url: str, opened: ExitStack, live: int, samples: int, seed: int
) -> tuple[list[Row], dict[str, float]]:
    client = start_catalog(folder / "catalog", url, opened)
    for number in range(_LOADS):
        _start_instance(folder, url, f"load-{number}", 65_536, _FRAMES_PER_S / _LOADS, opened)
    rng = np.random.default_rng(seed)
    flags = _flags(folder, url, "probe", 65_536)
    lags_ms: list[float] = []
    with open_manager(load_settings(flags=flags), [NAMESPACE], BLOCK_BYTES, engine="bench") as manager:
        fill(manager, 1024, rng)
        for _ in range(samples * _VISIBLE):
            hashes = rng.bytes(RUN_BLOCKS * HASH_BYTES)
            began_s = time.perf_counter()
            create_run(manager, hashes)
            wanted = PositionWanted(instance="probe", epoch=manager.epoch, offset=manager.applied())
            answer = client.lookup(NAMESPACE, hashes, [wanted], wait_s=5.0)
            lags_ms.append((time.perf_counter() - began_s) * 1e3)
            assert answer.instances[0].depth == RUN_BLOCKS
            time.sleep(0.005)
    what = f"create → in the catalog's answer over HTTP, {_FRAMES_PER_S:,.0f} frames/s from {_LOADS} others"
    p50, p99 = statistics.median(lags_ms), percentile(lags_ms, 0.99)
    rows = [Row(what=f"{what}: p50", unit="ms", value=p50), Row(what="… p99", unit="ms", value=p99)]
    return rows, {"visible_ms_p50": p50, "visible_ms_p99": p99}


def _silent(
    folder: Path, url: str, opened: ExitStack, live: int, samples: int, seed: int
) -> tuple[list[Row], dict[str, float]]:
    rows: list[Row] = []
    numbers: dict[str, float] = {}
    for name, heartbeat_s, liveness_s in (("default", 1.0, 3.5), ("quick", 0.2, 0.8)):
        taken: list[float] = []
        with ExitStack() as parts:
            client = start_catalog(folder / name, url, parts, {"catalog.liveness_s": liveness_s})
            for number in range(3):  # others that live: were all silent, the view would be kept
                _start_instance(folder, url, f"{name}-witness-{number}", 1024, 1.0, parts, heartbeat_s)
            for number in range(max(3, samples // 2)):
                instance = f"{name}-{number}"
                child = _start_instance(folder, url, instance, 1024, 10.0, parts, heartbeat_s)
                _until_state(client, instance, "live")
                began_s = time.perf_counter()
                child.kill()
                _until_state(client, instance, "silent")
                taken.append(time.perf_counter() - began_s)
        what = (
            f"killed instance → left out of answers, heartbeats every {heartbeat_s:g} s, silent after {liveness_s:g} s"
        )
        rows.append(row_of(what, "s", taken))
        rows.append(Row(what="… longest", unit="s", value=max(taken)))
        numbers[f"excluded_s_{name}"] = max(taken)
    return rows, numbers


def _restart(
    folder: Path, url: str, opened: ExitStack, live: int, samples: int, seed: int
) -> tuple[list[Row], dict[str, float]]:
    settings = {"catalog.checkpoint_every_s": 5.0}
    child, client = start_catalog_process(folder / "catalog", url, settings)
    opened.callback(child.stop)
    client.wait_ready(_WAIT_S)
    for number in range(_HOLDERS):
        _start_instance(folder, url, f"holder-{number}", live // _HOLDERS, 20.0, opened)
    until(lambda: _held(client) >= live, "the catalog has not read what was published", _WAIT_S, 0.01)
    time.sleep(3 * 5.0)  # so that a checkpoint of all of it exists
    held = _held(client)
    child.kill()
    client.close()
    time.sleep(2.0)
    began_s = time.perf_counter()
    again, client = start_catalog_process(folder / "catalog", url, settings)
    opened.callback(again.stop)
    opened.callback(client.close)
    client.wait_ready(_FILL_WAIT_S)
    ready_s = time.perf_counter() - began_s
    found = client.instances()
    assert not any(instance.suspect for instance in found), "an instance is suspect after the restart"
    assert _held(client) >= held
    what = f"catalog killed with -9 at {held:,} residencies, events going on → ready again, process start included"
    return [Row(what=what, unit="s", value=ready_s)], {"restart_ready_s": ready_s}


def _gap(
    folder: Path, url: str, opened: ExitStack, live: int, samples: int, seed: int
) -> tuple[list[Row], dict[str, float]]:
    _start_instance(folder, url, "holder", _GAP_BLOCKS, 50.0, opened)
    _start_instance(folder, url, "other", 65_536, 50.0, opened)
    return asyncio.run(_repair(folder, url, samples))


async def _repair(folder: Path, url: str, samples: int) -> tuple[list[Row], dict[str, float]]:
    """Drop one message of "holder" again and again; how long it is suspect."""
    lossy = _LossyStream(await NatsStream.connect(url, _WAIT_S))
    settings = ServiceSettings(nats_url=url, database_url=folder / "gap.db", cluster="local", capacity=1 << 24)
    service = await CatalogService.start(settings, NATIVE, NATIVE_INDEX, stream=cast(EventStream, lossy))
    holder, other = InstanceId("holder"), InstanceId("other")

    def is_suspect(instance: InstanceId) -> bool:
        return any(found.suspect for found in service.queries.instances() if found.instance == instance)

    repaired: list[float] = []
    healed: list[float] = []
    asked_us: list[float] = []
    try:
        await _settled(lambda: service.is_ready and not is_suspect(holder) and not is_suspect(other))
        for _ in range(max(3, samples // 2)):
            await asyncio.sleep(LEAST_S + 0.5)  # the instance serves one snapshot in this time
            gaps = service.sequencer.counters.gaps
            lossy.drop = holder
            await _settled(lambda: is_suspect(holder))
            began_s, known_s = time.perf_counter(), 0.0
            while is_suspect(holder):
                if not known_s and service.sequencer.counters.gaps > gaps:
                    known_s = time.perf_counter()
                asked_s = time.perf_counter()
                assert not is_suspect(other)
                service.queries.lookup(NAMESPACE.id, bytes(HASH_BYTES))
                asked_us.append((time.perf_counter() - asked_s) * 1e6)
                await asyncio.sleep(0.002)
                assert time.perf_counter() - began_s < _WAIT_S, "the gap was not repaired"
            healed.append(time.perf_counter() - began_s)
            repaired.append(time.perf_counter() - known_s)
    finally:
        await service.close()
    what = f"gap known → whole again by a snapshot it was asked for, {_GAP_BLOCKS:,} residencies"
    rows = [
        row_of(what, "s", repaired),
        Row(what="… longest", unit="s", value=max(repaired)),
        row_of("… from the first event behind the hole on: it may still be filled for about 2 s", "s", healed),
        Row(what="… lookup meanwhile, in process: p99", unit="µs", value=percentile(asked_us, 0.99)),
    ]
    return rows, {"gap_repaired_s": statistics.median(repaired)}


class _LossyStream:
    """A stream that loses the next message of one instance."""

    def __init__(self, stream: NatsStream) -> None:
        self._stream = stream
        self.drop: InstanceId | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    async def pull(
        self,
        after_sequence: int = 0,
        cluster: str | None = None,
        timeout_s: float = 5.0,
        fingerprint: int | None = None,
        parts: tuple[int, ...] = ALL_PARTS,
    ) -> _LossyReader:
        """A reader that leaves that message out."""
        return _LossyReader(self, await self._stream.pull(after_sequence, cluster, timeout_s, fingerprint, parts))


class _LossyReader:
    """An `EventReader` that leaves out what its stream is told to drop."""

    def __init__(self, stream: _LossyStream, reader: EventReader) -> None:
        self._stream, self._reader = stream, reader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)

    async def fetch(self, timeout_s: float) -> list[StreamMessage]:
        """As `EventReader.fetch`, with the hole."""
        messages = await self._reader.fetch(timeout_s)
        for at, message in enumerate(messages):
            if subject_names(message.subject)[1] == self._stream.drop:
                self._stream.drop = None
                return messages[:at] + messages[at + 1 :]
        return messages


# -- instances and waiting ---------------------------------------------------------------------------------------------


def _flags(folder: Path, url: str, instance: str, slots: int, heartbeat_s: float = 1.0) -> dict[str, object]:
    return {
        "instance.id": instance,
        "instance.data_dir": str(folder),
        "nats.url": url,
        "pools.hbm.slots": slots,
        "pools.hbm.device": "memory",
        "nats.heartbeat_s": heartbeat_s,
        "snapshots.least_s": LEAST_S,
    }


def _start_instance(
    folder: Path, url: str, instance: str, blocks: int, rate: float, opened: ExitStack, heartbeat_s: float = 1.0
) -> Child:
    """A process of its own whose pool is full and published. `opened` ends it. Raises ProcessError."""
    flags = json.dumps(_flags(folder, url, instance, blocks, heartbeat_s))
    command = python("-m", "kvbm.bench.instance", flags, str(blocks), str(rate))
    child = Child(instance, command, folder / "logs", spoken=True)
    opened.callback(child.stop)
    assert child.process.stdout is not None
    if not child.process.stdout.readline():
        raise child.failure("did not fill its pool")
    return child


def _until_state(client: CatalogClient, instance: str, state: str) -> None:
    def is_so() -> bool:
        found = client.instance(instance)
        return found is not None and found.state == state

    until(is_so, f"instance {instance} is not {state}", _WAIT_S, 0.01)


def _held(client: CatalogClient) -> int:
    return sum(sum(found.held_blocks.values()) for found in client.instances())


async def _settled(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + _FILL_WAIT_S
    while not is_so():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"what the benchmark waits for has not come within {_FILL_WAIT_S:g} s")
        await asyncio.sleep(0.002)
