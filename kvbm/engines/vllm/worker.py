"""The worker's half: one rank's tensors ↔ its part of HOST's rows, as the scheduler's half plans.

A call never raises and, `finish` in an idle step and `flush` aside, never waits: copies run in a queue of their own. Whatever fails is
answered in words. Owner thread only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import structlog

from kvbm.assembly import RowCopier, copy_queue, segment_copies
from kvbm.core.errors import KvbmError, LayoutError
from kvbm.engines.vllm.loaded import LoadedWeights
from kvbm.engines.vllm.metadata import Answers, HostShare, Job, Plan, Ranks, Stored
from kvbm.engines.vllm.numbers import Numbers
from kvbm.engines.vllm.regions import BlockRegions, CacheConfig, Region, block_regions
from kvbm.pools.hbm.copy_queue import CopyQueue
from kvbm.pools.hbm.paged import SLOTS, PagedTensor, paged_layout
from kvbm.pools.host.mapping import map_host

if TYPE_CHECKING:
    import torch

log = structlog.get_logger()

_FLUSH_S = 60.0


class _Pending(NamedTuple):
    job: Job
    stores: bool


class Received(NamedTuple):
    """Requests all of whose loads have ended since they were last asked for.

    Attributes:
        finished: all of them.
        failed: those of them that lack a block.
    """

    finished: set[str]
    failed: set[str]


class Worker:
    """One rank.

    Attributes:
        refused: why this rank cannot take part, "" when it can. Every job is then answered as failed.
    """

    def __init__(
        self, rank: int, ranks: Ranks, config: CacheConfig, threads: int = 0, loaded: LoadedWeights | None = None
    ) -> None:
        """Know the rank and its blocks; nothing is opened.

        Args:
            config: vLLM's KVCacheConfig of this rank.
            threads: that copy on a CPU; 0: as many as help.
            loaded: this rank's weights; None: nobody can say what they are, so nothing is loaded for adapters.
        """
        self.refused = ""
        self._loaded = loaded
        self._rank = rank
        self._ranks = ranks
        self._config = config
        self._threads = threads
        self._numbers = Numbers()
        self._answers = Answers()
        self._pending: dict[int, _Pending] = {}  # under way in the queue
        self._awaited: Counter[str] = Counter()  # request → loads that have not ended
        self._received = Received(set(), set())
        self._lacking: set[str] = set()  # requests with a failed load and others under way
        self._host: np.ndarray | None = None
        self._share: HostShare | None = None
        self._queue: CopyQueue | None = None
        self._tensors: list[torch.Tensor] = []  # the queue copies from and to their memory

    def register(self, kv_caches: Mapping[str, Any]) -> None:
        """Take the engine's tensors, by layer. What is wrong with them is in `refused` and the next answers."""
        try:
            regions = block_regions(self._config)
            if regions.part_bytes != self._ranks.part_bytes:
                raise LayoutError(
                    f"a block has {regions.part_bytes} bytes on rank {self._rank}, the scheduler was told {self._ranks.part_bytes}"
                )
            memory = _one_memory(self._config, regions, kv_caches)
            self._open([_region_view(memory, region, regions.blocks) for region in regions.regions])
        except (KvbmError, RuntimeError, OSError) as error:  # torch raises RuntimeError for all that a device refuses
            self.refuse(str(error))

    def begin(self, plan: Plan) -> None:
        """Begin what a step plans, behind all that the engine has queued on its current stream so far."""
        if plan.host is not None and plan.host != self._share and not self.refused:
            self._map(plan.host)
        self._heed_weights()
        self._awaited.update(job.request for job in plan.loads)
        for job in plan.loads:
            self._begin(job, stores=False)
        if self._ranks.stores(self._rank):
            for job in plan.stores:
                self._begin(job, stores=True)

    def finish(self, wait_s: float = 0.0) -> Answers:
        """What has ended since the last call.

        Args:
            wait_s: how long to wait for what is under way; for a step in which the engine computes nothing.
        """
        if self._queue is not None:
            if wait_s > 0 and self._pending:
                self._queue.wait(wait_s)
            self._collect(self._queue)
        self._heed_weights()
        if self._loaded is not None and (news := self._loaded.take()):
            self._answers.adapters[self._rank] = news
        answers, self._answers = self._answers, Answers()
        return answers

    def received(self) -> Received:
        """Requests whose last load was in the answers since the last call."""
        received, self._received = self._received, Received(set(), set())
        return received

    def refuse(self, why: str) -> None:
        """Take no further part; said once to the scheduler and once in the log. What comes is answered as failed."""
        if not self.refused:
            self.refused = why
            self._answers.refused = f"rank {self._rank}: {why}"
            log.warning("worker.refused", rank=self._rank, why=why)

    def take_numbers(self) -> dict[str, Any]:
        """Numbers counted since the last call, as `numbers.Numbers.data`; empty when there are none."""
        return self._numbers.take()

    @property
    def under_way(self) -> int:
        """Jobs whose end was not answered yet."""
        return len(self._pending)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way and all is answered: most steps of an engine are such, and end here."""
        if self._loaded is not None and (self._loaded.has_news or (self._loaded.changed and not self.refused)):
            return False
        return not (self._pending or self._answers or self._received.finished)

    def flush(self, timeout_s: float = _FLUSH_S) -> bool:
        """Wait for everything under way; whether it ended. The answers come with the next `finish`."""
        if self._queue is None or not self._pending:
            return True
        ended = self._queue.wait(timeout_s)
        self._collect(self._queue)
        if not ended:
            log.warning("worker.flush_timed_out", rank=self._rank, jobs=len(self._pending), waited_s=timeout_s)
        return ended

    def close(self) -> None:
        """End the copy under way, and let go of tensors and HOST. Idempotent; what had not ended is never answered."""
        if self._queue is not None:
            self._queue.close()
        self._queue = None
        self._host = None
        self._share = None
        self._tensors = []
        self._pending.clear()

    def _open(self, views: list[torch.Tensor]) -> None:
        layers = [[PagedTensor(view, (SLOTS, "bytes"))] for view in views]
        layout = paged_layout(layers)
        device = views[0].device
        if device.type == "cpu":
            self._queue = copy_queue(layout, self._threads)
        elif device.type == "cuda":
            from kvbm.pools.hbm.cuda import open_queue

            self._queue = open_queue(layers, layout, device, segment_copies(RowCopier(self._threads)))
        else:
            raise LayoutError(f"vLLM's KV lies on {device}; kvbm copies from cuda or cpu")
        self._tensors = views

    def _map(self, share: HostShare) -> None:
        try:
            expected = (self._ranks.part_bytes, self._ranks.row_bytes)
            if (share.part_bytes, share.row_bytes) != expected or share.rows * share.row_bytes > share.mapped_bytes:
                raise LayoutError(
                    f"HOST has {share.rows} rows of {share.row_bytes} bytes with parts of {share.part_bytes} in"
                    f" {share.mapped_bytes} bytes, rank {self._rank} expects rows of {expected[1]} with parts of {expected[0]}"
                )
            memory = map_host(share.pid, share.fd, share.mapped_bytes)
        except (KvbmError, RuntimeError, OSError) as error:
            self.refuse(str(error))
            return
        begin = self._ranks.part_of(self._rank) * share.part_bytes
        rows = memory[: share.rows * share.row_bytes].reshape(share.rows, share.row_bytes)
        self._host = rows[:, begin : begin + share.part_bytes]
        self._share = share

    def _begin(self, job: Job, stores: bool) -> None:
        why = self.refused or job.why or self._why_other_weights(job)
        if not why and (self._queue is None or self._host is None):
            why = (
                "its tensors are not registered" if self._queue is None else "the scheduler has not said where HOST is"
            )
        if not why:
            assert self._queue is not None and self._host is not None
            try:
                blocks, rows = (
                    np.frombuffer(column, dtype="<u4").astype(np.int64) for column in (job.blocks, job.rows)
                )
                begin = self._queue.gather if stores else self._queue.scatter
                begin(job.id, blocks, self._host, rows)
            except (
                KvbmError,
                ValueError,
                RuntimeError,
            ) as error:  # columns of no whole numbers; a device that takes no event
                why = str(error)
            else:
                self._pending[job.id] = _Pending(job, stores)
                return
        self._end(_Pending(job, stores), None, 0.0, f"rank {self._rank}: {why}")

    def _heed_weights(self) -> None:
        """Take no further part once the model's weights were changed."""
        if self._loaded is not None and self._loaded.changed:
            self.refuse(self._loaded.changed)

    def _why_other_weights(self, job: Job) -> str:
        """Why this rank has other weights than those that a load's blocks were computed with."""
        if not job.adapter:
            return ""
        if self._loaded is None:
            return "nobody says which adapters are loaded"
        return self._loaded.why_not(job.adapter, job.weights[self._rank])

    def _collect(self, queue: CopyQueue) -> None:
        for id, checksums, busy_s, why in queue.ended():
            self._end(self._pending.pop(id), checksums, busy_s, f"rank {self._rank}: {why}" if why else "")

    def _end(self, pending: _Pending, checksums: np.ndarray | None, busy_s: float, why: str) -> None:
        job, stores = pending
        if why:
            log.warning("worker.copy_failed", rank=self._rank, job=job.id, stores=stores, why=why)
            self._numbers.add("failed_stores" if stores else "failed_loads", 1)
        else:
            blocks = len(job.blocks) // 4
            self._numbers.add("stored_blocks" if stores else "loaded_blocks", blocks)
            self._numbers.add("stored_bytes" if stores else "loaded_bytes", blocks * self._ranks.part_bytes)
            self._numbers.time("store_seconds" if stores else "load_seconds", busy_s)
        if stores:
            sums = b"" if why or checksums is None else checksums.astype("<u4").tobytes()
            self._answers.stored[job.id] = {self._ranks.part_of(self._rank): Stored(sums, why)}
            return
        self._answers.loaded[job.id] = 1  # this rank is done with it, whichever way
        if why:
            self._answers.failed[job.id] = why
            self._lacking.add(job.request)
        self._awaited[job.request] -= 1
        if not self._awaited[job.request]:
            del self._awaited[job.request]
            self._received.finished.add(job.request)
            if job.request in self._lacking:
                self._lacking.remove(job.request)
                self._received.failed.add(job.request)


