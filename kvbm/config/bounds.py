"""What the value of a single setting may be, as the annotation of its field says: `msgspec.Meta` or `Literal`.

`Meta.extra` may have "choice", a tuple of what is allowed, and "rule", the sentence of a refusal where the bounds alone
say too little.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import msgspec

from kvbm.config.settings import SettingsGroup
from kvbm.core.errors import ConfigError

_ENDS = ("ge", "gt", "le")


class Bounds(NamedTuple):
    """What a value may be.

    Attributes:
        kind: type of it; of a choice, the type of what can be chosen.
        choice: what can be chosen, besides the numbers between the ends; empty where there is no choice.
        least: the smallest number. above: the number it must be larger than. most: the largest number; all None where
            there is no such end.
        rule: what a refusal says is allowed; "" where anything is.
    """

    kind: Any
    choice: tuple[Any, ...] = ()
    least: float | None = None
    above: float | None = None
    most: float | None = None
    rule: str = ""

    def hold(self, value: Any) -> bool:
        """Whether a value is within them. A number that has an end is finite."""
        if value in self.choice:
            return True
        if self.least is None and self.above is None and self.most is None:
            return not self.choice
        return (
            isinstance(value, int | float)
            and math.isfinite(value)
            and (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
        )


@cache
def bounds_of(group: type[SettingsGroup]) -> dict[str, Bounds]:
    """The bounds of each field of a table of settings."""
    return {name: _bounds(hint) for name, hint in get_type_hints(group, include_extras=True).items()}


def check_bounds(group: SettingsGroup, prefix: str = "") -> None:
    """Refuse a value that its field does not allow, here and in the tables below.

    Raises ConfigError: which, and what is allowed.
    """
    for name, bounds in bounds_of(type(group)).items():
        value, key = getattr(group, name), f"{prefix}{name}"
        if isinstance(value, SettingsGroup):
            check_bounds(value, f"{key}.")
        elif isinstance(value, Mapping):
            for entry, one in value.items():
                if isinstance(one, SettingsGroup):
                    check_bounds(one, f"{key}.{entry}.")
        elif not bounds.hold(value):
            raise ConfigError(f"{key} is {shown(value)}; {bounds.rule}")


def shown(value: Any) -> str:
    """A value as a sentence shows it."""
    return f"{value:g}" if isinstance(value, float) else repr(value)


def _bounds(hint: Any) -> Bounds:
    metas: list[Any] = []
    while get_origin(hint) is Annotated:
        hint, *added = get_args(hint)
        metas += added
    choice = get_args(hint) if get_origin(hint) is Literal else ()
    ends: dict[str, Any] = dict.fromkeys(_ENDS)
    rule = ""
    for meta in metas:
        if isinstance(meta, msgspec.Meta):
            ends |= {end: getattr(meta, end) for end in _ENDS if getattr(meta, end) is not None}
            choice = (meta.extra or {}).get("choice", choice)
            rule = (meta.extra or {}).get("rule", rule)
    least, above, most = ends.values()
    kind = type(choice[0]) if choice else hint
    return Bounds(kind, choice, least, above, most, rule or _rule(choice, least, above, most))


def _rule(choice: tuple[Any, ...], least: float | None, above: float | None, most: float | None) -> str:
    if choice:
        return f"use one of {', '.join(map(str, choice))}"
    if least is not None and most is not None:
        return f"give {shown(least)} to {shown(most)}"
    words = [
        f"{word} {shown(end)}"
        for word, end in (("at least", least), ("above", above), ("at most", most))
        if end is not None
    ]
    return f"it must be {' and '.join(words)}" if words else ""
