"""Reads over NIXL alone, with real processes of NIXL, and what is done to those meanwhile. Never a wrong row."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvbm.core.errors import NixlError
from kvbm.core.ids import Namespace
from kvbm.core.reads import ReadOutcome
from kvbm.transport import nixl_process
from kvbm.transport.base import PeerRead, PeerReader
from kvbm.transport.leased import LeasedRun
from kvbm.transport.leasing_connection import LeasingConnection
from kvbm.transport.lending import LentLimits
from kvbm.transport.nixl_agent import NixlProcess, missing_nixl
from kvbm.transport.nixl_hello import NixlStatus, encode_hello, receive_ready
from kvbm.transport.nixl_process import Failed, Fetch, Fetched, Join, receive, send
from kvbm.transport.wire import NamespaceOpened
from tests.eventually import eventually
from tests.lenders import NAMESPACE, OTHER, blocks_of, hashes_of
from tests.native_owner import NativeLender
from tests.nixl_site import NIXL_S, NixlSite
from tests.strangers import Stranger

GOOD, MISSING, CORRUPT, FAILED = ReadOutcome
BLOCK = 1 << 16
BLOCKS = 512
NewSite = Callable[..., NixlSite]


@pytest.fixture(scope="module")
def processes() -> Iterator[tuple[NixlProcess, NixlProcess]]:
    if missing := missing_nixl():
        pytest.fail(str(missing))
    both = NixlProcess({"UCX_TLS": "tcp"}), NixlProcess({"UCX_TLS": "tcp"})
    yield both
    for process in both:
        process.close()


@pytest.fixture
def site(processes: tuple[NixlProcess, NixlProcess], tmp_path: Path) -> Iterator[NixlSite]:
    lender = NativeLender(BLOCKS, BLOCK, tmp_path, nvme=False)
    site = NixlSite(lender, LentLimits(lease_s=NIXL_S), tmp_path, processes, falls_back=False)
    site.lender.put(hashes_of(BLOCKS), blocks_of(BLOCKS, BLOCK))
    yield site
    site.close()


def read(reader: PeerReader, count: int = BLOCKS, deadline_s: float = NIXL_S) -> tuple[PeerRead, np.ndarray]:
    rows = np.full((count, BLOCK), 0xA5, dtype=np.uint8)
    found = reader.read(NAMESPACE, hashes_of(BLOCKS)[: 16 * count], rows, None, deadline_s)
    wanted = blocks_of(BLOCKS, BLOCK)
    for row, outcome in enumerate(found.result.outcomes):
        assert outcome is not GOOD or np.array_equal(rows[row], wanted[row]), f"block {row} is wrong"
    return found, rows


def is_good(found: PeerRead) -> bool:
    return found.trouble == "" and set(found.result.outcomes) == {GOOD}


def test_bytes_come_over_nixl_in_many_lots(site: NixlSite) -> None:
    reader = site.reader(lane_bytes=8 * BLOCK)
    assert is_good(read(reader)[0])
    assert site.nixl.readers == 1
    assert is_good(read(reader, 1)[0])


def test_a_read_whose_time_is_over_when_its_turn_comes_leaves_the_connection_alone(site: NixlSite) -> None:
    reader = site.reader()
    assert is_good(read(reader, 1)[0])
    way = reader._way
    found, _ = read(reader, 2, deadline_s=0.0)
    assert found.result.outcomes == [FAILED] * 2 and found.retry_s > 0
    assert is_good(read(reader, 1)[0]) and reader._way is way


def test_only_who_has_proved_every_namespace_is_told_how_to_reach_the_memory(site: NixlSite) -> None:
    found, rows = read(site.reader(namespaces=(NAMESPACE,)), 2)
    assert found.result.outcomes == [FAILED] * 2
    assert "who has proved each of its namespaces" in found.trouble
    assert (rows == 0xA5).all()
    assert site.nixl.readers == 0


def test_what_another_has_proved_tells_nobody_how_to_reach_the_memory(site: NixlSite) -> None:
    """Whoever has heard a reader's proofs says them on a connection of its own."""
    heard, again = Stranger(site), Stranger(site)
    for stranger in (heard, again):
        stranger.prove()
    proofs = [heard.opening(handle, namespace=one) for handle, one in enumerate((NAMESPACE, OTHER))]
    for stranger, is_open in ((heard, True), (again, False)):
        stranger.say(*proofs)
        assert [stranger.heard() for _ in proofs] == [
            NamespaceOpened(handle, is_open, BLOCK if is_open else 0) for handle in range(2)
        ]
        stranger.say(encode_hello())
        ready = receive_ready(stranger.socket, time.monotonic() + NIXL_S)
        assert ready.status is (NixlStatus.READY if is_open else NixlStatus.NOT_PROVED)
        assert bool(ready.metadata) is is_open
        stranger.socket.close()


