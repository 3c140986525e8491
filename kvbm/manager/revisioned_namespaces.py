"""Which namespaces may use tiers that outlive the process or are shared: those that say which weights their blocks are
of.

A block in HBM and HOST goes with the engine that computed it. One in NVME, in a pod's folder or in OBJECT is found by
whoever comes to the same hash, and without a revision two models of one name come to the same.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvbm.core.arguments import refuse_namespace
from kvbm.core.errors import ArgumentValueError
from kvbm.core.ids import Namespace, NamespaceId


class RevisionedNamespaces:
    """The namespaces of one instance that name a revision. Under the manager's lock.

    Args:
        namespaces: those that are known; of others nobody knows whether they do, so they may not.
        all_may: whatever they are, known or not; for one that says nothing by itself, as a janitor.

    Attributes:
        refused: models of namespaces that name none.
        fields: of each known namespace, but for `all_may`. tenants: whose each is. block_tokens: tokens of a block of
            each.
        held_back: for now no namespace may: it is not known yet what was to be erased while the instance was away.
    """

    def __init__(self, namespaces: Iterable[Namespace] = (), all_may: bool = False) -> None:
        self.refused: dict[str, None] = {}
        self.fields: dict[NamespaceId, Namespace] = {}
        self.tenants: dict[NamespaceId, str] = {}
        self.block_tokens: dict[NamespaceId, int] = {}
        self.held_back = False
        self._all_may = all_may
        self._may: set[NamespaceId] = set()
        self._must_not: set[NamespaceId] = set()
        self.add(namespaces)

    def add(self, namespaces: Iterable[Namespace]) -> None:
        """Know more of them."""
        for namespace in namespaces:
            if not self._all_may:
                self.fields[namespace.id] = namespace
            self.tenants[namespace.id] = namespace.tenant
            self.block_tokens[namespace.id] = namespace.block_tokens
            if namespace.revision.strip():
                self._may.add(namespace.id)
            else:
                self._must_not.add(namespace.id)
                self.refused.setdefault(namespace.model)

    def may(self, namespace: NamespaceId) -> bool:
        """Whether its blocks may go to such tiers, and come from there."""
        return not self.held_back and (self._all_may or namespace in self._may)

    def check(self, namespace: NamespaceId) -> None:
        """Refuse what is no id of a namespace, or of one nobody has told of. Raises ArgumentError."""
        refuse_namespace(namespace)
        if not self.knows(namespace):
            raise ArgumentValueError(
                "namespace",
                f"{namespace.hex()} is not one the manager was opened with; give its Namespace to open_manager, or to "
                "declare before"
                " its first use",
            )

    def knows(self, namespace: NamespaceId) -> bool:
        """Whether it is one of those that are known."""
        return self._all_may or namespace in self._may or namespace in self._must_not

    def must_not(self, namespace: NamespaceId) -> bool:
        """Whether it is known to name no revision."""
        return namespace in self._must_not

    def why(self, tiers: Iterable[str]) -> str:
        """What is not used for whom, in one sentence; "" when all may use everything."""
        named, models = ", ".join(tiers), ", ".join(repr(model) for model in list(self.refused))
        if not named or not models or self._all_may:
            return ""
        return (
            f"namespaces of {models} name no revision, so {named} keeps none of their blocks: nothing would tell other "
            "weights apart;"
            " give Namespace(revision=…) a commit, or kvbm.weights_digest(path)"
        )
