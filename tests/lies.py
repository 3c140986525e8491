"""What an instance that lies may send: each message that the server's permissions let it publish, with each field
forged.

What is forged is taken from the code. A field of a struct is forged by its type, and a type of which nothing is known
here is an error; so are a subject that an instance may publish to and whose message is not named in SENT, and an event
without a writer in EVENTS.
"""

from __future__ import annotations

import inspect
import struct
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import IntEnum
from types import UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

import msgspec

from kvbm import _native
from kvbm.core import codec
from kvbm.core.ages import TierAges
from kvbm.core.events import (
    BlocksCreated,
    BlocksEvicted,
    BlocksMigrated,
    Event,
    InstanceStarted,
    InstanceStopped,
    PoolStated,
    ResidenciesListed,
    SnapshotEnded,
    UsageRecorded,
)
from kvbm.core.fetching import Transfer
from kvbm.core.ids import Epoch, InstanceId, Namespace, NamespaceId, Offset, Reach, Tier
from kvbm.core.lent import LentCounts
from kvbm.erasure.report import Answer, ErasedPlace, Progress
from kvbm.streams import base
from kvbm.streams.base import AccessSample, Fence, Heartbeat

ACME = Namespace(model="m", revision="r", block_tokens=16, tenant="acme")
BETA = Namespace(model="m", revision="r", block_tokens=16, tenant="beta")
OWN = Namespace(model="m", revision="r", block_tokens=16, tenant="liar's")
HONEST = {InstanceId("a"): ACME, InstanceId("b"): BETA}
POOL = "pool"  # of the objects of all
POOLS = (
    PoolStated(Tier.HBM, 64, 1024),
    PoolStated(Tier.HOST, 64, 1024),
    PoolStated(Tier.OBJECT, 0, 1024, Reach.CLUSTER, POOL),
)


def hashes(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(16, "big") for number in numbers)


HELD = {
    InstanceId("a"): hashes(1, 2, 3, 4),
    InstanceId("b"): hashes(11, 12, 13, 14),
}  # in HBM; the first two are claimed too
OF_LIAR = hashes(21, 22, 23, 24)


class Lie(NamedTuple):
    """One forged message.

    Attributes:
        field: what of it is forged: a field of the message, of a struct within it, or of what carries it. what: how.
    """

    field: str
    what: str
    data: bytes

    def __str__(self) -> str:
        return f"{self.field} {self.what}"


# -- values ------------------------------------------------------------------------------------------------------------

_WHOLE = [-1, -(1 << 63), 0, 1, 2, (1 << 31) - 1, 1 << 31, 1 << 32, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]
_NO_NUMBER = [None, "1", b"1", 1.5, [], {}]
_TEXTS = [
    "",
    "a",
    "b",
    "c",
    "janitor",
    "_catalog-1",
    "catalog:1",
    "objects:1",
    "x" * 255,
    "x" * 256,
    "x" * 200_000,
    "ä" * 3000,
    "\x00",
    "\x1b[2J\r\n",
    "\u202e\u2066",
    "a.b",
    "*",
    ">",
    "../../etc",
    " ",
    "'; drop table instances; --",
    1,
    None,
    b"a",
    [],
]
_BYTES = [
    ACME.id,
    BETA.id,
    OWN.id,
    b"",
    bytes(15),
    bytes(16),
    bytes(17),
    b"\xff" * 16,
    HELD[InstanceId("a")],
    HELD[InstanceId("b")],
    bytes(100_000),
    "text",
    1,
    None,
    [],
]
_BAD = "BAD UTF8"  # becomes bytes that are no text
_FLAGS = [True, False, 1, 2, None, "yes"]
_FLOATS = [float("nan"), float("inf"), float("-inf"), -1.0, 0.0, -0.0, 1e308, 5e-324, (1 << 64) - 1, -1, "1", None, b""]

# Of what a field may be: as in the struct's own annotations, without the names of numbers and texts.
_VALUES: dict[Any, list[Any]] = {
    int: [*_WHOLE, *_NO_NUMBER],
    str: [*_TEXTS, _BAD],
    bytes: _BYTES,
    bool: _FLAGS,
    float: _FLOATS,
}


