"""The janitor among real parts: nats-servers, catalogs with SQL, managers, and one store that several clusters
share.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import IO, Any

import pytest

import kvbm.assembly
from kvbm.assembly import NATIVE, open_manager, run_gc
from kvbm.cli import main
from kvbm.core.errors import JanitorBusyError, KvbmError
from kvbm.core.ids import Tier, split_hashes
from kvbm.janitor import Report
from kvbm.manager.owned_hbm import Manager
from kvbm.pools.object.tombstones import LEASE_NAME, WITHDRAWN_PREFIX, decode_list
from kvbm.pools.stores.base import Get, Got, Listed, ObjectStore, Put, Refusal
from kvbm.pools.stores.memory import MemoryStore
from tests.eventually import eventually
from tests.janitors import HOUR_S, Skipping
from tests.managers import BLOCK_BYTES, NAMESPACE, hashes_of, rows_of, serve
from tests.object_pools import memory_objects
from tests.object_stores import Place, place_in
from tests.sites import DEPTH, GRACE_S, WAIT_S, K, Site, site

PROMPTS = range(6)


RADOSGW = pytest.param("radosgw", marks=pytest.mark.objects)


@pytest.fixture(params=["memory", "s3", RADOSGW])
def new_store(request: pytest.FixtureRequest) -> Callable[[], ObjectStore]:
    """Opens the same store again and again."""
    return place_in(request.param, request).open


def names_in(store: ObjectStore, prefix: str = "") -> set[str]:
    return {entry.name for entry in store.listed(prefix, WAIT_S) if prefix or not entry.name.startswith(".kvbm/")}


def compute(site: Site, managers: list[Manager]) -> None:
    """The instances serve prompts, and all of it comes into the store and the catalog."""
    for prompt in PROMPTS:
        serve(managers[prompt % len(managers)], prompt, DEPTH)
    for manager in managers:
        assert manager.settle(WAIT_S)
    eventually(lambda: all(site.depth(prompt) == DEPTH for prompt in PROMPTS), "the catalog has not all claims")
    eventually(lambda: site.claimed() == len(PROMPTS) * DEPTH, "SQL has not all claims")


def fetched(manager: Manager, prompt: int) -> int:
    """Blocks of a prompt that came from the object pool, every byte checked."""
    return serve(manager, prompt, DEPTH).prefix.hits.get(Tier.OBJECT, 0)


def test_two_clusters_on_one_bucket_what_the_first_computed_the_second_reads_after_the_first_is_gone(
    new_store: Callable[[], ObjectStore], tmp_path: Path
) -> None:
    with site(tmp_path, "first", new_store) as first:
        compute(first, [first.instance("a"), first.instance("b")])
    with site(tmp_path, "second", new_store) as second:
        one, two = second.instance("a"), second.instance("b")
        assert fetched(one, 100) == 0  # it knows of nothing yet
        report = second.gc()
        assert report.found == 2 * len(PROMPTS)

        def is_known(prompt: int) -> bool:
            return second.depth(prompt) == DEPTH

        for prompt in PROMPTS:
            eventually(partial(is_known, prompt), "the index lacks claims")
            assert fetched((one, two)[prompt % 2], prompt) == DEPTH

        def state_of_the_janitor() -> str:
            return next(one.state for one in second.client.instances() if one.instance.startswith("janitor-"))

        eventually(lambda: state_of_the_janitor() == "stopped", "the janitor has not stopped")


def test_after_the_end_of_everything_a_fresh_catalog_has_the_same_index_after_gc_and_snapshots(
    new_store: Callable[[], ObjectStore], tmp_path: Path
) -> None:
    """New database, new stream: nothing is left but the store and the NVMe file of one instance."""

    def manager_of(here: Site) -> Manager:
        settings = here.settings(
            "a", pools__nvme__slots=64, journal__in_memory=False, instance__data_dir=str(tmp_path / "kept")
        )
        return open_manager(
            settings,
            [NAMESPACE],
            BLOCK_BYTES,
            object_pool=memory_objects(BLOCK_BYTES, K, new_store(), deadline_s=WAIT_S),
        )

    with site(tmp_path, "before", new_store) as before:
        with manager_of(before) as manager:
            compute(before, [manager])
            pool = manager.pools.object.name  # type: ignore[union-attr]
            held = set(manager.held(Tier.NVME))
            blocks = len(PROMPTS) * DEPTH
            eventually(lambda: sum(map(len, before.claims(pool).values())) == blocks, "SQL has not all claims")
        claims = before.claims(pool)
    with site(tmp_path, "after", new_store) as after, manager_of(after) as manager:
        assert set(manager.held(Tier.NVME)) == held
        after.gc()  # what the instance's journal still has is published again as well
        assert after.claims(pool) == claims
        eventually(lambda: all(after.depth(prompt) == DEPTH for prompt in PROMPTS), "the index lacks claims")
        summary = next(one for one in after.client.instances() if one.instance == "a")
        eventually(lambda: int(_digest_of(after, "a"), 16) == manager.digest()[1], "the digests differ")
        assert summary.epoch == manager.epoch
        assert after.gc().found == 0


def _digest_of(here: Site, instance: str) -> str:
    found = here.client.instance(instance)
    assert found is not None
    return found.digest


def test_what_nobody_uses_goes_and_what_is_read_stays(new_store: Callable[[], ObjectStore], tmp_path: Path) -> None:
    with site(tmp_path, "one", new_store) as here:
        manager = here.instance("a")
        compute(here, [manager])
        store = new_store()
        assert len(names_in(store)) == 2 * len(PROMPTS)
        here.age(HOUR_S)
        since_s = time.time() - HOUR_S / 4
        reader = here.instance("b")
        assert fetched(reader, 0) == DEPTH
        eventually(lambda: here.claimed(since_s) == DEPTH, "what is read does not count as used")
        report = here.gc(ttl_s=HOUR_S / 2)
        assert report.withdrawn == {"ttl": 2 * (len(PROMPTS) - 1)}
        assert report.deleted == 2 * (len(PROMPTS) - 1)
        objects = memory_objects(BLOCK_BYTES, K, store)
        assert names_in(store) == set(objects.names(NAMESPACE.id, split_hashes(hashes_of(0, DEPTH))[K - 1 :: K]))
        assert names_in(store, WITHDRAWN_PREFIX) == set()
        assert here.claims(objects.name) == {NAMESPACE.id: set(map(bytes, split_hashes(hashes_of(0, DEPTH))))}
        eventually(lambda: here.depth(1) == 0 and here.depth(0) == DEPTH, "the index keeps what is gone")


def test_death_between_put_and_event_leaves_an_object_that_the_next_run_claims(tmp_path: Path) -> None:
    store = MemoryStore()
    with site(tmp_path, "one", lambda: store) as here:
        from kvbm.core.ids import Epoch
        from kvbm.pools.base import Proof

        objects = memory_objects(BLOCK_BYTES, K, store)
        rows = rows_of(hashes_of(3, DEPTH))
        assert all(objects.put(rows, Proof(NAMESPACE.id, Epoch(1), hashes_of(3, DEPTH), NATIVE.checksums(rows))))
        manager = here.instance("a")
        assert fetched(manager, 3) == 0
        manager.evict(Tier.HBM, hashes_of(3, DEPTH))
        manager.evict(Tier.HOST, hashes_of(3, DEPTH))
        here.gc()
        eventually(lambda: here.depth(3) == DEPTH, "the object is not claimed")
        fresh = here.instance("b")
        assert fetched(fresh, 3) == DEPTH


def test_every_claim_lost_from_sql_and_index_comes_back(tmp_path: Path) -> None:
    store = MemoryStore()
    with site(tmp_path, "one", lambda: store) as here:
        manager = here.instance("a")
        compute(here, [manager])
        everything = b"".join(hashes_of(prompt, DEPTH) for prompt in PROMPTS)
        from kvbm.core.events import EvictReason

        manager.withdraw(NAMESPACE.id, everything, EvictReason.CLEARED)
        eventually(lambda: here.claims(store.name) == {}, "the claims are still there")
        assert here.gc().found == 2 * len(PROMPTS)
        eventually(lambda: all(here.depth(prompt) == DEPTH for prompt in PROMPTS), "the index lacks claims")


class Watched(MemoryStore):
    """A store that takes its time for reads, and knows which of them a deletion overtook."""

    def __init__(self) -> None:
        super().__init__()
        self.deleted = 0
        self.overtaken: list[str] = []
        self.late_readers: list[threading.Thread] = []
        self.late_may_end = threading.Event()
        self.looks: dict[threading.Thread, int] = {}  # at tombstones, by pools that do so by themselves
        self._deleted_s: dict[str, float] = {}
        self._chosen = random.Random(7)

    def put(self, puts: Sequence[Put], deadline_s: float) -> list[Refusal | None]:
        for name, body in puts:
            if name.startswith(WITHDRAWN_PREFIX):  # readers that began a moment ago, and take as long as they may
                begun_s, may_end = time.monotonic(), self.late_may_end
                for late in decode_list(body):
                    reader = threading.Thread(target=self._read_late, args=[late, may_end, begun_s])
                    self.late_readers.append(reader)
                    reader.start()
        return super().put(puts, deadline_s)

    def _read_late(self, name: str, may_end: threading.Event, begun_s: float) -> None:
        assert may_end.wait(WAIT_S), "the janitor knows no grace"
        self._read_since(begun_s, [Get(name)])

    def get(self, gets: Sequence[Get], deadline_s: float) -> list[Got | Refusal]:
        begun_s = time.monotonic()
        time.sleep(self._chosen.random() * 0.03)
        return self._read_since(begun_s, gets)

    def _read_since(self, begun_s: float, gets: Sequence[Get]) -> list[Got | Refusal]:
        answers = super().get(gets, WAIT_S)
        for one, answer in zip(gets, answers, strict=True):
            if isinstance(answer, Refusal) and self._deleted_s.get(one.name, 0.0) > begun_s and one.name[0] != ".":
                self.overtaken.append(one.name)
        return answers

    def listed(self, prefix: str, deadline_s: float, after: str = "") -> Iterator[Listed]:
        thread = threading.current_thread()
        if prefix == WITHDRAWN_PREFIX and thread.name == "kvbm-object-watch":
            self.looks[thread] = self.looks.get(thread, 0) + 1
        return super().listed(prefix, deadline_s, after)

    def delete(self, names: Sequence[str], deadline_s: float) -> list[Refusal | None]:
        for name in names:
            self._deleted_s[name] = time.monotonic()
        self.deleted += sum(name[0] != "." for name in names)
        return super().delete(names, deadline_s)


def test_no_object_is_deleted_under_a_reader(tmp_path: Path) -> None:
    """Two instances read, and put again what is gone, as fast as they can, while the janitor deletes what nobody used
    for a moment.

    What they have begun ends within the janitor's grace, which lasts as long as that takes: no clock is held against
    another.
    """
    store = Watched()
    with site(tmp_path, "one", lambda: store) as here:
        managers = [here.instance("a", look_s=0.1), here.instance("b", look_s=0.1)]
        ending, going, turns = threading.Event(), threading.Event(), [threading.Lock(), threading.Lock()]
        hits, wrong = [0, 0], list[BaseException]()
        going.set()

        def read(which: int) -> None:
            chosen = random.Random(which)
            try:
                while not ending.is_set():
                    going.wait(WAIT_S)
                    with turns[which]:
                        prompt = chosen.randrange(40)
                        hits[which] += fetched(managers[which], prompt)
                        for tier in (Tier.HBM, Tier.HOST):
                            managers[which].evict(tier, hashes_of(prompt, DEPTH))
            except BaseException as error:  # noqa: BLE001 - told below, in the thread that asks
                wrong.append(error)

        def what_has_begun_ends() -> None:
            """Requests, offloads and late readers; and both pools have looked at the tombstones since."""
            going.clear()
            try:
                with turns[0], turns[1]:
                    assert all(manager.settle(WAIT_S) for manager in managers)
            finally:
                going.set()
            store.late_may_end.set()
            store.late_may_end = threading.Event()
            for late in store.late_readers:
                late.join(WAIT_S)
            before = dict(store.looks)
            eventually(
                lambda: (
                    len(store.looks) == 2 and all(count >= before.get(one, 0) + 2 for one, count in store.looks.items())
                ),
                "a pool does not look at the tombstones",
            )

        readers = [threading.Thread(target=read, args=[which]) for which in range(2)]
        for reader in readers:
            reader.start()
        try:
            clocks = Skipping(what_has_begun_ends).clocks()

            def has_run_often() -> bool:
                for _ in range(3):
                    here.age(HOUR_S)
                    here.gc(clocks, ttl_s=HOUR_S / 2)
                return bool(wrong) or (store.deleted > 0 and bool(store.late_readers) and min(hits) > 0)

            eventually(has_run_often, "nothing is read or nothing is deleted", timeout_s=WAIT_S)
        finally:
            ending.set()
            for reader in readers:
                reader.join(WAIT_S)
        assert wrong == []
        assert store.deleted > 0 and store.late_readers and min(hits) > 0
        assert store.overtaken == []


class Waiting(MemoryStore):
    """A store whose listing of everything, which a janitor does while it has the lease, waits for something."""

    def __init__(self) -> None:
        super().__init__()
        self.waits_for: Callable[[], object] = lambda: True

    def listed(self, prefix: str, deadline_s: float, after: str = "") -> Iterator[Listed]:
        if not prefix:
            eventually(self.waits_for, "the others do not end")
        return super().listed(prefix, deadline_s, after)


def test_two_janitors_at_once_one_works_and_one_says_so(tmp_path: Path) -> None:
    store = Waiting()
    with site(tmp_path, "one", lambda: store) as one, site(tmp_path, "two", lambda: store) as two:
        compute(one, [one.instance("a")])
        ended: list[Report | KvbmError] = []
        store.waits_for = lambda: len(ended) == 3

        def work(here: Site) -> None:
            try:
                ended.append(here.gc())
            except KvbmError as error:
                ended.append(error)

        threads = [threading.Thread(target=work, args=[here]) for here in (one, one, two, two)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * WAIT_S)
        busy = [entry for entry in ended if isinstance(entry, JanitorBusyError)]
        reports = [entry for entry in ended if isinstance(entry, Report)]
        assert (len(busy), len(reports)) == (3, 1), ended
        assert "another janitor" in str(busy[0])


def test_a_janitor_is_never_given_a_prompt(tmp_path: Path) -> None:
    store = MemoryStore()
    with site(tmp_path, "one", lambda: store) as here:
        here.instance("a")
        settings = here.settings("janitor-x")
        from kvbm.core.events import JANITOR

        with open_manager(settings, [NAMESPACE], BLOCK_BYTES, JANITOR, memory_objects(BLOCK_BYTES, K, store)):
            # A heartbeat may come before what an instance says of itself.
            eventually(lambda: [one.offset > 0 for one in here.client.instances()] == [True] * 2, "it knows not both")
            ranked = here.client.route(NAMESPACE, hashes_of(1, DEPTH), 128).ranked
            assert [one.instance for one in ranked] == ["a"]


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["s3", RADOSGW], indirect=True)
def test_the_command_works_on_a_bucket_and_can_be_interrupted(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is told and done is so in this process, without the grace; what comes from outside, in a process of the
    command's own.
    """
    for name, value in place.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(kvbm.assembly, "run_gc", partial(run_gc, clocks=Skipping().clocks()))
    with site(tmp_path, "one", place.open) as here, closing(place.open()) as store:
        compute(here, [here.instance("a")])
        flags: dict[str, Any] = {
            "instance.data_dir": here.folder,
            "instance.cluster": "one",
            "nats.url": here.server.url,
            "nats.timeout_s": WAIT_S,
            "catalog.database": here.database,
            "pools.object.url": place.url,
            "pools.object.endpoint": place.endpoint,
            "pools.object.region": "us-east-1",
            "pools.object.timeout_s": WAIT_S,
            "pools.object.look_s": 1,
            "gc.grace_s": GRACE_S,
            "gc.lease_s": WAIT_S,
            "gc.skew_s": WAIT_S,
        }
        words = ["catalog", "gc", *(f"--set={key}={value}" for key, value in flags.items())]
        command = [sys.executable, "-m", "kvbm", *words]

        def carried_out(*more: str) -> str:
            assert main([*words, *more]) == 0
            return capsys.readouterr().out

        def until(event: str, said: IO[str]) -> str:
            while event not in (line := said.readline()):
                assert line, f"it ended before {event}"
            return line

        def is_free() -> bool:
            (lease,) = store.get([Get(LEASE_NAME)], WAIT_S)
            return isinstance(lease, Got) and b'"holder":""' in bytes(lease.body)

        told = carried_out("--dry-run")
        assert "dry run: nothing is changed" in told and f"{2 * len(PROMPTS)}" in told
        assert names_in(store, ".kvbm/") == set()
        assert f'"objects":{2 * len(PROMPTS)}' in carried_out("--json")
        config = tmp_path / "gc.toml"
        config.write_text("[gc]\nevery_s = 3600\n")
        pipe = subprocess.PIPE
        with subprocess.Popen([*command, "--config", str(config)], stdout=pipe, stderr=pipe, text=True) as going:
            try:
                assert going.stdout is not None and going.stderr is not None and going.stdout.readline()
                config.write_text("[gc]\nevery_s = 0\n")
                going.send_signal(signal.SIGHUP)  # between two runs
                until("settings.kept", going.stderr)
                config.write_text("[gc]\nevery_s = 0.1\n[log]\nlevel = 'debug'\n")
                going.send_signal(signal.SIGHUP)
                assert "gc.every_s" in until("settings.reloaded", going.stderr)
                until("gc.completed", going.stderr)  # it does not wait for the hour that was set before
                going.send_signal(signal.SIGTERM)
                assert going.wait(WAIT_S) == 130
            finally:
                going.kill()
        assert is_free()
        with subprocess.Popen([*command, "--every", "3600", "--set=gc.quota_bytes=1"], text=True) as going:
            try:
                eventually(lambda: names_in(store, WITHDRAWN_PREFIX), "nothing was withdrawn", timeout_s=WAIT_S)
                assert main(words) == 0
                assert "another janitor works: janitor-" in capsys.readouterr().err
                going.send_signal(signal.SIGTERM)  # within a run
                assert going.wait(WAIT_S) == 130
            finally:
                going.kill()
        assert is_free()
        assert len(names_in(store)) == 2 * len(PROMPTS)
        assert '"lists":1' in carried_out("--json") and names_in(store) == set()
