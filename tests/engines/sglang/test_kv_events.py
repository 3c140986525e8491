"""SGLang's own radix cache, event recorder and publisher feed the bridge: the catalog says what the caches hold."""

from __future__ import annotations

import argparse
import shlex
import threading
from array import array
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from sglang.srt.disaggregation.kv_events import EventPublisherFactory, KVEventBatch, KVEventsConfig
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.server_args import ServerArgs
from sglang.test.kits.unified_radix_cache import fixtures

from kvbm.assembly.bridge import run_bridge
from kvbm.config import load_settings
from kvbm.core.extra_keys import salted
from kvbm.core.hashing import sequence_hashes
from kvbm.core.ids import UNKNOWN, Namespace
from tests.catalog_site import Running, run_catalog
from tests.engines.bridge.harness.pages import SERVE_SGLANG
from tests.engines.sglang.harness.radix import CONFIG, RadixCache
from tests.eventually import WAIT_S, eventually
from tests.nats_fixture import cluster, nats_url  # noqa: F401
from tests.servers import free_port

MODEL, PAGE, FOR_EVER_S = "sglang-model", CONFIG.page_size, 3600.0
SPACE = Namespace(model=MODEL, block_tokens=PAGE, revision=UNKNOWN, kv_dtype=UNKNOWN, layout=UNKNOWN, ranks=UNKNOWN)


class Engine(NamedTuple):
    """A data-parallel rank of SGLang, without its model: its cache, its allocator, and its publisher."""

    cache: Any
    allocator: Any
    publisher: Any

    def insert(self, tokens: list[int], salt: str | None = None) -> None:
        """As a request that has been computed."""
        value = self.allocator.alloc(len(tokens))
        assert value is not None
        self.cache.insert(InsertParams(key=RadixKey(array("q", tokens), cache_salt=salt), value=value))

    def publish(self) -> None:
        """As its scheduler does after each step."""
        if events := self.cache.take_events():
            self.publisher.publish(KVEventBatch(ts=1.0, events=events))


def page_arguments() -> Any:
    """Those of SGLang's command in docs/bridge.md, as SGLang reads them."""
    words = shlex.split(SERVE_SGLANG.text)
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return parser.parse_args(words[3:])


def config_of(ports: tuple[int, int]) -> str:
    """The page's `--kv-events-config`, with other ports."""
    text = str(page_arguments().kv_events_config)
    return text.replace("5557", str(ports[0])).replace("5657", str(ports[1]))


def some_ports() -> tuple[int, int]:
    """Both with one behind it for the second rank."""
    given = {free_port() for _ in range(32)}
    first, _, second, *_ = (port for port in sorted(given) if port + 1 in given)
    return first, second


@pytest.fixture
def running(nats_url: str, cluster: str, sqlite_url: str) -> Iterator[Running]:  # noqa: F811
    yield from run_catalog(nats_url, cluster, sqlite_url, liveness_s=FOR_EVER_S)


@pytest.fixture
def ranks(running: Running) -> Iterator[list[Engine]]:
    """Two ranks, and a bridge that hears both."""
    ports, end = some_ports(), threading.Event()
    with RadixCache() as caches:
        made = []
        for rank in range(2):
            cache, allocator, _ = fixtures.build_fixture(CONFIG, enable_kv_cache_events=True)
            caches._init_hicache(cache)
            made.append(Engine(cache, allocator, EventPublisherFactory.create(config_of(ports), rank)))
        source = {
            "kind": "sglang",
            "endpoint": f"tcp://127.0.0.1:{ports[0]}",
            "replay": f"tcp://127.0.0.1:{ports[1]}",
            "model": MODEL,
            "ranks": 2,
        }
        flags = {
            "instance.cluster": str(running.settings.cluster),
            "nats.url": running.settings.nats_url,
            "bridge": {"sources": {"sgl": source}},
        }
        bridge = threading.Thread(target=run_bridge, args=(load_settings(flags=flags), lambda: not end.is_set()))
        bridge.start()
        try:
            yield made
        finally:
            end.set()
            bridge.join(WAIT_S)
            for engine in made:
                engine.publisher.shutdown()


