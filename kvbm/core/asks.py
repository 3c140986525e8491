"""Questions to the catalog over NATS: their subjects, what a message holds, and the request over HTTP that it stands
for.

    kvbm.v1.ask.<cluster>.<caller>.<verb>

The caller is part of the subject, so the server's permissions say who asks. Bodies are those of HTTP: of `lookup`,
`route`, `presence` and `find` the same JSON or binary form, told apart by the header Content-Type; of `blocks` what
HTTP has in the path, `<namespace>/<hash>`; of `instances` the query, such as `limit=10&name=gpu-0`; of `namespaces`
too, such as `limit=10`; `ready` has none. An answer has the status of HTTP in a header.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from kvbm.core.errors import ConfigError

ASKS_PREFIX = "kvbm.v1.ask"
GROUP = "kvbm-catalog"  # catalogs that share the questions
ANYBODY = "any"  # a caller's name where the catalog has no file of callers
STATUS_HEADER = "Kvbm-Status"
TYPE_HEADER = "Content-Type"
RETRY_HEADER = "Retry-After"
JSON_TYPE = "application/json"

_PATHS = {
    "lookup": "/v1/lookup",
    "route": "/v1/route",
    "presence": "/v1/presence",
    "find": "/v1/find",
    "blocks": "/v1/blocks",
    "instances": "/v1/instances",
    "namespaces": "/v1/namespaces",
    "ready": "/readyz",
}
READY = "ready"
_POSTED = ("lookup", "route", "presence", "find")
_POSTED_AT = {_PATHS[verb]: verb for verb in _POSTED}
_VERBS = {path: verb for verb, path in _PATHS.items()}
_NAME = re.compile(r"[A-Za-z0-9_-]{1,128}")
_BLOCK = "/v1/blocks/"
_MOST_WORDS_BYTES = 32 << 10  # of what HTTP has in a path or a query
_WORDS = re.compile(rb"[!-~]*")


class HttpAsk(NamedTuple):
    """A request over HTTP.

    Attributes:
        query: without its question mark.
        body: b"" for none.
    """

    method: str
    path: str
    query: bytes
    body: bytes


def ask_subject(cluster: str, caller: str, verb: str) -> str:
    """Where a caller asks. Raises ConfigError: an impossible name.

    Args:
        cluster, caller: "*" for all. verb: one of `lookup`, `route`, `presence`, `find`, `blocks`, `instances`,
            `namespaces`, `ready`, or "*".
    """
    for what, name in (("cluster", cluster), ("caller", caller)):
        if name != "*" and not is_caller(name):
            raise ConfigError(
                f'{what} {name!r} cannot be part of a subject of questions; use 1 to 128 letters, digits, "-" and "_"'
            )
    return f"{ASKS_PREFIX}.{cluster}.{caller}.{verb}"


def is_caller(name: str) -> bool:
    """Whether it can be the name of a caller."""
    return _NAME.fullmatch(name) is not None


def caller_and_verb(subject: str) -> tuple[str, str]:
    """Who asks, and what, as a subject says."""
    _, caller, verb = subject.rsplit(".", 2)
    return caller, verb


def request_of(verb: str, body: bytes) -> HttpAsk | None:
    """The request over HTTP that a message stands for; None: there is none."""
    path = _PATHS.get(verb)
    if path is None or (verb not in _POSTED and (len(body) > _MOST_WORDS_BYTES or not _WORDS.fullmatch(body))):
        return None
    if verb in _POSTED:
        return HttpAsk("POST", path, b"", body)
    if verb == "blocks":
        return HttpAsk("GET", f"{path}/{body.decode()}", b"", b"")
    return HttpAsk("GET", path, body if verb in ("instances", "namespaces") else b"", b"")


def message_of(method: str, target: str, body: bytes | None) -> tuple[str, bytes] | None:
    """The verb and the message's body for a request over HTTP; None: it is not asked over NATS.

    Args:
        target: path and query.
    """
    if method == "POST" and (verb := _POSTED_AT.get(target)) is not None:
        return verb, body or b""
    path, _, query = target.partition("?")
    if path.startswith(_BLOCK):
        path, words = _PATHS["blocks"], path.removeprefix(_BLOCK)
    else:
        words = query
    asked = _VERBS.get(path)
    if asked is None or method != ("POST" if asked in _POSTED else "GET"):
        return None
    return asked, (body or b"") if asked in _POSTED else words.encode()
