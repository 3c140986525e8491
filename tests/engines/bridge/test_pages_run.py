"""docs/routers.md and docs/bridge.md as they are written: engines, routers and the bridge by the pages' commands, and
what each router makes of blocks that lie in HOST alone.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvbm.core.extra_keys import salted
from kvbm.core.hashing import sequence_hashes
from kvbm.core.ids import UNKNOWN, Namespace
from kvbm.streams.foreign.wire import Kind, decode_batch
from tests.engines.bridge.harness.engines import BLOCK_TOKENS, Models, Prompt
from tests.engines.bridge.harness.pages import (
    BRIDGE,
    COMMANDS,
    HBM_BLOCKS,
    HOST_BYTES,
    MODEL,
    SERVE,
    SERVE_LLM_D,
    SERVE_PLAIN,
    Pages,
    Router,
    Worker,
    block_with,
    commands_of,
    complete,
)
from tests.engines.bridge.harness.site import Site
from tests.eventually import eventually
from tests.extras import needed
from tests.pages import ROOT, blocks
from tests.servers import free_port, start_process, stop_process
from tests.zmq_publisher import Publisher

zmq = needed("zmq", "bridge")
pytestmark = pytest.mark.timeout(1200)  # five engines start with the first test

PAGES = ("bridge.md", "routers.md")
PROMPT_BLOCKS = 8
HERE = str(Path(__file__).relative_to(ROOT))
SMALLER = {"8589934592": str(HOST_BYTES)}
SPACE = Namespace(
    model=MODEL, block_tokens=BLOCK_TOKENS, revision=UNKNOWN, kv_dtype=UNKNOWN, layout=UNKNOWN, ranks=UNKNOWN
)
Depths = Callable[[Prompt], dict[int, dict[str, int]]]


class Followed(NamedTuple):
    """Engines as the pages start them.

    Attributes:
        one, two: with `publish.engine_events`. off: without it.
        llm_d: that of llm-d's section, whose events `heard` hears.
        plain: that of docs/bridge.md, without kvbm.
    """

    pages: Pages
    one: Worker
    two: Worker
    off: Worker
    llm_d: Worker
    heard: Any
    plain: Worker


class Routers(NamedTuple):
    router: Router
    indexer: Depths


@pytest.fixture(scope="module")
def followed(tiny: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Followed]:
    pages, context, port = Pages(tmp_path_factory.mktemp("pages"), tiny.model), zmq.Context(), free_port()
    heard = context.socket(zmq.SUB)
    heard.setsockopt(zmq.SUBSCRIBE, b"")
    heard.bind(f"tcp://127.0.0.1:{port}")
    serve = SERVE.text
    off = serve.replace('"publish.engine_events": true', '"publish.engine_events": false')
    llm_d = SERVE_LLM_D.text.replace("llm-d-router:5557", f"127.0.0.1:{port}")
    assert off != serve
    with closing(pages):
        made = Followed(
            pages,
            Worker(pages, "one", serve, "10.0.0.10", SMALLER),
            Worker(pages, "two", serve, "10.0.0.11", SMALLER),
            Worker(pages, "off", off, "10.0.0.11", SMALLER),
            Worker(pages, "llm-d", llm_d, "", SMALLER),
            heard,
            Worker(pages, "plain", SERVE_PLAIN.text, "10.0.0.10", {}),
        )
        for worker in (made.one, made.two, made.off, made.llm_d, made.plain):
            worker.wait_ready()
        yield made
    context.destroy(0)


@pytest.fixture(scope="module")
def routers(followed: Followed) -> Routers:
    workers = [followed.one, followed.two]
    return Routers(followed.pages.router(workers), followed.pages.indexer(workers))


@pytest.fixture
def choose(request: pytest.FixtureRequest) -> random.Random:
    return random.Random(request.node.name)


def some(choose: random.Random, count: int, salt: str = "") -> list[Prompt]:
    length = PROMPT_BLOCKS * BLOCK_TOKENS + 5
    return [Prompt(tuple(choose.randrange(11, 512) for _ in range(length)), salt) for _ in range(count)]


def in_host_alone(worker: Worker, choose: random.Random, count: int, salt: str = "") -> list[Prompt]:
    """Prompts that were computed by a worker and have left its HBM since."""
    prompts = some(choose, count, salt)
    for prompt in (*prompts, *some(choose, HBM_BLOCKS // PROMPT_BLOCKS + 1)):
        assert complete(worker.url, prompt) == 0
    return prompts


def test_each_command_of_the_pages_is_run_here_or_read_by_sglang() -> None:
    """SGLang's is read in tests/engines/sglang/test_kv_events.py: it needs a GPU. Others' settings are checked, and the
    rest runs, in tests/integration/test_pages.py.
    """
    written = []
    for page in PAGES:
        for block in blocks(ROOT / "docs" / page):
            if block.language == "sh":
                assert block.kind == "not run" and HERE in block.words, f"{block.place}: {block.words}"
                written += commands_of(block)
    assert sorted(written) == sorted(command.text for command in COMMANDS)


def test_prompts_go_to_the_worker_that_holds_them_in_host_alone(
    followed: Followed, routers: Routers, choose: random.Random
) -> None:
    held = [
        (number, worker, prompt)
        for number, worker in ((1, followed.one), (2, followed.two))
        for prompt in in_host_alone(worker, choose, 4)
    ]
    choose.shuffle(held)
    for number, worker, prompt in held:

        def is_told(number: int = number, worker: Worker = worker, prompt: Prompt = prompt) -> bool:
            worker.step()
            found = routers.indexer(prompt)
            return found.keys() == {number} and found[number]["cpu"] == PROMPT_BLOCKS and "gpu" not in found[number]

        eventually(is_told, state=lambda prompt=prompt: routers.indexer(prompt))
    for _, worker, prompt in held:
        asked, lookups = worker.asked(), routers.router.lookups()
        assert complete(routers.router.url, prompt) == PROMPT_BLOCKS * BLOCK_TOKENS
        assert worker.asked() == asked + 1
        assert routers.router.lookups() == (lookups[0] + 1, lookups[1])
    (nowhere,) = some(choose, 1)
    hits, misses = routers.router.lookups()
    assert complete(routers.router.url, nowhere) == 0
    assert routers.router.lookups() == (hits, misses + 1)


def test_without_engine_events_both_miss_what_lies_in_host_alone(followed: Followed, choose: random.Random) -> None:
    workers = [followed.one, followed.off]
    router, indexer = followed.pages.router(workers), followed.pages.indexer(workers)

    def hears(worker: Worker) -> bool:
        """Whether what is in a worker's HBM is known to both: they listen."""
        (prompt,) = some(choose, 1)
        complete(worker.url, prompt)
        hits, _ = router.lookups()
        complete(router.url, prompt)
        return bool(indexer(prompt)) and router.lookups()[0] == hits + 1

    for worker in workers:
        eventually(lambda worker=worker: hears(worker), "the routers do not listen")
    for prompt in in_host_alone(followed.off, choose, 3):
        followed.off.step()
        assert indexer(prompt) == {}
        hits, misses = router.lookups()
        complete(router.url, prompt)
        assert router.lookups() == (hits, misses + 1)
    (held, *_) = in_host_alone(followed.one, choose, 1)
    eventually(lambda: followed.one.step() or indexer(held).get(1, {}).get("cpu") == PROMPT_BLOCKS)


