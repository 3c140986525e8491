"""A folder that the instances of a pod share: what one wrote the others read, also after it is gone and while it
overwrites; what is torn, foreign, swapped or flipped is a miss.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvbm.assembly import NATIVE, OPEN_BLOCK_IO, open_manager
from kvbm.config import load_settings
from kvbm.core.errors import ConfigError
from kvbm.core.events import BlocksMigrated, InstanceStarted, MigrateCause
from kvbm.core.ids import HASH_BYTES, Epoch, InstanceId, Namespace, Reach, Tier, split_hashes
from kvbm.manager.owned_hbm import Manager
from kvbm.pools.base import PodRun, Proof, ReadOutcome, ReadResult
from kvbm.pools.nvme import pod
from kvbm.pools.nvme.block_io import PAGE_BYTES, stride_of
from kvbm.pools.nvme.pod import PodFolder
from kvbm.pools.nvme.pool import NvmePool
from kvbm.pools.stores.memory import MemoryStore
from kvbm.streams.journal.journal import Journal
from tests import managers
from tests.eventually import eventually
from tests.managers import (
    BLOCK_BYTES,
    NAMESPACE,
    KnowsAll,
    check_bytes,
    hashes_of,
    make_manager,
    rows_of,
    serve,
)
from tests.nvme_volumes import refused_soon
from tests.object_pools import memory_objects

ROOT = Path(__file__).parents[2]
WAIT_S = 60.0
STRIDE = stride_of(BLOCK_BYTES)


def flags_of(tmp_path: Path, instance: str, slots: int = 32) -> dict[str, Any]:
    return {
        "instance.id": instance,
        "instance.data_dir": str(tmp_path / instance),
        "nats.enabled": False,
        "pools.hbm.device": "memory",
        "pools.hbm.slots": 64,
        "pools.nvme.slots": slots,
        "pools.nvme.folder": str(tmp_path / "pod"),
        "pools.nvme.direct": "auto",
        "onboard.wait_s": WAIT_S,
    }


@pytest.fixture(autouse=True)
def nobody_looks_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """An instance sees what others have written at its start, and when a test tells it to look."""
    monkeypatch.setattr(pod, "POLL_S", 3600.0)


def opened(tmp_path: Path, instance: str, slots: int = 32, **more: Any) -> Manager:
    settings = load_settings(
        flags=flags_of(tmp_path, instance, slots) | {k.replace("__", "."): v for k, v in more.items()}
    )
    return open_manager(settings, [NAMESPACE], BLOCK_BYTES, "test")


def look(manager: Manager) -> PodFolder:
    folder = manager.pools.pod
    assert isinstance(folder, PodFolder)
    folder.poll()
    folder.poll()  # once more: the clock of files ticks slowly
    return folder


def file_of(tmp_path: Path, instance: str, suffix: str = "pool") -> Path:
    return tmp_path / "pod" / f"local.{instance}.{suffix}"


@contextmanager
def written(tmp_path: Path, depth: int = 8) -> Iterator[tuple[Path, bytes]]:
    """Files of instance a, which is gone and had one prompt."""
    with opened(tmp_path, "a") as a:
        serve(a, 1, depth)
        assert a.settle(WAIT_S)
    yield file_of(tmp_path, "a"), hashes_of(1, depth)


def slots_of(path: Path) -> dict[bytes, int]:
    hints = np.fromfile(path.with_suffix(".slots"), dtype=np.uint8).reshape(-1, 2 * HASH_BYTES)
    return {row[HASH_BYTES:].tobytes(): slot for slot, row in enumerate(hints) if row.any()}


def test_the_second_reads_what_the_first_wrote_without_a_catalog(tmp_path: Path) -> None:
    with opened(tmp_path, "a") as a, opened(tmp_path, "b") as b:
        serve(a, 1, 8)
        assert a.settle(WAIT_S)
        look(a)
        look(b)
        assert serve(b, 1, 10).prefix.hits == {Tier.NVME: 8}
        assert serve(b, 1, 10).prefix.hits == {Tier.HBM: 10}
        stats = b.stats()
        assert (stats.hit_blocks[Tier.NVME], stats.verified_reads, stats.corrupt_blocks) == (8, 8, 0)
        assert b.settle(WAIT_S)
        look(a)
        assert a.acquire(NAMESPACE.id, hashes_of(1, 10)).hits == {Tier.HBM: 8, Tier.NVME: 2}  # and back again
    events = [event for frame in _frames(tmp_path, "b") for event in frame]
    fetched = [event for event in events if isinstance(event, BlocksMigrated) and event.cause == MigrateCause.FETCH]
    assert [(event.source, event.target, event.hashes) for event in fetched] == [("a", Tier.HBM, hashes_of(1, 8))]
    started = next(event for event in events if isinstance(event, InstanceStarted))
    assert [pool.reach for pool in started.pools if pool.tier == Tier.NVME] == [Reach.POD]


def test_who_can_write_a_plain_pool_is_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its proofs are over the bytes that it has written, whatever they are: docs/threats.md says so."""
    with monkeypatch.context() as lying:
        lying.setattr(
            managers, "rows_of", lambda hashes: np.full((len(hashes) // HASH_BYTES, BLOCK_BYTES), 7, np.uint8)
        )
        with opened(tmp_path, "liar") as liar:
            serve(liar, 1, 8)
            assert liar.settle(WAIT_S)
    with opened(tmp_path, "b") as b:
        found, rows = b.acquire(NAMESPACE.id, hashes_of(1, 8)), np.empty((8, BLOCK_BYTES), np.uint8)
        assert found.hits == {Tier.NVME: 8}
        b.pools.slots[Tier.HBM].read(found.slots, NAMESPACE.id, hashes_of(1, 8), rows)
        assert (rows == 7).all()
        b.unpin(found.slots)


def _frames(tmp_path: Path, instance: str) -> list[list[Any]]:
    from kvbm.core.codec import decode_frame
    from kvbm.streams.base import Position

    journal = Journal.open(
        tmp_path / instance / "instances" / instance / "journal",
        InstanceId(instance),
        NATIVE,
        run="x",
    )
    try:
        frames = journal.read_after(Position(Epoch(0), 0), 1 << 30)  # type: ignore[arg-type]
        return [list(decode_frame(frame.data)[0].events) for frame in frames]
    finally:
        journal.close()


def test_an_instance_that_is_gone_is_still_read_and_one_that_only_reads_needs_no_slots(tmp_path: Path) -> None:
    with written(tmp_path), opened(tmp_path, "reader", slots=0) as reader:
        look(reader)
        assert serve(reader, 1, 8).prefix.hits == {Tier.NVME: 8}
        assert Tier.NVME not in reader.pools.slots


def test_a_killed_instance_is_still_read(tmp_path: Path) -> None:
    program = f"""
import sys, time
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from tests.integration.test_pod_folder import opened
from tests.managers import serve
manager = opened(Path({str(tmp_path)!r}), "a")
serve(manager, 1, 8)
assert manager.settle({WAIT_S})
print("written", flush=True)
number = 0
while True:
    serve(manager, 100 + number % 40, 4)
    number += 1
    if number % 8 == 0:
        assert manager.settle({WAIT_S})
        print(number, "more", flush=True)
"""
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert child.stdout is not None
        assert "written\n" in child.stdout  # reads on to that line
        assert "8 more\n" in child.stdout
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait(WAIT_S)
    with opened(tmp_path, "b") as b:
        look(b)
        hits = 0
        for prompt in (1, *range(100, 140)):
            hits += serve(b, prompt, 4).prefix.hits.get(Tier.NVME, 0)  # checks every byte
        assert hits >= 4  # the last ones it wrote are there
        assert b.stats().corrupt_blocks == 0
    with opened(tmp_path, "a") as a:  # its owner can have it back, whatever slots were in copy when it died
        assert serve(a, 1, 4).prefix.depth in range(5)


def test_slots_that_are_overwritten_while_they_are_read_never_give_wrong_bytes(tmp_path: Path) -> None:
    """Two writers turn their few slots over as fast as they can; two readers follow old and new hints."""
    stop = threading.Event()
    with ExitStack() as stack:
        writers = [stack.enter_context(opened(tmp_path, name, slots=6)) for name in ("a", "b")]
        readers = [stack.enter_context(opened(tmp_path, f"reader-{number}", slots=0)) for number in range(2)]
        fetched, missed = [0, 0], [0, 0]

        def write(manager: Manager, seed: int) -> None:
            number = seed
            while not stop.is_set():
                serve(manager, number % 8, 3)
                manager.settle(1.0)
                manager.evict(Tier.HBM, b"".join(manager.held(Tier.HBM)))
                number += 1

        def read(manager: Manager, which: int) -> None:
            folder = manager.pools.pod
            assert isinstance(folder, PodFolder)
            rows = np.empty((3, BLOCK_BYTES), dtype=np.uint8)
            number = 0
            while not stop.is_set():
                if number % 16 == 0:
                    folder.poll()
                hashes = hashes_of(number % 8, 3)
                for instance, slots in folder.find(NAMESPACE.id, hashes):
                    part, hashes = hashes[: len(slots) * HASH_BYTES], hashes[len(slots) * HASH_BYTES :]
                    result = folder.read(instance, slots, NAMESPACE.id, part, rows[: len(slots)])
                    for at, outcome in enumerate(result.outcomes):
                        if outcome == ReadOutcome.GOOD:
                            assert np.array_equal(rows[at : at + 1], rows_of(part)[at : at + 1])
                            fetched[which] += 1
                        else:
                            assert outcome == ReadOutcome.MISSING
                            missed[which] += 1
                            with folder._lock:
                                for peer in folder._peers.values():
                                    peer.doubts.clear()  # look there again and again
                                    peer.hints = None
                serve(manager, number % 8, 3)  # the same through the manager: checks every byte
                manager.evict(Tier.HBM, b"".join(manager.held(Tier.HBM)))
                number += 1

        def done(work: Callable[[Manager, int], None], manager: Manager, number: int) -> None:
            try:
                work(manager, number)
            finally:
                stop.set()

        with ThreadPoolExecutor(4) as threads:
            running = [threads.submit(done, write, manager, 4 * number) for number, manager in enumerate(writers)]
            running += [threads.submit(done, read, manager, number) for number, manager in enumerate(readers)]
            try:
                eventually(
                    lambda: stop.is_set() or (min(fetched) > 200 and sum(missed) > 20),
                    "readers do not meet what writers overwrite",
                    4 * WAIT_S,
                    lambda: (fetched, missed),
                )
            finally:
                stop.set()
            for thread in running:
                thread.result(WAIT_S)
        assert all(manager.stats().corrupt_blocks == 0 for manager in readers)


@pytest.mark.parametrize("at", [0, 20, 44, 60, PAGE_BYTES + 5, PAGE_BYTES + BLOCK_BYTES - 1])
def test_a_flipped_bit_is_a_miss_for_that_block_and_nothing_else(tmp_path: Path, at: int) -> None:
    with written(tmp_path) as (path, hashes), opened(tmp_path, "b", slots=0) as b:
        slot = slots_of(path)[split_hashes(hashes)[3]]
        with open(path, "r+b") as file:
            file.seek(PAGE_BYTES + slot * STRIDE + at)
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 4]))
        look(b)
        prefix = b.acquire(NAMESPACE.id, hashes)
        check_bytes(b, hashes[: 3 * HASH_BYTES], prefix.slots)
        assert prefix.hits == {Tier.NVME: 3}
        assert look(b).find(NAMESPACE.id, hashes) == [
            PodRun(InstanceId("a"), _runs(path, hashes)[:3])
        ]  # not asked again


