"""The scheduler's half of the vLLM connector over a real manager; the engine is a script that moves bytes as workers
would.
"""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from kvbm.assembly import NATIVE, open_engine_manager
from kvbm.config import (
    NvmeSettings,
)
from kvbm.core.ids import HASH_BYTES, Namespace, NamespaceId, Tier, split_hashes, split_slots
from kvbm.engines.vllm.adapters import Loaded
from kvbm.engines.vllm.metadata import Answers, StepPlan, StoredPart
from kvbm.engines.vllm.offers import StateOffer
from kvbm.engines.vllm.ranks import Ranks, Stage
from kvbm.engines.vllm.requests import KvGroup
from kvbm.engines.vllm.roles import EngineRole
from kvbm.locate.base import NOTHING_FOUND, FoundElsewhere, Nowhere
from kvbm.manager.engine_hbm import EngineHbmManager
from kvbm.pools.nvme.pod import PodFolder
from kvbm.pools.object.pool import BlockObjects
from kvbm.pools.stores.memory import MemoryStore
from kvbm.streams.base import ORIGIN
from tests.eventually import eventually
from tests.managers import KnowsAll
from tests.object_pools import memory_objects
from tests.vllm_script import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    BOTH,
    DRAFTED,
    FULL,
    HYBRID,
    STATES,
    WAIT_S,
    Engine,
    Request,
    bytes_of,
    engine_settings,
)


def opened(
    folder: Path,
    groups: list[KvGroup],
    host_slots: int,
    nvme_slots: int,
    objects: BlockObjects | None = None,
    pod: str = "",
) -> tuple[EngineHbmManager, list[Namespace]]:
    namespaces = [Namespace(model="m", revision="r1", block_tokens=BLOCK_TOKENS, kv_group=group.id) for group in groups]
    wanted = engine_settings(folder, host_slots, nvme_slots)
    if pod:
        nvme = NvmeSettings(slots=nvme_slots, folder=pod)
        wanted = replace(
            wanted, instance=replace(wanted.instance, id=folder.name), pools=replace(wanted.pools, nvme=nvme)
        )
    return open_engine_manager(wanted, namespaces, BLOCK_BYTES, "vllm", objects), namespaces


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    manager, namespaces = opened(tmp_path, FULL, 64, 0)
    with manager:
        yield Engine(manager, FULL, namespaces)


@pytest.fixture
def recurrent(tmp_path: Path) -> Iterator[Engine]:
    manager, namespaces = opened(tmp_path, STATES, 64, 0)
    with manager:
        yield Engine(manager, STATES, namespaces)


@pytest.fixture
def hybrid(tmp_path: Path) -> Iterator[Engine]:
    manager, namespaces = opened(tmp_path, HYBRID, 64, 0)
    with manager:
        yield Engine(manager, HYBRID, namespaces)


def test_what_one_request_computed_another_loads_and_the_last_token_is_left_to_compute(engine: Engine) -> None:
    prompt = list(range(33))
    assert engine.run(prompt) == 0
    assert engine.run(prompt) == 32
    assert engine.run(prompt[:32]) == 28
    assert engine.run([*prompt[:10], 99, 98, 97, 96]) == 8
    assert engine.scheduler.take_numbers()["hit_blocks"] == {"HOST": 17}


def load_of(engine: Engine, prompt: list[int]) -> tuple[StepPlan, Request]:
    """The plan that loads a prompt which HOST has."""
    request = Request(prompt)
    found = engine.ask(request)
    assert found
    engine.admit(request, 0, found)
    return engine.step(), request


def test_a_load_names_the_last_step_that_may_touch_its_blocks(engine: Engine) -> None:
    prompt = list(range(33))
    first = Request(prompt)
    engine.ask(first)
    engine.admit(first)
    engine.compute(first)
    plan = engine.scheduler.plan({first.request_id: 1}, 1, (), taken=[(first.request_id, engine.ids(first))])
    engine.work(plan)
    last = plan.step
    engine.end(first)
    engine.step()
    plan, request = load_of(engine, prompt)  # into blocks that were the first request's
    (job,) = plan.loads
    assert plan.step > last > 0
    assert job.after == last
    step = engine.scheduler.plan({request.request_id: 1}, 1, (), taken=[(request.request_id, engine.ids(request))]).step
    engine.pool.free += [
        block.block_id for block in request.blocks[0]
    ]  # it loses them in the step that loads into them
    plan, _ = load_of(engine, prompt)
    assert [job.after for job in plan.loads] == [-1]
    engine.scheduler.plan({}, 0, [request.request_id])
    assert engine.scheduler._touches.of(engine.ids(request)[0]) == step + 1  # that load's step may touch them


def test_a_block_may_be_touched_by_no_step_after_its_requests_end_while_it_is_stored(engine: Engine) -> None:
    request, other = Request(list(range(33))), Request(list(range(33)))
    engine.ask(request)
    engine.admit(request)
    engine.compute(request)
    ids = engine.ids(request)[0]
    taken = [(request.request_id, [ids]), (other.request_id, [ids[:3]])]
    plan = engine.scheduler.plan({request.request_id: 1, other.request_id: 1}, 2, (), taken=taken)
    for block in request.blocks[0]:
        block.ref_cnt = 2
    engine.scheduler.finished(request, [ids])
    assert engine.scheduler._touches.of(ids[:3]) == -1  # the other request goes on
    assert engine.scheduler._touches.of(ids[3:]) == engine.scheduler._touches.step
    engine.work(plan)


