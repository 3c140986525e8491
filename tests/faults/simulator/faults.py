"""What goes wrong: each fault begins at a moment and is undone later, with chances of its own.

Whether one fault is left out does not change what the others draw, so a failing run can be made smaller by leaving
faults out. When they come, and which of them together, is drawn in `drawing`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from tests.faults.simulator.catalog_faults import CATALOG_KINDS
from tests.faults.simulator.disk_faults import DISK_KINDS
from tests.faults.simulator.limit_faults import LIMIT_KINDS
from tests.faults.simulator.network_faults import NETWORK_KINDS
from tests.faults.simulator.peer_faults import PEER_KINDS
from tests.faults.simulator.process_faults import PROCESS_KINDS
from tests.faults.simulator.server_faults import SERVER_KINDS
from tests.faults.simulator.undo import NOTHING, FaultKind

if TYPE_CHECKING:
    from tests.faults.simulator.cluster import Cluster, Node

# By name, in the order in which they are drawn: another order makes another run of each seed.
KINDS: dict[str, FaultKind] = {**PROCESS_KINDS, **NETWORK_KINDS, **SERVER_KINDS, **DISK_KINDS, **CATALOG_KINDS}
_ALL_KINDS = KINDS | PEER_KINDS | LIMIT_KINDS


class Fault(NamedTuple):
    """One thing that goes wrong.

    Attributes:
        at_s, for_s: when, and for how long where it lasts.
        seed: of its own chances.
        victim: which instance it happens to, by a number that faults who mean the same one share; None: any.
    """

    kind: str
    at_s: float
    for_s: float
    seed: int
    victim: int | None = None


class Happened(NamedTuple):
    """A fault that came about.

    Attributes:
        end_s: when it was undone; `begin_s` of what is over at once.
    """

    kind: str
    begin_s: float
    end_s: float


class Faults:
    """Carries out a schedule of faults."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.world = cluster, cluster.world
        self.happened: list[Happened] = []
        self._victim: int | None = None
        self._undone: list[Callable[[], None]] = []

    def schedule(self, faults: list[Fault]) -> None:
        for fault in faults:
            self.world.call_at(fault.at_s, self.world.nature, self._begin, fault)

    def _begin(self, fault: Fault) -> None:
        rng = random.Random(fault.seed)
        kind, self._victim = fault.kind, fault.victim
        undo = _ALL_KINDS[kind](self, rng)
        if undo is NOTHING:
            kind = "break_links"  # which can always happen
            undo = KINDS[kind](self, rng)
        now_s = self.world.now
        number = len(self.happened)
        self.happened.append(Happened(kind, now_s, now_s if undo is None else float("inf")))
        self.cluster.told("fault", {"kind": kind, "for_s": round(fault.for_s, 2)})
        if undo is not None:
            self._undone.append(undo)

            def end(undo: Callable[[], None] = undo) -> None:
                if undo in self._undone:
                    self._undone.remove(undo)
                    undo()
                    self.happened[number] = Happened(kind, now_s, self.world.now)
                    self.cluster.told("healed", {"kind": kind})

            self.world.after(fault.for_s, self.world.nature, end)

    def end(self, rng: random.Random | None = None) -> None:
        """Everything is well from now on.

        Args:
            rng: what lasts until now ends in any order, and not at once; without it, all in the order of its beginning.
        """
        undone, self._undone = self._undone, []
        if rng is not None:
            rng.shuffle(undone)
        for undo in undone:
            if rng is not None and rng.random() < 0.7:
                self.world.run(self.world.now + rng.choice((0.01, 0.1, 0.6)) * rng.uniform(0.5, 1.5))
            undo()
        by_instance: dict[str, list[Node]] = {}
        for node in self.cluster.nodes:
            if node.wanted:
                by_instance.setdefault(node.instance, []).append(node)
        for twins in by_instance.values():
            self.world.rng.shuffle(twins)
            for twin in twins[1:]:  # two that claim one id are for a person to sort out
                twin.wanted = False
                twin.kill()
            twins[0].start()
        for catalog in self.cluster.catalogs:
            catalog.start()
        for instance in sorted({instance for _, instance in self.cluster.checker.spoilt}):
            self.world.after(5.0, self.world.nature, self._stir, instance)

    def _stir(self, instance: str) -> None:
        """A spoilt entry shows at the next frame, so there must be one."""
        for node in self.cluster.nodes:
            manager, process = node.manager, node.process
            if node.instance == instance and node.is_running and manager is not None and process is not None:
                node.spawn(process, manager.take_snapshot, "stir")

    # -- what kinds of faults ask --------------------------------------------------------------------------------------

    def node(self, rng: random.Random, running: bool = True) -> Node | None:
        """An instance for a fault to happen to. `running`: one that works."""
        nodes = [node for node in self.cluster.nodes if node.wanted and (node.is_running or not running)]
        if self._victim is not None:
            names = sorted({node.instance for node in self.cluster.nodes})
            meant = names[self._victim % len(names)]
            nodes = [node for node in nodes if node.instance == meant] or nodes
        return rng.choice(nodes) if nodes else None

    def restart(self, node: Node) -> Callable[[], None]:
        """What undoes the end of an instance: it starts again, unless it is to be gone."""

        def again() -> None:
            if node.wanted:
                node.start()

        return again
