"""How the tests are laid out: which module's tests are where, and who imports whom."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
TEST_FILES = sorted(TESTS.rglob("test_*.py"))
MODULES = sorted(
    path
    for path in (ROOT / "kvbm").rglob("*.py")
    if path.name not in ("__init__.py", "__main__.py") and "migrations" not in path.parts
)
_IMPORT_IN_TEXT = re.compile(
    r"^\s*(?:from|import)\s+(tests(?:\.\w+)*\.test_\w+)|^from\s+(tests(?:\.\w+)*)\s+import\s+(test_\w+)", re.M
)


def table() -> dict[str, list[str]]:
    """tests/README.md: module or folder → its tests."""
    _, _, section = (TESTS / "README.md").read_text().partition("## Where the tests of a module are")
    rows = re.findall(r"^\| `([\w/]+(?:\.py|/))` \| (.+) \|$", section, re.M)
    return {module: re.findall(r"`([\w/.]+)`", tests) for module, tests in rows}


def test_each_module_has_a_test_file_of_its_name_or_a_line_in_the_readme() -> None:
    names, lines = {path.stem for path in TEST_FILES}, table()
    lost = []
    for path in MODULES:
        module = path.relative_to(ROOT / "kvbm")
        is_named = {f"test_{module.stem}", f"test_{module.parent.name}_{module.stem}"} & names
        is_listed = str(module) in lines or any(f"{folder}/" in lines for folder in module.parents)
        if not is_named and not is_listed:
            lost.append(str(module))
    assert not lost, (
        "write test_<name>.py for each of these, or a line in tests/README.md that says where its tests are"
    )


def test_the_readme_names_what_there_is() -> None:
    lines = table()
    assert lines
    assert [name for name in lines if not (ROOT / "kvbm" / name).exists()] == []
    assert [test for tests in lines.values() for test in tests if not (TESTS / test).exists()] == []


def test_no_test_is_skipped_for_want_of_a_package_or_a_program() -> None:
    """What is missing is a failure that says what to install."""
    skips = r"importorskip\(|skip(if)?\(.*(not installed|is missing|shutil\.which)"
    lines = [
        f"{path.relative_to(TESTS)}: {line.strip()}"
        for path in sorted(TESTS.rglob("*.py"))
        for line in path.read_text().splitlines()
        if re.search(skips, line) and path != Path(__file__) and "Triton" not in line  # which comes with a GPU's torch
    ]
    assert not lines, "take tests.extras.needed, or fail with what to install"


def test_no_test_module_imports_another() -> None:
    """What two need lies in a module beside the folders, or is a fixture.

    A program for a child may import the module it stands in.
    """
    found = []
    for path in TEST_FILES:
        own, text = ".".join(path.relative_to(ROOT).with_suffix("").parts), path.read_text()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                if any(alias.name == "*" for alias in node.names):
                    found.append(f"{own}:{node.lineno} imports *")
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                continue
            if any(part.startswith("test_") for name in names for part in name.split(".")[1:]):
                found.append(f"{own}:{node.lineno} imports {names[0]}")
        for whole, package, module in _IMPORT_IN_TEXT.findall(text):
            if (whole or f"{package}.{module}") != own:
                found.append(f"{own} has a program that imports {whole or module}")
    assert not found


def test_no_two_headers_define_a_type_of_one_name() -> None:
    """They would be one type to the linker, which takes one's destructor for both."""
    where: dict[str, list[str]] = {}
    for path in sorted((ROOT / "native/include/kvbm").glob("*.hpp")):
        for name in re.findall(
            r"^(?:struct|class|union|enum class) (?:alignas\(\d+\) )?(\w+)[^;]*?\{", path.read_text(), re.M
        ):
            where.setdefault(name, []).append(path.name)
    assert len(where) > 100
    assert {name: files for name, files in where.items() if len(files) > 1} == {}
