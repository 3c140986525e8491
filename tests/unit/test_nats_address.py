"""URLs of NATS: users and passwords come out as they are, and no message shows what is written wrongly."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbm.core.errors import CatalogError, ConfigError
from kvbm.core.nats_address import NatsServer, servers_of
from kvbm.locate.nats_proof import target_of
from kvbm.streams.nats.connection import is_loopback, shown


@pytest.mark.parametrize(
    ("url", "server"),
    [
        ("nats://h", NatsServer("h", 4222, False)),
        ("h:1", NatsServer("h", 1, False)),
        ("TLS://H:1/", NatsServer("h", 1, True)),
        ("nats://[fd00::1]:1", NatsServer("fd00::1", 1, False)),
        ("nats://token@h", NatsServer("h", 4222, False, "token")),
        ("nats://u:p%40ss@h", NatsServer("h", 4222, False, "u", "p@ss")),
        ("nats://u:p%2Fa%3Fb%23c%2Cd%25@h:1", NatsServer("h", 1, False, "u", "p/a?b#c,d%")),
        ("nats://u:100%@h", NatsServer("h", 4222, False, "u", "100%")),
        ("nats://u:@h", NatsServer("h", 4222, False, "u", "")),
        ("nats://h:1/local/router%2Da", NatsServer("h", 1, False, path=("local", "router-a"))),
    ],
)
def test_a_url_is_read_as_it_is_meant(url: str, server: NatsServer) -> None:
    assert servers_of(url) == [server]
    assert servers_of(f"{server.url}/{'/'.join(server.path)}") == [server]


@given(
    st.tuples(
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1),
        st.none() | st.text(st.characters(exclude_categories=["Cs"])),
    ),
    st.booleans(),
)
def test_what_asks_survives_being_written(asks: tuple[str, str | None], is_tls: bool) -> None:
    server = NatsServer("fd00::1", 4223, is_tls, *asks)
    assert servers_of(f"{server.url},{server.shown}") == [server, server._replace(user="", password=None)]


WRONG = [
    "nats://user:12/hunter2@h",
    "nats://user:hunter2/x@h",
    "nats://user:hunter2?x@h",
    "nats://user:12?hunter2@h",
    "nats://user:12#hunter2@h",
    "nats://user:hunter2,x@h",
    "http://user:hunter2@h",
    "nats://user:hunter2@h:port",
    "nats://user:hunter2@",
    "nats://user:hunter2@[h",
]


@pytest.mark.parametrize("url", WRONG)
def test_what_is_written_wrongly_is_refused_without_being_shown(url: str) -> None:
    for use, kind in ((shown, ConfigError), (is_loopback, ConfigError), (target_of, CatalogError)):
        with pytest.raises(kind, match="%2F") as refused:
            use(url)  # type: ignore[operator]
        assert "hunter2" not in str(refused.value)


def test_who_asks_is_shown_nowhere() -> None:
    assert shown("nats://u:hunter2@a,tls://hunter2@[::1]:1") == "nats://a:4222,tls://[::1]:1"
    assert is_loopback("nats://u:p@localhost,127.0.0.2:1,nats://[::1]")
    assert not is_loopback("nats://localhost,nats://h")
