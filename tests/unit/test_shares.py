"""Tenants with shares of a pool, in both ledgers: who gives up blocks for whom, and what a quota takes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from kvbm import _native
from kvbm.config import TenantSettings, load_settings
from kvbm.core.backend import LedgerProtocol, NewLedger
from kvbm.core.codec import decode_frame
from kvbm.core.errors import ConfigError
from kvbm.core.events import BlocksEvicted, EvictReason, MigrateCause, PoolStated
from kvbm.core.ids import HASH_BYTES, NO_PARENT, Epoch, InstanceId, Namespace, NamespaceId, Tier, split_hashes
from kvbm.core.policy import EVICTION_POLICIES, OTHERS, Share
from kvbm.reference.ledger import Ledger
from tests.held import slot_of

A = Namespace(model="m", block_tokens=16, tenant="a")
B = Namespace(model="m", block_tokens=16, tenant="b")
NOBODYS = Namespace(model="m", block_tokens=16, tenant="somebody")
POOLS = (PoolStated(Tier.HBM, 8, 64), PoolStated(Tier.NVME, 8, 64))


@pytest.fixture(params=[Ledger, _native.Ledger], ids=["reference", "native"])
def new_ledger(request: pytest.FixtureRequest) -> NewLedger:
    return request.param


def begun(new_ledger: NewLedger, *shares: Share, eviction: str = "lru") -> LedgerProtocol:
    ledger = new_ledger(POOLS, eviction, 1 << 20, shares)
    for namespace in (A, B, NOBODYS):
        ledger.assign(namespace.id, namespace.tenant)
    ledger.start(Epoch(1), [A, B, NOBODYS])
    return ledger


def blocks(namespace: Namespace, numbers: Sequence[int]) -> bytes:
    return b"".join(namespace.id[:8] + number.to_bytes(8, "big") for number in numbers)


def create(ledger: LedgerProtocol, namespace: Namespace, *numbers: int) -> None:
    """Create blocks in HBM, one after the other, and leave them unpinned."""
    for number in numbers:
        allocation = ledger.allocate(Tier.HBM, 1, namespace.id)
        assert allocation is not None
        hashes = blocks(namespace, [number])
        ledger.unpin(Tier.HBM, ledger.create(namespace.id, Tier.HBM, NO_PARENT, 0, hashes, allocation.slots))


def offload(ledger: LedgerProtocol, namespace: Namespace, *numbers: int) -> int:
    """Copy blocks to NVME; how many of them it took."""
    copy = ledger.begin_copy(namespace.id, Tier.HBM, Tier.NVME, blocks(namespace, numbers))
    if copy is None:
        return 0
    count = len(copy.hashes) // HASH_BYTES
    ledger.end_copy(copy, [True] * count, MigrateCause.OFFLOAD)
    return count


def held(ledger: LedgerProtocol, tier: Tier = Tier.HBM) -> dict[str, int]:
    return {share.tenant: share.held for share in ledger.share_counts(tier) if share.held}


def evicted(ledger: LedgerProtocol) -> list[tuple[NamespaceId, EvictReason, int]]:
    """Namespace, reason and number of blocks of every eviction since it was asked last."""
    events = [e for frame in ledger.take_frames(InstanceId("i"), 7) for e in decode_frame(frame.data)[0].events]
    return [(e.namespace, e.reason, len(split_hashes(e.hashes))) for e in events if isinstance(e, BlocksEvicted)]


@pytest.mark.parametrize("eviction", sorted(EVICTION_POLICIES))
def test_room_that_nobody_else_wants_is_anybodys(new_ledger: NewLedger, eviction: str) -> None:
    ledger = begun(new_ledger, Share("a"), Share("b"), eviction=eviction)
    create(ledger, A, *range(8))
    assert held(ledger) == {"a": 8}
    assert not evicted(ledger)


@pytest.mark.parametrize("eviction", sorted(EVICTION_POLICIES))
def test_a_full_pool_is_shared_by_weight_however_much_one_tenant_writes(new_ledger: NewLedger, eviction: str) -> None:
    ledger = begun(new_ledger, Share("a", 3), Share("b", 1), eviction=eviction)
    create(ledger, A, *range(8))
    for number in range(100, 200):  # ten times as many as a
        create(ledger, B, number)
        if number % 10 == 0:
            create(ledger, A, number)
    assert held(ledger) == {"a": 6, "b": 2}
    create(ledger, A, *range(300, 400))
    assert held(ledger) == {"a": 6, "b": 2}  # b wants no more, and keeps its share


def test_who_has_no_share_of_its_own_shares_with_all_others(new_ledger: NewLedger) -> None:
    ledger = begun(new_ledger, Share("a"), Share(OTHERS, 3))
    create(ledger, B, *range(5))
    create(ledger, NOBODYS, *range(5))
    assert held(ledger) == {OTHERS: 8}
    create(ledger, A, *range(10))
    assert held(ledger) == {"a": 2, OTHERS: 6}
    assert [share.tenant for share in ledger.share_counts(Tier.HBM)] == ["a", OTHERS]


def test_pinned_blocks_of_who_is_above_its_share_make_the_next_give_way(new_ledger: NewLedger) -> None:
    ledger = begun(new_ledger, Share("a"), Share("b"))
    create(ledger, A, *range(6))
    create(ledger, B, 0, 1)
    ledger.match(blocks(A, range(6)), pinned=True)
    create(ledger, A, 10)
    assert evicted(ledger) == [(B.id, EvictReason.CAPACITY, 1)]


def test_a_quota_takes_from_its_own_and_from_nobody_else(new_ledger: NewLedger) -> None:
    ledger = begun(new_ledger, Share("a", 1, {Tier.NVME: 3}), Share("b"))
    create(ledger, A, *range(4))
    create(ledger, B, *range(4))
    assert offload(ledger, B, 0, 1) == 2
    assert offload(ledger, A, 0, 1) == 2
    assert not evicted(ledger)
    assert offload(ledger, A, 2, 3) == 2
    assert evicted(ledger) == [(A.id, EvictReason.QUOTA, 1)]  # though half the pool is free
    assert held(ledger, Tier.NVME) == {"a": 3, "b": 2}
    assert ledger.share_counts(Tier.NVME)[0] == ("a", 1, 3, 3, 3)


def test_what_is_on_its_way_and_what_is_pinned_count_against_a_quota(new_ledger: NewLedger) -> None:
    ledger = begun(new_ledger, Share("a", 1, {Tier.NVME: 3}))
    create(ledger, A, *range(6))
    copy = ledger.begin_copy(A.id, Tier.HBM, Tier.NVME, blocks(A, [0, 1]))
    assert copy is not None
    assert offload(ledger, A, 2, 3, 4) == 1
    slot = slot_of(ledger, Tier.NVME, split_hashes(blocks(A, [2]))[0])
    assert slot is not None
    ledger.pin(Tier.NVME, slot.to_bytes(4, "little"))
    assert offload(ledger, A, 3, 4) == 0
    ledger.end_copy(copy, [True, False], MigrateCause.OFFLOAD)  # one of them never came
    assert offload(ledger, A, 3, 4) == 2
    assert evicted(ledger) == [(A.id, EvictReason.QUOTA, 1)]


def test_a_quota_of_nothing_is_a_tier_that_is_not_for_this_tenant(new_ledger: NewLedger) -> None:
    ledger = begun(new_ledger, Share("a", 1, {Tier.NVME: 0}))
    create(ledger, A, 0)
    assert offload(ledger, A, 0) == 0
    create(ledger, B, 0)
    assert offload(ledger, B, 0) == 1


def test_blocks_of_a_namespace_count_for_whoever_it_is_assigned_to(new_ledger: NewLedger) -> None:
    ledger = begun(new_ledger, Share("a"), Share("b"))
    create(ledger, A, 0)
    create(ledger, B, 1)
    assert held(ledger) == {"a": 1, "b": 1}
    ledger.assign(A.id, "b")
    assert held(ledger) == {"b": 2}
    ledger.assign(A.id, "nobody")
    assert held(ledger) == {OTHERS: 1, "b": 1}


def test_without_shares_nothing_is_counted(new_ledger: NewLedger) -> None:
    ledger = begun(new_ledger)
    create(ledger, A, 0)
    assert ledger.share_counts(Tier.HBM) == []


def test_shares_come_from_a_file_the_environment_and_flags(tmp_path: Path) -> None:
    path = tmp_path / "kvbm.toml"
    path.write_text('[tenants.acme]\nweight = 3\nnvme_bytes = 1000\n[tenants."*"]\nweight = 2\n')
    settings = load_settings(path, {"KVBM_TENANTS__BETA__HOST_BYTES": "7"}, {"tenants.acme.object_bytes": 9})
    assert settings.tenants == {
        "acme": TenantSettings(weight=3, nvme_bytes=1000, object_bytes=9),
        "*": TenantSettings(weight=2),
        "beta": TenantSettings(host_bytes=7),
    }


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("tenants.a.weight", 0, "tenants.a.weight is 0; give 1 to 1000000"),
        ("tenants.a.weight", 10**9, "give 1 to 1000000"),
        ("tenants.a.nvme_bytes", -1, "tenants.a.nvme_bytes is -1; it must be at least 0"),
        ("tenants.a.wight", 1, "write tenants.TENANT. and one of weight, host_bytes, nvme_bytes, object_bytes"),
        ("tenants", 1, "write tenants.TENANT."),
        ("tenants.a.weight", "much", "tenants.a.weight is a whole number; 'much' is none"),
    ],
)
def test_a_share_that_makes_no_sense_is_refused_by_name(key: str, value: object, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_settings(flags={key: value})
    assert words in str(refused.value)
