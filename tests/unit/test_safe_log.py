"""What the commands say goes to standard error; that nobody can take it there must not matter."""

from __future__ import annotations

import errno
import logging
import re
import sys
from collections.abc import Callable
from io import StringIO

import pytest
import structlog

from kvbm.command_line import configure_logs
from kvbm.engines.vllm.logs import log_with_vllm
from kvbm.safe_log import SafeLog
from kvbm.telemetry.stderr_log import to_standard_error


class FullDisk(StringIO):
    """A file on a disk without room."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    def flush(self) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_remark_that_cannot_be_written_is_lost_and_stops_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", FullDisk())
    configure_logs()
    structlog.get_logger().warning("journal.write_failed", why="no room")


def test_remarks_go_to_standard_error(monkeypatch: pytest.MonkeyPatch) -> None:
    said = StringIO()
    monkeypatch.setattr(sys, "stderr", said)
    configure_logs()
    structlog.get_logger().warning("journal.write_failed", why="no room")
    assert "journal.write_failed" in said.getvalue()


def test_a_logger_that_was_used_before_writes_where_standard_error_is_now(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = StringIO(), StringIO()
    log = structlog.get_logger()
    monkeypatch.setattr(sys, "stderr", first)
    configure_logs()
    log.warning("journal.write_failed")
    first.close()
    log.warning("journal.write_failed")  # nobody can take it
    monkeypatch.setattr(sys, "stderr", second)
    log.warning("journal.write_resumed")
    assert "journal.write_resumed" in second.getvalue()


@pytest.mark.parametrize("begin", [configure_logs, to_standard_error], ids=["commands", "engines"])
def test_every_remark_begins_with_its_time_as_utc_in_milliseconds(
    monkeypatch: pytest.MonkeyPatch, begin: Callable[[], None]
) -> None:
    said = StringIO()
    monkeypatch.setattr(sys, "stderr", said)
    structlog.reset_defaults()
    begin()
    structlog.get_logger().warning("journal.write_failed", why="no room")
    structlog.reset_defaults()
    assert re.match(r"(\x1b\[\d*m)*\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", said.getvalue())


def test_who_would_remark_on_every_request_can_ask_first_whether_anybody_reads_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    structlog.reset_defaults()
    assert SafeLog().says_debug()  # they print everything
    configure_logs(logging.INFO)
    assert not SafeLog().says_debug()
    configure_logs(logging.DEBUG)
    assert SafeLog().says_debug()
    structlog.reset_defaults()
    log_with_vllm()
    engines = logging.getLogger("vllm")
    monkeypatch.setattr(engines, "level", engines.level)
    engines.setLevel(logging.INFO)
    assert not SafeLog().says_debug()
    engines.setLevel(logging.DEBUG)
    assert SafeLog().says_debug()
    structlog.configure(wrapper_class=structlog.BoundLogger)  # it cannot tell
    assert SafeLog().says_debug()
