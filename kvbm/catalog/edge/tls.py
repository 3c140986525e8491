"""The catalog's side of TLS: a certificate and its key that may be replaced while it serves."""

from __future__ import annotations

import asyncio
import os
import ssl
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from kvbm.catalog.access.callers import LEAST_LOOK_S, LOOK_S, AccessOptions
from kvbm.core.errors import ConfigError, KvbmError
from kvbm.files import WatchedFiles, read_small
from kvbm.safe_log import SafeLog

log = SafeLog()


class ServerTls:
    """A context whose certificate, key and CA are those of the files as they are now.

    Files are looked at when a client connects, and by `follow`, at most once in `LOOK_S`, and read once they have
    stayed as they are for as long. A new set is tried in a context of its own, and takes the old one's place in one
    step; one whose parts do not belong together leaves the old one, is told once, and shows in `trouble`. Connections
    that are open go on. TLS 1.3 alone, without tickets: each connection shows its certificate.

    Attributes:
        context: for the server; it never changes.
        trouble: why the files that are there are not those that count; "" while they are.
    """

    def __init__(self, options: AccessOptions, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises ConfigError: the files cannot be used."""
        self.trouble = ""
        self._options, self._clock = options, clock
        self._looked_s = clock()
        self._files = WatchedFiles(*(one for one in (options.tls_cert, options.tls_key, options.tls_client_ca) if one))
        self._content = self._read()
        self._current = _new_context(options)
        self.context = _new_context(options)
        self.context.sni_callback = self._on_hello  # also called without a name

    def take(self, other: ServerTls) -> bool:
        """From now on the files are those of another, which has just been made. Whether what they hold differs."""
        is_other = self._content != other._content
        self._options, self._files, self._content, self._current = (
            other._options,
            other._files,
            other._content,
            other._current,
        )
        self.trouble, self._looked_s = "", self._clock()
        return is_other

    def look(self) -> None:
        """Read the files again if they have changed; at most once in `LOOK_S`."""
        now_s = self._clock()
        if now_s - self._looked_s < LOOK_S:
            return
        self._looked_s = now_s
        if not (self._files.has_stayed(now_s, LOOK_S) if self.trouble else self._files.has_changed(now_s, LOOK_S)):
            return
        content, wrong, context = self._read(), "", self._current
        try:
            context = _new_context(self._options)
        except ConfigError as error:
            wrong = str(error)
        if (
            self._read() != content
        ):  # they changed while the context was made of them: the next look takes what they are then
            return
        if wrong:
            if not self.trouble:
                log.warning(
                    "catalog.certificate_kept", why=wrong, remedy="the one before is used until the files are good"
                )
            self.trouble = f"the certificate is the one before: {wrong}"
            return
        self._files.take()
        # Young files are read once more, and are mostly the same.
        is_other = bool(self.trouble) or content != self._content
        self._current, self._content, self.trouble = context, content, ""
        if is_other:
            log.info("catalog.certificate_read", tls_cert=self._options.tls_cert)

    def _read(self) -> list[bytes]:
        """What the files have; nothing of one that cannot be read, which is then another one next time."""
        found = []
        for one in (self._options.tls_cert, self._options.tls_key, self._options.tls_client_ca):
            with suppress(OSError, KvbmError):
                found.append(read_small(Path(one)) if one else b"")
        return found

    async def follow(self) -> None:
        """Look for as long as the catalog serves: who connects after a quiet time is shown what is there, not
        what was.
        """
        while True:
            await asyncio.sleep(max(LOOK_S, LEAST_LOOK_S))
            self.look()

    def _on_hello(self, connection: ssl.SSLObject | ssl.SSLSocket, name: str | None, context: ssl.SSLContext) -> None:
        self.look()
        connection.context = self._current


def _new_context(options: AccessOptions) -> ssl.SSLContext:
    """Raises ConfigError: which file, and what is wrong with it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0
    for key, path in (
        ("tls_cert", options.tls_cert),
        ("tls_key", options.tls_key),
        ("tls_client_ca", options.tls_client_ca),
    ):
        if path:
            _check_readable(f"catalog.{key}", path)
    try:
        context.load_cert_chain(options.tls_cert, options.tls_key, password=_no_password)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise ConfigError(
            f"catalog.tls_cert {options.tls_cert} and catalog.tls_key {options.tls_key} do not belong together, or are "
            "no PEM without "
            f"password ({_reason(error)})"
        ) from None
    if options.tls_client_ca:
        try:
            context.load_verify_locations(options.tls_client_ca)
        except OSError as error:
            raise ConfigError(
                f"catalog.tls_client_ca {options.tls_client_ca} holds no certificate ({_reason(error)}); give PEM"
            ) from None
        context.verify_mode = ssl.CERT_OPTIONAL  # without one a caller needs a token
    return context


def _check_readable(key: str, path: str) -> None:
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(f"{key} {path} cannot be read ({error.strerror}); correct it") from None
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise ConfigError(f"{key} {path} is no regular file; give PEM")
    finally:
        os.close(file)


def _no_password() -> str:
    raise ValueError("the key has a password")


def _reason(error: Exception) -> str:
    return getattr(error, "reason", None) or str(error)
