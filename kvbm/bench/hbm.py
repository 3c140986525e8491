"""The HBM part of `kvbm bench pools`: runs between an engine's tensors and a HOST pool, beside a plain copy of as many
bytes, in turn.

On a GPU the limit is one asynchronous copy of contiguous bytes to or from pinned memory (cudaMemcpyAsync); there and on
a CPU the other comparison is what an engine without us writes: one torch copy for each layer of each block. Ours
compute checksums on the way.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvbm.assembly import NATIVE, NATIVE_ARENA, RowCopier, device_rings, segment_copies
from kvbm.bench.measure import Row, row_of
from kvbm.core.ids import HASH_BYTES, Epoch, NamespaceId
from kvbm.pools.base import Proof, ReadOutcome
from kvbm.pools.hbm.paged import PagedTensor
from kvbm.pools.hbm.pool import HbmPool
from kvbm.pools.host.pool import HostPool

if TYPE_CHECKING:
    import torch

RUN_BLOCKS = 32
_DIMS = ("kv", "slots", "tokens", "heads", "dim")  # one tensor a layer, as vLLM has them
_NAMESPACE = NamespaceId(bytes(16))


class HbmOptions(NamedTuple):
    """Whose KV is moved.

    Attributes:
        slots: blocks the engine's tensors hold, and the HOST pool; at least RUN_BLOCKS.
        device: "cuda", "cpu", or "auto": CUDA when there is one.
    """

    layers: int = 32
    tokens: int = 16
    heads: int = 8
    dim: int = 128
    slots: int = 128
    device: str = "auto"


def bench_hbm(pairs: int, seed: int, options: HbmOptions | None = None) -> tuple[list[Row], dict[str, float]]:
    """Rows in MB/s and ratios, and the numbers that have names: `hbm_read_over_copies` and `hbm_write_over_copies`, and
    on a GPU `hbm_read_over_memcpy` and `hbm_write_over_memcpy`, of the best way there is.

    Raises: MissingExtraError: no torch.
    """
    options = options or HbmOptions()
    with ExitStack() as opened:
        bench = _Bench(options, seed, opened)
        return bench.run(pairs)


class _Bench:
    """The tensors, the pools over them, and ways to move a run."""

    def __init__(self, options: HbmOptions, seed: int, opened: ExitStack) -> None:
        from kvbm.core.errors import MissingExtraError

        try:
            import torch
        except ModuleNotFoundError as error:
            raise MissingExtraError("torch", "engine") from error
        self.on_gpu = torch.cuda.is_available() and options.device != "cpu"
        self.device = torch.device("cuda" if self.on_gpu else "cpu")
        shape = (2, options.slots, options.tokens, options.heads, options.dim)
        self.tensors = [torch.randn(shape, device=self.device).to(torch.bfloat16) for _ in range(options.layers)]
        layers = [[PagedTensor(tensor, _DIMS)] for tensor in self.tensors]
        copier = RowCopier(0)
        native = segment_copies(copier)
        ways = _ways() if self.on_gpu else ["auto"]
        rings = device_rings(copier)
        self.pools = {way: HbmPool.of_layers(layers, NATIVE.checksums, native, way, rings) for way in ways}
        for pool in self.pools.values():
            opened.callback(pool.close)
        self.block_bytes = next(iter(self.pools.values())).block_bytes
        self.host = HostPool(options.slots, self.block_bytes, NATIVE_ARENA, copier)
        opened.callback(self.host.close)
        memory = self.host.memory
        assert memory is not None
        self.rows = memory
        self.words = (
            f"{options.layers} layers, blocks of {self.block_bytes / (1 << 20):g} MiB, runs of {RUN_BLOCKS}, "
            f"{self.device.type}"
            + (", pinned" if self.host.pinned else ", not pinned" if self.on_gpu else f", {copier.threads} threads")
        )
        rng = np.random.default_rng(seed)
        self.slots = rng.permutation(options.slots)[:RUN_BLOCKS].tolist()
        self.at = rng.permutation(options.slots)[:RUN_BLOCKS].tolist()
        self.proof = Proof(_NAMESPACE, Epoch(1), bytes(RUN_BLOCKS * HASH_BYTES), np.zeros(RUN_BLOCKS, dtype=np.uint32))

    def run(self, pairs: int) -> tuple[list[Row], dict[str, float]]:
        rows: list[Row] = []
        numbers: dict[str, float] = {}
        for name, ours, copies, memcpy in (
            ("read", self._read, self._copies_out, self._memcpy(True)),
            ("write", self._write, self._copies_in, self._memcpy(False)),
        ):
            works: dict[str, Callable[[], object]] = {way: _with(ours, pool) for way, pool in self.pools.items()}
            others: dict[str, Callable[[], object]] = {"copies": copies} | ({"memcpy": memcpy} if self.on_gpu else {})
            rates = self._rates(works | others, pairs)
            for what in works:
                rows.append(row_of(f"HBM {name}s{self._named(what)}, {self.words}", "MB/s", rates[what]))
            rows.append(row_of(f"HBM {name}s by one torch copy a layer and block", "MB/s", rates["copies"]))
            if self.on_gpu:
                rows.append(row_of(f"HBM {name}s of contiguous bytes (cudaMemcpyAsync)", "MB/s", rates["memcpy"]))
            for other in others:
                for what in works:
                    ratios = [mine / its for mine, its in zip(rates[what], rates[other], strict=True)]
                    row = row_of(f"HBM {name}s{self._named(what)} over {other}", "", ratios)
                    rows.append(row)
                    key = f"hbm_{name}_over_{other}"
                    numbers[key] = max(numbers.get(key, 0.0), row.value)
        return rows, numbers

    def _rates(self, works: dict[str, Callable[[], object]], pairs: int) -> dict[str, list[float]]:
        """Bytes a second of each, one after the other in turn; the first turn is the warm-up."""
        rates: dict[str, list[float]] = {name: [] for name in works}
        for turn in range(pairs + 1):
            for name, work in works.items():
                self._settle()
                begin = time.perf_counter()
                work()
                if turn:
                    rates[name].append(RUN_BLOCKS * self.block_bytes / (time.perf_counter() - begin) / 1e6)
        return rates

    def _named(self, way: str) -> str:
        return "" if way == "auto" else f' by "{way}"'

    def _settle(self) -> None:
        if self.on_gpu:
            import torch

            torch.cuda.synchronize()

    def _read(self, pool: HbmPool) -> None:
        result = pool.read(self.slots, _NAMESPACE, self.proof.hashes, self.rows, self.at)
        assert result.outcomes == [ReadOutcome.GOOD] * RUN_BLOCKS

    def _write(self, pool: HbmPool) -> None:
        pool.write(self.slots, self.rows, self.proof, self.at)

    def _pieces(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Of each block and layer, what the engine has and the row's piece for it."""
        import torch

        whole = torch.from_numpy(self.rows)
        pieces = []
        for slot, row in zip(self.slots, self.at, strict=True):
            begin = 0
            for tensor in self.tensors:
                there = tensor[:, slot]
                end = begin + there.numel() * there.element_size()
                pieces.append((there, whole[row, begin:end].view(tensor.dtype).view(there.shape)))
                begin = end
        return pieces

    def _copies_out(self) -> None:
        for there, here in self._pieces():
            here.copy_(there, non_blocking=True)
        self._settle()

    def _copies_in(self) -> None:
        for there, here in self._pieces():
            there.copy_(here, non_blocking=True)
        self._settle()

    def _memcpy(self, out: bool) -> Callable[[], object]:
        import torch

        there = torch.empty((RUN_BLOCKS, self.block_bytes), dtype=torch.uint8, device=self.device)
        here = torch.from_numpy(self.rows)[:RUN_BLOCKS]

        def copy() -> None:
            if out:
                here.copy_(there, non_blocking=True)
            else:
                there.copy_(here, non_blocking=True)
            self._settle()

        return copy


def _ways() -> list[str]:
    import importlib.util

    return (
        ["ring", "kernel", "batch", "memcpy", "torch"]
        if importlib.util.find_spec("triton")
        else ["ring", "batch", "torch"]
    )


def _with(move: Callable[[HbmPool], None], pool: HbmPool) -> Callable[[], object]:
    return lambda: move(pool)
