"""Settings → what an instance lends to others: its server, the namespaces it opens, and what its heartbeats say
of it.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple, Protocol

from kvbm.assembly.native import NEW_LEDGER_LOCK, NEW_LENDING_SERVER
from kvbm.assembly.nixl import open_nixl, open_nixl_lending
from kvbm.assembly.peers import Roots, host_id, open_peers, peer_key, peer_tls, roots_of
from kvbm.assembly.pools import instance_folder
from kvbm.assembly.rdma import open_device, open_rdma_lending
from kvbm.config import Settings
from kvbm.core.backend import LedgerProtocol, LockProtocol
from kvbm.core.errors import ConfigError, KvbmError
from kvbm.core.events import JANITOR, EvictReason
from kvbm.core.ids import InstanceId, Namespace, NamespaceId, SequenceHash, Tier
from kvbm.core.peer_address import HOST_ALONE, UCX, PeerAddress
from kvbm.files import make_folder
from kvbm.manager.base import BlockManager
from kvbm.manager.copies.transfer import Pools
from kvbm.pools.base import SlotPool
from kvbm.pools.host.pool import HostPool
from kvbm.pools.nvme.pool import NvmePool
from kvbm.safe_log import SafeLog
from kvbm.transport.host_lending import HostLending
from kvbm.transport.native import PeerTls
from kvbm.transport.nixl_agent import NixlProcess
from kvbm.transport.nixl_lending import NixlLending
from kvbm.transport.peers import Peers
from kvbm.transport.server import Lending, LendingOptions, LendingSource
from kvbm.verbs.device import Device
from kvbm.verbs.forked import leave_to_parent

log = SafeLog()

_LOOK_S = 1.0
_CLOSE_S = 5.0
_MOST_SOCKET_BYTES = 100  # of a path that a unix socket can have, on every system


class Server(Protocol):
    """What is opened and closed here; `Lending` is one."""

    def admit(self, namespace: NamespaceId, root: bytes) -> None: ...
    def withdraw(self, namespace: NamespaceId) -> None: ...
    def fence(self, fenced: bool) -> None: ...


class LentNamespaces:
    """Keeps a server open for the namespaces of an instance, each to who proves its root as it is now.

    A namespace that names no revision is not lent: nothing would tell other weights apart. When a tenant's secret
    changes, its namespaces are withdrawn and opened anew.

    Args:
        declared: the namespaces that are known now.
        on_withdrawn: called once a namespace's root counts no more.
        is_fenced: whether nothing may be granted: another has taken the instance's place, or tiers that outlive a
            process are held back.
    """

    def __init__(
        self,
        server: Server,
        declared: Callable[[], Iterable[Namespace]],
        roots: Roots,
        is_fenced: Callable[[], bool],
        on_withdrawn: Callable[[], object] = lambda: None,
    ) -> None:
        self._on_withdrawn = on_withdrawn
        self._server, self._declared, self._roots, self._is_fenced = server, declared, roots, is_fenced
        self._open: dict[NamespaceId, bytes | None] = {}
        self._was_fenced = False
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvbm-lent-namespaces", daemon=True)

    def start(self) -> None:
        """Open what is known, and what changes from now on."""
        self.look()
        self._thread.start()

    def stop(self) -> None:
        """Change nothing any more. Idempotent."""
        self._stopped.set()

    def look(self) -> None:
        """Open what is new, and what has another root now."""
        if (is_fenced := self._is_fenced()) != self._was_fenced:
            self._server.fence(is_fenced)
            self._was_fenced = is_fenced
        for namespace in self._declared():
            if not namespace.revision.strip():
                continue
            root = self._roots.find(namespace)
            if namespace.id in self._open and self._open[namespace.id] == root:
                continue
            if self._open.get(namespace.id) is not None:
                self._server.withdraw(namespace.id)
                self._on_withdrawn()
            self._open[namespace.id] = root
            if root is not None:
                self._admit(namespace, root)

    def _admit(self, namespace: Namespace, root: bytes) -> None:
        try:
            self._server.admit(namespace.id, root)
        except KvbmError as error:
            log.warning("lending.not_opened", namespace=namespace.id.hex(), why=str(error))

    def _run(self) -> None:
        while not self._stopped.wait(_LOOK_S):
            try:
                self.look()
            except Exception:  # what is open stays open
                log.exception("lending.failed", remedy="report it")


class Opened(NamedTuple):
    """A server that listens, and lends nothing yet.

    Attributes:
        address: where others find it.
        evict: told of blocks that are corrupt; filled once there is a manager.
        limits: what its heartbeats say beside the address, of what is not lent.
        whole: HOST, lent over RDMA and NIXL to who has proved every namespace.
    """

    server: Lending
    address: PeerAddress
    evict: list[Callable[[Tier, SequenceHash], object]]
    limits: dict[str, str]
    whole: tuple[HostLending, ...] = ()

    def close(self, timeout_s: float = _CLOSE_S) -> None:
        """Lend nothing any more. Idempotent."""
        for one in self.whole:
            one.stop()
        self.server.close(timeout_s)
        for one in self.whole:
            one.close()

    def start(self) -> None:
        """Offer what is lent beside the server."""
        for one in self.whole:
            one.start()

    def declare(self, namespaces: Iterable[Namespace]) -> None:
        """The instance has these namespaces too: see `HostLending.declare`."""
        known = list(namespaces)
        for one in self.whole:
            one.declare(known)

    def revoke(self) -> None:
        """Who reads HOST as a whole has to prove everything anew."""
        for one in self.whole:
            one.revoke()

    def disown(self) -> None:
        """This process is a forked child."""
        self.server.disown()
        for one in self.whole:
            if isinstance(one, NixlLending):
                one.disown()


class Exchange(NamedTuple):
    """What an instance lends to others, and reads from them.

    Attributes:
        lock: around its ledger, which the server shares.
        peers: those it reads from; None: nobody.
        lending: its server; None: it lends nothing.
        namespaces: it was opened with.
        device: for RDMA; None: it has none. nixl: what reads by NIXL; likewise.
    """

    lock: LockProtocol
    roots: Roots
    peers: Peers | None = None
    lending: Opened | None = None
    namespaces: Sequence[Namespace] = ()
    device: Device | None = None
    nixl: NixlProcess | None = None

    @property
    def disowners(self) -> list[Callable[[], None]]:
        """What a forked child calls."""
        disowners = [] if self.lending is None else [self.lending.disown]
        if self.nixl is not None:
            disowners.append(self.nixl.disown)
        if (device := self.device) is not None:
            held = (device, self.peers, None if self.lending is None else self.lending.whole)
            disowners.append(lambda: leave_to_parent(*held))
        return disowners

    def begin(self, manager: BlockManager, opened: ExitStack) -> list[Callable[[float], object]]:
        """Lend what a manager holds from now on.

        Returns: what to call first when it closes, with how long to wait, while its pools are there; `opened` does what
            is needed where it does not start.
        """
        stoppers: list[Callable[[float], object]] = [] if (peers := self.peers) is None else [lambda _: peers.close()]
        if (device := self.device) is not None:
            stoppers.append(lambda _: device.close())
        if (nixl := self.nixl) is not None:
            stoppers.append(lambda _: nixl.close())
        if (lending := self.lending) is None:
            return stoppers
        lending.evict.append(lambda tier, block: manager.evict(tier, bytes(block), EvictReason.CORRUPT))
        manager.lends, manager.lent = lending.address.words() | lending.limits, lending.server.counts
        namespaces = self.namespaces
        spaces = LentNamespaces(
            lending.server,
            lambda: namespaces if peers is None else peers.declared(),
            self.roots,
            lambda: manager.publisher_port.fenced_by is not None or manager.parts.revisioned.held_back,
            lending.revoke,
        )
        opened.callback(lending.close)
        opened.callback(spaces.stop)
        spaces.start()
        lending.start()

        def stop(timeout_s: float) -> None:
            lending.close(timeout_s)
            last = lending.server.counts()
            manager.lent = lambda: last  # the server would keep HOST mapped

        return [lambda _: spaces.stop(), stop, *stoppers]


def open_exchange(
    settings: Settings,
    instance: InstanceId,
    namespaces: Sequence[Namespace],
    engine: str,
    ledger: LedgerProtocol,
    pools: Pools,
    opened: ExitStack,
) -> tuple[Pools, Exchange]:
    """The pools of an instance with those it reads from, and what it exchanges with others. Nothing is lent yet.

    Args:
        opened: closes it all, before the pools.
    Raises: ConfigError: what cannot be used, and what to do.
    """
    lock, roots = NEW_LEDGER_LOCK(), roots_of(settings)
    if engine == JANITOR:
        return pools, Exchange(lock, roots)
    tls = peer_tls(settings.transport)
    has_others = settings.transport.listen or settings.transport.fetch
    device = open_device(settings.transport.rdma if has_others else "")
    if device is not None:
        opened.callback(device.close)
    nixl = open_nixl(bool(settings.transport.nixl and has_others))
    if nixl is not None:
        opened.callback(nixl.close)
    peers = open_peers(settings, instance, namespaces, roots, tls, device, nixl)
    if peers is not None:
        opened.callback(peers.close)
        pools = pools._replace(peers=peers)
    lending = open_lending(settings, instance, ledger, lock, pools, tls)
    if lending is not None:
        opened.callback(lending.close)
        if lending.address.tcp and (device is not None or nixl is not None):
            lending = _with_whole(lending, pools.slots[Tier.HOST], instance, namespaces, device, nixl is not None)
    if lending is not None and lending.whole:
        opened.callback(lending.close)
        pools = pools._replace(on_declare=lending.declare)
    return pools, Exchange(lock, roots, peers, lending, namespaces, device, nixl)


def _with_whole(
    lending: Opened,
    host: SlotPool,
    instance: InstanceId,
    namespaces: Sequence[Namespace],
    device: Device | None,
    by_nixl: bool,
) -> Opened:
    """The same, over RDMA and NIXL too where they are wanted and reach HOST."""
    if not isinstance(host, HostPool):
        return lending
    whole: list[HostLending] = []
    address, server = lending.address, lending.server.native
    if device is not None and (rdma := open_rdma_lending(device, server, host, instance, namespaces)) is not None:
        whole.append(rdma)
        address = address._replace(rdma=f"{device.name} {device.gid.hex()}")
    if by_nixl and (nixl := open_nixl_lending(server, host, instance, namespaces)) is not None:
        whole.append(nixl)
        address = address._replace(nixl=UCX)
    return lending._replace(whole=tuple(whole), address=address)


def open_lending(
    settings: Settings,
    instance: InstanceId,
    ledger: LedgerProtocol,
    lock: LockProtocol,
    pools: Pools,
    tls: PeerTls | None = None,
) -> Opened | None:
    """Listen as `transport.listen` says; None: nowhere. Raises ConfigError: it cannot be."""
    wanted = settings.transport
    if not wanted.listen:
        return None
    host, nvme = pools.slots.get(Tier.HOST), pools.slots.get(Tier.NVME)
    if not isinstance(host, HostPool):
        raise ConfigError(
            f"transport.listen is {wanted.listen!r} and there is no HOST pool to lend from; give pools.host slots or "
            "capacity_bytes, and"
            ' pools.hbm.device another value than "memory"'
        )
    evict: list[Callable[[Tier, SequenceHash], object]] = []
    source = LendingSource(
        instance,
        ledger,
        lock,
        host,
        nvme if isinstance(nvme, NvmePool) else None,
        lambda tier, block: [withdraw(tier, block) for withdraw in evict],
    )
    tcp = wanted.listen.removeprefix("tcp://") if wanted.listen != "host" else ""
    options = LendingOptions(
        unix=str(socket_path(settings)),
        tcp=tcp,
        key=peer_key(wanted) if tcp else b"",
        connections=wanted.connections,
        blocks=wanted.lent_blocks,
        tls=tls,
    )
    server = Lending(NEW_LENDING_SERVER, source, options)
    address = PeerAddress(host_id(), server.unix, (wanted.advertise or server.tcp) if tcp else "")
    log.info("lending.began", instance=instance, unix=address.unix, tcp=address.tcp)
    is_sealed = isinstance(nvme, NvmePool) and nvme.plain_engine is None
    return Opened(server, address, evict, HOST_ALONE if is_sealed else {})


def socket_place(settings: Settings) -> Path:
    """Where an instance lends on its own machine: in its folder, or beside it where that path is too long for a
    socket.
    """
    path = (instance_folder(settings) / "lend.sock").absolute()
    if len(os.fsencode(path)) > _MOST_SOCKET_BYTES:
        name = hashlib.sha256(os.fsencode(path)).hexdigest()[:24]
        path = Path(tempfile.gettempdir()) / f"kvbm-{os.getuid()}" / f"{name}.sock"
    return path


def socket_path(settings: Settings) -> Path:
    """The same, in a folder that is there and this user's. Raises ConfigError: it cannot be made, or is another's."""
    path = socket_place(settings)
    try:
        make_folder(path.parent)
        found = path.parent.stat()
    except OSError as error:
        raise ConfigError(
            f"{path.parent} cannot be used ({error.strerror}), where blocks are lent from; give another "
            "instance.data_dir"
        ) from None
    if found.st_uid != os.geteuid():
        raise ConfigError(
            f"{path.parent} is another user's, and blocks would be lent from it; give a shorter instance.data_dir of "
            "your own"
        )
    return path
