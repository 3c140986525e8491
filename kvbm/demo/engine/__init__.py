"""The engine that the demo drives: a small paged-KV transformer in torch that keeps its blocks in kvbm.

Raises: MissingExtraError at import: torch is not installed.
"""

from kvbm.core.errors import MissingExtraError

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as missing:
    if missing.name != "torch":
        raise
    refused = MissingExtraError("torch", "engine")
    refused.args = ("the demo's engine needs torch; install it with: pip install 'kvbm-ledger[engine]'",)
    raise refused from None

from kvbm.demo.engine.blocks import HeldPrefix, ManagerCalls, PagedPool
from kvbm.demo.engine.engine import Engine
from kvbm.demo.engine.model import DecodeInput, Model
from kvbm.demo.engine.requests import Finished, Request, RequestRefusedError
from kvbm.demo.engine.weights import ModelShape, Weights

__all__ = [
    "DecodeInput",
    "Engine",
    "Finished",
    "HeldPrefix",
    "ManagerCalls",
    "Model",
    "ModelShape",
    "PagedPool",
    "Request",
    "RequestRefusedError",
    "Weights",
]
