"""What differs between two sets of settings, and settings of which some are taken and others are not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from kvbm.config.settings import Settings, SettingsGroup


def changed_keys(before: Settings, after: Settings) -> list[str]:
    """The dotted keys whose values differ, in the order of the tree. Values, which may be secrets, are not told."""
    old, new = dict(_values(before)), dict(_values(after))
    return [key for key in {**old, **new} if old.get(key, _ABSENT) != new.get(key, _ABSENT)]


def merged(before: Settings, after: Settings, takes: Callable[[str, Any, Any], bool]) -> Settings:
    """`before`, with the values of `after` where `takes` says so of a key, such as "catalog.limits.burst", and of its
    two values.
    """
    found: Settings = _merged(before, after, takes, "")
    return found


_ABSENT = object()


def _values(value: Any, key: str = "") -> list[tuple[str, Any]]:
    """The leaves. Tables of the user's own names are taken apart too."""
    if isinstance(value, SettingsGroup):
        entries: Mapping[str, Any] = {name: getattr(value, name) for name in value.__struct_fields__}
    elif isinstance(value, Mapping):
        entries = value
    else:
        return [(key, value)]
    start = f"{key}." if key else ""
    return [leaf for name, one in entries.items() for leaf in _values(one, f"{start}{name}")]


def _merged(before: Any, after: Any, takes: Callable[[str, Any, Any], bool], prefix: str) -> Any:
    values = {}
    for name in before.__struct_fields__:
        old, new, key = getattr(before, name), getattr(after, name), f"{prefix}{name}"
        if isinstance(old, SettingsGroup):
            values[name] = _merged(old, new, takes, f"{key}.")
        else:
            values[name] = new if takes(key, old, new) else old
    return msgspec.structs.replace(before, **values)
