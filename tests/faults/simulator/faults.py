"""What goes wrong: each fault begins at a moment and is undone later, with chances of its own.

Whether one fault is left out does not change what the others draw, so a failing run can be made smaller by leaving faults out.
When they come, and which of them together, is drawn in `drawing`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from kvbm import assembly
from kvbm.core.codec import Frame
from kvbm.core.events import BlocksEvicted, EvictReason
from kvbm.core.ids import InstanceId, Offset
from kvbm.streams.base import ORIGIN, Position, events_subject
from tests.faults.simulator.environment import APPLIED_AHEAD
from tests.faults.simulator.kernel import Process, Thread
from tests.faults.simulator.limit_faults import LIMIT_KINDS
from tests.faults.simulator.peer_faults import NOTHING as _NOTHING
from tests.faults.simulator.peer_faults import PEER_KINDS

USUAL_NAP_S = 0.004  # what a pool takes

if TYPE_CHECKING:
    from tests.faults.simulator.cluster import Cluster, Node


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
        self.cluster = self._cluster = cluster
        self._world = cluster.world
        self.happened: list[Happened] = []
        self._victim: int | None = None
        self._undone: list[Callable[[], None]] = []

    def schedule(self, faults: list[Fault]) -> None:
        for fault in faults:
            self._world.call_at(fault.at_s, self._world.nature, self._begin, fault)

    def _begin(self, fault: Fault) -> None:
        rng = random.Random(fault.seed)
        kind, self._victim = fault.kind, fault.victim
        undo = (KINDS.get(kind) or PEER_KINDS.get(kind) or LIMIT_KINDS[kind])(self, rng)
        if undo is _NOTHING:
            kind = "break_links"  # which can always happen
            undo = KINDS[kind](self, rng)
        now_s = self._world.now
        number = len(self.happened)
        self.happened.append(Happened(kind, now_s, now_s if undo is None else float("inf")))
        self._cluster.told("fault", {"kind": kind, "for_s": round(fault.for_s, 2)})
        if undo is not None:
            self._undone.append(undo)

            def end(undo: Callable[[], None] = undo) -> None:
                if undo in self._undone:
                    self._undone.remove(undo)
                    undo()
                    self.happened[number] = Happened(kind, now_s, self._world.now)
                    self._cluster.told("healed", {"kind": kind})

            self._world.after(fault.for_s, self._world.nature, end)

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
                self._world.run(self._world.now + rng.choice((0.01, 0.1, 0.6)) * rng.uniform(0.5, 1.5))
            undo()
        by_instance: dict[str, list[Node]] = {}
        for node in self._cluster.nodes:
            if node.wanted:
                by_instance.setdefault(node.instance, []).append(node)
        for twins in by_instance.values():
            self._world.rng.shuffle(twins)
            for twin in twins[1:]:  # two that claim one id are for a person to sort out
                twin.wanted = False
                twin.kill()
            twins[0].start()
        for catalog in self._cluster.catalogs:
            catalog.start()
        for instance in sorted({instance for _, instance in self._cluster.checker.spoilt}):
            self._world.after(5.0, self._world.nature, self._stir, instance)

    def _stir(self, instance: str) -> None:
        """A spoilt entry shows at the next frame, so there must be one."""
        for node in self._cluster.nodes:
            manager, process = node.manager, node.process
            if node.instance == instance and node.is_running and manager is not None and process is not None:
                node.spawn(process, manager.take_snapshot, "stir")

    # -- helpers ------------------------------------------------------------------------------------------------------

    def node(self, rng: random.Random, running: bool = True) -> Node | None:
        nodes = [node for node in self._cluster.nodes if node.wanted and (node.is_running or not running)]
        if self._victim is not None:
            names = sorted({node.instance for node in self._cluster.nodes})
            meant = names[self._victim % len(names)]
            nodes = [node for node in nodes if node.instance == meant] or nodes
        return rng.choice(nodes) if nodes else None

    def restart(self, node: Node) -> Callable[[], None]:
        def again() -> None:
            if node.wanted:
                node.start()

        return again

    # -- processes ----------------------------------------------------------------------------------------------------

    def kill(self, rng: random.Random) -> Callable[[], None] | None:
        node = self.node(rng, running=False)
        if node is None:
            return _NOTHING
        node.kill()
        return self.restart(node)

    def kill_in_write(self, rng: random.Random) -> Callable[[], None] | None:
        node = self.node(rng)
        if node is None:
            return _NOTHING
        disk, there = node.machine.disk, self._cluster.on_disk_of(node)
        disk.kill_at_write = True

        def again() -> None:
            disk.kill_at_write = False
            for one in there:  # whoever wrote first
                self.restart(one)()

        return again

    def cut_power(self, rng: random.Random) -> Callable[[], None] | None:
        node = self.node(rng, running=False)
        if node is None:
            return _NOTHING
        there = self._cluster.on_disk_of(node)
        for one in there:
            one.kill()
        node.machine.disk.cut_power()
        for one in there:
            self._cluster.checker.lost_power(one.machine.name)

        def again() -> None:
            for one in there:
                self.restart(one)()

        return again

    def lose_disk(self, rng: random.Random) -> Callable[[], None] | None:
        """A machine comes back with an empty disk: journal, epoch and pool file are gone."""
        node = self.node(rng, running=False)
        if node is None:
            return _NOTHING
        node.kill()
        node.machine.disk.wipe()
        self._cluster.checker.lost_disk(node.machine.name)
        return self.restart(node)

    def stop(self, rng: random.Random) -> Callable[[], None] | None:
        node = self.node(rng)
        return _NOTHING if node is None or node.process is None else self._stop(node, node.process)

    def _stop(self, node: Node, process: Process) -> Callable[[], None]:
        manager = node.manager
        node.wanted = False

        def close() -> None:
            assert manager is not None
            manager.close(2.0)
            node.kill()

        thread = Thread(self._world, target=close, name="close")
        self._world.call_at(self._world.now, process, thread.start)

        def again() -> None:
            node.kill()
            node.start()

        return again

    def freeze(self, rng: random.Random) -> Callable[[], None] | None:
        node = self.node(rng)
        if node is None or node.process is None:
            return _NOTHING
        process = node.process
        self._world.freeze(process)
        return lambda: self._world.thaw(process)

    def stutter(self, rng: random.Random) -> Callable[[], None] | None:
        """A process that is frozen, or was, comes back for moments: a zombie does so twice."""
        node = self.node(rng)
        if node is None or node.process is None:
            return _NOTHING
        process, world = node.process, self._world
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

    def zombie(self, rng: random.Random) -> Callable[[], None] | None:
        """An instance freezes, another machine takes its name, then the old one comes back."""
        node = self.node(rng)
        if node is None or node.process is None or len(self._cluster.nodes) > 8:
            return _NOTHING
        process = node.process
        self._world.freeze(process)
        self._cluster.add_node(node.instance, node).start()
        return lambda: self._world.thaw(process)

    def twin(self, rng: random.Random) -> Callable[[], None] | None:
        """A second live instance of one name, for a while."""
        node = self.node(rng)
        if node is None or len(self._cluster.nodes) > 8:
            return _NOTHING
        twin = self._cluster.add_node(node.instance, node)
        twin.start()
        loser = rng.choice((node, twin))

        def end() -> None:
            if sum(other.wanted for other in self._cluster.nodes if other.instance == node.instance) > 1:
                loser.wanted = False
                loser.kill()

        return end

    def forget(self, rng: random.Random) -> Callable[[], None] | None:
        """An instance goes, for a while or for good. Operators have it forgotten as soon as a catalog takes it for gone, or time does."""
        node = self.node(rng)
        if node is None or node.process is None:
            return _NOTHING
        is_back = rng.random() < 0.7 or sum(other.wanted for other in self._cluster.nodes) < 2
        if rng.random() < 0.6:
            back = self._stop(node, node.process)
        else:
            node.kill()
            back = self.restart(node)
            node.wanted = is_back
        is_asked, is_over = rng.random() < 0.8, False

        def ask() -> None:
            if is_over or not is_asked:
                return
            rng.choice(self._cluster.catalogs).forget(node.instance)
            self._world.after(rng.uniform(0.1, 0.5), self._world.nature, ask)

        def end() -> None:
            nonlocal is_over
            is_over = True
            if is_back:
                back()

        ask()
        return end

    def kill_catalog(self, rng: random.Random) -> Callable[[], None] | None:
        catalog = rng.choice(self._cluster.catalogs)
        catalog.kill()
        return catalog.start

    def freeze_catalog(self, rng: random.Random) -> Callable[[], None] | None:
        """A consumer so slow that it does nothing."""
        process = rng.choice(self._cluster.catalogs).process
        if process is None or not process.alive:
            return _NOTHING
        self._world.freeze(process)
        return lambda: self._world.thaw(process)

    # -- network ------------------------------------------------------------------------------------------------------

    def cut_node(self, rng: random.Random) -> Callable[[], None] | None:
        node = self.node(rng)
        return _NOTHING if node is None else self._cut(node.machine.name)

    def cut_catalog(self, rng: random.Random) -> Callable[[], None] | None:
        return self._cut(rng.choice(self._cluster.catalogs).machine.name)

    def _cut(self, machine: str) -> Callable[[], None]:
        self._cluster.network.cut.add(machine)
        return lambda: self._cluster.network.heal(machine)

    def break_links(self, rng: random.Random) -> Callable[[], None] | None:
        for link in self._cluster.network.sorted_links():
            if rng.random() < 0.7:
                link.break_off()
        return None

    def slow_network(self, rng: random.Random) -> Callable[[], None] | None:
        network = self._cluster.network
        network.slow_s = rng.uniform(0.05, 1.5)

        def end() -> None:
            network.slow_s = 0.0

        return end

    # -- the server ---------------------------------------------------------------------------------------------------

    def restart_server(self, rng: random.Random) -> Callable[[], None] | None:
        return self._server_down(False)

    def cut_server_power(self, rng: random.Random) -> Callable[[], None] | None:
        return self._server_down(True)

    def _server_down(self, lose_tail: bool) -> Callable[[], None] | None:
        if not self._cluster.server.is_up:
            return _NOTHING
        self._cluster.server.go_down(lose_tail)
        return self._cluster.server.come_up

    def recreate_stream(self, rng: random.Random) -> Callable[[], None] | None:
        """The stream begins anew, empty, while instances go on: deleted and made again, or its server comes back without its files."""
        server = self._cluster.server
        if not server.is_up:
            server.recreate()  # it had been down, and comes back so
            return None
        if rng.random() < 0.5:
            server.recreate()
            return None
        server.go_down(lose_tail=False)
        server.recreate()
        return server.come_up

    def take_nothing(self, rng: random.Random) -> Callable[[], None] | None:
        """The server's disk is full: connections stand, questions are answered, publishes never."""
        server = self._cluster.server
        server.takes_nothing = True

        def end() -> None:
            server.takes_nothing = False

        return end

    def hide_messages(self, rng: random.Random) -> Callable[[], None] | None:
        server = self._cluster.server
        if not server.last_sequence:
            return _NOTHING
        begin = rng.randint(max(1, server.last_sequence - 40), server.last_sequence)
        return None if server.hide(begin, begin + rng.randint(1, 30)) else _NOTHING

    def trim(self, rng: random.Random) -> Callable[[], None] | None:
        server = self._cluster.server
        for _ in range(int(len(server.messages) * rng.choice((0.3, 0.8, 1.0)))):
            server.drop_first()
        return None

    def refuse_publishes(self, rng: random.Random) -> Callable[[], None] | None:
        server = self._cluster.server
        server.refuses = rng.choice((0.2, 0.6, 1.0))

        def end() -> None:
            server.refuses = 0.0

        return end

    def drop_acks(self, rng: random.Random) -> Callable[[], None] | None:
        server = self._cluster.server
        server.drop_acks = server.loses_asks = rng.choice((0.1, 0.5))

        def end() -> None:
            server.drop_acks = server.loses_asks = 0.0

        return end

    def late_copies(self, rng: random.Random) -> Callable[[], None] | None:
        """Messages that were sent once arrive again, later, as a socket or a proxy may deliver them: with the fence they named."""
        server = self._cluster.server
        recent = [stored for stored in list(server.messages)[-60:] if stored.fence is None and stored.by != "foreign"]
        if not recent:
            return _NOTHING
        for stored in rng.sample(recent, min(len(recent), rng.randint(1, 12))):
            names = stored.subject.split(".")
            fence_subject = ".".join((*names[:2], "fence", *names[3:]))

            def again(stored: object = stored, fence_subject: str = fence_subject) -> None:
                if server.is_up and not server.takes_nothing and stored.named is not None:  # type: ignore[attr-defined]
                    server.publish(
                        stored.subject, fence_subject, stored.data, stored.named, stored.acked, stored.by  # type: ignore[attr-defined]
                    )  # fmt: skip

            self._world.after(rng.expovariate(1.0), self._world.nature, again)
        return None

    def poison(self, rng: random.Random) -> Callable[[], None] | None:
        """Somebody writes garbage, damaged frames, or another's frames, on an instance's subject."""
        server = self._cluster.server
        node = self.node(rng)
        if node is None or not server.is_up or server.takes_nothing:
            return _NOTHING
        subject = events_subject(node.settings.instance.cluster, node.instance)
        events = [stored for stored in list(server.messages)[-40:] if stored.fence is None]
        data = rng.randbytes(rng.randint(1, 200))
        if events and rng.random() < 0.7:
            data = bytearray(rng.choice(events).data)
            if rng.random() < 0.7:
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
                if rng.random() < 0.3:
                    del data[rng.randrange(len(data)) :]
            elif events[0].subject == subject:
                return _NOTHING
        if data:
            server.store(subject, bytes(data), ORIGIN, None, "foreign")
        return None

    # -- disks --------------------------------------------------------------------------------------------------------

    def fill_disk(self, rng: random.Random) -> Callable[[], None] | None:
        node = self.node(rng)
        if node is None:
            return _NOTHING
        disk = node.machine.disk
        disk.full = True

        def end() -> None:
            disk.full = False

        return end

    def break_disk(self, rng: random.Random) -> Callable[[], None] | None:
        node = self.node(rng)
        if node is None:
            return _NOTHING
        disk = node.machine.disk
        disk.broken = True

        def end() -> None:
            disk.broken = False

        return end

    def slow_disk(self, rng: random.Random) -> Callable[[], None] | None:
        node = self.node(rng)
        if node is None:
            return _NOTHING
        disk = node.machine.disk
        disk.slow_s = rng.choice((0.02, 0.1, 0.5))

        def end() -> None:
            disk.slow_s = 0.0

        return end

    def slow_pools(self, rng: random.Random) -> Callable[[], None] | None:
        """Copies take longer than a request waits."""
        node = self.node(rng)
        if node is None:
            return _NOTHING
        node.nap_s = rng.choice((0.05, 0.3))

        def end() -> None:
            node.nap_s = USUAL_NAP_S

        return end

    def flip_journal(self, rng: random.Random) -> Callable[[], None] | None:
        """A bit of a journal flips while its instance is down."""
        node = self.node(rng, running=False)
        if node is None:
            return _NOTHING
        node.kill()
        files = node.machine.disk.journal_files()
        if files:
            node.machine.disk.flip(rng.choice(files[-2:]))
            self._cluster.checker.flipped_journal(node.machine.name)
        return self.restart(node)

    def flip_pool(self, rng: random.Random) -> Callable[[], None] | None:
        node = self.node(rng, running=False)
        files = node.machine.disk.pool_files() if node is not None else []
        if node is None or not files:
            return _NOTHING
        for _ in range(rng.randint(1, 20)):
            node.machine.disk.flip(files[0], 4096)
        return None

    def lose_objects(self, rng: random.Random) -> Callable[[], None] | None:
        objects = self._cluster.objects.store.objects
        for name in sorted(objects):
            if rng.random() < 0.2:
                body, put_ns = objects[name]
                if rng.random() < 0.5:
                    del objects[name]
                else:
                    objects[name] = (bytes(len(body)), put_ns)
        return None

    def refuse_objects(self, rng: random.Random) -> Callable[[], None] | None:
        objects = self._cluster.objects
        objects.refuses = 0.5

        def end() -> None:
            objects.refuses = 0.0

        return end

    # -- clocks -------------------------------------------------------------------------------------------------------

    def step_clock(self, rng: random.Random) -> Callable[[], None] | None:
        machine = rng.choice(list(self._cluster.machines.values()))
        machine.clock.wall_step_s += rng.choice((-1, 1)) * rng.choice((0.5, 5.0, 3600.0, 1e7))
        return None

    # -- the catalog --------------------------------------------------------------------------------------------------

    def database_down(self, rng: random.Random) -> Callable[[], None] | None:
        store = self._cluster.store
        store.is_down = True

        def end() -> None:
            store.is_down = False

        return end

    def restore_database(self, rng: random.Random) -> Callable[[], None] | None:
        """The database comes back as an older backup has it, or empty."""
        store = self._cluster.store
        store.is_down = True
        store.restore(rng.choice(store.backups))

        def end() -> None:
            store.is_down = False

        return end

    def database_loses_replies(self, rng: random.Random) -> Callable[[], None] | None:
        store = self._cluster.store
        store.loses_replies = 0.5

        def end() -> None:
            store.loses_replies = 0.0

        return end

    def spoil_index(self, rng: random.Random) -> Callable[[], None] | None:
        """The index loses an entry without a word, as a flipped bit would make it."""
        service = rng.choice(self._cluster.catalogs).service
        if service is None:
            return _NOTHING
        index, sequencer = service.index, service.sequencer
        known = []
        for namespace, block in self._cluster.chains.universe:
            for name, tier, is_pool in index.holders(namespace, block):
                if not is_pool:
                    known.append((namespace, block, InstanceId(name), tier))
        if not known:
            return _NOTHING
        namespace, block, instance, tier = rng.choice(known)
        position = sequencer.position(instance)
        view = index.view(instance)
        if view is None or view.epoch != position.epoch:
            return _NOTHING
        data = assembly.NATIVE.encode_frame(
            Frame(
                instance=instance, epoch=position.epoch, first_offset=Offset(position.offset), wall_time_ns=0, digest=0,
                events=(BlocksEvicted(namespace=namespace, tier=tier, reason=EvictReason.CLEARED, hashes=block),),
            )
        )  # fmt: skip
        index.apply(data)
        known_there = APPLIED_AHEAD.get(id(index), {}).get(instance, position)
        self._cluster.checker.spoil(sequencer, instance, max(Position(*position), known_there))
        return None


_HELPERS = ("schedule", "end", "node", "restart")
KINDS: dict[str, Callable[[Faults, random.Random], Callable[[], None] | None]] = {
    name: method
    for name, method in vars(Faults).items()
    if callable(method) and not name.startswith("_") and name not in _HELPERS
}