def _runs(path: Path, hashes: bytes) -> tuple[int, ...]:
    slots = slots_of(path)
    return tuple(slots[block] for block in split_hashes(hashes))


def test_swapped_slots_are_misses(tmp_path: Path) -> None:
    with written(tmp_path) as (path, hashes), opened(tmp_path, "b", slots=0) as b:
        slots = slots_of(path)
        one, other = (slots[split_hashes(hashes)[at]] for at in (2, 5))
        with open(path, "r+b") as file:
            data = []
            for slot in (one, other):
                file.seek(PAGE_BYTES + slot * STRIDE)
                data.append(file.read(STRIDE))
            for slot, body in zip((other, one), data, strict=True):
                file.seek(PAGE_BYTES + slot * STRIDE)
                file.write(body)
        look(b)
        assert serve(b, 1, 8).prefix.hits == {Tier.NVME: 2}


def test_a_file_that_was_cut_gives_what_is_left_of_it(tmp_path: Path) -> None:
    with written(tmp_path) as (path, hashes), opened(tmp_path, "b", slots=0) as b:
        assert _runs(path, hashes) == tuple(range(8))
        os.truncate(path, PAGE_BYTES + 5 * STRIDE + 100)
        look(b)
        assert serve(b, 1, 8).prefix.hits == {Tier.NVME: 5}
        os.truncate(path, 100)
        b.evict(Tier.HBM, hashes)
        look(b)
        assert serve(b, 1, 8).prefix.hits == {}


