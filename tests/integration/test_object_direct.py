"""An object pool receives objects past the store's client, and asks that for all else: whatever happens on the short
way, outcomes and rows are those of the long one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from typing import Any

import pytest

from kvbm.assembly import CODER, NATIVE
from kvbm.assembly.native import NEW_OBJECT_RECEIVER
from kvbm.core.ids import HASH_BYTES
from kvbm.pools.base import ReadOutcome
from kvbm.pools.object import direct
from kvbm.pools.object.header import header_bytes
from kvbm.pools.object.pool import BlockObjects, ObjectPoolOptions
from kvbm.pools.stores import blobs
from kvbm.pools.stores.base import ObjectStore, Put, StoreAwayError
from kvbm.pools.stores.late import LateStore
from kvbm.pools.stores.link import RequestLimits
from tests.eventually import eventually
from tests.faulty_http import Fault, FaultyServer, faulty
from tests.object_stores import PATIENT, WAIT_S, Place, s3_place
from tests.pool_runs import Run, random_run

BLOCK_BYTES, K = 4000, 2
GOOD, MISSING, CORRUPT = ReadOutcome.GOOD, ReadOutcome.MISSING, ReadOutcome.CORRUPT
SIGNED = "X-Amz-Signature"  # in the path of requests that a receiver sends


class Reads:
    """A pool on a store behind a server that can be told to fail, and what has been asked there."""

    def __init__(self, server: FaultyServer, place: Place) -> None:
        self.server, self.place = server, place
        self.troubles: list[str] = []
        self.pool = self.pool_on(place.open(endpoint=server.url))

    def pool_on(self, store: ObjectStore, **options: Any) -> BlockObjects:
        usual = {"blocks": K, "deadline_s": WAIT_S, "new_receiver": NEW_OBJECT_RECEIVER}
        way = ObjectPoolOptions(**usual | {"on_trouble": self.troubles.append} | options)
        return BlockObjects(store, BLOCK_BYTES, NATIVE.checksums, CODER, way)

    def put(self, objects: int, seed: int = 0) -> Run:
        run = random_run(objects * K, BLOCK_BYTES, seed)
        assert self.pool.put(run.rows, run.proof) == [True] * len(run.rows)
        self.server.asked.clear()
        return run

    def get(self, run: Run, pool: BlockObjects | None = None) -> list[ReadOutcome]:
        """How the read of each object ended; good rows have the bytes that were put."""
        rows = run.room()
        result = (pool or self.pool).get(run.namespace, run.hashes, rows)
        good = [index for index, outcome in enumerate(result.outcomes) if outcome is GOOD]
        assert (rows[good] == run.rows[good]).all()
        assert (result.checksums[good] == run.proof.checksums[good]).all()
        return result.outcomes[::K]

    def asked(self) -> tuple[int, int]:
        """How many objects were asked for by a receiver, and by the store's client."""
        gets = [SIGNED in asked.path for asked in self.server.asked if asked.method == "GET"]
        return sum(gets), len(gets) - sum(gets)

    def name(self, run: Run, index: int) -> str:
        [name] = self.pool.names(run.namespace, [run.hashes[: (index + 1) * K * HASH_BYTES][-HASH_BYTES:]])
        return name


@pytest.fixture
def reads(s3_endpoint: str) -> Iterator[Reads]:
    with faulty(s3_endpoint) as server:
        made = Reads(server, s3_place(s3_endpoint))
        yield made
        server.faults.clear()
        made.pool.close()


def test_objects_are_received_by_one_request_each_and_their_size_is_learnt(reads: Reads) -> None:
    run = reads.put(10)
    assert reads.get(run) == [GOOD] * 10
    assert reads.asked() == (10, 0)
    assert reads.pool._object_bytes[run.namespace] == header_bytes(K) + K * BLOCK_BYTES
    assert reads.pool.stats().got_objects == 10
    assert reads.troubles == []


def test_a_run_of_several_lots_is_received_whole(reads: Reads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "_LOT", 3)
    run = reads.put(8)
    assert reads.get(run) == [GOOD] * 8
    assert reads.asked() == (8, 0)


def test_a_part_of_a_chain_goes_to_the_rows_that_are_named(reads: Reads) -> None:
    run = reads.put(3)
    rows = run.room()
    found = reads.pool.get(run.namespace, run.hashes, rows, at=[5, 0, 3], first=1)
    assert found.outcomes == [GOOD] * 3
    assert (rows[[5, 0, 3]] == run.rows[1:4]).all()
    assert (rows[[1, 2, 4]] == 0xA5).all()
    assert reads.asked() == (2, 0)


