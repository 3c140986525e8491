"""Frames: events ↔ bytes. Journal, stream, captures and golden files hold these same bytes.

All integers are little-endian. A frame is canonical: what decodes encodes to the same bytes again, so bytes that could
be written in two ways are refused.

    at  bytes  field
     0      4  magic "KVBM"
     4      2  version: 3 with a UsageRecorded, else 2 where an InstanceStarted has attributes, else 1
     6      1  instance_bytes: length of the instance's name
     7      1  namespace_count
     8      4  frame_bytes: the whole frame, checksum included
    12      4  event_count, at least 1
    16      8  epoch
    24      8  first_offset: offset of the first event
    32      8  wall_time_ns: when the frame was cut, Unix time
    40      8  digest of the instance's residencies after the last event; all bits set where nobody knows it: in a frame
               of usage that an erasure has cut out of a longer one
    48      …  the instance's name, UTF-8
            …  namespace ids, 16 bytes each, in the order the events first use them
            …  events
             4  CRC-32C of all before it

A writer writes the lowest version that suffices. In every version to come magic, version, frame_bytes, epoch and the
checksum stay where they are, so a reader of before tells a newer frame from a damaged one and knows its epoch
(`newer_frame`).

    event                 after its kind (u8)
    1 InstanceStarted     u32 length, MessagePack of the struct: an array of 6, of 7 with attributes (names sorted).
                          Fields of namespaces are as in `Namespace.fields`
    2 BlocksCreated       u8 namespace, u8 tier, u8 flags (1 slots, 2 parent), u32 start, u32 count, [parent], hashes,
                          [slots]
    3 BlocksMigrated      u8 namespace, u8 source (255: an instance), u8 target, u8 flags (1 slots, 4 kept), u8 cause,
                          u32 count, [u8 length, instance], hashes, [slots]
    4 BlocksEvicted       u8 namespace, u8 tier, u8 reason, u32 count, hashes
    5 ResidenciesListed   u8 namespace, u8 tier, u8 flags (1 slots), u32 snapshot, u32 count, hashes, [slots]
    6 SnapshotEnded       u8 tier, u32 snapshot, u32 count
    7 InstanceStopped     u8 reason
    8 UsageRecorded       u8 flags (1 last), u16 rows, u64 since_ms, u64 until_ms, 4 times u64 bytes of a block; each
                          row: u8 length, tenant, 15 times u64: the fields of `UsageRow` in order. Tenants ascend
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from mmap import mmap
from typing import NamedTuple, TypeVar, assert_never

import msgspec

from kvbm.core.checks import is_longer, text_bytes
from kvbm.core.checksum import crc32c
from kvbm.core.errors import (
    CorruptFrameError,
    FrameError,
    LayoutError,
    MalformedFrameError,
    NewerFrameError,
    NotAFrameError,
    TornFrameError,
)
from kvbm.core.events import (
    MAX_ATTRIBUTE_BYTES,
    MAX_ATTRIBUTES,
    MAX_NAMESPACES,
    MAX_POOLS,
    MAX_TOPOLOGY,
    BlocksCreated,
    BlocksEvicted,
    BlocksMigrated,
    Event,
    EvictReason,
    InstanceStarted,
    InstanceStopped,
    MigrateCause,
    ResidenciesListed,
    RunEvent,
    SnapshotEnded,
    StopReason,
    UsageRecorded,
)
from kvbm.core.ids import (
    HASH_BYTES,
    MAX_NAME_BYTES,
    MAX_TEXT_BYTES,
    NO_PARENT,
    SLOT_BYTES,
    Epoch,
    InstanceId,
    NamespaceId,
    Offset,
    SequenceHash,
    Tier,
)
from kvbm.core.usage_report import encode_usage, take_usage

MAGIC = b"KVBM"
VERSION = 3  # the newest that is read
USAGE_VERSION = 3  # from which on there is a UsageRecorded
MAX_FRAME_BYTES = 1 << 26  # a length beyond this is taken for damage, not for a frame
MAX_FRAME_NAMESPACES = 255
FRAME_OVERHEAD_BYTES = 52  # header and checksum, names not counted
FRAME_EVENT_BYTES = 64 << 10  # a frame is cut once its events reach this size
STOPPED_BYTES = 2  # of an InstanceStopped

UNKNOWN_DIGEST = (1 << 64) - 1  # of a frame; it agrees with everything

_HEADER = struct.Struct("<4sHBBIIQQQQ")
_CREATED = struct.Struct("<BBBBII")
_MIGRATED = struct.Struct("<BBBBBBI")
_EVICTED = struct.Struct("<BBBBI")
_LISTED = struct.Struct("<BBBBII")
_SNAPSHOT_ENDED = struct.Struct("<BBII")
_STOPPED = struct.Struct("<BB")
_STARTED = struct.Struct("<BI")
_CRC = struct.Struct("<I")

_SLOTS, _PARENT, _KEPT = 1, 2, 4
_FROM_INSTANCE = 255

E = TypeVar("E", bound=IntEnum)


class Frame(msgspec.Struct, frozen=True, kw_only=True):
    """Consecutive events of one (instance, epoch).

    Attributes:
        first_offset: offset of `events[0]`; the others follow without holes.
        wall_time_ns: when the frame was cut, Unix time in nanoseconds.
        digest: of the instance's residencies after the last event, 64 bits; or UNKNOWN_DIGEST.
    """

    instance: InstanceId
    epoch: Epoch
    first_offset: Offset
    wall_time_ns: int
    digest: int
    events: tuple[Event, ...]

    @property
    def next_offset(self) -> Offset:
        """The offset after the last event."""
        return Offset(self.first_offset + len(self.events))


class FrameHeader(msgspec.Struct, frozen=True, kw_only=True):
    """What a frame says of itself before its events; enough to order frames and to find their ends."""

    instance: InstanceId
    epoch: Epoch
    first_offset: Offset
    event_count: int
    wall_time_ns: int
    digest: int
    frame_bytes: int

    @property
    def next_offset(self) -> Offset:
        """The offset after the last event."""
        return Offset(self.first_offset + self.event_count)


class FrameBytes(NamedTuple):
    """One whole frame as bytes, with what its header says of its place.

    Attributes:
        next_offset: offset after its last event.
    """

    epoch: Epoch
    first_offset: Offset
    next_offset: Offset
    data: bytes


def cut_frames(
    instance: InstanceId,
    epoch: Epoch,
    first: Offset,
    events: Sequence[Event],
    digests: Sequence[int],
    wall_time_ns: int,
) -> Iterator[Frame]:
    """Consecutive events as frames of bounded size, in order.

    A frame ends before the event at which those in it have reached FRAME_EVENT_BYTES, or at which it would name more
    than MAX_FRAME_NAMESPACES namespaces.

    Args:
        first: offset of `events[0]`.
        digests: of the residencies after each event.
    """

    def frame(begin: int, end: int) -> Frame:
        return Frame(
            instance=instance,
            epoch=epoch,
            first_offset=Offset(first + begin),
            wall_time_ns=wall_time_ns,
            digest=digests[end - 1],
            events=tuple(events[begin:end]),
        )

    begin = size = 0
    namespaces: set[bytes] = set()
    for index, event in enumerate(events):
        own = {event.namespace} if isinstance(event, RunEvent) else set()
        if size >= FRAME_EVENT_BYTES or len(namespaces | own) > MAX_FRAME_NAMESPACES:
            yield frame(begin, index)
            begin, size, namespaces = index, 0, set()
        size += _estimated_bytes(event)
        namespaces |= own
    if begin < len(events):
        yield frame(begin, len(events))


def _estimated_bytes(event: Event) -> int:
    if isinstance(event, RunEvent):
        return 32 + len(event.hashes) + (0 if isinstance(event, BlocksEvicted) else len(event.slots))
    if isinstance(event, UsageRecorded):
        return 16 + len(encode_usage(event))
    return 256 * (1 + len(event.namespaces)) if isinstance(event, InstanceStarted) else 16


def encoded_bytes(event: Event) -> int:
    """How many bytes of a frame's body the event takes. Raises LayoutError: it does not encode, as `encode_frame`."""
    try:
        return len(_encode_event(event, {}))
    except struct.error as error:
        raise LayoutError(f"a number does not fit the frame: {error}") from None


