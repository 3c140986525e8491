"""Somebody who follows docs/bridge.md and docs/routers.md: their commands as written, each a process.

Only what a page cannot know is another here: addresses, since all run on one machine; sizes, and what a CPU and a tiny
model need. The model is found in the folder that its name is.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from tests.engines.bridge.harness.engines import BLOCK_TOKENS, ENGINE_PYTHON, ENVIRONMENT, ROOT, Prompt
from tests.eventually import eventually
from tests.pages import Block, blocks
from tests.servers import free_port, start_process

ROUTERS_PYTHON = ROOT / "build" / "routers" / ".venv" / "bin" / "python"
MODEL = "meta-llama/Llama-3.1-8B"
START_S, ASK_S, STOP_S = 400.0, 120.0, 60.0
HBM_BLOCKS = 40
HOST_BYTES = 64 << 20
_ON_A_CPU = (
    f"--enforce-eager --dtype float32 --block-size {BLOCK_TOKENS} --num-gpu-blocks-override {HBM_BLOCKS} "
    f"--kv-cache-memory-bytes {64 << 20} --max-model-len 512 --max-num-batched-tokens 512 --max-num-seqs 4 "
    "--host 127.0.0.1 --enable-prompt-tokens-details"
)
_SERVE = "python -m vllm.entrypoints.openai.api_server --model"  # the wheel for CPUs has no `vllm` that starts
_COMMAND_PORTS = ("8100", "5557", "5558")  # as the pages' engines have them
_directly = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def block_with(page: str, *words: str) -> Block:
    """The one block of a page that has all of these words."""
    (found,) = (one for one in blocks(ROOT / "docs" / page) if all(word in one.text for word in words))
    return found


def commands_of(block: Block) -> list[str]:
    """A block's commands, the lines of each joined."""
    lines = re.sub(r"\\\n\s*", "", block.text)
    return re.findall(r"^(?!#)(?:[^'\n]|'[^']*')+", lines, re.MULTILINE)


class Command(NamedTuple):
    """A command that is run as it stands on a page.

    Attributes:
        page: below docs. program: what it begins with.
        words: that its block has beside it, and no other one of the page with that program.
    """

    page: str
    program: str
    words: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """Raises ValueError: there is none, or several."""
        found = commands_of(block_with(self.page, self.program, *self.words))
        (only,) = (one for one in found if one.startswith(self.program))
        return only


SERVE = Command("routers.md", "vllm serve", ("replay_endpoint",))
SERVE_LLM_D = Command("routers.md", "vllm serve", ("llm-d-router",))
SERVE_PLAIN = Command("bridge.md", "vllm serve")
ROUTER = Command("routers.md", "vllm-router")
INDEXER = Command("routers.md", "python -m dynamo.indexer")
BRIDGE = Command("bridge.md", "kvbm bridge")
SERVE_SGLANG = Command("bridge.md", "python -m sglang.launch_server")  # it needs a GPU: SGLang's parser reads it
COMMANDS = (SERVE, SERVE_LLM_D, SERVE_PLAIN, SERVE_SGLANG, ROUTER, INDEXER, BRIDGE)


class Router(NamedTuple):
    """A vllm-router.

    Attributes:
        metrics: where they are.
    """

    url: str
    metrics: str

    def lookups(self) -> tuple[int, int]:
        """How many prompts it found at a worker, and how many nowhere."""
        found = numbers(self.metrics)
        name = "vllm_router_kv_placement_lookups_total"
        return found.get(f'{name}{{result="hit"}}', 0), found.get(f'{name}{{result="miss"}}', 0)


class Worker:
    """A `vllm serve` of a page.

    Attributes:
        places: "host:port" on the page → here, for those who are to reach it.
        url: where it answers.
    """

    def __init__(self, site: Pages, name: str, command: str, host: str, changes: Mapping[str, str]) -> None:
        ports = {port: free_port() for port in _COMMAND_PORTS}
        self.name, self.url = name, f"http://127.0.0.1:{ports['8100']}"
        self.places = {f"{host}:{port}": f"127.0.0.1:{here}" for port, here in ports.items()}
        self.settings = {
            "endpoint": f"tcp://127.0.0.1:{ports['5557']}",
            "replay": f"tcp://127.0.0.1:{ports['5558']}",
            "model": MODEL,
        }
        text = command.replace(f"vllm serve {MODEL}", f"{_SERVE} {MODEL} {_ON_A_CPU}")
        if "--port" not in text:
            text += " --port 8100"
        for word, here in {**changes, **{port: str(here) for port, here in ports.items()}}.items():
            text = re.sub(rf"(?<![\w.]){re.escape(word)}(?!\w)", here, text)
        folder = site.folder / name
        (folder / MODEL).parent.mkdir(parents=True)
        (folder / MODEL).symlink_to(site.model)
        self._process = site.begin(text, folder)
        self._log = folder / "log"

    def wait_ready(self) -> None:
        """Until it answers. Raises AssertionError: it has ended, with the end of its log."""

        def answers() -> bool:
            words = self._log.read_text(errors="replace")[-6000:]
            assert self._process.poll() is None, f"{self.name} has ended:\n{words}"
            with suppress(OSError):
                return int(_directly.open(f"{self.url}/health", timeout=ASK_S).status) == 200
            return False

        eventually(answers, f"{self.name} does not answer", START_S)

    def asked(self) -> int:
        """How many requests it has answered."""
        found = numbers(f"{self.url}/metrics")
        return sum(count for name, count in found.items() if name.startswith("vllm:request_success_total{"))

    def reset(self) -> None:
        """Empty its prefix cache."""
        post(f"{self.url}/reset_prefix_cache", {})

    def step(self) -> None:
        """Have it do a step, with which it tells what has changed."""
        complete(self.url, Prompt((20, 21, 22)))


