"""A burst of events into a catalog that is not there, or while nats-server is killed: nothing may be lost."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import NamedTuple

from tests.faults.processes.loop import WHOLE_S, Options, System

BURST_SETTINGS: dict[str, object] = {
    "offload.nvme": "never",  # the burst is about events, not about a disk
    "journal.segment_bytes": 8 << 20,
    "journal.capacity_bytes": 1 << 30,
    "journal.waiting_bytes": 64 << 20,
}


BLOCKS_PER_S = 50_000  # about; kills are spread over the burst by it


class Burst(NamedTuple):
    """What to do.

    Attributes:
        blocks: to create; each also evicts one, so there are about twice as many block events.
        kills: of nats-server while it goes on.
        stopped_catalog: whether the catalog is stopped before and started after it.
    """

    blocks: int
    kills: int = 0
    stopped_catalog: bool = False
    seed: int = 1


class BurstResult(NamedTuple):
    """What came of it.

    Attributes:
        burst_s: until the last block was created.
        published_s: from then on until the stream had all.
        whole_s: from then on until everybody agreed.
    """

    blocks: int
    kills: int
    events: int
    burst_s: float
    published_s: float
    whole_s: float
    differences: list[str]

    def sentence(self) -> str:
        """The whole in one line, and a line a difference."""
        word = "FAILED" if self.differences else "ok"
        line = (
            f"{word}: {self.blocks:,} blocks created in {self.burst_s:.1f} s ({self.events:,} events of runs), "
            "nats-server killed "
            f"{self.kills} times, published {self.published_s:.1f} s later, digests equal and nothing lost "
            f"{self.whole_s:.1f} s later"
        )
        return "\n".join([line, *(f"  DIFFERS {difference}" for difference in self.differences)])


def run_burst(folder: Path, burst: Burst, slow: float = 1.0) -> BurstResult:
    """Run one burst on a fresh system."""
    system = System(Options(folder, burst.seed, workers=1, rate=2.0, disk=False), BURST_SETTINGS)
    try:
        worker, catalog = system.workers[0], system.catalogs[0]
        differences = system.checker.check(WHOLE_S * slow).differences
        if differences:
            return BurstResult(burst.blocks, 0, 0, 0.0, 0.0, 0.0, differences)
        if burst.stopped_catalog:
            catalog.stop()
        killer = _Killer(system, burst.kills, burst.blocks / BLOCKS_PER_S / (burst.kills + 1))
        begin_s = time.monotonic()
        before = worker.ask(op="status")["applied"]
        killer.start()
        after = worker.ask(op="burst", blocks=burst.blocks, wait_s=300.0)["applied"]
        burst_s = time.monotonic() - begin_s
        killer.join()
        begin_s = time.monotonic()
        while (status := worker.ask(op="status"))["published"] < [status["epoch"], after]:
            if time.monotonic() - begin_s > 300.0 * slow:
                return BurstResult(
                    burst.blocks, killer.done, after - before, burst_s, 0.0, 0.0, [f"not published: {status}"]
                )
            time.sleep(0.1)
        published_s = time.monotonic() - begin_s
        if burst.stopped_catalog:
            catalog.start()
        verdict = system.checker.check(4 * WHOLE_S * slow)
        differences = verdict.differences + system.checker.verify(system.nats.url, "stream")
        return BurstResult(burst.blocks, killer.done, after - before, burst_s, published_s, verdict.wait_s, differences)
    finally:
        system.close()


class _Killer(threading.Thread):
    """Kills nats-server again and again, as long as it takes."""

    def __init__(self, system: System, kills: int, every_s: float) -> None:
        super().__init__(name="killer", daemon=True)
        self._system = system
        self._kills, self._every_s = kills, every_s
        self.done = 0

    def run(self) -> None:
        """In its own thread: nats-server ends with whoever started it, so its keeper is another one."""
        for _ in range(self._kills):
            time.sleep(self._every_s)
            self._system.nats.kill()
            time.sleep(0.2)
            self._system.nats.start()
            self.done += 1
