"""Deliberate defects: each is one rule of the design, broken from the test's side.

The simulator must notice every one of them.

A mutant is planted by replacing a method of production code for a while. It names the faults that bring it to light; a
defect that nothing notices means that a check is missing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import numpy as np

import kvbm.assembly.start
import kvbm.catalog.follow.instance_sequence as sequence_module
import kvbm.manager.base as manager_module
import kvbm.manager.copies.copies_in_flight as copies_module
import kvbm.manager.copies.workers as workers_module
import kvbm.reference.ledger as ledger_module
import kvbm.streams.at_exit as leaving
import kvbm.streams.journal.repair as repair_module
import kvbm.tenant_secrets as secrets_module
from kvbm import assembly
from kvbm.catalog.follow.instance_sequence import InstanceSequence, StreamCursor
from kvbm.catalog.follow.sequencer import Sequencer
from kvbm.catalog.index.plain_frames import apply_plain
from kvbm.catalog.members.downtime import Downtimes
from kvbm.catalog.members.liveness import Liveness, Return
from kvbm.core.codec import decode_header
from kvbm.core.errors import TornFrameError
from kvbm.core.events import MigrateCause, ResidenciesListed, SnapshotEnded
from kvbm.core.ids import HASH_BYTES, Epoch, Offset, Tier
from kvbm.core.results import Copy
from kvbm.manager.acquiring import Acquiring
from kvbm.manager.copies.copies_in_flight import CopiesInFlight
from kvbm.manager.copies.transfer import Moved
from kvbm.manager.copies.workers import Workers
from kvbm.manager.engine_hbm import EngineHbmManager
from kvbm.manager.onboard.loads import Loads
from kvbm.manager.record.offsets import Offsets
from kvbm.manager.used_namespaces import UsedNamespaces
from kvbm.pools.base import ReadOutcome
from kvbm.pools.nvme.generations import Generations
from kvbm.pools.nvme.hints import SlotHints
from kvbm.pools.nvme.pod import PodFolder
from kvbm.pools.nvme.sealing import SlotKeys
from kvbm.pools.object.encryption import Sealing
from kvbm.reference.recorder import Recorder
from kvbm.streams.base import Mark, Position
from kvbm.streams.journal.journal import Journal
from kvbm.streams.publisher.machine import Publisher
from kvbm.streams.publisher.messages import Publish
from kvbm.streams.publisher.thread import PublisherThread
from kvbm.tenant_secrets import TenantSecrets
from kvbm.transport.lending import Leases
from kvbm.transport.local import LocalReader
from tests.faults.simulator import cluster as cluster_module
from tests.faults.simulator.run import LIMITS_S, PEERS_S, RUN_S, Plan

_GAPS = ("hide_messages", "cut_catalog", "freeze_catalog", "refuse_publishes", "kill_catalog", "trim")
_PROCESSES = ("kill", "kill_in_write", "stop", "freeze")
_ENGINES = ("slow_pools", "slow_pools", "slow_disk", "kill", "freeze")
_FEW_THREADS = ("no_threads", "no_threads", "hang_pools", "slow_pools")
_LINKS = ("break_links", "drop_acks", "slow_network", "restart_server", "cut_node")


class Mutant(NamedTuple):
    """One defect.

    Attributes:
        rule: what is broken.
        plant: replaces production code; undone by the stack.
        mix: the faults to look with; () for any, as they meet.
        run_s: of virtual time with work and faults; a short one ends while instances are quiet, whose next event would
            heal much.
        peers: instances read each other's blocks. limits: threads, descriptors, names and undisturbed calls may run
            out.
        owning: most instances have an engine that owns HBM.
    """

    rule: str
    plant: Callable[[ExitStack], None]
    mix: tuple[str, ...]
    run_s: float = RUN_S
    peers: bool = False
    limits: bool = False
    owning: bool = False

    @property
    def plan(self) -> Plan:
        """What to do with a seed to look for it."""
        return Plan(mix=self.mix, run_s=self.run_s, peers=self.peers, limits=self.limits, owning=self.owning)

    @contextmanager
    def planted(self) -> Iterator[None]:
        """The defect is in place."""
        with ExitStack() as stack:
            self.plant(stack)
            yield


def _swap(stack: ExitStack, owner: Any, name: str, value: Any) -> Any:
    """Replace an attribute until the stack ends; gives what was there."""
    old = owner.__dict__[name] if isinstance(owner, type) else getattr(owner, name)
    setattr(owner, name, value)
    stack.callback(setattr, owner, name, old)
    return old.__func__ if isinstance(old, (classmethod, staticmethod)) else old


class _IndexWithout:
    """An index that does not do one thing."""

    def __init__(self, index: Any, **instead: Callable[..., Any]) -> None:
        self._index = index
        self.__dict__.update(instead)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._index, name)


# -- the publisher -----------------------------------------------------------------------------------------------------


def _no_go_back_n(stack: ExitStack) -> None:
    def take_refusal(self: Any, attempt: int, away: bool) -> None:
        if attempt in self._window:
            self._take_ack(attempt)  # whoever comes next goes on behind it
        else:
            original(self, attempt, away)

    original = _swap(stack, Publisher, "_take_refusal", take_refusal)


def _no_fencing(stack: ExitStack) -> None:
    def step(self: Any, now_s: float, happened: Any) -> Any:
        effects = original(self, now_s, happened)
        return [effect._replace(fence=None) if isinstance(effect, Publish) else effect for effect in effects]

    original = _swap(stack, Publisher, "step", step)


def _fence_never_renewed(stack: ExitStack) -> None:
    def set_fence(self: Any, effects: Any) -> None:
        ours = self.__dict__.get("only_fence")
        if ours is not None and ours.epoch == self.epoch:
            self._is_fence_wanted, self._fence_due_s = False, float("inf")
            self._ownership.fence_sequence, self._ownership.fence_epoch = ours.sequence, ours.epoch
            self._state = type(self._state).SENDING
        else:
            original(self, effects)

    def take_fence(self: Any, attempt: int, fence: Any) -> None:
        took(self, attempt, fence)
        self.only_fence = fence

    original = _swap(stack, Publisher, "_set_fence", set_fence)
    took = _swap(stack, Publisher, "_take_fence", take_fence)


def _resumes_at_the_end(stack: ExitStack) -> None:
    def take_connection(self: Any, found: Any, effects: Any) -> None:
        if found.tail is not None:
            found = found._replace(tail=found.tail._replace(acked=found.tail.end))
        original(self, found, effects)

    original = _swap(stack, Publisher, "_take_connection", take_connection)


# -- the manager -------------------------------------------------------------------------------------------------------


def _slot_reused_early(stack: ExitStack) -> None:
    _swap(stack, Offsets, "wait_durable", lambda self, *args: True)


def _claim_before_bytes(stack: ExitStack) -> None:
    move = copies_module.move

    def carry_out(self: Any, copy: Copy, finish: Callable[[Moved], None], lane: Any = None, remote: Any = None) -> None:
        if copy.target != Tier.NVME:
            original(self, copy, finish, lane, remote)
            return
        count = len(copy.hashes) // HASH_BYTES
        if self._offsets.wait_durable(copy.epoch, copy.after, 1.0):
            with self._lock:
                finish(Moved([True] * count, [ReadOutcome.GOOD] * count))
            self._stream.recorded()
            move(copy, self.pools, self._offsets, 1.0, lane)
        if lane is not None:
            self.staging.give(lane)

    original = _swap(stack, CopiesInFlight, "carry_out", carry_out)


def _slot_released_at_deadline(stack: ExitStack) -> None:
    def give_up(self: Any, waiter: Any, begun: Any) -> None:
        waiter.waiting = False
        for copy, ended in begun:
            if not ended.done():
                ended.cancel()
                self._ledger.end_copy(copy, [False] * (len(copy.hashes) // HASH_BYTES), MigrateCause.ONBOARD)

    _swap(stack, Loads, "give_up_locked", give_up)


def _epoch_from_wall_clock(stack: ExitStack) -> None:
    """Epochs are the machine's seconds, so that a clock that is set back begins an old one."""
    from tests.faults.simulator.kernel import INSTALLED

    def begin_epoch(self: Any, epoch: Epoch, *args: Any, **kwargs: Any) -> None:
        self.epoch = Epoch(min(self.epoch, epoch - 1))
        original(self, epoch, *args, **kwargs)

    def now() -> Epoch:
        return Epoch(INSTALLED.world.current.clock.wall_ns() // 1_000_000_000)

    original = _swap(stack, Journal, "begin_epoch", begin_epoch)
    _swap(stack, kvbm.assembly.start, "Epoch", lambda number: now() if number else Epoch(0))


class _SkippingRecorder(Recorder):
    """A snapshot states what is held but for a run now and then."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._skipped: dict[tuple[int, int], int] = {}
        self._listed = 0

    def _wait(self, event: Any, digest: int) -> None:
        if isinstance(event, ResidenciesListed):
            self._listed += 1
            if self._listed % 3 == 0:
                key = (event.tier, event.snapshot)
                self._skipped[key] = self._skipped.get(key, 0) + len(event.hashes) // HASH_BYTES
                return
        if isinstance(event, SnapshotEnded) and (less := self._skipped.pop((event.tier, event.snapshot), 0)):
            event = SnapshotEnded(tier=event.tier, snapshot=event.snapshot, count=event.count - less)
        super()._wait(event, digest)


def _snapshot_skips_a_run(stack: ExitStack) -> None:
    _swap(stack, ledger_module, "Recorder", _SkippingRecorder)
    _swap(stack, assembly, "NATIVE_CORE", cluster_module.READABLE)


def _torn_tail_accepted(stack: ExitStack) -> None:
    """What is left of a frame at a segment's end counts as a frame."""

    def cut(segment: Any, error: Any) -> None:
        size = segment.path.stat().st_size - segment.size
        if not isinstance(error, TornFrameError) or size < 60:
            original(segment, error)
            return
        data = segment.path.read_bytes()[segment.size :]
        header = decode_header(data)
        with open(segment.path, "ab") as file:  # so long as its header says
            file.write(bytes(header.frame_bytes - size))
        segment.add(header.first_offset, Offset(header.first_offset + header.event_count), header.frame_bytes)

    original = _swap(stack, repair_module, "_cut", cut)


# -- blocks of other instances -----------------------------------------------------------------------------------------


def _lends_without_lease(stack: ExitStack) -> None:
    def begin(self: Any, lent: Any, now_s: float, is_timed: bool = True) -> int:
        lease = original(self, lent, now_s, is_timed)
        self.end(lease)  # its pins are given back before anybody has read
        return lease

    original = _swap(stack, Leases, "begin", begin)


def _checksum_of_the_source(stack: ExitStack) -> None:
    """What an owner has in its slot is checked, then copied; what the reader has in its row is not."""

    def copied(self: Any, namespace: Any, hashes: Any, rows: Any, at: Any, lent: Any, until_s: float) -> Any:
        of_rows, sums = self._checksum, [self._checksum(source.tobytes()) for source in lent.rows]
        left = iter(sums)
        self._checksum = lambda row: next(left)
        try:
            return original(self, namespace, hashes, rows, at, lent, until_s)
        finally:
            self._checksum = of_rows

    original = _swap(stack, LocalReader, "_copied", copied)


# -- what runs out -----------------------------------------------------------------------------------------------------


def _queued_before_its_thread(stack: ExitStack) -> None:
    """As it was: whoever is told that there is no thread frees the slots, and the next thread carries the call out."""

    def submit(self: Any, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        with self._changed:
            if self._is_closed:
                raise RuntimeError("the threads have been shut down")
            self._queue.append((future, lambda: fn(*args, **kwargs)))
            spawn(self)
        return future

    def replace_stuck(self: Any) -> None:
        with self._changed:
            self._room += 1
            spawn(self)

    def spawn(self: Any) -> None:
        if self._idle >= len(self._queue):
            self._changed.notify()
        elif self._room > 0:
            workers_module.threading.Thread(target=self._work, name=self._name, daemon=True).start()
            self._room -= 1

    def carry_out(self: Any, load: Any, waiter: Any, since_s: float) -> None:
        if waiter.waiting and load.copy.id not in self._copies.open:
            self._copies.open.add(load.copy.id)  # nobody looked whether it was given up
        original(self, load, waiter, since_s)

    _swap(stack, Workers, "submit", submit)
    _swap(stack, Workers, "replace_stuck", replace_stuck)
    original = _swap(stack, Loads, "_carry_out", carry_out)


def _room_of_a_thread_that_never_was(stack: ExitStack) -> None:
    def provide(self: Any, waiting: int) -> None:
        before = self._room
        try:
            original(self, waiting)
        finally:
            if self._lacks_threads:
                self._room = min(self._room, before - 1)

    original = _swap(stack, Workers, "_provide_locked", provide)


def _half_open_stays(stack: ExitStack) -> None:
    """A manager that gets no thread keeps its locks."""

    def start(
        self: Any,
        publishing: Any = None,
        closers: Any = (),
        disowners: Any = (),
        stoppers: Any = (),
        taken: Callable[[], object] = lambda: None,
    ) -> None:
        self.publisher_port.publishing = publishing
        self._disowners = list(disowners)
        self._closing.add([*stoppers, self._salvage.stop], closers)
        leaving.keep(self)
        taken()
        for part in (self._writer, self._offloads, self._salvage):
            part.start()

    _swap(stack, manager_module.BlockManager, "start", start)


def _names_without_end(stack: ExitStack) -> None:
    def use(self: Any, namespace: Any) -> None:
        self._used.setdefault(namespace)

    _swap(stack, UsedNamespaces, "use", use)


def _interrupted_keeps_its_pins(stack: ExitStack) -> None:
    _swap(stack, Loads, "abandon", lambda self, waiter: None)


def _handler_waits_for_its_thread(stack: ExitStack) -> None:
    _swap(stack, leaving, "close_aside", lambda opened, timeout_s: False)


def _loop_wanted_once(stack: ExitStack) -> None:
    """A publisher that has no descriptors for a loop ends."""

    def run(self: Any) -> None:
        with asyncio.Runner() as runner:
            runner.run(self._drive())

    _swap(stack, PublisherThread, "_run", run)


def _stamp_before_its_read(stack: ExitStack) -> None:
    def look(self: Any) -> None:
        before = self._seen
        original(self)
        if self._seen == before and self._path:
            self._seen = secrets_module.settled_stamp(self._path)

    original = _swap(stack, TenantSecrets, "_look", look)


def _clean_before_its_sync(stack: ExitStack) -> None:
    def sync(self: Any) -> None:
        original(self)
        self._is_dirty = False

    original = _swap(stack, SlotHints, "sync", sync)


def _keys_stamp_before_their_read(stack: ExitStack) -> None:
    """Keys of NVME that change while they cannot be read count as read."""

    def refresh(self: Any) -> None:
        changed = self._source.changed()
        original(self)
        self._changed = changed

    original = _swap(stack, SlotKeys, "refresh", refresh)


def _object_keys_stamp_before_their_read(stack: ExitStack) -> None:
    """The same of objects."""

    def refresh(self: Any) -> None:
        changed = self._source.changed()
        original(self)
        self._changed = changed

    original = _swap(stack, Sealing, "refresh", refresh)


def _pod_believes_its_hints(stack: ExitStack) -> None:
    """What a pod's other instances have by now where their hints named a block counts as that block."""

    def read(self: Any, *args: Any, **more: Any) -> Any:
        result = original(self, *args, **more)
        is_other = [outcome is ReadOutcome.MISSING for outcome in result.outcomes]
        good = [
            ReadOutcome.GOOD if other else outcome for other, outcome in zip(is_other, result.outcomes, strict=True)
        ]
        rows, at = args[4], args[5] if len(args) > 5 else more.get("at")
        places = range(len(good)) if at is None else at
        sums = [assembly.NATIVE.crc32c(rows[place].tobytes()) for place in places]
        return result._replace(outcomes=good, checksums=np.array(sums, dtype=np.uint32))

    original = _swap(stack, PodFolder, "read", read)


# -- engines that own HBM ----------------------------------------------------------------------------------------------


def _stores_arrive_whatever_workers_say(stack: ExitStack) -> None:
    def end_store(self: Any, store: Any, arrived: list[bool], checksums: Any) -> None:
        original(self, store, [True] * len(arrived), checksums)

    original = _swap(stack, EngineHbmManager, "_end_store", end_store)


def _clear_takes_rows_from_workers(stack: ExitStack) -> None:
    """A clear ends stores, whose rows workers still write."""

    def cancel_all(self: Any) -> None:
        original(self)
        for copy in [self.running[number] for number in self.stores if number in self.open]:
            self.drop_locked(copy, MigrateCause.OFFLOAD)

    def end_store(self: Any, store: Any, arrived: list[bool], checksums: Any) -> None:
        if store.copy.id in self._copies.open:
            ends(self, store, arrived, checksums)

    original = _swap(stack, CopiesInFlight, "cancel_all_locked", cancel_all)
    ends = _swap(stack, EngineHbmManager, "_end_store", end_store)


def _given_up_keeps_its_pins(stack: ExitStack) -> None:
    def release(self: Any) -> None:
        if self._is_over:
            original(self)
            return
        with self._lock:
            self._give_up_locked()
            self._collect_locked()
            self._loads.end_waiting_locked(self)
            self._is_over = self._is_released = True

    original = _swap(stack, Acquiring, "release", release)


def _engines_are_given_what_was_cleared(stack: ExitStack) -> None:
    def finish(self: Any) -> None:
        self._cancellations = self._copies.cancellations
        original(self)

    original = _swap(stack, Acquiring, "_finish_locked", finish)


def _clear_is_in_the_journal_alone(stack: ExitStack) -> None:
    @contextmanager
    def clearing(self: Any, namespaces: Any = None) -> Iterator[None]:
        yield

    _swap(stack, Generations, "clearing", clearing)


def _requests_outlive_their_deadline(stack: ExitStack) -> None:
    def poll(self: Any) -> Any:
        kept, self.deadline_s = self.deadline_s, float("inf")
        try:
            return original(self)
        finally:
            self.deadline_s = kept

    original = _swap(stack, Acquiring, "poll", poll)


# -- the catalog -------------------------------------------------------------------------------------------------------


def _position_before_apply(stack: ExitStack) -> None:
    def step(self: Any, now_s: float, messages: Sequence[Any], at_end: bool = False) -> Any:
        kept: list[Any] = self.__dict__.setdefault("kept_back", [])
        due = [*kept, *messages[:-1]]
        kept[:] = messages[-1:] if messages else []
        result = original(self, now_s, due, at_end)
        if kept:
            self._cursor.sequence = kept[
                -1
            ].sequence  # stored with the next batch, though the message waits to be applied
        return result

    original = _swap(stack, Sequencer, "step", step)


def _gap_ignored(stack: ExitStack) -> None:
    def put_in_buffer(self: Any, frame: Any, data: Any, step: Any) -> None:
        self._jump(frame.first_offset, step)
        self._apply_events(frame, data, step)

    _swap(stack, InstanceSequence, "_put_in_buffer", put_in_buffer)


def _digest_not_compared(stack: ExitStack) -> None:
    def init(self: Any, index: Any, *args: Any, **kwargs: Any) -> None:
        blind = _IndexWithout(index, agrees=lambda instance, digest: True)
        blind.__dict__["apply_plain"] = lambda messages, places: apply_plain(blind, messages, places)
        original(self, blind, *args, **kwargs)

    original = _swap(stack, Sequencer, "__init__", init)


def _repeat_counted_twice(stack: ExitStack) -> None:
    def receive(self: Any, frame: Any, data: Any, step: Any) -> None:
        if frame.epoch == self.position.epoch and frame.next_offset <= self.position.offset and not self.buffer:
            after = self.position
            self.position = Position(frame.epoch, frame.first_offset)
            self._apply_events(frame, data, step)
            self.position = after
        else:
            original(self, frame, data, step)

    original = _swap(stack, InstanceSequence, "receive", receive)


def _stale_epoch_applied(stack: ExitStack) -> None:
    def receive(self: Any, frame: Any, data: Any, step: Any) -> None:
        if frame.epoch < self.position.epoch:
            self._enter(frame, step)
            self._apply(frame, data, step)
        else:
            original(self, frame, data, step)

    original = _swap(stack, InstanceSequence, "receive", receive)


def _lives_taken_for_one(stack: ExitStack) -> None:
    _swap(stack, sequence_module, "is_other_life", lambda epoch, run, fence: False)


def _places_without_fingerprints(stack: ExitStack) -> None:
    _swap(stack, StreamCursor, "mark", property(lambda self: Mark(self.sequence)))


def _excluded_never_returned(stack: ExitStack) -> None:
    def step(self: Any, now_s: float, what: Any) -> Any:
        return [effect for effect in original(self, now_s, what) if not isinstance(effect, Return)]

    original = _swap(stack, Liveness, "step", step)


def _forgets_nobody(stack: ExitStack) -> None:
    _swap(stack, Downtimes, "due", lambda self, most: [])


def _forgets_in_sql_alone(stack: ExitStack) -> None:
    def drop(self: Any, instance: Any) -> None:
        self._sequences.pop(instance, None)  # the index keeps what it held

    _swap(stack, Sequencer, "drop", drop)


MUTANTS: dict[str, Mutant] = {
    "forgets_nobody": Mutant("who is gone for long is forgotten", _forgets_nobody, ("forget", "kill")),
    "forgets_in_sql_alone": Mutant("what is forgotten leaves the index", _forgets_in_sql_alone, ("forget", "kill")),
    "position_before_apply": Mutant(
        "a position is stored together with what it covers", _position_before_apply, ("kill_catalog", "database_down")
    ),
    "no_go_back_n": Mutant("what was refused is sent again, and all behind it", _no_go_back_n, ("refuse_publishes",)),
    "no_fencing": Mutant("the server refuses whoever has lost the fence", _no_fencing, ("zombie", "twin", "freeze")),
    "fence_never_renewed": Mutant("a fence is as young as the snapshot", _fence_never_renewed, ("trim", *_LINKS)),
    "resumes_at_the_end": Mutant(
        "a new connection goes on where all is acknowledged",
        _resumes_at_the_end,
        ("refuse_publishes", "refuse_publishes", "kill", "slow_network", *_LINKS),
    ),
    "slot_reused_early": Mutant(
        "a slot is written once the withdrawal of its block is durable",
        _slot_reused_early,
        ("slow_disk", "fill_disk", *_PROCESSES),
    ),
    "claim_before_bytes": Mutant("bytes first, then the claim", _claim_before_bytes, _PROCESSES),
    "slot_released_at_deadline": Mutant(
        "a slot in copy belongs to the copy", _slot_released_at_deadline, ("slow_pools",)
    ),
    "lends_without_lease": Mutant(
        "a slot that is lent stays as it is until its lease is over",
        _lends_without_lease,
        ("clear_lenders", "slow_reads"),
        run_s=PEERS_S,
        peers=True,
    ),
    "checksum_of_the_source": Mutant(
        "a reader holds its own row to the checksum, after the copy",
        _checksum_of_the_source,
        ("flip_on_the_way", "slow_reads"),
        run_s=PEERS_S,
        peers=True,
    ),
    "epoch_from_wall_clock": Mutant("an epoch only grows", _epoch_from_wall_clock, ("step_clock", *_PROCESSES)),
    "snapshot_skips_a_run": Mutant(
        "a snapshot states all that is held", _snapshot_skips_a_run, ("trim", "hide_messages")
    ),
    "torn_tail_accepted": Mutant("a torn tail is cut at the last whole frame", _torn_tail_accepted, ("kill_in_write",)),
    "gap_ignored": Mutant("a hole is waited at, then a gap", _gap_ignored, _GAPS),
    "digest_not_compared": Mutant("digests are compared at every frame", _digest_not_compared, ("spoil_index",)),
    "repeat_counted_twice": Mutant("a repeat changes nothing", _repeat_counted_twice, ("late_copies", *_LINKS)),
    "stale_epoch_applied": Mutant(
        "an epoch that is over is over",
        _stale_epoch_applied,
        ("late_copies", "hide_messages", "cut_server_power", *_PROCESSES),
    ),
    "lives_taken_for_one": Mutant(
        "an epoch's number that comes again in another run is of another life", _lives_taken_for_one, ()
    ),
    "places_without_fingerprints": Mutant(
        "a place in a history that the server has lost is not read on from",
        _places_without_fingerprints,
        ("cut_server_power", "kill_catalog"),
        run_s=1.4,  # long runs heal what short ones show
    ),
    "queued_before_its_thread": Mutant(
        "what finds no thread is not carried out later",
        _queued_before_its_thread,
        _FEW_THREADS,
        run_s=LIMITS_S,
        limits=True,
    ),
    "room_of_a_thread_that_never_was": Mutant(
        "a thread that could not be started leaves its room",
        _room_of_a_thread_that_never_was,
        _FEW_THREADS,
        run_s=LIMITS_S,
        limits=True,
    ),
    "half_open_stays": Mutant(
        "what cannot start leaves nothing open", _half_open_stays, ("no_threads", "kill"), run_s=1.0, limits=True
    ),
    "names_without_end": Mutant(
        "names that clients choose make no heartbeat large",
        _names_without_end,
        ("many_names",),
        run_s=LIMITS_S,
        limits=True,
    ),
    "interrupted_keeps_its_pins": Mutant(
        "an acquire that an exception ends pins nothing",
        _interrupted_keeps_its_pins,
        ("signals", "slow_pools"),
        run_s=LIMITS_S,
        limits=True,
    ),
    "handler_waits_for_its_thread": Mutant(
        "a signal's handler may close a manager",
        _handler_waits_for_its_thread,
        ("signal_closes",),
        run_s=LIMITS_S,
        limits=True,
    ),
    "loop_wanted_once": Mutant(
        "no thread ends for want of descriptors",
        _loop_wanted_once,
        ("no_descriptors", "kill"),
        run_s=1.0,
        limits=True,
    ),
    "stamp_before_its_read": Mutant(
        "what changed while it could not be read is read later",
        _stamp_before_its_read,
        ("no_descriptors", "change_secrets"),
        run_s=LIMITS_S,
        peers=True,
        limits=True,
    ),
    "clean_before_its_sync": Mutant(
        "hints that were not synced are synced later",
        _clean_before_its_sync,
        ("no_descriptors", "break_disk"),
        run_s=LIMITS_S,
        limits=True,
    ),
    "keys_stamp_before_their_read": Mutant(
        "keys of NVME that changed while they could not be read are read later",
        _keys_stamp_before_their_read,
        ("no_descriptors", "change_keys"),
        run_s=LIMITS_S,
        limits=True,
    ),
    "object_keys_stamp_before_their_read": Mutant(
        "keys of objects that changed while they could not be read are read later",
        _object_keys_stamp_before_their_read,
        ("no_descriptors", "change_keys"),
        run_s=LIMITS_S,
        limits=True,
    ),
    "pod_believes_its_hints": Mutant(
        "a block of a pod's other instance is what its slot proves",
        _pod_believes_its_hints,
        ("pod_mate", "kill", "slow_pools"),
        run_s=LIMITS_S,
        limits=True,
    ),
    "stores_arrive_whatever_workers_say": Mutant(
        "what a worker could not copy is nowhere", _stores_arrive_whatever_workers_say, _ENGINES, run_s=3.0, owning=True
    ),
    "clear_takes_rows_from_workers": Mutant(
        "rows of a store are its own until it has ended",
        _clear_takes_rows_from_workers,
        _ENGINES,
        run_s=3.0,
        owning=True,
    ),
    "given_up_keeps_its_pins": Mutant(
        "a request that is given up pins nothing", _given_up_keeps_its_pins, _ENGINES, run_s=3.0, owning=True
    ),
    "engines_are_given_what_was_cleared": Mutant(
        "a request gets nothing of what was cleared while it waited",
        _engines_are_given_what_was_cleared,
        _ENGINES,
        run_s=3.0,
        owning=True,
    ),
    "clear_is_in_the_journal_alone": Mutant(
        "what was cleared stays so though a journal is damaged",
        _clear_is_in_the_journal_alone,
        ("flip_journal", "flip_journal", "kill", "stop", "slow_pools"),
        run_s=4.0,
        owning=True,
    ),
    "requests_outlive_their_deadline": Mutant(
        "a request of an engine is over at its deadline",
        _requests_outlive_their_deadline,
        _ENGINES,
        run_s=3.0,
        owning=True,
    ),
    "excluded_never_returned": Mutant(
        "whoever is heard again is answered of again", _excluded_never_returned, ("freeze", "cut_node")
    ),
}
