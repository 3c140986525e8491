"""Which proxy the environment names for an address over HTTP: `http_proxy`, `https_proxy` and `no_proxy`, in small or
large letters.
"""

from __future__ import annotations

import ipaddress
import os
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies_environment, proxy_bypass

import urllib3

from kvbm.core.errors import CatalogError

_HERE = "localhost,127.0.0.1,::1"


def proxy_of(url: str) -> str:
    """The proxy to ask for a URL, "" for none.

    What is on this machine's loopback is never asked through a proxy. Of `no_proxy`, names count as Python's own
    library has them, and networks (10.0.0.0/8) for addresses.
    """
    parts = urlsplit(url)
    host = parts.hostname or ""
    proxies = getproxies_environment()
    found = proxies.get(parts.scheme, "")
    if not found or is_here(host) or proxy_bypass(parts.netloc.rpartition("@")[2]):
        return ""
    if _is_within(host, proxies.get("no", "")):
        return ""
    return found if "://" in found else f"http://{found}"


def is_here(host: str) -> bool:
    """Whether a host is this machine's loopback."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified


def _is_within(host: str, networks: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    for one in networks.split(","):
        try:
            if address in ipaddress.ip_network(one.strip(), strict=False):
                return True
        except ValueError:
            continue  # a name
    return False


def proxied(proxy: str, **options: object) -> urllib3.ProxyManager:
    """Connections through a proxy, whose user and password stand in its URL.

    Raises CatalogError: it is no proxy of HTTP.
    """
    try:
        parts = urlsplit(proxy)
        bare = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
        asks = f"{unquote(parts.username)}:{unquote(parts.password or '')}" if parts.username is not None else None
        headers = urllib3.make_headers(proxy_basic_auth=asks)
        return urllib3.ProxyManager(bare, proxy_headers=headers, **options)  # type: ignore[arg-type]
    except (urllib3.exceptions.HTTPError, ValueError):
        raise CatalogError(
            f"the proxy {shown(proxy)} that the environment names cannot be used; correct http_proxy and https_proxy, "
            "or name the "
            "catalog's host in no_proxy"
        ) from None


def shown(proxy: str) -> str:
    """A proxy's URL without its user and password."""
    parts = urlsplit(proxy)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"


def reaching_here() -> dict[str, str]:
    """For the environment of children: what listens on the loopback is asked itself, whatever proxies are named."""
    before = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    words = f"{before},{_HERE}" if before.strip() and before.strip() != "*" else before.strip() or _HERE
    return {"no_proxy": words, "NO_PROXY": words}
