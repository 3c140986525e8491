"""Which names a catalog that asks nobody who they are answers to.

A page in a browser may have its own name lead to the loopback (DNS rebinding), and then reads what it asks of the
catalog as its own. The request's Host still has that name.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from functools import lru_cache

from kvbm.catalog.access.callers import AccessOptions

_MOST_KEPT, _LONGEST_KEPT = 64, 256  # headers that are not looked into again, and their bytes


class Hosts:
    """The hosts that a request may name: any address, localhost, and more names.

    Args:
        names: None: every host.
    """

    def __init__(self, names: Iterable[str] | None = None) -> None:
        self._names = None if names is None else frozenset(name.lower().rstrip(".") for name in ("localhost", *names))
        self._answered: set[bytes | None] = {None}  # headers it answers to

    def answers_to(self, host: bytes | None) -> bool:
        """Whether a request is answered that has this as its one header; None: it has none."""
        if host in self._answered or self._names is None:
            return True
        if self.refused(((b"host", host or b""),)) is not None:
            return False
        if len(self._answered) < _MOST_KEPT and len(host or b"") <= _LONGEST_KEPT:
            self._answered.add(host)
        return True

    def refused(self, headers: Iterable[tuple[bytes, bytes]]) -> str | None:
        """The host of a request that is not answered; None: it is answered, as is one that names none."""
        if self._names is None:
            return None
        for name, value in headers:
            if name == b"host" and not _is_address(host := _host(value)) and host not in self._names:
                return host
        return None


def hosts_of(options: AccessOptions, address: str) -> Hosts:
    """Those of a catalog.

    Args:
        address: the IP address that is listened on. One beyond the loopback is asked by whatever name it has.
    """
    is_loopback = ipaddress.ip_address(address.partition("%")[0]).is_loopback
    return Hosts(options.hosts if is_loopback and not options.file else None)


def _host(value: bytes) -> str:
    """A header's host without its port."""
    text = value.decode("latin-1").strip().lower()
    host, colon, port = text.rpartition(":")
    return (host if colon and port.isdecimal() else text).rstrip(".")


@lru_cache(256)
def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True
