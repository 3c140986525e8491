"""Strangers at the door of an owner that lends blocks: they are told why and hung up on, and nobody else notices."""

from __future__ import annotations

import os
import signal
import socket
import stat
import struct
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from kvbm import _native
from kvbm.core.errors import ConfigError, KvbmError
from kvbm.core.lent import LentCounts
from kvbm.core.reads import ReadOutcome
from kvbm.reference.peer_server import ReadableOwner
from kvbm.transport.base import PeerReader
from kvbm.transport.lending import LentLimits
from kvbm.transport.wire import (
    Ask,
    Busy,
    End,
    Gone,
    GoneReason,
    Grant,
    GrantTransport,
    Hello,
    Message,
    NamespaceOpened,
    Prove,
    ProvingSide,
    encode,
    key_proof,
)
from tests.eventually import eventually
from tests.lenders import EPOCH, KEY, NAMESPACE, OWNER, MemoryLender, SocketSite, blocks_of, hashes_of
from tests.native_owner import NativeLender, NativeSite, tls_of
from tests.strangers import Stranger

BLOCK = 5_000
WAIT_S = 60.0


MEMORY = ("memory", "native memory")  # by a readable and by a native owner
TCP = ("tcp", "native tcp", "native tcp under TLS")


def empty_site(kind: str, folder: Path, limits: LentLimits, slots: int = 20, block_bytes: int = BLOCK) -> SocketSite:
    """An owner that has nothing yet."""
    transport, _, has_tls = kind.removeprefix("native ").partition(" under ")
    if not kind.startswith("native"):
        return SocketSite(transport, MemoryLender(slots, block_bytes), limits, folder)
    options = {"tls": tls_of(folder)} if has_tls else {}
    return NativeSite(transport, NativeLender(slots, block_bytes, folder), limits, folder, **options)


def site_of(kind: str, folder: Path, lease_s: float) -> SocketSite:
    """An owner that lends eight blocks."""
    site = empty_site(kind, folder, LentLimits(lease_s=lease_s))
    site.lender.put(hashes_of(8), blocks_of(8, BLOCK))
    return site


@pytest.fixture(params=[*MEMORY, *TCP])
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SocketSite]:
    site = site_of(request.param, tmp_path, WAIT_S)
    yield site
    site.close()


def others_are_served(site: SocketSite) -> None:
    eventually(lambda: site.lender.pinned == 0, "blocks stay pinned")
    rows = np.zeros((8, BLOCK), dtype=np.uint8)
    found = site.reader().read(NAMESPACE, hashes_of(8), rows, None, WAIT_S)
    assert found.result.outcomes == [ReadOutcome.GOOD] * 8
    assert np.array_equal(rows, blocks_of(8, BLOCK))


def head(length: int, version: int = 1, kind: int = 1, zero: int = 0) -> bytes:
    return struct.pack("<IBBH", length, version, kind, zero)