def values_of(kind: Any) -> Iterator[tuple[str, Any]]:  # noqa: C901
    """Forged values of a field of a kind, as they travel in MessagePack.

    Raises TypeError: a kind of which nothing is known here.
    """
    kind = getattr(kind, "__supertype__", kind)
    origin, inner = get_origin(kind), get_args(kind)
    if kind in _VALUES:
        for value in _VALUES[kind]:
            yield _shown(value), value
    elif origin in (UnionType, Union):  # a part that may be left out
        for part in inner:
            if part is not type(None):
                yield from values_of(part)
    elif isinstance(kind, type) and issubclass(kind, IntEnum):
        for value in [*_WHOLE, *_NO_NUMBER, max(kind) + 1]:
            yield _shown(value), value
    elif isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        for value in (None, [], {}, 1, "text"):
            yield _shown(value), value
        for field, what, value in forged_fields(kind, HONEST_PARTS[kind]):
            yield f"{field} {what}", value
    elif origin is tuple and len(inner) == 2 and inner[1] is Ellipsis:
        yield from _many(inner[0])
    elif origin is tuple:
        honest = [1] * len(inner)
        for value in (None, [], honest[:-1], [*honest, 1], "text"):
            yield _shown(value), value
        for at, part in enumerate(inner):
            for what, value in values_of(part):
                yield f"[{at}] {what}", [*honest[:at], value, *honest[at + 1 :]]
    elif origin in (dict, Mapping) or origin is getattr(typing, "Mapping", None):
        key, value_kind = inner
        for value in (None, [], 1, "text"):
            yield _shown(value), value
        known = _honest_value(value_kind)
        for what, value in values_of(key):
            if not isinstance(value, list | dict):
                yield f"key {what}", {value: known}
        for what, value in values_of(value_kind):
            yield f"value {what}", {_honest_value(key): value}
        yield "very many", {_numbered(key, number): known for number in range(5_000)}
    else:
        raise TypeError(f"nothing is known here of a field of {kind}: say in tests/lies.py how it is forged")


def _many(part: Any) -> Iterator[tuple[str, Any]]:
    for value in (None, {}, 1, "text"):
        yield _shown(value), value
    for what, value in values_of(part):
        yield f"of {what}", [value]
    yield "very many", [_numbered(part, number) for number in range(5_000)]


def _honest_value(kind: Any) -> Any:
    kind = getattr(kind, "__supertype__", kind)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return msgspec.to_builtins(HONEST_PARTS[kind], builtin_types=(bytes,))
    if get_origin(kind) is tuple:
        return [1] * len(get_args(kind))
    return {int: 1, str: "x", bytes: OWN.id, float: 1.0}.get(kind, 0)


def _numbered(kind: Any, number: int) -> Any:
    kind = getattr(kind, "__supertype__", kind)
    if kind in (int, str, bytes) or (isinstance(kind, type) and issubclass(kind, IntEnum)):
        return {str: f"x{number}", bytes: hashes(1_000 + number)}.get(kind, number)
    return _honest_value(kind)


def _shown(value: Any) -> str:
    words = repr(value)
    return words if len(words) <= 50 else f"{words[:30]}… of {len(words)}"


# -- structs in MessagePack --------------------------------------------------------------------------------------------

HONEST_PARTS: dict[type, msgspec.Struct] = {
    PoolStated: PoolStated(Tier.HBM, 4, 1024),
    Namespace: OWN,
    Transfer: Transfer("tcp", 1, 1024, 1000),
    TierAges: TierAges(wanted_s=1, reused=1),
    ErasedPlace: ErasedPlace(name="NVME", erased="1 block"),
    Progress: Progress(done_ns=1),
    LentCounts: LentCounts(connections=1),
}


def forged_fields(kind: type[msgspec.Struct], honest: msgspec.Struct) -> Iterator[tuple[str, str, Any]]:
    """A struct with one field forged at a time, as what MessagePack carries: the field, how it is forged, and the
    struct.

    A field that is left out, and one that is not known, come last.
    """
    said = msgspec.to_builtins(honest, builtin_types=(bytes,))
    hints = get_type_hints(kind)
    fields = [field.encode_name for field in msgspec.structs.fields(kind)]
    if isinstance(said, dict):
        said = {name: said.get(name, _plain(getattr(honest, field.name))) for name, field in _named(kind)}
    for at, (name, field) in enumerate(_named(kind)):
        for what, value in values_of(hints[field.name]):
            yield field.name, what, _with(said, at, name, value)
    for at, name in enumerate(fields):
        left = {one: value for one, value in said.items() if one != name} if isinstance(said, dict) else said[:at]
        yield name, "left out", left
    yield "", "a field too many", said | {"more": "x" * 1000} if isinstance(said, dict) else [*said, *["x"] * 50]


