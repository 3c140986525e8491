"""A lying frame, a lying heartbeat, fence, sample and answer: each message an instance may send, with each field forged
(tests/lies.py).

Whatever it says, what is known of other instances and tenants stays right, the catalog goes on, and little is said
about it.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from structlog.testing import capture_logs

from kvbm.catalog.access.callers import Caller
from kvbm.catalog.answers.queries import Queries
from kvbm.catalog.degraded import Degraded
from kvbm.catalog.follow.checkpoints import Writing, _load
from kvbm.catalog.follow.heartbeats import HeartbeatFollower
from kvbm.catalog.follow.instance_sequence import MOST_LINES
from kvbm.catalog.follow.lag import StreamLag
from kvbm.catalog.follow.reorder_buffer import REORDER_BYTES
from kvbm.catalog.follow.row_collector import RowCollector
from kvbm.catalog.follow.snapshots import SnapshotRequests
from kvbm.catalog.index.cluster_index import ClusterIndex
from kvbm.catalog.members.liveness import OwnPulse
from kvbm.catalog.routing.router import RoutingTask
from kvbm.config import RoutingSettings
from kvbm.core import codec
from kvbm.core.events import InstanceStarted
from kvbm.core.ids import Epoch, InstanceId, Namespace, Offset, Tier, split_hashes
from kvbm.erasure import report
from kvbm.erasure.record import Matcher, Record, Subject, with_erasure
from kvbm.safe_log import RateLimitedLog
from kvbm.streams.base import (
    EventReader,
    EventStream,
    Fence,
    Heartbeat,
    StreamMessage,
    events_subject,
    fence_subject,
    pulse_subject,
)
from kvbm.streams.nats import broadcast, heartbeats
from kvbm.streams.nats.broadcast import word_in
from kvbm.streams.nats.connection import BORROWED_API
from kvbm.streams.nats.headers import fence_named
from kvbm.streams.nats.heartbeats import heartbeat_in
from kvbm.streams.nats.permissions import _lent_to_instance
from tests import lies
from tests.indexes import NATIVE, Twin, each_twin, held_of
from tests.lies import ACME, BETA, EVENT_KINDS, HELD, HONEST, OF_LIAR, OWN, Lie

A, B = HONEST
ROUTERS = {space: Caller(f"{space.tenant}'s", "router", frozenset({space.tenant})) for space in HONEST.values()}
KEYS = {(space.id, one) for space in HONEST.values() for run in HELD.values() for one in split_hashes(run)}
NEW = lies.hashes(91, 92, 93, 94)
Sent = tuple[tuple[bytes, bytes], ...]  # events, and the tables of namespaces of their frames


def still() -> float:
    """A clock that stands, so that remarks are counted as of one moment."""
    return 0.0


@pytest.fixture(autouse=True)
def _still(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (broadcast, heartbeats):
        monkeypatch.setattr(module, "refusals", RateLimitedLog(most=MOST_LINES, clock=still))


class World:
    """A catalog without its server, two honest instances of two tenants, and as many that lie as there are lies."""

    def __init__(self, twin: Twin) -> None:
        self.twin = twin
        self.sequencer = twin.sequencer()
        self.rows = RowCollector("KVBM")
        self.sequencer.known_namespaces.on_told = lambda told: self.rows.add_namespaces(told, 1)
        self.sequencer.known_namespaces.on_gone = self.rows.drop_namespaces
        stream, reader = cast(EventStream, None), cast(EventReader, SimpleNamespace(at_end=True))
        lag = StreamLag(stream, reader, self.sequencer, 0)
        self.heartbeats = HeartbeatFollower(stream, self.sequencer, Degraded(), "c", 1e6, lag)
        self.queries = Queries(
            self.sequencer, self.heartbeats, cast(SnapshotRequests, None), lag.confirmation, RoutingSettings(), 1e6
        )
        self.queries._lenders._limited_log._clock = still
        self.sequence, self.beats, self.liars = 0, time.time_ns(), 0
        self.sent: dict[InstanceId, Sent] = {}
        self._digests: dict[Sent, int] = {}
        self.sequencer._common.limited_log._clock = still
        self.heartbeats.step(OwnPulse())
        for instance, space in HONEST.items():
            self.begin(instance, space, HELD[instance])
            self.send(
                instance, lies.created(tier=Tier.OBJECT, flags=0, count=2, hashes=HELD[instance][:32], slots=b""), space
            )
            self.beat(instance, space)
        self.right = self.view()

    def begin(self, instance: InstanceId, space: Namespace, held: bytes) -> None:
        start = InstanceStarted(epoch=Epoch(1), pools=lies.POOLS, namespaces=(space,), engine="e", version="1")
        self.send(instance, lies.started(codec.encode_started(start)), None)
        self.send(instance, lies.created(hashes=held), space)

    def send(self, instance: InstanceId, event: bytes, space: Namespace | None) -> None:
        """An honest frame of one event, with the digest that the index will have."""
        table = b"" if space is None else space.id
        sent = (*self.sent.get(instance, ()), (event, table))
        data = lies.frame_data(
            instance.encode(), [event], first_offset=len(sent) - 1, table=table, digest=self._digest(sent)
        )
        self.sent[instance] = sent
        self.read(self.subject(instance), data)

    def _digest(self, sent: Sent) -> int:
        """Of what an instance holds that has sent these events."""
        if sent not in self._digests:
            index = self.twin.index()
            for event, table in sent:
                index.apply(lies.frame_data(b"i", [event], table=table))
            view = index.view(InstanceId("i"))
            assert view is not None
            self._digests[sent] = view.digest
        return self._digests[sent]

    def subject(self, instance: str) -> str:
        return events_subject("c", instance)

    def read(self, subject: str, data: bytes, fence: Fence | None = None) -> None:
        self.sequence += 1
        message = StreamMessage(self.sequence, subject, data, self.sequence, fence)
        changes = self.sequencer.step(float(self.sequence), [message], at_end=True)
        self.rows.take(changes)
        for instance in changes.advanced:
            self.heartbeats.on_progress(instance)

    def beat(self, instance: InstanceId, space: Namespace) -> None:
        self.beats += 1
        said = msgspec.structs.replace(
            lies.honest_heartbeat(instance),
            wall_time_ns=self.beats,
            namespaces=(space.id,),
            told=(space.canonical(),),
            published=Offset(len(self.sent[instance])),
            applied=Offset(len(self.sent[instance])),
            put_bytes={},
            transfers=(),
            lends={},
        )
        self.heartbeats.on_heartbeat(said)

    def liar(self) -> InstanceId:
        """Another instance that lies; it has begun as an honest one does."""
        self.liars += 1
        name = InstanceId(f"liar-{self.liars}")
        self.begin(name, OWN, OF_LIAR)
        return name

    # -- what must hold ------------------------------------------------------------------------------------------------

    @property
    def index(self) -> ClusterIndex:
        return self.sequencer.index

    def view(self, routes: bool = True) -> list[Any]:
        """All that is known of the honest: residencies, claims, rows, namespaces, what they are seen to be, and where
        prompts go.
        """
        sequencer = self.sequencer
        held = {
            key: {one for one in holders if one.is_pool or one.name in HONEST}
            for key, holders in held_of(self.index, KEYS).items()
        }
        known = [
            (
                self.index.view(one),
                sequencer.rows(one),
                sequencer.declared(one),
                sequencer.ownership(one),
                sequencer.is_waiting(one),
                sequencer.suspicions.by_instance.get(one),
                self.heartbeats.liveness.state(one),
                sequencer.unreadable(one),
            )
            for one in HONEST
        ]
        spaces = [sequencer.namespaces().get(space.id) for space in HONEST.values()]
        found = [{key: one for key, one in held.items() if one}, known, spaces]
        return [*found, self.routes(), self.seen()] if routes else found

    def routes(self) -> list[list[str]]:
        """Where prompts of each tenant go, without blocks and with those that its instance holds."""
        found = []
        for instance, space in HONEST.items():
            for run in (NEW, HELD[instance]):
                task = RoutingTask(space.id, run, 64, 16)
                ranking = self.queries.route(task, space, space, ROUTERS[space], remember=False)
                found.append([one.instance for one in ranking.best])
        return found

    def seen(self) -> list[list[str]]:
        see = self.queries.visibility
        return [
            sorted(one for one in self.sequencer.followed if see.instance(caller, one)) for caller in ROUTERS.values()
        ]

    def names(self) -> set[str]:
        return {*HONEST, *(f"liar-{number}" for number in range(1, self.liars + 1))}

    def check(self, lie: object, *, routes: bool = True) -> None:
        """Nothing that is right has changed, and nothing has come but of the names under which messages came."""
        assert self.view(routes) == self.right[: 5 if routes else 3], lie
        assert len(self.sequencer.followed) == len(HONEST) + self.liars, lie
        last = self.sequencer._sequences.get(InstanceId(f"liar-{self.liars}"))
        msgspec.msgpack.encode(last and last.state())  # what a checkpoint keeps

    def goes_on(self, folder: Path) -> None:
        """The honest go on, batches for SQL are made, and a checkpoint is written and read back."""
        sequencer = self.sequencer
        for instance, space in HONEST.items():
            self.send(instance, lies.created(start=4, hashes=NEW, slots=bytes(range(4, 8)) + bytes(12)), space)
            self.beat(instance, space)
            assert self.index.prefixes(space.id, NEW).deepest == 4
            assert sequencer.position(instance) == (1, len(self.sent[instance]))
            assert not self.sequencer.suspicions.by_instance.get(instance)
        batch = self.rows.take_batch(sequencer.safe_mark(), sequencer.rows)
        if batch is not None:
            assert {row.id for row in batch.instances} <= self.names()
            assert all(row.id == row.fields.id for row in batch.namespaces)
        for followed in sequencer._sequences.values():
            assert followed.buffer.bytes <= REORDER_BYTES
        if self.twin is not NATIVE:
            return
        writing = Writing(folder / "checkpoints", cast(Any, self.index), sequencer.state(), "KVBM")
        writing.write()
        manifest = writing.finish(sequencer.mark)
        loaded = _load(next((folder / "checkpoints").glob("*.index")), manifest, self.twin.index())
        assert loaded is not None
        again = self.twin.sequencer(loaded.held)
        again.restore(loaded.state, loaded.settled)
        for instance in HONEST:
            assert again.rows(instance) == sequencer.rows(instance)
            assert again.index.view(instance) == self.index.view(instance)


def much_said(remarks: list[Any]) -> dict[str, int]:
    """Warnings that came more often than a few times, however often there was cause."""
    said = Counter(one["event"] for one in remarks if one["log_level"] in ("warning", "error", "critical"))
    return {event: times for event, times in said.items() if times > MOST_LINES}


# -- frames ------------------------------------------------------------------------------------------------------------

FRAMES: dict[str, Any] = {kind.__name__: (lambda kind=kind: lies.event_lies(kind)) for kind in EVENT_KINDS}
FRAMES["Frame"] = lies.frame_lies


@each_twin
@pytest.mark.parametrize("what", FRAMES)
def test_a_frame_with_a_forged_field_changes_nothing_of_others_and_the_catalog_goes_on(
    twin: Twin, what: str, tmp_path: Path
) -> None:
    world = World(twin)
    with capture_logs() as remarks:
        for field, how, forged in FRAMES[what]():
            # What is said of the pool of all is another test's.
            liar = world.liar()
            place = {"instance": liar.encode(), "first_offset": 2, **forged}
            is_of_pool = (field, how) in {("tier", "3"), ("target", "3"), ("source", "3")} or how == "3"
            data = lies.frame_data(**place)
            world.read(world.subject(liar), data)
            if not (is_of_pool and what == "BlocksEvicted"):
                world.check((what, field, how), routes=False)
        world.check(what, routes=False)
        world.goes_on(tmp_path)
    assert not much_said(remarks)


def test_a_frame_with_forged_fields_draws_no_prompt_of_others() -> None:
    """Of each event the fields that name somebody, which are those that could."""
    world = World(NATIVE)
    for kind in EVENT_KINDS:
        for field, how, forged in FRAMES[kind.__name__]():
            if field in ("namespace", "hashes", "parent", "source", "topology", "engine"):
                liar = world.liar()
                world.read(
                    world.subject(liar), lies.frame_data(**{"instance": liar.encode(), "first_offset": 2, **forged})
                )
                world.beat(liar, OWN)
                assert world.view()[4] == world.right[4], (kind, field, how)
        assert world.view() == world.right, kind


def test_an_instance_of_a_pool_says_of_its_claims_what_it_likes_and_of_nothing_else(tmp_path: Path) -> None:
    """A pool is of all who share it: who lies there costs reads that find nothing, and blocks that are computed anew
    (docs/threats.md).
    """
    world = World(NATIVE)
    liar = world.liar()
    taken = lies.evicted(tier=Tier.OBJECT, count=2, hashes=HELD[A][:32])
    put = lies.created(tier=Tier.OBJECT, flags=0, count=2, hashes=HELD[B][32:], slots=b"")
    for at, (event, space) in enumerate([(taken, ACME), (put, BETA)], 2):
        world.read(world.subject(liar), lies.frame_data(liar.encode(), [event], first_offset=at, table=space.id))
    assert world.view()[1:] == world.right[1:]
    held = held_of(world.index, KEYS)
    pools = {key for key, holders in held.items() if any(one.is_pool for one in holders)}
    assert pools == {(BETA.id, one) for one in split_hashes(HELD[B])}
    world.goes_on(tmp_path)


# -- fences ------------------------------------------------------------------------------------------------------------


@each_twin
def test_a_fence_with_a_forged_field_is_its_senders_alone(twin: Twin, tmp_path: Path) -> None:
    world = World(twin)
    with capture_logs() as remarks:
        for lie in lies.forged_messages(lies.honest_fence()):
            liar = world.liar()
            world.read(fence_subject("c", liar), lie.data)
            again = lies.frame_data(liar.encode(), [lies.created(hashes=NEW, slots=b"\4\0\0\0" * 4)], first_offset=2)
            world.read(world.subject(liar), again)
            world.check(lie, routes=False)
        for lie in lies.header_lies():
            liar = world.liar()
            world.read(
                world.subject(liar),
                lies.frame_data(liar.encode(), [lies.created()], first_offset=2),
                fence_named(lie.data),
            )
            world.check(lie, routes=False)
        world.check("fences")
        world.goes_on(tmp_path)
    assert not much_said(remarks)


# -- heartbeats --------------------------------------------------------------------------------------------------------


def _heartbeats() -> Iterator[Lie]:
    yield from lies.forged_messages(lies.honest_heartbeat(InstanceId("liar-1")))
    for fields in lies.TOLD:
        said = msgspec.structs.replace(lies.honest_heartbeat(InstanceId("liar-1")), told=(fields,))
        yield Lie("told", str(fields[:40]), msgspec.msgpack.encode(said))


def _names_a_tenant(heartbeat: Heartbeat) -> bool:
    """Who names a tenant's namespace is seen by that tenant, and gets its prompts: docs/threats.md."""
    return bool({ACME.id, BETA.id} & {*heartbeat.namespaces})


