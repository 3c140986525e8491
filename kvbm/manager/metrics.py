"""A manager's metrics: one row each, read of what it says of itself."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from heapq import nlargest
from typing import NamedTuple, TypeVar

from kvbm.core.ages import AGE_BOUNDS_S, TierAges
from kvbm.core.ids import Epoch, Offset, Tier
from kvbm.core.lent import LENT_BY, REFUSED_FOR, LentCounts
from kvbm.core.results import ShareCounts, TierCounts
from kvbm.manager.base import BlockManager
from kvbm.manager.offload.admission import Skipped
from kvbm.manager.stats import TROUBLED_PARTS, ManagerStats
from kvbm.pools.base import ObjectStats
from kvbm.telemetry.metrics import COUNTER, GAUGE, HISTOGRAM, HistogramBuckets, Labelled, MetricRow
from kvbm.transport.peers import PeerStats

PREFIX = "kvbm_manager_"
_MOST_SHARES = 64  # of each tier: tenants are as many as somebody declares
_OBJECT_READS = ("got", "missing", "corrupt", "failed")
_OBJECT_PUTS = ("put", "found", "refused")
Counted = TypeVar("Counted")
Get = Callable[["ManagerReading"], float | Labelled | None]


class ManagerReading(NamedTuple):
    """What one scrape reads of a manager.

    Attributes:
        applied, durable, published: offsets in this epoch; `published` None: there is no stream.
        build: versions of kvbm and of Python, and the cluster.
    """

    stats: ManagerStats
    epoch: Epoch
    applied: Offset
    durable: Offset
    published: Offset | None
    build: tuple[str, str, str]


def read_manager(manager: BlockManager, version: str) -> ManagerReading:
    """Read a manager, with its ledger's lock for microseconds. What comes later is read first, so that it is not ahead
    of what it follows.
    """
    epoch = manager.epoch
    reached = manager.published() if manager.publisher_port.publishing is not None else None
    published = None if reached is None else reached.offset if reached.epoch == epoch else Offset(0)
    durable, applied = manager.durable(), manager.applied()
    build = (version, platform.python_version(), manager.cluster)
    return ManagerReading(manager.stats(), epoch, applied, durable, published, build)


def _counter(name: str, meaning: str, get: Get, *labels: str) -> MetricRow[ManagerReading]:
    return MetricRow(name, COUNTER, meaning, get, labels, PREFIX)


def _gauge(name: str, meaning: str, get: Get, *labels: str) -> MetricRow[ManagerReading]:
    return MetricRow(name, GAUGE, meaning, get, labels, PREFIX)


def _count(of: Callable[[ManagerStats], float]) -> Get:
    return lambda at: of(at.stats)


def _of_tiers(of: Callable[[ManagerStats], Mapping[Tier, int]]) -> Get:
    """Of each tier that it has, from 0 on, and of others that were counted."""

    def get(at: ManagerReading) -> Labelled:
        counts, has_objects = of(at.stats), at.stats.objects is not None
        there = {*at.stats.pools, *([Tier.OBJECT] if has_objects else []), *(one for one in counts if counts[one])}
        return {(tier.name,): counts.get(tier, 0) for tier in there}

    return get


def _of_pools(of: Callable[[TierCounts], int]) -> Get:
    return lambda at: {(tier.name,): of(counts) for tier, counts in at.stats.pools.items()}


def _of_peers(of: Callable[[PeerStats], int]) -> Get:
    return lambda at: {} if at.stats.peers is None else {(): of(at.stats.peers)}


def _of_transports(of: Callable[[PeerStats], Mapping[str, int]]) -> Get:
    return lambda at: {} if at.stats.peers is None else {(way,): count for way, count in of(at.stats.peers).items()}


def _of_objects(of: Callable[[ObjectStats], Labelled]) -> Get:
    return lambda at: {} if at.stats.objects is None else of(at.stats.objects)


def _of_lent(of: Callable[[LentCounts], Labelled]) -> Get:
    return lambda at: {} if at.stats.lent is None else of(at.stats.lent)


def _of_ages(of: Callable[[TierAges], Counted]) -> Callable[[ManagerReading], dict[tuple[str, ...], Counted]]:
    def get(at: ManagerReading) -> dict[tuple[str, ...], Counted]:
        ages = at.stats.ages or {}
        return {(tier.name,): of(counts) for tier, counts in ages.items() if tier in at.stats.pools}

    return get


def _of_shares(of: Callable[[ShareCounts], int | None]) -> Get:
    """Of the tenants with the most blocks of a tier."""
    return lambda at: {
        (tier.name, share.tenant): count
        for tier, shares in at.stats.shares.items()
        for share in nlargest(_MOST_SHARES, shares, key=lambda one: one.held)
        if (count := of(share)) is not None
    }


MANAGER_ROWS: tuple[MetricRow[ManagerReading], ...] = (
    _gauge(
        "build_info",
        "1, of the version of kvbm and of Python that run, and the cluster.",
        lambda at: {at.build: 1},
        "version",
        "python",
        "cluster",
    ),
    _gauge(
        "trouble",
        "1 for a part that does not work now, as manager.trouble() says: journal, place, stream, tiers, objects, "
        "namespaces.",
        lambda at: {(part,): float(part in at.stats.troubled) for part in TROUBLED_PARTS},
        "part",
    ),
    _gauge("epoch", "Its epoch: grows at each start, and when another begins in place.", lambda at: at.epoch),
    _gauge("applied_offset", "Offset after the last event decided in its epoch.", lambda at: at.applied),
    _gauge("durable_offset", "Offset after the last event of its epoch in the journal.", lambda at: at.durable),
    _gauge(
        "published_offset",
        "Offset after the last event of its epoch on the stream; NaN without a stream.",
        lambda at: at.published,
    ),
    _gauge("slots", "Slots of a tier.", _of_pools(lambda one: one.slots), "tier"),
    _gauge("free_slots", "Slots of a tier that hold nothing.", _of_pools(lambda one: one.free), "tier"),
    _gauge("held_blocks", "Blocks that a tier holds.", _of_pools(lambda one: one.held), "tier"),
    _gauge("evictable_blocks", "Of those, what nobody has pinned.", _of_pools(lambda one: one.evictable), "tier"),
    _gauge(
        "allocated_slots",
        "Slots of a tier that were given out and in which nothing was created yet.",
        _of_pools(lambda one: one.allocated),
        "tier",
    ),
    _gauge("kept_blocks", "Blocks of a tier that keep holds there.", _of_tiers(lambda one: one.kept_blocks), "tier"),
    _counter("created_blocks", "Blocks the engine declared full.", _count(lambda one: one.created_blocks)),
    _counter(
        "hit_blocks",
        "Blocks that requests got instead of computing them, by the tier they were in.",
        _of_tiers(lambda one: one.hit_blocks),
        "tier",
    ),
    _counter("missed_blocks", "Blocks that requests asked for and did not get.", _count(lambda one: one.missed_blocks)),
    _counter(
        "offloaded_blocks",
        "Blocks brought to a colder tier, by that tier.",
        _of_tiers(lambda one: one.offloaded_blocks),
        "tier",
    ),
    _counter(
        "skipped_offloads",
        "Blocks a policy wanted in a colder tier that did not get there, by why: queue, journal, staging, budget, "
        "partial, beyond, gone, room.",
        lambda at: {(why.value,): at.stats.skipped.get(why, 0) for why in Skipped},
        "why",
    ),
    _counter(
        "late_acquires",
        "Onboards that ended after their request had gone on: onboard.wait_s was over.",
        _count(lambda one: one.late_copies),
    ),
    _counter("short_allocations", "Calls of allocate that got no slots.", _count(lambda one: one.short_allocations)),
    _gauge("waiting_requests", "Requests that wait for bytes.", _count(lambda one: one.waiting_requests)),
    _gauge(
        "copies_in_flight",
        "Copies that hold slots, those that are late or quarantined among them.",
        _count(lambda one: one.copies_in_flight),
    ),
    _gauge(
        "late_slots",
        "Slots, at both ends, held by onboards that run on after their request.",
        _count(lambda one: one.late_slots),
    ),
    _gauge(
        "quarantined_slots",
        "Slots, at both ends, of copies nobody can confirm; nothing uses them before the process is gone.",
        _count(lambda one: one.quarantined_slots),
    ),
    _counter("failed_copies", "Copies a device or store did not carry out.", _count(lambda one: one.failed_copies)),
    _counter(
        "corrupt_blocks",
        "Blocks whose bytes were found wrong; they were withdrawn and computed.",
        _count(lambda one: one.corrupt_blocks),
    ),
    _counter("verified_reads", "Blocks whose bytes were found right.", _count(lambda one: one.verified_reads)),
    MetricRow(
        "wanted_age_seconds",
        HISTOGRAM,
        "How old blocks of a tier were when they were wanted again in a hotter one.",
        lambda at: {
            of: one
            for of, one in _of_ages(lambda one: HistogramBuckets(AGE_BOUNDS_S, one.wanted, one.wanted_s))(at).items()
            if of != (Tier.HBM.name,)  # of HBM no event says it
        },
        ("tier",),
        PREFIX,
    ),
    MetricRow(
        "evicted_age_seconds",
        HISTOGRAM,
        "How old blocks of a tier were when they were evicted for want of room or because their time was over.",
        _of_ages(lambda one: HistogramBuckets(AGE_BOUNDS_S, one.evicted, one.evicted_s)),
        ("tier",),
        PREFIX,
    ),
    _counter(
        "evicted_unused",
        "Blocks of a tier evicted for want of room that were never wanted again since they came.",
        _of_ages(lambda one: one.unused),
        "tier",
    ),
    _gauge(
        "share_held_blocks",
        f"Blocks of a tier that a tenant holds, where tenants have shares; of the {_MOST_SHARES} with the most.",
        _of_shares(lambda one: one.held),
        "tier",
        "tenant",
    ),
    _gauge(
        "share_quota_blocks",
        "Blocks of a tier that a tenant may hold at most; of those that have a quota.",
        _of_shares(lambda one: one.quota_slots),
        "tier",
        "tenant",
    ),
    _counter(
        "engine_duplicates",
        "Blocks an engine that owns HBM said it holds of which it had said so before.",
        _count(lambda one: one.engine_duplicates),
    ),
    _counter(
        "engine_surplus",
        "Blocks an engine that owns HBM said it holds beyond what it has room for.",
        _count(lambda one: one.engine_surplus),
    ),
    _counter(
        "engine_stores",
        "Runs that an engine that owns HBM was given to bring to HOST.",
        _count(lambda one: one.engine_stores),
    ),
    _counter("peer_hits", "Blocks of hit_blocks that other instances lent.", _count(lambda one: one.peer_hits)),
    _counter(
        "peer_late_acquires",
        "Onboards of late_acquires whose blocks other instances were to lend.",
        _count(lambda one: one.peer_late_copies),
    ),
    _counter("peer_reads", "Questions to other instances.", _of_peers(lambda one: one.reads)),
    _counter("peer_failed_reads", "Those that did not go as they should.", _of_peers(lambda one: one.failed_reads)),
    _counter(
        "peer_missing_blocks",
        "Blocks that another instance was said to have and had not.",
        _of_peers(lambda one: one.missing_blocks),
    ),
    _counter(
        "peer_corrupt_blocks",
        "Blocks of other instances whose bytes were found wrong.",
        _of_peers(lambda one: one.corrupt_blocks),
    ),
    _counter(
        "peer_blocks",
        "Blocks that came from other instances, verified.",
        _of_transports(lambda one: one.blocks),
        "transport",
    ),
    _counter("peer_bytes", "Their bytes.", _of_transports(lambda one: one.bytes), "transport"),
    _counter(
        "object_puts",
        "Objects offered to the object pool, by how that ended: put, found (there already), refused.",
        _of_objects(lambda one: {(how,): getattr(one, f"{how}_objects") for how in _OBJECT_PUTS}),
        "result",
    ),
    _counter(
        "object_reads",
        "Objects read from the object pool, by how that ended: got, missing, corrupt, failed.",
        _of_objects(lambda one: {(how,): getattr(one, f"{how}_objects") for how in _OBJECT_READS}),
        "result",
    ),
    _counter(
        "object_put_bytes",
        "Bytes put in the object pool: raw in memory, stored in the store; raw over stored is the ratio.",
        _of_objects(
            lambda one: {("raw",): one.put_bytes.raw_bytes, ("stored",): one.put_bytes.stored_bytes},
        ),
        "form",
    ),
    _gauge("lent_blocks", "Blocks it lends now.", _of_lent(lambda one: {(): one.blocks_lent_now})),
    _gauge("lending_connections", "Connections of readers open now.", _of_lent(lambda one: {(): one.connections})),
    _counter(
        "lent_bytes",
        "Bytes of blocks it has lent to others, by how.",
        _of_lent(lambda one: {(way,): getattr(one, f"{way}_bytes") for way in LENT_BY}),
        "transport",
    ),
    _counter(
        "lending_refusals",
        "What it did not lend, by why, as kvbm_catalog_lending_refusals_total.",
        _of_lent(lambda one: {(why,): getattr(one, why) for why in REFUSED_FOR}),
        "why",
    ),
)
