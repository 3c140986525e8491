"""What a tenant can find out of another by asking the catalog: nothing.

Status, body and time of "not yours" are those of "not there".

Times are taken in process, through the whole ASGI application, because 10,000 samples a pair through sockets would take
minutes; a smaller suite goes through a real TLS socket. What counts as noise is measured in the same run by a twin: two
questions for things that are both not there.
"""

from __future__ import annotations

import asyncio
import gc
import math
import random
import sys
import time
import types
from collections.abc import Callable, Coroutine, Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import urllib3

from kvbm.assembly import NATIVE, NATIVE_INDEX
from kvbm.catalog.access.callers import LOOK_S, Access, AccessOptions
from kvbm.catalog.access.file import NewToken, add_token, read_entries, write_entries
from kvbm.catalog.edge.api import create_surface
from kvbm.catalog.edge.server import CatalogThread
from kvbm.catalog.service import CatalogService, ServiceSettings
from kvbm.config import LimitSettings
from kvbm.core.ids import InstanceId, Namespace
from kvbm.streams.nats.stream import NatsStream
from tests.callers import ACME, BETA, SECRETS, TOKENS, Answered, ask, hashes_in, publish
from tests.certificates import certify
from tests.eventually import eventually, eventually_async
from tests.nats_fixture import WAIT_S, cluster, make_frame, nats_url, new_cluster, patient  # noqa: F401

SAMPLES = 10_000
OVER_TLS = 300
UNLIMITED = LimitSettings(
    requests_per_s=1e9, burst=1 << 40
)  # a refusal for too many requests takes as long whatever is asked for
ABSENT = Namespace(model="m", block_tokens=4, tenant="nova")  # a tenant that nobody has, with a name as long
ABSENT_TOO = Namespace(model="m", block_tokens=4, tenant="zeta")


class Question(NamedTuple):
    """A request."""

    method: str
    path: str
    body: Any = None


Ask = Callable[[Question], Coroutine[Any, Any, Answered]]


class Probe(NamedTuple):
    """A way to ask for what is another tenant's, and the same for things that are not there.

    Two of these where a request takes some time; six where it is refused at once, because then a name's place in a hash
    table shows.

    Attributes:
        told_apart: what a caller has sent, which answers may echo; replaced before bodies are compared.
    """

    name: str
    not_yours: Question
    not_there: tuple[Question, ...]
    told_apart: tuple[str, ...]


def fields(namespace: Namespace) -> dict[str, Any]:
    return dict(msgspec.to_builtins(namespace))


def probes() -> list[Probe]:
    ids = tuple(space.id.hex() for space in (BETA, ABSENT, ABSENT_TOO))
    tenants = ("beta", "nova", "zeta")
    packed = hashes_in(BETA).hex()
    instances = ("of-beta", "of-nova", "of-zeta")

    def made(name: str, told: tuple[str, ...], question: Callable[[int], Question]) -> Probe:
        return Probe(name, question(0), tuple(question(at) for at in range(1, len(told))), told)

    def posted(path: str, **body: Any) -> Question:
        return Question("POST", path, body)

    others = (*instances, "of-iota", "of-teta", "of-zorn", "of-ypsi")
    spaces = [fields(space) for space in (BETA, ABSENT, ABSENT_TOO)]
    wanted = [{"instance": one, "epoch": 1, "offset": 1} for one in instances]
    return [
        made("lookup of hashes by id", ids, lambda at: posted("/v1/lookup", namespace=ids[at], hashes=packed)),
        made("lookup of hashes by fields", ids, lambda at: posted("/v1/lookup", namespace=spaces[at], hashes=packed)),
        made("lookup of tokens by id", ids, lambda at: posted("/v1/lookup", namespace=ids[at], tokens=TOKENS)),
        made("lookup of tokens by fields", ids, lambda at: posted("/v1/lookup", namespace=spaces[at], tokens=TOKENS)),
        made(
            "lookup at least",
            instances,
            lambda at: posted("/v1/lookup", namespace=ACME.id.hex(), hashes=packed, at_least=[wanted[at]], timeout_s=0),
        ),
        made(
            "route of hashes by id",
            ids,
            lambda at: posted("/v1/route", namespace=ids[at], hashes=packed, input_tokens=43),
        ),
        made(
            "route of hashes by fields",
            ids,
            lambda at: posted("/v1/route", namespace=spaces[at], hashes=packed, input_tokens=43),
        ),
        made("route of tokens by fields", tenants, lambda at: posted("/v1/route", namespace=spaces[at], tokens=TOKENS)),
        made("block", ids, lambda at: Question("GET", f"/v1/blocks/{ids[at]}/{packed[:32]}")),
        made("snapshot", others, lambda at: Question("POST", f"/v1/instances/{others[at]}/snapshot")),
        made("deletion", others, lambda at: Question("DELETE", f"/v1/instances/{others[at]}")),
    ]


