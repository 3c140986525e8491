"""What has changed in the index lately: a ring bounded in bytes, which any number of readers follow at their own speed.

Frames are kept as the bytes that were applied, and taken apart when the first reader comes to them: while nobody reads,
a frame costs an object and a count. A reader keeps the serial of the entry it has read last; whose next entry is gone
has missed something.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, NamedTuple

from kvbm.catalog.index.cluster_index import Applied, Claims, ClusterIndex, PlainApplied
from kvbm.catalog.index.plain_frames import PlainRun
from kvbm.catalog.index.sealed_places import SealedPlaces
from kvbm.core.backend import DecodeFrame
from kvbm.core.codec import Frame
from kvbm.core.events import PoolStated
from kvbm.core.ids import Epoch, InstanceId, NamespaceId, Tier
from kvbm.streams.base import StreamMessage

_HEADER_BYTES = 48  # of a frame, before the instance's name
_ENTRY_BYTES = 400  # of the objects that make an entry, beside its frame
_MOST_RUN = 64
_NO_EPOCH = Epoch(0)


class ChangeKind(Enum):
    """What has happened."""

    FRAME = "frame"
    EMPTIED = "emptied"  # an epoch was joined midway
    MISSED = "missed"  # events of an instance were
    DROPPED = "dropped"
    STATUS = "status"  # an instance was excluded, returned, waits, or waits no longer
    CLAIMS = "claims"  # of a pool, from elsewhere than the stream
    FORGOTTEN = "forgotten"  # a namespace, with all its blocks


class PoolClaims(NamedTuple):
    """Blocks that a pool of cluster reach is claimed to hold, or no longer."""

    pool: str
    tier: Tier | None
    namespace: NamespaceId
    hashes: bytes
    withdrawn: bool


class LogEntry:
    """One thing that has changed the index.

    Attributes:
        serial: grows by one with each entry.
        sequence: of the stream's message that was being applied, or was last.
        safe: whoever reads the stream after this sequence meets everything that follows the entry; below `sequence`
            while frames are in a reorder buffer.
        data, at, skip: the frame, and how many of its events were applied before.
        claims: of pools, by name.
    """

    __slots__ = (
        "_frame",
        "at",
        "bytes",
        "claims",
        "data",
        "epoch",
        "instance",
        "kind",
        "safe",
        "sequence",
        "serial",
        "skip",
    )

    def __init__(
        self,
        serial: int,
        sequence: int,
        safe: int,
        kind: ChangeKind,
        instance: InstanceId,
        data: bytes = b"",
        at: int = 0,
        skip: int = 0,
        claims: Sequence[PoolClaims] = (),
        epoch: Epoch = _NO_EPOCH,
    ) -> None:
        self.serial, self.sequence, self.safe = serial, sequence, safe
        self.kind, self.instance, self.epoch = kind, instance, epoch
        self.data, self.at, self.skip, self.claims = data, at, skip, claims
        self.bytes = _ENTRY_BYTES + sum(len(one.hashes) for one in claims)
        if data:
            self.bytes += frame_bytes_at(data, at)
        self._frame: Frame | None = None

    def name(self) -> InstanceId:
        """The instance it is of."""
        if not self.instance and self.kind is ChangeKind.FRAME:
            self.instance = instance_at(self.data, self.at)
        return self.instance

    def frame(self, decode: DecodeFrame) -> Frame:
        """The frame, taken apart once for all readers."""
        if self._frame is None:
            self.name()
            self._frame, _ = decode(self.data, self.at)
            self.data = b""
        return self._frame


def instance_at(data: bytes, at: int) -> InstanceId:
    """Whose a good frame is."""
    begin = at + _HEADER_BYTES
    return InstanceId(data[begin : begin + data[at + 6]].decode())


def frame_bytes_at(data: bytes, at: int) -> int:
    """How long a good frame is."""
    return int.from_bytes(data[at + 8 : at + 12], "little")


class LogPlace(NamedTuple):
    """A place in a catalog's log, and in the stream.

    Attributes:
        sequence: whoever reads the stream after it meets all that follows. serial, run: of the log. stream: its name in
            this catalog's SQL.
    """

    sequence: int
    serial: int
    run: str
    stream: str

    def text(self) -> str:
        """As clients are told it."""
        return f"{self.sequence}.{self.serial}.{self.run}.{self.stream}"


def place_of(text: str) -> LogPlace | None:
    """The place in a client's words; None: there is none in them."""
    parts = text.split(".", 3)
    if len(parts) != 4 or len(text) > 256:
        return None
    sequence, serial, run, stream = parts
    if not all(one.isascii() and one.isdigit() and len(one) < 20 for one in (sequence, serial)) or len(run) > _MOST_RUN:
        return None
    return LogPlace(int(sequence), int(serial), run, stream)


