"""TensorRT-LLM's KV cache events, as `LLM.get_kv_cache_events` and trtllm-serve's `/kv_cache_events` give them → what
they say.

An answer is a JSON array of events; each has an `event_id`, counted from 0 by the process and its attention rank. A
block has its tokens, and may be the last of a prompt and not full: such a one is never told of. Where layers have
windows of several sizes, the largest counts: it alone has all of a prompt.

Nothing an engine sends raises anything but ForeignEventError.

Source: KVCacheEventSerializer in tensorrt_llm/_utils.py, which has written tests/golden/trtllm_recorded.json; layer
groups, hex digests and digests as tokens as from the event manager of its second KV cache manager.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, NamedTuple, cast

import msgspec
from msgspec import Meta

from kvbm.core.extra_keys import Media, extra_key
from kvbm.streams.foreign.events import (
    MAX_BATCH_BYTES,
    MAX_BATCH_EVENTS,
    MAX_BLOCK_TOKENS,
    MAX_EVENT_BLOCKS,
    MAX_KEY_BYTES,
    MAX_TEXT_BYTES,
    BlockKey,
    BlocksStored,
    EventBatch,
    EventRefusal,
    ForeignEvent,
    ForeignEventError,
    RefusedEvent,
    Removed,
)

_LEVELS = {0: "GPU", 1: "CPU", 2: "STORAGE"}

_Text = Annotated[str, Meta(max_length=MAX_TEXT_BYTES)]
_Key = int | Annotated[str, Meta(min_length=1, max_length=2 * MAX_KEY_BYTES)]
_Group = Annotated[int, Meta(ge=0, le=255)]
_Number = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


class _Token(msgspec.Struct, gc=False):
    token_id: int | _Text  # a digest, where it stands for a part of a picture
    token_extra_id: int = 0


class _MediaKey(msgspec.Struct, gc=False):
    hash: _Text
    start_offset: int = 0


class _Block(msgspec.Struct, gc=False):
    block_hash: _Key | None
    tokens: Annotated[list[_Token], Meta(max_length=MAX_BLOCK_TOKENS)]
    cache_level: int | None = 0
    lora_id: int | None = None
    cache_salt: _Text | None = None
    mm_keys: list[_MediaKey] | None = None


class _Stored(msgspec.Struct, tag="stored", gc=False):
    blocks: Annotated[list[_Block], Meta(max_length=MAX_EVENT_BLOCKS)]
    parent_hash: _Key | None = None
    lora_name: _Text | None = None
    cache_salt: _Text | None = None
    is_eagle: bool | None = None


class _Removed(msgspec.Struct, tag="removed", gc=False):
    block_hashes: Annotated[list[_Key | None], Meta(max_length=MAX_EVENT_BLOCKS)]


class _Levels(msgspec.Struct, gc=False):
    old_value: int
    new_value: int


class _Updated(msgspec.Struct, tag="updated", gc=False):
    block_hash: _Key | None
    cache_level: _Levels | None = None


class _Created(msgspec.Struct, tag="created", gc=False):
    pass


class _Event(msgspec.Struct, gc=False):
    event_id: _Number
    data: _Stored | _Removed | _Updated | _Created
    window_size: int | None = None
    layer_group_id: _Group | None = None
    attention_dp_rank: int | None = None


class _Numbered(msgspec.Struct, gc=False):
    event_id: _Number
    attention_dp_rank: _Number | None = None


class _Typed(msgspec.Struct, gc=False):
    type: str


class _TypedEvent(msgspec.Struct, gc=False):
    data: _Typed


_BAD = (msgspec.MsgspecError, RecursionError, ValueError, OverflowError)
_ANSWER = msgspec.json.Decoder(Annotated[list[msgspec.Raw], Meta(max_length=MAX_BATCH_EVENTS)])
_EVENT, _NUMBERED = msgspec.json.Decoder(_Event), msgspec.json.Decoder(_Numbered)
_TYPED = msgspec.json.Decoder(_TypedEvent)


class NumberedEvent(NamedTuple):
    """One event of an answer.

    Attributes:
        rank: attention rank that numbers it.
        payload: for `TrtllmEvents`.
    """

    rank: int
    sequence: int
    payload: bytes


class EventAnswer(NamedTuple):
    """What one ask has brought.

    Attributes:
        unreadable: how many of its events have no number.
    """

    events: list[NumberedEvent]
    unreadable: int


def read_answer(body: bytes) -> EventAnswer:
    """The events of one answer by their numbers. Raises ForeignEventError: it is no answer; what it said is lost."""
    if len(body) > MAX_BATCH_BYTES:
        why = f"an answer of {len(body)} bytes; at most {MAX_BATCH_BYTES} are read"
        raise ForeignEventError(EventRefusal.UNREADABLE, why)
    try:
        raws = _ANSWER.decode(body)
    except _BAD as error:
        raise ForeignEventError(EventRefusal.UNREADABLE, f"no array of events ({error})") from None
    events, unreadable = [], 0
    for raw in raws:
        data = bytes(raw)
        if data == b"{}":  # the engine's word for no event
            continue
        try:
            head = _NUMBERED.decode(data)
        except _BAD:
            unreadable += 1
        else:
            events.append(NumberedEvent(head.attention_dp_rank or 0, head.event_id, data))
    return EventAnswer(events, unreadable)


class TrtllmEvents:
    """Bytes of one event → what it says. Remembers which window counts, and nothing else.

    Args:
        block_tokens: of a full block.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._window: int | None = None
        self._has_told = False  # of blocks of that window

    def __call__(self, payload: bytes) -> EventBatch:
        """Raises ForeignEventError: the bytes are no event."""
        try:
            event = _EVENT.decode(payload)
        except _BAD as error:
            return EventBatch([_refused(payload, str(error))], None)
        if event.event_id == 0:
            self._window, self._has_told = None, False
        events: list[ForeignEvent] = []
        if event.window_size is not None and event.window_size != self._window:
            if self._window is not None and event.window_size < self._window:
                return EventBatch([], event.attention_dp_rank)
            if self._has_told:
                why = f"blocks of a window of {self._window} tokens were told of, and there is a larger one"
                events.append(RefusedEvent(EventRefusal.UNMAPPED, why, is_loss=True))
            self._window, self._has_told = event.window_size, False
        events += self._said(event)
        self._has_told |= not isinstance(event.data, _Created)
        return EventBatch(events, event.attention_dp_rank)

    def _said(self, event: _Event) -> Iterator[ForeignEvent]:
        group = event.layer_group_id or 0
        match event.data:
            case _Stored() as stored:
                try:
                    yield from self._stored(stored, group)
                except ForeignEventError as error:
                    yield RefusedEvent(error.reason, str(error), is_loss=False)
                except _BAD as error:
                    yield RefusedEvent(EventRefusal.MALFORMED, str(error), is_loss=False)
            case _Removed() as removed:
                yield Removed([_key(key) for key in removed.block_hashes if key is not None], "", group=group)
            case _Updated(key, _Levels(old, new)) if key is not None and old != new:
                keys = [_key(key)]
                yield BlocksStored(keys, None, (), self._block_tokens, (), _level(new), group=group)
                yield Removed(keys, _level(old), group=group)

    def _stored(self, stored: _Stored, group: int) -> Iterator[BlocksStored]:
        """Full blocks, those of one level together. Raises ForeignEventError, after those before the bad one."""
        if stored.is_eagle:
            raise ForeignEventError(EventRefusal.UNMAPPED, "blocks that depend on tokens behind them")
        lora = stored.lora_name or ""
        parent = None if stored.parent_hash is None else _key(stored.parent_hash)
        salt = _salt(stored) if parent is None else ""
        run: list[_Block] = []
        bad: ForeignEventError | None = None
        try:
            for block in self._full(stored.blocks):
                if block.lora_id is not None and not lora:
                    why = f"blocks of adapter number {block.lora_id} without its name"
                    raise ForeignEventError(EventRefusal.UNNAMED_LORA, why)
                if run and run[-1].cache_level != block.cache_level:
                    yield self._run(run, parent, salt, lora, group)
                    parent, salt, run = _key_of(run[-1]), "", []
                run.append(block)
        except ForeignEventError as error:
            bad = error
        if run:
            yield self._run(run, parent, salt, lora, group)
        if bad is not None:
            raise bad

    def _full(self, blocks: Sequence[_Block]) -> Iterator[_Block]:
        """The blocks up to the first that is not full, or has no hash. Raises ForeignEventError."""
        for block in blocks:
            if len(block.tokens) > self._block_tokens:
                why = f"a block of {len(block.tokens)} tokens; the settings say {self._block_tokens}"
                raise ForeignEventError(EventRefusal.MALFORMED, why)
            if len(block.tokens) < self._block_tokens or block.block_hash is None:
                return
            if any(isinstance(token.token_id, str) for token in block.tokens):
                raise ForeignEventError(EventRefusal.UNMAPPED, "digests in the place of tokens")
            if not block.mm_keys and any(token.token_extra_id for token in block.tokens):
                raise ForeignEventError(EventRefusal.UNMAPPED, "tokens with extra numbers that no client knows")
            yield block

    def _run(self, blocks: Sequence[_Block], parent: BlockKey | None, salt: str, lora: str, group: int) -> BlocksStored:
        extra: Sequence[bytes] = ()
        if salt or any(block.mm_keys for block in blocks):
            extra = [
                extra_key(salt if at == 0 else "", [Media(one.hash, -one.start_offset) for one in block.mm_keys or ()])
                for at, block in enumerate(blocks)
            ]
        keys = [_key_of(block) for block in blocks]
        tokens = [cast(int, token.token_id) for block in blocks for token in block.tokens]
        medium = _level(blocks[0].cache_level or 0)
        return BlocksStored(keys, parent, tokens, self._block_tokens, extra, medium, lora=lora, group=group)


def _salt(stored: _Stored) -> str:
    """Of the first block's chain: engines say it beside the block, or beside all of the event's."""
    beside = stored.blocks[0].cache_salt if stored.blocks else None
    return beside or stored.cache_salt or ""


def _key_of(block: _Block) -> BlockKey:
    assert block.block_hash is not None
    return _key(block.block_hash)


def _key(said: int | str) -> BlockKey:
    return said if isinstance(said, int) else said.encode()


def _level(number: int) -> str:
    """The medium of a cache level; one that is not known is refused where media are."""
    return _LEVELS.get(number, f"level {number}")


def _refused(payload: bytes, why: str) -> RefusedEvent:
    try:
        name = _TYPED.decode(payload).data.type
    except _BAD:
        return RefusedEvent(EventRefusal.MALFORMED, why, is_loss=True)
    if name in ("stored", "removed", "updated", "created"):
        return RefusedEvent(EventRefusal.MALFORMED, why, is_loss=name in ("removed", "updated"))
    return RefusedEvent(EventRefusal.UNKNOWN_TYPE, f"an event of type {name[:64]!r}", is_loss=False)
