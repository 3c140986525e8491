"""How a store is reached is decided once, for both clients: whom they trust, which proxy they ask, how long
they wait.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from kvbm.core.errors import ConfigError
from kvbm.pools.stores import link as links
from kvbm.pools.stores.link import RequestLimits, first_line, is_here, link_to, proxy_for, trusted_file
from tests.extras import needed

PROXY = "http://proxy:3128"
CERTIFICATE = b"-----BEGIN CERTIFICATE-----\nMA==\n-----END CERTIFICATE-----\n"


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("url", "variables", "proxy"),
    [
        ("http://store:9000", {}, ""),
        ("http://store:9000", {"http_proxy": PROXY}, PROXY),
        ("http://store:9000", {"https_proxy": PROXY}, ""),
        ("https://store", {"HTTPS_PROXY": PROXY}, PROXY),
        ("https://store", {"all_proxy": "proxy:3128"}, PROXY),
        ("http://127.0.0.1:9000", {"http_proxy": PROXY}, ""),
        ("http://127.9.9.9", {"http_proxy": PROXY}, ""),
        ("http://localhost:9000", {"http_proxy": PROXY}, ""),
        ("http://minio.localhost", {"http_proxy": PROXY}, ""),
        ("http://[::1]:9000", {"http_proxy": PROXY}, ""),
        ("http://store:9000", {"http_proxy": PROXY, "no_proxy": "*"}, ""),
        ("http://store:9000", {"http_proxy": PROXY, "NO_PROXY": "other, store"}, ""),
        ("http://s.svc.cluster.local", {"http_proxy": PROXY, "no_proxy": ".svc.cluster.local"}, ""),
        ("http://s.svc.cluster.local", {"http_proxy": PROXY, "no_proxy": "cluster.local"}, ""),
        ("http://store:9000", {"http_proxy": PROXY, "no_proxy": "store:9000"}, ""),
        ("http://store:9000", {"http_proxy": PROXY, "no_proxy": "store:9001"}, PROXY),
        ("http://10.1.2.3:9000", {"http_proxy": PROXY, "no_proxy": "10.0.0.0/8,x"}, ""),
        ("http://11.1.2.3:9000", {"http_proxy": PROXY, "no_proxy": "10.0.0.0/8"}, PROXY),
    ],
)
def test_the_environment_says_which_proxy_and_nobody_asks_one_for_what_is_here(
    url: str, variables: dict[str, str], proxy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert proxy_for(url) == proxy


def test_names_of_this_machine_are_here_and_others_are_not() -> None:
    assert [is_here(host) for host in ("localhost", "127.0.0.1", "::1", "a.localhost", "store", "10.0.0.1", "")] == [
        True,
        True,
        True,
        True,
        False,
        False,
        False,
    ]


def test_the_first_that_names_who_is_trusted_counts(tmp_path: Path) -> None:
    assert trusted_file("/set", "/named", {"SSL_CERT_FILE": "/env"}) == "/set"
    assert trusted_file("", "/named", {"SSL_CERT_FILE": "/env"}) == "/named"
    assert trusted_file("", "", {"SSL_CERT_FILE": "/env", "REQUESTS_CA_BUNDLE": "/requests"}) == "/requests"
    assert trusted_file("", "", {"SSL_CERT_FILE": "/env"}) == "/env"
    everywhere = dict.fromkeys(("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"), links._SYSTEM_LISTS[0])
    assert trusted_file("", links._SYSTEM_LISTS[0], {**everywhere, "SSL_CERT_FILE": "/env"}) == "/env"
    assert trusted_file("", "", {"SSL_CERT_FILE": str(tmp_path)}) == trusted_file(
        "", "", {}
    )  # a folder of them is none


def test_where_nobody_names_anybody_the_systems_list_counts_and_then_certifis(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "list").write_bytes(CERTIFICATE)
    monkeypatch.setattr(links, "_SYSTEM_LISTS", (str(tmp_path / "none"), str(tmp_path / "list")))
    of_system = link_to("https://store")
    assert of_system.trusted == str(tmp_path / "list")
    assert "root_certificate" not in of_system.client_options()  # the client reads it itself
    monkeypatch.setattr(links, "_SYSTEM_LISTS", ())
    needed("certifi", "s3")
    options = link_to("https://store").client_options()
    assert b"BEGIN CERTIFICATE" in options["root_certificate"]  # type: ignore[operator]


def test_the_client_of_bytes_is_told_what_the_other_one_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ca = tmp_path / "ca.pem"
    ca.write_bytes(CERTIFICATE)
    monkeypatch.setenv("https_proxy", PROXY)
    link = link_to("https://store:9000", str(ca), limits=RequestLimits(3, 4.0, 5.0))
    assert link.proxies == {"http": PROXY, "https": PROXY}
    options = link.client_options()
    assert options["root_certificate"] == CERTIFICATE
    assert (options["proxy_url"], options["allow_http"], options["pool_max_idle_per_host"]) == (PROXY, False, "3")
    here = link_to("https://127.0.0.1:9000", str(ca))
    assert here.proxies == {}
    assert here.client_options()["proxy_excludes"] == "*,127.0.0.1"  # else it reads the environment


@pytest.mark.parametrize(("held", "words"), [(None, "cannot be read"), (b"hello", "has no certificate")])
def test_a_file_that_names_nobody_is_refused_by_its_name(tmp_path: Path, held: bytes | None, words: str) -> None:
    ca = tmp_path / "ca.pem"
    if held is not None:
        ca.write_bytes(held)
    with pytest.raises(ConfigError, match=rf"{ca}.*{words}"):
        link_to("https://store", str(ca))
    link_to("http://store", str(ca))  # nobody looks at it there


@pytest.mark.parametrize(
    "words",
    [
        "Error performing PUT https://a.blob.core.windows.net/c/x?sv=1&sig=SECRET in 3ms - HTTP error",
        (
            "HTTPSConnectionPool(host='a'): Max retries exceeded with url: /c?restype=container&sig=SECRET (Caused by "
            "…)\nsig=SECRET"
        ),
        "builder error for url (https://a/c?sig=SECRET)",
    ],
)
def test_a_clients_words_show_no_signature(words: str) -> None:
    assert "SECRET" not in first_line(words)
    assert first_line(words).endswith(("HTTP error", "…)", "?…)"))


def test_an_endpoint_with_a_password_is_refused_without_it() -> None:
    with pytest.raises(ConfigError, match="leave them out") as caught:
        link_to("http://user:hunter2@store:9000")
    assert "hunter2" not in str(caught.value)