def _one_memory(config: CacheConfig, regions: BlockRegions, kv_caches: Mapping[str, Any]) -> torch.Tensor:
    """The bytes all layers lie in, once every layer was found where vLLM said it would be. Raises LayoutError."""
    import torch

    memory: torch.Tensor | None = None
    for placed in config.kv_cache_tensors:
        for layer, name in enumerate(placed.layers):
            view = kv_caches.get(name)
            if not isinstance(view, torch.Tensor):
                raise LayoutError(
                    f"layer {name} has {'no tensor' if view is None else type(view).__name__}; one tensor is served"
                )
            storage = view.untyped_storage()
            if memory is None:
                memory = torch.empty(0, dtype=torch.uint8, device=view.device).set_(storage)
            elif memory.untyped_storage().data_ptr() != storage.data_ptr() or memory.device != view.device:
                raise LayoutError(
                    f"layer {name} lies in other memory than the layers before it; one allocation is served"
                )
            _check_place(name, view, placed.offset + layer * placed.layer_stride, placed.block_stride, regions.blocks)
    assert memory is not None  # block_regions has seen layers
    if memory.numel() < regions.allocation_bytes:
        raise LayoutError(
            f"the KV's memory has {memory.numel()} bytes, vLLM's configuration says {regions.allocation_bytes}"
        )
    return memory


def _check_place(name: str, view: torch.Tensor, offset: int, block_stride: int, blocks: int) -> None:
    """Refuse a layer that is not where the configuration places it. The engine's backend may see a block as several."""
    element_bytes = view.element_size()
    begin = view.storage_offset() * element_bytes
    pieces, rest = divmod(view.shape[0], blocks)
    stride = view.stride(0) * element_bytes * pieces if view.shape[0] > 1 else block_stride
    if rest or not pieces or begin != offset or stride != block_stride:
        raise LayoutError(
            f"layer {name} has {view.shape[0]} blocks {view.stride(0) * element_bytes} bytes apart from byte {begin} on; vLLM's"
            f" configuration says {blocks}, {block_stride} bytes apart, from byte {offset} on"
        )


def _region_view(memory: torch.Tensor, region: Region, blocks: int) -> torch.Tensor:
    return memory.as_strided((blocks, region.bytes), (region.stride, 1), region.offset)
