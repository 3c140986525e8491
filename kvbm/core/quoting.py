"""A text between quotes, as the files that others read have it: TOML, and the configuration of nats-server."""

from __future__ import annotations

import json
from collections.abc import Iterable

_PLAIN = frozenset(range(0x20, 0x7F)) - set(b'"\\')


def toml_text(text: str) -> str:
    """A basic string of TOML. JSON's is none: it writes 😀 as two surrogates, which no TOML may have."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def toml_texts(texts: Iterable[str]) -> str:
    """An array of them."""
    return f"[{', '.join(map(toml_text, texts))}]"


def nats_text(value: str | bytes) -> str:
    r"""A string of nats-server's configuration, which knows \\, \" and \xNN, and takes JSON's \u00e9 for a mistake.

    Args:
        value: bytes for a path, which need not be a text in UTF-8.
    """
    raw = value.encode() if isinstance(value, str) else value
    return '"' + "".join(chr(one) if one in _PLAIN else f"\\x{one:02x}" for one in raw) + '"'
