"""Workers of Dynamo's, which publish over NATS, and what a catalog answers to one who knows their blocks' hashes."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

import msgspec
import nats
import pytest

from kvbm.core.hashing import sequence_hashes
from kvbm.core.ids import UNKNOWN, Namespace
from kvbm.streams.foreign.dynamo import NUMBERS, SCHEME, block_numbers
from tests.bridge_site import Site
from tests.eventually import eventually
from tests.foreign_engines import MODEL

NAMESPACE = Namespace(
    model=MODEL,
    block_tokens=16,
    revision=UNKNOWN,
    kv_dtype=UNKNOWN,
    layout=UNKNOWN,
    ranks=UNKNOWN,
    scheme=SCHEME,
)
TOKENS_HASHES = [13226331709069118873, 3, 2**63 + 5]


class Worker:
    """Publishes as a worker of Dynamo's does."""

    _publishers = itertools.count(100)

    def __init__(self, url: str, subject: str, number: int = 7) -> None:
        self._url, self._subject, self._number = url, subject, number
        self._publisher, self._sequence = next(self._publishers), itertools.count()

    @property
    def settings(self) -> dict[str, Any]:
        return {"kind": "dynamo", "endpoint": self._url, "topic": self._subject, "block_tokens": 16}

    def publish(self, data: Any, is_lost: bool = False) -> None:
        event = {"event_id": 1, "data": data, "dp_rank": 0}
        payload = msgspec.msgpack.encode({"worker_id": self._number, "storage_tier": "device", "event": event})
        sequence = next(self._sequence)
        head = {"topic": "kv-events", "publisher_id": self._publisher, "sequence": sequence, "published_at": 1}
        if not is_lost:
            self.publish_bytes(msgspec.msgpack.encode(head | {"payload": payload}))

    def publish_bytes(self, data: bytes) -> None:
        asyncio.run(self._publish(data))

    async def _publish(self, data: bytes) -> None:
        client = await nats.connect(self._url)
        await client.publish(self._subject, data)
        await client.flush()
        await client.close()


def stored(*numbers: int) -> dict[str, Any]:
    blocks = [{"block_hash": at, "tokens_hash": TOKENS_HASHES[at], "mm_extra_info": None} for at in numbers]
    return {"stored": {"parent_hash": None, "start_position": 0, "blocks": blocks}}


class Lookup:
    """What a catalog answers to one who knows Dynamo's hashes of blocks."""

    def __init__(
        self, site: Site, tokens_hashes: Sequence[int] = TOKENS_HASHES, namespace: Namespace = NAMESPACE
    ) -> None:
        self._catalog, self._namespace = site.catalog, namespace
        self._hashes = sequence_hashes(block_numbers(tokens_hashes), NUMBERS, namespace.root())

    def depths(self) -> dict[str, int]:
        answer = self._catalog.lookup(self._namespace, self._hashes)
        return {one.instance: one.tiers["HBM"] for one in answer.instances if one.tiers["HBM"]}

    def agrees(self, expected: dict[str, int]) -> None:
        eventually(lambda: self.depths() == expected, f"{expected} were expected", state=self.depths)


@pytest.fixture
def subject(cluster: str) -> str:
    return f"namespace.{cluster}.component.backend.endpoint.generate.kv-events"


def heard(lookup: Lookup, worker: Worker, data: Any, expected: dict[str, int]) -> None:
    """Publish again and again until the bridge, which may have no subscription yet, has heard it."""

    def is_heard() -> bool:
        worker.publish(data)
        return lookup.depths() == expected

    eventually(is_heard, state=lookup.depths)
