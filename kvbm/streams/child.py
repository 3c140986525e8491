"""Child processes that do not outlive whoever started them, however that one ends."""

from __future__ import annotations

import errno
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import IO

SPAWN_WAIT_S = 15.0

# The kernel signals a child when the *thread* that started it ends, so a thread waits for the child all its life; and
# the request is made by a small program that then becomes the child, because code between fork and exec may deadlock.
_LAUNCHER = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
    if os.getppid() != int(sys.argv[1]):
        sys.exit("the process that started this one has ended")
os.execv(sys.argv[2], sys.argv[2:])
"""


def python(*arguments: str) -> list[str]:
    """The command of a Python that imports nothing from the working directory: who may write there would run code as
    who starts it.

    It takes no more from the environment than this Python does.

    Args:
        arguments: a file; "-m" and a module; or "-c" and a program, for which Python by itself looks into the working
            directory first.
    """
    kept = [name for name, is_set in (("-E", sys.flags.ignore_environment), ("-s", sys.flags.no_user_site)) if is_set]
    return [sys.executable, "-P", *kept, *arguments]


def spawn(
    command: Sequence[str],
    *,
    stdin: int | IO[bytes],
    stdout: int | IO[bytes],
    stderr: int | IO[bytes],
    environment: Mapping[str, str] | None = None,
    pass_fds: Sequence[int] = (),
    umask: int = -1,
) -> tuple[subprocess.Popen[bytes], threading.Thread]:
    """Start a process in a session of its own that is asked to end (SIGTERM) when this process ends in any way.

    Args:
        command: the program's full path first.
        environment: all of its variables; None takes this process's.
        umask: of the child; -1 takes this process's.
    Returns: the process, and the thread that is its parent and waits for it.
    Raises: OSError: it cannot be started.
    """
    launched = [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), *command]
    started: queue.SimpleQueue[subprocess.Popen[bytes] | OSError] = queue.SimpleQueue()

    def keep() -> None:
        try:
            process = subprocess.Popen(
                launched,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                env=environment,
                pass_fds=tuple(pass_fds),
                start_new_session=True,
                umask=umask,
            )
        except OSError as error:
            started.put(error)
            return
        started.put(process)
        process.wait()

    keeper = threading.Thread(target=keep, name="kvbm-child-keeper", daemon=True)
    try:
        keeper.start()
    except RuntimeError as error:
        raise OSError(errno.EAGAIN, f"{command[0]} was not started: {error}") from None
    try:
        process = started.get(timeout=SPAWN_WAIT_S)
    except queue.Empty:
        raise TimeoutError(errno.ETIMEDOUT, f"{command[0]} was not started within {SPAWN_WAIT_S:g} s") from None
    if isinstance(process, OSError):
        raise process
    return process, keeper
