"""What a prefiller and a decoder tell each other in `kv_transfer_params`, which any client may have written."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbm.engines.vllm.handoff import KEY, HandoffHint, hint_of, is_computed_now, is_for_a_decoder, wants_hint

HINT = HandoffHint("prefill-0", 7, True, bytes(range(16)), 4096, bytes(range(16, 32)), 1_800_000_000_000)
WORDS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=40),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)


def test_a_hint_comes_back_from_json_as_it_was() -> None:
    assert hint_of(json.loads(json.dumps(HINT.params()))) == HINT


@given(WORDS)
def test_no_words_are_an_error(words: Any) -> None:
    for params in (words, {KEY: words}):
        assert hint_of(params) is None
        assert {is_for_a_decoder(params), wants_hint(params), is_computed_now(params)} <= {True, False}


@given(st.sampled_from(sorted(HINT.params()[KEY])), WORDS)
def test_a_hint_of_which_one_word_is_another_makes_sense_or_is_none(name: str, word: Any) -> None:
    found = hint_of({KEY: HINT.params()[KEY] | {name: word}})
    assert found is None or found.params()[KEY] == HINT.params()[KEY] | {name: word}


@pytest.mark.parametrize("name", sorted(HINT.params()[KEY]))
def test_a_hint_without_one_of_its_words_is_none(name: str) -> None:
    assert hint_of({KEY: {key: word for key, word in HINT.params()[KEY].items() if key != name}}) is None


def test_what_a_later_version_adds_is_passed_over() -> None:
    assert hint_of({KEY: HINT.params()[KEY] | {"more": [1, 2]}, "do_remote_prefill": True}) == HINT
    assert hint_of({KEY: HINT.params()[KEY] | {"version": 2}}) is None


@pytest.mark.parametrize(
    ("params", "for_a_decoder", "wants", "computed_now"),
    [
        (None, False, False, False),
        ({}, False, False, False),
        ({"do_remote_decode": True, "remote_host": None}, True, True, False),
        ({"do_remote_decode": False}, False, False, False),
        ({"remote_decoder": {"kv_request_id": "r"}}, True, False, False),
        ({"remote_prefiller": {"kv_request_id": "r", "remote_host": "h", "remote_port": 1}}, False, False, True),
        ({"remote_prefiller": {"kv_request_id": "r", "remote_host": "h"}}, False, False, False),
        ({"remote_prefiller": 1}, False, False, False),
    ],
)
def test_what_proxies_say_of_a_request(params: Any, for_a_decoder: bool, wants: bool, computed_now: bool) -> None:
    assert (is_for_a_decoder(params), wants_hint(params), is_computed_now(params)) == (
        for_a_decoder,
        wants,
        computed_now,
    )
