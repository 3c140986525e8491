"""What makes a test a unit test: no thread, no process, no connection, no waiting.

What needs one belongs into tests/integration.
"""

from __future__ import annotations

import socket
import subprocess
import threading
import time
from typing import Any, NoReturn

import pytest


@pytest.fixture(autouse=True)
def _core_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for where, name, what in (
        (threading.Thread, "start", "starts a thread"),
        (subprocess.Popen, "__init__", "starts a process"),
        (socket.socket, "bind", "opens a port"),
        (socket.socket, "connect", "opens a connection"),
        (time, "sleep", "sleeps"),
    ):
        monkeypatch.setattr(where, name, _refusing(what))


def _refusing(what: str) -> Any:
    def refuse(*_: object, **__: object) -> NoReturn:
        pytest.fail(f"a test of tests/unit {what}; move it to tests/integration")

    return refuse
