"""Which proxy an address is asked through: none for this machine's loopback, else what the environment says."""

from __future__ import annotations

import pytest

from kvbm.core.errors import CatalogError
from kvbm.locate.http import CatalogClient
from kvbm.locate.proxies import is_here, proxied, proxy_of, reaching_here, shown

PROXY = "http://proxy:3128"


@pytest.fixture(autouse=True)
def _no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.mark.parametrize(
    ("url", "no_proxy", "proxy"),
    [
        ("http://catalog:7700", "", PROXY),
        ("https://catalog:7700", "", "http://tls-proxy:3129"),
        ("http://10.0.0.7:7700", "", PROXY),
        ("http://catalog:7700", "catalog", ""),
        ("http://catalog:7700", "catalog:7700", ""),
        ("http://catalog.kv.svc:7700", ".svc", ""),
        ("http://catalog.kv.svc:7700", "a, svc ,b", ""),
        ("http://catalog:7700", "*", ""),
        ("http://10.0.0.7:7700", "10.0.0.0/8", ""),
        ("http://10.0.0.7:7700", "192.168.0.0/16", PROXY),
        ("http://[fd00::7]:7700", "fd00::/8", ""),
        ("http://catalog:7700", "log", PROXY),
        *(
            (f"{scheme}://{host}:7700", "", "")
            for scheme in ("http", "https")
            for host in ("127.0.0.1", "127.0.1.1", "localhost", "[::1]", "0.0.0.0", "a.localhost")
        ),
    ],
)
@pytest.mark.parametrize("large", [False, True])
def test_an_address_is_asked_through_the_proxy_that_the_environment_names(
    url: str, no_proxy: str, proxy: str, large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("http_proxy", "proxy:3128"), ("https_proxy", "http://tls-proxy:3129"), ("no_proxy", no_proxy)):
        monkeypatch.setenv(name.upper() if large else name, value)
    assert proxy_of(url) == proxy


def test_without_proxies_none_is_asked() -> None:
    assert proxy_of("http://catalog:7700") == ""
    assert not is_here("catalog")


def test_a_proxys_password_is_sent_to_it_alone_and_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    proxy = "http://us%40er:hunt%2Fer2@proxy:3128"
    assert shown(proxy) == PROXY
    manager = proxied(proxy)
    assert manager.proxy_headers == {"proxy-authorization": "Basic dXNAZXI6aHVudC9lcjI="}
    assert manager.proxy is not None
    assert manager.proxy.url == PROXY
    monkeypatch.setenv("http_proxy", "socks5://user:hunter2@proxy:1080")
    with pytest.raises(CatalogError, match=r"socks5://proxy:1080.*no_proxy") as refused:
        CatalogClient("http://catalog:7700")
    assert "hunter2" not in str(refused.value)


def test_children_reach_what_listens_on_this_machine_whatever_proxies_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = "localhost,127.0.0.1,::1"
    assert reaching_here() == {"no_proxy": here, "NO_PROXY": here}
    monkeypatch.setenv("NO_PROXY", ".svc")
    assert reaching_here()["no_proxy"] == f".svc,{here}"
    monkeypatch.setenv("no_proxy", "*")
    assert reaching_here()["NO_PROXY"] == "*"
