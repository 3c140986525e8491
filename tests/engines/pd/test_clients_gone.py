"""A client leaves, or is refused, in each state of its request: nothing of it is left in either engine, and the next
client gets the right answer.
"""

from __future__ import annotations

import random
import time
from collections import deque

import pytest

from tests.engines.pd.harness.site import BARE, BOTH, ROUTER, SERIAL, WAYS
from tests.eventually import eventually

HERE = (ROUTER, BARE, BOTH)  # serial is the router's shape


def in_state(server, status: str) -> None:
    eventually(lambda: server.inside("waiting").get(status), f"no request is {status}", state=lambda: server.log)


@pytest.fixture(autouse=True)
def nothing_held(site):
    yield
    for server in (site.prefiller, site.decoder):
        server.inside("answers_are_held", False)
        server.inside("loads_are_held", False)
    site.settle()


@pytest.fixture
def lent(site, truth, request):
    """A prompt that the prefiller has computed and lends."""
    ask = truth.prompt(f"pd-gone-{request.node.name}", 300)
    truth.check([ask], [site.prefiller.ask(ask)])
    site.lent([ask])
    return ask


@pytest.mark.parametrize("way", HERE)
def test_while_the_prefiller_has_not_begun(site, truth, lent, way):
    site.prefiller.inside("answers_are_held", True)
    asked = site.begin(way, lent)
    in_state(site.prefiller, "WAITING")
    asked.leave()
    site.settle()
    if way != BOTH:
        assert not site.proxies.sent("decode")
    site.prefiller.inside("answers_are_held", False)
    site.ask(way, truth, [lent])


@pytest.mark.parametrize("way", HERE)
def test_while_the_decoder_is_told_to_ask_again(site, truth, lent, way):
    site.decoder.inside("answers_are_held", True)
    asked = site.begin(way, lent)
    in_state(site.decoder, "WAITING")
    asked.leave()
    site.settle()
    site.decoder.inside("answers_are_held", False)
    site.ask(way, truth, [lent])


@pytest.mark.parametrize("way", HERE)
def test_while_the_decoder_loads(site, truth, lent, way):
    site.decoder.inside("loads_are_held", True)
    asked = site.begin(way, lent)
    in_state(site.decoder, "WAITING_FOR_REMOTE_KVS")
    asked.leave()
    eventually(lambda: not site.decoder.inside("waiting").get("WAITING_FOR_REMOTE_KVS"), "it was not aborted")
    site.decoder.inside("loads_are_held", False)
    site.settle()
    site.forget()
    site.ask(way, truth, [lent])


@pytest.mark.parametrize("way", HERE)
def test_while_the_decoder_generates(site, truth, lent, way):
    asked = site.begin(way, lent._replace(output_tokens=1700))
    in_state(site.decoder, "RUNNING")
    asked.leave()
    site.settle()
    site.forget()
    site.ask(way, truth, [lent])


@pytest.mark.parametrize("way", [ROUTER, SERIAL])
def test_whom_the_decoder_refuses(site, truth, lent, way):
    """The prefiller, which is asked for one token, has answered."""
    status, said = site.begin(way, lent._replace(output_tokens=3000)).raw()
    assert status == 400, said
    assert [leg.status for leg in site.proxies.legs] == [200, 400]
    site.settle()
    site.ask(way, truth, [lent])


@pytest.mark.nightly
def test_of_five_hundred_a_quarter(site, truth):
    """They leave at random moments; whoever stays gets the right answer, and afterwards nothing is kept or lent."""
    rng = random.Random(20)
    asks = [truth.prompt(f"pd-many-{at}", 40 + 30 * (at % 12)) for at in range(60)]
    under_way, gone = deque(), 0

    def end_first() -> None:
        ask, asked, leaves = under_way.popleft()
        if leaves:
            time.sleep(rng.random() * 0.05)
            asked.leave()
        else:
            truth.check([ask], [asked.answer()])

    for _ in range(500):
        ask, leaves = rng.choice(asks), rng.random() < 0.25
        gone += leaves
        asked = site.begin(rng.choice(WAYS), ask)
        if leaves and rng.random() < 0.3:
            asked.leave()
        else:
            under_way.append((ask, asked, leaves))
        if len(under_way) == 12:
            end_first()
    while under_way:
        end_first()
    assert gone > 100
    site.settle()
    for server in (site.prefiller, site.decoder):
        assert not server.inside("left")


@pytest.mark.parametrize("way", WAYS)
def test_of_many_some(site, truth, way):
    asks = [truth.prompt(f"pd-some-{way}-{at}", 200 + 40 * at) for at in range(6)]
    under_way = [site.begin(way, ask) for ask in asks]
    for asked in under_way[::2]:
        asked.leave()
    truth.check(asks[1::2], [asked.answer() for asked in under_way[1::2]])
    site.settle()
    site.forget()
    site.ask(way, truth, asks)
