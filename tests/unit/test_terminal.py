"""What commands print of names that others have chosen: a terminal is shown them, and obeys none of them."""

from __future__ import annotations

import ast
import json
import logging
import sys
from io import StringIO
from pathlib import Path

import msgspec
import pytest
import structlog

import kvbm
from kvbm.command_line import configure_logs
from kvbm.core.ids import InstanceId
from kvbm.erasure import report
from kvbm.janitor.report import Part, Report, as_words
from kvbm.terminal import as_json, plain, say_error
from tests.captures import make_capture, packed
from tests.readable import main as replay

# Clears the screen, sets a title, a CSI of one character, turns the order of what follows, hides, ends the line, and
# ends in the sky.
HOSTILE = "a\x1b[2J\x1b]0;b\x07\x9b8m\x7f\u202ec\u2066d\u200be\u2028f\r\nall is gone\tg\U000e0041\ue000"
# What is left
SHOWN = r"a\x1b[2J\x1b]0;b\x07\x9b8m\x7f\u202ec\u2066d\u200be\u2028f\x0d\x0aall is gone\x09g\U000e0041\ue000"


def is_plain(text: str) -> bool:
    return all(one.isprintable() or one == "\n" for one in text)


def test_what_a_terminal_obeys_is_written_as_an_escape_and_all_else_stays() -> None:
    assert plain(HOSTILE) == SHOWN
    assert plain("müßig → 東京 𝛼") == "müßig → 東京 𝛼"
    assert plain("\ud800") == r"\ud800"
    assert plain("".join(map(chr, range(sys.maxunicode + 1)))).isprintable()


def test_json_says_the_same_and_nothing_in_it_is_obeyed() -> None:
    value = {"name": HOSTILE, "ü": ["\U0001f600", 'q"\\']}
    for indent in (None, 2):
        text = as_json(value, indent)
        assert is_plain(text)
        assert json.loads(text) == msgspec.json.decode(text) == value
    assert "\n" not in as_json(value)


def test_the_table_of_an_erasure_has_a_line_for_each_place_whatever_they_call_themselves() -> None:
    lines = [report.Line(HOSTILE, HOSTILE, HOSTILE, HOSTILE), report.Line("b", "HOST", "2 blocks", "")]
    words = report.as_words(7, lines)
    assert is_plain(words)
    assert len(words.split("\n")) == 4  # a heading, two places, and the verdict
    assert words.split("\n")[1].startswith(f"{SHOWN}  {SHOWN}")
    assert is_plain(report.as_json(7, lines))
    assert json.loads(report.as_json(7, lines))["places"][0]["who"] == HOSTILE


def test_the_janitors_table_has_a_line_for_each_namespace_and_none_of_a_strangers_object() -> None:
    parts = {"00" * 16: Part(tenant=HOSTILE, objects=1), "11" * 16: Part(tenant="acme")}
    words = as_words(Report(pool="s3://b", parts=parts, foreign=1, first_foreign=HOSTILE))
    assert is_plain(words)
    assert len(words.split("\n")) == 5  # the pool, a heading, two namespaces, and what is none of ours


@pytest.mark.parametrize(
    "asked", [["cat"], ["stat"], ["verify"], ["state"], ["state", "--blocks"], ["state", "--at", "e99+0"]]
)
def test_a_log_shows_the_names_in_it_and_obeys_none(
    asked: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    frames = [
        msgspec.structs.replace(frame, instance=InstanceId(HOSTILE)) for frame in make_capture(7, commands=60).frames()
    ]
    path = tmp_path / "hostile.kvbm"
    del frames[2]  # which is a finding
    path.write_bytes(packed(frames) + b"torn")
    for words in (asked, [*asked, "--json"]):
        assert replay([words[0], str(path), *words[1:]]) in (0, 1)
        said = capsys.readouterr()
        assert is_plain(said.out) and is_plain(said.err)
        assert ("\\u001b[2J" if "--json" in words else SHOWN) in said.out


def test_an_error_begins_one_line_and_what_others_put_into_it_begins_none(capsys: pytest.CaptureFixture[str]) -> None:
    say_error("kvbm", f"no {HOSTILE}\n  listed")
    assert capsys.readouterr().err.split("\n") == [
        "kvbm: no " + SHOWN.partition(r"\x0a")[0],
        "  " + SHOWN.partition(r"\x0a")[2],
        "  listed",
        "",
    ]


def test_remarks_show_names_and_errors_and_no_values_of_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    said = StringIO()
    monkeypatch.setattr(sys, "stderr", said)
    configure_logs()
    log = structlog.get_logger()
    log.warning("instance.seen", instance=HOSTILE, others=[HOSTILE])
    token = "kvbm_" + "secret"
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        log.exception("catalog.failed", why=HOSTILE)
    assert is_plain(said.getvalue())
    assert SHOWN.partition(r"\x0d")[0] in said.getvalue()
    assert token not in said.getvalue()


def test_what_libraries_say_is_shown_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    said = StringIO()
    monkeypatch.setattr(sys, "stderr", said)
    configure_logs()
    assert logging.lastResort is not None
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        record = logging.getLogger("uvicorn.error").makeRecord(
            "uvicorn.error", logging.ERROR, "", 0, "Exception: %s", (HOSTILE,), sys.exc_info()
        )
    logging.lastResort.handle(record)
    assert "Traceback" in said.getvalue() and r"a\x1b[2J" in said.getvalue()
    assert is_plain(said.getvalue())


def test_nobody_prints_but_through_here() -> None:
    """Programs that speak to a parent of ours alone, on a pipe and in JSON, are left out."""
    root = Path(kvbm.__file__).parent
    spoken = {
        *(f"doctor/probes/{name}.py" for name in ("io_uring", "disk", "cuda")),
        *(f"bench/{name}.py" for name in ("instance", "index", "racks", "lender")),
    }
    printing = {
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    }
    assert printing <= spoken
