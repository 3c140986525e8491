"""Texts in files that others read: every text comes out as it went in."""

from __future__ import annotations

import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbm.core.quoting import nats_text, toml_text, toml_texts

TEXTS = st.text(st.characters(exclude_categories=["Cs"]))


@given(st.lists(TEXTS))
def test_a_text_comes_out_of_toml_as_it_went_in(texts: list[str]) -> None:
    lines = [
        f"all = {toml_texts(texts)}",
        *(f"{toml_text(str(at) + text)} = {toml_text(text)}" for at, text in enumerate(texts)),
    ]
    assert list(tomllib.loads("\n".join(lines)).values()) == [texts, *texts]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("kvbm", '"kvbm"'),
        ('a"b\\c', r'"a\x22b\x5cc"'),
        ("é", r'"\xc3\xa9"'),
        (b"\xff\n$x", r'"\xff\x0a$x"'),
        ("", '""'),
    ],
)
def test_a_text_of_nats_server_has_the_escapes_it_knows(value: str | bytes, words: str) -> None:
    assert nats_text(value) == words