class ScannedFrame(NamedTuple):
    """A whole frame that was proven good and not taken apart.

    Attributes:
        next_offset: the offset after the last event.
        blocks: how many its events cover: created, migrated, evicted, listed.
        at, end: where it lies in the buffer, in bytes: [at, end).
        flaw: why, though it is a good frame, it cannot be part of an instance's stream; "" when it can.
    """

    instance: InstanceId
    epoch: Epoch
    first_offset: Offset
    next_offset: Offset
    wall_time_ns: int
    digest: int
    blocks: tuple[int, int, int, int]
    at: int
    end: int
    flaw: str = ""

    @property
    def event_count(self) -> int:
        """How many events it has."""
        return self.next_offset - self.first_offset


RUN_EVENTS = (BlocksCreated, BlocksMigrated, BlocksEvicted, ResidenciesListed)  # in the order of ScannedFrame.blocks


def encode_frame(frame: Frame, checksum: Callable[[bytes], int] = crc32c) -> bytes:
    """A frame's bytes.

    Raises: LayoutError: no events, an empty run, slots that do not count as the hashes, too many namespaces, or a
        number that does not fit its field.
    """
    if not frame.events:
        raise LayoutError("a frame needs at least one event")
    name = _encode_name(frame.instance, "the instance's name")
    namespaces: dict[bytes, int] = {}
    try:
        body = b"".join(_encode_event(event, namespaces) for event in frame.events)
        table = b"".join(namespaces)
        if len(namespaces) > MAX_FRAME_NAMESPACES:
            raise LayoutError(f"{len(namespaces)} namespaces in one frame; at most {MAX_FRAME_NAMESPACES} fit: cut it")
        size = _HEADER.size + len(name) + len(table) + len(body) + _CRC.size
        if size > MAX_FRAME_BYTES:
            raise LayoutError(f"the frame has {size} bytes; at most {MAX_FRAME_BYTES} fit: cut it")
        header = _HEADER.pack(
            MAGIC,
            _version_of(frame.events),
            len(name),
            len(namespaces),
            size,
            len(frame.events),
            frame.epoch,
            frame.first_offset,
            frame.wall_time_ns,
            frame.digest,
        )
    except struct.error as error:
        raise LayoutError(f"a number does not fit the frame: {error}") from None
    data = header + name + table + body
    return data + _CRC.pack(checksum(data))


