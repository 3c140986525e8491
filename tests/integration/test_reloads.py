"""SIGHUP to commands that run long: what they take, what they name for a restart, what they keep when it is wrong."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvbm.assembly.reload import Reloads, takes_logs
from kvbm.catalog.access.file import NewToken, add_token
from kvbm.config import Settings, changed_keys, load_settings, merged
from kvbm.core.errors import ConfigError
from tests.certificates import certify
from tests.eventually import WAIT_S, eventually
from tests.secured_catalogs import put

AT_EVERY_IMPORT = """
import os, signal, sys
def hang_up(event, found):
    if event == "import" and found[0] in ("kvbm", "kvbm.catalog.service", "uvicorn", "kvbm.bridge.run"):
        os.kill(os.getpid(), signal.SIGHUP)
sys.addaudithook(hang_up)
"""
PROGRAM = "import sys; from kvbm_ledger.commands import {main}; sys.argv[0] = '{name}'; sys.exit({main}())"


class Service:
    """A command with what it says on standard error, and to the service manager."""

    def __init__(
        self, folder: Path, words: list[str], name: str = "kvbm-catalog", before: str = "", **more: str
    ) -> None:
        main = "main" if name == "kvbm" else "catalog_main"
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.listener.bind(str(folder / "notify"))
        self.listener.settimeout(WAIT_S)
        variables = {"KVBM_LOG__FORMAT": "json", "NOTIFY_SOCKET": str(folder / "notify"), **more}
        self.process = subprocess.Popen(
            [sys.executable, "-c", before + PROGRAM.format(main=main, name=name), *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | variables,
        )
        self.lines: list[dict[str, Any]] = []
        self.odd: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            try:
                self.lines.append(json.loads(line))
            except ValueError:
                self.odd.append(line)

    def logged(self, event: str, count: int = 1) -> dict[str, Any]:
        """The line of this name, of that number among them."""

        def found() -> list[dict[str, Any]]:
            return [line for line in list(self.lines) if line["event"] == event]

        eventually(
            lambda: len(found()) >= count or self.process.poll() is not None,
            f"{event} was not logged",
            state=lambda: (self.lines, self.odd),
        )
        assert len(found()) >= count, (self.process.poll(), self.lines, self.odd)
        return found()[count - 1]

    def told(self, beginning: str) -> str:
        """The next word to the service manager that begins so."""
        while not (word := self.listener.recv(1 << 16).decode()).startswith(beginning):
            pass
        return word

    def hang_up(self) -> None:
        self.process.send_signal(signal.SIGHUP)

    def end(self, expected: int = 0) -> None:
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(WAIT_S) == expected, (self.lines, self.odd)
        self._reader.join(WAIT_S)
        assert self.odd == []

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join(WAIT_S)
        for one in (self.process.stdout, self.process.stderr, self.listener):
            assert one is not None
            one.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Service]]:
    made: list[Service] = []

    def started(*words: str, **more: str) -> Service:
        made.append(Service(tmp_path, list(words), **more))
        return made[-1]

    yield started
    for one in made:
        one.close()


# -- the settings ------------------------------------------------------------------------------------------------------


def test_what_differs_is_told_by_its_key_and_what_is_not_taken_stays() -> None:
    before = load_settings(None, {}, {"catalog.tenant_secrets.acme": "x", "tenants.acme.weight": 2})
    after = load_settings(
        None,
        {},
        {
            "catalog.tenant_secrets.acme": "y",
            "tenants.beta.weight": 2,
            "log.levels.pool": "debug",
            "catalog.listen": "a:1",
        },
    )
    assert changed_keys(before, before) == []
    fields = ("weight", "host_bytes", "nvme_bytes", "object_bytes")
    assert sorted(changed_keys(before, after)) == sorted(
        [
            "catalog.listen",
            "catalog.tenant_secrets.acme",
            "log.levels.pool",
            *(f"tenants.{tenant}.{field}" for tenant in ("acme", "beta") for field in fields),
        ]
    )
    taken = merged(before, after, takes_logs)
    assert changed_keys(before, taken) == ["log.levels.pool"]
    assert changed_keys(taken, after)[0] == "catalog.listen"


def test_what_waits_for_a_restart_is_named_each_time_and_wrong_settings_change_nothing() -> None:
    found: list[dict[str, Any]] = [{"catalog.listen": "a:1", "log.level": "debug"}, {"catalog.listen": "a:1"}]
    taken: list[Settings] = []

    def read() -> Settings:
        if not found:
            raise ConfigError("half a file")
        return load_settings(None, {}, found.pop(0))

    reloads = Reloads(Settings(), read, takes_logs, taken.append)
    first = reloads.look()
    assert (first.changed, first.restart) == (["log.level"], ["catalog.listen"])
    reloads.take(first)
    second = reloads.look()
    assert (second.changed, second.restart) == (["log.level"], ["catalog.listen"])
    reloads.take(second)
    reloads.reload()
    assert reloads.settings == Settings() and len(taken) == 2


# -- the catalog -------------------------------------------------------------------------------------------------------


def presented(port: int, ca: Path) -> bytes:
    """The certificate that the catalog shows who connects now."""
    context = ssl.create_default_context(cafile=str(ca))
    with (
        socket.create_connection(("127.0.0.1", port), WAIT_S) as sock,
        context.wrap_socket(sock, server_hostname="127.0.0.1") as wrapped,
    ):
        return wrapped.getpeercert(True) or b""


def test_a_catalog_takes_what_is_right_whole_or_not_at_all_and_tells_the_service_manager(
    tmp_path: Path, start: Callable[..., Service]
) -> None:
    ca = certify(tmp_path, "ca")
    first, second, other = (certify(tmp_path, name, ca) for name in ("server", "second", "other"))
    access, config = tmp_path / "access.toml", tmp_path / "kvbm.toml"
    token = add_token(access, NewToken("ops", "operator"), time.time())

    def write(log: str = 'level = "info"', **limits: object) -> None:
        values = {"loopback": True, **limits}
        lines = "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())
        config.write_text(
            f'[instance]\ndata_dir = "{tmp_path}/data"\n[log]\n{log}\n'
            f'[catalog]\nlisten = "127.0.0.1:0"\naccess = "{access}"\ntls_cert = "{first.cert}"\n'
            f'tls_key = "{first.key}"\n[catalog.limits]\n{lines}'
        )

    write()
    service = start("serve", "--config", str(config), before=AT_EVERY_IMPORT, WATCHDOG_USEC="1000000")
    url = service.logged("catalog.listening")["url"]
    port = int(url.rpartition(":")[2])
    context = ssl.create_default_context(cafile=str(ca.cert))

    def status(path: str, bearer: str) -> int:
        request = urllib.request.Request(url + path, headers={"Authorization": f"Bearer {bearer}"})
        try:
            with urllib.request.urlopen(request, timeout=WAIT_S, context=context) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code

    assert service.logged("settings.reloaded")["changed"] == []  # what came while it started was not lost, nor the end
    assert service.told("READY=1").startswith("READY=1\nSTATUS=serving")
    assert status("/readyz", token) == 200
    service.told("WATCHDOG=1")
    old = presented(port, ca.cert)

    # Many at once, with settings of all kinds
    newer = add_token(access, NewToken("second", "operator"), time.time())
    put((second.cert, first.cert), (second.key, first.key))
    write('level = "debug"', burst=3, requests_per_s=0.05)
    config.write_text(config.read_text().replace("127.0.0.1:0", "127.0.0.1:1"))
    os.kill(service.process.pid, signal.SIGSTOP)
    for _ in range(20):
        service.hang_up()
    os.kill(service.process.pid, signal.SIGCONT)
    line = service.logged("settings.reloaded", 2)
    assert re.search(r"^MONOTONIC_USEC=\d+$", service.told("RELOADING=1"), re.MULTILINE)
    service.told("READY=1")
    assert (line["level"], line["needs_restart"]) == ("warning", ["catalog.listen"])
    assert {"catalog.limits.requests_per_s", "catalog.limits.burst", "log.level"} <= set(line["changed"])
    assert presented(port, ca.cert) != old
    eventually(lambda: status("/v1/instances", newer) == 429, "the limit is not the new one")

    # Wrong ones, of which each would also change the limit
    half = config.read_text()[:-12]
    changed = service.lines.copy
    for name, damage, mend, why in (
        ("half a file", lambda: config.write_text(half), None, "is not TOML"),
        ("no file", config.unlink, None, "cannot be read"),
        ("a wrong value", lambda: write(burst=-1), None, "catalog.limits.burst is -1"),
        (
            "another's key",
            lambda: (write(burst=4000), put((other.key, first.key))),
            lambda: put((second.key, first.key)),
            "do not belong together",
        ),
        ("callers that others may write", lambda: access.chmod(0o622), lambda: access.chmod(0o600), "chmod 600"),
        (
            "half of the callers",
            lambda: access.write_text(access.read_text()[:-20]),
            None,
            "is cut off|is not TOML",
        ),
    ):
        count = sum(one["event"] == "settings.kept" for one in changed()) + 1
        damage()
        service.hang_up()
        kept = service.logged("settings.kept", count)
        assert re.search(why, kept["why"]) and "send SIGHUP again" in kept["remedy"], (name, kept)
        assert "the settings are as before" in service.told("READY=1")
        assert presented(port, ca.cert)
        if name == "another's key":
            assert status("/v1/instances", newer) == 429
        if mend is not None:
            mend()
        write('level = "debug"', burst=3, requests_per_s=0.05)

    # Good again, with callers of another file
    access = tmp_path / "others.toml"
    last = add_token(access, NewToken("last", "operator"), time.time())
    write(burst=4000)
    service.hang_up()
    line = service.logged("settings.reloaded", sum(one["event"] == "settings.reloaded" for one in changed()) + 1)
    assert {"catalog.access", "catalog.limits.burst"} <= set(line["changed"]) and line["needs_restart"] == []
    assert (status("/v1/instances", last), status("/v1/instances", newer)) == (200, 401)
    write()
    config.write_text(config.read_text().replace(f'access = "{access}"\n', ""))
    service.hang_up()
    line = service.logged("settings.reloaded", sum(one["event"] == "settings.reloaded" for one in changed()) + 1)
    assert line["needs_restart"] == ["catalog.access"] and status("/v1/instances", "none") == 401
    service.end()
    service.told("STOPPING=1")


def test_a_catalog_tells_the_limits_of_tenants_that_its_settings_have_now(
    tmp_path: Path, start: Callable[..., Service]
) -> None:
    config = tmp_path / "kvbm.toml"
    begin = f'[instance]\ndata_dir = "{tmp_path}/data"\n[catalog]\nlisten = "127.0.0.1:0"\n'
    config.write_text(f"{begin}[tenants.acme]\nobject_bytes = 300\nhost_bytes = 100\n")
    service = start("serve", "--config", str(config))
    url = service.logged("catalog.listening")["url"]

    def limits() -> dict[str, tuple[int | None, int | None]]:
        with urllib.request.urlopen(url + "/v1/overview", timeout=WAIT_S) as answer:
            told = json.load(answer)["tenants"]
        return dict(zip(told["tenant"], zip(told["host_quota"], told["quota"], strict=True), strict=True))

    eventually(lambda: limits() == {"acme": (100, 300)}, "the limits are not told", state=limits)
    config.write_text(f"{begin}[tenants.acme]\nobject_bytes = 500\n[tenants.beta]\nhost_bytes = 7\n")
    service.hang_up()
    line = service.logged("settings.reloaded")
    assert "tenants.acme.object_bytes" in line["changed"] and line["needs_restart"] == []
    eventually(lambda: limits() == {"acme": (None, 500), "beta": (7, None)}, "the new ones are not", state=limits)
    service.end()


def test_a_catalog_whose_terminal_is_closed_ends_with_its_server(tmp_path: Path) -> None:
    words = [
        "serve",
        "--set=catalog.listen=127.0.0.1:0",
        f"--set=instance.data_dir={tmp_path}",
        "--set=log.format=json",
    ]
    program = PROGRAM.format(main="catalog_main", name="kvbm-catalog")
    pid, terminal = os.forkpty()
    if not pid:
        os.execv(sys.executable, [sys.executable, "-c", program, *words])
    said, until_s = b"", time.monotonic() + WAIT_S
    while b"catalog.listening" not in said:
        assert time.monotonic() < until_s and select.select([terminal], [], [], WAIT_S)[0], said
        said += os.read(terminal, 1 << 16)
    os.kill(pid, signal.SIGHUP)  # while the terminal is there, it means the settings
    while b"settings.reloaded" not in said:
        assert time.monotonic() < until_s and select.select([terminal], [], [], WAIT_S)[0], said
        said += os.read(terminal, 1 << 16)
    os.close(terminal)
    eventually(lambda: os.waitpid(pid, os.WNOHANG)[0] == pid, "it goes on without its terminal")
    assert "Server Exiting" in (tmp_path / "nats" / "nats-server.log").read_text()


@pytest.mark.nightly
def test_a_bridge_takes_levels_and_names_the_rest(tmp_path: Path, start: Callable[..., Service]) -> None:
    config = tmp_path / "bridge.toml"

    def write(level: str, endpoint: str) -> None:
        config.write_text(
            f'[instance]\ndata_dir = "{tmp_path}"\n[log]\nlevel = "{level}"\n[bridge.sources.a]\n'
            f'endpoint = "{endpoint}"\nmodel = "m"\n'
        )

    write("info", f"ipc://{tmp_path}/events")
    service = start("bridge", "--config", str(config), name="kvbm", WATCHDOG_USEC="1000000")
    service.told("READY=1")
    service.told("WATCHDOG=1")
    write("debug", f"ipc://{tmp_path}/others")
    service.hang_up()
    line = service.logged("settings.reloaded")
    assert (line["changed"], line["needs_restart"]) == (["log.level"], ["bridge.sources.a.endpoint"])
    config.write_text("[log")
    service.hang_up()
    assert "is not TOML" in service.logged("settings.kept")["why"]
    service.end(130)
