"""The bridge between publishers of KV events and a catalog, over real sockets and a real nats-server."""

from __future__ import annotations

import builtins
import os
import random
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from kvbm.assembly import bridge
from kvbm.assembly.bridge import run_bridge
from kvbm.assembly.start import OnStream
from kvbm.bridge.instance import BridgedInstance
from kvbm.config import SourceSettings, load_settings
from kvbm.core.errors import ConfigError, MissingExtraError
from kvbm.streams.foreign.identity import ForeignSource
from kvbm.streams.publisher.thread import PublisherThread
from tests.bridge_site import Site, site
from tests.bridged import native
from tests.eventually import eventually
from tests.foreign_engines import CLEARED, MODEL, Prompt, removed_event, stored_event
from tests.nats_fixture import cluster, nats_url
from tests.servers import free_port
from tests.zmq_publisher import Publisher

__all__ = ["cluster", "nats_url", "site"]

PROMPT = Prompt(tuple(range(100, 124)))  # six blocks
OTHER = Prompt(tuple(range(500, 512)))


@pytest.fixture
def publishers() -> Iterator[list[Publisher]]:
    made: list[Publisher] = []
    yield made
    for one in made:
        one.close()


def started(publishers: list[Publisher], *args: Any, **more: Any) -> Publisher:
    publishers.append(Publisher(*args, **more))
    return publishers[-1]


def test_a_lookup_by_tokens_finds_what_engines_without_our_code_hold(site: Site, publishers: list[Publisher]):
    vllm, sglang = started(publishers), started(publishers)
    vllm.publish(stored_event(PROMPT))  # before the bridge is there
    salted = PROMPT._replace(salt="s", lora="l")
    bridge = site.bridge(a=vllm.settings, b=sglang.settings | {"kind": "sglang"})
    bridge.agrees(PROMPT, {"a": {"HBM": 6}})
    sglang.publish(
        {
            "type": "BlockStored",
            "block_hashes": [-1, -2],
            "parent_block_hash": None,
            "token_ids": list(PROMPT.tokens[:8]),
            "block_size": 4,
            "lora_id": None,
            "medium": "CPU_PINNED",
        }
    )
    vllm.publish(stored_event(salted), stored_event(PROMPT, 0, 3, "CPU"))
    bridge.agrees(PROMPT, {"a": {"HBM": 6}, "b": {"HOST": 2}})
    bridge.agrees(salted, {"a": {"HBM": 6}})
    assert bridge.depths(salted._replace(salt="other")) == {}
    assert bridge.depths(salted._replace(salt="")) == {}
    vllm.publish(removed_event(PROMPT.keys()[4:]))
    bridge.agrees(PROMPT, {"a": {"HBM": 4}, "b": {"HOST": 2}})
    vllm.publish(CLEARED)
    bridge.agrees(PROMPT, {"a": {"HOST": 3}, "b": {"HOST": 2}})


@pytest.mark.parametrize(("kind", "kept"), [("vllm", {"a": {"HOST": 3}}), ("sglang", {})])
def test_a_cleared_cache_is_the_hosts_as_well_with_sglang_alone(
    site: Site, publishers: list[Publisher], kind: str, kept: dict[str, dict[str, int]]
):
    engine = started(publishers)
    bridge = site.bridge(a=engine.settings | {"kind": kind})
    engine.publish(stored_event(PROMPT, 0, 3, "CPU"), stored_event(OTHER))
    bridge.agrees(PROMPT, {"a": {"HOST": 3}})
    engine.publish(CLEARED)
    bridge.agrees(OTHER, {})
    bridge.agrees(PROMPT, kept)


def test_a_catalog_hashes_tokens_for_a_router_that_knows_the_namespace_by_its_id(
    site: Site, publishers: list[Publisher]
):
    engine = started(publishers)
    engine.publish(stored_event(PROMPT))
    bridge = site.bridge(a=engine.settings)
    bridge.agrees(PROMPT, {"a": {"HBM": 6}})
    (summary,) = site.catalog.namespaces()
    assert summary.fields == PROMPT.namespace()
    answer = site.catalog.lookup_tokens(summary.fields, b"", PROMPT.tokens)
    assert answer.instances[0].instance == "a"


def test_lost_messages_are_asked_for_again(site: Site, publishers: list[Publisher]):
    engine = started(publishers)
    bridge = site.bridge(a=engine.settings)
    engine.publish(stored_event(PROMPT, 0, 2))
    bridge.agrees(PROMPT, {"a": {"HBM": 2}})
    engine.publish(stored_event(PROMPT, 2, 4), is_lost=True)
    engine.publish(stored_event(PROMPT, 4, 6))
    bridge.agrees(PROMPT, {"a": {"HBM": 6}})
    engine.publish(removed_event(PROMPT.keys()[5:]), is_lost=True)  # and nothing comes after it
    bridge.agrees(PROMPT, {"a": {"HBM": 5}})


