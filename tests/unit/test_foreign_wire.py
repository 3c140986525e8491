"""Bytes of vLLM's and SGLang's publishers: what they say, and what is refused.

Fuzzed: nothing but ForeignEventError is ever raised.
"""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbm.core.extra_keys import Media, extra_key, salted
from kvbm.streams.foreign.events import (
    MAX_BATCH_BYTES,
    MAX_LOOKAHEAD,
    BlocksStored,
    Cleared,
    EventRefusal,
    ForeignEvent,
    ForeignEventError,
    RefusedEvent,
    Removed,
)
from kvbm.streams.foreign.state import PublishedMessage
from kvbm.streams.foreign.wire import Kind, decode_batch
from tests.examples import examples
from tests.foreign_engines import CLEARED, Prompt, new_state, payload, removed_event, stored_event

PROMPT = Prompt(tuple(range(8)))


def only(event: Any, kind: Kind = Kind.VLLM) -> ForeignEvent:
    (said,) = decode_batch(payload(event), kind).events
    return said


def test_maps_say_what_they_say():
    batch = decode_batch(payload(stored_event(PROMPT), removed_event([1, 2], "CPU"), CLEARED, rank=3), Kind.VLLM)
    assert batch.rank == 3
    assert batch.events == [
        BlocksStored(PROMPT.keys(), None, list(range(8)), 4, (), "GPU"),
        Removed([1, 2], "CPU"),
        Cleared(),
    ]


def test_arrays_of_older_engines_say_the_same():
    vllm = ["BlockStored", [1, 2], None, list(range(8)), 4, None, "GPU", None, None, 0]
    assert only(vllm) == BlocksStored([1, 2], None, list(range(8)), 4, (), "GPU")
    assert only(vllm[:6]) == BlocksStored([1, 2], None, list(range(8)), 4, (), "GPU")
    sglang = ["BlockStored", [-1, 2], -9, list(range(8)), 4, None, "CPU_PINNED"]
    assert only(sglang, Kind.SGLANG) == BlocksStored([-1, 2], -9, list(range(8)), 4, (), "CPU_PINNED")
    assert only(["BlockRemoved", [7]]) == Removed([7], "GPU")
    assert only(["AllBlocksCleared"]) == Cleared()
    assert only(["AllBlocksCleared"], Kind.SGLANG) == only(CLEARED, Kind.SGLANG) == Cleared(is_all=True)


def test_a_batch_may_be_a_map():
    data = msgspec.msgpack.encode({"ts": 1.0, "events": [removed_event([1])], "data_parallel_rank": 2})
    assert decode_batch(data, Kind.VLLM) == ([Removed([1], "GPU")], 2)


def test_hashes_may_be_bytes():
    key = bytes(range(32))
    assert only(removed_event([key])) == Removed([key], "GPU")  # type: ignore[list-item]


def test_extra_keys_become_what_a_client_writes():
    event = stored_event(PROMPT._replace(salt="s", lora="l"))
    event["extra_keys"] = [["l", ["image", 2], "s"], ["l", ["image", -2], b"digest"]]
    said = only(event)
    assert isinstance(said, BlocksStored)
    assert said.lora == "l"
    assert said.extra == [
        extra_key("s", [Media("image", 2)]),
        extra_key(media=[Media("image", -2)], embeds=[b"digest"]),
    ]
    event["extra_keys"] = [["l"], ["l"]]
    assert only(event) == said._replace(extra=())


def test_salts_of_both_engines_become_the_same_bytes():
    ours = salted("s", 2)
    vllm = only(stored_event(PROMPT._replace(salt="s")))
    event = {
        "type": "BlockStored",
        "block_hashes": [1, 2],
        "parent_block_hash": None,
        "token_ids": list(range(8)),
        "block_size": 4,
        "lora_id": None,
    }
    sglang = only(event | {"cache_salt": "s"}, Kind.SGLANG)
    assert isinstance(vllm, BlocksStored)
    assert isinstance(sglang, BlocksStored)
    assert list(vllm.extra) == list(sglang.extra) == ours
    later = only(event | {"cache_salt": "s", "parent_block_hash": 5}, Kind.SGLANG)
    assert isinstance(later, BlocksStored)
    assert not later.extra  # only the first block of a chain has it


