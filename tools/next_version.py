"""Make a copy of this tree that stands for the next version, to try upgrades to it before there is one.

    python tools/next_version.py FOLDER

It differs as versions do: a version of frames one higher, one more field of namespaces, and one more migration. A
namespace with the new field is told of in frames of the new version, which an instance writes once it is told to
(`journal.frame_version`) and not before. Each difference is a small edit of a text; where that text is gone, this ends
with its name, and the edit is made anew. FOLDER may be there from an earlier run: what did not change stays untouched,
so that what was compiled of it stays, too.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
COPIED = (
    *("kvbm", "kvbm_ledger", "native", "migrations", "pyproject.toml", "CMakeLists.txt", "README.md", "LICENSE"),
    "constraints.txt",
)
LEFT_OUT = ("native/tests/", "native/fuzz/", "kvbm/bench/")
FIELD = "variant"


class NextVersionError(Exception):
    """The next version cannot be made; the message is the sentence to print."""


class Edit(NamedTuple):
    """One text of one file, which is there once, and what takes its place."""

    path: str
    old: str
    new: str


def main(argv: list[str] | None = None) -> int:
    """Returns 0, or 1 when a text to edit is gone."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args(argv).folder
    try:
        files = next_version(ROOT)
    except NextVersionError as error:
        print(f"next_version: {error}", file=sys.stderr)
        return 1
    write(files, folder)
    print(f"{folder}: {len(files)} files of version {version_in(files)}")
    return 0


def next_version(root: Path) -> dict[str, bytes]:
    """All files of the next version, by path. Raises NextVersionError."""
    listed = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *COPIED]
    names = subprocess.run(listed, capture_output=True, text=True, check=True).stdout.split("\0")
    names = [name for name in names if name and not name.startswith(LEFT_OUT) and (root / name).is_file()]
    files = {name: (root / name).read_bytes() for name in sorted(set(names))}
    for edit in (*edits(files), *_migration(files)):
        files[edit.path] = edited(files.get(edit.path, b"").decode(), edit).encode()
    return files


def write(files: dict[str, bytes], folder: Path) -> None:
    """Make a folder have these files; those that have their bytes already stay as they are."""
    for name, data in files.items():
        path = folder / name
        if path.is_file() and path.read_bytes() == data:
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    for path in [
        path for part in ("kvbm", "kvbm_ledger", "native", "migrations") for path in (folder / part).rglob("*")
    ]:
        if path.is_file() and "__pycache__" not in path.parts and str(path.relative_to(folder)) not in files:
            path.unlink()


def edited(text: str, edit: Edit) -> str:
    """The text with the edit. Raises NextVersionError: what it replaces is not there once."""
    if edit.old and (count := text.count(edit.old)) != 1:
        raise NextVersionError(
            f"{edit.path} has {edit.old.strip().splitlines()[0]!r} {count} times, not once; make its edit anew in "
            "tools/next_version.py"
        )
    return text.replace(edit.old, edit.new, 1) if edit.old else edit.new


def version_in(files: dict[str, bytes]) -> str:
    """What pyproject.toml says."""
    return _found(files, "pyproject.toml", r'^version = "([^"]+)"$')


def _found(files: dict[str, bytes], path: str, pattern: str) -> str:
    """The one group of a pattern in a file. Raises NextVersionError."""
    found = re.findall(pattern, files.get(path, b"").decode(), re.MULTILINE)
    if len(found) != 1:
        raise NextVersionError(f"{path} has {pattern} {len(found)} times, not once; see tools/next_version.py")
    return str(found[0])


