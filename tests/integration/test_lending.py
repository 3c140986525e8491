"""Two instances, a catalog and a nats-server: the second reads from the first's HOST and NVME what it would have
computed.
"""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from kvbm.assembly import open_engine_manager
from kvbm.assembly.lending import LentNamespaces, socket_path
from kvbm.assembly.peers import Roots, host_id, peer_key
from kvbm.config import Settings, TransportSettings, load_settings
from kvbm.core.errors import ConfigError
from kvbm.core.events import BlocksMigrated, MigrateCause
from kvbm.core.ids import HASH_BYTES, Namespace, NamespaceId, Tier
from kvbm.core.lent import LentCounts
from kvbm.locate.base import FoundElsewhere, Nowhere
from kvbm.manager.owned_hbm import Manager
from kvbm.streams.journal.segments import segment_files
from tests.eventually import WAIT_S, eventually
from tests.extras import needed
from tests.journals import whole_frames
from tests.lending_pairs import DEPTH, Pair, computed, reads_by
from tests.managers import BLOCK_BYTES, NAMESPACE, check_bytes, hashes_of
from tests.owning_engines import OwningEngine

needed("torch", "engine")  # what it maps once must be there before a test counts

MEMORY, TCP, TLS = "memory", "tcp", "tcp under TLS"
ACME = Namespace(model="test", revision="r1", block_tokens=16, tenant="acme")


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    with ExitStack() as opened:
        yield Pair(tmp_path, opened)


def fetches(settings: Settings) -> list[BlocksMigrated]:
    """What the journal of a closed instance says came from others."""
    folder = Path(settings.instance.data_dir) / "instances" / settings.instance.id / "journal"
    events = [event for _, _, path in segment_files(folder) for frame in whole_frames(path) for event in frame.events]
    return [one for one in events if isinstance(one, BlocksMigrated) and one.cause == MigrateCause.FETCH]


def mapped_memory() -> int:
    """Memory files that this process has mapped, as HOST is."""
    return Path("/proc/self/maps").read_text().count("/memfd:")


def test_a_closed_instance_gives_its_memory_back_though_somebody_keeps_it(pair: Pair) -> None:
    gc.collect()
    gc.disable()
    try:
        before = mapped_memory()
        first = pair.instance("first")
        assert mapped_memory() > before
        first.close()
        eventually(lambda: mapped_memory() <= before, "HOST is mapped still")
    finally:
        gc.enable()


@pytest.mark.parametrize("way", [MEMORY, TCP, TLS])
@pytest.mark.parametrize("tier", [Tier.HOST, Tier.NVME])
def test_the_second_reads_what_the_first_has_computed(pair: Pair, way: str, tier: Tier) -> None:
    transport, names = way.split(maxsplit=1)[0], ("first", "second")
    flags: dict[str, dict[str, Any]] = pair.certificates(*names) if way == TLS else {name: {} for name in names}
    first, second = (pair.instance(name, **flags[name]) for name in names)
    reads_by(second, transport)
    hashes = computed(first, tier)
    pair.has_found("first")
    pair.is_heard(*names)
    prefix = second.acquire(NAMESPACE.id, hashes)
    assert prefix.hits == {Tier.HOST: DEPTH}
    check_bytes(second, hashes, prefix.slots)
    second.unpin(prefix.slots)
    stats = second.stats()
    assert stats.peers is not None
    assert (stats.peer_hits, stats.peers.blocks, stats.peers.failed_reads) == (DEPTH, {transport: DEPTH}, 0)
    assert second.settle(WAIT_S)
    first.evict(tier, hashes)  # nothing is pinned there any more
    assert first.match(hashes).depth == 0
    told = f'transfer_bytes_total{{distance="0",transport="{transport}"}} {DEPTH * BLOCK_BYTES:.1f}'
    eventually(
        lambda: told in pair.site.client.metrics(), "the catalog is not told of it", state=pair.site.client.metrics
    )
    second.close()
    [event] = fetches(pair.settings("second"))
    assert (event.source, event.target, event.kept, event.hashes) == ("first", Tier.HBM, True, hashes)


