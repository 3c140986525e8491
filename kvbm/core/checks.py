"""Checks of single values that a caller gives: what it is, and whether it is in range. They know nothing of blocks."""

from __future__ import annotations

import operator
from typing import Any

from kvbm.core.errors import ArgumentTypeError, ArgumentValueError

_SHOWN = 40  # characters of a value in a message


def checked_int(value: int, argument: str, least: int = 0, most: int | None = None) -> int:
    """A whole number in a range, both ends in it. NumPy's count as Python's."""
    if type(value) is not int:
        value = as_int(value, argument)
    if value < least or (most is not None and value > most):
        upper = "" if most is None else f" and at most {most}"
        raise ArgumentValueError(argument, f"is {value}; give at least {least}{upper}")
    return value


def as_int(value: Any, argument: str) -> int:
    """Python's int for any kind of whole number. Raises ArgumentTypeError: it is none; a bool is none."""
    if not isinstance(value, bool):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise ArgumentTypeError(argument, f"is {kind_of(value)}; give a whole number")


def check_plain_int(value: int, argument: str, least: int | None = 0) -> None:
    """As `checked_int`, for what is kept as it was given: Python's own int alone can be written down.

    `least` None: any.
    """
    if type(value) is not int:
        raise ArgumentTypeError(argument, f"is {kind_of(value)}; give a whole number, an int of Python's own")
    if least is not None:
        checked_int(value, argument, least)


def check_text(value: str, argument: str, most_bytes: int | None = None) -> None:
    """Refuse what is not a str, or has more bytes as UTF-8 than there may be; None: any number."""
    if not isinstance(value, str):
        raise ArgumentTypeError(argument, f"is {kind_of(value)}; give a text")
    if most_bytes is not None and is_longer(value, most_bytes):
        raise ArgumentValueError(argument, f"has {text_bytes(value)} bytes; give at most {most_bytes}")


def is_longer(text: str, most_bytes: int) -> bool:
    """Whether a text has more bytes as UTF-8. Costs nothing for what is short: a character has four at most."""
    return len(text) * 4 > most_bytes and text_bytes(text) > most_bytes


def text_bytes(text: str) -> int:
    """How many bytes a text has as UTF-8; what has no UTF-8 counts as well."""
    return len(text) if text.isascii() else len(text.encode(errors="surrogatepass"))


def kind_of(value: object) -> str:
    """What a value is, for a message: None, or its type with an article and the value where it is short."""
    shown = repr(value) if isinstance(value, (int, float, str)) else ""
    return f"{type_of(value)} ({shown})" if shown and len(shown) <= _SHOWN else type_of(value)


def type_of(value: object) -> str:
    """None, or a value's type with an article: of what is shown nowhere."""
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


def shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
