"""The blocks of the documentation: read from the pages, run as a reader would run them, or checked as far as they can
be.

What stands above a block decides what happens to it:

    nothing                       it runs, after those above it on its page and in the same folder; it must succeed
    <!-- server -->               it is started and goes on until the end of the page
    <!-- output -->               it is what the block above printed; … stands for anything within a line
    <!-- not run: REASON -->      it does not run; its syntax is checked, and that commands, flags and targets exist
    <!-- tested: NAME -->         docs/vllm.md: tests/engines/vllm/test_docs.py runs it in a real engine
"""

from __future__ import annotations

import ast
import contextlib
import functools
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import yaml

from kvbm.catalog_cli import catalog_main
from kvbm.cli import main, replay_main
from kvbm.config import load_settings
from tests.servers import free_port

ROOT = Path(__file__).parents[1]
WAIT_S = 300.0  # of a block, which may start several programs; only one that hangs takes it
_PATIENT = {"KVBM_ONBOARD__WAIT_S": "60", "KVBM_ONBOARD__LOCATE_S": "60"}  # a page shows what comes, not how soon
PORTS = ("4222", "7700", "7701")  # as the pages write them; each run has its own
_OF_A_CHECKOUT = ("deploy", "tools")  # what lies beside a reader who has one
RUN_AS = {"sh": ("bash", "-euo", "pipefail"), "python": (sys.executable,), "js": ("node",)}
DATA = ("json", "toml", "yaml", "text")
_MARK = re.compile(r"^<!-- (?P<kind>server|output|not run|tested)(?:: (?P<words>.+))? -->$")
_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)$")
_OURS: dict[str, Callable[[list[str]], object]] = {
    "kvbm": main,
    "kvbm-catalog": catalog_main,
    "kvbm-replay": replay_main,
}


class Block(NamedTuple):
    """One fenced block.

    Attributes:
        line: of its fence, from 1.
        kind: of the mark above it, "" without one. words: of that mark.
    """

    page: str
    line: int
    language: str
    kind: str
    words: str
    text: str

    @property
    def place(self) -> str:
        """Where it is, for messages."""
        return f"{self.page}:{self.line}"

    @property
    def runs(self) -> bool:
        """Whether it is run here."""
        return self.language in RUN_AS and self.kind in ("", "server")


def pages() -> list[Path]:
    """README, ARCHITECTURE and every page of docs/."""
    return [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path) -> list[Block]:
    """The blocks of a page.

    Raises AssertionError: a fence without a language, a mark without a block, an unclosed fence.
    """
    name = str(page.relative_to(ROOT))
    found: list[Block] = []
    lines = page.read_text().splitlines()
    mark: re.Match[str] | None = None
    at = 0
    while at < len(lines):
        fence = _FENCE.match(lines[at])
        if fence is None:
            assert mark is None, f"{name}:{at + 1}: a mark stands directly above its block"
            mark = _MARK.match(lines[at])
            at += 1
            continue
        end = next((end for end in range(at + 1, len(lines)) if lines[end].strip() == "```"), None)
        assert end is not None, f"{name}:{at + 1}: this block does not end"
        text = "".join(line.removeprefix(fence["indent"]) + "\n" for line in lines[at + 1 : end])
        kind, words = (mark["kind"], mark["words"] or "") if mark else ("", "")
        found.append(Block(name, at + 1, fence["language"], kind, words, text))
        mark, at = None, end + 1
    assert mark is None, f"{name}: a mark stands directly above its block"
    return found


