"""The GPU as the measurements use it, and a CPU that stands in for it in a dry run."""

from __future__ import annotations

import ctypes
import json
import math
import platform
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

# As vLLM asks for it: the entry point of CUDA 12.8, which still has `failIdx`.
BATCH_VERSION = 12080
BATCH_CALL = ctypes.CFUNCTYPE(
    ctypes.c_int,  # CUresult
    ctypes.c_void_p,  # dsts
    ctypes.c_void_p,  # srcs
    ctypes.c_void_p,  # sizes
    ctypes.c_size_t,  # count
    ctypes.c_void_p,  # attrs
    ctypes.c_void_p,  # attrsIdxs
    ctypes.c_size_t,  # numAttrs
    ctypes.c_void_p,  # failIdx
    ctypes.c_void_p,  # hStream
)
IN_STREAM_ORDER, AT_ANY_TIME = 1, 3  # CUmemcpySrcAccessOrder: when the source may be read
_LANE_GB_PER_S = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}  # of PCIe, each way, after its line code


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_uint), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    _fields_ = (("order", ctypes.c_uint), ("source", _Location), ("target", _Location), ("flags", ctypes.c_uint))


class Batch(NamedTuple):
    """Copies that are queued by one call: addresses and bytes, uint64 each."""

    targets: np.ndarray
    sources: np.ndarray
    sizes: np.ndarray


class Profile(NamedTuple):
    """What a device did for some work.

    `busy_s`: while at least one kernel or copy ran. `sms`: that the widest launch reaches.
    """

    busy_s: float
    sms: int


class Link(NamedTuple):
    """How the device hangs on the host. `gb_per_s` is None where nobody says."""

    words: str
    gb_per_s: float | None


class Device(Protocol):
    """What is measured on."""

    torch_device: torch.device
    name: str
    sms: int

    def settle(self) -> None:
        """Wait until nothing is under way."""

    def beside(self, which: int = 0) -> AbstractContextManager[Any]:
        """Work of this thread goes to another stream than the default one: to one of two, the same each time."""

    def timed(self, work: Callable[[], object]) -> float:
        """Seconds on the device from the beginning to the end of what `work` queues on the current stream."""

    def batch(self, copies: Batch, to_device: bool) -> None:
        """Queue copies on the current stream, which is one of `beside`. Raises RuntimeError: the driver refuses."""

    def profile(self, work: Callable[[], object]) -> Profile | None:
        """Do it once more, and see what the device does; None: the profiler saw nothing."""

    def link(self) -> Link:
        """To the host."""

    def driver(self) -> str:
        """Its version, or ""."""


class CudaDevice:
    """The first GPU."""

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise RuntimeError("torch sees no CUDA device; use --dry-run on a machine without one")
        torch.cuda.init()  # type: ignore[no-untyped-call]
        properties = torch.cuda.get_device_properties(0)
        self.torch_device = torch.device("cuda", 0)
        self.name = str(properties.name)
        self.sms = int(properties.multi_processor_count)
        # torch hands out 32 streams in turn: made for each use, one would be a stream of a pool's lanes before long
        self._streams: list[Any] = []
        for _ in range(2):
            self._streams.append(torch.cuda.Stream(self.torch_device))  # type: ignore[no-untyped-call]
        self._call: Any = None

    def settle(self) -> None:
        """As `Device.settle`."""
        torch.cuda.synchronize()

    def beside(self, which: int = 0) -> AbstractContextManager[Any]:
        """As `Device.beside`."""
        context: AbstractContextManager[Any] = torch.cuda.stream(self._streams[which])
        return context

    def timed(self, work: Callable[[], object]) -> float:
        """As `Device.timed`."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        work()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    def batch(self, copies: Batch, to_device: bool) -> None:
        """As `Device.batch`."""
        if self._call is None:
            self._call = _batch_call(ctypes.CDLL("libcuda.so.1"))
        stream = int(torch.cuda.current_stream(self.torch_device).cuda_stream)
        call_batch(self._call, copies, AT_ANY_TIME if to_device else IN_STREAM_ORDER, stream)

    def profile(self, work: Callable[[], object]) -> Profile | None:
        """As `Device.profile`."""
        return _profiled(work, self.sms, [torch.profiler.ProfilerActivity.CUDA], self.settle)

    def link(self) -> Link:
        """As `Device.link`."""
        return link_of(_nvidia_smi("pcie.link.gen.max,pcie.link.width.max"))

    def driver(self) -> str:
        """As `Device.driver`."""
        return _nvidia_smi("driver_version")


class CpuDevice:
    """The host's own memory and cores in place of a GPU's. What is queued is over at once."""

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")
        self.name = f"CPU ({platform.machine()})"
        self.sms = 1
        self._call = BATCH_CALL(_copy_at_once)

    def settle(self) -> None:
        """As `Device.settle`."""

    def beside(self, which: int = 0) -> AbstractContextManager[Any]:
        """As `Device.beside`."""
        return nullcontext()

    def timed(self, work: Callable[[], object]) -> float:
        """As `Device.timed`."""
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin

    def batch(self, copies: Batch, to_device: bool) -> None:
        """As `Device.batch`."""
        call_batch(self._call, copies, AT_ANY_TIME if to_device else IN_STREAM_ORDER, 1)

    def profile(self, work: Callable[[], object]) -> Profile | None:
        """As `Device.profile`: a CPU's profile has no kernel in it."""
        return _profiled(work, self.sms, [torch.profiler.ProfilerActivity.CPU], self.settle)

    def link(self) -> Link:
        """As `Device.link`."""
        return Link("none", None)

    def driver(self) -> str:
        """As `Device.driver`."""
        return ""


