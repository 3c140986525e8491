"""Sets of candidates: whatever happens to instances, they are those that asking each instance would find."""

from __future__ import annotations

import random

import pytest

from kvbm.catalog.access import EMBEDDED, Caller
from kvbm.catalog.candidates import CandidateSets, model_of
from kvbm.catalog.liveness import HeartbeatReceived, Liveness, OwnPulse, StreamProgress, Ticked
from kvbm.catalog.reference_router import Candidates, ReferenceRouter
from kvbm.catalog.sequencer import Sequencer
from kvbm.catalog.sql_rows import InstanceStatus
from kvbm.catalog.visibility import Visibility
from kvbm.core.codec import decode_frame, encode_frame
from kvbm.core.events import JANITOR, PoolStated, StopReason
from kvbm.core.ids import Epoch, InstanceId, Namespace, NamespaceId, Offset, Tier
from kvbm.core.ledger import Ledger
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

    def beat(self, instance: InstanceId, spaces: tuple[NamespaceId, ...], stopping: bool) -> None:
        self.beats += 1
        heartbeat = Heartbeat(
            instance=instance, cluster="c", epoch=Epoch(max(1, self.epochs[instance])), published=Offset(0), wall_time_ns=self.beats,
            namespaces=spaces, stopping=stopping,
        )  # fmt: skip
        self.liveness.step(self.now_s, HeartbeatReceived(heartbeat))

    def pass_time(self, seconds: float) -> None:
        for _ in range(round(seconds / 0.5)):
            self.now_s += 0.5
            self.liveness.step(self.now_s, OwnPulse())
            self.liveness.step(self.now_s, Ticked())

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
            if self.liveness.is_live(one)
            and self.serves(one, space, is_known)
            and self.visibility.instance(caller, one)
        }

    def serves(self, instance: InstanceId, space: Namespace, is_known: bool) -> bool:
        row, pulse = self.sequencer.instance_row(instance), self.liveness.last(instance)
        if row is not None and row.engine == JANITOR:
            return False
        declared, known = self.sequencer.declared(instance), self.sequencer.namespaces()
        if not is_known or not declared or space.id in declared:
            return True
        if pulse is not None and space.id in pulse.heartbeat.namespaces:
            return True
        return any(model_of(known[one]) == model_of(space) for one in declared if one in known)


def step(world: World, pick: random.Random) -> None:
    instance, spaces = pick.choice(NAMES), pick.sample(SPACES, pick.randrange(4))
    match pick.randrange(8):
        case 0 | 1:
            world.start(instance, spaces, JANITOR if pick.random() < 0.1 else "engine")
        case 2 | 3 | 4:
            world.beat(instance, tuple(one.id for one in spaces), pick.random() < 0.1)
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
    for _ in range(150):
        for _ in range(pick.choice([1, 1, 3])):
            step(world, pick)
        for caller in ROUTERS:
            space, is_known = pick.choice(SPACES), pick.random() < 0.8
            found = world.found(caller, space, is_known)
            assert found == world.wanted(caller, space, is_known)
            most = max(most, len(found))
    assert most > 2


def test_more_changes_than_are_remembered_are_found_by_looking_at_all() -> None:
    world = World()
    for number in range(5000):
        world.beat(NAMES[number % 12], (SPACES[number % 3].id,), stopping=False)
    assert world.found(EMBEDDED, SPACES[0], is_known=True) == set(NAMES)
