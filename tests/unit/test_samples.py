"""Files of sampled accesses."""

from __future__ import annotations

from pathlib import Path

from kvbm.core.ids import InstanceId, NamespaceId
from kvbm.streams.access_samples import encode_sample, read_samples, whole_bytes
from kvbm.streams.base import AccessSample


def sample(number: int) -> AccessSample:
    return AccessSample(
        instance=InstanceId("instance-0"),
        cluster="test",
        wall_time_ns=number,
        namespace=NamespaceId(b"n" * 16),
        hashes=bytes([number]) * 32,
        depth=1,
        rate=0.1,
    )


def test_samples_come_back_in_the_order_in_which_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "2026-11-21.samples"
    path.write_bytes(b"".join(encode_sample(sample(number)) for number in range(3)))
    assert list(read_samples(path)) == [sample(0), sample(1), sample(2)]


def test_a_folder_is_read_file_by_file_by_name(tmp_path: Path) -> None:
    (tmp_path / "2026-11-22.samples").write_bytes(encode_sample(sample(2)))
    (tmp_path / "2026-11-21.samples").write_bytes(encode_sample(sample(1)))
    assert list(read_samples(tmp_path)) == [sample(1), sample(2)]


def test_a_damaged_sample_is_left_out_and_a_torn_one_ends_the_file(tmp_path: Path) -> None:
    records = [encode_sample(sample(number)) for number in range(3)]
    records[1] = records[1][:-1] + bytes([records[1][-1] ^ 1])
    path = tmp_path / "day.samples"
    path.write_bytes(b"".join(records) + encode_sample(sample(3))[:-1])
    assert list(read_samples(path)) == [sample(0), sample(2)]
    assert whole_bytes(path) == sum(map(len, records))


def test_a_length_that_cannot_be_ends_the_file(tmp_path: Path) -> None:
    path = tmp_path / "day.samples"
    path.write_bytes(encode_sample(sample(0)) + b"\xff" * 64)
    assert list(read_samples(path)) == [sample(0)]
    assert whole_bytes(path) == len(encode_sample(sample(0)))
