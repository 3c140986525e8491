"""What a service tells systemd, or another manager that speaks its protocol (sd_notify(3)): that it is ready, reads its
settings again, stops, and lives. Where nobody listens, nothing is said.
"""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress

_MOST_STATUS = 512
_SEND_S = 1.0


class ServiceManager:
    """The manager that has started this process. One thread.

    Its variables are taken out of the environment, so that no child speaks for this process.

    Attributes:
        watchdog_s: how often it wants a sign of life at least; 0: never.
    """

    def __init__(self) -> None:
        self._address = os.environ.pop("NOTIFY_SOCKET", "")
        for_whom, usec = os.environ.pop("WATCHDOG_PID", ""), os.environ.pop("WATCHDOG_USEC", "")
        is_ours = bool(self._address) and usec.isdecimal() and for_whom in ("", str(os.getpid()))
        self.watchdog_s = int(usec) / 1e6 if is_ours else 0.0
        self._alive_s = float("-inf")  # when the last sign was given

    @property
    def listens(self) -> bool:
        """Whether anybody does."""
        return bool(self._address)

    def starting(self, status: str, more_s: float) -> None:
        """It has not failed to start; give it so many seconds more."""
        self._tell(f"EXTEND_TIMEOUT_USEC={int(more_s * 1e6)}", _status(status))

    def ready(self, status: str) -> None:
        """It serves, or has read its settings again."""
        self._tell("READY=1", _status(status))

    def reloading(self) -> None:
        """It reads its settings again; `ready` follows."""
        self._tell("RELOADING=1", f"MONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}")

    def stopping(self) -> None:
        """It ends."""
        self._tell("STOPPING=1")

    def alive(self) -> None:
        """A sign of life."""
        self._tell("WATCHDOG=1")

    def alive_if_due(self) -> None:
        """A sign of life, three times as often as it is wanted at least; for loops that come by often."""
        now_s = time.monotonic()
        if self.watchdog_s and now_s >= self._alive_s + self.watchdog_s / 3:
            self._alive_s = now_s
            self.alive()

    def _tell(self, *lines: str) -> None:
        if not self._address.startswith(("/", "@")):
            return
        address = f"\0{self._address[1:]}" if self._address.startswith("@") else self._address
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as to:
            to.settimeout(_SEND_S)
            to.sendto("\n".join(lines).encode("utf-8", "backslashreplace"), address)


def _status(text: str) -> str:
    return f"STATUS={' '.join(text.split())[:_MOST_STATUS]}"