BEFORE_HELLO: dict[str, tuple[bytes, str]] = {
    "garbage": (b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", "version 47"),
    "another version": (head(48, version=2), "version 2"),
    "no kind": (head(48, kind=99), "kind 99"),
    "4 GiB announced": (head(0xFFFFFFFF), "4294967295 bytes are announced"),
    "1 MiB announced": (head(1 << 20), "bytes are announced"),
    "a question at once": (encode(Ask(1, 0, GrantTransport.TCP, 1000, hashes_of(8))), "a ASK is not awaited"),
    "an owner's word": (encode(Gone(1, GoneReason.NOT_HELD)), "a GONE is not awaited"),
    "half a message": (encode(Hello(bytes(32), 0, 3, 0, "a"))[:-1], "half a message"),
    "half a head": (head(48)[:3], "half a message"),
    "nothing": (b"", "half a message"),
}


@pytest.mark.parametrize("what", BEFORE_HELLO)
def test_who_does_not_begin_as_a_reader_does_is_hung_up_on(site: SocketSite, what: str) -> None:
    said, words = BEFORE_HELLO[what]
    stranger = Stranger(site)
    stranger.say(said)
    assert words in stranger.last_words()
    others_are_served(site)


AFTER_OPEN: dict[str, tuple[Callable[[], bytes], str]] = {
    "hello again": (lambda: encode(Hello(bytes(32), 0, 3, 0, "a")), "HELLO is not awaited"),
    "a proof again": (lambda: encode(Prove(bytes(32))), "PROVE is not awaited"),
    "more hashes than there may be": (lambda: head(20 + 16 * 8193 + 4, kind=6), "bytes are announced"),
    "counts that disagree": (
        lambda: head(56, kind=6) + struct.pack("<IIB3xII", 1, 0, 1, 1000, 8192) + bytes(32),
        "131072 bytes more are due",
    ),
    "a handle there cannot be": (
        lambda: head(40, kind=6) + struct.pack("<IIB3xII", 1, 64, 1, 1000, 1) + bytes(16),
        "ASK",
    ),
    "a grant": (lambda: encode(Grant(1, 1, 1, b"\1", bytes(4), bytes(4))), "GRANT is not awaited"),
}


@pytest.mark.parametrize("what", AFTER_OPEN)
def test_a_reader_that_leaves_the_protocol_is_hung_up_on(site: SocketSite, what: str) -> None:
    said, words = AFTER_OPEN[what]
    stranger = Stranger(site)
    stranger.open()
    stranger.say(
        Ask(1, 0, GrantTransport.TCP if stranger.is_tcp else GrantTransport.MEMORY, 1000, hashes_of(8)), said()
    )
    assert words in stranger.last_words()
    others_are_served(site)


@pytest.mark.parametrize("transport", [GrantTransport.RDMA, GrantTransport.NIXL])
def test_slots_are_not_granted_to_who_was_not_let_into_host(site: SocketSite, transport: GrantTransport) -> None:
    stranger = Stranger(site)
    stranger.open()
    stranger.say(Ask(1, 0, transport, 1000, hashes_of(8)))
    assert stranger.last_words() == "slots are asked for by who cannot read them"
    others_are_served(site)


def test_a_reader_that_stops_in_the_middle_of_a_message_is_hung_up_on(site: SocketSite) -> None:
    stranger = Stranger(site)
    stranger.open()
    stranger.say(encode(Ask(1, 0, GrantTransport.TCP, 1000, hashes_of(8)))[:-5])
    assert "half a message" in stranger.last_words()
    others_are_served(site)


@pytest.mark.parametrize("site", TCP, indirect=True)
def test_a_proof_counts_on_its_own_connection_alone(site: SocketSite) -> None:
    heard = Stranger(site)
    heard.open()
    proof = key_proof(KEY, ProvingSide.READER, heard.nonce, heard.owner.nonce, OWNER)
    again = Stranger(site)
    again.say(Hello(heard.nonce, 0, 3, 0, "stranger"), Prove(proof))
    assert again.last_words() == "the key is another"
    mirror = Stranger(site)  # an owner's proof is no reader's
    mirror.hello()
    mirror.say(Prove(key_proof(KEY, ProvingSide.OWNER, mirror.nonce, mirror.owner.nonce, OWNER)))
    assert mirror.last_words() == "the key is another"
    skipping = Stranger(site)
    skipping.hello()
    skipping.say(skipping.opening())
    assert "OPEN is not awaited" in skipping.last_words()
    others_are_served(site)


def test_a_namespaces_proof_counts_on_its_own_connection_alone(site: SocketSite) -> None:
    heard = Stranger(site)
    heard.open()
    again = Stranger(site)
    again.prove()
    again.say(heard.opening())
    assert again.heard() == NamespaceOpened(0, False, 0)
    again.say(Ask(1, 0, GrantTransport.TCP, 1000, hashes_of(1)))
    assert again.heard() == Gone(1, GoneReason.NOT_OPENED)
    others_are_served(site)


def test_what_a_reader_proves_to_one_owner_counts_at_no_other(site: SocketSite) -> None:
    """One that lends, has the key and lacks the root says this owner's nonce to a reader as its own, and hands on what
    that proves.
    """
    relay = Stranger(site)
    relay.prove()
    relay.say(relay.opening(owner="relay"))
    assert relay.heard() == NamespaceOpened(0, False, 0)
    relay.say(Ask(1, 0, GrantTransport.TCP, 1000, hashes_of(1)))
    assert relay.heard() == Gone(1, GoneReason.NOT_OPENED)
    others_are_served(site)


@pytest.mark.parametrize("site", MEMORY, indirect=True)
def test_leases_end_by_word_and_with_their_connection_alone(site: SocketSite) -> None:
    stranger, thief = Stranger(site), Stranger(site)
    stranger.open()
    thief.open()
    stranger.say(Ask(1, 0, GrantTransport.MEMORY, round(1000 * WAIT_S), hashes_of(8)))
    stranger.heard()  # ARENA
    grant = stranger.heard()
    assert isinstance(grant, Grant)
    assert site.lender.pinned == 8
    thief.say(End(grant.lease, 0, hashes_of(8)), Ask(2, 0, GrantTransport.TCP, 1000, hashes_of(1, 9)))
    assert thief.heard() == Gone(2, GoneReason.NOT_HELD)
    assert site.lender.pinned == 8
    assert site.lender.suspected == []
    stranger.say(End(grant.lease, 0, b""))
    eventually(lambda: site.lender.pinned == 0, "its word does not end a lease")
    thief.say(Ask(3, 0, GrantTransport.MEMORY, round(1000 * WAIT_S), hashes_of(8)))
    thief.heard()
    assert isinstance(thief.heard(), Grant)
    assert site.lender.pinned == 8
    thief.socket.close()
    eventually(lambda: site.lender.pinned == 0, "a lost connection does not end a lease")


@pytest.mark.parametrize("kind", MEMORY)
def test_leases_end_by_time(kind: str, tmp_path: Path) -> None:
    site = site_of(kind, tmp_path, lease_s=0.5)
    try:
        stranger = Stranger(site)
        stranger.open()
        stranger.say(Ask(1, 0, GrantTransport.MEMORY, round(1000 * WAIT_S), hashes_of(8)))
        stranger.heard()  # ARENA
        assert isinstance(stranger.heard(), Grant)
        eventually(lambda: site.lender.pinned == 0, "time does not end a lease")
    finally:
        site.close()


@pytest.mark.parametrize("kind", TCP)
def test_a_reader_that_takes_no_bytes_holds_nothing_up(kind: str, tmp_path: Path) -> None:
    site = empty_site(kind, tmp_path, LentLimits(), block_bytes=1 << 20)
    try:
        site.lender.put(hashes_of(20), blocks_of(20, 1 << 20))
        stranger = Stranger(site)
        stranger.prove()
        stranger.say(stranger.opening(), Ask(1, 0, GrantTransport.TCP, 300, hashes_of(20)))
        assert isinstance(stranger.heard(), NamespaceOpened)
        grant = stranger.heard()
        assert isinstance(grant, Grant) and len(grant.tiers) == 20  # and their bytes follow, which it does not take
        eventually(lambda: site.lender.pinned == 0, "its blocks stay pinned after its time")
    finally:
        site.close()


@pytest.mark.parametrize("kind", TCP)
def test_a_reader_that_hangs_up_with_its_window_shut_is_gone_at_once(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that is closed in the middle of a read, and takes what has come before it lets go: no reset is sent, and
    the system acknowledges its owner's probes in its stead until it forgets the connection, a minute later.
    """
    monkeypatch.setattr(_native, "LendingServer", partial(_native.LendingServer, most_send_ms=240_000))
    site = empty_site(kind, tmp_path, LentLimits(), block_bytes=1 << 20)
    try:
        site.lender.put(hashes_of(20), blocks_of(20, 1 << 20))
        stranger = Stranger(site)
        stranger.open()
        stranger.say(Ask(1, 0, GrantTransport.TCP, 240_000, hashes_of(20)))
        with socket.socket(fileno=os.dup(stranger.socket.fileno())) as plain:  # TLS need not be understood for this
            eventually(lambda: probes_a_window(plain), "the owner finds room to send")
            plain.shutdown(socket.SHUT_RDWR)
            plain.settimeout(WAIT_S)
            while plain.recv(1 << 20):
                pass
            stranger.socket.close()
        eventually(lambda: site.lender.pinned == 0, "blocks stay pinned for who has hung up")
    finally:
        site.close()


def probes_a_window(reader: socket.socket) -> bool:
    """Whether the other end of this connection waits for its window to open (proc_pid_net(5): timer 4)."""
    ours, theirs = (f":{end[1]:04X}" for end in (reader.getsockname(), reader.getpeername()))
    lines = (line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:])
    return any((line[1][-5:], line[2][-5:], line[5][:2]) == (theirs, ours, "04") and line[3] == "01" for line in lines)


def test_a_reader_that_takes_bytes_drop_by_drop_holds_nothing_up(tmp_path: Path) -> None:
    """Over a unix socket too, where the kernel's own time for sending begins anew with each piece."""
    total = 20 << 20
    site = NativeSite("memory", NativeLender(20, 1 << 20, tmp_path, nvme=False), LentLimits(), tmp_path)
    try:
        site.lender.put(hashes_of(20), blocks_of(20, 1 << 20))
        stranger = Stranger(site)
        stranger.prove()
        stranger.say(stranger.opening(), Ask(1, 0, GrantTransport.TCP, 300, hashes_of(20)))
        taken = 0
        while taken < total and (piece := stranger.socket.recv(1 << 14)):
            taken += len(piece)
            time.sleep(0.005)
        assert taken < total
        eventually(lambda: site.lender.pinned == 0, "its blocks stay pinned after its time")
    finally:
        site.close()


@pytest.mark.parametrize("site", MEMORY, indirect=True)
def test_memory_is_not_for_who_is_not_on_this_machine(site: SocketSite) -> None:
    far = SocketSite.__new__(SocketSite)
    far.transport, far.tcp = "tcp", site.tcp
    stranger = Stranger(far)
    stranger.prove()
    stranger.say(stranger.opening(), Ask(1, 0, GrantTransport.MEMORY, 1000, hashes_of(1)))
    assert "memory is asked for" in stranger.last_words()
    others_are_served(site)


@pytest.mark.parametrize("transport", [*MEMORY, *TCP])
def test_an_owner_that_lends_enough_says_when_to_come_again(transport: str, tmp_path: Path) -> None:
    site = empty_site(transport, tmp_path, LentLimits(lease_s=WAIT_S, blocks=4, retry_s=0.25), slots=6)
    try:
        site.lender.put(hashes_of(6), blocks_of(6, BLOCK))
        near = SocketSite.__new__(SocketSite)
        near.transport, near.unix = "memory", site.unix
        holder, reader = Stranger(near), site.reader()
        holder.open()
        holder.say(Ask(1, 0, GrantTransport.MEMORY, round(1000 * WAIT_S), hashes_of(6)))
        holder.heard()  # ARENA
        grant = holder.heard()
        assert isinstance(grant, Grant) and len(grant.tiers) == 4
        rows = np.full((6, BLOCK), 0xA5, dtype=np.uint8)
        found = reader.read(NAMESPACE, hashes_of(6), rows, None, WAIT_S)
        assert (found.result.outcomes, found.retry_s) == ([ReadOutcome.FAILED] * 6, 0.25)
        assert found.trouble == "it is busy"
        assert (rows == 0xA5).all()
        holder.say(End(grant.lease, 0, b""))
        eventually(lambda: site.lender.pinned == 0, "its word does not end a lease")
        found = reader.read(NAMESPACE, hashes_of(6), rows, None, WAIT_S)
        assert found.result.outcomes == [ReadOutcome.GOOD] * 6
        assert np.array_equal(rows, blocks_of(6, BLOCK))
    finally:
        site.close()


@pytest.mark.parametrize("native", [False, True])
def test_there_are_only_so_many_connections(native: bool, tmp_path: Path) -> None:
    site: SocketSite
    if native:
        site = NativeSite(
            "memory", NativeLender(2, BLOCK, tmp_path), LentLimits(), tmp_path, connections=3, handshake_s=WAIT_S
        )
    else:
        site = SocketSite("memory", MemoryLender(2, BLOCK), LentLimits(), tmp_path)
        site.stop()
        site.owner = ReadableOwner(site.leases, OWNER, 7, site.unix, connections=3, handshake_s=WAIT_S)
    try:
        held = [Stranger(site) for _ in range(3)]
        with pytest.raises(AssertionError):
            Stranger(site)
        held.pop().socket.close()
        eventually(lambda: _is_welcome(site), "a place does not become free")
    finally:
        site.close()


def test_who_has_proved_nothing_takes_half_of_the_places_at_most(tmp_path: Path) -> None:
    site = NativeSite(
        "tcp", NativeLender(8, BLOCK, tmp_path), LentLimits(), tmp_path, connections=4, handshake_s=WAIT_S
    )
    try:
        site.lender.put(hashes_of(8), blocks_of(8, BLOCK))
        held = [Stranger(site) for _ in range(2)]
        with pytest.raises(AssertionError):
            Stranger(site)
        held[0].prove()
        eventually(lambda: _is_welcome(site), "who has proved itself counts as a stranger")
        assert len(held) == 2
    finally:
        site.close()


@pytest.mark.parametrize("transport", ["memory", "tcp"])
def test_who_is_idle_gives_its_place_to_who_comes(transport: str, tmp_path: Path) -> None:
    site = NativeSite(transport, NativeLender(8, BLOCK, tmp_path), LentLimits(), tmp_path, connections=2)
    try:
        site.lender.put(hashes_of(8), blocks_of(8, BLOCK))
        readers = [site.reader(streams=1) for _ in range(3)]
        rows = np.zeros((8, BLOCK), dtype=np.uint8)

        def is_read(reader: PeerReader) -> bool:
            found = reader.read(NAMESPACE, hashes_of(8), rows, None, WAIT_S)
            return found.result.outcomes == [ReadOutcome.GOOD] * 8

        for _ in range(2):
            for reader in readers:
                eventually(lambda reader=reader: is_read(reader), "an idle connection keeps its place")
    finally:
        site.close()


def test_an_owner_counts_what_it_lends_and_refuses(tmp_path: Path) -> None:
    """Each of its counts is moved by one thing, and by nothing else."""
    limits = LentLimits(lease_s=WAIT_S, blocks=4)
    site = NativeSite("tcp", NativeLender(20, BLOCK, tmp_path), limits, tmp_path, connections=2, handshake_s=WAIT_S)
    near = SocketSite.__new__(SocketSite)
    near.transport, near.unix = "memory", site.unix
    known = site.lending.counts()

    def counted(**more: int) -> None:
        nonlocal known
        known = LentCounts(**{name: getattr(known, name) + more.get(name, 0) for name in LentCounts.__struct_fields__})
        eventually(lambda: site.lending.counts() == known, "it counts otherwise", state=site.lending.counts)

    def asked(by: Stranger, transport: GrantTransport, hashes: bytes, time_left_ms: int = 60_000) -> Message:
        by.say(Ask(1, 0, transport, time_left_ms, hashes))
        return by.heard()

    try:
        assert known == LentCounts()
        site.lender.put(hashes_of(4), blocks_of(4, BLOCK))
        far = Stranger(site)
        counted(accepted=1, connections=1)
        with pytest.raises(AssertionError):  # strangers have half of the places
            Stranger(site)
        counted(accepted=1, crowded=1)
        far.say(Hello(far.nonce, 0, 3, 0, "stranger"), Prove(bytes(32)))
        assert far.last_words() == "the key is another"
        counted(unproved=1, connections=-1)
        far = Stranger(site)
        far.open()
        counted(accepted=1, connections=1)
        far.say(far.opening(1, "another owner"))
        assert far.heard() == NamespaceOpened(1, False, 0)
        counted(unopened=1)
        far.say(Ask(1, 1, GrantTransport.TCP, 1000, hashes_of(1)))
        assert far.heard() == Gone(1, GoneReason.NOT_OPENED)
        counted(not_opened=1)
        assert asked(far, GrantTransport.TCP, hashes_of(1, 9)) == Gone(1, GoneReason.NOT_HELD)
        counted(not_held=1)
        site.lending.fence(True)
        assert asked(far, GrantTransport.TCP, hashes_of(1)) == Gone(1, GoneReason.FENCED)
        site.lending.fence(False)
        counted(fenced=1)
        assert isinstance(asked(far, GrantTransport.TCP, hashes_of(3)), Grant)
        far.exactly(3 * BLOCK)
        counted(tcp_bytes=3 * BLOCK)
        here = Stranger(near)
        here.open()
        assert not isinstance(asked(here, GrantTransport.MEMORY, hashes_of(2), 1), Grant)  # ARENA
        assert isinstance(here.heard(), Grant)
        counted(accepted=1, connections=1, memory_bytes=2 * BLOCK, expired=1)
        assert isinstance(asked(here, GrantTransport.TCP, hashes_of(1)), Grant)
        here.exactly(BLOCK)
        counted(unix_bytes=BLOCK)
        grant = asked(here, GrantTransport.MEMORY, hashes_of(4))
        assert isinstance(grant, Grant)
        counted(memory_bytes=4 * BLOCK, blocks_lent_now=4)
        assert isinstance(asked(far, GrantTransport.TCP, hashes_of(1)), Busy)
        counted(busy=1)
        here.say(End(grant.lease, 0, b""))
        counted(blocks_lent_now=-4)
        site.lender.slot_of(hashes_of(1))[0] ^= 1
        assert isinstance(asked(far, GrantTransport.TCP, hashes_of(1)), Grant)
        far.exactly(BLOCK)
        far.say(End(0, 0, hashes_of(1)))
        counted(tcp_bytes=BLOCK, corrupt_blocks=1)
        here.say(b"\0" * 8)
        assert here.last_words()
        counted(broken=1, connections=-1)
    finally:
        site.close()


def test_who_has_a_lease_keeps_its_place(tmp_path: Path) -> None:
    limits = LentLimits(lease_s=WAIT_S)
    site = NativeSite("memory", NativeLender(2, BLOCK, tmp_path), limits, tmp_path, connections=1)
    try:
        site.lender.put(hashes_of(2), blocks_of(2, BLOCK))
        stranger = Stranger(site)
        stranger.open()
        stranger.say(Ask(1, 0, GrantTransport.MEMORY, round(1000 * WAIT_S), hashes_of(2)))
        stranger.heard()  # ARENA
        grant = stranger.heard()
        assert isinstance(grant, Grant)
        time.sleep(0.3)
        assert not _is_welcome(site)
        stranger.say(End(grant.lease, 0, b""))
        eventually(lambda: _is_welcome(site), "an idle connection keeps its place")
    finally:
        site.close()


def test_an_owners_epoch_is_for_who_has_proved_itself(site: SocketSite) -> None:
    stranger = Stranger(site)
    assert stranger.owner.epoch == (0 if stranger.is_tcp else EPOCH)


def name_of(task: Path) -> str:
    """The name of a thread. It is empty for one that has ended since it was listed."""
    try:
        return (task / "comm").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def test_a_servers_threads_leave_signals_to_others(tmp_path: Path) -> None:
    site = NativeSite("memory", NativeLender(2, BLOCK, tmp_path), LentLimits(), tmp_path)
    try:
        stranger = Stranger(site)  # its thread is there
        lending = [task for task in Path("/proc/self/task").iterdir() if name_of(task) == "kvbm-lend\n"]
        assert len(lending) == 2
        for task in lending:
            blocked = next(line for line in (task / "status").read_text().splitlines() if line.startswith("SigBlk"))
            assert int(blocked.split()[1], 16) >> signal.SIGTERM - 1 & 1
        stranger.socket.close()
    finally:
        site.close()


@pytest.mark.parametrize("transport", ["memory", "tcp"])
def test_a_reader_that_was_closed_is_gone_for_its_owner_while_a_child_lives(transport: str, tmp_path: Path) -> None:
    site = NativeSite(transport, NativeLender(2, BLOCK, tmp_path), LentLimits(), tmp_path)
    try:
        site.lender.put(hashes_of(2), blocks_of(2, BLOCK))
        reader, rows = site.reader(), np.zeros((2, BLOCK), dtype=np.uint8)
        assert reader.read(NAMESPACE, hashes_of(2), rows, None, WAIT_S).result.outcomes == [ReadOutcome.GOOD] * 2
        theirs, ours = os.pipe()
        child = os.fork()
        if not child:
            os.close(ours)
            os.read(theirs, 1)  # until the parent lets go
            os._exit(0)
        os.close(theirs)
        try:
            reader.close()
            eventually(lambda: site.lending.stats()["connections"] == 0, "a forked child keeps a connection")
        finally:
            os.close(ours)
            os.waitpid(child, 0)
    finally:
        site.close()


def _is_welcome(site: SocketSite) -> bool:
    try:
        Stranger(site).socket.close()
    except AssertionError:
        return False
    return True


@pytest.mark.parametrize("site", MEMORY, indirect=True)
def test_the_socket_is_its_users_alone_and_goes_with_its_owner(site: SocketSite) -> None:
    assert stat.S_IMODE(os.stat(site.unix).st_mode) == 0o600
    with pytest.raises((OSError, ConfigError), match="in use"):
        site.start()
    site.stop()
    assert not os.path.exists(site.unix)


def test_blocks_are_not_lent_over_tcp_without_a_key(tmp_path: Path) -> None:
    with pytest.raises(KvbmError, match="key"):
        ReadableOwner(None, OWNER, 7, tcp="127.0.0.1:0")  # type: ignore[arg-type]
