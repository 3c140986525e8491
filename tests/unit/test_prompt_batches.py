"""The binary form of questions about prompts: its bytes are those of the documentation; what is damaged is refused."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbm.core.answers import (
    BlocksHeld,
    FindAnswer,
    InstanceHolding,
    LookupAnswer,
    PeerHolding,
    PoolHolding,
    PresenceAnswer,
    RankedInstance,
    RouteAnswer,
)
from kvbm.core.errors import LayoutError
from kvbm.core.ids import HASH_BYTES, NamespaceId
from kvbm.core.missed import missed
from kvbm.core.prompt_batches import (
    FIND,
    LOOKUP,
    MOST_PROMPTS,
    MOST_ROUTES,
    PRESENCE,
    ROUTE,
    PromptBatch,
    answers_head,
    decode_batch,
    decode_finds,
    decode_lookups,
    decode_presences,
    decode_routes,
    encode_batch,
    encode_find,
    encode_lookup,
    encode_presence,
    encode_route,
)

SPACE = NamespaceId(bytes(range(16)))
ONE, TWO = b"\x11" * HASH_BYTES, b"\x22" * HASH_BYTES
ASKED = PromptBatch(LOOKUP, 8, SPACE, [(ONE + TWO, 0), (b"", 0)])
ROUTED = PromptBatch(ROUTE, 1, SPACE, [(ONE, 20)])
FOUND = LookupAnswer(
    namespace=SPACE.hex(),
    blocks=2,
    deepest=2,
    excluded=[],
    more=3,
    pools=[PoolHolding(pool="s3", depth=1)],
    instances=[InstanceHolding(instance="i-0", depth=2, tiers={"HBM": 1, "NVME": 1}, reach=2, suspect=True)],
)
NOTHING = LookupAnswer(namespace=SPACE.hex(), blocks=0, deepest=0, instances=[], pools=[], excluded=[])
RANKED = RankedInstance(
    instance="i-0",
    cost_s=2.0,
    queueing_s=0.5,
    recompute_s=1.0,
    balance_s=0.25,
    fetch_s=0.25,
    depth=1,
    missing_tokens=4,
    fetch_blocks=0,
    suspect=False,
    ttft_s=1.5,
    admitted=False,
)
CHOSEN = RouteAnswer(instance="i-0", namespace=SPACE.hex(), blocks=1, ranked=[RANKED], more=7, admitted=False)

LOOKED_FOR = PromptBatch(PRESENCE, 8, SPACE, [(ONE + TWO, 0), (b"", 0)])
HELD = PresenceAnswer(
    namespace=SPACE.hex(),
    blocks=2,
    more=3,
    holders=[
        BlocksHeld(name="i-0", kind="instance", tier="NVME", suspect=True, held="03"),
        BlocksHeld(name="s3", kind="pool", tier="OBJECT", suspect=False, held="02"),
    ],
)
NONE_HELD = PresenceAnswer(namespace=SPACE.hex(), blocks=0, holders=[])

GOLDEN_QUESTION = (
    "4b564231 01 00 0800 02000000 00000000 000102030405060708090a0b0c0d0e0f 02000000 00000000 00000000 00000000"
    "11111111111111111111111111111111 22222222222222222222222222222222"
)
GOLDEN_ANSWER = (
    "4b564231 01 000000 02000000 00000000"
    "02000000 03000000 0200 0000"
    "02000000 02000000 01000000 00000000 01000000 00000000 01 03 692d30"
    "01000000 00000000 00000000 00000000 00000000 00000000 02 02 7333"
    "00000000 00000000 0000 0000"
)
GOLDEN_ROUTE = (
    "4b564231 02 000000 01000000 00000000 00000000 07000000 0100 0000"
    "00000040 0000003f 0000803f 0000803e 0000803e 0000c03f 01000000 04000000 00000000 04 03 692d30"
)
GOLDEN_PRESENCE = (
    "4b564231 03 000000 02000000 00000000"
    "00000000 03000000 0200 0000"
    "01000000 02 01 03 692d30 03"
    "01000000 03 02 02 7333 02"
    "00000000 00000000 0000 0000"
)

ASKED_FOR = PromptBatch(FIND, 4, SPACE, [(ONE + TWO, 1)], ("me", "zone-a", "host-1"))
THERE = FindAnswer(
    namespace=SPACE.hex(),
    blocks=2,
    pools=[PoolHolding(pool="s3", depth=2)],
    peers=[
        PeerHolding(
            instance="i-0",
            depth=1,
            tiers={"HOST": 1},
            distance=1,
            suspect=True,
            lends={"host": "h", "unix": "/s", "tcp": "a:1"},
        )
    ],
)
GOLDEN_FIND = (
    "00000000 00000000 0200 0000 08000000 01000000 01000000 01 01 03 692d30 680a2f730a613a31 00000000 "
    "02000000 00000000 00 02 02 7333"
)


def test_the_bytes_are_those_that_are_documented() -> None:
    answer = answers_head(LOOKUP, 2, 0.0) + encode_lookup(FOUND) + encode_lookup(NOTHING)
    route = answers_head(ROUTE, 1, 0.0) + encode_route(CHOSEN)
    held = answers_head(PRESENCE, 2, 0.0) + encode_presence(HELD) + encode_presence(NONE_HELD)
    there = answers_head(FIND, 1, 0.0) + encode_find(THERE)
    told = [encode_batch(ASKED), answer, route, held, there[len(answers_head(FIND, 1, 0.0)) :]]
    golden = [GOLDEN_QUESTION, GOLDEN_ANSWER, GOLDEN_ROUTE, GOLDEN_PRESENCE, GOLDEN_FIND]
    assert [one.hex() for one in told] == [text.replace(" ", "") for text in golden]
    assert decode_batch(told[0]) == ASKED
    assert decode_lookups(answer, ASKED) == [FOUND, NOTHING]
    assert decode_routes(route, ROUTED) == [CHOSEN]
    assert decode_batch(encode_batch(LOOKED_FOR)) == LOOKED_FOR
    assert decode_presences(held, LOOKED_FOR) == [HELD, NONE_HELD]
    assert decode_batch(encode_batch(ASKED_FOR)) == ASKED_FOR
    assert decode_finds(there, ASKED_FOR) == [THERE]
    over_rdma = msgspec.structs.replace(THERE.peers[0], lends=THERE.peers[0].lends | {"rdma": "rxe0 fe80"})
    further = msgspec.structs.replace(THERE, peers=[over_rdma])
    assert decode_finds(answers_head(FIND, 1, 0.0) + encode_find(further), ASKED_FOR) == [further]
    by_nixl = msgspec.structs.replace(THERE.peers[0], lends=THERE.peers[0].lends | {"nixl": "UCX"})
    further = msgspec.structs.replace(THERE, peers=[by_nixl])
    assert decode_finds(answers_head(FIND, 1, 0.0) + encode_find(further), ASKED_FOR) == [further]
    changed = [
        at for at, pair in enumerate(zip(encode_find(further), encode_find(THERE), strict=True)) if len({*pair}) > 1
    ]
    assert len(changed) == 1, "who does not know the flag reads the same answer"
    missed_it = msgspec.structs.replace(THERE, pools=[], peers=[], missed=missed("not_held"))
    assert decode_finds(answers_head(FIND, 1, 0.0) + encode_find(missed_it), ASKED_FOR) == [missed_it]
    page = (Path(__file__).parents[2] / "docs" / "route.md").read_text().replace(" ", "").replace("\n", "")
    for text in golden:
        assert text.replace(" ", "") in page


batches = st.builds(
    PromptBatch,
    st.just(ROUTE),
    st.integers(1, 1024),
    st.binary(min_size=16, max_size=16).map(NamespaceId),
    st.lists(
        st.tuples(
            st.integers(0, 5).flatmap(lambda n: st.binary(min_size=16 * n, max_size=16 * n)), st.integers(0, 1 << 24)
        ),
        min_size=1,
        max_size=MOST_ROUTES,
    ),
    st.just(()),
)
finds = st.builds(
    PromptBatch,
    st.just(FIND),
    st.integers(1, 4),
    st.binary(min_size=16, max_size=16).map(NamespaceId),
    st.lists(st.tuples(st.just(ONE), st.integers(0, 1 << 16)), min_size=1, max_size=MOST_PROMPTS),
    st.lists(st.text(st.characters(exclude_characters="\n", codec="utf-8"), min_size=1, max_size=128), max_size=17).map(
        tuple
    ),
)


@given(batches | finds, st.randoms(use_true_random=False))
def test_questions_come_back_and_what_is_cut_is_refused(batch: PromptBatch, dice: random.Random) -> None:
    body = encode_batch(batch)
    assert decode_batch(body) == batch
    for wrong in (body[: dice.randrange(len(body))], body + b"\0"):
        with pytest.raises(LayoutError):
            decode_batch(wrong)


@given(st.integers(0, 10**6), st.integers(1, 255))
def test_a_changed_byte_of_answers_is_refused_or_another_answer(at: int, change: int) -> None:
    body = bytearray(answers_head(LOOKUP, 2, 0.0) + encode_lookup(FOUND) + encode_lookup(NOTHING))
    body[at % len(body)] ^= change
    try:
        assert len(decode_lookups(bytes(body), ASKED)) == 2
    except LayoutError:
        pass


@given(st.integers(0, 10**6), st.integers(1, 255))
def test_a_changed_byte_of_masks_is_refused_or_another_answer_with_masks_as_long(at: int, change: int) -> None:
    body = bytearray(answers_head(PRESENCE, 2, 0.0) + encode_presence(HELD) + encode_presence(NONE_HELD))
    body[at % len(body)] ^= change
    try:
        found = decode_presences(bytes(body), LOOKED_FOR)
    except LayoutError:
        return
    assert [len(one.bits()) for one in found[0].holders] == [1] * len(found[0].holders) and not found[1].holders


@given(st.integers(0, 10**6), st.integers(1, 255))
def test_a_changed_byte_of_addresses_is_refused_or_another_answer(at: int, change: int) -> None:
    body = bytearray(answers_head(FIND, 1, 0.0) + encode_find(THERE))
    body[at % len(body)] ^= change
    try:
        (found,) = decode_finds(bytes(body), ASKED_FOR)
    except LayoutError:
        return
    assert all(sum(one.tiers.values()) == one.depth for one in found.peers)


@pytest.mark.parametrize(
    ("at", "data", "why"),
    [
        (0, b"KVB2", "does not begin"),
        (4, b"\5", "does not begin"),
        (4, b"\4", "limit is 8; give 1 to 4"),
        (5, b"\1", "does not begin"),
        (12, b"\1", "does not begin"),
        (6, b"\0\0", "limit is 0"),
        (6, b"\1\4", "limit is 1025"),
        (8, b"\0\0", "0 prompts"),
        (8, (MOST_PROMPTS + 1).to_bytes(4, "little"), "257 prompts"),
        (8, b"\3", "at most 65536"),
        (8, b"\0\1", "sizes of"),
        (32, b"\xff\xff\xff\xff", "at most 65536"),
        (36, b"\1", "0 where it is no route"),
    ],
)
def test_what_is_wrong_is_said(at: int, data: bytes, why: str) -> None:
    body = bytearray(encode_batch(ASKED))
    body[at : at + len(data)] = data
    with pytest.raises(LayoutError, match=why):
        decode_batch(body)


def test_routes_at_once_are_fewer() -> None:
    with pytest.raises(LayoutError, match="give 1 to 64"):
        decode_batch(encode_batch(PromptBatch(ROUTE, 1, SPACE, [(b"", 0)] * (MOST_ROUTES + 1))))


def test_answers_to_other_questions_are_refused() -> None:
    answer = answers_head(LOOKUP, 1, 0.0) + encode_lookup(FOUND)
    for decode, asked in ((decode_lookups, ASKED), (decode_routes, ROUTED), (decode_presences, LOOKED_FOR)):
        with pytest.raises(LayoutError, match="are none to"):
            decode(answer, asked)  # type: ignore[operator]
