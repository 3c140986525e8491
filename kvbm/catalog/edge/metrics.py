"""The catalog's metrics: one row each.

What is counted as requests come (`CatalogMetrics`) and refusals are in `kvbm.telemetry.metrics`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from heapq import nlargest

from kvbm.catalog.follow.archive import STREAM_PART
from kvbm.catalog.follow.usage_totals import SHOWN_TENANTS
from kvbm.catalog.members.liveness import LifeState
from kvbm.catalog.put_bytes import Sizes, put_by_instance, put_by_namespace
from kvbm.catalog.service import CatalogService
from kvbm.core.ages import AGE_BOUNDS_S, FOLLOWED
from kvbm.core.ids import InstanceId, Tier
from kvbm.core.lent import LENT_BY, REFUSED_FOR, LentCounts
from kvbm.core.missed import WHYS
from kvbm.streams.base import Heartbeat
from kvbm.telemetry.metrics import COUNTER, GAUGE, HISTOGRAM, HistogramBuckets, Labelled, MetricRow
from kvbm.telemetry.transfers import BYTES_PER_S

_MOST_NAMESPACES = 64  # clients choose them, so a label for each would be one for every tenant there ever was
ANOMALIES = (
    "created-twice",
    "evicted-unheld",
    "snapshot-added",
    "snapshot-incomplete",
    "snapshot-withdrew",
    "unnamed-claim",
    "refused-at-capacity",
)
DEGRADED_PARTS = ("NATS", "SQL", "archive", "checkpoints", "history", "erasures", "instances", "tasks")
MISSED_QUESTIONS = ("lookup", "route", "presence", "find", "block", "watch")


def _lag_s(at: CatalogService) -> float:
    newest_ns = at.sequencer.newest_wall_ns
    return at.lag.seconds(time.monotonic(), time.time() - newest_ns / 1e9 if newest_ns else 0.0)


def _behind_s(at: CatalogService) -> float:
    backlog, now_s = at.heartbeats.backlog, time.monotonic()
    return max((backlog.age_s(now_s, name) for name in backlog.behind), default=0.0)


def _checkpointed(at: CatalogService) -> int:
    last = at.checkpointer.last if at.checkpointer is not None else None
    return last.sequence if last is not None else 0


def _degraded_parts(at: CatalogService) -> Labelled:
    """An instance that is ignored, and a task that has ended, count as one of them, whatever its name. An archive that
    reads nothing lacks NATS, and its folder is well.
    """
    named = ("instances" if one.startswith("instance ") else one for one in at.degraded.parts())
    named = ("NATS" if one == STREAM_PART else one for one in named)
    broken = {one if one in DEGRADED_PARTS else "tasks" for one in named}
    return {(part,): float(part in broken) for part in DEGRADED_PARTS}


def _residencies(at: CatalogService) -> Labelled:
    return {
        (instance, tier.name): count
        for instance in at.index.instances()
        if (view := at.index.view(instance)) is not None and not view.stopped and not view.excluded
        for tier, count in view.counts.items()
    }


def _by_one(counts: Mapping[str, float]) -> Labelled:
    return {(name,): count for name, count in counts.items()}


def _beats(at: CatalogService) -> Iterator[tuple[InstanceId, Heartbeat]]:
    """The last heartbeats of the instances that the index has."""
    beats = ((one, at.heartbeats.liveness.last(one)) for one in at.index.instances())
    return ((one, last.heartbeat) for one, last in beats if last is not None)


def _by_form(sizes: Mapping[str, Sizes]) -> Labelled:
    return {
        (name, form): size for name, both in sizes.items() for form, size in zip(("raw", "stored"), both, strict=True)
    }


def _of_namespaces(at: CatalogService) -> Labelled:
    most = nlargest(_MOST_NAMESPACES, put_by_namespace(_beats(at)).items(), key=lambda one: (one[1], one[0]))
    return _by_form(dict(most))


def _missed(at: CatalogService) -> Labelled:
    counts = at.queries.misses.counts
    return {(question, why): counts.get((question, why), 0) for question in MISSED_QUESTIONS for why in WHYS}


def _wanted(at: CatalogService) -> Labelled:
    """Of HBM no event says what is wanted again."""
    ages = zip(FOLLOWED, at.queries.ages.counted(), strict=False)
    return {
        (tier.name,): HistogramBuckets(AGE_BOUNDS_S, one.wanted, one.wanted_s) for tier, one in ages if tier != Tier.HBM
    }


def _evicted(at: CatalogService) -> Labelled:
    ages = zip(FOLLOWED, at.queries.ages.counted(), strict=False)
    return {(tier.name,): HistogramBuckets(AGE_BOUNDS_S, one.evicted, one.evicted_s) for tier, one in ages}


def _unused(at: CatalogService) -> Labelled:
    ages = zip(FOLLOWED, at.queries.ages.counted(), strict=False)
    return {(tier.name,): one.unused for tier, one in ages if tier != Tier.HBM}


def _rates(at: CatalogService) -> Labelled:
    counted = at.queries.transfers.counted().items()
    return {
        (transport, str(far)): HistogramBuckets(BYTES_PER_S, one.by_rate, one.rates)
        for (transport, far), one in counted
    }


def _transferred(at: CatalogService) -> Labelled:
    return {(transport, str(far)): one.size for (transport, far), one in at.queries.transfers.counted().items()}


def _failed(at: CatalogService) -> Labelled:
    return {(transport, str(far)): one.failed for (transport, far), one in at.queries.transfers.counted().items()}


def _lent(what: Callable[[LentCounts], int]) -> Callable[[CatalogService], Labelled]:
    """Of each instance that lends."""
    return lambda at: {(name,): what(beat.lent) for name, beat in _beats(at) if beat.lent is not None}


def _lent_by(at: CatalogService) -> Labelled:
    told = [(name, beat.lent) for name, beat in _beats(at) if beat.lent is not None]
    return {(name, way): getattr(lent, f"{way}_bytes") for name, lent in told for way in LENT_BY}


def _not_lent(at: CatalogService) -> Labelled:
    told = [(name, beat.lent) for name, beat in _beats(at) if beat.lent is not None]
    return {(name, why): getattr(lent, why) for name, lent in told for why in REFUSED_FOR}


def _states(at: CatalogService) -> Labelled:
    """Of all that `/v1/instances` shows."""
    counts = Counter(one.value for one in at.heartbeats.liveness.states())
    return {(state.value,): counts.get(state.value, 0) for state in LifeState}


def _used(first: int) -> Callable[[CatalogService], Labelled]:
    """By tenant and tier: the numbers of an entry from one on."""
    return lambda at: {
        (tenant, tier.name): sums[first + tier]
        for tenant, sums in at.sequencer.usage.largest().items()
        for tier in Tier
    }


def _saved(number: int, unit: float = 1) -> Callable[[CatalogService], Labelled]:
    return lambda at: {(tenant,): sums[number] / unit for tenant, sums in at.sequencer.usage.largest().items()}


ROWS: tuple[MetricRow[CatalogService], ...] = (
    MetricRow("messages", COUNTER, "Messages read from the stream.", lambda at: at.sequencer.counters.messages),
    MetricRow("frames", COUNTER, "Frames applied to the index.", lambda at: at.sequencer.counters.frames),
    MetricRow("events", COUNTER, "Events applied to the index.", lambda at: at.sequencer.counters.events),
    MetricRow(
        "blocks", COUNTER, "Blocks named by the events that were applied.", lambda at: at.sequencer.counters.blocks
    ),
    MetricRow(
        "repeats",
        COUNTER,
        "Frames ignored because they had been applied before.",
        lambda at: at.sequencer.counters.repeats,
    ),
    MetricRow(
        "strays",
        COUNTER,
        "Messages ignored because they name a fence of a history that the stream has lost.",
        lambda at: at.sequencer.counters.strays,
    ),
    MetricRow(
        "stale",
        COUNTER,
        "Frames ignored because they belong to an epoch that is over.",
        lambda at: at.sequencer.counters.stale,
    ),
    MetricRow(
        "holes",
        COUNTER,
        "Times later frames came before the next one; most are filled soon.",
        lambda at: at.sequencer.counters.holes,
    ),
    MetricRow(
        "gaps",
        COUNTER,
        "Holes whose events will not come any more; the instance is suspect until its next snapshot.",
        lambda at: at.sequencer.counters.gaps,
    ),
    MetricRow(
        "digest_mismatches",
        COUNTER,
        "Frames whose digest differed from the index's; repaired by the next snapshot.",
        lambda at: at.sequencer.counters.digest_mismatches,
    ),
    MetricRow(
        "digest_divergence",
        COUNTER,
        "Instances of whose residencies an audit found others in memory than were applied.",
        lambda at: at.sequencer.counters.digest_divergence,
    ),
    MetricRow(
        "gaps_repaired",
        COUNTER,
        "Gaps after which a snapshot or a new epoch has made the instance whole again, or that were forgotten with it.",
        lambda at: at.sequencer.counters.gaps_repaired,
    ),
    MetricRow(
        "digest_repaired",
        COUNTER,
        "Divergences after which a snapshot or a new epoch has made the instance whole again, or which were forgotten "
        "with it.",
        lambda at: at.sequencer.counters.digest_repaired,
    ),
    MetricRow(
        "blind_starts",
        COUNTER,
        "Epochs whose start was not seen; whole after their next snapshot.",
        lambda at: at.sequencer.counters.blind_starts,
    ),
    MetricRow(
        "lives",
        COUNTER,
        "Times a fence said that what was read of an instance is of another life: its journal or the stream's end were "
        "lost.",
        lambda at: at.sequencer.counters.lives,
    ),
    MetricRow(
        "forgotten",
        COUNTER,
        "Instances forgotten: gone for long, or by name.",
        lambda at: at.sequencer.counters.forgotten,
    ),
    MetricRow("poison", COUNTER, "Messages that are no frames, skipped.", lambda at: at.sequencer.counters.poison),
    MetricRow(
        "foreign",
        COUNTER,
        "Messages with a frame of another instance than their subject's, refused.",
        lambda at: at.sequencer.counters.foreign,
    ),
    MetricRow(
        "newer",
        COUNTER,
        "Frames a newer kvbm wrote, and those behind one in its epoch, not applied; their instance is left out of "
        "answers.",
        lambda at: at.sequencer.counters.newer,
    ),
    MetricRow("snapshots_asked", COUNTER, "Snapshots asked of suspect instances.", lambda at: at.requests.asker.asked),
    MetricRow(
        "zombies", COUNTER, "Heartbeats of epochs that are over, ignored.", lambda at: at.heartbeats.liveness.zombies
    ),
    MetricRow(
        "double_ids",
        COUNTER,
        "Heartbeats of a second run that claims a live instance's id and epoch, ignored.",
        lambda at: at.heartbeats.liveness.double_ids,
    ),
    MetricRow(
        "routes_shared",
        COUNTER,
        "Routes that other catalogs of the cluster were told.",
        lambda at: at.queries.shared.told,
    ),
    MetricRow(
        "routes_unshared",
        COUNTER,
        "Routes that they could not be told, or without their blocks: too many at once, or NATS took none.",
        lambda at: at.queries.shared.untold,
    ),
    MetricRow(
        "routes_received",
        COUNTER,
        "Routes of other catalogs, counted as load here.",
        lambda at: at.queries.shared.received,
    ),
    MetricRow(
        "routes_refused",
        COUNTER,
        "Routes of other catalogs that were none, or of instances that are not heard here; a message that is none "
        "counts as one.",
        lambda at: at.queries.shared.refused,
    ),
    MetricRow(
        "namespaces_refused",
        COUNTER,
        "Namespaces that instances named and that are not kept: there are too many.",
        lambda at: at.sequencer.counters.namespaces_refused,
    ),
    MetricRow(
        "chains_refused",
        COUNTER,
        "Statements of instances on how they hash tokens that could not be used.",
        lambda at: at.sequencer.chains.refused,
    ),
    MetricRow("audits", COUNTER, "Passes of the audit over the whole index.", lambda at: at.upkeep.audits),
    MetricRow(
        "rows_read_again",
        COUNTER,
        "Times rows were let go because the database was away, and read again from the stream.",
        lambda at: at.writer.read_again,
    ),
    MetricRow(
        "rows_refused",
        COUNTER,
        "Rows left out because the database refuses what they hold.",
        lambda at: at.store.refused_rows,
    ),
    MetricRow(
        "checkpoints",
        COUNTER,
        "Checkpoints of the index written.",
        lambda at: at.checkpointer.written if at.checkpointer is not None else 0,
    ),
    MetricRow(
        "archive_lost",
        COUNTER,
        "Messages that aged out of the stream before they were archived.",
        lambda at: at.archive.lost if at.archive is not None else 0,
    ),
    MetricRow(
        "samples", COUNTER, "Sampled accesses archived.", lambda at: at.archive.samples if at.archive is not None else 0
    ),
    MetricRow(
        "samples_lost",
        COUNTER,
        "Sampled accesses heard and not archived.",
        lambda at: at.archive.samples_lost if at.archive is not None else 0,
    ),
    MetricRow("stream_sequence", GAUGE, "Sequence of the last message read.", lambda at: at.sequencer.sequence),
    MetricRow("stored_sequence", GAUGE, "Sequence up to which SQL has everything.", lambda at: at.writer.stored),
    MetricRow(
        "lag_messages",
        GAUGE,
        "Messages on the stream that were not read yet; NaN while the stream does not say where it ends.",
        lambda at: at.lag.known_messages(time.monotonic()),
    ),
    MetricRow(
        "lag_seconds",
        GAUGE,
        "Age of the newest frame read while messages are waiting, or of the view while the stream does not say where "
        "it ends; else 0.",
        _lag_s,
    ),
    MetricRow("ready", GAUGE, "1 once the stream was read up to its end at the start.", lambda at: at.is_ready),
    MetricRow(
        "degraded",
        GAUGE,
        "1 while NATS, the database or a folder does not take what it should.",
        lambda at: bool(at.degraded),
    ),
    MetricRow(
        "degraded_parts",
        GAUGE,
        "1 for a part that does not take what it should: NATS, SQL, archive, checkpoints, history, erasures; "
        "instances, for one whose heartbeats are ignored; tasks, for one that has ended and does not begin again.",
        _degraded_parts,
        ("part",),
    ),
    MetricRow("checkpoint_sequence", GAUGE, "Sequence of the last checkpoint written.", _checkpointed),
    MetricRow(
        "archive_sequence",
        GAUGE,
        "Sequence up to which the archive has everything.",
        lambda at: at.archive.sequence if at.archive is not None else 0,
    ),
    MetricRow(
        "suspect",
        GAUGE,
        "Instances that a snapshot would make whole; not those of which events only wait to be read.",
        lambda at: len(at.sequencer.suspicions.by_instance),
    ),
    MetricRow(
        "behind",
        GAUGE,
        "Instances that may have decided for a while what is not read: they say so, or are not heard.",
        lambda at: len(at.heartbeats.backlog.behind),
    ),
    MetricRow("behind_seconds", GAUGE, "How long ago the one of them known worst was known whole.", _behind_s),
    MetricRow(
        "excluded",
        GAUGE,
        "Instances whose residencies are left out of answers.",
        lambda at: len(at.heartbeats.liveness.excluded()),
    ),
    MetricRow(
        "instances",
        GAUGE,
        "Instances by the state that /v1/instances shows: live, stopping, stopped, silent, unheard.",
        _states,
        ("state",),
    ),
    MetricRow(
        "ignored",
        GAUGE,
        "Instances in whose name heartbeats come that count for nothing: another run has the place on the stream.",
        lambda at: len(at.heartbeats.ignored),
    ),
    MetricRow(
        "gone",
        GAUGE,
        "Instances known and stopped, silent or unheard; forgotten after catalog.forget_s.",
        lambda at: len(at.forgetting.downtimes),
    ),
    MetricRow(
        "troubled",
        GAUGE,
        "1 for an instance whose last heartbeat says that a part of it does not work, else 0; /v1/instances says what.",
        lambda at: {(name,): float(bool(beat.trouble)) for name, beat in _beats(at)},
        ("instance",),
    ),
    MetricRow("watches", GAUGE, "Feeds of changes that are open.", lambda at: len(at.watches)),
    MetricRow(
        "view_age_seconds",
        GAUGE,
        "Age of the view that answers rest on while silence does not count, or nobody confirms that all is read; else "
        "0.",
        lambda at: at.queries.view_age_s(),
    ),
    MetricRow("indexed_blocks", GAUGE, "Distinct blocks somebody holds.", lambda at: at.index.block_count()),
    MetricRow(
        "index_entries",
        GAUGE,
        "Residencies and claims that the index has; it refuses more than index_capacity.",
        lambda at: at.index.residency_count() + sum(at.index.claim_counts().values()),
    ),
    MetricRow(
        "index_capacity",
        GAUGE,
        "Residencies and claims that the index takes: catalog.capacity.",
        lambda at: at.settings.capacity,
    ),
    MetricRow(
        "anomalies",
        COUNTER,
        "Rules broken by events, by rule.",
        lambda at: _by_one(dict.fromkeys(ANOMALIES, 0) | at.index.anomalies()),
        ("rule",),
    ),
    MetricRow(
        "residencies",
        GAUGE,
        "Blocks an instance holds in a tier; not of instances that have stopped or are left out of answers.",
        _residencies,
        ("instance", "tier"),
    ),
    MetricRow("claims", GAUGE, "Blocks claimed for a pool.", lambda at: _by_one(at.index.claim_counts()), ("pool",)),
    MetricRow(
        "index_bytes",
        GAUGE,
        "Memory of the index: table is the blocks, sets who holds them together, rest instances and every namespace "
        "ever seen.",
        lambda at: _by_one(at.index.memory()),
        ("part",),
    ),
    MetricRow(
        "object_put_bytes",
        COUNTER,
        "Bytes an instance has put in the object pool: raw in memory, stored in the store; raw over stored is the "
        "ratio.",
        lambda at: _by_form(put_by_instance(_beats(at))),
        ("instance", "form"),
    ),
    MetricRow(
        "object_namespace_put_bytes",
        GAUGE,
        f"The same of the {_MOST_NAMESPACES} namespaces with the most of it, of those that were used lately; it also "
        "falls.",
        _of_namespaces,
        ("namespace", "form"),
    ),
    MetricRow(
        "prompts_missed",
        COUNTER,
        "Lookups, routes, questions of presence, of what can be read and of blocks, and watches that found nothing, by "
        "why: no_full_block, namespace_unknown, hashes_short, excluded, not_held.",
        _missed,
        ("question", "why"),
    ),
    MetricRow(
        "wanted_age_seconds",
        HISTOGRAM,
        "How old blocks of a tier were when they were wanted again in a hotter one, as instances tell it.",
        _wanted,
        ("tier",),
    ),
    MetricRow(
        "evicted_age_seconds",
        HISTOGRAM,
        "How old blocks of a tier were when they were evicted for want of room or because their time was over, as "
        "instances tell it.",
        _evicted,
        ("tier",),
    ),
    MetricRow(
        "evicted_unused", COUNTER, "Those of them that were never wanted again since they came.", _unused, ("tier",)
    ),
    MetricRow(
        "transfer_bytes_per_second",
        HISTOGRAM,
        "Rates of reads of blocks from other instances' memory, as they tell them; distance 0 is the same node.",
        _rates,
        ("transport", "distance"),
    ),
    MetricRow("transfer_bytes", COUNTER, "Bytes that came by them.", _transferred, ("transport", "distance")),
    MetricRow("transfer_failures", COUNTER, "Such reads that brought nothing.", _failed, ("transport", "distance")),
    MetricRow(
        "lent_bytes",
        COUNTER,
        "Bytes of blocks an instance has lent to others, by how: leased to be copied from its memory or read over "
        "rdma, or sent, over unix to its own machine.",
        _lent_by,
        ("instance", "transport"),
    ),
    MetricRow(
        "lent_blocks",
        GAUGE,
        "Blocks an instance lends now, none of which it can evict meanwhile; at most transport.lent_blocks.",
        _lent(lambda lent: lent.blocks_lent_now),
        ("instance",),
    ),
    MetricRow(
        "lending_connections",
        GAUGE,
        "Connections of readers that an instance has open now; at most transport.connections.",
        _lent(lambda lent: lent.connections),
        ("instance",),
    ),
    MetricRow(
        "lending_refusals",
        COUNTER,
        "What an instance did not lend, by why. Questions: busy (as much is lent as may be), not_held, not_opened, "
        "fenced, closing. Namespaces: unopened (not lent, or their root not proved). Connections: crowded (no place), "
        "unproved (no key, certificate or user that counts), broken (by what their reader said).",
        _not_lent,
        ("instance", "why"),
    ),
    MetricRow(
        "lending_leases_expired",
        COUNTER,
        "Leases that ended by time: their reader died, stood still or was too slow.",
        _lent(lambda lent: lent.expired),
        ("instance",),
    ),
    MetricRow(
        "lent_corrupt_blocks",
        COUNTER,
        "Blocks whose bytes an instance found wrong where they lie, on their way to a reader or when one said so.",
        _lent(lambda lent: lent.corrupt_blocks),
        ("instance",),
    ),
    MetricRow(
        "usage_byte_seconds",
        COUNTER,
        f"Bytes that tenants held in a tier, times seconds, as instances have recorded it; of the {SHOWN_TENANTS} "
        "tenants with the most, since this catalog began. 3600 are a byte-hour.",
        _used(0),
        ("tenant", "tier"),
    ),
    MetricRow(
        "usage_put_blocks",
        COUNTER,
        "Blocks of these tenants that were created in a tier, or offloaded to it.",
        _used(4),
        ("tenant", "tier"),
    ),
    MetricRow(
        "usage_read_blocks",
        COUNTER,
        "Blocks that requests of these tenants got instead of computing them, by the tier they were in.",
        _used(8),
        ("tenant", "tier"),
    ),
    MetricRow("usage_saved_tokens", COUNTER, "Tokens of prompts in those blocks.", _saved(12), ("tenant",)),
    MetricRow(
        "usage_saved_gpu_seconds",
        COUNTER,
        "Seconds of an engine that computing them would have taken, at the rate it had measured then.",
        _saved(14, 1e6),
        ("tenant",),
    ),
)
