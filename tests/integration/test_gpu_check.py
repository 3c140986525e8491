"""`tools/gpu_check.py` without a GPU: its shapes, budget, report and stand-ins, and that it notices what goes wrong.

`make gpu-check-dry` runs it.
"""

from __future__ import annotations

import ctypes
import importlib
import subprocess
import sys
import time
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.eventually import eventually
from tests.extras import needed

torch = needed("torch", "engine")

NAMES = ("budget", "copies", "devices", "first_token", "measure", "part", "report", "run", "shapes", "suite", "whole")


class Parts:
    """The modules of tools/gpu_parts, by name."""

    def __init__(self) -> None:
        for name in NAMES:
            setattr(self, name, importlib.import_module(f"gpu_parts.{name}"))

    def __getattr__(self, name: str) -> ModuleType:  # for those set above
        raise AttributeError(name)


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config) -> Parts:
    monkeypatch.syspath_prepend(str(pytestconfig.rootpath / "tools"))
    return Parts()


# -- shapes -----------------------------------------------------------------------------------------------------------


def test_blocks_and_states_have_the_bytes_that_follow_from_the_published_numbers(parts: Parts) -> None:
    blocks = {shape.name: shape.block_bytes for shape in parts.shapes.SHAPES}
    assert blocks == {
        "llama-3-8b": 32 * 2 * 8 * 128 * 16 * 2,
        "llama-3-70b-tp8": 80 * 2 * 1 * 128 * 16 * 2,
        "qwen3-32b": 64 * 2 * 8 * 128 * 16 * 2,
        "deepseek-v3-tp8": 61 * 576 * 64 * 2,
        "qwen3-next-80b": 12 * 2 * 2 * 256 * 544 * 2,
    }
    states = {shape.name: shape.states_bytes for shape in parts.shapes.SHAPES if shape.states_bytes}
    assert states == {"qwen3-next-80b": 36 * (32 * 128 * 128 + 3 * 8192) * 2}
    hybrid = parts.shapes.shape_of("qwen3-next-80b")
    assert hybrid.state_bytes <= hybrid.block_tokens * hybrid.token_bytes  # vLLM's pages of both are of one size
    assert hybrid.state_bytes > (hybrid.block_tokens - 16) * hybrid.token_bytes


def test_the_page_names_each_shape_with_its_bytes(parts: Parts, pytestconfig: pytest.Config) -> None:
    page = (pytestconfig.rootpath / "docs" / "gpu.md").read_text()
    for shape in parts.shapes.SHAPES:
        (line,) = [line for line in page.splitlines() if line.startswith(f"| {shape.title} |")]
        assert line.endswith(f"| {shape.block_tokens} | {shape.block_bytes:,} |")
        assert (f"{shape.states_bytes:,} B" in line) == bool(shape.states_bytes)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [  # published, less embedding and head; of a mixture, those that a token uses
        ("llama-3-8b", 8.03e9 - 2 * 128256 * 4096),
        ("llama-3-70b-tp8", 70.55e9 - 2 * 128256 * 8192),
        ("qwen3-32b", 31.2e9),
        ("qwen3-next-80b", 3.2e9),
    ],
)
def test_a_token_is_computed_with_as_many_parameters_as_the_model_has(
    parts: Parts, name: str, parameters: float
) -> None:
    shape = parts.shapes.shape_of(name)
    ours = shape.ranks * sum(layer.alike * sum(wide * out for wide, out in layer.products) for layer in shape.layers)
    assert ours == pytest.approx(parameters, rel=0.01)


def test_a_small_shape_has_every_kind_of_layer_and_state_of_its_model(parts: Parts) -> None:
    for shape in parts.shapes.SHAPES:
        small = shape.small()
        assert len(small.layers) == len(shape.layers)
        assert [bool(layer.attention) for layer in small.layers] == [bool(layer.attention) for layer in shape.layers]
        assert bool(small.states_bytes) == bool(shape.states_bytes)
        assert small.parts == shape.parts
        run = parts.copies.SMALL.run_tokens
        assert small.blocks(run) * small.block_bytes < 1 << 20
        assert all(tokens % run == 0 for tokens in parts.first_token.SMALL.lengths)


# -- time -------------------------------------------------------------------------------------------------------------


