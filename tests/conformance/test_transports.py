"""Transports between instances: one suite for each way a block's bytes can come from another instance."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvbm._native import crc32c
from kvbm.core.errors import LayoutError
from kvbm.core.ids import HASH_BYTES, InstanceId, Namespace, Tier, split_hashes
from kvbm.core.reads import ReadOutcome
from kvbm.transport.base import PeerRead, PeerReader
from kvbm.transport.lending import LentLimits
from kvbm.transport.nixl_agent import NixlProcess, missing_nixl
from tests.eventually import eventually
from tests.lenders import (
    NAMESPACE,
    OTHER,
    LocalSite,
    MemoryLender,
    Site,
    SocketSite,
    blocks_of,
    hashes_of,
    root_of,
    site_of,
)
from tests.native_owner import NativeLender, NativeSite, tls_of
from tests.nixl_site import NixlSite
from tests.soft_roce_site import RdmaDevices, RdmaSite, open_devices

GOOD, MISSING, CORRUPT, FAILED = ReadOutcome
SOCKETS = ("memory", "tcp", "native memory", "native tcp", "native tcp under TLS")  # the latter have a native owner
NIXL = "nixl"  # with a native owner
RDMA = pytest.param("rdma", marks=pytest.mark.rdma)  # likewise; `make test-rdma` alone has its devices
KINDS = ("local", *SOCKETS, NIXL, RDMA)
LONG_S = 240.0  # 64 readers come at once, to a processor that may be emulated
BLOCK = 24_000  # no multiple of anything that copies take at once
NewSite = Callable[..., Site]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def nixl_processes() -> Iterator[tuple[NixlProcess, NixlProcess]]:
    """Of owners and of readers: each test that asks has an agent of its own in the first."""
    if missing := missing_nixl():
        pytest.fail(str(missing))
    processes = NixlProcess({"UCX_TLS": "tcp"}), NixlProcess({"UCX_TLS": "tcp"})
    yield processes
    for process in processes:
        process.close()


@pytest.fixture(scope="session")
def rdma_devices() -> Iterator[RdmaDevices]:
    devices = open_devices()
    yield devices
    devices.close()


@pytest.fixture
def new_site(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[NewSite]:
    made: list[Site] = []

    def new(slots: int = 80, block_bytes: int = BLOCK, **changed: Any) -> Site:
        limits: dict[str, Any] = {"lease_s": LONG_S} | changed
        if kind.startswith("native"):
            lender = NativeLender(slots, block_bytes, tmp_path)
            transport, _, has_tls = kind.removeprefix("native ").partition(" under ")
            options: dict[str, Any] = {"handshake_s": LONG_S} | ({"tls": tls_of(tmp_path)} if has_tls else {})
            site: Site = NativeSite(transport, lender, LentLimits(**limits), tmp_path, **options)
        elif kind == NIXL:
            processes = request.getfixturevalue("nixl_processes")
            site = NixlSite(NativeLender(slots, block_bytes, tmp_path), LentLimits(**limits), tmp_path, processes)
        elif kind == "rdma":
            devices = request.getfixturevalue("rdma_devices")
            site = RdmaSite(NativeLender(slots, block_bytes, tmp_path), LentLimits(**limits), tmp_path, devices)
        else:
            site = site_of(kind, MemoryLender(slots, block_bytes), LentLimits(**limits), tmp_path, LONG_S)
        made.append(site)
        return site

    yield new
    for site in made:
        site.close()


@pytest.fixture
def site(new_site: NewSite) -> Site:
    return new_site()


def read(
    reader: PeerReader, hashes: bytes, rows: np.ndarray | None = None, at: list[int] | None = None, **more: Any
) -> tuple[PeerRead, np.ndarray]:
    """Reads into rows that were something else before."""
    if rows is None:
        rows = np.full((len(hashes) // HASH_BYTES, more.pop("block_bytes", BLOCK)), 0xA5, dtype=np.uint8)
    found = reader.read(more.pop("namespace", NAMESPACE), hashes, rows, at, more.pop("deadline_s", LONG_S))
    return found, rows


def is_given_back(site: Site) -> bool:
    """A socket's owner hears a moment later that its reader is done."""
    return bool(eventually(lambda: site.lender.pinned == 0, "blocks stay pinned"))


