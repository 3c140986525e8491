"""The faults that each alert of deploy/prometheus is proved with, on the real parts of `AlertSite`."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvbm import _native
from kvbm.core.codec import VERSION, Frame, encode_frame
from kvbm.core.events import BlocksEvicted, EvictReason
from kvbm.core.hashing import sequence_hashes
from kvbm.core.ids import HASH_BYTES, NO_PARENT, Epoch, InstanceId, SequenceHash, Tier
from tests.alert_site import CAPACITY, CLUSTER, WAIT_S, AlertSite, Fault
from tests.catalog_site import SPACE, Instance
from tests.eventually import eventually
from tests.faults.processes.proxy import Rules

ASKED = {"namespace": SPACE.id.hex(), "hashes": []}
Meanwhile = Callable[[], object]


def nothing() -> None:
    """What users do where they need do nothing."""


# -- servers ----------------------------------------------------------------------------------------------------------


@contextmanager
def nats_killed(site: AlertSite) -> Iterator[Meanwhile]:
    site.kill_nats()
    yield lambda: site.engines["a"].ask("serve", prompt=next(site.prompts), settle=False)
    site.start_nats()


@contextmanager
def postgres_stopped(site: AlertSite) -> Iterator[Meanwhile]:
    site.postgres.stop()
    yield lambda: site.engines["a"].ask("serve", prompt=next(site.prompts))
    site.postgres.start()


@contextmanager
def archive_is_a_file(site: AlertSite) -> Iterator[Meanwhile]:
    aside = site.folder / "aside"
    site.archive.rename(aside)
    site.archive.write_text("this is no folder\n")
    yield lambda: site.engines["a"].ask("serve", prompt=next(site.prompts))
    site.archive.unlink()
    aside.rename(site.archive)


@contextmanager
def catalog_killed(site: AlertSite) -> Iterator[Meanwhile]:
    site.catalog.kill()
    yield nothing
    site.start_catalog()


# -- instances --------------------------------------------------------------------------------------------------------


@contextmanager
def instance_killed(site: AlertSite) -> Iterator[Meanwhile]:
    site.engines["b"].child.kill()
    yield nothing
    site.start_engines(b={})


@contextmanager
def instance_stopped(site: AlertSite) -> Iterator[Meanwhile]:
    site.engines["b"].end()
    yield nothing
    site.start_engines(b={})


@contextmanager
def other_version(site: AlertSite) -> Iterator[Meanwhile]:
    site.engines["b"].end()
    eventually(lambda: "KvbmTargetDown" in site.firing(), "its end is not told", WAIT_S, site.alerts)
    site.start_engines(b={"version": "9.9.9"})
    yield nothing
    site.engines["b"].end()
    site.start_engines(b={})


@contextmanager
def journal_disk_full(site: AlertSite) -> Iterator[Meanwhile]:
    engine = site.engines["a"]
    pid = engine.child.process.pid
    before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (1, before[1]))
    yield lambda: engine.ask("serve", prompt=next(site.prompts), settle=False)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, before)
    engine.ask("serve", prompt=next(site.prompts), settle=False)


@contextmanager
def nvme_bytes_changed(site: AlertSite) -> Iterator[Meanwhile]:
    engine, prompt = site.engines["a"], next(site.prompts)
    engine.ask("serve", prompt=prompt)
    engine.ask("evict", prompt=prompt, tiers=["HBM", "HOST"])
    pool = site.pool_of("a")
    with pool.open("r+b") as opened:
        size, page = pool.stat().st_size, 1 << 12
        for at in range(1 << 16, size, 1 << 16):
            opened.seek(at + page // 2)
            opened.write(b"\xa5" * 16)
        opened.flush()
        os.fsync(opened.fileno())
    engine.ask("serve", prompt=prompt)
    yield nothing


@contextmanager
def store_hangs(site: AlertSite) -> Iterator[Meanwhile]:
    engine, stored = site.engines["a"], []
    for _ in range(6):
        stored.append(next(site.prompts))
        engine.ask("serve", prompt=stored[-1])
        engine.ask("evict", prompt=stored[-1], tiers=["HBM", "HOST", "NVME"])
    site.signal_store(signal.SIGSTOP)

    def serve() -> None:
        engine.ask("serve", prompt=stored.pop() if stored else next(site.prompts), wait_s=0.3, settle=False)

    yield serve
    site.signal_store(signal.SIGCONT)


def reads_of_peers(site: AlertSite) -> Meanwhile:
    """One instance computes, and the other reads it."""
    before: list[int] = []

    def read() -> None:
        before.append(next(site.prompts))
        site.engines["b"].ask("serve", prompt=before[-1])
        if len(before) > 2:
            site.engines["a"].ask("serve", prompt=before.pop(0))

    return read


@contextmanager
def peer_link_cut(site: AlertSite) -> Iterator[Meanwhile]:
    site.peer_link.cut()
    yield reads_of_peers(site)
    site.peer_link.heal()


@contextmanager
def peer_link_slow(site: AlertSite) -> Iterator[Meanwhile]:
    site.peer_link.set(down=Rules(bytes_per_s=2e7))
    yield reads_of_peers(site)
    site.peer_link.set()


# -- what is written to the stream ------------------------------------------------------------------------------------


def chain(count: int, seed: int = 0) -> bytes:
    """Packed hashes of blocks of one prompt."""
    return sequence_hashes(list(range(seed, seed + 4 * count)), 4, SPACE.root())


def created(one: Instance, hashes: bytes, first: int, end: int) -> None:
    """Have a stranger's HBM hold blocks of a prompt."""
    allocation = one.ledger.allocate(Tier.HBM, end - first)
    assert allocation is not None
    parent = SequenceHash(hashes[HASH_BYTES * (first - 1) : HASH_BYTES * first]) if first else NO_PARENT
    run = hashes[HASH_BYTES * first : HASH_BYTES * end]
    one.ledger.create(SPACE.id, Tier.HBM, parent, first, run, allocation.slots)


