"""What a catalog knows of two engines, through their events alone: all tiers of both, at work, after crashes and after
silence.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.engines.vllm.harness import scenarios
from tests.engines.vllm.harness.cluster import Cluster
from tests.engines.vllm.harness.engine import Engine, Engines
from tests.engines.vllm.harness.setups import with_kvbm
from tests.engines.vllm.harness.truth import Truth
from tests.engines.vllm.harness.words import BLOCK_TOKENS, Ask, Setup

AMPLE = {"pools.host.slots": 400, "pools.nvme.slots": 400}
SCARCE = {"pools.host.slots": 24, "pools.nvme.slots": 40}
SMALL = {"hbm_blocks": 60, "context_tokens": 512}


class Two(NamedTuple):
    """A cluster and two engines in it: `a` has room for everything, `b`, whose core is a process of its own,
    has not.
    """

    cluster: Cluster
    a: Engine
    b: Engine
    setups: tuple[Setup, Setup]
    folders: tuple[Path, Path]


@pytest.fixture
def two(engines: Engines, llama: str, tmp_path: Path) -> Iterator[Two]:
    with Cluster(tmp_path / "cluster") as cluster:
        folders = tmp_path / "a", tmp_path / "b"
        setups = (
            with_kvbm(llama, folders[0], cluster.settings | AMPLE),
            with_kvbm(llama, folders[1], cluster.settings | SCARCE, core="process", asynchronous=True, **SMALL),
        )
        with engines.running(setups[0]) as a, engines.running(setups[1]) as b:
            yield Two(cluster, a, b, setups, folders)


def blocks_of(ask: Ask) -> int:
    return len(ask.tokens) // BLOCK_TOKENS


def test_lookups_find_each_prompt_in_the_tiers_where_each_engine_has_it(two: Two, truth: Truth):
    cluster, a, b = two.cluster, two.a, two.b
    first, second = truth.prompts("stream", 2, 300)
    n = blocks_of(first)

    scenarios.ask(a, truth, [first], [0])
    scenarios.ask(b, truth, [second], [0])
    cluster.agree(a, b)
    everywhere = {"HBM": n, "HOST": n, "NVME": n}
    assert cluster.depths(a, first) == {"a": everywhere}
    assert cluster.depths(a, second) == {"b": everywhere}
    assert cluster.depths(a, first._replace(salt="other")) == {}

    scenarios.ask(b, truth, [first], [0])
    cluster.agree(a, b)
    assert cluster.depths(b, first) == {"a": everywhere, "b": everywhere}

    a.forget()
    cluster.agree(a, b)
    assert cluster.depths(a, first) == {"a": {"HOST": n, "NVME": n}, "b": everywhere}

    assert a.in_core("drop", "HOST")
    cluster.agree(a, b)
    assert cluster.depths(a, first) == {"a": {"NVME": n}, "b": everywhere}

    scenarios.ask(a, truth, [first._replace(tokens=first.tokens[:200])], [192])
    cluster.agree(a, b)
    assert cluster.depths(a, first) == {"a": {"HBM": 6, "HOST": 6, "NVME": n}, "b": everywhere}

    a.forget(with_connector=True)
    b.forget()
    cluster.agree(a, b)
    assert cluster.depths(a, first) == {"b": {"HOST": n, "NVME": n}}
    cluster.verify(*two.folders)


def test_what_is_evicted_under_pressure_is_withdrawn_in_the_catalog(two: Two, truth: Truth):
    cluster, a, b = two.cluster, two.a, two.b
    assert scenarios.pressure(b, truth, "streamed", prompts=16, rounds=2) > 0
    held = cluster.agree(a, b)[1]
    assert 0 < len(held.tiers["HBM"]) < SMALL["hbm_blocks"]
    assert 0 < len(held.tiers["HOST"]) <= SCARCE["pools.host.slots"]
    assert 0 < len(held.tiers["NVME"]) <= SCARCE["pools.nvme.slots"]
    cluster.verify(*two.folders)


def test_an_engine_that_is_killed_comes_back_with_what_its_disk_has(two: Two, engines: Engines, truth: Truth):
    cluster, a, b = two.cluster, two.a, two.b
    asks = truth.prompts("killed", 3, 300)
    n = blocks_of(asks[0])
    scenarios.ask(a, truth, asks[:1], [0])
    before = cluster.agree(a, b)[0]
    a.begin("generate", truth.prompts("killed-at-work", 6, 400))
    a.kill()
    scenarios.ask(b, truth, asks[1:2], [0])
    with engines.running(two.setups[0]) as again:
        after = cluster.agree(again, b)[0]
        assert after.epoch > before.epoch
        assert not after.tiers["HBM"]
        assert not after.tiers["HOST"]
        assert cluster.depths(again, asks[0]) == {"a": {"NVME": n}}
        scenarios.ask(again, truth, [*asks[:1], *asks[2:]], [asks[0].reusable_tokens, 0])
        cluster.agree(again, b)
        assert cluster.depths(again, asks[0])["a"]["NVME"] == n
        assert cluster.depths(again, asks[2]) == {"a": {"HBM": n, "HOST": n, "NVME": n}}
        cluster.verify(*two.folders)


@pytest.mark.parametrize("which", ["nats", "catalog"])
def test_engines_serve_without_it_and_are_known_again_when_it_is_back(two: Two, truth: Truth, which: str):
    cluster, a, b = two.cluster, two.a, two.b
    asks = truth.prompts("down", 6, 300)
    n = blocks_of(asks[0])
    scenarios.ask(a, truth, asks[:1], [0])
    cluster.agree(a, b)
    under_way = truth.prompts("down-under-way", 4, 400)

    a.begin("generate", under_way)
    b.begin("generate", under_way)
    cluster.kill_nats() if which == "nats" else cluster.kill_catalog()
    truth.check(under_way, a.answered())
    truth.check(under_way, b.answered())

    scenarios.ask(a, truth, asks[1:3], [0, 0])
    scenarios.ask_after_garbage(a, truth, asks[:3], [one.reusable_tokens for one in asks[:3]])
    scenarios.pressure(b, truth, "down-pressed", prompts=8, rounds=1)
    scenarios.ask(b, truth, asks[3:4], [0])

    cluster.start_nats() if which == "nats" else cluster.start_catalog()
    cluster.agree(a, b)
    assert cluster.depths(a, asks[2]) == {"a": {"HBM": n, "HOST": n, "NVME": n}}
    assert cluster.depths(a, asks[3])["b"]["HBM"] == n
    scenarios.ask(a, truth, asks[4:5], [0])
    cluster.agree(a, b)
    assert cluster.depths(a, asks[4]) == {"a": {"HBM": n, "HOST": n, "NVME": n}}
    cluster.verify(*two.folders)
