"""What of kvbm.core exists twice, in C++. kvbm.assembly alone imports this.

A signature stands once: in the protocol that the native part implements, where there is one. mypy refuses to make an
instance of a class that takes its methods from a protocol. So a class is declared by what makes it, a function that
gives a protocol. Classes that are abstract here are made by native code alone, or begin with an underscore and say
what there is beyond a protocol. `RowCopier` is written out, as other native classes take no other copier.
`tests/unit/test_native_stub.py` compares all of it with the extension module.
"""

from abc import ABCMeta
from collections.abc import Sequence

import numpy as np

from kvbm.bridge.table import NewForeignTable
from kvbm.catalog.follow.checkpoints import Checkpointing
from kvbm.catalog.index import cluster_index, plain_frames
from kvbm.catalog.routing import router
from kvbm.core.ages import NewAges
from kvbm.core.backend import (
    Checksum,
    ChecksumRows,
    DecodeFrame,
    DerivedHashes,
    DigestHashes,
    EncodeFrame,
    EngineDigests,
    Fold,
    JoinedChecksums,
    LedgerProtocol,
    LockProtocol,
    ReadNumberList,
    ReadPlainQuestion,
    ScanFrames,
    SequenceHashes,
)
from kvbm.core.columns import FrameColumns
from kvbm.core.events import PoolStated
from kvbm.core.ids import InstanceId
from kvbm.core.policy import Share
from kvbm.core.stays import StayFold
from kvbm.core.usage import NewUsageMeter
from kvbm.engines.vllm.forwards import Touches
from kvbm.engines.vllm.told_tiers import NewToldTiers
from kvbm.pools.hbm import copy_queue
from kvbm.pools.hbm.paged import SegmentCopies
from kvbm.pools.hbm.rings import Ring
from kvbm.pools.host.rows import NewArena
from kvbm.pools.nvme.sealing import SealingEngine
from kvbm.pools.object import direct
from kvbm.pools.object.coding import DecodeBlocks, EncodeBlocks
from kvbm.streams.nats import messages
from kvbm.transport import native
from kvbm.transport.server import NewLendingServer

# Functions.

sequence_hashes: SequenceHashes
derived_hashes: DerivedHashes
engine_digests: EngineDigests
digest_hashes: DigestHashes
read_number_list: ReadNumberList
read_plain_question: ReadPlainQuestion
crc32c: Checksum
checksums: ChecksumRows
joined_checksums: JoinedChecksums
encode_frame: EncodeFrame
decode_frame: DecodeFrame
scan_frames: ScanFrames
encode_blocks: EncodeBlocks
decode_blocks: DecodeBlocks

def sequence_hashes_batch(
    prompts: Sequence[Sequence[int] | np.ndarray], block_tokens: int, roots: bytes | Sequence[bytes]
) -> list[bytes]: ...
def packed_tokens(tokens: Sequence[int] | np.ndarray) -> bytes: ...
def decode_columns(data: bytes, at: int = 0, limit: int | None = None) -> tuple[FrameColumns, int]: ...
def random_lines_ns(bytes: int, lines: int, snapshots: int, seed: int) -> list[float]: ...
def residency_mix(tier: int, block_hash: bytes) -> int: ...
def decode_peer_message(data: bytes) -> tuple[int, tuple[object, ...]]: ...
def kept_blocks(
    header: bytes, namespace: bytes, hashes: bytes, block_bytes: int, object_bytes: int
) -> list[tuple[int, int, int]] | None: ...
def encode_peer_message(kind: int, fields: tuple[object, ...]) -> bytes: ...
def peer_key_proof(key: bytes, role: int, reader_nonce: bytes, owner_nonce: bytes, owner: str) -> bytes: ...
def peer_open_proof(root: bytes, reader_nonce: bytes, owner_nonce: bytes, namespace: bytes, owner: str) -> bytes: ...

# Classes, by what makes them.

Arena: NewArena
BlockAges: NewAges
ForeignLedger: NewForeignTable
ToldTiers: NewToldTiers
UsageMeter: NewUsageMeter
LendingServer: NewLendingServer
PeerTls: native.NewPeerTls

