"""Every setting there is: a frozen tree of tables, each with its default and its bounds.

The docstrings say what they mean.

A key is written `pools.host.slots` in messages and flags, as tables in TOML, and `KVBM_POOLS__HOST__SLOTS` in the
environment. The bounds are checked by `kvbm.config.bounds`; `rule` is the end of a refusal where the bounds alone say
too little.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kvbm.core.policy import EVICTION_POLICIES, NO_OFFLOAD, OFFLOAD_POLICIES
from kvbm.core.results import LEAST_EVENT_BYTES
from kvbm.core.state_admission import STATE_POLICIES

LONGEST_S = 1e6
_STREAM_KEEPS_S = 86_400.0  # as `streams.nats.setup.MAX_AGE_S`
_MOST_BLOCKS = 1 << 12  # of an object
_MOST_BLOCK_TOKENS = 1 << 16
_ODD = "give 1, or in a NATS cluster 3 or 5: of an even number half may not fail"
_HOLD = f"give 0 to {LONGEST_S:g} seconds, or -1 until the record of erasures was read"
_FORGET = (
    f"give a number above {_STREAM_KEEPS_S:g}: so long the stream keeps events, from which a forgotten instance "
    "would be read again"
)

Count = Annotated[int, Meta(ge=1)]
Amount = Annotated[int, Meta(ge=0)]
PoolSize = Annotated[int, Meta(ge=0, extra={"rule": "it cannot be negative"})]
Seconds = Annotated[float, Meta(gt=0, le=LONGEST_S)]
SecondsOrZero = Annotated[float, Meta(ge=0, le=LONGEST_S)]
LongSecondsOrZero = Annotated[float, Meta(ge=0)]  # may be weeks
Weight = Annotated[float, Meta(gt=0)]
Switch = Literal["auto", "on", "off"]
OffloadWhen = Annotated[str, Meta(extra={"choice": (*OFFLOAD_POLICIES, NO_OFFLOAD)})]


class SettingsGroup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of settings."""


class InstanceSettings(SettingsGroup, frozen=True):
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


class HbmSettings(SettingsGroup, frozen=True):
    """The HBM pool. Give `slots` or `capacity_bytes`, not both.

    Attributes:
        slots: blocks that fit.
        capacity_bytes: room for blocks; the slots follow from a block's size.
        owner: "kvbm", or "engine" for one that keeps its KV itself and only says what it holds: nothing is allocated
            then, a HOST pool is needed, and `device` says nothing.
        device: "auto", "cpu", "cuda", or "memory" for a pool without torch.
        ring_bytes: on a GPU, of its memory for each direction in which blocks are copied.
        programs: of a launch that packs or unpacks blocks there; 0: half as many as it has multiprocessors.
    """

    slots: PoolSize = 0
    capacity_bytes: PoolSize = 0
    owner: Literal["kvbm", "engine"] = "kvbm"
    device: Literal["auto", "cpu", "cuda", "memory"] = "auto"
    ring_bytes: Annotated[int, Meta(ge=1 << 20)] = 128 << 20
    programs: Amount = 0


class HostSettings(SettingsGroup, frozen=True):
    """The HOST pool, in host memory. Give `slots` or `capacity_bytes`, not both; both 0: there is none.

    Attributes:
        slots: blocks that fit.
        capacity_bytes: host memory for blocks, taken at the start.
        huge_pages: "auto": where they can be had, "on": or refuse to start, "off".
        numa_node: node its memory is bound to; -1: the one the manager starts on when the machine has several.
        copy_threads: threads that copy blocks; 0: as many as help on this machine.
        pin_s: seconds that registering it with CUDA may take while vLLM starts; after them copies to the GPU take a
            detour.
    """

    slots: PoolSize = 0
    capacity_bytes: PoolSize = 0
    huge_pages: Switch = "auto"
    numa_node: Annotated[int, Meta(ge=-1)] = -1
    copy_threads: Amount = 0
    pin_s: Seconds = 120.0


