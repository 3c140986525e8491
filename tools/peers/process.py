"""A peer's service as a process of its own, and its HTTP API.

For drivers in the peers' environments: the standard library alone.
"""

from __future__ import annotations

import ctypes
import http.client
import os
import signal
import socket
import subprocess
import sys
import time

_START_S = 60.0
_PR_SET_PDEATHSIG = 1


class Program:
    """A process of its own.

    What it prints goes where this process's stdout goes. It ends with this process, however that ends.
    """

    def __init__(self, command: list[str]) -> None:
        prctl = ctypes.CDLL(None).prctl
        self._process = subprocess.Popen(
            command,
            preexec_fn=lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),  # noqa: PLW1509 - one call, without a lock
        )

    def require_running(self) -> None:
        """Raises ChildProcessError: it has ended."""
        if self._process.poll() is not None:
            raise ChildProcessError(f"Error: the service ended with {self._process.returncode}")

    def cpu_s(self) -> float:
        """CPU seconds it has used, all threads."""
        with open(f"/proc/{self._process.pid}/stat") as stat:
            user, system = stat.read().rsplit(")", 1)[1].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        """End it."""
        self._process.terminate()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Process(Program):
    """A module of this environment, run with arguments, which answers HTTP on a port of 127.0.0.1."""

    def __init__(self, module: str, *arguments: str, port: int) -> None:
        super().__init__([sys.executable, "-m", module, *arguments])
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)

    def wait_until(self, path: str) -> None:
        """Wait until a path answers. Raises OSError: the process ended, or did not answer in time."""
        deadline_s = time.monotonic() + _START_S
        while True:
            self.require_running()
            try:
                self.ask("GET", path)
            except OSError:
                self._connection.close()
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(0.05)
            else:
                return

    def ask(self, method: str, path: str, body: bytes | None = None) -> bytes:
        """One request on the connection that is kept. Raises OSError: the answer is none of success."""
        headers = {} if body is None else {"Content-Type": "application/json"}
        for again in (True, False):
            try:
                self._connection.request(method, path, body, headers)
                response = self._connection.getresponse()
                break
            except (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError):
                self._connection.close()  # an idle connection was closed by the other side
                if not again:
                    raise
        said = response.read()
        if response.status >= 300:
            raise OSError(f"Error: {method} {path}: {response.status} {said[:200]!r}")
        return said

    def close(self) -> None:
        """End it."""
        self._connection.close()
        super().close()


def free_port() -> int:
    """A port of 127.0.0.1 that nobody has."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
