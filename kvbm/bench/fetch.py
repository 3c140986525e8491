"""`kvbm bench fetch`: what blocks from another instance's memory cost, beside what the machine does without us.

The lender is a manager in a process of its own, as an engine that owns HBM has it. The reader has the table of peers
that a manager reads with, and rows in a HOST pool. Every read is of blocks whose bytes this process computes too, into
rows that were overwritten before, and each byte is compared afterwards. All sides of a comparison are run in turn, each
round begun by another.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kvbm.assembly import NATIVE_LEDGER
from kvbm.bench.bare_sockets import BareStreams
from kvbm.bench.fetch_sides import BenchReader, CpuTimes, start_lender
from kvbm.bench.lender import BUSY, IDLE, NAMESPACE, hashes_of
from kvbm.bench.measure import Found, Row, difference_of, row_of, within_noise
from kvbm.bench.memcpy import Memcpy, faster
from kvbm.bench.nixl_reads import open_nixl
from kvbm.bench.racks import bench_racks
from kvbm.core.events import PoolStated
from kvbm.core.ids import NO_PARENT, Epoch, SequenceHash, Tier

_MIB = 1 << 20
_SMALL_BYTES = 64 << 10
_SMALL_BLOCKS = 64
_LENT = 1000
_LENDS = 50  # timed for each sample
_LINK_BYTES = 32 * _MIB  # of a read through the link with a limit
_STREAMS = 2  # of a read over TCP
_GOALS = {
    "memory_over_memcpy": "≥ 0.70",
    "memory_over_tcp": "≥ 2",
    "tcp_over_sockets": "≥ 0.80",
    "memory_over_nixl": "≥ 2.5",
    "tcp_over_nixl": "≥ 1",
    "fetch_us_over_bare": "≤ 60",
    "fetch_busy_over_idle": "≤ 3",
    "lend_us": "≤ 40",
}


class FetchOptions(NamedTuple):
    """What is read.

    Attributes:
        read_bytes: of one large read, in blocks of 1 MiB.
        fetches: small ones in a row, of which the median counts.
        idle_s: how long connections do nothing while their CPU time is counted.
    """

    read_bytes: int = 128 * _MIB
    fetches: int = 200
    idle_s: float = 3.0


def bench_fetch(options: FetchOptions, samples: int, seed: int) -> Found:
    """Large reads, small ones, connections that do nothing, a link between the two, and the ledger's share."""
    parts: list[Found] = []
    for part in (_large, _small, _racks):
        with tempfile.TemporaryDirectory(prefix="kvbm-bench-") as folder, ExitStack() as opened:
            parts.append(part(Path(folder), opened, options, samples, seed))
    parts.append(_lend(samples, seed))
    return Found(
        [row for part in parts for row in part.rows],
        {key: value for part in parts for key, value in part.numbers.items()},
        tuple(note for part in parts for note in part.notes),
    )


