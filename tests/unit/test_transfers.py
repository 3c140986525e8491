"""What instances tell of their reads from one another, as the catalog counts it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import msgspec

from kvbm.catalog.edge.metrics import ROWS
from kvbm.catalog.members.liveness import LastHeartbeat
from kvbm.catalog.routing.transfers import MOST_TOLD, Transfers
from kvbm.core.fetching import Transfer
from kvbm.core.ids import Epoch, InstanceId, Offset
from kvbm.streams.base import Heartbeat
from kvbm.streams.pulse_words import encoded_heartbeat
from kvbm.telemetry.metrics import CatalogMetrics
from kvbm.telemetry.transfers import BYTES_PER_S
from tests.extras import needed

families = needed("prometheus_client.parser", "catalog").text_string_to_metric_families

NAME = InstanceId("a")


def beat(wall_time_ns: int, *transfers: Transfer) -> LastHeartbeat:
    sent = Heartbeat(
        instance=NAME, cluster="c", epoch=Epoch(1), published=Offset(0), wall_time_ns=wall_time_ns, transfers=transfers
    )
    data, why = encoded_heartbeat(sent)
    assert not why
    return LastHeartbeat(msgspec.msgpack.decode(data, type=Heartbeat), 0.0)


def heard(*transfers: Transfer) -> Transfers:
    counted = Transfers()
    counted.hear(NAME, beat(1))
    counted.hear(NAME, beat(2, *transfers))
    return counted


def metrics(counted: Transfers) -> dict[str, Any]:
    rows = [row for row in ROWS if row.name.startswith("transfer_")]
    scraped = CatalogMetrics(rows, cast(Any, SimpleNamespace(queries=SimpleNamespace(transfers=counted))), {})
    return {one.name: one for one in families(scraped.exposition().decode())}


def test_reads_are_counted_by_transport_distance_and_rate() -> None:
    counted = heard(
        Transfer("memory", 0, 1 << 20, 1000),  # 1.05 GB/s
        Transfer("memory", 0, 10_000_000, 1_000_000),  # 10 MB/s, the bound itself
        Transfer("tcp", 2, 0, 30),
    )
    assert set(counted.counted()) == {("memory", 0), ("tcp", 2)}
    memory, tcp = counted.counted()["memory", 0], counted.counted()["tcp", 2]
    assert [BYTES_PER_S[at] for at, count in enumerate(memory.by_rate) if count] == [1e7, 3e9]
    assert (memory.size, memory.failed, tcp.size, tcp.failed) == ((1 << 20) + 10_000_000, 0, 0, 1)
    found = metrics(counted)
    buckets = {
        one.labels["le"]: one.value
        for one in found["kvbm_catalog_transfer_bytes_per_second"].samples
        if one.name.endswith("_bucket") and one.labels["transport"] == "memory"
    }
    assert (buckets["1000000.0"], buckets["10000000.0"], buckets["3000000000.0"], buckets["+Inf"]) == (0, 1, 2, 2)
    failures = {one.labels["transport"]: one.value for one in found["kvbm_catalog_transfer_failures"].samples}
    assert failures == {"memory": 0, "tcp": 1}


def test_what_an_instance_says_makes_few_labels_and_no_nonsense() -> None:
    strange = [Transfer(f"way {number}", 10**9 - number, 1 << 20, 1) for number in range(40)]
    counted = heard(
        *strange, Transfer("tcp", -5, 1 << 20, 1), Transfer("tcp", 0, -1, 1), Transfer("tcp", 0, 1 << 63, 1)
    )
    assert set(counted.counted()) == {("other", 8), ("tcp", 0)}
    assert counted.counted()["tcp", 0].size == 1 << 20
    many = heard(*[Transfer("tcp", 0, 1, 1)] * (MOST_TOLD + 10))
    assert sum(many.counted()["tcp", 0].by_rate) == MOST_TOLD


def test_a_heartbeat_counts_once_and_the_last_one_of_long_ago_does_not() -> None:
    counted, read = Transfers(), Transfer("tcp", 1, 1 << 20, 1000)
    counted.hear(NAME, beat(1, read))  # the stream gives out what it has kept
    assert not counted.counted()
    for again in (2, 2, 2, 3):
        counted.hear(NAME, beat(again, read))
    assert sum(counted.counted()["tcp", 1].by_rate) == 2
    counted.forget(NAME)
    counted.hear(NAME, beat(3, read))
    assert sum(counted.counted()["tcp", 1].by_rate) == 2


def test_a_later_version_may_say_more_of_a_read() -> None:
    class Later(Transfer, frozen=True):
        lots: int = 7

    assert msgspec.msgpack.decode(msgspec.msgpack.encode(Later("tcp", 1, 2, 3)), type=Transfer) == Transfer(
        "tcp", 1, 2, 3
    )
