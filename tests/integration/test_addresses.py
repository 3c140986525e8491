"""Folders, users and passwords of any characters, in URLs and files that others read: each reaches what it names, and
no password is shown.
"""

from __future__ import annotations

import asyncio
from contextlib import ExitStack, closing
from pathlib import Path
from urllib.parse import quote

import pytest

from kvbm.assembly.services import database_url, nats_url
from kvbm.catalog.access.file import NewToken, add_token, read_entries
from kvbm.catalog.sql.database import parse_url, shown
from kvbm.catalog.sql.store import SqlStore
from kvbm.catalog_questions import listening_url
from kvbm.config import load_settings
from kvbm.core.errors import CatalogError, ConfigError, KvbmError
from kvbm.doctor.modes import kept_paths
from kvbm.doctor.services import look_at_database
from kvbm.locate.http import CatalogClient
from kvbm.replay.opening import open_source
from kvbm.streams.nats.stream import NatsStream
from kvbm.streams.server import answers
from kvbm.workload.probe import ask as probe
from tests.nats_fixture import WAIT_S
from tests.servers import nats_server

FOLDERS = ["foo%2Fbar", "a?b=c", "é", "a#b&c", 'quoted "and" \\slashed', "with spaces", "sp%20ace", "😀", "a@b:c"]


@pytest.mark.parametrize("name", FOLDERS)
def test_a_data_folder_of_any_name_has_the_database_in_it(tmp_path: Path, name: str) -> None:
    settings = load_settings(flags={"instance.data_dir": str(tmp_path / name)})

    async def use() -> str:
        store = await SqlStore.open(database_url(settings))
        try:
            return shown(store.engine.url)
        finally:
            await store.close()

    url = asyncio.run(use())
    assert sorted(path.relative_to(tmp_path).parts[0] for path in tmp_path.rglob("*.db")) == [name]
    assert (
        Path(parse_url(url).database or "") == tmp_path / name / "catalog.db"
    )  # what is shown can be written into a setting
    assert look_at_database(settings).is_there
    assert str(tmp_path / name / "catalog.db") in kept_paths(load_settings(flags={"catalog.database": url}))


def test_a_nats_server_of_our_own_starts_in_a_folder_of_any_name(tmp_path: Path) -> None:
    folder = tmp_path / "".join(FOLDERS).replace("/", "")
    with ExitStack() as opened:
        url = nats_url(load_settings(flags={"instance.data_dir": str(folder), "nats.timeout_s": WAIT_S}), opened)
        assert answers(url, WAIT_S)
        assert (folder / "nats" / "jetstream").is_dir()
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]


def test_a_user_and_password_of_nats_are_sent_as_they_are() -> None:
    user, password = "u:s@r", "p@ss/w?r#d,100%41"

    async def connect(url: str) -> None:
        await (await NatsStream.connect(url, WAIT_S)).close()

    with nats_server(f'authorization {{ user: "{user}", password: "{password}" }}') as server:
        place = server.url.partition("://")[2]
        asks = f"{quote(user, safe='')}:{quote(password, safe='')}"
        asyncio.run(connect(f"nats://{asks}@{place}"))
        asyncio.run(connect(f"nats://127.0.0.1:1,nats://{asks}@{place}"))
        with (
            closing(CatalogClient(f"nats://{asks}@{place}/c", timeout_s=1.0)) as client,
            pytest.raises(CatalogError) as nobody,
        ):
            client.ready()  # it came in, and no catalog is there
        assert "check the user" not in str(nobody.value)
        assert password not in str(nobody.value)
        with pytest.raises(KvbmError) as refused:
            asyncio.run(connect(f"nats://{quote(user, safe='')}:{quote(password[:-1], safe='')}@{place}"))
        assert "the user and password it wants" in str(refused.value)
        assert "p%40" not in str(refused.value)
        assert probe(f"nats://{asks}@{place}", load_settings()).is_well
    with nats_server('authorization { token: "to/k@n" }') as server:
        asyncio.run(connect(f"nats://to%2Fk%40n@{server.url.partition('://')[2]}"))


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("postgresql://u:hunter2@ss@h/db", "more than one @"),
        ("postgresql://u:hunter2@ss/word@h/db", "more than one @"),
        ("postgresql://u:p@hunter2/db@h/db", "more than one @"),
        ("postgresql://u:hunter2@h:port/db", "cannot be read"),
    ],
)
def test_a_database_url_with_a_bare_password_is_refused_without_showing_it(url: str, words: str) -> None:
    with pytest.raises(CatalogError, match=f"{words}.*%40") as refused:
        parse_url(url)
    assert "hunter2" not in str(refused.value)


def test_a_database_url_has_its_password_as_it_is() -> None:
    parsed = parse_url("postgresql://u%40x:p%2Fa%3Ass%25@h/db")
    assert (parsed.username, parsed.password, parsed.host, parsed.database) == ("u@x", "p/a:ss%", "h", "db")
    assert parse_url("postgresql://u:p/a?ss@h/db").host == "h"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://user:hunter2@h:7700", "catalog.token"),
        ("http://user:hunter2/x@h:7700", "host or port cannot be read"),
        ("http://user:12/hunter2@h", "catalog.token"),
        ("http://h:7700/prefix", "at the root"),
        ("http://h:7700?x=1", "at the root"),
        ("ftp://h:7700", "http://host:port"),
        ("http://h:port", "http://host:port"),
        ("nats:7700/x", "at the root"),
        ("http://[::1", "http://host:port"),
        ("http://a,ftp://b", "http://host:port"),
        ("http://", "http://host:port"),
    ],
)
def test_a_catalogs_url_that_means_more_than_a_place_is_refused_in_words(url: str, words: str) -> None:
    with pytest.raises(CatalogError, match=words) as refused:
        CatalogClient(url)
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    "url", ["http://user:hunter2@h/readyz", "redis://user:hunter2@h", "http://[::1/readyz", "http://user:12/hunter2@h"]
)
def test_a_url_that_cannot_be_probed_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(ConfigError) as refused:
        probe(url, load_settings())
    assert "hunter2" not in str(refused.value)


def test_names_of_tenants_come_out_of_the_access_file_as_they_went_in(tmp_path: Path) -> None:
    tenants = ["\x7f", 'a"b\\c', "a b", "é", "😀"]
    add_token(tmp_path / "access.toml", NewToken("router", "router", tenants), 0.0)
    assert [entry.tenants for entry in read_entries(tmp_path / "access.toml")] == [frozenset(tenants)]


@pytest.mark.parametrize("name", ["nats://[::1", "nats://u:hunter2/x@h:4222", "redis://u:hunter2@h"])
def test_a_source_that_is_no_url_is_refused_without_its_password(name: str) -> None:
    with pytest.raises(KvbmError) as refused:
        open_source(name)
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    ("listen", "url"),
    [
        ("127.0.0.1:7700", "http://127.0.0.1:7700"),
        ("::1:7700", "http://[::1]:7700"),
        ("[::1]:7700", "http://[::1]:7700"),
    ],
)
def test_a_command_asks_where_the_catalog_listens(listen: str, url: str) -> None:
    assert listening_url(load_settings(flags={"catalog.listen": listen})) == url
    with closing(CatalogClient(url)) as client:
        assert client.url == url
