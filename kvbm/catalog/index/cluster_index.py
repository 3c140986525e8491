"""Who holds what in the whole cluster: what an index answers, and the protocol of its two implementations.

The native one (`kvbm._native.ClusterIndex`) serves; `kvbm.reference.cluster_index.ReferenceIndex` says what it must do.
Both are fed frames and keep no slots: where in its pool an instance has a block is its own affair.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from kvbm.core.events import InstanceStarted, PoolStated, StopReason, UsageRecorded
from kvbm.core.ids import Epoch, InstanceId, NamespaceId, Offset, SequenceHash, Tier

if TYPE_CHECKING:
    from kvbm.catalog.routing.router import Router
    from kvbm.config.settings import RoutingSettings
    from kvbm.core.answers import LookupAnswer


class Holder(NamedTuple):
    """Someone who holds a block: an instance, or else a pool of cluster reach."""

    name: str
    tier: Tier
    is_pool: bool


class InstanceDepth(NamedTuple):
    """How far one instance has a prefix.

    Attributes:
        depth: blocks it holds from the first on, in any tier, without a hole.
        by_tier: blocks of that run by the hottest tier that holds each, indexed by Tier.
        reach: where the run ends when the instance's cluster pools go on, with whole objects, where its own tiers end;
            at least `depth`.
        suspect: events of it were missed and no snapshot has ended since, or residencies of it were refused.
    """

    instance: InstanceId
    depth: int
    by_tier: tuple[int, int, int, int]
    reach: int
    suspect: bool


class PoolDepth(NamedTuple):
    """How many blocks of a prefix, from the first on, a pool of cluster reach is claimed to hold in whole objects."""

    pool: str
    depth: int


class Prefixes(NamedTuple):
    """Who has how much of a prefix.

    Attributes:
        deepest: the largest depth of all instances and pools.
        instances, pools: those that have, or reach, at least the first block. One that is excluded counts by what
            others can read without it, and when that is not the first block, it is left out.
        more: instances that have the first block and were not wanted, because others are better.
    """

    deepest: int
    instances: list[InstanceDepth]
    pools: list[PoolDepth]
    more: int = 0


NOBODY = Prefixes(0, [], [])


class LendableRun(NamedTuple):
    """The longest run of a prompt's blocks that an instance could lend: `begin` to before `end`, counted in the
    prompt.
    """

    instance: InstanceId
    begin: int
    end: int


class Presence(NamedTuple):
    """Which of the blocks that were asked for one holder has in one tier.

    Attributes:
        suspect: as in InstanceDepth; of a pool False.
        held: a bit for each block, the first in the lowest bit of the first byte.
    """

    holder: Holder
    suspect: bool
    held: bytes


class Presences(NamedTuple):
    """Who has which of some blocks.

    Attributes:
        rows: instances, those with the most of the blocks first, each with its tiers, hottest first; then pools.
        more: instances that have some and were not wanted.
    """

    rows: list[Presence]
    more: int = 0


class InstanceView(NamedTuple):
    """What the index knows of one instance.

    Attributes:
        suspect: see InstanceDepth; true when any of `partial`, `waiting` and `missed` is.
        partial: residencies of it were refused at the index's capacity, so some are missing here; a snapshot heals it
            only once there is room.
        digest: of what it holds, also when that is excluded.
        pools: as its start declared them; empty when no start was seen.
        counts: blocks held by tier, cluster pools left out; excluded ones count.
        excluded: see `ClusterIndex.exclude`.
        waiting: later events than the next are there already; the next may still come.
        missed: events were missed, or the epoch has not ended its first snapshot: only a completed snapshot in each
            tier heals it.
    """

    epoch: Epoch
    stopped: bool
    suspect: bool
    partial: bool
    digest: int
    pools: tuple[PoolStated, ...]
    counts: Mapping[Tier, int]
    excluded: bool
    waiting: bool
    missed: bool


class Audit(NamedTuple):
    """What a part of an audit found.

    Attributes:
        is_whole: a pass over the whole table has ended with this call; only then are the others filled.
        blocks: looked at in that pass.
        differing: instances of whose residencies the table has others than the running digest was made from: memory was
            damaged, or the index is wrong. A snapshot heals it.
        damaged: entries whose holders could not be anybody's. They were taken out, and `differing` has those who miss
            them.
    """

    is_whole: bool
    blocks: int
    differing: list[InstanceId]
    damaged: int


class Claims(NamedTuple):
    """Blocks an instance claims for a pool of cluster reach, or takes its claim back from."""

    tier: Tier
    namespace: NamespaceId
    hashes: bytes
    withdrawn: bool


class Applied(NamedTuple):
    """What a frame did, for whoever keeps more than the index.

    Attributes:
        events, blocks: how many were applied; a block counts once for each event that names it.
        started: the start in it, if any. stopped: why the instance ended in it, if it did.
        claims: in event order.
        usages: what tenants have used, in event order, each with its number in the frame.
    """

    events: int
    blocks: int
    started: InstanceStarted | None
    stopped: StopReason | None
    claims: list[Claims]
    usages: list[tuple[int, UsageRecorded]]


class StreamPlace(NamedTuple):
    """Where an instance stands: the epoch it is in, and its next event there."""

    instance: InstanceId
    epoch: Epoch
    offset: Offset


class PlaceReached(NamedTuple):
    """What a run has done to a place.

    Attributes:
        offset: of the next event.
        digest: in the last frame that was applied. wall_time_ns: of the newest.
        last: number of the message that brought the last one.
        frames: how many were applied; the other attributes mean nothing when none was.
    """

    offset: Offset
    digest: int
    wall_time_ns: int
    last: int
    frames: int


class PlainClaims(NamedTuple):
    """Claims in a frame of wall time `wall_time_ns`, of the message with that number in the run."""

    message: int
    wall_time_ns: int
    claims: Claims


class PlainApplied(NamedTuple):
    """What a run has done.

    Attributes:
        messages: applied whole; the next one is not plain, or see `diverged_at`.
        diverged_at: set when the frames of the next message are applied up to this byte, and after the last of them
            what its instance holds has another digest than the frame says.
        frames, events, blocks: applied; a block counts once for each event that names it.
        places: as the run's, in order. claims: in order.
    """

    messages: int
    diverged_at: int | None
    frames: int
    events: int
    blocks: int
    places: list[PlaceReached]
    claims: list[PlainClaims]


class ClusterIndex(Protocol):
    """The cluster's residencies and claims. No event is fatal: what contradicts what is known is counted by rule."""

    def apply(self, data: bytes, at: int = 0, skip: int = 0) -> Applied:
        """Fold a frame's events from its `skip`th on.

        Raises FrameError: it is no good frame; nothing has changed then.
        """

    def apply_plain(self, messages: list[tuple[int, bytes]], places: list[StreamPlace]) -> PlainApplied:
        """Apply messages in order, up to the first that is not plain as a whole, or whose digest differs: see
        `plain_frames`.

        Args:
            messages: each with the number of its instance's place.
        """

    def begin_blind(
        self,
        instance: InstanceId,
        epoch: Epoch,
        pools: Iterable[PoolStated] | None = None,
        likely: Iterable[PoolStated] = (),
    ) -> None:
        """Enter an epoch whose start was not seen: nothing is held, all of it is suspect.

        Args:
            pools: what the epoch's start declared, when that is known from elsewhere; None when it is not.
            likely: what another epoch's start declared; names the pools of claims when no start was seen here.
        """

    def miss(self, instance: InstanceId) -> None:
        """Events of the instance were missed: it is suspect until a completed snapshot has ended."""

    def wait(self, instance: InstanceId, waiting: bool) -> None:
        """Later events than the next are there already, so for now the instance is suspect; or no longer."""

    def exclude(self, instance: InstanceId, excluded: bool) -> None:
        """Leave the instance's residencies out of every answer, or no longer.

        They are not forgotten: events go on being folded, and digest and counts are as ever. What others can read
        without it stays in the answers: residencies in tiers whose pool has reach `pod`, and claims. A pool nobody has
        declared counts as one of reach `instance`. Holds until it is called again, or the instance is dropped;
        checkpoints do not keep it.
        """

    def agrees(self, instance: InstanceId, digest: int) -> bool:
        """Whether an instance in step has this digest. One that is not in step has nothing to compare: True."""

    def drop(self, instance: InstanceId) -> None:
        """Forget an instance and what it held, at once. Its claims stay: their holder is the pool."""

    def claim(self, pool: str, namespace: NamespaceId, hashes: bytes) -> None:
        """A pool of cluster reach holds blocks. The same twice changes nothing."""

    def unclaim(self, pool: str, namespace: NamespaceId, hashes: bytes) -> None:
        """A pool of cluster reach no longer holds blocks, in whatever tier it was claimed to."""

    def claims(self, first: int = 0, pages: int = 64) -> tuple[int | None, list[tuple[str, NamespaceId, bytes]]]:
        """A stretch of the claims: pool, namespace, packed hashes in no order; and where the next begins, None after
        the last.

        Every block that is claimed from the first call to the last is in one stretch.
        """

    def forget_namespace(self, namespace: NamespaceId) -> None:
        """Nobody holds or claims blocks of it any more, and checkpoints are not to know its id.

        What comes later is of a new one.
        """

    def size_objects(self, namespace: NamespaceId, blocks: int) -> None:
        """An object holds so many of a namespace's blocks, in pools whose name does not say it
        (`core.layout.named_blocks`).

        The smallest that was told counts: what one sender says wrongly makes nothing seem less than it is while another
        says it right. Where nobody has said it, each block counts by itself. Soft: checkpoints do not keep it.
        """

    def namespaces(self) -> list[NamespaceId]:
        """The namespaces that blocks were held or claimed of; ids of nobody may stand in the place of forgotten
        ones.
        """

    def sweep(self, pages: int = 256) -> bool:
        """Free the memory of what instances that died, or snapshots that ended, have left; a piece of it.

        Whether more is left.
        """

    def audit(self, pages: int = 64) -> Audit:
        """Compute the digests anew from the table, a piece at a time while events are applied, and compare at the end
        of each pass.

        `agrees` compares what was done with what frames report; this compares what memory holds with what was done.
        Namespaces that nobody has blocks of are forgotten, and cluster pools of which nothing is claimed and which no
        instance's start names.
        """

    def report_queued(self, instance: InstanceId, tokens: int) -> None:
        """How many tokens wait at an instance: among equals the least busy comes first.

        Soft: 0 for one that was dropped or loaded.
        """

    def report_lent_tiers(self, instance: InstanceId, tiers: int) -> None:
        """In which tiers others may read what an instance holds: bit t for tier t.

        Soft: none of one that was dropped or loaded.
        """

    def lent(self, namespace: NamespaceId, hashes: bytes, most: int, whole: bool) -> list[LendableRun]:
        """Who could lend which of these blocks: of each instance that lends its longest run, the first of equals.

        Args:
            hashes: packed, in prompt order.
            most: only that many: those that end deepest, then those that begin first, then by name.
            whole: blocks behind one that nobody holds are looked at, too.

        Where holders change so often that some four million would be looked at, the native index stops there: hashes
        may repeat.
        """

    def prefixes(
        self,
        namespace: NamespaceId,
        hashes: bytes,
        best: int = 0,
        only: Iterable[InstanceId] | None = None,
        hottest: Tier = Tier.HBM,
    ) -> Prefixes:
        """Who has how much of a prefix.

        What a pool has is counted in whole objects, which begin at multiples of their size: nobody can read a part of
        one.

        Args:
            hashes: packed, in prompt order, from the prompt's first block or the first of an object on.
            best: only that many instances: the deepest first, then those that reach furthest, then those where least
                waits, then by name. 0 for all, in no order. Pools come the deepest first, then by name.
            only: instances to look at; None for all.
            hottest: what instances hold in hotter tiers does not count. HBM is never lent, so who asks what can be read
                of an instance gives HOST: a block is not hidden then by being in HBM too.
        """

    def presence(
        self, namespace: NamespaceId, hashes: bytes, best: int = 0, only: Iterable[InstanceId] | None = None
    ) -> Presences:
        """Which of these blocks are held, and by whom. Each counts by itself, so there may be holes.

        Args:
            best: only that many instances, those with the most blocks first, equals by name; 0 for all. Pools are named
                always, by name.
            only: as `prefixes`.
        """

    def lookup(
        self,
        namespace: NamespaceId,
        hashes: bytes,
        limit: int,
        only: Sequence[InstanceId] | None,
        shown: str,
        view_age_s: float,
        behind: Collection[InstanceId],
    ) -> LookupAnswer:
        """`prefixes` as the answer to a question;

        `kvbm.catalog.index.lookup.lookup` says what is in it, and what the arguments are.
        """

    def lookup_json(
        self, namespace: NamespaceId, hashes: bytes, limit: int, shown: str, view_age_s: str
    ) -> bytes | None:
        """`lookup` of all instances, none of them behind, as JSON; None: nothing was found, or a name has letters that
        JSON escapes.

        Args:
            view_age_s: of the answer, as JSON.
        """

    def encode_prefixes(self, namespace: NamespaceId, prompts: Sequence[bytes], best: int, missed: int = 0) -> bytes:
        """`prefixes` of several prompts, as answers to lookups in the binary form (`core.prompt_batches`), best first.

        Args:
            prompts: packed hashes of each.
            best: as `prefixes`, at least 1.
            missed: the number of the reason that is told where nothing is found, 0 to 255; `prompts_missed` counts
                these.
        """

    def prompts_missed(self) -> int:
        """Of how many prompts `encode_prefixes` has found nothing, since the index was made."""

    def router(self, settings: RoutingSettings) -> Router[Any]:
        """What routes prompts by this index."""

    def holders(self, namespace: NamespaceId, block: SequenceHash) -> list[Holder]:
        """Who holds one block, by name, hottest tier first."""

    def excluded_holders(self, namespace: NamespaceId, block: SequenceHash) -> list[InstanceId]:
        """Who holds a block in a tier that is excluded, so that `holders` does not name it; in no order."""

    def instances(self) -> list[InstanceId]:
        """Every instance that was followed and not dropped, in no order."""

    def view(self, instance: InstanceId) -> InstanceView | None:
        """What is known of an instance; None when nothing is."""

    def pool_name(self, instance: InstanceId, tier: Tier) -> str | None:
        """The cluster pool an instance's claims in a tier belong to; None when no start has named it."""

    def claim_counts(self) -> dict[str, int]:
        """Blocks claimed, by pool; 0 of one that was named and not forgotten yet."""

    def residency_count(self) -> int:
        """Residencies of all instances together; claims are not counted."""

    def block_count(self) -> int:
        """Distinct blocks that somebody holds, or held until a death that was not swept yet."""

    def anomalies(self) -> dict[str, int]:
        """Rules that events broke, counted by name."""

    def memory(self) -> dict[str, int]:
        """Bytes in use, by what for."""


NewIndex = Callable[[int], ClusterIndex]  # of a capacity: residencies and claims at most; more are refused and counted


def is_suspect(index: ClusterIndex, instance: InstanceId) -> bool:
    """Whether events of the instance were missed and no snapshot has ended since. An unknown instance is suspect."""
    view = index.view(instance)
    return view is None or view.suspect
