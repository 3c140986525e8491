"""An object store whose objects rot, vanish, and that dies itself, under an engine that keeps its blocks there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import pytest

from tests.engines.vllm.harness import scenarios
from tests.engines.vllm.harness.engine import Engine
from tests.engines.vllm.harness.object_store import BUCKET, object_site
from tests.engines.vllm.harness.setups import with_kvbm
from tests.engines.vllm.harness.truth import Truth

OBJECT_TOKENS = 128  # of an object, for blocks of this model's size
WAIT_S = 120.0


class Stored(NamedTuple):
    """An engine whose prompts lie in objects.

    Attributes:
        client: boto3's, of the store.
        store: closed, it kills the store.
        whole: tokens of each prompt in whole objects.
    """

    engine: Engine
    truth: Truth
    client: Any
    store: ExitStack
    asks: list[Any]
    whole: list[int]

    def forget_all_but_objects(self) -> None:
        self.engine.settle()
        assert self.engine.in_core("settled", WAIT_S)
        self.engine.in_core("drop", "HOST")

    def objects(self) -> list[str]:
        found = self.client.list_objects_v2(Bucket=BUCKET).get("Contents", [])
        return [one["Key"] for one in found if one["Size"] > 4096]  # blocks, not the pool's own notes

    def computed_again(self) -> None:
        """The prompts are answered rightly, and not from objects."""
        before = self.engine.in_core("counted")["hits_OBJECT"]
        self.forget_all_but_objects()
        scenarios.ask_after_garbage(self.engine, self.truth, self.asks, [0] * len(self.asks))
        assert self.engine.in_core("counted")["hits_OBJECT"] == before


@pytest.fixture
def stored(request, engines, truth, llama, tmp_path) -> Iterator[Stored]:
    """Its parameter: how long the store has to answer."""
    with object_site(tmp_path, getattr(request, "param", 60.0)) as site:
        cluster = site.cluster
        setup = with_kvbm(llama, tmp_path / "a", site.settings, environment=site.environment)
        with engines.running(setup) as engine:
            engine.in_core("reads_always")
            asks = truth.prompts("objects", 3, 300)
            scenarios.ask(engine, truth, asks, [0] * 3)
            cluster.agree(engine)
            whole = [ask.reusable_tokens // OBJECT_TOKENS * OBJECT_TOKENS for ask in asks]
            found = Stored(engine, truth, site.client, site.store, asks, whole)
            found.forget_all_but_objects()
            cluster.agree(engine)
            scenarios.ask_after_garbage(engine, truth, asks, whole)
            assert engine.in_core("counted")["hits_OBJECT"] > 0
            assert found.objects()
            yield found


def test_flipped_bits_in_objects_are_computed(stored):
    for name in stored.objects():
        body = bytearray(stored.client.get_object(Bucket=BUCKET, Key=name)["Body"].read())
        for at in range(2048, len(body), 4096):
            body[at] ^= 0x10
        stored.client.put_object(Bucket=BUCKET, Key=name, Body=bytes(body))
    stored.computed_again()
    assert stored.engine.in_core("refusal") == ""


def test_objects_that_are_cut_or_gone_are_computed(stored):
    for number, name in enumerate(stored.objects()):
        if number % 2:
            stored.client.delete_object(Bucket=BUCKET, Key=name)
        else:
            body = stored.client.get_object(Bucket=BUCKET, Key=name)["Body"].read()
            stored.client.put_object(Bucket=BUCKET, Key=name, Body=body[: len(body) // 3])
    stored.computed_again()
    assert stored.engine.in_core("refusal") == ""


@pytest.mark.parametrize("stored", [10.0], indirect=True, ids=["soon"])
def test_a_store_that_dies_is_a_miss(stored):
    stored.store.close()
    stored.computed_again()
    more = stored.truth.prompts("after", 2, 300)
    scenarios.ask(stored.engine, stored.truth, more, [0, 0])
    scenarios.ask_after_garbage(stored.engine, stored.truth, more, [ask.reusable_tokens for ask in more])
    assert stored.engine.in_core("refusal") == ""
