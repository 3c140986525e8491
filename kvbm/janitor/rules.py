"""What a janitor goes by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from kvbm.core.ids import NamespaceId
from kvbm.janitor.holdings import TenantPart

_USED_S = 30 * 86_400.0  # where nothing goes for its age, other clusters learn of uses so far back


class Rules(NamedTuple):
    """What a janitor goes by.

    Attributes:
        ttl_s: objects go that nobody has claimed or used for so long; 0: never.
        quota_bytes: the least recently used go while there are more; 0: no limit.
        grace_s: between a withdrawal that everybody can see and the deletion.
        young_s: an object without a claim may get one yet for so long.
        skew_s: how far clocks of instances, janitors and store may be apart. It is added to the TTL, and a janitor
            whose clock is farther from the store's does not work.
        lease_s: for how long the lease is taken.
        sql_wait_s: how long the catalog may take to store what was emitted.
        used_s: SQL may tell the last use of a block so much early. It is added to the TTL.
        only_blocks: the k of this pool; 0: every k that is there.
        parts: of tenants, by name; OTHERS for all that are not named.
        sealed: whether its objects are those whose names tell nothing; others are not this pool's, then.
        alone: the operator says that no other janitor works on the store; counts where the store cannot keep a lease.
        erase: an erasure: objects of these namespaces go, whatever their age, and no others. Those that hold one of the
            blocks, or all where no block is named.
    """

    ttl_s: float
    quota_bytes: int
    grace_s: float
    young_s: float = 60.0
    skew_s: float = 60.0
    lease_s: float = 60.0
    sql_wait_s: float = 60.0
    used_s: float = 0.0
    only_blocks: int = 0
    sealed: bool = False
    parts: Mapping[str, TenantPart] = {}
    erase: Mapping[NamespaceId, frozenset[bytes]] | None = None
    alone: bool = False

    @property
    def older_ns(self) -> int:
        """The age from which objects go.

        Clocks that differ by less than is allowed, and uses that SQL does not tell apart, make none go early.
        """
        return int(((self.ttl_s or _USED_S) + self.skew_s + self.used_s) * 1_000_000_000)

    @property
    def batch_s(self) -> float:
        """How long a batch of deletions may take: it must end before the lease does."""
        return self.lease_s / 4