def test_a_host_too_small_sends_blocks_to_nvme_and_they_come_back_verified(tmp_path: Path) -> None:
    manager, namespaces = opened(tmp_path, FULL, 10, 64)
    with manager:
        engine = Engine(manager, FULL, namespaces)
        prompts = [list(range(start, start + 33)) for start in (0, 100, 200)]
        for prompt in prompts:
            engine.run(prompt)
            assert manager.settle(WAIT_S)
        assert [engine.run(prompt) for prompt in prompts] == [32, 32, 32]
        assert manager.stats().hit_blocks[Tier.NVME] >= 14
    manager, namespaces = opened(tmp_path, FULL, 10, 64)
    with manager:
        engine = Engine(manager, FULL, namespaces)
        assert engine.run(prompts[0]) == 32
        assert engine.scheduler.take_numbers()["hit_blocks"] == {"NVME": 8}


def test_a_producer_stores_and_loads_nothing_and_a_consumer_loads_and_stores_nothing(tmp_path: Path) -> None:
    prompt, other = list(range(33)), list(range(100, 133))
    manager, namespaces = opened(tmp_path, FULL, 64, 64)
    with manager:
        producer = Engine(manager, FULL, namespaces, EngineRole.of("kv_producer"))
        assert [producer.run(prompt), producer.run(prompt)] == [0, 0]
        assert len(manager.held(Tier.HOST)) == 8
        assert manager.settle(WAIT_S)
        assert len(manager.held(Tier.NVME)) == 8
    manager, namespaces = opened(tmp_path, FULL, 64, 64)
    with manager:
        consumer = Engine(manager, FULL, namespaces, EngineRole.of("kv_consumer"))
        assert [consumer.run(prompt), consumer.run(other), consumer.run(other)] == [32, 0, 0]
        assert manager.settle(WAIT_S)
        assert len(manager.held(Tier.HOST)) == len(manager.held(Tier.NVME)) == 8
        assert "stores_skipped" not in consumer.scheduler.take_numbers()
        assert manager.stats().engine_stores == 0
    manager, namespaces = opened(tmp_path, FULL, 64, 64)
    with manager:
        both = Engine(manager, FULL, namespaces, EngineRole.of("kv_both"))
        assert [both.run(prompt), both.run(other), both.run(other)] == [32, 0, 32]


def test_a_consumer_puts_no_objects_of_what_it_loads_from_nvme_and_loads_those_of_others(tmp_path: Path) -> None:
    prompt, consumer, store = list(range(33)), EngineRole.of("kv_consumer"), MemoryStore()
    manager, namespaces = opened(tmp_path / "a", FULL, 64, 64)
    with manager:
        assert Engine(manager, FULL, namespaces).run(prompt) == 0
        assert manager.settle(WAIT_S)
    for folder, role in (("a", consumer), ("a", BOTH), ("b", consumer)):
        objects = memory_objects(BLOCK_BYTES, blocks=4, store=store)
        suited = role.suited(engine_settings(tmp_path / folder, 64, 64))
        with open_engine_manager(suited, namespaces, BLOCK_BYTES, "vllm", object_pool=objects) as manager:
            manager._loads.locator = KnowsAll()
            assert Engine(manager, FULL, namespaces, role).run(prompt) == 32
            assert manager.settle(WAIT_S)
            assert manager.stats().offloaded_blocks[Tier.OBJECT] == (0 if role == consumer else 8)
            assert manager.stats().hit_blocks[Tier.OBJECT if folder == "b" else Tier.NVME] == 8


def test_what_the_catalog_said_is_counted_against_what_came_and_why_not_the_rest(tmp_path: Path) -> None:
    prompt, store = list(range(49)), MemoryStore()
    manager, namespaces = opened(tmp_path / "a", FULL, 64, 0, memory_objects(BLOCK_BYTES, blocks=4, store=store))
    with manager:
        one = Engine(manager, FULL, namespaces)
        assert one.run(prompt) == 0
        assert manager.settle(WAIT_S)
        (name,) = names_of(one, prompt, 0, 11)
    del store.objects[name]
    for locator, predicted, delivered, why in (
        (KnowsAll(), 12, 8, "unread"),
        (Unanswered(), 0, 0, "unanswered"),
        (Nowhere(), 0, 0, ""),
    ):
        folder, objects = tmp_path / type(locator).__name__, memory_objects(BLOCK_BYTES, blocks=4, store=store)
        manager, namespaces = opened(folder, FULL, 64, 0, objects)
        with manager, capture_logs() as remarks:
            manager._loads.locator = locator
            engine = Engine(manager, FULL, namespaces)
            assert engine.run(prompt) == delivered * BLOCK_TOKENS
            numbers = engine.scheduler.take_numbers()
            assert engine.run(prompt) == 48
            again = engine.scheduler.take_numbers()
        assert [numbers.get(f"{what}_blocks", 0) for what in ("predicted", "delivered")] == [predicted, delivered]
        assert numbers.get("undelivered_blocks", {}) == ({why: predicted - delivered} if predicted else {})
        assert numbers.get("unanswered_finds", 0) == (why == "unanswered")
        assert "predicted_blocks" not in again  # it lay in HOST
        told = [one for one in remarks if one["event"] == "request.found"]
        assert [(one["predicted_blocks"], one["delivered_blocks"], one["why"]) for one in told] == [
            (predicted, delivered, why),
            (12, 12, ""),
        ]
        assert all(one["log_level"] == "debug" for one in told)


class Unanswered(KnowsAll):
    """A catalog that does not answer in time."""

    def find(
        self, pool: str, namespace: NamespaceId, hashes: bytes, first: int, timeout_s: float, instance: str = ""
    ) -> FoundElsewhere:
        return NOTHING_FOUND


def test_numbers_wait_for_no_request_after_the_last_one(engine: Engine) -> None:
    scheduler = engine.scheduler
    scheduler._clock = lambda: 0.0  # a second never passes
    engine.run(list(range(33)))
    assert scheduler.take_numbers() == {"acquiring_requests": 0, "storing_blocks": 0, "parked_blocks": 0}
    assert scheduler.take_numbers() == {}
    request = Request(list(range(33)))
    found = engine.ask(request)
    engine.admit(request, 0, found)
    engine.step()
    assert scheduler.take_numbers() == {}  # steps of this request will tell
    request.num_computed_tokens = found
    engine.compute(request)
    scheduler.finished(request, engine.ids(request))
    assert scheduler.take_numbers() == {"hit_blocks": {"HOST": 8}}
    other = Request(list(range(100, 141)))
    engine.admit(other)
    engine.compute(other)
    scheduler.finished(other, engine.ids(other))
    assert scheduler.take_numbers() == {"storing_blocks": 10}
    engine.step()  # the engine goes on for what is to be stored
    assert scheduler.take_numbers() == {"storing_blocks": 0}


