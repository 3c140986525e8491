"""Which hosts a request may name."""

from __future__ import annotations

import pytest

from kvbm.catalog.access.callers import AccessOptions
from kvbm.catalog.access.hosts import hosts_of

BARE = AccessOptions(hosts=("catalog.example",))


@pytest.mark.parametrize(
    ("options", "address", "host", "refused"),
    [
        (BARE, "127.0.0.1", b"evil.example:7700", "evil.example"),
        (BARE, "::1", b"evil.example", "evil.example"),
        (BARE, "127.0.0.1", b"Catalog.Example.:443", None),
        (BARE, "127.0.0.1", b"localhost:7700", None),
        (BARE, "127.0.0.1", b"[::1]:7700", None),
        (BARE, "127.0.0.1", b"10.0.0.7", None),
        (BARE, "127.0.0.1", b"localhost.evil.example", "localhost.evil.example"),
        (BARE, "127.0.0.1", b"", ""),
        (BARE, "10.0.0.7", b"evil.example", None),
        (AccessOptions(file="callers.toml"), "127.0.0.1", b"evil.example", None),
    ],
)
def test_a_catalog_on_the_loopback_without_a_file_of_callers_has_few_names(
    options: AccessOptions, address: str, host: bytes, refused: str | None
) -> None:
    hosts = hosts_of(options, address)
    assert hosts.refused([(b"accept", b"*/*"), (b"host", host)]) == refused
    assert hosts.refused([(b"accept", b"*/*")]) is None
    assert hosts.refused([(b"host", b"localhost"), (b"host", host)]) == refused
