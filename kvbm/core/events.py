"""The facts: what happened to blocks, one small struct each, in the past tense.

A run event covers consecutive blocks of one namespace: `hashes` is packed (16 bytes a block), `slots` is packed (4
bytes a block) or empty where kvbm does not own the tier's slots. Hashes of a run are never repeated within it.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum

import msgspec

from kvbm.core.ids import NO_PARENT, Epoch, InstanceId, Namespace, NamespaceId, Reach, SequenceHash, Tier, short

PLACE_OF_A_RUN = "give NO_PARENT with start 0, and the hash of the block before with a later start"
MAX_ATTRIBUTES = 64
MAX_ATTRIBUTE_BYTES = 16 << 10
MAX_POOLS = 64
MAX_TOPOLOGY = 64
MAX_NAMESPACES = 4096  # that one start names
MAX_USAGE_ROWS = 1024  # of one UsageRecorded


class EvictReason(IntEnum):
    """Why residencies were withdrawn."""

    CAPACITY = 0
    TTL = 1
    QUOTA = 2
    CLEARED = 3
    CORRUPT = 4
    MISSING = 5
    SHUTDOWN = 6


class MigrateCause(IntEnum):
    """Why bytes moved."""

    OFFLOAD = 0
    ONBOARD = 1
    FETCH = 2


class StopReason(IntEnum):
    """Why an instance ended its stream."""

    SHUTDOWN = 0
    OVERFLOW = 1
    FENCED = 2  # reserved: nothing sends it, for a fence says that another run has the instance's place


class PoolStated(msgspec.Struct, frozen=True, array_like=True):
    """One pool of an instance, as its start declares it.

    Attributes:
        tier: class of medium.
        slots: how many blocks fit; 0 for a pool without slots (OBJECT).
        block_bytes: bytes of one block.
        reach: who can read it without the owner.
        name: of a pool of cluster reach, the name all its users share, at most MAX_NAME_BYTES; else "".
    """

    tier: Tier
    slots: int
    block_bytes: int
    reach: Reach = Reach.INSTANCE
    name: str = ""


class InstanceStarted(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A new epoch begins and nothing is held in any tier. Always at offset 0.

    Attributes:
        epoch: the new epoch.
        pools: the pools, hottest first; at most MAX_POOLS. topology has at most MAX_TOPOLOGY texts.
        namespaces: the namespaces known at the start; at most MAX_NAMESPACES.
        topology: where the instance stands, outermost first, such as ("zone-a", "rack-3", "host-17").
        engine, version: who embeds the manager; kvbm's version. They and each text of `topology` have at most
            MAX_TEXT_BYTES.
        attributes: what else is said of the instance, for readers to come; those of today keep it unread. At most
            MAX_ATTRIBUTES names of 1 to 255 bytes, MAX_ATTRIBUTE_BYTES with their values.
    """

    epoch: Epoch
    pools: tuple[PoolStated, ...] = ()
    namespaces: tuple[Namespace, ...] = ()
    topology: tuple[str, ...] = ()
    engine: str = ""
    version: str = ""
    attributes: Mapping[str, bytes] = {}


