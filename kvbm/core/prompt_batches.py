"""The binary form of questions about prompts, and of their answers: several prompts of one namespace in one body. docs/route.md has it too.

All numbers are little-endian. A body of questions:

    0   4   "KVB1"
    4   1   kind: 1 lookup, 2 route
    5   1   0
    6   2   limit: instances to name for each prompt, 1 to 1,024
    8   4   prompts, 1 to 256; of routes 64
    12  4   0
    16  16  id of the namespace
    32  8n  for each prompt: its full blocks (4), its tokens (4; of a lookup 0)
        16  for each block of each prompt: its sequence hash

and one of answers:

    0   4   "KVB1"
    4   1   kind
    5   3   0
    8   4   prompts
    12  4   age of the view in seconds, float

    then for each prompt
    0   4   the largest depth of all instances and pools; of a route 0
    4   4   more: instances that are not named, because of the limit
    8   2   rows that follow
    10  2   0

    a row of a lookup: depth (4), reach (4), blocks in HBM, HOST, NVME and OBJECT (16), flags (1), bytes of the name (1), the name
    a row of a route: cost_s, queueing_s, recompute_s, balance_s, fetch_s, ttft_s (floats, 24), depth (4), missing tokens (4),
        blocks to fetch (4), flags (1), bytes of the name (1), the name

Flag 1: suspect. Flag 2: the row names a pool, of which only the depth is told. Flag 4: not admitted. Pools come after instances.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from kvbm.core.answers import (
    MAX_HASHES,
    MAX_INPUT_TOKENS,
    MAX_LIMIT,
    InstanceHolding,
    LookupAnswer,
    PoolHolding,
    RankedInstance,
    RouteAnswer,
)
from kvbm.core.errors import LayoutError
from kvbm.core.ids import HASH_BYTES, NamespaceId, Tier

CONTENT_TYPE = "application/vnd.kvbm.prompts"
LOOKUP, ROUTE = 1, 2
MOST_PROMPTS = 256
MOST_ROUTES = 64
SUSPECT, POOL, REFUSED = 1, 2, 4
_MAGIC = b"KVB1"
_QUESTIONS = struct.Struct("<4sBBHII16s")
_PROMPT = struct.Struct("<II")
_ANSWERS = struct.Struct("<4sB3xIf")
_ANSWER = struct.Struct("<IIHxx")
_HOLDING = struct.Struct("<6IBB")
_RANKED = struct.Struct("<6f3IBB")


class PromptBatch(NamedTuple):
    """Questions about several prompts of one namespace.

    Attributes:
        kind: LOOKUP or ROUTE.
        limit: instances to name for each.
        prompts: of each its packed hashes, and how many tokens it has (of a lookup 0).
    """

    kind: int
    limit: int
    namespace: NamespaceId
    prompts: Sequence[tuple[bytes, int]]


def encode_batch(batch: PromptBatch) -> bytes:
    """The body of questions."""
    head = _QUESTIONS.pack(_MAGIC, batch.kind, 0, batch.limit, len(batch.prompts), 0, batch.namespace)
    counts = (_PROMPT.pack(len(hashes) // HASH_BYTES, tokens) for hashes, tokens in batch.prompts)
    return b"".join([head, *counts, *(hashes for hashes, _ in batch.prompts)])


def decode_batch(body: bytes | bytearray) -> PromptBatch:
    """The questions in a body. Raises LayoutError: it is none."""
    if len(body) < _QUESTIONS.size:
        raise LayoutError(f"{len(body)} bytes are no questions: a header has {_QUESTIONS.size}")
    magic, kind, zero, limit, count, more, namespace = _QUESTIONS.unpack_from(body)
    if magic != _MAGIC or kind not in (LOOKUP, ROUTE) or zero or more:
        raise LayoutError(f"a body of questions does not begin with {bytes(body[:16]).hex()}")
    if not 1 <= limit <= MAX_LIMIT:
        raise LayoutError(f"limit is {limit}; give 1 to {MAX_LIMIT}")
    most = MOST_PROMPTS if kind == LOOKUP else MOST_ROUTES
    if not 1 <= count <= most:
        raise LayoutError(f"{count} prompts; give 1 to {most}")
    at = _QUESTIONS.size + count * _PROMPT.size
    if len(body) < at:
        raise LayoutError(f"{len(body)} bytes, and the sizes of {count} prompts end at {at}")
    sizes = list(_PROMPT.iter_unpack(memoryview(body)[_QUESTIONS.size : at]))
    total = sum(blocks for blocks, _ in sizes)
    if total > MAX_HASHES:
        raise LayoutError(f"{total} hashes; at most {MAX_HASHES} are taken")
    if len(body) != at + total * HASH_BYTES:
        raise LayoutError(f"{len(body)} bytes, and {total} hashes end at {at + total * HASH_BYTES}")
    prompts: list[tuple[bytes, int]] = []
    for blocks, tokens in sizes:
        if tokens > MAX_INPUT_TOKENS or (kind == LOOKUP and tokens):
            raise LayoutError(f"a prompt of {tokens} tokens; give 0 to {MAX_INPUT_TOKENS}, and 0 for a lookup")
        end = at + blocks * HASH_BYTES
        prompts.append((bytes(body[at:end]), tokens))
        at = end
    return PromptBatch(kind, limit, NamespaceId(namespace), prompts)


def answers_head(kind: int, count: int, view_age_s: float) -> bytes:
    """The beginning of a body of answers."""
    return _ANSWERS.pack(_MAGIC, kind, count, view_age_s)


def encode_lookup(answer: LookupAnswer) -> bytes:
    """The answer to one lookup."""
    parts = [_ANSWER.pack(answer.deepest, answer.more, len(answer.instances) + len(answer.pools))]
    for one in answer.instances:
        name = one.instance.encode()
        tiers = (one.tiers.get(tier.name, 0) for tier in Tier)
        parts += [_HOLDING.pack(one.depth, one.reach, *tiers, SUSPECT * one.suspect, len(name)), name]
    for pool in answer.pools:
        name = pool.pool.encode()[:255]
        parts += [_HOLDING.pack(pool.depth, 0, 0, 0, 0, 0, POOL, len(name)), name]
    return b"".join(parts)


def encode_route(answer: RouteAnswer) -> bytes:
    """The answer to one route."""
    parts = [_ANSWER.pack(0, answer.more, len(answer.ranked))]
    for one in answer.ranked:
        name = one.instance.encode()
        parts += [
            _RANKED.pack(
                one.cost_s, one.queueing_s, one.recompute_s, one.balance_s, one.fetch_s, one.ttft_s, one.depth,
                one.missing_tokens, one.fetch_blocks, SUSPECT * one.suspect | REFUSED * (not one.admitted), len(name),
            ),
            name,
        ]  # fmt: skip
    return b"".join(parts)


def decode_lookups(body: bytes, asked: PromptBatch) -> list[LookupAnswer]:
    """The answers to lookups. Raises LayoutError: they are none to these questions."""
    age_s, parts = _parts(body, asked, LOOKUP, _HOLDING)
    found: list[LookupAnswer] = []
    for (hashes, _), (deepest, more, rows) in zip(asked.prompts, parts, strict=True):
        instances = [
            InstanceHolding(
                instance=name, depth=depth, reach=reach, suspect=bool(flags & SUSPECT),
                tiers={tier.name: blocks for tier, blocks in zip(Tier, by_tier, strict=True) if blocks},
            )
            for (depth, reach, *by_tier, flags, _), name in rows
            if not flags & POOL
        ]  # fmt: skip
        pools = [PoolHolding(pool=name, depth=row[0]) for row, name in rows if row[-2] & POOL]
        found.append(
            LookupAnswer(
                namespace=asked.namespace.hex(), blocks=len(hashes) // HASH_BYTES, deepest=deepest, instances=instances,
                pools=pools, excluded=[], view_age_s=age_s, more=more,
            )
        )  # fmt: skip
    return found


def decode_routes(body: bytes, asked: PromptBatch) -> list[RouteAnswer]:
    """The answers to routes. Raises LayoutError: they are none to these questions."""
    age_s, parts = _parts(body, asked, ROUTE, _RANKED)
    found: list[RouteAnswer] = []
    for (hashes, _), (_, more, rows) in zip(asked.prompts, parts, strict=True):
        ranked = [
            RankedInstance(
                instance=name, cost_s=row[0], queueing_s=row[1], recompute_s=row[2], balance_s=row[3], fetch_s=row[4],
                ttft_s=row[5], depth=row[6], missing_tokens=row[7], fetch_blocks=row[8],
                suspect=bool(row[9] & SUSPECT), admitted=not row[9] & REFUSED,
            )
            for row, name in rows
        ]  # fmt: skip
        if not ranked:
            raise LayoutError("an answer to a route names no instance")
        found.append(
            RouteAnswer(
                instance=ranked[0].instance, namespace=asked.namespace.hex(), blocks=len(hashes) // HASH_BYTES,
                ranked=ranked, view_age_s=age_s, more=more, admitted=ranked[0].admitted,
            )
        )  # fmt: skip
    return found


_Rows = list[tuple[tuple[int, ...], str]]


def _parts(
    body: bytes, asked: PromptBatch, kind: int, row: struct.Struct
) -> tuple[float, list[tuple[int, int, _Rows]]]:
    """The age of the view; of each prompt the largest depth, how many more, and rows with their names."""
    try:
        magic, told, count, age_s = _ANSWERS.unpack_from(body)
        if magic != _MAGIC or told != kind or count != len(asked.prompts):
            raise LayoutError(
                f"{count} answers of kind {told} are none to {len(asked.prompts)} questions of kind {kind}"
            )
        at, parts = _ANSWERS.size, []
        for _ in range(count):
            deepest, more, rows = _ANSWER.unpack_from(body, at)
            at += _ANSWER.size
            found: _Rows = []
            for _ in range(rows):
                values = row.unpack_from(body, at)
                at += row.size + values[-1]
                if at > len(body):
                    raise LayoutError("the answers end within a name")
                found.append((values, body[at - values[-1] : at].decode()))
            parts.append((deepest, more, found))
    except (struct.error, UnicodeDecodeError) as error:
        raise LayoutError(f"these are no answers ({error})") from None
    if at != len(body):
        raise LayoutError(f"{len(body) - at} bytes are behind the last answer")
    return age_s, parts