def test_the_catalogs_metrics_say_what_an_instance_lends_and_refuses(pair: Pair) -> None:
    """By each way, and to somebody who has another key."""
    other_key = pair.key.parent / "other key"
    other_key.write_text("o" * 64)
    other_key.chmod(0o600)
    first, second = pair.instance("first"), pair.instance("second")
    flags = {"transport__listen": "", "transport__fetch": True, "transport__key_file": str(other_key)}
    stranger = pair.instance("stranger", **flags)
    size = DEPTH * BLOCK_BYTES

    def lent(by: Manager) -> LentCounts:
        counts = by.stats().lent
        assert counts is not None
        return counts

    def says(*lines: str) -> None:
        told = [f"kvbm_catalog_{line}" for line in lines]
        text = pair.site.client.metrics
        eventually(lambda: {*told} <= {*text().splitlines()}, "the catalog says otherwise", state=text)

    def told(memory: int, unix: int, tcp: int) -> None:
        by = {"memory": memory, "unix": unix, "tcp": tcp, "rdma": 0, "nixl": 0}
        says(
            *(f'lent_bytes_total{{instance="first",transport="{way}"}} {float(count)}' for way, count in by.items()),
            'lent_blocks{instance="first"} 0.0',
        )

    told(0, 0, 0)
    assert 'lent_bytes_total{instance="stranger"' not in pair.site.client.metrics()
    for prompt, tier, transport in ((1, Tier.HOST, MEMORY), (2, Tier.NVME, MEMORY), (3, Tier.HOST, TCP)):
        hashes = computed(first, tier, prompt)
        pair.has_found("first", prompt)
        reads_by(second, transport)
        prefix = second.acquire(NAMESPACE.id, hashes)
        assert prefix.hits == {Tier.HOST: DEPTH}
        second.unpin(prefix.slots)
        told(size, size * (prompt > 1), size * (prompt > 2))
    assert second.stats().peers is not None and stranger.stats().lent is None
    assert lent(first).tcp_bytes == second.stats().peers.bytes[TCP] == size
    reads_by(stranger, TCP)
    hashes = computed(first, Tier.HOST, 4)
    pair.has_found("first", 4)
    assert stranger.acquire(NAMESPACE.id, hashes).depth == 0
    refused = lent(first).unproved
    assert refused > 0
    says(
        f'lending_refusals_total{{instance="first",why="unproved"}} {float(refused)}',
        'lending_refusals_total{instance="first",why="busy"} 0.0',
        'lending_leases_expired_total{instance="first"} 0.0',
        'lent_corrupt_blocks_total{instance="first"} 0.0',
    )
    says(f'lending_connections{{instance="first"}} {float(lent(first).connections)}')


def test_a_route_prices_what_another_lends_and_computes_what_nobody_does(pair: Pair) -> None:
    """Blocks are small and computing them is slow, so they are read; the first is busy, so the prompt goes to the
    second.
    """
    first, second = pair.instance("first"), pair.instance("second")
    hashes = computed(first, Tier.HOST)
    pair.has_found("first")
    tokens = DEPTH * NAMESPACE.block_tokens + 5
    first.report_load(10_000_000, 3, prefill_tokens_per_s=10_000.0)
    second.report_load(0, 0, prefill_tokens_per_s=10_000.0)

    def best() -> tuple[str, str, int, int]:
        found = pair.site.client.route(NAMESPACE.id, hashes, tokens, remember=False).ranked[0]
        return found.instance, found.peer, found.peer_blocks, found.missing_tokens

    eventually(lambda: best() == ("second", "first", DEPTH, 5), "no route prices what is lent", state=best)
    told = pair.site.client.route(NAMESPACE.id, hashes, tokens, remember=False).candidates
    assert told is not None
    assert [(one.instance, one.begin, one.end, one.tcp) for one in told.lent] == [("first", 0, DEPTH, True)]
    first.evict(Tier.HOST, hashes)
    whole = DEPTH * NAMESPACE.block_tokens + 5
    eventually(lambda: best() == ("second", "", 0, whole), "what is gone is priced", state=best)


