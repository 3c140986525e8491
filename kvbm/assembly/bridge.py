"""Settings → a bridge: sources, their instances, and what publishes them."""

from __future__ import annotations

import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import msgspec

from kvbm.assembly.logs import log_style
from kvbm.assembly.native import NEW_FOREIGN_TABLE
from kvbm.assembly.reload import Reloads
from kvbm.assembly.services import nats_url, stream_credentials
from kvbm.assembly.start import ask_stream, epoch_in_catalog, kvbm_version
from kvbm.bridge.found import FoundEngine, find
from kvbm.bridge.instance import BridgedInstance, BridgeLimits, Names
from kvbm.bridge.polled import PolledEngine
from kvbm.bridge.run import run_sources
from kvbm.bridge.sockets import Address, PublisherSockets, zmq_module
from kvbm.bridge.source import BridgedSource, Sockets
from kvbm.bridge.subscribed import SubscribedWorker
from kvbm.bridge.table import TableLedger, engine_table
from kvbm.config import Settings, SourceSettings, check_settings
from kvbm.core.errors import ConfigError, KvbmError
from kvbm.core.events import PoolStated
from kvbm.core.ids import UNKNOWN, Epoch, InstanceId, Reach, Tier
from kvbm.manager.record.publisher_port import Publishing
from kvbm.safe_log import SafeLog
from kvbm.service_manager import ServiceManager
from kvbm.streams.foreign.declared import Said
from kvbm.streams.foreign.dynamo import SCHEME, DynamoEvents
from kvbm.streams.foreign.identity import ForeignSource
from kvbm.streams.foreign.state import Decode, ForeignState
from kvbm.streams.foreign.trtllm import TrtllmEvents
from kvbm.streams.foreign.wire import Kind, decode_batch
from kvbm.streams.nats.permissions import Role
from kvbm.streams.nats.stream import NatsStream
from kvbm.streams.publisher.thread import PublisherThread
from kvbm.telemetry.stderr_log import to_standard_error
from kvbm.tenant_secrets import TenantSecrets
from kvbm_ledger.hang_ups import HANG_UPS

log = SafeLog()

_ASKERS = 16  # of the stream, at the start
_SEEK_S = 2.0  # between asks where an engine's events are
_CLOSE_S = 5.0
_MOST_JOURNAL_BYTES = 256 << 20  # of one source, while the stream takes nothing


def run_bridge(settings: Settings, goes_on: Callable[[], bool] = lambda: True, reloads: Reloads | None = None) -> int:
    """Bridge every source of the settings until interrupted, or told otherwise.

    Args:
        reloads: reads the settings again at SIGHUP.
    Raises: ConfigError, StreamError, MissingExtraError: what cannot be used, and what to do.
    """
    check_settings(settings)
    if not settings.bridge.sources:
        raise ConfigError("bridge.sources names no engine; write [bridge.sources.NAME] with endpoint, replay and model")
    zmq = zmq_module()
    to_standard_error(log_style(settings.log))
    with ExitStack() as opened:
        url = nats_url(settings, opened)
        engines = _Engines(zmq, settings, url)
        opened.callback(engines.close)
        sources = engines.open_known()
        finder = _Finder(engines, {name: one for name, one in settings.bridge.sources.items() if _is_sought(one)})
        opened.callback(finder.close)
        log.info("bridge.started", sources=len(sources), sought=len(finder.sought))
        manager = ServiceManager()
        manager.ready(f"{len(sources)} sources")

        def goes_on_with_found() -> bool:
            while found := finder.take():
                sources.extend(found)
            return _goes_on(goes_on, reloads, manager, len(sources))

        try:
            run_sources(zmq, sources, goes_on_with_found)
        finally:
            manager.stopping()
    return 0


def _goes_on(goes_on: Callable[[], bool], reloads: Reloads | None, manager: ServiceManager, sources: int) -> bool:
    """Do what SIGHUP asks, if it came."""
    if reloads is not None and HANG_UPS.take():
        if HANG_UPS.terminal_is_gone():
            return False
        manager.reloading()
        reloads.reload()
        manager.ready(f"{sources} sources")
    manager.alive_if_due()
    return goes_on()


def _is_sought(source: SourceSettings) -> bool:
    """Whether the endpoint is a server that says where its events are."""
    return source.kind == "sglang" and source.endpoint.startswith(("http://", "https://"))


