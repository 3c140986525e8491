"""The plugin that vLLM loads in each of its processes."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from pkgutil import resolve_name

import pytest

from kvbm.engines.vllm.plugin import register


def test_the_entry_point_names_the_plugin() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert resolve_name(project["entry-points"]["vllm.general_plugins"]["kvbm"]) is register


def test_without_vllm_it_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    register()


def test_a_vllm_that_is_broken_is_not_taken_for_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "vllm"
    package.mkdir()
    (package / "__init__.py").write_text("import no_such_module_of_anyone\n")
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_module_of_anyone"):
        register()
