"""kvbm inside vLLM: `KvbmConnector`, a KV connector that keeps the engine's blocks in the tiers of one block manager.

Nothing here imports vLLM until `KvbmConnector` is asked for, so that the plans can be tested without it.

Raises: MissingExtraError: `KvbmConnector` is asked for and vLLM is not installed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvbm.core.errors import MissingExtraError

if TYPE_CHECKING:
    from kvbm.engines.vllm.connector import KvbmConnector

__all__ = ["KvbmConnector"]


def __getattr__(name: str) -> Any:
    if name != "KvbmConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from kvbm.engines.vllm.connector import KvbmConnector
    except ModuleNotFoundError as missing:
        if (missing.name or "").partition(".")[0] != "vllm":
            raise
        refused = MissingExtraError("vLLM", "vllm")
        refused.args = ("KvbmConnector needs vLLM 0.32 or newer; install it with: pip install 'kvbm-ledger[vllm]'",)
        raise refused from None
    return KvbmConnector
