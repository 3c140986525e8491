"""Owners that lie, stop or die while others read from them: a miss and a word why, never wrong rows, and nothing is
written afterwards.
"""

from __future__ import annotations

import mmap
import os
import random
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvbm.core.ids import HASH_BYTES
from kvbm.core.reads import ReadOutcome
from kvbm.reference.peer_server import ReadableOwner
from kvbm.transport.base import PeerRead, PeerReader
from kvbm.transport.lending import LentLimits
from kvbm.transport.memory import MemoryReader
from kvbm.transport.session import Reply
from kvbm.transport.tcp import TcpReader
from kvbm.transport.wire import (
    ArenaShape,
    Busy,
    Bye,
    Gone,
    GoneReason,
    Grant,
    Hello,
    NamespaceOpened,
    Open,
    Prove,
    encode,
)
from tests.certificates import context_of
from tests.eventually import eventually
from tests.faults.processes.proxy import ProxyHub
from tests.lenders import (
    EPOCH,
    KEY,
    NAMESPACE,
    OWNER,
    READER,
    MemoryLender,
    SocketSite,
    blocks_of,
    hashes_of,
    new_client,
    root_of,
)
from tests.native_owner import tls_of
from tests.servers import free_port

GOOD, MISSING, CORRUPT, FAILED = ReadOutcome
BLOCK = 6_000
LONG_S = 60.0
NOISE = random.Random(3).randbytes(1 << 16)
Said = list[Reply | bytes]
Twist = Callable[[Reply], Said]


class TwistedOwner(ReadableOwner):
    """An owner whose words are changed on their way out."""

    twist: Twist = staticmethod(lambda reply: [reply])

    def _reply(self, connection: socket.socket, reply: Reply) -> None:
        for part in self.twist(reply):
            if isinstance(part, bytes):
                connection.sendall(part)
            else:
                super()._reply(connection, part)
        if reply.lease:
            self._leases.end(reply.lease)


class LyingSite(SocketSite):
    """A site whose owner is twisted."""

    def start(self) -> None:
        super().start()
        self.owner.__class__ = TwistedOwner

    def says(self, twist: Twist) -> None:
        self.owner.twist = twist  # type: ignore[attr-defined]


class SecuredSite(LyingSite):
    """Who stands in front of its owner speaks TLS; what comes through that is as twisted as before."""

    def __init__(self, transport: str, lender: MemoryLender, limits: LentLimits, folder: Path, *more: float) -> None:
        super().__init__(transport, lender, limits, folder, *more)
        self.tls, self._hub = tls_of(folder), ProxyHub()
        port = int(self.tcp.rpartition(":")[2])
        self._front = self._hub.open(port, tls=context_of(folder, ssl.Purpose.CLIENT_AUTH))

    def reader(self, **changes: Any) -> PeerReader:
        direct, self.tcp = self.tcp, f"127.0.0.1:{self._front.port}"
        try:
            return super().reader(**changes)
        finally:
            self.tcp = direct

    def close(self) -> None:
        super().close()
        self._hub.close()


BYTES = ["tcp", "tcp under TLS"]  # whose owner sends all bytes


@pytest.fixture(params=["memory", *BYTES])
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LyingSite]:
    transport, _, has_tls = request.param.partition(" under ")
    new = SecuredSite if has_tls else LyingSite
    site = new(transport, MemoryLender(20, BLOCK), LentLimits(lease_s=LONG_S), tmp_path, LONG_S)
    site.lender.put(hashes_of(8), blocks_of(8, BLOCK))
    yield site
    site.close()


def read(reader: PeerReader, deadline_s: float = LONG_S) -> tuple[PeerRead, np.ndarray]:
    rows = np.full((8, BLOCK), 0xA5, dtype=np.uint8)
    return reader.read(NAMESPACE, hashes_of(8), rows, None, deadline_s), rows


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def on(kind: type, change: Callable[..., Said]) -> Twist:
    """Changes replies of one kind."""
    return lambda reply: change(reply) if isinstance(reply.message, kind) else [reply]


def grant(**changes: object) -> Twist:
    return on(Grant, lambda reply: [reply._replace(message=reply.message._replace(**changes))])


def more_blocks(reply: Reply) -> Said:
    said = reply.message
    message = said._replace(tiers=said.tiers * 2, slots=said.slots * 2, checksums=said.checksums * 2)
    return [reply._replace(message=message, rows=[*reply.rows, *reply.rows])]


