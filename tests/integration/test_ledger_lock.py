"""The native lock around a ledger, in the hands of Python's threads."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from kvbm._native import LedgerLock


def test_it_keeps_others_out_until_it_is_given_back():
    lock, counted = LedgerLock(), [0]

    def count() -> None:
        for _ in range(20_000):
            with lock:
                counted[0] += 1

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counted == [80_000]
    assert not lock.locked()


def test_who_waits_has_not_got_the_gil():
    lock, is_waiting, has_it = LedgerLock(), threading.Event(), threading.Event()

    def wait() -> None:
        is_waiting.set()
        with lock:
            has_it.set()

    with lock:
        thread = threading.Thread(target=wait)
        thread.start()
        assert is_waiting.wait(60)
        for _ in range(1000):
            assert not has_it.is_set()
            time.sleep(0)
    assert has_it.wait(60)
    thread.join()


def test_a_thread_that_takes_it_twice_is_told():
    lock = LedgerLock()
    with lock:
        with pytest.raises(RuntimeError, match="has the ledger's lock already"):
            lock.acquire()
        with pytest.raises(RuntimeError, match="has the ledger's lock already"), lock:
            pass
        assert lock.locked()
    assert not lock.locked()


def test_a_thread_cannot_give_back_what_another_has():
    lock = LedgerLock()
    with pytest.raises(RuntimeError, match="has not got"):
        lock.release()
    holder = threading.Thread(target=lock.acquire)
    holder.start()
    holder.join()
    with pytest.raises(RuntimeError, match="has not got"):
        lock.release()
    assert lock.locked()


def test_a_wait_has_an_end():
    lock = LedgerLock()
    holder = threading.Thread(target=lock.acquire)
    holder.start()
    holder.join()
    assert lock.acquire(False) is False
    assert lock.acquire(timeout=0.01) is False
    for timeout in (-2.0, float("nan")):
        with pytest.raises(ValueError, match="timeout"):
            lock.acquire(timeout=timeout)


def test_a_signal_is_handled_while_it_is_waited_for():
    lock, may_end = LedgerLock(), threading.Event()
    has_it = threading.Event()

    def hold() -> None:
        with lock:
            has_it.set()
            may_end.wait(60)

    def interrupt() -> None:
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGUSR1)

    def raise_it(*_: object) -> None:
        raise InterruptedError("a signal")

    def wait_while_it_comes() -> None:
        killer.start()
        lock.acquire()

    before = signal.signal(signal.SIGUSR1, raise_it)
    holder, killer = threading.Thread(target=hold), threading.Thread(target=interrupt)
    try:
        holder.start()
        assert has_it.wait(60)
        with pytest.raises(InterruptedError, match="a signal"):
            wait_while_it_comes()
    finally:
        may_end.set()
        holder.join()
        killer.join()
        signal.signal(signal.SIGUSR1, before)
    assert lock.acquire(timeout=60)
    lock.release()


def test_a_forked_child_makes_it_anew():
    lock = LedgerLock()
    holder = threading.Thread(target=lock.acquire)
    holder.start()
    holder.join()
    pid = os.fork()
    if not pid:
        lock._at_fork_reinit()
        os._exit(0 if not lock.locked() and lock.acquire(False) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert lock.locked()
