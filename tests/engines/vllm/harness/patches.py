"""What goes wrong on purpose: functions that break a part of kvbm in the process an engine is made in
(`Setup.patches`).
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import numpy as np

from kvbm.core.errors import PoolError
from kvbm.pools.base import ReadOutcome, ReadResult

SKIPPED = "SUITE_COPIES_BEFORE_FAILURE"  # variables that say more
RANK = "SUITE_FAILING_RANK"
SECONDS = "SUITE_SECONDS"


def loads_fail_at_once() -> None:
    """From some load on, a rank's copies to HBM are refused."""
    _break_queues(_RefusingLoads)


def loads_fail_late() -> None:
    """The same, but they are found to have failed after they were begun."""
    _break_queues(_FailingLoads)


def stores_fail() -> None:
    """A rank's copies to HOST are found to have failed."""
    _break_queues(_FailingStores)


def a_rank_dies() -> None:
    """A rank is gone while a copy to HOST is under way."""
    _break_queues(_DyingStores)


def no_room_on_other_hosts() -> None:
    """Memory for HOST is refused on hosts that the scheduler is not on."""
    from kvbm.engines.vllm import host_part

    def refused(*arguments: Any, **more: Any) -> Any:
        raise PoolError("HOST pool: 8 bytes wanted, 0 available")

    host_part.HostPool = refused  # type: ignore[assignment,misc]


def copies_are_slow() -> None:
    """What has been copied is told late."""
    _break_queues(_SlowCopies)


def nvme_is_slow() -> None:
    """NVME answers reads late."""
    from kvbm.pools.nvme.pool import NvmePool

    read = NvmePool.read
    seconds = float(os.environ[SECONDS])

    def slowly(self: NvmePool, *arguments: Any, **more: Any) -> ReadResult:
        time.sleep(seconds)
        return read(self, *arguments, **more)

    NvmePool.read = slowly  # type: ignore[method-assign]


def nothing_is_verified() -> None:
    """NVME takes any bytes for the right ones: what kvbm would be without checksums."""
    from kvbm.pools.nvme.pool import NvmePool

    read = NvmePool.read

    def credulous(self: NvmePool, *arguments: Any, **more: Any) -> ReadResult:
        result = read(self, *arguments, **more)
        return ReadResult([ReadOutcome.GOOD] * len(result.outcomes), result.checksums)

    NvmePool.read = credulous  # type: ignore[method-assign]


class _Queue:
    """A copy queue with something wrong with it."""

    def __init__(self, queue: Any) -> None:
        from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

        rank = get_pp_group().rank_in_group * get_tensor_model_parallel_world_size() + get_tensor_model_parallel_rank()
        self.queue = queue
        self.spared = int(os.environ.get(SKIPPED, "0"))
        failing = os.environ.get(RANK, "")
        self.is_broken = not failing or int(failing) == rank

    def __getattr__(self, name: str) -> Any:
        return getattr(self.queue, name)

    def strikes(self) -> bool:
        """Whether this copy is one that fails."""
        if not self.is_broken:
            return False
        self.spared -= 1
        return self.spared < 0


class _RefusingLoads(_Queue):
    def scatter(self, *arguments: Any) -> None:
        if self.strikes():
            raise PoolError("a copy was made to fail")
        self.queue.scatter(*arguments)


class _FailingLoads(_Queue):
    def __init__(self, queue: Any) -> None:
        super().__init__(queue)
        self.failed: list[tuple[int, None, float, str]] = []

    def scatter(self, id: int, *arguments: Any) -> None:
        self._carry_out(self.queue.scatter, id, *arguments)

    def ended(self) -> list[Any]:
        failed, self.failed = self.failed, []
        return [*self.queue.ended(), *failed]

    def _carry_out(self, copy: Any, id: int, *arguments: Any) -> None:
        if self.strikes():
            self.failed.append((id, None, 0.0, "a copy was made to fail"))  # nothing arrives
        else:
            copy(id, *arguments)


