"""Asking the catalog over HTTP: `CatalogClient` for routers and tools, `HttpLocator` for managers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Literal, TypeVar
from urllib.parse import quote

import msgspec
import numpy as np
import structlog
import urllib3

from kvbm.core.answers import (
    MAX_HASHES,
    BlockAnswer,
    ErrorAnswer,
    ForgottenAnswer,
    InstancesAnswer,
    InstanceSummary,
    LookupAnswer,
    LookupRequest,
    NamespacesAnswer,
    NamespaceSummary,
    PositionWanted,
    ReadyAnswer,
    RouteAnswer,
    RouteRequest,
    SnapshotAnswer,
)
from kvbm.core.arguments import check_run, check_seconds, checked_hash, refuse_namespace
from kvbm.core.backend import SequenceHashes
from kvbm.core.checks import check_text, checked_int, kind_of
from kvbm.core.errors import ArgumentTypeError, CatalogError
from kvbm.core.hashing import check_hashable, sequence_hashes
from kvbm.core.ids import HASH_BYTES, InstanceId, Namespace, NamespaceId
from kvbm.locate.credentials import NO_CREDENTIALS, CatalogCredentials, Proof

log = structlog.get_logger()

TIMEOUT_S = 5.0
CONNECTIONS = 16
BACK_OFF_FIRST_S = 0.5
BACK_OFF_MOST_S = 5.0
_POLL_S = 0.05
A = TypeVar("A", bound=msgspec.Struct)


class CatalogRefusedError(CatalogError):
    """The catalog answered with an error.

    Attributes:
        status: of HTTP.
        code: constant that names the error, such as "not_ready".
    """

    def __init__(self, message: str, status: int, code: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class CatalogClient:
    """Asks one catalog. Any thread may call it; connections are kept.

    Every method raises CatalogError, in one sentence, when the catalog does not answer in time, CatalogRefusedError when it answers
    with an error, and ArgumentError before it is asked, for an argument that cannot be used. Close it when it is done with.

    Args:
        url: http://host:port
        hash_tokens: `sequence_hashes` or its native implementation.
        credentials: how this side proves who it is; files that are replaced are read again, and once more after a 401.
    """

    def __init__(
        self,
        url: str,
        timeout_s: float = TIMEOUT_S,
        hash_tokens: SequenceHashes = sequence_hashes,
        credentials: CatalogCredentials = NO_CREDENTIALS,
    ) -> None:
        check_text(url, "url")
        check_seconds(timeout_s, "timeout_s")
        self.url = url.rstrip("/")
        self._timeout_s = timeout_s
        self._hash_tokens = hash_tokens
        self._proof = Proof(credentials, is_tls=self.url.lower().startswith("https://"))
        self._guard = threading.Lock()
        try:
            self._pool = self._new_pool()
        except (urllib3.exceptions.HTTPError, ValueError, KeyError) as error:
            raise CatalogError(f"the catalog's URL {url!r} cannot be used ({error}); write http://host:port") from None

    def close(self) -> None:
        """Give the connections back. Idempotent."""
        self._pool.close()

    def _new_pool(self) -> urllib3.HTTPConnectionPool:
        more = {"ssl_context": self._proof.context} if self._proof.context is not None else {}
        return urllib3.connectionpool.connection_from_url(self.url, maxsize=CONNECTIONS, retries=False, **more)

    def _prove(self, again: bool = False) -> bool:
        """Take files that have changed; whether any has. Requests under way keep the connections they have."""
        with self._guard:
            before = self._proof.context
            changed = self._proof.look(again)
            if self._proof.context is not before:
                self._pool = self._new_pool()
            return changed

    def hashes(self, namespace: Namespace, secret: bytes, tokens: Sequence[int] | np.ndarray) -> bytes:
        """Packed hashes of a prompt's full blocks, made here: the root stays on this side.

        Raises: HashSchemeError: the namespace's blocks are hashed in another way, as vLLM's are. ArgumentError, LayoutError: an
            argument that cannot be used, as `Manager.hash_tokens`.
        """
        if not isinstance(namespace, Namespace):
            raise ArgumentTypeError(
                "namespace", f"is {kind_of(namespace)}; give the Namespace, whose root its id does not tell"
            )
        if not isinstance(secret, bytes):
            raise ArgumentTypeError("secret", f"is {kind_of(secret)}; give bytes, empty where the tenant has no secret")
        if tokens is None:
            raise ArgumentTypeError("tokens", "is None; give a sequence of token ids")
        check_hashable(namespace)
        return self._hash_tokens(tokens, namespace.block_tokens, namespace.root(secret))

    def lookup(
        self,
        namespace: Namespace | NamespaceId,
        hashes: bytes,
        at_least: Sequence[PositionWanted] = (),
        wait_s: float = 1.0,
        timeout_s: float | None = None,
    ) -> LookupAnswer:
        """Who has how much of a prefix.

        Args:
            hashes: packed, in prompt order; `hashes()` makes them from tokens.
            at_least: positions the answer must have seen.
            wait_s: how long the catalog may wait for these.
            timeout_s: of this call, the wait not counted.
        """
        check_run(hashes)
        request = LookupRequest(
            namespace=_named(namespace), hashes=hashes.hex(), at_least=list(at_least), timeout_s=wait_s
        )
        return self._post("/v1/lookup", request, LookupAnswer, self._limit(timeout_s, at_least, wait_s))

    def route(
        self,
        namespace: Namespace | NamespaceId,
        hashes: bytes,
        input_tokens: int,
        at_least: Sequence[PositionWanted] = (),
        wait_s: float = 1.0,
        timeout_s: float | None = None,
        latency: Literal["interactive", "standard", "batch"] = "standard",
        deadline_s: float | None = None,
        phase: Literal["both", "prefill", "decode"] = "both",
    ) -> RouteAnswer:
        """Where to send a prompt. The catalog remembers it as sent, if it is admitted. Arguments as `lookup`.

        Args:
            input_tokens: tokens of the whole prompt.
            latency, deadline_s, phase: as in RouteRequest.
        """
        check_run(hashes)
        tokens = checked_int(input_tokens, "input_tokens")
        request = RouteRequest(
            namespace=_named(namespace), hashes=hashes.hex(), input_tokens=tokens, at_least=list(at_least),
            timeout_s=wait_s, latency=latency, deadline_s=deadline_s, phase=phase,
        )  # fmt: skip
        return self._post("/v1/route", request, RouteAnswer, self._limit(timeout_s, at_least, wait_s))

    def lookup_tokens(
        self, namespace: Namespace, secret: bytes, tokens: Sequence[int] | np.ndarray, timeout_s: float | None = None
    ) -> LookupAnswer:
        """`lookup` of a prompt's tokens, hashed here. Raises HashSchemeError: as `hashes`."""
        return self.lookup(namespace, self.hashes(namespace, secret, tokens), timeout_s=timeout_s)

    def route_tokens(
        self, namespace: Namespace, secret: bytes, tokens: Sequence[int] | np.ndarray, timeout_s: float | None = None
    ) -> RouteAnswer:
        """`route` of a prompt's tokens, hashed here. Raises HashSchemeError: as `hashes`."""
        return self.route(namespace, self.hashes(namespace, secret, tokens), len(tokens), timeout_s=timeout_s)

    def block(self, namespace: Namespace | NamespaceId, block: bytes) -> BlockAnswer:
        """Who holds one block."""
        public = _id(namespace.id if isinstance(namespace, Namespace) else namespace)
        return self._get(f"/v1/blocks/{public.hex()}/{checked_hash(block, 'block').hex()}", BlockAnswer)

    def instances(self) -> list[InstanceSummary]:
        """All instances, by name."""
        return self._get("/v1/instances", InstancesAnswer).instances

    def instance(self, instance: InstanceId | str) -> InstanceSummary | None:
        """One instance; None when the catalog does not know it."""
        return next((found for found in self.instances() if found.instance == instance), None)

    def ask_snapshot(self, instance: InstanceId | str) -> bool:
        """Ask an instance to take a snapshot of what it holds; whether it has heard. CatalogRefusedError: there is no such instance."""
        path = f"/v1/instances/{quote(instance, safe='')}/snapshot"
        status, body = self._send("POST", path, b"", self._timeout_s)
        return self._decode(path, status, body, SnapshotAnswer).heard

    def namespaces(self) -> list[NamespaceSummary]:
        """All namespaces whose fields are known, by id."""
        return self._get("/v1/namespaces", NamespacesAnswer).namespaces

    def ready(self) -> ReadyAnswer:
        """Whether the catalog's answers are complete, and what does not work."""
        status, body = self._send("GET", "/readyz", None, self._timeout_s)
        return self._decode("/readyz", status, body, ReadyAnswer, good=(200, 503))

    def wait_ready(self, timeout_s: float = 30.0) -> None:
        """Wait until the catalog answers and is ready. Raises CatalogError: it is not in time; says why."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            try:
                answer = self.ready()
                why = answer.reason
            except CatalogError as error:
                why = str(error)
            else:
                if answer.ready:
                    return
            if time.monotonic() >= deadline_s:
                raise CatalogError(f"the catalog at {self.url} is not ready after {timeout_s:g} s: {why}")
            time.sleep(_POLL_S)

    def forget(self, instance: InstanceId) -> None:
        """Have an instance forgotten that is gone. Raises CatalogRefusedError: it is alive, unknown, or not known to be gone."""
        path = f"/v1/instances/{quote(instance, safe='')}"
        status, body = self._send("DELETE", path, None, self._timeout_s)
        self._decode(path, status, body, ForgottenAnswer)

    def metrics(self) -> str:
        """The catalog's metrics in Prometheus' text format."""
        status, body = self._send("GET", "/metrics", None, self._timeout_s)
        if status != 200:
            raise self._refusal("/metrics", status, body)
        return body.decode()

    # -- inside -------------------------------------------------------------------------------------------------------

    def _limit(self, timeout_s: float | None, at_least: Sequence[PositionWanted], wait_s: float) -> float:
        return (self._timeout_s if timeout_s is None else timeout_s) + (wait_s if at_least else 0.0)

    def _get(self, path: str, kind: type[A]) -> A:
        status, body = self._send("GET", path, None, self._timeout_s)
        return self._decode(path, status, body, kind)

    def _post(self, path: str, request: msgspec.Struct, kind: type[A], timeout_s: float) -> A:
        status, body = self._send("POST", path, msgspec.json.encode(request), timeout_s)
        return self._decode(path, status, body, kind)

    def _send(self, method: str, path: str, body: bytes | None, timeout_s: float) -> tuple[int, bytes]:
        deadline_s = time.monotonic() + timeout_s
        self._prove()
        status, answer = self._send_once(method, path, body, timeout_s, deadline_s)
        if status == 401 and self._prove(again=True):
            status, answer = self._send_once(method, path, body, timeout_s, deadline_s)
        return status, answer

    def _send_once(
        self, method: str, path: str, body: bytes | None, timeout_s: float, deadline_s: float
    ) -> tuple[int, bytes]:
        headers = {"content-type": "application/json"} if body is not None else {}
        if self._proof.token:
            headers["authorization"] = f"Bearer {self._proof.token}"
        for is_last in (False, True):
            timeout = urllib3.Timeout(total=max(0.001, deadline_s - time.monotonic()))
            try:
                answer = self._pool.request(method, path, body=body, headers=headers, timeout=timeout, retries=False)
                return answer.status, answer.data
            except urllib3.exceptions.ProtocolError as error:
                if is_last:  # the first may be a kept connection that the other side has closed meanwhile
                    raise self._away(_words(error)) from None
            except urllib3.exceptions.NewConnectionError as error:  # which urllib3 counts among the timeouts
                raise self._away(_words(error)) from None
            except urllib3.exceptions.TimeoutError:
                raise self._away(f"no answer to {path} within {timeout_s:g} s") from None
            except urllib3.exceptions.SSLError as error:
                raise CatalogError(
                    f"the catalog at {self.url} and this side do not trust each other ({error}); correct catalog.tls_ca, which signs its "
                    "certificate, and catalog.client_cert, if it asks for one"
                ) from None
            except urllib3.exceptions.HTTPError as error:
                raise self._away(_words(error)) from None
        raise self._away("no connection")

    def _away(self, why: str) -> CatalogError:
        return CatalogError(
            f"the catalog at {self.url} does not answer ({why}); start it with kvbm-catalog serve, or correct catalog.url"
        )

    def _decode(self, path: str, status: int, body: bytes, kind: type[A], good: tuple[int, ...] = (200,)) -> A:
        if status not in good:
            raise self._refusal(path, status, body)
        try:
            return msgspec.json.decode(body, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise CatalogError(
                f"{self.url}{path} answers with something else than a catalog's answer ({error})"
            ) from None

    def _refusal(self, path: str, status: int, body: bytes) -> CatalogError:
        try:
            error = msgspec.json.decode(body, type=ErrorAnswer).error
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return CatalogError(f"{self.url}{path} answers with status {status}; is that the catalog?")
        return CatalogRefusedError(
            f"the catalog at {self.url} refuses: {error.message}; {error.what_to_do}", status, error.code
        )


class HttpLocator:
    """A `Locator` that asks a catalog over HTTP. Any thread may call it.

    While the catalog is away nobody waits for it: after a failure it is not asked for a while that doubles up to 5 s.

    Args:
        credentials: as those of `CatalogClient`.
        clock: seconds, for the back-off.
    """

    def __init__(
        self,
        url: str,
        credentials: CatalogCredentials = NO_CREDENTIALS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = CatalogClient(url, credentials=credentials)
        self._clock = clock
        self._guard = threading.Lock()
        self._back_off_s = 0.0  # 0 while the catalog answers
        self._ask_again_s = 0.0

    def claimed_depth(self, pool: str, namespace: NamespaceId, hashes: bytes, timeout_s: float) -> int:
        """See `Locator.claimed_depth`."""
        if not hashes or (self._back_off_s and self._clock() < self._ask_again_s):
            return 0
        try:
            answer = self._client.lookup(namespace, hashes[: MAX_HASHES * HASH_BYTES], timeout_s=timeout_s)
        except CatalogError as error:
            self._fail(error)
            return 0
        self._succeed()
        return next((found.depth for found in answer.pools if found.pool == pool), 0)

    def close(self) -> None:
        """See `Locator.close`."""
        self._client.close()

    def _fail(self, error: CatalogError) -> None:
        with self._guard:
            is_new = not self._back_off_s
            self._back_off_s = BACK_OFF_FIRST_S if is_new else min(2 * self._back_off_s, BACK_OFF_MOST_S)
            self._ask_again_s = self._clock() + self._back_off_s
        if is_new:
            log.warning("catalog.lost", url=self._client.url, why=str(error))

    def _succeed(self) -> None:
        if not self._back_off_s:
            return
        with self._guard:
            was_away, self._back_off_s = bool(self._back_off_s), 0.0
        if was_away:
            log.info("catalog.found", url=self._client.url)


def _named(namespace: Namespace | NamespaceId) -> str | Namespace:
    return namespace if isinstance(namespace, Namespace) else _id(namespace).hex()


def _id(namespace: NamespaceId) -> NamespaceId:
    """Raises ArgumentError: it is no id of a namespace."""
    refuse_namespace(namespace)
    return namespace


def _words(error: urllib3.exceptions.HTTPError) -> str:
    text = str(error)
    return text.rpartition(": ")[2] or type(error).__name__
