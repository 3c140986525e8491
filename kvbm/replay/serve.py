"""A captured log fed into a stream once more, at a chosen speed, fenced as its publishers were.

Frames go out as they lie, repeats and all. What is read first is only where each instance begins, so that nothing is
written into a stream that knows more of one of them.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import NamedTuple

import msgspec

from kvbm.core.backend import Backend
from kvbm.core.codec import ScannedFrame
from kvbm.core.errors import FencedError
from kvbm.core.ids import Epoch, InstanceId
from kvbm.progress import Watch
from kvbm.replay.findings import ReplayFinding, damage_finding, damage_text
from kvbm.replay.format import counted, place_text
from kvbm.replay.order import DamagedBytes
from kvbm.replay.prefetch import read_ahead
from kvbm.replay.scan import NOTED, Damage
from kvbm.replay.source import FrameSource, Located, SourceError, only
from kvbm.streams.base import ORIGIN, EventLog, EventStream, Fence, Heartbeat, Position, is_other_life, run_of
from kvbm.streams.fence_records import FenceRecord

OpenStream = Callable[[], Awaitable[EventStream]]

MAX_SPEED = float("inf")
MESSAGE_BYTES = 64 << 10  # frames of one instance travel together up to here, when they are due together
WINDOW_BYTES = 8 << 20  # on their way
LINGER_S = 0.002  # what falls due within this is due together
PULSE_S = 1.0
TIMEOUT_S = 10.0

_clock, _pause = time.monotonic, asyncio.sleep  # of the chosen speed; tests have their own


class ServedStream(msgspec.Struct, kw_only=True):
    """What was fed.

    Attributes:
        stale: frames of an epoch before the one last begun; they are left out, as the server refuses them.
        elapsed_s, recorded_s: how long it took, and from the first frame's time to the last.
        latest_s: how far the feeding fell behind the chosen speed.
    """

    source: str
    to: str
    instances: int = 0
    frames: int = 0
    events: int = 0
    blocks: int = 0
    messages: int = 0
    stale: int = 0
    elapsed_s: float = 0.0
    recorded_s: float = 0.0
    latest_s: float = 0.0
    findings: list[ReplayFinding] = []
    notes: list[str] = []

    def lines(self) -> Iterator[str]:
        """For people."""
        rate = self.blocks / self.elapsed_s if self.elapsed_s else 0.0
        yield (
            f"served: {counted(self.frames, 'frame')} of {counted(self.instances, 'instance')}, "
            f"{counted(self.events, 'event')}, "
            f"{counted(self.messages, 'message')} in {self.elapsed_s:,.3f} s ({rate:,.0f} block events/s), recorded in "
            f"{self.recorded_s:,.3f} s"
        )


class _Due(NamedTuple):
    """One message to be.

    Attributes:
        run: that began the epoch, as was recorded; "" when it was not.
        wall_time_ns: of its first frame.
    """

    instance: InstanceId
    epoch: Epoch
    run: str
    wall_time_ns: int
    end: Position
    data: list[bytes]


def serve(
    source: FrameSource,
    connect: OpenStream,
    to: str,
    cluster: str,
    backend: Backend,
    speed: float = MAX_SPEED,
    anyway: bool = False,
    instance: str | None = None,
) -> ServedStream:
    """Feed a source into a stream.

    Args:
        connect: gives the stream, inside the loop that feeds it.
        to: the stream's name, for people.
        speed: 1.0 keeps the gaps between frames as they were recorded, 2.0 halves them, MAX_SPEED leaves none.
        anyway: also into a stream that has newer events of an instance; readers will ignore what is older, and a
            publisher of that name that still runs is shut out.
        instance: only this one.
    Raises: SourceError: the stream has newer events. StreamError, FencedError: it does not take them.
    """
    begins, frames = _begins(source, backend, instance)
    return asyncio.run(_feed(source, connect, to, cluster, backend, speed, anyway, instance, begins, frames))


def _begins(source: FrameSource, backend: Backend, instance: str | None) -> tuple[dict[InstanceId, Position], int]:
    """Where each instance's events begin, and how many frames there are."""
    begins: dict[InstanceId, Position] = {}
    count = 0
    with Watch(f"{source.name}: looking") as watch:
        for located in only(source.read(backend), instance):
            frame = located.found
            watch.total, watch.done = source.total, source.done
            if isinstance(frame, ScannedFrame):
                count += 1
                begin = Position(frame.epoch, frame.first_offset)
                begins[frame.instance] = min(begin, begins.get(frame.instance, begin))
    if not count:
        whose = f" of instance {instance!r}" if instance else ""
        raise SourceError(f"{source.name} has no frame{whose}; kvbm-replay stat lists the instances")
    return begins, count


