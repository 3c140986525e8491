"""A divergence planted at a random offset is found at exactly that offset, however the frames were cut."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest

from kvbm.assembly import NATIVE
from kvbm.core.backend import REFERENCE
from kvbm.core.codec import Frame
from kvbm.core.events import (
    BlocksCreated,
    BlocksEvicted,
    Event,
    EvictReason,
    InstanceStarted,
    InstanceStopped,
    SnapshotEnded,
    UsageRecorded,
)
from kvbm.core.ids import Tier
from kvbm.replay.diff import EVENT
from kvbm.replay.format import event_text
from kvbm.replay.opening import open_source
from tests.captures import NAMESPACE, Capture, make_capture, packed, some_hash
from tests.readable import diff


def changed(event: Event, pick: random.Random) -> Event:
    """Another event in its place."""
    match event:
        case InstanceStarted():
            return msgspec.structs.replace(event, engine=event.engine + "x")
        case BlocksCreated() if pick.random() < 0.5:
            return msgspec.structs.replace(event, start=event.start + 1)
        case SnapshotEnded() | InstanceStopped() | UsageRecorded():
            return BlocksEvicted(namespace=NAMESPACE, tier=Tier.HBM, reason=EvictReason.TTL, hashes=some_hash("d"))
        case _:
            hashes = bytearray(event.hashes)
            hashes[pick.randrange(len(hashes))] ^= 1 << pick.randrange(8)
            return msgspec.structs.replace(event, hashes=bytes(hashes))


def cut_anew(capture: Capture, pick: random.Random) -> Capture:
    """The same events in other frames."""
    recorded = capture.recorded
    ends = {at for at in range(1, len(recorded)) if recorded[at - 1].epoch != recorded[at].epoch or pick.random() < 0.3}
    return capture._replace(cuts=sorted(ends | {len(recorded)}))


def mixed(streams: list[list[Frame]], pick: random.Random) -> list[Frame]:
    """Several instances' frames as a stream has them, with repeats."""
    waiting, frames = [list(stream) for stream in streams], list[Frame]()
    while any(waiting):
        queue = pick.choice([queue for queue in waiting if queue])
        frames.append(queue.pop(0))
        if pick.random() < 0.1:
            frames.append(pick.choice(frames))
    return frames


@pytest.mark.parametrize("seed", range(120))
def test_a_planted_divergence_is_found_at_its_exact_offset(tmp_path: Path, seed: int) -> None:
    pick = random.Random(seed)
    capture, other = make_capture(seed, commands=80), make_capture(seed + 1000, instance="two")
    index = pick.randrange(len(capture.recorded))
    epoch = capture.recorded[index].epoch
    offset = index - next(at for at, one in enumerate(capture.recorded) if one.epoch == epoch)
    event = capture.recorded[index].event
    planted = capture.replace({index: changed(event, pick)})
    if pick.random() < 0.7:
        planted = cut_anew(planted, pick)
    archive, file = tmp_path / "archive", tmp_path / "b.kvbm"
    archive.mkdir()
    frames = mixed([capture.frames(), other.frames()], pick)
    half = pick.randrange(1, len(frames))
    (archive / f"{1:020d}.kvbm").write_bytes(packed(frames[:half]))
    (archive / f"{half + 1:020d}.kvbm").write_bytes(packed(frames[half:]))
    file.write_bytes(packed(mixed([planted.frames(), other.frames()], pick)))
    backend = pick.choice([NATIVE, REFERENCE])
    report = diff(open_source(str(archive)), open_source(str(file)), backend)
    (found,) = report.divergences
    assert (found.kind, found.instance, found.epoch, found.offset) == (EVENT, "one", epoch, offset)
    assert found.a.event == event_text(event)
    assert found.a.place.startswith(str(archive)) and found.b.place.startswith(str(file))
