"""Answers about a prompt, encoded: the same for every way in."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable

import msgspec

from kvbm.catalog.access import Caller
from kvbm.catalog.prompts import ApiError, asked_namespace, bad_tokens, id_of, packed_hashes
from kvbm.catalog.routing import RoutingTask
from kvbm.catalog.service import CatalogService
from kvbm.core import prompt_batches
from kvbm.core.answers import MAX_HASHES, MAX_TOKENS, LookupRequest, RouteAnswer, RouteRequest
from kvbm.core.errors import HashSchemeError, LayoutError
from kvbm.core.hashing import check_hashable
from kvbm.core.ids import HASH_BYTES, InstanceId, Namespace, NamespaceId
from kvbm.telemetry.metrics import CatalogMetrics

NOT_TOLD = "not ready; ask with an operator's token for the reason"  # names and offsets are not for everybody
_NO_SECRET = secrets.token_hex(16)  # of no tenant
_LOOKUPS_OF_A_REQUEST = 8  # in a batch, that cost as much as a request
_encode = msgspec.json.Encoder().encode


class PromptAnswers:
    """Lookups and routes of one running service. Belongs to its loop; every method raises ApiError."""

    def __init__(self, service: CatalogService, metrics: CatalogMetrics) -> None:
        self._service, self._metrics = service, metrics
        self._visible = service.queries.visibility

    def check_ready(self, caller: Caller) -> None:
        """Refuse while the stream is not read to where it ended at the start."""
        if not self._service.is_ready:
            reason = self._service.readiness().reason if caller.sees_all else NOT_TOLD
            raise ApiError(503, "not_ready", reason, "ask again soon; /readyz says when it is ready")

    def hashing(self, caller: Caller, asked: LookupRequest) -> Callable[[], bytes]:
        """What makes the packed hashes of the prompt; it may be called in another thread."""
        if (asked.hashes is None) == (asked.tokens is None):
            raise ApiError(
                422, "hashes_or_tokens", "give either hashes or tokens", "hashes need no secret: prefer them"
            )
        if asked.tokens is not None:
            return self._hashing_of_tokens(caller, asked, asked.tokens)
        given = asked.hashes or ""
        return lambda: packed_hashes(given)

    def lookup(self, caller: Caller, asked: LookupRequest, namespace: Namespace | NamespaceId, hashes: bytes) -> bytes:
        """Who has how much of a prompt.

        Args:
            asked: its hashes and tokens are not looked at.
        """
        begin_s = time.perf_counter()
        answer = _encode(self._service.queries.lookup(namespace, hashes, caller, asked.limit, _only(asked)))
        self._metrics.lookup_s.observe(time.perf_counter() - begin_s)
        return answer

    def route(
        self, caller: Caller, key: str, asked: RouteRequest, namespace: Namespace | NamespaceId, hashes: bytes
    ) -> bytes:
        """Where to send a prompt. Arguments as `lookup`.

        Args:
            key: of the caller, whose routes are remembered together.
        """
        begin_s = time.perf_counter()
        if asked.input_tokens is None:
            raise ApiError(
                422, "input_tokens_missing", "input_tokens is not given", "say how long the prompt is, in tokens"
            )
        task = self._task(caller, key, namespace, hashes, asked.input_tokens)._replace(
            latency=asked.latency, deadline_s=asked.deadline_s, phase=asked.phase
        )
        answer = _encode(self._routed(caller, task, namespace, asked.limit, _only(asked)))
        self._metrics.route_s.observe(time.perf_counter() - begin_s)
        return answer

    def batch(self, caller: Caller, key: str, kind: type[LookupRequest], body: bytes | bytearray) -> tuple[bytes, int]:
        """Several prompts in the binary form.

        Args:
            kind: of request that the path is for.
        Returns: the answers, and as how many more requests they count.
        """
        try:
            asked = prompt_batches.decode_batch(body)
            if (asked.kind == prompt_batches.ROUTE) != (kind is RouteRequest):
                raise LayoutError("lookups go to /v1/lookup, and routes to /v1/route")
        except LayoutError as error:
            raise ApiError(422, "bad_batch", str(error), "see docs/route.md for the binary form") from None
        self.check_ready(caller)
        begin_s, queries = time.perf_counter(), self._service.queries
        head = prompt_batches.answers_head(asked.kind, len(asked.prompts), queries.view_age_s())
        if asked.kind == prompt_batches.LOOKUP:
            answers, cost = queries.lookups_encoded(asked, caller), len(asked.prompts) // _LOOKUPS_OF_A_REQUEST
            self._metrics.lookup_s.observe(time.perf_counter() - begin_s)
        else:
            answers = b"".join(
                prompt_batches.encode_route(
                    self._routed(
                        caller, self._task(caller, key, asked.namespace, hashes, tokens), asked.namespace, asked.limit
                    )
                )
                for hashes, tokens in asked.prompts
            )
            cost = len(asked.prompts) - 1
            self._metrics.route_s.observe(time.perf_counter() - begin_s)
        return head + answers, cost

    def _task(
        self, caller: Caller, key: str, namespace: Namespace | NamespaceId, hashes: bytes, input_tokens: int
    ) -> RoutingTask:
        blocks, fields = len(hashes) // HASH_BYTES, self._fields(caller, namespace)
        block_tokens = fields.block_tokens if fields is not None else input_tokens // blocks if blocks else 1
        if blocks * block_tokens > input_tokens:
            raise ApiError(
                422, "too_many_hashes", f"{blocks} full blocks of {block_tokens} tokens are more than {input_tokens} tokens",
                "give the whole prompt's length as input_tokens, and hashes of full blocks only",
            )  # fmt: skip
        return RoutingTask(id_of(namespace), hashes, input_tokens, max(1, block_tokens), key)

    def _routed(
        self,
        caller: Caller,
        task: RoutingTask,
        namespace: Namespace | NamespaceId,
        limit: int,
        only: list[InstanceId] | None = None,
    ) -> RouteAnswer:
        fields = self._fields(caller, namespace)
        ranked, more = self._service.queries.route(task, fields, namespace, caller, limit, only)
        if not ranked:
            raise ApiError(
                503, "no_instance", "no live instance serves this namespace",
                "start an instance, or see /v1/instances for what is known of each",
            )  # fmt: skip
        return RouteAnswer(
            instance=ranked[0].instance,
            namespace=task.namespace.hex(),
            blocks=len(task.hashes) // HASH_BYTES,
            ranked=ranked,
            admitted=ranked[0].admitted,
            view_age_s=self._service.queries.view_age_s(),
            more=more,
        )

    def _fields(self, caller: Caller, namespace: Namespace | NamespaceId) -> Namespace | None:
        """The fields of the namespace that is asked for: as they are given, or as an instance has told them to this caller's tenants."""
        return namespace if isinstance(namespace, Namespace) else self._visible.fields(caller, namespace)

    def _hashing_of_tokens(self, caller: Caller, asked: LookupRequest, tokens: list[int]) -> Callable[[], bytes]:
        if len(tokens) > MAX_TOKENS:
            raise ApiError(
                422, "too_many_tokens", f"{len(tokens)} tokens; at most {MAX_TOKENS} are taken", "give fewer"
            )
        namespace = asked_namespace(asked)
        fields = self._fields(caller, namespace)
        if fields is None:
            raise ApiError(
                422, "namespace_unknown", f"no instance has told the fields of namespace {id_of(namespace).hex()}",
                "give the namespace's fields instead of its id, or hashes instead of tokens",
            )  # fmt: skip
        try:
            check_hashable(fields)
        except HashSchemeError as error:
            message, _, remedy = str(error).partition("; ")
            raise ApiError(422, "scheme_not_hashable", message, remedy) from None
        if caller.sees_all or fields.tenant in (caller.tenants or ()):
            secret = self._service.secrets.get(fields.tenant, None if fields.tenant else "")
        else:
            secret = _NO_SECRET  # hashed as others are, and found nowhere: whose secrets are known here is not told
        if secret is None:
            raise ApiError(
                422, "tokens_not_hashable",
                f"tokens cannot be hashed here: the catalog does not know the secret of tenant {fields.tenant!r}",
                "hash them where the secret is and give hashes, or set catalog.tenant_secrets",
            )  # fmt: skip
        if fields.block_tokens > MAX_TOKENS:  # more than C++ may be able to say
            return bytes
        hash_tokens, block_tokens, root = (
            self._service.backend.sequence_hashes, fields.block_tokens, fields.root(secret.encode()),
        )  # fmt: skip

        def hashed() -> bytes:
            try:
                hashes = hash_tokens(tokens, block_tokens, root)
            except (LayoutError, OverflowError) as error:
                raise bad_tokens(error) from None
            blocks = len(hashes) // HASH_BYTES
            if blocks > MAX_HASHES:
                raise ApiError(422, "too_many_hashes", f"{blocks} blocks; at most {MAX_HASHES} are taken", "give fewer")
            return hashes

        return hashed


def _only(asked: LookupRequest) -> list[InstanceId] | None:
    return [InstanceId(name) for name in asked.instances] if asked.instances is not None else None
