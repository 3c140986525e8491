"""A signal in the middle of a call: its handler closes the manager, or raises, and nothing hangs or stays pinned."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from kvbm.core.errors import LedgerError
from kvbm.core.ids import NO_PARENT, Tier
from kvbm.manager.base import BlockManager
from kvbm.manager.onboard import loads
from tests.eventually import eventually
from tests.managers import NAMESPACE, hashes_of, make_manager, serve
from tests.owning_engines import OwningEngine, opened
from tests.wrapped_pools import Gate

WAIT_S = 60.0


class Late(Exception):
    """What the handler of somebody's timer raises."""


@contextmanager
def handling(handler: Callable[..., object]) -> Iterator[None]:
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


def interrupting(call: Callable[..., Any]) -> Callable[..., Any]:
    """The call, with a signal just before the first of it."""
    signals = iter([signal.SIGUSR1])

    def interrupted(*args: Any, **named: Any) -> Any:
        for number in signals:
            signal.raise_signal(number)
        return call(*args, **named)

    return interrupted


def is_late(*_: object) -> None:
    raise Late


def join_closing() -> None:
    for thread in threading.enumerate():
        if thread.name == "kvbm-close":
            thread.join(WAIT_S)
            assert not thread.is_alive()


def check_nothing_is_held(manager: BlockManager) -> None:
    """No slot is anybody's, no copy under way, nobody waited for."""
    eventually(lambda: not manager.stats().copies_in_flight, "a copy does not end", state=manager.stats)
    stats = manager.stats()
    assert (stats.waiting_requests, stats.late_slots, stats.quarantined_slots) == (0, 0, 0)
    for counts in stats.pools.values():
        assert (counts.allocated, counts.free + counts.held, counts.evictable) == (0, counts.slots, counts.held)


@pytest.mark.parametrize(
    "where",
    [
        "wait",
        "end_waiting_locked",
        "submit",
        "plan_locked",
        "give_up_locked",
        "collect_locked",
        "count_locked",
        "plan_remote",
    ],
)
def test_an_acquire_that_a_handler_ends_pins_nothing(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(Tier.HOST, "read")
    with make_manager({Tier.HBM: 64, Tier.HOST: 256}, wrap=gate, offload=(Tier.HOST,)) as manager:
        serve(manager, 1, 50)
        assert manager.settle(WAIT_S)
        manager.evict(Tier.HBM, hashes_of(1, 50, start=16))
        gate.close()
        whole = loads if where == "wait" else manager._executor if where == "submit" else manager._loads
        with handling(is_late), monkeypatch.context() as patch:
            patch.setattr(whole, where, interrupting(getattr(whole, where)))
            with pytest.raises(Late):
                manager.acquire(NAMESPACE.id, hashes_of(1, 50), None if where == "wait" else 0.0)
        gate.opened.set()
        assert manager.settle(WAIT_S)
        check_nothing_is_held(manager)
        assert serve(manager, 1, 50).prefix.depth == 50  # whole, with its bytes
        check_nothing_is_held(manager)


@pytest.mark.parametrize("where", ["submit", "plan_locked", "recorded"])
def test_an_acquire_that_has_only_begun_pins_nothing_either(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path) as manager:
        one = OwningEngine(manager)
        one.store(1, 6)
        one.empty_host()
        one.store(1, 2)
        whole = {"submit": manager._executor, "plan_locked": manager._loads, "recorded": manager._stream}[where]
        with handling(is_late), monkeypatch.context() as patch:
            patch.setattr(whole, where, interrupting(getattr(whole, where)))
            with pytest.raises(Late):
                manager.begin_acquire(NAMESPACE.id, hashes_of(1, 6))
        assert manager.settle(WAIT_S)
        check_nothing_is_held(manager)
        assert one.acquired(1, 6).depth == 6


@pytest.mark.parametrize("where", ["arrived_locked", "end_unended", "end_run"])
def test_a_store_that_an_exception_ends_anywhere_holds_nothing_once_it_is_ended_again(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path, pools__nvme__slots=0) as manager:
        one = OwningEngine(manager)
        one.compute(1, 4)
        store = one.begin_store(1, 4)
        assert store is not None
        checksums = one.fill(store)
        with handling(is_late), monkeypatch.context() as patch:
            patch.setattr(manager._copies, where, interrupting(getattr(manager._copies, where)))
            with pytest.raises(Late):
                manager.end_store(store, [True] * 4, checksums)
        with suppress(LedgerError):  # where it came early enough, the first call has ended all
            manager.end_store(store, [True] * 4, checksums)
        assert not (manager._copies.running or manager._copies.open or manager._copies.stores)
        check_nothing_is_held(manager)
        with pytest.raises(LedgerError, match="it ends once"):
            manager.end_store(store, [True] * 4, checksums)
        assert one.hits(1, 4) == ({} if where == "arrived_locked" else {Tier.HOST: 4})


def test_a_handler_may_close_a_manager_whose_lock_the_interrupted_call_has(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = make_manager({Tier.HBM: 8})
    slots = manager.allocate(4)
    assert slots is not None
    with handling(lambda *_: manager.close()), monkeypatch.context() as patch:
        patch.setattr(manager._offloader, "offer", interrupting(manager._offloader.offer))  # under the lock
        assert manager.create(NAMESPACE.id, NO_PARENT, 0, hashes_of(1, 4), slots) == slots
    join_closing()
    with pytest.raises(LedgerError, match="closed"):
        manager.allocate(1)
    assert manager.durable() == manager.applied()  # with its end


def test_a_handler_that_closes_and_leaves_ends_the_call_and_the_manager(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(Tier.HOST, "read")
    manager = make_manager({Tier.HBM: 8, Tier.HOST: 8}, wrap=gate, offload=(Tier.HOST,))
    serve(manager, 1, 4)
    assert manager.settle(WAIT_S)
    manager.evict(Tier.HBM, hashes_of(1, 4, start=2))
    gate.close()

    def leave(*_: object) -> None:
        manager.close()
        raise SystemExit(0)

    with handling(leave), monkeypatch.context() as patch:
        patch.setattr(loads, "wait", interrupting(loads.wait))
        with pytest.raises(SystemExit):
            manager.acquire(NAMESPACE.id, hashes_of(1, 4))
    gate.opened.set()
    join_closing()
    with pytest.raises(LedgerError, match="closed"):
        manager.allocate(1)


def test_a_handler_between_calls_closes_at_once() -> None:
    manager = make_manager({Tier.HBM: 8})
    with handling(lambda *_: manager.close()):
        signal.raise_signal(signal.SIGUSR1)
        with pytest.raises(LedgerError, match="closed"):
            manager.allocate(1)


def test_where_no_thread_starts_the_end_of_the_interpreter_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = make_manager({Tier.HBM: 8})

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with handling(lambda *_: manager.close()), monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        patch.setattr(manager._ledger, "allocate", interrupting(manager._ledger.allocate))
        assert manager.allocate(1) == [0]
    manager.close()
    with pytest.raises(LedgerError, match="closed"):
        manager.allocate(1)
