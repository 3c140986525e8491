"""The NVME pools of a pod's other instances, read from a folder that all of them share, whether their owners run or
not.

    <folder>/<cluster>.<instance>.pool    as pool.py has it, one stripe; written by its owner alone
                                 .slots   which block each slot seems to hold: hints.py

Nobody is asked and nothing is locked. The owner overwrites slots whenever it wants, so a hint only says where to look:
a block is what its slot's header and checksum prove, in the bytes that were read, and everything else is a miss.
Whoever may write into the folder is trusted as an instance is; the file modes let in the instances' user alone. All the
same nothing there is believed to be short, plain or few: a pipe, a link, a file of absurd size and a folder of a
million names each cost a bounded look and one warning.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kvbm.core.backend import ChecksumRows
from kvbm.core.errors import PoolError
from kvbm.core.ids import HASH_BYTES, InstanceId, Namespace, NamespaceId
from kvbm.files import open_plain, read_plain
from kvbm.pools.base import PodRun, ReadOutcome, ReadResult
from kvbm.pools.nvme.block_io import PAGE_BYTES, BlockEngine, BlockIoOptions, OpenEngine, stride_of
from kvbm.pools.nvme.file_header import Damaged, FileShape, decode_header, shape_of
from kvbm.pools.nvme.hints import HINT_BYTES, SlotHints, hints_path
from kvbm.pools.nvme.pool import CLOSE_S
from kvbm.pools.run import all_failed, check_rows
from kvbm.safe_log import SafeLog

log = SafeLog()

POLL_S = 1.0  # the folder is looked at no more often, and less often where a look takes long
_BUSY_SHARE = 0.1  # of the time, for looking
_DOUBT_S = 60.0  # a slot that proved nothing is left alone for so long, unless its hint changes
_IDLE_S = 60.0  # a file that was not read for so long is closed
_SLOTS_MOST = 4 << 20  # of a peer's pool whose hints are read: 128 MiB; those behind are not seen
_HINTS_MOST = 16 << 20  # slots of all peers together whose hints are read: 512 MiB, and 256 MiB to find them
_PEERS_MOST = 1024  # pools of a folder that are looked at
_ENTRIES_MOST = 65_536  # names of a folder that are looked at
_OPEN_MOST = 16  # files of peers that are open at once, while nobody reads more of them


class _Seen(NamedTuple):
    """What tells one state of a file from another."""

    device: int
    inode: int
    size_bytes: int
    modified_ns: int


class _Table:
    """What one peer's slots seem to hold. Changed only by `doubt`, which makes a slot match nothing."""

    def __init__(self, owners: np.ndarray) -> None:
        """`owners`: (slots, 32) uint8, as hinted."""
        self._owners = owners
        self.slots = len(owners)
        used = np.flatnonzero(owners.any(axis=1))
        keys = _keys(owners[used, HASH_BYTES:])
        order = np.argsort(keys, kind="stable")
        self._keys, self._slots = keys[order], used[order]

    def run(self, wanted: np.ndarray, keys: np.ndarray) -> tuple[int, ...]:
        """The slots of the blocks, from the first on, that are here without a hole."""
        if not len(self._keys) or not self._has(wanted[:1], keys[:1]).size:
            return ()
        return tuple(self._has(wanted, keys).tolist())

    def has(self, wanted: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """For each block whether a slot seems to hold it."""
        if not len(self._keys):
            return np.zeros(len(keys), dtype=bool)
        return self._found(wanted, keys)[1]

    def _has(self, wanted: np.ndarray, keys: np.ndarray) -> np.ndarray:
        slots, same = self._found(wanted, keys)
        return slots if same.all() else slots[: int(np.argmin(same))]

    def _found(self, wanted: np.ndarray, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The slot where each block would be, and whether it is there."""
        slots = self._slots[np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)]
        same: np.ndarray = (self._owners[slots] == wanted).all(axis=1)
        return slots, same

    def doubt(self, slot: int, owner: bytes) -> None:
        """Match this slot no more, if it still seems to hold that block."""
        if slot < len(self._owners) and bytes(self._owners[slot]) == owner:
            self._owners[slot] = 0


class _File:
    """A peer's file, open for reading. Closed when it is retired and nobody reads from it any more."""

    def __init__(self, engine: BlockEngine, fd: int, slots: int, now_s: float) -> None:
        self.engine, self.fd, self.slots = engine, fd, slots
        self.readers = 0
        self.is_retired = False
        self.used_s = now_s

    def close(self) -> None:
        if self.engine.close(CLOSE_S):
            os.close(self.fd)
        else:  # a late read must not meet another file of the same number
            log.warning("pod.left_open", remedy="the folder's server does not answer; the file stays open")


class _Peer:
    """Another instance's pool as it was last seen."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.hints: _Seen | None = None
        self.is_cut = False  # not all hints were read, for want of room
        self.is_settled = False  # the hints were read again after they had last changed
        self.pool: tuple[int, int, int] | None = None  # device, inode and size of the pool's file
        self.slots = 0  # of a file that fits, as many as are read
        self.declared_slots = 0  # as its header has them
        self.refusal = ""  # why it does not fit
        self.told = ""  # the last refusal that was logged
        self.table: _Table | None = None
        self.file: _File | None = None
        self.doubts: dict[int, bytes] = {}  # slots that proved nothing → the block that was looked for
        self.doubted_s = 0.0  # since when


class PodFolder:
    """See the module. A `PodPool`.

    Args:
        own: the pool file of this instance in the folder, which is none of the others.
        shape: of this instance's blocks; pools of another shape are left alone.
        hints: of the own pool, made visible to other machines as often as the folder is looked at.
        options: for each peer; reads take all of the depth.
    """

    def __init__(
        self,
        own: Path,
        cluster: str,
        block_bytes: int,
        shape: Namespace,
        checksums: ChecksumRows,
        open_engine: OpenEngine,
        hints: SlotHints | None = None,
        options: BlockIoOptions = BlockIoOptions(depth=16),  # noqa: B008  # frozen
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.folder = own.parent
        self._own, self._prefix, self._block_bytes = own.name, f"{cluster}.", block_bytes
        self._shape, self._checksums = shape, checksums
        self._open_engine, self._options = open_engine, options
        self._hints, self._clock = hints, clock
        self._lock = threading.Lock()  # of what `_peers` holds; never while a file is touched
        self._peers: dict[InstanceId, _Peer] = {}
        self._tables: tuple[tuple[InstanceId, _Table], ...] = ()  # replaced as a whole
        self._told_crowded = self._told_full = False
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Look at the folder now, and from now on in a thread of its own: a request never waits for it."""
        self.poll()
        thread = threading.Thread(target=self._run, name=f"kvbm-pod-{self._own}", daemon=True)
        thread.start()
        self._thread = thread

    def find(self, namespace: NamespaceId, hashes: bytes) -> list[PodRun]:
        """See `PodPool.find`. Of several who have a block, the one with the longest run."""
        tables = self._tables
        if not tables or not hashes:
            return []
        wanted, keys = _wanted(namespace, hashes)
        runs: list[PodRun] = []
        at = 0
        while at < len(wanted):
            found = [PodRun(instance, table.run(wanted[at:], keys[at:])) for instance, table in tables]
            best = max(found, key=lambda run: len(run.slots))
            if not best.slots:
                break
            runs.append(best)
            at += len(best.slots)
        return runs

    def present(self, namespace: NamespaceId, hashes: bytes) -> np.ndarray:
        """See `PodPool.present`."""
        found = np.zeros(len(hashes) // HASH_BYTES, dtype=bool)
        if (tables := self._tables) and hashes:
            wanted, keys = _wanted(namespace, hashes)
            for _, table in tables:
                found |= table.has(wanted, keys)
        return found

    def read(
        self,
        instance: InstanceId,
        slots: Sequence[int],
        namespace: NamespaceId,
        hashes: bytes,
        rows: np.ndarray,
        at: Sequence[int] | None = None,
    ) -> ReadResult:
        """See `PodPool.read`."""
        count = check_rows("POD", rows, hashes, self._block_bytes, at)
        with self._using(instance) as file:
            if file is None or count == 0:
                return all_failed(count)
            outcomes = np.full(count, int(ReadOutcome.MISSING), dtype=np.uint8)
            sums = np.zeros(count, dtype=np.uint32)
            numbers = np.asarray(slots, dtype=np.int64)
            places = np.arange(count, dtype=np.int64) if at is None else np.asarray(at, dtype=np.int64)
            there = np.flatnonzero((numbers >= 0) & (numbers < file.slots))
            if len(there):
                packed = np.frombuffer(hashes, dtype=np.uint8).reshape(-1, HASH_BYTES)[there].tobytes()
                outcomes[there], sums[there] = file.engine.read(numbers[there], rows, places[there], namespace, packed)
        outcomes[outcomes == int(ReadOutcome.CORRUPT)] = int(ReadOutcome.MISSING)  # most likely another block by now
        self._note_bad(instance, numbers, namespace, hashes, outcomes)
        return ReadResult([_OUTCOMES[outcome] for outcome in outcomes.tolist()], sums)

    def poll(self) -> None:
        """Look at the folder once. Trouble leaves what was seen before."""
        if self._hints is not None:
            self._hints.sync()
        try:
            names, is_crowded = self._names()
        except OSError as error:
            log.warning("pod.unseen", folder=str(self.folder), why=error.strerror, remedy="check pools.nvme.folder")
            return
        if is_crowded and not self._told_crowded:
            log.warning(
                "pod.crowded",
                folder=str(self.folder),
                names_most=_ENTRIES_MOST,
                pools_most=_PEERS_MOST,
                remedy="the rest is not looked at; remove what is no pool's from the folder",
            )
        self._told_crowded = is_crowded
        found = {InstanceId(name[len(self._prefix) : -len(".pool")]): name for name in names}
        for instance, name in found.items():
            peer = self._peers.get(instance) or _Peer(self.folder / name)
            try:
                self._look(instance, peer)
            except OSError as error:
                self._refuse(instance, peer, f"it cannot be read ({error.strerror})")
                peer.pool = None  # look again the next time
            with self._lock:
                self._peers[instance] = peer
        with self._lock:
            gone = [self._peers.pop(instance) for instance in list(self._peers) if instance not in found]
        for peer in gone:
            self._retire(peer)
        self._publish()
        self._close_idle()

    def close(self) -> None:
        """See `PodPool.close`. The own hints go with it."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(POLL_S)  # one that hangs in the folder is left: it is a daemon
        with self._lock:
            peers, self._peers = list(self._peers.values()), {}
            self._tables = ()
        for peer in peers:
            self._retire(peer)
        if self._hints is not None:
            self._hints.close()

    # -- looking -------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        pause_s = POLL_S
        while not self._closing.wait(pause_s):
            began = self._clock()
            try:
                self.poll()
            except Exception:  # whatever a stranger's file does to us: the thread goes on
                log.exception("pod.poll_broke", folder=str(self.folder), remedy="report it")
            pause_s = max(POLL_S, (self._clock() - began) / _BUSY_SHARE)

    def _names(self) -> tuple[list[str], bool]:
        """Pools of others, and whether there are more than are looked at; those known already come first.

        Raises OSError.
        """
        with os.scandir(self.folder) as entries:
            names = [entry.name for entry in islice(entries, _ENTRIES_MOST) if self._is_peer(entry.name)]
            is_crowded = next(entries, None) is not None or len(names) > _PEERS_MOST
        if len(names) > _PEERS_MOST:
            known = {peer.path.name for peer in self._peers.values()}
            names.sort(key=lambda name: (name not in known, name))
        return names[:_PEERS_MOST], is_crowded

    def _is_peer(self, name: str) -> bool:
        return name.startswith(self._prefix) and name.endswith(".pool") and name.count(".") == 2 and name != self._own

    def _look(self, instance: InstanceId, peer: _Peer) -> None:
        """Bring what is known of a peer up to date. Raises OSError."""
        held = os.lstat(peer.path)
        if not stat.S_ISREG(held.st_mode):
            self._refuse(instance, peer, "it is no plain file")
            return
        pool = (held.st_dev, held.st_ino, held.st_size)
        if pool != peer.pool:
            self._retire(peer)
            peer.pool = peer.hints = None  # what ends the look before it has been judged leaves it to be judged
            self._judge(instance, peer, held.st_size)
            peer.pool = pool
        if peer.refusal:
            return
        now_s = self._clock()
        if peer.doubts and now_s - peer.doubted_s > _DOUBT_S:
            with self._lock:
                peer.doubts.clear()
            peer.hints = None
        at = os.lstat(hints_path(peer.path))
        if stat.S_ISREG(at.st_mode) and at.st_size > peer.declared_slots * HINT_BYTES:
            why = (
                f"its hints take {at.st_size} bytes, those of {peer.declared_slots} slots take "
                f"{peer.declared_slots * HINT_BYTES}"
            )
            self._refuse(instance, peer, why)
            peer.pool = None  # look again the next time
            return
        seen = _Seen(at.st_dev, at.st_ino, at.st_size, at.st_mtime_ns)
        has_more = peer.is_cut and peer.table is not None and self._room(peer) > peer.table.slots
        if seen == peer.hints and peer.is_settled and not has_more:
            return
        self._load(peer)
        # What was written in the same tick of the server's clock shows the second time.
        peer.is_settled = seen == peer.hints
        peer.hints = seen

    def _judge(self, instance: InstanceId, peer: _Peer, size_bytes: int) -> None:
        """Whether a pool's file is one of this pod, and how many slots are there. Raises OSError."""
        page = read_plain(peer.path, PAGE_BYTES)
        try:
            held = decode_header(peer.path, page, self._checksums)
        except PoolError as error:
            self._refuse(instance, peer, str(error))
            return
        if isinstance(held, Damaged):
            self._refuse(instance, peer, held.why)
            return
        wanted = shape_of(self._shape, self._block_bytes, held.shape.slots, instance, encrypted=self._options.encrypted)
        for name in FileShape.__struct_fields__:
            ours, theirs = getattr(wanted, name), getattr(held.shape, name)
            if ours != theirs:
                self._refuse(instance, peer, f"it was made for {name} {theirs!r}, here it is {ours!r}")
                return
        peer.refusal = ""
        room = max(0, size_bytes - PAGE_BYTES) // stride_of(self._block_bytes)
        peer.declared_slots = held.shape.slots
        peer.slots = max(0, min(held.shape.slots, room, _SLOTS_MOST))

    def _refuse(self, instance: InstanceId, peer: _Peer, why: str) -> None:
        if why != peer.told:
            peer.told = why
            log.warning("pod.ignored", instance=instance, path=str(peer.path), why=why)
        peer.refusal, peer.table, peer.slots = why, None, 0
        self._retire(peer)
        peer.hints = None

    def _load(self, peer: _Peer) -> None:
        """Read the hints of a peer anew; opened anew too, since that is when other machines' writes are seen.

        Raises OSError.
        """
        slots = self._room(peer)
        data = read_plain(hints_path(peer.path), slots * HINT_BYTES)
        peer.is_cut = slots < peer.slots
        self._tell_full(peer.is_cut)
        whole = len(data) // HINT_BYTES * HINT_BYTES
        table = _Table(np.frombuffer(data[:whole], dtype=np.uint8).reshape(-1, HINT_BYTES).copy())
        with self._lock:
            for slot, owner in peer.doubts.items():
                table.doubt(slot, owner)
            peer.table = table

    def _room(self, peer: _Peer) -> int:
        """Of how many slots hints are read, so that those of all peers stay within what they may take."""
        others = sum(one.table.slots for one in self._peers.values() if one is not peer and one.table is not None)
        return max(0, min(peer.slots, _HINTS_MOST - others))

    def _tell_full(self, is_full: bool) -> None:
        if is_full and not self._told_full:
            self._told_full = True
            log.warning(
                "pod.hints_full",
                folder=str(self.folder),
                slots_most=_HINTS_MOST,
                effect="blocks in slots behind are not found",
                remedy="share a folder among fewer instances, or use smaller pools",
            )

    def _publish(self) -> None:
        with self._lock:
            self._tables = tuple((name, peer.table) for name, peer in self._peers.items() if peer.table is not None)

    # -- reading -------------------------------------------------------------------------------------------------------

    @contextmanager
    def _using(self, instance: InstanceId) -> Iterator[_File | None]:
        """A peer's file, kept open while used; None where it cannot be read."""
        file = self._opened(instance)
        try:
            yield file
        finally:
            if file is not None:
                with self._lock:
                    file.readers -= 1
                    file.used_s = self._clock()
                    is_over = file.is_retired and not file.readers
                if is_over:
                    file.close()

    def _opened(self, instance: InstanceId) -> _File | None:
        with self._lock:
            peer = self._peers.get(instance)
            file = None if peer is None else self._take_locked(peer)
        if peer is None or file is not None or self._closing.is_set():
            return file
        try:
            made = self._open(peer)
        except OSError as error:
            log.info("pod.unopened", instance=instance, why=error.strerror)
            return None
        with self._lock:
            if peer.file is None and not self._closing.is_set():
                peer.file = made
            file = self._take_locked(peer)
        if file is not made:  # somebody else was quicker
            made.close()
        return file

    def _take_locked(self, peer: _Peer) -> _File | None:
        """The open file of a peer for one more reader."""
        if peer.file is not None:
            peer.file.readers += 1
        return peer.file

    def _open(self, peer: _Peer) -> _File:
        """Raises OSError."""
        options = self._options
        fd = open_plain(peer.path)
        try:
            is_direct = options.direct != "off" and _set_direct(fd)
            engine = self._open_engine(
                [fd], max(1, peer.slots), self._block_bytes, options.io, is_direct, options.depth, 1.0
            )
        except BaseException:
            os.close(fd)
            raise
        return _File(engine, fd, peer.slots, self._clock())

    def _note_bad(
        self, instance: InstanceId, slots: np.ndarray, namespace: NamespaceId, hashes: bytes, outcomes: np.ndarray
    ) -> None:
        """Look no more for these blocks where they were not; open a file anew that could not be read."""
        missing = np.flatnonzero(outcomes == int(ReadOutcome.MISSING))
        with self._lock:
            peer = self._peers.get(instance)
            if peer is None:
                return
            if len(missing) and not peer.doubts:
                peer.doubted_s = self._clock()
            for index in missing.tolist():
                slot = int(slots[index])
                owner = namespace + hashes[index * HASH_BYTES : (index + 1) * HASH_BYTES]
                peer.doubts[slot] = owner
                if peer.table is not None:
                    peer.table.doubt(slot, owner)
        if (outcomes == int(ReadOutcome.FAILED)).any():
            self._retire(peer)

    def _retire(self, peer: _Peer) -> None:
        """Have a peer's file closed, when its last reader is gone."""
        with self._lock:
            file, peer.file = peer.file, None
            if file is None:
                return
            file.is_retired = True
            if file.readers:
                return
        file.close()

    def _close_idle(self) -> None:
        """Keep no more files open than need be."""
        now_s = self._clock()
        with self._lock:
            opened = [(peer.file, peer) for peer in self._peers.values() if peer.file is not None]
            idle = [(file.used_s, peer) for file, peer in opened if not file.readers]
        idle.sort(key=lambda entry: -entry[0])
        for number, (used_s, peer) in enumerate(idle):
            if number >= _OPEN_MOST or now_s - used_s > _IDLE_S:
                self._retire(peer)


_OUTCOMES = {int(outcome): outcome for outcome in ReadOutcome}


def _wanted(namespace: NamespaceId, hashes: bytes) -> tuple[np.ndarray, np.ndarray]:
    """What hints say of these blocks, and the numbers to search for."""
    wanted = np.empty((len(hashes) // HASH_BYTES, HINT_BYTES), dtype=np.uint8)
    wanted[:, :HASH_BYTES] = np.frombuffer(namespace, dtype=np.uint8)
    wanted[:, HASH_BYTES:] = np.frombuffer(hashes, dtype=np.uint8).reshape(-1, HASH_BYTES)
    return wanted, _keys(wanted[:, HASH_BYTES:])


def _keys(hashes: np.ndarray) -> np.ndarray:
    """The first half of each hash as a number, for the search."""
    return np.ascontiguousarray(hashes[:, :8]).view("<u8")[:, 0]


def _set_direct(fd: int) -> bool:
    """Past the page cache where the file system can: what another machine wrote is then seen at once."""
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
        with mmap.mmap(-1, PAGE_BYTES) as page:
            os.preadv(fd, [page], 0)
    except OSError:
        with suppress(OSError):
            fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)
        return False
    return True
