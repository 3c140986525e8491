"""Clusters of real processes on one bucket: instances, nats-server and catalog, all of them killed, and the janitor.

`make test` kills everything of one cluster, which keeps its machines, and `integration/test_janitor.py` has the rest
within one process; `make test-all` has all of it with real ones.
"""

from __future__ import annotations

import os
import random
import signal
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from kvbm.assembly import CODER, NATIVE
from kvbm.core.ids import HASH_BYTES, SequenceHash
from kvbm.pools.base import ReadOutcome
from kvbm.pools.object.pool import BlockObjects, ObjectPoolOptions
from tests.eventually import eventually
from tests.faults.processes.checker import run_replay
from tests.faults.processes.clusters import Cluster, Index, K, Prompt, hashes_of, objects_in
from tests.faults.processes.content import BLOCK_BYTES, LEAF_BLOCKS, NAMESPACE, STEM_BLOCKS, rows_of
from tests.faults.processes.told import ToldWorker
from tests.object_stores import Place

BUCKETS = pytest.mark.parametrize("place", ["s3", pytest.param("radosgw", marks=pytest.mark.objects)], indirect=True)
DEPTH = (STEM_BLOCKS + LEAF_BLOCKS) // K * K  # of a prompt, in whole objects
OF_A: list[Prompt] = [(0, 0), (0, 1), (0, 2)]
OF_B: list[Prompt] = [(1, 0), (1, 1), (0, 0)]  # the last one it reads from the pool
TAIL: Prompt = (2, 0)
PROMPTS = [*OF_A, *OF_B[:2], TAIL]
NVME = {"pools__nvme__slots": 256}


@pytest.mark.nightly  # test_janitor.py says the same of managers in one process
@BUCKETS
@pytest.mark.parametrize("kept", [pytest.param(True, id="machines-kept"), pytest.param(False, id="machines-new")])
def test_after_kill_9_of_everything_and_a_fresh_catalog_the_index_is_as_before(
    place: Place, kept: bool, tmp_path: Path
) -> None:
    """Two instances, nats-server and catalog die at once; stream, database and checkpoints are thrown away.

    Before they die, the stream stands still, and one instance serves one more prompt: objects whose claims are in
    nothing but its journal. What must come back is what the index had, and that prompt.

    With their machines kept, the instances find their journals, and a stream that has nothing. They publish all that
    their journals have, so every claim is back before the janitor runs, those included that no stream ever had, and it
    finds nothing; a snapshot states what NVMe holds, block by block what each held when it died.

    With new machines nothing is left but the bucket: nobody claims anything before the janitor has run, and it finds
    every object.
    """
    with Cluster(tmp_path, "one", place) as cluster:
        cluster.instances("a", "b", **NVME)
        cluster.serve("a", OF_A)
        cluster.wait_until_known()
        hits = cluster.serve("b", OF_B)
        assert hits[-1] == {"OBJECT": DEPTH}
        cluster.wait_until_known()
        before = cluster.index(PROMPTS)
        os.kill(cluster.nats.pid, signal.SIGSTOP)
        assert cluster.serve("a", [TAIL]) == [{}]
        objects = objects_in(place)
        held = {name: _split(worker.ask(op="state")["held"]["NVME"]) for name, worker in cluster.workers.items()}
        cluster.kill()
        cluster.forget(instances=not kept)

        cluster.start()
        cluster.instances("a", "b", **NVME)
        cluster.wait_until_known()
        everything = {block for blocks in objects.values() for block in blocks}
        assert everything == hashes_of(PROMPTS, DEPTH)
        assert cluster.claims() == (everything if kept else set())
        report = cluster.gc()
        assert (report.found, report.foreign, report.waiting) == (0 if kept else len(objects), 0, 0)
        assert (report.missing_blocks, report.mended_blocks, report.unknown) == (0, 0, 0)
        cluster.wait_until_known()
        after = cluster.index(PROMPTS)
        _check_objects(before, after, everything)
        assert cluster.claims() == everything
        nvme = {name: {block for block, names in after.of("NVME").items() if name in names} for name in held}
        assert nvme == (held if kept else {"a": set(), "b": set()})
        if kept:
            seen = before.of("NVME")
            assert {block: names for block, names in after.of("NVME").items() if block in seen} == seen
        assert objects_in(place).keys() == objects.keys()

        cluster.instances("reader")
        hits = cluster.serve("reader", PROMPTS)
        assert all(sum(one.values()) >= DEPTH and one.keys() <= {"HBM", "OBJECT"} for one in hits), hits
        assert sum(one["OBJECT"] for one in hits) == len(everything)
        assert cluster.wrong == []
        assert cluster.workers["reader"].ask(op="status")["corrupt"] == 0
        assert cluster.gc().found == 0


def _check_objects(before: Index, after: Index, everything: set[bytes]) -> None:
    tail = hashes_of([TAIL], DEPTH)
    assert before.depths == {prompt: 0 if prompt == TAIL else DEPTH for prompt in PROMPTS}
    assert after.depths == dict.fromkeys(PROMPTS, DEPTH)
    assert {block: names for block, names in after.of("OBJECT").items() if block not in tail} == before.of("OBJECT")
    assert after.of("OBJECT").keys() == everything
    assert (before.claims, after.claims) == (len(everything - tail), len(everything))


