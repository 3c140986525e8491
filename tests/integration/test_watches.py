"""Feeds of changes over real NATS and real HTTP: who is told what, when a feed ends, and what hostile clients
come to.
"""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import pytest

from kvbm.assembly import NATIVE, NATIVE_INDEX
from kvbm.catalog.access import file as access_file
from kvbm.catalog.access.callers import AccessOptions
from kvbm.catalog.answers import watches
from kvbm.catalog.edge.server import CatalogThread
from kvbm.catalog.service import ServiceSettings
from kvbm.config import LimitSettings
from kvbm.core.errors import CatalogRefusedError
from kvbm.core.events import EvictReason
from kvbm.core.ids import NO_PARENT, Tier, pack_slots
from kvbm.core.watch_events import (
    BlockChanges,
    InstanceChange,
    Missed,
    PrefixDepths,
    WatchBegun,
    WatchEnded,
    WatchEvent,
)
from kvbm.locate.credentials import CatalogCredentials
from kvbm.locate.http import CatalogClient
from kvbm.locate.watching import CatalogWatch
from kvbm.reference.ledger import Ledger
from tests.catalog_site import HASHES, OTHER, POOLS, SPACE, Instance, Running, is_forgotten, run_catalog
from tests.eventually import eventually
from tests.held_time import hold_catalogs
from tests.nats_fixture import WAIT_S, cluster, nats_url  # noqa: F401

FOR_EVER_S = 600.0  # of liveness, where nobody is to fall silent


@pytest.fixture
def running(nats_url: str, cluster: str, sqlite_url: str) -> Iterator[Running]:  # noqa: F811
    yield from run_catalog(nats_url, cluster, sqlite_url, liveness_s=FOR_EVER_S)


def take_until(watch: CatalogWatch, is_last: Callable[[WatchEvent], bool]) -> list[WatchEvent]:
    """Events up to one."""
    found: list[WatchEvent] = []
    deadline_s = time.monotonic() + WAIT_S
    while time.monotonic() < deadline_s:
        event = watch.next_event(1.0)
        if event is not None:
            found.append(event)
            if is_last(event):
                return found
    raise AssertionError(f"it did not come; {found}")


def wait_begun(watch: CatalogWatch) -> None:
    """What changes from now on is told: until it has begun, a change may come before it."""
    assert isinstance(watch.next_event(WAIT_S), WatchBegun)


def has_gained(instance: str) -> Callable[[WatchEvent], bool]:
    return lambda event: isinstance(event, BlockChanges) and event.holder == instance


def test_a_feed_tells_who_gained_and_lost_which_blocks(running: Running) -> None:
    with running.client.watch(SPACE) as watch:
        begun = watch.next_event(WAIT_S)
        assert isinstance(begun, WatchBegun)
        assert begun.position == watch.position
        a = running.instance("a")
        a.create(0, 5)
        a.copy(Tier.HOST, 0, 2)
        a.publish()
        events = take_until(watch, has_gained("a"))
        assert InstanceChange(instance="a", what="started", epoch=1) in events
        changes = events[-1]
        assert isinstance(changes, BlockChanges)
        assert changes.epoch == 1
        gained = [(one.what, one.tier, one.hashes) for one in changes.changes if one.what == "gained"]
        assert gained == [("gained", "HBM", HASHES[:80].hex()), ("gained", "HOST", HASHES[:32].hex())]
        a.ledger.unpin(Tier.HBM, pack_slots(range(5)))
        a.ledger.evict(Tier.HBM, HASHES[32:80], EvictReason.CAPACITY)
        a.publish()
        lost = take_until(watch, has_gained("a"))[-1]
        assert isinstance(lost, BlockChanges)
        assert [(one.what, one.tier, one.hashes) for one in lost.changes] == [("lost", "HBM", HASHES[32:80].hex())]


