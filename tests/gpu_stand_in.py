"""A GPU that is not there: streams, events, priorities, asynchronous copies and pinned memory, as torch.cuda and CUDA's
driver show them.

Work is queued and runs later, when somebody asks whether an event has passed. Of all that may run, as streams and
events order it, the device picks by chance, so a copy that lacks an event runs before what it should have waited for,
and the bytes are wrong. A stream that is held runs nothing. "Device" memory is plain memory; what is registered,
launched and asked is counted.
"""

from __future__ import annotations

import ctypes
import itertools
import random
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

LOWEST, HIGHEST = 0, -5  # priorities of a real GPU's streams


class Gpu:
    """The device. Any thread.

    Attributes:
        calls: how often each function of CUDA was called, by name.
        launches: sizes of the pieces of each batch that a copy engine was given, and stream, in order.
        registered: address → bytes of pinned memory.
        refuses: what cudaHostRegister answers, when not 0.
    """

    def __init__(self, seed: int = 0) -> None:
        self.calls: Counter[str] = Counter()
        self.launches: list[tuple[Stream, list[int]]] = []
        self.registered: dict[int, int] = {}
        self.refuses = 0
        self.lock = threading.RLock()
        self.streams: dict[int, Stream] = {}
        self.default = Stream(self)
        self._chance = random.Random(seed)
        self._own = threading.local()

    # -- what the device does ------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Run one piece of work that may run; whether there was any."""
        with self.lock:
            ready = [stream for stream in self.streams.values() if stream.may_run()]
            if ready:
                self._chance.choice(ready).run_one()
            return bool(ready)

    def run(self) -> None:
        """Run all that may run."""
        while self.step():
            pass

    def current(self) -> Stream:
        """The calling thread's stream."""
        return getattr(self._own, "stream", self.default)

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """A thread's stream, for a while."""
        before, self._own.stream = self.current(), stream
        try:
            yield
        finally:
            self._own.stream = before

    # -- CUDA's driver -------------------------------------------------------------------------------------------------

    def cuMemcpyBatchAsync(
        self,
        targets: Any,
        sources: Any,
        sizes: Any,
        count: int,
        attrs: Any,
        indexes: Any,
        kinds: int,
        failed: Any,
        stream: int,
    ) -> int:
        """One piece of work for each piece: a copy engine promises no order within a batch.

        Of order "any" it has read by now.
        """
        self.calls["cuMemcpyBatchAsync"] += 1
        columns = [
            list(ctypes.cast(column, ctypes.POINTER(ctypes.c_uint64))[: count.value])
            for column in (targets, sources, sizes)
        ]
        with self.lock:
            self.launches.append((self.streams[stream.value], columns[2]))
            pieces = [_piece(*piece, attrs._obj.src_access_order == 3) for piece in zip(*columns, strict=True)]
            self._chance.shuffle(pieces)
            for piece in pieces:
                self.streams[stream.value].queue(piece)
        return 0

    def cuMemcpyAsync(self, target: Any, source: Any, size: Any, stream: Any) -> int:
        """As CUDA's."""
        self.calls["cuMemcpyAsync"] += 1
        with self.lock:
            self.launches.append((self.streams[stream.value], [size.value]))
            self.streams[stream.value].queue(lambda: ctypes.memmove(target.value, source.value, size.value))
        return 0

    def cuPointerGetAttribute(self, room: Any, attribute: int, address: Any) -> int:
        """Registered memory is of the host, and has the address it has."""
        self.calls["cuPointerGetAttribute"] += 1
        at = address.value
        if not any(begin <= at < begin + size for begin, size in self.registered.items()):
            return 1
        room._obj.value = 1 if attribute == 2 else at
        return 0

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:
        """As CUDA's."""
        self.calls["cuThreadExchangeStreamCaptureMode"] += 1
        return 0

    # -- torch.cuda ----------------------------------------------------------------------------------------------------

    def cudart(self) -> Gpu:
        """CUDA's runtime."""
        return self

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        """As CUDA's."""
        self.calls["cudaHostRegister"] += 1
        if not self.refuses:
            self.registered[address] = size
        return self.refuses

    def cudaHostUnregister(self, address: int) -> int:
        """As CUDA's."""
        del self.registered[address]
        return 0

    def install(self, patch: pytest.MonkeyPatch) -> Gpu:
        """Stand in for CUDA in this process."""
        import torch

        def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                self.calls[name] += 1
                return function(*args, **kwargs)

            return call

        class NewStream:
            """torch.cuda.Stream."""

            def __new__(cls, device: Any = None, priority: int = 0) -> Any:
                self.calls["Stream"] += 1
                return Stream(self, priority)

            @staticmethod
            def priority_range() -> tuple[int, int]:
                return LOWEST, HIGHEST

        for name, function in {
            "is_available": lambda: True,
            "init": lambda: None,
            "cudart": lambda: self,
            "set_device": lambda device: None,
            "current_stream": lambda device=None: self.current(),
            "stream": self.on,
            "device": lambda device: self.on(self.current()),
            "Event": lambda **kwargs: Event(self),
            "get_device_name": lambda device=None: "a GPU that stands in",
            "mem_get_info": lambda device=None: (1 << 40, 1 << 40),
        }.items():
            patch.setattr(torch.cuda, name, counted(name, function))
        patch.setattr(torch.cuda, "Stream", NewStream)
        load = ctypes.CDLL

        def library(name: Any, *args: Any, **kwargs: Any) -> Any:
            if name and "libcuda" in str(name):
                self.calls["CDLL"] += 1
                return self
            return load(name, *args, **kwargs)

        patch.setattr(ctypes, "CDLL", library)
        return self