def told(engine: Engine) -> dict[tuple[Tier, bool], list[bytes]]:
    """What has changed in own tiers, by vLLM's hashes."""
    assert engine.scheduler.events is not None
    changed: dict[tuple[Tier, bool], list[bytes]] = {}
    for one in engine.scheduler.events.take():
        changed.setdefault((one.tier, one.is_held), []).extend(one.run.digests[one.begin : one.end])
    return changed


def test_who_listens_to_vllms_events_is_told_what_own_tiers_hold_by_vllms_hashes(tmp_path: Path) -> None:
    prompt = list(range(33))
    digests = Request(prompt).block_hashes
    manager, namespaces = opened(tmp_path, FULL, 64, 64)
    with manager:
        engine = Engine(manager, FULL, namespaces)
        engine.scheduler.follow_tiers()
        engine.run(prompt)
        assert told(engine) == {(Tier.HOST, True): digests}
        assert manager.settle(WAIT_S)
        manager.evict(Tier.HOST, b"".join(manager.held(Tier.HOST)))
        assert told(engine) == {(Tier.NVME, True): digests, (Tier.HOST, False): digests}
        assert told(engine) == {}
    manager, namespaces = opened(tmp_path, FULL, 64, 64)
    with manager:
        engine = Engine(manager, FULL, namespaces)
        engine.scheduler.follow_tiers()
        assert told(engine) == {}  # nobody knows vLLM's hashes of what came back
        assert engine.run(prompt) == 32
        assert told(engine) == {(Tier.HOST, True): digests}
        engine.scheduler.clear()
        assert told(engine) == {(Tier.HOST, False): digests}


def test_after_a_refusal_listeners_are_told_that_nothing_is_there_any_more(engine: Engine) -> None:
    prompt = list(range(33))
    engine.scheduler.follow_tiers()
    engine.run(prompt)
    digests = Request(prompt).block_hashes
    assert told(engine) == {(Tier.HOST, True): digests}
    engine.scheduler.answered(Answers(refused="rank 0: the model's weights were changed in place"))
    assert told(engine) | told(engine) == {(Tier.HOST, False): digests}
    assert told(engine) == {}


def test_parts_of_different_sizes_join_to_the_checksum_that_nvme_verifies(tmp_path: Path) -> None:
    sizes = (BLOCK_BYTES - 7, 3, 4)
    manager, namespaces = opened(tmp_path, FULL, 4, 64)
    with manager:
        engine = Engine(manager, FULL, namespaces, ranks=Ranks(tuple(Stage(size) for size in sizes)))
        prompts = [[seed * 100 + token for token in range(4 * BLOCK_TOKENS)] for seed in range(4)]
        for tokens in prompts:
            request = Request(tokens)
            engine.admit(request)
            engine.compute(request)
            engine.step(request)
            engine.end(request)
            assert manager.settle(WAIT_S)
        before = manager.stats().verified_reads
        request = Request(prompts[0])
        assert engine.ask(request) == 3 * BLOCK_TOKENS
        assert manager.stats().verified_reads > before
        assert manager.stats().corrupt_blocks == 0
        engine.scheduler.finished(request, [[]])


def test_until_every_host_has_host_nothing_is_stored(tmp_path: Path) -> None:
    manager, namespaces = opened(tmp_path, FULL, 64, 0)
    with manager:
        ranks = Ranks((Stage(BLOCK_BYTES), Stage(8)), hosts=2)
        engine = Engine(manager, FULL, namespaces, ranks=ranks)
        request = Request(list(range(2 * BLOCK_TOKENS)))
        engine.admit(request)
        engine.compute(request)
        plan = engine.scheduler.plan({request.request_id: 1}, 1, ())
        assert plan.host is not None and (plan.other_hosts, plan.stores) == ((), [])
        assert engine.scheduler.has_work and engine.scheduler.stores.storing_blocks == 0
        early = Request(list(range(100, 100 + 2 * BLOCK_TOKENS)))
        engine.admit(early)
        engine.compute(early)
        engine.scheduler.finished(early, engine.ids(early))
        assert engine.scheduler.stores.storing_blocks == 0  # it keeps no block of HBM
        other = plan.host._replace(pid=7, host=1)
        engine.scheduler.answered(Answers(hosts={1: other}))
        plan = engine.scheduler.plan({}, 0, ())
        assert plan.other_hosts == (other,) and len(plan.stores) == 1
        sums = np.zeros(2, dtype="<u4").tobytes()
        for part in (0, 1):
            assert engine.scheduler.stores.storing_blocks == 2
            engine.scheduler.answered(Answers(stored={plan.stores[0].id: {part: StoredPart(sums)}}))
        assert engine.scheduler.stores.storing_blocks == 0 and not engine.scheduler.has_work
        assert engine.scheduler.plan({}, 0, ()).host is None
        engine.scheduler.finished(request, engine.ids(request))


def test_a_prompt_that_host_cannot_hold_goes_through_it_to_nvme_while_its_request_runs(tmp_path: Path) -> None:
    manager, namespaces = opened(tmp_path, FULL, 10, 64)
    with manager:
        engine = Engine(manager, FULL, namespaces)
        request = Request(list(range(40 * BLOCK_TOKENS + 1)))
        assert engine.ask(request) == 0
        engine.admit(request)
        engine.compute(request)
        chain = engine.scheduler.requests.state_of(request).hashes(0, 0, 40, NATIVE.derived_hashes)

        def is_in_nvme() -> bool:  # after as many steps as a device takes for it
            engine.step(request)
            manager.settle(0.005)
            return set(split_hashes(chain)) <= set(manager.held(Tier.NVME))

        eventually(is_in_nvme, "the prompt does not reach NVME")
        engine.end(request)
        assert "stores_skipped" not in engine.scheduler.take_numbers()
        assert manager.stats().skipped == {}


