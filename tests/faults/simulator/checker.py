"""What must hold, held against the run while it goes on and when it has settled.

The shadow is the history every ledger wrote: digests by (instance, epoch, offset), taken where frames reach the
journal. The catalog may be behind it or suspect; it may never be sure of something else.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, Any

import numpy as np

from kvbm import assembly
from kvbm.catalog.follow.sequencer import Sequencer
from kvbm.catalog.service import CatalogService
from kvbm.catalog.sql.rows import InstanceStatus
from kvbm.core.backend import Fold
from kvbm.core.codec import FrameBytes
from kvbm.core.ids import InstanceId, Tier
from kvbm.streams.base import ORIGIN, Heartbeat, Position, fence_subject, subject_names
from tests.faults.simulator.kernel import Process, Violation
from tests.faults.simulator.limits import held, unkept
from tests.faults.simulator.owning import unended
from tests.faults.simulator.server import Stored

if TYPE_CHECKING:
    from tests.faults.simulator.cluster import CatalogNode, Cluster, Node


SETTLED_IN_S = 30.0  # who is forgotten after less is forgotten when all has settled


class _Written:
    """What one process has written of one epoch."""

    def __init__(self, process: Process, epoch: int) -> None:
        self.process = process
        self.epoch = epoch
        self.digests: dict[int, int] = {}  # next offset → digest the ledger said
        self.end = 0
        self.fold: Fold = assembly.NATIVE_FOLD()  # of what is durable
        self.folded = 0


class Intervals:
    """Offsets that were ever stored."""

    def __init__(self) -> None:
        self._begins: list[int] = []
        self._ends: list[int] = []

    def add(self, begin: int, end: int) -> None:
        at = bisect_right(self._begins, begin)
        if at and self._ends[at - 1] >= begin:
            at -= 1
            begin, end = self._begins[at], max(end, self._ends[at])
        last = at
        while last < len(self._begins) and self._begins[last] <= end:
            end = max(end, self._ends[last])
            last += 1
        self._begins[at:last] = [begin]
        self._ends[at:last] = [end]

    def whole_until(self) -> int:
        """The end of what is there from 0 on without a hole."""
        return self._ends[0] if self._begins and self._begins[0] == 0 else 0


class Checker:
    """Knows what every ledger did; holds everybody else to it."""

    def __init__(self) -> None:
        self.cluster: Cluster
        self.checks = 0
        self._written: dict[tuple[InstanceId, int], list[_Written]] = {}
        self._current: dict[Process, _Written] = {}
        self._before: dict[Process, set[int]] = {}  # NVME slots whose blocks older epochs of this machine still claim
        self._machine_slots: dict[str, set[int]] = {}  # as the journal says, when the machine's last process ended
        self._machine_epochs: dict[str, int] = {}
        self._journals: dict[Process, Any] = {}
        self._nodes: dict[Process, Node] = {}
        self.put: dict[str, dict[int, bytes]] = {}  # machine → NVME slot → the block whose bytes were put there last
        self._cleared: dict[
            str, set[bytes]
        ] = {}  # machine → blocks that NVME was durably emptied of, and has not got since
        self._stored: dict[tuple[InstanceId, int], Intervals] = {}
        self._fences: dict[str, str] = {}
        self.spoilt: dict[
            tuple[str, InstanceId], Position
        ] = {}  # by the catalog's machine; excused until the next frame
        self.untrusted_journals: set[Process] = set()
        self._damaged: set[str] = set()  # machines whose journal has lost something

    def attach(self, cluster: Cluster) -> None:
        self.cluster = cluster
        cluster.server.on_stored = self.stored
        cluster.server.on_pulse = self.pulse
        cluster.server.on_too_large = self.too_large

    # -- what ledgers do ----------------------------------------------------------------------------------------------

    def opened(self, node: Node, process: Process, manager: Any) -> None:
        """An epoch may only grow on its machine."""
        last = self._machine_epochs.get(node.machine.name, 0)
        if manager.epoch <= last and not node.settings.journal.in_memory:  # which only the stream can remind of it
            raise Violation(f"{process} begins epoch {manager.epoch}, its machine had epoch {last} already")
        self._machine_epochs[node.machine.name] = manager.epoch
        self._nodes[process] = node
        if why := self._came_back(node):
            raise Violation(f"{process}: {why}")

    def cleared(self, process: Process, blocks: set[bytes]) -> None:
        """NVME was emptied of these blocks, and a journal says so durably."""
        put = set(self.put.get(process.machine, {}).values())
        self._cleared.setdefault(process.machine, set()).update(blocks - put)

    def _came_back(self, node: Node) -> str:
        """Blocks in NVME that had been cleared, though nobody has written them since; "" for none."""
        gone = self._cleared.get(node.machine.name)
        if not gone:
            return ""
        back = gone.intersection(node.manager.held(Tier.NVME)) if Tier.NVME in node.manager.pools.slots else set()
        return f"NVME has {len(back)} blocks again that were cleared" if back else ""

    def writing(self, process: Process, journal: Any, frame: FrameBytes) -> None:
        """A frame reaches the journal; it may fail there."""
        instance = InstanceId(process.name.split("@")[0])
        written = self._current.get(process)
        if written is None or frame.epoch != written.epoch:
            before = self._slots_claimed(process)
            written = self._current[process] = _Written(process, frame.epoch)
            self._before[process] = before
            self._written.setdefault((instance, frame.epoch), []).append(written)
        self._journals[process] = journal
        if frame.first_offset > written.end:
            raise Violation(f"{process} writes offset {frame.first_offset} where {written.end} was next")
        frames, error = assembly.NATIVE.scan_frames(frame.data)
        if error is not None or len(frames) != 1:
            raise Violation(f"{process} writes a frame that is none: {error}")
        written.digests[frame.next_offset] = frames[0].digest
        written.end = max(written.end, frame.next_offset)

    def wrote(self, process: Process, frame: FrameBytes) -> None:
        """A frame is durable."""
        written = self._current[process]
        folded = written.fold.evolve_frame(frame.data)
        if folded.illegal is not None:
            raise Violation(f"{process} wrote an illegal event at {frame.first_offset}: {folded.illegal}")
        if written.fold.digest != folded.frame.digest:
            raise Violation(f"{process} wrote another digest than its events make, before {frame.next_offset}")
        written.folded = frame.next_offset
        if self.cluster.peers is not None:
            self.cluster.peers.wrote(process, frame)
        if Tier.NVME in written.fold.pools:
            self._check_claims(process, written)

    def _check_claims(self, process: Process, written: _Written) -> None:
        """What the journal claims for NVME has been put there."""
        put = self.put.get(process.machine)
        if not put:
            return
        blocks = written.fold.blocks(Tier.NVME)
        slots = np.frombuffer(blocks.slots, dtype="<i8").tolist()
        for at, slot in enumerate(slots):
            there = put.get(slot)
            if there is not None and there != blocks.hashes[16 * at : 16 * at + 16]:
                raise Violation(f"the journal of {process} claims NVME slot {slot} for a block that is not there")

    def _slots_claimed(self, process: Process) -> set[int]:
        """The NVME slots a recovery would find claimed if the process died now."""
        written = self._current.get(process)
        if written is None:
            return self._machine_slots.get(process.machine, set())
        now = set(np.frombuffer(written.fold.blocks(Tier.NVME).slots, dtype="<i8").tolist())
        if Tier.NVME in written.fold.pools and written.fold.is_whole(Tier.NVME):
            return now
        return now | self._before[process]

    def ended(self, process: Process) -> None:
        """A process is dead: what its journal claims is what the next one starts from."""
        if process in self._current:
            self._machine_slots[process.machine] = self._slots_claimed(process)

    def overwrites(self, node: Node, process: Process, slots: list[int]) -> None:
        """NVME slots are about to be written."""
        if both := self._slots_claimed(process).intersection(slots):
            raise Violation(f"{process} overwrites NVME slots {sorted(both)}, whose blocks its journal still claims")
        put = self.put.setdefault(node.machine.name, {})
        for slot in slots:
            put[slot] = b""  # until the write is over

    def has_put(self, node: Node, slots: list[int], hashes: bytes) -> None:
        """NVME slots have been written."""
        put = self.put.setdefault(node.machine.name, {})
        gone = self._cleared.get(node.machine.name, set())
        for at, slot in enumerate(slots):
            put[slot] = hashes[16 * at : 16 * at + 16]
            gone.discard(put[slot])

    def lost_power(self, machine: str) -> None:
        """What its disk holds is no longer what was written: headers and checksums must tell."""
        self.flipped_journal(machine)
        self._cleared.pop(machine, None)

    def flipped_journal(self, machine: str) -> None:
        """Its journal is no longer what was written. What it says was cleared stays so: NVME knows of that itself."""
        self._damaged.add(machine)
        self.put.pop(machine, None)
        self._machine_slots.pop(machine, None)

    def lost_disk(self, machine: str) -> None:
        """Nothing it wrote is there; its epochs may begin anew."""
        self.lost_power(machine)
        self._machine_epochs.pop(machine, None)

    # -- what the server keeps ----------------------------------------------------------------------------------------

    def stored(self, stored: Stored) -> None:
        name = stored.subject.split(".", 3)[3]
        if stored.fence is not None:
            self._fences[name] = stored.by
            return
        owner = self._fences.get(name)
        if owner is not None and stored.by not in (owner, "foreign") and not stored.by.startswith("copy"):
            fence = self.cluster.server.last.get(fence_subject(*subject_names(stored.subject)))
            # Else the server has lost the owner's fence and an older one counts again, or a stream that was made anew
            # has given it the number that another had in the stream before.
            is_owners = fence is not None and fence.by == owner
            if is_owners and not (
                self.cluster.server.is_another and stored.named is not None and stored.named.sequence == fence.sequence
            ):
                raise Violation(f"the stream took events of {name} from {stored.by}, while the fence is {owner}'s")
        if stored.by == "foreign":
            return
        frames, error = assembly.NATIVE.scan_frames(stored.data)
        if error is not None:
            raise Violation(f"{stored.by} published bytes that are no frame: {error}")
        for frame in frames:
            key = (frame.instance, frame.epoch)
            self._stored.setdefault(key, Intervals()).add(frame.first_offset, frame.next_offset)

    def pulse(self, heartbeat: Heartbeat) -> None:
        """Nobody may say that more is published than the stream ever held."""
        found = self._stored.get((heartbeat.instance, heartbeat.epoch))
        whole = found.whole_until() if found else 0
        if heartbeat.published > whole:
            raise Violation(
                f"{heartbeat.instance} says offset {heartbeat.published} of epoch {heartbeat.epoch} is published; the "
                f"stream holds it up to {whole}"
            )

    def too_large(self, heartbeat: Heartbeat, size: int) -> None:
        """No heartbeat is larger than a server takes, whatever clients choose."""
        raise Violation(
            f"a heartbeat of {heartbeat.instance} with {len(heartbeat.namespaces)} namespaces has {size} bytes; the "
            "server takes "
            f"{self.cluster.server.max_payload_bytes}"
        )

    # -- what the catalog says ----------------------------------------------------------------------------------------

    def catalog_began(self, node: CatalogNode, service: CatalogService) -> None:
        service.sequencer.__dict__["machine"] = node.machine.name

    def spoil(self, sequencer: Any, instance: InstanceId, position: Position) -> None:
        """An entry of an index was flipped; a checkpoint may bring it back."""
        self.spoilt[sequencer.__dict__["machine"], instance] = position

    def stepped(self, sequencer: Any, instances: Any, machine: str) -> None:
        """The catalog has applied messages: where it is sure of an instance, it must be right."""
        sequencer.__dict__["machine"] = machine
        for instance in instances:
            self.check_instance(sequencer, instance)
        if sequencer.counters.digest_mismatches and all(spoilt != machine for spoilt, _ in self.spoilt):
            raise Violation(
                "a digest differs though no entry was spoilt: events were missed, or counted twice, unnoticed"
            )

    def forgotten(self, sequencer: Any, instance: InstanceId) -> None:
        """A catalog knows nothing of an instance any more: any epoch may come."""
        sequencer.__dict__.get("epochs_seen", {}).pop(instance, None)

    def check_instance(self, sequencer: Any, instance: InstanceId) -> None:
        self.checks += 1
        index = sequencer.index
        view = index.view(instance)
        position = sequencer.position(instance)
        if view is None or not position.epoch:
            return
        epochs: dict[InstanceId, tuple[int, int]] = sequencer.__dict__.setdefault("epochs_seen", {})
        life = sequencer.ownership(instance).life
        if (life, view.epoch) < epochs.get(instance, (0, 0)):
            raise Violation(f"the catalog went back to epoch {view.epoch} of {instance}")
        epochs[instance] = (life, view.epoch)
        if view.suspect or view.partial or sequencer.sequence <= getattr(sequencer, "_settled", 0):
            return
        if position <= self.spoilt.get((sequencer.__dict__.get("machine", ""), instance), ORIGIN):
            return
        known = self._written.get((instance, position.epoch), [])
        if not any(written.digests.get(position.offset) == view.digest for written in known):
            said = [written.digests.get(position.offset) for written in known]
            raise Violation(
                f"the catalog is sure of {instance} at epoch {position.epoch} offset {position.offset} with digest "
                f"{view.digest:016x}; the ledger had {said}"
            )

    # -- the end ------------------------------------------------------------------------------------------------------

    def unsettled(self) -> str:
        """What is not as it must be once everything has settled; "" when all is well."""
        live = {}
        for node in self.cluster.nodes:
            if not node.wanted:
                continue
            if not node.is_running:
                return f"{node.instance} on {node.machine.name} does not run"
            live[node.instance] = node
            if self.cluster.peers is not None and (why := self.cluster.peers.unsettled(node)):
                return f"{node.instance}: {why}"
            if self.cluster.limits is not None and (why := unkept(node)):
                return f"{node.instance}: {why}"
            if node.is_owner and (why := unended(node) or held(node.manager) or self._came_back(node)):
                return f"{node.instance}: {why}"
        for catalog in self.cluster.catalogs:
            if why := self._unsettled_catalog(catalog, live):
                return f"{catalog.machine.name}: {why}"
        return ""

    def _unsettled_catalog(self, catalog: CatalogNode, live: dict[InstanceId, Node]) -> str:
        service = catalog.service
        if service is None:
            return "the catalog does not run"
        if not service.is_ready:
            return f"the catalog is not ready: {service.readiness().reason}"
        index, sequencer = service.index, service.sequencer
        for instance, node in sorted(live.items()):
            if why := self._unsettled_instance(instance, node, index, sequencer):
                return f"{instance}: {why}"
        for instance in sequencer.instances():
            self.check_instance(sequencer, instance)
        return (
            self._unforgotten(service, live)
            or self._unsettled_rows(service)
            or self._unsettled_histories(live, sequencer)
            or self._unsettled_blocks(live, index)
            or self._unlike_cold(sequencer, index)
        )

    def _unsettled_instance(self, instance: InstanceId, node: Node, index: Any, sequencer: Any) -> str:
        manager: Any = node.manager
        offset, digest = manager.digest()
        position, view = sequencer.position(instance), index.view(instance)
        if view is None:
            return "the catalog does not know it"
        if view.epoch != manager.epoch or position != (manager.epoch, offset):
            return f"the catalog is at {tuple(position)}, the ledger at epoch {manager.epoch} offset {offset}"
        if view.suspect:
            return "it is still suspect"
        if view.partial:
            return "residencies of it were refused"
        if view.stopped:
            return "the catalog says it has stopped"
        if view.excluded:
            return "it is still excluded"
        if view.digest != digest:
            return f"digest {view.digest:016x} in the catalog, {digest:016x} in the ledger"
        counts = {tier: count for tier, count in view.counts.items() if count and tier != Tier.OBJECT}
        held = {tier: len(manager.held(tier)) for tier in manager.pools.slots}
        if counts != {tier: count for tier, count in held.items() if count}:
            return f"the catalog counts {counts}, the ledger {held}"
        return (
            self._unpublished(instance)
            or self._journal_differs(node, manager, digest)
            or self._stream_differs(instance, manager, digest)
        )

    def _unpublished(self, instance: InstanceId) -> str:
        """Every epoch's events are on the stream to the end, also of those that are over, unless their journal was
        damaged.

        Of an instance that ran on several machines nobody asks it: who was shut out keeps its tail to itself.
        """
        nodes = [node for node in self.cluster.nodes if node.instance == instance]
        machines = {node.machine.name for node in nodes}
        if len(machines) > 1 or machines & self._damaged or nodes[0].settings.journal.in_memory:
            return ""
        for (name, epoch), known in self._written.items():
            if name != instance:
                continue
            found = self._stored.get((name, epoch))
            whole = found.whole_until() if found else 0
            for written in known:
                if written.folded > whole:
                    return f"its journal had epoch {epoch} up to {written.folded}, the stream never got past {whole}"
        return ""

    def _journal_differs(self, node: Node, manager: Any, digest: int) -> str:
        process = node.process
        assert process is not None
        journal = self._journals.get(process)
        if journal is None or process in self.untrusted_journals or not hasattr(journal, "frames"):
            return ""
        fold: Fold = assembly.NATIVE_FOLD()
        expected = None
        for frame, data in journal.frames(manager.epoch):
            if expected is None and frame.first_offset:
                fold.strict = False
                fold.begin_blind(manager.epoch)
            elif expected is not None and frame.first_offset != expected:
                return f"its journal has offset {frame.first_offset} where {expected} should be"
            expected = frame.next_offset
            fold.evolve_frame(data, frame.at)
        if fold.digest != digest:
            return f"its journal folds to digest {fold.digest:016x}, the ledger has {digest:016x}"
        return ""

    def _stream_differs(self, instance: InstanceId, manager: Any, digest: int) -> str:
        """The log folded as a reader would who begins with its oldest message."""
        fold: Fold = assembly.NATIVE_FOLD()
        fold.strict = False
        expected: int | None = None
        for stored in self.cluster.server.messages:
            if stored.fence is not None or stored.by == "foreign" or subject_names(stored.subject)[1] != instance:
                continue
            if stored.named is not None and stored.named.run != manager.run:
                continue  # of another life, which may have had an epoch of this number
            frames, _ = assembly.NATIVE.scan_frames(stored.data)
            for frame in frames:
                if frame.epoch != manager.epoch or frame.instance != instance or frame.flaw:
                    continue
                if expected is None:
                    if frame.first_offset:
                        fold.begin_blind(manager.epoch)
                elif frame.next_offset <= expected:
                    continue
                elif frame.first_offset > expected:
                    fold.miss_events()
                fold.evolve_frame(stored.data, frame.at, max(0, (expected or 0) - frame.first_offset))
                expected = frame.next_offset
        if expected is None or not all(fold.is_whole(tier) for tier in manager.pools.slots):
            return ""  # hidden or trimmed since: no reader could know more
        if expected < manager.applied() and self.cluster.server.hidden:
            return ""  # its last messages were hidden once they had been read, and it has said nothing since
        if fold.digest != digest:
            return f"the stream folds to digest {fold.digest:016x}, the ledger has {digest:016x}"
        return ""

    def _unforgotten(self, service: CatalogService, live: dict[InstanceId, Node]) -> str:
        """Who is gone for good is known to no catalog and not to SQL, where the gone are forgotten soon; so catalogs
        agree.
        """
        if self.cluster.forget_s > SETTLED_IN_S:
            return ""
        known = {
            "the sequencer": service.sequencer.instances(),
            "liveness": service.heartbeats.liveness.instances(),
            "the index": service.index.instances(),
            "SQL": self.cluster.store.instance_rows,
            "SQL's positions": self.cluster.store.position_rows,
        }
        for where, names in known.items():
            if gone := sorted(set(names) - live.keys()):
                return f"{where} still knows {gone}, gone for good"
        return ""

    def _unsettled_rows(self, service: CatalogService) -> str:
        store, index, sequencer = self.cluster.store, service.index, service.sequencer
        for instance in sequencer.instances():
            row = store.position_rows.get(instance)
            position = sequencer.position(instance)
            if row is None or (row.epoch, row.next_offset) != position:
                return f"SQL has {instance} at {row}, the index at {tuple(position)}"
        claims: dict[str, int] = {}
        for pool, _, _ in store.claim_rows:
            claims[pool] = claims.get(pool, 0) + 1
        counted = {pool: count for pool, count in index.claim_counts().items() if count}
        if claims != counted:
            return f"SQL has claims {claims}, the index {counted}"
        return ""

    def _unsettled_histories(self, live: dict[InstanceId, Node], sequencer: Any) -> str:
        """SQL's rows of instances, epochs and namespaces are those of the ledgers."""
        store = self.cluster.store
        for instance, node in sorted(live.items()):
            manager: Any = node.manager
            offset, digest = manager.digest()
            row, epoch = store.instance_rows.get(instance), store.epoch_rows.get((instance, manager.epoch))
            if row is None or (row.epoch, row.state) != (manager.epoch, InstanceStatus.LIVE):
                return f"SQL has {row}, {instance} is in epoch {manager.epoch} and runs"
            if epoch is None or (epoch.next_offset, epoch.digest) != (offset, digest) or epoch.ended_ns is not None:
                return f"SQL has {epoch}, {instance} is at offset {offset} with digest {digest:016x}"
            pools = {pool.tier: pool.slots for pool in row.pools if pool.slots}
            if pools and any(len(manager.held(tier)) > pools.get(tier, 0) for tier in manager.pools.slots):
                return f"SQL has {instance} with pools {pools}, it holds more"
            # Of those that heartbeats tell of the rows go with the next message, which may not come.
            for namespace in sequencer._sequences[instance].names.started:
                if namespace not in store.namespace_rows:
                    return f"{instance} declared the namespace {namespace.hex()}, SQL lacks it"
        return ""

    def _unlike_cold(self, sequencer: Any, index: Any) -> str:
        """A catalog that reads the whole stream now stands where this one stands, and has its claims."""
        server = self.cluster.server
        if not server.is_whole:
            return ""
        cold_index = assembly.NATIVE_INDEX(1 << 20)
        cold = Sequencer(cold_index, assembly.NATIVE.scan_frames)
        cold.step(0.0, [stored.message for stored in server.messages], at_end=True)
        for instance in sequencer.instances():
            if cold.position(instance) != sequencer.position(instance):
                return (
                    f"read anew, {instance} is at {tuple(cold.position(instance))}, not "
                    f"{tuple(sequencer.position(instance))}"
                )
        cold.pass_holes()  # of one that is gone, whose heartbeats had told this one that what is missing will not come
        claims, again = (
            {pool: count for pool, count in one.claim_counts().items() if count} for one in (index, cold_index)
        )
        if claims != again:
            return f"the catalog counts claims {claims}; read anew, the stream has {again}"
        return ""

    def _unsettled_blocks(self, live: dict[InstanceId, Node], index: Any) -> str:
        held = {}
        for instance, node in live.items():
            manager: Any = node.manager
            held[instance] = {tier: set(manager.held(tier)) for tier in manager.pools.slots}
        store = self.cluster.store
        for namespace, block in self.cluster.chains.universe:
            seen = {(name, tier) for name, tier, is_pool in index.holders(namespace, block) if not is_pool}
            for instance, tiers in held.items():
                for tier, blocks in tiers.items():
                    if ((instance, tier) in seen) != (block in blocks):
                        return (
                            f"{instance} {tier.name} block {block.hex()[:8]}: catalog {(instance, tier) in seen}, "
                            f"ledger {block in blocks}"
                        )
            pools = {name for name, _, is_pool in index.holders(namespace, block) if is_pool}
            rows = {pool for pool, owner, row in store.claim_rows if (owner, row) == (namespace, block)}
            if pools != rows:
                return f"block {block.hex()[:8]} is claimed for {pools} in the index, for {rows} in SQL"
        return ""
