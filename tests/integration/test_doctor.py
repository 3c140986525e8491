"""`kvbm doctor` on this machine, and on real servers that work, refuse, are full or are not there."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import socket
import sqlite3
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import nats
import pytest

from kvbm import cli
from kvbm.assembly import NATIVE, NATIVE_INDEX
from kvbm.catalog.edge.server import CatalogThread
from kvbm.catalog.service import ServiceSettings
from kvbm.catalog.sql import database
from kvbm.catalog.sql.database import open_database
from kvbm.config import Settings, load_settings
from kvbm.core.errors import KvbmError
from kvbm.doctor import DoctorOptions, deadline, disks, examine, nixl, run, services
from kvbm.doctor.deadline import LateProbe, PendingProbe, run_probe
from kvbm.doctor.finding import DoctorFinding, Result, ok, refused
from kvbm.doctor.plan import plan_of
from kvbm.locate.http import CatalogClient
from kvbm.streams.nats.credentials import Credentials, keep_seed
from kvbm.streams.nats.permissions import ServerUser, server_config
from kvbm.streams.nats.stream import NatsStream
from kvbm.streams.server import EmbeddedServer, shared_server
from tests.extras import needed
from tests.faults.processes.disk import Disk as SmallDisk
from tests.nats_fixture import fresh_nats
from tests.servers import S3_CREDENTIALS, free_port, nats_server, s3_server

boto3 = needed("boto3", "s3")

__all__ = ["fresh_nats"]

WAIT_S = 120.0  # for what should answer
QUICK = DoctorOptions(quick=True)


def settings_of(folder: Path, **flags: Any) -> Settings:
    """Settings in a folder; `a__b` is `a.b`."""
    return load_settings(
        flags={"instance.data_dir": str(folder), "nats.timeout_s": WAIT_S, "onboard.locate_s": WAIT_S}
        | {name.replace("__", "."): value for name, value in flags.items()}
    )


def found_in(settings: Settings, check: str, options: DoctorOptions = QUICK) -> DoctorFinding:
    """The finding of a check, as the whole examination has it."""
    (found,) = [one for one in examine(settings, options).findings if one.check == check]
    return found


def expect(found: DoctorFinding, result: Result, *words: str) -> None:
    assert found.result is result, found
    for word in words:
        assert word in f"{found.found} {found.fix}", found
    assert bool(found.fix) == (result in (Result.WARNING, Result.PROBLEM)), found


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A port that accepts connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0), backlog=50) as listener:
        yield listener.getsockname()[1]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Probes wait for as long as a busy machine may take; what a test wants to run out it says itself."""
    monkeypatch.setattr(deadline, "PROBE_S", WAIT_S)
    monkeypatch.setattr(run, "PROBE_S", 2 * WAIT_S)
    for name in ("_ASK_S", "_EMBEDDED_ASK_S", "_OBJECT_ASK_S"):
        monkeypatch.setattr(services, name, WAIT_S)
    monkeypatch.setattr(services, "_FAR_S", WAIT_S)
    monkeypatch.setattr(nixl, "_TRY_S", WAIT_S)


# -- the command ------------------------------------------------------------------------------------------------------


