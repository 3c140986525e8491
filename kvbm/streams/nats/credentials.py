"""How a client of the stream proves who it is and knows whom it speaks to: keys and certificates."""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from nats.aio.client import Client, RawCredentials
from nats.errors import Error as NatsError
from nats.errors import ProtocolError

from kvbm.core.errors import ConfigError, MissingExtraError
from kvbm.core.nats_address import servers_of
from kvbm.files import make_folder, read_small

INBOX = "_INBOX"

_SEED_MARK = "BEGIN USER NKEY SEED"
_JWT_MARK = "BEGIN NATS USER JWT"


class Credentials(NamedTuple):
    """How a client proves who it is and knows the server, as the settings `nats.*` say.

    Attributes:
        credentials: file of a user's JWT and seed (.creds). nkey_seed: file with an nkey's seed.
        tls_ca, tls_cert, tls_key: files (PEM): who is trusted, and this side's certificate.
        inbox: prefix of the subjects answers come on; the server allows a user its own alone.
        grant: what to do where the server refuses something, in words.
    """

    credentials: str = ""
    nkey_seed: str = ""
    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    inbox: str = INBOX
    grant: str = ""

    def wants_tls(self, url: str) -> bool:
        """Whether a connection without TLS is refused."""
        return bool(self.tls_ca or self.tls_cert) or (bool(url) and any(server.is_tls for server in servers_of(url)))

    def connect_options(self, url: str) -> dict[str, Any]:
        """What nats-py's `connect` takes for it.

        Each file is read here, once: what is wrong is said at the start, and a file that is replaced while a connection
        is made is the old one or the new one.

        Raises: ConfigError: files that cannot be used. MissingExtraError: keys need the package nkeys.
        """
        options: dict[str, Any] = {"inbox_prefix": self.inbox}
        if self.credentials and self.nkey_seed:
            raise ConfigError("nats.credentials and nats.nkey_seed are both set; keep one of them")
        if self.credentials:
            text = _read("nats.credentials", self.credentials)
            lines = text.splitlines()
            if _JWT_MARK not in text or _SEED_MARK not in text:
                raise ConfigError(
                    f"nats.credentials {self.credentials} has no user's JWT and seed; give a .creds file, as nsc "
                    "writes it"
                )
            at = next(index for index, line in enumerate(lines) if _SEED_MARK in line)
            _check_seed("nats.credentials", self.credentials, lines[at + 1] if at + 1 < len(lines) else "")
            options["user_credentials"] = RawCredentials(text)
        elif self.nkey_seed:
            seed = _read("nats.nkey_seed", self.nkey_seed)
            _check_seed("nats.nkey_seed", self.nkey_seed, seed)
            options["nkeys_seed_str"] = seed.strip()
        if self.wants_tls(url):
            options["tls"] = self._tls_context()
        elif self.tls_key:
            raise ConfigError("nats.tls_key is set without nats.tls_cert; give both, or neither")
        return options

    def _tls_context(self) -> ssl.SSLContext:
        if bool(self.tls_cert) != bool(self.tls_key):
            lacks, has = ("tls_key", "tls_cert") if self.tls_cert else ("tls_cert", "tls_key")
            raise ConfigError(f"nats.{has} is set without nats.{lacks}; give both, or neither")
        context = ssl.create_default_context()
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if self.tls_ca:
            text = _read("nats.tls_ca", self.tls_ca)
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # that CA alone, not those of the system
            context.minimum_version = ssl.TLSVersion.TLSv1_2
            try:
                context.load_verify_locations(cadata=text)
            except (ssl.SSLError, ValueError, TypeError) as error:  # an empty file; one that is not ASCII
                raise ConfigError(
                    f"nats.tls_ca {self.tls_ca} holds no certificate ({_reason(error)}); give PEM"
                ) from None
        if self.tls_cert:
            _read("nats.tls_cert", self.tls_cert)
            _read("nats.tls_key", self.tls_key)
            try:
                context.load_cert_chain(self.tls_cert, self.tls_key, password=_no_password)
            except (OSError, ValueError) as error:  # ssl.SSLError is an OSError, and a file may have gone
                raise ConfigError(
                    f"nats.tls_cert {self.tls_cert} and nats.tls_key {self.tls_key} do not belong together, or are no "
                    "PEM "
                    f"without password ({_reason(error)})"
                ) from None
        return context


class CheckedClient(Client):
    """A client that says nothing to a server without TLS when TLS is wanted; nats-py would go on in the clear.

    Attributes:
        wants_tls: set before `connect`.
        server_info: what the server last said of itself.
    """

    wants_tls = False
    server_info: Mapping[str, Any] = MappingProxyType({})

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        if not isinstance(info.get("max_payload", 0), int):
            raise ProtocolError
        self.server_info = info
        if self.wants_tls and not info.get("tls_required"):
            raise NoTlsError
        await super()._process_info(info, initial_connection)


class NoTlsError(NatsError):
    """The server does not offer TLS."""

    def __str__(self) -> str:
        return "the server offers no TLS, and the settings want it"


def keep_seed(path: Path) -> str:
    """The public key (U…) of the seed in a file; a new seed is put there, for its owner's eyes alone, if there is none.

    Raises: ConfigError: the file cannot be read or written, or holds something else. MissingExtraError.
    """
    nkeys = _nkeys()
    if not path.exists():
        seed = nkeys.encode_seed(os.urandom(32), nkeys.PREFIX_BYTE_USER)
        try:
            make_folder(path.parent)
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(bytes(seed) + b"\n")
        except OSError as error:
            raise ConfigError(f"{path} cannot be written ({error.strerror}); choose another folder for keys") from None
    return _check_seed("seed file", str(path), _read("seed file", str(path)))


def _nkeys() -> Any:
    try:
        import nkeys
    except ImportError:
        raise MissingExtraError("nkeys", "nkeys") from None
    return nkeys


def _check_seed(key: str, path: str, seed: str) -> str:
    """The public key of a user's seed. Raises ConfigError: it is none."""
    nkeys = _nkeys()
    try:
        pair = nkeys.from_seed(bytearray(seed.strip().encode()))
        public = str(pair.public_key.decode())
    except (nkeys.NkeysError, ValueError, IndexError, TypeError):
        public = ""
    if not public.startswith("U"):
        raise ConfigError(f"{key} {path} holds no seed of a user (it begins with SU); give the right file")
    return public


def _read(key: str, path: str) -> str:
    try:
        return read_small(Path(path)).decode("ascii", errors="replace")
    except OSError as error:
        raise ConfigError(f"{key} {path} cannot be read ({error.strerror}); correct it") from None


def _no_password() -> str:
    raise ValueError("the key is locked by a password")


def _reason(error: Exception) -> str:
    return str(getattr(error, "reason", "") or error)