def test_after_a_reset_of_the_prefix_cache_routers_know_again_what_lies_in_host(
    followed: Followed, routers: Routers, choose: random.Random
) -> None:
    prompts = in_host_alone(followed.two, choose, 2)
    depth = PROMPT_BLOCKS * BLOCK_TOKENS
    eventually(lambda: followed.two.step() or routers.indexer(prompts[1]).get(2, {}).get("cpu") == PROMPT_BLOCKS)
    followed.two.reset()
    for prompt in prompts:
        eventually(lambda prompt=prompt: followed.two.step() or routers.indexer(prompt).get(2, {}).get("cpu") == 8)
        hits, misses = routers.router.lookups()
        assert complete(routers.router.url, prompt) == depth
        assert routers.router.lookups() == (hits + 1, misses)


def test_both_routers_ignore_salts_and_the_engine_does_not(
    followed: Followed, routers: Routers, choose: random.Random
) -> None:
    """As docs/routers.md has it: a prompt without a salt seems to be where it lies with one, and nothing is reused."""
    for prompt in in_host_alone(followed.one, choose, 2, salt="pepper"):
        plain = prompt._replace(salt="")
        eventually(lambda plain=plain: followed.one.step() or routers.indexer(plain).get(1, {}).get("cpu") == 8)
        (hits, misses), asked = routers.router.lookups(), followed.one.asked()
        assert complete(routers.router.url, plain) == 0
        assert routers.router.lookups() == (hits + 1, misses)
        assert followed.one.asked() == asked + 1
        lookups = routers.router.lookups()
        complete(routers.router.url, prompt)
        assert routers.router.lookups() == lookups  # it is not asked where a salted prompt lies


