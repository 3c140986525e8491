"""Heartbeats name the namespaces used last, however many names clients choose."""

from __future__ import annotations

from kvbm.core.ids import NamespaceId
from kvbm.manager.used_namespaces import UsedNamespaces


def name(number: int) -> NamespaceId:
    return NamespaceId(number.to_bytes(16, "big"))


def test_of_too_many_namespaces_the_one_goes_that_was_not_used_for_longest() -> None:
    used = UsedNamespaces(3)
    for number in (3, 1, 2, 3, 4):
        used.use(name(number))
    assert used.named() == (name(2), name(3), name(4))
    assert name(1) not in used and name(3) in used


def test_the_same_namespaces_are_named_alike_whichever_was_used_last() -> None:
    used = UsedNamespaces()
    for number in (2, 1):
        used.use(name(number))
    before = used.named()
    used.use(name(2))
    assert used.named() == before


def test_what_is_forgotten_is_named_when_it_is_used_again() -> None:
    used = UsedNamespaces()
    used.use(name(1))
    used.forget(name(1))
    used.forget(name(2))
    assert used.named() == ()
    used.use(name(1))
    assert used.named() == (name(1),)
