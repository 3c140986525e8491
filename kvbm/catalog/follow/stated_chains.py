"""What instances have stated of how they hash tokens, by the scheme of their namespaces. Nothing of it is kept
anywhere: every heartbeat says it again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection
from typing import NamedTuple

from kvbm.core.chain_statement import ChainStatement, read_statement
from kvbm.core.ids import InstanceId, Namespace, NamespaceId
from kvbm.safe_log import RateLimitedLog


class _Stated(NamedTuple):
    digest: bytes
    statement: ChainStatement | None


class StatedChains:
    """See the module. One thread.

    Attributes:
        refused: statements that could not be used, each as often as it changed.
    Args:
        declared: the namespaces an instance has named.
    """

    def __init__(self, declared: Callable[[InstanceId], Collection[NamespaceId]]) -> None:
        self.refused = 0
        self._declared = declared
        self._stated: dict[InstanceId, _Stated] = {}
        self._by_scheme: dict[tuple[str, int], dict[ChainStatement, dict[InstanceId, None]]] = {}
        self._limited_log = RateLimitedLog()

    def take(self, instance: InstanceId, data: bytes) -> None:
        """An instance states this; b"" for nothing."""
        known, digest = self._stated.get(instance), hashlib.sha256(data).digest() if data else b""
        if (b"" if known is None else known.digest) == digest:
            return
        self.forget(instance)
        if not data:
            return
        statement, why = read_statement(data)
        self._stated[instance] = _Stated(digest, statement)
        if statement is not None:
            same = self._by_scheme.setdefault((statement.scheme, statement.scheme_seed), {})
            same.setdefault(statement, {})[instance] = None
            return
        self.refused += 1
        self._limited_log.warn(
            "chain.refused",
            instance=instance,
            why=why,
            what_to_do="tokens are not hashed for its namespaces; upgrade the older of catalog and engine",
        )

    def forget(self, instance: InstanceId) -> None:
        """Nothing is known of the instance."""
        known = self._stated.pop(instance, None)
        if known is None or known.statement is None:
            return
        scheme = known.statement.scheme, known.statement.scheme_seed
        same = self._by_scheme[scheme]
        del same[known.statement][instance]
        if not same[known.statement]:
            del same[known.statement]
        if not same:
            del self._by_scheme[scheme]

    def of(self, namespace: Namespace) -> list[ChainStatement]:
        """What is stated of a namespace: nothing, one statement, or several that contradict each other.

        Where several are, those of instances count that have named the namespace.
        """
        same = self._by_scheme.get((namespace.scheme, namespace.scheme_seed), {})
        found = [one for one in same if one.group_of(namespace) is not None]
        if len(found) > 1:
            named = [one for one in found if any(namespace.id in self._declared(by) for by in same[one])]
            return named or found
        return found