def test_a_machine_without_configuration_has_no_problems_and_is_left_as_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["doctor", "--quick", "--json", "--set", f"instance.data_dir={tmp_path / 'data'}"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["problems"] == 0
    assert {one["result"] for one in report["findings"]} <= {"ok", "warning", "not used"}
    by_check = {one["check"]: one for one in report["findings"]}
    assert {"CPU cores", "memory", "CUDA driver", "io_uring", "journal disk", "clock", "NATS", "SQL"} <= set(by_check)
    assert by_check["NATS"]["found"].startswith("none configured; kvbm starts nats-server 2")
    assert list(tmp_path.iterdir()) == []


def test_problems_come_last_with_what_to_do_and_make_the_exit_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a-file").write_text("")
    Path("kvbm.toml").write_text(
        f'[nats]\nurl = "nats://127.0.0.1:{free_port()}"\n[pools.hbm]\nslots = 4\ndevice = "memory"\n'
        "[pools.nvme]\nslots = 4\n"
    )
    flags = ["--set", "pools.nvme.path=a-file/nvme.pool", "--set", "instance.data_dir=data"]
    assert cli.main(["doctor", "--config", "kvbm.toml", "--block-bytes", "4096", *flags]) == 1
    said = capsys.readouterr()
    assert said.err == ""
    table, _, rest = said.out.partition("2 problems\n")
    assert "journal sync" in table and "locked memory" in table
    lines = rest.splitlines()
    assert lines[0].startswith("  NVME disk: a part of ") and lines[1] == "    to do: set another pools.nvme.path"
    assert lines[2].startswith("  NATS: no connection") and lines[3].startswith("    to do: start a nats-server")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a-file", "kvbm.toml"]


def test_a_setting_that_cannot_be_used_is_an_error_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--set", "pools.nvme.slot=3"]) == 2
    assert "pools.nvme.slots" in capsys.readouterr().err


def test_nothing_that_is_silent_holds_the_command_up(
    silent_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services, "_ASK_S", 1.0)
    monkeypatch.setattr(services, "_OBJECT_ASK_S", 0.5)
    at = f"127.0.0.1:{silent_port}"
    settings = settings_of(
        tmp_path,
        nats__url=f"nats://{at}",
        catalog__url=f"http://{at}",
        catalog__database=f"postgresql://a@{at}/x",
        pools__object__url="s3://bucket/x",
        pools__object__endpoint=f"http://{at}",
        pools__object__region="us-east-1",
        pools__hbm__slots=1,
        pools__hbm__device="memory",
    )
    with aws_credentials():
        report = examine(settings, QUICK)  # which has to come to an end
    silent = {one.check: one for one in report.findings if one.result is Result.PROBLEM}
    assert set(silent) == {"NATS", "SQL", "object store", "catalog"}
    for found in silent.values():
        expect(found, Result.PROBLEM)


def test_a_check_that_fails_itself_does_not_hide_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(run, "look_at_clock", broken)
    expect(found_in(settings_of(tmp_path), "clock"), Result.WARNING, "ZeroDivisionError: a bug")


def test_a_probe_that_is_late_is_left_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    release = threading.Event()
    asked = PendingProbe(release.wait, "test")
    for _ in range(2):
        with pytest.raises(LateProbe):
            asked.result(0.05)  # of its beginning: who waits for several does not add up their times
    monkeypatch.setattr(run, "PROBE_S", 0.1)
    monkeypatch.setattr(run, "_GRACE_S", 0.0)
    monkeypatch.setattr(run, "look_at_clock", lambda: release.wait(WAIT_S))
    try:
        expect(found_in(settings_of(tmp_path), "clock"), Result.PROBLEM, "no answer within 0.1 s")
    finally:
        release.set()
    assert asked.result(WAIT_S) is True
    with pytest.raises(LateProbe):
        run_probe("disk", {"path": "/", "is_file": False, "speed": False, "syncs": False}, timeout_s=0.0)


def test_a_probe_apart_that_ends_badly_says_why() -> None:
    with pytest.raises(RuntimeError, match="missing 3 required positional arguments"):
        run_probe("disk", {"path": "/"})


# -- disks ------------------------------------------------------------------------------------------------------------


def test_a_disk_is_tried_in_the_nearest_folder_that_is_there_and_left_clean(tmp_path: Path) -> None:
    path = tmp_path / "to" / "come" / "nvme.pool"
    disk = disks.look_at_disk(path, is_file=True, measured=True, syncs=True)
    assert (disk.kind, disk.folder, disk.write) == ("absent", str(tmp_path), "")
    assert disk.system and disk.mount and disk.number and disk.free_bytes > 0
    assert disk.write_bytes_s > 0
    assert len(disk.sync_s) > 0 and list(disk.sync_s) == sorted(disk.sync_s)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_a_problem(tmp_path: Path) -> None:
    small = SmallDisk(tmp_path / "small", 4 << 20)
    try:
        settings = settings_of(
            tmp_path, pools__hbm__slots=1, pools__nvme__slots=1, pools__nvme__path=str(small.folder / "p")
        )
        plan = plan_of(settings)
        before = disks.look_at_disk(small.folder / "p", is_file=True, measured=False)
        assert before.write == ""
        small.fill(os.getpid())
        try:
            disk = disks.look_at_disk(small.folder / "p", is_file=True, measured=True)
        finally:
            small.free(os.getpid())
        assert disk.write in ("ENOSPC", "EFBIG")
        expect(disks.judge_nvme(disk, plan)[0], Result.PROBLEM, disk.write, "free room there")
    finally:
        small.close()


def test_a_pool_file_that_is_there_counts_with_what_it_has(tmp_path: Path) -> None:
    path = tmp_path / "nvme.pool"
    path.write_bytes(bytes(1 << 20))
    disk = disks.look_at_disk(path, is_file=True, measured=False)
    assert disk.kind == "file" and disk.held_bytes >= 1 << 20
    assert path.read_bytes() == bytes(1 << 20)
    assert disks.look_at_disk(tmp_path, is_file=False, measured=False).held_bytes == disk.held_bytes
    folder = disks.look_at_disk(tmp_path, is_file=True, measured=False)
    plan = plan_of(settings_of(tmp_path, pools__hbm__slots=1, pools__nvme__slots=1))
    expect(disks.judge_nvme(folder, plan)[0], Result.PROBLEM, "is a folder")


def test_io_uring_takes_a_no_op_or_says_who_refuses(tmp_path: Path) -> None:
    facts = disks.look_at_io_uring()
    assert set(facts) == {"setup", "nop", "register", "disabled"}
    if not facts["setup"]:  # else a container forbids it, and the next line says so
        assert facts["nop"] == ""
    plan = plan_of(settings_of(tmp_path, pools__hbm__slots=1, pools__nvme__slots=1))
    found = disks.judge_io_uring(facts, plan)
    assert found.result is (Result.WARNING if facts["setup"] else Result.OK)


# -- NATS -------------------------------------------------------------------------------------------------------------


def nats_findings(settings: Settings) -> list[DoctorFinding]:
    return services.judge_nats(services.look_at_nats(settings), settings)


def test_a_server_is_looked_at_without_making_a_stream(fresh_nats: str, tmp_path: Path) -> None:
    settings = settings_of(tmp_path, nats__url=fresh_nats)
    for _ in range(2):
        server, stream = nats_findings(settings)
        expect(server, Result.OK, "nats-server 2", "8.0 MiB")
        expect(stream, Result.OK, "KVBM is not there yet")

    async def make() -> None:
        await (await NatsStream.connect(fresh_nats, WAIT_S, max_bytes=1 << 30)).close()

    asyncio.run(make())
    expect(nats_findings(settings)[1], Result.OK, "KVBM holds 0 bytes, keeps 1.0 GiB, 24 h; file, 1 replica")
    wants_three = settings_of(tmp_path, nats__url=fresh_nats, nats__replicas=3)
    expect(nats_findings(wants_three)[1], Result.WARNING, "1 replica", "nats.replicas is 3")


def test_a_stream_that_keeps_less_than_an_instance_sends_at_once_is_a_problem(fresh_nats: str, tmp_path: Path) -> None:
    async def make() -> None:
        await (await NatsStream.connect(fresh_nats, WAIT_S, max_bytes=3 << 20)).close()

    asyncio.run(make())
    found = nats_findings(settings_of(tmp_path, nats__url=fresh_nats))[1]
    expect(found, Result.PROBLEM, "keeps 3.0 MiB", "--max-bytes=8388608")


def test_an_embedded_server_that_runs_is_found_in_the_data_folder(tmp_path: Path) -> None:
    expect(nats_findings(settings_of(tmp_path))[0], Result.OK, "none configured")
    server = shared_server(tmp_path / "nats", WAIT_S)
    try:
        expect(nats_findings(settings_of(tmp_path))[0], Result.OK, server.url, "embedded")
    finally:
        server.stop()
    expect(nats_findings(settings_of(tmp_path))[0], Result.OK, "none configured")


def test_a_server_without_jetstream_or_with_small_messages_is_a_problem(tmp_path: Path) -> None:
    accounts = 'accounts { A { users: [{user: "a", password: "p"}] } }'
    with nats_server(accounts) as server:
        url = server.url.replace("nats://", "nats://a:p@")
        expect(nats_findings(settings_of(tmp_path, nats__url=url))[1], Result.PROBLEM, "JetStream is not enabled")


def test_an_account_that_is_full_is_a_problem(tmp_path: Path) -> None:
    accounts = """accounts { A { jetstream { max_mem: 1M, max_file: 64K }, users: [{user: "a", password: "p"}] } }"""
    with nats_server(accounts) as server:
        url = server.url.replace("nats://", "nats://a:p@")

        async def fill() -> None:
            client = await nats.connect(url, connect_timeout=int(WAIT_S))
            await client.jetstream(timeout=WAIT_S).add_stream(name="OTHER", subjects=["other"])
            with contextlib.suppress(nats.js.errors.APIError):  # which says that the limits are reached
                while True:
                    await client.jetstream(timeout=WAIT_S).publish("other", bytes(200))
            await client.close()

        asyncio.run(fill())
        found = nats_findings(settings_of(tmp_path, nats__url=url))[1]
        expect(found, Result.PROBLEM, "KVBM cannot be made", "max_store")


def test_keys_are_held_to_the_instance_and_cluster_they_are_for(tmp_path: Path) -> None:
    keys = {name: tmp_path / f"{name}.nk" for name in ("a", "b", "catalog", "stranger")}
    publics = {name: keep_seed(path) for name, path in keys.items()}
    users = [ServerUser(publics["a"], "a"), ServerUser(publics["b"], "b"), ServerUser(publics["catalog"])]
    server = EmbeddedServer.start(tmp_path / "nats", timeout_s=WAIT_S, settings=server_config("c", users))
    try:

        def look(key: str, instance: str = "a") -> list[DoctorFinding]:
            settings = settings_of(
                tmp_path,
                nats__url=server.url,
                nats__nkey_seed=str(keys[key]),
                instance__id=instance,
                instance__cluster="c",
            )
            try:
                return nats_findings(settings)
            except services.StreamError as error:
                return [run.refused("NATS", error)]

        catalog = look("catalog")
        expect(catalog[0], Result.OK, "taken for the catalog")
        expect(catalog[1], Result.OK, "not there yet")
        make = NatsStream.connect(
            server.url, WAIT_S, credentials=Credentials(nkey_seed=str(keys["catalog"]), inbox="_INBOX.catalog.c")
        )
        asyncio.run(closed(make))
        instance = look("a")
        expect(instance[0], Result.OK, "taken for the instance")
        expect(instance[1], Result.OK, "KVBM holds 0 bytes")
        expect(look("b", "a")[0], Result.PROBLEM, "refuses", "permissions violation")
        expect(look("stranger")[0], Result.PROBLEM, "the key")
    finally:
        server.stop()


async def closed(connecting: Any) -> None:
    await (await connecting).close()


# -- SQL --------------------------------------------------------------------------------------------------------------


def migrate(url: str) -> None:
    async def work() -> None:
        await (await open_database(url, WAIT_S)).dispose()

    asyncio.run(work())


def sql_finding(url: str, folder: Path) -> DoctorFinding:
    settings = settings_of(folder, catalog__database=url)
    return services.judge_database(services.look_at_database(settings), settings)


def test_a_database_is_looked_at_and_tried_without_being_changed(database_url: str, tmp_path: Path) -> None:
    kind = "SQLite 3" if database_url.startswith("sqlite") else "PostgreSQL"
    before = sql_finding(database_url, tmp_path)
    expect(before, Result.OK, "is not there yet" if kind == "SQLite 3" else "no schema")
    assert not list(tmp_path.glob("catalog.db*"))
    migrate(database_url)
    for _ in range(2):
        expect(sql_finding(database_url, tmp_path), Result.OK, kind, "is the newest, a row was written and taken back")
    assert asyncio.run(count_positions(database_url)) == 0


async def count_positions(url: str) -> int:
    engine = await open_database(url, WAIT_S)
    try:
        async with engine.connect() as connection:
            return int((await connection.exec_driver_sql("SELECT count(*) FROM positions")).scalar() or 0)
    finally:
        await engine.dispose()


async def execute(url: str, *statements: str) -> None:
    import asyncpg

    connection = await asyncpg.connect(url.replace("+asyncpg", ""), timeout=WAIT_S)
    try:
        for statement in statements:
            await connection.execute(statement)
    finally:
        await connection.close()


def test_a_database_that_may_not_be_written_or_is_newer_is_a_problem(postgres_url: str, tmp_path: Path) -> None:
    migrate(postgres_url)
    name = postgres_url.rpartition("/")[2]
    asyncio.run(execute(postgres_url, f'ALTER DATABASE "{name}" SET default_transaction_read_only = on'))
    expect(sql_finding(postgres_url, tmp_path), Result.PROBLEM, "read-only transaction")
    asyncio.run(
        execute(postgres_url, "SET default_transaction_read_only = off", "UPDATE kvbm_schema SET version_num = '9999'")
    )
    expect(sql_finding(postgres_url, tmp_path), Result.PROBLEM, "schema 9999 is newer", "upgrade kvbm")


def test_a_database_that_somebody_locks_or_that_is_none_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = database._engine
    monkeypatch.setattr(database, "_engine", lambda *words, **more: made(*words, **more | {"lock_timeout_s": 0.2}))
    url = f"sqlite:///{tmp_path / 'catalog.db'}"
    migrate(url)
    with sqlite3.connect(tmp_path / "catalog.db", isolation_level=None) as held:
        held.execute("BEGIN IMMEDIATE")
        expect(sql_finding(url, tmp_path), Result.PROBLEM, "locked")
        held.execute("ROLLBACK")
    held.close()
    (tmp_path / "none.db").write_text("no database, and longer than its header would be" * 4)
    expect(
        found_in(settings_of(tmp_path, catalog__database=f"sqlite:///{tmp_path / 'none.db'}"), "SQL"),
        Result.PROBLEM,
        "not a database",
    )


# -- the object store -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def aws_credentials() -> Iterator[None]:
    names = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_EC2_METADATA_DISABLED": "true"}
    kept = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    try:
        yield
    finally:
        for name, value in kept.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def object_finding(folder: Path, bucket: str, endpoint: str) -> DoctorFinding:
    settings = settings_of(
        folder,
        pools__object__url=f"s3://{bucket}/blocks",
        pools__object__endpoint=endpoint,
        pools__object__region="us-east-1",
    )
    with aws_credentials():
        try:
            return services.judge_objects(services.look_at_objects(settings), settings)
        except KvbmError as error:
            return refused("object store", error)


def test_a_store_takes_gives_and_forgets_an_object(tmp_path: Path) -> None:
    with s3_server() as endpoint:
        bucket = f"kvbm-{uuid.uuid4().hex}"
        client: Any = boto3.client(
            "s3",
            endpoint_url=endpoint,
            region_name=S3_CREDENTIALS["region"],
            aws_access_key_id="test",
            aws_secret_access_key="test",
        )
        client.create_bucket(Bucket=bucket)
        expect(object_finding(tmp_path, bucket, endpoint), Result.OK, "put, read back and deleted", "conditional put")
        assert client.list_objects_v2(Bucket=bucket)["KeyCount"] == 0
        expect(
            object_finding(tmp_path, "kvbm-absent", endpoint), Result.PROBLEM, "no bucket 'kvbm-absent'", "create it"
        )
    expect(object_finding(tmp_path, bucket, endpoint), Result.PROBLEM, "does not answer", "check pools.object.endpoint")


class Store:
    """An S3 server that keeps one object at a time and answers as it is told to.

    Attributes:
        answers: method → status and code of a refusal.
        ignores_condition: takes each put, whatever its condition.
    """

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, str]] = {}
        self.ignores_condition = False
        self.held: dict[str, bytes] = {}


