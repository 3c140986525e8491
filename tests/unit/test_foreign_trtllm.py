"""TensorRT-LLM's events: what they say, and that no bytes do more than be refused."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbm.core.extra_keys import Media, extra_key, salted
from kvbm.core.hashing import sequence_hashes
from kvbm.core.ids import Tier, split_hashes
from kvbm.reference.foreign_blocks import ForeignBlocks
from kvbm.streams.foreign.events import EventRefusal, ForeignEventError
from kvbm.streams.foreign.identity import ForeignSource
from kvbm.streams.foreign.state import BeginEpoch, EpochWhy, ForeignState, PublishedMessage
from kvbm.streams.foreign.trtllm import TrtllmEvents, read_answer
from tests.examples import examples
from tests.foreign_engines import BLOCK_TOKENS, MODEL, Fold, Prompt

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "trtllm_events.json").read_text())
TOKENS = tuple(GOLDEN["tokens"])
HASHES = Prompt(TOKENS).hashes()


class Told:
    """A state that events are told one by one."""

    def __init__(self) -> None:
        source = ForeignSource(MODEL, counts_copies=False)
        self.state = ForeignState(ForeignBlocks(source, sequence_hashes), TrtllmEvents(BLOCK_TOKENS), can_replay=False)
        self.fold = Fold()

    def tell(self, *events: dict[str, Any]) -> list[Any]:
        return self.answer(json.dumps(events).encode())

    def answer(self, body: bytes) -> list[Any]:
        commands: list[Any] = []
        for event in read_answer(body).events:
            commands += self.state.step(0.0, PublishedMessage(event.sequence, event.payload))
        self.fold.take(commands)
        return commands

    def held(self, tier: Tier) -> list[bytes]:
        return list(self.fold.held[tier])

    def count(self, reason: EventRefusal) -> int:
        return self.state.blocks.counts[reason]


def block(key: int | str | None, begin: int, end: int, **more: Any) -> dict[str, Any]:
    tokens = [{"type": "unique_token", "token_id": one, "token_extra_id": 0} for one in TOKENS[begin:end]]
    return {"type": "stored_block", "block_hash": key, "tokens": tokens, "cache_level": 0, "priority": 35, **more}


def event(number: int, data: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"event_id": number, "data": data, **more}


def stored(*blocks: dict[str, Any], parent: int | str | None = None, **more: Any) -> dict[str, Any]:
    return {"type": "stored", "parent_hash": parent, "blocks": list(blocks), **more}


def removed(*keys: int | str) -> dict[str, Any]:
    return {"type": "removed", "block_hashes": list(keys)}


def moved(key: int | str, new: int, old: int) -> dict[str, Any]:
    return {"type": "updated", "block_hash": key, "cache_level": {"new_value": new, "old_value": old}}


@pytest.mark.parametrize("number", range(len(GOLDEN["answers"])))
def test_golden_answers_are_found_by_tokens(number: int) -> None:
    told = Told()
    told.answer(GOLDEN["answers"][number].encode())
    wanted = GOLDEN["held"][number]
    hashes = Prompt(TOKENS, wanted.get("salt", "")).hashes()
    for tier in Tier:
        assert set(told.held(tier)) == {hashes[at] for at in wanted.get(tier.name, [])}, tier
    assert not +told.state.blocks.counts


def test_a_block_that_is_not_full_is_never_told_of_nor_missed():
    told = Told()
    told.tell(event(0, stored(block(1, 0, 4), block(2, 4, 6))), event(1, removed(2)))
    assert told.held(Tier.HBM) == HASHES[:1]
    assert not +told.state.blocks.counts


def test_a_block_moves_between_levels_and_is_removed_from_wherever_it_is():
    told = Told()
    told.tell(event(0, stored(block(1, 0, 4), block(2, 4, 8), block(3, 8, 12))))
    told.tell(event(1, moved(2, 1, 0)), event(2, moved(3, 1, 0)), event(3, moved(3, 2, 1)))
    assert [told.held(tier) for tier in (Tier.HBM, Tier.HOST, Tier.NVME)] == [[one] for one in HASHES]
    told.tell(event(4, moved(2, 0, 1)), event(5, removed(1, 3)))
    assert [told.held(tier) for tier in (Tier.HBM, Tier.HOST, Tier.NVME)] == [HASHES[1:2], [], []]


def test_a_hole_in_the_numbers_is_an_epoch_and_another_process_as_well():
    told = Told()
    told.tell(event(0, stored(block(1, 0, 4))))
    assert BeginEpoch(EpochWhy.MESSAGES_LOST) in told.tell(event(2, stored(block(2, 4, 8), parent=1)))
    assert told.held(Tier.HBM) == HASHES[1:2]
    assert BeginEpoch(EpochWhy.OTHER_PROCESS) in told.tell(event(0, stored(block(1, 0, 4))))
    assert told.held(Tier.HBM) == HASHES[:1]


def test_of_windows_of_several_sizes_the_largest_counts():
    told = Told()
    told.tell(
        event(0, {"type": "created"}, window_size=8),
        event(1, {"type": "created"}, window_size=4096),
        event(2, stored(block(1, 0, 4)), window_size=4096),
        event(3, stored(block(2, 4, 8), parent=1), window_size=8),
        event(4, removed(1), window_size=8),
    )
    assert told.held(Tier.HBM) == HASHES[:1]


def test_a_larger_window_after_blocks_of_a_smaller_one_is_an_epoch():
    told = Told()
    told.tell(event(7, stored(block(1, 0, 4)), window_size=8))
    assert BeginEpoch(EpochWhy.UNREADABLE) in told.tell(event(8, stored(block(2, 0, 4)), window_size=4096))
    assert told.held(Tier.HBM) == HASHES[:1]


def test_salts_media_and_adapters_are_part_of_a_block():
    told = Told()
    media = [{"type": "mm_key", "hash": "abc", "start_offset": 2}]
    told.tell(
        event(0, stored(block(1, 0, 4), block(2, 4, 8), cache_salt="s")),
        event(1, stored(block(3, 0, 4, mm_keys=media))),
        event(2, stored(block(4, 0, 4), lora_name="l")),
    )
    root = Prompt(TOKENS).namespace().root()
    with_media = sequence_hashes(TOKENS[:4], 4, root, [extra_key(media=[Media("abc", -2)])])
    with_salt = sequence_hashes(TOKENS[:8], 4, root, salted("s", 2))
    expected = {*split_hashes(with_salt), with_media, Prompt(TOKENS, lora="l").hashes()[0]}
    assert set(told.held(Tier.HBM)) == expected


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (stored(block(1, 0, 8)), EventRefusal.MALFORMED),
        (stored(block(1, 0, 4, lora_id=7)), EventRefusal.UNNAMED_LORA),
        (stored(block(1, 0, 4), is_eagle=True), EventRefusal.UNMAPPED),
        (stored(block(1, 0, 4), parent=99), EventRefusal.UNMAPPED),
        (stored(block(1, 0, 4) | {"tokens": [{"token_id": 1, "token_extra_id": 5}] * 4}), EventRefusal.UNMAPPED),
        (stored(block(1, 0, 4) | {"tokens": [{"token_id": "00ff"}] * 4}), EventRefusal.UNMAPPED),
        (stored(block(1, 0, 4) | {"tokens": [{"token_id": -1}] * 4}), EventRefusal.MALFORMED),
        (stored(block(1, 0, 4, cache_level=7)), EventRefusal.UNKNOWN_MEDIUM),
        ({"type": "stored", "blocks": 5}, EventRefusal.MALFORMED),
        ({"type": "stolen"}, EventRefusal.UNKNOWN_TYPE),
    ],
)
def test_an_event_that_makes_no_sense_is_counted_and_says_nothing(data: dict[str, Any], reason: EventRefusal) -> None:
    told = Told()
    told.tell(event(0, data))
    assert told.count(reason) == 1
    assert told.held(Tier.HBM) == []


def test_blocks_before_one_that_is_refused_are_told_of():
    told = Told()
    told.tell(event(0, stored(block(1, 0, 4), block(2, 4, 8) | {"tokens": [{"token_id": "00ff"}] * 4})))
    assert told.held(Tier.HBM) == HASHES[:1]
    assert told.count(EventRefusal.UNMAPPED) == 1


def test_a_salt_is_said_beside_a_block_or_beside_the_event():
    for beside_block, beside_event in (("s", None), (None, "s"), ("s", "t")):
        told = Told()
        told.tell(event(0, stored(block(1, 0, 4, cache_salt=beside_block), cache_salt=beside_event)))
        told.tell(event(1, stored(block(2, 4, 8, cache_salt=beside_block), parent=1)))
        assert told.held(Tier.HBM) == Prompt(TOKENS, "s").hashes()[:2]


@pytest.mark.parametrize("data", [{"type": "removed", "block_hashes": "x"}, {"type": "updated"}, 5])
def test_an_event_that_may_have_removed_blocks_is_an_epoch(data: Any) -> None:
    told = Told()
    told.tell(event(0, stored(block(1, 0, 4))))
    assert BeginEpoch(EpochWhy.UNREADABLE) in told.tell(event(1, data))
    assert told.held(Tier.HBM) == []


@pytest.mark.parametrize("body", [b"", b"{}", b"[", b"null", b'"x"', b"\xff", b"[" * 100_000])
def test_what_is_no_answer_is_refused(body: bytes) -> None:
    with pytest.raises(ForeignEventError):
        read_answer(body)


def test_events_of_ranks_are_told_apart_and_those_without_a_number_are_counted():
    body = json.dumps([event(0, removed(), attention_dp_rank=3), {}, {"event_id": -1}, event(5, removed())]).encode()
    answer = read_answer(body)
    assert [(one.rank, one.sequence) for one in answer.events] == [(3, 0), (0, 5)]
    assert answer.unreadable == 1


def survives(body: bytes) -> None:
    try:
        Told().answer(body)
    except ForeignEventError:
        pass


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.text(max_size=5) | st.floats(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)
FIELDS = st.sampled_from(
    ("type", "parent_hash", "blocks", "block_hashes", "block_hash", "cache_level", "tokens", "mm_keys", "cache_salt")
)


@settings(max_examples=examples(150), deadline=None)
@given(st.dictionaries(FIELDS, VALUES, max_size=4), st.dictionaries(FIELDS, VALUES, max_size=4), VALUES)
def test_fuzz_fields(data: dict[str, Any], one: dict[str, Any], value: Any) -> None:
    survives(json.dumps([event(0, stored(block(1, 0, 4) | one, block(2, 4, 8)) | data), value]).encode())
    survives(json.dumps([event(0, removed(1) | data), event(1, moved(1, 1, 0) | data)]).encode())
    survives(json.dumps(value).encode())


@settings(max_examples=examples(150), deadline=None)
@given(st.binary(max_size=200), st.integers(0, 2**32))
def test_fuzz_bytes(data: bytes, seed: int) -> None:
    survives(data)
    choose = random.Random(seed)
    good = bytearray(choose.choice(GOLDEN["answers"]).encode())
    for _ in range(choose.randint(1, 4)):
        good[choose.randrange(len(good))] = choose.randrange(256)
    survives(bytes(good[: choose.choice((len(good), choose.randint(1, len(good))))]))
