"""`kvbm-catalog lookup`, `route`, `who`, `instances` and `watch` against a running catalog."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from kvbm import catalog_questions, cli
from kvbm.assembly import NATIVE, NATIVE_INDEX, catalog_clients
from kvbm.catalog.edge.server import CatalogThread
from kvbm.catalog.service import ServiceSettings
from kvbm.command_line import configure_logs
from kvbm.config import Settings
from kvbm.core.answers import BlockAnswer, InstanceSummary, LookupAnswer, RouteAnswer
from kvbm.core.errors import CatalogError
from kvbm.core.ids import Namespace
from kvbm.core.watch_events import BlockChanges, WatchBegun, WatchEvent
from kvbm.locate.asynchronous import AsyncCatalogClient
from kvbm.locate.http import CatalogClient
from tests.eventually import WAIT_S, eventually
from tests.ledger_instances import HASHES, POOL, SPACE, LedgerInstance
from tests.nats_fixture import cluster, nats_url  # noqa: F401

TOKENS = list(range(40))  # ten blocks
Asked = Callable[..., tuple[int, str, str]]


@pytest.fixture
def url(nats_url: str, cluster: str, sqlite_url: str) -> Iterator[str]:  # noqa: F811
    """A ready catalog in which instance `a` has two blocks in HBM, and a pool eight."""
    configure_logs(logging.WARNING)  # what it remarks is no answer
    settings = ServiceSettings(
        nats_url=nats_url,
        database_url=sqlite_url,
        cluster=cluster,
        listen="127.0.0.1:0",
        store_every_s=0.02,
        liveness_s=10 * WAIT_S,
        whole_wait_s=0.0,
        connect_s=WAIT_S,
    )
    with CatalogThread(settings, NATIVE, NATIVE_INDEX) as thread:
        instance = LedgerInstance(nats_url, cluster, "a")
        instance.fill()
        instance.publish()
        client = CatalogClient(thread.url, WAIT_S)
        client.wait_ready(WAIT_S)
        eventually(lambda: client.block(SPACE, HASHES[16 * 7 : 16 * 8]).holders, "the pool's blocks are not there")
        eventually(lambda: is_live(instance, client), "a is not live")
        client.close()
        yield thread.url


def is_live(instance: LedgerInstance, client: CatalogClient) -> bool:
    """One sign of life may come before the catalog listens."""
    instance.beat()
    return [one.state for one in client.instances()] == ["live"]


def patient(settings: Settings, url: str = "", timeout_s: float = 0.0) -> CatalogClient:
    """The client of a command, which waits for as long as a busy machine may take."""
    client = catalog_clients(settings, url)
    assert isinstance(client, CatalogClient)
    client._timeout_s = WAIT_S
    return client


@pytest.fixture
def asked(url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Asked:
    """Runs a command, without a secret; its status, and what it printed at both places."""

    monkeypatch.setattr(catalog_questions, "catalog_clients", patient)

    def ask(*words: str, given: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given.encode())))
        status = cli.catalog_main([words[0], "--url", url, *words[1:]])
        said = capsys.readouterr()
        return status, said.out, said.err

    return ask


@pytest.mark.parametrize("how", ["tokens", "list", "hashes", "file of tokens", "file of hashes", "standard input"])
def test_a_prompt_is_given_in_any_way(asked: Asked, tmp_path: Path, how: str) -> None:
    ids = " ".join(map(str, TOKENS))
    file = tmp_path / "prompt.txt"
    file.write_text(
        "\n".join(HASHES.hex()[at : at + 32] for at in range(0, len(HASHES.hex()), 32)) if "hashes" in how else ids
    )
    given = {
        "tokens": ids.replace(" ", ","),
        "list": json.dumps(TOKENS),
        "hashes": HASHES.hex(),
        "standard input": "-",
    }.get(how, str(file))
    status, out, _ = asked("lookup", given, "--json", given=ids)
    assert status == 0
    answer = msgspec.json.decode(out, type=LookupAnswer)
    assert (answer.blocks, answer.deepest) == (10, 8)
    assert [(one.instance, one.depth, one.tiers) for one in answer.instances] == [("a", 2, {"HBM": 2})]
    assert [(one.pool, one.depth) for one in answer.pools] == [(POOL, 8)]


def test_answers_are_tables_for_people(asked: Asked) -> None:
    ids = ",".join(map(str, TOKENS))
    _, looked_up, _ = asked("lookup", ids)
    assert "10 full blocks; the longest prefix held is of 8" in looked_up
    assert "HBM 2" in looked_up
    assert POOL in looked_up
    _, routed, _ = asked("route", ids)
    assert "send it to a" in routed
    assert "first token" in routed
    _, held, _ = asked("who", HASHES[:16].hex())
    assert ["a", "instance", "HBM"] in [line.split() for line in held.splitlines()]
    _, instances, _ = asked("instances")
    assert "2 / 64" in instances
    assert "live" in instances
    assert "OBJECT" not in instances and f"pool {POOL} of all: 8 blocks" in instances
    _, one, _ = asked("instances", "a")
    assert "rack-1, a" in one
    assert re.search(r"as of its last heartbeat, \d+\.\d s ago: published, ", one)
    _, nobody, _ = asked("who", "00" * 16)
    assert "nobody holds block" in nobody
    _, spaces, _ = asked("instances", "--namespaces")
    assert SPACE.id.hex() in spaces


def on_terminal(columns: int, *words: str) -> str:
    """What `kvbm-catalog` shows on a terminal of so many columns."""
    ours, its = os.openpty()
    shown: list[bytes] = []

    def read() -> None:
        try:
            while data := os.read(ours, 1 << 16):
                shown.append(data)
        except OSError:  # EIO: the other end is closed
            pass

    reader = threading.Thread(target=read)
    reader.start()
    try:
        subprocess.run(
            [sys.executable, "-c", "import sys; from kvbm.cli import catalog_main; sys.exit(catalog_main())", *words],
            stdout=its,
            stdin=subprocess.DEVNULL,
            timeout=WAIT_S,
            check=True,
            env=os.environ | {"TERM": "xterm", "COLUMNS": str(columns)},
        )
    finally:
        os.close(its)
        reader.join(WAIT_S)
        os.close(ours)
    return re.sub(r"\x1b\[[0-9;]*m", "", b"".join(shown).decode())


def test_a_remark_has_room_on_a_narrow_terminal(url: str, nats_url: str, cluster: str) -> None:  # noqa: F811
    trouble = "NVME: the disk is full; make room, nothing new goes there"
    with CatalogClient(url, WAIT_S) as client:

        def is_told() -> bool:
            LedgerInstance(nats_url, cluster, "a").beat(trouble=trouble)
            return client.instances()[0].trouble == trouble

        eventually(is_told, "its trouble is not told")
    narrow = on_terminal(80, "instances", "--url", url)
    assert f"a: {trouble}" in narrow and "2 / 64" in narrow and "remark" not in narrow
    assert max(map(len, narrow.splitlines())) <= 80
    (row,) = [line.split() for line in narrow.splitlines() if line.startswith(" a ")]
    assert row[:2] == ["a", "live"]
    wide = on_terminal(200, "instances", "--url", url)
    assert trouble in wide and "remark" in wide


def test_a_route_says_who_is_left_out_and_why(
    asked: Asked,
    url: str,
    nats_url: str,  # noqa: F811
    cluster: str,  # noqa: F811
) -> None:
    other = LedgerInstance(nats_url, cluster, "b")
    other.fill()
    other.publish()
    other.beat()
    other.stop()
    other.publish()
    with CatalogClient(url, WAIT_S) as client:
        eventually(lambda: [one.state for one in client.instances()] == ["live", "stopped"], "b has not stopped")
    _, out, _ = asked("route", HASHES.hex())
    assert "send it to a" in out
    assert "left out: b, stopped: it had the prompt's first block" in out


def test_json_is_what_the_catalog_answers(asked: Asked) -> None:
    _, out, _ = asked("route", HASHES.hex(), "--json")
    assert msgspec.json.decode(out, type=RouteAnswer).ranked[0].missing_tokens == 32
    _, out, _ = asked("who", HASHES[:16].hex(), "--namespace", SPACE.id.hex()[:6], "--json")
    assert {one.name for one in msgspec.json.decode(out, type=BlockAnswer).holders} == {"a", POOL}
    _, out, _ = asked("instances", "--json")
    assert [one.instance for one in msgspec.json.decode(out, type=list[InstanceSummary])] == ["a"]


def test_a_route_is_not_remembered_unless_it_is_sent(asked: Asked) -> None:
    def waits() -> float:
        return (
            msgspec.json.decode(
                asked("route", HASHES.hex(), "--input-tokens", "16000000", "--json")[1], type=RouteAnswer
            )
            .ranked[0]
            .queueing_s
        )

    assert [waits(), waits()] == [0.0, 0.0]
    asked("route", HASHES.hex(), "--input-tokens", "16000000", "--send")
    assert waits() > 0


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("lookup", "no such file"), "neither token ids nor hashes"),
        (("lookup", "1,2,3"), "fill no block"),
        (("lookup", "1,2,99999999999"), "neither token ids nor hashes"),
        (("lookup", HASHES.hex(), "--namespace", "other"), "no namespace 'other'"),
        (("instances", "b"), "no instance 'b'"),
        (("watch", "--prompt", HASHES.hex(), "--namespace", "other"), "no namespace 'other'"),
    ],
)
def test_what_cannot_be_asked_is_said(asked: Asked, words: tuple[str, ...], why: str) -> None:
    status, out, err = asked(*words)
    assert (status, out) == (2, "")
    assert why in err


def heard(url: str, nats_url: str, cluster: str, *spaces: Namespace) -> None:  # noqa: F811
    """Instances of these namespaces come, each with two blocks of its own."""
    for at, space in enumerate(spaces):
        other = LedgerInstance(nats_url, cluster, f"b{at}", space=space)
        other.publish()
    with CatalogClient(url, WAIT_S) as client:
        wanted = {SPACE.id.hex(), *(space.id.hex() for space in spaces)}
        eventually(lambda: {one.id for one in client.namespaces()} == wanted, "the namespaces are not known")


def test_a_tenant_picks_its_namespace(asked: Asked, url: str, nats_url: str, cluster: str) -> None:  # noqa: F811
    acme, bolt = (msgspec.structs.replace(SPACE, tenant=name) for name in ("acme", "bolt"))
    heard(url, nats_url, cluster, acme, bolt)
    one_of = ("--namespace", SPACE.model)
    assert "may be any of 3 namespaces" in asked("lookup", HASHES.hex(), *one_of)[2]
    for words in (
        (*one_of, "--tenant", "acme"),
        ("--tenant", "acme"),
        ("--tenant", "acme", "--namespace", acme.id.hex()[:6]),
    ):
        status, out, err = asked("lookup", HASHES.hex(), *words, "--json")
        assert (status, err) == (0, "")
        assert msgspec.json.decode(out, type=LookupAnswer).namespace == acme.id.hex()
    _, out, _ = asked("lookup", HASHES.hex(), "--tenant", "", "--json")
    assert msgspec.json.decode(out, type=LookupAnswer).namespace == SPACE.id.hex()
    status, out, _ = asked(
        "lookup", ",".join(map(str, TOKENS)), "--tenant", "bolt", "--set", "catalog.tenant_secrets.bolt=x", "--json"
    )
    assert (status, msgspec.json.decode(out, type=LookupAnswer).namespace) == (0, bolt.id.hex())
    status, _, err = asked("lookup", HASHES.hex(), "--tenant", "nosuch")
    assert status == 2 and "knows no namespace of tenant 'nosuch'" in err and acme.id.hex() in err
    assert asked("lookup", HASHES.hex(), "--tenant", "bolt", "--namespace", acme.id.hex())[0] == 2


def test_a_block_is_looked_for_in_all_namespaces(
    asked: Asked,
    url: str,
    nats_url: str,  # noqa: F811
    cluster: str,  # noqa: F811
) -> None:
    heard(url, nats_url, cluster, msgspec.structs.replace(SPACE, tenant="acme"))
    block = HASHES[:16].hex()
    status, out, _ = asked("who", block)
    assert status == 0 and f"hash {block}" in out
    rows = [line.split() for line in out.splitlines() if line.startswith(f" {block[:12]}")]
    assert sorted(row[3] for row in rows) == ["a", POOL] and {row[1] for row in rows} == {SPACE.id.hex()[:8]}
    (answer,) = msgspec.json.decode(asked("who", block, "--json")[1], type=list[BlockAnswer])
    assert (answer.namespace, {one.name for one in answer.holders}) == (SPACE.id.hex(), {"a", POOL})
    assert "nobody holds block" in asked("who", block, "--tenant", "acme")[1]
    status, _, err = asked("who", block[:8])
    assert status == 2 and "this one keeps none; give all 32 digits" in err
    with pytest.raises(SystemExit):
        asked("who", block[:7])


def test_the_hashes_of_a_prompt_are_told(asked: Asked) -> None:
    ids = ",".join(map(str, TOKENS))
    each = [HASHES[at : at + 16].hex() for at in range(0, len(HASHES), 16)]
    status, out, err = asked("hashes", ids)
    assert (status, out.split(), err) == (0, each, "")
    assert json.loads(asked("hashes", ids, "--json")[1]) == {"namespace": SPACE.id.hex(), "hashes": each}
    assert asked("lookup", "-", "--json", given=out)[1] == asked("lookup", ids, "--json")[1]


def test_a_cluster_without_instances_is_told_in_words(
    nats_url: str,  # noqa: F811
    cluster: str,  # noqa: F811
    sqlite_url: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = ServiceSettings(
        nats_url=nats_url, database_url=sqlite_url, cluster=cluster, listen="127.0.0.1:0", connect_s=WAIT_S
    )
    with CatalogThread(settings, NATIVE, NATIVE_INDEX) as thread:
        with CatalogClient(thread.url, WAIT_S) as client:
            client.wait_ready(WAIT_S)
        capsys.readouterr()
        assert cli.catalog_main(["instances", "--url", thread.url]) == 0
        assert capsys.readouterr().out.startswith("the catalog knows no instance yet")
        assert cli.catalog_main(["instances", "--url", thread.url, "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == []


def test_two_namespaces_are_told_apart(asked: Asked, nats_url: str, cluster: str, url: str) -> None:  # noqa: F811
    other = msgspec.structs.replace(SPACE, kv_dtype="float16", lora="\x1b]0;owned\x07")
    LedgerInstance(nats_url, cluster, "b", space=other).publish()
    client = CatalogClient(url, WAIT_S)
    eventually(lambda: len(client.namespaces()) == 2, "the second namespace is not known")
    client.close()
    status, _, err = asked("lookup", HASHES.hex(), "--namespace", "m")
    assert status == 2
    assert other.id.hex() in err
    assert "float16" in err
    assert "\x1b" not in err  # whoever publishes names it
    assert "give --namespace with an id of these, or its beginning" in err
    assert "\x1b" not in asked("instances", "--namespaces")[1]
    _, out, _ = asked("lookup", HASHES.hex(), "--namespace", SPACE.id.hex(), "--json")
    assert msgspec.json.decode(out, type=LookupAnswer).deepest == 8


def test_a_tenants_secret_that_is_missing_is_asked_for_with_what_can_be_given(
    asked: Asked,
    nats_url: str,  # noqa: F811
    cluster: str,  # noqa: F811
    url: str,
    tmp_path: Path,
) -> None:
    acme = msgspec.structs.replace(SPACE, tenant="acme")
    LedgerInstance(nats_url, cluster, "b", space=acme).publish()
    with CatalogClient(url, WAIT_S) as client:
        eventually(lambda: len(client.namespaces()) == 2, "the second namespace is not known")
    ids, chosen = ",".join(map(str, TOKENS)), ("--namespace", acme.id.hex()[:8])
    status, out, err = asked("lookup", ids, *chosen)
    assert (status, out) == (2, "")
    assert "tokens of tenant 'acme' are hashed with its secret" in err and "catalog.tenant_secrets_file=FILE" in err
    assert "[tenants.acme]" in err and SPACE.id.hex() not in err  # which is nobody's, and has other hashes
    secrets = tmp_path / "secrets.toml"
    secrets.write_text('[tenants."b b"]\nsecret = "another"\n')
    secrets.chmod(0o600)
    assert f"nor in {secrets}; write there [tenants.acme]" in asked("lookup", ids, *chosen, *named(secrets))[2]
    secrets.write_text('[tenants.acme]\nsecret = "a secret"\n')
    status, out, _ = asked("lookup", ids, *chosen, *named(secrets))
    assert status == 0 and "10 full blocks" in out


def test_a_catalog_that_takes_too_long_is_told_from_one_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:  # takes connections, and answers nothing
        host, port = busy.getsockname()
        words = ["--url", f"http://{host}:{port}", "--timeout", "0.2"]
        late = f"the catalog at http://{host}:{port} does not answer in time (no answer to "
        for question in (["instances"], ["who", "ab" * 4]):
            assert cli.catalog_main([*question, *words]) == 2
            said = capsys.readouterr().err
            assert late in said and "within 0.2 s)" in said and "--timeout" in said and "start it" not in said
        set_url = ["--set", f"catalog.url=http://{host}:{port}", "--timeout", "0.2"]
        assert cli.catalog_main(["forget", "gpu-7", *set_url]) == 2
        assert late in capsys.readouterr().err

        async def ask() -> None:
            async with AsyncCatalogClient(f"http://{host}:{port}", timeout_s=0.2) as client:
                await client.instances()

        with pytest.raises(CatalogError, match="does not answer in time"):
            asyncio.run(ask())
    assert cli.catalog_main(["instances", *words]) == 2  # nobody listens now
    said = capsys.readouterr().err
    assert "start it with kvbm-catalog serve" in said and "in time" not in said


def named(secrets: Path) -> tuple[str, str]:
    return "--set", f"catalog.tenant_secrets_file={secrets}"


@pytest.mark.parametrize("as_json", [False, True])
def test_changes_are_watched_until_interrupted(
    nats_url: str,  # noqa: F811
    cluster: str,  # noqa: F811
    url: str,
    as_json: bool,
) -> None:
    words = [sys.executable, "-m", "kvbm", "catalog", "watch", "--url", url, "--instance", "b"]
    with subprocess.Popen([*words, *(["--json"] if as_json else [])], stdout=subprocess.PIPE, text=True) as watching:
        assert watching.stdout is not None
        first = watching.stdout.readline()
        instance = LedgerInstance(nats_url, cluster, "b")
        instance.create(3)
        instance.publish()
        seen = []
        for line in watching.stdout:
            seen.append(line)
            if "gained" in line and "HBM" in line:
                break
        watching.terminate()
        assert watching.wait(WAIT_S) == 130
    if as_json:
        assert isinstance(msgspec.json.decode(first, type=WatchEvent), WatchBegun)
        changes = msgspec.json.decode(seen[-1], type=WatchEvent)
        assert isinstance(changes, BlockChanges)
        assert [one.hashes for one in changes.changes if one.what == "gained"] == [HASHES[:48].hex()]
    else:
        assert first.startswith("watching from ")
        assert seen[-1] == f"b gained 3 in HBM: {HASHES[:16].hex()}…\n"


def test_metrics_tell_the_memory_of_the_index(url: str) -> None:
    with closing(CatalogClient(url, WAIT_S)) as client:
        found = [line.split() for line in client.metrics().splitlines() if line.startswith("kvbm_catalog_index_bytes{")]
    assert [name for name, _ in found] == [
        f'kvbm_catalog_index_bytes{{part="{part}"}}' for part in ("rest", "sets", "table")
    ]
    assert all(float(size) > 0 for _, size in found)
