"""Events as they lie, a line each."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TextIO

from kvbm.core.backend import DecodeFrame
from kvbm.replay.findings import ReplayFinding, damage_finding, damage_text
from kvbm.replay.format import event_fields, event_text, place_text, time_text
from kvbm.replay.order import DamagedBytes
from kvbm.replay.scan import NOTED, Damage
from kvbm.replay.source import Located, only
from kvbm.streams.fence_records import FenceRecord
from kvbm.terminal import as_json as json_of
from kvbm.terminal import plain


def cat(
    located: Iterable[Located],
    out: TextIO,
    as_json: bool,
    decode_frame: DecodeFrame,
    instance: str | None = None,
    limit: int | None = None,
) -> tuple[list[ReplayFinding], list[str]]:
    """Write every event, in the order of the source: repeats appear again, holes are visible in the offsets.

    Args:
        instance: only this one's.
        limit: stop after so many events.
    Returns: the damage that was met, and remarks.
    """
    findings: list[ReplayFinding] = []
    notes: list[str] = []
    left = -1 if limit is None else limit
    for one in only(located, instance):
        if not left:
            break
        frame = one.found
        if isinstance(frame, FenceRecord):
            continue  # whose events follow is no event
        if isinstance(frame, Damage):
            damaged = DamagedBytes(one, frame)
            if frame.kind in NOTED:
                notes.append(damage_text(damaged))
            else:
                findings.append(damage_finding(damaged))
            continue
        when = time_text(frame.wall_time_ns)
        for offset, event in enumerate(decode_frame(one.data)[0].events, frame.first_offset):
            if as_json:
                fields = {
                    "instance": frame.instance,
                    "epoch": frame.epoch,
                    "offset": offset,
                    "wall_time_ns": frame.wall_time_ns,
                    "place": str(one.place),
                }
                line = json_of(fields | event_fields(event))
            else:
                line = plain(f"{frame.instance} {place_text(frame.epoch, offset)} {when} {event_text(event)}")
            out.write(line + "\n")
            left -= 1
            if not left:
                break
    return findings, notes
