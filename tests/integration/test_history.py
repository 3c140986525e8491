"""What a journal keeps though nobody needs it: the answer to "why did this block leave" across restarts, and never in
the way.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvbm.assembly import NATIVE, journal_folder
from kvbm.core.errors import ConfigError, JournalError
from kvbm.core.events import EvictReason
from kvbm.core.ids import Epoch, Offset, SequenceHash, Tier
from kvbm.streams.base import ORIGIN, Position
from kvbm.streams.journal.disk import OsDevice
from kvbm.streams.journal.history import Retention
from kvbm.streams.journal.journal import Journal
from kvbm.streams.journal.writer import JournalOptions
from tests.eventually import WAIT_S, eventually
from tests.journals import FRAME_BYTES, INSTANCE, a_frame, all_frames, begun
from tests.managers import hashes_of, serve
from tests.nats_fixture import cluster, nats_url
from tests.published import is_published, opened, settings_of
from tests.readable import main as replay

__all__ = ["cluster", "nats_url"]

LONG_S = 1e6
WIDE = Retention(LONG_S, 1 << 30)


def kept(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.kept"))


def rolled(folder: Path, segments: int, retention: Retention, **more: object) -> Journal:
    """A journal of segments of one frame each."""
    journal = begun(folder, retention=retention, **more)
    for at in range(segments):
        journal.roll()
        journal.append(a_frame(at, epoch=journal.epoch))
    return journal


def let_all_go(journal: Journal) -> int:
    end = Position(Epoch(journal.epoch + 1), Offset(0))
    return journal.truncate(end, end)


class SmallDisk(OsDevice):
    """A disk with so much room, which what is removed gives back."""

    def __init__(self, room: int) -> None:
        self.room = room

    def write(self, file: int, pieces: Sequence[memoryview]) -> int:
        size = sum(len(piece) for piece in pieces)
        if size > self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.room -= size
        return super().write(file, pieces)

    def remove(self, path: Path) -> None:
        if path.exists():
            self.room += path.stat().st_size
        super().remove(path)


def test_a_block_that_left_before_a_restart_is_explained_after_it(
    tmp_path: Path, nats_url: str, cluster: str, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = settings_of(tmp_path, nats_url, cluster, pools__nvme__slots=64)
    folder = journal_folder(settings)
    gone = hashes_of(1, 1)
    with opened(settings) as manager:
        serve(manager, 1, 4)
        assert manager.settle(WAIT_S)
        for tier in (Tier.HBM, Tier.NVME):
            manager.evict(tier, gone, EvictReason.CLEARED)
        eventually(lambda: is_published(manager), "the stream does not come")
    for _ in range(3):
        with opened(settings) as manager:
            epoch = manager.epoch
            serve(manager, 2, 4)
            eventually(lambda: is_published(manager), "the stream does not come")
            newest = f"{epoch:010d}-*.kvbj"
            eventually(
                lambda newest=newest: set(folder.glob("*.kvbj")) == set(folder.glob(newest)),
                "the epochs before are still counted as the journal's",
            )
    assert replay(["verify", str(folder)]) == 0, capsys.readouterr().out
    assert "4 epochs" in capsys.readouterr().out
    assert replay(["cat", str(folder), "--json"]) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if gone.hex() in line and "BlocksEvicted" in line]
    assert {json.loads(line)["epoch"] for line in said} == {1}, said
    assert replay(["state", str(folder), "--at", "e1+2", "--blocks"]) == 0


def test_history_whose_beginning_was_trimmed_is_no_finding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal = rolled(tmp_path, 6, WIDE)
    journal.begin_epoch(Epoch(2))
    journal.append(a_frame(0, epoch=2))
    let_all_go(journal)
    (tmp_path / kept(tmp_path)[0]).unlink()
    (tmp_path / kept(tmp_path)[0]).unlink()
    assert replay(["cat", str(tmp_path)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in said] == ["e1+2", "e1+3", "e1+4", "e1+5", "e2+0"]
    replay(["verify", str(tmp_path)])
    assert "missing" not in capsys.readouterr().out
    journal.close()


def test_history_is_neither_recovered_nor_published_nor_counted(tmp_path: Path) -> None:
    journal = rolled(tmp_path, 5, WIDE, capacity_bytes=6 * FRAME_BYTES)
    assert let_all_go(journal) == 4
    assert len(kept(tmp_path)) == 4
    assert journal.used_bytes == FRAME_BYTES
    assert journal.history_bytes == 4 * FRAME_BYTES
    journal.close()
    for _ in range(2):  # a restart takes nothing of it up again
        journal = Journal.open(tmp_path, INSTANCE, NATIVE, JournalOptions(retention=WIDE))
        assert [frame.first_offset for frame in journal.read_after(ORIGIN, 1 << 20)] == [4]
        assert (journal.used_bytes, journal.history_bytes) == (FRAME_BYTES, 4 * FRAME_BYTES)
        journal.close()


def test_the_oldest_goes_first_when_the_folder_is_larger_than_it_may_be(tmp_path: Path) -> None:
    most = Retention(LONG_S, 6 * FRAME_BYTES)
    journal = rolled(tmp_path, 6, most)
    let_all_go(journal)
    assert len(kept(tmp_path)) == 5
    journal.append_all([a_frame(at) for at in (6, 7, 8)])  # what is needed comes before history
    assert [name[11:31] for name in kept(tmp_path)] == [f"{3:020d}", f"{4:020d}"]
    assert journal.used_bytes + journal.history_bytes == most.max_bytes
    journal.close()
    Journal.open(tmp_path, INSTANCE, NATIVE, JournalOptions(retention=Retention(LONG_S, 5 * FRAME_BYTES))).close()
    assert [name[11:31] for name in kept(tmp_path)] == [f"{4:020d}"]


def test_what_is_too_old_goes_and_without_a_time_nothing_stays(tmp_path: Path) -> None:
    journal = rolled(tmp_path, 4, WIDE)
    let_all_go(journal)
    journal.close()
    old = tmp_path / kept(tmp_path)[0]
    os.utime(old, (time.time() - 2 * LONG_S,) * 2)
    Journal.open(tmp_path, INSTANCE, NATIVE, JournalOptions(retention=WIDE)).close()
    assert not old.exists()
    assert len(kept(tmp_path)) == 2
    journal = Journal.open(tmp_path, INSTANCE, NATIVE)
    journal.begin_epoch(Epoch(2))
    journal.append(a_frame(0, epoch=2))
    let_all_go(journal)
    assert kept(tmp_path) == []
    assert all_frames(journal) == [a_frame(0, epoch=2)]
    journal.close()


@pytest.mark.parametrize("write", ["append", "epoch"])
def test_a_full_disk_takes_history_before_it_refuses_a_write(tmp_path: Path, write: str) -> None:
    disk = SmallDisk(room=1 << 20)
    journal = rolled(tmp_path, 6, WIDE, device=disk)
    let_all_go(journal)
    assert len(kept(tmp_path)) == 5
    disk.room = FRAME_BYTES // 2
    if write == "append":
        journal.append(a_frame(6))
        assert len(kept(tmp_path)) == 4
    else:
        journal.begin_epoch(Epoch(2))
        assert len(kept(tmp_path)) in (3, 4)
    disk.room = 0
    while kept(tmp_path):
        journal.append(a_frame(journal.read_after(ORIGIN, 1 << 20)[-1].next_offset))
    with pytest.raises(OSError, match="No space"):
        journal.append(a_frame(90))
    journal.close()


def test_a_journal_that_is_full_gives_up_no_history_for_it(tmp_path: Path) -> None:
    journal = rolled(tmp_path, 4, WIDE, capacity_bytes=4 * FRAME_BYTES)
    let_all_go(journal)
    journal.append_all([a_frame(at) for at in (4, 5, 6)])
    with pytest.raises(OSError, match="no room"):
        journal.append(a_frame(7))
    assert len(kept(tmp_path)) == 3
    journal.close()


def test_an_epoch_is_above_those_of_which_only_history_is_left(tmp_path: Path) -> None:
    journal = begun(tmp_path, retention=WIDE)
    for epoch in (2, 3):
        journal.begin_epoch(Epoch(epoch))
        journal.append(a_frame(0, epoch=epoch))
    let_all_go(journal)
    journal.close()
    for path in [*tmp_path.glob("*.kvbj"), tmp_path / "EPOCH"]:
        path.unlink()
    journal = Journal.open(tmp_path, INSTANCE, NATIVE, JournalOptions(retention=WIDE))
    assert journal.epoch == 2
    journal.close()


def test_a_segment_that_becomes_history_while_it_is_read_is_read(tmp_path: Path) -> None:
    from kvbm.replay.opening import open_source

    journal = rolled(tmp_path, 4, WIDE)
    source = open_source(str(tmp_path))
    let_all_go(journal)
    assert len(list(source.read(NATIVE))) == 4
    journal.close()


def test_a_bound_below_what_the_journal_needs_is_refused(tmp_path: Path) -> None:
    from kvbm.config import check_settings, load_settings

    with pytest.raises(ConfigError, match=r"journal\.max_bytes is 1; it must be at least"):
        check_settings(load_settings(flags={"journal.max_bytes": 1}))


# -- small files that are damaged --------------------------------------------------------------------------------------


def test_each_flipped_byte_of_an_epoch_file_is_noticed_and_costs_only_what_it_said(tmp_path: Path) -> None:
    journal = begun(tmp_path, run="a-run")
    journal.begin_epoch(Epoch(7), "a-pool")
    journal.append(a_frame(0, epoch=7))
    journal.close()
    path = tmp_path / "EPOCH"
    good = path.read_bytes()
    for at in range(len(good)):
        for flip in (1, 0x80):
            data = bytearray(good)
            data[at] ^= flip
            path.write_bytes(data)
            journal = Journal.open(tmp_path, INSTANCE, NATIVE)
            assert (journal.epoch, journal.pool_id) in ((7, ""), (7, "a-pool")), (at, flip)
            if journal.pool_id:  # only where the file says the same as before
                assert (tmp_path / "EPOCH").exists()
                assert journal.run_of(Epoch(7)) == "a-run", (at, flip)
            journal.close()
    path.write_bytes(good)
    journal = Journal.open(tmp_path, INSTANCE, NATIVE)
    assert (journal.pool_id, journal.run_of(Epoch(7))) == ("a-pool", "a-run")
    journal.close()


def _directory(path: Path) -> None:
    path.unlink()
    (path / "within").mkdir(parents=True)


def _link_to_itself(path: Path) -> None:
    path.unlink()
    path.symlink_to(path)  # cannot be read, also by root


DAMAGES: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-9]),
    "no text": lambda path: path.write_bytes(b"\xff\xfe"),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\x00"),
    "another": lambda path: path.write_bytes(b"{}"),
    "a directory": _directory,
    "unreadable": _link_to_itself,
    "huge epoch": lambda path: path.write_bytes(b'{"instance":"instance-0","epoch":18446744073709551615}'),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_epoch_file_is_put_aside_and_slots_give_back_what_the_journal_no_longer_says(
    tmp_path: Path, damage: str
) -> None:
    settings = settings_of(tmp_path, "", "tests", nats__enabled=False, pools__nvme__slots=64)
    folder = journal_folder(settings)
    for times in (1, 2):
        with opened(settings) as manager:
            serve(manager, 1, 4)
            assert manager.settle(WAIT_S)
            epoch = manager.epoch
        DAMAGES[damage](folder / "EPOCH")
        with opened(settings) as manager:
            assert manager.epoch > epoch
            assert not manager.trouble()
            assert_held(manager)
        assert len(list(folder.glob("EPOCH.damaged*"))) == times
    with opened(settings) as manager:
        serve(manager, 1, 4)
        assert manager.settle(WAIT_S)
    with opened(settings) as manager:
        assert_held(manager)


def assert_held(manager: Any) -> None:
    eventually(
        lambda: SequenceHash(hashes_of(1, 1)) in manager.held(Tier.NVME), "what NVME's slots prove does not come back"
    )


@pytest.mark.parametrize("left", ["segments", "the stream"])
def test_the_life_after_a_damaged_epoch_file_is_above_all_that_is_known_and_has_a_run_of_its_own(
    tmp_path: Path, nats_url: str, cluster: str, left: str
) -> None:
    settings = settings_of(tmp_path, nats_url, cluster, nats__enabled=left == "the stream")
    folder = journal_folder(settings)
    runs = set()
    for epoch in (1, 2, 3):
        with opened(settings) as manager:
            runs.add(manager.run)
            assert manager.epoch == epoch
            serve(manager, 1, 4)
            eventually(lambda manager=manager: left == "segments" or is_published(manager), "the stream does not come")
    (folder / "EPOCH").write_bytes(b"")
    if left == "the stream":
        for path in [*folder.glob("*.kvbj"), *folder.glob("*.kept")]:
            path.unlink()
    with opened(settings) as manager:
        assert manager.epoch == 4
        assert manager.run not in runs
        assert b"crc32c" in (folder / "EPOCH").read_bytes()


def test_a_folder_of_another_instance_is_told_by_its_segments_too(tmp_path: Path) -> None:
    rolled(tmp_path, 2, WIDE).close()
    (tmp_path / "EPOCH").unlink()
    with pytest.raises(JournalError, match="is of instance 'instance-0', not 'other'"):
        Journal.open(tmp_path, type(INSTANCE)("other"), NATIVE)


def test_no_damaged_small_file_of_an_instance_stops_its_start(tmp_path: Path) -> None:
    pod = tmp_path / "pod"
    pod.mkdir()
    settings = settings_of(tmp_path / "data", "", "tests", pools__nvme__slots=64, pools__nvme__folder=str(pod))

    def start(wanted: set[SequenceHash] | None = None, why: object = "") -> list[SequenceHash]:
        with opened(settings) as manager:
            serve(manager, 1, 4)
            assert manager.settle(WAIT_S)
            assert not manager.trouble()
            eventually(lambda: is_published(manager), "the stream does not come")
            # where the journal's epoch is damaged, slots are proven beside what is served
            return (
                eventually(lambda: manager.held(Tier.NVME), "NVME has nothing")
                if wanted is None
                else eventually(
                    lambda: set(manager.held(Tier.NVME)) == wanted and manager.held(Tier.NVME),
                    f"NVME has not what it had: {why}",
                )
            )

    held = set(start())
    assert held
    files = [path for root in (tmp_path / "data", pod) for path in root.rglob("*") if path.is_file()]
    small = [path for path in files if "jetstream" not in path.parts and path.suffix not in (".kvbj", ".kept")]
    assert {"EPOCH", "LOCK", "nats.lock", "nats-server.conf", "nats-server.log"} <= {path.name for path in small}
    assert {".pool", ".slots"} <= {path.suffix for path in small}
    for path in small:
        for damage in (b"\xff", b"\x00" * 4096):
            size = path.stat().st_size
            for at in (0, 20, size // 2) if len(damage) == 1 else (0,):  # in a magic, in a text, in the middle
                with path.open("r+b") as file:
                    file.seek(at)
                    file.write(damage)
                start(held, (path, damage, at))
