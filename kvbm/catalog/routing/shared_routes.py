"""Routes that the catalogs of a cluster tell each other, so that no two send to one idle instance: what is told, and
what is believed of it.

A message is MessagePack, an array: a version and up to `MOST_ROUTES` routes, each an array of what `SharedRoute` has
and of how long ago it was made, in seconds. Hashes are those of blocks that the instance did not have, as far as
routing looks at them; no token is told. What is told is bounded in routes and in bytes of hashes: a route beyond the
latter is told without, as load alone. Whoever may send such messages may send anything, so each number is held to what
a route of this catalog could have.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Annotated, Literal, NamedTuple

import msgspec
import numpy as np

from kvbm.catalog.routing.marks import marked_depths
from kvbm.catalog.routing.router import RoutingTask, SharedRoute
from kvbm.core.answers import MAX_HASHES, MAX_INPUT_TOKENS, RankedInstance
from kvbm.core.ids import HASH_BYTES, MAX_NAME_BYTES, InstanceId, NamespaceId
from kvbm.core.parts import ALL_PARTS, part_of

VERSION: Literal[1] = 1
MOST_ROUTES = 256  # of a message
MOST_WAITING = 4096  # routes that are not told yet; beyond them the oldest is told nobody
MOST_MESSAGE_BYTES = 512 << 10
HASH_BYTES_PER_S = 4 << 20  # and as many at once as in a quarter of a second
MOST_AGE_S = 1.0  # an older route is told nobody; one of others counts as so old
_MOST_CALLER = 512  # characters

_Blocks = Annotated[int, msgspec.Meta(ge=0, le=MAX_HASHES)]
_Tokens = Annotated[int, msgspec.Meta(ge=0, le=MAX_INPUT_TOKENS)]


class _Route(msgspec.Struct, frozen=True, array_like=True):
    caller: Annotated[str, msgspec.Meta(max_length=_MOST_CALLER)]
    is_decode: bool
    instance: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME_BYTES)]
    input_tokens: _Tokens
    missing_tokens: _Tokens
    namespace: Annotated[bytes, msgspec.Meta(min_length=HASH_BYTES, max_length=HASH_BYTES)]
    first: _Blocks
    blocks: _Blocks
    hashes: bytes
    age_s: Annotated[float, msgspec.Meta(ge=0.0)]


class _Message(msgspec.Struct, frozen=True, array_like=True):
    version: Literal[1]
    routes: Annotated[tuple[_Route, ...], msgspec.Meta(max_length=MOST_ROUTES)]


_decoder = msgspec.msgpack.Decoder(_Message)
_encode = msgspec.msgpack.Encoder().encode


class _Waiting(NamedTuple):
    at_s: float
    route: SharedRoute


class SharedRoutes:
    """What waits to be told, and what was heard. One asyncio loop; nothing here waits.

    Attributes:
        is_waiting: set while there is something to tell.
        told, untold: routes that were, and that could not be, or without their blocks.
        received, refused: routes of others, as they were counted or not.
    """

    def __init__(self, take: Callable[[float, SharedRoute], bool], parts: tuple[int, ...] = ALL_PARTS) -> None:
        """
        Args:
            take: remembers a route, made at a time, as an own one; see `Router.take`.
            parts: routes to instances in others are nobody's concern here.
        """
        self.is_waiting = asyncio.Event()
        self.told = self.untold = self.received = self.refused = 0
        self._take, self._parts = take, parts
        self._waiting: deque[_Waiting] = deque(maxlen=MOST_WAITING)
        self._hash_bytes_left, self._refilled_s = HASH_BYTES_PER_S / 4, 0.0

    def note(self, now_s: float, task: RoutingTask, best: RankedInstance) -> None:
        """A prompt was sent to an instance: the others are to know."""
        first = max(0, best.depth - best.fetch_blocks)  # what is fetched may come from a pool
        route = SharedRoute(
            task.caller,
            task.phase == "decode",
            InstanceId(best.instance),
            min(task.input_tokens, MAX_INPUT_TOKENS),
            best.missing_tokens,
            task.namespace,
        )
        hashes = self._hashes(now_s, first, task.hashes)
        if hashes:
            route = route._replace(first=first, blocks=len(task.hashes) // HASH_BYTES, hashes=hashes)
        self.untold += len(self._waiting) == MOST_WAITING
        self._waiting.append(_Waiting(now_s, route))
        self.is_waiting.set()

    def message(self, now_s: float) -> tuple[bytes, int]:
        """The next message, and of how many routes; none of 0 when nothing waits."""
        routes: list[_Route] = []
        size = 0
        while self._waiting and len(routes) < MOST_ROUTES and size < MOST_MESSAGE_BYTES:
            at_s, route = self._waiting.popleft()
            if now_s - at_s > MOST_AGE_S:
                self.untold += 1
                continue
            routes.append(_Route(*route, max(0.0, now_s - at_s)))
            size += len(route.hashes) + len(route.caller) + len(route.instance)
        if not self._waiting:
            self.is_waiting.clear()
        return (_encode(_Message(VERSION, tuple(routes))), len(routes)) if routes else (b"", 0)

    def hear(self, now_s: float, data: bytes) -> None:
        """Another catalog's message came: its routes count from here on.

        What is wrong with it costs nobody anything.
        """
        try:
            routes = _decoder.decode(data).routes
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            self.refused += 1
            return
        for told in routes:
            if part_of(told.instance) not in self._parts:
                continue
            route = SharedRoute(
                told.caller,
                told.is_decode,
                InstanceId(told.instance),
                told.input_tokens,
                told.missing_tokens,
                NamespaceId(told.namespace),
                told.first,
                told.blocks,
                told.hashes,
            )
            if self._take(now_s - min(told.age_s, MOST_AGE_S), route):
                self.received += 1
            else:
                self.refused += 1

    def _hashes(self, now_s: float, first: int, hashes: bytes) -> bytes:
        """Of a prompt, those that the others need; none when too many were told lately."""
        most = HASH_BYTES_PER_S / 4
        self._hash_bytes_left = min(most, self._hash_bytes_left + (now_s - self._refilled_s) * HASH_BYTES_PER_S)
        self._refilled_s = now_s
        depths = marked_depths(first, len(hashes) // HASH_BYTES)
        size = len(depths) * HASH_BYTES
        if size > self._hash_bytes_left:
            self.untold += 1
            return b""
        self._hash_bytes_left -= size
        return np.frombuffer(hashes, f"V{HASH_BYTES}")[depths - 1].tobytes() if size else b""
