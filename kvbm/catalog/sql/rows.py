"""The rows that a projection of the stream brings to SQL, and the batch they go in.

Values alone: no database library is needed for them.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

import msgspec

from kvbm.core.events import PoolStated
from kvbm.core.ids import Epoch, InstanceId, Namespace, NamespaceId, Offset
from kvbm.core.usage import UsageEntry


class InstanceStatus(Enum):
    """Whether an instance's newest epoch has ended cleanly."""

    LIVE = "live"
    STOPPED = "stopped"


class InstanceRow(msgspec.Struct, frozen=True, kw_only=True):
    """An instance as its newest epoch declares it.

    A row of an older epoch of one run's than the stored one changes nothing.

    Attributes:
        run: of the process that began the epoch, as in `Fence`; "" when it is not known.
    """

    id: InstanceId
    cluster: str
    epoch: Epoch
    first_seen_ns: int
    last_frame_ns: int
    engine: str = ""
    version: str = ""
    topology: tuple[str, ...] = ()
    pools: tuple[PoolStated, ...] = ()
    state: InstanceStatus = InstanceStatus.LIVE
    run: str = ""


class EpochRow(msgspec.Struct, frozen=True, kw_only=True):
    """One epoch of an instance, and how far it has been read.

    Attributes:
        ended_ns, end_reason: None and "" while it runs.
        next_offset, digest: after the last frame that was applied.
        run: of the process that began it; two lives may have had an epoch of one number, and the newer one's row stays.
    """

    instance: InstanceId
    epoch: Epoch
    started_ns: int
    ended_ns: int | None = None
    end_reason: str = ""
    next_offset: Offset = Offset(0)
    digest: int = 0
    run: str = ""


class NamespaceRow(msgspec.Struct, frozen=True, kw_only=True):
    """A namespace whose fields an instance has declared. `id` is the fields' digest and is not checked here."""

    id: NamespaceId
    fields: Namespace
    first_seen_ns: int


class InstancePosition(msgspec.Struct, frozen=True, kw_only=True):
    """How far an instance's stream has been applied. It never moves back within a life.

    Attributes:
        run: of the process that began the epoch; "" when it is not known.
    """

    instance: InstanceId
    epoch: Epoch
    next_offset: Offset
    run: str = ""


class ClaimRun(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks that one instance claims for a pool of cluster reach, or takes its claim back from.

    Attributes:
        hashes: packed, 16 bytes a block.
        at_ns: wall time of the frame.
        withdrawn: the blocks are gone; else they are claimed.
    """

    pool: str
    namespace: NamespaceId
    hashes: bytes
    instance: InstanceId
    at_ns: int
    withdrawn: bool = False


class ForgottenRow(msgspec.Struct, frozen=True, kw_only=True):
    """That an instance was forgotten. It stays while something could bring the instance back that was said before.

    Attributes:
        stream, sequence: messages of the instance up to here count for nothing; a later one makes it known again.
        until_ns: it is needed until this wall time at least.
        pulse_ns: time that its last heartbeat bears, which the stream may still keep; 0: none was heard.
        declared: as it was known, for the pools of one that goes on in the epoch in which it was forgotten; None: not
            known.
    """

    instance: InstanceId
    stream: str
    sequence: int
    until_ns: int
    pulse_ns: int = 0
    declared: InstanceRow | None = None


class AbsenceRow(msgspec.Struct, frozen=True, kw_only=True):
    """For how long an instance is gone.

    Attributes:
        unheard_s: time in which a catalog listened and did not hear it.
        sequence: of its last message.
    """

    instance: InstanceId
    unheard_s: int
    sequence: int = 0


class StoreBatch(msgspec.Struct, frozen=True, kw_only=True):
    """What the projection changed between two positions of a stream.

    Attributes:
        stream: the stream's name: <whose>@<which>. Of those of one <whose> the last to begin counts, and the others are
            over.
        previous: the position the projection stood at, 0 before the first message.
        stream_sequence: the position after the batch, above `previous`.
        fingerprint: of the message there, as in `Mark`; None: not known.
        instances, epochs, namespaces, positions: rows as they are now; one a key is enough, of several the last counts.
        usages: what tenants have used; what is stored already stays.
        claims: in stream order, for a block may be claimed and withdrawn in one batch.
        has_extra_rows: there are rows that come from no message after `previous`. extra_claims: so many of the claims,
            the first. Another catalog that has stored the same messages has not stored these.
        spoke: of each of `instances`, the sequence of its last message: rows of one that was forgotten after it change
            nothing.
    """

    stream: str
    previous: int
    stream_sequence: int
    fingerprint: int | None = None
    instances: tuple[InstanceRow, ...] = ()
    epochs: tuple[EpochRow, ...] = ()
    namespaces: tuple[NamespaceRow, ...] = ()
    claims: tuple[ClaimRun, ...] = ()
    usages: tuple[UsageEntry, ...] = ()
    positions: tuple[InstancePosition, ...] = ()
    has_extra_rows: bool = False
    extra_claims: int = 0
    spoke: dict[InstanceId, int] = {}


class InstanceRows(NamedTuple):
    """The rows of one instance as they are now, and the sequence of its last message."""

    instance: InstanceRow
    epoch: EpochRow
    position: InstancePosition
    spoke: int = 0
