"""Each native function equals its specification: on what is good, and in how it refuses what is not."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvbm import _native
from kvbm.core import checksum, codec, columns, hashing
from kvbm.core import fold as residency
from kvbm.core.backend import reference_checksums
from kvbm.core.codec import Frame
from kvbm.core.columns import FrameColumns
from kvbm.core.errors import (
    CorruptFrameError,
    FrameError,
    KvbmError,
    LayoutError,
    MalformedFrameError,
    TornFrameError,
)
from kvbm.core.events import BlocksCreated, BlocksEvicted, EvictReason, InstanceStarted, InstanceStopped, StopReason
from kvbm.core.ids import Epoch, InstanceId, NamespaceId, Offset, SequenceHash, Tier
from tests.examples import examples
from tests.strategies import frames, hashes

ROOT = bytes(range(16))
INTEGER_DTYPES = ["u1", "u2", "<u4", ">u4", "u8", "i1", "i2", "i4", "<i8", ">i8"]


def outcome(function: Callable[..., object], *arguments: object) -> object:
    """What a call gives, or the class, place and words of its refusal."""
    try:
        return function(*arguments)
    except FrameError as error:
        return type(error), error.at, str(error)
    except KvbmError as error:
        return type(error)


def with_checksum(data: bytes) -> bytes:
    """The same bytes as a frame whose length and checksum fit them."""
    body = bytearray(data[:-4])
    body[8:12] = len(data).to_bytes(4, "little")
    return bytes(body) + _native.crc32c(body).to_bytes(4, "little")


def agree_on(data: bytes, at: int = 0) -> object:
    native, reference = outcome(_native.decode_frame, data, at), outcome(codec.decode_frame, data, at)
    assert native == reference
    agree_on_columns(data, at)
    return native


def agree_on_columns(data: bytes, at: int = 0, limit: int | None = None) -> object:
    """Both read the same columns, or refuse the same frame in the same words."""
    native = outcome(_native.decode_columns, data, at, limit)
    reference = outcome(columns.decode_columns, data, at, limit)
    if isinstance(native, tuple) and isinstance(native[0], FrameColumns):
        assert isinstance(reference, tuple) and native[1] == reference[1]
        for ours, theirs in zip(native[0], reference[0], strict=True):
            if isinstance(ours, np.ndarray):
                assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
                assert (ours == theirs).all()
            else:
                assert ours == theirs
    else:
        assert native == reference
    return native


# -- frames ------------------------------------------------------------------------------------------------------------


@given(frames(), st.binary(max_size=20), st.binary(max_size=20))
def test_both_write_the_same_bytes_and_read_them_back_anywhere_in_a_buffer(frame: Frame, before: bytes, after: bytes):
    data = codec.encode_frame(frame)
    assert _native.encode_frame(frame) == data
    buffer = before + data + after
    for decode in (_native.decode_frame, codec.decode_frame):
        again, end = decode(buffer, len(before))
        assert (again, end) == (frame, len(before) + len(data))
        assert _native.decode_frame(bytearray(buffer), len(before))[0] == frame
        assert _native.encode_frame(again) == data


@given(frames())
def test_decoded_fields_have_the_types_of_the_specification(frame: Frame):
    decoded, _ = _native.decode_frame(codec.encode_frame(frame))
    for ours, theirs in zip(decoded.events, frame.events, strict=True):
        assert type(ours) is type(theirs)
        for field in ours.__struct_fields__:
            assert type(getattr(ours, field)) is type(getattr(theirs, field))


@given(frames(), st.data())
def test_a_changed_byte_is_refused_as_the_specification_refuses_it(frame: Frame, draw: st.DataObject):
    data = bytearray(codec.encode_frame(frame))
    position = draw.draw(st.integers(0, len(data) - 1))
    data[position] ^= draw.draw(st.integers(1, 255))
    refusal = agree_on(bytes(data))
    assert isinstance(refusal, tuple) and isinstance(refusal[0], type) and issubclass(refusal[0], FrameError)


@given(frames(), st.data())
def test_a_truncated_frame_is_refused_as_the_specification_refuses_it(frame: Frame, draw: st.DataObject):
    data = codec.encode_frame(frame)
    agree_on(data[: draw.draw(st.integers(0, len(data) - 1))])
    agree_on(data, draw.draw(st.integers(1, 2 * len(data))))


@settings(max_examples=examples(600))
@given(frames(max_events=4), st.data())
def test_hostile_contents_under_a_good_checksum_have_one_outcome(frame: Frame, draw: st.DataObject):
    data = bytearray(codec.encode_frame(frame))
    for _ in range(draw.draw(st.integers(1, 3))):
        position = draw.draw(st.integers(6, len(data) - 5))
        match draw.draw(st.integers(0, 3)):
            case 0:
                data[position] = draw.draw(st.integers(0, 255))
            case 1:
                data[position : position + 4] = draw.draw(st.binary(max_size=8))
            case 2:
                data[position] ^= 1 << draw.draw(st.integers(0, 7))
            case _:
                piece = draw.draw(st.integers(0, len(data) - 5))
                data[position:position] = data[piece : piece + draw.draw(st.integers(1, 40))]
    result = agree_on(with_checksum(bytes(data)))
    assert isinstance(result, tuple)
    if isinstance(result[0], Frame):
        assert _native.encode_frame(result[0]) == codec.encode_frame(result[0]) == with_checksum(bytes(data))


@settings(max_examples=examples(300))
@given(st.binary(max_size=200), st.integers(0, 3), st.integers(0, 2**32 - 1))
def test_any_body_has_one_outcome(body: bytes, namespace_count: int, event_count: int):
    header = b"KVBM\x01\x00\x01" + bytes([namespace_count]) + bytes(4) + event_count.to_bytes(4, "little") + bytes(32)
    agree_on(with_checksum(header + b"i" + body + bytes(4)))
    agree_on(body)


STARTS = [
    InstanceStarted(epoch=Epoch(3), topology=("zone", "rack"), engine="e"),
    InstanceStarted(epoch=Epoch(3), engine="e", attributes={"a": b"b", "c": b"d"}),
]


@settings(max_examples=examples(300))
@given(st.data())
def test_a_start_that_is_not_canonical_is_refused(draw: st.DataObject):
    blob = bytearray(codec.encode_started(STARTS[draw.draw(st.integers(0, 1))]))
    position = draw.draw(st.integers(0, len(blob) - 1))
    blob[position : position + draw.draw(st.integers(0, 2))] = draw.draw(st.binary(max_size=4))
    event = b"\x01" + len(blob).to_bytes(4, "little") + bytes(blob)
    header = (
        b"KVBM"
        + bytes([draw.draw(st.integers(1, 3))])
        + b"\x00\x01\x00"
        + bytes(4)
        + (1).to_bytes(4, "little")
        + bytes(32)
    )
    agree_on(with_checksum(header + b"i" + event + bytes(4)))


@pytest.mark.parametrize(
    ("attributes", "words"),
    [
        ({}, ""),
        ({"a": b"b", "é": b"\xff", "of nothing": b""}, ""),
        ({f"{number}": b"" for number in range(64)}, ""),
        ({"a": b"x" * 16_383}, ""),
        ({f"{number}": b"" for number in range(65)}, "65 attributes"),
        ({"a": b"x" * 16_384}, "16385 bytes of attributes"),
        ({"": b"x"}, "name of an attribute has 0 bytes"),
        ({"n" * 256: b"x"}, "name of an attribute has 256 bytes"),
        ({"\ud800": b"a"}, "no UTF-8"),
    ],
)
def test_attributes_of_a_start_come_back_and_have_bounds(attributes: dict[str, bytes], words: str):
    frame = frame_of(InstanceStarted(epoch=Epoch(1), attributes=attributes))
    for encode, decode in ((codec.encode_frame, codec.decode_frame), (_native.encode_frame, _native.decode_frame)):
        if words:
            with pytest.raises(LayoutError, match=words):
                encode(frame)
            continue
        data = encode(frame)
        assert data[4:6] == (2 if attributes else 1).to_bytes(2, "little")  # the lowest version that suffices
        assert decode(data) == (frame, len(data))
        assert _native.scan_frames(data) == codec.scan_frames(data)
        other = data[:4] + (1 if attributes else 2).to_bytes(2, "little") + data[6:]
        refusal = agree_on(with_checksum(other))
        assert refusal[0] is MalformedFrameError and "whose events are written as version" in refusal[-1]


def test_a_start_with_the_attributes_of_another_codec_is_held_to_their_bounds():
    fields = [3, [], [], [], "", "", {str(number): b"" for number in range(65)}]
    blob = msgspec.msgpack.encode(fields)
    event = b"\x01" + len(blob).to_bytes(4, "little") + blob
    header = b"KVBM\x02\x00\x01\x00" + bytes(4) + (1).to_bytes(4, "little") + bytes(32)
    refusal = agree_on(with_checksum(header + b"i" + event + bytes(4)))
    assert refusal[0] is MalformedFrameError and "65 attributes" in refusal[-1]


def test_a_whole_newer_frame_is_told_from_a_damaged_one():
    data = codec.encode_frame(frame_of(InstanceStopped(reason=StopReason.SHUTDOWN), epoch=9))
    newer = data[:4] + b"\x09\x00" + data[6:-4]
    newer += _native.crc32c(newer).to_bytes(4, "little")
    assert codec.newer_frame(b"xx" + newer + b"more", 2) == codec.NewerFrame(9, Epoch(9))
    assert codec.newer_frame(newer, 0, _native.crc32c) == codec.NewerFrame(9, Epoch(9))
    assert codec.newer_frame(data, 0) is None
    assert codec.newer_frame(data[:4] + b"\x09" + data[5:], 0) is None  # a flipped version
    for end in range(len(newer)):
        assert codec.newer_frame(newer[:end], 0) is None


def test_a_start_whose_text_is_not_utf8_is_malformed():
    blob = codec.encode_started(InstanceStarted(epoch=Epoch(3), engine="engine")).replace(b"engine", b"engin\xff")
    event = b"\x01" + len(blob).to_bytes(4, "little") + blob
    header = b"KVBM\x01\x00\x01\x00" + bytes(4) + (1).to_bytes(4, "little") + bytes(32)
    refusal = agree_on(with_checksum(header + b"i" + event + bytes(4)))
    assert isinstance(refusal, tuple) and refusal[0] is MalformedFrameError


@given(st.binary(min_size=1, max_size=12))
@example(b"\xed\xa0\x80")
@example(b"\xf4\x90\x80\x80")
@example(b"\xc0\x80")
@example(b"\xe0\x80\x80")
@example(b"\xf0\x8f\xbf\xbf")
def test_both_take_the_same_names_for_utf8(name: bytes):
    header = b"KVBM\x01\x00" + bytes([len(name), 0]) + bytes(4) + (1).to_bytes(4, "little") + bytes(32)
    agree_on(with_checksum(header + name + b"\x07\x00" + bytes(4)))


def test_a_namespace_listed_twice_is_malformed():
    one, two = NamespaceId(b"a" * 16), NamespaceId(b"b" * 16)
    evicted = [BlocksEvicted(namespace=n, tier=Tier.HBM, reason=EvictReason.TTL, hashes=b"h" * 16) for n in (one, two)]
    data = codec.encode_frame(frame_of(*evicted))
    refusal = agree_on(with_checksum(data.replace(two, one)))
    assert isinstance(refusal, tuple) and refusal[0] is MalformedFrameError


def test_a_corrupt_frame_says_both_checksums():
    data = bytearray(codec.encode_frame(frame_of(InstanceStopped(reason=StopReason.FENCED))))
    data[50] ^= 1
    with pytest.raises(CorruptFrameError, match=r"byte 0: checksum [0-9a-f]{8} of the bytes, [0-9a-f]{8} in the frame"):
        _native.decode_frame(bytes(data))


def frame_of(*events: object, instance: str = "i", epoch: int = 1, first_offset: int = 0) -> Frame:
    return Frame(
        instance=InstanceId(instance),
        epoch=Epoch(epoch),
        first_offset=Offset(first_offset),
        wall_time_ns=0,
        digest=0,
        events=events,  # type: ignore[arg-type]
    )


def created(**changes: object) -> BlocksCreated:
    fields: dict[str, object] = {"namespace": b"n" * 16, "tier": Tier.HBM, "hashes": b"h" * 32}
    return BlocksCreated(**(fields | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "frame",
    [
        frame_of(),
        frame_of(created(), instance=""),
        frame_of(created(), instance="é" * 128),
        frame_of(created(), instance="\ud800"),
        frame_of(created(), epoch=-1),
        frame_of(created(), epoch=2**64),
        frame_of(created(), first_offset=2**64),
        frame_of(created(hashes=b"")),
        frame_of(created(hashes=b"h" * 17)),
        frame_of(created(slots=b"s" * 4)),
        frame_of(created(start=2**32)),
        frame_of(created(start=-1)),
        frame_of(created(start="1")),
        frame_of(created(parent=SequenceHash(b"p"))),
        frame_of(created(namespace=b"n")),
        frame_of(InstanceStarted(epoch=Epoch(2**64))),
        frame_of(InstanceStarted(epoch=Epoch(1), engine="\ud800")),
        frame_of(created(hashes=bytes(1 << 26))),
        frame_of(*(created(namespace=index.to_bytes(16, "big")) for index in range(256))),
    ],
    ids=range(19),
)
def test_what_does_not_fit_a_frame_is_refused_by_both(frame: Frame):
    assert outcome(codec.encode_frame, frame) is LayoutError
    assert outcome(_native.encode_frame, frame) is LayoutError


def test_as_many_namespaces_as_fit_are_written_and_read():
    frame = frame_of(*(created(namespace=index.to_bytes(16, "big")) for index in range(255)))
    data = codec.encode_frame(frame)
    assert _native.encode_frame(frame) == data
    assert _native.decode_frame(data) == (frame, len(data))


# -- columns -----------------------------------------------------------------------------------------------------------


@given(st.lists(frames(max_events=6), max_size=5), st.binary(max_size=20), st.none() | st.integers(0, 6))
def test_columns_of_many_frames_agree(several: list[Frame], before: bytes, limit: int | None):
    data = before + b"".join(map(codec.encode_frame, several))
    found = agree_on_columns(data, len(before), limit)
    assert isinstance(found, tuple)
    assert len(found[0].frames) == min(len(several), len(several) if limit is None else limit)


@given(st.lists(frames(max_events=4), min_size=2, max_size=4), st.data())
def test_columns_refuse_the_first_frame_that_is_wrong(several: list[Frame], draw: st.DataObject):
    data = bytearray(b"".join(map(codec.encode_frame, several)))
    for _ in range(draw.draw(st.integers(1, 2))):
        data[draw.draw(st.integers(0, len(data) - 1))] ^= draw.draw(st.integers(1, 255))
    agree_on_columns(bytes(data))
    agree_on_columns(bytes(data[: draw.draw(st.integers(0, len(data)))]))


def test_a_start_that_is_wrong_is_told_before_what_is_wrong_behind_it():
    start, later = (
        codec.encode_frame(frame_of(InstanceStarted(epoch=Epoch(3)))),
        codec.encode_frame(frame_of(created())),
    )
    start = with_checksum(start.replace(bytes([0x96, 3]), bytes([0x96, 0xC0])))
    found = agree_on_columns(start + later[:-1])
    assert isinstance(found, tuple) and found[:2] == (MalformedFrameError, 0)
    found = agree_on_columns(later + start[:-1])
    assert isinstance(found, tuple) and found[:2] == (TornFrameError, len(later))


def test_columns_outlive_the_buffer_they_were_read_from():
    data = bytearray(codec.encode_frame(frame_of(created(slots=b"slotslot"), instance="worker")))
    found, _ = _native.decode_columns(data)
    data[:] = bytes(len(data))
    assert found.hashes.tobytes() == b"h" * 32
    assert found.slots.tobytes() == b"slotslot"
    assert found.namespaces.tobytes() == b"n" * 16
    assert found.names == ("worker",)


# -- checksums ---------------------------------------------------------------------------------------------------------


@given(st.binary(max_size=3000), st.integers(0, 3000), st.integers(0, 2**32 - 1))
def test_checksums_agree_and_continue(data: bytes, cut: int, initial: int):
    whole = checksum.crc32c(data, initial)
    assert _native.crc32c(data, initial) == whole
    assert _native.crc32c(memoryview(data)[cut:], _native.crc32c(bytearray(data[:cut]), initial)) == whole


@pytest.mark.parametrize("size", [767, 768, 12_287, 12_288, 12_289, 40_000, 100_003])
def test_checksums_of_long_buffers_agree_at_every_alignment(size: int):
    data = np.random.default_rng(size).integers(0, 256, size + 8, dtype=np.uint8)
    for start in range(8):
        piece = data[start : start + size]
        assert _native.crc32c(piece) == checksum.crc32c(piece.tobytes())


@given(st.integers(0, 5), st.integers(0, 900), st.integers(0, 2**32))
def test_checksums_of_rows_agree(count: int, width: int, seed: int):
    rows = np.random.default_rng(seed).integers(0, 256, (count, width), dtype=np.uint8)
    result = _native.checksums(rows)
    assert result.dtype == np.uint32
    assert result.tolist() == reference_checksums(rows).tolist()


def test_rows_that_do_not_lie_together_are_refused():
    rows = np.zeros((4, 8), dtype=np.uint8)
    for wrong in (rows[:, ::2], rows.T, rows.astype(np.int8), rows[0]):
        with pytest.raises(TypeError):
            _native.checksums(wrong)


@settings(max_examples=examples(300))
@given(
    parts=st.integers(1, 8),
    blocks=st.integers(0, 5),
    part_bytes=st.sampled_from([1, 2, 3, 5, 7, 8, 64, 255, 1021]) | st.integers(1, 600),
    seed=st.integers(0, 2**32),
)
def test_checksums_of_parts_join_to_that_of_the_whole(parts: int, blocks: int, part_bytes: int, seed: int):
    rows = np.random.default_rng(seed).integers(0, 256, (blocks, parts * part_bytes), dtype=np.uint8)
    of_parts = np.array(
        [_native.checksums(np.ascontiguousarray(part)) for part in np.split(rows, parts, axis=1)], dtype=np.uint32
    )
    whole = _native.checksums(rows).tolist()
    for joined in (checksum.joined_checksums, _native.joined_checksums):
        for given_as in (of_parts, np.asfortranarray(of_parts), np.repeat(of_parts, 3, axis=1)[:, ::3]):
            result = joined(given_as, part_bytes)
            assert (result.dtype, result.shape, result.tolist()) == (np.uint32, (blocks,), whole)


@given(
    checksums=st.lists(st.lists(st.integers(0, 2**32 - 1), min_size=3, max_size=3), max_size=4),
    part_bytes=st.integers(1, 2**63 - 1),
)
def test_checksums_of_parts_of_any_size_join_alike(checksums: list[list[int]], part_bytes: int):
    of_parts = np.array(checksums, dtype=np.uint32).reshape(-1, 3)
    of_parts.flags.writeable = False
    for given_as in (of_parts, of_parts[::-1, ::-1]):
        expected = checksum.joined_checksums(given_as, part_bytes).tolist()
        assert _native.joined_checksums(given_as, part_bytes).tolist() == expected


@pytest.mark.parametrize(
    "arguments",
    [
        (np.zeros((2, 3), dtype=np.int32), 8),
        (np.zeros((2, 3), dtype=np.uint64), 8),
        (np.zeros((2, 3), dtype=">u4"), 8),
        (np.zeros(3, dtype=np.uint32), 8),
        (np.zeros((1, 2, 3), dtype=np.uint32), 8),
        (np.zeros((2, 3), dtype=np.uint32), 0),
        (np.zeros((2, 3), dtype=np.uint32), -1),
    ],
    ids=range(7),
)
def test_checksums_that_cannot_be_joined_are_refused_in_the_same_words(arguments: tuple[np.ndarray, int]):
    words = []
    for function in (checksum.joined_checksums, _native.joined_checksums):
        with pytest.raises(LayoutError) as raised:
            function(*arguments)
        words.append(str(raised.value))
    assert words[0] == words[1]


# -- hashes ------------------------------------------------------------------------------------------------------------


@given(
    tokens=st.lists(st.integers(0, 2**32 - 1), max_size=200),
    block_tokens=st.integers(1, 40),
    root=hashes,
    keys=st.none() | st.binary(max_size=150),
)
def test_sequence_hashes_agree(tokens: list[int], block_tokens: int, root: bytes, keys: bytes | None):
    extra = [] if keys is None else [keys + bytes([index]) for index in range(len(tokens) // block_tokens)]
    expected = hashing.sequence_hashes(tokens, block_tokens, root, extra)
    assert _native.sequence_hashes(tokens, block_tokens, root, extra) == expected
    assert _native.sequence_hashes(tuple(tokens), block_tokens, root, tuple(extra)) == expected
    assert _native.sequence_hashes(np.array(tokens, dtype=np.uint32), block_tokens, root, extra) == expected


@pytest.mark.parametrize("dtype", INTEGER_DTYPES)
def test_any_integer_array_hashes_as_its_list(dtype: str):
    tokens = np.arange(100).astype(dtype)
    expected = hashing.sequence_hashes(tokens.tolist(), 7, ROOT)
    for array in (tokens, np.repeat(tokens, 2)[::2]):
        assert _native.sequence_hashes(array, 7, ROOT) == expected
        assert hashing.sequence_hashes(array, 7, ROOT) == expected


@pytest.mark.parametrize("block_tokens", [1, 11, 12, 13, 14, 16, 27, 28, 64, 256])
def test_blocks_of_every_padding_hash_alike(block_tokens: int):
    tokens = np.arange(block_tokens * 5 + 3, dtype=np.uint32) * 65_537
    assert _native.sequence_hashes(tokens, block_tokens, ROOT) == hashing.sequence_hashes(tokens, block_tokens, ROOT)


@pytest.mark.parametrize(
    "arguments",
    [
        ([1, 2], 0, ROOT),
        ([1, 2], -3, ROOT),
        ([1, 2], 2, b"short"),
        ([1, -1], 2, ROOT),
        ([1, 2**32], 2, ROOT),
        ([1, 2**70], 2, ROOT),
        (np.array([1, 2**32]), 2, ROOT),
        (np.array([1, 2**63], dtype=np.uint64), 2, ROOT),
        (np.zeros((2, 2), dtype=np.uint32), 2, ROOT),
        ([1, 2, 3], 2, ROOT, [b"a", b"b"]),
    ],
    ids=range(10),
)
def test_tokens_that_cannot_be_hashed_are_refused_in_the_same_words(arguments: tuple[object, ...]):
    words = []
    for function in (hashing.sequence_hashes, _native.sequence_hashes):
        with pytest.raises(LayoutError) as raised:
            function(*arguments)  # type: ignore[operator, arg-type]
        words.append(str(raised.value))
    assert words[0] == words[1]


@given(
    prompts=st.lists(st.lists(st.integers(0, 2**32 - 1), max_size=120), max_size=12),
    block_tokens=st.integers(1, 40),
    root=hashes,
    kinds=st.lists(st.sampled_from([list, tuple, lambda tokens: np.array(tokens, dtype=np.int64)]), min_size=1),
)
def test_a_batch_of_prompts_hashes_as_each_alone(
    prompts: list[list[int]], block_tokens: int, root: bytes, kinds: list[Callable[[list[int]], Sequence[int]]]
):
    given_as = [kinds[index % len(kinds)](tokens) for index, tokens in enumerate(prompts)]
    roots = [bytes([index]) * 16 for index in range(len(prompts))]
    for starts, each in ((root, [root] * len(prompts)), (roots, roots)):
        expected = [
            hashing.sequence_hashes(tokens, block_tokens, start) for tokens, start in zip(prompts, each, strict=True)
        ]
        assert hashing.sequence_hashes_batch(prompts, block_tokens, starts) == expected
        assert _native.sequence_hashes_batch(given_as, block_tokens, starts) == expected


@pytest.mark.parametrize(
    "arguments",
    [
        ([], 0, ROOT),
        ([[1, 2]], 0, ROOT),
        ([], 1, b"short"),
        ([[1], [2]], 1, [ROOT, b"short"]),
        ([[1], [2]], 1, [ROOT]),
        ([[1]], 1, [ROOT, ROOT]),
        ([[1], [-1]], 1, ROOT),
        ([[1], [2**32]], 0, b"short"),
        ([np.zeros((2, 2), dtype=np.uint32)], 1, ROOT),
    ],
    ids=range(9),
)
def test_a_batch_that_cannot_be_hashed_is_refused_in_the_same_words(arguments: tuple[object, ...]):
    words = []
    for function in (hashing.sequence_hashes_batch, _native.sequence_hashes_batch):
        with pytest.raises(LayoutError) as raised:
            function(*arguments)  # type: ignore[operator, arg-type]
        words.append(str(raised.value))
    assert words[0] == words[1]


def digests_of(width: int) -> st.SearchStrategy[list[bytes]]:
    return st.lists(st.binary(min_size=width, max_size=width), max_size=9)


@given(
    digests=st.integers(0, 140).flatmap(digests_of) | st.lists(st.binary(max_size=80), max_size=12) | digests_of(32),
    root=hashes,
)
def test_hashes_derived_from_digests_agree(digests: list[bytes], root: bytes):
    expected = hashing.derived_hashes(root, digests)
    assert len(expected) == 16 * len(digests)
    assert _native.derived_hashes(root, digests) == expected
    assert _native.derived_hashes(root, tuple(digests)) == expected
    assert _native.derived_hashes(root, deque(digests)) == expected  # type: ignore[arg-type]


def test_many_digests_derive_as_each_alone():
    digests = [index.to_bytes(32, "big") for index in range(5000)]  # so many that other threads run meanwhile
    for count in (63, 64, 65, 1024, 1025, 5000):
        assert _native.derived_hashes(ROOT, digests[:count]) == hashing.derived_hashes(ROOT, digests[:count])
    long = [digest * 40 for digest in digests[:100]]
    assert _native.derived_hashes(ROOT, long) == hashing.derived_hashes(ROOT, long)


@pytest.mark.parametrize(
    "arguments",
    [
        (b"short", []),
        (bytearray(16), [b"d"]),
        (None, [b"d"]),
        ("r" * 16, [b"d"]),
        (ROOT, [b"d", "text"]),
        (ROOT, [b"d", b"e", None, 7]),
        (ROOT, [bytearray(32)]),
        (ROOT, [memoryview(b"d")]),
        (ROOT, [np.zeros(32, dtype=np.uint8)]),
        (ROOT, b"digest"),
        (ROOT, [*[b"d"] * 70, None]),
    ],
    ids=range(11),
)
def test_digests_that_cannot_be_hashed_are_refused_in_the_same_words(arguments: tuple[object, ...]):
    words = []
    for function in (hashing.derived_hashes, _native.derived_hashes):
        with pytest.raises(LayoutError) as raised:
            function(*arguments)  # type: ignore[operator]
        words.append(str(raised.value))
    assert words[0] == words[1]


# -- the digest --------------------------------------------------------------------------------------------------------


@given(st.sampled_from(Tier), hashes)
def test_residency_mixes_agree(tier: Tier, block: bytes):
    assert _native.residency_mix(tier, block) == residency.residency_mix(tier, block)
