"""Asking the catalog: a client for routers and tools."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, Unpack
from urllib.parse import quote

import msgspec

from kvbm.core import prompt_batches
from kvbm.core.answers import (
    LIMIT,
    MAX_HASHES,
    MAX_INPUT_TOKENS,
    MAX_PEERS,
    MAX_POSITIONS,
    BlockAnswer,
    CandidateLoad,
    ErrorAnswer,
    FindAnswer,
    FindRequest,
    ForgottenAnswer,
    InstancesAnswer,
    InstanceSummary,
    LookupAnswer,
    LookupRequest,
    NamespacesAnswer,
    NamespaceSummary,
    PositionWanted,
    PresenceAnswer,
    PresenceRequest,
    ReadyAnswer,
    RouteAnswer,
    RouteRequest,
    SnapshotAnswer,
    UsageAnswer,
)
from kvbm.core.arguments import check_run, check_seconds, checked_hash
from kvbm.core.backend import SequenceHashes
from kvbm.core.checks import check_text, checked_int, kind_of
from kvbm.core.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    CatalogError,
    CatalogRefusedError,
    LayoutError,
)
from kvbm.core.hashing import sequence_hashes
from kvbm.core.history_answers import HistoryBlock, HistoryBlocks
from kvbm.core.ids import HASH_BYTES, MAX_NAME_BYTES, InstanceId, Namespace, NamespaceId
from kvbm.core.overview import TenantsTold
from kvbm.core.prompt_batches import PromptBatch
from kvbm.core.prompt_tokens import PromptTokens, checked_prompt
from kvbm.core.questions import (
    LATENCIES,
    PHASES,
    checked_limit,
    checked_list,
    checked_names,
    checked_peers,
    checked_place,
    checked_positions,
    checked_seconds,
    checked_wait,
    checked_word,
    id_of,
    named,
)
from kvbm.core.token_questions import LookupMore, RouteMore, TokenQuestions
from kvbm.core.usage import UsageGap, UsageHour, UsageReport, parse_time
from kvbm.core.watch_events import MAX_WATCHED_HASHES, WatchRequest
from kvbm.locate.checkpoint import CHECKPOINT_QUIET_S, fetch_checkpoint
from kvbm.locate.credentials import NO_CREDENTIALS, CatalogCredentials
from kvbm.locate.nats import NatsTransport, is_nats
from kvbm.locate.readiness import POLL_S, Readiness
from kvbm.locate.requests import Carrier, CatalogRequest
from kvbm.locate.transport import CatalogTransport
from kvbm.locate.watching import CatalogWatch
from kvbm.safe_log import SafeLog

log = SafeLog()

TIMEOUT_S = 5.0
_MOST_NAME = 128  # characters of an instance's
A = TypeVar("A", bound=msgspec.Struct)
Q = TypeVar("Q", bound=LookupRequest)
_Entry = TypeVar("_Entry")


class PromptRouteMore(RouteMore, total=False):
    """What may be said with a route of tokens.

    Attributes:
        remember: as in RouteRequest.
    """

    remember: bool


class CatalogClient(TokenQuestions):
    """Asks one catalog. Any thread may call it; connections are kept.

    Every method raises CatalogError, in one sentence, when the catalog does not answer in time, CatalogRefusedError
    when it answers with an error, CatalogClosedError once it is closed, and ArgumentError before it is asked, for an
    argument that cannot be used. `with` closes it. In a program of asyncio use `AsyncCatalogClient`.

    Args:
        url: http://host:port, unix:/path of the socket of a catalog on this machine, or
            nats://host:port/CLUSTER/CALLER, where any catalog of the cluster answers; several with commas between, of
            which the one that answered last is asked first
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
        super().__init__(hash_tokens)
        check_text(url, "url")
        check_seconds(timeout_s, "timeout_s")
        if not isinstance(credentials, CatalogCredentials):
            raise ArgumentTypeError("credentials", f"is {kind_of(credentials)}; give CatalogCredentials")
        self._timeout_s = timeout_s
        self._transport: Carrier = (
            NatsTransport(url, credentials) if is_nats(url) else CatalogTransport(url, credentials)
        )

    @property
    def url(self) -> str:
        """Of the catalog that answered last."""
        return self._transport.url

    def close(self) -> None:
        """Give the connections back. Idempotent."""
        self._transport.close()

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
            wait_s: how long the catalog may wait for these, at most 5.
            timeout_s: of this call, the wait not counted.
            limit: at most this many instances are named, the best first.
            instances: only these are looked at; None for all.
        """
        request = _question(LookupRequest, namespace, hashes, at_least, wait_s, limit, instances)
        return self._post("/v1/lookup", request, LookupAnswer, timeout_s, wait_s if at_least else 0.0)

    def presence(
        self,
        namespace: Namespace | NamespaceId,
        hashes: bytes,
        at_least: Sequence[PositionWanted] = (),
        wait_s: float = 1.0,
        timeout_s: float | None = None,
        limit: int = LIMIT,
        instances: Sequence[str] | None = None,
    ) -> PresenceAnswer:
        """Which of these blocks are held, and by whom; there may be holes. Arguments as `lookup`.

        Args:
            hashes: packed, at most 65,536.
            limit: at most this many instances are named, those with the most blocks first; pools are named always.
        """
        request = _question(PresenceRequest, namespace, hashes, at_least, wait_s, limit, instances)
        return self._post("/v1/presence", request, PresenceAnswer, timeout_s, wait_s if at_least else 0.0)

    def find(
        self,
        namespace: Namespace | NamespaceId,
        hashes: bytes,
        first: int = 0,
        asker: str = "",
        topology: Sequence[str] = (),
        at_least: Sequence[PositionWanted] = (),
        wait_s: float = 1.0,
        timeout_s: float | None = None,
        limit: int = MAX_PEERS,
        instances: Sequence[str] | None = None,
    ) -> FindAnswer:
        """What of these blocks can be read from elsewhere. Arguments as `lookup`.

        Args:
            first, asker, topology: as in FindRequest.
            limit: at most so many instances that lend are named, 1 to 4.
        """
        request = _question(
            FindRequest,
            namespace,
            hashes,
            at_least,
            wait_s,
            checked_peers(limit),
            instances,
            first=checked_int(first, "first", most=MAX_HASHES),
            asker=_asker(asker),
            topology=checked_place(topology),
        )
        return self._post("/v1/find", request, FindAnswer, timeout_s, wait_s if at_least else 0.0)

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
        remember: bool = True,
        elsewhere: CandidateLoad | None = None,
    ) -> RouteAnswer:
        """Where to send a prompt. The catalog remembers it as sent, if it is admitted. Arguments as `lookup`.

        Args:
            input_tokens: tokens of the whole prompt.
            latency, deadline_s, phase, remember, elsewhere: as in RouteRequest.
        """
        request = _question(
            RouteRequest,
            namespace,
            hashes,
            at_least,
            wait_s,
            limit,
            instances,
            input_tokens=checked_int(input_tokens, "input_tokens"),
            latency=checked_word(latency, "latency", LATENCIES),
            deadline_s=None if deadline_s is None else checked_seconds(deadline_s, "deadline_s"),
            phase=checked_word(phase, "phase", PHASES),
            remember=remember,
            elsewhere=elsewhere,
        )
        return self._post("/v1/route", request, RouteAnswer, timeout_s, wait_s if at_least else 0.0)

    def lookup_prompt(
        self, prompt: PromptTokens, timeout_s: float | None = None, **more: Unpack[LookupMore]
    ) -> LookupAnswer:
        request = LookupRequest(**checked_prompt(prompt), **_asked_more(more))
        wait_s = more.get("wait_s", 1.0) if more.get("at_least") else 0.0
        return self._post("/v1/lookup", request, LookupAnswer, timeout_s, wait_s)

    def route_prompt(
        self, prompt: PromptTokens, timeout_s: float | None = None, **more: Unpack[PromptRouteMore]
    ) -> RouteAnswer:
        deadline_s, latency, phase = more.get("deadline_s"), more.get("latency", "standard"), more.get("phase", "both")
        checked_word(latency, "latency", LATENCIES)
        checked_word(phase, "phase", PHASES)
        request = RouteRequest(
            **checked_prompt(prompt),
            **_asked_more(more),
            latency=latency,
            deadline_s=None if deadline_s is None else checked_seconds(deadline_s, "deadline_s"),
            phase=phase,
            remember=more.get("remember", True),
        )
        wait_s = more.get("wait_s", 1.0) if more.get("at_least") else 0.0
        return self._post("/v1/route", request, RouteAnswer, timeout_s, wait_s)

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

    def presence_many(
        self,
        namespace: Namespace | NamespaceId,
        runs: Sequence[bytes],
        timeout_s: float | None = None,
        limit: int = LIMIT,
    ) -> list[PresenceAnswer]:
        """`presence` of several runs of blocks in one request, in the binary form. Arguments as `lookup_many`."""
        batch = _batch(prompt_batches.PRESENCE, namespace, [(run, 0) for run in _checked_prompts(runs)], limit)
        return self._ask_batch("/v1/presence", batch, prompt_batches.decode_presences, timeout_s)

    def find_many(
        self,
        namespace: Namespace | NamespaceId,
        runs: Sequence[bytes],
        firsts: Sequence[int] | None = None,
        asker: str = "",
        topology: Sequence[str] = (),
        timeout_s: float | None = None,
        limit: int = MAX_PEERS,
    ) -> list[FindAnswer]:
        """`find` of several runs of blocks in one request, in the binary form. Arguments as `lookup_many` and `find`.

        Args:
            firsts: of each run; None: of all the first block.
        """
        checked = _checked_prompts(runs)
        begins = (
            [0] * len(checked)
            if firsts is None
            else [checked_int(one, "firsts", most=MAX_HASHES) for one in checked_list(firsts, "firsts")]
        )
        if len(begins) != len(checked):
            raise ArgumentValueError("firsts", f"has {len(begins)} numbers for {len(checked)} runs")
        asked = list(zip(checked, begins, strict=True))
        batch = _batch(prompt_batches.FIND, namespace, asked, checked_peers(limit))
        batch = batch._replace(asker=(_asker(asker), *checked_place(topology)))
        return self._ask_batch("/v1/find", batch, prompt_batches.decode_finds, timeout_s)

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
        given = checked_list(input_tokens, "input_tokens")
        tokens = [checked_int(one, "input_tokens", most=MAX_INPUT_TOKENS) for one in given]
        checked = _checked_prompts(prompts)
        if len(tokens) != len(checked):
            raise ArgumentValueError("input_tokens", f"has {len(tokens)} numbers for {len(checked)} prompts")
        batch = _batch(prompt_batches.ROUTE, namespace, list(zip(checked, tokens, strict=True)), limit)
        return self._ask_batch("/v1/route", batch, prompt_batches.decode_routes, timeout_s)

    def watch(
        self,
        namespace: Namespace | NamespaceId | None = None,
        instance: InstanceId | str | None = None,
        hashes: bytes | None = None,
        after: str | None = None,
        limit: int = LIMIT,
    ) -> CatalogWatch:
        """What changes of a namespace's blocks, of an instance's, or of who has a prefix, from now on.

        Close it when it is done with.

        Args:
            hashes: packed, of a prefix of at most 4,096 blocks; then a namespace is needed.
            after: go on from here: an earlier watch's `position`.
            limit: of a prefix: at most this many instances are named, the best first.
        """
        if namespace is None and (instance is None or hashes is not None):
            raise ArgumentValueError("namespace", "is None; give a namespace, an instance or both")
        if instance is not None:
            check_text(instance, "instance")
        if hashes is not None:
            check_run(hashes)
            if not 0 < len(hashes) // HASH_BYTES <= MAX_WATCHED_HASHES:
                raise ArgumentValueError(
                    "hashes", f"has {len(hashes) // HASH_BYTES} hashes; give 1 to {MAX_WATCHED_HASHES}"
                )
        asked = WatchRequest(
            namespace=None if namespace is None else named(namespace),
            instance=instance,
            hashes=None if hashes is None else hashes.hex(),
            limit=checked_limit(limit),
            after=after,
        )
        return CatalogWatch(self._over_http(), asked, self._timeout_s, self._refusal)

    def block(self, namespace: Namespace | NamespaceId, block: bytes) -> BlockAnswer:
        """Who holds one block."""
        public = id_of(namespace)
        return self._get(f"/v1/blocks/{public.hex()}/{checked_hash(block, 'block').hex()}", BlockAnswer)

    def past_blocks(self, digits: str) -> list[HistoryBlock]:
        """What the catalog's history knows of the blocks whose hashes begin so.

        Raises CatalogRefusedError: it keeps no history, or knows no such block.

        Args:
            digits: 8 to 32 hex digits.
        """
        return self._get(f"/v1/history/block/{_quoted(digits)}", HistoryBlocks).blocks

    def instances(self) -> list[InstanceSummary]:
        """All instances, by name."""

        def page(path: str) -> tuple[list[InstanceSummary], int]:
            answer = self._get(path, InstancesAnswer)
            return answer.instances, answer.more

        return self._pages("/v1/instances", page, lambda last: quote(last.instance, safe=""))

    def instance(self, instance: InstanceId | str) -> InstanceSummary | None:
        """One instance; None when the catalog does not know it."""
        page = self._get(f"/v1/instances?name={_quoted(instance)}", InstancesAnswer)
        return next((found for found in page.instances if found.instance == instance), None)

    def has_forgotten(self, instance: InstanceId | str) -> bool | None:
        """Whether the catalog does not know an instance because it has forgotten it, as InstancesAnswer has it; None
        where it does not tell.
        """
        page = self._get(f"/v1/instances?name={_quoted(instance)}", InstancesAnswer)
        return None if page.forgotten is None else instance in page.forgotten

    def ask_snapshot(self, instance: InstanceId | str) -> bool:
        """Ask an instance to take a snapshot of what it holds; whether it has heard.

        CatalogRefusedError: there is no such instance.
        """
        path = f"/v1/instances/{_quoted(instance)}/snapshot"
        status, body = self._transport.send(CatalogRequest("POST", path, b"", may_repeat=False), self._timeout_s)
        return self._decode(path, status, body, SnapshotAnswer).heard

    def fetch_checkpoint(self, folder: Path, timeout_s: float = CHECKPOINT_QUIET_S) -> bool:
        """Put the catalog's newest checkpoint into a folder; False: it has none. CatalogError: it does not come whole.

        Args:
            timeout_s: nothing comes for so long.
        """
        return fetch_checkpoint(self._over_http(), folder, self._timeout_s, timeout_s, self._refusal)

    def namespaces(self) -> list[NamespaceSummary]:
        """All namespaces whose fields are known, by id."""

        def page(path: str) -> tuple[list[NamespaceSummary], int]:
            answer = self._get(path, NamespacesAnswer)
            return answer.namespaces, answer.more

        return self._pages("/v1/namespaces", page, lambda last: last.id)

    def _pages(
        self, path: str, page: Callable[[str], tuple[list[_Entry], int]], name_of: Callable[[_Entry], str]
    ) -> list[_Entry]:
        """All entries of an answer that comes in pages.

        Args:
            page: entries of one, and how many are behind it.
            name_of: what the next page begins behind.
        """
        found: list[_Entry] = []
        more = True
        while more:
            words = [f"after={name_of(found[-1])}"] if found else []
            if self._transport.page_limit:
                words.append(f"limit={self._transport.page_limit}")
            entries, left = page(f"{path}{'?' if words else ''}{'&'.join(words)}")
            found += entries
            more = left > 0 and bool(entries)
        return found

    def usage(self, since: str = "", until: str = "", tenants: Sequence[str] | None = None) -> UsageReport:
        """What tenants have used, by clock hour, as far as the caller may know. Over HTTP.

        Args:
            since, until: of hours that begin within them: ISO 8601 or Unix seconds; "" for 31 days until now.
            tenants: only of these; None: of all.
        """
        words = [f"from={_time(since, 'since')}"] if since != "" else []
        words += [f"to={_time(until, 'until')}"] if until != "" else []
        if tenants is not None:
            named_tenants = _tenants(tenants)
            words += [f"tenant={quote(tenant, safe='')}" for tenant in named_tenants]
            if not named_tenants:
                return UsageReport()
        if isinstance(self._transport, NatsTransport):
            self._over_http()  # says why not
        hours: list[UsageHour] = []
        gaps: list[UsageGap] = []
        following: list[str] = []
        while True:
            answer = self._get(f"/v1/usage?{'&'.join(words + following)}", UsageAnswer)
            hours += answer.hours
            gaps += answer.gaps
            if not answer.next:
                return UsageReport(hours=tuple(hours), gaps=tuple(gaps))
            following = [f"next={quote(answer.next, safe='')}"]

    def tenants(self) -> TenantsTold:
        """What tenants have in object pools and what they may have, as the overview has it. Over HTTP.

        Up to ten seconds old.
        """
        self._over_http()
        return self._get("/v1/overview", TenantsTold)

    def ready(self) -> ReadyAnswer:
        """Whether the catalog's answers are complete, and what does not work."""
        status, body = self._transport.send(CatalogRequest("GET", "/readyz"), self._timeout_s)
        return self._decode("/readyz", status, body, ReadyAnswer, good=(200, 503))

    def wait_ready(self, timeout_s: float = 30.0) -> None:
        """Wait until the catalog answers and is ready. Raises CatalogError: it is not in time; says why."""
        deadline_s = time.monotonic() + checked_seconds(timeout_s, "timeout_s")
        readiness = Readiness()
        while True:
            with readiness.look():
                readiness.note(self.ready())
            if readiness.is_ready:
                return
            if time.monotonic() >= deadline_s:
                raise readiness.late(self.url, timeout_s)
            time.sleep(POLL_S)

    def forget(self, instance: InstanceId) -> None:
        """Have an instance forgotten that is gone.

        Raises CatalogRefusedError: it is alive, unknown, or not known to be gone.
        """
        path = f"/v1/instances/{_quoted(instance)}"
        status, body = self._transport.send(CatalogRequest("DELETE", path, may_repeat=False), self._timeout_s)
        self._decode(path, status, body, ForgottenAnswer)

    def metrics(self) -> str:
        """The catalog's metrics in Prometheus' text format."""
        status, body = self._transport.send(CatalogRequest("GET", "/metrics"), self._timeout_s)
        if status != 200:
            raise self._refusal("/metrics", status, body)
        return body.decode()

    # -- inside -------------------------------------------------------------------------------------------------------

    def _over_http(self) -> CatalogTransport:
        if not isinstance(self._transport, CatalogTransport):
            raise CatalogError(
                f"what comes piece by piece comes over HTTP, and {self.url} is of NATS; make a client with "
                "http://host:port or unix:/path"
            )
        return self._transport

    def _limit(self, timeout_s: float | None) -> float:
        return self._timeout_s if timeout_s is None else checked_seconds(timeout_s, "timeout_s")

    def _get(self, path: str, kind: type[A]) -> A:
        status, body = self._transport.send(CatalogRequest("GET", path), self._timeout_s)
        return self._decode(path, status, body, kind)

    def _post(self, path: str, request: msgspec.Struct, kind: type[A], timeout_s: float | None, wait_s: float) -> A:
        asked = CatalogRequest("POST", path, msgspec.json.encode(request), wait_s=wait_s)
        status, body = self._transport.send(asked, self._limit(timeout_s) + wait_s)
        return self._decode(path, status, body, kind)

    def _ask_batch(
        self,
        path: str,
        batch: PromptBatch,
        decode: Callable[[bytes, PromptBatch], list[A]],
        timeout_s: float | None,
    ) -> list[A]:
        body, limit_s = prompt_batches.encode_batch(batch), self._limit(timeout_s)
        status, answer = self._transport.send(CatalogRequest("POST", path, body, prompt_batches.CONTENT_TYPE), limit_s)
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


