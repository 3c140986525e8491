"""The copy that stands for the next version: made of this tree by edits that each find what they replace."""

from __future__ import annotations

import ast
import asyncio
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kvbm import _native
from kvbm.catalog.sql.store import SqlStore
from kvbm.core.codec import VERSION, Frame, decode_frame, encode_frame
from kvbm.core.errors import CatalogError, NewerFrameError
from kvbm.core.events import InstanceStarted
from kvbm.core.ids import Epoch, InstanceId, Namespace, Offset
from tests.eventually import WAIT_S
from tests.releases import GOLDEN, SQLITE, restore_sqlite

ROOT = Path(__file__).parents[2]
RELEASE = GOLDEN / "0.1.0"

# What a program finds in the copy: its package without what is compiled, in the place of the one that is installed.
PROGRAM = """
import asyncio, json, sys, types
sys.meta_path[:] = [one for one in sys.meta_path if "Redirecting" not in type(one).__name__]  # of editable installs
package = types.ModuleType("kvbm")
package.__path__ = [sys.argv[1] + "/kvbm"]
sys.modules["kvbm"] = package
import kvbm.core.codec as codec
from kvbm.catalog.sql.store import SqlStore
from kvbm.core.events import InstanceStarted
from kvbm.core.ids import Namespace

def frame(**more):
    started = InstanceStarted(epoch=1, namespaces=(Namespace(model="m", block_tokens=4, **more),))
    made = codec.Frame(instance="one", epoch=1, first_offset=0, wall_time_ns=1, digest=0, events=(started,))
    data = codec.encode_frame(made)
    assert codec.decode_frame(data)[0] == made
    return data.hex()

async def variants():
    store = await SqlStore.open(sys.argv[2], 60.0)
    found = [row.fields.variant for row in await store.namespaces()]
    await store.close()
    return found

print(json.dumps([codec.__file__, codec.VERSION, frame(), frame(variant="v2"), asyncio.run(variants())]))
"""


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec: Any = importlib.util.spec_from_file_location("next_version", ROOT / "tools" / "next_version.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["next_version"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def files(tool: ModuleType) -> dict[str, bytes]:
    found: dict[str, bytes] = tool.next_version(ROOT)
    return found


@pytest.fixture(scope="module")
def copy(tool: ModuleType, files: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("next")
    tool.write(files, folder)
    return folder


def test_its_frames_namespaces_and_schema_are_newer(tool: ModuleType, files: dict[str, bytes]) -> None:
    ours = {path.name[:4] for path in (ROOT / "migrations" / "versions").glob("0*.py")}
    theirs = {name.rpartition("/")[2][:4] for name in files if name.startswith("migrations/versions/0")}
    assert len(theirs - ours) == 1 and max(theirs) > max(ours)
    assert f"kFrameVersion = {VERSION + 1};" in files["native/include/kvbm/codec.hpp"].decode()
    assert tool.version_in(files) == "0.2.0"
    ours_and_theirs = {name: data for name, data in files.items() if data != _ours(name)}
    assert len(ours_and_theirs) == 9
    for name, data in ours_and_theirs.items():
        if name.endswith(".py"):
            ast.parse(data, name)


def _ours(name: str) -> bytes:
    return (ROOT / name).read_bytes() if (ROOT / name).is_file() else b""


def test_this_version_refuses_in_words_what_only_the_next_one_writes(copy: Path, tmp_path: Path) -> None:
    """Frames of a namespace with the new field, and a database with the new schema; all else stays as it is."""
    database = restore_sqlite(RELEASE / SQLITE, tmp_path / "catalog.db")
    command = [sys.executable, "-P", "-c", PROGRAM, str(copy), database]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    place, newest, plain, other, variants = json.loads(done.stdout)
    assert Path(place).is_relative_to(copy) and newest == VERSION + 1 and variants == [""]
    started = InstanceStarted(epoch=Epoch(1), namespaces=(Namespace(model="m", block_tokens=4),))
    whole = {"instance": InstanceId("one"), "epoch": Epoch(1), "first_offset": Offset(0)}
    assert bytes.fromhex(plain) == encode_frame(Frame(**whole, wall_time_ns=1, digest=0, events=(started,)))
    with pytest.raises(NewerFrameError):
        decode_frame(bytes.fromhex(other))
    with pytest.raises(NewerFrameError):
        _native.decode_frame(bytes.fromhex(other))
    with pytest.raises(CatalogError, match="which is newer than"):
        asyncio.run(SqlStore.open(database, WAIT_S))


def test_an_edit_whose_text_is_gone_is_named(tool: ModuleType, files: dict[str, bytes]) -> None:
    ours = {name: (ROOT / name).read_bytes() for name in files if (ROOT / name).is_file()}
    for edit in tool.edits(ours):
        text = ours[edit.path].decode()
        with pytest.raises(tool.NextVersionError, match=f"{edit.path} has .* 0 times"):
            tool.edited(text.replace(edit.old, "", 1), edit)
        with pytest.raises(tool.NextVersionError, match=f"{edit.path} has .* 2 times"):
            tool.edited(text + edit.old, edit)
        assert tool.edited(text, edit) != text
    for path in ("pyproject.toml", "kvbm/core/codec.py"):
        with pytest.raises(tool.NextVersionError, match=path):
            tool.edits(ours | {path: b"nothing"})


def test_what_did_not_change_is_not_written_again(tool: ModuleType, files: dict[str, bytes], copy: Path) -> None:
    """So that what was compiled of it stays."""
    gone = copy / "kvbm" / "gone.py"
    gone.touch()
    before = {path: path.stat().st_mtime_ns for path in copy.rglob("*") if path.is_file() and path != gone}
    tool.write(files, copy)
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert not gone.exists()
