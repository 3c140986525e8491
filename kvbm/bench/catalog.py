"""`kvbm bench catalog`: what a question costs whoever asks it: a catalog in a process of its own, asked over sockets by
another.

16 instances hold a million blocks: each has a system prompt of 64 blocks, and prompts of its own that begin with it. A
question is a prompt of 256 hashes that one instance has whole. Frames come over an embedded nats-server, as ever;
nothing else runs meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import numpy as np

from kvbm.assembly import NATIVE_LEDGER
from kvbm.bench import measure
from kvbm.bench.asking import Asker, post
from kvbm.bench.measure import Found, Row, percentile, row_of
from kvbm.core.answers import LIMIT, LookupRequest, RouteRequest
from kvbm.core.errors import KvbmError
from kvbm.core.events import PoolStated
from kvbm.core.ids import HASH_BYTES, NO_PARENT, Epoch, InstanceId, Namespace, Offset, Tier
from kvbm.core.prompt_batches import CONTENT_TYPE, LOOKUP, PromptBatch, encode_batch
from kvbm.locate.http import CatalogClient
from kvbm.streams.base import Heartbeat
from kvbm.streams.nats.stream import NatsStream
from kvbm.streams.server import EmbeddedServer
from kvbm.workload.processes import start_catalog

INSTANCES = 16
PROMPT_BLOCKS = 256
SHARED_BLOCKS = 64
CLIENTS = 8
BATCH_PROMPTS = 16
CLUSTER = "local"
NAMESPACE = Namespace(model="bench", revision="r1", block_tokens=16)
_PROMPTS = 512  # different questions
_SECONDS = 1.0  # of each sample
_ALONE = 2000  # questions one after the other, for each sample
_WAIT_S = 120.0


def bench_catalog(live: int, samples: int, seed: int) -> Found:
    """Rates and times of lookups and routes over HTTP.

    Args:
        live: residencies the catalog holds.
    """
    with tempfile.TemporaryDirectory(prefix="kvbm-bench-") as folder, ExitStack() as opened:
        server = EmbeddedServer.start(Path(folder) / "nats")
        opened.callback(server.stop)
        socket_path = Path(folder) / "catalog.sock"
        client = start_catalog(Path(folder) / "catalog", server.url, opened, {"catalog.unix_socket": socket_path})
        cluster = opened.enter_context(HeldCluster.on(server.url, live, seed))
        until(lambda: held(client) >= cluster.held, "the catalog has not read all that was published")
        address = urlsplit(client.url)
        where = (address.hostname or "", address.port or 0)
        rows, numbers = _over_http(where, cluster.prompts, samples)
        for part in (
            _in_batches(where, cluster.prompts, samples),
            _by_unix_socket(str(socket_path), cluster.prompts, samples),
            _by_nats(server.url, cluster.prompts, samples),
        ):
            rows += part[0]
            numbers |= part[1]
    note = (
        f"{INSTANCES} instances, {cluster.held:,} residencies; a question has {PROMPT_BLOCKS} hashes: {SHARED_BLOCKS} "
        "that all "
        "instances have, the rest one has. Asked from another process on the same machine, which takes processor time, "
        "too."
    )
    return Found(rows, dict(numbers), (note,))


def _over_http(where: tuple[str, int], prompts: Sequence[bytes], samples: int) -> tuple[list[Row], dict[str, float]]:
    hexes = [prompt.hex() for prompt in prompts]
    name = NAMESPACE.id.hex()
    lookups = [LookupRequest(namespace=name, hashes=one) for one in hexes]
    tokens = PROMPT_BLOCKS * NAMESPACE.block_tokens
    routes = [RouteRequest(namespace=name, hashes=one, input_tokens=tokens) for one in hexes]
    rows: list[Row] = []
    numbers: dict[str, float] = {}
    for what, key, path, questions in (
        ("lookup", "http_lookup", "/v1/lookup", lookups),
        ("route", "http_route", "/v1/route", routes),
    ):
        asked = [post(path, msgspec.json.encode(one)) for one in questions]
        with Asker(where, CLIENTS) as many:
            many.ask_for(asked, _SECONDS / 2)
            rates = [many.ask_for(asked, _SECONDS).per_s for _ in range(samples)]
        with Asker(where, 1) as alone:
            alone.ask_for(asked, _SECONDS / 4)
            times_us = [time_s * 1e6 for time_s in alone.ask(asked, _ALONE * samples)]
        p50, p99 = percentile(times_us, 0.5), percentile(times_us, 0.99)
        rows += [
            row_of(f"HTTP {what}, {CLIENTS} clients", f"{what}s/s", rates),
            Row(what=f"HTTP {what}, one client: p50", unit="µs", value=p50),
            Row(what="… p99", unit="µs", value=p99),
        ]
        numbers |= {f"{key}s_per_s": rows[-3].value, f"{key}_us_p50": p50}
    return rows, numbers


def _in_batches(where: tuple[str, int], prompts: Sequence[bytes], samples: int) -> tuple[list[Row], dict[str, float]]:
    """Lookups in the binary form, several prompts in a request."""
    batches = [
        PromptBatch(LOOKUP, LIMIT, NAMESPACE.id, [(prompt, 0) for prompt in prompts[at : at + BATCH_PROMPTS]])
        for at in range(0, len(prompts) - BATCH_PROMPTS + 1, BATCH_PROMPTS)
    ]
    asked = [post("/v1/lookup", encode_batch(batch), CONTENT_TYPE) for batch in batches]
    with Asker(where, CLIENTS) as many:
        many.ask_for(asked, _SECONDS / 2)
        rates = [BATCH_PROMPTS * many.ask_for(asked, _SECONDS).per_s for _ in range(samples)]
    row = row_of(f"binary lookups, batches of {BATCH_PROMPTS} prompts, {CLIENTS} clients", "prompts/s", rates)
    return [row], {"binary_prompts_per_s": row.value}


def _by_unix_socket(path: str, prompts: Sequence[bytes], samples: int) -> tuple[list[Row], dict[str, float]]:
    name = NAMESPACE.id.hex()
    bodies = [msgspec.json.encode(LookupRequest(namespace=name, hashes=prompt.hex())) for prompt in prompts]
    with Asker(path, 1) as alone:
        asked = [post("/v1/lookup", body) for body in bodies]
        alone.ask_for(asked, _SECONDS / 4)
        times_us = [time_s * 1e6 for time_s in alone.ask(asked, _ALONE * samples)]
    p50 = percentile(times_us, 0.5)
    row = Row(what="HTTP lookup over a unix socket, one client: p50", unit="µs", value=p50)
    return [row], {"unix_us_p50": p50}


def _by_nats(url: str, prompts: Sequence[bytes], samples: int) -> tuple[list[Row], dict[str, float]]:
    """Lookups over NATS, as a router asks: through the public client, whose request and answer are made and read within
    the time.
    """
    times_us: list[float] = []
    with contextlib.closing(CatalogClient(url)) as client:
        for number in range(_ALONE * samples + _ALONE // 4):
            began_s = time.perf_counter()
            client.lookup(NAMESPACE.id, prompts[number % len(prompts)])
            times_us.append((time.perf_counter() - began_s) * 1e6)
    times_us = times_us[_ALONE // 4 :]
    p50, p99 = percentile(times_us, 0.5), percentile(times_us, 0.99)
    rows = [
        Row(what="lookup over NATS, one client: p50", unit="µs", value=p50),
        Row(what="… p99", unit="µs", value=p99),
    ]
    return rows, {"nats_us_p50": p50}


class HeldCluster:
    """Ledgers whose blocks are on the stream, and heartbeats of their instances until it is left.

    Attributes:
        held: residencies there are. prompts: packed hashes, each held whole by one instance. ends: of each instance,
            the offset it has reached.
    """

    def __init__(self, live: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        shared = rng.bytes(SHARED_BLOCKS * HASH_BYTES)
        each = max(1, live // INSTANCES // (PROMPT_BLOCKS - SHARED_BLOCKS))
        self.prompts: list[bytes] = []
        self._frames: list[tuple[InstanceId, bytes]] = []
        self.ends: dict[InstanceId, Offset] = {}
        self.held = 0
        for number in range(INSTANCES):
            name = InstanceId(f"instance-{number}")
            tails = [rng.bytes((PROMPT_BLOCKS - SHARED_BLOCKS) * HASH_BYTES) for _ in range(each)]
            ledger = NATIVE_LEDGER([PoolStated(Tier.HBM, each * PROMPT_BLOCKS + 1024, 1 << 20)], "lru", 64 << 20, ())
            ledger.start(Epoch(1), [NAMESPACE])
            for run in (shared, *tails):
                allocation = ledger.allocate(Tier.HBM, len(run) // HASH_BYTES)
                assert allocation is not None
                ledger.unpin(Tier.HBM, ledger.create(NAMESPACE.id, Tier.HBM, NO_PARENT, 0, run, allocation.slots))
                self._frames += [(name, frame.data) for frame in ledger.take_frames(name, time.time_ns())]
                self.held += len(run) // HASH_BYTES
            self.ends[name] = ledger.applied
            self.prompts += [shared + tail for tail in tails[: -(-_PROMPTS // INSTANCES)]]
        rng.shuffle(self.prompts)

    @classmethod
    @contextlib.contextmanager
    def on(cls, url: str, live: int, seed: int) -> Iterator[HeldCluster]:
        """All of it on a stream."""
        cluster, ended = cls(live, seed), threading.Event()
        published: list[Exception] = []
        ready = threading.Event()

        def run() -> None:
            try:
                asyncio.run(cluster._run(url, ready.set, ended))
            except (KvbmError, OSError) as error:
                published.append(error)
            finally:
                ready.set()

        thread = threading.Thread(target=run, name="bench-cluster", daemon=True)
        thread.start()
        try:
            ready.wait(_WAIT_S)
            assert not published, published
            yield cluster
        finally:
            ended.set()
            thread.join(_WAIT_S)

    async def _run(self, url: str, on_published: Callable[[], None], ended: threading.Event) -> None:
        stream = await NatsStream.connect(url, 5.0)
        try:
            for name, data in self._frames:
                await stream.publish(CLUSTER, name, data)
            self._frames.clear()
            on_published()
            while not ended.is_set():
                for name, end in self.ends.items():
                    pulse = Heartbeat(
                        instance=name,
                        cluster=CLUSTER,
                        epoch=Epoch(1),
                        published=end,
                        applied=end,
                        wall_time_ns=time.time_ns(),
                        run="bench",
                        namespaces=(NAMESPACE.id,),
                    )
                    await stream.send_pulse(pulse)
                await asyncio.sleep(0.5)
        finally:
            await stream.close()


def held(client: CatalogClient) -> int:
    """Residencies of live instances that a catalog knows."""
    return sum(sum(one.held_blocks.values()) for one in client.instances() if one.state == "live")


def until(condition: Callable[[], bool], otherwise: str, every_s: float = 0.1) -> None:
    """Wait for something of a catalog. Raises TimeoutError: it has not come."""
    measure.until(condition, otherwise, _WAIT_S, every_s)
