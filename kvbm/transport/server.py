"""Lends what an instance holds in HOST and NVME to other instances: the native server, over the ledger and the pools
that are there.

It listens on a unix socket for processes of the same user and, with a key or certificates, over TCP. Its threads never
need the GIL: they take the ledger's lock as the manager does, pin what they grant, and give it back when the reader
says so, when its time is over, or when the connection ends. `clear` and eviction go on meanwhile: a slot that is lent
stays as it is until it is given back.

Blocks of an encrypted NVME pool are not lent from there: what opens their seals is Python. Their copies in HOST are.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np

from kvbm.core.backend import LedgerProtocol, LockProtocol
from kvbm.core.errors import ConfigError, KvbmError
from kvbm.core.ids import InstanceId, NamespaceId, SequenceHash, Tier
from kvbm.core.lent import LentCounts
from kvbm.safe_log import SafeLog
from kvbm.transport.native import PeerTls

log = SafeLog()

LEAST_KEY_BYTES = 16
_CLOSE_S = 5.0
_WAIT_S = 60.0  # the thread that evicts waits so long at a time
_MOST_PORT = 65_535
_LEFT_OPEN: list[object] = []  # servers that a device has kept from ending: they stay, and what they lend from


class LentHost(Protocol):
    """What the server needs of HOST, as `HostPool` has it."""

    @property
    def memory(self) -> np.ndarray | None: ...
    @property
    def kept_checksums(self) -> np.ndarray: ...
    @property
    def fd(self) -> int: ...
    @property
    def mapped_bytes(self) -> int: ...


class LentNvme(Protocol):
    """What the server needs of NVME, as `NvmePool` has it."""

    @property
    def plain_engine(self) -> object | None: ...


class LendingServer(Protocol):
    """The native server, `kvbm._native.LendingServer`."""

    @property
    def tcp_port(self) -> int: ...
    def admit(self, namespace: bytes, root: bytes) -> None: ...
    def withdraw(self, namespace: bytes) -> None: ...
    def fence(self, fenced: bool) -> None: ...
    def take_corrupt(self, timeout_s: float) -> list[tuple[bytes, int, bytes]]: ...
    def open_joins(self, transport: int) -> None: ...
    def take_joins(self, transport: int, timeout_s: float) -> list[tuple[int, bytes | None]]: ...
    def opened_by(self, transport: int, number: int) -> list[bytes]: ...
    def answer_join(self, transport: int, number: int, ready: bytes) -> bool: ...
    def hang_up_on_nixl(self) -> None: ...
    def stats(self) -> dict[str, int]: ...
    def close(self, timeout_s: float) -> bool: ...
    def disown(self) -> None: ...


class NewLendingServer(Protocol):
    """Makes one, listening."""

    def __call__(
        self,
        ledger: LedgerProtocol,
        lock: LockProtocol,
        rows: np.ndarray,
        checksums: np.ndarray,
        fd: int,
        mapped_bytes: int,
        nvme: object | None,
        instance: str,
        unix_path: str = "",
        tcp_host: str = "",
        tcp_port: int = 0,
        key: bytes = b"",
        most_connections: int = 64,
        most_blocks: int = 16_384,
        most_lease_ms: int = 10_000,
        most_send_ms: int = 30_000,
        handshake_ms: int = 2_000,
        retry_ms: int = 10,
        lane_bytes: int = 32 << 20,
        tls: PeerTls | None = None,
    ) -> LendingServer: ...


class LendingOptions(NamedTuple):
    """How an instance lends.

    Attributes:
        unix: path of the socket for processes of the same user; "" for none.
        tcp: "host:port" to listen at for other machines, port 0 for a free one; "" for none.
        key: what both sides of a connection over TCP must have, at least 16 bytes; with `tls` there may be none.
        connections: at a time, most.
        blocks: lent at a time, most; beyond it the answer is "busy".
        lease_s: the longest lease; a shorter one lasts as long as its reader would wait.
        retry_s: when to come again where as much is lent as may be.
        lane_bytes: of each of two lanes for blocks on their way from NVME. One answer has as many blocks from there as
            a lane holds.
        tls: what connections over TCP are secured with; None: bytes go as they are.
        handshake_s: who has not proved itself by then is hung up on, and who stops in the middle of a message for so
            long.
    """

    unix: str = ""
    tcp: str = ""
    key: bytes = b""
    connections: int = 64
    blocks: int = 16_384
    lease_s: float = 10.0
    retry_s: float = 0.02
    lane_bytes: int = 32 << 20
    tls: PeerTls | None = None
    handshake_s: float = 2.0


class LendingSource(NamedTuple):
    """What is lent, and by whom.

    Attributes:
        ledger, lock: native ones, those of the manager.
        nvme: None: there is none.
        evict: withdraws a block as corrupt; called in a thread of the `Lending`.
    """

    instance: InstanceId
    ledger: LedgerProtocol
    lock: LockProtocol
    host: LentHost
    nvme: LentNvme | None
    evict: Callable[[Tier, SequenceHash], object]


class Lending:
    """An instance's server, from when it is made until `close`. Any thread.

    Attributes:
        unix, tcp: where it listens, "host:port" with the port taken; "" for nowhere.
    """

    def __init__(self, new_server: NewLendingServer, source: LendingSource, options: LendingOptions) -> None:
        """Listen. Nothing is lent before its namespace is admitted.

        Raises: ConfigError: it cannot listen there, there is no HOST memory, or the options make no sense.
            RuntimeError: the system gives no thread.
        """
        tcp_host, tcp_port = _split(options.tcp)
        needs_key = options.tls is None or bool(options.key)
        if tcp_host and needs_key and len(options.key) < LEAST_KEY_BYTES:
            raise ConfigError(
                f"lending over tcp takes a key of at least {LEAST_KEY_BYTES} bytes, this one has {len(options.key)};"
                " make one, and give it to every instance"
            )
        rows = source.host.memory
        if rows is None:
            raise ConfigError("HOST has no memory to lend from: the pool is closed")
        try:
            self._server = new_server(
                source.ledger,
                source.lock,
                rows,
                source.host.kept_checksums,
                source.host.fd,
                source.host.mapped_bytes,
                None if source.nvme is None else source.nvme.plain_engine,
                source.instance,
                unix_path=options.unix,
                tcp_host=tcp_host,
                tcp_port=tcp_port,
                key=options.key,
                most_connections=options.connections,
                most_blocks=options.blocks,
                most_lease_ms=max(1, round(options.lease_s * 1000)),
                handshake_ms=max(1, round(options.handshake_s * 1000)),
                retry_ms=max(1, round(options.retry_s * 1000)),
                lane_bytes=options.lane_bytes,
                tls=options.tls,
            )
        except OSError as error:
            if error.errno == errno.EAGAIN:
                raise RuntimeError(
                    f"can't start new thread: lending at {options.unix or options.tcp} has none"
                ) from error
            where = " and ".join(filter(None, (options.unix, options.tcp)))
            raise ConfigError(f"lending: it cannot listen at {where} ({error}); choose another place") from error
        self.unix = options.unix
        self.tcp = _joined(tcp_host, self._server.tcp_port) if tcp_host else ""
        self._instance, self._evict = source.instance, source.evict
        self._closed, self._is_over = threading.Event(), False
        self._thread = threading.Thread(target=self._evict_corrupt, name=f"kvbm-lend-{source.instance}", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            self._server.close(_CLOSE_S)  # it listens already
            raise

    def admit(self, namespace: NamespaceId, root: bytes) -> None:
        """Lend blocks of a namespace to whoever proves that it has its root.

        Again with another root: what is open ends.
        """
        self._server.admit(namespace, root)

    def withdraw(self, namespace: NamespaceId) -> None:
        """Lend no more of a namespace; leases go on until they end."""
        self._server.withdraw(namespace)

    def fence(self, fenced: bool) -> None:
        """Grant nothing while another has taken this instance's place."""
        self._server.fence(fenced)

    @property
    def native(self) -> LendingServer:
        """The native server, for who lends over RDMA or NIXL beside it."""
        return self._server

    def stats(self) -> dict[str, int]:
        """What `counts` has, and `refused_pins`: pins that could not be given back, which never is."""
        return self._server.stats()

    def counts(self) -> LentCounts:
        """What was lent since the start, and what is now."""
        stats = self._server.stats()
        return LentCounts(*(stats[name] for name in LentCounts.__struct_fields__))

    def close(self, timeout_s: float = _CLOSE_S) -> bool:
        """Grant nothing more, end all connections and give back all that is lent. Only the first call does, and waits.

        Returns: False: a device kept a thread for longer than that; what it uses stays until the process ends.
        """
        if self._closed.is_set():
            return self._is_over
        self._closed.set()
        until_s = time.monotonic() + timeout_s
        self._is_over = self._server.close(timeout_s)
        if self._thread is not threading.current_thread():
            self._thread.join(max(0.0, until_s - time.monotonic()))
        if not self._is_over:
            _LEFT_OPEN.append(self._server)
            log.warning("lending.left_open", instance=self._instance, waited_s=timeout_s)
        return self._is_over

    def disown(self) -> None:
        """This process is a forked child: close what it has inherited, so that readers see when the parent is gone."""
        self._closed.set()
        self._server.disown()

    def _evict_corrupt(self) -> None:
        """Withdraw what was found corrupt, until the end."""
        while not self._closed.is_set():
            found = self._server.take_corrupt(_WAIT_S)
            for _, tier, block in found:
                try:
                    self._evict(Tier(tier), SequenceHash(block))
                except KvbmError as error:  # what the owner's manager says of it is no reason to stop
                    log.warning("lending.not_evicted", instance=self._instance, tier=Tier(tier).name, why=str(error))
            if found:
                log.warning("lending.found_corrupt", instance=self._instance, blocks=len(found))


def _split(address: str) -> tuple[str, int]:
    """Host and port; ("", 0) for none. Raises ConfigError."""
    if not address:
        return "", 0
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > _MOST_PORT:
        raise ConfigError(f"the address to lend at is {address!r}; give host:port, such as 10.0.0.7:7711")
    return host, int(port)


def _joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
