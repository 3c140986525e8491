"""Events as they lie, a line each."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import TextIO

from kvbm.core.backend import Backend, DecodeFrame
from kvbm.core.codec import RUN_EVENTS
from kvbm.core.events import Event
from kvbm.core.ids import HASH_BYTES
from kvbm.replay.findings import ReplayFinding, damage_finding, damage_text
from kvbm.replay.format import event_fields, event_text, place_text, time_text
from kvbm.replay.live import StreamSource
from kvbm.replay.order import DamagedBytes
from kvbm.replay.scan import NOTED, Damage
from kvbm.replay.source import FileSource, FrameSource, Located, SourceError, only
from kvbm.streams.fence_records import FenceRecord
from kvbm.terminal import as_json as json_of
from kvbm.terminal import plain

_LOOK_S = 0.25  # between two looks at files


def cat(
    located: Iterable[Located],
    out: TextIO,
    as_json: bool,
    decode_frame: DecodeFrame,
    instance: str | None = None,
    limit: int | None = None,
    digits: str = "",
    follows: bool = False,
) -> tuple[list[ReplayFinding], list[str]]:
    """Write every event, in the order of the source: repeats appear again, holes are visible in the offsets.

    Args:
        instance: only this one's.
        limit: stop after so many events.
        digits: only events that name a block whose hash begins so, in lower case.
        follows: bring each line to whoever reads `out`.
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
            named = _named(event, digits) if digits else []
            if digits and not named:
                continue
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
                blocks = f" names {', '.join(named)}" if named else ""
                line = plain(f"{frame.instance} {place_text(frame.epoch, offset)} {when} {event_text(event)}{blocks}")
            out.write(line + "\n")
            left -= 1
            if not left:
                break
        if follows:
            out.flush()
        if not left:
            break  # before it waits for what comes next
    return findings, notes


def followed(open_source: Callable[[], FrameSource], backend: Backend) -> Iterator[Located]:
    """What a source has and what comes to it, without end; of a journal and an archive once it is settled.

    Raises: SourceError: it cannot be read, or is not any more what it was. StreamError.
    """
    source = open_source()
    if isinstance(source, StreamSource):
        yield from source.follow(backend)
        return
    if not isinstance(source, FileSource):
        raise SourceError(f"{source.name} is nothing that can be followed; give a journal, an archive or nats://…")
    while True:
        yield from source.read_on(backend, source.reached, source.order, beyond=False)
        time.sleep(_LOOK_S)
        following = open_source()
        assert isinstance(following, FileSource)
        following.reached, following.order = source.reached, source.order
        source = following


def _named(event: Event, digits: str) -> list[str]:
    """The blocks an event names whose hash begins so."""
    if not isinstance(event, RUN_EVENTS):
        return []
    text, width = event.hashes.hex(), 2 * HASH_BYTES
    return [text[at : at + width] for at in range(0, len(text), width) if text.startswith(digits, at)]
