"""Blocks over TCP under TLS: who has a certificate of the instances' CA is served, and nobody else gets a byte or keeps
a place.
"""

from __future__ import annotations

import itertools
import os
import random
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvbm import _native
from kvbm.assembly.peers import peer_tls
from kvbm.config import TransportSettings, load_settings
from kvbm.core.errors import ConfigError
from kvbm.core.reads import ReadOutcome
from kvbm.transport.base import PeerRead, PeerReader
from kvbm.transport.lending import LentLimits
from kvbm.transport.native import PeerTls
from kvbm.transport.wire import HEAD_BYTES, Bye, Hello, decode_body, decode_head, encode
from tests.certificates import Certificate, certify
from tests.eventually import eventually
from tests.extras import needed
from tests.lenders import KEY, NAMESPACE, blocks_of, hashes_of
from tests.native_owner import NativeLender, NativeSite

serialization = needed("cryptography.hazmat.primitives.serialization", "crypto")

BLOCK, COUNT, WAIT_S = 5_000, 8, 60.0
NOISE = random.Random(6)
CONNECTIONS = 4  # of which strangers may have two


class Folder:
    """Certificates in a folder, by the name of who has them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._numbers = itertools.count()
        self.ca, self.other_ca = certify(path, "ca"), certify(path, "other-ca")
        self.good = certify(path, "good", self.ca)

    def tls(self, one: Certificate | None = None, trusted: Certificate | None = None) -> PeerTls:
        one = one or self.good
        return _native.PeerTls(str(one.cert), str(one.key), str((trusted or self.ca).cert))

    def site(self, tls: PeerTls | None, key: bytes = b"", handshake_s: float = WAIT_S) -> NativeSite:
        folder = self.path / f"site-{next(self._numbers)}"
        folder.mkdir()
        lender = NativeLender(20, BLOCK, folder)
        site = NativeSite(
            "tcp",
            lender,
            LentLimits(lease_s=WAIT_S),
            folder,
            connections=CONNECTIONS,
            key=key,
            tls=tls,
            handshake_s=handshake_s,
        )
        site.lender.put(hashes_of(COUNT), blocks_of(COUNT, BLOCK))
        return site


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


@pytest.fixture
def site(request: pytest.FixtureRequest, folder: Folder) -> Iterator[NativeSite]:
    """Its parameter, if any, is for how long it waits for strangers."""
    made = folder.site(folder.tls(), handshake_s=getattr(request, "param", WAIT_S))
    yield made
    made.close()


def read(reader: PeerReader) -> PeerRead:
    """All blocks, or none of them."""
    rows = np.full((COUNT, BLOCK), 0xA5, dtype=np.uint8)
    found = reader.read(NAMESPACE, hashes_of(COUNT), rows, None, WAIT_S)
    is_good = found.result.outcomes == [ReadOutcome.GOOD] * COUNT
    assert np.array_equal(rows, blocks_of(COUNT, BLOCK)) if is_good else (rows == 0xA5).all()
    assert is_good == (not found.trouble)
    return found


def others_are_served(site: NativeSite) -> None:
    assert read(site.reader(key=b"")).trouble == ""


def connected(site: NativeSite) -> socket.socket:
    host, port = site.tcp.split(":")
    return socket.create_connection((host, int(port)), WAIT_S)


def heard(connection: socket.socket) -> bytes:
    """All that comes until the end."""
    said = b""
    try:
        while piece := connection.recv(1 << 16):
            said += piece
    except OSError:
        pass  # an alert, or hung up on
    return said


def test_a_certificate_takes_the_place_of_a_key(site: NativeSite) -> None:
    others_are_served(site)


def test_a_key_that_is_set_is_asked_for_too(folder: Folder, site: NativeSite) -> None:
    assert "asks for no key" in read(site.reader(key=KEY)).trouble
    others_are_served(site)
    both = folder.site(folder.tls(), KEY)
    try:
        assert "this instance has none" in read(both.reader(key=b"")).trouble
        assert "the key is another" in read(both.reader(key=b"x" * 32)).trouble
        assert read(both.reader(key=KEY)).trouble == ""
    finally:
        both.close()


def test_a_reader_of_another_authority_reads_nothing(folder: Folder, site: NativeSite) -> None:
    foreign = certify(folder.path, "foreign", folder.other_ca)
    assert "alert unknown ca" in read(site.reader(key=b"", tls=folder.tls(foreign))).trouble
    assert "its certificate is refused" in read(site.reader(key=b"", tls=folder.tls(trusted=folder.other_ca))).trouble
    others_are_served(site)


def test_a_certificate_whose_time_is_over_counts_for_nothing(folder: Folder, site: NativeSite) -> None:
    over = certify(folder.path, "over", folder.ca, is_over=True)
    assert "alert certificate expired" in read(site.reader(key=b"", tls=folder.tls(over))).trouble
    others_are_served(site)
    old = folder.site(folder.tls(over))
    try:
        assert (
            "its certificate is refused: certificate has expired" in read(old.reader(key=b"", tls=folder.tls())).trouble
        )
    finally:
        old.close()


def test_a_certificate_that_is_renewed_is_shown_without_a_restart(folder: Folder) -> None:
    mine = certify(folder.path, "mine", folder.ca, is_over=True)
    site = folder.site(folder.tls(mine))
    try:
        assert read(site.reader(key=b"", tls=folder.tls())).trouble
        certify(folder.path, "mine", folder.ca)
        assert read(site.reader(key=b"", tls=folder.tls())).trouble == ""
    finally:
        site.close()


def test_who_speaks_plainly_and_who_does_not_are_told_so(folder: Folder, site: NativeSite) -> None:
    assert "it speaks TLS here" in read(site.reader(key=KEY, tls=None)).trouble
    others_are_served(site)
    plain = folder.site(None, KEY)
    try:
        assert "it does not speak TLS" in read(plain.reader(key=KEY, tls=folder.tls())).trouble
        assert read(plain.reader(key=KEY, tls=None)).trouble == ""
    finally:
        plain.close()


def test_a_stranger_without_a_certificate_hears_nothing(folder: Folder, site: NativeSite) -> None:
    context = ssl.create_default_context(cafile=str(folder.ca.cert))
    with connected(site) as plain, context.wrap_socket(plain, server_hostname="127.0.0.1") as secured:
        secured.sendall(encode(Hello(NOISE.randbytes(32), 0, 3, 0, "stranger")))
        assert heard(secured) == b""
    context.load_cert_chain(folder.good.cert, folder.good.key)
    with connected(site) as plain, context.wrap_socket(plain, server_hostname="127.0.0.1") as secured:
        assert secured.version() == "TLSv1.3"
        kind, size = decode_head(secured.recv(HEAD_BYTES))
        assert isinstance(decode_body(kind, secured.recv(size)), Hello)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with connected(site) as plain, pytest.raises(ssl.SSLError):
        context.wrap_socket(plain, server_hostname="127.0.0.1")
    others_are_served(site)


def first_flight(folder: Folder) -> bytes:
    """What a reader sends first."""
    context = ssl.create_default_context(cafile=str(folder.ca.cert))
    sent = ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), sent, server_hostname="127.0.0.1").do_handshake()
    return sent.read()


SILENCES = ["nothing", "half a message", "a whole message", "a record without end"]


def silent_strangers(folder: Folder, site: NativeSite, said: str) -> list[socket.socket]:
    """As many as may be, who have said so much."""
    first = first_flight(folder)
    begun = {"nothing": b"", "half a message": first[:-9], "a whole message": first, "a record without end": first[:3]}
    silent = [connected(site) for _ in range(2)]
    for one in silent:
        one.sendall(begun[said])
    return silent


@pytest.mark.parametrize("said", SILENCES)
def test_silent_strangers_leave_no_place_for_others(folder: Folder, site: NativeSite, said: str) -> None:
    silent = silent_strangers(folder, site, said)
    eventually(lambda: site.lending.stats()["connections"] == 2, "strangers are not there")
    with connected(site) as third:
        assert b"as many connections as there may be" in heard(third)
    for one in silent:
        one.close()
    eventually(lambda: site.lending.stats()["connections"] == 0, "who has left keeps a place")
    others_are_served(site)


@pytest.mark.parametrize("said", SILENCES)
def test_silence_gives_a_place_back(folder: Folder, said: str) -> None:
    site = folder.site(folder.tls(), handshake_s=1.0)
    try:
        silent = silent_strangers(folder, site, said)
        eventually(lambda: site.lending.stats()["unproved"] == 2, "strangers keep their places")
        eventually(lambda: site.lending.stats()["connections"] == 0, "strangers keep their places")
        for one in silent:
            one.close()
    finally:
        site.close()


def test_who_comes_while_strangers_have_their_half_waits_a_moment(folder: Folder) -> None:
    def is_served() -> bool:
        """Unless this machine is so busy that the stranger leaves when the moment is over."""
        site = folder.site(folder.tls())
        try:
            silent = [connected(site) for _ in range(2)]
            eventually(lambda: site.lending.stats()["connections"] == 2, "strangers are not there")
            leaves = threading.Timer(0.15, silent[0].close)
            leaves.start()
            trouble = read(site.reader(key=b"")).trouble
            leaves.join()
            silent[1].close()
            return not trouble and site.lending.stats()["unproved"] == 1  # who left
        finally:
            site.close()

    eventually(is_served, "it is refused at once")


@pytest.mark.parametrize("site", [1.0], indirect=True)  # half a record is waited for
def test_garbage_is_hung_up_on(folder: Folder, site: NativeSite) -> None:
    first = first_flight(folder)
    for said in (
        b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
        first[:60] + NOISE.randbytes(400),
        first + NOISE.randbytes(4000),
        b"\x15\x03\x01\x00\x02\x02\x28",
    ):
        with connected(site) as one:
            one.sendall(said)
            heard(one)
    eventually(lambda: site.lending.stats()["connections"] == 0, "strangers keep their places")
    eventually(lambda: read(site.reader(key=b"")).trouble == "", "others are not served")
    with connected(site) as one:
        one.sendall(b"GET / HTTP/1.1\r\n\r\n")
        said = heard(one)
    kind, size = decode_head(said[:HEAD_BYTES])
    bye = decode_body(kind, said[HEAD_BYTES : HEAD_BYTES + size])
    assert isinstance(bye, Bye) and "it speaks TLS here" in bye.words


def test_what_passes_on_the_way_tells_nothing(site: NativeSite) -> None:
    passed: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as relay:

        def hand_on(source: socket.socket, target: socket.socket) -> None:
            while piece := source.recv(1 << 16):
                passed.append(piece)
                target.sendall(piece)
            target.shutdown(socket.SHUT_WR)

        def run() -> None:
            near, _ = relay.accept()
            with near, connected(site) as far:
                back = threading.Thread(target=hand_on, args=(far, near))
                back.start()
                hand_on(near, far)
                back.join()

        thread = threading.Thread(target=run)
        thread.start()
        direct, site.tcp = site.tcp, f"127.0.0.1:{relay.getsockname()[1]}"
        reader = site.reader(key=b"", streams=1)
        site.tcp = direct
        assert read(reader).trouble == ""
        reader.close()
        thread.join(WAIT_S)
    seen = b"".join(passed)
    assert len(seen) > COUNT * BLOCK
    assert b"owner" not in seen and hashes_of(1) not in seen
    for row in blocks_of(COUNT, BLOCK):
        assert row[:16].tobytes() not in seen


# -- files and settings ------------------------------------------------------------------------------------------------


def test_files_that_cannot_be_used_are_said(folder: Folder, tmp_path: Path) -> None:
    good = {"cert": str(folder.good.cert), "key": str(folder.good.key), "ca": str(folder.ca.cert)}
    other = certify(tmp_path, "other", folder.ca)
    locked, garbage, pipe = tmp_path / "locked", tmp_path / "garbage", tmp_path / "pipe"
    password = serialization.BestAvailableEncryption(b"secret")
    locked.write_bytes(
        folder.good.private.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, password)
    )
    garbage.write_bytes(NOISE.randbytes(500))
    os.mkfifo(pipe)
    for changed, why in (
        ({"key": str(other.key)}, "key"),
        ({"key": str(locked)}, "has no password"),
        ({"cert": str(garbage)}, "has no certificate"),
        ({"ca": str(garbage)}, "has no certificate"),
        ({"cert": str(pipe)}, "is no file"),
        ({"ca": str(tmp_path / "absent")}, "No such file"),
    ):
        with pytest.raises(ConfigError, match=why):
            _native.PeerTls(**good | changed)


@pytest.mark.parametrize(
    ("library", "why"),
    [("libssl.so.none", "cannot be loaded .*; install libssl3"), ("libc.so.6", "lacks OPENSSL_version_major")],
)
def test_without_openssl_3_it_is_one_sentence(folder: Folder, library: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as raised:
        _native.PeerTls(str(folder.good.cert), str(folder.good.key), str(folder.ca.cert), library)
    assert "TLS between instances needs" in str(raised.value)


def test_a_key_that_others_can_read_is_refused(folder: Folder) -> None:
    wanted = TransportSettings(tls_cert=str(folder.good.cert), tls_key=str(folder.good.key), tls_ca=str(folder.ca.cert))
    assert peer_tls(wanted) is not None
    assert peer_tls(TransportSettings()) is None
    folder.good.key.chmod(0o640)
    with pytest.raises(ConfigError, match=r"transport.tls_key .* chmod 600"):
        peer_tls(wanted)
    folder.good.key.unlink()
    with pytest.raises(ConfigError, match=r"transport.tls_key .* cannot be read"):
        peer_tls(wanted)


def test_all_three_files_or_none() -> None:
    with pytest.raises(ConfigError, match=r"transport.tls_cert is set without transport.tls_key and transport.tls_ca"):
        load_settings(flags={"transport.tls_cert": "a.pem"})
    flags = {f"transport.tls_{one}": f"{one}.pem" for one in ("cert", "key", "ca")}
    settings = load_settings(flags=flags | {"transport.listen": "tcp://127.0.0.1:0"})
    assert settings.transport.key_file == ""