def depths(running: Running, tokens: list[int], salt: str = "") -> dict[str, dict[str, int]]:
    hashes = sequence_hashes(tokens, PAGE, SPACE.root(), salted(salt, len(tokens) // PAGE))
    found = running.client.lookup(SPACE, hashes).instances
    return {one.instance: {tier: count for tier, count in one.tiers.items() if count} for one in found}


def agree(running: Running, tokens: list[int], expected: dict[str, dict[str, int]], salt: str = "") -> None:
    eventually(
        lambda: depths(running, tokens, salt) == expected,
        f"{expected} were expected",
        state=lambda: depths(running, tokens, salt),
    )


def test_the_catalog_says_what_sglangs_own_caches_hold(running: Running, ranks: list[Engine]) -> None:
    first, second = ranks
    prompt, other, alone = list(range(1000, 1032)), list(range(2000, 2016)), list(range(4000, 4032))
    longer = [*prompt[:16], *range(3000, 3016)]
    first.insert(prompt)
    first.insert(longer)
    first.insert(other, salt="pepper")
    first.insert(alone)
    second.insert(prompt[:8])
    for engine in ranks:
        engine.publish()
    agree(running, prompt, {"sgl-dp0": {"HBM": 8}, "sgl-dp1": {"HBM": 2}})
    agree(running, longer, {"sgl-dp0": {"HBM": 8}, "sgl-dp1": {"HBM": 2}})
    agree(running, other, {"sgl-dp0": {"HBM": 4}}, salt="pepper")
    assert depths(running, other) == depths(running, other, "salt") == {}  # another salt must not match
    # To host memory, and then out of HBM.
    leaf = fixtures.match_prefix(first.cache, alone).last_device_node
    fixtures.write_backup(first.cache, leaf, write_back=True)
    first.cache.writing_check(write_back=True)
    first.cache.evict(EvictParams(num_tokens=CONFIG.kv_size))
    first.publish()
    agree(running, alone, {"sgl-dp0": {"HOST": 8}})
    agree(running, prompt, {"sgl-dp1": {"HBM": 2}})
    agree(running, other, {}, salt="pepper")
    # All of it forgotten.
    for engine in ranks:
        engine.cache.reset()
        engine.publish()
    for tokens in (alone, prompt):
        agree(running, tokens, {})
    first.insert(prompt)
    first.publish()
    agree(running, prompt, {"sgl-dp0": {"HBM": 8}})


def test_the_pages_command_is_one_that_sglang_understands() -> None:
    """The engine itself needs a GPU."""
    found = page_arguments()
    assert found.dp_size == 2
    config = KVEventsConfig.from_cli(found.kv_events_config)
    assert (config.publisher, config.endpoint, config.replay_endpoint) == ("zmq", "tcp://*:5557", "tcp://*:5657")


def test_what_sglangs_publisher_sends_again_is_what_a_late_bridge_needs(
    running: Running,
    nats_url: str,  # noqa: F811
    cluster: str,  # noqa: F811
) -> None:
    ports, end = some_ports(), threading.Event()
    prompt = list(range(1000, 1032))
    with RadixCache():
        cache, allocator, _ = fixtures.build_fixture(CONFIG, enable_kv_cache_events=True)
        engine = Engine(cache, allocator, EventPublisherFactory.create(config_of(ports), 0))
        engine.insert(prompt[:16])
        engine.publish()
        engine.insert(prompt)
        engine.publish()
        source = {"kind": "sglang", "model": MODEL, "endpoint": f"tcp://127.0.0.1:{ports[0]}"}
        source |= {"replay": f"tcp://127.0.0.1:{ports[1]}"}
        flags = {"instance.cluster": cluster, "nats.url": nats_url, "bridge": {"sources": {"late": source}}}
        bridge = threading.Thread(target=run_bridge, args=(load_settings(flags=flags), lambda: not end.is_set()))
        bridge.start()
        try:
            agree(running, prompt, {"late": {"HBM": 8}})
        finally:
            end.set()
            bridge.join(WAIT_S)
            engine.publisher.shutdown()
