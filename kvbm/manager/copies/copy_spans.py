"""What a trace says of one copy: whose blocks, how many, how it ended, and why a block of it became a miss."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvbm.core.ids import HASH_BYTES, Tier
from kvbm.core.results import Copy
from kvbm.manager.copies.transfer import Moved
from kvbm.pools.base import ReadOutcome

if TYPE_CHECKING:
    from kvbm.telemetry.tracing import TraceSpan, Value

_LOADS = {Tier.HOST: "kvbm.onboard", Tier.NVME: "kvbm.nvme.read", Tier.OBJECT: "kvbm.object.get"}
_BAD = (ReadOutcome.CORRUPT, ReadOutcome.MISSING, ReadOutcome.FAILED)


def load_name(copy: Copy, is_lent: bool) -> str:
    """What the span of a load is called: by where its blocks come from."""
    if isinstance(copy.source, Tier):
        return _LOADS.get(copy.source, "kvbm.onboard")
    return "kvbm.peer.fetch" if is_lent else "kvbm.pod.read"


def copy_values(copy: Copy, block_bytes: int) -> dict[str, Value]:
    """What is known of a copy when it begins."""
    blocks = len(copy.hashes) // HASH_BYTES
    is_own = isinstance(copy.source, Tier)
    return {
        "source": copy.source.name if isinstance(copy.source, Tier) else "peer",
        "target": copy.target.name,
        **({} if is_own else {"owner": str(copy.source)}),
        "namespace": copy.namespace.hex(),
        "blocks": blocks,
        "bytes": blocks * block_bytes,
    }


class CopySpan:
    """The span of one copy, from where a thread takes it until its bytes are in place or will never be."""

    def __init__(self, span: TraceSpan) -> None:
        self._span = span
        self._moved: Moved | None = None

    def noting(self, finish: Callable[[Moved], None]) -> Callable[[Moved], None]:
        """`finish`, which keeps what became of the copy."""

        def noted(moved: Moved) -> None:
            self._moved = moved
            finish(moved)

        return noted

    def end(self, is_late: bool = False) -> None:
        """It is over. `is_late`: its request has gone on without it. Outside the lock."""
        moved = self._moved
        if moved is None:  # the pool raised, or the manager closed
            self._span.end({"outcome": "broke", "is_late": is_late}, "the copy has no end; see copy.broke in the log")
            return
        arrived = sum(moved.arrived)
        bad = {one: moved.outcomes.count(one) for one in _BAD}
        why = moved.unwritten or next((one.name.lower() for one in _BAD if bad[one]), "")
        values: dict[str, Value] = {
            "arrived": arrived,
            "outcome": "arrived" if arrived == len(moved.arrived) else "part" if arrived else "miss",
            "is_late": is_late,
            **{one.name.lower(): count for one, count in bad.items() if count},
            **({"why": why} if why else {}),
        }
        failed = bool(moved.unwritten or bad[ReadOutcome.CORRUPT] or bad[ReadOutcome.FAILED])
        self._span.end(values, why if failed else "")
