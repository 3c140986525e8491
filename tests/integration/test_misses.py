"""A miss says why: over HTTP, in batches, in metrics and in words on the command line, of a catalog over real
servers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager

import msgspec
import pytest

from kvbm.assembly import NATIVE, NATIVE_INDEX
from kvbm.catalog.index.cluster_index import NewIndex
from kvbm.catalog.replica import CatalogReplica, ReplicaSettings
from kvbm.core.answers import LookupAnswer, MissedAnswer, RouteAnswer
from kvbm.core.backend import REFERENCE, Backend
from kvbm.core.errors import CatalogRefusedError
from kvbm.core.events import PoolStated, StopReason
from kvbm.core.ids import Namespace, NamespaceId, Reach, Tier
from kvbm.core.layout import pool_name
from kvbm.core.watch_events import PrefixDepths, WatchBegun
from kvbm.locate.base import Catalog
from kvbm.locate.http import CatalogClient
from kvbm.locate.requests import CatalogAwayError
from kvbm.locate.watching import CatalogWatch
from kvbm.reference.cluster_index import ReferenceIndex
from kvbm.streams.nats.credentials import Credentials
from kvbm.streams.nats.read_only import ReadOnlyStream
from tests import catalog_site
from tests.catalog_site import HASHES, SPACE, Instance, Running, run_catalog
from tests.eventually import eventually
from tests.nats_fixture import WAIT_S, cluster, nats_url  # noqa: F401

FOR_EVER_S = 3600.0
SERVED_S = 5.0
OTHERS = {
    "block_tokens": Namespace(model="m", block_tokens=8),
    "revision": Namespace(model="m", block_tokens=4, revision="v2"),
    "model": Namespace(model="another", block_tokens=4),
}


@pytest.fixture
def running(nats_url: str, cluster: str, sqlite_url: str) -> Iterator[Running]:  # noqa: F811
    yield from run_catalog(nats_url, cluster, sqlite_url, liveness_s=FOR_EVER_S)


def missed_of(answer: LookupAnswer | RouteAnswer) -> MissedAnswer:
    assert isinstance(answer.missed, MissedAnswer)
    return answer.missed


def serve(running: Running, instance: Instance) -> None:
    """Publish, be heard, and wait until the catalog has it."""
    wanted = instance.publish()
    instance.beat()

    def is_there() -> bool:
        try:
            running.client.lookup(SPACE, HASHES, at_least=[wanted], wait_s=SERVED_S)
        except CatalogRefusedError as error:
            if error.code != "position_not_reached":
                raise
            return False
        return running.client.instances()[0].state == "live"

    eventually(is_there, "the catalog does not hear the instance")


@contextmanager
def over_nats_of(running: Running) -> Iterator[CatalogClient]:
    """A client over NATS, once the catalog, which is ready before, takes questions there."""

    def is_asked() -> bool:
        try:
            return bool(client.lookup(SPACE, HASHES, timeout_s=5.0))
        except CatalogAwayError:
            return False

    with closing(CatalogClient(f"{running.settings.nats_url}/{running.settings.cluster}/any", WAIT_S)) as client:
        eventually(is_asked, "nobody takes questions over NATS")
        yield client


def test_a_silent_miss_says_why_in_answers_batches_and_metrics(running: Running) -> None:
    a = running.instance("a")
    a.create(0, 5)
    serve(running, a)
    client = running.client
    assert client.lookup(SPACE, HASHES).missed is msgspec.UNSET
    for field, other in OTHERS.items():
        told = missed_of(client.lookup(other, HASHES))
        assert (told.why, [(one.id, [*one.differs]) for one in told.near]) == (
            "namespace_unknown",
            [(SPACE.id.hex(), [field])],
        )
        assert field in told.message and SPACE.id.hex() in told.message
        assert [missed_of(one).why for one in client.lookup_many(other, [HASHES, HASHES])] == ["namespace_unknown"] * 2
    nobody = NamespaceId(bytes(16))
    assert missed_of(client.lookup(nobody, HASHES)).near[0].id == SPACE.id.hex()
    for asked in (nobody, OTHERS["model"], OTHERS["block_tokens"]):
        with pytest.raises(CatalogRefusedError, match="no instance has named this namespace") as caught:
            client.route(asked, HASHES, 80)
        assert (caught.value.status, caught.value.code) == (503, "no_instance")
        assert SPACE.id.hex() in str(caught.value)
    cold, warm = bytes(160), client.route(SPACE, HASHES, 43)
    assert warm.missed is msgspec.UNSET
    assert missed_of(client.route(SPACE, cold, 43)).why == "not_held"
    assert missed_of(client.route(SPACE.id, b"\x05" * 80, 43)).why == "hashes_short"  # made of blocks of 8
    assert missed_of(client.lookup(SPACE, b"")).why == "no_full_block"
    assert [one.missed for one in client.lookup_many(SPACE, [HASHES])] == [msgspec.UNSET]
    assert missed_of(client.lookup_many(SPACE, [HASHES, cold])[1]).why == "not_held"
    assert missed_of(client.route_many(SPACE, [b"\x06" * 160], [43])[0]).why == "not_held"
    counted = metrics(running)
    assert counted["lookup", "namespace_unknown"] == 3 * (1 + 2) + 1
    assert counted["route", "namespace_unknown"] == 3
    assert (counted["route", "not_held"], counted["route", "hashes_short"]) == (2, 1)
    assert (counted["lookup", "no_full_block"], counted["lookup", "not_held"]) == (1, 1)
    presence = client.presence(OTHERS["revision"], HASHES)
    assert isinstance(presence.missed, MissedAnswer) and presence.missed.why == "namespace_unknown"


def test_a_route_says_the_same_reason_as_a_lookup(running: Running) -> None:
    a, b = running.instance("a"), running.instance("b")
    a.create(0, 5)
    serve(running, a)
    b.publish()
    client = running.client

    def whys() -> tuple[str, str]:
        """Of a lookup and of a route."""
        told = client.lookup(SPACE, HASHES), client.route(SPACE, HASHES, 40, limit=1, remember=False)
        looked_up, routed = (missed_of(one).why if one.missed else "" for one in told)
        return looked_up, routed

    def are_heard(queued_tokens: int, **of_a: bool) -> bool:
        a.beat(queued_tokens, **of_a)
        b.beat()
        state = "stopping" if of_a else "live"
        return [one.state for one in client.instances()] == [state, "live"] and (
            client.route(SPACE, HASHES, 40, limit=1, remember=False).instance == "b"
        )

    eventually(lambda: are_heard(10_000_000), "b costs less than a, which has long queues")
    assert whys() == ("", "")  # a is behind the limit
    eventually(lambda: are_heard(0, stopping=True), "a is not about to stop")
    assert whys() == ("", "excluded")
    a.ledger.stop(StopReason.SHUTDOWN)
    a.publish()
    eventually(lambda: [one.state for one in client.instances()] == ["stopped", "live"], "a has not stopped")
    before = metrics(running)
    assert whys() == ("excluded", "excluded")
    batched = client.lookup_many(SPACE, [HASHES])[0], client.route_many(SPACE, [HASHES], [40])[0]
    assert [missed_of(one).why for one in batched] == ["excluded", "excluded"]
    counted = {key: count - before[key] for key, count in metrics(running).items() if count != before[key]}
    assert counted == {("lookup", "excluded"): 2, ("route", "excluded"): 2}


def test_a_block_that_nobody_holds_says_why_as_a_lookup_does(running: Running) -> None:
    a = running.instance("a")
    a.create(0, 5)
    serve(running, a)
    client = running.client
    with over_nats_of(running) as over_nats:
        for one in (client, over_nats):
            assert one.block(SPACE, HASHES[:16]).missed is msgspec.UNSET
            for namespace, block in (
                (SPACE.id, bytes(16)),
                (OTHERS["revision"].id, HASHES[:16]),
                (NamespaceId(bytes(16)), HASHES[:16]),
            ):
                told = one.block(namespace, block).missed
                assert told == client.lookup(namespace, block).missed and isinstance(told, MissedAnswer)
                assert told.why == ("not_held" if namespace == SPACE.id else "namespace_unknown")
    counted = metrics(running)
    assert (counted["block", "not_held"], counted["block", "namespace_unknown"]) == (2, 4)


def test_what_can_be_read_from_nowhere_says_why_as_a_lookup_does_whichever_way_it_is_asked(running: Running) -> None:
    a = running.instance("a")
    a.create(0, 5)
    a.copy(Tier.OBJECT, 0, 2)
    serve(running, a)
    with ExitStack() as opened:
        over_nats = opened.enter_context(over_nats_of(running))
        replicas = [
            opened.enter_context(replica_of(running, *twin))
            for twin in ((NATIVE, NATIVE_INDEX), (REFERENCE, ReferenceIndex))
        ]
        asked: list[Catalog] = [running.client, over_nats, *replicas]
        for one in asked:
            in_pool = one.find(SPACE, HASHES)
            assert in_pool.pools and in_pool.missed is msgspec.UNSET
            assert one.find(SPACE, HASHES[32:], first=1).missed is msgspec.UNSET  # held, and lent by nobody
            for namespace, blocks, why in (
                (SPACE.id, bytes(32), "not_held"),
                (SPACE.id, b"", "no_full_block"),
                (OTHERS["revision"], HASHES, "namespace_unknown"),
                (NamespaceId(bytes(16)), HASHES, "namespace_unknown"),
            ):
                told = one.find(namespace, blocks).missed
                assert isinstance(told, MissedAnswer) and told.why == why
                assert told == one.lookup(namespace, blocks).missed
                (batched,) = one.find_many(namespace, [blocks])
                assert isinstance(batched.missed, MissedAnswer) and batched.missed.why == why
            assert one.find_many(SPACE, [HASHES])[0].missed is msgspec.UNSET
    counted = metrics(running)
    assert (counted["find", "not_held"], counted["find", "namespace_unknown"]) == (4, 8)  # replicas count their own


@contextmanager
def replica_of(running: Running, backend: Backend, new_index: NewIndex) -> Iterator[CatalogReplica]:
    """Follows what a catalog follows."""
    settings = running.settings
    replica = CatalogReplica(
        ReplicaSettings(cluster=settings.cluster, liveness_s=settings.liveness_s, whole_wait_s=0.2),
        lambda: ReadOnlyStream.follow(settings.nats_url, WAIT_S, Credentials()),
        None,
        backend,
        new_index,
    )
    replica.start(WAIT_S)
    with closing(replica):
        replica.wait_ready(WAIT_S)
        yield replica


def test_a_feed_says_why_it_has_nothing_to_tell(running: Running) -> None:
    """Once, and again when the reason is another; what is looked at in between is not counted."""
    a, client = running.instance("a"), running.client
    with client.watch(SPACE) as blocks, client.watch(SPACE, hashes=HASHES) as prefix:
        begun = blocks.next_event(WAIT_S)
        assert isinstance(begun, WatchBegun) and isinstance(begun.missed, MissedAnswer)
        assert begun.missed == client.lookup(SPACE, HASHES).missed
        assert missed_of(next_depths(prefix)).why == "namespace_unknown"
        a.publish()  # it names the namespace, and holds nothing
        assert missed_of(next_depths(prefix)).why == "not_held"
        a.create(0, 5)
        serve(running, a)
        assert next_depths(prefix).missed is msgspec.UNSET
    with client.watch(SPACE) as blocks:
        begun = blocks.next_event(WAIT_S)
        assert isinstance(begun, WatchBegun) and begun.missed is msgspec.UNSET
    counted = metrics(running)
    assert (counted["watch", "namespace_unknown"], counted["watch", "not_held"]) == (2, 1)
    assert counted["lookup", "not_held"] == 0


def next_depths(watch: CatalogWatch) -> LookupAnswer:
    """What a watch of a prefix says next of it."""
    while True:
        event = watch.next_event(WAIT_S)
        assert event is not None, "the feed says no more of the prefix"
        if isinstance(event, PrefixDepths):
            return event.answer


def metrics(running: Running) -> dict[tuple[str, str], float]:
    """`kvbm_catalog_prompts_missed_total`, by question and reason."""
    from prometheus_client.parser import text_string_to_metric_families

    return {
        (sample.labels["question"], sample.labels["why"]): sample.value
        for family in text_string_to_metric_families(running.client.metrics())
        for sample in family.samples
        if sample.name == "kvbm_catalog_prompts_missed_total"
    }


@pytest.mark.parametrize("is_marked", [True, False])
def test_a_pool_is_credited_with_whole_objects_in_every_answer(
    running: Running, is_marked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = pool_name("s3://kvbm/blocks", 4 if is_marked else 0, False)
    pools = (*catalog_site.POOLS[:2], PoolStated(Tier.OBJECT, 0, 1024, Reach.CLUSTER, pool))
    monkeypatch.setattr(catalog_site, "POOLS", pools)
    a = running.instance("a")
    a.create(0, 8)
    a.copy(Tier.OBJECT, 0, 8)
    serve(running, a)
    a.beat(object_blocks=4)
    eventually(lambda: not running.client.lookup(SPACE, HASHES[:48]).pools, "what it says of its objects is not heard")
    client = running.client
    for blocks, whole in ((8, 8), (7, 4), (5, 4), (3, 0)):
        asked = HASHES[: 16 * blocks]
        assert {one.pool: one.depth for one in client.lookup(SPACE, asked).pools}.get(pool, 0) == whole
        assert {one.pool: one.depth for one in client.lookup_many(SPACE, [asked])[0].pools}.get(pool, 0) == whole
        assert {one.pool: one.depth for one in client.find(SPACE, asked).pools}.get(pool, 0) == whole
        assert [one.reach for one in client.lookup(SPACE, asked).instances] == [blocks]
