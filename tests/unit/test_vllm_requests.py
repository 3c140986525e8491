"""Our hashes of a request's blocks, which are derived as they are asked for: held to deriving all of them."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from kvbm.core.hashing import derived_hashes
from kvbm.core.ids import HASH_BYTES, NO_PARENT, NamespaceId, SequenceHash
from kvbm.engines.vllm.requests import GroupNamespace, KvGroup, RequestState

SPACE = GroupNamespace(NamespaceId(bytes(16)), SequenceHash(b"r" * 16))
GROUPS = [KvGroup(0, 4, 4), KvGroup(1, 4, 4, window_blocks=3), KvGroup(2, 8, 4, window_blocks=1, is_state=True)]


def chain(seed: int, count: int) -> list[bytes]:
    return [random.Random(f"{seed} {at}").randbytes(32) for at in range(count)]


def state_of(digests: list[bytes]) -> RequestState:
    request = SimpleNamespace(block_hashes=digests, num_prompt_tokens=4 * len(digests) + 1, kv_transfer_params=None)
    return RequestState(request, GROUPS, [SPACE] * len(GROUPS))


@pytest.mark.parametrize("index", range(len(GROUPS)))
def test_any_range_has_the_hashes_that_deriving_all_gives(index: int) -> None:
    chosen = random.Random(index)
    for _ in range(200):
        digests = chain(1, chosen.randrange(1, 40))
        state = state_of(digests)
        for _ in range(8):
            whole = derived_hashes(SPACE.root, list(GROUPS[index].digests(digests, 0, len(digests))))
            begin = chosen.randrange(0, 40)
            end = begin + chosen.randrange(0, 12)
            expected = whole[begin * HASH_BYTES : end * HASH_BYTES]
            assert state.hashes(index, begin, end, derived_hashes) == expected
            if 0 < begin <= len(whole) // HASH_BYTES:
                parent = whole[(begin - 1) * HASH_BYTES : begin * HASH_BYTES]
                assert state.parent(index, begin, derived_hashes) == parent
            if chosen.random() < 0.3:
                digests += chain(2, chosen.randrange(0, 4))
            elif chosen.random() < 0.3:  # a session's tokens are taken back, and others come
                del digests[chosen.randrange(1, len(digests) + 1) :]
                digests += chain(chosen.randrange(3, 99), chosen.randrange(0, 4))
    assert state.parent(index, 0, derived_hashes) == NO_PARENT


def test_no_block_is_derived_before_it_is_asked_for_and_none_twice() -> None:
    derived: list[bytes] = []

    def derive(root: bytes, digests: object) -> bytes:
        fresh = list(digests)  # type: ignore[call-overload]
        derived.extend(fresh)
        return derived_hashes(root, fresh)

    digests = chain(1, 1000)
    state = state_of(digests)
    state.hashes(1, 990, 1000, derive)
    assert derived == digests[990:]
    state.hashes(1, 985, 992, derive)
    digests += chain(2, 5)
    state.hashes(1, 998, 1005, derive)
    assert sorted(derived) == sorted(digests[985:])