def test_who_has_no_certificate_reads_nothing_and_says_so_once(pair: Pair) -> None:
    first = pair.instance("first", **pair.certificates("first")["first"] | {"transport__key_file": str(pair.key)})
    second = pair.instance("second")
    reads_by(second, TCP)
    hashes = computed(first, Tier.HOST)
    pair.has_found("first")
    with capture_logs() as logs:
        for _ in range(3):
            assert second.acquire(NAMESPACE.id, hashes).depth == 0
    [warning] = [one for one in logs if one["log_level"] == "warning"]
    assert warning["event"] == "peer.unread" and "it speaks TLS here" in warning["why"]


def test_a_long_prompt_comes_from_two(pair: Pair) -> None:
    flags = {f"pools__{tier}__slots": 400 for tier in ("hbm", "host")}
    owners = [pair.instance(name, **flags) for name in ("one", "two")]
    reader = pair.instance("reader", **flags)
    for one in owners:
        computed(one, Tier.HOST, depth=300)
    eventually(lambda: len(pair.site.client.find(NAMESPACE.id, hashes_of(1, 300)).peers) == 2, "one is not found")
    prefix = reader.acquire(NAMESPACE.id, hashes_of(1, 300))
    check_bytes(reader, hashes_of(1, 300), prefix.slots)
    stats = reader.stats()
    assert prefix.depth == stats.peer_hits == 300 and stats.peers is not None and stats.peers.readers == 2


@pytest.mark.parametrize("transport", [MEMORY, TCP])
def test_an_engine_that_owns_hbm_reads_into_host_what_another_has_there(pair: Pair, transport: str) -> None:
    flags: dict[str, Any] = {"pools__hbm__owner": "engine", "pools__hbm__device": "auto"}
    engines = []
    for name in ("first", "second"):
        manager = open_engine_manager(pair.settings(name, **flags), [NAMESPACE], BLOCK_BYTES, "test")
        pair.closes(manager)
        engines.append(OwningEngine(manager))
    first, second = engines
    reads_by(second.manager, transport)
    assert first.store(1, DEPTH) == DEPTH
    pair.has_found("first")
    acquiring = second.acquired(1, DEPTH + 2)  # which looks at the bytes
    assert acquiring.hits == {Tier.HOST: DEPTH}
    acquiring.release()
    assert second.manager.stats().peer_hits == DEPTH
    assert second.hits(1, DEPTH) == {Tier.HOST: DEPTH} and second.manager.stats().peer_hits == DEPTH  # its own now
    second.manager.close()
    [event] = fetches(pair.settings("second"))
    assert (event.source, event.target, event.kept) == ("first", Tier.HOST, True)


@pytest.mark.parametrize("transport", [MEMORY, TCP])
def test_without_room_in_host_what_another_has_is_a_miss_until_there_is_room(pair: Pair, transport: str) -> None:
    flags: dict[str, Any] = {"pools__hbm__owner": "engine", "pools__hbm__device": "auto"}
    engines = []
    for name, slots in (("first", 64), ("second", DEPTH)):
        settings = pair.settings(name, **flags, pools__host__slots=slots, pools__nvme__slots=0)
        manager = open_engine_manager(settings, [NAMESPACE], BLOCK_BYTES, "test")
        pair.closes(manager)
        engines.append(OwningEngine(manager))
    first, second = engines
    reads_by(second.manager, transport)
    for prompt in (1, 2):
        assert first.store(prompt, DEPTH) == DEPTH
        pair.has_found("first", prompt)
    acquiring = second.acquired(1, DEPTH)
    assert acquiring.hits == {Tier.HOST: DEPTH}
    with capture_logs() as logs:
        refused = second.acquired(2, DEPTH)
        assert refused.depth == 0
        refused.release()
    assert [one["event"] for one in logs if one["log_level"] in ("warning", "error")] == []
    acquiring.release()
    again = second.acquired(2, DEPTH)
    assert again.hits == {Tier.HOST: DEPTH}
    again.release()
    assert second.manager.stats().quarantined_slots == 0


