"""The journal: what it keeps of what it took, on a disk that fills, fails, forgets, tears and flips bits."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvbm.assembly import NATIVE
from kvbm.core.codec import Frame, FrameBytes
from kvbm.core.events import BlocksCreated
from kvbm.core.ids import HASH_BYTES, Epoch, InstanceId, NamespaceId, Offset, Tier
from kvbm.streams.base import ORIGIN, Position
from kvbm.streams.device import OsDevice
from kvbm.streams.journal import Journal

INSTANCE = InstanceId("instance-0")


def a_frame(first: int, events: int = 1, epoch: int = 1, blocks: int = 1) -> FrameBytes:
    """A good frame of creations."""
    made = tuple(
        BlocksCreated(
            namespace=NamespaceId(bytes(HASH_BYTES)),
            tier=Tier.HOST,
            hashes=b"".join((at * blocks + n + 1).to_bytes(HASH_BYTES, "little") for n in range(blocks)),
        )
        for at in range(first, first + events)
    )
    frame = Frame(
        instance=INSTANCE, epoch=Epoch(epoch), first_offset=Offset(first), wall_time_ns=0, digest=0, events=made
    )
    return FrameBytes(frame.epoch, frame.first_offset, frame.next_offset, NATIVE.encode_frame(frame))


FRAME_BYTES = len(a_frame(0).data)


def begun(folder: Path, **more: Any) -> Journal:
    """A journal whose first epoch has begun, or the next one."""
    journal = Journal.open(folder, INSTANCE, NATIVE, **more)
    journal.begin_epoch(Epoch(journal.epoch + 1))
    return journal


def all_frames(journal: Journal) -> list[FrameBytes]:
    return journal.read_after(ORIGIN, 1 << 30)


class FailingDevice(OsDevice):
    """Refuses what it is told to.

    Attributes:
        room: bytes it still takes; None for no end.
        refused: names of calls that fail.
        calls: what was done, by name.
    """

    def __init__(self) -> None:
        self.room: int | None = None
        self.refused: set[str] = set()
        self.calls: list[str] = []
        self.most_at_once: int | None = None

    def _do(self, name: str) -> None:
        self.calls.append(name)
        if name in self.refused:
            raise OSError(errno.EIO, "Input/output error")

    def write(self, file: int, pieces: Sequence[memoryview]) -> int:
        self._do("write")
        data = b"".join(pieces)
        if self.most_at_once is not None:
            data = data[: self.most_at_once]
        if self.room is not None:
            if not self.room:
                raise OSError(errno.ENOSPC, "No space left on device")
            data = data[: self.room]
            self.room -= len(data)
        return super().write(file, [memoryview(data)])

    def sync(self, file: int) -> None:
        self._do("sync")
        super().sync(file)

    def truncate(self, file: int, size: int) -> None:
        self._do("truncate")
        super().truncate(file, size)


# -- refusals of the device --------------------------------------------------------------------------------------------


def test_half_a_frame_the_device_would_not_take_back_is_gone_before_the_next(tmp_path: Path) -> None:
    device = FailingDevice()
    journal = begun(tmp_path, device=device)
    journal.append(a_frame(0))
    device.room = FRAME_BYTES // 2
    with pytest.raises(OSError, match="No space left"):
        journal.append(a_frame(1))
    device.room, device.refused = None, {"truncate"}
    with pytest.raises(OSError, match="Input/output"):
        journal.append(a_frame(1))
    device.refused = set()
    journal.append(a_frame(1))
    journal.append(a_frame(2))
    assert all_frames(journal) == [a_frame(at) for at in range(3)]
    journal.close()
    journal = Journal.open(tmp_path, INSTANCE, NATIVE)
    assert [frame.first_offset for frame, _ in journal.frames(Epoch(1))] == [0, 1, 2]
    journal.close()


def test_a_closed_journal_takes_nothing_more(tmp_path: Path) -> None:
    journal = begun(tmp_path)
    journal.close()
    with pytest.raises(OSError, match="is closed"):
        journal.append(a_frame(0))
    assert list(tmp_path.glob("*.kvbj")) == []
