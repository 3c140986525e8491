"""What settings must agree with, however they were made."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from urllib.parse import urlsplit

import msgspec

from kvbm.config.settings import (
    CatalogSettings,
    GcSettings,
    LimitSettings,
    NvmeSettings,
    ObjectSettings,
    PoolsSettings,
    Settings,
    SourceSettings,
    TenantSettings,
    TransportSettings,
)
from kvbm.core.checks import kind_of
from kvbm.core.errors import ArgumentTypeError, ConfigError
from kvbm.core.names import NAME_RULE, is_name
from kvbm.core.parts import parts_of
from kvbm.core.policy import EVICTION_POLICIES, NO_OFFLOAD, OFFLOAD_POLICIES
from kvbm.core.results import LEAST_EVENT_BYTES
from kvbm.core.state_admission import STATE_POLICIES

_LONGEST_S = 1e6
_STREAM_KEEPS_S = 86_400.0  # as `streams.nats.setup.MAX_AGE_S`
_MOST_BLOCKS = 1 << 12  # of an object
_MOST_WEIGHT = 1_000_000
_EVERYWHERE = ("0.0.0.0", "::")
_MOST_RANKS = 256
_MOST_BLOCK_TOKENS = 1 << 16


def check_settings(settings: Settings) -> None:
    """Refuse values that make no sense, however they were made.

    Raises ConfigError: which, and what to write. ArgumentTypeError: no Settings.
    """
    if not isinstance(settings, Settings):
        raise ArgumentTypeError("settings", f"is {kind_of(settings)}; give what load_settings returns")
    _check_names(settings)
    _check_pools(settings.pools)
    for key, least, value in (
        ("pools.hbm.ring_bytes", 1 << 20, settings.pools.hbm.ring_bytes),
        ("pools.hbm.programs", 0, settings.pools.hbm.programs),
        ("pools.host.numa_node", -1, settings.pools.host.numa_node),
        ("pools.host.copy_threads", 0, settings.pools.host.copy_threads),
        ("pools.nvme.write_budget_bytes_s", 0, settings.pools.nvme.write_budget_bytes_s),
        ("pools.object.write_budget_bytes_s", 0, settings.pools.object.write_budget_bytes_s),
        ("offload.queue_blocks", 0, settings.offload.queue_blocks),
    ):
        if value < least:
            raise ConfigError(f"{key} is {value}; it must be at least {least}")
    parts_of(settings.catalog.parts)
    _one_of("journal.fsync", settings.journal.fsync, ("off", "interval", "always"))
    for tier in ("host", "nvme", "object"):
        _one_of(f"offload.{tier}", getattr(settings.offload, tier), (*OFFLOAD_POLICIES, NO_OFFLOAD))
    _one_of("offload.states", settings.offload.states, tuple(STATE_POLICIES))
    for key, count in (
        ("offload.threads", settings.offload.threads),
        ("offload.staging_bytes", settings.offload.staging_bytes),
        ("onboard.threads", settings.onboard.threads),
        ("pools.nvme.depth", settings.pools.nvme.depth),
        ("journal.segment_bytes", settings.journal.segment_bytes),
        ("nats.window_bytes", settings.nats.window_bytes),
        ("catalog.capacity", settings.catalog.capacity),
    ):
        if count < 1:
            raise ConfigError(f"{key} is {count}; it must be at least 1")
    if settings.journal.waiting_bytes < LEAST_EVENT_BYTES:
        raise ConfigError(
            f"journal.waiting_bytes is {settings.journal.waiting_bytes}; it must be at least {LEAST_EVENT_BYTES}"
        )
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
    if not 0 <= settings.samples.rate <= 1:
        raise ConfigError(f"samples.rate is {settings.samples.rate:g}; give a share from 0 to 1")
    for key, wait_s in (
        ("journal.sync_interval_s", settings.journal.sync_interval_s),
        ("journal.keep_s", settings.journal.keep_s),
        ("nats.linger_s", settings.nats.linger_s),
        ("snapshots.least_s", settings.snapshots.least_s),
        ("catalog.checkpoint_every_s", settings.catalog.checkpoint_every_s),
        ("onboard.wait_s", settings.onboard.wait_s),
        ("pools.host.pin_s", settings.pools.host.pin_s),
        ("onboard.locate_s", settings.onboard.locate_s),
        ("nats.timeout_s", settings.nats.timeout_s),
        ("nats.heartbeat_s", settings.nats.heartbeat_s),
        ("pools.object.timeout_s", settings.pools.object.timeout_s),
        ("pools.object.look_s", settings.pools.object.look_s),
        ("catalog.liveness_s", settings.catalog.liveness_s),
        ("erasure.poll_s", settings.erasure.poll_s),
    ):
        if not 0 < wait_s <= _LONGEST_S:
            raise ConfigError(f"{key} is {wait_s:g}; it must be above 0 and at most {_LONGEST_S:g}")
    if settings.nats.replicas not in (1, 3, 5):
        raise ConfigError(
            f"nats.replicas is {settings.nats.replicas}; give 1, or in a NATS cluster 3 or 5: of an even number half "
            "may not fail"
        )
    _check_hold(settings.erasure.hold_s)
    _check_transport(settings.transport)
    _check_tenants(settings.tenants)
    _check_sources(settings.bridge.sources)
    _check_catalog(settings.catalog)
    _check_used(settings.gc.used_s)


def _check_used(used_s: float) -> None:
    if not 0 <= used_s <= _LONGEST_S:
        raise ConfigError(f"gc.used_s is {used_s:g}; it must be at least 0 and at most {_LONGEST_S:g}")


def _check_transport(transport: TransportSettings) -> None:
    listen, advertise = transport.listen, transport.advertise
    tls = {f"transport.tls_{one}": getattr(transport, f"tls_{one}") for one in ("cert", "key", "ca")}
    if any(tls.values()) and not all(tls.values()):
        given, absent = (" and ".join(name for name, path in tls.items() if bool(path) is one) for one in (True, False))
        raise ConfigError(f"{given} is set without {absent}; TLS between instances takes all three")
    if transport.rdma and transport.tls_cert:
        raise ConfigError(
            f"transport.rdma is {transport.rdma!r} and transport.tls_cert is set; bytes over RDMA are not encrypted: "
            "leave one of them out"
        )
    if transport.rdma and not transport.key_file:
        raise ConfigError(
            f"transport.rdma is {transport.rdma!r} and transport.key_file is not set; name the file with the key that "
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
    for name, most in (("connections", 4096), ("lent_blocks", 1 << 24)):
        if not 1 <= getattr(transport, name) <= most:
            raise ConfigError(f"transport.{name} is {getattr(transport, name)}; give 1 to {most}")


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


def _check_catalog(catalog: CatalogSettings) -> None:
    if not _STREAM_KEEPS_S < catalog.forget_s < math.inf:
        raise ConfigError(
            f"catalog.forget_s is {catalog.forget_s:g}; give a number above {_STREAM_KEEPS_S:g}: so long the stream "
            "keeps "
            "events, from which a forgotten instance would be read again"
        )
    _check_limits(catalog.limits)
    routing = catalog.routing
    weights = {f"tier_weights.{tier}": weight for tier, weight in msgspec.structs.asdict(routing.tier_weights).items()}
    for name, value in {**msgspec.structs.asdict(routing), **weights}.items():
        if isinstance(value, float) and not (value > 0 and math.isfinite(value)):
            raise ConfigError(f"catalog.routing.{name} is {value:g}; it must be above 0")


def _check_limits(limits: LimitSettings) -> None:
    for name, least in (
        ("sockets", 16),
        ("sockets_per_peer", 1),
        ("connects_per_s", 1),
        ("burst", 1),
        ("body_bytes", 12 << 20),
        ("waits", 4),
        ("header_s", 0.1),
        ("idle_s", 1),
        ("write_s", 0.1),
        ("unsent_bytes", 1 << 20),
        ("requests_per_s", 0),
        ("watches", 1),
        ("watches_per_caller", 1),
        ("watch_bytes", 1 << 16),
        ("loop_share", 0.01),
    ):
        value = getattr(limits, name)
        if not least <= value < math.inf:
            raise ConfigError(f"catalog.limits.{name} is {value:g}; it must be at least {least:g}")
    if limits.loop_share > 1:
        raise ConfigError(
            f"catalog.limits.loop_share is {limits.loop_share:g}; it must be at most 1, which is all of it"
        )


def _check_hold(hold_s: float) -> None:
    if not (hold_s == -1 or 0 <= hold_s <= _LONGEST_S):
        raise ConfigError(
            f"erasure.hold_s is {hold_s:g}; give 0 to {_LONGEST_S:g} seconds, or -1 until the record of erasures was "
            "read"
        )


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
    _one_of("pools.eviction", pools.eviction, tuple(EVICTION_POLICIES))
    _one_of("pools.hbm.owner", pools.hbm.owner, ("kvbm", "engine"))
    _one_of("pools.hbm.device", pools.hbm.device, ("auto", "cpu", "cuda", "memory"))
    _one_of("pools.host.huge_pages", pools.host.huge_pages, ("auto", "on", "off"))
    _one_of("pools.nvme.io", pools.nvme.io, ("auto", "io_uring", "threads"))
    _one_of("pools.nvme.direct", pools.nvme.direct, ("auto", "on", "off"))
    if not 0 < pools.nvme.offload_share <= 1:
        raise ConfigError(f"pools.nvme.offload_share is {pools.nvme.offload_share:g}; give a share above 0, at most 1")
    for tier in ("hbm", "host", "nvme"):
        pool = getattr(pools, tier)
        for name in ("slots", "capacity_bytes"):
            if getattr(pool, name) < 0:
                raise ConfigError(f"pools.{tier}.{name} is {getattr(pool, name)}; it cannot be negative")
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
        _one_of(f"{key}.kind", source.kind, ("vllm", "sglang"))
        if not 1 <= source.ranks <= _MOST_RANKS:
            raise ConfigError(f"{key}.ranks is {source.ranks}; give 1 to {_MOST_RANKS}")
        for whole in [f"{name}-dp{rank}" for rank in range(source.ranks)] if source.ranks > 1 else [name]:
            if not is_name(whole) or whole in names:
                why = "two sources have it" if whole in names else NAME_RULE
                raise ConfigError(f"{key}: the instance's name is {whole!r}; {why}")
            names.add(whole)
        for field in ("model", "endpoint"):
            if not getattr(source, field):
                raise ConfigError(f"{key}.{field} is empty; give it")
        for field in ("endpoint", "replay"):
            if (place := getattr(source, field)) and not place.startswith(("tcp://", "ipc://")):
                raise ConfigError(f"{key}.{field} is {place!r}; write tcp://host:port")
        other = places.setdefault(f"{source.endpoint} {source.topic}", name)
        if other != name:
            raise ConfigError(
                f"{key}.endpoint is that of bridge.sources.{other}, and so is its topic; an engine is one source"
            )
        if not 0 <= source.block_tokens <= _MOST_BLOCK_TOKENS:
            raise ConfigError(
                f"{key}.block_tokens is {source.block_tokens}; give 1 to {_MOST_BLOCK_TOKENS}, or 0 where events say it"
            )
        if source.blocks < 1 or not 0 < source.silence_s <= _LONGEST_S:
            raise ConfigError(f"{key}: blocks is {source.blocks}, silence_s {source.silence_s:g}; both must be above 0")


def _check_tenants(tenants: Mapping[str, TenantSettings]) -> None:
    for tenant, share in tenants.items():
        for name, amount in msgspec.structs.asdict(share).items():
            if amount < (least := 1 if name == "weight" else 0):
                raise ConfigError(f"tenants.{tenant}.{name} is {amount}; it must be at least {least}")
        if share.weight > _MOST_WEIGHT:
            raise ConfigError(f"tenants.{tenant}.weight is {share.weight}; it must be at most {_MOST_WEIGHT}")


def _check_objects(objects: ObjectSettings, nvme: NvmeSettings) -> None:
    _one_of("pools.object.compression", objects.compression, ("auto", "off"))
    if not 0 <= objects.blocks <= _MOST_BLOCKS:
        raise ConfigError(
            f"pools.object.blocks is {objects.blocks}; give 1 to {_MOST_BLOCKS}, or 0 for as many as fit 4 MiB"
        )
    if objects.requests < 1 or objects.ttl_s < 0:
        name, value, least = ("requests", objects.requests, 1) if objects.requests < 1 else ("ttl_s", objects.ttl_s, 0)
        raise ConfigError(f"pools.object.{name} is {value}; it must be at least {least}")
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
    for name in ("ttl_s", "quota_bytes", "young_s", "skew_s", "every_s"):
        if not 0 <= getattr(gc, name) < math.inf:
            raise ConfigError(f"gc.{name} is {getattr(gc, name):g}; it must be at least 0")
    if gc.id and not is_name(gc.id):
        raise ConfigError(f"gc.id is {gc.id!r}; {NAME_RULE}")
    if not 1 <= gc.lease_s <= _LONGEST_S:
        raise ConfigError(f"gc.lease_s is {gc.lease_s:g}; it must be at least 1 and at most {_LONGEST_S:g}")
    if not max(2 * pool.timeout_s, 3 * pool.look_s) <= gc.grace_s <= _LONGEST_S:
        raise ConfigError(
            f"gc.grace_s is {gc.grace_s:g}; it must be at least twice pools.object.timeout_s ({pool.timeout_s:g}) and "
            "three times "
            f"pools.object.look_s ({pool.look_s:g}): instances hear of a deletion within look_s, and reads that began "
            "before must end"
        )


def _one_of(key: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{key} is {value!r}; use one of {', '.join(allowed)}")