class ChangeLog:
    """The ring. One asyncio loop.

    Args:
        most_bytes: of the frames and claims it keeps, about.

    Attributes:
        run: of this log; another one when the stream's sequences began anew, because entries of before are of another
            history.
        bytes: of what it keeps.
    """

    def __init__(self, most_bytes: int, decode: DecodeFrame) -> None:
        self.run = secrets.token_hex(8)
        self.bytes = 0
        self.decode = decode
        self._most_bytes = most_bytes
        self._stream: Callable[[], str] = str
        self._entries: deque[LogEntry] = deque()
        self._last = 0
        self._sequence = self._floor = 0
        self._waiting: dict[InstanceId, int] = {}  # instances with frames in a reorder buffer, and since which sequence
        self._wanted: list[asyncio.Event] = []
        self._sealed = SealedPlaces()

    def __len__(self) -> int:
        return len(self._entries)

    def begin(self, sequence: int, stream: Callable[[], str]) -> None:
        """The index is loaded; what was said until now is of nobody's concern.

        Args:
            sequence: of the last message in it. stream: the stream's name.
        """
        self._entries.clear()
        self.bytes, self._sequence, self._floor, self._stream = 0, sequence, sequence, stream

    # -- writing ------------------------------------------------------------------------------------------------------

    def add(
        self,
        sequence: int,
        kind: ChangeKind,
        instance: InstanceId,
        data: bytes = b"",
        at: int = 0,
        skip: int = 0,
        claims: Sequence[PoolClaims] = (),
        epoch: Epoch = _NO_EPOCH,
    ) -> None:
        """Something has changed the index."""
        if sequence < self._sequence:
            self._begin_anew()
        self._sequence = sequence
        self._last += 1
        safe = min(sequence, min(self._waiting.values()) - 1) if self._waiting else sequence
        entry = LogEntry(self._last, sequence, safe, kind, instance, data, at, skip, claims, epoch)
        self._entries.append(entry)
        self.bytes += entry.bytes
        while self.bytes > self._most_bytes:
            gone = self._entries.popleft()
            self.bytes -= gone.bytes
            self._floor = gone.sequence
        if self._wanted:
            self.wake()

    def wait(self, sequence: int, instance: InstanceId, waiting: bool) -> None:
        """An instance has frames in a reorder buffer from this sequence on, or no longer."""
        if waiting:
            self._waiting.setdefault(instance, sequence)
        else:
            self._waiting.pop(instance, None)

    def wake(self) -> None:
        """Wake the readers that wait."""
        wanted, self._wanted = self._wanted, []
        for event in wanted:
            event.set()

    def _begin_anew(self) -> None:
        self.run = secrets.token_hex(8)
        self._entries.clear()
        self._waiting.clear()
        self.bytes = self._floor = 0
        self._last += 1  # nobody's next entry is the first of the new history

    # -- reading ------------------------------------------------------------------------------------------------------

    @property
    def last(self) -> int:
        """Serial of the newest entry, also when it is gone."""
        return self._last

    def place(self) -> LogPlace:
        """Behind the newest entry."""
        safe = min(self._sequence, min(self._waiting.values()) - 1) if self._waiting else self._sequence
        return LogPlace(safe, self._last, self.run, self._stream())

    def place_behind(self, entry: LogEntry) -> LogPlace:
        """Behind an entry."""
        return LogPlace(entry.safe, entry.serial, self.run, self._stream())

    def text(self, place: LogPlace, in_clear: bool) -> str:
        """A place as a client is told it.

        Args:
            in_clear: the client may know how many messages the whole cluster sends; then other catalogs can read the
                place, too.
        """
        return place.text() if in_clear else self._sealed.seal(place.sequence, place.serial, place.run)

    def place_of(self, text: str, in_clear: bool) -> LogPlace | None:
        """The place in a client's words; None: there is none that such a client could have been told."""
        if in_clear:
            return place_of(text)
        found = self._sealed.unseal(text, self.run)
        return None if found is None else LogPlace(*found, self.run, self._stream())

    def after(self, serial: int) -> LogEntry | None:
        """The entry after one; None when there is none yet. Raises LookupError: it is gone."""
        if serial >= self._last:
            return None
        at = serial + 1 - (self._entries[0].serial if self._entries else self._last + 1)
        if at < 0:
            raise LookupError(serial)
        return self._entries[at]

    def find(self, place: LogPlace) -> int | None:
        """The serial to go on after; None: what follows the place is not all here.

        A place of another catalog, or of before this one was restarted, is found by its sequence; then some entries may
        come again.
        """
        if place.run == self.run:
            first = self._entries[0].serial if self._entries else self._last + 1
            return place.serial if first - 1 <= place.serial <= self._last else None
        if place.stream != self._stream() or not place.stream or place.sequence < self._floor:
            return None
        before = self._last
        for entry in reversed(self._entries):
            if entry.sequence <= place.sequence:
                break
            before = entry.serial - 1
        return before

    async def wait_after(self, serial: int, timeout_s: float) -> None:
        """Wait until there is an entry after one, or somebody wakes the readers, or it takes too long."""
        if serial < self._last:
            return
        event = asyncio.Event()
        self._wanted.append(event)
        try:
            async with asyncio.timeout(timeout_s):
                await event.wait()
        except TimeoutError:
            pass
        finally:
            if not event.is_set():
                self._wanted = [one for one in self._wanted if one is not event]


