"""A whole manager over a model's tensors: what an engine waits for that acquires and offloads, and what its graphs and
streams see of it.
"""

from __future__ import annotations

import hashlib
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

import kvbm
from gpu_parts.copies import kv_tensors
from gpu_parts.devices import Device
from gpu_parts.part import Steps
from gpu_parts.report import WaitRow, measured
from gpu_parts.shapes import Shape
from kvbm.core.ids import NO_PARENT, Tier

_WAIT_S = 60.0
_POLL_S = 0.0002
_CYCLES = 100_000_000  # of the GPU, to find out how long one takes


class WholePlan(NamedTuple):
    """How much is moved.

    Attributes:
        lengths: of prompts, in tokens. samples: of each number, after one that warms up.
        few: blocks of a short run. busy_s: how long unrelated work goes on that a short run is asked for behind.
        captures: of graphs, beside copies.
    """

    lengths: tuple[int, ...] = (8192, 32768, 131072)
    samples: int = 3
    few: int = 8
    busy_s: float = 0.3
    captures: int = 12


SMALL = WholePlan(lengths=(128, 256), samples=2, busy_s=0.0, captures=2)


class Engine:
    """What an engine does with a manager: it has prompts of its own, and fills their blocks."""

    def __init__(self, shape: Shape, device: Device, plan: WholePlan, opened: ExitStack) -> None:
        self.device = device
        self.shape, self._prompts = shape, 0
        blocks = shape.blocks(2 * plan.lengths[-2]) + shape.blocks(plan.lengths[-1]) + plan.few
        layers = kv_tensors(shape, blocks, device)
        self.tensors = [
            tensor for layer in layers for paged in layer if isinstance(tensor := paged.tensor, torch.Tensor)
        ]
        layout = kvbm.paged_layout(layers)
        self.block_bytes = layout.block_bytes
        self.namespace = kvbm.Namespace(
            model=shape.name, revision="r", block_tokens=shape.block_tokens, layout=layout.layout
        )
        folder = opened.enter_context(tempfile.TemporaryDirectory(prefix="kvbm-gpu-check-"))
        flags: dict[str, Any] = {
            "instance.data_dir": str(Path(folder) / "data"),
            "pools.host.slots": blocks,
            "nats.enabled": False,
            "offload.host": "write_through",
        }
        settings = kvbm.load_settings(flags=flags)
        opened_manager = kvbm.open_manager(settings, [self.namespace], self.block_bytes, layers=layers)
        self.manager = opened.enter_context(opened_manager)

    def prompt(self, blocks: int) -> bytes:
        """Hashes of a prompt that nobody has asked for."""
        self._prompts += 1
        words = (f"{self._prompts} {number}".encode() for number in range(blocks))
        return b"".join(hashlib.sha256(word).digest()[:16] for word in words)

    def compute(self, hashes: bytes) -> list[int]:
        """Its blocks are in HBM, and were created."""
        slots = self.manager.allocate(len(hashes) // 16)
        if slots is None:
            raise RuntimeError(f"HBM has no room for {len(hashes) // 16} blocks")
        self.manager.create(self.namespace.id, NO_PARENT, 0, hashes, slots)
        return slots

    def store(self, hashes: bytes) -> float:
        """Compute, and seconds until all of it is in HOST."""
        self.device.settle()
        wanted = self._in_host() + len(hashes) // 16
        begin = time.perf_counter()
        slots = self.compute(hashes)
        while self._in_host() < wanted:
            if time.perf_counter() > begin + _WAIT_S:
                raise RuntimeError(f"{len(hashes) // 16} blocks were not stored within {_WAIT_S:g} s")
            time.sleep(_POLL_S)
        took_s = time.perf_counter() - begin
        self.manager.unpin(slots)
        self.manager.evict(Tier.HBM, hashes)
        return took_s

    def _in_host(self) -> int:
        """Blocks brought there so far."""
        return self.manager.stats().offloaded_blocks.get(Tier.HOST, 0)

    def load(self, hashes: bytes) -> float:
        """Seconds of an acquire of blocks that HOST alone holds; they leave HBM again."""
        self.device.settle()
        begin = time.perf_counter()
        prefix = self.manager.acquire(self.namespace.id, hashes, _WAIT_S)
        took_s = time.perf_counter() - begin
        self.manager.unpin(prefix.slots)
        if prefix.depth != len(hashes) // 16:
            raise RuntimeError(f"{prefix.depth} of {len(hashes) // 16} blocks came")
        self.manager.evict(Tier.HBM, hashes)
        return took_s

    def forget(self, hashes: bytes) -> None:
        """They leave HOST."""
        self.manager.evict(Tier.HOST, hashes)


def waits(shape: Shape, device: Device, plan: WholePlan, steps: Steps) -> None:
    """Rows of what an engine waits for, into the part's findings."""
    with ExitStack() as opened:
        engines: list[Engine] = []
        if not steps.step("manager", lambda: engines.append(Engine(shape, device, plan, opened))):
            return
        (engine,) = engines

        def add(what: str, values: Sequence[float], unit: str) -> None:
            steps.found.waits.append(WaitRow(shape=shape.name, what=what, number=measured(values), unit=unit))

        steps.step("first acquire", lambda: _first(engine, plan, add))
        for tokens in plan.lengths:
            steps.step(f"{tokens} tokens", partial(_length, engine, plan, tokens, add))
        steps.step("both directions", lambda: _both(engine, plan, add))
        steps.step("a few blocks", lambda: _few(engine, plan, add))
        if torch.cuda.is_available():
            steps.step("captures", lambda: _captures(engine, plan, add))


Add = Callable[[str, Sequence[float], str], None]


def _first(engine: Engine, plan: WholePlan, add: Add) -> None:
    """The first acquire of a process and the second, of as many blocks."""
    hashes = engine.prompt(engine.shape.blocks(plan.lengths[0]))
    engine.store(hashes)
    first, second = engine.load(hashes), engine.load(hashes)
    engine.forget(hashes)
    add("first acquire over the second", [first / second], "")


def _length(engine: Engine, plan: WholePlan, tokens: int, add: Add) -> None:
    blocks = engine.shape.blocks(tokens)
    stored, loaded = [], []
    for turn in range(plan.samples + 1):
        hashes = engine.prompt(blocks)
        times = engine.store(hashes), engine.load(hashes)
        engine.forget(hashes)
        if turn:
            stored.append(blocks * engine.block_bytes / times[0] / 1e9)
            loaded.append(blocks * engine.block_bytes / times[1] / 1e9)
    add(f"offload of {tokens:,} tokens, from create until HOST has all", stored, "GB/s")
    add(f"acquire of {tokens:,} tokens from HOST", loaded, "GB/s")


def _both(engine: Engine, plan: WholePlan, add: Add) -> None:
    """A prompt comes while another is stored."""
    blocks = engine.shape.blocks(plan.lengths[-2])
    rates = []
    for turn in range(plan.samples + 1):
        there, fresh = engine.prompt(blocks), engine.prompt(blocks)
        engine.store(there)
        ends: list[float | Exception] = []
        loading = threading.Thread(target=_load_into, args=(engine, there, ends))
        begin = time.perf_counter()
        loading.start()
        engine.store(fresh)
        loading.join(_WAIT_S)
        took_s = time.perf_counter() - begin
        if not ends or isinstance(ends[0], Exception):
            raise RuntimeError(f"what was loaded beside a store has not come: {ends}")
        engine.forget(there)
        engine.forget(fresh)
        if turn:
            rates.append(2 * blocks * engine.block_bytes / took_s / 1e9)
    add(f"acquire and offload of {plan.lengths[-2]:,} tokens at once, together", rates, "GB/s")


def _load_into(engine: Engine, hashes: bytes, ends: list[float | Exception]) -> None:
    try:
        ends.append(engine.load(hashes))
    except Exception as error:  # noqa: BLE001  it is raised where the thread is waited for
        ends.append(error)


def _few(engine: Engine, plan: WholePlan, add: Add) -> None:
    """A few blocks, where nothing else is queued, and behind unrelated work on the default stream."""
    hashes = engine.prompt(plan.few)
    engine.store(hashes)
    idle, busy, cycles = [], [], 0
    if torch.cuda.is_available():
        slept_s = engine.device.timed(lambda: torch.cuda._sleep(_CYCLES))  # type: ignore[no-untyped-call]
        cycles = int(plan.busy_s * _CYCLES / slept_s)
    for turn in range(plan.samples + 1):
        one = engine.load(hashes)
        engine.device.settle()
        if cycles:
            torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
        begin = time.perf_counter()
        prefix = engine.manager.acquire(engine.namespace.id, hashes, _WAIT_S)
        other = time.perf_counter() - begin
        engine.device.settle()
        engine.manager.unpin(prefix.slots)
        engine.manager.evict(Tier.HBM, hashes)
        if turn:
            idle.append(one * 1e3)
            busy.append(other * 1e3)
    engine.forget(hashes)
    add(f"acquire of {plan.few} blocks", idle, "ms")
    add(f"acquire of {plan.few} blocks behind {plan.busy_s:g} s of unrelated work", busy, "ms")


def _captures(engine: Engine, plan: WholePlan, add: Add) -> None:
    """Graphs captured in torch's default mode while blocks are loaded again and again.

    Raises RuntimeError: one failed.
    """
    hashes = engine.prompt(engine.shape.blocks(plan.lengths[0]))
    engine.store(hashes)
    values = torch.randn((256, 256), device=engine.device.torch_device)
    _ = values @ values  # cuBLAS opens itself at the first product
    stop, runs, why = threading.Event(), [0], list[str]()

    def copy() -> None:
        try:
            while not stop.is_set():
                prefix = engine.manager.acquire(engine.namespace.id, hashes, _WAIT_S)
                if prefix.depth != len(hashes) // 16:
                    raise RuntimeError(f"{prefix.depth} of {len(hashes) // 16} blocks came")
                engine.manager.unpin(prefix.slots)
                engine.manager.evict(Tier.HBM, hashes)
                runs[0] += 1
        except Exception as error:  # noqa: BLE001  it is raised below
            why.append(f"{type(error).__name__}: {error}")

    copying = threading.Thread(target=copy, daemon=True)
    copying.start()
    try:
        for _ in range(plan.captures):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                result = values
                for _ in range(500):
                    result = result @ values
    finally:
        stop.set()
        copying.join(_WAIT_S)
    engine.forget(hashes)
    if why:
        raise RuntimeError(f"a copy beside captures failed: {why[0]}")
    add("runs loaded while graphs were captured, none of either failed", [float(max(1, runs[0]))], "runs")
