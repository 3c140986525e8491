"""What an instance that is to lend refuses, before anybody connects."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvbm import _native
from kvbm.core.errors import ConfigError, LayoutError
from kvbm.core.ids import NamespaceId
from kvbm.transport.server import Lending, LendingOptions, LendingSource
from tests.lenders import KEY, OWNER
from tests.native_owner import NativeLender


@pytest.fixture
def lender(tmp_path: Path) -> Iterator[NativeLender]:
    made = NativeLender(4, 4096, tmp_path, nvme=False)
    yield made
    made.close()


def open_lending(lender: NativeLender, **options: Any) -> Lending:
    source = LendingSource(OWNER, lender.ledger, lender.lock, lender.pool, None, lambda tier, block: None)
    return Lending(_native.LendingServer, source, LendingOptions(**options))


@pytest.mark.parametrize("address", ["7711", ":7711", "here:", "here:x", "here:65536", "here:-1", "here:７"])
def test_an_address_is_host_and_port(lender: NativeLender, address: str):
    with pytest.raises(ConfigError, match="give host:port"):
        open_lending(lender, tcp=address, key=KEY)


def test_tcp_takes_a_key_that_is_long_enough(lender: NativeLender):
    for key in (b"", b"fifteen bytes !"):
        with pytest.raises(ConfigError, match="a key of at least 16 bytes"):
            open_lending(lender, tcp="127.0.0.1:0", key=key)


def test_a_place_that_cannot_be_listened_at_is_said(lender: NativeLender, tmp_path: Path):
    with pytest.raises(ConfigError, match="No such file or directory"):
        open_lending(lender, unix=str(tmp_path / "no such folder" / "a"))
    for options in (
        {"unix": str(tmp_path / ("long" * 40))},
        {"tcp": "192.0.2.1:0", "key": KEY},
        {"tcp": "no-such-host.invalid:0", "key": KEY},
    ):
        with pytest.raises(ConfigError, match="it cannot listen at"):
            open_lending(lender, **options)
    (tmp_path / "file").write_text("somebody's")
    with pytest.raises(ConfigError, match="it cannot listen at"):
        open_lending(lender, unix=str(tmp_path / "file"))
    assert (tmp_path / "file").read_text() == "somebody's"


def test_it_lends_somewhere_or_not_at_all(lender: NativeLender):
    with pytest.raises(LayoutError, match="neither a unix socket nor a tcp address"):
        open_lending(lender)
    with pytest.raises(LayoutError, match="at least 1"):
        open_lending(lender, tcp="127.0.0.1:0", key=KEY, connections=0)


def test_a_closed_pool_lends_nothing(tmp_path: Path):
    lender = NativeLender(4, 4096, tmp_path, nvme=False)
    lender.close()
    with pytest.raises(ConfigError, match="the pool is closed"):
        open_lending(lender, unix=str(tmp_path / "a"))


def test_namespaces_have_ids_and_roots(lender: NativeLender):
    lending = open_lending(lender, tcp="127.0.0.1:0", key=KEY)
    try:
        with pytest.raises(LayoutError, match="16"):
            lending.admit(NamespaceId(b"short"), b"root")
        with pytest.raises(LayoutError, match="root"):
            lending.admit(NamespaceId(bytes(16)), b"")
        lending.withdraw(NamespaceId(bytes(16)))
    finally:
        assert lending.close()
        assert lending.close()


def test_what_is_not_native_is_refused(lender: NativeLender):
    with pytest.raises(TypeError, match="LedgerLock"):
        _native.LendingServer(
            lender.ledger,
            object(),
            lender.host,
            lender.pool.kept_checksums,
            -1,
            0,
            None,
            "i",
            tcp_host="127.0.0.1",
            key=KEY,  # type: ignore[arg-type]
        )
    with pytest.raises(TypeError, match="Ledger"):
        _native.LendingServer(
            object(),
            lender.lock,
            lender.host,
            lender.pool.kept_checksums,
            -1,
            0,
            None,
            "i",
            tcp_host="127.0.0.1",
            key=KEY,  # type: ignore[arg-type]
        )