class NvmeSettings(SettingsGroup, frozen=True):
    """The NVME pool. Give `slots` or `capacity_bytes`, not both; both 0: there is none.

    Attributes:
        slots: blocks that fit.
        capacity_bytes: room for blocks, taken at the start; a page of header for each block comes on top.
        path: its file or block device, by default a file in the data folder; over several, with ":" between, slots are
            striped.
        folder: of a pod, instead of `path`: each instance has a file of its own there and reads all others', also of
            instances that are gone. With neither slots nor capacity_bytes it only reads.
        io: "io_uring", "threads", or "auto": io_uring where the kernel lets us.
        direct: past the page cache (O_DIRECT): "on", "off", or "auto": where the file system can.
        depth: block transfers in flight for each path.
        offload_share: of `depth`, what offloads may use while requests read, and never more than 2 MiB (or one block).
        write_budget_bytes_s: bytes a second that may be written in the long run, for the device's endurance; a day's
            worth may be saved up. 0: no limit.
        encrypt: whether blocks lie there encrypted, with the keys of `pools.object.keys` or `keys_command`.
        aside_bytes: room on the disk for files that lay there and were made for other blocks; they are renamed and
            never read again.
    """

    slots: PoolSize = 0
    capacity_bytes: PoolSize = 0
    path: str = ""
    folder: str = ""
    io: Literal["auto", "io_uring", "threads"] = "auto"
    direct: Switch = "auto"
    depth: Count = 32
    offload_share: Annotated[float, Meta(gt=0, le=1)] = 0.25
    write_budget_bytes_s: Amount = 0
    encrypt: bool = False
    aside_bytes: Amount = 64 << 30


class ObjectSettings(SettingsGroup, frozen=True):
    """The object pool, which all instances share.

    Attributes:
        url: s3://bucket/prefix, az://account/container/prefix or redis://host:port/database?prefix=…; "" for none.
        endpoint, region: of s3 and az, where they are not their makers' own.
        ca: file (PEM) of who signs the store's certificate, and the front's; "" for AWS_CA_BUNDLE or a profile's (s3),
            REQUESTS_CA_BUNDLE, CURL_CA_BUNDLE or SSL_CERT_FILE, the first that names another list than the system's,
            else that.
        name: of the pool, where instances reach one store by different addresses.
        blocks: of an object; 0: as many as make 4 MiB or 128 tokens, whichever is less. The same for all instances.
        compression: "auto": by the type of the elements, where it gains something; "off".
        keys: file with tenants' keys, which encrypt their objects, and what `pools.nvme.encrypt` does (`kvbm keys`
            makes one). "" for none.
        keys_command: prints such a file, instead of it.
        front: redis://…, a faster store before the one of `url`; it may forget, and is filled again. "" for none.
        ttl_s: after which a Redis, as pool or in front, forgets an object; 0: when it has no room.
        requests: to the store in flight.
        timeout_s: deadline of one call; what is not there then is computed.
        look_s: how often to look for what the janitor is about to delete; at most a third of its grace.
        write_budget_bytes_s: bytes a second that may be put in the long run, as `pools.nvme.write_budget_bytes_s`. 0:
            no limit.
    """

    url: str = ""
    endpoint: str = ""
    region: str = ""
    ca: str = ""
    name: str = ""
    blocks: Annotated[
        int, Meta(ge=0, le=_MOST_BLOCKS, extra={"rule": f"give 1 to {_MOST_BLOCKS}, or 0 for as many as fit 4 MiB"})
    ] = 0
    compression: Literal["auto", "off"] = "auto"
    keys: str = ""
    keys_command: str = ""
    front: str = ""
    ttl_s: Amount = 0
    requests: Count = 8
    timeout_s: Seconds = 10.0
    look_s: Seconds = 20.0
    write_budget_bytes_s: Amount = 0


class PoolsSettings(SettingsGroup, frozen=True):
    """The pools, and how blocks leave them. `eviction`: "lru", or "s3fifo" where many blocks are used only once."""

    hbm: HbmSettings = HbmSettings()
    host: HostSettings = HostSettings()
    nvme: NvmeSettings = NvmeSettings()
    object: ObjectSettings = ObjectSettings()
    eviction: Annotated[str, Meta(extra={"choice": tuple(EVICTION_POLICIES)})] = "lru"


