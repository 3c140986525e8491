"""Tables of answers on terminals of any width."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from kvbm.catalog_tables import Filled, Listing, size_words, tenant_table
from kvbm.core.overview import PoolTotals, TenantColumns, TenantsTold

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


def test_sizes_are_in_the_largest_unit_that_fits() -> None:
    sizes = (0, 1023, 1024, 1536, (1 << 20) - 1, 1 << 30, 5 << 40, 3 << 50, 1 << 70)
    words = ["0 B", "1023 B", "1.0 KiB", "1.5 KiB", "1024.0 KiB", "1.0 GiB", "5.0 TiB", "3.0 PiB", "1048576.0 PiB"]
    assert [size_words(size) for size in sizes] == words


@pytest.mark.parametrize("width", [80, 120, 200])
def test_tenants_stand_beside_their_limits_and_what_nobody_knows_is_left_open(width: int) -> None:
    none: list[int | None] = [None, None]
    columns = TenantColumns(
        tenant=["acme", ""],
        namespaces=[3, 1],
        instances=[12, 2],
        blocks=[3_000_000, 1_000_000],
        held=[3 << 40, None],
        put_raw=[0, 0],
        put_stored=[0, 0],
        quota=[2 << 40, None],
        host_quota=[64 << 30, None],
        nvme_quota=none,
        prompts=none,
        asked=none,
        found=none,
        more=5,
    )
    told = TenantsTold(tenants=columns, pools=[PoolTotals(pool="s3://b", blocks=4_000_000, bytes=None)])
    console = Console(file=io.StringIO(), width=width, highlight=False)
    table, more = tenant_table(told)
    assert isinstance(table, Listing) and more == "5 more tenants have less"
    table.print(console)
    assert isinstance(console.file, io.StringIO)
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
    (acme,) = [line for line in lines if line.startswith(" acme")]
    (none_line,) = [line for line in lines if line.startswith(" (none)")]
    for words in ("3.0 TiB", "75.0 %", "2.0 TiB", "150.0 %", "64.0 GiB"):
        assert words in acme
    assert " ? " in none_line and none_line.endswith("25.0 %")
    assert any("above its quota" in line for line in lines)
