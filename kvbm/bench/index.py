"""`kvbm bench index`: the catalog's index under the events of 16 instances, and of 7,000.

The live set: nine tenths are chains of 256 blocks that one instance holds; one tenth are chains that all 16 instances
hold, each to another depth (16, 32, … 256 blocks), as shared prompts are. Churn replaces the oldest chains of single
instances. Frames carry the bytes a manager writes: slots, parents, digests left at 0.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from kvbm.assembly import NATIVE, NATIVE_INDEX
from kvbm.bench.measure import Row, percentile, rate, resident_bytes, timed
from kvbm.bench.native import random_lines_ns
from kvbm.catalog.index.cluster_index import ClusterIndex, StreamPlace
from kvbm.catalog.index.plain_frames import RUN_BYTES, Threaded
from kvbm.core.codec import Frame
from kvbm.core.events import (
    BlocksCreated,
    BlocksEvicted,
    Event,
    EvictReason,
    InstanceStarted,
    PoolStated,
    SnapshotEnded,
)
from kvbm.core.ids import HASH_BYTES, NO_PARENT, Epoch, InstanceId, Namespace, Offset, SequenceHash, Tier, pack_slots
from kvbm.streams.child import python
from kvbm.terminal import say

INSTANCES = 16
_CHAIN_BLOCKS = 256
_RUN_BLOCKS = 16
_SPACE = Namespace(model="bench", block_tokens=16).id
_POOL = PoolStated(Tier.HBM, 1 << 24, 1 << 20)
_EVENTS_A_SAMPLE = 1 << 20
_SLOTS = {blocks: pack_slots(range(blocks)) for blocks in (1, _RUN_BLOCKS)}


class Writer:
    """The stream of one instance: events → frames."""

    def __init__(self, number: int) -> None:
        self.name = InstanceId(f"instance-{number:05}")
        self._offset = 0

    def frame(self, events: list[Event]) -> bytes:
        """One frame of these events."""
        frame = Frame(
            instance=self.name,
            epoch=Epoch(1),
            first_offset=Offset(self._offset),
            wall_time_ns=0,
            digest=0,
            events=tuple(events),
        )
        self._offset += len(events)
        return NATIVE.encode_frame(frame)

    def begin(self) -> bytes:
        """The epoch's first frame: a start and an empty snapshot."""
        return self.frame(
            [InstanceStarted(epoch=Epoch(1), pools=(_POOL,)), SnapshotEnded(tier=Tier.HBM, snapshot=1, count=0)]
        )