def test_slots_that_the_owner_does_not_have_are_not_read(site: NixlSite, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, ask = site.reader(), LeasingConnection.ask
    assert is_good(read(reader, 2)[0])

    def lie(connection: LeasingConnection, namespace: Namespace, hashes: bytes, until_s: float) -> LeasedRun:
        granted = ask(connection, namespace, hashes, until_s)
        return granted._replace(slots=np.array([*granted.slots[:-1], BLOCKS], dtype=np.uint32))

    with monkeypatch.context() as lying:
        lying.setattr(LeasingConnection, "ask", lie)
        found, rows = read(reader, 2)
        assert found.result.outcomes == [FAILED] * 2 and "beyond" in found.trouble
        assert (rows == 0xA5).all()
    assert is_good(read(reader, 2)[0])


def test_bytes_that_come_after_their_lease_do_not_count_and_accuse_nobody(
    site: NixlSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader, say, stood still until others' blocks were in the slots, and then heard that all is read."""
    reader = site.reader()
    assert is_good(read(reader, 2)[0])

    def late(fetching: socket.socket) -> Any:
        answer = receive(fetching)
        time.sleep(max(0.0, until_s + 0.1 - time.monotonic()))
        return answer

    with monkeypatch.context() as slow:
        slow.setattr("kvbm.transport.nixl.receive", late)
        site.lender.host[:] ^= 1
        until_s = time.monotonic() + 1.0
        found, _ = read(reader, 2, deadline_s=1.0)
        site.lender.host[:] ^= 1
    assert found.result.outcomes == [FAILED] * 2 and "deadline" in found.trouble
    assert is_good(read(reader, 2)[0])
    assert site.lender.suspected == []


def test_readers_beyond_the_bound_are_refused_and_leave_room_when_they_go(site: NixlSite) -> None:
    site.nixl.most_readers = 1
    first, second = site.reader(), site.reader()
    assert is_good(read(first, 1)[0])
    assert "no room" in read(second, 1)[0].trouble
    first.close()
    eventually(lambda: site.nixl.readers == 0, "the first is still counted")
    assert is_good(read(second, 1)[0])


def test_what_a_reader_knows_ends_when_a_namespace_is_added(site: NixlSite) -> None:
    """As a reader that keeps what it was told, whatever happens on its connection."""
    admission = site.nixl.admit(True, site.nixl.revoked, NIXL_S)
    ready = admission.ready
    lanes = os.memfd_create("lanes")
    os.ftruncate(lanes, BLOCK)
    until_s = time.monotonic() + NIXL_S
    told = Fetch([ready.memory.address], [0])
    with site.reads.join(Join(ready.metadata, 1, BLOCK), lanes, until_s) as way:
        send(way, told)
        assert isinstance(receive(way), Fetched)
        os.pwrite(lanes, b"\xa5" * BLOCK, 0)
        site.nixl.revoke()
        send(way, told)
        assert isinstance(receive(way), Failed)
    assert os.pread(lanes, BLOCK, 0) == b"\xa5" * BLOCK
    os.close(lanes)
    assert site.nixl.admit(True, site.nixl.revoked - 1, NIXL_S).number == 0


def test_a_new_namespace_sends_readers_away_until_they_prove_it(site: NixlSite) -> None:
    known = [NAMESPACE, OTHER]
    reader = site.reader(namespaces=known)
    assert is_good(read(reader, 4)[0])
    added = Namespace(model="m", block_tokens=16, tenant="added")
    site.lender.admit(added)
    assert "who has proved" in read(reader, 4)[0].trouble
    known.append(added)
    assert is_good(read(reader, 4)[0])


def test_the_owners_process_of_nixl_can_read_hosts_memory_and_not_write_it(site: NixlSite) -> None:
    assert is_good(read(site.reader(), 1)[0])
    maps = Path(f"/proc/{site.lends.pid}/maps").read_text().splitlines()
    assert [line.split()[1] for line in maps if "/memfd:" in line] == ["r--s"]


@pytest.mark.parametrize("side", ["lends", "reads"])
def test_a_process_of_nixl_that_is_killed_costs_reads_and_no_more(site: NixlSite, side: str) -> None:
    reader = site.reader()
    assert is_good(read(reader)[0])
    process: NixlProcess = getattr(site, side)
    found: list[PeerRead] = []
    thread = threading.Thread(target=lambda: found.append(read(reader)[0]))
    thread.start()
    time.sleep(0.05)  # somewhere in the read
    os.kill(process.pid, signal.SIGKILL)
    thread.join()
    assert set(found[0].result.outcomes) <= {GOOD, FAILED}
    eventually(lambda: is_good(read(reader)[0]), "it is not read from again")
    eventually(lambda: site.lender.pinned == 0, "blocks stay pinned")


def kill(process: NixlProcess) -> None:
    """End it, and wait until it has ended."""
    os.kill(process.pid, signal.SIGKILL)
    eventually(lambda: not process.pid, "it lives on")


def test_an_owner_that_could_not_lend_at_once_after_its_process_died_lends_soon_after(site: NixlSite) -> None:
    """As on a busy machine, where NIXL takes longer to start than a reader can be let wait."""
    reader = site.reader()
    assert is_good(read(reader, 1)[0])
    for _ in range(3):
        kill(site.lends)
        refused = site.nixl.admit(True, site.nixl.revoked, within_s=0.0)
        assert (refused.number, refused.ready.status) == (0, NixlStatus.FULL)
    eventually(lambda: is_good(read(reader)[0]), "it is not read from again")
    assert site.nixl.readers == 1


def test_a_process_that_ended_unnoticed_is_started_anew_by_who_finds_out(site: NixlSite) -> None:
    """Its sockets are closed a moment before its parent can know."""
    reader = site.reader()
    assert is_good(read(reader, 1)[0])
    process = site.lends._process
    assert process is not None
    with pytest.MonkeyPatch.context() as unnoticed:
        unnoticed.setattr(process, "poll", lambda: None)
        process.kill()
        eventually(lambda: os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT), "it lives on")
        assert site.nixl.admit(True, site.nixl.revoked, NIXL_S).number
    assert site.lends.pid not in (0, process.pid)
    eventually(lambda: is_good(read(reader)[0]), "it is not read from again")


def test_what_another_has_ended_is_ended_once_and_costs_no_other_process(site: NixlSite) -> None:
    """As when a namespace is added while the owner finds that its process has died."""
    assert is_good(read(site.reader(), 1)[0])
    lent = site.nixl._lent
    assert lent is not None
    kill(site.lends)
    assert site.nixl.admit(True, site.nixl.revoked, NIXL_S).number
    pid = site.lends.pid
    site.lends.end(lent[0])
    assert site.lends.pid == pid != 0
    site.nixl.revoke()
    assert site.lends.pid == pid, "an agent ends, and its process goes on"


def test_a_reader_is_answered_whatever_goes_wrong_and_none_stays_counted(
    site: NixlSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(site.nixl, "admit", lambda *args: 1 // 0)
        assert "no room" in read(site.reader(), 1)[0].trouble
    with monkeypatch.context() as broken:
        broken.setattr("kvbm.transport.nixl_hello.MOST_METADATA_BYTES", 1)
        assert "no room" in read(site.reader(), 1)[0].trouble
    assert site.nixl.readers == 0
    assert is_good(read(site.reader(), 1)[0])


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.nightly)])
def test_a_process_of_nixl_may_be_killed_at_any_moment(site: NixlSite, kills: int) -> None:
    """While readers are admitted and dismissed, and namespaces are added."""
    ended, lends, wrong = threading.Event(), threading.Event(), list[BaseException]()

    def go_on(step: Callable[[], object]) -> None:
        while not ended.is_set():
            try:
                step()
            except Exception as error:  # noqa: BLE001 - nothing may be raised
                wrong.append(error)
                return

    def admit() -> None:
        if number := site.nixl.admit(True, site.nixl.revoked, 0.2).number:
            site.nixl.dismiss(number)
            lends.set()

    def revoke() -> None:
        site.joins.revoke()
        ended.wait(1.0)

    readers = [site.reader() for _ in range(2)]
    steps = [admit, admit, revoke, *(partial(read, reader, 8, 0.5) for reader in readers)]
    threads = [threading.Thread(target=go_on, args=(step,)) for step in steps]
    random = np.random.default_rng(kills)
    for thread in threads:
        thread.start()
    try:
        for number in range(kills):
            lends.clear()
            assert number % 2 or wrong or lends.wait(NIXL_S), "it lends no more"
            for process in (site.lends, site.reads):
                pid = eventually(partial(getattr, process, "pid"), "it is not started anew")
                time.sleep(float(random.random()) * 0.3)  # a moment like any other
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    assert wrong == []
    eventually(lambda: is_good(read(readers[0])[0]), "it is not read from again")
    readers[0].close()
    eventually(lambda: site.nixl.readers == 0, "readers stay counted", state=lambda: site.nixl.readers)
    eventually(lambda: site.lender.pinned == 0, "blocks stay pinned")


