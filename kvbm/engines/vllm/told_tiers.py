"""Which of vLLM's blocks lie in which tier, as listeners were last told: what `TierEvents` asks at each step.

Assembly has it natively; `kvbm/reference/told_tiers.py` is the readable form.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

Told = tuple[int, int, int, int, bool]
"""A run's number, the first of its blocks and the end of them, their tier, and whether they lie there now."""


class ToldTiers(Protocol):
    """Blocks of runs, looked at in turn. Owner thread only.

    Blocks of ours may have one hash of vLLM's (a digest): the first of them that a tier gains is told, and the last
    that it loses.

    Attributes:
        blocks: how many are known. digests: how many hashes of vLLM these have.
    """

    @property
    def blocks(self) -> int: ...
    @property
    def digests(self) -> int: ...

    def learn(self, hashes: bytes, digests: Sequence[bytes], group: int) -> tuple[int, int, int] | None:
        """Know these blocks, and look at all of them at the next step.

        Args:
            hashes: ours, packed. digests: vLLM's hashes of the same, 32 bytes each at most; a list or tuple. What one
                of both has beyond the other is of no matter.
            group: the KV group, 0 to 255.
        Returns: the number of a run that has those that were not known, and the first of them and the end of them: a
            run's positions count from that first. None: all were known.
        Raises: LayoutError: an argument is none of these.
        """
        ...

    def tell_anew(self) -> None:
        """Tell in a turn that begins now of every block again, also if it has not changed."""
        ...

    def due(self) -> bytes:
        """Hashes of what is to be looked at in this step, packed: what was learned since the last, then some in
        turn.
        """
        ...

    def changed(self, tiers: bytes) -> tuple[list[Told], list[int]]:
        """What has changed, and the runs of which nothing is known any more; a block that is nowhere is forgotten.

        Args:
            tiers: of each block that was due: HOST, NVME or OBJECT, or ABSENT.
        Returns: where blocks are before where they no longer are, those that go on with each other together.
        Raises: LayoutError: `tiers` is something else.
        """
        ...


class NewToldTiers(Protocol):
    """Makes one."""

    def __call__(self, step: int) -> ToldTiers:
        """Args:
        step: how many blocks are looked at in turn at each step.
        """
        ...
