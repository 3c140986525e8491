"""Whose offload is next, where tenants have shares: each gets as many blocks for its weight as any other that wants
some.

A tenant that had nothing to offload saves up nothing: it comes in where the others are. No thread, clock or bytes here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from kvbm.core.ids import Namespace, NamespaceId
from kvbm.core.policy import OTHERS


class FairQueue:
    """See the module.

    Args:
        weights: tenant → its weight; who is not named has that of OTHERS, or 1, together with all who are not.
        tenants: namespace → whose it is.
    """

    def __init__(
        self, weights: Mapping[str, int] | None = None, tenants: Mapping[NamespaceId, str] | None = None
    ) -> None:
        self._weights = {OTHERS: 1} | dict(weights or {})
        self._tenants = dict(tenants or {})
        self._served = dict.fromkeys(self._weights, 0.0)  # blocks for weight 1, so far
        self._reached = 0.0  # what the tenant that was next last had been served

    def declare(self, namespaces: Iterable[Namespace]) -> None:
        """Know whose further namespaces are, before the first request of theirs."""
        self._tenants.update((one.id, one.tenant) for one in namespaces if one.tenant in self._weights)

    def tenant_of(self, namespace: NamespaceId) -> str:
        """Whose share a namespace belongs to."""
        tenant = self._tenants.get(namespace, OTHERS)
        return tenant if tenant in self._weights else OTHERS

    def begin(self, tenant: str) -> None:
        """A tenant that had nothing to offload has something now."""
        self._served[tenant] = max(self._served[tenant], self._reached)

    def next(self, tenants: Iterable[str]) -> str:
        """Whose turn it is, of those that have something; there is one."""
        tenant = min(tenants, key=self._served.__getitem__)
        self._reached = max(self._reached, self._served[tenant])
        return tenant

    def spend(self, tenant: str, blocks: int) -> None:
        """So many of its blocks are offloaded."""
        self._served[tenant] += blocks / self._weights[tenant]

    def above(self, waiting: Counter[str], tenant: str, blocks: int) -> str | None:
        """The tenant to drop from when the queue is full.

        The one with the highest queued/weight, if that exceeds `tenant`'s after adding `blocks`; else None.
        """
        most = max(waiting, key=lambda other: waiting[other] / self._weights[other])
        then = (waiting[tenant] + blocks) / self._weights[tenant]
        return most if most != tenant and waiting[most] / self._weights[most] > then else None
