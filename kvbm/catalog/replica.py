"""A catalog's view of its cluster in the caller's own process: for a router that asks more often than a socket likes.

A thread of its own follows the stream, as the service does and by the same parts; whoever asks is answered at once, by
his own thread. Beside the service it has no SQL, no archive and no callers: it begins with the service's newest
checkpoint, or else with the stream's first message, and nobody learns that it is there. What it routes only it
remembers.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import MappingProxyType
from typing import Literal, NamedTuple, TypeVar, Unpack

import msgspec

from kvbm.catalog.access.callers import EMBEDDED, Caller
from kvbm.catalog.answers.groups_together import lookup_together
from kvbm.catalog.answers.prompts import ApiError
from kvbm.catalog.answers.queries import Queries
from kvbm.catalog.answers.routed import routed, routing_task
from kvbm.catalog.answers.token_prompts import PromptBlocks, TokenPrompts
from kvbm.catalog.degraded import Degraded
from kvbm.catalog.follow.checkpoints import Checkpointing, LoadedCheckpoint, load_newest
from kvbm.catalog.follow.follower import FIRST, StreamFollower, not_reached
from kvbm.catalog.follow.heartbeats import HeartbeatFollower
from kvbm.catalog.follow.instance_sequence import Changes
from kvbm.catalog.follow.lag import StreamLag
from kvbm.catalog.follow.sequencer import Sequencer
from kvbm.catalog.follow.snapshots import SnapshotRequests
from kvbm.catalog.follow.upkeep import IndexUpkeep
from kvbm.catalog.index.cluster_index import ClusterIndex, NewIndex, PlainApplied
from kvbm.catalog.index.plain_frames import PlainRun
from kvbm.catalog.members.downtime import FORGET_S, Downtimes
from kvbm.catalog.members.liveness import LIVENESS_S
from kvbm.config.settings import RoutingSettings
from kvbm.core.answers import (
    LIMIT,
    MAX_HASHES,
    MAX_PEERS,
    BlockAnswer,
    FindAnswer,
    InstanceSummary,
    LookupAnswer,
    LookupRequest,
    NamespaceSummary,
    PositionWanted,
    PresenceAnswer,
    ReadyAnswer,
    RouteAnswer,
)
from kvbm.core.arguments import check_run, checked_hash
from kvbm.core.backend import Backend
from kvbm.core.checks import check_text, checked_int
from kvbm.core.errors import ArgumentValueError, CatalogClosedError, CatalogError, CatalogRefusedError, StreamError
from kvbm.core.ids import Epoch, InstanceId, Namespace, NamespaceId, Offset
from kvbm.core.parts import ALL_PARTS, has_parts, words_of
from kvbm.core.prompt_tokens import PromptTokens, checked_prompt
from kvbm.core.questions import checked_limit, checked_names, checked_peers, checked_place, checked_wait, id_of
from kvbm.core.token_questions import LookupMore, RouteMore, TokenQuestions
from kvbm.safe_log import SafeLog
from kvbm.streams.base import EventReader, EventStream, Heartbeat, Position, StreamMessage, still_holds

log = SafeLog()
A = TypeVar("A")

BEGIN_WAIT_S = 300.0  # a checkpoint may have some GB
CLOSE_WAIT_S = 5.0
FORGET_LOOK_S = 30.0
_POLL_S = 0.02
_BEHIND_S = 2.0  # a view that was confirmed so lately counts as one that hears the stream


class ReplicaSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a replica needs to follow a cluster. As in the service's settings."""

    cluster: str | None = None
    parts: tuple[int, ...] = ALL_PARTS
    connect_s: float = 5.0
    liveness_s: float = LIVENESS_S
    forget_s: float = FORGET_S
    whole_wait_s: float = 10.0
    capacity: int = 100_000_000
    routing: RoutingSettings = RoutingSettings()


