"""The whole line of `kvbm bench bridge`: an engine's publisher, the bridge, a nats-server and a catalog, each a process
but for the publisher, over real sockets.

Between two publications the catalog is asked without a pause, so an answer is late by at most one question.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from kvbm.bench.measure import Found, Row, percentile, until
from kvbm.core.hashing import sequence_hashes
from kvbm.core.ids import UNKNOWN, Namespace
from kvbm.locate.http import CatalogClient
from kvbm.streams.child import python
from kvbm.streams.server import EmbeddedServer
from kvbm.workload.processes import Child, free_port, start_catalog

_BLOCKS, _BLOCK_TOKENS = 32, 16
_PUBLISHED = 100  # batches for each sample asked for
_WAIT_S = 60.0
_PAUSE_S = 0.005
_NAME = "engine"
_SPACE = Namespace(
    model="bench",
    block_tokens=_BLOCK_TOKENS,
    revision=UNKNOWN,
    kv_dtype=UNKNOWN,
    layout=UNKNOWN,
    ranks=UNKNOWN,
)


class _Engine:
    """Publishes as vLLM does; nothing is lost here, so it sends nothing again."""

    def __init__(self) -> None:
        import zmq

        self.port, self._sequence = free_port(), 0
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUB)
        self._socket.set_hwm(100_000)
        self._socket.bind(f"tcp://127.0.0.1:{self.port}")

    def publish(self, tokens: list[int]) -> None:
        """A batch of blocks of one prompt."""
        first = self._sequence * _BLOCKS
        event = {
            "type": "BlockStored",
            "block_hashes": list(range(first, first + _BLOCKS)),
            "parent_block_hash": None,
            "token_ids": tokens,
            "block_size": _BLOCK_TOKENS,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "extra_keys": [None] * _BLOCKS,
            "group_idx": 0,
        }
        data = msgspec.msgpack.encode([time.time(), [event], 0])
        self._socket.send_multipart((b"", self._sequence.to_bytes(8, "big"), data))
        self._sequence += 1

    def close(self) -> None:
        """End its sockets."""
        self._context.destroy(0)


def bench_bridge_line(samples: int, seed: int) -> Found:
    """From an engine's publish to the catalog's answer over HTTP."""
    rng, lags_ms = np.random.default_rng(seed), []
    with tempfile.TemporaryDirectory(prefix="kvbm-bench-") as name, ExitStack() as opened:
        folder = Path(name)
        server = EmbeddedServer.start(folder / "nats")
        opened.callback(server.stop)
        client = start_catalog(folder / "catalog", server.url, opened)
        engine = _Engine()
        opened.callback(engine.close)
        source = {"endpoint": f"tcp://127.0.0.1:{engine.port}", "model": _SPACE.model}
        config = folder / "bridge.toml"
        fields = "\n".join(f"{key} = {json.dumps(value)}" for key, value in source.items())
        config.write_text(f"[nats]\nurl = {json.dumps(server.url)}\n[bridge.sources.{_NAME}]\n{fields}\n")
        bridge = Child("bridge", python("-m", "kvbm", "bridge", "--config", str(config)), folder / "logs")
        opened.callback(bridge.stop)

        def is_heard() -> bool:
            tokens, hashes = _prompt(rng)
            engine.publish(tokens)  # until the bridge subscribes, what is published is gone
            time.sleep(0.1)
            return _is_told(client, hashes)

        until(is_heard, "the bridge does not hear the engine", _WAIT_S, 0.1)
        for _ in range(samples * _PUBLISHED):
            tokens, hashes = _prompt(rng)
            began_s = time.perf_counter()
            engine.publish(tokens)
            until(partial(_is_told, client, hashes), "a batch is not told", _WAIT_S, 0.0)
            lags_ms.append((time.perf_counter() - began_s) * 1e3)
            time.sleep(_PAUSE_S)
    p50, p99 = statistics.median(lags_ms), percentile(lags_ms, 0.99)
    what = f"an engine publishes {_BLOCKS} blocks → in the catalog's answer over HTTP"
    rows = [
        Row(what=f"{what}: p50", unit="ms", value=p50, goal="10"),
        Row(what="… p99", unit="ms", value=p99, goal="50"),
    ]
    return Found(rows, {"bridge_visible_ms_p50": p50, "bridge_visible_ms_p99": p99})


def _prompt(rng: np.random.Generator) -> tuple[list[int], bytes]:
    tokens = rng.integers(128_000, size=_BLOCKS * _BLOCK_TOKENS).tolist()
    return tokens, sequence_hashes(tokens, _BLOCK_TOKENS, _SPACE.root())


def _is_told(client: CatalogClient, hashes: bytes) -> bool:
    """Whether the catalog says that the engine has all of a prompt."""
    found = client.lookup(_SPACE, hashes).instances
    return any(one.instance == _NAME and one.depth == _BLOCKS for one in found)
