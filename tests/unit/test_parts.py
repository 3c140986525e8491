"""Which part an instance is in, and how parts are written in settings, subjects and SQL."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbm.core.errors import ConfigError
from kvbm.core.ids import InstanceId
from kvbm.core.parts import ALL_PARTS, PARTS, has_parts, part_of, parts_of, scope_name, words_of
from kvbm.streams.base import (
    EVENTS_PREFIX,
    events_subject,
    fence_subject,
    part_filters,
    pulse_subject,
    read_subjects,
    subject_names,
)


def test_the_part_of_a_name_is_what_other_programs_compute() -> None:
    """`python -c 'import zlib; print(zlib.crc32(b"gpu-0") % 64)'`, and a name that is not ASCII."""
    assert (part_of("gpu-0"), part_of("gpu-1"), part_of("büro")) == (36, 50, 17)


def test_names_spread_over_the_parts() -> None:
    counts = [0] * PARTS
    for at in range(10_000):
        counts[part_of(f"node-{at // 8}-gpu-{at % 8}")] += 1
    assert min(counts) > 100
    assert max(counts) < 220


def test_subjects_have_the_part_before_the_name() -> None:
    assert events_subject("c", "gpu-0") == "kvbm.v1.events.c.36.gpu-0"
    assert fence_subject("c", "gpu-0") == "kvbm.v1.fence.c.36.gpu-0"
    assert pulse_subject("c", "gpu-0") == "kvbm.v1.pulse.c.36.gpu-0"


@pytest.mark.parametrize("subject", ["kvbm.v1.events.c.36.gpu-0", "kvbm.v1.events.c.gpu-0", "kvbm.v1.rounds.c.gpu-0"])
def test_names_are_read_from_subjects_with_and_without_a_part(subject: str) -> None:
    assert subject_names(subject) == ("c", InstanceId("gpu-0"))


@given(st.sets(st.integers(0, PARTS - 1), min_size=1))
def test_parts_are_read_as_they_are_written(parts: set[int]) -> None:
    some = tuple(sorted(parts))
    assert parts_of(words_of(some)) == some
    assert has_parts(f"KVBM/{scope_name('c', some)}@2026-01-01", some)
    for other in (ALL_PARTS, (0, 5), (63,)):
        assert has_parts(f"KVBM/{scope_name('c', some)}@2026-01-01#2", other) == (other == some)


@pytest.mark.parametrize(
    ("words", "parts"),
    [("", ALL_PARTS), (" ", ALL_PARTS), ("0-63", ALL_PARTS), ("3", (3,)), ("5, 0-2,1", (0, 1, 2, 5))],
)
def test_parts_are_numbers_and_ranges(words: str, parts: tuple[int, ...]) -> None:
    assert parts_of(words) == parts


@pytest.mark.parametrize("words", ["64", "0-64", "5-3", "-1", "a", "0..3", "1,,2", "٣"])
def test_what_names_no_parts_is_refused_with_what_to_write(words: str) -> None:
    with pytest.raises(ConfigError, match=r"catalog\.parts: .* names no parts; write numbers from 0 to 63"):
        parts_of(words)


def test_all_parts_are_read_by_one_filter_of_each_kind_and_some_by_theirs() -> None:
    assert read_subjects("c") == ("kvbm.v1.events.c.>", "kvbm.v1.fence.c.>")
    assert part_filters(EVENTS_PREFIX, "c", (3, 61)) == ("kvbm.v1.events.c.03.>", "kvbm.v1.events.c.61.>")
    with pytest.raises(ConfigError, match="name the cluster"):
        read_subjects(None, (3,))