async def _feed(
    source: FrameSource,
    connect: OpenStream,
    to: str,
    cluster: str,
    backend: Backend,
    speed: float,
    anyway: bool,
    instance: str | None,
    begins: dict[InstanceId, Position],
    frames: int,
) -> ServedStream:
    stream = await connect()
    report = ServedStream(source=source.name, to=to, instances=len(begins))
    try:
        await _check_older(stream, to, cluster, begins, report, anyway)
        feeder = _Feeder(stream, cluster, report, speed)
        pulses = asyncio.create_task(feeder.keep_pulsing())
        began_s = time.monotonic()
        try:
            with Watch(f"{source.name} → {to}", frames) as watch:
                async for due in _messages(only(source.read(backend), instance), report, speed):
                    await feeder.send(due)
                    watch.done = report.frames
                await feeder.drain()
        finally:
            pulses.cancel()
            feeder.cancel()
        report.elapsed_s = time.monotonic() - began_s
        await feeder.pulse()
    finally:
        await stream.close()
    return report


async def _check_older(
    stream: EventLog, to: str, cluster: str, begins: dict[InstanceId, Position], report: ServedStream, anyway: bool
) -> None:
    for name, begin in sorted(begins.items()):
        tail = await stream.tail(cluster, name, TIMEOUT_S)
        fence = await stream.fence(cluster, name, TIMEOUT_S)
        known = max(
            tail.end if tail else Position(Epoch(0), begin.offset),
            Position(fence.epoch if fence else Epoch(0), begin.offset),
        )
        if known <= begin:
            continue
        words = (
            f"the stream at {to} has instance {name} up to {place_text(*known)}, the log begins at {place_text(*begin)}"
        )
        if not anyway:
            raise SourceError(
                f"{words}; nothing was written. Give another --cluster or an empty stream, or --anyway when its "
                "readers may ignore "
                "what is older"
            )
        report.notes.append(f"{words}; its readers ignore what is older")


async def _messages(located: Iterator[Located], report: ServedStream, speed: float) -> AsyncIterator[_Due]:
    """Frames as messages: several of one instance and epoch together when they follow each other and are due
    together.
    """
    due: _Due | None = None
    size = 0
    newest: dict[InstanceId, Epoch] = {}
    runs: dict[InstanceId, str] = {}  # that began the newest epoch
    holders: dict[InstanceId, Fence] = {}
    first_ns = last_ns = 0
    async for batch in read_ahead(located):
        for one in batch:
            frame = one.found
            if isinstance(frame, Damage):
                damaged = DamagedBytes(one, frame)
                if frame.kind in NOTED:
                    report.notes.append(damage_text(damaged))
                else:
                    report.findings.append(damage_finding(damaged))
                continue
            if isinstance(frame, FenceRecord):
                if is_other_life(newest.get(frame.instance, Epoch(0)), runs.get(frame.instance, ""), frame.fence):
                    newest.pop(frame.instance)
                holders[frame.instance] = frame.fence
                continue
            if frame.epoch < newest.get(frame.instance, 0):
                report.stale += 1
                continue
            is_new = newest.get(frame.instance) != frame.epoch
            run = run_of(holders.get(frame.instance), frame.epoch) if is_new else runs[frame.instance]
            newest[frame.instance], runs[frame.instance] = frame.epoch, run
            first_ns, last_ns = first_ns or frame.wall_time_ns, max(last_ns, frame.wall_time_ns)
            report.recorded_s = (last_ns - first_ns) / 1e9
            _count(report, frame)
            size += len(one.data)
            is_together = speed == MAX_SPEED or (
                due is not None and abs(frame.wall_time_ns - due.wall_time_ns) <= LINGER_S * 1e9 * speed
            )
            if (
                due is None
                or (due.instance, due.epoch, due.run) != (frame.instance, frame.epoch, run)
                or size > MESSAGE_BYTES
                or not is_together
            ):
                if due is not None:
                    yield due
                due = _Due(frame.instance, frame.epoch, run, frame.wall_time_ns, _end(frame), [])
                size = len(one.data)
            due.data.append(one.data)
            due = due._replace(end=max(due.end, _end(frame)))
    if due is not None:
        yield due


def _end(frame: ScannedFrame) -> Position:
    return Position(frame.epoch, frame.next_offset)


