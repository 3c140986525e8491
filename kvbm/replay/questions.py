"""What people ask a history most: why a block came and went, what changed in a stretch of time, whose blocks fill the
pools.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime, timedelta
from itertools import zip_longest
from typing import Any, NamedTuple

import msgspec

from kvbm.core.ids import HASH_BYTES
from kvbm.replay.format import counted, place_text
from kvbm.replay.source import SourceError
from kvbm.replay.sql import HistoryDatabase

_LEAST_DIGITS = 8
_QUIET = timedelta(minutes=1)  # an instance that is not heard for so long may be gone
_MOST_BLOCKS = 20  # whose hash begins with the digits given
_ENDED = {
    "restarted": "gone from {tier}: the instance began anew",
    "unlisted": "gone from {tier}: a snapshot did not list it; when it went is not known",
    "replaced": "gone from {tier}: another block was told in its slot",
}


class BlockEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened to a block.

    Attributes:
        time: ISO 8601, by the instance's clock.
        stream: which of several streams of this name; mostly "". life: of the instance, from 0.
        cause: of a begin: created, listed, offload, onboard or fetch; of an end: why, as in an event.
        source: the tier or instance it came from. target: the tier it moved to.
        position: in its chain, where an event has said it.
    """

    time: str
    instance: str
    stream: str
    life: int
    epoch: int
    offset: int
    event: str
    tier: str
    cause: str | None = None
    source: str | None = None
    target: str | None = None
    position: int | None = None
    slot: int | None = None

    def sentence(self) -> str:
        """In words, without time and place."""
        tier = self.tier
        match self.event, self.cause:
            case "began", "created":
                where = "" if self.position is None else f", block {self.position:,} of its chain"
                return f"created in {tier}{where}"
            case "began", "listed":
                return f"listed in {tier}, as it is there"
            case "began", "fetch" if self.source is not None:
                return f"fetched into {tier} from {self.source}"
            case "began", _:
                return f"{'moved' if self.target else 'copied'} from {self.source} to {tier} ({self.cause})"
            case "claimed", "listed" | "created" | None:
                return f"named in the cluster's {tier}"
            case "claimed", _:
                return f"put into the cluster's {tier}, or found there ({self.cause})"
            case "unclaimed", _:
                return f"taken out of the cluster's {tier}: {self.cause}"
            case "ended", "moved":
                return f"moved away from {tier} to {self.target}"
            case _, cause if cause in _ENDED:
                return _ENDED[cause].format(tier=tier)
            case _:
                return f"evicted from {tier}: {self.cause}"


class HeldPlace(msgspec.Struct, frozen=True, kw_only=True):
    """Where a block is held at the end of the history."""

    instance: str
    stream: str
    tier: str
    since: str


class Unknown(msgspec.Struct, frozen=True, kw_only=True):
    """Events that are missing of an instance the block was at: it may have come and gone in between."""

    instance: str
    since: str | None
    until: str | None
    events: int


class BlockLife(msgspec.Struct, kw_only=True):
    """One block of one namespace, from its first event to its last."""

    block: str
    namespace: str
    model: str | None = None
    tenant: str | None = None
    events: list[BlockEvent] = []
    held: list[HeldPlace] = []
    unknown: list[Unknown] = []

    def lines(self) -> Iterator[str]:
        """For people."""
        whose = ", ".join(
            f"{name} {value}" for name, value in (("model", self.model), ("tenant", self.tenant)) if value
        )
        yield f"block {self.block} in namespace {self.namespace}{f' ({whose})' if whose else ''}"
        for one in self.events:
            who = _named(one.instance, one.stream)
            yield f"  {one.time}  {who} {place_text(one.epoch, one.offset)}  {one.sentence()}"
        for hole in self.unknown:
            since = hole.since or "the beginning"
            yield (
                f"  {counted(hole.events, 'event')} of {hole.instance} are missing between {since} and {hole.until}: "
                "what they said of it is not known"
            )
        places = "; ".join(f"{_named(one.instance, one.stream)} in {one.tier} since {one.since}" for one in self.held)
        yield f"  held at the end of the log: {places or 'nowhere'}"
        yield "  times are those of each instance's own clock"