class OffloadSettings(SettingsGroup, frozen=True):
    """What goes to a colder tier: "write_through", "second_use" or "never", for each target tier.

    Attributes:
        host, nvme, object: when a block goes to this tier: "write_through" as soon as it is there, "second_use" once a
            second request has asked for it, "never".
        states: which states of recurrent layers an engine stores at all: "all" that it offers, "ends" where prompts end
            or part, and where a second one has passed, "second_use" only there.
        queue_blocks: blocks that may wait, about 20 bytes of memory each; more are skipped and counted. 0: as many as
            the pools hold that blocks are taken from, so that a prompt of any length waits whole.
        threads: offloads at a time.
        staging_bytes: memory for copies between two tiers of which neither is in reach of the CPU and the device at
            once.
    """

    host: OffloadWhen = "write_through"
    nvme: OffloadWhen = "write_through"
    object: OffloadWhen = "write_through"
    states: Annotated[str, Meta(extra={"choice": tuple(STATE_POLICIES)})] = "ends"
    queue_blocks: Amount = 0
    threads: Count = 2
    staging_bytes: Count = 64 << 20


class OnboardSettings(SettingsGroup, frozen=True):
    """How long a request waits for blocks of colder tiers.

    Attributes:
        wait_s: for bytes; what has not come by then is computed.
        locate_s: for the catalog's answer.
        threads: onboards at a time.
    """

    wait_s: Seconds = 2.0
    locate_s: Seconds = 0.25
    threads: Count = 2


class JournalSettings(SettingsGroup, frozen=True):
    """The journal. `fsync`: "off" survives a killed process, "always" a power cut too, "interval" in between.

    Attributes:
        fsync: "off", "interval" or "always".
        sync_interval_s: how far apart the syncs of "interval" are at most.
        segment_bytes: size at which a new file begins.
        capacity_bytes: room for what the instance needs of it; what a completed snapshot has made truncatable goes once
            published, and an instance begins a snapshot by itself when half is used.
        keep_s: for how long what has gone so stays in its folder as history, for kvbm-replay to say why a block left;
            0: not at all.
        max_bytes: the folder with its history; the oldest history goes when it is more, and when the device is full. 0:
            as capacity_bytes.
        waiting_bytes: room for events while the journal takes none; beyond it the epoch ends, the engine goes on, and
            another epoch begins when there is room again.
        in_memory: keep it in memory; then nothing outlives the process, and there is no NVME pool.
        frame_version: the newest version of frames to write: 3 records what tenants use; 2 does not, and is read by
            catalogs of before. Set it while catalogs are older than engines.
        usage_every_s: how often what tenants use is recorded, on clock hours: a divisor of 3600. A crash loses what
            came since.
    """

    fsync: Literal["off", "interval", "always"] = "off"
    sync_interval_s: Seconds = 1.0
    segment_bytes: Count = 64 << 20
    capacity_bytes: Count = 4 << 30
    keep_s: SecondsOrZero = 604800.0
    max_bytes: Amount = 0
    waiting_bytes: Annotated[int, Meta(ge=LEAST_EVENT_BYTES)] = 64 << 20
    in_memory: bool = False
    frame_version: Literal[2, 3] = 3
    usage_every_s: Literal[60, 300, 600, 900, 1200, 1800, 3600] = 3600


class NatsSettings(SettingsGroup, frozen=True):
    """The stream.

    Attributes:
        url: "" starts (or finds) an embedded nats-server in the data folder.
        enabled: false keeps events local.
        timeout_s: for an answer of the server.
        heartbeat_s: between two signs of life.
        window_bytes: sent and not acknowledged at most.
        linger_s: a message follows another at the earliest after this time, unless it is full, so that frames share
            one.
        replicas: servers of a NATS cluster that keep the streams: 1, 3 or 5, for streams that are made from now on.
        credentials: file of a user's JWT and seed (.creds). nkey_seed: file with an nkey's seed.
        tls_ca, tls_cert, tls_key: files (PEM): who is trusted, and this side's certificate where the server wants one.
    """

    url: str = ""
    enabled: bool = True
    timeout_s: Seconds = 5.0
    heartbeat_s: Seconds = 1.0
    window_bytes: Count = 4 << 20
    linger_s: Seconds = 0.002
    replicas: Annotated[Literal[1, 3, 5], Meta(extra={"rule": _ODD})] = 1
    credentials: str = ""
    nkey_seed: str = ""
    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""


