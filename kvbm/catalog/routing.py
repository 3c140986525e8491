"""Which instance should serve a prompt: what is asked, and the protocol of the two implementations that answer.

The native one (`kvbm._native.Router`, beside the native index) serves; `reference_router.ReferenceRouter` says what it must do. What a cost is
made of stands in `routing_cost`; here its numbers come from: the index, the instances' heartbeats, and what is remembered of routes. An
instance's speed is what its heartbeats say, within bounds; no number of whoever asks changes it.

What was routed is remembered for each caller apart: nobody's routes change what others are answered, only heartbeats do. Prompts that are only
decoded are remembered apart from those that are prefilled. All of it is bounded: in tokens a route may add, in callers and instances, and in
bytes.
"""

from __future__ import annotations

from collections.abc import Sequence, Sized
from typing import NamedTuple, Protocol, TypeVar

from kvbm.catalog.liveness import LastHeartbeat
from kvbm.core.answers import RankedInstance
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


class Ranking(NamedTuple):
    """The best candidates, best first, and how many others are worse."""

    best: list[RankedInstance]
    more: int


C = TypeVar("C", bound=Sized)


class Router(Protocol[C]):
    """Ranks instances for prompts, and remembers its routes. Soft state only: it may be lost at any time. One thread.

    `C` is its sets of candidates: only their length is anybody else's affair.
    """

    def hear(self, instance: InstanceId, pulse: LastHeartbeat) -> None:
        """What waits at an instance, and how fast it is, as of a heartbeat."""

    def forget(self, instance: InstanceId) -> None:
        """Nothing was heard of the instance, and nothing was routed to it. It must be in no set of candidates any more."""

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
    ) -> Ranking:
        """Rank the candidates, and note the best as chosen, if the prompt is admitted.

        Args:
            now_s: on the clock of the pulses.
            serving: a candidate is in one of these,
            visible: and in one of these; None: everybody is.
            limit: at most so many are told.
            noted: False: nothing is remembered.
        """