class Pages:
    """See the module. Whatever is begun ends with `close`."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder, self.model = folder, model
        self._begun: list[subprocess.Popen[bytes]] = []

    def _fresh(self, name: str) -> Path:
        return self.folder / f"{name}-{len(self._begun)}"

    def begin(self, text: str, folder: Path) -> subprocess.Popen[bytes]:
        """A command in a group of its own, which takes the shell's place."""
        folder.mkdir(parents=True, exist_ok=True)
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "KVBM_"))}
        paths = (ENGINE_PYTHON.parent, environment["PATH"])
        environment |= ENVIRONMENT | {"PATH": os.pathsep.join(map(str, paths)), "VLLM_SERVER_DEV_MODE": "1"}
        command = ["bash", "-euo", "pipefail", "-c", f"exec {text}"]
        begun = start_process(command, folder / "log", cwd=folder, env=environment, start_new_session=True)
        self._begun.append(begun)
        return begun

    def close(self) -> None:
        """End all of it."""
        for process in reversed(self._begun):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        for process in self._begun:
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_S)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(STOP_S)

    def here(self, text: str, workers: list[Worker]) -> str:
        """A command of who listens to engines, for this machine."""
        for worker in workers:
            for place, here in worker.places.items():
                text = text.replace(place, here)
        return text.replace("block-size 16", f"block-size {BLOCK_TOKENS}")

    def router(self, workers: list[Worker]) -> Router:
        """The page's vllm-router, with other workers of the page's two addresses."""
        port, metrics, folder = free_port(), free_port(), self._fresh("router")
        text = self.here(ROUTER.text, workers)
        text = text.replace("--port 8000", f"--port {port} --prometheus-port {metrics}")
        process, log = self.begin(text, folder), folder / "log"
        url = f"http://127.0.0.1:{port}"
        eventually(lambda: _answers(f"{url}/health", process, log), "vllm-router does not answer", START_S)
        return Router(url, f"http://127.0.0.1:{metrics}/metrics")

    def indexer(self, workers: list[Worker]) -> Callable[[Prompt], dict[int, dict[str, int]]]:
        """The page's dynamo.indexer; gives who asks it: worker → tier → blocks of a prompt."""
        port, folder = free_port(), self._fresh("indexer")
        text = self.here(INDEXER.text, workers)
        text = text.replace("--port 8090", f"--port {port}").replace("python ", f"{ROUTERS_PYTHON} ", 1)
        process, log = self.begin(text, folder), folder / "log"

        def ask(prompt: Prompt) -> dict[int, dict[str, int]]:
            found = post(f"http://127.0.0.1:{port}/query", {"model_name": MODEL, "token_ids": list(prompt.tokens)})
            return {
                int(worker): {tier: tokens[tier] // BLOCK_TOKENS for tier in ("gpu", "cpu", "disk") if tokens.get(tier)}
                for worker, tokens in found["instances"].items()
            }

        def answers() -> bool:
            assert process.poll() is None, log.read_text(errors="replace")[-6000:]
            with suppress(OSError):
                ask(Prompt(tuple(range(BLOCK_TOKENS))))
                return True
            return False

        eventually(answers, "dynamo.indexer does not answer", START_S)
        return ask


def complete(url: str, prompt: Prompt) -> int:
    """Have a worker or a router answer; gives how many tokens of the prompt were cached."""
    body: dict[str, Any] = {"model": MODEL, "prompt": list(prompt.tokens), "max_tokens": 1, "temperature": 0}
    answer = post(f"{url}/v1/completions", body | ({"cache_salt": prompt.salt} if prompt.salt else {}))
    return int((answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0)


def numbers(url: str) -> dict[str, int]:
    """Counters and gauges of a page of metrics, with their labels."""
    with _directly.open(url, timeout=ASK_S) as answer:
        lines = answer.read().decode().splitlines()
    pairs = (line.rpartition(" ")[::2] for line in lines if line and not line.startswith("#"))
    return {name: int(float(value)) for name, value in pairs if value not in ("NaN", "+Inf")}


def post(url: str, body: Any) -> Any:
    """JSON for JSON. Raises AssertionError: it is refused."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    try:
        with _directly.open(request, timeout=ASK_S) as answer:
            return json.loads(answer.read() or b"null")
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{url}: {error.code} {error.read().decode(errors='replace')[-2000:]}") from None


def _answers(url: str, process: subprocess.Popen[bytes], log: Path) -> bool:
    assert process.poll() is None, log.read_text(errors="replace")[-6000:]
    with suppress(OSError):
        return int(_directly.open(url, timeout=ASK_S).status) == 200
    return False
