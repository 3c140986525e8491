"""The archive's files: every message once, in order, whatever was torn, full or replaced."""

from __future__ import annotations

import errno
import os
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import pytest
from structlog.testing import capture_logs

from kvbm.assembly import NATIVE
from kvbm.catalog.follow.archive import ArchiveFiles
from kvbm.core.codec import Frame, decode_frame, encode_frame
from kvbm.core.errors import CatalogError
from kvbm.core.events import BlocksCreated, Event, UsageRecorded, UsageRow
from kvbm.core.ids import Epoch, InstanceId, NamespaceId, Offset, Tier
from kvbm.erasure.archive import Meant, rewrite_frames, rewrite_samples
from kvbm.replay.scan import Damage, scan
from kvbm.streams.access_samples import encode_sample, read_samples
from kvbm.streams.base import AccessSample, Fence, StreamMessage, fence_data
from kvbm.streams.fence_records import encode_fence, encode_told

SAMPLE = AccessSample(
    instance=InstanceId("one"),
    cluster="c",
    wall_time_ns=1,
    namespace=NamespaceId(bytes(16)),
    hashes=bytes(16),
    depth=0,
    rate=1.0,
)
DAY_NS = 86_400 * 10**9


def message(sequence: int) -> StreamMessage:
    return StreamMessage(sequence, "kvbm.v1.events.c.one", b"<%06d>" % sequence)  # 8 bytes


def messages(first: int, end: int) -> list[StreamMessage]:
    return [message(sequence) for sequence in range(first, end)]


def content(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(folder.glob("*.kvbm")))


def written(*sequences: int) -> bytes:
    return b"".join(message(sequence).data for sequence in sequences)


def test_messages_become_files_named_by_their_first_sequence(tmp_path: Path) -> None:
    archive = ArchiveFiles.open(tmp_path, file_bytes=32)
    assert archive.follow("now", 1, 0) == 0
    archive.append(messages(1, 4))
    archive.append(messages(4, 7))
    archive.close()
    assert sorted(path.name for path in tmp_path.glob("*.kvbm")) == [f"{1:020}.kvbm", f"{5:020}.kvbm"]
    assert content(tmp_path) == written(*range(1, 7))


@pytest.mark.parametrize("torn", [0, 1, 8, 11])
def test_what_lies_beyond_the_position_is_cut_and_read_again(tmp_path: Path, torn: int) -> None:
    archive = ArchiveFiles.open(tmp_path)
    archive.follow("now", 1, 9)
    archive.append(messages(1, 4))
    archive.sync()
    with (tmp_path / f"{1:020}.kvbm").open("ab") as file:
        file.write((written(4) * 2)[:torn])
    again = ArchiveFiles.open(tmp_path)
    assert again.follow("now", 1, 9) == 3
    again.append(messages(4, 6))
    again.close()
    assert content(tmp_path) == written(*range(1, 6))


def test_a_device_that_takes_little_at_once_gets_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: write(file, bytes(data)[:7]))
    archive = ArchiveFiles.open(tmp_path)
    archive.follow("now", 1, 9)
    archive.append(messages(1, 4))
    archive.close()
    monkeypatch.undo()
    assert content(tmp_path) == written(1, 2, 3)
    assert ArchiveFiles.open(tmp_path).follow("now", 1, 9) == 3  # half a position would be none: its file is read again


def test_files_begun_after_the_position_was_written_are_read_again(tmp_path: Path) -> None:
    archive = ArchiveFiles.open(tmp_path, file_bytes=16)
    archive.follow("now", 1, 9)
    archive.append(messages(1, 3))
    archive.sync()
    (tmp_path / f"{3:020}.kvbm").write_bytes(b"half")
    again = ArchiveFiles.open(tmp_path, file_bytes=16)
    assert again.follow("now", 1, 9) == 2
    again.append(messages(3, 6))
    again.close()
    assert content(tmp_path) == written(*range(1, 6))


def test_a_lost_position_costs_the_last_file_which_is_read_again(tmp_path: Path) -> None:
    archive = ArchiveFiles.open(tmp_path, file_bytes=16)
    archive.follow("now", 1, 9)
    archive.append(messages(1, 6))
    archive.close()
    (tmp_path / "POSITION").write_bytes(b"{}\n00000000\n")
    again = ArchiveFiles.open(tmp_path, file_bytes=16)
    assert again.follow("now", 1, 9) == 4
    again.append(messages(5, 8))
    again.close()
    assert content(tmp_path) == written(*range(1, 8))


