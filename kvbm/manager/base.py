"""What every block manager does, whoever owns HBM: its life, its numbers, what it says of namespaces and of the object
pool.

Every public call may come from any thread. Trouble with a colder tier, the catalog or the stream is a miss and one
warning; the engine never waits longer than `wait_s` for bytes. What escapes is a bug in the caller: an ArgumentError
(in `hash_tokens` also a LayoutError) for an argument that cannot be used, a LedgerError for a call that contradicts
what the ledger holds, or comes after `close`. After each of them the manager is as it was before.

`start` makes the threads. A simulator leaves it out and drives a manager by hand, in its own time, with the same
results:

- `step_frames(now_s)` is one turn of the event writer: it writes what waits, begins and steps snapshots, begins another
  epoch where one is due; it says when the next turn is due.
- `offload_one()` carries out the next offload; False when none waits. It never waits for anything but its own copy.
- loads run on the `executor` of the options, which may carry them out at once or later. What has not ended when
  `acquire` has waited `wait_s` is late, so with `wait_s` 0 it never waits.
- a copy to NVME that waits for its slots' withdrawal waits in `Offsets.wait_durable`: derive from it and take turns
  there.
- `clock` and `wall_clock_ns` are the only times read. `publisher_port` takes what a publisher says of the stream.
  `close` ends it all in turns of its own; a crash is to drop the manager.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Self

import numpy as np

from kvbm.core.ages import FOLLOWED
from kvbm.core.arguments import (
    MOST_BLOCKS,
    check_flag,
    check_namespaces,
    check_rate,
    check_run,
    check_seconds,
    check_tier,
    checked_hash,
)
from kvbm.core.backend import Backend, ChecksumRows, LedgerProtocol
from kvbm.core.checks import checked_int, kind_of
from kvbm.core.errors import ArgumentTypeError, LayoutError
from kvbm.core.events import EvictReason
from kvbm.core.ids import Epoch, InstanceId, Namespace, NamespaceId, Offset, SequenceHash, Tier, split_hashes
from kvbm.core.lent import LentCounts
from kvbm.core.results import HIGHEST_PRIORITY, Match
from kvbm.locate.base import Locator
from kvbm.manager.closing import Closing
from kvbm.manager.copies.copies_in_flight import CopiesInFlight, KeepRule, name_of, slots_held
from kvbm.manager.copies.staging import Staging
from kvbm.manager.copies.transfer import Pools
from kvbm.manager.copies.workers import Workers
from kvbm.manager.counters import Counters
from kvbm.manager.objects.claim_watch import RUN_BYTES, ClaimWatch
from kvbm.manager.offload.driver import OffloadDriver
from kvbm.manager.offload.host_transit import HostTransit
from kvbm.manager.offload.queue import Offloader
from kvbm.manager.onboard.loads import Loads
from kvbm.manager.options import ManagerOptions
from kvbm.manager.record.event_writer import RUNS_A_TURN, EventWriter, FrameSink
from kvbm.manager.record.journal_retention import JournalRetention
from kvbm.manager.record.ledger_stream import LedgerStream
from kvbm.manager.record.offsets import Offsets
from kvbm.manager.record.prompt_samples import Sampled
from kvbm.manager.record.publisher_port import PublisherPort, Publishing
from kvbm.manager.record.usage_account import UsageAccount
from kvbm.manager.recovery.salvage import Salvage
from kvbm.manager.revisioned_namespaces import RevisionedNamespaces
from kvbm.manager.spans import asked_values
from kvbm.manager.stats import ManagerStats
from kvbm.manager.used_namespaces import UsedNamespaces
from kvbm.pools.base import NamespaceBytes, ObjectStats
from kvbm.streams import at_exit as leaving
from kvbm.streams.base import Heartbeat, Load, Position

if TYPE_CHECKING:
    from kvbm.telemetry.tracing import TraceSpan, Tracing

_STAGING_BYTES = 64 << 20
_TOLD_NAMESPACES = 256  # of which a heartbeat says what was put, at most
_LONGEST_KEEP_S = 1e12  # what is kept for longer is kept for ever
_MOST_LOAD = (1 << 63) - 1  # that a heartbeat can say
_DEFAULTS = ManagerOptions()


class ManagerParts(NamedTuple):
    """What `erasure/manager.py` works on, beside the calls of an engine.

    Attributes:
        retention: of the journal; None: there is none. used: namespaces that heartbeats name.
        salvage: brings back blocks that NVME's slots prove.
        checksums: of rows of blocks. owns_hbm: whether HBM is the manager's, and not the engine's.
    """

    stream: LedgerStream
    pools: Pools
    offsets: Offsets
    port: PublisherPort
    retention: JournalRetention | None
    offloader: Offloader
    revisioned: RevisionedNamespaces
    used: UsedNamespaces
    salvage: Salvage
    checksums: ChecksumRows
    owns_hbm: bool


class BlockManager:
    """See the module. `Manager` owns HBM; to an `EngineHbmManager` the engine says what it holds there.

    It puts the parts together and has what both kinds offer; the parts know each other only as far as their
    constructors say.

    Args:
        ledger: started, its first events not taken yet.
        pools: the bytes of the ledger's pools.
        sink: the journal.

    Attributes:
        run: of this process: random, made at its start. lends: where others can read its blocks, as
            `PeerAddress.words`. lent: says what it has lent; None: it lends nothing.
        publisher_port: what a publisher asks and reports, in its own thread.
        parts: what an erasure works on.
    """

    _target: ClassVar[Tier]  # where requests get their blocks
    _owns_hbm: ClassVar[bool]

    def __init__(
        self,
        instance: InstanceId,
        cluster: str,
        ledger: LedgerProtocol,
        pools: Pools,
        sink: FrameSink,
        backend: Backend,
        offloader: Offloader,
        locator: Locator,
        options: ManagerOptions = _DEFAULTS,
    ) -> None:
        self.instance, self.cluster, self.pools = instance, cluster, pools
        self.lends: dict[str, str] = {}
        self.lent: Callable[[], LentCounts] | None = None
        self.run = options.run or secrets.token_hex(8)
        self._backend, self._offloader, self._ledger = backend, offloader, ledger
        self._wait_s, self._clock, self._wall_clock_ns = options.wait_s, options.clock, options.wall_clock_ns
        self._counters = Counters()
        self._revisioned, self._unused = options.revisioned or RevisionedNamespaces(all_may=True), tuple(options.unused)
        self._namespaces = UsedNamespaces(fields=self._revisioned.fields, begun_with=list(self._revisioned.fields))
        self._samples, self._chain = options.samples, options.chain
        self._sampled_below = b"" if options.samples is None else options.samples.below
        self._disowners: list[Callable[[], None]] = []
        self._tracing = options.tracing

        usage = None if options.usage is None else UsageAccount(options.usage, ledger.pools, self._revisioned)
        self._stream = LedgerStream(instance, ledger, options.wall_clock_ns, options.lock, usage)
        self._lock = self._stream.lock
        self._offsets = options.offsets or Offsets()
        self._offsets.begin_epoch(ledger.epoch, ledger.applied)
        self.publisher_port = PublisherPort(
            instance, cluster, self.run, self._stream, self.heartbeat, options.samples, options.has_stream
        )
        self._writer = EventWriter(
            self._stream,
            sink,
            self._offsets,
            self.publisher_port,
            options.retention,
            options.snapshots,
            options.clock,
            ages=options.ages,
        )
        self._ages = options.ages
        self._executor = options.executor or Workers(options.load_threads, f"kvbm-onboard-{instance}")
        self._claims = ClaimWatch(self._stream, pools.object, offloader.claims, options.clock)
        self._copies = CopiesInFlight(
            self._stream,
            pools,
            self._target,
            self._offsets,
            _staging(pools, options),
            self._executor,
            offloader.room_came,
            self._claims,
            self._counters,
            options.wait_s,
        )
        self._loads = Loads(
            self._stream,
            self._copies,
            offloader,
            locator,
            self._revisioned,
            self._counters,
            self._claims,
            self._executor,
            options,
        )
        self._salvage = Salvage(self._stream, pools, self._offsets, options.salvage, self._loads)
        self.parts = ManagerParts(
            self._stream,
            pools,
            self._offsets,
            self.publisher_port,
            options.retention,
            offloader,
            self._revisioned,
            self._namespaces,
            self._salvage,
            backend.checksums,
            self._owns_hbm,
        )
        self._transit = HostTransit(self._stream, self._copies, offloader, options.clock)
        self._offloads = OffloadDriver(
            self._stream,
            self._copies,
            offloader,
            self._transit,
            self._claims,
            self._writer,
            self._counters,
            self._loads.nobody_waits,
            options,
        )
        self._closing = Closing(
            instance,
            self._stream,
            self._loads,
            self._executor,
            offloader,
            self._offloads,
            self._writer,
            self.publisher_port,
            self._copies,
        )

    def start(
        self,
        publishing: Publishing | None = None,
        closers: Sequence[Callable[[], None]] = (),
        disowners: Sequence[Callable[[], None]] = (),
        stoppers: Sequence[Callable[[float], object]] = (),
        taken: Callable[[], object] = lambda: None,
    ) -> None:
        """Start the threads.

        Raises RuntimeError: the system gives no thread; the manager is closed then, and all that it was given.

        Args:
            publishing: how events reach the stream; None keeps them in the journal.
            closers, disowners: called last when the manager closes; called in a forked child, whose the manager is not.
            stoppers: called first when the manager closes, while its pools are still there, with how long to wait.
            taken: called last: from then on whoever has opened all that leaves it to the manager.
        """
        try:
            self.publisher_port.publishing = publishing
            self._disowners = list(disowners)
            self._closing.add([*stoppers, self._salvage.stop], closers)
            leaving.keep(self)
            for part in (self._writer, self._offloads, self._salvage):
                part.start()
            taken()
        except BaseException:  # half a manager would keep its locks, and be routed to
            self.close()
            raise

    # -- what an engine calls -----------------------------------------------------------------------------------------

    def hash_tokens(self, tokens: Sequence[int] | np.ndarray, root: bytes, block_tokens: int) -> bytes:
        """The sequence hashes of a prompt's full blocks, packed: equal hashes mean equal prefixes.

        Touches no state of the manager.

        Args:
            tokens: T token ids in prompt order, each from 0 to 2**32 - 1: a list, or a NumPy array of any kind of
                integers. A list of ints and an array of u32 are read where they lie.
            root: of the namespace, `Namespace.root(secret)`, 16 bytes; or the last hash of the blocks before.
            block_tokens: B, tokens per block, as the namespace has it; at least 1.
        Returns: T // B hashes of 16 bytes, in prompt order. A partial last block has no hash.
        Raises: ArgumentTypeError: tokens that are no whole numbers, or another argument of a wrong type.
            ArgumentValueError: a root that has not 16 bytes, block_tokens below 1. LayoutError: a token that does not
            fit in 32 bits.
        """
        if tokens is None:
            raise ArgumentTypeError("tokens", "is None; give a sequence of token ids")
        if isinstance(root, Namespace):
            raise ArgumentTypeError("root", "is a Namespace; give namespace.root(secret)")
        return self._backend.sequence_hashes(
            tokens, checked_int(block_tokens, "block_tokens", least=1), checked_hash(root, "root")
        )

    def declare(self, namespaces: Iterable[Namespace]) -> None:
        """Say what further namespaces are, before their first use: only of those that name a revision do blocks leave
        HBM and HOST. Their blocks count for their tenants' shares and quotas, as those of the namespaces it was opened
        with do.

        Args:
            namespaces: of the block shape the manager was opened for.
        Raises: ArgumentTypeError: not a list of Namespace.
        """
        with self._lock:
            _declare_locked(check_namespaces(namespaces), self._revisioned, self.pools, self._ledger, self._offloader)

    def match(self, hashes: bytes, namespace: NamespaceId | None = None) -> Match:
        """The longest run this instance holds, and where, packed; pins nothing.

        Args:
            hashes: n packed hashes of a prompt's blocks.
            namespace: whose blocks count; None: everybody's.
        Raises: ArgumentError: `hashes` is no packed run, or nobody has told of the namespace.
        """
        check_run(hashes)
        if namespace is not None:
            self._check_namespace(namespace)
        with self._lock:
            return self._ledger.match(hashes, False, Tier.HBM, namespace)

    def keep(
        self,
        hashes: bytes,
        ttl_s: float,
        priority: int = 0,
        namespace: NamespaceId | None = None,
        until_read: bool = False,
        most: int | None = None,
    ) -> int:
        """Keep blocks in HBM, or in HOST where HBM is the engine's, for a time, also while nobody has them pinned.

        They are given up only where an allocation would be short, lowest priority first, 100 never. Keeping again takes
        the later end and the higher priority.

        Args:
            ttl_s: for how long from now on. priority: 0 to 100.
            namespace: whose blocks count; None: everybody's.
            until_read: or until another instance has read them, whichever comes first.
            most: blocks of the tier that may be kept; the run is cut before one that would be too many. A tenant with a
                quota of the tier may have half of that kept or pinned. None: no bound.
        Returns: how many of the run are there, up to where it is cut.
        Raises: ArgumentError: an argument that cannot be used. LedgerError: the manager is closed.
        """
        check_run(hashes)
        if namespace is not None:
            self._check_namespace(namespace)
        rule = self._checked_keep(ttl_s, priority, until_read, most)
        with self._lock:
            self._stream.require_open_locked()
            return self._keep_locked(hashes, rule, namespace)

    def evict(self, tier: Tier, hashes: bytes, reason: EvictReason = EvictReason.CLEARED) -> int:
        """Withdraw blocks from a tier; returns how many it held.

        What is CLEARED from NVME is noted on its device first.

        Raises: ArgumentError: an argument that cannot be used. LedgerError: no such pool, or the manager is closed.
        """
        check_tier(tier)
        check_run(hashes)
        _check_reason(reason)
        with self._salvage.evicting(tier, hashes, reason, list(self._revisioned.tenants)), self._lock:
            self._stream.require_open_locked()
            count = self._ledger.evict(tier, hashes, reason)
        self._stream.recorded()
        return count

    def claim(self, namespace: NamespaceId, hashes: bytes) -> None:
        """Say that the object pool has these blocks, whoever put them there.

        Raises: ArgumentError: an argument that cannot be used. LedgerError: there is no such pool, or the manager is
            closed.
        """
        self._check_namespace(namespace)
        check_run(hashes)
        with self._lock:
            self._stream.require_open_locked()
            for at in range(0, len(hashes), RUN_BYTES):
                self._ledger.claim(Tier.OBJECT, namespace, hashes[at : at + RUN_BYTES], self.instance)
        self._stream.recorded()

    def withdraw(self, namespace: NamespaceId, hashes: bytes, reason: EvictReason) -> None:
        """Take back everybody's claim that the object pool has these blocks.

        Raises: ArgumentError: an argument that cannot be used. LedgerError: there is no such pool, or the manager is
            closed.
        """
        self._check_namespace(namespace)
        check_run(hashes)
        _check_reason(reason)
        with self._lock:
            self._stream.require_open_locked()
            for at in range(0, len(hashes), RUN_BYTES):
                self._ledger.forget(Tier.OBJECT, namespace, hashes[at : at + RUN_BYTES], reason)
        self._stream.recorded()

    def take_snapshot(self) -> None:
        """Take a snapshot of what is held, as a snapshot in the own stream: run by run, so that the engine never waits
        for it.

        Raises: LedgerError: the manager is closed.
        """
        with self._lock:
            self._stream.require_open_locked()
        publishing = self.publisher_port.publishing
        if self._stream.begin_snapshot() and publishing is not None:
            publishing.snapshot_began()
        going_on = True
        while going_on:
            going_on = self._stream.step_snapshot()
            self._stream.recorded()

    def report_load(
        self,
        queued_tokens: int,
        running_requests: int,
        prefill_tokens_per_s: float | None = None,
        queue_tokens_per_s: float | None = None,
    ) -> None:
        """Tell routers how busy the engine is; goes out with the next heartbeat.

        Args:
            queued_tokens: prompt tokens that wait for their prefill.
            running_requests: requests being decoded.
            prefill_tokens_per_s, queue_tokens_per_s: as `LoadMeter` measures them; a catalog believes them within 4
                times what it expects. Blocks that would take longer to read than to compute, by the first, are
                computed; what tenants save is counted in seconds by it.
        Raises: ArgumentError: a number that cannot be used.
        """
        load = _checked_load(queued_tokens, running_requests, prefill_tokens_per_s, queue_tokens_per_s)
        self._loads.load = load
        if self._stream.usage is not None:
            self._stream.usage.prefill_tokens_per_s = load.prefill_tokens_per_s

    # -- one turn at a time, for whoever has no threads ----------------------------------------------------------------

    def step_frames(self, now_s: float, runs: int = RUNS_A_TURN) -> float | None:
        """One turn of the event writer, as `EventWriter.step`; instead of `start`."""
        return self._writer.step(now_s, runs)

    def offload_one(self) -> bool:
        """Carry out the next offload that waits; False when there is none that can go now, or the manager closes."""
        return self._offloads.offload_one()

    # -- numbers ------------------------------------------------------------------------------------------------------

    @property
    def epoch(self) -> Epoch:
        """The epoch its newest events belong to; grows when another begins in place."""
        return self._ledger.epoch

    def trouble(self) -> str:
        """What the manager cannot do now, in words; "" when all is well."""
        return "; ".join(self._troubles().values())

    def _troubles(self) -> dict[str, str]:
        """In words, by TROUBLED_PARTS: the worst of its own, and what its publisher says."""
        part, words = self._own_trouble()
        publishing = self.publisher_port.publishing
        unpublished = publishing.trouble() if publishing is not None else ""
        return {name: why for name, why in ((part, words), ("stream", unpublished)) if why}

    def _own_trouble(self) -> tuple[str, str]:
        refusal = self._writer.refusal
        if self._ledger.overflowed:
            why = f"{refusal or 'it took events too slowly'}; unseen by the catalog since offset {self._ledger.applied}"
            return "journal", f"journal: {why}, until it takes events again"
        if refusal:
            return "journal", f"journal: {refusal}; nothing new goes to NVME and OBJECT until it takes events again"
        if silent := self._loads.silent_sources():
            return "tiers", f"{', '.join(map(name_of, silent))}: reads do not end; a miss until they do"
        if self.pools.object is not None and (away := self.pools.object.stats().away):
            return "objects", f"{away}; not used until it answers"
        return "namespaces", self._revisioned.why(self._unused)

    def applied(self) -> Offset:
        """The offset after the last event decided."""
        with self._lock:
            return self._ledger.applied

    def durable(self) -> Offset:
        """The offset after the last event of this epoch in the journal."""
        return durable.offset if (durable := self._offsets.durable).epoch == self.epoch else Offset(0)

    def published(self) -> Position:
        """How far the stream has come; (0, 0) without one."""
        publishing = self.publisher_port.publishing
        return publishing.published() if publishing else self.publisher_port.published

    def digest(self) -> tuple[Offset, int]:
        """The digest of what is held, and the offset it is true at; after an overflow no offset says what is held."""
        with self._lock:
            return self._ledger.applied, self._ledger.digest

    def held(self, tier: Tier) -> list[SequenceHash]:
        """The blocks a tier holds now, one hash each. Raises ArgumentTypeError: `tier` is no Tier."""
        check_tier(tier)
        with self._lock:
            return split_hashes(self._ledger.held(tier))

    def stats(self) -> ManagerStats:
        """Counters since the start, and what is in use now."""
        count, copies, skipped, pool = self._counters, self._copies, self._offloader.skipped, self.pools.object
        with self._lock:
            troubles = self._troubles()
            return ManagerStats(
                count.created_blocks,
                dict(count.hit_blocks),
                count.missed_blocks,
                dict(count.offloaded_blocks),
                count.corrupt_blocks,
                count.verified_reads,
                count.failed_copies,
                count.late_copies,
                skipped.total(),
                self._ledger.copies_in_flight(),
                {tier: self._ledger.counts(tier) for tier in self.pools.slots},
                "; ".join(troubles.values()),
                dict(skipped),
                slots_held(copies.late.values()),
                slots_held(copies.quarantined.values()),
                {tier: counts for tier in self.pools.slots if (counts := self._ledger.share_counts(tier))},
                None if pool is None else pool.stats(),
                self._loads.requests_waiting,
                count.engine_duplicates,
                count.engine_surplus,
                count.engine_stores,
                count.peer_hits,
                count.peer_late_copies,
                self.pools.peer_stats,
                count.short_allocations,
                None if self._ages is None else dict(zip(FOLLOWED, self._ages.tiers(), strict=True)),
                None if self.lent is None else self.lent(),
                {tier: self._ledger.kept(tier) for tier in self.pools.slots},
                tuple(troubles),
            )

    def heartbeat(self, published: Position) -> Heartbeat:
        """The sign of life the publisher sends."""
        with self._lock:
            free = {tier: self._ledger.counts(tier).free for tier in self.pools.slots}
            namespaces, told = self._namespaces.named(), self._namespaces.told()
            epoch, applied = self._ledger.epoch, self._ledger.applied
        offset = published.offset if published.epoch == epoch else Offset(0)
        objects = ObjectStats() if self.pools.object is None else self.pools.object.stats()
        return Heartbeat(
            instance=self.instance,
            cluster=self.cluster,
            epoch=epoch,
            published=offset,
            wall_time_ns=self._wall_clock_ns(),
            run=self.run,
            trouble=self.trouble(),
            free_slots=free,
            namespaces=namespaces,
            told=told,
            stopping=self._stream.closing,
            lends=self.lends,
            transfers=self.pools.take_transfers(),
            applied=applied,
            **self._loads.load._asdict(),
            put_bytes=_put_bytes(objects.namespaces, namespaces),
            put_total=objects.put_bytes,
            ages=() if self._ages is None else tuple(self._ages.tiers()),
            object_blocks=0 if self.pools.object is None else self.pools.object.blocks,
            lent=None if self.lent is None else self.lent(),
            chain=self._chain,
        )

    # -- the end ------------------------------------------------------------------------------------------------------

    def settle(self, timeout_s: float) -> bool:
        """Wait until no offload waits or runs;

        False when some still do. Raises ArgumentError: `timeout_s` is no time.
        """
        check_seconds(timeout_s, "timeout_s")
        return self._offloads.settle(timeout_s)

    def close(self, timeout_s: float = 5.0) -> None:
        """Stop cleanly: end copies, say so in the stream, publish, close the pools. Idempotent.

        Each of these waits `timeout_s` at most, and hardly at all once a signal's handler has raised: its exception
        comes out when all is done; a second one comes out at once, and the next call does what is left. Pools that a
        copy still uses are left open, and closed when it ends; those of a copy nobody can confirm stay until the
        process goes, because a device may still write their memory. What is open when the interpreter ends is closed
        then (`streams/at_exit.py`). In a signal's handler that has interrupted a call of the manager, this returns at
        once, and a thread closes it once that call has ended.
        Raises: ArgumentError: `timeout_s` is no time.
        """
        check_seconds(timeout_s, "timeout_s")
        if leaving.close_aside(self, timeout_s):
            return
        try:
            self._closing.go_on(timeout_s)
        finally:
            if self._closing.is_over:
                leaving.forget(self)
                self._disowners = []  # they keep what was lent, and this manager

    def disown(self) -> None:
        """This process is a child of the one whose manager it is: nothing of it may be used here, and closing it does
        nothing.
        """
        self._closing.forget()
        self._stream.disown()
        self.pools.disown()
        for disown in self._disowners:
            disown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- for both kinds -----------------------------------------------------------------------------------------------

    def _checked_keep(self, ttl_s: float, priority: int, until_read: bool, most: int | None) -> KeepRule:
        """Arguments of `keep`, from now on. Raises ArgumentError."""
        check_seconds(ttl_s, "ttl_s", most=math.inf)
        check_flag(until_read, "until_read")
        most = None if most is None else checked_int(most, "most", most=MOST_BLOCKS)
        priority = checked_int(priority, "priority", most=HIGHEST_PRIORITY)
        until_s = math.inf if ttl_s >= _LONGEST_KEEP_S else self._clock() + ttl_s
        return KeepRule(until_s, priority, until_read, most)

    def _begin_span(
        self, tracing: Tracing, namespace: NamespaceId, hashes: bytes, trace: str | None, first: int = 0
    ) -> TraceSpan:
        """The span of a request. Outside the lock."""
        tenant = self._revisioned.tenants.get(namespace, "")
        return tracing.begin("kvbm.acquire", trace, asked_values(namespace, hashes, tenant, first))

    def _keep_locked(self, hashes: bytes, rule: KeepRule, namespace: NamespaceId | None) -> int:
        kept = self._ledger.keep(
            self._target, hashes, rule.until_s, rule.priority, namespace, rule.until_read, rule.most
        )
        self._stream.kept_locked(rule.until_s)
        return kept

    def _check_namespace(self, namespace: NamespaceId) -> None:
        """Refuse what is no id of a namespace that the manager knows. Raises ArgumentError."""
        try:
            if namespace in self._namespaces:
                return
        except TypeError:  # what has no hash is refused below
            pass
        self._revisioned.check(namespace)

    def _sample(self, namespace: NamespaceId, hashes: bytes, depth: int) -> None:
        """Offer a prompt, if it is one of those to be sampled."""
        if self._samples is not None and hashes < self._sampled_below:
            self._samples.offer(Sampled(self._wall_clock_ns(), namespace, hashes, depth))


def _staging(pools: Pools, options: ManagerOptions) -> Staging:
    """Memory for copies between two ends of which the CPU reaches neither.

    Raises LayoutError: a lane holds no object.
    """
    block_bytes, k = pools.slots[Tier.HBM].block_bytes, pools.object_blocks
    staging = options.staging or Staging(_STAGING_BYTES, block_bytes, options.load_threads, options.offload_threads, k)
    if staging.lane_blocks < k:
        raise LayoutError(
            f"a lane of staging holds {staging.lane_blocks} blocks of {block_bytes} bytes, an object {k};"
            " raise offload.staging_bytes or lower pools.object.blocks"
        )
    return staging


def _declare_locked(
    namespaces: Sequence[Namespace],
    revisioned: RevisionedNamespaces,
    pools: Pools,
    ledger: LedgerProtocol,
    offloader: Offloader,
) -> None:
    """Tell everybody who has to know of namespaces what they are, and whose: as opening does."""
    revisioned.add(namespaces)
    pools.declare(namespaces)
    offloader.declare(namespaces)
    for namespace in namespaces:
        ledger.assign(namespace.id, namespace.tenant)


def _checked_load(queued_tokens: int, running_requests: int, prefill: float | None, queue: float | None) -> Load:
    for value, name in ((prefill, "prefill_tokens_per_s"), (queue, "queue_tokens_per_s")):
        if value is not None:
            check_rate(value, name)
    return Load(
        checked_int(queued_tokens, "queued_tokens", most=_MOST_LOAD),
        checked_int(running_requests, "running_requests", most=_MOST_LOAD),
        float(prefill or 0.0),
        float(queue or 0.0),
    )


def _put_bytes(
    put: dict[NamespaceId, NamespaceBytes], namespaces: Iterable[NamespaceId]
) -> dict[NamespaceId, NamespaceBytes]:
    """What was put of those namespaces that are in use."""
    return dict(islice(((one, put[one]) for one in namespaces if one in put), _TOLD_NAMESPACES))


def _check_reason(reason: EvictReason) -> None:
    if not isinstance(reason, EvictReason):
        raise ArgumentTypeError("reason", f"is {kind_of(reason)}; give a member of kvbm.EvictReason")
