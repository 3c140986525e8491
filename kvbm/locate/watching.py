"""Following a catalog's feed: events in order, across lost connections and catalogs, until somebody closes it."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator

import msgspec
import urllib3

from kvbm.core.errors import CatalogError
from kvbm.core.watch_events import WatchEnded, WatchEvent, WatchRequest
from kvbm.locate.requests import CatalogRequest
from kvbm.locate.transport import CatalogTransport
from kvbm.safe_log import SafeLog

log = SafeLog()

QUIET_S = 15.0  # the catalog says something every 5 s
BACK_OFF_FIRST_S = 0.1
BACK_OFF_MOST_S = 5.0
_QUEUED = 256  # events that nobody has taken yet; then the feed is not read on, and the catalog says what was missed
_MOST_BYTES = 8 << 20  # of one event
_MOST_REFUSAL_BYTES = 64 << 10
_PAUSE_S = 0.5
_JOIN_S = 5.0
_AGAIN = (408, 429, 500, 502, 503, 504)  # another time it may be taken


class _Sent(msgspec.Struct):
    """An event as it came, and the position behind it."""

    event: WatchEvent | None
    position: str | None


class _End:
    """Nothing more comes.

    Attributes:
        error: why, unless it was closed.
    """

    def __init__(self, error: CatalogError | None) -> None:
        self.error = error


class CatalogWatch:
    """Events of a feed, one after the other. Iterate, or call `next_event`, in one thread; `close` in any.

    A connection that is lost is made anew, to the next catalog if need be, and the feed goes on where it was; what it
    cannot tell any more comes as a `Missed`. After each `WatchBegun` the states of instances are told anew.

    Args:
        refusal: what an answer that is no feed means: its path, status and body.
    Raises: CatalogError: the system gives no thread.

    Attributes:
        position: behind the event that was given last: what a later watch can go on after; None before the first.
    """

    def __init__(
        self,
        transport: CatalogTransport,
        asked: WatchRequest,
        timeout_s: float,
        refusal: Callable[[str, int, bytes], CatalogError],
    ) -> None:
        self.position = asked.after
        self._transport, self._asked, self._timeout_s, self._refusal = transport, asked, timeout_s, refusal
        self._read_to = asked.after
        self._events: queue.Queue[_Sent | _End] = queue.Queue(_QUEUED)
        self._closed = threading.Event()
        self._guard = threading.Lock()
        self._answer: urllib3.BaseHTTPResponse | None = None
        self._ended: _End | None = None
        self._thread = threading.Thread(target=self._run, name="kvbm-watch", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            raise CatalogError(
                f"{transport.url} is not watched: {error}; raise ulimit -u, or the container's pids limit"
            ) from None

    # -- taking events ------------------------------------------------------------------------------------------------

    def __enter__(self) -> CatalogWatch:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[WatchEvent]:
        """Events until it is closed. Raises CatalogError: the catalog refuses it."""
        while not self._closed.is_set() and self._ended is None:
            event = self.next_event(_PAUSE_S)
            if event is not None:
                yield event

    def next_event(self, timeout_s: float) -> WatchEvent | None:
        """The next event; None: there is none in time, or the watch is closed.

        Raises: CatalogRefusedError: the catalog does not let this be watched; every later call raises it again.
        """
        deadline_s = time.monotonic() + timeout_s
        while self._ended is None and not self._closed.is_set():
            try:
                found = self._events.get(timeout=max(0.0, deadline_s - time.monotonic()))
            except queue.Empty:
                return None
            if isinstance(found, _End):
                self._ended = found
            else:
                self.position = found.position
                if found.event is not None:
                    return found.event
        if self._ended is not None and self._ended.error is not None:
            raise self._ended.error
        return None

    def close(self) -> None:
        """End it. Idempotent."""
        self._closed.set()
        with self._guard:
            if self._answer is not None:
                _cut(self._answer)
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_S)

    # -- the reading thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        back_off_s, tried = BACK_OFF_FIRST_S, 0
        is_away = False
        while not self._closed.is_set():
            why = "the feed has ended"
            try:
                if self._follow(tried):
                    back_off_s, tried, is_away = BACK_OFF_FIRST_S, 0, False
            except _RefusedError as refused:
                self._put(_End(refused.error))
                return
            except (CatalogError, urllib3.exceptions.HTTPError, OSError, ValueError) as error:
                why, tried = str(error), tried + 1
            if self._closed.is_set():
                return
            if not is_away:
                log.info("watch.lost", url=self._transport.url, why=why, position=self._read_to)
            is_away = True
            if tried and tried % len(self._transport.places):
                continue  # the next catalog, at once
            self._closed.wait(back_off_s)
            back_off_s = min(2 * back_off_s, BACK_OFF_MOST_S)

    def _follow(self, tried: int) -> bool:
        """Read one feed to its end; whether anything came."""
        asked = msgspec.structs.replace(self._asked, after=self._read_to)
        request = CatalogRequest("POST", "/v1/watch", msgspec.json.encode(asked))
        answer = self._transport.follow(request, tried, self._timeout_s, QUIET_S)
        with self._guard:
            self._answer = answer
        has_come = False
        try:
            if self._closed.is_set():
                return False
            if answer.status != 200:
                body = answer.read(_MOST_REFUSAL_BYTES)
                error = self._refusal("/v1/watch", answer.status, body)
                raise error if answer.status in _AGAIN else _RefusedError(error)
            for event, position in parsed(answer.stream(1 << 16)):
                has_come = True
                if position:
                    self._read_to = position
                if isinstance(event, WatchEnded) and event.may_return:
                    return True
                if not self._put(_Sent(event, self._read_to)):
                    return True
            return has_come
        except (urllib3.exceptions.HTTPError, OSError, ValueError):
            if has_come:
                return True
            raise
        finally:
            with self._guard:
                self._answer = None
            answer.close()

    def _put(self, what: _Sent | _End) -> bool:
        """Whether there was somebody to take it."""
        while not self._closed.is_set():
            try:
                self._events.put(what, timeout=_PAUSE_S)
            except queue.Full:
                continue
            return True
        return False


class _RefusedError(Exception):
    """The catalog does not let this be watched, now or later."""

    def __init__(self, error: CatalogError) -> None:
        super().__init__(str(error))
        self.error = error


def parsed(parts: Iterator[bytes]) -> Iterator[tuple[WatchEvent | None, str]]:
    """Server-sent events, each with its id, "" for none.

    None for a position alone, and for an event of a kind that is not known here.

    Raises: ValueError: something is too long, or no event.
    """
    decoder = msgspec.json.Decoder(WatchEvent)
    kinds = {str(kind.__struct_config__.tag) for kind in WatchEvent.__args__}
    rest = b""
    for part in parts:
        *blocks, rest = (rest + part).split(b"\n\n")
        if len(rest) > _MOST_BYTES:
            raise ValueError(f"an event of more than {_MOST_BYTES} bytes")
        for block in blocks:
            position, kind, data = "", "", b""
            for line in block.split(b"\n"):
                name, _, value = line.partition(b": ")
                if name == b"id":
                    position = value.decode()
                elif name == b"event":
                    kind = value.decode()
                elif name == b"data":
                    data += value
            if data or position:
                yield decoder.decode(data) if data and kind in kinds else None, position


def _cut(answer: urllib3.BaseHTTPResponse) -> None:
    """Have a read in another thread end at once."""
    try:
        answer.shutdown()
    except (OSError, ValueError, AttributeError, RuntimeError):
        pass  # it has ended already
