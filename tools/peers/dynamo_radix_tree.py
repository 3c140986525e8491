"""Dynamo's RadixTree (`ai-dynamo-runtime`), as its router uses it: JSON events in, overlap scores out.

Runs in that package's own environment. A block has two hashes there: `block_hash`, which names it in events, and
`tokens_hash`, which queries walk. `scores` is {(worker, rank): depth}. A chain is withdrawn from its end, as engines
do: the tree drops what is below a block that nobody holds, and is then told of blocks it no longer knows.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from typing import Any

from dynamo.llm import RadixTree
from peers.measure import serve
from peers.workload import CHAIN_BLOCKS, INSTANCES, RUN_BLOCKS, Part, Step, hashes


class DynamoRadixTree:
    """A Directory over dynamo.llm.RadixTree."""

    def __init__(self) -> None:
        self._tree = RadixTree()
        self._event_id = 0

    def mail(self, step: Step, form: str) -> list[tuple[int, bytes]]:
        """One `stored` and one `removed` event, or one of either for every 16 or single blocks, those in turn."""
        size = {"runs": CHAIN_BLOCKS, "cut": RUN_BLOCKS}.get(form, 1)
        created = [] if step.created is None else [self._stored(part) for part in _cut(step.created, size)]
        withdrawn = (
            [] if step.withdrawn is None else [self._removed(part) for part in reversed(_cut(step.withdrawn, size))]
        )
        if created and withdrawn:
            events = [event for pair in zip(created, withdrawn, strict=True) for event in pair]
        else:
            events = created + withdrawn
        return [(step.instance, event) for event in events]

    def apply(self, message: tuple[int, bytes]) -> None:
        """Take one event in."""
        self._tree.apply_event(*message)

    def question(self, chain: Part) -> list[int]:
        """The chain's `tokens_hash`es."""
        return hashes(chain)[:, 1].tolist()

    def ask(self, question: list[int]) -> dict[tuple[int, int], int]:
        """Scores of all workers."""
        return self._tree.find_matches(question).scores

    def depths(self, answer: dict[tuple[int, int], int]) -> list[int]:
        """Depth by worker."""
        return [answer.get((worker, 0), 0) for worker in range(INSTANCES)]

    def _stored(self, part: Part) -> bytes:
        parent = int(hashes(Part(part.chain, part.first - 1, 1))[0, 0]) if part.first else None
        blocks = [{"block_hash": block, "tokens_hash": local} for block, local in hashes(part).tolist()]
        return self._event({"stored": {"parent_hash": parent, "blocks": blocks}})

    def _removed(self, part: Part) -> bytes:
        return self._event({"removed": {"block_hashes": hashes(part)[::-1, 0].tolist()}})

    def _event(self, data: dict[str, Any]) -> bytes:
        self._event_id += 1
        return json.dumps({"event_id": self._event_id, "data": data}, separators=(",", ":")).encode()


def _cut(part: Part, size: int) -> list[Part]:
    end = part.first + part.count
    return [Part(part.chain, first, min(size, end - first)) for first in range(part.first, end, size)]


if __name__ == "__main__":
    serve("Dynamo RadixTree", version("ai-dynamo-runtime"), DynamoRadixTree)
