"""How a store is reached, said once: the client that finds it and the one that carries its bytes trust, go around and
wait alike.

Left to themselves they differ. boto3 trusts certifi's list, or AWS_CA_BUNDLE; obstore trusts the system's, or
SSL_CERT_FILE. boto3 and Azure's client read NO_PROXY without networks, and all of them ask a proxy for what is on this
machine.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit
from urllib.request import (  # type: ignore[attr-defined]  # typeshed lacks the second
    getproxies_environment,
    proxy_bypass_environment,
)

from kvbm.core.errors import ConfigError

if TYPE_CHECKING:
    from obstore.store import ClientConfig

_LONG_S = 3600.0  # no request ends by its length: its reads have a timeout, its call has a deadline
_CA_VARIABLES = ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE")
# where systems keep the list of those they trust: Debian, Fedora and RHEL, SUSE, Alpine
_SYSTEM_LISTS = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
)
_QUERY = re.compile(r"\?[^\s)\]'\"]+")
_NO_PROXY_URL = (
    "http://127.0.0.1:9"  # of a proxy that is never asked: it keeps the client from reading the environment itself
)


class RequestLimits(NamedTuple):
    """What requests may take.

    Attributes:
        requests_in_flight: of one store, over all calls.
        connect_timeout_s: until a connection stands.
        read_timeout_s: of an answer that does not come, or stops coming; then it is asked again, if the deadline leaves
            time.
    """

    requests_in_flight: int = 8
    connect_timeout_s: float = 2.0
    read_timeout_s: float = 5.0


LIMITS = RequestLimits()


class StoreLink(NamedTuple):
    """How one store is reached.

    Attributes:
        url: of its endpoint.
        trusted: file (PEM) of who signs its certificate; "" where the system has no list and nobody names one.
        proxy: URL of the proxy that is asked for it, "" for none.
    """

    url: str
    trusted: str
    proxy: str
    limits: RequestLimits

    @property
    def proxies(self) -> dict[str, str]:
        """By scheme, as Python's clients take them. An empty one keeps them from looking in the environment."""
        return {"http": self.proxy, "https": self.proxy} if self.proxy else {}

    def client_options(self) -> ClientConfig:
        """How obstore talks. Raises ConfigError: the file of who is trusted cannot be read."""
        options: ClientConfig = {
            "allow_http": self.url.startswith("http://"),
            "connect_timeout": timedelta(seconds=self.limits.connect_timeout_s),
            "read_timeout": timedelta(seconds=self.limits.read_timeout_s),
            "timeout": timedelta(seconds=_LONG_S),
            "pool_max_idle_per_host": str(self.limits.requests_in_flight),
        }
        if self.trusted and self.trusted not in _SYSTEM_LISTS:  # which it reads anyway
            options["root_certificate"] = _certificates(self.trusted)
        if self.proxy:
            options["proxy_url"] = self.proxy
        elif getproxies_environment():
            options["proxy_url"] = _NO_PROXY_URL
            options["proxy_excludes"] = f"*,{urlsplit(self.url).hostname or ''}"  # "*" stands for names alone
        return options


def link_to(url: str, ca: str = "", named: str = "", limits: RequestLimits = LIMITS) -> StoreLink:
    """The link to an endpoint.

    Args:
        ca: `pools.object.ca`.
        named: a file of who is trusted by the technology's own ways, such as AWS_CA_BUNDLE or a profile.
    Raises: ConfigError: a file that is named cannot be read, or holds no certificate; a URL with a password in it.
    """
    if "@" in urlsplit(url).netloc:
        raise ConfigError(
            "the store's endpoint has a user or a password in it, which no client takes; leave them out of "
            "pools.object.endpoint"
        )
    trusted = trusted_file(ca, named)
    if trusted and url.startswith("https://"):
        _certificates(trusted)
    return StoreLink(url, trusted, proxy_for(url), limits)


def trusted_file(ca: str = "", named: str = "", environment: Mapping[str, str] = os.environ) -> str:
    """The file (PEM) of who is trusted: what was set, what the environment names, the system's list, certifi's;

    "" for none of them.

    A variable that names the system's list says nothing, for many images set all of them so; nor does one that names a
    folder.
    """
    if ca:
        return ca
    for said in (named, *(environment.get(name, "") for name in _CA_VARIABLES)):
        if said and said not in _SYSTEM_LISTS and not Path(said).is_dir():
            return said
    for path in _SYSTEM_LISTS:
        if Path(path).is_file():
            return path
    try:
        from certifi import where
    except ModuleNotFoundError:
        return ""
    return where()


def proxy_for(url: str) -> str:
    """The proxy that the environment names for a URL; "" for none, and for what is on this machine.

    NO_PROXY may name hosts, the ends of their names, and networks (10.0.0.0/8).
    """
    parts = urlsplit(url)
    host = parts.hostname or ""
    proxies = getproxies_environment()
    proxy = proxies.get(parts.scheme) or proxies.get("all") or ""
    if not proxy or is_here(host) or _is_in_network(host, proxies.get("no", "")):
        return ""
    if proxy_bypass_environment(parts.netloc.rpartition("@")[2], proxies):
        return ""
    return proxy if "://" in proxy else f"http://{proxy}"


def is_here(host: str) -> bool:
    """Whether a host is this machine's loopback."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _is_in_network(host: str, no_proxy: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    for entry in no_proxy.split(","):
        try:
            if address in ipaddress.ip_network(entry.strip(), strict=False):
                return True
        except ValueError:
            continue  # a name, or nothing
    return False


def first_line(text: str) -> str:
    """Of a client's words, without the queries of URLs: a signature (SAS) stands there."""
    return _QUERY.sub("?…", text.partition("\n")[0])[:300]


def certificate_words(error: object) -> str:
    """What to do about an error of a Python client that comes from a certificate; "" for any other."""
    return "; name who signs its certificate in pools.object.ca" if "CERTIFICATE_VERIFY_FAILED" in str(error) else ""


def _certificates(path: str) -> bytes:
    """The bytes of a file of certificates. Raises ConfigError: it cannot be read, or has none."""
    try:
        held = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(
            f"the file of trusted certificates {path} cannot be read ({error.strerror}); correct pools.object.ca, "
            "AWS_CA_BUNDLE,"
            " REQUESTS_CA_BUNDLE or SSL_CERT_FILE, whichever names it"
        ) from None
    if b"-----BEGIN CERTIFICATE-----" not in held and b"-----BEGIN TRUSTED CERTIFICATE-----" not in held:
        raise ConfigError(f"the file of trusted certificates {path} has no certificate (PEM); name another")
    return held