class SnapshotsSettings(SettingsGroup, frozen=True):
    """Snapshots of what is held. `least_s`: snapshots that readers ask for are at least so far apart."""

    least_s: Seconds = 10.0


class PublishSettings(SettingsGroup, frozen=True):
    """What an engine publishes in its own words, beside the stream.

    Attributes:
        engine_events: vLLM's own KV events, where it publishes them, also tell of what lies in HOST, NVME and OBJECT.
        ownership: the owner that such an event names for a block in objects; "": none, as if it lay in NVME.
    """

    engine_events: bool = False
    ownership: str = "kvbm"


class SamplesSettings(SettingsGroup, frozen=True):
    """Accesses told to whoever listens, for `kvbm-replay whatif`. `rate`: share of prompts, 0 to 1."""

    rate: Annotated[float, Meta(ge=0, le=1)] = 0.1


class TracesSettings(SettingsGroup, frozen=True):
    """Traces of requests, by OpenTelemetry.

    Attributes:
        endpoint: the OTLP receiver they go to, by HTTP and protobuf: http://host:port, where a path is given as it is
            written, else with /v1/traces. "": the tracer provider that the embedding engine has set makes them, if it
            has. What else there is to say of a receiver stands in OpenTelemetry's variables, as its headers in
            OTEL_EXPORTER_OTLP_HEADERS.
        sample: share of the requests that are traced where nobody before has decided it, 0 to 1; 0: none at all.
    """

    endpoint: str = ""
    sample: Annotated[float, Meta(ge=0, le=1)] = 1.0


class TierWeightSettings(SettingsGroup, frozen=True):
    """Factors on the cost of fetching a block from each tier to HBM, as routing prices it.

    Attributes:
        host, nvme, object: of a block in this tier.
    """

    host: Weight = 1.0
    nvme: Weight = 1.0
    object: Weight = 1.0


class RoutingSettings(SettingsGroup, frozen=True):
    """What routing's cost is made of; the defaults won a sweep over generated workloads.

    Attributes:
        prefill_tokens_per_s: what routing assumes an instance computes; what its heartbeats say it has measured is
            believed within 4 times of it.
        work_weight: how much a second of recomputing weighs against a second of waiting, while nobody waits.
        crowding_weight: how much that weight grows with each second that a prompt waits at the least busy instance.
        own_crowding: the part of an instance's longer queue that counts for its weight.
        balance_s: how many seconds an instance loses that was routed twice the mean lately.
        decode_request_s: how much longer a request being decoded makes another wait, where only decoding is asked for.
        batch_wait_s: requests of the class "batch" are not admitted while the least wait is longer.
        half_life_s: after this long a routed token counts half for balance.
        prior_s: seconds of prefill added to the mean, so that a quiet cluster is not balanced over trifles.
        hold_s: for this long after a route its blocks count as soon to be held.
    """

    prefill_tokens_per_s: Weight = 10_000.0
    work_weight: Weight = 2.0
    crowding_weight: Weight = 4.0
    own_crowding: Weight = 0.3
    balance_s: Weight = 2.0
    decode_request_s: Weight = 0.01
    batch_wait_s: Weight = 10.0
    half_life_s: Weight = 300.0
    prior_s: Weight = 10.0
    hold_s: Weight = 30.0
    tier_weights: TierWeightSettings = TierWeightSettings()


