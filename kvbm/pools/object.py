"""OBJECT: blocks in a store of objects, k to an object, found by namespace and hash, without slots and without an owner.

An object is named <k>/<namespace id, hex>/<hash of its last block, hex>, so that objects of two k never meet; object_header.py says
what is in one. What a pool keeps besides blocks lies under ".kvbm/".
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import NamedTuple, TypeVar

import numpy as np

from kvbm.core.errors import LayoutError
from kvbm.core.ids import HASH_BYTES, Epoch, Namespace, NamespaceId, Reach, Tier
from kvbm.core.kernels import ChecksumRows
from kvbm.pools.base import Proof, ReadOutcome, ReadResult
from kvbm.pools.coding import ELEMENT_CODINGS, BlockCoder, Coding, Encoded
from kvbm.pools.object_header import MOST_BLOCKS, Headers, decode_object_headers, encode_object_headers, header_bytes
from kvbm.pools.run import check_chain, check_objects, check_proof, check_size
from kvbm.pools.stores.base import Get, Got, Listed, Put, Refusal, Store, Trouble

_LOTS = 4  # parts of a call, so that some objects are coded while others are on their way
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


class NamespaceBytes(NamedTuple):
    """What was put of a namespace: bytes as in memory, and as they lie in the store. The first over the second is the ratio."""

    raw_bytes: int = 0
    stored_bytes: int = 0


class ObjectStats(NamedTuple):
    """What a pool has counted since it was made.

    Attributes:
        put_objects: put by this pool.
        found_objects: that were there already when they were to be put.
        refused_objects: that were not put for some trouble.
        got_objects, missing_objects, corrupt_objects, failed_objects: how reads ended.
        namespaces: bytes put, by namespace.
    """

    put_objects: int = 0
    found_objects: int = 0
    refused_objects: int = 0
    got_objects: int = 0
    missing_objects: int = 0
    corrupt_objects: int = 0
    failed_objects: int = 0
    namespaces: dict[NamespaceId, NamespaceBytes] = {}  # noqa: RUF012  # never changed in place


class BlockObjects:
    """Blocks as objects of a store, an `ObjectPool`.

    A put that finds its name taken reads the header of what is there: the same blocks are a success, also where their bytes differ, for
    a block computed twice differs in its last bits and each object proves its own bytes.

    Blocks are coded in the caller's thread while other objects are on their way. Only that thread touches rows: an answer that comes
    too late changes nothing.

    Attributes:
        name: the store, the same for every instance that uses it in the same way; claims are kept under it.
        store: where the objects lie; closed with the pool.
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
        self._checksum_rows = checksums
        self._coder = coder
        self._compressed = compressed
        self._deadline_s = deadline_s
        self._on_trouble = on_trouble
        self._header_bytes = header_bytes(blocks)
        self._namespaces: dict[NamespaceId, Namespace] = {}
        self._object_bytes: dict[NamespaceId, int] = {}  # of the last object of a namespace that passed by
        self._stats = ObjectStats()
        self._lock = threading.Lock()  # of the counters and of `closed`
        self._closed = False
        self._workers = ThreadPoolExecutor(threads, thread_name_prefix="kvbm-object") if threads > 1 else None
        self.admit(namespaces)

    def admit(self, namespaces: Iterable[Namespace]) -> None:
        """Learn how the blocks of these namespaces are coded; those of others stay raw."""
        self._namespaces |= {namespace.id: namespace for namespace in namespaces}

    def put(self, rows: np.ndarray, proof: Proof, at: Sequence[int] | None = None) -> list[bool]:
        """Put each object that is not there yet; for each block whether the store now holds it."""
        count = check_objects(self.name, check_proof(self.name, rows, proof, self.block_bytes, at), self.blocks)
        indexes = np.arange(count * self.blocks) if at is None else np.asarray(at, dtype=np.int64)
        names = self.names(proof.namespace, _last_hashes(proof.hashes, self.blocks))
        call = _Call("put", count, self._deadline_s)
        stored_bytes = [0] * count

        def start(lot: slice) -> Future[list[Refusal | None]]:
            bodies = self._encode(rows, proof, indexes, lot)
            stored_bytes[lot] = [len(body) for body in bodies]
            puts = [Put(name, body) for name, body in zip(names[lot], bodies, strict=True)]
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
        found = self._same(proof, [names[index] for index in taken], taken, call) if taken else []
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
        hashes = chain[begin * step : end * step]
        targets = np.full((end - begin, self.blocks), -1, dtype=np.int64)
        targets.ravel()[lead : lead + wanted] = np.arange(wanted) if at is None else at
        outcomes = np.full(targets.shape, ReadOutcome.FAILED, dtype=np.uint8)
        sums = np.zeros(targets.shape, dtype=np.uint32)
        names = self.names(namespace, _last_hashes(hashes, self.blocks))
        call = _Call("get", end - begin, self._deadline_s)

        def start(lot: slice) -> Future[list[Got | Refusal]]:
            expected_bytes = self._object_bytes.get(namespace, 0)
            return self._submit(self.store.get, [Get(name, expected_bytes=expected_bytes) for name in names[lot]], call)

        for lot, answers in self._answers(call, start):
            there = []
            for index, answer in enumerate(answers, lot.start):
                if isinstance(answer, Got):
                    there.append((index, answer))
                elif answer.trouble is Trouble.ABSENT:
                    outcomes[index] = ReadOutcome.MISSING
                else:
                    call.troubles.append(answer.words)
            self._decode(namespace, hashes, there, rows, targets, outcomes, sums)
        self._count_gets(outcomes)
        self._report(call, int((outcomes[:, 0] == ReadOutcome.FAILED).sum()))
        asked = slice(lead, lead + wanted)
        return ReadResult([_OUTCOMES[outcome] for outcome in outcomes.ravel()[asked].tolist()], sums.ravel()[asked])

    def names(self, namespace: NamespaceId, hashes: Sequence[bytes]) -> list[str]:
        """What the objects are named whose last blocks have these hashes."""
        folder = f"{self.blocks}/{namespace.hex()}"
        return [f"{folder}/{block_hash.hex()}" for block_hash in hashes]

    def describe(self, names: Sequence[str]) -> list[Described | Refusal | None]:
        """What objects hold, by their headers alone, of whatever block_bytes; None for one that is not what its name says."""
        gets = [Get(name, 0, self._header_bytes) for name in names]
        answers = self.store.get(gets, self._deadline_s) if gets else []
        there = [index for index, answer in enumerate(answers) if isinstance(answer, Got)]
        headers = self._headers([answer for answer in answers if isinstance(answer, Got)], None)
        described: list[Described | Refusal | None] = [
            answer if isinstance(answer, Refusal) else None for answer in answers
        ]
        for place, index in enumerate(there):
            namespace, hashes = NamespaceId(headers.namespaces[place]), headers.hashes[place]
            if headers.whole[place] and self.names(namespace, [hashes[-HASH_BYTES:]]) == [names[index]]:
                size_bytes = self._header_bytes + int(headers.body_bytes[place])
                described[index] = Described(namespace, hashes, Epoch(int(headers.epochs[place])), size_bytes)
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

    def close(self) -> None:
        """Drop what has not begun, wait for what has (bounded by the deadline), close the store. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if self._workers is not None:
            self._workers.shutdown(wait=True, cancel_futures=True)
        self.store.close()

    # -- blocks and objects -------------------------------------------------------------------------------------------

    def _encode(self, rows: np.ndarray, proof: Proof, indexes: np.ndarray, lot: slice) -> list[memoryview]:
        """Some objects of a run, each in one piece. A copy of the rows: a late request must not see them reused."""
        blocks = slice(lot.start * self.blocks, lot.stop * self.blocks)
        part = proof._replace(
            hashes=proof.hashes[blocks.start * HASH_BYTES : blocks.stop * HASH_BYTES], checksums=proof.checksums[blocks]
        )
        coding = self._coding(proof.namespace)
        if coding is Coding.RAW:
            return self._encode_raw(rows, part, indexes[blocks])
        encoded = self._coder.encode(rows, indexes[blocks], coding)
        headers = self._new_headers(part, encoded.lengths, encoded.codings)
        ends = np.cumsum(encoded.lengths, dtype=np.int64)[self.blocks - 1 :: self.blocks].tolist()
        bodies = []
        for header, begin, end in zip(headers, [0, *ends], ends, strict=False):
            body = np.empty(len(header) + end - begin, dtype=np.uint8)
            body[: len(header)] = header
            body[len(header) :] = encoded.body[begin:end]
            bodies.append(body.data)
        return bodies

    def _encode_raw(self, rows: np.ndarray, proof: Proof, indexes: np.ndarray) -> list[memoryview]:
        lengths = np.full(len(indexes), self.block_bytes, dtype=np.uint32)
        headers = self._new_headers(proof, lengths, np.full(len(indexes), Coding.RAW, dtype=np.uint8))
        bodies = np.empty((len(headers), self._header_bytes + self.blocks * self.block_bytes), dtype=np.uint8)
        bodies[:, : self._header_bytes] = headers
        for body, which in zip(bodies, indexes.reshape(-1, self.blocks), strict=True):
            blocks = body[self._header_bytes :].reshape(self.blocks, self.block_bytes)
            np.take(rows, which, axis=0, out=blocks, mode="clip")  # "raise" would buffer; the indexes have been checked
        return [body.data for body in bodies]

    def _new_headers(self, proof: Proof, lengths: np.ndarray, codings: np.ndarray) -> np.ndarray:
        return encode_object_headers(proof, lengths, codings, self.blocks, self.block_bytes, self._checksum_rows)

    def _headers(self, found: Sequence[Got], block_bytes: int | None) -> Headers:
        """What the headers say that objects, or parts of them, begin with. One that is cut short says nothing."""
        headers = np.zeros((len(found), self._header_bytes), dtype=np.uint8)
        for header, got in zip(headers, found, strict=True):
            begin = np.frombuffer(got.body, dtype=np.uint8)[: self._header_bytes]
            header[: len(begin)] = begin
        sizes = [got.size_bytes for got in found]
        return decode_object_headers(headers, sizes, self.blocks, block_bytes, self._checksum_rows)

    def _decode(
        self,
        namespace: NamespaceId,
        chain: bytes,
        there: Sequence[tuple[int, Got]],
        rows: np.ndarray,
        targets: np.ndarray,
        outcomes: np.ndarray,
        sums: np.ndarray,
    ) -> None:
        """Fill rows from objects that were read; `there` has the place of each among `targets`, `outcomes` and `sums`."""
        if not there:
            return
        headers = self._headers([got for _, got in there], self.block_bytes)
        step = self.blocks * HASH_BYTES
        for place, (index, got) in enumerate(there):
            outcomes[index] = ReadOutcome.CORRUPT
            same = headers.namespaces[place] == namespace
            same = same and headers.hashes[place] == chain[index * step : (index + 1) * step]
            if not (same and headers.whole[place] and len(got.body) == got.size_bytes):
                continue
            self._object_bytes[namespace] = got.size_bytes
            body = np.frombuffer(got.body, dtype=np.uint8)[self._header_bytes :]
            encoded = Encoded(body, headers.lengths[place], headers.codings[place])
            good, sums[index] = self._coder.decode(*encoded, rows, targets[index])
            outcomes[index][good & (sums[index] == headers.checksums[place])] = ReadOutcome.GOOD

    def _same(self, proof: Proof, names: Sequence[str], indexes: Sequence[int], call: _Call) -> list[int]:
        """Which of the objects that are there hold the blocks that were to be put."""
        answers = self.store.get([Get(name, 0, self._header_bytes) for name in names], call.left_s())
        headers = self._headers(
            [answer if isinstance(answer, Got) else Got(b"", 0) for answer in answers], self.block_bytes
        )
        step = self.blocks * HASH_BYTES
        same = []
        for place, (index, answer) in enumerate(zip(indexes, answers, strict=True)):
            hashes = proof.hashes[index * step : (index + 1) * step]
            if isinstance(answer, Refusal):
                call.troubles.append(answer.words)
            elif not headers.whole[place]:
                call.troubles.append(
                    f"{names[place]} is there with {answer.size_bytes} bytes that are no whole object; delete it"
                )
            elif headers.namespaces[place] != proof.namespace or headers.hashes[place] != hashes:
                call.troubles.append(f"{names[place]} is there and holds other blocks; delete it")
            else:
                same.append(index)
        return same

    def _coding(self, namespace: NamespaceId) -> Coding:
        known = self._namespaces.get(namespace) if self._compressed else None
        return ELEMENT_CODINGS.get(known.kv_dtype, Coding.RAW) if known is not None else Coding.RAW

    # -- calls --------------------------------------------------------------------------------------------------------

    def _submit(
        self, ask: Callable[[Sequence[Request], float], Answer], requests: Sequence[Request], call: _Call
    ) -> Future[Answer]:
        if self._workers is not None:
            return self._workers.submit(ask, requests, call.left_s())
        answered: Future[Answer] = Future()
        answered.set_result(ask(requests, call.left_s()))
        return answered

    def _answers(
        self, call: _Call, start: Callable[[slice], Future[list[Answer]]]
    ) -> Iterator[tuple[slice, list[Answer]]]:
        """Lots of a call's objects with their answers, as they come, until all are there or the deadline has passed."""
        pending: dict[Future[list[Answer]], slice] = {}
        size = max(1, -(-call.count // _LOTS))
        for begin in range(0, call.count, size):
            with self._lock:
                closed = self._closed
            if closed or call.left_s() <= 0:
                call.troubles.append("the pool is closed" if closed else call.silence())
                break
            lot = slice(begin, min(begin + size, call.count))
            pending[start(lot)] = lot
        while pending:
            done, _ = wait(pending, timeout=call.left_s() + _LATE_S, return_when=FIRST_COMPLETED)
            if not done:
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
