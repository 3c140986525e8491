"""Dynamo's events: what they say, and that no bytes do more than be refused."""

from __future__ import annotations

import base64
import json
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbm.core.hashing import sequence_hashes
from kvbm.core.ids import UNKNOWN, Namespace, Tier, split_hashes
from kvbm.reference.foreign_blocks import ForeignBlocks
from kvbm.streams.foreign.dynamo import NUMBERS, SCHEME, DynamoEvents, block_numbers, read_message
from kvbm.streams.foreign.events import EventRefusal, ForeignEventError
from kvbm.streams.foreign.identity import ForeignSource
from kvbm.streams.foreign.state import BeginEpoch, EpochWhy, ForeignState, PublishedMessage
from tests.examples import examples
from tests.foreign_engines import MODEL, Fold

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "dynamo_events.json").read_text())
NAMESPACE = Namespace(
    model=MODEL,
    block_tokens=16,
    revision=UNKNOWN,
    kv_dtype=UNKNOWN,
    layout=UNKNOWN,
    ranks=UNKNOWN,
    scheme=SCHEME,
)
HASHES = split_hashes(sequence_hashes(block_numbers(GOLDEN["tokens_hashes"]), NUMBERS, NAMESPACE.root()))


class Told:
    """A state that messages are told one by one."""

    def __init__(self, **more: Any) -> None:
        source = ForeignSource(MODEL, counts_copies=False, scheme=SCHEME, **more)
        self.state = ForeignState(ForeignBlocks(source, sequence_hashes), DynamoEvents(16), can_replay=False)
        self.fold = Fold()
        self._number = 0

    def message(self, data: bytes) -> list[Any]:
        read = read_message(data)
        commands = self.state.step(0.0, PublishedMessage(read.sequence, read.payload))
        self.fold.take(commands)
        return commands

    def tell(self, data: Any, tier: str = "device", **more: Any) -> list[Any]:
        event = {"event_id": 1, "data": data, "dp_rank": 0}
        payload = {"worker_id": 1, "storage_tier": tier, "event": event, **more}
        self._number += 1
        return self.message(envelope(self._number - 1, payload))

    def held(self, tier: Tier) -> list[bytes]:
        return list(self.fold.held[tier])


def envelope(number: int, payload: Any) -> bytes:
    inner = msgspec.msgpack.encode(payload)
    return msgspec.msgpack.encode(
        {"topic": "kv-events", "publisher_id": 9, "sequence": number, "published_at": 1, "payload": inner}
    )


def stored(*numbers: int, parent: int | None = None) -> dict[str, Any]:
    blocks = [{"block_hash": at, "tokens_hash": GOLDEN["tokens_hashes"][at], "mm_extra_info": None} for at in numbers]
    return {"stored": {"parent_hash": parent, "start_position": None, "blocks": blocks}}


def removed(*keys: int) -> dict[str, Any]:
    return {"removed": {"block_hashes": list(keys)}}


def test_golden_messages_are_found_by_dynamos_own_hashes_of_blocks():
    told = Told()
    for data in GOLDEN["envelopes"]:
        told.message(base64.b64decode(data))
    for tier in Tier:
        assert set(told.held(tier)) == {HASHES[at] for at in GOLDEN["held"].get(tier.name, [])}, tier
    assert not +told.state.blocks.counts
    assert [one.id for one in told.state.blocks.namespaces()] == [NAMESPACE.id]


def test_golden_messages_of_jetstream_are_json():
    told = Told()
    for data, held in zip(GOLDEN["json"], GOLDEN["json_held"], strict=True):
        told.message(data.encode())
        assert told.held(Tier.HBM) == [HASHES[at] for at in held.get("HBM", [])]


def test_a_message_says_who_numbers_it_and_of_whom_it_tells():
    read = read_message(base64.b64decode(GOLDEN["envelopes"][2]))
    assert (read.publisher, read.sequence, read.worker, read.rank) == (8725724278030337, 2, 7587869265905, 0)
    read = read_message(GOLDEN["json"][1].encode())
    assert (read.publisher, read.sequence, read.worker, read.rank) == (7587869265905, 1, 7587869265905, 0)


