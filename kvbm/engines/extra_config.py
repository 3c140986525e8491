"""The extra config that a user gives an engine for kvbm: its keys, and the files that each rank has of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvbm.config import leaves
from kvbm.core.errors import ConfigError


def dotted_keys(extra: Mapping[str, Any], option: str) -> Iterator[tuple[str, Any]]:
    """The extra config as dotted keys, each with its value.

    Args:
        extra: dotted keys, or nested tables.
        option: of the engine, that gives the extra config.
    Raises: ConfigError: a key is there twice, dotted and in a table.
    """
    seen: set[str] = set()
    for key, value in leaves(extra):
        if key in seen:
            raise ConfigError(f"{option}: {key} is given twice, dotted and in a table; keep one of them")
        seen.add(key)
        yield key, value


def paths_of_rank(paths: str, rank: str) -> str:
    """The files of a rank: each with the rank's place behind its name.

    A device is what it is: of two ranks, the second finds it in use.

    Args:
        paths: with ":" between them.
        rank: such as "-dp1"; "" where there is one rank.
    """
    return ":".join(path if not path or Path(path).is_block_device() else path + rank for path in paths.split(":"))
