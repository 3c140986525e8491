"""What kvbm talks to: NATS, SQL, the object store, the catalog. Nothing is made there that is not taken back."""

from __future__ import annotations

import asyncio
import re
import secrets
import subprocess
import time
from pathlib import Path
from typing import Any, NamedTuple

from kvbm.config import NatsSettings, Settings
from kvbm.core.answers import ReadyAnswer
from kvbm.core.errors import KvbmError, MissingExtraError, StreamError
from kvbm.locate.http import CatalogClient
from kvbm.pools.stores.s3 import bucket_of, s3_client
from kvbm.streams.credentials import Credentials
from kvbm.streams.nats import ServerView, look
from kvbm.streams.permissions import catalog_inbox, instance_inbox
from kvbm.streams.server import answers, server_binary
from kvbm.workload.doctor.deadline import PROBE_S
from kvbm.workload.doctor.finding import Finding, milliseconds, ok, problem, refused, size, unused, warning

_LEAST_PAYLOAD_BYTES, _GOOD_PAYLOAD_BYTES = 64 << 10, 1 << 20
_OLDEST_NATS = (2, 10)
_GOOD_NATS = (2, 12)
_FAR_S = 0.05
_ASK_S = PROBE_S - 1.0  # of the probes' five, so that what was begun can be ended
_OBJECT_ASK_S = 1.0  # of one request to the object store; two attempts each, and the object has to be deleted as well


# -- NATS -------------------------------------------------------------------------------------------------------------


