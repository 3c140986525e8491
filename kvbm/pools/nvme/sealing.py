"""Blocks of NVME that only their tenant's keys open: a block engine around another, which seals what it writes and
opens what it reads.

What lies in a sealed slot has the size of the block; behind the slot's header, whose version is 2, follows the seal:

    at  bytes  field
     0      8  key id, as tenant_keys.py makes it
     8     16  salt of the engine that wrote it, random
    24      8  counter of that engine, from 1
    32     16  tag
    48      4  CRC-32C of the block as it was before, encrypted as the bytes behind the block
    52      8  zero
    60      4  CRC-32C of the 60 bytes above

All integers are little-endian. The block is AES-256-GCM under a key of its own for each salt, HMAC-SHA-256 of the
tenant's key and the salt; the nonce is the counter, so none comes twice, however much is written. Authenticated with it
are namespace, hash, and the seal up to its tag: a block does not open in another's place. The tag proves the bytes, so
the header's checksum of them is 0.
"""

from __future__ import annotations

import os
import queue
import struct
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from kvbm.core.backend import ChecksumRows
from kvbm.core.errors import ConfigError, MissingExtraError, PoolError
from kvbm.core.ids import HASH_BYTES, Namespace, NamespaceId
from kvbm.pools.base import ReadOutcome
from kvbm.pools.nvme.block_io import PAGE_BYTES, BlockEngine, OpenEngine
from kvbm.pools.nvme.slot_header import SEAL_BYTES
from kvbm.pools.tenant_keys import KEY_ID_BYTES, KeySource, TenantKeys, digest
from kvbm.safe_log import SafeLog

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.algorithms import AES

log = SafeLog()

_SALT_BYTES = 16
_TAG_BYTES = 16
_SEAL = np.dtype(
    [
        ("key_id", "u1", KEY_ID_BYTES),
        ("salt", "u1", _SALT_BYTES),
        ("counter", "<u8"),
        ("tag", "u1", _TAG_BYTES),
        ("checksum", "u1", 4),
        ("zero", "u1", 8),
        ("crc", "<u4"),
    ]
)
_PROVED_BYTES = 60  # what the seal's own CRC covers
_BOUND_BYTES = 32  # of the seal, before the tag: key id, salt and counter
_SEALED_BYTES = 52  # of the seal, up to the end of the checksum
_NONCE = struct.Struct("<QI")
_CHECKSUM = struct.Struct("<I")
_NOBODY = bytes(HASH_BYTES)  # the namespace of zeros that an erasure writes
_GROUP_BYTES = 4 << 20  # opened while the next ones are read, sealed while the last ones are written
_ROOMS = 2  # groups under way of a run
_MOST_CIPHERS = 256  # by salt; each start of an instance has made one
_LOOK_S = 2.0  # how often to look whether the keys have changed
_COMMAND_EVERY_S = 300.0  # how often a command that prints keys is asked again
_LACKING_S = 20.0  # and after a block needed a key that is not here
_CLOSE_S = 15.0  # longer than a command that prints keys may take