class CatalogReplica(TokenQuestions):
    """A `kvbm.Catalog` that answers without asking anybody. `kvbm.open_replica` makes it; any thread may call it.

    Its answers are those of the service at the same positions of the stream, with their age. It sees all tenants. Close
    it when it is done with; a process that forks opens it after the fork.
    """

    def __init__(
        self,
        settings: ReplicaSettings,
        connect: Callable[[], Awaitable[EventStream]],
        fetch: Callable[[Path], bool] | None,
        backend: Backend,
        new_index: NewIndex,
        secrets: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Prefer `kvbm.open_replica`.

        Args:
            secrets: tenant → secret, to hash tokens with.
            connect: to the stream. Raises StreamError.
            fetch: puts the service's newest checkpoint into a folder, if it has one. Raises CatalogError. None: nobody
                is asked.
        """
        super().__init__(backend.sequence_hashes)
        self._settings, self._connect, self._fetch = settings, connect, fetch
        self._backend, self._new_index, self._secrets = backend, new_index, secrets
        self._guard = threading.RLock()  # held while what answers rest on changes, and while it is asked
        self._begun: Future[_View] = Future()
        self._view: _View | None = None
        self._failure: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._main: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._run, name="kvbm-replica", daemon=True)

    def start(self, timeout_s: float = BEGIN_WAIT_S) -> None:
        """Begin to follow. Raises StreamError: the stream does not answer in time."""
        self._thread.start()
        try:
            self._view = self._begun.result(timeout_s)
        except TimeoutError:
            self.close()
            raise StreamError(
                f"the replica has not begun within {timeout_s:g} s; see the log for what it waits for",
                timeout_s=timeout_s,
            ) from None
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Stop following. Idempotent."""
        self._view, loop, main = None, self._loop, self._main
        if loop is not None and main is not None and self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # it has just ended
                loop.call_soon_threadsafe(main.cancel)
            self._thread.join(CLOSE_WAIT_S)

    # -- questions ----------------------------------------------------------------------------------------------------

    def lookup(
        self,
        namespace: Namespace | NamespaceId,
        hashes: bytes,
        at_least: Sequence[PositionWanted] = (),
        wait_s: float = 1.0,
        timeout_s: float | None = None,
        limit: int = LIMIT,
        instances: Sequence[str] | None = None,
    ) -> LookupAnswer:
        """Who has how much of a prefix. As `CatalogClient.lookup`; `timeout_s` is not needed."""
        return self._answer(Queries.lookup, namespace, hashes, at_least, wait_s, limit, instances)

    def presence(
        self,
        namespace: Namespace | NamespaceId,
        hashes: bytes,
        at_least: Sequence[PositionWanted] = (),
        wait_s: float = 1.0,
        timeout_s: float | None = None,
        limit: int = LIMIT,
        instances: Sequence[str] | None = None,
    ) -> PresenceAnswer:
        """Which of these blocks are held, and by whom. As `CatalogClient.presence`; `timeout_s` is not needed."""
        return self._answer(Queries.presence, namespace, hashes, at_least, wait_s, limit, instances)

    def find(
        self,
        namespace: Namespace | NamespaceId,
        hashes: bytes,
        first: int = 0,
        asker: str = "",
        topology: Sequence[str] = (),
        at_least: Sequence[PositionWanted] = (),
        wait_s: float = 1.0,
        timeout_s: float | None = None,
        limit: int = MAX_PEERS,
        instances: Sequence[str] | None = None,
    ) -> FindAnswer:
        """What of these blocks can be read from elsewhere. As `CatalogClient.find`; `timeout_s` is not needed."""
        begin, place = checked_int(first, "first", most=MAX_HASHES), checked_place(topology)
        check_text(asker, "asker")

        def ask(
            queries: Queries, key: NamespaceId, run: bytes, caller: Caller, most: int, only: Sequence[InstanceId] | None
        ) -> FindAnswer:
            return queries.find(key, run, caller, most, only, begin, asker, place)

        return self._answer(ask, namespace, hashes, at_least, wait_s, checked_peers(limit), instances)

    def route(
        self,
        namespace: Namespace | NamespaceId,
        hashes: bytes,
        input_tokens: int,
        at_least: Sequence[PositionWanted] = (),
        wait_s: float = 1.0,
        timeout_s: float | None = None,
        limit: int = LIMIT,
        instances: Sequence[str] | None = None,
        latency: Literal["interactive", "standard", "batch"] = "standard",
        deadline_s: float | None = None,
        phase: Literal["both", "prefill", "decode"] = "both",
    ) -> RouteAnswer:
        """Where to send a prompt; this replica remembers it as sent. As `CatalogClient.route`."""
        check_run(hashes)
        tokens, most = checked_int(input_tokens, "input_tokens"), checked_limit(limit)
        key, only = id_of(namespace), None if instances is None else _names(instances)
        queries = self._answering(at_least, wait_s).queries
        try:
            with self._guard:
                fields = namespace if isinstance(namespace, Namespace) else queries.namespace(key)
                task = routing_task(key, fields, hashes, tokens, "", latency, deadline_s, phase)
                return routed(queries, task, fields, key, EMBEDDED, most, only)
        except ApiError as error:
            raise _refused(error) from None

    def lookup_prompt(
        self, prompt: PromptTokens, timeout_s: float | None = None, **more: Unpack[LookupMore]
    ) -> LookupAnswer:
        asked = LookupRequest(**checked_prompt(prompt))
        limit, only, view = self._prepared(more)
        try:
            with self._guard:
                blocks = self._blocks(view, asked)
                if blocks.groups:
                    return lookup_together(view.queries, blocks, EMBEDDED, limit, only)
                return view.queries.lookup(id_of(blocks.namespace), blocks.hashes, EMBEDDED, limit, only)
        except ApiError as error:
            raise _refused(error) from None

    def route_prompt(
        self, prompt: PromptTokens, timeout_s: float | None = None, **more: Unpack[RouteMore]
    ) -> RouteAnswer:
        asked = LookupRequest(**checked_prompt(prompt))
        limit, only, view = self._prepared(more)
        latency, deadline_s = more.get("latency", "standard"), more.get("deadline_s")
        try:
            with self._guard:
                blocks = self._blocks(view, asked)
                key, fields = id_of(blocks.namespace), blocks.namespace
                known = fields if isinstance(fields, Namespace) else None
                count, phase = len(asked.tokens or ()), more.get("phase", "both")
                task = routing_task(key, known, blocks.hashes, count, "", latency, deadline_s, phase)
                return routed(view.queries, task, known, key, EMBEDDED, limit, only, prompt=blocks)
        except ApiError as error:
            raise _refused(error) from None

    def lookup_many(
        self,
        namespace: Namespace | NamespaceId,
        prompts: Sequence[bytes],
        timeout_s: float | None = None,
        limit: int = LIMIT,
    ) -> list[LookupAnswer]:
        """`lookup` of several prompts."""
        return [self.lookup(namespace, hashes, limit=limit) for hashes in prompts]

    def presence_many(
        self,
        namespace: Namespace | NamespaceId,
        runs: Sequence[bytes],
        timeout_s: float | None = None,
        limit: int = LIMIT,
    ) -> list[PresenceAnswer]:
        """`presence` of several runs of blocks."""
        return [self.presence(namespace, hashes, limit=limit) for hashes in runs]

    def find_many(
        self,
        namespace: Namespace | NamespaceId,
        runs: Sequence[bytes],
        firsts: Sequence[int] | None = None,
        asker: str = "",
        topology: Sequence[str] = (),
        timeout_s: float | None = None,
        limit: int = MAX_PEERS,
    ) -> list[FindAnswer]:
        """`find` of several runs of blocks."""
        begins = [0] * len(runs) if firsts is None else firsts
        if len(begins) != len(runs):
            raise ArgumentValueError("firsts", f"has {len(begins)} numbers for {len(runs)} runs")
        return [
            self.find(namespace, hashes, first, asker, topology, limit=limit)
            for hashes, first in zip(runs, begins, strict=True)
        ]

    def route_many(
        self,
        namespace: Namespace | NamespaceId,
        prompts: Sequence[bytes],
        input_tokens: Sequence[int],
        timeout_s: float | None = None,
        limit: int = LIMIT,
    ) -> list[RouteAnswer]:
        """`route` of several prompts, one after the other."""
        if len(input_tokens) != len(prompts):
            raise ArgumentValueError("input_tokens", f"has {len(input_tokens)} numbers for {len(prompts)} prompts")
        return [
            self.route(namespace, hashes, tokens, limit=limit)
            for hashes, tokens in zip(prompts, input_tokens, strict=True)
        ]

    def block(self, namespace: Namespace | NamespaceId, block: bytes) -> BlockAnswer:
        """Who holds one block."""
        key, wanted = id_of(namespace), checked_hash(block, "block")
        queries = self._answering((), 0.0).queries
        with self._guard:
            return queries.block(key, wanted)

    def instances(self) -> list[InstanceSummary]:
        """All instances, by name."""
        queries = self._following().queries
        with self._guard:
            return queries.instances()

    def instance(self, instance: InstanceId | str) -> InstanceSummary | None:
        """One instance; None when it is not known."""
        return next((found for found in self.instances() if found.instance == instance), None)

    def namespaces(self) -> list[NamespaceSummary]:
        """All namespaces whose fields are known, by id."""
        queries = self._following().queries
        with self._guard:
            return queries.namespaces()

    def ready(self) -> ReadyAnswer:
        """Whether answers are complete, and what does not work."""
        view = self._following()
        with self._guard:
            reason = (
                f"the replica cannot go on: {self._failure}"
                if self._failure is not None
                else view.follower.why_unready()
            )
            return ReadyAnswer(
                ready=not reason,
                reason=reason,
                degraded="; ".join([*([str(view.degraded)] if view.degraded else []), *view.queries.staleness()]),
                stream_sequence=view.sequencer.sequence,
                lag_messages=view.lag.known_messages(time.monotonic()),
                parts=words_of(self._settings.parts),
            )

    def wait_ready(self, timeout_s: float = 30.0) -> None:
        """Wait until answers are complete. Raises CatalogError: they are not in time; says why."""
        deadline_s = time.monotonic() + timeout_s
        while not (answer := self.ready()).ready:
            if time.monotonic() >= deadline_s:
                raise CatalogError(f"the replica is not ready after {timeout_s:g} s: {answer.reason}")
            time.sleep(_POLL_S)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _following(self) -> _View:
        if self._view is None:
            raise CatalogClosedError("the replica is closed; kvbm.open_replica makes another")
        return self._view

    def _prepared(self, more: LookupMore | RouteMore) -> tuple[int, Sequence[InstanceId] | None, _View]:
        """How many instances are to be named, which are looked at, and the view to ask."""
        limit, names = checked_limit(more.get("limit", LIMIT)), more.get("instances")
        only = None if names is None else _names(names)
        return limit, only, self._answering(more.get("at_least", ()), more.get("wait_s", 1.0))

    def _blocks(self, view: _View, asked: LookupRequest) -> PromptBlocks:
        prompts = TokenPrompts(view.queries, self._secret_of, self._backend)
        return prompts.hashing(EMBEDDED, asked, asked.tokens or [])()

    def _secret_of(self, caller: Caller, namespace: Namespace) -> str | None:
        return self._secrets.get(namespace.tenant, None if namespace.tenant else "")

    def _answer(
        self,
        ask: Callable[..., A],
        namespace: Namespace | NamespaceId,
        hashes: bytes,
        at_least: Sequence[PositionWanted],
        wait_s: float,
        limit: int,
        instances: Sequence[str] | None,
    ) -> A:
        """What a method of `Queries` says of some blocks."""
        check_run(hashes)
        key, most = id_of(namespace), checked_limit(limit)
        only = None if instances is None else _names(instances)
        queries = self._answering(at_least, wait_s).queries
        with self._guard:
            return ask(queries, key, hashes, EMBEDDED, most, only)

    def _answering(self, at_least: Sequence[PositionWanted], wait_s: float) -> _View:
        """The view, once it has seen what it must have.

        Raises CatalogRefusedError: it is not ready, has ended, or has not in time.
        """
        view = self._following()
        if self._failure is not None or not view.follower.is_ready:
            raise CatalogRefusedError(f"the replica is not ready: {self.ready().reason}", 503, "not_ready")
        longest_s = checked_wait(wait_s)
        if at_least:
            self._wait_for(view, at_least, longest_s)
        return view

    def _wait_for(self, view: _View, at_least: Sequence[PositionWanted], wait_s: float) -> None:
        deadline_s = time.monotonic() + wait_s
        for wanted in at_least:
            position = Position(Epoch(wanted.epoch), Offset(wanted.offset))
            position = max(position, FIRST)
            reached = self._wait(view, InstanceId(wanted.instance), position, max(0.0, deadline_s - time.monotonic()))
            if reached < position:
                raise CatalogRefusedError(
                    f"{not_reached(wanted.instance, position, reached)}; wait longer, or leave at_least out",
                    504,
                    "position_not_reached",
                )

    def _wait(self, view: _View, instance: InstanceId, position: Position, wait_s: float) -> Position:
        loop = self._loop
        if (reached := view.sequencer.position(instance)) >= position or loop is None or not loop.is_running():
            return reached
        waiting = asyncio.run_coroutine_threadsafe(view.follower.wait_for(instance, position, wait_s), loop)
        try:
            return waiting.result(wait_s + CLOSE_WAIT_S)
        except (TimeoutError, asyncio.CancelledError):
            return view.sequencer.position(instance)

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            asyncio.run(self._follow())
        except BaseException as error:
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            self._failure = error
            if not self._begun.done():
                self._begun.set_exception(error)
            elif not isinstance(error, asyncio.CancelledError):
                log.exception("replica.failed", why=str(error), exc_info=error)

    async def _follow(self) -> None:
        self._loop, self._main = asyncio.get_running_loop(), asyncio.current_task()
        stream = await self._connect()
        try:
            view, reader = await self._begin(stream)
            try:
                await self._go_on(view)
            finally:
                view.follower.close()
                await reader.close()
        finally:
            await stream.close()

    async def _begin(self, stream: EventStream) -> tuple[_View, EventReader]:
        settings, guard = self._settings, self._guard
        loaded = await self._loaded(stream)
        index = self._new_index(settings.capacity) if loaded is None else loaded.held
        sequencer = _GuardedSequencer(guard, index, self._backend)
        if loaded is not None:
            sequencer.restore(loaded.state, loaded.settled)
        mark, end = sequencer.mark, (await stream.state(settings.connect_s)).last_sequence
        reader = await stream.pull(
            mark.sequence, settings.cluster, settings.connect_s, mark.fingerprint, settings.parts
        )
        degraded, lag = Degraded(), StreamLag(stream, reader, sequencer, end)
        heartbeats = _GuardedHeartbeats(
            guard, stream, sequencer, degraded, settings.cluster, settings.liveness_s, lag, settings.parts
        )
        requests = SnapshotRequests(stream, sequencer, heartbeats)
        follower = StreamFollower(
            reader, lag, sequencer, heartbeats, requests, asyncio.Lock(), degraded, settings.whole_wait_s
        )
        queries = Queries(sequencer, heartbeats, requests, lag.confirmation, settings.routing, settings.liveness_s)
        for instance in sequencer.instances():
            heartbeats.on_progress(instance)
        log.info("replica.started", reading_after=mark.sequence, stream_end=end, residencies=index.residency_count())
        return _View(sequencer, heartbeats, lag, follower, queries, degraded), reader

    async def _loaded(self, stream: EventStream) -> LoadedCheckpoint | None:
        """The service's newest checkpoint; None where nobody has one that is of this stream."""
        fetch = self._fetch
        if fetch is None or not isinstance(self._new_index(1), Checkpointing):
            return None
        with tempfile.TemporaryDirectory(prefix="kvbm-replica-") as folder:
            try:
                if not await asyncio.to_thread(fetch, Path(folder)):
                    return None
            except CatalogError as error:
                log.warning("replica.no_checkpoint", why=str(error), reading="the stream from its first message")
                return None
            return await load_newest(
                Path(folder),
                self._new_index,
                self._settings.capacity,
                lambda name: has_parts(name, self._settings.parts),
                None,
                lambda mark: still_holds(stream, mark),
            )

    async def _go_on(self, view: _View) -> None:
        upkeep = IndexUpkeep(view.sequencer, lambda: None)
        async with asyncio.TaskGroup() as tasks:
            for work in (
                view.follower.run(),
                view.heartbeats.watch(),
                view.heartbeats.tick(),
                view.heartbeats.send_pulses(),
                view.lag.watch(),
                upkeep.sweep(),
                upkeep.audit(),
                self._forget(view),
            ):
                tasks.create_task(work)
            self._begun.set_result(view)

    async def _forget(self, view: _View) -> None:
        """Forget who is gone for long, for ever: of whoever comes back the stream says everything again."""
        pause_s = min(FORGET_LOOK_S, self._settings.forget_s / 20)
        downtimes = Downtimes(self._settings.forget_s, most_step_s=2 * pause_s)
        liveness, sequencer = view.heartbeats.liveness, view.sequencer
        while True:
            await asyncio.sleep(pause_s)
            now_s = time.monotonic()
            downtimes.listen(now_s, view.lag.confirmation.age_s(now_s) < _BEHIND_S and liveness.listened_s(now_s) > 0)
            for instance in {*liveness.instances(), *sequencer.followed, *downtimes.gone()}:
                downtimes.note(instance, liveness.is_gone(instance), sequencer.spoke(instance))
            for instance in downtimes.due(len(downtimes)):
                last = liveness.last(instance)
                with self._guard:
                    sequencer.drop(instance)
                    view.heartbeats.forget(instance, 0 if last is None else last.heartbeat.wall_time_ns)
                    view.queries.forget(instance)
                downtimes.forget(instance)
                log.info("replica.forgot", instance=instance)


class _GuardedSequencer(Sequencer):
    """A sequencer whose state is read by other threads."""

    def __init__(self, guard: threading.RLock, index: ClusterIndex, backend: Backend) -> None:
        super().__init__(index, backend.scan_frames)
        self._guard = guard

    def step(self, now_s: float, messages: Sequence[StreamMessage], at_end: bool = False) -> Changes:
        with self._guard:
            return super().step(now_s, messages, at_end)

    def take_plain(self, messages: Sequence[StreamMessage], run: PlainRun, applied: PlainApplied) -> Changes:
        with self._guard:
            return super().take_plain(messages, run, applied)


class _GuardedHeartbeats(HeartbeatFollower):
    """So too, of heartbeats."""

    def __init__(
        self,
        guard: threading.RLock,
        stream: EventStream,
        sequencer: Sequencer,
        degraded: Degraded,
        cluster: str | None,
        liveness_s: float,
        lag: StreamLag,
        parts: tuple[int, ...],
    ) -> None:
        super().__init__(stream, sequencer, degraded, cluster, liveness_s, lag, parts)
        self._guard = guard

    def on_heartbeat(self, heartbeat: Heartbeat) -> None:
        with self._guard:
            super().on_heartbeat(heartbeat)

    def on_progress(self, instance: InstanceId) -> None:
        with self._guard:
            super().on_progress(instance)

    def look(self) -> None:
        with self._guard:
            super().look()


class _View(NamedTuple):
    """What a replica that has begun consists of."""

    sequencer: Sequencer
    heartbeats: HeartbeatFollower
    lag: StreamLag
    follower: StreamFollower
    queries: Queries
    degraded: Degraded


def _names(instances: Sequence[str]) -> list[InstanceId]:
    return [InstanceId(name) for name in checked_names(instances) or ()]


def _refused(error: ApiError) -> CatalogRefusedError:
    """An error of an answer, as a client raises it."""
    said = error.answer.error
    return CatalogRefusedError(f"the replica refuses: {said.message}; {said.what_to_do}", error.status, said.code)
