"""The part of `kvbm bench catalog` that asks a replica: the catalog's view in the process of who asks.

Questions are calls of `CatalogReplica` from Python, one after the other without a pause, as the public method answers
them. First nothing happens meanwhile; then another process puts messages of one frame of 256 block events each on the
stream, a million events a second if the machine can, and the replica's thread applies them in the process that asks.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from multiprocessing.synchronize import Event
from pathlib import Path

from kvbm.assembly import NATIVE, NATIVE_INDEX
from kvbm.bench.catalog import CLUSTER, NAMESPACE, PROMPT_BLOCKS, HeldCluster, until
from kvbm.bench.ingest import Churn
from kvbm.bench.measure import Found, Row, percentile
from kvbm.catalog.replica import CatalogReplica, ReplicaSettings
from kvbm.locate.base import Catalog
from kvbm.streams.nats.credentials import Credentials
from kvbm.streams.nats.read_only import ReadOnlyStream
from kvbm.streams.nats.stream import NatsStream
from kvbm.streams.server import EmbeddedServer

EVENTS_PER_S = 1_000_000
_SECONDS = 4
_RUNS_A_MESSAGE = 8
_EVENTS_A_MESSAGE = 256
_CALLS = 5000
_AT_ONCE = 40  # messages between two looks at the clock
_WAIT_S = 60.0


def bench_replica(live: int, samples: int, seed: int) -> Found:
    """How long calls of a replica take.

    Args:
        live: residencies it holds.
    """
    with tempfile.TemporaryDirectory(prefix="kvbm-bench-") as folder, ExitStack() as opened:
        server = EmbeddedServer.start(Path(folder) / "nats")
        opened.callback(server.stop)
        cluster = opened.enter_context(HeldCluster.on(server.url, live, seed))
        replica = CatalogReplica(
            ReplicaSettings(cluster=CLUSTER),
            lambda: ReadOnlyStream.follow(server.url, 5.0, Credentials()),
            None,
            NATIVE,
            NATIVE_INDEX,
        )
        replica.start()
        opened.callback(replica.close)
        replica.wait_ready(_WAIT_S)
        until(lambda: len(_live(replica)) >= len(cluster.ends), "the replica does not hear everybody")
        tokens = PROMPT_BLOCKS * NAMESPACE.block_tokens
        ask: dict[str, Callable[[bytes], object]] = {
            "lookup": lambda prompt: replica.lookup(NAMESPACE, prompt),
            "route": lambda prompt: replica.route(NAMESPACE, prompt, tokens),
        }
        quiet = {what: _times_us(one, cluster.prompts, _CALLS * samples) for what, one in ask.items()}
        loaded_us, applied = _loaded(server.url, replica, ask["lookup"], cluster.prompts, seed)
    rows = [
        row
        for what, times_us in quiet.items()
        for row in (
            Row(what=f"replica, {what} from Python: p50", unit="µs", value=percentile(times_us, 0.5)),
            Row(what="… p99", unit="µs", value=percentile(times_us, 0.99)),
        )
    ]
    rows += [
        Row(what="replica, lookup while events are applied: p50", unit="µs", value=percentile(loaded_us, 0.5)),
        Row(what="… p99", unit="µs", value=percentile(loaded_us, 0.99)),
        Row(what="… events applied meanwhile", unit="M events/s", value=applied / 1e6),
    ]
    note = (
        f"A replica of {cluster.held:,} residencies in the process that asks, {PROMPT_BLOCKS} hashes a question, one "
        "thread asks without"
        f" a pause. Loaded: another process publishes {EVENTS_PER_S:,} events/s or what it can, in frames of "
        f"{_EVENTS_A_MESSAGE}."
    )
    numbers: dict[str, float | None] = {
        "replica_lookup_us_p50": rows[0].value,
        "replica_route_us_p50": rows[2].value,
        "replica_p99_us_loaded": rows[5].value,
    }
    return Found(rows, numbers, (note,))


def _live(replica: Catalog) -> list[str]:
    return [one.instance for one in replica.instances() if one.state == "live"]


def _times_us(ask: Callable[[bytes], object], prompts: Sequence[bytes], calls: int) -> list[float]:
    for prompt in prompts:
        ask(prompt)
    times_us = []
    for number in range(calls):
        prompt = prompts[number % len(prompts)]
        began_s = time.perf_counter()
        ask(prompt)
        times_us.append((time.perf_counter() - began_s) * 1e6)
    return times_us


def _loaded(
    url: str, replica: CatalogReplica, ask: Callable[[bytes], object], prompts: Sequence[bytes], seed: int
) -> tuple[list[float], float]:
    """Times of calls while another process publishes, and the events a second that were applied."""
    context = multiprocessing.get_context("spawn")
    ready, begin = context.Event(), context.Event()
    writing = context.Process(target=_write, args=(url, seed, ready, begin), daemon=True)
    writing.start()
    try:
        if not ready.wait(_WAIT_S):
            raise TimeoutError("the process that publishes is not ready")
        first, began_s = replica.ready().stream_sequence or 0, time.perf_counter()
        begin.set()
        until(lambda: (replica.ready().stream_sequence or 0) > first, "nothing is published", 0.001)
        times_us: list[float] = []
        while writing.is_alive() and len(times_us) < 10_000_000:
            times_us += _times_us(ask, prompts, _CALLS)
        last, ended_s = replica.ready().stream_sequence or 0, time.perf_counter()
    finally:
        writing.terminate()
        writing.join(_WAIT_S)
    return times_us, (last - first) * _EVENTS_A_MESSAGE / (ended_s - began_s)


def _write(url: str, seed: int, ready: Event, begin: Event) -> None:
    """In a process of its own: publish at the wanted rate."""
    messages = EVENTS_PER_S * _SECONDS // _EVENTS_A_MESSAGE
    writer = Churn("writer", seed)
    frames = [frame.data for frame in writer.frames(messages * _RUNS_A_MESSAGE)]

    async def publish() -> None:
        stream = await NatsStream.connect(url, 5.0)
        try:
            ready.set()
            begin.wait(_WAIT_S)
            began_s = time.perf_counter()
            for at in range(0, len(frames), _AT_ONCE):
                await asyncio.gather(
                    *(stream.publish(CLUSTER, writer.name, data) for data in frames[at : at + _AT_ONCE])
                )
                due_s = began_s + at * _EVENTS_A_MESSAGE / EVENTS_PER_S
                await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
        finally:
            await stream.close()

    asyncio.run(publish())