class Nats(NamedTuple):
    """The stream's server.

    Attributes:
        embedded: none is configured, so kvbm starts one in `folder`: `version` of the binary.
        view: of the one that runs; None where an embedded one does not yet.
        role: whom the server takes this user for, "instance" or "catalog".
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
            url = (folder / "nats.url").read_text(encoding="utf-8").strip()
        except OSError:
            pass
        if not url or not answers(url, 1.0):
            ran = subprocess.run(
                [str(server_binary()), "--version"], capture_output=True, text=True, timeout=_ASK_S, check=False
            )
            return Nats(True, str(folder), ran.stdout.strip().rpartition("v")[2], None, "")
    cluster = settings.instance.cluster
    inboxes = (("instance", instance_inbox(cluster, settings.instance.id)), ("catalog", catalog_inbox(cluster)))
    timeout_s = min(settings.nats.timeout_s, _ASK_S)
    until_s = time.monotonic() + _ASK_S
    first: StreamError | None = None
    for role, inbox in inboxes:
        try:
            left_s = min(timeout_s, max(0.1, until_s - time.monotonic()))
            view = asyncio.run(look(url, left_s, _credentials(settings.nats, inbox)))
        except StreamError as error:
            first = first or error
            if "refuses" not in str(error):
                break  # it is not the inbox
        else:
            return Nats(not settings.nats.url, str(folder), view.version, view, role)
    assert first is not None
    raise first


def judge_nats(facts: Nats, settings: Settings) -> list[Finding]:
    """Connection, JetStream, the stream and its limits."""
    view = facts.view
    if view is None:
        found = f"none configured; kvbm starts nats-server {facts.version} in {facts.folder}"
        return [ok("NATS", found), unused("NATS stream", "made when the server is first started")]
    found = f"{view.url}, nats-server {view.version}, {milliseconds(view.round_trip_s)} a round trip"
    found += ", TLS" if view.is_tls else ""
    found += f", messages up to {size(view.max_payload)}"
    found += ", embedded" if facts.embedded else f", taken for the {facts.role}" if settings.nats.nkey_seed else ""
    return [_judge_server(view, found), _judge_stream(view)]


def _judge_server(view: ServerView, found: str) -> Finding:
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


def _judge_stream(view: ServerView) -> Finding:
    check = "NATS stream"
    if view.has_jetstream:
        fix = "start nats-server with -js, or write jetstream {} into its configuration; for an account, jetstream: enabled"
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
    if stream.storage == "memory":
        return warning(check, found, "make the stream with file storage: a restart of the server loses it")
    return ok(check, found)


def _version(text: str) -> tuple[int, ...]:
    found = re.match(r"(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else ()


def _credentials(nats: NatsSettings, inbox: str) -> Credentials:
    return Credentials(nats.credentials, nats.nkey_seed, nats.tls_ca, nats.tls_cert, nats.tls_key, inbox)


# -- SQL --------------------------------------------------------------------------------------------------------------


def look_at_database(settings: Settings) -> Any:
    """A `DatabaseView`. Raises CatalogError, MissingExtraError."""
    from kvbm.catalog.database import look as look_at

    file = Path(settings.instance.data_dir) / "catalog.db"
    return asyncio.run(look_at(settings.catalog.database or f"sqlite+aiosqlite:///{file}", _ASK_S))


def judge_database(view: Any, settings: Settings) -> Finding:
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


def refused_database(error: KvbmError, settings: Settings) -> Finding:
    """Without a configured database and without its libraries, this machine runs no catalog."""
    if isinstance(error, MissingExtraError) and not settings.catalog.database:
        return unused("SQL", "the catalog's libraries are not installed here; only kvbm-catalog needs them")
    return refused("SQL", error)


# -- the object store -------------------------------------------------------------------------------------------------


class Objects(NamedTuple):
    """One small object put, put again, read and deleted.

    Attributes:
        place: where. failed: which step was refused, "" for none; `why` and `status` of it.
        conditional: a second put with the condition that nothing is there was refused, as it should be.
        left: name of an object that could not be deleted.
    """

    place: str
    failed: str
    why: str
    status: int
    conditional: bool
    left: str
    round_trip_s: float


def look_at_objects(settings: Settings) -> Objects:
    """See `Objects`. Raises ConfigError, MissingExtraError."""
    wanted = settings.pools.object
    bucket, prefix = bucket_of(wanted.url)
    try:
        from botocore.exceptions import BotoCoreError, ClientError
    except ModuleNotFoundError:
        raise MissingExtraError("boto3", "s3") from None
    key = f"{prefix}/kvbm-doctor/{secrets.token_hex(16)}".lstrip("/")
    body, step, conditional, left = secrets.token_bytes(4096), "bucket", True, ""
    try:
        client = s3_client(wanted.endpoint, wanted.region, "", "", _OBJECT_ASK_S, _OBJECT_ASK_S, 1)
    except (BotoCoreError, ValueError) as error:
        return Objects(wanted.url, step, str(error), 0, False, "", 0.0)
    is_put, round_trip_s = False, 0.0
    try:
        client.head_bucket(Bucket=bucket)
        step, is_put = "put", True  # from here something may be there, whatever the answer
        try:
            client.put_object(Bucket=bucket, Key=key, Body=body, IfNoneMatch="*")
        except ClientError as error:
            if _status(error) not in (400, 501):
                raise
            conditional = False  # as the pool takes it
            client.put_object(Bucket=bucket, Key=key, Body=body)
        step, begin_s = "get", time.perf_counter()
        with client.get_object(Bucket=bucket, Key=key)["Body"] as read:
            if read.read() != body:
                return Objects(wanted.url, step, "other bytes came back", 200, conditional, left, 0.0)
        round_trip_s = time.perf_counter() - begin_s
        if conditional:
            conditional = _refuses_second(client, bucket, key, body)
        step, is_put = "delete", False
        client.delete_object(Bucket=bucket, Key=key)
    except ClientError as error:
        left = key if step == "delete" else ""
        code = error.response.get("Error", {}).get("Code", str(error))
        return Objects(wanted.url, step, f"{_status(error)} {code}", _status(error), conditional, left, round_trip_s)
    except (BotoCoreError, OSError) as error:
        left = key if step == "delete" else ""
        return Objects(wanted.url, step, f"{type(error).__name__}: {error}", 0, conditional, left, round_trip_s)
    finally:
        if is_put:
            try:
                client.delete_object(Bucket=bucket, Key=key)
            except (ClientError, BotoCoreError, OSError):
                pass  # what kept it from being put keeps it from being there
        client.close()
    return Objects(wanted.url, "", "", 200, conditional, left, round_trip_s)


def _refuses_second(client: Any, bucket: str, key: str, body: bytes) -> bool:
    from botocore.exceptions import ClientError

    try:
        client.put_object(Bucket=bucket, Key=key, Body=body, IfNoneMatch="*")
    except ClientError as error:
        if _status(error) in (409, 412):
            return True
        raise
    return False


def _status(error: Any) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def judge_objects(facts: Objects, settings: Settings) -> Finding:
    """Bucket reached; put, conditional put, get and delete work."""
    check = "object store"
    endpoint = settings.pools.object.endpoint or "Amazon's endpoint"
    where = f"{facts.place} at {endpoint}"
    if facts.failed:
        found = f"{where}: {_STEPS[facts.failed]} ({facts.why})"
        if facts.left:
            return problem(
                check, f"{found}; {facts.left} is left there", "allow s3:DeleteObject under the prefix, and delete it"
            )
        return problem(check, found, _object_fix(facts, settings))
    found = f"{where}: put, read back and deleted, {milliseconds(facts.round_trip_s)} a read of 4 KiB"
    if not facts.conditional:
        fix = "use a store with If-None-Match (S3, MinIO, Ceph 19): without it each put is preceded by a question"
        return warning(check, f"{found}; no conditional put", fix)
    return ok(check, f"{found}, conditional put")


_STEPS = {
    "bucket": "the bucket cannot be had", "put": "an object cannot be put", "get": "what was put cannot be read",
    "delete": "what was put cannot be deleted",
}  # fmt: skip


def _object_fix(facts: Objects, settings: Settings) -> str:
    if facts.status == 404 and facts.failed == "bucket":
        return f"create the bucket {bucket_of(settings.pools.object.url)[0]!r}, or correct pools.object.url"
    if facts.status in (401, 403):
        return "check the credentials (AWS_ACCESS_KEY_ID, profile, role) and the policy: s3:ListBucket, Get-, Put-, DeleteObject"
    if facts.status in (507, 503) or "Full" in facts.why or "Quota" in facts.why:
        return "free room in the store, or raise its quota"
    if "Credentials" in facts.why:
        return "give credentials: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile, or a role"
    if not facts.status:
        return "start the store, or correct pools.object.endpoint"
    return "check pools.object.region and pools.object.endpoint"


# -- the catalog ------------------------------------------------------------------------------------------------------


class Catalog(NamedTuple):
    """The catalog's own word, and how long it took."""

    ready: ReadyAnswer
    round_trip_s: float


