"""What the page shows of tenants' limits, beside what lies in the object pool."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from kvbm.catalog.service import TenantLimits
from kvbm.core.events import MigrateCause
from kvbm.core.ids import NO_PARENT, Tier
from kvbm.core.policy import OTHERS
from tests.browser import Browser
from tests.catalog_site import HASHES, OTHER, SPACE, Instance
from tests.web_site import CLUSTER, WebSite


def test_a_quota_stands_beside_what_lies_in_the_store(window: Browser, tmp_path: Path) -> None:
    limits = {"acme": TenantLimits(host_bytes=3 << 20, object_bytes=8192), OTHERS: TenantLimits(0, 5 << 20, 16384)}
    with ExitStack() as opened:
        site = WebSite(tmp_path, opened, tenants=limits)
        writer = Instance(site.server.url, CLUSTER, "gpu-a")
        for space, first, blocks in ((OTHER, 0, 2), (SPACE, 2, 4)):
            allocation = writer.ledger.allocate(Tier.HBM, blocks)
            assert allocation is not None
            hashes = HASHES[16 * first : 16 * (first + blocks)]
            writer.ledger.create(space.id, Tier.HBM, NO_PARENT, 0, hashes, allocation.slots)
            copy = writer.ledger.begin_copy(space.id, Tier.HBM, Tier.OBJECT, hashes)
            assert copy is not None
            writer.ledger.end_copy(copy, [True] * blocks, MigrateCause.OFFLOAD)
        writer.publish()
        spaces = (OTHER, SPACE)
        writer.beat(namespaces=tuple(one.id for one in spaces), told=tuple(one.canonical() for one in spaces))
        window.forget()
        window.open(site.url + "/#/tenants")

        def shown() -> dict[str, tuple[str, str, str]]:
            rows = {row[0]: row for row in window.rows("Tenants")}
            return {name: (row[4], row[5], row[6]) for name, row in rows.items()}

        wanted = {
            "(no tenant)": ("4.00 KiB", "–", "–"),
            "acme": ("2.00 KiB", "8.00 KiB", "25.0 %"),
            "* (all others)": ("4.00 KiB", "16.0 KiB", "25.0 %"),
        }
        window.until(lambda: shown() == wanted, "the limits do not show as they are")
        titles = window.run("return [...document.querySelectorAll('.space .tr [title]')].map((e) => e.title)")
        assert "at most 3.00 MiB of each instance's HOST" in titles
        assert "at most 5.00 MiB of each instance's NVME" in titles
        assert window.said() == []