class SealingEngine(Protocol):
    """A block engine that keeps a seal with each block; otherwise as `BlockEngine`."""

    @property
    def io(self) -> str: ...
    @property
    def refusal(self) -> str: ...
    def read(
        self,
        slots: np.ndarray,
        rows: np.ndarray,
        at: np.ndarray,
        namespace: bytes,
        hashes: bytes,
        seals: np.ndarray | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """With `seals`, (n, 64) uint8, only blocks with a seal are GOOD, and it is put there; without, only blocks that
        have none.
        """

    def write(
        self,
        slots: np.ndarray,
        rows: np.ndarray,
        at: np.ndarray,
        namespace: bytes,
        hashes: bytes,
        epoch: int,
        checksums: np.ndarray,
        generation: int = 0,
        seals: np.ndarray | None = None,
    ) -> np.ndarray: ...
    def scan(
        self, slots: np.ndarray, depth: int
    ) -> tuple[np.ndarray, bytes, bytes, np.ndarray, np.ndarray, np.ndarray]: ...
    def close(self, timeout_s: float) -> bool: ...


class OpenSealing(Protocol):
    """As `OpenEngine`, for engines that keep seals."""

    def __call__(
        self, fds: Sequence[int], slots: int, block_bytes: int, io: str, direct: bool, depth: int, offload_share: float
    ) -> SealingEngine: ...


class _Sealer(NamedTuple):
    """What seals: a key and its id."""

    key_id: bytes
    key: AES


class SlotKeys:
    """The keys of an instance's namespaces, for its NVME pool and what it reads of its pod. Any thread.

    Args:
        namespaces: that are known; `declare` tells more.
        look_s: how often to look whether they have changed, in a thread of its own from `start` on.
    Raises: ConfigError: the keys cannot be used, or the tenant of a namespace has none. MissingExtraError: no
        cryptography.
    """

    def __init__(self, source: KeySource, namespaces: Iterable[Namespace], look_s: float = _LOOK_S) -> None:
        self._cipher = _Cipher()
        self._source, self._look_s = source, look_s
        self._tenants: dict[NamespaceId, str] = {}
        self._changed, self._read_s = (
            source.changed(),
            time.monotonic(),
        )  # first: what changes while they are read is seen later
        self._keys = source.load()
        self._ciphers: dict[tuple[str, bytes, bytes], AES] = {}  # by tenant, key id and salt; who has come last is last
        self._lock = threading.Lock()  # of the ciphers
        self._lacking = False  # whether a block needed a key that is not here
        self._told: dict[str, str] = {}  # what was said last, of each tenant and of the keys themselves
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self.declare(namespaces)
        for tenant in self._tenants.values():
            if tenant not in self._keys:
                raise ConfigError(self._no_keys(tenant))

    def start(self) -> None:
        """Look for changes of the keys from now on."""
        thread = threading.Thread(target=self._run, name="kvbm-nvme-keys", daemon=True)
        thread.start()
        self._thread = thread

    def close(self) -> None:
        """Look no more. Idempotent."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(_CLOSE_S)

    def declare(self, namespaces: Iterable[Namespace]) -> None:
        """Know of further namespaces whose they are."""
        self._tenants.update((one.id, one.tenant) for one in namespaces)

    def opening(self, open_engine: OpenSealing, checksums: ChecksumRows) -> OpenEngine:
        """What opens engines that seal with these keys."""

        def opened(
            fds: Sequence[int], slots: int, block_bytes: int, io: str, direct: bool, depth: int, offload_share: float
        ) -> BlockEngine:
            engine = open_engine(fds, slots, block_bytes, io, direct, depth, offload_share)
            return _SealedEngine(engine, self, self._cipher, block_bytes, checksums)

        return opened

    def sealer(self, namespace: bytes, salt: bytes) -> _Sealer:
        """What seals blocks of a namespace under a salt now.

        Raises PoolError: nobody has said whose it is, or that one has no keys.
        """
        tenant = self._tenants.get(NamespaceId(namespace))
        if tenant is None:
            raise PoolError(f"namespace {namespace.hex()} is of a tenant that nobody has named; declare it")
        keys = self._keys.get(tenant)
        if keys is None:
            raise PoolError(self._no_keys(tenant))
        key = self._key(tenant, keys, keys.current, salt)
        assert key is not None  # a tenant's current key is one of its keys
        return _Sealer(keys.current, key)

    def opener(self, namespace: bytes, key_id: bytes, salt: bytes) -> AES | None:
        """What opens a block of a namespace that was sealed with a key;

        None, and one warning, where that is not here.
        """
        tenant = self._tenants.get(NamespaceId(namespace))
        keys = None if tenant is None else self._keys.get(tenant)
        key = None if tenant is None or keys is None else self._key(tenant, keys, key_id, salt)
        if key is None:
            whose = f"namespace {namespace.hex()}" if tenant is None else f"tenant {tenant!r}"
            self._lacking = True
            self._warn(
                whose,
                f"{self._source.words} has not the key {key_id.hex()} of {whose}; what it sealed is computed again",
            )
        return key

    def refresh(self) -> None:
        """Read the keys anew where they have changed. Trouble leaves them as they are."""
        changed, now_s = self._source.changed(), time.monotonic()
        due_s = _LACKING_S if self._lacking else _COMMAND_EVERY_S
        if changed == self._changed and not (changed is None and now_s - self._read_s >= due_s):
            return
        self._read_s, self._lacking = now_s, False
        try:
            keys = self._source.load()
        except ConfigError as error:
            self._lacking = True  # they are read again soon: a file at the next look, since it counts as unread
            self._warn("", f"the keys of before stay in use: {error}")
            return
        self._changed = changed
        self._told.pop("", None)
        with self._lock:
            self._keys = keys
            self._ciphers.clear()  # a key that is gone opens nothing any more

    def _key(self, tenant: str, keys: TenantKeys, key_id: bytes, salt: bytes) -> AES | None:
        with self._lock:
            name = (tenant, key_id, salt)
            cipher = self._ciphers.pop(name, None)
            if cipher is None:
                key = keys.keys.get(key_id)
                if key is None:
                    return None
                cipher = self._cipher.key(digest(key, b"kvbm.nvme.v1", salt))
                if len(self._ciphers) >= _MOST_CIPHERS:
                    del self._ciphers[next(iter(self._ciphers))]
            if self._keys.get(tenant) is keys:  # else they were read anew meanwhile, and this key may be gone
                self._ciphers[name] = cipher
            return cipher

    def _no_keys(self, tenant: str) -> str:
        return (
            f"pools.nvme.encrypt is set, and {self._source.words} has no keys of tenant {tenant!r}; add them with: "
            "kvbm keys FILE"
            f" --tenant {tenant or chr(34) * 2}"
        )

    def _warn(self, whose: str, why: str) -> None:
        """Once for each tenant, whatever a disk says; once for each word of the keys' own trouble."""
        said = self._told.get(whose)
        if said == why or (whose and (said is not None or len(self._told) > _MOST_CIPHERS)):
            return
        self._told[whose] = why
        log.warning("nvme.keys", why=why)

    def _run(self) -> None:
        while not self._closing.wait(self._look_s):
            try:
                self.refresh()
            except Exception as error:  # noqa: BLE001  # whoever seals and opens goes on with those of before
                self._warn("", f"the keys of before stay in use: {error!r}")


class _SealedEngine:
    """A `BlockEngine`. Rows that are written stay as they are; rows that are read are opened where they lie."""

    def __init__(
        self, engine: SealingEngine, keys: SlotKeys, cipher: _Cipher, block_bytes: int, checksums: ChecksumRows
    ) -> None:
        self._engine, self._keys, self._cipher, self._checksums = engine, keys, cipher, checksums
        self._group = max(1, _GROUP_BYTES // block_bytes)
        self._salt, self._process = os.urandom(_SALT_BYTES), os.getpid()
        self._count = 0
        self._rooms: list[list[np.ndarray]] = []  # for sealed blocks, kept from call to call
        self._lock = threading.Lock()  # of the counter and the rooms

    @property
    def io(self) -> str:
        """See `BlockEngine`."""
        return self._engine.io

    @property
    def refusal(self) -> str:
        """See `BlockEngine`."""
        return self._engine.refusal

    def close(self, timeout_s: float) -> bool:
        """See `BlockEngine`."""
        return self._engine.close(timeout_s)

    def scan(
        self, slots: np.ndarray, depth: int
    ) -> tuple[np.ndarray, bytes, bytes, np.ndarray, np.ndarray, np.ndarray]:
        """See `BlockEngine`."""
        return self._engine.scan(slots, depth)

    def read(
        self, slots: np.ndarray, rows: np.ndarray, at: np.ndarray, namespace: bytes, hashes: bytes
    ) -> tuple[np.ndarray, np.ndarray]:
        """See `BlockEngine`."""
        outcomes, sums = np.empty(len(slots), dtype=np.uint8), np.zeros(len(slots), dtype=np.uint32)
        seals = np.zeros((len(slots), SEAL_BYTES), dtype=np.uint8)

        def fetch(begin: int, end: int) -> None:
            outcomes[begin:end], _ = self._engine.read(
                slots[begin:end],
                rows,
                at[begin:end],
                namespace,
                hashes[begin * HASH_BYTES : end * HASH_BYTES],
                seals[begin:end],
            )

        def settle(begin: int, end: int) -> None:
            self._open(rows, at, namespace, hashes, seals, outcomes, sums, range(begin, end))

        self._in_groups(len(slots), fetch, settle)
        return outcomes, sums

    def write(
        self,
        slots: np.ndarray,
        rows: np.ndarray,
        at: np.ndarray,
        namespace: bytes,
        hashes: bytes,
        epoch: int,
        checksums: np.ndarray,
        generation: int = 0,
    ) -> np.ndarray:
        """See `BlockEngine`. Raises PoolError: there is no key to seal with."""
        if namespace == _NOBODY:
            return self._engine.write(slots, rows, at, namespace, hashes, epoch, checksums, generation)
        if self._process != os.getpid():  # a forked child: its counter would go over the same nonces
            self._process, self._salt = os.getpid(), os.urandom(_SALT_BYTES)
        salt = self._salt
        sealer = self._keys.sealer(namespace, salt)
        errors = np.empty(len(slots), dtype=np.int32)
        seals = np.zeros((len(slots), SEAL_BYTES), dtype=np.uint8)
        rooms = self._take_rooms(rows.shape[1])  # one is filled while the other is written
        places, none = np.arange(self._group, dtype=np.int64), np.zeros(self._group, dtype=np.uint32)

        def room_at(begin: int) -> np.ndarray:
            return rooms[begin // self._group % _ROOMS]

        def seal(begin: int, end: int) -> None:
            self._seal(sealer, salt, rows, at, namespace, hashes, checksums, seals, room_at(begin), range(begin, end))

        def put(begin: int, end: int) -> None:
            errors[begin:end] = self._engine.write(
                slots[begin:end],
                room_at(begin),
                places[: end - begin],
                namespace,
                hashes[begin * HASH_BYTES : end * HASH_BYTES],
                epoch,
                none[: end - begin],
                generation,
                seals[begin:end],
            )

        try:
            self._in_groups(len(slots), seal, put)
        finally:
            with self._lock:
                self._rooms.append(rooms)
        return errors

    # -- sealing and opening ------------------------------------------------------------------------------------------

    def _seal(
        self,
        sealer: _Sealer,
        salt: bytes,
        rows: np.ndarray,
        at: np.ndarray,
        namespace: bytes,
        hashes: bytes,
        checksums: np.ndarray,
        seals: np.ndarray,
        room: np.ndarray,
        run: range,
    ) -> None:
        """Fill `room` with the blocks of a run as they are to lie, and their seals."""
        part = seals[run.start : run.stop]
        fields = part.view(_SEAL)[:, 0]
        fields["key_id"] = np.frombuffer(sealer.key_id, dtype=np.uint8)
        fields["salt"] = np.frombuffer(salt, dtype=np.uint8)
        with self._lock:
            first, self._count = self._count + 1, self._count + len(run)
        fields["counter"] = np.arange(first, first + len(run), dtype=np.uint64)
        for place, index in enumerate(run):
            block, checksum = room[place], checksums[index]
            block[:] = rows[int(at[index])]  # what is summed is what is sealed, whatever becomes of the row meanwhile
            fits = self._checksums(block[np.newaxis])[0] == checksum
            bound, nonce = _bound(namespace, hashes, index, seals[index]), _NONCE.pack(first + place, 0)
            sealed = self._cipher.seal(sealer.key, nonce, bound, block.data, int(checksum))
            if fits:  # else the slot proves nothing
                part[place, _BOUND_BYTES:_SEALED_BYTES] = np.frombuffer(sealed, dtype=np.uint8)
        fields["crc"] = self._checksums(np.ascontiguousarray(part[:, :_PROVED_BYTES]))

    def _open(
        self,
        rows: np.ndarray,
        at: np.ndarray,
        namespace: bytes,
        hashes: bytes,
        seals: np.ndarray,
        outcomes: np.ndarray,
        sums: np.ndarray,
        run: range,
    ) -> None:
        """Open the rows of a run that were read; what does not open is CORRUPT."""
        part = seals[run.start : run.stop]
        fields = part.view(_SEAL)[:, 0]
        is_whole = fields["crc"] == self._checksums(np.ascontiguousarray(part[:, :_PROVED_BYTES]))
        is_whole &= ~fields["zero"].any(axis=1)
        ciphers: dict[bytes, AES | None] = {}
        for index in run:
            if outcomes[index] != ReadOutcome.GOOD:
                continue
            seal = seals[index].tobytes()
            named = seal[: KEY_ID_BYTES + _SALT_BYTES]
            if is_whole[index - run.start] and named not in ciphers:
                ciphers[named] = self._keys.opener(namespace, named[:KEY_ID_BYTES], named[KEY_ID_BYTES:])
            cipher = ciphers.get(named)
            opened = None
            if is_whole[index - run.start] and cipher is not None:
                nonce = seal[KEY_ID_BYTES + _SALT_BYTES : _BOUND_BYTES] + bytes(4)
                bound = _bound(namespace, hashes, index, seals[index])
                opened = self._cipher.open(
                    cipher, nonce, bound, rows[int(at[index])].data, seal[_BOUND_BYTES:_SEALED_BYTES]
                )
            if opened is None:
                outcomes[index] = ReadOutcome.CORRUPT
            else:
                sums[index] = opened

    def _in_groups(
        self, count: int, begin_with: Callable[[int, int], None], end_with: Callable[[int, int], None]
    ) -> None:
        """Do two things with each group of a run, in order: the first one in another thread, which is one group ahead
        at most.
        """
        groups = [(begin, min(count, begin + self._group)) for begin in range(0, count, self._group)]
        if len(groups) < 2:
            for begin, end in groups:
                begin_with(begin, end)
                end_with(begin, end)
            return
        begun: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        turns, is_over = threading.Semaphore(_ROOMS), threading.Event()

        def run() -> None:
            try:
                for begin, end in groups:
                    turns.acquire()
                    if is_over.is_set():
                        return
                    begin_with(begin, end)
                    begun.put(None)
            except BaseException as error:  # noqa: BLE001  # it is raised where the run was asked for
                begun.put(error)

        thread = threading.Thread(target=run, name="kvbm-nvme-sealing", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # there is no thread to be had
            for begin, end in groups:
                begin_with(begin, end)
                end_with(begin, end)
            return
        try:
            for begin, end in groups:
                if (error := begun.get()) is not None:
                    raise error
                end_with(begin, end)
                turns.release()
        finally:  # rows and rooms are the caller's again only when that thread has left them
            is_over.set()
            turns.release()
            thread.join()

    def _take_rooms(self, block_bytes: int) -> list[np.ndarray]:
        """Room for two groups of sealed blocks, each (n, block_bytes), at addresses that direct transfers take."""
        with self._lock:
            if self._rooms:
                return self._rooms.pop()
        return [_aligned(self._group, block_bytes) for _ in range(_ROOMS)]


class _Cipher:
    """What we use of cryptography. Raises MissingExtraError: it is not there."""

    def __init__(self) -> None:
        try:
            from cryptography.exceptions import InvalidTag
            from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
        except ModuleNotFoundError as error:
            raise MissingExtraError("cryptography, which encrypts NVME pools,", "crypto") from error
        self.key = algorithms.AES
        self._new, self._gcm, self._invalid = Cipher, modes.GCM, InvalidTag

    def seal(self, key: AES, nonce: bytes, bound: bytes, block: memoryview, checksum: int) -> bytes:
        """Seal a block in its place; the tag, and behind it the checksum as it lies."""
        context = self._new(key, self._gcm(nonce)).encryptor()
        context.authenticate_additional_data(bound)
        context.update_into(block, block)
        hidden = context.update(_CHECKSUM.pack(checksum))
        context.finalize()
        return context.tag + hidden

    def open(self, key: AES, nonce: bytes, bound: bytes, block: memoryview, sealed: bytes) -> int | None:
        """Open a block in its place; its checksum. None: it is another block, and what lies there now is nothing.

        Args:
            sealed: tag and checksum, as `seal` gave them.
        """
        context = self._new(key, self._gcm(nonce, sealed[:_TAG_BYTES])).decryptor()
        context.authenticate_additional_data(bound)
        context.update_into(block, block)
        checksum: int = _CHECKSUM.unpack(context.update(sealed[_TAG_BYTES:]))[0]
        try:
            context.finalize()
        except self._invalid:
            block[:] = bytes(len(block))
            return None
        return checksum


def _bound(namespace: bytes, hashes: bytes, index: int, seal: np.ndarray) -> bytes:
    """What a block is authenticated with."""
    return namespace + hashes[index * HASH_BYTES : (index + 1) * HASH_BYTES] + seal[:_BOUND_BYTES].tobytes()


def _aligned(count: int, block_bytes: int) -> np.ndarray:
    whole = np.zeros(count * block_bytes + PAGE_BYTES, dtype=np.uint8)
    begin = -whole.ctypes.data % PAGE_BYTES
    return whole[begin : begin + count * block_bytes].reshape(count, block_bytes)
