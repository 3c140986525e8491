"""Which blocks instances will soon hold, because prompts were routed to them lately: a table of fixed size, whatever is
routed.

Equal hashes mean equal prefixes, so whoever gets one block of a chain gets all before it: of a long prompt some blocks
stand for all. The first 256 are noted each; beyond those the depth that is found is less than 1 % too small, and that
of the same prompt is exact.
"""

from __future__ import annotations

import hashlib
import secrets
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvbm.catalog.routing.marks import Depths, marked_depths
from kvbm.core.ids import HASH_BYTES, NamespaceId
from kvbm.core.ties import MIX_FACTOR, MOST_WORD, mixed_word

WAYS = 4
SETS = 1 << 17  # 18 bytes an entry: 9.4 MB when all of it is in use
_LONG_S = 1e9
_MANY = 24  # instances: from there on one look at all of them is quicker than one at each
_MOST_SALTS = 1 << 16
_Words = npt.NDArray[np.uint64]


class Chain(NamedTuple):
    """A prompt's blocks as the table knows them.

    Attributes:
        depths: where it is noted, ascending; the last is all of it.
        words: a number for each, of its hash and namespace.
    """

    depths: Depths
    words: _Words


class RoutedBlocks:
    """Remembers for `hold_s` what was routed where, for each caller apart. One thread.

    When the table is full the oldest entries go first: a caller's own, and others' only while it has used less than an
    even share of the table. So nobody pushes out what others have routed.
    """

    def __init__(self, hold_s: float, sets: int = SETS) -> None:
        """
        Args:
            sets: a power of two; each has four entries.
        """
        self._hold_s = hold_s
        self._sets, self._mask = sets, np.uint64(sets - 1)
        self._tags = np.zeros((sets, WAYS), np.uint64)
        self._until_s = np.zeros((sets, WAYS), np.float64)
        self._flat_tags, self._flat_until_s = self._tags.ravel().data, self._until_s.ravel().data
        self._owners = np.zeros((sets, WAYS), np.uint16)
        self._last_s = -np.inf  # nothing is held any more from then on
        self._window_s = -np.inf
        self._used: dict[int, int] = {}  # owner → entries noted in this window
        self._used_before: dict[int, int] = {}
        self._odd = [np.uint64(secrets.randbits(64) | 1) for _ in range(3)]  # so that nobody can aim at others' entries
        self._key = secrets.token_bytes(16)
        self._salts: dict[str, int] = {}

    def chain(self, namespace: NamespaceId, hashes: bytes) -> Chain:
        """What stands for a prompt's blocks."""
        blocks = len(hashes) // HASH_BYTES
        depths = marked_depths(0, blocks)
        return self._chain(namespace, depths, np.frombuffer(hashes, np.uint64, 2 * blocks).reshape(-1, 2)[depths - 1])

    def marked(self, namespace: NamespaceId, first: int, blocks: int, hashes: bytes) -> Chain | None:
        """The same of the blocks at `marked_depths` alone; None where there are not as many hashes."""
        depths = marked_depths(first, blocks)
        if len(hashes) != len(depths) * HASH_BYTES:
            return None
        return self._chain(namespace, depths, np.frombuffer(hashes, np.uint64).reshape(-1, 2))

    def _chain(self, namespace: NamespaceId, depths: Depths, halves: _Words) -> Chain:
        space = int.from_bytes(namespace[:8], "little") ^ int.from_bytes(namespace[8:16], "little")
        own = np.uint64(space * int(self._odd[2]) & MOST_WORD)
        words: _Words = halves[:, 0] * self._odd[0] + halves[:, 1] * self._odd[1] + own
        return Chain(depths, words)

    def depths(
        self, now_s: float, caller: str, instances: Sequence[str], chain: Chain, held: Sequence[int]
    ) -> Sequence[int]:
        """How far each instance will soon have the chain.

        Args:
            held: how far each has it now; never less is answered.
        """
        if now_s >= self._last_s or not len(chain.depths):
            return held
        of_caller = self._salt("caller " + caller)
        salts = [(of_caller + self._salt(name)) & MOST_WORD for name in instances]
        asked: Iterable[int] = range(len(salts))
        if len(salts) >= _MANY:  # most have nothing of it: one look at all of them
            at = np.searchsorted(chain.depths, np.array(held, np.int64), side="right")
            words = chain.words[np.minimum(at, len(chain.depths) - 1)] + np.array(salts, np.uint64)
            asked = np.flatnonzero(self._holds(now_s, _mixed(words))).tolist()
        depths = list(held)
        marks, numbers = chain.depths.tolist(), chain.words.tolist()
        for one in asked:
            depths[one] = self._depth(now_s, marks, numbers, salts[one], depths[one])
        return depths

    def _depth(self, now_s: float, marks: list[int], numbers: list[int], salt: int, held: int) -> int:
        """How far one has the chain: looks at marks ever farther apart, then halves what is left between the
        last two.
        """
        first = at = bisect_right(marks, held)
        step = 1
        while at < len(marks) and self._holds_one(now_s, numbers[at] + salt):
            first, at, step = at + 1, at + step, 2 * step
        end = min(at, len(marks))
        while first < end:  # before `first` it is held, from `end` on it is not
            middle = (first + end) // 2
            if self._holds_one(now_s, numbers[middle] + salt):
                first = middle + 1
            else:
                end = middle
        return max(held, marks[first - 1]) if first else held

    def note(self, now_s: float, caller: str, instance: str, chain: Chain) -> None:
        """The prompt was sent to an instance."""
        if not len(chain.depths):
            return
        owner = self._salt("caller " + caller) & 0xFFFF
        is_crowding = self._count(now_s, owner, len(chain.depths))
        salt = np.uint64((self._salt("caller " + caller) + self._salt(instance)) & MOST_WORD)
        words = _mixed(chain.words + salt)
        self._last_s = max(self._last_s, now_s + self._hold_s)
        for _ in range(WAYS):  # of two that take one place in the first turn, one finds another in the next
            sets = self._sets_of(words)
            order = self._until_s[sets]
            is_same = self._tags[sets] == words[:, None]
            if is_crowding or max(len(self._used), len(self._used_before)) > 1:  # what is free, its own, then others'
                order[(order > now_s) & (self._owners[sets] != owner)] += np.inf if is_crowding else _LONG_S
            order[is_same] = -np.inf
            way = order.argmin(1)
            if is_crowding:
                fits = order[np.arange(len(way)), way] < np.inf
                sets, way, words = sets[fits], way[fits], words[fits]
            places = sets * WAYS + way
            self._tags.ravel()[places] = words
            self._until_s.ravel()[places] = now_s + self._hold_s
            self._owners.ravel()[places] = owner
            words = words[self._tags.ravel()[places] != words]
            if not len(words):
                break

    def entries(self, now_s: float) -> int:
        """How many are in the table."""
        return int((self._until_s > now_s).sum())

    def _count(self, now_s: float, owner: int, entries: int) -> bool:
        """Whether the caller has used more than its share of the table."""
        if now_s >= self._window_s + self._hold_s:
            is_next = now_s < self._window_s + 2 * self._hold_s
            self._used, self._used_before, self._window_s = {}, self._used if is_next else {}, now_s
        self._used[owner] = self._used.get(owner, 0) + entries
        share = self._sets * WAYS // max(len(self._used), len(self._used_before))
        return self._used[owner] + self._used_before.get(owner, 0) > share

    def _holds(self, now_s: float, words: _Words) -> npt.NDArray[np.bool_]:
        sets = self._sets_of(words)
        found = (self._tags[sets] == words[..., None]) & (self._until_s[sets] > now_s)
        return np.asarray(found.any(-1))

    def _holds_one(self, now_s: float, word: int) -> bool:
        word = mixed_word(word)
        at = (word & self._sets - 1) * WAYS
        tags, until_s = self._flat_tags, self._flat_until_s
        for way in (at, at + 1, at + 2, at + 3):
            if tags[way] == word:
                return until_s[way] > now_s
        return False

    def _sets_of(self, words: _Words) -> npt.NDArray[np.intp]:
        return (words & self._mask).view(np.intp)

    def _salt(self, name: str) -> int:
        salt = self._salts.get(name)
        if salt is None:
            if len(self._salts) >= _MOST_SALTS:
                self._salts.clear()
            digest = hashlib.blake2b(name.encode(errors="surrogateescape"), digest_size=8, key=self._key).digest()
            salt = self._salts[name] = int.from_bytes(digest, "little")
        return salt


def _mixed(words: Any) -> _Words:
    mixed: _Words = words ^ (words >> np.uint64(32))
    mixed = mixed * np.uint64(MIX_FACTOR)
    return mixed ^ (mixed >> np.uint64(32))