@pytest.mark.parametrize(
    "fault",
    [
        Fault("status", 403, "AccessDenied", times=1, method="GET"),
        Fault("status", 503, "SlowDown", times=1, method="GET"),
        Fault("cut", times=1, method="GET"),
        Fault("reset", times=1, method="GET"),
    ],
)
def test_what_is_refused_on_the_short_way_comes_on_the_long_one_which_is_kept_to_for_a_while(
    reads: Reads, fault: Fault
) -> None:
    run = reads.put(1)
    reads.server.faults.append(fault)
    assert reads.get(run) == [GOOD]
    assert reads.asked() == (1, 1)
    assert reads.get(run) == [GOOD]
    assert reads.asked() == (1, 2)
    assert reads.troubles == []
    assert reads.pool._direct is not None
    reads.pool._direct._rests_until = 0.0  # some time later
    assert reads.get(run) == [GOOD]
    assert reads.asked() == (2, 2)


def test_silence_on_the_short_way_costs_the_read_timeout_and_not_the_deadline(reads: Reads) -> None:
    run = reads.put(1)
    limits = RequestLimits(requests_in_flight=4, connect_timeout_s=WAIT_S, read_timeout_s=1.0)
    with closing(reads.pool_on(reads.place.open(endpoint=reads.server.url, limits=limits))) as pool:
        reads.server.faults.append(Fault("never", times=1, method="GET"))
        assert reads.get(run, pool) == [GOOD]


def test_what_is_missing_or_damaged_is_found_out_by_the_stores_client(reads: Reads) -> None:
    run = reads.put(4)
    client = reads.place.open()
    names = [reads.name(run, index) for index in range(4)]
    assert client.delete(names[:2], WAIT_S) == [None] * 2
    assert client.put([Put(names[1], bytes(header_bytes(K) + K * BLOCK_BYTES))], WAIT_S) == [None]
    client.close()
    assert reads.get(run) == [MISSING, CORRUPT, GOOD, GOOD]
    assert reads.asked() == (4, 2)
    assert reads.get(run) == [MISSING, CORRUPT, GOOD, GOOD]  # neither is a reason to rest
    assert reads.asked() == (8, 4)


def test_withdrawn_objects_are_missing_though_they_come(reads: Reads, monkeypatch: pytest.MonkeyPatch) -> None:
    run = reads.put(3)
    gone = reads.name(run, 1)
    monkeypatch.setattr(reads.pool, "_withdrawn", lambda names: {gone}.intersection(names))
    assert reads.get(run) == [GOOD, MISSING, GOOD]
    assert reads.asked() == (3, 0)


def test_requests_of_both_ways_together_stay_within_the_limit(reads: Reads) -> None:
    runs = [reads.put(12, seed) for seed in range(4)]
    reads.server.most_at_once = 0
    outcomes: list[list[ReadOutcome]] = []

    def get(run: Run) -> None:
        outcomes.append(reads.get(run))

    works: list[Callable[[], object]] = [partial(get, run) for run in runs]
    works += [partial(reads.put, 12, seed) for seed in range(4, 6)]
    threads = [threading.Thread(target=work, daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert outcomes == [[GOOD] * 12] * 4
    assert 1 <= reads.server.most_at_once <= PATIENT.requests_in_flight


def test_places_are_given_back_also_where_the_store_never_answered(reads: Reads) -> None:
    run = reads.put(6)
    with closing(reads.pool_on(reads.place.open(endpoint=reads.server.url), deadline_s=0.5)) as pool:
        reads.server.faults.append(Fault("never"))
        assert reads.get(run, pool) == [ReadOutcome.FAILED] * 6
        reads.server.faults.clear()
        store = pool.store
        assert isinstance(store, blobs.BlobStore)
        eventually(lambda: store._free._value == PATIENT.requests_in_flight, "places are still taken")


def test_a_store_that_came_late_lends_its_requests_too(reads: Reads) -> None:
    run = reads.put(2)
    came = threading.Event()
    late = LateStore(
        StoreAwayError("late", "it is away"),
        lambda: reads.place.open(endpoint=reads.server.url),
        on_came=lambda store: came.set(),
        again_s=0.01,
    )
    with closing(reads.pool_on(late)) as pool:
        assert came.wait(WAIT_S)
        reads.server.asked.clear()
        assert reads.get(run, pool) == [GOOD] * 2
        assert reads.asked() == (2, 0)


def test_a_few_large_objects_are_read_in_ranges_and_many_are_received(
    reads: Reads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blobs, "PART_BYTES", BLOCK_BYTES)
    few, many = reads.put(1), reads.put(PATIENT.requests_in_flight, seed=1)
    assert reads.get(few) == [GOOD]
    assert reads.asked() == (0, 2)
    assert reads.get(many) == [GOOD] * PATIENT.requests_in_flight
    assert reads.asked() == (PATIENT.requests_in_flight, 2)


def test_close_ends_a_get_that_waits_for_the_store(reads: Reads) -> None:
    run = reads.put(2)
    reads.server.faults.append(Fault("never"))
    outcomes: list[list[ReadOutcome]] = []
    asking = threading.Thread(target=lambda: outcomes.append(reads.get(run)), daemon=True)
    asking.start()
    eventually(lambda: reads.server.asked, "nobody asks")
    reads.pool.close()
    asking.join(WAIT_S)
    assert outcomes == [[ReadOutcome.FAILED] * 2]
