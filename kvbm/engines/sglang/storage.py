"""`KvbmHiCache`: what SGLang's HiCache calls.

It needs SGLang; nothing else here does. A call never raises once the backend is attached: trouble is a miss, and one
warning.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from types import EllipsisType
from typing import Any, TypeVar

import sglang
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolTransferResult

from kvbm.core.errors import ConfigError, KvbmError
from kvbm.engines.sglang.identity import Place
from kvbm.engines.sglang.opening import open_tiers
from kvbm.engines.sglang.pool_hits import PoolHits, PoolWanted, pool_hits
from kvbm.engines.sglang.settings import UNTESTED_KEY, read_extra
from kvbm.engines.sglang.tiers import PageTiers
from kvbm.safe_log import RateLimitedLog

TESTED = ("0.5.23",)
_KV = "kv"
_COPIED = frozenset({_KV, "indexer"})  # of a model whose tensor ranks have copies of each other, what is copied

_T = TypeVar("_T")


class KvbmHiCache(HiCacheStorage):  # type: ignore[misc]  # SGLang has no types for us
    """A storage of HiCache over one block manager. SGLang's threads call it: one asks, one reads, one writes.

    Args:
        storage_config: SGLang's HiCacheStorageConfig; its `extra_config` has our settings.
        kwargs: what else the factory was given; nothing of it is used.
    Raises: ConfigError: settings or a version of SGLang that cannot be used.
    """

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        self._config = storage_config
        self._place = Place.of(storage_config, _replica())
        self._extra = read_extra(storage_config.extra_config or {}, environment=os.environ, rank=self._place.suffix)
        version = str(sglang.__version__)
        if version not in TESTED and self._extra.untested != version:
            raise ConfigError(
                f"SGLang {version} was not tested with this kvbm; {', '.join(TESTED)} was, and"
                f' "{UNTESTED_KEY}": "{version}" in the extra config goes on at your own risk'
            )
        if (shards := getattr(storage_config, "dcp_size", 1)) > 1:
            raise ConfigError(
                f"--dcp-size {shards}: pages that ranks of a decode context share out are not stored; leave it 1, or"
                " the storage out"
            )
        self._remarks = RateLimitedLog()
        self._tiers: PageTiers | None = None
        self._beside: dict[str, PageTiers] = {}  # of pools beside that of keys and values

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Open the manager for this pool. Raises: what `open_tiers` raises."""
        super().register_mem_pool_host(mem_pool_host)
        if self._tiers is not None:
            self.close()
        self._tiers = self._opened(mem_pool_host, _KV, self._place)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Open a manager for a pool beside that of keys and values; one that cannot be stored is left out, and then
        prompts that need it are misses.
        """
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        name = _name(host_pool_name)
        if name == _KV:
            return
        if (before := self._beside.pop(name, None)) is not None:
            before.close()
        has_copies = self._place.has_copies and name in _COPIED
        try:
            self._beside[name] = self._opened(host_pool, name, self._place._replace(has_copies=has_copies))
        except KvbmError as error:
            self._remarks.warn(
                "pool.not_stored", pool=name, why=str(error), notice="prompts that need it are computed, not restored"
            )

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """How many pages, from the first on, some tier seems to hold."""
        return self._tried("exists", 0, lambda tiers: tiers.exists(keys))

    def exists(self, key: str) -> bool:
        """Whether some tier seems to hold a page."""
        return bool(self.batch_exists([key]))

    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Fill pages of SGLang's; for each whether its bytes are there, verified."""
        return self._tried("get", [False] * len(keys), lambda tiers: tiers.get(keys, host_indices))

    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Store pages; for each whether it is stored. A rank that is no writer leaves it to the one that is."""
        if not self._config.is_storage_writer:
            return [True] * len(keys)
        before = getattr(extra_info, "prefix_keys", None) or ()
        return self._tried("set", [False] * len(keys), lambda tiers: tiers.set(keys, host_indices, before))

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None
    ) -> PoolTransferResult:
        """Which prefixes all pools can restore, by the rule of each."""
        wanted = [
            PoolWanted(_name(one.name), self._of(one.name), str(one.hit_policy.value), len(one.keys or ()))
            for one in pool_transfers or ()
        ]
        found = self._tried("exists", PoolHits(0, {}, []), lambda tiers: pool_hits(tiers, keys, wanted))
        return PoolTransferResult(found.pages, found.by_pool, found.restorable)

    def batch_get_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        """Fill pages of several pools; for each pool and page whether its bytes are there, verified."""
        return {
            one.name: self._tried(
                "get", _missed(one), partial(_get, keys=one.keys or [], indices=one.host_indices), self._of(one.name)
            )
            for one in transfers
        }

    def batch_set_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        """Store pages of several pools; for each pool and page whether it is stored."""
        before = getattr(extra_info, "prefix_keys", None) or ()
        return {
            one.name: self._tried(
                "set",
                _missed(one),
                partial(_set, keys=one.keys or [], indices=one.host_indices, before=before),
                self._of(one.name),
            )
            for one in transfers
        }

    def clear(self) -> None:
        """Empty this instance's own tiers; objects, and what other instances hold, stay."""
        for tiers in (self._tiers, *self._beside.values()):
            self._tried("clear", 0, lambda tiers: tiers.clear(), tiers)

    def close(self) -> None:
        """Close the manager. Idempotent."""
        opened = [self._tiers, *self._beside.values()]
        self._tiers, self._beside = None, {}
        for tiers in opened:
            if tiers is not None:
                tiers.close()

    # -- what SGLang calls without `interface_v1`, which the constructor refuses ---------------------------------------

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> None:
        """A miss: only `interface_v1` is served."""
        return

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[None]:
        """A miss each: only `interface_v1` is served."""
        return [None] * len(keys)

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Nothing is stored: only `interface_v1` is served."""
        return False

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Nothing is stored: only `interface_v1` is served."""
        return False

    # -- inside -------------------------------------------------------------------------------------------------------

    def _opened(self, pool: Any, name: str, place: Place) -> PageTiers:
        rank = place.suffix + ("" if name == _KV else f"-{name}")
        extra = self._extra
        if rank != place.suffix:
            extra = read_extra(self._config.extra_config or {}, environment=os.environ, rank=rank)
        return open_tiers(
            extra,
            pool,
            place,
            name=name,
            server_args=_server_args(),
            machine=f"sglang {sglang.__version__} on {_device()}",
            served_name=str(self._config.model_name or ""),
        )

    def _of(self, name: Any) -> PageTiers | None:
        """The tiers of a pool; None where nothing of it is stored."""
        return self._tiers if _name(name) == _KV else self._beside.get(_name(name))

    def _tried(
        self, what: str, missed: _T, call: Callable[[PageTiers], _T], tiers: PageTiers | EllipsisType | None = ...
    ) -> _T:
        """What a call gives, of keys and values where no tiers are named; where it cannot, a miss and one warning."""
        tiers = self._tiers if isinstance(tiers, EllipsisType) else tiers
        if tiers is None:
            return missed
        try:
            return call(tiers)
        except Exception as error:  # noqa: BLE001  whatever it is: SGLang's thread goes on
            self._remarks.warn(
                "storage.failed", call=what, why=f"{type(error).__name__}: {error}", notice="it is a miss; report it"
            )
            return missed


def _name(name: Any) -> str:
    """SGLang's name of a pool, which may be an enumeration's member."""
    return str(getattr(name, "value", name))


def _missed(transfer: Any) -> list[bool]:
    return [False] * len(transfer.keys or ())


def _get(tiers: PageTiers, keys: list[str], indices: Any) -> list[bool]:
    return tiers.get(keys, indices)


def _set(tiers: PageTiers, keys: list[str], indices: Any, before: Sequence[str]) -> list[bool]:
    return tiers.set(keys, indices, before)


def _server_args() -> Any:
    """SGLang's ServerArgs; None in a process that has none."""
    from sglang.srt.runtime_context import get_server_args

    try:
        return get_server_args()
    except (AttributeError, RuntimeError, ValueError):
        return None


def _replica() -> int:
    """The data-parallel replica this process is of."""
    from sglang.srt.runtime_context import get_parallel

    try:
        return int(get_parallel().dp_rank or 0)
    except (AttributeError, RuntimeError, ValueError, TypeError):
        return 0


def _device() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else torch.backends.cpu.get_cpu_capability()