def LastTouches(blocks: int) -> Touches: ...
def LedgerLock() -> LockProtocol: ...
def ObjectReceiver() -> direct.ObjectReceiver: ...
def NatsMessages() -> messages.NatsMessages: ...
def Ledger(
    pools: Sequence[PoolStated], eviction: str = "lru", event_bytes: int = ..., shares: Sequence[Share] = ()
) -> LedgerProtocol: ...
def PeerClient(
    is_tcp: bool,
    address: str,
    port: int,
    reader: str,
    owner: str,
    key: bytes,
    streams: int,
    copier: RowCopier,
    tls: native.PeerTls | None = None,
) -> native.PeerClient: ...

class _Residencies(Fold, metaclass=ABCMeta):
    @property
    def memory_bytes(self) -> int: ...

def Residencies(strict: bool = True) -> _Residencies: ...
def StayHistory() -> StayFold: ...

class _ClusterIndex(cluster_index.ClusterIndex, plain_frames.Threaded, Checkpointing, metaclass=ABCMeta):
    def needs_sweep(self) -> bool: ...
    def recomputed_digest(self, instance: InstanceId) -> int: ...

def ClusterIndex(capacity: int) -> _ClusterIndex: ...

class ApplyThread(plain_frames.ApplyThread, metaclass=ABCMeta):
    """Made by `ClusterIndex.apply_thread`."""

class Candidates(metaclass=ABCMeta):
    """A set of instances of one router, which makes it."""

    def __len__(self) -> int: ...

class Router(router.Router[Candidates], metaclass=ABCMeta):
    """Made by `ClusterIndex.router`."""

class _BlockIo(SealingEngine, metaclass=ABCMeta):
    def withhold(self, slot: int) -> None:
        """For tests: the device never ends this slot's transfers, until -1 is given."""

    def counts(self) -> dict[str, int]:
        """Blocks read, corrupt, failed, written and refused; transfers bounced and in_flight."""

def BlockIo(
    fds: Sequence[int],
    slots: int,
    block_bytes: int,
    io: str = "auto",
    direct: bool = False,
    depth: int = 32,
    offload_share: float = 0.25,
    verified: bool = True,
) -> _BlockIo:
    """It goes over io_uring, or over threads where that is refused.

    Args:
        verified: False for a measurement of what checking costs; such reads prove nothing.
    """

class RowCopier:
    """As `kvbm.pools.host.rows.RowCopies`, on its own threads.

    `threads`: that copy one run, its caller among them; 0: as many as help.
    """

    def __init__(self, threads: int = 0) -> None: ...
    @property
    def threads(self) -> int: ...
    @property
    def lacking(self) -> int: ...
    def copy_rows(
        self,
        target: np.ndarray,
        target_at: np.ndarray | None,
        source: np.ndarray,
        source_at: np.ndarray | None,
        checksums: np.ndarray | None = None,
    ) -> None: ...
    def checksum_rows(self, rows: np.ndarray, at: np.ndarray | None = None) -> np.ndarray: ...

class _SegmentTable(SegmentCopies, metaclass=ABCMeta):
    """The only copies that a native `CopyQueue` takes."""

def SegmentTable(
    addresses: np.ndarray, strides: np.ndarray, sizes: np.ndarray, slots: int, copier: RowCopier
) -> _SegmentTable: ...
def CopyQueue(copies: _SegmentTable) -> copy_queue.CopyQueue: ...

class _DeviceRing(Ring, metaclass=ABCMeta):
    @property
    def programs(self) -> int: ...
    @property
    def ring_bytes(self) -> int: ...

def DeviceRing(
    addresses: np.ndarray,
    strides: np.ndarray,
    sizes: np.ndarray,
    slots: int,
    copier: RowCopier,
    device: int,
    ring_bytes: int = ...,
    lot_bytes: int = ...,
    programs: int = 0,
    library: str = "libcuda.so.1",
) -> _DeviceRing:
    """`library` is NVIDIA's driver."""
