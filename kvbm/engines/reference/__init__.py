"""The reference engine: a small paged-KV transformer in torch that keeps its blocks in kvbm.

Raises: MissingExtraError at import: torch is not installed.
"""

from kvbm.core.errors import MissingExtraError

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as missing:
    if missing.name != "torch":
        raise
    refused = MissingExtraError("torch", "engine")
    refused.args = ("the reference engine needs torch; install it with: pip install 'kvbm-ledger[engine]'",)
    raise refused from None

from kvbm.engines.reference.blocks import BlockManager, HeldPrefix, PagedPool
from kvbm.engines.reference.engine import Engine
from kvbm.engines.reference.model import DecodeInput, Model
from kvbm.engines.reference.requests import Finished, Request, RequestRefusedError
from kvbm.engines.reference.weights import ModelShape, Weights

__all__ = [
    "BlockManager",
    "DecodeInput",
    "Engine",
    "Finished",
    "HeldPrefix",
    "Model",
    "ModelShape",
    "PagedPool",
    "Request",
    "RequestRefusedError",
    "Weights",
]
