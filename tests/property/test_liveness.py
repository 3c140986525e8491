"""Heartbeats that only go on are taken by the short way as `Liveness.step` would take them, after whatever has
happened.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvbm.catalog.members.liveness import HeartbeatReceived, Input, Liveness, LivenessTicked, OwnPulse, StreamProgress
from kvbm.core.ids import Epoch, InstanceId, NamespaceId, Offset
from kvbm.streams.base import Heartbeat

NAMES = [InstanceId(name) for name in "abcdef"]
RUNS = ["", "x", "y"]


def drawn(rng: random.Random, sent: int) -> Input:
    """Anything that may happen; mostly heartbeats that go on."""
    kind, name = rng.random(), rng.choice(NAMES)
    if kind < 0.8:
        is_odd = rng.random() < 0.03
        return HeartbeatReceived(
            Heartbeat(
                instance=name,
                cluster="c",
                epoch=Epoch(rng.choice([1, 2, 3]) if is_odd else 2),
                published=Offset(sent),
                wall_time_ns=sent - rng.randrange(2),
                run=rng.choice(RUNS) if is_odd else "x",
                stopping=is_odd and rng.random() < 0.3,
                namespaces=(NamespaceId(b"n" * 16),) if rng.random() < 0.9 else (),
            )
        )
    if kind < 0.85:
        epoch = Epoch(rng.choice([1, 2, 2, 2, 2, 2, 3]))
        return StreamProgress(
            name, epoch, rng.random() < 0.03, rng.choice(RUNS), int(rng.random() < 0.05), rng.random() < 0.03
        )
    return OwnPulse() if kind < 0.9 else LivenessTicked()


def seen(liveness: Liveness) -> Any:
    """All that a liveness knows, and in which order it waits."""
    members = {
        name: [getattr(member, slot) for slot in type(member).__slots__] for name, member in liveness._members.items()
    }
    rest = {name: value for name, value in vars(liveness).items() if name != "_members"}
    return (
        members,
        rest,
        [list(known) for known in (liveness._present, liveness._live, liveness._waited, liveness._kept)],
    )


@pytest.mark.parametrize("seed", range(60))
def test_a_heartbeat_that_only_goes_on_is_taken_by_the_short_way_as_by_the_long_one(seed: int) -> None:
    rng = random.Random(seed)
    short, long = Liveness(4.0), Liveness(4.0)
    now_s, renewed = 0.0, 0
    for sent in range(1, 500):
        now_s += rng.choice([0.0, 0.01, 0.1, 0.1, 0.5, 3.0 if rng.random() < 0.1 else 0.2])
        what = drawn(rng, sent)
        expected = long.step(now_s, what)
        if isinstance(what, HeartbeatReceived) and short.renew(now_s, what.heartbeat):
            renewed += 1
            assert expected == []
        else:
            assert short.step(now_s, what) == expected
        assert seen(short) == seen(long)
        if rng.random() < 0.02:
            name = rng.choice(NAMES)
            short.forget(name)
            long.forget(name)
    assert renewed