def _version_of(events: Sequence[Event]) -> int:
    """The lowest version that suffices for these events."""
    if any(isinstance(event, UsageRecorded) for event in events):
        return USAGE_VERSION
    return 2 if any(isinstance(event, InstanceStarted) and event.attributes for event in events) else 1


def _encode_event(event: Event, namespaces: dict[bytes, int]) -> bytes:
    match event:
        case BlocksCreated():
            count = _counted(event.hashes, event.slots)
            flags = (_SLOTS if event.slots else 0) | (_PARENT if event.parent != NO_PARENT else 0)
            index = _namespace_index(event.namespace, namespaces)
            head = _CREATED.pack(2, index, event.tier, flags, event.start, count)
            parent = event.parent if flags & _PARENT else b""
            if len(event.parent) != HASH_BYTES:
                raise LayoutError(f"a parent hash of {len(event.parent)} bytes, not {HASH_BYTES}")
            return head + parent + event.hashes + event.slots
        case BlocksMigrated():
            count = _counted(event.hashes, event.slots)
            flags = (_SLOTS if event.slots else 0) | (_KEPT if event.kept else 0)
            index = _namespace_index(event.namespace, namespaces)
            source, name = _encode_source(event.source)
            head = _MIGRATED.pack(3, index, source, event.target, flags, event.cause, count)
            return head + name + event.hashes + event.slots
        case BlocksEvicted():
            count = _counted(event.hashes, b"")
            index = _namespace_index(event.namespace, namespaces)
            return _EVICTED.pack(4, index, event.tier, event.reason, count) + event.hashes
        case ResidenciesListed():
            count = _counted(event.hashes, event.slots)
            index = _namespace_index(event.namespace, namespaces)
            flags = _SLOTS if event.slots else 0
            head = _LISTED.pack(5, index, event.tier, flags, event.snapshot, count)
            return head + event.hashes + event.slots
        case SnapshotEnded():
            return _SNAPSHOT_ENDED.pack(6, event.tier, event.snapshot, event.count)
        case InstanceStopped():
            return _STOPPED.pack(7, event.reason)
        case InstanceStarted():
            blob = encode_started(event)
            return _STARTED.pack(1, len(blob)) + blob
        case UsageRecorded():
            return b"\x08" + encode_usage(event)
        case _:
            assert_never(event)