def test_what_a_small_host_without_nvme_keeps_is_the_beginning_of_a_prompt(tmp_path: Path) -> None:
    manager, namespaces = opened(tmp_path, FULL, 10, 0)
    with manager:
        engine = Engine(manager, FULL, namespaces)
        prompt = list(range(40 * BLOCK_TOKENS + 1))
        assert engine.run(prompt) == 0
        assert engine.run(prompt) == 10 * BLOCK_TOKENS


def test_a_hybrid_model_finds_a_prefix_only_where_every_group_has_what_it_needs(hybrid: Engine) -> None:
    prompt = list(range(41))
    assert hybrid.run(prompt) == 0
    assert hybrid.run(prompt) == 40
    window = hybrid.scheduler.requests.state_of(Request(prompt))
    lost = window.hashes(1, 8, 9, NATIVE.derived_hashes)
    assert hybrid.manager.evict(Tier.HOST, lost) == 1
    assert hybrid.run(prompt) == 32  # block 8 of the window is gone, so a prefix that needs it is none


class KnowsStore(KnowsAll):
    """Claims what a store in memory holds, block by block, and what it is told to claim besides."""

    def __init__(self, objects: BlockObjects) -> None:
        assert isinstance(objects.store, MemoryStore)
        self.objects, self.store = objects, objects.store
        self.ghosts: set[str] = set()

    def held(self, namespace: NamespaceId, hashes: bytes) -> list[bool]:
        names = self.objects.names(namespace, split_hashes(hashes))
        return [name in self.store.objects or name in self.ghosts for name in names]

    def find(
        self, pool: str, namespace: NamespaceId, hashes: bytes, first: int, timeout_s: float, instance: str = ""
    ) -> FoundElsewhere:
        return FoundElsewhere([*self.held(namespace, hashes), False].index(False))

    def claimed(self, pool: str, namespace: NamespaceId, hashes: bytes, timeout_s: float) -> bytes:
        return np.packbits(self.held(namespace, hashes), bitorder="little").tobytes()


@contextmanager
def with_objects(folder: Path, groups: list[KvGroup], store: MemoryStore, nvme_slots: int = 0) -> Iterator[Engine]:
    """An engine of an empty instance whose blocks go to a store of objects of one block."""
    objects = memory_objects(BLOCK_BYTES, 1, store)
    manager, namespaces = opened(folder, groups, 64, nvme_slots, objects)
    with manager:
        manager._loads.locator = KnowsStore(objects)
        yield Engine(manager, groups, namespaces)


def names_of(engine: Engine, prompt: list[int], group: int, *blocks: int) -> list[str]:
    """What the objects of some blocks of a prompt are named."""
    request = engine.scheduler.requests.state_of(Request(prompt))
    hashes = [request.hashes(group, at, at + 1, NATIVE.derived_hashes) for at in blocks]
    assert isinstance(engine.manager.pools.object, BlockObjects)
    return engine.manager.pools.object.names(request.namespaces[group].id, hashes)


def test_a_window_comes_from_objects_and_lost_ones_shorten_the_hit(tmp_path: Path) -> None:
    prompt, store = list(range(41)), MemoryStore()
    with with_objects(tmp_path / "a", HYBRID, store) as one:
        assert one.run(prompt) == 0
        assert one.manager.settle(WAIT_S)
        kept = dict(store.objects)
    assert len([name for name in kept if name.startswith("1/")]) == 20  # both groups' blocks, one to an object
    with with_objects(tmp_path / "b", HYBRID, store) as two:
        assert two.run(prompt) == 40
        assert two.run(prompt) == 40  # from HOST
        hits = two.scheduler.take_numbers()["hit_blocks"]
        assert hits == {"OBJECT": 12, "HOST": 12}  # of the window the two blocks that it reads
    lost = {"b7 of the window": (1, 7, 28), "b9 of attention": (0, 9, 36), "b0 of the window": (1, 0, 40)}
    for number, (group, block, found) in enumerate(lost.values()):
        for claims in (False, True):  # a ghost is found out when it is read
            store.objects = dict(kept)
            with with_objects(tmp_path / f"c{number}{claims}", HYBRID, store) as three:
                (name,) = names_of(three, prompt, group, block)
                del store.objects[name]
                locator = three.manager._loads.locator
                assert isinstance(locator, KnowsStore)
                locator.ghosts = {name} if claims else set()
                asked = prompt[:37] if found == 28 else prompt  # of 36 tokens the window reads 7 and 8
                assert three.run(asked) == found


def test_a_window_whose_object_is_damaged_is_computed(tmp_path: Path) -> None:
    prompt, store = list(range(41)), MemoryStore()
    with with_objects(tmp_path / "a", HYBRID, store) as one:
        one.run(prompt)
        assert one.manager.settle(WAIT_S)
    with with_objects(tmp_path / "b", HYBRID, store) as two:
        for name in names_of(two, prompt, 1, 8, 9):
            body, put_ns = store.objects[name]
            store.objects[name] = body[:-1] + bytes([body[-1] ^ 1]), put_ns
        assert two.run(prompt) == 32  # every byte of what it loads is checked
        assert two.run(prompt) == 40