def test_a_file_that_is_cut_while_it_is_open_is_misses(tmp_path: Path) -> None:
    with written(tmp_path) as (path, hashes), opened(tmp_path, "b", slots=0) as b:
        look(b)
        assert serve(b, 1, 2).prefix.hits == {Tier.NVME: 2}
        os.truncate(path, PAGE_BYTES + 4 * STRIDE)
        b.evict(Tier.HBM, hashes)
        assert serve(b, 1, 8).prefix.hits == {Tier.NVME: 4}
        assert b.stats().failed_copies == 0


@pytest.mark.parametrize(
    "damage", ["foreign", "header", "other name", "other shape", "no hints", "torn hints", "random hints", "folder"]
)
def test_what_is_no_pool_of_this_pod_is_left_alone(tmp_path: Path, damage: str) -> None:
    with written(tmp_path) as (path, hashes):
        match damage:
            case "foreign":
                path.write_bytes(b"not a pool" * 1000)
            case "header":
                with open(path, "r+b") as file:
                    file.seek(100)
                    file.write(b"\xff")
            case "other name":
                for suffix in ("pool", "slots"):
                    shutil.move(file_of(tmp_path, "a", suffix), file_of(tmp_path, "c", suffix))
            case "other shape":
                shutil.rmtree(tmp_path / "pod")
                other = Namespace(model="other", revision="r1", block_tokens=16)
                pool = NvmePool(
                    [path], 32, BLOCK_BYTES, other, InstanceId("a"), NATIVE.checksums, OPEN_BLOCK_IO, reach=Reach.POD
                )
                rows = rows_of(hashes)
                pool.write(range(8), rows, Proof(NAMESPACE.id, Epoch(1), hashes, NATIVE.checksums(rows)))
                pool.close()
            case "no hints":
                path.with_suffix(".slots").unlink()
            case "torn hints":
                os.truncate(path.with_suffix(".slots"), 2 * 32 + 7)
            case "random hints":
                path.with_suffix(".slots").write_bytes(np.random.default_rng(1).bytes(32 * 32 + 5))
            case "folder":
                path.unlink()
                path.mkdir()
        with opened(tmp_path, "b") as b:
            look(b)
            hits = serve(b, 1, 8).prefix.hits
            assert hits == ({Tier.NVME: 2} if damage == "torn hints" else {})
            assert b.stats().corrupt_blocks == 0


