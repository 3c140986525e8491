"""What a command prints: the one way to a terminal for words that others have chosen.

Names of instances, tenants, models, pools and objects come from whoever may publish or store something. A terminal
obeys some of the characters that may be in them: it would clear itself, change its title, hide a line, or show words in
another order. So all that is printed goes through here, where characters that a terminal does not simply show are
written as escapes, such as `\\x1b` and `\\u202e`.
"""

from __future__ import annotations

import re
import sys
from typing import TextIO

import msgspec

_UNUSUAL = re.compile(r"[^ -~]")
_UNUSUAL_OF_JSON = re.compile(r"[^\n -~]")


def plain(text: str) -> str:
    """The text in characters that a terminal shows as they are: all others, line ends too, as escapes.

    Others are control, format (bidirectional ones among them), private and unassigned characters, surrogates, and
    spaces but the usual one.
    """
    return text if text.isprintable() else _UNUSUAL.sub(lambda found: _shown(found[0]), text)


def say(*lines: str, to: TextIO | None = None) -> None:
    """Print lines, each `plain`, at once.

    Args:
        to: None for standard output as it is now.
    """
    file = sys.stdout if to is None else to
    file.write("".join(f"{plain(line)}\n" for line in lines))
    file.flush()


def say_text(text: str) -> None:
    """Print a text of ours, such as a script for a shell, as it is: no word of others may be in it."""
    sys.stdout.write(text if text.endswith("\n") else f"{text}\n")


def say_csv(text: str) -> None:
    """Print CSV at once: to a file or a pipe as it is, to a terminal as `plain` lines."""
    if sys.stdout.isatty():
        say(*text.splitlines())
        return
    sys.stdout.write(text)
    sys.stdout.flush()


def say_error(name: str, error: object) -> None:
    """Print what is wrong to standard error. What stands on further lines is indented: no word of others begins a line.

    Args:
        name: of the program that says it.
    """
    first, *more = f"{name}: {error}".split("\n")
    say(first, *(line if line.startswith("  ") else f"  {line}" for line in more), to=sys.stderr)


def as_json(value: object, indent: int | None = None) -> str:
    """A value as JSON whose text is `plain` but for the line ends of an indentation; a reader of it finds all as it
    was.

    Args:
        indent: spaces for each level; None for one line.
    """
    data = msgspec.json.encode(value)
    text = (data if indent is None else msgspec.json.format(data, indent=indent)).decode()
    return text if text.isprintable() else _UNUSUAL_OF_JSON.sub(_shown_in_json, text)


def _shown(one: str) -> str:
    if one.isprintable():
        return one
    code = ord(one)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _shown_in_json(found: re.Match[str]) -> str:
    if found[0].isprintable():
        return found[0]
    units = found[0].encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))
