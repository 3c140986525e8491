"""NVME pools whose blocks lie encrypted: what a stolen disk shows, what damage and lost keys do, how keys change."""

from __future__ import annotations

import base64
import hmac
import os
import re
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import structlog

from kvbm._native import BlockIo, checksums
from kvbm.core.errors import ConfigError, PoolError
from kvbm.core.ids import Epoch, InstanceId, Namespace, NamespaceId, Reach
from kvbm.pools.base import Proof, ReadOutcome
from kvbm.pools.nvme import sealing
from kvbm.pools.nvme.block_io import PAGE_BYTES, BlockIoOptions, stride_of
from kvbm.pools.nvme.pod import PodFolder
from kvbm.pools.nvme.pool import NvmePool
from kvbm.pools.nvme.sealing import SlotKeys
from kvbm.pools.nvme.slot_header import HEADER_BYTES, SEAL_BYTES
from kvbm.pools.tenant_keys import KeySource, TenantKeys, add_key, keys_of_file, parse_keys
from tests.extras import needed
from tests.pool_runs import SHAPE, Run, random_run

AESGCM = needed("cryptography.hazmat.primitives.ciphers.aead", "crypto").AESGCM

SLOTS = 48
BLOCK_BYTES = 8192
ACME = Namespace(model="tiny", revision="r1", block_tokens=16, layout=SHAPE.layout, tenant="acme")
GOOD, CORRUPT, MISSING = ReadOutcome.GOOD, ReadOutcome.CORRUPT, ReadOutcome.MISSING
MARK = b"what nobody else is to read "


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    for tenant in ("", "acme"):
        add_key(path, tenant, "1")
    return path


def _keys(path: Path, namespaces: tuple[Namespace, ...] = (SHAPE, ACME)) -> SlotKeys:
    return SlotKeys(keys_of_file(str(path)), namespaces)


def _open(
    path: Path, keys: SlotKeys | None, instance: str = "a", reach: Reach = Reach.INSTANCE, **way: Any
) -> NvmePool:
    opening = BlockIo if keys is None else keys.opening(BlockIo, checksums)
    options = BlockIoOptions(encrypted=keys is not None, **way)
    return NvmePool((path,), SLOTS, BLOCK_BYTES, SHAPE, InstanceId(instance), checksums, opening, options, reach)


def _marked(count: int, namespace: Namespace = SHAPE, seed: int = 0) -> Run:
    """Blocks that say the same readable words over and over."""
    run = random_run(count, BLOCK_BYTES, seed, namespace)
    run.rows[:] = np.frombuffer((MARK * BLOCK_BYTES)[:BLOCK_BYTES], dtype=np.uint8)
    return run._replace(proof=run.proof._replace(checksums=checksums(run.rows)))


@pytest.fixture(params=[("io_uring", "on"), ("io_uring", "off"), ("threads", "on"), ("threads", "off")], ids="-".join)
def way(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, str]:
    """Each engine, past the page cache and through it; those the machine has."""
    asked = dict(zip(("io", "direct"), request.param, strict=True))
    try:
        _open(tmp_path / "tried", None, **asked).close()
    except PoolError as error:
        pytest.skip(str(error))
    return asked


def test_the_disk_shows_no_byte_of_a_block_and_each_block_otherwise(
    tmp_path: Path, keys_file: Path, way: dict[str, str]
) -> None:
    run = _marked(SLOTS)
    before = run.rows.copy()
    with closing(_open(tmp_path / "pool", _keys(keys_file), **way)) as pool:
        pool.write(range(SLOTS), run.rows, run.proof)
        assert (run.rows == before).all()
        room = run.room()
        result = pool.read(range(SLOTS), run.proof.namespace, run.hashes, room)
    assert result.outcomes == [GOOD] * SLOTS
    assert (room == before).all()
    assert (result.checksums == run.proof.checksums).all()
    stored = (tmp_path / "pool").read_bytes()
    assert MARK not in stored
    bodies = {stored[at : at + BLOCK_BYTES] for at in _bodies()}
    assert len(bodies) == SLOTS, "equal blocks lie alike"


