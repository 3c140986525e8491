"""A prompt is computed on one API server and decoded on another, through vllm-router and in the two other shapes of
proxies: the answer is that of one plain engine.

All device KV is overwritten before, so that whatever is claimed to be there must have come.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.engines.pd.harness.shapes import BARE, DECODE, PREFILL
from tests.engines.pd.harness.site import ROUTER, WAYS
from tests.engines.vllm.harness.truth import WrongAnswerError
from tests.engines.vllm.harness.words import BLOCK_TOKENS, Ask

GOLDEN = json.loads((Path(__file__).parent / "golden" / "vllm_router.json").read_text())


def tokens_of(asks: list[Ask]) -> int:
    return sum(len(ask.tokens) for ask in asks)


def tail_of(asks: list[Ask]) -> int:
    """Tokens that no block can bring: those behind the last block that a cache may answer for."""
    return tokens_of(asks) - sum(ask.reusable_tokens for ask in asks)


@pytest.mark.bytes
@pytest.mark.parametrize("way", WAYS)
def test_tokens_and_log_probabilities_are_those_of_one_engine(site, truth, tell, way):
    asks = [truth.prompt(f"pd-{way}-{tokens}", tokens) for tokens in (20, 33, 64, 300, 700)]
    moved = site.ask(way, truth, asks)
    tell.append((f"{way}, five at once", tokens_of(asks), moved))
    assert moved.computed_tokens + moved.cached_tokens + moved.loaded_tokens == tokens_of(asks)
    assert len(site.proxies.sent(PREFILL)) == len(site.proxies.sent(DECODE)) == len(asks)


@pytest.mark.smoke
@pytest.mark.bytes
@pytest.mark.parametrize("way", WAYS)
def test_what_the_prefiller_has_computed_is_brought_and_not_computed(site, truth, tell, way):
    """The decoder is asked at once, but for the shape that tells it nothing: there the catalog must know."""
    for ask in truth.prompts(f"pd-lent-{way}", 2, 500):
        if way == BARE:
            site.before_decode(lambda ask=ask: site.lent([ask]))
        moved = site.ask(way, truth, [ask])
        tell.append((f"{way}, asked at once", len(ask.tokens), moved))
        lacking = ask.reusable_tokens // BLOCK_TOKENS
        assert moved.computed_tokens == tail_of([ask])
        assert (moved.peer_blocks, moved.lent_bytes) == (lacking, lacking * site.block_bytes)


@pytest.mark.bytes
def test_only_what_the_decoder_lacks_is_brought(site, truth, tell):
    first = truth.prompt("pd-delta", 320)
    more = truth.prompt("pd-delta-more", 640, after=first.tokens)
    asks = [first]
    site.ask(ROUTER, truth, asks)
    asks[:] = [more]
    moved = site.ask(ROUTER, truth, asks)
    tell.append(("router, 10 of 19 blocks are in its HBM", len(more.tokens), moved))
    assert moved.cached_tokens == 320
    assert moved.peer_blocks == (more.reusable_tokens - 320) // BLOCK_TOKENS
    assert moved.lent_bytes == moved.peer_blocks * site.block_bytes
    site.decoder.forget()
    moved = site.ask(ROUTER, truth, asks)
    tell.append(("router, all blocks are in its HOST", len(more.tokens), moved))
    assert (moved.computed_tokens, moved.peer_blocks, moved.lent_bytes) == (tail_of(asks), 0, 0)


@pytest.mark.bytes
def test_the_next_turn_is_brought_though_others_have_filled_host(site, truth, tell):
    """Its request has asked for that. What it said is part of the next prompt, and was stored with it."""
    first = truth.prompt("pd-turn", 500, output_tokens=64)._replace(transfer={"kvbm.keep_s": 600})
    site.ask(DECODE, truth, [first], has_kept=True)
    for ask in truth.prompts("pd-flood", 14, 1800):  # HOST has room for three quarters of these
        site.ask(DECODE, truth, [ask], has_kept=True)
    site.decoder.forget()
    (said,) = truth.of([first])
    again = truth.prompt("pd-turn-next", 600, after=(*first.tokens, *said.tokens))
    moved = site.ask(DECODE, truth, [again], has_kept=True)
    tell.append(("decoder alone, the next turn", len(again.tokens), moved))
    assert moved.computed_tokens <= BLOCK_TOKENS + 600 - 564
    site.decoder.in_core("drop", "HOST")


@pytest.mark.bytes
@pytest.mark.parametrize("way", [pytest.param(ROUTER, marks=pytest.mark.smoke), BARE])
def test_a_decoder_that_claims_what_has_not_come_is_found_out(site, truth, way):
    asks = truth.prompts(f"pd-hollow-{way}", 1, 300)
    if way == BARE:
        site.before_decode(lambda: site.lent(asks))
    site.decoder.inside("loads_are_hollow", True)
    try:
        with pytest.raises(WrongAnswerError):
            site.ask(way, truth, asks)
    finally:
        site.decoder.inside("loads_are_hollow", False)


@pytest.mark.bytes
def test_salts_and_tenants_are_kept_apart_on_every_way(site, truth, tell):
    plain = truth.prompt("pd-salt", 300)
    own = {"kvbm.tenant": "a"}
    for way, ask in (
        (ROUTER, plain._replace(salt="a")),
        (ROUTER, plain._replace(salt="b")),
        (BARE, plain._replace(salt="a", transfer=own)),
        (BARE, plain._replace(transfer=own)),
        (BARE, plain),
    ):
        site.forget()
        moved = site.ask(way, truth, [ask])
        tell.append((f"{way}, salt {ask.salt!r}, tenant {bool(ask.transfer)}", len(ask.tokens), moved))
        assert moved.prefilled_tokens == len(ask.tokens)
        assert moved.loaded_tokens == moved.peer_blocks * BLOCK_TOKENS  # and nothing of what it has kept
        site.decoder.forget()
        again = site.ask(way, truth, [ask])
        tell.append(("   again", len(ask.tokens), again))
        assert again.computed_tokens == tail_of([ask])


def test_the_router_sends_what_is_written_down(site, truth):
    """What both legs have, but for the prompt and names that change."""
    ask = truth.prompt("pd-golden", 40)._replace(salt="s", transfer={"kvbm.tenant": "lost"})
    site.ask(ROUTER, truth, [ask])
    (prefill,), (decode,) = site.proxies.sent(PREFILL), site.proxies.sent(DECODE)
    assert prefill.headers["x-request-id"] == decode.headers["x-request-id"]
    for leg in (prefill, decode):
        assert leg.body.pop("prompt") == list(ask.tokens)
    answered = prefill.answer["kv_transfer_params"]
    assert decode.body.pop("kv_transfer_params") == answered
    assert {PREFILL: prefill.body, DECODE: decode.body} == GOLDEN
