"""Blocks that a request expects: somebody computes or stores them now, and they can be read from there soon."""

from __future__ import annotations

from typing import NamedTuple


class ExpectedBlocks(NamedTuple):
    """What a request waits for although nobody may have it yet.

    Attributes:
        blocks: of its prompt, from the first on.
        quiet_s: it is given up where nothing more of it has come for so long.
        instance: who brings them; "" for whoever the catalog names.
    """

    blocks: int
    quiet_s: float
    instance: str = ""
