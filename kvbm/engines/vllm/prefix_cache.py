"""What vLLM's prefix cache holds, as it changes: which blocks are in HBM, for the stream.

vLLM keeps a map from a block's hash to the blocks that have it, one or several. The events it publishes lose bytes of
the hashes and say nothing unless they were asked for, so this listens where they come from: at the map, and at the call
that fills it, which knows the request and with it the chain. Only the first block with a hash and the last one speak;
those between are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from kvbm.core.ids import HASH_BYTES, NamespaceId
from kvbm.engines.vllm.adapters import Origin
from kvbm.engines.vllm.requests import DerivedHashes, KvGroup, RequestState

_GROUP_BYTES = 4  # vLLM appends the group's number to a hash


class HbmSink(NamedTuple):
    """Who is told.

    Attributes:
        stored: namespace, parent, start, hashes: blocks that are in HBM from now on.
        removed: hashes of blocks that are not any more.
        cleared: nothing is in HBM now.
        broken: telling has failed; the engine goes on, and must not hear of it.
    """

    stored: Callable[[NamespaceId, bytes, int, bytes], object]
    removed: Callable[[bytes], object]
    cleared: Callable[[], object]
    broken: Callable[[Exception], object]


class PrefixCacheWatch:
    """Listens to one BlockPool. Used by the scheduler's thread alone.

    Args:
        pool: vLLM's; three of its attributes are replaced by ones that listen and do the same.
        groups: KV groups of interest.
        state_of: our state of a request.
        derive: vLLM's hashes → ours.

    Attributes:
        duplicates: blocks whose hash was held already, or was still held by another block.
        filled: ids of blocks that got their hash since the last step was planned: the step under way computes them, and
            nobody may read them before it has. Whoever plans clears it.
    Raises: AttributeError: this vLLM's pool has not what is listened to; nothing was changed.
    """

    def __init__(
        self,
        pool: Any,
        groups: Sequence[KvGroup],
        state_of: Callable[[Any], RequestState],
        derive: DerivedHashes,
        sink: HbmSink,
    ) -> None:
        self.duplicates = 0
        self.filled: set[int] = set()
        self._pool, self._state_of, self._derive, self._sink = pool, state_of, derive, sink
        self._groups = {group.id: (index, group) for index, group in enumerate(groups)}
        self._ours: dict[bytes, bytes] = {}  # vLLM's key → our hash, of all that was told and not withdrawn
        self._fresh: list[bytes] | None = None  # keys that are new to the map, while it is being filled
        self._removed: dict[bytes, bytes] = {}  # withdrawn and not told yet
        self._origins: dict[int, Origin] = {}  # block id → what was computed into it; of requests with adapters
        self._is_deaf = False
        self._fill, self._reset = pool.cache_full_blocks, pool.reset_prefix_cache
        self._listen_to_map()
        pool.cache_full_blocks, pool.reset_prefix_cache = self._cache_full_blocks, self._reset_prefix_cache

    def origin_of(self, block_id: int) -> Origin | None:
        """What a block was computed with, when a request with an adapter has filled it; None: unknown."""
        return self._origins.get(block_id)

    def silence(self) -> None:
        """Withdraw everything, and tell of nothing any more."""
        if not self._is_deaf:
            self._is_deaf = True
            self._ours.clear()
            self._removed.clear()
            self._sink.cleared()

    def flush(self) -> None:
        """Tell what was removed or cleared since the last time."""
        if self._pool.cached_block_hash_to_block is not self._map:
            self._ours.clear()
            self._removed.clear()
            if not self._is_deaf:
                self._sink.cleared()
            self._listen_to_map()
        elif self._removed:
            gone = b"".join(self._removed.values())
            self._removed.clear()
            self._sink.removed(gone)

    def _listen_to_map(self) -> None:
        watch, blocks = self, self._pool.cached_block_hash_to_block
        plain = type(blocks)
        held = blocks._cache

        class Listening(plain):  # type: ignore[misc, valid-type]
            def insert(self, key: bytes, block: Any) -> None:
                watch._origins.pop(block.block_id, None)
                watch.filled.add(block.block_id)
                watch._on_insert(key, key in held)
                super().insert(key, block)

            def pop(self, key: bytes, block_id: int) -> Any:
                block = super().pop(key, block_id)
                if block is not None:
                    watch._on_pop(key, key in held)
                return block

        self._map = blocks
        blocks.__class__ = Listening

    def _on_insert(self, key: bytes, is_held: bool) -> None:
        if is_held:
            self.duplicates += 1
        elif self._fresh is not None:
            self._fresh.append(key)
        elif (ours := self._removed.pop(key, None)) is not None:  # only moved to another block
            self._ours[key] = ours

    def _on_pop(self, key: bytes, is_held: bool) -> None:
        if is_held:
            self.duplicates += 1
        elif (ours := self._ours.pop(key, None)) is not None:
            self._removed[key] = ours

    def _cache_full_blocks(
        self, request: Any, blocks: Any, num_cached_blocks: int, num_full_blocks: int, *args: Any, **kwargs: Any
    ) -> Any:
        if self._pool.cached_block_hash_to_block is not self._map:
            self.flush()
        fresh: list[bytes] = []
        self._fresh = fresh
        try:
            return self._fill(request, blocks, num_cached_blocks, num_full_blocks, *args, **kwargs)
        finally:
            self._fresh = None
            try:
                if getattr(request, "lora_request", None) is not None:
                    group = kwargs["kv_cache_group_id"] if "kv_cache_group_id" in kwargs else args[1]
                    self._note_origin(request, blocks, num_cached_blocks, num_full_blocks, group)
                if fresh and not self._is_deaf:
                    self._tell_stored(request, num_cached_blocks, num_full_blocks, fresh)
            except Exception as error:  # noqa: BLE001 - the engine must not hear of it
                self._sink.broken(error)

    def _reset_prefix_cache(self) -> Any:
        """Told at once: an engine that is reset may be idle, and no step comes that would tell."""
        is_reset = self._reset()
        if is_reset:
            try:
                self.flush()
            except Exception as error:  # noqa: BLE001 - the engine must not hear of it
                self._sink.broken(error)
        return is_reset

    def _tell_stored(self, request: Any, begin: int, end: int, fresh: list[bytes]) -> None:
        """Tell of blocks that one call has put into the map: all of one request and group, in the order of its
        chain.
        """
        self.flush()
        known = self._groups.get(int.from_bytes(fresh[0][-_GROUP_BYTES:], "big"))
        if known is None:
            return
        index, group = known
        state = self._state_of(request)
        if not state.namespaces:  # nobody knows yet what its adapter is
            return
        digests = group.digests(request.block_hashes, begin, end)
        try:
            skipped = digests.index(fresh[0][:-_GROUP_BYTES])  # of a window few blocks are there, the last ones
        except ValueError:
            return
        first = begin + skipped
        hashes = state.hashes(index, first, end, self._derive)
        namespace = state.namespaces[index].id
        runs: list[list[int]] = []  # half-open ranges of blocks
        waiting = iter(fresh)
        key = next(waiting, None)
        for at, digest in enumerate(digests[skipped:]):
            if key is None:
                break
            if key[:-_GROUP_BYTES] != digest:
                continue
            self._ours[key] = hashes[at * HASH_BYTES : (at + 1) * HASH_BYTES]
            if runs and runs[-1][1] == at:
                runs[-1][1] = at + 1
            else:
                runs.append([at, at + 1])
            key = next(waiting, None)
        for start, stop in runs:
            parent = state.parent(index, first + start, self._derive)
            run = hashes[start * HASH_BYTES : stop * HASH_BYTES]
            self._sink.stored(namespace, parent, first + start, run)

    def tell_late(self, state: RequestState, block_ids: Sequence[Sequence[int]]) -> None:
        """Tell of blocks that a request has filled before anybody knew its adapter."""
        blocks, held = self._pool.blocks, self._map._cache
        for number, (index, group) in self._groups.items():
            ids = block_ids[number]
            count = len(state.hashes(index, 0, len(ids), self._derive)) // HASH_BYTES
            digests = group.digests(state.request.block_hashes, 0, count)
            fresh = []
            for block_id, digest in zip(ids, digests, strict=False):
                key = digest + number.to_bytes(_GROUP_BYTES, "big")
                is_its = state.origin.equals(self._origins.get(block_id))
                if is_its and blocks[block_id].block_hash == key and key in held and key not in self._ours:
                    fresh.append(key)
            if fresh and not self._is_deaf:
                self._tell_stored(state.request, 0, count, fresh)

    def _note_origin(self, request: Any, blocks: Sequence[Any], begin: int, end: int, group: int) -> None:
        """Remember what a request with an adapter fills blocks with.

        One that builds on blocks of other weights fills no pure ones.
        """
        state = self._state_of(request)
        origin = state.origin
        for block in blocks[state.verified.get(group, 0) : begin]:
            if not block.is_null and not origin.equals(self._origins.get(block.block_id)):
                origin.is_pure = False
                break
        state.verified[group] = end
        for block in blocks[begin:end]:
            if not block.is_null:
                self._origins[block.block_id] = origin
