"""What a single setting may be stands at its field, and holds for it wherever the settings come from."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from kvbm.config import Settings, SourceSettings, TenantSettings, check_settings, load_settings
from kvbm.config.bounds import Bounds, bounds_of, check_bounds
from kvbm.config.settings import SettingsGroup
from kvbm.core.errors import ConfigError
from kvbm.core.policy import EVICTION_POLICIES
from tools.reference import described


def fields(group: SettingsGroup, prefix: str = "") -> Iterator[tuple[str, type[SettingsGroup], str, Bounds]]:
    """Each setting: its key, its table, its name there, its bounds."""
    for name, bounds in bounds_of(type(group)).items():
        value = getattr(group, name)
        if isinstance(value, SettingsGroup):
            yield from fields(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", type(group), name, bounds


def every() -> Iterator[tuple[str, type[SettingsGroup], str, Bounds]]:
    yield from fields(Settings())
    yield from fields(TenantSettings(), "tenants.a.")
    yield from fields(SourceSettings(), "bridge.sources.a.")


def wrong(bounds: Bounds) -> list[Any]:
    """Values just outside."""
    found: list[Any] = []
    if bounds.least is not None:
        found.append(math.nextafter(bounds.least, -math.inf) if bounds.kind is float else bounds.least - 1)
    if bounds.above is not None:
        found.append(bounds.above)
    if bounds.most is not None:
        found.append(math.nextafter(bounds.most, math.inf) if bounds.kind is float else bounds.most + 1)
    if bounds.kind is float and found:
        found += [math.inf, -math.inf, math.nan]
    if bounds.choice and bounds.kind is str:
        found += ["", bounds.choice[0] + "x", bounds.choice[0].upper()]
    return found


def test_every_number_has_bounds() -> None:
    numbers = [(key, bounds) for key, _, _, bounds in every() if bounds.kind in (int, float)]
    assert len(numbers) > 90
    assert [key for key, bounds in numbers if bounds == Bounds(bounds.kind)] == []


def test_every_bound_refuses_what_is_just_outside_by_its_key_and_says_what_is_allowed() -> None:
    refusals = 0
    for key, group, name, bounds in every():
        for value in wrong(bounds):
            with pytest.raises(ConfigError) as refused:
                check_bounds(group(**{name: value}), key.removesuffix(name))
            assert str(refused.value).startswith(f"{key} is ")
            assert str(refused.value).endswith(f"; {bounds.rule}")
            refusals += 1
    assert refusals > 200


def test_ends_and_choices_themselves_are_allowed() -> None:
    for _, group, name, bounds in every():
        ends = [end for end in (bounds.least, bounds.most) if end is not None]
        for value in (*bounds.choice, *ends):
            check_bounds(group(**{name: value}))


def test_a_number_with_a_meaning_of_its_own_is_allowed() -> None:
    found = 0
    for key, group, name, bounds in every():
        for value in re.findall(r"(?<![\w.])(0|-1): ", described(group).meanings[name]):
            assert bounds.hold(bounds.kind(value)), f"{key} says what {value} means, and {value} is refused"
            found += 1
    assert found > 15


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"pools.eviction": "fifo"}, f"pools.eviction is 'fifo'; use one of {', '.join(EVICTION_POLICIES)}"),
        ({"samples.rate": "1.5"}, "samples.rate is 1.5; give 0 to 1"),
        ({"pools.nvme.offload_share": 0}, "pools.nvme.offload_share is 0; it must be above 0 and at most 1"),
        (
            {"nats.replicas": 2},
            "nats.replicas is 2; give 1, or in a NATS cluster 3 or 5: of an even number half may not fail",
        ),
        (
            {"erasure.hold_s": -0.5},
            "erasure.hold_s is -0.5; give 0 to 1e+06 seconds, or -1 until the record of erasures was read",
        ),
        ({"catalog.limits.body_bytes": 5}, "catalog.limits.body_bytes is 5; it must be at least 12582912"),
        ({"catalog.routing.tier_weights.host": 0}, "catalog.routing.tier_weights.host is 0; it must be above 0"),
        ({"pools.hbm.owner": 3}, "flags (--set): pools.hbm.owner is a text; 3 is none"),
        ({"nats.replicas": "three"}, "flags (--set): nats.replicas is a whole number; 'three' is none"),
    ],
)
def test_a_refusal_names_key_value_and_what_is_allowed(flags: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_settings(flags=flags)
    assert str(refused.value) == sentence


def test_settings_made_in_a_program_are_held_to_the_same_bounds() -> None:
    settings = msgspec.structs.replace(Settings(), tenants={"a": TenantSettings(host_bytes=-1)})
    with pytest.raises(ConfigError, match=r"tenants\.a\.host_bytes is -1; it must be at least 0"):
        check_settings(settings)
