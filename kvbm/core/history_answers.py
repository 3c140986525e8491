"""What a catalog answers about the past, below /v1/history; docs/history.md says what each is for.

Times are text, ISO 8601 in UTC to the microsecond, by the clocks of the instances. Every answer has `until`, the end of
the history it is from, and the `holes` that touch it: events that are missing, so that what they said is not known.
"""

from __future__ import annotations

from typing import Any

import msgspec

CLOCKS = "instances"  # whose clocks times are of
MOST_LISTED = 1000  # of what an answer lists: holes, epochs, events of a block, starts, stops
MOST_STEPS = 500
MOST_PROMPT_BLOCKS = 8192  # of a prompt that is asked for


class HistoryHole(msgspec.Struct, frozen=True, kw_only=True):
    """Events [first_offset, next_offset) of an epoch that the archive has not.

    Attributes:
        since, until: times of the frames before and behind it; since None: it is before the beginning.
    """

    instance: str
    stream: str
    epoch: int
    first_offset: int
    next_offset: int
    events: int
    since: str | None
    until: str


class HistoryStatus(msgspec.Struct, kw_only=True):
    """How far the history goes.

    Attributes:
        ready: whether it can be asked. reason: why not, or what does not work.
        begin: named "from" in JSON; the first moment.
        built: when its newest part was put in its place, by the catalog's clock.
        lags: it is so far behind the archive that it matters. lag_bytes: of the archive that it has not read.
            lag_s: for how long it has not read all of it.
        stays: rows; lasting: of those, that last. epochs: of instances. bytes: of its files.
        instances: names, at most MOST_LISTED.
    """

    ready: bool
    reason: str = ""
    begin: str | None = msgspec.field(name="from", default=None)
    until: str | None = None
    built: str | None = None
    lags: bool = False
    lag_bytes: int = 0
    lag_s: float | None = None
    stays: int = 0
    lasting: int = 0
    epochs: int = 0
    bytes: int = 0
    instances: list[str] = []
    notes: list[str] = []
    clocks: str = CLOCKS
    holes: list[HistoryHole] = []


class HistoryTier(msgspec.Struct, frozen=True, kw_only=True):
    """A tier of an instance at a moment; sizes are None where no start has told them.

    Attributes:
        blocks: held; None: it is a pool of the cluster, whose blocks are nobody's.
    """

    tier: str
    blocks: int | None
    slots: int | None
    block_bytes: int | None
    bytes: int | None
    name: str | None


class HistoryInstance(msgspec.Struct, frozen=True, kw_only=True):
    """An instance at a moment.

    Attributes:
        state: "running"; "stopped": it had said so; "ended": it begins anew later, without having stopped.
        began, last_frame: of its epoch, up to the moment. stopped: the reason it gave.
    """

    instance: str
    stream: str
    life: int
    epoch: int
    state: str
    began: str
    last_frame: str
    stopped: str | None
    engine: str
    version: str
    topology: list[str]
    blocks: int
    bytes: int | None
    tiers: list[HistoryTier]


class HistoryTierSum(msgspec.Struct, frozen=True, kw_only=True):
    """A tier of all instances."""

    tier: str
    blocks: int
    slots: int | None
    bytes: int | None


class HistoryTenant(msgspec.Struct, frozen=True, kw_only=True):
    """What a tenant had in a tier; None: whose blocks these are no start has told."""

    tenant: str | None
    tier: str
    blocks: int
    bytes: int | None
    instances: int


class HistoryOverview(msgspec.Struct, frozen=True, kw_only=True):
    """The cluster at a moment. Claims on pools of the cluster are nobody's, and `HistoryPools` has them."""

    at: str
    begin: str | None = msgspec.field(name="from")
    until: str | None
    instances: list[HistoryInstance]
    tiers: list[HistoryTierSum]
    tenants: list[HistoryTenant]
    holes: list[HistoryHole]
    clocks: str = CLOCKS


