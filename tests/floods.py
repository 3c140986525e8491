"""Callers that ask too much, and a catalog in a process of its own to ask: what tests of its limits are made of.

`python -m tests.floods URL SECONDS FLOOD@ADDRESS…` floods a catalog from addresses of the loopback, and prints what
came back as JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import urllib3

from kvbm.core.events import PoolStated
from kvbm.core.ids import Epoch, InstanceId, Namespace, Tier
from kvbm.core.prompt_batches import CONTENT_TYPE
from kvbm.reference.ledger import Ledger
from kvbm.streams.nats.stream import NatsStream
from tests.nats_fixture import WAIT_S, patient
from tests.servers import free_port, start_process, stop_process

DICE = random.Random(1)
SPACE = Namespace(model="m", block_tokens=16)
FIELDS = {"model": "m", "block_tokens": 16}


# -- a catalog --------------------------------------------------------------------------------------------------------


class CatalogProcess(NamedTuple):
    """A catalog that is ready.

    Attributes:
        log: where it writes to.
    """

    url: str
    pid: int
    log: Path

    def rss_bytes(self, field: str = "VmRSS") -> int:
        """Its memory now; with "VmHWM" the most it ever had."""
        text = Path(f"/proc/{self.pid}/status").read_text()
        return 1024 * next(int(line.split()[1]) for line in text.splitlines() if line.startswith(field))


@contextmanager
def catalog_process(
    folder: Path,
    nats_url: str,
    cluster: str,
    files: int = 0,
    access: Mapping[str, object] | None = None,
    ca: str = "",
    more: Mapping[str, object] | None = None,
    **limits: object,
) -> Iterator[CatalogProcess]:
    """`kvbm-catalog serve` on a free port of the loopback.

    Args:
        files: it may have so many open; 0: as many as this process.
        access: settings of `catalog` on who may ask.
        ca: who signs its certificate; "" where it serves without TLS.
        more: further settings.
        limits: settings of `catalog.limits`.
    """
    listen, log = f"127.0.0.1:{free_port()}", folder / "catalog.log"
    url = f"https://{listen}" if ca else f"http://{listen}"
    given = {
        "nats.url": nats_url,
        "instance.cluster": cluster,
        "instance.data_dir": str(folder / "data"),
        "catalog.listen": listen,
        **{f"catalog.{name}": value for name, value in (access or {}).items()},
        **{f"catalog.limits.{name}": value for name, value in limits.items()},
        **(more or {}),
    }
    command = [
        sys.executable,
        "-c",
        "from kvbm.catalog_cli import catalog_main; raise SystemExit(catalog_main())",
        "serve",
    ]
    command += [
        f"--set={name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in given.items()
    ]
    if files:
        command = ["sh", "-c", f'ulimit -n {files}; exec "$@"', "sh", *command]
    process = start_process(command, log)
    try:
        deadline_s = time.monotonic() + 120
        while not _is_ready(url, ca):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline_s, log.read_text()
            time.sleep(0.05)
        yield CatalogProcess(url, process.pid, log)
    finally:
        stop_process(process)


def publish_instances(nats_url: str, cluster: str, names: Sequence[str] = ("a", "b"), namespaces: int = 1) -> None:
    """Instances that hold nothing and may be routed to.

    Args:
        namespaces: that each declares; one is of all, the others are its own.
    """

    async def publish() -> None:
        stream = patient(await NatsStream.connect(nats_url, WAIT_S))
        for name in names:
            ledger = Ledger((PoolStated(Tier.HBM, 64, 1024),))
            own = [Namespace(model=f"{name}-{number}", block_tokens=16) for number in range(1, namespaces)]
            ledger.start(Epoch(1), [SPACE, *own], ["rack-1", name], "test", "0")
            for frame in ledger.take_frames(InstanceId(name), time.time_ns()):
                await stream.publish(cluster, InstanceId(name), frame.data)
        await stream.close()

    asyncio.run(publish())


def _is_ready(url: str, ca: str) -> bool:
    try:
        with urllib3.PoolManager(ca_certs=ca or None) as pool:
            return pool.request("GET", url + "/readyz", retries=False, timeout=2).status == 200
    except urllib3.exceptions.HTTPError:
        return False


# -- honest callers ---------------------------------------------------------------------------------------------------


class Honest:
    """Callers that ask at a steady pace, as routers do, and count the answers they get. Use as a context manager.

    Attributes:
        answered, failed: how many requests were.
        took_s: of each that was answered, since somebody last emptied it.
    """

    def __init__(self, url: str, callers: int = 4, pause_s: float = 0.04, token: str = "") -> None:
        self.url, self.answered, self.failed = url, 0, Counter[str]()
        self._headers = {"authorization": f"Bearer {token}"} if token else {}
        self.took_s: list[float] = []
        self._pause_s = pause_s
        self._done = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(number,), daemon=True) for number in range(callers)]

    def __enter__(self) -> Honest:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        for thread in self._threads:
            thread.join(20)

    def rate(self, seconds: float) -> float:
        """Answers a second, measured from now on."""
        before, begin_s = self.answered, time.monotonic()
        time.sleep(seconds)
        return (self.answered - before) / (time.monotonic() - begin_s)

    def _ask(self, number: int) -> None:
        pool = urllib3.connectionpool.connection_from_url(self.url, retries=False, maxsize=1)
        body = json.dumps({"namespace": FIELDS, "hashes": bytes([number] * 16).hex() * 64, "input_tokens": 1030})
        next_s = time.monotonic()
        while not self._done.is_set():
            begin_s = time.monotonic()
            try:
                reply = pool.request("POST", "/v1/route", body=body, headers=self._headers, timeout=5)
                if reply.status == 200:
                    self.answered += 1
                    self.took_s.append(time.monotonic() - begin_s)
                else:
                    self.failed[f"status {reply.status}"] += 1
            except urllib3.exceptions.HTTPError as error:
                self.failed[type(error).__name__] += 1
            next_s = max(next_s + self._pause_s, time.monotonic() - 1.0)
            self._done.wait(max(0.0, next_s - time.monotonic()))


# -- floods -----------------------------------------------------------------------------------------------------------

Flood = Callable[["Source"], Awaitable[None]]
CLOSES = b"\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n"


class Source:
    """Where a flood comes from: one address of the loopback."""

    def __init__(self, url: str, address: str) -> None:
        host, _, port = url.removeprefix("http://").rpartition(":")
        self.host, self.port, self.address = host, int(port), address
        self.seen: Counter[str] = Counter()

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        async with asyncio.timeout(5):
            return await asyncio.open_connection(self.host, self.port, local_addr=(self.address, 0))

    async def ask(self, request: bytes, body: Sequence[bytes] = ()) -> int:
        """Send a request over a connection of its own, and give the status of the answer.

        Raises OSError, TimeoutError.
        """
        reader, writer = await self.connect()
        try:
            async with asyncio.timeout(30):
                for part in (request, *body):
                    writer.write(part)
                    await writer.drain()
                line = await reader.readline()
                await reader.read()
            return int(line.split()[1]) if line.startswith(b"HTTP/1.1 ") else 0
        finally:
            writer.close()


def post(path: str, body: bytes, length: int | None = None) -> bytes:
    """A request."""
    size = len(body) if length is None else length
    return b"POST %s HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%s" % (
        path.encode(),
        size,
        body,
    )


async def half_open(source: Source) -> None:
    """Connections that send half a header and stay."""
    _, writer = await source.connect()
    writer.write(b"POST /v1/route HTTP/1.1\r\nhost: 127.0.0.1\r\nx-long: ")
    await asyncio.sleep(DICE.uniform(2, 6))
    writer.close()


async def slow_bodies(source: Source) -> None:
    """Bodies that come a byte at a time."""
    _, writer = await source.connect()
    writer.write(post("/v1/lookup", b"x" * 30_000, 4 << 20))
    for _ in range(20):
        await asyncio.sleep(0.5)
        writer.write(b" " * 1000)
        await writer.drain()
    writer.close()


async def long_routes(source: Source) -> None:
    """Routes of the longest prompt there is, another each time."""
    body = json.dumps({"namespace": FIELDS, "hashes": DICE.randbytes(16 * 65_536).hex(), "input_tokens": 1 << 20})
    source.seen[f"status {await source.ask(post('/v1/route', body.encode()))}"] += 1


async def long_tokens(source: Source) -> None:
    """A million tokens each."""
    body = b'{"namespace":{"model":"m","block_tokens":16},"tokens":[%s1]}' % (b"100000," * ((1 << 20) - 1))
    source.seen[f"status {await source.ask(post('/v1/lookup', body))}"] += 1


async def too_large(source: Source) -> None:
    """Bodies larger than any that is taken."""
    source.seen[f"status {await source.ask(post('/v1/lookup', b'', 20 << 20), [b' ' * (1 << 20)] * 20)}"] += 1


async def waits(source: Source) -> None:
    """Waits for what never comes."""
    wanted = [{"instance": f"i{number}", "epoch": 1, "offset": 1 << 62} for number in range(256)]
    body = json.dumps({"namespace": FIELDS, "hashes": "", "at_least": wanted, "timeout_s": 5})
    source.seen[f"status {await source.ask(post('/v1/lookup', body.encode()))}"] += 1


async def deaf(source: Source) -> None:
    """Answers nobody reads."""
    _, writer = await source.connect()
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    for _ in range(200):
        writer.write(b"GET /openapi.json HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n" * 10)
        await writer.drain()
    await asyncio.sleep(5)
    writer.close()


async def nonsense(source: Source) -> None:
    """What is no HTTP."""
    source.seen[
        f"status {await source.ask(b'nonsense' * 100 + bytes(20) + b'GET' * 20 + bytes(10) + b'xyz ' * 10 + b'end')}"
    ] += 1


async def quick(source: Source) -> None:
    """As many small requests as one connection takes."""
    reader, writer = await source.connect()
    for _ in range(100):
        writer.write(b"GET /v1/namespaces HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
        await reader.readexactly(int(lengths[0].split(b":")[1]))
        source.seen[f"status {head.split()[1].decode()}"] += 1
    writer.close()


async def strangers(source: Source) -> None:
    """Headers that promise a body which would need room, and nothing more."""
    _, writer = await source.connect()
    writer.write(
        b"POST /v1/lookup HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: %b\r\ncontent-length: 262144\r\n\r\n"
        % CONTENT_TYPE.encode()
    )
    await asyncio.sleep(DICE.uniform(2, 6))
    writer.close()


async def namespaces(source: Source) -> None:
    """All namespaces, page by page."""
    source.seen[f"status {await source.ask(b'GET /v1/namespaces HTTP/1.1' + CLOSES)}"] += 1


FLOODS: dict[str, tuple[Flood, int]] = {  # each with how many of it are under way at a time
    "half_open": (half_open, 1100),
    "slow_bodies": (slow_bodies, 200),
    "long_routes": (long_routes, 4),
    "long_tokens": (long_tokens, 3),
    "too_large": (too_large, 4),
    "waits": (waits, 200),
    "deaf": (deaf, 100),
    "nonsense": (nonsense, 20),
    "quick": (quick, 20),
    "strangers": (strangers, 80),
    "namespaces": (namespaces, 3),
}


async def run_floods(url: str, seconds: float, names: Sequence[str]) -> dict[str, dict[str, int]]:
    """Flood a catalog. Names are FLOOD@ADDRESS."""
    found: dict[str, dict[str, int]] = {}
    tasks = []
    for name in names:
        flood, at_a_time = FLOODS[name.partition("@")[0]]
        source = Source(url, name.partition("@")[2] or "127.0.0.1")
        found[name] = source.seen
        tasks += [asyncio.create_task(_again(flood, source)) for _ in range(at_a_time)]
    await asyncio.sleep(seconds)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return found


async def _again(flood: Flood, source: Source) -> None:
    while True:
        try:
            await flood(source)
            source.seen["done"] += 1
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            source.seen[type(error).__name__] += 1
            await asyncio.sleep(0.05)


def raise_file_limit() -> None:
    """Let this process have as many files as the system allows."""
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@contextmanager
def flooding(url: str, seconds: float, names: Sequence[str], folder: Path) -> Iterator[Callable[[], dict[str, Any]]]:
    """Floods from a process of their own. Gives a function that waits until they end, and returns what came back."""
    output = folder / "floods.json"
    command = [sys.executable, "-m", "tests.floods", url, str(seconds), *names]
    process = start_process(command, output, cwd=Path(__file__).parents[1], env=os.environ | {"PYTHONUNBUFFERED": "1"})

    def ended() -> dict[str, Any]:
        process.wait(seconds + 60)
        found: dict[str, Any] = json.loads(output.read_text().splitlines()[-1])
        return found

    try:
        yield ended
    finally:
        stop_process(process)


def half_open_sockets(url: str, count: int, address: str = "127.0.0.1") -> list[socket.socket]:
    """So many connections with half a header each."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    sockets = []
    for _ in range(count):
        one = socket.socket()
        one.bind((address, 0))
        one.settimeout(5)
        sockets.append(one)
        with contextlib.suppress(OSError):
            one.connect((host, int(port)))
            one.sendall(b"GET /healthz HTTP/1.1\r\nhost: 127.0.0.1\r\n")
    return sockets


if __name__ == "__main__":
    raise_file_limit()
    print(json.dumps(asyncio.run(run_floods(sys.argv[1], float(sys.argv[2]), sys.argv[3:]))))
