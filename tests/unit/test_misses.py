"""Why nothing was found for a prompt: the reason, what is known instead, within what a caller may know, and as a number
in batches.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvbm.catalog.access.callers import EMBEDDED, Caller
from kvbm.catalog.answers.misses import Misses
from kvbm.catalog.answers.visibility import Visibility
from kvbm.core.answers import LookupAnswer, MissedAnswer, PoolHolding
from kvbm.core.codec import Frame, encode_frame
from kvbm.core.events import BlocksCreated, Event, InstanceStarted, PoolStated
from kvbm.core.ids import Epoch, InstanceId, Namespace, NamespaceId, Offset, Tier
from kvbm.core.missed import WHYS, joined_missed, missed, missed_of, number_in, number_of
from kvbm.core.prompt_batches import LOOKUP, PromptBatch, answers_head, decode_lookups
from kvbm.locate.joined import joined_lookups
from kvbm.streams.base import StreamMessage
from tests.indexes import NATIVE, Twin, each_twin, frame_bytes

ONE = InstanceId("one")
SPACE = Namespace(model="m", block_tokens=16, revision="v1", tenant="acme")
HASHES = b"".join(bytes([number]) * 16 for number in range(1, 5))
POOL = PoolStated(Tier.HBM, 64, 1024)
ACME, BOLT = (Caller(name, "router", frozenset({name})) for name in ("acme", "bolt"))


class Site:
    """A catalog's namespaces, as an instance's start has named them."""

    def __init__(self, *spaces: Namespace) -> None:
        self.sequencer = NATIVE.sequencer()
        self.named: set[NamespaceId] = set()
        self.misses = Misses(self.sequencer, Visibility(self.sequencer), self.named.__contains__)
        self.next = 1
        self.start(*spaces)

    def start(self, *spaces: Namespace) -> None:
        event: Event = InstanceStarted(epoch=Epoch(self.next), pools=(POOL,), namespaces=spaces)
        frame = Frame(
            instance=ONE, epoch=Epoch(self.next), first_offset=Offset(0), wall_time_ns=1, events=(event,), digest=0
        )
        self.sequencer.step(0.0, [StreamMessage(self.next, f"kvbm.v1.events.c.{ONE}", encode_frame(frame))])
        self.next += 1

    def missed(self, caller: Caller, asked: Namespace | NamespaceId, blocks: int = 4, **more: Any) -> MissedAnswer:
        return self.misses.explained("route", caller, asked, self.misses.why(caller, asked, blocks, **more))


@pytest.mark.parametrize(
    ("other", "differs"),
    [
        ({"block_tokens": 32}, {"block_tokens": "16"}),
        ({"revision": "v2"}, {"revision": "v1"}),
        ({"revision": "v2", "kv_dtype": "bfloat16"}, {"revision": "v1", "kv_dtype": "float32"}),
        ({"model": "another"}, {"model": "m"}),
        ({"tenant": "bolt"}, {"tenant": "acme"}),
    ],
)
def test_a_namespace_that_is_not_known_is_told_with_the_nearest_that_is(
    other: dict[str, Any], differs: dict[str, str]
) -> None:
    site = Site(Namespace(model="n", block_tokens=4), SPACE)
    site.start(SPACE, Namespace(model="m", block_tokens=64, revision="v0", lora="style", kv_dtype="int8"))
    answer = site.missed(EMBEDDED, msgspec.structs.replace(SPACE, **other))
    assert answer.why == "namespace_unknown"
    nearest = next(one for one in answer.near if one.id == SPACE.id.hex())
    assert nearest.differs == differs
    if "model" not in other:
        assert answer.near[0] == nearest and all(one.model == "m" for one in answer.near)
    assert SPACE.id.hex() in answer.message and all(theirs in answer.message for theirs in differs.values())


@pytest.mark.parametrize("caller", [EMBEDDED, ACME], ids=["all", "a tenant"])
def test_those_of_the_model_are_told_however_many_others_became_known_later(caller: Caller) -> None:
    site = Site(SPACE, *(Namespace(model=f"x{number}", block_tokens=16, tenant="acme") for number in range(200)))
    answer = site.missed(caller, msgspec.structs.replace(SPACE, revision="v2"))
    assert [one.id for one in answer.near] == [SPACE.id.hex()]


def test_an_unknown_id_is_told_with_ids_that_are_known() -> None:
    site = Site(SPACE)
    answer = site.missed(EMBEDDED, NamespaceId(bytes(16)))
    assert (answer.why, [(one.id, one.model, one.differs) for one in answer.near]) == (
        "namespace_unknown",
        [(SPACE.id.hex(), "m", {})],
    )
    site.named.add(NamespaceId(bytes(16)))  # by an instance whose fields of it were not kept
    assert site.missed(EMBEDDED, NamespaceId(bytes(16))).why == "not_held"


def test_no_more_is_told_than_a_caller_may_know() -> None:
    site = Site(SPACE, msgspec.structs.replace(SPACE, tenant="bolt", revision="v9"))
    foreign, nowhere = (
        site.missed(ACME, msgspec.structs.replace(SPACE, tenant="bolt", revision="v9").id),
        site.missed(ACME, NamespaceId(bytes(16))),
    )
    assert foreign == nowhere  # what is not yours is not there
    assert [one.id for one in foreign.near] == [SPACE.id.hex()]
    assert site.missed(ACME, SPACE).why == "not_held"
    answer = site.missed(BOLT, SPACE)  # the fields are right, and another tenant's
    assert answer.why == "namespace_unknown"
    assert [one.differs for one in answer.near] == [{"revision": "v9", "tenant": "bolt"}]
    nobody = site.missed(Caller("nobody's", "router", frozenset()), SPACE)
    assert nobody.near == [] and "none is known to you" in nobody.message


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"blocks": 0}, "no_full_block"),
        ({"is_excluded": True}, "excluded"),
        ({"blocks": 2, "full_blocks": 4}, "hashes_short"),
        ({"full_blocks": 4}, "not_held"),
        ({}, "not_held"),
    ],
)
def test_the_reasons_within_a_namespace_that_is_known(more: dict[str, Any], why: str) -> None:
    site = Site(SPACE)
    for asked in (SPACE, SPACE.id):
        answer = site.missed(EMBEDDED, asked, **more)
        assert (answer.why, answer.near) == (why, [])
    assert site.misses.counts == {("route", why): 2}


def test_only_an_answer_without_anything_has_a_reason() -> None:
    site = Site(SPACE)
    nothing = LookupAnswer(namespace="", blocks=4, deepest=0, instances=[], pools=[], excluded=[])
    found = msgspec.structs.replace(nothing, deepest=4, pools=[PoolHolding(pool="p", depth=4)])
    assert site.misses.lookup(found, EMBEDDED, SPACE) is found
    assert b"missed" not in msgspec.json.encode(found)
    told = site.misses.lookup(nothing, EMBEDDED, SPACE)
    assert msgspec.json.decode(msgspec.json.encode(told), type=LookupAnswer) == told
    assert isinstance(told.missed, MissedAnswer) and told.missed.why == "not_held"
    left_out = site.misses.lookup(msgspec.structs.replace(nothing, excluded=["one"]), EMBEDDED, SPACE)
    assert isinstance(left_out.missed, MissedAnswer) and left_out.missed.why == "excluded"
    assert site.misses.counts == {("lookup", "not_held"): 1, ("lookup", "excluded"): 1}


@each_twin
def test_a_batch_has_the_reasons_number_where_nothing_was_found(twin: Twin) -> None:
    index = twin.index()
    index.apply(
        frame_bytes(
            ONE,
            InstanceStarted(epoch=Epoch(1), pools=(POOL,)),
            BlocksCreated(namespace=SPACE.id, tier=Tier.HBM, hashes=HASHES),
        )
    )
    prompts = [HASHES, bytes(32), HASHES[16:], b"\xff" * 16]
    asked = PromptBatch(LOOKUP, 3, SPACE.id, [(hashes, 0) for hashes in prompts])
    for why in WHYS:
        before = index.prompts_missed()
        told = index.encode_prefixes(SPACE.id, prompts, 3, number_of(why))
        read = decode_lookups(answers_head(LOOKUP, 4, 0.0) + told, asked)
        assert [one.missed for one in read] == [msgspec.UNSET, missed(why), msgspec.UNSET, missed(why)]
        assert [bool(one.instances) for one in read] == [True, False, True, False]
        assert index.prompts_missed() == before + 2
    assert [
        one.missed
        for one in decode_lookups(answers_head(LOOKUP, 4, 0.0) + index.encode_prefixes(SPACE.id, prompts, 3), asked)
    ] == [msgspec.UNSET] * 4
    assert missed_of(0) is missed_of(200) is msgspec.UNSET  # of a newer kvbm
    assert [number_in(missed(why)) for why in WHYS] == [1, 2, 3, 4, 5]


def test_catalogs_of_parts_say_together_what_tells_most() -> None:
    site, other = Site(SPACE), Site(Namespace(model="m", block_tokens=8))
    wanted = msgspec.structs.replace(SPACE, block_tokens=32)
    unknown = [one.missed(EMBEDDED, wanted) for one in (site, other)]
    both = joined_missed([*unknown, msgspec.UNSET])
    assert isinstance(both, MissedAnswer) and {one.id for one in both.near} == {
        near.id for one in unknown for near in one.near
    }
    assert both.near[0].id == SPACE.id.hex() and all(near.id in both.message for near in both.near)
    cold = site.missed(EMBEDDED, SPACE)
    assert joined_missed([other.missed(EMBEDDED, SPACE), cold]) == cold
    assert joined_missed([msgspec.UNSET]) is joined_missed([]) is msgspec.UNSET
    nothing = LookupAnswer(namespace="", blocks=4, deepest=0, instances=[], pools=[], excluded=[], missed=cold)
    found = msgspec.structs.replace(nothing, deepest=4, pools=[PoolHolding(pool="p", depth=4)], missed=msgspec.UNSET)
    assert joined_lookups([nothing, nothing], 3).missed == cold
    assert joined_lookups([nothing, found], 3).missed is msgspec.UNSET
