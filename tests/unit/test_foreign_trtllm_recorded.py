"""Events as TensorRT-LLM's own serializer writes them."""

from __future__ import annotations

import json
from pathlib import Path

from kvbm.core.extra_keys import Media, extra_key
from kvbm.core.hashing import sequence_hashes
from kvbm.core.ids import Tier, split_hashes
from kvbm.reference.foreign_blocks import ForeignBlocks
from kvbm.streams.foreign.identity import ForeignSource
from kvbm.streams.foreign.state import ForeignState, PublishedMessage
from kvbm.streams.foreign.trtllm import TrtllmEvents, read_answer
from tests.foreign_engines import BLOCK_TOKENS, MODEL, Fold, Prompt

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "trtllm_recorded.json").read_text())
PLAIN, SALTED = (Prompt(tuple(GOLDEN["tokens"]), salt) for salt in ("", "salt"))


def with_picture(name: str) -> bytes:
    """The first block of the prompt, into which a picture begins two tokens deep."""
    first, root = PLAIN.tokens[:BLOCK_TOKENS], PLAIN.namespace().root()
    return split_hashes(sequence_hashes(first, BLOCK_TOKENS, root, [extra_key(media=[Media(name, -2)])]))[0]


def test_what_its_serializer_writes_is_found_by_tokens_salts_and_pictures() -> None:
    source = ForeignSource(MODEL, counts_copies=False)
    state = ForeignState(ForeignBlocks(source, sequence_hashes), TrtllmEvents(BLOCK_TOKENS), can_replay=False)
    fold = Fold()
    first, second, third = PLAIN.hashes()
    salted = set(SALTED.hashes())
    pictures = [with_picture(GOLDEN["picture"]), with_picture("sku-1")]
    after: list[tuple[set[bytes], set[bytes]]] = [
        (set(), set()),
        ({first, second}, set()),
        ({first}, {second}),
        ({first, third}, {second}),
        ({first, third}, {second}),
        ({first}, {second}),
        ({first, *SALTED.hashes()[:2]}, {second}),
        ({first, *salted}, {second}),
        ({first, *salted, pictures[0]}, {second}),
        ({first, *salted, *pictures}, {second}),
    ]
    answer = read_answer(GOLDEN["answer"].encode())
    assert not answer.unreadable
    for event, (hbm, host) in zip(answer.events, after, strict=True):
        fold.take(state.step(0.0, PublishedMessage(event.sequence, event.payload)))
        assert (set(fold.held[Tier.HBM]), set(fold.held[Tier.HOST])) == (hbm, host), event.payload
    assert not +state.blocks.counts
