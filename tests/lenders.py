"""What tests lend: blocks in memory, with pins that are counted, and owners that lend them in each way there is."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from kvbm._native import Arena, PeerClient, RowCopier, crc32c
from kvbm.core.ids import HASH_BYTES, InstanceId, Namespace, Tier, split_hashes
from kvbm.reference.peer_server import ReadableOwner
from kvbm.transport.base import PeerReader
from kvbm.transport.lending import Leases, LentLimits, LentMapping, PinnedRun
from kvbm.transport.local import LocalReader
from kvbm.transport.memory import MemoryReader
from kvbm.transport.native import PeerTls
from kvbm.transport.tcp import TcpReader
from kvbm.transport.wire import ArenaShape

NAMESPACE = Namespace(model="m", block_tokens=16, revision="1", tenant="acme")
OTHER = Namespace(model="m", block_tokens=16, revision="1", tenant="other")
KEY = b"a key that both have"
OWNER = InstanceId("owner-ü")
READER = InstanceId("reader")
EPOCH = 7
COPIER = RowCopier(2)


def root_of(namespace: Namespace) -> bytes:
    return namespace.root(b"secret of " + namespace.tenant.encode())


def hashes_of(count: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(HASH_BYTES * count)


def blocks_of(count: int, block_bytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, block_bytes), dtype=np.uint8)


class _Place(NamedTuple):
    tier: Tier
    slot: int


class MemoryLender:
    """Blocks in an arena of HOST slots and an array of NVME slots. Any thread.

    Attributes:
        host: the HOST slots, (slots, block_bytes) uint8, for tests that spoil them.
        suspected: hashes that readers found to be wrong.
    """

    def __init__(self, slots: int, block_bytes: int, namespaces: Sequence[Namespace] = (NAMESPACE, OTHER)) -> None:
        self._arena = Arena("kvbm-lent", slots * block_bytes)
        self._shape = ArenaShape(self._arena.bytes, slots, block_bytes)
        self._fd = os.open(f"/proc/self/fd/{self._arena.fd}", os.O_RDONLY | os.O_CLOEXEC)
        self.host = self._arena.memory[: slots * block_bytes].reshape(slots, block_bytes)
        self._nvme = np.zeros((slots, block_bytes), dtype=np.uint8)
        self._block_bytes = block_bytes
        self._lock = threading.Lock()
        self._roots = {namespace.id: root_of(namespace) for namespace in namespaces}
        self._places: dict[tuple[bytes, bytes], _Place] = {}
        self._checksums: dict[_Place, int] = {}
        self._pins: Counter[_Place] = Counter()
        self._orphans: set[_Place] = set()  # pinned, of blocks that are held no more
        self._free = {tier: list(range(slots)) for tier in (Tier.HOST, Tier.NVME)}
        self.suspected: list[bytes] = []

    def close(self) -> None:
        os.close(self._fd)

    def put(self, hashes: bytes, rows: np.ndarray, tier: Tier = Tier.HOST, namespace: Namespace = NAMESPACE) -> None:
        """Hold blocks."""
        with self._lock:
            assert len(self._free[tier]) >= len(rows), "slots are held or lent"
            for block_hash, row in zip(split_hashes(hashes), rows, strict=True):
                place = _Place(tier, self._free[tier].pop())
                self._rows(tier)[place.slot] = row
                self._places[namespace.id, bytes(block_hash)] = place
                self._checksums[place] = crc32c(row.tobytes())

    def evict(self, hashes: bytes, namespace: Namespace = NAMESPACE) -> None:
        """Hold them no more; their slots may hold others as soon as nobody reads them."""
        with self._lock:
            for block_hash in split_hashes(hashes):
                if (place := self._places.pop((namespace.id, bytes(block_hash)), None)) is not None:
                    self._leave_free_locked(place)

    def slot_of(self, block_hash: bytes, namespace: Namespace = NAMESPACE) -> np.ndarray:
        place = self._places[namespace.id, block_hash]
        return self._rows(place.tier)[place.slot]

    def withdraw(self, namespace: Namespace) -> None:
        """Lend nothing of it any more."""
        del self._roots[namespace.id]

    def admit(self, namespace: Namespace, root: bytes = b"") -> None:
        self._roots[namespace.id] = root or root_of(namespace)

    @property
    def namespaces(self) -> set[bytes]:
        """Ids of those that are lent."""
        return {bytes(one) for one in self._roots}

    @property
    def pinned(self) -> int:
        return sum(self._pins.values())

    @property
    def memory(self) -> LentMapping | None:
        return LentMapping(self._fd, self._shape)

    def opening(self, namespace: bytes) -> tuple[bytes, int] | None:
        root = self._roots.get(namespace)
        return None if root is None else (root, self._block_bytes)

    def lend(self, namespace: bytes, hashes: bytes) -> PinnedRun | None:
        places: list[_Place] = []
        with self._lock:
            for block_hash in split_hashes(hashes):
                found = self._places.get((namespace, bytes(block_hash)))
                if found is None:
                    break
                places.append(found)
            self._pins.update(places)
        if not places:
            return None
        checksums = np.array([self._checksums[place] for place in places], dtype=np.uint32)
        rows = [self._rows(place.tier)[place.slot] for place in places]
        return PinnedRun(tuple(place.tier for place in places), tuple(place.slot for place in places), checksums, rows)

    def give_back(self, lent: PinnedRun) -> None:
        places = [_Place(*place) for place in zip(lent.tiers, lent.slots, strict=True)]
        with self._lock:
            self._pins.subtract(places)
            assert min(self._pins.values(), default=0) >= 0
            for place in self._orphans.intersection(places):
                self._leave_free_locked(place)

    def suspect(self, namespace: bytes, hashes: bytes) -> None:
        self.suspected += [bytes(one) for one in split_hashes(hashes)]

    def _leave_free_locked(self, place: _Place) -> None:
        """Of a block that is held no more: at once, or when nobody reads it any more."""
        if self._pins[place]:
            self._orphans.add(place)
        else:
            self._orphans.discard(place)
            self._free[place.tier].append(place.slot)

    def _rows(self, tier: Tier) -> np.ndarray:
        return self.host if tier is Tier.HOST else self._nvme


def new_client(
    is_tcp: bool,
    address: str,
    port: int,
    reader: str,
    owner: str,
    key: bytes,
    streams: int,
    *,
    tls: PeerTls | None = None,
) -> PeerClient:
    return PeerClient(is_tcp, address, port, reader, owner, key, streams, COPIER, tls)


class Site(Protocol):
    """An owner and those who read from it.

    Attributes:
        transport: as the readers'.
    """

    transport: str
    lender: MemoryLender

    def reader(self, **changes: Any) -> PeerReader:
        """A reader. Args: owner, root_of, key, streams as of the real ones."""

    def fence(self, fenced: bool) -> None:
        """The owner may grant nothing; False: it may again."""

    def close(self) -> None: ...


class LocalSite:
    """Owner and reader in one process."""

    transport = "local"

    def __init__(self, lender: MemoryLender, limits: LentLimits, folder: Path) -> None:
        self.lender, self.leases = lender, Leases(lender, EPOCH, limits)

    def reader(self, root_of: Callable[[Namespace], bytes] = root_of, **others: Any) -> PeerReader:
        return LocalReader(self.leases, root_of, checksum=crc32c)

    def fence(self, fenced: bool) -> None:
        self.leases.is_fenced = fenced

    def close(self) -> None:
        self.lender.close()


class SocketSite:
    """An owner in Python, that lends over both sockets; its readers are native.

    Attributes:
        tls: what TCP connections of the owner and of its readers are secured with.
        tcp: where it listens, or is to.
    """

    tls: PeerTls | None = None
    tcp = "127.0.0.1:0"

    def __init__(
        self, transport: str, lender: MemoryLender, limits: LentLimits, folder: Path, handshake_s: float = 2.0
    ) -> None:
        self.transport, self.lender, self._limits, self._handshake_s = transport, lender, limits, handshake_s
        self.unix = str(folder / "lend.sock")
        self._readers: list[PeerReader] = []
        self.start()

    def start(self) -> None:
        """Listen, where it listened before."""
        self.leases = Leases(self.lender, EPOCH, self._limits)
        self.owner = ReadableOwner(
            self.leases, OWNER, EPOCH, self.unix, self.tcp, KEY, connections=100, handshake_s=self._handshake_s
        )
        self.tcp = self.owner.tcp

    def stop(self) -> None:
        self.owner.close()

    def fence(self, fenced: bool) -> None:
        self.leases.is_fenced = fenced

    def reader(
        self,
        owner: InstanceId = OWNER,
        root_of: Callable[[Namespace], bytes] = root_of,
        key: bytes = KEY,
        streams: int = 2,
        **more: Any,
    ) -> PeerReader:
        if self.transport == "memory":
            made: PeerReader = MemoryReader(new_client, self.unix, READER, owner, root_of, streams)
        else:
            made = TcpReader(new_client, self.tcp, READER, owner, root_of, key, streams, more.get("tls", self.tls))
        self._readers.append(made)
        return made

    def close(self) -> None:
        for reader in self._readers:
            reader.close()
        self.stop()
        self.lender.close()


def site_of(kind: str, lender: MemoryLender, limits: LentLimits, folder: Path, handshake_s: float = 2.0) -> Site:
    """kind: "local", "memory" or "tcp"."""
    if kind == "local":
        return LocalSite(lender, limits, folder)
    return SocketSite(kind, lender, limits, folder, handshake_s)