def test_tiers_are_those_of_the_worker_and_a_cache_owners_blocks_are_a_pools():
    told = Told(pool="cache_owner")
    for at, tier in enumerate(("device", "host_pinned", "disk")):
        told.tell(stored(at) if not at else stored(at, parent=at - 1), tier)
    told.tell(stored(0), "disk", residency_domain="cache_owner")
    assert [told.held(tier) for tier in Tier] == [[HASHES[0]], [HASHES[1]], [HASHES[2]], [HASHES[0]]]
    told.tell("cleared")
    assert [told.held(tier) for tier in Tier] == [[], [], [], [HASHES[0]]]


@pytest.mark.parametrize(
    ("data", "more", "reason", "is_loss"),
    [
        (stored(1, parent=77), {}, EventRefusal.UNMAPPED, False),
        (stored(1), {"tier": "tape"}, EventRefusal.UNKNOWN_MEDIUM, False),
        (stored(1), {"tier": "external"}, EventRefusal.NO_POOL, False),
        (stored(1), {"residency_domain": "future_owner"}, EventRefusal.MALFORMED, False),
        (removed(0), {"residency_domain": None}, EventRefusal.MALFORMED, True),
        ("cleared", {"residency_domain": "cache_owner"}, EventRefusal.NO_POOL, False),
        ("moved", {}, EventRefusal.UNKNOWN_TYPE, False),
        ({"stored": {"blocks": 5}}, {}, EventRefusal.MALFORMED, False),
        ({"removed": 5}, {}, EventRefusal.MALFORMED, True),
        ({}, {}, EventRefusal.UNKNOWN_TYPE, True),
        ({"stored": {"blocks": [{"block_hash": 1, "tokens_hash": -1}]}}, {}, EventRefusal.MALFORMED, False),
    ],
)
def test_an_event_that_makes_no_sense_is_counted(
    data: Any, more: dict[str, Any], reason: EventRefusal, is_loss: bool
) -> None:
    told = Told()
    told.tell(stored(0))
    began = BeginEpoch(EpochWhy.UNREADABLE) in told.tell(data, **more)
    assert began is is_loss
    assert told.state.blocks.counts[reason] == 1
    assert told.held(Tier.HBM) == ([] if is_loss else HASHES[:1])


@pytest.mark.parametrize("data", [b"", b"{}", b"\xc1", b"{" * 100_000, envelope(0, 5), b"\x81" * 100_000])
def test_what_is_no_message_is_refused(data: bytes) -> None:
    with pytest.raises(ForeignEventError):
        read_message(data)


def survives(data: bytes) -> None:
    told = Told(pool="cache_owner")
    try:
        told.message(data)
    except ForeignEventError:
        pass
    told.state.step(0.0, PublishedMessage(1, data))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)
FIELDS = st.sampled_from(("worker_id", "storage_tier", "residency_domain", "event", "event_id", "data", "dp_rank"))


@settings(max_examples=examples(150), deadline=None)
@given(st.dictionaries(FIELDS, VALUES, max_size=4), VALUES, st.sampled_from(("stored", "removed", "x")))
def test_fuzz_fields(fields: dict[str, Any], value: Any, name: str) -> None:
    payload = {"worker_id": 1, "event": {"event_id": 0, "data": {name: value}} | fields} | fields
    survives(envelope(0, payload))
    survives(envelope(0, [payload, value]))
    survives(msgspec.msgpack.encode(value))
    survives(msgspec.json.encode(payload))


@settings(max_examples=examples(150), deadline=None)
@given(st.binary(max_size=200), st.integers(0, 2**32))
def test_fuzz_bytes(data: bytes, seed: int) -> None:
    survives(data)
    choose = random.Random(seed)
    goods = [*map(base64.b64decode, GOLDEN["envelopes"]), *(one.encode() for one in GOLDEN["json"])]
    good = bytearray(choose.choice(goods))
    for _ in range(choose.randint(1, 4)):
        good[choose.randrange(len(good))] = choose.randrange(256)
    survives(bytes(good[: choose.choice((len(good), choose.randint(1, len(good))))]))
