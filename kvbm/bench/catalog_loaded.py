"""The third part of `kvbm bench catalog`: questions while the catalog reads the stream as fast as it can.

The catalog is halted (SIGSTOP) while messages of one frame of 256 block events each are put on the stream; then it goes
on, and reads them alone, or while somebody asks for a thousand lookups a second. In turn, several times. SQL follows,
as ever.
"""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from kvbm.assembly import NATIVE
from kvbm.bench.asking import Asker, post
from kvbm.bench.catalog import CLIENTS, CLUSTER, NAMESPACE, HeldCluster, held, until
from kvbm.bench.ingest import Churn
from kvbm.bench.measure import Found, Row, percentile, row_of
from kvbm.core.answers import LookupRequest
from kvbm.core.ids import InstanceId
from kvbm.locate.http import CatalogClient
from kvbm.streams.nats.stream import NatsStream
from kvbm.streams.server import EmbeddedServer
from kvbm.workload.processes import start_catalog_process

LOOKUPS_PER_S = 1000
MESSAGES = 24_000  # of each reading, where a million residencies are asked about; in proportion where there are fewer
_WRITERS = 4
_RUNS_A_MESSAGE = 8
_AT_ONCE = 200  # messages on their way to the stream
_LOOK_S = 0.02


def bench_loaded(live: int, samples: int, seed: int) -> Found:
    """How long lookups take meanwhile, and what they cost the reading.

    Args:
        live: residencies of the instances that are asked about; those that write come on top.
    """
    with tempfile.TemporaryDirectory(prefix="kvbm-bench-") as folder, ExitStack() as opened:
        server = EmbeddedServer.start(Path(folder) / "nats")
        opened.callback(server.stop)
        catalog, client = start_catalog_process(Path(folder) / "catalog", server.url)
        opened.callback(catalog.stop)
        opened.callback(client.close)
        client.wait_ready(30.0)
        cluster = opened.enter_context(HeldCluster.on(server.url, live, seed))
        until(lambda: held(client) >= cluster.held, "the catalog has not read all that was published")
        messages = min(MESSAGES, live * MESSAGES // 1_000_000)
        reading = _Reading(catalog.process.pid, client, server.url, seed, messages)
        reading.read(())  # the writers' pools are filled
        alone: list[float] = []
        beside: list[float] = []
        times_ms: list[float] = []
        questions = [
            post("/v1/lookup", msgspec.json.encode(LookupRequest(namespace=NAMESPACE.id.hex(), hashes=one.hex())))
            for one in cluster.prompts
        ]
        for _ in range(max(3, samples // 2)):
            alone.append(reading.read(())[0])
            rate, times_s = reading.read(questions)
            beside.append(rate)
            times_ms += [time_s * 1e3 for time_s in times_s]
    rows = [
        row_of("JetStream → index in the service, alone", "M events/s", alone),
        row_of(f"… while {LOOKUPS_PER_S:,} lookups/s are asked", "M events/s", beside),
        Row(what="HTTP lookup meanwhile: p50", unit="ms", value=percentile(times_ms, 0.5)),
        Row(what="… p99", unit="ms", value=percentile(times_ms, 0.99)),
    ]
    loss = 1.0 - rows[1].value / rows[0].value
    rows.append(Row(what="what the reading loses", unit="", value=loss))
    note = (
        f"{messages:,} messages of one frame of 256 block events in a backlog of {_WRITERS} instances, read while "
        f"{cluster.held:,}"
        f" residencies of others are asked about; {len(times_ms):,} lookups, each timed from when it was due. Catalog, "
        "nats-server and asker"
        " share the machine's processors."
    )
    return Found(rows, {"loaded_lookup_ms_p99": rows[3].value, "ingest_loss": loss}, (note,))


class _Reading:
    """A backlog that the catalog reads, again and again."""

    def __init__(self, pid: int, client: CatalogClient, nats_url: str, seed: int, messages: int) -> None:
        self._pid, self._client, self._url, self._messages = pid, client, nats_url, messages
        address = urlsplit(client.url)
        self._address = (address.hostname or "", address.port or 0)
        self._writers = [Churn(f"writer-{number}", seed + number) for number in range(_WRITERS)]

    def read(self, questions: Sequence[bytes]) -> tuple[float, list[float]]:
        """Let a backlog be read, asking meanwhile if there are questions.

        Returns: M block events a second, and how long each lookup took, in seconds.
        """
        backlogs = [(one.name, one.frames(self._messages // _WRITERS * _RUNS_A_MESSAGE)) for one in self._writers]
        blocks = sum(sum(NATIVE.scan_frames(frame.data)[0][0].blocks) for _, frames in backlogs for frame in frames)
        os.kill(self._pid, signal.SIGSTOP)
        try:
            end = asyncio.run(self._publish([(name, frame.data) for name, frames in backlogs for frame in frames]))
        finally:
            began_s = time.perf_counter()
            os.kill(self._pid, signal.SIGCONT)
        read = threading.Event()
        ended_s: list[float] = []

        def look() -> None:
            try:
                until(lambda: (self._client.ready().stream_sequence or 0) >= end, "the backlog is not read", _LOOK_S)
                ended_s.append(time.perf_counter())
            finally:
                read.set()

        looking = threading.Thread(target=look, name="bench-look")
        looking.start()
        times_s: list[float] = []
        if questions:
            with Asker(self._address, CLIENTS) as asker:
                times_s = asker.ask_at(questions, LOOKUPS_PER_S, read.is_set)
        looking.join()
        return blocks / (ended_s[0] - began_s) / 1e6, times_s

    async def _publish(self, messages: Sequence[tuple[str, bytes]]) -> int:
        stream = await NatsStream.connect(self._url, 5.0)
        try:
            for at in range(0, len(messages), _AT_ONCE):
                some = messages[at : at + _AT_ONCE]
                await asyncio.gather(*(stream.publish(CLUSTER, InstanceId(name), data) for name, data in some))
            return (await stream.state(5.0)).last_sequence
        finally:
            await stream.close()