def _time(text: str, name: str) -> str:
    """A time as a part of a URL. Raises ArgumentError: it is none."""
    check_text(text, name)
    if parse_time(text) is None:
        raise ArgumentValueError(name, f"is {text[:80]!r}; give ISO 8601, or Unix seconds")
    return quote(text, safe="")


def _tenants(tenants: Sequence[str]) -> list[str]:
    """Raises ArgumentError: it is no list of names."""
    names = list(checked_list(tenants, "tenants"))
    if len(names) > MAX_POSITIONS:
        raise ArgumentValueError("tenants", f"has {len(names)} names; give at most {MAX_POSITIONS}")
    for name in names:
        check_text(name, "tenants", MAX_NAME_BYTES)
    return names


def _question(
    kind: type[Q],
    namespace: Namespace | NamespaceId,
    hashes: bytes,
    at_least: Sequence[PositionWanted],
    wait_s: float,
    limit: int,
    instances: Sequence[str] | None,
    **more: Any,
) -> Q:
    """A question about blocks; `more` has what only its kind has."""
    check_run(hashes)
    return kind(
        namespace=named(namespace),
        hashes=hashes.hex(),
        at_least=checked_positions(at_least),
        timeout_s=checked_wait(wait_s),
        limit=checked_limit(limit),
        instances=checked_names(instances),
        **more,
    )


