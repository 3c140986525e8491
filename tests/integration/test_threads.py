"""A system that gives no more threads or processes (`ulimit -u`, a container's pids limit): whatever cannot be started
leaves nothing half open.
"""

from __future__ import annotations

import asyncio
import errno
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from kvbm.assembly import open_manager
from kvbm.assembly.pools import open_objects
from kvbm.assembly.start import OnStream, ask_stream
from kvbm.config import load_settings
from kvbm.core.answers import ReadyAnswer
from kvbm.core.errors import CatalogError
from kvbm.core.ids import Epoch, InstanceId
from kvbm.erasure.record import Record
from kvbm.locate.http import CatalogClient
from kvbm.locate.parts import PartedCatalog
from kvbm.manager.owned_hbm import Manager
from kvbm.pools.hbm.copy_queue import ThreadedQueue
from kvbm.pools.stores.base import Get, Refusal
from kvbm.pools.stores.redis import RedisStore
from kvbm.pools.stores.waiting import Silent, within
from kvbm.streams.base import Fence
from kvbm.streams.child import spawn
from kvbm.streams.nats.credentials import Credentials
from kvbm.transport.tcp import looked_up
from tests.eventually import WAIT_S, eventually
from tests.extras import needed
from tests.managers import BLOCK_BYTES, NAMESPACE, serve

redis = needed("redis", "redis")


class Refusing:
    """Starts of threads, of which one is refused.

    Attributes:
        at: which one, from 0; each later one too where `lasts`.
        asked: starts so far.
    """

    def __init__(self, at: int, lasts: bool = False) -> None:
        self.at, self.lasts, self.asked = at, lasts, 0
        self._start = threading.Thread.start

    def patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(threading.Thread, "start", lambda thread: self._starting(thread))

    def _starting(self, thread: threading.Thread) -> None:
        number, self.asked = self.asked, self.asked + 1
        if number == self.at or (self.lasts and number > self.at):
            raise RuntimeError("can't start new thread")
        self._start(thread)


class HostCopies:
    """`BlockingCopies` of nothing."""

    def gather(self, slots: np.ndarray, rows: np.ndarray, at: np.ndarray | None) -> np.ndarray:
        return np.zeros(len(slots), dtype=np.uint32)

    def scatter(self, slots: np.ndarray, rows: np.ndarray, at: np.ndarray | None) -> None:
        return


@pytest.fixture
def ours() -> Callable[[], list[str]]:
    """What gives the names of our threads that were not there when the test began: servers of the session have some."""
    before = set(threading.enumerate())
    return lambda: [
        thread.name for thread in threading.enumerate() if thread.name.startswith("kvbm-") and thread not in before
    ]


def opened(folder: Path, **more: Any) -> Manager:
    """One with whatever starts threads: a journal, NVME in a pod's folder, loans and objects."""
    flags = {
        "instance.data_dir": str(folder / "data"),
        "nats.enabled": False,
        "pools.hbm.device": "cpu",
        "pools.hbm.slots": 16,
        "pools.host.slots": 16,
        "pools.nvme.slots": 16,
        "pools.nvme.folder": str(folder / "pod"),
        "transport.listen": "host",
    }
    return open_manager(load_settings(flags=flags | more), [NAMESPACE], BLOCK_BYTES)