class RecordedIndex:
    """An index whose changes go into a log. Questions go to the index itself.

    Args:
        sequence: of the stream's message that is being applied.
    """

    def __init__(self, index: ClusterIndex, log: ChangeLog, sequence: Callable[[], int]) -> None:
        self._index, self._log, self._sequence = index, log, sequence
        for name in dir(index):
            if not name.startswith("_") and not hasattr(type(self), name):
                setattr(self, name, getattr(index, name))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._index, name)

    def apply(self, data: bytes, at: int = 0, skip: int = 0) -> Applied:
        """See `ClusterIndex`."""
        applied = self._index.apply(data, at, skip)
        claims = self._named(instance_at(data, at), applied.claims) if applied.claims else ()
        self._log.add(self._sequence(), ChangeKind.FRAME, InstanceId(""), data, at, skip, claims)
        return applied

    def note_run(self, messages: Sequence[StreamMessage], run: PlainRun, applied: PlainApplied) -> None:
        """A run of plain frames of these messages was applied, by a thread or in place."""
        claims: dict[int, list[Claims]] = {}
        for said in applied.claims:
            claims.setdefault(said.message, []).append(said.claims)
        ends = [len(message.data) for message in messages[: applied.messages]]
        if applied.diverged_at is not None:
            ends.append(applied.diverged_at)
        for number, (message, end) in enumerate(zip(messages, ends, strict=False)):
            at, instance = 0, run.places[run.messages[number][0]].instance
            while at < end:
                next_at = at + frame_bytes_at(message.data, at)
                said_here = claims.get(number, ()) if next_at >= end else ()
                self._log.add(
                    message.sequence, ChangeKind.FRAME, instance, message.data, at, 0, self._named(instance, said_here)
                )
                at = next_at

    def begin_blind(
        self,
        instance: InstanceId,
        epoch: Epoch,
        pools: Sequence[PoolStated] | None = None,
        likely: Sequence[PoolStated] = (),
    ) -> None:
        """See `ClusterIndex`."""
        self._index.begin_blind(instance, epoch, pools, likely)
        self._log.add(self._sequence(), ChangeKind.EMPTIED, instance, epoch=epoch)

    def miss(self, instance: InstanceId) -> None:
        """See `ClusterIndex`."""
        self._index.miss(instance)
        self._log.add(self._sequence(), ChangeKind.MISSED, instance)

    def wait(self, instance: InstanceId, waiting: bool) -> None:
        """See `ClusterIndex`."""
        self._index.wait(instance, waiting)
        self._log.wait(self._sequence(), instance, waiting)
        self._log.add(self._sequence(), ChangeKind.STATUS, instance)

    def exclude(self, instance: InstanceId, excluded: bool) -> None:
        """See `ClusterIndex`."""
        self._index.exclude(instance, excluded)
        self._log.add(self._sequence(), ChangeKind.STATUS, instance)

    def drop(self, instance: InstanceId) -> None:
        """See `ClusterIndex`."""
        self._index.drop(instance)
        self._log.wait(self._sequence(), instance, False)
        self._log.add(self._sequence(), ChangeKind.DROPPED, instance)

    def claim(self, pool: str, namespace: NamespaceId, hashes: bytes) -> None:
        """See `ClusterIndex`."""
        self._index.claim(pool, namespace, hashes)
        self._add_claims(PoolClaims(pool, None, namespace, hashes, False))

    def unclaim(self, pool: str, namespace: NamespaceId, hashes: bytes) -> None:
        """See `ClusterIndex`."""
        self._index.unclaim(pool, namespace, hashes)
        self._add_claims(PoolClaims(pool, None, namespace, hashes, True))

    def forget_namespace(self, namespace: NamespaceId) -> None:
        """See `ClusterIndex`."""
        self._index.forget_namespace(namespace)
        self._log.add(
            self._sequence(), ChangeKind.FORGOTTEN, InstanceId(""), claims=(PoolClaims("", None, namespace, b"", True),)
        )

    def _add_claims(self, claims: PoolClaims) -> None:
        self._log.add(self._sequence(), ChangeKind.CLAIMS, InstanceId(""), claims=(claims,))

    def _named(self, instance: InstanceId, claims: Sequence[Claims]) -> Sequence[PoolClaims]:
        pools = {tier: self._index.pool_name(instance, tier) for tier in {one.tier for one in claims}}
        return [PoolClaims(pools[one.tier] or "", one.tier, one.namespace, one.hashes, one.withdrawn) for one in claims]