def test_without_the_rdma_device_one_sentence_says_so_and_tcp_serves(pair: Pair) -> None:
    with capture_logs() as logs:
        first, second = (pair.instance(name, transport__rdma="mlx5_9") for name in ("first", "second"))
    warnings = [one for one in logs if one["log_level"] == "warning"]
    assert [one["event"] for one in warnings] == ["rdma.unavailable"] * 2
    for one in warnings:
        assert "\n" not in one["why"] and ("mlx5_9" in one["why"] or "RDMA needs pyverbs" in one["why"]), one
    assert "rdma" not in first.lends
    assert second.pools.peers is not None
    second.pools.peers._host_id = "another machine"
    hashes = computed(first, Tier.HOST)
    pair.has_found("first")
    assert second.acquire(NAMESPACE.id, hashes).hits == {Tier.HOST: DEPTH}
    stats = second.stats().peers
    assert stats is not None and stats.blocks == {TCP: DEPTH}


class Stale(Nowhere):
    """Says what the catalog said once."""

    def __init__(self, found: FoundElsewhere) -> None:
        self.found = found

    def find(
        self, pool: str, namespace: NamespaceId, hashes: bytes, first: int, timeout_s: float, instance: str = ""
    ) -> FoundElsewhere:
        return self.found


def remembered(reader: Manager, hashes: bytes) -> None:
    """Whatever happens, the reader believes what the catalog says now."""
    found = reader._loads.locator.find("", NAMESPACE.id, hashes, 0, WAIT_S)
    assert found.peers
    reader._loads.locator.close()
    reader._loads.locator = Stale(found)


@pytest.mark.parametrize("transport", [MEMORY, TCP])
def test_what_the_owner_has_evicted_meanwhile_is_a_miss(pair: Pair, transport: str) -> None:
    first, second = pair.instance("first"), pair.instance("second")
    reads_by(second, transport)
    hashes = computed(first, Tier.HOST)
    pair.has_found("first")
    remembered(second, hashes)
    first.evict(Tier.HOST, hashes[3 * HASH_BYTES :])
    assert second.acquire(NAMESPACE.id, hashes).hits == {Tier.HOST: 3}
    with capture_logs() as logs:
        first.evict(Tier.HOST, hashes)
        assert second.acquire(NAMESPACE.id, hashes_of(1, DEPTH)).depth == 3
    assert [one["event"] for one in logs if one["log_level"] == "warning"] == []


@pytest.mark.parametrize("transport", [MEMORY, TCP])
def test_an_owner_that_has_closed_is_a_miss_and_one_warning(pair: Pair, transport: str) -> None:
    first, second = pair.instance("first"), pair.instance("second")
    reads_by(second, transport)
    hashes = computed(first, Tier.HOST)
    pair.has_found("first")
    remembered(second, hashes)
    first.close()
    with capture_logs() as logs:
        for _ in range(3):
            assert second.acquire(NAMESPACE.id, hashes).depth == 0
    assert [one["event"] for one in logs if one["log_level"] == "warning"] == ["peer.unread"]
    assert second.stats().quarantined_slots == 0