def _count(report: ServedStream, frame: ScannedFrame) -> None:
    report.frames += 1
    report.events += frame.event_count
    report.blocks += sum(frame.blocks)


class _Feeder:
    """Publishes messages in order, several under way; their fences move with the epochs."""

    def __init__(self, stream: EventStream, cluster: str, report: ServedStream, speed: float) -> None:
        self._stream, self._cluster, self._report, self._speed = stream, cluster, report, speed
        self._run = f"replay-{secrets.token_hex(8)}"
        self._fences: dict[InstanceId, Fence] = {}
        self._ends: dict[InstanceId, Position] = {}  # acknowledged
        self._under_way: list[tuple[_Due, int, asyncio.Future[int]]] = []  # in order
        self._bytes = 0
        self._began: tuple[float, int] | None = None  # now, and the wall time that was then

    async def send(self, due: _Due) -> None:
        """Send a message when it is due. Raises StreamError, FencedError: an earlier one was not taken."""
        await self._wait_until(due.wall_time_ns)
        fence = self._fences.get(due.instance)
        if fence is None or (fence.epoch, fence.run) != (due.epoch, self._run_of(due)):
            await self.drain()
            fence = await self._move_fence(due)
        data = b"".join(due.data)
        while self._under_way and self._bytes + len(data) > WINDOW_BYTES:
            await self._confirm()
        acked = self._ends.get(due.instance, ORIGIN)
        work = self._stream.publish(self._cluster, due.instance, data, TIMEOUT_S, fence, acked)
        self._under_way.append((due, len(data), asyncio.ensure_future(work)))
        self._bytes += len(data)
        self._report.messages += 1
        await asyncio.sleep(0)  # the message goes out in the order of the calls
        while self._under_way and self._under_way[0][2].done():
            await self._confirm()

    async def drain(self) -> None:
        """Wait until everything sent is on the stream. Raises StreamError, FencedError."""
        while self._under_way:
            await self._confirm()

    def cancel(self) -> None:
        """Give up what is under way."""
        for _, _, task in self._under_way:
            task.cancel()

    async def keep_pulsing(self) -> None:
        """Signs of life for those who were begun, until cancelled."""
        while True:
            await self.pulse()
            await asyncio.sleep(PULSE_S)

    async def pulse(self) -> None:
        """One sign of life of everybody who was begun."""
        for name, end in self._ends.items():
            heartbeat = Heartbeat(
                instance=name,
                cluster=self._cluster,
                epoch=end.epoch,
                published=end.offset,
                wall_time_ns=time.time_ns(),
                run=self._fences[name].run,
            )
            await self._stream.send_pulse(heartbeat)

    def _run_of(self, due: _Due) -> str:
        """As it was recorded, so that lives stay apart; made unlike the first, which may still run."""
        return f"{self._run}-{due.run}" if due.run else self._run

    async def _move_fence(self, due: _Due) -> Fence:
        known = self._fences.get(due.instance) or await self._stream.fence(self._cluster, due.instance, TIMEOUT_S)
        expected = 0 if known is None else known.sequence
        run = self._run_of(due)
        fence = await self._stream.set_fence(self._cluster, due.instance, due.epoch, run, expected, TIMEOUT_S)
        if due.end < self._ends.get(due.instance, ORIGIN):
            self._ends.pop(due.instance)  # another life
        self._fences[due.instance] = fence
        return fence

    async def _confirm(self) -> None:
        due, size, task = self._under_way.pop(0)
        try:
            await task
        except FencedError as error:
            raise FencedError(
                f"{error}; instance {due.instance} is written by somebody else: use another --cluster"
            ) from None
        self._bytes -= size
        self._ends[due.instance] = max(due.end, self._ends.get(due.instance, due.end))

    async def _wait_until(self, wall_time_ns: int) -> None:
        """Wait for the time at which a frame is due; a clock that went back makes nobody wait twice."""
        if self._speed == MAX_SPEED:
            return
        now_s = _clock()
        if self._began is None:
            self._began = (now_s, wall_time_ns)
        began_s, began_ns = self._began
        wait_s = began_s + (wall_time_ns - began_ns) / 1e9 / self._speed - now_s
        if wait_s > 0:
            while self._under_way:  # what waits for its acknowledgement uses the time
                await self._confirm()
            await _pause(max(0.0, wait_s - (_clock() - now_s)))
        else:
            self._report.latest_s = max(self._report.latest_s, -wait_s)
