"""Threads of onboards, some of which a device keeps."""

from __future__ import annotations

import threading

from kvbm.manager.workers import Workers
from tests.eventually import eventually

WAIT_S = 120.0


def test_threads_that_a_device_keeps_are_replaced_for_as_long_as_it_does() -> None:
    release = threading.Event()
    workers = Workers(2, "test")
    kept = [workers.submit(release.wait, WAIT_S) for _ in range(2)]
    waiting = workers.submit(lambda: 42)
    workers.replace_stuck()
    assert waiting.result(WAIT_S) == 42
    release.set()
    assert all(future.result(WAIT_S) for future in kept)
    workers.reclaim()
    assert [workers.submit(lambda n=n: n).result(WAIT_S) for n in range(4)] == [0, 1, 2, 3]  # type: ignore[misc]
    workers.shutdown()
    eventually(lambda: all(thread.name != "test" for thread in threading.enumerate()), "a thread stays")


def test_what_has_not_begun_can_be_taken_back() -> None:
    release = threading.Event()
    workers = Workers(1, "test")
    begun = threading.Event()

    def hold() -> None:
        begun.set()
        release.wait(WAIT_S)

    first = workers.submit(hold)
    assert begun.wait(WAIT_S)
    second = workers.submit(hold)
    assert second.cancel()
    assert not first.cancel()
    third = workers.submit(hold)
    workers.shutdown(cancel_futures=True)
    assert third.cancelled()
    release.set()
    first.result(WAIT_S)
