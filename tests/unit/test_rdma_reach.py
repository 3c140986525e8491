"""Which readers an owner tries to reach, where some cannot be."""

from __future__ import annotations

from kvbm.transport.rdma_reach import RdmaReach


def gid(number: int) -> bytes:
    return number.to_bytes(16, "big")


def test_who_could_not_be_reached_is_left_alone_for_longer_each_time_and_a_minute_at_most() -> None:
    reach, now_s, pauses = RdmaReach(), 0.0, []
    for _ in range(8):
        assert reach.may(now_s, gid(1))
        reach.failed(now_s, gid(1))
        assert not reach.may(now_s, gid(1)) and reach.may(now_s, gid(2))
        pauses.append(next(pause for pause in range(1, 100) if reach.may(now_s + pause, gid(1))))
        now_s += pauses[-1]
    assert pauses == [5, 10, 20, 40, 60, 60, 60, 60]


def test_a_stranger_of_many_addresses_is_tried_a_few_times_a_minute_and_who_was_reached_goes_on() -> None:
    reach, tries = RdmaReach(most_failures=3), 0
    reach.worked(gid(9))
    for number in range(100, 1100):
        now_s = (number - 100) * 0.12
        if reach.may(now_s, gid(number)):
            tries += 1
            reach.failed(now_s, gid(number))
        assert reach.may(now_s, gid(9))
    assert tries == 6, "in two minutes"
    assert not reach.may(119.0, gid(8)) and reach.may(200.0, gid(8))


def test_who_was_reached_and_is_no_more_is_as_new() -> None:
    reach = RdmaReach(most_failures=1)
    reach.worked(gid(1))
    reach.failed(0.0, gid(1))
    assert not reach.may(10.0, gid(1)) and reach.may(70.0, gid(1))
