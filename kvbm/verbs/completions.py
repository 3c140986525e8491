"""Completions of a queue pair's work, waited for without the GIL.

pyverbs keeps the GIL in every call, also in the one that waits for an event. So the wait is a `poll` on the descriptor
of the completion channel, and pyverbs is called only for what is there already.
"""

from __future__ import annotations

import math
import os
import select
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from kvbm.core.errors import VerbsError
from kvbm.verbs.device import Device

_DESCRIPTORS = Path("/proc/self/fd")
_EVENTS = "anon_inode:[infinibandevent]"
_MAKING = threading.Lock()
_GONE = select.POLLHUP | select.POLLERR | select.POLLNVAL | select.POLLRDHUP


class Completion(NamedTuple):
    """One request that is done.

    Attributes:
        request: the number it was posted with.
        trouble: what went wrong, empty: it is done well.
    """

    request: int
    trouble: str


class Completions:
    """A completion queue with a channel of its own. One thread at a time."""

    def __init__(self, device: Device, capacity: int) -> None:
        """Make room for `capacity` completions. Raises VerbsError: the device refuses."""
        self._verbs = device.verbs
        self._name, self._capacity = device.name, capacity
        try:
            self._channel, self._fd = _new_channel(device)
            self.queue = self._verbs.cq.CQ(device.context, capacity, None, self._channel, 0)
        except self._verbs.error as error:
            raise VerbsError(f"{device.name}: no completion queue of {capacity}: {error}") from error
        self._waiting = select.poll()
        self._waiting.register(self._fd, select.POLLIN)

    def take(self, until_s: float, also: int = -1) -> list[Completion]:
        """What is done, as soon as anything is.

        Empty: nothing was until then (of `time.monotonic`), or the other end is gone.

        Args:
            also: descriptor of a socket; that its other end hangs up ends the wait.
        Raises: VerbsError: the device failed.
        """
        try:
            found = self._polled()
            while not found:
                self.queue.req_notify()  # then look again, for what came in between raises no event
                found = self._polled()
                if found or not self._wait(until_s, also):
                    break
                found = self._polled()
                if time.monotonic() >= until_s:
                    break  # however often something is said to be there
        except (self._verbs.error, OSError) as error:
            raise VerbsError(f"completions cannot be read: {error}") from error
        return found

    def close(self) -> None:
        """Give it back. Idempotent; its queue pairs are closed before. Raises VerbsError: it is still in use."""
        try:
            self.queue.close()
            self._channel.close()
        except self._verbs.error as error:
            raise VerbsError(f"the completion queue is still in use: {error}") from error

    def _polled(self) -> list[Completion]:
        success = self._verbs.enums.IBV_WC_SUCCESS
        _, done = self.queue.poll(num_entries=self._capacity)
        return [
            Completion(int(one.wr_id), "" if one.status == success else self._words(int(one.status))) for one in done
        ]

    def _wait(self, until_s: float, also: int) -> bool:
        """Wait for an event, and take it.

        False: there was none in time, or the other end is gone. Raises VerbsError: the device is.
        """
        if also >= 0:
            self._waiting.register(also, select.POLLRDHUP)
        try:
            left_ms = math.ceil(max(0.0, until_s - time.monotonic()) * 1000)
            ready = dict(self._waiting.poll(left_ms))
        finally:
            if also >= 0:
                self._waiting.unregister(also)
        events = ready.get(self._fd, 0)
        if events & select.POLLIN:
            self._channel.get_cq_event(self.queue)
            self.queue.ack_events(1)
            return True
        if events:
            raise VerbsError(f"{self._name}: the device is gone, or was reset")
        return bool(ready) and not ready.get(also, 0) & _GONE

    def _words(self, status: int) -> str:
        names: dict[int, str] = {
            int(value): name.removeprefix("IBV_WC_").lower().replace("_", " ")
            for name, value in vars(self._verbs.enums).items()
            if name.startswith("IBV_WC_") and name.endswith(("ERR", "ERROR"))
        }
        return names.get(status, f"status {status}")


def _new_channel(device: Device) -> tuple[Any, int]:
    """A channel and its descriptor, which pyverbs keeps to itself: it is the one that is there since."""
    with _MAKING:
        before = _event_descriptors()
        channel = device.verbs.cq.CompChannel(device.context)
        new = _event_descriptors() - before
    if len(new) != 1:
        channel.close()
        raise VerbsError(
            f"{device.name}: the descriptor of a completion channel is not to be told from {len(new)} new ones"
        )
    (descriptor,) = new
    os.set_blocking(descriptor, False)
    return channel, descriptor


def _event_descriptors() -> set[int]:
    found = set()
    for path in _DESCRIPTORS.iterdir():
        with suppress(OSError):
            if os.readlink(path) == _EVENTS:
                found.add(int(path.name))
    return found