def test_parts_share_the_time_by_weight_and_what_one_leaves_goes_to_the_next(parts: Parts) -> None:
    budget = parts.budget
    until = 1000.0 + budget.RESERVE_S
    plan = budget.Budget([budget.Share("a", 2.0), budget.Share("b", 1.0), budget.Share("c", 1.0)], until)
    assert plan.turn("a", 0.0).forced_s == pytest.approx(500.0)
    assert plan.turn("b", 100.0).forced_s == pytest.approx(450.0)  # a took 100 s of its 500
    last = plan.turn("c", 550.0)
    assert last.forced_s == pytest.approx(450.0)
    assert last.asked_s == pytest.approx(450.0 - budget.GRACE_S)


def test_parts_that_take_all_their_time_end_with_a_reserve_for_the_report(parts: Parts) -> None:
    budget = parts.budget
    plan, now = budget.Budget(parts.run.SHARES, 480.0), 25.0
    for share in parts.run.SHARES:
        now += plan.turn(share.name, now).forced_s
    assert now == pytest.approx(480.0 - budget.RESERVE_S)


def test_a_part_that_has_no_time_is_left_out(parts: Parts) -> None:
    budget = parts.budget
    plan = budget.Budget([budget.Share("a", 1.0), budget.Share("b", 1.0)], 100.0)
    assert plan.turn("a", 80.0) is None
    with pytest.raises(ValueError, match="b is next"):
        plan.turn("c", 81.0)


# -- numbers ----------------------------------------------------------------------------------------------------------


def test_a_number_is_a_median_with_half_the_distance_of_the_quartiles(parts: Parts) -> None:
    assert parts.report.measured([8.0, 9.0, 10.0, 11.0, 12.0]) == parts.report.Measured(10.0, 0.15, 5)
    assert parts.report.measured([3.0]) == parts.report.Measured(3.0, None, 1)
    for nonsense in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="no measurement"):
            parts.report.measured([1.0, nonsense])


def report_of(parts: Parts, /, **changed: Any) -> Any:
    report = parts.report
    one = report.Measured(50.0, 0.02, 5)
    copy = report.CopyRow(
        shape="llama-3-8b",
        direction="HBM to HOST",
        way="kvbm kernel",
        run_bytes=1 << 30,
        pieces=16384,
        gb_per_s=one,
        on_device_gb_per_s=52.0,
        of_one_copy=0.97,
        of_link=0.79,
        sms=132,
        product_slowdown=report.Measured(1.25, 0.01, 5),
    )
    first = report.FirstTokenRow(
        shape="llama-3-8b",
        tokens=8192,
        copied_bytes=1 << 30,
        copy_ms=one,
        step_ms=one,
        from_host_ms=100.0,
        computed_ms=report.Measured(400.0, 0.01, 3),
        times=4.0,
    )
    wait = report.WaitRow(shape="llama-3-8b", what="acquire of 8 blocks", number=one, unit="ms")
    tests = report.TestsRun(selected=128, passed=128, failed=0, skipped=0, seconds=60.0, reasons={}, failures=[])
    fields: dict[str, Any] = {
        "version": report.VERSION,
        "dry_run": False,
        "kvbm": "0.1.0",
        "commit": "abc",
        "began": "2026-01-01T00:00:00Z",
        "seconds": 300.0,
        "machine": None,
        "tests": tests,
        "parts": [report.PartRun(name="tests", outcome="done", seconds=60.0, troubles=[])],
        "copies": [copy],
        "first_tokens": [first],
        "waits": [wait],
    }
    return report.Report(**(fields | changed))


def test_a_report_reads_back_and_nothing_else_passes_for_one(parts: Parts) -> None:
    report = report_of(parts)
    text = parts.report.encode(report)
    assert parts.report.decode(text) == report
    plain = msgspec.json.decode(text)
    for wrong in (
        plain | {"version": 1},
        plain | {"extra": 1},
        {key: value for key, value in plain.items() if key != "tests"},
        plain | {"waits": [plain["waits"][0] | {"number": {"value": 0.0, "spread": None, "samples": 1}}]},
        plain | {"copies": [plain["copies"][0] | {"gb_per_s": {"value": -1.0, "spread": None, "samples": 1}}]},
    ):
        with pytest.raises(ValueError, match=r"version|extra|tests|no measurement"):
            parts.report.decode(msgspec.json.encode(wrong))


