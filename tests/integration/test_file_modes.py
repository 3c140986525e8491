"""Whatever kvbm makes on disk is its owner's alone, also under umask 0; what is wider is told, or closed."""

from __future__ import annotations

import asyncio
import os
import shlex
import sqlite3
import stat
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from kvbm.assembly import NATIVE
from kvbm.catalog.follow import archive
from kvbm.catalog.sql.store import SqlStore
from kvbm.config import load_settings
from kvbm.core.errors import CatalogError
from kvbm.core.ids import InstanceId
from kvbm.doctor.finding import Result
from kvbm.doctor.modes import judge_modes, look_at_modes
from kvbm.files import exposed, narrow
from kvbm.locate.http import CatalogClient
from kvbm.pools.tenant_keys import add_key
from kvbm.streams.journal.journal import Journal
from kvbm.streams.nats.credentials import keep_seed
from kvbm.streams.server import EmbeddedServer
from kvbm.workload.processes import start_catalog
from tests.eventually import eventually
from tests.managers import serve
from tests.published import is_published, opened, settings_of
from tests.readable import main as replay_main


@pytest.fixture(autouse=True)
def no_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def open_to_others(folder: Path) -> list[str]:
    """Everything under a folder that group or others may read, write or pass through."""
    found = []
    for path in sorted(folder.rglob("*")):
        mode = path.lstat().st_mode
        if mode & 0o077 and (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            found.append(f"{stat.S_IMODE(mode):04o} {path.relative_to(folder)}")
    return found


def is_known(catalog: CatalogClient) -> bool:
    """Whether a catalog, which may be slow, has heard of an instance."""
    with suppress(CatalogError):
        return bool(catalog.instances())
    return False


def test_all_that_a_cluster_makes_is_its_owners_alone(tmp_path: Path) -> None:
    made = tmp_path / "made"
    kept = made / "archive"
    with ExitStack() as stack:
        server = EmbeddedServer.start(made / "nats")
        stack.callback(server.stop)
        catalog = start_catalog(
            made / "catalog",
            server.url,
            stack,
            {"catalog.archive": kept, "catalog.checkpoint_every_s": 0.2, "instance.cluster": "c", "samples.rate": 1.0},
        )
        settings = settings_of(
            made / "engine",
            server.url,
            "c",
            pools__nvme__slots=32,
            pools__nvme__folder=str(made / "pod" / "of"),
            instance__id="one",
            samples__rate=1.0,
        )
        for _ in range(2):
            manager = opened(settings)
            try:
                serve(manager, 1, 8)
                eventually(lambda: is_published(manager), "events stay unpublished")  # noqa: B023 - called at once
            finally:
                manager.close()
            segment = sorted((made / "engine").rglob("*.kvbj"))[-1]
            with segment.open("ab") as file:
                file.write(b"torn")  # the next start repairs it
        eventually(lambda: is_known(catalog), "the catalog has not heard of the instance")
        eventually(lambda: any(kept.glob("*.kvbm")), "nothing is archived")
        eventually(lambda: any(made.rglob("*.index")), "no checkpoint is written")
    add_key(made / "keys", "acme", "2026-11")
    keep_seed(made / "seeds" / "of" / "one.nk")
    assert replay_main(["export", str(kept), str(made / "tables")]) == 0
    assert replay_main(["stat", str(kept), "--json", str(made / "stat.json")]) == 0
    names = {path.name for path in made.rglob("*")}
    suffixes = {path.suffix for path in made.rglob("*")}
    assert {"LOCK", "EPOCH", "POSITION", "catalog.db", "nats-server.conf", "jetstream", "samples"} <= names
    assert {".kvbj", ".damaged", ".kvbm", ".index", ".pool", ".slots", ".parquet"} <= suffixes
    assert open_to_others(tmp_path) == []


async def open_and_close(database: str) -> None:
    store = await SqlStore.open(database)
    await store.close()


def test_a_wider_database_is_closed_and_that_is_said(tmp_path: Path) -> None:
    file = tmp_path / "catalog.db"
    sqlite3.connect(file).close()
    for path in (file, tmp_path / "catalog.db-wal"):
        path.touch()
        path.chmod(0o664)
    with capture_logs() as logs:
        asyncio.run(open_and_close(f"sqlite:///{file}"))
    assert open_to_others(tmp_path) == []
    said = [(entry["event"], entry["was"]) for entry in logs if entry["event"] == "database.narrowed"]
    assert said == [("database.narrowed", "0664")] * 2


def test_a_wider_journal_or_archive_is_one_warning_whose_command_mends_it(tmp_path: Path) -> None:
    folder = tmp_path / "with space"
    for what in ("journal", "archive"):
        (folder / what).mkdir(parents=True, exist_ok=True)
        for number in range(3):
            (folder / what / f"old{number}").write_bytes(b"")

        def start(what: str = what) -> list[str]:
            with capture_logs() as logs:
                if what == "journal":
                    Journal.open(folder / what, InstanceId("one"), NATIVE).close()
                else:
                    archive.ArchiveFiles.open(folder / what).close()
            return [entry["remedy"] for entry in logs if entry["event"] == "files.open_to_others"]

        (remedy,) = start()
        subprocess.run(shlex.split(remedy.removeprefix("run: ")), check=True)
        assert start() == []


def test_the_doctor_names_what_others_may_read_and_the_command(tmp_path: Path) -> None:
    settings = load_settings(flags={"instance.data_dir": str(tmp_path / "data")})
    assert judge_modes(look_at_modes(settings)).result is Result.OK
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "catalog.db").touch()
    finding = judge_modes(look_at_modes(settings))
    assert finding.result is Result.WARNING
    assert "catalog.db" in finding.found
    subprocess.run(shlex.split(finding.fix.removeprefix("run: ")), check=True)
    assert judge_modes(look_at_modes(settings)).result is Result.OK


@pytest.mark.parametrize(
    "key", ["catalog.token", "catalog.tls_key", "catalog.client_key", "nats.tls_key", "nats.nkey_seed"]
)
def test_the_doctor_names_a_key_or_token_that_others_may_read(tmp_path: Path, key: str) -> None:
    file = tmp_path / "secret"
    file.touch(0o644)
    file.chmod(0o644)
    settings = load_settings(flags={"instance.data_dir": str(tmp_path / "data"), key: str(file)})
    assert "secret" in judge_modes(look_at_modes(settings)).found
    file.chmod(0o600)
    assert judge_modes(look_at_modes(settings)).result is Result.OK


def test_files_in_a_closed_folder_are_closed(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    (closed / "file").touch()
    assert exposed([tmp_path]).entries == 0
    closed.chmod(0o711)
    assert exposed([tmp_path]).paths == (str(closed / "file"),)
    assert narrow(closed / "file") == 0o666
    assert exposed([tmp_path]).entries == 0
