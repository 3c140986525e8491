"""What tenants use: the meter's signature, and usage by tenant and clock hour, as sums of what instances have recorded.

A catalog sums the rows of its database, `kvbm-replay usage` the events of a log. Both come here, in whole numbers, so
both give the same bytes.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import NamedTuple, Protocol

import msgspec

from kvbm.core.clock_times import clock_us, first_after, last_at
from kvbm.core.errors import ConfigError
from kvbm.core.events import InstanceStarted, UsageRecorded, UsageRow
from kvbm.core.ids import Epoch, InstanceId, NamespaceId, Offset, Reach, Tier

HOUR_MS = 3_600_000
LONGEST_STEP_MS = 24 * HOUR_MS  # a longer step of the clock is none that passed: it was set, or the machine slept
Numbers = tuple[int, int, int, int]  # one for each Tier

MOST_GAPS = 1000  # that a report names
TIMES_HOW = "give ISO 8601, Unix seconds or a clock time such as 13:19 (UTC)"
_MOST_NAMED = 10  # tenants in a line
_MOST = (1 << 63) - 1  # that SQL keeps of one number
_SECONDS = re.compile(r"[0-9]{1,11}")
_UNIX_BEGIN = datetime(1970, 1, 1, tzinfo=UTC)
_UNITS = (("KiB", 10), ("MiB", 20), ("GiB", 30), ("TiB", 40))
_TIERS = tuple(tier.name.lower() for tier in Tier)


class UsageMeter(Protocol):
    """Follows the frames that an instance cuts; `reference.usage_meter.ReadableMeter` says what counts."""

    def take(self, data: bytes, at: int = 0) -> None:
        """Take in the frame at a position. Raises FrameError."""

    def cut(self, until_ms: int) -> list[tuple[NamespaceId, Numbers, Numbers]]:
        """Of each namespace that has used something since the last call: its blocks times milliseconds, and blocks put,
        by tier; in the order of their ids.
        """


class NewUsageMeter(Protocol):
    """Makes one.

    Args:
        clusters: the tiers whose pool is the cluster's: bit t for tier t.
    """

    def __call__(self, clusters: int) -> UsageMeter: ...


class UsageHour(msgspec.Struct, frozen=True, kw_only=True):
    """What a tenant has used in a clock hour, of all instances together.

    Attributes:
        hour: when it began, in UTC, as in 2026-11-30T15:00:00Z.
        hbm_byte_seconds, …: bytes held times seconds. Of each stretch of time that an instance has recorded, what is
            less than a byte-second is left out. Divided by 3600 it is byte-hours, and as many bytes on average.
        hbm_put_blocks, …: blocks created there, or offloaded to it.
        hbm_read_blocks, …: blocks that requests got from there instead of computing them.
        saved_tokens, unrated_tokens: as in `events.UsageRow`.
        saved_gpu_us: microseconds of the engine that computing them would have taken.
    """

    hour: str
    tenant: str
    hbm_byte_seconds: int = 0
    host_byte_seconds: int = 0
    nvme_byte_seconds: int = 0
    object_byte_seconds: int = 0
    hbm_put_blocks: int = 0
    host_put_blocks: int = 0
    nvme_put_blocks: int = 0
    object_put_blocks: int = 0
    hbm_read_blocks: int = 0
    host_read_blocks: int = 0
    nvme_read_blocks: int = 0
    object_read_blocks: int = 0
    saved_tokens: int = 0
    unrated_tokens: int = 0
    saved_gpu_us: int = 0


_COLUMNS = UsageHour.__struct_fields__


class UsageGap(msgspec.Struct, frozen=True, kw_only=True):
    """Time in which an instance may have run, and of which nothing is recorded: it was killed, or its log has a hole.

    Attributes:
        until: where recording goes on; "" where nothing later is recorded.
    """

    instance: str
    since: str
    until: str = ""


class UsageReport(msgspec.Struct, frozen=True, kw_only=True):
    """Usage by hour and tenant, and what is not in it.

    Attributes:
        hours: in the order of time, then of the tenants' UTF-8; only where something was used.
        gaps: those that begin in the time that was asked for, by instance and time, at most MOST_GAPS, whichever
            tenants were asked for; none for a caller who may know of some tenants alone.
    """

    hours: tuple[UsageHour, ...] = ()
    gaps: tuple[UsageGap, ...] = ()


class UsageEntry(msgspec.Struct, frozen=True, kw_only=True):
    """What one tenant has used of one instance in a recorded stretch of time: a row of SQL.

    Attributes:
        offset: of the UsageRecorded.
        numbers: byte-seconds, blocks put and blocks read by tier, then saved_tokens, unrated_tokens and saved_us.
    """

    instance: InstanceId
    epoch: Epoch
    offset: Offset
    tenant: str
    since_ms: int
    until_ms: int
    is_last: bool
    numbers: tuple[int, ...]


NUMBERS = 15  # of an entry
NOTHING = (0,) * NUMBERS
START = Offset(0)  # where each epoch begins; a UsageRecorded lies behind it


def entries_of(instance: InstanceId, epoch: Epoch, offset: Offset, event: UsageRecorded) -> list[UsageEntry]:
    """An event as entries, one for each tenant; one of a tenant without a name that has used nothing where there is
    none, for the time counts all the same.
    """
    rows: Sequence[UsageRow] = event.rows or (UsageRow(""),)
    return [
        UsageEntry(
            instance=instance,
            epoch=epoch,
            offset=offset,
            tenant=row.tenant,
            since_ms=min(event.since_ms, _MOST),
            until_ms=min(event.until_ms, _MOST),
            is_last=event.is_last,
            numbers=_numbers(row, event.block_bytes),
        )
        for row in rows
    ]


def start_of(instance: InstanceId, wall_time_ns: int, event: InstanceStarted) -> UsageEntry | None:
    """The beginning of an epoch as an entry of no length, for what is used from then on is to be recorded; None: the
    instance has no slots of its own, as a janitor or a bridge, and records nothing.
    """
    if not any(pool.slots and pool.reach is not Reach.CLUSTER for pool in event.pools):
        return None
    at_ms = min(wall_time_ns // 1_000_000, _MOST)
    return UsageEntry(
        instance=instance,
        epoch=event.epoch,
        offset=START,
        tenant="",
        since_ms=at_ms,
        until_ms=at_ms,
        is_last=False,
        numbers=NOTHING,
    )


def _numbers(row: UsageRow, block_bytes: Numbers) -> tuple[int, ...]:
    byte_seconds = (held * size // 1000 for held, size in zip(row.block_ms, block_bytes, strict=True))
    counts = (*row.put_blocks, *row.read_blocks, row.saved_tokens, row.unrated_tokens, row.saved_us)
    return tuple(min(number, _MOST) for number in (*byte_seconds, *counts))


class _Stretch(NamedTuple):
    """A recorded stretch of one instance, or the beginning of an epoch (`start_of`), in the order of its stream."""

    epoch: Epoch
    offset: Offset
    since_ms: int
    until_ms: int
    is_last: bool


class UsageSums:
    """Sums of entries, which come in any order, each once."""

    def __init__(self) -> None:
        self._hours: dict[tuple[int, str], list[int]] = {}
        self._stretches: dict[InstanceId, set[_Stretch]] = {}

    def note(self, entry: UsageEntry) -> None:
        """That its time is recorded; what was used in it is not asked for."""
        stretch = _Stretch(entry.epoch, entry.offset, entry.since_ms, entry.until_ms, entry.is_last)
        self._stretches.setdefault(entry.instance, set()).add(stretch)

    def add(self, entry: UsageEntry) -> None:
        """Add one."""
        self.note(entry)
        if any(entry.numbers):
            sums = self._hours.setdefault((entry.since_ms // HOUR_MS, entry.tenant), [0] * NUMBERS)
            for at, number in enumerate(entry.numbers):
                sums[at] += number

    def report(self, since_ms: int = 0, until_ms: int | None = None) -> UsageReport:
        """What they come to.

        Args:
            since_ms, until_ms: gaps that begin in [since_ms, until_ms); None: there is no end.
        """
        ordered = sorted(self._hours.items(), key=lambda one: (one[0][0], one[0][1].encode()))
        return UsageReport(
            hours=tuple(hour_of(hour, tenant, sums) for (hour, tenant), sums in ordered),
            gaps=tuple(islice(self._gaps(since_ms, until_ms), MOST_GAPS)),
        )

    def _gaps(self, since_ms: int, until_ms: int | None) -> Iterator[UsageGap]:
        for instance in sorted(self._stretches, key=str.encode):
            stretches = sorted(self._stretches[instance])
            found, following = list[tuple[int, int | None]](), None
            for one, before in zip(reversed(stretches), [*reversed(stretches[:-1]), None], strict=True):
                is_asked = since_ms <= one.until_ms and (until_ms is None or one.until_ms < until_ms)
                if is_asked and _may_lack(one, before) and (following is None or following > one.until_ms):
                    found.append((one.until_ms, following))
                if one.offset != START:
                    following = one.since_ms
            yield from (gap_of(instance, *gap) for gap in sorted(found, key=lambda gap: gap[0]))


def _may_lack(one: _Stretch, before: _Stretch | None) -> bool:
    """Whether behind it something was used before the next record. At the beginning of an epoch this is so where
    nothing before it says so already.
    """
    if one.offset == START:
        return before is None or before.is_last
    return not one.is_last


def hour_of(hour: int, tenant: str, sums: Sequence[int]) -> UsageHour:
    """What a tenant has used in a clock hour: numbers as an entry has them."""
    return UsageHour(hour=time_text(hour * HOUR_MS), tenant=tenant, **dict(zip(_COLUMNS[2:], sums, strict=True)))


def gap_of(instance: InstanceId, until_ms: int, following_ms: int | None) -> UsageGap:
    """What lies between two recorded stretches, or behind the last."""
    following = "" if following_ms is None else time_text(following_ms)
    return UsageGap(instance=instance, since=time_text(until_ms), until=following)


def begin_of_hour(ms: int) -> int:
    """The clock hour that a time lies in."""
    return ms // HOUR_MS * HOUR_MS


def end_of_hour(ms: int) -> int:
    """The first beginning of a clock hour that is not before a time."""
    return -(-ms // HOUR_MS) * HOUR_MS


def parse_time(text: str, last_ms: int | None = None) -> int | None:
    """ISO 8601, in UTC where it says no zone, or Unix seconds, as Unix milliseconds; None: it is neither.

    Args:
        last_ms: times of day are understood, too, each as the last one up to this time.
    """
    if last_ms is not None and (clock := clock_us(text)) is not None:
        return max(0, last_at(clock, last_ms * 1000 + 999) // 1000)
    if _SECONDS.fullmatch(text):
        return int(text) * 1000
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    try:
        ms = (moment - _UNIX_BEGIN) // timedelta(milliseconds=1)
    except OverflowError:
        return None
    return ms if ms >= 0 else None


def parse_stretch(since: str | None, until: str | None, last_ms: int) -> tuple[int | None, int | None]:
    """Since when and until when, as `parse_time` reads them; None where nothing is said.

    Args:
        last_ms: where a log ends, or now. A time of day is the last one up to here; `until` the first one after `since`
            where both are said.
    Raises: ConfigError: one is no time, or what is asked about ends before it begins.
    """
    since_ms = None if since is None else _known_time(since, "--from", last_ms)
    clock = None if until is None or since_ms is None else clock_us(until)
    if since_ms is not None and clock is not None:
        return since_ms, first_after(clock, since_ms * 1000 + 999) // 1000
    until_ms = None if until is None else _known_time(until, "--to", last_ms)
    _check_stretch(since_ms, until_ms)
    return since_ms, until_ms


def _known_time(text: str, option: str, last_ms: int) -> int:
    """Raises ConfigError."""
    found = parse_time(text, last_ms)
    if found is None:
        raise ConfigError(f"{option} {text[:80]!r} is no time; {TIMES_HOW}")
    return found


def _check_stretch(since_ms: int | None, until_ms: int | None) -> None:
    """Raises ConfigError: what is asked about ends before it begins."""
    if since_ms is not None and until_ms is not None and since_ms >= until_ms:
        raise ConfigError(f"--from {time_text(since_ms)} does not lie before --to {time_text(until_ms)}")


def time_text(ms: int) -> str:
    """A time in UTC, to the second where it has no part of one, else to the millisecond."""
    try:
        moment = _UNIX_BEGIN + timedelta(milliseconds=ms)
    except OverflowError:
        return f"{ms} ms"
    return moment.isoformat(timespec="milliseconds" if ms % 1000 else "seconds").replace("+00:00", "Z")


def csv_of(hours: Iterable[UsageHour]) -> str:
    """Hours as CSV: a line of names, then one for each, with line feeds; what needs quotes has them."""
    return "".join(_csv_line(values) for values in (_COLUMNS, *map(msgspec.structs.astuple, hours)))


def _csv_line(values: Iterable[object]) -> str:
    """One line. A carriage return within a name has quotes, too, as the writer gives them to what ends its lines."""
    written = io.StringIO()
    csv.writer(written, lineterminator="\r\n").writerow(values)
    return written.getvalue().removesuffix("\r\n") + "\n"


def lines_of(report: UsageReport) -> Iterable[str]:
    """A report for people: bytes as byte-hours in the unit that fits the most, seconds of the engine as hours."""
    if not report.hours:
        yield "no usage is recorded there"
    else:
        unit, size = _unit_of(report.hours)
        tiers = " ".join(f"{f'{tier} {unit}·h':>14}" for tier in _TIERS)
        yield f"{'hour':<20} {'tenant':<20} {tiers} {'put':>12} {'read':>12} {'saved tokens':>14} {'GPU h':>10}"
    for hour in report.hours:
        numbers = msgspec.structs.astuple(hour)[2:]
        held = " ".join(f"{number / 3600 / size:>14,.3f}" for number in numbers[:4])
        put, read = sum(numbers[4:8]), sum(numbers[8:12])
        saved = f"{hour.saved_tokens:>14,} {hour.saved_gpu_us / 3_600_000_000:>10,.3f}"
        yield f"{hour.hour:<20} {hour.tenant or '(none)':<20} {held} {put:>12,} {read:>12,} {saved}"
    if unrated := sum(hour.unrated_tokens for hour in report.hours):
        yield f"of the saved tokens, {unrated:,} came while no prefill rate was known: they count no seconds"
    yield from gap_lines(report)


def unused_lines(hours: Iterable[UsageHour], asked: Iterable[str], known: Collection[str], who: str) -> Iterable[str]:
    """Which tenants that were asked for have used nothing, a line each; a name that nobody has may be mistyped.

    Args:
        known: names that `who` has heard of.
    """
    used = {hour.tenant for hour in hours}
    for tenant in dict.fromkeys(asked):
        if tenant in used:
            continue
        nothing = f"tenant {tenant!r} has used nothing in these hours"
        if tenant not in known:
            names = [repr(name) for name in sorted(known, key=str.encode)[:_MOST_NAMED]]
            more = f" and {len(known) - len(names):,} more" if len(known) > len(names) else ""
            nothing += f", and {who} has nothing of that name; it has {', '.join(names) or 'no tenants'}{more}"
        yield nothing


def _unit_of(hours: Iterable[UsageHour]) -> tuple[str, int]:
    """The largest unit of which the most that a tenant has held in a tier is one at least, and its bytes."""
    most = max(max(msgspec.structs.astuple(hour)[2:6]) for hour in hours) / 3600
    fitting = [(name, 1 << bits) for name, bits in _UNITS if most >= 1 << bits]
    return fitting[-1] if fitting else ("B", 1)


def gap_lines(report: UsageReport) -> Iterable[str]:
    """What is not in a report, a line each."""
    for gap in report.gaps:
        until = f"until {gap.until}" if gap.until else "on, up to now"
        yield f"not recorded: {gap.instance} from {gap.since} {until}"