def test_llm_d_gets_our_tiers_under_its_topic(followed: Followed, choose: random.Random) -> None:
    topics: set[bytes] = set()
    media: set[str] = set()

    def hears() -> bool:
        """What is new in the engine, until the listener has some of it: a subscription takes effect while it polls."""
        complete(followed.llm_d.url, *some(choose, 1))
        return bool(followed.heard.poll(200))

    def came() -> bool:
        followed.llm_d.step()
        while followed.heard.poll(100):
            topic, _, payload = followed.heard.recv_multipart()
            topics.add(topic)
            media.update(getattr(event, "medium", "") for event in decode_batch(payload, kind=Kind.VLLM).events)
        return {"GPU", "CPU"} <= media

    eventually(hears, "nothing is heard of the engine")
    (prompt,) = in_host_alone(followed.llm_d, choose, 1)
    eventually(came, state=lambda: (topics, media))
    assert topics == {f"kv@pod-0@{MODEL}".encode()}
    assert complete(followed.llm_d.url, prompt) == PROMPT_BLOCKS * BLOCK_TOKENS


class Ranks:
    """SGLang's two ranks: its engine needs a GPU, so a publisher stands for each, at neighbouring ports."""

    def __init__(self) -> None:
        given = {free_port() for _ in range(32)}
        self.ports = tuple(port for port in sorted(given) if port + 1 in given)[:4:2]
        self.publishers = [Publisher((self.ports[0] + rank, self.ports[1] + rank)) for rank in range(2)]

    def close(self) -> None:
        for publisher in self.publishers:
            publisher.close()


def settings_here(site: Site, plain: Worker, ranks: Ranks) -> str:
    """The page's settings of the bridge, for this machine."""
    text = block_with("bridge.md", "[bridge.sources.llama-0]").text
    of_sglang = zip(("5557", "5657"), ranks.ports, strict=True)
    places = plain.places | {f"10.0.0.11:{at}": f"127.0.0.1:{port}" for at, port in of_sglang}
    for place, here in places.items():
        text = text.replace(place, here)
    text = text.replace("nats://127.0.0.1:4222", site.nats_url).replace('"local"', f'"{site.cluster}"')
    return text.replace("block_tokens = 16", f"block_tokens = {BLOCK_TOKENS}")


def test_a_lookup_says_what_the_next_request_finds_cached_where_the_bridge_runs_as_on_its_page(
    followed: Followed, site: Site, choose: random.Random
) -> None:
    ranks = Ranks()
    (site.folder / "bridge.toml").write_text(settings_here(site, followed.plain, ranks))
    bridge = start_process([sys.executable, "-m", *BRIDGE.text.split()], site.folder / "bridge.log", cwd=site.folder)
    try:
        prompts = [*some(choose, 2), *some(choose, 1, salt="pepper")]  # all of them, and one more, fit into HBM
        for prompt in prompts:
            assert complete(followed.plain.url, prompt) == 0
        strange = [prompts[2]._replace(salt=""), prompts[0]._replace(salt="s"), *some(choose, 1)]
        for prompt in (*prompts, *strange):
            expected = 0 if prompt in strange else PROMPT_BLOCKS
            eventually(lambda prompt=prompt, expected=expected: depths(site, prompt) == {"llama-0": expected})
        for prompt in (*prompts, strange[0]):
            depth = depths(site, prompt)["llama-0"]
            assert complete(followed.plain.url, prompt) == depth * BLOCK_TOKENS
        for rank, publisher in enumerate(ranks.publishers):
            publisher.publish(sglang_stored(prompts[rank]), rank=rank)
        for rank in range(2):
            wanted = {"llama-0": PROMPT_BLOCKS, f"llama-1-dp{rank}": PROMPT_BLOCKS}
            eventually(lambda rank=rank, wanted=wanted: depths(site, prompts[rank]) == wanted)
        site.verify()
    finally:
        stop_process(bridge)
        ranks.close()


def sglang_stored(prompt: Prompt) -> dict[str, Any]:
    """As SGLang says it."""
    return {
        "type": "BlockStored",
        "block_hashes": [-at for at in range(1, PROMPT_BLOCKS + 1)],
        "parent_block_hash": None,
        "token_ids": list(prompt.tokens[: PROMPT_BLOCKS * BLOCK_TOKENS]),
        "block_size": BLOCK_TOKENS,
        "lora_id": None,
        "medium": "GPU",
    }


def depths(site: Site, prompt: Prompt) -> dict[str, int]:
    """Instance → blocks of a prompt; of `llama-0` also where it has none."""
    hashes = sequence_hashes(prompt.tokens, BLOCK_TOKENS, SPACE.root(), salted(prompt.salt, prompt.blocks))
    return {"llama-0": 0} | {one.instance: one.depth for one in site.client.lookup(SPACE, hashes).instances}