def test_what_failed_was_cut_or_skipped_on_a_gpu_keeps_a_check_from_success(parts: Parts) -> None:
    report = parts.report
    assert report.wrong(report_of(parts)) == []
    failed = report.PartRun(name="qwen3-32b", outcome="failed", seconds=9.0, troubles=["device: out of memory"])
    left_out = report.PartRun(name="llama-3-8b", outcome="left out", seconds=0.0, troubles=[])
    assert report.wrong(report_of(parts, parts=[failed, left_out])) == [
        "qwen3-32b: device: out of memory",
        "llama-3-8b: left out",
    ]
    skipping = report.TestsRun(
        selected=128, passed=4, failed=0, skipped=124, seconds=1.0, reasons={"no CUDA device here": 124}, failures=[]
    )
    assert "124 were skipped: no CUDA device here" in report.wrong(report_of(parts, tests=skipping))[0]
    assert report.wrong(report_of(parts, tests=skipping, dry_run=True)) == []
    assert report.wrong(report_of(parts, tests=None)) == ["tests: no result"]


def test_the_table_has_each_row_and_says_when_it_is_no_gpus(parts: Parts) -> None:
    table = parts.report.table(report_of(parts))
    assert "| llama-3-8b: HBM to HOST, kvbm kernel, 1,024 MiB in 16,384 | 50.0 ± 2 % GB/s |" in table
    assert (
        "0.97 of one copy; 0.79 of the link; 52.0 GB/s on the device; at most 132 SMs; matrix products × 1.25 ± 1 %"
        in table
    )
    assert "| llama-3-8b: first token, 8,192 tokens from HOST | 100.0 ms" in table
    assert "| llama-3-8b, a whole manager: acquire of 8 blocks | 50.00 ± 2 % ms | |" in table
    assert "Dry run" not in table
    assert "no GPU's numbers" in parts.report.table(report_of(parts, dry_run=True))
    assert all(line.count("|") == 4 for line in table.splitlines())


# -- what is asked of the driver, the profiler and pytest -------------------------------------------------------------


def batch_of(parts: Parts, source: np.ndarray, target: np.ndarray, pieces: list[tuple[int, int, int]]) -> Any:
    columns = zip(*pieces, strict=True)
    to, out_of, sizes = (np.array(column, dtype=np.uint64) for column in columns)
    return parts.devices.Batch(to + np.uint64(target.ctypes.data), out_of + np.uint64(source.ctypes.data), sizes)


class Driver:
    """CUDA's driver, whose batches are copied by the CPU's stand-in."""

    def __init__(self, call: Any) -> None:
        self.call, self.asked = call, (b"", 0)

    def cuGetProcAddress_v2(self, name: bytes, entry: Any, version: Any, flags: Any, found: Any) -> int:
        self.asked = (name, version.value)
        entry._obj.value = ctypes.cast(self.call, ctypes.c_void_p).value
        return 0


def test_a_batch_moves_each_piece_by_the_entry_point_that_the_driver_names(parts: Parts) -> None:
    source, target = np.arange(32, dtype=np.uint8), np.zeros(32, dtype=np.uint8)
    driver = Driver(parts.devices.CpuDevice()._call)
    call = parts.devices._batch_call(driver)
    assert driver.asked == (b"cuMemcpyBatchAsync", 12080)
    pieces = batch_of(parts, source, target, [(0, 8, 4), (10, 0, 2), (31, 31, 1)])
    parts.devices.call_batch(call, pieces, parts.devices.IN_STREAM_ORDER, 7)
    wanted = np.zeros(32, dtype=np.uint8)
    wanted[0:4], wanted[10:12], wanted[31] = source[8:12], source[0:2], source[31]
    assert (target == wanted).all()
    with pytest.raises(RuntimeError, match="of 3 copies answers 1"):
        parts.devices.call_batch(call, pieces, 9, 7)


def test_a_profile_counts_time_once_and_multiprocessors_by_the_widest_launch(parts: Parts) -> None:
    def event(kind: str, begin: float, took: float, **args: Any) -> dict[str, Any]:
        return {"ph": "X", "cat": kind, "ts": begin, "dur": took, "args": args}

    trace = {
        "traceEvents": [
            event("gpu_memcpy", 0.0, 10.0),
            event("kernel", 5.0, 10.0, grid=[4, 2, 1]),
            event("kernel", 30.0, 5.0, grid=[3, 1, 1]),
            event("cpu_op", 0.0, 99.0),
        ]
    }
    assert parts.devices.profile_of(trace, 132) == parts.devices.Profile(20e-6, 8)
    assert parts.devices.profile_of(trace, 4).sms == 4
    copies_alone = {"traceEvents": trace["traceEvents"][:1]}
    assert parts.devices.profile_of(copies_alone, 132) == parts.devices.Profile(10e-6, 0)
    assert parts.devices.profile_of({"traceEvents": trace["traceEvents"][3:]}, 132) is None


