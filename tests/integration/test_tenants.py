"""Two tenants in one manager: a share is kept, a quota is a state and not an error."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from kvbm import load_settings, open_manager
from kvbm.core.ids import NO_PARENT, Epoch, Namespace, Offset, Tier
from kvbm.manager.owned_hbm import Manager
from kvbm.manager.used_namespaces import MOST_USED
from kvbm.streams.base import Position
from kvbm.streams.pulse_words import encoded_heartbeat

BLOCK_BYTES = 4096
QUIET, LOUD = (Namespace(model="m", revision="r1", block_tokens=4, tenant=tenant) for tenant in ("quiet", "loud"))


def prefill(manager: Manager, namespace: Namespace, prompt: int, blocks: int = 4) -> bytes:
    """Compute a prompt that nobody has, and let it be offloaded. Returns its hashes."""
    tokens = np.arange(4 * blocks, dtype=np.uint32) + 1000 * prompt
    hashes = manager.hash_tokens(tokens, namespace.root(b"secret"), 4)
    slots = manager.allocate(blocks, namespace.id)
    assert slots is not None
    memory = manager.pools.slots[Tier.HBM].memory
    assert memory is not None
    memory[slots] = prompt % 251
    manager.unpin(manager.create(namespace.id, NO_PARENT, 0, hashes, slots))
    assert manager.settle(60.0)
    return hashes


def test_a_loud_tenant_leaves_a_quiet_one_its_share_of_every_tier_and_stays_within_its_quota(tmp_path: Path) -> None:
    settings = load_settings(
        flags={
            "instance.data_dir": str(tmp_path),
            "nats.enabled": False,
            "pools.hbm.device": "memory",
            "pools.hbm.slots": 16,
            "pools.host.slots": 32,
            "pools.nvme.slots": 64,
            "tenants.quiet.weight": 1,
            "tenants.loud.weight": 3,
            "tenants.loud.nvme_bytes": 24 * BLOCK_BYTES,
        }
    )
    manager = open_manager(settings, [QUIET, LOUD], BLOCK_BYTES)
    try:
        quiet = [prefill(manager, QUIET, prompt) for prompt in range(2)]
        for prompt in range(100, 140):
            prefill(manager, LOUD, prompt)
        shares = {tier: {share.tenant: share for share in found} for tier, found in manager.stats().shares.items()}
        assert set(shares) == {Tier.HBM, Tier.HOST, Tier.NVME}
        assert shares[Tier.HOST]["quiet"].held == 8  # a quarter of it, all it ever had
        loud = shares[Tier.NVME]["loud"]
        assert (loud.held, loud.quota_slots) == (24, 24)
        assert manager.stats().pools[Tier.NVME].free == 64 - 24 - 8
        assert not manager.stats().trouble
        for hashes in quiet:
            prefix = manager.acquire(QUIET.id, hashes)
            assert prefix.depth == 4
            manager.unpin(prefix.slots)
    finally:
        manager.close()


def test_a_restart_counts_what_nvme_has_kept_for_whose_it_is(tmp_path: Path) -> None:
    flags = {
        "instance.data_dir": str(tmp_path),
        "nats.enabled": False,
        "pools.hbm.device": "memory",
        "pools.hbm.slots": 16,
        "pools.nvme.slots": 64,
        "tenants.loud.nvme_bytes": 8 * BLOCK_BYTES,
    }
    for life in range(2):
        manager = open_manager(load_settings(flags=flags), [QUIET, LOUD], BLOCK_BYTES)
        try:
            if life:
                held = {share.tenant: share.held for share in manager.stats().shares[Tier.NVME]}
                assert held == {"loud": 8, "*": 4}
            for prompt in range(3):
                prefill(manager, LOUD, 10 * life + prompt)
            if not life:
                prefill(manager, QUIET, 7)
            assert {s.tenant: s.held for s in manager.stats().shares[Tier.NVME]} == {"loud": 8, "*": 4}
        finally:
            manager.close()


def test_a_namespace_declared_after_the_start_counts_for_its_tenant_in_every_tier(tmp_path: Path) -> None:
    settings = load_settings(
        flags={
            "instance.data_dir": str(tmp_path),
            "nats.enabled": False,
            "pools.hbm.device": "memory",
            "pools.hbm.slots": 16,
            "pools.host.slots": 32,
            "pools.nvme.slots": 64,
            "tenants.loud.host_bytes": 8 * BLOCK_BYTES,
            "tenants.loud.nvme_bytes": 8 * BLOCK_BYTES,
        }
    )
    adapter = Namespace(model="m", revision="r1", block_tokens=4, tenant="loud", lora="adapter")
    manager = open_manager(settings, [QUIET], BLOCK_BYTES)
    try:
        manager.declare([LOUD, adapter])
        manager.declare([LOUD])  # again is no trouble
        for prompt in range(10):
            prefill(manager, LOUD if prompt % 2 else adapter, prompt)
        for tier in (Tier.HOST, Tier.NVME):
            assert {s.tenant: s.held for s in manager.stats().shares[tier]} == {"loud": 8, "*": 0}
    finally:
        manager.close()


def test_names_that_clients_choose_make_no_heartbeat_large(tmp_path: Path) -> None:
    flags = {
        "instance.data_dir": str(tmp_path),
        "nats.enabled": False,
        "pools.hbm.device": "memory",
        "pools.hbm.slots": 16,
    }
    with open_manager(load_settings(flags=flags), [QUIET], BLOCK_BYTES) as manager:
        users = [Namespace(model="m", revision="r1", block_tokens=4, tenant=f"user {number}") for number in range(3000)]
        manager.declare(users)
        for user in users:
            manager.acquire(user.id, bytes(16))
        named = manager.heartbeat(Position(Epoch(1), Offset(0))).namespaces
        assert set(named) == {user.id for user in users[-MOST_USED:]}
        data, unreadable = encoded_heartbeat(manager.heartbeat(Position(Epoch(1), Offset(0))))
        assert not unreadable and len(data) < 32 << 10
        assert manager.acquire(users[0].id, bytes(16)).depth == 0  # no longer named, and still known


def test_blocks_that_nvme_kept_of_a_namespace_declared_after_the_start_count_for_its_tenant(tmp_path: Path) -> None:
    flags = {
        "instance.data_dir": str(tmp_path),
        "nats.enabled": False,
        "pools.hbm.device": "memory",
        "pools.hbm.slots": 16,
        "pools.nvme.slots": 64,
        "tenants.loud.nvme_bytes": 8 * BLOCK_BYTES,
    }
    for life in range(3):
        manager = open_manager(load_settings(flags=flags), [QUIET], BLOCK_BYTES)
        try:
            manager.declare([LOUD])
            held = {share.tenant: share.held for share in manager.stats().shares[Tier.NVME]}
            assert held == {"loud": 8 if life else 0, "*": 0}
            for prompt in range(3):
                prefill(manager, LOUD, 10 * life + prompt)
            assert {s.tenant: s.held for s in manager.stats().shares[Tier.NVME]} == {"loud": 8, "*": 0}
            prefix = manager.acquire(LOUD.id, prefill(manager, LOUD, 9 + 10 * life))
            assert prefix.depth == 4
            manager.unpin(prefix.slots)
        finally:
            manager.close()
