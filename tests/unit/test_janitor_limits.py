"""A janitor's report tells what there is beside what there may be."""

from __future__ import annotations

from kvbm.core.policy import OTHERS
from kvbm.janitor.holdings import TenantPart
from kvbm.janitor.report import Limit, as_words
from tests.janitors import OTHER, RULES, SPACE, World, chain, gc


def test_limits_stand_beside_the_bytes_of_those_that_they_are_for() -> None:
    world = World()
    for number in range(5):
        world.put(chain(number), SPACE if number < 3 else OTHER)
        world.now_s += 1
    size = len(world.store.objects[world.names(chain(0))[0]][0])
    parts = {"acme": TenantPart(2, 2 * size), OTHERS: TenantPart(1, 3 * size)}
    report = gc(world, RULES._replace(quota_bytes=9 * size, parts=parts))
    assert report.withdrawn == {"quota": 1}
    assert report.limits == {"acme": Limit(3 * size, 2 * size), OTHERS: Limit(2 * size, 3 * size)}
    assert report.pool_limit == Limit(5 * size, 9 * size)
    words = as_words(report)
    assert f"tenant acme: {3 * size:,} bytes; the limit is {2 * size:,}" in words
    assert f"all other tenants together: {2 * size:,} bytes; the limit is {3 * size:,}" in words
    assert f"the whole pool: {5 * size:,} bytes; the limit is {9 * size:,}" in words
    again = gc(world, RULES._replace(parts=parts))
    assert again.limits["acme"] == Limit(2 * size, 2 * size) and again.pool_limit is None


def test_a_limit_of_the_database_is_told_where_the_settings_have_none_and_the_settings_win() -> None:
    world = World()
    world.put(chain(0), OTHER)
    size = len(world.store.objects[world.names(chain(0), OTHER)[0]][0])
    world.cluster.quotas = {"globex": 5 * size, "nobody": 7}
    assert gc(world).limits == {"globex": Limit(size, 5 * size), "nobody": Limit(0, 7)}
    report = gc(world, RULES._replace(parts={"globex": TenantPart(1, 4 * size)}))
    assert report.limits["globex"] == Limit(size, 4 * size)


def test_without_limits_nothing_is_said_of_any() -> None:
    world = World()
    world.put(chain(0))
    report = gc(world)
    assert report.limits == {} and report.pool_limit is None and "limit" not in as_words(report)
