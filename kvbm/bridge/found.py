"""Where an SGLang server publishes its KV events, as its own `/server_info` says.

Source: server_info in sglang/srt/entrypoints/http_server.py, and KVEventsConfig in
sglang/srt/disaggregation/kv_events.py, of SGLang 0.5.23.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple
from urllib.parse import urlsplit

import msgspec
import urllib3
from msgspec import Meta

from kvbm.bridge.asks import BoundedHttp
from kvbm.core.errors import KvbmError
from kvbm.streams.foreign.events import MAX_BLOCK_TOKENS

PATH = "/server_info"
_MOST_BYTES = 16 << 20
_CONNECT_S, _ANSWER_S = 2.0, 5.0
_Text = Annotated[str, Meta(max_length=4096)]


class FoundEngine(NamedTuple):
    """What a server says of itself; fields as of a source's settings."""

    endpoint: str
    replay: str
    topic: str
    ranks: int
    model: str
    block_tokens: int


class NotFoundError(KvbmError):
    """A server does not say where its events are. A retry can help while it starts."""


class _Info(msgspec.Struct, gc=False):
    model_path: _Text
    kv_events_config: _Text | None = None
    served_model_name: _Text | None = None
    page_size: Annotated[int, Meta(ge=1, le=MAX_BLOCK_TOKENS)] | None = None
    dp_size: Annotated[int, Meta(ge=1, le=256)] = 1


class _Events(msgspec.Struct, gc=False):
    publisher: _Text = "null"
    endpoint: _Text = "tcp://*:5557"
    replay_endpoint: _Text | None = None
    topic: _Text = ""


_INFO, _EVENTS = msgspec.json.Decoder(_Info), msgspec.json.Decoder(_Events)


def find(url: str) -> FoundEngine:
    """Ask a server. Raises NotFoundError."""
    at = url.rstrip("/") + PATH
    http = BoundedHttp(_CONNECT_S, _ANSWER_S, _MOST_BYTES)
    try:
        status, body = http.ask("GET", at)
    except urllib3.exceptions.HTTPError as error:
        raise NotFoundError(f"{at} does not answer ({type(error).__name__})") from None
    finally:
        http.close()
    if status != 200:
        raise NotFoundError(f"{at} answers {status}")
    if len(body) > _MOST_BYTES:
        raise NotFoundError(f"{at} answers with more than {_MOST_BYTES} bytes; is that SGLang?")
    return read_server_info(body, url)


def read_server_info(body: bytes, url: str) -> FoundEngine:
    """Where events are, from what a server answers. Raises NotFoundError.

    Args:
        url: of the server: its host stands for `*` in an address.
    """
    try:
        info = _INFO.decode(body)
        events = _EVENTS.decode(info.kv_events_config or "{}")
        host = urlsplit(url).hostname or ""
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise NotFoundError(f"{url}{PATH} says nothing that SGLang 0.5.23 would ({error})") from None
    if events.publisher != "zmq":
        raise NotFoundError(f"{url} publishes no KV events; start it with --kv-events-config and the publisher zmq")
    return FoundEngine(
        _reachable(events.endpoint, host),
        _reachable(events.replay_endpoint or "", host),
        events.topic,
        info.dp_size,
        info.served_model_name or info.model_path,
        info.page_size or 0,
    )


def _reachable(endpoint: str, host: str) -> str:
    """An address where the engine listens, from here. Raises NotFoundError: it does not listen, or not for others."""
    if not endpoint:
        return ""
    head, colon, port = endpoint.rpartition(":")
    if not head.startswith("tcp://") or not port.isdecimal():
        raise NotFoundError(f"the engine publishes at {endpoint!r}, which no other machine reaches; use tcp://*:port")
    if head.removeprefix("tcp://") not in ("*", "0.0.0.0", "[::]"):
        raise NotFoundError(
            f"the engine connects to {endpoint} instead of listening; give the source endpoint tcp://*:{port} instead"
        )
    return f"tcp://{f'[{host}]' if ':' in host else host}{colon}{port}"