class LimitSettings(SettingsGroup, frozen=True):
    """What one caller may ask of the catalog, so that none ruins another's answers.

    A caller is known by its name, else by its address.

    Attributes:
        sockets: connections open at a time. When there are more, those that ask for nothing go first.
        sockets_per_peer: of one address (IPv6: its /64).
        connects_per_s: connections of one address that are taken in a second; four times as many at once.
        requests_per_s: of one caller; 0: no limit. A long request counts as several: one more for each 16 KiB of its
            body, and for each 64 KiB of its answer.
        burst: requests of one caller at once.
        loopback: whether requests of callers without a name on the machine itself are limited too.
        body_bytes: of requests that are being read or answered, all together; one caller may have half, and at least 12
            MiB. What is above 12 MiB, up to a quarter, is for callers that have no more than a quarter of that: long
            requests do not keep out others.
        waits: requests that wait for `at_least` at a time; one caller may have a quarter.
        header_s: a connection has so long for the header of a request.
        idle_s: a connection without a request is kept so long.
        write_s: a caller has so long to take an answer.
        unsent_bytes: of answers that callers do not take, all together.
        watches, watches_per_caller: feeds open at a time, of all callers and of one.
        watch_bytes: of recent changes, from which feeds go on; who is further behind is told what it has missed.
        loop_share: of the time that the catalog has for answers, one caller may have this part while others ask; 1: all
            of it.
        history_processes: that answer questions to the history, one at a time each. history_waiting: questions that
            wait for one.
        history_s: a question to the history takes no longer. history_rows: rows of its answer in JSON.
        history_bytes: memory of a question. history_keeper_bytes: of the process that keeps the history going; it needs
            about 300 bytes for each block that is held.
    """

    sockets: Annotated[int, Meta(ge=16)] = 1024
    sockets_per_peer: Count = 512
    connects_per_s: Annotated[float, Meta(ge=1)] = 500.0
    requests_per_s: Annotated[float, Meta(ge=0)] = 2000.0
    burst: Count = 4000
    loopback: bool = False
    body_bytes: Annotated[int, Meta(ge=12 << 20)] = 14 << 20
    waits: Annotated[int, Meta(ge=4)] = 256
    header_s: Annotated[float, Meta(ge=0.1)] = 10.0
    idle_s: Annotated[float, Meta(ge=1)] = 75.0
    write_s: Annotated[float, Meta(ge=0.1)] = 20.0
    unsent_bytes: Annotated[int, Meta(ge=1 << 20)] = 8 << 20
    watches: Count = 512
    watches_per_caller: Count = 128
    watch_bytes: Annotated[int, Meta(ge=1 << 16)] = 16 << 20
    loop_share: Annotated[float, Meta(ge=0.01, le=1)] = 0.5
    history_processes: Annotated[int, Meta(ge=1, le=64)] = 2
    history_waiting: Annotated[int, Meta(ge=0, le=10_000)] = 32
    history_s: Annotated[float, Meta(ge=0.1, le=600)] = 30.0  # files that a question reads stay for so long
    history_rows: Count = 100_000
    history_bytes: Annotated[int, Meta(ge=64 << 20)] = 512 << 20
    history_keeper_bytes: Annotated[int, Meta(ge=512 << 20)] = 4 << 30


class TenantSettings(SettingsGroup, frozen=True):
    """What one tenant may have, where tenants share pools. The tenant "*" stands for all that are not named.

    Attributes:
        weight: its part of what is full is weight over the sum of all weights: of each pool, and of the turns of
            offloads.
        host_bytes, nvme_bytes: what it may fill of this instance's pools at most; 0: no such limit.
        object_bytes: what it may fill of the object pool; the janitor sees to it. 0: no such limit.
    """

    weight: Annotated[int, Meta(ge=1, le=1_000_000)] = 1
    host_bytes: Amount = 0
    nvme_bytes: Amount = 0
    object_bytes: Amount = 0


