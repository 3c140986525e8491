"""Sets of candidates: whatever happens to instances, they are those that asking each instance would find."""

from __future__ import annotations

import random

import msgspec
import pytest

from kvbm.catalog.access.callers import EMBEDDED, Caller
from kvbm.catalog.answers.candidates import CandidateSets, model_of
from kvbm.catalog.answers.visibility import Visibility
from kvbm.catalog.follow.named_namespaces import MOST_TOLD
from kvbm.catalog.follow.sequencer import Sequencer, SequencerState
from kvbm.catalog.members.liveness import HeartbeatReceived, Liveness, LivenessTicked, OwnPulse, StreamProgress
from kvbm.catalog.sql.rows import InstanceStatus
from kvbm.core.codec import decode_frame, encode_frame
from kvbm.core.events import JANITOR, PoolStated, StopReason
from kvbm.core.ids import Epoch, InstanceId, Namespace, NamespaceId, Offset, Tier
from kvbm.reference.ledger import Ledger
from kvbm.reference.router import Candidates, ReferenceRouter
from kvbm.streams.base import Heartbeat, StreamMessage
from tests.indexes import NATIVE

NAMES = [InstanceId(f"i-{number}") for number in range(12)]
SPACES = [
    Namespace(model=model, block_tokens=16, tenant=tenant, lora=lora)
    for model in ("m", "n")
    for tenant in ("", "acme", "bolt")
    for lora in ("", "style")
]
ROUTERS = [
    EMBEDDED,
    Caller("acme's", "router", frozenset({"acme"})),
    Caller("two", "router", frozenset({"bolt", ""})),
    Caller("nobody's", "router", frozenset({"other"})),
]


class World:
    """A sequencer and a liveness that are told what happens, and sets that follow them."""

    def __init__(self) -> None:
        self.sequencer: Sequencer = NATIVE.sequencer()
        self.liveness = Liveness()
        self.router = ReferenceRouter(self.sequencer.index)
        self.sets: CandidateSets[Candidates] = CandidateSets(self.router, self.liveness, self.sequencer)
        self.visibility = Visibility(self.sequencer)
        self.ledgers: dict[InstanceId, Ledger] = {}
        self.epochs = dict.fromkeys(NAMES, 0)
        self.sequence, self.now_s, self.beats = 0, 0.0, 0
        self.liveness.step(0.0, OwnPulse())

    def publish(self, instance: InstanceId) -> None:
        messages = []
        for frame in self.ledgers[instance].take_frames(instance, 1):
            self.sequence += 1
            data = encode_frame(decode_frame(frame.data)[0])
            messages.append(StreamMessage(self.sequence, f"kvbm.v1.events.c.{instance}", data))
        for one in self.sequencer.step(self.now_s, messages, False).advanced:
            row, owner = self.sequencer.instance_row(one), self.sequencer.ownership(one)
            assert row is not None
            stopped = row.state is InstanceStatus.STOPPED
            epoch = self.sequencer.position(one).epoch
            self.liveness.step(self.now_s, StreamProgress(one, epoch, stopped, owner.run, owner.life))

    def start(self, instance: InstanceId, spaces: list[Namespace], engine: str) -> None:
        self.epochs[instance] += 1
        ledger = self.ledgers[instance] = Ledger((PoolStated(Tier.HBM, 8, 1024),))
        ledger.start(Epoch(self.epochs[instance]), spaces, [], engine, "0")
        self.publish(instance)

    def beat(
        self, instance: InstanceId, spaces: tuple[NamespaceId, ...], stopping: bool, told: tuple[bytes, ...] = ()
    ) -> None:
        self.beats += 1
        heartbeat = Heartbeat(
            instance=instance,
            cluster="c",
            epoch=Epoch(max(1, self.epochs[instance])),
            published=Offset(0),
            wall_time_ns=self.beats,
            namespaces=spaces,
            told=told,
            stopping=stopping,
        )
        self.liveness.step(self.now_s, HeartbeatReceived(heartbeat))
        believed = self.liveness.last(instance)
        if believed is not None and believed.heartbeat == heartbeat and self.sequencer.hear_namespaces(heartbeat):
            self.liveness.note(instance)

    def pass_time(self, seconds: float) -> None:
        for _ in range(round(seconds / 0.5)):
            self.now_s += 0.5
            self.liveness.step(self.now_s, OwnPulse())
            self.liveness.step(self.now_s, LivenessTicked())

    def forget(self, instance: InstanceId) -> None:
        self.liveness.forget(instance)
        self.sets.forget(instance)
        self.router.forget(instance)

    def found(self, caller: Caller, space: Namespace, is_known: bool) -> set[InstanceId]:
        """Whom the sets have."""
        self.sets.refresh()
        serving = self.sets.serving(space.id, space if is_known else None)
        visible = self.sets.visible(caller)
        each = {one for group in serving for one in group.instances}
        return {one for one in each if visible is None or any(one in group for group in visible)}

    def wanted(self, caller: Caller, space: Namespace, is_known: bool) -> set[InstanceId]:
        """Whom one finds who asks each instance."""
        return {
            one
            for one in NAMES
            if self.liveness.may_serve(one)
            and self.serves(one, space, is_known)
            and self.visibility.instance(caller, one)
        }

    def serves(self, instance: InstanceId, space: Namespace, is_known: bool) -> bool:
        row = self.sequencer.instance_row(instance)
        if row is not None and row.engine == JANITOR:
            return False
        declared, known = self.sequencer.declared(instance), self.sequencer.namespaces()
        if space.id in declared or self.sequencer.declares_nothing(instance):
            return True
        return (is_known or space.id in known) and any(
            model_of(known[one]) == model_of(space) for one in declared if one in known
        )


