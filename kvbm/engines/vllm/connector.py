"""`KvbmConnector`: vLLM's words on one side, ours on the other. Which process does what: ARCHITECTURE, "Inside vLLM".

vLLM makes one in the scheduler's process and one in each worker's. Whatever is not served (`served.why_not_served`) is
said once, and the connector then does nothing. Nothing raised here reaches vLLM after the start: trouble ends the
service, with one warning.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

from vllm.distributed import get_pcp_group, get_pp_group, get_tensor_model_parallel_rank
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.request import RequestStatus

from kvbm.core.errors import KvbmError
from kvbm.core.ids import Tier
from kvbm.engines.vllm.forwards import taken_blocks
from kvbm.engines.vllm.host_link import forget_host
from kvbm.engines.vllm.kv_events import are_wanted, extra_keys_of, kinds_of, kv_event
from kvbm.engines.vllm.loaded import LoadedWeights
from kvbm.engines.vllm.logs import log_with_vllm
from kvbm.engines.vllm.meeting import Meeting
from kvbm.engines.vllm.metadata import Answers, StepPlan
from kvbm.engines.vllm.offers import offers_of
from kvbm.engines.vllm.opening import (
    ServedEngine,
    copy_settings,
    open_scheduler,
    publish_settings,
    serve,
    tell_not_serving,
)
from kvbm.engines.vllm.resolved import forget_resolved, leave_resolved, resolved_of
from kvbm.engines.vllm.scheduler import Scheduler
from kvbm.engines.vllm.stages import StageBlocks, all_stages
from kvbm.engines.vllm.stats import KvbmPromMetrics, KvbmStats
from kvbm.engines.vllm.tested import check_tested
from kvbm.engines.vllm.worker import RankWorker
from kvbm.safe_log import SafeLog

if TYPE_CHECKING:
    import torch

log = SafeLog()

_IDLE_WAIT_S = 0.002  # in a step without model work, copies under way are waited for so long
_IDLE_ASK_S = 0.0005  # and so long before a request that has to wait for bytes is looked at again
_FLUSH_S = 10.0

_ANSWERED = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)
_SOURCES = {Tier.HOST: CacheHitSource.HOST, Tier.NVME: CacheHitSource.DISK}

Call = TypeVar("Call", bound=Callable[..., Any])


@dataclass
class KvbmMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """A step's plan."""

    plan: StepPlan = field(default_factory=StepPlan)


@dataclass
class KvbmHandshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """What a rank says of its pipeline stage."""

    stage: int
    blocks: StageBlocks


@dataclass
class KvbmWorkerMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """What ranks answer."""

    answers: Answers

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """One for all ranks."""
        assert isinstance(other, KvbmWorkerMetadata)
        self.answers.merge(other.answers)
        return self


def _harmless(otherwise: Callable[[], Any]) -> Callable[[Call], Call]:
    """A call of vLLM's that may fail without harm: from then on nothing new is begun, and `otherwise` is answered."""

    def decorate(call: Call) -> Call:
        @wraps(call)
        def harmless(self: KvbmConnector, *args: Any, **kwargs: Any) -> Any:
            try:
                return call(self, *args, **kwargs)
            except Exception as error:  # noqa: BLE001 - the engine must not hear of it
                self.give_up(f"{call.__name__} has failed: {error!r}", error)
                return otherwise()

        return cast(Call, harmless)

    return decorate


class KvbmConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Keeps vLLM's KV blocks in kvbm's tiers. See docs/vllm.md.

    Raises: ConfigError, LayoutError, PoolError, JournalError, MissingExtraError, at its making in the scheduler's
        process: what was configured cannot be used; the message says which key and what to do.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        log_with_vllm()
        check_tested(self._kv_transfer_config.kv_connector_extra_config)
        self._scheduler: Scheduler | None = None
        self._worker: RankWorker | None = None
        is_scheduler = role == KVConnectorRole.SCHEDULER
        served = serve(vllm_config, kv_cache_config, is_telling=is_scheduler)
        self._answers = Answers()
        self._plan = StepPlan()
        self._kinds = kinds_of(kv_cache_config) if served is not None else ()
        self._owner = ""  # of blocks in objects, as vLLM's events name it
        self._unopened: ServedEngine | None = None  # until the workers have said how their blocks lie
        self._handshake: KvbmHandshake | None = None
        self._bound: Any = None
        self._has_begun = False
        if served is None:
            return
        self._meeting = Meeting(str(self._kv_transfer_config.engine_id))
        if is_scheduler:
            self._meeting.claim()
            if served.workers_say:
                self._unopened = served
            else:
                self._open(served, [served.blocks])
            if self._kv_transfer_config.kv_load_failure_policy != "recompute":
                log.info("load_failures.recomputed", notice='kv_load_failure_policy is "recompute" with kvbm')
                self._kv_transfer_config.kv_load_failure_policy = "recompute"
        else:
            if served.workers_say:
                self._handshake = KvbmHandshake(get_pp_group().rank_in_group, served.blocks)
            if served.blocks.why:
                return
            parallel, loaded, why = vllm_config.parallel_config, None, ""
            try:
                loaded = LoadedWeights.listening(vllm_config)
            except (ImportError, AttributeError) as error:
                why = f"this vLLM loads weights in a way that is not known here, so blocks could be of others ({error})"
            interleave = parallel.cp_kv_cache_interleave_size if parallel.decode_context_parallel_size > 1 else 1
            rank = _rank(parallel)
            meeting = self._meeting if _is_beside_scheduler(rank, parallel) else None
            hbm = copy_settings(served, self._kv_transfer_config)
            self._worker = RankWorker(
                rank,
                kv_cache_config,
                loaded=loaded,
                interleave=interleave,
                meeting=meeting,
                ring_bytes=hbm.ring_bytes,
                programs=hbm.programs,
            )
            try:
                forget_resolved(self._meeting, rank)  # of an engine that was killed
                forget_host(self._meeting)
            except KvbmError as error:  # the scheduler would believe it
                why = why or str(error)
            if why:
                self._worker.refuse(why)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """False: layers are neither waited for nor stored by themselves.

        vLLM asks this when it reads its configuration, where it uses CUDA graphs: an untested one is refused before it
        loads a model.

        Raises: ConfigError: as at the making.
        """
        check_tested(extra_config)
        return False

    def _open(self, served: ServedEngine, stages: list[StageBlocks]) -> None:
        self._scheduler = open_scheduler(served, stages, self._kv_transfer_config, self._meeting)
        said = publish_settings(served, self._kv_transfer_config)
        if said.engine_events and are_wanted(self._vllm_config):
            self._owner = said.ownership
            self._scheduler.follow_tiers(extra_keys_of, Tier.OBJECT if self._owner else Tier.NVME)
        elif said.engine_events:
            log.warning("connector.events_unpublished", remedy="start vLLM with --kv-events-config as well")
        if self._bound is not None:
            self._bind(self._scheduler)

    def give_up(self, why: str, error: Exception) -> None:
        """Begin nothing new from now on. Copies under way end properly."""
        if self._scheduler is not None and not self._scheduler.refusal:
            self._scheduler.refusal = why
            log.warning(
                "connector.failed", why=why, remedy="the engine goes on without kvbm; report it", exc_info=error
            )
        elif self._worker is not None:
            self._worker.refuse(why)

    @property
    def requires_kv_delivery(self) -> bool:
        """A block that is not stored is a miss later, no more."""
        return False

    # -- the scheduler's process ---------------------------------------------------------------------------------------

    @_harmless(lambda: None)
    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """Meet the engine's prefix cache."""
        super().bind_kv_cache_manager(kv_cache_manager)
        self._bound = kv_cache_manager
        if self._scheduler is not None:
            self._bind(self._scheduler)

    def _bind(self, scheduler: Scheduler) -> None:
        bound = self._bound
        scheduler.bind(bound.block_pool, bound.get_block_ids, bound.coordinator.get_num_cacheable_tokens)

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        """What workers say of their blocks, once, before the first request.

        Where they were not asked, it is others' and of no concern.

        Raises: as at its making.
        """
        said = {one.stage: one.blocks for one in metadata.values() if isinstance(one, KvbmHandshake)}
        self._hear(said)

    def _hear(self, said: dict[int, StageBlocks]) -> None:
        """Open the instance once all stages are known to be served; say why not otherwise."""
        served, self._unopened = self._unopened, None
        if served is None:
            return
        stages, why = all_stages(said, served.stages)
        if why:
            tell_not_serving(why)
        else:
            self._open(served, stages)

    @_harmless(lambda: None)
    def on_new_request(self, request: Any) -> None:
        """A request has come."""
        self._hear({})  # who has said nothing so far never will
        if self._serves():
            self._scheduler.requests.state_of(request)  # type: ignore[union-attr]

    @_harmless(lambda: (0, False))
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens that can be loaded beyond those vLLM has; None: ask again."""
        if not self._serves():
            return 0, False
        assert self._scheduler is not None
        tokens = self._scheduler.loads.matched(request, num_computed_tokens)
        parts_at = self._scheduler.loads.parts_at(request.request_id)
        if parts_at > request.shared_prefix_boundary:  # vLLM computes a state there, as where prompts part in HBM
            request.shared_prefix_boundary = parts_at
        return tokens, bool(tokens)

    @_harmless(lambda: None)
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """vLLM has given the request blocks."""
        if self._scheduler is None:
            return
        try:
            block_ids = blocks.get_block_ids() if num_external_tokens else ()
            self._scheduler.allocated(request, block_ids, num_external_tokens)
        except Exception:
            if num_external_tokens:  # the request waits for them by now
                self._scheduler.loads.abandon(request.request_id)
            raise

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[CacheHitSource, int]:
        """Where the tokens of the load planned last come from."""
        hits = self._scheduler.loads.hits_of_last() if self._scheduler is not None else {}
        total = sum(hits.values())
        if not num_external_tokens or not total:
            return super().get_external_cache_hit_sources(request, num_external_tokens)  # type: ignore[no-any-return]
        sources: dict[CacheHitSource, int] = {}
        left = num_external_tokens
        for tier, blocks in sorted(hits.items(), reverse=True):
            source = _SOURCES.get(tier, CacheHitSource.EXTERNAL_UNSPECIFIED)
            tokens = left if tier == min(hits) else num_external_tokens * blocks // total
            sources[source] = sources.get(source, 0) + tokens
            left -= tokens
        return {source: tokens for source, tokens in sources.items() if tokens}

    @_harmless(KvbmMetadata)
    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """The plan of a step."""
        if self._scheduler is None:
            return KvbmMetadata()
        if not self._has_begun:  # the ranks have found each word by now; an engine that is killed leaves nothing
            self._has_begun = True
            self._meeting.close()
        scheduled = scheduler_output.num_scheduled_tokens
        if self._scheduler.loads.is_asked_again:
            self._scheduler.loads.is_asked_again = False
            if not scheduled:  # else an engine in its user's process would spin, and keep our threads from the GIL
                time.sleep(_IDLE_ASK_S)
        tokens = scheduler_output.total_num_scheduled_tokens
        gone = scheduler_output.preempted_req_ids or (), scheduler_output.finished_req_ids
        offers, taken = offers_of(scheduler_output), taken_blocks(scheduler_output)
        return KvbmMetadata(self._scheduler.plan(scheduled, tokens, gone[0], offers, gone[1], taken))

    @_harmless(lambda: None)
    def update_connector_output(self, connector_output: Any) -> None:
        """What the workers answer."""
        if self._scheduler is None:
            return
        for request_id in connector_output.failed_recving or ():
            self._scheduler.loads.failed(request_id)
        answered = connector_output.kv_connector_worker_meta
        if isinstance(answered, KvbmWorkerMetadata):
            self._scheduler.answered(answered.answers)

    @_harmless(lambda: (False, None))
    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """A request has ended; vLLM may free its blocks: those still to be stored are kept by a reference of ours."""
        return self.request_finished_all_groups(request, (block_ids,))

    @_harmless(lambda: (False, None))
    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The same, of all KV groups."""
        if self._scheduler is None:
            return False, None
        return False, self._scheduler.finished(request, block_ids, request.status in _ANSWERED)

    def register_finished_partial_tail(self, request: Any, block_ids: Any, partial_tail_offloads: Any) -> bool:
        """False: a state within a block is nobody's block, and not kept."""
        return False

    def has_pending_push_work(self) -> bool:
        """Whether something waits for workers: an engine without requests goes on stepping for it."""
        return self._scheduler is not None and self._scheduler.has_work

    def has_pending_block_frees(self) -> bool:
        """Whether blocks will come free without a preemption."""
        return self._scheduler is not None and self._scheduler.stores.has_work()

    @_harmless(lambda: False)
    def reset_cache(self) -> bool | None:
        """Empty this instance's own tiers."""
        if self._scheduler is not None:
            self._scheduler.clear()
        return True

    # -- a worker's process --------------------------------------------------------------------------------------------

    @_harmless(lambda: None)
    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """The tensors blocks lie in, and what vLLM has resolved for them."""
        if self._worker is None:
            return
        self._worker.register(kv_caches)
        rank = _rank(self._vllm_config.parallel_config)
        try:
            leave_resolved(self._meeting, rank, resolved_of(self._vllm_config, self._kv_cache_config, kv_caches))
        except (KvbmError, AttributeError, RuntimeError) as error:  # the namespace is then shared with nobody
            log.warning("identity.unresolved", rank=rank, why=str(error))

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """True: an engine that sleeps has nothing under way, and its KV comes back where it was.

        Asked since vLLM 0.33.
        """
        return True

    @_harmless(lambda: None)
    def unregister_kv_caches(self) -> None:
        """The tensors' memory goes (vLLM 0.33)."""
        if self._worker is not None:
            self._worker.suspend()

    @_harmless(lambda: None)
    def restore_kv_caches(self) -> None:
        """It is back (vLLM 0.33)."""
        if self._worker is not None:
            self._worker.resume()

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Nothing: blocks under way are kept by references of the scheduler's half, whoever is preempted."""

    @_harmless(lambda: None)
    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """What the scheduler has to know of this rank's stage.

        Nothing inside another connector, which would hand it on in the place of others'.

        vLLM asks at the end of its start. Where the scheduler waits for no word HOST is there by then, and what is left
        of mapping and registering it is waited for.
        """
        if self._handshake is None and self._worker is not None:
            self._worker.settle_host()
        return self._handshake if get_kv_transfer_group() is self else None

    @_harmless(lambda: None)
    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """A step begins; its forward is not launched yet."""
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None and isinstance(connector_metadata, KvbmMetadata):
            self._worker.begin_step(connector_metadata.plan.step)

    @_harmless(lambda: None)
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin the step's copies."""
        metadata = self._connector_metadata
        if self._worker is None or not isinstance(metadata, KvbmMetadata):
            return
        self._plan = metadata.plan
        if self._plan.host is not None:
            self._worker.begin(self._plan)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: requests wait for their loads, layers do not."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: whole blocks are stored once they are computed."""

    def wait_for_save(self) -> None:
        """Nothing: the blocks of a store stay as they are until all ranks have answered."""

    @_harmless(KVConnectorTransferResults)
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Requests whose loads have ended on this rank."""
        if self._worker is None or self._worker.is_idle:
            return KVConnectorTransferResults()
        self._answers = self._worker.finish(_IDLE_WAIT_S if self._plan.is_idle else 0.0)
        self._plan = StepPlan()
        received = self._worker.received()
        return KVConnectorTransferResults(finished_recving=received.finished, failed_recving=received.failed)

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """What has ended on this rank since the last time."""
        if not self._answers:
            return None
        answers, self._answers = self._answers, Answers()
        return KvbmWorkerMetadata(answers)

    # -- both ----------------------------------------------------------------------------------------------------------

    @_harmless(lambda: None)
    def get_kv_connector_stats(self) -> KvbmStats | None:
        """What has been counted since the last time."""
        half = self._worker or self._scheduler
        numbers = half.take_numbers() if half is not None else {}
        return KvbmStats(data=numbers) if numbers else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvbmStats | None:
        """Stats from what vLLM has sent between its processes."""
        return KvbmStats() if data is None else KvbmStats(data=data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KvbmPromMetrics:
        """The connector's metrics beside vLLM's own."""
        return KvbmPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @_harmless(tuple)
    def take_events(self) -> Iterable[Any]:
        """What kvbm's tiers hold now, or no more, among vLLM's own KV events where those are published and
        `publish.engine_events` is set. kvbm's own stream says more.
        """
        if self._scheduler is None or self._scheduler.events is None:
            return ()
        return [kv_event(told, self._kinds, self._owner) for told in self._scheduler.events.take()]

    def shutdown(self) -> None:
        """End the instance, or the rank's copies."""
        if self._scheduler is not None:
            self._scheduler.close()
            self._meeting.close()
            self._meeting.release()
        if self._worker is not None:
            self._worker.flush(_FLUSH_S)
            self._worker.close()

    def _serves(self) -> bool:
        return self._scheduler is not None and not self._scheduler.refusal


def _is_beside_scheduler(rank: int, parallel: Any) -> bool:
    """Whether a rank is on the scheduler's host, which is the first."""
    return bool(rank * parallel.nnodes_within_dp < parallel.world_size)


def _rank(parallel: Any) -> int:
    """This worker's rank among all of its engine, in the order of `Ranks`."""
    tensor, prefill = parallel.tensor_parallel_size, parallel.prefill_context_parallel_size
    stage, part = get_pp_group().rank_in_group, get_pcp_group().rank_in_group
    return int((stage * prefill + part) * tensor + get_tensor_model_parallel_rank())
