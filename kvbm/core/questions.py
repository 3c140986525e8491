"""What a caller may give with a question to the catalog, whatever carries it there. Each check raises ArgumentError, and says what to give."""

from __future__ import annotations

from collections.abc import Sequence

from kvbm.core.answers import MAX_LABELS, MAX_LIMIT, MAX_PEERS, MAX_POSITIONS
from kvbm.core.arguments import refuse_namespace
from kvbm.core.checks import check_text, checked_int
from kvbm.core.errors import ArgumentTypeError, ArgumentValueError
from kvbm.core.ids import Namespace, NamespaceId

_MOST_LABEL = 128  # characters


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
