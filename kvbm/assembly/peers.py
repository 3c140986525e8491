"""Settings → what an instance reads of others: the table of peers, and what proves that it may."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from kvbm.assembly.native import NEW_PEER_CLIENT, NEW_PEER_TLS, RowCopier
from kvbm.config import Settings, TransportSettings
from kvbm.core.errors import ConfigError
from kvbm.core.ids import HASH_BYTES, InstanceId, Namespace, NamespaceId
from kvbm.core.peer_address import PeerAddress
from kvbm.files import is_kept_secret, read_small
from kvbm.tenant_secrets import TenantSecrets
from kvbm.transport.base import PeerReader
from kvbm.transport.leasing_connection import OVER_NIXL, OVER_RDMA, LeasingConnection, ReaderProof
from kvbm.transport.memory import MemoryReader
from kvbm.transport.native import NewPeerClient, PeerTls
from kvbm.transport.nixl import NixlReader
from kvbm.transport.nixl_agent import NixlProcess
from kvbm.transport.peers import MEMORY, NIXL, RDMA, TCP, Peers
from kvbm.transport.rdma import RdmaReader
from kvbm.transport.tcp import TcpReader
from kvbm.verbs.device import Device
from kvbm.verbs.quarantine import Quarantine

LEAST_KEY_BYTES = 32
_MOST_KEY_BYTES = 4096
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # of the machine, whichever container asks


class Roots:
    """The roots of namespaces, as their tenants' secrets are now. Any thread.

    Args:
        secrets: tenant → secret; they may change.
    """

    def __init__(self, secrets: Mapping[str, str]) -> None:
        self._secrets = secrets
        self._made: dict[NamespaceId, tuple[str, bytes]] = {}  # secret and root: it is asked for at each read

    def find(self, namespace: Namespace) -> bytes | None:
        """A namespace's root; None: its tenant's secret is not known here, so nobody can be shown that it is."""
        secret = self._secrets.get(namespace.tenant, None if namespace.tenant else "")
        if secret is None:
            self._made.pop(namespace.id, None)  # nothing of a secret that is gone stays
            return None
        made = self._made.get(namespace.id)
        if made is None or made[0] != secret:
            made = self._made[namespace.id] = (secret, namespace.root(secret.encode()))
        return made[1]

    def root(self, namespace: Namespace) -> bytes:
        """The same; where it is not known, one that opens nothing."""
        return self.find(namespace) or bytes(HASH_BYTES)


def roots_of(settings: Settings) -> Roots:
    """As `catalog.tenant_secrets` and its file say. Raises ConfigError: the file cannot be used."""
    return Roots(TenantSecrets(settings.catalog.tenant_secrets, settings.catalog.tenant_secrets_file))


def open_peers(
    settings: Settings,
    instance: InstanceId,
    namespaces: Sequence[Namespace],
    roots: Roots,
    tls: PeerTls | None = None,
    device: Device | None = None,
    nixl: NixlProcess | None = None,
) -> Peers | None:
    """The table of peers; None where nothing is read from others: nobody says who they are, or it is not wanted.

    Args:
        tls: as `peer_tls` has it.
        device: to read over RDMA with; None: nothing is. nixl: likewise.
    Raises: ConfigError: the key cannot be used.
    """
    wanted = settings.transport
    if not settings.catalog.url or not (wanted.listen or wanted.fetch):
        return None
    key = peer_key(wanted)
    copier = RowCopier(settings.pools.host.copy_threads)
    client: NewPeerClient = partial(NEW_PEER_CLIENT, copier=copier)

    quarantine = Quarantine()

    def open_reader(owner: InstanceId, transport: str, address: PeerAddress) -> PeerReader:
        if transport == MEMORY:
            return MemoryReader(client, address.unix, instance, owner, roots.root)
        tcp = TcpReader(client, address.tcp, instance, owner, roots.root, key, tls=tls)
        proof = ReaderProof(instance, key, roots.root, provable)
        if transport == RDMA and device is not None:
            over_rdma = partial(LeasingConnection, OVER_RDMA, address.tcp, owner, proof)
            return RdmaReader(device, over_rdma, copier, quarantine, others=tcp)
        if transport == NIXL and nixl is not None:
            over_nixl = partial(LeasingConnection, OVER_NIXL, address.tcp, owner, proof)
            return NixlReader(nixl, over_nixl, copier, tcp)
        return tcp

    def provable() -> list[Namespace]:
        return [one for one in peers.declared() if roots.find(one) is not None]

    may = {MEMORY: True, RDMA: device is not None, NIXL: nixl is not None, TCP: bool(key or tls)}
    ways = [way for way, is_possible in may.items() if is_possible]
    peers = Peers(open_reader, host_id(), ways, lambda one: roots.find(one) is not None)
    peers.declare(namespaces)
    return peers


def peer_key(wanted: TransportSettings) -> bytes:
    """The key of `transport.key_file`; b"" where none is named. Raises ConfigError: the file cannot be used."""
    if not wanted.key_file:
        return b""
    path = Path(wanted.key_file)
    try:
        key = read_small(path, _MOST_KEY_BYTES).strip()
        found = path.stat()
    except OSError as error:
        raise ConfigError(
            f"transport.key_file {path} cannot be read ({error.strerror or error}); make one: openssl rand -hex 32"
        ) from None
    if len(key) < LEAST_KEY_BYTES:
        raise ConfigError(
            f"transport.key_file {path} has {len(key)} bytes; it needs at least {LEAST_KEY_BYTES}: openssl rand -hex 32"
        )
    if not is_kept_secret(found):
        raise ConfigError(f"transport.key_file {path} can be read by others than its owner; chmod 600 it")
    return key


def peer_tls(wanted: TransportSettings) -> PeerTls | None:
    """What connections over TCP are secured with; None where `transport.tls_cert` names nothing.

    Raises: ConfigError: a file cannot be used, or OpenSSL is not there.
    """
    if not wanted.tls_cert:
        return None
    path = Path(wanted.tls_key)
    try:
        found = path.stat()
    except OSError as error:
        raise ConfigError(
            f"transport.tls_key {path} cannot be read ({error.strerror or error}); give the key of transport.tls_cert"
        ) from None
    if not is_kept_secret(found):
        raise ConfigError(f"transport.tls_key {path} can be read by others than its owner; chmod 600 it")
    try:
        return NEW_PEER_TLS(wanted.tls_cert, wanted.tls_key, wanted.tls_ca)
    except ConfigError as error:
        raise ConfigError(f"transport.tls_cert, tls_key and tls_ca cannot be used: {error}") from None


def host_id() -> str:
    """What names this machine since it was started, in its containers too."""
    try:
        word = _BOOT_ID.read_text().strip()
    except OSError:
        word = socket.gethostname()
    return hashlib.sha256(f"kvbm host {word}".encode()).hexdigest()[:32]
