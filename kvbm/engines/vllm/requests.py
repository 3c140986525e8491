"""What the scheduler's half knows of the engine's requests: the hashes of their blocks, and how far they are kept."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from kvbm.core.chain_statement import first_needed, keeps_all
from kvbm.core.ids import HASH_BYTES, NO_PARENT, NamespaceId, SequenceHash
from kvbm.engines.vllm.adapters import Adapters, Origin
from kvbm.engines.vllm.handoff import is_for_a_decoder

if TYPE_CHECKING:
    from kvbm.manager.acquiring import Acquiring
    from kvbm.manager.onboard.finding import Finding

_ASKS = 3  # an engine that has loaded an adapter says so with its next step

# vLLM's digest of an image, perhaps behind an adapter's name
_CONTENT = re.compile(r"(.*:)?([0-9a-f]{64}|[0-9a-f]{128})")

DerivedHashes = Callable[[bytes, Sequence[bytes]], bytes]


def trace_of(request: Any) -> str | None:
    """The `traceparent` that a client has sent with a request, where vLLM carries it: it does if it makes traces
    itself.
    """
    headers = getattr(request, "trace_headers", None)
    found = headers.get("traceparent") if headers else None
    return found if isinstance(found, str) else None


def has_own_ids(request: Any) -> bool:
    """Whether a client has named images or other inputs itself: vLLM hashes the name instead of the content."""
    features = getattr(request, "mm_features", None) or ()
    return any(_CONTENT.fullmatch(str(feature.identifier)) is None for feature in features)


class KvGroup(NamedTuple):
    """One KV group of the engine's model.

    Attributes:
        id: vLLM's index of it.
        block_tokens: tokens of a block.
        hash_tokens: tokens that one of vLLM's hashes goes on by; a block's hash is that of its last such piece.
        window_blocks: blocks before a position that attention still reads there; None: all of them.
        is_state: a block is the state of recurrent layers behind its last token: 1 block of window. Few boundaries have
            one.
        chunk_tokens: attention reads back to a multiple of so many tokens; None: farther.
        has_draft: it holds layers of a draft model. What those keep of a block's last token depends on the token after
            it, so a prefix counts only as far as the block behind it is held, too.
    """

    id: int
    block_tokens: int
    hash_tokens: int
    window_blocks: int | None = None
    is_state: bool = False
    chunk_tokens: int | None = None
    has_draft: bool = False

    @property
    def keeps_all(self) -> bool:
        """Whether tokens at any position need all blocks before it."""
        return keeps_all(self)

    def first_needed(self, end: int) -> int:
        """The first block that tokens after block `end` still need."""
        return first_needed(self, end)

    def digests(self, hashes: Sequence[bytes], begin: int, end: int) -> Sequence[bytes]:
        """vLLM's hashes of the blocks from `begin` to before `end`."""
        scale = self.block_tokens // self.hash_tokens
        if scale == 1:
            return hashes if begin == 0 and end >= len(hashes) else hashes[begin:end]
        return hashes[(begin + 1) * scale - 1 : end * scale : scale]

    def hashed_blocks(self, hashes: Sequence[bytes]) -> int:
        """How many blocks vLLM has hashed."""
        return len(hashes) // (self.block_tokens // self.hash_tokens)


class GroupNamespace(NamedTuple):
    """The blocks of one group and tenant: their public name, and the secret root of their hashes."""

    id: NamespaceId
    root: SequenceHash


class RequestMatch(NamedTuple):
    """What was found for a request when it was asked for.

    Attributes:
        computed_tokens, hashes, gained: what the answer depends on; another value of one of them is another question.
        runs: for each group that needs blocks its first block and what is brought to HOST from there; empty for a miss.
        tokens: how many tokens that makes, as long as every run comes whole.
        finding: asks what lies beyond the own tiers; until it is done there are no runs.
        elsewhere: by group, what it has found.
    """

    computed_tokens: int
    hashes: int
    gained: int
    runs: list[tuple[KvGroup, int, Acquiring]]
    tokens: int
    finding: Finding | None = None
    elsewhere: Sequence[bytes] | None = None

    def poll(self) -> bool:
        """Go on with what has come. Returns whether nothing is on its way to HOST any more."""
        if self.finding is not None and not self.finding.done:
            return False
        for _, _, acquiring in self.runs:  # noqa: SIM110  # a generator costs more, and this is asked at each step
            if not acquiring.poll():
                return False
        return True

    def release(self) -> None:
        """Give up what is pinned, and what is asked."""
        if self.finding is not None:
            self.finding.release()
        for _, _, acquiring in self.runs:
            acquiring.release()


