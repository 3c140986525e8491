"""A moment without descriptors (EMFILE), or without a place for remarks: what failed is tried again, and no thread ends
for it.
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import structlog
from structlog.testing import capture_logs

import kvbm
from kvbm.assembly import NATIVE, OPEN_BLOCK_IO
from kvbm.assembly.start import OnStream, ask_stream
from kvbm.config import load_settings
from kvbm.core.ids import InstanceId, Namespace
from kvbm.erasure import watch
from kvbm.erasure.watch import ErasureWatch, WatchOptions
from kvbm.pools import tenant_keys
from kvbm.pools.nvme import pod
from kvbm.pools.nvme.hints import SlotHints
from kvbm.pools.nvme.pod import PodFolder
from kvbm.pools.nvme.sealing import SlotKeys
from kvbm.pools.object.encryption import Sealing
from kvbm.pools.tenant_keys import add_key, keys_of_command, keys_of_file
from kvbm.safe_log import SafeLog
from kvbm.streams.memory import MemoryLog, MemoryStream
from kvbm.streams.nats.credentials import Credentials
from kvbm.streams.publisher import thread as publisher_thread
from kvbm.tenant_secrets import TenantSecrets
from tests.eventually import WAIT_S, eventually
from tests.managers import BLOCK_BYTES, NAMESPACE
from tests.nats_fixture import PlainOwner

ACME = Namespace(model="test", revision="r1", block_tokens=16, tenant="acme")


class Failing:
    """A function that fails a number of times, for want of descriptors, and then does what it did.

    Attributes:
        times: how often it still fails.
        calls: so far.
    """

    def __init__(self, function: Callable[..., Any], times: int = 1) -> None:
        self._function, self.times, self.calls = function, times, 0

    def __call__(self, *args: Any, **more: Any) -> Any:
        self.calls += 1
        if self.times:
            self.times -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return self._function(*args, **more)


def test_secrets_that_change_while_they_cannot_be_read_are_read_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, clock = tmp_path / "secrets.toml", [0.0]
    path.write_text('[tenants.acme]\nsecret = "old"\n')
    secrets = TenantSecrets({}, str(path), clock=lambda: clock[0])
    monkeypatch.setattr("kvbm.tenant_secrets.read_small", Failing(tenant_keys.read_small))
    path.write_text('[tenants.acme]\nsecret = "a newer one"\n')
    found = []
    for _ in range(2):
        clock[0] += 2.0
        found.append(secrets["acme"])
    assert found == ["old", "a newer one"]


@pytest.fixture
def keys_path(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    add_key(path, "acme", "first")
    return path


def test_keys_of_nvme_that_change_while_they_cannot_be_read_are_read_later(
    keys_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = SlotKeys(keys_of_file(str(keys_path)), [ACME])
    first = keys.sealer(ACME.id, bytes(16)).key_id
    add_key(keys_path, "acme", "second")
    monkeypatch.setattr(tenant_keys, "read_small", Failing(tenant_keys.read_small))
    keys.refresh()
    assert keys.sealer(ACME.id, bytes(16)).key_id == first
    keys.refresh()
    assert keys.sealer(ACME.id, bytes(16)).key_id != first


def test_keys_of_objects_that_change_while_they_cannot_be_read_are_read_later(
    keys_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    troubles: list[str] = []
    sealing = Sealing(keys_of_file(str(keys_path)), 1, 64, troubles.append)
    first = sealing.of(ACME.id, ACME)
    add_key(keys_path, "acme", "second")
    monkeypatch.setattr(tenant_keys, "read_small", Failing(tenant_keys.read_small, 3))
    for _ in range(3):
        sealing.refresh()
    assert sealing.of(ACME.id, ACME) is first and len(troubles) == 1
    sealing.refresh()
    assert sealing.of(ACME.id, ACME) is not first


def test_a_command_that_failed_is_asked_again_soon(keys_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    sealing = Sealing(keys_of_command(f"cat {keys_path}"), 1, 64, clock=lambda: clock[0])
    first = sealing.of(ACME.id, ACME)
    add_key(keys_path, "acme", "second")
    monkeypatch.setattr("subprocess.Popen", Failing(tenant_keys.subprocess.Popen))
    for clock[0] in (301.0, 322.0):
        sealing.refresh()
    assert sealing.of(ACME.id, ACME) is not first


@pytest.mark.parametrize("name", ["dup", "fdatasync"])
def test_hints_that_were_not_synced_are_synced_later(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hints = SlotHints(tmp_path / "a.pool", 4, keep=False)
    hints.note([1], NAMESPACE.id, bytes(16))
    failing = Failing(getattr(os, name))
    monkeypatch.setattr(os, name, failing)
    for calls in (1, 2, 2):  # it fails, it goes, there is nothing left to do
        hints.sync()
        assert failing.calls == calls
    hints.close()


@pytest.fixture
def nobody_hears(monkeypatch: pytest.MonkeyPatch) -> None:
    """Log lines cannot be written."""

    def refuse(*_: object) -> Any:
        raise ValueError("I/O operation on closed file")

    structlog.configure(processors=[refuse])


@pytest.mark.usefixtures("nobody_hears")
def test_a_remark_that_cannot_be_made_is_lost() -> None:
    for level in ("debug", "info", "warning", "error", "exception"):
        with pytest.raises(ValueError, match="closed file"):
            getattr(structlog.get_logger(), level)("it.happened")
        getattr(SafeLog(), level)("it.happened", why="nothing")


def test_every_module_makes_its_remarks_so() -> None:
    folder = Path(kvbm.__file__).parent
    others = [
        path.name
        for path in folder.rglob("*.py")
        if re.search(r"structlog\.(get_logger|getLogger)\(", path.read_text())
    ]
    assert others == ["safe_log.py"]


@pytest.mark.usefixtures("nobody_hears")
def test_the_thread_of_a_pods_folder_outlives_a_look_and_a_remark_that_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pod, "POLL_S", 0.001)
    folder = PodFolder(tmp_path / "test.a.pool", "test", BLOCK_BYTES, NAMESPACE, NATIVE.checksums, OPEN_BLOCK_IO)
    folder.start()
    failing = Failing(folder.poll, 3)
    monkeypatch.setattr(folder, "poll", failing)
    eventually(lambda: failing.calls > 4, "the thread has ended")
    folder.close()


class NoErasures:
    """Part of `InstanceErasures` that does nothing."""

    is_busy = False

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None


def test_erasures_are_watched_once_there_are_descriptors_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "_AGAIN_S", 0.001)
    failing, asked = Failing(asyncio.Runner), threading.Event()
    monkeypatch.setattr(asyncio, "Runner", failing)

    async def connect() -> Any:
        asked.set()
        raise TimeoutError

    options = WatchOptions(0.001, 1.0)
    watching = ErasureWatch("a", NoErasures(), connect, lambda _: None, True, options)  # type: ignore[arg-type]
    watching.start()
    assert asked.wait(WAIT_S)
    watching.stop()


def test_a_publisher_begins_once_there_are_descriptors_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher_thread, "_AGAIN_S", 0.001)
    begun: list[int] = []

    async def connect(url: str, timeout_s: float) -> MemoryStream:
        begun.append(failing.calls)
        return MemoryStream()

    publisher = publisher_thread.PublisherThread(
        MemoryLog(), "nats://127.0.0.1:1", "c", InstanceId("one"), PlainOwner("c"), 0.05, connect
    )
    failing = Failing(asyncio.new_event_loop)
    monkeypatch.setattr("asyncio.runners.events.new_event_loop", failing)
    publisher.start()
    eventually(lambda: begun, "it has not begun")
    publisher.stop(1.0)
    assert begun == [2]


def test_a_start_that_lacks_descriptors_to_ask_its_stream_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncio.runners.events.new_event_loop", Failing(asyncio.new_event_loop))
    settings = load_settings(flags={"nats.timeout_s": WAIT_S})
    with capture_logs() as logs:
        assert ask_stream(settings, InstanceId("a"), "nats://localhost:4222", Credentials()) == OnStream()
    assert [line["event"] for line in logs] == ["instance.stream_unasked"]
