"""What is asked of the catalog, and what it answers: JSON over HTTP, the same structs at both ends.

Hashes and namespace ids are lower-case hex, 32 digits each; a run of hashes may be one long hex string.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from kvbm.core.ids import MAX_NAME_BYTES, MAX_TEXT_BYTES, Namespace
from kvbm.core.usage import UsageGap, UsageHour

MAX_HASHES = 65_536
MAX_TOKENS = 1 << 20
MAX_INPUT_TOKENS = 1 << 24
MAX_POSITIONS = 256
MAX_MEDIA = 256  # of a prompt
MOST_KEY_TEXT = 4096  # characters of a salt, an adapter's name or path, an identifier
MAX_PEERS = 4
MAX_LABELS = 16  # of a place
MAX_LABEL = 128  # characters of each
MOST_LENT = 16  # instances that lend, by which one route is priced
LIMIT = 8
MAX_LIMIT = 1024
MAX_INSTANCES = 1000  # in one answer
MAX_WAIT_S = 5.0
MAX_DEADLINE_S = 86_400.0
MOST_LOAD_S = 1e9  # of waits and work
MOST_CANDIDATES = 1_000_000
_MOST_COUNT = (1 << 63) - 1  # of an epoch or an offset
_HEX_DIGITS = 32  # of a hash

Count = Annotated[int, msgspec.Meta(ge=0, le=_MOST_COUNT)]
Hashes = Annotated[
    str, msgspec.Meta(description="32 hex digits each", extra_json_schema={"maxLength": _HEX_DIGITS * MAX_HASHES})
]
HashList = Annotated[list[str], msgspec.Meta(extra_json_schema={"maxItems": MAX_HASHES})]
Tokens = Annotated[
    list[Annotated[int, msgspec.Meta(extra_json_schema={"minimum": 0, "maximum": (1 << 32) - 1})]],
    msgspec.Meta(extra_json_schema={"maxItems": MAX_TOKENS}),
]
KeyText = Annotated[str, msgspec.Meta(max_length=MOST_KEY_TEXT)]
HashHex = Annotated[str, msgspec.Meta(pattern="^[0-9a-fA-F]{32}$", description="16 bytes as 32 hex digits")]


class PositionWanted(msgspec.Struct, frozen=True, kw_only=True):
    """A place in an instance's stream that the answer must have seen: everything before `offset` of `epoch`."""

    instance: Annotated[str, msgspec.Meta(max_length=128)]
    epoch: Count
    offset: Count