def _encode_source(source: Tier | InstanceId) -> tuple[int, bytes]:
    if isinstance(source, Tier):
        return int(source), b""
    name = _encode_name(source, "a source instance's name")
    return _FROM_INSTANCE, bytes([len(name)]) + name


def _encode_name(name: str, whose: str) -> bytes:
    try:
        encoded = name.encode()
    except UnicodeEncodeError as error:
        raise LayoutError(f"{whose} has no UTF-8: {error}") from None
    if not 1 <= len(encoded) <= 255:
        raise LayoutError(f"{whose} has {len(encoded)} bytes; it needs 1 to 255")
    return encoded


def _counted(hashes: bytes, slots: bytes) -> int:
    count, rest = divmod(len(hashes), HASH_BYTES)
    if rest or not count:
        raise LayoutError(f"a run of {len(hashes)} bytes of hashes; it needs a positive multiple of {HASH_BYTES}")
    if slots and len(slots) != count * SLOT_BYTES:
        raise LayoutError(f"{len(slots)} bytes of slots for {count} blocks; give {SLOT_BYTES} a block, or none")
    return count


def _namespace_index(namespace: bytes, namespaces: dict[bytes, int]) -> int:
    if len(namespace) != HASH_BYTES:
        raise LayoutError(f"a namespace id of {len(namespace)} bytes, not {HASH_BYTES}")
    index = namespaces.setdefault(bytes(namespace), len(namespaces))
    if index >= MAX_FRAME_NAMESPACES:
        raise LayoutError(f"more than {MAX_FRAME_NAMESPACES} namespaces in one frame: cut it")
    return index


def decode_header(data: bytes | mmap, at: int = 0) -> FrameHeader:
    """A frame's header, without proof that the rest is good.

    Raises: NotAFrameError, NewerFrameError, TornFrameError, MalformedFrameError.
    """
    left = max(0, len(data) - at)
    if left < _HEADER.size:
        if data[at : at + len(MAGIC)] != MAGIC[:left]:
            raise NotAFrameError(at, "no frame begins here")
        raise TornFrameError(at, f"{left} bytes are left, a header has {_HEADER.size}")
    magic, version, name_bytes, _, size, count, epoch, first, wall, digest = _HEADER.unpack_from(data, at)
    if magic != MAGIC:
        raise NotAFrameError(at, "no frame begins here")
    if version > VERSION:
        raise NewerFrameError(at, version, VERSION)
    if version == 0:
        raise MalformedFrameError(at, "frame version 0 does not exist")
    least = FRAME_OVERHEAD_BYTES + name_bytes
    if not least <= size <= MAX_FRAME_BYTES:
        raise MalformedFrameError(at, f"a frame of {size} bytes; {least} to {MAX_FRAME_BYTES} are possible")
    name_at = at + _HEADER.size
    if len(data) < name_at + name_bytes:
        raise TornFrameError(at, f"{len(data) - at} of {size} bytes are there")
    try:
        instance = InstanceId(bytes(data[name_at : name_at + name_bytes]).decode())
    except UnicodeDecodeError:
        raise MalformedFrameError(at, "the instance's name is not UTF-8") from None
    return FrameHeader(
        instance=instance,
        epoch=epoch,
        first_offset=first,
        event_count=count,
        wall_time_ns=wall,
        digest=digest,
        frame_bytes=size,
    )


class NewerFrame(NamedTuple):
    """What every reader understands of a frame that a newer kvbm wrote."""

    version: int
    epoch: Epoch


def newer_frame(data: bytes, at: int, checksum: Callable[[bytes], int] = crc32c) -> NewerFrame | None:
    """The whole frame of a newer version at a position; None where there is none, or one that is damaged."""
    if len(data) - at < FRAME_OVERHEAD_BYTES:
        return None
    magic, version, _, _, size, _, epoch, *_ = _HEADER.unpack_from(data, at)
    if magic != MAGIC or version <= VERSION or not FRAME_OVERHEAD_BYTES <= size <= min(len(data) - at, MAX_FRAME_BYTES):
        return None
    end = at + size - _CRC.size
    is_whole = checksum(data[at:end]) == _CRC.unpack_from(data, end)[0]
    return NewerFrame(version, epoch) if is_whole else None


