"""What goes wrong with clocks, and with what a catalog knows: its database and its index."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from kvbm import assembly
from kvbm.core.codec import Frame
from kvbm.core.events import BlocksEvicted, EvictReason
from kvbm.core.ids import InstanceId, Offset
from kvbm.streams.base import Position
from tests.faults.simulator.environment import APPLIED_AHEAD
from tests.faults.simulator.undo import NOTHING, FaultKind, Undo

if TYPE_CHECKING:
    from tests.faults.simulator.faults import Faults


def step_clock(faults: Faults, rng: random.Random) -> Undo:
    machine = rng.choice(list(faults.cluster.machines.values()))
    machine.clock.wall_step_s += rng.choice((-1, 1)) * rng.choice((0.5, 5.0, 3600.0, 1e7))
    return None


def database_down(faults: Faults, rng: random.Random) -> Undo:
    store = faults.cluster.store
    store.is_down = True

    def end() -> None:
        store.is_down = False

    return end


def restore_database(faults: Faults, rng: random.Random) -> Undo:
    """The database comes back as an older backup has it, or empty."""
    store = faults.cluster.store
    store.is_down = True
    store.restore(rng.choice(store.backups))

    def end() -> None:
        store.is_down = False

    return end


def database_loses_replies(faults: Faults, rng: random.Random) -> Undo:
    store = faults.cluster.store
    store.loses_replies = 0.5

    def end() -> None:
        store.loses_replies = 0.0

    return end


def spoil_index(faults: Faults, rng: random.Random) -> Undo:
    """The index loses an entry without a word, as a flipped bit would make it."""
    service = rng.choice(faults.cluster.catalogs).service
    if service is None:
        return NOTHING
    index, sequencer = service.index, service.sequencer
    known = []
    for namespace, block in faults.cluster.chains.universe:
        for name, tier, is_pool in index.holders(namespace, block):
            if not is_pool:
                known.append((namespace, block, InstanceId(name), tier))
    if not known:
        return NOTHING
    namespace, block, instance, tier = rng.choice(known)
    position = sequencer.position(instance)
    view = index.view(instance)
    if view is None or view.epoch != position.epoch:
        return NOTHING
    data = assembly.NATIVE.encode_frame(
        Frame(
            instance=instance,
            epoch=position.epoch,
            first_offset=Offset(position.offset),
            wall_time_ns=0,
            digest=0,
            events=(BlocksEvicted(namespace=namespace, tier=tier, reason=EvictReason.CLEARED, hashes=block),),
        )
    )
    index.apply(data)
    known_there = APPLIED_AHEAD.get(id(index), {}).get(instance, position)
    faults.cluster.checker.spoil(sequencer, instance, max(Position(*position), known_there))
    return None


CATALOG_KINDS: dict[str, FaultKind] = {
    "step_clock": step_clock,
    "database_down": database_down,
    "restore_database": restore_database,
    "database_loses_replies": database_loses_replies,
    "spoil_index": spoil_index,
}
