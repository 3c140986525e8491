"""Revision or nothing: tiers that outlive the process, or are shared, hold blocks of namespaces that say which weights
they are of.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import structlog

import kvbm
from kvbm.core.errors import ConfigError
from kvbm.core.ids import split_hashes
from kvbm.pools.stores.memory import MemoryStore
from tests.managers import BLOCK_BYTES, hashes_of, rows_of
from tests.object_pools import memory_objects

NAMED = kvbm.Namespace(model="named", revision="r1", block_tokens=16)
UNNAMED = kvbm.Namespace(model="unnamed", block_tokens=16)
BLOCKS = 8


def settings_of(folder: Path, **more: Any) -> kvbm.Settings:
    flags = {
        "instance.data_dir": str(folder),
        "instance.id": "engine-0",
        "pools.hbm.slots": 32,
        "pools.hbm.device": "memory",
        "pools.host.slots": 64,
        "pools.nvme.slots": 128,
        "nats.enabled": False,
        "onboard.wait_s": 60.0,
    }
    return kvbm.load_settings(
        environment={}, flags=flags | {key.replace("__", "."): value for key, value in more.items()}
    )


def create(manager: kvbm.Manager, namespace: kvbm.Namespace, prompt: int) -> bytes:
    """A prompt's blocks, offloaded as far as they go."""
    hashes = hashes_of(prompt, BLOCKS)
    slots = manager.allocate(BLOCKS, namespace.id)
    assert slots is not None
    rows = manager.pools.slots[kvbm.Tier.HBM].memory
    assert rows is not None
    rows[slots] = rows_of(hashes)
    manager.unpin(manager.create(namespace.id, kvbm.NO_PARENT, 0, hashes, slots))
    assert manager.settle(60.0)
    return hashes


def depth(manager: kvbm.Manager, namespace: kvbm.Namespace, hashes: bytes) -> int:
    prefix = manager.acquire(namespace.id, hashes)
    manager.unpin(prefix.slots)
    return prefix.depth


def test_blocks_without_a_revision_do_not_outlive_the_engine(tmp_path: Path) -> None:
    with kvbm.open_manager(settings_of(tmp_path), [UNNAMED], BLOCK_BYTES) as manager:
        hashes = create(manager, UNNAMED, 1)
        assert depth(manager, UNNAMED, hashes) == BLOCKS  # HBM and HOST go on
        assert len(manager.held(kvbm.Tier.HOST)) == BLOCKS
        assert kvbm.Tier.NVME not in manager.stats().pools
    with kvbm.open_manager(
        settings_of(tmp_path), [UNNAMED], BLOCK_BYTES
    ) as manager:  # with other weights, for all we know
        assert depth(manager, UNNAMED, hashes) == 0


def test_what_is_not_used_is_said_at_the_start_and_in_the_stats(tmp_path: Path) -> None:
    folder = str(tmp_path / "pod")
    with (
        structlog.testing.capture_logs() as logs,
        kvbm.open_manager(settings_of(tmp_path, pools__nvme__folder=folder), [UNNAMED], BLOCK_BYTES) as manager,
    ):
        (said,) = [log for log in logs if log["event"] == "namespace.unnamed"]
        assert said["log_level"] == "warning"
        assert manager.stats().trouble == said["notice"]
        assert manager.heartbeat(manager.published()).trouble == said["notice"]
        for words in ("'unnamed'", "NVME", "the pod's folder", "Namespace(revision=…)", "weights_digest"):
            assert words in said["notice"]


def test_nothing_is_said_where_nothing_would_last_or_all_have_a_revision(tmp_path: Path) -> None:
    for number, (namespace, slots) in enumerate(((UNNAMED, 0), (NAMED, 128))):
        with (
            structlog.testing.capture_logs() as logs,
            kvbm.open_manager(
                settings_of(tmp_path / str(number), pools__nvme__slots=slots), [namespace], BLOCK_BYTES
            ) as manager,
        ):
            assert not [log for log in logs if log["event"].startswith("namespace.")]
            assert manager.stats().trouble == ""


def test_namespaces_of_one_manager_are_told_apart(tmp_path: Path) -> None:
    named, unnamed = hashes_of(1, BLOCKS), hashes_of(2, BLOCKS)
    with kvbm.open_manager(settings_of(tmp_path), [UNNAMED, NAMED], BLOCK_BYTES) as manager:
        assert create(manager, NAMED, 1) == named
        assert create(manager, UNNAMED, 2) == unnamed
        assert b"".join(manager.held(kvbm.Tier.NVME)) == named
        assert "'unnamed'" in manager.stats().trouble
        assert "'named'" not in manager.stats().trouble
    with kvbm.open_manager(settings_of(tmp_path), [UNNAMED, NAMED], BLOCK_BYTES) as manager:
        assert depth(manager, NAMED, named) == BLOCKS
        assert depth(manager, UNNAMED, unnamed) == 0