def decode_frame(data: bytes | mmap, at: int = 0, checksum: Callable[[bytes], int] = crc32c) -> tuple[Frame, int]:
    """The frame at a position, and the position after it.

    Raises: NotAFrameError, NewerFrameError, TornFrameError, CorruptFrameError, MalformedFrameError; each has `at`.
    """
    header = decode_header(data, at)
    end = at + header.frame_bytes
    if len(data) < end:
        raise TornFrameError(at, f"{len(data) - at} of {header.frame_bytes} bytes are there")
    (stored,) = _CRC.unpack_from(data, end - _CRC.size)
    computed = checksum(data[at : end - _CRC.size])
    if stored != computed:
        raise CorruptFrameError(at, f"checksum {computed:08x} of the bytes, {stored:08x} in the frame")
    if not header.instance or not header.event_count:
        raise MalformedFrameError(at, "a frame needs an instance and at least one event")
    reader = _Reader(data, at, at + _HEADER.size + len(header.instance.encode()), end - _CRC.size)
    table = [reader.take(HASH_BYTES) for _ in range(data[at + 7])]
    events = []
    for _ in range(header.event_count):
        events.append(_decode_event(reader, table))
    reader.finish()
    frame = Frame(
        instance=header.instance,
        epoch=header.epoch,
        first_offset=header.first_offset,
        wall_time_ns=header.wall_time_ns,
        digest=header.digest,
        events=tuple(events),
    )
    used: dict[bytes, int] = {}
    for event in events:
        if isinstance(event, BlocksCreated | BlocksMigrated | BlocksEvicted | ResidenciesListed):
            used.setdefault(event.namespace, len(used))
    if list(used) != table:
        raise MalformedFrameError(at, "the namespace table is not in the order the events use it")
    version, needed = int.from_bytes(data[at + 4 : at + 6], "little"), _version_of(events)
    if version != needed:
        raise MalformedFrameError(at, f"a frame of version {version} whose events are written as version {needed}")
    return frame, end


def scan_frames(data: bytes | mmap, at: int = 0) -> tuple[list[ScannedFrame], FrameError | None]:
    """The good frames from a position on, up to the buffer's end or the first bytes that are none; and why those are
    none.

    What `decode_frame` would refuse is refused here, too. The error's `at` is where reading ended.
    """
    found: list[ScannedFrame] = []
    while at < len(data):
        try:
            frame, end = decode_frame(data, at)
        except FrameError as error:
            return found, error
        found.append(scanned(frame, at, end))
        at = end
    return found, None


def scanned(frame: Frame, at: int, end: int) -> ScannedFrame:
    """What a scan says of a frame that lies in [at, end)."""
    blocks = dict.fromkeys(RUN_EVENTS, 0)
    for event in frame.events:
        if isinstance(event, RUN_EVENTS):
            blocks[type(event)] += len(event.hashes) // HASH_BYTES
    created, migrated, evicted, listed = blocks.values()
    return ScannedFrame(
        frame.instance,
        frame.epoch,
        frame.first_offset,
        frame.next_offset,
        frame.wall_time_ns,
        frame.digest,
        (created, migrated, evicted, listed),
        at,
        end,
        _flaw(frame),
    )


def _flaw(frame: Frame) -> str:
    if not frame.epoch:
        return "epoch 0 does not exist"
    for at, event in enumerate(frame.events):
        is_first = frame.first_offset == 0 and at == 0
        if isinstance(event, InstanceStarted) != is_first:
            return f"event {at} is {type(event).__name__}; InstanceStarted is at offset 0 alone"
    for event in frame.events:
        if isinstance(event, InstanceStarted) and event.epoch != frame.epoch:
            return f"the frame is of epoch {frame.epoch}, its InstanceStarted of epoch {event.epoch}"
    return ""


