"""The block manager an engine embeds: one ledger behind one lock, its journal, and the threads that move bytes.

Every public call may come from any thread. Trouble with a colder tier, the catalog or the stream is a miss and one warning; the
engine never waits longer than `wait_s` for bytes. What escapes is a bug in the caller: an ArgumentError (in `hash_tokens` also a
LayoutError) for an argument that cannot be used, a LedgerError for a call that contradicts what the ledger holds, or comes after
`close`. After each of them the manager is as it was before.

`start` makes the threads. A simulator leaves it out and drives a manager by hand, in its own time, with the same results:

- `step_frames(now_s)` is one turn of the frame writer: it writes what waits, begins and steps rounds, begins another epoch where
  one is due; it says when the next turn is due.
- `offload_one()` carries out the next offload; False when none waits. It never waits for anything but its own copy.
- onboards run on the `executor` it is given, which may carry them out at once or later. What has not ended when `acquire` has
  waited `wait_s` is late, so with `wait_s` 0 it never waits.
- a copy to NVME that waits for its slots' withdrawal waits in `Offsets.wait_durable`: derive from it and take turns there.
- `clock` and `wall_clock_ns` are the only times read. `on_published`, `on_fenced`, `on_round_asked` and `on_stream_state` are what a
  publisher says of the stream. `close` ends it all in turns of its own; a crash is to drop the manager.
"""

from __future__ import annotations

import math
import os
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future, wait
from contextlib import suppress
from itertools import groupby, islice
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np
import structlog

from kvbm.core.arguments import (
    MOST_BLOCKS,
    check_namespaces,
    check_run,
    check_seconds,
    check_tier,
    checked_hash,
    packed_slots,
    refuse_namespace,
)
from kvbm.core.backend import Kernels, LedgerTwin
from kvbm.core.checks import checked_int, kind_of
from kvbm.core.copies import Copy
from kvbm.core.errors import ArgumentTypeError, ArgumentValueError, KvbmError, LayoutError, LedgerError
from kvbm.core.events import MAX_RUN_BLOCKS, EvictReason, MigrateCause
from kvbm.core.ids import (
    DURABLE_TIERS,
    HASH_BYTES,
    NO_PARENT,
    SLOT_BYTES,
    Epoch,
    InstanceId,
    Namespace,
    NamespaceId,
    Offset,
    SequenceHash,
    Tier,
    pack_slots,
    split_hashes,
    split_slots,
)
from kvbm.core.ledger import Match, ShareCounts, TierCounts
from kvbm.core.policy import WriteBudget
from kvbm.core.slots import HIGHEST_PRIORITY
from kvbm.locate.base import Locator
from kvbm.manager.claims import Claimed, Claims
from kvbm.manager.event_writer import RUNS_A_TURN, FrameSink, FrameWriter, Keeping
from kvbm.manager.lasting import LastingNamespaces
from kvbm.manager.ledger_stream import EventSource
from kvbm.manager.object_groups import groups_of
from kvbm.manager.offload_queue import Offloader, Skipped, Wish
from kvbm.manager.offsets import Offsets
from kvbm.manager.prompt_samples import Sampled, SampleSink
from kvbm.manager.snapshot_policy import Rounds
from kvbm.manager.staging import Staging
from kvbm.manager.transfer import Elsewhere, Moved, Pools, move
from kvbm.manager.workers import Workers
from kvbm.pools.base import ObjectStats, ReadOutcome
from kvbm.pools.hbm.pool import HbmPool
from kvbm.pools.nvme.pool import NvmePool
from kvbm.streams import at_exit as leaving
from kvbm.streams.base import ORIGIN, AccessSample, Heartbeat, Load, Position, StreamState

if TYPE_CHECKING:
    import torch

log = structlog.get_logger()

_EXPIRE_S = 1.0  # how often kept blocks are looked through for those whose time is over
_STEP_ASIDE_S = 0.05  # an offload begins this much later at most, because requests wait for bytes
_STAGING_BYTES = 64 << 20
_TOLD_NAMESPACES = 256  # of which a heartbeat says what was put, at most
_RUN_BYTES = MAX_RUN_BLOCKS * HASH_BYTES
_OTHERS_PART = 8  # of HOST stays free of blocks that only pass through: others' blocks would push them out
_IDLE_LOOK_S = 1.0  # between two looks at claims of a pool that forgets, while nothing is offloaded
_IDLE_LOOKS = 512  # objects
_SLOW_LOOK_S, _REST_S = 0.5, 30.0  # a pool that took so long is not asked again for a while
_MOST_LOAD = (1 << 63) - 1  # that a heartbeat can say
_ONBOARD_BLOCKS = 64  # a longer stretch is brought by several copies: at a time, and each is there when it is there

_unended: list[
    Pools
] = []  # of closed managers: a device may still write their memory, so it is kept until the process is gone


class Prefix(NamedTuple):
    """What `acquire` brought to HBM.

    Attributes:
        depth: blocks of the prompt, from the first on, that are in HBM now and pinned.
        slots: the HBM slot of each, `depth` entries.
        hits: how many of them were found in each tier.
    """

    depth: int
    slots: list[int]
    hits: dict[Tier, int]


class ManagerStats(NamedTuple):
    """Counters since the start, and what is in use now.

    Attributes:
        created_blocks: blocks the engine declared full.
        hit_blocks: blocks that requests got instead of computing them, by the tier they were in.
        missed_blocks: blocks that requests asked for and did not get.
        offloaded_blocks: blocks brought to a colder tier, by that tier.
        corrupt_blocks: blocks whose bytes were found wrong; they were withdrawn and computed.
        verified_reads: blocks whose bytes were found right.
        failed_copies: copies a device or store did not carry out.
        late_copies: onboards that ended after their request had gone on.
        skipped_offloads: blocks a policy wanted in a colder tier that did not get there for want of something; `skipped` says of
            what.
        copies_in_flight: copies that hold slots, those that are late or quarantined among them.
        pools: how the slots of each tier are used.
        trouble: what the manager cannot do now, in words; "" when all is well.
        skipped: blocks that were not offloaded, by reason.
        late_slots: slots, at both ends, held by onboards that run on after their request.
        quarantined_slots: slots, at both ends, of copies nobody can confirm; nothing uses them before the process is gone.
        shares: how tenants use each pool, where they have shares. Who has reached its quota gives up its own blocks for new ones.
        objects: what the object pool has counted; None where there is none.
        waiting_requests: requests that wait for bytes now.
        engine_duplicates: blocks an engine said it holds of which it had said so before. All three of `engine_…` are 0 where HBM
            is kvbm's own.
        engine_surplus: blocks an engine said it holds beyond what it has room for; they were left out.
        engine_stores: runs it was given to bring to HOST.
    """

    created_blocks: int
    hit_blocks: dict[Tier, int]
    missed_blocks: int
    offloaded_blocks: dict[Tier, int]
    corrupt_blocks: int
    verified_reads: int
    failed_copies: int
    late_copies: int
    skipped_offloads: int
    copies_in_flight: int
    pools: dict[Tier, TierCounts]
    trouble: str
    skipped: dict[Skipped, int]
    late_slots: int
    quarantined_slots: int
    shares: dict[Tier, list[ShareCounts]]
    objects: ObjectStats | None
    waiting_requests: int = 0
    engine_duplicates: int = 0
    engine_surplus: int = 0
    engine_stores: int = 0


_WITHDRAWN_FOR = {ReadOutcome.CORRUPT: EvictReason.CORRUPT, ReadOutcome.MISSING: EvictReason.MISSING}


class Arrivals:
    """What a waiting request has got so far; read and written under the manager's lock."""

    def __init__(self) -> None:
        self.waiting = True  # a copy that ends later pins nothing
        self.brought: dict[SequenceHash, tuple[int, Tier]] = {}  # block → its front slot, pinned once, and where it was
        self.others: set[int] = set()  # copies of other requests that bring some of its blocks


class Planned(NamedTuple):
    """A copy to the front tier that is to begin; `elsewhere` where its source has no slots of ours."""

    copy: Copy
    elsewhere: Elsewhere | None = None


class _Stretch(NamedTuple):
    """Blocks that one source beyond the own tiers seems to have.

    Attributes:
        wanted: packed hashes, some of those of `elsewhere`.
    """

    source: Tier | InstanceId
    elsewhere: Elsewhere
    wanted: bytes


