"""A catalog is asked by tokens for what engines hold under hashes of their own, over real servers."""

from __future__ import annotations

import asyncio
import hashlib
import pickle
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from kvbm.assembly import NATIVE, NATIVE_INDEX, open_engine_manager
from kvbm.catalog.replica import CatalogReplica, ReplicaSettings
from kvbm.catalog_cli import catalog_main
from kvbm.config import load_settings
from kvbm.core.answers import MediaAsked
from kvbm.core.chain_statement import ATTRIBUTE, ChainGroup, ChainStatement
from kvbm.core.engine_chains import SGLANG_SHA256, VLLM_SHA256
from kvbm.core.errors import CatalogError, CatalogRefusedError
from kvbm.core.hashing import derived_hashes
from kvbm.core.ids import HASH_BYTES, NO_PARENT, Namespace, SequenceHash, Tier
from kvbm.core.prompt_tokens import PromptTokens
from kvbm.locate.asynchronous import AsyncCatalogClient
from kvbm.locate.http import CatalogClient
from kvbm.reference.ledger import Ledger
from kvbm.streams.base import ORIGIN
from kvbm.streams.nats.credentials import Credentials
from kvbm.streams.nats.read_only import ReadOnlyStream
from tests.catalog_site import POOLS, Instance, Running, run_catalog
from tests.cores import CORES
from tests.eventually import eventually
from tests.managers import BLOCK_BYTES
from tests.nats_fixture import WAIT_S, cluster, nats_url  # noqa: F401

FOR_EVER_S = 3600.0
SCHEME = "vllm-sha256+0123456789abcdef"
SPACE = Namespace(model="llm", block_tokens=4, scheme=SCHEME, scheme_seed=7)
BEGIN = hashlib.sha256(pickle.dumps("vllm-none-hash", protocol=5)).digest()
STATEMENT = ChainStatement(
    scheme=SCHEME, scheme_seed=7, kind=VLLM_SHA256, begin=BEGIN, hash_tokens=4, groups=(ChainGroup(0, 4),)
)
TOKENS = [*range(100, 140), 1, 2]


@pytest.fixture
def running(nats_url: str, cluster: str, sqlite_url: str) -> Iterator[Running]:  # noqa: F811
    yield from run_catalog(nats_url, cluster, sqlite_url, liveness_s=FOR_EVER_S)


