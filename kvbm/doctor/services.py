"""What kvbm talks to: NATS, SQL, the object store, the catalog. Nothing is made there that is not taken back."""

from __future__ import annotations

import asyncio
import re
import secrets
import subprocess
import time
from pathlib import Path
from typing import Any, NamedTuple

from kvbm.assembly import catalog_credentials
from kvbm.assembly.services import database_url
from kvbm.config import NatsSettings, Settings
from kvbm.core.answers import ReadyAnswer
from kvbm.core.errors import KvbmError, MissingExtraError, StreamError
from kvbm.doctor.deadline import PROBE_S
from kvbm.doctor.finding import DoctorFinding, milliseconds, ok, problem, refused, size, unused, warning
from kvbm.doctor.sql_library import sql_library
from kvbm.files import SMALL_BYTES, read_small
from kvbm.locate.parts import catalogs_at
from kvbm.pools.stores.base import TRIAL_PREFIX, Get, ObjectStore, Put, Refusal, StoreTrouble
from kvbm.pools.stores.link import RequestLimits
from kvbm.pools.stores.opening import open_store
from kvbm.streams.base import StreamState
from kvbm.streams.nats.credentials import Credentials
from kvbm.streams.nats.server_view import ServerView, look_as_anybody
from kvbm.streams.publisher.machine import WINDOW_MESSAGES, check_keeps
from kvbm.streams.server import answers, server_binary

_LEAST_PAYLOAD_BYTES, _GOOD_PAYLOAD_BYTES = 64 << 10, 1 << 20
_OLDEST_NATS = (2, 10)
_GOOD_NATS = (2, 12)
_FAR_S = 0.05
_ASK_S = PROBE_S - 1.0  # of the probes' five, so that what was begun can be ended
_EMBEDDED_ASK_S = 1.0
_OBJECT_ASK_S = 0.9  # of one request to the object store, twice that for the first: five in all


# -- NATS -------------------------------------------------------------------------------------------------------------


class Nats(NamedTuple):
    """The stream's server.

    Attributes:
        embedded: none is configured, so kvbm starts one in `folder`: `version` of the binary.
        view: of the one that runs; None where an embedded one does not yet.
        role: whom the server takes this user for, see `look_as_anybody`.
    """

    embedded: bool
    folder: str
    version: str
    view: ServerView | None
    role: str


def look_at_nats(settings: Settings) -> Nats:
    """See `Nats`. Raises ConfigError, StreamError, MissingExtraError: what does not work, and what to do."""
    url, folder = settings.nats.url, Path(settings.instance.data_dir) / "nats"
    if not url:
        try:
            url = read_small(folder / "nats.url").decode("utf-8").strip()
        except (OSError, ValueError):
            pass
        if not url or not answers(url, _EMBEDDED_ASK_S):
            ran = subprocess.run(
                [str(server_binary()), "--version"], capture_output=True, text=True, timeout=_ASK_S, check=False
            )
            return Nats(True, str(folder), ran.stdout.strip().rpartition("v")[2], None, "")
    cluster = settings.instance.cluster
    timeout_s = min(settings.nats.timeout_s, _ASK_S)
    view, role = look_as_anybody(url, timeout_s, _credentials(settings.nats), cluster, settings.instance.id)
    return Nats(not settings.nats.url, str(folder), view.version, view, role)


def judge_nats(facts: Nats, settings: Settings) -> list[DoctorFinding]:
    """Connection, JetStream, the stream and its limits."""
    view = facts.view
    if view is None:
        found = f"none configured; kvbm starts nats-server {facts.version} in {facts.folder}"
        return [ok("NATS", found), unused("NATS stream", "made when the server is first started")]
    found = f"{view.url}, nats-server {view.version}, {milliseconds(view.round_trip_s)} a round trip"
    found += ", TLS" if view.is_tls else ""
    found += f", messages up to {size(view.max_payload)}"
    found += ", embedded" if facts.embedded else f", taken for the {facts.role}" if settings.nats.nkey_seed else ""
    return [_judge_server(view, found), _judge_stream(view, settings)]


