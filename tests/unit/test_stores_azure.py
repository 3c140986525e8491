"""An Azure connection string is read whole, and so is what an az:// URL means beside it."""

from __future__ import annotations

import pytest

from kvbm.core.errors import ConfigError
from kvbm.pools.stores.azure import ContainerPlace, Key, key_of_environment, key_of_string, place_of
from tests.extras import needed

needed("azure.storage.blob", "azure")
BLOBS = "https://acct.blob.core.windows.net"


@pytest.mark.parametrize(
    ("said", "key"),
    [
        ("AccountName=acct;AccountKey=a2V5==", Key("a2V5==", "", "acct", BLOBS)),
        (
            "DefaultEndpointsProtocol=http;AccountName=acct;AccountKey=k=;EndpointSuffix=core.chinacloudapi.cn",
            Key("k=", "", "acct", "http://acct.blob.core.chinacloudapi.cn"),
        ),
        (
            " BlobEndpoint = http://10.0.0.7:10000/acct/ ; AccountName=acct;AccountKey=k=\n;",
            Key("k=", "", "acct", "http://10.0.0.7:10000/acct"),
        ),
        ("blobendpoint=http://store:1/acct;accountkey=k", Key("k", "", "acct", "http://store:1/acct")),
        (f"BlobEndpoint={BLOBS}/;SharedAccessSignature=?sv=1&sig=a%3D", Key("", "sv=1&sig=a%3D", "acct", BLOBS)),
        (
            "UseDevelopmentStorage=true",
            Key(
                "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==",
                "",
                "devstoreaccount1",
                "http://127.0.0.1:10000/devstoreaccount1",
            ),
        ),
    ],
)
def test_all_that_a_connection_string_says_counts(said: str, key: Key) -> None:
    assert key_of_string(said) == key


@pytest.mark.parametrize(
    "said", ["secret", "AccountKey=secret", "AccountName=acct", "BlobEndpoint=secret;AccountKey=k"]
)
def test_a_connection_string_that_names_no_account_is_refused_without_its_secrets(said: str) -> None:
    with pytest.raises(ConfigError, match="AZURE_STORAGE_CONNECTION_STRING") as caught:
        key_of_string(said)
    assert "secret" not in str(caught.value)


def test_what_the_environment_says_has_no_white_space_at_its_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KEY", "ACCOUNT_KEY", "SAS_TOKEN", "CONNECTION_STRING"):
        monkeypatch.delenv(f"AZURE_STORAGE_{name}", raising=False)
    assert key_of_environment() == Key()
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", "AccountName=acct;AccountKey=k\n")
    assert key_of_environment() == Key("k", "", "acct", BLOBS)
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", "?sig=x\n")
    assert key_of_environment() == Key("", "sig=x")
    monkeypatch.setenv("AZURE_STORAGE_KEY", "\tkey\r\n")
    assert key_of_environment() == Key("key")


@pytest.mark.parametrize("url", ["az://My_Account/blocks/x", "az://-acct/blocks/x", "az://a/blocks"])
def test_a_bad_account_is_blamed_and_no_prefix(url: str) -> None:
    with pytest.raises(ConfigError, match="is no name of an account or container, which has 3 to 63") as caught:
        place_of(url, "")
    assert "its prefix" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("az://acct/blocks/a b", "its prefix 'blocks/a b' has others than"),
        ("az://acct", "no container is named behind"),
    ],
)
def test_a_bad_prefix_is_blamed_and_so_is_a_missing_container(url: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        place_of(url, "")


@pytest.mark.parametrize(
    ("url", "endpoint", "key", "place"),
    [
        ("az://acct/blocks/a/b", "", Key(), ContainerPlace("acct", "blocks", "a/b", BLOBS)),
        ("az://blocks/a", "http://h:1/acct/", Key(), ContainerPlace("acct", "blocks", "a", "http://h:1/acct")),
        (
            "az://acct/blocks/a",
            "",
            Key("k", "", "acct", "http://h:1/acct"),
            ContainerPlace("acct", "blocks", "a", "http://h:1/acct"),
        ),
        (
            "az://blocks/a",
            "",
            Key("k", "", "acct", "http://h:1/acct"),
            ContainerPlace("acct", "blocks", "a", "http://h:1/acct"),
        ),
        ("az://blocks", "", Key("k", "", "acct", BLOBS), ContainerPlace("acct", "blocks", "", BLOBS)),
        (
            "az://blocks/a",
            "http://h:1/acct",
            Key("k", "", "acct", BLOBS),
            ContainerPlace("acct", "blocks", "a", "http://h:1/acct"),
        ),
    ],
)
def test_a_url_means_the_settings_endpoint_then_the_connection_strings_then_azures(
    url: str, endpoint: str, key: Key, place: ContainerPlace
) -> None:
    assert place_of(url, endpoint, key) == place
