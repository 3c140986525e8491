"""What other engines' events say, whatever bytes said it; and why one is refused."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from kvbm.core.errors import KvbmError

BlockKey = int | bytes  # an engine's own hash of a block, as it sends it

MAX_EVENT_BLOCKS = 1 << 20
MAX_EVENT_TOKENS = 1 << 24
MAX_BATCH_EVENTS = 1 << 16
MAX_BATCH_BYTES = 64 << 20
MAX_KEY_BYTES = 64
MAX_TEXT_BYTES = 4096
MAX_BLOCK_TOKENS = 1 << 16
MAX_LOOKAHEAD = 64  # tokens behind a block that its KV depends on


class EventRefusal(StrEnum):
    """Why a batch, an event or blocks of it count for nothing."""

    UNREADABLE = "unreadable"  # bytes that are no batch
    MALFORMED = "malformed"  # an event of a known type that makes no sense
    UNKNOWN_TYPE = "unknown_type"
    UNKNOWN_MEDIUM = "unknown_medium"
    NO_POOL = "no_pool"  # of a cluster pool that the source's settings do not name
    UNNAMED_LORA = "unnamed_lora"  # an adapter of which only the engine's own number is said
    OTHER_RANK = "other_rank"
    UNMAPPED = "unmapped"  # blocks: neither tokens with a known parent nor a known hash
    CONFLICT = "conflict"  # blocks: one hash of the engine's for two different prefixes
    BEYOND = "beyond"  # blocks beyond the bound of what is remembered, or of too many namespaces
    NOT_HELD = "not_held"  # blocks removed that were not known to be held


class ForeignEventError(KvbmError):
    """Bytes of another engine that are no good batch or event. A retry does not help.

    Attributes:
        reason: what it counts as.
    """

    def __init__(self, reason: EventRefusal, why: str) -> None:
        super().__init__(f"{why}; it counts as {reason}")
        self.reason = reason


class BlocksStored(NamedTuple):
    """Blocks lie in a medium now.

    Attributes:
        keys: n hashes of the engine's, in the order of their chain.
        parent: of the block before; None where the first begins its chain.
        tokens: n * width ids; empty where the event brings none, fewer where it leaves blocks out.
        block_tokens: tokens of a block.
        extra: an extra key for each block, as `core.extra_keys` writes it, or none at all.
        medium: the engine's word.
        ownership: the pool beyond the engine that has them; "" for its own.
        lora: adapter; "" for none.
        group: KV group.
        width: numbers of a block in `tokens` where they are not its tokens themselves but a hash of them; 0:
            block_tokens.
    """

    keys: Sequence[BlockKey]
    parent: BlockKey | None
    tokens: Sequence[int]
    block_tokens: int
    extra: Sequence[bytes]
    medium: str
    ownership: str = ""
    lora: str = ""
    group: int = 0
    width: int = 0


class Removed(NamedTuple):
    """Blocks lie in a medium no more; fields as of `BlocksStored`, but a medium of "" is each that has them."""

    keys: Sequence[BlockKey]
    medium: str
    ownership: str = ""
    group: int = 0


class Cleared(NamedTuple):
    """The engine has emptied its prefix cache: what lay on the GPU is gone.

    Attributes:
        is_all: what lay in its other media is gone as well.
    """

    is_all: bool = False


class RefusedEvent(NamedTuple):
    """An event that counts for nothing.

    Attributes:
        is_loss: it may have said that blocks are gone, so nothing that was held is certain any more.
    """

    reason: EventRefusal
    why: str
    is_loss: bool


ForeignEvent = BlocksStored | Removed | Cleared | RefusedEvent


class EventBatch(NamedTuple):
    """What one message says.

    Attributes:
        rank: data-parallel rank of the engine, where it says one.
    """

    events: list[ForeignEvent]
    rank: int | None
