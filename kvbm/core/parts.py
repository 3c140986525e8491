"""Parts of a cluster: each instance is in one of 64, by its name, so that several catalogs can divide a cluster's
instances among them.

The number is fixed: it is in subjects, and in the permissions that the stream's server has for each instance.
"""

from __future__ import annotations

import re
import zlib
from functools import lru_cache

from kvbm.core.errors import CatalogError, ConfigError

PARTS = 64
ALL_PARTS = tuple(range(PARTS))

_SOME = re.compile(r"\[[0-9,-]+\]$")
_RANGE = re.compile(r"\s*([0-9]{1,2})(?:\s*-\s*([0-9]{1,2}))?\s*")


@lru_cache(4096)
def part_of(instance: str) -> int:
    """The part an instance is in, 0 to 63: the CRC-32 (as in zip files) of its name in UTF-8, modulo 64."""
    return zlib.crc32(instance.encode()) % PARTS


def part_word(part: int) -> str:
    """A part as it stands in a subject: two digits."""
    return f"{part:02}"


def parts_of(words: str, setting: str = "catalog.parts") -> tuple[int, ...]:
    """Parts as a setting has them, such as "0-15,32-47", in order;

    "" for all. Raises ConfigError: they cannot be read.
    """
    if not words.strip():
        return ALL_PARTS
    found: set[int] = set()
    for word in words.split(","):
        matched = _RANGE.fullmatch(word)
        first, last = (int(matched[1]), int(matched[2] or matched[1])) if matched else (1, 0)
        if first > last or last >= PARTS:
            raise ConfigError(
                f"{setting}: {word.strip()!r} names no parts; write numbers from 0 to {PARTS - 1} and ranges of them, "
                'as in "0-31" or "0-15,48"'
            )
        found.update(range(first, last + 1))
    return tuple(sorted(found))


def followed_parts(words: str, asked: str) -> tuple[int, ...]:
    """The parts that a catalog says it follows. Raises CatalogError: it says something else.

    Args:
        asked: the URL of its answer.
    """
    try:
        return parts_of(words, "parts")
    except ConfigError as error:
        raise CatalogError(f"{asked} answers with something else than a catalog's answer ({error})") from None


def scope_name(cluster: str | None, parts: tuple[int, ...]) -> str:
    """What a catalog reads, in a word: "prod", or "prod[0-31]" for some parts; "" for all clusters."""
    if cluster is None:
        return ""
    return f"{cluster}[{words_of(parts)}]" if parts != ALL_PARTS else cluster


def has_parts(stream: str, parts: tuple[int, ...]) -> bool:
    """Whether a stream's name in SQL, which begins with "KVBM/" and its `scope_name`, is of one that reads
    these parts.
    """
    scope = stream.partition("@")[0]
    return scope.endswith(f"[{words_of(parts)}]") if parts != ALL_PARTS else _SOME.search(scope) is None


def words_of(parts: tuple[int, ...]) -> str:
    """Parts as `parts_of` reads them, each range once; "" for all."""
    if parts == ALL_PARTS:
        return ""
    ranges: list[tuple[int, int]] = []
    for part in parts:
        if ranges and ranges[-1][1] == part - 1:
            ranges[-1] = (ranges[-1][0], part)
        else:
            ranges.append((part, part))
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in ranges)