class _Engines:
    """Makes the sources of engines, and their instances, one engine after the other. Any thread."""

    def __init__(self, zmq: Any, settings: Settings, url: str) -> None:
        self._zmq, self._context, self._settings, self._url = zmq, zmq.Context(), settings, url
        self._opening, self._is_closed = threading.Lock(), False
        self._tenants = TenantSecrets(settings.catalog.tenant_secrets, settings.catalog.tenant_secrets_file)

    def open_known(self) -> list[BridgedSource]:
        """Those that need not be sought."""
        known = [(name, one) for name, one in self._settings.bridge.sources.items() if not _is_sought(one)]
        return self.open(known)

    def open(self, engines: Iterable[tuple[str, SourceSettings]]) -> list[BridgedSource]:
        """Sources of engines, one for each of their ranks, whose streams have begun. Raises what says why not."""
        with self._opening:  # for as long as the stream is waited for, at most
            if self._is_closed:
                raise ConfigError("the bridge has ended; start it again")
            return self._open(engines)

    def close(self) -> None:
        """Open no more. ZeroMQ is left to the process where an engine is just being opened, as `_Finder.close` says."""
        if not self._opening.acquire(timeout=_CLOSE_S):
            return
        self._is_closed = True
        self._opening.release()
        self._context.destroy(0)

    def _open(self, engines: Iterable[tuple[str, SourceSettings]]) -> list[BridgedSource]:
        ranks: list[_Rank] = []
        try:
            for name, source in engines:
                secret = self._tenants.get(source.tenant, "").encode()
                ranks += _ranks(self._zmq, self._context, name, source, secret)
            with ThreadPoolExecutor(_ASKERS) as askers:
                list(askers.map(partial(_open_instance, self._settings, self._url), ranks))
        except BaseException:
            for opened in ranks:
                opened.source.close(0.0)
            raise
        return [rank.source for rank in ranks]


class _Rank(NamedTuple):
    """One rank of an engine: what hears it, and the ledger of what it holds, whose stream has not begun."""

    source: BridgedSource
    ledger: TableLedger
    known: SourceSettings


class _Finder:
    """Asks servers where their events are, in a thread, until each has said it.

    Attributes:
        sought: name → server, of those that have not.
    """

    def __init__(self, engines: _Engines, sought: dict[str, SourceSettings]) -> None:
        self.sought = sought
        self._engines, self._end = engines, threading.Event()
        self._found: queue.SimpleQueue[list[BridgedSource]] = queue.SimpleQueue()
        self._said: dict[str, str] = {}
        self._thread = threading.Thread(target=self._run, name="kvbm-bridge-find", daemon=True)
        if sought:
            self._thread.start()

    def take(self) -> list[BridgedSource]:
        """Sources of one more engine that was found; none: none was."""
        try:
            return self._found.get_nowait()
        except queue.Empty:
            return []

    def close(self) -> None:
        """Seek no more. A server that is just being asked is left behind after a while; what it says is not used."""
        self._end.set()
        if self._thread.is_alive():
            self._thread.join(_CLOSE_S)
            if self._thread.is_alive():
                remedy = "none: it ends with the process"
                log.warning("bridge.thread_left", sought=list(self.sought), after_s=_CLOSE_S, remedy=remedy)
        self._close_found()

    def _close_found(self) -> None:
        while left := self.take():
            for source in left:
                source.close(0.0)

    def _run(self) -> None:
        while self.sought and not self._end.is_set():
            for name, source in list(self.sought.items()):
                try:
                    self._seek(name, source)
                except KvbmError as error:
                    self._remark(name, str(error))
                except Exception as error:  # noqa: BLE001  the thread goes on: others are sought, and this one again
                    self._remark(name, f"{type(error).__name__} {error}".strip())
            self._end.wait(_SEEK_S)

    def _seek(self, name: str, source: SourceSettings) -> None:
        """Open the source of one server. Raises what says why not."""
        found = _as_found(source, find(source.endpoint))
        if self._end.is_set():
            return
        opened = self._engines.open([(name, found)])
        del self.sought[name]
        self._found.put(opened)
        if self._end.is_set():  # nobody may take them any more
            self._close_found()
        log.info("bridge.engine_found", source=name)

    def _remark(self, name: str, why: str) -> None:
        if self._said.get(name) != why:
            self._said[name] = why
            log.warning("bridge.engine_not_found", source=name, error=why, retry_s=_SEEK_S)


def _as_found(source: SourceSettings, found: FoundEngine) -> SourceSettings:
    """A source's settings with what its server has said in the place of what they leave open."""
    return msgspec.structs.replace(
        source,
        endpoint=found.endpoint,
        replay=source.replay or found.replay,
        topic=source.topic or found.topic,
        ranks=found.ranks,
        model=source.model or found.model,
        block_tokens=source.block_tokens or found.block_tokens,
    )


