"""Real vLLM processes without kvbm, a bridge, a nats-server and a catalog: what the catalog says is what the engines
have.

`make test-bridge` runs it. Engines run in the environment of `make test-engines-quick`, everything else in that of
`make setup`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from kvbm.assembly import NATIVE, NATIVE_INDEX
from kvbm.catalog.edge.server import CatalogThread
from kvbm.catalog.service import ServiceSettings
from kvbm.core.extra_keys import salted
from kvbm.core.fold import residency_mix
from kvbm.core.hashing import sequence_hashes
from kvbm.core.ids import UNKNOWN, Namespace, Tier
from kvbm.locate.http import CatalogClient
from tests.eventually import WAIT_S, eventually
from tests.servers import free_port, nats_server, start_process

ROOT = Path(__file__).parents[3]
ENGINE_PYTHON = ROOT / "build" / "engines" / ".venv" / "bin" / "python"
MODELS = ROOT / "build" / "engines" / "bridge-models"
BLOCK_TOKENS = 32
MODEL = "tiny-llama"
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_CI_ENV": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
MAKE_MODEL = """
import sys
from pathlib import Path
from tests.engines.vllm.harness import models
models.llama(Path(sys.argv[1]))
models.adapter(Path(sys.argv[2]), 5)
"""


class Prompt(NamedTuple):
    tokens: tuple[int, ...]
    salt: str = ""
    lora: str = ""

    @property
    def namespace(self) -> Namespace:
        return Namespace(
            model=MODEL,
            block_tokens=BLOCK_TOKENS,
            revision=UNKNOWN,
            kv_dtype=UNKNOWN,
            layout=UNKNOWN,
            ranks=UNKNOWN,
            lora=Path(self.lora).name if self.lora else "",
        )

    def hashes(self) -> bytes:
        """As a router makes them of tokens, salt and adapter."""
        extra = salted(self.salt, len(self.tokens) // BLOCK_TOKENS)
        return sequence_hashes(self.tokens, BLOCK_TOKENS, self.namespace.root(), extra)


class Engine:
    """A vLLM process.

    Attributes:
        blocks: of its KV cache.
    """

    def __init__(self, model: Path, log: Path, ports: tuple[int, int], blocks: int, buffer: int = 10_000) -> None:
        self.ports, self.blocks = ports, blocks
        setup = {
            "model": str(model),
            "endpoint": f"tcp://*:{ports[0]}",
            "replay": f"tcp://*:{ports[1]}",
            "hwm": 2,
            "buffer": buffer,
            "blocks": blocks,
        }
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")} | ENVIRONMENT
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                [str(ENGINE_PYTHON), str(Path(__file__).parent / "vllm_engine.py"), json.dumps(setup)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
                cwd=log.parent,
            )

    def wait_ready(self) -> None:
        assert self._read() == {"ready": False}, "this engine has kvbm in it"

    def ask(self, *prompts: Prompt) -> list[int]:
        """How many tokens of each were cached."""
        asks = [{"tokens": one.tokens, "salt": one.salt, "lora": one.lora} for one in prompts]
        found: list[int] = self._do(do="ask", asks=asks)
        return found

    def reset(self) -> bool:
        return bool(self._do(do="reset"))

    def sent(self) -> list[bytes]:
        """Every batch of events, as it was handed to the publisher."""
        return [base64.b64decode(data) for data in self._do(do="sent")]

    def _do(self, **command: Any) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command).encode() + b"\n")
        self.process.stdin.flush()
        return self._read()

    def _read(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the engine ended with {self.process.wait(WAIT_S)}"
        return json.loads(line)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(WAIT_S)


def held(batches: list[bytes]) -> set[bytes]:
    """A fold of every event an engine has sent, by itself: no code of the bridge's, and hashes by hashlib."""
    ours: dict[int, bytes] = {}
    copies: Counter[int] = Counter()
    for batch in batches:
        for event in msgspec.msgpack.decode(batch)[1]:
            keys = event.get("block_hashes", [])
            match event["type"]:
                case "BlockStored":
                    namespace = Prompt((), lora=event.get("lora_name") or "").namespace
                    parent = event.get("parent_block_hash")
                    before = namespace.root() if parent is None else ours[parent]
                    for at, key in enumerate(keys):
                        block = event["token_ids"][at * BLOCK_TOKENS : (at + 1) * BLOCK_TOKENS]
                        words = (event.get("extra_keys") or [None] * len(keys))[at] or []
                        salt = words[bool(event.get("lora_name")) :]
                        extra = b"s" + len(salt[0]).to_bytes(4, "little") + salt[0].encode() if salt else b""
                        packed = b"".join(token.to_bytes(4, "little") for token in block)
                        before = hashlib.sha256(before + packed + extra).digest()[:16]
                        ours[key] = before
                    copies.update(keys)
                case "BlockRemoved":
                    copies.subtract(keys)
                case "AllBlocksCleared":
                    copies.clear()
    return {ours[key] for key, count in copies.items() if count > 0}