@pytest.mark.smoke
def test_a_run_that_is_held_is_read_whole(site: Site) -> None:
    hashes, blocks = hashes_of(70), blocks_of(70, BLOCK)
    site.lender.put(hashes, blocks)
    found, rows = read(site.reader(), hashes)
    assert found.result.outcomes == [GOOD] * 70
    assert (found.trouble, found.retry_s, found.is_shut, found.by, found.passed_over) == ("", 0.0, False, "", "")
    assert np.array_equal(rows, blocks)
    assert found.result.checksums.tolist() == [crc32c(row.tobytes()) for row in blocks]
    assert is_given_back(site)


@pytest.mark.parametrize("block_bytes", [1, 4096, (1 << 20) + 13])
def test_blocks_have_any_size(new_site: NewSite, block_bytes: int) -> None:
    site = new_site(slots=5, block_bytes=block_bytes)
    site.lender.put(hashes_of(5), blocks := blocks_of(5, block_bytes))
    found, rows = read(site.reader(), hashes_of(5), block_bytes=block_bytes)
    assert (found.result.outcomes, found.passed_over) == ([GOOD] * 5, "")
    assert np.array_equal(rows, blocks)


def test_rows_are_those_that_were_named_and_no_others(site: Site) -> None:
    hashes, blocks = hashes_of(3), blocks_of(3, BLOCK)
    site.lender.put(hashes, blocks)
    wide = np.full((9, BLOCK + 100), 7, dtype=np.uint8)
    found, _ = read(site.reader(), hashes, wide[:, 50 : 50 + BLOCK], [8, 0, 4])
    assert found.result.outcomes == [GOOD] * 3
    assert np.array_equal(wide[[8, 0, 4], 50 : 50 + BLOCK], blocks)
    wide[[8, 0, 4], 50 : 50 + BLOCK] = 7
    assert (wide == 7).all()


@pytest.mark.parametrize("held", [0, 1, 4, 69])
def test_what_follows_the_first_block_that_is_not_held_is_missing(site: Site, held: int) -> None:
    hashes, blocks = hashes_of(70), blocks_of(70, BLOCK)
    site.lender.put(hashes[: HASH_BYTES * held], blocks[:held])
    found, rows = read(site.reader(), hashes)
    assert found.result.outcomes == [GOOD] * held + [MISSING] * (70 - held)
    assert found.trouble == ""
    assert np.array_equal(rows[:held], blocks[:held])
    assert is_given_back(site)


@pytest.mark.parametrize("tiers", ["HHHNNN", "NNNHHH", "HNHNHN", "NNNNNN", "HHNN--", "NN----", "NH-HHH"])
def test_blocks_come_from_host_and_nvme(site: Site, tiers: str) -> None:
    hashes, blocks = hashes_of(6), blocks_of(6, BLOCK)
    for at, letter in enumerate(tiers):
        if letter != "-":
            tier = Tier.HOST if letter == "H" else Tier.NVME
            site.lender.put(hashes[HASH_BYTES * at : HASH_BYTES * (at + 1)], blocks[at : at + 1], tier)
    held = tiers.find("-") if "-" in tiers else 6
    found, rows = read(site.reader(), hashes)
    assert found.result.outcomes[:held] == [GOOD] * held
    assert set(found.result.outcomes[held:]) <= {MISSING}
    assert np.array_equal(rows[:held], blocks[:held])
    assert is_given_back(site)


def test_a_block_is_lent_under_its_own_namespace_alone(site: Site) -> None:
    site.lender.put(hashes_of(2), blocks_of(2, BLOCK), namespace=OTHER)
    reader = site.reader()
    found, _ = read(reader, hashes_of(2))
    assert (found.result.outcomes, found.trouble) == ([MISSING] * 2, "")
    found, _ = read(reader, hashes_of(2), namespace=OTHER)
    assert found.result.outcomes == [GOOD] * 2


def test_an_unknown_namespace_and_a_wrong_root_are_not_told_apart(site: Site) -> None:
    site.lender.put(hashes_of(2), blocks_of(2, BLOCK))
    unknown = Namespace(model="other", block_tokens=16)
    found, rows = read(site.reader(), hashes_of(2), namespace=unknown)
    assert found.result.outcomes == [MISSING] * 2
    assert found.trouble
    wrong, _ = read(site.reader(root_of=lambda namespace: bytes(16)), hashes_of(2), rows)
    assert wrong.result.outcomes == [MISSING] * 2
    assert wrong.trouble == found.trouble
    assert found.is_shut and wrong.is_shut
    assert (rows == 0xA5).all()
    assert is_given_back(site)


