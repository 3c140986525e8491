"""Settings: one frozen tree, parsed and checked once at the edge: TOML file, then environment, then flags.

A key is written `pools.host.slots` in messages and flags, as tables in TOML, and `KVBM_POOLS__HOST__SLOTS` in the environment.
"""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from collections.abc import Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints
from urllib.parse import urlsplit

import msgspec

from kvbm.core.errors import ConfigError
from kvbm.core.ledger import LEAST_EVENT_BYTES
from kvbm.core.policy import EVICTION_POLICIES, OFFLOAD_POLICIES

ENVIRONMENT_PREFIX = "KVBM_"


class _Group(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of settings."""


class InstanceSettings(_Group, frozen=True):
    """Who this is.

    Attributes:
        id: name of the instance, unique in its cluster; 1 to 128 letters, digits, "-" and "_".
        cluster: name of the cluster.
        data_dir: folder for journal, NVMe pool and embedded servers.
        topology: where the instance stands, outermost first.
    """

    id: str = "instance-0"
    cluster: str = "local"
    data_dir: str = "kvbm-data"
    topology: tuple[str, ...] = ()


class HbmSettings(_Group, frozen=True):
    """The HBM pool. Give `slots` or `capacity_bytes`, not both.

    Attributes:
        slots: blocks that fit.
        capacity_bytes: room for blocks; the slots follow from a block's size.
        owner: "kvbm", or "engine" for one that keeps its KV itself and only says what it holds: nothing is allocated then, a HOST pool
            is needed, and `device` says nothing.
        device: "auto", "cpu", "cuda", or "memory" for a pool without torch.
    """

    slots: int = 0
    capacity_bytes: int = 0
    owner: str = "kvbm"
    device: str = "auto"


class HostSettings(_Group, frozen=True):
    """The HOST pool, in host memory. Give `slots` or `capacity_bytes`, not both; both 0: there is none.

    Attributes:
        slots: blocks that fit.
        capacity_bytes: host memory for blocks, taken at the start.
        huge_pages: "auto": where they can be had, "on": or refuse to start, "off".
        numa_node: node its memory is bound to; -1: the one the manager starts on when the machine has several.
        copy_threads: threads that copy blocks; 0: as many as help on this machine.
    """

    slots: int = 0
    capacity_bytes: int = 0
    huge_pages: str = "auto"
    numa_node: int = -1
    copy_threads: int = 0


class NvmeSettings(_Group, frozen=True):
    """The NVME pool. Give `slots` or `capacity_bytes`, not both; both 0: there is none.

    Attributes:
        slots: blocks that fit.
        capacity_bytes: room for blocks, taken at the start; a page of header for each block comes on top.
        path: its file or block device, by default a file in the data folder; over several, with ":" between, slots are striped.
        folder: of a pod, instead of `path`: each instance has a file of its own there and reads all others', also of instances
            that are gone. With neither slots nor capacity_bytes it only reads.
        io: "io_uring", "threads", or "auto": io_uring where the kernel lets us.
        direct: past the page cache (O_DIRECT): "on", "off", or "auto": where the file system can.
        depth: block transfers in flight for each path.
        offload_share: of `depth`, what offloads may use while requests read, and never more than 2 MiB (or one block).
        write_budget_bytes_s: bytes a second that may be written in the long run, for the device's endurance; a day's worth may
            be saved up. 0: no limit.
    """

    slots: int = 0
    capacity_bytes: int = 0
    path: str = ""
    folder: str = ""
    io: str = "auto"
    direct: str = "auto"
    depth: int = 32
    offload_share: float = 0.25
    write_budget_bytes_s: int = 0


class ObjectSettings(_Group, frozen=True):
    """The object pool, which all instances share.

    Attributes:
        url: s3://bucket/prefix, az://account/container/prefix or redis://host:port/database?prefix=…; "" for none.
        endpoint, region: of s3 and az, where they are not their makers' own.
        name: of the pool, where instances reach one store by different addresses.
        blocks: of an object; 0: as many as make 4 MiB or 128 tokens, whichever is less. The same for all instances.
        compression: "auto": by the type of the elements, where it gains something; "off".
        keys: file with tenants' keys, which encrypt their objects (`kvbm keys` makes one). "" for none.
        keys_command: prints such a file, instead of it.
        front: redis://…, a faster store before the one of `url`; it may forget, and is filled again. "" for none.
        ttl_s: after which a Redis, as pool or in front, forgets an object; 0: when it has no room.
        requests: to the store in flight.
        timeout_s: deadline of one call; what is not there then is computed.
        look_s: how often to look for what the janitor is about to delete; at most a third of its grace.
        write_budget_bytes_s: bytes a second that may be put in the long run, as `pools.nvme.write_budget_bytes_s`. 0: no limit.
    """

    url: str = ""
    endpoint: str = ""
    region: str = ""
    name: str = ""
    blocks: int = 0
    compression: str = "auto"
    keys: str = ""
    keys_command: str = ""
    front: str = ""
    ttl_s: int = 0
    requests: int = 8
    timeout_s: float = 10.0
    look_s: float = 20.0
    write_budget_bytes_s: int = 0


class PoolsSettings(_Group, frozen=True):
    """The pools, and how blocks leave them. `eviction`: "lru", or "s3fifo" where many blocks are used only once."""

    hbm: HbmSettings = HbmSettings()
    host: HostSettings = HostSettings()
    nvme: NvmeSettings = NvmeSettings()
    object: ObjectSettings = ObjectSettings()
    eviction: str = "lru"


class OffloadSettings(_Group, frozen=True):
    """What goes to a colder tier: "write_through", "second_use" or "never", for each target tier.

    Attributes:
        host, nvme, object: when a block goes to this tier: "write_through" as soon as it is there, "second_use" once a second request
            has asked for it, "never".
        queue_blocks: blocks that may wait, about 20 bytes of memory each; more are skipped and counted. 0: as many as the pools hold
            that blocks are taken from, so that a prompt of any length waits whole.
        threads: offloads at a time.
        staging_bytes: memory for copies between two tiers of which neither is in reach of the CPU and the device at once.
    """

    host: str = "write_through"
    nvme: str = "write_through"
    object: str = "write_through"
    queue_blocks: int = 0
    threads: int = 2
    staging_bytes: int = 64 << 20


class OnboardSettings(_Group, frozen=True):
    """How long a request waits for blocks of colder tiers.

    Attributes:
        wait_s: for bytes; what has not come by then is computed.
        locate_s: for the catalog's answer.
        threads: onboards at a time.
    """

    wait_s: float = 2.0
    locate_s: float = 0.25
    threads: int = 2


class JournalSettings(_Group, frozen=True):
    """The journal. `fsync`: "off" survives a killed process, "always" a power cut too, "interval" in between.

    Attributes:
        fsync: "off", "interval" or "always".
        sync_interval_s: how far apart the syncs of "interval" are at most.
        segment_bytes: size at which a new file begins.
        capacity_bytes: room for what the instance needs of it; what a whole round has made needless goes once published, and an
            instance begins a round by itself when half is used.
        keep_s: for how long what has gone so stays in its folder as history, for kvbm-replay to say why a block left; 0: not at all.
        max_bytes: the folder with its history; the oldest history goes when it is more, and when the device is full. 0: as
            capacity_bytes.
        waiting_bytes: room for events while the journal takes none; beyond it the epoch ends, the engine goes on, and another
            epoch begins when there is room again.
        in_memory: keep it in memory; then nothing outlives the process, and there is no NVME pool.
    """

    fsync: str = "off"
    sync_interval_s: float = 1.0
    segment_bytes: int = 64 << 20
    capacity_bytes: int = 4 << 30
    keep_s: float = 604800.0
    max_bytes: int = 0
    waiting_bytes: int = 64 << 20
    in_memory: bool = False


class NatsSettings(_Group, frozen=True):
    """The stream.

    Attributes:
        url: "" starts (or finds) an embedded nats-server in the data folder.
        enabled: false keeps events local.
        timeout_s: for an answer of the server.
        heartbeat_s: between two signs of life.
        window_bytes: sent and not acknowledged at most.
        linger_s: a message follows another at the earliest after this time, unless it is full, so that frames share one.
        replicas: servers of a NATS cluster that keep the streams: 1, 3 or 5, for streams that are made from now on.
        credentials: file of a user's JWT and seed (.creds). nkey_seed: file with an nkey's seed.
        tls_ca, tls_cert, tls_key: files (PEM): who is trusted, and this side's certificate where the server wants one.
    """

    url: str = ""
    enabled: bool = True
    timeout_s: float = 5.0
    heartbeat_s: float = 1.0
    window_bytes: int = 4 << 20
    linger_s: float = 0.002
    replicas: int = 1
    credentials: str = ""
    nkey_seed: str = ""
    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""


class RoundsSettings(_Group, frozen=True):
    """Restating what is held. `least_s`: rounds that readers ask for are at least so far apart."""

    least_s: float = 10.0


class SamplesSettings(_Group, frozen=True):
    """Accesses told to whoever listens, for `kvbm-replay whatif`. `rate`: share of prompts, 0 to 1."""

    rate: float = 0.1


class TierWeightSettings(_Group, frozen=True):
    """Factors on the cost of fetching a block from each tier to HBM, as routing prices it.

    Attributes:
        host, nvme, object: of a block in this tier.
    """

    host: float = 1.0
    nvme: float = 1.0
    object: float = 1.0


class RoutingSettings(_Group, frozen=True):
    """What routing's cost is made of; the defaults won a sweep over a recorded trace.

    Attributes:
        prefill_tokens_per_s: what routing assumes an instance computes.
        work_weight: how much a second of recomputing weighs against a second of waiting.
        half_life_s: after this long a routed token counts half for balance.
        prior_s: seconds of prefill added to the mean, so that a quiet cluster is not balanced over trifles.
        hold_s: for this long after a route its blocks count as soon to be held.
    """

    prefill_tokens_per_s: float = 10_000.0
    work_weight: float = 8.0
    half_life_s: float = 300.0
    prior_s: float = 10.0
    hold_s: float = 30.0
    tier_weights: TierWeightSettings = TierWeightSettings()


class TenantSettings(_Group, frozen=True):
    """What one tenant may have, where tenants share pools. The tenant "*" stands for all that are not named.

    Attributes:
        weight: its part of what is full is weight over the sum of all weights: of each pool, and of the turns of offloads.
        host_bytes, nvme_bytes: what it may fill of this instance's pools at most; 0: no such limit.
        object_bytes: what it may fill of the object pool; the janitor sees to it. 0: no such limit.
    """

    weight: int = 1
    host_bytes: int = 0
    nvme_bytes: int = 0
    object_bytes: int = 0


class CatalogSettings(_Group, frozen=True):
    """The catalog service and how to reach it.

    Attributes:
        url: where managers and routers ask; "" asks nobody.
        listen: host:port the service binds; port 0 takes a free one.
        database: SQLAlchemy URL; "" is SQLite in the data folder.
        liveness_s: an instance not heard for this long is left out of answers.
        tenant_secrets: tenant → secret, for lookups by tokens on the server's side.
        capacity: residencies and claims the index takes; more are refused and counted. 10 million need about 350 MB.
        checkpoints: folder of the index's checkpoints; "" is one in the data folder.
        checkpoint_every_s: between two checkpoints; one is written at a clean stop too.
        archive: folder where all frames are kept as files for kvbm-replay; "" keeps none.
    """

    url: str = ""
    listen: str = "127.0.0.1:7700"
    database: str = ""
    liveness_s: float = 3.5
    capacity: int = 100_000_000
    checkpoints: str = ""
    checkpoint_every_s: float = 60.0
    archive: str = ""
    routing: RoutingSettings = RoutingSettings()
    tenant_secrets: dict[str, str] = {}


class GcSettings(_Group, frozen=True):
    """The janitor of the object pool, `kvbm-catalog gc`. All janitors of one store should have the same.

    Attributes:
        ttl_s: objects go that nobody has put or read for so long; 0: never.
        quota_bytes: the least recently used objects go while the pool has more; 0: no limit.
        grace_s: between the word that an object will go and its deletion; at least twice `pools.object.timeout_s`, the longest read,
            and three times `pools.object.look_s`, of every instance that shares the store.
        young_s: an object without a claim may still get one for so long.
        skew_s: how far the clocks of instances, janitor and store may be apart.
        lease_s: for how long a janitor that died keeps others away.
        every_s: between two runs; 0: one run.
    """

    ttl_s: float = 7 * 86_400.0
    quota_bytes: int = 0
    grace_s: float = 60.0
    young_s: float = 60.0
    skew_s: float = 60.0
    lease_s: float = 60.0
    every_s: float = 0.0


class Settings(_Group, frozen=True):
    """Everything that can be set.

    Attributes:
        tenants: tenant → its share; none: all blocks are alike.
    """

    instance: InstanceSettings = InstanceSettings()
    pools: PoolsSettings = PoolsSettings()
    offload: OffloadSettings = OffloadSettings()
    onboard: OnboardSettings = OnboardSettings()
    journal: JournalSettings = JournalSettings()
    nats: NatsSettings = NatsSettings()
    rounds: RoundsSettings = RoundsSettings()
    samples: SamplesSettings = SamplesSettings()
    catalog: CatalogSettings = CatalogSettings()
    gc: GcSettings = GcSettings()
    tenants: dict[str, TenantSettings] = {}


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

    Nothing is read that was not given: without `environment` no variable counts, without `path` no file. A number of bytes may be
    written as a size, such as "8GiB" or "500MB". `kvbm settings` lists every key with its default.

    Args:
        path: a TOML file with a table for each group.
        environment: variables that begin with KVBM_ count, as KVBM_POOLS__HOST__SLOTS; give `os.environ`. None when omitted.
        flags: dotted key → value, such as {"pools.host.capacity_bytes": "8GiB"}; or tables in tables, as in TOML.
        defaults: as `flags`, where whoever asks has others than `Settings`.
    Raises: ConfigError: a key that does not exist (with the nearest one), a value of the wrong kind, or an unreadable file.
    """
    tree: dict[str, Any] = {}
    for key, value in leaves(defaults or {}):
        _put(tree, key, value, "defaults")
    if path is not None:
        for key, value in leaves(_read_toml(path, sources.path)):
            _put(tree, key, value, str(path))
    for name, value in sorted((environment or {}).items()):
        if name.startswith(ENVIRONMENT_PREFIX):
            _put(tree, name.removeprefix(ENVIRONMENT_PREFIX).lower().replace("__", "."), value, f"environment {name}")
    for key, value in leaves(flags or {}):
        _put(tree, key, value, sources.flags)
    settings = msgspec.convert(tree, Settings)
    check_settings(settings)
    return settings


def default_lines() -> list[str]:
    """Each setting with its default, as TOML would write it, in the order of the tree."""
    return [f"{key} = {msgspec.json.encode(known.default).decode()}" for key, known in _KNOWN.items()]


def check_settings(settings: Settings) -> None:
    """Refuse values that make no sense, however they were made. Raises ConfigError: which, and what to write."""
    _check_names(settings)
    _check_pools(settings.pools)
    _one_of("pools.host.huge_pages", settings.pools.host.huge_pages, ("auto", "on", "off"))
    _one_of("pools.nvme.io", settings.pools.nvme.io, ("auto", "io_uring", "threads"))
    _one_of("pools.nvme.direct", settings.pools.nvme.direct, ("auto", "on", "off"))
    if not 0 < settings.pools.nvme.offload_share <= 1:
        raise ConfigError(
            f"pools.nvme.offload_share is {settings.pools.nvme.offload_share:g}; give a share above 0, at most 1"
        )
    for key, least, value in (
        ("pools.host.numa_node", -1, settings.pools.host.numa_node),
        ("pools.host.copy_threads", 0, settings.pools.host.copy_threads),
        ("pools.nvme.write_budget_bytes_s", 0, settings.pools.nvme.write_budget_bytes_s),
        ("pools.object.write_budget_bytes_s", 0, settings.pools.object.write_budget_bytes_s),
        ("offload.queue_blocks", 0, settings.offload.queue_blocks),
    ):
        if value < least:
            raise ConfigError(f"{key} is {value}; it must be at least {least}")
    _one_of("journal.fsync", settings.journal.fsync, ("off", "interval", "always"))
    for tier in ("host", "nvme", "object"):
        _one_of(f"offload.{tier}", getattr(settings.offload, tier), tuple(OFFLOAD_POLICIES))
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
            f"journal.capacity_bytes is {settings.journal.capacity_bytes}; it must be at least 4 times journal.segment_bytes "
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
        ("rounds.least_s", settings.rounds.least_s),
        ("catalog.checkpoint_every_s", settings.catalog.checkpoint_every_s),
        ("onboard.wait_s", settings.onboard.wait_s),
        ("onboard.locate_s", settings.onboard.locate_s),
        ("nats.timeout_s", settings.nats.timeout_s),
        ("nats.heartbeat_s", settings.nats.heartbeat_s),
        ("pools.object.timeout_s", settings.pools.object.timeout_s),
        ("pools.object.look_s", settings.pools.object.look_s),
        ("catalog.liveness_s", settings.catalog.liveness_s),
    ):
        if not 0 < wait_s <= _LONGEST_S:
            raise ConfigError(f"{key} is {wait_s:g}; it must be above 0 and at most {_LONGEST_S:g}")
    if settings.nats.replicas not in (1, 3, 5):
        raise ConfigError(
            f"nats.replicas is {settings.nats.replicas}; give 1, or in a NATS cluster 3 or 5: of an even number half may not fail"
        )
    _check_tenants(settings.tenants)
    routing = settings.catalog.routing
    weights = {f"tier_weights.{tier}": weight for tier, weight in msgspec.structs.asdict(routing.tier_weights).items()}
    for name, value in {**msgspec.structs.asdict(routing), **weights}.items():
        if isinstance(value, float) and not (value > 0 and math.isfinite(value)):
            raise ConfigError(f"catalog.routing.{name} is {value:g}; it must be above 0")


