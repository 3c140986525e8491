"""Namespaces: ids and roots stay what they are when fields come later."""

from __future__ import annotations

import msgspec

from kvbm.core import codec
from kvbm.core.events import InstanceStarted
from kvbm.core.ids import Epoch, Namespace


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
