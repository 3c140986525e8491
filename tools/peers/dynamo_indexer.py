"""Dynamo's standalone indexer (`python -m dynamo.indexer`), fed with vLLM's KV events over ZMQ, one publisher an
instance.

The messages are encoded before the clock runs. A step is one message: what an engine evicted, then what it stored, with
token ids, from which the indexer makes the hashes it is queried by. It is known when a query shows the last chain of
every instance. This process publishes meanwhile. The queues are as long as vLLM's; no replay socket is offered.
"""

from __future__ import annotations

import json
import time
from importlib.metadata import version

import msgpack
import zmq
from dynamo._core import compute_block_hash_for_seq
from peers.measure import Question, Service, serve
from peers.process import Process, free_port
from peers.workload import BLOCK_TOKENS, CHAIN_BLOCKS, INSTANCES, Part, Step, hashes, tokens

_MODEL = "m"
_QUEUE = 100_000  # messages a publisher keeps for a slow reader; what vLLM has when it is told nothing
_PATIENCE_S = 20.0
_POLL_S = 0.002


class DynamoIndexer(Service):
    """A Service over the indexer."""

    def __init__(self) -> None:
        context = zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []
        addresses: list[str] = []
        for instance in range(INSTANCES):
            socket = context.socket(zmq.XPUB)  # a PUB that hears of its subscriber
            socket.sndhwm = _QUEUE
            addresses.append(f"{instance}=tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}")
            self._sockets.append(socket)
        self.port = free_port()
        self._process = Process(
            "dynamo.indexer",
            "--port",
            str(self.port),
            "--block-size",
            str(BLOCK_TOKENS),
            "--model-name",
            _MODEL,
            "--workers",
            ",".join(addresses),
            port=self.port,
        )
        self._process.wait_until("/health")
        for socket in self._sockets:
            socket.recv()
        self._sequences = [0] * INSTANCES
        self._last: dict[int, Part] = {}
        self._ready: list[tuple[int, list[bytes]]] = []

    def mail(self, step: Step) -> list[tuple[int, list[bytes]]]:
        """One batch of vLLM's events, and whose it is."""
        events: list[list[object]] = []
        if step.withdrawn is not None:
            events.append(["BlockRemoved", hashes(step.withdrawn)[::-1, 0].tolist(), "GPU"])
        if step.created is not None:
            part = step.created
            names = hashes(part)[:, 0].tolist()
            events.append(
                ["BlockStored", names, None, tokens(part.chain, part.count).tolist(), BLOCK_TOKENS, None, "GPU"]
            )
            self._last[step.instance] = part
        sequence = self._sequences[step.instance]
        self._sequences[step.instance] += 1
        payload = msgpack.packb([time.time(), events, None])
        return [(step.instance, [b"", sequence.to_bytes(8, "big"), payload])]

    def lay_ready(self, messages: list[tuple[int, list[bytes]]]) -> None:
        """Keep them."""
        self._ready = messages

    def take_in(self) -> bool:
        """Publish them and ask until the last chain of every instance is known."""
        questions = [(instance, self._question(part, 1)) for instance, part in sorted(self._last.items())]
        for instance, message in self._ready:
            self._sockets[instance].send_multipart(message, copy=False)
        deadline_s = time.monotonic() + _PATIENCE_S
        for instance, question in questions:
            while not self._depth(question, instance):
                if time.monotonic() > deadline_s:
                    return False
                time.sleep(_POLL_S)
        return True

    def depth(self, chain: Part, instance: int) -> int:
        """Asked of /query."""
        return self._depth(self._question(chain, chain.count), instance)

    def cpu_s(self) -> float:
        """The indexer's."""
        return self._process.cpu_s()

    def close(self) -> None:
        """End it."""
        self._process.close()
        for socket in self._sockets:
            socket.close(0)

    def _question(self, chain: Part, blocks: int) -> bytes:
        asked = tokens(chain.chain, chain.count)[: blocks * BLOCK_TOKENS].tolist()
        return json.dumps({"token_ids": asked, "model_name": _MODEL}).encode()

    def _depth(self, question: bytes, instance: int) -> int:
        scores = json.loads(self._process.ask("POST", "/query", question))["scores"]
        return int(scores.get(str(instance), {}).get("0", 0)) // BLOCK_TOKENS


class ServedIndexer(DynamoIndexer):
    """A Served over the same. Messages of a chain are cut as they come: what an engine has of it, from its start."""

    def tell(self, steps: list[Step]) -> None:
        """Publish them and wait until the last chain of every instance is known. Raises TimeoutError: it is not."""
        self.lay_ready([message for step in steps for message in self.mail(step)])
        if not self.take_in():
            raise TimeoutError("the indexer has not taken in all that was told")

    def kinds(self) -> list[str]:
        """How much each instance has of a prompt, by the hashes of its blocks."""
        return ["hashes"]

    def question(self, kind: str, chain: Part) -> Question:
        """One of a prompt."""
        asked = tokens(chain.chain, CHAIN_BLOCKS)[: chain.count * BLOCK_TOKENS].tolist()
        signed = [one - (1 << 64) if one >> 63 else one for one in compute_block_hash_for_seq(asked, BLOCK_TOKENS)]
        body = json.dumps({"block_hashes": signed, "model_name": _MODEL}, separators=(",", ":"))
        return Question("/query_by_hash", body.encode())

    def depths(self, kind: str, answer: bytes) -> list[int]:
        """Of each instance."""
        scores = json.loads(answer)["scores"]
        return [int(scores.get(str(one), {}).get("0", 0)) // BLOCK_TOKENS for one in range(INSTANCES)]


def main(side: str = "wire") -> DynamoIndexer:
    """A side, by name."""
    return ServedIndexer() if side == "served" else DynamoIndexer()


if __name__ == "__main__":
    serve("Dynamo indexer", version("ai-dynamo-runtime"), main)
