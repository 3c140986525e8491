"""The native functions and classes, behind the protocols of core and pools. Nothing else in kvbm names them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from kvbm import _native
from kvbm.bridge.table import NewForeignTable
from kvbm.catalog.index.cluster_index import NewIndex
from kvbm.core.ages import FOLLOWED, BlockAges, NewAges
from kvbm.core.backend import Backend, LockProtocol, NewFold, NewLedger
from kvbm.core.ids import Tier
from kvbm.core.stays import NewStayFold
from kvbm.core.usage import NewUsageMeter
from kvbm.pools.base import SlotPool
from kvbm.pools.hbm.copy_queue import CopyQueue
from kvbm.pools.hbm.paged import NewSegmentCopies, PagedLayout
from kvbm.pools.hbm.rings import NewRing, Ring
from kvbm.pools.host.rows import NewArena
from kvbm.pools.nvme.sealing import OpenSealing
from kvbm.pools.object.coding import BlockCoder
from kvbm.pools.object.direct import NewObjectReceiver
from kvbm.streams.nats.messages import NewMessages
from kvbm.transport.native import NewPeerTls
from kvbm.transport.server import NewLendingServer

_MOST_AGED = 1 << 18  # blocks whose ages are followed
NATIVE = Backend(
    "native",
    _native.sequence_hashes,
    _native.derived_hashes,
    _native.engine_digests,
    _native.digest_hashes,
    _native.crc32c,
    _native.checksums,
    _native.joined_checksums,
    _native.encode_frame,
    _native.decode_frame,
    _native.scan_frames,
    _native.read_number_list,
    _native.read_plain_question,
)
NATIVE_FOLD: NewFold = _native.Residencies
NATIVE_LEDGER: NewLedger = _native.Ledger
NEW_LEDGER_LOCK: Callable[[], LockProtocol] = _native.LedgerLock
NATIVE_INDEX: NewIndex = _native.ClusterIndex
NATIVE_MESSAGES: NewMessages = _native.NatsMessages
NATIVE_AGES: NewAges = _native.BlockAges
NATIVE_STAYS: NewStayFold = _native.StayHistory
NATIVE_METER: NewUsageMeter = _native.UsageMeter
NEW_FOREIGN_TABLE: NewForeignTable = _native.ForeignLedger


class Core(NamedTuple):
    """What a manager makes of events with: the native functions, or in tests the readable ones that specify them."""

    backend: Backend
    new_ledger: NewLedger
    new_fold: NewFold


NATIVE_CORE = Core(NATIVE, NATIVE_LEDGER, NATIVE_FOLD)
NATIVE_ARENA: NewArena = _native.Arena
OPEN_BLOCK_IO: OpenSealing = _native.BlockIo  # as `pools.nvme.sealing.OpenSealing`; there is no readable implementation
NEW_PEER_CLIENT = _native.PeerClient  # as `transport.native.NewPeerClient`, beside the threads that copy
NEW_PEER_TLS: NewPeerTls = _native.PeerTls
NEW_LENDING_SERVER: NewLendingServer = _native.LendingServer
RowCopier = _native.RowCopier  # as `pools.host.rows.RowCopies`
NEW_OBJECT_RECEIVER: NewObjectReceiver = _native.ObjectReceiver
CODER = BlockCoder(_native.encode_blocks, _native.decode_blocks)  # of blocks in objects


def ages_of(pools: Mapping[Tier, SlotPool]) -> BlockAges:
    """What follows how old an instance's blocks become: all of them, or of large pools a part, in some MiB."""
    slots = sum(pool.slots for tier, pool in pools.items() if tier in FOLLOWED)
    return NATIVE_AGES(_MOST_AGED, max(1, -(-2 * slots // _MOST_AGED)))


def segment_copies(copier: _native.RowCopier) -> NewSegmentCopies:
    """Copies of blocks that lie in pieces, on the threads of a copier."""
    return lambda addresses, strides, sizes, slots: _native.SegmentTable(addresses, strides, sizes, slots, copier)


def device_rings(copier: _native.RowCopier, programs: int = 0) -> NewRing:
    """Rings of an HBM pool on a GPU: NVIDIA's driver is looked for when the first is made.

    Args:
        copier: computes checksums, on its threads.
        programs: of one launch; 0: half as many as the GPU has multiprocessors.
    """

    def made(
        addresses: np.ndarray, strides: np.ndarray, sizes: np.ndarray, slots: int, device: int, ring_bytes: int
    ) -> Ring:
        return _native.DeviceRing(
            addresses, strides, sizes, slots, copier, device, ring_bytes=ring_bytes, programs=programs
        )

    return made


def copy_queue(layout: PagedLayout, threads: int = 0) -> CopyQueue:
    """Copies of an engine's blocks on a CPU, in a thread of their own that needs no GIL.

    Args:
        threads: that copy; 0: as many as help.
    """
    return _native.CopyQueue(_native.SegmentTable(*layout.segments, layout.slots, _native.RowCopier(threads)))


decode_columns = _native.decode_columns  # frames → arrays, as `core.columns.decode_columns`
hash_prompts = _native.sequence_hashes_batch  # as `core.hashing.sequence_hashes_batch`
last_touches = _native.LastTouches  # as `engines.vllm.forwards.Touches`
packed_tokens = _native.packed_tokens  # token ids as u32: the bytes of `core.hashing.token_column`
told_tiers = _native.ToldTiers  # as `engines.vllm.told_tiers.NewToldTiers`