def _large(folder: Path, opened: ExitStack, options: FetchOptions, samples: int, seed: int) -> Found:
    """Reads of many blocks of 1 MiB, and then the connections they leave."""
    blocks = max(1, options.read_bytes // _MIB)
    lender = start_lender(folder, blocks, _MIB, seed, opened)
    reader = BenchReader(lender, folder, blocks, _MIB, seed)
    opened.callback(reader.close)
    there = lender.memory()
    memcpy = Memcpy(reader.rows, there, _MIB, reader.threads)
    opened.callback(memcpy.close)
    sockets = BareStreams(lender.bare, is_tcp=True, count=_STREAMS)
    opened.callback(sockets.close)
    listening = CpuTimes.of_lender(lender.pid)
    sides: dict[str, Callable[[], float]] = {
        "memory": lambda: reader.read_s("memory"),
        "tcp": lambda: reader.read_s("tcp"),
        "shares": lambda: reader.timed(memcpy.shares, there),
        "blocks": lambda: reader.timed(memcpy.blocks, there),
        "sockets": lambda: reader.timed(sockets.pull, there),
    }
    nixl, nixl_notes = open_nixl(lender, blocks, _MIB, opened)
    sides |= {name: partial(reads.read_s, there) for name, reads in nixl.items()}
    taken = _in_turn(sides, samples)
    rates = {name: [blocks * _MIB / one for one in taken_s] for name, taken_s in taken.items()}
    copied, way = faster(rates["shares"], rates["blocks"])
    size = f"{blocks} blocks of 1 MiB"
    rows = [
        row_of(f"fetch through memory, {size}", "MB/s", [one / 1e6 for one in rates["memory"]]),
        row_of(f"memcpy of the same by {reader.threads} threads, {way}", "MB/s", [one / 1e6 for one in copied]),
        row_of(f"fetch over TCP, {size}", "MB/s", [one / 1e6 for one in rates["tcp"]]),
        row_of(f"{_STREAMS} bare TCP connections, the same", "MB/s", [one / 1e6 for one in rates["sockets"]]),
    ]
    for name, what in (
        ("memory_over_nixl", "NIXL through UCX's shared memory"),
        ("tcp_over_nixl", "NIXL over UCX's TCP"),
    ):
        if name in nixl:
            rows.append(row_of(f"{what}, the same", "MB/s", [one / 1e6 for one in rates[name]]))
    pairs = {
        "memory_over_memcpy": ("memory over memcpy", rates["memory"], copied),
        "memory_over_tcp": ("memory over TCP", rates["memory"], rates["tcp"]),
        "tcp_over_sockets": ("TCP over bare sockets", rates["tcp"], rates["sockets"]),
    }
    for name, what, side in (
        ("memory_over_nixl", "memory over NIXL", "memory"),
        ("tcp_over_nixl", "TCP over NIXL", "tcp"),
    ):
        if name in nixl:
            pairs[name] = (what, rates[side], rates[name])
    numbers: dict[str, float | None] = {"memory_over_nixl": None, "tcp_over_nixl": None}
    for name, (what, ours, limit) in pairs.items():
        row = row_of(f"fetch: {what}", "", [one / other for one, other in zip(ours, limit, strict=True)])
        row.goal, numbers[name] = _GOALS[name], row.value
        rows.append(row)
    idle, notes = _idle(lender.pid, listening, options.idle_s)
    numbers["idle_connection_cpu_share"] = idle.value / 1e6 if idle is not None else None
    return Found(rows + ([idle] if idle is not None else []), numbers, (*notes, *nixl_notes))


def _idle(pid: int, listening: CpuTimes | None, idle_s: float) -> tuple[Row | None, tuple[str, ...]]:
    """What a connection costs that nobody reads over: the lender's threads for it, and those of this process.

    Args:
        listening: the lender's threads before there was a connection.
    """
    if listening is None:
        return None, ("idle_connection_cpu_share: this system does not say what CPU time a thread has had",)
    lender, reader, began_s = CpuTimes.of_lender(pid), CpuTimes.of_reader(), time.perf_counter()
    time.sleep(idle_s)
    waited_s = time.perf_counter() - began_s
    reader_now, lender_now = CpuTimes.of_reader(), CpuTimes.of_lender(pid)
    assert lender is not None and lender_now is not None and reader is not None and reader_now is not None
    connections = max(1, lender.threads - listening.threads)
    used_s = lender_now.cpu_s - lender.cpu_s + reader_now.cpu_s - reader.cpu_s
    what = f"CPU time of a connection that is idle, lender and reader, of {connections} in {idle_s:g} s"
    return Row(what=what, unit="µs/s", value=used_s / waited_s / connections * 1e6), ()


def _small(folder: Path, opened: ExitStack, options: FetchOptions, samples: int, seed: int) -> Found:
    """Fetches of one block of 64 KiB: beside the bare exchange, and while the lender's main thread computes."""
    lender = start_lender(folder, _SMALL_BLOCKS, _SMALL_BYTES, seed, opened)
    reader = BenchReader(lender, folder, _SMALL_BLOCKS, _SMALL_BYTES, seed)
    opened.callback(reader.close)
    there = lender.memory()
    word = BareStreams(lender.bare, is_tcp=False, count=1)
    opened.callback(word.close)
    sides: dict[str, Callable[[], float]] = {}
    for way in ("memory", "tcp"):
        bare = BareStreams(lender.bare, is_tcp=way == "tcp", count=1)
        opened.callback(bare.close)

        def fetch(number: int, way: str = way) -> float:
            return reader.read_one_s(way, number % _SMALL_BLOCKS)

        def exchange(number: int, bare: BareStreams = bare) -> float:
            return reader.timed_one(bare.exchange, number % _SMALL_BLOCKS, there)

        def busy(fetch: Callable[[int], float] = fetch) -> float:
            word.say(BUSY)
            try:
                return _median_us(fetch, options.fetches)
            finally:
                word.say(IDLE)

        sides[way] = partial(_median_us, fetch, options.fetches)
        sides[f"{way} bare"] = partial(_median_us, exchange, options.fetches)
        sides[f"{way} busy"] = busy
    return _small_found(_in_turn(sides, samples))


def _small_found(taken_us: dict[str, list[float]]) -> Found:
    rows: list[Row] = []
    worst: dict[str, float | None] = {}
    notes: list[str] = []
    for way, name in (("memory", "through memory"), ("tcp", "over TCP")):
        ours, bare, busy = (taken_us[key] for key in (way, f"{way} bare", f"{way} busy"))
        more = difference_of(
            f"… more than that {name}", "µs", [one - other for one, other in zip(ours, bare, strict=True)]
        )
        ratio = row_of(
            "… while the lender's main thread computes, over idle", "", [b / a for a, b in zip(ours, busy, strict=True)]
        )
        more.goal, ratio.goal = _GOALS["fetch_us_over_bare"], _GOALS["fetch_busy_over_idle"]
        sockets = "unix sockets" if way == "memory" else "TCP"
        rows += [
            row_of(f"fetch of 64 KiB {name}", "µs", ours),
            row_of(f"… bare exchange over {sockets}", "µs", bare),
            more,
            ratio,
        ]
        if within_noise(more):
            notes.append(f"fetch of 64 KiB {name}: no further from the bare exchange than its noise")
        for key, value in (("fetch_us_over_bare", more.value), ("fetch_busy_over_idle", ratio.value)):
            worst[key] = max(value, worst.get(key) or value)
    return Found(rows, worst, tuple(notes))


def _racks(folder: Path, opened: ExitStack, options: FetchOptions, samples: int, seed: int) -> Found:
    blocks = max(1, min(options.read_bytes, _LINK_BYTES) // _MIB)
    return bench_racks(folder, opened, blocks, samples, seed)


def _in_turn(sides: dict[str, Callable[[], float]], samples: int) -> dict[str, list[float]]:
    """What each side says, round by round; the first round warms up."""
    names = list(sides)
    taken: dict[str, list[float]] = {name: [] for name in names}
    for number in range(-1, samples):
        for at in range(len(names)):
            name = names[(at + number) % len(names)]
            value = sides[name]()
            if number >= 0:
                taken[name].append(value)
    return taken


def _median_us(work: Callable[[int], float], count: int) -> float:
    return float(np.median([work(number) for number in range(count)])) * 1e6


def _lend(samples: int, seed: int) -> Found:
    """The longest run of a namespace found and pinned, and given back, in a ledger of its own."""
    ledger = NATIVE_LEDGER([PoolStated(Tier.HBM, 1, _MIB), PoolStated(Tier.HOST, 2 * _LENT, _MIB)], "lru", 64 << 20, ())
    ledger.start(Epoch(1), [NAMESPACE])
    hashes = hashes_of(_LENT, seed)
    allocation = ledger.allocate(Tier.HOST, _LENT)
    assert allocation is not None
    slots = ledger.create(NAMESPACE.id, Tier.HOST, SequenceHash(NO_PARENT), 0, hashes, allocation.slots)
    ledger.unpin(Tier.HOST, slots)

    def lend(_: int) -> float:
        began_s = time.perf_counter()
        ledger.unpin(Tier.HOST, ledger.lend(NAMESPACE.id, hashes, Tier.HOST).slots)
        return time.perf_counter() - began_s

    taken_us = [_median_us(lend, _LENDS) for _ in range(samples + 1)][1:]
    assert ledger.lend(NAMESPACE.id, hashes, Tier.HOST).slots == slots, "the ledger lends other blocks"
    row = row_of(f"ledger: lend {_LENT:,} blocks and unpin them", "µs", taken_us)
    row.goal = _GOALS["lend_us"]
    return Found([row], {"lend_us": row.value})
