"""Settings of an instance inside SGLang: `--hicache-storage-backend-extra-config`, the environment, a file, and what
suits a storage below SGLang's own host pool.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from kvbm.config import HbmSettings, Settings, Sources, check_settings, load_settings
from kvbm.core.errors import ConfigError
from kvbm.engines.extra_config import dotted_keys, paths_of_rank

EXTRA = "--hicache-storage-backend-extra-config"
FILE_KEY = "config"  # of the extra config: a TOML file with what it does not say itself
MODEL_KEY, REVISION_KEY = "model", "revision"  # which weights, where SGLang's own words do not say it
UNTESTED_KEY = "untested_sglang"  # a version of SGLang to go on with, though nobody has tested it
_V1_KEY = "interface_v1"
_OF_SGLANG = frozenset(
    {
        "backend_name",
        "module_path",
        "class_name",
        _V1_KEY,
        "allocator",
        "tp_lcm_size",
        "prefetch_threshold",
        "prefetch_timeout_base",
        "prefetch_timeout_per_ki_token",
        "hicache_storage_pass_prefix_keys",
    }
)
_SOURCES = Sources(path=f'"{FILE_KEY}" of {EXTRA}', flags=EXTRA)
_HBM_SLOTS = 4096  # of pages that are on their way from SGLang's memory to ours: only the ledger knows of them
_HOST_BYTES = 1 << 30  # where nobody says how much
_NAME_CHARACTERS = 128


class ExtraConfig(NamedTuple):
    """What the extra config says.

    Attributes:
        settings: of the manager.
        model, revision: which weights; "" where that is left to SGLang's words.
        untested: the version of SGLang to go on with.
    """

    settings: Settings
    model: str
    revision: str
    untested: str


def read_extra(
    extra: Mapping[str, Any], *, environment: Mapping[str, str], rank: str = "", host: str | None = None
) -> ExtraConfig:
    """The settings of one rank of an engine: its own defaults, then the file "config" names, then KVBM_ variables, then
    the extra config.

    Defaults that differ from `Settings`: there is no stream unless `nats.url` or `nats.enabled` is given, HOST has 1
    GiB, the instance is named after the host, and objects have one block. Each rank is an instance of its own, with its
    place behind whatever name was given, and behind the names of files for NVME.

    Args:
        extra: SGLang's own keys, and those of kvbm's settings, dotted or as nested tables.
        environment: variables that begin with KVBM_ count.
        rank: the place of this rank in its engine, such as "-tp1"; "" where there is one rank.
        host: name of this machine, found out when None.
    Raises: ConfigError: a key that does not exist (with the nearest one), a value of the wrong kind, what a storage
        cannot do, or an interface of SGLang's that is not served.
    """
    if not extra.get(_V1_KEY):
        raise ConfigError(
            f'{EXTRA}: set "{_V1_KEY}": 1; without it SGLang copies each page once more, which is not served'
        )
    given = {key: value for key, value in dotted_keys(extra, EXTRA) if key not in _OF_SGLANG}
    path, model, revision, untested = (_text(given, key) for key in (FILE_KEY, MODEL_KEY, REVISION_KEY, UNTESTED_KEY))
    file = Path(path) if path else None
    own: dict[str, Any] = {
        "instance.id": f"sglang-{_name(socket.gethostname() if host is None else host)}",
    }
    quiet = load_settings(file, environment, given, own | {"nats.enabled": False}, _SOURCES)
    if not (quiet.pools.host.slots or quiet.pools.host.capacity_bytes):
        own["pools.host.capacity_bytes"] = _HOST_BYTES
    own["pools.hbm.owner"] = "engine"
    loud = load_settings(file, environment, given, own | {"nats.enabled": True}, _SOURCES)
    _check(loud)
    with_stream = quiet.nats.enabled or (loud.nats.enabled and loud.nats.url)  # on by default where it has an address
    pools = loud.pools
    settings = msgspec.structs.replace(
        loud,
        instance=msgspec.structs.replace(loud.instance, id=loud.instance.id + rank),
        pools=msgspec.structs.replace(
            pools,
            hbm=msgspec.structs.replace(pools.hbm, slots=_HBM_SLOTS),
            nvme=msgspec.structs.replace(pools.nvme, path=paths_of_rank(pools.nvme.path, rank)),
            object=msgspec.structs.replace(pools.object, blocks=1 if pools.object.url else pools.object.blocks),
        ),
        nats=msgspec.structs.replace(loud.nats, enabled=bool(with_stream)),
    )
    check_settings(settings)
    return ExtraConfig(settings, model, revision, untested)


def _check(settings: Settings) -> None:
    default, given = HbmSettings(owner="engine"), settings.pools.hbm
    if given != default:
        raise ConfigError(f"{EXTRA}: leave pools.hbm out; SGLang owns HBM, and nothing of ours is there")
    if settings.offload.host != "write_through":
        raise ConfigError(
            f"{EXTRA}: offload.host is {settings.offload.host!r}, but SGLang chooses what it stores; leave it"
            ' "write_through"'
        )


def _text(given: dict[str, Any], key: str) -> str:
    """Take a text out of what was given. Raises ConfigError: it is none."""
    value = given.pop(key, "")
    if not isinstance(value, str):
        raise ConfigError(f"{EXTRA}: {key} is a text; {value!r} is none")
    return value


def _name(host: str) -> str:
    """A host's name as an instance may be called."""
    return re.sub(r"[^A-Za-z0-9_-]", "-", host)[: _NAME_CHARACTERS - len("sglang--tp999-pp999-cp999-dp9999")] or "host"
