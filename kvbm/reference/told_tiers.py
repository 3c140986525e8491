"""Which of an engine's blocks lie in which tier, as listeners were last told: `ToldTiers` of
`kvbm/engines/vllm/told_tiers.py` in readable form, which says what each call means.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from kvbm.core.errors import LayoutError
from kvbm.core.ids import Tier, split_hashes
from kvbm.core.results import NOT_HELD

_MOST_DIGEST_BYTES, _MOST_RUN_BLOCKS = 32, 1 << 24
_TOLD = {Tier.HOST, Tier.NVME, Tier.OBJECT}
_START = (-1, -1)  # before all blocks, in their order

Told = tuple[int, int, int, int, bool]


@dataclass
class _Block:
    """A block: the `at`-th of a run's part, by its digest, and the tier it was in when it was last looked at."""

    run: int
    at: int
    digest: tuple[bytes, int]  # the engine's hash, and the KV group
    tier: int = NOT_HELD

    @property
    def place(self) -> tuple[int, int]:
        """Grows from block to block in the order in which they were learned."""
        return self.run, self.at


class _Gathered:
    """Blocks that are told of, those that go on with each other together."""

    def __init__(self, is_held: bool) -> None:
        self.told: list[Told] = []
        self._is_held = is_held

    def add(self, block: _Block, tier: int) -> None:
        """One more."""
        if self.told:
            run, begin, end, last, is_held = self.told[-1]
            if (run, end, last) == (block.run, block.at, tier):
                self.told[-1] = run, begin, end + 1, last, is_held
                return
        self.told.append((block.run, block.at, block.at + 1, tier, self._is_held))


class ReadableToldTiers:
    """See the module."""

    def __init__(self, step: int) -> None:
        self._step = step
        self._known: dict[bytes, _Block] = {}  # our hash → block, in the order in which they were learned
        self._copies: Counter[tuple[tuple[bytes, int], int]] = Counter()  # digest, tier → blocks of ours that lie there
        self._left: Counter[int] = Counter()  # run → blocks known of it
        self._next_run = 0
        self._fresh: dict[bytes, None] = {}
        self._cursor, self._turn_end = _START, 0  # the turn goes on behind this place, up to before that run
        self._tells_anew = self._due_anew = False
        self._due: list[bytes] = []
        self._due_fresh = 0

    @property
    def blocks(self) -> int:
        """How many are known."""
        return len(self._known)

    @property
    def digests(self) -> int:
        """How many hashes of the engine these have."""
        return len({block.digest for block in self._known.values()})

    def learn(self, hashes: bytes, digests: list[bytes], group: int) -> tuple[int, int, int] | None:
        """See the protocol."""
        found = [*zip(split_hashes(hashes), digests, strict=False)][:_MOST_RUN_BLOCKS]
        if any(len(digest) > _MOST_DIGEST_BYTES for _, digest in found):
            raise LayoutError(f"a digest has more than {_MOST_DIGEST_BYTES} bytes")
        self._fresh |= dict.fromkeys(ours for ours, _ in found)
        unknown = {ours: at for at, (ours, _) in reversed([*enumerate(found)]) if ours not in self._known}
        if not unknown:
            return None
        run, begin, end = self._next_run, min(unknown.values()), max(unknown.values()) + 1
        self._next_run += 1
        for ours, at in sorted(unknown.items(), key=lambda one: one[1]):
            self._known[ours] = _Block(run, at - begin, (found[at][1], group))
        self._left[run] = len(unknown)
        return run, begin, end

    def tell_anew(self) -> None:
        """See the protocol."""
        self._cursor, self._turn_end, self._tells_anew = _START, self._next_run, True

    def due(self) -> bytes:
        """See the protocol."""
        fresh = [ours for ours in self._fresh if ours in self._known]
        self._fresh = {}
        rest = ((ours, block) for ours, block in self._known.items() if block.place > self._cursor)
        turn = [(ours, block) for ours, block in rest if block.run < self._turn_end][: self._step]
        self._due, self._due_fresh = [*fresh, *(ours for ours, _ in turn)], len(fresh)
        self._due_anew = self._tells_anew
        if turn:
            self._cursor = turn[-1][1].place
        if len(turn) < self._step:
            self._cursor, self._turn_end, self._tells_anew = _START, self._next_run, False
        return b"".join(self._due)

    def changed(self, tiers: bytes) -> tuple[list[Told], list[int]]:
        """See the protocol."""
        if len(tiers) != len(self._due) or any(tier != NOT_HELD and tier not in _TOLD for tier in tiers):
            raise LayoutError(f"{tiers!r} are no tiers, colder than HBM, of {len(self._due)} blocks")
        held = _Gathered(is_held=True)
        gained: list[tuple[_Block, int]] = []
        left: list[tuple[_Block, int, int]] = []
        for at, (ours, now) in enumerate(zip(self._due, tiers, strict=True)):
            block = self._known.get(ours)
            if block is None:  # it was looked at twice in this step
                continue
            before, block.tier = block.tier, now
            if before == now != NOT_HELD:
                if self._due_anew and at >= self._due_fresh:
                    held.add(block, now)
                continue
            if now == NOT_HELD:
                del self._known[ours]
                self._fresh.pop(ours, None)
            else:
                gained.append((block, now))
            if before != NOT_HELD or now == NOT_HELD:
                left.append((block, before, now))
        self._due = []
        for block, tier in gained:
            self._copies[block.digest, tier] += 1
            if self._copies[block.digest, tier] == 1:
                held.add(block, tier)
        told, ended = self._lose(left)
        return held.told + told, ended

    def _lose(self, left: list[tuple[_Block, int, int]]) -> tuple[list[Told], list[int]]:
        """Blocks that are where they were no more, once all that has come is counted: what is told, and which runs have
        ended. Each with the tier that it was in, and its tier now.
        """
        gone, ended = _Gathered(is_held=False), []
        for block, before, now in left:
            if before != NOT_HELD:
                self._copies[block.digest, before] -= 1
                if not self._copies[block.digest, before]:
                    del self._copies[block.digest, before]
                    gone.add(block, before)
            if now == NOT_HELD:
                self._left[block.run] -= 1
                if not self._left[block.run]:
                    del self._left[block.run]
                    ended.append(block.run)
        return gone.told, ended
