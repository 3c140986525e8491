"""Whether a request is answered: one judgement for each way it can come, between socket and index, by the application,
or over NATS.

A rule about who may ask what, or how much, belongs here. What is not listed below is for operators alone.
"""

from __future__ import annotations

import ipaddress
import re
from functools import lru_cache
from typing import Literal, NamedTuple, Protocol

from kvbm.catalog.access.callers import Caller
from kvbm.config.settings import LimitSettings

UNIX_HOST = "unix"  # the address of a peer on a unix socket
PASSED = "passed"
Outcome = Literal["passed", "unknown", "forbidden", "over"]

_FOR_ALL = frozenset({"/healthz", "/readyz", "/ui"})
_PAGE = "/ui/"  # whose files hold no data
_FOR_ROUTERS = frozenset(
    {
        "/v1/lookup",
        "/v1/route",
        "/v1/presence",
        "/v1/find",
        "/v1/watch",
        "/v1/instances",
        "/v1/namespaces",
        "/v1/checkpoint",
        "/v1/overview",
        "/v1/overview/feed",
        "/v1/usage",
        "/openapi.json",
    }
)
_BLOCKS = re.compile(r"/v1/blocks/[^/]*/[^/]*")


class Over(NamedTuple):
    """That a caller asks too much: what of, as `telemetry.metrics.REFUSALS` has it, and when it may ask again.

    False: it does not.
    """

    why: str
    wait_s: float

    def __bool__(self) -> bool:
        return bool(self.why)


NOT_OVER = Over("", 0.0)


class Counting(Protocol):
    """What counts requests: `Limits`."""

    settings: LimitSettings

    def over(self, key: str) -> Over:
        """Whether a caller asks too much now; if not, this counts as one request."""
        ...


class Judged(NamedTuple):
    """What becomes of a request.

    Attributes:
        outcome: "passed"; "unknown": nobody known asks (401); "forbidden": the role may not ask this (403); "over": the
            caller asks too much (429).
        key: what the caller is known by.
        limited: whether its requests are counted, as this one was unless it is over.
        over: what it asks too much of.
    """

    outcome: Outcome
    key: str
    limited: bool
    over: Over


def judge(counting: Counting, caller: Caller | None, host: str, path: str) -> Judged:
    """What becomes of a request. Whoever asks too much is told that first.

    Args:
        caller: who asks; None for nobody known.
        host: the peer's address.
    """
    name = "" if caller is None else caller.name
    judged = _within(allowed(caller, path), name, host, counting.settings.loopback)
    if judged.limited and (over := counting.over(judged.key)):
        return judged._replace(outcome="over", over=over)
    return judged


@lru_cache(4096)
def _within(outcome: Outcome, name: str, host: str, loopback: bool) -> Judged:
    """A request of a caller that does not ask too much."""
    return Judged(outcome, key_of(name, host), is_limited(loopback, name, host), NOT_OVER)


def allowed(caller: Caller | None, path: str) -> Outcome:
    """Whether the role of a caller may ask this, however much it asks."""
    if path in _FOR_ALL or path.startswith(_PAGE):
        return "passed"
    if caller is None:
        return "unknown"
    return "passed" if _may(caller, path) else "forbidden"


def _may(caller: Caller, path: str) -> bool:
    if caller.role == "operator":
        return True
    if caller.role == "metrics":
        return path == "/metrics"
    return path in _FOR_ROUTERS or _BLOCKS.fullmatch(path) is not None


def key_of(name: str, host: str) -> str:
    """What a caller is known by.

    Args:
        name: "" where it has none.
        host: the peer's address.
    """
    return f"caller {name}" if name else peer_key(host)


def is_limited(loopback: bool, name: str, host: str) -> bool:
    """Whether requests of a caller are counted: not those from the machine itself, without a name, unless
    `limits.loopback` is set.
    """
    return loopback or bool(name) or not (host == UNIX_HOST or _is_loopback(host))


@lru_cache(4096)
def peer_key(host: str) -> str:
    """What addresses count as one peer: of IPv6 a /64, which is what one customer gets at least."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return "peer"
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return str(ipaddress.ip_network((address, 64), strict=False))
    return str(address)


@lru_cache(4096)
def _is_loopback(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
