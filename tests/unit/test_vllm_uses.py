"""tools/vllm_uses.py finds what a vLLM lacks. On a real one: tests/engines/vllm/test_uses_real.py."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from tools.vllm_uses import Report, compare, unpacked, verdict

BASE = "vllm/distributed/kv_transfer/kv_connector/v1/base.py"
INTERFACE = """
from ..parents import Parent
class KVConnectorBase_V1(Parent):
    def __init__(self, config): self._config = config
    def begin(self, request, tokens=0): ...
    def shutdown(self): ...
"""
CONNECTOR = """
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
class Ours(KVConnectorBase_V1):
    def begin(self, request, tokens=0): ...
    def shutdown(self): ...
    def inherited(self, name, *more, key=None): ...
"""
PARENTS = """
class Parent:
    kind: str = ""
    def inherited(self, name, *more, key=None): ...
"""
POOL = """
try:
    from vllm.pool import Pool
except ImportError:
    Pool = None
"""
REAL_POOL = """
class Pool:
    size: int = 0
    def __init__(self): self.blocks = []
    def fill(self, request, blocks, size, mask=None): ...
def made(size, *, kind=""): ...
"""
USES = """
vllm.core
    Pool: size blocks
    Pool.fill(self, request, blocks, size, ...)
vllm.pool
    made(size, kind)
vllm.distributed.kv_transfer.kv_connector.v1.base
    KVConnectorBase_V1: kind _config
"""


def compared(folder: Path, **changed: str) -> Report:
    """What is found in a vLLM with the modules above, some of them changed; `pool=` is pool.py's text, and so on."""
    files = {
        "base": (BASE, INTERFACE),
        "parents": ("vllm/distributed/kv_transfer/kv_connector/parents.py", PARENTS),
        "core": ("vllm/core/__init__.py", POOL),
        "pool": ("vllm/pool.py", REAL_POOL),
        "init": ("vllm/__init__.py", ""),
        "connector": ("ours/connector.py", CONNECTOR),
    }
    for name, (path, text) in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(changed.get(name, text))
    return compare(folder, folder / "ours", USES)


def test_what_is_there_as_it_is_used_is_not_reported(tmp_path: Path) -> None:
    assert compared(tmp_path) == Report([], [])


@pytest.mark.parametrize(
    ("module", "text", "said"),
    [
        ("pool", REAL_POOL.replace("size: int = 0", ""), "vllm.core: Pool has no size"),
        ("pool", REAL_POOL.replace("self.blocks", "self.rows"), "vllm.core: Pool has no blocks"),
        (
            "pool",
            REAL_POOL.replace("blocks, size, mask", "size, blocks, mask"),
            "takes (self, request, size, blocks, mask)",
        ),
        ("pool", REAL_POOL.replace("mask=None", "mask"), "Pool.fill takes"),
        ("pool", REAL_POOL.replace("def made", "def named"), "vllm.pool: no made"),
        (
            "pool",
            REAL_POOL.replace('kind=""', 'sort=""'),
            "vllm.pool: made takes (size, sort), and (size, kind) is used",
        ),
        ("core", "", "vllm.core: no Pool"),
        ("parents", PARENTS.replace("kind", "sort"), "KVConnectorBase_V1 has no kind"),
        ("parents", PARENTS.replace("key", "word"), "inherited takes (self, name, *more, word)"),
        ("base", INTERFACE.replace("tokens=0", "tokens=0, late=0"), "begin takes (self, request, tokens, late)"),
        (
            "base",
            INTERFACE.replace("KVConnectorBase_V1", "KVConnectorBase_V2"),
            "no KVConnectorBase_V1, which connector.py imports",
        ),
    ],
)
def test_what_is_gone_or_otherwise_is_reported(tmp_path: Path, module: str, text: str, said: str) -> None:
    assert any(said in one for one in compared(tmp_path, **{module: text}).lacking)


def test_a_method_of_the_interface_that_nobody_knows_is_new(tmp_path: Path) -> None:
    text = INTERFACE + "    def sleep(self): ...\n    def get_finished(self, ids): ...\n    def _own(self): ...\n"
    assert compared(tmp_path, base=text) == Report([], ["sleep"])


def test_a_folder_without_a_vllm_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no vllm/__init__"):
        compare(tmp_path)


def test_a_wheel_is_read_as_its_folder_would_be(tmp_path: Path) -> None:
    assert compared(tmp_path / "made") == Report([], [])
    with zipfile.ZipFile(tmp_path / "vllm.whl", "w") as wheel:
        for path in (tmp_path / "made").rglob("*.py"):
            wheel.write(path, path.relative_to(tmp_path / "made"))
        wheel.writestr("vllm/_C.abi3.so", "not wanted")
    folder = unpacked(tmp_path / "vllm.whl", tmp_path / "read")
    assert compare(folder, tmp_path / "made" / "ours", USES) == Report([], [])
    assert not (folder / "vllm" / "_C.abi3.so").exists()


def test_what_is_otherwise_is_said_in_one_sentence(tmp_path: Path) -> None:
    changed = compared(tmp_path, pool=REAL_POOL.replace('kind=""', 'sort=""').replace("size: int = 0", ""))
    assert verdict("vllm-0.33.0.whl", changed) == (
        "vllm-0.33.0.whl is otherwise than kvbm uses it in 2 places: vllm.core: Pool has no size; "
        "vllm.pool: made takes (size, sort), and (size, kind) is used"
    )
    assert verdict("vllm-0.33.0.whl", Report([], ["sleep"])) == "vllm-0.33.0.whl has all that kvbm uses, as it is used"
