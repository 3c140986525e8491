"""Other engines' events as facts of ours: identity by tokens, tiers as told, copies counted, nothing guessed."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

from kvbm.core.events import MAX_RUN_BLOCKS
from kvbm.core.extra_keys import extra_key, salted
from kvbm.core.hashing import sequence_hashes
from kvbm.core.ids import NO_PARENT, Tier, split_hashes
from kvbm.streams.foreign.blocks import Gained
from kvbm.streams.foreign.events import EventRefusal
from kvbm.streams.foreign.state import (
    BeginEpoch,
    BridgeTicked,
    EngineConnected,
    EpochWhy,
    PublishedMessage,
    ReplayEnded,
    ReplayRefused,
)
from kvbm.streams.foreign.wire import Kind
from tests.foreign_engines import (
    CLEARED,
    MODEL,
    Fold,
    Prompt,
    new_state,
    payload,
    removed_event,
    stored_event,
)

PROMPT = Prompt(tuple(range(100, 112)))  # three blocks


class Told:
    """A state, and what its commands make of events that are published one after the other."""

    def __init__(self, **more: Any) -> None:
        self.state, self.fold = new_state(can_replay=False, **more), Fold()
        self.sequence = 0

    def tell(self, *events: Any, rank: int | None = 0) -> list[Any]:
        commands = self.state.step(0.0, PublishedMessage(self.sequence, payload(*events, rank=rank)))
        self.sequence += 1
        self.fold.take(commands)
        return commands

    def held(self, tier: Tier) -> list[bytes]:
        return list(self.fold.held[tier])

    def count(self, reason: EventRefusal) -> int:
        return self.state.blocks.counts[reason]


def test_blocks_have_the_hashes_that_a_client_makes_of_tokens_salt_and_adapter():
    told = Told()
    for prompt in (PROMPT, PROMPT._replace(salt="s"), PROMPT._replace(lora="l"), PROMPT._replace(salt="s", lora="l")):
        told.tell(stored_event(prompt))
        assert told.held(Tier.HBM)[-3:] == prompt.hashes()
        assert told.fold.held[Tier.HBM][prompt.hashes()[0]] == prompt.namespace().id
    assert len(set(told.held(Tier.HBM))) == 12


def test_a_later_event_goes_on_behind_its_parent():
    told = Told()
    told.tell(stored_event(PROMPT, 0, 1))
    (gained,) = told.tell(stored_event(PROMPT, 1, 3))
    first, second, third = PROMPT.hashes()
    assert gained == Gained(PROMPT.namespace().id, Tier.HBM, first, 1, second + third)
    assert told.fold.places[first] == (NO_PARENT, 0)


def test_sglang_and_vllm_share_a_namespace():
    vllm, sglang = Told(), Told(kind=Kind.SGLANG)
    vllm.tell(stored_event(PROMPT))
    sglang.tell(["BlockStored", [-1, -2, -3], None, list(PROMPT.tokens), 4, None, "GPU"])
    assert vllm.fold.held == sglang.fold.held


def test_a_copy_is_removed_by_itself():
    told = Told()
    told.tell(stored_event(PROMPT))
    assert told.tell(stored_event(PROMPT)) == []
    assert told.tell(removed_event(PROMPT.keys())) == []
    told.tell(removed_event(PROMPT.keys()))
    assert told.held(Tier.HBM) == []
    told.tell(removed_event(PROMPT.keys()))
    assert told.count(EventRefusal.NOT_HELD) == 3


def test_reports_of_reuse_are_no_copies_where_the_source_says_so():
    told = Told(counts_copies=False)
    told.tell(stored_event(PROMPT))
    told.tell(stored_event(PROMPT))
    told.tell(removed_event(PROMPT.keys()))
    assert told.held(Tier.HBM) == []


def test_media_are_tiers_as_told_and_an_unknown_one_is_refused():
    told = Told(pool="shared")
    media = {
        "CPU": Tier.HOST,
        "CPU_PINNED": Tier.HOST,
        "STORAGE": Tier.NVME,
        "DISK": Tier.NVME,
        "EXTERNAL": Tier.OBJECT,
    }
    for at, (medium, tier) in enumerate(media.items()):
        prompt = Prompt((at, *PROMPT.tokens[1:]))
        told.tell(stored_event(prompt, medium=medium))
        assert told.held(tier)[-3:] == prompt.hashes()
    told.tell(stored_event(Prompt((77, 78, 79, 80)), medium="STORAGE", ownership="shared"))
    assert len(told.held(Tier.OBJECT)) == 4
    for medium in ("gpu", "TAPE", ""):
        told.tell(stored_event(Prompt((1, 2, 3, 4)), medium=medium or "X"))
    assert told.count(EventRefusal.UNKNOWN_MEDIUM) == 3
    assert told.held(Tier.HBM) == []


def test_a_cluster_pool_that_the_settings_do_not_name_is_refused():
    told = Told()
    told.tell(stored_event(PROMPT, medium="EXTERNAL"), stored_event(PROMPT, medium="CPU", ownership="other"))
    assert told.count(EventRefusal.NO_POOL) == 2
    assert not any(told.fold.held.values())


def test_a_reset_of_sglangs_empties_its_host_pool_too():
    told = Told(kind=Kind.SGLANG)
    told.tell(stored_event(PROMPT), stored_event(PROMPT, medium="CPU_PINNED"))
    told.tell(CLEARED)
    assert not any(told.fold.held.values())


def test_a_reset_empties_the_gpu_alone():
    told = Told()
    told.tell(stored_event(PROMPT), stored_event(PROMPT, medium="CPU"))
    told.tell(CLEARED)
    assert told.held(Tier.HBM) == []
    assert told.held(Tier.HOST) == PROMPT.hashes()
    told.tell(stored_event(PROMPT))  # counted anew
    told.tell(removed_event(PROMPT.keys()))
    assert told.held(Tier.HBM) == []


def test_blocks_without_tokens_are_known_by_their_hash_also_when_they_are_gone_from_the_gpu():
    told = Told()
    told.tell(stored_event(PROMPT))
    told.tell(removed_event(PROMPT.keys()))
    told.tell(stored_event(PROMPT, medium="CPU") | {"token_ids": [], "extra_keys": None})
    assert told.held(Tier.HOST) == PROMPT.hashes()


def test_what_has_neither_tokens_nor_a_known_parent_is_counted_and_never_guessed():
    told = Told()
    told.tell(stored_event(PROMPT, 1, 3))
    told.tell(stored_event(PROMPT, 0, 2) | {"token_ids": []})
    told.tell(stored_event(PROMPT, 0, 3) | {"token_ids": list(PROMPT.tokens[:8])})  # one block left out: which?
    assert told.count(EventRefusal.UNMAPPED) == 7
    assert told.held(Tier.HBM) == []


def test_a_parent_of_another_namespace_is_none():
    told = Told()
    told.tell(stored_event(PROMPT, 0, 1))
    told.tell(stored_event(PROMPT, 1, 3) | {"lora_name": "l", "lora_id": 1, "extra_keys": [["l"], ["l"]]})
    assert told.count(EventRefusal.UNMAPPED) == 2
    told.tell(stored_event(PROMPT, 1, 3) | {"block_size": 8, "block_hashes": [5], "extra_keys": None})
    assert told.count(EventRefusal.UNMAPPED) == 3


def test_one_hash_for_two_prefixes_is_believed_for_the_first_alone():
    told = Told()
    told.tell(stored_event(PROMPT))
    other = Prompt(tuple(range(200, 212)))
    told.tell(stored_event(other) | {"block_hashes": [other.keys()[0], PROMPT.keys()[1], other.keys()[2]]})
    assert told.count(EventRefusal.CONFLICT) == 1
    assert told.held(Tier.HBM) == [*PROMPT.hashes(), other.hashes()[0], other.hashes()[2]]


def test_groups_have_namespaces_of_their_own_under_the_same_hashes():
    told = Told()
    told.tell(stored_event(PROMPT), stored_event(PROMPT, group_idx=1))
    assert len(told.held(Tier.HBM)) == 6
    told.tell(removed_event(PROMPT.keys(), group_idx=1))
    assert told.held(Tier.HBM) == PROMPT.hashes()


def test_tokens_that_are_none_are_refused():
    told = Told()
    for token in (-1, 2**32, 2**70 - 2**70 - 5):
        told.tell(stored_event(PROMPT) | {"token_ids": [token, *PROMPT.tokens[1:]]})
    assert told.count(EventRefusal.MALFORMED) == 3


def test_a_long_chain_comes_in_runs():
    told, long = Told(), Prompt(tuple(range(4 * 2500)))
    commands = told.tell(stored_event(long))
    assert [len(one.hashes) // 16 for one in commands[1:]] == [MAX_RUN_BLOCKS, MAX_RUN_BLOCKS, 452]
    assert [told.fold.places[block][1] for block in long.hashes()] == list(range(2500))
    assert all(
        told.fold.places[block][0] == before for before, block in zip(long.hashes(), long.hashes()[1:], strict=False)
    )


def test_messages_of_another_rank_count_for_nothing():
    told = Told(rank=1)
    told.tell(stored_event(PROMPT), rank=0)
    assert told.count(EventRefusal.OTHER_RANK) == 1
    told.tell(stored_event(PROMPT), rank=1)
    assert len(told.held(Tier.HBM)) == 3


def test_what_cannot_be_read_may_have_removed_blocks_so_an_epoch_begins():
    told = Told()
    told.tell(stored_event(PROMPT), stored_event(PROMPT, medium="CPU"))
    assert BeginEpoch(EpochWhy.UNREADABLE) in told.tell(
        removed_event([1]) | {"block_hashes": "x"}, stored_event(PROMPT)
    )
    assert told.held(Tier.HBM) == PROMPT.hashes()
    assert told.held(Tier.HOST) == []
    told.tell(removed_event(PROMPT.keys()))
    assert (
        told.state.step(0.0, PublishedMessage(told.sequence, b"\xc1")) == []
    )  # nothing is held, so nothing is uncertain


def test_a_publisher_that_answers_nothing_is_left_after_two_seconds():
    state, fold = new_state(), Fold()
    assert fold.take(state.step(0.0, EngineConnected())) == [0]
    fold.take(state.step(0.0, ReplayEnded()))
    fold.take(state.step(0.0, PublishedMessage(0, payload(stored_event(PROMPT)))))
    assert fold.take(state.step(1.0, PublishedMessage(2, payload(stored_event(Prompt((1, 2, 3, 4))))))) == [0]
    assert state.wake_s == 3.0
    assert state.step(2.9, BridgeTicked()) == []
    assert fold.take(state.step(3.0, BridgeTicked())) == []
    assert fold.epochs == 1
    assert list(fold.held[Tier.HBM]) == Prompt((1, 2, 3, 4)).hashes()
    assert state.is_partial
    assert fold.take(state.step(4.0, PublishedMessage(4, payload()))) == [2]
    fold.take(state.step(4.0, ReplayRefused("gone")))
    assert fold.epochs == 2
    assert fold.held[Tier.HBM] == {}


def test_nothing_that_leaves_has_tokens_or_their_namespaces_root():
    told, prompt = Told(tenant="acme", secret=b"secret"), Prompt(tuple(range(987654, 987666)))
    commands = told.tell(stored_event(prompt))
    text = repr(commands)
    assert str(prompt.tokens[0]) not in text
    assert prompt.tokens[0].to_bytes(4, "little") not in b"".join(one.hashes for one in commands[1:])
    (named, gained) = commands
    assert (named.namespace.model, named.namespace.tenant, named.namespace.kv_dtype) == (MODEL, "acme", "unknown")
    assert gained.parent == NO_PARENT


def test_what_sglangs_own_recorder_says_is_found_by_tokens():
    golden = json.loads((Path(__file__).parents[1] / "golden" / "sglang_events.json").read_text())
    state, fold = new_state(can_replay=False, kind=Kind.SGLANG), Fold()
    for sequence, data in enumerate(golden["messages"]):
        fold.take(state.step(0.0, PublishedMessage(sequence, base64.b64decode(data))))
    expected: dict[Tier, set[bytes]] = {tier: set() for tier in Tier}
    root = PROMPT.namespace().root()
    for one in golden["held"]:
        tokens, size = one["tokens"], golden["block_tokens"]
        extra: list[bytes] = salted(one.get("salt", ""), len(tokens) // size)
        if "ahead" in one:  # each block's KV depends on the token behind it, too
            extra = [extra_key(ahead=tokens[at + size : at + size + 1]) for at in range(0, len(tokens) - size, size)]
        blocks = split_hashes(sequence_hashes(tokens, size, root, extra))[one.get("from", 0) :]
        for tier in one["tiers"]:
            expected[Tier[tier]].update(blocks)
    assert {tier: set(blocks) for tier, blocks in fold.held.items()} == expected
    assert not +state.blocks.counts
