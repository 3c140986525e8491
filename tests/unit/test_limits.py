"""Limits of the catalog: buckets, room, remarks, peers, and which connection goes when there are too many."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, cast

import msgspec
import pytest
from structlog.testing import capture_logs

from kvbm.assembly import NATIVE
from kvbm.catalog.access.callers import Access, Caller
from kvbm.catalog.access.file import NewToken, add_token
from kvbm.catalog.access.hosts import Hosts
from kvbm.catalog.access.judge import peer_key
from kvbm.catalog.access.limits import (
    LARGE_BODY_BYTES,
    SMALL_BODY_BYTES,
    Limited,
    LimitError,
    Limits,
    MeteredExchange,
    Room,
    TokenBuckets,
    caller_key,
)
from kvbm.catalog.access.metered import Metered
from kvbm.catalog.answers.prompts import ApiError, decode_prompt
from kvbm.catalog.edge.api import _body
from kvbm.catalog.edge.connections import Connection, Connections, ConnectionStage
from kvbm.catalog.edge.fast_path import FastPath, ShortQuestion
from kvbm.catalog.edge.handshakes import Handshakes
from kvbm.config import LimitSettings, load_settings
from kvbm.core.answers import MAX_POSITIONS, PositionWanted
from kvbm.core.backend import REFERENCE
from kvbm.core.errors import ConfigError
from kvbm.core.ids import Epoch, InstanceId, Offset
from kvbm.locate.http import CatalogClient
from kvbm.safe_log import RateLimitedLog
from kvbm.workload.catalog_view import wait_applied
from tests.extras import needed

Request = needed("starlette.requests", "catalog").Request


def test_a_bucket_lets_a_burst_through_and_then_the_rate() -> None:
    buckets = TokenBuckets(10.0, 5.0)
    assert [buckets.take(0.0, "a") for _ in range(5)] == [0.0] * 5
    assert buckets.take(0.0, "a") == pytest.approx(0.1)
    assert buckets.take(0.0, "b") == 0.0
    assert buckets.take(0.1, "a") == 0.0
    buckets.charge(0.1, "a", 1000.0)
    assert buckets.take(0.1, "a") == pytest.approx(0.6)  # a debt is no larger than a bucket
    assert TokenBuckets(0.0, 1.0).take(0.0, "a") == 0.0


def test_buckets_of_callers_without_number_take_bounded_memory() -> None:
    buckets = TokenBuckets(1.0, 1.0, most=100)
    for number in range(1000):
        buckets.take(0.0, str(number))
    assert len(buckets) == 100


def test_room_is_shared_and_each_caller_has_a_part() -> None:
    room = Room(10, 6)
    assert (room.take("a", 6), room.take("a", 1), room.take("b", 4), room.take("b", 1)) == ("", "caller", "", "all")
    room.give("a", 6)
    assert (room.take("b", 2), room.taken) == ("", 6)


def test_a_body_that_is_refused_costs_as_much_as_one_that_is_read() -> None:
    """Else a stranger who is answered 401 could send 60 MiB at the price of one request."""
    limits = Limits(LimitSettings(requests_per_s=1.0, burst=100), clock=lambda: 0.0)
    scope = {"client": ("10.0.0.1", 1), "headers": [(b"content-length", str(1 << 20).encode())]}
    parts = [{"type": "http.request", "body": bytes(256 << 10), "more_body": at < 3} for at in range(4)]
    sent: list[Any] = []

    async def receive() -> Any:
        return parts.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    async def refuse() -> None:
        exchange = MeteredExchange(limits, scope, receive, send)
        assert not exchange.judge().over
        await exchange.send({"type": "http.response.start", "status": 401, "headers": []})
        await exchange.send({"type": "http.response.body", "body": b"no"})
        exchange.end()

    asyncio.run(refuse())
    assert parts == [] and sent[-1]["more_body"] is False
    taken = 0
    while limits.requests.take(0.0, "10.0.0.1") == 0.0:
        taken += 1
    assert taken == 100 - 1 - 64  # 1 MiB in pieces of 16 KiB


def test_who_fills_the_room_leaves_a_part_for_callers_that_have_little() -> None:
    room = Room(16, 12, kept=4)
    assert (room.take("a", 12), room.take("b", 2), room.take("b", 1), room.take("c", 1)) == ("", "all", "", "")
    room.give("a", 12)
    assert room.take("b", 5) == ""


def test_who_waits_for_room_is_served_in_turn_and_holds_up_nobody_else() -> None:
    async def wait() -> None:
        room, served = Room(16, 12, kept=4), []

        async def wants(key: str, name: str, amount: int) -> None:
            assert await room.wait(key, amount, 60.0) == ""
            served.append(name)

        async with asyncio.TaskGroup() as tasks:
            for key, name, amount in (
                ("a", "a1", 8),
                ("a", "a2", 8),
                ("a", "a3", 1),
                ("b", "b1", 3),
                ("c", "c1", 6),
                ("d", "d1", 1),
            ):
                tasks.create_task(wants(key, name, amount))
                await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert served == ["a1", "b1", "d1"]  # a has no more for itself, c waits for all, what d wants is kept
            assert (room.take_in_turn("a", 1), room.take_in_turn("e", 2), room.take_in_turn("e", 1)) == (
                "caller",
                "all",
                "",
            )
            room.give("e", 1)
            room.give("a", 8)
            await asyncio.sleep(0)
            assert served == ["a1", "b1", "d1", "a2"]  # a3 has room within the kept part no more
            room.give("a", 8)
            for _ in range(3):
                await asyncio.sleep(0)
            assert sorted(served[4:]) == ["a3", "c1"]
        for key, amount in (("a", 1), ("b", 3), ("c", 6), ("d", 1)):
            room.give(key, amount)
        assert (room.taken, room._by_caller, room._waiting) == (0, {}, [])

    asyncio.run(wait())


def test_who_gives_up_waiting_leaves_the_room_to_those_behind() -> None:
    async def wait() -> None:
        room = Room(10, 8)
        assert room.take("a", 8) == ""
        assert await room.wait("b", 9, 60.0) == "caller"  # more than it may ever have
        assert await room.wait("b", 4, 0.0) == "all"
        first, second = asyncio.create_task(room.wait("b", 4, 60.0)), asyncio.create_task(room.wait("c", 2, 60.0))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        first.cancel()
        assert await second == ""
        third = asyncio.create_task(room.wait("b", 4, 60.0))
        await asyncio.sleep(0)
        room.give("a", 8)
        third.cancel()  # it has room, and does not know yet
        await asyncio.gather(first, third, return_exceptions=True)
        assert room.taken == 2

    asyncio.run(wait())


def test_long_bodies_of_one_caller_are_all_read_one_after_the_other() -> None:
    """Each alone fits, two do not: where each takes room as it comes, none ever gets the rest of what it needs."""
    length, statuses = 8_300_000, []
    limits = Limits(LimitSettings(loopback=True, requests_per_s=0.0))

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body = await _body(Request(scope, receive))
        await send({"type": "http.response.start", "status": 200 if len(body) == length else 500, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def ask() -> None:
        left = length

        async def receive() -> Any:
            nonlocal left
            await asyncio.sleep(0)
            size = min(left, 256 << 10)
            left -= size
            return {"type": "http.request", "body": bytes(size), "more_body": left > 0}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])

        headers = [(b"content-length", str(length).encode())]
        scope = {"type": "http", "method": "POST", "client": ("10.0.0.1", 1), "headers": headers}
        await Limited(app, limits)(scope, receive, send)

    async def ask_many() -> None:
        await asyncio.gather(*(ask() for _ in range(9)))

    asyncio.run(ask_many())
    assert statuses == [200] * 9 and limits.bodies.taken == 0


def test_a_body_that_says_it_is_too_long_is_refused_before_it_is_read() -> None:
    limits = Limits(LimitSettings())

    async def receive() -> Any:
        raise AssertionError("nobody is to read it")

    async def read() -> None:
        scope: dict[str, Any] = {
            "type": "http",
            "client": ("10.0.0.1", 1),
            "headers": [(b"content-length", b"13000000")],
        }
        scope["kvbm.exchange"] = MeteredExchange(limits, scope, receive, cast(Any, None))
        with pytest.raises(ApiError, match="the body has more than"):
            await _body(Request(scope, receive))

    asyncio.run(read())


def test_who_may_not_ask_takes_no_room_by_saying_that_a_body_comes(tmp_path: Path) -> None:
    token = add_token(tmp_path / "callers.toml", NewToken("router", "router"), 1.0)
    metrics = add_token(tmp_path / "callers.toml", NewToken("scraper", "metrics"), 1.0)
    limits = Limits(LimitSettings())
    at_once = FastPath(
        Access(str(tmp_path / "callers.toml")),
        limits,
        cast(Any, None),
        lambda *_: None,
        defaultdict(int),
        Hosts(),
        NATIVE.read_plain_question,
    )

    def asked(authorization: str | None) -> ShortQuestion:
        return ShortQuestion(b"/v1/route", True, "10.0.0.1", authorization, None)

    for stranger in (None, "Bearer kvbm_nobody", f"Bearer {metrics}"):
        assert at_once.hold(asked(stranger), LARGE_BODY_BYTES) is None
    assert limits.bodies.taken == 0
    held = at_once.hold(asked(f"Bearer {token}"), LARGE_BODY_BYTES)
    assert held == ("caller router", LARGE_BODY_BYTES - SMALL_BODY_BYTES) and limits.bodies.taken == held.amount
    at_once.give_back(held)
    assert limits.bodies.taken == 0
    assert at_once.hold(asked(None), SMALL_BODY_BYTES) == ("", 0)


def test_hashes_that_are_larger_than_their_body_need_room() -> None:
    limits = Limits(LimitSettings(body_bytes=12 << 20))
    scope = {"client": ("10.0.0.1", 1), "headers": []}
    exchanges = [MeteredExchange(limits, scope, None, None) for _ in range(13)]  # type: ignore[arg-type]
    for exchange in exchanges[:12]:
        exchange.hold(1 << 20)
    with pytest.raises(LimitError):
        exchanges[12].hold(1 << 20)
    for exchange in exchanges:
        exchange.end()
    assert limits.bodies.taken == 0


def test_a_remark_comes_once_in_a_while_and_says_how_many_did_not() -> None:
    now_s = [0.0]
    seldom = RateLimitedLog(10.0, lambda: now_s[0])
    with capture_logs() as logs:
        for second in range(21):
            now_s[0] = float(second)
            seldom.warn("thing.happened", why="x")
    assert [entry.get("more_before", 0) for entry in logs] == [0, 9, 9]


def test_a_peer_is_an_address_and_of_ipv6_a_64() -> None:
    assert peer_key("10.0.0.1") == peer_key("::ffff:10.0.0.1") == "10.0.0.1"
    assert peer_key("2001:db8::1") == peer_key("2001:db8::ffff") != peer_key("2001:db8:0:1::1")
    assert peer_key("fe80::1%eth0") == peer_key("fe80::2")
    assert peer_key("") == peer_key("nonsense")
    assert caller_key({"client": ("10.0.0.1", 5)}) == "10.0.0.1"
    assert caller_key({"client": None, "kvbm.caller": type("Caller", (), {"name": "r"})()}) == "caller r"


@pytest.mark.parametrize(
    ("name", "value"),
    [("sockets", 1), ("body_bytes", 1), ("requests_per_s", -1), ("burst", 0), ("waits", 0), ("header_s", "nan")],
)
def test_limits_that_nothing_could_live_with_are_refused(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"catalog.limits.{name}"):
        load_settings(flags={f"catalog.limits.{name}": value})


# -- connections ------------------------------------------------------------------------------------------------------


class Socketry:
    """Connections without a server: each a socket of a pair."""

    def __init__(self, **settings: Any) -> None:
        self.now_s = 0.0
        self.connections = Connections(LimitSettings(**settings), clock=lambda: self.now_s)
        self.open: list[socket.socket] = []

    def take(self, address: str = "10.0.0.1") -> Connection | None:
        ours, theirs = socket.socketpair()
        self.open += [ours, theirs]
        return self.connections.admit(ours, (address, 1))

    def taken(self, address: str = "10.0.0.1", stage: ConnectionStage = ConnectionStage.HEADER) -> Connection:
        connection = self.take(address)
        assert connection is not None
        self.connections.moved(connection, stage)
        return connection

    def has(self, connection: Connection) -> bool:
        return connection in connection.peer.stages[connection.stage]


@pytest.fixture
def socketry() -> Iterator[Socketry]:
    made = Socketry(sockets=6, sockets_per_peer=4, connects_per_s=1000.0, header_s=5.0, idle_s=60.0, write_s=9.0)
    yield made
    for one in made.open:
        one.close()


def test_who_never_asked_goes_first_then_slow_bodies_then_the_idle(socketry: Socketry) -> None:
    header, slow, idle, busy = [
        socketry.taken(stage=stage) for stage in ConnectionStage if stage is not ConnectionStage.KNOWN
    ]
    socketry.now_s = 2.0
    for gone in (header, slow, idle):
        fourth = socketry.taken(stage=ConnectionStage.ANSWER)
        assert not socketry.has(gone)
        assert socketry.has(busy)
        assert socketry.has(fourth)
    assert socketry.take() is None
    assert len(socketry.connections) == 4


def test_when_all_is_full_the_peer_with_most_pays(socketry: Socketry) -> None:
    many = [socketry.taken("10.0.0.1", ConnectionStage.IDLE) for _ in range(4)]
    few = [socketry.taken("10.0.0.2"), socketry.taken("10.0.0.3")]
    assert socketry.take("10.0.0.4") is not None
    assert [socketry.has(one) for one in (*many, *few)] == [False, True, True, True, True, True]


def test_each_stage_has_its_time(socketry: Socketry) -> None:
    header, _, idle, known, busy = [socketry.taken(f"10.0.0.{stage}", stage) for stage in ConnectionStage]
    for now_s, left in ((4.9, 5), (5.0, 4), (30.0, 3), (59.0, 3), (62.0, 1), (1e6, 1)):
        socketry.now_s = now_s
        socketry.connections.look()
        assert len(socketry.connections) == left
    assert not socketry.has(header)
    assert not socketry.has(idle)
    assert not socketry.has(known)
    assert socketry.has(busy)
    assert socketry.connections.refusals == {"connection_slow": 2}


def test_strangers_from_many_addresses_do_not_end_connections_of_callers_with_a_name(socketry: Socketry) -> None:
    known = [socketry.taken("10.0.0.1", ConnectionStage.KNOWN) for _ in range(4)]
    for number in range(2, 40):
        socketry.taken(f"10.0.1.{number}", ConnectionStage.IDLE if number % 2 else ConnectionStage.HEADER)
    assert all(socketry.has(one) for one in known)
    assert len(socketry.connections) == 6
    assert socketry.connections.refusals == {"connection_replaced": 36}
    for _ in range(4):  # among themselves, the one idle for longest goes
        socketry.taken("10.0.0.1", ConnectionStage.KNOWN)
    assert not any(socketry.has(one) for one in known)


def test_answers_that_nobody_takes_are_bounded_in_time_and_bytes(socketry: Socketry) -> None:
    first, second, third = [socketry.taken(stage=ConnectionStage.ANSWER) for _ in range(3)]
    socketry.connections.stuck(first, 3 << 20)
    socketry.connections.stuck(second, 3 << 20)
    assert socketry.has(first)
    socketry.connections.stuck(third, 3 << 20)  # more than the 8 MiB of the settings
    assert [socketry.has(one) for one in (first, second, third)] == [False, True, True]
    socketry.connections.flows(third)
    socketry.now_s = 9.0
    socketry.connections.look()
    assert [socketry.has(one) for one in (second, third)] == [False, True]


def test_connections_of_one_peer_are_taken_at_a_bounded_rate(socketry: Socketry) -> None:
    taken = sum(socketry.take() is not None for _ in range(4500))
    assert taken == 4000
    assert socketry.take("10.0.0.2") is not None
    for one in socketry.open:
        one.close()
    socketry.open.clear()


# -- the loop's time --------------------------------------------------------------------------------------------------


class Work:
    """Clocks of which tests say how they go on."""

    def __init__(self, **settings: Any) -> None:
        self.now_s = self.worked_s = 0.0
        self.limits = Limits(
            LimitSettings(requests_per_s=0.0, **settings), clock=lambda: self.now_s, work_clock=lambda: self.worked_s
        )

    def do(self, took_s: float) -> None:
        self.now_s += took_s
        self.worked_s += took_s

    def at_once(self, took_s: dict[str, float]) -> FastPath:
        """Answers that take so long, by the namespace that is asked for."""

        class Everybody:
            def caller(self, authorization: str, certificate: None) -> Caller:
                return Caller(authorization, "router", None)

        class Answers:
            def check_ready(self, caller: Caller) -> None:
                pass

            def decoded(self, body: bytes, kind: Any) -> Any:
                return decode_prompt(body, kind, REFERENCE.read_number_list)

            def hashing(self, caller: Caller, asked: Any) -> Any:
                return bytes

            def lookup(_, caller: Caller, *asked: Any) -> bytes:  # noqa: N805
                self.do(took_s[caller.name])
                return b"{}"

        return FastPath(
            cast(Access, Everybody()),
            self.limits,
            cast(Any, Answers()),
            lambda *_: None,
            defaultdict(int),
            Hosts(),
            NATIVE.read_plain_question,
        )


LOOKUP = msgspec.json.encode({"namespace": "00" * 16, "hashes": ""})


def asks(at_once: FastPath, name: str) -> bool:
    question = ShortQuestion(b"/v1/lookup", False, "10.0.0.1", name, None)
    return at_once.answer(question, LOOKUP) is not None


def test_of_two_callers_one_gets_no_more_than_its_share_of_the_loop() -> None:
    """The greedy one asks again at once, the honest one a thousand times a second, a tenth of a millisecond each."""
    work = Work()
    at_once = work.at_once({"greedy": 0.020, "honest": 0.0001})
    greedy_s, honest = 0.0, []
    while work.now_s < 20.0:
        before_s = work.now_s
        greedy_s += 0.020 * asks(at_once, "greedy")
        honest += [asks(at_once, "honest") for _ in range(1 + int(1000 * (work.now_s - before_s)))]
        work.now_s += 0.001
    assert all(honest)
    assert 0.4 <= greedy_s / work.now_s <= 0.53
    assert work.limits.over("greedy").why in ("", "too_much_work")


def test_who_asks_alone_may_have_all_of_the_loop() -> None:
    work = Work()
    at_once = work.at_once({"one": 0.050, "other": 0.001})
    assert all(asks(at_once, "one") for _ in range(200))
    assert asks(at_once, "other")
    assert not asks(at_once, "one")  # now it has had more than its share
    work.now_s += 1.0  # nobody else asks any more
    assert asks(at_once, "one")
    alone = Work(loop_share=1.0)
    at_once = alone.at_once({"one": 0.050, "other": 0.001})
    assert all(asks(at_once, name) for _ in range(200) for name in ("one", "other"))


def test_who_has_had_its_share_is_told_so_on_the_long_way() -> None:
    work, sent = Work(loopback=True), []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        for _ in range(5):  # it waits in between, which counts for nothing
            if scope["client"][0] == "10.0.0.2":
                work.do(0.1)
            await asyncio.sleep(0)
            work.now_s += 0.01
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            sent.append((message["status"], dict(message["headers"]).get(b"retry-after")))

    async def ask(host: str) -> None:
        await Limited(app, work.limits)({"type": "http", "client": (host, 1), "headers": []}, cast(Any, None), send)

    async def ask_all() -> None:
        for number in (2, 2, 1, 2, 1):
            await ask(f"10.0.0.{number}")

    asyncio.run(ask_all())
    assert sent == [(200, None), (200, None), (200, None), (429, b"1"), (200, None)]
    assert work.limits.refusals == {"too_much_work": 1}


def test_probes_are_nobody_who_asks_beside_a_router() -> None:
    """A lone router takes nine tenths of the loop, and somebody looks each tenth of a second whether the catalog is
    well.
    """
    work, answered = Work(), []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        work.do(0.09 if scope["path"] == "/v1/route" else 0.001)
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            answered.append(message["status"])

    async def ask(path: str, host: str) -> None:
        scope = {"type": "http", "path": path, "client": (host, 1), "headers": []}
        await Limited(app, work.limits)(scope, cast(Any, None), send)

    async def ask_all() -> None:
        for path in ("/healthz", "/readyz", "/metrics") * 30:
            await ask("/v1/route", "10.0.0.1")
            await ask(path, "10.0.0.2")
            work.now_s += 0.01
        assert set(answered) == {200}
        for _ in range(30):  # whereas somebody else's question counts
            await ask("/v1/route", "10.0.0.1")
            await ask("/v1/lookup", "10.0.0.2")
        assert 429 in answered

    asyncio.run(ask_all())


def test_what_is_metered_goes_on_as_it_would_alone() -> None:
    async def work(outcome: Any) -> None:
        await asyncio.sleep(0)
        if isinstance(outcome, asyncio.Future):
            await outcome
        elif outcome is not None:
            raise outcome

    async def run() -> None:
        took: list[float] = []
        ticks = itertools.count()

        def metered(outcome: Any) -> Metered:
            return Metered(work(outcome), took.append, lambda: float(next(ticks)))

        await metered(None)
        assert took == [1.0, 1.0]
        with pytest.raises(ZeroDivisionError):
            await metered(ZeroDivisionError())
        failed = asyncio.get_running_loop().create_future()
        failed.set_exception(KeyError())
        with pytest.raises(KeyError):
            await metered(failed)
        waits = asyncio.ensure_future(cast(Any, _awaited(metered(asyncio.get_running_loop().create_future()))))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        waits.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waits

    async def _awaited(one: Metered) -> None:
        await one

    asyncio.run(run())


def test_between_the_steps_of_something_long_others_have_their_turn() -> None:
    """Two long answers at a time, of 64 parts that take 3 ms each: whoever else asks waits for one of them at most."""
    work, served = Work(), []

    def parts(name: str) -> Iterator[bytes]:
        for number in range(64):
            work.do(0.003)
            served.append(name)
            yield b"%d " % number

    async def ask(name: str) -> bytes:
        scope = {"client": (f"10.0.0.{name}", 1), "headers": []}
        return await MeteredExchange(work.limits, scope, cast(Any, None), cast(Any, None)).in_steps(parts(name))

    async def honest() -> None:
        while len(served) < 128:
            served.append("honest")
            await asyncio.sleep(0)

    async def run() -> list[bytes]:
        long = [asyncio.create_task(ask(name)) for name in "12"]
        await honest()
        return await asyncio.gather(*long)

    assert asyncio.run(run()) == [b"".join(b"%d " % number for number in range(64))] * 2
    together = [len(list(run)) for who, run in itertools.groupby(served, lambda one: one == "honest") if not who]
    assert max(together[:20]) <= 2


def test_after_each_part_of_a_long_body_others_have_more_time_than_it_has_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    work, slept = Work(), list[float]()

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    async def part() -> dict[str, Any]:
        return {"type": "http.request", "body": bytes(64 << 10), "more_body": True}

    monkeypatch.setattr("kvbm.catalog.access.limits.asyncio.sleep", sleep)
    exchange = MeteredExchange(
        work.limits, {"client": ("10.0.0.1", 1), "headers": []}, cast(Any, part), cast(Any, None)
    )

    async def read() -> None:
        for _ in range(4):
            await exchange.receive()
            exchange.worked(0.001)
            await exchange.pace()

    asyncio.run(read())
    assert slept == []  # nobody else asks
    work.limits.work.charge(work.now_s, "another", 0.0)
    asyncio.run(read())
    assert len(slept) == 4 and min(slept) > 2 * 0.001


# -- handshakes of TLS ------------------------------------------------------------------------------------------------


def test_handshakes_take_turns_and_the_address_with_fewest_comes_first() -> None:
    async def shake() -> None:
        handshakes, now_s = Handshakes(2, lambda: now[0]), now
        begun, ended = [], []
        over = {name: asyncio.Event() for name in ("a1", "a2", "a3", "a4", "b1")}

        async def hand(name: str) -> None:
            async with handshakes.turn(
                name[0], handshakes.ask(name[0]), lambda: (ended.append(name), over[name].set())
            ):  # type: ignore[func-returns-value]
                begun.append(name)
                await over[name].wait()

        async with asyncio.TaskGroup() as tasks:
            for name in over:
                tasks.create_task(hand(name))
                await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert (begun, len(handshakes)) == (["a1", "a2"], 2)
            now_s[0] = 0.5
            handshakes.look()
            assert ended == []  # nobody takes long yet
            now_s[0] = 1.0
            over["a2"].set()
            for _ in range(3):
                await asyncio.sleep(0)
            assert begun == ["a1", "a2", "b1"]
            handshakes.look()
            assert ended == ["a1"]
            for _ in range(3):
                await asyncio.sleep(0)
            assert begun == ["a1", "a2", "b1", "a3"]
            now_s[0] = 9.0
            handshakes.look()
            assert ended == ["a1", "b1"]  # one waits, so one goes: the first of those that have as many
            for one in over.values():
                one.set()
        assert (len(handshakes), handshakes._active, handshakes._waiting) == (0, {}, {})
        handshakes.look()

    now = [0.0]
    asyncio.run(shake())


def test_who_gives_up_its_turn_leaves_it_to_the_next() -> None:
    async def shake() -> None:
        handshakes = Handshakes(1)
        first, second, third = (handshakes.ask(peer) for peer in "abc")
        assert (first.done(), second.done(), third.done()) == (True, False, False)
        second.cancel()
        async with handshakes.turn("a", first, lambda: None):
            pass
        assert third.done() and len(handshakes) == 1
        async with handshakes.turn("c", third, lambda: None):
            pass
        assert (len(handshakes), handshakes._active, handshakes._waiting) == (0, {}, {})

    asyncio.run(shake())


# -- our own callers --------------------------------------------------------------------------------------------------


def test_a_wait_for_more_instances_than_a_request_may_name_is_several_requests() -> None:
    class Client:
        asked: ClassVar[list[int]] = []

        def lookup(self, namespace: object, hashes: bytes, at_least: Sequence[PositionWanted], wait_s: float) -> None:
            self.asked.append(len(at_least))

    positions = [(InstanceId(f"i{number}"), Epoch(1), Offset(1)) for number in range(2 * MAX_POSITIONS + 1)]
    wait_applied(cast(CatalogClient, Client()), positions, 5.0)
    assert Client.asked == [MAX_POSITIONS, MAX_POSITIONS, 1]
