"""The prefiller is killed after its answer: the decoder computes what has not come."""

from __future__ import annotations

import pytest

from tests.engines.pd.harness.shapes import DECODE, PREFILL
from tests.engines.pd.harness.site import ROUTER


@pytest.mark.bytes
def test_a_prefiller_that_is_killed_after_its_answer_costs_time_alone(site, truth, tell):
    asks = truth.prompts("pd-killed", 1, 500)

    def kill() -> None:
        site.lent(asks)
        site.prefiller.kill()

    site.before_decode(kill)
    moved = site.ask(ROUTER, truth, asks)
    tell.append(("router, the prefiller is killed", len(asks[0].tokens), moved))
    assert [leg.status for leg in site.proxies.sent(PREFILL)] == [200]
    assert site.decoder.in_core("refusal") == ""
    site.decoder.forget()
    moved = site.ask(DECODE, truth, asks)
    assert moved.computed_tokens <= len(asks[0].tokens) - asks[0].reusable_tokens
