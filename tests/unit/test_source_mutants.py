"""The deliberate defects fit the code they are to damage, and the tests that are to notice them are there.

Whether they do notice is asked by `tools/mutants.py`, which `make faults` runs for those that need no compiler.
"""

from __future__ import annotations

import re

import pytest

from tests.faults.source_mutants import ROOT, SOURCE_MUTANTS


@pytest.mark.parametrize("name", SOURCE_MUTANTS)
def test_a_defect_fits_the_code_and_its_test_is_there(name: str) -> None:
    mutant = SOURCE_MUTANTS[name]
    text = (ROOT / mutant.file).read_text()
    assert mutant.patched(text) != text
    if mutant.file.endswith(".py"):
        compile(mutant.patched(text), mutant.file, "exec")
    file, _, case = mutant.test.partition("::")
    assert mutant.is_native == file.startswith("native/tests/") and (not case) == mutant.is_native
    tests = (ROOT / file).read_text()
    assert mutant.is_native or re.search(rf"^(async )?def {case}\(", tests, re.MULTILINE)


def test_the_table_of_verdicts_has_every_defect() -> None:
    named = re.findall(r"^\| `(\w+)` \|", (ROOT / "tests/faults/README.md").read_text(), re.MULTILINE)
    assert named == list(SOURCE_MUTANTS)
