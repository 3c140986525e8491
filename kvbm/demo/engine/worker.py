"""The demo's engine as a process: JSON lines in, JSON lines out. `kvbm engine` runs it; `kvbm demo` drives two.

In, one object a line:
    {"op": "submit", "id": "r1", "tokens": [..], "max_new_tokens": 16, "reuse": true}
    {"op": "settle"}   answer when no offload waits or runs
    {"op": "clear"}    evict every unpinned block from HBM, so that the next hit comes from a colder tier
    {"op": "take_snapshot"}  take a snapshot of what is held, as a snapshot
    {"op": "status"}   offsets, digest, counters
    {"op": "stop"}     or the end of the input
Out: {"event": "ready" | "finished" | "done" | "status" | "error" | "stopped", …}.
"""

from __future__ import annotations

import hashlib
import os
import queue
import sys
import threading
from pathlib import Path
from typing import IO, Any

import msgspec

from kvbm.assembly import open_manager
from kvbm.config import Settings
from kvbm.core.errors import ConfigError, KvbmError
from kvbm.core.ids import Namespace, Tier
from kvbm.core.layout import KvShape
from kvbm.demo.engine.engine import Engine
from kvbm.demo.engine.requests import Finished, Request
from kvbm.demo.engine.weights import ModelShape, Weights
from kvbm.manager.owned_hbm import Manager
from kvbm.terminal import say_error
from kvbm.weights import weights_digest