LIES: dict[str, tuple[Twist, str]] = {
    "more blocks than were asked for": (on(Grant, more_blocks), "16 blocks of 8"),
    "another request": (grant(request=99), "request 99 is answered"),
    "busy with another request": (on(Grant, lambda reply: [Reply(Busy(99, 1))]), "request 99 is answered"),
    "another handle": (
        on(NamespaceOpened, lambda reply: [Reply(reply.message._replace(handle=9))]),
        "handle 9, not 0",
    ),
    "blocks of another size": (
        on(NamespaceOpened, lambda reply: [Reply(reply.message._replace(block_bytes=BLOCK + 1))]),
        f"its blocks have {BLOCK + 1} bytes",
    ),
    "a message of another kind": (
        on(Grant, lambda reply: [Reply(NamespaceOpened(0, True, BLOCK))]),
        "kind 4 where GRANT",
    ),
    "a reader's message": (on(Grant, lambda reply: [Reply(Open(0, bytes(16), bytes(32)))]), "kind 3 where GRANT"),
    "a hello again": (on(Grant, lambda reply: [Reply(Hello(bytes(32), 0, 3, 0, "a"))]), "kind 1 where GRANT"),
    "garbage": (on(Grant, lambda reply: [b"\xff" * 200]), "version 255"),
    "4 GiB announced": (on(Grant, lambda reply: [b"\xff\xff\xff\xff\x01\x07\0\0"]), "4294967295 bytes are announced"),
    "another version": (on(Grant, lambda reply: [b"\x0c\0\0\0\x02\x08\0\0" + bytes(8)]), "version 2"),
    "memory that never came": (
        on(Grant, lambda reply: [Reply(reply.message._replace(lease=5, lease_ms=1000))]),
        "memory",
    ),
    "a descriptor that did not come": (on(Grant, lambda reply: [Reply(ArenaShape(1 << 20, 10, BLOCK))]), "ARENA"),
    "a word before it hangs up": (on(Grant, lambda reply: [Reply(Bye("no more of this"))]), "no more of this"),
    "it is closing": (on(Grant, lambda reply: [Reply(Gone(reply.message.request, GoneReason.CLOSING))]), "closing"),
    "it is fenced": (on(Grant, lambda reply: [Reply(Gone(reply.message.request, GoneReason.FENCED))]), "fenced"),
    "a namespace that is never open": (
        on(Grant, lambda reply: [Reply(Gone(reply.message.request, GoneReason.NOT_OPENED))]),
        "closed the namespace",
    ),
}


@pytest.mark.parametrize("what", LIES)
def test_a_reader_believes_no_lie_and_says_which_it_was(site: LyingSite, what: str) -> None:
    twist, words = LIES[what]
    if what == "memory that never came" and site.transport == "memory":
        twist = lambda reply: [] if isinstance(reply.message, ArenaShape) else [reply]  # noqa: E731
    site.says(twist)
    reader = site.reader()
    before = open_descriptors()
    for _ in range(3):
        found, rows = read(reader)
        assert found.result.outcomes == [FAILED] * 8
        assert words in found.trouble
        assert (rows == 0xA5).all()
    site.says(lambda reply: [reply])
    found, rows = read(reader)
    assert found.result.outcomes == [GOOD] * 8
    assert np.array_equal(rows, blocks_of(8, BLOCK))
    assert found.trouble == ""
    kept = 5 if site.tls is None else 9  # with those of who speaks TLS for the owner
    eventually(lambda: open_descriptors() <= before + kept, "descriptors are left over")


def test_bytes_that_were_flipped_on_their_way_are_a_miss(site: LyingSite) -> None:
    def flipped(reply: Reply) -> Said:
        sums = bytearray(reply.message.checksums)
        sums[4 * 3] ^= 1
        return [reply._replace(message=reply.message._replace(checksums=bytes(sums)))]

    site.says(on(Grant, flipped))
    found, rows = read(site.reader())
    assert found.result.outcomes == [CORRUPT if at == 3 else GOOD for at in range(8)]
    assert np.array_equal(rows[[0, 1, 2, 4, 5, 6, 7]], blocks_of(8, BLOCK)[[0, 1, 2, 4, 5, 6, 7]])
    eventually(lambda: site.lender.suspected == [hashes_of(8)[HASH_BYTES * 3 : HASH_BYTES * 4]])


@pytest.mark.parametrize("site", BYTES, indirect=True)
def test_bytes_that_end_too_soon_are_a_miss(site: LyingSite) -> None:
    site.says(on(Grant, lambda reply: [reply._replace(rows=()), bytes(100), Reply(Bye("that is all"))]))
    found, _ = read(site.reader(), deadline_s=0.5)
    assert GOOD not in found.result.outcomes
    assert found.trouble