def look_at_catalog(settings: Settings) -> Catalog:
    """See `Catalog`. Raises CatalogError."""
    client = CatalogClient(settings.catalog.url, _ASK_S / 2)
    try:
        client.ready()  # makes the connection
        begin_s = time.perf_counter()
        ready = client.ready()
        return Catalog(ready, time.perf_counter() - begin_s)
    finally:
        client.close()


def judge_catalog(facts: Catalog, settings: Settings) -> Finding:
    """Reached, ready, and faster than managers wait for it."""
    found = f"{settings.catalog.url}, {milliseconds(facts.round_trip_s)} a round trip"
    if not facts.ready.ready:
        fix = "wait, and see its log if that does not end; answers are incomplete until then"
        return warning("catalog", f"{found}; not ready: {facts.ready.reason}", fix)
    if facts.round_trip_s > settings.onboard.locate_s:
        fix = f"raise onboard.locate_s (now {settings.onboard.locate_s:g} s), or run a catalog nearer by"
        return warning("catalog", f"{found}: slower than managers wait for it", fix)
    found += f"; ready, {facts.ready.lag_messages} messages behind the stream"
    if facts.ready.degraded:
        return warning("catalog", f"{found}; {facts.ready.degraded}", "see its log and its database")
    return ok("catalog", found)