def test_a_state_comes_from_an_object_and_without_it_the_prefix_is_computed(tmp_path: Path) -> None:
    prompt, store = list(range(17)), MemoryStore()
    with with_objects(tmp_path / "a", STATES, store) as one:
        request, offer = begun(one, prompt)
        one.work(plan_with(one, offer))
        one.compute(request)
        one.step(request)
        one.end(request)
        assert one.manager.settle(WAIT_S)
    with with_objects(tmp_path / "b", STATES, store) as two:
        assert two.run(prompt) == 16
        assert two.scheduler.take_numbers()["hit_blocks"] == {"OBJECT": 5}
    with with_objects(tmp_path / "c", STATES, store) as three:
        (name,) = names_of(three, prompt, 1, 3)
        del store.objects[name]
        parting = Request(prompt)
        assert three.ask(parting) == 0
        assert (
            three.scheduler.loads.parts_at(parting.request_id) == 16
        )  # blocks in objects count: a state is of use there


@pytest.mark.parametrize("seed", range(20))
def test_whatever_lies_where_a_hit_reaches_as_far_as_trying_every_length_gives(tmp_path: Path, seed: int) -> None:
    """Blocks are in HOST, in NVME, in objects or nowhere, each by itself."""
    chosen, store = random.Random(seed), MemoryStore()
    prompt = list(range(41))
    with with_objects(tmp_path / "a", HYBRID, store, nvme_slots=64) as one:
        one.run(prompt)
        assert one.manager.settle(WAIT_S)
        held: list[list[bool]] = []
        for group in range(2):
            state = one.scheduler.requests.state_of(Request(prompt))
            row = []
            for at, name in enumerate(names_of(one, prompt, group, *range(10))):
                block = state.hashes(group, at, at + 1, NATIVE.derived_hashes)
                stays = chosen.choices([None, Tier.HOST, Tier.NVME, Tier.OBJECT], [1, 4, 4, 4])[0]
                for tier in {Tier.HOST, Tier.NVME} - {stays}:
                    one.manager.evict(tier, block)
                if stays is not Tier.OBJECT:
                    store.objects.pop(name, None)
                row.append(stays is not None)
            held.append(row)
        expected = next(end for end in range(10, -1, -1) if all(held[0][:end]) and all(held[1][max(0, end - 2) : end]))
        assert one.run(prompt) == expected * BLOCK_TOKENS, held


def test_a_window_comes_from_the_pod(tmp_path: Path) -> None:
    prompt, pod = list(range(41)), str(tmp_path / "pod")
    manager, namespaces = opened(tmp_path / "a", HYBRID, 64, 64, pod=pod)
    with manager:
        assert Engine(manager, HYBRID, namespaces).run(prompt) == 0
        assert manager.settle(WAIT_S)
    manager, namespaces = opened(tmp_path / "b", HYBRID, 64, 64, pod=pod)
    with manager:
        assert isinstance(manager.pools.pod, PodFolder)
        manager.pools.pod.poll()
        manager.pools.pod.poll()  # once more: the clock of files ticks slowly
        two = Engine(manager, HYBRID, namespaces)
        assert two.run(prompt) == 40
        assert two.scheduler.take_numbers()["hit_blocks"] == {"NVME": 12}


def test_who_is_asked_and_never_answers_is_a_miss(tmp_path: Path) -> None:
    prompt, store, gate = list(range(41)), MemoryStore(), threading.Event()
    with with_objects(tmp_path / "a", HYBRID, store) as one:
        one.manager._loads.locator.claimed = lambda *_: gate.wait(4 * WAIT_S) and b""  # type: ignore[method-assign]
        one.manager._wait_s = 0.005
        assert one.run(prompt) == 0
        one.manager._wait_s = WAIT_S
        gate.set()
        assert one.run(prompt) == 40


def test_a_prefix_ends_one_block_before_what_is_held_where_a_draft_model_reads_it(tmp_path: Path) -> None:
    prompt = list(range(33))
    for number, groups in enumerate((DRAFTED, [DRAFTED[0], HYBRID[1]])):
        manager, namespaces = opened(tmp_path / str(number), groups, 64, 0)
        with manager:
            engine = Engine(manager, groups, namespaces)
            assert engine.run(prompt) == 0
            assert (
                engine.run(prompt) == 28
            )  # the block behind it is held, what a draft model keeps of its last token is not
            assert engine.run(prompt[:32]) == 28
            assert engine.run([*prompt[:10], 99, 98, 97, 96]) == 4
            assert engine.run([*prompt[:6], 99, 98, 97, 96]) == 0
            assert engine.scheduler.take_numbers()["hit_blocks"] == {
                "HOST": (15, 20)[number]
            }  # none that was only asked for


def test_a_second_request_waits_for_the_first_ones_load(engine: Engine) -> None:
    prompt = list(range(33))
    engine.run(prompt)
    first, second = Request(prompt), Request(prompt)
    assert engine.ask(first) == 32
    engine.admit(first, 0, 32)
    assert engine.scheduler.loads.matched(second, 0) is None
    engine.step()
    assert engine.scheduler.loads.matched(second, 0) == 32


def test_a_failed_load_is_never_offered_to_that_request_again(engine: Engine) -> None:
    prompt = list(range(33))
    engine.run(prompt)
    request = Request(prompt)
    assert engine.ask(request) == 32
    engine.admit(request, 0, 32)
    engine.work(engine.scheduler.plan({}, 0, ()), failing="the device is gone")
    assert engine.scheduler.loads.matched(request, 0) == 0
    assert engine.ask(Request(prompt)) == 32


def test_a_failed_store_claims_nothing(engine: Engine) -> None:
    request = Request(list(range(33)))
    assert engine.ask(request) == 0
    engine.admit(request)
    engine.compute(request)
    engine.work(engine.scheduler.plan({request.request_id: 9}, 9, ()), failing="no memory")
    assert engine.manager.held(Tier.HOST) == []
    assert all(not block.ref_cnt for block in engine.pool.blocks)


def test_blocks_stay_referenced_until_the_workers_have_answered(engine: Engine) -> None:
    request = Request(list(range(33)))
    engine.admit(request)
    engine.compute(request)
    plan = engine.scheduler.plan({request.request_id: 9}, 9, ())
    assert sum(block.ref_cnt for block in engine.pool.blocks) == 8
    assert engine.scheduler.stores.has_work()
    engine.work(plan)
    assert sum(block.ref_cnt for block in engine.pool.blocks) == 0
    assert not engine.scheduler.stores.has_work()


