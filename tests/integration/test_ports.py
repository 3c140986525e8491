"""Ports of tests: nobody is given one that another process of tests has, or that the system gives to whoever asks for
any.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

from tests.servers import free_port

ROOT = Path(__file__).parents[2]
GIVEN = (
    "import json; from tests.servers import free_port; print(json.dumps([free_port() for _ in range(20)]), "
    "flush=True); input()"
)


def test_no_port_is_given_twice_while_whoever_has_it_runs() -> None:
    mine = [free_port() for _ in range(20)]
    command = [sys.executable, "-c", GIVEN]
    others = [
        subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    theirs: list[int] = []
    try:
        for other in others:
            assert other.stdout is not None
            theirs += json.loads(other.stdout.readline())
    finally:
        for other in others:
            other.communicate("\n", timeout=120)
    assert len({*mine, *theirs}) == 60


def test_a_port_that_somebody_listens_on_is_not_given() -> None:
    first = free_port()
    with socket.create_server(("127.0.0.1", first + 1)):
        assert free_port() != first + 1
