"""OBJECT: blocks in a store of objects, k to an object, found by namespace and hash, without slots and without an
owner.

An object is named <k>/<namespace id, hex>/<hash of its last block, hex>, so objects of two k never meet. header.py says
what is in one, encryption.py how it is encrypted and named where a tenant has keys, reader.py how it is proved and
decoded. What a pool keeps besides blocks lies under ".kvbm/"; names in the janitor's tombstones there are neither put
nor got.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import NamedTuple, TypeVar

import numpy as np

from kvbm.core.backend import ChecksumRows
from kvbm.core.errors import LayoutError, PoolError
from kvbm.core.ids import HASH_BYTES, Namespace, NamespaceId, Reach, Tier
from kvbm.pools.base import NamespaceBytes, ObjectStats, Proof, ReadOutcome, ReadResult
from kvbm.pools.object.coding import ELEMENT_CODINGS, BlockCoder, Coding
from kvbm.pools.object.direct import DirectReads, NewObjectReceiver
from kvbm.pools.object.envelope import Envelopes, ObjectEnvelope, PlainEnvelope
from kvbm.pools.object.header import MOST_BLOCKS, encode_object_headers, header_bytes
from kvbm.pools.object.reader import Described, FoundObject, ObjectReader, WantedBlocks
from kvbm.pools.object.tombstones import Tombstones
from kvbm.pools.run import all_failed, check_chain, check_objects, check_proof, check_size
from kvbm.pools.stores.base import ForgetfulStore, Get, Got, Listed, ObjectStore, Put, Refusal, StoreTrouble
from kvbm.pools.stores.cache_tier import CachedStore

_BATCH = 4  # objects of a call that go together, coded while others are on their way
_BATCHES_UNDER_WAY = 4  # of a call; bounds what is kept of bodies
_ABSENT_WAIT_S = 1.0  # nobody needs the answer now
_LATE_S = 0.5  # how long after its deadline a store may still answer
_MOST_COUNTED = 4096  # namespaces
_OUTCOMES = tuple(ReadOutcome)

Answer = TypeVar("Answer")
Kept = TypeVar("Kept")
Request = TypeVar("Request", Put, Get)


class ObjectPoolOptions(NamedTuple):
    """How a pool of objects works.

    Attributes:
        blocks: k, blocks of an object.
        namespaces: those known from the start, as by `admit`.
        compressed: whether blocks are coded by the type of their elements.
        envelopes: how objects are named and wrapped, for the same k; None: as they are.
        look_s: how often to read the tombstones, and to look for changes of `envelopes`; 0: never.
        name: "" for the store's.
        threads: that wait for the store; 1: the caller's own.
        deadline_s: of a whole call; what is not done then is trouble.
        new_receiver: of objects that go straight into rows; None: each is read into memory of its own first.
        on_trouble: gets one sentence for each call with trouble.
    """

    blocks: int = 1
    namespaces: Iterable[Namespace] = ()
    compressed: bool = True
    envelopes: Envelopes | None = None
    look_s: float = 0.0
    name: str = ""
    threads: int = 8
    deadline_s: float = 10.0
    new_receiver: NewObjectReceiver | None = None
    on_trouble: Callable[[str], None] = lambda message: None


class BlockObjects:
    """Blocks as objects of a store, an `ObjectPool`.

    A put that finds its name taken reads the header of what is there: the same blocks are a success, also where their
    bytes differ, for a block computed twice differs in its last bits and each object proves its own bytes.

    Blocks are coded in the caller's thread while other objects are on their way. Only that thread touches rows, and
    threads of a native call that it waits for: an answer that comes too late changes nothing.

    Attributes:
        name: the store, the same for every instance that uses it in the same way; claims are kept under it.
        store: where the objects lie; closed with the pool.
        forgets: whether the store drops objects by itself.
    """

    def __init__(
        self,
        store: ObjectStore,
        block_bytes: int,
        checksums: ChecksumRows,
        coder: BlockCoder,
        options: ObjectPoolOptions = ObjectPoolOptions(),  # noqa: B008  # frozen
    ) -> None:
        """Make the pool.

        Nothing is asked of the store. Raises LayoutError: below 1 byte, or a k that no header can say.
        """
        blocks = options.blocks
        check_size("OBJECT", 1, block_bytes)
        if not 1 <= blocks <= MOST_BLOCKS:
            raise LayoutError(f"OBJECT pool: {blocks} blocks to an object; give 1 to {MOST_BLOCKS}")
        self.tier = Tier.OBJECT
        self.block_bytes = block_bytes
        self.reach = Reach.CLUSTER
        self.blocks = blocks
        self.name = options.name or store.name
        self.store = store
        self.forgets = store.forgets
        self._checksum_rows = checksums
        self._coder = coder
        self._compressed = options.compressed
        self._deadline_s = options.deadline_s
        self._on_trouble = options.on_trouble
        self._reader = ObjectReader(blocks, block_bytes, checksums, coder)
        self._direct = DirectReads(options.new_receiver()) if options.new_receiver is not None else None
        self._envelopes: Envelopes = options.envelopes or PlainEnvelope(blocks, header_bytes(blocks))
        self._namespaces: dict[NamespaceId, Namespace] = {}
        self._object_bytes: dict[NamespaceId, int] = {}  # of the last object of a namespace that passed by
        self._refused: set[NamespaceId] = set()  # namespaces whose refusal was reported
        self._stats = ObjectStats()
        self._lock = threading.Lock()  # of the counters, `refused` and `closed`
        self._closed = False
        self._told_unusable = False
        threads, look_s = options.threads, options.look_s
        self._workers = ThreadPoolExecutor(threads, thread_name_prefix="kvbm-object") if threads > 1 else None
        self.admit(options.namespaces)
        self._look_s = look_s
        self._tombstones = Tombstones(store, look_s, options.deadline_s) if look_s and not store.forgets else None
        self._ending = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="kvbm-object-watch", daemon=True) if look_s else None
        if self._watcher is not None:
            self._watcher.start()

    def admit(self, namespaces: Iterable[Namespace]) -> None:
        """Learn how the blocks of these namespaces are coded and whose they are; those of others stay raw."""
        self._namespaces |= {namespace.id: namespace for namespace in namespaces}

    def put(self, rows: np.ndarray, proof: Proof, at: Sequence[int] | None = None) -> list[bool]:
        """Put each object that is not there yet; for each block whether the store now holds it."""
        count = check_objects(self.name, check_proof(self.name, rows, proof, self.block_bytes, at), self.blocks)
        indexes = np.arange(count * self.blocks) if at is None else np.asarray(at, dtype=np.int64)
        envelope = self._envelope(proof.namespace)
        if isinstance(envelope, Refusal):
            return [False] * len(indexes)
        names = envelope.names(proof.namespace, _last_hashes(proof.hashes, self.blocks))
        if gone := self._withdrawn(names):
            return self._put_others(rows, proof, indexes, [name not in gone for name in names])
        call = _Call("put", count, self._deadline_s)
        stored_bytes = [0] * count

        def start(batch: slice) -> Future[list[Refusal | None]]:
            puts = self._encode(envelope, names[batch], rows, self._part(proof, batch), self._part_of(indexes, batch))
            stored_bytes[batch] = [put.size_bytes for put in puts]
            return self._submit(self.store.put, puts, call)

        new, taken = [], []
        for batch, refusals in self._answers(call, start, count):
            for index, refusal in enumerate(refusals, batch.start):
                if refusal is None:
                    new.append(index)
                elif refusal.trouble is StoreTrouble.TAKEN:
                    taken.append(index)
                else:
                    call.troubles.append(refusal.words)
        found = self._same(envelope, proof, names, taken, call) if taken else []
        self._count_puts(proof.namespace, [stored_bytes[index] for index in new], len(found), count)
        self._report(call, count - len(new) - len(found))
        held = np.zeros(count, dtype=bool)
        held[new + found] = True
        return [bool(ok) for ok in held.repeat(self.blocks)]

    def get(
        self, namespace: NamespaceId, chain: bytes, rows: np.ndarray, at: Sequence[int] | None = None, first: int = 0
    ) -> ReadResult:
        """Fill rows with these blocks, each held to its object's header and to its checksum."""
        count = check_chain(self.name, rows, chain, self.block_bytes, self.blocks, at, first)
        # Blocks [first, first + wanted) of the chain lie in its objects [begin, end), at [lead, lead + count) of their
        # blocks.
        begin, end = first // self.blocks, -(-(first + count) // self.blocks) if count else first // self.blocks
        lead, step = first - begin * self.blocks, self.blocks * HASH_BYTES
        envelope = self._envelope(namespace)
        if isinstance(envelope, Refusal):
            return all_failed(count)
        wanted = WantedBlocks(namespace, chain[begin * step : end * step], self.blocks, rows)
        wanted.targets.ravel()[lead : lead + count] = np.arange(count) if at is None else at
        names = envelope.names(namespace, _last_hashes(wanted.chain, self.blocks))
        call = _Call("get", end - begin, self._deadline_s)

        rest = self._receive(envelope, wanted, names, call)
        most_bytes = envelope.lead_bytes + self.blocks * self.block_bytes + envelope.extra_bytes

        def gets(indexes: Iterable[int]) -> list[Get]:
            expected_bytes = self._object_bytes.get(namespace, 0)
            return [Get(names[index], expected_bytes=expected_bytes, most_bytes=most_bytes) for index in indexes]

        def start(batch: slice) -> Future[list[Got | Refusal]]:
            return self._submit(self.store.get, gets(rest[batch]), call)

        for batch, answers in self._answers(call, start, len(rest)):
            self._take(envelope, wanted, names, rest[batch], answers, call)
            corrupt = [index for index in rest[batch] if wanted.is_corrupt(index)]
            if corrupt and isinstance(self.store, CachedStore):
                again = self.store.reread(gets(corrupt), call.left_s())
                self._take(envelope, wanted, names, corrupt, again, call)
        self._count_gets(wanted.outcomes)
        self._report(call, int((wanted.outcomes[:, 0] == ReadOutcome.FAILED).sum()))
        part = slice(lead, lead + count)
        outcomes = [_OUTCOMES[outcome] for outcome in wanted.outcomes.ravel()[part].tolist()]
        return ReadResult(outcomes, wanted.sums.ravel()[part])

    def absent(self, namespace: NamespaceId, hashes: Sequence[bytes]) -> list[bool]:
        """For each object, by the hash of its last block, whether a store that forgets has it no more, for certain."""
        envelope = self._envelopes.of(namespace, self._namespaces.get(namespace))
        if isinstance(envelope, Refusal) or not isinstance(self.store, ForgetfulStore):
            return [False] * len(hashes)
        return self.store.absent(envelope.names(namespace, hashes), min(_ABSENT_WAIT_S, self._deadline_s))

    def names(self, namespace: NamespaceId, hashes: Sequence[bytes]) -> list[str]:
        """What the objects are named whose last blocks have these hashes.

        Raises PoolError: they have no names here, for want of keys.
        """
        envelope = self._envelopes.of(namespace, self._namespaces.get(namespace))
        if isinstance(envelope, Refusal):
            raise PoolError(f"OBJECT pool {self.name}: {envelope.words}")
        return envelope.names(namespace, hashes)

    def describe(self, names: Sequence[str]) -> list[Described | Refusal | None]:
        """What objects hold, by their headers alone, of whatever block_bytes;

        None for what is not what its name says, or whose keys are not here.
        """
        envelopes = [self._envelopes.of_name(name) for name in names]
        mine = [index for index, envelope in enumerate(envelopes) if envelope is not None]
        described: list[Described | Refusal | None] = [None] * len(names)
        gets = [Get(names[index], 0, envelopes[index].lead_bytes) for index in mine]  # type: ignore[union-attr]
        for index, answer in zip(mine, self.store.get(gets, self._deadline_s) if gets else (), strict=True):
            envelope = envelopes[index]
            assert envelope is not None
            described[index] = (
                answer if isinstance(answer, Refusal) else self._reader.describe(envelope, names[index], answer)
            )
        return described

    def listed(self, after: str = "") -> Iterator[Listed]:
        """The objects of this pool whose names sort behind `after`, in the order of names.

        Raises PoolError: the store refused.
        """
        return self.store.listed(f"{self.blocks}/", self._deadline_s, after)

    def delete(self, names: Sequence[str]) -> list[bool]:
        """Delete objects; for each whether nothing has its name any more."""
        return [refusal is None for refusal in self.store.delete(names, self._deadline_s)] if names else []

    def stats(self) -> ObjectStats:
        """What has been counted so far."""
        with self._lock:
            return self._stats._replace(away=getattr(self.store, "away", ""))

    def look(self) -> None:
        """Read the tombstones now, and look whether keys have changed."""
        self._envelopes.refresh()
        if self._tombstones is not None:
            self._tombstones.look()

    def close(self) -> None:
        """Drop what has not begun, wait for what has (bounded by the deadline), close the store. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._ending.set()
        if self._direct is not None:
            self._direct.close()
        if self._workers is not None:
            self._workers.shutdown(wait=True, cancel_futures=True)
        if self._watcher is not None:
            self._watcher.join(self._deadline_s + _LATE_S)
        self.store.close()

    # -- blocks and objects -------------------------------------------------------------------------------------------

    def _part(self, proof: Proof, batch: slice) -> Proof:
        """Of some objects of a run."""
        hashes = proof.hashes[batch.start * self.blocks * HASH_BYTES : batch.stop * self.blocks * HASH_BYTES]
        return proof._replace(hashes=hashes, checksums=self._part_of(proof.checksums, batch))

    def _part_of(self, column: np.ndarray, batch: slice) -> np.ndarray:
        part: np.ndarray = column[batch.start * self.blocks : batch.stop * self.blocks]
        return part

    def _withdrawn(self, names: Sequence[str]) -> set[str]:
        """Those of these names that are in tombstones."""
        return self._tombstones.among(names) if self._tombstones is not None else set()

    def _put_others(self, rows: np.ndarray, proof: Proof, indexes: np.ndarray, others_of: Sequence[bool]) -> list[bool]:
        """Put the objects of a run that are not withdrawn."""
        kept = np.array(others_of).repeat(self.blocks)
        hashes = np.frombuffer(proof.hashes, dtype="V16")[kept].tobytes()
        others = proof._replace(hashes=hashes, checksums=proof.checksums[kept])
        held = np.zeros(len(indexes), dtype=bool)
        held[kept] = self.put(rows, others, indexes[kept].tolist()) if kept.any() else False
        return [bool(ok) for ok in held]

    def _encode(
        self, envelope: ObjectEnvelope, names: Sequence[str], rows: np.ndarray, proof: Proof, indexes: np.ndarray
    ) -> list[Put]:
        """Objects to be put. Copies of the rows: a late request must not see them reused."""
        encoded = self._coder.encode(rows, indexes, self._coding(proof.namespace))
        headers = encode_object_headers(
            proof, encoded.lengths, encoded.codings, self.blocks, self.block_bytes, self._checksum_rows
        )
        ends = np.cumsum(encoded.lengths, dtype=np.int64)[self.blocks - 1 :: self.blocks].tolist()
        return [
            Put(name, envelope.wrap(name, header, encoded.body[begin:end]))
            for name, header, begin, end in zip(names, headers, [0, *ends[:-1]], ends, strict=True)
        ]

    def _receive(
        self, envelope: ObjectEnvelope, wanted: WantedBlocks, names: Sequence[str], call: _Call
    ) -> Sequence[int]:
        """Receive what can go straight into rows; the indexes of the objects that are still wanted."""
        with self._lock:
            closed = self._closed
        if self._direct is None or closed or not envelope.is_plain:
            return range(len(names))
        expected_bytes = self._object_bytes.get(wanted.namespace, 0)
        rest = self._direct.fill(self.store, wanted, names, expected_bytes, call.left_s)
        if len(rest) < len(names):
            gone = self._withdrawn(names)
            wanted.outcomes[[name in gone for name in names]] = ReadOutcome.MISSING
            self._learn_size(wanted)
        return rest

    def _learn_size(self, wanted: WantedBlocks) -> None:
        """How large objects of a namespace are."""
        if wanted.object_bytes:
            self._object_bytes = _with_newest(self._object_bytes, wanted.namespace, wanted.object_bytes)

    def _take(
        self,
        envelope: ObjectEnvelope,
        wanted: WantedBlocks,
        names: Sequence[str],
        indexes: Sequence[int],
        answers: Sequence[Got | Refusal],
        call: _Call,
    ) -> None:
        """Fill rows from what was read of some objects. Trouble, and objects with other blocks, become outcomes."""
        found = []
        gone = self._withdrawn(names)
        for index, answer in zip(indexes, answers, strict=True):
            wanted.outcomes[index] = ReadOutcome.FAILED
            if names[index] in gone or (isinstance(answer, Refusal) and answer.trouble is StoreTrouble.ABSENT):
                wanted.outcomes[index] = ReadOutcome.MISSING
            elif isinstance(answer, Refusal) and answer.trouble is StoreTrouble.UNUSABLE:
                wanted.outcomes[index] = ReadOutcome.CORRUPT
                self._tell_unusable(answer)
            elif isinstance(answer, Refusal):
                call.troubles.append(answer.words)
            else:
                found.append(FoundObject(index, names[index], answer))
        if not found:
            return
        call.troubles += self._reader.fill(envelope, wanted, found)
        self._learn_size(wanted)

    def _tell_unusable(self, refusal: Refusal) -> None:
        """One warning for what has an object's name and can be none."""
        with self._lock:
            is_new, self._told_unusable = not self._told_unusable, True
        if is_new:
            self._on_trouble(
                f"OBJECT pool {self.name}: {refusal.words}; it counts as damaged, and others like it do without a word"
            )

    def _same(
        self, envelope: ObjectEnvelope, proof: Proof, names: Sequence[str], taken: Sequence[int], call: _Call
    ) -> list[int]:
        """Of the objects whose names are taken, those that hold the blocks that were to be put."""
        answers = self.store.get([Get(names[index], 0, envelope.lead_bytes) for index in taken], call.left_s())
        call.troubles += [answer.words for answer in answers if isinstance(answer, Refusal)]
        found = [
            FoundObject(index, names[index], answer)
            for index, answer in zip(taken, answers, strict=True)
            if isinstance(answer, Got)
        ]
        same, troubles = self._reader.same_blocks(envelope, proof, found)
        call.troubles += troubles
        return same

    def _coding(self, namespace: NamespaceId) -> Coding:
        known = self._namespaces.get(namespace) if self._compressed else None
        return ELEMENT_CODINGS.get(known.kv_dtype, Coding.RAW) if known is not None else Coding.RAW

    def _envelope(self, namespace: NamespaceId) -> ObjectEnvelope | Refusal:
        """The envelope of a namespace; a refusal is reported once."""
        envelope = self._envelopes.of(namespace, self._namespaces.get(namespace))
        if isinstance(envelope, Refusal):
            with self._lock:
                is_new = namespace not in self._refused
                self._refused.add(namespace)
            if is_new:
                self._on_trouble(f"OBJECT pool {self.name}: {envelope.words}; its blocks are neither put nor got")
        return envelope

    def _watch(self) -> None:
        while True:
            try:
                self.look()
            # of a store or of keys: what is known stays known, and the next look comes
            except Exception as error:  # noqa: BLE001
                self._on_trouble(f"OBJECT pool {self.name}: it could not look for what is withdrawn ({error!r})")
            if self._ending.wait(self._look_s / 2):
                return

    # -- calls --------------------------------------------------------------------------------------------------------

    def _submit(
        self, ask: Callable[[Sequence[Request], float], Answer], requests: Sequence[Request], call: _Call
    ) -> Future[Answer]:
        if self._workers is not None:
            with suppress(RuntimeError):  # Python's executors take nothing more once the interpreter begins to end
                return self._workers.submit(lambda: ask(requests, call.left_s()))
        answered: Future[Answer] = Future()
        answered.set_result(ask(requests, call.left_s()))
        return answered

    def _answers(
        self, call: _Call, start: Callable[[slice], Future[list[Answer]]], count: int
    ) -> Iterator[tuple[slice, list[Answer]]]:
        """Batches of `count` objects of a call with their answers, as they come, until all are there or the deadline
        has passed.
        """
        pending: dict[Future[list[Answer]], slice] = {}
        begin = 0
        while begin < count or pending:
            while begin < count and len(pending) < _BATCHES_UNDER_WAY:
                with self._lock:
                    closed = self._closed
                if closed or call.left_s() <= 0:
                    call.troubles.append("the pool is closed" if closed else call.silence())
                    begin = count
                    break
                batch = slice(begin, min(begin + _BATCH, count))
                pending[start(batch)] = batch
                begin = batch.stop
            done, _ = wait(pending, timeout=call.left_s() + _LATE_S, return_when=FIRST_COMPLETED)
            if pending and not done:
                call.troubles.append(call.silence())
                break
            for future in sorted(done, key=lambda answered: pending[answered].start):
                batch = pending.pop(future)
                if not future.cancelled():
                    yield batch, future.result()
        for future in pending:
            future.cancel()

    def _report(self, call: _Call, failed: int) -> None:
        """One sentence for a call with trouble."""
        if failed:
            first = call.troubles[0] if call.troubles else call.silence()
            self._on_trouble(
                f"OBJECT pool {self.name}: {call.verb} of {failed} of {call.count} objects failed; first: {first}"
            )

    def _count_puts(self, namespace: NamespaceId, stored_bytes: Sequence[int], found: int, count: int) -> None:
        if stored_bytes:
            self._object_bytes = _with_newest(self._object_bytes, namespace, stored_bytes[-1])
        with self._lock:
            stats = self._stats
            put, whole = stats.namespaces.get(namespace, NamespaceBytes()), stats.put_bytes
            raw, stored = len(stored_bytes) * self.blocks * self.block_bytes, sum(stored_bytes)
            self._stats = stats._replace(
                put_objects=stats.put_objects + len(stored_bytes),
                found_objects=stats.found_objects + found,
                refused_objects=stats.refused_objects + count - len(stored_bytes) - found,
                namespaces=_with_newest(
                    stats.namespaces, namespace, NamespaceBytes(put.raw_bytes + raw, put.stored_bytes + stored)
                ),
                put_bytes=NamespaceBytes(whole.raw_bytes + raw, whole.stored_bytes + stored),
            )

    def _count_gets(self, outcomes: np.ndarray) -> None:
        good = int((outcomes == ReadOutcome.GOOD).any(axis=1).sum())
        missing, failed = (int((outcomes[:, 0] == which).sum()) for which in (ReadOutcome.MISSING, ReadOutcome.FAILED))
        with self._lock:
            stats = self._stats
            self._stats = stats._replace(
                got_objects=stats.got_objects + good,
                missing_objects=stats.missing_objects + missing,
                corrupt_objects=stats.corrupt_objects + len(outcomes) - good - missing - failed,
                failed_objects=stats.failed_objects + failed,
            )


def _with_newest(known: dict[NamespaceId, Kept], namespace: NamespaceId, value: Kept) -> dict[NamespaceId, Kept]:
    """The same with one more, as the newest; of too many the oldest is left out, since clients choose namespaces."""
    others = [one for one in known.items() if one[0] != namespace]
    return dict([*others[max(0, len(others) + 1 - _MOST_COUNTED) :], (namespace, value)])


class _Call:
    """One put or get of `count` objects, which is over at its deadline."""

    def __init__(self, verb: str, count: int, deadline_s: float) -> None:
        self.verb = verb
        self.count = count
        self.troubles: list[str] = []
        self._deadline_s = deadline_s
        self._ends = time.monotonic() + deadline_s

    def left_s(self) -> float:
        return max(0.0, self._ends - time.monotonic())

    def silence(self) -> str:
        return f"no answer within {self._deadline_s:g} s"


def _last_hashes(hashes: bytes, blocks: int) -> list[bytes]:
    """Of a packed run of whole objects, what each is named by."""
    step = blocks * HASH_BYTES
    return [hashes[end - HASH_BYTES : end] for end in range(step, len(hashes) + 1, step)]
