"""A request on its way through the engine, from what was asked to what came out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvbm.core.ids import HASH_BYTES, NO_PARENT, SequenceHash, Tier
from kvbm.demo.engine.requests import Finished, Request, RequestRefusedError


@dataclass(eq=False)
class Sequence:
    """A request being served. Positions, half open:

    [0, created · block_tokens)  in blocks that are created or acquired, pinned for this sequence
    [.., computed)               KV written, in slots that are only allocated
    [computed, len(tokens))      still to compute; a single one is a decode step's work

    Attributes:
        request, submitted_s: the request, and when it came by the engine's clock.
        tokens: prompt, then generated tokens.
        hashes: packed hashes of the full blocks hashed so far.
        slots: block table. Only running sequences have one; the first waiting one may hold its acquired prefix.
        prefill_end: tokens known at admission; below it the sequence is in prefill.
    """

    request: Request
    submitted_s: float
    tokens: list[int]
    hashes: bytes = b""
    slots: list[int] = field(default_factory=list)
    created: int = 0
    computed: int = 0
    prefill_end: int = 0
    admitted_s: float | None = None
    first_token_s: float | None = None
    hits: Mapping[Tier, int] = field(default_factory=dict)
    smallest_margin: float = float("inf")
    preemptions: int = 0

    @property
    def in_prefill(self) -> bool:
        """Whether prompt tokens are still to compute."""
        return self.computed < self.prefill_end

    @property
    def new_tokens(self) -> list[int]:
        """What was generated so far."""
        return self.tokens[len(self.request.tokens) :]

    @property
    def done(self) -> bool:
        """Whether all wanted tokens are generated."""
        return len(self.new_tokens) >= self.request.max_new_tokens

    @property
    def hashed(self) -> int:
        """How many blocks have their hash."""
        return len(self.hashes) // HASH_BYTES

    def hash_before(self, block: int, first: SequenceHash = NO_PARENT) -> SequenceHash:
        """The hash of the block before one, 16 bytes; `first` when there is none."""
        return SequenceHash(self.hash_run(block - 1, block)) if block else first

    def hash_run(self, start: int, end: int) -> bytes:
        """Packed hashes of blocks start … end - 1."""
        return self.hashes[start * HASH_BYTES : end * HASH_BYTES]

    def accept(self, token: int, margin: float, now_s: float) -> None:
        """Append a generated token."""
        self.tokens.append(token)
        self.smallest_margin = min(self.smallest_margin, margin)
        if self.first_token_s is None:
            self.first_token_s = now_s

    def forget_slots(self) -> None:
        """Start over without slots; the generated tokens stay and are computed again as prompt."""
        self.slots, self.created, self.computed, self.prefill_end = [], 0, 0, 0

    def finished(self, block_tokens: int, now_s: float, failed: RequestRefusedError | None = None) -> Finished:
        """The report of this sequence at its end."""
        return Finished(
            id=self.request.id,
            new_tokens=self.new_tokens,
            ttft_s=0.0 if self.first_token_s is None else self.first_token_s - self.submitted_s,
            queued_s=(now_s if self.admitted_s is None else self.admitted_s) - self.submitted_s,
            prompt_blocks=len(self.request.tokens) // block_tokens,
            hits=self.hits,
            smallest_margin=self.smallest_margin,
            preemptions=self.preemptions,
            failed=failed,
        )
