"""Which instance should serve a prompt: what is asked, and the protocol of the two implementations that answer.

The native one (`kvbm._native.Router`, beside the native index) serves; `kvbm.reference.router.ReferenceRouter` says
what it must do. What a cost is made of stands in `routing.cost`; here its numbers come from: the index, the instances'
heartbeats, and what is remembered of routes. An instance's speed is what its heartbeats say, within bounds; no number
of whoever asks changes it.

What was routed is remembered for each caller apart: nobody's routes change what others are answered, only heartbeats
do. Prompts that are only decoded are remembered apart from those that are prefilled. All of it is bounded: in tokens a
route may add, in callers and instances, and in bytes.
"""

from __future__ import annotations

from collections.abc import Sequence, Sized
from typing import NamedTuple, Protocol, TypeVar

from kvbm.catalog.members.liveness import LastHeartbeat
from kvbm.core.answers import LentRun, RankedInstance
from kvbm.core.ids import InstanceId, NamespaceId

MOST_CALLERS = 256  # whose routes are remembered; who has not asked for longest is forgotten first
MOST_QUEUED = 10**12  # tokens a heartbeat may report
HEARD_LATE_S = 0.002  # what was routed so shortly before a heartbeat came, or later, is not in it


class RoutingTask(NamedTuple):
    """One prompt to route.

    Attributes:
        hashes: packed, of its full blocks.
        input_tokens: of the whole prompt.
        block_tokens: tokens of one block, at least 1.
        caller: who asks; what was routed for others does not count.
        latency: "interactive", "standard" or "batch".
        deadline_s: the first token is of no use later than this from now; None: it always is.
        phase: "decode": it was prefilled elsewhere; "prefill", or "both".
    """

    namespace: NamespaceId
    hashes: bytes
    input_tokens: int
    block_tokens: int
    caller: str = ""
    latency: str = "standard"
    deadline_s: float | None = None
    phase: str = "both"


class SharedRoute(NamedTuple):
    """A route of another catalog, as far as it changes what this one answers.

    Attributes:
        caller, namespace: as in `RoutingTask`. is_decode: the prompt was only decoded.
        instance: where it was sent.
        input_tokens: of the prompt. missing_tokens: what the instance must compute of it.
        first: blocks of it that the instance had, or would soon have, anyway. blocks: full ones of the prompt.
        hashes: packed, of the blocks at `routed_blocks.marked_depths(first, blocks)`.
    """

    caller: str
    is_decode: bool
    instance: InstanceId
    input_tokens: int
    missing_tokens: int
    namespace: NamespaceId
    first: int = 0
    blocks: int = 0
    hashes: bytes = b""


class CandidateNumbers(NamedTuple):
    """What prices depend on of candidates together.

    Attributes:
        least_s: the shortest wait; 0 where there is none.
        recent_s: what this caller has routed to them lately, decayed, in seconds of prefill, all together.
        candidates: how many.
        lent: what the catalog's instances lend of the prompt; no router looks at it.
    """

    least_s: float
    recent_s: float
    candidates: int
    lent: Sequence[LentRun] = ()


class ReadingInstance(NamedTuple):
    """An instance as one that reads what others lend.

    Attributes:
        place: where it stands, outermost first.
        host: names its machine; "": it shares no memory. tcp: it reads over TCP.
        block_bytes: of a block; 0: not known, and nothing is priced as read.
    """

    place: tuple[str, ...]
    host: str
    tcp: bool
    block_bytes: int


class PeerLink(NamedTuple):
    """What a transfer between two instances costs.

    Attributes:
        together_bytes_per_s: as `core.fetching.FetchSource` has it.
    """

    latency_s: float
    bytes_per_s: float
    together_bytes_per_s: float = 0.0


class LentPrefix(NamedTuple):
    """What can be read of a prompt from other instances.

    Attributes:
        runs: the deepest first, at most `MOST_LENT`.
        memory, tcp: what reading costs, through memory of one machine and between machines, by distance: 0 to 8.
    """

    runs: Sequence[LentRun]
    memory: Sequence[PeerLink]
    tcp: Sequence[PeerLink]


NOBODY_ELSE = CandidateNumbers(0.0, 0.0, 0)


class Ranking(NamedTuple):
    """The best candidates, best first, how many others are worse, and what all are together."""

    best: list[RankedInstance]
    more: int
    together: CandidateNumbers = NOBODY_ELSE


C = TypeVar("C", bound=Sized)


class Router(Protocol[C]):
    """Ranks instances for prompts, and remembers its routes. Soft state only: it may be lost at any time. One thread.

    `C` is its sets of candidates: only their length is anybody else's affair.
    """

    def hear(self, instance: InstanceId, pulse: LastHeartbeat) -> None:
        """What waits at an instance, and how fast it is, as of a heartbeat."""

    def reads(self, instance: InstanceId, reader: ReadingInstance | None) -> None:
        """How an instance reads what others lend; None: it does not."""

    def forget(self, instance: InstanceId) -> None:
        """Nothing was heard of the instance, and nothing was routed to it.

        It must be in no set of candidates any more.
        """

    def candidates(self) -> C:
        """An empty set of instances."""

    def add(self, candidates: C, instance: InstanceId) -> None:
        """Prompts may be sent there. The same twice changes nothing."""

    def remove(self, candidates: C, instance: InstanceId) -> None:
        """Prompts may not be sent there any more. One that is not in it changes nothing."""

    def route(
        self,
        now_s: float,
        task: RoutingTask,
        serving: Sequence[C],
        visible: Sequence[C] | None,
        limit: int,
        noted: bool = True,
        elsewhere: CandidateNumbers | None = None,
        lent: LentPrefix | None = None,
    ) -> Ranking:
        """Rank the candidates, and note the best as chosen, if the prompt is admitted.

        Args:
            now_s: on the clock of the pulses.
            serving: a candidate is in one of these,
            visible: and in one of these; None: everybody is.
            limit: at most so many are told.
            noted: False: nothing is remembered.
            elsewhere: candidates that others rank; prices are those among all together.
            lent: what the candidates could read from other instances; None: nothing.
        """

    def take(self, now_s: float, route: SharedRoute) -> bool:
        """Remember another catalog's route as an own one.

        Args:
            now_s: when it was made, on the clock of the pulses.
        Returns: False, and nothing is remembered, where no heartbeat of the instance came, or the hashes are too few or
            too many.
        """