class CatalogSettings(SettingsGroup, frozen=True):
    """The catalog service and how to reach it.

    Attributes:
        url: where managers and routers ask: http://host:port, unix:/path of the socket of a catalog here, or
            nats://host:port/CLUSTER/CALLER, with the keys of `nats`; several with commas between, of which one must
            answer; with semicolons between, those of different parts of the cluster, of which all must; "" asks nobody.
        listen: host:port the service binds; port 0 takes a free one.
        unix_socket: path of a socket the service listens on too, for callers on its machine that run as its user; ""
            for none.
        database: SQLAlchemy URL; "" is SQLite in the data folder.
        liveness_s: an instance not heard for this long is left out of answers.
        forget_s: an instance that has stopped, or is not heard, for this long is forgotten; only time in which a
            catalog listens counts.
        usage_keep_days: for so many days the database keeps what tenants have used.
        tenant_secrets: tenant → secret, for lookups by tokens on the server's side.
        tenant_secrets_file: the same in a TOML file, which is read anew when it changes, so that secrets can change
            without a restart.
        parts: of the cluster's 64 parts, those that this catalog follows, such as "0-31"; "" for all. See "Parts" in
            docs/operate.md.
        capacity: residencies and claims the index takes; more are refused and counted. 10 million need about 350 MB.
        checkpoints: folder of the index's checkpoints; "" is one in the data folder.
        checkpoint_every_s: between two checkpoints; one is written at a clean stop too.
        archive: folder where all frames are kept as files for kvbm-replay; "" keeps none.
        history: folder where a history of the archive is kept, so that the past can be asked below /v1/history; takes
            `archive` and the extra sql. "" keeps none.
        access: file that says who may ask, written by `kvbm-catalog token`; without one everybody who reaches the port
            is an operator, so the catalog then listens on the loopback alone, unless `open`.
        open: listen beyond the loopback without `access`.
        hosts: on the loopback without `access`: names beside localhost by which requests may call the catalog, such as
            that of a reverse proxy on its machine. Addresses always may.
        tls_cert, tls_key: files (PEM): the service's certificate and key; they may be replaced while it runs. "" for
            plain HTTP.
        tls_client_ca: file (PEM) of who signs clients' certificates; `access` says who the names in them are.
        token: file with the token this side asks the catalog with; it may be replaced while it runs.
        tls_ca: file (PEM) of who signs the catalog's certificate; "" trusts those the system trusts.
        client_cert, client_key: files (PEM): the certificate this side asks the catalog with.
    """

    url: str = ""
    listen: str = "127.0.0.1:7700"
    unix_socket: str = ""
    database: str = ""
    liveness_s: Seconds = 3.5
    forget_s: Annotated[float, Meta(gt=_STREAM_KEEPS_S, extra={"rule": _FORGET})] = 604_800.0
    usage_keep_days: Annotated[int, Meta(ge=1, le=36_500)] = 400
    parts: str = ""
    capacity: Count = 100_000_000
    checkpoints: str = ""
    checkpoint_every_s: Seconds = 60.0
    archive: str = ""
    history: str = ""
    routing: RoutingSettings = RoutingSettings()
    limits: LimitSettings = LimitSettings()
    tenant_secrets: dict[str, str] = {}
    tenant_secrets_file: str = ""
    access: str = ""
    open: bool = False
    hosts: tuple[str, ...] = ()
    tls_cert: str = ""
    tls_key: str = ""
    tls_client_ca: str = ""
    token: str = ""
    tls_ca: str = ""
    client_cert: str = ""
    client_key: str = ""


class TransportSettings(SettingsGroup, frozen=True):
    """Blocks between instances: what this one lends, and what it reads of others instead of having it computed.

    Attributes:
        listen: where others read this instance's blocks in HOST and NVME: "" nowhere; "host" through a unix socket, for
            processes of its user on its machine; "tcp://address:port" there, and for whoever has the key (port 0: a
            free one).
        advertise: host:port that others reach it at, where that is not what `listen` says, as with tcp://0.0.0.0:port.
        key_file: file with the key, of at least 32 bytes, that both ends of a TCP connection prove to have. It encrypts
            nothing.
        tls_cert, tls_key, tls_ca: files (PEM): this instance's certificate and its key, and who signs the certificates
            of all instances. With them TCP connections are TLS 1.3 with certificates of both sides, by the system's
            OpenSSL 3, and `key_file` may be left out.
        rdma: an RDMA device, such as "mlx5_0", or "auto" for the first whose link is up: blocks in HOST are lent and
            read over it, where both instances have one; "" for none. Takes `key_file`; bytes are not encrypted. Where
            it cannot be used, TCP serves.
        nixl: likewise by NIXL over UCX, for fabrics that UCX knows and `rdma` does not use; takes `key_file` and the
            extra nixl. Over UCX's TCP it is slower than TCP is here.
        fetch: read what others lend even where nothing is lent from here; where `listen` is set it is done in any case.
        connections: of others that are served at a time.
        lent_blocks: blocks that are lent at a time; whoever asks for more is told to come again.
    """

    listen: str = ""
    advertise: str = ""
    key_file: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    tls_ca: str = ""
    rdma: str = ""
    nixl: bool = False
    fetch: bool = False
    connections: Annotated[int, Meta(ge=1, le=4096)] = 64
    lent_blocks: Annotated[int, Meta(ge=1, le=1 << 24)] = 16_384


