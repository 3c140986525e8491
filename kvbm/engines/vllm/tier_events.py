"""Which blocks, by vLLM's hashes, lie in HOST and NVME: for those who listen to vLLM's KV events. Pure.

vLLM's hashes of a block are known while a request stores or loads it, and ours cannot be turned back into them. So
blocks that an earlier run has left are told of once they were used. Whether a block is still held is looked at in turn,
a thousand at each step: that it is gone is told late.

Blocks of several tenants, or of an adapter before and after it was loaded anew, are different ones of ours under one
hash of vLLM's: the first of them that a tier gains is told, and the last that it loses.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

from kvbm.core.ids import Tier, split_hashes
from kvbm.engines.vllm.reach import ABSENT
from kvbm.engines.vllm.requests import KvGroup

_TOLD = frozenset({Tier.HOST, Tier.NVME})  # an object is nobody's own
_A_STEP = 1024  # blocks that are looked at again

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
        digests = [bytes(one) for one in group.digests(request.block_hashes, begin, end)]
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


class _Known(NamedTuple):
    run: GroupRun
    at: int
    tier: int

    @property
    def place(self) -> tuple[int, int, bytes]:
        return self.tier, self.run.group.id, self.run.digests[self.at]


class TierEvents:
    """See the module. Used by the scheduler's thread alone.

    Args:
        holders: for each of these hashes of ours the hottest own tier colder than HBM that holds it, or ABSENT.
        extra_keys: of blocks of a request, as `GroupRun` has them.
    """

    def __init__(self, holders: Callable[[bytes], bytes], extra_keys: ExtraKeys | None = None) -> None:
        self._holders, self._extra_keys = holders, extra_keys
        self._known: dict[bytes, _Known] = {}
        self._copies: Counter[tuple[int, int, bytes]] = (
            Counter()
        )  # tier, group, vLLM's hash → blocks of ours that lie there
        self._fresh: dict[bytes, None] = {}
        self._turn: Iterator[bytes] = iter(())

    def run_of(self, request: Any, group: KvGroup, begin: int, end: int) -> GroupRun:
        """What is told of a request's blocks, should they lie in a tier."""
        return GroupRun.of(request, group, begin, end, self._extra_keys)

    def learn(self, hashes: bytes, run: GroupRun) -> None:
        """These blocks are stored or loaded: they may lie in a tier.

        Args:
            hashes: ours, packed, of the blocks of the run; of fewer where the others do not matter.
        """
        blocks = split_hashes(hashes)[: len(run.digests)]
        self._fresh.update(dict.fromkeys(blocks))
        unknown = [at for at, ours in enumerate(blocks) if ours not in self._known]
        if unknown:  # a long prompt that others have loaded is not kept once more for its last block
            begin = unknown[0]
            part = run.part(begin, unknown[-1] + 1)
            self._known.update((blocks[at], _Known(part, at - begin, ABSENT)) for at in unknown)

    def take(self) -> list[ToldBlocks]:
        """What has changed, as far as it was seen; where blocks are before where they no longer are."""
        looked_at = [*self._fresh, *islice(self._turn, _A_STEP)]
        if len(looked_at) - len(self._fresh) < _A_STEP:
            self._turn = iter([*self._known])
        self._fresh = {}
        held: list[ToldBlocks] = []
        left: list[_Known] = []
        for ours, holder in zip(looked_at, self._holders(b"".join(looked_at)) if looked_at else b"", strict=True):
            tier = holder if holder in _TOLD else ABSENT
            known = self._known.get(ours)
            if known is None or (known.tier == tier and tier != ABSENT):
                continue
            if tier == ABSENT:
                del self._known[ours]
            else:
                self._known[ours] = moved = known._replace(tier=tier)
                self._copies[moved.place] += 1
                if self._copies[moved.place] == 1:
                    _add(held, moved, is_held=True)
            if known.tier != ABSENT:
                left.append(known)
        gone: list[ToldBlocks] = []
        for known in left:  # once all that has come is counted
            self._copies[known.place] -= 1
            if not self._copies[known.place]:
                del self._copies[known.place]
                _add(gone, known, is_held=False)
        return held + gone


def _add(told: list[ToldBlocks], known: _Known, is_held: bool) -> None:
    """One more block, with those before it where it goes on with them."""
    run, at, tier = known
    last = told[-1] if told else None
    if last is not None and last.run is run and last.end == at and (last.tier, last.is_held) == (tier, is_held):
        told[-1] = last._replace(end=at + 1)
    else:
        told.append(ToldBlocks(run, at, at + 1, Tier(tier), is_held))