def starts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many threads an open starts in this process."""
    none = Refusing(-1)
    with monkeypatch.context() as patched:
        none.patch(patched)
        opened(folder).close()
    return none.asked


def test_a_manager_that_gets_no_thread_leaves_nothing_open(
    tmp_path: Path, ours: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pod").mkdir()
    count = starts(tmp_path, monkeypatch)
    assert count >= 5
    for at in range(count):
        with monkeypatch.context() as patched:
            Refusing(at).patch(patched)
            with pytest.raises(RuntimeError, match="can't start new thread"):
                opened(tmp_path)
        eventually(lambda: not ours(), "a thread stays", state=ours)
    with opened(tmp_path) as manager:  # its files are nobody's any more
        serve(manager, 1, 4)


@pytest.mark.parametrize("at", range(3))
def test_a_queue_of_copies_that_lacks_a_thread_ends_the_others(
    at: int, ours: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    Refusing(at).patch(monkeypatch)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        ThreadedQueue(HostCopies(), 4, BLOCK_BYTES)
    eventually(lambda: not ours(), "a thread stays", state=ours)


def test_what_may_be_late_is_then_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    Refusing(0, lasts=True).patch(monkeypatch)
    assert looked_up("localhost", 1.0) == ""
    answer = within(1.0, lambda: 1)
    assert isinstance(answer, Silent) and isinstance(answer.error, RuntimeError)
    with pytest.raises(OSError, match="can't start new thread") as caught:
        spawn([sys.executable], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    assert caught.value.errno == errno.EAGAIN


class ToldStream:
    """A stream that is found by its name, in a thread of the loop's, and knows of an epoch."""

    @staticmethod
    async def connect(*_: object, **more: object) -> ToldStream:
        await asyncio.get_running_loop().getaddrinfo("localhost", 4222)
        return ToldStream()

    @staticmethod
    async def open(*_: object) -> ToldStream:
        return ToldStream()

    async def tail(self, *_: object) -> None:
        return

    async def fence(self, *_: object) -> Fence:
        return Fence(Epoch(7), "run", 1)

    async def record(self) -> None:
        return

    async def close(self) -> None:
        return


@pytest.mark.parametrize(
    ("at", "told"), [(1, OnStream()), (2, OnStream(Epoch(7), Record())), (-1, OnStream(Epoch(7), Record()))]
)
def test_a_start_that_lacks_a_thread_to_ask_its_stream_says_so(
    at: int, told: OnStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the three, one asks, one looks up the name, one ends that."""
    for name in ("start.NatsStream", "services.ErasureLog"):
        monkeypatch.setattr(f"kvbm.assembly.{name}", ToldStream)
    settings = load_settings(flags={"nats.timeout_s": WAIT_S})
    Refusing(at).patch(monkeypatch)
    with capture_logs() as logs:
        assert ask_stream(settings, InstanceId("a"), "nats://localhost:4222", Credentials()) == told
    assert [line["event"] for line in logs] == ["instance.stream_unasked"] * (at > 0)


def test_a_redis_store_refuses_and_does_not_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    store = RedisStore("none", redis.Redis(), "", 60, 2)
    Refusing(0, lasts=True).patch(monkeypatch)
    [answer] = store.get([Get("name")], 1.0)
    assert isinstance(answer, Refusal) and "can't start new thread" in answer.words


class KeptStore:
    """A store that remembers its end."""

    forgets = False

    def __init__(self, name: str, closed: list[str]) -> None:
        self.name, self._closed = name, closed

    def close(self) -> None:
        self._closed.append(self.name)


def test_an_object_pool_whose_front_gets_no_thread_closes_both_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []
    monkeypatch.setattr("kvbm.assembly.pools.open_store", lambda url, **_: KeptStore(url, closed))
    settings = load_settings(flags={"pools.object.url": "s3://bucket", "pools.object.front": "redis://front"})
    Refusing(0).patch(monkeypatch)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        open_objects(settings, [NAMESPACE], BLOCK_BYTES)
    assert closed == ["redis://front", "s3://bucket"]


@pytest.mark.parametrize("lasts", [False, True])
def test_catalogs_of_parts_are_asked_by_the_caller_where_there_is_no_thread(
    lasts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def ready(client: CatalogClient) -> ReadyAnswer:
        asked.append(client.url)
        parts = "0-31" if "first" in client.url else "32-63"
        return ReadyAnswer(ready=True, reason="", degraded="", stream_sequence=1, lag_messages=0, parts=parts)

    monkeypatch.setattr(CatalogClient, "ready", ready)
    catalog = PartedCatalog(["http://first:1", "http://second:1"])
    Refusing(0, lasts).patch(monkeypatch)
    assert catalog.ready().ready
    assert sorted(asked) == ["http://first:1", "http://second:1"]  # each once
    catalog.close()
    with pytest.raises(CatalogError, match="is closed"):
        catalog.ready()


def test_a_watch_that_gets_no_thread_is_an_error_of_the_catalog(monkeypatch: pytest.MonkeyPatch) -> None:
    Refusing(0).patch(monkeypatch)
    with pytest.raises(CatalogError, match=r"can't start new thread.*ulimit -u"):
        CatalogClient("http://127.0.0.1:1").watch(instance="a")