class Site(NamedTuple):
    """A catalog, and a bridge that is a process."""

    client: CatalogClient
    url: str
    nats_url: str
    cluster: str
    folder: Path
    model: Path
    adapter: Path

    def bridge(self, engines: dict[str, Engine]) -> subprocess.Popen[bytes]:
        lines = [f'[instance]\ncluster = "{self.cluster}"\n[nats]\nurl = "{self.nats_url}"']
        for name, engine in engines.items():
            endpoint, replay = (f"tcp://127.0.0.1:{port}" for port in engine.ports)
            lines.append(f'[bridge.sources.{name}]\nendpoint = "{endpoint}"\nreplay = "{replay}"\nmodel = "{MODEL}"')
        config = self.folder / "bridge.toml"
        config.write_text("\n".join(lines))
        command = [sys.executable, "-m", "kvbm", "bridge", "--config", str(config)]
        return start_process(command, self.folder / "bridge.log", cwd=self.folder)

    def depth(self, name: str, prompt: Prompt) -> int:
        """Blocks of a prompt that the catalog says an engine has on its GPU."""
        answer = self.client.lookup(prompt.namespace, prompt.hashes())
        return next((one.tiers.get("HBM", 0) for one in answer.instances if one.instance == name), 0)

    def agrees(self, name: str, engine: Engine) -> None:
        """The catalog holds of an engine, block for block, what a fold of all its events holds."""
        expected = held(engine.sent())
        digest = f"{sum(residency_mix(Tier.HBM, block) for block in expected) % 2**64:016x}"

        def found() -> tuple[int, str]:
            one = self.client.instance(name)
            return (0, "") if one is None or one.excluded else (sum(one.held_blocks.values()), one.digest)

        eventually(lambda: found() == (len(expected), digest), f"{len(expected)} blocks were expected", state=found)

    def verify(self) -> None:
        """`kvbm-replay verify` finds nothing."""
        command = [sys.executable, "-m", "kvbm", "replay", "verify", self.nats_url, "--catalog", self.url]
        done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def model() -> tuple[Path, Path]:
    """A tiny model, and an adapter for it."""
    assert ENGINE_PYTHON.exists(), "this test needs vLLM; make test-bridge installs it below build/"
    made = MODELS / "llama", MODELS / "adapter"
    if not (made[1] / "adapter_config.json").exists():
        MODELS.mkdir(parents=True, exist_ok=True)
        environment = os.environ | ENVIRONMENT | {"PYTHONPATH": str(ROOT)}
        subprocess.run(
            [str(ENGINE_PYTHON), "-c", MAKE_MODEL, *map(str, made)], env=environment, check=True, timeout=280
        )
    return made