def test_a_namespace_may_be_opened_withdrawn_and_opened_again(site: Site) -> None:
    site.lender.put(hashes_of(2), blocks_of(2, BLOCK))
    roots = {"root": root_of(NAMESPACE)}
    reader = site.reader(root_of=lambda namespace: roots["root"])
    assert read(reader, hashes_of(2))[0].result.outcomes == [GOOD] * 2
    site.lender.withdraw(NAMESPACE)
    found, _ = read(reader, hashes_of(2))
    assert found.result.outcomes == [MISSING] * 2
    assert found.trouble
    site.lender.admit(NAMESPACE, bytes(range(16)))  # its tenant's secret has changed
    assert read(reader, hashes_of(2))[0].result.outcomes == [MISSING] * 2
    roots["root"] = bytes(range(16))
    assert read(reader, hashes_of(2))[0].result.outcomes == [GOOD] * 2


def test_more_namespaces_are_read_than_may_be_open_at_once(site: Site) -> None:
    reader = site.reader()
    for number in range(150):
        namespace = Namespace(model=f"m{number}", block_tokens=16)
        site.lender.admit(namespace)
        site.lender.put(hashes_of(1, number), blocks_of(1, BLOCK, number), namespace=namespace)
        found, rows = read(reader, hashes_of(1, number), namespace=namespace)
        assert found.result.outcomes == [GOOD]
        assert np.array_equal(rows, blocks_of(1, BLOCK, number))
        site.lender.evict(hashes_of(1, number), namespace)


def test_blocks_of_another_size_are_not_read(site: Site) -> None:
    site.lender.put(hashes_of(2), blocks_of(2, BLOCK))
    found, rows = read(site.reader(), hashes_of(2), block_bytes=BLOCK - 1)
    assert found.result.outcomes == [FAILED] * 2
    assert str(BLOCK) in found.trouble
    assert (rows == 0xA5).all()


def test_rows_and_hashes_that_disagree_are_refused_before_anything_is_asked(site: Site) -> None:
    reader = site.reader()
    rows = np.zeros((2, BLOCK), dtype=np.uint8)
    for hashes, given, at in (
        (hashes_of(3), rows, None),
        (hashes_of(2)[:-1], rows, None),
        (hashes_of(2), rows, [0, 2]),
        (hashes_of(2), rows, [0, -1]),
        (hashes_of(2), rows, [0]),
        (hashes_of(2), rows.view(np.int8), None),
        (hashes_of(2), rows[0], None),
    ):
        with pytest.raises(LayoutError):
            reader.read(NAMESPACE, hashes, given, at, LONG_S)


def test_nothing_is_wanted_and_nothing_comes(site: Site) -> None:
    found, _ = read(site.reader(), b"")
    assert (found.result.outcomes, len(found.result.checksums)) == ([], 0)


