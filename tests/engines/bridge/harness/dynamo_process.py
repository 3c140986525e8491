"""A worker of Dynamo's without an engine: Dynamo's own publishers of KV events, over the NATS that NATS_SERVER names.

Runs in the environment of ai-dynamo-runtime. Each line of standard input is a question, each of standard output that
begins with `{` its answer; it ends with its input. Asked are `publish_stored`, `publish_removed` and `publish_batch` of
one rank's `KvEventPublisher`, and `hashes`, which is `compute_block_hash_for_seq`.

    python dynamo_process.py ENDPOINT BLOCK_TOKENS --worker N --ranks N [--engine tcp://host:port]
"""

import argparse
import asyncio
import json
import sys
from typing import Any

from dynamo.llm import KvEventPublisher, compute_block_hash_for_seq
from dynamo.runtime import DistributedRuntime


async def work(asked: argparse.Namespace) -> None:
    """Publish what is asked until there are no more questions."""
    runtime = DistributedRuntime(asyncio.get_running_loop(), "mem", "tcp", event_plane="nats")
    endpoint = runtime.endpoint(asked.endpoint)
    worker = asked.worker or endpoint.connection_id()
    relayed = {"zmq_endpoint": asked.engine, "zmq_topic": ""} if asked.engine else {}
    publishers = [
        KvEventPublisher(endpoint, worker, asked.block_tokens, dp_rank=rank, **relayed) for rank in range(asked.ranks)
    ]
    answer({"worker": worker})
    while line := await asyncio.to_thread(sys.stdin.readline):
        question = json.loads(line)
        call, given = question["call"], question["with"]
        if call == "hashes":
            answer({"hashes": compute_block_hash_for_seq(given.pop("tokens"), asked.block_tokens, **given)})
        else:
            getattr(publishers[question["rank"]], call)(**given)
            answer({})
    for publisher in publishers:
        publisher.shutdown()
    runtime.shutdown()


def answer(said: dict[str, Any]) -> None:
    print(json.dumps(said), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("endpoint", help="NAMESPACE.COMPONENT.ENDPOINT")
    parser.add_argument("block_tokens", type=int)
    parser.add_argument("--worker", type=int, default=0, help="its number; 0: the one that Dynamo gives it")
    parser.add_argument("--ranks", type=int, default=1, help="data-parallel ranks")
    parser.add_argument("--engine", default="", help="where vLLM would publish its events; they are passed on")
    asyncio.run(work(parser.parse_args()))


if __name__ == "__main__":
    main()
