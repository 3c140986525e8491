"""What a janitor wants done, one thing at a time, and what it is told in answer.

The driver does them; tests do them by hand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from kvbm.core.events import EvictReason
from kvbm.core.ids import NamespaceId
from kvbm.janitor.lease import StoreStatus
from kvbm.janitor.used import UsedList

A = TypeVar("A")


class ObjectSeen(NamedTuple):
    """An object of the listing.

    Attributes:
        modified_ns: by the store's clock.
    """

    name: str
    size_bytes: int
    modified_ns: int


class Header(NamedTuple):
    """What an object proves to hold.

    Attributes:
        hashes: packed, all its blocks in the order of their chain; the last names it.
        size_bytes: of the whole object.
    """

    namespace: NamespaceId
    hashes: bytes
    size_bytes: int


class Unread(Enum):
    """Why a name is not known to hold blocks of the pool."""

    GONE = "gone"  # nothing has the name
    FOREIGN = "foreign"  # something has it that does not prove to be an object of this pool, or is not ours to open
    UNKNOWN = "unknown"  # the store did not say


class BlockRun(NamedTuple):
    """Blocks of a namespace, packed."""

    namespace: NamespaceId
    hashes: bytes


class ClaimColumns(NamedTuple):
    """The claims of one namespace in a pool.

    Attributes:
        hashes: packed, ascending.
        last_ns: when each was last claimed or used, as frames are stamped; i64.
        tenant: whose they are, "" where nobody has told.
    """

    namespace: NamespaceId
    hashes: bytes
    last_ns: np.ndarray
    tenant: str


class KnownClaims(NamedTuple):
    """What SQL knows of a pool.

    Attributes:
        quotas: bytes each tenant may have here.
    """

    columns: Sequence[ClaimColumns]
    quotas: Mapping[str, int]


class Effect(Generic[A]):
    """Something to be done, answered with an A. What it raises ends the run."""


@dataclass(frozen=True)
class Inspect(Effect[StoreStatus]):
    """Read the store's clock and the lease."""


@dataclass(frozen=True)
class PutLease(Effect[bool]):
    """Change the lease if it still is `expected`, b"" for none. False: it was another."""

    body: bytes
    expected: bytes


@dataclass(frozen=True)
class Begin(Effect[None]):
    """Begin as an instance: from here on events can be emitted."""


@dataclass(frozen=True)
class ReadLists(Effect[dict[str, list[str]]]):
    """The lists of tombstones in the store: name of the list → names."""


@dataclass(frozen=True)
class ReadClaims(Effect[KnownClaims]):
    """All claims of the pool, from SQL."""


@dataclass(frozen=True)
class ReadUsed(Effect[list[UsedList]]):
    """What other clusters have left of what they use."""


@dataclass(frozen=True)
class WriteUsed(Effect[None]):
    """Leave for other clusters what this one uses."""

    body: bytes


@dataclass(frozen=True)
class ObjectNames(Effect[list[str]]):
    """What the objects are named whose last blocks these are, `blocks` to an object; none where nobody here can
    tell.
    """

    blocks: int
    run: BlockRun


@dataclass(frozen=True)
class ListPage(Effect[list[ObjectSeen]]):
    """The next objects of the listing behind a name; none at its end."""

    after: str


@dataclass(frozen=True)
class Describe(Effect[list[Header | Unread]]):
    """Read headers: what each object holds."""

    names: tuple[str, ...]


@dataclass(frozen=True)
class EmitClaims(Effect[None]):
    """Record claims, or their withdrawal for a reason, as events of the janitor."""

    runs: tuple[BlockRun, ...]
    withdrawn: EvictReason | None = None


@dataclass(frozen=True)
class WaitForSql(Effect[bool]):
    """Wait a while for SQL to have all events that were emitted before now, by whomever; whether it has."""

    fresh: (
        bool  # emit something new first, so that what others have emitted before now is waited for; else go on waiting
    )


@dataclass(frozen=True)
class ClaimedLast(Effect[list[int]]):
    """When a block of each of these runs was last claimed, from SQL now; 0 where none is claimed."""

    runs: tuple[BlockRun, ...]


@dataclass(frozen=True)
class WriteList(Effect[None]):
    """Put a list of tombstones, or change it to fewer names; without any, it goes."""

    name: str
    names: tuple[str, ...]
    before: tuple[str, ...] = ()


@dataclass(frozen=True)
class Delete(Effect[list[bool]]):
    """Delete objects; for each whether nothing has its name any more."""

    names: tuple[str, ...]


@dataclass(frozen=True)
class Pause(Effect[None]):
    """Let time pass."""

    seconds: float
