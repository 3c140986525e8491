"""An engine whose events are fetched: TensorRT-LLM's `/kv_cache_events`, asked again and again by a thread.

Each answer brings the events since the one before and lets them go, so an answer that is lost on the way is lost for
good: what comes after an ask that failed counts as after a lost connection. All attention ranks of an engine come in
one answer; each is a source of its own.
"""

from __future__ import annotations

import threading

import urllib3

from kvbm.bridge.asks import BoundedHttp
from kvbm.bridge.inbox import Inbox
from kvbm.safe_log import SafeLog
from kvbm.streams.foreign.events import MAX_BATCH_BYTES, ForeignEventError
from kvbm.streams.foreign.state import EngineConnected, PublishedMessage
from kvbm.streams.foreign.trtllm import read_answer

log = SafeLog()

PATH = "/kv_cache_events"
_PAUSE_S = 0.05  # between asks, after one that brought nothing
_FAILED_PAUSE_S = 0.5
_CONNECT_S = 2.0
_ANSWER_S = 10.0  # a whole one: some versions wait two seconds for events before they answer


class PolledEngine:
    """See the module. Its thread runs from `start` until `close`.

    Args:
        url: of the engine, with a path if it is another than PATH.
        ranks: attention ranks that are told apart.
    """

    def __init__(self, url: str, ranks: int = 1) -> None:
        scheme, _, rest = url.partition("://")
        self._url = url if "/" in rest.rstrip("/") else f"{scheme}://{rest.rstrip('/')}{PATH}"
        self.ranks = [PolledRank(self, self._url) for _ in range(ranks)]
        self._end = threading.Event()
        self._http = BoundedHttp(_CONNECT_S, _ANSWER_S, MAX_BATCH_BYTES)
        self._thread = threading.Thread(target=self._run, name="kvbm-bridge-poll", daemon=True)
        self._has_failed = True  # the first answer is that of a new connection
        self._said = ""

    def start(self) -> None:
        """Ask from now on."""
        self._thread.start()

    def close(self) -> None:
        """Ask no more. An ask under way ends later, within the time of an answer."""
        self._end.set()

    def _run(self) -> None:
        pause_s = 0.0
        while not self._end.wait(pause_s):
            try:
                pause_s = 0.0 if self.ask() else _PAUSE_S
            except Exception as error:  # noqa: BLE001  the thread goes on: the next ask may be answered
                self._fail(error)
                pause_s = _FAILED_PAUSE_S
        self._http.close()

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
        answer = self._http.ask("POST", self._url)
        if answer.status != 200:
            raise urllib3.exceptions.HTTPError(f"{self._url} answers {answer.status}")
        return answer.body  # one that is too long is refused where it is read

    def _fail(self, error: Exception) -> None:
        self._has_failed = True
        if isinstance(error, ForeignEventError):
            self.ranks[0].unreadable += 1
        for rank in self.ranks:
            rank.is_connected = False
            rank.wake()
        said = str(error) or type(error).__name__
        if said != self._said and not self._end.is_set():
            self._said = said
            remedy = "start trtllm-serve with event_buffer_max_size in its kv_cache_config, and give its address"
            log.warning("bridge.poll_failed", url=self._url, error=self._said[:300], remedy=remedy)


class PolledRank(Inbox):
    """The events of one attention rank."""

    def __init__(self, engine: PolledEngine, name: str) -> None:
        super().__init__(name)
        self._engine = engine

    def close(self) -> None:
        """End the engine's asks, which are those of its other ranks as well."""
        self._engine.close()
        super().close()