class _Known(NamedTuple):
    """A setting that exists.

    Attributes:
        kind: type of its value.
    """

    kind: Any
    default: Any


def _read_toml(path: Path, source: str) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
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


def _known(group: type[_Group] = Settings, prefix: str = "") -> Iterator[tuple[str, _Known]]:
    defaults = group()
    for name, kind in get_type_hints(group).items():
        if isinstance(kind, type) and issubclass(kind, _Group):
            yield from _known(kind, f"{prefix}{name}.")
        elif not name.startswith("_"):
            yield f"{prefix}{name}", _Known(kind, getattr(defaults, name))


_LONGEST_S = 1e6
_MOST_BLOCKS = 1 << 12  # of an object
_NAME = re.compile(r"[A-Za-z0-9_-]{1,128}")
_OPEN_KEY = "catalog.tenant_secrets"  # a table whose keys are the user's own
_TENANTS = "tenants"  # a table of tables whose names are the user's own
_KNOWN = dict(_known())
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([KMGT]i?B|B)", re.IGNORECASE)
_UNITS = {"b": 1} | {
    f"{letter}{unit}": base**power
    for power, letter in enumerate("kmgt", start=1)
    for unit, base in (("b", 1000), ("ib", 1024))
}
_MOST_WEIGHT = 1_000_000
_TENANT_FIELDS = tuple(get_type_hints(TenantSettings))
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
    open_name = key.removeprefix(f"{_OPEN_KEY}.") if key.startswith(f"{_OPEN_KEY}.") else ""
    tenant, _, field = (
        key.removeprefix(f"{_TENANTS}.").rpartition(".") if key.startswith(f"{_TENANTS}.") else ("", "", "")
    )
    if open_name:
        groups, name = _OPEN_KEY.split("."), open_name
    elif tenant and field in _TENANT_FIELDS:
        groups, name, kind = [_TENANTS, tenant], field, int
    elif key in _KNOWN and key not in (_OPEN_KEY, _TENANTS):
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
        shown = "its value" if open_name else repr(value)
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
    if key == _OPEN_KEY:
        return f"{key} is a table; write {key}.TENANT"
    if key == _TENANTS or key.startswith(f"{_TENANTS}."):
        return f"{key!r} is no setting of a tenant; write tenants.TENANT. and one of {', '.join(_TENANT_FIELDS)}"
    inside = [known for known in _KNOWN if known.startswith(f"{key}.")]
    if inside:
        return f"{key!r} is a group of settings; write one of them, such as {inside[0]!r}"
    group = key.partition(".")[0]
    if group in ("log", "logs", "logging"):
        return (
            f"there is no setting {key!r}: kvbm logs through structlog; set its level there, with structlog.configure"
        )
    near = difflib.get_close_matches(key, _KNOWN, n=1)
    if near:
        return f"there is no setting {key!r}; the nearest is {near[0]!r}"
    inside = [known for known in _KNOWN if known.startswith(f"{group}.")]
    names = inside or dict.fromkeys(known.partition(".")[0] for known in _KNOWN)
    return f"there is no setting {key!r}; there are {', '.join(names)}; kvbm settings lists them with their defaults"


