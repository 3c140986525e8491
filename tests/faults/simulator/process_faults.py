"""What goes wrong with processes: instances and catalogs die, hang, lose their disk, or are there twice."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.faults.simulator.kernel import Process, Thread
from tests.faults.simulator.undo import NOTHING, FaultKind, Undo

if TYPE_CHECKING:
    from tests.faults.simulator.cluster import Node
    from tests.faults.simulator.faults import Faults


def kill(faults: Faults, rng: random.Random) -> Undo:
    node = faults.node(rng, running=False)
    if node is None:
        return NOTHING
    node.kill()
    return faults.restart(node)


def kill_in_write(faults: Faults, rng: random.Random) -> Undo:
    node = faults.node(rng)
    if node is None:
        return NOTHING
    disk, there = node.machine.disk, faults.cluster.on_disk_of(node)
    disk.kill_at_write = True

    def again() -> None:
        disk.kill_at_write = False
        for one in there:  # whoever wrote first
            faults.restart(one)()

    return again


def cut_power(faults: Faults, rng: random.Random) -> Undo:
    node = faults.node(rng, running=False)
    if node is None:
        return NOTHING
    there = faults.cluster.on_disk_of(node)
    for one in there:
        one.kill()
    node.machine.disk.cut_power()
    for one in there:
        faults.cluster.checker.lost_power(one.machine.name)

    def again() -> None:
        for one in there:
            faults.restart(one)()

    return again


def lose_disk(faults: Faults, rng: random.Random) -> Undo:
    """A machine comes back with an empty disk: journal, epoch and pool file are gone."""
    node = faults.node(rng, running=False)
    if node is None:
        return NOTHING
    node.kill()
    node.machine.disk.wipe()
    faults.cluster.checker.lost_disk(node.machine.name)
    return faults.restart(node)


def stop(faults: Faults, rng: random.Random) -> Undo:
    node = faults.node(rng)
    return NOTHING if node is None or node.process is None else _stop(faults, node, node.process)


def _stop(faults: Faults, node: Node, process: Process) -> Callable[[], None]:
    manager = node.manager
    node.wanted = False

    def close() -> None:
        assert manager is not None
        manager.close(2.0)
        node.kill()

    thread = Thread(faults.world, target=close, name="close")
    faults.world.call_at(faults.world.now, process, thread.start)

    def again() -> None:
        node.kill()
        node.start()

    return again


def freeze(faults: Faults, rng: random.Random) -> Undo:
    node = faults.node(rng)
    if node is None or node.process is None:
        return NOTHING
    process = node.process
    faults.world.freeze(process)
    return lambda: faults.world.thaw(process)


def stutter(faults: Faults, rng: random.Random) -> Undo:
    """A process that is frozen, or was, comes back for moments: a zombie does so twice."""
    node = faults.node(rng)
    if node is None or node.process is None:
        return NOTHING
    process, world = node.process, faults.world
    is_over = False

    def turn(freezes: bool) -> None:
        if is_over or not process.alive:
            return
        (world.freeze if freezes else world.thaw)(process)
        world.after(rng.choice((0.02, 0.1, 0.4)) * rng.uniform(0.5, 1.5), world.nature, turn, not freezes)

    def end() -> None:
        nonlocal is_over
        is_over = True
        world.thaw(process)

    turn(not process.frozen)
    return end


def zombie(faults: Faults, rng: random.Random) -> Undo:
    """An instance freezes, another machine takes its name, then the old one comes back."""
    node = faults.node(rng)
    if node is None or node.process is None or len(faults.cluster.nodes) > 8:
        return NOTHING
    process = node.process
    faults.world.freeze(process)
    faults.cluster.add_node(node.instance, node).start()
    return lambda: faults.world.thaw(process)


def twin(faults: Faults, rng: random.Random) -> Undo:
    """A second live instance of one name, for a while."""
    node = faults.node(rng)
    if node is None or len(faults.cluster.nodes) > 8:
        return NOTHING
    twin = faults.cluster.add_node(node.instance, node)
    twin.start()
    loser = rng.choice((node, twin))

    def end() -> None:
        if sum(other.wanted for other in faults.cluster.nodes if other.instance == node.instance) > 1:
            loser.wanted = False
            loser.kill()

    return end


def forget(faults: Faults, rng: random.Random) -> Undo:
    """An instance goes, for a while or for good.

    Operators have it forgotten as soon as a catalog takes it for gone, or time does.
    """
    node = faults.node(rng)
    if node is None or node.process is None:
        return NOTHING
    is_back = rng.random() < 0.7 or sum(other.wanted for other in faults.cluster.nodes) < 2
    if rng.random() < 0.6:
        back = _stop(faults, node, node.process)
    else:
        node.kill()
        back = faults.restart(node)
        node.wanted = is_back
    is_asked, is_over = rng.random() < 0.8, False

    def ask() -> None:
        if is_over or not is_asked:
            return
        rng.choice(faults.cluster.catalogs).forget(node.instance)
        faults.world.after(rng.uniform(0.1, 0.5), faults.world.nature, ask)

    def end() -> None:
        nonlocal is_over
        is_over = True
        if is_back:
            back()

    ask()
    return end


def kill_catalog(faults: Faults, rng: random.Random) -> Undo:
    catalog = rng.choice(faults.cluster.catalogs)
    catalog.kill()
    return catalog.start


def freeze_catalog(faults: Faults, rng: random.Random) -> Undo:
    """A consumer so slow that it does nothing."""
    process = rng.choice(faults.cluster.catalogs).process
    if process is None or not process.alive:
        return NOTHING
    faults.world.freeze(process)
    return lambda: faults.world.thaw(process)


PROCESS_KINDS: dict[str, FaultKind] = {
    "kill": kill,
    "kill_in_write": kill_in_write,
    "cut_power": cut_power,
    "lose_disk": lose_disk,
    "stop": stop,
    "freeze": freeze,
    "stutter": stutter,
    "zombie": zombie,
    "twin": twin,
    "forget": forget,
    "kill_catalog": kill_catalog,
    "freeze_catalog": freeze_catalog,
}