class Onboard(NamedTuple):
    """A copy to the front tier that a request waits for."""

    copy: Copy
    ended: Future[None]


class Publishing(NamedTuple):
    """How a manager reaches the stream: what the publisher thread offers it.

    Attributes:
        notify: the journal has more.
        published: how far the stream has come.
        stop: publish the rest within a timeout; whether all of it is published.
        round_began: what comes next in the journal is a round.
        trouble: what the stream does not take now, in words; "" when all is well.
    """

    notify: Callable[[], None]
    published: Callable[[], Position]
    stop: Callable[[float], bool]
    round_began: Callable[[], None] = lambda: None
    trouble: Callable[[], str] = lambda: ""


class Manager:
    """See the module. `kvbm.assembly.open_manager` makes one from settings. A `PublisherOwner`.

    What it brings blocks to for requests is its *front* tier: HBM, or HOST where the engine owns HBM (`manager/engine_hbm.py`).

    Args:
        ledger: started, its first events not taken yet.
        sink: the journal.
        pools: the bytes of the ledger's pools.
        wait_s: the longest a request waits for bytes.
        clock: seconds that only grow; how long blocks are kept is measured by it.
        keeping: what the journal does beside taking frames; None where nothing outlives the process.
        rounds: when what is held is restated; None: when somebody asks.
        samples: who is told of prompts; None: nobody.
        copy_threads, offload_threads: onboards and offloads at a time.
        executor: carries out onboards; None: threads of the manager's own.
        staging: memory for copies that need a place between their ends; None: 64 MiB.
        budgets: how much may be written to tiers, for their endurance.
        offsets: how far the journal has come.
        run: of this process; None makes one.
        lasting: which namespaces may use tiers that outlive the process or are shared; None: all.
        unused: names of such tiers that are configured, to say what is not used for the others.
        has_stream: whether a publisher says how far the stream has come.
    """

    _front = Tier.HBM

    def __init__(
        self,
        instance: InstanceId,
        cluster: str,
        ledger: LedgerTwin,
        pools: Pools,
        sink: FrameSink,
        kernels: Kernels,
        offloader: Offloader,
        locator: Locator,
        wait_s: float = 2.0,
        locate_s: float = 0.25,
        copy_threads: int = 2,
        wall_clock_ns: Callable[[], int] = time.time_ns,
        clock: Callable[[], float] = time.monotonic,
        *,
        keeping: Keeping | None = None,
        rounds: Rounds | None = None,
        samples: SampleSink | None = None,
        executor: Executor | None = None,
        offsets: Offsets | None = None,
        run: str | None = None,
        has_stream: bool = False,
        offload_threads: int = 1,
        staging: Staging | None = None,
        budgets: Mapping[Tier, WriteBudget] | None = None,
        lasting: LastingNamespaces | None = None,
        unused: Sequence[str] = (),
    ) -> None:
        self.instance, self.cluster = instance, cluster
        self.run = secrets.token_hex(8) if run is None else run
        self.pools = pools
        self._ledger, self._kernels, self._offloader, self._locator = ledger, kernels, offloader, locator
        self._wait_s, self._locate_s, self._wall_clock_ns, self._clock = wait_s, locate_s, wall_clock_ns, clock
        self._lock = threading.Lock()
        self._offsets = offsets or Offsets()
        self._offsets.begin_epoch(ledger.epoch, ledger.applied)
        self._published = ORIGIN
        self._samples = samples
        self._sampled_below = b"" if samples is None else samples.below
        self._load = Load()
        self._namespaces: dict[NamespaceId, None] = {}
        self._lasting, self._unused = lasting or LastingNamespaces(all_may=True), tuple(unused)
        self._publishing: Publishing | None = None
        self._stopped = False  # closing has begun
        self._inherited_by = 0  # the forked child this is in
        self._overflow_told = Epoch(0)
        self._expire_at_s = 0.0
        self._running: dict[int, Copy] = {}  # copies whose bytes move now
        self._late_running: dict[int, Copy] = {}  # those of them whose request has gone on
        self._late_from: Counter[Tier | InstanceId] = Counter()  # the same, by source
        self._quarantined: dict[int, Copy] = {}  # copies that broke: nobody knows whether their bytes still move
        self._open: set[int] = set()  # ids of copies that have begun and may still end
        self._barred: set[int] = set()  # those of them whose blocks must not arrive: they were cleared meanwhile
        self._stores: set[int] = set()  # those of them that an engine's workers carry out
        self._coming: dict[SequenceHash, int] = {}  # blocks on their way to the front tier → the copy
        self._begun_offloads = 0  # taken from the queue and not over
        self._claims = Claims() if pools.object is not None and pools.object.forgets else None
        self._look_claims_s = self._idle_look_s = 0.0  # not before; not before while nothing is offloaded
        self._left_open = False  # the last copy that ends closes the pools
        self._closers: list[Callable[[], None]] = []
        self._disowners: list[Callable[[], None]] = []
        self._created = self._missed = self._corrupt = self._verified = self._failed = self._late = 0
        self._engine_duplicates = self._engine_surplus = self._engine_stores = 0
        self._hits: dict[Tier, int] = {tier: 0 for tier in Tier}
        self._offloaded: dict[Tier, int] = {tier: 0 for tier in Tier}
        self._source = EventSource(instance, ledger, self._lock, wall_clock_ns)
        self._frames = FrameWriter(
            instance, self._source, sink, self._offsets, self._on_written, keeping, rounds,
            (lambda: self._published) if has_stream else (lambda: None), self._on_round_began, clock=clock,
        )  # fmt: skip
        self._copy_threads = copy_threads
        self._onboarders = executor or Workers(copy_threads, f"kvbm-onboard-{instance}")
        block_bytes = pools.slots[Tier.HBM].block_bytes
        self._staging = staging or Staging(
            _STAGING_BYTES, block_bytes, copy_threads, offload_threads, pools.object_blocks
        )
        if self._staging.lane_blocks < pools.object_blocks:
            raise LayoutError(
                f"a lane of staging holds {self._staging.lane_blocks} blocks of {block_bytes} bytes, an object"
                f" {pools.object_blocks}; raise offload.staging_bytes or lower pools.object.blocks"
            )
        self._looks_beyond = pools.object is not None or pools.pod is not None
        self._budgets = budgets or {}
        self._offload_wanted = threading.Event()
        self._nobody_waits = threading.Event()  # for bytes
        self._nobody_waits.set()
        self._requests_waiting = 0
        self._has_threads = False
        self._offload_threads = [
            threading.Thread(target=self._run_offloads, name=f"kvbm-offload-{instance}-{number}", daemon=True)
            for number in range(offload_threads)
        ]

    def start(
        self,
        publishing: Publishing | None = None,
        closers: Sequence[Callable[[], None]] = (),
        disowners: Sequence[Callable[[], None]] = (),
    ) -> None:
        """Start the threads.

        Args:
            publishing: how events reach the stream; None keeps them in the journal.
            closers: called last when the manager closes.
            disowners: called in a forked child, whose the manager is not.
        """
        self._publishing = publishing
        self._closers, self._disowners = list(closers), list(disowners)
        leaving.keep(self)
        self._frames.start()
        self._has_threads = True
        for thread in self._offload_threads:
            thread.start()
        self._frames.notify()

    # -- what an engine calls -----------------------------------------------------------------------------------------

    @property
    def hbm(self) -> HbmPool:
        """The HBM pool; its `tensor` is what the engine computes in. Raises LedgerError: the pool has no tensor."""
        pool = self.pools.slots[Tier.HBM]
        if not isinstance(pool, HbmPool):
            raise LedgerError('the HBM pool has no tensor: pools.hbm.device is "memory"; use "auto", "cpu" or "cuda"')
        return pool

    def hash_tokens(self, tokens: Sequence[int] | np.ndarray, root: bytes, block_tokens: int) -> bytes:
        """The sequence hashes of a prompt's full blocks, packed: equal hashes mean equal prefixes. Touches no state of the manager.

        Args:
            tokens: T token ids in prompt order, each from 0 to 2**32 - 1: a list, or a NumPy array of any kind of integers. A list
                of ints and an array of u32 are read where they lie.
            root: of the namespace, `Namespace.root(secret)`, 16 bytes; or the last hash of the blocks before.
            block_tokens: B, tokens per block, as the namespace has it; at least 1.
        Returns: T // B hashes of 16 bytes, in prompt order. A partial last block has no hash.
        Raises: ArgumentTypeError: tokens that are no whole numbers, or another argument of a wrong type. ArgumentValueError: a root
            that has not 16 bytes, block_tokens below 1. LayoutError: a token that does not fit in 32 bits.
        """
        if tokens is None:
            raise ArgumentTypeError("tokens", "is None; give a sequence of token ids")
        if isinstance(root, Namespace):
            raise ArgumentTypeError("root", "is a Namespace; give namespace.root(secret)")
        return self._kernels.sequence_hashes(
            tokens, checked_int(block_tokens, "block_tokens", least=1), checked_hash(root, "root")
        )

    def declare(self, namespaces: Iterable[Namespace]) -> None:
        """Say what further namespaces are, before their first use: only of those that name a revision do blocks leave HBM and HOST.

        Args:
            namespaces: of the block shape the manager was opened for.
        Raises: ArgumentTypeError: not a list of Namespace.
        """
        known = check_namespaces(namespaces)
        with self._lock:
            self._lasting.add(known)

    def match(self, hashes: bytes) -> Match:
        """The longest run this instance holds, and where, packed; pins nothing.

        Args:
            hashes: n packed hashes of a prompt's blocks.
        Raises: ArgumentError: `hashes` is no packed run.
        """
        check_run(hashes)
        with self._lock:
            return self._ledger.match(hashes)

    def acquire(self, namespace: NamespaceId, hashes: bytes, wait_s: float | None = None) -> Prefix:
        """Bring the longest run of held blocks to HBM and pin it there for the caller.

        Blocks come from this instance's tiers and, beyond those, from the pools of its pod's other instances, and beyond those
        from the object pool where the catalog knows of whole objects. What does
        not arrive within `wait_s`, is corrupt or has no room is a miss from there on; a late copy still ends properly and
        serves the next request. An engine that gives a request up while it waits here loses no more than that time: what has
        come is unpinned as ever, and what has not keeps its slots until the device says that it is over.

        Args:
            namespace: id of the prompt's namespace, `Namespace.id`; one the manager was opened with, or was told by `declare`.
            hashes: n packed hashes of the prompt's blocks, from its first on.
            wait_s: the longest this request waits for bytes; None: as the manager was told. What no thread has begun by then is
                taken back at once.
        Returns: slots stay pinned until `unpin`.
        Raises: ArgumentError: an argument that cannot be used. LedgerError: the manager is closed.
        """
        self._check_namespace(namespace)
        check_run(hashes)
        if wait_s is not None:
            check_seconds(wait_s, "wait_s")
        with self._lock:
            self._require_open()
            self._expire()
            self._namespaces.setdefault(namespace)
            found = self._ledger.match(hashes, pinned=True, hottest=self._front)
            all_in_front = found.tiers.count(self._front) == found.depth
            if all_in_front and (not self._looks_beyond or found.depth * HASH_BYTES == len(hashes)):
                prefix = self._count(namespace, hashes, _local(found))
                if hashes < self._sampled_below:
                    self._sample(namespace, hashes, prefix.depth)
                return prefix
            arrivals = Arrivals()
            copies, reachable = self._begin_onboards(namespace, hashes, found, arrivals)
        begun = self._submit(copies, arrivals)
        if reachable == found.depth:
            begun += self._submit(self._begin_fetches(namespace, hashes, found.depth, arrivals), arrivals)
        self._wake_writer()  # a copy may have evicted to make room
        if begun:
            self._wait_for_bytes(begun, self._wait_s if wait_s is None else wait_s)
        with self._lock:
            arrivals.waiting = False
            self._give_up(begun)
            prefix = self._count(namespace, hashes, self._collect(hashes, found, arrivals))
        self._wake_writer()
        if hashes < self._sampled_below:
            self._sample(namespace, hashes, prefix.depth)
        return prefix

    def allocate(self, count: int, namespace: NamespaceId | None = None) -> list[int] | None:
        """HBM slots to write, evicting unpinned blocks if need be; None when there are too few.

        Args:
            count: so many slots, or none at all.
            namespace: id of the namespace whose blocks will be written; it matters where tenants have shares.
        Returns: `count` slots, which are the caller's until `create` or `release`; None is no error: HBM is short, because requests
            have too many blocks pinned. Wait for one to end, or compute without keeping the blocks.
        Raises: ArgumentError: an argument that cannot be used. LedgerError: the manager is closed.
        """
        count = checked_int(count, "count", most=MOST_BLOCKS)
        if namespace is not None:
            self._check_namespace(namespace)
        with self._lock:
            self._require_open()
            self._expire()
            allocation = self._ledger.allocate(Tier.HBM, count, namespace)
        self._wake_writer()
        return None if allocation is None else split_slots(allocation.slots)

    def create(
        self,
        namespace: NamespaceId,
        parent: bytes,
        start: int,
        hashes: bytes,
        slots: Sequence[int],
        stream: torch.cuda.Stream | torch.cuda.Event | None = None,
    ) -> list[int]:
        """Declare allocated HBM slots full. They stay pinned for the caller.

        Bytes first, then the claim: from this call on the blocks are copied to colder tiers. On a CPU they must be in place. On CUDA
        the work that writes them must be queued before, and `stream` says where; the copy then waits for it on the device, and this
        call does not. Without `stream` a copy waits for the default stream alone.

        Args:
            namespace: id of the blocks' namespace, `Namespace.id`; one the manager was opened with, or was told by `declare`.
            parent: hash of the block before `start`, or NO_PARENT.
            start: position of the first block in its chain, in blocks.
            hashes: n packed hashes, of the blocks from `start` on.
            slots: the n slots that hold them, as `allocate` gave them.
            stream: on CUDA, the stream on which the blocks are written, or an event recorded behind that. None: the default stream,
                or the caller has waited for the device. Of no account on a CPU.
        Returns: the slot that holds each block; not the given one where the block was held already.
        Raises: ArgumentError: an argument that cannot be used, such as a slot that HBM has not. LedgerError: a slot is not allocated
            or is a copy's, a hash or a slot is given twice, or the manager is closed.
        """
        self._check_namespace(namespace)
        before, start = checked_hash(parent, "parent"), checked_int(start, "start", most=MOST_BLOCKS - 1)
        given = self._packed(slots)
        self._check_blocks(start, hashes, given)
        if stream is not None:
            self._order_after(stream)
        with self._lock:
            self._require_open()
            try:
                holders = self._ledger.create(namespace, Tier.HBM, before, start, hashes, given)
            except LedgerError as error:
                raise self._named(error, given) from None
            self._namespaces.setdefault(namespace)
            self._created += len(given) // SLOT_BYTES
            self._offer(namespace, Tier.HBM, hashes, 1, parent, start)
        self._wake_writer()
        return split_slots(holders)

    def unpin(self, slots: Sequence[int], stream: torch.cuda.Stream | torch.cuda.Event | None = None) -> None:
        """The caller no longer uses these blocks of HBM.

        Args:
            slots: in prompt order: of a prompt, the deepest block leaves first. Each loses one pin.
            stream: as in `create`: where the work is that still reads them; a copy into these slots waits for it.
        Raises: ArgumentError: a slot that HBM has not, or no list of slots. LedgerError: a slot is not pinned.
        """
        given = self._packed(slots)
        if stream is not None:
            self._order_after(stream)
        with self._lock:
            try:
                self._ledger.unpin(Tier.HBM, given)
            except LedgerError as error:
                raise self._named(error, given) from None

    def release(self, slots: Sequence[int], stream: torch.cuda.Stream | torch.cuda.Event | None = None) -> None:
        """Give back allocated HBM slots in which no block was created.

        Args:
            stream: as in `create`: where the work is that still touches them; a copy into these slots waits for it.
        Raises: ArgumentError: a slot that HBM has not, or no list of slots. LedgerError: a slot is not allocated.
        """
        given = self._packed(slots)
        if stream is not None:
            self._order_after(stream)
        with self._lock:
            try:
                self._ledger.release(Tier.HBM, given)
            except LedgerError as error:
                raise self._named(error, given) from None

    def keep(self, hashes: bytes, ttl_s: float, priority: int = 0) -> int:
        """Keep blocks in HBM, or in HOST where HBM is the engine's, for a time, also while nobody has them pinned.

        They are given up only where an allocation would be short, the lowest priority first, and 100 never. Keeping again takes
        the later end and the higher priority.

        Args:
            ttl_s: for how long from now on.
            priority: 0 to 100.
        Returns: how many of the run are there.
        Raises: ArgumentError: an argument that cannot be used. LedgerError: the manager is closed.
        """
        check_run(hashes)
        check_seconds(ttl_s, "ttl_s", most=math.inf)
        priority = checked_int(priority, "priority", most=HIGHEST_PRIORITY)
        with self._lock:
            self._require_open()
            return self._ledger.keep(self._front, hashes, self._clock() + ttl_s, priority)

    def evict(self, tier: Tier, hashes: bytes, reason: EvictReason = EvictReason.CLEARED) -> int:
        """Withdraw blocks from a tier; returns how many it held.

        Raises: ArgumentError: an argument that cannot be used. LedgerError: no such pool, or the manager is closed.
        """
        check_tier(tier)
        check_run(hashes)
        _check_reason(reason)
        with self._lock:
            self._require_open()
            count = self._ledger.evict(tier, hashes, reason)
        self._wake_writer()
        return count

    def claim(self, namespace: NamespaceId, hashes: bytes) -> None:
        """Say that the object pool has these blocks, whoever put them there.

        Raises: ArgumentError: an argument that cannot be used. LedgerError: there is no such pool, or the manager is closed.
        """
        self._check_namespace(namespace)
        check_run(hashes)
        with self._lock:
            self._require_open()
            for at in range(0, len(hashes), _RUN_BYTES):
                self._ledger.claim(Tier.OBJECT, namespace, hashes[at : at + _RUN_BYTES], self.instance)
        self._wake_writer()

    def withdraw(self, namespace: NamespaceId, hashes: bytes, reason: EvictReason) -> None:
        """Take back everybody's claim that the object pool has these blocks.

        Raises: ArgumentError: an argument that cannot be used. LedgerError: there is no such pool, or the manager is closed.
        """
        self._check_namespace(namespace)
        check_run(hashes)
        _check_reason(reason)
        with self._lock:
            self._require_open()
            for at in range(0, len(hashes), _RUN_BYTES):
                self._ledger.forget(Tier.OBJECT, namespace, hashes[at : at + _RUN_BYTES], reason)
        self._wake_writer()

    def restate(self) -> None:
        """Restate what is held, as a round in the own stream: run by run, so that the engine never waits for it.

        Raises: LedgerError: the manager is closed.
        """
        with self._lock:
            self._require_open()
        if self._source.begin_round():
            self._on_round_began()
        going_on = True
        while going_on:
            going_on = self._source.step_round()
            self._wake_writer()

    def report_load(self, queued_tokens: int, running_requests: int) -> None:
        """Tell routers how busy the engine is; goes out with the next heartbeat.

        Args:
            queued_tokens: prompt tokens that wait for their prefill.
            running_requests: requests being decoded.
        Raises: ArgumentError: a number that cannot be used.
        """
        self._load = Load(
            checked_int(queued_tokens, "queued_tokens", most=_MOST_LOAD),
            checked_int(running_requests, "running_requests", most=_MOST_LOAD),
        )

    # -- one turn at a time, for whoever has no threads -----------------------------------------------------------------

    def step_frames(self, now_s: float, runs: int = RUNS_A_TURN) -> float | None:
        """One turn of the frame writer, as `FrameWriter.step`; instead of `start`."""
        return self._frames.step(now_s, runs)

    def offload_one(self) -> bool:
        """Carry out the next offload that waits; False when there is none that can go now, or the manager closes."""
        if self._stopped:
            return False
        with self._lock:
            wish = self._next_wish()
            if wish is None:
                return False
            self._begun_offloads += 1
        try:
            self._offload(wish)
        finally:
            with self._lock:
                self._begun_offloads -= 1
        return True

    # -- what a publisher asks and says, in its own thread: see `streams.base.PublisherOwner` ------------------------------

    @property
    def epoch(self) -> Epoch:
        """The epoch its newest events belong to; grows when another begins in place."""
        return self._ledger.epoch

    def on_published(self, position: Position) -> None:
        """See `PublisherOwner.on_published`."""
        if position > self._published:
            self._published = position
            if self._frames.refusal:
                self._frames.retry()
            elif self._source.waits_for(position):
                self._frames.notify()

    def on_fenced(self, newer: Epoch) -> None:
        """See `PublisherOwner.on_fenced`."""
        self._frames.fence(newer)

    def on_round_asked(self) -> None:
        """See `PublisherOwner.on_round_asked`."""
        self._frames.ask_round()

    def on_stream_state(self, state: StreamState) -> None:
        """See `PublisherOwner.on_stream_state`."""
        self._frames.learn_stream(state)

    def take_samples(self) -> list[AccessSample]:
        """The sampled prompts since the last call."""
        if self._samples is None:
            return []
        rate = self._samples.rate
        return [
            AccessSample(
                instance=self.instance, cluster=self.cluster, wall_time_ns=one.wall_time_ns, namespace=one.namespace,
                hashes=one.hashes, depth=one.depth, rate=rate,
            )
            for one in self._samples.take()
        ]  # fmt: skip

    # -- numbers ------------------------------------------------------------------------------------------------------

    def trouble(self) -> str:
        """What the manager cannot do now, in words; "" when all is well."""
        unpublished = self._publishing.trouble() if self._publishing is not None else ""
        return "; ".join(filter(None, (self._own_trouble(), unpublished)))

    def _own_trouble(self) -> str:
        refusal = self._frames.refusal
        if self._ledger.overflowed:
            why = refusal or "it took events too slowly"
            return f"journal: {why}; unseen by the catalog since offset {self._ledger.applied}, until it takes events again"
        if refusal:
            return f"journal: {refusal}; nothing new goes to NVME and OBJECT until it takes events again"
        silent = [_name(source) for source in tuple(self._late_from) if self._is_silent(source)]
        if silent:
            return f"{', '.join(silent)}: reads do not end; a miss until they do"
        return self._lasting.why(self._unused)

    def applied(self) -> Offset:
        """The offset after the last event decided."""
        with self._lock:
            return self._ledger.applied

    def durable(self) -> Offset:
        """The offset after the last event of this epoch in the journal."""
        durable = self._offsets.durable
        return durable.offset if durable.epoch == self.epoch else Offset(0)

    def published(self) -> Position:
        """How far the stream has come; (0, 0) without one."""
        return self._publishing.published() if self._publishing else self._published

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
        with self._lock:
            return ManagerStats(
                self._created, dict(self._hits), self._missed, dict(self._offloaded), self._corrupt, self._verified,
                self._failed, self._late, self._offloader.skipped.total(), self._ledger.copies_in_flight(),
                {tier: self._ledger.counts(tier) for tier in self.pools.slots}, self.trouble(), dict(self._offloader.skipped),
                _slots_held(self._late_running), _slots_held(self._quarantined),
                {tier: counts for tier in self.pools.slots if (counts := self._ledger.share_counts(tier))},
                None if self.pools.object is None else self.pools.object.stats(), self._requests_waiting,
                self._engine_duplicates, self._engine_surplus, self._engine_stores,
            )  # fmt: skip

    def heartbeat(self, published: Position) -> Heartbeat:
        """The sign of life the publisher sends."""
        with self._lock:
            free = {tier: self._ledger.counts(tier).free for tier in self.pools.slots}
            namespaces = tuple(self._namespaces)
            epoch, applied = self._ledger.epoch, self._ledger.applied
        offset = published.offset if published.epoch == epoch else Offset(0)
        pool = self.pools.object
        put_bytes = {} if pool is None else dict(islice(pool.stats().namespaces.items(), _TOLD_NAMESPACES))
        return Heartbeat(
            instance=self.instance, cluster=self.cluster, epoch=epoch, published=offset,
            wall_time_ns=self._wall_clock_ns(), run=self.run, trouble=self.trouble(), queued_tokens=self._load.queued_tokens, running_requests=self._load.running_requests, free_slots=free,
            namespaces=namespaces, stopping=self._stopped, put_bytes=put_bytes, applied=applied,
        )  # fmt: skip

    # -- the end ------------------------------------------------------------------------------------------------------

    def settle(self, timeout_s: float) -> bool:
        """Wait until no offload waits or runs; False when some still do. Raises ArgumentError: `timeout_s` is no time."""
        check_seconds(timeout_s, "timeout_s")
        deadline = self._clock() + timeout_s
        while self._clock() < deadline:
            if not self._has_threads:  # driven by hand
                if not self.offload_one():
                    return not self._ledger.copies_in_flight()
                continue
            with self._lock:
                waiting = self._offloader.waiting_blocks + self._begun_offloads
                if not waiting and not self._ledger.copies_in_flight():
                    return True
            self._offload_wanted.set()
            time.sleep(0.01)
        return False

    def close(self, timeout_s: float = 5.0) -> None:
        """Stop cleanly: end copies, say so in the stream, publish, close the pools. Idempotent.

        Each of these waits `timeout_s` at most. Pools that a copy still uses are left open, and closed when it ends; those of a
        copy nobody can confirm stay until the process goes, because a device may still write their memory. A manager that is
        open when the interpreter ends is closed then (`streams/at_exit.py`).
        Raises: ArgumentError: `timeout_s` is no time.
        """
        check_seconds(timeout_s, "timeout_s")
        with self._lock:
            if self._stopped:
                return
            self._stopped = True
        leaving.forget(self)
        self._offload_wanted.set()
        self._nobody_waits.set()
        self._onboarders.shutdown(wait=False, cancel_futures=True)
        self._wait_copies(timeout_s)
        with self._lock:
            self._source.end()
        self._frames.notify()
        if not self._frames.stop(timeout_s):
            log.warning(
                "manager.closed_unwritten", instance=self.instance, remedy="the journal's device refuses writes"
            )
        if self._publishing is not None and not self._publishing.stop(timeout_s):
            log.warning(
                "manager.closed_unpublished", instance=self.instance, remedy="the next start publishes the rest"
            )
        self._locator.close()
        with self._lock:
            still, broken = len(self._running), len(self._quarantined)
            self._left_open = bool(still)
        if broken:
            _unended.append(self.pools)
        if still or broken:
            log.warning(
                "manager.closed_in_copy", instance=self.instance, copies=still + broken,
                remedy="their device does not answer; their memory and files are kept",
            )  # fmt: skip
        else:
            self.pools.close()
        for close in self._closers:
            close()

    def disown(self) -> None:
        """This process is a child of the one whose manager it is: nothing of it may be used here, and closing it does nothing."""
        self._lock = threading.Lock()  # who had it may not be here to give it back
        self._stopped = True
        self._inherited_by = os.getpid()
        for pool in self.pools.slots.values():
            if isinstance(pool, NvmePool):
                pool.disown()
        for disown in self._disowners:
            disown()

    def _wait_copies(self, timeout_s: float) -> None:
        """Wait for copies that run. Those that never began hold no slots that matter."""
        if not self._has_threads:
            return
        deadline = self._clock() + timeout_s
        for thread in self._offload_threads:
            thread.join(max(0.0, deadline - self._clock()))
        while self._running and self._clock() < deadline:
            time.sleep(0.005)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- inside -------------------------------------------------------------------------------------------------------

    def _check_namespace(self, namespace: NamespaceId) -> None:
        """Refuse what is no id of a namespace that the manager knows. Raises ArgumentError."""
        try:
            if namespace in self._namespaces:
                return
        except TypeError:  # what has no hash is refused below
            pass
        refuse_namespace(namespace)
        if not self._lasting.knows(namespace):
            raise ArgumentValueError(
                "namespace",
                f"{namespace.hex()} is not one the manager was opened with; give its Namespace to open_manager, or to declare before"
                " its first use",
            )

    def _packed(self, slots: Sequence[int]) -> bytes:
        """Slots of a caller as the ledger takes them. Raises ArgumentError: they are no list of slots."""
        return packed_slots(slots, self.pools.slots[Tier.HBM].slots)

    def _check_blocks(self, start: int, hashes: bytes, slots: bytes) -> None:
        """Refuse a run whose hashes and slots do not go together. Raises ArgumentError."""
        check_run(hashes)
        blocks, given = len(hashes) // HASH_BYTES, len(slots) // SLOT_BYTES
        if blocks != given:
            raise ArgumentValueError("slots", f"has {given} entries for {blocks} hashes; give one slot a block")
        if start + blocks > MOST_BLOCKS:
            raise ArgumentValueError("start", f"is {start}, for {blocks} blocks; a chain has at most {MOST_BLOCKS}")

    def _order_after(self, stream: torch.cuda.Stream | torch.cuda.Event) -> None:
        """Copies from and to HBM wait for this work from now on. Raises ArgumentTypeError."""
        pool = self.pools.slots[Tier.HBM]
        if isinstance(pool, HbmPool):
            pool.order_after(stream)

    def _named(self, error: LedgerError, given: bytes) -> KvbmError:
        """Why a run of slots was refused: a slot that the pool does not have, or else the ledger's own word."""
        count = self.pools.slots[Tier.HBM].slots
        beyond = next((slot for slot in split_slots(given) if slot >= count), None)
        if beyond is None:
            return error
        return ArgumentValueError("slots", f"has slot {beyond}; each must be 0 to {count - 1}, the slots of the pool")

    def _require_open(self) -> None:
        """Under the lock. Raises LedgerError."""
        if self._inherited_by:
            raise LedgerError(
                f"the manager of instance {self.instance!r} was opened by the process that forked this one"
                f" ({self._inherited_by}); open one here, with an instance.id of its own, or start this process by spawn"
            )
        if self._stopped:
            raise LedgerError(f"the manager is closed, and instance {self.instance!r} with it; open a new one")

    def _wake_writer(self) -> None:
        """Events may have been recorded. Outside the lock."""
        self._frames.notify()
        if self._ledger.overflowed and self._overflow_told != self._ledger.epoch:
            with self._lock:
                told, self._overflow_told = self._overflow_told, self._ledger.epoch
            if told != self._overflow_told:
                log.warning(
                    "ledger.overflowed", instance=self.instance, offset=self._ledger.applied,
                    remedy="the journal took nothing for too long: see to its device (journal.write_failed); until it takes events "
                    "again and another epoch begins, the engine is served, but unseen by the catalog and without NVME and OBJECT",
                )  # fmt: skip

    def _expire(self) -> None:
        """Let go of kept blocks whose time is over, at most once a second. Under the lock."""
        now_s = self._clock()
        if now_s >= self._expire_at_s:
            self._expire_at_s = now_s + _EXPIRE_S
            self._ledger.expire(now_s)

    def _sample(self, namespace: NamespaceId, hashes: bytes, depth: int) -> None:
        assert self._samples is not None
        self._samples.offer(Sampled(self._wall_clock_ns(), namespace, hashes, depth))

    def _on_written(self) -> None:
        if self._publishing is not None:
            self._publishing.notify()

    def _on_round_began(self) -> None:
        if self._publishing is not None:
            self._publishing.round_began()

    def _begin_copy(
        self, namespace: NamespaceId, source: Tier | InstanceId, target: Tier, hashes: bytes
    ) -> Copy | None:
        """As `Ledger.begin_copy`. Under the lock."""
        copy = self._ledger.begin_copy(namespace, source, target, hashes)
        if copy is not None:
            self._open.add(copy.id)
            if target == self._front and source != Tier.HBM:  # what an engine stores it has itself
                self._coming.update(dict.fromkeys(split_hashes(copy.hashes), copy.id))
        return copy

    def _end_copy(
        self, copy: Copy, arrived: Sequence[bool], cause: MigrateCause, pinned: bool = False, kept: bool = True
    ) -> list[int | None]:
        """As `Ledger.end_copy`. Under the lock."""
        self._expect_no_more(copy)
        self._barred.discard(copy.id)
        return self._ledger.end_copy(copy, arrived, cause, kept=kept, pinned=pinned)

    def _drop_copy(self, copy: Copy, cause: MigrateCause = MigrateCause.ONBOARD) -> None:
        """End a copy that brings nothing. Under the lock."""
        self._end_copy(copy, [False] * (len(copy.hashes) // HASH_BYTES), cause)

    def _expect_no_more(self, copy: Copy) -> None:
        """Nobody need wait for a copy any more. Under the lock."""
        self._open.discard(copy.id)
        if copy.target == self._front:
            for block in split_hashes(copy.hashes):
                self._coming.pop(block, None)

    def _arrived(self, copy: Copy, there: list[bool]) -> list[bool]:
        """Which blocks of a copy may count as arrived: none where they were cleared meanwhile. Under the lock."""
        return [False] * len(there) if copy.id in self._barred else there

    def _begin_onboards(
        self, namespace: NamespaceId, hashes: bytes, found: Match, arrivals: Arrivals
    ) -> tuple[list[Planned], int]:
        """Begin copies for each stretch of the run that lies in one colder tier. Returns them and how deep the run can get."""
        begun: list[Planned] = []
        if found.tiers.count(self._front) == found.depth:
            return begun, found.depth
        at = 0
        for tier, group in groupby(map(Tier, found.tiers)):
            end = at + len(list(group))
            for first in range(at, end, _ONBOARD_BLOCKS) if tier != self._front else ():
                if self._is_silent(tier) or (tier in DURABLE_TIERS and not self._lasting.may(namespace)):
                    return begun, first
                wanted = hashes[first * HASH_BYTES : min(first + _ONBOARD_BLOCKS, end) * HASH_BYTES]
                self._note_others(wanted, arrivals)
                copy = self._begin_copy(namespace, tier, self._front, wanted)
                if copy is not None:
                    begun.append(Planned(copy))
                if copy is None or copy.hashes != wanted:
                    return begun, first
            at = end
        return begun, at

    def _note_others(self, wanted: bytes, arrivals: Arrivals) -> None:
        """Remember who brings some of these blocks already. Under the lock."""
        if self._coming:
            arrivals.others.update(self._coming[block] for block in split_hashes(wanted) if block in self._coming)

    def _begin_fetches(self, namespace: NamespaceId, hashes: bytes, depth: int, arrivals: Arrivals) -> list[Planned]:
        """Begin copies of what lies beyond the own tiers, which end at `depth`. Looks and asks outside the lock."""
        with self._lock:
            if not self._looks_beyond or not self._lasting.may(namespace):
                return []
        stretches = self._look_in_pod(namespace, hashes, depth)
        depth += sum(len(stretch.wanted) for stretch in stretches) // HASH_BYTES
        stretches += self._look_in_objects(namespace, hashes, depth)
        begun: list[Planned] = []
        with self._lock:
            for source, elsewhere, wanted in stretches if arrivals.waiting and not self._stopped else ():
                self._note_others(wanted, arrivals)
                copy = self._begin_copy(namespace, source, self._front, wanted)
                if copy is None:
                    break
                begun.append(Planned(copy, elsewhere))
        return begun

    def _look_in_pod(self, namespace: NamespaceId, hashes: bytes, depth: int) -> list[_Stretch]:
        """What other instances of the pod seem to have, from block `depth` on."""
        stretches: list[_Stretch] = []
        rest = hashes[depth * HASH_BYTES :]
        for instance, slots in self.pools.pod.find(namespace, rest) if self.pools.pod is not None and rest else ():
            if self._is_silent(instance):
                break
            for at in range(0, len(slots), _ONBOARD_BLOCKS):
                wanted = rest[at * HASH_BYTES : min(at + _ONBOARD_BLOCKS, len(slots)) * HASH_BYTES]
                stretches.append(_Stretch(instance, Elsewhere(wanted, slots[at : at + _ONBOARD_BLOCKS]), wanted))
            rest = rest[len(slots) * HASH_BYTES :]
        return stretches

    def _look_in_objects(self, namespace: NamespaceId, hashes: bytes, depth: int) -> list[_Stretch]:
        """What the object pool is claimed to hold, in whole objects, from the one on that block `depth` belongs to."""
        pool = self.pools.object
        if pool is None or self._is_silent(Tier.OBJECT):
            return []
        k = pool.blocks
        begin, end = depth // k * k, len(hashes) // HASH_BYTES // k * k
        if end <= depth:
            return []
        chain = hashes[begin * HASH_BYTES : end * HASH_BYTES]
        end = (
            begin + min(self._locator.claimed_depth(pool.name, namespace, chain, self._locate_s), end - begin) // k * k
        )
        copy_blocks = max(k, _ONBOARD_BLOCKS // k * k)
        stretches: list[_Stretch] = []
        for first in range(begin, end, copy_blocks):
            last = min(first + copy_blocks, end)
            wanted = hashes[max(first, depth) * HASH_BYTES : last * HASH_BYTES]
            stretches.append(_Stretch(Tier.OBJECT, Elsewhere(hashes[first * HASH_BYTES : last * HASH_BYTES]), wanted))
        return stretches

    def _submit(self, copies: list[Planned], arrivals: Arrivals) -> list[Onboard]:
        """Have copies carried out. Outside the lock: an executor may do it at once."""
        begun: list[Onboard] = []
        for copy, elsewhere in copies:
            try:
                begun.append(Onboard(copy, self._onboarders.submit(self._onboard, copy, elsewhere, arrivals)))
            except RuntimeError:  # the manager closes
                with self._lock:
                    if not self._source.ended:
                        self._drop_copy(copy)
        return begun

    def _wait_for_bytes(self, begun: list[Onboard], wait_s: float) -> None:
        """Wait until these copies have ended, no longer than told."""
        with self._lock:
            self._begin_waiting()
        try:
            wait([onboard.ended for onboard in begun], timeout=wait_s)
        finally:
            with self._lock:
                self._end_waiting()

    def _begin_waiting(self) -> None:
        """A request waits for bytes; offloads step aside meanwhile. Under the lock."""
        self._requests_waiting += 1
        self._nobody_waits.clear()

    def _end_waiting(self) -> None:
        """It does no more. Under the lock."""
        self._requests_waiting -= 1
        if not self._requests_waiting:
            self._nobody_waits.set()

    def _give_up(self, begun: list[Onboard]) -> None:
        """Take back copies that never began; those that did end by themselves, and are late from now on. Under the lock."""
        for copy, ended in begun:
            if ended.cancel():
                self._drop_copy(copy)
            elif copy.id in self._running:
                self._late_running[copy.id] = copy
                self._late_from[copy.source] += 1
                if isinstance(self._onboarders, Workers):
                    self._onboarders.lend()

    def _is_silent(self, source: Tier | InstanceId) -> bool:
        """Whether so many reads of a source are late that another would only wait: it is a miss at once until one has ended."""
        return self._late_from[source] >= self._copy_threads

    def _carry_out(
        self,
        copy: Copy,
        finish: Callable[[Moved], None],
        lane: np.ndarray | None = None,
        elsewhere: Elsewhere | None = None,
    ) -> None:
        """Move the bytes of a copy and finish it under the lock.

        A pool that raises has broken its promise: nobody knows whether its bytes still move, so the copy keeps its slots and its
        lane, the request sees a miss, and the thread goes on.
        """
        try:
            moved = move(copy, self.pools, self._offsets, self._wait_s, lane, elsewhere)
            with self._lock:
                if not self._source.ended:
                    finish(moved)
        except Exception:
            with self._lock:
                self._failed += 1
                self._quarantined[copy.id] = copy
                self._expect_no_more(copy)
            with suppress(OSError):  # the log may lie on a disk that is full
                log.exception(
                    "copy.broke", target=copy.target.name, blocks=len(copy.hashes) // HASH_BYTES, remedy="report it"
                )
        else:
            if lane is not None:
                self._staging.give(lane)
            with suppress(OSError):
                _tell_trouble(copy, moved, self.pools.object is not None and self.pools.object.forgets)
        self._wake_writer()

    def _begin_run(self, copy: Copy) -> None:
        """The bytes of a copy move from now on. Under the lock."""
        self._running[copy.id] = copy

    def _end_run(self, copy: Copy) -> None:
        """They do not move any more, or nobody knows. Who ends last after the manager has closed closes the pools."""
        with self._lock:
            self._running.pop(copy.id, None)
            if self._late_running.pop(copy.id, None) is not None:
                self._late_from[copy.source] -= 1
                if isinstance(self._onboarders, Workers):
                    self._onboarders.regain()
            if self._offloader.waiting_blocks:
                self._offload_wanted.set()  # what waited for this room
            is_last = self._left_open and not self._running
            if is_last:
                self._left_open = False
            is_unsure = bool(self._quarantined)
        if is_last:
            if is_unsure:
                _unended.append(self.pools)
            else:
                self.pools.close()

    def _onboard(self, copy: Copy, elsewhere: Elsewhere | None, arrivals: Arrivals) -> None:
        is_own = isinstance(copy.source, Tier)
        tier = copy.source if isinstance(copy.source, Tier) else Tier.NVME  # pods share no other

        def finish(moved: Moved) -> None:
            if copy.source == Tier.OBJECT and elsewhere is not None:
                good = b"".join(
                    block
                    for block, outcome in zip(split_hashes(copy.hashes), moved.outcomes, strict=True)
                    if outcome == ReadOutcome.GOOD
                )
                self._remember_claims(copy.namespace, elsewhere.objects_of(good, self.pools.object_blocks))
            cause = MigrateCause.ONBOARD if is_own else MigrateCause.FETCH
            holders = self._end_copy(copy, self._arrived(copy, moved.arrived), cause, pinned=arrivals.waiting)
            if arrivals.waiting:
                for block, slot in zip(split_hashes(copy.hashes), holders, strict=True):
                    if slot is not None:
                        arrivals.brought[block] = (slot, tier)
            else:
                self._late += 1
            self._settle_trouble(copy, moved, elsewhere)

        with self._lock:
            if self._source.ended:
                return
            if not arrivals.waiting:  # it began just as the request gave up
                self._drop_copy(copy)
                return
            self._begin_run(copy)
        try:
            lane = self._staging.take(self._wait_s, is_offload=False) if self._needs_lane(copy) else None
            self._carry_out(copy, finish, lane, elsewhere)
        finally:
            self._end_run(copy)

    def _needs_lane(self, copy: Copy) -> bool:
        return self.pools.need_staging(copy.source, copy.target)

    def _offload(self, wish: Wish) -> None:
        """Carry out a wish, as far as journal, memory and budget allow."""
        lane = None
        if self.pools.need_staging(wish.source, wish.target):
            lane = self._staging.take(self._wait_s if self._has_threads else 0.0, is_offload=True)
            if lane is None:
                with self._lock:
                    self._offloader.skip(Skipped.STAGING, wish.hashes)
                return
        copy = self._begin_offload(wish)
        if copy is None:
            if lane is not None:
                self._staging.give(lane)
            return
        self._wake_writer()  # the copy may wait for the withdrawal of what its slots held

        def finish(moved: Moved) -> None:
            there = self._arrived(copy, moved.arrived)
            there = self._claimable(copy, there) if copy.target == Tier.OBJECT else there
            self._end_copy(copy, there, MigrateCause.OFFLOAD, kept=self._is_kept(copy, there))
            self._settle_trouble(copy, moved)
            arrived = b"".join(b for b, ok in zip(split_hashes(copy.hashes), there, strict=True) if ok)
            self._offloaded[copy.target] += len(arrived) // HASH_BYTES
            if copy.target == Tier.OBJECT:
                self._offloader.claimed(arrived)
                self._remember_claims(copy.namespace, groups_of(arrived, self.pools.object_blocks))
            else:
                at = wish.positions()
                self._offer_arrived(
                    copy.namespace, copy.target, arrived, [at[block] for block in split_hashes(arrived)]
                )

        try:
            self._carry_out(copy, finish, lane)
        finally:
            self._end_run(copy)
        self._look_after_claims()

    def _remember_claims(self, namespace: NamespaceId, objects: Iterable[bytes]) -> None:
        """The object pool had these objects just now. Under the lock."""
        if self._claims is not None:
            self._claims.add(Claimed(namespace, hashes) for hashes in objects)

    def _look_after_claims(self, idle: int = 0) -> None:
        """Withdraw claims whose objects a pool that forgets has dropped. Outside the lock: it asks the pool."""
        pool, begun_s = self.pools.object, self._clock()
        if self._claims is None or pool is None or begun_s < self._look_claims_s:
            return
        with self._lock:
            due: dict[NamespaceId, list[Claimed]] = {}
            for one in () if self._stopped else self._claims.due(idle):
                due.setdefault(one.namespace, []).append(one)
        for namespace, objects in due.items():
            is_gone = pool.absent(namespace, [one.last for one in objects])
            gone = [one for one, absent in zip(objects, is_gone, strict=True) if absent]
            if gone:
                self._withdraw_objects(namespace, gone)
        if self._clock() - begun_s > _SLOW_LOOK_S:
            self._look_claims_s = self._clock() + _REST_S  # the threads are for copies

    def _withdraw_objects(self, namespace: NamespaceId, objects: Sequence[Claimed]) -> None:
        """Say that the object pool has dropped these objects."""
        assert self._claims is not None
        hashes = b"".join(dict.fromkeys(split_hashes(b"".join(one.hashes for one in objects))))
        with self._lock:
            if self._source.ended:
                return
            self._claims.drop(objects)
            self._offloader.unclaim(hashes)
            for at in range(0, len(hashes), _RUN_BYTES):
                self._ledger.forget(Tier.OBJECT, namespace, hashes[at : at + _RUN_BYTES], EvictReason.MISSING)
        self._wake_writer()

    def _begin_offload(self, wish: Wish) -> Copy | None:
        """The copy that carries out a wish; None when there is nothing to do, or it may not be done now, which is counted."""
        with self._lock:
            if self._stopped:
                return None
            if wish.target in DURABLE_TIERS and (self._frames.refusal or self._ledger.overflowed):
                self._offloader.skip(Skipped.JOURNAL, wish.hashes)  # nobody would know of it
                return None
            hashes, budget = wish.hashes, self._budgets.get(wish.target)
            block_bytes = self.pools.slots[wish.source].block_bytes
            if wish.target == Tier.OBJECT:
                hashes = self._whole_objects(wish)
            if budget is not None:
                unit = self.pools.object_blocks if wish.target == Tier.OBJECT else 1
                may_blocks = budget.left_bytes(self._clock()) // (unit * block_bytes) * unit
                self._offloader.skip(Skipped.BUDGET, hashes[may_blocks * HASH_BYTES :])
                hashes = hashes[: may_blocks * HASH_BYTES]
            copy = self._begin_copy(wish.namespace, wish.source, wish.target, hashes) if hashes else None
            self._count_left_out(wish, hashes, copy)
            if (
                copy is not None
                and wish.target == Tier.OBJECT
                and self.pools.object_blocks > 1
                and copy.hashes != hashes
            ):
                self._drop_copy(copy, MigrateCause.OFFLOAD)
                self._offloader.skip(Skipped.PARTIAL, hashes)  # blocks of another namespace
                copy = None
            if copy is not None:
                self._begin_run(copy)
                if budget is not None:
                    budget.spend(len(copy.hashes) // HASH_BYTES * block_bytes)
            return copy

    def _next_wish(self) -> Wish | None:
        """The next wish that can be carried out now. Under the lock.

        Blocks go to HOST beyond what HOST can hold of their prompt only as fast as they leave it again: else they would push out the
        beginning of their prompt before it is where it is on its way to.
        """
        passed_over: set[tuple[NamespaceId, Tier, Tier]] = set()
        while (wish := self._offloader.next(passed_over)) is not None:
            now_s = self._clock()
            if not any(self._offloader.passes_through(wish.namespace, wish.target, run, now_s) for run in wish.runs):
                return wish
            if why := self._ends_in_host(wish):
                self._offloader.skip(why, wish.hashes)
            elif self._room_to_pass() < len(wish.hashes) // HASH_BYTES and self._leave_host():
                self._offloader.defer(wish)
                passed_over.add(wish.way)
            else:
                return wish
        return None

    def _ends_in_host(self, wish: Wish) -> Skipped | None:
        """Why blocks cannot go on from HOST to what is colder; None where they can. Under the lock."""
        if self._frames.refusal or self._ledger.overflowed:
            return Skipped.JOURNAL
        wish_bytes = len(wish.hashes) // HASH_BYTES * self.pools.slots[wish.source].block_bytes
        behind = [self._budgets[tier] for tier in self._offloader.behind_host() if tier in self._budgets]
        now_s = self._clock()
        return Skipped.BUDGET if any(budget.left_bytes(now_s) < wish_bytes for budget in behind) else None

    def _leave_host(self) -> bool:
        """Whether blocks are on their way to HOST, or from there to what is colder, or wait for that. Under the lock."""
        return bool(
            self._offloader.waiting_in(Tier.HOST)
            or any(
                copy.target in DURABLE_TIERS if copy.source == Tier.HOST else copy.target == Tier.HOST
                for copy in self._running.values()
                if copy.source in (Tier.HBM, Tier.HOST)
            )
        )

    def _room_to_pass(self) -> int:
        """Blocks HOST could take without giving up one that is to go on to what is colder. Under the lock."""
        counts = self._ledger.counts(Tier.HOST)
        if not self._leave_host():
            return counts.free + counts.evictable
        return counts.free - counts.slots // _OTHERS_PART

    def _is_kept(self, copy: Copy, there: Sequence[bool]) -> bool:
        """Whether the source of an offload keeps its blocks: HOST does not where they only passed through. Under the lock."""
        if copy.source != Tier.HOST or not self._offloader.leaves_host(copy.namespace, self._clock()):
            return True
        others = [tier for tier in self._offloader.behind_host() if tier != copy.target]
        if Tier.NVME in others and self._ledger.lacking(Tier.NVME, copy.hashes):
            return True
        return not all(there) or Tier.OBJECT in others  # which takes whole objects from HOST, later

    def _count_left_out(self, wish: Wish, hashes: bytes, copy: Copy | None) -> None:
        """Count what an offload to a tier of ours leaves out and the tier lacks. Under the lock."""
        if wish.target == Tier.OBJECT or (copy is not None and len(copy.hashes) == len(hashes)):
            return
        taken = {
            block for one in (copy, *self._running.values()) if one is not None for block in split_hashes(one.hashes)
        }
        left = b"".join(
            block for block in split_hashes(self._ledger.lacking(wish.target, hashes)) if block not in taken
        )
        gone = self._ledger.lacking(wish.source, left)
        self._offloader.skip(Skipped.GONE, gone)
        self._offloader.skip(Skipped.ROOM, left[len(gone) :])  # so many

    def _whole_objects(self, wish: Wish) -> bytes:
        """Those objects of a wish that one copy can carry now: all of each is at the source, and no two share a block.

        The others are skipped, or wait for the next copy where they only share blocks. Under the lock.
        """
        k, unclaimed = self.pools.object_blocks, self._offloader.unclaimed(wish.hashes)
        if k == 1:
            return unclaimed
        taken: list[bytes] = []
        later: list[bytes] = []
        seen: set[SequenceHash] = set()
        for group in groups_of(unclaimed, k):
            blocks = split_hashes(group)
            if self._ledger.lacking(wish.source, group) or len(set(blocks)) < k:
                self._offloader.skip(Skipped.PARTIAL, group)
            elif seen.isdisjoint(blocks):
                seen.update(blocks)
                taken.append(group)
            elif group not in taken:
                later.append(group)
        if later:
            self._offloader.put_back(wish._replace(hashes=b"".join(later)))
        return b"".join(taken)

    def _claimable(self, copy: Copy, stored: list[bool]) -> list[bool]:
        """Which blocks of a copy to OBJECT may be claimed: none of an object of which a block was cleared meanwhile. Under the lock."""
        k = self.pools.object_blocks
        if k == 1:
            return stored
        assert isinstance(copy.source, Tier)
        claimable: list[bool] = []
        for number, group in enumerate(groups_of(copy.hashes, k)):
            is_whole = all(stored[number * k : (number + 1) * k]) and not self._ledger.lacking(copy.source, group)
            claimable += [is_whole] * k
        return claimable

    def _collect(self, hashes: bytes, found: Match, arrivals: Arrivals) -> Prefix:
        """What is pinned in the front tier now, from the first block on; what lies behind a hole is unpinned again."""
        slots: list[int] = []
        behind: list[int] = []
        hits: dict[Tier, int] = {}
        whole = True
        found_slots = split_slots(found.slots)
        for index, block in enumerate(split_hashes(hashes)):
            if index < found.depth and found.tiers[index] == self._front:
                slot, tier = found_slots[index], self._front
            elif block in arrivals.brought:
                slot, tier = arrivals.brought[block]
            else:
                whole = False
                continue
            if whole:
                slots.append(slot)
                hits[tier] = hits.get(tier, 0) + 1
            else:
                behind.append(slot)
        self._ledger.unpin(self._front, pack_slots(behind))
        return Prefix(len(slots), slots, hits)

    def _count(self, namespace: NamespaceId, hashes: bytes, prefix: Prefix) -> Prefix:
        """Count hits and misses of a prompt, and offer what was used again. Under the lock."""
        for tier, count in prefix.hits.items():
            self._hits[tier] += count
        self._missed += len(hashes) // HASH_BYTES - prefix.depth
        self._offer(namespace, Tier.HBM, hashes[: prefix.depth * HASH_BYTES], 2, NO_PARENT, 0)
        return prefix

    def _offer(
        self,
        namespace: NamespaceId,
        tier: Tier,
        hashes: bytes,
        uses: int,
        parent: bytes = NO_PARENT,
        start: int | None = None,
    ) -> None:
        if hashes and self._offloader.offer(namespace, tier, hashes, uses, self._ledger.lacking, parent, start):
            self._offload_wanted.set()

    def _offer_arrived(self, namespace: NamespaceId, tier: Tier, hashes: bytes, positions: Sequence[int]) -> None:
        """Blocks have come to a tier by a copy. Under the lock."""
        if hashes and self._offloader.offer_arrived(namespace, tier, hashes, positions, self._ledger.lacking):
            self._offload_wanted.set()

    def _settle_trouble(self, copy: Copy, moved: Moved, elsewhere: Elsewhere | None = None) -> None:
        """Withdraw what proved corrupt or missing, and count. Under the lock, after the copy has ended."""
        if copy.source not in (Tier.HBM, Tier.HOST):
            self._verified += moved.outcomes.count(ReadOutcome.GOOD)
        blocks = split_hashes(copy.hashes)
        self._corrupt += moved.outcomes.count(ReadOutcome.CORRUPT)
        for outcome, reason in _WITHDRAWN_FOR.items():
            bad = b"".join(block for block, o in zip(blocks, moved.outcomes, strict=True) if o == outcome)
            if not bad or not isinstance(copy.source, Tier):  # what a peer has overwritten is its own affair
                continue
            if copy.source == Tier.OBJECT:
                assert elsewhere is not None
                gone = b"".join(elsewhere.objects_of(bad, self.pools.object_blocks))
                self._offloader.unclaim(gone)
                self._ledger.forget(Tier.OBJECT, copy.namespace, gone, reason)
                if self._claims is not None:
                    objects = groups_of(gone, self.pools.object_blocks)
                    self._claims.drop(Claimed(copy.namespace, hashes) for hashes in objects)
            else:
                self._ledger.evict(copy.source, bad, reason)
        if ReadOutcome.FAILED in moved.outcomes or moved.unwritten:
            self._failed += 1

    def _run_offloads(self) -> None:
        while not self._stopped:
            self._offload_wanted.wait(0.5)
            self._offload_wanted.clear()
            self._nobody_waits.wait(_STEP_ASIDE_S)
            while self.offload_one():
                self._nobody_waits.wait(_STEP_ASIDE_S)
            if self._claims is not None and self._clock() >= self._idle_look_s:
                self._idle_look_s = self._clock() + _IDLE_LOOK_S
                self._look_after_claims(_IDLE_LOOKS)


def _check_reason(reason: EvictReason) -> None:
    if not isinstance(reason, EvictReason):
        raise ArgumentTypeError("reason", f"is {kind_of(reason)}; give a member of kvbm.EvictReason")


def _slots_held(copies: Mapping[int, Copy]) -> int:
    """Slots at both ends of copies."""
    return sum(len(copy.source_slots) + len(copy.target_slots) for copy in copies.values()) // SLOT_BYTES


def _name(source: Tier | InstanceId) -> str:
    return source.name if isinstance(source, Tier) else source


def _local(found: Match) -> Prefix:
    """What was found, all of it in HBM."""
    return Prefix(found.depth, split_slots(found.slots), {Tier.HBM: found.depth} if found.depth else {})


def _tell_trouble(copy: Copy, moved: Moved, objects_go: bool) -> None:
    """One warning for each kind of trouble of a copy. Outside the lock: whoever reads the log may be slow.

    Args:
        objects_go: the object pool forgets, and an object that is gone is no trouble.
    """
    source = _name(copy.source)
    for outcome, reason in _WITHDRAWN_FOR.items():
        if copy.source == Tier.OBJECT and outcome == ReadOutcome.MISSING and objects_go:
            continue
        if isinstance(copy.source, Tier) and (count := moved.outcomes.count(outcome)):
            first = split_hashes(copy.hashes)[moved.outcomes.index(outcome)]
            log.warning("block.withdrawn", tier=source, reason=reason.name.lower(), blocks=count, first=first[:4].hex())
    failed = moved.outcomes.count(ReadOutcome.FAILED)
    if failed or moved.unwritten:
        why = moved.unwritten or "read failed"
        log.warning("copy.failed", source=source, target=copy.target.name, unread_blocks=failed, why=why)