class _FailingStores(_FailingLoads):
    def scatter(self, id: int, *arguments: Any) -> None:
        self.queue.scatter(id, *arguments)

    def gather(self, id: int, *arguments: Any) -> None:
        self._carry_out(self.queue.gather, id, *arguments)


class _DyingStores(_Queue):
    def gather(self, *arguments: Any) -> None:
        self.queue.gather(*arguments)
        if self.strikes():
            os.kill(os.getpid(), signal.SIGKILL)


class _SlowCopies(_Queue):
    def __init__(self, queue: Any) -> None:
        super().__init__(queue)
        self.seconds = float(os.environ[SECONDS])
        self.waiting: list[tuple[float, Any]] = []

    def ended(self) -> list[Any]:
        now = time.monotonic()
        self.waiting += [(now + self.seconds, one) for one in self.queue.ended()]
        due = [one for when, one in self.waiting if when <= now]
        self.waiting = [pair for pair in self.waiting if pair[0] > now]
        return due


def _break_queues(kind: Any) -> None:
    from kvbm.engines.vllm import worker

    opened = worker.copy_queue
    worker.copy_queue = lambda *arguments, **more: kind(opened(*arguments, **more))  # type: ignore[assignment]


def flip_bits(data: np.ndarray, every: int) -> np.ndarray:
    """Bytes with a bit flipped in every so many: the highest but one of a float32, so that it shows wherever nobody
    checks.
    """
    flipped = data.copy()
    flipped[3::every] ^= 0x40
    return flipped


def states_of_another_boundary() -> None:
    """A load brings the state one block before the one it needs, under the right name."""
    _mix_up_states(lambda planner, state, index, at: (state, at - 1))


def states_of_another_request() -> None:
    """A load brings the state that another request has behind as many tokens, under the right name."""

    def other(planner: Any, state: Any, index: int, at: int) -> Any:
        known = planner.__dict__.setdefault("_states_seen", {})
        mine = state.hashes(index, at, at + 1, planner._derive)
        known.setdefault((index, at), {})[mine] = state
        others = [one for block, one in known[index, at].items() if block != mine]
        return (others[0], at) if others else None

    _mix_up_states(other)


class _MixedUp:
    """The rows of one acquisition under the name of another."""

    def __init__(self, right: Any, wrong: Any) -> None:
        self.hits, self.depth, self.poll = right.hits, right.depth, right.poll
        self.slots = wrong.slots
        self._both = right, wrong

    def release(self) -> None:
        for one in self._both:
            one.release()


def _mix_up_states(other: Any) -> None:
    """Put the rows of `other(planner, state, group's index, block)` in the place of a state's, where there is another
    and HOST has it.
    """
    from kvbm.engines.vllm.load_planner import LoadPlanner

    begin = LoadPlanner.begin

    def begin_wrongly(self: Any, state: Any, block_ids: Any, tokens: int) -> None:
        for position, (group, at, right) in enumerate(state.ask.runs if state.ask is not None else ()):
            index = self._groups.index(group)
            found = other(self, state, index, at) if group.is_state else None
            if found is None:
                continue
            whose, where = found
            wanted = whose.hashes(index, where, where + 1, self._derive)
            wrong = self._manager.begin_acquire(state.namespaces[index].id, wanted)
            assert wrong.depth == 1, "the other state is not in HOST, so this would prove nothing"
            state.ask.runs[position] = group, at, _MixedUp(right, wrong)
        begin(self, state, block_ids, tokens)

    LoadPlanner.begin = begin_wrongly  # type: ignore[method-assign]


def vllm_is_of_another_version() -> None:
    """vLLM calls itself one that nobody has tested."""
    import vllm

    vllm.__version__ = "0.99.1"


def kv_events_are_kept() -> None:
    """What vLLM publishes of KV is kept in the process that does, for `core_access.kept_kv_events`."""
    from vllm.distributed.kv_events import NullEventPublisher

    def publish(self: Any, batch: Any) -> None:
        self.__dict__.setdefault("kept", []).extend(batch.events)

    NullEventPublisher.publish = publish