def test_what_steps_in_flight_compute_is_not_stored_yet(engine: Engine) -> None:
    request = Request(list(range(33)))
    engine.admit(request)
    engine.compute(request)
    request.num_in_flight_tokens = 18
    engine.step(request)
    assert len(engine.manager.held(Tier.HOST)) == 3  # 14 tokens are certain


def test_blocks_that_decoding_fills_are_stored_while_others_decode(engine: Engine) -> None:
    requests = [Request(list(range(start, start + 33 + start % 3))) for start in (0, 100, 200)]
    for request in requests:
        engine.admit(request)
        engine.compute(request)
        request.num_computed_tokens = request.num_tokens
    for step in range(40):
        engine.step(*requests)
        full = sum(request.num_computed_tokens // BLOCK_TOKENS for request in requests)
        assert len(engine.manager.held(Tier.HOST)) == full, f"step {step}"
        for request in requests:
            request.num_computed_tokens += 1
            request.num_tokens += 1
            if request.num_computed_tokens % BLOCK_TOKENS == 0:
                at = len(request.block_hashes)
                request.block_hashes.append(hashlib.sha256(request.block_hashes[-1]).digest())
                block = engine.pool.blocks[engine.pool.free.pop()]
                request.blocks[0].append(block)
                engine.hbm[block.block_id] = bytes_of(request.block_hashes[at], 0)
                engine.pool.cache_full_blocks(request, request.blocks[0], at, at + 1, BLOCK_TOKENS, 0)


def test_a_request_that_ends_while_it_waits_gives_back_its_pins(engine: Engine) -> None:
    prompt = list(range(33))
    engine.run(prompt)
    request = Request(prompt)
    assert engine.ask(request) == 32
    engine.scheduler.finished(request, [[]])
    counts = engine.manager.stats().pools[Tier.HOST]
    assert counts.evictable == counts.held == 8


def test_the_stream_holds_hbm_as_the_engine_has_it(engine: Engine) -> None:
    request = Request(list(range(33)))
    engine.admit(request)
    engine.compute(request)
    engine.step(request)
    state = engine.scheduler.requests.state_of(request)
    assert b"".join(engine.manager.held(Tier.HBM)) == state.hashes(0, 0, 8, NATIVE.derived_hashes)
    engine.end(request)
    assert engine.manager.held(Tier.HBM) == []
    assert len(engine.manager.held(Tier.HOST)) == 8


def test_a_block_that_only_moved_stays_in_the_stream_until_it_goes(engine: Engine) -> None:
    request = Request(list(range(33)))
    engine.admit(request)
    engine.compute(request)
    engine.step(request)
    held, cached = engine.manager.held(Tier.HBM), engine.pool.cached_block_hash_to_block
    block, other = request.blocks[0][3], engine.pool.blocks[engine.pool.free.pop()]
    key = request.block_hashes[3] + bytes(4)
    cached.pop(key, block.block_id)
    cached.insert(key, other)
    engine.step(request)
    assert engine.manager.held(Tier.HBM) == held
    cached.pop(key, other.block_id)
    engine.step(request)
    assert engine.manager.held(Tier.HBM) == [*held[:3], *held[4:]]


def test_a_block_of_other_weights_under_the_same_number_is_not_stored(engine: Engine) -> None:
    """An adapter was loaded anew; vLLM finds under its name and number what the weights before have computed."""
    spaces = engine.scheduler.requests._namespaces_of(None)
    engine.scheduler.requests._namespaces_of = lambda _, digest: spaces if digest == "new" else ()

    def adapted(tokens: list[int]) -> Request:
        request = Request(tokens)
        request.lora_request = SimpleNamespace(lora_int_id=1)
        return request

    before, fresh, after = (adapted(list(range(33))) for _ in range(3))
    engine.scheduler.answered(Answers(adapters={0: [Loaded(1, "old")]}))
    engine.admit(before)
    engine.compute(before)
    engine.scheduler.answered(Answers(adapters={0: [Loaded(1, "new")]}))
    engine.admit(fresh)
    engine.compute(fresh)
    engine.step(fresh)
    stored = engine.manager.held(Tier.HOST)
    assert len(stored) == len(engine.manager.held(Tier.HBM)) == 8
    engine.manager.evict(Tier.HOST, b"".join(stored))
    engine.requests[after.request_id], after.blocks = after, before.blocks
    after.num_computed_tokens = 32
    engine.scheduler.allocated(after, engine.ids(after), 0)
    assert not engine.step(after).stores
    assert engine.manager.held(Tier.HOST) == []


def test_a_sessions_tokens_that_were_taken_back_are_hashed_anew(engine: Engine) -> None:
    request, other = Request(list(range(33))), Request([*range(20), *range(50, 63)])
    state = engine.scheduler.requests.state_of(request)
    before = state.hashes(0, 0, 8, NATIVE.derived_hashes)
    request.block_hashes = other.block_hashes
    after = state.hashes(0, 0, 8, NATIVE.derived_hashes)
    assert before[: 5 * HASH_BYTES] == after[: 5 * HASH_BYTES]
    assert before[5 * HASH_BYTES :] != after[5 * HASH_BYTES :]


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Engine]:
    """A HOST of ten blocks."""
    manager, namespaces = opened(tmp_path, FULL, 10, 0)
    with manager:
        yield Engine(manager, FULL, namespaces)


def test_a_chains_deepest_blocks_leave_before_its_beginning_though_that_was_loaded_first(small: Engine) -> None:
    prompt = list(range(33))
    small.run(prompt[:16])
    assert small.run(prompt) == 16
    small.run(list(range(100, 117)))  # four blocks, for which two of the eight leave
    assert small.run(prompt) == 24