def test_a_full_disk_is_an_error_and_the_same_call_goes_on_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = ArchiveFiles.open(tmp_path)
    archive.follow("now", 1, 9)
    archive.append(messages(1, 3))
    real = os.write

    def full(file: int, data: bytes) -> int:
        if len(data) > 3:
            return real(file, bytes(data)[:3])  # the disk takes a little, then no more
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(os, "write", full)
        for _ in range(2):
            with pytest.raises(CatalogError, match="No space left on device"):
                archive.append(messages(3, 5))
        assert content(tmp_path) == written(1, 2)
    archive.append(messages(3, 5))
    archive.close()
    assert content(tmp_path) == written(1, 2, 3, 4)
    assert ArchiveFiles.open(tmp_path).position.sequence == 4


def test_of_a_batch_that_failed_behind_its_first_file_that_file_is_written_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = ArchiveFiles.open(tmp_path, file_bytes=24)
    archive.follow("now", 1, 9)
    archive.append(messages(1, 2))
    real, written_to = os.write, list[int]()

    def full(file: int, data: bytes) -> int:
        written_to.append(file)
        if len(written_to) > 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(file, data)

    with monkeypatch.context() as disk:
        disk.setattr(os, "write", full)
        with pytest.raises(CatalogError, match="No space left on device"):
            archive.append(messages(2, 6))
    assert archive.position.sequence == 3
    archive.append(messages(2, 6))
    archive.close()
    assert content(tmp_path) == written(*range(1, 6))


def test_a_replaced_store_begins_files_that_sort_after_the_old_ones(tmp_path: Path) -> None:
    archive = ArchiveFiles.open(tmp_path)
    archive.follow("now", 1, 9)
    archive.append(messages(1, 4))
    archive.close()
    again = ArchiveFiles.open(tmp_path)
    assert again.follow("later", 1, 9) == 0
    again.append(messages(1, 3))
    again.append(messages(1, 6))  # and once more, this time while it is read
    again.close()
    assert content(tmp_path) == written(1, 2, 3, 1, 2, 1, 2, 3, 4, 5)
    third = ArchiveFiles.open(tmp_path)
    assert (third.position.generation, third.follow("later", 1, 9)) == (3, 5)


def test_a_stream_that_has_lost_its_end_is_another_one(tmp_path: Path) -> None:
    archive = ArchiveFiles.open(tmp_path)
    archive.follow("now", 1, 9)
    archive.append(messages(1, 4))
    assert archive.follow("now", 1, 2) == 0


def test_strays_are_left_out_and_a_fence_that_only_messages_tell_of_is_kept_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = Fence(Epoch(1), "one's", 1), Fence(Epoch(1), "other's", 1)
    later = Fence(Epoch(2), "later's", 7)
    read = [
        StreamMessage(1, "kvbm.v1.fence.c.one", fence_data(Epoch(1), "one's")),
        message(2)._replace(fence=one),
        message(3)._replace(fence=other),  # a stray
        message(4)._replace(fence=later),  # its fence was never read
        message(5)._replace(fence=later),
    ]
    archive = ArchiveFiles.open(tmp_path, file_bytes=200)
    archive.follow("now", 1, 5)
    write, writes = os.write, []

    def full_at_first(file: int, data: bytes) -> int:
        writes.append(len(data))
        if len(writes) == 1:
            raise OSError(errno.ENOSPC, "no space")
        return write(file, data)

    monkeypatch.setattr(os, "write", full_at_first)
    with pytest.raises(CatalogError):
        archive.append(read)
    archive.append(read)
    archive.close()
    assert content(tmp_path) == b"".join(
        [encode_fence(read[0]), written(2), encode_told(read[3], later), written(4, 5)]
    )
    assert archive.position.sequence == 5


def test_a_fence_of_a_store_that_is_gone_makes_no_stray_of_what_the_next_one_has(tmp_path: Path) -> None:
    archive = ArchiveFiles.open(tmp_path)
    archive.follow("now", 1, 9)
    archive.append([StreamMessage(1, "kvbm.v1.fence.c.one", fence_data(Epoch(1), "one's"))])
    before = content(tmp_path)
    archive.follow("later", 2, 9)  # its first message, the other's fence, has aged out
    archive.append([message(2)._replace(fence=Fence(Epoch(1), "other's", 1))])
    archive.close()
    assert content(tmp_path) == before + message(2).data


