"""What a caller may give: cheap checks of arguments, made where they enter and before anything changes.

Each check raises ArgumentTypeError or ArgumentValueError, names the argument, and says what to give. A check of a whole
run is a type and a length; what has to look at every item is left to the call that looks at them anyway.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from kvbm.core.checks import kind_of, shown
from kvbm.core.errors import ArgumentTypeError, ArgumentValueError
from kvbm.core.events import PLACE_OF_A_RUN, misplaced
from kvbm.core.ids import HASH_BYTES, UNKNOWN, Namespace, NamespaceId, SequenceHash, Tier, pack_slots

MOST_BLOCKS = 1 << 32  # of a chain; events count its blocks in 32 bits
LONGEST_WAIT_S = 1e6


def check_run(hashes: bytes, argument: str = "hashes") -> None:
    """Refuse what is not a packed run of sequence hashes: bytes, 16 for each block."""
    if not isinstance(hashes, bytes):
        raise ArgumentTypeError(
            argument,
            f"is {kind_of(hashes)}; give packed bytes, {HASH_BYTES} for each block, as hash_tokens returns them",
        )
    if len(hashes) % HASH_BYTES:
        raise ArgumentValueError(
            argument, f"has {len(hashes)} bytes, which is no multiple of {HASH_BYTES}; give {HASH_BYTES} for each block"
        )


def checked_runs(runs: Iterable[tuple[NamespaceId, bytes]], argument: str = "runs") -> list[tuple[NamespaceId, bytes]]:
    """Pairs of a namespace's id, which is still to be checked, and a packed run."""
    try:
        given = [(namespace, hashes) for namespace, hashes in runs]
    except (TypeError, ValueError):
        raise ArgumentTypeError(
            argument, f"is {kind_of(runs)}; give a list of pairs, each a namespace's id and packed hashes"
        ) from None
    for at, (_, hashes) in enumerate(given):
        check_run(hashes, f"{argument}[{at}]")
    return given


def check_flag(value: bool, argument: str) -> None:
    """Refuse what is not True or False."""
    if not isinstance(value, bool):
        raise ArgumentTypeError(argument, f"is {kind_of(value)}; give True or False")


def checked_hash(value: bytes, argument: str) -> SequenceHash:
    """One sequence hash: 16 bytes."""
    if not isinstance(value, bytes):
        raise ArgumentTypeError(argument, f"is {kind_of(value)}; give the {HASH_BYTES} bytes of one hash")
    if len(value) != HASH_BYTES:
        raise ArgumentValueError(argument, f"has {len(value)} bytes; give the {HASH_BYTES} bytes of one hash")
    return SequenceHash(value)


def check_place(parent: SequenceHash, start: int) -> None:
    """Refuse a place that contradicts itself: a chain's first block alone has no parent."""
    if why := misplaced(parent, start):
        raise ArgumentValueError("parent", f"contradicts start: {why}; {PLACE_OF_A_RUN}")


def check_seconds(value: float, argument: str, most: float = LONGEST_WAIT_S) -> None:
    """Refuse what is not a number of seconds from 0 on."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ArgumentTypeError(argument, f"is {kind_of(value)}; give seconds, from 0 on")
    if not 0 <= value <= most:
        raise ArgumentValueError(argument, f"is {value:g}; give seconds from 0 to {most:g}")


def check_rate(value: float, argument: str) -> None:
    """Refuse what is not a number from 0 on."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ArgumentTypeError(argument, f"is {kind_of(value)}; give a number from 0 on")
    if not 0 <= value < math.inf:
        raise ArgumentValueError(argument, f"is {value:g}; give a number from 0 on")


def check_tier(tier: Tier, argument: str = "tier") -> None:
    """Refuse what is not a Tier."""
    if not isinstance(tier, Tier):
        raise ArgumentTypeError(argument, f"is {kind_of(tier)}; give a member of kvbm.Tier, such as kvbm.Tier.HOST")


def check_namespaces(namespaces: Iterable[Namespace], argument: str = "namespaces") -> list[Namespace]:
    """The namespaces of a list, each of them one, and one whose blocks have bytes that somebody knows."""
    if isinstance(namespaces, Namespace):
        raise ArgumentTypeError(argument, "is a single Namespace; give a list of them")
    try:
        given = list(namespaces)
    except TypeError:
        raise ArgumentTypeError(argument, f"is {kind_of(namespaces)}; give a list of kvbm.Namespace") from None
    for at, one in enumerate(given):
        if not isinstance(one, Namespace):
            raise ArgumentTypeError(
                f"{argument}[{at}]", f"is {kind_of(one)}; give kvbm.Namespace objects, not their ids"
            )
        if UNKNOWN in (one.kv_dtype, one.layout):
            why = "has unknown kv_dtype or layout: such blocks are known for routing only, and nobody can read them"
            raise ArgumentValueError(f"{argument}[{at}]", f"{why}; give the namespace of the engine's own blocks")
    return given


def refuse_namespace(namespace: Any, argument: str = "namespace") -> None:
    """Refuse what cannot be a namespace's id."""
    if isinstance(namespace, Namespace):
        raise ArgumentTypeError(
            argument, f"is a Namespace where its id belongs; give namespace.id (model {namespace.model!r})"
        )
    if not isinstance(namespace, bytes):
        raise ArgumentTypeError(argument, f"is {kind_of(namespace)}; give the id of a namespace, {HASH_BYTES} bytes")
    if len(namespace) != HASH_BYTES:
        raise ArgumentValueError(
            argument, f"has {len(namespace)} bytes; give the id of a namespace, {HASH_BYTES} bytes"
        )


def packed_slots(slots: Iterable[int], slot_count: int, argument: str = "slots") -> bytes:
    """Slots of a caller, packed. Whether one lies beyond the pool is for the ledger to see."""
    if slots is None:
        raise ArgumentTypeError(
            argument,
            "is None, which is what allocate returns while HBM is short; release or unpin slots and allocate again",
        )
    if isinstance(slots, (str, bytes, bytearray, memoryview)):
        raise ArgumentTypeError(argument, f"is {kind_of(slots)}; give a list of whole numbers")
    try:
        return pack_slots(slots)
    except OverflowError:
        raise ArgumentValueError(
            argument, f"is {shown(slots)}; each must be 0 to {slot_count - 1}, the slots of the pool"
        ) from None
    except TypeError:
        raise ArgumentTypeError(argument, f"is {shown(slots)}; give a list of whole numbers") from None