def test_a_links_rate_follows_from_generation_and_width(parts: Parts) -> None:
    assert parts.devices.link_of("5, 16").words == "PCIe 5 x16"
    assert parts.devices.link_of("5, 16").gb_per_s == pytest.approx(63.0, abs=0.1)
    for unknown in ("[N/A], [N/A]", "", "No such file", "9, 16"):
        assert parts.devices.link_of(unknown).gb_per_s is None


def test_results_of_pytest_are_counted_with_their_reasons(parts: Parts) -> None:
    text = (
        '<testsuites><testsuite><testcase classname="a" name="one"/>'
        '<testcase classname="a" name="two"><skipped message="no CUDA device here"/></testcase>'
        '<testcase classname="a" name="three"><failure message="bytes&#10;differ">long</failure></testcase>'
        '<testcase classname="a" name="four"><error message="setup"/></testcase></testsuite></testsuites>'
    )
    found = parts.suite.results_of(text, 1.0)
    assert (found.selected, found.passed, found.failed, found.skipped) == (4, 1, 2, 1)
    assert found.reasons == {"no CUDA device here": 1}
    assert found.failures == ["a.three: bytes differ", "a.four: setup"]


def test_the_files_with_marked_tests_are_found_where_they_are(parts: Parts, pytestconfig: pytest.Config) -> None:
    found = parts.suite.marked_files(pytestconfig.rootpath)
    assert {"tests/conformance/test_pools.py", "tests/conformance/test_paged_layouts.py"} <= set(found)


# -- measuring, on the stand-in ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama-3-8b", "deepseek-v3-tp8", "qwen3-next-80b"])
def test_every_way_is_measured_in_both_directions_once_its_bytes_are_right(
    parts: Parts, tmp_path: Path, name: str
) -> None:
    shape, device = parts.shapes.shape_of(name).small(), parts.devices.CpuDevice()
    steps = parts.part.Steps(tmp_path / "found.json", time.time() + 10_000)
    with ExitStack() as opened:
        moves = parts.copies.Moves(shape, device, parts.copies.SMALL, opened)
        parts.copies.rates(device, moves, steps)
        found = parts.part.read(tmp_path / "found.json")
        assert found.troubles == []
        rows = [(row.direction, row.way) for row in found.copies]
        ways = ["one copy", *moves.ways()]
        assert rows == [(direction, way) for direction in ("HBM to HOST", "HOST to HBM") for way in ways]
        assert len(set(rows)) == len(rows) > 10
        states = shape.states_bytes
        assert {row.run_bytes for row in found.copies} == {shape.blocks(128) * shape.block_bytes + states}


def test_what_an_engine_waits_for_is_measured_by_a_whole_manager(parts: Parts, tmp_path: Path) -> None:
    steps = parts.part.Steps(tmp_path / "found.json", time.time() + 600.0)
    shape = parts.shapes.shape_of("llama-3-8b").small()
    parts.whole.waits(shape, parts.devices.CpuDevice(), parts.whole.SMALL, steps)
    assert steps.found.troubles == [] and steps.found.cut == []
    assert [row.what for row in steps.found.waits] == [
        "first acquire over the second",
        "offload of 128 tokens, from create until HOST has all",
        "acquire of 128 tokens from HOST",
        "offload of 256 tokens, from create until HOST has all",
        "acquire of 256 tokens from HOST",
        "acquire and offload of 128 tokens at once, together",
        "acquire of 8 blocks",
        "acquire of 8 blocks behind 0 s of unrelated work",
    ]


