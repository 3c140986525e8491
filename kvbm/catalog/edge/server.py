"""Running the catalog: `run` in the main thread of a process, `CatalogThread` beside other work."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import logging
import os
import signal
import socket
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from kvbm.core.backend import Backend
from kvbm.core.errors import CatalogError, ConfigError, KvbmError, MissingExtraError
from kvbm.core.parts import ALL_PARTS
from kvbm.files import make_folder
from kvbm.safe_log import SafeLog
from kvbm.service_manager import ServiceManager
from kvbm.streams.base import AskSource, EventStream

try:
    import httptools  # noqa: F401
    import uvicorn
    import uvloop
except ImportError:
    raise MissingExtraError("the catalog's web server (uvicorn, httptools, uvloop)", "catalog") from None

from kvbm.catalog.access.callers import Access, check_exposed
from kvbm.catalog.access.hosts import hosts_of
from kvbm.catalog.edge.api import Surface, create_surface
from kvbm.catalog.edge.ask_listener import AskListener
from kvbm.catalog.edge.asks import Asks
from kvbm.catalog.edge.connections import (
    Connection,
    Connections,
    RateLimitFilter,
    room_for_sockets,
    small_tls_buffers,
)
from kvbm.catalog.edge.fast_path import FastPath
from kvbm.catalog.edge.http_connection import HttpConnection
from kvbm.catalog.edge.listener import Listener
from kvbm.catalog.edge.reloading import Reloader, Reloading, ServedParts
from kvbm.catalog.edge.tls import ServerTls
from kvbm.catalog.index.cluster_index import NewIndex
from kvbm.catalog.service import CatalogService, ServiceSettings

log = SafeLog()

STOP_WAIT_S = 15.0
_GRACE_S = 3
_BACKLOG = 2048
_MALLOC_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of glibc
_SELDOM = RateLimitFilter()


def run(
    settings: ServiceSettings,
    backend: Backend,
    new_index: NewIndex,
    on_started: Callable[[str], None] = lambda url: None,
    make_stream: Callable[[], EventStream] | None = None,
    reloading: Reloading | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM.

    Args:
        on_started: called with the URL once it answers.
        make_stream: called in the service's loop for the stream, instead of the NATS of the settings.
        reloading: reads the settings again at SIGHUP. Without it SIGHUP ends the catalog.
    Raises: StreamError, CatalogError, ConfigError, MissingExtraError: it could not start, or could not go on.
    """
    room_for_sockets(settings.limits.sockets, may_raise=True)
    _give_memory_back()
    small_tls_buffers()

    def started(url: str) -> None:
        gc.collect()
        # A full collection waits for a quarter more objects than there are: without all the modules', garbage goes
        # early
        gc.freeze()
        on_started(url)

    reloads = _Reloads(reloading, ServiceManager()) if reloading is not None else None
    stop = _stop_on_signals if reloads is None else _stop_on_asking
    _run(_serve(settings, backend, new_index, started, stop, make_stream, reloads), settings)


class _Reloads(NamedTuple):
    """What reads the settings again, and who is told."""

    reloading: Reloading
    manager: ServiceManager

    def start(self, parts: ServedParts, server: uvicorn.Server) -> list[asyncio.Task[None]]:
        """The tasks that do it."""

        def end() -> None:
            server.should_exit = True

        def hang_up() -> None:
            self.reloading.note()
            reloader.wake.set()

        reloader = Reloader(parts, self.reloading, self.manager, end)
        if self.reloading.is_installed():  # not under nohup
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, hang_up)
        return [asyncio.create_task(reloader.run()), asyncio.create_task(reloader.tell())]


