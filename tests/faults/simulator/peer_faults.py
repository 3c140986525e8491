"""What goes wrong between instances that read from each other: kinds of faults beside those of `faults`, for runs with
peers.
"""

from __future__ import annotations

import random
from functools import partial
from typing import TYPE_CHECKING, Any

from kvbm.core.errors import KvbmError
from kvbm.core.ids import Tier
from tests.faults.simulator.peers import USUAL_STEP_S, PeerNetwork, flipped_rows
from tests.faults.simulator.undo import NOTHING, FaultKind, Undo

if TYPE_CHECKING:
    from tests.faults.simulator.cluster import Node
    from tests.faults.simulator.faults import Faults


def _network(faults: Faults) -> PeerNetwork:
    network = faults.cluster.peers
    assert network is not None, "a fault of peers in a run without them"
    return network


def flip_lent(faults: Faults, rng: random.Random) -> Undo:
    """Bits flip in HOST."""
    return None if flipped_rows(_network(faults), rng) else NOTHING


def flip_on_the_way(faults: Faults, rng: random.Random) -> Undo:
    """Bits flip between an owner's slot and its reader's row."""
    network = _network(faults)
    network.flips = rng.choice((0.05, 0.3))

    def end() -> None:
        network.flips = 0.0

    return end


def slow_reads(faults: Faults, rng: random.Random) -> Undo:
    """Reads take as long as leases and deadlines, or longer."""
    network = _network(faults)
    network.step_s = rng.choice((0.004, 0.015, 0.05))

    def end() -> None:
        network.step_s = USUAL_STEP_S

    return end


def stale_answers(faults: Faults, rng: random.Random) -> Undo:
    """The catalog names who had the blocks a while ago."""
    network = _network(faults)
    network.is_stale = True

    def end() -> None:
        network.is_stale = False

    return end


def clear_lenders(faults: Faults, rng: random.Random) -> Undo:
    """Instances drop all they have in HOST and NVME, again and again, whoever reads it, and others come into these
    slots.
    """
    world, is_over = faults.cluster.world, False

    def clear(node: Node, manager: Any) -> None:
        try:
            for tier in (Tier.HOST, Tier.NVME):
                if tier in manager.pools.slots:
                    manager.evict(tier, b"".join(manager.held(tier)))
            for _ in range(3):
                node.serve(manager, rng, *faults.cluster.chains.prompt(rng))
        except KvbmError:  # it closes
            return

    def again() -> None:
        if is_over:
            return
        for node in faults.cluster.nodes:
            manager, process = node.manager, node.process
            if node.is_running and process is not None and rng.random() < 0.5:
                node.spawn(process, partial(clear, node, manager), "clear")
        world.after(rng.choice((0.005, 0.05)) * rng.uniform(0.5, 1.5), world.nature, again)

    def end() -> None:
        nonlocal is_over
        is_over = True

    again()
    return end


def fence_lenders(faults: Faults, rng: random.Random) -> Undo:
    """Owners may grant nothing, while leases that they have granted go on."""
    chosen = [lending for lending in _network(faults).lent.values() if not lending.is_over and rng.random() < 0.5]
    for lending in chosen:
        lending.is_held_back = True

    def end() -> None:
        for lending in chosen:
            lending.is_held_back = False

    return end if chosen else NOTHING


PEER_KINDS: dict[str, FaultKind] = {
    "flip_lent": flip_lent,
    "flip_on_the_way": flip_on_the_way,
    "slow_reads": slow_reads,
    "stale_answers": stale_answers,
    "clear_lenders": clear_lenders,
    "fence_lenders": fence_lenders,
}

# What runs with peers draw from: these, and what happens to processes, machines and the catalog that peers depend on.
PEER_MIX = (
    *PEER_KINDS,
    "kill",
    "kill_in_write",
    "cut_power",
    "stop",
    "freeze",
    "stutter",
    "zombie",
    "twin",
    "cut_node",
    "slow_pools",
    "slow_disk",
    "flip_pool",
    "kill_catalog",
    "freeze_catalog",
    "slow_network",
)
