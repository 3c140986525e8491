"""Real vLLM processes, without kvbm and with it: what the catalog says of them is what they have."""

from __future__ import annotations

import random
import signal
import subprocess
from typing import Any

import pytest

from kvbm.core.errors import CatalogRefusedError
from kvbm.core.ids import NamespaceId
from tests.engines.bridge.harness.engines import BLOCK_TOKENS, MODEL, Engine, Models, Prompt
from tests.engines.bridge.harness.site import Site
from tests.eventually import eventually

A_BLOCKS, B_BLOCKS = 64, 24
BURST = 240  # prompts of 15 blocks: more than the sockets between an engine and a bridge that stands still take
OWN = "own"  # what the engine with the connector calls itself
Processes = list[subprocess.Popen[bytes]]


class Cluster:
    """Two engines without kvbm, and a bridge to them."""

    def __init__(self, site: Site, tiny: Models, processes: Processes) -> None:
        self.site, self._tiny, self._processes = site, tiny, processes
        self.engines = {
            "a": Engine(tiny.model, site.folder / "a.log", A_BLOCKS),
            "b": Engine(tiny.model, site.folder / "b.log", B_BLOCKS, buffer=20),
        }
        processes += [engine.process for engine in self.engines.values()]
        for engine in self.engines.values():
            engine.wait_ready()
        self.begin_bridge()

    def begin_bridge(self) -> None:
        self.bridge = self.site.bridge({name: engine.settings for name, engine in self.engines.items()})
        self._processes.append(self.bridge)

    def restart(self, name: str) -> None:
        """Another process at the same address."""
        before = self.engines[name]
        before.kill()
        blocks, buffer = (A_BLOCKS, 10_000) if name == "a" else (B_BLOCKS, 20)
        again = Engine(self._tiny.model, self.site.folder / f"{name}.log", blocks, buffer, ports=before.ports)
        self._processes.append(again.process)
        self.engines[name] = again

    def epoch(self, name: str) -> int:
        found = self.site.client.instance(name)
        assert found is not None
        return found.epoch

    def agree(self) -> None:
        """The catalog, the engines' events and the stream."""
        for name, engine in self.engines.items():
            self.site.agrees(name, engine)
        self.site.verify()

    def hits(self, name: str, *prompts: Prompt) -> None:
        """Of each prompt the engine computes exactly what a lookup does not find."""
        engine = self.engines[name]
        for prompt in prompts:
            self.site.agrees(name, engine)
            depth = self.site.depth(name, prompt)
            assert engine.ask(prompt) == [depth * BLOCK_TOKENS], (name, prompt[1:])


def some(choose: random.Random, blocks: int, **more: str) -> Prompt:
    return Prompt(tuple(choose.randrange(512) for _ in range(blocks * BLOCK_TOKENS + 5)), **more)


@pytest.mark.timeout(600)
def test_the_catalog_knows_what_engines_without_kvbm_hold(site: Site, tiny: Models, processes: Processes) -> None:
    choose, cluster = random.Random(3), Cluster(site, tiny, processes)
    a, b = cluster.engines["a"], cluster.engines["b"]
    plain, other = some(choose, 4), some(choose, 6)
    adapted = other._replace(lora=str(tiny.adapter))
    prompts = [plain, other, plain._replace(salt="s"), adapted, adapted._replace(salt="t")]
    strange = [plain._replace(salt="x"), other._replace(salt="s"), plain._replace(lora=str(tiny.adapter))]

    # A lookup by tokens says how much of the next request is cached, also with salts and adapters.
    assert a.ask(plain, *prompts[2:]) == [0] * 4
    assert b.ask(other) == [0]
    cluster.agree()
    for name in cluster.engines:
        assert [site.depth(name, prompt) for prompt in strange] == [0, 0, 0]
        cluster.hits(name, *prompts, *strange)
    # More than fits: blocks are evicted, and the same prompt comes several times at once.
    for _ in range(4):
        prompt = some(choose, choose.randint(2, 8))
        b.ask(prompt, prompt, some(choose, 3))
    cluster.hits("b", prompt, other, plain)
    cluster.agree()

    reset(cluster, plain)
    killed(cluster, plain, other)
    burst(cluster, choose)
    bridge_killed(cluster, some(choose, 3), other)


