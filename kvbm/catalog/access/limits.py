"""What one caller may ask of the catalog, so that none ruins another's answers: requests a second, bytes in flight,
waits.

A caller is known by its name where it has one, else by its address (IPv6: its /64). Memory for callers is bounded too.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, MutableMapping
from typing import Any

import msgspec

from kvbm.catalog.access.judge import NOT_OVER, Judged, Over, is_limited, judge, key_of
from kvbm.catalog.access.metered import Metered
from kvbm.config.settings import LimitSettings
from kvbm.core.answers import ErrorAnswer, ErrorDetail
from kvbm.safe_log import RateLimitedLog

MAX_BODY_BYTES = 12 << 20
# Of a body, or of its beginning, that counts for no room: as much as a socket may have here anyway.
SMALL_BODY_BYTES = 32 << 10
LARGE_BODY_BYTES = 256 << 10  # larger ones are parsed and hashed one at a time
BODY_WAIT_S = 10.0  # for all of a body
ROOM_WAIT_S = BODY_WAIT_S + 1.0  # for room: whoever has it is done by then
DRAIN_BYTES = 5 * MAX_BODY_BYTES
DRAIN_S = 5.0
_DRAIN_STEP_S = 1.0  # without a byte for so long, nothing more will come
JUDGED = "kvbm.judged"  # in the scope: what becomes of the request
_PROBES = frozenset({"/healthz", "/readyz", "/metrics"})
_MOST_CALLERS = 4096
_BODY_UNIT_BYTES = 16 << 10  # of a request's body that cost as much as a request
_ANSWER_UNIT_BYTES = 64 << 10
STEP_S = 0.001  # of what takes long, before others are answered
# As long as a part of a long body has taken; what the system and the parser of HTTP take of it is not measured.
_PAUSES = 8
_WORK_BURST_MS = 250.0  # that a caller may take beyond its share at first, and may owe
_ASKED_S = 1.0  # others ask if they have done so within this time
# What a caller waits for a refusal once it has had many: else refusing would cost as much as answering.
_REFUSED_PAUSE_S = 1.0

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class LimitError(Exception):
    """A request that is over a limit: its HTTP status and what its body says.

    A retry after `retry_after_s` can help.
    """

    def __init__(self, status: int, code: str, message: str, what_to_do: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s
        self.answer = ErrorAnswer(error=ErrorDetail(code=code, message=message, what_to_do=what_to_do))


class TokenBuckets:
    """A token bucket for each caller.

    The one that was not heard for longest is forgotten first; it would be full again.

    Args:
        per_s: what comes back in a second; 0 for no limit.
        burst: what a bucket holds.
    """

    def __init__(self, per_s: float, burst: float, most: int = _MOST_CALLERS) -> None:
        self._per_s, self._burst, self._most = per_s, max(burst, 1.0), most
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()  # what was left, and when

    def change(self, per_s: float, burst: float) -> None:
        """From now on so much comes back, and a bucket holds so much. What callers owe, they owe."""
        self._per_s, self._burst = per_s, max(burst, 1.0)

    def take(self, now_s: float, key: str) -> float:
        """Take one, if it is there: 0; else how many seconds until it is."""
        if not self._per_s:
            return 0.0
        left = self._refilled(now_s, key)
        if left < 1.0:
            return (1.0 - left) / self._per_s
        self._left[key] = (left - 1.0, now_s)
        return 0.0

    def charge(self, now_s: float, key: str, cost: float) -> None:
        """Take what a request has turned out to cost; the caller may owe as much as a bucket holds."""
        if self._per_s and cost:
            self._left[key] = (max(self._refilled(now_s, key) - cost, -self._burst), now_s)

    def owed_s(self, now_s: float, key: str) -> float:
        """In how many seconds the caller owes nothing any more."""
        return max(0.0, -self._refilled(now_s, key) / self._per_s) if self._per_s else 0.0

    def __len__(self) -> int:
        return len(self._left)

    def _refilled(self, now_s: float, key: str) -> float:
        found = self._left.get(key)
        if found is None:
            if len(self._left) >= self._most:
                self._left.popitem(last=False)
            self._left[key] = (self._burst, now_s)
            return self._burst
        self._left.move_to_end(key)
        return min(self._burst, found[0] + max(0.0, now_s - found[1]) * self._per_s)


class _Waiter:
    """Who waits for room, and what for: "caller", its own, or "all"."""

    __slots__ = ("amount", "has_room", "key", "why")

    def __init__(self, key: str, amount: int, why: str) -> None:
        self.key, self.amount, self.why = key, amount, why
        self.has_room: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def is_served(self) -> bool:
        return self.has_room.done() and not self.has_room.cancelled()


class Room:
    """So much of something for all callers, and a part of it for each.

    Args:
        kept: of it, for callers that have no more than a quarter of this much: who fills the rest does not keep them
            out.
    """

    def __init__(self, most: int, most_each: int, kept: int = 0) -> None:
        self._most, self._most_each, self._kept = most, most_each, kept
        self.taken = 0
        self._by_caller: dict[str, int] = {}
        self._waiting: list[_Waiter] = []  # in the order in which they came

    def change(self, most: int, most_each: int, kept: int = 0) -> None:
        """From now on there is so much. What is taken stays taken, also where that is more."""
        self._most, self._most_each, self._kept = most, most_each, kept
        self._serve()

    def take(self, key: str, amount: int) -> str:
        """Take it. Returns "" or why not: "caller" or "all"."""
        own = self._by_caller.get(key, 0)
        if own + amount > self._most_each:
            return "caller"
        kept = self._kept if own + amount > self._kept // 4 else 0
        if self.taken + amount > self._most - kept:
            return "all"
        self.taken += amount
        self._by_caller[key] = own + amount
        return ""

    def take_in_turn(self, key: str, amount: int) -> str:
        """`take`, unless somebody who came before waits for it."""
        for one in self._waiting:
            if one.key == key:
                return one.why
            if one.why == "all" and not self._is_small(key, amount):
                return "all"
        return self.take(key, amount)

    async def wait(self, key: str, amount: int, wait_s: float) -> str:
        """`take`, once there is room: first come, first served. Returns "" or why not in time, as `take`."""
        why = self.take_in_turn(key, amount)
        if not why or amount > self._most_each:
            return why
        waiter = _Waiter(key, amount, why)
        self._waiting.append(waiter)
        try:
            async with asyncio.timeout(wait_s):
                await waiter.has_room
        except TimeoutError:
            return "" if waiter.is_served else waiter.why
        except asyncio.CancelledError:
            if waiter.is_served:
                self.give(key, amount)
            raise
        finally:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
                self._serve()
        return ""

    def give(self, key: str, amount: int) -> None:
        """Give it back."""
        self.taken -= amount
        left = self._by_caller.get(key, 0) - amount
        if left > 0:
            self._by_caller[key] = left
        else:
            self._by_caller.pop(key, None)
        self._serve()

    def _is_small(self, key: str, amount: int) -> bool:
        """Whether a part of the room is kept for this."""
        return self._by_caller.get(key, 0) + amount <= self._kept // 4

    def _serve(self) -> None:
        """Give room to those who wait, in their order: nobody overtakes one of its own, nor a large one that waits for
        all.
        """
        is_full, left, behind = False, [], set()
        for one in self._waiting:
            if one.has_room.done():
                continue
            why = "caller" if one.key in behind else ""
            if not why and is_full and not self._is_small(one.key, one.amount):
                why = "all"
            if not why and not (why := self.take(one.key, one.amount)):
                one.has_room.set_result(None)
                continue
            is_full |= why == "all"
            behind.add(one.key)
            one.why = why
            left.append(one)
        self._waiting = left


class Limits:
    """The limits of one catalog, and what is used of them. Belongs to one asyncio loop.

    Args:
        work_clock: of the time that the loop's thread works.

    Attributes:
        refusals: what was refused, by the kinds of `telemetry.metrics.REFUSALS`.
        work: what callers take of the loop's time.
        stepping: held while a step of something long is done. reading: held while time is left to others after a part
            of a long body.
    """

    def __init__(
        self,
        settings: LimitSettings,
        clock: Callable[[], float] = time.monotonic,
        refusals: Counter[str] | None = None,
        work_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self.settings = settings
        self.refusals: Counter[str] = Counter() if refusals is None else refusals
        self.clock, self.work_clock = clock, work_clock
        self.work = LoopWork(settings.loop_share)
        self.stepping, self.reading = asyncio.Lock(), asyncio.Lock()
        self.requests = TokenBuckets(settings.requests_per_s, settings.burst)
        self.refusing = TokenBuckets(settings.requests_per_s / 10, settings.requests_per_s / 10)
        self.bodies = Room(*_room_for_bodies(settings.body_bytes))
        self.waits = Room(settings.waits, max(1, settings.waits // 4))
        self.limited_log = RateLimitedLog(clock=clock)
        self.large = asyncio.Lock()  # held while a large request is parsed and hashed

    def change(self, settings: LimitSettings) -> None:
        """From now on these count."""
        self.settings = settings
        self.work.change(settings.loop_share)
        self.requests.change(settings.requests_per_s, settings.burst)
        self.refusing.change(settings.requests_per_s / 10, settings.requests_per_s / 10)
        self.bodies.change(*_room_for_bodies(settings.body_bytes))
        self.waits.change(settings.waits, max(1, settings.waits // 4))

    def over(self, key: str) -> Over:
        """Whether a caller asks too much now; if not, this counts as one request."""
        now_s = self.clock()
        if wait_s := self.work.wait_s(now_s, key):
            return Over("too_much_work", wait_s)
        wait_s = self.requests.take(now_s, key)
        return Over("too_many_requests", wait_s) if wait_s else NOT_OVER

    def withdraw(self, judged: Judged) -> None:
        """A request that was judged does not count: it is judged again elsewhere."""
        if judged.limited and not judged.over:
            self.requests.charge(self.clock(), judged.key, -1)

    def refusal(self, over: Over) -> LimitError:
        """What who asks too much is told."""
        if over.why == "too_much_work":
            message = (
                f"answers to this caller have taken more than {self.settings.loop_share:.0%} of the catalog's "
                "time, and others ask too"
            )
            remedy = "ask again after the seconds of the header retry-after, or have catalog.limits.loop_share raised"
        else:
            message = f"more than {self.settings.requests_per_s:g} requests a second"
            remedy = (
                "ask again after the seconds of the header retry-after, or have catalog.limits.requests_per_s raised"
            )
        return LimitError(429, over.why, message, remedy, over.wait_s)


class FeedPlace:
    """A place in a room that is held until it is closed.

    Args:
        give_back: called once.
    """

    def __init__(self, give_back: Callable[[], None]) -> None:
        self._give_back: Callable[[], None] | None = give_back

    def close(self) -> None:
        """Give the place back. Idempotent."""
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back()


class LoopWork:
    """What each caller takes of the loop's time, which all share. While others ask, one may have a part of it.

    Args:
        share: that part; 1 for all.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._left = TokenBuckets(1000.0 * share, _WORK_BURST_MS)  # in milliseconds
        self._asked: OrderedDict[str, float] = OrderedDict()  # caller → when it last took some, the last one at the end

    def change(self, share: float) -> None:
        """From now on one may have this part."""
        self._share = share
        self._left.change(1000.0 * share, _WORK_BURST_MS)

    def charge(self, now_s: float, key: str, took_s: float, waits: bool = True) -> None:
        """A caller has taken so much.

        Args:
            waits: it is one that others' work keeps waiting; not who looks now and then whether the catalog is well.
        """
        if waits:
            self._asked[key] = now_s
            self._asked.move_to_end(key)
            if len(self._asked) > _MOST_CALLERS:
                self._asked.popitem(last=False)
        self._left.charge(now_s, key, 1000.0 * took_s)

    def wait_s(self, now_s: float, key: str) -> float:
        """0 where the caller may have more now, else in how many seconds."""
        if self._share >= 1.0 or not self.is_shared(now_s, key):
            return 0.0
        return self._left.owed_s(now_s, key)

    def is_shared(self, now_s: float, key: str) -> bool:
        """Whether others have asked just now."""
        for other in reversed(self._asked):
            if other != key:
                return now_s < self._asked[other] + _ASKED_S
        return False