def test_a_burst_that_the_bridge_does_not_take_is_asked_for_again(site: Site, publishers: list[Publisher]):
    engine, count = started(publishers, hwm=5), 3000
    bridge = site.bridge(a=engine.settings)
    engine.publish(stored_event(PROMPT))
    bridge.agrees(PROMPT, {"a": {"HBM": 6}})
    for number in range(count):
        engine.publish(stored_event(Prompt((number, 1, 2, 3))))

    def held() -> int:
        found = site.catalog.instance("a")
        return 0 if found is None else found.held_blocks.get("HBM", 0)

    eventually(lambda: held() == count + 6, state=held)
    assert not site.catalog.instance("a").suspect  # type: ignore[union-attr]


def test_what_cannot_be_sent_again_costs_the_epoch(site: Site, publishers: list[Publisher]):
    engine = started(publishers, buffered=2)
    bridge = site.bridge(a=engine.settings)
    engine.publish(stored_event(PROMPT))
    bridge.agrees(PROMPT, {"a": {"HBM": 6}})
    before = site.catalog.instance("a")
    for _ in range(5):
        engine.publish(removed_event([1]), is_lost=True)
    engine.publish(stored_event(OTHER))
    bridge.agrees(OTHER, {"a": {"HBM": 3}})
    assert bridge.depths(PROMPT) == {}
    after = site.catalog.instance("a")
    assert before is not None
    assert after is not None
    assert after.epoch > before.epoch


def test_another_process_at_the_same_address_is_another_epoch(site: Site, publishers: list[Publisher]):
    engine = started(publishers, (free_port(), free_port()))
    bridge = site.bridge(a=engine.settings)
    engine.publish(stored_event(PROMPT))
    bridge.agrees(PROMPT, {"a": {"HBM": 6}})
    engine.close()
    publishers.clear()
    again = started(publishers, engine.ports)
    again.publish(stored_event(OTHER))
    bridge.agrees(OTHER, {"a": {"HBM": 3}})
    assert bridge.depths(PROMPT) == {}


@pytest.mark.parametrize("site", [2.0], indirect=True)
def test_an_engine_that_answers_nothing_is_left_out_until_it_answers(site: Site, publishers: list[Publisher]):
    engine = started(publishers)
    bridge = site.bridge(a=engine.settings | {"silence_s": 1.5})
    engine.publish(stored_event(PROMPT))
    bridge.agrees(PROMPT, {"a": {"HBM": 6}})
    engine.hangs.set()
    bridge.agrees(PROMPT, {})
    engine.hangs.clear()
    bridge.agrees(PROMPT, {"a": {"HBM": 6}})


def test_an_engine_that_sends_nothing_again_is_heard_all_the_same(site: Site, publishers: list[Publisher]):
    engine = started(publishers, replays=False)
    bridge = site.bridge(a=engine.settings)
    eventually(lambda: site.catalog.instance("a") is not None)

    def hears() -> bool:
        engine.publish(stored_event(PROMPT))
        return bridge.depths(PROMPT) == {"a": {"HBM": 6}}

    eventually(hears)
    engine.publish(removed_event([1]), is_lost=True)
    engine.publish(stored_event(OTHER))
    bridge.agrees(OTHER, {"a": {"HBM": 3}})
    assert bridge.depths(PROMPT) == {}


def neighbours_of_free_ports() -> int:
    """A port that nobody listens on, nor on those 1, 10 and 11 above it; below those that `free_port` or the system
    gives.
    """

    def is_free(port: int) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) != 0

    choose = random.Random(os.getpid())  # processes of tests have others
    return eventually(
        lambda: next(
            (
                base
                for base in [choose.randrange(10_000, 19_900)]
                if all(is_free(base + more) for more in (0, 1, 10, 11))
            ),
            0,
        )
    )


def test_ranks_are_instances_of_their_own(site: Site, publishers: list[Publisher]):
    base = neighbours_of_free_ports()
    for rank in range(2):
        started(publishers, (base + rank, base + 10 + rank)).publish(stored_event(PROMPT, 0, rank + 1), rank=rank)
    bridge = site.bridge(
        a={"endpoint": f"tcp://127.0.0.1:{base}", "replay": f"tcp://127.0.0.1:{base + 10}", "ranks": 2}
    )
    bridge.agrees(PROMPT, {"a-dp0": {"HBM": 1}, "a-dp1": {"HBM": 2}})


