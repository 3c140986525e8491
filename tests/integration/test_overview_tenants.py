"""What the overview tells of tenants: what lies in the object pool, whoever has put it, and what they may have."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kvbm import cli
from kvbm.assembly import NATIVE, open_manager
from kvbm.catalog.service import TenantLimits
from kvbm.core.events import MigrateCause
from kvbm.core.ids import NO_PARENT, Epoch, Namespace, Tier
from kvbm.core.policy import OTHERS
from kvbm.manager.owned_hbm import Manager
from kvbm.pools.base import Proof
from kvbm.pools.stores.memory import MemoryStore
from tests.catalog_site import HASHES, run_catalog
from tests.eventually import eventually
from tests.managers import BLOCK_BYTES, hashes_of, rows_of
from tests.nats_fixture import cluster, nats_url
from tests.object_pools import memory_objects
from tests.sites import WAIT_S, K, Site, site
from tests.web_site import overview_of

__all__ = ["cluster", "nats_url"]
ACME = Namespace(model="test", revision="r1", block_tokens=16, tenant="acme")
GLOBEX = Namespace(model="test", revision="r1", block_tokens=16, tenant="globex")


@pytest.fixture(autouse=True)
def look_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbm.catalog.edge.overview.TENANTS_EVERY_S", 0.0)


def instance(here: Site, name: str, space: Namespace) -> Manager:
    objects = memory_objects(BLOCK_BYTES, K, here.new_store(), deadline_s=WAIT_S)
    settings = here.settings(name, catalog__tenant_secrets={"acme": "a", "globex": "g"})
    return open_manager(settings, [space], BLOCK_BYTES, object_pool=objects)


def compute(manager: Manager, space: Namespace, prompt: int) -> None:
    """Serve a prompt of eight blocks, and have it in the store."""
    hashes = hashes_of(prompt, 8)
    slots = eventually(lambda: manager.allocate(8), "HBM stays short")
    rows = rows_of(hashes)
    manager.pools.slots[Tier.HBM].write(slots, rows, Proof(space.id, Epoch(1), hashes, NATIVE.checksums(rows)))
    manager.unpin(manager.create(space.id, NO_PARENT, 0, hashes, slots))
    assert manager.settle(WAIT_S)


def tenants_of(url: str) -> dict[str, dict[str, Any]]:
    told = overview_of(url)["tenants"]
    return {
        name: {part: told[part][at] for part in told if part not in ("tenant", "more")}
        for at, name in enumerate(told["tenant"])
    }


def told(url: str, is_so: Callable[[dict[str, dict[str, Any]]], bool]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}

    def is_told() -> bool:
        nonlocal found
        found = tenants_of(url)
        return is_so(found)

    try:
        eventually(is_told, "")
    except AssertionError:
        raise AssertionError(f"tenants are told as {found}") from None
    return found


def test_what_a_tenant_has_is_what_lies_in_the_store_by_claims_and_no_janitor_serves_it(tmp_path: Path) -> None:
    store = MemoryStore()
    with site(tmp_path, "claims", lambda: store) as here:
        with closing(instance(here, "gone", ACME)) as manager:
            compute(manager, ACME, 1)
            compute(manager, ACME, 2)
            told(here.client.url, lambda found: found.get("acme", {}).get("blocks") == 16)
        with closing(instance(here, "stays", GLOBEX)) as manager:
            compute(manager, GLOBEX, 3)
            # A writer that has stopped counts no more as one that runs; what it has put is there all the same.
            wanted = {"put_raw": 8 * BLOCK_BYTES, "blocks": 8}
            found = told(here.client.url, lambda found: wanted.items() <= found.get("globex", {}).items())
            assert found["acme"]["blocks"] == 16
            lies = sum(len(one[0]) for name, one in store.objects.items() if not name.startswith(".kvbm/"))
            assert found["acme"]["held"] == 2 * found["globex"]["held"] == lies * 2 // 3
            report = here.gc(young_s=0.0, quota_bytes=1)
            assert report.withdrawn == {"quota": 24 // K}
            found = told(here.client.url, lambda found: found["acme"]["blocks"] == found["globex"]["blocks"] == 0)
            assert found["acme"]["held"] == found["globex"]["held"] == 0
            names = {one.instance for one in here.client.instances()}
            assert any(name.startswith("janitor-") for name in names)
            assert found["acme"]["instances"] == found["globex"]["instances"] == 1
            assert found["globex"]["put_stored"] > 0  # it has put them, though they are gone
            pools = overview_of(here.client.url)["pools"]
            assert {pool["bytes"] for pool in pools} <= {0}


def test_a_pool_is_as_large_as_engines_say_though_a_janitor_has_opened_it(tmp_path: Path) -> None:
    store = MemoryStore()
    with site(tmp_path, "sizes", lambda: store) as here, closing(instance(here, "a", ACME)) as manager:
        compute(manager, ACME, 1)
        told(here.client.url, lambda found: found.get("acme", {}).get("blocks") == 8)
        here.gc()
        eventually(lambda: len(here.client.instances()) == 2, "the janitor is not heard")
        (pool,) = overview_of(here.client.url)["pools"]
        assert (pool["blocks"], pool["bytes"]) == (8, 8 * BLOCK_BYTES)


def test_limits_are_those_of_the_settings_then_of_the_database(
    nats_url: str, cluster: str, sqlite_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    limits = {"acme": TenantLimits(100, 200, 300), OTHERS: TenantLimits(0, 0, 700), "initech": TenantLimits()}
    with closing(run_catalog(nats_url, cluster, sqlite_url, tenants=limits)) as site_:
        running = next(site_)
        with sqlite3.connect(sqlite_url.partition("///")[2], timeout=WAIT_S) as database:
            database.executemany("INSERT INTO tenants (name, quota_bytes) VALUES (?, ?)", [("acme", 5), ("globex", 9)])
        database.close()
        writer = running.instance("a")
        for space, first in ((GLOBEX, 0), (ACME, 4)):
            allocation = writer.ledger.allocate(Tier.HBM, 2)
            assert allocation is not None
            hashes = HASHES[16 * first : 16 * (first + 2)]
            writer.ledger.create(space.id, Tier.HBM, NO_PARENT, 0, hashes, allocation.slots)
            copy = writer.ledger.begin_copy(space.id, Tier.HBM, Tier.OBJECT, hashes)
            assert copy is not None
            writer.ledger.end_copy(copy, [True] * 2, MigrateCause.OFFLOAD)
        writer.publish()
        put = {GLOBEX.id: (4000, 1000)}  # compression has saved three quarters of it
        spaces = (ACME, GLOBEX)
        writer.beat(
            namespaces=tuple(one.id for one in spaces), told=tuple(one.canonical() for one in spaces), put_bytes=put
        )
        found = told(running.client.url, lambda found: found.get("globex", {}).get("held") == 2 * 1024 // 4)
        quotas = ("host_quota", "nvme_quota", "quota")
        assert [found["acme"][part] for part in quotas] == [100, 200, 300]
        assert [found["globex"][part] for part in quotas] == [None, None, 9]
        assert [found[OTHERS][part] for part in quotas] == [None, None, 700]
        assert [found["initech"][part] for part in quotas] == [None, None, None]
        assert (found["acme"]["blocks"], found["acme"]["held"]) == (2, 2 * 1024)
        assert (found[OTHERS]["blocks"], found[OTHERS]["held"]) == (2, 2 * 1024 // 4)  # globex's alone
        capsys.readouterr()
        assert cli.catalog_main(["tenants", "--url", running.client.url, "--json"]) == 0
        printed = json.loads(capsys.readouterr().out)
        assert {one.pop("tenant"): one for one in printed["tenants"]} == found and printed["more"] == 0
        assert cli.catalog_main(["tenants", "--url", running.client.url]) == 0
        lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
        (acme,) = [line for line in lines if line.startswith("acme ") and ":" not in line]
        assert acme.startswith("acme 1 1 2 2.0 KiB 50.0 % 300 B 682.7 % 100 B 200 B")
        (globex,) = [line for line in lines if line.startswith("globex ") and ":" not in line]
        assert globex.startswith("globex 1 1 2 512 B 50.0 % 9 B 5688.9 %")