@pytest.fixture
def site(tmp_path: Path, model: tuple[Path, Path]) -> Iterator[Site]:
    cluster = f"bridge-{uuid.uuid4().hex[:8]}"
    with nats_server() as server:
        settings = ServiceSettings(
            nats_url=server.url,
            database_url=f"sqlite+aiosqlite:///{tmp_path / 'catalog.db'}",
            cluster=cluster,
            listen="127.0.0.1:0",
            store_every_s=0.02,
            liveness_s=60.0,
        )
        with CatalogThread(settings, NATIVE, NATIVE_INDEX) as thread:
            client = CatalogClient(thread.url, WAIT_S / 2)
            client.wait_ready(WAIT_S)
            yield Site(client, thread.url, server.url, cluster, tmp_path, *model)
            client.close()


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[bytes]]]:
    made: list[subprocess.Popen[bytes]] = []
    yield made
    for process in made:
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait(WAIT_S)


def some(choose: random.Random, blocks: int, **more: str) -> Prompt:
    return Prompt(tuple(choose.randrange(512) for _ in range(blocks * BLOCK_TOKENS + 5)), **more)


@pytest.mark.timeout(600)
def test_the_catalog_knows_what_engines_without_kvbm_hold(site: Site, processes: list[subprocess.Popen[bytes]]):
    choose = random.Random(3)
    a, b = (
        Engine(site.model, site.folder / f"{name}.log", (free_port(), free_port()), blocks)
        for name, blocks in (("a", 64), ("b", 24))
    )
    processes += [a.process, b.process]
    bridge = site.bridge({"a": a, "b": b})
    processes.append(bridge)
    for engine in (a, b):
        engine.wait_ready()

    # A lookup by tokens says how much of the next request is cached, also with salts and adapters.
    plain, other = some(choose, 4), some(choose, 6)
    salted_prompt, adapted = plain._replace(salt="s"), other._replace(lora=str(site.adapter))
    both = adapted._replace(salt="t")
    for engine, prompts in ((a, [plain, salted_prompt, adapted, both]), (b, [other])):
        assert engine.ask(*prompts) == [0] * len(prompts)
    site.agrees("a", a)
    site.agrees("b", b)
    for name, engine in (("a", a), ("b", b)):
        for prompt in (plain, other, salted_prompt, adapted, both, plain._replace(salt="x"), other._replace(salt="s")):
            depth = site.depth(name, prompt)
            assert engine.ask(prompt) == [depth * BLOCK_TOKENS], (name, prompt[1:])
            site.agrees(name, engine)

    # More than fits: blocks are evicted, and the same prompt comes several times at once.
    for _ in range(4):
        prompt = some(choose, choose.randint(2, 8))
        b.ask(prompt, prompt, some(choose, 3))
    site.agrees("b", b)
    last = some(choose, 5)
    b.ask(last)
    site.agrees("b", b)
    assert b.ask(last) == [site.depth("b", last) * BLOCK_TOKENS]

    # Reset, then killed and started again at the same address.
    assert a.reset()
    a.ask(last)  # vLLM tells of a reset with its next step
    site.agrees("a", a)
    assert site.depth("a", plain) == 0
    a.ask(plain)
    site.agrees("a", a)
    before = site.client.instance("a")
    a.kill()
    again = Engine(site.model, site.folder / "a2.log", a.ports, 64, buffer=10_000)
    processes.append(again.process)
    again.wait_ready()
    again.ask(other)
    site.agrees("a", again)
    after = site.client.instance("a")
    assert before is not None
    assert after is not None
    assert after.epoch > before.epoch
    assert site.depth("a", plain) == 0
    assert site.depth("a", other) == 6

    # A bridge that stands still: what it has not taken is more than the engine keeps.
    bridge.send_signal(signal.SIGSTOP)
    for _ in range(12):
        again.ask(some(choose, 3))
    bridge.send_signal(signal.SIGCONT)
    eventually(lambda: site.depth("a", other) == again.ask(other)[0] // BLOCK_TOKENS)
    site.agrees("a", again)

    # A bridge that is killed.
    bridge.kill()
    bridge.wait(WAIT_S)
    b.ask(some(choose, 3))
    processes.append(site.bridge({"a": again, "b": b}))
    site.agrees("b", b)
    site.verify()
