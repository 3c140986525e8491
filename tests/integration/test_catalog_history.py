"""A catalog that keeps a history of its archive, asked over HTTP about the past."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, urlsplit

import pytest
import urllib3

from kvbm.assembly import NATIVE, NATIVE_INDEX
from kvbm.assembly.history import history_options
from kvbm.catalog.access.callers import AccessOptions
from kvbm.catalog.access.file import NewToken, add_token
from kvbm.catalog.edge.server import CatalogThread
from kvbm.catalog.service import ServiceSettings
from kvbm.catalog_cli import catalog_main
from kvbm.config import load_settings
from kvbm.config.settings import LimitSettings
from kvbm.core.errors import ConfigError
from kvbm.core.events import StopReason
from kvbm.core.ids import Tier
from kvbm.locate.http import CatalogClient
from kvbm.replay.history_manifest import read_manifest
from tests.catalog_site import HASHES, OTHER, POOLS, SPACE, TOKENS, Instance
from tests.eventually import WAIT_S, eventually
from tests.extras import needed
from tests.nats_fixture import cluster, nats_url

__all__ = ["cluster", "nats_url"]

ARROW = {"accept": "application/vnd.apache.arrow.stream"}
SLOW = "SELECT count(*) FROM range(1000000000000) WHERE range % 7 = 3"
BLOCK = HASHES[:16].hex()


class Site(NamedTuple):
    """A catalog with a history, how to ask it, and an instance that has published."""

    url: str
    settings: ServiceSettings
    thread: CatalogThread
    archive: Path
    folder: Path
    times: list[str]  # between what it did

    def ask(self, path: str, **asked: object) -> Any:
        answer = self._asked(path, asked)
        assert answer.status == 200, answer.data
        return answer.json()

    def refused(self, path: str, **asked: object) -> tuple[int, str]:
        answer = self._asked(path, asked)
        return answer.status, answer.json()["error"]["code"]

    def _asked(self, path: str, asked: dict[str, Any]) -> urllib3.BaseHTTPResponse:
        return urllib3.request("GET", f"{self.url}/v1/history{path}", fields=asked or None, timeout=WAIT_S)

    def sql(self, question: str, headers: dict[str, str] | None = None, **more: object) -> urllib3.BaseHTTPResponse:
        body = json.dumps({"question": question, **more})
        return urllib3.request(
            "POST", f"{self.url}/v1/history/sql", body=body, headers=headers or {}, timeout=WAIT_S, retries=False
        )

    def rows(self, question: str) -> Any:
        answer = self.sql(question)
        assert answer.status == 200, answer.data
        return answer.json()["rows"]

    def catch_up(self, instance: Instance) -> None:
        """Wait until all that an instance has published is in the history."""
        question = (
            f"SELECT count(*) FROM events WHERE instance = '{instance.name}' AND epoch = {instance.epoch} "
            f'AND "offset" + 1 = {instance.ledger.applied}'
        )
        eventually(lambda: self.sql(question).status == 200 and self.rows(question) != [[0]], "the history has it")


def now() -> str:
    time.sleep(0.002)
    return datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def settings_of(folder: Path, server: str, within: str, **limits: Any) -> ServiceSettings:
    flags = {"catalog.archive": str(folder / "archive"), "catalog.history": str(folder / "history")}
    loaded = load_settings(flags=flags)
    return ServiceSettings(
        nats_url=server,
        database_url=f"sqlite:///{folder / 'catalog.db'}",
        cluster=within,
        listen="127.0.0.1:0",
        connect_s=WAIT_S,
        archive=loaded.catalog.archive,
        history=history_options(loaded),
        limits=LimitSettings(**limits),
    )


@contextmanager
def opened_site(folder: Path, nats_url: str) -> Iterator[Site]:
    """One in a cluster of its own: a run whose workers take tests from each other opens several on one server."""
    within = f"past-{uuid.uuid4().hex[:12]}"
    settings = settings_of(folder, nats_url, within, history_waiting=2, history_bytes=64 << 20)
    with CatalogThread(settings, NATIVE, NATIVE_INDEX) as thread:
        times = [now()]
        one = Instance(nats_url, within, "one")
        one.publish()
        times.append(now())
        one.create(0, 4)
        one.publish()
        times.append(now())
        one.copy(Tier.HOST, 0, 2)
        one.publish()
        times.append(now())
        one.ledger.stop(StopReason.SHUTDOWN)
        one.publish()
        times.append(now())
        found = Site(thread.url, settings, thread, folder / "archive", folder / "history", times)
        stopped = "SELECT stopped FROM instances"
        eventually(lambda: found.sql(stopped).status == 200 and found.rows(stopped) == [["shutdown"]], "it stopped")
        yield found


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, nats_url: str) -> Iterator[Site]:
    with opened_site(tmp_path_factory.mktemp("site"), nats_url) as found:
        yield found


def test_it_says_from_when_to_when_and_that_it_does_not_lag(site: Site):
    status = site.ask("")
    assert status["ready"] and status["reason"] == ""
    assert status["from"] < site.times[1] < status["until"] < site.times[4]
    assert (status["instances"], status["holes"], status["clocks"]) == (["one"], [], "instances")
    assert (status["lag_bytes"], status["lags"], status["lag_s"]) == (0, False, 0.0)
    assert status["stays"] == 6 and status["epochs"] == 1 and status["bytes"] > 0


def test_an_overview_of_each_moment(site: Site):
    assert site.ask("/overview", at=site.times[0])["instances"] == []
    blocks = []
    for at in site.times[1:]:
        overview = site.ask("/overview", at=at)
        (instance,) = overview["instances"]
        blocks.append({tier["tier"]: tier["blocks"] for tier in instance["tiers"]})
    assert blocks == [
        {"HBM": 0, "HOST": 0, "OBJECT": None},
        {"HBM": 4, "HOST": 0, "OBJECT": None},
        {"HBM": 4, "HOST": 2, "OBJECT": None},
        {"HBM": 4, "HOST": 2, "OBJECT": None},
    ]
    last = site.ask("/overview")
    (instance,) = last["instances"]
    assert (instance["state"], instance["stopped"], instance["engine"]) == ("stopped", "shutdown", "test")
    assert instance["tiers"][0] == {
        "tier": "HBM",
        "blocks": 4,
        "slots": 64,
        "block_bytes": 1024,
        "bytes": 4096,
        "name": POOLS[0].name,
    }
    assert site.ask("/overview", at=site.times[2])["instances"][0]["state"] == "running"
    assert last["tiers"][0] == {"tier": "HBM", "blocks": 4, "slots": 64, "bytes": 4096}
    assert last["tenants"][0] == {"tenant": "", "tier": "HBM", "blocks": 4, "bytes": 4096, "instances": 1}
    assert site.ask("/tenants")["tenants"] == last["tenants"]
    assert last["until"] == site.ask("")["until"]


def test_a_block_by_the_beginning_of_its_hash(site: Site):
    found = site.ask(f"/block/{BLOCK[:8]}", at=site.times[2])
    (block,) = found["blocks"]
    assert [one["sentence"] for one in block["events"]] == [
        "created in HBM, block 0 of its chain",
        "copied from HBM to HOST (offload)",
    ]
    assert (block["block"], block["namespace"], block["model"]) == (BLOCK, SPACE.id.hex(), "m")
    assert [(one["instance"], one["tier"]) for one in block["held"]] == [("one", "HBM")]
    assert [one["tier"] for one in site.ask(f"/block/{BLOCK.upper()}")["blocks"][0]["held"]] == ["HBM", "HOST"]
    assert not found["more"] and found["holes"] == []


def posted(site: Site, path: str, **asked: object) -> tuple[int, Any]:
    answer = urllib3.request("POST", f"{site.url}/v1/history{path}", json=asked, timeout=WAIT_S)
    return answer.status, answer.json()


def test_a_prompt_by_its_tokens_or_hashes_at_each_moment(site: Site):
    space = SPACE.id.hex()
    found = []
    for at in site.times:
        status, answer = posted(site, "/prompt", namespace=space, tokens=TOKENS, at=at)
        assert (status, answer["blocks"], answer["clocks"]) == (200, 10, "instances")
        found.append([(one["instance"], one["depth"], one["run"], one["state"]) for one in answer["holders"]])
    assert found[:4] == [[], [], [("one", 4, {"HBM": 4}, "running")], [("one", 4, {"HBM": 4}, "running")]]
    status, answer = posted(site, "/prompt", namespace=space, hashes=HASHES.hex(), at=site.times[3])
    assert status == 200 and [one["name"] for one in answer["holders"][0]["tiers"]] == ["HBM", "HOST"]
    assert [one["held"] for one in answer["holders"][0]["tiers"]] == ["0f00", "0300"]
    assert site.ask("/pools", at=site.times[3])["pools"] == []


def test_a_route_then_says_that_load_is_not_known(site: Site):
    asked = {"namespace": SPACE.id.hex(), "tokens": [*TOKENS, 1, 2], "at": site.times[3]}
    status, answer = posted(site, "/route", **asked)
    assert status == 200 and answer["input_tokens"] == 42
    assert [(one["instance"], one["depth"], one["missing_tokens"]) for one in answer["ranked"]] == [("one", 4, 26)]
    assert answer["not_known"][0] == "load then is not recorded: costs are those of idle engines"
    assert answer["without"]["missing_tokens"] == 42


@pytest.mark.parametrize(
    ("path", "asked", "code"),
    [
        ("/prompt", {"hashes": BLOCK}, "namespace_missing"),
        ("/prompt", {"namespace": SPACE.id.hex(), "hashes": ""}, "bad_prompt"),
        ("/prompt", {"namespace": SPACE.id.hex(), "hashes": BLOCK * 8193}, "bad_prompt"),
        ("/prompt", {"namespace": SPACE.id.hex(), "hashes": BLOCK, "at": "noon"}, "bad_time"),
        ("/prompt", {"namespace": SPACE.id.hex(), "hashes": BLOCK, "instances": ["one"]}, "of_now_alone"),
        ("/route", {"namespace": SPACE.id.hex(), "hashes": BLOCK}, "input_tokens_missing"),
        ("/route", {"namespace": SPACE.id.hex(), "hashes": BLOCK, "input_tokens": 3}, "too_many_hashes"),
    ],
)
def test_a_prompt_that_makes_no_sense_is_refused_in_words(site: Site, path: str, asked: dict[str, Any], code: str):
    status, answer = posted(site, path, **asked)
    assert (status, answer["error"]["code"]) == (422, code), answer


def test_changes_and_a_timeline_of_a_stretch(site: Site):
    changes = site.ask("/changes", **{"from": site.times[1], "to": site.times[2]})
    assert changes["changes"] == [{"instance": "one", "tier": "HBM", "event": "began", "cause": "created", "blocks": 4}]
    whole = site.ask("/changes", **{"from": site.times[0]})
    assert [one["instance"] for one in whole["starts"]] == ["one"]
    assert [one["reason"] for one in whole["stops"]] == ["shutdown"]
    line = site.ask("/timeline", **{"from": site.times[0], "to": site.times[4], "steps": 50})
    assert len(line["steps"]) == 50
    assert sum(step["gained"] for step in line["steps"]) == 6
    assert line["steps"][-1]["blocks"] == {"HBM": 4, "HOST": 2}
    assert line["steps"][-1]["time"] == site.times[4]
    assert len(site.ask("/timeline")["steps"]) == 100


def test_an_instance_and_its_epochs(site: Site):
    found = site.ask("/instances/one", at=site.times[3])
    assert [(one["epoch"], one["stopped"]) for one in found["epochs"]] == [(1, "shutdown")]
    assert found["instances"][0]["blocks"] == 6
    assert [(one["tier"], one["model"], one["blocks"]) for one in found["namespaces"]] == [
        ("HBM", "m", 4),
        ("HOST", "m", 2),
    ]
    assert site.ask("/instances/one", at=site.times[0])["instances"] == []


@pytest.mark.parametrize(
    ("path", "asked", "status", "code"),
    [
        ("/overview", {"at": "yesterday"}, 422, "bad_time"),
        ("/overview", {"at": "e1+2"}, 422, "bad_time"),
        ("/overview", {"at": "99999999999999999999"}, 422, "bad_time"),
        ("/overview", {"when": "12:00"}, 422, "bad_query"),
        ("/changes", {}, 422, "bad_time"),
        ("/changes", {"from": "2026-01-02", "to": "2026-01-01"}, 422, "bad_time"),
        ("/timeline", {"steps": "0"}, 422, "bad_time"),
        ("/timeline", {"steps": "many"}, 422, "bad_time"),
        ("/block/abc", {}, 422, "bad_hash"),
        ("/block/" + "z" * 32, {}, 422, "bad_hash"),
        ("/block/" + quote("' OR 1=1 --"), {}, 422, "bad_hash"),
        ("/block/00000000", {}, 404, "block_unknown"),
        ("/instances/nobody", {}, 404, "instance_unknown"),
        ("/instances/" + quote("one' OR '1"), {}, 404, "instance_unknown"),
    ],
)
def test_what_makes_no_sense_is_refused_in_words(site: Site, path: str, asked: dict[str, str], status: int, code: str):
    assert site.refused(path, **asked) == (status, code)


def test_times_before_and_behind_the_history_are_answered(site: Site):
    assert site.ask("/overview", at="1970-01-02")["instances"] == []
    assert site.ask("/overview", at="9999-12-31T23:59:59Z")["instances"][0]["blocks"] == 6
    assert site.ask("/overview", at=str(time.time()))["instances"][0]["blocks"] == 6
    clock = site.ask("")["until"][11:19]
    assert site.ask("/overview", at=clock)["at"][11:19] == clock


def test_sql_as_json(site: Site):
    answer = site.sql(
        "SELECT tier, count(*) AS blocks, sum(1) AS total, max(began) AS latest FROM residencies "
        "GROUP BY tier ORDER BY tier"
    ).json()
    assert [one["name"] for one in answer["columns"]] == ["tier", "blocks", "total", "latest"]
    assert [row[:3] for row in answer["rows"]] == [["HBM", 4, 4], ["HOST", 2, 2]]
    assert site.times[1] < answer["rows"][0][3] < site.times[2]
    assert (answer["more"], answer["holes"], answer["until"]) == (False, [], site.ask("")["until"])
    cut = site.sql("SELECT range FROM range(100000)", rows=7).json()
    assert (len(cut["rows"]), cut["more"]) == (7, True)
    assert site.sql("SELECT range FROM range(7)", rows=7).json()["more"] is False


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"{", 400, "not_json"),
        (b"{}", 422, "bad_question"),
        (b'{"question": 7}', 422, "bad_question"),
        (b'{"question": "SELECT 1", "sql": "x"}', 422, "bad_question"),
        (b'{"question": "SELECT 1", "within_s": 0}', 422, "bad_question"),
        (b'{"question": "SELECT 1", "within_s": 1e9}', 422, "bad_question"),
        (b'{"question": "SELECT 1", "rows": -1}', 422, "bad_question"),
        (b'{"question": "SELECT 1; SELECT 2"}', 422, "bad_question"),
        (b'{"question": "COPY (SELECT 1) TO \'x\'"}', 422, "bad_question"),
        (b'{"question": "SELECT * FROM read_text(\'/etc/hostname\')"}', 422, "bad_question"),
        (b'{"question": "SELECT nothing"}', 422, "bad_question"),
        (b'{"question": "SELECT TIMESTAMP \'20000-01-01\'"}', 422, "bad_question"),
        (b'{"question": "SELECT range FROM range(1000000000000) WHERE range < 5", "within_s": 0.3}', 504, "too_slow"),
        (b'{"question": "SELECT list(range) FROM range(100000000)", "within_s": 30}', 422, "too_much"),
        (b'{"question": "' + SLOW.encode() + b'", "within_s": 0.3}', 504, "too_slow"),
    ],
)
def test_a_question_that_cannot_be_answered_is_refused_in_words(site: Site, body: bytes, status: int, code: str):
    answer = urllib3.request("POST", f"{site.url}/v1/history/sql", body=body, timeout=WAIT_S)
    assert (answer.status, answer.json()["error"]["code"]) == (status, code)


def test_too_many_questions_at_once_are_refused_and_others_go_on(site: Site):
    with ThreadPoolExecutor(12) as threads:
        asked = [threads.submit(site.sql, SLOW, within_s=1.5) for _ in range(12)]
        assert site.thread.url  # the catalog itself answers meanwhile
        assert urllib3.request("GET", f"{site.url}/healthz", timeout=WAIT_S).status == 200
        answers = [one.result(timeout=WAIT_S) for one in asked]
    codes = sorted(answer.json()["error"]["code"] for answer in answers)
    assert set(codes) == {"history_busy", "too_slow"} and codes.count("history_busy") >= 6
    busy = next(answer for answer in answers if answer.status == 429)
    assert busy.headers["retry-after"] == "1"
    assert site.ask("/overview")["instances"]


def test_a_client_that_goes_away_has_its_question_cancelled(site: Site):
    address = urlsplit(site.url)
    body = json.dumps({"question": SLOW, "within_s": 25}).encode()
    for _ in range(4):  # more than there are processes
        with socket.create_connection((str(address.hostname), address.port or 0), timeout=WAIT_S) as gone:
            gone.sendall(
                b"POST /v1/history/sql HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: %d\r\n\r\n" % len(body) + body
            )
            assert site.refused("/overview", at="nonsense")[0] in (422, 429)  # it was read by now
    eventually(lambda: site.sql("SELECT 1").status == 200, "a process is free")


def test_arrow_for_notebooks(site: Site):
    pyarrow, pandas, polars = needed("pyarrow", "sql"), needed("pandas", "dev"), needed("polars", "dev")
    question = "SELECT tier, count(*) AS blocks FROM residencies GROUP BY tier ORDER BY tier"
    answer = site.sql(question, ARROW)
    assert answer.headers["content-type"] == ARROW["accept"]
    assert (answer.headers["kvbm-history-holes"], answer.headers["kvbm-history-until"]) == ("0", site.ask("")["until"])
    table = pyarrow.ipc.open_stream(answer.data).read_all()
    assert table.to_pydict() == {"tier": ["HBM", "HOST"], "blocks": [4, 2]}
    frame = table.to_pandas()
    assert isinstance(frame, pandas.DataFrame) and frame.set_index("tier")["blocks"].to_dict() == {"HBM": 4, "HOST": 2}
    assert polars.read_ipc_stream(io.BytesIO(answer.data)).rows() == [("HBM", 4), ("HOST", 2)]
    empty = pyarrow.ipc.open_stream(site.sql("SELECT block, began FROM residencies WHERE false", ARROW).data).read_all()
    assert empty.num_rows == 0 and empty.column_names == ["block", "began"]
    large = pyarrow.ipc.open_stream(site.sql("SELECT range FROM range(3000000)", ARROW).data).read_all()
    assert large.num_rows == 3_000_000 and large.column("range")[-1].as_py() == 2_999_999
    assert site.sql("SELECT nothing", ARROW).json()["error"]["code"] == "bad_question"


def test_a_catalog_without_a_history_says_so(tmp_path: Path, nats_url: str, cluster: str, sqlite_url: str):
    settings = ServiceSettings(
        nats_url=nats_url, database_url=sqlite_url, cluster=cluster, listen="127.0.0.1:0", connect_s=WAIT_S
    )
    with CatalogThread(settings, NATIVE, NATIVE_INDEX) as thread:
        for path in ("", "/overview"):
            answer = urllib3.request("GET", f"{thread.url}/v1/history{path}", timeout=WAIT_S)
            assert (answer.status, answer.json()["error"]["code"]) == (404, "history_off")


def test_settings_that_contradict_each_other_are_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"set catalog\.archive"):
        history_options(load_settings(flags={"catalog.history": str(tmp_path)}))
    for history in (tmp_path, tmp_path / "archive", tmp_path / "archive" / "history"):
        with pytest.raises(ConfigError, match="lie in each other"):
            history_options(
                load_settings(flags={"catalog.history": str(history), "catalog.archive": str(tmp_path / "archive")})
            )
    assert history_options(load_settings(flags={})) is None


def test_operators_alone_may_ask(tmp_path: Path, nats_url: str, cluster: str):
    access = tmp_path / "access.toml"
    tokens = {role: add_token(access, NewToken(role, role=role), time.time()) for role in ("operator", "router")}
    settings = settings_of(tmp_path, nats_url, cluster)
    settings = type(settings)(
        **{name: getattr(settings, name) for name in settings.__struct_fields__}
        | {"access": AccessOptions(file=str(access))}
    )
    with CatalogThread(settings, NATIVE, NATIVE_INDEX) as thread:

        def status(path: str, token: str | None, method: str = "GET") -> int:
            headers = {} if token is None else {"authorization": f"Bearer {token}"}
            return urllib3.request(
                method, thread.url + path, headers=headers, body=b"{}" if method == "POST" else None, timeout=WAIT_S
            ).status

        assert status("/v1/history", tokens["operator"]) == 200
        for path, method in (
            ("/v1/history", "GET"),
            ("/v1/history/overview", "GET"),
            ("/v1/history/block/00000000", "GET"),
            ("/v1/history/sql", "POST"),
            ("/v1/history/prompt", "POST"),
            ("/v1/history/route", "POST"),
        ):
            assert status(path, tokens["router"], method) == 403
            assert status(path, None, method) == 401


@pytest.mark.nightly
def test_it_goes_on_over_a_killed_keeper_a_restart_and_damage(tmp_path: Path, nats_url: str, cluster: str):
    settings = settings_of(tmp_path, nats_url, cluster)
    one = Instance(nats_url, cluster, "one")

    def opened(thread: CatalogThread) -> Site:
        return Site(thread.url, settings, thread, tmp_path / "archive", tmp_path / "history", [])

    with CatalogThread(settings, NATIVE, NATIVE_INDEX) as thread:
        assert opened(thread).sql("SELECT 1").json()["error"]["code"] == "history_building"
        one.create(0, 2)
        one.publish()
        opened(thread).catch_up(one)
        (keeper,) = children_with("kvbm.assembly.history", tmp_path)
        os.kill(keeper, signal.SIGKILL)
        one.create(2, 4)
        one.publish()
        opened(thread).catch_up(one)
        data = read_manifest(tmp_path / "history").data
    assert children_with("kvbm", tmp_path) == []
    with CatalogThread(settings, NATIVE, NATIVE_INDEX) as thread:
        one.create(4, 6)
        one.publish()
        opened(thread).catch_up(one)
        assert read_manifest(tmp_path / "history").data == data  # it went on
    history = read_manifest(tmp_path / "history")
    for file in history.tail.stays:
        path = tmp_path / "history" / data / file.name
        path.write_bytes(b"x" * file.bytes)
    with CatalogThread(settings, NATIVE, NATIVE_INDEX) as thread:
        one.create(6, 8)
        one.publish()
        opened(thread).catch_up(one)
        assert opened(thread).rows("SELECT count(*) FROM residencies WHERE tier = 'HBM'") == [[8]]
        assert any("made anew" in note for note in opened(thread).ask("")["notes"])


@pytest.mark.nightly
def test_a_hole_is_told_with_what_it_touches(tmp_path: Path, nats_url: str, cluster: str):
    settings = settings_of(tmp_path, nats_url, cluster)
    with CatalogThread(settings, NATIVE, NATIVE_INDEX) as thread:
        site = Site(thread.url, settings, thread, tmp_path / "archive", tmp_path / "history", [])
        one, two = Instance(nats_url, cluster, "one"), Instance(nats_url, cluster, "two")
        two.create(0, 1)
        two.publish()
        one.publish()
        before = now()
        one.create(0, 2)
        one.publish(lose=True)
        during = now()
        one.create(2, 4)
        one.publish()
        site.catch_up(one)
        (hole,) = site.ask("")["holes"]
        assert (hole["instance"], hole["epoch"], hole["events"]) == ("one", 1, 1)
        assert hole["since"] < before < during < hole["until"]
        assert site.ask("/overview", at=during)["holes"] == [hole]
        assert site.ask("/overview")["holes"] == []
        assert site.ask(f"/block/{HASHES[32:48].hex()}")["holes"] == [hole]
        assert site.ask(f"/block/{BLOCK}")["holes"] == []  # two has it alone
        assert site.ask("/changes", **{"from": before})["holes"] == [hole]
        assert site.ask("/instances/two")["holes"] == []
        assert site.sql("SELECT 1").json()["holes"] == [hole]
        assert OTHER.tenant == "acme"


def children_with(words: str, folder: Path) -> list[int]:
    """Processes of a folder's history."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().decode(errors="replace")
        except OSError:
            continue
        if words in command and str(folder) in command and int(path.parent.name) != os.getpid():
            found.append(int(path.parent.name))
    return found


