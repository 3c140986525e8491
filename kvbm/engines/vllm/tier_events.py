"""Which blocks, by vLLM's hashes, lie in HOST, NVME and OBJECT: for those who listen to vLLM's KV events. Pure.

vLLM's hashes of a block are known while a request stores or loads it, and ours cannot be turned back into them. So
blocks that an earlier run has left are told of once they were used. Whether a block is still held is looked at in turn,
a thousand at each step: that it is gone is told late.

Blocks of several tenants, or of an adapter before and after it was loaded anew, are different ones of ours under one
hash of vLLM's: the first of them that a tier gains is told, and the last that it loses.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

from kvbm.core.ids import Tier, split_hashes
from kvbm.engines.vllm.reach import ABSENT
from kvbm.engines.vllm.requests import KvGroup

_A_STEP = 1024  # blocks that are looked at again
_TIER, _AT, _AT_BITS = 0xFF, 8, 24  # of a place: the tier in the lowest bits, then the position in a run, then the run
_MOST_AT = 1 << _AT_BITS

ExtraKeys = Callable[
    [Any, int, int, int], Sequence[Any] | None
]  # request, first block, end, tokens of a block → for each block its keys


class GroupRun(NamedTuple):
    """Blocks of one group of a request, in the order of its chain.

    Attributes:
        digests: vLLM's hashes.
        parent: vLLM's hash of the block before them, b"" for none.
        tokens: of all of them.
        lora: number and name of the request's adapter.
        extra_keys: for each block what vLLM's hash has of the request besides tokens, as a salt or an image; None where
            it has nothing.
    """

    group: KvGroup
    digests: Sequence[bytes]
    parent: bytes
    tokens: Sequence[int]
    lora: tuple[int, str] | None = None
    extra_keys: Sequence[Any] | None = None

    @classmethod
    def of(cls, request: Any, group: KvGroup, begin: int, end: int, extra_keys: ExtraKeys | None = None) -> GroupRun:
        """A request's blocks from `begin` to before `end`."""
        digests = [*group.digests(request.block_hashes, begin, end)]
        before = group.digests(request.block_hashes, begin - 1, begin) if begin else ()
        tokens = array("i", request.all_token_ids[begin * group.block_tokens : end * group.block_tokens])
        adapter = getattr(request, "lora_request", None)
        lora = None if adapter is None else (adapter.lora_int_id, adapter.lora_name)
        keys = None if extra_keys is None else extra_keys(request, begin, end, group.block_tokens)
        return cls(group, digests, bytes(before[0]) if before else b"", tokens, lora, keys)

    def part(self, begin: int, end: int) -> GroupRun:
        """Some of its blocks, by themselves."""
        if (begin, end) == (0, len(self.digests)):
            return self
        size = self.group.block_tokens
        return self._replace(
            digests=self.digests[begin:end],
            parent=self.digests[begin - 1] if begin else self.parent,
            tokens=self.tokens[begin * size : end * size],
            extra_keys=None if self.extra_keys is None else self.extra_keys[begin:end],
        )


class ToldBlocks(NamedTuple):
    """Blocks of a run, from `begin` to before `end`, that lie in a tier now, or do so no more.

    Attributes:
        tier: the hottest that holds them; what lies in colder ones besides is not told.
    """

    run: GroupRun
    begin: int
    end: int
    tier: Tier
    is_held: bool


class _Gathered:
    """Blocks that are told of, those that go on with each other together."""

    def __init__(self, is_held: bool) -> None:
        self._told: list[ToldBlocks] = []
        self._run: GroupRun | None = None
        self._begin = self._end = self._tier = 0
        self._is_held = is_held

    def add(self, run: GroupRun, at: int, tier: int) -> None:
        """One more."""
        if run is self._run and at == self._end and tier == self._tier:
            self._end += 1
            return
        self._flush()
        self._run, self._begin, self._end, self._tier = run, at, at + 1, tier

    def take(self) -> list[ToldBlocks]:
        """All of them."""
        self._flush()
        return self._told

    def _flush(self) -> None:
        if self._run is not None:
            self._told.append(ToldBlocks(self._run, self._begin, self._end, Tier(self._tier), self._is_held))


