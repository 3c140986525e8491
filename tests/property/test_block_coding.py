"""Blocks coded natively against the specification of their bytes, both ways."""

from __future__ import annotations

import itertools
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbm._native import checksums, decode_blocks, encode_blocks
from kvbm.core.errors import LayoutError
from kvbm.pools.object.coding import ELEMENT_CODINGS, Coding, DecodeBlocks, EncodeBlocks
from kvbm.reference.block_coding import CodingError, code_lengths, codes_of, decode_block, encode_block
from tests.coded_blocks import bfloat16
from tests.examples import examples

ENCODE: EncodeBlocks = encode_blocks
DECODE: DecodeBlocks = decode_blocks
CODINGS = st.sampled_from(list(Coding))


@st.composite
def _blocks(draw: st.DrawFn) -> np.ndarray:
    """A few blocks of one size, each of pieces of some kind."""
    block_bytes = draw(st.integers(0, 6000) | st.sampled_from([16_384, 32_768, 32_770, 40_000]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    count = draw(st.integers(1, 3)) if block_bytes < 8000 else 1
    blocks = np.zeros((count, block_bytes), dtype=np.uint8)
    for block in blocks:
        at = 0
        while at < block_bytes:
            size = min(draw(st.sampled_from([512, 4096, 16_384, 40_000])), block_bytes - at)
            kind = draw(st.sampled_from(["normal", "half", "single", "zero", "random", "few"]))
            values = rng.standard_normal(size // 2 + 1) * 2.0 ** draw(st.integers(-20, 20))
            pieces: dict[str, np.ndarray] = {
                "normal": (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16),
                "half": values.clip(-60_000, 60_000).astype(np.float16),
                "single": values[: size // 4 + 1].astype(np.float32),
                "zero": np.zeros(size, dtype=np.uint8),
                "random": rng.integers(0, 256, size, dtype=np.uint8),
                "few": rng.choice(np.array([7, 9, 200], dtype=np.uint8), size, p=[0.9, 0.09, 0.01]),
            }
            block[at : at + size] = pieces[kind].view(np.uint8)[:size]
            at += size
    return blocks


@settings(max_examples=60, deadline=None)
@given(blocks=_blocks(), coding=CODINGS)
def test_native_and_reference_write_the_same_bytes_and_read_each_others(blocks: np.ndarray, coding: Coding) -> None:
    order = np.arange(len(blocks))[::-1].copy()
    encoded = ENCODE(blocks, order, coding)
    expected = [encode_block(blocks[row], coding) for row in order]
    assert encoded.body.tobytes() == b"".join(data for data, _ in expected)
    assert encoded.lengths.tolist() == [len(data) for data, _ in expected]
    assert encoded.codings.tolist() == [kind for _, kind in expected]
    rows = np.full_like(blocks, 0xA5)
    good, sums = DECODE(encoded.body, encoded.lengths, encoded.codings, rows, order)
    assert good.all() and np.array_equal(rows, blocks) and np.array_equal(sums[order], checksums(blocks))
    for row, (data, kind) in zip(order, expected, strict=True):
        assert decode_block(data, kind, blocks.shape[1]) == blocks[row].tobytes()


@settings(max_examples=examples(200), deadline=None)
@given(counts=st.lists(st.integers(0, 3) | st.integers(0, 2**40), min_size=256, max_size=256))
def test_every_count_of_symbols_has_a_whole_code_of_short_words(counts: list[int]) -> None:
    lengths = code_lengths(np.array(counts))
    assert set(lengths) == {symbol for symbol, count in enumerate(counts) if count}
    codes = sorted(codes_of(lengths).values()) if lengths else []
    assert all(not later.startswith(code) for code, later in itertools.pairwise(codes))


@settings(max_examples=examples(150), deadline=None)
@given(data=st.data(), coding=st.sampled_from([Coding.PLANES_8, Coding.PLANES_16, Coding.PLANES_32]))
def test_spoilt_bytes_give_no_row_that_its_checksum_does_not_tell(data: st.DataObject, coding: Coding) -> None:
    block = bfloat16(data.draw(st.sampled_from([600, 1200, 17_000])), data.draw(st.integers(0, 99)))
    encoded = ENCODE(block[None], np.zeros(1, dtype=np.int64), coding)
    spoilt = encoded.body.copy()
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, min(300, len(spoilt) - 1)) | st.integers(0, len(spoilt) - 1))
        spoilt[at] ^= data.draw(st.integers(1, 255))
    spoilt = spoilt[: data.draw(st.just(len(spoilt)) | st.integers(0, len(spoilt)))]
    rows = np.full((3, len(block)), 0xA5, dtype=np.uint8)
    lengths = np.array([len(spoilt)], dtype=np.uint32)
    good, sums = DECODE(spoilt, lengths, encoded.codings, rows, np.ones(1, dtype=np.int64))
    assert (rows[[0, 2]] == 0xA5).all(), "bytes beside the row have changed"
    if good[0]:
        assert sums[0] == checksums(rows)[1]
    try:
        found = decode_block(spoilt.tobytes(), Coding(int(encoded.codings[0])), len(block))
    except CodingError:
        return  # where a stream ends too early the native decoder goes on and leaves it to the checksum
    assert good[0] and rows[1].tobytes() == found


def test_a_block_that_is_not_wanted_is_passed_over() -> None:
    blocks = np.stack([bfloat16(2000, seed) for seed in range(4)])
    encoded = ENCODE(blocks, np.arange(4), Coding.PLANES_16)
    rows = np.zeros((2, blocks.shape[1]), dtype=np.uint8)
    at = np.array([-1, 1, -1, 0])
    good, sums = DECODE(encoded.body, encoded.lengths, encoded.codings, rows, at)
    assert good.tolist() == [False, True, False, True] and sums[[0, 2]].tolist() == [0, 0]
    assert np.array_equal(rows, blocks[[3, 1]]) and np.array_equal(sums[[3, 1]], checksums(rows))


def test_a_body_that_ends_early_gives_the_blocks_before() -> None:
    blocks = np.stack([bfloat16(2000, seed) for seed in range(3)])
    encoded = ENCODE(blocks, np.arange(3), Coding.PLANES_16)
    rows = np.zeros_like(blocks)
    good, _ = DECODE(encoded.body[:-1].copy(), encoded.lengths, encoded.codings, rows, np.arange(3))
    assert good.tolist() == [True, True, False] and np.array_equal(rows[:2], blocks[:2])


def test_blocks_of_no_elements_and_of_halves_stay_raw() -> None:
    for block_bytes in (0, 1, 7, 4001):
        blocks = np.zeros((2, block_bytes), dtype=np.uint8)
        encoded = ENCODE(blocks, np.arange(2), Coding.PLANES_16 if block_bytes % 2 else Coding.PLANES_32)
        assert encoded.codings.tolist() == [Coding.RAW] * 2 and encoded.body.tobytes() == blocks.tobytes()


def test_random_bytes_stay_raw_in_every_coding() -> None:
    blocks = np.random.default_rng(1).integers(0, 256, (2, 1 << 20), dtype=np.uint8)
    for coding in Coding:
        assert ENCODE(blocks, np.arange(2), coding).codings.tolist() == [Coding.RAW] * 2


def test_a_block_of_which_only_the_sampled_parts_shrink_stays_raw_and_in_its_room() -> None:
    block = np.random.default_rng(2).integers(0, 256, 1 << 22, dtype=np.uint8)
    for first in range(0, len(block), len(block) // 16):
        block[first : first + 256] = 0
    encoded = ENCODE(block[None], np.zeros(1, dtype=np.int64), Coding.PLANES_8)
    assert encoded.codings.tolist() == [Coding.RAW] and np.array_equal(encoded.body, block)


def test_normal_numbers_shrink_as_far_as_their_exponents_let_them() -> None:
    values = np.random.default_rng(3).standard_normal(1 << 19).astype(np.float32)
    blocks = (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8).reshape(1, -1)
    encoded = ENCODE(blocks, np.zeros(1, dtype=np.int64), Coding.PLANES_16)
    counts = np.bincount((blocks.view(np.uint16).ravel() << 1 >> 8).astype(np.int64))
    shares = counts[counts > 0] / counts.sum()
    limit = 16 / (8 - (shares * np.log2(shares)).sum())
    assert 0.98 * limit < blocks.size / encoded.body.size < limit


ROWS, ONE, LENGTH, CODING = (
    np.zeros((2, 64), np.uint8),
    np.zeros(1, np.int64),
    np.zeros(1, np.uint32),
    np.zeros(1, np.uint8),
)
UNFIT = {
    "bytes of a row that lie apart": lambda: ENCODE(ROWS[:, ::2], ONE, 1),
    "a row that is not there": lambda: ENCODE(ROWS, ONE + 2, 1),
    "a row below the first": lambda: ENCODE(ROWS, ONE - 1, 1),
    "an unknown coding": lambda: ENCODE(ROWS, ONE, len(Coding)),
    "more lengths than rows": lambda: DECODE(CODING, np.zeros(2, np.uint32), CODING, ROWS, ONE),
    "a row to fill that is not there": lambda: DECODE(CODING, LENGTH, CODING, ROWS, ONE + 2),
}


@pytest.mark.parametrize("what", UNFIT)
def test_arrays_that_do_not_fit_are_refused(what: str) -> None:
    with pytest.raises(LayoutError):
        UNFIT[what]()


def test_several_threads_code_at_once() -> None:
    blocks = np.stack([bfloat16(100_000, seed) for seed in range(4)])
    expected = ENCODE(blocks, np.arange(4), Coding.PLANES_16)
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(5):
            encoded, rows = ENCODE(blocks, np.arange(4), Coding.PLANES_16), np.zeros_like(blocks)
            DECODE(encoded.body, encoded.lengths, encoded.codings, rows, np.arange(4))
            if not (np.array_equal(encoded.body, expected.body) and np.array_equal(rows, blocks)):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not wrong and not any(thread.is_alive() for thread in threads)


def test_every_element_type_with_something_to_gain_has_a_coding() -> None:
    assert set(ELEMENT_CODINGS) == {"bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "float32"}
    assert Coding.RAW not in ELEMENT_CODINGS.values()
