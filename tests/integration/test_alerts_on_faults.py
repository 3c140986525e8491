"""Each alert of deploy/prometheus fires when the cluster has its fault, and no other does: real faults of real parts,
scraped every two seconds by Debian's Prometheus.

The rules wait for seconds instead of minutes; `tests/alert_cases.py` has them as they are, over series.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.alert_faults import FAULTS, INSTANCE_KILLED, NATS_KILLED, OTHERWISE_PROVED
from tests.alert_site import AlertSite
from tests.shortened_rules import SUBSTITUTIONS, but_for_numbers, shortened
from tests.watched_metrics import RULES, rules


def test_each_alert_has_a_fault_or_a_reason_why_none_can_be_made() -> None:
    proved = set().union(*(fault.fires for fault in FAULTS))
    assert proved | OTHERWISE_PROVED.keys() == {rule["alert"] for rule in rules()}
    assert not proved & OTHERWISE_PROVED.keys() and all(OTHERWISE_PROVED.values())
    names = [fault.name for fault in FAULTS]
    assert len(set(names)) == len(names)


def test_the_rules_are_shortened_and_otherwise_the_same() -> None:
    text = RULES.read_text()
    short = shortened(text)
    assert but_for_numbers(short) == but_for_numbers(text) != []
    assert all(rule["for"] == "" for rule in but_for_numbers(short))
    changed = [one for one, other in zip(short.splitlines(), text.splitlines(), strict=True) if one != other]
    assert len(changed) >= len(rules())
    for _, _, count in SUBSTITUTIONS:
        assert count > 0
    with pytest.raises(AssertionError, match="is there"):
        shortened(text.replace("[10m]", "[20m]"))
    assert but_for_numbers(text.replace("== 1", "!= 1")) != but_for_numbers(text)


def test_a_nats_and_an_instance_that_are_killed_are_told_and_nothing_else(tmp_path: Path) -> None:
    with ExitStack() as opened:
        site = AlertSite(tmp_path, opened, whole=False)
        site.start_engines(a={}, b={})
        site.watch()
        site.proves(NATS_KILLED)
        site.proves(INSTANCE_KILLED)


@pytest.mark.nightly
@pytest.mark.timeout(2400)
def test_after_each_fault_exactly_its_alerts_fire_and_when_it_is_over_none(tmp_path: Path) -> None:
    with ExitStack() as opened:
        site = AlertSite(tmp_path, opened)
        site.start_reader_and_lender()
        site.watch()
        for fault in FAULTS:
            site.proves(fault)
