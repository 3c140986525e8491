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

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import structlog

from kvbm.core.backend import Kernels
from kvbm.core.ids import HASH_BYTES, Tier, pack_slots
from kvbm.engines.vllm.adapters import Adapters, Origin
from kvbm.engines.vllm.metadata import Answers, HostShare, Job, Plan, Ranks, Stored
from kvbm.engines.vllm.numbers import Numbers
from kvbm.engines.vllm.prefix_cache import HbmSink, PrefixCacheWatch
from kvbm.engines.vllm.requests import Ask, Group, GroupNamespace, RequestState, has_own_ids
from kvbm.manager.acquiring import Acquiring
from kvbm.manager.engine_hbm import EngineHbmManager, Store

log = structlog.get_logger()

_ABSENT = 0xFF  # of `Manager.holders`
_IN_HOST = bytes([Tier.HOST])
_SHORT_STEPS = 4  # until another look at a request whose blocks found no room in HOST
_TELL_S = 1.0  # between two looks at the manager's counters
_UNANSWERED_S = 30.0  # a store that no worker has answered for so long does not keep an idle engine stepping


class _Load(NamedTuple):
    """A load that workers carry out."""

    request_id: str
    first: bytes
    runs: list[tuple[Group, int, Acquiring]]


class _Run(NamedTuple):
    """Blocks of one group that a job stores."""

    store: Store
    blocks: list[Any]


class _Stores(NamedTuple):
    """A job that workers carry out: its runs in the order of its columns.

    Attributes:
        over: chains of requests that have ended and wait for this job, their last.
    """

    runs: list[_Run]
    since_s: float
    over: list[bytes]


class _Told(NamedTuple):
    """Counters of others, as they were told last; named as `numbers.COUNTERS` are."""

    duplicates: int
    late_acquires: int
    verified_reads: int
    corrupt_blocks: int


