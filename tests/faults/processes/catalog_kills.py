"""Two catalogs under a steady rate of lookups, killed with -9 again and again: does every client have an answer, the
right one, no older than it says?

Askers are processes of their own. Some prompts never change; another grows all the time, and who asks for it learns how
old the answer is.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import multiprocessing
import random
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from multiprocessing.synchronize import Event, Semaphore
from pathlib import Path
from typing import NamedTuple

from kvbm.catalog.members.liveness import LIVENESS_S
from kvbm.core.errors import CatalogError
from kvbm.locate.http import CatalogClient
from kvbm.streams.nats.stream import NatsStream
from tests.servers import free_port, start_process, stop_process
from tests.snapshot_instances import SPACE, Instance, block_hashes

READY_WAIT_S = 120.0
ANSWER_S = 60.0  # who is asked by a client and hangs is as good as none; one that is killed is noticed at once
UNTOLD_S = LIVENESS_S / 2  # an age below this is not told
_PROMPTS = 50
_DEPTHS = {"one": 16, "two": 8}
_GROWING = "three"
_GROW_EVERY_S = 0.25
_GROWS_S = 10.0  # then another prompt grows
_MOST_BLOCKS = 60  # of a prompt that is asked for
_ASK_GROWING = 10  # every so-many-th lookup
_THREADS = 4  # of an asker
_LATE_S = 1.0  # an asker that is later than this does not catch up


class Seen(NamedTuple):
    """An answer about a prompt that grows; times are of the machine's monotonic clock."""

    sent_s: float
    answered_s: float
    prompt: int
    depth: int
    is_suspect: bool
    view_age_s: float


class Asked:
    """What one asker has seen.

    Attributes:
        retried: lookups that another catalog answered than the one asked first. failed: those that none answered, in
            words.
        wrong: answers about prompts that do not change, in words. old: answers that say they are old.
    """

    def __init__(self) -> None:
        self.times_ms: list[float] = []
        self.retried = self.old = 0
        self.failed: list[str] = []
        self.wrong: list[str] = []
        self.seen: list[Seen] = []


class Result(NamedTuple):
    """What came of a run.

    Attributes:
        older: answers that were older than they said, in words. told_old: answers that said they were old.
    """

    kills: int
    seconds: float
    asked: int
    retried: int
    failed: list[str]
    wrong: list[str]
    older: list[str]
    ages: int
    told_old: int
    p50_ms: float
    p99_ms: float
    most_ms: float

    @property
    def is_good(self) -> bool:
        """Whether nobody was left without a right answer."""
        return not (self.failed or self.wrong or self.older) and self.asked > 0 and self.ages > 0

    def sentences(self) -> list[str]:
        """The same in words."""
        return [
            (
                f"{self.kills} kills in {self.seconds:.0f} s; {self.asked:,} lookups, {self.asked / self.seconds:,.0f} "
                "a second"
            ),
            (
                f"retried at the other catalog: {self.retried:,}; failed after that: {len(self.failed)}; wrong: "
                f"{len(self.wrong)}"
            ),
            f"ages checked: {self.ages:,}; older than they said: {len(self.older)}; said to be old: {self.told_old:,}",
            f"a lookup takes {self.p50_ms:.2f} ms (p50), {self.p99_ms:.1f} ms (p99), {self.most_ms:.0f} ms (longest)",
            *[f"    {one}" for one in (*self.failed[:3], *self.wrong[:3], *self.older[:3])],
        ]


class Catalog:
    """One that is started anew on its port, from its checkpoint."""

    def __init__(self, folder: Path, nats: str, within: str) -> None:
        self.url, self._folder = f"http://127.0.0.1:{free_port()}", folder
        given = {
            "nats.url": nats,
            "instance.cluster": within,
            "instance.data_dir": folder / "data",
            "catalog.listen": self.url.removeprefix("http://"),
            "catalog.checkpoint_every_s": 1,
        }
        self._command = [
            sys.executable,
            "-m",
            "kvbm",
            "catalog",
            "serve",
            *(f"--set={k}={v}" for k, v in given.items()),
        ]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and wait until it is ready."""
        self._folder.mkdir(exist_ok=True, parents=True)
        self._process = start_process(self._command, self._folder / "catalog.log")
        with closing(CatalogClient(self.url)) as client:
            client.wait_ready(READY_WAIT_S)

    def kill(self) -> None:
        """As `kill -9`."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(READY_WAIT_S)

    def stop(self) -> None:
        """In an orderly way. Idempotent."""
        if self._process is not None:
            stop_process(self._process)


