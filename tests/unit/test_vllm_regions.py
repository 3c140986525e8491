"""vLLM's layouts as byte regions: held to the views that an engine has of its layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvbm.core.errors import LayoutError
from kvbm.engines.vllm.regions import Region, block_regions, layout_words, served_groups
from tests.extras import needed
from tests.vllm_configs import (
    LAYOUTS,
    Config,
    FullAttentionSpec,
    MambaSpec,
    Placed,
    SlidingWindowSpec,
    config_of,
    tensors_of,
)

torch = needed("torch", "engine")

FULL = FullAttentionSpec()
WIDE = FullAttentionSpec(head_size=24)
WINDOW = SlidingWindowSpec(sliding_window=16)
STATE = MambaSpec()


class StrangeSpec(FullAttentionSpec):
    pass


def bytes_of_block(config: Config, block: int) -> set[int]:
    """Every byte of the allocation that a layer's view of a block covers."""
    found: set[int] = set()
    for view in tensors_of(config).values():
        pieces = view.shape[0] // config.num_blocks
        for piece in view[block * pieces : (block + 1) * pieces]:
            offsets = np.zeros(1, dtype=np.int64)
            for size, stride in zip(piece.shape, piece.stride(), strict=True):
                offsets = np.add.outer(offsets, np.arange(size) * stride).ravel()
            first = (piece.storage_offset() + offsets) * piece.element_size()
            found.update((first[:, None] + np.arange(piece.element_size())).ravel().tolist())
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("blocks", [1, 6])
def test_regions_cover_exactly_what_the_layers_see_of_a_block(layout: str, layers: int, blocks: int) -> None:
    config = config_of(layout, [[FULL] * layers], blocks)
    found = block_regions(config)
    assert found.part_bytes == layers * FULL.page_size_bytes
    for block in range(blocks):
        covered = [
            byte
            for region in found.regions
            for byte in range(
                region.offset + block * region.stride, region.offset + block * region.stride + region.bytes
            )
        ]
        assert len(covered) == len(set(covered))
        assert set(covered) == bytes_of_block(config, block)


@pytest.mark.parametrize(
    ("layout", "groups"),
    [
        ("LBNHC", [[FULL] * 3, [WINDOW] * 3, [WINDOW] * 2]),
        ("BLNHC", [[FULL] * 3, [WINDOW] * 3, [WINDOW] * 2]),
        ("BLHNC", [[FULL, WIDE, FULL], [WIDE]]),
        ("LBHNC", [[FULL, WIDE, FULL]]),
        ("LBNHC", [[replace(FULL, padding_bytes=64)] * 2]),
        ("LBNHC", [[FULL], [STATE], [STATE]]),
        ("BLNHC", [[FULL] * 2, [STATE] * 2]),
    ],
)
def test_groups_that_overlay_each_other_count_each_byte_once(layout: str, groups: list[list[Any]]) -> None:
    config = config_of(layout, groups)
    found = block_regions(config)
    assert found.part_bytes == max(sum(spec.page_size_bytes for spec in group) for group in groups)
    for block in range(config.num_blocks):
        covered = {
            byte
            for region in found.regions
            for byte in range(
                region.offset + block * region.stride, region.offset + block * region.stride + region.bytes
            )
        }
        assert len(covered) == found.part_bytes
        assert covered >= bytes_of_block(config, block)


def test_a_packed_block_is_one_region_without_its_padding() -> None:
    config = config_of("BLHNC", [[FULL] * 2, [FULL]])
    config.kv_cache_tensors = [
        replace(tensor, block_stride=tensor.block_stride + 32, size=tensor.size + 32 * 6)
        for tensor in config.kv_cache_tensors
    ]
    page = FULL.page_size_bytes
    assert block_regions(config).regions == (Region(0, 2 * page + 32, 2 * page),)


def test_how_many_blocks_there_are_changes_neither_size_nor_words() -> None:
    for layout in LAYOUTS:
        few, many = (config_of(layout, [[FULL] * 2], blocks) for blocks in (1, 40))
        part_bytes = block_regions(few).part_bytes
        assert part_bytes == block_regions(many).part_bytes
        assert layout_words(few, 0, 1) == layout_words(many, 0, 1)


