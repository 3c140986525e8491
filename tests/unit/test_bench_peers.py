"""Our side of the comparison with peers does what it is measured for."""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

import pytest


class Sides(NamedTuple):
    measure: ModuleType
    ours: ModuleType
    workload: ModuleType


@pytest.fixture
def sides(monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config) -> Sides:
    monkeypatch.syspath_prepend(str(pytestconfig.rootpath / "tools"))
    from peers import measure, ours, workload

    return Sides(measure, ours, workload)


@pytest.mark.parametrize("form", ["runs", "cut", "singles", "alone"])
def test_every_form_of_a_step_leaves_the_live_set_the_digests_speak_of(sides: Sides, form: str) -> None:
    bench = sides.measure.DirectoryBench(sides.ours.OurDirectory())
    assert bench.fill(live=4096)["blocks"] == 4096
    bench.prepare(steps=20, form=form)  # more than the live set: all of it is replaced
    assert bench.apply()["units"] == 20 * 512 * 7 / 8  # the index compares every frame's digest and raises


def test_the_shared_chains_are_found_as_deep_as_they_were_told(sides: Sides) -> None:
    directory = sides.ours.OurDirectory()
    bench = sides.measure.DirectoryBench(directory)
    assert bench.share(live=8192)["blocks"] > 4096  # raises when an answer is wrong
    assert len(bench.query(count=5, seed=1)["us"]) == 5
    with pytest.raises(ValueError, match="the answer says"):
        bench._check(1 << 20)  # a chain nobody holds


def test_a_step_of_the_pool_finds_the_run_it_uses_again(sides: Sides) -> None:
    pool = sides.ours.OurPool()
    for run in range(4):
        pool.live(pool.prepare(sides.workload.Life(None, run, 16)))
    pool.live(pool.prepare(sides.workload.Life(2, 4, 16)))
    pool.settle()
    pool._hashes[9] = bytes(256)
    with pytest.raises(LookupError, match="evicted too early"):
        pool.live(pool.prepare(sides.workload.Life(9, 5, 16)))
