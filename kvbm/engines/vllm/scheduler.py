"""The scheduler's half of the connector: which blocks to load and to store, and when a load is known to succeed.

One thread, vLLM's scheduler, calls everything here; only the manager's own threads work beside it. What is asked of a request:

1. `matched`: vLLM has found so many tokens in its own cache; how many more lie in HOST or can be brought there? What lies colder
   is brought and verified first, and the answer is "ask again" until it is there, or will not come in time.
2. `allocated`: vLLM has made room. The load goes to the workers with the next plan; its rows of HOST stay pinned until all have answered.
3. `plan`, at each step: blocks whose tokens earlier steps have computed are stored, and kept from reuse in HBM until all ranks
   have answered.
4. `finished`: what was computed and not yet stored is, after the request's end. Then its chain has been used, the beginning last.

Nothing here imports vLLM; `connector.py` translates.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import structlog

from kvbm.core.backend import Backend
from kvbm.engines.vllm.adapters import Adapters
from kvbm.engines.vllm.load_planner import LoadPlanner
from kvbm.engines.vllm.metadata import Answers, HostShare, Plan, Ranks
from kvbm.engines.vllm.numbers import Numbers
from kvbm.engines.vllm.prefix_cache import HbmSink, PrefixCacheWatch
from kvbm.engines.vllm.requests import Group, GroupNamespace, Requests
from kvbm.engines.vllm.store_planner import StorePlanner, StoreRules
from kvbm.manager.engine_hbm import EngineHbmManager

log = structlog.get_logger()

_REPORT_S = 1.0  # between two looks at the manager's counters


class _Counters(NamedTuple):
    """Counters of others, as they were reported last; named as `numbers.COUNTERS` are."""

    duplicates: int
    late_acquires: int
    verified_reads: int
    corrupt_blocks: int


class Scheduler:
    """See the module.

    Args:
        manager: whose HBM is the engine's.
        groups: the engine's KV groups, those that keep all blocks first.
        namespaces_of: as `Requests` takes it.
        ranks: how rows of HOST are parted.
        host: where HOST is, for workers.
        align_tokens: what the engine's prefixes are multiples of.

    Attributes:
        refusal: why nothing is served any more; "" while it is.
        requests: our states of the engine's requests.
        loads, stores: the two halves of a plan.
    """

    def __init__(
        self,
        manager: EngineHbmManager,
        backend: Backend,
        groups: Sequence[Group],
        namespaces_of: Callable[..., Sequence[GroupNamespace]],
        ranks: Ranks,
        host: HostShare,
        align_tokens: int,
        rules: StoreRules = StoreRules(),  # noqa: B008  # frozen
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.manager = manager
        self.refusal = ""
        self._derive = backend.derived_hashes
        self._groups, self._host, self._clock = groups, host, clock
        self._adapters = Adapters(ranks.ranks)
        self._numbers = Numbers()
        self._watch: PrefixCacheWatch | None = None
        self._running = 0
        self._counters = _Counters(0, 0, 0, 0)
        self._report_at_s = 0.0
        next_job = itertools.count(1).__next__
        self.requests = Requests(groups, namespaces_of, self._adapters)
        self.loads = LoadPlanner(
            manager, groups, self._derive, align_tokens, ranks.ranks, self.requests, self._numbers, next_job
        )
        self.stores = StorePlanner(
            manager, backend, groups, ranks, self.requests, self._numbers, rules, next_job, clock
        )

    def bind(self, pool: Any, block_ids_of: Callable[[str], Sequence[Sequence[int]]]) -> None:
        """Meet the engine's HBM: its BlockPool, and the block ids of a request by group. Raises AttributeError as PrefixCacheWatch."""
        manager = self.manager
        sink = HbmSink(manager.engine_stored, manager.engine_removed, manager.engine_cleared, self._on_watch_broken)
        self._watch = PrefixCacheWatch(pool, self._groups, self.requests.state_of, self._derive, sink)
        self.stores.bind(pool, block_ids_of, self._watch)

    def allocated(self, request: Any, block_ids: Sequence[Sequence[int]], tokens: int) -> None:
        """vLLM has given the request blocks, the first `tokens` beyond what it had computed are to be loaded.

        Args:
            block_ids: of the request, by vLLM's group.
        """
        state = self.requests.state_of(request)
        self.requests.unqueue(state)
        self.stores.look_in(state, 1)
        self.loads.begin(state, block_ids, tokens)

    def plan(self, scheduled: Mapping[str, int], tokens: int, preempted: Sequence[str]) -> Plan:
        """What workers do at this step.

        Args:
            scheduled: request → tokens of it in this step.
            tokens: of all requests together.
            preempted: requests that have lost their blocks.
        """
        if not self.refusal:  # else only what vLLM waits for is still handed out
            self._plan_stores(scheduled, tokens, preempted)
        plan = Plan(is_idle=not scheduled, loads=self.loads.take_jobs(), stores=self.stores.take_jobs())
        if plan.loads or plan.stores:
            plan.host = self._host
        return plan

    def _plan_stores(self, scheduled: Mapping[str, int], tokens: int, preempted: Sequence[str]) -> None:
        """Report what HBM holds now, and store what has been computed."""
        if self._watch is not None:
            self._watch.flush()
        for request_id in preempted:
            if (state := self.requests.states.get(request_id)) is not None:
                state.stored = [0] * len(self._groups)
                state.verified.clear()
                state.drop_ask()
        self.stores.plan(scheduled, tokens)
        if len(scheduled) != self._running:
            self._running = len(scheduled)
            self.manager.report_load(self.requests.queued_tokens, self._running)

    def finished(self, request: Any, block_ids: Sequence[Sequence[int]]) -> None:
        """A request has ended; its blocks are still its own."""
        state = self.requests.states.pop(request.request_id, None)
        if state is None:
            return
        self.requests.unqueue(state)
        state.drop_ask()
        if not self.refusal:
            self.stores.finish(state, block_ids)

    def answered(self, answers: Answers) -> None:
        """Take in what ranks have finished."""
        if answers.adapters:
            self._adapters.told(answers.adapters)
        self.loads.answered(answers)
        self.loads.gained += self.stores.answered(answers.stored)
        if answers.refused and not self.refusal:
            self.refusal = answers.refused
            log.warning("connector.refused", why=answers.refused, remedy="the engine goes on without kvbm")
            if self._watch is not None:  # it may report of HBM what is no longer so
                self._watch.silence()

    def take_numbers(self) -> dict[str, Any]:
        """What was counted since the last call, as `numbers.Numbers.data`; looked at once a second."""
        now_s = self._clock()
        if now_s < self._report_at_s:
            return {}
        self._report_at_s = now_s + _REPORT_S
        stats, numbers = self.manager.stats(), self._numbers
        counters = _Counters(
            0 if self._watch is None else self._watch.duplicates,
            stats.late_copies,
            stats.verified_reads,
            stats.corrupt_blocks,
        )
        for name, now, before in zip(_Counters._fields, counters, self._counters, strict=True):
            numbers.add(name, now - before)
        self._counters = counters
        numbers.set("acquiring_requests", self.loads.acquiring_requests)
        numbers.set("storing_blocks", self.stores.storing_blocks)
        return numbers.take()

    def clear(self) -> None:
        """Empty every own tier."""
        for state in self.requests.states.values():
            state.drop_ask()
        self.manager.clear()

    def close(self) -> None:
        """End the instance. What workers have not answered is lost."""
        for state in self.requests.states.values():
            state.drop_ask()
        self.manager.close()

    def _on_watch_broken(self, error: Exception) -> None:
        if not self.refusal:
            self.refusal = f"listening to vLLM's prefix cache has failed ({error!r})"
            log.warning("connector.refused", why=self.refusal, remedy="the engine goes on without kvbm", exc_info=error)
