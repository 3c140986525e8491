"""What goes wrong between machines: connections end, hang, or are slow."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.faults.simulator.undo import NOTHING, FaultKind, Undo

if TYPE_CHECKING:
    from tests.faults.simulator.faults import Faults


def cut_node(faults: Faults, rng: random.Random) -> Undo:
    node = faults.node(rng)
    return NOTHING if node is None else _cut(faults, node.machine.name)


def cut_catalog(faults: Faults, rng: random.Random) -> Undo:
    return _cut(faults, rng.choice(faults.cluster.catalogs).machine.name)


def _cut(faults: Faults, machine: str) -> Callable[[], None]:
    faults.cluster.network.cut.add(machine)
    return lambda: faults.cluster.network.heal(machine)


def break_links(faults: Faults, rng: random.Random) -> Undo:
    for link in faults.cluster.network.sorted_links():
        if rng.random() < 0.7:
            link.break_off()
    return None


def slow_network(faults: Faults, rng: random.Random) -> Undo:
    network = faults.cluster.network
    network.slow_s = rng.uniform(0.05, 1.5)

    def end() -> None:
        network.slow_s = 0.0

    return end


NETWORK_KINDS: dict[str, FaultKind] = {
    "cut_node": cut_node,
    "cut_catalog": cut_catalog,
    "break_links": break_links,
    "slow_network": slow_network,
}
