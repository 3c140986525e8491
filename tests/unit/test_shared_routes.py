"""What catalogs tell each other of their routes: bounded, whole on the other side, and nothing of what is wrong with it
is believed.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from kvbm.catalog.routing.router import RoutingTask, SharedRoute
from kvbm.catalog.routing.shared_routes import (
    HASH_BYTES_PER_S,
    MOST_AGE_S,
    MOST_MESSAGE_BYTES,
    MOST_ROUTES,
    MOST_WAITING,
    SharedRoutes,
)
from kvbm.core.answers import MAX_HASHES, RankedInstance
from kvbm.core.ids import NamespaceId

SPACE = NamespaceId(b"n" * 16)
WIRE = ("caller", False, "i-1", 1000, 500, b"n" * 16, 1, 3, b"h" * 32, 0.002)


def hashes_of(blocks: int) -> bytes:
    return b"".join(number.to_bytes(16, "big") for number in range(blocks))


def best(depth: int = 0, missing: int = 0, fetch_blocks: int = 0) -> RankedInstance:
    return RankedInstance(
        instance="i-1",
        cost_s=1.0,
        queueing_s=0.0,
        recompute_s=1.0,
        balance_s=0.0,
        fetch_s=0.0,
        depth=depth,
        missing_tokens=missing,
        fetch_blocks=fetch_blocks,
        suspect=False,
        ttft_s=1.0,
        admitted=True,
    )


class Hearer:
    """A catalog that hears another."""

    def __init__(self, knows: bool = True) -> None:
        self.taken: list[tuple[float, SharedRoute]] = []
        self.shared = SharedRoutes(self._take)
        self._knows = knows

    def _take(self, now_s: float, route: SharedRoute) -> bool:
        if self._knows:
            self.taken.append((now_s, route))
        return self._knows


def teller() -> SharedRoutes:
    return SharedRoutes(lambda now_s, route: False)


def test_a_route_comes_whole_and_as_old_as_it_is() -> None:
    one, other = teller(), Hearer()
    task = RoutingTask(SPACE, hashes_of(4), 70, 16, caller="caller router", phase="decode")
    one.note(100.0, task, best(depth=1, missing=6))
    assert one.is_waiting.is_set()
    data, count = one.message(100.25)
    assert count == 1 and not one.is_waiting.is_set() and one.message(100.25) == (b"", 0)
    other.shared.hear(7.0, data)
    missing = hashes_of(4)[16:]
    expected = SharedRoute("caller router", True, "i-1", 70, 6, SPACE, 1, 4, missing)  # type: ignore[arg-type]
    assert other.taken == [(6.75, expected)]
    assert (other.shared.received, other.shared.refused) == (1, 0)


def test_what_is_fetched_from_a_pool_is_told_with_what_is_computed() -> None:
    one, other = teller(), Hearer()
    one.note(100.0, RoutingTask(SPACE, hashes_of(4), 64, 16), best(depth=3, missing=16, fetch_blocks=2))
    other.shared.hear(7.0, one.message(100.0)[0])
    assert other.taken[0][1].first == 1 and other.taken[0][1].hashes == hashes_of(4)[16:]


def test_what_is_told_is_bounded_in_bytes_and_then_load_alone_is_told() -> None:
    one, other = teller(), Hearer()
    task = RoutingTask(SPACE, hashes_of(MAX_HASHES), 70, 16)
    for _ in range(1000):
        one.note(100.0, task, best(missing=70))
    messages = []
    while one.is_waiting.is_set():
        messages.append(one.message(100.0)[0])
    assert max(map(len, messages)) < 1 << 20  # NATS takes no more
    assert sum(map(len, messages)) < HASH_BYTES_PER_S / 4 + 1000 * 100
    for data in messages:
        other.shared.hear(7.0, data)
    bare = [route for _, route in other.taken if not route.hashes]
    assert len(other.taken) == 1000 and {route.missing_tokens for _, route in other.taken} == {70}
    assert 900 < len(bare) == one.untold and {route.blocks for route in bare} == {0}
    one.note(110.0, task, best())
    assert len(one.message(110.0)[0]) > 1000  # time has passed


def test_a_message_has_so_many_routes_and_so_many_wait_at_most() -> None:
    one = teller()
    for _ in range(MOST_WAITING + 10):
        one.note(100.0, RoutingTask(SPACE, b"", 70, 16), best())
    assert one.untold == 10
    counts = []
    while one.is_waiting.is_set():
        data, count = one.message(100.0)
        counts.append(count)
        assert len(data) < MOST_MESSAGE_BYTES
    assert sum(counts) == MOST_WAITING and max(counts) == MOST_ROUTES


def test_an_old_route_is_told_nobody() -> None:
    one = teller()
    one.note(100.0, RoutingTask(SPACE, b"", 70, 16), best())
    assert one.message(100.0 + 2 * MOST_AGE_S) == (b"", 0)
    assert one.untold == 1 and not one.is_waiting.is_set()


def with_field(at: int, value: Any) -> tuple[Any, ...]:
    return (*WIRE[:at], value, *WIRE[at + 1 :])


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\xc1",
        b"\x92" * 100_000,
        msgspec.msgpack.encode([2, []]),
        msgspec.msgpack.encode([1]),
        msgspec.msgpack.encode([1, [WIRE] * (MOST_ROUTES + 1)]),
        *(
            msgspec.msgpack.encode([1, [WIRE, with_field(at, value)]])
            for at, value in [
                (0, "c" * 513),
                (0, 7),
                (0, b"\xff"),
                (1, 1),
                (2, ""),
                (2, "i" * 256),
                (3, -1),
                (3, 1 << 25),
                (3, 1 << 63),
                (3, math.nan),
                (4, -1),
                (4, 1 << 60),
                (5, b"n" * 15),
                (5, b"n" * 17),
                (6, -1),
                (6, MAX_HASHES + 1),
                (7, MAX_HASHES + 1),
                (8, "h" * 32),
                (8, None),
                (9, -1.0),
                (9, math.nan),
                (9, "0"),
            ]
        ),
    ],
)
def test_a_message_with_anything_wrong_is_refused_as_a_whole(message: bytes) -> None:
    other = Hearer()
    other.shared.hear(7.0, message)
    assert other.taken == [] and (other.shared.received, other.shared.refused) == (0, 1)


@pytest.mark.parametrize("age_s", [math.inf, 1e300, 2.0])
def test_no_route_is_older_than_a_second(age_s: float) -> None:
    other = Hearer()
    other.shared.hear(7.0, msgspec.msgpack.encode([1, [with_field(9, age_s)]]))
    assert [at_s for at_s, _ in other.taken] == [7.0 - MOST_AGE_S]


def test_a_route_that_the_router_does_not_take_counts_as_refused() -> None:
    other = Hearer(knows=False)
    other.shared.hear(7.0, msgspec.msgpack.encode([1, [WIRE, WIRE]]))
    assert (other.shared.received, other.shared.refused) == (0, 2)
