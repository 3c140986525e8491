"""An engine whose events are fetched: TensorRT-LLM's `/kv_cache_events`, asked again and again by a thread.

Each answer brings the events since the one before and lets them go, so an answer that is lost on the way is lost for
good: what comes after an ask that failed counts as after a lost connection. All attention ranks of an engine come in
one answer; each is a source of its own.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import suppress

import urllib3

from kvbm.safe_log import SafeLog
from kvbm.streams.foreign.events import MAX_BATCH_BYTES, ForeignEventError
from kvbm.streams.foreign.state import MAX_WAITING, EngineConnected, Input, PublishedMessage
from kvbm.streams.foreign.trtllm import read_answer

log = SafeLog()

PATH = "/kv_cache_events"
_PAUSE_S = 0.05  # between asks, after one that brought nothing
_FAILED_PAUSE_S = 0.5
_ANSWER_S = 10.0  # some versions wait two seconds for events before they answer
_CHUNK_BYTES = 1 << 16


class PolledEngine:
    """See the module. Its thread runs from `start` until `close`.

    Args:
        url: of the engine, with a path if it is another than PATH.
        ranks: attention ranks that are told apart.
    """

    def __init__(self, url: str, ranks: int = 1) -> None:
        scheme, _, rest = url.partition("://")
        self._url = url if "/" in rest.rstrip("/") else f"{scheme}://{rest.rstrip('/')}{PATH}"
        self.ranks = [PolledRank(self) for _ in range(ranks)]
        self._end = threading.Event()
        self._http = urllib3.PoolManager(retries=False, timeout=urllib3.Timeout(connect=2.0, read=_ANSWER_S))
        self._thread = threading.Thread(target=self._run, name="kvbm-bridge-poll", daemon=True)
        self._has_failed = True  # the first answer is that of a new connection
        self._said = ""

    def start(self) -> None:
        """Ask from now on."""
        self._thread.start()

    def close(self) -> None:
        """Ask no more. An ask under way may end later."""
        self._end.set()

    def _run(self) -> None:
        pause_s = 0.0
        while not self._end.wait(pause_s):
            try:
                pause_s = 0.0 if self.ask() else _PAUSE_S
            except (urllib3.exceptions.HTTPError, ForeignEventError) as error:
                self._fail(error)
                pause_s = _FAILED_PAUSE_S
        self._http.clear()

    def ask(self) -> int:
        """Ask once. Gives how many events it has brought. Raises HTTPError, ForeignEventError."""
        answer = read_answer(self._body())
        if self._has_failed:
            self._has_failed, self._said = False, ""
            for rank in self.ranks:
                rank.put(EngineConnected())
        self.ranks[0].unreadable += answer.unreadable
        for event in answer.events:
            if event.rank < len(self.ranks):
                self.ranks[event.rank].put(PublishedMessage(event.sequence, event.payload))
            else:
                self.ranks[0].unreadable += 1
        for rank in self.ranks:
            rank.is_connected = True
            rank.wake()
        return len(answer.events)

    def _body(self) -> bytes:
        response = self._http.request("POST", self._url, preload_content=False)
        try:
            if response.status != 200:
                raise urllib3.exceptions.HTTPError(f"{self._url} answers {response.status}")
            body = bytearray()
            for chunk in response.stream(_CHUNK_BYTES):
                body += chunk
                if len(body) > MAX_BATCH_BYTES:
                    break  # and is refused where it is read
        finally:
            response.close()
        return bytes(body)

    def _fail(self, error: Exception) -> None:
        self._has_failed = True
        if isinstance(error, ForeignEventError):
            self.ranks[0].unreadable += 1
        for rank in self.ranks:
            rank.is_connected = False
            rank.wake()
        if str(error) != self._said and not self._end.is_set():
            self._said = str(error)
            remedy = "start trtllm-serve with event_buffer_max_size in its kv_cache_config, and give its address"
            log.warning("bridge.poll_failed", url=self._url, error=self._said[:300], remedy=remedy)


class PolledRank:
    """What a source needs of sockets: the events of one attention rank.

    Attributes:
        is_connected: whether the last ask was answered.
        unreadable: answers and events that are none.
    """

    def __init__(self, engine: PolledEngine) -> None:
        self.is_connected = False
        self.unreadable = 0
        self._engine = engine
        self._waiting: deque[Input] = deque(maxlen=MAX_WAITING)  # beyond it the oldest go, which leaves a hole
        self._wakes, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._lock = threading.Lock()
        self._is_open = True

    def put(self, happened: Input) -> None:
        """One more, by the engine's thread."""
        self._waiting.append(happened)

    def wake(self) -> None:
        """Have the bridge's thread look."""
        with self._lock:
            if self._is_open:
                with suppress(BlockingIOError):  # it has not looked since the last time
                    os.write(self._wake, b"x")

    def sockets(self) -> list[int]:
        """Those to wait for."""
        return [self._wakes]

    def receive(self, limit: int) -> Iterator[Input]:
        """What has come, up to so many."""
        with suppress(BlockingIOError):
            os.read(self._wakes, 1 << 16)
        for _ in range(limit):
            if not self._waiting:
                return
            yield self._waiting.popleft()

    def ask(self, start: int) -> None:
        """Nothing: such an engine sends nothing again."""

    def end_ask(self) -> None:
        """Nothing."""

    def close(self) -> None:
        """End the engine's asks, which are those of its other ranks as well."""
        self._engine.close()
        with self._lock:
            if self._is_open:
                self._is_open = False
                os.close(self._wakes)
                os.close(self._wake)
