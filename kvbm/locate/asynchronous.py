"""A catalog for asyncio: the questions of `Catalog`, awaited."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self, TypeVar

import numpy as np

from kvbm.core.answers import (
    BlockAnswer,
    FindAnswer,
    InstanceSummary,
    LookupAnswer,
    NamespaceSummary,
    PresenceAnswer,
    ReadyAnswer,
    RouteAnswer,
)
from kvbm.core.ids import InstanceId, Namespace, NamespaceId
from kvbm.locate.base import Catalog

R = TypeVar("R")
CONNECTIONS = 16


class AsyncCatalog:
    """Asks a catalog without keeping an asyncio loop. Arguments and errors are those of `Catalog`; `async with` closes it.

    Args:
        catalog: a client, or a replica. It is closed with this.
        at_once: whether it answers without waiting for anybody, as a replica does: then it is called in the loop. Else questions wait
            in threads, so many at a time as it keeps connections.
    """

    def __init__(self, catalog: Catalog, at_once: bool = False) -> None:
        self._catalog = catalog
        self._threads = None if at_once else ThreadPoolExecutor(CONNECTIONS, "kvbm-catalog")

    async def lookup(self, namespace: Namespace | NamespaceId, hashes: bytes, **more: Any) -> LookupAnswer:
        """Who has how much of a prefix."""
        if more.get("at_least"):
            return await asyncio.to_thread(self._catalog.lookup, namespace, hashes, **more)
        return await self._ask(self._catalog.lookup, namespace, hashes, **more)

    async def presence(self, namespace: Namespace | NamespaceId, hashes: bytes, **more: Any) -> PresenceAnswer:
        """Which of these blocks are held, and by whom; there may be holes."""
        if more.get("at_least"):
            return await asyncio.to_thread(self._catalog.presence, namespace, hashes, **more)
        return await self._ask(self._catalog.presence, namespace, hashes, **more)

    async def find(self, namespace: Namespace | NamespaceId, hashes: bytes, **more: Any) -> FindAnswer:
        """What of these blocks can be read from elsewhere."""
        if more.get("at_least"):
            return await asyncio.to_thread(self._catalog.find, namespace, hashes, **more)
        return await self._ask(self._catalog.find, namespace, hashes, **more)

    async def route(
        self, namespace: Namespace | NamespaceId, hashes: bytes, input_tokens: int, **more: Any
    ) -> RouteAnswer:
        """Where to send a prompt."""
        if more.get("at_least"):
            return await asyncio.to_thread(self._catalog.route, namespace, hashes, input_tokens, **more)
        return await self._ask(self._catalog.route, namespace, hashes, input_tokens, **more)

    async def lookup_many(
        self, namespace: Namespace | NamespaceId, prompts: Sequence[bytes], **more: Any
    ) -> list[LookupAnswer]:
        """`lookup` of several prompts."""
        return await self._ask(self._catalog.lookup_many, namespace, prompts, **more)

    async def presence_many(
        self, namespace: Namespace | NamespaceId, runs: Sequence[bytes], **more: Any
    ) -> list[PresenceAnswer]:
        """`presence` of several runs of blocks."""
        return await self._ask(self._catalog.presence_many, namespace, runs, **more)

    async def find_many(
        self, namespace: Namespace | NamespaceId, runs: Sequence[bytes], **more: Any
    ) -> list[FindAnswer]:
        """`find` of several runs of blocks."""
        return await self._ask(self._catalog.find_many, namespace, runs, **more)

    async def route_many(
        self, namespace: Namespace | NamespaceId, prompts: Sequence[bytes], input_tokens: Sequence[int], **more: Any
    ) -> list[RouteAnswer]:
        """`route` of several prompts, one after the other."""
        return await self._ask(self._catalog.route_many, namespace, prompts, input_tokens, **more)

    async def lookup_tokens(
        self, namespace: Namespace, secret: bytes, tokens: Sequence[int] | np.ndarray, **more: Any
    ) -> LookupAnswer:
        """`lookup` of a prompt's tokens."""
        return await self._ask(self._catalog.lookup_tokens, namespace, secret, tokens, **more)

    async def route_tokens(
        self, namespace: Namespace, secret: bytes, tokens: Sequence[int] | np.ndarray, **more: Any
    ) -> RouteAnswer:
        """`route` of a prompt's tokens."""
        return await self._ask(self._catalog.route_tokens, namespace, secret, tokens, **more)

    async def block(self, namespace: Namespace | NamespaceId, block: bytes) -> BlockAnswer:
        """Who holds one block."""
        return await self._ask(self._catalog.block, namespace, block)

    async def instances(self) -> list[InstanceSummary]:
        """All instances, by name."""
        return await self._ask(self._catalog.instances)

    async def instance(self, instance: InstanceId | str) -> InstanceSummary | None:
        """One instance; None when it is not known."""
        return await self._ask(self._catalog.instance, instance)

    async def namespaces(self) -> list[NamespaceSummary]:
        """All namespaces whose fields are known, by id."""
        return await self._ask(self._catalog.namespaces)

    async def ready(self) -> ReadyAnswer:
        """Whether answers are complete, and what does not work."""
        return await self._ask(self._catalog.ready)

    async def wait_ready(self, timeout_s: float = 30.0) -> None:
        """Wait until answers are complete."""
        await asyncio.to_thread(self._catalog.wait_ready, timeout_s)

    async def aclose(self) -> None:
        """Close the catalog. Idempotent."""
        await asyncio.to_thread(self._catalog.close)
        if self._threads is not None:
            self._threads.shutdown(wait=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    async def _ask(self, question: Callable[..., R], *arguments: Any, **more: Any) -> R:
        if self._threads is None:
            return question(*arguments, **more)
        return await asyncio.get_running_loop().run_in_executor(self._threads, lambda: question(*arguments, **more))
