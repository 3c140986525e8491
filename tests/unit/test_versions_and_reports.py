"""Commands tell their version, and reports are written over reports and over no other file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest

from kvbm.assembly import kvbm_version
from kvbm.catalog_cli import catalog_main
from kvbm.cli import main, replay_main
from kvbm.core.errors import ConfigError
from kvbm.reports import check_report_path, write_report


class Report(msgspec.Struct):
    """Some numbers."""

    requests: int = 1


@pytest.mark.parametrize(
    ("name", "command"), [("kvbm", main), ("kvbm-catalog", catalog_main), ("kvbm-replay", replay_main)]
)
def test_each_command_tells_its_version(
    name: str, command: Callable[[Sequence[str]], int], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        command(["--version"])
    assert (ended.value.code, capsys.readouterr().out) == (0, f"{name} {kvbm_version()}\n")


def test_a_report_is_written_over_an_older_one_and_over_no_other_file(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    for _ in range(2):
        check_report_path(path)
        write_report(path, Report())
    for content in (b"KVBM", b'{"requests": 1}', b"print()\n"):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match="is there already and is no report: it stays as it is"):
            check_report_path(path)
        assert path.read_bytes() == content
    check_report_path(tmp_path / "new.json")