def step(world: World, pick: random.Random) -> None:
    instance, spaces = pick.choice(NAMES), pick.sample(SPACES, pick.randrange(4))
    match pick.randrange(8):
        case 0 | 1:
            world.start(instance, spaces, JANITOR if pick.random() < 0.1 else "engine")
        case 2 | 3 | 4:
            told = tuple(one.canonical() for one in pick.sample(SPACES, pick.choice([0, 0, 2])))
            world.beat(instance, tuple(one.id for one in spaces), pick.random() < 0.1, told)
        case 5 if instance in world.ledgers and world.epochs[instance]:
            if not world.ledgers[instance].stopped:
                world.ledgers[instance].stop(StopReason.SHUTDOWN)
                world.publish(instance)
        case 6:
            world.pass_time(pick.choice([0.5, 1.0, 5.0]))
        case 7:
            if pick.random() < 0.3:
                world.sequencer.forget_namespaces([one.id for one in spaces])
            elif pick.random() < 0.3:
                world.forget(instance)


@pytest.mark.parametrize("seed", range(30))
def test_sets_are_what_asking_each_instance_finds(seed: int) -> None:
    pick, world, most = random.Random(seed), World(), 0
    world.sequencer.known_namespaces._most = 7 if seed % 2 else 100  # of the twelve: some have to go, and come back
    for _ in range(150):
        for _ in range(pick.choice([1, 1, 3])):
            step(world, pick)
        for caller in ROUTERS:
            space, is_known = pick.choice(SPACES), pick.random() < 0.8
            found = world.found(caller, space, is_known)
            assert found == world.wanted(caller, space, is_known)
            most = max(most, len(found))
            assert world.visibility.namespaces(caller) == Visibility(world.sequencer).namespaces(caller)
            if seed % 2:
                assert len(world.sequencer.namespaces()) <= 7
    assert most > 2


def test_more_changes_than_are_remembered_are_found_by_looking_at_all() -> None:
    world = World()
    for number in range(5000):
        space = SPACES[number % 3]
        world.beat(NAMES[number % 12], (space.id,), stopping=False, told=(space.canonical(),))
    assert world.found(EMBEDDED, SPACES[0], is_known=True) == set(NAMES)


ACME, BOLT = (
    Namespace(model="m" if tenant == "acme" else "n", block_tokens=16, tenant=tenant) for tenant in ("acme", "bolt")
)
OF_ACME, OF_BOLT = (Caller(f"{tenant}'s", "router", frozenset({tenant})) for tenant in ("acme", "bolt"))
FIRST, SECOND, THIRD = NAMES[:3]


