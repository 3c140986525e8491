"""Threads of onboards, some of which a device keeps."""

from __future__ import annotations

import threading

import pytest
from structlog.testing import capture_logs

from kvbm.core.ids import Tier
from kvbm.manager.copies.workers import Workers
from kvbm.manager.recovery import salvage
from tests.eventually import eventually
from tests.managers import NAMESPACE, hashes_of, make_manager, serve

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


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of threads that the system does not start, once for each time they stand here."""
    names: list[str] = []
    start = threading.Thread.start

    def starting(thread: threading.Thread) -> None:
        if thread.name in names:
            names.remove(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", starting)
    return names


def test_a_call_that_is_refused_for_want_of_a_thread_is_never_made(refused: list[str]) -> None:
    workers, made = Workers(1, "test"), []
    refused.append("test")
    with capture_logs() as said, pytest.raises(RuntimeError, match="test: no thread can be started"):
        workers.submit(made.append, "refused")
    assert [line["event"] for line in said] == ["workers.not_started"]
    workers.submit(made.append, "taken").result(WAIT_S)
    assert made == ["taken"]
    workers.shutdown()


def test_a_call_waits_for_a_thread_that_works_where_no_other_can_be_started(refused: list[str]) -> None:
    release = threading.Event()
    workers = Workers(2, "test")
    first = workers.submit(release.wait, WAIT_S)
    refused.append("test")
    second = workers.submit(lambda: 42)
    release.set()
    assert first.result(WAIT_S) and second.result(WAIT_S) == 42
    workers.shutdown()


def test_a_stuck_thread_without_a_replacement_leaves_room_for_one(refused: list[str]) -> None:
    release = threading.Event()
    workers = Workers(1, "test")
    stuck = workers.submit(release.wait, WAIT_S)
    waiting = workers.submit(lambda: 1)
    refused.append("test")
    workers.replace_stuck()
    assert workers.submit(lambda: 2).result(WAIT_S) == 2  # one is started now, and comes to what has waited first
    assert waiting.result(WAIT_S) == 1
    release.set()
    assert stuck.result(WAIT_S)
    workers.shutdown()


def test_what_nvme_has_kept_is_read_once_there_is_a_thread(refused: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(salvage, "_LOOK_S", 0.001)
    one = salvage.Salvage.__new__(salvage.Salvage)
    one._closing = threading.Event()
    one._read = lambda slots: slots  # type: ignore[assignment, method-assign, return-value]
    refused += ["test", "test"]
    reader = Workers(1, "test")
    [reading] = one._begin(reader, [[1, 2]])
    assert reading.result(WAIT_S) == [1, 2] and not one._closing.is_set()
    one._closing.set()
    assert one._begin(reader, [[3]]) == []
    reader.shutdown()


@pytest.mark.bytes
def test_a_load_that_has_no_thread_is_a_miss_and_moves_no_bytes(refused: list[str]) -> None:
    """Of three loads the first has no thread, and the second starts one."""
    depth = 130
    manager = make_manager({Tier.HBM: depth, Tier.HOST: 2 * depth}, offload=(Tier.HOST,))
    serve(manager, 1, depth)
    assert manager.settle(WAIT_S)
    manager.evict(Tier.HBM, hashes_of(1, depth))
    refused.append("kvbm-onboard-test")
    assert manager.acquire(NAMESPACE.id, hashes_of(1, depth)).depth == 0
    assert not manager.stats().quarantined_slots and not manager.stats().failed_copies
    manager.evict(Tier.HBM, hashes_of(1, depth))
    serve(manager, 2, depth)
    assert manager.settle(WAIT_S)
    assert serve(manager, 1, depth).prefix.depth == depth
    manager.close()
