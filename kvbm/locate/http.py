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

from kvbm.core import prompt_batches
from kvbm.core.answers import (
    LIMIT,
    MAX_HASHES,
    MAX_INPUT_TOKENS,
    MAX_LIMIT,
    MAX_POSITIONS,
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
from kvbm.core.errors import ArgumentTypeError, ArgumentValueError, CatalogError, LayoutError
from kvbm.core.hashing import check_hashable, sequence_hashes
from kvbm.core.ids import HASH_BYTES, InstanceId, Namespace, NamespaceId
from kvbm.core.prompt_batches import PromptBatch
from kvbm.locate.credentials import NO_CREDENTIALS, CatalogCredentials
from kvbm.locate.transport import Request, Transport

log = structlog.get_logger()

TIMEOUT_S = 5.0
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
        url: http://host:port, or unix:/path of the socket of a catalog on this machine; several with commas between, of which the one
            that answered last is asked first
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
        self._timeout_s = timeout_s
        self._hash_tokens = hash_tokens
        self._transport = Transport(url, credentials)

    @property
    def url(self) -> str:
        """Of the catalog that answered last."""
        return self._transport.url

    def close(self) -> None:
        """Give the connections back. Idempotent."""
        self._transport.close()

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
        limit: int = LIMIT,
        instances: Sequence[str] | None = None,
    ) -> LookupAnswer:
        """Who has how much of a prefix.

        Args:
            hashes: packed, in prompt order; `hashes()` makes them from tokens.
            at_least: positions the answer must have seen.
            wait_s: how long the catalog may wait for these.
            timeout_s: of this call, the wait not counted.
            limit: at most this many instances are named, the best first.
            instances: only these are looked at; None for all.
        """
        check_run(hashes)
        request = LookupRequest(
            namespace=_named(namespace), hashes=hashes.hex(), at_least=list(at_least), timeout_s=wait_s,
            limit=_checked_limit(limit), instances=_checked_names(instances),
        )  # fmt: skip
        return self._post("/v1/lookup", request, LookupAnswer, self._limit(timeout_s, at_least, wait_s))

    def route(
        self,
        namespace: Namespace | NamespaceId,
        hashes: bytes,
        input_tokens: int,
        at_least: Sequence[PositionWanted] = (),
        wait_s: float = 1.0,
        timeout_s: float | None = None,
        limit: int = LIMIT,
        instances: Sequence[str] | None = None,
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
            timeout_s=wait_s, limit=_checked_limit(limit), instances=_checked_names(instances), latency=latency,
            deadline_s=deadline_s, phase=phase,
        )  # fmt: skip
        return self._post("/v1/route", request, RouteAnswer, self._limit(timeout_s, at_least, wait_s))

    def lookup_many(
        self,
        namespace: Namespace | NamespaceId,
        prompts: Sequence[bytes],
        timeout_s: float | None = None,
        limit: int = LIMIT,
    ) -> list[LookupAnswer]:
        """`lookup` of several prompts in one request, in the binary form; answers name no excluded instances.

        Args:
            prompts: packed hashes of each; at most 256, and 65,536 hashes together.
        """
        batch = _batch(prompt_batches.LOOKUP, namespace, [(hashes, 0) for hashes in _checked_prompts(prompts)], limit)
        return self._ask_batch("/v1/lookup", batch, prompt_batches.decode_lookups, timeout_s)

    def route_many(
        self,
        namespace: Namespace | NamespaceId,
        prompts: Sequence[bytes],
        input_tokens: Sequence[int],
        timeout_s: float | None = None,
        limit: int = LIMIT,
    ) -> list[RouteAnswer]:
        """`route` of several prompts in one request, one after the other. Arguments as `lookup_many`.

        Args:
            prompts: at most 64.
            input_tokens: tokens of each whole prompt.
        """
        tokens = [checked_int(one, "input_tokens", most=MAX_INPUT_TOKENS) for one in input_tokens]
        checked = _checked_prompts(prompts)
        if len(tokens) != len(checked):
            raise ArgumentValueError("input_tokens", f"has {len(tokens)} numbers for {len(checked)} prompts")
        batch = _batch(prompt_batches.ROUTE, namespace, list(zip(checked, tokens, strict=True)), limit)
        return self._ask_batch("/v1/route", batch, prompt_batches.decode_routes, timeout_s)

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
        found: list[InstanceSummary] = []
        more = True
        while more:
            after = f"?after={quote(found[-1].instance, safe='')}" if found else ""
            page = self._get(f"/v1/instances{after}", InstancesAnswer)
            found += page.instances
            more = page.more > 0 and bool(page.instances)
        return found

    def instance(self, instance: InstanceId | str) -> InstanceSummary | None:
        """One instance; None when the catalog does not know it."""
        page = self._get(f"/v1/instances?name={quote(instance, safe='')}", InstancesAnswer)
        return next((found for found in page.instances if found.instance == instance), None)

    def ask_snapshot(self, instance: InstanceId | str) -> bool:
        """Ask an instance to take a snapshot of what it holds; whether it has heard. CatalogRefusedError: there is no such instance."""
        path = f"/v1/instances/{quote(instance, safe='')}/snapshot"
        status, body = self._transport.send(Request("POST", path, b"", may_repeat=False), self._timeout_s)
        return self._decode(path, status, body, SnapshotAnswer).heard

    def namespaces(self) -> list[NamespaceSummary]:
        """All namespaces whose fields are known, by id."""
        return self._get("/v1/namespaces", NamespacesAnswer).namespaces

    def ready(self) -> ReadyAnswer:
        """Whether the catalog's answers are complete, and what does not work."""
        status, body = self._transport.send(Request("GET", "/readyz"), self._timeout_s)
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
        status, body = self._transport.send(Request("DELETE", path, may_repeat=False), self._timeout_s)
        self._decode(path, status, body, ForgottenAnswer)

    def metrics(self) -> str:
        """The catalog's metrics in Prometheus' text format."""
        status, body = self._transport.send(Request("GET", "/metrics"), self._timeout_s)
        if status != 200:
            raise self._refusal("/metrics", status, body)
        return body.decode()

    # -- inside -------------------------------------------------------------------------------------------------------

    def _limit(self, timeout_s: float | None, at_least: Sequence[PositionWanted], wait_s: float) -> float:
        return (self._timeout_s if timeout_s is None else timeout_s) + (wait_s if at_least else 0.0)

    def _get(self, path: str, kind: type[A]) -> A:
        status, body = self._transport.send(Request("GET", path), self._timeout_s)
        return self._decode(path, status, body, kind)

    def _post(self, path: str, request: msgspec.Struct, kind: type[A], timeout_s: float) -> A:
        status, body = self._transport.send(Request("POST", path, msgspec.json.encode(request)), timeout_s)
        return self._decode(path, status, body, kind)

    def _ask_batch(
        self,
        path: str,
        batch: PromptBatch,
        decode: Callable[[bytes, PromptBatch], list[A]],
        timeout_s: float | None,
    ) -> list[A]:
        body, limit_s = prompt_batches.encode_batch(batch), self._limit(timeout_s, (), 0.0)
        status, answer = self._transport.send(Request("POST", path, body, prompt_batches.CONTENT_TYPE), limit_s)
        if status != 200:
            raise self._refusal(path, status, answer)
        try:
            return decode(answer, batch)
        except LayoutError as error:
            raise CatalogError(
                f"{self.url}{path} answers with something else than a catalog's answers ({error})"
            ) from None

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