class HistoryPool(msgspec.Struct, frozen=True, kw_only=True):
    """A pool of the cluster at a moment, and how many blocks were claimed to be in it.

    Attributes:
        pool: None: which it was no start has told. bytes: None: nor how large a block is.
    """

    pool: str | None
    tier: str
    blocks: int
    bytes: int | None


class HistoryPools(msgspec.Struct, frozen=True, kw_only=True):
    """What pools of the cluster had at a moment, the fullest first, at most MOST_LISTED."""

    at: str
    until: str | None
    pools: list[HistoryPool]
    holes: list[HistoryHole]
    clocks: str = CLOCKS


class HistoryBlocksHeld(msgspec.Struct, frozen=True, kw_only=True):
    """Which blocks of a prompt a tier of an instance held, or a pool of the cluster was claimed to hold.

    Attributes:
        name: the tier's, or the pool's; None: which it was no start has told.
        blocks: how many. held: which, as in BlocksHeld.
    """

    name: str | None
    blocks: int
    held: str


class HistoryPromptHolder(msgspec.Struct, frozen=True, kw_only=True):
    """How much of a prompt an instance held at a moment.

    Attributes:
        state, epoch, last_frame, stopped: as in HistoryInstance.
        depth: blocks from the first on that it held in any tier, without a hole. run: those, by the hottest tier that
            held each.
        reach: where that run ends when its pool of the cluster, as claimed, goes on where its own tiers end.
        block_bytes: by tier, where a start has told them.
        tiers: those that held any of the prompt's blocks, hottest first.
    """

    instance: str
    stream: str
    state: str
    epoch: int | None
    last_frame: str | None
    stopped: str | None
    depth: int
    run: dict[str, int]
    reach: int
    block_bytes: dict[str, int]
    tiers: list[HistoryBlocksHeld]


class HistoryPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """Who held how much of a prompt at a moment: the deepest first.

    Attributes:
        block_tokens: of the namespace; None: no start has told it.
        more: instances that held some of it and are not named, because of `limit`.
        pools: of the cluster, as far as they were claimed to hold any of it.
    """

    at: str
    until: str | None
    namespace: str
    block_tokens: int | None
    blocks: int
    holders: list[HistoryPromptHolder]
    more: int
    pools: list[HistoryBlocksHeld]
    holes: list[HistoryHole]
    clocks: str = CLOCKS


class HistoryRanked(msgspec.Struct, frozen=True, kw_only=True):
    """What serving a prompt would have cost an instance that was idle, in seconds by parts; as in RankedInstance."""

    instance: str
    stream: str
    last_frame: str | None
    cost_s: float
    recompute_s: float
    fetch_s: float
    ttft_s: float
    depth: int
    missing_tokens: int
    fetch_blocks: int


class HistoryLeftOut(msgspec.Struct, frozen=True, kw_only=True):
    """An instance that held some of a prompt and did not run; `why` is "stopped" or "ended"."""

    instance: str
    stream: str
    why: str


class HistoryRoute(msgspec.Struct, frozen=True, kw_only=True):
    """What serving a prompt would have cost at a moment, the least first, as far as what it is made of is recorded.

    Attributes:
        prefill_tokens_per_s: by which computing is priced.
        without: the same of an instance that held nothing of it.
        excluded: instances that held some of it and did not run; of one name there may be several, in different
            streams.
        more: instances that held some of it, less than those that are ranked, or cost more.
        not_known: what the costs leave out, in sentences.
    """

    at: str
    until: str | None
    namespace: str
    blocks: int
    input_tokens: int
    prefill_tokens_per_s: float
    ranked: list[HistoryRanked]
    without: HistoryRanked
    excluded: list[HistoryLeftOut]
    more: int
    not_known: list[str]
    holes: list[HistoryHole]
    clocks: str = CLOCKS


