"""The bytes of vLLM's and SGLang's KV events → what they say.

Nothing a publisher sends raises anything but ForeignEventError.

A message is MessagePack of `[ts, [events], rank]`, in a coming vLLM a map. An event is a map with its name under
`type`, from older engines an array that begins with it. A hash is an integer of 64 bits, from vLLM on request its 32
bytes.

Sources: vllm/distributed/kv_events.py of vLLM 0.32.0; sglang/srt/disaggregation/kv_events.py of SGLang 0.5.23.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvbm.core.extra_keys import Media, extra_key
from kvbm.streams.foreign.events import (
    MAX_BATCH_BYTES,
    MAX_BATCH_EVENTS,
    MAX_BLOCK_TOKENS,
    MAX_EVENT_BLOCKS,
    MAX_EVENT_TOKENS,
    MAX_KEY_BYTES,
    MAX_LOOKAHEAD,
    MAX_TEXT_BYTES,
    BlocksStored,
    Cleared,
    EventBatch,
    EventRefusal,
    ForeignEvent,
    ForeignEventError,
    RefusedEvent,
    Removed,
)


class Kind(StrEnum):
    """Whose events they are."""

    VLLM = "vllm"
    SGLANG = "sglang"


_Bytes = Annotated[bytes, Meta(min_length=1, max_length=MAX_KEY_BYTES)]
_Key = int | _Bytes
_Keys = Annotated[list[_Key], Meta(max_length=MAX_EVENT_BLOCKS)]
_Tokens = Annotated[list[int], Meta(max_length=MAX_EVENT_TOKENS)]
_Pairs = Annotated[list[tuple[int, int]], Meta(max_length=MAX_EVENT_TOKENS)]
_Text = Annotated[str, Meta(max_length=MAX_TEXT_BYTES)]
_Size = Annotated[int, Meta(ge=1, le=MAX_BLOCK_TOKENS)]
_Group = Annotated[int, Meta(ge=0, le=255)]


class _MapStored(msgspec.Struct, tag="BlockStored", gc=False):
    block_hashes: _Keys
    token_ids: _Tokens
    block_size: _Size
    parent_block_hash: _Key | None = None
    lora_id: int | None = None
    medium: _Text | None = None
    lora_name: _Text | None = None
    extra_keys: Any = None
    cache_salt: _Text | None = None
    group_idx: _Group | None = None
    ownership: _Text | None = None
    lookahead_token_ids: Annotated[list[int], Meta(max_length=MAX_LOOKAHEAD)] | None = None


class _MapStoredPairs(_MapStored, tag="BlockStored", gc=False, kw_only=True):
    token_ids: _Pairs  # type: ignore[assignment]


class _MapRemoved(msgspec.Struct, tag="BlockRemoved", gc=False):
    block_hashes: _Keys
    medium: _Text | None = None
    group_idx: _Group | None = None
    ownership: _Text | None = None


class _MapCleared(msgspec.Struct, tag="AllBlocksCleared", gc=False):
    pass


class _VllmStored(msgspec.Struct, tag="BlockStored", array_like=True, gc=False):
    block_hashes: _Keys
    parent_block_hash: _Key | None
    token_ids: _Tokens
    block_size: _Size
    lora_id: int | None = None
    medium: _Text | None = None
    lora_name: _Text | None = None
    extra_keys: Any = None
    group_idx: _Group | None = None
    kv_cache_spec_kind: _Text | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: _Text | None = None
    ownership: _Text | None = None


class _VllmRemoved(msgspec.Struct, tag="BlockRemoved", array_like=True, gc=False):
    block_hashes: _Keys
    medium: _Text | None = None
    group_idx: _Group | None = None
    locality: _Text | None = None
    ownership: _Text | None = None


class _SglangStored(msgspec.Struct, tag="BlockStored", array_like=True, gc=False):
    block_hashes: _Keys
    parent_block_hash: _Key | None
    token_ids: _Tokens
    block_size: _Size
    lora_id: int | None = None
    medium: _Text | None = None
    cache_salt: _Text | None = None
    session_id: _Text | None = None
    lora_name: _Text | None = None


class _SglangStoredPairs(_SglangStored, tag="BlockStored", array_like=True, gc=False):
    token_ids: _Pairs  # type: ignore[assignment]


class _SglangRemoved(msgspec.Struct, tag="BlockRemoved", array_like=True, gc=False):
    block_hashes: _Keys
    medium: _Text | None = None


class _ArrayCleared(msgspec.Struct, tag="AllBlocksCleared", array_like=True, gc=False):
    pass


class _Typed(msgspec.Struct, gc=False):
    type: str


class _TypedArray(msgspec.Struct, array_like=True, gc=False):
    type: str


class _Message(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: Annotated[list[_MapStored | _MapRemoved | _MapCleared], Meta(max_length=MAX_BATCH_EVENTS)]
    rank: int | None = None


class _RawMessage(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: Annotated[list[msgspec.Raw], Meta(max_length=MAX_BATCH_EVENTS)]
    rank: int | None = None


class _RawMapMessage(msgspec.Struct, gc=False):
    ts: float
    events: Annotated[list[msgspec.Raw], Meta(max_length=MAX_BATCH_EVENTS)]
    data_parallel_rank: int | None = None
    attn_dp_rank: int | None = None


_WHOLE_BYTES = 1 << 20  # a message that is decoded in one go; of a larger one other threads have turns between events
_Decode = Callable[[bytes], Any]


def _decoder(kind: Any) -> _Decode:
    return msgspec.msgpack.Decoder(kind).decode


_BAD = (msgspec.MsgspecError, RecursionError, ValueError, OverflowError, struct.error)
_MESSAGE, _RAW_MESSAGE, _RAW_MAP_MESSAGE = _decoder(_Message), _decoder(_RawMessage), _decoder(_RawMapMessage)
_MAPS = (_decoder(_MapStored | _MapRemoved | _MapCleared), _decoder(_MapStoredPairs))
_ARRAYS: dict[Kind, tuple[_Decode, ...]] = {
    Kind.VLLM: (_decoder(_VllmStored | _VllmRemoved | _ArrayCleared),),
    Kind.SGLANG: (_decoder(_SglangStored | _SglangRemoved | _ArrayCleared), _decoder(_SglangStoredPairs)),
}
_TYPED, _TYPED_ARRAY = _decoder(_Typed), _decoder(_TypedArray)


def decode_batch(payload: bytes, kind: Kind) -> EventBatch:
    """What one message of a publisher says.

    An event that cannot be used is a `RefusedEvent` among the others.
    Raises: ForeignEventError: the bytes are no batch; whatever it said is lost.
    """
    if len(payload) > MAX_BATCH_BYTES:
        why = f"a message of {len(payload)} bytes; at most {MAX_BATCH_BYTES} are read"
        raise ForeignEventError(EventRefusal.UNREADABLE, why)
    if len(payload) > _WHOLE_BYTES:
        return _decode_one_by_one(payload, kind)
    try:
        message = _MESSAGE(payload)
    except _BAD:
        return _decode_one_by_one(payload, kind)
    return EventBatch([_said(event, kind) for event in message.events], message.rank)


def _decode_one_by_one(payload: bytes, kind: Kind) -> EventBatch:
    """A batch of which not every event is a map of the usual kind."""
    try:
        if _is_map(payload):
            named = _RAW_MAP_MESSAGE(payload)
            events, rank = named.events, named.data_parallel_rank
            rank = named.attn_dp_rank if rank is None else rank
        else:
            message = _RAW_MESSAGE(payload)
            events, rank = message.events, message.rank
    except _BAD as error:
        raise ForeignEventError(EventRefusal.UNREADABLE, f"no batch of events ({error})") from None
    return EventBatch([_decode_event(bytes(event), kind) for event in events], rank)


def _decode_event(data: bytes, kind: Kind) -> ForeignEvent:
    is_map, why = _is_map(data), ""
    for decode in _MAPS if is_map else _ARRAYS[kind]:
        try:
            event = decode(data)
        except _BAD as error:
            why = why or str(error)
        else:
            return _said(event, kind)
    return _refused(data, is_map, why)


def _refused(data: bytes, is_map: bool, why: str) -> RefusedEvent:
    try:
        name = (_TYPED if is_map else _TYPED_ARRAY)(data).type
    except _BAD:
        return RefusedEvent(EventRefusal.MALFORMED, why, is_loss=True)
    if name == "BlockStored":
        return RefusedEvent(EventRefusal.MALFORMED, why, is_loss=False)
    if name in ("BlockRemoved", "AllBlocksCleared"):
        return RefusedEvent(EventRefusal.MALFORMED, why, is_loss=True)
    return RefusedEvent(EventRefusal.UNKNOWN_TYPE, f"an event of type {name[:64]!r}", is_loss=False)


def _is_map(data: bytes) -> bool:
    first = data[0] if data else 0
    return first & 0xF0 == 0x80 or first in (0xDE, 0xDF)


def _said(event: Any, kind: Kind) -> ForeignEvent:
    if isinstance(event, _MapStored | _VllmStored | _SglangStored):
        try:
            return _stored(event)
        except ForeignEventError as error:
            return RefusedEvent(error.reason, str(error), is_loss=False)
        except _BAD as error:
            return RefusedEvent(EventRefusal.MALFORMED, str(error), is_loss=False)
    if isinstance(event, _MapRemoved | _VllmRemoved | _SglangRemoved):
        owner, group = getattr(event, "ownership", None), getattr(event, "group_idx", None)
        return Removed(event.block_hashes, event.medium or "GPU", owner or "", group or 0)
    return Cleared(is_all=kind is Kind.SGLANG)  # it empties its host pool with the tree


def _stored(event: Any) -> BlocksStored:
    """Raises ForeignEventError and what else `_BAD` has: it makes no sense."""
    lora = event.lora_name or ""
    if event.lora_id is not None and not lora:
        why = f"blocks of adapter number {event.lora_id} without its name"
        raise ForeignEventError(EventRefusal.UNNAMED_LORA, why)
    keys, tokens, size = event.block_hashes, event.token_ids, event.block_size
    ahead: Sequence[int] = getattr(event, "lookahead_token_ids", None) or ()
    if tokens and isinstance(tokens[0], tuple):
        tokens, ahead = _unpaired(tokens)
    extra: Sequence[bytes] = ()
    keyed, salt = getattr(event, "extra_keys", None), getattr(event, "cache_salt", None) or ""
    if keyed is not None or salt or ahead:
        is_first = event.parent_block_hash is None
        extra = _extra(keyed, lora, salt if is_first else "", tokens, size, ahead, len(keys))
    owner, group = getattr(event, "ownership", None), getattr(event, "group_idx", None)
    return BlocksStored(
        keys, event.parent_block_hash, tokens, size, extra, event.medium or "GPU", owner or "", lora, group or 0
    )


def _unpaired(pairs: Sequence[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """Tokens of pages of pairs, each a token and the one after it, and what lies behind the last.

    Raises ForeignEventError.
    """
    tokens = [first for first, _ in pairs]
    if any(pair[1] != after for pair, after in zip(pairs, tokens[1:], strict=False)):
        raise ForeignEventError(EventRefusal.MALFORMED, "pairs of tokens that do not follow each other")
    return tokens, [pairs[-1][1]]


def _extra(
    keyed: Any, lora: str, salt: str, tokens: Sequence[int], size: int, ahead: Sequence[int], count: int
) -> Sequence[bytes]:
    """An extra key for each block, or none at all. Raises ForeignEventError, struct.error."""
    if keyed is not None and (not isinstance(keyed, list) or len(keyed) != count):
        raise ForeignEventError(
            EventRefusal.MALFORMED, f"extra_keys are no list of one entry for each of {count} blocks"
        )
    if keyed is not None and not (salt or ahead) and not lora and not any(keyed):
        return ()
    behind = [*tokens, *ahead] if ahead else []
    extra = []
    for index in range(count):
        words = _words(keyed[index], lora) if keyed is not None else ([], [], [])
        salts, media, embeds = words
        if salt and not index:
            salts = [salt]
        begin = (index + 1) * size
        extra.append(extra_key("\0".join(salts), media, embeds, behind[begin : begin + len(ahead)]))
    return extra if any(extra) else ()


def _words(entry: Any, lora: str) -> tuple[list[str], list[Media], list[bytes]]:
    """Salts, media and digests of embeddings among vLLM's extra keys of one block. Raises ForeignEventError."""
    if entry is None:
        entry = []
    if not isinstance(entry, list):
        raise ForeignEventError(EventRefusal.MALFORMED, "the extra keys of a block are no list")
    if lora:
        if not entry or entry[0] != lora:
            raise ForeignEventError(EventRefusal.MALFORMED, "extra keys that do not begin with their adapter's name")
        entry = entry[1:]
    salts: list[str] = []
    media: list[Media] = []
    embeds: list[bytes] = []
    for word in entry:
        match word:
            case str():
                salts.append(word)
            case bytes():
                embeds.append(word)
            case [str(name), int(offset)]:
                media.append(Media(name, offset))
            case _:
                raise ForeignEventError(EventRefusal.MALFORMED, "an extra key that is neither salt, media nor a digest")
    if len(salts) > 1:
        raise ForeignEventError(EventRefusal.MALFORMED, f"{len(salts)} salts of one block")
    return salts, media, embeds