def test_a_long_run_is_read_in_groups_into_rows_anywhere(
    tmp_path: Path, keys_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sealing, "_GROUP_BYTES", 5 * BLOCK_BYTES)
    run = random_run(SLOTS, BLOCK_BYTES)
    places = np.random.default_rng(1).permutation(2 * SLOTS)[:SLOTS].tolist()
    slots = np.random.default_rng(2).permutation(SLOTS).tolist()
    with closing(_open(tmp_path / "pool", _keys(keys_file))) as pool:
        pool.write(slots, run.rows, run.proof)
        room = np.zeros((2 * SLOTS, BLOCK_BYTES), dtype=np.uint8)
        result = pool.read(slots, run.proof.namespace, run.hashes, room, places)
        assert result.outcomes == [GOOD] * SLOTS
        assert (room[places] == run.rows).all()
        pool.close()
        with pytest.raises(PoolError, match="closed"):
            pool.write(slots, run.rows, run.proof)


def test_a_block_opens_for_its_own_namespace_and_hash_alone(tmp_path: Path, keys_file: Path) -> None:
    mine, other = random_run(2, BLOCK_BYTES, 1), random_run(2, BLOCK_BYTES, 2)
    with closing(_open(tmp_path / "pool", _keys(keys_file))) as pool:
        pool.write([0, 1], mine.rows, mine.proof)
        assert pool.read([0, 1], ACME.id, mine.hashes, mine.room()).outcomes == [CORRUPT] * 2
        assert pool.read([0, 1], SHAPE.id, other.hashes, mine.room()).outcomes == [CORRUPT] * 2
        assert pool.read([1, 0], SHAPE.id, mine.hashes, mine.room()).outcomes == [CORRUPT] * 2


def test_a_whole_block_does_not_open_in_the_place_of_another(tmp_path: Path, keys_file: Path) -> None:
    """Another block's seal and bytes behind a header that fits: all checksums are right, and it is no block."""
    run = random_run(2, BLOCK_BYTES, 1)
    path, stride = tmp_path / "pool", stride_of(BLOCK_BYTES)
    with closing(_open(path, _keys(keys_file))) as pool:
        pool.write([0, 1], run.rows, run.proof)
    stored = bytearray(path.read_bytes())
    first, second = PAGE_BYTES, PAGE_BYTES + stride
    assert stored[first + 52 : first + 56] == bytes(4), "the header tells a checksum of the block"
    stored[first + HEADER_BYTES : first + stride] = stored[second + HEADER_BYTES : second + stride]
    path.write_bytes(stored)
    with closing(_open(path, _keys(keys_file))) as pool:
        room = run.room()
        assert pool.read([0, 1], SHAPE.id, run.hashes, room).outcomes == [CORRUPT, GOOD]
        assert not room[0].any(), "bytes that did not prove themselves are left in the row"


def test_no_byte_of_header_seal_or_block_can_change(tmp_path: Path, keys_file: Path) -> None:
    run = random_run(1, BLOCK_BYTES)
    path = tmp_path / "pool"
    keys = _keys(keys_file)
    with closing(_open(path, keys)) as pool:
        pool.write([0], run.rows, run.proof)
    proof = range(PAGE_BYTES, PAGE_BYTES + HEADER_BYTES + SEAL_BYTES + 8)
    body = range(2 * PAGE_BYTES, 2 * PAGE_BYTES + BLOCK_BYTES, 509)
    with closing(_open(path, keys, direct="off")) as pool, path.open("r+b") as file:
        for at in (*proof, *body):
            file.seek(at)
            byte = file.read(1)[0]
            for changed in (byte ^ 1, byte ^ 0x80):
                _put(file, at, changed)
                assert pool.read([0], SHAPE.id, run.hashes, run.room()).outcomes == [CORRUPT], at
            _put(file, at, byte)
        assert pool.read([0], SHAPE.id, run.hashes, run.room()).outcomes == [GOOD]


