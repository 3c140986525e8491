"""A publisher of KV events over ZeroMQ that does as vLLM's: numbered messages, the last of them kept and sent again
when asked.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

import msgspec

from tests.extras import needed
from tests.servers import free_port

zmq = needed("zmq", "bridge")


class Publisher:
    """Serves in a thread from its making to `close`.

    Args:
        ports: of messages and of asks; fresh ones by default.
        buffered: messages kept.
        hwm: messages on their way at most; what comes beyond is dropped.

    Attributes:
        hangs: while set, it neither sends nor answers.
    """

    def __init__(
        self, ports: tuple[int, int] | None = None, buffered: int = 10_000, replays: bool = True, hwm: int = 100_000
    ) -> None:
        self.ports = ports or (free_port(), free_port())
        self.hangs = threading.Event()
        self._replays = replays
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=buffered)
        self._lock = threading.Lock()
        self._sequence = 0
        self._context = zmq.Context()
        self._messages = self._context.socket(zmq.PUB)
        self._messages.set_hwm(hwm)
        if hwm < 1000:
            self._messages.setsockopt(zmq.SNDBUF, 4096)
        self._messages.bind(f"tcp://127.0.0.1:{self.ports[0]}")
        self._asks = self._context.socket(zmq.ROUTER)
        self._asks.bind(f"tcp://127.0.0.1:{self.ports[1]}")
        self._closing = False
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    @property
    def settings(self) -> dict[str, Any]:
        replay = {"replay": f"tcp://127.0.0.1:{self.ports[1]}"} if self._replays else {}
        return {"endpoint": f"tcp://127.0.0.1:{self.ports[0]}", **replay}

    def publish(self, *events: Any, is_lost: bool = False, rank: int | None = 0) -> None:
        self.publish_bytes(msgspec.msgpack.encode([1.5, list(events), rank]), is_lost)

    def publish_bytes(self, data: bytes, is_lost: bool = False) -> None:
        with self._lock:
            if not is_lost:
                self._messages.send_multipart((b"", self._sequence.to_bytes(8, "big"), data))
            self._kept.append((self._sequence, data))
            self._sequence += 1

    def _serve(self) -> None:
        while not self._closing:
            if self.hangs.is_set() or not self._asks.poll(20):
                continue
            who, _, start = self._asks.recv_multipart()
            with self._lock:
                for sequence, data in self._kept:
                    if sequence >= int.from_bytes(start, "big"):
                        self._asks.send_multipart((who, b"", b"", sequence.to_bytes(8, "big"), data))
            self._asks.send_multipart((who, b"", b"", b"\xff" * 8, b""))

    def close(self) -> None:
        self._closing = True
        self._thread.join(10)
        self._context.destroy(0)
