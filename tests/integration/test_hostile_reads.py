"""Whatever lies where a file of ours should be costs a bounded read and one clear error or warning: never a hang, never
MemoryError.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from kvbm import _native
from kvbm.assembly import NATIVE, OPEN_BLOCK_IO
from kvbm.catalog.follow.archive import ArchiveFiles
from kvbm.catalog.follow.checkpoints import Writing, load_newest
from kvbm.catalog.follow.sequencer import SequencerState
from kvbm.catalog.sql.store import SqlStore
from kvbm.config import load_settings
from kvbm.core.errors import ConfigError, KvbmError
from kvbm.core.ids import InstanceId
from kvbm.pools.nvme.pool import NvmePool
from kvbm.pools.tenant_keys import add_key, keys_of_command, keys_of_file
from kvbm.streams.access_samples import read_samples
from kvbm.streams.base import Mark, StreamMessage
from kvbm.streams.journal.journal import Journal
from kvbm.streams.nats.credentials import keep_seed
from kvbm.streams.server import EmbeddedServer, shared_server
from kvbm.tenant_secrets import read_secrets
from tests.managers import BLOCK_BYTES, NAMESPACE
from tests.readable import main as replay_main

WAIT_S = 120.0
SPARSE_BYTES = 4 << 30
MOST_BYTES = 48 << 20  # traced while one reader works; scanning and importing take some of it
KINDS = ["fifo", "folder", "device", "sparse", "flipped"]


def put(path: Path, kind: str) -> None:
    """Make something hostile of a file that is there, or not."""
    data = path.read_bytes() if path.is_file() else b""
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    match kind:
        case "fifo":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "device":
            path.symlink_to("/dev/zero")
        case "sparse":
            path.write_bytes(data)
            os.truncate(path, SPARSE_BYTES)
        case _:
            at = len(data) // 2
            path.write_bytes(data[:at] + bytes([(data[at : at + 1] or b"\0")[0] ^ 0x80]) + data[at + 1 :])


def outcome(read: Callable[[], object]) -> str:
    """What a reader says: its error, its warnings, or nothing. It must end, within little memory."""
    said: list[str] = []

    def work() -> None:
        with capture_logs() as logs:
            try:
                read()
            except (KvbmError, OSError) as error:
                said.append(f"{type(error).__name__}: {error}")
            except BaseException as error:  # noqa: BLE001 - whatever else it is, the test names it
                said.append(f"broke: {error!r}")
        said.extend(f"{entry['event']} {entry.get('why', '')}" for entry in logs if entry["log_level"] == "warning")

    tracemalloc.start()
    try:
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        thread.join(WAIT_S)
        assert not thread.is_alive(), "the reader hangs"
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
    finally:
        tracemalloc.stop()
    words = "\n".join(said)
    assert "broke:" not in words, words
    return words


# -- the readers: each takes a folder, gives the file that is attacked and what reads it -------------------------------

Reader = Callable[[Path], tuple[Path, Callable[[], object]]]


def settings(folder: Path) -> tuple[Path, Callable[[], object]]:
    file = folder / "kvbm.toml"
    file.write_text('instance.id = "one"\n')
    return file, lambda: load_settings(file)


def keys(folder: Path) -> tuple[Path, Callable[[], object]]:
    file = folder / "keys"
    add_key(file, "acme", "a")
    return file, keys_of_file(str(file)).load


def keys_to_add_to(folder: Path) -> tuple[Path, Callable[[], object]]:
    file = folder / "keys"
    add_key(file, "acme", "a")
    return file, lambda: add_key(file, "acme", "b")


def secrets_of_tenants(folder: Path) -> tuple[Path, Callable[[], object]]:
    file = folder / "secrets.toml"
    file.write_text("[tenants.acme]\nsecret = 'x'\n")
    return file, lambda: read_secrets(str(file))


def seed(folder: Path) -> tuple[Path, Callable[[], object]]:
    file = folder / "one.nk"
    keep_seed(file)
    return file, lambda: keep_seed(file)


def journal_of(name: str) -> Reader:
    def reader(folder: Path) -> tuple[Path, Callable[[], object]]:
        journal = Journal.open(folder / "journal", InstanceId("one"), NATIVE)
        journal.begin_epoch(1)
        journal.close()
        return folder / "journal" / name, lambda: Journal.open(folder / "journal", InstanceId("one"), NATIVE).close()

    return reader


def archive_of(name: str) -> Reader:
    def reader(folder: Path) -> tuple[Path, Callable[[], object]]:
        kept = ArchiveFiles.open(folder / "archive")
        kept.follow("now", 1, 9)
        kept.append([StreamMessage(1, "kvbm.v1.events.c.one", b"<000001>")])
        kept.sync()
        kept.close()
        (folder / "archive" / "samples" / "2026-11-23.samples").touch()
        return folder / "archive" / name, lambda: ArchiveFiles.open(folder / "archive").close()

    return reader


def checkpoint_of(suffix: str) -> Reader:
    def reader(folder: Path) -> tuple[Path, Callable[[], object]]:
        state = SequencerState(sequence=7, newest_wall_ns=1, namespaces=(), followed=())
        writing = Writing(folder / "checkpoints", _native.ClusterIndex(64), state, "KVBM")
        writing.write()
        writing.finish(Mark(7, 7))

        async def holds(mark: Mark) -> bool:
            return True

        def load() -> None:
            asyncio.run(load_newest(folder / "checkpoints", _native.ClusterIndex, 64, "KVBM".__eq__, 1000, holds))

        return next((folder / "checkpoints").glob(f"*{suffix}")), load

    return reader


def stripe(folder: Path) -> tuple[Path, Callable[[], object]]:
    def make() -> None:
        NvmePool(
            (folder / "nvme",), 4, BLOCK_BYTES, NAMESPACE, InstanceId("one"), NATIVE.checksums, OPEN_BLOCK_IO
        ).close()

    make()
    return folder / "nvme", make


def replayed(folder: Path) -> tuple[Path, Callable[[], object]]:
    file = folder / "capture.kvbm"
    file.write_bytes(b"no frame at all")
    return file, lambda: replay_main(["stat", str(file)]) and _refuse("replay ended with an error")


def _refuse(words: str) -> None:
    raise ConfigError(words)


def database(folder: Path) -> tuple[Path, Callable[[], object]]:
    async def open_and_close() -> None:
        await (await SqlStore.open(f"sqlite:///{folder / 'catalog.db'}")).close()

    asyncio.run(open_and_close())
    return folder / "catalog.db", lambda: asyncio.run(open_and_close())


READERS: dict[str, Reader] = {
    "settings": settings,
    "keys": keys,
    "keys to add to": keys_to_add_to,
    "secrets of tenants": secrets_of_tenants,
    "seed": seed,
    "EPOCH of a journal": journal_of("EPOCH"),
    "LOCK of a journal": journal_of("LOCK"),
    "a segment": journal_of(f"{1:010d}-{0:020d}.kvbj"),
    "POSITION of an archive": archive_of("POSITION"),
    "samples of an archive": archive_of("samples/2026-11-23.samples"),
    "manifest of a checkpoint": checkpoint_of(".json"),
    "index of a checkpoint": checkpoint_of(".index"),
    "NVME pool": stripe,
    "capture": replayed,
}
QUIET = {  # may be so without harm
    ("LOCK of a journal", "sparse"),
    ("LOCK of a journal", "flipped"),
    ("NVME pool", "sparse"),
    ("NVME pool", "flipped"),
    ("samples of an archive", "sparse"),
    ("samples of an archive", "flipped"),
    ("seed", "flipped"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", READERS)
def test_a_hostile_file_costs_a_bounded_read_and_one_clear_word(name: str, kind: str, tmp_path: Path) -> None:
    path, read = READERS[name](tmp_path)
    put(path, kind)
    said = outcome(read)
    if (name, kind) not in QUIET:
        assert said
        assert len(said.splitlines()) <= 2, said


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["nats.url", "nats-server_1.ports"])
def test_a_server_starts_whatever_stands_in_the_files_that_say_where_it_was(
    name: str, kind: str, tmp_path: Path
) -> None:
    EmbeddedServer.start(tmp_path).stop()
    put(tmp_path / name, kind)
    said = outcome(lambda: shared_server(tmp_path).stop())
    assert said == "" if kind != "folder" else "cannot be written" in said


@pytest.mark.parametrize("kind", ["fifo", "folder", "device"])
def test_an_archive_samples_reader_refuses_what_is_no_plain_file(kind: str, tmp_path: Path) -> None:
    put(tmp_path / "a.samples", kind)
    said = outcome(lambda: list(read_samples(tmp_path / "a.samples")))
    assert said or kind == "folder"  # a folder of no files


def test_a_database_that_is_a_pipe_is_an_error(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "catalog.db")

    async def start() -> None:
        await (await SqlStore.open(f"sqlite:///{tmp_path / 'catalog.db'}")).close()

    assert "plain file" in outcome(lambda: asyncio.run(start()))


@pytest.mark.parametrize(
    ("words", "most_s", "said"),
    [
        ("print('x' * 65536)", WAIT_S / 2, "prints more than 1048576 bytes"),
        ("print('x' * 65536, file=sys.stderr)", 0.5, "has not ended within"),
    ],
)
def test_a_keys_command_that_prints_for_ever_is_ended(words: str, most_s: float, said: str) -> None:
    program = "import sys\nwhile True: " + words
    assert said in outcome(keys_of_command(shlex.join([sys.executable, "-c", program]), most_s).load)


def test_a_keys_command_whose_child_goes_on_is_ended_with_it() -> None:
    said = outcome(keys_of_command("sh -c 'sleep 300 & echo x'", 0.5).load)
    assert "has not ended within 0.5 s" in said
