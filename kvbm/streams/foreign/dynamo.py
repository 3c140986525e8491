"""The bytes of Dynamo's KV events on NATS → what they say.

A message of its event plane is MessagePack of `{topic, publisher_id, sequence, published_at, payload}`; the payload is
a RouterEvent, or an array of them. On JetStream a message is one RouterEvent as JSON, numbered by its `event_id`.

A publisher passes on each time that a block is stored, and the last of as many removals alone. Each rank of each
process has one, with numbers of its own.

A RouterEvent brings no tokens, but of each block a hash of its tokens, adapter, salt and media (`tokens_hash`, XXH3 of
64 bits). So its blocks are of a scheme of their own, `SCHEME`, and a chain of ours is made from these: see
`block_numbers`. Who asks needs Dynamo's own hash of a block; nobody can make it from ours, nor ours from tokens alone.

Nothing a publisher sends raises anything but ForeignEventError.

Sources: lib/kv-router/src/protocols.rs, lib/runtime/src/transports/event_plane/traits.rs and codec.rs, and
lib/llm/src/kv_router/publisher/sinks.rs of ai-dynamo/dynamo; what ai-dynamo-runtime 1.6.1 has sent is in
tests/golden/dynamo_recorded.json.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from kvbm.streams.foreign.events import (
    MAX_BATCH_BYTES,
    MAX_BATCH_EVENTS,
    MAX_EVENT_BLOCKS,
    BlocksStored,
    Cleared,
    EventBatch,
    EventRefusal,
    ForeignEvent,
    ForeignEventError,
    RefusedEvent,
    Removed,
)

SCHEME = "dynamo-xxh3"
NUMBERS = 2  # that stand for a block's tokens: the low and the high half of their hash

_MEDIA = {"device": "GPU", "host_pinned": "CPU_PINNED", "disk": "DISK", "external": "EXTERNAL"}
_WORKER, _CACHE_OWNER = "worker", "cache_owner"  # whose blocks they are

_U64 = Annotated[int, Meta(ge=0)]
_Number = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
_Word = Annotated[str, Meta(max_length=256)]


class _Block(msgspec.Struct, gc=False):
    block_hash: _U64
    tokens_hash: _U64


class _Stored(msgspec.Struct, gc=False):
    blocks: Annotated[list[_Block], Meta(max_length=MAX_EVENT_BLOCKS)]
    parent_hash: _U64 | None = None


class _Removed(msgspec.Struct, gc=False):
    block_hashes: Annotated[list[_U64], Meta(max_length=MAX_EVENT_BLOCKS)]


class _Changes(msgspec.Struct, gc=False):
    stored: _Stored | None = None
    removed: _Removed | None = None


class _Event(msgspec.Struct, gc=False):
    event_id: _Number
    data: _Changes | _Word
    dp_rank: _Number = 0


class _RouterEvent(msgspec.Struct, gc=False):
    worker_id: _U64
    event: _Event
    storage_tier: _Word = "device"
    residency_domain: _Word | msgspec.UnsetType | None = msgspec.UNSET


class _NumberedEvent(msgspec.Struct, gc=False):
    event_id: _Number
    dp_rank: _Number = 0


class _Head(msgspec.Struct, gc=False):
    worker_id: _U64
    event: _NumberedEvent


class _RawEvent(msgspec.Struct, gc=False):
    data: Any = None


class _RawRouterEvent(msgspec.Struct, gc=False):
    event: _RawEvent


class _Envelope(msgspec.Struct, gc=False):
    publisher_id: _U64
    sequence: _Number
    payload: bytes


_BAD = (msgspec.MsgspecError, RecursionError, ValueError, OverflowError)
_ENVELOPE = msgspec.msgpack.Decoder(_Envelope)
_EVENTS = Annotated[list[msgspec.Raw], Meta(max_length=MAX_BATCH_EVENTS)]
_ARRAY = msgspec.msgpack.Decoder(_EVENTS)
_PACKED, _PACKED_HEAD, _PACKED_RAW = (
    msgspec.msgpack.Decoder(_RouterEvent),
    msgspec.msgpack.Decoder(_Head),
    msgspec.msgpack.Decoder(_RawRouterEvent),
)
_JSON, _JSON_HEAD, _JSON_RAW = (
    msgspec.json.Decoder(_RouterEvent),
    msgspec.json.Decoder(_Head),
    msgspec.json.Decoder(_RawRouterEvent),
)


class DynamoMessage(NamedTuple):
    """One message by its number.

    Attributes:
        publisher: who numbers it: another one has its own numbers.
        worker, rank: of which it tells.
        payload: for `decode_events`.
    """

    publisher: int
    sequence: int
    worker: int
    rank: int
    payload: bytes


def read_message(data: bytes) -> DynamoMessage:
    """Who has sent a message, and its number. Raises ForeignEventError: it is none; what it said is lost."""
    if len(data) > MAX_BATCH_BYTES:
        why = f"a message of {len(data)} bytes; at most {MAX_BATCH_BYTES} are read"
        raise ForeignEventError(EventRefusal.UNREADABLE, why)
    try:
        if _is_json(data):
            head = _JSON_HEAD.decode(data)
            return DynamoMessage(head.worker_id, head.event.event_id, head.worker_id, head.event.dp_rank, data)
        envelope = _ENVELOPE.decode(data)
        first = _raws(envelope.payload)[:1]
        head = _PACKED_HEAD.decode(first[0]) if first else _Head(0, _NumberedEvent(0))
    except _BAD as error:
        raise ForeignEventError(EventRefusal.UNREADABLE, f"no message of Dynamo's ({error})") from None
    publisher, rank = envelope.publisher_id, head.event.dp_rank
    return DynamoMessage(publisher, envelope.sequence, head.worker_id, rank, envelope.payload)


class DynamoEvents:
    """Bytes of the events of one message → what they say.

    Args:
        block_tokens: of a block; no event says it.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens

    def __call__(self, payload: bytes) -> EventBatch:
        """Raises ForeignEventError: the bytes are no events."""
        if _is_json(payload):
            return EventBatch([self._event(payload, _JSON, _JSON_RAW)], None)
        try:
            raws = _raws(payload)
        except _BAD as error:
            raise ForeignEventError(EventRefusal.UNREADABLE, f"no events of Dynamo's ({error})") from None
        return EventBatch([self._event(raw, _PACKED, _PACKED_RAW) for raw in raws], None)

    def _event(self, data: bytes, decoder: Any, raw: Any) -> ForeignEvent:
        try:
            event = decoder.decode(data)
        except _BAD as error:
            return _refused(data, raw, str(error))
        return self._said(event)

    def _said(self, router: _RouterEvent) -> ForeignEvent:
        said, domain = router.event.data, router.residency_domain
        if isinstance(said, str):
            if said != "cleared":
                return RefusedEvent(EventRefusal.UNKNOWN_TYPE, f"an event {said[:64]!r}", is_loss=False)
            if domain == _CACHE_OWNER:
                return RefusedEvent(EventRefusal.NO_POOL, "a pool is cleared that is not the worker's", is_loss=False)
            return Cleared(is_all=True)
        if domain is not msgspec.UNSET and domain not in (_WORKER, _CACHE_OWNER):
            why = f"blocks of {domain!r}"
            return RefusedEvent(EventRefusal.MALFORMED, why, is_loss=said.removed is not None)
        owner = _CACHE_OWNER if domain == _CACHE_OWNER else ""
        medium = _MEDIA.get(router.storage_tier, router.storage_tier or "?")
        if said.stored is not None and said.removed is None:
            blocks = said.stored.blocks
            return BlocksStored(
                [one.block_hash for one in blocks],
                said.stored.parent_hash,
                block_numbers(one.tokens_hash for one in blocks),
                self._block_tokens,
                (),
                medium,
                owner,
                width=NUMBERS,
            )
        if said.removed is not None and said.stored is None:
            return Removed(said.removed.block_hashes, medium, owner)
        return RefusedEvent(EventRefusal.UNKNOWN_TYPE, "an event that is neither stored nor removed", is_loss=True)


def block_numbers(hashes: Iterable[int]) -> list[int]:
    """What stands in the place of tokens where Dynamo's hashes of blocks are known: `sequence_hashes` of these, with
    blocks of `NUMBERS`, are the hashes of a namespace whose scheme is `SCHEME`.

    Args:
        hashes: of each block's tokens, adapter, salt and media, as `compute_block_hash_for_seq` of Dynamo gives them.
    """
    return [half for one in hashes for half in (one & 0xFFFFFFFF, one >> 32)]


def _raws(payload: bytes) -> list[bytes]:
    """The events of a payload: one, or an array of them."""
    first = payload[0] if payload else 0
    if first & 0xF0 == 0x90 or first in (0xDC, 0xDD):
        return [bytes(raw) for raw in _ARRAY.decode(payload)]
    return [payload]


def _refused(data: bytes, raw: Any, why: str) -> RefusedEvent:
    try:
        said = raw.decode(data).event.data
    except _BAD:
        said = None
    is_stored = isinstance(said, dict) and set(said) == {"stored"}
    return RefusedEvent(EventRefusal.MALFORMED, why, is_loss=not is_stored)


def _is_json(data: bytes) -> bool:
    return data[:1] == b"{"
