"""What commands show on a real terminal, and what they do not; and scripts that complete their words."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kvbm.catalog_cli import catalog_main, catalog_parser
from kvbm.cli import kvbm_parser, main, replay_main
from kvbm.shells import SHELLS
from tests.captures import make_capture, packed
from tests.eventually import WAIT_S

IN_TURN = """
import sys
import kvbm.progress
from kvbm.cli import replay_main
kvbm.progress._PATIENCE_S = 0.0
for more in sys.argv[2:]:
    assert replay_main(["stat", sys.argv[1], *more.split()]) == 0
    sys.stdout.write("---\\n")
    sys.stderr.write("---")
"""


def on_terminal(program: str, *words: str) -> tuple[str, str]:
    """Standard output, and what came to the terminal that standard error is."""
    ours, its = os.openpty()
    shown: list[bytes] = []

    def read() -> None:
        try:
            while data := os.read(ours, 1 << 16):
                shown.append(data)
        except OSError:  # EIO: the other end is closed
            pass

    reader = threading.Thread(target=read)
    reader.start()
    try:
        ended = subprocess.run(
            [sys.executable, "-c", program, *words],
            stdout=subprocess.PIPE,
            stderr=its,
            stdin=subprocess.DEVNULL,
            timeout=WAIT_S,
            check=True,
            env=os.environ | {"TERM": "xterm-256color", "COLUMNS": "100"},
        )
    finally:
        os.close(its)
        reader.join(WAIT_S)
        os.close(ours)
    return ended.stdout.decode(), b"".join(shown).decode()


@pytest.fixture
def capture(tmp_path: Path) -> str:
    path = tmp_path / "one.kvbm"
    path.write_bytes(packed(make_capture(1).frames()))
    return str(path)


def test_a_bar_is_on_the_terminal_alone_and_not_with_quiet_or_json(
    capture: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said, shown = on_terminal(IN_TURN, capture, "--quiet", "--json", "")
    quiet, as_json, words, _ = said.split("---\n")
    assert quiet == words != "" and as_json.startswith("{")
    assert shown.startswith("------\x1b[") and "one.kvbm" in shown and "\x1b[" not in said
    assert replay_main(["stat", capture]) == 0
    assert tuple(capsys.readouterr()) == (words, "")  # where it is no terminal


STUCK = """
import sys, threading
from kvbm.progress import Watch
import kvbm.progress, rich.progress
kvbm.progress._PATIENCE_S = 0.01
shown, start = threading.Event(), rich.progress.Progress.start
def started(self):
    start(self)
    shown.set()
rich.progress.Progress.start = started
with Watch("one long step"):
    assert shown.wait(60)
with Watch("work that fails") as watch:
    pass
