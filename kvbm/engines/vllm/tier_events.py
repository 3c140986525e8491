"""Which blocks, by vLLM's hashes, lie in HOST, NVME and OBJECT: for those who listen to vLLM's KV events. Pure.

vLLM's hashes of a block are known while a request stores or loads it, and ours cannot be turned back into them. So
blocks that an earlier run has left are told of once they were used. Whether a block is still held is looked at in turn,
a thousand at each step: that it is gone is told late.

Blocks of several tenants, or of an adapter before and after it was loaded anew, are different ones of ours under one
hash of vLLM's: the first of them that a tier gains is told, and the last that it loses.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from kvbm.assembly import packed_tokens
from kvbm.core.ids import Tier
from kvbm.engines.vllm.reach import ABSENT
from kvbm.engines.vllm.requests import KvGroup
from kvbm.engines.vllm.told_tiers import NewToldTiers

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
    tokens: array[int]
    lora: tuple[int, str] | None = None
    extra_keys: Sequence[Any] | None = None

    @classmethod
    def of(cls, request: Any, group: KvGroup, begin: int, end: int, extra_keys: ExtraKeys | None = None) -> GroupRun:
        """A request's blocks from `begin` to before `end`."""
        digests = [*group.digests(request.block_hashes, begin, end)]
        before = group.digests(request.block_hashes, begin - 1, begin) if begin else ()
        ids = request.all_token_ids[begin * group.block_tokens : end * group.block_tokens]
        tokens = array("I", packed_tokens(ids))
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


class TierEvents:
    """See the module. Used by the scheduler's thread alone.

    Args:
        holders: for each of these hashes of ours the hottest tier colder than HBM that holds it, or ABSENT.
        new_blocks: makes the table of blocks.
        extra_keys: of blocks of a request, as `GroupRun` has them.
        objects_as: the tier that a block in objects is told of as: OBJECT, or NVME where listeners know no owners.
    """

    def __init__(
        self,
        holders: Callable[[bytes], bytes],
        new_blocks: NewToldTiers,
        extra_keys: ExtraKeys | None = None,
        objects_as: Tier = Tier.OBJECT,
    ) -> None:
        self._holders, self._extra_keys = holders, extra_keys
        told = {int(Tier.HOST): Tier.HOST, int(Tier.NVME): Tier.NVME, int(Tier.OBJECT): objects_as}
        self._told_as = bytes(told.get(tier, ABSENT) for tier in range(256))
        self._blocks = new_blocks(_A_STEP)
        self._runs: dict[int, GroupRun] = {}

    def run_of(self, request: Any, group: KvGroup, begin: int, end: int) -> GroupRun:
        """What is told of a request's blocks, should they lie in a tier."""
        return GroupRun.of(request, group, begin, end, self._extra_keys)

    def learn(self, hashes: bytes, run: GroupRun) -> None:
        """These blocks are stored or loaded: they may lie in a tier.

        Args:
            hashes: ours, packed, of the blocks of the run; of fewer where the others do not matter.
        """
        learned = self._blocks.learn(hashes, run.digests, run.group.id)
        if learned is not None:  # of a long prompt only what was not known is kept, not all of it for its last block
            number, begin, end = learned
            self._runs[number] = run.part(begin, end)

    def tell_anew(self) -> None:
        """Tell of every block again in the next steps: vLLM's cache was cleared, and listeners take that for a loss of
        all tiers.
        """
        self._blocks.tell_anew()

    def take(self) -> list[ToldBlocks]:
        """What has changed, as far as it was seen; where blocks are before where they no longer are."""
        due = self._blocks.due()
        if not due:
            return []
        told, ended = self._blocks.changed(self._holders(due).translate(self._told_as))
        runs = self._runs
        found = [
            ToldBlocks(runs[number], begin, end, Tier(tier), is_held) for number, begin, end, tier, is_held in told
        ]
        for number in ended:
            del runs[number]
        return found
