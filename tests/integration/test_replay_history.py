"""History files say at each moment what `state` says, and what happened to each block in between."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvbm.assembly import NATIVE, NATIVE_STAYS
from kvbm.cli import replay_main as main
from kvbm.core.events import (
    BlocksEvicted,
    Event,
    EvictReason,
    InstanceStarted,
    InstanceStopped,
    PoolStated,
    StopReason,
)
from kvbm.core.ids import Epoch, InstanceId, Namespace, Reach, Tier
from kvbm.files import alone
from kvbm.replay.format import At, parse_at, time_text
from kvbm.replay.history import write_history
from kvbm.replay.history_manifest import MANIFEST, VERSION, HistoryManifest, read_manifest
from kvbm.replay.opening import open_source
from kvbm.replay.order import FrameOrdering, LifeBegins, Next, StreamKey
from kvbm.replay.questions import BlockLife, changes, tenants, why
from kvbm.replay.source import FileSource, SourceError, SourceFile
from kvbm.replay.sql import HistoryDatabase, SlowQuestionError
from kvbm.streams.base import Fence
from tests.both_folds import states_at
from tests.captures import BEGIN_NS, SECOND_NS, make_capture, packed
from tests.extras import needed
from tests.small_histories import (
    ACME,
    BEGIN,
    LOG,
    ONE,
    START,
    THREE,
    TWO,
    created,
    cut_at,
    frames_of,
    hash_of,
    made,
    migrated,
)


@pytest.fixture
def history(tmp_path: Path) -> Iterator[HistoryDatabase]:
    made(tmp_path, frames_of(LOG))
    with HistoryDatabase(tmp_path / "history") as opened:
        yield opened


@pytest.mark.parametrize("seed", range(4))
def test_each_moment_is_what_state_says_of_it(tmp_path: Path, seed: int):
    frames = make_capture(100 + seed, commands=150).frames()
    made(tmp_path, frames)
    with HistoryDatabase(tmp_path / "history") as opened:
        for number, frame in enumerate(frames):
            moment = BEGIN + timedelta(seconds=number, microseconds=1)
            rows = opened.ask("SELECT tier, block, namespace, slot FROM residencies_at(?)", [moment]).rows
            at = At(time_us=frame.wall_time_ns // 1000)
            (state,) = states_at(open_source(str(tmp_path / "capture.kvbm")), at, with_blocks=True).instances
            held = [(t.tier, one.hash, one.namespace, one.slot) for t in state.tiers for one in t.blocks or ()]
            assert sorted(rows, key=str) == sorted(held, key=str), number


def test_the_readable_specification_writes_the_same(tmp_path: Path):
    frames = [*make_capture(7, commands=150).frames(), *frames_of(LOG, "two")]
    rows = []
    for is_readable in (False, True):
        folder = tmp_path / str(is_readable)
        folder.mkdir()
        made(folder, frames, is_readable)
        with HistoryDatabase(folder / "history") as opened:
            rows.append({name: opened.ask(f"FROM {name} ORDER BY ALL").rows for name in ("history", "events")})
    assert rows[0] == rows[1]


def life(history: HistoryDatabase, digits: str) -> BlockLife:
    (found,) = why(history, digits).blocks
    return found


def test_why_tells_a_life_event_by_event(history: HistoryDatabase):
    lines = list(life(history, ONE.hex()).lines())
    assert lines == [
        f"block {ONE.hex()} in namespace {ACME.id.hex()} (model m, tenant acme)",
        "  2026-01-01T00:00:01.000000Z  one e1+1  created in HBM, block 0 of its chain",
        "  2026-01-01T00:00:02.000000Z  one e1+2  copied from HBM to HOST (offload)",
        "  2026-01-01T00:00:03.000000Z  one e1+3  evicted from HBM: capacity",
        "  2026-01-01T00:00:04.000000Z  one e1+4  moved from HOST to NVME (offload)",
        "  2026-01-01T00:00:04.000000Z  one e1+5  put into the cluster's OBJECT, or found there (offload)",
        "  2026-01-01T00:00:06.000000Z  one e2+0  gone from NVME: the instance began anew",
        "  2026-01-01T00:00:07.000000Z  one e2+1  listed in NVME, as it is there",
        "  2026-01-01T00:00:08.000000Z  one e2+3  taken out of the cluster's OBJECT: ttl",
        "  held at the end of the log: one in NVME since 2026-01-01T00:00:07.000000Z",
        "  times are those of each instance's own clock",
    ]
    fetched = life(history, THREE.hex()[:8])
    assert [one.sentence() for one in fetched.events] == [
        "fetched into HOST from peer",
        "gone from HOST: the instance began anew",
    ]
    assert fetched.held == []


@pytest.mark.parametrize(
    ("digits", "words"),
    [("1111", "8 to 32"), ("x" * 32, "no hash"), ("1" * 33, "8 to 32"), ("44444444", "no event in")],
)
def test_a_hash_that_is_none_or_unknown_is_refused(history: HistoryDatabase, digits: str, words: str):
    with pytest.raises(SourceError, match=words):
        why(history, digits)


def test_changes_count_what_began_and_ended_in_a_stretch_of_time(history: HistoryDatabase):
    found = changes(history, BEGIN + timedelta(seconds=3), BEGIN + timedelta(seconds=7))
    told = {(one.tier, one.event, one.cause, one.blocks) for one in found.changes}
    assert told == {
        ("HBM", "ended", "capacity", 1),
        ("HBM", "ended", "restarted", 1),
        ("HOST", "began", "fetch", 1),
        ("HOST", "ended", "moved", 1),
        ("HOST", "ended", "restarted", 1),
        ("NVME", "began", "offload", 1),
        ("NVME", "ended", "restarted", 1),
        ("OBJECT", "claimed", "offload", 1),
    }
    assert found.starts == ["2026-01-01T00:00:06.000000Z  one began epoch 2"]
    late = changes(history, BEGIN + timedelta(seconds=9), BEGIN + timedelta(seconds=10))
    assert late.stops == ["2026-01-01T00:00:09.000000Z  one stopped epoch 2: shutdown"]
    assert list(changes(history, BEGIN - timedelta(days=1), BEGIN).lines())[1:] == ["  nothing changed"]


def test_changes_tell_who_fell_silent_in_the_order_of_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    killed = frames_of([[START], [created(Tier.HBM, THREE, [0])]], "killed")
    busy = frames_of([[START], *([created(Tier.HBM, hash_of(number), [number])] for number in range(5))], "busy")
    spread = [cut_at(frame, frame.wall_time_ns + number * 20 * SECOND_NS) for number, frame in enumerate(busy)]
    capture, folder = tmp_path / "capture.kvbm", str(tmp_path / "history")
    capture.write_bytes(packed([*frames_of(LOG), *killed, *spread]))
    assert main(["history", str(capture), folder]) == 0
    minute = "2026-01-01T00:00:"
    silent = f"  {minute}01.000000Z  killed: its last event in this log, which goes on to 2026-01-01T00:01:45.000000Z;"
    for source in (str(capture), folder):
        for narrowed, told in (([], 7), (["--instance", "killed"], 2)):
            capsys.readouterr()
            assert main(["changes", source, "--from", "00:00", "--to", "00:00:30", *narrowed]) == 0
            head, *lines = capsys.readouterr().out.splitlines()
            assert head == f"from {minute}00.000000Z to {minute}30.000000Z, by the clocks of the instances"
            events = [line for line in lines if minute in line]
            assert events == sorted(events, key=lambda line: line.split()[0]) and len(events) == told
            assert any(line.startswith(silent) and "it did not stop: it is gone, or had" in line for line in events)
    assert main(["changes", folder, "--from", "00:00", "--instance", "one"]) == 0
    said = capsys.readouterr().out
    assert (
        f"{minute}05.000000Z  one: the last event of epoch 1, which did not stop; epoch 2 began at {minute}06." in said
    )
    assert main(["changes", folder, "--from", "00:01", "--instance", "busy"]) == 0
    assert "its last event" not in capsys.readouterr().out  # the log ends with it
    assert main(["changes", folder, "--from", "00:00:02", "--to", "00:00:30", "--instance", "killed"]) == 0
    assert capsys.readouterr().out.endswith("  nothing changed\n")


def test_changes_of_one_block_are_told_event_by_event(history: HistoryDatabase):
    found = changes(history, BEGIN + timedelta(seconds=3), BEGIN + timedelta(seconds=5), digits=ONE.hex()[:8])
    of_one = f"block {ONE.hex()}: "
    assert [line.replace(of_one, "") for line in found.lines() if of_one in line] == [
        "  2026-01-01T00:00:03.000000Z  one e1+3  evicted from HBM: capacity",
        "  2026-01-01T00:00:04.000000Z  one e1+4  moved from HOST to NVME (offload)",
        "  2026-01-01T00:00:04.000000Z  one e1+5  put into the cluster's OBJECT, or found there (offload)",
    ]
    assert {(one.tier, one.event, one.blocks) for one in found.changes} == {
        ("HBM", "ended", 1),
        ("HOST", "ended", 1),
        ("NVME", "began", 1),
        ("OBJECT", "claimed", 1),
    }
    assert changes(history, BEGIN, BEGIN + timedelta(seconds=9), digits="44444444").changes == []
    with pytest.raises(SourceError, match="no hash"):
        changes(history, BEGIN, BEGIN + timedelta(seconds=9), digits="4")


def test_tenants_by_tier_with_bytes(history: HistoryDatabase):
    at_first = tenants(history, BEGIN + timedelta(seconds=2))
    assert [(one.tenant, one.tier, one.blocks, one.bytes) for one in at_first.tenants] == [
        ("acme", "HBM", 2, 2000),
        ("acme", "HOST", 1, 1000),
    ]
    assert [(one.tenant, one.tier, one.blocks, one.bytes) for one in tenants(history).tenants] == [
        ("acme", "NVME", 1, 1000)
    ]


def test_tenants_count_what_pools_of_the_cluster_have(history: HistoryDatabase):
    claimed = tenants(history, BEGIN + timedelta(seconds=5))
    assert [(one.tenant, one.tier, one.pool, one.blocks) for one in claimed.claims] == [
        ("acme", "OBJECT", "s3://bucket/kv", 1)
    ]
    (line,) = [line for line in claimed.lines() if "OBJECT" in line]
    assert line.split() == ["acme", "OBJECT", "1", "blocks", "claimed", "in", "s3://bucket/kv", "of", "the", "cluster"]
    assert tenants(history).claims == []  # it was taken out


def test_the_page_lists_the_columns_that_there_are(history: HistoryDatabase):
    page = (Path(__file__).parents[2] / "docs" / "replay.md").read_text()
    rows = [line.split("|")[1::2] for line in page.partition("| name | a row is | columns |")[2].splitlines()[2:11]]
    listed: dict[str, list[str]] = {}
    for names, columns in rows:
        listed[names.split("`")[1]] = columns.split("`")[1::2]
    listed["history"] = listed["residencies"] + listed["history"][1:]
    assert len(listed) == 9
    for name, columns in listed.items():
        described = history.ask(f"SELECT column_name FROM (DESCRIBE {name})").rows
        assert sorted(columns) == sorted(row[0] for row in described), name


def test_tenants_say_whose_blocks_count_though_the_instance_may_be_gone(tmp_path: Path):
    stopping = [[START], [created(Tier.HBM, ONE + TWO, [0, 1])], [InstanceStopped(reason=StopReason.SHUTDOWN)]]
    killed = [[START], [created(Tier.HBM, THREE, [0])]]
    busy = [[START], *([created(Tier.HBM, hash_of(number), [number])] for number in range(8))]
    late = [*frames_of(busy, "busy")]
    frames = [*frames_of(stopping, "stopped"), *frames_of(killed, "killed")]
    later = [
        msgspec.structs.replace(frame, wall_time_ns=frame.wall_time_ns + number * 20 * SECOND_NS)
        for number, frame in enumerate(late)
    ]
    made(tmp_path, [*frames, *later])
    with HistoryDatabase(tmp_path / "history") as opened:
        second = "2026-01-01T00:00:0"
        assert [line.strip() for line in tenants(opened).lines()][2:] == [
            f"1 block of these is of killed, last heard at {second}1.000000Z; if it was killed, catalogs leave it out",
            f"2 blocks of these are of stopped, which stopped at {second}2.000000Z (shutdown); catalogs leave it out",
        ]
        assert tenants(opened, BEGIN + timedelta(seconds=1)).unheard == []
        empty = tenants(opened, BEGIN)
        assert list(empty.lines()) == ["nothing was held at 2026-01-01T00:00:00.000000Z"]


def test_a_claim_counts_until_it_is_given_up(history: HistoryDatabase):
    for seconds, count in ((3, 0), (4, 1), (7, 1), (8, 0)):
        moment = BEGIN + timedelta(seconds=seconds)
        assert history.ask("SELECT count(*) FROM claimed_objects_at(?)", [moment]).rows == [(count,)], seconds


def test_a_hole_is_told_where_it_matters(tmp_path: Path):
    frames = frames_of(LOG[:6])
    del frames[3]  # the eviction
    report = made(tmp_path, frames)
    assert report.holes == 1
    with HistoryDatabase(tmp_path / "history") as opened:
        found = life(opened, ONE.hex())
        (hole,) = found.unknown
        assert (hole.instance, hole.events) == ("one", 1)
        assert (hole.since, hole.until) == ("2026-01-01T00:00:02.000000Z", "2026-01-01T00:00:04.000000Z")
        assert any("1 event of one are missing" in line for line in found.lines())
        moment = BEGIN + timedelta(seconds=3)
        assert [one.events for one in changes(opened, moment, moment + timedelta(minutes=1)).holes] == [1]
        assert [one.events for one in tenants(opened, moment).holes] == [1]
        assert "1 event missing" in [*tenants(opened, moment).lines()][-1]
        assert tenants(opened, moment + timedelta(seconds=1)).holes == []


@pytest.mark.parametrize(
    ("question", "words"),
    [
        ("SELECT FROM", "syntax"),
        ("SELECT * FROM nothing", "nothing"),
        ("SELECT 1; SELECT 2", "one question"),
        ("COPY (SELECT 1) TO 'x.csv'", "one question"),
        ("EXPLAIN ANALYZE COPY (SELECT 1) TO 'x.csv'", "one question"),
        ("CREATE TABLE x AS SELECT 1", "one question"),
        ("SET memory_limit = '100GB'", "one question"),
        ("ATTACH 'x.db'", "one question"),
        ("", "one question"),
        ("SELECT * FROM read_csv('/etc/hostname')", "disabled"),
        ("SELECT * FROM read_text('/etc/hostname')", "disabled"),
        ("SELECT getenv('HOME')", "getenv"),
    ],
)
def test_a_question_that_does_more_than_read_the_history_is_refused(
    history: HistoryDatabase, question: str, words: str
):
    with pytest.raises(SourceError, match=f"(?i){words}"):
        history.ask(question)
    assert history.ask("SELECT 1").rows == [(1,)]


def test_a_question_too_large_or_too_long_is_given_up(tmp_path: Path):
    made(tmp_path, frames_of(LOG))
    with HistoryDatabase(tmp_path / "history", memory_bytes=64 << 20) as opened:
        with pytest.raises(SourceError, match="memory"):
            opened.ask("SELECT list(a.range || 'x') FROM range(100000) a, range(1000) b")
        with pytest.raises(SourceError, match="longer than"):
            opened.ask(
                "SELECT count(*) FROM range(1000000000000) WHERE range % 7 = 3",
                timeout_s=0.3,
            )
        assert opened.ask("SELECT count(*) FROM residencies").rows == [(1,)]


def test_what_befalls_a_question_while_its_rows_are_read_is_told_as_what_it_is(
    history: HistoryDatabase, tmp_path: Path
):
    def drain(reader: Any) -> None:
        for _ in reader:
            pass

    def leave(reader: Any) -> None:
        next(reader)
        raise BrokenPipeError

    with pytest.raises(SlowQuestionError):
        history.arrow("SELECT range FROM range(1000000000000)", drain, 0.3)
    late = "SELECT CAST(CASE WHEN range = 900000 THEN 'x' ELSE '1' END AS INTEGER) AS n FROM range(1000000)"
    with pytest.raises(SourceError, match=r"(?i)convert") as error:
        history.arrow(late, drain)
    assert type(error.value) is SourceError
    with pytest.raises(BrokenPipeError):
        history.arrow("SELECT range FROM range(1000000000000)", leave)
    with pytest.raises(SourceError, match='"interrupted"'):
        history.ask("SELECT interrupted")
    assert history.ask("SELECT 1").rows == [(1,)]
    rows = tmp_path / "rows.arrow"
    assert main(["sql", str(tmp_path / "history"), late, "--arrow", str(rows)]) == 2
    assert not rows.exists()
    history.close()
    history.cancel()  # nothing is left to end


def test_a_folder_of_something_else_stays_and_an_older_history_is_replaced(tmp_path: Path):
    made(tmp_path, frames_of(LOG[:2]))
    made(tmp_path, frames_of(LOG))
    assert read_manifest(tmp_path / "history").until == time_text(BEGIN_NS + 9 * SECOND_NS)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["capture.kvbm", "history"]
    other = tmp_path / "other"
    other.mkdir()
    (other / "precious").write_text("x")
    with pytest.raises(SourceError, match="something else"):
        write_history(open_source(str(tmp_path / "capture.kvbm")), other, NATIVE, NATIVE_STAYS)
    assert (other / "precious").read_text() == "x"


def test_a_history_that_is_damaged_or_newer_is_refused(tmp_path: Path):
    made(tmp_path, frames_of(LOG))
    folder = tmp_path / "history"
    manifest = json.loads((folder / MANIFEST).read_bytes())
    (folder / MANIFEST).write_text(json.dumps(manifest | {"version": VERSION + 1, "source": 7}))
    with pytest.raises(SourceError, match="newer kvbm"):
        HistoryDatabase(folder)
    (folder / MANIFEST).write_text("{")
    with pytest.raises(SourceError, match="anew"):
        HistoryDatabase(folder)
    (folder / MANIFEST).unlink()
    with pytest.raises(SourceError, match="kvbm-replay history"):
        HistoryDatabase(folder)


def test_an_empty_log_has_an_empty_history(tmp_path: Path):
    made(tmp_path, frames_of([[START]]))
    with HistoryDatabase(tmp_path / "history") as opened:
        assert opened.ask("SELECT count(*) FROM history").rows == [(0,)]
        assert opened.ask("SELECT engine, version FROM instances").rows == [("bench", "9")]
        assert tenants(opened).tenants == []


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    capture, folder = tmp_path / "capture.kvbm", str(tmp_path / "history")
    capture.write_bytes(packed(frames_of(LOG)))
    assert main(["history", str(capture), folder]) == 0
    assert "history: 8 stays of blocks, 1 of which last, in 2 epochs of instances, 0 holes" in capsys.readouterr().out
    for source in (str(capture), folder):
        assert main(["why", ONE.hex()[:8], source]) == 0
        assert "one e1+3  evicted from HBM: capacity" in capsys.readouterr().out
        assert main(["changes", source, "--from", "00:00:03", "--to", "2026-01-01T00:00:04Z"]) == 0
        assert "HBM    ended capacity" in capsys.readouterr().out
        assert main(["tenants", source, "--at", "00:00:02", "--json"]) == 0
        assert [one["tier"] for one in json.loads(capsys.readouterr().out)["tenants"]] == ["HBM", "HOST"]
        assert main(["sql", source, "SELECT tier, count(*) AS blocks FROM residencies GROUP BY ALL"]) == 0
        assert capsys.readouterr().out == "tier  blocks\nNVME       1\n"
        assert main(["sql", source, "SELECT block FROM residencies", "--csv"]) == 0
        assert capsys.readouterr().out == f"block\n{ONE.hex()}\n"
        assert main(["sql", source, "SELECT began FROM residencies", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["rows"] == [["2026-01-01T00:00:07.000000Z"]]
    assert main(["changes", folder, "--from", "00:00:05", "--to", "2026-01-01T00:00:05Z"]) == 2
    assert "does not lie before" in capsys.readouterr().err
    assert main(["tenants", folder, "--at", "e1+5"]) == 2
    assert "offsets are of one instance" in capsys.readouterr().err


def test_arrow_is_what_notebooks_read(tmp_path: Path):
    pyarrow = needed("pyarrow", "sql")

    capture, rows = tmp_path / "capture.kvbm", tmp_path / "rows.arrow"
    capture.write_bytes(packed(frames_of(LOG)))
    question = "SELECT time, event, block FROM events ORDER BY ALL"
    assert main(["sql", str(capture), question, "--arrow", str(rows)]) == 0
    with pyarrow.ipc.open_stream(rows.read_bytes()) as stream:
        table = stream.read_all()
    assert table.column_names == ["time", "event", "block"]
    assert table.num_rows == 13
    assert table["time"][0].as_py() == BEGIN + timedelta(seconds=1)


def test_a_time_of_day_up_to_which_is_the_first_one_after_that_from_which(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    capture, folder = tmp_path / "capture.kvbm", str(tmp_path / "history")
    dead = frames_of([LOG[0], LOG[1]], "dead")  # nothing is heard of it after the second second
    capture.write_bytes(packed([*frames_of(LOG), *dead]))
    assert main(["history", str(capture), folder]) == 0
    for source in (str(capture), folder):
        for narrowed in ([], ["--instance", "dead"]):
            for words, begin, end in (
                (["--from", "00:00:05", "--to", "00:00:30"], "2026-01-01T00:00:05", "2026-01-01T00:00:30"),
                (["--from", "00:00:05", "--to", "00:00:05"], "2026-01-01T00:00:05", "2026-01-02T00:00:05"),
                (["--from", "23:59", "--to", "00:00:03"], "2025-12-31T23:59:00", "2026-01-01T00:00:03"),
                (["--from", "00:00:05"], "2026-01-01T00:00:05", "2026-01-01T00:00:09.000001"),
            ):
                capsys.readouterr()
                assert main(["changes", source, *words, *narrowed, "--json"]) == 0, (source, words, narrowed)
                found = json.loads(capsys.readouterr().out)
                assert found["since"].startswith(begin) and found["until"].startswith(end), (words, narrowed)
    assert main(["state", str(capture), "--at", "00:00:05", "--instance", "dead"]) == 0  # and not of the day before
    assert "before offset 2, last frame 2026-01-01T00:00:01" in capsys.readouterr().out


def test_a_time_of_day_is_the_last_one_of_the_log(tmp_path: Path):
    assert parse_at("00:00:03").on_last_day(BEGIN_NS // 1000 + 9_000_000).time_us == BEGIN_NS // 1000 + 3_000_000


# -- what was found by those who tried to break it ---------------------------------------------------------------------


def test_what_moves_where_it_is_already_or_into_an_object_is_told_to_have_left(tmp_path: Path):
    steps: list[list[Event]] = [
        [START],
        [created(Tier.HBM, ONE + TWO, [0, 1])],
        [migrated(Tier.HBM, Tier.OBJECT, ONE, [], kept=False)],
        [migrated(Tier.HBM, Tier.HOST, TWO, [0])],
        [migrated(Tier.HBM, Tier.HOST, TWO, [0], kept=False)],
    ]
    made(tmp_path, frames_of(steps))
    with HistoryDatabase(tmp_path / "history") as opened:
        said = [[one.sentence() for one in life(opened, block.hex()).events] for block in (ONE, TWO)]
    assert said[0][1:] == [
        "put into the cluster's OBJECT, or found there (offload)",
        "moved away from HBM to OBJECT",
    ]
    assert said[1][1:] == ["copied from HBM to HOST (offload)", "moved away from HBM to HOST"]


def test_two_streams_of_one_name_are_told_apart(tmp_path: Path):
    files = []
    for number, block_bytes in enumerate((64, 128)):
        start = InstanceStarted(epoch=Epoch(1), pools=(PoolStated(Tier.HBM, 8, block_bytes),), namespaces=(ACME,))
        path = tmp_path / f"{number}.kvbm"
        path.write_bytes(packed(frames_of([[start], [created(Tier.HBM, ONE, [0])]])))
        files.append(SourceFile(path, f"group-{number}", may_tear=False))
    write_history(FileSource("two", files, is_trimmed=False), tmp_path / "history", NATIVE, NATIVE_STAYS)
    with HistoryDatabase(tmp_path / "history") as opened:
        assert [(one.blocks, one.bytes, one.instances) for one in tenants(opened).tenants] == [(2, 192, 2)]
        said = "\n".join(life(opened, ONE.hex()).lines())
    assert "one (group-0) e1+1  created" in said
    assert "one (group-1) in HBM since" in said


def test_claims_follow_epochs_and_belong_to_their_pool(tmp_path: Path):
    def claim(tier_pool: str, epoch: int) -> InstanceStarted:
        pool = PoolStated(Tier.OBJECT, 0, 64, Reach.CLUSTER, tier_pool)
        return InstanceStarted(epoch=Epoch(epoch), pools=(PoolStated(Tier.HBM, 8, 64), pool), namespaces=(ACME,))

    put = migrated(Tier.HBM, Tier.OBJECT, ONE, [])
    gone = BlocksEvicted(namespace=ACME.id, tier=Tier.OBJECT, reason=EvictReason.TTL, hashes=ONE)
    one = frames_of([[claim("s3://a", 1)], [created(Tier.HBM, ONE, [0]), put], [gone], [claim("s3://a", 2), put]])
    one = [cut_at(frame, BEGIN_NS) for frame in one]
    other = frames_of([[claim("s3://b", 1)], [put], [gone]], "other")
    made(tmp_path, [*one, *other])
    with HistoryDatabase(tmp_path / "history") as opened:
        assert opened.ask("SELECT pool, block, claimed_by FROM claimed_objects").rows == [("s3://a", ONE.hex(), "one")]


def test_a_life_that_took_anothers_place_ends_what_that_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    frames = frames_of([[START], [created(Tier.HBM, ONE, [0])]]) + frames_of([[START], [created(Tier.HBM, TWO, [0])]])
    later = [cut_at(frame, BEGIN_NS + (number + 5) * SECOND_NS) for number, frame in enumerate(frames[2:])]
    capture = tmp_path / "capture.kvbm"
    capture.write_bytes(packed([*frames[:2], *later]))
    source = open_source(str(capture))

    def with_another_life(_: FrameOrdering, read: Any) -> Iterator[Any]:
        key = StreamKey("", InstanceId("one"))
        for number, located in enumerate(read):
            if number == 2:
                yield key, LifeBegins(located, Fence(Epoch(1), "run", 1), Epoch(1))
            yield key, Next(located, located.found)

    monkeypatch.setattr(FrameOrdering, "steps", with_another_life)
    write_history(source, tmp_path / "history", NATIVE, NATIVE_STAYS)
    with HistoryDatabase(tmp_path / "history") as opened:
        for seconds, held in ((4, [(ONE.hex(), 0)]), (5, []), (6, [(TWO.hex(), 1)])):
            moment = BEGIN + timedelta(seconds=seconds)
            assert opened.ask("SELECT block, life FROM residencies_at(?)", [moment]).rows == held, seconds
        assert tenants(opened).tenants[0].bytes == 1000


def test_a_clock_that_goes_back_is_noted_and_the_order_of_the_log_stays(tmp_path: Path):
    frames = frames_of(LOG[:4])
    frames[3] = cut_at(frames[3], BEGIN_NS)
    report = made(tmp_path, frames)
    assert any("ended before they began" in note for note in report.notes)
    with HistoryDatabase(tmp_path / "history") as opened:
        assert [one.sentence() for one in life(opened, ONE.hex()).events][-1] == "evicted from HBM: capacity"


def test_many_namespaces_and_instances_take_little_room(tmp_path: Path):
    spaces = [Namespace(model=f"m{number}", block_tokens=16) for number in range(4096)]
    steps: list[list[Event]] = [[START]]
    steps += [[created(Tier.HOST, hash_of(number), [], space)] for number, space in enumerate(spaces)]
    frames = [*frames_of(steps)]
    for number in range(100):
        frames += frames_of([[START], [created(Tier.HBM, hash_of(5000 + number), [0])]], f"instance-{number}")
    report = made(tmp_path, frames)
    assert report.stays == 4196
    assert report.bytes < 1 << 20


def test_an_older_history_is_read_on_while_a_newer_one_takes_its_place(tmp_path: Path):
    made(tmp_path, frames_of(LOG[:2]))
    with HistoryDatabase(tmp_path / "history") as older:
        made(tmp_path, frames_of(LOG))
        assert older.ask("SELECT count(*) FROM history").rows == [(2,)]
        with HistoryDatabase(tmp_path / "history") as newer:
            assert newer.ask("SELECT count(*) FROM history").rows == [(8,)]
        made(tmp_path, frames_of(LOG))
        assert older.ask("SELECT count(*) FROM history").rows == [(2,)]
    for _ in range(3):
        source = open_source(str(tmp_path / "capture.kvbm"))
        write_history(source, tmp_path / "history", NATIVE, NATIVE_STAYS, anew=True)
    assert len(list((tmp_path / "history").iterdir())) == 3  # the manifest, this one and the one before


def test_several_at_once_into_one_folder_leave_a_whole_one(tmp_path: Path):
    (tmp_path / "capture.kvbm").write_bytes(packed(frames_of(LOG)))

    def write() -> HistoryManifest:
        source = open_source(str(tmp_path / "capture.kvbm"))
        return write_history(source, tmp_path / "history", NATIVE, NATIVE_STAYS)

    with ThreadPoolExecutor(4) as threads:
        for one in [threads.submit(write) for _ in range(8)]:
            assert one.result(timeout=60).stays == 8
    with HistoryDatabase(tmp_path / "history") as opened:
        assert opened.ask("SELECT count(*) FROM history").rows == [(8,)]


def test_files_of_others_beside_a_history_stay(tmp_path: Path):
    made(tmp_path, frames_of(LOG))
    (tmp_path / "history" / "notes.txt").write_text("x")
    made(tmp_path, frames_of(LOG))
    made(tmp_path, frames_of(LOG))
    assert (tmp_path / "history" / "notes.txt").read_text() == "x"


@pytest.mark.parametrize("name", ["a[1]", "a*b", "a?c"])
def test_a_folder_whose_name_would_stand_for_others_is_refused(tmp_path: Path, name: str):
    (tmp_path / name).mkdir()
    made(tmp_path / name, frames_of(LOG))
    with pytest.raises(SourceError, match="another name"):
        HistoryDatabase(tmp_path / name / "history")


@pytest.mark.parametrize("name", ["it's", "two words", "ünï %41", "{x}", '"', "a\\b"])
def test_a_folder_may_have_any_other_name(tmp_path: Path, name: str):
    (tmp_path / name).mkdir()
    made(tmp_path / name, frames_of(LOG))
    with HistoryDatabase(tmp_path / name / "history") as opened:
        assert opened.ask("SELECT count(*) FROM history").rows == [(8,)]


def test_a_link_to_a_folder_stays_a_link(tmp_path: Path):
    (tmp_path / "real").mkdir()
    (tmp_path / "history").symlink_to(tmp_path / "real")
    for _ in range(3):
        made(tmp_path, frames_of(LOG))
    assert (tmp_path / "history").is_symlink()
    assert read_manifest(tmp_path / "real").stays == 8


def test_a_damaged_file_of_a_history_is_one_sentence(tmp_path: Path):
    made(tmp_path, frames_of(LOG))
    (file,) = (tmp_path / "history").glob("data-*/*-stays-00000.parquet")
    whole = file.read_bytes()
    for damaged in (whole[:100], b"x" * len(whole)):
        file.write_bytes(damaged)
        with pytest.raises(SourceError, match="make the history anew"):
            HistoryDatabase(tmp_path / "history")
    file.unlink()
    with pytest.raises(SourceError, match="make the history anew"):
        HistoryDatabase(tmp_path / "history")


@pytest.mark.parametrize("kind", ["stays-00000.parquet", "counts.parquet", "namespaces.parquet", "state.bin"])
def test_a_damaged_history_does_not_go_on_but_is_made_anew(tmp_path: Path, kind: str):
    made(tmp_path, frames_of(LOG[:6]))
    (file,) = (tmp_path / "history").glob(f"data-*/1-{kind}")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    report = made(tmp_path, frames_of(LOG))
    assert [note for note in report.notes if "made anew" in note and "is damaged" in note]
    with HistoryDatabase(tmp_path / "history") as opened:
        assert opened.ask("SELECT count(*) FROM history").rows == [(8,)]
    assert made(tmp_path, frames_of(LOG)).notes == report.notes  # it goes on from there


def test_a_log_that_is_not_what_was_read_has_its_history_made_anew(tmp_path: Path):
    made(tmp_path, frames_of(LOG))
    report = made(tmp_path, frames_of(LOG[:4], "another"))
    assert any("is not what it was" in note for note in report.notes)
    with HistoryDatabase(tmp_path / "history") as opened:
        assert opened.ask("SELECT DISTINCT instance FROM history").rows == [("another",)]


def test_what_a_killed_writer_has_left_goes_with_the_next_writing(tmp_path: Path):
    made(tmp_path, frames_of(LOG[:5]))
    history = tmp_path / "history"
    (data,) = history.glob("data-*")
    (data / "2-stays-00000.parquet").write_text("half")
    (data / ".spill-07").write_text("half")
    (history / "data-killed").mkdir()
    (history / "data-killed" / "1-stays-00000.parquet").write_text("half")
    with HistoryDatabase(history) as opened:
        assert opened.ask("SELECT count(*) FROM history").rows == [(5,)]
    report = made(tmp_path, frames_of(LOG))
    kept = {file.name for file in report.files()} | {name for one in report.retired for name in one.names}
    assert {path.name for path in data.iterdir()} <= kept
    assert sorted(path.name for path in history.iterdir()) == [data.name, MANIFEST]


def test_a_manifest_that_a_killed_writer_was_putting_in_its_place_is_in_nobodys_way(tmp_path: Path):
    folder = tmp_path / "history"
    folder.mkdir()
    (folder / ".history.json.7.ab").write_text("{")
    made(tmp_path, frames_of(LOG))
    assert sorted(path.name for path in folder.iterdir()) == [read_manifest(folder).data, "history.json"]


def test_many_writings_leave_few_runs_and_no_old_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kvbm.replay.history.KEEP_RETIRED_S", 0.0)
    frames = make_capture(3, commands=200).frames()
    for end in range(1, len(frames) + 1, max(1, len(frames) // 12)):
        made(tmp_path, frames[:end])
    report = made(tmp_path, frames)
    assert len(report.runs) <= 6
    (data,) = (tmp_path / "history").glob("data-*")
    last = {name for one in report.retired for name in one.names}
    assert {path.name for path in data.iterdir()} <= {file.name for file in report.files()} | last


def test_a_history_that_another_process_writes_is_left_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    made(tmp_path, frames_of(LOG))
    monkeypatch.setattr("kvbm.files.LOCK_WAIT_S", 0.05)
    with alone(tmp_path / "history"), pytest.raises(SourceError, match="another process"):
        made(tmp_path, frames_of(LOG))


def test_a_start_of_any_sizes_is_taken(tmp_path: Path):
    pools = (PoolStated(Tier.HBM, -5, 2**64 - 1), PoolStated(Tier.HBM, 3, 3), PoolStated(Tier.HOST, 2**63, 1))
    start = InstanceStarted(epoch=Epoch(1), pools=pools, namespaces=(Namespace(model="m", block_tokens=2**64 - 1),))
    assert made(tmp_path, frames_of([[start], [created(Tier.HOST, ONE, [])]])).stays == 1
    with HistoryDatabase(tmp_path / "history") as opened:
        assert [one.bytes for one in tenants(opened).tenants] == [1]


def test_large_answers_are_bounded_in_words_and_handed_on_in_pieces(
    history: HistoryDatabase, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SourceError, match="more than 100,000 rows"):
        history.ask("SELECT range FROM range(100001)")
    assert main(["sql", str(tmp_path / "history"), "SELECT range FROM range(250000)", "--csv"]) == 0
    assert capsys.readouterr().out.count("\n") == 250_001


def test_bad_arguments_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    made(tmp_path, frames_of(LOG))
    folder, rows = str(tmp_path / "history"), tmp_path / "rows.arrow"
    rows.write_text("mine")
    for more, words in (
        (["sql", folder, "SELECT 1", "--arrow", str(rows)], "give a new file"),
        (["sql", folder, "SELECT 1", "--csv", "--json"], "give one of them"),
        (["sql", folder, "SELECT 1", "--instance", "one"], "WHERE instance"),
        (["tenants", folder, "--instance", "one"], "--instance"),
        (["why", ONE.hex(), folder, "--instance", "nobody"], "no frame of instance 'nobody'"),
        (["changes", folder, "--from", "99999999999999999"], "no calendar"),
        (["changes", folder, "--from", "yesterday"], "--from 'yesterday'"),
        (["history", str(tmp_path / "capture.kvbm"), str(tmp_path / "h2"), "--instance", "nobody"], "no frame of"),
    ):
        assert main(more) == 2, more
        assert words in capsys.readouterr().err, more
    assert rows.read_text() == "mine"
    assert not (tmp_path / "h2").exists()
    for option in (["--memory", "0"], ["--memory", "-5"], ["--within", "nan"], ["--within", "0"], ["--within", "1e30"]):
        with pytest.raises(SystemExit):
            main(["sql", folder, "SELECT 1", *option])
        assert option[0] in capsys.readouterr().err


def test_values_of_any_kind_become_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    made(tmp_path, frames_of(LOG))
    question = (
        "SELECT [began] AS a, {'x': began} AS b, began::TIMESTAMPTZ AS c, 1.5::DECIMAL(4,2) AS d FROM residencies"
    )
    assert main(["sql", str(tmp_path / "history"), question, "--json"]) == 0
    at = "2026-01-01T00:00:07.000000Z"
    assert json.loads(capsys.readouterr().out)["rows"] == [[[at], {"x": at}, at, "1.50"]]


def test_a_history_follows_its_log_until_it_is_interrupted(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    capture, folder = tmp_path / "capture.kvbm", tmp_path / "history"
    frames = frames_of(LOG)
    capture.write_bytes(packed(frames[:5]))
    assert main(["history", str(capture), str(folder), "--follow", "--anew"]) == 2
    assert "give one of them" in capsys.readouterr().err
    program = "import sys; from kvbm.cli import replay_main; sys.exit(replay_main(sys.argv[1:]))"
    command = [sys.executable, "-c", program, "history", str(capture), str(folder), "--follow"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert "5 stays" in process.stdout.readline()
        capture.write_bytes(packed(frames))
        assert "8 stays" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait() == 130
    assert read_manifest(folder).stays == 8
