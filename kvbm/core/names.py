"""What instances and others on the stream may be called, and what is kept for catalogs and object pools, which speak
there beside them.
"""

from __future__ import annotations

import re

CATALOG_PULSES = "_catalog-"
"""Begins the name under which a catalog sends pulses of its own."""

NAME_RULE = f'use 1 to 128 letters, digits, "-" and "_", not with {CATALOG_PULSES!r} first, as catalogs are called'
_NAME = re.compile(r"[A-Za-z0-9_-]{1,128}")


def is_name(text: str) -> bool:
    """Whether an instance, a janitor or a user of the stream may be called so."""
    return _NAME.fullmatch(text) is not None and not text.startswith(CATALOG_PULSES)


def kept_name(kind: str, who: str) -> str:
    """A name that no instance can have: what stands before its colon is what it is, such as "catalog"."""
    return f"{kind}:{who}"


def kind_of_name(name: str) -> str | None:
    """What somebody of a name is, as in `kept_name`; None: an instance."""
    kind, colon, _ = name.partition(":")
    return kind if colon else None
