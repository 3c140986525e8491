"""kvbm: an event-sourced lifecycle manager for the KV-cache blocks of LLM inference.

An engine whose KV cache kvbm may allocate:

    import kvbm
    settings = kvbm.load_settings(flags={"pools.hbm.slots": 1024, "nats.enabled": False})
    namespace = kvbm.Namespace(model="my-model", revision=kvbm.weights_digest("model.safetensors"), block_tokens=16)
    with kvbm.open_manager(settings, [namespace], block_bytes=65536) as manager:
        hashes = manager.hash_tokens(prompt, namespace.root(), namespace.block_tokens)
        prefix = manager.acquire(namespace.id, hashes)     # what is held is in HBM now, pinned
        slots = manager.allocate(len(hashes) // 16 - prefix.depth, namespace.id)   # None: HBM is short; try again later
        # … compute the rest into manager.hbm.tensor[slots], then say so:
        fresh, parent = hashes[prefix.depth * 16 :], hashes[: prefix.depth * 16][-16:] or kvbm.NO_PARENT
        slots = manager.create(namespace.id, parent, prefix.depth, fresh, slots)
        manager.unpin(prefix.slots + slots)                # the request is over

An engine that owns its KV cache says what it holds to an `EngineHbmManager`, which `open_engine_manager` opens. A
router asks the catalog through a `CatalogClient`, or a `CatalogReplica` in its own process, which `open_replica` opens.
What was recorded, `open_log` reads.

Packed runs: a list of sequence hashes is `bytes`, 16 for each block in prompt order. Slots are ints from 0. Sizes are
bytes, times are seconds unless a name says otherwise.

Threads: every public call of a manager and of a client may come from any thread. Calls that wait say for how long at
most.

CUDA: what `acquire` returns is in place. The work that writes a block is queued before `create`, and `create(…,
stream=…)` says on which stream; work that still reads or writes a slot is named to `unpin` and `release` in the same
way.

Errors: all derive from `KvbmError`. An `ArgumentError` (a TypeError or a ValueError too), a `LayoutError` and a
`LedgerError` are bugs in the caller, and the call has changed nothing. A miss and a short pool are results. Trouble
with a colder tier, the stream or the catalog is a miss, one warning in the log, and a word in `Manager.trouble()`.

The names here are the public ones; everything else may change without notice.
"""

from kvbm.assembly import (
    RecordedEvent,
    RecordedLog,
    copy_queue,
    metrics_collector,
    open_engine_manager,
    open_log,
    open_manager,
    open_replica,
    serve_metrics,
    what_if,
)
from kvbm.catalog.replica import CatalogReplica
from kvbm.config import Settings, load_settings
from kvbm.core.answers import (
    BlockAnswer,
    FindAnswer,
    InstanceSummary,
    LookupAnswer,
    MediaAsked,
    NamespaceSummary,
    PositionWanted,
    PresenceAnswer,
    ReadyAnswer,
    RouteAnswer,
)
from kvbm.core.errors import (
    ArgumentError,
    ArgumentTypeError,
    ArgumentValueError,
    CatalogClosedError,
    CatalogError,
    CatalogRefusedError,
    ConfigError,
    HashSchemeError,
    JournalError,
    KvbmError,
    LayoutError,
    LedgerError,
    MessageTooLargeError,
    MissingExtraError,
    PackageConflictError,
    PoolError,
    PoolFullError,
    PoolMismatchError,
    StreamError,
)
from kvbm.core.events import (
    BlocksCreated,
    BlocksEvicted,
    BlocksMigrated,
    EvictReason,
    InstanceStarted,
    InstanceStopped,
    MigrateCause,
    ResidenciesListed,
    SnapshotEnded,
    UsageRecorded,
    UsageRow,
)
from kvbm.core.extra_keys import Media, extra_key, salted
from kvbm.core.hashing import sequence_hashes
from kvbm.core.ids import HASH_BYTES, NO_PARENT, Namespace, NamespaceId, SequenceHash, Tier, split_hashes
from kvbm.core.layout import KvShape
from kvbm.core.prompt_tokens import PromptTokens
from kvbm.core.results import Match, ShareCounts, TierCounts
from kvbm.core.usage import UsageGap, UsageHour, UsageReport
from kvbm.locate.asynchronous import AsyncCatalog, AsyncCatalogClient
from kvbm.locate.base import Catalog
from kvbm.locate.credentials import CatalogCredentials
from kvbm.locate.http import CatalogClient
from kvbm.locate.nats_proof import NatsCredentials
from kvbm.locate.parts import PartedCatalog
from kvbm.locate.watched_blocks import WatchedBlocks
from kvbm.locate.watching import CatalogWatch
from kvbm.manager.acquiring import Acquiring
from kvbm.manager.engine_hbm import EngineHbmManager, Store
from kvbm.manager.load_meter import LoadMeter
from kvbm.manager.offload.admission import Skipped
from kvbm.manager.onboard.loads import Prefix
from kvbm.manager.owned_hbm import Manager
from kvbm.manager.stats import ManagerStats
from kvbm.pools.base import ObjectStats
from kvbm.pools.hbm.copy_queue import CopyQueue
from kvbm.pools.hbm.paged import PagedLayout, PagedTensor, paged_layout
from kvbm.pools.hbm.pool import HbmPool
from kvbm.pools.host.mapping import map_host
from kvbm.pools.host.pool import HostPool
from kvbm.streams.base import Position
from kvbm.telemetry.metrics_server import MetricsServer
from kvbm.weights import weights_digest

