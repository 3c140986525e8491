"""How objects are named, and how header and blocks become the bytes of one: as they are here, encrypted in
encryption.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from kvbm.core.ids import Namespace, NamespaceId
from kvbm.pools.stores.base import Body, Refusal, StoreTrouble


class ObjectEnvelope(Protocol):
    """Names, wraps and opens the objects of some namespaces.

    Attributes:
        lead_bytes: of a wrapped object, those that come before its blocks: enough to open the header.
        extra_bytes: by which a wrapped object is larger than header and blocks.
        is_plain: whether it is header and blocks as they are.
    """

    lead_bytes: int
    extra_bytes: int
    is_plain: bool

    def names(self, namespace: NamespaceId, hashes: Sequence[bytes]) -> list[str]:
        """What objects are named whose last blocks have these hashes."""

    def wrap(self, name: str, header: np.ndarray, blocks: np.ndarray) -> Body | tuple[Body, ...]:
        """An object as it is put; it may be a view of its header and its encoded blocks, which nobody changes."""

    def open_header(self, name: str, body: Body) -> bytes | Refusal:
        """The header of an object, of which `body` is all or the first `lead_bytes`; b"" when it is none.

        A refusal: it cannot be told.
        """

    def open_blocks(self, name: str, body: Body) -> np.ndarray | None:
        """The encoded blocks of an object whose header has been opened; None when they are none."""


class Envelopes(Protocol):
    """Which envelope is whose."""

    def of(self, namespace: NamespaceId, known: Namespace | None) -> ObjectEnvelope | Refusal:
        """That of a namespace; `known` is what it stands for, if somebody has said. A refusal: it has none."""

    def of_name(self, name: str) -> ObjectEnvelope | None:
        """That of an object; None when the name is none of ours."""

    def refresh(self) -> None:
        """Look whether something has changed; may block for seconds."""


class PlainEnvelope:
    """Objects as they are, each under the namespace and hash in hex; one for all namespaces."""

    extra_bytes = 0
    is_plain = True

    def __init__(self, blocks: int, header_bytes: int) -> None:
        self.lead_bytes = header_bytes
        self._folder = f"{blocks}/"

    def of(self, namespace: NamespaceId, known: Namespace | None) -> ObjectEnvelope | Refusal:
        """As `Envelopes.of`."""
        return self

    def of_name(self, name: str) -> ObjectEnvelope | None:
        """As `Envelopes.of_name`."""
        return self if name.startswith(self._folder) else None

    def refresh(self) -> None:
        """Nothing changes."""

    def names(self, namespace: NamespaceId, hashes: Sequence[bytes]) -> list[str]:
        """As `ObjectEnvelope.names`."""
        folder = f"{self._folder}{namespace.hex()}/"
        return [folder + block_hash.hex() for block_hash in hashes]

    def wrap(self, name: str, header: np.ndarray, blocks: np.ndarray) -> Body | tuple[Body, ...]:
        """As `ObjectEnvelope.wrap`; not a copy."""
        return header.data, blocks.data

    def open_header(self, name: str, body: Body) -> bytes | Refusal:
        """As `ObjectEnvelope.open_header`."""
        return bytes(memoryview(body)[: self.lead_bytes])

    def open_blocks(self, name: str, body: Body) -> np.ndarray | None:
        """As `ObjectEnvelope.open_blocks`; not a copy."""
        return np.frombuffer(body, dtype=np.uint8)[self.lead_bytes :]


def newer_object(name: str, version: int, newest: int) -> Refusal:
    """The word for an object that a newer kvbm has put."""
    return Refusal(
        StoreTrouble.DENIED,
        f"{name} was put by a newer kvbm, as version {version}; this one reads up to version {newest}: upgrade it",
    )