@contextmanager
def poison(site: AlertSite) -> Iterator[Meanwhile]:
    with site.stranger("poisoned") as one:
        one.publish()
        one.run(lambda stream: stream.publish(CLUSTER, one.name, b"hello, is this the right subject?"))
        yield nothing


@contextmanager
def newer_frames(site: AlertSite) -> Iterator[Meanwhile]:
    with site.stranger("newer") as one:
        one.publish()
        created(one, chain(4), 0, 4)
        (frame,) = one.ledger.take_frames(one.name, time.time_ns())
        data = frame.data[:4] + (VERSION + 1).to_bytes(2, "little") + frame.data[6:-4]
        data += _native.crc32c(data).to_bytes(4, "little")
        one.run(lambda stream: stream.publish(CLUSTER, one.name, data))
        yield nothing


@contextmanager
def gap(site: AlertSite) -> Iterator[Meanwhile]:
    with site.stranger("gap") as one:
        lose_some(one)
        yield nothing
        begin_anew(one)


def lose_some(one: Instance) -> None:
    """A message of it is lost on the way."""
    hashes = chain(30)
    for first in (0, 10, 20):
        created(one, hashes, first, first + 10)
        one.publish(lose=first == 10)


def begin_anew(one: Instance) -> None:
    """It begins another epoch."""
    one.epoch = Epoch(2)
    one.ledger.restart(one.epoch)
    one.publish()
    one.beat()


@contextmanager
def broken_rule(site: AlertSite) -> Iterator[Meanwhile]:
    """An instance says that blocks are gone which it never had."""
    with site.stranger("wrong") as one:
        one.publish()
        event = BlocksEvicted(namespace=SPACE.id, tier=Tier.HBM, reason=EvictReason.CAPACITY, hashes=chain(3, 900))
        frame = Frame(
            instance=one.name,
            epoch=one.epoch,
            first_offset=one.ledger.applied,
            wall_time_ns=time.time_ns(),
            digest=one.ledger.digest,
            events=(event,),
        )
        one.run(lambda stream: stream.publish(CLUSTER, one.name, encode_frame(frame)))
        yield nothing
        begin_anew(one)


@contextmanager
def index_nearly_full(site: AlertSite) -> Iterator[Meanwhile]:
    with filled(site, CAPACITY - 120 - site.entries()):
        yield nothing


@contextmanager
def index_full(site: AlertSite) -> Iterator[Meanwhile]:
    with filled(site, CAPACITY + 100):
        yield nothing


@contextmanager
def filled(site: AlertSite, count: int) -> Iterator[None]:
    with site.stranger("large", CAPACITY + 100) as one:
        created(one, chain(count), 0, count)
        one.publish()
        yield


