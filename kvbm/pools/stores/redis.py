"""Valkey and Redis as a store: a cache of cluster reach that forgets by itself.

An object is a string. Requests of one kind travel in pipelines, a few connections side by side, so that a slow answer
holds up its own connection alone. A listing is a SCAN of the whole database, sorted here, and tells when an object was
used last, for when it was put nobody knows; neither it nor `absent` counts as a use. Where memory is short the server
evicts (`maxmemory-policy allkeys-lru`) or refuses, which is a refusal here.

A cluster is found out when it is opened by any of its nodes. A pipeline is then one for each node that has some of the
keys, and a listing asks all of them.
"""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import SplitResult, parse_qsl, urlencode, urlsplit, urlunsplit

from kvbm.core.errors import ConfigError, MissingExtraError, PoolError
from kvbm.pools.stores.base import OPEN_WAIT_S, Body, Get, Got, Listed, Put, Refusal, StoreAwayError, StoreTrouble
from kvbm.pools.stores.link import LIMITS, RequestLimits, trusted_file

if TYPE_CHECKING:
    from redis import Redis, RedisCluster

_SCHEMES = ("redis", "rediss")
_ATTEMPTS = 3  # of one pipeline, within the deadline of its call
_FIRST_DELAY_S = 0.02
_LONGEST_DELAY_S = 0.5
_PIPELINE_BYTES = 16 << 20  # bodies of one pipeline
_PIPELINE = 256  # requests of one pipeline
_MOVES = 3  # of a request that another node of a cluster has meanwhile
_SCAN_KEYS = 1000  # looked at by one SCAN, about

# The value only if it is what was expected; one script is one step for everybody.
_REPLACE = """
if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('SET', KEYS[1], ARGV[2], 'KEEPTTL') return 1 end
return 0
"""

Answer = TypeVar("Answer")
Asked = TypeVar("Asked")