def test_hints_of_blocks_that_are_gone_lead_to_misses_and_are_followed_once(tmp_path: Path) -> None:
    with opened(tmp_path, "a", slots=4) as a, opened(tmp_path, "b", slots=0) as b:
        serve(a, 1, 4)
        assert a.settle(WAIT_S)
        folder = look(b)
        table = folder._tables
        serve(a, 2, 4)
        assert a.settle(WAIT_S)
        assert folder.find(NAMESPACE.id, hashes_of(1, 4))
        assert folder._tables is table  # b has not looked since
        assert serve(b, 1, 4).prefix.hits == {}
        assert folder.find(NAMESPACE.id, hashes_of(1, 4)) == []
        look(b)
        assert serve(b, 2, 4).prefix.hits == {Tier.NVME: 4}


def test_a_slot_that_proved_nothing_is_looked_at_again_whatever_is_missed_meanwhile(tmp_path: Path) -> None:
    with written(tmp_path) as (path, hashes), opened(tmp_path, "b", slots=0) as b:
        folder = look(b)
        now_s = folder._clock()
        folder._clock = lambda: now_s
        (run,) = folder.find(NAMESPACE.id, hashes)
        rows = np.empty((1, BLOCK_BYTES), dtype=np.uint8)

        def outcome(at: int, block: bytes) -> ReadOutcome:
            return folder.read(run.instance, run.slots[at : at + 1], NAMESPACE.id, block, rows).outcomes[0]

        with open(path, "r+b") as file:
            file.seek(PAGE_BYTES + run.slots[0] * STRIDE)
            body = file.read(STRIDE)
            file.seek(-STRIDE, os.SEEK_CUR)
            file.write(bytes(STRIDE))  # its owner is about to write it
            file.flush()
            assert outcome(0, hashes[:HASH_BYTES]) == ReadOutcome.MISSING
            file.seek(-STRIDE, os.SEEK_CUR)
            file.write(body)
        now_s += pod._DOUBT_S / 2
        assert outcome(1, hashes_of(2, 1)) == ReadOutcome.MISSING  # of another slot
        folder.poll()
        assert folder.find(NAMESPACE.id, hashes) == []
        now_s += pod._DOUBT_S / 2 + 1
        folder.poll()
        assert folder.find(NAMESPACE.id, hashes) == [run]
        assert outcome(0, hashes[:HASH_BYTES]) == ReadOutcome.GOOD


