"""Threads that carry out loads. Nobody ever has to wait for them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import suppress
from typing import Any, TypeVar

from kvbm.safe_log import SafeLog

log = SafeLog()

_IDLE_S = 5.0  # a thread without work for so long ends; another comes when there is work

Result = TypeVar("Result")


class Workers(Executor):
    """An executor whose threads a device may keep for ever.

    Unlike those of `ThreadPoolExecutor` they do not hold up the end of the process. A stuck thread can be replaced, so
    a device that does not answer does not take the threads of those that do.

    Args:
        threads: that work at a time, beside those that are stuck.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._name, self._threads = name, threads
        self._room = threads  # threads that may still be started
        self._idle = 0
        self._queue: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._changed = threading.Condition()
        self._is_closed = self._lacks_threads = False

    def submit(self, fn: Callable[..., Result], /, *args: Any, **kwargs: Any) -> Future[Result]:
        """Have a call carried out.

        Raises: RuntimeError: shut down, or the system gives no thread and there is none that comes to it. The call is
            never made then.
        """
        future: Future[Result] = Future()
        with self._changed:
            if self._is_closed:
                raise RuntimeError("the threads have been shut down")
            # Before it is queued: whoever is told that it is not taken gives its slots away.
            self._provide_locked(len(self._queue) + 1)
            self._queue.append((future, lambda: fn(*args, **kwargs)))
        return future

    def replace_stuck(self) -> None:
        """A worker is stuck in a call whose request has timed out; allow one replacement thread.

        What waits goes on waiting where the system gives none.
        """
        with self._changed:
            self._room += 1
            with suppress(RuntimeError):
                self._provide_locked(len(self._queue))

    def reclaim(self) -> None:
        """A call that was stuck has ended; its replacement is one too many."""
        with self._changed:
            self._room -= 1

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take nothing new; threads end when nothing is left. Never waits."""
        with self._changed:
            self._is_closed = True
            if cancel_futures:
                for future, _ in self._queue:
                    if future.cancel():
                        future.set_running_or_notify_cancel()  # else whoever waits for it waits on
                self._queue.clear()
            self._changed.notify_all()

    def _provide_locked(self, waiting: int) -> None:
        """Wake or start a thread for so many calls.

        Raises: RuntimeError: nobody comes to them.
        """
        if self._idle >= waiting:
            self._changed.notify()
        elif self._room > 0:
            self._room -= 1
            try:
                threading.Thread(target=self._work, name=self._name, daemon=True).start()
            except (RuntimeError, MemoryError) as error:
                self._room += 1
                self._tell_locked(error)
                if self._room >= self._threads:  # all that there are, if any, are stuck
                    raise RuntimeError(f"{self._name}: no thread can be started ({error})") from error
            else:
                self._lacks_threads = False

    def _tell_locked(self, error: BaseException) -> None:
        """One warning until a thread can be started again."""
        if not self._lacks_threads:
            self._lacks_threads = True
            log.warning(
                "workers.not_started",
                threads=self._name,
                why=str(error),
                effect="what they would load is computed, or comes later",
                remedy="raise the limit of processes (ulimit -u, or the container's pids limit)",
            )

    def _work(self) -> None:
        while True:
            with self._changed:
                self._idle += 1
                self._changed.wait_for(lambda: self._queue or self._is_closed or self._room < 0, _IDLE_S)
                self._idle -= 1
                if not self._queue or self._room < 0:
                    self._room += 1
                    self._changed.notify()  # who was woken for work and goes passes it on
                    return
                future, call = self._queue.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call())
            except Exception as error:  # noqa: BLE001 - the future's, whoever asks for it
                future.set_exception(error)
            del future, call