def two_tenants() -> World:
    """Two instances, each of a tenant with a model of its own."""
    world = World()
    for instance, space in ((FIRST, ACME), (SECOND, BOLT)):
        world.start(instance, [space], "engine")
        world.beat(instance, (space.id,), stopping=False)
    return world


def test_what_an_instance_declared_and_was_erased_brings_it_no_other_tenants_prompts() -> None:
    world = two_tenants()
    world.sequencer.forget_namespaces([ACME.id])
    for caller in (EMBEDDED, OF_BOLT):
        assert world.found(caller, BOLT, is_known=True) == {SECOND}
    assert not world.visibility.instance(OF_BOLT, FIRST)
    for caller in (EMBEDDED, OF_ACME):  # nobody serves it until it is named again
        assert world.found(caller, ACME, is_known=True) == world.found(caller, ACME, is_known=False) == set()


def test_a_namespace_that_is_used_anew_after_an_erasure_is_known_again_by_heartbeats_alone() -> None:
    world = two_tenants()
    world.sequencer.forget_namespaces([ACME.id])
    world.beat(FIRST, (ACME.id,), stopping=False, told=(ACME.canonical(),))
    assert world.sequencer.namespaces()[ACME.id] == ACME
    for caller in (EMBEDDED, OF_ACME):
        assert world.found(caller, ACME, is_known=True) == {FIRST}
    assert world.found(EMBEDDED, BOLT, is_known=True) == {SECOND}
    assert world.visibility.instance(OF_ACME, FIRST) and not world.visibility.instance(OF_BOLT, FIRST)


def test_of_whom_nothing_is_known_but_heartbeats_nobody_is_sent_prompts() -> None:
    world = two_tenants()
    world.beat(THIRD, (), stopping=False)
    for caller in (EMBEDDED, OF_ACME, OF_BOLT):
        for space in (ACME, BOLT):
            for is_known in (True, False):
                assert THIRD not in world.found(caller, space, is_known)
    assert not any(world.visibility.instance(caller, THIRD) for caller in (OF_ACME, OF_BOLT))
    assert world.visibility.waited_for(OF_ACME, THIRD) != THIRD


def test_what_has_declared_that_it_names_no_namespace_serves_those_alone_who_see_all() -> None:
    world = two_tenants()
    world.start(THIRD, [], "engine")
    world.beat(THIRD, (), stopping=False)
    assert world.found(EMBEDDED, ACME, is_known=True) == {FIRST, THIRD}
    assert world.found(OF_ACME, ACME, is_known=True) == {FIRST}
    assert not world.visibility.instance(OF_ACME, THIRD)
    world.beat(THIRD, (BOLT.id,), stopping=False)  # it names one
    assert world.found(EMBEDDED, ACME, is_known=True) == {FIRST}
    assert world.found(OF_BOLT, BOLT, is_known=True) == {SECOND, THIRD}


def test_a_checkpoint_keeps_whether_an_instance_has_declared_nothing_or_was_erased() -> None:
    world = two_tenants()
    world.start(THIRD, [], "engine")
    world.sequencer.forget_namespaces([ACME.id])
    again: Sequencer = NATIVE.sequencer()
    again.restore(msgspec.msgpack.decode(msgspec.msgpack.encode(world.sequencer.state()), type=SequencerState), 0)
    assert [again.declares_nothing(one) for one in (FIRST, SECOND, THIRD)] == [False, False, True]
    assert [again.declared(one) for one in (FIRST, SECOND, THIRD)] == [frozenset(), {BOLT.id}, frozenset()]


def test_an_instance_names_so_many_namespaces_by_heartbeats_as_are_remembered() -> None:
    world = World()
    for number in range(0, 3 * MOST_TOLD, 16):
        spaces = [Namespace(model="m", block_tokens=16, tenant=str(number + at)) for at in range(16)]
        world.beat(FIRST, (), stopping=False, told=tuple(one.canonical() for one in spaces))
    assert len(world.sequencer.declared(FIRST)) == MOST_TOLD
    before = len(world.sequencer.namespaces())
    many = [Namespace(model="n", block_tokens=16, tenant=str(at)).canonical() for at in range(1000)]
    world.beat(FIRST, (), stopping=False, told=tuple(many))  # of one heartbeat only the first ones are looked at
    assert len(world.sequencer.namespaces()) < before + 100
