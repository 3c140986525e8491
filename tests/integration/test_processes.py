"""Children that die, and what they import."""

from __future__ import annotations

import ast
import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import kvbm
from kvbm.demo.engine_process import EngineProcess
from kvbm.streams.child import python
from kvbm.workload.processes import Child, start_object_store


def test_a_request_to_an_engine_that_has_died_is_answered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Process:
        stdin = io.BytesIO()
        stdout = io.BytesIO()

    monkeypatch.setattr(Child, "__init__", lambda self, *_, **__: setattr(self, "process", Process()))
    engine = EngineProcess("e", {}, tmp_path, {})
    assert engine.events.get(timeout=60) == {"event": "died"}
    told: list[dict[str, Any]] = []
    engine.submit("r", [1], 1, True, told.append)
    assert [answer["failed"] for answer in told] == ["engine died"]


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory where somebody has put modules of names that every program imports; this file is there once
    one has run.
    """
    mark = tmp_path / "has-run"
    folder = tmp_path / "trap"
    folder.mkdir()
    for name in ("ssl", "json", "kvbm", "moto", "flask", "sitecustomize"):
        (folder / f"{name}.py").write_text(f"open({str(mark)!r}, 'w').close()\nraise SystemExit(99)\n")
    monkeypatch.chdir(folder)
    return mark


@pytest.mark.parametrize("how", [["-c", "import ssl, json, kvbm.files"], ["-m", "json.tool", "--help"]])
@pytest.mark.parametrize("flags", [[], ["-I"], ["-E"]])
def test_a_child_imports_nothing_from_the_working_directory(
    trap: Path, how: list[str], flags: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if flags:  # whoever was kept from the environment keeps its children from it
        monkeypatch.setenv("PYTHONPATH", ":")
    program = (
        f"import sys; sys.path.append({str(Path(kvbm.__file__).parents[1])!r}); from kvbm.streams.child import "
        "python; print(python())"
    )
    asked = [sys.executable, "-P", *flags, "-c", program]
    command = ast.literal_eval(subprocess.run(asked, check=True, capture_output=True, text=True, timeout=60).stdout)
    subprocess.run([*command, *how], check=True, capture_output=True, timeout=60)
    assert not trap.exists()


def test_an_object_store_of_a_demo_imports_nothing_from_the_working_directory(trap: Path, tmp_path: Path) -> None:
    store, _ = start_object_store(tmp_path / "store")
    store.stop()
    assert not trap.exists()


def test_every_python_that_we_start_is_kept_from_the_working_directory() -> None:
    """A `-c` or `-m` of ours looks there first by itself; `python` and isolated ones do not."""
    assert python("-c", "")[1] == "-P"
    root = Path(kvbm.__file__).parent
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            words = [ast.unparse(one) for one in node.elts] if isinstance(node, ast.List) else []
            if "sys.executable" in words:
                assert words[words.index("sys.executable") + 1] in ("'-I'", "'-P'"), f"{path} line {node.lineno}"