def created(chain: bytes, run_blocks: int = _RUN_BLOCKS) -> list[Event]:
    """A chain's creation, run by run."""
    events: list[Event] = []
    for at in range(0, len(chain) // HASH_BYTES, run_blocks):
        begin, end = at * HASH_BYTES, (at + run_blocks) * HASH_BYTES
        parent = SequenceHash(chain[begin - HASH_BYTES : begin]) if at else NO_PARENT
        hashes = chain[begin:end]
        slots = _SLOTS.get(len(hashes) // HASH_BYTES) or pack_slots(range(len(hashes) // HASH_BYTES))
        events.append(
            BlocksCreated(namespace=_SPACE, tier=Tier.HBM, hashes=hashes, slots=slots, parent=parent, start=at)
        )
    return events


def evicted(chain: bytes, run_blocks: int = _RUN_BLOCKS) -> list[Event]:
    """A chain's eviction, run by run, deepest first."""
    step = run_blocks * HASH_BYTES
    return [
        BlocksEvicted(namespace=_SPACE, tier=Tier.HBM, reason=EvictReason.CAPACITY, hashes=chain[at : at + step])
        for at in reversed(range(0, len(chain), step))
    ]


class LiveSet:
    """An index at a constant number of residencies."""

    def __init__(self, live: int, seed: int) -> None:
        self.index: ClusterIndex = NATIVE_INDEX(2 * live + (1 << 20))
        self.rng = np.random.default_rng(seed)
        self.writers = [Writer(number) for number in range(INSTANCES)]
        self.shared: list[bytes] = []
        self.own: list[deque[bytes]] = [deque() for _ in range(INSTANCES)]
        for writer in self.writers:
            self.index.apply(writer.begin())
        steps = range(_RUN_BLOCKS, _CHAIN_BLOCKS + 1, _CHAIN_BLOCKS // INSTANCES)
        for _ in range(max(1, live // 10 // sum(steps))):
            chain = self._chain()
            self.shared.append(chain)
            for writer, depth in zip(self.writers, steps, strict=True):
                self.index.apply(writer.frame(created(chain[: depth * HASH_BYTES])))
        left = (live - self.index.residency_count()) // _CHAIN_BLOCKS
        for number in range(left):
            chain = self._chain()
            self.own[number % INSTANCES].append(chain)
            self.index.apply(self.writers[number % INSTANCES].frame(created(chain)))

    def _chain(self) -> bytes:
        return self.rng.bytes(_CHAIN_BLOCKS * HASH_BYTES)

    def churn(self, events: int, run_blocks: int = _RUN_BLOCKS, frame_blocks: int = 256) -> Iterator[bytes]:
        """Frames that replace chains: half the blocks of each created, half evicted."""
        half = frame_blocks // 2
        at_once = max(1, half // _CHAIN_BLOCKS)  # chains of one instance that a frame replaces
        for number in range(events // (2 * _CHAIN_BLOCKS * at_once)):
            writer, chains = self.writers[number % INSTANCES], self.own[number % INSTANCES]
            gains: list[Event] = []
            losses: list[Event] = []
            for _ in range(at_once):
                chains.append(self._chain())
                gains += created(chains[-1], run_blocks)
                losses += evicted(chains.popleft(), run_blocks)
            runs = max(1, half // run_blocks)
            for begin in range(0, len(gains), runs):
                yield writer.frame(losses[begin : begin + runs] + gains[begin : begin + runs])

    def applying(self, frames: list[bytes]) -> Callable[[], None]:
        """Apply frames one after the other."""
        apply = self.index.apply

        def work() -> None:
            for frame in frames:
                apply(frame)

        return work

    def queries(self, count: int) -> list[bytes]:
        """Chains to ask for: half shared, half of single instances."""
        own = [chain for chains in self.own for chain in chains]
        picks = self.rng.integers(0, 1 << 30, count)
        return [
            (self.shared if at % 2 else own)[int(pick) % len(self.shared if at % 2 else own)]
            for at, pick in enumerate(picks)
        ]


def bench_index(
    live: tuple[int, ...], replacements: int, samples: int, seed: int
) -> tuple[list[Row], dict[str, float]]:
    """Apply, memory, queries, death, checkpoint, for each size of the live set; then the same prefix for 7,000
    instances.
    """
    rows: list[Row] = []
    numbers: dict[str, float] = {}
    for size in live:
        found, named = _at_size(size, replacements, samples, seed)
        rows += found
        numbers |= named  # of the last, which is the largest when they are given in order
    rows += _many_instances(samples, seed)
    return rows, numbers


def _at_size(size: int, replacements: int, samples: int, seed: int) -> tuple[list[Row], dict[str, float]]:
    label = f"{size / 1e6:g} M live"
    memory = _memory_in_a_fresh_process(size, seed)
    began = time.perf_counter()
    live = LiveSet(size, seed)
    accounted = sum(live.index.memory().values()) / live.index.residency_count()
    say(f"  ({label}: filled in {time.perf_counter() - began:.0f} s)", to=sys.stderr)
    rows: list[Row] = []

    def applied(what: str, events: int, run_blocks: int, frame_blocks: int) -> Row:
        works = [live.applying(list(live.churn(events, run_blocks, frame_blocks))) for _ in range(samples + 1)]
        return rate(f"{what}, {label}", "M events/s", events, works, 1e6)

    rows.append(applied("apply, frames of 256 blocks, runs of 16", _EVENTS_A_SAMPLE, _RUN_BLOCKS, 256))
    apply_rate = rows[-1].value * 1e6
    rows.append(applied("apply, single-block events, 256 a frame", _EVENTS_A_SAMPLE // 4, 1, 256))
    rows.append(applied("apply, single-block events, 2 a frame", _EVENTS_A_SAMPLE // 16, 1, 2))
    rows.append(Row(what=f"memory, resident, {label}", unit="B/residency", value=memory))
    rows.append(Row(what=f"memory, as the index counts it, {label}", unit="B/residency", value=accounted))
    idle = _ask(live, 20_000)
    rows.append(Row(what=f"prefix query, 256 hashes, p50, {label}", unit="us", value=percentile(idle, 0.5)))
    rows.append(Row(what=f"prefix query, 256 hashes, p99, {label}", unit="us", value=percentile(idle, 0.99)))
    table = live.index.memory()["table"]
    limit = percentile(random_lines_ns(table, _CHAIN_BLOCKS, 4096, seed), 0.5) / 1e3
    rows.append(Row(what=f"the limit: 256 random cache lines of as much memory, p50, {label}", unit="us", value=limit))
    busy, achieved = _ask_while_applying(live, 20_000, 1_000_000)
    rows.append(Row(what=f"the same while events apply, p50, {label}", unit="us", value=percentile(busy, 0.5)))
    rows.append(Row(what=f"the same while events apply, p99, {label}", unit="us", value=percentile(busy, 0.99)))
    rows.append(Row(what=f"events applied meanwhile, {label}", unit="M events/s", value=achieved / 1e6))
    beside, achieved = ask_beside_runs(live, 20_000, 1_000_000)
    rows.append(
        Row(
            what=f"the same beside runs of frames of 256 blocks, p50, {label}", unit="us", value=percentile(beside, 0.5)
        )
    )
    rows.append(
        Row(
            what=f"the same beside runs of frames of 256 blocks, p99, {label}",
            unit="us",
            value=percentile(beside, 0.99),
        )
    )
    rows.append(Row(what=f"events applied beside, {label}", unit="M events/s", value=achieved / 1e6))
    if replacements:
        settled = resident_bytes()
        for _ in range(replacements):
            for frame in live.churn(2 * size):
                live.index.apply(frame)
        grown = resident_bytes() / settled
        rows.append(
            Row(what=f"resident memory after {replacements} replacements over before, {label}", unit="x", value=grown)
        )
    written = _checkpoint(live, label)
    rows += written
    pauses = [row.value for row in written if row.what.startswith("longest frame")] if size >= 50_000_000 else []
    rows += _death(live, label)
    return rows, {
        **({"checkpoint_pause_ms_50m": pauses[0]} if pauses else {}),
        "apply_events_per_s": apply_rate,
        "bytes_per_residency": memory,
        "query_us_p50": percentile(idle, 0.5),
        "query_us_p99": percentile(busy, 0.99),
        "query_us_p99_small_frames": percentile(beside, 0.99),
    }


def _memory_in_a_fresh_process(size: int, seed: int) -> float:
    program = f"from kvbm.bench.index import print_memory; print_memory({size}, {seed})"
    done = subprocess.run(python("-c", program), check=True, capture_output=True, text=True, timeout=600)
    return float(done.stdout)


def print_memory(size: int, seed: int) -> None:
    """Resident bytes a residency of a live set in this process, which has had none before; the chains it remembers left
    out.
    """
    before = resident_bytes()
    live = LiveSet(size, seed)
    own_bytes = sum(len(chain) + 40 for chains in [*live.own, live.shared] for chain in chains)
    print((resident_bytes() - before - own_bytes) / live.index.residency_count())


def _ask(live: LiveSet, count: int) -> list[float]:
    """Microseconds of each query, from Python, answer and all."""
    ask, clock = live.index.prefixes, time.perf_counter_ns
    questions = live.queries(count + 1000)
    taken: list[float] = []
    for known in questions:
        chain = bytes(bytearray(known))  # hashes that were just computed are in the cache
        began = clock()
        ask(_SPACE, chain)
        taken.append((clock() - began) / 1e3)
    return taken[1000:]


def _ask_while_applying(live: LiveSet, count: int, events_per_s: int) -> tuple[list[float], float]:
    """The same while another thread applies events at a steady pace; microseconds, and the pace it came to.

    Busy streams have frames of up to 64 KiB (2,560 blocks here), which are applied without the GIL. Python hands the
    GIL over every 0.2 ms here, for else the applying thread would wait up to 5 ms for it each time, and never come to
    its pace.
    """
    blocks = 10 * _CHAIN_BLOCKS
    frames = list(live.churn(8 * events_per_s // 2, frame_blocks=blocks))
    done = 0
    stop = threading.Event()

    def work() -> None:
        nonlocal done
        begun = time.perf_counter()
        for frame in frames:
            live.index.apply(frame)
            done += blocks
            ahead = begun + done / events_per_s - time.perf_counter()
            if ahead > 0:
                time.sleep(ahead)
            if stop.is_set():
                return

    interval = sys.getswitchinterval()
    thread = threading.Thread(target=work, name="bench-apply")
    sys.setswitchinterval(0.0002)
    try:
        began = time.perf_counter()
        thread.start()
        taken = _ask(live, count)
        elapsed = time.perf_counter() - began
        achieved = done / elapsed
        stop.set()
        thread.join()
    finally:
        sys.setswitchinterval(interval)
    for frame in frames[done // blocks :]:  # the streams stay whole
        live.index.apply(frame)
    return taken, achieved


def ask_beside_runs(live: LiveSet, count: int, events_per_s: int) -> tuple[list[float], float]:
    """Questions while frames of 256 blocks are applied in runs by the index's own thread, begun by who asks, as the
    catalog does it.

    Returns: microseconds of each query, and the pace it came to.
    """
    index = live.index
    assert isinstance(index, Threaded)
    for writer in live.writers:
        index.miss(writer.name)  # their frames have no digests
    blocks = 256
    frames = list(live.churn(4 * events_per_s, frame_blocks=blocks))
    scanned = [NATIVE.scan_frames(frame)[0][0] for frame in frames]
    places: dict[InstanceId, StreamPlace] = {}
    for one in scanned:
        places.setdefault(one.instance, StreamPlace(one.instance, one.epoch, one.first_offset))
    names = list(places)
    messages = [(names.index(one.instance), frame) for one, frame in zip(scanned, frames, strict=True)]
    per_run = max(1, RUN_BYTES // 8 // len(frames[0]))
    ask, clock = index.prefixes, time.perf_counter_ns
    questions = [bytes(bytearray(known)) for known in live.queries(count)]
    taken: list[float] = []
    thread = index.apply_thread()
    ended = select.poll()
    ended.register(thread.fileno(), select.POLLIN)
    at, done, is_under_way, began_s = 0, 0, False, time.perf_counter()
    for question in questions:
        if is_under_way and ended.poll(0):
            applied = thread.finish()
            places = {
                name: place._replace(offset=reached.offset)
                for (name, place), reached in zip(places.items(), applied.places, strict=True)
            }
            assert applied.messages == min(per_run, len(messages) - at), "a frame of the benchmark is not plain"
            done, at, is_under_way = done + applied.blocks, at + applied.messages, False
        if not is_under_way and at < len(messages) and done <= events_per_s * (time.perf_counter() - began_s):
            thread.begin(messages[at : at + per_run], list(places.values()))
            is_under_way = True
        began = clock()
        ask(_SPACE, question)
        taken.append((clock() - began) / 1e3)
    elapsed_s = time.perf_counter() - began_s
    if is_under_way:
        at += thread.finish().messages
    thread.close()
    for frame in frames[at:]:  # the streams stay whole
        index.apply(frame)
    return taken, done / elapsed_s


def _checkpoint(live: LiveSet, label: str) -> list[Row]:
    index, rows = live.index, []
    with tempfile.TemporaryDirectory(prefix="kvbm-bench-") as folder:
        path = str(Path(folder) / "checkpoint")
        alone = timed(lambda: index.write_checkpoint(path))  # type: ignore[attr-defined]
        rows.append(Row(what=f"checkpoint, written, {label}", unit="s", value=alone.wall_s))
        rows.append(
            Row(what=f"checkpoint, size, {label}", unit="B/block", value=os.path.getsize(path) / index.block_count())
        )
        rows.append(pause_beside_checkpoint(live, path, label))
        other = NATIVE_INDEX(2 * index.residency_count() + (1 << 20))
        loaded = timed(lambda: other.load_checkpoint(path))  # type: ignore[attr-defined]
        rows.append(Row(what=f"checkpoint, loaded, {label}", unit="s", value=loaded.wall_s))
    return rows


def pause_beside_checkpoint(live: LiveSet, path: str, label: str) -> Row:
    """The longest that the application of a frame takes while a checkpoint is written to `path`."""
    frames = list(live.churn(_EVENTS_A_SAMPLE))
    pauses: list[float] = []
    writing = threading.Thread(target=live.index.write_checkpoint, args=(path,))  # type: ignore[attr-defined]
    writing.start()
    for frame in frames:  # all of them, for later parts rely on what they create
        began = time.perf_counter()
        live.index.apply(frame)
        if writing.is_alive():
            pauses.append(time.perf_counter() - began)
    writing.join()
    what = f"longest frame of 256 blocks while a checkpoint is written, {label}"
    return Row(what=what, unit="ms", value=max(pauses, default=0.0) * 1e3)


def _death(live: LiveSet, label: str) -> list[Row]:
    index, name = live.index, live.writers[3].name
    mine = live.own[3][0]
    assert index.prefixes(_SPACE, mine).deepest == _CHAIN_BLOCKS
    death = timed(lambda: index.drop(name))
    assert index.prefixes(_SPACE, mine).deepest == 0

    def sweep() -> None:
        while index.sweep(64):
            pass

    swept = timed(sweep)
    return [
        Row(what=f"an instance's death, until no query sees it, {label}", unit="us", value=death.wall_s * 1e6),
        Row(what=f"sweep after it, {label}", unit="s", value=swept.wall_s, cpu=swept.cpu_s / swept.wall_s),
    ]


def _many_instances(samples: int, seed: int) -> list[Row]:
    """One prompt: its first 8 blocks held by 7,000 instances, the rest by 16 of them; the best 10 asked for."""
    index, rng = NATIVE_INDEX(1 << 24), np.random.default_rng(seed)
    chains = [rng.bytes(_CHAIN_BLOCKS * HASH_BYTES) for _ in range(64)]
    for number in range(7000):
        writer = Writer(number)
        index.apply(writer.begin())
        for at, chain in enumerate(chains):
            depth = _CHAIN_BLOCKS if (number + at) % 437 == 0 else 8
            index.apply(writer.frame(created(chain[: depth * HASH_BYTES])))
    assert len(index.prefixes(_SPACE, chains[0], 10).instances) == 10
    ask = index.prefixes

    def asking(best: int, times: int) -> Callable[[], None]:
        def work() -> None:
            for at in range(times):
                ask(_SPACE, chains[at % len(chains)], best)

        return work

    return [
        rate("queries, 7,000 instances, 256 hashes, best 10", "queries/s", 4096, [asking(10, 4096)] * (samples + 1)),
        rate("the same, all 7,000 in the answer", "queries/s", 64, [asking(0, 64)] * (samples + 1)),
    ]