@contextlib.contextmanager
def store() -> Iterator[tuple[Store, str]]:
    state = Store()

    def tag(body: bytes) -> str:
        return f'"{hashlib.md5(body).hexdigest()}"'

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *arguments: Any) -> None:
            return

        def answer(self, status: int, body: bytes = b"") -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("ETag", tag(state.held.get(self.path, b"")))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def refuse(self, status: int, code: str) -> None:
            self.answer(status, f"<Error><Code>{code}</Code><Message>no</Message></Error>".encode())

        def serve(self, work: Callable[[], None]) -> None:
            if self.command in state.answers:
                self.refuse(*state.answers[self.command])
            else:
                work()

        def do_HEAD(self) -> None:
            self.serve(lambda: self.answer(200))

        def do_GET(self) -> None:
            if self.path in state.held:
                self.serve(lambda: self.answer(200, state.held[self.path]))
            else:
                self.refuse(404, "NoSuchKey")

        def do_DELETE(self) -> None:
            def work() -> None:
                state.held.pop(self.path, None)
                self.answer(204)

            self.serve(work)

        def do_PUT(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))

            def work() -> None:
                held, wanted = state.held.get(self.path), self.headers.get("If-Match")
                taken = self.headers.get("If-None-Match") and held is not None
                if (taken or (wanted and wanted != tag(held or b""))) and not state.ignores_condition:
                    self.refuse(412, "PreconditionFailed")
                    return
                state.held[self.path] = body
                self.answer(200)

            self.serve(work)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield state, f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_store_that_refuses_a_step_is_named_and_keeps_nothing(tmp_path: Path) -> None:
    with store() as (state, endpoint):
        state.ignores_condition = True
        expect(
            object_finding(tmp_path, "bucket", endpoint), Result.WARNING, "conditions of puts are ignored", "gc.alone"
        )
        state.ignores_condition = False
        expect(object_finding(tmp_path, "bucket", endpoint), Result.OK, "conditional put")
        for method, answer, words in (
            ("PUT", (507, "XMinioStorageFull"), "free room"),
            ("GET", (403, "AccessDenied"), "what was put cannot be read"),
        ):
            state.answers = {method: answer}
            expect(object_finding(tmp_path, "bucket", endpoint), Result.PROBLEM, words, str(answer[0]))
            assert state.held == {}
        state.answers = {"DELETE": (403, "AccessDenied")}
        found = object_finding(tmp_path, "bucket", endpoint)
        (name,) = state.held
        expect(found, Result.PROBLEM, "s3:DeleteObject", name.removeprefix("/bucket/blocks/"))


