"""Frames as they lie become steps in the order of offsets."""

from __future__ import annotations

import pytest

from kvbm.core.codec import Frame, FrameBytes
from kvbm.replay import order as order_module
from kvbm.replay.order import Begins, Conflict, DamagedBytes, LateEnd, Missing, Next, Repeat, WentBack, in_order
from kvbm.replay.source import FramePlace, Located
from tests.nats_fixture import make_frame

Lying = tuple[int, int]  # epoch, first offset; every frame has one event


def steps(lying: list[Lying | FrameBytes], is_trimmed: bool = False) -> list[str]:
    """Each step in a word, with epoch and offset."""
    found = []
    for item in in_order(located(lying), is_trimmed):
        assert not isinstance(item, DamagedBytes)
        match item[1]:
            case Next(_, frame):
                found.append(f"{frame.epoch}:{frame.first_offset}")
            case Missing(epoch, first, following):
                found.append(f"missing {epoch}:{first}-{following}")
            case Begins(epoch, offset):
                found.append(f"begins {epoch}:{offset}")
            case Repeat() | LateEnd() | Conflict() | WentBack() as step:
                lies = step.located.found
                assert isinstance(lies, Frame)
                name = type(step).__name__.removesuffix("End").lower()
                found.append(f"{name} {lies.epoch}:{lies.first_offset}")
    return found


def located(lying: list[Lying | FrameBytes]) -> list[Located]:
    from kvbm.core.codec import decode_frame, encode_frame

    made = []
    for number, one in enumerate(lying):
        data = one.data if isinstance(one, FrameBytes) else make_frame(one[1], epoch=one[0]).data
        frame = decode_frame(data)[0]
        assert encode_frame(frame) == data
        made.append(Located(frame, FramePlace("file", None, number), data, "", number))
    return made


@pytest.mark.parametrize(
    ("lying", "expected"),
    [
        ([(1, 0), (1, 1), (1, 2)], "1:0, 1:1, 1:2"),
        ([(1, 0), (1, 1), (1, 3), (1, 4), (1, 2), (1, 3), (1, 4)], "1:0, 1:1, 1:2, 1:3, 1:4, repeat 1:3, repeat 1:4"),
        ([(1, 0), (1, 0), (1, 1), (1, 0)], "1:0, repeat 1:0, 1:1, repeat 1:0"),
        ([(1, 0), (1, 2), (1, 2), (1, 3)], "1:0, repeat 1:2, missing 1:1-2, 1:2, 1:3"),
        ([(1, 1), (1, 0)], "1:0, 1:1"),
        ([(1, 0), (1, 2), (2, 0), (2, 1)], "1:0, missing 1:1-2, 1:2, 2:0, 2:1"),
        ([(1, 0), (1, 2), (2, 0), (1, 1), (1, 2), (2, 0)], "1:0, 1:1, 1:2, 2:0, repeat 1:2, repeat 2:0"),
        ([(1, 0), (2, 1), (2, 0)], "1:0, 2:0, 2:1"),
        ([(1, 0), (2, 1)], "1:0, missing 2:0-1, 2:1"),
        ([(1, 0), (2, 0), (1, 1), (2, 0), (2, 1)], "1:0, 2:0, late 1:1, repeat 2:0, 2:1"),
        ([(1, 0), (2, 0), (1, 1), (1, 2), (2, 0)], "1:0, 2:0, late 1:1, late 1:2, repeat 2:0"),
        ([(2, 0), (1, 0), (2, 0), (1, 0)], "2:0, late 1:0, repeat 2:0, repeat 1:0"),
        ([(1, 0), (2, 0), (1, 1), (2, 1)], "1:0, 2:0, wentback 1:1, 2:1"),
        ([(1, 0), (2, 0), (1, 1)], "1:0, 2:0, wentback 1:1"),
        ([(1, 0), (2, 0), (1, 5)], "1:0, 2:0, wentback 1:5"),
        ([(1, 0), (2, 0), (1, 0)], "1:0, 2:0, repeat 1:0"),
    ],
)
def test_frames_are_put_in_order_as_far_as_they_are_there(lying: list[Lying | FrameBytes], expected: str) -> None:
    assert ", ".join(steps(lying)) == expected


def test_a_trimmed_source_begins_where_it_begins_and_has_no_hole_before() -> None:
    assert steps([(3, 7), (3, 8)], is_trimmed=True) == ["begins 3:7", "3:7", "3:8"]
    assert steps([(3, 0), (3, 1)], is_trimmed=True) == ["3:0", "3:1"]
    assert steps([(3, 7), (3, 6), (3, 7), (4, 1)], is_trimmed=True) == [
        "repeat 3:7",
        "begins 3:6",
        "3:6",
        "3:7",
        "missing 4:0-1",
        "4:1",
    ]


def test_a_trimmed_source_whose_first_message_was_lost_and_sent_again_begins_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert steps([(3, 1), (3, 2), (3, 0), (3, 1), (3, 2), (3, 3)], is_trimmed=True) == [
        "3:0",
        "3:1",
        "3:2",
        "repeat 3:1",
        "repeat 3:2",
        "3:3",
    ]
    monkeypatch.setattr(order_module, "BEGIN_BYTES", 2 * len(make_frame(0).data))
    assert steps([(3, 1), (3, 2), (3, 3), (3, 0), (3, 4)], is_trimmed=True) == [
        "begins 3:1",
        "3:1",
        "3:2",
        "3:3",
        "repeat 3:0",
        "3:4",
    ]


def test_other_bytes_and_other_cuts_for_known_offsets_are_conflicts() -> None:
    whole, other, longer = make_frame(0, 2), make_frame(0, 2, blocks=2), make_frame(1, 2)
    assert steps([whole, other]) == ["1:0", "conflict 1:0"]
    assert steps([whole, longer]) == ["1:0", "conflict 1:1"]
    beyond, beyond_other = make_frame(5), make_frame(5, blocks=2)
    assert steps([whole, beyond, beyond_other]) == ["1:0", "conflict 1:5", "missing 1:2-5", "1:5"]


def test_a_hole_is_given_up_once_more_lies_beyond_it_than_any_publisher_has_in_flight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(order_module, "REORDER_BYTES", 3 * len(make_frame(0).data))
    lying: list[Lying | FrameBytes] = [(1, 0), (1, 2), (1, 3), (1, 4), (1, 5), (1, 1), (1, 6)]
    assert steps(lying) == ["1:0", "missing 1:1-2", "1:2", "1:3", "1:4", "1:5", "repeat 1:1", "1:6"]
