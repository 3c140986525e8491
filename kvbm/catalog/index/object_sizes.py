"""How many blocks the objects of pools hold, as instances say it in their heartbeats; the index counts what pools hold
by it.

A pool's name says it where it is not what the blocks' shape gives (`core.layout.pool_name`); then no heartbeat is
needed.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from kvbm.catalog.index.cluster_index import ClusterIndex
from kvbm.catalog.members.liveness import LastHeartbeat
from kvbm.core.ids import HASH_BYTES, InstanceId, NamespaceId, Tier
from kvbm.core.layout import named_blocks


class Declared(Protocol):
    """What instances have named; `Sequencer` is one."""

    def declared(self, instance: InstanceId) -> frozenset[NamespaceId]:
        """Namespaces that an instance has named."""


class ObjectSizes:
    """See the module. One thread."""

    def __init__(self, index: ClusterIndex, declared: Declared) -> None:
        self._index, self._declared = index, declared
        self._told: dict[InstanceId, tuple[int, Collection[NamespaceId]]] = {}

    def hear(self, instance: InstanceId, last: LastHeartbeat) -> None:
        """Take note of a heartbeat that is believed."""
        blocks = last.heartbeat.object_blocks
        if blocks < 1:
            return
        names = self._declared.declared(instance)
        told = self._told.get(instance)
        if told is not None and told == (blocks, names):  # mostly the very same set
            return
        pool = self._index.pool_name(instance, Tier.OBJECT)
        if pool is None or named_blocks(pool):
            return  # its start was not read yet, or its pool's name says it
        for name in names:
            if len(name) == HASH_BYTES:  # whoever sends a heartbeat may name anything
                self._index.size_objects(name, blocks)
        self._told[instance] = (blocks, names)

    def forget(self, instance: InstanceId) -> None:
        """It says nothing any more. What it said stays: its blocks are as they were."""
        self._told.pop(instance, None)
