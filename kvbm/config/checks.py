"""Whether settings agree with each other, however they were made. What a single value may be stands at its field."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from urllib.parse import urlsplit

from kvbm.config.bounds import check_bounds
from kvbm.config.log_nouns import LOG_NOUNS
from kvbm.config.settings import (
    GcSettings,
    NvmeSettings,
    ObjectSettings,
    PoolsSettings,
    Settings,
    SourceSettings,
    TransportSettings,
)
from kvbm.core.checks import kind_of
from kvbm.core.errors import ArgumentTypeError, ConfigError
from kvbm.core.names import NAME_RULE, is_name
from kvbm.core.parts import parts_of

_LEVELS = ("debug", "info", "warning", "error")
_EVERYWHERE = ("0.0.0.0", "::")


def check_settings(settings: Settings) -> None:
    """Refuse values that make no sense, however they were made.

    Raises ConfigError: which, and what to write. ArgumentTypeError: no Settings.
    """
    if not isinstance(settings, Settings):
        raise ArgumentTypeError("settings", f"is {kind_of(settings)}; give what load_settings returns")
    check_bounds(settings)
    _check_names(settings)
    _check_pools(settings.pools)
    parts_of(settings.catalog.parts)
    if settings.journal.capacity_bytes < 4 * settings.journal.segment_bytes:
        raise ConfigError(
            f"journal.capacity_bytes is {settings.journal.capacity_bytes}; it must be at least 4 times "
            "journal.segment_bytes "
            f"({settings.journal.segment_bytes}), because whole segments are let go"
        )
    if settings.journal.max_bytes and settings.journal.max_bytes < settings.journal.capacity_bytes:
        raise ConfigError(
            f"journal.max_bytes is {settings.journal.max_bytes}; it must be at least journal.capacity_bytes "
            f"({settings.journal.capacity_bytes}), which is part of it, or 0 for no more than that"
        )
    endpoint = settings.traces.endpoint
    if "@" in endpoint:
        raise ConfigError(
            "traces.endpoint has a user or a password; leave them out, and give the receiver's header in "
            "OTEL_EXPORTER_OTLP_HEADERS"
        )
    if endpoint and not _is_http(endpoint):
        raise ConfigError(f"traces.endpoint is {endpoint!r}; write http://host:port or https://host:port")
    _check_transport(settings.transport)
    _check_sources(settings.bridge.sources)
    _check_levels(settings.log.levels)


def _check_levels(levels: Mapping[str, str]) -> None:
    for noun, level in levels.items():
        if noun not in LOG_NOUNS:
            near = difflib.get_close_matches(noun, LOG_NOUNS, n=1)
            remedy = f"the nearest is {near[0]!r}" if near else "the reference of logs has all names"
            raise ConfigError(f"log.levels.{noun}: no log line's name begins with {noun!r}; {remedy}")
        if level not in _LEVELS:
            raise ConfigError(f"log.levels.{noun} is {level!r}; use one of {', '.join(_LEVELS)}")


def _check_transport(transport: TransportSettings) -> None:
    listen, advertise = transport.listen, transport.advertise
    tls = {f"transport.tls_{one}": getattr(transport, f"tls_{one}") for one in ("cert", "key", "ca")}
    if any(tls.values()) and not all(tls.values()):
        given, absent = (" and ".join(name for name, path in tls.items() if bool(path) is one) for one in (True, False))
        raise ConfigError(f"{given} is set without {absent}; TLS between instances takes all three")
    for name, word in (("rdma", "RDMA"), ("nixl", "NIXL")):
        wanted = getattr(transport, name)
        if wanted and transport.tls_cert:
            raise ConfigError(
                f"transport.{name} is {wanted!r} and transport.tls_cert is set; bytes over {word} are not encrypted: "
                "leave one of them out"
            )
        if wanted and not transport.key_file:
            raise ConfigError(
                f"transport.{name} is {wanted!r} and transport.key_file is not set; name the file with the key that "
                "all instances have"
            )
    if listen not in ("", "host"):
        address = host_and_port(listen.removeprefix("tcp://"), least_port=0) if listen.startswith("tcp://") else None
        if address is None:
            raise ConfigError(f'transport.listen is {listen!r}; write "host", or tcp://address:port')
        if advertise and address[1] == 0:
            raise ConfigError(
                f"transport.listen is {listen}, a free port, and transport.advertise names one; give transport.listen "
                "that port"
            )
        if address[0] in _EVERYWHERE and not advertise:
            raise ConfigError(
                f"transport.listen is {listen}, which others cannot connect to; set transport.advertise to the "
                "host:port they reach it at"
            )
        if not transport.key_file and not transport.tls_cert:
            raise ConfigError(
                "transport.listen takes TCP connections and transport.key_file is not set; name a file with at least "
                "32 random bytes, the"
                " same for all instances, or give transport.tls_cert, tls_key and tls_ca"
            )
    if advertise and (not listen.startswith("tcp://") or host_and_port(advertise) is None):
        raise ConfigError(
            f"transport.advertise is {advertise!r}; write the host:port that others reach transport.listen = tcp://… "
            "at, or leave it out"
        )


def host_and_port(text: str, least_port: int = 1) -> tuple[str, int] | None:
    """A host, without brackets, and a port; None: it is neither."""
    try:
        parts = urlsplit(f"//{text}")
        port = parts.port
    except ValueError:
        return None
    if (
        not parts.hostname
        or port is None
        or port < least_port
        or parts.path
        or parts.query
        or parts.fragment
        or "@" in text
    ):
        return None
    return parts.hostname, port


def _check_names(settings: Settings) -> None:
    for key, name in (("instance.id", settings.instance.id), ("instance.cluster", settings.instance.cluster)):
        if not is_name(name):
            raise ConfigError(f"{key} is {name!r}; {NAME_RULE}")
    if not settings.instance.data_dir:
        raise ConfigError("instance.data_dir is empty; give a folder")
    if settings.catalog.url and not all(_is_catalog(one.strip()) for one in re.split("[,;]", settings.catalog.url)):
        raise ConfigError(
            "catalog.url is none; write http://host:port, https://host:port, unix:/path or "
            "nats://host:port/CLUSTER/CALLER, with commas "
            "between several, and semicolons between those of different parts"
        )
    if settings.pools.object.endpoint and not _is_http(settings.pools.object.endpoint):
        raise ConfigError(
            f"pools.object.endpoint is {settings.pools.object.endpoint!r}; write http://host:port or https://host:port"
        )


def _is_catalog(url: str) -> bool:
    """Whether it is one place to ask a catalog at."""
    return (url.startswith("unix:") and len(url) > len("unix:")) or _is_http(url, ("http", "https", "nats", "tls"))


def _is_http(url: str, schemes: tuple[str, ...] = ("http", "https")) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in schemes and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def _check_pools(pools: PoolsSettings) -> None:
    for tier in ("hbm", "host", "nvme"):
        pool = getattr(pools, tier)
        if pool.slots and pool.capacity_bytes:
            raise ConfigError(f"pools.{tier} sets both slots and capacity_bytes; give one of them")
    if pools.hbm.owner == "engine" and not (pools.host.slots or pools.host.capacity_bytes):
        raise ConfigError(
            'pools.hbm.owner is "engine" and pools.host has neither slots nor capacity_bytes; HOST is where the '
            "engine's blocks come"
            " and go, so give it one of them"
        )
    if pools.nvme.folder and pools.nvme.path:
        raise ConfigError(
            "pools.nvme sets both path and folder; in a pod's folder the file's name is the instance's: leave path out"
        )
    _check_objects(pools.object, pools.nvme)


def _check_sources(sources: Mapping[str, SourceSettings]) -> None:
    names: set[str] = set()
    places: dict[str, str] = {}
    for name, source in sources.items():
        key = f"bridge.sources.{name}"
        for whole in [f"{name}-dp{rank}" for rank in range(source.ranks)] if source.ranks > 1 else [name]:
            if not is_name(whole) or whole in names:
                why = "two sources have it" if whole in names else NAME_RULE
                raise ConfigError(f"{key}: the instance's name is {whole!r}; {why}")
            names.add(whole)
        is_sought = source.kind == "sglang" and source.endpoint.startswith(_HTTP)
        for field in ("endpoint",) if is_sought else ("model", "endpoint"):
            if not getattr(source, field):
                raise ConfigError(f"{key}.{field} is empty; give it")
        _check_source(key, source)
        _check_rank_ports(key, source)
        other = places.setdefault(f"{source.endpoint} {source.topic} {source.worker}", name)
        if other != name:
            raise ConfigError(
                f"{key}.endpoint is that of bridge.sources.{other}, and so is its topic; an engine is one source"
            )


_HTTP = ("http://", "https://")
_PLACES: Mapping[str, tuple[tuple[str, ...], str]] = {
    "trtllm": (_HTTP, "http://host:port"),
    "dynamo": (("nats://", "tls://"), "nats://host:port"),
}
_ZMQ_PLACES = ("tcp://", "ipc://"), "tcp://host:port"


def _check_source(key: str, source: SourceSettings) -> None:
    """Refuse what does not go with a source's kind."""
    begins, example = _PLACES.get(source.kind, _ZMQ_PLACES)
    for field in ("endpoint", "replay"):
        is_server = field == "endpoint" and source.kind == "sglang" and source.endpoint.startswith(_HTTP)
        if (place := getattr(source, field)) and not (is_server or place.startswith(begins)):
            raise ConfigError(f"{key}.{field} is {place!r}; write {example}")
    if source.kind in _PLACES:
        if source.replay:
            raise ConfigError(f"{key}.replay is set, but a {source.kind} engine sends nothing again; leave it out")
        if not source.block_tokens:
            raise ConfigError(f"{key}.block_tokens is 0, but events of {source.kind} do not say it; give it")
    if source.kind == "dynamo" and not source.topic:
        subject = "namespace.NAME.component.NAME.endpoint.NAME.kv-events"
        raise ConfigError(f"{key}.topic is empty; give the subject, such as {subject}")
    if source.kind != "dynamo" and (source.worker or source.health):
        raise ConfigError(f"{key}: worker and health are for engines of kind dynamo; leave them out")