class MediaAsked(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An image, a sound or the like in a prompt of tokens.

    Attributes:
        identifier: what the engine knows it by, as vLLM's `mm_hashes` or the request's `multi_modal_uuids` have it.
        offset: of its first token in the prompt. tokens: how many stand for it.
    """

    identifier: Annotated[str, msgspec.Meta(min_length=1, max_length=MOST_KEY_TEXT)]
    offset: Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]
    tokens: Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]


class LookupRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Who has how much of this prefix? Give `hashes`, or `tokens` when the catalog knows the tenant's secret.

    Attributes:
        namespace: its id, or its fields.
        hashes: of the prompt's full blocks in order: a list, or one string of 32 digits each.
        tokens: token ids of the prompt, those that stand for media among them.
        model, tenant: with tokens and no namespace: of whichever namespaces have these.
        salt: with tokens: the request's `cache_salt`. lora, lora_path: name and path of its adapter, as its engine has
            them. media: in the order of the prompt.
        at_least: what the answer must have seen; it waits for that up to `timeout_s` seconds.
        timeout_s: for `at_least`.
        limit: at most this many instances are named, the best first.
        instances: only these are looked at; None for all.
    """

    namespace: HashHex | Namespace | None = None
    hashes: Hashes | HashList | None = None
    tokens: Tokens | None = None
    model: Annotated[str, msgspec.Meta(max_length=MAX_TEXT_BYTES)] = ""
    tenant: Annotated[str, msgspec.Meta(max_length=MAX_NAME_BYTES)] = ""
    salt: KeyText = ""
    lora: KeyText = ""
    lora_path: KeyText = ""
    media: Annotated[list[MediaAsked], msgspec.Meta(max_length=MAX_MEDIA)] = []
    at_least: Annotated[list[PositionWanted], msgspec.Meta(max_length=MAX_POSITIONS)] = []
    timeout_s: Annotated[float, msgspec.Meta(ge=0, le=MAX_WAIT_S)] = 1.0
    limit: Annotated[int, msgspec.Meta(ge=1, le=MAX_LIMIT)] = LIMIT
    instances: (
        Annotated[list[Annotated[str, msgspec.Meta(max_length=128)]], msgspec.Meta(max_length=MAX_POSITIONS)] | None
    ) = None


class PresenceRequest(LookupRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which of these blocks are held, and by whom?

    As a lookup, but each block counts by itself: what is asked for may have holes.
    """


class FindRequest(LookupRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What of these blocks can be read from elsewhere?

    What pools are claimed to hold of them, and which live instances lend them.

    Attributes:
        limit: at most this many instances, the nearest first; the one that holds the most is among them.
        first: instances are asked for from this block on. Pools are asked for from the first of all.
        instances: only these are looked at, and those of them that lend are answered even where they hold none of it:
            what is on its way to one of them can be asked for there.
        asker: the instance that asks, which is no answer. topology: where it stands, outermost first.
    """

    limit: Annotated[int, msgspec.Meta(ge=1, le=MAX_PEERS)] = MAX_PEERS
    first: Annotated[int, msgspec.Meta(ge=0, le=MAX_HASHES)] = 0
    asker: Annotated[str, msgspec.Meta(max_length=128)] = ""
    topology: Annotated[list[Annotated[str, msgspec.Meta(max_length=128)]], msgspec.Meta(max_length=MAX_LABELS)] = []


class LentRun(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Blocks of a prompt that an instance lends, as routes are priced by them.

    Attributes:
        begin, end: the first block, and behind the last one, counted in the prompt.
        place: where the instance stands, outermost first.
        host: names its machine, where others can share its memory; "": nobody can. tcp: it lends over TCP.
    """

    instance: Annotated[str, msgspec.Meta(max_length=300)]
    begin: Annotated[int, msgspec.Meta(ge=0, le=MAX_HASHES)]
    end: Annotated[int, msgspec.Meta(ge=0, le=MAX_HASHES)]
    place: Annotated[tuple[Annotated[str, msgspec.Meta(max_length=128)], ...], msgspec.Meta(max_length=MAX_LABELS)] = ()
    host: Annotated[str, msgspec.Meta(max_length=300)] = ""
    tcp: bool = False


class CandidateLoad(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What prices depend on of candidates together: of those that another catalog ranks, see "Parts" in
    docs/operate.md.

    Attributes:
        least_s: the shortest wait among them.
        recent_s: what this caller has routed to them lately, decayed, in seconds of prefill, all together.
        candidates: how many.
        lent: what instances that the catalog follows lend of the prompt, the deepest first.
    """

    least_s: Annotated[float, msgspec.Meta(ge=0, le=MOST_LOAD_S)]
    recent_s: Annotated[float, msgspec.Meta(ge=0, le=MOST_LOAD_S)]
    candidates: Annotated[int, msgspec.Meta(ge=0, le=MOST_CANDIDATES)]
    lent: Annotated[tuple[LentRun, ...], msgspec.Meta(max_length=MOST_LENT)] = ()


class RouteRequest(LookupRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which instance should serve this prompt? As a lookup, and the routed prompt is remembered.

    Attributes:
        input_tokens: tokens of the whole prompt, its partial last block included; may be left out when `tokens` are
            given. What an instance is taken to be busy with grows by at most 1,048,576 tokens with one route.
        latency: what waits more: an interactive prompt counts its own wait double, one of a batch that of others, and
            is not admitted while even the least busy instance has a long queue.
        deadline_s: the first token is of no use later than this from now. Instances that can keep it go first; where
            none can, the prompt is not admitted.
        phase: "prefill" or "decode" where another instance does the other; "both" where one does all.
        remember: False: the prompt is not remembered as sent, and the answer has `candidates`.
        elsewhere: candidates that other catalogs rank: prices are those among all together.
    """

    input_tokens: Annotated[int, msgspec.Meta(ge=0, le=MAX_INPUT_TOKENS)] | None = None
    latency: Literal["interactive", "standard", "batch"] = "standard"
    deadline_s: Annotated[float, msgspec.Meta(gt=0, le=MAX_DEADLINE_S)] | None = None
    phase: Literal["both", "prefill", "decode"] = "both"
    remember: bool = True
    elsewhere: CandidateLoad | None = None


class HistoryPromptRequest(LookupRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who held how much of a prompt at a moment? As a lookup, of at most 8,192 blocks; `at_least` and `instances` are
    of now alone.

    Attributes:
        at: ISO 8601, Unix seconds, or a clock time such as 12:00 (UTC); None: the end of the history.
    """

    at: Annotated[str, msgspec.Meta(max_length=MAX_NAME_BYTES)] | None = None


class HistoryRouteRequest(HistoryPromptRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What would serving a prompt have cost at a moment, by what is recorded of it?

    Attributes:
        input_tokens, latency: as in RouteRequest.
    """

    input_tokens: Annotated[int, msgspec.Meta(ge=0, le=MAX_INPUT_TOKENS)] | None = None
    latency: Literal["interactive", "standard", "batch"] = "standard"


class InstanceHolding(msgspec.Struct, frozen=True, kw_only=True):
    """How much of a prefix one instance has.

    Attributes:
        depth: blocks from the first on that it holds in any tier, without a hole.
        tiers: blocks of that run, by the hottest tier that holds each.
        reach: where the run ends when the instance's cluster pools go on, with whole objects, where its own tiers end.
        suspect: events of it were missed and it has not listed again what it holds since, or what it has decided is not
            read.
    """

    instance: str
    depth: int
    tiers: dict[str, int]
    reach: int
    suspect: bool


class PoolHolding(msgspec.Struct, frozen=True, kw_only=True):
    """How many blocks of a prefix, from the first on, a pool of cluster reach is claimed to hold.

    Objects are read whole: of one that is not claimed from its first block to its last nothing counts.
    """

    pool: str
    depth: int


MissedWhy = Literal["no_full_block", "namespace_unknown", "hashes_short", "excluded", "not_held"]


class NearNamespace(msgspec.Struct, frozen=True, kw_only=True):
    """A known namespace, where one was asked for that is not.

    Attributes:
        differs: the fields in which it differs from what was asked for, and what it has there, as texts; empty where
            the question gave an id. What was asked for is not repeated: answers tell apart nothing that is not the
            caller's business.
    """

    id: str
    model: str
    differs: dict[str, str]


class MissedAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Why nothing was found for a prompt.

    Attributes:
        why: "no_full_block", "namespace_unknown" (no instance has named it, as far as the caller may know),
            "hashes_short" (of a route: fewer than the prompt has full blocks), "excluded" (those that hold the first
            block are left out), or "not_held".
        message: the same in a sentence.
        near: of a namespace that is not known, up to three that are: of its model, those that differ least.
    """

    why: MissedWhy
    message: str
    near: list[NearNamespace] = []


class LookupAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Who has how much of a prefix: the deepest first, then those that reach furthest, then those where least waits.

    Attributes:
        blocks: full blocks asked for.
        deepest: the largest depth of all instances and pools.
        excluded: instances left out because they have stopped, fallen silent, or are of a newer kvbm; no more than
            `limit`.
        more: instances that have the first block and are not named, because of `limit`. more_excluded: the same of
            `excluded`.
        missed: where nothing was found, why; else it is left out.
        view_age_s: how old the view is while the catalog cannot tell who is silent, or that it has read all there is;
            else 0.
    """

    namespace: str
    blocks: int
    deepest: int
    instances: list[InstanceHolding]
    pools: list[PoolHolding]
    excluded: list[str]
    view_age_s: float = 0.0
    more: int = 0
    more_excluded: int = 0
    missed: MissedAnswer | msgspec.UnsetType = msgspec.UNSET


class BlocksHeld(msgspec.Struct, frozen=True, kw_only=True):
    """Which of the blocks one holder has in one tier.

    Attributes:
        name: of an instance, or of a pool of cluster reach. kind: "instance" or "pool". suspect: as in InstanceHolding.
        held: a bit for each block that was asked for, in hex: the first is the lowest bit of the first byte.
    """

    name: str
    kind: str
    tier: str
    suspect: bool
    held: str

    def bits(self) -> bytes:
        """`held`, packed. Raises ValueError: it is not hex."""
        return bytes.fromhex(self.held)


class PresenceAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Who has which of some blocks: the instances with the most of them first, then pools.

    `view_age_s` as in LookupAnswer.

    Attributes:
        blocks: asked for.
        holders: one entry for each tier in which a holder has any of them.
        more: instances that have some and are not named, because of `limit`.
        missed: where nobody has any, why; else it is left out.
    """

    namespace: str
    blocks: int
    holders: list[BlocksHeld]
    view_age_s: float = 0.0
    more: int = 0
    missed: MissedAnswer | msgspec.UnsetType = msgspec.UNSET


class PeerHolding(msgspec.Struct, frozen=True, kw_only=True):
    """A live instance that lends blocks.

    Attributes:
        depth: blocks it holds in HOST or NVME, from the first that was asked for on, without a hole.
        tiers: those, by the hotter of the two that holds each.
        distance: from who asks; 0 is the same place.
        suspect: as in InstanceHolding.
        lends: where: `host`, which names its machine, and on that machine `unix`, a socket's path; `tcp`, a host:port;
            `rdma`, its device; `nixl`, what NIXL moves bytes by.
    """

    instance: str
    depth: int
    tiers: dict[str, int]
    distance: int
    suspect: bool
    lends: dict[str, str]


class FindAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What of some blocks can be read from elsewhere. `view_age_s` as in LookupAnswer.

    Attributes:
        blocks: asked for.
        pools: those that are claimed to have the first of them, the deepest first.
        peers: instances, the nearest first.
        missed: where nobody has any, why; else it is left out, also where instances hold some and lend none.
    """

    namespace: str
    blocks: int
    pools: list[PoolHolding]
    peers: list[PeerHolding]
    view_age_s: float = 0.0
    missed: MissedAnswer | msgspec.UnsetType = msgspec.UNSET


class RankedInstance(msgspec.Struct, frozen=True, kw_only=True):
    """One instance and what serving the prompt there would cost, in seconds by parts.

    Attributes:
        depth: blocks the instance need not compute: held, fetched, or soon to hold.
        missing_tokens: tokens it must compute.
        fetch_blocks: blocks of `depth` that must be brought to HBM.
        peer_blocks: those of them that other instances lend. peer: the one that most of them come from; "" where none
            do.
        cost_s: the sum of the parts.
        ttft_s: when its first token is to be expected: waiting, fetching and computing, nothing weighed.
        admitted: False: it cannot keep the deadline, or the prompt is of a batch and others wait.
        load_age_s: how old the heartbeat is that its load is taken from, where that is a guess: none has come lately.
            None: none has come since the catalog began, or since the instance did. 0 while it is fresh.
    """

    instance: str
    cost_s: float
    queueing_s: float
    recompute_s: float
    balance_s: float
    fetch_s: float
    depth: int
    missing_tokens: int
    fetch_blocks: int
    suspect: bool
    ttft_s: float = 0.0
    admitted: bool = True
    peer: str = ""
    peer_blocks: int = 0
    load_age_s: float | None = 0.0


class RouteAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The instance to send the prompt to, and those considered, best first;

    `more` others are worse. `view_age_s` as in LookupAnswer.

    Attributes:
        admitted: False: its deadline cannot be kept, or it is of a batch and others wait; it is not remembered as sent.
            Refuse it, or ask again later.
        missed: where nobody has anything of the prompt, why; else it is left out.
        candidates: of a route that is not remembered, those the catalog has ranked; None: the caller may not know, or
            it is remembered.
        excluded: instances that have the prompt's first block, and why that does not count ("silent", "stopped",
            "restarted", "newer", as in InstanceSummary) or why they are not sent the prompt ("stopping"); no more than
            `limit`, by name.
    """

    instance: str
    namespace: str
    blocks: int
    ranked: list[RankedInstance]
    view_age_s: float = 0.0
    more: int = 0
    admitted: bool = True
    candidates: CandidateLoad | None = None
    excluded: dict[str, str] = {}
    missed: MissedAnswer | msgspec.UnsetType = msgspec.UNSET


class BlockHolder(msgspec.Struct, frozen=True, kw_only=True):
    """One holder of a block: an instance, or a pool of cluster reach."""

    name: str
    kind: str
    tier: str
    suspect: bool


class BlockAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Who holds a block. `view_age_s` as in LookupAnswer.

    Attributes:
        missed: where nobody does, why.
    """

    namespace: str
    hash: str
    holders: list[BlockHolder]
    view_age_s: float = 0.0
    missed: MissedAnswer | msgspec.UnsetType = msgspec.UNSET


class SnapshotAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Whether an instance has heard that it shall take a snapshot of what it holds.

    It does when it may: at most once in `snapshots.least_s`.
    """

    instance: str
    heard: bool


class ForgottenAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """An instance was forgotten: nothing is known of it any more.

    What it has put in object stores stays there, and is found.
    """

    instance: str


class PoolSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One pool as its instance declared it, and how many blocks it is known to hold; of a cluster pool, all its
    claims.
    """

    tier: str
    slots: int
    block_bytes: int
    reach: str
    name: str
    held_blocks: int


class InstanceSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One instance.

    Attributes:
        instance, cluster: its name, and that of its cluster.
        epoch: its incarnation, as far as the stream was read.
        engine, version: who embeds the manager, and its version of kvbm. topology: where it stands, outermost first.
        pools: its pools, hottest first. held_blocks: blocks it holds, by tier.
        suspect: it may hold more or less than answers say; `suspicions` says why.
        state: "live", "silent" (no heartbeat lately), "stopping", "stopped", or "unheard" (never a heartbeat).
        offset: everything before it is in the index.
        published, applied: as the last heartbeat says: what is on the stream, and what was decided; None where none
            says it.
        digest: 16 hex digits.
        partial: residencies of it were refused at the catalog's capacity.
        suspicions: why it is suspect, in words. snapshot_asked_s: seconds since the catalog last asked it for a
            snapshot, while it is.
        excluded: why it is left out of answers: "silent", "stopped", "restarted", "newer" (a newer kvbm writes what
            this catalog cannot read), or "".
        trouble, run: as its last heartbeat says: what it cannot do now, and which process it is.
        heartbeat_age_s, queued_tokens, running_requests, free_slots: from the last heartbeat; None without one.
    """

    instance: str
    cluster: str
    state: str
    epoch: int
    offset: int
    published: int | None
    applied: int | None
    digest: str
    suspect: bool
    partial: bool
    suspicions: list[str]
    snapshot_asked_s: float | None
    excluded: str
    trouble: str
    run: str
    engine: str
    version: str
    topology: list[str]
    pools: list[PoolSummary]
    held_blocks: dict[str, int]
    heartbeat_age_s: float | None
    queued_tokens: int | None
    running_requests: int | None
    free_slots: dict[str, int] | None


class InstancesAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Instances, by name; `more` come after the last.

    Attributes:
        forgotten: of the names that were asked for, those that the catalog does not know because it has forgotten them;
            one that it neither knows nor has forgotten it never heard of. It remembers for at least 25 hours after an
            instance was last heard, and as long as the stream has a message of it; not beyond the begin of another
            stream. Null: no name was asked for, or whoever asks is not told.
    """

    instances: list[InstanceSummary]
    more: int = 0
    forgotten: list[str] | None = None


class NamespaceSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A namespace whose fields an instance has told."""

    id: str
    fields: Namespace


class NamespacesAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Namespaces whose fields are known, by id; `more` come after the last."""

    namespaces: list[NamespaceSummary]
    more: int = 0


class ReadyAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the catalog has read the stream up to where it ended when it was started.

    Who has no operator's token is told `ready` and `reason` alone, and one who has a token `parts`.

    Attributes:
        degraded: what does not work though answers are good, each with the part it is of; "" when all does.
        stream_sequence: of the last message read; None: whoever asks is not told.
        lag_messages: on the stream and not read yet; None: the stream does not say where it ends, or whoever asks is
            not told.
        parts: of its cluster that the catalog follows, as in `catalog.parts`; "" for all.
    """

    ready: bool
    reason: str
    degraded: str = ""
    stream_sequence: int | None = None
    lag_messages: int | None = None
    parts: str = ""


class ReadyWord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`ReadyAnswer` as those are told it who may know no more."""

    ready: bool
    reason: str
    parts: str = ""


class UsageAnswer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What tenants have used in clock hours, of all instances together.

    Attributes:
        hours: in the order of time, then of tenants; only where something was used.
        gaps: times of which instances have recorded nothing, that begin in the whole stretch that was asked for,
            whichever tenants were; for callers of all tenants, with the first page.
        next: ask again `from` here for what is left; "" where nothing is.
    """

    hours: list[UsageHour] = []
    gaps: list[UsageGap] = []
    next: str = ""


class ErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    """Why a request failed.

    Attributes:
        code: a constant for programs.
        message: what happened, in a sentence.
        what_to_do: by whoever asked.
        matching: where a model may be any of several namespaces, their ids; else it is left out.
    """

    code: str
    message: str
    what_to_do: str
    matching: list[str] | msgspec.UnsetType = msgspec.UNSET


class ErrorAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The body of every answer that is not a success."""

    error: ErrorDetail