@pytest.mark.parametrize("site", BYTES, indirect=True)
def test_bytes_without_end_are_read_no_further_than_was_granted(site: LyingSite) -> None:
    site.says(on(Grant, lambda reply: [reply, NOISE]))
    reader = site.reader()
    found, rows = read(reader)
    assert found.result.outcomes == [GOOD] * 8
    assert np.array_equal(rows, blocks_of(8, BLOCK))
    for _ in range(3):  # what lies behind is taken for no answer
        found, rows = read(reader)
        assert found.result.outcomes in ([GOOD] * 8, [FAILED] * 8)
        assert found.result.outcomes[0] is FAILED or np.array_equal(rows, blocks_of(8, BLOCK))


@pytest.mark.parametrize("site", ["memory"], indirect=True)
@pytest.mark.parametrize("slots", [2**32 - 1, 20])
def test_a_slot_outside_of_the_memory_is_not_read(site: LyingSite, slots: int) -> None:
    site.says(grant(slots=np.full(8, slots, dtype="<u4").tobytes()))
    found, rows = read(site.reader())
    assert found.result.outcomes == [FAILED] * 8
    assert f"slot {slots} of 20" in found.trouble
    assert (rows == 0xA5).all()


@pytest.mark.parametrize("site", ["memory"], indirect=True)
def test_memory_that_could_be_shortened_or_is_too_small_is_not_mapped(site: LyingSite) -> None:
    size = 20 * BLOCK // mmap.PAGESIZE * mmap.PAGESIZE + mmap.PAGESIZE
    unsealed = os.memfd_create("unsealed")
    os.truncate(unsealed, size)
    _, shape = site.lender.memory
    true_memory = site.lender._fd
    try:
        for fd, said, words in (
            (unsealed, shape, "shortened"),
            (true_memory, shape._replace(bytes=1 << 50), "are said to be there"),
            (os.open("/dev/null", os.O_RDONLY), shape, "shortened"),
            (true_memory, shape._replace(slots=2, stride=BLOCK - 1), f"slots of {BLOCK - 1}"),
        ):
            site.lender._fd, site.lender._shape = fd, said
            found, rows = read(site.reader())
            assert found.result.outcomes == [FAILED] * 8
            assert words in found.trouble
            assert (rows == 0xA5).all()
    finally:
        site.lender._fd, site.lender._shape = true_memory, shape
        os.close(unsealed)


# -- before they begin -------------------------------------------------------------------------------------------------


