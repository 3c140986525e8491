"""Windows and states come from another engine's objects and files; what is lost there shortens a hit, and answers stay
right.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from kvbm import NamespaceId
from kvbm.core.answers import MAX_WAIT_S, PositionWanted
from tests.engines.vllm.harness import scenarios
from tests.engines.vllm.harness.engine import Engine
from tests.engines.vllm.harness.models import STATES
from tests.engines.vllm.harness.object_store import BUCKET, ObjectSite, object_site
from tests.engines.vllm.harness.setups import with_kvbm
from tests.engines.vllm.harness.words import Ask
from tests.eventually import eventually

FULL = pytest.mark.engines_full
WAIT_S = 120.0
DENSE = {
    "prefix_cache_retention_interval": None
}  # windows and states stay findable everywhere, not at prompts' ends alone
KINDS: dict[str, tuple[int, dict[str, Any]]] = {  # tokens of a block, and how the engine is set up
    "gemma": (32, {"options": DENSE}),
    "qwen-next": (64, {"options": STATES | DENSE, "step_tokens": 64}),
}
Names = Sequence[tuple[int, int | None, Sequence[str]]]


def whole(kind: str, ask: Ask) -> int:
    """Tokens of a prompt that a cache can answer for: whole blocks, never the last token."""
    size = KINDS[kind][0]
    return (len(ask.tokens) - 1) // size * size


def reach_of(groups: Names, held: set[str], limit: int, align: int) -> int:
    """The longest prefix for which each group has objects of all that is read there."""
    for end in range(limit, 0, -align):
        if all(
            held.issuperset(names[max(0, end // size - (window or end)) : end // size])
            for size, window, names in groups
        ):
            return end
    return 0


def hits(engine: Engine) -> set[str]:
    return {name for name, count in engine.in_core("counted").items() if name.startswith("hits_") and count}


def wait_read(site: ObjectSite, engine: Engine) -> None:
    """Wait until all that was computed lies in objects, and the catalog knows of it."""
    engine.offload()
    instance, epoch, applied = engine.in_core("position")
    at = PositionWanted(instance=instance, epoch=epoch, offset=applied)
    site.cluster.client.lookup(NamespaceId(bytes(16)), b"", [at], MAX_WAIT_S)  # raises where it is not there in time


def drop(site: ObjectSite, chosen: random.Random, share: float) -> set[str]:
    """Delete a share of all objects; what is left, by the names that the pool gives them."""
    left: set[str] = set()
    for name in sorted(site.objects()):
        if chosen.random() < share:
            site.client.delete_object(Bucket=BUCKET, Key=name)
        else:
            left.add(name.removeprefix("blocks/"))
    return left


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("drops", [4, pytest.param(40, marks=[FULL])])
def test_a_second_engine_has_its_hits_from_objects_and_lost_ones_shorten_them(engines, truth_of, tmp_path, kind, drops):
    truth, (align, setup), chosen = truth_of(kind), KINDS[kind], random.Random(f"objects {kind}")
    model, asks = engines.model(kind), truth.prompts("elsewhere", 2, 300)
    with object_site(tmp_path) as site:
        pools = site.settings | {"offload.states": "all"}
        more = {"environment": site.environment} | setup
        with engines.running(with_kvbm(model, tmp_path / "a", pools, **more)) as first:
            scenarios.ask(first, truth, asks, [0] * 2)
            wait_read(site, first)
        with engines.running(with_kvbm(model, tmp_path / "b", pools, **more)) as second:
            second.in_core("reads_always")
            scenarios.ask(second, truth, asks, [whole(kind, ask) for ask in asks])
            assert hits(second) == {"hits_OBJECT"}
            found: list[bool] = []
            for _ in range(drops):
                wait_read(site, second)
                second.forget()
                second.in_core("drop", "HOST")
                ask = chosen.choice(asks)
                held = drop(site, chosen, chosen.choice((0.02, 0.05, 0.2)))
                expected = reach_of(second.in_core("object_names", list(ask.tokens)), held, whole(kind, ask), align)
                scenarios.ask(second, truth, [ask], [expected])
                found.append(expected < whole(kind, ask))
            assert any(found)
            assert second.in_core("refusal") == ""


@pytest.mark.parametrize("kind", ["qwen-next", pytest.param("gemma", marks=FULL)])
def test_a_second_engine_has_its_hits_from_the_first_ones_files(engines, truth_of, tmp_path, kind):
    truth, (_, setup) = truth_of(kind), KINDS[kind]
    model, asks = engines.model(kind), truth.prompts("pod", 2, 300)
    pod = {"pools.nvme.slots": 400, "pools.nvme.folder": str(tmp_path / "pod"), "offload.states": "all"}
    with engines.running(with_kvbm(model, tmp_path / "a", pod, **setup)) as first:
        scenarios.ask(first, truth, asks, [0] * 2)
        first.offload()
    with engines.running(with_kvbm(model, tmp_path / "b", pod, **setup)) as second:

        def are_seen(ask: Ask) -> bool:
            return bool(second.in_core("in_pod", list(ask.tokens), "") >= whole(kind, ask) // KINDS[kind][0])

        for ask in asks:
            eventually(partial(are_seen, ask), "another engine's blocks were not seen", WAIT_S)
        scenarios.ask(second, truth, asks, [whole(kind, ask) for ask in asks])
        assert hits(second) == {"hits_NVME"}
        scenarios.ask_after_garbage(second, truth, asks, [whole(kind, ask) for ask in asks])
        assert second.in_core("refusal") == ""
