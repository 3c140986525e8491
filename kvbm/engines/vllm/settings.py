"""Settings of an instance inside vLLM: `kv_connector_extra_config`, the environment, a file, and what suits this
engine.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from kvbm.config import HbmSettings, Settings, Sources, check_settings, load_settings
from kvbm.core.errors import ConfigError
from kvbm.engines.extra_config import dotted_keys, paths_of_rank
from kvbm.engines.vllm.tested import UNTESTED_KEY

EXTRA = "kv_connector_extra_config"
FILE_KEY = "config"  # of the extra config: a TOML file with what it does not say itself
_SOURCES = Sources(path=f'"{FILE_KEY}" of {EXTRA}', flags=EXTRA)
RANK_PLACE = "{dp}"  # in a text of the extra config: the data-parallel rank
_NAME_CHARACTERS = 128
_OF_COPIES = {"ring_bytes", "programs"}  # what pools.hbm says that is ours, not vLLM's


def settings_of(
    extra: Mapping[str, Any],
    *,
    environment: Mapping[str, str],
    hbm_slots: int,
    data_parallel_size: int = 1,
    data_parallel_rank: int = 0,
    host: str | None = None,
) -> Settings:
    """The settings of one engine: its own defaults, then the file "config" names, then KVBM_ variables, then the extra
    config.

    Defaults that differ from `Settings`: the engine owns HBM and says its size, there is no stream unless `nats.url` or
    `nats.enabled` is given, and the instance is named after the host. Each data-parallel rank is an instance of its
    own, with "-dp<rank>" behind whatever name was given, and behind the names of files for NVME. "{dp}" in any text of
    the extra config is the rank; a name that has it gets nothing more.

    Args:
        extra: keys of kvbm's settings, dotted or as nested tables.
        environment: variables that begin with KVBM_ count.
        hbm_slots: blocks of the engine's own KV cache.
        data_parallel_size, data_parallel_rank: of the engine. vLLM makes 1 of the size when ranks are independent, so a
            rank above 0 counts too.
        host: name of this machine, found out when None.
    Raises: ConfigError: a key that does not exist (with the nearest one), a value of the wrong kind, what only the
        engine can set, or no room for blocks in HOST.
    """
    as_given = dict(dotted_keys(extra, EXTRA))
    as_given.pop(UNTESTED_KEY, None)
    given = {key: _numbered(value, data_parallel_rank) for key, value in as_given.items()}
    path = given.pop(FILE_KEY, None)
    if path is not None and not isinstance(path, str):
        raise ConfigError(f"{EXTRA}: {FILE_KEY} is the path of a TOML file; {path!r} is none")
    file = Path(path) if path else None
    own: dict[str, Any] = {"instance.id": f"vllm-{_name(socket.gethostname() if host is None else host)}"}
    quiet = load_settings(file, environment, given, own | {"nats.enabled": False}, _SOURCES)
    if not (quiet.pools.host.slots or quiet.pools.host.capacity_bytes):
        raise ConfigError(
            "pools.host has no room, and every block that leaves the engine passes through it; set "
            '"pools.host.capacity_bytes"'
            f" in {EXTRA}, such as 8589934592 for 8 GiB"
        )
    own |= {"pools.hbm.owner": "engine"}
    loud = load_settings(file, environment, given, own | {"nats.enabled": True}, _SOURCES)
    _check_hbm(loud.pools.hbm)
    with_stream = quiet.nats.enabled or (loud.nats.enabled and loud.nats.url)  # on by default where it has an address
    rank = f"-dp{data_parallel_rank}" if data_parallel_size > 1 or data_parallel_rank > 0 else ""
    marks = {key for key, value in given.items() if value != as_given[key]}
    instance = loud.instance.id + ("" if "instance.id" in marks else rank)
    path = loud.pools.nvme.path
    if "pools.nvme.path" not in marks:
        path = paths_of_rank(path, rank)
    settings = msgspec.structs.replace(
        loud,
        instance=msgspec.structs.replace(loud.instance, id=instance),
        pools=msgspec.structs.replace(
            loud.pools,
            hbm=msgspec.structs.replace(loud.pools.hbm, slots=hbm_slots),
            nvme=msgspec.structs.replace(loud.pools.nvme, path=path),
        ),
        nats=msgspec.structs.replace(loud.nats, enabled=bool(with_stream)),
    )
    check_settings(settings)
    return settings


def _numbered(value: Any, rank: int) -> Any:
    return value.replace(RANK_PLACE, str(rank)) if isinstance(value, str) else value


def _check_hbm(given: HbmSettings) -> None:
    default = HbmSettings(owner="engine")
    for name in set(HbmSettings.__struct_fields__) - _OF_COPIES:
        if getattr(given, name) != getattr(default, name):
            raise ConfigError(
                f"pools.hbm.{name} is {getattr(given, name)!r}, but vLLM owns HBM and says what it has; leave "
                "pools.hbm out,"
                " and size it with vLLM's --gpu-memory-utilization or --num-gpu-blocks-override"
            )


def _name(host: str) -> str:
    """A host's name as an instance may be called."""
    return re.sub(r"[^A-Za-z0-9_-]", "-", host)[: _NAME_CHARACTERS - len("vllm-") - len("-dp9999")] or "host"