class BlockLives(msgspec.Struct, kw_only=True):
    """The blocks whose hash begins with the digits given.

    Attributes:
        source: that the history was made of. until: how far it goes.
    """

    source: str
    until: str
    blocks: list[BlockLife] = []

    def lines(self) -> Iterator[str]:
        """For people."""
        for one in self.blocks:
            yield from one.lines()


class ChangeCount(msgspec.Struct, frozen=True, kw_only=True):
    """So many block events of one kind."""

    instance: str
    tier: str
    event: str
    cause: str | None
    blocks: int


class ChangeReport(msgspec.Struct, kw_only=True):
    """What changed from `since` on and before `until`. Each block counts once for each event.

    Attributes:
        silences: instances whose last event in the log, or of an epoch, is in that time, and which did not stop.
        lives: where blocks were asked for, what happened to each in that time.
    """

    source: str
    since: str
    until: str
    changes: list[ChangeCount] = []
    starts: list[str] = []
    stops: list[str] = []
    silences: list[str] = []
    lives: list[BlockLife] = []
    holes: list[Unknown] = []

    def lines(self) -> Iterator[str]:
        """For people."""
        yield f"from {self.since} to {self.until}, by the clocks of the instances"
        told = [
            f"{one.time}  {_named(one.instance, one.stream)} {place_text(one.epoch, one.offset)}  "
            f"block {life.block}: {one.sentence()}"
            for life in self.lives
            for one in life.events
        ]
        yield from (f"  {one}" for one in sorted((*self.starts, *self.stops, *self.silences, *told), key=_time_of_line))
        for hole in self.holes:
            yield f"  {hole.instance}: {counted(hole.events, 'event')} missing, up to {hole.until}"
        for one in self.changes:
            yield f"  {one.instance:<20} {one.tier:<6} {one.event} {one.cause or '':<10} {one.blocks:>14,} blocks"
        if not (self.changes or self.starts or self.stops or self.silences or self.holes):
            yield "  nothing changed"


def _time_of_line(line: str) -> str:
    return line.partition(" ")[0]


class TenantTier(msgspec.Struct, frozen=True, kw_only=True):
    """What one tenant has in one tier; `bytes` is None where no start has told the size of a block."""

    tenant: str | None
    tier: str
    blocks: int
    bytes: int | None
    instances: int


class Unheard(msgspec.Struct, frozen=True, kw_only=True):
    """An instance whose blocks are counted though nothing was heard of it lately: it has stopped, was killed, or had
    nothing to say.

    Attributes:
        last_frame: when it was heard last. stopped: why; None where it has not said that it stops.
    """

    instance: str
    blocks: int
    last_frame: str
    stopped: str | None = None

    def sentence(self) -> str:
        """What is so, and what that means."""
        which = f"{counted(self.blocks, 'block')} of these {'is' if self.blocks == 1 else 'are'} of {self.instance}"
        if self.stopped is not None:
            return f"{which}, which stopped at {self.last_frame} ({self.stopped}); catalogs leave it out"
        return f"{which}, last heard at {self.last_frame}; if it was killed, catalogs leave it out"


