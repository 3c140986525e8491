"""Where servers of NATS are, and who asks there: `nats://user:password@host:port`, several with commas between."""

from __future__ import annotations

from typing import NamedTuple
from urllib.parse import quote, unquote, urlsplit

from kvbm.core.errors import ConfigError

_PORT = 4222
_SCHEMES = ("nats", "tls")
_REFUSED = (
    "the URL of NATS cannot be used; write nats://host:port or tls://host:port, with commas between several; in a "
    "user or password write "
    "/ as %2F, ? as %3F, # as %23, @ as %40, : as %3A, a comma as %2C and % as %25"
)


class NatsServer(NamedTuple):
    """One server of a URL.

    Attributes:
        user, password: of the URL, as they are and not as they are written there; a user alone is a token.
        path: what stands behind the port, decoded, without empty parts.
    """

    host: str
    port: int
    is_tls: bool
    user: str = ""
    password: str | None = None
    path: tuple[str, ...] = ()

    @property
    def shown(self) -> str:
        """Its URL, without who asks."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'tls' if self.is_tls else 'nats'}://{host}:{self.port}"

    @property
    def url(self) -> str:
        """Its URL, with who asks."""
        scheme, _, place = self.shown.partition("://")
        asks = quote(self.user, safe="") + ("" if self.password is None else f":{quote(self.password, safe='')}")
        return f"{scheme}://{asks}@{place}" if asks else self.shown


def servers_of(url: str) -> list[NatsServer]:
    """The servers that a URL names; one without a scheme is nats://.

    Raises: ConfigError: it is none of NATS. The message shows nothing of it: what is written wrongly is often the
        password.
    """
    return [_server(one.strip()) for one in url.split(",")]


def _server(one: str) -> NatsServer:
    try:
        parts = urlsplit(one if "://" in one else f"nats://{one}")
        host, port = parts.hostname, parts.port
    except ValueError:
        raise ConfigError(_REFUSED) from None
    # a bare / ? or # in a password ends the host's part there: the rest, with the true host, is behind it
    if not host or parts.scheme not in _SCHEMES or parts.query or parts.fragment or "@" in parts.path:
        raise ConfigError(_REFUSED)
    password = None if parts.password is None else unquote(parts.password)
    path = tuple(unquote(name) for name in parts.path.split("/") if name)
    return NatsServer(host, port or _PORT, parts.scheme == "tls", unquote(parts.username or ""), password, path)