def reset(cluster: Cluster, plain: Prompt) -> None:
    for name, engine in cluster.engines.items():
        engine.ask(plain)
        assert engine.reset()
        engine.ask(Prompt((1, 2, 3)))  # vLLM tells of a reset with its next step
        cluster.site.agrees(name, engine)
        assert cluster.site.depth(name, plain) == 0
        cluster.hits(name, plain, plain)
    cluster.agree()


def killed(cluster: Cluster, plain: Prompt, other: Prompt) -> None:
    """Each is another process at the same address: nothing of what it had is left."""
    before = {name: cluster.epoch(name) for name in cluster.engines}
    for name in cluster.engines:
        cluster.restart(name)
    for name, engine in cluster.engines.items():
        engine.wait_ready()
        engine.ask(other)
        cluster.site.agrees(name, engine)
        assert cluster.epoch(name) > before[name]
        assert [cluster.site.depth(name, prompt) for prompt in (plain, other)] == [0, 6]
        cluster.hits(name, plain, other)
    cluster.agree()


def burst(cluster: Cluster, choose: random.Random) -> None:
    """A bridge that stands still loses messages: of the engine that keeps them it hears them later, of the other all
    that was known is void.
    """
    before = {name: cluster.epoch(name) for name in cluster.engines}
    cluster.bridge.send_signal(signal.SIGSTOP)
    prompts = [some(choose, 15) for _ in range(BURST)]
    for engine in cluster.engines.values():
        for at in range(0, BURST, 8):
            engine.ask(*prompts[at : at + 8])
    cluster.bridge.send_signal(signal.SIGCONT)
    for name, engine in cluster.engines.items():
        cluster.site.agrees(name, engine)
    assert cluster.epoch("a") == before["a"]
    assert cluster.epoch("b") > before["b"], "nothing was lost, so this would prove nothing"
    cluster.hits("a", *prompts[-3:])
    cluster.hits("b", *prompts[-3:])
    cluster.agree()


def bridge_killed(cluster: Cluster, fresh: Prompt, other: Prompt) -> None:
    cluster.bridge.kill()
    cluster.bridge.wait(60)
    for engine in cluster.engines.values():
        engine.ask(fresh)
    cluster.begin_bridge()
    cluster.site.agrees("b", cluster.engines["b"])
    cluster.site.agrees("a", cluster.engines["a"])
    cluster.hits("b", fresh, other)
    cluster.hits("a", fresh, other)
    cluster.agree()


