"""Blocks from other instances: how this one would lend, and which ways to read it has. Nothing is opened."""

from __future__ import annotations

from kvbm.assembly.lending import socket_place
from kvbm.assembly.peers import peer_key
from kvbm.assembly.rdma import device_name
from kvbm.config import Settings
from kvbm.core.errors import ConfigError, VerbsError
from kvbm.doctor.finding import DoctorFinding, ok, problem, refused, unused, warning
from kvbm.doctor.rdma import RdmaFacts, look_at_rdma

_NAME = "peers"


def judge_peers(settings: Settings, facts: RdmaFacts | None = None) -> DoctorFinding:
    """One line: of two instances, those of one machine and user read by memory, others by RDMA where both have a
    device, else by TCP where both have the key or certificates.

    Args:
        facts: of RDMA; None: they are looked for where `transport.rdma` asks for it.
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
    device, lacking = _rdma(wanted.rdma, facts)
    if device:
        beyond = f", RDMA by {device} beyond it, and TCP where that cannot be"
    found = f"lends at {' and '.join(lends_at) or 'no place'}; reads by memory on this machine{beyond}"
    if wanted.listen and not (host.slots or host.capacity_bytes):
        return problem(_NAME, found, "give pools.host slots or capacity_bytes: HOST is what is lent")
    if not settings.catalog.url:
        return warning(_NAME, found, "set catalog.url: nobody says who has which block")
    if lacking:
        return warning(
            _NAME, f"{found}; no RDMA: {lacking}", "give transport.rdma a device whose link is up, or leave it out"
        )
    return ok(_NAME, found)


def _rdma(wanted: str, facts: RdmaFacts | None) -> tuple[str, str]:
    """The device that `transport.rdma` means, or why it cannot be used; both empty: none is wanted."""
    if not wanted:
        return "", ""
    known = look_at_rdma() if facts is None else facts
    try:
        device = device_name(wanted, known.ports)
    except VerbsError as error:
        return "", str(error)
    states = [port.state for port in known.ports if port.device == device]
    if "ACTIVE" not in states:
        return "", f"{device} is {' and '.join(states).lower() or 'not there'}"
    return ("", known.trouble) if known.trouble else (device, "")