class HistoryStep(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a stretch of time: blocks gained and lost in it, and held at its end by tier."""

    time: str
    gained: int
    lost: int
    blocks: dict[str, int]


class HistoryStart(msgspec.Struct, frozen=True, kw_only=True):
    """An epoch began."""

    time: str
    instance: str
    stream: str
    life: int
    epoch: int


class HistoryStop(msgspec.Struct, frozen=True, kw_only=True):
    """An epoch ended, as it had said."""

    time: str
    instance: str
    stream: str
    life: int
    epoch: int
    reason: str


class HistoryTimeline(msgspec.Struct, frozen=True, kw_only=True):
    """A stretch of time in equal parts."""

    begin: str = msgspec.field(name="from")
    to: str
    until: str | None
    steps: list[HistoryStep]
    starts: list[HistoryStart]
    stops: list[HistoryStop]
    holes: list[HistoryHole]
    clocks: str = CLOCKS


class HistoryHolder(msgspec.Struct, frozen=True, kw_only=True):
    """Who held a block, and since when."""

    instance: str
    stream: str
    tier: str
    since: str


class HistoryEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened to a block.

    Attributes:
        event: began, ended, claimed or unclaimed. sentence: it in words.
        cause: of a begin: created, listed, offload, onboard or fetch; of an end: why.
        source: the tier or instance it came from. target: the tier it moved to.
    """

    time: str
    instance: str
    stream: str
    life: int
    epoch: int
    offset: int
    event: str
    tier: str
    cause: str | None
    source: str | None
    target: str | None
    position: int | None
    slot: int | None
    sentence: str


class HistoryBlock(msgspec.Struct, frozen=True, kw_only=True):
    """A block's life."""

    block: str
    namespace: str
    model: str | None
    tenant: str | None
    held: list[HistoryHolder]
    events: list[HistoryEvent]


class HistoryBlocks(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks whose hash begins as asked. `more`: one has more events than are listed; the latest are."""

    at: str
    until: str | None
    blocks: list[HistoryBlock]
    more: bool
    holes: list[HistoryHole]
    clocks: str = CLOCKS


class HistoryChange(msgspec.Struct, frozen=True, kw_only=True):
    """So many block events of one kind."""

    instance: str
    tier: str
    event: str
    cause: str | None
    blocks: int


class HistoryChanges(msgspec.Struct, frozen=True, kw_only=True):
    """What changed in a stretch of time, its end not counted."""

    since: str
    to: str
    until: str | None
    changes: list[HistoryChange]
    starts: list[HistoryStart]
    stops: list[HistoryStop]
    holes: list[HistoryHole]
    clocks: str = CLOCKS


class HistoryTenants(msgspec.Struct, frozen=True, kw_only=True):
    """Whose blocks were held at a moment."""

    at: str
    until: str | None
    tenants: list[HistoryTenant]
    holes: list[HistoryHole]
    clocks: str = CLOCKS


class HistoryEpoch(msgspec.Struct, frozen=True, kw_only=True):
    """An epoch of an instance."""

    stream: str
    life: int
    epoch: int
    began: str
    last_frame: str
    stopped: str | None
    engine: str
    version: str


class HistoryNamespace(msgspec.Struct, frozen=True, kw_only=True):
    """A namespace's blocks in a tier."""

    tier: str
    namespace: str
    model: str | None
    tenant: str | None
    blocks: int
    bytes: int | None


class HistoryOfInstance(msgspec.Struct, frozen=True, kw_only=True):
    """An instance at a moment, and its epochs."""

    at: str
    until: str | None
    instances: list[HistoryInstance]
    epochs: list[HistoryEpoch]
    namespaces: list[HistoryNamespace]
    holes: list[HistoryHole]
    clocks: str = CLOCKS


class HistoryQuestion(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A question in SQL.

    Attributes:
        question: one SELECT.
        within_s: give it up after so long. rows: give so many at most.
    """

    question: str
    within_s: float | None = None
    rows: int | None = None


class HistoryColumn(msgspec.Struct, frozen=True, kw_only=True):
    """A column: its name, and its type as DuckDB calls it."""

    name: str
    type: str


class HistoryRows(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a question. `more`: there are more rows than were wanted."""

    columns: list[HistoryColumn]
    rows: list[list[Any]]
    more: bool
    until: str | None
    holes: list[HistoryHole]
    clocks: str = CLOCKS