__all__ = [
    "HASH_BYTES",
    "NO_PARENT",
    "Acquiring",
    "ArgumentError",
    "ArgumentTypeError",
    "ArgumentValueError",
    "AsyncCatalog",
    "AsyncCatalogClient",
    "BlockAnswer",
    "BlocksCreated",
    "BlocksEvicted",
    "BlocksMigrated",
    "Catalog",
    "CatalogClient",
    "CatalogClosedError",
    "CatalogCredentials",
    "CatalogError",
    "CatalogRefusedError",
    "CatalogReplica",
    "CatalogWatch",
    "ConfigError",
    "CopyQueue",
    "EngineHbmManager",
    "EvictReason",
    "FindAnswer",
    "HashSchemeError",
    "HbmPool",
    "HostPool",
    "InstanceStarted",
    "InstanceStopped",
    "InstanceSummary",
    "JournalError",
    "KvShape",
    "KvbmError",
    "LayoutError",
    "LedgerError",
    "LoadMeter",
    "LookupAnswer",
    "Manager",
    "ManagerStats",
    "Match",
    "Media",
    "MediaAsked",
    "MessageTooLargeError",
    "MetricsServer",
    "MigrateCause",
    "MissingExtraError",
    "Namespace",
    "NamespaceId",
    "NamespaceSummary",
    "NatsCredentials",
    "ObjectStats",
    "PackageConflictError",
    "PagedLayout",
    "PagedTensor",
    "PartedCatalog",
    "PoolError",
    "PoolFullError",
    "PoolMismatchError",
    "Position",
    "PositionWanted",
    "Prefix",
    "PresenceAnswer",
    "PromptTokens",
    "ReadyAnswer",
    "RecordedEvent",
    "RecordedLog",
    "ResidenciesListed",
    "RouteAnswer",
    "SequenceHash",
    "Settings",
    "ShareCounts",
    "Skipped",
    "SnapshotEnded",
    "Store",
    "StreamError",
    "Tier",
    "TierCounts",
    "UsageGap",
    "UsageHour",
    "UsageRecorded",
    "UsageReport",
    "UsageRow",
    "WatchedBlocks",
    "copy_queue",
    "extra_key",
    "load_settings",
    "map_host",
    "metrics_collector",
    "open_engine_manager",
    "open_log",
    "open_manager",
    "open_replica",
    "paged_layout",
    "salted",
    "sequence_hashes",
    "serve_metrics",
    "split_hashes",
    "weights_digest",
    "what_if",
]