def _batch(
    kind: int, namespace: Namespace | NamespaceId, prompts: Sequence[tuple[bytes, int]], limit: int
) -> PromptBatch:
    public = _id(namespace.id if isinstance(namespace, Namespace) else namespace)
    most = prompt_batches.MOST_PROMPTS if kind == prompt_batches.LOOKUP else prompt_batches.MOST_ROUTES
    if not 1 <= len(prompts) <= most:
        raise ArgumentValueError("prompts", f"has {len(prompts)} prompts; give 1 to {most}")
    return PromptBatch(kind, _checked_limit(limit), public, prompts)


def _checked_prompts(prompts: Sequence[bytes]) -> Sequence[bytes]:
    """Raises ArgumentError: they are none, or too long together."""
    for hashes in prompts:
        check_run(hashes, "prompts")
    total = sum(map(len, prompts)) // HASH_BYTES
    if total > MAX_HASHES:
        raise ArgumentValueError("prompts", f"has {total} hashes; give at most {MAX_HASHES}")
    return prompts


def _checked_limit(limit: int) -> int:
    """Raises ArgumentError: there is no such limit."""
    wanted = checked_int(limit, "limit")
    if not 1 <= wanted <= MAX_LIMIT:
        raise ArgumentValueError("limit", f"is {wanted}; give 1 to {MAX_LIMIT}")
    return wanted


def _checked_names(instances: Sequence[str] | None) -> list[str] | None:
    """Raises ArgumentError: they are none, or too many."""
    if instances is None:
        return None
    if isinstance(instances, str):
        raise ArgumentTypeError("instances", "is one text; give a list of names")
    if len(instances) > MAX_POSITIONS:
        raise ArgumentValueError("instances", f"has {len(instances)} names; give at most {MAX_POSITIONS}")
    for name in instances:
        check_text(name, "instances")
    return list(instances)


def _named(namespace: Namespace | NamespaceId) -> str | Namespace:
    return namespace if isinstance(namespace, Namespace) else _id(namespace).hex()


def _id(namespace: NamespaceId) -> NamespaceId:
    """Raises ArgumentError: it is no id of a namespace."""
    refuse_namespace(namespace)
    return namespace
