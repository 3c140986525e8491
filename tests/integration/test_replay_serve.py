"""`kvbm-replay serve`: what goes into the stream, when, and under which fence."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from kvbm.core.codec import scan_frames
from kvbm.core.errors import FencedError
from kvbm.core.ids import Epoch, InstanceId
from kvbm.replay import serve as serve_module
from kvbm.replay.opening import open_source
from kvbm.replay.scan import CORRUPT
from kvbm.replay.serve import MAX_SPEED, ServedStream
from kvbm.replay.source import SourceError
from kvbm.streams.base import FENCE_PREFIX, EventStream, Fence, Position
from kvbm.streams.memory import MemoryStream
from tests.captures import SECOND_NS, make_capture, packed, starts
from tests.readable import serve

ONE = make_capture(7, commands=120).frames()
TWO = make_capture(8, commands=120, instance="two").frames()
MIXED = sorted([*ONE, *TWO], key=lambda frame: frame.wall_time_ns)


class Clock:
    """Time that passes only in pauses; notes when each message came."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        self.came: list[tuple[float, bytes]] = []
        monkeypatch.setattr(serve_module, "_clock", lambda: self.now_s)
        monkeypatch.setattr(serve_module, "_pause", self.pause)

    async def pause(self, wait_s: float) -> None:
        self.now_s += wait_s

    def stream(self) -> MemoryStream:
        clock = self

        class Noting(MemoryStream):
            def _store(self, subject: str, data: bytes, fence: Fence | None = None) -> int:
                if not subject.startswith(FENCE_PREFIX):
                    clock.came.append((clock.now_s, data))
                return super()._store(subject, data, fence)

        return Noting()


def served(path: Path, stream: MemoryStream, speed: float = MAX_SPEED, anyway: bool = False) -> ServedStream:
    async def connect() -> EventStream:
        return stream

    return serve(open_source(str(path)), connect, "memory", "c", speed=speed, anyway=anyway)


def frames_of(messages: list[bytes]) -> list[tuple[str, int, int]]:
    found = [frame for data in messages for frame in scan_frames(data)[0]]
    return [(frame.instance, frame.epoch, frame.first_offset) for frame in found]


@pytest.fixture
def capture(tmp_path: Path) -> Path:
    path = tmp_path / "a.kvbm"
    path.write_bytes(packed(MIXED))
    return path


def events_in(stream: MemoryStream) -> list[bytes]:
    return [message.data for message in stream.messages if not message.subject.startswith(FENCE_PREFIX)]


def test_all_frames_arrive_in_order_and_each_epoch_moves_the_fence_first(capture: Path) -> None:
    stream = MemoryStream()
    report = served(capture, stream)
    assert frames_of(events_in(stream)) == [(frame.instance, frame.epoch, frame.first_offset) for frame in MIXED]
    assert (report.frames, report.instances, report.messages) == (len(MIXED), 2, len(events_in(stream)))
    assert report.messages < report.frames
    fences = [message for message in stream.messages if message.subject.startswith(FENCE_PREFIX)]
    assert len(fences) == len({(frame.instance, frame.epoch) for frame in MIXED})


@pytest.mark.parametrize("speed", [1.0, 4.0])
def test_gaps_are_kept_at_the_chosen_speed(capture: Path, monkeypatch: pytest.MonkeyPatch, speed: float) -> None:
    clock = Clock(monkeypatch)
    served(capture, clock.stream(), speed)
    began_s = clock.came[0][0]
    for came_s, data in clock.came:
        (first, *_), _ = scan_frames(data)
        due_s = (first.wall_time_ns - MIXED[0].wall_time_ns) / 1e9 / speed
        assert came_s - began_s == pytest.approx(due_s)
    assert frames_of([data for _, data in clock.came]) == [(f.instance, f.epoch, f.first_offset) for f in MIXED]


def test_a_clock_that_went_back_in_the_log_makes_nobody_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    frames = [frame for frame in ONE if frame.epoch == ONE[0].epoch][:6]
    back = [msgspec.structs.replace(one, wall_time_ns=one.wall_time_ns - 3600 * SECOND_NS) for one in frames[3:]]
    (tmp_path / "a.kvbm").write_bytes(packed([*frames[:3], *back]))
    clock = Clock(monkeypatch)
    served(tmp_path / "a.kvbm", clock.stream(), 1.0)
    assert len(frames_of([data for _, data in clock.came])) == 6
    assert clock.now_s - 100.0 == pytest.approx(2.0)


def test_a_stream_that_has_newer_events_is_left_alone_unless_told(capture: Path, tmp_path: Path) -> None:
    stream = MemoryStream()
    served(capture, stream)
    stored = len(stream.messages)
    with pytest.raises(SourceError, match="nothing was written"):
        served(capture, reopened(stream))
    assert len(stream.messages) == stored
    report = served(capture, reopened(stream), anyway=True)
    assert len(stream.messages) > stored and len(report.notes) == 2


def test_a_fence_of_a_later_epoch_alone_keeps_the_log_out(capture: Path) -> None:
    stream = MemoryStream()
    asyncio.run(stream.set_fence("c", InstanceId("one"), Epoch(ONE[0].epoch + 1), "other", 0))
    with pytest.raises(SourceError, match="instance one"):
        served(capture, stream)


def reopened(stream: MemoryStream) -> MemoryStream:
    stream._is_closed = False
    return stream


def test_somebody_who_moves_the_fence_meanwhile_ends_it_with_a_clear_error(capture: Path) -> None:
    class Taken(MemoryStream):
        async def set_fence(self, *arguments: object, **more: object):  # type: ignore[no-untyped-def,override]
            fence = await super().set_fence(*arguments, **more)  # type: ignore[arg-type]
            await super().set_fence("c", arguments[1], Epoch(99), "other", fence.sequence)  # type: ignore[arg-type]
            return fence

    with pytest.raises(FencedError, match="another --cluster"):
        served(capture, Taken())


def test_frames_of_an_epoch_that_is_over_and_damage_are_left_out_and_told(tmp_path: Path) -> None:
    data, at = bytearray(packed(ONE)), starts(ONE)
    data[at[4] + 60] ^= 1
    (tmp_path / "a.kvbm").write_bytes(bytes(data) + packed(ONE[:1]))
    stream = MemoryStream()
    report = served(tmp_path / "a.kvbm", stream)
    assert report.stale == 1 and [finding.kind for finding in report.findings] == [CORRUPT]
    assert report.frames == len(ONE) - 1 == len(frames_of(events_in(stream)))


def test_heartbeats_say_how_far_it_is(capture: Path) -> None:
    stream = MemoryStream()
    served(capture, stream)
    pulse = asyncio.run(reopened(stream).last_pulse("c", InstanceId("two")))
    assert pulse is not None
    assert Position(pulse.epoch, pulse.published) == (TWO[-1].epoch, TWO[-1].next_offset)