PROBES = probes()
YOURS = Question("POST", "/v1/lookup", {"namespace": ACME.id.hex(), "hashes": hashes_in(ACME).hex()})
NOT_THERE = PROBES[0].not_there[0]


class Site(NamedTuple):
    """A catalog in this process, and who asks it."""

    runner: asyncio.Runner
    service: CatalogService
    app: Any
    router: str
    operator: str
    offset: int

    def ask(self, question: Question, token: str) -> Answered:
        return self.runner.run(ask(self.app, question.method, question.path, question.body, token))


@pytest.fixture(scope="module")
def site(nats_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:  # noqa: F811
    folder = tmp_path_factory.mktemp("probes")
    access, within = folder / "access.toml", new_cluster("probes")
    router = add_token(access, NewToken("acme", "router", ["acme"]), time.time())
    operator = add_token(access, NewToken("ops", "operator"), time.time())
    settings = ServiceSettings(
        nats_url=nats_url,
        database_url=f"sqlite+aiosqlite:///{folder / 'catalog.db'}",
        cluster=within,
        tenant_secrets=SECRETS,
        liveness_s=600.0,
        limits=UNLIMITED,
    )

    async def start() -> tuple[CatalogService, int]:
        service = await CatalogService.start(settings, NATIVE, NATIVE_INDEX)
        await publish(nats_url, within, "of-acme", ACME)
        offset = await publish(nats_url, within, "of-beta", BETA)
        await eventually_async(
            lambda: (
                service.is_ready
                and [one.state for one in service.queries.instances()] == ["live", "live"]
                and len(service.queries.namespaces()) == 2
                and all(one.offset for one in service.queries.instances())
            ),
            "not all is read",
        )
        return service, offset

    with asyncio.Runner() as runner:
        service, offset = runner.run(start())
        try:
            yield Site(runner, service, create_surface(service, "", Access(str(access))).app, router, operator, offset)
        finally:
            runner.run(service.close())


@pytest.mark.nightly
@pytest.mark.parametrize("probe", PROBES, ids=lambda probe: probe.name)
def test_what_is_not_yours_answers_as_what_is_not_there(site: Site, probe: Probe) -> None:
    questions = (probe.not_yours, *probe.not_there)
    found = [site.ask(question, site.router) for question in questions]
    bodies = [one.body.replace(told.encode(), b"*") for one, told in zip(found, probe.told_apart, strict=True)]
    assert {one.status for one in found} == {found[0].status}
    assert set(bodies) == {bodies[0]}
    assert found[0].status in (200, 403, 422, 503, 504)


def test_the_same_questions_tell_an_operator_the_difference(site: Site) -> None:
    """Else the probes would ask for nothing."""
    for probe in PROBES[:9]:
        found = [site.ask(question, site.operator) for question in (probe.not_yours, probe.not_there[0])]
        told = [one.body.replace(name.encode(), b"*") for one, name in zip(found, probe.told_apart, strict=False)]
        if probe.name != "route of tokens by fields":
            assert told[0] != told[1], probe.name


def test_an_instance_of_another_tenant_is_in_no_answer(site: Site) -> None:
    seen = site.ask(Question("GET", "/v1/instances"), site.router)
    assert b'"instance":"of-acme"' in seen.body
    assert b"of-beta" not in seen.body
    assert b"beta" not in site.ask(Question("GET", "/v1/namespaces"), site.router).body
    routed = site.ask(
        Question(
            "POST", "/v1/route", {"namespace": ACME.id.hex(), "hashes": hashes_in(ACME).hex(), "input_tokens": 43}
        ),
        site.router,
    )
    assert routed.status == 200
    assert [one["instance"] for one in msgspec.json.decode(routed.body)["ranked"]] == ["of-acme"]
    assert {(one["queueing_s"], one["balance_s"]) for one in msgspec.json.decode(routed.body)["ranked"]} == {(0.0, 0.0)}
    summary = msgspec.json.decode(seen.body)["instances"][0]
    assert (summary["offset"], summary["queued_tokens"], summary["held_blocks"], summary["pools"]) == (0, None, {}, [])


@pytest.mark.parametrize("becomes", ["nobody", "metrics"])
def test_whose_token_is_taken_out_or_role_changed_while_it_still_sends_gets_no_answer(
    site: Site, tmp_path: Path, becomes: str
) -> None:
    file, now_s = tmp_path / "access.toml", [0.0]
    token = add_token(file, NewToken("acme", "router", ["acme"]), time.time())
    access = Access(str(file), lambda: now_s[0])
    app = create_surface(site.service, "", access).app

    def change() -> None:
        (entry,) = read_entries(file)
        changed = {
            "nobody": entry._replace(name="other", sha256="0" * 64),
            "metrics": entry._replace(role="metrics", tenants=None),
        }
        write_entries(file, [changed[becomes]])
        now_s[0] += LOOK_S
        access.look()  # which finds the file changed; the next one, that it has stayed so
        now_s[0] += LOOK_S

    def asked(before_body: Callable[[], None] | None) -> Answered:
        return site.runner.run(ask(app, YOURS.method, YOURS.path, YOURS.body, token, before_body))

    assert asked(None).status == 200
    late = asked(change)
    assert (late.status, late.body) == (401 if becomes == "nobody" else 403, asked(None).body)


def test_a_router_hears_that_the_catalog_is_not_ready_and_not_why(
    nats_url: str,  # noqa: F811
    cluster: str,  # noqa: F811
    sqlite_url: str,
    tmp_path: Path,
) -> None:
    """The reason has names of instances, and how many messages there are: all tenants'."""
    access = tmp_path / "access.toml"
    router = add_token(access, NewToken("acme", "router", ["acme"]), time.time())
    operator = add_token(access, NewToken("ops", "operator"), time.time())

    async def work() -> None:
        stream = patient(await NatsStream.connect(nats_url, WAIT_S))
        frames = [make_frame(at).data for at in range(4000)]
        for first in range(0, len(frames), 500):
            await asyncio.gather(
                *(stream.publish(cluster, InstanceId("i"), data) for data in frames[first : first + 500])
            )
        await stream.close()
        settings = ServiceSettings(nats_url=nats_url, database_url=sqlite_url, cluster=cluster)
        service = await CatalogService.start(settings, NATIVE, NATIVE_INDEX)
        try:
            app = create_surface(service, "", Access(str(access))).app
            questions = (YOURS, PROBES[8].not_yours)
            found = [await ask(app, *one, token) for token in (operator, router) for one in questions]
            assert not service.is_ready
            assert [one.status for one in found] == [503] * 4
            said = [msgspec.json.decode(one.body)["error"]["message"] for one in found]
            assert all(one.startswith("reading the stream: at message") for one in said[:2])
            assert set(said[2:]) == {"not ready; ask with an operator's token for the reason"}
        finally:
            await service.close()

    asyncio.run(work())


def steps(site: Site, question: Question) -> list[str]:
    """The functions that are called for a question, in their order: what shows in the time an answer takes, on any
    machine.
    """
    called: list[str] = []

    def note(frame: types.FrameType, event: str, argument: Any) -> None:
        if event == "call":
            called.append(frame.f_code.co_qualname)
        elif event == "c_call":
            called.append(argument.__qualname__)

    async def asked() -> Answered:
        sys.setprofile(note)
        try:
            return await ask(site.app, question.method, question.path, question.body, site.router)
        finally:
            sys.setprofile(None)

    gc.disable()
    try:
        site.runner.run(asked())
    finally:
        gc.enable()
    return called


@pytest.mark.parametrize("probe", PROBES, ids=lambda probe: probe.name)
def test_what_is_not_yours_takes_the_same_steps_as_what_is_not_there(site: Site, probe: Probe) -> None:
    """The first way of what is asked again and again is another: names are kept, and files looked at."""
    for question in (probe.not_yours, *probe.not_there):
        steps(site, question)

    def differs() -> bool:
        """Between two steps other tasks of the catalog may run."""
        return len({tuple(steps(site, question)) for question in (probe.not_yours, *probe.not_there)}) > 1

    assert not all(differs() for _ in range(20))


def test_the_steps_show_a_namespace_that_is_there(site: Site) -> None:
    """Else they would show nothing at all."""
    assert all(steps(site, YOURS) != steps(site, NOT_THERE) for _ in range(20))


class Compared(NamedTuple):
    """How far two kinds of samples are from being below each other equally often, -0.5 to 0.5.

    Attributes:
        pair: what is not yours against all that is not there.
        twin: the farthest that two are apart that are both not there.
    """

    pair: float
    twin: float

    def is_noise(self, count: int = SAMPLES) -> bool:
        """However loud the machine is, a difference beyond three times what samples of one kind may differ by
        is none.
        """
        error = 5 * sign_error(count)
        return abs(self.pair) <= min(max(error, 3 * self.twin), 3 * error)


def sign_error(count: int) -> float:
    """Standard error of `below` for so many samples of one distribution."""
    return 0.5 / math.sqrt(count)


def below(first: np.ndarray, second: np.ndarray) -> float:
    """How often a sample of `first` is below that of `second` taken in the same round, ties half (a sign test).

    In one round, because a machine that is now fast and now slow is both of them alike within a round.
    """
    return float((first < second).mean() + (first == second).mean() / 2)


async def compare(asked: Ask, questions: Sequence[Question], count: int) -> Compared:
    """The first against the others, and these against each other, in an order that changes with every round."""
    times = np.zeros((len(questions), count))
    status = {(await asked(question)).status for question in questions}
    order, dice = list(range(len(questions))), random.Random(1)
    for at in range(count):
        dice.shuffle(order)
        for which in order:
            answer = await asked(questions[which])
            assert answer.status in status, (
                answer.body
            )  # a request refused for another reason takes as long whatever it asks for
            times[which, at] = answer.elapsed_ns
    twins = [abs(below(one, other) - 0.5) for one, other in combinations(times[1:], 2)]
    return Compared(float(np.mean([below(times[0], one) for one in times[1:]])) - 0.5, max(twins))


async def compare_again(asked: Ask, questions: Sequence[Question], count: int = SAMPLES) -> bool:
    """Whether it is noise.

    What looks like more is measured again with twice the samples: a real difference does not go away.
    """
    gc.collect()
    gc.disable()
    try:
        for samples in (count, 2 * count, 4 * count):
            found = await compare(asked, questions, samples)
            if found.is_noise(samples):
                return True
            print(f"{questions[0]!s:.80}: {found.pair:+.4f}, twin {found.twin:.4f}, {samples} samples")
    finally:
        gc.enable()
    return False


@pytest.mark.nightly
@pytest.mark.parametrize("probe", PROBES, ids=lambda probe: probe.name)
def test_what_is_not_yours_takes_as_long_as_what_is_not_there(site: Site, probe: Probe) -> None:
    async def asked(question: Question) -> Answered:
        return await ask(site.app, question.method, question.path, question.body, site.router)

    assert site.runner.run(compare_again(asked, (probe.not_yours, *probe.not_there))), probe.name


@pytest.mark.nightly
def test_the_comparison_sees_a_namespace_that_is_there(site: Site) -> None:
    """Else it would see nothing at all."""

    async def asked(question: Question) -> Answered:
        return await ask(site.app, question.method, question.path, question.body, site.router)

    assert not site.runner.run(compare(asked, (YOURS, NOT_THERE, NOT_THERE), SAMPLES)).is_noise()


@pytest.mark.nightly
def test_a_wrong_token_that_begins_as_a_good_one_takes_as_long_as_any_other(site: Site) -> None:
    """A token that begins as a good one is no nearer to it."""
    tokens = [site.router[:-2] + "AA", *("kvbm_" + letter * 43 for letter in "abcdef")]
    questions = [Question("GET", "/v1/namespaces", token) for token in tokens]

    async def asked(question: Question) -> Answered:
        return await ask(site.app, question.method, question.path, None, question.body)

    assert site.runner.run(compare_again(asked, questions))


@pytest.fixture
def over_tls(
    nats_url: str,  # noqa: F811
    cluster: str,  # noqa: F811
    sqlite_url: str,
    tmp_path: Path,
) -> Iterator[Callable[[Question], Answered]]:
    """Asks a catalog of two tenants through TLS, as one of them."""
    ca = certify(tmp_path, "ca")
    server = certify(tmp_path, "server", ca)
    access = tmp_path / "access.toml"
    router = add_token(access, NewToken("acme", "router", ["acme"]), time.time())
    settings = ServiceSettings(
        nats_url=nats_url,
        database_url=sqlite_url,
        cluster=cluster,
        listen="127.0.0.1:0",
        tenant_secrets=SECRETS,
        liveness_s=600.0,
        access=AccessOptions(file=str(access), tls_cert=str(server.cert), tls_key=str(server.key)),
    )
    with CatalogThread(settings, NATIVE, NATIVE_INDEX) as thread, urllib3.PoolManager(ca_certs=str(ca.cert)) as pool:
        asyncio.run(publish(nats_url, cluster, "of-acme", ACME))
        asyncio.run(publish(nats_url, cluster, "of-beta", BETA))

        def asked(question: Question) -> Answered:
            headers = {"authorization": f"Bearer {router}", "content-type": "application/json"}
            begin_ns = time.perf_counter_ns()
            answer = pool.request(
                question.method,
                thread.url + question.path,
                headers=headers,
                timeout=WAIT_S,
                body=None if question.body is None else msgspec.json.encode(question.body),
            )
            return Answered(answer.status, answer.data, time.perf_counter_ns() - begin_ns)

        eventually(lambda: b'"deepest":10' in asked(YOURS).body, "the catalog has not read it")
        yield asked


def test_through_tls_what_is_not_yours_is_what_is_not_there(over_tls: Callable[[Question], Answered]) -> None:
    for probe in PROBES:
        found = [over_tls(question) for question in (probe.not_yours, *probe.not_there)]
        bodies = {one.body.replace(told.encode(), b"*") for one, told in zip(found, probe.told_apart, strict=True)}
        assert len(bodies) == 1, probe.name
        assert len({one.status for one in found}) == 1, probe.name


@pytest.mark.nightly
def test_through_tls_what_is_not_yours_takes_as_long_as_what_is_not_there(
    over_tls: Callable[[Question], Answered],
) -> None:
    async def waited(question: Question) -> Answered:
        return over_tls(question)

    for probe in (PROBES[0], PROBES[3]):
        assert asyncio.run(compare_again(waited, (probe.not_yours, *probe.not_there), OVER_TLS)), probe.name