def test_tokens_ahead_count_as_part_of_their_block():
    pairs = {
        "type": "BlockStored",
        "block_hashes": [1, 2],
        "parent_block_hash": None,
        "token_ids": [(at, at + 1) for at in range(8)],
        "block_size": 4,
        "lora_id": None,
    }
    said = only(pairs, Kind.SGLANG)
    ahead = only(stored_event(PROMPT, lookahead_token_ids=[8]) | {"block_hashes": [1, 2], "extra_keys": None})
    assert isinstance(said, BlocksStored)
    assert list(said.tokens) == list(range(8))
    assert said.extra == [extra_key(ahead=[4]), extra_key(ahead=[8])]
    assert ahead == said


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"token_ids": "words"}, EventRefusal.MALFORMED),
        ({"token_ids": None}, EventRefusal.MALFORMED),
        ({"block_size": 0}, EventRefusal.MALFORMED),
        ({"block_size": 1.5}, EventRefusal.MALFORMED),
        ({"block_hashes": [None]}, EventRefusal.MALFORMED),
        ({"block_hashes": [b""]}, EventRefusal.MALFORMED),
        ({"parent_block_hash": "x"}, EventRefusal.MALFORMED),
        ({"lookahead_token_ids": [1] * (MAX_LOOKAHEAD + 1)}, EventRefusal.MALFORMED),
        ({"extra_keys": [None]}, EventRefusal.MALFORMED),
        ({"extra_keys": [[1.5], None]}, EventRefusal.MALFORMED),
        ({"extra_keys": [["a", "b"], None]}, EventRefusal.MALFORMED),
        ({"extra_keys": [{"a": 1}, None]}, EventRefusal.MALFORMED),
        ({"lora_name": "l", "extra_keys": [["m"], ["m"]]}, EventRefusal.MALFORMED),
        ({"lora_id": 3}, EventRefusal.UNNAMED_LORA),
        ({"group_idx": -1}, EventRefusal.MALFORMED),
        ({"medium": "x" * 5000}, EventRefusal.MALFORMED),
        ({"type": "BlockMoved"}, EventRefusal.UNKNOWN_TYPE),
    ],
)
def test_an_event_that_makes_no_sense_is_refused_alone(change: dict[str, Any], reason: EventRefusal):
    refused, removed = decode_batch(payload(stored_event(PROMPT) | change, removed_event([1])), Kind.VLLM).events
    assert isinstance(refused, RefusedEvent)
    assert refused.reason == reason
    assert not refused.is_loss
    assert removed == Removed([1], "GPU")


@pytest.mark.parametrize("event", [removed_event([1]) | {"block_hashes": "x"}, 7, None, [], {}, ["BlockRemoved", 5]])
def test_an_event_that_may_have_removed_blocks_is_a_loss(event: Any):
    said = only(event)
    assert isinstance(said, RefusedEvent)
    assert said.is_loss


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x93",
        payload(stored_event(PROMPT))[:-3],
        msgspec.msgpack.encode([1.0, 5]),
        b"\x91" * 5000,
        bytes(MAX_BATCH_BYTES + 1),
    ],
)
def test_bytes_that_are_no_batch_are_refused(data: bytes):
    with pytest.raises(ForeignEventError) as caught:
        decode_batch(data, Kind.VLLM)
    assert caught.value.reason == EventRefusal.UNREADABLE


def test_a_million_blocks_in_one_event_are_read_and_more_are_refused():
    event = {"type": "BlockRemoved", "block_hashes": list(range(1_000_000)), "medium": "GPU"}
    said = only(event)
    assert isinstance(said, Removed)
    assert len(said.keys) == 1_000_000
    event["block_hashes"] = [0] * ((1 << 20) + 1)
    assert isinstance(only(event), RefusedEvent)


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=40),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=20,
)
fields = st.sampled_from([*sorted(stored_event(PROMPT)), "cache_salt", "ownership", "lookahead_token_ids"])


def survives(data: bytes) -> None:
    for kind in Kind:
        try:
            decode_batch(data, kind)
        except ForeignEventError:
            pass
        state = new_state(can_replay=False, kind=kind, pool="pool")
        for sequence in range(2):  # and what it says is applied
            state.step(0.0, PublishedMessage(sequence, data))


@settings(max_examples=examples(150), deadline=None)
@given(
    st.lists(st.dictionaries(fields, values, max_size=6), max_size=3), st.sampled_from(("BlockStored", "BlockRemoved"))
)
def test_fuzz_fields(changes: list[dict[str, Any]], name: str):
    events = [stored_event(PROMPT) | change | {"type": name} for change in changes]
    survives(payload(*events))
    survives(payload(*([name, *list(event.values())[1:]] for event in events)))


@settings(max_examples=examples(100), deadline=None)
@given(values)
def test_fuzz_values(value: Any):
    survives(msgspec.msgpack.encode(value))
    survives(payload(value))
    survives(payload(["BlockStored", value], {"type": "BlockRemoved", "block_hashes": value}))


@settings(max_examples=examples(100), deadline=None)
@given(st.binary(max_size=200), st.integers(0, 2**32))
def test_fuzz_bytes(data: bytes, seed: int):
    survives(data)
    good = bytearray(payload(stored_event(PROMPT._replace(salt="s")), removed_event([1]), CLEARED))
    choose = random.Random(seed)
    for _ in range(choose.randint(1, 4)):
        good[choose.randrange(len(good))] = choose.randrange(256)
    survives(bytes(good[: choose.randint(1, len(good))]))