print("the end")
"""


def test_one_long_step_has_a_bar_too_and_leaves_the_terminal_as_it_was() -> None:
    said, bar = on_terminal(STUCK)
    assert said == "the end\n"
    assert "one long step" in bar and bar.count("\x1b[?25l") == bar.count("\x1b[?25h") == 1  # the cursor is back


# Every command that may take over two seconds by itself, and the call of a bar that it rests on. What runs until it is
# stopped (serve, gc --every, bridge, engine, watch) tells by its log, and what prints as it goes has lines.
SLOW = {
    "kvbm doctor": "kvbm/doctor/run.py",
    "kvbm probe": "kvbm/workload/probe.py",
    "kvbm simulate": "kvbm/workload/simulate.py",
    "kvbm-catalog usage": "kvbm/catalog_questions.py",
    "kvbm-catalog gc": "kvbm/assembly/janitor.py",
    "kvbm-catalog erase": "kvbm/assembly/erasure.py",
}
LINES = {"kvbm demo", "kvbm bench"}  # a line for each step
READS = {
    "stat",
    "cat",
    "verify",
    "diff",
    "rebuild",
    "state",
    "export",
    "whatif",
    "sql",
    "why",
    "changes",
    "tenants",
    "history",
    "usage",
}
QUICK = {
    "kvbm": {"settings", "keys", "nats-permissions", "completion"},
    "kvbm-catalog": {"lookup", "route", "hashes", "who", "instances", "tenants", "token", "forget", "completion"},
    "kvbm-replay": {"completion"},
}
UNTIL_STOPPED = {"kvbm bridge", "kvbm engine", "kvbm-catalog serve", "kvbm-catalog watch", "kvbm-replay serve"}


def test_each_command_that_may_take_long_is_known_and_shows_how_far_it_is() -> None:
    from kvbm.replay.cli import replay_parser

    for program, parser in (
        ("kvbm", kvbm_parser()),
        ("kvbm-catalog", catalog_parser()),
        ("kvbm-replay", replay_parser("0")),
    ):
        (commands,) = [one for one in parser._actions if isinstance(one, argparse._SubParsersAction)]
        for name in set(commands.choices) - QUICK[program] - {"catalog", "replay"}:
            whole = f"{program} {name}"
            known = (
                whole in SLOW
                or whole in LINES
                or whole in UNTIL_STOPPED
                or (program == "kvbm-replay" and name in READS)
            )
            assert known, f"{whole}: does it take over 2 s?"
    for name, path in SLOW.items():
        text = (Path(__file__).parents[2] / path).read_text()
        assert re.search(r"\bwith (Watch|Progress)\(", text), f"{name}: {path} has no bar"


WAITS = """
import sys
import kvbm.progress
from kvbm.cli import main
kvbm.progress._PATIENCE_S = 0.0
sys.stdout.write(str(main(sys.argv[1:])))
"""


@pytest.mark.parametrize(
    ("words", "bar", "code"),
    [
        (("probe", "nats://127.0.0.1:1", "--wait", "1"), "waiting for an answer", "1"),
        (("doctor", "--quick", "--set", "nats.enabled=false", "--set", "journal.in_memory=true"), "checks", None),
    ],
)
def test_a_command_that_waits_has_a_bar(words: tuple[str, ...], bar: str, code: str | None) -> None:
    said, shown = on_terminal(WAITS, *words)
    assert bar in shown and (code is None or said == code)
    assert bar not in on_terminal(WAITS, *words, "--quiet")[1]


LOUD = """
import logging
logging.basicConfig(level=logging.INFO, format="[%(levelname)s] %(filename)s %(name)s")  # as a library may
from kvbm.doctor.sql_library import sql_library
sql_library()
logging.getLogger("another").info("it is loud")
"""


def test_the_doctor_shows_no_lines_of_the_database_library() -> None:
    _, shown = on_terminal(LOUD)
    assert "another" in shown and "alembic" not in shown and shown.count("[INFO]") == 1


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("program", [main, catalog_main, replay_main], ids=["kvbm", "kvbm-catalog", "kvbm-replay"])
def test_each_program_prints_a_script_for_each_shell(
    program: object, shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert callable(program) and program(["completion", shell]) == 0
    script = capsys.readouterr().out
    wanted = {main: "doctor", catalog_main: "serve", replay_main: "whatif"}[program]
    assert wanted in script and ("--json" in script or "-l json" in script)
    if shell == "bash" or shutil.which(shell) is not None:
        no_run = "--no-execute" if shell == "fish" else "-n"
        subprocess.run([shell, no_run], input=script, text=True, timeout=WAIT_S, check=True)


@pytest.mark.parametrize(
    ("program", "typed", "offered"),
    [
        (catalog_main, ["kvbm-catalog", "ser"], "serve"),
        (catalog_main, ["kvbm-catalog", "token", "--ro"], "--role"),
        (replay_main, ["kvbm-replay", "verify", "--cat"], "--catalog"),
        (main, ["kvbm", "catalog", "forg"], "forget"),
        (main, ["kvbm", "replay", "export", "--bl"], "--blocks"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_bash_completes_commands_and_options(
    program: object, typed: list[str], offered: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert callable(program) and program(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    (function,) = re.findall(r"^complete .*-F (\S+) ", script, re.MULTILINE)
    words = " ".join(f"'{word}'" for word in typed)
    asked = (
        f'{script}\nCOMP_WORDS=({words}); COMP_CWORD={len(typed) - 1}\n{function}\nprintf "%s\\n" "${{COMPREPLY[@]}}"'
    )
    told = subprocess.run(["bash", "-c", asked], capture_output=True, text=True, timeout=WAIT_S, check=True)
    assert offered in told.stdout.split(), told


@pytest.mark.nightly
def test_a_report_on_standard_output_is_json_alone() -> None:
    words = ["simulate", "--requests", "3", "--instances", "1", "--pools", "hbm=64", "--json"]
    ended = subprocess.run(
        [sys.executable, "-m", "kvbm", *words], capture_output=True, text=True, timeout=2 * WAIT_S, check=True
    )
    assert ended.stdout.startswith("{") and ended.stdout.rstrip().endswith("}") and ended.stderr
