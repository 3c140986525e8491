"""Asking a cluster whose instances several catalogs divide among them by parts: those that are needed are asked, and
their answers joined.

A catalog knows the instances in its parts alone, so the joined answer has of each instance what its own catalog says.
What is not an instance's, how far a pool of cluster reach is claimed, each catalog knows as far as its instances have
said; the largest counts.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

from msgspec import UNSET

from kvbm.core.answers import (
    LIMIT,
    MAX_INPUT_TOKENS,
    MAX_PEERS,
    BlockAnswer,
    CandidateLoad,
    FindAnswer,
    InstanceSummary,
    LookupAnswer,
    NamespaceSummary,
    PositionWanted,
    PresenceAnswer,
    ReadyAnswer,
    RouteAnswer,
)
from kvbm.core.arguments import check_run, check_seconds
from kvbm.core.backend import SequenceHashes
from kvbm.core.checks import check_text, checked_int
from kvbm.core.errors import ArgumentValueError, CatalogError
from kvbm.core.hashing import sequence_hashes
from kvbm.core.ids import InstanceId, Namespace, NamespaceId
from kvbm.core.missed import joined_missed
from kvbm.core.parts import ALL_PARTS, followed_parts, part_of, words_of
from kvbm.core.prompt_batches import MOST_ROUTES
from kvbm.core.questions import checked_names, id_of
from kvbm.core.token_questions import TokenQuestions
from kvbm.locate.credentials import NO_CREDENTIALS, CatalogCredentials
from kvbm.locate.http import TIMEOUT_S, CatalogClient
from kvbm.locate.joined import (
    NO_LOAD,
    Member,
    Prompt,
    excluded_of,
    joined_finds,
    joined_lookups,
    joined_presences,
    missed_by_all,
    named_of,
    ranked,
    refuse_nobody,
    together,
    wanted_of,
    without_lent,
)
from kvbm.locate.requests import closed, late

_ASKED_AT_ONCE = 16  # questions of the caller's
_LOADS_KEPT = 256  # of namespaces
_LOADS_KEPT_S = 5.0
_PARTS_KEPT_S = 30.0  # which catalog follows what is asked again after so long
_LATE_S = 0.5  # a client's own word that nothing answers comes before ours
A = TypeVar("A")
B = TypeVar("B")


class _Loads(NamedTuple):
    """What the candidates of each catalog were together, and when."""

    at_s: float
    of: dict[CatalogClient, CandidateLoad]


class _Askers:
    """Threads that ask; where the system gives none the caller asks, one after the other."""

    def __init__(self, threads: int) -> None:
        self._threads = ThreadPoolExecutor(threads, "kvbm-parts")
        self._is_closed = False

    def submit(self, ask: Callable[[B], A], what: B) -> Future[A]:
        """Raises RuntimeError: closed."""
        answer: Future[A] = Future()
        taken = threading.Lock()  # by whoever comes first: what could get no thread stays queued for the next

        def work() -> None:
            if not taken.acquire(blocking=False) or not answer.set_running_or_notify_cancel():
                return
            try:
                answer.set_result(ask(what))
            except BaseException as error:  # noqa: BLE001 - as an executor does
                answer.set_exception(error)

        try:
            begun = self._threads.submit(copy_context().run, work)  # a current span is of a context
        except RuntimeError:
            if self._is_closed:
                raise
            work()
        else:
            begun.add_done_callback(lambda done: done.cancelled() and answer.cancel())
        return answer

    def close(self) -> None:
        """Take nothing new, and cancel what nobody has begun."""
        self._is_closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)


class PartedCatalog(TokenQuestions):
    """A `kvbm.Catalog` over those of all parts of a cluster.

    Any thread may call it. Errors are those of `CatalogClient`.

    An answer needs all catalogs that are asked: one that is away is an error, which names its URL. Where catalogs
    follow the same part, the best that one of them says of an instance counts.

    Args:
        urls: as that of `CatalogClient`, one for the catalogs that follow the same parts.
        timeout_s, hash_tokens, credentials: as those of `CatalogClient`.
    """

    def __init__(
        self,
        urls: Sequence[str],
        timeout_s: float = TIMEOUT_S,
        hash_tokens: SequenceHashes = sequence_hashes,
        credentials: CatalogCredentials = NO_CREDENTIALS,
    ) -> None:
        super().__init__(hash_tokens)
        if not urls:
            raise ArgumentValueError("urls", "is empty; give the URL of a catalog for each share of the parts")
        self._timeout_s = timeout_s
        self._clients = [CatalogClient(url, timeout_s, hash_tokens, credentials) for url in urls]
        self._threads = _Askers(_ASKED_AT_ONCE * len(urls))
        self._guard = threading.Lock()
        self._members: list[Member] = []
        self._members_until_s = 0.0
        self._loads: OrderedDict[tuple[NamespaceId, bool], _Loads] = OrderedDict()

    @property
    def url(self) -> str:
        """Of the catalogs that answered last."""
        return ";".join(client.url for client in self._clients)

    def close(self) -> None:
        """Give the connections back. Idempotent."""
        self._threads.close()
        for client in self._clients:
            client.close()

    # -- prompts ------------------------------------------------------------------------------------------------------

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

        As `CatalogClient.lookup`; those of different parts that have as much stand in turns.
        """
        asked = (namespace, hashes, at_least, wait_s, timeout_s, limit, instances)
        return joined_lookups(self._answers(lambda client: client.lookup, *asked), limit)

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
        """Which of these blocks are held, and by whom. As `CatalogClient.presence`."""
        asked = (namespace, hashes, at_least, wait_s, timeout_s, limit, instances)
        return joined_presences(self._answers(lambda client: client.presence, *asked), limit)

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
        """What of these blocks can be read from elsewhere. As `CatalogClient.find`."""
        ask, asked = (
            _finding(first, asker, topology),
            (namespace, hashes, at_least, wait_s, timeout_s, limit, instances),
        )
        return joined_finds(self._answers(ask, *asked), limit)

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
        """Where to send a prompt. As `CatalogClient.route`.

        All are asked for their prices, then the one of the cheapest instance remembers the prompt. Prices depend on the
        load of all candidates: each catalog is told the others' as of the last question of this namespace. Where that
        is long ago, where instances are named, and where some lend blocks of the prompt, all are asked twice.

        Args:
            timeout_s: of all these requests together.
        """
        prompt = Prompt(
            namespace,
            hashes,
            input_tokens,
            at_least,
            wait_s,
            limit,
            checked_names(instances),
            latency,
            deadline_s,
            phase,
            time.monotonic() + self._within_s(timeout_s, at_least, wait_s),
        )
        return self._routed(prompt) or self._routed(prompt._replace(at_least=())) or refuse_nobody(self.url)

    def lookup_many(
        self,
        namespace: Namespace | NamespaceId,
        prompts: Sequence[bytes],
        timeout_s: float | None = None,
        limit: int = LIMIT,
    ) -> list[LookupAnswer]:
        """`lookup` of several prompts. As `CatalogClient.lookup_many`."""
        answers = self._answers_many(lambda client: client.lookup_many, namespace, prompts, timeout_s, limit)
        return [joined_lookups(of_one, limit) for of_one in answers]

    def presence_many(
        self,
        namespace: Namespace | NamespaceId,
        runs: Sequence[bytes],
        timeout_s: float | None = None,
        limit: int = LIMIT,
    ) -> list[PresenceAnswer]:
        """`presence` of several runs of blocks. As `CatalogClient.presence_many`."""
        answers = self._answers_many(lambda client: client.presence_many, namespace, runs, timeout_s, limit)
        return [joined_presences(of_one, limit) for of_one in answers]

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
        """`find` of several runs of blocks. As `CatalogClient.find_many`."""
        answers = self._answers_many(_finding_many(firsts, asker, topology), namespace, runs, timeout_s, limit)
        return [joined_finds(of_one, limit) for of_one in answers]

    def route_many(
        self,
        namespace: Namespace | NamespaceId,
        prompts: Sequence[bytes],
        input_tokens: Sequence[int],
        timeout_s: float | None = None,
        limit: int = LIMIT,
    ) -> list[RouteAnswer]:
        """`route` of several prompts, one after the other;

        `timeout_s` is of each. Arguments as `CatalogClient.route_many`.
        """
        if len(input_tokens) != len(prompts):
            raise ArgumentValueError("input_tokens", f"has {len(input_tokens)} numbers for {len(prompts)} prompts")
        if not 1 <= len(prompts) <= MOST_ROUTES:
            raise ArgumentValueError("prompts", f"has {len(prompts)} prompts; give 1 to {MOST_ROUTES}")
        for hashes, tokens in zip(prompts, input_tokens, strict=True):  # before any is remembered
            check_run(hashes, "prompts")
            checked_int(tokens, "input_tokens", most=MAX_INPUT_TOKENS)
        return [
            self.route(namespace, hashes, tokens, timeout_s=timeout_s, limit=limit)
            for hashes, tokens in zip(prompts, input_tokens, strict=True)
        ]

    # -- blocks, instances, namespaces --------------------------------------------------------------------------------

    def block(self, namespace: Namespace | NamespaceId, block: bytes) -> BlockAnswer:
        """Who holds one block."""
        answers = self._ask(
            lambda member: member.client.block(namespace, block), self._asked(None, self._timeout_s), self._timeout_s
        )
        holders = {(one.name, one.kind, one.tier): one for answer in answers for one in answer.holders}
        return BlockAnswer(
            namespace=answers[0].namespace,
            hash=answers[0].hash,
            holders=[holders[key] for key in sorted(holders)],
            view_age_s=max(answer.view_age_s for answer in answers),
            missed=UNSET if holders else joined_missed(answer.missed for answer in answers),
        )

    def instances(self) -> list[InstanceSummary]:
        """All instances, by name."""
        answers = self._ask(
            lambda member: member.client.instances(), self._asked(None, self._timeout_s), self._timeout_s
        )
        found = {one.instance: one for answer in answers for one in answer}
        return [found[name] for name in sorted(found)]

    def instance(self, instance: InstanceId | str) -> InstanceSummary | None:
        """One instance; None when it is not known."""
        check_text(instance, "instance")
        answers = self._ask(
            lambda member: member.client.instance(instance), self._asked([instance], self._timeout_s), self._timeout_s
        )
        return next((found for found in answers if found is not None), None)

    def has_forgotten(self, instance: InstanceId | str) -> bool | None:
        """Whether a catalog has forgotten an instance, as `CatalogClient.has_forgotten`; None where none tells."""
        check_text(instance, "instance")
        answers = self._ask(
            lambda member: member.client.has_forgotten(instance),
            self._asked([instance], self._timeout_s),
            self._timeout_s,
        )
        return None if all(one is None for one in answers) else any(answers)

    def namespaces(self) -> list[NamespaceSummary]:
        """All namespaces whose fields are known, by id."""
        answers = self._ask(
            lambda member: member.client.namespaces(), self._asked(None, self._timeout_s), self._timeout_s
        )
        found = {one.id: one for answer in answers for one in answer}
        return [found[key] for key in sorted(found)]

    def forget(self, instance: InstanceId) -> None:
        """Have an instance forgotten, by those that follow it. As `CatalogClient.forget`."""
        check_text(instance, "instance")
        self._ask(lambda one: one.client.forget(instance), self._asked([instance], self._timeout_s), self._timeout_s)

    def fetch_checkpoint(self, folder: Path, parts: tuple[int, ...]) -> bool:
        """As `CatalogClient.fetch_checkpoint`, of one that follows these parts and no others;

        False: none does, or it has none.
        """
        return any(one.client.fetch_checkpoint(folder) for one in self._all(self._timeout_s) if one.parts == parts)

    # -- readiness ----------------------------------------------------------------------------------------------------

    def ready(self) -> ReadyAnswer:
        """Whether answers are complete: all parts are followed, by catalogs that are ready."""
        answers = self._found_members()
        reasons = [f"{client.url}: {answer.reason}" for client, answer in answers if not answer.ready]
        try:
            self._check_whole([Member(client, _followed(client, answer)) for client, answer in answers])
        except CatalogError as error:
            reasons.append(str(error))
        return ReadyAnswer(
            ready=not reasons,
            reason="; ".join(reasons),
            degraded="; ".join(f"{client.url}: {answer.degraded}" for client, answer in answers if answer.degraded),
            stream_sequence=_all_told(min, [answer.stream_sequence for _, answer in answers]),
            lag_messages=_all_told(max, [answer.lag_messages for _, answer in answers]),
        )

    def wait_ready(self, timeout_s: float = 30.0) -> None:
        """Wait until all catalogs answer and are ready.

        Raises CatalogError: they are not in time, or some parts are followed by none.
        """
        deadline_s = time.monotonic() + timeout_s
        for client in self._clients:
            client.wait_ready(max(0.0, deadline_s - time.monotonic()))
        self._forget_members()
        self._all(self._timeout_s)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _routed(self, prompt: Prompt) -> RouteAnswer | None:
        """The answer to a prompt, which is remembered;

        None: whoever is to serve it has just gone, or is in a part that another follows now.

        Raises CatalogRefusedError: there is nobody.
        """
        key = (id_of(prompt.namespace), prompt.phase == "decode")
        members = self._asked(prompt.names, prompt.left_s(), prompt.at_least)
        known = self._known_loads(key) if prompt.names is None else {}
        answers, loads = self._prices(prompt, members, known)
        is_lent = any(load.lent for load in loads.values())
        if len(members) > 1 and (is_lent or any(one.client not in known for one in members)):
            answers, loads = self._prices(prompt._replace(at_least=()), members, loads)
        if prompt.names is None:
            self._keep_loads(key, {client: without_lent(load) for client, load in loads.items()})
        found = [answer for answer in answers if answer is not None]
        offers = ranked(zip(members, answers, strict=True), prompt.hashes)
        if not offers:
            refuse_nobody(self.url)
        best = offers[0].ranked
        if best.admitted and not prompt.remembered(offers[0], together(loads.values())):
            self._forget_members()
            return None
        return RouteAnswer(
            instance=best.instance,
            namespace=found[0].namespace,
            blocks=found[0].blocks,
            ranked=[offer.ranked for offer in offers[: prompt.limit]],
            view_age_s=max(one.view_age_s for one in found),
            more=sum(one.more for one in found) + max(0, len(offers) - prompt.limit),
            admitted=best.admitted,
            excluded=excluded_of(found, prompt.limit),
            missed=UNSET if any(one.ranked.depth for one in offers) else missed_by_all(found),
        )

    def _prices(
        self, prompt: Prompt, members: Sequence[Member], known: Mapping[CatalogClient, CandidateLoad]
    ) -> tuple[list[RouteAnswer | None], dict[CatalogClient, CandidateLoad]]:
        """What each says, and what its candidates are together. `known`: what they are, as far as is known."""

        def ask(member: Member) -> RouteAnswer | None:
            return prompt.priced(
                member, together(load for client, load in known.items() if client is not member.client)
            )

        answers = self._ask(ask, members, prompt.left_s())
        loads = {
            one.client: answer.candidates if answer is not None and answer.candidates is not None else NO_LOAD
            for one, answer in zip(members, answers, strict=True)
        }
        return answers, loads

    def _answers(
        self,
        ask: Callable[[CatalogClient], Callable[..., A]],
        namespace: Namespace | NamespaceId,
        hashes: bytes,
        at_least: Sequence[PositionWanted],
        wait_s: float,
        timeout_s: float | None,
        limit: int,
        instances: Sequence[str] | None,
    ) -> list[A]:
        """What each says of some blocks. `ask`: how a catalog is asked."""
        names, within_s = checked_names(instances), self._within_s(timeout_s, at_least, wait_s)

        def answer(member: Member) -> A:
            wanted, only = wanted_of(member, at_least), named_of(member, names)
            return ask(member.client)(namespace, hashes, wanted, wait_s, timeout_s, limit, only)

        return self._ask(answer, self._asked(names, within_s, at_least), within_s)

    def _answers_many(
        self,
        ask: Callable[[CatalogClient], Callable[..., list[A]]],
        namespace: Namespace | NamespaceId,
        runs: Sequence[bytes],
        timeout_s: float | None,
        limit: int,
    ) -> Iterator[tuple[A, ...]]:
        """The same of several runs of blocks: run by run what all of them say."""
        within_s = self._within_s(timeout_s)
        answers = self._ask(
            lambda member: ask(member.client)(namespace, runs, timeout_s, limit), self._asked(None, within_s), within_s
        )
        return zip(*answers, strict=True)

    def _within_s(self, timeout_s: float | None, at_least: Sequence[PositionWanted] = (), wait_s: float = 0.0) -> float:
        if timeout_s is not None:
            check_seconds(timeout_s, "timeout_s")
        return (self._timeout_s if timeout_s is None else timeout_s) + (wait_s if at_least else 0.0)

    def _ask(self, ask: Callable[[Member], A], members: Sequence[Member], within_s: float) -> list[A]:
        """All of them beside each other.

        Raises what the first of them raises; CatalogError: others of our questions are in the way.
        """
        until_s = time.monotonic() + within_s + _LATE_S
        waiting = [self._submit(ask, member) for member in members[1:]]
        try:
            return [ask(members[0]), *(one.result(max(0.0, until_s - time.monotonic())) for one in waiting)]
        except TimeoutError:
            raise CatalogError(
                f"the catalogs at {self.url} do not answer within {within_s:g} s; ask fewer questions at a time, or "
                "give them more time"
            ) from None
        finally:
            for one in waiting:
                one.cancel()  # what has begun ends by itself

    def _submit(self, ask: Callable[[B], A], what: B) -> Future[A]:
        try:
            return self._threads.submit(ask, what)
        except RuntimeError:  # it takes no more
            raise closed(self.url) from None

    def _asked(
        self, instances: Iterable[str] | None, within_s: float, at_least: Sequence[PositionWanted] = ()
    ) -> list[Member]:
        """Those that follow some instances, or all; at least one, so that there is an answer."""
        members = self._all(within_s)
        if instances is None:
            return members
        wanted = {part_of(name) for name in (*instances, *(one.instance for one in at_least))}
        return [member for member in members if not wanted.isdisjoint(member.parts)] or members[:1]

    def _all(self, within_s: float) -> list[Member]:
        """Which catalog follows what. Raises CatalogError: nobody follows some parts.

        One caller looks anew, the others go on with what is known. A catalog that does not answer then follows what it
        did: it is an error to those that need it, and to nobody else.
        """
        now_s = time.monotonic()
        with self._guard:
            known = self._members
            if known and now_s < self._members_until_s:
                return known
            self._members_until_s = now_s + _PARTS_KEPT_S
        of = {member.client: member.parts for member in known}
        answers = [self._submit(lambda one: one.ready(), client) for client in self._clients]
        members = []
        for client, answer in zip(self._clients, answers, strict=True):
            try:
                parts = _followed(client, answer.result(max(0.0, now_s + within_s + _LATE_S - time.monotonic())))
            except (CatalogError, TimeoutError) as error:
                if client not in of:
                    raise late(client.url, "/readyz", within_s) if isinstance(error, TimeoutError) else error from None
                parts = of[client]
            members.append(Member(client, parts))
        try:
            self._check_whole(members)
        except CatalogError:
            self._forget_members()  # nobody goes on with what was
            raise
        with self._guard:
            self._members = members
        return members

    def _forget_members(self) -> None:
        with self._guard:
            self._members = []

    def _found_members(self) -> list[tuple[CatalogClient, ReadyAnswer]]:
        answers = [self._submit(lambda one: one.ready(), client) for client in self._clients]
        return [(client, answer.result()) for client, answer in zip(self._clients, answers, strict=True)]

    def _check_whole(self, members: Sequence[Member]) -> None:
        missing = tuple(sorted(set(ALL_PARTS).difference(*(member.parts for member in members))))
        if missing:
            raise CatalogError(
                f"no catalog of {self.url} follows parts {words_of(missing) or 'at all'} of the cluster; name one that "
                "does, or add "
                "them to its catalog.parts"
            )

    def _known_loads(self, key: tuple[NamespaceId, bool]) -> Mapping[CatalogClient, CandidateLoad]:
        """What the candidates of each were together a moment ago; nothing where the last question is older."""
        with self._guard:
            loads = self._loads.get(key)
        return loads.of if loads is not None and time.monotonic() < loads.at_s + _LOADS_KEPT_S else {}

    def _keep_loads(self, key: tuple[NamespaceId, bool], of: dict[CatalogClient, CandidateLoad]) -> None:
        with self._guard:
            self._loads[key] = _Loads(time.monotonic(), of)
            self._loads.move_to_end(key)
            if len(self._loads) > _LOADS_KEPT:
                self._loads.popitem(last=False)