class RedisStore:
    """See the module; the promises are those of `ObjectStore`. Methods: any thread.

    Attributes:
        remarks: what is worth saying once, in sentences.
    """

    def __init__(self, name: str, client: Redis | RedisCluster, prefix: str, ttl_s: int, connections: int) -> None:
        self.name = name
        self.forgets = True
        self.remarks: tuple[str, ...] = ()
        self._client: Any = client  # both have what is used here
        self._prefix = f"{prefix}/" if prefix else ""
        self._ttl_s = ttl_s
        self._connections = connections
        self._lock = threading.Lock()
        self._closed = False
        self._workers = ThreadPoolExecutor(connections, thread_name_prefix="kvbm-redis")

    def put(self, puts: Sequence[Put], deadline_s: float) -> list[Refusal | None]:
        """As `ObjectStore.put`."""
        return self._run(puts, self._put_run, deadline_s, [put.size_bytes for put in puts])

    def get(self, gets: Sequence[Get], deadline_s: float) -> list[Got | Refusal]:
        """As `ObjectStore.get`."""
        return self._run(
            gets, self._get_run, deadline_s, [get.expected_bytes or get.count or get.most_bytes for get in gets]
        )

    def delete(self, names: Sequence[str], deadline_s: float) -> list[Refusal | None]:
        """As `ObjectStore.delete`. The server frees the memory behind our back."""
        return self._run(names, self._delete_run, deadline_s, [0] * len(names))

    def listed(self, prefix: str, deadline_s: float, after: str = "") -> Iterator[Listed]:
        """As `ObjectStore.listed`, of what is there at the end of the scan;

        `modified_ns` is when an object was used last, to the second.

        Sizes are of the memory an object takes. With a policy by frequency (`…-lfu`) the server does not know when
        objects were used; it counts as now.
        """
        names = self._scanned(f"{self._prefix}{prefix}", after, deadline_s)
        for at in range(0, len(names), _PIPELINE):
            [answer] = self._run([names[at : at + _PIPELINE]], self._look_run, deadline_s, [0])
            if isinstance(answer, Refusal):
                raise self._trouble(answer)
            yield from answer

    def absent(self, names: Sequence[str], deadline_s: float) -> list[bool]:
        """As `ForgetfulStore.absent`."""
        return [answer is True for answer in self._run(names, self._absent_run, deadline_s, [0] * len(names))]

    def replace(self, name: str, body: Body, expected: Body | None, deadline_s: float) -> Refusal | None:
        """As `ObjectStore.replace`. What is replaced so does not expire."""
        [answer] = self._run([(name, bytes(body), expected)], self._replace_run, deadline_s, [len(body)])
        return answer

    def ignored_conditions(self, name: str, deadline_s: float) -> tuple[str, ...] | Refusal:
        """As `ObjectStore.ignored_conditions`: none, for a command and a script are one step each."""
        return ()

    def close(self) -> None:
        """As `ObjectStore.close`."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._workers.shutdown(wait=False, cancel_futures=True)
        self._client.close()

    def _run(
        self,
        asked: Sequence[Asked],
        work: Callable[[Sequence[Asked]], list[Answer | Refusal]],
        deadline_s: float,
        sizes: Sequence[int],
    ) -> list[Answer | Refusal]:
        """Work on all of a run in pipelines, until the deadline; SILENT for what is not answered then."""
        end = time.monotonic() + deadline_s
        pipelines = _split(sizes, self._connections)
        futures: list[Future[list[Answer | Refusal]]] = []
        try:
            with self._lock:
                if not self._closed:
                    futures += [self._workers.submit(_attempts, work, asked[at], end) for at in pipelines]
        except RuntimeError as error:  # the system gives no thread; nobody hears of what is queued already
            return [Refusal(StoreTrouble.SILENT, str(error))] * len(asked)
        if not futures:
            return [Refusal(StoreTrouble.SILENT, "the store is closed here")] * len(asked)
        wait(futures, timeout=deadline_s)
        answers: list[Answer | Refusal] = []
        for at, future in zip(pipelines, futures, strict=True):
            if future.done() and not future.cancelled():
                answers += future.result()
            else:
                future.cancel()  # one that has begun ends by the timeout of its socket
                answers += [Refusal(StoreTrouble.SILENT, f"no answer within {deadline_s:g} s")] * (at.stop - at.start)
        return answers

    def _put_run(self, puts: Sequence[Put]) -> list[Refusal | None]:
        with self._client.pipeline(transaction=False) as pipeline:
            for put in puts:
                body = put.flat()
                value = body if isinstance(body, bytes) else memoryview(body)
                pipeline.set(self._prefix + put.name, value, nx=True, ex=self._ttl_s or None)
            said = pipeline.execute(raise_on_error=False)
        taken = (Refusal(StoreTrouble.TAKEN, f"{put.name} is there") for put in puts)
        self._leave_replica(said)
        return [_refused(one) or (None if one else there) for one, there in zip(said, taken, strict=True)]

    def _get_run(self, gets: Sequence[Get]) -> list[Got | Refusal]:
        with self._client.pipeline(transaction=False) as pipeline:
            for get in gets:
                key = self._prefix + get.name
                pipeline.strlen(key)
                if get.first == 0 and get.count is None and not get.most_bytes:
                    pipeline.get(key)
                else:
                    pipeline.strlen(key) if get.count == 0 else pipeline.getrange(key, get.first, _last(get))
            said = pipeline.execute(raise_on_error=False)
        return [self._got(get, *said[2 * at : 2 * at + 2]) for at, get in enumerate(gets)]

    def _got(self, get: Get, length: Any, body: Any) -> Got | Refusal:
        """A part by its two answers. They may lie on both sides of an eviction: then it is gone."""
        for one in (length, body):
            refusal = _refused(one)
            if refusal is not None:
                return refusal
        part = b"" if get.count == 0 else body
        whole = get.first == 0 and get.count is None and not get.most_bytes
        wanted = max(0, length - get.first) if get.count is None else max(0, min(get.count, length - get.first))
        too_large = get.refuse(wanted)
        if too_large is not None:
            return too_large
        if get.most_bytes and not length:
            return Refusal(
                StoreTrouble.ABSENT, f"nothing is named {get.name}"
            )  # or an empty string, which is no object either
        gone = not length and (not self._client.exists(self._prefix + get.name) if not whole else body is None)
        if gone or part is None or len(part) != wanted:
            return Refusal(StoreTrouble.ABSENT, f"nothing is named {get.name}")
        return Got(part, length)

    def _delete_run(self, names: Sequence[str]) -> list[Refusal | None]:
        with self._client.pipeline(transaction=False) as pipeline:
            for name in names:
                pipeline.execute_command("UNLINK", self._prefix + name)
            said = pipeline.execute(raise_on_error=False)
        self._leave_replica(said)
        return [_refused(one) for one in said]

    def _leave_replica(self, said: Sequence[object]) -> None:
        """End the connections where the server takes no writes any more: it was demoted, and keeps them.

        The next ones find the new primary.
        """
        from redis.exceptions import ReadOnlyError

        pool = getattr(self._client, "connection_pool", None)  # a cluster's client looks by itself
        if pool is not None and any(isinstance(one, ReadOnlyError) for one in said):
            pool.disconnect(inuse_connections=False)

    def _scanned(self, prefix: str, after: str, deadline_s: float) -> list[str]:
        """The names behind `after` that begin so, without the store's own prefix, sorted. Raises PoolError."""
        pattern = re.sub(r"([\\*?\[\]^])", r"\\\1", prefix) + "*"
        names = set[str]()
        for node in self._nodes():
            cursor = 0
            while True:
                [page] = self._run([(node, cursor, pattern)], self._scan_run, deadline_s, [0])
                if isinstance(page, Refusal):
                    raise self._trouble(page)
                cursor, keys = page
                found = (key.decode(errors="replace")[len(self._prefix) :] for key in keys)
                names.update(name for name in found if name > after)
                if not cursor:
                    break
        return sorted(names)

    def _nodes(self) -> list[Any]:
        """The nodes of a cluster that have keys; None for a server that is none."""
        return list(self._client.get_primaries()) if hasattr(self._client, "get_primaries") else [None]

    def _scan_run(self, asked: Sequence[tuple[Any, int, str]]) -> list[tuple[int, list[bytes]] | Refusal]:
        pages: list[tuple[int, list[bytes]] | Refusal] = []
        for node, cursor, pattern in asked:
            where = {} if node is None else {"target_nodes": node}
            reached, keys = self._client.scan(cursor, match=pattern, count=_SCAN_KEYS, **where)
            pages.append((int(next(iter(reached.values())) if isinstance(reached, dict) else reached), list(keys)))
        return pages

    def _now_ns(self) -> int:
        """The server's time; a cluster's nodes differ by as much as their clocks do."""
        node = self._nodes()[0]
        seconds, microseconds = self._client.time(**({} if node is None else {"target_nodes": node}))
        return (int(seconds) * 1_000_000 + int(microseconds)) * 1000

    def _look_run(self, asked: Sequence[Sequence[str]]) -> list[list[Listed] | Refusal]:
        """What is there of some names, without using it."""
        looks: list[list[Listed] | Refusal] = []
        for names in asked:
            now_ns = self._now_ns()
            with self._client.pipeline(transaction=False) as pipeline:
                for name in names:
                    pipeline.object("IDLETIME", self._prefix + name)
                    pipeline.memory_usage(self._prefix + name, samples=0)
                said = pipeline.execute(raise_on_error=False)
            pairs = zip(names, said[::2], said[1::2], strict=True)
            looks.append(
                [
                    Listed(name, int(size), now_ns - (idle_s if isinstance(idle_s, int) else 0) * 1_000_000_000)
                    for name, idle_s, size in pairs
                    if isinstance(size, int)  # else it is gone
                ]
            )
        return looks

    def _absent_run(self, names: Sequence[str]) -> list[bool | Refusal]:
        with self._client.pipeline(transaction=False) as pipeline:
            for name in names:
                pipeline.execute_command("EXISTS", self._prefix + name)
            return [one == 0 for one in pipeline.execute(raise_on_error=False)]

    def _trouble(self, refusal: Refusal) -> PoolError:
        return PoolError(f"OBJECT pool {self.name}: cannot be listed: {refusal.words}")

    def _replace_run(self, asked: Sequence[tuple[str, bytes, Body | None]]) -> list[Refusal | None]:
        answers: list[Refusal | None] = []
        for name, body, expected in asked:
            key = self._prefix + name
            try:
                if expected is None:
                    done: Any = self._client.set(key, body, nx=True)
                else:
                    done = self._client.eval(_REPLACE, 1, key, bytes(expected), body)
            except Exception as error:
                self._leave_replica([error])
                raise
            answers.append(None if done else Refusal(StoreTrouble.TAKEN, f"{name} has changed"))
        return answers


