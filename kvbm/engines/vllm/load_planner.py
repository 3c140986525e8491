"""Loads: what a request's prompt finds in HOST and colder tiers, and the jobs of workers that bring it into HBM.

`matched` says how many tokens can be loaded, or "ask again" while blocks are on their way to HOST. `begin` makes the job once vLLM has
made room; the rows of HOST stay pinned until all ranks have answered it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import structlog

from kvbm.core.ids import HASH_BYTES, Tier, pack_slots
from kvbm.engines.vllm.metadata import Answers, Job
from kvbm.engines.vllm.numbers import Numbers
from kvbm.engines.vllm.requests import Ask, DerivedHashes, Group, Requests, RequestState
from kvbm.manager.acquiring import Acquiring
from kvbm.manager.engine_hbm import EngineHbmManager

log = structlog.get_logger()

_ABSENT = 0xFF  # of `Manager.holders`


class _Load(NamedTuple):
    """A load that workers carry out."""

    request_id: str
    first: bytes
    runs: list[tuple[Group, int, Acquiring]]


class LoadPlanner:
    """See the module.

    Args:
        align_tokens: what the engine's prefixes are multiples of.
        ranks: workers that answer each job.
        next_job: gives the id of a job.

    Attributes:
        gained: grows when HOST has gained blocks: a miss is then worth another look.
        is_asked_again: a request was told to ask again; for its reader to take back.
    """

    def __init__(
        self,
        manager: EngineHbmManager,
        groups: Sequence[Group],
        derive: DerivedHashes,
        align_tokens: int,
        ranks: int,
        requests: Requests,
        numbers: Numbers,
        next_job: Callable[[], int],
    ) -> None:
        self.gained = 0
        self.is_asked_again = False
        self._manager, self._groups, self._derive, self._align_tokens = manager, groups, derive, align_tokens
        self._ranks, self._requests, self._numbers, self._next_job = ranks, requests, numbers, next_job
        self._jobs: list[Job] = []  # of the next plan
        self._loads: dict[int, _Load] = {}
        self._answers: dict[int, int] = {}  # job → ranks that are over with it
        self._loading: dict[bytes, int] = {}  # first hash of a load's first run → loads of it

    @property
    def acquiring_requests(self) -> int:
        """Requests whose blocks are on their way to HOST."""
        return sum(1 for state in self._requests.states.values() if state.ask is not None and not state.ask.done)

    def matched(self, request: Any, computed_tokens: int) -> int | None:
        """Tokens beyond `computed_tokens` that can be loaded from HOST; None: ask again."""
        state = self._requests.states.get(request.request_id)
        if state is None:
            state = self._requests.state_of(request)
        ask, hashes = state.ask, len(request.block_hashes)
        if ask is not None:
            if (
                ask.computed_tokens == computed_tokens
                and ask.hashes == hashes
                and (ask.runs or ask.gained == self.gained)
            ):
                return self._settled(state, ask)
            state.drop_ask()
        if state.refused or request.skip_reading_prefix_cache or computed_tokens % self._align_tokens:
            return 0
        adapter = state.origin.adapter
        if not self._requests.is_known(state):
            is_unheard = adapter is not None and not adapter.parts and adapter.is_sure and state.origin.is_pure
            if not is_unheard or not state.asks_left:
                return 0
            state.asks_left -= 1  # an engine that has loaded it already says so with the next step
            self.is_asked_again = True
            return None
        if adapter is not None and not adapter.is_loaded:
            return 0
        limit = (request.num_tokens - 1) // self._align_tokens * self._align_tokens
        if limit <= computed_tokens:
            return 0
        if self._is_loading(state, computed_tokens):
            return None
        state.ask = self._look(state, computed_tokens, limit)
        return self._settled(state, state.ask)

    def begin(self, state: RequestState, block_ids: Sequence[Sequence[int]], tokens: int) -> None:
        """Have workers load the first `tokens` of what was found for a request, into its blocks by vLLM's group."""
        request = state.request
        ask, state.ask = state.ask, None
        if ask is None:
            return
        if not tokens or not ask.runs:
            ask.release()
            return
        end_tokens = ask.computed_tokens + tokens
        columns: list[int] = []
        rows: list[int] = []
        for group, begin, acquiring in ask.runs:
            ids, slots = block_ids[group.id], acquiring.slots
            for at in range(begin, end_tokens // group.block_tokens):
                if ids[at]:  # vLLM keeps block 0 for what attention does not read
                    columns.append(ids[at])
                    rows.append(slots[at - begin])
            for tier, blocks in acquiring.hits.items():
                self._numbers.add_of("hit_blocks", tier.name, blocks)
        job = Job(self._next_job(), pack_slots(columns), pack_slots(rows), request.request_id)
        if (adapter := state.origin.adapter) is not None:
            weights = tuple(adapter.parts[rank] for rank in sorted(adapter.parts))
            why = "" if state.origin.is_known else "its adapter was loaded anew"
            job = job._replace(adapter=adapter.number, weights=weights, why=why)
        first = ask.computed_tokens // self._groups[0].block_tokens
        load = _Load(request.request_id, state.hashes(0, first, first + 1, self._derive), ask.runs)
        self._loading[load.first] = self._loading.get(load.first, 0) + 1
        self._loads[job.id] = load
        self._jobs.append(job)

    def abandon(self, request_id: str) -> None:
        """What this request waits for cannot be planned: a job that fails tells vLLM to compute it."""
        self._jobs.append(Job(self._next_job(), b"", b"", request_id, "the load could not be planned"))

    def hits_of_last(self) -> Mapping[Tier, int]:
        """Blocks by tier of the load planned last, in its first group; empty without one."""
        return self._loads[self._jobs[-1].id].runs[0][2].hits if self._jobs else {}

    def take_jobs(self) -> list[Job]:
        """The jobs of the next plan, once."""
        jobs, self._jobs = self._jobs, []
        return jobs

    def answered(self, answers: Answers) -> None:
        """Take in what ranks have finished of loads."""
        for job, why in answers.failed.items():
            self._fail(job, why)
        for job, count in answers.loaded.items():
            total = self._answers.get(job, 0) + count
            if total < self._ranks:
                self._answers[job] = total
            else:
                self._answers.pop(job, None)
                self._end(job)

    def failed(self, request_id: str) -> None:
        """A load of this request has failed; vLLM computes it."""
        if (state := self._requests.states.get(request_id)) is not None:
            state.refused = True

    def _settled(self, state: RequestState, ask: Ask) -> int | None:
        """The answer once nothing of it is under way. What has come short is asked for again, as far as it then reaches."""
        if not ask.runs:
            return 0
        if not ask.done:
            self.is_asked_again = True
            return None
        if len(ask.runs) == 1 and ask.runs[0][0].window_blocks is None:  # a shorter prefix of this is as good
            group, _, acquiring = ask.runs[0]
            tokens = acquiring.depth * group.block_tokens
            tokens -= (ask.computed_tokens + tokens) % self._align_tokens
            if tokens != ask.tokens:
                if not tokens:
                    acquiring.release()
                state.ask = ask._replace(tokens=tokens, runs=ask.runs if tokens else [])
            return tokens
        short = [
            (begin + acquiring.depth) * group.block_tokens
            for group, begin, acquiring in ask.runs
            if acquiring.depth < (ask.computed_tokens + ask.tokens) // group.block_tokens - begin
        ]
        if not short:
            return ask.tokens
        state.drop_ask()
        state.ask = self._look(state, ask.computed_tokens, min(short) // self._align_tokens * self._align_tokens)
        return self._settled(state, state.ask)

    def _is_loading(self, state: RequestState, computed_tokens: int) -> bool:
        """Whether another request loads the very block this one would begin with: it will be in HBM soon."""
        if not self._loading:
            return False
        first = computed_tokens // self._groups[0].block_tokens
        return state.hashes(0, first, first + 1, self._derive) in self._loading

    def _look(self, state: RequestState, computed_tokens: int, limit_tokens: int) -> Ask:
        """Begin to bring to HOST what reaches farthest, up to a number of tokens."""
        runs: list[tuple[Group, int, Acquiring]] = []
        end_tokens = limit_tokens
        if len(self._groups) > 1 or self._groups[0].window_blocks is not None:
            end_tokens = self._reach(state, computed_tokens, limit_tokens)
        if end_tokens > computed_tokens:
            for index, group in enumerate(self._groups):
                end = end_tokens // group.block_tokens
                begin = max(computed_tokens // group.block_tokens, group.first_needed(end))
                chain_begin = (
                    0 if group.window_blocks is None else begin
                )  # objects lie where the chain's beginning puts them
                wanted = state.hashes(index, chain_begin, end, self._derive)
                if len(wanted) > (begin - chain_begin) * HASH_BYTES:
                    namespace = state.namespaces[index].id
                    acquiring = self._manager.begin_acquire(namespace, wanted, first=begin - chain_begin)
                    runs.append((group, begin, acquiring))
        if len(runs) == 1 and runs[0][2].done and not runs[0][2].depth:
            runs[0][2].release()
            runs = []
        tokens = end_tokens - computed_tokens if runs else 0
        return Ask(computed_tokens, len(state.request.block_hashes), self.gained, runs, tokens)

    def _reach(self, state: RequestState, computed_tokens: int, limit_tokens: int) -> int:
        """The most tokens for which every group has what it needs in its own tiers; at least `computed_tokens`."""
        held: list[bytes] = []
        end_tokens = limit_tokens
        for index, group in enumerate(self._groups):
            first = computed_tokens // group.block_tokens
            chain = state.hashes(index, first, end_tokens // group.block_tokens, self._derive)
            found = self._manager.holders(chain, state.namespaces[index].id)
            held.append(found)
            if group.window_blocks is None:
                depth = found.find(_ABSENT)
                depth = len(found) if depth < 0 else depth
                end_tokens = min(end_tokens, (first + depth) * group.block_tokens)
        end_tokens -= end_tokens % self._align_tokens
        while end_tokens > computed_tokens:
            best = end_tokens
            for group, found in zip(self._groups, held, strict=True):
                first, end = computed_tokens // group.block_tokens, end_tokens // group.block_tokens
                begin = max(first, group.first_needed(end))
                if end - first > len(found):
                    best = min(best, (first + len(found)) * group.block_tokens)
                elif (hole := found.rfind(_ABSENT, begin - first, end - first)) >= 0:
                    best = min(best, (first + hole) * group.block_tokens)
            best -= best % self._align_tokens
            if best == end_tokens:
                return end_tokens
            end_tokens = best
        return computed_tokens

    def _end(self, job: int) -> None:
        load = self._loads.pop(job, None)
        if load is None:
            return
        left = self._loading.pop(load.first, 1) - 1
        if left:
            self._loading[load.first] = left
        for _, _, acquiring in load.runs:
            acquiring.release()

    def _fail(self, job: int, why: str) -> None:
        load = self._loads.get(job)
        log.warning("load.failed", why=why, request=load.request_id if load else "", remedy="the prompt is computed")
        if load is not None:
            self.failed(load.request_id)