class TenantClaims(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks of one tenant that a pool of the cluster has, as far as the log tells."""

    tenant: str | None
    tier: str
    pool: str | None
    blocks: int


class Tenants(msgspec.Struct, kw_only=True):
    """Whose blocks were held at a moment, largest first. `holes`: what is missing then.

    What an instance held counts until its next start ends it: a log does not say of one that is gone when it went.
    `unheard` names those of which this may be so, and what they hold. `claims` are blocks in pools of the cluster,
    which belong to no instance and are in no row of `tenants`.
    """

    source: str
    at: str
    tenants: list[TenantTier] = []
    claims: list[TenantClaims] = []
    unheard: list[Unheard] = []
    holes: list[Unknown] = []

    def lines(self) -> Iterator[str]:
        """For people."""
        is_any = bool(self.tenants or self.claims)
        yield f"held at {self.at}" if is_any else f"nothing was held at {self.at or 'any time: there is no event'}"
        for one in self.tenants:
            size = "of unknown size" if one.bytes is None else f"{one.bytes:>20,} bytes"
            where = counted(one.instances, "instance")
            yield f"  {_tenant_named(one.tenant):<24} {one.tier:<6} {one.blocks:>14,} blocks {size} at {where}"
        for claim in self.claims:
            where = f"claimed in {claim.pool or 'a pool'} of the cluster"
            yield f"  {_tenant_named(claim.tenant):<24} {claim.tier:<6} {claim.blocks:>14,} blocks {where}"
        yield from (f"  {one.sentence()}" for one in self.unheard)
        for hole in self.holes:
            yield f"  {hole.instance}: {counted(hole.events, 'event')} missing, up to {hole.until}"


def _tenant_named(tenant: str | None) -> str:
    return "(unknown)" if tenant is None else tenant or "(none)"


def why(history: HistoryDatabase, digits: str, instance: str | None = None) -> BlockLives:
    """The life of each block whose hash begins so.

    Args:
        instance: what happened there alone.
    Raises: SourceError: no block's does, or too many, or it is no hash.
    """
    digits = _checked(digits)
    found = block_lives(history, digits, _MOST_BLOCKS, instance)
    if not found:
        raise SourceError(f"no event in {history.manifest.source} names a block that begins with {digits}")
    if len(found) > _MOST_BLOCKS:
        raise SourceError(f"more than {_MOST_BLOCKS} blocks begin with {digits}; give more digits")
    one, values = _only(instance)
    lives = BlockLives(source=history.manifest.source, until=history.manifest.until)
    for life in found:
        block, namespace = life.block, life.namespace
        held = f"SELECT instance, stream, tier, began FROM residencies WHERE block = ? AND namespace = ? {one}"
        life.held = [
            HeldPlace(instance=row[0], stream=row[1], tier=row[2], since=_iso(row[3]) or "")
            for row in sorted(history.ask(held, [block, namespace, *values]).rows)
        ]
        life.unknown = _holes(history, sorted({one.instance for one in life.events}))
        lives.blocks.append(life)
    return lives


def _checked(digits: str) -> str:
    """The beginning of a hash. Raises SourceError: it is none."""
    digits = digits.lower().removeprefix("0x")
    if not re.fullmatch(f"[0-9a-f]{{{_LEAST_DIGITS},{2 * HASH_BYTES}}}", digits):
        raise SourceError(f"{digits!r} is no hash: give {_LEAST_DIGITS} to {2 * HASH_BYTES} hexadecimal digits")
    return digits


def block_lives(
    history: HistoryDatabase, digits: str, most: int, instance: str | None = None, latest: int | None = None
) -> list[BlockLife]:
    """The blocks whose hash begins so, with their events and nothing else; of more than `most` no events.

    Args:
        latest: of each block that has more events than so many, at least its last so many and one more.
    Raises: SourceError.
    """
    one, values = _only(instance)
    cut = "" if latest is None else f"ORDER BY time DESC, {', '.join(_COLUMNS[1:6])} LIMIT {2 * latest + 2}"
    blocks = history.ask(
        f"SELECT DISTINCT block, namespace FROM block_life(?) WHERE true {one} LIMIT {most + 1}", [digits, *values]
    )
    fields = {row[0]: row[1:] for row in history.ask("SELECT namespace, model, tenant FROM namespaces").rows}
    lives = []
    for block, namespace in sorted(blocks.rows):
        model, tenant = fields.get(namespace, (None, None))
        lives.append(BlockLife(block=block, namespace=namespace, model=model, tenant=tenant))
    if len(lives) <= most:
        # What moved is two rows and one event
        events = f"SELECT {', '.join(_COLUMNS)} FROM block_life(?) WHERE namespace = ? {one} {cut}"
        for life in lives:
            life.events = _events(history.ask(events, [life.block, life.namespace, *values]).rows)
    return lives


def changes(
    history: HistoryDatabase, since: datetime, until: datetime, instance: str | None = None, digits: str | None = None
) -> ChangeReport:
    """What changed in a stretch of time, its end not counted.

    Args:
        digits: only of blocks whose hash begins so. Raises SourceError: it is no hash, or of too many blocks.
    """
    found = ChangeReport(source=history.manifest.source, since=_iso(since) or "", until=_iso(until) or "")
    one, values = _only(instance)
    narrowed, narrow = one, values
    if digits is not None:
        digits = _checked(digits)
        narrowed, narrow = f"{one} AND block >= ? AND block <= ?", [*values, digits, f"{digits}g"]
        found.lives = _lives_within(history, digits, instance, found.since, found.until)
    found.changes = [
        ChangeCount(instance=row[0], tier=row[1], event=row[2], cause=row[3], blocks=row[4])
        for row in history.ask(
            "SELECT instance, tier, event, cause, count(*) FROM changes(?, ?) "
            f"WHERE true {narrowed} GROUP BY ALL ORDER BY ALL",
            [since, until, *narrow],
        ).rows
    ]
    rows = history.ask(
        "SELECT instance, stream, epoch, began, last_frame, stopped FROM instances "
        f"WHERE true {one} ORDER BY instance, stream, life, epoch",
        values,
    ).rows
    _note_epochs(found, [_Epoch(*row) for row in rows], since, until, history.manifest.until)
    named = [instance] if instance is not None else None
    found.holes = _holes(history, named, since, until)
    return found


class _Epoch(NamedTuple):
    """A row of `instances`."""

    instance: str
    stream: str
    epoch: int
    began: datetime
    last_frame: datetime
    stopped: str | None


def _note_epochs(found: ChangeReport, epochs: list[_Epoch], since: datetime, until: datetime, end: str) -> None:
    """Epochs that began, stopped, or fell silent in a stretch of time.

    A stream has no word of a death. What the log can tell is that an epoch was followed by another one without a stop,
    or that nothing of an instance comes after some event up to the log's end.

    Args:
        end: of the log.
    """
    for one, following in zip_longest(epochs, epochs[1:]):
        who, last = _named(one.instance, one.stream), _iso(one.last_frame)
        if since <= one.began < until:
            found.starts.append(f"{_iso(one.began)}  {who} began epoch {one.epoch}")
        if not since <= one.last_frame < until:
            continue
        if one.stopped is not None:
            found.stops.append(f"{last}  {who} stopped epoch {one.epoch}: {one.stopped}")
        elif following is not None and following[:2] == one[:2]:
            found.silences.append(
                f"{last}  {who}: the last event of epoch {one.epoch}, which did not stop; epoch {following.epoch} "
                f"began at {_iso(following.began)}"
            )
        elif datetime.fromisoformat(end).replace(tzinfo=None) - one.last_frame >= _QUIET:
            found.silences.append(
                f"{last}  {who}: its last event in this log, which goes on to {end}; it did not stop: it is gone, or "
                "had nothing to record"
            )
    for words in (found.starts, found.stops, found.silences):
        words.sort(key=_time_of_line)


def _lives_within(
    history: HistoryDatabase, digits: str, instance: str | None, since: str, until: str
) -> list[BlockLife]:
    """What happened to blocks in a stretch of time, its end not counted. Raises SourceError."""
    lives = block_lives(history, digits, _MOST_BLOCKS, instance)
    if len(lives) > _MOST_BLOCKS:
        raise SourceError(f"more than {_MOST_BLOCKS} blocks begin with {digits}; give more digits")
    for life in lives:
        life.events = [event for event in life.events if since <= event.time < until]
    return [life for life in lives if life.events]


def tenants(history: HistoryDatabase, at: datetime | None = None) -> Tenants:
    """Whose blocks were held at a moment, or at the end."""
    asked = "FROM tenants" if at is None else "FROM tenants_at(?)"
    rows = history.ask(f"SELECT tenant, tier, blocks, bytes, instances {asked}", [] if at is None else [at]).rows
    return Tenants(
        source=history.manifest.source,
        at=history.manifest.until if at is None else _iso(at) or "",
        tenants=[
            TenantTier(
                tenant=tenant, tier=tier, blocks=blocks, bytes=None if size is None else int(size), instances=at_
            )
            for tenant, tier, blocks, size, at_ in rows
        ],
        claims=_claims(history, at),
        unheard=_unheard(history, at),
        holes=[] if at is None else [_unknown(row) for row in hole_rows(history) if row.is_open(at)],
    )


def _claims(history: HistoryDatabase, at: datetime | None) -> list[TenantClaims]:
    asked = "claimed_objects" if at is None else "claimed_objects_at(?)"
    rows = history.ask(
        f"SELECT tenant, tier, pool, count(*) FROM {asked} LEFT JOIN namespaces USING (namespace) "
        "GROUP BY ALL ORDER BY 4 DESC, 1, 2, 3",
        [] if at is None else [at],
    ).rows
    return [TenantClaims(tenant=row[0], tier=row[1], pool=row[2], blocks=row[3]) for row in rows]


def _unheard(history: HistoryDatabase, at: datetime | None) -> list[Unheard]:
    """Instances that hold something at a moment, or at the end, and were not heard shortly before."""
    until = history.manifest.until
    if at is None and not until:
        return []
    moment = datetime.fromisoformat(until).replace(tzinfo=None) if at is None else at
    epochs = "SELECT instance, stream, last_frame, stopped FROM instances WHERE began <= ? ORDER BY began, life, epoch"
    latest = {row[:2]: row[2:] for row in history.ask(epochs, [moment]).rows}
    held = history.ask("SELECT instance, stream, count(*) FROM residencies_at(?) GROUP BY ALL ORDER BY ALL", [moment])
    found = []
    for instance, stream, blocks in held.rows:
        last, stopped = latest.get((instance, stream), (None, None))
        if last is not None and last <= moment and (stopped is not None or moment - last >= _QUIET):
            found.append(
                Unheard(instance=instance, blocks=blocks, last_frame=_iso(last) or "", stopped=stopped),
            )
    return found


_COLUMNS = (
    "time",
    "instance",
    "stream",
    "life",
    "epoch",
    '"offset"',
    "event",
    "tier",
    "cause",
    "source",
    "target",
    "position",
    "slot",
)


def _events(rows: list[tuple[Any, ...]]) -> list[BlockEvent]:
    """In order; what moved is one event where its begin is there, not an end and a begin.

    Of one stream that is the order of its log. Streams are put together by their clocks, of which one that goes back
    stands still.
    """
    rows = sorted(rows, key=lambda row: (row[1:6], row[6] in ("ended", "unclaimed")))
    begun = {row[1:6] for row in rows if row[6] == "began"}
    moved = {row[1:6] for row in rows if row[6] == "ended" and row[8] == "moved"}
    placed: list[tuple[datetime, BlockEvent]] = []
    latest: dict[tuple[str, str], datetime] = {}
    for row in rows:
        time, instance, stream, life, epoch, offset, event, tier, cause, source, target, position, slot = row
        is_move = row[1:6] in moved and row[1:6] in begun
        if is_move and event == "ended":
            continue
        latest[instance, stream] = at = max(time, latest.get((instance, stream), time))
        told = BlockEvent(
            time=_iso(time) or "",
            instance=instance,
            stream=stream,
            life=life,
            epoch=epoch,
            offset=offset,
            event=event,
            tier=tier,
            cause=cause,
            source=source,
            target=tier if is_move and event == "began" else target,
            position=position,
            slot=slot,
        )
        placed.append((at, told))
    return [told for _, told in sorted(placed, key=lambda one: one[0])]


def _only(instance: str | None) -> tuple[str, list[object]]:
    """What narrows a question to an instance, and its values."""
    return ("", []) if instance is None else ("AND instance = ?", [instance])


def _named(instance: str, stream: str) -> str:
    return f"{instance} ({stream})" if stream else instance


class HoleRow(NamedTuple):
    """A row of `holes`."""

    instance: str
    stream: str
    epoch: int
    first_offset: int
    next_offset: int
    since: datetime | None
    until: datetime

    def is_open(self, moment: datetime) -> bool:
        """Whether what was held at a moment is not known for it."""
        ends = (self.until,) if self.since is None else (self.since, self.until)  # of a clock that may have gone back
        return (self.since is None or min(ends) <= moment) and moment < max(ends)


def hole_rows(history: HistoryDatabase) -> list[HoleRow]:
    """All holes, by their ends. Raises SourceError."""
    rows = history.ask(
        'SELECT instance, stream, epoch, first_offset, next_offset, since, "until" FROM holes ORDER BY "until", 1'
    ).rows
    return [HoleRow(*row) for row in rows]


def _holes(
    history: HistoryDatabase,
    instances: list[str] | None,
    since: datetime | None = None,
    until: datetime | None = None,
) -> list[Unknown]:
    return [
        _unknown(row)
        for row in hole_rows(history)
        if (instances is None or row.instance in instances)
        and (since is None or row.until >= since)
        and (until is None or row.since is None or row.since < until)
    ]


def _unknown(row: HoleRow) -> Unknown:
    return Unknown(
        instance=row.instance,
        since=_iso(row.since),
        until=_iso(row.until),
        events=row.next_offset - row.first_offset,
    )


def _iso(moment: datetime | None) -> str | None:
    return None if moment is None else f"{moment.isoformat(timespec='microseconds')}Z"
