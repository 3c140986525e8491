"""vLLM's API server as a user starts it, in processes of its own, and what a client says to one, or to a proxy."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import sys
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.engines.vllm.harness.engine import _ENVIRONMENT, CORE_ACCESS
from tests.engines.vllm.harness.words import BLOCK_TOKENS, TOP, Answer, Ask
from tests.eventually import eventually
from tests.servers import free_port, start_process

ROOT = Path(__file__).parents[4]
NAME = "tiny"  # what clients call the model
INSIDE = "tests.engines.pd.harness.inside"
WAIT_S = 250.0
_TAIL_BYTES = 6000
# Of the engine core and its worker; by itself the CPU platform parts them, and `inside` could not reach the core
_ONE_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
_METRIC = re.compile(r"^([a-z_:]+)(?:\{(.*)\})? ([0-9.e+-]+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


class ApiServer:
    """One of them.

    Attributes:
        url: where it answers.
        log: file with what it prints.
    """

    def __init__(
        self,
        model: str,
        connector: Mapping[str, Any] | None,
        folder: Path,
        step_tokens: int = 256,
        context_tokens: int = 2048,
        hbm_blocks: int = 256,
        hbm_bytes: int = 64 << 20,
    ) -> None:
        """Begin to start it; `wait` is next.

        Args:
            connector: vLLM's `kv_transfer_config`; None: no connector.
            step_tokens: at most so many a step, so that longer prompts are computed in chunks.
            context_tokens: of a prompt and its answer, at most.
            hbm_blocks, hbm_bytes: of device KV.
        """
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self.log = folder / f"server-{self._port}.log"
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
        command += ["--served-model-name", NAME, "--host", "127.0.0.1", "--port", str(self._port)]
        command += ["--enforce-eager", "--dtype", "float32", "--block-size", str(BLOCK_TOKENS)]
        command += ["--kv-cache-memory-bytes", str(hbm_bytes), "--num-gpu-blocks-override", str(hbm_blocks)]
        command += [
            "--max-model-len",
            str(context_tokens),
            "--max-num-batched-tokens",
            str(step_tokens),
            "--max-num-seqs",
            "8",
        ]
        command += ["--distributed-executor-backend", _ONE_PROCESS]
        command += ["--worker-extension-cls", f"{INSIDE}.Inside"]
        command += [] if connector is None else ["--kv-transfer-config", json.dumps(connector)]
        more = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        environment = {**os.environ, **_ENVIRONMENT, **more}
        self._process = start_process(command, self.log, cwd=ROOT, env=environment, process_group=0)

    def wait(self) -> ApiServer:
        """Until it answers. Raises AssertionError: it does not, with the end of its log."""
        eventually(self._is_there, "the API server does not answer", WAIT_S)
        return self

    @property
    def is_alive(self) -> bool:
        """Whether it runs."""
        return self._process.poll() is None

    def ask(self, ask: Ask) -> Answer:
        """Have a request answered by this server alone."""
        return Asked(self.url, ask).answer()

    def in_core(self, name: str, *arguments: Any) -> Any:
        """Call a function of `core_access`, or "module:name", with vLLM's EngineCore as its first argument."""
        name = name if ":" in name else f"{CORE_ACCESS}:{name}"
        body = {"method": "in_core", "args": [name, *arguments]}
        return self._post("/collective_rpc", body)["results"][0]["said"]

    def inside(self, name: str, *arguments: Any) -> Any:
        """Call a function of `inside` in the same way."""
        return self.in_core(f"{INSIDE}:{name}", *arguments)

    def forget(self) -> None:
        """Empty its prefix cache and overwrite its device KV: what comes next has to be computed or loaded."""
        eventually(lambda: self.inside("forget"), "blocks were in use all the time", WAIT_S)

    def settle(self, has_kept: bool = False) -> None:
        """Wait until nothing is left of any request, and nothing is on its way to another tier.

        Args:
            has_kept: but for what it was asked to keep.
        """
        eventually(lambda: not self.left(has_kept), "something is left", state=lambda: self.left(has_kept))
        eventually(lambda: self.in_core("settled", 0.02), "blocks were on their way to a colder tier")

    def left(self, has_kept: bool = False) -> dict[str, Any]:
        """As `inside.left`."""
        found = self.inside("left")
        return {name: what for name, what in found.items() if not (has_kept and name in ("kept", "pinned"))}

    def metrics(self) -> dict[str, float]:
        """vLLM's counters and gauges, and the connector's: name, or name{label=value,…} → value."""
        with _directly.open(f"{self.url}/metrics", timeout=WAIT_S) as answer:
            text = answer.read().decode()
        found: dict[str, float] = {}
        for name, labels, value in _METRIC.findall(text):
            said = sorted((label, what) for label, what in _LABEL.findall(labels) if label not in _OUR)
            words = ",".join(f"{label}={what}" for label, what in said)
            found[f"{name}{{{words}}}" if words else name] = float(value)
        return found

    def kill(self) -> None:
        """SIGKILL to all of its processes at once."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _is_there(self) -> bool:
        if not self.is_alive:
            raise AssertionError(
                f"it ended with status {self._process.returncode}; the end of {self.log}:\n{self._tail()}"
            )
        with socket.socket() as asked:
            asked.settimeout(1.0)
            if asked.connect_ex(("127.0.0.1", self._port)):
                return False
        with contextlib.suppress(OSError):
            return int(_directly.open(f"{self.url}/health", timeout=WAIT_S).status) == 200
        return False

    def _post(self, path: str, body: Any) -> Any:
        asked = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"content-type": "application/json"}, method="POST"
        )
        try:
            with _directly.open(asked, timeout=WAIT_S) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{path}: {error.read().decode()[-2000:]}\n{self._tail()}") from None

    def _tail(self) -> str:
        return self.log.read_text(errors="replace")[-_TAIL_BYTES:]


class Asked:
    """A request under way to a server or a proxy."""

    def __init__(self, url: str, ask: Ask, **more: Any) -> None:
        """Send it.

        Args:
            url: without /v1/completions.
            more: further keys of its body.
        """
        parts = urlsplit(url)
        self._connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=WAIT_S)
        self._sent_s = time.monotonic()
        headers = {"content-type": "application/json"}
        body = json.dumps(body_of(ask) | more)
        self._connection.request("POST", f"{parts.path}/v1/completions", body, headers)

    def raw(self) -> tuple[int, Any]:
        """Status and body of what comes."""
        answer = self._connection.getresponse()
        text = answer.read().decode()
        self._connection.close()
        return answer.status, json.loads(text) if text.startswith("{") else text

    def answer(self) -> Answer:
        """What comes of it. Raises AssertionError where that is no answer."""
        status, said = self.raw()
        assert status == 200, said
        choice = said["choices"][0]
        likely = tuple(
            {int(token.removeprefix("token_id:")): float(one) for token, one in position.items()}
            for position in choice["logprobs"]["top_logprobs"]
        )
        details = said["usage"].get("prompt_tokens_details") or {}
        return Answer(tuple(choice["token_ids"]), likely, details.get("cached_tokens") or 0, choice["finish_reason"])

    def leave(self) -> None:
        """Close the connection, whatever comes."""
        assert self._connection.sock is not None
        self._connection.sock.shutdown(socket.SHUT_RDWR)
        self._connection.close()


def body_of(ask: Ask) -> dict[str, Any]:
    """A request for a completion, as JSON."""
    body: dict[str, Any] = {
        "model": NAME,
        "prompt": list(ask.tokens),
        "max_tokens": ask.output_tokens,
        "temperature": 0,
        "logprobs": TOP,
        "ignore_eos": True,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }
    if ask.salt:
        body["cache_salt"] = ask.salt
    if ask.transfer:
        body["kv_transfer_params"] = dict(ask.transfer)
    return body


_OUR = ("model_name", "engine")
_directly = urllib.request.build_opener(urllib.request.ProxyHandler({}))