def test_a_file_that_is_made_anew_and_one_that_is_removed_are_noticed(tmp_path: Path) -> None:
    with opened(tmp_path, "b", slots=0) as b:
        with opened(tmp_path, "a") as a:
            serve(a, 1, 4)
            assert a.settle(WAIT_S)
        look(b)
        assert serve(b, 1, 4).prefix.hits == {Tier.NVME: 4}
        shutil.rmtree(tmp_path / "pod")
        b.evict(Tier.HBM, hashes_of(1, 4))
        (tmp_path / "pod").mkdir()
        assert look(b).find(NAMESPACE.id, hashes_of(1, 4)) == []
        with opened(tmp_path, "a", slots=16) as a:
            serve(a, 3, 4)
            assert a.settle(WAIT_S)
        look(b)
        assert serve(b, 3, 4).prefix.hits == {Tier.NVME: 4}


@pytest.mark.parametrize("where", ["decode_header", "_Table"])
def test_a_look_that_ends_in_the_middle_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    with opened(tmp_path, "b", slots=0) as b:
        with opened(tmp_path, "a") as a:
            serve(a, 1, 4)
            assert a.settle(WAIT_S)
        look(b)
        shutil.rmtree(tmp_path / "pod")
        (tmp_path / "pod").mkdir()
        with opened(tmp_path, "a", slots=16) as a:
            serve(a, 3, 4)
            assert a.settle(WAIT_S)
        folder = b.pools.pod
        assert isinstance(folder, PodFolder)
        with monkeypatch.context() as short:

            def fail(*given: Any) -> None:
                raise MemoryError

            short.setattr(pod, where, fail)
            with pytest.raises(MemoryError):
                folder.poll()
        look(b)
        assert serve(b, 3, 4).prefix.hits == {Tier.NVME: 4}


def test_a_file_that_goes_while_it_is_read_is_closed_after_its_last_reader(tmp_path: Path) -> None:
    with written(tmp_path, 4) as (path, hashes), opened(tmp_path, "b", slots=0) as b:
        folder = look(b)
        (run,) = folder.find(NAMESPACE.id, hashes)
        rows = np.empty((4, BLOCK_BYTES), dtype=np.uint8)
        assert folder.read(run.instance, run.slots, NAMESPACE.id, hashes, rows).outcomes == [ReadOutcome.GOOD] * 4
        file = folder._peers[run.instance].file
        assert file is not None
        engine, calls = file.engine, list[str]()

        class Watched:
            def read(self, *arguments: Any) -> Any:
                path.unlink()
                folder.poll()  # nobody is to read it any more
                calls.append("read")
                return engine.read(*arguments)

            def close(self, wait_s: float) -> bool:
                calls.append("close")
                return engine.close(wait_s)

        file.engine = Watched()  # type: ignore[assignment]
        rows[:] = 0
        assert folder.read(run.instance, run.slots, NAMESPACE.id, hashes, rows).outcomes == [ReadOutcome.GOOD] * 4
        assert np.array_equal(rows, rows_of(hashes))
        assert calls == ["read", "close"]
        assert folder.find(NAMESPACE.id, hashes) == []


