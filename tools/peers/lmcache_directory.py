"""LMCache's KeyDirectory (`lmcache.v1.mp_coordinator.views.key_directory`), the coordinator's map from key to
placements.

Runs in that package's own environment. Its wire is the JSON of `CacheEventsRequest`, which its Kafka and HTTP sources
decode to batches for `consume`; a batch is all `store` or all `delete`. The event gate between the two is left out, in
its favour.
"""

from __future__ import annotations

from importlib.metadata import version

from lmcache.v1.distributed.api import ObjectKey, Tier
from lmcache.v1.mp_coordinator.api import CacheEventBatch, CacheEventEntry, CacheEventType
from lmcache.v1.mp_coordinator.schemas import CacheEventsRequest
from lmcache.v1.mp_coordinator.views.key_directory import KeyDirectory, Placement
from peers.measure import serve
from peers.workload import CHAIN_BLOCKS, INSTANCES, RUN_BLOCKS, Part, Step, hashes

_MODEL = "m"
_BLOCK_BYTES = 2 << 20
_KV_RANK = ObjectKey.ComputeKVRank(1, 0, 1, 0)


class LmcacheDirectory:
    """A Directory over KeyDirectory.

    Args:
        decoded: whether `consume` is handed batches that were decoded before the clock ran, or their JSON.
    """

    def __init__(self, decoded: bool = False) -> None:
        self._directory = KeyDirectory()
        self._decoded = decoded
        self._sequences = [0] * INSTANCES

    def mail(self, step: Step, form: str) -> list[list[CacheEventBatch] | bytes]:
        """A batch of what was stored and one of what was deleted."""
        requests = self.requests(step, form)
        if self._decoded:
            return [request.batches for request in requests]
        return [request.model_dump_json().encode() for request in requests]

    def requests(self, step: Step, form: str) -> list[CacheEventsRequest]:
        """The same before it is encoded."""
        requests: list[CacheEventsRequest] = []
        for part, kind in ((step.created, CacheEventType.STORE), (step.withdrawn, CacheEventType.DELETE)):
            if part is None:
                continue
            keys = self.question(part)
            if kind == CacheEventType.DELETE:
                keys.reverse()
            size = {"runs": CHAIN_BLOCKS, "cut": RUN_BLOCKS}.get(form, 1)
            for at in range(0, len(keys), size):
                requests.append(CacheEventsRequest(batches=[self._batch(step.instance, kind, keys[at : at + size])]))
        return requests

    def apply(self, message: list[CacheEventBatch] | bytes) -> None:
        """Take one request in."""
        batches = CacheEventsRequest.model_validate_json(message).batches if isinstance(message, bytes) else message
        for batch in batches:
            self._directory.consume(batch)

    def question(self, chain: Part) -> list[ObjectKey]:
        """The chain's keys."""
        rows = hashes(chain)
        return [ObjectKey(chunk_hash=row.tobytes(), model_name=_MODEL, kv_rank=_KV_RANK) for row in rows]

    def ask(self, question: list[ObjectKey]) -> list[list[Placement]]:
        """Placements of every key; what each instance's depth is, the caller would have to find out."""
        return self._directory.lookup(question)

    def depths(self, answer: list[list[Placement]]) -> list[int]:
        """Depth by instance."""
        depths = [0] * INSTANCES
        for at, placements in enumerate(answer):
            for placement in placements:
                depths[int(placement.instance_id)] = at + 1
        return depths

    def _batch(self, instance: int, kind: CacheEventType, keys: list[ObjectKey]) -> CacheEventBatch:
        self._sequences[instance] += 1
        stored = kind == CacheEventType.STORE
        entries = [
            CacheEventEntry(key=key.to_encoded_object_key(), size_bytes=_BLOCK_BYTES if stored else 0) for key in keys
        ]
        return CacheEventBatch(
            instance_id=str(instance),
            incarnation=1,
            seq=self._sequences[instance],
            event_type=kind,
            tier=Tier.L1,
            backend="dram",
            entries=entries,
        )


if __name__ == "__main__":
    serve("LMCache KeyDirectory", version("lmcache"), LmcacheDirectory)