class Instances:
    """Those that hold the prompts, in a thread.

    Attributes:
        origin_s: when the first prompt began to grow.
        begun_s: of each growing prompt, when each of its blocks began to be published. stored_s: when it was on the
            stream.
    """

    def __init__(self, nats: str, within: str) -> None:
        self._nats, self._within = nats, within
        self._ended, self._ready = threading.Event(), threading.Event()
        self.origin_s = time.monotonic()
        self.begun_s: dict[int, list[float]] = defaultdict(list)
        self.stored_s: dict[int, list[float]] = defaultdict(list)

    @contextmanager
    def living(self) -> Iterator[None]:
        """While they are alive."""
        thread = threading.Thread(target=lambda: asyncio.run(self._live()))
        thread.start()
        try:
            assert self._ready.wait(READY_WAIT_S)
            yield
        finally:
            self._ended.set()
            thread.join(READY_WAIT_S)

    def trouble(self, seen: Seen) -> str:
        """Why an answer is not what it says, or ""."""
        most = bisect.bisect_right(self.begun_s[seen.prompt], seen.answered_s)
        if seen.depth > most:
            return f"prompt {seen.prompt} had {most} blocks at most, the answer has {seen.depth}"
        old_s = seen.sent_s - max(seen.view_age_s, UNTOLD_S)
        least = bisect.bisect_right(self.stored_s[seen.prompt], old_s)
        if seen.depth < least and not seen.is_suspect:
            return (
                f"prompt {seen.prompt} had {least} blocks {seen.sent_s - old_s:.2f} s before it was asked for, "
                f"the answer has {seen.depth}"
            )
        return ""

    async def _live(self) -> None:
        async with contextlib.AsyncExitStack() as opened:
            stream = await NatsStream.connect(self._nats)
            opened.push_async_callback(stream.close)
            for name in (*_DEPTHS, _GROWING):
                one = Instance(stream, self._within, name)
                for prompt in range(_PROMPTS):
                    one.create(prompt * 1000, prompt * 1000 + _DEPTHS.get(name, 0))
                await one.snapshot()
                await opened.enter_async_context(one.alive())
            self._ready.set()
            while not self._ended.is_set():
                await self._grow(one)
                await asyncio.sleep(_GROW_EVERY_S)

    async def _grow(self, instance: Instance) -> None:
        prompt = _growing(self.origin_s)
        at = _first(prompt) + len(self.begun_s[prompt])
        self.begun_s[prompt].append(time.monotonic())
        instance.create(at, at + 1)
        await instance.publish()
        self.stored_s[prompt].append(time.monotonic())


def _growing(origin_s: float) -> int:
    return int((time.monotonic() - origin_s) / _GROWS_S)


def _first(prompt: int) -> int:
    return (1 << 32) + prompt * 1000


