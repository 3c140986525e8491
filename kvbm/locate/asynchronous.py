"""A catalog for asyncio: the questions of `Catalog`, awaited."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
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
from kvbm.core.arguments import check_seconds
from kvbm.core.backend import SequenceHashes
from kvbm.core.errors import CatalogClosedError
from kvbm.core.hashing import sequence_hashes
from kvbm.core.ids import InstanceId, Namespace, NamespaceId
from kvbm.core.prompt_tokens import PromptTokens
from kvbm.core.usage import UsageReport
from kvbm.locate.async_transport import AsyncTransport
from kvbm.locate.base import Catalog
from kvbm.locate.credentials import NO_CREDENTIALS, CatalogCredentials
from kvbm.locate.http import TIMEOUT_S, CatalogClient
from kvbm.locate.readiness import POLL_S, Readiness
from kvbm.locate.requests import CatalogRequest

R = TypeVar("R")
CONNECTIONS = 16


class AsyncCatalog:
    """Asks a catalog without keeping an asyncio loop.

    Arguments and errors are those of `Catalog`; `async with` closes it.

    Args:
        catalog: a client, or a replica. It is closed with this.
        at_once: whether it answers without waiting for anybody, as a replica does: then it is called in the loop. Else
            questions wait in threads, so many at a time as it keeps connections.
    """

    def __init__(self, catalog: Catalog, at_once: bool = False) -> None:
        self._catalog = catalog
        self._threads = None if at_once else ThreadPoolExecutor(CONNECTIONS, "kvbm-catalog")
        self._is_closed = False

    async def lookup(self, namespace: Namespace | NamespaceId, hashes: bytes, **more: Any) -> LookupAnswer:
        """Who has how much of a prefix."""
        return await self._ask_long(self._catalog.lookup, namespace, hashes, **more)

    async def presence(self, namespace: Namespace | NamespaceId, hashes: bytes, **more: Any) -> PresenceAnswer:
        """Which of these blocks are held, and by whom; there may be holes."""
        return await self._ask_long(self._catalog.presence, namespace, hashes, **more)

    async def find(self, namespace: Namespace | NamespaceId, hashes: bytes, **more: Any) -> FindAnswer:
        """What of these blocks can be read from elsewhere."""
        return await self._ask_long(self._catalog.find, namespace, hashes, **more)

    async def route(
        self, namespace: Namespace | NamespaceId, hashes: bytes, input_tokens: int, **more: Any
    ) -> RouteAnswer:
        """Where to send a prompt."""
        return await self._ask_long(self._catalog.route, namespace, hashes, input_tokens, **more)

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
        return await self._ask_long(self._catalog.lookup_tokens, namespace, secret, tokens, **more)

    async def route_tokens(
        self, namespace: Namespace, secret: bytes, tokens: Sequence[int] | np.ndarray, **more: Any
    ) -> RouteAnswer:
        """`route` of a prompt's tokens."""
        return await self._ask_long(self._catalog.route_tokens, namespace, secret, tokens, **more)

    async def lookup_prompt(self, prompt: PromptTokens, **more: Any) -> LookupAnswer:
        """`lookup` of a prompt's tokens, hashed by the catalog."""
        return await self._ask_long(self._catalog.lookup_prompt, prompt, **more)

    async def route_prompt(self, prompt: PromptTokens, **more: Any) -> RouteAnswer:
        """`route` of a prompt's tokens, hashed by the catalog."""
        return await self._ask_long(self._catalog.route_prompt, prompt, **more)

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
        self._is_closed = True
        await asyncio.to_thread(self._catalog.close)
        if self._threads is not None:
            self._threads.shutdown(wait=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    async def _ask(self, question: Callable[..., R], *arguments: Any, **more: Any) -> R:
        self._check_open()
        if self._threads is None:
            return question(*arguments, **more)
        within = copy_context()  # has the current span
        return await asyncio.get_running_loop().run_in_executor(
            self._threads, lambda: within.run(question, *arguments, **more)
        )

    async def _ask_long(self, question: Callable[..., R], *arguments: Any, **more: Any) -> R:
        """`_ask`, of a question that may wait for positions."""
        if not more.get("at_least"):
            return await self._ask(question, *arguments, **more)
        self._check_open()
        return await asyncio.to_thread(question, *arguments, **more)

    def _check_open(self) -> None:
        if self._is_closed:
            raise CatalogClosedError("this catalog is closed; make another")


class AsyncCatalogClient(AsyncCatalog):
    """Asks one catalog from a loop of asyncio, without threads: a question that is cancelled ends.

    `async with` closes it. Only through a proxy that the environment names is it asked by a thread.

    Answers, arguments and errors are those of `CatalogClient`; it belongs to the loop in which it is first asked. What
    comes piece by piece (`watch`, `fetch_checkpoint`) and nats:// are `CatalogClient`'s alone.

    Args:
        url: http://host:port, https://host:port, or unix:/path; several with commas between, as of `CatalogClient`.
        timeout_s, hash_tokens, credentials: as of `CatalogClient`.
    """

    def __init__(
        self,
        url: str,
        timeout_s: float = TIMEOUT_S,
        hash_tokens: SequenceHashes = sequence_hashes,
        credentials: CatalogCredentials = NO_CREDENTIALS,
    ) -> None:
        self._questions = _Questions(url, timeout_s, hash_tokens, credentials)
        super().__init__(self._questions, at_once=True)
        self._transport = AsyncTransport(url, credentials)

    @property
    def url(self) -> str:
        """Of the catalog that answered last."""
        return self._transport.url

    def hashes(self, namespace: Namespace, secret: bytes, tokens: Sequence[int] | np.ndarray) -> bytes:
        """As `CatalogClient.hashes`: nobody is asked."""
        return self._questions.hashes(namespace, secret, tokens)

    async def usage(self, since: str = "", until: str = "", tenants: Sequence[str] | None = None) -> UsageReport:
        """As `CatalogClient.usage`."""
        return await self._ask(self._questions.usage, since, until, tenants)

    async def wait_ready(self, timeout_s: float = 30.0) -> None:
        """Wait until the catalog answers and is ready. Raises CatalogError: it is not in time; says why."""
        check_seconds(timeout_s, "timeout_s")
        readiness = Readiness()
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    with readiness.look():
                        readiness.note(await self.ready())
                    if readiness.is_ready:
                        return
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise readiness.late(self.url, timeout_s) from None

    async def aclose(self) -> None:
        """Give the connections back. Idempotent."""
        self._is_closed = True
        self._transport.close()

    async def _ask(self, question: Callable[..., R], *arguments: Any, **more: Any) -> R:
        """A question of `CatalogClient`, worked out up to its next request, again once that is answered, and so on to
        its end.
        """
        answers: list[tuple[int, bytes]] = []
        while True:
            try:
                with self._questions.answered(answers, self.url):
                    return question(*arguments, **more)
            except _AskedError as asked:
                answers.append(await self._transport.send(asked.request, asked.timeout_s))

    async def _ask_long(self, question: Callable[..., R], *arguments: Any, **more: Any) -> R:
        return await self._ask(question, *arguments, **more)


class _AskedError(Exception):
    """A request that is not answered yet; no error."""

    def __init__(self, request: CatalogRequest, timeout_s: float) -> None:
        super().__init__()
        self.request, self.timeout_s = request, timeout_s


class _Answered:
    """A `Carrier` that gives the answers there are, one after the other."""

    page_limit = 0

    def __init__(self, url: str) -> None:
        self.url = url
        self.answers: Iterator[tuple[int, bytes]] = iter(())

    def send(self, request: CatalogRequest, timeout_s: float) -> tuple[int, bytes]:
        for answer in self.answers:
            return answer
        raise _AskedError(request, timeout_s)

    def close(self) -> None:
        return


class _Questions(CatalogClient):
    """What `CatalogClient` asks and how it reads the answers, without a connection."""

    def __init__(
        self, url: str, timeout_s: float, hash_tokens: SequenceHashes, credentials: CatalogCredentials
    ) -> None:
        super().__init__(url, timeout_s, hash_tokens, credentials)
        self._transport.close()
        self._answered = _Answered(url)
        self._transport = self._answered

    @contextmanager
    def answered(self, answers: list[tuple[int, bytes]], url: str) -> Iterator[None]:
        """Within it, the requests of one question have these answers.

        Nothing is awaited within it, so questions do not meet.
        """
        self._answered.url, self._answered.answers = url, iter(answers)
        yield