def _asked_more(more: LookupMore | PromptRouteMore) -> dict[str, Any]:
    """What every question may have, checked."""
    return {
        "at_least": checked_positions(more.get("at_least", ())),
        "timeout_s": checked_wait(more.get("wait_s", 1.0)),
        "limit": checked_limit(more.get("limit", LIMIT)),
        "instances": checked_names(more.get("instances")),
    }


def _batch(
    kind: int, namespace: Namespace | NamespaceId, prompts: Sequence[tuple[bytes, int]], limit: int
) -> PromptBatch:
    public = id_of(namespace)
    most = prompt_batches.MOST_ROUTES if kind == prompt_batches.ROUTE else prompt_batches.MOST_PROMPTS
    if not 1 <= len(prompts) <= most:
        raise ArgumentValueError("prompts", f"has {len(prompts)} prompts; give 1 to {most}")
    return PromptBatch(kind, checked_limit(limit), public, prompts)


def _quoted(instance: InstanceId | str) -> str:
    """The name of an instance in a path or a query."""
    check_text(instance, "instance")
    return quote(instance, safe="")


def _asker(name: str) -> str:
    check_text(name, "asker")
    if len(name) > _MOST_NAME or "\n" in name:
        raise ArgumentValueError("asker", f"has {len(name)} characters; give the id of an instance, or nothing")
    return name


def _checked_prompts(prompts: Sequence[bytes]) -> Sequence[bytes]:
    """Raises ArgumentError: they are none, or too long together."""
    for hashes in checked_list(prompts, "prompts"):
        check_run(hashes, "prompts")
    total = sum(map(len, prompts)) // HASH_BYTES
    if total > MAX_HASHES:
        raise ArgumentValueError("prompts", f"has {total} hashes; give at most {MAX_HASHES}")
    return prompts
