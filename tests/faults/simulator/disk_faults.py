"""What goes wrong with disks, pools and objects: they are full, slow, broken, or hold other bytes."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from tests.faults.simulator.undo import NOTHING, FaultKind, Undo

if TYPE_CHECKING:
    from tests.faults.simulator.faults import Faults

USUAL_NAP_S = 0.004  # what a step of a pool takes


def fill_disk(faults: Faults, rng: random.Random) -> Undo:
    node = faults.node(rng)
    if node is None:
        return NOTHING
    disk = node.machine.disk
    disk.full = True

    def end() -> None:
        disk.full = False

    return end


def break_disk(faults: Faults, rng: random.Random) -> Undo:
    node = faults.node(rng)
    if node is None:
        return NOTHING
    disk = node.machine.disk
    disk.broken = True

    def end() -> None:
        disk.broken = False

    return end


def slow_disk(faults: Faults, rng: random.Random) -> Undo:
    node = faults.node(rng)
    if node is None:
        return NOTHING
    disk = node.machine.disk
    disk.slow_s = rng.choice((0.02, 0.1, 0.5))

    def end() -> None:
        disk.slow_s = 0.0

    return end


def slow_pools(faults: Faults, rng: random.Random) -> Undo:
    """Copies take longer than a request waits."""
    node = faults.node(rng)
    if node is None:
        return NOTHING
    node.nap_s = rng.choice((0.05, 0.3))

    def end() -> None:
        node.nap_s = USUAL_NAP_S

    return end


def flip_journal(faults: Faults, rng: random.Random) -> Undo:
    """A bit of a journal flips while its instance is down."""
    node = faults.node(rng, running=False)
    if node is None:
        return NOTHING
    node.kill()
    files = node.machine.disk.journal_files()
    if files:
        node.machine.disk.flip(rng.choice(files[-2:]))
        faults.cluster.checker.flipped_journal(node.machine.name)
    return faults.restart(node)


def flip_pool(faults: Faults, rng: random.Random) -> Undo:
    node = faults.node(rng, running=False)
    files = node.machine.disk.pool_files() if node is not None else []
    if node is None or not files:
        return NOTHING
    for _ in range(rng.randint(1, 20)):
        node.machine.disk.flip(files[0], 4096)
    return None


def lose_objects(faults: Faults, rng: random.Random) -> Undo:
    objects = faults.cluster.objects.store.objects
    for name in sorted(objects):
        if rng.random() < 0.2:
            body, put_ns = objects[name]
            if rng.random() < 0.5:
                del objects[name]
            else:
                objects[name] = (bytes(len(body)), put_ns)
    return None


def refuse_objects(faults: Faults, rng: random.Random) -> Undo:
    objects = faults.cluster.objects
    objects.refuses = 0.5

    def end() -> None:
        objects.refuses = 0.0

    return end


DISK_KINDS: dict[str, FaultKind] = {
    "fill_disk": fill_disk,
    "break_disk": break_disk,
    "slow_disk": slow_disk,
    "slow_pools": slow_pools,
    "flip_journal": flip_journal,
    "flip_pool": flip_pool,
    "lose_objects": lose_objects,
    "refuse_objects": refuse_objects,
}