@pytest.mark.parametrize("side", ["lends", "reads"])
def test_a_process_of_nixl_that_stops_is_waited_for_until_the_deadline_and_writes_no_row_later(
    site: NixlSite, side: str
) -> None:
    reader = site.reader()
    assert is_good(read(reader)[0])
    process: NixlProcess = getattr(site, side)
    os.kill(pid := process.pid, signal.SIGSTOP)
    try:
        found, rows = read(reader, deadline_s=0.5)
        assert set(found.result.outcomes) == {FAILED} and found.trouble.endswith(("deadline", "in time"))
        before = rows.copy()
    finally:
        os.kill(pid, signal.SIGCONT)
    eventually(lambda: is_good(read(reader)[0]), "it is not read from again")
    assert np.array_equal(rows, before)


def test_reads_that_do_not_end_are_no_more_than_a_few_until_their_process_is_started_anew(site: NixlSite) -> None:
    reader = site.reader()
    assert is_good(read(reader)[0])
    before = site.reads.pid
    os.kill(pid := site.lends.pid, signal.SIGSTOP)
    try:
        for _ in range(6):
            assert set(read(reader, deadline_s=0.3)[0].result.outcomes) == {FAILED}
    finally:
        os.kill(pid, signal.SIGCONT)
    eventually(lambda: is_good(read(reader)[0]), "it is not read from again")
    assert site.reads.pid not in (0, before)


