"""What a release has left in files, read with the code that is here: tests/golden/VERSION, of tools/write_release.py.

Each function gives what one file reads as, in plain values of JSON: the manifest beside the files holds the same.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import shutil
import sqlite3
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from kvbm.assembly import NATIVE_INDEX, open_manager
from kvbm.assembly.recorded import RecordedEvent, open_log
from kvbm.catalog.follow.checkpoints import load_newest
from kvbm.catalog.sql.store import SqlStore
from kvbm.catalog.sql.usage import UsageWanted
from kvbm.config import Settings, load_settings
from kvbm.core.events import UsageRecorded
from kvbm.core.fold import Residencies
from kvbm.core.ids import HASH_BYTES, InstanceId, SequenceHash, Tier, split_hashes
from kvbm.manager.owned_hbm import Manager
from kvbm.pools.base import ReadOutcome
from kvbm.pools.stores.base import Put
from kvbm.pools.stores.memory import MemoryStore
from kvbm.streams.access_samples import SUFFIX, read_samples
from kvbm.streams.base import Mark
from tests.eventually import WAIT_S
from tests.held import slots_of
from tests.managers import BLOCK_BYTES, NAMESPACE, hashes_of
from tests.object_pools import memory_objects

GOLDEN = Path(__file__).parent / "golden"
MANIFEST, JOURNAL, ARCHIVE, CHECKPOINT = "manifest.json", "journal", "archive", "checkpoint"
POOL, OBJECT, SQLITE, POSTGRES = "nvme.pool.gz", "object.bin", "sqlite.sql", "postgres.sql"
METRICS = "metrics.json"  # what rules and dashboards read: labels by series, as Prometheus has them
INSTANCE, CLUSTER = InstanceId("golden"), "golden"
PROMPTS, DEPTH, OBJECT_BLOCKS = 6, 4, 2
LIVES = ((0, 1, 2, 3), (2, 4, 5, 1))  # prompts that each life of the instance serves, in order
OWN_TIERS = (Tier.HBM, Tier.HOST, Tier.NVME)


def settings_in(folder: Path, **more: object) -> Settings:
    """Of the instance, with its data in a folder."""
    flags = {
        "instance.id": INSTANCE,
        "instance.cluster": CLUSTER,
        "instance.data_dir": str(folder),
        "instance.topology": ("rack-1",),
        "pools.hbm.slots": 10,
        "pools.hbm.device": "memory",
        "pools.host.slots": 8,
        "pools.nvme.slots": 12,
        "nats.enabled": False,
        "samples.rate": 1.0,
        "onboard.wait_s": WAIT_S,
        "onboard.locate_s": WAIT_S,
    }
    return load_settings(flags=flags | {key.replace("__", "."): value for key, value in more.items()})


def home_of(folder: Path) -> Path:
    """Where the instance keeps journal and pool, below its data folder."""
    return folder / "instances" / INSTANCE


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def depth_of(prompt: int, held: Iterable[bytes]) -> int:
    """How many blocks of a prompt are held, from its first on."""
    there, blocks = set(held), split_hashes(hashes_of(prompt, DEPTH))
    return next((at for at, block in enumerate(blocks) if block not in there), len(blocks))


def folded(events: Iterable[RecordedEvent], until: tuple[int, int] | None = None) -> dict[str, Any]:
    """What the instance held at the end, or before a place: epoch and offset.

    Raises IllegalEventError: an event contradicts those before it.
    """
    fold, epoch, count, usages, offset = Residencies(strict=True), 0, 0, 0, 0
    for one in events:
        if until is not None and (one.epoch, one.offset) >= until:
            break
        if (one.epoch, one.offset) < (epoch, offset):
            continue  # told twice
        if one.epoch != epoch:
            fold, epoch = Residencies(strict=True), one.epoch
        fold.evolve(one.event)
        count, offset = count + 1, one.offset + 1
        usages += isinstance(one.event, UsageRecorded)
    own = [block for tier in OWN_TIERS for block in fold.held[tier]]
    return {
        "epoch": epoch,
        "offset": offset,
        "events": count,
        "usage_events": usages,
        "held": {tier.name: len(fold.held[tier]) for tier in OWN_TIERS},
        "digest": f"{fold.digest:016x}",
        "depths": [depth_of(prompt, own) for prompt in range(PROMPTS)],
    }


def read_log(log: Path, until: tuple[int, int] | None = None) -> dict[str, Any]:
    """A journal or an archive: what `kvbm-replay verify` finds, and what is held at the end or before a place."""
    with open_log(log) as opened:
        verified = opened.verify()
        findings = [str(finding) for finding in verified.findings]
        return {
            "findings": findings,
            "epochs": verified.epochs,
            "frames": verified.frames,
            "folded": {} if findings else folded(opened.events(), until),
        }


def sampled(archive: Path) -> list[int]:
    """How many blocks each prompt had that the archive's samples tell of, in order."""
    files = sorted((archive / "samples").glob(f"*{SUFFIX}"))
    return [len(sample.hashes) // HASH_BYTES for file in files for sample in read_samples(file)]


def read_pool(release: Path, folder: Path) -> dict[str, Any]:
    """Journal and NVMe pool together: a manager is started on copies of them in a folder, and reads all that NVMe
    holds.
    """
    home = home_of(folder)
    home.mkdir(parents=True)
    shutil.copytree(release / JOURNAL, home / JOURNAL)
    (home / "nvme.pool").write_bytes(gzip.decompress((release / POOL).read_bytes()))
    with open_manager(settings_in(folder, offload__host="never"), [NAMESPACE], BLOCK_BYTES) as manager:
        found = _held_in_nvme(manager)
        chain = b"".join(found)
        rows = np.zeros((len(found), BLOCK_BYTES), dtype=np.uint8)
        read = manager.pools.slots[Tier.NVME].read(list(found.values()), NAMESPACE.id, chain, rows)
        good = [outcome == ReadOutcome.GOOD for outcome in read.outcomes]
        return {
            "epoch": manager.epoch,
            "blocks": sorted(block.hex() for block in found),
            "good": sum(good),
            "bytes": sha256(b"".join(row.tobytes() for _, row in sorted(zip(found, rows, strict=True)))),
            "onboarded": [_onboarded(manager, prompt) for prompt in range(PROMPTS)],
        }


def _held_in_nvme(manager: Manager) -> dict[SequenceHash, int]:
    with manager._lock:
        return slots_of(manager._ledger, Tier.NVME, split_hashes(manager._ledger.held(Tier.NVME)))


def _onboarded(manager: Manager, prompt: int) -> int:
    """How deep a request finds a prompt. Its bytes come through HBM; wrong ones fail."""
    prefix = manager.acquire(NAMESPACE.id, hashes_of(prompt, DEPTH))
    hashes = hashes_of(prompt, DEPTH)[: HASH_BYTES * prefix.depth]
    rows = np.zeros((prefix.depth, BLOCK_BYTES), dtype=np.uint8)
    if prefix.depth:
        manager.pools.slots[Tier.HBM].read(prefix.slots, NAMESPACE.id, hashes, rows)
        manager.unpin(prefix.slots)
    wanted = b"".join(BLOCK_BYTES // HASH_BYTES * block for block in split_hashes(hashes))
    assert rows.tobytes() == wanted, f"wrong bytes of prompt {prompt}"
    return prefix.depth


def read_checkpoint(folder: Path) -> dict[str, Any]:
    """The newest checkpoint of a catalog, loaded into an index. `AssertionError`: none can be used."""

    async def is_held(mark: Mark) -> bool:
        return True

    found = asyncio.run(load_newest(folder, NATIVE_INDEX, 1000, lambda stream: True, None, is_held))
    assert found is not None, f"no checkpoint in {folder} can be loaded"
    view = found.held.view(INSTANCE)
    answers = [found.held.prefixes(NAMESPACE.id, hashes_of(prompt, DEPTH)) for prompt in range(PROMPTS)]
    return {
        "sequence": found.state.sequence,
        "residencies": found.held.residency_count(),
        "namespaces": [namespace.hex() for namespace in found.held.namespaces()],
        "epoch": 0 if view is None else view.epoch,
        "digest": "" if view is None else f"{view.digest:016x}",
        "depths": [max((one.depth for one in answer.instances), default=0) for answer in answers],
        "pool_depths": [max((one.depth for one in answer.pools), default=0) for answer in answers],
    }


def read_object(data: bytes, name: str, hashes: bytes) -> dict[str, Any]:
    """An object of the store, got as a pool gets it."""
    store = MemoryStore()
    store.put([Put(name, data)], 1.0)
    with closing(memory_objects(BLOCK_BYTES, OBJECT_BLOCKS, store)) as pool:
        rows = np.zeros((OBJECT_BLOCKS, BLOCK_BYTES), dtype=np.uint8)
        outcomes = pool.get(NAMESPACE.id, hashes, rows).outcomes
        return {
            "name": name,
            "hashes": hashes.hex(),
            "outcomes": [outcome.name for outcome in outcomes],
            "bytes": sha256(rows.tobytes()),
        }


def restore_sqlite(dump: Path, file: Path) -> str:
    """A database of the dump's statements; its URL."""
    file.touch(0o600)
    with closing(sqlite3.connect(file)) as database:
        database.executescript(dump.read_text())
    return f"sqlite+aiosqlite:///{file}"


def restore_postgres(dump: Path, url: str) -> str:
    """The same, into an empty database of a server. Gives the URL."""
    statements = dump.read_text()

    async def restore() -> None:
        import asyncpg

        connection = await asyncpg.connect(url.replace("+asyncpg", ""), timeout=WAIT_S)
        try:
            await connection.execute(statements)
        finally:
            await connection.close()

    asyncio.run(restore())
    return url


def read_database(url: str) -> dict[str, Any]:
    """A catalog's database, opened as a catalog opens it: migrated to the newest schema."""

    async def read() -> dict[str, Any]:
        store = await SqlStore.open(url, WAIT_S)
        try:
            usage = await store.usage(UsageWanted(0, 2**62))
            epochs = await store.epochs(INSTANCE)
            return {
                "instances": [[row.id, row.epoch, row.state.value, row.version] for row in await store.instances()],
                "epochs": [[row.epoch, row.end_reason, row.next_offset, f"{row.digest:016x}"] for row in epochs],
                "namespaces": [row.id.hex() for row in await store.namespaces()],
                "models": [row.fields.model for row in await store.namespaces()],
                "claims": await store.claim_count(),
                "claimed": sorted(await store.claimed_pools()),
                "put_blocks": sum(hour.hbm_put_blocks for hour in usage.hours),
            }
        finally:
            await store.close()

    return asyncio.run(read())


def read_release(release: Path, what: str, folder: Path, wanted: dict[str, Any], postgres: str = "") -> dict[str, Any]:
    """What one thing of a release reads as.

    Args:
        what: a key of the manifest's `reads`.
        folder: an empty one to work in.
        wanted: the manifest's `reads`; from it come the place up to which the archive is folded, and the object's name.
        postgres: the URL of an empty database.
    """
    if what == JOURNAL:
        return read_log(release / JOURNAL)
    if what == ARCHIVE:
        epoch, offset = wanted["told"]["place"]
        return read_log(release / ARCHIVE, (epoch, offset)) | {"sampled": sampled(release / ARCHIVE)}
    if what == POOL:
        return read_pool(release, folder)
    if what == CHECKPOINT:
        return read_checkpoint(release / CHECKPOINT)
    if what == OBJECT:
        named = wanted[OBJECT]
        return read_object((release / OBJECT).read_bytes(), named["name"], bytes.fromhex(named["hashes"]))
    if what == SQLITE:
        return read_database(restore_sqlite(release / SQLITE, folder / "catalog.db"))
    assert what == POSTGRES, what
    return read_database(restore_postgres(release / POSTGRES, postgres))
