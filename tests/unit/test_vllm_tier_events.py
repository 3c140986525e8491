"""What is told of tiers to those who listen to vLLM's events."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvbm.assembly import told_tiers
from kvbm.core.ids import HASH_BYTES, Tier, split_hashes
from kvbm.engines.vllm import tier_events
from kvbm.engines.vllm.reach import ABSENT
from kvbm.engines.vllm.requests import KvGroup
from kvbm.engines.vllm.tier_events import GroupRun, TierEvents, ToldBlocks
from kvbm.engines.vllm.told_tiers import NewToldTiers
from kvbm.reference.told_tiers import ReadableToldTiers

GROUP = KvGroup(0, 4, 4)


@pytest.fixture(params=[ReadableToldTiers, told_tiers], ids=["readable", "native"])
def new(request: pytest.FixtureRequest) -> NewToldTiers:
    made: NewToldTiers = request.param
    return made


def ours(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(HASH_BYTES, "big") for number in numbers)


class Tiers(dict[bytes, Tier]):
    """Which tier holds a block, by our hash."""

    def holders(self, hashes: bytes) -> bytes:
        return bytes(self.get(one, ABSENT) for one in split_hashes(hashes))

    def put(self, tier: Tier, *numbers: int) -> None:
        self.update(dict.fromkeys(map(ours, numbers), tier))


def request(blocks: int, lora: Any = None) -> Any:
    return SimpleNamespace(
        block_hashes=[bytes([at]) for at in range(blocks)], all_token_ids=list(range(blocks * 4 + 1)), lora_request=lora
    )


def test_a_run_has_all_that_an_event_says() -> None:
    adapter = SimpleNamespace(lora_int_id=3, lora_name="a")
    run = GroupRun.of(request(6, adapter), GROUP, 2, 4)
    assert (run.digests, run.parent, list(run.tokens), run.lora) == (
        [b"\2", b"\3"],
        b"\1",
        list(range(8, 16)),
        (3, "a"),
    )
    assert GroupRun.of(request(6), GROUP, 0, 1).parent == b""
    large = GroupRun.of(request(8), KvGroup(1, 8, 4), 1, 3)  # blocks of two hashes each
    assert (large.digests, large.parent, list(large.tokens)) == ([b"\3", b"\5"], b"\1", list(range(8, 24)))


def test_a_run_has_what_its_hashes_are_made_of_besides_tokens(new: NewToldTiers) -> None:
    def keys(request: Any, begin: int, end: int, block_tokens: int) -> list[Any]:
        return [("salt", at * block_tokens) for at in range(begin, end)]

    assert TierEvents(Tiers().holders, new, keys).run_of(request(6), GROUP, 2, 4).extra_keys == [
        ("salt", 8),
        ("salt", 12),
    ]
    assert TierEvents(Tiers().holders, new).run_of(request(6), GROUP, 2, 4).extra_keys is None


def test_blocks_that_changed_together_are_one_event_and_holes_are_not_filled(new: NewToldTiers) -> None:
    tiers, run = Tiers(), GroupRun.of(request(5), GROUP, 0, 5)
    events = TierEvents(tiers.holders, new)
    tiers.put(Tier.HOST, 0, 1, 3)
    events.learn(ours(0, 1, 2, 3, 4), run)
    assert events.take() == [ToldBlocks(run, 0, 2, Tier.HOST, True), ToldBlocks(run, 3, 4, Tier.HOST, True)]
    assert events.take() == []
    events.learn(ours(0, 1), run)  # what is held already is no news
    assert events.take() == []
    tiers.put(Tier.NVME, 0, 1)
    assert events.take() == [ToldBlocks(run, 0, 2, Tier.NVME, True), ToldBlocks(run, 0, 2, Tier.HOST, False)]


def test_what_is_gone_is_told_once_and_can_come_back(new: NewToldTiers) -> None:
    tiers, run = Tiers(), GroupRun.of(request(2), GROUP, 0, 2)
    events = TierEvents(tiers.holders, new)
    tiers.put(Tier.HOST, 0, 1)
    events.learn(ours(0, 1), run)
    assert events.take() == [ToldBlocks(run, 0, 2, Tier.HOST, True)]
    tiers.clear()
    gone = events.take() + events.take()
    assert gone == [ToldBlocks(run, 0, 2, Tier.HOST, False)]
    assert events.take() == []
    tiers.put(Tier.NVME, 1)
    assert events.take() == []  # until a request has to do with it
    events.learn(ours(0, 1), run)
    assert events.take() == [ToldBlocks(run, 1, 2, Tier.NVME, True)]


def test_of_a_long_prompt_that_is_known_only_what_is_new_is_kept(new: NewToldTiers) -> None:
    def keys(request: Any, begin: int, end: int, block_tokens: int) -> list[Any]:
        return [("salt", at) for at in range(begin, end)]

    tiers = Tiers()
    events = TierEvents(tiers.holders, new, keys)
    tiers.put(Tier.HOST, *range(9))
    events.learn(ours(*range(2, 8)), events.run_of(request(9), GROUP, 2, 8))
    events.take()
    events.learn(ours(*range(1, 9)), events.run_of(request(9), GROUP, 1, 9))  # a block before, and one behind
    events.take()
    events.learn(ours(0, 1), events.run_of(request(9), GROUP, 0, 2))
    (told,) = events.take()
    assert told == ToldBlocks(events.run_of(request(9), GROUP, 0, 1), 0, 1, Tier.HOST, True)
    tiers.put(Tier.HOST, 9)
    events.learn(ours(*range(1, 10)), events.run_of(request(10), GROUP, 1, 10))
    (told,) = events.take()
    assert told == ToldBlocks(events.run_of(request(10), GROUP, 9, 10), 0, 1, Tier.HOST, True)
    assert sum(len(run.tokens) for run in events._runs.values()) <= 64


def test_objects_are_told_of_as_such(new: NewToldTiers) -> None:
    tiers, run = Tiers(), GroupRun.of(request(2), GROUP, 0, 2)
    events = TierEvents(tiers.holders, new)
    tiers.put(Tier.NVME, 0)
    tiers.put(Tier.OBJECT, 1)
    events.learn(ours(0, 1), run)
    assert events.take() == [ToldBlocks(run, 0, 1, Tier.NVME, True), ToldBlocks(run, 1, 2, Tier.OBJECT, True)]
    tiers.put(Tier.OBJECT, 0)
    assert events.take() == [ToldBlocks(run, 0, 1, Tier.OBJECT, True), ToldBlocks(run, 0, 1, Tier.NVME, False)]


def test_objects_are_told_of_as_the_engines_own_where_listeners_know_no_owners(new: NewToldTiers) -> None:
    tiers, run = Tiers(), GroupRun.of(request(2), GROUP, 0, 2)
    events = TierEvents(tiers.holders, new, objects_as=Tier.NVME)
    tiers.put(Tier.NVME, 0)
    tiers.put(Tier.OBJECT, 1)
    events.learn(ours(0, 1), run)
    assert events.take() == [ToldBlocks(run, 0, 2, Tier.NVME, True)]
    tiers.put(Tier.OBJECT, 0)
    assert events.take() == []  # who listens has it under the same word
    tiers.clear()
    assert events.take() == [ToldBlocks(run, 0, 2, Tier.NVME, False)]
    assert not events._blocks.blocks and not events._runs and not events._blocks.digests


def test_what_a_run_had_is_let_go_with_its_last_block(new: NewToldTiers) -> None:
    tiers, run = Tiers(), GroupRun.of(request(3), GROUP, 0, 3)
    events = TierEvents(tiers.holders, new)
    tiers.put(Tier.HOST, 0, 1)
    events.learn(ours(0, 1, 1), run)  # the third is the second again, and the fourth of no matter
    events.take()
    del tiers[ours(0)]
    events.take()
    assert len(events._runs) == 1
    del tiers[ours(1)]
    events.take()
    assert not events._runs and not events._blocks.blocks


def test_all_are_looked_at_in_turn(new: NewToldTiers, monkeypatch: Any) -> None:
    monkeypatch.setattr(tier_events, "_A_STEP", 4)
    tiers, run = Tiers(), GroupRun.of(request(10), GROUP, 0, 10)
    events = TierEvents(tiers.holders, new)
    tiers.put(Tier.HOST, *range(10))
    events.learn(ours(*range(10)), run)
    events.take()
    for gone in range(10):
        del tiers[ours(gone)]
        looks = [events.take() for _ in range(4)]
        assert [told for look in looks for told in look] == [ToldBlocks(run, gone, gone + 1, Tier.HOST, False)]


def test_after_a_clearing_all_is_told_again_in_turn_and_what_is_gone_is_told_as_such(
    new: NewToldTiers, monkeypatch: Any
) -> None:
    monkeypatch.setattr(tier_events, "_A_STEP", 4)
    tiers, run = Tiers(), GroupRun.of(request(10), GROUP, 0, 10)
    events = TierEvents(tiers.holders, new)
    tiers.put(Tier.HOST, *range(6))
    tiers.put(Tier.NVME, *range(6, 10))
    events.learn(ours(*range(10)), run)
    events.take()
    del tiers[ours(5)]
    events.tell_anew()
    assert events.take() == [ToldBlocks(run, 0, 4, Tier.HOST, True)]
    assert events.take() == [
        ToldBlocks(run, 4, 5, Tier.HOST, True),
        ToldBlocks(run, 6, 8, Tier.NVME, True),
        ToldBlocks(run, 5, 6, Tier.HOST, False),
    ]
    assert events.take() == [ToldBlocks(run, 8, 10, Tier.NVME, True)]
    assert [events.take() for _ in range(5)] == [[]] * 5


def test_blocks_of_two_tenants_under_one_hash_are_told_once_and_gone_with_the_last(new: NewToldTiers) -> None:
    tiers, first, second = Tiers(), GroupRun.of(request(2), GROUP, 0, 2), GroupRun.of(request(2), GROUP, 0, 2)
    events = TierEvents(tiers.holders, new)
    tiers.put(Tier.HOST, 0, 1)
    events.learn(ours(0, 1), first)
    assert events.take() == [ToldBlocks(first, 0, 2, Tier.HOST, True)]
    tiers.put(Tier.HOST, 10, 11)
    events.learn(ours(10, 11), second)
    assert events.take() == []
    tiers.put(Tier.NVME, 0)
    assert events.take() == [ToldBlocks(first, 0, 1, Tier.NVME, True)]
    del tiers[ours(0)], tiers[ours(1)], tiers[ours(10)]
    assert events.take() == [ToldBlocks(first, 0, 1, Tier.NVME, False), ToldBlocks(second, 0, 1, Tier.HOST, False)]
    del tiers[ours(11)]
    assert events.take() == [ToldBlocks(second, 1, 2, Tier.HOST, False)]
    assert not events._blocks.blocks and not events._blocks.digests


def test_what_one_tenant_loses_and_another_gains_in_one_step_stays(new: NewToldTiers) -> None:
    tiers, first, second = Tiers(), GroupRun.of(request(1), GROUP, 0, 1), GroupRun.of(request(1), GROUP, 0, 1)
    events = TierEvents(tiers.holders, new)
    tiers.put(Tier.HOST, 0)
    events.learn(ours(0), first)
    events.take()
    del tiers[ours(0)]
    tiers.put(Tier.HOST, 10)
    events.learn(ours(0), first)
    events.learn(ours(10), second)
    assert events.take() == []
