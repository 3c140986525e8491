"""What a caller may give with a question to the catalog, whatever carries it there.

Each check raises ArgumentError, and says what to give.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from kvbm.core.answers import MAX_LABELS, MAX_LIMIT, MAX_PEERS, MAX_POSITIONS, MAX_WAIT_S, PositionWanted
from kvbm.core.arguments import check_seconds, refuse_namespace
from kvbm.core.checks import check_text, checked_int, kind_of, shown
from kvbm.core.errors import ArgumentTypeError, ArgumentValueError
from kvbm.core.ids import Namespace, NamespaceId

_MOST_LABEL = 128  # characters
LATENCIES = ("interactive", "standard", "batch")
PHASES = ("both", "prefill", "decode")
A = TypeVar("A")


def checked_limit(limit: int) -> int:
    """At most how many instances are named."""
    wanted = checked_int(limit, "limit")
    if not 1 <= wanted <= MAX_LIMIT:
        raise ArgumentValueError("limit", f"is {wanted}; give 1 to {MAX_LIMIT}")
    return wanted


def checked_peers(limit: int) -> int:
    """At most how many instances that lend are named."""
    wanted = checked_int(limit, "limit")
    if not 1 <= wanted <= MAX_PEERS:
        raise ArgumentValueError("limit", f"is {wanted}; give 1 to {MAX_PEERS}")
    return wanted


def checked_place(topology: Sequence[str]) -> list[str]:
    """The labels of a place, outermost first."""
    if isinstance(topology, str):
        raise ArgumentTypeError("topology", "is one text; give a list of labels, outermost first")
    if len(topology) > MAX_LABELS:
        raise ArgumentValueError("topology", f"has {len(topology)} labels; give at most {MAX_LABELS}")
    for label in topology:
        check_text(label, "topology")
        if len(label) > _MOST_LABEL or "\n" in label:
            raise ArgumentValueError(
                "topology", f"has a label of {len(label)} characters; give at most {_MOST_LABEL}, of one line"
            )
    return list(topology)


def checked_seconds(seconds: float, argument: str) -> float:
    """A number of seconds from 0 on."""
    check_seconds(seconds, argument)
    return seconds


def checked_wait(wait_s: float) -> float:
    """How long a catalog may wait for positions before it answers."""
    check_seconds(wait_s, "wait_s")
    if wait_s > MAX_WAIT_S:
        raise ArgumentValueError(
            "wait_s", f"is {wait_s:g}; a catalog waits {MAX_WAIT_S:g} s at most: ask again for longer"
        )
    return wait_s


def checked_positions(at_least: Sequence[PositionWanted]) -> list[PositionWanted]:
    """Positions that an answer must have seen."""
    if isinstance(at_least, PositionWanted):
        raise ArgumentTypeError("at_least", "is a single PositionWanted; give a list of them")
    try:
        given = list(at_least)
    except TypeError:
        raise ArgumentTypeError("at_least", f"is {kind_of(at_least)}; give a list of PositionWanted") from None
    if len(given) > MAX_POSITIONS:
        raise ArgumentValueError("at_least", f"has {len(given)} positions; give at most {MAX_POSITIONS}")
    for at, one in enumerate(given):
        if not isinstance(one, PositionWanted):
            raise ArgumentTypeError(f"at_least[{at}]", f"is {kind_of(one)}; give a PositionWanted")
        check_text(one.instance, f"at_least[{at}].instance")
        checked_int(one.epoch, f"at_least[{at}].epoch")
        checked_int(one.offset, f"at_least[{at}].offset")
    return given


def checked_word(value: str, argument: str, words: tuple[str, ...]) -> str:
    """One of a few words."""
    if value not in words:
        raise ArgumentValueError(argument, f"is {shown(value)}; give one of {', '.join(words)}")
    return value


def checked_list(values: Sequence[A], argument: str) -> Sequence[A]:
    """What has a length and can be gone through twice, and is no text."""
    if isinstance(values, str | bytes) or not isinstance(values, Sequence | np.ndarray):
        raise ArgumentTypeError(argument, f"is {kind_of(values)}; give a list")
    return values


def checked_names(instances: Sequence[str] | None) -> list[str] | None:
    """Names of instances; None for all."""
    if instances is None:
        return None
    if isinstance(instances, str):
        raise ArgumentTypeError("instances", "is one text; give a list of names")
    if len(instances) > MAX_POSITIONS:
        raise ArgumentValueError("instances", f"has {len(instances)} names; give at most {MAX_POSITIONS}")
    for name in instances:
        check_text(name, "instances")
    return list(instances)


def id_of(namespace: Namespace | NamespaceId) -> NamespaceId:
    """A namespace's id."""
    if isinstance(namespace, Namespace):
        return namespace.id
    refuse_namespace(namespace)
    return namespace


def named(namespace: Namespace | NamespaceId) -> str | Namespace:
    """A namespace as a request has it: its fields, or its id in hex."""
    return namespace if isinstance(namespace, Namespace) else id_of(namespace).hex()
