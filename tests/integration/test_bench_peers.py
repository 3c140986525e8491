"""Our side of the comparison with peers does what it is measured for."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest


class Sides(NamedTuple):
    bench_peers: ModuleType
    measure: ModuleType
    our_store: ModuleType
    ours: ModuleType
    process: ModuleType
    workload: ModuleType


class Lossy:
    """A service that loses every message of a chain in `lost` or withdrawn in `kept`, and is silent about it."""

    def __init__(self) -> None:
        self.lost: set[int] = set()
        self.kept: set[int] = set()
        self.ends = True
        self.used_s = 0.0
        self._held: dict[tuple[int, int], int] = {}
        self._ready: list[Any] = []

    def mail(self, step: Any) -> list[Any]:
        return [step]

    def lay_ready(self, messages: list[Any]) -> None:
        self._ready = messages

    def take_in(self) -> bool:
        self.used_s += 1.0
        for step in self._ready:
            if step.created.chain not in self.lost:
                self._held[step.created.chain, step.instance] = step.created.count
            if step.withdrawn is not None and step.withdrawn.chain not in self.kept:
                self._held.pop((step.withdrawn.chain, step.instance), None)
        return self.ends

    def depth(self, chain: Any, instance: int) -> int:
        return self._held.get((chain.chain, instance), 0)

    def cpu_s(self) -> float:
        return self.used_s

    def close(self) -> None:
        pass


@pytest.fixture
def sides(monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config) -> Sides:
    monkeypatch.syspath_prepend(str(pytestconfig.rootpath / "tools"))
    import bench_peers
    from peers import measure, our_store, ours, process, workload

    return Sides(bench_peers, measure, our_store, ours, process, workload)


@pytest.mark.parametrize("form", ["runs", "cut", "singles", "alone"])
def test_every_form_of_a_step_leaves_the_live_set_the_digests_speak_of(sides: Sides, form: str) -> None:
    bench = sides.measure.DirectoryBench(sides.ours.OurDirectory())
    assert bench.fill(live=4096)["blocks"] == 4096
    bench.prepare(steps=20, form=form)  # more than the live set: all of it is replaced
    assert bench.apply()["units"] == 20 * 512 * 7 / 8  # the index compares every frame's digest and raises


def test_the_shared_chains_are_found_as_deep_as_they_were_told(sides: Sides) -> None:
    directory = sides.ours.OurDirectory()
    bench = sides.measure.DirectoryBench(directory)
    assert bench.share(live=8192)["blocks"] > 4096  # raises when an answer is wrong
    assert len(bench.query(count=5, seed=1)["us"]) == 5
    with pytest.raises(ValueError, match="the answer says"):
        bench._check(1 << 20)  # a chain nobody holds


def test_a_step_of_the_pool_finds_the_run_it_uses_again(sides: Sides) -> None:
    pool = sides.ours.OurPool()
    for run in range(4):
        pool.live(pool.prepare(sides.workload.Life(None, run, 16)))
    pool.live(pool.prepare(sides.workload.Life(2, 4, 16)))
    pool.settle()
    pool._hashes[9] = bytes(256)
    with pytest.raises(LookupError, match="evicted too early"):
        pool.live(pool.prepare(sides.workload.Life(9, 5, 16)))


def test_a_sample_over_the_wire_counts_only_what_the_service_has_afterwards(sides: Sides) -> None:
    service = Lossy()
    bench = sides.measure.WireBench(service)
    assert bench.fill(live=4096)["blocks"] == 16 * 256
    bench.prepare(steps=20)  # more than the live set: chains 16 to 31 in the place of 0 to 15
    whole = bench.apply()
    assert (whole["units"], whole["told"], whole["found"], whole["stale"]) == (16 * 512, 16, 16, 0)
    assert whole["cpu_s"] == 1.0
    assert sides.bench_peers.losses("Lossy", [whole]) == []
    service.lost, service.kept, service.ends = {32, 33}, {20}, False
    bench.prepare(steps=12)  # chains 32 to 43 in the place of 16 to 27
    torn = bench.apply()
    assert (torn["units"], torn["found"], torn["stale"]) == (21 * 256, 10, 1)
    (sentence,) = sides.bench_peers.losses("Lossy", [whole, torn])
    assert "of 28 chains told it has 26, of 28 withdrawn it still has 1; 1 of 2 samples" in sentence


def test_a_service_that_loses_some_of_the_live_set_is_not_measured(sides: Sides) -> None:
    service = Lossy()
    service.lost = {7}
    with pytest.raises(ValueError, match="of 3 chains 2 arrived"):  # 0, 7 and 14 are asked for
        sides.measure.WireBench(service).fill(live=4096)


def test_a_peers_service_is_asked_on_one_connection_and_ends_when_it_is_closed(sides: Sides) -> None:
    port = sides.process.free_port()
    process = sides.process.Process("http.server", "--bind", "127.0.0.1", str(port), port=port)
    try:
        process.wait_until("/")
        assert b"<html" in process.ask("GET", "/").lower()
        with pytest.raises(OSError, match="501"):
            process.ask("POST", "/events", b"{}")
        assert process.cpu_s() > 0
    finally:
        process.close()
    with pytest.raises(OSError, match="refused"):
        process.ask("GET", "/")


def test_a_peers_service_that_does_not_start_is_said_to_have_ended(sides: Sides) -> None:
    process = sides.process.Process("http.server", "--no-such-flag", port=sides.process.free_port())
    try:
        with pytest.raises(ChildProcessError, match="ended with 2"):
            process.wait_until("/")
    finally:
        process.close()


@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_blocks_that_were_put_come_back_as_they_were(sides: Sides, tier: str, tmp_path: Path) -> None:
    store = sides.our_store.OurStore(tier, str(tmp_path), blocks=40, block_bytes=4096)
    bench = sides.measure.StoreBench(store)
    try:
        for _ in range(2):  # the second time other keys, which evict the first
            assert bench.put(blocks=40, block_bytes=4096)["units"] == 40 * 4096
            assert bench.get(blocks=40, block_bytes=4096)["wall_s"] > 0
        store._rows[7] ^= 1
        with pytest.raises(ValueError, match="1 of 40 blocks came back with other bytes"):
            bench.get(blocks=40, block_bytes=4096)
    finally:
        bench.close()
    assert not list(tmp_path.iterdir())


def test_a_get_that_brings_nothing_is_not_measured(sides: Sides, tmp_path: Path) -> None:
    store = sides.our_store.OurStore("host", str(tmp_path), blocks=40, block_bytes=4096)
    bench = sides.measure.StoreBench(store)
    try:
        bench.put(blocks=40, block_bytes=4096)
        store.get = lambda keys, blocks: None
        with pytest.raises(ValueError, match="40 of 40 blocks came back with other bytes"):
            bench.get(blocks=40, block_bytes=4096)
    finally:
        bench.close()


def test_booked_blocks_are_found_and_the_oldest_make_room(sides: Sides, tmp_path: Path) -> None:
    side = sides.our_store.main("register", folder=str(tmp_path))
    bench = sides.measure.StoreBench(side)
    try:
        for _ in range(5):  # more than the pool has slots
            assert bench.register(blocks=16_384)["units"] == 16_384
    finally:
        bench.close()
    assert not list(tmp_path.iterdir())


def test_each_store_of_a_peer_has_a_driver_and_a_side_of_ours(sides: Sides) -> None:
    tools = Path(sides.bench_peers.__file__).parent
    stores = [store for peer in sides.bench_peers.PEERS.values() for store in peer.stores]
    assert {store.title for store in stores} >= {
        "LMCache local CPU",
        "LMCache local disk",
        "LMCache fs",
        "Mooncake store",
    }
    assert all((tools / "peers" / f"{store.driver}.py").exists() for store in stores)
    assert all(store.ours["side"] == ("register" if store.books else "bytes") for store in stores)


def test_our_service_answers_what_it_was_told_and_is_asked_by_the_program_that_asks_all(
    sides: Sides, tmp_path: Path
) -> None:
    from peers import our_service

    service = our_service.OurService()
    bench = sides.measure.ServedBench(service)
    try:
        assert bench.share(live=4096)["blocks"] > 2048
        files = bench.lay(blocks=16, count=3, folder=str(tmp_path))  # raises when an answer is wrong
        assert set(files) == {"lookup", "route"}
        load = sides.bench_peers.built_load(tmp_path)
        for file in files.values():
            before_s = bench.used()["cpu_s"]
            asked = load._asked(bench.where()["port"], file, 2)
            assert asked["answers"] > 2
            assert asked["p50_us"] <= asked["p99_us"]
            assert bench.used()["cpu_s"] >= before_s
        service.depths = lambda kind, answer: [0] * 16
        with pytest.raises(ValueError, match="the answer says"):
            bench.lay(blocks=16, count=1, folder=str(tmp_path))
        broken = tmp_path / "broken"
        broken.write_bytes(Path(files["lookup"]).read_bytes().replace(b"/v1/lookup", b"/v1/nobody"))
        with pytest.raises(sides.bench_peers.PeerError, match="asking failed"):
            load._asked(bench.where()["port"], str(broken), 1)
    finally:
        bench.close()


def test_who_asks_says_what_it_can_ask_at_most(sides: Sides, tmp_path: Path) -> None:
    sentence = sides.bench_peers.built_load(tmp_path).limit()
    assert "k/s on 1 connection and" in sentence