class _Reader:
    """Takes fields from [position, end) of one frame; running out of bytes is a MalformedFrameError."""

    def __init__(self, data: bytes | mmap, frame_at: int, position: int, end: int) -> None:
        self.frame_at = frame_at
        self._data, self._position, self._end = data, position, end

    def take(self, count: int) -> bytes:
        stop = self._position + count
        if stop > self._end:
            raise self.malformed("an event is longer than its frame")
        piece = bytes(self._data[self._position : stop])
        self._position = stop
        return piece

    def unpack(self, layout: struct.Struct) -> tuple[int, ...]:
        return layout.unpack(self.take(layout.size))

    def peek(self) -> int:
        if self._position >= self._end:
            raise self.malformed("fewer events than the header says")
        return self._data[self._position]

    def finish(self) -> None:
        if self._position != self._end:
            raise self.malformed(f"{self._end - self._position} bytes after the last event")

    def malformed(self, why: str) -> MalformedFrameError:
        return MalformedFrameError(self.frame_at, why)


def _decode_event(reader: _Reader, table: list[bytes]) -> Event:
    kind = reader.peek()
    match kind:
        case 1:
            return _decode_started(reader)
        case 2:
            _, index, tier, flags, start, count = reader.unpack(_CREATED)
            _check_flags(reader, flags, _SLOTS | _PARENT)
            parent = reader.take(HASH_BYTES) if flags & _PARENT else NO_PARENT
            if flags & _PARENT and parent == NO_PARENT:
                raise reader.malformed("a parent that is no parent")
            hashes, slots = _take_run(reader, count, flags)
            return BlocksCreated(
                namespace=_namespace(reader, table, index),
                tier=_member(reader, Tier, tier),
                hashes=hashes,
                slots=slots,
                parent=SequenceHash(parent),
                start=start,
            )
        case 3:
            return _decode_migrated(reader, table)
        case 4:
            _, index, tier, reason, count = reader.unpack(_EVICTED)
            hashes, _ = _take_run(reader, count, 0)
            return BlocksEvicted(
                namespace=_namespace(reader, table, index),
                tier=_member(reader, Tier, tier),
                reason=_member(reader, EvictReason, reason),
                hashes=hashes,
            )
        case 5:
            _, index, tier, flags, snapshot_, count = reader.unpack(_LISTED)
            _check_flags(reader, flags, _SLOTS)
            hashes, slots = _take_run(reader, count, flags)
            return ResidenciesListed(
                namespace=_namespace(reader, table, index),
                tier=_member(reader, Tier, tier),
                snapshot=snapshot_,
                hashes=hashes,
                slots=slots,
            )
        case 6:
            _, tier, snapshot_, count = reader.unpack(_SNAPSHOT_ENDED)
            return SnapshotEnded(tier=_member(reader, Tier, tier), snapshot=snapshot_, count=count)
        case 7:
            _, reason = reader.unpack(_STOPPED)
            return InstanceStopped(reason=_member(reader, StopReason, reason))
        case 8:
            return take_usage(reader)
        case _:
            raise reader.malformed(f"event kind {kind} does not exist")


def _decode_started(reader: _Reader) -> InstanceStarted:
    _, length = reader.unpack(_STARTED)
    return decode_started(reader.take(length), reader.frame_at)


def encode_started(event: InstanceStarted) -> bytes:
    """The MessagePack of an InstanceStarted; the native codec takes it from here. Raises LayoutError."""
    why = _refused_texts(event) or _refused_attributes(event)
    if why:
        raise LayoutError(f"InstanceStarted does not encode: {why}")
    try:
        return _started_bytes(event)
    except (OverflowError, UnicodeEncodeError) as error:
        raise LayoutError(f"InstanceStarted does not encode: {error}") from None


def decode_started(blob: bytes, at: int) -> InstanceStarted:
    """The InstanceStarted of a frame at a position; the native codec takes it from here. Raises MalformedFrameError."""
    try:
        event = msgspec.msgpack.decode(blob, type=InstanceStarted)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise MalformedFrameError(at, f"InstanceStarted does not decode: {error}") from None
    why = _refused_texts(event) or _refused_attributes(event)
    if why:
        raise MalformedFrameError(at, f"InstanceStarted does not decode: {why}")
    if _started_bytes(event) != blob:
        raise MalformedFrameError(at, "InstanceStarted is not canonical")
    return event


def _started_bytes(event: InstanceStarted) -> bytes:
    fields: list[object] = [
        event.epoch,
        event.pools,
        [namespace.fields() for namespace in event.namespaces],
        event.topology,
        event.engine,
        event.version,
    ]
    if event.attributes:
        fields.append(dict(sorted(event.attributes.items())))
    return msgspec.msgpack.encode(fields)


