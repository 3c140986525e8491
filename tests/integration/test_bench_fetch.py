"""`kvbm bench fetch` reads from an instance in another process, and measures only what came back as it was computed."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from kvbm.bench.bare_sockets import BareStreams
from kvbm.bench.fetch_sides import BenchReader, CpuTimes, Lender, start_lender
from kvbm.bench.lender import BUSY, IDLE
from kvbm.bench.memcpy import Memcpy, faster
from kvbm.bench.nixl_reads import open_nixl
from kvbm.bench.racks import bench_racks
from kvbm.cli import main
from kvbm.transport import nixl_process
from kvbm.workload.processes import ProcessError
from tests.eventually import eventually

BLOCKS, BLOCK_BYTES = 5, 4096
MEASURED = {"memory_over_memcpy", "memory_over_tcp", "tcp_over_sockets", "fetch_busy_over_idle", "lend_us"}
MEASURED |= {"memory_over_nixl", "tcp_over_nixl"}
KEYS = MEASURED | {"fetch_us_over_bare", "idle_connection_cpu_share", "tcp_link_share"}


class Lends(NamedTuple):
    folder: Path
    lender: Lender

    def reader(self) -> BenchReader:
        return BenchReader(self.lender, self.folder, BLOCKS, BLOCK_BYTES, 1)


@pytest.fixture(scope="module")
def lends(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lends]:
    folder = tmp_path_factory.mktemp("lends")
    with ExitStack() as opened:
        yield Lends(folder, start_lender(folder, BLOCKS, BLOCK_BYTES, 1, opened))


@pytest.mark.nightly
def test_fetches_are_measured_and_a_note_says_what_is_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bench.json"
    assert main(["bench", "fetch", "--samples", "2", "--read-mib", "3", "--json", str(path)]) == 0
    report = json.loads(path.read_bytes())
    assert set(report) - {"machine", "build", "load_average", "rows", "notes"} == KEYS
    assert all(report[key] > 0 for key in MEASURED) and (report["idle_connection_cpu_share"] or 0) >= 0
    assert math.isfinite(report["fetch_us_over_bare"])
    assert report["tcp_link_share"] is None or report["tcp_link_share"] > 0
    assert not list(Path("/run/netns").glob(f"kvbm-bench-{os.getpid()}-*")), "what the run made must be gone"
    printed = capsys.readouterr().out
    assert all(row["what"] in printed for row in report["rows"])
    assert all(f"goal {goal}" in printed for goal in ("≥ 0.70", "≥ 2", "≥ 0.80", "≥ 2.5", "≤ 60", "≤ 3", "≤ 40"))


@pytest.mark.parametrize(("user", "why"), [(1000, "take root, ip and tc"), (0, "ended with 3: not allowed here")])
def test_without_network_namespaces_a_note_says_so(
    user: int, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for tool in ("ip", "tc"):
        (tmp_path / tool).write_text("#!/bin/sh\necho not allowed here >&2\nexit 3\n")
        (tmp_path / tool).chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: user)
    with ExitStack() as opened:
        found = bench_racks(tmp_path, opened, 1, 2, 1)
    assert found.rows == [] and found.numbers == {"tcp_link_share": None}
    assert len(found.notes) == 1 and why in found.notes[0]


def test_without_nixl_a_note_says_so(lends: Lends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_process, "PACKAGES", ("nixl_of_nowhere",))
    with ExitStack() as opened:
        reads, notes = open_nixl(lends.lender, BLOCKS, BLOCK_BYTES, opened)
    assert reads == {} and len(notes) == 1 and "pip install 'kvbm-ledger[nixl]'" in notes[0]


@pytest.mark.parametrize("transport", ["memory", "tcp"])
def test_a_read_of_other_bytes_than_were_computed_ends_the_measurement(transport: str, tmp_path: Path) -> None:
    opened = ExitStack()
    lends = Lends(tmp_path, start_lender(tmp_path, BLOCKS, BLOCK_BYTES, 1, opened))  # one to spoil
    reader = lends.reader()
    try:
        assert reader.read_s(transport) > 0 and reader.read_one_s(transport, 3) > 0
        there = lends.lender.memory()
        with pytest.raises(ProcessError, match="moved other bytes"):
            reader.timed(lambda rows: rows.fill(1), there)
        reader._wanted[2, 7] ^= 1
        with pytest.raises(ProcessError, match="other bytes than the lender computed"):
            reader.read_s(transport)
        there[:] ^= 1
        with pytest.raises(ProcessError, match="of 1 blocks, 0 came"):
            reader.read_one_s(transport, 3)
    finally:
        reader.close()
        opened.close()


@pytest.mark.parametrize("is_tcp", [True, False])
def test_bare_sockets_and_memcpy_move_the_same_bytes(lends: Lends, is_tcp: bool) -> None:
    rows, there = np.zeros((BLOCKS, BLOCK_BYTES), dtype=np.uint8), lends.lender.memory()
    sockets, memcpy = BareStreams(lends.lender.bare, is_tcp, count=2), Memcpy(rows, there, BLOCK_BYTES, threads=2)
    try:
        for move in (sockets.pull, sockets.exchange, memcpy.shares, memcpy.blocks):
            rows.fill(0)
            move(rows)
            assert np.array_equal(rows.reshape(-1), there)
    finally:
        sockets.close()
        memcpy.close()
    assert faster([2.0, 3.0], [1.0, 1.0]) == ([2.0, 3.0], "whole shares")


def test_the_lenders_main_thread_computes_while_it_is_told_to(lends: Lends) -> None:
    word = BareStreams(lends.lender.bare, is_tcp=False, count=1)
    pid = lends.lender.pid

    def used_s() -> float:
        return float(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9

    def has_computed_since(begun_s: float) -> bool:
        return used_s() > begun_s + 0.05

    try:
        for _ in range(2):
            word.say(BUSY)
            eventually(partial(has_computed_since, used_s()), "the main thread computes nothing")
            word.say(IDLE)
    finally:
        word.close()


def test_cpu_time_counts_the_threads_that_serve(lends: Lends) -> None:
    listening = CpuTimes.of_lender(lends.lender.pid)
    reader = lends.reader()
    try:
        reader.read_s("tcp")
        serving = CpuTimes.of_lender(lends.lender.pid)
        assert listening is not None and serving is not None
        assert serving.threads > listening.threads > 0 and serving.cpu_s > listening.cpu_s
    finally:
        reader.close()
    assert CpuTimes.of_reader() is not None
    assert CpuTimes.of_lender(1 << 30) is None  # there is no such process


def test_a_lender_that_does_not_start_says_why(tmp_path: Path) -> None:
    with ExitStack() as opened, pytest.raises(ProcessError, match=r"did not lend anything .* block_bytes"):
        start_lender(tmp_path, BLOCKS, 0, 1, opened)
