"""The HBM part of `kvbm bench pools`, on tensors of a CPU."""

from __future__ import annotations

from kvbm.bench.hbm import RUN_BLOCKS, HbmOptions, bench_hbm


def test_on_a_cpu_runs_are_measured_against_one_copy_a_layer_and_block() -> None:
    options = HbmOptions(layers=3, tokens=2, heads=2, dim=8, slots=RUN_BLOCKS + 3, device="cpu")
    rows, numbers = bench_hbm(2, 1, options)
    assert set(numbers) == {"hbm_read_over_copies", "hbm_write_over_copies"}
    assert all(row.value > 0 for row in rows)
    assert [row.unit for row in rows] == 2 * ["MB/s", "MB/s", ""]
