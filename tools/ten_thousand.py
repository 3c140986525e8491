"""Run one catalog among thousands of instances for minutes: does its memory stay flat, is nobody left out or suspected
who is well?

    python tools/ten_thousand.py --instances 10000 --seconds 300

A nats-server with JetStream, a catalog process with its index in C++, and one process that is all the instances: each
has a ledger of its own, sends a heartbeat a second and, one after the other, frames of blocks it has created and
evicted. A line every 30 seconds. At the end frames pause, and what heartbeats alone take of a core is measured. It
returns 0 when the catalog's memory grew by no more than --growth-mib from the middle of the run to its end, nobody was
left out, and nobody was suspect or behind at a look.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from kvbm import _native
from kvbm.bench.measure import processor_s, resident_mib
from kvbm.core.errors import CatalogError
from kvbm.core.events import PoolStated
from kvbm.core.ids import HASH_BYTES, NO_PARENT, Epoch, InstanceId, Namespace, Offset, Tier
from kvbm.locate.http import CatalogClient
from kvbm.streams.base import Heartbeat
from kvbm.streams.nats.stream import NatsStream
from kvbm.streams.server import EmbeddedServer
from kvbm.workload.processes import Child, start_catalog_process

CLUSTER = "local"
NAMESPACE = Namespace(model="ten-thousand", revision="r1", block_tokens=16)
CONNECTIONS = 4
SLOTS = 64
RUN_BLOCKS = 8
LINES = 10  # of a run
LINE_S = 30.0
_AT_ONCE = 100  # frames on their way to the stream
_TICKS_PER_S = 100
_WAIT_S = 300.0
_QUIET_S = 10.0
_MOST_MOMENTS = 20  # told of
_LOOKED_AT = ("ready", "excluded", "suspect", "behind", "ignored", "gone", "indexed_blocks", "lag_messages")


# -- the instances -----------------------------------------------------------------------------------------------------


class Instances:
    """All of them, in this process.

    Attributes:
        frames: published so far. late_s: the longest time between two heartbeats of an instance.
        is_publishing: new frames are made.
    """

    def __init__(self, streams: list[NatsStream], instances: int, seed: int) -> None:
        self._streams = streams
        self._rng = np.random.default_rng(seed)
        self._ledgers = [
            _native.Ledger([PoolStated(Tier.HBM, SLOTS, 1 << 20)], "lru", 1 << 20) for _ in range(instances)
        ]
        self._published = [Offset(0)] * instances
        self._sent_s = [0.0] * instances
        self.frames, self.late_s, self.is_publishing = 0, 0.0, True

    async def begin(self) -> None:
        """Start all of them with full pools, and send the first heartbeat of each as soon as its frames are stored."""
        for first in range(0, len(self._ledgers), _AT_ONCE):
            numbers = range(first, min(first + _AT_ONCE, len(self._ledgers)))
            for number in numbers:
                self._ledgers[number].start(Epoch(1), [NAMESPACE])
                for _ in range(SLOTS // RUN_BLOCKS):
                    self._create(number)
            await asyncio.gather(*(self._publish(number) for number in numbers))

    async def publish(self, frames_per_s: float) -> None:
        """Frames, for ever."""
        next_s = time.monotonic()
        while True:
            await asyncio.sleep(max(0.0, next_s - time.monotonic()))
            next_s = max(next_s + 1 / frames_per_s, time.monotonic() - 1.0)
            if self.is_publishing:
                number = int(self._rng.integers(len(self._ledgers)))
                self._create(number)
                await self._publish(number)

    async def live(self) -> None:
        """Heartbeats, for ever."""
        began_s, beats = time.monotonic(), 0
        each = max(1, len(self._ledgers) // _TICKS_PER_S)
        self._sent_s = [0.0] * len(self._ledgers)
        while True:
            for _ in range(each):
                await self._beat(beats % len(self._ledgers))
                beats += 1
            late_s = time.monotonic() - began_s - beats / len(self._ledgers)
            began_s += late_s if late_s > 1.0 else 0.0  # what stood still does not send later what it had not sent
            await asyncio.sleep(max(0.0, -late_s))

    def _create(self, number: int) -> None:
        ledger, hashes = self._ledgers[number], self._rng.bytes(RUN_BLOCKS * HASH_BYTES)
        allocation = ledger.allocate(Tier.HBM, RUN_BLOCKS)
        assert allocation is not None
        ledger.unpin(Tier.HBM, ledger.create(NAMESPACE.id, Tier.HBM, NO_PARENT, 0, hashes, allocation.slots))

    async def _publish(self, number: int) -> None:
        ledger, stream = self._ledgers[number], self._streams[number % CONNECTIONS]
        data = b"".join(frame.data for frame in ledger.take_frames(_name(number), time.time_ns()))
        await stream.publish(CLUSTER, _name(number), data, timeout_s=30.0)
        self._published[number] = ledger.applied
        self.frames += 1

    async def _beat(self, number: int) -> None:
        now_s, before_s = time.monotonic(), self._sent_s[number]
        self.late_s = max(self.late_s, now_s - before_s if before_s else 0.0)
        self._sent_s[number] = now_s
        await self._streams[number % CONNECTIONS].send_pulse(
            Heartbeat(
                instance=_name(number),
                cluster=CLUSTER,
                epoch=Epoch(1),
                published=self._published[number],
                applied=self._ledgers[number].applied,
                wall_time_ns=time.time_ns(),
                run="r1",
                namespaces=(NAMESPACE.id,),
                queued_tokens=int(now_s * 7919 + number) % 5000,
                free_slots={Tier.HBM: number % SLOTS},
            )
        )


async def be_instances(url: str, count: int, seed: int, frames_per_s: float) -> None:
    """The process of the instances: it is told "look", "quiet" and "end" on its standard input, and answers in JSON
    lines.
    """
    streams = [await NatsStream.connect(url, 10.0) for _ in range(CONNECTIONS)]
    instances = Instances(streams, count, seed)
    await instances.begin()
    tasks = [asyncio.create_task(work) for work in (instances.live(), instances.publish(frames_per_s))]
    _say({"frames": instances.frames})
    while line := (await asyncio.to_thread(sys.stdin.readline)).strip():
        instances.is_publishing = line == "look"
        failed = any(task.done() for task in tasks)
        _say({"frames": instances.frames, "late_s": instances.late_s, "failed": failed})
        if line == "end":
            break
    for task in tasks:
        task.cancel()
    for stream in streams:
        await stream.close()


def _name(number: int) -> InstanceId:
    return InstanceId(f"instance-{number:05}")


def _say(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


# -- the run -----------------------------------------------------------------------------------------------------------


class Look(NamedTuple):
    """The catalog at a moment.

    Attributes:
        share: of a core it took since the last look.
    """

    at_s: float
    rss_mib: float
    share: float
    numbers: dict[str, float]

    def sentence(self) -> str:
        """The same in words."""
        told = ", ".join(f"{name} {self.numbers[name]:,.0f}" for name in _LOOKED_AT)
        return f"{self.at_s:6.0f} s  {self.rss_mib:7.1f} MiB  {self.share:.2f} of a core  {told}"

    @property
    def trouble(self) -> str:
        """What should not be, or ""."""
        found = [
            f"{self.numbers[name]:.0f} {name}"
            for name in ("excluded", "suspect", "behind", "ignored", "gone")
            if self.numbers[name]
        ]
        return ", ".join(found + ([] if self.numbers["ready"] else ["not ready"]))


class Watch:
    """Looks at a catalog process."""

    def __init__(self, catalog: Child, client: CatalogClient) -> None:
        self._pid, self._client, self._began_s = catalog.process.pid, client, time.monotonic()
        self._before = (self._began_s, processor_s(self._pid))

    def look(self) -> Look:
        """The catalog now."""
        now_s, used_s = time.monotonic(), processor_s(self._pid)
        before_s, used_before_s = self._before
        share = (used_s - used_before_s) / max(1e-9, now_s - before_s)
        rss_mib = resident_mib(self._pid)
        numbers = _parsed(self._client.metrics())
        self._before = (time.monotonic(), processor_s(self._pid))  # looking is not counted
        return Look(now_s - self._began_s, rss_mib, share, numbers)


def _parsed(metrics: str) -> dict[str, float]:
    wanted = {f"kvbm_catalog_{name}": name for name in _LOOKED_AT}
    rows = (line.split() for line in metrics.splitlines() if not line.startswith("#"))
    return {wanted[row[0]]: float(row[1]) for row in rows if row[0] in wanted}


def _wait_until_well(client: CatalogClient, instances: int, publishers: Child) -> None:
    deadline_s = time.monotonic() + _WAIT_S
    while True:
        numbers: dict[str, float] = {}
        with contextlib.suppress(CatalogError):  # it is busy
            numbers = _parsed(client.metrics())
        if numbers.get("indexed_blocks") == instances * SLOTS and not any(
            numbers[name] for name in ("suspect", "excluded", "gone", "lag_messages")
        ):
            return
        if not publishers.alive() or time.monotonic() > deadline_s:
            words = publishers.output.read_text()[-2000:]
            raise SystemExit(f"{instances} instances are not whole after {_WAIT_S:.0f} s: {numbers}; {words}")
        time.sleep(2.0)


def _told(publishers: Child, word: str = "") -> dict[str, Any]:
    assert publishers.process.stdin is not None and publishers.process.stdout is not None
    if word:
        publishers.process.stdin.write(f"{word}\n".encode())
        publishers.process.stdin.flush()
    while (line := publishers.process.stdout.readline()) and not line.startswith(b"{"):
        pass  # a remark of a log
    if not line:
        raise SystemExit(f"the instances have ended: {publishers.output.read_text()[-2000:]}")
    found: dict[str, Any] = json.loads(line)
    return found


def run(options: argparse.Namespace, folder: Path, opened: ExitStack) -> list[str]:
    """What was wrong, in words."""
    server = EmbeddedServer.start(folder / "nats")
    opened.callback(server.stop)
    catalog, client = start_catalog_process(folder / "catalog", server.url)
    opened.callback(catalog.stop)
    opened.callback(client.close)
    given = [server.url, str(options.instances), str(options.seed), str(options.frames)]
    publishers = Child("instances", [sys.executable, __file__, "--be", *given], folder / "logs", spoken=True)
    opened.callback(publishers.stop)
    begin_s = time.monotonic()
    first = _told(publishers)
    _wait_until_well(client, options.instances, publishers)
    print(
        f"{options.instances:,} instances are whole after {time.monotonic() - begin_s:.0f} s, {first['frames']:,} "
        "frames",
        flush=True,
    )
    already, frames = _exclusions(catalog), _told(publishers, "look")["frames"]
    watch = Watch(catalog, client)
    pause_s = min(LINE_S, options.seconds / LINES)
    looks: list[Look] = []
    end_s = time.monotonic() + options.seconds
    while time.monotonic() < end_s:
        if options.stall and len(looks) == LINES // 2:
            _stall(publishers, options.stall)
        time.sleep(max(0.0, min(pause_s, end_s - time.monotonic())))
        looks.append(watch.look())
        print(looks[-1].sentence(), flush=True)
    frames = _told(publishers, "quiet")["frames"] - frames
    watch.look()
    time.sleep(min(_QUIET_S, options.seconds))
    quiet = watch.look()
    told = _told(publishers, "end")
    half = looks[len(looks) // 2 - 1 :]
    growth_mib = half[-1].rss_mib - half[0].rss_mib
    excluded = _exclusions(catalog) - already
    print(f"{frames / options.seconds:.0f} frames a second; heartbeats alone take {quiet.share:.2f} of a core")
    times = excluded.total()
    print(f"memory grew by {growth_mib:.1f} MiB in the second half; {times} times somebody was left out; ", end="")
    print(f"at most {told['late_s']:.2f} s between two heartbeats of an instance")
    wrong = [f"after {one.at_s:.0f} s: {one.trouble}" for one in (*looks, quiet) if one.trouble]
    wrong += [f"the catalog's memory grew by {growth_mib:.1f} MiB"] if growth_mib > options.growth_mib else []
    wrong += [f"{count} times somebody was left out {when}" for when, count in sorted(excluded.items())[:_MOST_MOMENTS]]
    wrong += ["the instances' process has failed"] if told["failed"] else []
    return wrong


def _stall(publishers: Child, seconds: float) -> None:
    """Nobody is heard for a while, then all are, one after the other: that is no death."""
    print(f"the instances stand still for {seconds:.1f} s", flush=True)
    os.kill(publishers.process.pid, signal.SIGSTOP)
    time.sleep(seconds)
    os.kill(publishers.process.pid, signal.SIGCONT)


def _exclusions(catalog: Child) -> Counter[str]:
    """How often somebody was left out, by the second and the reason that the catalog's log gives."""
    lines = (line for line in catalog.output.read_text().splitlines() if "instance.excluded" in line)
    return Counter(f"at {line[:19]}, {line[line.find('why=') :]}" for line in lines)


