"""Object pools for tests, over stores in memory."""

from __future__ import annotations

from typing import Any

from kvbm.assembly import CODER, NATIVE
from kvbm.assembly.native import NEW_OBJECT_RECEIVER
from kvbm.pools.object.pool import BlockObjects, ObjectPoolOptions
from kvbm.pools.stores.base import ObjectStore
from kvbm.pools.stores.memory import MemoryStore

_DEADLINE_S = 120.0  # a busy machine is no silent store


def memory_objects(block_bytes: int, blocks: int = 1, store: ObjectStore | None = None, **options: Any) -> BlockObjects:
    """An object pool over a store in memory, of its own unless one is given.

    It answers at once, so it needs no threads.
    """
    usual = {"blocks": blocks, "threads": 1, "deadline_s": _DEADLINE_S, "new_receiver": NEW_OBJECT_RECEIVER}
    chosen = ObjectPoolOptions(**usual | options)
    return BlockObjects(store or MemoryStore(), block_bytes, NATIVE.checksums, CODER, chosen)
