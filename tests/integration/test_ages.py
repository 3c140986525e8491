"""Ages of blocks on their way: from a manager's events to its statistics and heartbeats, and from heartbeats to a
catalog's metrics.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvbm.assembly import open_manager
from kvbm.config import load_settings
from kvbm.core.ages import TierAges
from kvbm.core.ids import NO_PARENT, Namespace, Tier
from kvbm.streams.base import ORIGIN
from tests.catalog_site import Running, run_catalog
from tests.eventually import eventually
from tests.extras import needed
from tests.nats_fixture import cluster, nats_url  # noqa: F401
from tests.object_pools import memory_objects

text_string_to_metric_families = needed("prometheus_client.parser", "catalog").text_string_to_metric_families

SPACE = Namespace(model="m", revision="v1", block_tokens=16)
BLOCK_BYTES, BLOCKS = 64, 8
FOR_EVER_S = 3600.0
ZEROS = (0,) * 9


@pytest.fixture
def running(nats_url: str, cluster: str, sqlite_url: str) -> Iterator[Running]:  # noqa: F811
    yield from run_catalog(nats_url, cluster, sqlite_url, liveness_s=FOR_EVER_S)


def test_a_manager_counts_how_old_its_blocks_were_and_says_so(tmp_path: Path) -> None:
    flags = {
        "instance.data_dir": str(tmp_path),
        "instance.id": "a",
        "nats.enabled": "false",
        "journal.in_memory": "true",
        "pools.hbm.slots": str(BLOCKS),
        "pools.hbm.device": "memory",
    }
    objects = memory_objects(BLOCK_BYTES, 4)
    with open_manager(load_settings(flags=flags), [SPACE], block_bytes=BLOCK_BYTES, object_pool=objects) as manager:
        for prompt in range(3):
            hashes = manager.hash_tokens(range(1000 * prompt, 1000 * prompt + 16 * BLOCKS), SPACE.root(), 16)
            slots: list[list[int] | None] = []

            def is_allocated(slots: list[list[int] | None] = slots) -> bool:
                slots.append(manager.allocate(BLOCKS))
                return slots[-1] is not None

            eventually(is_allocated, "HBM stays short")
            assert slots[-1] is not None
            manager.unpin(manager.create(SPACE.id, NO_PARENT, 0, hashes, slots[-1]))
        eventually(lambda: evicted(manager.stats().ages) == 2 * BLOCKS, "what was evicted is not counted")
        heartbeat = manager.heartbeat(ORIGIN)
        assert heartbeat.object_blocks == 4
        assert heartbeat.ages == tuple((manager.stats().ages or {}).values())
        assert heartbeat.ages[Tier.HBM].unused == 2 * BLOCKS


def evicted(ages: dict[Tier, TierAges] | None) -> int:
    return sum((ages or {})[Tier.HBM].evicted)


def test_a_catalog_shows_what_instances_have_counted(running: Running) -> None:
    a = running.instance("a")
    a.publish()

    def samples() -> dict[str, float]:
        return {
            sample.name + "".join(f" {name}={value}" for name, value in sorted(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(running.client.metrics())
            for sample in family.samples
            if "_age_seconds" in sample.name or "evicted_unused" in sample.name
        }

    def said(count: int) -> tuple[TierAges, ...]:
        host = TierAges((count, *ZEROS[1:]), (0, 0, count, *ZEROS[3:]), count, 40 * count, 0, count)
        return (TierAges(), host, TierAges())

    a.beat(ages=said(5))
    eventually(lambda: running.client.instances()[0].state == "live", "it is not heard")
    a.beat(ages=said(8))
    eventually(lambda: samples()["kvbm_catalog_evicted_age_seconds_count tier=HOST"] == 3, "its word is not counted")
    found = samples()
    assert found["kvbm_catalog_evicted_age_seconds_bucket le=10.0 tier=HOST"] == 0
    assert found["kvbm_catalog_evicted_age_seconds_bucket le=60.0 tier=HOST"] == 3
    assert found["kvbm_catalog_evicted_age_seconds_sum tier=HOST"] == 120
    assert found["kvbm_catalog_wanted_age_seconds_bucket le=1.0 tier=HOST"] == 3
    assert found["kvbm_catalog_evicted_unused_total tier=HOST"] == 3
    assert not any("wanted" in name and "HBM" in name for name in found)
