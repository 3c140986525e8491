"""How a manager behaves: what `kvbm.assembly` makes of settings."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from typing import TYPE_CHECKING, NamedTuple

from kvbm.core.ages import BlockAges
from kvbm.core.backend import LockProtocol
from kvbm.core.ids import Tier
from kvbm.core.policy import WriteBudget
from kvbm.manager.copies.staging import Staging
from kvbm.manager.record.journal_retention import JournalRetention
from kvbm.manager.record.offsets import Offsets
from kvbm.manager.record.prompt_samples import SampleSink
from kvbm.manager.record.snapshot_policy import SnapshotPolicy
from kvbm.manager.record.usage_account import UsagePlan
from kvbm.manager.recovery.salvage import SalvagePlan
from kvbm.manager.revisioned_namespaces import RevisionedNamespaces

if TYPE_CHECKING:
    from kvbm.telemetry.tracing import Tracing


class ManagerOptions(NamedTuple):
    """Everything about a manager that has a default.

    Attributes:
        wait_s: the longest a request waits for bytes.
        locate_s: the longest the catalog is waited for.
        load_threads, offload_threads: loads and offloads at a time.
        wall_clock_ns: what frames, samples and heartbeats are stamped with.
        clock: seconds that only grow; how long blocks are kept is measured by it.
        retention: what the journal does beside taking frames; None where nothing outlives the process.
        snapshots: when what is held is listed again; None: when somebody asks.
        samples: who is told of prompts; None: nobody.
        executor: carries out loads; None: threads of the manager's own.
        offsets: how far the journal has come.
        run: of this process; None makes one.
        has_stream: whether a publisher says how far the stream has come.
        staging: memory for copies that need a place between their ends; None: 64 MiB.
        budgets: how much may be written to tiers, for their endurance.
        revisioned: which namespaces may use tiers that outlive the process or are shared; None: all.
        salvage: what NVME holds that is to be brought back.
        lock: around the ledger; None: a `threading.Lock`.
        usage: how what tenants use is recorded; None: it is not.
        ages: follows what is recorded; None: nobody counts how old blocks become.
        tracing: makes spans of requests and copies; None: nobody wants them.
        chain: how the engine hashes tokens, as heartbeats say it; b"": it does not say.
        unused: names of such tiers that are configured, to say what is not used for the others.
    """

    wait_s: float = 2.0
    locate_s: float = 0.25
    load_threads: int = 2
    offload_threads: int = 1
    wall_clock_ns: Callable[[], int] = time.time_ns
    clock: Callable[[], float] = time.monotonic
    retention: JournalRetention | None = None
    snapshots: SnapshotPolicy | None = None
    samples: SampleSink | None = None
    executor: Executor | None = None
    offsets: Offsets | None = None
    run: str | None = None
    has_stream: bool = False
    staging: Staging | None = None
    budgets: Mapping[Tier, WriteBudget] = {}
    revisioned: RevisionedNamespaces | None = None
    unused: Sequence[str] = ()
    salvage: SalvagePlan = SalvagePlan()
    lock: LockProtocol | None = None
    ages: BlockAges | None = None
    tracing: Tracing | None = None
    usage: UsagePlan | None = None
    chain: bytes = b""
