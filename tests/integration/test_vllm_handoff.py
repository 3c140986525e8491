"""A prompt that one engine computes and another decodes: two schedulers' halves of the connector over managers that
lend to each other, beside a catalog and a nats-server. The engines are scripts that move bytes as workers would.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvbm.assembly import open_engine_manager
from kvbm.config import load_settings
from kvbm.core.ids import HASH_BYTES, Namespace, Tier, split_slots
from kvbm.engines.vllm.handoff import KEY, HandoffRules, hint_of
from kvbm.engines.vllm.roles import EngineRole
from kvbm.pools.stores.memory import MemoryStore
from kvbm.transport.peers import MEMORY, TCP
from tests.eventually import eventually
from tests.lending_pairs import Pair, reads_by
from tests.managers import KnowsAll
from tests.object_pools import memory_objects
from tests.vllm_script import BLOCK_BYTES, BLOCK_TOKENS, FULL, HBM_BLOCKS, WAIT_S, Engine, Request

SPACE = Namespace(model="m", revision="r1", block_tokens=BLOCK_TOKENS)
PROMPT = list(range(33))  # 8 blocks and a token
BLOCKS = 8
FOR_A_DECODER = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None}
RULES = HandoffRules(wait_s=10 * WAIT_S, unsaid_wait_s=10 * WAIT_S)  # longer than any test waits
GIVES_UP = HandoffRules(wait_s=0.2, unsaid_wait_s=0.2)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    with ExitStack() as opened:
        yield Pair(tmp_path, opened)


def opened_engine(pair: Pair, name: str, rules: HandoffRules = RULES, role: str = "kv_both", **flags: Any) -> Engine:
    usual = {"pools__hbm__owner": "engine", "pools__hbm__device": "auto", "pools__hbm__slots": 96}
    manager = open_engine_manager(pair.settings(name, **usual | flags), [SPACE], BLOCK_BYTES, "test")
    pair.closes(manager)
    return Engine(manager, FULL, [SPACE], EngineRole.of(role, rules))


def two(pair: Pair, rules: HandoffRules = RULES, **flags: Any) -> tuple[Engine, Engine]:
    engines = opened_engine(pair, "first"), opened_engine(pair, "second", rules, **flags)
    pair.is_heard("first", "second")
    locator = engines[1].manager._loads.locator
    any_block = bytes(HASH_BYTES)
    eventually(  # an instance's first heartbeat may be older than its server
        lambda: locator.find("", SPACE.id, any_block, 0, WAIT_S, "first").peers, "nobody says where the prefiller lends"
    )
    return engines


def computed(engine: Engine, tokens: list[int], params: dict[str, Any] | None = None) -> Request:
    """A request that has computed its prompt; nothing of it is stored yet."""
    request = Request(tokens, FOR_A_DECODER if params is None else params)
    engine.admit(request, 0, engine.ask(request))
    engine.compute(request)
    return request


def ended(engine: Engine, request: Request) -> dict[str, Any] | None:
    """It ends well; its blocks are to be stored with the next step."""
    return engine.scheduler.finished(request, engine.ids(request), is_answered=True)


def loaded(engine: Engine, request: Request, found: int, undelivered: int = 0) -> None:
    """What was found is loaded, and every byte of it is right."""
    engine.admit(request, 0, found)
    engine.step()
    request.num_computed_tokens = found
    engine.check(request, found // BLOCK_TOKENS)
    numbers = engine.scheduler._numbers.data
    assert numbers.get("delivered_blocks", 0) + undelivered >= numbers.get("predicted_blocks", 0)
    assert all(count > 0 for count in numbers.get("undelivered_blocks", {}).values())
    assert undelivered or "undelivered_blocks" not in numbers  # what came was there


def peer_reads(engine: Engine) -> int:
    stats = engine.manager.stats().peers
    assert stats is not None
    return sum(stats.blocks.values())


@pytest.mark.parametrize("transport", [MEMORY, TCP])
def test_a_decoder_waits_for_what_the_prefiller_stores_and_reads_each_block_once(pair: Pair, transport: str) -> None:
    prefiller, decoder = two(pair)
    reads_by(decoder.manager, transport)
    params = ended(prefiller, computed(prefiller, PROMPT))
    assert params is not None
    request = Request(PROMPT, params)
    asked = 0

    def has_asked() -> bool:
        nonlocal asked
        assert decoder.scheduler.loads.matched(request, 0) is None  # nothing is stored yet
        stats = decoder.manager.stats().peers
        asked = 0 if stats is None else stats.reads
        return asked >= 3

    eventually(has_asked, "the prefiller is not asked again")
    prefiller.step()  # its worker stores
    found = decoder.ask(request)
    assert found == BLOCKS * BLOCK_TOKENS
    loaded(decoder, request, found)
    assert peer_reads(decoder) == BLOCKS
    told = prefiller.manager.stats
    eventually(lambda: not told().kept_blocks[Tier.HOST], "blocks that the decoder has are kept on")
    stats = decoder.manager.stats()
    assert stats.peer_hits == BLOCKS and stats.peers is not None and stats.peers.missing_blocks == 0
    decoder.manager.close()
    assert prefiller.manager.settle(WAIT_S)


def test_the_answer_says_no_tokens_and_no_root(pair: Pair) -> None:
    engine = opened_engine(pair, "first")
    tokens = list(range(700_001, 700_034))
    params = ended(engine, computed(engine, tokens))
    assert params is not None and list(params) == [KEY]
    hint = hint_of(params)
    assert hint is not None
    assert (hint.instance, hint.epoch, hint.namespace, hint.tokens) == ("first", engine.manager.epoch, SPACE.id, 32)
    words = repr(params)
    assert SPACE.root().hex() not in words and not any(str(token) in words for token in tokens)


def test_what_a_decoder_has_itself_is_not_read(pair: Pair) -> None:
    prefiller, decoder = two(pair)
    half = PROMPT[:17]
    assert decoder.run(half) == 0  # computed: 4 blocks
    params = ended(prefiller, computed(prefiller, PROMPT))
    prefiller.step()
    request = Request(PROMPT, params)
    assert decoder.ask(request) == 32
    loaded(decoder, request, 32)
    assert peer_reads(decoder) == BLOCKS - 4


def test_blocks_are_taken_as_the_prefiller_computes_them(pair: Pair) -> None:
    """Both have got the request at once: nobody has answered yet."""
    prefiller, decoder = two(pair)
    decode = Request(PROMPT, {"remote_prefiller": {"kv_request_id": "r", "remote_host": "h", "remote_port": 1}})
    assert decoder.scheduler.loads.matched(decode, 0) is None
    prompt = Request(PROMPT, {"remote_decoder": {"kv_request_id": "r"}})
    prefiller.admit(prompt)
    for blocks in (3, 5, 8):
        prefiller.compute(prompt)
        prompt.num_computed_tokens = blocks * BLOCK_TOKENS
        prefiller.scheduler.stores.look_in(prefiller.scheduler.requests.state_of(prompt), 1)
        prefiller.step()

        def has_come(blocks: int = blocks) -> bool:
            answer = decoder.scheduler.loads.matched(decode, 0)
            assert (answer is None) == (blocks < 8) or answer is None
            return answer == 32 or (blocks < 8 and peer_reads(decoder) == blocks)

        eventually(has_come, f"{blocks} blocks do not come")
    assert ended(prefiller, prompt) is None  # nobody is to be told
    loaded(decoder, decode, 32)
    assert peer_reads(decoder) == BLOCKS


def test_a_consumer_whose_requests_say_nothing_waits_a_moment(pair: Pair) -> None:
    prefiller = opened_engine(pair, "first", role="kv_producer")
    decoder = opened_engine(pair, "second", role="kv_consumer")
    pair.is_heard("first", "second")
    request = Request(PROMPT)
    assert decoder.scheduler.loads.matched(request, 0) is None
    prompt = computed(prefiller, PROMPT, {})
    assert ended(prefiller, prompt) is None
    prefiller.step()
    assert decoder.ask(request) == 32
    loaded(decoder, request, 32)


def spoiled(params: dict[str, Any], **words: Any) -> dict[str, Any]:
    return {KEY: params[KEY] | words}


@pytest.mark.parametrize(
    "words",
    [
        {"namespace": "00" * 16},
        {"last": "00" * 16},
        {"tokens": 16},
        {"tokens": 1 << 40},
        {"until_ms": 1},
        {"version": 2},
        {"instance": "nobody"},
        {"instance": 7},
        {"instance": "x" * 300},
        {"last": "zz" * 16},
        {"epoch": -1},
    ],
    ids=str,
)
def test_a_wrong_hint_makes_nobody_wait_and_nothing_wrong(pair: Pair, words: dict[str, Any]) -> None:
    """What it names is found as any prompt is, or computed."""
    prefiller, decoder = two(pair)
    params = ended(prefiller, computed(prefiller, PROMPT))
    assert params is not None
    assert decoder.ask(Request(PROMPT, spoiled(params, **words))) == 0  # nothing is stored, and nothing waited for
    other = Request([7, *PROMPT], params)  # the hint of another prompt
    assert decoder.ask(other) == 0
    numbers = decoder.scheduler.take_numbers()
    assert numbers["handoffs_refused"] >= 1
    prefiller.step()


@pytest.mark.parametrize("named", ["nobody", "second", "first"])
def test_a_hint_keeps_nobody_from_what_a_third_has(pair: Pair, named: str) -> None:
    """Also where it names the decoder itself, or a prefiller that does not get them."""
    prefiller, decoder = two(pair, GIVES_UP)
    params = ended(prefiller, computed(prefiller, PROMPT))  # and it never stores
    assert params is not None
    third = opened_engine(pair, "third")
    pair.is_heard("third")
    assert third.run(PROMPT) == 0
    chain = decoder.scheduler.requests.state_of(Request(PROMPT)).hashes(0, 0, BLOCKS, decoder.scheduler._derive)
    eventually(lambda: pair.site.client.find(SPACE.id, chain).peers, "nobody hears of what the third lends")
    request = Request(PROMPT, spoiled(params, instance=named))
    assert decoder.ask(request) == 32
    loaded(decoder, request, 32)


def test_an_engine_that_does_not_ask_for_a_while_loses_nothing(pair: Pair) -> None:
    """It is full meanwhile. The time without news counts only while somebody looks."""
    prefiller, decoder = two(pair, GIVES_UP)
    params = ended(prefiller, computed(prefiller, PROMPT))
    request = Request(PROMPT, params)
    assert decoder.scheduler.loads.matched(request, 0) is None
    time.sleep(3 * GIVES_UP.wait_s)
    prefiller.step()
    assert decoder.ask(request) == 32


class SlowStore(MemoryStore):
    """A store whose objects take longer than a consumer waits for what it knows nothing of."""

    def get(self, *args: Any, **kwargs: Any) -> Any:
        time.sleep(0.5)
        return super().get(*args, **kwargs)


@pytest.mark.parametrize("rules", [HandoffRules(), HandoffRules(unsaid_wait_s=0.0)])
def test_a_consumer_waits_for_bytes_as_long_as_any_engine(tmp_path: Path, rules: HandoffRules) -> None:
    store = SlowStore()
    for role in ("kv_both", "kv_consumer"):
        objects = memory_objects(BLOCK_BYTES, blocks=4, store=store)
        flags = {
            "instance.id": role,
            "instance.data_dir": str(tmp_path / role),
            "pools.hbm.owner": "engine",
            "pools.hbm.slots": HBM_BLOCKS,
            "pools.host.slots": 64,
            "nats.enabled": False,
            "journal.in_memory": True,
            "onboard.wait_s": WAIT_S,
        }
        with open_engine_manager(load_settings(flags=flags), [SPACE], BLOCK_BYTES, "test", objects) as manager:
            manager._loads.locator = KnowsAll()
            engine = Engine(manager, FULL, [SPACE], EngineRole.of(role, rules))
            assert engine.run(PROMPT) == (0 if role == "kv_both" else 32)
            assert manager.settle(WAIT_S)


def test_what_never_comes_is_computed(pair: Pair) -> None:
    prefiller, decoder = two(pair, GIVES_UP)
    params = ended(prefiller, computed(prefiller, PROMPT))
    request = Request(PROMPT, params)
    assert decoder.ask(request) == 0  # its worker never stores
    loaded(decoder, request, 0)
    assert decoder.manager.stats().quarantined_slots == 0


def test_a_prefiller_that_has_gone_is_not_waited_for(pair: Pair) -> None:
    prefiller, decoder = two(pair)
    params = ended(prefiller, computed(prefiller, PROMPT))
    prefiller.manager.close()
    eventually(
        lambda: [one.state for one in pair.site.client.instances() if one.instance == "first"] != ["live"],
        "it is not known to have gone",
    )
    assert decoder.ask(Request(PROMPT, params)) == 0


def test_a_client_that_leaves_while_its_prompt_comes_leaves_nothing_pinned(pair: Pair) -> None:
    prefiller, decoder = two(pair)
    params = ended(prefiller, computed(prefiller, PROMPT))
    request = Request(PROMPT, params)
    assert decoder.scheduler.loads.matched(request, 0) is None
    decoder.scheduler.finished(request, [[]])
    prefiller.step()
    slots = decoder.manager.pools.slots[Tier.HOST].slots
    eventually(lambda: unpinned(decoder) == slots, "something stays pinned", state=lambda: unpinned(decoder))


def unpinned(engine: Engine) -> int:
    counts = engine.manager._ledger.counts(Tier.HOST)
    return counts.free + counts.evictable


def test_what_waits_for_a_decoder_leaves_host_last(pair: Pair) -> None:
    prefiller = opened_engine(pair, "first", pools__nvme__slots=0, pools__host__slots=32)
    assert ended(prefiller, computed(prefiller, PROMPT)) is not None
    prefiller.step()
    for number in range(1, 9):  # other prompts, twice what HOST has room for
        prefiller.run(list(range(1000 * number, 1000 * number + 33)))
    state = prefiller.scheduler.requests.state_of(Request(PROMPT))
    chain = state.hashes(0, 0, BLOCKS, prefiller.scheduler._derive)
    assert prefiller.manager.holders(chain, SPACE.id) == bytes([Tier.HOST]) * BLOCKS


def test_clients_cannot_have_all_of_host_kept(pair: Pair) -> None:
    """Any request may ask for it; at most half of HOST is kept, the rest goes by its use."""
    prefiller = opened_engine(pair, "first", pools__nvme__slots=0, pools__host__slots=32)
    for number in range(6):
        prompt = list(range(1000 * number, 1000 * number + 33))
        assert ended(prefiller, computed(prefiller, prompt)) is not None
        prefiller.step()
    assert prefiller.manager.stats().kept_blocks[Tier.HOST] == 16


@pytest.mark.parametrize("at_once", [True, False])
def test_two_decoders_of_one_prompt_both_get_it(pair: Pair, at_once: bool) -> None:
    prefiller, decoder = two(pair)
    third = opened_engine(pair, "third", RULES)
    pair.is_heard("third")
    params = ended(prefiller, computed(prefiller, PROMPT))
    requests = [(one, Request(PROMPT, params)) for one in (decoder, third)]
    if at_once:
        for one, request in requests:
            assert one.scheduler.loads.matched(request, 0) is None
    prefiller.step()
    for one, request in requests:
        assert one.ask(request) == 32
        loaded(one, request, 32)
        assert peer_reads(one) == BLOCKS
    eventually(lambda: not prefiller.manager.stats().kept_blocks[Tier.HOST], "blocks that both have are kept on")


def test_a_decoder_that_is_asked_twice_reads_once(pair: Pair) -> None:
    prefiller, decoder = two(pair)
    params = ended(prefiller, computed(prefiller, PROMPT))
    first, second = Request(PROMPT, params), Request(PROMPT, params)
    assert [decoder.scheduler.loads.matched(one, 0) for one in (first, second)] == [None, None]
    prefiller.step()
    for one in (first, second):
        assert decoder.ask(one) == 32
        loaded(decoder, one, 32)
    assert peer_reads(decoder) == BLOCKS


def test_a_decoder_whose_host_is_full_takes_what_fits(pair: Pair) -> None:
    prefiller, decoder = two(pair, GIVES_UP, pools__host__slots=4, pools__nvme__slots=0)
    params = ended(prefiller, computed(prefiller, PROMPT))
    prefiller.step()
    request = Request(PROMPT, params)
    assert decoder.ask(request) == 4 * BLOCK_TOKENS
    loaded(decoder, request, 4 * BLOCK_TOKENS, undelivered=4)
    decoder.scheduler.finished(request, decoder.ids(request))
    eventually(lambda: unpinned(decoder) == 4, "something stays pinned", state=lambda: unpinned(decoder))


def test_a_block_that_is_spoilt_in_the_prefillers_host_is_computed(pair: Pair) -> None:
    prefiller, decoder = two(pair, GIVES_UP)
    params = ended(prefiller, computed(prefiller, PROMPT))
    prefiller.step()
    chain = chain_of(decoder, PROMPT)
    ledger = prefiller.manager._ledger
    found = ledger.match(chain, True, Tier.HOST, SPACE.id)
    slot = split_slots(found.slots)[5]
    ledger.unpin(Tier.HOST, found.slots)
    prefiller.host[slot, 3] ^= 0x10
    request = Request(PROMPT, params)
    assert decoder.ask(request) == 5 * BLOCK_TOKENS
    loaded(decoder, request, 5 * BLOCK_TOKENS, undelivered=3)
    stats = decoder.manager.stats().peers
    assert stats is not None and stats.corrupt_blocks >= 1


def test_bytes_that_are_late_are_computed_and_pin_nothing_when_they_come(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefiller, decoder = two(pair, onboard__wait_s=0.2)
    params = ended(prefiller, computed(prefiller, PROMPT))
    prefiller.step()
    peers, gate = decoder.manager.pools.peers, threading.Event()
    assert peers is not None
    read = peers.read

    def late(*given: Any) -> Any:
        assert gate.wait(WAIT_S)
        return read(*given)

    monkeypatch.setattr(peers, "read", late)
    request = Request(PROMPT, params)
    assert decoder.ask(request) == 0
    assert decoder.manager.stats().late_slots > 0
    gate.set()
    slots = decoder.manager.pools.slots[Tier.HOST].slots
    eventually(lambda: unpinned(decoder) == slots, "something stays pinned", state=lambda: unpinned(decoder))
    again = Request(PROMPT, params)
    assert decoder.ask(again) == 32  # what was late serves the next request
    loaded(decoder, again, 32)


def chain_of(engine: Engine, tokens: list[int]) -> bytes:
    return engine.scheduler.requests.state_of(Request(tokens)).hashes(0, 0, BLOCKS, engine.scheduler._derive)