def open_redis_store(
    url: str,
    *,
    ca: str = "",
    name: str = "",
    ttl_s: int = 0,
    limits: RequestLimits = LIMITS,
    open_wait_s: float = OPEN_WAIT_S,
) -> RedisStore:
    """Connect, and ask once.

    Args:
        url: redis://user:password@host:port/database?prefix=kvbm, rediss:// for TLS; further options as redis-py takes
            them. Of a cluster, any node, and database 0.
        ca: file (PEM) of who signs the server's certificate; "" leaves it to `trusted_file`.
        name: where instances reach one server by different addresses; "" derives it from the url, without its password.
        ttl_s: after which an object is forgotten, 0 for never.
    Raises: MissingExtraError: no redis-py. ConfigError: a url that is none. PoolError: the server refuses.
        StoreAwayError: it does not answer.
    """
    parts = _parts(url)
    options = parse_qsl(parts.query)
    prefix = dict(options).get("prefix", "").strip("/")
    bare = urlunsplit(parts._replace(query=urlencode([(key, value) for key, value in options if key != "prefix"])))
    name = name or f"{_shown(urlunsplit(parts._replace(query='')))}{f'?prefix={prefix}' if prefix else ''}"
    try:
        from redis.exceptions import RedisError
    except ModuleNotFoundError as error:
        raise MissingExtraError("redis", "redis") from error
    trusted = trusted_file(ca) if parts.scheme == "rediss" and "ssl_ca_certs" not in dict(options) else ""
    try:
        client = _connect(bare, trusted, limits, open_wait_s)
    except (
        TypeError,
        ValueError,
    ) as error:  # an option that is none, or a value that is none; a host that cannot be one
        raise ConfigError(f"{_shown(url)!r}: {_first_line(error)}; correct it") from None
    except (RedisError, OSError) as error:
        if "not allowed in cluster mode" in str(error):
            raise ConfigError(f"{_shown(url)!r} is a Redis Cluster, which has database 0 alone; correct it") from None
        if _refusal(error).trouble is StoreTrouble.SILENT:
            raise StoreAwayError(name, _why_not(error), forgets=True) from None
        raise PoolError(f"OBJECT pool {name}: {_why_not(error)}") from None
    return RedisStore(name, client, prefix, ttl_s, limits.requests_in_flight)


