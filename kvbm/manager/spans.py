"""What a trace says of a request: never a root, a token or a whole hash."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvbm.core.ids import HASH_BYTES, NamespaceId, Tier

if TYPE_CHECKING:
    from kvbm.telemetry.tracing import TraceSpan, Value

_SHOWN_BYTES = 4  # of the last block's hash, as logs show it


def asked_values(namespace: NamespaceId, hashes: bytes, tenant: str, first: int = 0) -> dict[str, Value]:
    """What is known of a request when it begins.

    Args:
        hashes: packed, of its prompt. first: blocks of it that the engine has itself.
    """
    return {
        "namespace": namespace.hex(),
        **({"tenant": tenant} if tenant else {}),
        **({"last_block": hashes[-HASH_BYTES:][:_SHOWN_BYTES].hex()} if hashes else {}),
        "blocks": len(hashes) // HASH_BYTES,
        **({"first": first} if first else {}),
    }


def end_request(span: TraceSpan, wanted: int, depth: int, predicted: int, hits: Mapping[Tier, int], why: str) -> None:
    """A request has what it gets. Outside the lock.

    Args:
        wanted: blocks it could have got. depth: that it got. predicted: that were said to be held.
        hits: where they were. why: it got less than that.
    """
    if not span.is_recording:
        return
    why = why or ("unread" if depth < predicted else "")
    values: dict[str, Value] = {
        "depth": depth,
        "predicted": predicted,
        "outcome": "hit" if depth == wanted else "part" if depth else "miss",
        **{f"hits.{tier.name.lower()}": count for tier, count in hits.items()},
        **({"why": why} if why else {}),
    }
    span.end(values)