def test_flipped_bits_are_a_miss_and_the_owner_hears_of_them(site: Site) -> None:
    hashes, blocks = hashes_of(8), blocks_of(8, BLOCK)
    site.lender.put(hashes, blocks)
    bad = [bytes(split_hashes(hashes)[at]) for at in (2, 5)]
    for block_hash in bad:
        site.lender.slot_of(block_hash)[BLOCK // 2] ^= 0x10
    found, rows = read(site.reader(), hashes)
    assert found.result.outcomes == [CORRUPT if at in (2, 5) else GOOD for at in range(8)]
    good = [at for at in range(8) if at not in (2, 5)]
    assert np.array_equal(rows[good], blocks[good])
    eventually(lambda: site.lender.suspected == bad, "the owner hears nothing", state=lambda: site.lender.suspected)
    assert is_given_back(site)


@pytest.mark.parametrize("held", [0, 3, 4, 5, 11])
def test_an_owner_that_may_lend_little_at_once_lends_a_long_run_in_pieces(new_site: NewSite, held: int) -> None:
    site = new_site(blocks=4)
    hashes, blocks = hashes_of(11), blocks_of(11, BLOCK)
    site.lender.put(hashes[: HASH_BYTES * held], blocks[:held])
    found, rows = read(site.reader(), hashes)
    assert found.result.outcomes == [GOOD] * held + [MISSING] * (11 - held)
    assert (found.trouble, found.retry_s) == ("", 0.0)
    assert np.array_equal(rows[:held], blocks[:held])
    assert found.result.checksums[:held].tolist() == [crc32c(row.tobytes()) for row in blocks[:held]]
    assert is_given_back(site)


@pytest.mark.parametrize("kind", ["local"], indirect=True)
def test_an_owner_in_this_process_that_lends_enough_says_when_to_come_again(new_site: NewSite) -> None:
    site = new_site(blocks=4, retry_s=0.25)
    assert isinstance(site, LocalSite)
    site.lender.put(hashes_of(6), blocks_of(6, BLOCK))
    lent = site.leases.lend(NAMESPACE.id, hashes_of(6))
    assert lent is not None
    lease = site.leases.begin(lent, 0.0, is_timed=False)
    found, rows = read(site.reader(), hashes_of(6))
    assert (found.result.outcomes, found.retry_s) == ([FAILED] * 6, 0.25)
    assert found.trouble
    assert (rows == 0xA5).all()
    site.leases.end(lease)
    assert read(site.reader(), hashes_of(6))[0].result.outcomes == [GOOD] * 6


def test_a_fenced_owner_grants_nothing_until_it_may_again(site: Site) -> None:
    site.lender.put(hashes_of(4), blocks_of(4, BLOCK))
    reader = site.reader()
    assert read(reader, hashes_of(4))[0].result.outcomes == [GOOD] * 4
    site.fence(True)
    for _ in range(2):
        found, rows = read(reader, hashes_of(4))
        assert found.result.outcomes == [FAILED] * 4
        assert "fenced" in found.trouble
        assert (rows == 0xA5).all()
    assert is_given_back(site)
    site.fence(False)
    assert read(reader, hashes_of(4))[0].result.outcomes == [GOOD] * 4


# Over sockets the owner sends nothing after the lease. Over NIXL and RDMA what comes too late comes over TCP then:
# `integration/test_nixl.py` and `rdma/test_stopped_owner.py` look at what does not count.
@pytest.mark.parametrize("kind", ["local", "memory", "native memory"], indirect=True)
def test_a_copy_that_ends_after_its_lease_does_not_count(kind: str, new_site: NewSite) -> None:
    site = new_site(lease_s=1e-9 if kind == "local" else 0.001)
    site.lender.put(hashes_of(4), blocks_of(4, BLOCK))
    found, _ = read(site.reader(), hashes_of(4))
    assert found.result.outcomes == [FAILED] * 4
    assert found.trouble
    assert is_given_back(site)
    assert site.lender.suspected == []


def test_slots_that_change_under_their_readers_never_pass_for_what_they_were(new_site: NewSite) -> None:
    """As when a lease has run out: the owner writes its slots whoever reads them. What passes is whole."""
    site = new_site(slots=16, block_bytes=128 << 10)
    hashes = hashes_of(16)
    blocks = [blocks_of(16, 128 << 10, seed) for seed in range(2)]
    site.lender.put(hashes, blocks[0])
    ended = threading.Event()

    def overwrite() -> None:
        while not ended.is_set():
            for block in blocks[::-1]:
                for at, block_hash in enumerate(split_hashes(hashes)):
                    site.lender.slot_of(bytes(block_hash))[:] = block[at]

    writer = threading.Thread(target=overwrite)
    writer.start()
    try:
        reader = site.reader()
        seen: list[ReadOutcome] = []

        def has_read_while_they_changed() -> bool:
            found, rows = read(reader, hashes, block_bytes=128 << 10)
            for at, outcome in enumerate(found.result.outcomes):
                seen.append(outcome)
                assert outcome is not GOOD or np.array_equal(rows[at], blocks[0][at])
            return CORRUPT in seen and len(seen) >= 60 * 16

        eventually(has_read_while_they_changed, "no slot changes under its reader")
    finally:
        ended.set()
        writer.join()


def test_many_readers_read_one_run_at_once(new_site: NewSite) -> None:
    site = new_site(blocks=64 * 8)
    hashes, blocks = hashes_of(8), blocks_of(8, BLOCK)
    site.lender.put(hashes, blocks)
    readers = [site.reader(streams=1) for _ in range(64)]
    barrier = threading.Barrier(64)
    wrong: list[object] = []

    def run(reader: PeerReader) -> None:
        barrier.wait()
        for _ in range(3):
            found, rows = read(reader, hashes)
            if found.result.outcomes != [GOOD] * 8 or found.passed_over or not np.array_equal(rows, blocks):
                wrong.append(found)

    threads = [threading.Thread(target=run, args=(reader,)) for reader in readers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert is_given_back(site)


def test_threads_share_a_reader(site: Site) -> None:
    runs = [(hashes_of(9, seed), blocks_of(9, BLOCK, seed)) for seed in range(8)]
    for hashes, blocks in runs:
        site.lender.put(hashes, blocks)
    reader = site.reader()
    wrong: list[object] = []

    def run(number: int) -> None:
        for turn in range(20):
            hashes, blocks = runs[(number + turn) % 8]
            found, rows = read(reader, hashes)
            if found.result.outcomes != [GOOD] * 9 or found.passed_over or not np.array_equal(rows, blocks):
                wrong.append(found)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert is_given_back(site)


def test_a_closed_reader_reads_nothing(site: Site) -> None:
    site.lender.put(hashes_of(2), blocks_of(2, BLOCK))
    reader = site.reader()
    assert read(reader, hashes_of(2))[0].result.outcomes == [GOOD] * 2
    reader.close()
    reader.close()
    found, _ = read(reader, hashes_of(2))
    assert found.result.outcomes == [FAILED] * 2
    assert found.trouble


# -- over sockets ------------------------------------------------------------------------------------------------------

sockets = pytest.mark.parametrize("kind", [*SOCKETS, NIXL, RDMA], indirect=True)


@pytest.mark.smoke
@sockets
def test_an_owner_that_came_back_at_its_address_is_read_from_again(site: SocketSite) -> None:
    hashes, blocks = hashes_of(3), blocks_of(3, BLOCK)
    site.lender.put(hashes, blocks)
    reader = site.reader()
    assert read(reader, hashes)[0].result.outcomes == [GOOD] * 3
    site.stop()
    found, _ = read(reader, hashes)
    assert found.result.outcomes == [FAILED] * 3
    assert found.trouble
    site.start()
    found, rows = read(reader, hashes)
    assert (found.result.outcomes, found.passed_over) == ([GOOD] * 3, "")
    assert np.array_equal(rows, blocks)


@pytest.mark.parametrize("kind", ["memory", "native memory"], indirect=True)
def test_the_memory_of_an_owner_that_has_gone_is_not_kept(site: SocketSite) -> None:
    def mapped() -> int:
        return sum(" r--s " in line and "memfd:" in line for line in Path("/proc/self/maps").read_text().splitlines())

    site.lender.put(hashes_of(3), blocks_of(3, BLOCK))
    reader, before = site.reader(), mapped()
    assert read(reader, hashes_of(3))[0].result.outcomes == [GOOD] * 3
    assert mapped() == before + 1
    site.stop()
    assert read(reader, hashes_of(3))[0].result.outcomes == [FAILED] * 3
    assert mapped() == before


@sockets
def test_another_instance_at_the_address_is_not_read_from(site: SocketSite) -> None:
    site.lender.put(hashes_of(2), blocks_of(2, BLOCK))
    found, _ = read(site.reader(owner=InstanceId("somebody else")), hashes_of(2))
    assert found.result.outcomes == [FAILED] * 2
    assert "another instance" in found.trouble


@pytest.mark.parametrize("kind", ["tcp", "native tcp", "native tcp under TLS", NIXL, RDMA], indirect=True)
def test_a_reader_with_another_key_reads_nothing(site: SocketSite) -> None:
    site.lender.put(hashes_of(2), blocks_of(2, BLOCK))
    found, rows = read(site.reader(key=b"another"), hashes_of(2))
    assert found.result.outcomes == [FAILED] * 2
    assert "the key is another" in found.trouble
    assert (rows == 0xA5).all()


@sockets
def test_closing_a_reader_ends_its_reads(new_site: NewSite) -> None:
    site = new_site(slots=64, block_bytes=1 << 20)
    assert isinstance(site, SocketSite)
    hashes, blocks = hashes_of(64), blocks_of(64, 1 << 20)
    site.lender.put(hashes, blocks)
    reader = site.reader()
    found: list[PeerRead] = []
    rows = np.zeros((64, 1 << 20), dtype=np.uint8)

    def run() -> None:
        while not found or not found[-1].trouble:
            found.append(reader.read(NAMESPACE, hashes, rows, None, LONG_S))

    thread = threading.Thread(target=run)
    thread.start()
    eventually(lambda: found, "nothing is read")
    reader.close()
    thread.join()
    before = rows.copy()
    assert set(found[-1].result.outcomes) <= {GOOD, FAILED}
    assert is_given_back(site)
    assert np.array_equal(rows, before)
