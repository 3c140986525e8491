"""One side of a comparison in a process of its own: it is told on stdin what to do and answers in JSON on stdout.

The same code measures us and every peer; a driver says only how its side is called. It runs in the peers' environments
too, so it needs the standard library and numpy alone.
"""

from __future__ import annotations

import gc
import http.client
import json
import os
import struct
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from peers.workload import (
    CHAIN_BLOCKS,
    Life,
    Part,
    Step,
    filling,
    live_chains,
    lives,
    pool_filling,
    replacing,
    shared_chains,
    shared_depths,
    sharing,
)

_BATCH = 64  # items between two looks at the clock
STORE_RUN_BLOCKS = 32  # of one call to a store
_CHECKED_OF_FILL = 7  # one chain in so many is asked for after filling; prime to the instances, so that all of them are


class Directory(Protocol):
    """Something that knows which instance holds which block.

    `form` is how a step's blocks are cut into messages: "runs", as large as the side likes; "cut", events of 16
    blocks; "singles", events of one block; "alone", events of one block, each in a message of its own.
    """

    def mail(self, step: Step, form: str) -> list[Any]:
        """The messages that tell a step, made before the clock runs."""

    def apply(self, message: Any) -> object:
        """Take one message in. Measured."""

    def question(self, chain: Part) -> Any:
        """The argument of a prefix query, made before the clock runs."""

    def ask(self, question: Any) -> Any:
        """Answer a prefix query. Measured."""

    def depths(self, answer: Any) -> list[int]:
        """How deep each instance has the prefix, by an answer; to check it."""


class Pool(Protocol):
    """Something that owns the slots of an engine's blocks."""

    def prepare(self, life: Life) -> Any:
        """What a step needs (hashes, requests), made before the clock runs."""

    def live(self, prepared: Any) -> object:
        """Match and pin, allocate (evicting), create, unpin.

        Measured. The same without the match when nothing is reused.
        """

    def settle(self) -> None:
        """Take away what waits for other threads in production (events); not measured."""


class Service(Protocol):
    """Something that takes events in over its own wire, as it does in production."""

    def mail(self, step: Step) -> list[Any]:
        """The messages that tell a step, made before the clock runs."""

    def lay_ready(self, messages: list[Any]) -> None:
        """What happens to messages before the clock runs."""

    def take_in(self) -> bool:
        """Take in what was laid ready.

        Measured. Returns whether the last of every instance is known, at the end of patience.
        """

    def depth(self, chain: Part, instance: int) -> int:
        """How many blocks of a chain, from its start, an instance has, as the service says when it is asked."""

    def cpu_s(self) -> float:
        """CPU seconds the service has used, all threads."""

    def close(self) -> None:
        """End it."""


class Store(Protocol):
    """Something that keeps blocks' bytes.

    Blocks are numbers from 0 on, each of them one row of the memory the store is filled from.

    What a transfer ends in differs: see the drivers. Both sides of a row have the same ends.
    """

    def keys(self, blocks: list[int], generation: int) -> Any:
        """What names some blocks in this store, made before the clock runs; other generations have other names."""

    def put(self, keys: Any, blocks: list[int]) -> object:
        """Store blocks; they can be got once `settle` returned. Measured."""

    def settle(self) -> object:
        """Wait until everything that was put is stored. Measured."""

    def get(self, keys: Any, blocks: list[int]) -> object:
        """Bring blocks back to memory. Measured. Raises LookupError: one is not there."""

    def wrong(self) -> int:
        """How many of the blocks got since the last call are not those that were put."""

    def clear(self) -> None:
        """Forget everything that was put."""

    def register(self, keys: Any) -> object:
        """Reserve room for blocks, commit them and find them again, without a byte of theirs. Measured.

        Not every store has these calls.
        """

    def cpu_s(self) -> float:
        """CPU seconds of processes that work for it, beside this one."""

    def close(self) -> None:
        """End it."""


class Question(NamedTuple):
    """A POST of JSON.

    Attributes:
        checked: the body that is asked before the clock runs, where that is another: one that changes no answer.
    """

    path: str
    body: bytes
    checked: bytes = b""


class Served(Protocol):
    """Something that answers questions about prompts over HTTP, as its users ask it.

    Attributes:
        port: of 127.0.0.1.
    """

    port: int

    def tell(self, steps: list[Step]) -> None:
        """Have it know what steps tell, and wait until it does."""

    def kinds(self) -> list[str]:
        """What can be asked."""

    def question(self, kind: str, chain: Part) -> Question:
        """One question about the first blocks of a chain, made before the clock runs."""

    def depths(self, kind: str, answer: bytes) -> list[int]:
        """How deep each instance has the prompt, by the body of an answer."""

    def cpu_s(self) -> float:
        """CPU seconds the service has used, all threads."""

    def close(self) -> None:
        """End it."""