class Reader:
    """Somebody who runs a page's blocks, one after another in one folder. Servers end with it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        for name in _OF_A_CHECKOUT:
            (folder / name).symlink_to(ROOT / name)
        self._ports = {port: str(free_port()) for port in PORTS}
        self._servers: list[subprocess.Popen[bytes]] = []
        self._printed = ""
        self._environment = {name: value for name, value in os.environ.items() if not name.startswith("KVBM_")}
        self._environment |= {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "COLUMNS": "200",
            "PYTHONFAULTHANDLER": "1",
        } | _PATIENT

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *exc: object) -> None:
        for server in reversed(self._servers):
            with suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGTERM)
        for server in self._servers:
            try:
                server.wait(WAIT_S)
            except subprocess.TimeoutExpired:
                os.killpg(server.pid, signal.SIGKILL)
                server.wait(WAIT_S)

    def read(self, block: Block) -> None:
        """Run a block, or compare it with what the one before printed. Raises AssertionError with what went wrong."""
        if block.kind == "output":
            expected = "\n".join(line.rstrip() for line in block.text.strip().splitlines())
            printed = "\n".join(line.rstrip() for line in self._printed.strip().splitlines())
            pattern = ".*".join(re.escape(part) for part in expected.split("…"))
            assert re.fullmatch(pattern, printed), (
                f"{block.place}: the page says\n{expected}\nand it printed\n{printed}"
            )
        elif block.runs:
            self._run(block)

    def _run(self, block: Block) -> None:
        script = self._folder / f"block-{block.line}"
        script.write_text(re.sub("|".join(rf"\b{port}\b" for port in PORTS), lambda m: self._ports[m[0]], block.text))
        command = [*RUN_AS[block.language], str(script)]
        log = script.with_suffix(".log")
        if block.kind == "server":
            with log.open("wb") as out:
                self._servers.append(
                    subprocess.Popen(
                        command,
                        cwd=self._folder,
                        env=self._environment,
                        stdin=subprocess.DEVNULL,
                        stdout=out,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
            return
        with subprocess.Popen(
            command,
            cwd=self._folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as running:
            ended = "returned"
            try:
                self._printed, said = running.communicate(timeout=WAIT_S)
            except subprocess.TimeoutExpired:  # programs in Python say where they are
                ended = f"was ended after {WAIT_S:g} s, and had"
                os.killpg(running.pid, signal.SIGABRT)
                self._printed, said = running.communicate(timeout=WAIT_S)
        assert running.returncode == 0, (
            f"{block.place} {ended} {running.returncode}\n{self._printed[-2000:]}\n{said[-4000:]}"
        )


def check(block: Block) -> None:
    """What can be said of a block without running it. Raises AssertionError, or what the block's parser raises."""
    if block.language == "json":
        json.loads(block.text)
    elif block.language == "toml":
        _check_settings(block)
    elif block.language == "yaml":
        yaml.safe_load(block.text)
    elif block.language == "python":
        ast.parse(block.text)
    elif block.language == "sh":
        done = subprocess.run(
            ["bash", "-n"], input=block.text, capture_output=True, text=True, timeout=WAIT_S, check=False
        )
        assert done.returncode == 0, f"{block.place}: {done.stderr}"
        for words in _commands(block.text):
            _check_command(block.place, words)


def _check_settings(block: Block) -> None:
    flags: dict[str, object] = {}

    def flatten(tree: dict[str, object], prefix: str) -> None:
        for key, value in tree.items():
            if isinstance(value, dict):
                flatten(value, f"{prefix}{key}.")
            else:
                flags[prefix + key] = value

    flatten(tomllib.loads(block.text), "")
    load_settings(flags=flags)


def _commands(text: str) -> list[list[str]]:
    """The simple commands of a script, as words."""
    found: list[list[str]] = []
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>()")
        lexer.whitespace_split = True
        try:
            words = list(lexer)
        except ValueError:
            continue  # a quote that goes on in the next line; bash has looked at it
        command: list[str] = []
        for word in [*words, ";"]:
            if set(word) <= set("|&;()"):
                found += [command] if command else []
                command = []
            else:
                command.append(word)
    return found


def _check_command(place: str, words: list[str]) -> None:
    program, *rest = words
    if program == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        for word in rest:
            assert "=" in word or word in targets, f"{place}: the Makefile has no target {word!r}"
    elif program.startswith("tools/") or (rest and rest[0].startswith("tools/")):
        tool = ROOT / (program if program.startswith("tools/") else rest[0])
        assert tool.exists(), f"{place}: {tool} does not exist"
        text = tool.read_text()
        for flag in (word for word in rest if word.startswith("--") and word != "--help"):
            assert f'"{flag}"' in text, f"{place}: {tool.name} has no {flag}"
    elif program in _OURS:
        _check_ours(place, program, rest)


def _check_ours(place: str, program: str, rest: list[str]) -> None:
    if program == "kvbm" and rest[:1] in (["catalog"], ["replay"]):
        program, rest = f"kvbm-{rest[0]}", rest[1:]
    help_text = _help(program, *rest[:1]) if rest and not rest[0].startswith("-") else _help(program)
    if program == "kvbm" and rest[:1] == ["bench"] and len(rest) > 1:
        help_text = _help(program, *rest[:2])
    for at, word in enumerate(rest):
        if word.startswith("--"):
            flag = word.partition("=")[0]
            assert re.search(rf"{flag}\b", help_text), f"{place}: {program} {rest[0]} has no {flag}"
            if flag == "--set":
                key, _, value = (word.partition("=")[2] if "=" in word else rest[at + 1]).partition("=")
                load_settings(flags={key: value})


@functools.cache
def _help(program: str, *rest: str) -> str:
    """What a command of ours says of itself, asked in this process: pages name some hundred."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            code = _OURS[program]([*rest, "--help"])
        except SystemExit as ended:
            code = ended.code
    assert code in (0, None), f"{program} {' '.join(rest)}: there is no such command\n{said.getvalue()}"
    return said.getvalue()