def test_messages_that_aged_out_before_their_turn_are_counted(tmp_path: Path) -> None:
    archive = ArchiveFiles.open(tmp_path)
    archive.follow("now", 1, 9)
    archive.append(messages(1, 4))
    with capture_logs() as logs:
        assert archive.follow("now", 6, 9) == 3
    assert archive.lost == 2
    assert [entry["event"] for entry in logs] == ["archive.messages_missed"]


def test_samples_go_to_the_file_of_their_day_and_a_torn_one_is_cut(tmp_path: Path) -> None:
    archive = ArchiveFiles.open(tmp_path)
    archive.append_samples(0, [SAMPLE])
    archive.append_samples(DAY_NS, [SAMPLE, SAMPLE])
    files = sorted((tmp_path / "samples").iterdir())
    assert [path.name for path in files] == ["1970-01-01.samples", "1970-01-02.samples"]
    os.truncate(files[1], files[1].stat().st_size - 1)
    ArchiveFiles.open(tmp_path).append_samples(DAY_NS, [SAMPLE])
    assert list(read_samples(tmp_path / "samples")) == [SAMPLE] * 3


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(CatalogError, match="takes nothing more"):
        ArchiveFiles.open(tmp_path / "file")


def test_the_command_takes_the_archives_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvbm import assembly, cli
    from kvbm.config import Settings

    served: list[Settings] = []
    monkeypatch.setattr(assembly, "run_catalog", lambda settings, *_: served.append(settings) or 0)
    assert cli.catalog_main(["serve", "--archive", "somewhere", "--set", "catalog.listen=127.0.0.1:0"]) == 0
    assert [(settings.catalog.archive, settings.catalog.listen) for settings in served] == [
        ("somewhere", "127.0.0.1:0")
    ]


