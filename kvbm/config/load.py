"""Settings as they are given: a TOML file, then the environment, then flags.

Each value is checked where its source is still known.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_origin

import msgspec

from kvbm.config.bounds import bounds_of
from kvbm.config.checks import check_settings
from kvbm.config.settings import Settings, SettingsGroup, SourceSettings, TenantSettings
from kvbm.core.checks import kind_of
from kvbm.core.errors import ArgumentTypeError, ConfigError
from kvbm.files import read_small
from kvbm.safe_log import SafeLog

log = SafeLog()

ENVIRONMENT_PREFIX = "KVBM_"
_PLACE = re.compile(r"(tcp|udp|sctp)://(\d+(\.\d+){3}|\[[0-9a-fA-F:.]+\]):\d+")
_LINKS = (  # what ends the name of a variable → what its value looks like; before it stands the Service's name
    (
        re.compile(r"_SERVICE_HOST|_PORT_\d+_(TCP|UDP|SCTP)_ADDR"),
        re.compile(r"\d+(\.\d+){3}|[0-9a-fA-F:.]*:[0-9a-fA-F:.]*"),
    ),
    (re.compile(r"_SERVICE_PORT(_[A-Z0-9_]+)?|_PORT_\d+_(TCP|UDP|SCTP)_PORT"), re.compile(r"\d+")),
    (re.compile(r"_PORT(_\d+_(TCP|UDP|SCTP))?"), _PLACE),
    (re.compile(r"_PORT_\d+_(TCP|UDP|SCTP)_PROTO"), re.compile(r"tcp|udp|sctp")),
)
_told_links: set[str] = set()  # in this process


class Sources(NamedTuple):
    """What messages call the places settings come from."""

    path: str = "--config"
    flags: str = "flags (--set)"


_COMMAND_LINE = Sources()


def load_settings(
    path: Path | None = None,
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
    defaults: Mapping[str, Any] | None = None,
    sources: Sources = _COMMAND_LINE,
) -> Settings:
    """Settings from a TOML file, overridden by the environment, overridden by flags.

    Nothing is read that was not given: without `environment` no variable counts, without `path` no file. A number of
    bytes may be written as a size, such as "8GiB" or "500MB". `kvbm settings` lists every key with its default.

    Args:
        path: a TOML file with a table for each group.
        environment: variables that begin with KVBM_ count, as KVBM_POOLS__HOST__SLOTS; give `os.environ`. None when
            omitted. What Kubernetes gives pods beside a Service of such a name (KVBM_CATALOG_PORT=tcp://10.0.0.7:7700)
            is no setting, and said once.
        flags: dotted key → value, such as {"pools.host.capacity_bytes": "8GiB"}; or tables in tables, as in TOML.
        defaults: as `flags`, where whoever asks has others than `Settings`.
    Raises: ConfigError: a key that does not exist (with the nearest one), a value of the wrong kind, or an unreadable
        file. ArgumentTypeError: an argument that is neither.
    """
    tree: dict[str, Any] = {}
    for name, given in (("flags", flags), ("defaults", defaults), ("environment", environment)):
        if given is not None and not isinstance(given, Mapping):
            raise ArgumentTypeError(name, f"is {kind_of(given)}; give a dictionary")
    if path is not None and not isinstance(path, str | os.PathLike):
        raise ArgumentTypeError("path", f"is {kind_of(path)}; give the path of a TOML file")
    for key, value in leaves(defaults or {}):
        _put(tree, key, value, "defaults")
    if path is not None:
        for key, value in leaves(_read_toml(path, sources.path)):
            _put(tree, key, value, str(path))
    for name, value in sorted((environment or {}).items()):
        if name.startswith(ENVIRONMENT_PREFIX) and not is_service_link(name, value):
            _put(tree, name.removeprefix(ENVIRONMENT_PREFIX).lower().replace("__", "."), value, f"environment {name}")
    for key, value in leaves(flags or {}):
        _put(tree, key, value, sources.flags)
    settings: Settings = _made(Settings, tree)
    check_settings(settings)
    _tell_links(environment or {})
    return settings


def is_service_link(name: str, value: str) -> bool:
    """Whether Kubernetes has set a variable for a Service, whose name stands before what all such names end with.

    One of ours that is mistyped is none: two underscores stand behind its group, or its value is no address where
    Kubernetes has one.
    """
    group, is_ours, _ = name.removeprefix(ENVIRONMENT_PREFIX).partition("__")
    if is_ours and hasattr(Settings, group.lower()):
        return False
    return any(
        (found := re.search(f"({end.pattern})$", name)) is not None
        and found.start() >= len("KVBM")
        and shape.fullmatch(value) is not None
        for end, shape in _LINKS
    )


def _tell_links(environment: Mapping[str, str]) -> None:
    links = {
        name
        for name, value in environment.items()
        if name.startswith(ENVIRONMENT_PREFIX) and is_service_link(name, value)
    }
    if new := sorted(links - _told_links):
        _told_links.update(new)
        log.info(
            "environment.links_ignored",
            variables=len(new),
            first=new[0],
            notice="Kubernetes sets them for a Service of this name; enableServiceLinks: false in the pod's spec "
            "leaves them out",
        )


def default_lines() -> list[str]:
    """Each setting with its default, as TOML would write it, in the order of the tree."""
    return [f"{key} = {msgspec.json.encode(known.default).decode()}" for key, known in _KNOWN.items()]


def defaults() -> dict[str, Any]:
    """Each setting with its default."""
    return {key: known.default for key, known in _KNOWN.items()}


class _Known(NamedTuple):
    """A setting that exists.

    Attributes:
        kind: type of its value.
    """

    kind: Any
    default: Any


def _read_toml(path: Path, source: str) -> dict[str, Any]:
    try:
        return tomllib.loads(read_small(path).decode("utf-8"))
    except OSError as error:
        raise ConfigError(f"settings file {path} cannot be read ({error.strerror}); correct {source}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"settings file {path} is not TOML (byte {error.start} is no text); give a text file"
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"settings file {path} is not TOML ({error}); correct it") from None


def leaves(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested tables as dotted keys with their values."""
    for key, value in table.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from leaves(value, f"{name}.")
        else:
            yield name, value


def _known(group: type[SettingsGroup] = Settings, prefix: str = "") -> Iterator[tuple[str, _Known]]:
    defaults = group()
    for name, (kind, *_) in bounds_of(group).items():
        if _is_group(kind):
            yield from _known(kind, f"{prefix}{name}.")
        elif not name.startswith("_"):
            yield f"{prefix}{name}", _Known(kind, getattr(defaults, name))


def _is_group(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, SettingsGroup)


def _made(group: Any, tree: Mapping[str, Any]) -> Any:
    """A table of settings, from values that `_put` has converted."""
    values = dict(tree)
    for name in tree.keys() & bounds_of(group).keys():
        kind = bounds_of(group)[name].kind
        entry = get_args(kind)[-1] if get_origin(kind) is dict else None
        if _is_group(kind):
            values[name] = _made(kind, tree[name])
        elif _is_group(entry):
            values[name] = {key: _made(entry, one) for key, one in tree[name].items()}
    return group(**values)


_OPEN_KEYS = ("catalog.tenant_secrets", "log.levels")  # tables whose keys are no settings
_SECRET_KEY = _OPEN_KEYS[0]
_TABLES = {
    "tenants": TenantSettings,
    "bridge.sources": SourceSettings,
}  # tables of tables whose names are the user's own
_KNOWN = dict(_known())
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([KMGT]i?B|B)", re.IGNORECASE)
_UNITS = {"b": 1} | {
    f"{letter}{unit}": base**power
    for power, letter in enumerate("kmgt", start=1)
    for unit, base in (("b", 1000), ("ib", 1024))
}
_TABLE_FIELDS = {table: bounds_of(kind) for table, kind in _TABLES.items()}
_WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    tuple[str, ...]: "a list of texts; outside TOML, with commas between",
}