def digests(tokens: list[int], keys: dict[int, tuple[Any, ...]] | None = None) -> list[bytes]:
    """vLLM's, each made as vLLM makes it; keys by block."""
    before, found = BEGIN, []
    for at in range(len(tokens) // 4):
        block = tuple(tokens[4 * at : 4 * at + 4])
        before = hashlib.sha256(pickle.dumps((before, block, (keys or {}).get(at)), protocol=5)).digest()
        found.append(before)
    return found


class Engine(Instance):
    """An instance whose engine has hashes of its own."""

    def __init__(self, running: Running, name: str, spaces: list[Namespace], chain: bytes) -> None:
        super().__init__(running.settings.nats_url, str(running.settings.cluster), name)
        self.ledger = Ledger(POOLS)
        attributes = {ATTRIBUTE: chain} if chain else {}
        self.ledger.start(self.epoch, spaces, [], "test", "0", attributes=attributes)

    def hold(self, space: Namespace, hashes: bytes, begin: int = 0) -> None:
        """The blocks from `begin` on are in HBM."""
        run = hashes[begin * HASH_BYTES :]
        allocation = self.ledger.allocate(Tier.HBM, len(run) // HASH_BYTES)
        assert allocation is not None
        parent = SequenceHash(hashes[(begin - 1) * HASH_BYTES : begin * HASH_BYTES]) if begin else NO_PARENT
        self.ledger.create(space.id, Tier.HBM, parent, begin, run, allocation.slots)


def hold(engine: Engine, space: Namespace, found: list[bytes], secret: bytes = b"", begin: int = 0) -> None:
    engine.hold(space, derived_hashes(space.root(secret), found), begin)


def serve(running: Running, *engines: Engine, **more: Any) -> None:
    """Publish, be heard, and wait until the catalog has it all."""
    for engine in engines:
        engine.beat(**more)
        wanted = engine.publish()
        running.client.lookup(SPACE, bytes(HASH_BYTES), at_least=[wanted], wait_s=5.0)
    names = {engine.name for engine in engines}

    def are_live() -> bool:
        return names <= {one.instance for one in running.client.instances() if one.state == "live"}

    eventually(are_live, "the catalog does not hear the instances")


def refused(running: Running, **prompt: Any) -> CatalogRefusedError:
    with pytest.raises(CatalogRefusedError) as caught:
        running.client.lookup_prompt(PromptTokens(**{"tokens": TOKENS, "namespace": SPACE, **prompt}))
    return caught.value


def test_an_engine_that_states_its_chain_is_found_by_tokens_and_salts_keep_apart(running: Running) -> None:
    engine = Engine(running, "a", [SPACE], STATEMENT.encoded())
    hold(engine, SPACE, digests(TOKENS)[:7])
    hold(engine, SPACE, digests(TOKENS, {0: (("cache_salt", "pepper"),)})[:3])
    serve(running, engine, chain=STATEMENT.encoded())
    ask = running.client.lookup_prompt
    for where in ({"namespace": SPACE}, {"namespace": SPACE.id}, {"model": "llm"}):
        found = ask(PromptTokens(tokens=TOKENS, **where))
        assert (found.deepest, found.blocks, found.namespace) == (7, 10, SPACE.id.hex())
        assert [(one.instance, one.depth) for one in found.instances] == [("a", 7)]
    assert ask(PromptTokens(tokens=TOKENS, namespace=SPACE, salt="pepper")).deepest == 3
    assert ask(PromptTokens(tokens=TOKENS, namespace=SPACE, salt="salt")).deepest == 0
    assert ask(PromptTokens(tokens=[*TOKENS[:9], 0, *TOKENS[10:]], namespace=SPACE)).deepest == 2
    route = running.client.route_prompt(PromptTokens(tokens=TOKENS, model="llm"))
    assert (route.instance, route.ranked[0].depth, route.ranked[0].missing_tokens) == ("a", 7, 14)
    with pytest.raises(CatalogRefusedError, match="lora_path"):
        ask(PromptTokens(tokens=TOKENS, namespace=SPACE, lora_path="/adapter"))


def test_adapters_and_media_are_hashed_as_the_engine_hashes_them(running: Running) -> None:
    adapted = msgspec.structs.replace(SPACE, lora="ad:apter:0123")
    lora, image = ("lora", "ad:apter", "/ad"), ("mm", "cat", 2)
    engine = Engine(running, "a", [SPACE, adapted], STATEMENT.encoded())
    keys: dict[int, tuple[Any, ...]] = {at: (lora,) for at in range(10)}
    hold(engine, adapted, digests(TOKENS, keys)[:5])
    hold(engine, SPACE, digests(TOKENS, {1: (image,), 2: (("mm", "cat", -2),)})[:6])
    serve(running, engine, chain=STATEMENT.encoded())
    ask = running.client.lookup_prompt
    assert ask(PromptTokens(tokens=TOKENS, model="llm", lora="ad:apter", lora_path="/ad")).deepest == 5
    assert ask(PromptTokens(tokens=TOKENS, namespace=adapted, lora_path="/other")).deepest == 0
    assert refused(running, namespace=adapted).code == "lora_path_missing"
    media = [MediaAsked(identifier="cat", offset=6, tokens=4)]
    assert ask(PromptTokens(tokens=TOKENS, namespace=SPACE, media=media)).deepest == 6
    assert ask(PromptTokens(tokens=TOKENS, namespace=SPACE)).deepest == 1
    both = [*media, MediaAsked(identifier="dog", offset=8, tokens=2)]
    assert refused(running, media=both).code == "bad_media"
    twice = [MediaAsked(identifier="cat", offset=at, tokens=1) for at in (4, 5)]
    assert refused(running, media=twice).code == "bad_keys"


def test_a_chain_that_is_not_stated_is_refused_in_words_and_a_statement_goes_when_it_is_taken_back(
    running: Running,
) -> None:
    engine = Engine(running, "a", [SPACE], b"")
    hold(engine, SPACE, digests(TOKENS)[:2])
    serve(running, engine)
    error = refused(running)
    assert error.code == "scheme_not_hashable" and "hashes" in str(error)
    assert refused(running, namespace=None, model="llm").code == "namespace_unknown"
    engine.beat(chain=STATEMENT.encoded())  # as one whose start was read before it could say it
    eventually(lambda: _depth(running) == 2, "a heartbeat's statement is not taken")
    engine.beat(chain=b"\xc1 no statement")
    eventually(lambda: _depth(running) == -1, "what is no statement leaves the one before")
    assert "kvbm_catalog_chains_refused_total 1" in _metrics(running)


def _depth(running: Running, **prompt: Any) -> int:
    try:
        return running.client.lookup_prompt(PromptTokens(tokens=TOKENS, **prompt or {"namespace": SPACE})).deepest
    except CatalogRefusedError as error:
        return -1 if error.code == "scheme_not_hashable" else -2


def _metrics(running: Running) -> str:
    with urllib.request.urlopen(f"{running.client.url}/metrics") as answer:
        return str(answer.read().decode())


def test_of_a_model_with_several_groups_what_all_of_them_hold_counts(running: Running) -> None:
    wide = msgspec.structs.replace(SPACE, kv_group=1, block_tokens=8, layout="window")
    groups = (ChainGroup(0, 4), ChainGroup(1, 8, window_blocks=1))
    stated = msgspec.structs.replace(STATEMENT, groups=groups).encoded()
    whole, short = Engine(running, "whole", [SPACE, wide], stated), Engine(running, "short", [SPACE, wide], stated)
    found = digests(TOKENS)
    hold(whole, SPACE, found)
    hold(whole, wide, found[1::2][:4], begin=3)  # of the window the last block alone
    hold(short, SPACE, found)
    hold(short, wide, found[1::2][:1])
    serve(running, whole, short, chain=stated)
    answer = running.client.lookup_prompt(PromptTokens(tokens=TOKENS, model="llm"))
    assert [(one.instance, one.depth) for one in answer.instances] == [("whole", 8), ("short", 2)]
    assert (answer.deepest, answer.namespace) == (8, SPACE.id.hex())
    by_wide = running.client.lookup_prompt(PromptTokens(tokens=TOKENS, namespace=wide))
    assert [(one.instance, one.depth) for one in by_wide.instances] == [("whole", 4), ("short", 1)]
    route = running.client.route_prompt(PromptTokens(tokens=TOKENS, model="llm"))
    assert [(one.instance, one.depth) for one in route.ranked] == [("whole", 8), ("short", 2)]
    assert running.client.lookup_prompt(PromptTokens(tokens=TOKENS, model="llm", salt="s")).deepest == 0


def test_a_model_of_several_namespaces_is_answered_with_which_they_are(running: Running) -> None:
    other = msgspec.structs.replace(SPACE, scheme="vllm-sha256+other")
    stated = msgspec.structs.replace(STATEMENT, scheme="vllm-sha256+other").encoded()
    first, second = Engine(running, "a", [SPACE], STATEMENT.encoded()), Engine(running, "b", [other], stated)
    serve(running, first, chain=STATEMENT.encoded())
    serve(running, second, chain=stated)
    error = refused(running, namespace=None, model="llm")
    assert error.code == "several_namespaces"
    assert SPACE.id.hex() in str(error) and other.id.hex() in str(error)
    told = _post(running, {"model": "llm", "tokens": TOKENS})
    assert told["error"]["matching"] == sorted([SPACE.id.hex(), other.id.hex()])
    assert refused(running, namespace=None, model="no such").code == "namespace_unknown"
    assert _post(running, {"tokens": TOKENS})["error"]["code"] == "namespace_missing"
    assert _post(running, {"hashes": "", "model": "llm"})["error"]["code"] == "tokens_missing"


def _post(running: Running, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(f"{running.client.url}/v1/lookup", msgspec.json.encode(body), method="POST")
    request.add_header("Content-Type", "application/json")
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request)
    return dict(msgspec.json.decode(caught.value.read()))


def test_engines_of_one_scheme_that_contradict_each_other_are_refused(running: Running) -> None:
    other = msgspec.structs.replace(STATEMENT, begin=bytes(32)).encoded()
    first, second = Engine(running, "a", [SPACE], STATEMENT.encoded()), Engine(running, "b", [SPACE], other)
    serve(running, first, chain=STATEMENT.encoded())
    serve(running, second, chain=other)
    assert refused(running).code == "chains_differ"


def test_a_tenants_blocks_are_found_under_its_secret_alone(running: Running) -> None:
    space = msgspec.structs.replace(SPACE, tenant="acme")
    unknown = msgspec.structs.replace(SPACE, tenant="umbrella")
    engine = Engine(running, "a", [space, unknown], STATEMENT.encoded())
    hold(engine, space, digests(TOKENS)[:4], b"secret")
    serve(running, engine, chain=STATEMENT.encoded())
    assert running.client.lookup_prompt(PromptTokens(tokens=TOKENS, model="llm", tenant="acme")).deepest == 4
    assert refused(running, namespace=unknown).code == "tokens_not_hashable"


def test_pages_of_sglang_are_found_by_tokens_and_salt(running: Running) -> None:
    space = Namespace(model="llm", block_tokens=4, scheme="sglang-sha256+0123")
    stated = ChainStatement(
        scheme=space.scheme, scheme_seed=0, kind=SGLANG_SHA256, begin=b"", hash_tokens=4, groups=(ChainGroup(0, 4),)
    ).encoded()
    engine = Engine(running, "a", [space], stated)
    keys, before = [], b""
    for at in range(6):
        packed = b"".join(token.to_bytes(4, "little") for token in TOKENS[4 * at : 4 * at + 4])
        before = hashlib.sha256(before + packed).digest()
        keys.append(before.hex().encode())
    hold(engine, space, keys)
    serve(running, engine, chain=stated)
    assert running.client.lookup_prompt(PromptTokens(tokens=TOKENS, namespace=space)).deepest == 6
    assert running.client.lookup_prompt(PromptTokens(tokens=TOKENS, namespace=space, salt="s")).deepest == 0
    media = [MediaAsked(identifier="cat", offset=6, tokens=4)]
    assert refused(running, namespace=space, media=media).code == "bad_keys"


@pytest.mark.parametrize("core", ["native", "reference"])
def test_a_start_states_the_chain_in_every_epoch(core: str) -> None:
    ledger = CORES[core].new_ledger(POOLS, "lru", 1 << 20, ())
    attributes = {ATTRIBUTE: STATEMENT.encoded()}
    ledger.start(1, [SPACE], attributes=attributes)  # type: ignore[arg-type]
    attributes.clear()  # what is said later does not change it
    first = ledger.take_frames("a", 1)  # type: ignore[arg-type]
    ledger.restart(2)  # type: ignore[arg-type]
    for frames in (first, ledger.take_frames("a", 2)):  # type: ignore[arg-type]
        frame, _ = NATIVE.decode_frame(frames[0].data)
        assert frame.events[0].attributes == {ATTRIBUTE: STATEMENT.encoded()}  # type: ignore[union-attr]


def test_tokens_and_salts_are_in_no_log_and_no_metric(running: Running, capfd: pytest.CaptureFixture[str]) -> None:
    engine = Engine(running, "a", [SPACE], STATEMENT.encoded())
    serve(running, engine, chain=STATEMENT.encoded())
    tokens = [3_000_000_019 + at for at in range(8)]
    running.client.lookup_prompt(PromptTokens(tokens=tokens, namespace=SPACE, salt="a very secret salt"))
    twice = [MediaAsked(identifier="a very secret salt", offset=at, tokens=1) for at in (0, 1)]
    error = refused(running, tokens=tokens, media=twice)
    written = "".join(capfd.readouterr()) + _metrics(running) + str(error)
    assert "30000000" not in written and "secret salt" not in written


def test_a_replica_and_questions_over_nats_are_answered_alike(running: Running) -> None:
    engine = Engine(running, "a", [SPACE], STATEMENT.encoded())
    hold(engine, SPACE, digests(TOKENS)[:7])
    serve(running, engine, chain=STATEMENT.encoded())
    prompt = PromptTokens(tokens=np.array(TOKENS), model="llm")
    expected = running.client.lookup_prompt(prompt)
    asker = f"{running.settings.nats_url}/{running.settings.cluster}/any"
    with closing(CatalogClient(asker, WAIT_S)) as over_nats, replica_of(running) as replica:
        eventually(lambda: _is_asked(over_nats), "nobody takes questions over NATS")
        replica.wait_ready(WAIT_S)
        eventually(lambda: replica.instance("a") is not None, "the replica does not hear the instance")
        for catalog in (over_nats, replica):
            assert catalog.lookup_prompt(prompt) == expected
            assert catalog.route_prompt(prompt).ranked[0].depth == 7
            with pytest.raises(CatalogRefusedError) as caught:
                catalog.lookup_prompt(PromptTokens(tokens=TOKENS, model="other"))
            assert caught.value.code == "namespace_unknown"


def _is_asked(client: CatalogClient) -> bool:
    try:
        return client.ready().ready
    except CatalogError:
        return False


def replica_of(running: Running) -> CatalogReplica:
    settings = ReplicaSettings(cluster=running.settings.cluster, liveness_s=FOR_EVER_S)
    url = running.settings.nats_url
    replica = CatalogReplica(
        settings, lambda: ReadOnlyStream.follow(url, WAIT_S, Credentials()), None, NATIVE, NATIVE_INDEX
    )
    replica.start(WAIT_S)
    return replica


def test_a_manager_states_its_chain_and_what_it_holds_is_found_by_tokens(running: Running, tmp_path: Path) -> None:
    flags = {
        "instance.id": "engine",
        "instance.cluster": str(running.settings.cluster),
        "instance.data_dir": str(tmp_path),
        "nats.url": running.settings.nats_url,
        "pools.hbm.owner": "engine",
        "pools.hbm.slots": 64,
        "pools.host.slots": 8,
    }
    space = msgspec.structs.replace(SPACE, revision="r1")
    later = msgspec.structs.replace(space, tenant="acme")
    with open_engine_manager(load_settings(flags=flags), [space], BLOCK_BYTES, "vllm", chain=STATEMENT) as manager:
        assert manager.heartbeat(ORIGIN).chain == STATEMENT.encoded()
        manager.declare([later])
        for one, secret, depth in ((space, b"", 6), (later, b"secret", 4)):
            held = derived_hashes(one.root(secret), digests(TOKENS)[:depth])
            manager.engine_stored(one.id, NO_PARENT, 0, held)
        eventually(lambda: _depth(running, model="llm") == 6, "the catalog does not find the blocks by tokens")
        eventually(lambda: _depth(running, namespace=later) == 4, "a tenant declared later is not found by tokens")
        assert _depth(running, model="llm", salt="pepper") == 0


def test_asyncio_asks_by_tokens(running: Running) -> None:
    engine = Engine(running, "a", [SPACE], STATEMENT.encoded())
    hold(engine, SPACE, digests(TOKENS)[:7])
    serve(running, engine, chain=STATEMENT.encoded())

    async def ask() -> tuple[int, str]:
        async with AsyncCatalogClient(running.client.url, timeout_s=WAIT_S) as catalog:
            prompt = PromptTokens(tokens=TOKENS, namespace=SPACE)
            return (await catalog.lookup_prompt(prompt)).deepest, (await catalog.route_prompt(prompt)).instance

    assert asyncio.run(ask()) == (7, "a")


def test_the_command_line_asks_by_tokens(running: Running, capsys: pytest.CaptureFixture[str]) -> None:
    engine = Engine(running, "a", [SPACE], STATEMENT.encoded())
    hold(engine, SPACE, digests(TOKENS)[:7])
    hold(engine, SPACE, digests(TOKENS, {0: (("mm", "cat", 1), ("cache_salt", "pepper"))})[:3])
    serve(running, engine, chain=STATEMENT.encoded())
    url, words = f"--url={running.client.url}", ",".join(map(str, TOKENS))
    assert catalog_main(["lookup", words, "--namespace", "llm", url]) == 0
    assert "the longest prefix held is of 7" in capsys.readouterr().out
    assert catalog_main(["lookup", words, "--namespace", "llm", "--salt", "pepper", "--media", "cat@1+2", url]) == 0
    assert "the longest prefix held is of 3" in capsys.readouterr().out
    assert catalog_main(["route", words, "--namespace", SPACE.id.hex(), url]) == 0
    assert "send it to a" in capsys.readouterr().out
    assert catalog_main(["lookup", "0" * 32, "--namespace", "llm", "--salt", "pepper", url]) != 0
    assert "go with token ids" in capsys.readouterr().err
