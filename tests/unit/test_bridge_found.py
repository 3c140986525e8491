"""What an SGLang server says of itself, as where its events are."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbm.bridge.found import FoundEngine, NotFoundError, read_server_info
from tests.examples import examples

EVENTS = {"publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558", "topic": "kv"}


def info(events: dict[str, Any] | None = None, **more: Any) -> bytes:
    said: dict[str, Any] = {"model_path": "/models/llama", "served_model_name": "llama", "page_size": 16, "dp_size": 2}
    if events is not None:
        said["kv_events_config"] = json.dumps(events)
    return json.dumps(said | {"internal_states": [{}], "version": "0.5.23"} | more).encode()


def test_a_server_says_where_its_events_are():
    found = read_server_info(info(EVENTS), "http://10.0.0.7:30000")
    assert found == FoundEngine("tcp://10.0.0.7:5557", "tcp://10.0.0.7:5558", "kv", 2, "llama", 16)
    found = read_server_info(info({"publisher": "zmq"}, served_model_name=None, dp_size=1), "http://[::1]:30000")
    assert found == FoundEngine("tcp://[::1]:5557", "", "", 1, "/models/llama", 16)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (info(), "--kv-events-config"),
        (info({"publisher": "null"}), "--kv-events-config"),
        (info(EVENTS | {"endpoint": "tcp://10.0.0.1:5557"}), r"tcp://\*:5557"),
        (info(EVENTS | {"endpoint": "inproc://x"}), "no other machine"),
        (info(EVENTS, dp_size=0), "says nothing"),
        (b"<html>", "says nothing"),
        (b"[" * 100_000, "says nothing"),
        (b"", "says nothing"),
    ],
)
def test_a_server_that_does_not_is_told_of_in_words(body: bytes, words: str) -> None:
    with pytest.raises(NotFoundError, match=words):
        read_server_info(body, "http://10.0.0.7:30000")


@settings(max_examples=examples(100), deadline=None)
@given(st.binary(max_size=100), st.dictionaries(st.sampled_from(sorted(EVENTS)), st.none() | st.text() | st.integers()))
def test_fuzz(data: bytes, events: dict[str, Any]) -> None:
    for body in (data, info(EVENTS | events)):
        try:
            read_server_info(body, "http://h:1")
        except NotFoundError:
            pass