class CatalogThread:
    """A catalog in a thread of its own. Use as a context manager, or `start` and `stop`.

    Attributes:
        url: http://host:port, once started.
    """

    def __init__(
        self,
        settings: ServiceSettings,
        backend: Backend,
        new_index: NewIndex,
        make_stream: Callable[[], EventStream] | None = None,
    ) -> None:
        """
        Args:
            make_stream: called in the thread's loop for the stream, instead of the NATS of the settings.
        """
        self.url = ""
        self._settings, self._backend, self._new_index, self._make_stream = settings, backend, new_index, make_stream
        self._started: Future[str] = Future()
        self._ending: Callable[[], None] | None = None
        self._stop_wanted = False
        self._thread = threading.Thread(target=self._run, name="kvbm-catalog", daemon=True)

    def start(self, timeout_s: float = 30.0) -> CatalogThread:
        """Start, and wait until it answers; it may not be ready yet.

        Raises: StreamError, CatalogError, ConfigError: it could not start, or not in time.
        """
        try:
            self._thread.start()
            self.url = self._started.result(timeout_s)
        except FutureTimeoutError:
            self.stop()
            raise CatalogError(f"the catalog did not start within {timeout_s:g} s") from None
        except BaseException:  # a signal's handler may raise anything, and nobody has it then to stop it
            self.stop()
            raise
        return self

    def stop(self, timeout_s: float = STOP_WAIT_S) -> None:
        """End it and wait. Idempotent. Raises CatalogError: it did not end in time."""
        self._stop_wanted = True
        if self._ending is not None:
            self._ending()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                raise CatalogError(f"the catalog did not end within {timeout_s:g} s")

    def __enter__(self) -> CatalogThread:
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.stop()

    def _run(self) -> None:
        def began(server: uvicorn.Server, loop: asyncio.AbstractEventLoop) -> None:
            def end() -> None:
                server.should_exit = True

            self._ending = end
            if self._stop_wanted:
                end()

        try:
            _run(
                _serve(
                    self._settings, self._backend, self._new_index, self._started.set_result, began, self._make_stream
                ),
                self._settings,
            )
        except (KvbmError, OSError) as error:
            if self._started.done():
                log.exception("catalog.ended", why=str(error))
            else:
                self._started.set_exception(error)
        finally:
            if not self._started.done():
                self._started.set_exception(CatalogError("the catalog ended before it answered; see its log"))


def _run(serving: Coroutine[Any, Any, None], settings: ServiceSettings) -> None:
    """Run it in a loop of its own: uvloop's, but with TLS asyncio's, whose buffers for strangers are small."""
    with asyncio.Runner(loop_factory=None if settings.access.tls_cert else uvloop.new_event_loop) as runner:
        runner.run(serving)


class _Server(uvicorn.Server):
    """Takes connections by itself, and leaves signals to whoever runs it: uvicorn would raise them again before the
    service could close.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        connections: Connections,
        at_once: FastPath,
        on_started: Callable[[], None],
        on_stopping: Callable[[], None],
    ) -> None:
        super().__init__(config)
        self._connections, self._at_once = connections, at_once
        self._on_started, self._on_stopping = on_started, on_stopping

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Take connections of the sockets; then call `on_started`."""
        listeners = [
            Listener(
                one, self._connections, self._connection, None if one.family == socket.AF_UNIX else self.config.ssl
            )
            for one in sockets or []
        ]
        self.servers = listeners  # type: ignore[assignment]
        for listener in listeners:
            listener.start()
        self.started = True
        self._on_started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End feeds, which would go on for ever; then as uvicorn does."""
        self._on_stopping()
        await super().shutdown(sockets)

    def _connection(self, connection: Connection) -> HttpConnection:
        return HttpConnection(
            self._connections,
            connection,
            self._at_once,
            config=self.config,
            server_state=self.server_state,
            app_state={},
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _serve(
    settings: ServiceSettings,
    backend: Backend,
    new_index: NewIndex,
    on_started: Callable[[str], None],
    on_began: Callable[[uvicorn.Server, asyncio.AbstractEventLoop], None],
    make_stream: Callable[[], EventStream] | None = None,
    reloads: _Reloads | None = None,
) -> None:
    host, port = _host_and_port(settings.listen)
    with contextlib.ExitStack() as opened:
        listener = opened.enter_context(_bind(host, port))
        sockets = [listener]
        if settings.unix_socket:
            sockets.append(opened.enter_context(bind_path(Path(settings.unix_socket))))
        check_exposed(settings.access, listener.getsockname()[0])
        hosts = hosts_of(settings.access, listener.getsockname()[0])
        access = Access(settings.access.file)
        tls = ServerTls(settings.access) if settings.access.tls_cert else None
        service = await CatalogService.start(
            settings, backend, new_index, make_stream() if make_stream is not None else None
        )
        refusals: Counter[str] = Counter()
        room = room_for_sockets(settings.limits.sockets, may_raise=False)
        connections = Connections(settings.limits, room, refusals=refusals)
        for name in ("uvicorn.error", "asyncio"):
            logging.getLogger(name).addFilter(_SELDOM)
        try:
            surface = create_surface(service, _own_version(), access, lambda: _troubles(access, tls), refusals, hosts)
            config = uvicorn.Config(
                surface.app,
                http="httptools",
                log_config=None,
                access_log=False,
                lifespan="off",
                server_header=False,
                proxy_headers=False,  # who asks from the machine itself would choose the address it is known by
                timeout_keep_alive=max(1, round(settings.limits.idle_s)),
                timeout_graceful_shutdown=_GRACE_S,
                ws="none",
            )
            config.load()
            config.ssl = tls.context if tls is not None else None
            url = _url(listener, "https" if tls is not None else "http")
            server = _Server(config, connections, surface.at_once, lambda: on_started(url), service.watches.close)
            on_began(server, asyncio.get_running_loop())
            watching = asyncio.create_task(_end_on_failure(service, server))
            looking = asyncio.create_task(connections.look_for_ever())
            following = [asyncio.create_task(one.follow()) for one in (access, tls) if one is not None]
            asking = listen_to_asks(service, surface, access)
            if reloads is not None:
                address = listener.getsockname()[0]
                parts = ServedParts(service, access, tls, surface.limits, connections, config, address)
                following += reloads.start(parts, server)
            try:
                await server.serve(sockets=sockets)
            finally:
                if reloads is not None:
                    reloads.manager.stopping()
                watching.cancel()
                looking.cancel()
                for task in following:
                    await _cancelled(task)
                await _cancelled(asking)
        finally:
            await service.close()
        if service.failure is not None:
            raise CatalogError(f"the catalog cannot go on: {service.failure}") from service.failure


def listen_to_asks(service: CatalogService, surface: Surface, access: Access) -> asyncio.Task[None] | None:
    """Answer over NATS too, where it is known who asks there, or nobody else reaches it."""
    stream, settings = service.stream, service.settings
    if not isinstance(stream, AskSource):
        return None
    if settings.parts != ALL_PARTS:  # whoever asks there may be answered by any catalog of the cluster
        log.info("catalog.asks_unanswered", why="it follows some parts of the cluster alone", remedy="ask it over HTTP")
        return None
    if access.nats_names() is None and not (settings.access.open or stream.is_local):
        log.info(
            "catalog.asks_unanswered", why="NATS is not on the loopback", remedy="set catalog.access with [[nats]]"
        )
        return None
    host = "127.0.0.1" if stream.is_local else "nats"
    listener = AskListener(stream, settings.cluster, access.nats_names, lambda: service.is_ready)
    asks = Asks(surface.app, surface.at_once, access, surface.limits, host, listener.wake.set)
    return asyncio.create_task(listener.run(asks))


async def _cancelled(task: asyncio.Task[None] | None) -> None:
    if task is not None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _end_on_failure(service: CatalogService, server: uvicorn.Server) -> None:
    await service.failed.wait()
    server.should_exit = True


def _give_memory_back() -> None:
    """Have the C library give back each large buffer when it is freed; by itself it would keep those of long
    requests.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_MALLOC_MMAP_THRESHOLD, 256 << 10)