def test_a_chains_deepest_blocks_leave_before_its_beginning_though_that_was_stored_first(small: Engine) -> None:
    prompt = Request(list(range(33)))
    small.admit(prompt)
    small.compute(prompt)
    for computed in (16, 32):
        prompt.num_computed_tokens = computed
        small.step(prompt)
    small.end(prompt)
    small.run(list(range(100, 117)))
    assert small.ask(Request(list(range(33)))) == 24


def test_a_chain_whose_beginning_the_engine_kept_in_hbm_is_used_whole(small: Engine) -> None:
    prompt = list(range(17))
    small.run(prompt)
    small.run(list(range(100, 117)))
    request = Request(prompt)
    small.admit(request, 16)  # all of it was in HBM: HOST was never asked
    small.compute(request)
    small.step(request)
    small.end(request)
    small.run(list(range(200, 217)))
    assert small.ask(Request(prompt)) == 16


def test_a_refreshed_chain_that_lies_partly_in_nvme_leaves_no_block_pinned(tmp_path: Path) -> None:
    manager, namespaces = opened(tmp_path, FULL, 10, 64)
    with manager:
        engine = Engine(manager, FULL, namespaces)
        for start in (0, 100):
            engine.run(list(range(start, start + 33)))
            assert manager.settle(WAIT_S)
        chain = engine.scheduler.requests.state_of(Request(list(range(33)))).hashes(0, 0, 8, NATIVE.derived_hashes)
        tiers = set(manager.holders(chain))
        assert tiers == {Tier.HOST, Tier.NVME}
        manager.refresh(chain)
        engine.run(list(range(200, 241)))
        assert len(set(manager.held(Tier.HOST))) == 10
        assert not set(manager.held(Tier.HOST)) & {
            chain[at : at + HASH_BYTES] for at in range(0, len(chain), HASH_BYTES)
        }


def test_after_a_refusal_nothing_is_stored_and_what_requests_wait_for_is_still_handed_out(engine: Engine) -> None:
    prompt = list(range(33))
    engine.run(prompt)
    waiting, other = Request(prompt), Request(list(range(100, 133)))
    assert engine.ask(waiting) == 32
    engine.admit(waiting, 0, 32)
    assert engine.scheduler.loads.hits_of_last() == {Tier.HOST: 8}
    engine.scheduler.loads.abandon("lost")
    assert engine.scheduler.loads.hits_of_last() == {}  # vLLM asks for them all the same
    engine.admit(other)
    engine.compute(other)
    engine.scheduler.refusal = "a rank cannot map HOST"
    plan = engine.scheduler.plan({other.request_id: 9}, 9, ())
    assert [(job.request, bool(job.why)) for job in plan.loads] == [(waiting.request_id, False), ("lost", True)]
    assert plan.stores == []
    engine.scheduler.finished(other, engine.ids(other))
    assert engine.scheduler.plan({}, 0, ()).stores == []


def begun(engine: Engine, tokens: list[int]) -> tuple[Request, StateOffer]:
    """A request in the step that computes its last whole block, and what vLLM offers then."""
    request = Request(tokens)
    assert engine.ask(request) == 0
    engine.admit(request)
    for group, blocks in zip(engine.groups, request.blocks, strict=True):
        engine.pool.cache_full_blocks(request, blocks, 0, len(blocks), BLOCK_TOKENS, group.id)
    at = len(request.block_hashes)
    return request, StateOffer(request.request_id, 1, request.blocks[1][at - 1].block_id, at * BLOCK_TOKENS)


def plan_with(
    engine: Engine, *offers: StateOffer, finished: tuple[str, ...] = (), preempted: tuple[str, ...] = ()
) -> StepPlan:
    return engine.scheduler.plan({offer.request_id: 8 for offer in offers}, 8, preempted, offers, finished)


def test_a_state_is_kept_when_it_is_offered_and_copied_once_it_is_computed(recurrent: Engine) -> None:
    engine = recurrent
    request, offer = begun(engine, list(range(17)))
    plan = plan_with(engine, offer)
    assert not plan.stores
    state = engine.pool.blocks[offer.block_id]
    assert state.ref_cnt == 1
    engine.work(plan)
    engine.compute(request)
    plan = engine.step(request)
    assert any(offer.block_id in split_slots(job.blocks) for job in plan.stores)
    assert state.ref_cnt == 0
    engine.end(request)
    assert engine.run(list(range(17))) == 16
    parting = Request([*range(12), 99, 98, 97, 96, 95])
    assert engine.ask(parting) == 0  # no state was left there, and one would be of use
    assert engine.scheduler.loads.parts_at(parting.request_id) == 12


