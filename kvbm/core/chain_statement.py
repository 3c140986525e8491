"""What an engine states of how it hashes tokens, so that whoever has tokens alone finds its blocks.

It stands in the attributes of its InstanceStarted and in its heartbeats. It speaks of all namespaces of one scheme,
those of tenants and adapters that are declared later among them. Nothing in it is secret: what a chain begins with says
neither what is held nor for whom, and our hashes are derived from the digests under the root of a namespace, which
takes its tenant's secret.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

import msgspec

from kvbm.core.engine_chains import CHAINS, DIGEST_BYTES, MOST_HASH_TOKENS, SGLANG_SHA256
from kvbm.core.ids import MAX_TEXT_BYTES, Namespace

ATTRIBUTE = "chain"  # of an InstanceStarted
MOST_BYTES = 8 << 10  # of a statement
MOST_GROUPS = 64
_MOST_TOKENS = 1 << 20  # of a block, a window, a chunk and an alignment
_MOST_SEED = 1 << 64


class ReadBack(Protocol):
    """How far back tokens of a group read; the attributes are those of ChainGroup."""

    @property
    def block_tokens(self) -> int: ...
    @property
    def window_blocks(self) -> int | None: ...
    @property
    def chunk_tokens(self) -> int | None: ...


def keeps_all(group: ReadBack) -> bool:
    """Whether tokens at any position need all blocks of a group before it."""
    return group.window_blocks is None and group.chunk_tokens is None


def first_needed(group: ReadBack, end: int) -> int:
    """The first block of a group that tokens after block `end` still need."""
    if group.chunk_tokens is not None:
        return end * group.block_tokens // group.chunk_tokens * group.chunk_tokens // group.block_tokens
    return 0 if group.window_blocks is None else max(0, end - group.window_blocks)


class ChainGroup(msgspec.Struct, frozen=True, array_like=True):
    """One KV group of a model, in whose namespace blocks are.

    Attributes:
        kv_group: as the namespace has it. block_tokens: too.
        window_blocks: blocks before a position that attention still reads there; None: all of them.
        chunk_tokens: attention reads back to a multiple of so many tokens; None: farther.
        has_draft: a prefix counts only as far as the block behind it is held, too.
    """

    kv_group: int
    block_tokens: int
    window_blocks: int | None = None
    chunk_tokens: int | None = None
    has_draft: bool = False

    @property
    def keeps_all(self) -> bool:
        """Whether tokens at any position need all blocks before it."""
        return keeps_all(self)

    def first_needed(self, end: int) -> int:
        """The first block that tokens after block `end` still need."""
        return first_needed(self, end)


class ChainStatement(msgspec.Struct, frozen=True, kw_only=True):
    """See the module. MessagePack on the wire.

    Attributes:
        scheme, scheme_seed: of the namespaces it is about.
        kind: one of `engine_chains.CHAINS`.
        begin: what the chain's first block has in the place of a digest before it: 32 bytes, or of SGLang none.
        hash_tokens: tokens of a digest; a block's is the last one of it.
        groups: those of which blocks are kept.
        align_tokens: a prefix counts in multiples of so many tokens.
    """

    scheme: str
    scheme_seed: int
    kind: str
    begin: bytes
    hash_tokens: int
    groups: tuple[ChainGroup, ...]
    align_tokens: int = 1

    @property
    def in_hex(self) -> bool:
        """Whether our hashes are derived from the digests' texts."""
        return self.kind == SGLANG_SHA256

    @property
    def step_tokens(self) -> int:
        """What a prefix of all groups together grows by."""
        return math.lcm(self.align_tokens, *(group.block_tokens for group in self.groups))

    @property
    def is_plain(self) -> bool:
        """Whether a run of blocks from the first on is a prefix, and nothing else is."""
        return len(self.groups) == 1 and self.groups[0].keeps_all and not self.groups[0].has_draft

    def group_of(self, namespace: Namespace) -> ChainGroup | None:
        """The group whose blocks a namespace has; None: the statement is not about it."""
        if (namespace.scheme, namespace.scheme_seed) != (self.scheme, self.scheme_seed):
            return None
        found = (one for one in self.groups if one.kv_group == namespace.kv_group)
        group = next(found, None)
        return group if group is not None and group.block_tokens == namespace.block_tokens else None

    def encoded(self) -> bytes:
        """Its bytes. Raises OverflowError: a number does not fit."""
        return msgspec.msgpack.encode(self)


class ReadStatement(NamedTuple):
    """A statement as somebody else sent it, or why it is none."""

    statement: ChainStatement | None
    why: str = ""


def read_statement(data: bytes) -> ReadStatement:
    """The statement in bytes that anybody may have sent."""
    if len(data) > MOST_BYTES:
        return ReadStatement(None, f"{len(data)} bytes; a statement has at most {MOST_BYTES}")
    try:
        found = msgspec.msgpack.decode(data, type=ChainStatement)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return ReadStatement(None, f"it does not decode: {error}")
    why = _why_unusable(found)
    return ReadStatement(None if why else found, why)


def _why_unusable(found: ChainStatement) -> str:
    if found.kind not in CHAINS:
        return "its kind of chain is not known here"
    if len(found.begin) != DIGEST_BYTES and (found.begin or found.kind != SGLANG_SHA256):
        return f"its chain begins with {len(found.begin)} bytes"
    if not 1 <= len(found.scheme.encode()) <= MAX_TEXT_BYTES or abs(found.scheme_seed) > _MOST_SEED:
        return "its scheme is none"
    if not 1 <= found.hash_tokens <= MOST_HASH_TOKENS or not 1 <= found.align_tokens <= _MOST_TOKENS:
        return f"digests of {found.hash_tokens} tokens, prefixes in steps of {found.align_tokens}"
    if not 1 <= len(found.groups) <= MOST_GROUPS or len({one.kv_group for one in found.groups}) < len(found.groups):
        return f"{len(found.groups)} groups, or two of one number"
    if found.step_tokens > _MOST_TOKENS:
        return f"prefixes grow by {found.step_tokens} tokens"
    return next((why for one in found.groups if (why := _why_no_group(one, found.hash_tokens))), "")


def _why_no_group(group: ChainGroup, hash_tokens: int) -> str:
    sizes = (group.block_tokens, group.window_blocks or 1, group.chunk_tokens or 1)
    if group.kv_group < 0 or any(not 1 <= size <= _MOST_TOKENS for size in sizes):
        return f"group {group.kv_group} has sizes of {sizes}"
    if group.block_tokens % hash_tokens:
        return f"blocks of {group.block_tokens} tokens are no whole digests of {hash_tokens}"
    return ""
