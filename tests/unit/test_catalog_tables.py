"""Tables of answers on terminals of any width."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from kvbm.catalog_tables import Filled, Listing

NAMES = ("gpu-17.rack-3", "gpu-2")
REMARK = "suspect: something was lost on the way"


def shown(width: int, slots: int = 65536) -> list[str]:
    table = Listing(
        "instance",
        "state",
        *(f"#{tier} held / slots" for tier in ("HBM", "HOST", "NVME")),
        "#queued tokens",
        remark="remark",
    )
    table.add(
        NAMES[0], "stopping", Filled(32800, slots), Filled(123456, 16 * slots), Filled(3, 0), 123456, remark=REMARK
    )
    table.add(NAMES[1], "live", Filled(1, slots), Filled(2, 16 * slots), "", 0)
    console = Console(file=io.StringIO(), width=width, highlight=False)
    table.print(console)
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines() if line.strip()]


@pytest.mark.parametrize("width", [20, 60, 80, 100, 120, 160, 200])
def test_names_states_and_numbers_are_never_wrapped(width: int) -> None:
    lines = shown(width)
    rows = [re.split(r"\s{2,}", line.strip()) for line in lines if line.lstrip().startswith(NAMES)]
    assert [row[:2] for row in rows[:2]] == [[NAMES[0], "stopping"], [NAMES[1], "live"]]
    assert rows[0][2] in ("32800 / 65536", "32k / 65k") and rows[0][4] == "3 / ?"
    assert any(REMARK in line for line in lines)
    if width >= 80:
        assert max(map(len, lines)) <= width


def test_numbers_are_whole_where_they_have_room() -> None:
    assert any("123456 / 1048576" in line for line in shown(120))
    assert any("123k / 1.0M" in line for line in shown(60))


def test_a_text_is_wrapped_and_a_name_beside_it_is_not() -> None:
    table = Listing("namespace", "~fields")
    table.add("a" * 32, "my-model, v1, float32, 16 tokens, tp1, sha256, lora x")
    console = Console(file=io.StringIO(), width=60, highlight=False)
    table.print(console)
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= 60 and any("a" * 32 in line for line in lines)
    assert sum("lora" in line or "tp1" in line or "my-model" in line for line in lines) > 1
