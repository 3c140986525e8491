"""How whoever asks the catalog over NATS proves to the server who it is: a key, a JWT, a user and password, or
a token.
"""

from __future__ import annotations

import base64
import ssl
from pathlib import Path
from typing import Any, NamedTuple

from kvbm.core.asks import ANYBODY, is_caller
from kvbm.core.errors import CatalogError, ConfigError, MissingExtraError
from kvbm.core.nats_address import NatsServer, servers_of
from kvbm.files import read_small

_JWT_MARK = "BEGIN NATS USER JWT"
_SEED_MARK = "BEGIN USER NKEY SEED"
_CLUSTER = "local"


class NatsCredentials(NamedTuple):
    """Files, as the settings `nats.*` name them; "" for none. They are read at each connection.

    Attributes:
        credentials: a user's JWT and seed (.creds). nkey_seed: an nkey's seed.
        tls_ca, tls_cert, tls_key: who is trusted, and this side's certificate (PEM).
    """

    credentials: str = ""
    nkey_seed: str = ""
    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""


NO_NATS_CREDENTIALS = NatsCredentials()


class NatsTarget(NamedTuple):
    """Whom a URL names: servers, the cluster whose catalogs are asked, and who asks."""

    servers: list[NatsServer]
    cluster: str
    caller: str


def target_of(url: str) -> NatsTarget:
    """`nats://host:port/CLUSTER/CALLER`, several with commas between. Raises CatalogError: it cannot be used."""
    try:
        servers = servers_of(url)
    except ConfigError as error:
        raise CatalogError(f"catalog.url: {error}; behind the port comes /CLUSTER/CALLER") from None
    names = {(server.path[0], server.path[1] if len(server.path) > 1 else ANYBODY) for server in servers if server.path}
    if any(len(server.path) > 2 for server in servers):
        raise CatalogError("the catalog's URL cannot be used; write nats://host:port/CLUSTER/CALLER")
    if len(names) > 1:
        raise CatalogError("the catalog's URL names several clusters or callers; write one path: /CLUSTER/CALLER")
    cluster, caller = names.pop() if names else (_CLUSTER, ANYBODY)
    for what, name in (("cluster", cluster), ("caller", caller)):
        if not is_caller(name):
            raise CatalogError(f'the {what} {name!r} of the catalog\'s URL is none; use letters, digits, "-" and "_"')
    return NatsTarget(servers, cluster, caller)


class NatsProof:
    """What the files of credentials say when it is asked.

    Raises ConfigError, MissingExtraError: they cannot be used.
    """

    def __init__(self, credentials: NatsCredentials) -> None:
        self._files = credentials
        if credentials.credentials and credentials.nkey_seed:
            raise ConfigError("nats.credentials and nats.nkey_seed are both set; keep one of them")
        if bool(credentials.tls_cert) != bool(credentials.tls_key):
            lacks, has = ("tls_key", "tls_cert") if credentials.tls_cert else ("tls_cert", "tls_key")
            raise ConfigError(f"nats.{has} is set without nats.{lacks}; give both, or neither")

    def wants_tls(self, server: NatsServer) -> bool:
        """Whether nothing is said to the server without TLS."""
        return server.is_tls or bool(self._files.tls_ca or self._files.tls_cert)

    def connect_fields(self, server: NatsServer, nonce: str) -> dict[str, Any]:
        """What CONNECT says of who asks.

        Args:
            nonce: of the server, to be signed.
        """
        files = self._files
        if files.credentials:
            text = _read("nats.credentials", files.credentials)
            jwt, seed = _behind(text, _JWT_MARK), _behind(text, _SEED_MARK)
            if not jwt or not seed:
                raise ConfigError(
                    f"nats.credentials {files.credentials} has no user's JWT and seed; give a .creds file, as nsc "
                    "writes it"
                )
            _, signature = _signed("nats.credentials", files.credentials, seed, nonce)
            return {"jwt": jwt, "sig": signature}
        if files.nkey_seed:
            seed = _read("nats.nkey_seed", files.nkey_seed).strip()
            public, signature = _signed("nats.nkey_seed", files.nkey_seed, seed, nonce)
            return {"nkey": public, "sig": signature}
        if server.password is not None:
            return {"user": server.user, "pass": server.password}
        return {"auth_token": server.user} if server.user else {}

    def tls_context(self) -> ssl.SSLContext:
        """Of a connection with TLS."""
        files = self._files
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) if files.tls_ca else ssl.create_default_context()
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            if files.tls_ca:  # that CA alone, not those of the system
                context.load_verify_locations(cadata=_read("nats.tls_ca", files.tls_ca))
            if files.tls_cert:
                context.load_cert_chain(files.tls_cert, files.tls_key, password=_no_password)
        except (OSError, ValueError, TypeError) as error:  # TypeError: a file that is not ASCII
            raise ConfigError(
                "nats.tls_ca, nats.tls_cert and nats.tls_key cannot be used "
                f"({getattr(error, 'reason', None) or error}); give PEM, "
                "and a key without password that belongs to the certificate"
            ) from None
        return context


def _read(key: str, path: str) -> str:
    try:
        return read_small(Path(path)).decode("ascii", errors="replace")
    except OSError as error:
        raise ConfigError(f"{key} {path} cannot be read ({error.strerror}); correct it") from None


def _behind(text: str, mark: str) -> str:
    """The line behind the one with the mark."""
    lines = text.splitlines()
    at = next((index for index, line in enumerate(lines) if mark in line), len(lines))
    return lines[at + 1].strip() if at + 1 < len(lines) else ""


def _signed(key: str, path: str, seed: str, nonce: str) -> tuple[str, str]:
    """The public key of a seed, and the signature of the nonce. Raises ConfigError: it is no user's seed."""
    try:
        import nkeys
    except ImportError:
        raise MissingExtraError("nkeys", "nkeys") from None
    try:
        pair = nkeys.from_seed(bytearray(seed.encode()))
        public = str(pair.public_key.decode())
        signature = pair.sign(nonce.encode())
    except (nkeys.NkeysError, ValueError, IndexError, TypeError):
        public = ""
    if not public.startswith("U"):
        raise ConfigError(f"{key} {path} holds no seed of a user (it begins with SU); give the right file")
    return public, base64.urlsafe_b64encode(signature).rstrip(b"=").decode()


def _no_password() -> str:
    raise ValueError("the key has a password")
