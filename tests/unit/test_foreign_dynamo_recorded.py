"""Messages that Dynamo's own publishers have sent: each says what its publisher was told."""

from __future__ import annotations

import base64
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from kvbm.assembly import NEW_FOREIGN_TABLE
from kvbm.bridge.table import engine_table
from kvbm.config import load_settings
from kvbm.core.errors import ConfigError
from kvbm.core.hashing import sequence_hashes
from kvbm.core.ids import UNKNOWN, Namespace, split_hashes
from kvbm.streams.foreign.declared import Said
from kvbm.streams.foreign.dynamo import NUMBERS, SCHEME, DynamoEvents, block_numbers, read_message
from kvbm.streams.foreign.events import BlocksStored, Cleared, EventRefusal, ForeignEvent, Removed
from kvbm.streams.foreign.identity import ForeignSource
from kvbm.streams.foreign.state import EngineConnected, PublishedMessage
from tests.bridged import NAME, Driven, Made, pools_of, readable
from tests.foreign_engines import MODEL

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "dynamo_recorded.json").read_text())
TOKENS, BLOCK_TOKENS, OWN = GOLDEN["tokens"], GOLDEN["block_tokens"], GOLDEN["tokens_hashes"]
NAMESPACE = Namespace(
    model=MODEL,
    block_tokens=BLOCK_TOKENS,
    revision=UNKNOWN,
    kv_dtype=UNKNOWN,
    layout=UNKNOWN,
    ranks=UNKNOWN,
    scheme=SCHEME,
)
DYNAMOS_WORDS = {"GPU": "GPU", "CPU": "CPU_PINNED", "CPU_PINNED": "CPU_PINNED", "STORAGE": "DISK", "DISK": "DISK"}


class Step(NamedTuple):
    """What a publisher was told, and its message."""

    told: dict[str, Any]
    message: bytes


def steps(run: str) -> list[Step]:
    return [Step(step, base64.b64decode(step["message"])) for step in GOLDEN["runs"][run]]


def chain(*hashes: int) -> list[bytes]:
    """Our hashes of blocks of which we know Dynamo's."""
    return split_hashes(sequence_hashes(block_numbers(hashes), NUMBERS, NAMESPACE.root()))


BLOCKS = chain(*OWN["plain"])


def key(told: int) -> int:
    """A binding says a key as a signed number, a message as one without a sign."""
    return told % (1 << 64)


def stored(keys: list[int], parent: int | None, tokens: list[int], medium: str, kind: str) -> BlocksStored:
    begin = TOKENS.index(tokens[0]) // BLOCK_TOKENS
    numbers = block_numbers(OWN[kind][begin : begin + len(keys)])
    parent = None if parent is None else key(parent)
    return BlocksStored(list(map(key, keys)), parent, numbers, BLOCK_TOKENS, (), medium, width=NUMBERS)


def expected(told: dict[str, Any], copies: Counter[int]) -> Iterator[ForeignEvent]:
    """What a message must say.

    Args:
        copies: how often more each block of the rank was stored than removed; Dynamo passes on the last removal alone.
    """
    if "vllm" in told:
        for event in told["vllm"]:
            yield from expected_of_vllm(event)
        return
    events = told["with"].get("events") or [{"type": told["call"].removeprefix("publish_"), **told["with"]}]
    for event in events:
        if event["type"] == "removed":
            copies.subtract(event["block_hashes"])
            yield Removed([key(one) for one in event["block_hashes"] if not copies[one]], "GPU")
            continue
        copies.update(event["block_hashes"])
        kinds = {"lora_name": "lora", "cache_salt": "salt", "block_mm_infos": "picture"}
        kind = next((kind for field, kind in kinds.items() if field in event), "plain")
        yield stored(event["block_hashes"], event["parent_hash"], event["token_ids"], "GPU", kind)


def expected_of_vllm(event: dict[str, Any]) -> Iterator[ForeignEvent]:
    if event["type"] == "AllBlocksCleared":
        yield Cleared(is_all=True)
    elif event["type"] == "BlockRemoved":
        yield Removed(event["block_hashes"], DYNAMOS_WORDS[event["medium"]])
    elif not event.get("ownership"):  # Dynamo passes on none that has an owner
        medium = DYNAMOS_WORDS.get(event["medium"], event["medium"])
        kind = "lora" if event["lora_name"] else "plain"  # nor a salt
        yield stored(event["block_hashes"], event["parent_block_hash"], event["token_ids"], medium, kind)


@pytest.mark.parametrize("run", GOLDEN["runs"])
def test_each_message_says_what_its_publisher_was_told(run: str) -> None:
    copies: dict[int, Counter[int]] = defaultdict(Counter)  # by rank
    for step in steps(run):
        read = read_message(step.message)
        assert read.worker == (78 if run == "relayed" else 7587869265905)
        assert read.rank == step.told.get("rank", 0)
        assert DynamoEvents(BLOCK_TOKENS)(read.payload).events == list(expected(step.told, copies[read.rank]))


