"""The second part of `kvbm bench catalog`: ten thousand instances that share a prefix, each with a heartbeat a second.

The catalog, the instances' heartbeats and whoever asks are a process each. Frames and heartbeats come over an embedded
nats-server.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import numpy as np

from kvbm.assembly import NATIVE_LEDGER
from kvbm.bench.asking import Asker, post
from kvbm.bench.measure import Found, Row, percentile, processor_s, resident_mib, row_of
from kvbm.core.answers import LookupRequest, RouteRequest
from kvbm.core.events import PoolStated
from kvbm.core.ids import HASH_BYTES, NO_PARENT, Epoch, InstanceId, Namespace, Offset, Tier
from kvbm.locate.http import CatalogClient
from kvbm.streams.base import Heartbeat
from kvbm.streams.child import python
from kvbm.streams.nats.stream import NatsStream
from kvbm.streams.server import EmbeddedServer
from kvbm.workload.processes import Child, start_catalog_process

INSTANCES = 10_000
SHARED_BLOCKS = 256
OWN_BLOCKS = 16
_CLUSTER = "local"
_NAMESPACE = Namespace(model="bench", revision="r1", block_tokens=16)
_AT_ONCE = 100  # frames on their way to the stream
_TICKS_PER_S = 100
_ASKED = 500  # questions of each sample
_QUIET_S = 3.0  # of each sample without questions
_WAIT_S = 180.0
_SEND = (
    "import sys; from kvbm.bench.catalog_many import send_heartbeats; send_heartbeats(sys.argv[1], "
    "int(sys.argv[2]), int(sys.argv[3]))"
)


def bench_many(samples: int, seed: int, instances: int = INSTANCES) -> Found:
    """What a question costs among so many, and what hearing them costs."""
    with tempfile.TemporaryDirectory(prefix="kvbm-bench-") as folder, ExitStack() as opened:
        server = EmbeddedServer.start(Path(folder) / "nats")
        opened.callback(server.stop)
        catalog, client = start_catalog_process(Path(folder) / "catalog", server.url)
        opened.callback(catalog.stop)
        opened.callback(client.close)
        shared = np.random.default_rng(seed).bytes(SHARED_BLOCKS * HASH_BYTES)
        published = asyncio.run(_publish(server.url, shared, seed, instances))
        command = python("-c", _SEND, server.url, str(instances), str(published))
        hearts = Child("heartbeats", command, Path(folder) / "logs")
        opened.callback(hearts.stop)
        _wait_until_all_live(client, instances)
        pid = catalog.process.pid
        shares = [_share_of_a_core(pid, _QUIET_S) for _ in range(samples)]
        rows, numbers = _ask(client.url, shared, samples)
        rss_mib = resident_mib(pid)
    residencies = instances * (SHARED_BLOCKS + OWN_BLOCKS)
    beside = rss_mib - residencies * 31 / (1 << 20)
    rows += [
        row_of(f"catalog, {instances:,} heartbeats a second", "of a core", shares),
        Row(what="its memory", unit="MiB", value=rss_mib),
        Row(what="… beside 31 B a residency", unit="MiB", value=beside),
    ]
    numbers |= {"heartbeat_core_share": rows[-3].value, "rss_10k_mib": rss_mib}
    note = (
        f"{instances:,} instances hold one prefix of {SHARED_BLOCKS} blocks, and {OWN_BLOCKS} blocks each; all send a "
        "heartbeat a second while they"
        " are asked about. Catalog, nats-server, heartbeats and asker share the machine's processors."
    )
    return Found(rows, dict(numbers), (note,))


def send_heartbeats(url: str, instances: int, published: int) -> None:
    """One a second of each instance, for ever."""

    async def run() -> None:
        stream = await NatsStream.connect(url, 5.0)
        began_s, sent, each = time.monotonic(), 0, max(1, instances // _TICKS_PER_S)
        while True:
            for _ in range(each):
                pulse = Heartbeat(
                    instance=_name(sent % instances),
                    cluster=_CLUSTER,
                    epoch=Epoch(1),
                    published=Offset(published),
                    applied=Offset(published),
                    wall_time_ns=time.time_ns(),
                    run="bench",
                    namespaces=(_NAMESPACE.id,),
                    queued_tokens=sent * 7919 % 5000,
                )
                await stream.send_pulse(pulse)
                sent += 1
            await asyncio.sleep(max(0.0, began_s + sent / instances - time.monotonic()))

    asyncio.run(run())


def _name(number: int) -> InstanceId:
    return InstanceId(f"instance-{number:05}")


async def _publish(url: str, shared: bytes, seed: int, instances: int) -> int:
    """What each has created, on the stream. Returns the offset of each of them."""
    rng = np.random.default_rng(seed + 1)
    stream = await NatsStream.connect(url, 5.0)
    offset = 0
    try:
        for first in range(0, instances, _AT_ONCE):
            sends = []
            for number in range(first, min(first + _AT_ONCE, instances)):
                ledger = NATIVE_LEDGER([PoolStated(Tier.HBM, 1024, 1 << 20)], "lru", 1 << 20, ())
                ledger.start(Epoch(1), [_NAMESPACE])
                for run in (shared, rng.bytes(OWN_BLOCKS * HASH_BYTES)):
                    allocation = ledger.allocate(Tier.HBM, len(run) // HASH_BYTES)
                    assert allocation is not None
                    ledger.create(_NAMESPACE.id, Tier.HBM, NO_PARENT, 0, run, allocation.slots)
                name = _name(number)
                data = b"".join(frame.data for frame in ledger.take_frames(name, time.time_ns()))
                offset = int(ledger.applied)
                sends.append(stream.publish(_CLUSTER, name, data))
            await asyncio.gather(*sends)
    finally:
        await stream.close()
    return offset


def _ask(url: str, shared: bytes, samples: int) -> tuple[list[Row], dict[str, float]]:
    address = urlsplit(url)
    where, name, tokens = (address.hostname or "", address.port or 0), _NAMESPACE.id.hex(), SHARED_BLOCKS * 16
    lookup = LookupRequest(namespace=name, hashes=shared.hex())
    route = RouteRequest(namespace=name, hashes=shared.hex(), input_tokens=tokens)
    rows: list[Row] = []
    numbers: dict[str, float] = {}
    longest = 0
    for what, path, asked in (("lookup", "/v1/lookup", lookup), ("route", "/v1/route", route)):
        body = [post(path, msgspec.json.encode(asked))]
        with Asker(where, 1) as alone:
            alone.ask(body, _ASKED // 5)
            times_ms = [time_s * 1e3 for time_s in alone.ask(body, _ASKED * samples)]
            longest = max(longest, alone.longest)
        p50, p99 = percentile(times_ms, 0.5), percentile(times_ms, 0.99)
        rows += [
            Row(what=f"HTTP {what} of the prefix all have, one client: p50", unit="ms", value=p50),
            Row(what="… p99", unit="ms", value=p99),
        ]
        numbers |= {f"many_{what}_ms_p50": p50, f"many_{what}_ms_p99": p99}
    rows.append(Row(what="the longest answer", unit="B", value=longest))
    return rows, numbers | {"many_answer_bytes": float(longest)}


def _wait_until_all_live(client: CatalogClient, instances: int) -> None:
    deadline_s = time.monotonic() + _WAIT_S
    while True:
        live = sum(one.state == "live" and not one.suspect for one in client.instances())
        if live == instances:
            return
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"of {instances} instances {live} are live and whole after {_WAIT_S:g} s")
        time.sleep(1.0)


def _share_of_a_core(pid: int, seconds: float) -> float:
    """Processor time of a process, all its threads, while that time passes."""
    began_s, before_s = time.monotonic(), processor_s(pid)
    time.sleep(seconds)
    return (processor_s(pid) - before_s) / (time.monotonic() - began_s)