def catalogs_at(
    url: str,
    timeout_s: float = TIMEOUT_S,
    hash_tokens: SequenceHashes = sequence_hashes,
    credentials: CatalogCredentials = NO_CREDENTIALS,
) -> CatalogClient | PartedCatalog:
    """A client of a catalog, or of those of all parts with semicolons between.

    Raises CatalogError: a URL cannot be used.
    """
    urls = [one for one in url.split(";") if one.strip()]
    if len(urls) > 1:
        return PartedCatalog(urls, timeout_s, hash_tokens, credentials)
    return CatalogClient(url, timeout_s, hash_tokens, credentials)


def _finding(first: int, asker: str, topology: Sequence[str]) -> Callable[[CatalogClient], Callable[..., FindAnswer]]:
    """How a catalog is asked what can be read."""
    return lambda client: lambda space, hashes, *asked: client.find(space, hashes, first, asker, topology, *asked)


def _finding_many(
    firsts: Sequence[int] | None, asker: str, topology: Sequence[str]
) -> Callable[[CatalogClient], Callable[..., list[FindAnswer]]]:
    """The same of several runs of blocks."""
    return lambda client: lambda space, runs, *asked: client.find_many(space, runs, firsts, asker, topology, *asked)


def _all_told(of: Callable[[list[int]], int], numbers: Sequence[int | None]) -> int | None:
    """The least or the largest of numbers; None where one is not told."""
    told = [number for number in numbers if number is not None]
    return of(told) if len(told) == len(numbers) else None


def _followed(client: CatalogClient, answer: ReadyAnswer) -> tuple[int, ...]:
    return followed_parts(answer.parts, f"{client.url}/readyz")