_READ_BYTES = 1 << 16


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The model a worker runs and how.

    Attributes:
        weights_path: file written by `Weights.save`; "" takes random weights from `seed`.
        threads: torch threads.
    """

    shape: ModelShape = ModelShape(
        vocab=2048, layers=6, width=512, heads=8, kv_heads=2, head_dim=32, ffn_width=1536, max_tokens=4096
    )
    seed: int = 15
    weights_path: str = ""
    block_tokens: int = 16
    max_batch: int = 4
    prefill_chunk_tokens: int = 256
    threads: int = 1

    def kv_shape(self) -> KvShape:
        """The shape of one block."""
        shape = self.shape
        return KvShape(shape.layers, self.block_tokens, shape.kv_heads, shape.head_dim, shape.dtype)

    def namespace(self) -> Namespace:
        """Where its blocks belong: the weights decide. Raises ConfigError as `weights_digest`."""
        if self.weights_path:
            revision = weights_digest(self.weights_path)
        else:  # what random weights are made from
            made_from = hashlib.sha256(msgspec.json.encode((self.shape, self.seed), order="sorted")).hexdigest()
            revision = f"seed-{self.seed}-{made_from[:16]}"
        return Namespace(
            model="kvbm-reference",
            revision=revision,
            block_tokens=self.block_tokens,
            kv_dtype=self.shape.dtype,
            layout=self.kv_shape().describe(),
        )


class EngineWorker:
    """One manager and two engines on it: one reuses blocks, one recomputes everything, for comparison."""

    def __init__(self, settings: Settings, worker: WorkerSettings, out: IO[str]) -> None:
        import torch

        torch.set_num_threads(worker.threads)
        self._out = out
        self._namespace = worker.namespace()
        weights = (
            Weights.load(Path(worker.weights_path))
            if worker.weights_path
            else Weights.random(worker.shape, worker.seed)
        )
        if worker.namespace() != self._namespace:
            raise ConfigError(f"weights in {worker.weights_path} changed while they were read; start again")
        self.manager: Manager = open_manager(
            settings, [self._namespace], worker.kv_shape().block_bytes, engine="reference"
        )
        weights = weights.to(self.manager.hbm.tensor.device)
        self._engines = {
            reuse: Engine(
                weights,
                self.manager,
                self._namespace.id,
                self._namespace.root(),
                worker.block_tokens,
                worker.max_batch,
                worker.prefill_chunk_tokens,
                reuse=reuse,
            )
            for reuse in (True, False)
        }
        self._recovered = {tier.name: len(self.manager.held(tier)) for tier in self.manager.pools.slots}
        self._reuse: dict[str, bool] = {}

    def run(self, commands: queue.SimpleQueue[bytes | None]) -> None:
        """Serve commands, one JSON object a line, until "stop" or None."""
        self._say(
            event="ready",
            instance=self.manager.instance,
            epoch=self.manager.epoch,
            namespace=self._namespace.id.hex(),
            recovered=self._recovered,
        )
        going_on = True
        while going_on:
            going_on = self._take_commands(commands)
            for engine in self._engines.values():
                if not engine.idle:
                    for finished in engine.step():
                        self._finish(finished)
            self._report_load()
        self.manager.close()
        self._say(event="stopped", applied=self.manager.applied())

    def _take_commands(self, commands: queue.SimpleQueue[bytes | None]) -> bool:
        """Carry out what has been asked; waits for a command only while there is nothing to compute."""
        block = all(engine.idle for engine in self._engines.values())
        while True:
            try:
                line = commands.get(block, timeout=0.2)
            except queue.Empty:
                return True
            if line is None or not self._obey(line):
                return False
            block = False

    def _obey(self, line: bytes) -> bool:
        """Carry out one command; one that cannot be used is answered and changes nothing. False: it says to stop."""
        try:
            command = msgspec.json.decode(line, type=dict[str, Any])
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            self._say(event="error", message=f"a command is one JSON object a line; this line is none: {error}")
            return True
        if command.get("op") == "stop":
            return False
        try:
            self._carry_out(command)
        except KeyError as error:
            self._say(event="error", message=f"command {command.get('op')!r} lacks {error}")
        except (msgspec.ValidationError, TypeError, ValueError, OverflowError, KvbmError) as error:
            self._say(event="error", message=f"command {command.get('op')!r} cannot be used: {error}")
        return True

    def _carry_out(self, command: dict[str, Any]) -> None:
        match command["op"]:
            case "submit":
                reuse = bool(command.get("reuse", True))
                tokens = msgspec.convert(command["tokens"], list[int])
                request = Request(str(command["id"]), tokens, int(command["max_new_tokens"]))
                self._reuse[request.id] = reuse
                self._engines[reuse].submit(request)
            case "settle":
                self._say(event="done", op="settle", settled=self.manager.settle(float(command.get("timeout_s", 20.0))))
            case "clear":
                self._say(
                    event="done",
                    op="clear",
                    evicted=self.manager.evict(Tier.HBM, b"".join(self.manager.held(Tier.HBM))),
                )
            case "take_snapshot":
                self.manager.take_snapshot()
                self._say(event="done", op="take_snapshot")
            case "status":
                self._say(event="status", **self.status())
            case other:
                known = "submit, settle, clear, take_snapshot, status, stop"
                self._say(event="error", message=f"there is no command {other!r}; use one of {known}")

    def status(self) -> dict[str, Any]:
        """Offsets, digest and counters, as plain values."""
        manager = self.manager
        offset, digest = manager.digest()
        published = manager.published()
        stats = manager.stats()
        return {
            "instance": manager.instance,
            "epoch": manager.epoch,
            "applied": offset,
            "durable": manager.durable(),
            "published": {"epoch": published.epoch, "offset": published.offset},
            "digest": f"{digest:016x}",
            "hits": {tier.name: count for tier, count in stats.hit_blocks.items()},
            "peer_hits": stats.peer_hits,
            "offloaded": {tier.name: count for tier, count in stats.offloaded_blocks.items()},
            "held": {tier.name: counts.held for tier, counts in stats.pools.items()},
            "created_blocks": stats.created_blocks,
            "corrupt_blocks": stats.corrupt_blocks,
            "verified_reads": stats.verified_reads,
            "failed_copies": stats.failed_copies,
            "late_copies": stats.late_copies,
            "skipped_offloads": stats.skipped_offloads,
            "skipped": {why.value: count for why, count in stats.skipped.items()},
            "late_slots": stats.late_slots,
            "quarantined_slots": stats.quarantined_slots,
        }

    def _finish(self, finished: Finished) -> None:
        self._say(
            event="finished",
            id=finished.id,
            tokens=finished.new_tokens,
            ttft_s=finished.ttft_s,
            queued_s=finished.queued_s,
            prompt_blocks=finished.prompt_blocks,
            hits={tier.name: count for tier, count in finished.hits.items()},
            smallest_margin=finished.smallest_margin,
            preemptions=finished.preemptions,
            reuse=self._reuse.pop(finished.id, True),
            failed=str(finished.failed) if finished.failed else None,
        )

    def _report_load(self) -> None:
        queued = sum(engine.queued_tokens for engine in self._engines.values())
        running = sum(engine.running_requests for engine in self._engines.values())
        meter = self._engines[True].meter
        self.manager.report_load(queued, running, meter.prefill_tokens_per_s, meter.queue_tokens_per_s)

    def _say(self, **fields: Any) -> None:
        self._out.write(msgspec.json.encode(fields).decode() + "\n")
        self._out.flush()


def main(settings: Settings, worker: WorkerSettings) -> int:
    """Serve on standard input and output until told to stop.

    Returns 2 with one sentence on standard error when it cannot start.
    """
    try:
        served = EngineWorker(settings, worker, sys.stdout)
    except KvbmError as error:
        say_error("kvbm engine", error)
        return 2
    commands: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    threading.Thread(
        target=_read_commands, args=(sys.stdin.fileno(), commands), name="kvbm-commands", daemon=True
    ).start()
    served.run(commands)
    return 0


def _read_commands(descriptor: int, commands: queue.SimpleQueue[bytes | None]) -> None:
    """Lines as they come, then None.

    Reads the descriptor, because a thread inside sys.stdin aborts the process at its end.
    """
    rest = b""
    while piece := os.read(descriptor, _READ_BYTES):
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.strip():
                commands.put(line)
    if rest.strip():
        commands.put(rest)
    commands.put(None)