def _judge_server(view: ServerView, found: str) -> DoctorFinding:
    version = _version(view.version)
    if view.max_payload < _LEAST_PAYLOAD_BYTES:
        return problem(
            "NATS", found, f"set max_payload there to at least {size(_GOOD_PAYLOAD_BYTES)}: large events do not fit"
        )
    if version and version < _OLDEST_NATS:
        return problem("NATS", found, "use nats-server 2.12 or newer")
    if version and version < _GOOD_NATS:
        return warning("NATS", found, "kvbm is tested with nats-server 2.12 or newer")
    if view.max_payload < _GOOD_PAYLOAD_BYTES:
        return warning("NATS", found, f"set max_payload there to {size(_GOOD_PAYLOAD_BYTES)} or more (8 MiB is good)")
    if view.round_trip_s > _FAR_S:
        return warning("NATS", found, "use a server nearer by: the catalog's view is at least so old")
    return ok("NATS", found)


def _judge_stream(view: ServerView, settings: Settings) -> DoctorFinding:
    check = "NATS stream"
    if view.has_jetstream:
        fix = (
            "start nats-server with -js, or write jetstream {} into its configuration; for an account, jetstream: "
            "enabled"
        )
        return problem(check, view.has_jetstream, fix)
    if view.unseen:
        fix = "give the user the permissions that kvbm nats-permissions prints"
        return problem(check, f"KVBM may not be seen ({view.unseen})", fix)
    stored = view.may_store_bytes > 0 and view.stored_bytes / view.may_store_bytes
    account = f"; the account stores {size(view.stored_bytes)} of {size(view.may_store_bytes)}" if stored else ""
    fix = "raise the account's max_store, or give the stream max_bytes below it (nats stream edit KVBM --max-bytes)"
    stream = view.stream
    if stream is None:
        if stored and stored >= 0.98:
            return problem(check, f"KVBM cannot be made{account}", fix)
        return ok(check, f"KVBM is not there yet; the first catalog or instance makes it{account}")
    copies = f"{stream.replicas} replica{'s' if stream.replicas != 1 else ''}"
    if stream.replicas != settings.nats.replicas:
        copies += f" (nats.replicas is {settings.nats.replicas}, for a stream that is made)"
    limits = [size(stream.max_bytes) if stream.max_bytes > 0 else "no limit of bytes"]
    limits.append(f"{stream.max_age_s / 3600:g} h" if stream.max_age_s else "no limit of age")
    found = f"KVBM holds {size(stream.bytes)}, keeps {', '.join(limits)}; {stream.storage}, {copies}{account}"
    if stream.missing:
        fix = f"let kvbm connect once as a user who may change it, or add {', '.join(stream.missing)} to its subjects"
        return warning(check, f"KVBM lacks the subjects {', '.join(stream.missing)}", fix)
    if stored and stored >= 0.98 and stream.max_bytes <= 0:
        return problem(check, f"{found}: it is full", fix)
    if stored and stored >= 0.8 and stream.max_bytes <= 0:
        return warning(check, f"{found}: nearly full", fix)
    nats = settings.nats
    try:
        check_keeps(
            StreamState(0, 0, stream.bytes, stream.max_bytes, stream.max_age_s, "", stream.max_messages),
            nats.window_bytes,
            WINDOW_MESSAGES,
        )
    except StreamError as error:
        return problem(check, found, str(error))
    if stream.replicas < nats.replicas:
        fix = f"nats.replicas is {nats.replicas}, and a stream that exists keeps its own: set the one or the other"
        return warning(check, found, f"{fix} (nats stream edit KVBM --replicas={nats.replicas}, and KVBM_PULSE)")
    if stream.storage == "memory":
        return warning(check, found, "make the stream with file storage: a restart of the server loses it")
    return ok(check, found)


