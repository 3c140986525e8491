"""Record what Dynamo's own publishers of KV events send over NATS: tests/golden/dynamo_recorded.json.

Real are Dynamo's runtime and `KvEventPublisher`, from ai-dynamo-runtime's wheel, and the nats-server; no engine and no
GPU is needed. Blocks are told of as an engine's binding tells them; of other tiers as vLLM does over ZeroMQ, in events
written here. What a publisher is told stands beside the message that it sent. Numbers of publishers and times differ
from run to run.

    python tools/record_dynamo.py [--python build/routers/.venv/bin/python]
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import msgspec
import nats
import zmq
from nats.aio.subscription import Subscription

from tests.engines.bridge.harness.dynamo_worker import PYTHON, DynamoWorker
from tests.servers import nats_server

OUT = Path(__file__).parents[1] / "tests" / "golden" / "dynamo_recorded.json"
COMPONENT = "golden.backend.generate"
BLOCK_TOKENS = 4
TOKENS = list(range(100, 112))
WORKER, RELAY = 7587869265905, 78
WAIT_S = 60.0
PICTURE = {"mm_objects": [{"mm_hash": 99, "offsets": [[0, 2]]}]}


def blocks_told(begin: int, end: int, keys: list[int], parent: int | None = None) -> dict[str, Any]:
    """Arguments of `publish_stored` for some blocks of the prompt."""
    tokens = TOKENS[begin * BLOCK_TOKENS : end * BLOCK_TOKENS]
    return {
        "token_ids": tokens,
        "num_block_tokens": [BLOCK_TOKENS] * len(keys),
        "block_hashes": keys,
        "parent_hash": parent,
    }


CALLS: list[tuple[str, int, dict[str, Any]]] = [
    ("publish_stored", 0, blocks_told(0, 3, [11, -2, 13])),
    ("publish_removed", 0, {"block_hashes": [13]}),
    ("publish_stored", 0, blocks_told(2, 3, [14], parent=-2)),
    ("publish_stored", 1, blocks_told(0, 1, [11])),
    ("publish_stored", 0, blocks_told(0, 1, [21]) | {"lora_name": "ada"}),
    ("publish_stored", 0, blocks_told(0, 1, [31]) | {"cache_salt": "salt"}),
    ("publish_stored", 0, blocks_told(0, 1, [41]) | {"block_mm_infos": [PICTURE]}),
    (
        "publish_batch",
        0,
        {
            "events": [
                {"type": "removed", "block_hashes": [14]},
                {"type": "stored", **blocks_told(2, 3, [15], parent=-2)},
                {"type": "removed", "block_hashes": [21, 31, 41]},
            ]
        },
    ),
]


# A publisher counts how often a block was stored, and passes on the last of its removals alone
STORED_TWICE: list[tuple[str, int, dict[str, Any]]] = [
    ("publish_stored", 0, blocks_told(0, 2, [11, 12])),
    ("publish_stored", 0, blocks_told(0, 1, [11])),
    ("publish_removed", 0, {"block_hashes": [11, 12]}),
    ("publish_removed", 0, {"block_hashes": [11]}),
]


def vllm_stored(keys: list[int], medium: str, begin: int = 0, **more: Any) -> dict[str, Any]:
    """As vLLM 0.32 sends it."""
    return {
        "type": "BlockStored",
        "block_hashes": keys,
        "parent_block_hash": begin or None,
        "token_ids": TOKENS[begin * BLOCK_TOKENS : (begin + len(keys)) * BLOCK_TOKENS],
        "block_size": BLOCK_TOKENS,
        "lora_id": None,
        "medium": medium,
        "lora_name": None,
        "extra_keys": [None] * len(keys),
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
        **more,
    }


def vllm_removed(keys: list[int], medium: str) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": keys, "medium": medium, "group_idx": 0}


VLLM_MESSAGES: list[list[dict[str, Any]]] = [
    [vllm_stored([1, 2, 3], "GPU")],
    [vllm_stored([1, 2], "CPU"), vllm_stored([1], "STORAGE")],
    [vllm_stored([2], "DISK", begin=1)],
    [vllm_stored([1], "STORAGE", ownership="pool"), vllm_removed([3], "GPU")],
    [vllm_stored([3], "EXTERNAL", begin=2)],
    [vllm_stored([3], "CPU_PINNED", begin=2)],
    [vllm_removed([2], "CPU"), vllm_removed([2], "DISK")],
    [vllm_stored([7], "GPU", lora_name="ada")],
    [vllm_stored([8], "GPU", extra_keys=[["salt"]])],
    [vllm_removed([8], "GPU")],
    [{"type": "AllBlocksCleared"}],
]


class Recorder:
    """Waits for the message that follows each thing told."""

    def __init__(self, heard: Subscription, python: Path, url: str) -> None:
        self._heard, self._python, self._url = heard, python, url
        self.subjects: set[str] = set()

    async def step(self, told: dict[str, Any]) -> dict[str, Any]:
        """What was told, and the message that it became. Raises TimeoutError."""
        message = await self._heard.next_msg(WAIT_S)
        assert not message.headers and not message.reply, message
        self.subjects.add(message.subject)
        return told | {"message": base64.b64encode(message.data).decode()}

    def worker(self, number: int, **more: Any) -> DynamoWorker:
        return DynamoWorker(self._url, COMPONENT, BLOCK_TOKENS, number, python=self._python, **more)

    async def called(self, calls: list[tuple[str, int, dict[str, Any]]], ranks: int) -> list[dict[str, Any]]:
        """A worker that an engine's binding calls."""
        with self.worker(WORKER, ranks=ranks) as worker:
            steps = []
            for call, rank, given in calls:
                worker.publish(call, rank, **given)
                steps.append(await self.step({"call": call, "rank": rank, "with": given}))
            return steps

    async def relayed(self) -> list[dict[str, Any]]:
        """A worker that passes on what vLLM publishes."""
        with engine() as (address, socket), self.worker(RELAY, engine=address):
            assert socket.poll(int(WAIT_S * 1000)), "Dynamo's worker has not subscribed"
            socket.recv()
            steps = []
            for number, events in enumerate(VLLM_MESSAGES):
                batch = msgspec.msgpack.encode([1.5, events, 0])
                socket.send_multipart((b"", number.to_bytes(8, "big"), batch))
                steps.append(await self.step({"vllm": events}))
            return steps


