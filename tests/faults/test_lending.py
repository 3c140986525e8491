"""A native owner under what happens to it: blocks that come and go, readers that are killed, an engine that keeps the
GIL, a fork.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from kvbm.core.ids import HASH_BYTES, Tier, split_hashes
from kvbm.core.reads import ReadOutcome
from kvbm.transport.base import PeerReader
from kvbm.transport.lending import LentLimits
from kvbm.transport.wire import HEAD_BYTES, Bye, decode_body, decode_head
from tests.eventually import eventually
from tests.lenders import NAMESPACE, OTHER, blocks_of, hashes_of
from tests.native_owner import NativeLender, NativeSite

BLOCK = 20_000
LONG_S = 120.0  # of a read that comes to its end
GOOD_BLOCKS = 5_000  # read while others come and go; some thousand a second
GOOD, MISSING, CORRUPT, FAILED = ReadOutcome


@pytest.fixture(params=["memory", "tcp"])
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[NativeSite]:
    made = NativeSite(request.param, NativeLender(40, BLOCK, tmp_path), LentLimits(), tmp_path)
    yield made
    made.close()


def read(reader: PeerReader, hashes: bytes) -> tuple[list[ReadOutcome], np.ndarray]:
    rows = np.full((len(hashes) // HASH_BYTES, BLOCK), 0xA5, dtype=np.uint8)
    return reader.read(NAMESPACE, hashes, rows, None, LONG_S).result.outcomes, rows


def borrower(site: NativeSite) -> subprocess.Popen[bytes]:
    """A process that reads all blocks over and over, and has read them once."""
    where = site.unix if site.transport == "memory" else site.tcp
    command = [sys.executable, "-m", "tests.faults.processes.borrower", site.transport, where]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2])
    assert child.stdout is not None
    assert child.stdout.readline() == b"reads\n"
    return child


def test_blocks_come_and_go_while_they_are_read_and_no_byte_is_wrong(tmp_path: Path):
    """Slots are reused by others all the time, and a block that comes back lies somewhere else."""
    lender = NativeLender(24, BLOCK, tmp_path)
    site = NativeSite("memory", lender, LentLimits(blocks=64), tmp_path)
    tcp = NativeSite.__new__(NativeSite)
    tcp.transport, tcp.tcp, tcp._readers = "tcp", site.tcp, site._readers
    runs = [(hashes_of(8, seed), blocks_of(8, BLOCK, seed)) for seed in range(6)]
    is_over = threading.Event()
    wrong: list[str] = []
    seen: Counter[ReadOutcome] = Counter()

    def come_and_go(seed: int) -> None:
        rng = np.random.default_rng(seed)
        while not is_over.is_set():
            hashes, rows = runs[rng.integers(len(runs))]
            tier = Tier.HOST if rng.random() < 0.8 else Tier.NVME
            try:
                if rng.random() < 0.5:
                    lender.put(hashes, rows, tier)
                else:
                    lender.evict(hashes)
            except AssertionError:  # all slots are lent
                lender.evict(b"".join(one for one, _ in runs))

    def borrow(reader: PeerReader, seed: int) -> None:
        rng = np.random.default_rng(seed)
        while not is_over.is_set():
            hashes, blocks = runs[rng.integers(len(runs))]
            outcomes, rows = read(reader, hashes)
            seen.update(outcomes)
            good = [at for at, outcome in enumerate(outcomes) if outcome is GOOD]
            if not np.array_equal(rows[good], blocks[good]):
                wrong.append(f"{outcomes}")

    threads = [threading.Thread(target=come_and_go, args=(1,))]
    threads += [
        threading.Thread(target=borrow, args=(one.reader(), seed)) for seed, one in enumerate((site, site, tcp, tcp))
    ]
    for thread in threads:
        thread.start()
    try:
        eventually(lambda: wrong or seen[GOOD] >= GOOD_BLOCKS, "nobody reads", LONG_S, lambda: dict(seen))
    finally:
        is_over.set()
    for thread in threads:
        thread.join()
    assert not wrong
    assert seen[MISSING], "no block was ever gone"
    assert not seen[CORRUPT], "a slot changed under a lease"
    eventually(lambda: lender.pinned == 0, "blocks stay pinned")
    assert lender.suspected == []
    site.close()


def test_a_slot_that_is_lent_is_not_reused_after_a_clear(site: NativeSite):
    """The slot belongs to the lease until it ends, whatever becomes of the block."""
    site.lender.put(hashes_of(40), blocks_of(40, BLOCK))
    with site.lender.lock:
        lent = site.lender.ledger.lend(NAMESPACE.id, hashes_of(40))
    site.lender.evict(hashes_of(40))
    assert site.lender.pinned == 40
    with site.lender.lock:
        assert site.lender.ledger.allocate(Tier.HOST, 1) is None
        site.lender.ledger.unpin(Tier.HOST, lent.slots)
    outcomes, _ = read(site.reader(), hashes_of(40))
    assert outcomes == [MISSING] * 40


def test_a_reader_that_is_killed_gives_back_what_it_had(site: NativeSite):
    site.lender.put(hashes_of(40), blocks_of(40, BLOCK))
    for turn in range(3):
        child = borrower(site)
        assert child.stdout is not None
        time.sleep(0.01 * turn)
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        eventually(lambda: site.lender.pinned == 0, "blocks stay pinned")
    assert read(site.reader(), hashes_of(40))[0] == [GOOD] * 40


def test_it_answers_while_python_is_busy(site: NativeSite):
    """A thread that never lets go of the GIL, and readers in another process."""
    site.lender.put(hashes_of(40), blocks_of(40, BLOCK))
    child = borrower(site)
    assert child.stdout is not None
    before = after = site.lending.stats()
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(60.0)
    try:
        give_up_s = time.monotonic() + LONG_S
        while before == after and time.monotonic() < give_up_s:
            before, until_s = site.lending.stats(), time.monotonic() + 0.2
            while time.monotonic() < until_s:
                pass
            after = site.lending.stats()
    finally:
        sys.setswitchinterval(interval_s)
        child.kill()
        child.wait()
        child.stdout.close()
    lent = f"{site.transport}_bytes"
    assert after[lent] > before[lent], "nobody was served meanwhile"
    eventually(lambda: site.lender.pinned == 0, "blocks stay pinned")


@pytest.mark.parametrize("transport", ["memory", "tcp"])
def test_a_sealed_pool_lends_what_lies_in_host_alone(transport: str, tmp_path: Path):
    site = NativeSite(transport, NativeLender(40, BLOCK, tmp_path, sealed=True), LentLimits(), tmp_path)
    hashes, blocks = hashes_of(6), blocks_of(6, BLOCK)
    site.lender.put(hashes[: 3 * HASH_BYTES], blocks[:3])
    site.lender.put(hashes[3 * HASH_BYTES :], blocks[3:], Tier.NVME)
    assert read(site.reader(), hashes)[0] == [GOOD] * 3 + [MISSING] * 3
    assert read(site.reader(), hashes[3 * HASH_BYTES :])[0] == [MISSING] * 3
    site.close()


def test_a_block_that_rots_in_nvme_is_evicted_and_the_run_ends_before_it(site: NativeSite):
    hashes, blocks = hashes_of(6), blocks_of(6, BLOCK)
    site.lender.put(hashes, blocks, Tier.NVME)
    assert site.lender.nvme is not None
    bad = bytes(split_hashes(hashes)[4])
    slot = site.lender._places[bad].slot
    path = site.lender.nvme.paths[0]
    data = bytearray(path.read_bytes())
    at = data.find(blocks[4].tobytes())
    assert at > 0, slot
    with path.open("r+b") as file:
        file.seek(at + 7)
        file.write(bytes([data[at + 7] ^ 1]))
    outcomes, rows = read(site.reader(), hashes)
    assert outcomes[:4] == [GOOD] * 4 and GOOD not in outcomes[4:]
    assert np.array_equal(rows[:4], blocks[:4])
    # Twice where the reader, refused one lot, asked once more before the first look at the block ended.
    eventually(lambda: set(site.lender.suspected) == {bad}, "the owner does not evict it")
    eventually(lambda: site.lender.pinned == 0, "blocks stay pinned")


def test_another_users_process_is_not_served(site: NativeSite):
    """Root may enter the socket's folder, and its file is opened to all here: what is left is the look at who
    connects.
    """
    if os.geteuid() != 0:
        pytest.skip("only root can be another user")
    for folder in (Path(site.unix).parent, *Path(site.unix).parent.parents):
        if folder.stat().st_uid == 0 and folder not in (Path("/"), Path("/tmp")):
            folder.chmod(0o755)
    Path(site.unix).chmod(0o666)
    said = _as_nobody(site.unix)
    kind, size = decode_head(said[:HEAD_BYTES])
    assert decode_body(kind, said[HEAD_BYTES : HEAD_BYTES + size]) == Bye("another user's process")


def _as_nobody(path: str) -> bytes:
    script = (
        "import os,socket,sys;os.setgid(65534);os.setuid(65534);s=socket.socket(socket.AF_UNIX);s.settimeout(120);"
        "s.connect(sys.argv[1]);sys.stdout.buffer.write(s.recv(4096))"
    )
    return subprocess.run(
        [sys.executable, "-c", script, path], stdout=subprocess.PIPE, timeout=LONG_S, check=True
    ).stdout


def test_an_idle_connection_uses_no_cpu(site: NativeSite):
    site.lender.put(hashes_of(4), blocks_of(4, BLOCK))
    reader = site.reader()
    assert read(reader, hashes_of(4))[0] == [GOOD] * 4

    def switches() -> dict[str, str]:
        """How often each of the server's threads has run."""
        found = {}
        for task in Path("/proc/self/task").iterdir():
            if (task / "comm").read_text() == "kvbm-lend\n":
                found[task.name] = "".join(re.findall("ctxt_switches:.*", (task / "status").read_text()))
        return found

    def is_quiet() -> bool:
        before = switches()
        assert len(before) >= 2, "one accepts, one serves"
        time.sleep(1.0)
        return switches() == before

    eventually(is_quiet, "a thread runs though nobody asks", state=switches)


def test_a_child_lets_go_of_what_it_inherited(site: NativeSite):
    """So that readers see when the parent is gone, though a child lives on."""
    host, port = site.tcp.split(":")
    with socket.create_connection((host, int(port)), LONG_S) as peer:
        assert peer.recv(8)
        before = sockets()
        pid = os.fork()
        if not pid:
            site.lending.disown()
            os._exit(0 if sockets() == before - 3 else 1)  # two that listen, and a connection
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    site.lender.put(hashes_of(4), blocks_of(4, BLOCK))
    assert read(site.reader(), hashes_of(4))[0] == [GOOD] * 4


def sockets() -> int:
    """How many this process has open."""
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            found += os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")
    return found


def test_a_lease_outlives_the_withdrawal_of_its_namespace(site: NativeSite):
    site.lender.put(hashes_of(4), blocks_of(4, BLOCK))
    reader = site.reader()
    assert read(reader, hashes_of(4))[0] == [GOOD] * 4
    site.lender.withdraw(NAMESPACE)
    site.lender.withdraw(OTHER)
    assert read(reader, hashes_of(4))[0] == [MISSING] * 4
    assert site.lender.pinned == 0
