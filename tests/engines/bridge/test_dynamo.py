"""Dynamo's own publishers of KV events, over a real nats-server, and what a catalog answers behind the bridge."""

from __future__ import annotations

import msgspec
import pytest

from tests.bridge_site import Site, site
from tests.dynamo_workers import NAMESPACE, Lookup
from tests.engines.bridge.harness.dynamo_worker import DynamoWorker
from tests.eventually import eventually
from tests.nats_fixture import cluster, nats_url

__all__ = ["cluster", "nats_url", "site"]

BLOCK_TOKENS = 4
TOKENS = list(range(200, 212))
KEYS = [11, -2, 13]  # as a binding says an engine's hashes: signed
SIZES = [BLOCK_TOKENS] * len(KEYS)


@pytest.fixture
def component(cluster: str) -> str:
    return f"{cluster}.backend.generate"


def published(worker: DynamoWorker, rank: int = 0, blocks: int = len(KEYS)) -> None:
    worker.publish(
        "publish_stored",
        rank,
        token_ids=TOKENS[: blocks * BLOCK_TOKENS],
        num_block_tokens=SIZES[:blocks],
        block_hashes=KEYS[:blocks],
    )


def test_what_a_worker_publishes_is_found_by_its_own_hashes_until_it_is_gone(
    site: Site, nats_url: str, component: str
) -> None:
    namespace, _, endpoint = component.split(".")
    with DynamoWorker(nats_url, component, BLOCK_TOKENS, ranks=2) as worker:
        site.bridge(
            a={
                "kind": "dynamo",
                "endpoint": nats_url,
                "topic": f"namespace.{namespace}.component.backend.endpoint.{endpoint}.kv-events",
                "worker": worker.number,
                "ranks": 2,
                "block_tokens": BLOCK_TOKENS,
            }
        )
        asked = msgspec.structs.replace(NAMESPACE, block_tokens=BLOCK_TOKENS)
        lookup = Lookup(site, worker.hashes(TOKENS), asked)

        copies = 0

        def is_heard() -> bool:
            nonlocal copies
            published(worker)
            copies += 1
            return lookup.depths() == {"a-dp0": 3}

        eventually(is_heard, state=lookup.depths)
        for _ in range(copies):  # Dynamo counts them, and passes on the last of as many removals alone
            worker.publish("publish_removed", block_hashes=KEYS[2:])
        lookup.agrees({"a-dp0": 2})
        published(worker, rank=1, blocks=1)
        lookup.agrees({"a-dp0": 2, "a-dp1": 1})
        number = worker.number
    with DynamoWorker(nats_url, component, BLOCK_TOKENS, number, ranks=2) as worker:
        published(worker, blocks=1)  # another process: what the one before held is certain no more
        lookup.agrees({"a-dp0": 1, "a-dp1": 1})
