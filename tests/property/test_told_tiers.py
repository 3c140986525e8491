"""What is told of an engine's blocks in tiers, natively as readably."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbm.assembly import packed_tokens, told_tiers
from kvbm.core.errors import LayoutError
from kvbm.core.hashing import token_column
from kvbm.core.ids import HASH_BYTES, Tier, split_hashes
from kvbm.core.results import NOT_HELD
from kvbm.engines.vllm.told_tiers import NewToldTiers
from kvbm.reference.told_tiers import ReadableToldTiers

each_twin = pytest.mark.parametrize("new", [ReadableToldTiers, told_tiers], ids=["readable", "native"])
places = st.sampled_from([Tier.HOST, Tier.NVME, Tier.OBJECT, NOT_HELD])
# Our hashes of a run of blocks, and how far the engine's are from them: tenants share those.
runs = st.tuples(st.integers(0, 20), st.integers(0, 12), st.sampled_from([0, 0, 3, 20]), st.integers(0, 1))
scattered = st.tuples(st.lists(st.integers(0, 30), max_size=8))
moves = st.tuples(st.integers(0, 32), st.integers(1, 12), places)
calls = st.lists(
    st.one_of(runs, scattered, moves, st.sampled_from(["step", "step", "step", "anew", "due"])), max_size=80
)


def packed(numbers: list[int]) -> bytes:
    return b"".join(number.to_bytes(HASH_BYTES, "big") for number in numbers)


def digests_of(numbers: list[int], size: int) -> list[bytes]:
    return [number.to_bytes(size, "big") for number in numbers]


@settings(max_examples=200, deadline=None)
@given(calls, st.integers(0, 6), st.sampled_from([16, 32, 4]))
def test_native_blocks_are_the_readable_ones(calls: list[object], step: int, size: int) -> None:
    native, readable = told_tiers(step), ReadableToldTiers(step)
    lies: dict[bytes, int] = {}  # others are in HOST

    def stepped(elsewhere: int = Tier.HOST) -> None:
        due = readable.due()
        assert native.due() == due
        tiers = bytes(lies.get(one, elsewhere) for one in split_hashes(due))
        assert native.changed(tiers) == readable.changed(tiers)

    for call in calls:
        match call:
            case "step":
                stepped()
            case "due":  # its answer never comes
                assert native.due() == readable.due()
            case "anew":
                native.tell_anew()
                readable.tell_anew()
            case (int(first), int(count), int(tier)):
                lies.update(dict.fromkeys(split_hashes(packed([*range(first, first + count)])), tier))
            case (int(first), int(count), int(shift), int(group)):
                numbers = [*range(first, first + count)]
                digests = digests_of([(number + shift) % 24 for number in numbers], size)
                assert native.learn(packed(numbers), digests, group) == readable.learn(packed(numbers), digests, group)
            case ([*found],):
                numbers = [number for number in found if isinstance(number, int)]
                digests = digests_of(numbers, size)
                assert native.learn(packed(numbers), digests, 0) == readable.learn(packed(numbers), digests, 0)
            case _:
                raise AssertionError(call)
        assert (native.blocks, native.digests) == (readable.blocks, readable.digests)
    lies.clear()
    for _ in range(60 if step else 0):
        stepped(NOT_HELD)
    assert not step or (native.blocks, native.digests) == (0, 0)


@given(st.binary(max_size=40 * 4), st.integers(0, 5))
def test_an_answer_to_another_question_is_refused_and_the_question_stays(tiers: bytes, count: int) -> None:
    native = told_tiers(4)
    native.learn(packed([*range(count)]), digests_of([*range(count)], 32), 0)
    native.due()
    if len(tiers) == count and set(tiers) <= {1, 2, 3, NOT_HELD}:
        native.changed(tiers)
    else:
        with pytest.raises(LayoutError):
            native.changed(tiers)
        told, _ = native.changed(bytes([Tier.HOST]) * count)
        assert [*told] == ([(0, 0, count, Tier.HOST, True)] if count else [])


@each_twin
def test_what_is_no_run_is_refused_and_changes_nothing(new: NewToldTiers) -> None:
    blocks = new(4)
    for digests in ([b"\0" * 33], [b"\0", b"\0" * 33]):
        with pytest.raises(LayoutError):
            blocks.learn(packed([1, 2]), digests, 0)
    with pytest.raises(LayoutError):
        blocks.changed(b"\1")
    assert (blocks.blocks, blocks.due()) == (0, b"")


def test_native_blocks_take_lists_of_bytes_alone() -> None:
    blocks = told_tiers(4)
    wrong: list[tuple[object, object, object]] = [
        (b"\0" * 17, [b"\1"], 0),
        ("text", [b"\1"], 0),
        (packed([1]), ["text"], 0),
        (packed([1]), b"\1", 0),
        (packed([1]), [b"\1"], 256),
        (packed([1]), [b"\1"], -1),
    ]
    for hashes, digests, group in wrong:
        with pytest.raises(LayoutError):
            blocks.learn(hashes, digests, group)  # type: ignore[arg-type]
    assert blocks.blocks == 0


@given(st.lists(st.integers(0, 2**32 - 1), max_size=50))
def test_tokens_are_packed_as_their_column_is(tokens: list[int]) -> None:
    assert packed_tokens(tokens) == token_column(tokens).tobytes() == packed_tokens(tuple(tokens))
