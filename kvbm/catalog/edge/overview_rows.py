"""What the overview has of one instance, and many of them as columns."""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from typing import Any, NamedTuple

from kvbm.catalog.put_bytes import put_by_instance
from kvbm.catalog.service import CatalogService
from kvbm.core.events import JANITOR
from kvbm.core.ids import InstanceId, Reach, Tier
from kvbm.core.overview import InstanceColumns

ROW_TIERS = (Tier.HBM, Tier.HOST, Tier.NVME)
_MOST_TEXT = 400  # characters of what an instance says of itself
_NOTHING = (0,) * len(ROW_TIERS)
_WORDS = ("cluster", "state", "excluded", "engine", "version", "place", "trouble", "suspicion")
_PLAIN = ("instance", "epoch", "unread", "suspect", "heard", "queued", "running", "put")
_OF_TIERS = ("blocks", "slots", "block_bytes")


class OverviewRow(NamedTuple):
    """One instance; as `InstanceColumns` has it, with words as they are."""

    instance: str
    cluster: str
    state: str
    excluded: str
    engine: str
    version: str
    place: str
    trouble: str
    suspicion: str
    epoch: int
    unread: int | None
    suspect: int
    heard: int | None
    queued: int | None
    running: int | None
    blocks: tuple[int, ...]
    slots: tuple[int, ...]
    block_bytes: tuple[int, ...]
    put: int


def row_of(
    service: CatalogService, name: InstanceId, now_s: float, now_ns: int, pool_sizes: dict[str, int]
) -> OverviewRow:
    """What is known of an instance now.

    Args:
        now_s, now_ns: by the monotonic clock, and Unix time.
        pool_sizes: bytes of a block in each pool of the cluster that it has; put here.
    """
    index, liveness, sequencer = service.index, service.heartbeats.liveness, service.sequencer
    view, last, told = index.view(name), liveness.last(name), sequencer.instance_row(name)
    is_suspect = view is None or view.suspect or name in service.heartbeats.backlog.behind
    heard: int | None = None
    queued = running = unread = None
    trouble, put = "", 0
    if last is not None:
        beat, age_s = last.heartbeat, now_s - last.at_s
        heard = 0 if age_s < liveness.liveness_s else int(now_ns / 1e9 - age_s)
        queued, running, trouble = beat.queued_tokens, beat.running_requests, beat.trouble
        position = sequencer.position(name)
        if beat.applied and beat.epoch == position.epoch:
            unread = max(0, beat.applied - position.offset)
        if beat.put_bytes or any(beat.put_total):
            put = sum(stored for _, stored in put_by_instance([(name, beat)]).values())
    slots, sizes = list(_NOTHING), list(_NOTHING)
    for pool in view.pools if view is not None else ():
        if pool.reach == Reach.CLUSTER:
            if told is not None and told.engine == JANITOR:  # it opens the pool without knowing how large blocks are
                continue
            pool_sizes[index.pool_name(name, pool.tier) or pool.name] = pool.block_bytes
        elif pool.tier < len(ROW_TIERS):
            slots[pool.tier], sizes[pool.tier] = pool.slots, pool.block_bytes
    why = liveness.why(name)
    return OverviewRow(
        instance=name,
        cluster=service.heartbeats.cluster_of(name) or "",
        state=liveness.state(name).value,
        excluded=why.value if why is not None else "",
        engine=told.engine[:_MOST_TEXT] if told is not None else "",
        version=told.version[:_MOST_TEXT] if told is not None else "",
        place=" / ".join(told.topology)[:_MOST_TEXT] if told is not None else "",
        trouble=trouble[:_MOST_TEXT],
        suspicion="; ".join(service.queries.suspicions(name))[:_MOST_TEXT] if is_suspect else "",
        epoch=view.epoch if view is not None else 0,
        unread=unread,
        suspect=int(is_suspect),
        heard=heard,
        queued=queued,
        running=running,
        blocks=tuple(view.counts.get(tier, 0) for tier in ROW_TIERS) if view is not None else _NOTHING,
        slots=tuple(slots),
        block_bytes=tuple(sizes),
        put=put,
    )


def without_numbers(row: OverviewRow) -> OverviewRow:
    """Who an instance is and whether it serves: numbers and words of trouble are of all tenants."""
    return row._replace(
        place="",
        trouble="",
        suspicion="",
        unread=None,
        queued=None,
        running=None,
        blocks=_NOTHING,
        slots=_NOTHING,
        block_bytes=_NOTHING,
        put=0,
    )


def columns_of(rows: Iterable[OverviewRow]) -> InstanceColumns:
    """The same in columns."""
    kept = list(rows)
    numbers: dict[str, int] = {}
    fields: dict[str, Any] = {name: list(map(attrgetter(name), kept)) for name in _PLAIN}
    for name in _WORDS:
        fields[name] = [numbers.setdefault(word, len(numbers)) for word in map(attrgetter(name), kept)]
    for name in _OF_TIERS:
        fields[name] = [[row[tier] for row in map(attrgetter(name), kept)] for tier in range(len(ROW_TIERS))]
    return InstanceColumns(**fields, words=list(numbers))