class HandoffSettings(SettingsGroup, frozen=True):
    """Prompts that one vLLM engine computes and another decodes, and what is kept of a prompt for its next turn.

    Attributes:
        wait_s: a decoder waits for blocks that another engine computes or has computed; where nothing more of them has
            come for so long, it computes them.
        unsaid_wait_s: the same in a consumer (`kv_role`) whose requests do not say who has computed them.
        ttl_s: so long a prefiller keeps the blocks of a prompt that is to be decoded elsewhere before others.
        tenant_in_salt: where a request's `kv_transfer_params` name no tenant, the beginning of its `cache_salt` does,
            up to the first "/": proxies replace what clients write to the former. Let a gateway write both, not
            clients.
        keep_s: how long the blocks of an answered request stay in HOST when others are evicted, for its next turn; a
            request may say another time, by `kvbm.keep_s` in its `kv_transfer_params`. 0: only where it does.
        keep_most_s: no request keeps blocks for longer.
    """

    wait_s: SecondsOrZero = 10.0
    unsaid_wait_s: SecondsOrZero = 0.1
    ttl_s: Seconds = 60.0
    tenant_in_salt: bool = False
    keep_s: SecondsOrZero = 0.0
    keep_most_s: LongSecondsOrZero = 600.0


class ErasureSettings(SettingsGroup, frozen=True):
    """How an instance hears of erasures (`kvbm-catalog erase`).

    Attributes:
        poll_s: between two looks at the record of erasures on the stream.
        hold_s: where the stream does not answer at the start, nothing of NVME, the pod's folder and OBJECT is used
            until the record was read, and for so long at most; -1: until it was read, however long that takes. 0: they
            are used at once.
    """

    poll_s: Seconds = 5.0
    hold_s: Annotated[float, Meta(ge=0, le=LONGEST_S, extra={"choice": (-1.0,), "rule": _HOLD})] = 30.0


class GcSettings(SettingsGroup, frozen=True):
    """The janitor of the object pool, `kvbm-catalog gc`. All janitors of one store should have the same.

    Attributes:
        ttl_s: objects go that nobody has put or read for so long; 0: never.
        quota_bytes: the least recently used objects go while the pool has more; 0: no limit.
        grace_s: between the word that an object will go and its deletion; at least twice `pools.object.timeout_s`, the
            longest read, and three times `pools.object.look_s`, of every instance that shares the store.
        young_s: an object without a claim may still get one for so long.
        skew_s: how far the clocks of instances, janitor and store may be apart.
        lease_s: for how long a janitor that died keeps others away.
        used_s: how exactly the catalog's database tells when an object was last used: a claim that is said again is
            written only where it is newer by more than this. It is added to `ttl_s`; catalogs go by it, too.
        every_s: between two runs; 0: one run.
        id: name of the janitor's instance, as `kvbm nats-permissions --janitor` has it; "" for janitor- and eight
            characters that follow from the pool's name. Two janitors of one cluster with different pools need two
            names.
        alone: no other janitor, and no erasure, ever works on the store at the same time. A janitor believes it where
            the store ignores the conditions of puts on which its lease rests; without it, it does not work there.
    """

    ttl_s: LongSecondsOrZero = 7 * 86_400.0
    quota_bytes: Amount = 0
    grace_s: Seconds = 60.0
    young_s: LongSecondsOrZero = 60.0
    skew_s: LongSecondsOrZero = 60.0
    lease_s: Annotated[float, Meta(ge=1, le=LONGEST_S)] = 60.0
    used_s: SecondsOrZero = 60.0
    every_s: LongSecondsOrZero = 0.0
    id: str = ""
    alone: bool = False