@pytest.mark.nightly
@BUCKETS
def test_an_instance_killed_again_and_again_while_it_puts_leaves_whole_objects_and_the_janitor_claims_them_all(
    place: Place, tmp_path: Path
) -> None:
    dice = random.Random(6)
    with Cluster(tmp_path, "one", place) as cluster:
        for _ in range(3):
            (worker,) = cluster.instances("a", **NVME)
            there = _count(place)
            worker.send(op="burst", blocks=100_000)
            eventually(lambda there=there: _count(place) > there, "nothing is put")  # type: ignore[misc]
            time.sleep(dice.random() * 0.3)
            worker.kill()
        cluster.instances("a", **NVME)
        assert cluster.workers["a"].ask(op="pause")["settled"]
        cluster.wait_until_known()
        objects = objects_in(place)
        claims = cluster.claims()
        unclaimed = [name for name, blocks in objects.items() if not claims.issuperset(blocks)]
        assert claims <= {block for blocks in objects.values() for block in blocks}
        report = cluster.gc()
        assert (report.found, report.foreign, report.unknown, report.missing_blocks) == (len(unclaimed), 0, 0, 0)
        assert objects_in(place) == objects
        cluster.wait_until_known()
        assert cluster.claims() == {block for blocks in objects.values() for block in blocks}
        assert _wrong_objects(place, objects) == []
        code, answer, words = run_replay("verify", cluster.nats.url)
        assert code == 0 and answer["findings"] == [], words
        assert cluster.wrong == []


@pytest.mark.nightly
@BUCKETS
def test_two_clusters_of_two_instances_on_one_bucket_what_the_first_computed_the_second_reads_after_the_first_is_gone(
    place: Place, tmp_path: Path
) -> None:
    with Cluster(tmp_path, "first", place) as first, Cluster(tmp_path, "second", place) as second:
        first.instances("a", "b")
        second.instances("a", "b")
        first.serve("a", OF_A)
        first.serve("b", OF_B[:2])
        assert second.serve("a", [TAIL]) == [{}]
        first.kill()
        objects = objects_in(place)
        everything = hashes_of(PROMPTS, DEPTH)
        assert {bytes(block) for blocks in objects.values() for block in blocks} == everything
        second.wait_until_known()
        assert second.claims() == hashes_of([TAIL], DEPTH)
        assert second.gc().found == len(objects) - DEPTH // K
        second.wait_until_known()
        assert second.index(PROMPTS).depths == dict.fromkeys(PROMPTS, DEPTH)
        for name, prompts in (("a", OF_A), ("b", OF_B[:2])):
            hits = second.serve(name, prompts)
            assert all(sum(one.values()) >= DEPTH and one["OBJECT"] > 0 for one in hits), hits
        assert second.wrong == []


@pytest.mark.nightly
@BUCKETS
def test_a_janitor_deletes_what_two_clusters_read_and_put_all_the_while_and_nobody_is_given_wrong_bytes(
    place: Place, tmp_path: Path
) -> None:
    """The janitor of one cluster knows nothing of the other's claims; afterwards each comes to know what is still
    there.
    """
    with Cluster(tmp_path, "first", place) as first, Cluster(tmp_path, "second", place) as second:
        clusters = [first, second]
        workers = [cluster.instances("a", rate=40.0, pools__hbm__slots=48)[0] for cluster in clusters]
        for worker in workers:
            eventually(partial(_has_read, worker), "nothing is read")
        report = second.gc(4.0, quota_bytes=1)
        assert report.withdrawn.keys() == {"quota"} and report.deleted > 0 and report.undeleted == 0
        for worker in workers:
            assert worker.ask(op="pause")["settled"]
            status = worker.ask(op="status")
            assert (status["corrupt"], status["wrong"]) == (0, 0)
        for cluster in clusters:
            cluster.wait_until_known()
            eventually(partial(_claims_are_right, cluster), "claims are not what the bucket has")
        assert first.wrong == second.wrong == []


def _has_read(worker: ToldWorker) -> bool:
    return bool(worker.ask(op="status")["hits"]["OBJECT"] > 0)


def _claims_are_right(cluster: Cluster) -> bool:
    """Whether a run of the janitor brings the claims to what is there; of those made just now it does not judge."""
    cluster.gc(skew_s=5)  # again and again: not every run looks closer where numbers agree by chance
    cluster.wait_until_known()
    return cluster.claims() == {bytes(block) for blocks in objects_in(cluster.place).values() for block in blocks}


def _split(packed: str) -> set[bytes]:
    digits = 2 * HASH_BYTES
    return {bytes.fromhex(packed[at : at + digits]) for at in range(0, len(packed), digits)}


def _count(place: Place) -> int:
    store = place.open()
    try:
        return sum(1 for _ in store.listed(f"{K}/", 60.0))
    finally:
        store.close()


def _wrong_objects(place: Place, found: dict[str, list[SequenceHash]]) -> list[str]:
    """Those of a place that do not give back the bytes of their blocks."""
    objects = BlockObjects(
        place.open(), BLOCK_BYTES, NATIVE.checksums, CODER, ObjectPoolOptions(blocks=K, threads=2, deadline_s=60.0)
    )
    objects.admit([NAMESPACE])
    try:
        return [name for name, blocks in found.items() if not _is_right(objects, b"".join(blocks))]
    finally:
        objects.close()


def _is_right(objects: BlockObjects, chain: bytes) -> bool:
    rows = np.zeros((K, BLOCK_BYTES), dtype=np.uint8)
    read = objects.get(NAMESPACE.id, chain, rows)
    return set(read.outcomes) == {ReadOutcome.GOOD} and bool(np.array_equal(rows, rows_of(chain)))
