"""The catalog's overview, as its page gets it: what is known of every instance in columns, and what there is beside.

One answer is whole (`base` is null), or it has what has changed since the answer `base` of the same `run`.
"""

from __future__ import annotations

import msgspec

MOST_TENANTS = 1000  # in one answer
MOST_POOLS = 256


class InstanceColumns(msgspec.Struct, frozen=True, kw_only=True):
    """Instances, one entry in each list for each of them.

    Attributes:
        instance: names. cluster, state, excluded, engine, version, place, trouble, suspicion: indexes into `words`;
            `place` is the topology, outermost first, with " / " between; `trouble` and `suspicion` are sentences.
        epoch: as far as the stream was read. unread: events that it has decided and that are not in the index; null
            where it does not say.
        suspect: 1: it may hold more or less than is said here.
        heard: Unix time of its last heartbeat, in whole seconds, where that is not fresh; 0 while it is; null: none.
        queued, running: prompt tokens that wait, and requests that run; null where no heartbeat says it.
        blocks, slots, block_bytes: a list for each tier, hottest first: HBM, HOST, NVME. What it holds, and the pool
            that it has declared; 0 slots: none.
        put: bytes that its run has put in the object pool, as they lie in the store.
    """

    instance: list[str]
    cluster: list[int]
    state: list[int]
    excluded: list[int]
    engine: list[int]
    version: list[int]
    place: list[int]
    trouble: list[int]
    suspicion: list[int]
    epoch: list[int]
    unread: list[int | None]
    suspect: list[int]
    heard: list[int | None]
    queued: list[int | None]
    running: list[int | None]
    blocks: list[list[int]]
    slots: list[list[int]]
    block_bytes: list[list[int]]
    put: list[int]
    words: list[str]


class TenantColumns(msgspec.Struct, frozen=True, kw_only=True):
    """Tenants, by the blocks that they have in object pools, at most MOST_TENANTS; `more` are not told.

    Attributes:
        tenant: names; "" for namespaces without one, and "*" where the catalog's settings have limits for all that they
            do not name: that entry counts those together. namespaces: how many have said their fields. instances: that
            serve one of them.
        blocks: claimed to be in object pools, whoever has put them. held: the same in bytes, as they lie in the store:
            reckoned by the size of a block, and by what compression saves those who put now; null: nobody has said how
            large a pool's blocks are.
        put_raw, put_stored: bytes that those who run now have put in object pools: in memory, and as they lie in the
            store. What was withdrawn since, or put by others before, makes no difference.
        quota: bytes that it may have in object pools, as the catalog's settings say, or else its database; null: none
            is known.
        host_quota, nvme_quota: bytes that it may have in each instance's pool, as the catalog's settings say; null: no
            limit. An instance goes by its own settings.
        prompts, asked, found: of the prompts that engines have told of since the catalog began: how many, their blocks,
            and those that were found. Told of is a sample, which is reckoned up; null where nobody listens, for want of
            an archive.
    """

    tenant: list[str]
    namespaces: list[int]
    instances: list[int]
    blocks: list[int]
    held: list[int | None]
    put_raw: list[int]
    put_stored: list[int]
    quota: list[int | None]
    host_quota: list[int | None]
    nvme_quota: list[int | None]
    prompts: list[int | None]
    asked: list[int | None]
    found: list[int | None]
    more: int = 0


class TierTotals(msgspec.Struct, frozen=True, kw_only=True):
    """One tier of all instances that are not left out of answers.

    Attributes:
        instances: that have such a pool. blocks, slots: held, and how many there is room for.
        bytes, capacity_bytes: the same in bytes.
    """

    tier: str
    instances: int
    blocks: int
    slots: int
    bytes: int
    capacity_bytes: int


class PoolTotals(msgspec.Struct, frozen=True, kw_only=True):
    """One pool of the cluster: what is claimed to be in it; `bytes` null: nobody has said the size of its blocks."""

    pool: str
    blocks: int
    bytes: int | None