class TierEvents:
    """See the module. Used by the scheduler's thread alone.

    Args:
        holders: for each of these hashes of ours the hottest tier colder than HBM that holds it, or ABSENT.
        extra_keys: of blocks of a request, as `GroupRun` has them.
        objects_as: the tier that a block in objects is told of as: OBJECT, or NVME where listeners know no owners.
    """

    def __init__(
        self,
        holders: Callable[[bytes], bytes],
        extra_keys: ExtraKeys | None = None,
        objects_as: Tier = Tier.OBJECT,
    ) -> None:
        self._holders, self._extra_keys = holders, extra_keys
        told = {Tier.HOST: Tier.HOST, Tier.NVME: Tier.NVME, Tier.OBJECT: objects_as}
        self._told_as = bytes(told.get(tier, ABSENT) for tier in range(256))  # type: ignore[call-overload]
        self._known: dict[bytes, int] = {}  # our hash → its place
        self._runs: dict[int, GroupRun] = {}
        self._left: dict[int, int] = {}  # run → blocks known of it
        self._next_run = 0
        self._copies: dict[bytes, int] = {}  # vLLM's hash, tier and group → blocks of ours that lie there
        self._fresh: dict[bytes, None] = {}
        self._turn: Iterator[bytes] = iter(())
        self._tells_anew = False  # whether what this turn comes to is told though it has not changed

    def run_of(self, request: Any, group: KvGroup, begin: int, end: int) -> GroupRun:
        """What is told of a request's blocks, should they lie in a tier."""
        return GroupRun.of(request, group, begin, end, self._extra_keys)

    def learn(self, hashes: bytes, run: GroupRun) -> None:
        """These blocks are stored or loaded: they may lie in a tier.

        Args:
            hashes: ours, packed, of the blocks of the run; of fewer where the others do not matter.
        """
        blocks = split_hashes(hashes)[: min(len(run.digests), _MOST_AT)]
        distinct: dict[bytes, None] = dict.fromkeys(blocks)
        self._fresh.update(distinct)
        known = self._known
        unknown = [at for at, ours in enumerate(blocks) if ours not in known]
        if not unknown:
            return
        begin, number = unknown[0], self._next_run  # a long prompt that is known is not kept again for its last block
        self._next_run += 1
        place = number << (_AT + _AT_BITS) | ABSENT
        if len(unknown) == len(blocks):
            known.update(zip(blocks, range(place, place + (len(blocks) << _AT), 1 << _AT), strict=True))
            self._left[number] = len(distinct)
        else:
            known.update((blocks[at], place | (at - begin) << _AT) for at in unknown)
            self._left[number] = len({blocks[at] for at in unknown})
        self._runs[number] = run.part(begin, unknown[-1] + 1)

    def tell_anew(self) -> None:
        """Tell of every block again in the next steps: vLLM's cache was cleared, and listeners take that for a loss of
        all tiers.
        """
        self._turn, self._tells_anew = iter([*self._known]), True

    def take(self) -> list[ToldBlocks]:
        """What has changed, as far as it was seen; where blocks are before where they no longer are."""
        fresh, tells_anew = len(self._fresh), self._tells_anew
        looked_at = [*self._fresh, *islice(self._turn, _A_STEP)]
        if len(looked_at) - fresh < _A_STEP:
            self._turn, self._tells_anew = iter([*self._known]), False
        self._fresh = {}
        if not looked_at:
            return []
        held, left, gained = _Gathered(is_held=True), [], []
        known = self._known
        tiers = self._holders(b"".join(looked_at)).translate(self._told_as)
        for at, (ours, tier) in enumerate(zip(looked_at, tiers, strict=True)):
            place = known.get(ours)
            if place is None:
                continue
            if place & _TIER == tier and tier != ABSENT:
                if tells_anew and at >= fresh:
                    held.add(self._runs[place >> (_AT + _AT_BITS)], place >> _AT & _MOST_AT - 1, tier)
                continue
            if tier == ABSENT:
                del known[ours]
            else:
                now = known[ours] = place ^ (place & _TIER) | tier
                gained.append(now)
            if place & _TIER != ABSENT or tier == ABSENT:
                left.append((place, tier))
        self._gain(gained, held)
        return held.take() + self._lose(left)

    def _gain(self, places: Sequence[int], held: _Gathered) -> None:
        """Count blocks that a tier has now: most go on with each other, and cost the scheduler little."""
        copies, number, tier, run, kind = self._copies, -1, -1, None, b""
        for place in places:
            if place >> (_AT + _AT_BITS) != number or place & _TIER != tier:
                number, tier = place >> (_AT + _AT_BITS), place & _TIER
                run = self._runs[number]
                kind = bytes((tier, run.group.id))
            assert run is not None
            at = place >> _AT & _MOST_AT - 1
            key = run.digests[at] + kind
            count = copies[key] = copies.get(key, 0) + 1
            if count == 1:
                held.add(run, at, tier)

    def _lose(self, left: list[tuple[int, int]]) -> list[ToldBlocks]:
        """Blocks that are where they were no more, once all that has come is counted.

        Args:
            left: each one's place, and its tier now.
        """
        gone = _Gathered(is_held=False)
        for place, now in left:
            number, at, tier = place >> (_AT + _AT_BITS), place >> _AT & _MOST_AT - 1, place & _TIER
            run = self._runs[number]
            if tier != ABSENT:
                key = _copy_key(run, at, tier)
                self._copies[key] -= 1
                if not self._copies[key]:
                    del self._copies[key]
                    gone.add(run, at, tier)
            if now == ABSENT:
                self._left[number] -= 1
                if not self._left[number]:
                    del self._left[number], self._runs[number]
        return gone.take()


def _copy_key(run: GroupRun, at: int, tier: int) -> bytes:
    return run.digests[at] + bytes((tier, run.group.id))