def _put(tree: dict[str, Any], key: str, value: Any, where: str) -> None:
    """Set one key, its value checked here, where its source is still known."""
    kind: Any = str
    open_key = next((one for one in _OPEN_KEYS if key.startswith(f"{one}.")), "")
    open_name = key.removeprefix(f"{open_key}.") if open_key else ""
    table = next((table for table in _TABLES if key.startswith(f"{table}.")), "")
    entry, _, field = key.removeprefix(f"{table}.").rpartition(".") if table else ("", "", "")
    if open_name:
        groups, name = open_key.split("."), open_name
    elif entry and field in _TABLE_FIELDS[table]:
        groups, name, kind = [*table.split("."), entry], field, _TABLE_FIELDS[table][field].kind
    elif key in _KNOWN and key not in (*_OPEN_KEYS, *_TABLES):
        *groups, name = key.split(".")
        kind = _KNOWN[key].kind
    else:
        raise ConfigError(f"{where}: {_unknown(key)}")
    if kind == tuple[str, ...] and isinstance(value, str):
        value = [part for part in value.split(",") if part]
    if kind is int and "bytes" in name and isinstance(value, str):
        value = _size(value)
    try:
        value = msgspec.convert(value, kind, strict=not isinstance(value, str) and kind is not float)
    except msgspec.ValidationError:
        shown = "its value" if open_key == _SECRET_KEY else repr(value)
        words = f'{_WORDS[kind]}, or a size such as "8GiB"' if kind is int and "bytes" in name else _WORDS[kind]
        raise ConfigError(f"{where}: {key} is {words}; {shown} is none") from None
    for group in groups:
        tree = tree.setdefault(group, {})
    tree[name] = value


def _size(text: str) -> int | str:
    """Bytes of a size such as "8GiB"; the text itself where it is none, or no whole number of bytes."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        return text
    size = Fraction(found[1]) * _UNITS[found[2].lower()]
    return int(size) if size.denominator == 1 else text


def _unknown(key: str) -> str:
    """Why a key is refused, with the nearest one that would do."""
    if key in _OPEN_KEYS:
        return f"{key} is a table; write {key}.{'TENANT' if key == _SECRET_KEY else 'NOUN'}"
    for table, fields in _TABLE_FIELDS.items():
        if key == table or key.startswith(f"{table}."):
            one, word = ("tenant", "TENANT") if table == "tenants" else ("source", "NAME")
            return f"{key!r} is no setting of a {one}; write {table}.{word}. and one of {', '.join(fields)}"
    inside = [known for known in _KNOWN if known.startswith(f"{key}.")]
    if inside:
        return f"{key!r} is a group of settings; write one of them, such as {inside[0]!r}"
    group = key.partition(".")[0]
    near = difflib.get_close_matches(key, _KNOWN, n=1)
    if near:
        return f"there is no setting {key!r}; the nearest is {near[0]!r}"
    inside = [known for known in _KNOWN if known.startswith(f"{group}.")]
    names = inside or dict.fromkeys(known.partition(".")[0] for known in _KNOWN)
    return f"there is no setting {key!r}; there are {', '.join(names)}; kvbm settings lists them with their defaults"
