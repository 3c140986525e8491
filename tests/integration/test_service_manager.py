"""What services tell systemd, on a socket as systemd has it; and the units that start them."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvbm.catalog_cli import catalog_parser
from kvbm.cli import kvbm_parser
from kvbm.config import load_settings
from kvbm.service_manager import ServiceManager

UNITS = Path(__file__).parents[2] / "deploy" / "systemd"
SERVICES = sorted(UNITS.glob("*.service"))
WAIT_S = 60.0


@pytest.fixture(params=["path", "abstract"])
def notified(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[socket.socket]:
    name = str(tmp_path / "notify") if request.param == "path" else f"@kvbm-{os.getpid()}-{time.monotonic_ns()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(name.replace("@", "\0"))
        listener.settimeout(WAIT_S)
        monkeypatch.setenv("NOTIFY_SOCKET", name)
        yield listener


def test_what_is_told_is_as_systemd_wants_it(notified: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "3000000")
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()))
    manager = ServiceManager()
    assert manager.watchdog_s == 3.0
    assert not {"NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"} & os.environ.keys()  # no child speaks for it
    before_us = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000

    def told(say: Callable[[], None]) -> str:
        say()
        return notified.recv(1 << 16).decode()

    assert (
        told(lambda: manager.starting("reads\nthe stream", 30))
        == "EXTEND_TIMEOUT_USEC=30000000\nSTATUS=reads the stream"
    )
    assert told(lambda: manager.ready("\udcff" * 2000)).startswith("READY=1\nSTATUS=\\udcff")
    reloading = re.fullmatch(r"RELOADING=1\nMONOTONIC_USEC=(\d+)", told(manager.reloading))
    assert reloading and before_us <= int(reloading[1]) <= time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
    assert told(manager.alive_if_due) == "WATCHDOG=1"
    manager.alive_if_due()  # not again
    assert told(manager.stopping) == "STOPPING=1"


def test_where_nobody_listens_nothing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for address in ("", "relative", "vsock:1:2", str(tmp_path / "nobody"), str(tmp_path / ("x" * 200)), "@"):
        monkeypatch.setenv("NOTIFY_SOCKET", address)
        monkeypatch.setenv("WATCHDOG_USEC", "-3")
        manager = ServiceManager()
        manager.ready("serves")
        manager.stopping()
        assert manager.watchdog_s == 0.0


def test_another_process_s_watchdog_is_not_ours(notified: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "3000000")
    monkeypatch.setenv("WATCHDOG_PID", "1")
    assert ServiceManager().watchdog_s == 0.0


# -- the units ---------------------------------------------------------------------------------------------------------


def analyze(*words: str) -> subprocess.CompletedProcess[str]:
    program = shutil.which("systemd-analyze")
    assert program, "systemd-analyze is not there; run: apt-get install -y --no-install-recommends systemd"
    return subprocess.run([program, *words], capture_output=True, text=True, timeout=WAIT_S, check=False)


def here(folder: Path) -> list[str]:
    """The units with programs of this environment."""
    for unit in [*SERVICES, *UNITS.glob("*.timer")]:
        (folder / unit.name).write_text(unit.read_text().replace("/opt/kvbm/bin/", f"{Path(sys.executable).parent}/"))
    return sorted(map(str, folder.iterdir()))


def test_systemd_finds_nothing_wrong_with_the_units(tmp_path: Path) -> None:
    units = here(tmp_path)
    assert [Path(one).name for one in units] == [
        "kvbm-bridge.service",
        "kvbm-catalog.service",
        "kvbm-gc.service",
        "kvbm-gc.timer",
    ]
    found = analyze("verify", "--man=no", *units)
    assert (found.returncode, found.stdout + found.stderr) == (0, "")
    broken = tmp_path / "broken.service"
    broken.write_text(Path(units[1]).read_text().replace("Type=notify", "Type=nothing"))
    assert "nothing" in analyze("verify", "--man=no", str(broken)).stderr


def test_the_services_are_hardened() -> None:
    found = analyze("security", "--offline=true", "--threshold=15", *map(str, SERVICES))
    levels = [float(one) for one in re.findall(r"exposure level for \S+: ([\d.]+)", found.stdout)]
    assert found.returncode == 0 and len(levels) == 3 and max(levels) <= 1.5, found.stdout + found.stderr


@pytest.mark.parametrize("unit", SERVICES, ids=lambda unit: unit.stem)
def test_each_service_starts_a_command_that_is_there_with_settings_that_are(unit: Path) -> None:
    text = unit.read_text()
    program, *words = shlex.split(re.findall(r"^ExecStart=(.+)$", text, re.MULTILINE)[0])
    parser = catalog_parser() if program.endswith("kvbm-catalog") else kvbm_parser()
    arguments = parser.parse_args(words)
    variables = dict(re.findall(r"(KVBM_\w+)=(\S+)", text))
    flags = dict(one.split("=") for one in arguments.sets)
    assert load_settings(None, variables, flags).log.format == "json"
