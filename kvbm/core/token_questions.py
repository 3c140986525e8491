"""Questions about a prompt's tokens: they are hashed on the side of who asks, which knows the root, and then asked by
their hashes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal, Self, TypedDict, Unpack

import numpy as np

from kvbm.core.answers import LookupAnswer, PositionWanted, RouteAnswer
from kvbm.core.backend import SequenceHashes
from kvbm.core.checks import kind_of
from kvbm.core.errors import ArgumentTypeError, CatalogRefusedError
from kvbm.core.hashing import check_hashable
from kvbm.core.ids import Namespace
from kvbm.core.prompt_tokens import PromptTokens


class LookupMore(TypedDict, total=False):
    """What may be said with a lookup."""

    at_least: Sequence[PositionWanted]
    wait_s: float
    limit: int
    instances: Sequence[str] | None


class RouteMore(LookupMore, total=False):
    """What may be said with a route."""

    latency: Literal["interactive", "standard", "batch"]
    deadline_s: float | None
    phase: Literal["both", "prefill", "decode"]


class TokenQuestions(ABC):
    """What a client of the catalog and a replica have in common. `with` closes them.

    Args:
        hash_tokens: `sequence_hashes` or its native implementation.
    """

    def __init__(self, hash_tokens: SequenceHashes) -> None:
        self._hash_tokens = hash_tokens

    @abstractmethod
    def lookup(
        self, namespace: Namespace, hashes: bytes, *, timeout_s: float | None = None, **more: Unpack[LookupMore]
    ) -> LookupAnswer:
        """Who has how much of a prefix."""

    @abstractmethod
    def route(
        self,
        namespace: Namespace,
        hashes: bytes,
        input_tokens: int,
        *,
        timeout_s: float | None = None,
        **more: Unpack[RouteMore],
    ) -> RouteAnswer:
        """Where to send a prompt."""

    def hashes(self, namespace: Namespace, secret: bytes, tokens: Sequence[int] | np.ndarray) -> bytes:
        """Packed hashes of a prompt's full blocks, made here: the root stays on this side.

        Raises: HashSchemeError: the namespace's blocks are hashed in another way, as vLLM's are. ArgumentError,
            LayoutError: an argument that cannot be used, as `Manager.hash_tokens`.
        """
        if not isinstance(namespace, Namespace):
            raise ArgumentTypeError(
                "namespace", f"is {kind_of(namespace)}; give the Namespace, whose root its id does not tell"
            )
        if tokens is None:
            raise ArgumentTypeError("tokens", "is None; give a sequence of token ids")
        check_hashable(namespace)
        return self._hash_tokens(tokens, namespace.block_tokens, namespace.root(secret))

    # -- the end ------------------------------------------------------------------------------------------------------

    @abstractmethod
    def close(self) -> None:
        """Give back what it holds. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # -- a prompt's tokens --------------------------------------------------------------------------------------------

    def lookup_tokens(
        self,
        namespace: Namespace,
        secret: bytes,
        tokens: Sequence[int] | np.ndarray,
        timeout_s: float | None = None,
        **more: Unpack[LookupMore],
    ) -> LookupAnswer:
        """`lookup` of a prompt's tokens, hashed here; `more` as it takes them. Raises HashSchemeError: as `hashes`."""
        return self.lookup(namespace, self.hashes(namespace, secret, tokens), timeout_s=timeout_s, **more)

    def route_tokens(
        self,
        namespace: Namespace,
        secret: bytes,
        tokens: Sequence[int] | np.ndarray,
        timeout_s: float | None = None,
        **more: Any,
    ) -> RouteAnswer:
        """`route` of a prompt's tokens, hashed here;

        `more` is all that it takes else. Raises HashSchemeError: as `hashes`.
        """
        return self.route(namespace, self.hashes(namespace, secret, tokens), len(tokens), timeout_s=timeout_s, **more)

    def lookup_prompt(
        self, prompt: PromptTokens, timeout_s: float | None = None, **more: Unpack[LookupMore]
    ) -> LookupAnswer:
        """`lookup` of a prompt's tokens, hashed by the catalog: also where an engine has hashes of its own, as long as
        it states how it makes them; `more` as it takes them.

        Of a model with several KV groups, or with windows, depths are what all of them hold together.
        Raises CatalogRefusedError: which namespace is meant, or how it hashes, is not known there; it says which are.
        """
        raise _of_parts()

    def route_prompt(
        self, prompt: PromptTokens, timeout_s: float | None = None, **more: Unpack[RouteMore]
    ) -> RouteAnswer:
        """`route` of a prompt's tokens, as `lookup_prompt` of them."""
        raise _of_parts()


def _of_parts() -> CatalogRefusedError:
    return CatalogRefusedError(
        "catalogs of parts do not join answers about tokens; ask each of them by itself, or hash the tokens here",
        422,
        "parts_take_hashes",
    )
