"""The binary form of questions about prompts, and of their answers: several prompts of one namespace in one body.
docs/route.md has it too.

All numbers are little-endian. A body of questions:

    0   4   "KVB1"
    4   1   kind: 1 lookup, 2 route, 3 presence, 4 find
    5   1   0
    6   2   limit: instances to name for each prompt, 1 to 1,024
    8   4   prompts, 1 to 256; of routes 64
    12  4   of a find: bytes of who asks, at most 16,384; else 0
    16  16  id of the namespace
    32  8n  for each prompt: its full blocks (4), its tokens (4; of a find the block from which on instances are asked
            for; of others 0)
        16  for each block of each prompt: its sequence hash
            of a find: who asks: the instance and the labels of its place, outermost first, with line feeds between

and one of answers:

    0   4   "KVB1"
    4   1   kind
    5   3   0
    8   4   prompts
    12  4   age of the view in seconds, float

    then for each prompt
    0   4   the largest depth of all instances and pools; of others than a lookup 0
    4   4   more: instances that are not named, because of the limit
    8   2   rows that follow
    10  1   where nothing was found, why: 1 no full block, 2 all that have it are left out, 3 fewer hashes than the
            prompt has full blocks, 4 not held, 5 no instance has named the namespace; else 0, and 0 where nobody says
            it
    11  1   0

    a row of a lookup: depth (4), reach (4), blocks in HBM, HOST, NVME and OBJECT (16), flags (1), bytes of the name
    (1), the name a row of a route: cost_s, queueing_s, recompute_s, balance_s, fetch_s, ttft_s (floats, 24), depth (4),
    missing tokens (4),
        blocks to fetch (4), flags (1), bytes of the name (1), the name
    a row of a presence: bytes of the mask (4), tier (1, 0 is HBM), flags (1), bytes of the name (1), the name, the
    mask: a bit for each
        block, the first in the lowest bit of the first byte
    a row of a find: bytes of the address (4), depth (4), blocks of it in HOST (4), distance (1), flags (1), bytes of
    the name (1), the name,
        the address: host, unix and tcp, and rdma where it has that, with line feeds between

Flag 1: suspect. Flag 2: the row names a pool, of which only the depth is told. Flag 4: not admitted. Flag 8: its load
is a guess. Pools come after instances.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from kvbm.core.answers import (
    MAX_HASHES,
    MAX_INPUT_TOKENS,
    MAX_LABELS,
    MAX_LIMIT,
    MAX_PEERS,
    BlocksHeld,
    FindAnswer,
    InstanceHolding,
    LookupAnswer,
    PeerHolding,
    PoolHolding,
    PresenceAnswer,
    RankedInstance,
    RouteAnswer,
)
from kvbm.core.errors import LayoutError
from kvbm.core.ids import HASH_BYTES, NamespaceId, Tier
from kvbm.core.missed import missed_of, number_in
from kvbm.core.peer_address import UCX

CONTENT_TYPE = "application/vnd.kvbm.prompts"
LOOKUP, ROUTE, PRESENCE, FIND = 1, 2, 3, 4
KINDS = (LOOKUP, ROUTE, PRESENCE, FIND)
MOST_PROMPTS = 256
MOST_ROUTES = 64
_SHORT_ROUTES, _SHORT_PROMPTS = 4, 64
SUSPECT, POOL, REFUSED, GUESSED, NIXL = 1, 2, 4, 8, 16
_MAGIC = b"KVB1"
_QUESTIONS = struct.Struct("<4sBBHII16s")
_PROMPT = struct.Struct("<II")
_ANSWERS = struct.Struct("<4sB3xIf")
_ANSWER = struct.Struct("<IIHBx")
_HOLDING = struct.Struct("<6IBB")
_RANKED = struct.Struct("<6f3IBB")
_HELD = struct.Struct("<IBBB")
_PEER = struct.Struct("<IIIBBB")
_MOST_ASKER_BYTES = 16_384
_MOST_LABEL = 128  # characters
_WITH_TAIL = (PRESENCE, FIND)  # rows that begin with how many bytes follow the name
_ADDRESS = ("host", "unix", "tcp", "rdma")


class PromptBatch(NamedTuple):
    """Questions about several prompts of one namespace.

    Attributes:
        kind: LOOKUP, ROUTE, PRESENCE or FIND.
        limit: instances to name for each.
        prompts: of each its packed hashes, and how many tokens it has; of a find, the block from which on instances are
            asked for.
        asker: of a find: the instance that asks, and the labels of its place, outermost first.
    """

    kind: int
    limit: int
    namespace: NamespaceId
    prompts: Sequence[tuple[bytes, int]]
    asker: tuple[str, ...] = ()


def encode_batch(batch: PromptBatch) -> bytes:
    """The body of questions."""
    asker = "\n".join(batch.asker).encode()
    head = _QUESTIONS.pack(_MAGIC, batch.kind, 0, batch.limit, len(batch.prompts), len(asker), batch.namespace)
    counts = (_PROMPT.pack(len(hashes) // HASH_BYTES, tokens) for hashes, tokens in batch.prompts)
    return b"".join([head, *counts, *(hashes for hashes, _ in batch.prompts), asker])


def is_long(body: bytes | bytearray) -> bool:
    """Whether a body has so many questions that their answers take long; what is no body of questions does not."""
    if len(body) < _QUESTIONS.size:
        return False
    _, kind, _, _, count, _, _ = _QUESTIONS.unpack_from(body)
    return bool(count > (_SHORT_ROUTES if kind == ROUTE else _SHORT_PROMPTS))


def decode_batch(body: bytes | bytearray) -> PromptBatch:
    """The questions in a body. Raises LayoutError: it is none."""
    if len(body) < _QUESTIONS.size:
        raise LayoutError(f"{len(body)} bytes are no questions: a header has {_QUESTIONS.size}")
    magic, kind, zero, limit, count, asker_bytes, namespace = _QUESTIONS.unpack_from(body)
    most_asker = _MOST_ASKER_BYTES if kind == FIND else 0
    if magic != _MAGIC or kind not in KINDS or zero or asker_bytes > most_asker:
        raise LayoutError(f"a body of questions does not begin with {bytes(body[:16]).hex()}")
    most_named = MAX_PEERS if kind == FIND else MAX_LIMIT
    if not 1 <= limit <= most_named:
        raise LayoutError(f"limit is {limit}; give 1 to {most_named}")
    most = MOST_ROUTES if kind == ROUTE else MOST_PROMPTS
    if not 1 <= count <= most:
        raise LayoutError(f"{count} prompts; give 1 to {most}")
    at = _QUESTIONS.size + count * _PROMPT.size
    if len(body) < at:
        raise LayoutError(f"{len(body)} bytes, and the sizes of {count} prompts end at {at}")
    sizes = list(_PROMPT.iter_unpack(memoryview(body)[_QUESTIONS.size : at]))
    total = sum(blocks for blocks, _ in sizes)
    if total > MAX_HASHES:
        raise LayoutError(f"{total} hashes; at most {MAX_HASHES} are taken")
    if len(body) != at + total * HASH_BYTES + asker_bytes:
        raise LayoutError(f"{len(body)} bytes, and {total} hashes end at {at + total * HASH_BYTES}")
    prompts: list[tuple[bytes, int]] = []
    for blocks, tokens in sizes:
        if tokens > (MAX_HASHES if kind == FIND else MAX_INPUT_TOKENS) or (kind in (LOOKUP, PRESENCE) and tokens):
            raise LayoutError(f"a prompt of {tokens} tokens; give 0 to {MAX_INPUT_TOKENS}, and 0 where it is no route")
        end = at + blocks * HASH_BYTES
        prompts.append((bytes(body[at:end]), tokens))
        at = end
    return PromptBatch(kind, limit, NamespaceId(namespace), prompts, _asker(bytes(body[at:])))


def _asker(words: bytes) -> tuple[str, ...]:
    """Who asks. Raises LayoutError: nobody is called so."""
    if not words:
        return ()
    try:
        asker = tuple(words.decode().split("\n"))
    except UnicodeDecodeError:
        raise LayoutError("who asks is no text") from None
    if len(asker) > MAX_LABELS + 1 or any(len(word) > _MOST_LABEL for word in asker):
        raise LayoutError(
            f"who asks has a place of more than {MAX_LABELS} labels, or a label of more than {_MOST_LABEL} characters"
        )
    return asker


def answers_head(kind: int, count: int, view_age_s: float) -> bytes:
    """The beginning of a body of answers."""
    return _ANSWERS.pack(_MAGIC, kind, count, view_age_s)


def encode_lookup(answer: LookupAnswer) -> bytes:
    """The answer to one lookup."""
    rows = len(answer.instances) + len(answer.pools)
    parts = [_ANSWER.pack(answer.deepest, answer.more, rows, number_in(answer.missed))]
    for one in answer.instances:
        name = one.instance.encode()
        tiers = (one.tiers.get(tier.name, 0) for tier in Tier)
        parts += [_HOLDING.pack(one.depth, one.reach, *tiers, SUSPECT * one.suspect, len(name)), name]
    for pool in answer.pools:
        name = pool.pool.encode()[:255]
        parts += [_HOLDING.pack(pool.depth, 0, 0, 0, 0, 0, POOL, len(name)), name]
    return b"".join(parts)


def encode_presence(answer: PresenceAnswer) -> bytes:
    """The answer to one question of presence."""
    parts = [_ANSWER.pack(0, answer.more, len(answer.holders), number_in(answer.missed))]
    for one in answer.holders:
        name, held = one.name.encode()[:255], one.bits()
        flags = SUSPECT * one.suspect | POOL * (one.kind == "pool")
        parts += [_HELD.pack(len(held), Tier[one.tier], flags, len(name)), name, held]
    return b"".join(parts)


def encode_find(answer: FindAnswer) -> bytes:
    """The answer to one question of what can be read."""
    parts = [_ANSWER.pack(0, 0, len(answer.peers) + len(answer.pools), number_in(answer.missed))]
    for one in answer.peers:
        words = [one.lends.get(word, "") for word in _ADDRESS if word in one.lends or word != "rdma"]
        name, address = one.instance.encode(), "\n".join(words).encode()
        in_host = one.tiers.get(Tier.HOST.name, 0)
        flags = SUSPECT * one.suspect | NIXL * (one.lends.get("nixl") == UCX)  # who does not know it passes it over
        parts += [
            _PEER.pack(len(address), one.depth, in_host, min(one.distance, 255), flags, len(name)),
            name,
            address,
        ]
    for pool in answer.pools:
        name = pool.pool.encode()[:255]
        parts += [_PEER.pack(0, pool.depth, 0, 0, POOL, len(name)), name]
    return b"".join(parts)


def encode_route(answer: RouteAnswer) -> bytes:
    """The answer to one route."""
    parts = [_ANSWER.pack(0, answer.more, len(answer.ranked), number_in(answer.missed))]
    for one in answer.ranked:
        name = one.instance.encode()
        parts += [
            _RANKED.pack(
                one.cost_s,
                one.queueing_s,
                one.recompute_s,
                one.balance_s,
                one.fetch_s,
                one.ttft_s,
                one.depth,
                one.missing_tokens,
                one.fetch_blocks,
                SUSPECT * one.suspect | REFUSED * (not one.admitted) | GUESSED * (one.load_age_s != 0.0),
                len(name),
            ),
            name,
        ]
    return b"".join(parts)


def decode_lookups(body: bytes, asked: PromptBatch) -> list[LookupAnswer]:
    """The answers to lookups. Raises LayoutError: they are none to these questions."""
    age_s, parts = _parts(body, asked, LOOKUP, _HOLDING)
    found: list[LookupAnswer] = []
    for (hashes, _), (deepest, more, rows, why) in zip(asked.prompts, parts, strict=True):
        instances = [
            InstanceHolding(
                instance=name,
                depth=depth,
                reach=reach,
                suspect=bool(flags & SUSPECT),
                tiers={tier.name: blocks for tier, blocks in zip(Tier, by_tier, strict=True) if blocks},
            )
            for (depth, reach, *by_tier, flags, _), name, _ in rows
            if not flags & POOL
        ]
        pools = [PoolHolding(pool=name, depth=row[0]) for row, name, _ in rows if row[-2] & POOL]
        found.append(
            LookupAnswer(
                namespace=asked.namespace.hex(),
                blocks=len(hashes) // HASH_BYTES,
                deepest=deepest,
                instances=instances,
                pools=pools,
                excluded=[],
                view_age_s=age_s,
                more=more,
                missed=missed_of(why),
            )
        )
    return found


def decode_presences(body: bytes, asked: PromptBatch) -> list[PresenceAnswer]:
    """The answers to questions of presence. Raises LayoutError: they are none to these questions."""
    age_s, parts = _parts(body, asked, PRESENCE, _HELD)
    tiers = [tier.name for tier in Tier]
    found: list[PresenceAnswer] = []
    for (hashes, _), (_, more, rows, why) in zip(asked.prompts, parts, strict=True):
        blocks = len(hashes) // HASH_BYTES
        for (mask_bytes, tier, *_), name, _ in rows:
            if mask_bytes != -(-blocks // 8) or tier >= len(tiers):
                raise LayoutError(f"{name!r} has a mask of {mask_bytes} bytes for {blocks} blocks in tier {tier}")
        holders = [
            BlocksHeld(
                name=name,
                kind="pool" if flags & POOL else "instance",
                tier=tiers[tier],
                suspect=bool(flags & SUSPECT),
                held=mask.hex(),
            )
            for (_, tier, flags, _), name, mask in rows
        ]
        found.append(
            PresenceAnswer(
                namespace=asked.namespace.hex(),
                blocks=blocks,
                holders=holders,
                view_age_s=age_s,
                more=more,
                missed=missed_of(why),
            )
        )
    return found


def decode_finds(body: bytes, asked: PromptBatch) -> list[FindAnswer]:
    """The answers to questions of what can be read. Raises LayoutError: they are none to these questions."""
    age_s, parts = _parts(body, asked, FIND, _PEER)
    return [
        FindAnswer(
            namespace=asked.namespace.hex(),
            blocks=len(hashes) // HASH_BYTES,
            view_age_s=age_s,
            pools=[PoolHolding(pool=name, depth=row[1]) for row, name, _ in rows if row[4] & POOL],
            peers=[_peer(row, name, address) for row, name, address in rows if not row[4] & POOL],
            missed=missed_of(why),
        )
        for (hashes, _), (_, _, rows, why) in zip(asked.prompts, parts, strict=True)
    ]


def _peer(row: tuple[int, ...], name: str, address: bytes) -> PeerHolding:
    _, depth, in_host, distance, flags, _ = row
    try:
        words = address.decode().split("\n")
    except UnicodeDecodeError as error:
        raise LayoutError(f"these are no answers ({error})") from None
    if not len(_ADDRESS) - 1 <= len(words) <= len(_ADDRESS) or in_host > depth:
        raise LayoutError(f"{name!r} has an address of {len(words)} parts, and {in_host} of {depth} blocks in HOST")
    tiers = {Tier.HOST.name: in_host, Tier.NVME.name: depth - in_host}
    return PeerHolding(
        instance=name,
        depth=depth,
        tiers={tier: blocks for tier, blocks in tiers.items() if blocks},
        distance=distance,
        suspect=bool(flags & SUSPECT),
        lends={part: word for part, word in zip(_ADDRESS, words, strict=False) if word}
        | ({"nixl": UCX} if flags & NIXL else {}),
    )


def decode_routes(body: bytes, asked: PromptBatch) -> list[RouteAnswer]:
    """The answers to routes. Raises LayoutError: they are none to these questions."""
    age_s, parts = _parts(body, asked, ROUTE, _RANKED)
    found: list[RouteAnswer] = []
    for (hashes, _), (_, more, rows, why) in zip(asked.prompts, parts, strict=True):
        ranked = [
            RankedInstance(
                instance=name,
                cost_s=row[0],
                queueing_s=row[1],
                recompute_s=row[2],
                balance_s=row[3],
                fetch_s=row[4],
                ttft_s=row[5],
                depth=row[6],
                missing_tokens=row[7],
                fetch_blocks=row[8],
                suspect=bool(row[9] & SUSPECT),
                admitted=not row[9] & REFUSED,
                load_age_s=None if row[9] & GUESSED else 0.0,
            )
            for row, name, _ in rows
        ]
        if not ranked:
            raise LayoutError("an answer to a route names no instance")
        found.append(
            RouteAnswer(
                instance=ranked[0].instance,
                namespace=asked.namespace.hex(),
                blocks=len(hashes) // HASH_BYTES,
                ranked=ranked,
                view_age_s=age_s,
                more=more,
                admitted=ranked[0].admitted,
                missed=missed_of(why),
            )
        )
    return found


_Rows = list[tuple[tuple[int, ...], str, bytes]]


def _parts(
    body: bytes, asked: PromptBatch, kind: int, row: struct.Struct
) -> tuple[float, list[tuple[int, int, _Rows, int]]]:
    """The age of the view; of each prompt the largest depth, how many more, rows with their names and masks, and why
    nothing was found.
    """
    try:
        magic, told, count, age_s = _ANSWERS.unpack_from(body)
        if magic != _MAGIC or told != kind or count != len(asked.prompts):
            raise LayoutError(
                f"{count} answers of kind {told} are none to {len(asked.prompts)} questions of kind {kind}"
            )
        at, parts = _ANSWERS.size, []
        for _ in range(count):
            deepest, more, rows, why = _ANSWER.unpack_from(body, at)
            at += _ANSWER.size
            found: _Rows = []
            for _ in range(rows):
                values = row.unpack_from(body, at)
                named = at + row.size + values[-1]
                at, start = named + (values[0] if kind in _WITH_TAIL else 0), at + row.size
                if at > len(body):
                    raise LayoutError("the answers end within a row")
                found.append((values, body[start:named].decode(), body[named:at]))
            parts.append((deepest, more, found, why))
    except (struct.error, UnicodeDecodeError) as error:
        raise LayoutError(f"these are no answers ({error})") from None
    if at != len(body):
        raise LayoutError(f"{len(body) - at} bytes are behind the last answer")
    return age_s, parts