def _ranks(zmq: Any, context: Any, name: str, settings: SourceSettings, secret: bytes) -> list[_Rank]:
    """An engine, rank by rank."""
    can_replay = bool(settings.replay)
    known = ForeignSource(
        settings.model,
        settings.tenant,
        settings.revision or UNKNOWN,
        secret,
        settings.pool,
        settings.counts_copies and settings.kind == "vllm",
        settings.blocks,
        scheme=SCHEME if settings.kind == "dynamo" else "sha256",
    )
    pools = [PoolStated(tier, 0, 0) for tier in (Tier.HBM, Tier.HOST, Tier.NVME)]
    if settings.pool:
        pools.append(PoolStated(Tier.OBJECT, 0, 0, Reach.CLUSTER, settings.pool))
    said = Said(settings.topology, f"{settings.kind} by bridge", kvbm_version())
    made = []
    for rank, sockets in enumerate(_listeners(zmq, context, settings)):
        mine = rank if settings.ranks > 1 else None
        whole = name if mine is None else f"{name}-dp{rank}"
        blocks, ledger = engine_table(
            NEW_FOREIGN_TABLE,
            InstanceId(whole),
            known,
            pools,
            said,
            takes_messages=settings.kind in ("vllm", "sglang"),
            clears_all=settings.kind == "sglang",
        )
        if settings.block_tokens:
            ledger.declare(blocks.expect(settings.block_tokens))
        state = ForeignState(blocks, _decoder(settings), can_replay, mine)
        source = BridgedSource(whole, sockets, state, can_replay, settings.silence_s, time.monotonic)
        made.append(_Rank(source, ledger, settings))
    return made


def _listeners(zmq: Any, context: Any, settings: SourceSettings) -> list[Sockets]:
    """What hears an engine's ranks."""
    ranks = range(settings.ranks)
    if settings.kind == "trtllm":
        engine = PolledEngine(settings.endpoint, settings.ranks)
        engine.start()
        return list(engine.ranks)
    if settings.kind == "dynamo":
        ends = settings.endpoint, settings.topic, settings.worker
        workers = [SubscribedWorker(*ends, rank if len(ranks) > 1 else None, settings.health) for rank in ranks]
        for worker in workers:
            worker.start()
        return list(workers)
    address = Address(settings.endpoint, settings.replay, settings.topic)
    with ExitStack() as opened:
        made: list[Sockets] = []
        for rank in ranks:
            made.append(PublisherSockets(zmq, context, address.of_rank(rank)))
            opened.callback(made[-1].close)
        opened.pop_all()
        return made


def _decoder(settings: SourceSettings) -> Decode:
    """Bytes of a message of such an engine → what it says."""
    match settings.kind:
        case "trtllm":
            return TrtllmEvents(settings.block_tokens)
        case "dynamo":
            return DynamoEvents(settings.block_tokens)
        case kind:
            return partial(decode_batch, kind=Kind(kind))


def _open_instance(settings: Settings, url: str, rank: _Rank) -> None:
    """Begin the instance's epoch, and publish it from now on."""
    source, ledger, known = rank
    instance = InstanceId(source.name)
    named = msgspec.structs.replace(
        settings,
        instance=msgspec.structs.replace(settings.instance, id=source.name),
        nats=msgspec.structs.replace(settings.nats, nkey_seed=known.nkey_seed or settings.nats.nkey_seed),
    )
    credentials = stream_credentials(named, Role.INSTANCE, source.name)
    on_stream = ask_stream(named, instance, url, credentials)
    epoch = Epoch(max(on_stream.epoch, epoch_in_catalog(named, instance)) + 1)
    made = BridgedInstance(
        Names(instance, settings.instance.cluster, secrets.token_hex(8)),
        ledger,
        BridgeLimits(settings.snapshots.least_s, settings.journal.waiting_bytes, _MOST_JOURNAL_BYTES),
        time.monotonic,
        time.time_ns,
        source,
        epoch,
    )

    async def connect(url: str, timeout_s: float) -> NatsStream:
        return await NatsStream.connect(url, timeout_s, credentials=credentials, replicas=settings.nats.replicas)

    publisher = PublisherThread(
        made.log,
        url,
        settings.instance.cluster,
        instance,
        made.port,
        settings.nats.heartbeat_s,
        connect,
        window_bytes=settings.nats.window_bytes,
        linger_s=settings.nats.linger_s,
    )
    with ExitStack() as opened:
        opened.callback(publisher.stop, 0.0)  # while the source, which closes the instance, has none
        publisher.start()
        made.start(
            Publishing(
                publisher.notify,
                lambda: publisher.published,
                publisher.stop,
                publisher.snapshot_began,
                lambda: publisher.trouble,
                lambda: publisher.place,
            )
        )
        source.instance = made
        opened.pop_all()
