"""Namespaces: ids and roots stay what they are when fields come later."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvbm.core import codec
from kvbm.core.errors import ArgumentValueError, LayoutError, MalformedFrameError
from kvbm.core.events import MAX_POOLS, MAX_TOPOLOGY, InstanceStarted, PoolStated
from kvbm.core.ids import MAX_NAME_BYTES, MAX_TEXT_BYTES, Epoch, Namespace, Reach, Tier


class Later(Namespace, frozen=True, kw_only=True):
    """A namespace as a later kvbm may know it."""

    image_size: int = 0


def test_a_field_that_came_later_is_left_out_at_its_default() -> None:
    first, same = Namespace(model="m", block_tokens=16), Later(model="m", block_tokens=16)
    other = Later(model="m", block_tokens=16, image_size=448)
    assert same.canonical() == first.canonical() == msgspec.json.encode(first, order="sorted")
    assert (same.id, same.root(b"s")) == (first.id, first.root(b"s"))
    assert other.id != first.id and other.root(b"s") != first.root(b"s")
    assert b'"image_size":448' in other.canonical()


def test_a_start_that_names_a_namespace_with_a_later_field_at_its_default_is_the_same_bytes() -> None:
    def encoded(namespace: Namespace) -> bytes:
        return codec.encode_started(InstanceStarted(epoch=Epoch(1), namespaces=(namespace,)))

    first = encoded(Namespace(model="m", block_tokens=16))
    assert encoded(Later(model="m", block_tokens=16)) == first
    assert encoded(Later(model="m", block_tokens=16, image_size=448)) != first
    assert codec.decode_started(first, 0).namespaces == (Namespace(model="m", block_tokens=16),)


@pytest.mark.parametrize("name", ["model", "revision", "kv_dtype", "layout", "ranks", "lora", "tenant", "scheme"])
def test_a_text_of_a_namespace_has_a_bound(name: str) -> None:
    most_bytes = MAX_NAME_BYTES if name == "tenant" else MAX_TEXT_BYTES
    fields: dict[str, Any] = {"model": "m", "block_tokens": 16}
    assert Namespace(**fields | {name: "ä" * (most_bytes // 2)})
    with pytest.raises(
        ArgumentValueError, match=f"{name} has {most_bytes // 2 * 2 + 2} bytes; give at most {most_bytes}"
    ):
        Namespace(**fields | {name: "ä" * (most_bytes // 2 + 1)})


LONG_NAME, LONG_TEXT = "p" * (MAX_NAME_BYTES + 1), "t" * (MAX_TEXT_BYTES + 1)
STARTS = {
    "pool": InstanceStarted(epoch=Epoch(1), pools=(PoolStated(Tier.OBJECT, 0, 64, Reach.CLUSTER, LONG_NAME),)),
    "pools": InstanceStarted(epoch=Epoch(1), pools=(PoolStated(Tier.HBM, 1, 64),) * (MAX_POOLS + 1)),
    "topology": InstanceStarted(epoch=Epoch(1), topology=("rack", LONG_TEXT)),
    "places": InstanceStarted(epoch=Epoch(1), topology=("rack",) * (MAX_TOPOLOGY + 1)),
    "engine": InstanceStarted(epoch=Epoch(1), engine=LONG_TEXT),
    "version": InstanceStarted(epoch=Epoch(1), version=LONG_TEXT),
}


@pytest.mark.parametrize("what", STARTS)
def test_a_start_that_says_more_than_readers_keep_is_neither_written_nor_read(what: str) -> None:
    with pytest.raises(LayoutError, match="fit"):
        codec.encode_started(STARTS[what])
    with pytest.raises(MalformedFrameError, match="fit"):
        codec.decode_started(codec._started_bytes(STARTS[what]), 0)
