"""What opens a store also moves its bytes: private CAs, proxies, and rights that are missing, with both clients of each
technology.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kvbm.core.errors import ConfigError, PoolError
from kvbm.pools.stores.base import TRIAL_PREFIX, Get, Got, Put, StoreAwayError
from kvbm.pools.stores.opening import open_store
from tests.certificates import certify
from tests.faulty_http import Fault, FaultyServer, faulty
from tests.object_stores import PATIENT, WAIT_S, Place, place_in
from tests.servers import AZURITE_ACCOUNT, AZURITE_KEY, free_port, redis_server

KINDS = ["s3", "azure"]
CA_VARIABLES = ("AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE")


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*CA_VARIABLES, *(f"{kind}_proxy" for kind in ("http", "https", "all", "no"))):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    for name in [name for name in os.environ if name.startswith("AZURE_")]:
        monkeypatch.delenv(name)


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Place:
    """A place with its credentials in the environment."""
    made = place_in(request.param, request)
    for name, value in made.environment.items():
        monkeypatch.setenv(name, value)
    return made


@pytest.fixture
def server(place: Place) -> Iterator[FaultyServer]:
    with faulty(place.endpoint) as running:
        yield running


def moves(place: Place, endpoint: str, **options: Any) -> None:
    """Open it as settings do, and move bytes."""
    with closing(open_store(place.url, endpoint=endpoint, limits=PATIENT, open_wait_s=WAIT_S, **options)) as store:
        assert store.put([Put("name", b"x")], WAIT_S) == [None]
        [got] = store.get([Get("name")], WAIT_S)
        assert isinstance(got, Got) and bytes(got.body) == b"x"
        assert [one.name for one in store.listed("", WAIT_S)] == ["name"]
        assert store.delete(["name"], WAIT_S) == [None]


def refusal(place: Place, endpoint: str, wait_s: float = WAIT_S, **options: Any) -> PoolError:
    with pytest.raises(PoolError) as caught:
        open_store(place.url, endpoint=endpoint, limits=PATIENT, open_wait_s=wait_s, **options)
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize("by", ["pools.object.ca", *CA_VARIABLES])
def test_a_private_ca_is_trusted_by_both_clients_however_it_is_named(
    by: str, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if by == "AWS_CA_BUNDLE" and place.kind != "s3":
        return  # it is Amazon's
    ca = certify(tmp_path, "ca")
    with faulty(place.endpoint, certify(tmp_path, "store", ca)) as server:
        if by in CA_VARIABLES:
            for name in CA_VARIABLES:  # as many images have them
                monkeypatch.setenv(name, "/etc/ssl/certs/ca-certificates.crt")
            monkeypatch.setenv(by, str(ca.cert))
            moves(place, server.url)
        else:
            moves(place, server.url, ca=str(ca.cert))


def test_a_certificate_that_nobody_trusts_is_named(place: Place, tmp_path: Path) -> None:
    ca, other = certify(tmp_path, "ca"), certify(tmp_path, "other")
    with faulty(place.endpoint, certify(tmp_path, "store", ca)) as server:
        said = str(refusal(place, server.url, ca=str(other.cert)))
    assert "CERTIFICATE_VERIFY_FAILED" in said or "certificate is not trusted" in said
    assert "pools.object.ca" in said


def test_a_file_of_certificates_that_is_none_is_refused(place: Place, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        open_store(place.url, endpoint="https://127.0.0.1:1/account", ca=str(tmp_path / "absent"))


def test_what_is_on_this_machine_is_asked_through_no_proxy(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")
    moves(place, place.endpoint)


@pytest.mark.parametrize("place", ["s3"], indirect=True)
def test_what_is_elsewhere_is_asked_through_the_proxy_by_both_clients(
    place: Place, server: FaultyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", server.url)
    moves(place, "http://store.invalid:9000")
    assert {asked.path.partition("/kvbm-")[0] for asked in server.asked} == {"http://store.invalid:9000"}


# -- the small object -------------------------------------------------------------------------------------------------


def test_what_was_tried_is_gone_and_nothing_is_remarked_on(place: Place) -> None:
    with closing(open_store(place.url, endpoint=place.endpoint, limits=PATIENT, open_wait_s=WAIT_S)) as store:
        assert list(store.listed("", WAIT_S)) == []
        assert store.remarks == ()  # type: ignore[attr-defined]


def test_who_may_not_put_reads(place: Place, server: FaultyServer) -> None:
    server.faults.append(Fault("status", 403, "AccessDenied", method="PUT"))
    with closing(open_store(place.url, endpoint=server.url, limits=PATIENT, open_wait_s=WAIT_S)) as store:
        assert "nothing can be put there (403 AccessDenied)" in store.remarks[-1]  # type: ignore[attr-defined]


def test_who_may_not_delete_leaves_it_to_the_janitor(place: Place, server: FaultyServer) -> None:
    server.faults += [Fault("status", 403, "AccessDenied", method=method) for method in ("DELETE", "POST")]
    with closing(open_store(place.url, endpoint=server.url, limits=PATIENT, open_wait_s=WAIT_S)) as store:
        assert "until a janitor comes" in store.remarks[-1]  # type: ignore[attr-defined]
        [left] = store.listed("", WAIT_S)
        assert left.name.startswith(TRIAL_PREFIX)


def test_a_store_that_opens_and_does_not_answer_the_client_of_bytes_is_away(place: Place, server: FaultyServer) -> None:
    server.faults.append(Fault("never", method="PUT"))
    error = refusal(place, server.url, wait_s=6.0)
    assert isinstance(error, StoreAwayError)
    assert "it opens, and a small object cannot be put (no answer within" in str(error)


@pytest.mark.parametrize("place", ["s3"], indirect=True)
def test_a_store_that_opens_and_gives_no_bytes_is_refused(place: Place, server: FaultyServer) -> None:
    server.faults += [Fault("status", 403, "AccessDenied", method=method) for method in ("PUT", "GET")]
    error = refusal(place, server.url)
    assert not isinstance(error, StoreAwayError)
    assert "it opens, and a small object cannot be put (403 AccessDenied)" in str(error)


# -- secrets ----------------------------------------------------------------------------------------------------------


def test_secrets_may_have_white_space_at_their_ends(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in place.environment.items():
        if "REGION" not in name:
            monkeypatch.setenv(name, f"{value}\n")
    moves(place, place.endpoint)


@pytest.mark.parametrize("place", ["azure"], indirect=True)
@pytest.mark.parametrize(
    ("words", "with_account"),
    [
        ("DefaultEndpointsProtocol=http;AccountName={account};AccountKey={key};BlobEndpoint={endpoint};", True),
        ("BlobEndpoint={endpoint}/;AccountName={account};AccountKey={key}\n", False),
        ("accountkey={key};accountname={account};blobendpoint={endpoint}", False),
    ],
)
def test_a_connection_string_says_all_there_is(
    words: str, with_account: bool, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AZURE_STORAGE_KEY")
    said = words.format(account=AZURITE_ACCOUNT, key=AZURITE_KEY, endpoint=place.endpoint)
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", said)
    url = place.url.replace("az://", f"az://{AZURITE_ACCOUNT}/") if with_account else place.url
    moves(place._replace(url=url), "")


@pytest.mark.parametrize("place", ["azure"], indirect=True)
def test_a_key_that_is_none_is_refused_in_our_words(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_KEY", "no key!")
    with pytest.raises((ConfigError, PoolError)) as caught:
        open_store(place.url, endpoint=place.endpoint, open_wait_s=WAIT_S)
    assert "no key!" not in str(caught.value)


@pytest.mark.objects
def test_a_redis_behind_a_private_ca_is_trusted_by_the_same_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ca, other = certify(tmp_path, "ca"), certify(tmp_path, "other")
    leaf, port = certify(tmp_path, "store", ca), free_port()
    files = ("--tls-cert-file", str(leaf.cert), "--tls-key-file", str(leaf.key), "--tls-ca-cert-file", str(ca.cert))
    url = f"rediss://127.0.0.1:{port}/0"
    with redis_server("--tls-port", str(port), *files, "--tls-auth-clients", "no"):
        with closing(open_store(url, ca=str(ca.cert), open_wait_s=WAIT_S)) as store:
            assert store.put([Put("name", b"x")], WAIT_S) == [None]
        monkeypatch.setenv("SSL_CERT_FILE", str(ca.cert))
        open_store(url, open_wait_s=WAIT_S).close()
        monkeypatch.delenv("SSL_CERT_FILE")
        with pytest.raises(PoolError, match="CERTIFICATE_VERIFY_FAILED"):
            open_store(url, ca=str(other.cert), open_wait_s=WAIT_S)
