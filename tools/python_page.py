"""The reference page of the Python API, written from `kvbm.__all__` and its docstrings.

`tools/reference.py` has it among the others.
"""

from __future__ import annotations

import enum
import inspect
import re
import typing
from collections.abc import Iterator
from typing import Any

import msgspec

import kvbm

_SECTION = re.compile(r"^(Args|Attributes|Returns|Raises|Source): ?(.*)$")
_ENTRY = re.compile(r"^(?P<names>[a-z_]+(?:, [a-z_]+)*): (?P<text>.*)$")
_HEADS = (
    "Functions",
    "Managers",
    "Catalogs",
    "Settings, names and pools",
    "Answers and numbers",
    "Constants",
    "Errors",
)
_MODULES = re.compile(r"\b(?:kvbm|collections|typing|numpy|torch|pathlib)\.(?:[a-z_]+\.)*(?=[A-Za-z_])")


def python_page() -> str:
    """Everything public, by kind."""
    groups: dict[str, list[str]] = {head: [] for head in _HEADS}
    for name in sorted(kvbm.__all__, key=str.lower):
        groups[_head_of(name, getattr(kvbm, name))].append(name)
    intro = (
        "Everything that a program may import: what `import kvbm` gives. All other modules may change without "
        "notice.\n\n"
        "This page is generated from the docstrings. [Embed](../embed.md) and [Route](../route.md) show these calls at "
        "work."
    )
    rules = "Packed runs:" + (kvbm.__doc__ or "").partition("Packed runs:")[2]
    parts = ["# Python", intro, _paragraphs(rules)]
    for head, names in groups.items():
        parts.append(f"## {head}")
        parts += [_entry(name, getattr(kvbm, name)) for name in names]
    return "\n\n".join(part.strip() for part in parts if part.strip()) + "\n"


def _head_of(name: str, one: Any) -> str:
    if inspect.isfunction(one) or inspect.isbuiltin(one):
        return "Functions"
    if not inspect.isclass(one):
        return "Constants"
    if issubclass(one, BaseException):
        return "Errors"
    if "Manager" in name and not issubclass(one, tuple):
        return "Managers"
    if "Catalog" in name and not issubclass(one, tuple):
        return "Catalogs"
    is_answer = (issubclass(one, msgspec.Struct) and one.__module__ == "kvbm.core.answers") or issubclass(one, tuple)
    return "Answers and numbers" if is_answer and "Credentials" not in name else "Settings, names and pools"


def _entry(name: str, one: Any) -> str:
    if inspect.isfunction(one) or inspect.isbuiltin(one):
        return f"### `{name}`\n\n{_signature(name, one)}\n\n{_described(one)}"
    if not inspect.isclass(one):
        return f"### `{name}`\n\n{_constant(one)}"
    base = "" if issubclass(one, enum.Enum) else _bases(one)
    members = "" if not issubclass(one, enum.Enum) else f"Members: {', '.join(f'`{member.name}`' for member in one)}."
    calls = [_call(label, call) for label, call in _public(one)]
    return "\n\n".join(part for part in (f"### `{name}`", base, _described(one), members, _fields(one), *calls) if part)


def _constant(one: Any) -> str:
    supertype = getattr(one, "__supertype__", None)
    return f"`{one!r}`" if supertype is None else f"A name for `{supertype.__name__}`."


def _bases(one: type) -> str:
    named = [base.__name__ for base in one.__bases__ if base.__name__ in kvbm.__all__]
    return f"A `{'`, `'.join(named)}`." if named else ""


def _fields(one: type) -> str:
    """The fields of a struct or of a named tuple, with their types: what the docstring says of them stands above."""
    if issubclass(one, msgspec.Struct):
        kinds = {field.encode_name: field.type for field in msgspec.structs.fields(one)}
    elif issubclass(one, tuple) and hasattr(one, "_fields"):
        kinds = typing.get_type_hints(one)
        kinds = {name: kinds[name] for name in one._fields}
    else:
        return ""
    if issubclass(one, kvbm.Settings):
        return "[Settings](settings.md) has every field."
    return "Fields: " + ", ".join(f"`{name}: {_kind(kind)}`" for name, kind in kinds.items()) + "."


def _public(one: type) -> Iterator[tuple[str, Any]]:
    """Its methods and properties that have a docstring of ours, in the order in which they are written, its own
    first.
    """
    if issubclass(one, BaseException | enum.Enum):
        return
    seen: set[str] = set()
    for kind in one.__mro__:
        if not kind.__module__.startswith("kvbm"):
            continue
        for name, call in vars(kind).items():
            made = call.__func__ if isinstance(call, classmethod | staticmethod) else call
            is_call = inspect.isfunction(made) or isinstance(made, property)
            if name.startswith("_") or name in seen or not is_call or not inspect.getdoc(made):
                continue
            seen.add(name)
            yield name, made


def _call(name: str, call: Any) -> str:
    if isinstance(call, property):
        return f"#### `{name}`\n\n{_described(call)}"
    return f"#### `{name}`\n\n{_signature(name, call)}\n\n{_described(call)}"


def _signature(name: str, call: Any) -> str:
    try:
        signature = inspect.signature(call)
    except (TypeError, ValueError):  # of C++
        return ""
    parameters = [
        one.replace(annotation=_annotation(one.annotation), default=_default(one.default))
        for one in signature.parameters.values()
        if one.name != "self"
    ]
    shown = signature.replace(parameters=parameters, return_annotation=_annotation(signature.return_annotation))
    return f"```python\n{_MODULES.sub('', f'{name}{shown}')}\n```"


class _Shown(str):
    """A text that stands in a signature as it is."""

    def __repr__(self) -> str:
        return str(self)


def _annotation(kind: Any) -> Any:
    return kind if kind is inspect.Signature.empty else _Shown(kind if isinstance(kind, str) else _kind(kind))


def _default(value: Any) -> Any:
    """A default that can be written down; else that there is one."""
    if value is inspect.Parameter.empty:
        return value
    return _Shown("…") if (isinstance(value, tuple) and value) or "<" in repr(value) else value


def _kind(kind: Any) -> str:
    shown = kind.__name__ if isinstance(kind, type) and not typing.get_args(kind) else str(kind)
    return _MODULES.sub("", shown)


def _described(one: Any) -> str:
    return _paragraphs(inspect.getdoc(one) or "")


def _paragraphs(text: str) -> str:
    """A docstring as Markdown: paragraphs, and its sections as lists."""
    made: list[str] = []
    section = ""
    for line in inspect.cleandoc(text).splitlines():
        word, began = line.strip(), _SECTION.match(line)
        entry = _ENTRY.match(word) if section in ("Args", "Attributes") and line.startswith(" ") else None
        if began is not None:
            section = began[1]
            made += ["", f"**{section}:** {began[2]}".rstrip(), *([""] if section in ("Args", "Attributes") else [])]
        elif entry is not None:
            made.append(f"- `{entry['names'].replace(', ', '`, `')}`: {entry['text']}")
        elif not word:
            section = "" if not line.startswith(" ") else section
            made.append("")
        elif made and made[-1] and not line.startswith("    ") and section:
            section = ""
            made += ["", word]
        elif made and made[-1].startswith("- "):
            made[-1] += f" {word}"
        else:
            made.append(word)
    return "\n".join(made).strip()
