"""The scheduler's half of the connector: which blocks to load and to store, and when a load is known to succeed.

One thread, vLLM's scheduler, calls everything here; only the manager's own threads work beside it. What is asked of a
request:

1. `matched`: vLLM has found so many tokens in its own cache; how many more lie in HOST or can be brought there? What
   lies colder is brought and verified first, and the answer is "ask again" until it is there, or will not come in time.
2. `allocated`: vLLM has made room. The load goes to the workers with the next plan; its rows of HOST stay pinned until
   all have answered.
3. `plan`, at each step: blocks whose tokens earlier steps have computed are stored, and kept from reuse in HBM until
   all ranks have answered. States of recurrent layers are kept at the step that offers them, and copied at the next.
4. `finished`: what was computed and not yet stored is, after the request's end. Then its chain has been used, the
   beginning last.

Nothing here imports vLLM; `connector.py` translates.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from kvbm.assembly import last_touches, told_tiers
from kvbm.core.backend import Backend
from kvbm.core.ids import HASH_BYTES, Tier
from kvbm.engines.vllm.adapters import Adapters
from kvbm.engines.vllm.forwards import Taken, Touches
from kvbm.engines.vllm.handoff import kept_s, wants_hint
from kvbm.engines.vllm.load_planner import LoadPlanner
from kvbm.engines.vllm.metadata import Answers, HostShare, StepPlan
from kvbm.engines.vllm.numbers import Numbers
from kvbm.engines.vllm.offers import StateOffer
from kvbm.engines.vllm.prefix_cache import HbmSink, PrefixCacheWatch
from kvbm.engines.vllm.ranks import Ranks
from kvbm.engines.vllm.reach import ABSENT
from kvbm.engines.vllm.requests import GroupNamespace, KvGroup, Requests
from kvbm.engines.vllm.roles import EngineRole
from kvbm.engines.vllm.step_meter import LEAST_TOKENS, QueueMeter, StepMeter
from kvbm.engines.vllm.store_planner import StorePlanner, StoreRules
from kvbm.engines.vllm.tier_events import ExtraKeys, TierEvents
from kvbm.manager.engine_hbm import EngineHbmManager
from kvbm.safe_log import SafeLog

log = SafeLog()

_HOSTS_S = 30.0  # an engine without requests goes on stepping for so long until all hosts have HOST
_REPORT_S = 1.0  # between two looks at the manager's counters


class _Counters(NamedTuple):
    """Counters of others, as they were reported last; named as `numbers.COUNTERS` are."""

    duplicates: int
    late_acquires: int
    verified_reads: int
    corrupt_blocks: int
    peer_blocks: int


def _all_tokens(tokens: int, _: int) -> int:
    """What an engine has in its prefix cache that hashes each block as soon as it is computed."""
    return tokens


class Scheduler:
    """See the module.

    Args:
        manager: whose HBM is the engine's.
        groups: the engine's KV groups, those that keep all blocks first.
        namespaces_of: as `Requests` takes it.
        ranks: how rows of HOST are parted.
        host: where HOST is, for workers.
        align_tokens: what the engine's prefixes are multiples of.
        role: whether it loads, and whether it stores; the rules say what.

    Attributes:
        refusal: why nothing is served any more; "" while it is.
        requests: our states of the engine's requests.
        loads, stores: the two halves of a plan.
        events: what of vLLM's blocks lies in kvbm's tiers; None where nobody wants to know.
    """

    def __init__(
        self,
        manager: EngineHbmManager,
        backend: Backend,
        groups: Sequence[KvGroup],
        namespaces_of: Callable[..., Sequence[GroupNamespace]],
        ranks: Ranks,
        host: HostShare,
        align_tokens: int,
        rules: StoreRules = StoreRules(),  # noqa: B008  # frozen
        role: EngineRole = EngineRole(),  # noqa: B008  # frozen
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.manager = manager
        self.refusal = ""
        self.events: TierEvents | None = None
        self._derive = backend.derived_hashes
        self._groups, self._host, self._clock = groups, host, clock
        self._adapters = Adapters(ranks.ranks)
        self._numbers = Numbers()
        self._hosts = ranks.hosts
        self._handoff = role.handoff
        self._other_hosts: dict[int, HostShare] = {}
        self._asked_hosts_s: float | None = None
        self._watch: PrefixCacheWatch | None = None
        self._touches: Touches = last_touches(manager.pools.slots[Tier.HBM].slots)
        self._running = 0
        self._meter = StepMeter()
        self._queue_meter = QueueMeter()
        self._begun = 0  # tokens of prompts that have begun since the last step
        self._counters = _Counters(0, 0, 0, 0, 0)
        self._gauges: dict[str, int] = {}  # as they were reported last
        self._report_at_s = 0.0
        next_job = itertools.count(1).__next__
        self.requests = Requests(groups, namespaces_of, self._adapters)
        self.loads = LoadPlanner(
            manager,
            groups,
            self._derive,
            align_tokens,
            ranks.ranks,
            self.requests,
            self._numbers,
            next_job,
            self._touches,
            role,
        )
        self.stores = StorePlanner(
            manager,
            backend,
            groups,
            ranks,
            self.requests,
            self._numbers,
            rules._replace(stores=role.stores),
            next_job,
            clock,
            role.handoff,
        )

    def bind(
        self,
        pool: Any,
        block_ids_of: Callable[[str], Sequence[Sequence[int]]],
        cacheable: Callable[[int, int], int] = _all_tokens,
    ) -> None:
        """Meet the engine's HBM: its BlockPool, the block ids of a request by group, and how many of a request's
        computed tokens it has in its prefix cache by then, by group.

        Raises AttributeError as PrefixCacheWatch.
        """
        manager = self.manager
        sink = HbmSink(manager.engine_stored, manager.engine_removed, self._on_cleared, self._on_watch_broken)
        self._watch = PrefixCacheWatch(pool, self._groups, self.requests.state_of, self._derive, sink)
        self.stores.bind(pool, block_ids_of, self._watch, cacheable)

    def _on_cleared(self) -> None:
        self.manager.engine_cleared()
        if self.events is not None:
            self.events.tell_anew()

    def follow_tiers(self, extra_keys: ExtraKeys | None = None, objects_as: Tier = Tier.OBJECT) -> None:
        """Have `events` from now on, as `TierEvents` has it."""
        self.manager.follow_objects()
        events = TierEvents(self._served_from, told_tiers, extra_keys, objects_as)
        self.events = self.loads.events = self.stores.events = events

    def allocated(self, request: Any, block_ids: Sequence[Sequence[int]], tokens: int) -> None:
        """vLLM has given the request blocks, the first `tokens` beyond what it had computed are to be loaded.

        Args:
            block_ids: of the request, by vLLM's group.
        """
        state = self.requests.state_of(request)
        self._begun += state.queued_tokens
        self.requests.unqueue(state)
        self.stores.look_in(state, 1)
        self.loads.begin(state, block_ids, tokens)

    def plan(
        self,
        scheduled: Mapping[str, int],
        tokens: int,
        preempted: Collection[str],
        offers: Iterable[StateOffer] = (),
        finished: Collection[str] = (),
        taken: Iterable[Taken] = (),
    ) -> StepPlan:
        """What workers do at this step.

        Args:
            scheduled: request → tokens of it in this step.
            tokens: of all requests together.
            preempted: requests that have lost their blocks.
            offers: states of recurrent layers that this step computes.
            finished: requests that have ended since the last step.
            taken: requests of this step and the blocks that they did not have at their last one.
        """
        for request_id in preempted:
            self._touches.leave(request_id)
        step = self._touches.plan(taken)
        if not self.refusal:  # else only what vLLM waits for is still handed out
            self._look(scheduled, tokens, preempted)
            if self._is_everywhere:
                self.stores.plan(scheduled, tokens)
                self.stores.offered(offers, {*preempted, *finished})
        if self._watch is not None:
            self._watch.filled.clear()
        plan = StepPlan(is_idle=not scheduled, loads=self.loads.take_jobs(), stores=self.stores.take_jobs(), step=step)
        if not self._is_everywhere and self._asked_hosts_s is None:
            self._asked_hosts_s = self._clock()
        if plan.loads or plan.stores or not self._is_everywhere:
            plan.host, plan.other_hosts = self._host, tuple(self._other_hosts.values())
        return plan

    @property
    def has_work(self) -> bool:
        """Whether an engine without requests should go on stepping: stores wait for the workers, or other hosts are
        taking their memory.
        """
        if self.stores.has_work():
            return True
        is_awaited = not (self._is_everywhere or self.refusal or self._asked_hosts_s is None)
        return is_awaited and self._clock() - (self._asked_hosts_s or 0.0) < _HOSTS_S

    @property
    def _is_everywhere(self) -> bool:
        """Whether all hosts have HOST. Before, nothing is stored, so that no block of HBM is kept for as long."""
        return len(self._other_hosts) == self._hosts - 1

    def _look(self, scheduled: Mapping[str, int], tokens: int, preempted: Collection[str]) -> None:
        """Report what HBM holds now and how busy the engine is, and heed who has lost blocks."""
        if self._watch is not None:
            self._watch.flush()
        for request_id in preempted:
            if (state := self.requests.states.get(request_id)) is not None:
                if self._is_everywhere:
                    self.stores.preempted(state)
                state.stored = [0] * len(self._groups)
                state.states.clear()
                state.verified.clear()
                state.drop_ask()
        is_measured = False
        if self._meter.waits or tokens - len(scheduled) >= LEAST_TOKENS:
            is_measured = self._meter.planned(scheduled, tokens, self._clock())
        if self._begun or self._queue_meter.follows:
            queued = self.requests.queued_tokens
            is_measured |= self._queue_meter.planned(self._begun, queued, self._clock())
            self._begun = 0
        if is_measured or len(scheduled) != self._running:
            self._running = len(scheduled)
            self.manager.report_load(
                self.requests.queued_tokens, self._running, self._meter.tokens_per_s, self._queue_meter.tokens_per_s
            )

    def finished(
        self, request: Any, block_ids: Sequence[Sequence[int]], is_answered: bool = False
    ) -> dict[str, Any] | None:
        """A request has ended; its blocks are still its own.

        Args:
            is_answered: its client gets what it asked for.
        Returns: `kv_transfer_params` of the answer, for who decodes it.
        """
        self._touches.leave(request.request_id)
        state = self.requests.states.pop(request.request_id, None)
        if state is None:
            return None
        self.requests.unqueue(state)
        state.drop_ask()
        if not self.refusal and self._is_everywhere:
            self.stores.finish(state, block_ids)
            if is_answered:
                self.stores.keep_turn(state, kept_s(request.kv_transfer_params, self._handoff))
            if is_answered and state.is_for_a_decoder:
                hint = self.stores.hand_off(state, self.manager.epoch)
                if hint is not None and wants_hint(request.kv_transfer_params):
                    return hint.params()
        return None

    def answered(self, answers: Answers) -> None:
        """Take in what ranks have finished."""
        if answers.adapters:
            self._adapters.told(answers.adapters)
        self._other_hosts.update(answers.hosts)
        self.loads.answered(answers)
        self.loads.gained += self.stores.answered(answers.stored)
        if answers.refused and not self.refusal:
            self.refusal = answers.refused
            log.warning("connector.refused", why=answers.refused, remedy="the engine goes on without kvbm")
            if self._watch is not None:  # it may report of HBM what is no longer so
                self._watch.silence()

    def take_numbers(self) -> dict[str, Any]:
        """What was counted since the last call, as `numbers.Numbers.data`; looked at once a second.

        vLLM asks at each step alone. After the last request's end any step may be the last for long, so nothing is kept
        back then.
        """
        now_s = self._clock()
        if now_s < self._report_at_s and self.requests.states:
            return {}
        self._report_at_s = now_s + _REPORT_S
        stats, numbers = self.manager.stats(), self._numbers
        counters = _Counters(
            0 if self._watch is None else self._watch.duplicates,
            stats.late_copies,
            stats.verified_reads,
            stats.corrupt_blocks,
            stats.peer_hits,
        )
        for name, now, before in zip(_Counters._fields, counters, self._counters, strict=True):
            numbers.add(name, now - before)
        self._counters = counters
        gauges = {
            "acquiring_requests": self.loads.acquiring_requests,
            "storing_blocks": self.stores.storing_blocks,
            "parked_blocks": stats.kept_blocks[Tier.HOST],
        }
        for name, value in gauges.items() - self._gauges.items():
            numbers.set(name, value)
        self._gauges = gauges
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

    def _served_from(self, hashes: bytes) -> bytes:
        """The tiers that these blocks are read from: none once nothing is served any more."""
        if self.refusal:
            return bytes([ABSENT]) * (len(hashes) // HASH_BYTES)
        return self.manager.holders(hashes, objects=True)

    def _on_watch_broken(self, error: Exception) -> None:
        if not self.refusal:
            self.refusal = f"listening to vLLM's prefix cache has failed ({error!r})"
            log.warning("connector.refused", why=self.refusal, remedy="the engine goes on without kvbm", exc_info=error)