@contextmanager
def engine() -> Iterator[tuple[str, zmq.Socket[bytes]]]:
    """A publisher that hears of its subscriber."""
    with zmq.Context() as context, context.socket(zmq.XPUB) as socket:
        socket.linger = 0
        yield f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}", socket


def own_hashes(recorder: Recorder) -> dict[str, list[int]]:
    """Dynamo's own hashes of the prompt's blocks, by what they have beside tokens."""
    with recorder.worker(WORKER) as worker:
        first = TOKENS[:BLOCK_TOKENS]
        return {
            "plain": worker.hashes(TOKENS),
            "lora": worker.hashes(first, lora_name="ada"),
            "salt": worker.hashes(first, cache_namespace="salt"),
            "picture": worker.hashes(first, block_mm_infos=[PICTURE]),
        }


async def recorded(url: str, python: Path) -> dict[str, Any]:
    """The golden file."""
    client = await nats.connect(url)
    try:
        recorder = Recorder(await client.subscribe(">"), python, url)
        await client.flush(int(WAIT_S))
        hashes = own_hashes(recorder)
        runs = {
            "called": await recorder.called(CALLS, ranks=2),
            "stored_twice": await recorder.called(STORED_TWICE, ranks=1),
            "started_again": await recorder.called(CALLS[:1], ranks=1),
            "relayed": await recorder.relayed(),
        }
        (subject,) = recorder.subjects
    finally:
        await client.close()
    return {"subject": subject, "block_tokens": BLOCK_TOKENS, "tokens": TOKENS, "tokens_hashes": hashes, "runs": runs}


def source(python: Path) -> str:
    """What has written the bytes."""
    asked = [str(python), "-c", "from importlib.metadata import version; print(version('ai-dynamo-runtime'))"]
    version = subprocess.run(asked, check=True, capture_output=True, text=True, timeout=WAIT_S).stdout.strip()
    return (
        f"ai-dynamo-runtime {version}: messages of dynamo.llm.KvEventPublisher on a real nats-server (event plane "
        "nats, discovery mem), recorded by tools/record_dynamo.py; relayed are vLLM 0.32's events as written there"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, default=PYTHON, help="of an environment with ai-dynamo-runtime")
    python = parser.parse_args().python
    with nats_server() as server:
        golden = {"source": source(python)} | asyncio.run(recorded(server.url, python))
    OUT.write_text(json.dumps(golden, indent=1) + "\n")
    steps = sum(len(steps) for steps in golden["runs"].values())
    print(f"{OUT.name}: {steps} messages on {golden['subject']}")


if __name__ == "__main__":
    main()