def _check_names(settings: Settings) -> None:
    for key, name in (("instance.id", settings.instance.id), ("instance.cluster", settings.instance.cluster)):
        if not _NAME.fullmatch(name):
            raise ConfigError(f'{key} is {name!r}; use 1 to 128 letters, digits, "-" and "_"')
    if not settings.instance.data_dir:
        raise ConfigError("instance.data_dir is empty; give a folder")
    for key, url in (("catalog.url", settings.catalog.url), ("pools.object.endpoint", settings.pools.object.endpoint)):
        if url and not _is_http(url):
            raise ConfigError(f"{key} is {url!r}; write http://host:port or https://host:port")


def _is_http(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def _check_pools(pools: PoolsSettings) -> None:
    _one_of("pools.eviction", pools.eviction, tuple(EVICTION_POLICIES))
    _one_of("pools.hbm.owner", pools.hbm.owner, ("kvbm", "engine"))
    _one_of("pools.hbm.device", pools.hbm.device, ("auto", "cpu", "cuda", "memory"))
    for tier in ("hbm", "host", "nvme"):
        pool = getattr(pools, tier)
        for name in ("slots", "capacity_bytes"):
            if getattr(pool, name) < 0:
                raise ConfigError(f"pools.{tier}.{name} is {getattr(pool, name)}; it cannot be negative")
        if pool.slots and pool.capacity_bytes:
            raise ConfigError(f"pools.{tier} sets both slots and capacity_bytes; give one of them")
    if pools.hbm.owner == "engine" and not (pools.host.slots or pools.host.capacity_bytes):
        raise ConfigError(
            'pools.hbm.owner is "engine" and pools.host has neither slots nor capacity_bytes; HOST is where the engine\'s blocks come'
            " and go, so give it one of them"
        )
    if pools.nvme.folder and pools.nvme.path:
        raise ConfigError(
            "pools.nvme sets both path and folder; in a pod's folder the file's name is the instance's: leave path out"
        )
    _check_objects(pools.object)


def _check_tenants(tenants: Mapping[str, TenantSettings]) -> None:
    for tenant, share in tenants.items():
        for name, amount in msgspec.structs.asdict(share).items():
            if amount < (least := 1 if name == "weight" else 0):
                raise ConfigError(f"tenants.{tenant}.{name} is {amount}; it must be at least {least}")
        if share.weight > _MOST_WEIGHT:
            raise ConfigError(f"tenants.{tenant}.weight is {share.weight}; it must be at most {_MOST_WEIGHT}")


def _check_objects(objects: ObjectSettings) -> None:
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
    if objects.front and not objects.url:
        raise ConfigError("pools.object.front is set without pools.object.url, the store it stands before; give both")
    if objects.front and not objects.front.startswith(("redis://", "rediss://")):
        raise ConfigError("pools.object.front is no Redis; write redis://host:port/database")


def check_gc(gc: GcSettings, pool: ObjectSettings) -> None:
    """Refuse what a janitor cannot go by. Raises ConfigError: which setting, and what to write."""
    for name in ("ttl_s", "quota_bytes", "young_s", "skew_s", "every_s"):
        if not 0 <= getattr(gc, name) < math.inf:
            raise ConfigError(f"gc.{name} is {getattr(gc, name):g}; it must be at least 0")
    if not 1 <= gc.lease_s <= _LONGEST_S:
        raise ConfigError(f"gc.lease_s is {gc.lease_s:g}; it must be at least 1 and at most {_LONGEST_S:g}")
    if not max(2 * pool.timeout_s, 3 * pool.look_s) <= gc.grace_s <= _LONGEST_S:
        raise ConfigError(
            f"gc.grace_s is {gc.grace_s:g}; it must be at least twice pools.object.timeout_s ({pool.timeout_s:g}) and three times "
            f"pools.object.look_s ({pool.look_s:g}): instances hear of a deletion within look_s, and reads that began before must end"
        )


def _one_of(key: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{key} is {value!r}; use one of {', '.join(allowed)}")
