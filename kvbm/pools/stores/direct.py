"""Requests that a store's client signs and others send: whoever has them reads objects over plain HTTP by their own
sockets.

That saves the client's copy of each object, and the fresh memory it is made into. What goes wrong there is asked for
again as usual, so nothing here needs to say why.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from kvbm.pools.stores.base import DirectRequests
from kvbm.pools.stores.link import RequestLimits, StoreLink

if TYPE_CHECKING:
    from obstore.store import S3Store

_SIGNED_FOR = timedelta(minutes=15)  # as far as two clocks may be apart for any other request
_ADDRESSES_LAST_S = 30.0


class DirectPlaces:
    """Places of one call among a store's requests in flight. The store's loop only.

    Attributes:
        taken: how many.
    """

    def __init__(self, free: asyncio.Semaphore) -> None:
        self.taken = 0
        self._free = free
        self._is_over = False

    async def take(self, most: int) -> bool:
        """Wait for one, and take up to `most` of those that are free then. False: the call is over."""
        await self._free.acquire()
        while True:
            if self._is_over:
                self._free.release()
                return False
            self.taken += 1
            if self.taken >= most or self._free.locked():
                return True
            await self._free.acquire()

    def leave(self) -> None:
        """Give all back; more are not taken."""
        self._is_over = True
        for _ in range(self.taken):
            self._free.release()
        self.taken = 0


class DirectSigner:
    """Signs requests for objects of an S3 store that is reached over plain HTTP without a proxy. Its loop only."""

    def __init__(self, blobs: S3Store, limits: RequestLimits, clock: Callable[[], float] = time.monotonic) -> None:
        import obstore

        self._obstore = obstore
        self._blobs = blobs
        self._limits = limits
        self._clock = clock
        self._host = ""
        self._addresses: tuple[str, ...] = ()  # of that host
        self._found_s = 0.0  # when

    async def requests(self, names: Sequence[str], connections: int) -> DirectRequests | None:
        """A request for each of these objects. None: they cannot be sent over plain HTTP.

        Raises whatever the client and its credentials' provider raise; OSError: the store's name has no address.
        """
        urls = await self._obstore.sign_async(self._blobs, "GET", list(names), _SIGNED_FOR)
        first = urlsplit(urls[0])
        if first.scheme != "http" or not first.hostname:
            return None
        addresses, port = await self._addresses_of(first.hostname), first.port or 80
        return DirectRequests(addresses, port, [_request(url) for url in urls], connections, self._limits)

    async def _addresses_of(self, host: str) -> tuple[str, ...]:
        try:
            return (str(ipaddress.ip_address(host)),)
        except ValueError:
            pass  # it is a name
        now_s = self._clock()
        if self._host != host or now_s - self._found_s > _ADDRESSES_LAST_S:
            found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
            self._host, self._found_s = host, now_s
            self._addresses = tuple(dict.fromkeys(str(address[0]) for *_, address in found))
        return self._addresses


def is_direct(link: StoreLink) -> bool:
    """Whether what is reached by this link may be asked by sockets of one's own."""
    return link.url.startswith("http://") and not link.proxy


def _request(url: str) -> bytes:
    host, _, target = url.removeprefix("http://").partition("/")
    return f"GET /{target} HTTP/1.1\r\nHost: {host}\r\nUser-Agent: kvbm\r\nAccept: */*\r\n\r\n".encode("ascii")
