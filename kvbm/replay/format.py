"""How events, frames, counts and times are written for people, and read back."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any, NamedTuple, assert_never

from kvbm.core.clock_times import clock_us, first_after, last_at
from kvbm.core.codec import ScannedFrame
from kvbm.core.errors import ConfigError
from kvbm.core.events import (
    BlocksCreated,
    BlocksEvicted,
    BlocksMigrated,
    Event,
    InstanceStarted,
    InstanceStopped,
    ResidenciesListed,
    SnapshotEnded,
    UsageRecorded,
)
from kvbm.core.ids import HASH_BYTES, NO_PARENT, Epoch, Offset, Tier, short, split_hashes, split_slots

_UNIX_BEGIN = datetime(1970, 1, 1, tzinfo=UTC)
_FIRST_UNIX_S = 1_000_000_000  # a whole number from here on is a time, below an offset
_PLACE = re.compile(r"e([0-9]+)\+([0-9]+)")
_HOW = (
    "write 2026-01-31T12:00:00Z, a clock time such as 13:19 or 13:19:05 (UTC), Unix seconds, e3+4711 "
    "(epoch+offset), or 4711 "
    "(an offset of the last epoch)"
)


class At(NamedTuple):
    """Up to where a stream is folded: a time, or an offset of one epoch or of the last; all None for the end.

    Attributes:
        time_us: frames cut up to here, Unix time in microseconds.
        offset: events before it.
        clock_us: a time of day, in microseconds after midnight UTC; `on_last_day` or `first_after` makes a time of it.
    """

    time_us: int | None = None
    epoch: Epoch | None = None
    offset: Offset | None = None
    clock_us: int | None = None

    def on_last_day(self, last_us: int) -> At:
        """A time of day as the last such moment up to a time; anything else as it is."""
        if self.clock_us is None:
            return self
        return At(time_us=last_at(self.clock_us, last_us))

    def first_after(self, since_us: int) -> At:
        """A time of day as the first such moment after a time; anything else as it is."""
        if self.clock_us is None:
            return self
        return At(time_us=first_after(self.clock_us, since_us))


END = At()


def parse_at(text: str, option: str = "--at") -> At:
    """eEPOCH+OFFSET, OFFSET, a clock time, ISO 8601 or Unix seconds. Raises ConfigError: it is none of them."""
    if place := _PLACE.fullmatch(text):
        return At(epoch=Epoch(int(place[1])), offset=Offset(int(place[2])))
    if re.fullmatch(r"[0-9]+(\.[0-9]+)?", text):
        if "." not in text and int(text) < _FIRST_UNIX_S:
            return At(offset=Offset(int(text)))
        return At(time_us=int(Decimal(text) * 1_000_000))
    if re.match(r"[0-9]+:", text):
        return At(clock_us=_clock_us(text, option))
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(f"{option} {text!r} is neither a time nor an offset; {_HOW}") from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return At(time_us=(moment - _UNIX_BEGIN) // timedelta(microseconds=1))


def _clock_us(text: str, option: str) -> int:
    """A time of day after midnight UTC. Raises ConfigError: no clock shows it."""
    found = clock_us(text)
    if found is None:
        epoch, _, offset = text.partition(":")
        meant = f"; for offset {offset} of epoch {epoch} write e{epoch}+{offset}" if offset.isdecimal() else ""
        raise ConfigError(f"{option} {text!r} is no time of day{meant}; else {_HOW}")
    return found


def place_text(epoch: int, offset: int) -> str:
    """A place in an instance's stream, which `parse_at` reads back; never like a time of day."""
    return f"e{epoch}+{offset}"


def time_text(wall_time_ns: int) -> str:
    """A time in UTC to the microsecond, which `parse_at` reads back."""
    try:
        moment = _UNIX_BEGIN + timedelta(microseconds=wall_time_ns // 1000)
    except OverflowError:
        return f"{wall_time_ns} ns"
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


def counted(count: int, noun: str) -> str:
    """A number with its noun: 1 frame, 1,234 frames."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def offsets(frame: ScannedFrame) -> str:
    """The offsets a frame covers."""
    last = frame.next_offset - 1
    return f"offset {last:,}" if last == frame.first_offset else f"offsets {frame.first_offset:,} to {last:,}"


def event_text(event: Event) -> str:
    """An event in one line, with counts and short hashes."""
    match event:
        case InstanceStarted():
            pools = ", ".join(f"{pool.tier.name} {pool.slots:,}" for pool in event.pools) or "none"
            return f"InstanceStarted epoch {event.epoch}, pools {pools}, {counted(len(event.namespaces), 'namespace')}"
        case BlocksCreated():
            parent = "" if event.parent == NO_PARENT else f" after {short(event.parent)}"
            return f"BlocksCreated {event.tier.name} {_run(event)} from position {event.start:,}{parent}"
        case BlocksMigrated():
            kept = "kept" if event.kept else "moved"
            return (
                f"BlocksMigrated {_source(event)} → {event.target.name} {_run(event)} {event.cause.name.lower()}, "
                f"{kept}"
            )
        case BlocksEvicted():
            return f"BlocksEvicted {event.tier.name} {_run(event)} {event.reason.name.lower()}"
        case ResidenciesListed():
            return f"ResidenciesListed {event.tier.name} {_run(event)} snapshot {event.snapshot}"
        case SnapshotEnded():
            return f"SnapshotEnded {event.tier.name} snapshot {event.snapshot} of {counted(event.count, 'block')}"
        case InstanceStopped():
            return f"InstanceStopped {event.reason.name.lower()}"
        case UsageRecorded():
            since, until = (time_text(ms * 1_000_000) for ms in (event.since_ms, event.until_ms))
            last = ", the last" if event.is_last else ""
            return f"UsageRecorded {since} to {until} of {counted(len(event.rows), 'tenant')}{last}"
        case _:
            assert_never(event)


def _source(event: BlocksMigrated) -> str:
    return event.source.name if isinstance(event.source, Tier) else f"instance {event.source}"


def _run(event: BlocksCreated | BlocksMigrated | BlocksEvicted | ResidenciesListed) -> str:
    first, last = event.hashes[:HASH_BYTES], event.hashes[-HASH_BYTES:]
    blocks = short(first) if first == last else f"{short(first)}…{short(last)}"
    return f"{counted(len(event.hashes) // HASH_BYTES, 'block')} [{blocks}] in {short(event.namespace)}"


def event_fields(event: Event) -> dict[str, Any]:
    """An event as plain values for JSON: names for tiers and reasons, hex for hashes, numbers for slots."""
    fields: dict[str, Any] = {"event": type(event).__name__}
    if isinstance(event, InstanceStarted):
        pools = [
            {"tier": p.tier.name, "slots": p.slots, "block_bytes": p.block_bytes, "reach": p.reach.name, "name": p.name}
            for p in event.pools
        ]
        return fields | {
            "pools": pools,
            "namespaces": [{"id": n.id.hex(), "fields": n} for n in event.namespaces],
            "topology": event.topology,
            "engine": event.engine,
            "version": event.version,
        }
    for name in event.__struct_fields__:
        value = getattr(event, name)
        if name == "hashes":
            fields["hashes"] = [block.hex() for block in split_hashes(value)]
        elif name == "slots":
            fields["slots"] = split_slots(value)
        elif isinstance(value, bytes):
            fields[name] = value.hex()
        else:
            fields[name] = getattr(value, "name", value)
    return fields
