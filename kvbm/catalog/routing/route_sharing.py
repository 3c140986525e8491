"""Carries `SharedRoutes` between the catalogs of a cluster: a few times in a hundredth of a second while there is
something to tell.
"""

from __future__ import annotations

import asyncio
import time

from kvbm.catalog.members.liveness import is_catalog
from kvbm.catalog.routing.shared_routes import MOST_MESSAGE_BYTES, SharedRoutes
from kvbm.core.errors import StreamError
from kvbm.core.ids import InstanceId
from kvbm.safe_log import SafeLog
from kvbm.streams.base import Broadcast
from kvbm.streams.nats.connection import RefusedError

log = SafeLog()

TELL_EVERY_S = 0.005
_TRY_AGAIN_S = 30.0  # after the server has refused
_LOST_S = 1.0  # when it is not there
_MOST_RECEIVED_BYTES = 2 * MOST_MESSAGE_BYTES


class RouteSharing:
    """Tells and listens, for ever.

    One asyncio loop. What is lost is missed by others' costs until the next heartbeats, and by nothing else.

    Args:
        cluster: of the catalogs that share. name: this one's, by which it knows its own messages.
    """

    def __init__(self, stream: Broadcast, shared: SharedRoutes, cluster: str, name: InstanceId) -> None:
        self._stream, self._shared, self._cluster, self._name = stream, shared, cluster, name

    async def tell(self) -> None:
        """Send what waits."""
        while True:
            await self._shared.is_waiting.wait()
            await asyncio.sleep(TELL_EVERY_S)
            data, count = self._shared.message(time.monotonic())
            if not count:
                continue
            try:
                await self._stream.send_routes(self._cluster, self._name, data)
                self._shared.told += count
            except StreamError as error:
                self._shared.untold += count
                log.debug("routes.not_told", routes=count, why=str(error))
                await asyncio.sleep(_TRY_AGAIN_S if isinstance(error, RefusedError) else _LOST_S)

    async def listen(self) -> None:
        """Hear what others tell."""
        while True:
            try:
                async for message in self._stream.watch_routes(self._cluster):
                    self._on_message(message.catalog, message.data)
                return  # the stream is closed
            except StreamError as error:
                log.warning("routes.not_heard", why=str(error))
                await asyncio.sleep(_TRY_AGAIN_S)

    def _on_message(self, catalog: InstanceId, data: bytes) -> None:
        if catalog == self._name:
            return
        if is_catalog(catalog) and len(data) <= _MOST_RECEIVED_BYTES:
            self._shared.hear(time.monotonic(), data)
        else:
            self._shared.refused += 1