def test_a_heartbeat_with_a_forged_field_changes_nothing_of_others_and_draws_no_prompt(tmp_path: Path) -> None:
    world = World(NATIVE)
    heard = 0
    with capture_logs() as remarks:
        for lie in _heartbeats():
            liar = world.liar()
            data = lie.data.replace(b"\xa6liar-1", bytes([0xA0 + len(liar)]) + liar.encode())
            if lie.field != "wall_time_ns":
                data = data.replace(b"wall_time_ns\x01", b"wall_time_ns" + msgspec.msgpack.encode(world.beats))
                world.beats += 1
            message = StreamMessage(1, pulse_subject("c", liar), data)
            heartbeat = heartbeat_in(message)
            if heartbeat is not None:
                heard += 1
                world.heartbeats.on_heartbeat(heartbeat)
                world.read(
                    world.subject(liar),
                    lies.frame_data(liar.encode(), [lies.snapshot_ended()], first_offset=2, table=b""),
                )
                world.check(lie, routes=not _names_a_tenant(heartbeat))
                if _names_a_tenant(heartbeat):
                    said = msgspec.structs.replace(heartbeat, namespaces=(), told=(), wall_time_ns=world.beats)
                    world.beats += 1
                    world.heartbeats.on_heartbeat(said)
        world.heartbeats.look()
        world.check("heartbeats")
        world.goes_on(tmp_path)
    assert heard > 100
    assert not much_said(remarks)


