"""The objects of an erasure: the janitor deletes those of the pool; those of the store before it, which no janitor
knows, go here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple, Protocol

from kvbm.core.errors import KvbmError
from kvbm.core.ids import NamespaceId
from kvbm.erasure.report import ErasedPlace, Progress
from kvbm.pools.object.encryption import SEALED_FOLDER
from kvbm.pools.stores.base import ObjectStore
from kvbm.pools.tenant_keys import TenantKeys

_RUNS = 4  # of the janitor: one that claims what nobody claims, one that erases it, and two for what was in use
_FRONT_NAMES = 1000  # deleted at once


class SweptPart(Protocol):
    """What a run of the janitor found of one namespace: `janitor.report.Part`."""

    objects: int
    deleted: int


class Swept(Protocol):
    """What a run of the janitor has done: `janitor.report.Report`."""

    found: int
    waiting: int
    deleted: int

    @property
    def parts(self) -> Mapping[str, SweptPart]: ...


class NamedObject(Protocol):
    """What the name of an object says: `janitor.holdings.ObjectName`."""

    @property
    def namespace(self) -> NamespaceId | None: ...


class Front(NamedTuple):
    """The store before the pool.

    Attributes:
        open: opens it.
        parse: reads the name of an object; None for what is none of ours.
        keys: whose names are sealed under which keys; None: objects are not sealed.
        timeout_s: of a question to it.
    """

    open: Callable[[], ObjectStore]
    parse: Callable[[str], NamedObject | None]
    keys: Callable[[], Mapping[str, TenantKeys]] | None
    timeout_s: float


class _OfFront(NamedTuple):
    """What was deleted from the front of the pool, and what of it is waited for."""

    deleted: int = 0
    waits: str = ""


def erase_objects(
    sweep: Callable[[], Swept],
    front: Front | None,
    namespaces: Collection[NamespaceId],
    tenants: Collection[str],
    is_whole: bool,
) -> Progress:
    """Have the janitor delete the objects; trouble is what is waited for.

    Args:
        sweep: one run of the janitor, in which objects of these namespaces go. Raises KvbmError.
        tenants: whose the namespaces are.
        is_whole: whether all of their objects go, and not those of one prompt.
    """
    deleted, waits = 0, ""
    try:
        for _ in range(_RUNS):
            done = sweep()
            deleted += done.deleted
            left = sum(
                part.objects - part.deleted for name, part in done.parts.items() if bytes.fromhex(name) in namespaces
            )
            waits = f"{left} objects that were used meanwhile, or could not be read: erase again" if left else ""
            if not done.found and not done.deleted and not done.waiting:
                break
        if not is_whole:
            waits = ""  # objects of other prompts stay
        gone = _OfFront() if front is None else _erase_front(front, namespaces, tenants)
        deleted, waits = deleted + gone.deleted, waits or gone.waits
    except KvbmError as error:
        waits = str(error)
    place = ErasedPlace(name="objects", erased=f"{deleted} objects", waits=waits)
    return Progress(places=(place,), done_ns=0 if waits else time.time_ns())


def _erase_front(front: Front, namespaces: Collection[NamespaceId], tenants: Collection[str]) -> _OfFront:
    """Delete objects from the front of the pool: where they are sealed, all of those tenants."""
    tags: set[str] = set()
    if front.keys is not None:
        keys = front.keys()
        if set(tenants) - set(keys):  # the answer lies on the stream for long, so it names nobody
            return _OfFront(
                0,
                "objects in front that are sealed under keys which are not here: they go after pools.object.ttl_s, or "
                "empty the front",
            )
        tags = {f"/{SEALED_FOLDER}/{keys[tenant].tag}/" for tenant in tenants}
    store = front.open()
    try:
        names = [
            one.name
            for one in store.listed("", front.timeout_s)
            if (parts := front.parse(one.name)) is not None
            and (parts.namespace in namespaces if parts.namespace is not None else any(tag in one.name for tag in tags))
        ]
        parts_of = (names[at : at + _FRONT_NAMES] for at in range(0, len(names), _FRONT_NAMES))
        return _OfFront(sum(_deleted(store, part, front.timeout_s) for part in parts_of))
    finally:
        store.close()


def _deleted(store: ObjectStore, names: Sequence[str], deadline_s: float) -> int:
    return sum(refusal is None for refusal in store.delete(names, deadline_s))