def test_a_seal_whose_checksum_fits_still_has_to_be_the_writers(tmp_path: Path, keys_file: Path) -> None:
    run = random_run(1, BLOCK_BYTES)
    path = tmp_path / "pool"
    keys = _keys(keys_file)
    with closing(_open(path, keys)) as pool:
        pool.write([0], run.rows, run.proof)
    begin = PAGE_BYTES + HEADER_BYTES
    with closing(_open(path, keys, direct="off")) as pool, path.open("r+b") as file:
        file.seek(begin)
        seal = file.read(SEAL_BYTES)
        for at in range(SEAL_BYTES - 4):
            changed = bytearray(seal)
            changed[at] ^= 1
            changed[60:] = struct.pack("<I", _crc(bytes(changed[:60])))
            file.seek(begin)
            file.write(changed)
            file.flush()
            assert pool.read([0], SHAPE.id, run.hashes, run.room()).outcomes == [CORRUPT], at


def test_a_new_key_seals_and_the_old_one_opens_while_it_is_listed(tmp_path: Path, keys_file: Path) -> None:
    old, new = random_run(4, BLOCK_BYTES, 1), random_run(4, BLOCK_BYTES, 2)
    keys = _keys(keys_file)
    with closing(_open(tmp_path / "pool", keys)) as pool:
        pool.write(range(4), old.rows, old.proof)
        add_key(keys_file, "", "2")
        keys.refresh()
        pool.write(range(4, 8), new.rows, new.proof)
        assert pool.read(range(4), SHAPE.id, old.hashes, old.room()).outcomes == [GOOD] * 4
        assert pool.read(range(4, 8), SHAPE.id, new.hashes, new.room()).outcomes == [GOOD] * 4
        keys_file.write_text(re.sub(r'keys\."1" = .*\n', "", keys_file.read_text(), count=1))  # of the first tenant
        assert _first_tenant_has(keys_file, ["2"])
        keys.refresh()
        with structlog.testing.capture_logs() as logs:
            assert pool.read(range(4), SHAPE.id, old.hashes, old.room()).outcomes == [CORRUPT] * 4
            assert pool.read(range(4), SHAPE.id, old.hashes, old.room()).outcomes == [CORRUPT] * 4
        assert len(logs) == 1
        assert "computed again" in logs[0]["why"]
        assert pool.read(range(4, 8), SHAPE.id, new.hashes, new.room()).outcomes == [GOOD] * 4


def test_damaged_keys_leave_those_of_before_in_use(tmp_path: Path, keys_file: Path) -> None:
    run = random_run(2, BLOCK_BYTES)
    keys = _keys(keys_file)
    with closing(_open(tmp_path / "pool", keys)) as pool:
        pool.write([0, 1], run.rows, run.proof)
        keys_file.write_text("[tenants")
        with structlog.testing.capture_logs() as logs:
            keys.refresh()
            keys.refresh()
        assert len(logs) == 1
        assert "stay in use" in logs[0]["why"]
        assert pool.read([0, 1], SHAPE.id, run.hashes, run.room()).outcomes == [GOOD] * 2


def test_blocks_of_an_earlier_life_open_and_no_nonce_comes_twice(tmp_path: Path, keys_file: Path) -> None:
    seen = set()
    for life in range(3):
        run = random_run(4, BLOCK_BYTES, life)
        with closing(_open(tmp_path / "pool", _keys(keys_file))) as pool:
            for again in range(2):
                pool.write(range(4 * life, 4 * life + 4), run.rows, run.proof)
                stored = (tmp_path / "pool").read_bytes()
                for slot in range(4 * life, 4 * life + 4):
                    begin = PAGE_BYTES + slot * stride_of(BLOCK_BYTES) + HEADER_BYTES + 8
                    seen.add(stored[begin : begin + 24])
                assert len(seen) == 8 * life + 4 * (again + 1)
    with closing(_open(tmp_path / "pool", _keys(keys_file))) as pool:
        for life in range(3):
            run = random_run(4, BLOCK_BYTES, life)
            assert pool.read(range(4 * life, 4 * life + 4), SHAPE.id, run.hashes, run.room()).outcomes == [GOOD] * 4


