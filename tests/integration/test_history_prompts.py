"""Prompts as of a moment: who held how deep, held to what ledgers had then, and what serving them would have cost."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import msgspec
import pytest

from kvbm.catalog.routing.past_costs import routed_then
from kvbm.config.settings import RoutingSettings
from kvbm.core.codec import Frame, decode_frame
from kvbm.core.events import EvictReason, InstanceStopped, MigrateCause, StopReason
from kvbm.core.history_answers import MOST_PROMPT_BLOCKS, HistoryPrompt
from kvbm.core.ids import HASH_BYTES, NO_PARENT, Epoch, InstanceId, SequenceHash, Tier
from kvbm.core.topology import TIER_LINKS
from kvbm.reference.ledger import Ledger
from kvbm.replay.history_answers import AnswerError, HistoryAnswers
from tests.captures import BEGIN_NS, SECOND_NS
from tests.small_histories import ACME, OTHER, POOLS, START, created, frames_of, hash_of, made, migrated

BLOCKS = 9
HASHES = [SequenceHash(hash_of(number)) for number in range(BLOCKS)]
PROMPT = b"".join(HASHES).hex()
OWN = (Tier.HBM, Tier.HOST, Tier.NVME)
POOL = "s3://bucket/kv"
Held = dict[str, dict[str, set[int]]]


def at(seconds: float) -> str:
    return f"2026-01-01T00:{int(seconds) // 60:02}:{seconds % 60:09.6f}Z"


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def answers_of(folder: Path, opened: ExitStack, frames: list[Frame]) -> HistoryAnswers:
    made(folder, frames)
    return opened.enter_context(closing(HistoryAnswers(folder / "history", 256 << 20)))


class Engine:
    """A ledger that does something at random, and what it holds of the prompt."""

    def __init__(self, name: str) -> None:
        self.name, self.epoch = InstanceId(name), 0
        self.begin()

    def begin(self) -> None:
        self.epoch += 1
        self.ledger = Ledger(POOLS)
        self.ledger.start(Epoch(self.epoch), [ACME, OTHER], ["rack"], "test", "0")

    def does(self, chance: random.Random, claimed: set[int]) -> None:
        what, number = chance.random(), chance.randrange(BLOCKS)
        block, ledger = HASHES[number], self.ledger
        if what < 0.05:
            self.begin()
        elif what < 0.5 and not ledger.holds(Tier.HBM, block):
            allocation = ledger.allocate(Tier.HBM, 1)
            if allocation is not None:
                parent = HASHES[number - 1] if number else NO_PARENT
                ledger.create(ACME.id, Tier.HBM, parent, number, block, allocation.slots)
                ledger.unpin(Tier.HBM, allocation.slots)
        elif what < 0.8 and ledger.holds(Tier.HBM, block):
            target = chance.choice((Tier.HOST, Tier.NVME, Tier.OBJECT))
            if not ledger.holds(target, block) and (copy := ledger.begin_copy(ACME.id, Tier.HBM, target, block)):
                ledger.end_copy(copy, [True], MigrateCause.OFFLOAD)
                if target == Tier.OBJECT:
                    claimed.add(number)
        else:
            tier = chance.choice((*OWN, Tier.OBJECT))
            if ledger.holds(tier, block) and ledger.evict(tier, block, EvictReason.CAPACITY) and tier == Tier.OBJECT:
                claimed.discard(number)

    def frames(self, wall_time_ns: int) -> list[Frame]:
        return [decode_frame(one.data)[0] for one in self.ledger.take_frames(self.name, wall_time_ns)]

    def held(self) -> dict[str, set[int]]:
        found = {tier.name: {at for at in range(BLOCKS) if self.ledger.holds(tier, HASHES[at])} for tier in OWN}
        return {tier: numbers for tier, numbers in found.items() if numbers}


def bits_of(text: str) -> set[int]:
    data = bytes.fromhex(text)
    return {place for place in range(8 * len(data)) if data[place >> 3] >> (place & 7) & 1}


def run_of(numbers: set[int], first: int = 0) -> int:
    return next(place for place in range(first, BLOCKS + 1) if place not in numbers)


def check(answer: HistoryPrompt, held: Held, claimed: set[int]) -> None:
    told = {one.instance: {tier.name: bits_of(tier.held) for tier in one.tiers} for one in answer.holders}
    assert told == {name: tiers for name, tiers in held.items() if tiers}
    assert {one.name: bits_of(one.held) for one in answer.pools} == ({POOL: claimed} if claimed else {})
    depths = []
    for one in answer.holders:
        tiers = held[one.instance]
        depth = run_of(set().union(*tiers.values()))
        hottest = [
            next(tier for tier in ("HBM", "HOST", "NVME") if place in tiers.get(tier, ())) for place in range(depth)
        ]
        assert one.depth == depth and one.run == {tier: hottest.count(tier) for tier in set(hottest)}
        assert one.reach == run_of(claimed, depth)
        depths.append(depth)
    assert depths == sorted(depths, reverse=True)


@pytest.mark.parametrize("seed", range(3))
def test_depths_are_what_each_ledger_had_at_each_moment(tmp_path: Path, opened: ExitStack, seed: int):
    chance, engines, frames = random.Random(seed), [Engine(name) for name in "abcd"], list[Frame]()
    claimed, states = set[int](), list[tuple[Held, set[int]]]()
    for step in range(80):
        engine = chance.choice(engines)
        engine.does(chance, claimed)
        for one in engines if step == 0 else [engine]:
            frames += one.frames(BEGIN_NS + step * SECOND_NS)
        states.append(({one.name: one.held() for one in engines}, set(claimed)))
    answers = answers_of(tmp_path, opened, frames)
    for step, (held, pool) in enumerate(states):
        check(answers.prompt(ACME.id.hex(), PROMPT, at(step + 0.5)), held, pool)
        if step % 8 == 0:
            assert sum(one.blocks for one in answers.pools(at(step + 0.5)).pools) == len(pool)
    assert any(len(tiers) > 1 for held, _ in states for tiers in held.values()) and any(pool for _, pool in states)


def two_instances() -> list[Frame]:
    """`deep` has three blocks of five in HOST, and stops; `near` has two in HBM; the pool has the first four."""
    deep = frames_of(
        [
            [START],
            [created(Tier.HBM, b"".join(HASHES[:4]), [0, 1, 2, 3])],
            [migrated(Tier.HBM, Tier.HOST, b"".join(HASHES[:3]), [0, 1, 2], kept=False)],
            [migrated(Tier.HBM, Tier.OBJECT, HASHES[3], [], kept=False)],
            [InstanceStopped(reason=StopReason.SHUTDOWN)],
        ],
        "deep",
    )
    near = frames_of([[START], [created(Tier.HBM, b"".join(HASHES[:2]), [0, 1])]], "near")
    return deep + near


def test_a_route_then_is_priced_as_of_idle_engines_and_says_what_is_not_known(tmp_path: Path, opened: ExitStack):
    answers = answers_of(tmp_path, opened, two_instances())
    five, settings = PROMPT[: 5 * 2 * HASH_BYTES], RoutingSettings()
    found = routed_then(answers.prompt(ACME.id.hex(), five, at(3.5)), 90, settings, "standard", 8)
    assert [(one.instance, one.depth, one.missing_tokens) for one in found.ranked] == [("deep", 3, 42), ("near", 2, 58)]
    deep, near = found.ranked
    assert deep.fetch_blocks == 3 and deep.fetch_s == TIER_LINKS[Tier.HOST].seconds(3000)
    assert near.fetch_s == 0 and near.recompute_s == near.cost_s == settings.work_weight * 58 / 10_000
    assert deep.cost_s == deep.fetch_s + settings.work_weight * 42 / 10_000
    assert (found.without.depth, found.without.missing_tokens) == (0, 90)
    assert found.not_known[0] == "load then is not recorded: costs are those of idle engines"
    assert found.excluded == [] and found.prefill_tokens_per_s == 10_000


def test_what_a_pool_of_the_cluster_had_then_counts_where_reading_it_is_quicker(tmp_path: Path, opened: ExitStack):
    answers = answers_of(tmp_path, opened, two_instances())
    asked = answers.prompt(ACME.id.hex(), PROMPT[: 4 * 2 * HASH_BYTES], at(3.5))
    slow = RoutingSettings(prefill_tokens_per_s=100)
    (deep, near) = routed_then(asked, 64, slow, "standard", 8).ranked
    assert (deep.depth, deep.missing_tokens, deep.fetch_blocks) == (4, 0, 4)  # the fourth lies in the pool
    assert (near.depth, near.missing_tokens) == (2, 32)
    assert routed_then(asked, 64, RoutingSettings(), "standard", 8).ranked[0].depth == 3


def test_who_had_stopped_is_left_out_of_a_route_and_not_of_depths(tmp_path: Path, opened: ExitStack):
    late = [
        *two_instances(),
        *frames_of([[START], *([created(Tier.HBM, hash_of(99 + n), [n])] for n in range(6))], "on"),
    ]
    asked = answers_of(tmp_path, opened, late).prompt(ACME.id.hex(), PROMPT, at(5))
    # what had stopped holds on in a log until its next start, where its blocks do not go with it
    states = {one.instance: (one.state, one.stopped, one.depth) for one in asked.holders}
    assert states["near"] == ("running", None, 2)
    found = routed_then(asked, 144, RoutingSettings(), "standard", 8)
    assert [one.instance for one in found.ranked] == ["near"]
    left_out = [(one.instance, one.why) for one in found.excluded]
    assert left_out == ([("deep", "stopped")] if "deep" in states else [])


def test_of_two_streams_with_one_name_both_are_left_out_of_a_route(tmp_path: Path, opened: ExitStack):
    asked = answers_of(tmp_path, opened, two_instances()).prompt(ACME.id.hex(), PROMPT, at(3.5))
    holders = [
        msgspec.structs.replace(asked.holders[0], instance="deep", stream=stream, state=state)
        for stream, state in (("a", "stopped"), ("b", "ended"))
    ]
    found = routed_then(msgspec.structs.replace(asked, holders=holders), 144, RoutingSettings(), "standard", 8)
    left_out = [(one.instance, one.stream, one.why) for one in found.excluded]
    assert left_out == [("deep", "a", "stopped"), ("deep", "b", "ended")]


def test_prompts_are_bounded_and_told_apart_by_namespace(tmp_path: Path, opened: ExitStack):
    answers = answers_of(tmp_path, opened, two_instances())
    for hashes in ("", "00" * HASH_BYTES * (MOST_PROMPT_BLOCKS + 1)):
        with pytest.raises(AnswerError, match="full block") as refused:
            answers.prompt(ACME.id.hex(), hashes)
        assert refused.value.status == 422
    longest = PROMPT + "00" * HASH_BYTES * (MOST_PROMPT_BLOCKS - BLOCKS)
    assert answers.prompt(ACME.id.hex(), longest, at(3.5)).holders[0].depth == 3
    assert answers.prompt(OTHER.id.hex(), PROMPT, at(3.5)).holders == []
    assert answers.prompt("00" * 16, PROMPT).block_tokens is None
    few = answers.prompt(ACME.id.hex(), PROMPT, at(3.5), limit=1)
    assert ([one.instance for one in few.holders], few.more) == (["deep"], 1)
    assert answers.prompt(ACME.id.hex().upper(), PROMPT.upper(), at(3.5)).holders[0].depth == 3


def test_an_overview_leaves_the_clusters_pool_unknown_and_its_claims_are_asked_for(tmp_path: Path, opened: ExitStack):
    answers = answers_of(tmp_path, opened, two_instances())
    overview = answers.overview(at(3.5))
    assert "OBJECT" not in [one.tier for one in overview.tiers]
    told = {tier.tier: (tier.blocks, tier.bytes) for one in overview.instances for tier in one.tiers}
    assert told["OBJECT"] == (None, None)
    (pool,) = answers.pools(at(3.5)).pools
    assert (pool.pool, pool.tier, pool.blocks, pool.bytes) == (POOL, "OBJECT", 1, 1000)
    assert answers.pools(at(2.5)).pools == []


def test_a_pool_whose_start_is_missing_has_no_name_and_no_size(tmp_path: Path, opened: ExitStack):
    blind = frames_of([[START], [created(Tier.HBM, HASHES[0], [0])], [migrated(Tier.HBM, Tier.OBJECT, HASHES[0], [])]])
    (pool,) = answers_of(tmp_path, opened, blind[1:]).pools().pools
    assert (pool.blocks, pool.bytes) == (1, None)


def test_of_many_holders_the_deepest_are_named_and_the_others_counted(tmp_path: Path, opened: ExitStack):
    """Each of many instances holds all of a long prompt."""
    many = [SequenceHash(hash_of(number)) for number in range(1024)]
    log = [[START], [created(Tier.HBM, b"".join(many), list(range(1024)))]]
    frames = [frame for number in range(64) for frame in frames_of(log, f"i{number}")]
    found = answers_of(tmp_path, opened, frames).prompt(ACME.id.hex(), b"".join(many).hex(), limit=3)
    assert [(one.instance, one.depth) for one in found.holders] == [("i0", 1024), ("i1", 1024), ("i10", 1024)]
    assert found.more == 61