class Pair:
    """An engine without kvbm, and one with the connector whose events the bridge reads, too; they do the same."""

    def __init__(self, site: Site, tiny: Models, processes: Processes) -> None:
        settings = {
            "instance.id": OWN,
            "instance.cluster": site.cluster,
            "instance.data_dir": str(site.folder / "data"),
            "nats.url": site.nats_url,
            "pools.host.slots": 40,
            "pools.host.huge_pages": "off",
            "pools.nvme.folder": str(site.folder / "nvme"),
            "pools.nvme.slots": 300,
            "onboard.wait_s": 60.0,
            "publish.engine_events": True,
        }
        connector = {
            "kv_connector": "KvbmConnector",
            "kv_connector_module_path": "kvbm.engines.vllm",
            "kv_role": "kv_both",
            "kv_connector_extra_config": settings,
        }
        self.site = site
        self.plain = Engine(tiny.model, site.folder / "plain.log", B_BLOCKS)
        self.own = Engine(tiny.model, site.folder / "own.log", B_BLOCKS, connector=connector)
        self.engines = {"plain": self.plain, "told": self.own}
        processes += [engine.process for engine in self.engines.values()]
        for engine in self.engines.values():
            engine.wait_ready()
        processes.append(site.bridge({name: engine.settings for name, engine in self.engines.items()}))

    def ask(self, *prompts: Prompt) -> None:
        for engine in self.engines.values():
            engine.ask(*prompts)

    def quiet(self) -> None:
        for name, engine in self.engines.items():
            engine.quiet()
            if name == "plain":
                self.site.agrees(name, engine)

    def tiers(self, prompt: Prompt) -> dict[str, dict[str, int]]:
        """Instance → tier → which blocks of a prompt it has there, a bit for each."""
        site = self.site
        found = {name: site.present(name, prompt.namespace, prompt.hashes()) for name in self.engines}
        space, packed = self.own.core("hashes", list(prompt.tokens), prompt.salt)
        found[OWN] = site.present(OWN, NamespaceId(bytes.fromhex(space)), bytes.fromhex(packed))
        return found

    def agree(self, prompt: Prompt) -> dict[str, dict[str, int]]:
        """All three say the same of each block of the prompt."""

        def differences() -> Any:
            found = self.tiers(prompt)
            own, told = found[OWN], found["told"]
            host, nvme = own.get("HOST", 0), own.get("NVME", 0) & ~own.get("HOST", 0)  # in its hottest of these
            expected = {tier: bits for tier, bits in {**own, "HOST": host, "NVME": nvme}.items() if bits}
            return None if told == expected and found["plain"].get("HBM", 0) == own.get("HBM", 0) else found

        eventually(lambda: differences() is None, "they say different things of a prompt", state=differences)
        return self.tiers(prompt)

    def depth(self, model: str, prompt: Prompt, at_least: int = 0) -> int:
        """Blocks of a prompt that the connector's engine has: by its own events as by those that the bridge reads, once
        the catalog has both. Namespaces of an adapter come with an epoch of their own, so they come later.
        """

        def found() -> tuple[int, int | str]:
            told = self.site.depth("told", prompt)
            try:
                return told, self.site.depth_by_tokens(OWN, model, prompt)
            except CatalogRefusedError as refusal:
                return told, str(refusal)

        def is_same() -> bool:
            told, own = found()
            return told == own and told >= at_least

        eventually(is_same, f"both have {at_least} blocks or more, and as many", state=found)
        return self.site.depth("told", prompt)


@pytest.fixture
def pair(site: Site, tiny: Models, processes: Processes) -> Pair:
    return Pair(site, tiny, processes)


@pytest.mark.timeout(600)
def test_an_engines_own_events_say_of_each_block_what_the_connector_says_itself(pair: Pair, tiny: Models) -> None:
    """Over a script in which blocks are evicted from HBM and HOST, loaded again, salted and reset."""
    choose = random.Random(5)
    prompts = [some(choose, choose.randint(2, 9)) for _ in range(12)]
    prompts += [prompts[0]._replace(salt="s"), some(choose, 5, salt="t")]
    seen: set[str] = set()
    for step in range(6):
        for prompt in choose.sample(prompts, 4):
            pair.ask(prompt)
        pair.quiet()
        for prompt in prompts:
            for tiers in pair.agree(prompt).values():
                seen.update(tiers)
        if step == 3:
            assert pair.plain.reset() and pair.own.reset()
    assert seen == {"HBM", "HOST", "NVME"}
    # A lookup by tokens says how much of the next request need not be computed, whoever tells of the engine.
    (model,) = pair.site.models() - {MODEL}
    adapted = [prompts[2]._replace(lora=str(tiny.adapter)), prompts[3]._replace(lora=str(tiny.adapter), salt="t")]
    pair.ask(some(choose, 1, lora=str(tiny.adapter)))  # kvbm knows an adapter once its weights are loaded
    pair.quiet()
    pair.ask(*adapted)
    pair.quiet()
    for prompt in adapted:
        assert pair.depth(model, prompt, at_least=prompt.blocks) == prompt.blocks
    for prompt in (*prompts, *adapted, some(choose, 3), prompts[1]._replace(salt="x"), adapted[0]._replace(salt="x")):
        told, plain = pair.depth(model, prompt), pair.site.depth("plain", prompt)
        assert pair.own.ask(prompt) == [told * BLOCK_TOKENS], prompt[1:]
        assert pair.plain.ask(prompt) == [plain * BLOCK_TOKENS], prompt[1:]
        pair.quiet()
        if not prompt.lora:
            pair.agree(prompt)
    pair.site.verify()