def main() -> int:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description="One catalog among thousands of simulated instances.")
    parser.add_argument("--instances", type=int, default=10_000, metavar="N", help="how many (default 10000)")
    parser.add_argument("--seconds", type=float, default=300.0, metavar="S", help="how long (default 300)")
    parser.add_argument(
        "--frames", type=float, default=200.0, metavar="R", help="frames a second, of all (default 200)"
    )
    parser.add_argument(
        "--growth-mib", type=float, default=16.0, metavar="M", help="of memory in the second half (default 16)"
    )
    parser.add_argument(
        "--seed", type=int, default=1, metavar="N", help="of blocks, and of who creates them (default 1)"
    )
    parser.add_argument(
        "--stall", type=float, default=0.0, metavar="S", help="let all stand still in the middle, so long (default 0)"
    )
    parser.add_argument(
        "--be", nargs=4, help=argparse.SUPPRESS
    )  # url, instances, seed, frames: be the instances' process
    options = parser.parse_args()
    if options.be:
        url, instances, seed, frames = options.be
        asyncio.run(be_instances(url, int(instances), int(seed), float(frames)))
        return 0
    with tempfile.TemporaryDirectory(prefix="kvbm-many-") as folder, ExitStack() as opened:
        wrong = run(options, Path(folder), opened)
    print("FAILED" if wrong else "ok", *wrong, sep="\n    ")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