def test_blocks_that_do_not_come_are_told(parts: Parts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = parts.part.Steps(tmp_path / "found.json", time.time() + 600.0)
    monkeypatch.setattr(parts.whole.Engine, "store", lambda self, hashes: 1.0)
    shape = parts.shapes.shape_of("llama-3-8b").small()
    parts.whole.waits(shape, parts.devices.CpuDevice(), parts.whole.SMALL, steps)
    assert steps.found.troubles[0] == "first acquire: RuntimeError: 0 of 8 blocks came"
    assert len(steps.found.troubles) == 5 and not steps.found.waits


def test_a_way_that_leaves_bytes_where_they_were_is_found_and_not_measured(parts: Parts, tmp_path: Path) -> None:
    shape, device = parts.shapes.shape_of("llama-3-8b").small(), parts.devices.CpuDevice()
    steps = parts.part.Steps(tmp_path / "found.json", time.time() + 10_000)
    with ExitStack() as opened:
        moves = parts.copies.Moves(shape, device, parts.copies.SMALL, opened)
        pool = moves.regions[0].pool("torch")
        pool.write = lambda *given: None  # type: ignore[method-assign]
        parts.copies.rates(device, moves, steps)
    assert steps.found.troubles == [
        "kvbm torch: bytes compared: RuntimeError: kvbm torch: 2 tensors came back with other bytes"
    ]
    assert "kvbm torch" not in {row.way for row in steps.found.copies}
    assert "kvbm auto" in {row.way for row in steps.found.copies}


def test_a_run_that_fails_beside_matrix_products_is_told(parts: Parts) -> None:
    def move() -> None:
        raise RuntimeError("CUDA error: an illegal memory access")

    with pytest.raises(RuntimeError, match="illegal memory access"):
        parts.copies.slowdown(parts.devices.CpuDevice(), parts.copies.SMALL, move)


def test_a_step_attends_to_all_tokens_and_a_prompt_to_those_before(parts: Parts) -> None:
    device = parts.devices.CpuDevice()
    for name in ("llama-3-8b", "deepseek-v3-tp8"):
        layer = parts.shapes.shape_of(name).small().layers[0]
        for rows in (4, 64):
            attended = parts.first_token.layer_work(layer, device, rows, 64)()
            assert attended.numel() % (layer.attention.heads * rows) == 0
            assert bool(attended.isfinite().all())


@pytest.mark.parametrize("tokens", [8192, 131072])
def test_at_full_size_everything_fits_together_and_into_the_gpu(parts: Parts, tokens: int) -> None:
    """On torch's meta device, whose tensors have sizes and no memory."""
    device = parts.devices.CpuDevice()
    device.torch_device = torch.device("meta")
    for shape in parts.shapes.SHAPES:
        for layer in shape.layers:
            for rows in (tokens, shape.block_tokens):
                held: list[Any] = []
                attended = layer_on_meta(parts, layer, device, (rows, tokens), held)
                attention = layer.attention
                wide = attention.dim if attention else layer.products[-1][1]
                if attention and attention.latent and rows < tokens:
                    wide = attention.latent
                assert attended.shape[-1] == wide
                assert sum(tensor.nbytes for tensor in held) < 30 << 30  # docs/gpu.md says 48 GiB, with outputs and KV


def layer_on_meta(parts: Parts, layer: Any, device: Any, sizes: tuple[int, int], held: list[Any]) -> Any:
    make = parts.first_token._random

    def random(where: Any, *shape: int) -> Any:
        held.append(make(where, *shape))
        return held[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts.first_token, "_random", random)
        patch.setattr(parts.first_token, "sdpa_kernel", lambda backends: nullcontext())  # meta tensors have no backend
        return parts.first_token.layer_work(layer, device, *sizes)()


def test_a_block_of_the_tensors_has_the_bytes_that_its_shape_says(parts: Parts) -> None:
    from kvbm.pools.hbm.paged import paged_layout

    device = parts.devices.CpuDevice()
    for shape in parts.shapes.SHAPES:
        layout = paged_layout(parts.copies.kv_tensors(shape, 2, device))
        assert layout.block_bytes == shape.block_bytes
        assert len(layout.segments.sizes) == shape.kv_layers  # as an engine queues it: one copy a layer
        if shape.state_layers:
            assert paged_layout(parts.copies._states(shape, 2, device)).block_bytes == shape.states_bytes


# -- CUDA's part, on what stands in for torch.cuda -------------------------------------------------------------------


class Stream:
    """As a CUDA stream, with a handle."""

    def __init__(self, cuda: Cuda, handle: int) -> None:
        self.cuda, self.cuda_stream = cuda, handle

    def __enter__(self) -> None:
        self.before, self.cuda.current = self.cuda.current, self

    def __exit__(self, *exc: object) -> None:
        self.cuda.current = self.before


class Event:
    """As a CUDA event: passed when its stream was when it was recorded."""

    def __init__(self, cuda: Cuda, enable_timing: bool) -> None:
        self.cuda, self.timing = cuda, enable_timing

    def record(self) -> None:
        self.stream, self.at_ms = self.cuda.current, self.cuda.now_ms

    def synchronize(self) -> None:
        self.cuda.waited.append(self.stream)

    def elapsed_time(self, end: Event) -> float:
        assert self.timing and end.timing and self.stream is end.stream
        return end.at_ms - self.at_ms


class Cuda:
    """What `CudaDevice` asks of torch.cuda. The driver's batches are copied by the CPU's stand-in."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.current, self.now_ms, self.waited = Stream(self, 0), 0.0, []
        self.made = 0
        cuda = torch.cuda
        patch.setattr(cuda, "is_available", lambda: True)
        patch.setattr(cuda, "init", lambda: None)
        properties = SimpleNamespace(name="NVIDIA H100 80GB HBM3", multi_processor_count=132)
        patch.setattr(cuda, "get_device_properties", lambda device: properties)
        patch.setattr(cuda, "synchronize", lambda: self.waited.append(None))
        patch.setattr(cuda, "Stream", lambda device: self.stream())
        patch.setattr(cuda, "stream", lambda stream: stream)
        patch.setattr(cuda, "current_stream", lambda device: self.current)
        patch.setattr(cuda, "Event", lambda enable_timing: Event(self, enable_timing))

    def stream(self) -> Stream:
        self.made += 1
        return Stream(self, 100 + self.made)


def test_work_on_a_gpu_is_timed_by_its_streams_own_events(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(monkeypatch)
    device = parts.devices.CudaDevice()
    assert (device.name, device.sms, str(device.torch_device)) == ("NVIDIA H100 80GB HBM3", 132, "cuda:0")

    def work() -> None:
        cuda.now_ms += 250.0

    for _ in range(40):  # torch has 32 streams, which it hands out in turn
        with device.beside():
            beside = cuda.current
            assert device.timed(work) == pytest.approx(0.25)
        with device.beside(1):
            assert cuda.current is not beside
    assert cuda.made == 2
    assert {stream.cuda_stream for stream in cuda.waited} == {101}


def test_a_batch_goes_to_the_stream_of_its_thread(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    Cuda(monkeypatch)
    device, streams = parts.devices.CudaDevice(), []
    driver = Driver(parts.devices.CpuDevice()._call)
    monkeypatch.setattr(parts.devices.ctypes, "CDLL", lambda name: {"libcuda.so.1": driver}[name])
    call = parts.devices.call_batch
    monkeypatch.setattr(
        parts.devices,
        "call_batch",
        lambda entry, copies, order, stream: streams.append((order, stream)) or call(entry, copies, order, stream),
    )
    source, target = np.arange(8, dtype=np.uint8), np.zeros(8, dtype=np.uint8)
    for to_device in (True, False):
        with device.beside(1):
            device.batch(batch_of(parts, source, target, [(4 * to_device, 4 * to_device, 4)]), to_device)
    assert (target == source).all()
    assert streams == [(parts.devices.AT_ANY_TIME, 102), (parts.devices.IN_STREAM_ORDER, 102)]


def test_attention_is_the_quickest_that_takes_the_sizes(parts: Parts) -> None:
    device, took_s = parts.devices.CpuDevice(), {}
    flash, efficient, cudnn = parts.first_token.FUSED

    def attend(backend: Any) -> None:
        if backend not in took_s:
            raise RuntimeError("No available kernel")

    device.timed = lambda work: took_s[work.args[0]]
    took_s |= {flash: 2.0, cudnn: 1.0}
    assert parts.first_token.quickest(attend, device) is cudnn
    took_s[efficient] = 0.5
    assert parts.first_token.quickest(attend, device) is efficient
    took_s.clear()
    with pytest.raises(RuntimeError, match="FLASH_ATTENTION: No available kernel; EFFICIENT_ATTENTION"):
        parts.first_token.quickest(attend, device)


# -- parts ------------------------------------------------------------------------------------------------------------


def test_a_step_that_fails_is_noted_and_the_others_go_on_until_the_time_is_up(parts: Parts, tmp_path: Path) -> None:
    file, done = tmp_path / "found.json", []

    def fail() -> None:
        raise RuntimeError("CUDA error: out of memory")

    steps = parts.part.Steps(file, time.time() + 10_000)
    assert not steps.step("first", fail)
    assert steps.step("second", lambda: done.append(2))
    assert parts.part.read(file).troubles == ["first: RuntimeError: CUDA error: out of memory"]
    late = parts.part.Steps(file, time.time() - 1)
    assert not late.step("third", lambda: done.append(3))
    assert parts.part.read(file).cut == ["third"]
    assert done == [2]


def program_at(folder: Path, text: str) -> Path:
    """A folder whose `gpu_parts.measure` is this program."""
    package = folder / "tools" / "gpu_parts"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "measure.py").write_text(text)
    return folder


def test_a_part_that_hangs_is_ended_and_what_it_had_written_counts(
    parts: Parts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its time begins here once it has written, however long this machine takes to start a program."""
    wait, there, program = subprocess.Popen.wait, tmp_path / "there", "import pathlib, sys, time\n"
    program += (
        f'pathlib.Path(sys.argv[2]).write_text(\'{{"cut": ["b"]}}\'); pathlib.Path({str(there)!r}).touch(); '
        "time.sleep(600)\n"
    )
    folder = program_at(tmp_path, program)

    def wait_once_it_has_written(process: subprocess.Popen[str], timeout: float | None = None) -> int:
        eventually(there.exists, "it does not write")
        return wait(process, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", wait_once_it_has_written)
    went, found = parts.run.run_part("a", parts.budget.Turn(1.0, 1.0), folder, True)
    assert (went.outcome, went.troubles) == ("cut", ["not reached: b", "it was ended by force"])
    assert found.cut == ["b"]


@pytest.mark.parametrize(
    ("program", "words"),
    [("raise SystemExit('no GPU today')", "returned 1: no GPU today"), ("import os; os.abort()", "returned -6")],
)
def test_a_part_whose_process_dies_has_failed_with_its_last_words(
    parts: Parts, tmp_path: Path, program: str, words: str
) -> None:
    went, found = parts.run.run_part("a", parts.budget.Turn(500.0, 500.0), program_at(tmp_path, program), True)
    assert went.outcome == "failed"
    assert words in went.troubles[0]
    assert found == parts.report.Found()


def test_without_wheels_a_sentence_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(pytestconfig.rootpath / "tools"))
    gpu_check = importlib.import_module("gpu_check")
    assert gpu_check.main(["--wheels", str(tmp_path)]) == 1
    assert "holds no wheel of kvbm; run: make gpu-pack" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        gpu_check.main(["--dry-run", "--only", "llama-4"])
    assert "no part llama-4; parts are tests, manager, llama-3-8b," in capsys.readouterr().err


def test_without_a_wheel_of_kvbm_nothing_is_packed(
    parts: Parts, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.import_module("gpu_parts.pack"), "ROOT", tmp_path)
    assert importlib.import_module("gpu_check").main(["--pack", "--work", str(tmp_path)]) == 1
    assert "there should be one; run: make wheels" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_on_a_machine_without_a_gpu_the_whole_of_it_ends_with_a_report_that_says_so(
    parts: Parts, pytestconfig: pytest.Config, tmp_path: Path
) -> None:
    """In an environment of its own over this Python's packages, which has all that the wheels would bring."""
    if torch.cuda.is_available():
        pytest.skip("a GPU is here, and would be measured")
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / "kvbm_ledger-0.0.1-py3-none-any.whl").touch()
    ended = subprocess.run(
        [sys.executable, "tools/gpu_check.py", "--work", str(tmp_path), "--only", "llama-3-8b"],
        cwd=pytestconfig.rootpath,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert ended.returncode == 1, ended.stderr
    report = parts.report.decode((tmp_path / "report.json").read_bytes())
    assert not report.dry_run
    assert [(part.name, part.outcome) for part in report.parts] == [("llama-3-8b", "failed")]
    assert report.parts[0].troubles == [
        "device: RuntimeError: torch sees no CUDA device; use --dry-run on a machine without one"
    ]
    assert "| llama-3-8b | **failed** after" in ended.stdout
    assert (tmp_path / "environment" / "bin" / "python").exists()