def call_batch(call: Callable[..., int], copies: Batch, order: int, stream: int) -> None:
    """One call of cuMemcpyBatchAsync, or of what stands in for it. Raises RuntimeError: it returned an error."""
    attributes = _Attributes(order=order)
    first = ctypes.c_size_t(0)  # the attributes count from the first copy on
    failed = ctypes.c_size_t(0)
    answer = call(
        copies.targets.ctypes.data,
        copies.sources.ctypes.data,
        copies.sizes.ctypes.data,
        len(copies.sizes),
        ctypes.addressof(attributes),
        ctypes.addressof(first),
        1,
        ctypes.addressof(failed),
        stream,
    )
    if answer:
        raise RuntimeError(f"cuMemcpyBatchAsync of {len(copies.sizes)} copies answers {answer} at copy {failed.value}")


def link_of(answer: str) -> Link:
    """From nvidia-smi's generation and width of PCIe, such as "5, 16"."""
    try:
        generation, lanes = (int(part) for part in answer.split(","))
    except ValueError:
        return Link(f"unknown ({answer})", None)
    lane = _LANE_GB_PER_S.get(generation)
    return Link(f"PCIe {generation} x{lanes}", None if lane is None else lane * lanes)


def profile_of(trace: dict[str, Any], sms: int) -> Profile | None:
    """From a trace as torch's profiler exports it: events of kernels and copies, with `ts` and `dur` in µs.

    None: it has no such event.
    """
    spans: list[tuple[float, float]] = []
    widest = 0
    for event in trace.get("traceEvents", []):
        kind = event.get("cat")
        if event.get("ph") != "X" or kind not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        spans.append((float(event["ts"]), float(event["ts"]) + float(event["dur"])))
        if kind == "kernel":
            widest = max(widest, math.prod(event.get("args", {}).get("grid", [sms])))
    return Profile(_covered(spans) / 1e6, min(widest, sms)) if spans else None


def _covered(spans: Sequence[tuple[float, float]]) -> float:
    covered, reached = 0.0, -math.inf
    for begin, end in sorted(spans):
        covered += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return covered


def _profiled(
    work: Callable[[], object], sms: int, activities: list[Any], settle: Callable[[], None]
) -> Profile | None:
    settle()
    with torch.profiler.profile(activities=activities) as profiler:
        work()
        settle()
    with tempfile.TemporaryDirectory(prefix="kvbm-trace-") as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return profile_of(json.loads(path.read_bytes()), sms)


def _batch_call(driver: ctypes.CDLL) -> Any:
    entry, found = ctypes.c_void_p(0), ctypes.c_int(0)
    answer = driver.cuGetProcAddress_v2(
        b"cuMemcpyBatchAsync",
        ctypes.byref(entry),
        ctypes.c_int(BATCH_VERSION),
        ctypes.c_uint64(0),
        ctypes.byref(found),
    )
    if answer or not entry.value:
        raise RuntimeError(f"the driver has no cuMemcpyBatchAsync: cuGetProcAddress answers {answer}, {found.value}")
    return BATCH_CALL(entry.value)


def _copy_at_once(
    targets: int,
    sources: int,
    sizes: int,
    count: int,
    attributes: int,
    first: int,
    attribute_count: int,
    failed: int,
    stream: int,
) -> int:
    """cuMemcpyBatchAsync's stand-in: 0, or 1 (CUDA_ERROR_INVALID_VALUE) for attributes that it would refuse."""
    order = ctypes.c_uint.from_address(attributes).value
    if order not in (IN_STREAM_ORDER, AT_ANY_TIME) or attribute_count != 1 or not stream:
        return 1
    columns = ((ctypes.c_uint64 * count).from_address(column) for column in (targets, sources, sizes))
    for target, source, size in zip(*columns, strict=True):
        ctypes.memmove(target, source, size)
    return 0


def _nvidia_smi(what: str) -> str:
    """What it says of the first GPU, or why it says nothing."""
    try:
        asked = subprocess.run(
            ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader,nounits", "--id=0"],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return (asked.stdout or asked.stderr).strip()