def _refused_texts(event: InstanceStarted) -> str:
    """What of a start is more than readers keep; "" when nothing is. Its namespaces look after themselves."""
    if len(event.pools) > MAX_POOLS or len(event.topology) > MAX_TOPOLOGY:
        return (
            f"{len(event.pools)} pools, {len(event.topology)} texts of topology; at most {MAX_POOLS} and "
            f"{MAX_TOPOLOGY} fit"
        )
    if len(event.namespaces) > MAX_NAMESPACES:
        return f"{len(event.namespaces)} namespaces; at most {MAX_NAMESPACES} fit"
    named = [("a pool's name", pool.name, MAX_NAME_BYTES) for pool in event.pools]
    named += [("a text of topology", word, MAX_TEXT_BYTES) for word in event.topology]
    for what, text, most_bytes in (
        *named,
        ("engine", event.engine, MAX_TEXT_BYTES),
        ("version", event.version, MAX_TEXT_BYTES),
    ):
        if is_longer(text, most_bytes):
            return f"{what} has {text_bytes(text)} bytes; at most {most_bytes} fit"
    return ""


def _refused_attributes(event: InstanceStarted) -> str:
    """Why attributes are none; "" when they are."""
    if len(event.attributes) > MAX_ATTRIBUTES:
        return f"{len(event.attributes)} attributes; at most {MAX_ATTRIBUTES} fit"
    size = 0
    for name, value in event.attributes.items():
        try:
            name_bytes = len(name.encode())
        except UnicodeEncodeError as error:
            return f"the name of an attribute has no UTF-8: {error}"
        if not 1 <= name_bytes <= 255:
            return f"the name of an attribute has {name_bytes} bytes; it needs 1 to 255"
        size += name_bytes + len(value)
    return f"{size} bytes of attributes; at most {MAX_ATTRIBUTE_BYTES} fit" if size > MAX_ATTRIBUTE_BYTES else ""


def decode_usage(report: bytes, at: int) -> UsageRecorded:
    """The UsageRecorded of a frame at a position; the native codec takes it from here. Raises MalformedFrameError."""
    reader = _Reader(b"\x08" + report, 0, 0, 1 + len(report))
    reader.frame_at = at
    event = take_usage(reader)
    reader.finish()
    return event


def _decode_migrated(reader: _Reader, table: list[bytes]) -> BlocksMigrated:
    _, index, source_code, target, flags, cause, count = reader.unpack(_MIGRATED)
    _check_flags(reader, flags, _SLOTS | _KEPT)
    source: Tier | InstanceId
    if source_code == _FROM_INSTANCE:
        (length,) = reader.take(1)
        try:
            source = InstanceId(reader.take(length).decode())
        except UnicodeDecodeError:
            raise reader.malformed("the source instance's name is not UTF-8") from None
        if not source:
            raise reader.malformed("the source instance has no name")
    else:
        source = _member(reader, Tier, source_code)
    hashes, slots = _take_run(reader, count, flags)
    return BlocksMigrated(
        namespace=_namespace(reader, table, index),
        source=source,
        target=_member(reader, Tier, target),
        kept=bool(flags & _KEPT),
        cause=_member(reader, MigrateCause, cause),
        hashes=hashes,
        slots=slots,
    )


def _take_run(reader: _Reader, count: int, flags: int) -> tuple[bytes, bytes]:
    if not count:
        raise reader.malformed("a run without blocks")
    hashes = reader.take(count * HASH_BYTES)
    return hashes, reader.take(count * SLOT_BYTES) if flags & _SLOTS else b""


def _check_flags(reader: _Reader, flags: int, known: int) -> None:
    if flags & ~known:
        raise reader.malformed(f"unknown flags {flags:#x}")


def _namespace(reader: _Reader, table: list[bytes], index: int) -> NamespaceId:
    if index >= len(table):
        raise reader.malformed(f"namespace {index} of {len(table)}")
    return NamespaceId(table[index])


def _member(reader: _Reader, kind: type[E], value: int) -> E:
    try:
        return kind(value)
    except ValueError:
        raise reader.malformed(f"{kind.__name__} {value} does not exist") from None
