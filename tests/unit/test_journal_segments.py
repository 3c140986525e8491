"""What the segments of a journal take of its room."""

from __future__ import annotations

from pathlib import Path

from kvbm.core.ids import Epoch, Offset
from kvbm.streams.journal.segments import JournalSegment, JournalSegments


def test_what_was_cut_from_a_segment_counts_once_when_its_file_is_begun_anew() -> None:
    segments = JournalSegments()
    for first_offset, damaged_bytes in ((0, 0), (5, 100)):
        segment = JournalSegment(Path(f"1-{first_offset}.kvbm"), Epoch(1), Offset(first_offset))
        segment.damaged_bytes = damaged_bytes
        segments.add(segment)
    assert segments.used_bytes == 100
    segments.add(
        JournalSegment(Path("1-5.kvbm"), Epoch(1), Offset(5))
    )  # all of it was cut off, and its name is used again
    assert len(segments.all()) == 2
    assert segments.used_bytes == 100
    segments.take(2)
    assert segments.used_bytes == 0