class BlocksCreated(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks are full, immutable and addressable.

    Attributes:
        parent: hash of the block before the run, NO_PARENT when the run begins its chain.
        start: position of the run's first block in its chain, in blocks; 0 if and only if there is no parent
            (`misplaced`).
    """

    namespace: NamespaceId
    tier: Tier
    hashes: bytes
    slots: bytes = b""
    parent: SequenceHash = NO_PARENT
    start: int = 0


class BlocksMigrated(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes have arrived in another tier, or from another instance.

    Attributes:
        source: the tier, or the instance, the bytes came from.
        target: the tier they are in now.
        kept: whether the source tier still holds them; if not, it is withdrawn by this same event.
        slots: where they are in the target tier.
    """

    namespace: NamespaceId
    source: Tier | InstanceId
    target: Tier
    kept: bool
    cause: MigrateCause
    hashes: bytes
    slots: bytes = b""


class BlocksEvicted(msgspec.Struct, frozen=True, kw_only=True):
    """Residencies are withdrawn; their slots may be reused once this event counts."""

    namespace: NamespaceId
    tier: Tier
    reason: EvictReason
    hashes: bytes


class ResidenciesListed(msgspec.Struct, frozen=True, kw_only=True):
    """Held at this very offset, as part of a snapshot."""

    namespace: NamespaceId
    tier: Tier
    snapshot: int
    hashes: bytes
    slots: bytes = b""


class SnapshotEnded(msgspec.Struct, frozen=True, kw_only=True):
    """What this tier neither listed nor gained since the snapshot began is not held.

    A snapshot begins with its first ResidenciesListed; one without any begins here, so it says that nothing is held.

    Attributes:
        count: blocks the snapshot listed in this tier.
    """

    tier: Tier
    snapshot: int
    count: int


class InstanceStopped(msgspec.Struct, frozen=True, kw_only=True):
    """The instance ended cleanly."""

    reason: StopReason


class UsageRow(msgspec.Struct, frozen=True, array_like=True):
    """What one tenant has used, in whole numbers below 2**64. Each tuple has a number for each `Tier`, in its order.

    Attributes:
        tenant: at most MAX_NAME_BYTES of UTF-8, without NUL; UNKNOWN: of namespaces that nobody has told of.
        block_ms: blocks held, times the milliseconds they were; pools of cluster reach left out.
        put_blocks: blocks that were created in the tier, or offloaded to it.
        read_blocks: blocks that requests got instead of computing them, by the tier they were in.
        saved_tokens: of prompts, in all those blocks.
        unrated_tokens: of these, those that came while the engine had not said how quickly it computes.
        saved_us: microseconds that computing the others would have taken, at the rate the engine had measured then.
    """

    tenant: str
    block_ms: tuple[int, int, int, int] = (0, 0, 0, 0)
    put_blocks: tuple[int, int, int, int] = (0, 0, 0, 0)
    read_blocks: tuple[int, int, int, int] = (0, 0, 0, 0)
    saved_tokens: int = 0
    unrated_tokens: int = 0
    saved_us: int = 0


class UsageRecorded(msgspec.Struct, frozen=True, kw_only=True):
    """What tenants have used of an instance from one time to another, which lie in one clock hour.

    It changes nothing that is held. Where the time from one to the next is not covered, what was used in it is lost.

    Attributes:
        since_ms, until_ms: Unix time in milliseconds, by the instance's clock.
        block_bytes: bytes of a block, by tier; 0 where there is no pool.
        rows: by tenant, in the order of their UTF-8, those that have used something; at most MAX_USAGE_ROWS. More are
            in further events of the same time.
        is_last: the instance stops cleanly; time that passes until its next start is no hole.
    """

    since_ms: int
    until_ms: int
    block_bytes: tuple[int, int, int, int] = (0, 0, 0, 0)
    rows: tuple[UsageRow, ...] = ()
    is_last: bool = False


def misplaced(parent: SequenceHash, start: int) -> str:
    """What contradicts itself in the place of a run, in words;

    "" where nothing does: a chain's first block alone has no parent.
    """
    if (parent == NO_PARENT) == (start == 0):
        return ""
    if start:
        return f"start is {start}, and there is no parent"
    return f"start is 0, and there is a parent, {short(parent)}"


RunEvent = BlocksCreated | BlocksMigrated | BlocksEvicted | ResidenciesListed
Event = InstanceStarted | RunEvent | SnapshotEnded | InstanceStopped | UsageRecorded

JANITOR = "janitor"  # the engine of an instance that serves no prompts
MAX_RUN_BLOCKS = 1024  # a run is decided under the ledger's lock and must fit a frame, so it stays short