def test_an_archive_of_a_newer_kvbm_is_refused_in_words_and_left_alone(tmp_path: Path) -> None:
    archive = ArchiveFiles.open(tmp_path)
    archive.follow("now", 1, 9)
    archive.append(messages(1, 4))
    archive.close()
    position = tmp_path / "POSITION"
    body = position.read_bytes().rpartition(b"\n")[0].rpartition(b"\n")[0]
    assert b'"version":1,' in body
    body = body.replace(b'"version":1,', b'"version":2,"more":[],')
    position.write_bytes(body + b"\n%08x\n" % zlib.crc32(body))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    with pytest.raises(CatalogError, match=r"is of a newer kvbm, version 2; this one writes version 1: upgrade"):
        ArchiveFiles.open(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before


VICTIM, OTHER = NamespaceId(b"v" * 16), NamespaceId(b"o" * 16)


def block_message(sequence: int, namespace: NamespaceId) -> StreamMessage:
    event = BlocksCreated(namespace=namespace, tier=Tier.HBM, hashes=bytes(namespace))
    frame = Frame(
        instance=InstanceId("one"),
        epoch=Epoch(1),
        first_offset=Offset(sequence - 1),
        wall_time_ns=sequence,
        digest=0,
        events=(event,),
    )
    return StreamMessage(sequence, "kvbm.v1.events.c.one", encode_frame(frame))


def of_victim(frame: Frame) -> bool:
    return any(isinstance(event, BlocksCreated) and event.namespace == VICTIM for event in frame.events)


def with_blocks(folder: Path) -> ArchiveFiles:
    archive = ArchiveFiles.open(folder)
    archive.follow("now", 1, 4)
    archive.append([block_message(at, VICTIM if at == 2 else OTHER) for at in range(1, 5)])
    archive.sync()
    return archive


def erase(archive: ArchiveFiles, frame: Callable[[Frame], bool]) -> int:
    meant = Meant(frame, lambda _: False, lambda _: False, 1)
    return archive.rewrite(partial(rewrite_frames, meant=meant), partial(rewrite_samples, meant=meant))


def test_an_erasure_that_dies_before_the_position_is_moved_costs_no_frame_of_others(tmp_path: Path) -> None:
    archive = with_blocks(tmp_path)
    positions = []

    def frame(found: Frame) -> bool:
        positions.append((tmp_path / "POSITION").read_bytes())
        return of_victim(found)

    assert erase(archive, frame) == 1
    kept = content(tmp_path)
    assert bytes(VICTIM) not in kept and kept.count(bytes(OTHER)) == 3 * block_message(1, OTHER).data.count(
        bytes(OTHER)
    )
    (tmp_path / "POSITION").write_bytes(positions[-1])
    with capture_logs() as logs:
        again = ArchiveFiles.open(tmp_path)
    assert not logs and again.follow("now", 1, 4) == 4
    again.append([block_message(5, OTHER)])
    again.close()
    assert content(tmp_path) == kept + block_message(5, OTHER).data


def test_what_an_erasure_that_died_has_half_written_goes_with_the_next(tmp_path: Path) -> None:
    archive = with_blocks(tmp_path)
    left = [tmp_path / f"{1:020}.kvbm.part", tmp_path / "samples" / "2026-11-21.samples.part"]
    for path in left:
        path.write_bytes(VICTIM)
    erase(archive, lambda _: False)
    assert not any(path.exists() for path in left)


def test_a_damaged_record_in_an_archive_hides_no_frame_from_an_erasure(tmp_path: Path) -> None:
    folder = tmp_path / "archive"
    with_blocks(folder).close()
    (path,) = folder.glob("*.kvbm")
    frames = path.read_bytes()
    path.write_bytes(
        b"KVBE\x01\0\0\0" + (len(frames) - 16).to_bytes(4, "little") + frames
    )  # a head that counts all as its own
    size = path.stat().st_size
    (folder / "POSITION").unlink()
    assert size < 4096
    assert rewrite_frames(path, Meant(of_victim, lambda _: False, lambda _: False, 1)) == 2
    assert bytes(VICTIM) not in path.read_bytes() and path.read_bytes().count(bytes(OTHER)) >= 3


def test_usage_of_other_tenants_stays_also_out_of_frames_that_go(tmp_path: Path) -> None:
    def usage(*tenants: str) -> UsageRecorded:
        rows = tuple(UsageRow(tenant, saved_tokens=7) for tenant in tenants)
        return UsageRecorded(since_ms=3_600_000, until_ms=3_600_001, rows=rows)

    created = BlocksCreated(namespace=VICTIM, tier=Tier.HBM, hashes=bytes(VICTIM))
    others = msgspec.structs.replace(created, namespace=OTHER, hashes=bytes(OTHER))

    def frame(first: int, *events: Event) -> Frame:
        where = {"instance": InstanceId("one"), "epoch": Epoch(1), "first_offset": Offset(first), "wall_time_ns": 5}
        return Frame(digest=9, events=events, **where)

    frames = [  # the other events of one that goes have records in their place
        frame(0, created, usage("acme", "other"), created, created, usage("acme")),
        frame(5, others, usage("acme", "other")),
        frame(7, others, usage("other")),
    ]
    path = tmp_path / "some.kvbm"
    path.write_bytes(b"".join(map(encode_frame, frames)))
    meant = Meant(of_victim, lambda _: False, lambda tenant: tenant == "acme", 77)
    assert rewrite_frames(path, meant) == 2
    data = path.read_bytes()
    kept = [
        (piece.found.header.event_count, None)
        if isinstance(piece.found, Damage) and piece.found.header
        else (0, decode_frame(piece.data)[0].events)
        for piece in scan(lambda at, size: data[at : at + size], len(data), NATIVE)
    ]
    assert kept == [
        (1, None),
        (0, (usage("other"),)),
        (2, None),
        (0, (usage(),)),
        (0, (others, usage("other"))),
        (0, (others, usage("other"))),
    ]
    assert rewrite_frames(path, meant) == 0


def test_damaged_samples_go_with_an_erasure_also_where_none_is_meant(tmp_path: Path) -> None:
    path = tmp_path / "day.samples"
    good = encode_sample(SAMPLE)
    bad = bytearray(encode_sample(msgspec.structs.replace(SAMPLE, namespace=VICTIM)))
    bad[-1] ^= 1
    path.write_bytes(good + bytes(bad) + good)
    meant = Meant(of_victim, lambda sample: sample.namespace == VICTIM, lambda _: False, 1)
    assert rewrite_samples(path, meant) == 1
    assert path.read_bytes() == good * 2 and [one.name for one in tmp_path.iterdir()] == [path.name]