@pytest.mark.parametrize(("has_draft", "tokens"), [(False, 16), (True, 12)])
def test_the_state_at_a_prompts_end_is_kept_where_vllm_leaves_it(tmp_path: Path, has_draft: bool, tokens: int) -> None:
    groups = [STATES[0]._replace(has_draft=has_draft), STATES[1]]  # with drafts a prefix ends a block earlier
    manager, namespaces = opened(tmp_path, groups, 64, 0)
    with manager:
        engine = Engine(manager, groups, namespaces)
        request, last = begun(engine, list(range(19)))
        blocks = request.blocks[1]
        offers = [last._replace(tokens=at, block_id=blocks[at // BLOCK_TOKENS - 1].block_id) for at in (4, 8, 12, 16)]
        engine.work(plan_with(engine, *offers))
        kept = {(at + 1) * BLOCK_TOKENS for _, at in engine.scheduler.requests.states[request.request_id].states}
        assert kept == ({12, 16} if has_draft else {16})
        assert tokens in kept
        engine.compute(request)
        engine.step(request)
        engine.end(request)
        assert engine.run(list(range(19))) == tokens


def test_a_parked_window_has_what_the_next_turn_reads_where_a_draft_ends_its_prefix_earlier(tmp_path: Path) -> None:
    groups = [HYBRID[0]._replace(has_draft=True), HYBRID[1]._replace(has_draft=True)]
    manager, namespaces = opened(tmp_path, groups, 64, 0)
    with manager:
        engine = Engine(manager, groups, namespaces)
        engine.run(list(range(33)))
        request = Request(list(range(33)))
        assert engine.ask(request) == 28  # of 8 blocks, the last is computed again
        state = engine.scheduler.requests.states[request.request_id]
        engine.admit(request, 0, 28)
        engine.compute(request)
        engine.step(request)
        engine.step(request)
        assert state.stored == [8, 8]
        assert engine.scheduler.stores._needed(state) == [(0, 0, 8), (1, 5, 8)]  # what was just loaded, and the end


def test_blocks_that_vllm_hashes_later_are_looked_for_now_and_then_and_not_lost(engine: Engine) -> None:
    hashed = [8]
    engine.scheduler.bind(
        engine.pool, lambda name: engine.ids(engine.requests[name]), lambda tokens, _: min(tokens, hashed[0])
    )
    request = Request(list(range(33)))
    engine.ask(request)
    engine.admit(request)
    engine.compute(request)
    engine.scheduler.plan({request.request_id: 32}, 32, ())
    state = engine.scheduler.requests.states[request.request_id]
    assert state.stored == [2]
    assert state.due_step - engine.scheduler.stores._step == 4  # not with each step
    hashed[0] = 32
    for _ in range(4):
        engine.step(request)
    assert state.stored == [8]


@pytest.mark.parametrize("kv_role", ["kv_producer", "kv_consumer"])
def test_states_follow_the_role_too(tmp_path: Path, kv_role: str) -> None:
    manager, namespaces = opened(tmp_path, STATES, 64, 0)
    with manager:
        engine = Engine(manager, STATES, namespaces, EngineRole.of(kv_role))
        request, offer = begun(engine, list(range(17)))
        engine.work(plan_with(engine, offer))
        engine.compute(request)
        engine.step(request)
        engine.end(request)
        assert len(manager.held(Tier.HOST)) == (5 if kv_role == "kv_producer" else 0)  # 4 blocks and a state
        assert engine.run(list(range(17))) == 0
        parting = Request([*range(12), 99, 98, 97, 96, 95])
        assert engine.ask(parting) == 0
        parts_at = engine.scheduler.loads.parts_at(parting.request_id)
        assert parts_at == (12 if kv_role == "kv_producer" else 0)  # a state there is of use to consumers
        if kv_role == "kv_producer":  # blocks are held, the state is not
            consumer = Engine(manager, STATES, namespaces, EngineRole.of("kv_consumer"))
            again = Request([*range(12), 99, 98, 97, 96, 95])
            assert consumer.ask(again) == 0
            assert consumer.scheduler.requests.states[again.request_id].parts_at == 12
            assert consumer.scheduler.loads.parts_at(again.request_id) == 0  # nobody would get it from here


def test_what_is_offered_too_late_or_is_not_the_states_block_is_not_stored(recurrent: Engine) -> None:
    engine = recurrent
    request, offer = begun(engine, list(range(17)))
    strange = engine.pool.blocks[engine.pool.free[-1]].block_id
    for plan in (
        plan_with(engine, offer, finished=(offer.request_id,)),
        plan_with(engine, offer, preempted=(offer.request_id,)),
        plan_with(engine, offer._replace(request_id="gone")),
        plan_with(engine, offer._replace(tokens=14)),  # within a block
        plan_with(engine, offer._replace(tokens=12)),  # another boundary's
        plan_with(engine, offer._replace(block_id=strange)),
        plan_with(engine, offer._replace(block_id=0)),
        plan_with(engine, offer._replace(group=0)),
        plan_with(engine),
    ):
        engine.work(plan)
        assert not plan.stores
    assert engine.scheduler.take_numbers()["states_lost"] == 3
    engine.compute(request)
    engine.end(request)
    assert engine.run(list(range(17))) == 0


def test_a_load_that_vllm_cuts_short_fails_where_its_state_would_be_anothers(recurrent: Engine) -> None:
    engine = recurrent
    request, offer = begun(engine, list(range(17)))
    engine.work(plan_with(engine, offer))
    engine.compute(request)
    engine.step(request)
    engine.end(request)
    again = Request(list(range(17)))
    assert engine.ask(again) == 16
    engine.admit(again, 0, 12)
    (job,) = engine.scheduler.plan({}, 0, ()).loads
    assert job.after == -1  # forwards move states between blocks that no list names
    assert job.why == "vLLM takes 12 tokens of 16"


def test_a_heartbeat_tells_how_quickly_the_engine_computes_prompts(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_s = 100.0
    scheduler = engine.scheduler
    monkeypatch.setattr(scheduler, "_clock", lambda: at_s)
    for scheduled, took_s in (({"p": 4000}, 2.0), ({"p": 1}, 0.1), ({"p": 1}, 0.1)):
        scheduler.plan(scheduled, sum(scheduled.values()), ())
        at_s += took_s
    assert engine.manager.heartbeat(ORIGIN).prefill_tokens_per_s == pytest.approx(2000.0)


def test_a_heartbeat_tells_how_quickly_the_engine_works_off_its_queue(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_s = 100.0
    scheduler = engine.scheduler
    monkeypatch.setattr(scheduler, "_clock", lambda: at_s)
    waiting = [Request(list(range(first, first + 12))) for first in (0, 100, 200)]
    for request in waiting:
        engine.ask(request)
    assert scheduler.requests.queued_tokens == 36
    for request in waiting:  # one begins in each step, and the next one waits for it
        engine.admit(request, 0, 0)
        scheduler.plan({request.request_id: 12}, 12, ())
        at_s += 0.5
    assert engine.manager.heartbeat(ORIGIN).queue_tokens_per_s == pytest.approx(24.0)
    assert scheduler.requests.queued_tokens == 0
