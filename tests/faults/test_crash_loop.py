"""Real processes, killed, stopped, cut off and damaged: everybody agrees again. `tools/crash_loop.py` is the long run.

`make test` inflicts one fault of each class, `make test-all` also those that a seed draws: `KVBM_CRASH_SEED` takes
another, `KVBM_CRASH_FAULTS` more of them, `KVBM_BURST_BLOCKS` a larger burst. On a divergence everything is kept in the
folder that the message names.
"""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.eventually import eventually
from tests.faults.processes import checker
from tests.faults.processes.bursts import Burst, run_burst
from tests.faults.processes.content import prompt_hashes, rows_of
from tests.faults.processes.loop import KINDS, WHOLE_S, CrashLoop, Fault, Options, System, archive_verdicts
from tests.faults.processes.proxy import ProxyHub, Rules

SEED = int(os.environ.get("KVBM_CRASH_SEED", "1"))
FAULTS = int(os.environ.get("KVBM_CRASH_FAULTS", "12"))
QUICK = ("kill_two", "stall_link", "full_worker", "step_worker_clock", "late_messages")
QUICK_BURST_BLOCKS = 10_000
BURST_BLOCKS = int(os.environ.get("KVBM_BURST_BLOCKS", "50000"))
WAIT_S = 60.0
MOMENT_S = 0.2  # in which something does not come
SLOW = float(os.environ.get("KVBM_CRASH_SLOW", "1"))


@pytest.fixture
def run_folder() -> Iterator[Path]:
    """A folder for a run. It is not pytest's own, because Postgres as another user must be able to enter it."""
    with tempfile.TemporaryDirectory(prefix="kvbm-crash-") as folder:
        yield Path(folder) / "run"


@pytest.mark.parametrize(
    ("kinds", "count"),
    [(QUICK, len(QUICK)), pytest.param((), FAULTS, marks=pytest.mark.nightly)],
    ids=["quick", "drawn"],
)
def test_everybody_agrees_again_after_each_fault(
    kinds: tuple[str, ...], count: int, run_folder: Path, tmp_path: Path
) -> None:
    system = System(Options(run_folder, SEED, workers=2, slow=SLOW))
    try:
        faults = CrashLoop(system, kinds).run(count)
        kept = _kept(run_folder, tmp_path, faults)
        assert not faults[-1].differences, f"{_words(faults)}\nkept: {kept}"
        assert len(faults) == count
        verdicts = list(archive_verdicts(system))
        assert verdicts
        for line, unexplained in verdicts:
            assert not unexplained, f"{line}\n{_words(faults)}\n{unexplained}"
    finally:
        system.close()


@pytest.mark.nightly
def test_the_checker_notices_what_differs(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One instance's word is falsified, a part at a time: somebody must contradict it."""
    system = System(Options(run_folder, SEED, workers=1, disk=False, slow=SLOW))
    try:
        assert not system.checker.check(WHOLE_S * SLOW).differences
        worker = system.workers[0]
        ask = worker.ask
        found = {}
        for what, (lie, contradiction) in _LIES.items():
            monkeypatch.setattr(worker, "ask", lambda lie=lie, **command: lie(ask(**command)))
            if what == "replayed":  # a sample of answers may miss what a replay may not
                monkeypatch.setattr(checker, "SAMPLED_BLOCKS", 0)
                monkeypatch.setattr(checker, "SAMPLED_PROMPTS", 0)
            end_s = time.monotonic() + WHOLE_S * SLOW
            while True:  # a catalog without a processor tells of its age instead
                found[what] = " ".join(system.checker.check(2.0).differences)
                if contradiction in found[what] or time.monotonic() > end_s:
                    break
        monkeypatch.setattr(worker, "ask", ask)
        worker.wrong.append({"event": "wrong_bytes", "blocks": 1})
        assert "wrong bytes" in system.checker.check(WHOLE_S * SLOW).differences[0]
    finally:
        system.close()
    for what, (_, contradiction) in _LIES.items():
        assert contradiction in found[what], found


def _forget_a_tier(answer: dict[str, Any]) -> dict[str, Any]:
    if "held" in answer:
        answer["held"]["NVME"] = ""
    return answer


_LIES: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], str]] = {
    "digest": (lambda answer: answer | ({"digest": "0" * 16} if "digest" in answer else {}), "catalog0: w0"),
    "offset": (
        lambda answer: answer | ({"applied": answer["applied"] + 1} if "applied" in answer else {}),
        "catalog0: w0",
    ),
    "count": (lambda answer: answer | ({"counts": {"HBM": 1}} if "counts" in answer else {}), "catalog0: w0"),
    "sampled": (_forget_a_tier, "it says"),
    "replayed": (_forget_a_tier, "journal: w0 holds"),
}


@pytest.mark.nightly
def test_a_burst_into_a_stopped_catalog_is_all_there_once_it_is_started(run_folder: Path) -> None:
    result = run_burst(run_folder, Burst(BURST_BLOCKS, stopped_catalog=True, seed=SEED), SLOW)
    assert not result.differences, result.sentence()


