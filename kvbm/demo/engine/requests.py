"""What is asked of the engine and what comes back, refusals included."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from kvbm.core.errors import KvbmError
from kvbm.core.ids import Tier
from kvbm.demo.engine.weights import ModelShape

RefusalReason = Literal["empty-prompt", "no-new-tokens", "unknown-token", "too-long", "never-fits", "starved"]


class RequestRefusedError(KvbmError):
    """A request the engine does not serve. A retry helps only for "starved"; else change the request or the engine.

    Attributes:
        reason: short name of the rule that was broken.
        wanted, limit: the numbers behind it, in the unit the message names.
    """

    def __init__(self, reason: RefusalReason, wanted: int, limit: int, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.wanted = wanted
        self.limit = limit


class Request(NamedTuple):
    """A prompt of token ids and how many tokens to generate; the id comes back in `Finished`."""

    id: str
    tokens: list[int]
    max_new_tokens: int


class Finished(NamedTuple):
    """What became of a request.

    Attributes:
        id: the request's.
        new_tokens: generated greedily, in order; empty when refused.
        ttft_s: from submit to the first generated token; 0.0 when there is none.
        queued_s: from submit to the first admission.
        prompt_blocks: full blocks the prompt has.
        hits: prompt blocks found, by the tier they were found in, at the first admission.
        smallest_margin: smallest gap between the best and the second logit over all generated tokens; a gap near
            rounding error (1e-4 in float32) means another order of additions may choose another token.
        preemptions: how often the request had to give its slots back and start over.
        failed: why the request was not served, or None.
    """

    id: str
    new_tokens: list[int]
    ttft_s: float
    queued_s: float
    prompt_blocks: int
    hits: Mapping[Tier, int]
    smallest_margin: float
    preemptions: int
    failed: RequestRefusedError | None


def refusal(request: Request, shape: ModelShape, slots: int, block_tokens: int) -> RequestRefusedError | None:
    """Why a request can never be served, or None.

    Args:
        shape: the model's dimensions.
        slots: HBM slots of the engine's pool, free or not.
        block_tokens: tokens a block holds.
    """
    prompt, new = len(request.tokens), request.max_new_tokens
    if not prompt:
        return RequestRefusedError("empty-prompt", 0, 1, "the prompt has 0 tokens; give at least 1")
    if new < 1:
        return RequestRefusedError("no-new-tokens", new, 1, f"max_new_tokens is {new}; it must be at least 1")
    unknown = next((token for token in request.tokens if not 0 <= token < shape.vocab), None)
    if unknown is not None:
        detail = f"token {unknown} is outside the vocabulary, 0 to {shape.vocab - 1}; use the model's token ids"
        return RequestRefusedError("unknown-token", unknown, shape.vocab, detail)
    if prompt + new > shape.max_tokens:
        detail = f"{prompt} prompt and {new} new tokens, the model takes {shape.max_tokens} together; shorten them"
        return RequestRefusedError("too-long", prompt + new, shape.max_tokens, detail)
    wanted = block_count(prompt + new - 1, block_tokens)  # the last token's KV is never needed
    if wanted > slots:
        detail = (
            f"{wanted} HBM slots wanted, the pool has {slots}; raise pools.hbm.capacity_bytes or shorten the request"
        )
        return RequestRefusedError("never-fits", wanted, slots, detail)
    return None


def block_count(tokens: int, block_tokens: int) -> int:
    """Blocks that hold so many tokens, a partial last one included."""
    return -(-tokens // block_tokens)