class RequestState:
    """One request of the engine, from its arrival to its end.

    Attributes:
        request: vLLM's.
        origin: what its blocks are computed with; while that is not known, it has no namespaces.
        namespaces: by group, in the order of the engine's groups.
        verified: by vLLM's group: blocks from the first on that are known to be of its own weights.
        stored: by group: blocks from the first on that were looked at for a store. Of states that means nothing.
        was_stored: the same, the most before a preemption.
        states: (group, block) of the states that it has stored or loaded.
        parts_at: tokens from the first on whose blocks are held while no state is held behind them: a state there would
            be of use.
        ask: the last answer, while it may still be used.
        due_step: of the scheduler's, in which it is looked at again at the latest.
        is_untold: HBM has blocks of it that nobody was told of, because its adapter was not known.
        is_looked_at: it has been looked at for stores before.
        last_store: the last job that stores blocks of it; 0: none.
        refused: a load for it has failed, so it is offered nothing any more: vLLM would ask without end.
        asks_left: how often it is told to ask again while its adapter is not known.
        queued_tokens: of its prompt, while it waits for its first step.
        is_for_a_decoder: another engine decodes what this one computes of it.
        expects_since_s: since when it has waited for what others compute, seconds since 1970; 0: it has not.
        is_settled: it was told once what can be loaded; from then on it waits for nothing that others compute.
    """

    __slots__ = (
        "_first",
        "_groups",
        "_hashes",
        "_last",
        "ask",
        "asks_left",
        "due_step",
        "expects_since_s",
        "is_for_a_decoder",
        "is_looked_at",
        "is_settled",
        "is_untold",
        "last_store",
        "namespaces",
        "origin",
        "parts_at",
        "queued_tokens",
        "refused",
        "request",
        "states",
        "stored",
        "verified",
        "was_stored",
    )

    def __init__(
        self,
        request: Any,
        groups: Sequence[KvGroup],
        namespaces: Sequence[GroupNamespace],
        origin: Origin | None = None,
    ) -> None:
        self.request = request
        self.namespaces = namespaces
        self.origin = origin or Origin()
        self.is_untold = not namespaces
        self.verified: dict[int, int] = {}
        self.asks_left = _ASKS
        self.stored, self.was_stored = [0] * len(groups), [0] * len(groups)
        self.states: set[tuple[int, int]] = set()
        self.parts_at = 0
        self.ask: RequestMatch | None = None
        self.due_step = 0
        self.is_looked_at = self.is_settled = self.refused = False
        self.expects_since_s = 0.0
        self.is_for_a_decoder = is_for_a_decoder(request.kv_transfer_params)
        self.last_store = 0
        self.queued_tokens: int = request.num_prompt_tokens
        self._groups = groups
        self._first = [0] * len(
            groups
        )  # the first block hashed: of a window those near the end are all that is asked for
        self._hashes = [b""] * len(groups)  # of blocks from that one on, without a gap
        self._last = [b""] * len(groups)  # vLLM's hash of the last block hashed

    def hashes(self, index: int, begin: int, end: int, derive: DerivedHashes) -> bytes:
        """Our hashes of a group's blocks from `begin` to before `end`, packed; fewer where vLLM has not hashed
        so far.
        """
        group, digests = self._groups[index], self.request.block_hashes
        first, known = self._first[index], self._hashes[index]
        have = first + len(known) // HASH_BYTES
        if known:
            last = have * group.block_tokens // group.hash_tokens
            if last > len(digests) or digests[last - 1] != self._last[index]:  # a session's tokens were taken back
                self._hashes[index] = known = b""
                self.stored[index] = 0
        if not known:
            self._first[index] = first = have = begin
        if begin < first:
            known = derive(self.namespaces[index].root, group.digests(digests, begin, first)) + known
            self._first[index], self._hashes[index] = begin, known
            first = begin
        if have < end:
            fresh = group.digests(digests, have, end)
            if fresh:
                known += derive(self.namespaces[index].root, fresh)
                self._last[index], self._hashes[index] = fresh[-1], known
        return known[(begin - first) * HASH_BYTES : (end - first) * HASH_BYTES]

    def parent(self, index: int, begin: int, derive: DerivedHashes) -> bytes:
        """Our hash of the block before `begin`, which vLLM must have hashed already."""
        return self.hashes(index, begin - 1, begin, derive) if begin else NO_PARENT

    def drop_ask(self) -> None:
        """Forget the last answer, and unpin what it held."""
        if self.ask is not None:
            self.ask.release()
            self.ask = None


class Requests:
    """The engine's requests.

    Args:
        namespaces_of: the namespaces of a request by group, by its tenant, and by the digest of its adapter's weights
            if it has one; none where nothing of it may be kept.
        adapters: what the workers have loaded.

    Attributes:
        states: by request id, each from its arrival to its end.
        queued_tokens: of the prompts that wait for their first step.
    """

    def __init__(
        self, groups: Sequence[KvGroup], namespaces_of: Callable[..., Sequence[GroupNamespace]], adapters: Adapters
    ) -> None:
        self.states: dict[str, RequestState] = {}
        self.queued_tokens = 0
        self._groups, self._namespaces_of, self._adapters = groups, namespaces_of, adapters

    def state_of(self, request: Any) -> RequestState:
        """Our state of a request, made when it is first heard of."""
        state = self.states.get(request.request_id)
        if state is None:
            lora = getattr(request, "lora_request", None)
            origin = Origin(
                None if lora is None else self._adapters.of(lora.lora_int_id), is_pure=not has_own_ids(request)
            )
            namespaces = self._namespaces_of(request) if lora is None else ()
            state = RequestState(request, self._groups, namespaces, origin)
            self.states[request.request_id] = state
            self.queued_tokens += state.queued_tokens
        return state

    def is_known(self, state: RequestState) -> bool:
        """Whether a request's blocks have a namespace that says all they depend on."""
        if not state.origin.is_known:
            return False
        if not state.namespaces and state.origin.adapter is not None:
            state.namespaces = self._namespaces_of(state.request, state.origin.adapter.digest)
        return bool(state.namespaces)  # of a tenant too many it has none

    def unqueue(self, state: RequestState) -> None:
        """A request waits for its first step no more."""
        self.queued_tokens -= state.queued_tokens
        state.queued_tokens = 0
