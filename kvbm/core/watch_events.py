"""What is watched and what a feed says: the bodies of `POST /v1/watch` and of its server-sent events, the same structs
at both ends.

Hashes and namespace ids are as in `answers`. Every event may come twice after a reconnection; applied again in order it
changes nothing.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec

from kvbm.core.answers import LIMIT, MAX_LIMIT, HashHex, LookupAnswer, MissedAnswer
from kvbm.core.ids import Namespace

MAX_WATCHED_HASHES = 4096
MAX_CHANGED_HASHES = 1024  # in one event
MAX_KNOWN = 256  # names in one event
MAX_POSITION = 256  # characters


class WatchRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to tell of. Give a namespace, an instance or both; or a namespace and the hashes of a prefix.

    Attributes:
        namespace: its id, or its fields: changes of its blocks.
        instance: its name: changes of its blocks.
        hashes: of a prefix, in order: who has how much of it, each time that changes.
        limit: of a prefix: at most this many instances are named, the best first.
        after: the position to go on from, as the last `id` of an earlier feed; None from now on. A prefix needs none.
    """

    namespace: HashHex | Namespace | None = None
    instance: Annotated[str, msgspec.Meta(min_length=1, max_length=128)] | None = None
    hashes: (
        Annotated[str, msgspec.Meta(extra_json_schema={"maxLength": 32 * MAX_WATCHED_HASHES})]
        | Annotated[list[str], msgspec.Meta(extra_json_schema={"maxItems": MAX_WATCHED_HASHES})]
        | None
    ) = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=MAX_LIMIT)] = LIMIT
    after: Annotated[str, msgspec.Meta(max_length=MAX_POSITION)] | None = None


class WatchBegun(msgspec.Struct, frozen=True, kw_only=True, tag="begun"):
    """The feed begins. What is asked of the same catalog from now on is not older than `position`.

    Attributes:
        keepalive_s: something comes at least so often.
        missed: of a watch of a namespace's blocks: that no instance has named it, as far as the caller may know, as a
            lookup says it. A watch of a prefix has its reason in each answer.
    """

    position: str
    keepalive_s: float
    missed: MissedAnswer | msgspec.UnsetType = msgspec.UNSET


class BlockChange(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks of one tier.

    Attributes:
        what: "gained" and "lost"; "listed": held now, as part of snapshot number `snapshot`; "ended": that snapshot has
            ended, and what the tier neither listed nor gained since its first "listed" is not held. An "ended" without
            "listed": nothing older is held.
        namespace: "" of an "ended", which is of all namespaces. hashes: 32 digits each.
    """

    what: Literal["gained", "lost", "listed", "ended"]
    tier: str
    namespace: str = ""
    hashes: str = ""
    snapshot: int = 0


class BlockChanges(msgspec.Struct, frozen=True, kw_only=True, tag="changes"):
    """What an instance, or a pool of cluster reach, has gained and lost, in order; at most 1,024 hashes, more are in
    further events.

    Attributes:
        epoch: of the instance; 0 of a pool.
    """

    holder: str
    is_pool: bool = False
    epoch: int = 0
    changes: list[BlockChange] = []


class InstanceChange(msgspec.Struct, frozen=True, kw_only=True, tag="instance"):
    """Something has changed of an instance.

    Attributes:
        what: "started" and "emptied" (its epoch was joined midway): it holds nothing until it is said to have gained
            it; "stopped"; "dropped": it was forgotten, with what it held; "state": the rest of this.
        excluded: why answers leave it out, or "". hidden: then, the tiers that answers do not speak of.
        suspect: it may hold more or less than was told.
    """

    instance: str
    what: Literal["started", "emptied", "stopped", "dropped", "state"]
    epoch: int = 0
    excluded: str = ""
    hidden: list[str] = []
    suspect: bool = False


class KnownInstances(msgspec.Struct, frozen=True, kw_only=True, tag="known"):
    """The feed goes on at another catalog, which knows these instances; after `is_last`, those not named hold nothing
    any more.
    """

    instances: list[str]
    is_last: bool


class PrefixDepths(msgspec.Struct, frozen=True, kw_only=True, tag="prefix"):
    """Who has how much of the prefix now, in place of what was told before."""

    answer: LookupAnswer


class Missed(msgspec.Struct, frozen=True, kw_only=True, tag="missed"):
    """Changes between two positions are not told: ask again what you need to know, then apply what comes.

    Attributes:
        after, until: the positions; `after` is "" where none is known.
        instance: only changes of this one are missing; "" for everybody's.
        why: in words.
    """

    after: str
    until: str
    why: str
    instance: str = ""


class WatchEnded(msgspec.Struct, frozen=True, kw_only=True, tag="ended"):
    """The catalog ends the feed; `may_return`: ask again with the position."""

    why: str
    may_return: bool


WatchEvent: TypeAlias = WatchBegun | BlockChanges | InstanceChange | KnownInstances | PrefixDepths | Missed | WatchEnded
