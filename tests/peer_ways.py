"""The ways in which one process reads blocks of another, by the names that tests and their processes give them."""

from __future__ import annotations

from pathlib import Path

from kvbm import _native
from kvbm.transport.base import PeerReader
from kvbm.transport.memory import MemoryReader
from kvbm.transport.native import PeerTls
from kvbm.transport.nixl_agent import NixlProcess
from kvbm.transport.tcp import TcpReader
from tests.lenders import KEY, OWNER, READER, new_client, root_of
from tests.nixl_site import nixl_reader

MEMORY, TCP, TLS, NIXL = "memory", "tcp", "tcp under TLS", "nixl"
WAYS = (MEMORY, TCP, TLS, NIXL)


def tls_in(folder: Path) -> PeerTls:
    """What connections are secured with, of the certificate that `tests.native_owner.tls_of` has put there."""
    return _native.PeerTls(*(str(folder / name) for name in ("instance.pem", "instance-key.pem", "ca.pem")))


def new_nixl_process() -> NixlProcess:
    """A process of NIXL that moves bytes over TCP alone."""
    return NixlProcess({"UCX_TLS": "tcp"})


def reader_of(way: str, address: str, folder: Path, nixl: NixlProcess | None = None, streams: int = 2) -> PeerReader:
    """A reader of the owner at an address.

    Args:
        address: host:port; through memory the path of the owner's socket.
        folder: of the certificate, where the way needs one.
        nixl: what reads over NIXL, where that is the way.
    """
    if way == MEMORY:
        return MemoryReader(new_client, address, READER, OWNER, root_of, streams)
    if way == NIXL:
        assert nixl is not None
        return nixl_reader(nixl, address)
    return TcpReader(new_client, address, READER, OWNER, root_of, KEY, streams, tls_in(folder) if way == TLS else None)