def test_the_beginning_of_a_hash_is_asked_for_on_the_command_line(
    tmp_path: Path, nats_url: str, capsys: pytest.CaptureFixture[str]
):
    with opened_site(tmp_path, nats_url) as site:
        check_who(site, nats_url, capsys)


def check_who(site: Site, nats_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody holds the block any more, then another instance does."""
    capsys.readouterr()
    assert catalog_main(["who", "--url", site.url, BLOCK[:8]]) == 0
    assert capsys.readouterr().out == f"nobody holds a block whose hash begins with {BLOCK[:8]}\n"
    assert catalog_main(["who", "--url", site.url, "0" * 8]) == 2
    assert "00000000" in capsys.readouterr().err
    other = Instance(nats_url, site.settings.cluster, "gpu-1")
    other.create(0, 4)
    other.publish()
    with CatalogClient(site.url, WAIT_S) as client:

        def is_held() -> bool:
            other.beat()
            return bool(client.block(SPACE, HASHES[:16]).holders)

        eventually(is_held, "the catalog names nobody who holds it")
    for words in ((BLOCK[:8],), (BLOCK[:12].upper(), "--namespace", SPACE.model)):
        assert catalog_main(["who", "--url", site.url, *words]) == 0
        out = capsys.readouterr().out
        assert f"hash {BLOCK}" in out and "gpu-1" in out.split() and "HBM" in out.split()