def _version(text: str) -> tuple[int, ...]:
    found = re.match(r"(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else ()


def _credentials(nats: NatsSettings) -> Credentials:
    return Credentials(nats.credentials, nats.nkey_seed, nats.tls_ca, nats.tls_cert, nats.tls_key)


# -- SQL --------------------------------------------------------------------------------------------------------------


def look_at_database(settings: Settings) -> Any:
    """A `DatabaseView`. Raises CatalogError, MissingExtraError."""
    return asyncio.run(sql_library().look(database_url(settings), _ASK_S))


def judge_database(view: Any, settings: Settings) -> DoctorFinding:
    """Reached, migrated, writable."""
    check = "SQL"
    if not view.is_there:
        found = f"{view.shown} is not there yet; the catalog makes it"
        return ok(check, found) if settings.catalog.database else unused(check, f"{found} where it is started")
    found = f"{view.shown}, {view.server}, {milliseconds(view.round_trip_s)} a round trip"
    if view.is_newer:
        return problem(check, f"{found}; schema {view.schema} is newer than {view.head}", "upgrade kvbm here")
    schema = f"schema {view.schema}" if view.schema else "no schema"
    if view.unwritable:
        fix = "give its user the right to write (a primary, not a replica; GRANT), free its disk, or end who locks it"
        return problem(check, f"{found}; {schema}; a row cannot be written ({view.unwritable})", fix)
    if view.schema != view.head:
        return ok(check, f"{found}; {schema}, the catalog migrates it to {view.head} when it starts")
    return ok(check, f"{found}; {schema} is the newest, a row was written and taken back")


def refused_database(error: KvbmError, settings: Settings) -> DoctorFinding:
    """Without a configured database and without its libraries, this machine runs no catalog."""
    if isinstance(error, MissingExtraError) and not settings.catalog.database:
        return unused("SQL", "the catalog's libraries are not installed here; only kvbm-catalog needs them")
    return refused("SQL", error)


# -- the object store -------------------------------------------------------------------------------------------------


class ObjectTrial(NamedTuple):
    """One small object put, put again, read and deleted.

    Attributes:
        place: where. failed: which step was refused, "" for none; `why` of it, in kind and in words.
        ignored: the conditions of puts that the store takes no notice of, in words.
        left: name of an object that could not be deleted.
    """

    place: str
    failed: str
    trouble: StoreTrouble | None
    why: str
    ignored: tuple[str, ...]
    left: str
    round_trip_s: float


def look_at_objects(settings: Settings) -> ObjectTrial:
    """See `ObjectTrial`. Raises ConfigError, MissingExtraError, PoolError: there is no store, and what to do."""
    wanted = settings.pools.object
    limits = RequestLimits(requests_in_flight=1, connect_timeout_s=_OBJECT_ASK_S, read_timeout_s=_OBJECT_ASK_S)
    store = open_store(
        wanted.url,
        endpoint=wanted.endpoint,
        region=wanted.region,
        ca=wanted.ca,
        ttl_s=wanted.ttl_s,
        limits=limits,
        open_wait_s=2 * _OBJECT_ASK_S,
        tries=False,
    )
    name, body = f".kvbm/doctor/{secrets.token_hex(16)}", secrets.token_bytes(4096)
    try:
        facts = _step(store, ObjectTrial(store.name, "", None, "", (), "", 0.0), name, body)
        [refusal] = store.delete(
            [name], _OBJECT_ASK_S
        )  # also after a put that failed: it may have been done, and not said
        if refusal is None:
            return facts if facts.failed else _conditions(store, facts)
        left = name if facts.failed != "put" else ""
        return (
            facts
            if facts.failed
            else facts._replace(failed="delete", trouble=refusal.trouble, why=refusal.words, left=left)
        )
    finally:
        store.close()


def _step(store: ObjectStore, facts: ObjectTrial, name: str, body: bytes) -> ObjectTrial:
    """Put and read, until something is refused."""
    [put] = store.put([Put(name, body)], _OBJECT_ASK_S)
    if put is not None:
        return facts._replace(failed="put", trouble=put.trouble, why=put.words)
    begin_s = time.perf_counter()
    [got] = store.get([Get(name, most_bytes=SMALL_BYTES)], _OBJECT_ASK_S)
    round_trip_s = time.perf_counter() - begin_s
    if isinstance(got, Refusal):
        return facts._replace(failed="get", trouble=got.trouble, why=got.words)
    if bytes(got.body) != body:
        return facts._replace(failed="get", trouble=StoreTrouble.REFUSED, why="other bytes came back")
    return facts._replace(round_trip_s=round_trip_s)


def _conditions(store: ObjectStore, facts: ObjectTrial) -> ObjectTrial:
    """Put where a condition does not hold."""
    ignored = store.ignored_conditions(f"{TRIAL_PREFIX}{secrets.token_hex(16)}", _OBJECT_ASK_S)
    if isinstance(ignored, Refusal):
        return facts._replace(failed="put", trouble=ignored.trouble, why=ignored.words)
    return facts._replace(ignored=ignored)


def judge_objects(facts: ObjectTrial, settings: Settings) -> DoctorFinding:
    """The store is reached; put, conditional put, get and delete work."""
    check = "object store"
    if facts.failed:
        found = f"{facts.place}: {_STEPS[facts.failed]} ({facts.why})"
        if facts.left:
            fix = "allow deleting under the prefix (s3:DeleteObject), and delete it"
            return problem(check, f"{found}; {facts.left} is left there", fix)
        return problem(check, found, _object_fix(facts))
    found = f"{facts.place}: put, read back and deleted, {milliseconds(facts.round_trip_s)} a read of 4 KiB"
    if facts.ignored:
        fix = (
            "use a store with If-None-Match and If-Match (S3, Azure, Ceph): without them each put is preceded by a "
            "question, and"
            " kvbm-catalog gc works only as the one janitor there is (gc.alone)"
        )
        return warning(check, f"{found}; conditions of puts are ignored: {'; '.join(facts.ignored)}", fix)
    return ok(check, f"{found}, conditional put")


_STEPS = {
    "put": "an object cannot be put",
    "get": "what was put cannot be read",
    "delete": "what was put cannot be deleted",
}


def _object_fix(facts: ObjectTrial) -> str:
    if facts.trouble is StoreTrouble.DENIED:
        return "check the credentials and their policy: list, get, put and delete under the prefix"
    if any(word in facts.why for word in ("503", "507", "Full", "Quota", "maxmemory")):
        return "free room in the store, or raise its quota"
    if facts.trouble is StoreTrouble.SILENT:
        return "start the store, or correct pools.object.endpoint"
    return "check pools.object.region and pools.object.endpoint"


# -- the catalog ------------------------------------------------------------------------------------------------------


class CatalogHealth(NamedTuple):
    """The catalog's own word, and how long it took."""

    ready: ReadyAnswer
    round_trip_s: float
    url: str  # without user and password


def look_at_catalog(settings: Settings) -> CatalogHealth:
    """See `CatalogHealth`. Raises CatalogError."""
    client = catalogs_at(settings.catalog.url, _ASK_S / 2, credentials=catalog_credentials(settings))
    try:
        client.ready()  # makes the connection
        begin_s = time.perf_counter()
        ready = client.ready()
        return CatalogHealth(ready, time.perf_counter() - begin_s, client.url)
    finally:
        client.close()


def judge_catalog(facts: CatalogHealth, settings: Settings) -> DoctorFinding:
    """Reached, ready, and faster than managers wait for it."""
    found = f"{facts.url}, {milliseconds(facts.round_trip_s)} a round trip"
    if not facts.ready.ready:
        fix = "wait, and see its log if that does not end; answers are incomplete until then"
        return warning("catalog", f"{found}; not ready: {facts.ready.reason}", fix)
    if facts.round_trip_s > settings.onboard.locate_s:
        fix = f"raise onboard.locate_s (now {settings.onboard.locate_s:g} s), or run a catalog nearer by"
        return warning("catalog", f"{found}: slower than managers wait for it", fix)
    behind = facts.ready.lag_messages
    found += "; ready" if behind is None else f"; ready, {behind} messages behind the stream"
    if facts.ready.degraded:
        return warning("catalog", f"{found}; {facts.ready.degraded}", "see its log and its database")
    return ok("catalog", found)