def _named(kind: type[msgspec.Struct]) -> list[tuple[str, Any]]:
    return [(field.encode_name, field) for field in msgspec.structs.fields(kind)]


def _plain(value: Any) -> Any:
    return msgspec.to_builtins(value, builtin_types=(bytes,))


def _with(said: Any, at: int, name: str, value: Any) -> Any:
    return said | {name: value} if isinstance(said, dict) else [*said[:at], value, *said[at + 1 :]]


def packed(said: Any) -> bytes | None:
    """MessagePack of it; None: it cannot carry that."""
    try:
        data = msgspec.msgpack.encode(said)
    except (TypeError, OverflowError):
        return None
    return data.replace(_BAD.encode(), b"\xff\xfe\x80\xc0\xf5\xff\xed\xa0")


def forged_messages(honest: msgspec.Struct) -> Iterator[Lie]:
    """A message in MessagePack, with each field forged, cut, and replaced by what is none."""
    for field, what, said in forged_fields(type(honest), honest):
        data = packed(said)
        if data is not None:
            yield Lie(field, what, data)
    whole = msgspec.msgpack.encode(honest)
    for what, data in (
        ("empty", b""),
        ("cut", whole[:-1]),
        ("twice", whole * 2),
        ("none", b"\xc1"),
        ("deep", b"\x91" * 100_000 + b"\xc0"),
        ("4 GiB", b"\xdb\xff\xff\xff\xff"),
    ):
        yield Lie("whole", what, data)


# -- frames ------------------------------------------------------------------------------------------------------------

_HEADER = struct.Struct("<4sHBBIIQQQQ")
_BYTE, _SHORT, _LONG = (1 << 8) - 1, (1 << 32) - 1, (1 << 64) - 1
_OF_BYTE = [0, 1, 2, 3, 4, 5, 6, 7, 8, 127, 128, 254, 255]
_OF_SHORT = [0, 1, 3, 1 << 16, 1 << 31, _SHORT]
_OF_LONG = [0, 1, 2, 1 << 31, 1 << 32, (1 << 63) - 1, 1 << 63, _LONG - 1, _LONG]


