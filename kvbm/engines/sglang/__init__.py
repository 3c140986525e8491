"""kvbm inside SGLang: `KvbmHiCache`, a storage backend of HiCache that keeps pages of the engine's host pool in the
tiers of one block manager.

Nothing here imports SGLang until `KvbmHiCache` is asked for, so that what is below it can be tested without.

Raises: MissingExtraError: `KvbmHiCache` is asked for and SGLang is not installed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvbm.core.errors import MissingExtraError

if TYPE_CHECKING:
    from kvbm.engines.sglang.storage import KvbmHiCache

__all__ = ["KvbmHiCache"]


def __getattr__(name: str) -> Any:
    if name != "KvbmHiCache":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from kvbm.engines.sglang.storage import KvbmHiCache
    except ModuleNotFoundError as missing:
        if (missing.name or "").partition(".")[0] != "sglang":
            raise
        refused = MissingExtraError("SGLang", "s3")
        refused.args = ("KvbmHiCache needs SGLang 0.5.23; install it as its own pages say, and kvbm-ledger beside it",)
        raise refused from None
    return KvbmHiCache