def test_a_url_of_objects_that_is_none_is_a_problem(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, pools__object__url="http://bucket")
    expect(found_in(settings, "object store"), Result.PROBLEM, "begin it with one of s3://")


# -- the catalog ------------------------------------------------------------------------------------------------------


def test_a_catalog_that_runs_says_whether_it_is_ready(fresh_nats: str, sqlite_url: str, tmp_path: Path) -> None:
    service = ServiceSettings(
        nats_url=fresh_nats, database_url=sqlite_url, cluster="c", listen="127.0.0.1:0", connect_s=WAIT_S
    )
    with CatalogThread(service, NATIVE, NATIVE_INDEX) as catalog:
        client = CatalogClient(catalog.url, WAIT_S)
        client.wait_ready(WAIT_S)
        client.close()
        settings = settings_of(tmp_path, catalog__url=catalog.url)
        found = services.judge_catalog(services.look_at_catalog(settings), settings)
        expect(found, Result.OK, catalog.url, "ready, 0 messages behind the stream")
        expect(sql_finding(sqlite_url, tmp_path), Result.OK, "is the newest")  # while the catalog uses it
    expect(found_in(settings, "catalog"), Result.PROBLEM, "Connection refused", "kvbm-catalog serve")


# -- together ---------------------------------------------------------------------------------------------------------


def test_checks_that_answer_at_once_come_in_the_order_of_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "look_at_clock", lambda: time.sleep(0.1))
    monkeypatch.setattr(run, "judge_clock", lambda facts: ok("clock", "late"))
    checks = [one.check for one in examine(settings_of(tmp_path, nats__enabled=False), QUICK).findings]
    assert checks[:3] == ["pools", "liveness", "CPU cores"]
    assert checks[-5:] == ["clock", "NATS", "SQL", "object store", "catalog"]
    assert len(checks) == len(set(checks))
