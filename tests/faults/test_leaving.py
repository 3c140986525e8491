"""A process that leaves with its manager open, in every way there is: it ends as it was told to, and leaves nothing
broken behind.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from tests.faults.processes.leaver import open_one

TIMES = 4  # of what ended with SIGABRT in about every second run; `make test` does it once
WAIT_S = 120.0
ENDS = {
    "fall_off": 0,
    "closed": 0,
    "hashing": 0,
    "sys_exit": 7,
    "exception": 1,
    "SIGINT": -signal.SIGINT,
    "SIGTERM": -signal.SIGTERM,
    "SIGHUP": -signal.SIGHUP,
    "sigterm_exits": 5,
    "os_exit": 6,
    "thread": 0,
}
FORKS = (
    "fork",
    "fork_os_exit",
    "fork_fall_off",
    "fork_close",
    "fork_while_locked",
    "multiprocessing_fork",
    "multiprocessing_spawn",
)

QUICK = ("fall_off", "thread", "os_exit", "SIGTERM")  # of the ways to end, one of each kind
QUICK_FORKS = ("fork", "fork_while_locked", "multiprocessing_fork", "multiprocessing_spawn")


def leave(folder: Path, way: str, nats: str = "none") -> subprocess.CompletedProcess[str]:
    """A process that left, and what it said."""
    command = [sys.executable, "-m", "tests.faults.processes.leaver", str(folder), way, nats]
    return subprocess.run(command, capture_output=True, text=True, timeout=3 * WAIT_S, check=False)


def opened_again(folder: Path) -> list[str]:
    """What a manager of this process remarks that opens what was left, and closes it."""
    with capture_logs() as remarks:
        open_one(folder, "none").close(WAIT_S)
    return [str(one["event"]) for one in remarks]


@pytest.fixture
def nobody() -> Iterator[str]:
    """Where no server listens, nor begins to."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"nats://127.0.0.1:{held.getsockname()[1]}"


repeats = pytest.mark.parametrize("times", [1, pytest.param(TIMES, marks=pytest.mark.nightly)])


@pytest.mark.parametrize("way", [way if way in QUICK else pytest.param(way, marks=pytest.mark.nightly) for way in ENDS])
def test_it_ends_as_it_was_told_to(way: str, tmp_path: Path) -> None:
    left = leave(tmp_path, way)
    assert "busy" in left.stdout, left.stderr
    assert "closed_un" not in left.stderr + left.stdout, "what waited was not written"
    if way == "thread":
        assert "served on" in left.stdout, "its manager was closed before a thread that is no daemon had ended"
    assert left.returncode == ENDS[way], left.stderr
    assert "instance.started" in opened_again(tmp_path)


@pytest.mark.nightly
def test_it_ends_as_it_was_told_to_each_time(tmp_path: Path) -> None:
    ended = Counter(leave(tmp_path, "fall_off").returncode for _ in range(TIMES))
    assert set(ended) == {0}, ended


@repeats
def test_with_a_server_and_a_publisher_of_its_own_too(times: int, tmp_path: Path) -> None:
    for _ in range(times):
        left = leave(tmp_path, "fall_off", "embedded")
        assert left.returncode == 0, left.stderr
    log = (tmp_path / "nats" / "nats-server.log").read_text()
    assert log.count("Server Exiting") == log.count("Server is ready"), "a server was left to itself"


@pytest.mark.parametrize("way", [pytest.param("fall_off", marks=pytest.mark.nightly), "sys_exit"])
def test_a_stream_that_is_away_holds_nobody_up_for_long(way: str, nobody: str, tmp_path: Path) -> None:
    left = leave(tmp_path, way, nobody)
    assert left.returncode == ENDS[way], left.stderr
    assert "manager.closed_unpublished" in left.stderr


@pytest.mark.parametrize("ways", [QUICK_FORKS, pytest.param(FORKS, marks=pytest.mark.nightly)], ids=["quick", "all"])
def test_a_child_leaves_its_parents_manager_alone(ways: tuple[str, ...], tmp_path: Path) -> None:
    left = leave(tmp_path, "+".join(ways))
    assert left.returncode == 0, f"{left.stdout}\n{left.stderr}"
    assert left.stdout.count("the parent's is whole") == len(ways)
    assert "tail_cut" not in left.stderr
    assert not any("tail_cut" in remark for remark in opened_again(tmp_path))


def test_a_child_that_lives_on_keeps_nobody_from_starting_again(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.faults.processes.leaver", str(tmp_path), "fork_outlives"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        said = next(line for line in parent.stdout if line.startswith("child "))
        assert "was opened by the process that forked this one" in said
        child = int(said.split()[1])
        try:
            parent.kill()
            parent.wait(WAIT_S)
            assert "instance.started" in opened_again(tmp_path)
        finally:
            os.kill(child, signal.SIGKILL)


COMMANDS = {
    "catalog": (["catalog", "serve", "--set=catalog.listen=127.0.0.1:0"], "follows nats://", 0),
    "engine": (
        ["engine", "--set=pools.hbm.slots=64", "--set=pools.hbm.device=cpu", "--set=pools.nvme.slots=64"],
        '"ready"',
        130,
    ),
}


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("catalog", signal.SIGTERM),  # SIGHUP has it read its settings again: tests/integration/test_reloads.py
        ("engine", signal.SIGTERM),
        pytest.param("engine", signal.SIGHUP, marks=pytest.mark.nightly),
    ],
)
def test_a_command_ends_cleanly_when_its_terminal_goes_as_when_it_is_asked_to(
    command: str, told: signal.Signals, tmp_path: Path
) -> None:
    words, ready, status = COMMANDS[command]
    said = start_command([*words, f"--set=instance.data_dir={tmp_path}"], ready)
    said.send_signal(told)
    try:
        out, remarks = said.communicate(timeout=WAIT_S)
    finally:
        said.kill()
    assert said.returncode == status, remarks
    assert "Traceback" not in remarks
    assert "[info" not in out and "[warning" not in out, "remarks are on standard output"
    log = (tmp_path / "nats" / "nats-server.log").read_text()
    assert "Server Exiting" in log, "its server was left to itself"


def test_a_command_under_nohup_outlives_its_terminal(tmp_path: Path) -> None:
    words, ready, _ = COMMANDS["catalog"]
    told = start_command([*words, f"--set=instance.data_dir={tmp_path}"], ready, "SIG_IGN")
    told.send_signal(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        told.wait(1.0)
    told.send_signal(signal.SIGTERM)
    assert told.wait(WAIT_S) == 0


def start_command(words: list[str], ready: str, hang_up: str = "SIG_DFL") -> subprocess.Popen[str]:
    """A command that has said that it is ready, on either of its outputs.

    Args:
        hang_up: what SIGHUP finds; whoever runs the tests may do so under nohup.
    """
    set_it = (
        f"import os, signal, sys; signal.signal(signal.SIGHUP, signal.{hang_up}); os.execv(sys.executable, "
        "sys.argv[1:])"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", set_it, sys.executable, "-m", "kvbm", *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stderr is not None
    heard: list[str] = []
    output = process.stdout if ready.startswith('"') else process.stderr
    while ready not in (line := output.readline()):
        heard.append(line)
        assert line, f"it ended with {process.wait(WAIT_S)}: {heard}"
    return process


def test_a_programs_standard_output_is_its_own(tmp_path: Path) -> None:
    left = leave(tmp_path, "closed")
    assert [line.split()[0] for line in left.stdout.splitlines()] == ["busy"]
    assert "instance.started" in left.stderr
