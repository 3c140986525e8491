"""A manager over the tensors an engine keeps its KV in, one a layer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kvbm
from kvbm.core.errors import ConfigError
from kvbm.core.ids import HASH_BYTES, NO_PARENT, Tier
from tests.extras import needed

torch = needed("torch", "engine")

DIMS = ("kv", "slots", "tokens", "heads", "dim")
SLOTS, LAYERS, WAIT_S = 12, 3, 60.0


def engine_layers() -> list[list[kvbm.PagedTensor]]:
    return [[kvbm.PagedTensor(torch.zeros(2, SLOTS, 16, 2, 8, dtype=torch.bfloat16), DIMS)] for _ in range(LAYERS)]


def opened(folder: Path, layers: list[list[kvbm.PagedTensor]], layout: str = "", **flags: Any) -> kvbm.Manager:
    found = kvbm.paged_layout(layers)
    namespace = kvbm.Namespace(model="paged", revision="r1", block_tokens=16, layout=layout or found.layout)
    given = {
        "instance.data_dir": str(folder),
        "pools.host.slots": 8,
        "pools.nvme.slots": 16,
        "nats.enabled": False,
        "onboard.wait_s": WAIT_S,
        **{name.replace("__", "."): value for name, value in flags.items()},
    }
    return kvbm.open_manager(kvbm.load_settings(flags=given), [namespace], found.block_bytes, layers=layers)


def filled(layers: list[list[kvbm.PagedTensor]], slots: list[int], value: Callable[[int, int], float]) -> None:
    """What an engine does: every layer's KV of some blocks."""
    for layer, (paged,) in enumerate(layers):
        for block, slot in enumerate(slots):
            paged.tensor[:, slot] = value(layer, block)


def holds(layers: list[list[kvbm.PagedTensor]], slots: list[int], value: Callable[[int, int], float]) -> bool:
    return all(
        bool((paged.tensor[:, slot] == value(layer, block)).all())
        for layer, (paged,) in enumerate(layers)
        for block, slot in enumerate(slots)
    )


def test_kv_of_an_engines_layers_comes_back_from_host_and_nvme_into_other_slots(tmp_path: Path) -> None:
    layers = engine_layers()

    def value(layer: int, block: int) -> float:
        return layer * 16 + block + 1

    with opened(tmp_path, layers) as manager:
        namespace = kvbm.Namespace(
            model="paged", revision="r1", block_tokens=16, layout=kvbm.paged_layout(layers).layout
        )
        hashes = manager.hash_tokens(list(range(64)), namespace.root(), 16)
        first = manager.allocate(4)
        assert first is not None
        filled(layers, first, value)
        manager.unpin(manager.create(namespace.id, NO_PARENT, 0, hashes, first))
        assert manager.settle(WAIT_S)
        for colder in ((), (Tier.HOST,)):
            for tier in (Tier.HBM, *colder):
                manager.evict(tier, hashes)
            taken = manager.allocate(5)  # somebody else's blocks, in the slots that were ours
            assert taken is not None
            filled(layers, taken, lambda layer, block: -1)
            prefix = manager.acquire(namespace.id, hashes)
            assert prefix.hits == {Tier.NVME if colder else Tier.HOST: len(hashes) // HASH_BYTES}
            assert holds(layers, prefix.slots, value)
            assert holds(layers, taken, lambda layer, block: -1)
            manager.release(taken)
            manager.unpin(prefix.slots)
            assert manager.settle(WAIT_S)


def test_a_namespace_of_another_layout_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"layers=3 kv=2 heads=2 tokens=16 .* give it paged_layout"):
        opened(tmp_path, engine_layers(), layout="layers=3 kv=2 heads=2 tokens=16 dim=8 dtype=bfloat16")


def test_a_pool_of_another_size_than_the_tensors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"pools\.hbm has 13 slots, the engine's tensors 12"):
        opened(tmp_path, engine_layers(), pools__hbm__slots=13)