def test_a_plain_pool_is_not_used_encrypted_nor_the_other_way(tmp_path: Path, keys_file: Path) -> None:
    run = random_run(1, BLOCK_BYTES)
    with closing(_open(tmp_path / "plain", None)) as pool:
        pool.write([0], run.rows, run.proof)
    with closing(_open(tmp_path / "plain", _keys(keys_file))) as pool:
        assert pool.opened == "created" and "made for encrypted False, this manager has encrypted True" in pool.notice
    assert run.rows.tobytes() not in (tmp_path / "plain").read_bytes()
    assert [one.name for one in tmp_path.glob("plain*")] == ["plain"]  # what lies there in the clear is not kept
    _open(tmp_path / "sealed", _keys(keys_file)).close()
    with closing(_open(tmp_path / "sealed", None)) as pool:
        assert pool.opened == "created" and "made for encrypted True" in pool.notice
    assert (tmp_path / "sealed.aside-1").exists()


def test_an_engine_without_seals_takes_no_sealed_block_for_one(tmp_path: Path, keys_file: Path) -> None:
    run = random_run(1, BLOCK_BYTES)
    with closing(_open(tmp_path / "pool", _keys(keys_file))) as pool:
        pool.write([0], run.rows, run.proof)
    with (tmp_path / "pool").open("rb") as file:
        engine = BlockIo([file.fileno()], SLOTS, BLOCK_BYTES)
        at = np.zeros(1, dtype=np.int64)
        outcomes, _ = engine.read(at, run.room(), at, SHAPE.id, run.hashes)
        assert outcomes.tolist() == [CORRUPT]
        seals = np.zeros((1, SEAL_BYTES), dtype=np.uint8)
        outcomes, _ = engine.read(at, run.room(), at, SHAPE.id, run.hashes, seals)
        assert outcomes.tolist() == [GOOD]
        assert seals.any()
        engine.close(1.0)


def test_zeros_of_an_erasure_are_written_as_they_are(tmp_path: Path, keys_file: Path) -> None:
    run = _marked(1)
    nobody = NamespaceId(bytes(16))
    zeros = np.zeros((1, BLOCK_BYTES), dtype=np.uint8)
    with closing(_open(tmp_path / "pool", _keys(keys_file))) as pool:
        pool.write([0], run.rows, run.proof)
        pool.write([0], zeros, Proof(nobody, Epoch(0), bytes(16), checksums(zeros)))
        assert pool.read([0], SHAPE.id, run.hashes, run.room()).outcomes == [CORRUPT]
    stored = (tmp_path / "pool").read_bytes()
    begin = PAGE_BYTES + HEADER_BYTES
    assert not any(stored[begin : PAGE_BYTES + stride_of(BLOCK_BYTES)])


def test_who_has_no_keys_is_refused_at_the_start_and_named(tmp_path: Path, keys_file: Path) -> None:
    stranger = Namespace(model="tiny", revision="r1", block_tokens=16, tenant="nobody has heard of")
    with pytest.raises(ConfigError, match="no keys of tenant 'nobody has heard of'; add them with: kvbm keys"):
        _keys(keys_file, (SHAPE, stranger))
    keys = _keys(keys_file)
    run = random_run(1, BLOCK_BYTES, namespace=stranger)
    with closing(_open(tmp_path / "pool", keys)) as pool:
        with pytest.raises(PoolError, match="nobody has named"):
            pool.write([0], run.rows, run.proof)
        keys.declare([stranger])
        with pytest.raises(PoolError, match="no keys of tenant"):
            pool.write([0], run.rows, run.proof)
        add_key(keys_file, stranger.tenant, "1")
        keys.refresh()
        pool.write([0], run.rows, run.proof)
        assert pool.read([0], stranger.id, run.hashes, run.room()).outcomes == [GOOD]


