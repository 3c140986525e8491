"""Asking where blocks are, beyond what the own ledger knows.

A manager asks a `Locator`, to which trouble is an answer of zero, never an exception. A router asks a `Catalog`, which
says what is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol, Self, Unpack

import numpy as np

from kvbm.core.answers import (
    LIMIT,
    MAX_PEERS,
    BlockAnswer,
    FindAnswer,
    InstanceSummary,
    LookupAnswer,
    NamespaceSummary,
    PeerHolding,
    PositionWanted,
    PresenceAnswer,
    ReadyAnswer,
    RouteAnswer,
)
from kvbm.core.ids import InstanceId, Namespace, NamespaceId
from kvbm.core.prompt_tokens import PromptTokens
from kvbm.core.token_questions import LookupMore, RouteMore


class FoundElsewhere(NamedTuple):
    """What of some blocks can be read from elsewhere.

    Attributes:
        claimed: how many of them, from the first on without a hole, somebody claims the pool holds.
        peers: live instances that lend them, the nearest first.
    """

    claimed: int = 0
    peers: Sequence[PeerHolding] = ()


NOTHING_FOUND = FoundElsewhere()


class Locator(Protocol):
    """How a manager asks for blocks in a pool of cluster reach, and of other instances."""

    def find(
        self, pool: str, namespace: NamespaceId, hashes: bytes, first: int, timeout_s: float, instance: str = ""
    ) -> FoundElsewhere:
        """What of these blocks can be read from elsewhere.

        Stale answers cost a miss, never a wrong block: what is read proves itself. Nothing when nobody answers in time.

        Args:
            pool: of cluster reach; "" for none.
            first: which instances lend blocks is asked from this one on; behind the last, nobody is asked.
            instance: the only one to ask about; where it lends, it is an answer even if it holds none of them yet.
        """

    def claimed(self, pool: str, namespace: NamespaceId, hashes: bytes, timeout_s: float) -> bytes:
        """Which of these blocks somebody claims the pool holds, each by itself: a bit for each, as in
        `BlocksHeld.held`.

        As `find`; b"" when nobody answers in time.
        """

    def close(self) -> None:
        """Give back connections. Idempotent."""


class Nowhere:
    """Knows of no block elsewhere: an instance without a catalog."""

    def find(
        self, pool: str, namespace: NamespaceId, hashes: bytes, first: int, timeout_s: float, instance: str = ""
    ) -> FoundElsewhere:
        return NOTHING_FOUND

    def claimed(self, pool: str, namespace: NamespaceId, hashes: bytes, timeout_s: float) -> bytes:
        return b""

    def close(self) -> None:
        return


class Catalog(Protocol):
    """What a router asks, whatever answers: `CatalogClient` over HTTP, a unix socket or NATS, `CatalogReplica` in its
    own process.

    Any thread may call it. Every method raises CatalogError when nothing answers in time, CatalogRefusedError when the
    answer is an error, CatalogClosedError after `close`, and ArgumentError for an argument that cannot be used.
    Arguments are told at `CatalogClient`. `with` closes it.
    """

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...

    def hashes(self, namespace: Namespace, secret: bytes, tokens: Sequence[int] | np.ndarray) -> bytes:
        """Packed hashes of a prompt's full blocks."""

    def lookup(
        self,
        namespace: Namespace | NamespaceId,
        hashes: bytes,
        at_least: Sequence[PositionWanted] = (),
        wait_s: float = 1.0,
        timeout_s: float | None = None,
        limit: int = LIMIT,
        instances: Sequence[str] | None = None,
    ) -> LookupAnswer:
        """Who has how much of a prefix."""

    def presence(
        self,
        namespace: Namespace | NamespaceId,
        hashes: bytes,
        at_least: Sequence[PositionWanted] = (),
        wait_s: float = 1.0,
        timeout_s: float | None = None,
        limit: int = LIMIT,
        instances: Sequence[str] | None = None,
    ) -> PresenceAnswer:
        """Which of these blocks are held, and by whom; there may be holes."""

    def find(
        self,
        namespace: Namespace | NamespaceId,
        hashes: bytes,
        first: int = 0,
        asker: str = "",
        topology: Sequence[str] = (),
        at_least: Sequence[PositionWanted] = (),
        wait_s: float = 1.0,
        timeout_s: float | None = None,
        limit: int = MAX_PEERS,
        instances: Sequence[str] | None = None,
    ) -> FindAnswer:
        """What of these blocks can be read from elsewhere: what pools are claimed to hold, and which live instances
        lend.
        """

    def route(
        self,
        namespace: Namespace | NamespaceId,
        hashes: bytes,
        input_tokens: int,
        at_least: Sequence[PositionWanted] = (),
        wait_s: float = 1.0,
        timeout_s: float | None = None,
        limit: int = LIMIT,
        instances: Sequence[str] | None = None,
        latency: Literal["interactive", "standard", "batch"] = "standard",
        deadline_s: float | None = None,
        phase: Literal["both", "prefill", "decode"] = "both",
    ) -> RouteAnswer:
        """Where to send a prompt."""

    def lookup_many(
        self,
        namespace: Namespace | NamespaceId,
        prompts: Sequence[bytes],
        timeout_s: float | None = None,
        limit: int = LIMIT,
    ) -> list[LookupAnswer]:
        """`lookup` of several prompts."""

    def presence_many(
        self,
        namespace: Namespace | NamespaceId,
        runs: Sequence[bytes],
        timeout_s: float | None = None,
        limit: int = LIMIT,
    ) -> list[PresenceAnswer]:
        """`presence` of several runs of blocks."""

    def find_many(
        self,
        namespace: Namespace | NamespaceId,
        runs: Sequence[bytes],
        firsts: Sequence[int] | None = None,
        asker: str = "",
        topology: Sequence[str] = (),
        timeout_s: float | None = None,
        limit: int = MAX_PEERS,
    ) -> list[FindAnswer]:
        """`find` of several runs of blocks."""

    def route_many(
        self,
        namespace: Namespace | NamespaceId,
        prompts: Sequence[bytes],
        input_tokens: Sequence[int],
        timeout_s: float | None = None,
        limit: int = LIMIT,
    ) -> list[RouteAnswer]:
        """`route` of several prompts, one after the other."""

    def lookup_tokens(
        self,
        namespace: Namespace,
        secret: bytes,
        tokens: Sequence[int] | np.ndarray,
        timeout_s: float | None = None,
        **more: Unpack[LookupMore],
    ) -> LookupAnswer:
        """`lookup` of a prompt's tokens."""

    def route_tokens(
        self,
        namespace: Namespace,
        secret: bytes,
        tokens: Sequence[int] | np.ndarray,
        timeout_s: float | None = None,
        **more: Unpack[RouteMore],
    ) -> RouteAnswer:
        """`route` of a prompt's tokens."""

    def lookup_prompt(
        self, prompt: PromptTokens, timeout_s: float | None = None, **more: Unpack[LookupMore]
    ) -> LookupAnswer:
        """`lookup` of a prompt's tokens, hashed by the catalog."""

    def route_prompt(
        self, prompt: PromptTokens, timeout_s: float | None = None, **more: Unpack[RouteMore]
    ) -> RouteAnswer:
        """`route` of a prompt's tokens, hashed by the catalog."""

    def block(self, namespace: Namespace | NamespaceId, block: bytes) -> BlockAnswer:
        """Who holds one block."""

    def instances(self) -> list[InstanceSummary]:
        """All instances, by name."""

    def instance(self, instance: InstanceId | str) -> InstanceSummary | None:
        """One instance; None when it is not known."""

    def namespaces(self) -> list[NamespaceSummary]:
        """All namespaces whose fields are known, by id."""

    def ready(self) -> ReadyAnswer:
        """Whether answers are complete, and what does not work."""

    def wait_ready(self, timeout_s: float = 30.0) -> None:
        """Wait until answers are complete."""

    def close(self) -> None:
        """Give back what it holds. Idempotent."""
