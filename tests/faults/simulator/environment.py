"""Puts stand-ins where production modules reach for threads, time, files, chance and NATS; takes them away again.

Production code has no hooks for the simulator. What it imports by name is replaced in its module, what it bound as a
default argument is replaced there.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import errno
import os
import random
import secrets
import sys
import time
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import structlog

import kvbm.assembly.lending
import kvbm.assembly.pools
import kvbm.assembly.services
import kvbm.catalog.index.plain_frames
import kvbm.catalog.service
import kvbm.core.codec
import kvbm.manager.owned_hbm
import kvbm.pools.nvme.hints
import kvbm.pools.nvme.pod
import kvbm.pools.nvme.pool
import kvbm.pools.nvme.stripes
import kvbm.reference.recorder
import kvbm.streams.journal.journal
import kvbm.streams.publisher.thread
from kvbm import assembly
from kvbm.catalog.index.cluster_index import ClusterIndex, PlainApplied
from kvbm.catalog.index.plain_frames import PlainRun
from kvbm.core.ids import InstanceId
from kvbm.streams import at_exit as leaving
from kvbm.streams.base import Position
from kvbm.streams.nats.stream import NatsStream
from tests.faults.simulator.blocks import PlainBlockIo
from tests.faults.simulator.disk import Os, open_file
from tests.faults.simulator.kernel import (
    INSTALLED,
    CoroutineRunner,
    Executor,
    Threading,
    Time,
    Violation,
    run_coroutine,
    wait_futures,
)
from tests.faults.simulator.peers import open_lending, open_peers
from tests.faults.simulator.server import SimStream

_JOURNAL_MODULES = ("disk", "journal", "reader", "repair", "segments", "writer")
_NVME_MODULES = ("hints", "pod", "pool", "stripes")
_NOBODY = InstanceId("nobody")
_DISK_MODULES = (
    "kvbm.files",
    *(f"kvbm.streams.journal.{name}" for name in _JOURNAL_MODULES),
    *(f"kvbm.pools.nvme.{name}" for name in _NVME_MODULES),
)


# By id of an index: where instances stand in it, while a run that was applied is not known yet.
APPLIED_AHEAD: dict[int, dict[InstanceId, Position]] = {}


async def _connect(url: str = "", timeout_s: float = 5.0, *args: Any, **kwargs: Any) -> SimStream:
    return await SimStream.connect_to(INSTALLED.world.server, timeout_s)  # type: ignore[attr-defined]


class _Nats:
    """Stands for the class `NatsStream`."""

    connect = staticmethod(_connect)


class _Erasures:
    """Stands for `ErasureLog`, of a cluster in which nothing was ever erased: it answers when the server does."""

    def __init__(self, stream: SimStream, cluster: str, timeout_s: float) -> None:
        self._stream, self._cluster, self._timeout_s = stream, cluster, timeout_s

    @classmethod
    async def open(cls, url: str, cluster: str, timeout_s: float, *_: object) -> _Erasures:
        return cls(await _connect(url, timeout_s), cluster, timeout_s)

    async def record(self) -> None:
        await self._stream.fence(self._cluster, _NOBODY, self._timeout_s)

    async def close(self) -> None:
        await self._stream.close()


def _open_blocks(fds: Sequence[int], slots: int, block_bytes: int, *how: object) -> PlainBlockIo:
    """Stands for the native engine. Raises OSError: there is no thread for it."""
    try:
        INSTALLED.world.current.shortages.check_thread("native")
    except RuntimeError as error:
        raise OSError(errno.EAGAIN, str(error)) from None
    return PlainBlockIo(Os(), fds, slots, block_bytes)


class _InThread:
    """Stands for `InThread`: a run is applied some time after it was handed over, and known some time after that."""

    def __init__(self, index: ClusterIndex, new_thread: object) -> None:
        self._index = index
        self._has_thread = False

    async def apply(self, run: PlainRun, take: Callable[[PlainApplied], None]) -> None:
        if not self._has_thread:
            try:
                INSTALLED.world.current.shortages.check_thread("native")
            except RuntimeError:
                take(self._index.apply_plain(run.messages, run.places))
                return
            self._has_thread = True
        chance = INSTALLED.world.chance  # type: ignore[attr-defined]
        applied: list[PlainApplied] = []
        try:
            if chance.random() < 0.5:
                await asyncio.sleep(chance.uniform(0.0, 0.02))
            applied.append(self._index.apply_plain(run.messages, run.places))
            APPLIED_AHEAD[id(self._index)] = {
                place.instance: Position(place.epoch, reached.offset)
                for place, reached in zip(run.places, applied[0].places, strict=True)
            }
            if chance.random() < 0.5:
                await asyncio.sleep(chance.uniform(0.0, 0.02))
        finally:
            APPLIED_AHEAD.pop(id(self._index), None)
            take(applied[0] if applied else self._index.apply_plain(run.messages, run.places))

    def close(self) -> None:
        return


def _urandom(size: int) -> bytes:
    return INSTALLED.world.chance.randbytes(size)  # type: ignore[attr-defined]


def _defaults(stand_ins: dict[Any, Any]) -> Iterator[tuple[Any, str, Any, Any]]:
    """(owner, name, old, new) of every function of kvbm that has a replaced object as a default."""
    seen: set[int] = set()
    for name, module in sorted(sys.modules.items()):
        if not name.startswith("kvbm"):
            continue
        for thing in list(vars(module).values()):
            functions = [thing]
            if isinstance(thing, type) and thing.__module__.startswith("kvbm"):
                functions = list(vars(thing).values())
            for given in functions:
                function = getattr(given, "__func__", given)
                if not isinstance(function, types.FunctionType) or id(function) in seen:
                    continue
                seen.add(id(function))
                old = function.__defaults__ or ()
                new = tuple(_replaced(stand_ins, value) for value in old)
                if any(a is not b for a, b in zip(old, new, strict=True)):
                    yield function, "__defaults__", old, new
                old_named = function.__kwdefaults__ or {}
                new_named = {key: _replaced(stand_ins, value) for key, value in old_named.items()}
                if any(old_named[key] is not new_named[key] for key in old_named):
                    yield function, "__kwdefaults__", old_named, new_named


def _replaced(stand_ins: dict[Any, Any], value: Any) -> Any:
    for old, new in stand_ins.items():
        if value is old or (callable(value) and value == old):
            return new
    return value


def _drop(logger: Any, method: str, event: dict[str, Any]) -> dict[str, Any]:
    told: Callable[[str, dict[str, Any]], None] | None = getattr(INSTALLED.world, "told", None)
    if told is not None:
        if event.pop("exc_info", None):
            event["why"] = traceback.format_exc(limit=-4)
        told(method, event)
    if event["event"] in ("copy.broke", "offload.broke"):
        raise Violation(f"a pool broke its promise never to raise: {event}")
    raise structlog.DropEvent


@contextmanager
def installed(*, logs: bool = False) -> Iterator[None]:
    """Stand-ins are in place; one world after another may run in them."""
    undo: list[tuple[Any, str, Any]] = []

    def put(owner: Any, name: str, value: Any) -> None:
        undo.append((owner, name, vars(owner).get(name, _MISSING)))
        setattr(owner, name, value)

    clock = Time()
    for name, module in sorted(sys.modules.items()):
        if not name.startswith("kvbm."):
            continue
        names = vars(module)
        if isinstance(names.get("threading"), types.ModuleType):
            put(module, "threading", Threading())
        if isinstance(names.get("time"), types.ModuleType):
            put(module, "time", clock)
        if names.get("ThreadPoolExecutor") is concurrent.futures.ThreadPoolExecutor:
            put(module, "ThreadPoolExecutor", Executor)
        if names.get("wait") is concurrent.futures.wait:
            put(module, "wait", wait_futures)
        if names.get("NatsStream") is NatsStream and name != "kvbm.streams.nats.stream":
            put(module, "NatsStream", _Nats)
    stand_ins = {
        time.monotonic: clock.monotonic,
        time.time: clock.time,
        time.time_ns: clock.time_ns,
        time.sleep: clock.sleep,
        NatsStream.connect: _connect,
    }
    for owner, name, old, new in list(_defaults(stand_ins)):
        undo.append((owner, name, old))
        setattr(owner, name, new)
    for name in (*_DISK_MODULES, "kvbm.pools.nvme.stripes"):
        if name not in sys.modules:
            continue
        put(sys.modules[name], "os", Os())
        put(sys.modules[name], "open", open_file)
    put(kvbm.assembly.pools, "OPEN_BLOCK_IO", _open_blocks)
    put(kvbm.assembly.services, "ErasureLog", _Erasures)
    put(kvbm.assembly.lending, "NEW_LEDGER_LOCK", Threading().Lock)
    put(kvbm.assembly.lending, "open_peers", open_peers)
    put(kvbm.assembly.lending, "open_lending", open_lending)
    put(kvbm.assembly.lending, "_LOOK_S", 0.1)  # runs are short: a fence is seen within them
    put(kvbm.catalog.index.plain_frames, "InThread", _InThread)
    put(leaving, "Thread", Threading().Thread)
    put(asyncio, "run", run_coroutine)
    put(asyncio, "Runner", CoroutineRunner)
    put(os, "urandom", _urandom)
    put(random, "_urandom", _urandom)
    put(kvbm.core.codec, "crc32c", assembly.NATIVE.crc32c)
    put(kvbm.reference.recorder, "encode_frame", assembly.NATIVE.encode_frame)
    old_log = structlog.get_config()
    level = 10 if logs else 50
    structlog.configure(
        processors=[_drop],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        cache_logger_on_first_use=False,
    )
    try:
        yield
    finally:
        structlog.configure(**old_log)
        for owner, name, value in reversed(undo):
            if value is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


_MISSING: Any = object()
_ = secrets
