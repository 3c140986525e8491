"""Each program of examples/, run as a user runs it: it ends by itself, prints what it is there to show, and leaves
nothing behind.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest

import kvbm

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py"))
TIMEOUT_S = 300.0
MOST_README_LINES = 25

SAYS = {  # essential lines, in their order
    "ask_catalog": [
        r"a prompt of 163 tokens, 10 full blocks:",
        r"  engine-a holds 10: \{'HBM': 10\}",
        r"  engine-b holds 4: \{'HBM': 4\}",
        r"  engine-a would compute 3 tokens, cost .* ms",
        r"  engine-b would compute 99 tokens, cost .* ms",
        r"  → engine-a",
        r"asyncio: a prompt of 161 tokens goes to engine-a",
        r"asyncio: a prompt of 161 tokens goes to engine-b",
        r"asyncio: a prompt of 81 tokens goes to engine-b",
    ],
    "embed": [
        r"first prompt +6 blocks: nothing held; 6 computed",
        r"second, same beginning +6 blocks: 4 from HBM; 2 computed",
        r"a long one, HBM is full now +10 blocks: nothing held; 10 computed",
        r"first prompt again +6 blocks: 6 from HOST; 0 computed",
        r"… and after a restart +6 blocks: 6 from NVME; 0 computed",
        r"6 blocks were read from NVME and verified, 0 were corrupt",
    ],
    "embed_engine_tensors": [
        r"first prompt +0 in its own HBM, 0 from kvbm, 6 computed",
        r"the same again +6 in its own HBM, 0 from kvbm, 0 computed",
        r"another, HBM is full +0 in its own HBM, 0 from kvbm, 8 computed",
        r"first prompt again +0 in its own HBM, 6 from kvbm, 0 computed",
    ],
    "follow_events": [
        r"engine-a e1\+0 +epoch 1 begins, pools HBM 5, HOST 8",
        *(rf"engine-a e1\+3 +[0-9a-f]{{8}} created in HBM, position {at} of its prompt" for at in range(3)),
        *[r"engine-a e1\+4 +[0-9a-f]{8} now in HOST, from HBM \(offload\)"] * 3,
        r"engine-a e1\+5 +[0-9a-f]{8} left HBM \(capacity\)",
        r"engine-a e1\+9 +[0-9a-f]{8} now in HBM, from HOST \(onboard\)",
        r"engine-a e1\+1[12] +stopped",
    ],
    "prefill_decode": [
        r"prefill: computed 8 blocks",
        r"catalog: 8 blocks at prefill",
        r"decode: found 8 from HOST, computed 0 blocks, next tokens \[.*\]",
        r"the same tokens as P would have decoded",
    ],
    "replay_log": [
        r"engine-a: epoch 1, before offset 6, .*",
        r"  HBM +8 blocks held, .*",
        r"[0-9a-f]{8} left: engine-a e1\+4 .* BlocksEvicted HBM 1 block .* capacity",
        r"verified: 1 instance, 1 epoch, .*, 2[67] events, 0 findings",
        r" +8  lru +37 .*",
        r" +16  lru +54 .*",
        r" +∞  unbounded +54 .*",
    ],
}


def processes_that_name(words: str) -> list[str]:
    """Command lines of processes that run now and name something."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = entry.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue  # gone meanwhile
        if words in line:
            found.append(line)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_an_example_runs_shows_what_it_is_for_and_leaves_nothing_behind(name: str, tmp_path: Path) -> None:
    begun_in = tmp_path / "begun-in"
    begun_in.mkdir()
    with tempfile.TemporaryDirectory(
        prefix="kvbm-"
    ) as short:  # as a user's: the path of a socket has at most 107 bytes
        temporary = Path(short)
        ran = subprocess.run(
            [sys.executable, str(EXAMPLES / f"{name}.py")],
            cwd=begun_in,
            env={**os.environ, "TMPDIR": str(temporary)},
            capture_output=True,
            text=True,
            encoding="utf-8",
            timeout=TIMEOUT_S,
            check=False,
        )
        left = [path.name for folder in (begun_in, temporary) for path in folder.iterdir()]
    assert ran.returncode == 0, ran.stdout + ran.stderr
    lines = iter(ran.stdout.splitlines())
    for wanted in SAYS[name]:
        assert any(re.fullmatch(wanted, line) for line in lines), f"no line {wanted!r} in its place in:\n{ran.stdout}"
    assert "[warning" not in ran.stderr, ran.stderr
    assert left == []
    assert processes_that_name(str(temporary)) == []


def test_there_are_six_and_the_readme_names_each_in_few_lines() -> None:
    readme = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert len(NAMES) == 6 and set(NAMES) == set(SAYS)
    assert sorted(re.findall(r"^\| `(\w+)\.py` \|", readme, re.MULTILINE)) == NAMES
    assert len(readme.splitlines()) <= MOST_README_LINES


@pytest.mark.parametrize("name", NAMES)
def test_an_example_says_how_it_is_run(name: str) -> None:
    words = ast.get_docstring(ast.parse((EXAMPLES / f"{name}.py").read_text(encoding="utf-8")))
    assert words is not None and f"    python examples/{name}.py\n" in words


@pytest.mark.parametrize("name", NAMES)
def test_an_example_uses_the_public_api_alone(name: str) -> None:
    assert inner_imports((EXAMPLES / f"{name}.py").read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("page", sorted((EXAMPLES.parent / "docs").glob("*.md")), ids=lambda page: page.stem)
def test_the_python_of_a_page_uses_the_public_api_alone(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"^ *```python\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL)
    assert [line for block in blocks for line in inner_imports(textwrap.dedent(block))] == []


def inner_imports(code: str) -> list[str]:
    """Imports of what lies inside kvbm, and may change without notice."""
    found = []
    for node in ast.walk(ast.parse(code)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        public = {"kvbm", *(f"kvbm.{name}" for name in kvbm.__all__)}
        found += [
            f"line {node.lineno}: {name}" for name in names if name.split(".")[0] == "kvbm" and name not in public
        ]
    return found
