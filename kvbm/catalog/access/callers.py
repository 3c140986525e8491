"""Who asks the catalog: a bearer token, a client's certificate or a subject of NATS → a caller, as the file
`catalog.access` says now.
"""

from __future__ import annotations

import asyncio
import ipaddress
import ssl
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from kvbm.catalog.access.file import CallerEntry, Role, hashed, read_entries
from kvbm.core.errors import ConfigError
from kvbm.files import WatchedFiles
from kvbm.safe_log import SafeLog

log = SafeLog()

LOOK_S = 1.0
AT_ONCE_BYTES = 32 << 10  # of a file that is read within the loop, some milliseconds
LEAST_LOOK_S = 0.01
_AGAIN_LOOKS = 10  # until a bad file that has not changed is tried again: there may have been no descriptors
_LONGEST_HEADER = 512


class Caller(NamedTuple):
    """Who asks.

    Attributes:
        tenants: whose namespaces it may know of; None for all.
    """

    name: str
    role: Role
    tenants: frozenset[str] | None

    @property
    def sees_all(self) -> bool:
        """Whether nothing is kept from it."""
        return self.tenants is None and self.role != "metrics"


EMBEDDED = Caller("", "operator", None)


class AccessOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How the catalog knows who asks.

    Attributes:
        file: of callers, see `access.file`; "" for none.
        open: without a file, whoever reaches the port is an operator, wherever it listens.
        hosts: without a file, on the loopback: names beside localhost that requests may call it by.
        tls_cert, tls_key: the server's certificate and key (PEM); "" for plain HTTP. tls_client_ca: who signs clients'
            certificates.
    """

    file: str = ""
    open: bool = False
    hosts: tuple[str, ...] = ()
    tls_cert: str = ""
    tls_key: str = ""
    tls_client_ca: str = ""


class _Callers(NamedTuple):
    by_hash: Mapping[str, CallerEntry]
    by_certificate: Mapping[str, CallerEntry]
    by_nats: Mapping[str, CallerEntry]


class Access:
    """Tells who asks.

    One asyncio loop. A file that has changed, and then stayed as it is for `LOOK_S`, is read again: with the next
    request, or by `follow`.

    A file that cannot be used keeps what was read before, is told once, and shows in `trouble`.

    Attributes:
        trouble: why the file that is there is not the one that counts; "" while it is.
    """

    def __init__(
        self, file: str = "", clock: Callable[[], float] = time.monotonic, wall_clock: Callable[[], float] = time.time
    ) -> None:
        """
        Args:
            file: of callers; "" takes everybody for the embedded operator.
        Raises: ConfigError: the file cannot be used.
        """
        self.trouble = ""
        self._path = Path(file) if file else None
        self._clock, self._wall_clock = clock, wall_clock
        self._looked_s = self._taken_s = clock()
        self._file = WatchedFiles(*[file] if file else [])
        self._is_followed = False
        self._is_left = False  # a long file is left to `follow`, which reads it beside the loop
        self._callers = _Callers({}, {}, {})
        if self._path is not None:
            self._callers = _by_proof(read_entries(self._path))

    def caller(self, authorization: str | None, certificate: Mapping[str, Any] | None) -> Caller | None:
        """Who asks;

        None: nobody we know. A token that is given counts alone: a wrong one is not helped by a certificate.

        Tokens are found by their hash, so how long it takes tells nothing of those that are good.

        Args:
            authorization: the request's header.
            certificate: the peer's, as `ssl.SSLObject.getpeercert` gives it, checked against the CA before.
        """
        if self._path is None:
            return EMBEDDED
        self.look()
        if authorization is not None:
            entry = self._callers.by_hash.get(hashed(_token(authorization)))
        else:
            entry = self._certified(certificate) if certificate else None
        return self._good(entry)

    def nats_caller(self, name: str) -> Caller | None:
        """Who asks over NATS; None: nobody we know.

        Args:
            name: in the subject, which the server lets nobody else use.
        """
        if self._path is None:
            return EMBEDDED
        self.look()
        return self._good(self._callers.by_nats.get(name))

    def nats_names(self) -> list[str] | None:
        """Who may ask over NATS; None: everybody."""
        if self._path is None:
            return None
        self.look()
        return list(self._callers.by_nats)

    def take(self, other: Access) -> bool:
        """From now on the callers are those of another, whose file has just been read. Whether any differs."""
        is_other = self._callers != other._callers
        self._path, self._file, self._callers = other._path, other._file, other._callers
        self._looked_s = self._taken_s = self._clock()
        self.trouble, self._is_left = "", False
        return is_other

    def look(self) -> None:
        """Read the file again if it has changed; at most once in `LOOK_S`."""
        if self._path is None or not self._is_due():
            return
        if self._is_followed and self._file.seen_bytes > AT_ONCE_BYTES:
            self._is_left = True
            return
        found = _found(self._path)
        if self._file.is_as_seen():
            self._take(found)

    async def follow(self) -> None:
        """Look for as long as the catalog serves, also while nobody asks.

        A long file is read beside the loop, which goes on meanwhile.
        """
        if self._path is None:
            return
        self._is_followed = True
        try:
            while True:
                await asyncio.sleep(max(LOOK_S, LEAST_LOOK_S))
                if self._is_due() or (self._is_left and self._file.has_stayed(self._clock(), LOOK_S)):
                    await self._read_beside(self._path)  # another by now, maybe
        finally:
            self._is_followed = False

    async def _read_beside(self, path: Path) -> None:
        self._is_left, seen = False, self._file.seen
        try:
            found = await asyncio.to_thread(_found, path)
        except RuntimeError:  # there are no threads to be had
            self._is_left = True
            return
        if path == self._path and self._file.seen == seen and self._file.is_as_seen():
            self._take(found)

    def _is_due(self) -> bool:
        """Look at the file, at most once in `LOOK_S`; whether it is to be read."""
        now_s = self._clock()
        if now_s - self._looked_s < LOOK_S:
            return False
        self._looked_s = now_s
        again = bool(self.trouble) and now_s - self._taken_s >= _AGAIN_LOOKS * LOOK_S
        return self._file.has_changed(now_s, LOOK_S) or (again and self._file.has_stayed(now_s, LOOK_S))

    def _take(self, found: _Callers | ConfigError) -> None:
        self._file.take()
        self._taken_s = self._clock()
        if isinstance(found, ConfigError):
            if not self.trouble:
                log.warning(
                    "catalog.access_kept", why=str(found), remedy="callers are as before until the file is good"
                )
            self.trouble = f"callers are as before: {found}"
            return
        self._callers, self.trouble, self._is_left = found, "", False
        log.info(
            "catalog.access_read",
            tokens=len(self._callers.by_hash),
            certificates=len(self._callers.by_certificate),
            nats=len(self._callers.by_nats),
        )

    def _good(self, entry: CallerEntry | None) -> Caller | None:
        if entry is None or (entry.not_after is not None and entry.not_after <= self._wall_clock()):
            return None
        return Caller(entry.name, entry.role, frozenset() if entry.role == "metrics" else entry.tenants)

    def _certified(self, certificate: Mapping[str, Any]) -> CallerEntry | None:
        end = certificate.get("notAfter")
        if not isinstance(end, str) or ssl.cert_time_to_seconds(end) <= self._wall_clock():
            return None  # a connection may outlive its certificate
        return next((found for name in _names(certificate) if (found := self._callers.by_certificate.get(name))), None)


def check_exposed(options: AccessOptions, address: str) -> None:
    """Refuse to serve beyond this machine when nobody is asked who they are. Raises ConfigError.

    Args:
        address: the IP address that is listened on.
    """
    if options.tls_client_ca and not options.file:
        raise ConfigError(
            "catalog.tls_client_ca is set without catalog.access, which says who the names in certificates are; give "
            "both"
        )
    if options.tls_client_ca and not options.tls_cert:
        raise ConfigError("catalog.tls_client_ca is set without catalog.tls_cert and catalog.tls_key; give all three")
    if bool(options.tls_cert) != bool(options.tls_key):
        lacks, has = ("tls_key", "tls_cert") if options.tls_cert else ("tls_cert", "tls_key")
        raise ConfigError(f"catalog.{has} is set without catalog.{lacks}; give both, or neither")
    if options.file or options.open or ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        if options.file and not options.tls_cert and not ipaddress.ip_address(address.partition("%")[0]).is_loopback:
            log.warning("catalog.tokens_in_clear", address=address, remedy="set catalog.tls_cert and catalog.tls_key")
        return
    raise ConfigError(
        f"the catalog would answer everybody who reaches {address}; make a file of callers with kvbm-catalog token and "
        "set "
        "catalog.access to it, or set catalog.open = true, or listen on 127.0.0.1"
    )


def _found(path: Path) -> _Callers | ConfigError:
    """What a file says now, or what is wrong with it."""
    try:
        return _by_proof(read_entries(path))
    except ConfigError as error:
        return error


def _by_proof(entries: list[CallerEntry]) -> _Callers:
    return _Callers(
        {entry.sha256: entry for entry in entries if entry.kind == "token"},
        {entry.name: entry for entry in entries if entry.kind == "certificate"},
        {entry.name: entry for entry in entries if entry.kind == "nats"},
    )


def _token(authorization: str) -> str:
    scheme, _, token = authorization[:_LONGEST_HEADER].partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""  # which is no token's: `read_entries` refuses its hash


def _names(certificate: Mapping[str, Any]) -> list[str]:
    """What a certificate calls its owner: URIs and DNS names; the common name where there are none, because who signs
    may check it less.
    """
    others = certificate.get("subjectAltName", ())
    names = [value for kind in ("URI", "DNS") for found, value in others if found == kind]
    return names or [value for part in certificate.get("subject", ()) for key, value in part if key == "commonName"]
