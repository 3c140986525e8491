"""Log lines as JSON: one object a line whatever is in it, and levels by the first word of a line's name."""

from __future__ import annotations

import json
import logging
import re
import sys
from typing import Any

import pytest
import structlog

from kvbm.command_line import CommandParser, configure_logs
from kvbm.config import LogSettings, load_settings
from kvbm.core.errors import ConfigError
from kvbm.safe_log import SafeLog
from kvbm.telemetry.stderr_log import to_standard_error

JSON = LogSettings(format="json")


class Strange:
    def __repr__(self) -> str:
        raise ValueError("no words")


@pytest.fixture(autouse=True)
def text_afterwards() -> Any:
    yield
    configure_logs()


class Said:
    """All that standard error was given in a test."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys, self._text = capsys, ""

    def getvalue(self) -> str:
        self._text += self._capsys.readouterr().err
        return self._text


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Said:
    return Said(capsys)


def lines(said: Said) -> list[dict[str, Any]]:
    text = said.getvalue()
    assert text.isascii() and (not text or text.endswith("\n"))
    return [json.loads(line) for line in text.splitlines()]


def test_a_line_is_an_object_with_time_level_event_and_its_fields(said: Said) -> None:
    configure_logs(settings=JSON)
    SafeLog().warning("journal.write_failed", why="no room", blocks=3, share=0.5, tiers=["HBM", "HOST"], more=None)
    (line,) = lines(said)
    assert list(line)[:3] == ["time", "level", "event"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line.pop("time"))
    assert line == {
        "level": "warning",
        "event": "journal.write_failed",
        "why": "no room",
        "blocks": 3,
        "share": 0.5,
        "tiers": ["HBM", "HOST"],
        "more": None,
    }


def loop() -> list[Any]:
    made: list[Any] = []
    made.append(made)
    return made


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("a\nb\x1b[2J", "a\nb\x1b[2J"),
        ("\udcff\ud800 ü", "\\udcff\\ud800 ü"),
        (b"\xff\x00ok", "\\xff\x00ok"),
        (float("nan"), "nan"),
        (float("-inf"), "-inf"),
        (1 << 70, hex(1 << 70)),
        (Strange(), "<Strange>"),
        ({b"\xfe": {1}}, {"b'\\xfe'": [1]}),
        (loop(), [[[["[[...]]"]]]]),
        ({"level": "x", "\udc80": 1}, {"level": "x", "\\udc80": 1}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_no_value_breaks_a_line(said: Said, value: object, shown: object) -> None:
    configure_logs(settings=JSON)
    SafeLog().info("catalog.started", what=value)
    (line,) = lines(said)
    assert line["what"] == shown


def test_what_is_very_long_is_cut_and_a_field_takes_no_name_of_ours(said: Said) -> None:
    configure_logs(settings=JSON)
    SafeLog().info("catalog.started", what="x" * 10_000_000, time="noon", exception=["y" * 9000] * 64)
    SafeLog().info("catalog.started", time="noon")
    cut, whole = lines(said)
    assert len(said.getvalue()) < 48 << 10
    assert cut["event"] == "catalog.started" and cut["cut"] > 40_000
    assert whole["time_"] == "noon" and whole["time"] != "noon"


def test_a_traceback_is_a_field_without_the_values_of_variables(said: Said) -> None:
    configure_logs(settings=JSON)
    token = "kvbm_" + "secret"
    try:
        raise ValueError("\udcff\n")
    except ValueError:
        SafeLog().exception("catalog.failed", why="x")
        logging.lastResort.handle(  # type: ignore[union-attr]
            logging.getLogger("uvicorn.error").makeRecord(
                "u", logging.ERROR, "", 0, "%d", ("no number",), sys.exc_info()
            )
        )
    ours, library = lines(said)
    assert (
        "Traceback" in ours["exception"] and "ValueError" in ours["exception"] and "test_json_log" in ours["exception"]
    )
    assert library["event"] == "library.logged" and "Traceback" in library["exception"]
    assert token not in said.getvalue()


def test_levels_are_by_the_first_word_of_a_name(said: Said) -> None:
    levels = {"instance": "error", "journal": "debug"}
    configure_logs(logging.WARNING, LogSettings(format="json", levels=levels))
    log = SafeLog()
    assert log.says_debug()
    for event in ("instance.fenced", "journal.rotated", "catalog.started"):
        for say in (log.debug, log.info, log.warning, log.error):
            say(event)
    assert [(line["event"].partition(".")[0], line["level"]) for line in lines(said)] == [
        ("instance", "error"),
        *(("journal", level) for level in ("debug", "info", "warning", "error")),
        *(("catalog", level) for level in ("warning", "error")),
    ]


def test_another_level_counts_at_once_for_loggers_that_were_used_before(said: Said) -> None:
    log = SafeLog()
    configure_logs(settings=LogSettings(format="json", level="error"))
    log.info("catalog.started")
    configure_logs(settings=JSON)
    log.info("catalog.stopped")
    assert [line["event"] for line in lines(said)] == ["catalog.stopped"]


def test_an_engines_own_setup_stays_and_without_one_the_settings_count(said: Said) -> None:
    from kvbm.assembly.logs import log_style

    structlog.reset_defaults()
    to_standard_error(log_style(LogSettings(format="json", level="warning")))
    SafeLog().info("instance.started")
    SafeLog().warning("instance.fenced")
    assert [line["event"] for line in lines(said)] == ["instance.fenced"]
    own: list[str] = []

    def take(_: object, __: str, fields: Any) -> str:
        own.append(fields["event"])
        return "its own line"

    structlog.configure(processors=[take], logger_factory=structlog.ReturnLoggerFactory())
    to_standard_error(log_style(JSON))
    SafeLog().warning("instance.started")
    assert own == ["instance.started"] and said.getvalue().count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ({"log.levels.instnace": "debug"}, "nearest is 'instance'"),
        ({"log.levels.instance": "loud"}, "log.levels.instance is 'loud'; use one of debug, info, warning, error"),
        ({"log.level": "loud"}, "log.level is 'loud'; use one of auto"),
        ({"log.format": "xml"}, "log.format is 'xml'; use one of text, json"),
        ({"log.levels": "debug"}, "log.levels is a table"),
    ],
)
def test_a_level_that_is_none_is_refused(flags: dict[str, str], why: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(why)):
        load_settings(None, {}, flags)


def test_levels_come_from_file_environment_and_flags(tmp_path: Any) -> None:
    path = tmp_path / "kvbm.toml"
    path.write_text('[log]\nformat = "json"\n[log.levels]\ninstance = "error"\npool = "debug"\n')
    found = load_settings(path, {"KVBM_LOG__LEVELS__INSTANCE": "warning"}, {"log.level": "debug"}).log
    assert found == LogSettings(format="json", level="debug", levels={"instance": "warning", "pool": "debug"})


@pytest.mark.parametrize("asked", ["environment", "flag"])
def test_wrong_arguments_are_told_in_the_form_asked_for(
    said: Said, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    words = ["--bogus\udcff"]
    if asked == "environment":
        monkeypatch.setenv("KVBM_LOG__FORMAT", "json")
    else:
        words += ["--set", "log.format=json"]
    monkeypatch.setattr(sys, "argv", ["kvbm-catalog", *words])
    with pytest.raises(SystemExit) as ended:
        CommandParser(prog="kvbm-catalog").parse_args(words[:1])
    assert ended.value.code == 2
    (line,) = lines(said)
    assert (line["event"], line["why"]) == ("command.misused", "unrecognized arguments: --bogus\\udcff")