class Limited:
    """An ASGI application within limits: judges a request, refuses what is over them, and lets the caller read why."""

    def __init__(self, app: App, limits: Limits) -> None:
        self._app, self._limits = app, limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = MeteredExchange(self._limits, scope, receive, send)
        scope["kvbm.exchange"] = exchange
        try:
            scope[JUDGED] = judged = exchange.judge()
            if judged.over:
                await self._refuse(exchange, judged.over)
                return
            answering = self._app(scope, exchange.receive, exchange.send)
            await Metered(answering, exchange.worked, self._limits.work_clock)
        except LimitError as error:
            code = error.answer.error.code
            self._limits.refusals[
                code if code in ("too_many_bytes", "too_many_waits", "too_many_watches") else "too_large"
            ] += 1
            self._limits.limited_log.warn("catalog.request_refused", why=error.answer.error.code, caller=exchange.key)
            await exchange.answer(error)
        finally:
            exchange.end()

    async def _refuse(self, exchange: MeteredExchange, over: Over) -> None:
        limits = self._limits
        limits.refusals[over.why] += 1
        limits.limited_log.warn("catalog.request_refused", why=over.why, caller=exchange.key)
        if limits.refusing.take(limits.clock(), exchange.key):
            await asyncio.sleep(_REFUSED_PAUSE_S)
        await exchange.answer(limits.refusal(over))


