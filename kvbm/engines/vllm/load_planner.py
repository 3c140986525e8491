"""Loads: what a request's prompt finds in HOST and colder tiers, and the jobs of workers that bring it into HBM.

`matched` says how many tokens can be loaded, or "ask again" while blocks are on their way to HOST. `begin` makes the
job once vLLM has made room; the rows of HOST stay pinned until all ranks have answered it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from kvbm.core.ids import HASH_BYTES, NamespaceId, Tier, pack_slots
from kvbm.engines.vllm.forwards import UNKNOWN, Touches
from kvbm.engines.vllm.handoff import HandoffHint, hint_of, is_computed_now
from kvbm.engines.vllm.metadata import Answers, Job
from kvbm.engines.vllm.numbers import Numbers
from kvbm.engines.vllm.reach import HeldBlocks, LookedUp, joined, part_reach, whole_reach
from kvbm.engines.vllm.requests import DerivedHashes, KvGroup, RequestMatch, Requests, RequestState, trace_of
from kvbm.engines.vllm.roles import EngineRole
from kvbm.engines.vllm.tier_events import TierEvents
from kvbm.manager.acquiring import Acquiring
from kvbm.manager.engine_hbm import EngineHbmManager
from kvbm.manager.onboard.expected import ExpectedBlocks
from kvbm.safe_log import SafeLog

log = SafeLog()


class _Load(NamedTuple):
    """A load that workers carry out."""

    request_id: str
    first: bytes
    runs: list[tuple[KvGroup, int, Acquiring]]


class LoadPlanner:
    """See the module.

    Args:
        align_tokens: what the engine's prefixes are multiples of.
        ranks: workers that answer each job.
        next_job: gives the id of a job.
        role: whether anything is loaded at all, and whether a state that this engine computes would be stored.

    Attributes:
        gained: grows when HOST has gained blocks: a miss is then worth another look.
        is_asked_again: a request was told to ask again; for its reader to take back.
        events: learn of blocks that are loaded, where somebody wants to know.
    """

    def __init__(
        self,
        manager: EngineHbmManager,
        groups: Sequence[KvGroup],
        derive: DerivedHashes,
        align_tokens: int,
        ranks: int,
        requests: Requests,
        numbers: Numbers,
        next_job: Callable[[], int],
        touches: Touches,
        role: EngineRole = EngineRole(),  # noqa: B008  # frozen
    ) -> None:
        self.gained = 0
        self.is_asked_again = False
        self.events: TierEvents | None = None
        self._manager, self._groups, self._derive, self._align_tokens = manager, groups, derive, align_tokens
        self._ranks, self._requests, self._numbers, self._next_job = ranks, requests, numbers, next_job
        self._role, self._handoff = role, role.handoff
        self._has_holes = len(groups) > 1 or not groups[0].keeps_all  # a part of what is loaded may be of no use
        self._whole = sum(group.keeps_all for group in groups)  # they come first
        self._has_states = any(group.is_state for group in groups)
        # of the one group, whose reach is known once its blocks have come: it is asked for the block behind a prefix,
        # too
        self._behind = int(len(groups) == 1 and groups[0].keeps_all and groups[0].has_draft)
        self._touches = touches
        self._says_found = (
            log.says_debug()
        )  # asked once: a remark that nobody sees would take as long as the rest of a question
        self._jobs: list[Job] = []  # of the next plan
        self._loads: dict[int, _Load] = {}
        self._answers: dict[int, int] = {}  # job → ranks that are over with it
        self._loading: dict[bytes, int] = {}  # first hash of a load's first run → loads of it

    @property
    def acquiring_requests(self) -> int:
        """Requests whose blocks are on their way to HOST."""
        return sum(1 for state in self._requests.states.values() if state.ask is not None and not state.ask.poll())

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
                and (ask.runs or ask.finding is not None or ask.gained == self.gained)
            ):
                return self._settled(state, ask)
            state.drop_ask()
        if state.refused or request.skip_reading_prefix_cache or computed_tokens % self._align_tokens:
            return 0
        if not self._role.loads:
            self._look_for_parting(state, computed_tokens)
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
        limit = self._limit(request)
        if limit <= computed_tokens:
            return 0
        if self._is_loading(state, computed_tokens):
            return None
        state.ask = self._look(state, computed_tokens, limit)
        return self._settled(state, state.ask)

    def parts_at(self, request_id: str) -> int:
        """Tokens of a prompt behind which a state would be of use to others, as `RequestState.parts_at`; 0: none.

        None in a consumer: nobody would get the state.
        """
        state = self._requests.states.get(request_id)
        return 0 if state is None or not self._role.stores else state.parts_at

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
        why = "" if tokens == ask.tokens else f"vLLM takes {tokens} tokens of {ask.tokens}"
        for group, begin, acquiring in ask.runs:
            ids, slots = block_ids[group.id], acquiring.slots
            for at in range(begin, end_tokens // group.block_tokens):
                if ids[at]:  # vLLM keeps block 0 for what attention does not read
                    columns.append(ids[at])
                    rows.append(slots[at - begin])
                elif group.is_state:
                    why = f"vLLM has no block for the state at token {end_tokens}"
            index, end = self._groups.index(group), end_tokens // group.block_tokens
            if group.is_state:
                state.states.add((index, end - 1))
            if self.events is not None:
                hashes = state.hashes(index, begin, end, self._derive)
                self.events.learn(hashes, self.events.run_of(request, group, begin, end))
            for tier, blocks in _hits_of(acquiring.hits, end - begin).items():
                self._numbers.add_of("hit_blocks", tier.name, blocks)
        if len(ask.runs) == 1 and ask.runs[0][0].keeps_all:
            why = ""  # any part of such a run is a prefix
        # Forwards move states of recurrent layers between blocks that no list of new blocks names.
        after = UNKNOWN if self._has_states else self._touches.of(columns)
        job = Job(self._next_job(), pack_slots(columns), pack_slots(rows), request.request_id, why, after=after)
        if (adapter := state.origin.adapter) is not None:
            weights = tuple(adapter.parts[rank] for rank in sorted(adapter.parts))
            why = why if state.origin.is_known else "its adapter was loaded anew"
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
        """Blocks by tier of the load planned last, in its first group; empty without one, or where it could not be
        planned.
        """
        load = self._loads.get(self._jobs[-1].id) if self._jobs else None
        return load.runs[0][2].hits if load is not None else {}

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

    def _settled(self, state: RequestState, ask: RequestMatch) -> int | None:
        """The answer once nothing of it is under way.

        What has come short is asked for again, as far as it then reaches.
        """
        if not ask.poll():
            self.is_asked_again = True
            return None
        if ask.finding is not None:
            limit = self._limit(state.request)
            state.ask = self._look(state, ask.computed_tokens, limit, ask.finding.result())
            return self._settled(state, state.ask)
        self._tell(state, ask)
        state.is_settled = True
        if not ask.runs:
            return 0
        if len(ask.runs) == 1 and ask.runs[0][0].keeps_all:  # a shorter prefix of this is as good
            group, _, acquiring = ask.runs[0]
            tokens = max(0, acquiring.depth - self._behind) * group.block_tokens
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
        limit = min(short) // self._align_tokens * self._align_tokens
        state.ask = self._look(state, ask.computed_tokens, limit, ask.elsewhere)
        return self._settled(state, state.ask)

    def _limit(self, request: Any) -> int:
        """As far as a prefix of a prompt may reach: one token at least is computed."""
        return int((request.num_tokens - 1) // self._align_tokens * self._align_tokens)

    def _look_for_parting(self, state: RequestState, computed_tokens: int) -> None:
        """Where a prompt parts from what is held, a producer too stores a state."""
        limit = self._limit(state.request)
        if self._has_states and limit > computed_tokens and self._requests.is_known(state):
            self._note_parting(state, *self._reach(state, computed_tokens, limit))

    def _is_loading(self, state: RequestState, computed_tokens: int) -> bool:
        """Whether another request loads the very block this one would begin with: it will be in HBM soon."""
        if not self._loading:
            return False
        first = computed_tokens // self._groups[0].block_tokens
        return state.hashes(0, first, first + 1, self._derive) in self._loading

    def _look(
        self, state: RequestState, computed_tokens: int, limit_tokens: int, elsewhere: Sequence[bytes] | None = None
    ) -> RequestMatch:
        """Begin to bring to HOST what reaches farthest, up to a number of tokens; or to ask for what the own tiers
        lack.

        Args:
            elsewhere: by group, what lies beyond the own tiers, from `computed_tokens` on; None where nobody was asked.
        """
        runs: list[tuple[KvGroup, int, Acquiring]] = []
        end_tokens, hashes, has_holes = limit_tokens, len(state.request.block_hashes), self._has_holes
        if has_holes:
            end_tokens, whole_tokens = self._reach(state, computed_tokens, limit_tokens, elsewhere or ())
            if elsewhere is None and end_tokens < limit_tokens and self._manager.looks_beyond:
                finding = self._manager.begin_find(self._beyond(state, computed_tokens, limit_tokens))
                if finding is not None:
                    return RequestMatch(computed_tokens, hashes, self.gained, [], 0, finding)
            self._note_parting(state, end_tokens, whole_tokens)
        if end_tokens > computed_tokens:
            for index, group in enumerate(self._groups):
                end = end_tokens // group.block_tokens
                begin = max(computed_tokens // group.block_tokens, group.first_needed(end))
                chain_begin = 0 if index < self._whole else begin  # objects lie where the chain's beginning puts them
                wanted = state.hashes(index, chain_begin, end + self._behind, self._derive)
                if len(wanted) > (begin - chain_begin) * HASH_BYTES:
                    namespace = state.namespaces[index].id
                    expected = None if has_holes or state.is_settled else self._expected(state, wanted)
                    acquiring = self._manager.begin_acquire(
                        namespace,
                        wanted,
                        first=begin - chain_begin,
                        is_whole=has_holes,
                        expected=expected,
                        trace=trace_of(state.request),
                    )
                    runs.append((group, begin, acquiring))
        tokens = end_tokens - computed_tokens if runs else 0
        ask = RequestMatch(computed_tokens, hashes, self.gained, runs, tokens, elsewhere=elsewhere)
        if len(runs) == 1 and runs[0][2].poll() and not runs[0][2].depth:
            self._tell(state, ask)
            runs[0][2].release()
            ask = ask._replace(runs=[], tokens=0)
        return ask

    def _expected(self, state: RequestState, wanted: bytes) -> ExpectedBlocks | None:
        """Those of a prompt's blocks that another engine computes, or has just computed."""
        params, most = state.request.kv_transfer_params, len(wanted) // HASH_BYTES
        hint, expected = hint_of(params), None
        if hint is not None:
            expected = self._hinted(state, hint, most)
        if expected is None and is_computed_now(params):
            expected = ExpectedBlocks(most, self._handoff.wait_s)
        if expected is None and not self._role.stores:
            expected = ExpectedBlocks(most, self._handoff.unsaid_wait_s, is_sure=False)
        if expected is None:
            return None
        now_s = time.time()
        if not state.expects_since_s:
            state.expects_since_s = now_s
        waited_s = max(0.0, now_s - state.expects_since_s)  # of a request whose place in HBM's prefixes has changed
        return expected._replace(quiet_s=max(0.0, expected.quiet_s - waited_s))

    def _hinted(self, state: RequestState, hint: HandoffHint, most: int) -> ExpectedBlocks | None:
        """What a hint speaks of, if that is this very prompt.

        A client may have several prompts in one request, which all have the hint of the first.
        """
        blocks = hint.tokens // self._groups[0].block_tokens
        is_same = hint.namespace == state.namespaces[0].id
        is_same = is_same and 0 < blocks <= self._groups[0].hashed_blocks(state.request.block_hashes)
        if not is_same or state.hashes(0, blocks - 1, blocks, self._derive) != hint.last:
            if not state.expects_since_s:
                self._numbers.add("handoffs_refused", 1)
            return None
        if hint.until_ms < time.time() * 1000:  # what is left of it is found as any other prompt is
            return None
        return ExpectedBlocks(min(blocks, most), self._handoff.wait_s, hint.instance if hint.lends else "")

    def _tell(self, state: RequestState, ask: RequestMatch) -> None:
        """Count what was said to be there for a request against what has come, once for each run that is over, and
        remark it.
        """
        for group, begin, acquiring in ask.runs:
            if acquiring.is_told:
                continue
            acquiring.is_told = True
            if acquiring.is_fetched:  # what lay in HOST needed no prediction
                self._numbers.add("predicted_blocks", acquiring.predicted)
                self._numbers.add("delivered_blocks", acquiring.depth)
                self._numbers.add("unanswered_finds", acquiring.why == "unanswered")
                self._numbers.add_of("undelivered_blocks", acquiring.why, acquiring.predicted - acquiring.depth)
            if self._says_found:
                log.debug(
                    "request.found",
                    request=state.request.request_id,
                    group=group.id,
                    first_block=begin,
                    asked_blocks=len(acquiring.hashes) // HASH_BYTES - acquiring.first,
                    predicted_blocks=acquiring.predicted,
                    delivered_blocks=acquiring.depth,
                    hits={tier.name: count for tier, count in acquiring.hits.items()},
                    why=acquiring.why,
                )

    def _beyond(self, state: RequestState, computed_tokens: int, limit_tokens: int) -> list[tuple[NamespaceId, bytes]]:
        """The blocks to ask for beyond the own tiers, by group, from `computed_tokens` on."""
        runs: list[tuple[NamespaceId, bytes]] = []
        for index, group in enumerate(self._groups):
            first, end = computed_tokens // group.block_tokens, limit_tokens // group.block_tokens + group.has_draft
            runs.append((state.namespaces[index].id, state.hashes(index, first, end, self._derive)))
        return runs

    def _reach(
        self, state: RequestState, computed_tokens: int, limit_tokens: int, elsewhere: Sequence[bytes] = ()
    ) -> tuple[int, int]:
        """The most tokens for which every group has what it needs, in its own tiers or elsewhere; at least
        `computed_tokens`.

        Returns: them, and the tokens up to which groups that keep all blocks have them.
        """
        some: list[tuple[KvGroup, HeldBlocks]] = []
        end_tokens, hashed = limit_tokens, state.request.block_hashes
        for index, group in enumerate(self._groups):
            first = computed_tokens // group.block_tokens
            end = min(end_tokens // group.block_tokens + group.has_draft, group.hashed_blocks(hashed))
            look = partial(self._held, state, index, first, elsewhere[index] if elsewhere else None)
            if index >= self._whole:
                some.append((group, LookedUp(look, max(0, end - first))))
            else:
                end_tokens = whole_reach([group], [look(0, max(0, end - first))], computed_tokens, end_tokens)
        end_tokens -= end_tokens % self._align_tokens
        return part_reach(some, computed_tokens, end_tokens, self._align_tokens), end_tokens

    def _held(
        self, state: RequestState, index: int, first: int, elsewhere: bytes | None, begin: int, end: int
    ) -> bytes:
        """What is held of a group's blocks, counted from `first` on, in the own tiers or elsewhere."""
        chain = state.hashes(index, first + begin, first + end, self._derive)
        own = self._manager.holders(chain, state.namespaces[index].id)
        return own if elsewhere is None else joined(own, elsewhere[begin:end])

    def _note_parting(self, state: RequestState, end_tokens: int, whole_tokens: int) -> None:
        """Where blocks reach farther than states, a state there would be of use."""
        if self._has_states and end_tokens < whole_tokens:
            state.parts_at = max(state.parts_at, whole_tokens)

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


def _hits_of(hits: Mapping[Tier, int], blocks: int) -> dict[Tier, int]:
    """Hits of the first blocks of a run, by tier, where not all of it is loaded.

    What lies behind is taken for the coldest: it is used least.
    """
    found: dict[Tier, int] = {}
    for tier in sorted(hits):
        found[tier] = max(0, min(hits[tier], blocks - sum(found.values())))
    return found