def frame_data(
    instance: bytes,
    events: list[bytes],
    epoch: int = 1,
    first_offset: int = 0,
    wall_time_ns: int = 1,
    digest: int = 0,
    table: bytes = OWN.id,
    magic: bytes = b"KVBM",
    version: int = 1,
    name_bytes: int | None = None,
    namespaces: int | None = None,
    frame_bytes: int | None = None,
    event_count: int | None = None,
    checksum: int = 0,
) -> bytes:
    """A frame of these events, whatever it says, with a checksum that fits; `checksum` is added to it."""
    body = instance + table + b"".join(events)
    head = _HEADER.pack(
        magic,
        version,
        len(instance) & _BYTE if name_bytes is None else name_bytes,
        (len(table) // 16) & _BYTE if namespaces is None else namespaces,
        _HEADER.size + len(body) + 4 if frame_bytes is None else frame_bytes,
        len(events) if event_count is None else event_count,
        epoch,
        first_offset,
        wall_time_ns,
        digest,
    )
    return head + body + struct.pack("<I", (_native.crc32c(head + body) + checksum) & _SHORT)


def created(
    namespace: int = 0,
    tier: int = 0,
    flags: int = 1,
    start: int = 0,
    count: int = 4,
    parent: bytes = b"",
    hashes: bytes = OF_LIAR,
    slots: bytes = bytes(range(4)) + bytes(12),
) -> bytes:
    return struct.pack("<BBBBII", 2, namespace, tier, flags, start, count) + parent + hashes + slots


def migrated(
    namespace: int = 0,
    source: int = 0,
    target: int = 1,
    kept: int = 4,
    cause: int = 0,
    count: int = 4,
    name: bytes = b"",
    hashes: bytes = OF_LIAR,
    slots: bytes = b"",
) -> bytes:
    return struct.pack("<BBBBBBI", 3, namespace, source, target, kept, cause, count) + name + hashes + slots


def evicted(namespace: int = 0, tier: int = 0, reason: int = 0, count: int = 4, hashes: bytes = OF_LIAR) -> bytes:
    return struct.pack("<BBBBI", 4, namespace, tier, reason, count) + hashes


def listed(
    namespace: int = 0,
    tier: int = 0,
    flags: int = 0,
    snapshot: int = 1,
    count: int = 4,
    hashes: bytes = OF_LIAR,
    slots: bytes = b"",
) -> bytes:
    return struct.pack("<BBBBII", 5, namespace, tier, flags, snapshot, count) + hashes + slots


def snapshot_ended(tier: int = 0, snapshot: int = 1, count: int = 0) -> bytes:
    return struct.pack("<BBII", 6, tier, snapshot, count)


def stopped(reason: int = 0) -> bytes:
    return struct.pack("<BB", 7, reason)


def started(blob: bytes, length: int | None = None) -> bytes:
    return struct.pack("<BI", 1, len(blob) if length is None else length) + blob


def used(
    flags: int = 0,
    since_ms: int = 1,
    until_ms: int = 2,
    block_bytes: Sequence[int] = (1_000,) * 4,
    rows: Sequence[bytes] = (),
    count: int | None = None,
) -> bytes:
    head = struct.pack("<BBHQQ4Q", 8, flags, len(rows) if count is None else count, since_ms, until_ms, *block_bytes)
    return head + b"".join(rows)


def used_row(tenant: bytes = b"own", numbers: Sequence[int] = (1,) * 15, name_bytes: int | None = None) -> bytes:
    return bytes([len(tenant) if name_bytes is None else name_bytes]) + tenant + struct.pack("<15Q", *numbers)


EVENTS: dict[type, Callable[..., bytes]] = {
    BlocksCreated: created,
    BlocksMigrated: migrated,
    BlocksEvicted: evicted,
    ResidenciesListed: listed,
    SnapshotEnded: snapshot_ended,
    InstanceStopped: stopped,
    InstanceStarted: started,
    UsageRecorded: used,
}
_RUNS = [HELD[InstanceId("a")], HELD[InstanceId("b")], OF_LIAR[:16] * 4, bytes(64), b"\xff" * 64]
_SLOT_RUNS = [bytes(16), b"\xff" * 16, struct.pack("<4I", 63, 64, 65, 1 << 31)]


def event_lies(kind: type) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """An event in its bytes with one field forged at a time: which, how, and what of the frame it is in goes
    with that.
    """
    write = EVENTS[kind]
    if kind is InstanceStarted:
        yield from _start_lies()
        return
    if kind is UsageRecorded:
        yield from _usage_lies()
        return
    for name in inspect.signature(write).parameters:
        for what, forged in _wire_values(kind, name):
            if name == "namespace" and isinstance(forged, bytes):
                yield name, what, {"events": [write()], "table": forged}
            else:
                yield name, what, {"events": [write(**{name: forged} if not isinstance(forged, dict) else forged)]}


def _wire_values(kind: type, name: str) -> Iterator[tuple[str, Any]]:  # noqa: C901
    match name:
        case "namespace":
            for one in (ACME.id, BETA.id, bytes(16), b"\xff" * 16, b"", ACME.id * 2, ACME.id + BETA.id):
                yield one.hex()[:8] + f" of {len(one)}", one
            for number in (1, 2, 128, 255):
                yield f"number {number}", number
        case "tier" | "target" | "cause" | "reason" | "kept":
            for number in _OF_BYTE:
                yield str(number), number
        case "source":
            for number in _OF_BYTE[:-1]:
                yield str(number), number
            for text in (
                b"\x01a",
                b"\x01b",
                b"\x00",
                b"\xffa",
                b"\x04\xff\xff\xff\xff",
                b"\x04\x1b[2J",
                b"\xff" + b"x" * 255,
            ):
                yield f"instance {text[:8]!r}", {"source": 255, "name": text}
        case "name":
            return  # with source
        case "flags":
            for number in _OF_BYTE:
                yield str(number), number
        case "start" | "snapshot" | "count":
            for number in _OF_SHORT:
                yield str(number), number
        case "parent":
            for one in (ACME.id, bytes(16), HELD[InstanceId("a")][:16], b"\xff" * 16):
                yield one.hex()[:8], {"flags": 3, "parent": one}
        case "hashes":
            for one in _RUNS:
                yield one.hex()[24:40], one
            for size in (0, 15, 17, 63):
                yield f"{size} bytes", bytes(size)
            yield (
                "very many",
                {"hashes": hashes(*range(2_000, 20_000)), "count": 18_000}
                | ({"flags": 0, "slots": b""} if kind is BlocksCreated else {}),
            )
        case "slots":
            for one in (*_SLOT_RUNS, b"", bytes(3), bytes(17)):
                yield (
                    f"{one[:8].hex()} of {len(one)}",
                    {"slots": one, ("kept" if kind is BlocksMigrated else "flags"): 5 if kind is BlocksMigrated else 1},
                )
        case _:
            raise TypeError(f"nothing is known here of {kind.__name__}.{name}: say in tests/lies.py how it is forged")


HONEST_START = InstanceStarted(
    epoch=Epoch(2), pools=POOLS, namespaces=(OWN,), topology=("z",), engine="e", version="1", attributes={"k": b"v"}
)


def _start_lies() -> Iterator[tuple[str, str, dict[str, Any]]]:
    fields = msgspec.structs.fields(InstanceStarted)
    hints = get_type_hints(InstanceStarted)
    honest = msgspec.msgpack.decode(codec.encode_started(HONEST_START))
    for at, field in enumerate(fields):
        for what, value in values_of(hints[field.name]):
            data = packed([*honest[:at], value, *honest[at + 1 :]])
            if data is not None:
                for version in (1, 2) if field.name == "attributes" else (2,):
                    yield field.name, what, {"events": [started(data)], "version": version, **_NEXT_EPOCH}
    whole = codec.encode_started(HONEST_START)
    for what, blob in (
        ("empty", b""),
        ("cut", whole[:-1]),
        ("deep", b"\x91" * 60_000),
        ("not canonical", whole + b"\xc0"),
    ):
        yield "whole", what, {"events": [started(blob)], "version": 2, **_NEXT_EPOCH}
    for length in (0, 1, _SHORT):
        yield "length", str(length), {"events": [started(whole, length)], "version": 2, **_NEXT_EPOCH}
    for epoch in _OF_LONG:
        blob = packed([epoch, *honest[1:]])
        assert blob is not None
        yield (
            "epoch",
            f"{epoch}, as the frame has it",
            {"events": [started(blob)], "version": 2, "epoch": epoch, "first_offset": 0, "table": b""},
        )


def _usage_lies() -> Iterator[tuple[str, str, dict[str, Any]]]:
    def of(name: str, what: str, **forged: Any) -> tuple[str, str, dict[str, Any]]:
        return name, what, {"events": [used(**forged)], "version": 3}

    for number in _OF_LONG:
        yield of("since_ms", str(number), since_ms=number, until_ms=max(number, 2))
        yield of("until_ms", str(number), until_ms=number)
        yield of("block_bytes", str(number), block_bytes=(number,) * 4, rows=[used_row()])
        yield of("rows", f"{number} in each number", rows=[used_row(numbers=(number,) * 15)])
    for number in _OF_BYTE:
        yield of("is_last", f"flags {number}", flags=number)
    names = (b"", b"a", b"b", b"acme", b"beta", b"\0", b"\xff", b"\xed\xa0\x80", b"\x1b[2J", b"x" * 255)
    for name in names:
        yield of("rows", f"tenant {name[:8]!r} of {len(name)}", rows=[used_row(name)])
    many = [used_row(b"%06d" % number) for number in range(1_025)]
    for what, rows in (
        ("twice", [used_row(), used_row()]),
        ("not in order", [used_row(b"b"), used_row(b"a")]),
        ("cut", [used_row()[:-1]]),
        ("of a longer name", [used_row(name_bytes=255)]),
        ("as many as fit", many[:-1]),
        ("more than fit", many),
    ):
        yield of("rows", what, rows=rows)
    for count in (0, 1, 2, 1_024, 1_025, (1 << 16) - 1):
        yield of("rows", f"count {count}", rows=[used_row()], count=count)
    for version in (1, 2, 4):
        yield "rows", f"in version {version}", {"events": [used(rows=[used_row()])], "version": version}


_NEXT_EPOCH = {"epoch": 2, "first_offset": 0, "table": b""}


def frame_lies() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """A frame whose events are good, with each field of the frame forged."""
    good = {"events": [created()]}
    for name in ("epoch", "first_offset", "wall_time_ns", "digest"):
        for number in _OF_LONG:
            yield name, str(number), good | {name: number}
    for name, numbers in (
        ("version", [0, 2, 3, 255, 65535]),
        ("name_bytes", _OF_BYTE),
        ("namespaces", _OF_BYTE),
        ("frame_bytes", [*_OF_SHORT, 51, 52, 53, 1 << 26]),
        ("event_count", _OF_SHORT),
        ("checksum", [1, 1 << 31]),
    ):
        for number in numbers:
            yield name, str(number), good | {name: number}
    yield "magic", "other", good | {"magic": b"MBVK"}
    for name in (b"a", b"b", b"", b"\xff\xfe", b"x" * 255, b"\x1b[2J"):
        yield "instance", repr(name[:8]), good | {"instance": name}
    for what, events in (
        ("none", []),
        ("kind 0", [b"\0"]),
        ("kind 8", [b"\x08" + bytes(40)]),
        ("kind 255", [b"\xff"]),
        ("after the last", [created(), b"\0" * 7]),
        ("a start in the middle", [created(), started(codec.encode_started(HONEST_START))]),
        ("two stops", [stopped(), stopped()]),
        ("very many", [snapshot_ended()] * 50_000),
    ):
        yield (
            "events",
            what,
            {"events": events} | ({"table": b""} if b"".join(events)[:1] in (b"\x06", b"\x07") else {}),
        )


# -- what is sent ------------------------------------------------------------------------------------------------------

# By the beginning of a subject that the server's permissions let an instance publish to: what its message is.
SENT: dict[str, type] = {
    base.EVENTS_PREFIX: codec.Frame,
    base.FENCE_PREFIX: base._FenceBody,
    base.PULSE_PREFIX: Heartbeat,
    base.SAMPLES_PREFIX: AccessSample,
    base.ERASED_PREFIX: Answer,
}


def honest_heartbeat(instance: InstanceId) -> Heartbeat:
    return Heartbeat(
        instance=instance,
        cluster="c",
        epoch=Epoch(1),
        published=Offset(2),
        wall_time_ns=1,
        namespaces=(OWN.id,),
        told=(OWN.canonical(),),
        prefill_tokens_per_s=1000.0,
        queue_tokens_per_s=1000.0,
        free_slots={Tier.HBM: 1},
        put_bytes={OWN.id: (1, 1)},
        put_total=(1, 1),
        applied=Offset(2),
        lends={"tcp": "10.0.0.1:9"},
        transfers=(Transfer("tcp", 1, 1024, 1000),),
        object_blocks=8,
        ages=(TierAges(),) * 3,
    )


def honest_sample(instance: InstanceId) -> AccessSample:
    return AccessSample(
        instance=instance, cluster="c", wall_time_ns=1, namespace=OWN.id, hashes=OF_LIAR, depth=1, rate=0.5
    )


def honest_fence() -> msgspec.Struct:
    return base._FenceBody(Epoch(1), "r" * 16, ((Epoch(1), "r" * 16),))


def honest_answer(instance: InstanceId) -> Answer:
    return Answer(
        name=instance, kind="instance", at_ns=1, progress={7: Progress(places=(ErasedPlace(name="HOST", waits="x"),))}
    )


# Fields told of in JSON, whose numbers have no bound.
TOLD = [
    *(
        OWN.canonical().replace(b'"block_tokens":16', b'"block_tokens":%d' % number)
        for number in (0, -1, 1 << 64, 1 << 200)
    ),
    OWN.canonical().replace(b'"scheme_seed":0', b'"scheme_seed":%d' % -(1 << 80)),
    OWN.canonical().replace(b'"kv_group":0', b'"kv_group":1e9'),
    OWN.canonical().replace(b"liar's", b"\\u0000\\u001b"),
    OWN.canonical().replace(b"liar's", b"\xff"),
    OWN.canonical()[:-1] + b',"more":1}',
]


def header_lies() -> Iterator[Lie]:
    """Values of the header in which a message of events names its fence."""
    names = dict(zip(Fence._fields, ("epoch", "run", "sequence", "log"), strict=True))
    for number in (0, 1, -1, (1 << 63) - 1, 1 << 63, 1 << 64, 10**150):
        yield Lie(names["sequence"], _shown(number), b"%d:1:run" % number)
        yield Lie(names["epoch"], _shown(number), b"1:%d:run" % number)
    for run in (b"", b"a" * 128, b"a" * 10_000, b"\xff\xfe", b"\x1b[2J", b"1:2", "²".encode()):
        yield Lie(names["run"], _shown(run), b"1:1:" + run)
    for words in (b"", b":", b"::", b"\xb2:1:r", "٣:1:r".encode(), b" 1:1:r", b"0x1:1:r"):
        yield Lie("whole", _shown(words), words)


EVENT_KINDS: tuple[type, ...] = get_args(Event)
OWN_ID: NamespaceId = OWN.id