class Scheduler:
    """See the module.

    Args:
        manager: whose HBM is the engine's.
        groups: the engine's KV groups, those that keep all blocks first.
        namespaces_of: the namespaces of a request by group, by its tenant, and by the digest of its adapter's weights if it has one.
        ranks: how rows of HOST are parted.
        host: where HOST is, for workers.
        align_tokens: what the engine's prefixes are multiples of.
        stores_all: every computed block is wanted in HOST, so what does not get there is counted.
        by_recency: blocks leave HOST by when they were used last, so the end of a request is told.

    Attributes:
        is_asked_again: a request was told to ask again; for its reader to take back.
    """

    def __init__(
        self,
        manager: EngineHbmManager,
        kernels: Kernels,
        groups: Sequence[Group],
        namespaces_of: Callable[..., Sequence[GroupNamespace]],
        ranks: Ranks,
        host: HostShare,
        align_tokens: int,
        stores_all: bool = True,
        by_recency: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.manager = manager
        self.refusal = ""  # why nothing is served any more
        self.is_asked_again = False
        self._derive, self._join = kernels.derived_hashes, kernels.joined_checksums
        self._groups, self._namespaces_of, self._ranks, self._host = groups, namespaces_of, ranks, host
        self._align_tokens, self._stores_all, self._by_recency, self._clock = (
            align_tokens, stores_all, by_recency, clock,
        )  # fmt: skip
        self._pool: Any = None
        self._block_ids_of: Callable[[str], Sequence[Sequence[int]]] = lambda _: ()
        self._watch: PrefixCacheWatch | None = None
        self._states: dict[str, RequestState] = {}
        self._plan = Plan()
        self._adapters = Adapters(ranks.ranks)
        self._next_job = 1
        self._loads: dict[int, _Load] = {}
        self._load_answers: dict[int, int] = {}
        self._loading: dict[bytes, int] = {}  # first hash of a load's first run → loads of it
        self._stores: dict[int, _Stores] = {}
        self._store_answers: dict[int, dict[int, Stored]] = {}
        self._gained = 0  # grows when HOST has gained blocks: a miss is then worth another look
        self._queued_tokens = 0
        self._running = 0
        self._step = 0
        self._due: dict[int, list[RequestState]] = {}  # step → requests that may fill a block by then
        self._numbers = Numbers()
        self._told = _Told(0, 0, 0, 0)
        self._tell_at_s = 0.0

    def bind(self, pool: Any, block_ids_of: Callable[[str], Sequence[Sequence[int]]]) -> None:
        """Meet the engine's HBM: its BlockPool, and the block ids of a request by group. Raises AttributeError as PrefixCacheWatch."""
        manager = self.manager
        sink = HbmSink(manager.engine_stored, manager.engine_removed, manager.engine_cleared, self._on_watch_broken)
        self._watch = PrefixCacheWatch(pool, self._groups, self.state_of, self._derive, sink)
        self._pool, self._block_ids_of = pool, block_ids_of

    def state_of(self, request: Any) -> RequestState:
        """Our state of a request, made when it is first heard of."""
        state = self._states.get(request.request_id)
        if state is None:
            lora = getattr(request, "lora_request", None)
            origin = Origin(
                None if lora is None else self._adapters.of(lora.lora_int_id), is_pure=not has_own_ids(request)
            )
            namespaces = self._namespaces_of(request) if lora is None else ()
            state = RequestState(request, self._groups, namespaces, origin)
            self._states[request.request_id] = state
            self._queued_tokens += state.queued_tokens
        return state

    def _is_known(self, state: RequestState) -> bool:
        """Whether a request's blocks have a namespace that says all they depend on."""
        if not state.origin.is_known:
            return False
        if not state.namespaces:
            assert state.origin.adapter is not None
            state.namespaces = self._namespaces_of(state.request, state.origin.adapter.digest)
        return True

    # -- loads --------------------------------------------------------------------------------------------------------

    def matched(self, request: Any, computed_tokens: int) -> int | None:
        """Tokens beyond `computed_tokens` that can be loaded from HOST; None: ask again."""
        state = self._states.get(request.request_id)
        if state is None:
            state = self.state_of(request)
        ask, hashes = state.ask, len(request.block_hashes)
        if ask is not None:
            if (
                ask.computed_tokens == computed_tokens
                and ask.hashes == hashes
                and (ask.runs or ask.gained == self._gained)
            ):
                return self._settled(state, ask)
            state.drop_ask()
        if state.refused or request.skip_reading_prefix_cache or computed_tokens % self._align_tokens:
            return 0
        adapter = state.origin.adapter
        if not self._is_known(state):
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
                    acquiring = self.manager.begin_acquire(namespace, wanted, first=begin - chain_begin)
                    runs.append((group, begin, acquiring))
        if len(runs) == 1 and runs[0][2].done and not runs[0][2].depth:
            runs[0][2].release()
            runs = []
        tokens = end_tokens - computed_tokens if runs else 0
        return Ask(computed_tokens, len(state.request.block_hashes), self._gained, runs, tokens)

    def _reach(self, state: RequestState, computed_tokens: int, limit_tokens: int) -> int:
        """The most tokens for which every group has what it needs in its own tiers; at least `computed_tokens`."""
        held: list[bytes] = []
        end_tokens = limit_tokens
        for index, group in enumerate(self._groups):
            first = computed_tokens // group.block_tokens
            found = self.manager.holders(state.hashes(index, first, end_tokens // group.block_tokens, self._derive))
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

    def allocated(self, request: Any, block_ids: Sequence[Sequence[int]], tokens: int) -> None:
        """vLLM has given the request blocks, the first `tokens` beyond what it had computed are to be loaded.

        Args:
            block_ids: of the request, by vLLM's group.
        """
        state = self.state_of(request)
        self._unqueue(state)
        self._look_in(state, 1)
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
        job = Job(self._job(), pack_slots(columns), pack_slots(rows), request.request_id)
        if (adapter := state.origin.adapter) is not None:
            weights = tuple(adapter.parts[rank] for rank in sorted(adapter.parts))
            why = "" if state.origin.is_known else "its adapter was loaded anew"
            job = job._replace(adapter=adapter.number, weights=weights, why=why)
        first = ask.computed_tokens // self._groups[0].block_tokens
        load = _Load(request.request_id, state.hashes(0, first, first + 1, self._derive), ask.runs)
        self._loading[load.first] = self._loading.get(load.first, 0) + 1
        self._loads[job.id] = load
        self._plan.loads.append(job)

    def abandon(self, request_id: str) -> None:
        """What this request waits for cannot be planned: a job that fails tells vLLM to compute it."""
        self._plan.loads.append(Job(self._job(), b"", b"", request_id, "the load could not be planned"))

    def hits_of_last_load(self) -> Mapping[Tier, int]:
        """Blocks by tier of the load planned last, in its first group; empty without one."""
        return self._loads[self._plan.loads[-1].id].runs[0][2].hits if self._plan.loads else {}

    # -- stores -------------------------------------------------------------------------------------------------------

    def plan(self, scheduled: Mapping[str, int], tokens: int, preempted: Sequence[str]) -> Plan:
        """What workers do at this step.

        In a step of one token a request, which most are, only those requests are looked at that may have filled a block.

        Args:
            scheduled: request → tokens of it in this step.
            tokens: of all requests together.
            preempted: requests that have lost their blocks.
        """
        self._step += 1
        if not self.refusal:  # else only what vLLM waits for is still handed out
            self._plan_stores(scheduled, tokens, preempted)
        plan, self._plan = self._plan, Plan()
        plan.is_idle = not scheduled
        if plan.loads or plan.stores:
            plan.host = self._host
        return plan

    def _plan_stores(self, scheduled: Mapping[str, int], tokens: int, preempted: Sequence[str]) -> None:
        """Tell what HBM holds now, and store what has been computed."""
        if self._watch is not None:
            self._watch.flush()
        for request_id in preempted:
            if (state := self._states.get(request_id)) is not None:
                state.stored = [0] * len(self._groups)
                state.verified.clear()
                state.drop_ask()
        runs: list[_Run] = []
        looked_at = [
            state
            for state in self._due.pop(self._step, ())
            if state.due_step == self._step and state.request.request_id in self._states
        ]
        if tokens != len(scheduled):
            looked_at += [state for name in scheduled if (state := self._states.get(name)) is not None]
        storing: list[RequestState] = []
        for state in looked_at:
            count = len(runs)
            self._collect(state, None, runs)
            if len(runs) > count:
                storing.append(state)
        self._store(runs, storing)
        if len(scheduled) != self._running:
            self._running = len(scheduled)
            self.manager.report_load(self._queued_tokens, self._running)

    def _collect(self, state: RequestState, block_ids: Sequence[Sequence[int]] | None, runs: list[_Run]) -> None:
        """The computed blocks of a request that were not looked at yet, as far as HOST lacks them and has room."""
        request = state.request
        if not self._is_known(state):
            if state.origin.adapter is not None and state.origin.adapter.is_sure and state.origin.is_pure:
                self._look_in(state, 1)
            return
        if state.is_untold:
            state.is_untold = False
            assert self._watch is not None
            block_ids = self._block_ids_of(request.request_id) if block_ids is None else block_ids
            self._watch.tell_late(state, block_ids)
        confirmed = request.num_computed_tokens - request.num_in_flight_tokens
        ids, is_short = block_ids, False  # short: HOST has no room for some of them now
        for index, group in enumerate(self._groups):
            begin, end = state.stored[index], confirmed // group.block_tokens
            if end <= begin:
                continue
            hashes = state.hashes(index, begin, end, self._derive)
            begin, end = state.stored[index], begin + len(hashes) // HASH_BYTES
            if end <= begin:
                continue
            if block_ids is None:
                fits = self.manager.storable(state.namespaces[index].id, begin, end - begin)
                is_short |= fits < end - begin
                end = begin + fits
                if not fits:
                    continue
                ids = self._block_ids_of(request.request_id) if ids is None else ids
            uses = 1 if begin or state.is_looked_at else 2  # what it found computed, it uses again
            assert ids is not None
            self._begin_stores(state, index, begin, ids[group.id][begin:end], uses, runs)
            state.stored[index] = end
        state.is_looked_at = True
        if is_short:
            self._look_in(state, _SHORT_STEPS)
            return
        pairs = zip(self._groups, state.stored, strict=True)
        self._look_in(state, max(1, min((done + 1) * group.block_tokens for group, done in pairs) - confirmed))

    def _look_in(self, state: RequestState, steps: int) -> None:
        """Look at a request again after so many steps: before, one that computes a token a step cannot have filled a block."""
        due_step = self._step + steps
        if due_step != state.due_step:
            state.due_step = due_step
            self._due.setdefault(due_step, []).append(state)

    def _begin_stores(
        self, state: RequestState, index: int, begin: int, ids: Sequence[int], uses: int, runs: list[_Run]
    ) -> None:
        """Begin to store what HOST lacks of a chain, in as many runs as it is torn into by what HOST has or is nowhere."""
        group, namespace = self._groups[index], state.namespaces[index].id
        held = self.manager.holders(state.hashes(index, begin, begin + len(ids), self._derive))
        digests: Sequence[bytes] = ()
        at, total = 0, len(held)
        while at < total:
            at = total - len(held[at:].lstrip(_IN_HOST))
            if at < total and not digests:
                digests = group.digests(state.request.block_hashes, begin, begin + total)
            blocks: list[Any] = []
            while at < total and held[at] != Tier.HOST and (block := self._cached(state, group, digests[at], ids[at])):
                blocks.append(block)
                at += 1
            if blocks:
                first = begin + at - len(blocks)
                hashes = state.hashes(index, first, begin + at, self._derive)
                store = self.manager.begin_store(namespace, state.parent(index, first), first, hashes, uses)
                taken = [] if store is None else [blocks[i] for i in store.at]
                if store is not None:
                    self._pool.touch(taken)
                    runs.append(_Run(store, taken))
                if self._stores_all:
                    self._numbers.add("stores_skipped", len(blocks) - len(taken))
            elif at < total:
                at += 1

    def _cached(self, state: RequestState, group: Group, digest: bytes, block_id: int) -> Any:
        """The block that holds this hash; None where vLLM has none, or another in its place, or one of other weights."""
        key = digest + group.id.to_bytes(4, "big")
        block = self._pool.blocks[block_id] if block_id else None
        if block is None or block.block_hash != key:
            block = self._pool.cached_block_hash_to_block.get_one_block(key)  # left the window, and lies in HBM still
        if state.origin.adapter is None or block is None:
            return block
        assert self._watch is not None
        return block if state.origin.equals(self._watch.origin_of(block.block_id)) else None

    def _store(self, runs: list[_Run], storing: Sequence[RequestState]) -> None:
        """Have workers store runs, of these requests."""
        if not runs:
            return
        blocks = pack_slots(block.block_id for run in runs for block in run.blocks)
        rows = pack_slots(slot for run in runs for slot in run.store.slots)
        job = Job(self._job(), blocks, rows)
        self._stores[job.id] = _Stores(runs, self._clock(), [])
        for state in storing:
            state.last_store = job.id
        self._plan.stores.append(job)

    def finished(self, request: Any, block_ids: Sequence[Sequence[int]]) -> None:
        """A request has ended; its blocks are still its own."""
        state = self._states.pop(request.request_id, None)
        if state is None:
            return
        self._unqueue(state)
        state.drop_ask()
        if self.refusal:
            return
        runs: list[_Run] = []
        self._collect(state, block_ids, runs)
        self._store(runs, [state])
        if self._by_recency:
            self._refresh(state)

    def _refresh(self, state: RequestState) -> None:
        """Its chains were used, the beginning last; said once all of it lies in HOST. Of a window's chain that is no help."""
        stores = self._stores.get(state.last_store)
        for index, group in enumerate(self._groups):
            if group.window_blocks is None and state.stored[index]:
                chain = state.hashes(index, 0, state.stored[index], self._derive)
                if stores is None:
                    self.manager.refresh(chain)
                else:
                    stores.over.append(chain)

    def has_work(self) -> bool:
        """Whether stores wait for the workers: an engine without requests should go on stepping, and blocks will come free."""
        if not self._stores:
            return False
        oldest = next(iter(self._stores.values()))
        return self._clock() - oldest.since_s < _UNANSWERED_S

    # -- what workers answer ------------------------------------------------------------------------------------------

    def answered(self, answers: Answers) -> None:
        """Take in what ranks have finished."""
        if answers.adapters:
            self._adapters.told(answers.adapters)
        for job, why in answers.failed.items():
            self._fail_load(job, why)
        for job, count in answers.loaded.items():
            total = self._load_answers.get(job, 0) + count
            if total < self._ranks.ranks:
                self._load_answers[job] = total
            else:
                self._load_answers.pop(job, None)
                self._end_load(job)
        for job, parts in answers.stored.items():
            known = self._store_answers.setdefault(job, {})
            known.update(parts)
            if len(known) >= self._ranks.parts:
                del self._store_answers[job]
                self._end_store(job, known)
        if answers.refused and not self.refusal:
            self.refusal = answers.refused
            log.warning("connector.refused", why=answers.refused, remedy="the engine goes on without kvbm")
            if self._watch is not None:  # HBM may be told of by what it no longer is
                self._watch.silence()

    def failed(self, request_id: str) -> None:
        """A load of this request has failed; vLLM computes it."""
        if (state := self._states.get(request_id)) is not None:
            state.refused = True

    def _end_load(self, job: int) -> None:
        load = self._loads.pop(job, None)
        if load is None:
            return
        left = self._loading.pop(load.first, 1) - 1
        if left:
            self._loading[load.first] = left
        for _, _, acquiring in load.runs:
            acquiring.release()

    def _fail_load(self, job: int, why: str) -> None:
        load = self._loads.get(job)
        log.warning("load.failed", why=why, request=load.request_id if load else "", remedy="the prompt is computed")
        if load is not None:
            self.failed(load.request_id)

    def _end_store(self, job: int, parts: Mapping[int, Stored]) -> None:
        stores = self._stores.pop(job, None)
        if stores is None:
            return
        why = next((part.why for part in parts.values() if part.why), "")
        total = sum(len(run.blocks) for run in stores.runs)
        checksums = np.zeros(total, dtype=np.uint32)
        if why:
            log.warning("store.failed", why=why, blocks=total)
        elif self._ranks.parts == 1:
            checksums = np.frombuffer(parts[0].checksums, dtype="<u4")
        else:
            columns = [np.frombuffer(parts[part].checksums, dtype="<u4") for part in range(self._ranks.parts)]
            checksums = self._join(np.stack(columns), self._ranks.part_bytes)
        at = 0
        for run in stores.runs:
            count = len(run.blocks)
            self.manager.end_store(run.store, [not why] * count, checksums[at : at + count])
            self._pool.free_blocks(reversed(run.blocks))
            at += count
        for chain in stores.over:
            self.manager.refresh(chain)
        if not why:
            self._gained += 1

    def take_numbers(self) -> dict[str, Any]:
        """What was counted since the last call, as `numbers.Numbers.data`; looked at once a second."""
        now_s = self._clock()
        if now_s < self._tell_at_s:
            return {}
        self._tell_at_s = now_s + _TELL_S
        stats, numbers = self.manager.stats(), self._numbers
        told = _Told(
            0 if self._watch is None else self._watch.duplicates,
            stats.late_copies,
            stats.verified_reads,
            stats.corrupt_blocks,
        )
        for name, now, before in zip(_Told._fields, told, self._told, strict=True):
            numbers.add(name, now - before)
        self._told = told
        numbers.set("acquiring_requests", sum(1 for s in self._states.values() if s.ask is not None and not s.ask.done))
        numbers.set("storing_blocks", sum(len(run.blocks) for job in self._stores.values() for run in job.runs))
        return numbers.take()

    # -- the rest -----------------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Empty every own tier."""
        for state in self._states.values():
            state.drop_ask()
        self.manager.clear()

    def close(self) -> None:
        """End the instance. What workers have not answered is lost."""
        for state in self._states.values():
            state.drop_ask()
        self.manager.close()

    def _job(self) -> int:
        job, self._next_job = self._next_job, self._next_job + 1
        return job

    def _unqueue(self, state: RequestState) -> None:
        self._queued_tokens -= state.queued_tokens
        state.queued_tokens = 0

    def _on_watch_broken(self, error: Exception) -> None:
        if not self.refusal:
            self.refusal = f"listening to vLLM's prefix cache has failed ({error!r})"
            log.warning("connector.refused", why=self.refusal, remedy="the engine goes on without kvbm", exc_info=error)
