"""OBJECT: blocks in a store of objects, k to an object, found by namespace and hash, without slots and without an owner.

An object is named <k>/<namespace id, hex>/<hash of its last block, hex>, so that objects of two k never meet; object_header.py says
what is in one, sealing.py how it is encrypted and named where a tenant's keys are given. What a pool keeps besides blocks lies under
".kvbm/"; names that the janitor has withdrawn there are neither put nor got.
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
from kvbm.core.ids import HASH_BYTES, Epoch, Namespace, NamespaceId, Reach, Tier
from kvbm.pools.base import NamespaceBytes, ObjectStats, Proof, ReadOutcome, ReadResult
from kvbm.pools.object.coding import ELEMENT_CODINGS, BlockCoder, Coding
from kvbm.pools.object.envelope import Plain, Wrapping, Wrappings, newer_object
from kvbm.pools.object.header import (
    MOST_BLOCKS,
    OBJECT_VERSION,
    Headers,
    decode_object_headers,
    encode_object_headers,
    header_bytes,
    newer_version,
)
from kvbm.pools.object.tombstones import Withdrawn
from kvbm.pools.run import all_failed, check_chain, check_objects, check_proof, check_size
from kvbm.pools.stores.base import ForgetfulStore, Get, Got, Listed, Put, Refusal, Store, Trouble
from kvbm.pools.stores.cache_tier import FrontedStore

_LOT = 4  # objects of a call that go together, coded while others are on their way
_LOTS_UNDER_WAY = 4  # of a call; bounds what is kept of bodies
_ABSENT_WAIT_S = 1.0  # nobody needs the answer now
_LATE_S = 0.5  # how long after its deadline a store may still answer
_OUTCOMES = tuple(ReadOutcome)

Answer = TypeVar("Answer")
Request = TypeVar("Request", Put, Get)


class Described(NamedTuple):
    """What an object holds, by a header that is proved by itself, by the object's name and by its size.

    Attributes:
        hashes: packed, k of them, in the order of their chain.
    """

    namespace: NamespaceId
    hashes: bytes
    epoch: Epoch
    size_bytes: int


class BlockObjects:
    """Blocks as objects of a store, an `ObjectPool`.

    A put that finds its name taken reads the header of what is there: the same blocks are a success, also where their bytes differ, for
    a block computed twice differs in its last bits and each object proves its own bytes.

    Blocks are coded in the caller's thread while other objects are on their way. Only that thread touches rows: an answer that comes
    too late changes nothing.

    Attributes:
        name: the store, the same for every instance that uses it in the same way; claims are kept under it.
        store: where the objects lie; closed with the pool.
        forgets: whether the store drops objects by itself.
    """

    def __init__(
        self,
        store: Store,
        block_bytes: int,
        checksums: ChecksumRows,
        coder: BlockCoder,
        *,
        blocks: int = 1,
        namespaces: Iterable[Namespace] = (),
        compressed: bool = True,
        wrappings: Wrappings | None = None,
        look_s: float = 0.0,
        name: str = "",
        threads: int = 8,
        deadline_s: float = 10.0,
        on_trouble: Callable[[str], None] = lambda message: None,
    ) -> None:
        """Make the pool. Nothing is asked of the store.

        Args:
            blocks: k, blocks of an object.
            namespaces: those known from the start, as by `admit`.
            compressed: whether blocks are coded by the type of their elements.
            wrappings: how objects are named and wrapped; None: plainly. They are for the same k.
            look_s: how often to look for what is withdrawn, and for changes of `wrappings`; 0: never.
            name: "" for the store's.
            threads: that wait for the store; 1: the caller's own.
            deadline_s: of a whole call; what is not done then is trouble.
            on_trouble: gets one sentence for each call with trouble.
        Raises: LayoutError: below 1 byte, or a k that no header can say.
        """
        check_size("OBJECT", 1, block_bytes)
        if not 1 <= blocks <= MOST_BLOCKS:
            raise LayoutError(f"OBJECT pool: {blocks} blocks to an object; give 1 to {MOST_BLOCKS}")
        self.tier = Tier.OBJECT
        self.block_bytes = block_bytes
        self.reach = Reach.CLUSTER
        self.blocks = blocks
        self.name = name or store.name
        self.store = store
        self.forgets = store.forgets
        self._checksum_rows = checksums
        self._coder = coder
        self._compressed = compressed
        self._deadline_s = deadline_s
        self._on_trouble = on_trouble
        self._header_bytes = header_bytes(blocks)
        self._plain = Plain(blocks, self._header_bytes)
        self._wrappings: Wrappings = wrappings or self._plain
        self._namespaces: dict[NamespaceId, Namespace] = {}
        self._object_bytes: dict[NamespaceId, int] = {}  # of the last object of a namespace that passed by
        self._refused: set[NamespaceId] = set()  # of which it has been said
        self._stats = ObjectStats()
        self._lock = threading.Lock()  # of the counters, `refused` and `closed`
        self._closed = False
        self._workers = ThreadPoolExecutor(threads, thread_name_prefix="kvbm-object") if threads > 1 else None
        self.admit(namespaces)
        self._look_s = look_s
        self._withdrawn = Withdrawn(store, look_s, deadline_s) if look_s and not store.forgets else None
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
        wrapping = self._wrapping(proof.namespace)
        if isinstance(wrapping, Refusal):
            return [False] * len(indexes)
        names = wrapping.names(proof.namespace, _last_hashes(proof.hashes, self.blocks))
        if gone := self._gone(names):
            return self._put_others(rows, proof, indexes, [name not in gone for name in names])
        call = _Call("put", count, self._deadline_s)
        stored_bytes = [0] * count

        def start(lot: slice) -> Future[list[Refusal | None]]:
            puts = self._encode(wrapping, names[lot], rows, self._part(proof, lot), self._part_of(indexes, lot))
            stored_bytes[lot] = [put.size_bytes for put in puts]
            return self._submit(self.store.put, puts, call)

        new, taken = [], []
        for lot, refusals in self._answers(call, start):
            for index, refusal in enumerate(refusals, lot.start):
                if refusal is None:
                    new.append(index)
                elif refusal.trouble is Trouble.TAKEN:
                    taken.append(index)
                else:
                    call.troubles.append(refusal.words)
        found = self._same(wrapping, proof, names, taken, call) if taken else []
        self._count_puts(proof.namespace, [stored_bytes[index] for index in new], len(found), count)
        self._report(call, count - len(new) - len(found))
        held = np.zeros(count, dtype=bool)
        held[new + found] = True
        return [bool(ok) for ok in held.repeat(self.blocks)]

    def get(
        self, namespace: NamespaceId, chain: bytes, rows: np.ndarray, at: Sequence[int] | None = None, first: int = 0
    ) -> ReadResult:
        """Fill rows with these blocks, each held to its object's header and to its checksum."""
        wanted = check_chain(self.name, rows, chain, self.block_bytes, self.blocks, at, first)
        # Blocks [first, first + wanted) of the chain lie in its objects [begin, end), at [lead, lead + wanted) of their blocks.
        begin, end = first // self.blocks, -(-(first + wanted) // self.blocks) if wanted else first // self.blocks
        lead, step = first - begin * self.blocks, self.blocks * HASH_BYTES
        wrapping = self._wrapping(namespace)
        if isinstance(wrapping, Refusal):
            return all_failed(wanted)
        asked = _Asked(namespace, chain[begin * step : end * step], self.blocks, rows)
        asked.targets.ravel()[lead : lead + wanted] = np.arange(wanted) if at is None else at
        names = wrapping.names(namespace, _last_hashes(asked.chain, self.blocks))
        call = _Call("get", end - begin, self._deadline_s)

        def gets(indexes: Iterable[int]) -> list[Get]:
            expected_bytes = self._object_bytes.get(namespace, 0)
            return [Get(names[index], expected_bytes=expected_bytes) for index in indexes]

        def start(lot: slice) -> Future[list[Got | Refusal]]:
            return self._submit(self.store.get, gets(range(lot.start, lot.stop)), call)

        for lot, answers in self._answers(call, start):
            self._take(wrapping, asked, names, range(lot.start, lot.stop), answers, call)
            doubted = [index for index in range(lot.start, lot.stop) if asked.is_corrupt(index)]
            if doubted and isinstance(self.store, FrontedStore):
                behind = self.store.doubted(gets(doubted), call.left_s())
                self._take(wrapping, asked, names, doubted, behind, call)
        self._count_gets(asked.outcomes)
        self._report(call, int((asked.outcomes[:, 0] == ReadOutcome.FAILED).sum()))
        part = slice(lead, lead + wanted)
        outcomes = [_OUTCOMES[outcome] for outcome in asked.outcomes.ravel()[part].tolist()]
        return ReadResult(outcomes, asked.sums.ravel()[part])

    def absent(self, namespace: NamespaceId, hashes: Sequence[bytes]) -> list[bool]:
        """For each object, by the hash of its last block, whether a store that forgets has it no more, for certain."""
        wrapping = self._wrappings.of(namespace, self._namespaces.get(namespace))
        if isinstance(wrapping, Refusal) or not isinstance(self.store, ForgetfulStore):
            return [False] * len(hashes)
        return self.store.absent(wrapping.names(namespace, hashes), min(_ABSENT_WAIT_S, self._deadline_s))

    def names(self, namespace: NamespaceId, hashes: Sequence[bytes]) -> list[str]:
        """What the objects are named whose last blocks have these hashes. Raises PoolError: they have no names here, for want of keys."""
        wrapping = self._wrappings.of(namespace, self._namespaces.get(namespace))
        if isinstance(wrapping, Refusal):
            raise PoolError(f"OBJECT pool {self.name}: {wrapping.words}")
        return wrapping.names(namespace, hashes)

    def describe(self, names: Sequence[str]) -> list[Described | Refusal | None]:
        """What objects hold, by their headers alone, of whatever block_bytes; None for what is not what its name says, or whose keys are not here."""
        wrappings = [self._wrappings.of_name(name) for name in names]
        mine = [index for index, wrapping in enumerate(wrappings) if wrapping is not None]
        described: list[Described | Refusal | None] = [None] * len(names)
        gets = [Get(names[index], 0, wrappings[index].lead_bytes) for index in mine]  # type: ignore[union-attr]
        for index, answer in zip(mine, self.store.get(gets, self._deadline_s) if gets else (), strict=True):
            wrapping = wrappings[index]
            assert wrapping is not None
            described[index] = (
                answer if isinstance(answer, Refusal) else self._describe_one(wrapping, names[index], answer)
            )
        return described

    def listed(self, after: str = "") -> Iterator[Listed]:
        """The objects of this pool whose names sort behind `after`, in the order of names. Raises PoolError: the store refused."""
        return self.store.listed(f"{self.blocks}/", self._deadline_s, after)

    def delete(self, names: Sequence[str]) -> list[bool]:
        """Delete objects; for each whether nothing has its name any more."""
        return [refusal is None for refusal in self.store.delete(names, self._deadline_s)] if names else []

    def stats(self) -> ObjectStats:
        """What has been counted so far."""
        with self._lock:
            return self._stats

    def look(self) -> None:
        """See now what is withdrawn, and whether keys have changed."""
        self._wrappings.refresh()
        if self._withdrawn is not None:
            self._withdrawn.look()

    def close(self) -> None:
        """Drop what has not begun, wait for what has (bounded by the deadline), close the store. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._ending.set()
        if self._workers is not None:
            self._workers.shutdown(wait=True, cancel_futures=True)
        if self._watcher is not None:
            self._watcher.join(self._deadline_s + _LATE_S)
        self.store.close()

    # -- blocks and objects -------------------------------------------------------------------------------------------

    def _part(self, proof: Proof, lot: slice) -> Proof:
        """Of some objects of a run."""
        hashes = proof.hashes[lot.start * self.blocks * HASH_BYTES : lot.stop * self.blocks * HASH_BYTES]
        return proof._replace(hashes=hashes, checksums=self._part_of(proof.checksums, lot))

    def _part_of(self, column: np.ndarray, lot: slice) -> np.ndarray:
        part: np.ndarray = column[lot.start * self.blocks : lot.stop * self.blocks]
        return part

    def _gone(self, names: Sequence[str]) -> set[str]:
        """Which of these names are withdrawn."""
        return self._withdrawn.among(names) if self._withdrawn is not None else set()

    def _put_others(self, rows: np.ndarray, proof: Proof, indexes: np.ndarray, others_of: Sequence[bool]) -> list[bool]:
        """Put the objects of a run that are not withdrawn."""
        kept = np.array(others_of).repeat(self.blocks)
        hashes = np.frombuffer(proof.hashes, dtype="V16")[kept].tobytes()
        others = proof._replace(hashes=hashes, checksums=proof.checksums[kept])
        held = np.zeros(len(indexes), dtype=bool)
        held[kept] = self.put(rows, others, indexes[kept].tolist()) if kept.any() else False
        return [bool(ok) for ok in held]

    def _encode(
        self, wrapping: Wrapping, names: Sequence[str], rows: np.ndarray, proof: Proof, indexes: np.ndarray
    ) -> list[Put]:
        """Objects to be put. Copies of the rows: a late request must not see them reused."""
        encoded = self._coder.encode(rows, indexes, self._coding(proof.namespace))
        headers = encode_object_headers(
            proof, encoded.lengths, encoded.codings, self.blocks, self.block_bytes, self._checksum_rows
        )
        ends = np.cumsum(encoded.lengths, dtype=np.int64)[self.blocks - 1 :: self.blocks].tolist()
        return [
            Put(name, wrapping.wrap(name, header, encoded.body[begin:end]))
            for name, header, begin, end in zip(names, headers, [0, *ends[:-1]], ends, strict=True)
        ]

    def _headers(
        self, wrapping: Wrapping, found: Sequence[tuple[str, Got]], block_bytes: int | None
    ) -> tuple[Headers, dict[int, Refusal]]:
        """What the headers say of objects, or of parts of them that begin where they do; and which cannot be opened."""
        room = bytearray(self._header_bytes * len(found))
        unopened = {}
        for place, (name, got) in enumerate(found):
            header = wrapping.open_header(name, got.body)
            if isinstance(header, Refusal):
                unopened[place] = header
            elif version := newer_version(header, self._checksum_rows):
                unopened[place] = newer_object(name, version, OBJECT_VERSION)
            elif len(header) == self._header_bytes:
                room[place * self._header_bytes : (place + 1) * self._header_bytes] = header
        headers = np.frombuffer(room, dtype=np.uint8).reshape(len(found), self._header_bytes)
        sizes = [got.size_bytes - wrapping.extra_bytes for _, got in found]
        return decode_object_headers(headers, sizes, self.blocks, block_bytes, self._checksum_rows), unopened

    def _take(
        self,
        wrapping: Wrapping,
        asked: _Asked,
        names: Sequence[str],
        indexes: Sequence[int],
        answers: Sequence[Got | Refusal],
        call: _Call,
    ) -> None:
        """Fill rows from what was read of some objects. Trouble and what is not theirs become outcomes."""
        there = []
        gone = self._gone(names)
        for index, answer in zip(indexes, answers, strict=True):
            asked.outcomes[index] = ReadOutcome.FAILED
            if names[index] in gone or (isinstance(answer, Refusal) and answer.trouble is Trouble.ABSENT):
                asked.outcomes[index] = ReadOutcome.MISSING
            elif isinstance(answer, Refusal):
                call.troubles.append(answer.words)
            else:
                there.append((index, answer))
        if not there:
            return
        headers, unopened = self._headers(wrapping, [(names[index], got) for index, got in there], self.block_bytes)
        for place, (index, got) in enumerate(there):
            if refusal := unopened.get(place):
                call.troubles.append(refusal.words)
                continue
            asked.outcomes[index] = ReadOutcome.CORRUPT
            same = headers.whole[place] and headers.namespaces[place] == asked.namespace
            if not (same and headers.hashes[place] == asked.hashes(index) and len(got.body) == got.size_bytes):
                continue
            body = wrapping.open_blocks(names[index], got.body)
            if body is None:
                continue
            self._object_bytes[asked.namespace] = got.size_bytes
            lengths, codings = headers.lengths[place], headers.codings[place]
            good, sums = self._coder.decode(body, lengths, codings, asked.rows, asked.targets[index])
            asked.sums[index] = sums
            asked.outcomes[index][good & (sums == headers.checksums[place])] = ReadOutcome.GOOD

    def _same(
        self, wrapping: Wrapping, proof: Proof, names: Sequence[str], taken: Sequence[int], call: _Call
    ) -> list[int]:
        """Which of the objects whose names are taken are there with the blocks that were to be put."""
        answers = self.store.get([Get(names[index], 0, wrapping.lead_bytes) for index in taken], call.left_s())
        there = [(index, answer) for index, answer in zip(taken, answers, strict=True) if isinstance(answer, Got)]
        call.troubles += [answer.words for answer in answers if isinstance(answer, Refusal)]
        headers, unopened = self._headers(wrapping, [(names[index], got) for index, got in there], self.block_bytes)
        same = []
        for place, (index, got) in enumerate(there):
            if refusal := unopened.get(place):
                call.troubles.append(refusal.words)
            elif not headers.whole[place]:
                call.troubles.append(
                    f"{names[index]} is there with {got.size_bytes} bytes that are no whole object; delete it"
                )
            elif (
                headers.namespaces[place] != proof.namespace
                or headers.hashes[place] != self._part(proof, slice(index, index + 1)).hashes
            ):
                call.troubles.append(f"{names[index]} is there and holds other blocks; delete it")
            else:
                same.append(index)
        return same

    def _describe_one(self, wrapping: Wrapping, name: str, got: Got) -> Described | Refusal | None:
        headers, unopened = self._headers(wrapping, [(name, got)], None)
        if unopened:
            return unopened[0]
        namespace, hashes = NamespaceId(headers.namespaces[0]), headers.hashes[0]
        if not headers.whole[0] or wrapping.names(namespace, [hashes[-HASH_BYTES:]]) != [name]:
            return None
        return Described(namespace, hashes, Epoch(int(headers.epochs[0])), got.size_bytes)

    def _coding(self, namespace: NamespaceId) -> Coding:
        known = self._namespaces.get(namespace) if self._compressed else None
        return ELEMENT_CODINGS.get(known.kv_dtype, Coding.RAW) if known is not None else Coding.RAW

    def _wrapping(self, namespace: NamespaceId) -> Wrapping | Refusal:
        """That of a namespace; a refusal is said once."""
        wrapping = self._wrappings.of(namespace, self._namespaces.get(namespace))
        if isinstance(wrapping, Refusal):
            with self._lock:
                is_new = namespace not in self._refused
                self._refused.add(namespace)
            if is_new:
                self._on_trouble(f"OBJECT pool {self.name}: {wrapping.words}; its blocks are neither put nor got")
        return wrapping

    def _watch(self) -> None:
        self.look()
        while not self._ending.wait(self._look_s / 2):
            self.look()

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
        self, call: _Call, start: Callable[[slice], Future[list[Answer]]]
    ) -> Iterator[tuple[slice, list[Answer]]]:
        """Lots of a call's objects with their answers, as they come, until all are there or the deadline has passed."""
        pending: dict[Future[list[Answer]], slice] = {}
        begin = 0
        while begin < call.count or pending:
            while begin < call.count and len(pending) < _LOTS_UNDER_WAY:
                with self._lock:
                    closed = self._closed
                if closed or call.left_s() <= 0:
                    call.troubles.append("the pool is closed" if closed else call.silence())
                    begin = call.count
                    break
                lot = slice(begin, min(begin + _LOT, call.count))
                pending[start(lot)] = lot
                begin = lot.stop
            done, _ = wait(pending, timeout=call.left_s() + _LATE_S, return_when=FIRST_COMPLETED)
            if pending and not done:
                call.troubles.append(call.silence())
                break
            for future in sorted(done, key=lambda answered: pending[answered].start):
                lot = pending.pop(future)
                if not future.cancelled():
                    yield lot, future.result()
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
            self._object_bytes[namespace] = stored_bytes[-1]
        with self._lock:
            stats = self._stats
            put = stats.namespaces.get(namespace, NamespaceBytes())
            raw_bytes = put.raw_bytes + len(stored_bytes) * self.blocks * self.block_bytes
            self._stats = stats._replace(
                put_objects=stats.put_objects + len(stored_bytes),
                found_objects=stats.found_objects + found,
                refused_objects=stats.refused_objects + count - len(stored_bytes) - found,
                namespaces=stats.namespaces
                | {namespace: NamespaceBytes(raw_bytes, put.stored_bytes + sum(stored_bytes))},
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


class _Asked:
    """Blocks that are wanted of m objects.

    Attributes:
        chain: packed hashes of all blocks of the objects.
        targets: (m, k): the row of each block, below 0 where it is not wanted.
        outcomes, sums: (m, k): how each read ended, and its checksum.
    """

    def __init__(self, namespace: NamespaceId, chain: bytes, blocks: int, rows: np.ndarray) -> None:
        self.namespace = namespace
        self.chain = chain
        self.rows = rows
        self._step = blocks * HASH_BYTES
        self.targets = np.full((len(chain) // self._step, blocks), -1, dtype=np.int64)
        self.outcomes = np.full(self.targets.shape, ReadOutcome.FAILED, dtype=np.uint8)
        self.sums = np.zeros(self.targets.shape, dtype=np.uint32)

    def hashes(self, index: int) -> bytes:
        """Of one object's blocks."""
        return self.chain[index * self._step : (index + 1) * self._step]

    def is_corrupt(self, index: int) -> bool:
        """Whether one of an object's blocks that are wanted is not what it should be."""
        return bool(((self.outcomes[index] == ReadOutcome.CORRUPT) & (self.targets[index] >= 0)).any())


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
