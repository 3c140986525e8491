"""Where each rank's part of a block lies, and what pipeline stages say of theirs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvbm.engines.vllm.ranks import PartPlace, Ranks, Stage
from kvbm.engines.vllm.stages import StageBlocks, all_stages, layout_of, ranks_of
from tests.vllm_configs import FullAttentionSpec, SlidingWindowSpec, config_of

FULL = FullAttentionSpec()
PAGE = FULL.page_size_bytes


def engine(**parallel: int) -> Any:
    sizes = {f"{name}_parallel_size": 1 for name in ("tensor", "pipeline", "prefill_context", "decode_context")}
    interleaves = {"cp_kv_cache_interleave_size": 1, "dcp_kv_cache_interleave_size": 1}
    more = interleaves | {"nnodes_within_dp": 1}
    return SimpleNamespace(parallel_config=SimpleNamespace(**{**sizes, **more, **parallel}))


def places(ranks: Ranks) -> list[tuple[int, int, bool]]:
    found = [ranks.place_of(rank) for rank in range(ranks.ranks)]
    return [(place.part, place.begin, place.stores) for place in found]


def test_ranks_of_tensor_parallelism_lie_side_by_side() -> None:
    ranks = Ranks((Stage(10),), tensor=3)
    assert places(ranks) == [(0, 0, True), (1, 10, True), (2, 20, True)]
    assert (ranks.ranks, ranks.row_bytes, ranks.part_sizes) == (3, 30, (10, 10, 10))


def test_of_ranks_with_the_same_kv_the_first_stores() -> None:
    ranks = Ranks((Stage(10, replicas=2),), tensor=4)
    assert places(ranks) == [(0, 0, True), (0, 0, False), (1, 10, True), (1, 10, False)]
    assert ranks.row_bytes == 20


def test_stages_lie_one_behind_the_other_each_with_its_own_size_and_replicas() -> None:
    ranks = Ranks((Stage(10, replicas=2), Stage(7)), tensor=2)
    assert places(ranks) == [(0, 0, True), (0, 0, False), (1, 10, True), (2, 17, True)]
    assert ranks.place_of(3) == PartPlace(2, 0, 17, 7, stores=True)
    assert (ranks.ranks, ranks.row_bytes, ranks.part_sizes) == (4, 24, (10, 7, 7))


def test_ranks_of_prefill_context_parallelism_hold_the_same_unless_they_share_tokens() -> None:
    alone = Ranks((Stage(10),), tensor=2, prefill=2)
    assert places(alone) == [(0, 0, True), (1, 10, True), (0, 0, False), (1, 10, False)]
    shared = alone._replace(decode=2)
    assert places(shared) == [(0, 0, True), (1, 10, True), (2, 20, True), (3, 30, True)]


def test_each_host_has_rows_of_its_own_ranks() -> None:
    ranks = Ranks((Stage(10), Stage(7)), tensor=2, hosts=2)
    found = [ranks.place_of(rank) for rank in range(4)]
    assert [(place.part, place.host, place.begin) for place in found] == [(0, 0, 0), (1, 0, 10), (2, 1, 0), (3, 1, 7)]
    assert [ranks.row_bytes_on(host) for host in (0, 1)] == [20, 14]
    assert ranks.row_bytes == 20
    assert [ranks.is_first(rank) for rank in range(4)] == [True, False, True, False]
    assert Ranks((Stage(10),), tensor=4, hosts=4).row_bytes_on(3) == 10


def test_what_ranks_of_two_hosts_hold_alike_each_host_keeps() -> None:
    ranks = Ranks((Stage(10, replicas=4),), tensor=4, hosts=2)
    assert places(ranks) == [(0, 0, True), (0, 0, False), (1, 0, True), (1, 0, False)]
    assert ranks.part_sizes == (10, 10)


def test_what_ranks_hold_follows_from_vllms_options() -> None:
    config = config_of("LBNHC", [[FULL]])
    assert ranks_of(engine(tensor_parallel_size=2), config, [Stage(5)]) == Ranks((Stage(5),), tensor=2)
    assert ranks_of(engine(tensor_parallel_size=2, nnodes_within_dp=2), config, [Stage(5)]).hosts == 2
    shared = engine(tensor_parallel_size=4, decode_context_parallel_size=2, cp_kv_cache_interleave_size=8)
    assert ranks_of(shared, config, [Stage(5)]) == Ranks((Stage(5),), tensor=4, decode=2, interleave=8)
    shared.parallel_config.dcp_kv_cache_interleave_size = 16  # the older option goes before, as vLLM has it
    assert ranks_of(shared, config, [Stage(5)]).interleave == 16
    assert ranks_of(engine(cp_kv_cache_interleave_size=8), config, [Stage(5)]).interleave == 1


def test_a_stage_says_what_its_blocks_are() -> None:
    parallel = engine(pipeline_parallel_size=2, tensor_parallel_size=2)
    found = [StageBlocks.of(parallel, config_of("LBNHC", [[FULL] * layers])) for layers in (3, 1)]
    assert [one.stage for one in found] == [Stage(3 * PAGE), Stage(PAGE)]
    assert [one.layers for one in found] == [
        (("group0.layer0", "group0.layer1", "group0.layer2"),),
        (("group0.layer0",),),
    ]
    stages, why = all_stages(dict(enumerate(found)), 2)
    assert (stages, why) == (found, "")
    first, second = layout_of(stages, [0]).split(" || ")
    assert "parts=2 part_bytes=768; layers=3" in first
    assert "parts=2 part_bytes=256; layers=1" in second
    assert layout_of(stages[:1], [0]) == first


def test_an_engine_of_one_stage_says_what_it_always_has() -> None:
    config = config_of("LBNHC", [[FULL] * 2, [SlidingWindowSpec(sliding_window=8)] * 2])
    blocks = StageBlocks.of(engine(), config)
    assert blocks.layers == ()
    assert layout_of([blocks], [1, 0]) == " | ".join(reversed(blocks.words))


REFUSED = StageBlocks(Stage(0), why="it keeps its KV elsewhere")


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({}, "pipeline stage 0 has not said how its blocks lie"),
        ({0: StageBlocks(Stage(8), (0,))}, "pipeline stage 1 has not said"),
        ({0: StageBlocks(Stage(8), (0,)), 1: REFUSED}, "pipeline stage 1: it keeps its KV elsewhere"),
        ({0: StageBlocks(Stage(8), (0,)), 1: StageBlocks(Stage(8), (0, 1))}, "stage 1 shares the KV groups (0, 1)"),
    ],
)
def test_stages_that_cannot_be_served_together_say_why(said: dict[int, StageBlocks], words: str) -> None:
    stages, why = all_stages(said, 2)
    assert not stages
    assert words in why