def resident_bytes() -> int:
    """Memory of this process that is in RAM now."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def serve(name: str, version: str, make: Callable[..., Directory | Pool | Service | Served | Store]) -> None:
    """Obey commands until stdin ends. What libraries print goes to stderr, so that stdout holds answers alone."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    side: DirectoryBench | PoolBench | WireBench | ServedBench | StoreBench | None = None
    for line in sys.stdin:
        command = json.loads(line)
        what = command.pop("do")
        if what == "make":
            built = make(**command)
            side = _bench(built)
            answer: Any = {"name": name, "version": version}
        else:
            answer = getattr(side, what)(**command)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    if isinstance(side, WireBench | ServedBench | StoreBench):
        side.close()


def _bench(built: Any) -> DirectoryBench | PoolBench | WireBench | ServedBench | StoreBench:
    if hasattr(built, "kinds"):
        return ServedBench(built)
    if hasattr(built, "take_in"):
        return WireBench(built)
    if hasattr(built, "settle") and hasattr(built, "put"):
        return StoreBench(built)
    return PoolBench(built) if hasattr(built, "live") else DirectoryBench(built)


@contextmanager
def _frozen() -> Iterator[None]:
    """The collector leaves alone what is there already, as an engine that freezes its heap after the start has it."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


class _Clock:
    """Wall and CPU seconds of stretches, all threads of the process, added up."""

    def __init__(self) -> None:
        self.wall_s = self.cpu_s = 0.0

    def __enter__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def __exit__(self, *_: object) -> None:
        self.wall_s += time.perf_counter() - self._wall
        self.cpu_s += time.process_time() - self._cpu


def _timed(
    work: Callable[[Any], object], items: list[Any], units: int, between: Callable[[], object] = lambda: None
) -> dict[str, float]:
    """A sample of work on items, which are alike.

    The first eighth is not timed, because the other side has just had the caches.

    Args:
        between: done now and then, and not timed.
    """
    clock = _Clock()
    warm = len(items) // 8
    with _frozen():
        for item in items[:warm]:
            work(item)
        between()
        for at in range(warm, len(items), _BATCH):
            batch = items[at : at + _BATCH]
            with clock:
                for item in batch:
                    work(item)
            between()
    sample = {"wall_s": clock.wall_s, "cpu_s": clock.cpu_s, "units": units * (len(items) - warm) / len(items)}
    items.clear()
    return sample


class DirectoryBench:
    """Commands for a Directory."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._chains = 0
        self._next = 0
        self._mail: list[Any] = []
        self._blocks = 0

    def fill(self, live: int) -> dict[str, float]:
        """Make the live set that steps then replace. Returns the seconds it took, messages made and applied."""
        began = time.perf_counter()
        self._chains = self._next = live_chains(live)
        self._tell(filling(self._chains))
        return {"blocks": self._chains * CHAIN_BLOCKS, "seconds": time.perf_counter() - began}

    def prepare(self, steps: int, form: str) -> None:
        """Make the messages of the next sample."""
        mail = [self._directory.mail(step, form) for step in replacing(self._chains, self._next, steps)]
        self._mail = [message for messages in mail for message in messages]
        self._next += steps
        self._blocks = steps * 2 * CHAIN_BLOCKS

    def apply(self) -> dict[str, float]:
        """Apply what was prepared. Returns the sample, in block events."""
        return _timed(self._directory.apply, self._mail, self._blocks)

    def share(self, live: int) -> dict[str, int]:
        """Make the residencies that queries ask for, and check one answer in a hundred.

        Raises ValueError: it is wrong.
        """
        self._chains = shared_chains(live)
        self._tell(sharing(self._chains))
        for chain in range(0, self._chains, 100):
            self._check(chain)
        return {"blocks": sum(sum(shared_depths(chain)) for chain in range(self._chains))}

    def query(self, count: int, seed: int) -> dict[str, Any]:
        """Ask for random chains. Returns the time of every query, in microseconds, and the sample."""
        chosen = np.random.default_rng([3, seed]).integers(0, self._chains, count)
        questions = [self._directory.question(Part(int(chain), 0, CHAIN_BLOCKS)) for chain in chosen]
        ask, clock_ns, times = self._directory.ask, time.perf_counter_ns, [0] * count
        clock = _Clock()
        with _frozen():
            for question in questions[: count // 8]:  # as in `_timed`
                ask(question)
            with clock:
                for at, question in enumerate(questions):
                    began = clock_ns()
                    ask(question)
                    times[at] = clock_ns() - began
        return {"wall_s": clock.wall_s, "cpu_s": clock.cpu_s, "units": count, "us": [ns / 1e3 for ns in times]}

    def memory(self, live: int, replacements: int) -> dict[str, float]:
        """RSS a live block, and after the whole set was replaced so many times.

        For a fresh process: it counts growth.
        """
        self._chains = live_chains(live)
        gc.collect()
        before = resident_bytes()
        began = time.perf_counter()
        self._tell(filling(self._chains))
        gc.collect()
        filled = resident_bytes() - before
        self._tell(replacing(self._chains, self._chains, replacements * self._chains))
        gc.collect()
        blocks = self._chains * CHAIN_BLOCKS
        return {
            "blocks": blocks,
            "bytes_per_block": filled / blocks,
            "replacements": replacements,
            "bytes_per_block_after": (resident_bytes() - before) / blocks,
            "seconds": time.perf_counter() - began,
        }

    def _tell(self, steps: Iterable[Step]) -> None:
        for step in steps:
            for message in self._directory.mail(step, "runs"):
                self._directory.apply(message)

    def _check(self, chain: int) -> None:
        question = self._directory.question(Part(chain, 0, CHAIN_BLOCKS))
        found, true = self._directory.depths(self._directory.ask(question)), shared_depths(chain)
        if found != true:
            raise ValueError(f"chain {chain}: instances have {true} blocks of it, the answer says {found}")


class PoolBench:
    """Commands for a Pool."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._next = 0
        self._prepared: list[Any] = []
        self._units = 0

    def fill(self) -> None:
        """Fill the pool, so that every allocation evicts."""
        for life in pool_filling():
            self._pool.live(self._pool.prepare(life))
            self._pool.settle()
            self._next += 1

    def prepare(self, steps: int, blocks: int) -> None:
        """Make what the next sample needs."""
        self._prepared = [self._pool.prepare(life) for life in lives(self._next, steps, blocks)]
        self._next += steps
        self._units = steps * blocks

    def apply(self) -> dict[str, float]:
        """Live through what was prepared. Returns the sample, in blocks."""
        return _timed(self._pool.live, self._prepared, self._units, self._pool.settle)


class WireBench:
    """Commands for a Service."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._chains = 0
        self._next = 0
        self._steps: list[Step] = []

    def fill(self, live: int) -> dict[str, float]:
        """Make the live set that steps then replace. Raises ValueError: not all of it arrived."""
        self._chains = self._next = live_chains(live)
        self._lay_ready(filling(self._chains))
        began = time.perf_counter()
        ended = self._service.take_in()
        seconds = time.perf_counter() - began
        counted = self._counted(every=_CHECKED_OF_FILL)
        if not ended or counted["found"] < counted["told"]:
            raise ValueError(f"of {counted['told']} chains {counted['found']} arrived")
        return {"blocks": self._chains * CHAIN_BLOCKS, "seconds": seconds}

    def prepare(self, steps: int) -> None:
        """Lay the messages of the next sample ready: at most the whole live set, so that what was told is there
        afterwards.
        """
        steps = min(steps, self._chains)
        self._lay_ready(replacing(self._chains, self._next, steps))
        self._next += steps

    def apply(self) -> dict[str, float]:
        """Have what was laid ready taken in.

        Returns: the sample, in block events of chains that arrived; whether its end was seen (`ended`); how many chains
            it told
        and how many of these are `found` afterwards; how many it withdrew and how many of these are `stale`: still
        there.
        """
        cpu_s = self._service.cpu_s()
        with _frozen():
            began = time.perf_counter()
            ended = self._service.take_in()
            wall_s = time.perf_counter() - began
        sample = {"wall_s": wall_s, "cpu_s": self._service.cpu_s() - cpu_s, "ended": float(ended)}
        return sample | self._counted()

    def close(self) -> None:
        """End the service."""
        self._service.close()

    def _lay_ready(self, steps: Iterable[Step]) -> None:
        self._steps = list(steps)
        self._service.lay_ready([message for step in self._steps for message in self._service.mail(step)])

    def _counted(self, every: int = 1) -> dict[str, float]:
        """What the service has of the steps, or of some.

        A chain that was lost counts nothing, neither does one that is stale.
        """
        steps = self._steps[::every]
        created = [(step.created, step.instance) for step in steps if step.created is not None]
        withdrawn = [(step.withdrawn, step.instance) for step in steps if step.withdrawn is not None]
        found = sum(self._service.depth(part, instance) == part.count for part, instance in created)
        stale = sum(self._service.depth(part, instance) > 0 for part, instance in withdrawn)
        units = (found + len(withdrawn) - stale) * CHAIN_BLOCKS
        return {"units": units, "told": len(created), "found": found, "withdrawn": len(withdrawn), "stale": stale}


class ServedBench:
    """Commands for a Served. Who asks while the clock runs is another process, the same for all sides."""

    def __init__(self, service: Served) -> None:
        self._service = service
        self._chains = 0

    def share(self, live: int) -> dict[str, int]:
        """Make the residencies that are asked for."""
        self._chains = shared_chains(live)
        self._service.tell(list(sharing(self._chains)))
        return {"blocks": sum(sum(shared_depths(chain)) for chain in range(self._chains))}

    def lay(self, blocks: int, count: int, folder: str) -> dict[str, str]:
        """Write questions about prompts of so many blocks into files, one for each kind, each question behind its
        length (u32), and have each answered once.

        Returns: the files, by kind. Raises ValueError: an answer is wrong.
        """
        chosen = np.random.default_rng([4, blocks]).integers(0, self._chains, count)
        connection = http.client.HTTPConnection("127.0.0.1", self._service.port, timeout=60)
        files: dict[str, str] = {}
        for kind in self._service.kinds():
            file = Path(folder) / f"{type(self._service).__name__}-{kind}-{blocks}"
            written = bytearray()
            for chain in chosen:
                asked = self._service.question(kind, Part(int(chain), 0, blocks))
                connection.request(
                    "POST", asked.path, asked.checked or asked.body, {"Content-Type": "application/json"}
                )
                found = self._service.depths(kind, connection.getresponse().read())
                true = [min(blocks, depth) for depth in shared_depths(int(chain))]
                if found != true:
                    raise ValueError(f"{kind}, chain {chain}: instances have {true} blocks, the answer says {found}")
                head = (
                    f"POST {asked.path} HTTP/1.1\r\nhost: 127.0.0.1:{self._service.port}\r\n"
                    f"content-type: application/json\r\ncontent-length: {len(asked.body)}\r\n\r\n"
                )
                whole = head.encode() + asked.body
                written += struct.pack("<I", len(whole)) + whole
            file.write_bytes(written)
            files[kind] = str(file)
        connection.close()
        return files

    def where(self) -> dict[str, int]:
        """The port that is asked."""
        return {"port": self._service.port}

    def used(self) -> dict[str, float]:
        """CPU seconds so far."""
        return {"cpu_s": self._service.cpu_s()}

    def close(self) -> None:
        """End the service."""
        self._service.close()


class StoreBench:
    """Commands for a Store. A sample moves all blocks once, in runs."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._generation = 0
        self._runs: list[tuple[Any, list[int]]] = []

    def put(self, blocks: int, block_bytes: int) -> dict[str, float]:
        """Store all blocks, where none was. Returns the sample, in bytes."""
        self._store.clear()
        self._runs = self._new_runs(blocks)
        return self._timed(self._store.put, blocks * block_bytes, self._store.settle)

    def get(self, blocks: int, block_bytes: int) -> dict[str, float]:
        """Bring back what was put last, runs in random order. Raises ValueError: wrong bytes came."""
        order = np.random.default_rng(self._generation).permutation(len(self._runs))
        self._runs = [self._runs[at] for at in order]
        sample = self._timed(self._store.get, blocks * block_bytes, lambda: None)
        if wrong := self._store.wrong():
            raise ValueError(f"{wrong} of {blocks} blocks came back with other bytes")
        return sample

    def register(self, blocks: int) -> dict[str, float]:
        """Reserve, commit and find that many new blocks, in runs. Returns the sample, in blocks."""
        self._store.clear()
        self._runs = self._new_runs(blocks)
        return self._timed(lambda keys, _: self._store.register(keys), blocks, lambda: None)

    def close(self) -> None:
        """End the store."""
        self._store.close()

    def _new_runs(self, blocks: int) -> list[tuple[Any, list[int]]]:
        self._generation += 1
        runs = [list(range(at, min(at + STORE_RUN_BLOCKS, blocks))) for at in range(0, blocks, STORE_RUN_BLOCKS)]
        return [(self._store.keys(run, self._generation), run) for run in runs]

    def _timed(
        self, work: Callable[[Any, list[int]], object], units: float, settle: Callable[[], object]
    ) -> dict[str, float]:
        clock, others_s = _Clock(), self._store.cpu_s()
        with _frozen(), clock:
            for keys, run in self._runs:
                work(keys, run)
            settle()
        return {"wall_s": clock.wall_s, "cpu_s": clock.cpu_s + self._store.cpu_s() - others_s, "units": units}