class MeteredExchange:
    """One request and its answer.

    Attributes:
        key: of the caller.
        body: what was read; emptied when the request is over, because an error that tells of it may live until it is
            collected.
    """

    body: bytearray | None = None

    def __init__(self, limits: Limits, scope: Scope, receive: Receive, send: Send) -> None:
        self._limits, self._receive, self._send = limits, receive, send
        self._caller, self._host, self._path = scope.get("kvbm.caller"), _host(scope), scope.get("path", "")
        self.key = caller_key(scope)
        self._limited = is_limited(limits.settings.loopback, _name(scope), self._host)
        self._is_probe = self._path in _PROBES
        self._more, self._expects, self.length = _body_headers(scope)
        self._body_bytes = self._answer_bytes = self._held = self._more_cost = self._charged = 0
        self._unpaced_s = 0.0  # of the loop's time, since the last part of the body
        self._started = False

    def judge(self) -> Judged:
        """What becomes of it; it counts as a request."""
        return judge(self._limits, self._caller, self._host, self._path)

    def worked(self, took_s: float) -> None:
        """So much of the loop's time went into the answer."""
        self._unpaced_s += took_s
        self._limits.work.charge(self._limits.clock(), self.key, took_s, not self._is_probe)

    async def in_steps(self, parts: Iterator[bytes]) -> bytes:
        """The parts of a long answer joined. They are made a few at a time, so that others are answered between.

        While others ask, twice as long is left to them as each step has taken.
        """
        made, limits = list[bytes](), self._limits
        while True:
            async with limits.stepping:
                begin_s = limits.work_clock()
                for part in parts:
                    made.append(part)
                    if limits.work_clock() >= begin_s + STEP_S:
                        break
                else:
                    return b"".join(made)
                took_s = limits.work_clock() - begin_s
            await asyncio.sleep(2 * took_s if limits.work.is_shared(limits.clock(), self.key) else 0)

    async def pace(self) -> None:
        """After each part of a body: while others ask, more time is left to them than it has taken.

        Long bodies share that time.
        """
        took_s, self._unpaced_s = self._unpaced_s, 0.0
        limits = self._limits
        if self._body_bytes > SMALL_BODY_BYTES and limits.work.is_shared(limits.clock(), self.key):
            async with limits.reading:
                await asyncio.sleep(_PAUSES * took_s)

    async def receive(self) -> Message:
        """The next part of the body, within the room for bodies. Raises LimitError."""
        message = await self._receive()
        self._more = bool(message.get("more_body", False))
        self._body_bytes += len(message.get("body", b""))
        if self._body_bytes <= MAX_BODY_BYTES:
            self.hold(self._body_bytes)
        return message

    async def reserve(self) -> None:
        """Take the room that the body says it needs, before any of it is read: else some requests could fill it that
        all lack the rest.

        Who finds none waits for it, and reads nothing until then. Raises LimitError.
        """
        over = min(self.length, MAX_BODY_BYTES) - SMALL_BODY_BYTES
        if over <= 0:
            return
        if why := await self._limits.bodies.wait(self.key, over, ROOM_WAIT_S):
            raise _no_room(why)
        self._held += over

    def hold(self, size: int) -> None:
        """The request is as large as this here, if it was not larger before; a small one needs no room.

        Raises LimitError.
        """
        over = size - SMALL_BODY_BYTES - self._held
        if over <= 0:
            return
        if why := self._limits.bodies.take(self.key, over):
            raise _no_room(why)
        self._held += over

    async def send(self, message: Message) -> None:
        """A part of the answer.

        Before the last one, what the caller still sends is read and dropped, so that it gets to read it.
        """
        if message["type"] == "http.response.start":
            self._started = True
            if self._more:
                message = {**message, "headers": [*message.get("headers", []), (b"connection", b"close")]}
        else:
            self._answer_bytes += len(message.get("body", b""))
            if message.get("more_body", False):
                self._charge_sent()
            if self._more and not message.get("more_body", False):
                await self._send({**message, "more_body": True})
                await self._drain()
                message = {"type": "http.response.body", "body": b"", "more_body": False}
        await self._send(message)

    async def answer(self, error: LimitError) -> None:
        """Say what is over a limit, unless something else was said already."""
        if self._started:
            return
        body = msgspec.json.encode(error.answer)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"retry-after", b"%d" % max(1, math.ceil(error.retry_after_s))),
        ]
        await self.send({"type": "http.response.start", "status": error.status, "headers": headers})
        await self.send({"type": "http.response.body", "body": body})

    def counts_as(self, more: int) -> None:
        """It counts as so many more requests."""
        self._more_cost = more

    def refused(self, why: str) -> None:
        """Count it."""
        self._limits.refusals[why] += 1

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Held while the request waits for `at_least`. Raises LimitError: too many do."""
        if why := self._limits.waits.take(self.key, 1):
            raise LimitError(
                429 if why == "caller" else 503,
                "too_many_waits",
                "too many requests wait for at_least"
                if why == "all"
                else "too many requests of this caller wait for at_least",
                "ask again soon, with fewer such requests at a time, or have catalog.limits.waits raised",
            )
        try:
            yield
        finally:
            self._limits.waits.give(self.key, 1)

    @contextlib.asynccontextmanager
    async def parsing(self, body_bytes: int) -> AsyncIterator[None]:
        """Held while a request is parsed and hashed: large ones one after the other."""
        if body_bytes <= LARGE_BODY_BYTES:
            yield
            return
        async with self._limits.large:
            yield

    def end(self) -> None:
        """The request is over: give back what it held, and charge what it cost."""
        if self.body is not None:
            with contextlib.suppress(BufferError):
                self.body.clear()
        if self._held:
            self._limits.bodies.give(self.key, self._held)
            self._held = 0
        if self._limited:
            cost = cost_of(self._body_bytes, self._answer_bytes) + self._more_cost - self._charged
            self._limits.requests.charge(self._limits.clock(), self.key, cost)

    def _charge_sent(self) -> None:
        """Charge what was sent so far: a feed goes on for hours, and all of it at its end would keep its caller out."""
        units = self._answer_bytes // _ANSWER_UNIT_BYTES
        if self._limited and units > self._charged:
            self._limits.requests.charge(self._limits.clock(), self.key, units - self._charged)
            self._charged = units

    async def _drain(self) -> None:
        """Read what the caller still sends, within bounds."""
        if self._expects and not self._body_bytes:
            self._more = False  # it waits for our word before it sends
            return
        left = DRAIN_BYTES
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_S):
                while self._more and left > 0:
                    async with asyncio.timeout(_DRAIN_STEP_S):
                        message = await self._receive()
                    size = len(message.get("body", b""))
                    left -= size
                    self._body_bytes += size
                    self._more = bool(message.get("more_body", False))
        self._more = False


def _no_room(why: str) -> LimitError:
    return LimitError(
        429 if why == "caller" else 503,
        "too_many_bytes",
        "requests that are being read have no room for this one"
        if why == "all"
        else "requests of this caller that are being read have no room for this one",
        "ask again soon, with fewer long requests at a time, or have catalog.limits.body_bytes raised",
    )


def _room_for_bodies(most: int) -> tuple[int, int, int]:
    """As `Room` takes it: for all, for each, and what is kept for callers that have little."""
    return most, max(MAX_BODY_BYTES, most // 2), min(most // 4, max(0, most - MAX_BODY_BYTES))


def cost_of(body_bytes: int, answer_bytes: int) -> int:
    """As how many more requests a long one counts."""
    return body_bytes // _BODY_UNIT_BYTES + answer_bytes // _ANSWER_UNIT_BYTES


def caller_key(scope: Scope) -> str:
    """Who asks: the caller's name, else the address."""
    return key_of(_name(scope), _host(scope))


def _name(scope: Scope) -> str:
    return getattr(scope.get("kvbm.caller"), "name", "")


def _host(scope: Scope) -> str:
    return str((scope.get("client") or ("",))[0])


def _body_headers(scope: Scope) -> tuple[bool, bool, int]:
    """Whether a body comes, whether the caller waits for our word before it sends it, and how long it says it is (0: it
    does not).
    """
    has_body, expects, length = False, False, 0
    for name, value in scope["headers"]:
        if name == b"content-length":
            length = int(value) if value.isdigit() and len(value) < 20 else 0
            has_body = has_body or value != b"0"
        elif name == b"transfer-encoding":
            has_body = True
        elif name == b"expect":
            expects = value.lower() == b"100-continue"
    return has_body, expects, length
