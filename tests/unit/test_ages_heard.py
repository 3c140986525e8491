"""What instances tell of their blocks' ages, added up by a catalog."""

from __future__ import annotations

from kvbm.catalog.members.ages_heard import AgesHeard
from kvbm.catalog.members.liveness import LastHeartbeat
from kvbm.core.ages import TierAges
from kvbm.core.ids import Epoch, InstanceId, Offset
from kvbm.streams.base import Heartbeat
from kvbm.streams.pulse_words import encoded_heartbeat, heartbeat_of

ONE, TWO = InstanceId("one"), InstanceId("two")
ZEROS = (0,) * 9


def counts(evicted: int) -> tuple[TierAges, ...]:
    return (TierAges(), TierAges(ZEROS, (evicted, *ZEROS[1:]), 0, 7 * evicted, evicted, 0), TierAges())


def beat(instance: InstanceId, ages: tuple[TierAges, ...], run: str = "a") -> LastHeartbeat:
    sent = Heartbeat(
        instance=instance, cluster="c", epoch=Epoch(1), published=Offset(0), wall_time_ns=0, run=run, ages=ages
    )
    data, why = encoded_heartbeat(sent)
    assert not why
    return LastHeartbeat(heartbeat_of(data), 0.0)


def host_of(heard: AgesHeard) -> tuple[int, int, int]:
    host = heard.counted()[1]
    return sum(host.evicted), host.evicted_s, host.reused


def test_what_has_grown_between_heartbeats_counts_once() -> None:
    heard = AgesHeard()
    for instance, evicted, counted in (
        (ONE, 100, 0),
        (ONE, 100, 0),
        (ONE, 103, 3),
        (TWO, 50, 3),
        (TWO, 51, 4),
        (ONE, 104, 5),
    ):
        heard.hear(instance, beat(instance, counts(evicted)))
        assert host_of(heard) == (counted, 7 * counted, counted)
    heard.hear(ONE, beat(ONE, counts(2), run="b"))  # it has begun again, and may be long at it
    assert host_of(heard)[0] == 5
    heard.hear(ONE, beat(ONE, counts(4), run="b"))
    assert host_of(heard)[0] == 7
    heard.forget(ONE)
    heard.hear(ONE, beat(ONE, counts(90), run="b"))
    assert host_of(heard)[0] == 7


def test_what_is_no_count_counts_nothing() -> None:
    heard = AgesHeard()
    heard.hear(ONE, beat(ONE, counts(5)))
    for ages in ((), counts(9)[:2], (TierAges((1,), (2,)),) * 3, counts(3), counts(-(1 << 40))):
        heard.hear(ONE, beat(ONE, ages))
    assert host_of(heard)[0] == 0
    heard.hear(TWO, beat(TWO, counts(0)))
    heard.hear(TWO, beat(TWO, counts(1 << 60)))
    assert host_of(heard)[0] == 1 << 50
