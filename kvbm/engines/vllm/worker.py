"""The worker's half: one rank's tensors ↔ its part of HOST's rows, as the scheduler's half plans.

A call never raises and, `finish` in an idle step and `flush` aside, never waits: copies run in a queue of their own.
Whatever fails is answered in words. Owner thread only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvbm.assembly import RowCopier, copy_queue, device_rings, segment_copies
from kvbm.core.errors import KvbmError, LayoutError
from kvbm.engines.vllm.forwards import Forwards
from kvbm.engines.vllm.host_link import HostLink
from kvbm.engines.vllm.host_part import HostPart
from kvbm.engines.vllm.loaded import LoadedWeights
from kvbm.engines.vllm.meeting import Meeting
from kvbm.engines.vllm.metadata import Answers, HostShare, Job, StepPlan, StoredPart
from kvbm.engines.vllm.numbers import Numbers
from kvbm.engines.vllm.ranks import PartPlace
from kvbm.engines.vllm.regions import BlockRegions, CacheConfig, Region, block_regions, served_tensors
from kvbm.pools.hbm.copy_queue import CopyQueue, ThreadedQueue
from kvbm.pools.hbm.paged import SLOTS, PagedTensor, paged_layout
from kvbm.pools.hbm.rings import RING_BYTES
from kvbm.pools.host.mapping import map_host
from kvbm.pools.host.pinning import CudaRegistrar, Registrar
from kvbm.safe_log import SafeLog

if TYPE_CHECKING:
    import torch

log = SafeLog()

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


class RankWorker:
    """One rank. Where its part lies in a row it learns from the first plan that has jobs.

    Attributes:
        refused: why this rank cannot take part, "" when it can. Every job is then answered as failed.
    """

    def __init__(
        self,
        rank: int,
        config: CacheConfig,
        threads: int = 0,
        loaded: LoadedWeights | None = None,
        interleave: int = 1,
        meeting: Meeting | None = None,
        ring_bytes: int = RING_BYTES,
        programs: int = 0,
    ) -> None:
        """Know the rank and its blocks; nothing is opened.

        Args:
            rank: among all of the engine, in the order of `Ranks`.
            config: vLLM's KVCacheConfig of this rank.
            threads: that copy on a CPU; 0: as many as help.
            loaded: this rank's weights; None: nobody can say what they are, so nothing is loaded for adapters.
            interleave: as `Ranks`, by what this rank does.
            meeting: where the scheduler says where HOST is; None: a plan says it.
            ring_bytes, programs: on a GPU, as `pools.hbm` has them.
        """
        self.refused = ""
        self._suspended = ""  # why nothing is copied now
        self._loaded = loaded
        self._rank = rank
        self._config = config
        self._interleave = interleave
        self._part_bytes = 0
        self._place = PartPlace(rank, 0, 0, 0, stores=True)
        self._part: HostPart | None = None  # of the host's first rank, where the scheduler is on another
        self._threads = threads
        self._ring_bytes, self._programs = ring_bytes, programs
        self._numbers = Numbers()
        self._answers = Answers()
        self._pending: dict[int, _Pending] = {}  # under way in the queue
        self._awaited: Counter[str] = Counter()  # request → loads that have not ended
        self._received = Received(set(), set())
        self._lacking: set[str] = set()  # requests with a failed load and others under way
        self._host: np.ndarray | None = None
        self._share: HostShare | None = None
        self._meeting = meeting
        self._link: HostLink | None = None
        self._queue: CopyQueue | None = None
        self._device_queue: ThreadedQueue | None = None  # the same, on a GPU
        self._forwards: Forwards | None = None
        self._tensors: list[torch.Tensor] = []  # the queue copies from and to their memory

    def register(self, kv_caches: Mapping[str, Any]) -> None:
        """Take the engine's tensors, by layer. What is wrong with them is in `refused` and the next answers."""
        try:
            regions = block_regions(self._config)
            self._part_bytes = regions.part_bytes
            memory = _one_memory(self._config, regions, kv_caches)
            self._open([_region_view(memory, region, regions.blocks) for region in regions.regions])
        except (KvbmError, RuntimeError, OSError) as error:  # torch raises RuntimeError for all that a device refuses
            self.refuse(str(error))

    def settle_host(self) -> bool:
        """Wait, in bounded time, until HOST is mapped and registered with CUDA; whether it is.

        For the engine's start.
        """
        return self._link is None or self._link.settle()

    def begin_step(self, step: int) -> None:
        """Before the engine launches a step's forward: its copies need not wait for that one."""
        if self._forwards is not None:
            try:
                self._forwards.begin(step)
            except RuntimeError as error:  # the device takes no event
                self.refuse(str(error))

    def begin(self, plan: StepPlan) -> None:
        """Begin what a step plans: on a GPU behind the forwards that may touch its blocks, and behind none of those
        launched since.

        A load goes behind what the scheduler's half names, a store behind all forwards before this step's, which
        compute its blocks.
        """
        self.begin_step(plan.step)
        if plan.host is not None:
            self._take(plan.host, plan.other_hosts)
        self._heed_weights()
        self._awaited.update(job.request for job in plan.loads)
        for job in plan.loads:
            self._begin(job, stores=False)
        if self._place.stores:
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
        if self._part is not None:
            share, why = self._part.take()
            if share is not None:
                self._answers.hosts[share.host] = share
            elif why:
                self.refuse(why)
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
        if self._part is not None and self._part.is_untold:
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

    def suspend(self) -> None:
        """The engine is about to give its KV's memory away (sleep mode).

        What is under way ends first; until `resume` nothing is copied.
        """
        self._suspended = "the engine sleeps, and its KV's memory is not there"
        if not self.flush():
            self.refuse(f"{len(self._pending)} copies had not ended when the engine gave its KV's memory away")

    def resume(self) -> None:
        """The memory is back, where it was."""
        self._suspended = ""

    def close(self) -> None:
        """End the copy under way, and let go of tensors and HOST. Idempotent; what had not ended is never answered."""
        if self._queue is not None:
            self._queue.close()
        if self._part is not None:
            self._part.close()
        self._queue = self._device_queue = self._forwards = None
        self._host = None
        self._share = None
        if self._link is not None:
            self._link.close()
        self._link = None
        self._tensors = []
        self._pending.clear()

    def _open(self, views: list[torch.Tensor]) -> None:
        layers = [[PagedTensor(view, (SLOTS, "bytes"))] for view in views]
        layout = paged_layout(layers)
        device = views[0].device
        new_registrar: Callable[[], Registrar] | None = None
        kind = _kind_of(device)
        if kind == "cpu":
            self._queue = copy_queue(layout, self._threads)
        elif kind == "cuda":
            from kvbm.pools.hbm.cuda import open_queue

            copier = RowCopier(self._threads)
            rings = device_rings(copier, self._programs)
            self._queue = self._device_queue = open_queue(
                layers, layout, device, segment_copies(copier), rings, self._ring_bytes
            )
            self._forwards = Forwards(self._device_queue.mark, self._device_queue.is_passed)
            new_registrar = partial(CudaRegistrar, device)
        else:
            raise LayoutError(f"vLLM's KV lies on {device}; kvbm copies from cuda or cpu")
        self._tensors = views
        if self._meeting is not None:
            self._link = HostLink(self._meeting, new_registrar)

    def _take(self, first: HostShare, others: Sequence[HostShare]) -> None:
        """Learn where this rank's part of HOST is, and map it.

        The first rank of another host than the scheduler's takes the memory there.
        """
        ranks = first.ranks
        if self._rank >= ranks.ranks:
            self.refuse(f"the scheduler knows {ranks.ranks} ranks")
            return
        self._place = ranks.place_of(self._rank)
        share = next((one for one in (first, *others) if one.host == self._place.host), None)
        if self.refused:
            return
        if share is None:
            if self._part is None and ranks.is_first(self._rank):
                self._part = HostPart(first, self._place.host)
            return
        if share == self._share:
            return
        try:
            if ranks.interleave != self._interleave:
                raise LayoutError(
                    f"this rank keeps {self._interleave} tokens in a row of each block, the scheduler was told "
                    f"{ranks.interleave}"
                )
            if self._queue is not None and self._place.bytes != self._part_bytes:
                raise LayoutError(
                    f"a block has {self._part_bytes} bytes on rank {self._rank}, the scheduler was told "
                    f"{self._place.bytes}"
                )
            if share.rows * share.row_bytes > share.mapped_bytes:
                raise LayoutError(
                    f"HOST has {share.rows} rows of {share.row_bytes} bytes in {share.mapped_bytes} bytes"
                )
            if self._link is not None:
                memory = self._link.memory_of(share)
            else:
                memory = map_host(share.pid, share.fd, share.mapped_bytes, pins=False)
        except (KvbmError, RuntimeError, OSError) as error:
            self.refuse(str(error))
            return
        rows = memory[: share.rows * share.row_bytes].reshape(share.rows, share.row_bytes)
        self._host = rows[:, self._place.begin : self._place.begin + self._place.bytes]
        self._share = share

    def _begin(self, job: Job, stores: bool) -> None:
        why = self.refused or self._suspended or job.why or self._why_other_weights(job)
        if not why and (self._queue is None or self._host is None):
            why = "its tensors are not registered" if self._queue is None else "nobody has said where HOST is"
        if not why:
            assert self._queue is not None and self._host is not None
            try:
                blocks, rows = (
                    np.frombuffer(column, dtype="<u4").astype(np.int64) for column in (job.blocks, job.rows)
                )
                if self._device_queue is not None and self._forwards is not None:
                    mark = self._forwards.behind(job.after)
                    on = self._device_queue.gather if stores else self._device_queue.scatter
                    on(job.id, blocks, self._host, rows, mark)
                else:
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
            self._numbers.add("stored_bytes" if stores else "loaded_bytes", blocks * self._part_bytes)
            self._numbers.time("store_seconds" if stores else "load_seconds", busy_s)
        if stores:
            sums = b"" if why or checksums is None else checksums.astype("<u4").tobytes()
            self._answers.stored[job.id] = {self._place.part: StoredPart(sums, why)}
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


def _kind_of(device: torch.device) -> str:
    return device.type


def _one_memory(config: CacheConfig, regions: BlockRegions, kv_caches: Mapping[str, Any]) -> torch.Tensor:
    """The bytes all layers lie in, once every layer was found where vLLM said it would be. Raises LayoutError."""
    import torch

    memory: torch.Tensor | None = None
    for placed in served_tensors(config):
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
            f"layer {name} has {view.shape[0]} blocks {view.stride(0) * element_bytes} bytes apart from byte {begin} "
            "on; vLLM's"
            f" configuration says {blocks}, {block_stride} bytes apart, from byte {offset} on"
        )


def _region_view(memory: torch.Tensor, region: Region, blocks: int) -> torch.Tensor:
    return memory.as_strided((blocks, region.bytes), (region.stride, 1), region.offset)