def _check_rank_ports(key: str, source: SourceSettings) -> None:
    """Refuse a rank's messages at the port of another's replays: each rank has the ports behind its neighbour's."""
    (host, _, port), (replay_host, _, replay_port) = source.endpoint.rpartition(":"), source.replay.rpartition(":")
    if source.ranks == 1 or host != replay_host or not (port.isdecimal() and replay_port.isdecimal()):
        return
    apart = abs(int(replay_port) - int(port))
    if apart < source.ranks:
        raise ConfigError(
            f"{key}.endpoint and replay are {apart} ports apart, and {source.ranks} ranks count up from each; "
            f"have the engine use ports at least {source.ranks} apart"
        )


def _check_objects(objects: ObjectSettings, nvme: NvmeSettings) -> None:
    if objects.keys and objects.keys_command:
        raise ConfigError("pools.object.keys and pools.object.keys_command are both set; keep one of them")
    if nvme.encrypt and not (objects.keys or objects.keys_command):
        raise ConfigError(
            "pools.nvme.encrypt is set without pools.object.keys or keys_command, whose keys it takes; make some with: "
            "kvbm keys FILE"
            " --tenant NAME"
        )
    if objects.front and not objects.url:
        raise ConfigError("pools.object.front is set without pools.object.url, the store it stands before; give both")
    if objects.front and not objects.front.startswith(("redis://", "rediss://")):
        raise ConfigError("pools.object.front is no Redis; write redis://host:port/database")


def check_gc(gc: GcSettings, pool: ObjectSettings) -> None:
    """Refuse what a janitor cannot go by. Raises ConfigError: which setting, and what to write."""
    if gc.id and not is_name(gc.id):
        raise ConfigError(f"gc.id is {gc.id!r}; {NAME_RULE}")
    if not max(2 * pool.timeout_s, 3 * pool.look_s) <= gc.grace_s:
        raise ConfigError(
            f"gc.grace_s is {gc.grace_s:g}; it must be at least twice pools.object.timeout_s ({pool.timeout_s:g}) and "
            "three times "
            f"pools.object.look_s ({pool.look_s:g}): instances hear of a deletion within look_s, and reads that began "
            "before must end"
        )
