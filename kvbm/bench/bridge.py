"""`kvbm bench bridge`: a foreign engine's messages, from the bytes of its publisher to frames that a publisher of ours
takes; and what a block costs that is held.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import msgspec

from kvbm.assembly import NEW_FOREIGN_TABLE
from kvbm.bench.measure import Row, rate, resident_bytes
from kvbm.bridge.instance import BridgedInstance, BridgeLimits, Names
from kvbm.bridge.source import BridgedSource
from kvbm.bridge.table import engine_table
from kvbm.core.events import PoolStated
from kvbm.core.ids import Epoch, InstanceId, Offset, Tier
from kvbm.manager.record.publisher_port import Publishing
from kvbm.streams.base import ORIGIN, Position
from kvbm.streams.foreign.declared import Said
from kvbm.streams.foreign.identity import ForeignSource
from kvbm.streams.foreign.state import ForeignState, Input, PublishedMessage
from kvbm.streams.foreign.wire import Kind, decode_batch

BATCH_BLOCKS = 32
_BLOCK_TOKENS = 16
_SAMPLE_BLOCKS = 1 << 15
_SAMPLE_EVENTS = 1 << 13
_VOCABULARY = 128_000
_GOLDEN = 0x9E3779B97F4A7C15  # times a number: as a hash of it


class _Engine:
    """Publishes as a vLLM engine whose cache is full: each batch of blocks takes the place of the one stored longest
    ago.
    """

    def __init__(self, live: int, seed: int) -> None:
        self._choose, self._live = random.Random(seed), live
        self._first = self._next = self._sequence = 0  # blocks are numbered, so what is held takes no memory here

    def messages(self, blocks: int, batch: int) -> list[PublishedMessage]:
        return [self._message(batch) for _ in range(blocks // batch)]

    def _message(self, batch: int) -> PublishedMessage:
        choose, events = self._choose, []
        keys = self._keys(batch, self._next)
        self._next += batch
        stored = {
            "type": "BlockStored",
            "block_hashes": keys,
            "parent_block_hash": None,
            "token_ids": [choose.randrange(_VOCABULARY) for _ in range(batch * _BLOCK_TOKENS)],
            "block_size": _BLOCK_TOKENS,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "extra_keys": [None] * batch,
            "group_idx": 0,
        }
        while self._next - self._first > self._live:
            gone = self._keys(batch, self._first)
            self._first += batch
            events.append({"type": "BlockRemoved", "block_hashes": gone, "medium": "GPU", "group_idx": 0})
        self._sequence += 1
        return PublishedMessage(self._sequence - 1, msgspec.msgpack.encode([1.5, [*events, stored], 0]))

    @staticmethod
    def _keys(count: int, first: int) -> list[int]:
        return [(number + 1) * _GOLDEN % (1 << 64) for number in range(first, first + count)]


class _Wire:
    """What a source needs of sockets, in memory."""

    is_connected, unreadable = True, 0

    def __init__(self) -> None:
        self.waiting: list[Input] = []

    def sockets(self) -> list[Any]:
        return []

    def receive(self, limit: int) -> Iterator[Input]:
        taken, self.waiting = self.waiting[:limit], self.waiting[limit:]
        yield from taken

    def ask(self, start: int) -> None:
        """Nothing is lost."""

    def end_ask(self) -> None:
        """Nothing is asked."""

    def close(self) -> None:
        """Nothing is open."""


class _Bridge:
    """One source of the bridge, and a publisher that takes its frames at once."""

    def __init__(self) -> None:
        self._wire, self._now_s = _Wire(), 0.0
        name, known = InstanceId("a"), ForeignSource("model", most_blocks=1 << 28)
        pools = [PoolStated(tier, 0, 0) for tier in (Tier.HBM, Tier.HOST, Tier.NVME)]
        blocks, ledger = engine_table(NEW_FOREIGN_TABLE, name, known, pools, Said(), True)
        state = ForeignState(blocks, partial(decode_batch, kind=Kind.VLLM), can_replay=False)
        self._source = BridgedSource("a", self._wire, state, False, 5.0, lambda: self._now_s)
        limits = BridgeLimits(1.0, 1 << 26, 1 << 30)
        self._instance = BridgedInstance(
            Names(name, "bench", "run"), ledger, limits, lambda: self._now_s, lambda: 1, self._source, Epoch(1)
        )
        self._source.instance = self._instance
        self._published = Position(Epoch(1), Offset(0))
        self._instance.start(
            Publishing(lambda: None, lambda: self._published, lambda timeout_s: True, lambda: None, lambda: "")
        )
        self._ledger = ledger

    def memory_bytes(self) -> int:
        """Of the process, but for frames that a reader could ask for again: those are bounded by themselves."""
        return resident_bytes() - sum(len(frame.data) for frame in self._instance.log.read_after(ORIGIN, 1 << 40))

    def take(self, messages: list[PublishedMessage]) -> None:
        """From bytes to frames."""
        self._wire.waiting += messages
        while self._wire.waiting:
            self._now_s += 0.01
            self._source.turn(self._now_s)
            self._published = Position(self._ledger.epoch, self._ledger.applied)

    @property
    def held(self) -> int:
        return self._ledger.counts(Tier.HBM).held


def bench_bridge(live: int, replacements: int, samples: int, seed: int) -> tuple[list[Row], dict[str, float]]:
    """One source of the bridge, on one core."""
    engine, bridge = _Engine(live, seed), _Bridge()
    bridge.take(engine.messages(1 << 12, BATCH_BLOCKS))
    gc.collect()
    before, held = bridge.memory_bytes(), bridge.held
    _fill(engine, bridge, live - held)
    filled = bridge.memory_bytes() - before
    for _ in range(replacements):
        _fill(engine, bridge, live)
    churned = bridge.memory_bytes() - before
    grown = max(1, bridge.held - held)

    def batches(messages: list[PublishedMessage]) -> Callable[[], object]:
        return lambda: bridge.take(messages)

    runs = samples + 1
    whole = [batches(engine.messages(_SAMPLE_BLOCKS, BATCH_BLOCKS)) for _ in range(runs)]
    what = f"blocks stored in batches of {BATCH_BLOCKS}, as many removed, wire bytes to frames"
    rows = [rate(what, "M blocks/s", _SAMPLE_BLOCKS, whole, 1e6)]
    single = [batches(engine.messages(_SAMPLE_EVENTS, 1)) for _ in range(runs)]
    rows.append(rate("messages of one stored block, and one removed", "k events/s", 2 * _SAMPLE_EVENTS, single, 1e3))
    rows.append(Row(what=f"memory, of {live:,} blocks held", unit="B each", value=filled / grown))
    if replacements:
        rows.append(Row(what=f"… after {replacements} replacements of all", unit="×", value=churned / max(1, filled)))
    numbers = {
        "bridge_blocks_per_s": rows[0].value * 1e6,
        "bridge_events_per_s": rows[1].value * 1e3,
        "bridge_bytes_per_block": rows[2].value,
    }
    return rows, numbers


def _fill(engine: _Engine, bridge: _Bridge, blocks: int) -> None:
    """Store so many blocks, piece by piece, so that their messages take no memory."""
    for _ in range(0, blocks, _SAMPLE_BLOCKS):
        bridge.take(engine.messages(min(blocks, _SAMPLE_BLOCKS), BATCH_BLOCKS))