OWNER = """
    import sys, time
    from kvbm.assembly import open_engine_manager, open_manager
    from kvbm.config import load_settings
    from tests.managers import BLOCK_BYTES, NAMESPACE, serve
    flags = dict(one.split("=", 1) for one in sys.argv[1:])
    manager = open_manager(load_settings(flags=flags), [NAMESPACE], BLOCK_BYTES)
    serve(manager, 1, 8)
    assert manager.settle(60)
    print("ready", flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("transport", [MEMORY, TCP])
def test_an_owner_that_is_killed_is_a_miss(pair: Pair, transport: str) -> None:
    settings = pair.settings("owner")
    flags = {
        "instance.data_dir": settings.instance.data_dir,
        "instance.cluster": "lend",
        "instance.id": "owner",
        "pools.hbm.slots": 64,
        "pools.hbm.device": "cpu",
        "pools.host.slots": 64,
        "nats.url": settings.nats.url,
        "nats.heartbeat_s": 0.2,
        "catalog.url": settings.catalog.url,
        "journal.in_memory": "true",
        "transport.listen": "tcp://127.0.0.1:0",
        "transport.key_file": str(pair.key),
    }
    command = [sys.executable, "-c", textwrap.dedent(OWNER), *(f"{key}={value}" for key, value in flags.items())]
    owner = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])
    try:
        assert owner.stdout is not None and owner.stdout.readline() == "ready\n"
        second = pair.instance("second")
        reads_by(second, transport)
        pair.has_found("owner")
        hashes = hashes_of(1, DEPTH)
        remembered(second, hashes)
        prefix = second.acquire(NAMESPACE.id, hashes[: 4 * HASH_BYTES])  # what another process lends
        check_bytes(second, hashes[: 4 * HASH_BYTES], prefix.slots)
        assert prefix.hits == {Tier.HOST: 4}
    finally:
        owner.kill()
        owner.wait(WAIT_S)
    with capture_logs() as logs:
        assert second.acquire(NAMESPACE.id, hashes).hits == {Tier.HBM: 4}
    assert [one["event"] for one in logs if one["log_level"] == "warning"] == ["peer.unread"]
    stats = second.stats()
    assert stats.peers is not None and (stats.peers.failed_reads, stats.failed_copies) == (1, 0)  # no device has failed
    owner.stdout.close()


@pytest.mark.parametrize("transport", [MEMORY, TCP])
def test_a_namespace_opens_to_who_has_its_root(pair: Pair, transport: str) -> None:
    first = pair.instance("first", (ACME,), catalog__tenant_secrets={"acme": "one"})
    second = pair.instance("second", (ACME,), catalog__tenant_secrets={"acme": "another"})
    third = pair.instance("third", (ACME,), catalog__tenant_secrets={"acme": "one"})
    unknown = pair.instance("unknown", (ACME,))
    hashes = hashes_of(1, 4)
    slots = first.allocate(4)
    assert slots is not None
    first.unpin(first.create(ACME.id, bytes(16), 0, hashes, slots))  # type: ignore[arg-type]
    assert first.settle(WAIT_S)
    eventually(lambda: bool(pair.site.client.find(ACME.id, hashes).peers), "nobody lends")
    reads_by(second, transport)
    reads_by(third, transport)
    with capture_logs() as logs:
        assert second.acquire(ACME.id, hashes).depth == 0
        assert unknown.acquire(ACME.id, hashes).depth == 0
    assert [one["event"] for one in logs if one["log_level"] == "warning"] == ["peer.unread"]
    assert third.acquire(ACME.id, hashes).depth == 4
    assert unknown.stats().peers is not None and unknown.stats().peers.reads == 0  # type: ignore[union-attr]


def test_another_key_opens_nothing(pair: Pair, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("o" * 64)
    other.chmod(0o600)
    first, second = pair.instance("first"), pair.instance("second", transport__key_file=str(other))
    reads_by(second, TCP)
    hashes = computed(first, Tier.HOST)
    pair.has_found("first")
    with capture_logs() as logs:
        assert second.acquire(NAMESPACE.id, hashes).depth == 0
    assert "peer.unread" in [one["event"] for one in logs]


def test_nobody_lends_or_asks_by_default(pair: Pair) -> None:
    quiet = pair.instance("quiet", transport__listen="", transport__key_file="")
    assert quiet.pools.peers is None and quiet.lends == {}
    host_only = pair.instance("host-only", transport__listen="host", transport__key_file="")
    assert set(host_only.lends) == {"host", "unix"} and Path(host_only.lends["unix"]).is_socket()
    path = Path(host_only.lends["unix"])
    assert path.stat().st_mode & 0o777 == 0o600
    host_only.close()
    assert not path.exists()
    reader = pair.instance("reader", transport__listen="", transport__fetch=True)
    assert reader.pools.peers is not None and reader.lends == {}


def test_a_start_that_cannot_listen_ends_and_leaves_nothing_behind(pair: Pair, tmp_path: Path) -> None:
    first = pair.instance("first")
    taken = first.lends["tcp"]
    with pytest.raises(ConfigError, match="listen"):
        pair.instance("second", transport__listen=f"tcp://{taken}")
    second = pair.instance("second")  # nothing holds its folder
    assert second.lends["tcp"] != taken
    with pytest.raises(ConfigError, match="no HOST pool"):
        pair.instance("third", pools__host__slots=0)
    loose = tmp_path / "loose"
    loose.write_text("k" * 64)
    loose.chmod(0o644)
    for path, why in ((loose, "chmod 600"), (tmp_path / "absent", "cannot be read")):
        with pytest.raises(ConfigError, match=why):
            pair.instance("third", transport__key_file=str(path))
    short = tmp_path / "short"
    short.write_text("abc\n")
    short.chmod(0o600)
    with pytest.raises(ConfigError, match="needs at least 32"):
        peer_key(TransportSettings(key_file=str(short)))


class Noting:
    """A server that notes what is opened."""

    def __init__(self) -> None:
        self.said: list[tuple[Any, ...]] = []

    def admit(self, namespace: NamespaceId, root: bytes) -> None:
        self.said.append(("admit", namespace, root))

    def withdraw(self, namespace: NamespaceId) -> None:
        self.said.append(("withdraw", namespace))

    def fence(self, fenced: bool) -> None:
        self.said.append(("fence", fenced))


def test_a_secret_that_changes_closes_what_it_had_opened() -> None:
    secrets = {"acme": "one"}
    unnamed = Namespace(model="test", block_tokens=16)
    stranger = Namespace(model="test", revision="r1", block_tokens=16, tenant="stranger")
    server, fenced = Noting(), [False]
    spaces = LentNamespaces(server, lambda: [ACME, unnamed, stranger], Roots(secrets), lambda: fenced[0])
    spaces.look()
    spaces.look()
    assert server.said == [("admit", ACME.id, ACME.root(b"one"))]
    secrets["acme"] = "two"
    spaces.look()
    assert server.said[1:] == [("withdraw", ACME.id), ("admit", ACME.id, ACME.root(b"two"))]
    del secrets["acme"]
    fenced[0] = True
    spaces.look()
    spaces.look()
    assert server.said[3:] == [("fence", True), ("withdraw", ACME.id)]
    secrets |= {"acme": "two", "stranger": "s"}
    fenced[0] = False
    spaces.look()
    assert {one[0] for one in server.said[5:]} == {"fence", "admit"} and len(server.said) == 8


def test_a_socket_whose_path_would_be_too_long_lies_elsewhere(tmp_path: Path) -> None:
    settings = load_settings()
    deep = msgspec.structs.replace(
        settings, instance=msgspec.structs.replace(settings.instance, data_dir=str(tmp_path / ("x" * 90)))
    )
    path = socket_path(deep)
    assert len(str(path)) <= 100 and path.parent.stat().st_mode & 0o777 == 0o700
    assert socket_path(deep) == path
    assert len(host_id()) == 32 and host_id() == host_id()
