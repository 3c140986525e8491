"""A test's end of the line to a vLLM that is a process of its own, and what a fold of all its events holds."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import select
import subprocess
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from kvbm.core.extra_keys import salted
from kvbm.core.hashing import sequence_hashes
from kvbm.core.ids import UNKNOWN, Namespace
from tests.eventually import eventually
from tests.servers import free_port

ROOT = Path(__file__).parents[4]
ENGINE_PYTHON = ROOT / "build" / "engines" / ".venv" / "bin" / "python"
MODELS = ROOT / "build" / "engines" / "bridge-models"
BLOCK_TOKENS = 32
MODEL = "tiny-llama"
START_S, ANSWER_S = 280.0, 120.0
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_CI_ENV": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
_IN_ONE_PROCESS = {"VLLM_PLUGINS": "", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
_MAKE = """
import sys
from pathlib import Path
from tests.engines.vllm.harness import models
models.llama_of_words(Path(sys.argv[1]))
models.adapter(Path(sys.argv[2]), 5)
"""


class Models(NamedTuple):
    """A tiny model with a tokenizer, and an adapter for it."""

    model: Path
    adapter: Path


def made_models() -> Models:
    """Made when they are first asked for. Raises AssertionError: vLLM is not installed."""
    assert ENGINE_PYTHON.exists(), "this test needs vLLM; make test-bridge installs it below build/"
    made = Models(MODELS / "llama-words", MODELS / "adapter")
    if not (made.adapter / "adapter_config.json").exists():
        MODELS.mkdir(parents=True, exist_ok=True)
        environment = os.environ | ENVIRONMENT | {"PYTHONPATH": str(ROOT)}
        subprocess.run([str(ENGINE_PYTHON), "-c", _MAKE, *map(str, made)], env=environment, check=True, timeout=START_S)
    return made


class Prompt(NamedTuple):
    """What is asked of an engine. `lora`: the folder of an adapter."""

    tokens: tuple[int, ...]
    salt: str = ""
    lora: str = ""

    @property
    def blocks(self) -> int:
        """Whole ones."""
        return len(self.tokens) // BLOCK_TOKENS

    @property
    def lora_name(self) -> str:
        """As engines are told."""
        return Path(self.lora).name if self.lora else ""

    @property
    def namespace(self) -> Namespace:
        """Of an engine without kvbm."""
        return Namespace(
            model=MODEL,
            block_tokens=BLOCK_TOKENS,
            revision=UNKNOWN,
            kv_dtype=UNKNOWN,
            layout=UNKNOWN,
            ranks=UNKNOWN,
            lora=self.lora_name,
        )

    def hashes(self) -> bytes:
        """As a router makes them of tokens, salt and adapter."""
        return sequence_hashes(self.tokens, BLOCK_TOKENS, self.namespace.root(), salted(self.salt, self.blocks))


class Engine:
    """A vLLM process that publishes its events.

    Args:
        blocks: of its KV cache.
        buffer: messages that its publisher keeps.
        connector: vLLM's `kv_transfer_config`; None: kvbm is not in the process.
    """

    def __init__(
        self,
        model: Path,
        log: Path,
        blocks: int,
        buffer: int = 10_000,
        connector: Mapping[str, Any] | None = None,
        ports: tuple[int, int] | None = None,
    ) -> None:
        self.ports, self._has_kvbm, self._log = ports or (free_port(), free_port()), connector is not None, log
        setup = {
            "model": str(model),
            "endpoint": f"tcp://*:{self.ports[0]}",
            "replay": f"tcp://*:{self.ports[1]}",
            "hwm": 2,
            "buffer": buffer,
            "blocks": blocks,
            "connector": connector,
        }
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "KVBM_"))}
        environment |= ENVIRONMENT | _IN_ONE_PROCESS
        if connector is not None:
            environment |= {"PYTHONPATH": str(ROOT)}
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                [str(ENGINE_PYTHON), str(Path(__file__).parent / "vllm_engine.py"), json.dumps(setup)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
                cwd=log.parent,
            )
        self._said = b""

    @property
    def settings(self) -> dict[str, Any]:
        """Of a source of the bridge."""
        endpoint, replay = (f"tcp://127.0.0.1:{port}" for port in self.ports)
        return {"endpoint": endpoint, "replay": replay, "model": MODEL}

    def wait_ready(self) -> None:
        """Until vLLM is loaded, with kvbm or without it as it was asked for."""
        assert self._read(START_S) == {"ready": self._has_kvbm}, "whether kvbm is in this engine is not as it should be"

    def ask(self, *prompts: Prompt) -> list[int]:
        """How many tokens of each were cached."""
        asks = [{"tokens": one.tokens, "salt": one.salt, "lora": one.lora} for one in prompts]
        found: list[int] = self._do(do="ask", asks=asks)
        return found

    def reset(self) -> bool:
        """Empty the prefix cache."""
        return bool(self._do(do="reset"))

    def core(self, name: str, *arguments: Any) -> Any:
        """Call a function of `tests.engines.vllm.harness.core_access`; of an engine with kvbm alone."""
        return self._do(do="core", name=name, arguments=arguments)

    def sent(self) -> list[bytes]:
        """Every batch of events, as it was handed to the publisher."""
        return [base64.b64decode(data) for data in self._do(do="sent")]

    def quiet(self) -> None:
        """Until nothing is on its way to another tier, and all that has changed is told in events."""
        if not self._has_kvbm:
            return
        eventually(lambda: self._do(do="rest") and self.core("settled", 0.05), "blocks are on their way", ANSWER_S)
        before = -1
        while before != (told := len(self.sent())):  # a step tells of what has changed since the one before
            before = told
            for _ in range(2):
                self.ask(Prompt((1, 2, 3)))

    def _do(self, **command: Any) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command).encode() + b"\n")
        self.process.stdin.flush()
        return self._read(ANSWER_S)

    def _read(self, wait_s: float) -> Any:
        """A line. Raises AssertionError: none comes in time, with the end of the log."""
        assert self.process.stdout is not None
        pipe, until_s = self.process.stdout.fileno(), time.monotonic() + wait_s
        while b"\n" not in self._said:
            left_s = until_s - time.monotonic()
            ready = select.select([pipe], [], [], left_s)[0] if left_s > 0 else []
            more = os.read(pipe, 1 << 20) if ready else b""
            assert more, f"the engine has ended or hangs:\n{self._log.read_text(errors='replace')[-6000:]}"
            self._said += more
        line, _, self._said = self._said.partition(b"\n")
        return json.loads(line)

    def kill(self) -> None:
        """kill -9."""
        self.process.kill()
        self.process.wait(ANSWER_S)


def held(batches: list[bytes]) -> set[bytes]:
    """A fold of every event an engine has sent of its GPU, by itself: no code of the bridge's, and hashes by
    hashlib.
    """
    ours: dict[int, bytes] = {}
    copies: Counter[int] = Counter()
    for batch in batches:
        for event in msgspec.msgpack.decode(batch)[1]:
            keys = event.get("block_hashes", [])
            match event["type"]:
                case "BlockStored":
                    ours |= _named(event, ours)
                    if event["medium"] == "GPU":
                        copies.update(keys)
                case "BlockRemoved" if event["medium"] == "GPU":
                    copies.subtract(keys)
                case "AllBlocksCleared":
                    copies.clear()
    return {ours[key] for key, count in copies.items() if count > 0}


def _named(event: dict[str, Any], ours: dict[int, bytes]) -> dict[int, bytes]:
    """vLLM's hashes of a stored event's blocks → ours."""
    found: dict[int, bytes] = {}
    keys, lora, parent = event["block_hashes"], event.get("lora_name") or "", event.get("parent_block_hash")
    before = Prompt((), lora=lora).namespace.root() if parent is None else ours[parent]
    for at, key in enumerate(keys):
        words = (event.get("extra_keys") or [None] * len(keys))[at] or []
        salt = words[bool(lora) :]
        extra = b"s" + len(salt[0]).to_bytes(4, "little") + salt[0].encode() if salt else b""
        block = event["token_ids"][at * BLOCK_TOKENS : (at + 1) * BLOCK_TOKENS]
        before = hashlib.sha256(before + b"".join(token.to_bytes(4, "little") for token in block) + extra).digest()[:16]
        found[key] = before
    return found
