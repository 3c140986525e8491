"""Programs written from docs/hash.md alone, in Node.js and in C, compute the test vectors of the package."""

from __future__ import annotations

import json
import subprocess
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
VECTORS = files("kvbm").joinpath("hash_vectors.json")
WAIT_S = 120.0


@pytest.fixture(scope="module", params=["node", "c"])
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """One of them, ready to be given a file of vectors."""
    if request.param == "node":
        return ["node", str(HERE / "hash_vectors.mjs")]
    made = str(tmp_path_factory.mktemp("c") / "hash_vectors")
    build = ["cc", "-std=c17", "-Wall", "-Wextra", "-Werror", "-O1", str(HERE / "hash_vectors.c"), "-lcrypto"]
    built = subprocess.run([*build, "-o", made], capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert built.returncode == 0, f"{built.stderr}\napt-get install gcc libssl-dev"
    return [made]


def ran(program: list[str], vectors: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*program, str(vectors)], capture_output=True, text=True, timeout=WAIT_S, check=False)


def test_a_stranger_computes_every_vector(program: list[str]):
    vectors = json.loads(VECTORS.read_text(encoding="utf-8"))
    ended = ran(program, Path(str(VECTORS)))
    told = [f"{kind}: {len(cases)} of {len(cases)} right" for kind, cases in vectors.items()]
    assert (ended.stdout.splitlines(), ended.stderr, ended.returncode) == (told, "", 0)


def test_a_changed_vector_is_named(program: list[str], tmp_path: Path):
    vectors: dict[str, list[dict[str, Any]]] = json.loads(VECTORS.read_text(encoding="utf-8"))
    for kind, changed in (
        ("namespaces", "root"),
        ("namespaces", "id"),
        ("seeds", "canonical"),
        ("prompts", "hashes"),
        ("derived", "hashes"),
    ):
        one = vectors[kind][-1]
        before = one[changed]
        one[changed] = ["0" * 32] if isinstance(before, list) else "0" * 32
        changed_file = tmp_path / "changed.json"
        changed_file.write_text(json.dumps(vectors))
        ended = ran(program, changed_file)
        assert (f"  wrong: {one['name']}" in ended.stdout.splitlines(), ended.returncode) == (True, 1), changed
        one[changed] = before
