"""Stores: which computed blocks HOST lacks, the jobs of workers that copy them there, and what their answers make of
them.

A block is kept from reuse in HBM until all ranks have answered its job. States of recurrent layers are stored only
where vLLM offers them: nothing in a request's block table says which block holds the state behind which token.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvbm.core.backend import Backend
from kvbm.core.ids import HASH_BYTES, NamespaceId, SequenceHash, Tier, pack_slots, split_hashes
from kvbm.core.state_admission import StateAdmission
from kvbm.engines.vllm.handoff import HandoffHint, HandoffRules
from kvbm.engines.vllm.metadata import Job, StoredPart
from kvbm.engines.vllm.numbers import Numbers
from kvbm.engines.vllm.offers import StateOffer
from kvbm.engines.vllm.prefix_cache import PrefixCacheWatch
from kvbm.engines.vllm.ranks import Ranks
from kvbm.engines.vllm.reach import ABSENT
from kvbm.engines.vllm.requests import KvGroup, Requests, RequestState, trace_of
from kvbm.engines.vllm.tier_events import GroupRun, TierEvents
from kvbm.manager.engine_hbm import EngineHbmManager, Store
from kvbm.safe_log import SafeLog

log = SafeLog()

_IN_HOST = bytes([Tier.HOST])
_PARKED_PRIORITY = 90  # of blocks that are kept for who needs them next; 100 would never be given up
_TURN_PRIORITY = 80  # … for a next turn, which may not come
_SHORT_STEPS = 4  # until another look at a request whose blocks found no room in HOST, or are not hashed yet
_UNANSWERED_S = 30.0  # a store that no worker has answered for so long does not keep an idle engine stepping


class StoreRules(NamedTuple):
    """What is stored, and what is told of it.

    Attributes:
        stores: whether anything is stored at all: False in a consumer.
        stores_all: every computed block is wanted in HOST, so what does not get there is counted.
        by_recency: blocks leave HOST by when they were used last, so the end of a request is told.
        states: which states of recurrent layers are wanted, a key of STATE_POLICIES.
    """

    stores: bool = True
    stores_all: bool = True
    by_recency: bool = True
    states: str = "ends"


class _StoreRun(NamedTuple):
    """Blocks of one group that a job stores.

    Attributes:
        learned: what is told of them once they lie in HOST: their hashes, and the run they are of.
    """

    store: Store
    blocks: list[Any]
    learned: tuple[bytes, GroupRun] | None = None


class _StoreJob(NamedTuple):
    """A job that workers carry out: its runs in the order of its columns.

    Attributes:
        over: chains of requests that have ended and wait for this job, their last.
    """

    runs: list[_StoreRun]
    since_s: float
    over: list[tuple[bytes, NamespaceId]]


class StorePlanner:
    """See the module.

    Args:
        ranks: how rows of HOST are parted.
        next_job: gives the id of a job.
        handoff: how long blocks are kept for who needs them next.

    Attributes:
        events: learn of blocks that have been stored, where somebody wants to know.
    """

    def __init__(
        self,
        manager: EngineHbmManager,
        backend: Backend,
        groups: Sequence[KvGroup],
        ranks: Ranks,
        requests: Requests,
        numbers: Numbers,
        rules: StoreRules,
        next_job: Callable[[], int],
        clock: Callable[[], float],
        handoff: HandoffRules = HandoffRules(),  # noqa: B008  # frozen
    ) -> None:
        self._manager, self._groups, self._requests = manager, groups, requests
        self._part_sizes = ranks.part_sizes
        self._handoff = handoff
        self._most_parked = manager.pools.slots[Tier.HOST].slots // 2  # a client may ask for it with every request
        self._derive, self._join = backend.derived_hashes, backend.joined_checksums
        self._numbers, self._rules, self._next_job, self._clock = numbers, rules, next_job, clock
        self.events: TierEvents | None = None
        self._pool: Any = None
        self._block_ids_of: Callable[[str], Sequence[Sequence[int]]] = lambda _: ()
        self._watch: PrefixCacheWatch | None = None
        self._cacheable: Callable[[int, int], int]
        self._jobs: list[Job] = []  # of the next plan
        self._ahead = 0  # of them, so many go before others
        self._later: list[Job] = []  # of the plan after it: this step computes their blocks
        self._admission = StateAdmission(rules.states)
        self._states = {group.id: index for index, group in enumerate(groups) if group.is_state}
        self._has_draft = any(group.has_draft for group in groups)
        self._align_tokens = math.lcm(*(group.block_tokens for group in groups))
        self._stores: dict[int, _StoreJob] = {}
        self._answers: dict[int, dict[int, StoredPart]] = {}  # job → rank's part → how it ended
        self._step = 0
        self._due: dict[int, list[RequestState]] = {}  # step → requests that may fill a block by then

    def bind(
        self,
        pool: Any,
        block_ids_of: Callable[[str], Sequence[Sequence[int]]],
        watch: PrefixCacheWatch,
        cacheable: Callable[[int, int], int],
    ) -> None:
        """Meet the engine's HBM, as `Scheduler.bind`."""
        self._pool, self._block_ids_of, self._watch, self._cacheable = pool, block_ids_of, watch, cacheable

    @property
    def storing_blocks(self) -> int:
        """Blocks that wait for the workers."""
        return sum(len(run.blocks) for job in self._stores.values() for run in job.runs)

    def plan(self, scheduled: Mapping[str, int], tokens: int) -> None:
        """Begin the stores of a step.

        In a step of one token a request, only requests that may have filled a block are looked at.
        """
        self._step += 1
        runs: list[_StoreRun] = []
        looked_at = [
            state
            for state in self._due.pop(self._step, ())
            if state.due_step == self._step and state.request.request_id in self._requests.states
        ]
        if tokens != len(scheduled):
            looked_at += [state for name in scheduled if (state := self._requests.states.get(name)) is not None]
        storing: list[RequestState] = []
        for state in looked_at:
            count = len(runs)
            self._collect(state, None, runs)
            if len(runs) > count:
                storing.append(state)
        self._store(runs, storing)

    def offered(self, offers: Iterable[StateOffer], gone: Collection[str]) -> None:
        """Begin to store states that vLLM offers in this step, once and unpinned.

        This step computes them, so workers copy them in the next.

        Args:
            gone: requests that have finished or were preempted since the last step; their blocks may be another's
                already.
        """
        if not self._rules.stores:
            return
        runs: list[_StoreRun] = []
        storing: list[RequestState] = []
        uses: dict[tuple[str, int], int] = {}  # a boundary has a state in each group, and is one choice
        for offer in offers:
            index = self._states.get(offer.group)
            state = self._requests.states.get(offer.request_id)
            if index is None:
                continue
            if state is None or offer.request_id in gone:
                self._numbers.add("states_lost", 1)
                continue
            if not self._is_ours(state, offer):
                continue
            where = offer.request_id, offer.tokens
            if where not in uses:
                uses[where] = self._uses_of(state, index, offer.tokens)
            if not uses[where]:
                self._numbers.add("states_unwanted", 1)
                continue
            at = offer.tokens // self._groups[index].block_tokens - 1
            count = len(runs)
            if self._manager.storable(state.namespaces[index].id, at, 1):
                self._begin_stores(state, index, at, [offer.block_id], uses[where], runs)
            elif self._rules.stores_all:
                self._numbers.add("stores_skipped", 1)
            state.states.add((index, at))
            if len(runs) > count:
                storing.append(state)
        self._store(runs, storing, self._later)

    def _uses_of(self, state: RequestState, index: int, tokens: int) -> int:
        """How often states behind so many tokens of a request were used, 0 where they are not worth their slots."""
        request, block_tokens = state.request, self._groups[index].block_tokens
        at = tokens // block_tokens - 1
        # with drafts vLLM leaves it a block earlier, for a prefix ends a block before what is held
        blocks, rest = (2, 0) if self._has_draft else (1, 1)
        is_end = tokens + blocks * block_tokens > request.num_prompt_tokens - rest
        is_parting = tokens in (state.parts_at, request.shared_prefix_boundary)
        block = SequenceHash(state.hashes(index, at, at + 1, self._derive))
        uses = self._admission.uses(block, is_end, is_parting)
        return uses + 1 if uses and is_parting else uses

    def _is_ours(self, state: RequestState, offer: StateOffer) -> bool:
        """Whether an offered block is the state of whole blocks of this request, under the hash that vLLM will find it
        by.
        """
        group = self._groups[self._states[offer.group]]
        blocks, rest = divmod(offer.tokens, group.block_tokens)
        if rest or not blocks or not offer.block_id or not self._requests.is_known(state):
            return False
        digests = group.digests(state.request.block_hashes, blocks - 1, blocks)
        key = b"".join(digests) + group.id.to_bytes(4, "big")
        return bool(digests) and self._pool.blocks[offer.block_id].block_hash == key

    def look_in(self, state: RequestState, steps: int) -> None:
        """Look at a request again after so many steps: before, one that computes a token a step cannot have filled a
        block.
        """
        due_step = self._step + steps
        if due_step != state.due_step:
            state.due_step = due_step
            self._due.setdefault(due_step, []).append(state)

    def finish(self, state: RequestState, block_ids: Sequence[Sequence[int]]) -> None:
        """Store what a request computed and was not stored yet. It has ended; its blocks are still its own."""
        runs: list[_StoreRun] = []
        self._collect(state, block_ids, runs)
        self._store(runs, [state])
        if self._rules.by_recency:
            self._refresh(state)

    def hand_off(self, state: RequestState, epoch: int) -> HandoffHint | None:
        """Keep what a request that has ended computed, for who decodes it; None where nothing of it can be read.

        Where the model has several groups, or attention does not need all blocks, decoders are told nothing: they
        read what objects and the pod's folder have.
        """
        self._park(state, self._handoff.ttl_s, "handoff", until_read=True)
        group = self._groups[0]
        stored = max(state.stored[0], state.was_stored[0])
        if len(self._groups) > 1 or not group.keeps_all or not stored:
            return None
        chain, namespace = state.hashes(0, 0, stored, self._derive), state.namespaces[0].id
        blocks = min(self._readable(chain, namespace), state.request.num_prompt_tokens // group.block_tokens)
        if not blocks:
            return None
        self._numbers.add("handoffs", 1)
        last = chain[(blocks - 1) * HASH_BYTES : blocks * HASH_BYTES]
        until_ms = int((time.time() + self._handoff.ttl_s) * 1000)
        tokens = blocks * group.block_tokens
        lends = bool(self._manager.lends)
        return HandoffHint(self._manager.instance, epoch, lends, namespace, tokens, last, until_ms)

    def keep_turn(self, state: RequestState, ttl_s: float) -> None:
        """Keep what a request that has ended computed, for its next turn."""
        if ttl_s > 0:
            self._park(state, ttl_s, "turn")

    def preempted(self, state: RequestState) -> None:
        """A request has lost its blocks: store those of its answer that HBM still has, and keep all for a while.

        HBM has what nobody was given anew; what this step only begins to compute is left out.
        """
        request = state.request
        if request.num_output_tokens and not state.is_untold:
            runs: list[_StoreRun] = []
            confirmed = request.num_tokens - 1  # all but the token sampled last
            nowhere = [[0] * (confirmed // min(one.block_tokens for one in self._groups))]
            ids = nowhere * (max(group.id for group in self._groups) + 1)  # they are found by their hashes
            self._collect(state, ids, runs, confirmed)
            self._store(runs, [state])
        self._park(state, self._handoff.ttl_s, "preempted")
        state.was_stored = [max(both) for both in zip(state.was_stored, state.stored, strict=True)]

    def _park(self, state: RequestState, ttl_s: float, why: str, until_read: bool = False) -> None:
        """Keep what HOST has of a request, and what is on its way there."""
        manager, is_turn = self._manager, why == "turn"
        most = self._most_parked // 2 if is_turn else self._most_parked
        priority = _TURN_PRIORITY if is_turn else _PARKED_PRIORITY
        needed = self._needed(state)
        chains = [state.hashes(index, begin, end, self._derive) for index, begin, end in needed]
        kept = 0
        for (index, _, _), chain in zip(needed, chains, strict=True):
            space = state.namespaces[index].id
            kept += manager.keep(chain, ttl_s, priority, space, until_read=until_read, most=most)
        blocks = {block for chain in chains for block in split_hashes(chain)} if self._stores else set()
        for job in self._stores.values():
            for run in job.runs:
                if not blocks.isdisjoint(split_hashes(run.store.hashes)):
                    manager.keep_stored(run.store, ttl_s, priority, until_read=until_read, most=most)
                    kept += 1
        self._numbers.add_of("parked_prompts", why, kept > 0)

    def _needed(self, state: RequestState) -> list[tuple[int, int, int]]:
        """Group, first block and end of what the next turn of a request reads, as far as it was looked at for a
        store.
        """
        ends = [max(both) for both in zip(state.stored, state.was_stored, strict=True)]
        prefix = min(  # of tokens, as far as a load may reach
            (
                (end - one.has_draft) * one.block_tokens
                for end, one in zip(ends, self._groups, strict=True)
                if not one.is_state
            ),
            default=0,
        )
        prefix = max(0, prefix // self._align_tokens * self._align_tokens)
        found: list[tuple[int, int, int]] = []
        for index, group in enumerate(self._groups):
            if group.is_state:
                found += [(index, at, at + 1) for one, at in sorted(state.states) if one == index]
            elif ends[index]:
                found.append((index, group.first_needed(prefix // group.block_tokens), ends[index]))
        return found

    def _readable(self, chain: bytes, namespace: NamespaceId) -> int:
        """Blocks of a chain, from the first on, that own tiers hold or get."""
        held = self._manager.holders(chain, namespace)
        blocks = held.find(ABSENT)
        if blocks < 0:
            return len(held)
        coming = {one for job in self._stores.values() for run in job.runs for one in split_hashes(run.store.hashes)}
        for block, tier in zip(split_hashes(chain[blocks * HASH_BYTES :]), held[blocks:], strict=True):
            if tier == ABSENT and block not in coming:
                break
            blocks += 1
        return blocks

    def has_work(self) -> bool:
        """Whether stores wait for the workers: an engine without requests should go on stepping, and blocks will come
        free.
        """
        if not self._stores:
            return False
        oldest = next(iter(self._stores.values()))
        return self._clock() - oldest.since_s < _UNANSWERED_S

    def take_jobs(self) -> list[Job]:
        """The jobs of the next plan, once."""
        jobs, self._jobs, self._later, self._ahead = self._jobs, self._later, [], 0
        return jobs

    def answered(self, stored: Mapping[int, Mapping[int, StoredPart]]) -> int:
        """Take in what ranks have stored. Returns how many jobs have brought HOST blocks."""
        gained = 0
        for job, parts in stored.items():
            known = self._answers.setdefault(job, {})
            known.update(parts)
            if len(known) >= len(self._part_sizes):
                del self._answers[job]
                gained += self._end(job, known)
        return gained

    def _collect(
        self,
        state: RequestState,
        block_ids: Sequence[Sequence[int]] | None,
        runs: list[_StoreRun],
        confirmed: int | None = None,
    ) -> None:
        """The computed blocks of a request that were not looked at yet, as far as HOST lacks them and has room.

        Args:
            confirmed: tokens that are computed; None: as vLLM says.
        """
        request = state.request
        if not self._requests.is_known(state):
            if state.origin.adapter is not None and state.origin.adapter.is_sure and state.origin.is_pure:
                self.look_in(state, 1)
            return
        if state.is_untold:
            state.is_untold = False
            assert self._watch is not None
            block_ids = self._block_ids_of(request.request_id) if block_ids is None else block_ids
            self._watch.tell_late(state, block_ids)
        if confirmed is None:
            confirmed = request.num_computed_tokens - request.num_in_flight_tokens
        ids, is_short = block_ids, False  # short: HOST has no room for some of them now
        for index, group in enumerate(self._groups):
            # vLLM hashes the last ones later: what drafts may compute again, and what ends within another group's block
            begin, end = state.stored[index], self._cacheable(confirmed, group.id) // group.block_tokens
            if group.is_state or end <= begin:
                continue
            hashes = state.hashes(index, begin, end, self._derive)
            begin, end = state.stored[index], begin + len(hashes) // HASH_BYTES
            if end <= begin:
                continue
            if block_ids is None and self._rules.stores:
                fits = self._manager.storable(state.namespaces[index].id, begin, end - begin)
                is_short |= fits < end - begin
                end = begin + fits
                if not fits:
                    continue
                ids = self._block_ids_of(request.request_id) if ids is None else ids
            # what it found computed it uses again, and a decoder what is computed for it
            uses = 1 if (begin or state.is_looked_at) and not state.is_for_a_decoder else 2
            if self._rules.stores:
                assert ids is not None
                self._begin_stores(state, index, begin, ids[group.id][begin:end], uses, runs)
            state.stored[index] = end
        state.is_looked_at = True
        if is_short:
            self.look_in(state, _SHORT_STEPS)
            return
        pairs = zip(self._groups, state.stored, strict=True)
        due_tokens = [(done + 1) * group.block_tokens for group, done in pairs if not group.is_state]
        if due_tokens:  # those that are computed and not hashed yet are not waited for step by step
            steps = min(due_tokens) - confirmed
            self.look_in(state, steps if steps > 0 else _SHORT_STEPS)

    def _begin_stores(
        self, state: RequestState, index: int, begin: int, ids: Sequence[int], uses: int, runs: list[_StoreRun]
    ) -> None:
        """Begin to store what HOST lacks of a chain, in as many runs as it is torn into by what HOST has or is
        nowhere.
        """
        group, namespace = self._groups[index], state.namespaces[index].id
        held = self._manager.holders(state.hashes(index, begin, begin + len(ids), self._derive))
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
                store = self._manager.begin_store(
                    namespace,
                    state.parent(index, first, self._derive),
                    first,
                    hashes,
                    uses,
                    trace_of(state.request),
                )
                taken = [] if store is None else [blocks[i] for i in store.at]
                if store is not None:
                    self._pool.touch(taken)
                    learned = None
                    if self.events is not None:
                        learned = hashes, self.events.run_of(state.request, group, first, begin + at)
                    runs.append(_StoreRun(store, taken, learned))
                if self._rules.stores_all:
                    self._numbers.add("stores_skipped", len(blocks) - len(taken))
            elif at < total:
                at += 1

    def _cached(self, state: RequestState, group: KvGroup, digest: bytes, block_id: int) -> Any:
        """The block that holds this hash;

        None where vLLM has none, or another in its place, or one of other weights.
        """
        key = digest + group.id.to_bytes(4, "big")
        block = self._pool.blocks[block_id] if block_id else None
        if block is None or block.block_hash != key:
            block = self._pool.cached_block_hash_to_block.get_one_block(key)  # left the window, and lies in HBM still
            if block is not None and self._watch is not None and block.block_id in self._watch.filled:
                return None  # another request's, which this step computes
        if state.origin.adapter is None or block is None:
            return block
        assert self._watch is not None
        return block if state.origin.equals(self._watch.origin_of(block.block_id)) else None

    def _store(self, runs: list[_StoreRun], storing: Sequence[RequestState], jobs: list[Job] | None = None) -> None:
        """Have workers store runs, of these requests, with the next plan or another one's jobs."""
        if not runs:
            return
        blocks = pack_slots(block.block_id for run in runs for block in run.blocks)
        rows = pack_slots(slot for run in runs for slot in run.store.slots)
        job = Job(self._next_job(), blocks, rows)
        self._stores[job.id] = _StoreJob(runs, self._clock(), [])
        for state in storing:
            state.last_store = job.id
        if jobs is None and len(storing) == 1 and storing[0].is_for_a_decoder:  # another engine waits for it
            self._jobs.insert(self._ahead, job)
            self._ahead += 1
        else:
            (self._jobs if jobs is None else jobs).append(job)

    def _refresh(self, state: RequestState) -> None:
        """Its chains and states were used, the beginning last; said once all of it lies in HOST.

        Of a window's chain that is no help.
        """
        stores = self._stores.get(state.last_store)
        ranges = [
            (index, 0, state.stored[index])
            for index, group in enumerate(self._groups)
            if group.keeps_all and state.stored[index]
        ]
        for index, begin, end in [*ranges, *((index, at, at + 1) for index, at in sorted(state.states))]:
            chain, namespace = state.hashes(index, begin, end, self._derive), state.namespaces[index].id
            if stores is None:
                self._manager.refresh(chain, namespace)
            else:
                stores.over.append((chain, namespace))

    def _end(self, job: int, parts: Mapping[int, StoredPart]) -> bool:
        """Blocks of a job are in HOST, or not. Returns whether HOST has gained blocks."""
        stores = self._stores.pop(job, None)
        if stores is None:
            return False
        why = next((part.why for part in parts.values() if part.why), "")
        total = sum(len(run.blocks) for run in stores.runs)
        checksums = np.zeros(total, dtype=np.uint32)
        if why:
            log.warning("store.failed", why=why, blocks=total)
        else:
            checksums = self._joined(parts)
        at = 0
        for run in stores.runs:
            count = len(run.blocks)
            self._manager.end_store(run.store, [not why] * count, checksums[at : at + count])
            self._pool.free_blocks(reversed(run.blocks))
            if self.events is not None and run.learned is not None and not why:
                self.events.learn(*run.learned)
            at += count
        for chain, namespace in stores.over:
            self._manager.refresh(chain, namespace)
        return not why

    def _joined(self, parts: Mapping[int, StoredPart]) -> np.ndarray:
        """The checksums of whole blocks, from those of their parts, which may differ in size."""
        columns = [np.frombuffer(parts[part].checksums, dtype="<u4") for part in range(len(self._part_sizes))]
        if len(columns) == 1:
            return columns[0]
        if len(set(self._part_sizes)) == 1:
            return self._join(np.stack(columns), self._part_sizes[0])
        joined = columns[0]
        for column, size in zip(columns[1:], self._part_sizes[1:], strict=True):
            joined = self._join(np.stack([joined, column]), size)  # of the first, how long it is does not matter
        return joined
