"""Lanes of staging that threads wait for. Who gets which: tests/unit/test_offload_queue.py."""

from __future__ import annotations

import threading

from kvbm.manager.copies.staging import Staging

WAIT_S = 60.0


def test_a_lane_that_is_given_back_goes_to_who_waits() -> None:
    staging = Staging(8192, 4096)
    lanes = [staging.take(0.0, is_offload=False) for _ in range(2)]
    got: list[object] = []
    waiter = threading.Thread(target=lambda: got.append(staging.take(WAIT_S, is_offload=False)))
    waiter.start()
    assert lanes[0] is not None
    staging.give(lanes[0])
    waiter.join(WAIT_S)
    assert got and got[0] is not None
