"""How whoever asks the catalog proves who it is, and knows that it is the catalog: a token, a CA, a certificate.

All are files that may be replaced while they are in use.
"""

from __future__ import annotations

import os
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from kvbm.core.errors import ConfigError
from kvbm.files import settled_stamp
from kvbm.locate.nats_proof import NO_NATS_CREDENTIALS, NatsCredentials
from kvbm.safe_log import SafeLog

log = SafeLog()

LOOK_S = 1.0
_MOST_TOKEN_BYTES = 4096


class CatalogCredentials(NamedTuple):
    """Files, as the settings `catalog.*` name them; "" for none.

    Attributes:
        token: the bearer token.
        tls_ca: who signs the catalog's certificate (PEM); "" trusts those the system trusts.
        client_cert, client_key: this side's certificate and key (PEM).
        nats: those of who asks over NATS, instead of all others.
    """

    token: str = ""
    tls_ca: str = ""
    client_cert: str = ""
    client_key: str = ""
    nats: NatsCredentials = NO_NATS_CREDENTIALS


NO_CREDENTIALS = CatalogCredentials()


class CredentialProof:
    """What the files of credentials hold now. Whoever calls it from several threads guards it.

    Files that cannot be used keep what was read before, and are told once.

    Attributes:
        token: "" for none.
        context: of TLS; None for plain HTTP. Another one when its files have changed.
        shows_certificate: whether this side shows one.
    """

    def __init__(
        self, credentials: CatalogCredentials, is_tls: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Raises ConfigError: which file cannot be used."""
        self._credentials, self._is_tls, self._clock = credentials, is_tls, clock
        if bool(credentials.client_cert) != bool(credentials.client_key):
            lacks, has = ("client_key", "client_cert") if credentials.client_cert else ("client_cert", "client_key")
            raise ConfigError(f"catalog.{has} is set without catalog.{lacks}; give both, or neither")
        self.shows_certificate = is_tls and bool(credentials.client_cert)
        self._looked_s = clock()
        self._is_told = False
        self._token_seen, self._context_seen = self._stamps()
        self.token = _read_token(credentials.token) if credentials.token else ""
        self.context = _new_context(credentials) if is_tls else None

    def look(self, again: bool = False) -> bool:
        """Read files that have changed; whether one has. At most once in `LOOK_S`, but for `again`."""
        now_s = self._clock()
        if self._credentials[:4] == NO_CREDENTIALS[:4] or (now_s - self._looked_s < LOOK_S and not again):
            return False
        self._looked_s = now_s
        token_seen, context_seen = self._stamps()
        before = (self.token, self.context)
        try:
            if token_seen != self._token_seen:
                self.token, self._token_seen = _read_token(self._credentials.token), token_seen
            if context_seen != self._context_seen and self._is_tls:
                self.context, self._context_seen = _new_context(self._credentials), context_seen
        except ConfigError as error:
            if not self._is_told:
                log.warning(
                    "catalog.credentials_kept", why=str(error), remedy="those before are used until the file is good"
                )
            self._is_told = True
        else:
            self._is_told = False
        return (self.token, self.context) != before

    def _stamps(self) -> tuple[object, tuple[object, ...]]:
        files = self._credentials
        context = tuple(map(settled_stamp, (files.tls_ca, files.client_cert, files.client_key)))
        return settled_stamp(files.token), context


def _read_token(path: str) -> str:
    """Raises ConfigError. No message shows a token."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            data = file.read(_MOST_TOKEN_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"catalog.token {path} cannot be read ({error.strerror}); write the token there that kvbm-catalog token "
            "has printed"
        ) from None
    token = data.decode("ascii", "replace").strip()
    if (
        not token
        or len(data) > _MOST_TOKEN_BYTES
        or not token.isascii()
        or any(one <= " " or one > "~" for one in token)
    ):
        raise ConfigError(f"catalog.token {path} holds no token; write one line, as kvbm-catalog token has printed it")
    return token


def _new_context(credentials: CatalogCredentials) -> ssl.SSLContext:
    """Raises ConfigError: which file, and what is wrong with it."""
    for key in ("tls_ca", "client_cert", "client_key"):
        path = getattr(credentials, key)
        if path and not Path(path).is_file():
            raise ConfigError(f"catalog.{key} {path} is no file; correct it")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) if credentials.tls_ca else ssl.create_default_context()
    file = ssl.get_default_verify_paths().cafile  # None where it is not there
    if not credentials.tls_ca and file and not context.cert_store_stats()["x509_ca"]:
        # Python says nothing where it cannot open the file, for want of descriptors for one.
        raise ConfigError(f"no CA was read from {file}, the system's; set catalog.tls_ca, or raise ulimit -n")
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if credentials.tls_ca:  # that CA alone, not those of the system
        try:
            context.load_verify_locations(credentials.tls_ca)
        except OSError as error:
            raise ConfigError(
                f"catalog.tls_ca {credentials.tls_ca} holds no certificate ({_reason(error)}); give PEM"
            ) from None
    if credentials.client_cert:
        try:
            context.load_cert_chain(credentials.client_cert, credentials.client_key, password=_no_password)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"catalog.client_cert {credentials.client_cert} and catalog.client_key {credentials.client_key} do not "
                "belong together, "
                f"or are no PEM without password ({_reason(error)})"
            ) from None
    return context


def _no_password() -> str:
    raise ValueError("the key has a password")


def _reason(error: Exception) -> str:
    return getattr(error, "reason", None) or str(error)
