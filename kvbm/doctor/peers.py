"""Blocks from other instances: how this one would lend, and which ways to read it has. Nothing is opened."""

from __future__ import annotations

from kvbm.assembly.lending import socket_place
from kvbm.assembly.peers import peer_key
from kvbm.assembly.rdma import device_name
from kvbm.config import Settings
from kvbm.core.errors import ConfigError, VerbsError
from kvbm.doctor.finding import DoctorFinding, ok, problem, refused, unused, warning
from kvbm.doctor.rdma import RdmaFacts, look_at_rdma
from kvbm.transport.nixl_agent import missing_nixl

_NAME = "peers"


def judge_peers(settings: Settings, facts: RdmaFacts | None = None) -> DoctorFinding:
    """One line: of two instances, those of one machine and user read by memory, others by RDMA where both have a
    device, by NIXL where both have that, else by TCP where both have the key or certificates.

    Args:
        facts: of RDMA; None: they are looked for where `transport.rdma` or `transport.nixl` asks for it.
    """
    wanted, host = settings.transport, settings.pools.host
    if not (wanted.listen or wanted.fetch):
        return unused(_NAME, "transport.listen is not set: nothing is lent to other instances, nor read from them")
    try:
        has_tcp = bool(peer_key(wanted) or wanted.tls_cert)
        lends_at = [str(socket_place(settings))] if wanted.listen else []
    except ConfigError as error:
        return refused(_NAME, error)
    tcp = wanted.listen.removeprefix("tcp://") if wanted.listen.startswith("tcp://") else ""
    lends_at += [f"tcp://{wanted.advertise or tcp}"] if tcp else []
    beyond = "; no TCP, for there is neither transport.key_file nor transport.tls_cert"
    if has_tcp:
        beyond = ", TCP under TLS beyond it" if wanted.tls_cert else ", TCP beyond it"
    known = look_at_rdma() if facts is None and (wanted.rdma or wanted.nixl) else facts
    device, lacking = _rdma(wanted.rdma, known)
    whole = [f"RDMA by {device}"] * bool(device) + ["NIXL"] * (wanted.nixl and missing_nixl() is None)
    if whole:
        beyond = f", {', then '.join(whole)} beyond it, and TCP where that cannot be"
    found = f"lends at {' and '.join(lends_at) or 'no place'}; reads by memory on this machine{beyond}"
    if wanted.listen and not (host.slots or host.capacity_bytes):
        return problem(_NAME, found, "give pools.host slots or capacity_bytes: HOST is what is lent")
    if not settings.catalog.url:
        return warning(_NAME, found, "set catalog.url: nobody says who has which block")
    if lacking:
        return warning(
            _NAME, f"{found}; no RDMA: {lacking}", "give transport.rdma a device whose link is up, or leave it out"
        )
    if wanted.nixl and (missing := missing_nixl()) is not None:
        return problem(_NAME, f"{found}; transport.nixl is set", str(missing))
    if wanted.nixl and known is not None and all(port.state != "ACTIVE" for port in known.ports):
        return warning(
            _NAME,
            f"{found}; UCX finds no fabric here that the kernel lists, and over TCP NIXL is slower than TCP is",
            "leave transport.nixl out, unless UCX has a fabric that the kernel does not list",
        )
    return ok(_NAME, found)


def _rdma(wanted: str, known: RdmaFacts | None) -> tuple[str, str]:
    """The device that `transport.rdma` means, or why it cannot be used; both empty: none is wanted."""
    if not wanted or known is None:
        return "", ""
    try:
        device = device_name(wanted, known.ports)
    except VerbsError as error:
        return "", str(error)
    states = [port.state for port in known.ports if port.device == device]
    if "ACTIVE" not in states:
        return "", f"{device} is {' and '.join(states).lower() or 'not there'}"
    return ("", known.trouble) if known.trouble else (device, "")
