"""Which instances prompts of a namespace may be sent to: sets that are kept as instances come, go and declare what they
serve.

So a question names a few sets, and nothing is asked of each instance.
"""

from __future__ import annotations

from collections.abc import Callable, Sized
from functools import lru_cache
from typing import Generic, NamedTuple, Protocol, TypeVar

import msgspec

from kvbm.catalog.access.callers import Caller
from kvbm.catalog.follow.known_namespaces import KnownNamespaces
from kvbm.catalog.members.liveness import Liveness
from kvbm.catalog.routing.router import Router
from kvbm.catalog.sql.rows import InstanceRow
from kvbm.core.events import JANITOR
from kvbm.core.ids import InstanceId, Namespace, NamespaceId

_MOST_SERVING = 1024  # namespaces of which it is remembered who serves them; whoever asks may name any

C = TypeVar("C", bound=Sized)
K = TypeVar("K")


class Declarations(Protocol):
    """What instances have declared; `Sequencer` is one."""

    def namespaces(self) -> dict[NamespaceId, Namespace]:
        """Fields of namespaces by their ids, as far as they are known."""

    @property
    def known_namespaces(self) -> KnownNamespaces:
        """Namespaces whose fields are known, in the order they became so."""

    def declared(self, instance: InstanceId) -> frozenset[NamespaceId]:
        """Namespaces that an instance has named; empty when none are known."""

    def declares_nothing(self, instance: InstanceId) -> bool:
        """Whether an instance has said that it names none."""

    def instance_row(self, instance: InstanceId) -> InstanceRow | None:
        """What an instance's start has declared; None when nothing of it was read."""


class _Place(NamedTuple):
    """In which sets an instance is, beside that of all.

    Attributes:
        is_undeclared: it has said that it names no namespace.
        models, tenants: of the namespaces it has named.
        others: namespaces it has named whose fields are not known.
    """

    is_undeclared: bool
    models: frozenset[Namespace]
    tenants: frozenset[str]
    others: frozenset[NamespaceId]


@lru_cache(maxsize=1024)
def model_of(namespace: Namespace) -> Namespace:
    """What an engine must run to serve a namespace: all of its fields but tenant, LoRA and KV group."""
    return msgspec.structs.replace(namespace, tenant="", lora="", kv_group=0)


class CandidateSets(Generic[C]):
    """See the module.

    The sets are the router's own. Belongs to the loop of what it reads; it is up to date as of `refresh`.
    """

    def __init__(self, router: Router[C], liveness: Liveness, declarations: Declarations) -> None:
        self._router, self._liveness, self._declarations = router, liveness, declarations
        self._places: dict[InstanceId, _Place] = {}
        self._changes_seen = self._known_seen = self._removals_seen = 0
        self._clear()

    def serving(self, namespace: NamespaceId, fields: Namespace | None) -> list[C]:
        """Instances that may serve a namespace: they run its model, have named it, or have said that they name none.

        Args:
            fields: the namespace's; None: those that are known. Where none are, those alone serve it that have named
                it.
        """
        if fields is None:
            fields = self._declarations.namespaces().get(namespace)
        sets = self._serving.get(namespace) if fields is not None else None
        if sets is None:
            model = None if fields is None else self._by_model.get(model_of(fields))
            found = (model, self._by_namespace.get(namespace))
            sets = [self._undeclared, *(one for one in found if one is not None)]
            if fields is None:
                return sets
            if len(self._serving) >= _MOST_SERVING:
                self._serving.clear()
            self._serving[namespace] = sets
        return sets

    def visible(self, caller: Caller) -> list[C] | None:
        """Instances that a caller may know of, as `Visibility.instance` says; None: all."""
        if caller.sees_all:
            return None
        found = (self._by_tenant.get(tenant) for tenant in caller.tenants or ())
        return [one for one in found if one is not None]

    def is_named(self, namespace: NamespaceId) -> bool:
        """Whether a live instance has named a namespace whose fields are not known."""
        self.refresh()
        return namespace in self._by_namespace

    def is_run(self, namespace: Namespace) -> bool:
        """Whether a live instance runs a namespace's model."""
        self.refresh()
        return bool(self._by_model.get(model_of(namespace)))

    def refresh(self) -> None:
        """Take note of what has changed since the last time."""
        known = self._declarations.known_namespaces
        missed = self._liveness.changes_counted - self._changes_seen
        changes = self._liveness.changes
        if missed > len(changes) or known.removals != self._removals_seen:
            self._rebuild()
            return
        if len(known.by_id) != self._known_seen:
            self._take_namespaces(known)
        self._changes_seen = self._liveness.changes_counted
        for instance in {changes[-at] for at in range(1, missed + 1)}:
            self._put(instance)

    def forget(self, instance: InstanceId) -> None:
        """The instance is in no set any more."""
        place = self._places.pop(instance, None)
        if place is not None:
            self._each_set(instance, place, self._router.remove)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _clear(self) -> None:
        self._undeclared = self._router.candidates()
        self._by_model: dict[Namespace, C] = {}
        self._by_tenant: dict[str, C] = {}
        self._by_namespace: dict[NamespaceId, C] = {}
        self._serving: dict[NamespaceId, list[C]] = {}  # what `serving` has answered, while there are these sets

    def _rebuild(self) -> None:
        self._clear()
        self._places.clear()
        known = self._declarations.known_namespaces
        self._changes_seen = self._liveness.changes_counted
        self._known_seen, self._removals_seen = len(known.by_id), known.removals
        for instance in self._liveness.serving():
            self._put(instance)

    def _take_namespaces(self, known: KnownNamespaces) -> None:
        """Fields have become known."""
        new = self._by_namespace.keys() & known.behind(self._known_seen)
        self._known_seen = len(known.by_id)
        if new:
            for instance in [one for one, place in self._places.items() if place.others & new]:
                self._put(instance)

    def _put(self, instance: InstanceId) -> None:
        """Bring an instance into the sets it belongs to, and out of all others."""
        place, before = self._place(instance), self._places.get(instance)
        if place == before:
            return
        self.forget(instance)
        if place is not None:
            self._places[instance] = place
            self._each_set(instance, place, self._router.add)

    def _place(self, instance: InstanceId) -> _Place | None:
        row = self._declarations.instance_row(instance)
        if not self._liveness.may_serve(instance) or (row is not None and row.engine == JANITOR):
            return None
        declared = self._declarations.declared(instance)
        known = self._declarations.namespaces()
        fields = [known[namespace] for namespace in declared if namespace in known]
        return _Place(
            self._declarations.declares_nothing(instance),
            frozenset(map(model_of, fields)),
            frozenset(one.tenant for one in fields),
            frozenset(one for one in declared if one not in known),
        )

    def _each_set(self, instance: InstanceId, place: _Place, change: Callable[[C, InstanceId], None]) -> None:
        if place.is_undeclared:
            change(self._undeclared, instance)
        for model in place.models:
            self._change(self._by_model, model, instance, change)
        for tenant in place.tenants:
            self._change(self._by_tenant, tenant, instance, change)
        for namespace in place.others:
            self._change(self._by_namespace, namespace, instance, change)

    def _change(self, sets: dict[K, C], key: K, instance: InstanceId, change: Callable[[C, InstanceId], None]) -> None:
        found = sets.get(key)
        if found is None:
            found = sets[key] = self._router.candidates()
            self._serving.clear()
        change(found, instance)
        if not len(found):
            del sets[key]
            self._serving.clear()
