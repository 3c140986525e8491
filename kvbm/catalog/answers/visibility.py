"""What of the cluster a caller may know of: the namespaces of its tenants, and the instances that serve one of them.

What a caller may not know of takes the same way as what does not exist: it is not among the caller's own, which is all
that is looked at, and what is asked of the index then is a namespace that nobody has. So neither answers nor their
times tell the two apart.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from itertools import islice
from typing import Protocol

from kvbm.catalog.access.callers import Caller
from kvbm.catalog.follow.known_namespaces import KnownNamespaces
from kvbm.core.ids import HASH_BYTES, InstanceId, Namespace, NamespaceId

NOWHERE = NamespaceId(secrets.token_bytes(HASH_BYTES))  # of this process; nothing is ever written under it
NOBODY = InstanceId("")  # a name no instance can have


class NamespaceDeclarations(Protocol):
    """What instances have declared; `Sequencer` is one."""

    def namespaces(self) -> Mapping[NamespaceId, Namespace]:
        """Namespaces whose fields are known, by id."""

    @property
    def known_namespaces(self) -> KnownNamespaces:
        """The same, in the order they became so."""

    def declared(self, instance: InstanceId) -> frozenset[NamespaceId]:
        """Namespaces that an instance has named; empty when none are known."""


class Visibility:
    """See the module."""

    def __init__(self, declarations: NamespaceDeclarations) -> None:
        self._declarations = declarations
        self._of_tenants: dict[str, dict[NamespaceId, Namespace]] = {}
        self._known_seen = self._removals_seen = 0

    def fields(self, caller: Caller, namespace: NamespaceId) -> Namespace | None:
        """The fields of a namespace that the caller may know of, if they are known."""
        if caller.sees_all:
            return self._declarations.namespaces().get(namespace)
        known = self._by_tenant()
        return next((found for tenant in caller.tenants or () if (found := known.get(tenant, {}).get(namespace))), None)

    def key(self, caller: Caller, asked: Namespace | NamespaceId) -> NamespaceId:
        """What to ask the index for: the namespace, or else `NOWHERE`.

        An id tells no tenant. One whose fields no instance has declared is nobody's, but for callers of all tenants;
        fields are their tenant's, whether an instance has declared them or not.
        """
        if isinstance(asked, Namespace):
            namespace = asked.id
            return namespace if caller.sees_all or asked.tenant in (caller.tenants or ()) else NOWHERE
        return asked if caller.sees_all or self.fields(caller, asked) is not None else NOWHERE

    def namespaces(self, caller: Caller) -> Mapping[NamespaceId, Namespace]:
        """Those the caller may know of."""
        if caller.sees_all:
            return self._declarations.namespaces()
        known = self._by_tenant()
        return {key: found for tenant in caller.tenants or () for key, found in known.get(tenant, {}).items()}

    def newest(self, caller: Caller, most: int) -> dict[NamespaceId, Namespace]:
        """So many of `namespaces` at most, of each tenant those that became known last; it looks at no others."""
        if caller.sees_all:
            each = [self._declarations.known_namespaces.by_id]
        else:
            known = self._by_tenant()
            each = [known[tenant] for tenant in caller.tenants or () if tenant in known]
        found = ((name, one[name]) for one in each for name in islice(reversed(one), most))
        return dict(islice(found, most))

    def instance(self, caller: Caller, instance: InstanceId) -> bool:
        """Whether a caller may know of an instance: one that has named a namespace of its tenants, whose fields are
        known.
        """
        if caller.sees_all:
            return True
        declared, known = self._declarations.declared(instance), self._by_tenant()
        return any(not known[tenant].keys().isdisjoint(declared) for tenant in caller.tenants or () if tenant in known)

    def waited_for(self, caller: Caller, instance: InstanceId) -> InstanceId:
        """The instance, or `NOBODY` in place of one that the caller may not know of.

        It looks for each of the caller's own namespaces, so that it takes as long for an instance nobody has heard of.
        """
        if caller.sees_all:
            return instance
        declared = self._declarations.declared(instance)
        serves = sum(namespace in declared for namespace in self.namespaces(caller))
        return instance if serves else NOBODY

    def _by_tenant(self) -> Mapping[str, dict[NamespaceId, Namespace]]:
        known = self._declarations.known_namespaces
        if known.removals != self._removals_seen:
            self._of_tenants, self._known_seen, self._removals_seen = {}, 0, known.removals
        if len(known.by_id) != self._known_seen:
            for key in known.behind(self._known_seen):
                found = known.by_id[key]
                self._of_tenants.setdefault(found.tenant, {})[key] = found
            self._known_seen = len(known.by_id)
        return self._of_tenants
