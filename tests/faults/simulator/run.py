"""One seed: a cluster, its faults, its end. The same seed is the same run, on any machine."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import random
import tempfile
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from kvbm.catalog.follow.sequencer import Sequencer
from kvbm.core.codec import FrameBytes
from kvbm.streams import at_exit as leaving
from kvbm.streams.journal.journal import Journal
from kvbm.streams.memory import MemoryLog
from tests.faults.simulator.checker import Checker
from tests.faults.simulator.cluster import Cluster, nap
from tests.faults.simulator.drawing import FORGETS, Draw, draw, met
from tests.faults.simulator.environment import installed
from tests.faults.simulator.faults import Fault, Faults
from tests.faults.simulator.kernel import INSTALLED, Violation, World
from tests.faults.simulator.limit_faults import LIMIT_MIX
from tests.faults.simulator.limits import Limits
from tests.faults.simulator.peer_faults import PEER_MIX

RUN_S = 10.0  # of virtual time with work and faults
SHORT_S = 2.0  # the same, where a few faults meet
PEERS_S, PEERS_BEGIN_S = 1.6, 0.5  # the same, where instances read from each other; and when the first fault may come
LIMITS_S, LIMITS_BEGIN_S = 5.0, 0.0  # the same, where something runs out
SOON_FORGOTTEN_S = 6.0  # where faults forget, the gone are forgotten by themselves after so much listening
OWNING_S = 5.0  # the same, where engines own HBM
SETTLE_S = 90.0  # within which everything must be well again
FOLDER = "/dev/shm"


class Plan(NamedTuple):
    """What to do with a seed beside the usual.

    Attributes:
        mix: kinds of faults to draw from; () for any.
        together: kinds of faults that meet; () for no certain ones.
        peers: instances read each other's blocks.
        limits: threads, descriptors, names and undisturbed calls may run out.
        owning: most instances have an engine that owns HBM.
        without: numbers of faults to leave out.
    """

    mix: tuple[str, ...] = ()
    without: frozenset[int] = frozenset()
    run_s: float = RUN_S
    settle_s: float = SETTLE_S
    together: tuple[str, ...] = ()
    peers: bool = False
    limits: bool = False
    owning: bool = False

    @property
    def begin_s(self) -> float:
        """When the first fault may come: where something runs out, while instances start."""
        return LIMITS_BEGIN_S if self.limits else PEERS_BEGIN_S if self.peers else 1.0

    @property
    def words(self) -> str:
        """The options of `tools/fault_seeds.py` that say the same."""
        words = [f"--mix {','.join(self.mix)}"] if self.mix else []
        words += ["--peers"] if self.peers else []
        words += ["--limits"] if self.limits else []
        words += ["--owning"] if self.owning else []
        words += [f"--together {','.join(self.together)}"] if self.together else []
        return " ".join([*words, f"--run-s {self.run_s:g}"])


PEERS = Plan(mix=PEER_MIX, run_s=PEERS_S, peers=True)
LIMITS = Plan(mix=LIMIT_MIX, run_s=LIMITS_S, limits=True)
OWNING = Plan(run_s=OWNING_S, owning=True)
OWNING_LIMITS = LIMITS._replace(owning=True)


class Outcome(NamedTuple):
    """How a seed ended.

    Attributes:
        violation: what must never be, "" when all was well.
        steps: of the scheduler until then; operations: of engines.
        trace: digest of the order of things; equal for equal runs.
        met: whether the faults that were to meet did.
        arrived: blocks that reads from other instances have brought. fetched: those of them that journals have.
        reached: how often what runs out did, by what it was.
        story: the last things that happened.
    """

    seed: int
    violation: str
    steps: int
    operations: int
    faults: int
    checks: int
    messages: int
    virtual_s: float
    trace: str
    planned: list[Fault]
    met: bool
    arrived: int
    fetched: int
    reached: dict[str, int]
    story: list[str]


@contextmanager
def watched(*, logs: bool = False) -> Iterator[None]:
    """Stand-ins in place, and the checker sees journals and sequencers. Any number of seeds may run inside."""
    append_all, memory_append = Journal.append_all, MemoryLog.append
    step, take_plain, drop = Sequencer.step, Sequencer.take_plain, Sequencer.drop

    def watched_append_all(self: Any, frames: Sequence[FrameBytes]) -> int:
        checker, process = INSTALLED.world.checker, INSTALLED.world.current  # type: ignore[attr-defined]
        for frame in frames:
            checker.writing(process, self, frame)
        if process.disk.slow_s:
            nap(INSTALLED.world, process.disk.slow_s)
        done = append_all(self, frames)
        for frame in frames[:done]:
            checker.wrote(process, frame)
        return done

    def watched_append(self: Any, frame: FrameBytes) -> None:
        checker, process = INSTALLED.world.checker, INSTALLED.world.current  # type: ignore[attr-defined]
        checker.writing(process, self, frame)
        memory_append(self, frame)
        checker.wrote(process, frame)

    def stepped(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = step(self, *args, **kwargs)
        checker, process = INSTALLED.world.checker, INSTALLED.world.current  # type: ignore[attr-defined]
        checker.stepped(self, result.advanced, process.machine)
        return result

    def plain_taken(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = take_plain(self, *args, **kwargs)
        checker, process = INSTALLED.world.checker, INSTALLED.world.current  # type: ignore[attr-defined]
        checker.stepped(self, result.advanced, process.machine)
        return result

    def dropped(self: Any, instance: Any) -> None:
        drop(self, instance)
        INSTALLED.world.checker.forgotten(self, instance)  # type: ignore[attr-defined]

    Sequencer.drop = dropped  # type: ignore[method-assign]
    Journal.append_all = watched_append_all  # type: ignore[method-assign]
    MemoryLog.append = watched_append  # type: ignore[method-assign]
    Sequencer.step = stepped  # type: ignore[method-assign]
    Sequencer.take_plain = plain_taken  # type: ignore[method-assign]
    try:
        with installed(logs=logs):
            yield
    finally:
        Journal.append_all = append_all  # type: ignore[method-assign]
        MemoryLog.append = memory_append  # type: ignore[method-assign]
        Sequencer.step = step  # type: ignore[method-assign]
        Sequencer.take_plain = take_plain  # type: ignore[method-assign]
        Sequencer.drop = drop  # type: ignore[method-assign]


def run_seed(seed: int, how: Plan = Plan(), say: Callable[[str], None] | None = None) -> Outcome:  # noqa: B008
    """Run one seed. Call it inside `watched`."""
    random.seed(seed)
    world = World(seed)
    world.chance = random.Random(seed ^ 0x5EED)  # type: ignore[attr-defined]
    INSTALLED.world = world
    story: deque[str] = deque(maxlen=60)

    def told(what: str, fields: dict[str, Any]) -> None:
        line = f"{world.now:9.3f} s step {world.steps:6d} {world.current}: {what} {fields}"
        story.append(line)
        if say is not None:
            say(line)

    open_before = set(leaving._open)
    checker = Checker()
    world.checker = checker  # type: ignore[attr-defined]
    trace = hashlib.sha256()
    asyncio._set_running_loop(world.loop)
    violation = ""
    collecting = gc.isenabled()
    gc.disable()
    with tempfile.TemporaryDirectory(dir=FOLDER, prefix="kvbm-sim-") as folder, ExitStack() as stack:
        chances = random.Random(seed ^ 0xFA17)
        planned = draw(chances, how.run_s, Draw(how.mix, how.together, how.begin_s))
        limits = Limits(world, seed) if how.limits else None
        if limits is not None:
            limits.prepare({fault.kind for fault in planned})
        has_peers = how.peers or (limits is not None and limits.has_peers)
        owners = random.Random(seed ^ 0x0E96) if how.owning else None
        cluster = Cluster(world, Path(folder), checker, told, has_peers, limits, owners)
        checker.attach(cluster)
        if limits is not None:
            stack.enter_context(limits.scaled_down())
        faults = Faults(cluster)
        try:
            if any(fault.kind == "forget" for fault in planned):
                cluster.forget_s = SOON_FORGOTTEN_S
            cluster.remembers = not how.mix or not any(fault.kind in FORGETS for fault in planned)
            for number in range(world.rng.randint(2, 3)):
                cluster.add_node(f"instance-{number}")
            faults.schedule([fault for number, fault in enumerate(planned) if number not in how.without])
            cluster.begin()
            while world.now < how.run_s:
                world.run(min(world.now + 1.0, how.run_s))
                trace.update(f"{world.now} {world.steps} {cluster.server.last_sequence} {cluster.operations};".encode())
                _raise_troubles(world)
            if how.mix:
                cluster.is_over = True
                faults.end()
            else:
                cluster.is_over = chances.random() < 0.5
                faults.end(chances)
                cluster.is_over = True
            told("settling", {})
            settle(world, cluster, checker, how.settle_s)
        except Violation as found:
            violation = str(found)
        except Exception as error:  # noqa: BLE001 - whatever it is, it must not be
            violation = f"{error!r}\n{traceback.format_exc(limit=-6)}"
        finally:
            trace.update(f"{world.now} {world.steps} {cluster.server.last_sequence} {violation}".encode())
            peers = cluster.peers
            outcome = Outcome(
                seed,
                violation,
                world.steps,
                cluster.operations,
                len(faults.happened),
                checker.checks,
                cluster.server.last_sequence,
                world.now,
                trace.hexdigest()[:16],
                planned,
                met(faults.happened, how.together),
                peers.arrived if peers else 0,
                peers.fetched if peers else 0,
                cluster.owning + (Counter() if limits is None else limits.reached),
                list(story),
            )
            cluster.end()
            for opened in leaving._open.keys() - open_before:  # the dead are not closed when the interpreter ends
                del leaving._open[opened]
            asyncio._set_running_loop(None)
            if collecting:
                gc.enable()
    return outcome


def settle(world: World, cluster: Cluster, checker: Checker, settle_s: float) -> None:
    """Run until all is well. Raises Violation: it is not, in time."""
    end_s = world.now + settle_s
    while True:
        world.run(world.now + 0.37)  # snapshots and batches go on: a quiet moment is looked for
        _raise_troubles(world)
        if not (why := checker.unsettled()):
            return
        if world.now >= end_s:
            raise Violation(f"not well {settle_s:g} s after the last fault: {why}")


def _raise_troubles(world: World) -> None:
    if world.troubles:
        raise Violation("; ".join(world.troubles[:3]))