@contextmanager
def rows_refused(site: AlertSite) -> Iterator[Meanwhile]:
    """Somebody has given a table a rule of their own."""
    site.sql("ALTER TABLE instances ADD CONSTRAINT strict CHECK (id NOT LIKE 'wild%')")
    with site.stranger("wild") as one:
        one.publish()
        yield nothing
        site.sql("ALTER TABLE instances DROP CONSTRAINT strict")


@contextmanager
def routes_of_nobody(site: AlertSite) -> Iterator[Meanwhile]:
    one = Instance(site.nats.url, CLUSTER, "routes")
    yield lambda: one.run(lambda stream: stream.send_routes(CLUSTER, InstanceId("_catalog-x"), b"\xc1"))


STREAM_GONE = {"KvbmViewOld", "KvbmCatalogLags", "KvbmManagerTrouble", "KvbmEventsNotPublished"}
NATS_KILLED = Fault("NATS is killed", {"KvbmNatsAway", "KvbmCatalogDegraded"} | STREAM_GONE, nats_killed)
INSTANCE_KILLED = Fault("an instance is killed", {"KvbmTargetDown", "KvbmInstancesExcluded"}, instance_killed)
FAULTS = (
    NATS_KILLED,
    INSTANCE_KILLED,
    Fault("an instance is stopped", {"KvbmTargetDown"}, instance_stopped),
    Fault("PostgreSQL is stopped", {"KvbmSqlAway", "KvbmCatalogDegraded", "KvbmSqlBehind"}, postgres_stopped),
    Fault("the archive's folder is a file", {"KvbmFolderRefuses", "KvbmCatalogDegraded"}, archive_is_a_file),
    Fault("a message is lost", {"KvbmGapsNotRepaired"}, gap),
    Fault("a message that is no frame", {"KvbmStrangeMessages"}, poison),
    Fault("a newer kvbm writes frames", {"KvbmNewerFrames", "KvbmInstancesExcluded"}, newer_frames),
    Fault("an event breaks a rule", {"KvbmAnomalies"}, broken_rule),
    Fault("the index is nearly full", {"KvbmIndexNearCapacity"}, index_nearly_full),
    Fault("the index is full", {"KvbmIndexNearCapacity", "KvbmIndexRefuses"}, index_full),
    Fault("somebody writes routes", {"KvbmRoutesRefused"}, routes_of_nobody),
    Fault(
        "the journal's disk is full",
        {"KvbmJournalRefuses", "KvbmInstanceTrouble", "KvbmEventsNotPublished"},
        journal_disk_full,
    ),
    Fault("bytes of the NVMe pool change", {"KvbmCorruptBlocks"}, nvme_bytes_changed),
    Fault("the object store hangs", {"KvbmFailedCopies", "KvbmBlocksLate"}, store_hangs),
    Fault("reads from another instance fail", {"KvbmPeersFail"}, peer_link_cut),
    Fault("reads from another instance are slow", {"KvbmPeersSlow"}, peer_link_slow),
    Fault("the database refuses a row", {"KvbmRowsRefused"}, rows_refused),
    Fault("two versions run", {"KvbmTargetDown", "KvbmVersionsMixed"}, other_version, together=False),
    Fault("the catalog is killed", {"KvbmNoCatalog", "KvbmTargetDown"}, catalog_killed),
)
# Alerts that no fault here makes fire, and why. tests/alert_cases.py has all.
OTHERWISE_PROVED = {
    "KvbmCatalogNotReady": "a catalog has read a stream as short as this one before it is scraped twice",
    "KvbmCatalogErrors": "the same: it answers 503 until it is ready",
    "KvbmSlotsQuarantined": "a pool has to raise what none may raise, which takes a defect of it",
    "KvbmTwoRuns": "a twin with a folder of its own shuts out the first run, whose heartbeats end within seconds, so "
    "this lasts too short; tests/unit/test_liveness.py has what is ignored",
    "KvbmTaskEnded": "a task has to raise what none raises: a defect; tests/unit/test_metrics.py has the part",
    "KvbmDigestDivergence": "memory of the index has to change by itself, which takes a defect; "
    "tests/integration/test_catalog_repair.py has the counter",
    "KvbmNamespacesRefused": "it takes 65,536 namespaces, or 64 MiB of them, in some 70 instances at once; "
    "tests/unit/test_sequencer.py has the counter, with a smaller bound",
}
