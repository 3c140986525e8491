"""Settings → how an instance starts: what it asks of the stream and the catalog, and the epoch that it begins."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from typing import NamedTuple

from kvbm.assembly.kept import kept_in_nvme
from kvbm.assembly.native import Core
from kvbm.assembly.services import catalog_credentials, erasure_log
from kvbm.config import Settings
from kvbm.core.backend import LedgerProtocol, LockProtocol
from kvbm.core.errors import CatalogError, ErasureError, StreamError
from kvbm.core.ids import Epoch, InstanceId, Namespace, Tier
from kvbm.core.results import Recovered
from kvbm.erasure.record import Record, decoded
from kvbm.erasure.start import WatchedErasures
from kvbm.locate.parts import catalogs_at
from kvbm.manager.copies.transfer import Pools
from kvbm.manager.recovery.salvage import SalvagePlan
from kvbm.pools.nvme.pool import NvmePool
from kvbm.safe_log import SafeLog
from kvbm.streams.journal.journal import Journal
from kvbm.streams.nats.connection import shown
from kvbm.streams.nats.credentials import Credentials
from kvbm.streams.nats.stream import NatsStream

log = SafeLog()

_CATALOG_WAIT_S = 2.0  # at the start, for the epoch it knows


def kvbm_version() -> str:
    """The installed version; "0" where the package is not installed."""
    try:
        return version("kvbm-ledger")
    except PackageNotFoundError:
        return "0"


class OnStream(NamedTuple):
    """What the stream knows of an instance that starts.

    Attributes:
        epoch: its last one; 0 when there is none, or the stream did not answer.
        erasures: what is to be erased; None: the stream did not say.
    """

    epoch: Epoch = Epoch(0)
    erasures: Record | None = None


def ask_stream(settings: Settings, instance: InstanceId, url: str, credentials: Credentials) -> OnStream:
    """The last epoch the stream has of this instance, and what is to be erased; nothing when it does not answer within
    `nats.timeout_s`.

    A journal that was lost, or kept in memory, would begin again with an epoch whose offsets the stream has seen; the
    stream would then pass for ahead and hide the new events.
    """
    found: list[OnStream] = []
    cluster, timeout_s = settings.instance.cluster, settings.nats.timeout_s

    async def ask() -> None:
        async with asyncio.timeout(timeout_s):
            stream = await NatsStream.connect(url, timeout_s, credentials=credentials, replicas=settings.nats.replicas)
            try:
                tail = await stream.tail(cluster, instance, timeout_s)
                fence = await stream.fence(cluster, instance, timeout_s)
                epoch = max(tail.end.epoch if tail else Epoch(0), fence.epoch if fence else Epoch(0))
            finally:
                await stream.close()
        found.append(OnStream(epoch))
        async with asyncio.timeout(timeout_s):
            erasures = await erasure_log(settings, url, credentials)
            try:
                last = await erasures.record()
                found.append(OnStream(epoch, Record() if last is None else decoded(last.data)))
            finally:
                await erasures.close()

    def run() -> None:
        try:
            with asyncio.Runner() as runner:
                runner.run(ask())
        # A loop needs descriptors, its resolver a thread.
        except (StreamError, ErasureError, OSError, RuntimeError) as error:
            log.warning(
                "instance.stream_unasked", why=str(error) or f"no answer within {timeout_s:g} s", url=shown(url)
            )

    # The engine may have a loop of its own.
    asking = threading.Thread(target=run, name=f"kvbm-epoch-{instance}", daemon=True)
    asking.start()
    asking.join(timeout_s + 1.0)
    return found[-1] if found else OnStream()


def epoch_in_catalog(settings: Settings, instance: InstanceId) -> Epoch:
    """The last epoch the catalog has read of this instance; 0 when it has none, or does not answer soon.

    The stream forgets with age, also the fence; the catalog does not, and would ignore an epoch it takes for an old
    one.
    """
    if not settings.catalog.url:
        return Epoch(0)
    wait_s = min(_CATALOG_WAIT_S, settings.nats.timeout_s)
    client = catalogs_at(settings.catalog.url, wait_s, credentials=catalog_credentials(settings))
    try:
        found = client.instance(instance)
    except CatalogError as error:
        log.info("instance.catalog_unasked", why=str(error))
        return Epoch(0)
    finally:
        client.close()
    return Epoch(found.epoch if found is not None else 0)


def begin_epoch(
    ledger: LedgerProtocol,
    lock: LockProtocol,
    settings: Settings,
    journal: Journal | None,
    pools: Pools,
    namespaces: Sequence[Namespace],
    engine: str,
    known: Epoch,
    watched: WatchedErasures,
    core: Core,
    attributes: Mapping[str, bytes],
) -> tuple[str, SalvagePlan]:
    """Start the ledger in a new epoch.

    Args:
        attributes: of its InstanceStarted.
    Returns: the name of the durable pool it speaks of, "" for none; what that pool holds beside what the ledger was
        told.
    """
    recovered: dict[Tier, list[Recovered]] = {}
    epoch, pool_id, plan = Epoch(known + 1), "", SalvagePlan()
    if journal is not None:
        nvme = pools.slots.get(Tier.NVME)
        pool_id = nvme.pool_id if isinstance(nvme, NvmePool) else ""
        if isinstance(nvme, NvmePool):
            recovered[Tier.NVME], plan = kept_in_nvme(settings, journal, nvme, known, watched, core.new_fold)
        if isinstance(nvme, NvmePool) and nvme.hints is not None and nvme.hints.is_new:
            for namespace, run in groupby(recovered[Tier.NVME], key=lambda one: one.namespace):
                kept = list(run)
                nvme.hints.note([one.slot for one in kept], namespace, b"".join(one.hash for one in kept))
        epoch = Epoch(max(journal.epoch, known) + 1)
    with lock:  # the instance may be listening already
        ledger.start(epoch, namespaces, settings.instance.topology, engine, kvbm_version(), recovered, attributes)
    if journal is not None:  # nobody has taken an event yet
        journal.begin_epoch(epoch, pool_id, ledger.applied)
        pools.note_epoch(epoch)
    log.info(
        "instance.started",
        instance=settings.instance.id,
        epoch=epoch,
        recovered_blocks=len(recovered.get(Tier.NVME, [])),
    )
    return pool_id, plan
