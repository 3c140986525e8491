"""What a caller may give with a question."""

from __future__ import annotations

import pytest

from kvbm.core.answers import MAX_LIMIT, MAX_POSITIONS
from kvbm.core.errors import ArgumentError
from kvbm.core.ids import Namespace, NamespaceId
from kvbm.core.questions import checked_limit, checked_names, id_of, named

SPACE = Namespace(model="m", block_tokens=16)


def test_what_may_be_given_comes_back() -> None:
    assert checked_limit(MAX_LIMIT) == MAX_LIMIT
    assert checked_names(None) is None
    assert checked_names(("a", "b")) == ["a", "b"]
    assert id_of(SPACE) == id_of(SPACE.id) == SPACE.id
    assert named(SPACE) is SPACE
    assert named(SPACE.id) == SPACE.id.hex()


@pytest.mark.parametrize("limit", [0, -1, MAX_LIMIT + 1, True, 1.5, "8", None])
def test_no_other_limit_is_taken(limit: int) -> None:
    with pytest.raises(ArgumentError, match="limit"):
        checked_limit(limit)


@pytest.mark.parametrize("names", ["a", [b"a"], [1], ["a"] * (MAX_POSITIONS + 1)])
def test_names_are_texts_and_not_too_many(names: list[str]) -> None:
    with pytest.raises(ArgumentError, match="instances"):
        checked_names(names)


@pytest.mark.parametrize("namespace", [b"short", "0" * 32, None])
def test_a_namespace_is_its_fields_or_sixteen_bytes(namespace: NamespaceId) -> None:
    with pytest.raises(ArgumentError, match="namespace"):
        id_of(namespace)
