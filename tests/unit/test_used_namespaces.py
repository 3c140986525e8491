"""Heartbeats name the namespaces used last, however many names clients choose."""

from __future__ import annotations

from typing import Any

from kvbm.core.ids import MAX_FIELDS_BYTES, MAX_TEXT_BYTES, Namespace, NamespaceId, namespace_in
from kvbm.manager.used_namespaces import TOLD, TOLD_BYTES, UsedNamespaces


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


def test_heartbeats_tell_in_turn_what_the_namespaces_are_that_the_start_has_named_and_that_are_used() -> None:
    spaces = {one.id: one for one in (Namespace(model="m", block_tokens=16, tenant=str(at)) for at in range(7))}
    began, late, unused = list(spaces)[:4], list(spaces)[4:6], list(spaces)[6]
    used = UsedNamespaces(fields=spaces, begun_with=began)
    for one in late:
        used.use(one)
    used.use(name(1))  # whose fields nobody knows
    told = [namespace_in(words) for _ in range(3) for words in used.told()]
    assert len(told) == 3 * TOLD and {one.id for one in told if one is not None} == {*began, *late}
    assert unused not in {one.id for one in told if one is not None}
    # What is erased is told of when it is used again.
    for one in (began[0], late[0]):
        used.forget(one)
    told = [namespace_in(words) for _ in range(3) for words in used.told()]
    assert {one.id for one in told if one is not None} == {*began[1:], late[1]}
    used.use(began[0])
    told = [namespace_in(words) for _ in range(3) for words in used.told()]
    assert began[0] in {one.id for one in told if one is not None}


def test_namespaces_with_long_fields_are_told_of_one_by_one() -> None:
    spaces = {one.id: one for one in (Namespace(model="m" * TOLD_BYTES + str(at), block_tokens=16) for at in range(3))}
    used = UsedNamespaces(fields=spaces, begun_with=spaces)
    told = [used.told() for _ in range(3)]
    assert [len(one) for one in told] == [1, 1, 1] and len({*told}) == 3


def test_fields_that_are_not_as_they_are_written_are_nobodys() -> None:
    words = Namespace(model="m", block_tokens=16).canonical()
    found = namespace_in(words)
    assert found is not None and found.canonical() == words
    large = words.replace(b'"scheme_seed":0', b'"scheme_seed":18446744073709551616')  # no checkpoint could keep it
    for wrong in (b"", b"{", b" " + words, words[:-1] + b',"zeal":1}', words.replace(b"16", b"0"), b"\xff" * 8, large):
        assert namespace_in(wrong) is None


def test_fields_that_no_reader_would_take_are_not_told_of() -> None:
    texts: dict[str, Any] = dict.fromkeys(("model", "lora"), "\x01" * MAX_TEXT_BYTES)
    escaped = Namespace(block_tokens=16, **texts)
    plain = Namespace(model="m", block_tokens=16)
    assert len(escaped.canonical()) > MAX_FIELDS_BYTES
    used = UsedNamespaces(fields={one.id: one for one in (escaped, plain)}, begun_with=(escaped.id, plain.id))
    assert {words for _ in range(3) for words in used.told()} == {plain.canonical()}
