"""Threads that carry out loads. Nobody ever has to wait for them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

_IDLE_S = 5.0  # a thread without work for so long ends; another comes when there is work

Result = TypeVar("Result")


class Workers(Executor):
    """An executor whose threads a device may keep for ever.

    Unlike those of `ThreadPoolExecutor` they do not hold up the end of the process. A stuck thread can be replaced, so a device that
    does not answer does not take the threads of those that do.

    Args:
        threads: that work at a time, beside those that are stuck.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._name = name
        self._room = threads  # threads that may still be started
        self._idle = 0
        self._queue: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._changed = threading.Condition()
        self._is_closed = False

    def submit(self, fn: Callable[..., Result], /, *args: Any, **kwargs: Any) -> Future[Result]:
        """Have a call carried out. Raises RuntimeError: shut down."""
        future: Future[Result] = Future()
        with self._changed:
            if self._is_closed:
                raise RuntimeError("the threads have been shut down")
            self._queue.append((future, lambda: fn(*args, **kwargs)))
            self._spawn()
        return future

    def replace_stuck(self) -> None:
        """A worker is stuck in a call whose request has timed out; allow one replacement thread."""
        with self._changed:
            self._room += 1
            self._spawn()

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

    def _spawn(self) -> None:
        """Wake or start a thread for what waits. Under the condition's lock."""
        if self._idle >= len(self._queue):
            self._changed.notify()
        elif self._room > 0:
            self._room -= 1
            threading.Thread(target=self._work, name=self._name, daemon=True).start()

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
