"""How vLLM hashes tokens, as the engine states it for catalogs: whoever has tokens alone then finds its blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from kvbm.core.chain_statement import ChainGroup, ChainStatement
from kvbm.core.engine_chains import MOST_HASH_TOKENS, VLLM_CBOR, VLLM_SHA256
from kvbm.core.ids import Namespace
from kvbm.engines.vllm.requests import KvGroup
from kvbm.safe_log import SafeLog

log = SafeLog()

_KINDS: Final = {"sha256": VLLM_SHA256, "sha256_cbor": VLLM_CBOR}


def chain_of(
    namespace: Namespace, groups: Sequence[KvGroup], align_tokens: int, algorithm: str, begin: bytes
) -> ChainStatement | None:
    """What the engine states; None where its hashes cannot be made of tokens elsewhere.

    Args:
        namespace: one of the engine's.
        groups: those that are served.
        align_tokens: what a prefix grows by.
        algorithm: as `--prefix-caching-hash-algo` names it.
        begin: vLLM's hash before the first block's; b"" where it is not known.
    """
    kind, sizes = _KINDS.get(algorithm), {group.hash_tokens for group in groups}
    if kind is None or not begin or len(sizes) != 1 or max(sizes) > MOST_HASH_TOKENS:
        return None
    return ChainStatement(
        scheme=namespace.scheme,
        scheme_seed=namespace.scheme_seed,
        kind=kind,
        begin=begin,
        hash_tokens=sizes.pop(),
        groups=tuple(
            ChainGroup(one.id, one.block_tokens, one.window_blocks, one.chunk_tokens, one.has_draft) for one in groups
        ),
        align_tokens=align_tokens,
    )


def begin_of(algorithm: str) -> bytes:
    """vLLM's hash before the first block's, of an algorithm whose seed all its processes know; b"" of another.

    vLLM itself sets it once its scheduler, and with that this, is made.
    """
    if algorithm not in _KINDS:
        return b""
    try:
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed
    except ImportError as error:
        log.warning("chain.not_stated", why=str(error), notice="catalogs find nothing of this engine by tokens")
        return b""
    hash_of: Any = get_hash_fn_by_name(algorithm)
    return bytes(hash_of(resolve_none_hash_seed(hash_of)))