class _Client:
    """Asks at a steady rate, with a connection of its own."""

    def __init__(self, urls: str, rate: float, origin_s: float, seed: int) -> None:
        self.asked = Asked()
        self._urls, self._rate, self._origin_s, self._dice = urls, rate, origin_s, random.Random(seed)

    def run(self, begun: Semaphore, ended: Event) -> None:
        """Ask until it is ended; who waits for `begun` is told of the first answer."""
        next_s = time.monotonic() + self._dice.random() / self._rate
        with closing(CatalogClient(self._urls, timeout_s=ANSWER_S)) as client:
            for count in range(sys.maxsize):
                time.sleep(max(0.0, next_s - time.monotonic()))
                if ended.is_set():
                    return
                next_s = max(next_s + 1 / self._rate, time.monotonic() - _LATE_S)
                try:
                    self._ask(client, count % _ASK_GROWING == 0)
                except CatalogError as error:
                    self.asked.failed.append(str(error))
                if not count:
                    begun.release()

    def _ask(self, client: CatalogClient, is_growing: bool) -> None:
        prompt = _growing(self._origin_s) if is_growing else self._dice.randrange(_PROMPTS)
        first, blocks = (_first(prompt), _MOST_BLOCKS) if is_growing else (prompt * 1000, max(_DEPTHS.values()) + 4)
        before, sent_s = client.url, time.monotonic()
        answer = client.lookup(SPACE.id, block_hashes(first, first + blocks), limit=4)
        answered_s, asked = time.monotonic(), self.asked
        asked.times_ms.append((answered_s - sent_s) * 1e3)
        asked.retried += client.url != before
        asked.old += answer.view_age_s > 0
        found = {one.instance: one.depth for one in answer.instances}
        if not is_growing:
            if found != _DEPTHS and not answer.view_age_s:
                asked.wrong.append(f"of prompt {prompt}: {found}")
            return
        suspect = any(one.suspect for one in answer.instances)
        asked.seen.append(Seen(sent_s, answered_s, prompt, found.pop(_GROWING, 0), suspect, answer.view_age_s))
        if found:
            asked.wrong.append(f"of growing prompt {prompt}: {found}")


def _asker(urls: str, rate: float, origin_s: float, seed: int, begun: Semaphore, ended: Event, results: object) -> None:
    """A process of some clients."""
    clients = [_Client(urls, rate / _THREADS, origin_s, seed * _THREADS + number) for number in range(_THREADS)]
    threads = [threading.Thread(target=client.run, args=(begun, ended)) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    results.put([client.asked for client in clients])  # type: ignore[attr-defined]


def kill_catalogs(nats: str, within: str, folder: Path, kills: int, rate: float, askers: int, seed: int) -> Result:
    """Run two catalogs, `rate` lookups a second of `askers` processes together, and kill one of the two `kills`
    times.
    """
    dice, begin_s = random.Random(seed), 0.0
    spawn = multiprocessing.get_context("spawn")
    with ExitStack() as opened:
        instances = Instances(nats, within)
        opened.enter_context(instances.living())
        catalogs = [Catalog(folder / name, nats, within) for name in ("a", "b")]
        for catalog in catalogs:
            opened.callback(catalog.stop)
            catalog.start()
        begun, ended, results = spawn.Semaphore(0), spawn.Event(), spawn.Queue()
        for number in range(askers):
            urls = ",".join(one.url for one in (catalogs if number % 2 else reversed(catalogs)))
            given = (urls, rate / askers, instances.origin_s, seed + number, begun, ended, results)
            process = spawn.Process(target=_asker, args=given, daemon=True)
            process.start()
            opened.callback(process.join, READY_WAIT_S)
        opened.callback(ended.set)
        for _ in range(askers * _THREADS):
            assert begun.acquire(timeout=READY_WAIT_S), "an asker has no answer"
        begin_s = time.monotonic()
        for _ in range(kills):
            time.sleep(dice.uniform(0.2, 2.0))
            victim = dice.choice(catalogs)
            victim.kill()
            time.sleep(dice.uniform(0.0, 0.5))
            victim.start()
        seconds = time.monotonic() - begin_s
        ended.set()
        found = [asked for _ in range(askers) for asked in results.get(timeout=READY_WAIT_S)]
    return _result(kills, seconds, found, instances)


def _result(kills: int, seconds: float, found: list[Asked], instances: Instances) -> Result:
    times_ms = sorted(time_ms for one in found for time_ms in one.times_ms)
    ages = [seen for one in found for seen in one.seen]
    return Result(
        kills=kills,
        seconds=seconds,
        asked=len(times_ms) + sum(len(one.failed) for one in found),
        retried=sum(one.retried for one in found),
        failed=[words for one in found for words in one.failed],
        wrong=[words for one in found for words in one.wrong],
        older=[words for seen in ages if (words := instances.trouble(seen))],
        ages=len(ages),
        told_old=sum(one.old for one in found),
        p50_ms=times_ms[len(times_ms) // 2],
        p99_ms=times_ms[len(times_ms) * 99 // 100],
        most_ms=times_ms[-1],
    )
