"""What runs out on a machine: threads, descriptors, undisturbed calls and names.

Kinds of faults beside those of `faults`, for runs with limits.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from tests.faults.simulator.limits import Limits, names_without_end
from tests.faults.simulator.undo import NOTHING, FaultKind, Undo

if TYPE_CHECKING:
    from tests.faults.simulator.cluster import Machine
    from tests.faults.simulator.faults import Faults

_MOST_MATES = 2  # of a run
_CATALOG_SHARE = 0.2  # of shortages that a catalog's machine has


def _limits(faults: Faults) -> Limits:
    limits = faults.cluster.limits
    assert limits is not None, "a fault of limits in a run without them"
    return limits


def _machine(faults: Faults, rng: random.Random) -> Machine | None:
    if rng.random() < _CATALOG_SHARE:
        return rng.choice(faults.cluster.catalogs).machine
    node = faults.node(rng, running=False)
    return None if node is None else node.machine


def no_threads(faults: Faults, rng: random.Random) -> Undo:
    """No thread can be started, or some cannot: a container has a limit of its processes."""
    machine = _machine(faults, rng)
    if machine is None:
        return NOTHING
    machine.shortages.threads = rng.choice((0.15, 0.5, 1.0))

    def end() -> None:
        machine.shortages.threads = 0.0

    return end


def no_descriptors(faults: Faults, rng: random.Random) -> Undo:
    """Nothing can be opened nor connected, or some cannot (EMFILE)."""
    machine = _machine(faults, rng)
    if machine is None:
        return NOTHING
    machine.shortages.descriptors = rng.choice((0.03, 0.1, 0.5, 1.0))

    def end() -> None:
        machine.shortages.descriptors = 0.0

    return end


def signals(faults: Faults, rng: random.Random) -> Undo:
    """Calls of an instance's engines end in their middle, by what a signal's handler raises."""
    node = faults.node(rng)
    if node is None:
        return NOTHING
    node.signals, node.closing_signals = rng.choice((0.05, 0.3, 0.8)), 0.0
    node.world.has_signals = True

    def end() -> None:
        node.signals = 0.0

    return end


def signal_closes(faults: Faults, rng: random.Random) -> Undo:
    """A signal's handler closes the manager in the middle of a call of it (SIGTERM); the process leaves once it is
    closed, and comes back.
    """
    node = faults.node(rng)
    if node is None or node.process is None:
        return NOTHING
    node.signals, node.closing_signals = rng.choice((0.2, 0.8)), 1.0
    node.world.has_signals = True

    def end() -> None:
        node.signals = node.closing_signals = 0.0

    return end


def many_names(faults: Faults, rng: random.Random) -> Undo:
    """Clients make up tenants, each with a namespace of its own."""
    node = faults.node(rng)
    if node is None or node.process is None or node.manager is None:
        return NOTHING
    manager, is_over = node.manager, False
    node.spawn(node.process, lambda: names_without_end(node, manager, rng, lambda: is_over), "names")

    def end() -> None:
        nonlocal is_over
        is_over = True

    return end


def hang_pools(faults: Faults, rng: random.Random) -> Undo:
    """What is read from an instance's pools and written to them does not end, until it does."""
    node = faults.node(rng)
    if node is None:
        return NOTHING
    node.hangs = True

    def end() -> None:
        node.hangs = False

    return end


def change_secrets(faults: Faults, rng: random.Random) -> Undo:
    """A tenant has another secret: every machine's file of them changes, each a moment later."""
    limits, cluster = _limits(faults), faults.cluster
    limits.secret += "s"
    for node in cluster.nodes:
        if node.settings.catalog.tenant_secrets_file:
            faults.cluster.world.after(
                rng.choice((0.0, 0.3)) * rng.random(),
                cluster.world.nature,
                limits.write_secret,
                node.machine.disk.folder,
            )
    return None


def change_keys(faults: Faults, rng: random.Random) -> Undo:
    """Tenants have another key to seal with: every machine's file of them changes, each a moment later."""
    limits, cluster = _limits(faults), faults.cluster
    limits.keys += 1
    for folder in sorted({node.machine.disk.folder for node in cluster.nodes}):
        cluster.world.after(rng.choice((0.0, 0.3)) * rng.random(), cluster.world.nature, limits.write_keys, folder)
    return None


def pod_mate(faults: Faults, rng: random.Random) -> Undo:
    """Another instance begins on a machine, and keeps its NVME in the folder that the one there has; it stays."""
    cluster = faults.cluster
    nodes = [node for node in cluster.nodes if node.settings.pools.nvme.folder and node.wanted]
    if not nodes or sum(node.instance.startswith("mate-") for node in cluster.nodes) >= _MOST_MATES:
        return NOTHING
    cluster.add_mate(rng.choice(nodes)).start()
    return None


LIMIT_KINDS: dict[str, FaultKind] = {
    "no_threads": no_threads,
    "no_descriptors": no_descriptors,
    "signals": signals,
    "signal_closes": signal_closes,
    "many_names": many_names,
    "hang_pools": hang_pools,
    "change_secrets": change_secrets,
    "change_keys": change_keys,
    "pod_mate": pod_mate,
}

# What runs with limits draw from: these, and what brings threads, files, waits and heartbeats about.
LIMIT_MIX = (
    *LIMIT_KINDS,
    "kill",
    "kill_in_write",
    "cut_power",
    "stop",
    "freeze",
    "stutter",
    "cut_node",
    "break_links",
    "restart_server",
    "slow_pools",
    "break_disk",
    "slow_disk",
    "fill_disk",
    "kill_catalog",
    "freeze_catalog",
    "slow_network",
)