def _piece(target: int, source: int, size: int, is_read_now: bool) -> Callable[[], None]:
    if is_read_now:
        read = ctypes.string_at(source, size)
        return lambda: ctypes.memmove(target, read, size)
    return lambda: ctypes.memmove(target, source, size)


_HANDLES = itertools.count(1)


class Stream:
    """As torch.cuda.Stream."""

    def __init__(self, gpu: Gpu, priority: int = LOWEST) -> None:
        self.gpu, self.priority = gpu, priority
        self.cuda_stream = next(_HANDLES)
        self.is_held = False
        self._work: deque[Callable[[], None] | Event] = deque()
        with gpu.lock:  # another thread may go through them
            gpu.streams[self.cuda_stream] = self

    def __len__(self) -> int:
        """Pieces of work that have not run."""
        return len(self._work)

    def __bool__(self) -> bool:
        return True

    def queue(self, work: Callable[[], None]) -> None:
        """Work behind all that the stream has."""
        with self.gpu.lock:
            self._work.append(work)

    def wait_event(self, event: Event) -> None:
        """What comes waits for the event."""
        with self.gpu.lock:
            if event.is_recorded:
                self._work.append(event)

    def wait_stream(self, other: Stream) -> None:
        """What comes waits for all that another stream has."""
        self.wait_event(other.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        """An event behind all that the stream has."""
        event = event or Event(self.gpu)
        event.record(self)
        return event

    def query(self) -> bool:
        """Whether all of it has run."""
        self.gpu.step()
        return not self._work

    def may_run(self) -> bool:
        """Whether the device may take the next piece."""
        if self.is_held or not self._work:
            return False
        head = self._work[0]
        return head.is_passed if isinstance(head, Event) else True

    def run_one(self) -> None:
        """Take it."""
        head = self._work.popleft()
        if not isinstance(head, Event):
            head()


class Event:
    """As torch.cuda.Event. Each record is a new place; waits keep the place they were given."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.is_recorded = False
        self.is_passed = False

    def record(self, stream: Stream | None = None) -> None:
        """Stand behind all that a stream has."""
        assert not self.is_recorded, "the stand-in has no events that are recorded twice"
        self.is_recorded = True
        (stream or self.gpu.current()).queue(self._pass)

    def query(self) -> bool:
        """Whether the device has passed it; it goes on a little meanwhile."""
        self.gpu.step()
        return self.is_passed

    def wait(self, stream: Stream | None = None) -> None:
        """What comes on a stream waits for it."""
        (stream or self.gpu.current()).wait_event(self)

    def synchronize(self) -> None:
        """Run until it is passed."""
        while not self.is_passed:
            assert self.gpu.step(), "an event that nothing can reach"

    def _pass(self) -> None:
        self.is_passed = True