def test_a_peer_of_the_pod_opens_blocks_with_the_same_keys(tmp_path: Path, keys_file: Path) -> None:
    run = random_run(4, BLOCK_BYTES)
    keys = _keys(keys_file)
    folder = tmp_path / "pod"
    folder.mkdir()
    with closing(_open(folder / "c.a.pool", keys, "a", Reach.POD)) as pool:
        pool.write(range(4), run.rows, run.proof)
        pool.sync()
        for peer_keys, wanted in ((keys, [GOOD] * 4), (_other_keys(tmp_path), [MISSING] * 4)):
            options = BlockIoOptions(depth=16, encrypted=True)
            opening = peer_keys.opening(BlockIo, checksums)
            peer = PodFolder(folder / "c.b.pool", "c", BLOCK_BYTES, SHAPE, checksums, opening, options=options)
            with closing(peer):
                peer.poll()
                assert peer.read(InstanceId("a"), range(4), SHAPE.id, run.hashes, run.room()).outcomes == wanted


def test_the_bytes_of_a_seal_are_those_of_its_drawing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Golden: version 2 of a slot, from a fixed key, salt and block; and what another reader of the drawing makes of
    it.
    """
    text = '[tenants.""]\nnames = "{0}"\ncurrent = "1"\nkeys.1 = "{0}"\n'.format("A" * 43 + "=")
    monkeypatch.setattr(os, "urandom", lambda count: bytes(range(count)))
    keys = SlotKeys(KeySource("keys", lambda: parse_keys(text, "keys"), lambda: 0), [SHAPE])
    rows = np.arange(BLOCK_BYTES, dtype=np.uint8).reshape(1, -1)
    with closing(_open(tmp_path / "pool", keys)) as pool:
        pool.write([0], rows, Proof(SHAPE.id, Epoch(3), bytes(range(16)), checksums(rows)))
    stored = (tmp_path / "pool").read_bytes()
    begin = PAGE_BYTES + HEADER_BYTES
    seal, body = stored[begin : begin + SEAL_BYTES], stored[2 * PAGE_BYTES : 2 * PAGE_BYTES + BLOCK_BYTES]
    assert stored[PAGE_BYTES : PAGE_BYTES + 8] == b"KVBS\x02\x00\x01\x00"
    assert seal.hex() == (
        "efa1495a0cdc6a6c000102030405060708090a0b0c0d0e0f0100000000000000"
        "f5d14ab2925e75b170e5a52852dedab07d2136e200000000000000005c57dcc6"
    )
    key = hmac.digest(bytes(32), b"kvbm.nvme.v1\0" + seal[8:24], "sha256")
    bound = SHAPE.id + bytes(range(16)) + seal[:32]
    opened = AESGCM(key).decrypt(seal[24:32] + bytes(4), body + seal[48:52] + seal[32:48], bound)
    assert opened == rows.tobytes() + struct.pack("<I", int(checksums(rows)[0]))


class Changing(NamedTuple):
    """Keys of one tenant that change as a test wants it."""

    names: list[str]
    reads: list[Callable[[], object]]  # done at the end of the next reads, once each

    def source(self) -> KeySource:
        return KeySource("keys", self.load, lambda: tuple(self.names))

    def text(self) -> str:
        key = base64.b64encode(bytes(32)).decode()
        named = [f'keys."{name}" = "{base64.b64encode(name.encode().ljust(32)).decode()}"' for name in self.names]
        return "\n".join(['[tenants.""]', f'names = "{key}"', f'current = "{self.names[-1]}"', *named])

    def load(self) -> dict[str, TenantKeys]:
        found = parse_keys(self.text(), "keys")
        if self.reads:
            self.reads.pop()()
        return found

    def key_id(self) -> bytes:
        return parse_keys(self.text(), "keys")[""].current


def test_keys_that_change_while_they_are_read_for_the_first_time_are_read_again() -> None:
    changing = Changing(["1"], [])
    changing.reads.append(lambda: changing.names.append("2"))
    keys = SlotKeys(changing.source(), [SHAPE])
    keys.refresh()
    assert keys.sealer(SHAPE.id, bytes(16)).key_id == changing.key_id()


def test_a_key_that_is_gone_is_not_brought_back_by_a_read_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    changing = Changing(["1"], [])
    keys = SlotKeys(changing.source(), [SHAPE])
    old, found = changing.key_id(), keys._key

    def late(*given: Any) -> Any:
        monkeypatch.undo()
        changing.names[:] = ["2"]
        keys.refresh()
        return found(*given)

    monkeypatch.setattr(keys, "_key", late)
    keys.opener(SHAPE.id, old, bytes(16))
    assert keys.opener(SHAPE.id, old, bytes(16)) is None


def test_a_machine_without_another_thread_reads_all_the_same(
    tmp_path: Path, keys_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sealing, "_GROUP_BYTES", 5 * BLOCK_BYTES)
    run = random_run(SLOTS, BLOCK_BYTES)
    with closing(_open(tmp_path / "pool", _keys(keys_file))) as pool:
        pool.write(range(SLOTS), run.rows, run.proof)

        def refuse(thread: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(threading.Thread, "start", refuse)
        assert pool.read(range(SLOTS), SHAPE.id, run.hashes, run.room()).outcomes == [GOOD] * SLOTS


def test_a_row_that_changes_while_it_is_sealed_is_no_proved_block_of_other_bytes(
    tmp_path: Path, keys_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = random_run(1, BLOCK_BYTES)
    good, seal = run.rows.copy(), sealing._Cipher.seal

    def torn(cipher: Any, *given: Any) -> bytes:
        run.rows[0, :64] = 0
        try:
            return seal(cipher, *given)
        finally:
            run.rows[:] = good

    monkeypatch.setattr(sealing._Cipher, "seal", torn)
    with closing(_open(tmp_path / "pool", _keys(keys_file))) as pool:
        pool.write([0], run.rows, run.proof)
        room = run.room()
        result = pool.read([0], SHAPE.id, run.hashes, room)
    assert result.outcomes == [CORRUPT] or (room == good).all()


def test_what_a_disk_invents_is_warned_of_once(keys_file: Path) -> None:
    keys = _keys(keys_file)
    with structlog.testing.capture_logs() as logs:
        for number in range(1000):
            assert keys.opener(SHAPE.id, number.to_bytes(8, "big"), bytes(16)) is None
        keys_file.write_text("[tenants")
        keys.refresh()
    assert [line["why"].partition(":")[0] for line in logs][1:] == ["the keys of before stay in use"]


def test_a_forked_child_seals_under_a_salt_of_its_own(tmp_path: Path, keys_file: Path) -> None:
    run, path = random_run(2, BLOCK_BYTES), tmp_path / "pool"
    with closing(_open(path, _keys(keys_file), io="threads")) as pool:
        pool.write([0], run.rows[:1], run.proof._replace(hashes=run.hashes[:16], checksums=run.proof.checksums[:1]))
        engine = pool._engine
        assert isinstance(engine, sealing._SealedEngine)
        salt, process = engine._salt, engine._process
        engine._process = -1  # as a child finds it
        pool.write([1], run.rows[1:], run.proof._replace(hashes=run.hashes[16:], checksums=run.proof.checksums[1:]))
        assert engine._salt != salt and engine._process == process
        assert pool.read([0, 1], SHAPE.id, run.hashes, run.room()).outcomes == [GOOD] * 2


def _other_keys(folder: Path) -> SlotKeys:
    for tenant in ("", "acme"):
        add_key(folder / "others.toml", tenant, "1")
    return _keys(folder / "others.toml")


def _first_tenant_has(path: Path, names: list[str]) -> bool:
    return len(parse_keys(path.read_text(), "keys")[""].keys) == len(names)


def _bodies() -> Iterator[int]:
    return (2 * PAGE_BYTES + slot * stride_of(BLOCK_BYTES) for slot in range(SLOTS))


def _crc(data: bytes) -> int:
    return int(checksums(np.frombuffer(data, dtype=np.uint8).reshape(1, -1))[0])


def _put(file: Any, at: int, byte: int) -> None:
    file.seek(at)
    file.write(bytes([byte]))
    file.flush()
