"""Continuous batching of greedy requests over a block manager: the scheduler of the demo's engine."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from kvbm.core.errors import LayoutError
from kvbm.core.ids import NamespaceId, SequenceHash
from kvbm.demo.engine.blocks import HeldPrefix, ManagerCalls, PagedPool, pool_view
from kvbm.demo.engine.model import DecodeInput, Model
from kvbm.demo.engine.requests import Finished, Request, RequestRefusedError, block_count, refusal
from kvbm.demo.engine.sequence import Sequence
from kvbm.demo.engine.weights import Weights
from kvbm.manager.load_meter import LoadMeter

__all__ = ["Engine", "Finished", "HeldPrefix", "ManagerCalls", "PagedPool", "Request", "RequestRefusedError"]

STARVED_AFTER_S = 30.0  # slots held by copies come back in milliseconds; longer means nobody will give them back
WAIT_S = 0.001  # pause of run_until_idle while only a copy can free slots


class Engine:
    """Serves requests with greedy decoding. Owned by one thread; only `step` and `run_until_idle` do work.

    Args:
        weights: the model, on the device of the manager's HBM pool.
        manager: where KV blocks live.
        namespace_id, root: what may share blocks, 16 bytes each.
        block_tokens: tokens a block holds.
        max_batch: requests that run at once, at least 1.
        prefill_chunk_tokens: prompt tokens computed in one step, at least 1.
        reuse: with False nothing is acquired or created, so every prompt is computed whole.
        clock: seconds, monotonic.
    Raises: LayoutError: the pool's blocks are not this model's, or a count is below 1.
    """

    def __init__(
        self,
        weights: Weights,
        manager: ManagerCalls,
        namespace_id: NamespaceId,
        root: SequenceHash,
        block_tokens: int,
        max_batch: int,
        prefill_chunk_tokens: int,
        reuse: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if min(block_tokens, max_batch, prefill_chunk_tokens) < 1:
            raise LayoutError(
                f"engine: block_tokens {block_tokens}, max_batch {max_batch}, prefill_chunk_tokens "
                f"{prefill_chunk_tokens}; each must be at least 1"
            )
        self.shape = weights.shape
        self.pool = pool_view(manager.hbm.tensor, weights.shape, block_tokens)
        self._model = Model(weights)
        self._manager = manager
        self._namespace_id = namespace_id
        self._root = root
        self._block_tokens = block_tokens
        self._max_batch = max_batch
        self._prefill_chunk_tokens = prefill_chunk_tokens
        self._reuse = reuse
        self._clock = clock
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []  # oldest first, and all older than those waiting
        self._refused: list[Finished] = []
        self._stuck_since_s: float | None = None
        self._prefilled_s = 0.0
        self.meter = LoadMeter()

    @property
    def idle(self) -> bool:
        """Whether nothing is left to do or to hand out."""
        return not (self._waiting or self._running or self._refused)

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens that wait for their prefill."""
        waiting = sum(len(sequence.tokens) - sequence.computed for sequence in self._waiting)
        return waiting + sum(max(0, sequence.prefill_end - sequence.computed) for sequence in self._running)

    @property
    def running_requests(self) -> int:
        """Requests that hold slots and are being computed."""
        return len(self._running)

    def submit(self, request: Request) -> None:
        """Queue a request. One that can never be served comes back from the next step with `failed` set."""
        now_s = self._clock()
        sequence = Sequence(request, now_s, list(request.tokens))
        failed = refusal(request, self.shape, self.pool.shape[0], self._block_tokens)
        if failed is None:
            self._waiting.append(sequence)
        else:
            self._refused.append(sequence.finished(self._block_tokens, now_s, failed))

    def step(self) -> list[Finished]:
        """Admit what fits, then run one prefill chunk (oldest first) or one decode step for all running requests.

        Returns: the requests that ended in this step.
        """
        finished, self._refused = self._refused, []
        self._admit()
        in_prefill = next((sequence for sequence in self._running if sequence.in_prefill), None)
        if in_prefill is not None:
            self._prefill(in_prefill)
        elif self._running:
            self._decode()
        else:
            finished += self._starve()
        for sequence in [sequence for sequence in self._running if sequence.done]:
            self._running.remove(sequence)
            self._give_back(sequence)
            finished.append(sequence.finished(self._block_tokens, self._clock()))
        return finished

    def run_until_idle(self) -> list[Finished]:
        """Step until nothing is left. Returns all requests that ended, in the order they did."""
        finished: list[Finished] = []
        while not self.idle:
            finished += self.step()
            if self._waiting and not self._running:
                time.sleep(WAIT_S)  # the head could not be admitted: a copy still holds slots
        return finished

    def _admit(self) -> None:
        """Move waiting requests to running, in order, while slots for their whole known prompt are there."""
        while self._waiting and len(self._running) < self._max_batch:
            sequence = self._waiting[0]
            if not self._take_slots(sequence):
                return
            self._waiting.popleft()
            self._running.append(sequence)
            self._stuck_since_s = None

    def _take_slots(self, sequence: Sequence) -> bool:
        """Acquire the held prefix and allocate the rest. When HBM is short, the prefix stays held for the next try."""
        if self._reuse and not sequence.slots:
            self._hash_to(sequence, len(sequence.tokens))
            reusable = (len(sequence.tokens) - 1) // self._block_tokens  # at least the last token is computed here
            prefix = self._manager.acquire(self._namespace_id, sequence.hash_run(0, reusable))
            sequence.slots, sequence.created = list(prefix.slots), prefix.depth
            if sequence.admitted_s is None:
                sequence.hits = prefix.hits
        wanted = block_count(len(sequence.tokens), self._block_tokens)
        allocated = self._manager.allocate(wanted - sequence.created, self._namespace_id)
        if allocated is None:
            return False
        sequence.slots += allocated
        sequence.computed, sequence.prefill_end = sequence.created * self._block_tokens, len(sequence.tokens)
        if sequence.admitted_s is None:
            sequence.admitted_s = self._clock()
        return True

    def _prefill(self, sequence: Sequence) -> None:
        """Compute one chunk; the last one gives the next token."""
        start = sequence.computed
        chunk = sequence.tokens[start : min(start + self._prefill_chunk_tokens, sequence.prefill_end)]
        began_s = self._clock()
        logits = self._model.prefill(chunk, start, sequence.slots, self.pool)
        self._wrote(sequence, start + len(chunk))
        now_s = self._clock()
        self.meter.prefilled(len(chunk), now_s - began_s, now_s - max(self._prefilled_s, sequence.submitted_s))
        self._prefilled_s = now_s
        if not sequence.in_prefill:
            self._choose([sequence], logits[None])

    def _decode(self) -> None:
        """Compute the last token of every running request; the youngest are preempted when slots are short."""
        for sequence in list(self._running):  # oldest first
            while sequence in self._running and sequence.computed == len(sequence.slots) * self._block_tokens:
                allocated = self._manager.allocate(1, self._namespace_id)
                if allocated is not None:
                    sequence.slots += allocated
                elif self._waiting and self._waiting[0].slots:
                    self._give_back(self._waiting[0])
                else:
                    self._preempt(self._running[-1])
        batch = [DecodeInput(running.tokens[-1], running.computed, running.slots) for running in self._running]
        if not batch:
            return
        logits = self._model.decode(batch, self.pool)
        for sequence in self._running:
            self._wrote(sequence, sequence.computed + 1)
        self._choose(self._running, logits)

    def _wrote(self, sequence: Sequence, computed: int) -> None:
        """Note KV written up to a position, and create the blocks it made full. Bytes first, then the claim."""
        if self.pool.is_cuda:
            torch.cuda.current_stream(self.pool.device).synchronize()
        sequence.computed = computed
        start, full = sequence.created, computed // self._block_tokens
        if not self._reuse or full == start:
            return
        self._hash_to(sequence, computed)
        parent, hashes = sequence.hash_before(start), sequence.hash_run(start, full)
        written = sequence.slots[start:full]
        sequence.slots[start:full] = self._manager.create(self._namespace_id, parent, start, hashes, written)
        sequence.created = full

    def _choose(self, sequences: list[Sequence], logits: Tensor) -> None:
        """Append the best token of each row of logits [n, vocab]."""
        values, tokens = logits.topk(2, dim=-1)
        margins = (values[:, 0] - values[:, 1]).tolist()
        now_s = self._clock()
        for sequence, token, margin in zip(sequences, tokens[:, 0].tolist(), margins, strict=True):
            sequence.accept(token, margin, now_s)

    def _preempt(self, sequence: Sequence) -> None:
        """Queue a running request first, without slots; blocks it created can be hit again."""
        self._running.remove(sequence)
        self._give_back(sequence)
        sequence.preemptions += 1
        self._waiting.appendleft(sequence)

    def _give_back(self, sequence: Sequence) -> None:
        """Give a request's slots back; it starts over when it is admitted again."""
        self._manager.unpin(sequence.slots[: sequence.created])
        self._manager.release(sequence.slots[sequence.created :])
        sequence.forget_slots()

    def _starve(self) -> list[Finished]:
        """Give up on the first waiting request once nothing ran for too long: nobody will free slots any more."""
        now_s = self._clock()
        if not self._waiting:
            return []
        if self._stuck_since_s is None:
            self._stuck_since_s = now_s
        if now_s - self._stuck_since_s < STARVED_AFTER_S:
            return []
        self._stuck_since_s = None
        sequence = self._waiting.popleft()
        self._give_back(sequence)
        wanted, slots = block_count(len(sequence.tokens), self._block_tokens), self.pool.shape[0]
        detail = (
            f"{wanted} HBM slots wanted of {slots}, not free for {STARVED_AFTER_S:.0f} s while nothing ran; "
            f"look for pins or copies that never end, then submit again"
        )
        return [sequence.finished(self._block_tokens, now_s, RequestRefusedError("starved", wanted, slots, detail))]

    def _hash_to(self, sequence: Sequence, end: int) -> None:
        """Extend a sequence's hashes over the full blocks of its first `end` tokens."""
        start, full = sequence.hashed, end // self._block_tokens
        if full > start:
            tokens = sequence.tokens[start * self._block_tokens : full * self._block_tokens]
            parent = sequence.hash_before(start, self._root)
            sequence.hashes += self._manager.hash_tokens(tokens, parent, self._block_tokens)