# -- samples -----------------------------------------------------------------------------------------------------------


def test_a_sample_with_a_forged_field_is_refused_or_stands_in_no_erasures_way() -> None:
    record, _ = with_erasure(Record(), Subject("beta", (BETA.id,), HELD[B]), 1)
    matcher = Matcher(record.erasures[0])
    kept = 0
    with capture_logs() as remarks:
        for lie in lies.forged_messages(lies.honest_sample(InstanceId("one"))):
            sample = word_in(
                cast(Any, SimpleNamespace(subject="kvbm.v1.samples.c.one", data=lie.data)), lies.AccessSample
            )
            if sample is not None:
                kept += 1
                assert len(sample.namespace) == 16 and len(sample.hashes) % 16 == 0, lie
                assert 0 < sample.rate <= 1 and 0 <= sample.depth <= len(sample.hashes) // 16, lie
                assert matcher.namespace(sample.namespace) == (sample.namespace == BETA.id)
                assert matcher.any(sample.hashes) == bool({*split_hashes(sample.hashes)} & {*split_hashes(HELD[B])})
    assert kept > 5
    assert not much_said(remarks)


# -- answers to erasures -----------------------------------------------------------------------------------------------


def test_an_answer_with_a_forged_field_speaks_for_nobody_else_and_the_table_can_be_read() -> None:
    record, erasure = with_erasure(Record(), Subject("acme", (ACME.id,)), 1)
    number = erasure.number
    waits = report.Answer(
        name="a",
        kind="instance",
        at_ns=1,
        progress={number: report.Progress(places=(report.ErasedPlace(name="HOST", waits="x"),))},
    )
    catalog = report.Answer(name="catalog:1", kind="catalog", at_ns=1, progress={number: report.Progress(done_ns=1)})
    honest = {one.name: report.encoded(one) for one in (waits, catalog)}
    answer = msgspec.structs.replace(
        lies.honest_answer(InstanceId("liar")),
        progress={
            number: report.Progress(
                places=(report.ErasedPlace(name="HOST", waits="x"),), namespaces=(erasure.namespace_digest(BETA.id),)
            )
        },
    )
    for lie in lies.forged_messages(answer):
        answers = report.answers_of({**honest, "liar": lie.data})
        assert {one.name for one in answers} - {"liar"} == {"a", "catalog:1"}, lie
        assert [one for one in answers if one.name == "a"] == [waits], lie
        counted = report.counted(answers, ["a", "liar"])
        left = report.unfinished(counted, number, report.INSTANCE, ["a", "liar"])
        assert left["a"] == "HOST: x", lie
        assert not report.unfinished(counted, number, report.OBJECTS), lie
        hints = report.hints(counted, erasure, [ACME.id, BETA.id])
        assert set(hints[ACME.id] + hints[BETA.id]) <= {"liar"}
        known = report.Known({"a": "", "liar": ""}, None, 3600.0, True, 2, hints)
        lines = report.table(number, counted, known)
        assert not report.is_gone(lines), lie
        words = report.as_words(number, lines)
        assert words.replace("\n", "").isprintable(), lie
        json.loads(report.as_json(number, lines))
        assert len(words) < 1 << 20, lie
    assert not Matcher(record.erasures[0]).namespace(BETA.id)