def test_a_feed_goes_on_after_its_position(running: Running) -> None:
    a = running.instance("a")
    with running.client.watch(SPACE) as watch:
        wait_begun(watch)
        a.create(0, 2)
        a.publish()
        take_until(watch, has_gained("a"))
        position = watch.position
    a.create(2, 4)
    a.publish()
    with running.client.watch(SPACE, after=position) as watch:
        events = take_until(watch, has_gained("a"))
        assert not any(isinstance(event, Missed) for event in events)
        changes = events[-1]
        assert isinstance(changes, BlockChanges)
        assert [one.hashes for one in changes.changes] == [HASHES[32:64].hex()]


@pytest.mark.parametrize("after", ["", "nonsense", "1.1.run.another-stream", "99999999999.1.run."])
def test_a_position_of_nowhere_is_missed_at_once(running: Running, after: str) -> None:
    with running.client.watch(SPACE, after=after) as watch:
        begun, missed = (watch.next_event(WAIT_S) for _ in range(2))
        assert isinstance(begun, WatchBegun)
        assert isinstance(missed, Missed)
        assert (missed.after, missed.until) == (after, begun.position)


def test_an_instance_is_watched_alone(
    nats_url: str,  # noqa: F811
    cluster: str,  # noqa: F811
    sqlite_url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    time_held = hold_catalogs(monkeypatch)
    with Site(nats_url, cluster, sqlite_url, liveness_s=1.0) as running:
        a, b = running.instance("a"), running.instance("b")
        with running.client.watch(instance="b") as watch:
            wait_begun(watch)
            with time_held.held():  # nobody falls silent
                a.create(0, 2)
                a.publish()
                b.create(0, 3)
                b.publish()
                events = take_until(watch, has_gained("b"))
                assert {getattr(event, "instance", "b") for event in events} == {"b"}
                b.ledger.stop()
                b.publish()
                take_until(watch, lambda event: event == InstanceChange(instance="b", what="stopped", epoch=1))
                excluded = take_until(watch, lambda event: isinstance(event, InstanceChange) and event.what == "state")[
                    -1
                ]
                assert isinstance(excluded, InstanceChange)
                assert excluded.excluded == "stopped"
                assert "HBM" in excluded.hidden
            eventually(lambda: is_forgotten(running.client, b))
            take_until(watch, lambda event: event == InstanceChange(instance="b", what="dropped"))


def test_a_prefix_tells_who_has_how_much_of_it_when_that_changes(running: Running) -> None:
    a = running.instance("a")
    with running.client.watch(SPACE, hashes=HASHES) as watch:
        first = take_until(watch, lambda event: isinstance(event, PrefixDepths))[-1]
        assert isinstance(first, PrefixDepths)
        assert first.answer.instances == []
        a.create(0, 3)
        a.publish()
        events = take_until(watch, lambda event: isinstance(event, PrefixDepths) and bool(event.answer.instances))
        assert isinstance(events[-1], PrefixDepths)
        assert events[-1].answer == running.client.lookup(SPACE, HASHES)
        a.create(3, 10)
        wanted = a.publish()
        eventually(lambda: running.client.lookup(SPACE, HASHES).deepest == 10, "the catalog has not read it")
        deep = running.client.lookup(SPACE, HASHES, at_least=[wanted])
        take_until(watch, lambda event: event == PrefixDepths(answer=deep))


def test_a_suspect_instance_is_told_and_so_is_its_healing(running: Running) -> None:
    a = running.instance("a")
    a.create(0, 2)
    a.publish(lose=True)
    with running.client.watch(SPACE) as watch:
        wait_begun(watch)
        a.create(2, 4)
        a.publish()
        suspect = take_until(watch, lambda event: isinstance(event, InstanceChange) and event.suspect)[-1]
        assert isinstance(suspect, InstanceChange)
        assert suspect.what == "state"
        a.ledger.begin_snapshot()
        while a.ledger.step_snapshot():
            pass
        a.beat()
        a.publish()
        healed = InstanceChange(instance="a", what="state", epoch=1)
        take_until(watch, lambda event: event == healed)


# -- hostile clients, and healthy ones that look like them -------------------------------------------------------------


class Site:
    """A catalog with limits of a test's own."""

    def __init__(
        self, url: str, name: str, database: str, access: str = "", liveness_s: float = FOR_EVER_S, **limits: object
    ) -> None:
        self.settings = ServiceSettings(
            nats_url=url,
            database_url=database,
            cluster=name,
            listen="127.0.0.1:0",
            access=AccessOptions(file=access),
            store_every_s=0.02,
            liveness_s=liveness_s,
            limits=msgspec.convert({"loop_share": 1.0} | limits, LimitSettings),  # a stalled machine refuses nobody
        )
        self.thread = CatalogThread(self.settings, NATIVE, NATIVE_INDEX)

    def __enter__(self) -> Running:
        self.client = CatalogClient(self.thread.start().url, timeout_s=WAIT_S)
        self.client.wait_ready(WAIT_S)
        return Running(self.settings, self.client)

    def __exit__(self, *error: object) -> None:
        self.client.close()
        self.thread.stop()


def raw_watch(url: str, body: bytes = b'{"namespace": "%s"}' % SPACE.id.hex().encode(), room: int = 0) -> socket.socket:
    """A connection on which a watch was asked for."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    made = socket.socket()
    if room:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, room)
    made.settimeout(WAIT_S)
    made.connect((parts.hostname, parts.port))
    made.sendall(
        b"POST /v1/watch HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        % len(body)
        + body
    )
    return made


def read_until(connection: socket.socket, what: bytes) -> bytes:
    found = b""
    while what not in found:
        part = connection.recv(1 << 16)
        assert part, found
        found += part
    return found


def open_feeds(client: CatalogClient) -> int:
    line = next(one for one in client.metrics().splitlines() if one.startswith("kvbm_catalog_watches "))
    return round(float(line.split()[-1]))


def refusals(client: CatalogClient, why: str) -> float:
    line = next(
        (one for one in client.metrics().splitlines() if one.startswith("kvbm_catalog_refusals_total") and why in one),
        "0",
    )
    return float(line.split()[-1])


def test_a_quiet_feed_outlives_what_idle_connections_may_take(
    nats_url: str,  # noqa: F811
    cluster: str,  # noqa: F811
    sqlite_url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watches, "KEEPALIVE_S", 4.0)
    with Site(nats_url, cluster, sqlite_url, idle_s=2.0, header_s=2.0, write_s=2.0) as running:
        connection = raw_watch(running.client.url)
        text = read_until(connection, b": keep-alive\n")
        assert b"event: begun\n" in text
        assert b"\nid: " in read_until(connection, b": keep-alive\n")
        a = running.instance("a")
        a.create(0, 1)
        a.publish()
        read_until(connection, b"event: changes\n")
        connection.close()


def test_a_feed_that_nobody_reads_is_ended(nats_url: str, cluster: str, sqlite_url: str) -> None:  # noqa: F811
    with Site(nats_url, cluster, sqlite_url, write_s=1.0) as running:
        connection = raw_watch(running.client.url, room=4096)
        read_until(connection, b"event: begun\n")
        flooding = Flooder(running)
        eventually(lambda: flooding.step() or refusals(running.client, "connection_unread"), "an unread feed is kept")
        connection.close()


class Flooder:
    """Publishes long events without end."""

    def __init__(self, running: Running) -> None:
        self.instance = running.instance("flood")

    def step(self) -> bool:
        ledger = self.instance.ledger
        for _ in range(400):
            allocation = ledger.allocate(Tier.HBM, 10)
            assert allocation is not None
            ledger.create(SPACE.id, Tier.HBM, NO_PARENT, 0, HASHES, allocation.slots)
            ledger.unpin(Tier.HBM, allocation.slots)
            ledger.evict(Tier.HBM, HASHES, EvictReason.CAPACITY)
        self.instance.publish()
        return False


def test_a_slow_reader_is_told_what_it_missed_and_goes_on(
    nats_url: str,  # noqa: F811
    cluster: str,  # noqa: F811
    sqlite_url: str,
) -> None:
    with Site(nats_url, cluster, sqlite_url, write_s=600.0, watch_bytes=1 << 16) as running:
        connection = raw_watch(running.client.url, room=4096)
        begun = read_until(connection, b"event: begun\n")
        assert b"event: missed\n" not in begun
        flooding = Flooder(running)
        other = running.client.watch(SPACE, hashes=HASHES)
        for _ in range(40):
            flooding.step()
        text = read_until(connection, b"event: missed\n")
        assert b"the client was too slow" in text + connection.recv(1 << 16)
        connection.settimeout(1.0)

        tried = itertools.count()

        def is_told_again() -> bool:
            """What comes while the flood is still read may be missed, too."""
            last = running.instance(f"last-{next(tried)}")
            last.create(0, 1)
            last.publish()
            found = b""
            try:
                while b'"holder":"last-' not in found:
                    part = connection.recv(1 << 16)
                    assert part, "the feed has ended"
                    found += part
            except TimeoutError:
                return False
            return True

        eventually(is_told_again, "a client that was too slow is told nothing any more")
        other.close()
        connection.close()


def test_feeds_are_bounded_by_caller_and_a_closed_one_makes_room_at_once(
    nats_url: str,  # noqa: F811
    cluster: str,  # noqa: F811
    sqlite_url: str,
) -> None:
    with Site(nats_url, cluster, sqlite_url, watches=8, watches_per_caller=4) as running:
        url = running.client.url
        held = [raw_watch(url) for _ in range(4)]
        for connection in held:
            read_until(connection, b"event: begun\n")
        assert open_feeds(running.client) == 4
        for _ in range(300):
            connection = raw_watch(url)
            text = read_until(connection, b"too_many_watches")
            assert text.startswith(b"HTTP/1.1 429 ")
            assert b"retry-after" in text
            connection.close()
        assert refusals(running.client, "too_many_watches") == 300
        held.pop().close()

        def is_taken() -> bool:
            made = raw_watch(url)
            head = made.recv(1 << 16)
            made.close()
            return head.startswith(b"HTTP/1.1 200 ")

        eventually(is_taken, "a closed feed holds its place")
        for connection in held:
            connection.close()
        eventually(lambda: open_feeds(running.client) == 0)


@pytest.mark.parametrize(
    "body", [b"{", b"{}", b"[]", b'{"namespace": 7}', b"\xff" * 100, b'{"instance": "i", "after": 1}']
)
def test_a_malformed_body_is_refused(running: Running, body: bytes) -> None:
    connection = raw_watch(running.client.url, body)
    text = read_until(connection, b"what_to_do")
    assert text.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 422 "))
    connection.close()


def test_a_client_is_told_that_it_may_not_watch(running: Running) -> None:
    with running.client.watch(instance="x" * 128) as watch:
        assert isinstance(watch.next_event(WAIT_S), WatchBegun)
    bad = running.client.watch(instance="x" * 129)
    with pytest.raises(CatalogRefusedError) as refused:
        eventually(lambda: bad.next_event(0.1))
    assert refused.value.code == "invalid_request"
    bad.close()


def test_what_is_not_yours_is_not_there(
    nats_url: str,  # noqa: F811
    cluster: str,  # noqa: F811
    sqlite_url: str,
    tmp_path: Path,
) -> None:
    access = tmp_path / "access.toml"
    tokens = {}
    for name, tenants in (("acme", ["acme"]), ("plain", [""])):
        tokens[name] = tmp_path / f"{name}.token"
        tokens[name].write_text(
            access_file.add_token(access, access_file.NewToken(name, "router", tenants), time.time())
        )
    operator = tmp_path / "operator.token"
    operator.write_text(access_file.add_token(access, access_file.NewToken("op", "operator"), time.time()))
    with CatalogThread(Site(nats_url, cluster, sqlite_url, str(access)).settings, NATIVE, NATIVE_INDEX) as thread:
        clients = {
            name: CatalogClient(thread.url, timeout_s=WAIT_S, credentials=CatalogCredentials(token=str(path)))
            for name, path in {**tokens, "op": operator}.items()
        }
        eventually(lambda: clients["op"].ready().ready)
        feeds = {
            (name, what): clients[name].watch(**{what: value})  # type: ignore[arg-type]
            for name in clients
            for what, value in (("namespace", SPACE.id), ("instance", "a"))
        }
        prefix = clients["acme"].watch(SPACE, hashes=HASHES)
        for watch in feeds.values():
            assert isinstance(watch.next_event(WAIT_S), WatchBegun)
        first = take_until(prefix, lambda event: isinstance(event, PrefixDepths))[-1]
        assert isinstance(first, PrefixDepths) and first.answer.deepest == 0
        a = Instance(nats_url, cluster, "a")
        a.create(0, 3)
        a.publish()
        for name in ("op", "plain"):
            for what in ("namespace", "instance"):
                take_until(feeds[name, what], has_gained("a"))
        others = [feeds["acme", "namespace"], feeds["acme", "instance"]]
        b = Instance(nats_url, cluster, "b")
        b.ledger = Ledger(POOLS)
        b.ledger.start(b.epoch, [OTHER], ["rack-1", "b"], "test", "0")
        allocation = b.ledger.allocate(Tier.HBM, 1)
        assert allocation is not None
        with clients["acme"].watch(OTHER) as own:
            assert isinstance(own.next_event(WAIT_S), WatchBegun)
            b.ledger.create(OTHER.id, Tier.HBM, NO_PARENT, 0, HASHES[:16], allocation.slots)
            b.publish()
            events = take_until(own, has_gained("b"))
            assert {getattr(one, "instance", "b") for one in events} == {"b"}
        found = [event for watch in others for event in iter(partial(watch.next_event, 0.3), None)]
        assert [event for event in found if getattr(event, "instance", getattr(event, "holder", "")) == "a"] == []
        depths = [event for event in iter(lambda: prefix.next_event(0.3), None) if isinstance(event, PrefixDepths)]
        assert depths == []
        operator.write_text("kvbm_none")
        entries = [
            one._replace(role="metrics", tenants=None) if one.name == "plain" else one
            for one in access_file.read_entries(access)
            if one.name != "op"
        ]
        access_file.write_entries(access, entries)
        for name in ("op", "plain"):  # one is nobody now, the other may ask for metrics alone
            ended = take_until(feeds[name, "namespace"], lambda event: isinstance(event, WatchEnded))[-1]
            assert isinstance(ended, WatchEnded)
            assert not ended.may_return
        for watch in [*feeds.values(), prefix]:
            watch.close()
        for client in clients.values():
            client.close()


def test_a_catalog_that_stops_ends_its_feeds_and_clients_go_on_at_another(
    nats_url: str,  # noqa: F811
    cluster: str,  # noqa: F811
    sqlite_url: str,
    tmp_path: Path,
) -> None:
    first, second = (Site(nats_url, cluster, f"sqlite+aiosqlite:///{tmp_path / 'shared.db'}") for _ in range(2))
    with first as running, second as other:
        client = CatalogClient(f"{running.client.url},{other.client.url}", timeout_s=WAIT_S)
        watch, raw = client.watch(SPACE), raw_watch(running.client.url)
        read_until(raw, b"event: begun\n")
        wait_begun(watch)
        a = running.instance("a")
        a.create(0, 2)
        a.publish()
        events = take_until(watch, has_gained("a"))
        first.thread.stop()
        text = read_until(raw, b"0\r\n\r\n")
        assert b'"may_return":true' in text
        a.create(2, 4)
        a.publish()
        events = take_until(
            watch, lambda event: isinstance(event, BlockChanges) and HASHES[32:64].hex() in event.changes[-1].hashes
        )
        assert not any(isinstance(event, Missed) for event in events)
        watch.close()
        client.close()
        raw.close()


def test_close_ends_a_wait_in_another_thread(running: Running) -> None:
    watch = running.client.watch(SPACE)
    seen: list[WatchEvent] = []
    reading = threading.Thread(target=lambda: seen.extend(watch))
    reading.start()
    eventually(lambda: seen)
    watch.close()
    reading.join(WAIT_S)
    assert not reading.is_alive()
    assert watch.next_event(0.0) is None
