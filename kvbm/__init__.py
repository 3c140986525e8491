"""kvbm: an event-sourced lifecycle manager for the KV-cache blocks of LLM inference.

    import kvbm
    namespace = kvbm.Namespace(model="my-model", revision=kvbm.weights_digest("model.safetensors"), block_tokens=16)
    manager = kvbm.open_manager(kvbm.load_settings(flags={"pools.hbm.slots": 1024}), [namespace], block_bytes=65536)

The names here are the public ones; everything else may change without notice.
"""

from kvbm.assembly import open_manager
from kvbm.config import Settings, load_settings
from kvbm.core.errors import KvbmError
from kvbm.core.ids import NO_PARENT, Namespace, Tier
from kvbm.core.layout import KvShape
from kvbm.locate.http import CatalogClient
from kvbm.manager.manager import Manager, ManagerStats, Prefix
from kvbm.pools.paged import PagedTensor, paged_layout
from kvbm.weights import weights_digest

__all__ = [
    "NO_PARENT",
    "CatalogClient",
    "KvShape",
    "KvbmError",
    "Manager",
    "ManagerStats",
    "Namespace",
    "PagedTensor",
    "Prefix",
    "Settings",
    "Tier",
    "load_settings",
    "open_manager",
    "paged_layout",
    "weights_digest",
]