def test_hints_that_were_lost_are_written_again_from_what_the_journal_knows(tmp_path: Path) -> None:
    with written(tmp_path) as (path, hashes):
        path.with_suffix(".slots").unlink()
        with opened(tmp_path, "a") as a:
            assert len(a.held(Tier.NVME)) == 8
        assert sorted(slots_of(path)) == sorted(split_hashes(hashes))


def test_the_pod_comes_before_the_object_pool_and_both_behind_the_own_tiers(tmp_path: Path) -> None:
    store = MemoryStore()
    with make_manager({Tier.HBM: 32}, objects=memory_objects(BLOCK_BYTES, 4, store)) as writer:
        serve(writer, 1, 16)
        assert writer.settle(WAIT_S)
    with written(tmp_path, depth=10):
        settings = load_settings(flags=flags_of(tmp_path, "b", 0))
        with open_manager(settings, [NAMESPACE], BLOCK_BYTES, "test", memory_objects(BLOCK_BYTES, 4, store)) as b:
            b._loads.locator = KnowsAll()
            look(b)
            assert serve(b, 1, 18).prefix.hits == {Tier.NVME: 10, Tier.OBJECT: 6}


def test_a_pod_whose_folder_hangs_is_a_miss_and_then_not_asked(tmp_path: Path) -> None:
    opened_gate = threading.Event()

    with written(tmp_path), opened(tmp_path, "b", slots=0, onboard__wait_s=0.1) as b:
        folder = look(b)
        read = folder.read

        def hangs(*run: Any) -> ReadResult:
            opened_gate.wait(4 * WAIT_S)
            return read(*run)

        folder.read = hangs  # type: ignore[method-assign]

        def leaves_late(depth: int, slots: int) -> bool:
            """A read that no thread has begun in time is not late, but given up."""
            assert b.acquire(NAMESPACE.id, hashes_of(1, depth)).depth == 0
            return b.stats().late_slots == slots

        eventually(lambda: leaves_late(4, 4), "the read does not begin")
        assert leaves_late(4, 4)  # it finds its blocks on their way
        eventually(lambda: leaves_late(8, 8), "the second read does not begin")
        assert b.trouble() == "a: reads do not end; a miss until they do"
        assert b.acquire(NAMESPACE.id, hashes_of(1, 8), wait_s=WAIT_S * 10).depth == 0
        opened_gate.set()
        assert b.settle(WAIT_S)
        assert serve(b, 1, 8).prefix.hits == {Tier.HBM: 8}


def test_two_instances_of_one_name_cannot_share_a_file(tmp_path: Path) -> None:
    from kvbm.core.errors import PoolError

    with opened(tmp_path, "a"):
        flags = flags_of(tmp_path, "a") | {"instance.data_dir": str(tmp_path / "elsewhere")}
        with refused_soon(), pytest.raises(PoolError, match="in use by another manager"):
            open_manager(load_settings(flags=flags), [NAMESPACE], BLOCK_BYTES)


def test_a_folder_and_a_path_exclude_each_other(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="both path and folder"):
        load_settings(flags=flags_of(tmp_path, "a") | {"pools.nvme.path": "x"})


def test_a_peer_is_looked_at_in_the_background(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pod, "POLL_S", 0.02)
    with opened(tmp_path, "a") as a, opened(tmp_path, "b") as b:
        serve(a, 1, 4)
        assert a.settle(WAIT_S)
        folder = b.pools.pod
        assert folder is not None
        eventually(
            lambda: [len(run.slots) for run in folder.find(NAMESPACE.id, hashes_of(1, 4))] == [4], "nobody looks"
        )
        assert serve(b, 1, 4).prefix.hits == {Tier.NVME: 4}