def edits(files: dict[str, bytes]) -> list[Edit]:
    """All but the migration. Raises NextVersionError: a number that one rests on is gone."""
    version = version_in(files)
    major, minor = version.split(".")[:2]
    newest = int(_found(files, "kvbm/core/codec.py", r"^VERSION = (\d+)  #"))
    higher = newest + 1
    settings = ", ".join(str(number) for number in range(2, newest + 1))
    return [
        Edit("pyproject.toml", f'\nversion = "{version}"\n', f'\nversion = "{major}.{int(minor) + 1}.0"\n'),
        Edit("kvbm/core/codec.py", f"\nVERSION = {newest}  #", f"\nVERSION = {higher}  #"),
        Edit(
            "kvbm/core/codec.py",
            '    """The lowest version that suffices for these events."""\n',
            '    """The lowest version that suffices for these events."""\n'
            f"    started = [event for event in events if isinstance(event, InstanceStarted)]\n"
            f"    if any(namespace.{FIELD} for event in started for namespace in event.namespaces):\n"
            f"        return {higher}\n",
        ),
        Edit("native/include/kvbm/codec.hpp", f"kFrameVersion = {newest};", f"kFrameVersion = {higher};"),
        Edit(
            "native/src/codec.cpp",
            "  const auto* const started = std::get_if<InstanceStarted>(&event);\n  return started",
            "  const auto* const started = std::get_if<InstanceStarted>(&event);\n"
            "  // The field's name in MessagePack: no text begins with its first byte, and few hold it.\n"
            f'  constexpr char kField[] = "\\x{0xA0 + len(FIELD):02x}" "{FIELD}";\n'
            "  if (started != nullptr && std::search(started->blob.begin(), started->blob.end(), std::begin(kField),\n"
            "                                        std::end(kField) - 1, [](auto one, char other) {\n"
            "                                          return static_cast<unsigned char>(one) ==\n"
            "                                                 static_cast<unsigned char>(other);\n"
            "                                        }) != started->blob.end()) {\n"
            f"    return {higher};\n"
            "  }\n"
            "  return started",
        ),
        Edit("kvbm/core/ids.py", "    scheme_seed: int = 0\n", f'    scheme_seed: int = 0\n    {FIELD}: str = ""\n'),
        Edit(
            "kvbm/core/ids.py",
            '    "scheme": MAX_TEXT_BYTES,\n',
            f'    "scheme": MAX_TEXT_BYTES,\n    "{FIELD}": 64,\n',
        ),
        Edit(
            "kvbm/config/settings.py",
            f"frame_version: Literal[{settings}] = {newest}\n",
            f"frame_version: Literal[{settings}, {higher}] = {newest}\n",
        ),
        Edit(
            "kvbm/assembly/manager.py",
            "    check_namespaces(namespaces)\n",
            "    check_namespaces(namespaces)\n"
            f"    if settings.journal.frame_version < {higher} and any(one.{FIELD} for one in namespaces):\n"
            f'        raise ConfigError("a {FIELD} of a namespace is told in frames of version {higher}; set "\n'
            f'                          "journal.frame_version = {higher} once every catalog reads them")\n',
        ),
        Edit(
            "kvbm/catalog/sql/tables.py",
            '    Column("scheme_seed", Words, nullable=False),',
            f'    Column("{FIELD}", Words, nullable=False, server_default=""),\n'
            '    Column("scheme_seed", Words, nullable=False),',
        ),
    ]


def _migration(files: dict[str, bytes]) -> list[Edit]:
    """The migration after the newest one. Raises NextVersionError: there is none."""
    numbers = sorted(name.rpartition("/")[2][:4] for name in files if name.startswith("migrations/versions/0"))
    if not numbers:
        raise NextVersionError("migrations/versions has no migration; see tools/next_version.py")
    number = f"{int(numbers[-1]) + 1:04}"
    body = f'''"""What the next version knows of namespaces."""

import sqlalchemy as sa
from alembic import op

revision = "{number}"
down_revision = "{numbers[-1]}"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("namespaces", sa.Column("{FIELD}", sa.Text, nullable=False, server_default=""))
'''
    return [Edit(f"migrations/versions/{number}_{FIELD}.py", "", body)]


if __name__ == "__main__":
    raise SystemExit(main())
