"""An owner whose server is native, as engines have it: over a ledger, a HOST pool and an NVME pool that are real."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvbm import _native
from kvbm.core.events import EvictReason, PoolStated
from kvbm.core.ids import NO_PARENT, Epoch, InstanceId, Namespace, SequenceHash, Tier, split_hashes, split_slots
from kvbm.pools.base import Proof
from kvbm.pools.host.pool import HostPool
from kvbm.pools.nvme.block_io import BlockIoOptions
from kvbm.pools.nvme.pool import NvmePool
from kvbm.transport.lending import LentLimits
from kvbm.transport.native import PeerTls
from kvbm.transport.server import Lending, LendingOptions, LendingSource
from tests.lenders import EPOCH, KEY, NAMESPACE, OTHER, OWNER, SocketSite, root_of

_FOLDERS = itertools.count()


class _Held(NamedTuple):
    tier: Tier
    slot: int


def tls_of(folder: Path) -> PeerTls:
    """A certificate of a CA of its own, for an owner and its readers."""
    from tests.certificates import certify  # needs a package that nothing else here does

    made = certify(folder, "instance", ca := certify(folder, "ca"))
    return _native.PeerTls(str(made.cert), str(made.key), str(ca.cert))


class NativeLender:
    """Blocks in a ledger and its pools. Any thread.

    Attributes:
        host: the HOST slots, (slots, block_bytes) uint8, for tests that spoil them.
        suspected: hashes of blocks that were evicted because their bytes were wrong here.
    """

    def __init__(self, slots: int, block_bytes: int, folder: Path, nvme: bool = True, sealed: bool = False) -> None:
        self.block_bytes = block_bytes
        self.pool = HostPool(slots, block_bytes, _native.Arena, _native.RowCopier(2), huge_pages="off", pins=False)
        assert self.pool.memory is not None
        self.host = self.pool.memory
        pools = [PoolStated(Tier.HBM, 1, block_bytes), PoolStated(Tier.HOST, slots, block_bytes)]
        self.nvme: NvmePool | None = None
        if nvme:
            self.nvme = NvmePool(
                [folder / f"nvme-{next(_FOLDERS)}"],
                slots,
                block_bytes,
                NAMESPACE,
                OWNER,
                _native.checksums,
                _native.BlockIo,
                BlockIoOptions(io="threads", encrypted=sealed),
            )
            pools.append(PoolStated(Tier.NVME, slots, block_bytes))
        self.ledger = _native.Ledger(pools, "lru")
        self.ledger.start(Epoch(EPOCH), [NAMESPACE, OTHER])
        self.lock = _native.LedgerLock()
        self.roots = {namespace.id: root_of(namespace) for namespace in (NAMESPACE, OTHER)}
        self.lending: Lending | None = None
        self.suspected: list[bytes] = []
        self._places: dict[bytes, _Held] = {}

    def close(self) -> None:
        self.pool.close()
        if self.nvme is not None:
            self.nvme.close()

    def listen(
        self, unix: str, tcp: str, limits: LentLimits, connections: int = 100, key: bytes = KEY, **more: Any
    ) -> Lending:
        """Begin to lend."""
        source = LendingSource(OWNER, self.ledger, self.lock, self.pool, self.nvme, self._found_corrupt)
        options = LendingOptions(unix, tcp, key, connections, limits.blocks, limits.lease_s, limits.retry_s, **more)
        self.lending = Lending(_native.LendingServer, source, options)
        for namespace, root in self.roots.items():
            self.lending.admit(namespace, root)
        return self.lending

    def put(self, hashes: bytes, rows: np.ndarray, tier: Tier = Tier.HOST, namespace: Namespace = NAMESPACE) -> None:
        """Hold blocks."""
        pool = self.pool if tier is Tier.HOST else self.nvme
        assert pool is not None
        with self.lock:
            allocation = self.ledger.allocate(tier, len(rows))
        assert allocation is not None
        slots = split_slots(allocation.slots)
        pool.write(slots, rows, Proof(namespace.id, Epoch(EPOCH), hashes, _native.checksums(rows)))
        with self.lock:
            self.ledger.unpin(tier, self.ledger.create(namespace.id, tier, NO_PARENT, 0, hashes, allocation.slots))
            self.ledger.take_frames(InstanceId(OWNER), 0)
        for block, slot in zip(split_hashes(hashes), slots, strict=True):
            self._places[bytes(block)] = _Held(tier, slot)

    def evict(self, hashes: bytes, namespace: Namespace = NAMESPACE) -> None:
        """Hold them no more; their slots may hold others as soon as nobody reads them."""
        with self.lock:
            for tier in (Tier.HOST, Tier.NVME) if self.nvme is not None else (Tier.HOST,):
                self.ledger.evict(tier, hashes, EvictReason.CLEARED)
            self.ledger.take_frames(InstanceId(OWNER), 0)

    def slot_of(self, block: bytes, namespace: Namespace = NAMESPACE) -> np.ndarray:
        held = self._places[block]
        assert held.tier is Tier.HOST
        row: np.ndarray = self.host[held.slot]
        return row

    def withdraw(self, namespace: Namespace) -> None:
        del self.roots[namespace.id]
        if self.lending is not None:
            self.lending.withdraw(namespace.id)

    def admit(self, namespace: Namespace, root: bytes = b"") -> None:
        self.roots[namespace.id] = root or root_of(namespace)
        if self.lending is not None:
            self.lending.admit(namespace.id, self.roots[namespace.id])

    @property
    def pinned(self) -> int:
        """Slots that somebody pins."""
        with self.lock:
            counts = [
                self.ledger.counts(tier) for tier in (Tier.HOST, *((Tier.NVME,) if self.nvme is not None else ()))
            ]
        return sum(one.slots - one.free - one.evictable - one.allocated for one in counts)

    def _found_corrupt(self, tier: Tier, block: SequenceHash) -> None:
        self.suspected.append(bytes(block))
        with self.lock:
            self.ledger.evict(tier, block, EvictReason.CORRUPT)
            self.ledger.take_frames(InstanceId(OWNER), 0)


class NativeSite(SocketSite):
    """A native owner that lends over both sockets; its readers are native too."""

    lender: NativeLender  # type: ignore[assignment]  # it does what a MemoryLender does

    def __init__(self, transport: str, lender: NativeLender, limits: LentLimits, folder: Path, **options: Any) -> None:
        self.options = {"connections": 100} | options
        self.tls = options.get("tls")
        super().__init__(transport, lender, limits, folder)  # type: ignore[arg-type]

    def start(self) -> None:
        """Listen, where it listened before."""
        self.lending = self.lender.listen(self.unix, self.tcp, self._limits, **self.options)
        self.tcp = self.lending.tcp

    def stop(self) -> None:
        assert self.lending.close(), "a thread is still there"
        assert self.lending.stats()["blocks_lent_now"] == 0
        assert self.lending.stats()["refused_pins"] == 0

    def fence(self, fenced: bool) -> None:
        self.lending.fence(fenced)