def test_words_differ_where_bytes_would_be_read_otherwise() -> None:
    def words(layout: str = "LBNHC", spec: Any = FULL, layers: int = 2, ranks: int = 1, replicas: int = 1) -> str:
        config = config_of(layout, [[spec] * layers])
        return layout_words(config, 0, ranks // replicas)

    all_words = [
        words(),
        words("BLNHC"),
        words("LBHNC"),
        words(spec=WIDE),
        words(spec=replace(FULL, block_size=8)),
        words(spec=replace(FULL, num_heads=1, block_size=8)),
        words(spec=replace(FULL, num_heads=4, block_size=2)),
        words(spec=replace(FULL, dtype=torch.float16)),
        words(spec=SlidingWindowSpec()),
        words(spec=WINDOW),
        words(layers=4),
        words(ranks=2),
    ]
    assert len(set(all_words)) == len(all_words)
    assert words(ranks=2, replicas=2) == words()  # ranks that hold the same KV are one part
    assert words() == (
        "vllm LBNHC parts=1 part_bytes=512; layers=2 full tokens=4 heads=2 head_size=8 dtype=bfloat16 page=256"
    )


def test_groups_that_no_prefix_is_made_of_have_no_bytes_in_a_block() -> None:
    config = config_of("LBNHC", [[FULL] * 2, [StrangeSpec(), StrangeSpec(), StrangeSpec()]])
    config.kv_cache_groups[1].enable_kv_transfer = False
    assert served_groups(config) == [0]
    assert block_regions(config).part_bytes == 2 * FULL.page_size_bytes
    alone = config_of("LBNHC", [[FULL] * 2])
    assert layout_words(config, 0, 1) == layout_words(alone, 0, 1)


def test_words_are_of_one_group() -> None:
    config = config_of("BLNHC", [[FULL, WIDE], [WINDOW]])
    full, window = (layout_words(config, group, 1) for group in (0, 1))
    assert "sliding" not in full and full.count("layers=1") == 2
    assert "layers=1 sliding-window" in window and "window=16" in window


def test_words_of_states_say_what_they_are_made_of() -> None:
    def words(spec: Any) -> str:
        config = config_of("LBNHC", [[FULL], [spec]])
        return layout_words(config, 1, 1)

    assert words(STATE).endswith(
        "layers=1 state tokens=4 heads=1 dtype=uint8 page=256 recurrence=gdn shapes=((3,8),(2,4,4)) "
        "dtypes=(bfloat16,float32)"
        " replicated=False"
    )
    others = (
        replace(STATE, shapes=((3, 8), (4, 2, 4))),
        replace(STATE, dtypes=(torch.bfloat16, torch.bfloat16)),
        replace(STATE, mamba_type="mamba2"),
        replace(STATE, tp_replicated=True),
    )
    assert len({words(spec) for spec in (STATE, *others)}) == 5


def _of_two_strides() -> Config:
    config = config_of("LBNHC", [[FULL], [FULL]])
    config.kv_cache_tensors[1] = Placed(
        config.kv_cache_tensors[0].size, ["group1.layer0"], 0, FULL.page_size_bytes // 2
    )
    config.kv_cache_groups[1].kv_cache_spec = replace(FULL, head_size=4)
    return config


def _shifted() -> Config:
    config = config_of("LBNHC", [[FULL], [FULL]])
    config.kv_cache_tensors[1] = replace(config.kv_cache_tensors[1], offset=64)
    return config


def _changed(**changes: Any) -> Config:
    config = config_of("LBNHC", [[FULL] * 2])
    config.kv_cache_tensors[0] = replace(config.kv_cache_tensors[0], **changes)
    return config


def _of_a_group(**changes: Any) -> Config:
    config = config_of("LBNHC", [[FULL] * 2])
    config.kv_cache_groups[0] = replace(config.kv_cache_groups[0], **changes)
    return config


REFUSED = {
    "no KV": (lambda: Config(1, [], []), "keeps no KV"),
    "a kind nobody knows": (
        lambda: config_of("LBNHC", [[FULL], [StrangeSpec()]]),
        "KV group 1 has layers of kind StrangeSpec; served are Full",
    ),
    "states at no boundary": (
        lambda: config_of("LBNHC", [[FULL], [replace(STATE, mamba_cache_mode="none")]]),
        "KV group 1 keeps its states in mode 'none'",
    ),
    "KV in the host's memory": (lambda: _changed(host_resident=True), "HiSparse"),
    "a group in the host's memory": (lambda: _of_a_group(host_resident=True), "host's memory"),
    "a group that is not transferred": (lambda: _of_a_group(enable_kv_transfer=False), "prompts share"),
    "groups that step otherwise": (_of_two_strides, "blocks \\[128, 256\\] bytes apart"),
    "groups that are shifted": (_shifted, "shifted: a block's 320 bytes do not fit its stride of 256"),
    "strides of no layout": (lambda: _changed(block_stride=200), "no layout kvbm knows"),
    "blocks behind the end": (lambda: _changed(size=3000), "end at byte 3072 of an allocation of 3000"),
    "a layer of no group": (lambda: _changed(layers=["group0.layer0", "stranger"]), "stranger, which no KV group has"),
    "several allocations": (
        lambda: replace(
            _shifted(), kv_cache_tensors=[*_shifted().kv_cache_tensors, Placed(1, ["group0.layer0"], 0, 256)]
        ),
        "one allocation is served",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_makes_no_block_is_refused_in_words(what: str) -> None:
    make, message = REFUSED[what]
    with pytest.raises(LayoutError, match=message):
        block_regions(make())