# -- all of them -------------------------------------------------------------------------------------------------------


def test_each_message_that_an_instance_may_send_is_forged() -> None:
    own = [one for one in _lent_to_instance("c", "one") if not one.startswith(BORROWED_API)]
    assert {one.split(".c.")[0] for one in own} == lies.SENT.keys()
    forged = {
        type(one)
        for one in (lies.honest_fence(), lies.honest_heartbeat(A), lies.honest_sample(A), lies.honest_answer(A))
    }
    assert forged | {codec.Frame} == set(lies.SENT.values())
    assert set(EVENT_KINDS) == lies.EVENTS.keys() == {FRAMES_KIND[name] for name in FRAMES if name != "Frame"}


FRAMES_KIND = {kind.__name__: kind for kind in EVENT_KINDS}


@pytest.mark.parametrize(
    "kind", [*EVENT_KINDS, codec.Frame, *(one for one in lies.SENT.values() if one is not codec.Frame)]
)
def test_each_field_of_what_an_instance_may_send_is_forged(kind: type[msgspec.Struct]) -> None:
    fields = {field.name for field in msgspec.structs.fields(kind)}
    honest = {
        type(one): one
        for one in (lies.honest_fence(), lies.honest_heartbeat(A), lies.honest_sample(A), lies.honest_answer(A))
    }
    forged = (
        {lie.field for lie in lies.forged_messages(honest[kind])}
        if kind in honest
        else {one[0] for one in FRAMES[kind.__name__]()}
    )
    assert fields <= forged
