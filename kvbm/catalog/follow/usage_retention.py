"""What tenants have used is kept in SQL for a time."""

from __future__ import annotations

import asyncio
import time

from kvbm.catalog.sql.store import SqlStore
from kvbm.core.errors import CatalogError
from kvbm.safe_log import SafeLog

log = SafeLog()

LOOK_EVERY_S = 3600.0
FIRST_LOOK_S = 600.0  # a catalog that begins has other things to ask its database
_DAY_MS = 86_400_000
_PAUSE_S = 0.05  # between two transactions: others write, too


async def keep_usage(store: SqlStore, keep_days: int) -> None:
    """Remove what is older, for ever. While the database is away, nothing is."""
    await asyncio.sleep(FIRST_LOOK_S)
    while True:
        removed = 0
        try:
            removed = await store.forget_usage(time.time_ns() // 1_000_000 - keep_days * _DAY_MS)
        except CatalogError as error:
            log.debug("forgetting.usage_waits", why=str(error))
        await asyncio.sleep(_PAUSE_S if removed else LOOK_EVERY_S)
