"""SIGHUP for commands that run long: "read the settings again", from the first moment of the process on.

Whoever runs a service sends SIGHUP for that. A terminal that closes sends it too; then the command ends, as others do.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

__all__ = ["HANG_UPS", "HangUps", "runs_long"]


class HangUps:
    """The SIGHUPs that have come and that nobody has taken. Main thread.

    Several that come before one is taken are one: what is read then is as the last of them wants it.
    """

    def __init__(self) -> None:
        self._came = False
        self._is_installed = False
        self._had_terminal = False

    @property
    def is_installed(self) -> bool:
        """Whether they are counted here."""
        return self._is_installed

    def install(self) -> None:
        """Count them from now on; not under nohup, which has them ignored, nor where a caller has its own handler."""
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:
            self._had_terminal = _has_terminal()
            self._is_installed = True
            signal.signal(signal.SIGHUP, self._note)

    def resume(self) -> None:
        """Count them again after somebody else has handled the signal, and has left it as it was at first."""
        if self._is_installed:
            signal.signal(signal.SIGHUP, self._note)

    def end_instead(self) -> None:
        """From now on they end the process as Ctrl-C does. Raises KeyboardInterrupt: one has come already."""
        if self._is_installed:
            self._is_installed = False
            signal.signal(signal.SIGHUP, signal.default_int_handler)
            if self.take():
                raise KeyboardInterrupt

    def take(self) -> bool:
        """Whether one has come since the last call."""
        came, self._came = self._came, False
        return came

    def note(self) -> None:
        """One has come: for who handles the signal otherwise."""
        self._came = True

    def terminal_is_gone(self) -> bool:
        """Whether the terminal that the process was started from has been closed."""
        return self._had_terminal and not _has_terminal()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came = True


HANG_UPS = HangUps()


def runs_long(name: str, words: list[str]) -> bool:
    """Whether a command reads its settings again, by the program's name and the words after it."""
    if name == "kvbm":
        if words[:1] != ["catalog"]:
            return words[:1] == ["bridge"]
        words = words[1:]
    return name != "kvbm-replay" and words[:1] in (["serve"], ["gc"])


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True
