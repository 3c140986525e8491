"""Listening to vLLM's real BlockPool: what it holds is what was told, and each hash is told once."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from itertools import count

from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from kvbm.core.ids import HASH_BYTES, NO_PARENT, Namespace, split_hashes
from kvbm.engines.vllm.prefix_cache import HbmSink, PrefixCacheWatch
from kvbm.engines.vllm.requests import GroupNamespace, KvGroup, RequestState

BLOCK_TOKENS = 4
NAMESPACE = Namespace(model="m", block_tokens=BLOCK_TOKENS)
init_none_hash(sha256)
_hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
_numbers = count()


def derived(root: bytes, digests: Sequence[bytes]) -> bytes:
    return b"".join(hashlib.sha256(root + digest).digest()[:HASH_BYTES] for digest in digests)


class Told:
    """A sink that keeps what it is told, and refuses what cannot be."""

    def __init__(self) -> None:
        self.held: set[bytes] = set()
        self.parents: dict[bytes, bytes] = {}
        self.clears = 0

    def stored(self, namespace: bytes, parent: bytes, start: int, hashes: bytes) -> None:
        assert namespace == NAMESPACE.id
        assert (start == 0) == (parent == NO_PARENT)
        for block in split_hashes(hashes):
            assert block not in self.held, "told twice"
            self.held.add(block)
            self.parents[block] = parent
            parent = block

    def removed(self, hashes: bytes) -> None:
        for block in split_hashes(hashes):
            self.held.remove(block)

    def cleared(self) -> None:
        self.held.clear()
        self.clears += 1


def broken(error: Exception) -> None:
    raise error


class Engine:
    """A BlockPool with a listener, and requests that fill it."""

    def __init__(self, blocks: int) -> None:
        self.pool = BlockPool(blocks, enable_caching=True, hash_block_size=BLOCK_TOKENS)
        self.told = Told()
        group = KvGroup(0, BLOCK_TOKENS, BLOCK_TOKENS)
        namespaces = [GroupNamespace(NAMESPACE.id, NAMESPACE.root())]
        states: dict[str, RequestState] = {}

        def state_of(request: Request) -> RequestState:
            return states.setdefault(request.request_id, RequestState(request, [group], namespaces))

        sink = HbmSink(self.told.stored, self.told.removed, self.told.cleared, broken)
        self.watch = PrefixCacheWatch(self.pool, [group], state_of, derived, sink)

    def request(self, tokens: list[int]) -> Request:
        return Request(f"r{next(_numbers)}", tokens, SamplingParams(max_tokens=1), None, block_hasher=_hasher)

    def fill(self, tokens: list[int], chunk_blocks: int = 1 << 30) -> list:
        request = self.request(tokens)
        total = len(tokens) // BLOCK_TOKENS
        blocks = self.pool.get_new_blocks(total)
        for begin in range(0, total, chunk_blocks):
            self.pool.cache_full_blocks(request, blocks, begin, min(total, begin + chunk_blocks), BLOCK_TOKENS, 0)
        return blocks

    def really_held(self) -> set[bytes]:
        keys = self.pool.cached_block_hash_to_block._cache
        return {derived(NAMESPACE.root(), [key[:-4]]) for key in keys}


def test_what_is_told_is_what_the_pool_holds_through_fills_duplicates_and_reuse() -> None:
    engine, chance = Engine(64), random.Random(7)
    live: list[list] = []
    for _ in range(400):
        if live and (chance.random() < 0.4 or engine.pool.get_num_free_blocks() < 12):
            engine.pool.free_blocks(reversed(live.pop(chance.randrange(len(live)))))
        else:
            prompt = [chance.randrange(3)] * 12 + [chance.randrange(50) for _ in range(20)]
            live.append(engine.fill(prompt, chance.choice([1, 3, 100])))
        engine.watch.flush()
        assert engine.told.held == engine.really_held()
    assert engine.watch.duplicates > 50


def test_a_chain_in_chunks_names_each_blocks_parent() -> None:
    engine = Engine(32)
    tokens = list(range(40))
    engine.fill(tokens, 3)
    engine.watch.flush()
    request = engine.request(tokens)
    chain = split_hashes(derived(NAMESPACE.root(), request.block_hashes))
    assert engine.told.parents == dict(zip(chain, [NO_PARENT, *chain[:-1]], strict=True))


def test_a_reset_is_told_once_and_listening_goes_on() -> None:
    engine = Engine(32)
    engine.pool.free_blocks(reversed(engine.fill(list(range(40)))))
    assert engine.pool.reset_prefix_cache()
    assert engine.told.clears == 1  # an idle engine takes no step that would tell
    assert not engine.told.held
    engine.pool.free_blocks(reversed(engine.fill(list(range(100, 120)))))
    engine.watch.flush()
    assert engine.told.clears == 1
    assert engine.told.held == engine.really_held() != set()


def test_entries_that_move_to_another_block_are_neither_lost_nor_told_again() -> None:
    engine = Engine(32)
    (first,) = engine.fill([1, 2, 3, 4])
    (empty,) = engine.pool.get_new_blocks(1)
    engine.pool.move_block_hashes(first, empty)
    engine.watch.flush()
    assert engine.told.held == engine.really_held() != set()