def test_bytes_that_make_no_sense_are_counted_where_people_look(site: Site, publishers: list[Publisher]):
    engine = started(publishers)
    bridge = site.bridge(a=engine.settings)
    engine.publish(stored_event(PROMPT, medium="TAPE"), {"type": "BlockMoved"})
    engine.publish_bytes(b"\xc1")
    engine.publish(stored_event(PROMPT))
    bridge.agrees(PROMPT, {"a": {"HBM": 6}})

    def trouble() -> str:
        found = site.catalog.instance("a")
        return found.trouble if found is not None else ""

    eventually(lambda: "1 unknown_medium" in trouble() and "1 unreadable" in trouble(), state=trouble)


def test_what_is_unknown_is_said_as_unknown(site: Site, publishers: list[Publisher]):
    engine = started(publishers)
    engine.publish(stored_event(PROMPT, medium="STORAGE"))
    bridge = site.bridge(a=engine.settings)
    bridge.agrees(PROMPT, {"a": {"NVME": 6}})
    found = site.catalog.instance("a")
    assert found is not None
    assert {(pool.slots, pool.block_bytes) for pool in found.pools} == {(0, 0)}
    fields = PROMPT.namespace()
    assert (fields.kv_dtype, fields.layout, fields.ranks, fields.revision) == ("unknown",) * 4


@pytest.mark.parametrize(
    ("sources", "words"),
    [
        ({}, "names no engine"),
        ({"a": {"endpoint": "tcp://h:1"}}, "model is empty"),
        ({"a": {"model": "m"}}, "endpoint is empty"),
        ({"a": {"model": "m", "endpoint": "h:1"}}, "write tcp://host:port"),
        ({"a": {"model": "m", "endpoint": "tcp://h"}}, "tcp://h"),
        ({"a": {"model": "m", "endpoint": "tcp://h:1", "kind": "x"}}, "use one of vllm, sglang"),
        ({"a b": {"model": "m", "endpoint": "tcp://h:1"}}, "the instance's name"),
        (
            {
                "a": {"model": "m", "endpoint": "tcp://h:1", "ranks": 2},
                "a-dp1": {"model": "m", "endpoint": "tcp://h:9"},
            },
            "two sources have it",
        ),
        (
            {"a": {"model": "m", "endpoint": "tcp://h:1"}, "b": {"model": "m", "endpoint": "tcp://h:1"}},
            "an engine is one source",
        ),
        ({"a": {"model": "m", "endpoint": "tcp://h:1", "speed": 1}}, "no setting of a source"),
        ({"a": {"model": "m", "endpoint": "tcp://h:1", "replay": "tcp://h:2", "ranks": 2}}, "1 ports apart, and 2"),
    ],
)
def test_settings_that_cannot_be_used_are_refused(sources: dict[str, Any], words: str, nats_url: str):
    with pytest.raises(ConfigError, match=words):
        run_bridge(load_settings(flags={"nats.url": nats_url, "bridge": {"sources": sources}}))


def test_without_zeromq_one_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    real = builtins.__import__

    def without(name: str, *args: Any, **more: Any) -> Any:
        if name.partition(".")[0] == "zmq":
            raise ImportError(name)
        return real(name, *args, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    source = {"a": {"model": "m", "endpoint": "tcp://h:1"}}
    with pytest.raises(MissingExtraError, match=r"kvbm-ledger\[bridge\]"):
        run_bridge(load_settings(flags={"bridge": {"sources": source}}))


def test_an_instance_whose_start_is_interrupted_is_published_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    class Recording(PublisherThread):
        """A publisher that never runs."""

        def start(self) -> None:
            done.append("start")

        def stop(self, timeout_s: float = 5.0) -> bool:
            done.append("stop")
            return super().stop(timeout_s)

    def interrupt(*given: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(bridge, "PublisherThread", Recording)
    monkeypatch.setattr(bridge, "ask_stream", lambda *given: OnStream())
    monkeypatch.setattr(BridgedInstance, "start", interrupt)
    known = SourceSettings(endpoint="tcp://127.0.0.1:1", model=MODEL)
    source: Any = SimpleNamespace(name="a", instance=None, is_alive=lambda: True)
    rank = bridge._Rank(source, native(ForeignSource(MODEL)).ledger, known)  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        bridge._open_instance(load_settings(), "nats://127.0.0.1:1", rank)
    assert done == ["start", "stop"] and source.instance is None