def _stop_on_asking(server: uvicorn.Server, loop: asyncio.AbstractEventLoop) -> None:
    """SIGHUP is somebody else's."""

    def stop() -> None:
        server.should_exit = True

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)


def _stop_on_signals(server: uvicorn.Server, loop: asyncio.AbstractEventLoop) -> None:
    def stop() -> None:
        server.should_exit = True

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if (
            number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN
        ):  # nohup: it is to outlive its terminal
            loop.add_signal_handler(number, stop)


def _host_and_port(listen: str) -> tuple[str, int]:
    host, colon, port = listen.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"the catalog cannot listen on {listen!r}; write host:port, such as 127.0.0.1:7700")
    return host, int(port)


def _bind(host: str, port: int) -> socket.socket:
    listener: socket.socket | None = None
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
        family, kind, protocol, _, address = found[0]
        listener = socket.socket(family, kind, protocol)  # asyncio turns Nagle off only where the protocol is TCP
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
        return listener
    except OSError as error:
        if listener is not None:
            listener.close()
        raise CatalogError(
            f"the catalog cannot listen on {host}:{port} ({error.strerror}); choose another port, 0 takes a free one"
        ) from None


@contextlib.contextmanager
def bind_path(path: Path) -> Iterator[socket.socket]:
    """A unix socket that only its owner may open; the path is free again afterwards.

    One that nobody listens on is taken over.
    """
    with socket.socket(socket.AF_UNIX) as listener:
        try:
            make_folder(path.parent)
            if path.is_socket() and not _answers(path):
                path.unlink()
            before = os.umask(0o177)
            try:
                listener.bind(str(path))
            finally:
                os.umask(before)
            listener.listen(_BACKLOG)
        except OSError as error:
            raise CatalogError(
                f"the catalog cannot listen on the unix socket {path} ({error.strerror or error}); choose another "
                "catalog.unix_socket, "
                "a path of fewer than 108 bytes where no file is"
            ) from None
        own = path.stat().st_ino
        try:
            yield listener
        finally:
            with contextlib.suppress(OSError):
                if path.stat().st_ino == own:
                    path.unlink()


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        return True


def _url(listener: socket.socket, scheme: str) -> str:
    host, port = listener.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _troubles(access: Access, tls: ServerTls | None) -> str:
    access.look()
    if tls is not None:
        tls.look()
    return "; ".join(one.trouble for one in (access, tls) if one is not None and one.trouble)


def _own_version() -> str:
    try:
        return version("kvbm-ledger")
    except PackageNotFoundError:
        return ""
