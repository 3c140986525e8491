"""The native table of an engine's blocks makes of every message what `ForeignBlocks` and `HeldLedger` make of it: the
same events, counts and memory, well formed or not, and its stream is legal for a strict reader.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbm.core.events import (
    BlocksEvicted,
    Event,
    EvictReason,
    ResidenciesListed,
    SnapshotEnded,
)
from kvbm.core.ids import Tier, split_hashes
from kvbm.streams.foreign.events import BlocksStored, Cleared, EventBatch, ForeignEvent, Removed
from kvbm.streams.foreign.identity import ForeignSource
from kvbm.streams.foreign.state import EngineConnected, PublishedMessage
from kvbm.streams.foreign.wire import Kind, decode_batch
from tests.bridged import Driven, native, readable
from tests.examples import examples
from tests.foreign_engines import MODEL

TIERS = (Tier.HBM, Tier.HOST, Tier.NVME)
KEYS: list[Any] = [0, 1, 2, 3, 127, 128, 300, -1, -2, -200, -(2**40), 2**63 - 1, 2**63, 2**64 - 1, -(2**63)]
KEYS += [b"k", b"k" * 32, b"l" * 32, b"m" * 64]
TOKENS = (0, 127, 128, 70_000, 2**32 - 1)


class Messages:
    """Makes what a publisher may send, mostly with sense."""

    def __init__(self, choose: random.Random) -> None:
        self.choose = choose
        self._chains = [[choose.choice(TOKENS) for _ in range(8)] for _ in range(3)]  # few: prefixes meet

    def payload(self) -> bytes:
        choose = self.choose
        events = [self._event() for _ in range(choose.choice((0, 1, 1, 1, 2, 3)))]
        rank = choose.choice((0, 0, 0, 0, None, 1))
        said: Any = [1.5, events, rank]
        match choose.randrange(40):
            case 0:
                said = [1.5, events]
            case 1:
                said = [1, events, rank]
            case 2:
                said = {"ts": 1.5, "events": events, "data_parallel_rank": rank}
            case 3:
                said = [1.5, events, rank, "more"]
        data = bytearray(msgspec.msgpack.encode(said))
        match choose.randrange(40):
            case 0:
                del data[choose.randrange(len(data)) :]
            case 1:
                data += b"\xc0"
            case 2:
                data[choose.randrange(len(data))] = choose.randrange(256)
        return bytes(data)

    def _event(self) -> Any:
        choose = self.choose
        match choose.randrange(12):
            case 0:
                return {"type": choose.choice(("AllBlocksCleared", "AllBlocksCleared", "Unheard"))}
            case 1 | 2 | 3 | 4:
                event = {"type": "BlockRemoved", "block_hashes": choose.choices(KEYS, k=choose.randint(0, 5))}
            case _:
                event = self._stored()
        return self._odd(event)

    def _stored(self) -> dict[str, Any]:
        choose, chain = self.choose, self.choose.choice(self._chains)
        size, count = choose.choice((1, 2, 2, 2)), choose.randint(0, 4)
        begin = choose.choice((0, 0, 1)) * size
        return {
            "type": "BlockStored",
            "block_hashes": choose.choices(KEYS, k=count),
            "parent_block_hash": choose.choice(KEYS) if begin else None,
            "token_ids": [] if choose.random() < 0.1 else chain[begin : begin + size * count],
            "block_size": size,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "extra_keys": choose.choice((None, [None] * count)),
            "group_idx": 0,
        }

    def _odd(self, event: dict[str, Any]) -> Any:
        """With fields that not every event has, or not so."""
        choose = self.choose
        words: dict[str, tuple[Any, ...]] = {
            "medium": ("GPU", "GPU", "CPU", "CPU", "STORAGE", "DISK", "CPU_PINNED", "EXTERNAL", "TAPE", "", None),
            "ownership": (None, None, "", "pool", "other"),
            "group_idx": (None, 0, 0, 1, 255, 256),
            "lora_id": (None, 3),
            "lora_name": (None, "", "lora"),
            "extra_keys": (None, [None], [["salt"]], ["salt"], [["lora"]], {}, [[]] * 2),
            "cache_salt": (None, "", "salt"),
            "lookahead_token_ids": (None, [], [7]),
            "block_size": (0, 1, 3, 65_536, 65_537, None),
            "token_ids": ([1, -1], [2**32] * 2, [[1, 2], [2, 3]], [1.5], None),
            "kv_cache_spec_kind": ("full", None, 1.5, b"x", [], True),
            "session_id": ("s", "\x7f" * 300),
            "block_hashes": (None, [True], [b""], [b"k" * 65], ["k"], [1.5], [2**63, 2**63]),
        }
        for _ in range(choose.choice((0, 0, 1, 1, 2))):
            name = choose.choice(("medium", "medium", "ownership", "group_idx", *words))
            event = {**event, name: choose.choice(words[name])}
        if choose.random() < 0.05:
            return list(event.values())
        if choose.random() < 0.05:
            event = dict(choose.sample(list(event.items()), len(event)))
        return event


def told(events: list[Event]) -> Iterator[object]:
    """What is recorded, but for how often what is held is listed, and in what order what goes together is named."""
    cleared: dict[tuple[bytes, Tier], list[bytes]] = {}
    for event in events:
        if isinstance(event, BlocksEvicted) and event.reason is EvictReason.CLEARED:
            cleared.setdefault((event.namespace, event.tier), []).extend(split_hashes(event.hashes))
        elif not isinstance(event, ResidenciesListed | SnapshotEnded):
            yield from ((where, sorted(hashes)) for where, hashes in cleared.items())
            cleared.clear()
            yield event
    yield from ((where, sorted(hashes)) for where, hashes in cleared.items())


class Pair:
    """Both, with the same to do."""

    def __init__(self, source: ForeignSource, decode: Any = lambda data: decode_batch(data, Kind.VLLM)) -> None:
        self.both = [Driven(make(source), decode, can_replay=False, rank=0) for make in (readable, native)]
        self.sequence = 0

    def bring(self, data: bytes) -> None:
        self.step(PublishedMessage(self.sequence, data))
        self.sequence += 1

    def step(self, happened: Any) -> None:
        for driven in self.both:
            driven.turn(happened, after_s=60.0)
        self.check()

    def snapshot(self, limit: int) -> None:
        for driven in self.both:
            stream = driven.instance.stream
            stream.begin_snapshot()
            stream.step_snapshot(limit)
            driven.turn()
        self.check()

    def check(self) -> None:
        first, second = self.both
        assert list(told(second.read())) == list(told(first.read()))
        assert self.state(second) == self.state(first)

    @staticmethod
    def state(driven: Driven) -> object:
        blocks, ledger = driven.made.blocks, driven.made.ledger
        held = {tier: sorted(split_hashes(ledger.held(tier))) for tier in TIERS}  # type: ignore[attr-defined]
        fold = driven.fold()
        assert held == {tier: sorted(fold.held[tier]) for tier in TIERS}
        counted = {tier: ledger.counts(tier).held for tier in TIERS}  # type: ignore[attr-defined]
        assert counted == {tier: len(hashes) for tier, hashes in held.items()}
        counts = {reason: count for reason, count in blocks.counts.items() if count}
        about = (blocks.is_empty, blocks.remembered, blocks.stored, blocks.removed, blocks.namespaces())
        return held, counts, about, ledger.epoch, ledger.declared(), driven.epochs


@settings(max_examples=examples(1200), deadline=None)
@given(
    st.integers(0, 2**32),
    st.integers(1, 25),
    st.sampled_from(((100, 100), (100, 2), (3, 100), (2, 1), (100, 0))),
    st.booleans(),
    st.sampled_from(("", "pool")),
)
def test_both_make_the_same_of_every_message(
    seed: int, messages: int, bounds: tuple[int, int], counts_copies: bool, pool: str
):
    choose = random.Random(seed)
    made = Messages(choose)
    pair = Pair(
        ForeignSource(MODEL, pool=pool, counts_copies=counts_copies, most_blocks=bounds[0], most_gone=bounds[1])
    )
    for _ in range(messages):
        match choose.randrange(20):
            case 0:
                pair.step(EngineConnected())
                pair.sequence = choose.choice((0, pair.sequence))
            case 1:
                pair.sequence = choose.choice((0, pair.sequence, pair.sequence + 3))
            case 2:
                pair.snapshot(choose.randint(1, 3))
        pair.bring(made.payload())
    for _ in range(12):
        pair.snapshot(3)


def message(*events: dict[str, Any]) -> bytes:
    return msgspec.msgpack.encode([1.5, list(events), 0])


def stored(keys: list[Any], tokens: list[int], parent: Any = None, medium: str = "GPU") -> dict[str, Any]:
    event = {"type": "BlockStored", "block_hashes": keys, "parent_block_hash": parent, "token_ids": tokens}
    return event | {"block_size": 2, "medium": medium}


def removed(keys: list[Any], medium: str = "GPU", **more: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": keys, "medium": medium, **more}


@pytest.mark.parametrize("first", [0, -5000, 2**64 - 6000])
def test_runs_longer_than_an_event_are_cut_alike(first: int):
    pair, count = Pair(ForeignSource(MODEL, most_gone=1000)), 2500
    keys, tokens = list(range(first, first + count)), list(range(2 * count))
    pair.bring(message(stored(keys[:1], tokens[:2])))  # names the namespace
    pair.bring(message(stored(keys[1:], tokens[2:], keys[0])))
    pair.bring(message(stored(keys, [], medium="CPU")))
    pair.snapshot(1000)
    pair.bring(message(removed(keys[: count // 2])))
    pair.bring(message({"type": "AllBlocksCleared"}))
    pair.bring(message(removed(keys, "CPU")))
    for _ in range(8):
        pair.snapshot(1000)
    assert pair.both[1].made.blocks.remembered == 1000


def test_what_two_hashes_of_the_engine_mean_is_held_until_both_are_gone():
    pair = Pair(ForeignSource(MODEL, pool="pool"))
    for data in (
        message(stored([1, 2], [7, 8, 9, 9])),
        message(stored([3, 4], [7, 8, 9, 9])),
        message(stored([1, 3, 2, 4], [], medium="CPU")),
        message(stored([1, 3, 2, 4], []) | {"ownership": "pool"}),
        message(removed([1, 3, 3], ownership="pool")),
        message(removed([1, 2])),
        message(removed([4], "CPU"), removed([3, 4])),
        message({"type": "AllBlocksCleared"}),
        message(removed([1, 3, 2], "CPU")),
    ):
        pair.bring(data)
        pair.snapshot(1)
    fold = pair.both[1].fold()
    assert [len(fold.held[tier]) for tier in TIERS] == [0, 0, 0]


def test_events_that_only_a_decoder_knows_are_the_same_in_both():
    """What Dynamo's and TensorRT-LLM's decoders give: removals anywhere, widths, integers of any size."""
    choose = random.Random(3)
    keys: list[Any] = [*range(6), 2**64, 2**90, -(2**70), b"x"]

    def event() -> ForeignEvent:
        some = choose.choices(keys, k=choose.randint(1, 4))
        group = choose.choice((0, 1))
        match choose.randrange(6):
            case 0:
                return Removed(some, "", "", group)
            case 1:
                return Removed(some, choose.choice(("GPU", "CPU")), "", group)
            case 2 if choose.random() < 0.2:
                return Cleared(is_all=choose.random() < 0.5)
            case _:
                tokens = choose.choices((1, 2, -1), weights=(9, 9, 1), k=3 * len(some))
                parent = choose.choice((None, *keys))
                medium = choose.choice(("GPU", "CPU"))
                return BlocksStored(some, parent, tokens, 2, [], medium, "", choose.choice(("", "l")), group, 3)

    batches: list[EventBatch] = []
    pair = Pair(ForeignSource(MODEL, most_gone=4), lambda data: batches[-1])
    for _ in range(examples(600)):
        batches.append(EventBatch([event()], None))
        pair.bring(b"no message")


def test_what_is_used_up_is_said_alike():
    """Media, salts and adapters go through the decoder; the blocks behind them lie in the same table."""
    pair = Pair(ForeignSource(MODEL))
    with_salt = stored([1, 2], [1, 2, 3, 4]) | {"extra_keys": [["salt"], None]}
    with_media = stored([5], [1, 2]) | {"extra_keys": [[["digest", 0]]]}
    with_lora = stored([6], [1, 2]) | {"lora_name": "l", "extra_keys": [["l"]]}
    for one in (stored([9], [9, 9]), with_salt, with_media, with_lora):
        pair.bring(message(one))
    pair.bring(message(stored([3], [5, 6], 2), stored([7], [5, 6], 6), removed([1, 5, 6])))
    assert len(pair.both[1].fold().held[Tier.HBM]) == 3