@pytest.mark.parametrize("run", GOLDEN["runs"])
def test_each_rank_of_each_process_is_a_publisher_with_numbers_of_its_own(run: str) -> None:
    reads = [read_message(step.message) for step in steps(run)]
    for rank in {read.rank for read in reads}:
        mine = [read for read in reads if read.rank == rank]
        assert [read.sequence for read in mine] == list(range(len(mine)))
        assert len({read.publisher for read in mine}) == 1
    elsewhere = {read_message(step.message).publisher for name in GOLDEN["runs"] if name != run for step in steps(name)}
    assert not elsewhere & {read.publisher for read in reads}
    assert len({read.publisher for read in reads}) == len({read.rank for read in reads})


@pytest.fixture(params=["readable", "native"])
def bridged(request: pytest.FixtureRequest) -> Driven:
    """A source of the bridge that is told messages of one rank of one worker."""
    source = ForeignSource(MODEL, counts_copies=False, scheme=SCHEME)
    if request.param == "readable":
        made = readable(source)
    else:
        made = Made(*engine_table(NEW_FOREIGN_TABLE, NAME, source, pools_of(source), Said(), takes_messages=False))
    driven = Driven(made, DynamoEvents(BLOCK_TOKENS), can_replay=False)
    driven.turn(EngineConnected())
    return driven


def told(driven: Driven, message: bytes) -> dict[str, set[bytes]]:
    """What lies where after a message, by a strict reader of the bridge's stream."""
    read = read_message(message)
    if read.rank == 0:
        driven.turn(PublishedMessage(read.sequence, read.payload))
    return {tier.name: set(held) for tier, held in driven.fold().held.items() if held}


def test_a_worker_whose_engine_calls_it_holds_what_it_was_told(bridged: Driven) -> None:
    lora, salt, picture = (chain(*OWN[kind])[0] for kind in ("lora", "salt", "picture"))
    after = [
        set(BLOCKS),
        set(BLOCKS[:2]),
        set(BLOCKS),
        set(BLOCKS),  # what another rank holds is not told here
        {*BLOCKS, lora},
        {*BLOCKS, lora, salt},
        {*BLOCKS, lora, salt, picture},
        set(BLOCKS),
    ]
    for step, held in zip(steps("called"), after, strict=True):
        assert told(bridged, step.message) == {"HBM": held}, step.told
    assert not +bridged.made.blocks.counts
    assert {one.id for one in bridged.made.blocks.namespaces()} == {NAMESPACE.id}


def test_a_block_that_was_stored_twice_is_held_until_dynamo_says_that_it_is_gone(bridged: Driven) -> None:
    after = [{"HBM": set(BLOCKS[:2])}, {"HBM": set(BLOCKS[:2])}, {"HBM": set(BLOCKS[:1])}, {}]
    for step, held in zip(steps("stored_twice"), after, strict=True):
        assert told(bridged, step.message) == held, step.told
    assert not +bridged.made.blocks.counts


def test_a_worker_that_passes_on_vllms_events_holds_them_by_tier(bridged: Driven) -> None:
    lora = chain(*OWN["lora"])[0]
    first, second, third = BLOCKS
    after: list[dict[str, set[bytes]]] = [
        {"HBM": {first, second, third}},
        {"HBM": {first, second, third}, "HOST": {first, second}, "NVME": {first}},
        {"HBM": {first, second, third}, "HOST": {first, second}, "NVME": {first, second}},
        {"HBM": {first, second}, "HOST": {first, second}, "NVME": {first, second}},
        {"HBM": {first, second}, "HOST": {first, second}, "NVME": {first, second}},  # EXTERNAL: no pool is named
        {"HBM": {first, second}, "HOST": {first, second, third}, "NVME": {first, second}},
        {"HBM": {first, second}, "HOST": {first, third}, "NVME": {first}},
        {"HBM": {first, second, lora}, "HOST": {first, third}, "NVME": {first}},
        {"HBM": {first, second, lora}, "HOST": {first, third}, "NVME": {first}},  # a second time, for another salt
        {"HBM": {first, second, lora}, "HOST": {first, third}, "NVME": {first}},
        {},
    ]
    for step, held in zip(steps("relayed"), after, strict=True):
        assert told(bridged, step.message) == held, step.told
    assert +bridged.made.blocks.counts == {EventRefusal.NO_POOL: 1}


def test_an_envelope_has_a_payload_that_is_an_array() -> None:
    for run in GOLDEN["runs"]:
        for step in steps(run):
            envelope = msgspec.msgpack.decode(step.message)
            assert list(envelope) == ["publisher_id", "sequence", "published_at", "topic", "payload"]
            assert envelope["topic"] == GOLDEN["subject"].rpartition(".")[2] == "kv-events"
            assert isinstance(msgspec.msgpack.decode(envelope["payload"]), list)


def test_the_page_and_the_settings_name_a_subject_as_dynamo_makes_it() -> None:
    page = (Path(__file__).parents[2] / "docs" / "bridge.md").read_text()
    source = {"kind": "dynamo", "endpoint": "nats://127.0.0.1:4222", "model": MODEL, "block_tokens": 16}
    with pytest.raises(ConfigError) as refused:
        load_settings(flags={"bridge": {"sources": {"a": source}}})
    for text in (page, str(refused.value)):
        (named,) = re.findall(r"namespace\.[\w.-]+\.kv-events", text)
        for at, (word, recorded) in enumerate(zip(named.split("."), GOLDEN["subject"].split("."), strict=True)):
            assert word == recorded or at in (1, 3, 5), named  # the names are anybody's
