"""States of recurrent layers that vLLM offers: each once, at the step that computes it, unpinned.

A block table does not say where they lie: vLLM drops the states between boundaries and moves others. So it hands out,
at each step, which block holds the state behind which token of which request.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple


class StateOffer(NamedTuple):
    """One state.

    Attributes:
        group: vLLM's index of the KV group.
        block_id: the block it lies in once this step has computed it.
        tokens: of the request, all that it remembers.
    """

    request_id: str
    group: int
    block_id: int
    tokens: int


def offers_of(scheduler_output: Any) -> Iterator[StateOffer]:
    """What a step of vLLM's scheduler offers, nothing where a model has no such layers."""
    block_state = getattr(scheduler_output, "kv_connector_block_state", None)
    if block_state is None:
        return
    for request_id, entries in block_state.boundary_state_offloads.items():
        for group, block_id, tokens in entries:
            yield StateOffer(request_id, group, block_id, tokens)