def _parts(url: str) -> SplitResult:
    """A URL's parts. Raises ConfigError: it is none."""
    try:
        parts = urlsplit(url)
        if parts.scheme in _SCHEMES and parts.hostname and parts.port != 0:
            return parts
    except ValueError:
        pass  # a port or an address that is none; a password is read as such where it has a bare "/"
    raise ConfigError(
        "the store's URL is no redis://host:port/database; correct it: in user and password write / @ : # ? as %2F %40 "
        "%3A %23 %3F"
    )


def _connect(url: str, trusted: str, limits: RequestLimits, open_wait_s: float) -> Redis | RedisCluster:
    """A client that was answered. Raises what redis-py raises."""
    from redis import Redis, RedisCluster
    from redis.backoff import NoBackoff
    from redis.exceptions import RedisClusterException, ResponseError
    from redis.retry import Retry

    waits: dict[str, Any] = {
        "socket_connect_timeout": min(limits.connect_timeout_s, open_wait_s),
        "socket_timeout": min(limits.read_timeout_s, open_wait_s),
        "retry": Retry(NoBackoff(), 0),  # the retries are ours: they heed the deadline
        "health_check_interval": 0,
    }
    if trusted:
        waits["ssl_ca_certs"] = trusted
    client = Redis.from_url(url, max_connections=None, **waits)
    try:
        client.ping()
        try:
            said: Any = client.info("cluster")
        except ResponseError:  # who may not ask: the first put tells
            said = {}
        if not said.get("cluster_enabled"):
            return client
    except BaseException:
        client.close()
        raise
    client.close()
    try:
        return RedisCluster.from_url(url, **(waits | {"retry": Retry(NoBackoff(), _MOVES)}))
    except RedisClusterException as error:
        raise ConnectionError(str(error)) from None


