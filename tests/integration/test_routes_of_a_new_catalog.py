"""A catalog that has just begun, or does not hear an instance: who is ranked, who is left out and why, and which loads
are guesses.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvbm.core.events import StopReason
from tests.catalog_site import HASHES, SPACE, Instance, Running, run_catalog
from tests.eventually import eventually
from tests.nats_fixture import cluster, nats_url  # noqa: F401

FOR_EVER_S = 3600.0  # nobody falls silent


@pytest.fixture
def begun(nats_url: str, cluster: str, sqlite_url: str) -> Iterator[tuple[Running, Instance, Instance]]:  # noqa: F811
    """A catalog that knows of two instances, e0 with six blocks and e1 with three, and has heard e1 alone, which is
    busy.
    """
    e0, e1 = Instance(nats_url, cluster, "e0"), Instance(nats_url, cluster, "e1")
    for one, blocks, queued in ((e0, 6, 0), (e1, 3, 20_000)):
        one.create(0, blocks)
        one.publish()
        one.beat(queued_tokens=queued)
    for running in run_catalog(nats_url, cluster, sqlite_url, liveness_s=FOR_EVER_S):

        def is_heard() -> bool:
            e1.beat(queued_tokens=20_000)
            return state(running, "e1") == "live"  # noqa: B023 - called now

        eventually(is_heard, "e1 is not heard")
        yield running, e0, e1


def state(running: Running, name: str) -> str:
    found = running.client.instance(name)
    return "" if found is None else found.state


def test_who_holds_most_is_ranked_before_its_first_heartbeat_and_its_load_is_called_a_guess(
    begun: tuple[Running, Instance, Instance],
) -> None:
    running, e0, _ = begun
    assert state(running, "e0") == "unheard"
    told = running.client.route(SPACE, HASHES, 40, remember=False)
    for routed in (told, *running.client.route_many(SPACE, [HASHES], [40])):
        assert [(one.instance, one.depth, one.load_age_s) for one in routed.ranked] == [("e0", 6, None), ("e1", 3, 0.0)]
        assert routed.excluded == {}
    picked = running.client.route(SPACE, HASHES, 40, instances=["e0", "e1"])
    assert picked.instance == "e0"

    def is_heard() -> bool:
        e0.beat()
        return state(running, "e0") == "live"

    eventually(is_heard, "e0 is not heard")
    assert [one.load_age_s for one in running.client.route(SPACE, HASHES, 40).ranked] == [0.0, 0.0]


def test_a_route_names_who_is_left_out_and_why(begun: tuple[Running, Instance, Instance]) -> None:
    running, e0, _ = begun

    def is_stopping() -> bool:
        e0.beat(stopping=True)
        return state(running, "e0") == "stopping"

    eventually(is_stopping, "e0 is not about to stop")
    routed = running.client.route(SPACE, HASHES, 40)
    assert ([one.instance for one in routed.ranked], routed.excluded) == (["e1"], {"e0": "stopping"})
    e0.ledger.stop(StopReason.SHUTDOWN)
    e0.publish()
    eventually(lambda: state(running, "e0") == "stopped", "e0 has not stopped")
    routed = running.client.route(SPACE, HASHES, 40)
    assert ([one.instance for one in routed.ranked], routed.excluded) == (["e1"], {"e0": "stopped"})
    assert running.client.route(SPACE, HASHES, 40, instances=["e1"]).excluded == {}
    other = HASHES[16 * 7 :]  # nobody that is left out has its first block
    assert running.client.route(SPACE, other, 12).excluded == {}


def test_a_load_of_long_ago_is_called_a_guess(nats_url: str, cluster: str, sqlite_url: str) -> None:  # noqa: F811
    """As while NATS is away: who was heard, and is not silent yet, is ranked with what it last said."""
    e0 = Instance(nats_url, cluster, "e0")
    e0.create(0, 6)
    e0.publish()
    for running in run_catalog(nats_url, cluster, sqlite_url, liveness_s=8.0):

        def is_heard() -> bool:
            e0.beat()
            return state(running, "e0") == "live"  # noqa: B023 - called now

        eventually(is_heard, "e0 is not heard")
        check_age(running)


def check_age(running: Running) -> None:
    seen: list[float | None] = []

    def is_old() -> bool:
        seen.append(running.client.route(SPACE, HASHES, 40).ranked[0].load_age_s)
        return seen[-1] != 0.0

    eventually(is_old, "what e0 last said counts as news for ever")
    assert seen[-1] is not None and seen[-1] >= 4.0