@pytest.mark.parametrize("blocks", [QUICK_BURST_BLOCKS, pytest.param(BURST_BLOCKS, marks=pytest.mark.nightly)])
def test_a_burst_while_the_server_is_killed_five_times_loses_nothing(blocks: int, run_folder: Path) -> None:
    result = run_burst(run_folder, Burst(blocks, kills=5, stopped_catalog=True, seed=SEED), SLOW)
    assert not result.differences, result.sentence()
    assert result.kills == 5


def test_a_seed_draws_every_kind_before_one_comes_again() -> None:
    drawn = CrashLoop.draw(SEED, len(KINDS))
    assert sorted(drawn) == sorted(KINDS)
    assert CrashLoop.draw(SEED, 5) == drawn[:5]


def test_blocks_of_other_names_and_halves_of_blocks_differ() -> None:
    rows = rows_of(prompt_hashes(1, 2))
    assert len({row.tobytes() for row in rows}) == len(rows)
    half = rows.shape[1] // 2
    assert not (rows[:, :half] == rows[:, half:]).all(axis=1).any()


class _Echo(threading.Thread):
    """Says back what it hears, to one client after the other."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self.socket.getsockname()[1]
        self.start()

    def run(self) -> None:
        while True:
            try:
                client, _ = self.socket.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client:
            try:
                while data := client.recv(4096):
                    client.sendall(data)
            except OSError:
                return


@pytest.fixture
def echo() -> Iterator[_Echo]:
    server = _Echo()
    yield server
    server.socket.close()


@pytest.fixture
def hub() -> Iterator[ProxyHub]:
    hub = ProxyHub()
    yield hub
    hub.close()


def _connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=WAIT_S)


def test_a_proxy_passes_bytes_on_in_both_directions(echo: _Echo, hub: ProxyHub) -> None:
    proxy = hub.open(echo.port)
    with _connect(proxy.port) as client:
        client.sendall(b"one")
        assert client.recv(10) == b"one"


def test_a_cut_ends_connections_and_refuses_new_ones_until_it_heals(echo: _Echo, hub: ProxyHub) -> None:
    proxy = hub.open(echo.port)
    with _connect(proxy.port) as client:
        client.sendall(b"one")
        client.recv(10)
        proxy.cut()
        with pytest.raises(ConnectionError):
            _must_end(client)
    with _connect(proxy.port) as client, pytest.raises(ConnectionError):
        _must_end(client)
    proxy.heal()
    with _connect(proxy.port) as client:
        client.sendall(b"two")
        assert client.recv(10) == b"two"


def test_what_was_stalled_arrives_when_it_heals(echo: _Echo, hub: ProxyHub) -> None:
    proxy = hub.open(echo.port)
    with _connect(proxy.port) as client:
        client.sendall(b"one")
        client.recv(10)
        proxy.set(down=Rules(stall=True))
        client.sendall(b"two")
        client.settimeout(MOMENT_S)
        with pytest.raises(TimeoutError):
            client.recv(10)
        proxy.heal()
        client.settimeout(WAIT_S)
        assert client.recv(10) == b"two"


def test_a_connection_that_lost_bytes_ends_when_it_heals(echo: _Echo, hub: ProxyHub) -> None:
    proxy = hub.open(echo.port)
    with _connect(proxy.port) as client:
        client.sendall(b"one")
        client.recv(10)
        proxy.set(up=Rules(swallow=True))
        client.sendall(b"two")
        eventually(lambda: proxy.swallowed_bytes == 3, "nothing is thrown away")
        proxy.heal()
        with pytest.raises(ConnectionError):
            _must_end(client)


def test_rules_may_be_those_of_one_connection(echo: _Echo, hub: ProxyHub) -> None:
    proxy = hub.open(echo.port)
    with _connect(proxy.port) as first, _connect(proxy.port) as second:
        for client in (first, second):
            client.sendall(b"one")
            assert client.recv(10) == b"one"
        proxy.set(up=Rules(stall=True), connection=proxy.connections()[0])
        second.sendall(b"two")
        assert second.recv(10) == b"two"
        first.sendall(b"two")
        first.settimeout(MOMENT_S)
        with pytest.raises(TimeoutError):
            first.recv(10)


def test_a_slow_link_takes_its_time(echo: _Echo, hub: ProxyHub) -> None:
    proxy = hub.open(echo.port)
    proxy.set(down=Rules(bytes_per_s=20_000))
    with _connect(proxy.port) as client:
        begin_s = time.monotonic()
        client.sendall(bytes(4000))
        got = 0
        while got < 4000:
            got += len(client.recv(4096))
        assert time.monotonic() - begin_s > 0.15  # a slow machine only makes it longer


def _must_end(client: socket.socket) -> None:
    """Raises ConnectionError when the other side has ended; an orderly end counts as well."""
    client.settimeout(WAIT_S)
    if not client.recv(10):
        raise ConnectionResetError


def _words(faults: list[Fault]) -> str:
    return "\n".join(f"{one.number} {one.kind}: {one.what} {' / '.join(one.differences)}" for one in faults)


def _kept(run_folder: Path, tmp_path: Path, faults: list[Fault]) -> Path | None:
    """Where a failed run's files are."""
    if not faults[-1].differences:
        return None
    kept = tmp_path / "kept"
    shutil.copytree(run_folder, kept, ignore_dangling_symlinks=True)
    return kept