class Door:
    """A listener whose one answer to whoever comes is a function."""

    def __init__(self, transport: str, folder: Path, answer: Callable[[socket.socket], None]) -> None:
        self.transport, self.unix = transport, str(folder / "door.sock")
        if transport == "tcp":
            self.listener = socket.create_server(("127.0.0.1", 0))
        else:
            self.listener = socket.socket(socket.AF_UNIX)
            self.listener.bind(self.unix)
            self.listener.listen(8)
        self._answer = answer
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            try:
                self._answer(connection)
            except OSError:
                pass  # the reader has left
            connection.close()

    def reader(self) -> PeerReader:
        if self.transport == "memory":
            return MemoryReader(new_client, self.unix, READER, OWNER, root_of)
        tcp = f"127.0.0.1:{self.listener.getsockname()[1]}"
        return TcpReader(new_client, tcp, READER, OWNER, root_of, KEY)

    def close(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self.listener.close()


def until_it_leaves(connection: socket.socket) -> None:
    while connection.recv(1 << 16):
        pass


def mirror(connection: socket.socket) -> None:
    """Sends back what is said to it."""
    while data := connection.recv(1 << 16):
        connection.sendall(data)


def says(*words: bytes) -> Callable[[socket.socket], None]:
    def answer(connection: socket.socket) -> None:
        for word in words:
            connection.sendall(word)
        until_it_leaves(connection)

    return answer


def hello(transports: int = 3, flags: int = 1, instance: str = OWNER) -> bytes:
    return encode(Hello(bytes(32), EPOCH, transports, flags, instance))


def endless(connection: socket.socket) -> None:
    connection.sendall(hello())
    while True:
        connection.sendall(encode(Busy(1, 1)) * 1000)


DOORS: dict[
    str, tuple[Callable[[socket.socket], None], str, str]
] = {  # what is said, to whom, what the reader says of it
    "hangs up": (lambda connection: None, "both", ""),
    "no kvbm": (says(b"HTTP/1.1 400 Bad Request\r\n\r\n"), "both", "version 47"),
    "mirror": (mirror, "both", ""),
    "says nothing": (until_it_leaves, "both", "in time"),
    "half a hello": (says(hello()[:20]), "both", "in time"),
    "another instance": (says(hello(instance="b")), "both", "another instance"),
    "another transport": (says(hello(transports=0)), "both", "does not lend"),
    "no key asked": (says(hello(flags=0)), "tcp", "asks for no key"),
    "a wrong proof": (says(hello(), encode(Prove(bytes(32)))), "tcp", "does not have the key"),
    "a key over a unix socket": (says(hello()), "memory", "this instance has none"),
    "a question": (says(hello(), encode(Gone(1, GoneReason.NOT_HELD))), "tcp", "kind 9 where PROVE"),
    "endless": (endless, "both", ""),
    "busy": (says(encode(Bye("as many connections as there may be"))), "both", "as many connections"),
}


@pytest.mark.parametrize("transport", ["memory", "tcp"])
@pytest.mark.parametrize("what", DOORS)
def test_whoever_does_not_prove_to_be_the_owner_is_not_read_from(transport: str, what: str, tmp_path: Path) -> None:
    answer, whom, words = DOORS[what]
    if whom not in ("both", transport):
        return
    door = Door(transport, tmp_path, answer)
    reader = door.reader()
    try:
        before = open_descriptors()
        for _ in range(2):
            found, rows = read(reader, deadline_s=0.5 if words == "in time" else LONG_S)
            assert found.result.outcomes == [FAILED] * 8
            assert words in found.trouble and found.trouble
            assert (rows == 0xA5).all()
        eventually(lambda: open_descriptors() <= before, "descriptors are left over")
    finally:
        reader.close()
        door.close()


def test_an_address_where_nobody_listens_is_a_miss(tmp_path: Path) -> None:
    for reader in (
        MemoryReader(new_client, str(tmp_path / "nobody.sock"), READER, OWNER, root_of),
        MemoryReader(new_client, "x" * 300, READER, OWNER, root_of),
        MemoryReader(new_client, "", READER, OWNER, root_of),
        TcpReader(new_client, "127.0.0.1:1", READER, OWNER, root_of, KEY),
        TcpReader(new_client, "[::1]:1", READER, OWNER, root_of, KEY),
        TcpReader(new_client, "no-such-name.invalid:1", READER, OWNER, root_of, KEY),
    ):
        found, _ = read(reader, deadline_s=5.0)
        assert found.result.outcomes == [FAILED] * 8
        assert found.trouble
        reader.close()


# -- owners that stop, and die -----------------------------------------------------------------------------------------

CHILD = """
import sys, time
from pathlib import Path
from kvbm.transport.lending import LentLimits
from tests.lenders import MemoryLender, SocketSite, blocks_of, hashes_of
lender = MemoryLender(24, 1 << 20)
lender.put(hashes_of(24), blocks_of(24, 1 << 20))
site = SocketSite.__new__(SocketSite)
site.tcp = sys.argv[2]
site.transport, site.lender, site._limits, site._readers = "", lender, LentLimits(lease_s=60.0), []
site._handshake_s = 60.0
site.unix = sys.argv[1]
site.start()
print(site.tcp, flush=True)
time.sleep(600)
"""


class Child:
    """An owner in a process of its own."""

    def __init__(self, folder: Path, tcp: str = "127.0.0.1:0") -> None:
        self.unix = str(folder / "child.sock")
        self._process = subprocess.Popen(
            [sys.executable, "-c", CHILD, self.unix, tcp],
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        assert self._process.stdout
        self.tcp = self._process.stdout.readline().strip()

    def reader(self, transport: str) -> PeerReader:
        if transport == "memory":
            return MemoryReader(new_client, self.unix, READER, OWNER, root_of)
        return TcpReader(new_client, self.tcp, READER, OWNER, root_of, KEY)

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


def read_large(reader: PeerReader, rows: np.ndarray, deadline_s: float) -> PeerRead:
    return reader.read(NAMESPACE, hashes_of(24), rows, None, deadline_s)


@pytest.mark.parametrize("transport", ["memory", "tcp"])
def test_an_owner_that_is_killed_while_others_read_is_a_miss(transport: str, tmp_path: Path) -> None:
    blocks = blocks_of(24, 1 << 20)
    rng = random.Random(1)
    child = Child(tmp_path, f"127.0.0.1:{free_port()}")
    reader = child.reader(transport)
    try:
        for _ in range(2):
            rows = np.zeros_like(blocks)
            assert read_large(reader, rows, LONG_S).result.outcomes == [GOOD] * 24
            assert np.array_equal(rows, blocks)
            killer = threading.Timer(rng.random() * 0.02, child.kill)
            killer.start()
            while True:
                rows[:] = 0
                found = read_large(reader, rows, LONG_S)
                outcomes = found.result.outcomes
                assert set(outcomes) <= {GOOD, FAILED}
                good = [at for at, outcome in enumerate(outcomes) if outcome is GOOD]
                assert np.array_equal(rows[good], blocks[good])
                if FAILED in outcomes:
                    assert found.trouble
                    break
            killer.join()
            child = Child(tmp_path, child.tcp)
    finally:
        reader.close()
        child.kill()


@pytest.mark.parametrize("transport", ["memory", "tcp"])
def test_an_owner_that_stops_answering_is_a_miss_at_the_deadline_and_nothing_is_written_later(
    transport: str, tmp_path: Path
) -> None:
    blocks = blocks_of(24, 1 << 20)
    child = Child(tmp_path)
    reader = child.reader(transport)
    try:
        rows = np.zeros_like(blocks)
        assert read_large(reader, rows, LONG_S).result.outcomes == [GOOD] * 24
        for pause_s in (0.0, 0.002, 0.005):
            stopper = threading.Timer(pause_s, child.signal, (signal.SIGSTOP,))
            stopper.start()
            while (found := read_large(reader, rows, 0.3)).result.outcomes == [GOOD] * 24:
                pass
            stopper.join()
            assert set(found.result.outcomes) <= {GOOD, FAILED}
            assert found.trouble
            before = rows.copy()
            child.signal(signal.SIGCONT)
            again = eventually(lambda: read_large(reader, np.zeros_like(blocks), LONG_S), "it is not read from again")
            assert again.result.outcomes == [GOOD] * 24
            assert np.array_equal(rows, before)
    finally:
        reader.close()
        child.kill()


READING_CHILD = """
import sys
import numpy as np
from kvbm.transport.memory import MemoryReader
from kvbm.transport.tcp import TcpReader
from tests.lenders import KEY, NAMESPACE, OWNER, READER, hashes_of, new_client, root_of
if sys.argv[1] == "memory":
    reader = MemoryReader(new_client, sys.argv[2], READER, OWNER, root_of)
else:
    reader = TcpReader(new_client, sys.argv[2], READER, OWNER, root_of, KEY)
rows = np.zeros((24, 1 << 20), dtype=np.uint8)
while True:
    print(reader.read(NAMESPACE, hashes_of(24), rows, None, 60.0).trouble, flush=True)
"""


@pytest.mark.parametrize("transport", ["memory", "tcp"])
def test_a_reader_that_is_killed_holds_no_blocks(transport: str, tmp_path: Path) -> None:
    site = SocketSite(transport, MemoryLender(24, 1 << 20), LentLimits(lease_s=1000.0), tmp_path)
    rng = random.Random(2)
    try:
        site.lender.put(hashes_of(24), blocks_of(24, 1 << 20))
        for _ in range(2):
            address = site.unix if transport == "memory" else site.tcp
            child = subprocess.Popen(
                [sys.executable, "-c", READING_CHILD, transport, address],
                stdout=subprocess.PIPE,
                text=True,
                cwd=Path(__file__).parents[2],
            )
            assert child.stdout
            assert child.stdout.readline() == "\n"
            time.sleep(rng.random() * 0.02)
            child.kill()
            child.wait()
            child.stdout.close()
            eventually(lambda: site.lender.pinned == 0, "blocks stay pinned")
    finally:
        site.close()


FORKING = """
import os, sys, threading
import numpy as np
from kvbm.transport.memory import MemoryReader
from tests.lenders import NAMESPACE, OWNER, READER, hashes_of, new_client, root_of
reader = MemoryReader(new_client, sys.argv[1], READER, OWNER, root_of)
rows = np.zeros((24, 1 << 20), dtype=np.uint8)
read = lambda: reader.read(NAMESPACE, hashes_of(24), rows, None, 60.0).trouble
assert read() == ""
thread = threading.Thread(target=lambda: [read() for _ in range(20)])
thread.start()
child = os.fork()
if not child:
    words = read()
    del reader
    os._exit(0 if "forked" in words else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
thread.join()
assert read() == ""
"""


def test_a_forked_child_leaves_its_parents_connections_alone(tmp_path: Path) -> None:
    site = SocketSite("memory", MemoryLender(24, 1 << 20), LentLimits(lease_s=LONG_S), tmp_path)
    try:
        site.lender.put(hashes_of(24), blocks_of(24, 1 << 20))
        command = [sys.executable, "-c", FORKING, site.unix]
        assert subprocess.run(command, cwd=Path(__file__).parents[2], check=False, timeout=120).returncode == 0
    finally:
        site.close()