def test_metadata_that_is_none_is_an_error_and_others_are_read_from(site: NixlSite) -> None:
    lanes = os.memfd_create("lanes")
    os.ftruncate(lanes, BLOCK)
    random = np.random.default_rng(1)
    admission = site.nixl.admit(True, site.nixl.revoked, NIXL_S)
    good = admission.ready.metadata
    for number in range(12):
        bad = bytearray(good) if number % 2 else bytearray(random.bytes(200 * (number + 1)))
        for _ in range(4):
            bad[int(random.integers(len(bad)))] ^= 1 << int(random.integers(8))
        try:
            way = site.reads.join(Join(bytes(bad), 1, BLOCK), lanes, time.monotonic() + NIXL_S)
            way.close()
        except NixlError:
            pass  # as it should be; a flipped bit may lie where nothing is understood yet
    os.close(lanes)
    eventually(lambda: is_good(read(site.reader(), 2)[0]), "others are not read from")


def test_a_process_of_nixl_ends_with_who_started_it() -> None:
    """Who is killed says so to nobody."""
    words = """
import os, sys, time
from kvbm.transport.nixl_agent import NixlProcess
process, lent = NixlProcess({"UCX_TLS": "tcp"}), os.memfd_create("lent")
os.ftruncate(lent, 4096)
thing, _ = process.lend(lent, 4096, time.monotonic() + 60)
print(process.pid, flush=True)
sys.stdin.read()
"""
    child = subprocess.Popen([sys.executable, "-c", words], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None and child.stdout is not None
    with child.stdin, child.stdout:
        pid = int(child.stdout.readline())
        child.kill()
        assert child.wait(60) == -signal.SIGKILL
        eventually(lambda: not Path(f"/proc/{pid}/stat").exists() or is_dead(pid), "it lives on")


def is_dead(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def test_without_the_package_one_sentence_says_what_to_install(site: NixlSite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_process, "PACKAGES", ("nixl_of_nowhere",))
    site.reads = NixlProcess()
    found, _ = read(site.reader(), 1)
    assert found.trouble == (
        "NIXL (the Python package nixl-cu12) is not installed; install it with: pip install 'kvbm-ledger[nixl]'"
    )
