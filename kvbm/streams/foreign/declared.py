"""What each start of a foreign engine's instance says: its pools, its namespaces, and whose they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvbm.core.events import InstanceStarted, PoolStated
from kvbm.core.ids import Epoch, Namespace, NamespaceId
from kvbm.streams.foreign.identity import MAX_NAMESPACES


class Said(NamedTuple):
    """What each start says of the instance."""

    topology: tuple[str, ...] = ()
    engine: str = ""
    version: str = ""


class DeclaredNamespaces:
    """Which namespaces the starts of an instance name, and what else they say.

    Attributes:
        pools: its tiers.
        overflowed: never; what waits is taken at each turn.
    """

    overflowed = False

    def __init__(self, pools: Sequence[PoolStated], said: Said) -> None:
        self.pools = tuple(pools)
        self._said = said
        self._namespaces: dict[NamespaceId, Namespace] = {}

    def declare(self, namespace: Namespace) -> bool:
        """Name a namespace at the next start; whether it was not named before.

        Beyond what a source may have the oldest goes.
        """
        if namespace.id in self._namespaces:
            return False
        self._namespaces[namespace.id] = namespace
        if len(self._namespaces) > MAX_NAMESPACES:
            del self._namespaces[next(iter(self._namespaces))]
        return True

    def declared(self) -> tuple[NamespaceId, ...]:
        """The namespaces that were named."""
        return tuple(self._namespaces)

    def started(self, epoch: Epoch) -> InstanceStarted:
        """The event with which an epoch begins."""
        namespaces = tuple(self._namespaces.values())
        return InstanceStarted(epoch=epoch, pools=self.pools, namespaces=namespaces, **self._said._asdict())
