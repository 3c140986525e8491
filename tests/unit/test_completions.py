"""Waiting for completions where the device is gone: the completion queue is a stand-in, what is waited on a real
descriptor.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from kvbm.core.errors import VerbsError
from kvbm.verbs.completions import Completions

_LONG_S = 60.0
_MOST_LOOKS = 1000


class Queue:
    """A completion queue with nothing in it, which is not looked at for ever."""

    looks = 0

    def poll(self, num_entries: int) -> tuple[int, list[object]]:
        self.looks += 1
        assert self.looks < _MOST_LOOKS, "it looks again and again"
        return 0, []

    def req_notify(self) -> None: ...
    def ack_events(self, count: int) -> None: ...


class Channel:
    def get_cq_event(self, queue: Queue) -> None: ...


@pytest.fixture
def ends() -> Iterator[list[int]]:
    """Of a pipe; what the test has closed it takes out."""
    ends = list(os.pipe())
    yield ends
    for end in ends:
        os.close(end)


def completions(monkeypatch: pytest.MonkeyPatch, descriptor: int) -> Completions:
    verbs = SimpleNamespace(
        cq=SimpleNamespace(CQ=lambda *_: Queue()), enums=SimpleNamespace(IBV_WC_SUCCESS=0), error=RuntimeError
    )
    device: Any = SimpleNamespace(verbs=verbs, name="rxe9", context=None)
    monkeypatch.setattr("kvbm.verbs.completions._new_channel", lambda _: (Channel(), descriptor))
    return Completions(device, 4)


def test_a_device_that_is_removed_under_a_read_ends_it(monkeypatch: pytest.MonkeyPatch, ends: list[int]) -> None:
    os.close(
        ends.pop()
    )  # its reader sees a hang-up and nothing to read, as on an event channel of a device that was removed
    with pytest.raises(VerbsError, match="rxe9: the device is gone"):
        completions(monkeypatch, ends[0]).take(time.monotonic() + _LONG_S)


def test_events_without_completions_do_not_last_longer_than_the_deadline(
    monkeypatch: pytest.MonkeyPatch, ends: list[int]
) -> None:
    os.write(ends[1], b"x")  # is never taken
    assert completions(monkeypatch, ends[0]).take(time.monotonic()) == []