class AgesTold(msgspec.Struct, frozen=True, kw_only=True):
    """How old blocks of a tier were when they were wanted again (`hits`) and when they were evicted.

    As `core.ages` counts them, in the buckets of `bounds_s` and one of older ones. Of HBM no event tells of hits.
    """

    tier: str
    hits: list[int]
    hits_s: int
    evicted: list[int]
    evicted_s: int
    reused: int
    unused: int


class CatalogState(msgspec.Struct, frozen=True, kw_only=True):
    """The catalog itself.

    Attributes:
        sees_all: whether who asks sees all tenants; if not, numbers are left out.
        lag_messages, lag_s: of the stream, not read yet; null: not known, or not told.
        archive, history: whether it keeps an archive, and answers questions of the past.
        view_age_s: as in LookupAnswer.
    """

    version: str
    ready: bool
    reason: str
    degraded: str
    parts: str
    sees_all: bool
    stream_sequence: int | None
    lag_messages: int | None
    lag_s: float | None
    view_age_s: float
    archive: bool
    history: bool


class SampledTold(msgspec.Struct, frozen=True, kw_only=True):
    """See TenantColumns."""

    prompts: int
    asked: int
    found: int


class OverviewAnswer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The overview.

    Attributes:
        run, version: of the computation; `base`: what the answer goes on from, null for a whole one.
        at_ms: Unix time, by the catalog's clock.
        states, excluded: how many instances are in each state, and left out for each reason.
        events: what the catalog has counted of the stream since it began, by name as in its metrics.
        missed: by question and reason, how often nothing was found.
        sampled: all prompts that engines have told of, as TenantColumns counts them; null: nobody listens.
        rows: all instances, or those that have changed or come. gone: those that are no more.
        tenants: null in an answer with a base: as before.
    """

    run: str
    version: int
    at_ms: int
    catalog: CatalogState
    states: dict[str, int]
    excluded: dict[str, int]
    suspect: int
    tiers: list[TierTotals]
    pools: list[PoolTotals]
    events: dict[str, int]
    bounds_s: list[int]
    ages: list[AgesTold]
    missed: dict[str, dict[str, int]]
    sampled: SampledTold | None
    rows: InstanceColumns
    base: int | None = None
    gone: list[str] = []
    tenants: TenantColumns | None = None


class LentTold(msgspec.Struct, frozen=True, kw_only=True):
    """What an instance's process has lent to others: bytes by way, and how often it did not, by why."""

    bytes: dict[str, int]
    refused: dict[str, int]


class TransferTold(msgspec.Struct, frozen=True, kw_only=True):
    """A read from another instance that an instance's last heartbeat tells of.

    Attributes:
        distance: of the two, as in PeerHolding. size: bytes; 0: it failed.
        took_us: microseconds from question to answer.
    """

    transport: str
    distance: int
    size: int
    took_us: int


class NamespaceUsed(msgspec.Struct, frozen=True, kw_only=True):
    """A namespace that an instance has used lately. `model` and `tenant` null: nobody has said its fields."""

    id: str
    model: str | None
    tenant: str | None
    put_raw: int
    put_stored: int


class TenantsTold(msgspec.Struct, frozen=True, kw_only=True):
    """Of an overview, what it tells of tenants and of the pools in which their blocks lie."""

    tenants: TenantColumns
    pools: list[PoolTotals]


class InstanceDetail(msgspec.Struct, frozen=True, kw_only=True):
    """What an instance's last heartbeat tells beside what `/v1/instances` has.

    Attributes:
        lends: where others can read its blocks. lent: null: it lends nothing.
        transfers: at most 100. namespaces: at most 200 of `more_namespaces` + 200.
        ages: since its process began.
    """

    instance: str
    prefill_tokens_per_s: float
    queue_tokens_per_s: float
    put_raw: int
    put_stored: int
    lends: dict[str, str]
    lent: LentTold | None
    transfers: list[TransferTold]
    namespaces: list[NamespaceUsed]
    more_namespaces: int
    bounds_s: list[int]
    ages: list[AgesTold]