@pytest.mark.parametrize("host_slots", [2, 64])
def test_blocks_that_come_by_host_are_told_apart_too(tmp_path: Path, host_slots: int) -> None:
    """Also those of a prompt that HOST cannot hold: what may not go on keeps its beginning there."""
    named, unnamed = hashes_of(1, BLOCKS), hashes_of(2, BLOCKS)
    settings = settings_of(tmp_path, pools__host__slots=host_slots)
    with kvbm.open_manager(settings, [UNNAMED, NAMED], BLOCK_BYTES) as manager:
        create(manager, NAMED, 1)
        create(manager, UNNAMED, 2)
        assert b"".join(sorted(manager.held(kvbm.Tier.NVME))) == b"".join(sorted(split_hashes(named)))
        in_host = set(manager.held(kvbm.Tier.HOST))
        assert set(split_hashes(unnamed)[: min(host_slots, BLOCKS)]) <= in_host


def test_what_an_older_kvbm_kept_without_a_revision_is_not_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as older:
        older.setattr("kvbm.manager.revisioned_namespaces.RevisionedNamespaces.may", lambda *_: True)
        with kvbm.open_manager(settings_of(tmp_path), [NAMED, UNNAMED], BLOCK_BYTES) as manager:
            hashes = create(manager, UNNAMED, 1)
            assert b"".join(manager.held(kvbm.Tier.NVME)) == hashes
    with kvbm.open_manager(settings_of(tmp_path), [NAMED, UNNAMED], BLOCK_BYTES) as manager:
        assert manager.held(kvbm.Tier.NVME) == []
        assert depth(manager, UNNAMED, hashes) == 0


def test_a_namespace_that_comes_later_is_used_once_it_is_declared(tmp_path: Path) -> None:
    later = kvbm.Namespace(model="named", revision="r2", block_tokens=16)
    with (
        structlog.testing.capture_logs() as logs,
        kvbm.open_manager(settings_of(tmp_path), [NAMED], BLOCK_BYTES) as manager,
    ):
        with pytest.raises(kvbm.ArgumentValueError, match="is not one the manager was opened with"):
            create(manager, later, 1)
        manager.declare([later])
        hashes = create(manager, later, 2)
        assert b"".join(manager.held(kvbm.Tier.NVME)) == hashes
        manager.declare([UNNAMED])
        create(manager, UNNAMED, 3)
        assert b"".join(manager.held(kvbm.Tier.NVME)) == hashes
        assert "'unnamed'" in manager.trouble()
    assert not [log["event"] for log in logs if log["event"].startswith("namespace.")]


@pytest.mark.parametrize(("namespace", "has_objects"), [(UNNAMED, False), (NAMED, True)])
def test_objects_are_written_for_a_revision_only(tmp_path: Path, namespace: kvbm.Namespace, has_objects: bool) -> None:
    store = MemoryStore()
    objects = memory_objects(BLOCK_BYTES, 4, store)  # an engine may bring its own
    with kvbm.open_manager(settings_of(tmp_path), [namespace], BLOCK_BYTES, object_pool=objects) as manager:
        create(manager, namespace, 1)
        assert bool(store.objects) == has_objects
        assert ("OBJECT" in manager.trouble()) != has_objects


def test_the_digest_of_weights_sees_every_byte(tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    (folder / "part").mkdir(parents=True)
    files = [folder / "a.bin", folder / "part" / "b.bin"]
    for file in files:
        file.write_bytes(bytes(100_000))
    whole, one = kvbm.weights_digest(folder), kvbm.weights_digest(files[0])
    assert one != whole
    for file in files:
        for at in (0, 50_001, 99_999):
            changed = bytearray(100_000)
            changed[at] = 1
            file.write_bytes(changed)
            assert kvbm.weights_digest(str(folder)) != whole
        file.write_bytes(bytes(100_000))
    assert kvbm.weights_digest(folder) == whole
    files[0].rename(folder / "c.bin")
    assert kvbm.weights_digest(folder) != whole
    assert kvbm.weights_digest(folder / "c.bin") == one


def test_weights_that_are_not_there_are_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for path, words in ((tmp_path / "empty", "has no weights"), (tmp_path / "absent", "does not exist")):
        with pytest.raises(ConfigError, match=f"{words}.*give the file or folder"):
            kvbm.weights_digest(path)
