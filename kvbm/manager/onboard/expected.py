"""Blocks that a request expects: somebody computes or stores them now, and they can be read from there soon."""

from __future__ import annotations

from typing import NamedTuple


class ExpectedBlocks(NamedTuple):
    """What a request waits for although nobody may have it yet.

    Attributes:
        blocks: of its prompt, from the first on.
        quiet_s: it is given up where nothing more of it has come for so long.
        instance: who lends them; "" for whoever the catalog names.
        is_sure: somebody computes them, so computing them here would be done twice.
    """

    blocks: int
    quiet_s: float
    instance: str = ""
    is_sure: bool = True
