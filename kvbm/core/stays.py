"""Stays: since when and until when a block was held in a tier, and why that began and ended, as rows of an array."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np

from kvbm.core.events import EvictReason, MigrateCause
from kvbm.core.ids import HASH_BYTES, Epoch, InstanceId, NamespaceId

# Why a stay began: a MigrateCause, or one of these. NO_CODE: it is the end of a claim.
CREATED, LISTED = len(MigrateCause), len(MigrateCause) + 1
BEGINS = (*(cause.name.lower() for cause in MigrateCause), "created", "listed")

# Why it ended: an EvictReason, or one of these.
MOVED, RESTARTED, UNLISTED, REPLACED, CLAIMED = range(len(EvictReason), len(EvictReason) + 5)
ENDS = (*(reason.name.lower() for reason in EvictReason), "moved", "restarted", "unlisted", "replaced", "claimed")
LASTING = 0xFF

STAY_ROW = np.dtype(
    [
        ("begin_ns", "<u8"),  # wall time of the frame it began in, by its instance's clock
        ("end_ns", "<u8"),  # of the one it ended in; 0 while it lasts
        ("epoch", "<u8"),  # the instance's when it began
        ("end_epoch", "<u8"),  # when it ended, another one where that began anew; 0 while it lasts
        ("begin_offset", "<u8"),  # of the event it began with
        ("end_offset", "<u8"),  # of the one it ended with; 0 while it lasts
        ("hash", "u1", (HASH_BYTES,)),
        ("namespace", "<u4"),  # row of `namespaces`
        ("slot", "<u4"),  # in which it began; NO_SLOT
        ("position", "<u4"),  # of the block in its chain, from 0; NO_ROW where no event has said it
        ("from", "<u4"),  # the instance it was fetched from: row of `names`; NO_ROW
        ("tier", "u1"),
        ("begin", "u1"),  # as in BEGINS
        ("source", "u1"),  # the tier it was copied from; NO_CODE
        ("end", "u1"),  # as in ENDS; LASTING
        ("target", "u1"),  # of MOVED: the tier it went to; NO_CODE
        ("unused", "u1", (3,)),
    ],
    align=True,
)


TIER_STATE_ROW = np.dtype(
    [
        ("listed", "<u8"),  # blocks that its snapshot has listed so far
        ("snapshot", "<u4"),  # the one last begun
        ("is_open", "u1"),  # it has begun and not ended
        ("is_whole", "u1"),  # nothing was missed since a snapshot ended
        ("is_cluster", "u1"),  # its blocks are claims
        ("unused", "u1"),
    ]
)


class StayState(NamedTuple):
    """Where a fold stands, for another one to go on from.

    Attributes:
        tiers: TIER_STATE_ROW, a row a tier.
        namespaces, names: by the rows that name them.
        lasting: STAY_ROW, as `StayFold.lasting`. snapshots: uint32, of each the one its block was last gained or listed
            in.
    """

    epoch: Epoch
    tiers: np.ndarray
    namespaces: tuple[NamespaceId, ...]
    names: tuple[InstanceId, ...]
    lasting: np.ndarray
    snapshots: np.ndarray


class StayFold(Protocol):
    """What reading a log offline needs of `reference.history.StayHistory`, and what its native twin offers."""

    @property
    def namespaces(self) -> tuple[NamespaceId, ...]: ...
    @property
    def names(self) -> tuple[InstanceId, ...]: ...
    def evolve_frame(self, data: bytes, at: int = 0) -> None: ...
    def miss_events(self) -> None: ...
    def take_ended(self) -> np.ndarray: ...
    def lasting(self) -> np.ndarray: ...
    def count(self) -> int: ...
    def state(self) -> StayState: ...
    def resume(self, state: StayState) -> None: ...


NewStayFold = Callable[[], StayFold]