class SourceSettings(SettingsGroup, frozen=True):
    """An engine that publishes KV events; the table's name is that of its instance.

    Attributes:
        endpoint: where it publishes, tcp://host:port. With * for the host we listen there and the engine connects. Of
            trtllm the address of trtllm-serve, http://host:port; of dynamo that of its NATS, nats://host:port. Of
            sglang also http://host:port of its server, which says the rest, and its ranks.
        replay: where it is asked to send again, tcp://host:port; "" where it does not: then each lost message begins an
            epoch.
        topic: what the topics of its messages begin with; of dynamo the subject that its events are published on.
        kind: "vllm", "sglang", "trtllm" or "dynamo".
        worker: of dynamo, which worker's events count, by its number; 0: there is one alone on the subject.
        health: of dynamo, a URL that answers while the worker lives; "": as long as its NATS does.
        model: as routers name it. tenant: whose prompts it serves; its secret is in `catalog.tenant_secrets` or their
            file.
        revision: of the weights; "" where it is not known.
        block_tokens: tokens of a block, so that routers know what the engine serves before its first event; 0: its
            events say it, which those of trtllm and dynamo do not.
        pool: name of the cluster pool in which EXTERNAL, or an `ownership` of this name, says that blocks lie; "" for
            none.
        topology: where the engine stands, outermost first.
        ranks: data-parallel ranks, each an instance NAME-dpR at the next port.
        counts_copies: of vLLM, whether a block that is stored again is another copy; false where requests ask for
            `kv_cache_report_mode` "full".
        blocks: remembered at a time, at most.
        silence_s: after so long without an answer the engine counts as silent.
        nkey_seed: the instance's own, instead of `nats.nkey_seed`.
    """

    endpoint: str = ""
    replay: str = ""
    topic: str = ""
    kind: Literal["vllm", "sglang", "trtllm", "dynamo"] = "vllm"
    worker: Annotated[int, Meta(ge=0)] = 0
    health: str = ""
    model: str = ""
    tenant: str = ""
    revision: str = ""
    block_tokens: Annotated[
        int,
        Meta(ge=0, le=_MOST_BLOCK_TOKENS, extra={"rule": f"give 1 to {_MOST_BLOCK_TOKENS}, or 0 where events say it"}),
    ] = 0
    pool: str = ""
    topology: tuple[str, ...] = ()
    ranks: Annotated[int, Meta(ge=1, le=256)] = 1
    counts_copies: bool = True
    blocks: Count = 2_000_000
    silence_s: Seconds = 5.0
    nkey_seed: str = ""


class BridgeSettings(SettingsGroup, frozen=True):
    """Engines without our code, whose KV events `kvbm bridge` brings to the stream.

    Attributes:
        sources: name of the instance → the engine.
    """

    sources: dict[str, SourceSettings] = {}


class LogSettings(SettingsGroup, frozen=True):
    """What commands, and managers in a process that has not set structlog up itself, write to standard error.

    Attributes:
        format: "text" for people, "json" for collectors: one object a line, with time, level, event and the fields.
        level: what is written at least: "debug", "info", "warning", "error", or "auto": info, and of commands that run
            and end, such as demo and doctor, warning.
        levels: first word of a line's name → the same for these lines alone, as `log.levels.instance = "warning"` for
            `instance.fenced`.
    """

    format: Literal["text", "json"] = "text"
    level: Literal["auto", "debug", "info", "warning", "error"] = "auto"
    levels: dict[str, str] = {}


class Settings(SettingsGroup, frozen=True):
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
    snapshots: SnapshotsSettings = SnapshotsSettings()
    publish: PublishSettings = PublishSettings()
    samples: SamplesSettings = SamplesSettings()
    traces: TracesSettings = TracesSettings()
    catalog: CatalogSettings = CatalogSettings()
    gc: GcSettings = GcSettings()
    erasure: ErasureSettings = ErasureSettings()
    transport: TransportSettings = TransportSettings()
    handoff: HandoffSettings = HandoffSettings()
    bridge: BridgeSettings = BridgeSettings()
    log: LogSettings = LogSettings()
    tenants: dict[str, TenantSettings] = {}
