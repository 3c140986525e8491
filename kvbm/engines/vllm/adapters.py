"""Which weights the engine computes with under an adapter's number: what its ranks say, never what lies in files.

vLLM loads an adapter when its first request is scheduled, or when it is told to; it forgets the one used longest ago,
and loads it again from files that may have changed. Each rank says what it has loaded and what it has let go of
(`loaded.py`), with the answers of the step. Until all ranks have said it, and from the moment they say something else,
blocks under that number are neither looked up nor stored.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

_MOST_KNOWN = 4096  # numbers kept at hand


class Loaded(NamedTuple):
    """What a rank has done with an adapter.

    Attributes:
        number: vLLM's `lora_int_id`.
        digest: of the weights it has now, "" where they cannot be digested; None: it has let go of them, or may load
            others.
    """

    number: int
    digest: str | None


class Adapter:
    """The weights under one number, until others are loaded under it.

    Attributes:
        digest: of all ranks' weights, "" until all have said theirs.
        is_sure: nothing else was loaded under the number. Once False it stays so: some blocks may be of the others.
        is_loaded: no rank has let go of it, so that what comes from a colder tier meets the same weights.
        parts: rank → digest of what it has.
    """

    __slots__ = ("digest", "is_loaded", "is_sure", "number", "parts")

    def __init__(self, number: int) -> None:
        self.number = number
        self.digest = ""
        self.is_sure = self.is_loaded = True
        self.parts: dict[int, str] = {}

    @property
    def is_known(self) -> bool:
        """Whether blocks may be stored under its digest."""
        return bool(self.digest) and self.is_sure


class Origin:
    """What one request's blocks were computed with.

    Attributes:
        adapter: None for the model alone.
        is_pure: no block it builds on is of other weights.
    """

    __slots__ = ("adapter", "is_pure")

    def __init__(self, adapter: Adapter | None = None, is_pure: bool = True) -> None:
        self.adapter, self.is_pure = adapter, is_pure

    @property
    def is_known(self) -> bool:
        """Whether a namespace says all that its blocks depend on."""
        return self.is_pure and (self.adapter is None or self.adapter.is_known)

    def equals(self, other: Origin | None) -> bool:
        """Whether both are of the same weights, whichever those are."""
        if other is None or not (self.is_pure and other.is_pure):
            return False
        return self.adapter is other.adapter or (self.is_known and other.is_known and self._digest == other._digest)

    @property
    def _digest(self) -> str:
        return "" if self.adapter is None else self.adapter.digest


class Adapters:
    """All adapters of one engine. Owner thread only.

    Args:
        ranks: that all have to say what they have.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._known: OrderedDict[int, Adapter] = OrderedDict()

    def of(self, number: int) -> Adapter:
        """What is loaded under a number, or will be."""
        adapter = self._known.get(number)
        if adapter is None:
            adapter = self._known[number] = Adapter(number)
            if len(self._known) > _MOST_KNOWN:
                self._known.popitem(last=False)[1].is_sure = False
        return adapter

    def told(self, said: Mapping[int, Iterable[Loaded]]) -> None:
        """Take in what ranks have done, each in its order."""
        for rank, all_loaded in said.items():
            for loaded in all_loaded:
                self._take(rank, loaded)

    def _take(self, rank: int, loaded: Loaded) -> None:
        adapter = self.of(loaded.number)
        if loaded.digest is None:
            adapter.is_loaded = False
            return
        if adapter.parts.get(rank, loaded.digest) != loaded.digest or not (adapter.is_sure and loaded.digest):
            adapter.is_sure = False
            adapter = self._known[loaded.number] = Adapter(loaded.number)
            if not loaded.digest:
                adapter.is_sure = False
        adapter.parts[rank] = loaded.digest
        adapter.is_loaded = True
        if len(adapter.parts) == self._ranks and adapter.is_sure:
            adapter.digest = _joined([adapter.parts[one] for one in sorted(adapter.parts)])


def _joined(digests: list[str]) -> str:
    """One digest for all ranks: theirs where they agree."""
    if len(set(digests)) == 1:
        return digests[0]
    return hashlib.sha256(b"kvbm.vllm.adapters.v1\0" + ",".join(digests).encode()).hexdigest()[:32]