def _attempts(
    work: Callable[[Sequence[Asked]], list[Answer | Refusal]], asked: Sequence[Asked], end: float
) -> list[Answer | Refusal]:
    """One pipeline, again on another connection where the first was cut, as far as the deadline leaves time."""
    attempt = 1
    while True:
        try:
            return work(asked)
        except Exception as error:  # noqa: BLE001 - what is no answer is a refusal, whatever the client raises
            refusal = _refusal(error)
        delay_s = random.uniform(0.0, min(_LONGEST_DELAY_S, _FIRST_DELAY_S * 2 ** (attempt - 1)))  # full jitter
        again = refusal.trouble is StoreTrouble.SILENT and attempt < _ATTEMPTS
        if not again or time.monotonic() + delay_s >= end:
            words = f"{refusal.words} after {attempt} attempts" if attempt > 1 else refusal.words
            return [Refusal(refusal.trouble, words)] * len(asked)
        time.sleep(delay_s)
        attempt += 1


def _split(sizes: Sequence[int], connections: int) -> list[slice]:
    """A run in pipelines: enough for every connection, none above the limits."""
    share = max(1, min(_PIPELINE, -(-len(sizes) // connections)))
    slices: list[slice] = []
    first, held = 0, 0
    for at, size in enumerate(sizes):
        if at > first and (at - first == share or held + size > _PIPELINE_BYTES):
            slices.append(slice(first, at))
            first, held = at, 0
        held += size
    if len(sizes) > first:
        slices.append(slice(first, len(sizes)))
    return slices


def _last(get: Get) -> int:
    """The last byte of a part as GETRANGE counts, which includes it; -1 is the end."""
    counts = [count for count in (get.count, get.most_bytes) if count]
    return get.first + min(counts) - 1 if counts else -1


def _refused(said: object) -> Refusal | None:
    """What an exception among the answers means; None for any other answer."""
    return _refusal(said) if isinstance(said, Exception) else None


def _refusal(error: Exception) -> Refusal:
    """What an exception of the client means."""
    from redis import exceptions as raised

    words = _first_line(error)
    match error:
        case raised.AuthenticationError() | raised.NoPermissionError():
            return Refusal(StoreTrouble.DENIED, words)
        case raised.ConnectionError() | raised.TimeoutError() | OSError():
            return Refusal(StoreTrouble.SILENT, words)
        case (
            raised.ClusterDownError()
            | raised.MasterDownError()
            | raised.TryAgainError()
            | raised.RedisClusterException()
        ):
            return Refusal(StoreTrouble.SILENT, words)
        case raised.MovedError() | raised.AskError():
            return Refusal(
                StoreTrouble.REFUSED,
                f"another node of a Redis Cluster has the key ({words}); allow INFO, by which a cluster is known",
            )
        case _ if words.startswith("WRONGTYPE"):
            return Refusal(StoreTrouble.UNUSABLE, "a key of another type has an object's name")
        case _ if isinstance(error, raised.RedisError):
            return Refusal(StoreTrouble.REFUSED, words)
        case _:
            return Refusal(StoreTrouble.REFUSED, f"{type(error).__name__}: {words}")


def _why_not(error: Exception) -> str:
    if _refusal(error).trouble is StoreTrouble.DENIED:
        return f"the server refuses access ({_first_line(error)}); check user and password in the URL"
    return f"the server does not answer ({_first_line(error)}); check the address and the network"


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:300]


def _shown(url: str) -> str:
    """A URL without user and password."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
