"""The process NIXL runs in, as those see it who lend and read: started when it is needed, and anew where it has
died.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress

import msgspec

from kvbm.core.errors import MissingExtraError, NixlError
from kvbm.safe_log import SafeLog
from kvbm.transport import nixl_process
from kvbm.transport.nixl_process import Failed, Join, Joined, Lend, Lent, Message, Ready, find_nixl, receive, send

log = SafeLog()

_END_S = 1.0
_DYING_S = 0.2  # from when its sockets are closed until its status is known
_SILENT_S = 2.0  # who has answered nothing for so long is ended
# UCX speaks on its standard output otherwise, and complains of variables for transports that are not in use.
_QUIET = {"UCX_LOG_LEVEL": "fatal", "UCX_WARN_UNUSED_ENV_VARS": "n", "NIXL_LOG_LEVEL": "FATAL"}


def missing_nixl() -> MissingExtraError | None:
    """What to say where NIXL is not installed; None: it is."""
    return None if find_nixl() else MissingExtraError("NIXL (the Python package nixl-cu12)", "nixl")


class NixlProcess:
    """NIXL in a process of its own: what lends and what reads have one each. Any thread.

    A crash of NIXL or UCX is a failed read here, and no exit code changes. Whoever reaches an agent reaches what that
    process can read: of an owner, HOST's memory, which it cannot write.
    """

    def __init__(self, environment: Mapping[str, str] | None = None, options: Mapping[str, str] | None = None) -> None:
        """Nothing is started yet.

        Args:
            environment: variables that are added, such as UCX_TLS, which says what UCX may use.
            options: of NIXL's UCX backend.
        """
        self._environment, self._options = dict(environment or {}), dict(options or {})
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._is_ready = self._is_closed = False
        self._silent_since_s = 0.0  # when the first of those that were not answered was asked; 0: none was not

    @property
    def is_starting(self) -> bool:
        """Its process is there, and has not said yet whether it can work."""
        return self._control is not None and not self._is_ready

    @property
    def pid(self) -> int:
        """Of the process; 0: there is none now."""
        process = self._process
        return 0 if process is None or process.poll() is not None else process.pid

    def start(self) -> None:
        """Have the process started, without waiting for it.

        Raises: NixlError: it cannot be. MissingExtraError: it is not installed.
        """
        with self._lock:
            try:
                self._begun_locked()
            except OSError as error:
                raise NixlError(f"the process of NIXL cannot be started: {error}") from None

    def lend(self, descriptor: int, size: int, until_s: float) -> tuple[socket.socket, Lent]:
        """Let others read memory, until the socket is closed, or ends because the process did.

        Args:
            descriptor: of the memory, of which so many bytes are lent; it need not be open for writing.
            until_s: of `time.monotonic`.
        Raises: NixlError: NIXL does not, or not in time. MissingExtraError: it is not installed.
        """
        thing, answer = self._begin(Lend(size), descriptor, until_s)
        if not isinstance(answer, Lent):
            thing.close()
            raise NixlError(f"NIXL does not lend {size} bytes: {_words(answer)}")
        return thing, answer

    def join(self, join: Join, descriptor: int, until_s: float) -> socket.socket:
        """Get ready to read into memory: the socket for `Fetch`, whose end means that nobody waits for anything any
        more.

        Args:
            descriptor: of the memory of the lanes. What NIXL still writes there after the socket's end nobody else
                uses.
            until_s: of `time.monotonic`.
        Raises: NixlError: NIXL does not, or not in time. MissingExtraError: it is not installed.
        """
        thing, answer = self._begin(join, descriptor, until_s)
        if not isinstance(answer, Joined):
            thing.close()
            raise NixlError(f"NIXL does not reach the owner: {_words(answer)}")
        return thing

    def end(self, thing: socket.socket) -> None:
        """End what a socket stands for: when this returns it has ended, if need be with the process. Idempotent."""
        if thing.fileno() < 0:
            return
        try:
            thing.settimeout(_END_S)
            thing.shutdown(socket.SHUT_WR)
            while receive(thing) is not None:
                pass
        except ConnectionError:
            pass  # it has ended already, and another process may be there by now
        except (OSError, msgspec.DecodeError):
            with self._lock:
                self._end_locked()
        thing.close()

    def close(self) -> None:
        """End the process, and with it everything in it. Idempotent."""
        self._is_closed = True
        if (process := self._process) is not None:
            process.kill()  # so that nobody waits for it, who has the lock
        with self._lock:
            self._end_locked()

    def disown(self) -> None:
        """This process is a forked child: close what it has inherited, so that NIXL ends with the parent."""
        self._is_closed = True
        control, self._control, self._process = self._control, None, None
        if control is not None:
            control.close()

    def _begin(self, wanted: Lend | Join, descriptor: int, until_s: float) -> tuple[socket.socket, Message | None]:
        try:
            ours, theirs = _pair()
        except OSError as error:
            raise NixlError(f"NIXL cannot be asked: {error}") from None
        try:
            with theirs:
                asked = self._hand(theirs, descriptor, until_s)
            return ours, self._answer(ours, wanted, asked, until_s)
        except BaseException:
            ours.close()
            raise

    def _hand(self, thing: socket.socket, descriptor: int, until_s: float) -> socket.socket:
        """Hand both to the process, which is started anew where it has ended since: the socket to it.

        Raises as `lend`.
        """
        if not self._lock.acquire(timeout=max(0.0, until_s - time.monotonic())):
            raise NixlError("NIXL was being started until the deadline")
        try:
            try:
                return self._handed_locked(thing, descriptor, until_s)
            except OSError:
                self._ended_locked()
            try:
                return self._handed_locked(thing, descriptor, until_s)
            except OSError as error:
                self._ended_locked()
                raise NixlError(f"the process of NIXL has ended: {error}") from None
        finally:
            self._lock.release()

    def _handed_locked(self, thing: socket.socket, descriptor: int, until_s: float) -> socket.socket:
        control = self._started_locked(until_s)
        socket.send_fds(control, [b"\0"], [thing.fileno(), descriptor])
        return control

    def _started_locked(self, until_s: float) -> socket.socket:
        """The socket to the process, which has said that it can work.

        Raises as `lend`; OSError: it has just ended.
        """
        control = self._begun_locked()
        if not self._is_ready:
            try:
                control.settimeout(max(0.001, until_s - time.monotonic()))
                ready = receive(control)
            except TimeoutError:
                raise NixlError("NIXL is being started; it is there in a moment") from None
            except msgspec.DecodeError as error:
                self._end_locked()
                raise NixlError(f"the process of NIXL says what makes no sense: {error}") from None
            if not isinstance(ready, Ready) or ready.trouble:
                self._end_locked()
                raise NixlError(ready.trouble if isinstance(ready, Ready) else "the process of NIXL ended at once")
            self._is_ready = True
        control.settimeout(max(0.001, until_s - time.monotonic()))
        return control

    def _begun_locked(self) -> socket.socket:
        """The socket to the process, which may not be ready yet. Raises NixlError, MissingExtraError, OSError."""
        if self._is_closed:
            raise NixlError("NIXL is closed")
        if self._process is not None and self._process.poll() is not None:
            self._ended_locked()
        if self._control is None:
            if (missing := missing_nixl()) is not None:
                raise missing
            self._start_locked()
        assert self._control is not None
        return self._control

    def _start_locked(self) -> None:
        ours, theirs = _pair()
        command = [sys.executable, "-P", nixl_process.__file__, str(theirs.fileno()), json.dumps(self._options)]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**_QUIET, **os.environ, **self._environment},
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        self._control, self._is_ready = ours, False

    def _answer(
        self, thing: socket.socket, wanted: Lend | Join, asked: socket.socket, until_s: float
    ) -> Message | None:
        """What it says to a wish.

        A process that has said nothing for a while is ended: it may have been stopped, or hang in NIXL.

        Args:
            asked: the socket to the process that has the other end of `thing`.
        """
        asked_s = time.monotonic()
        try:
            thing.settimeout(max(0.001, until_s - asked_s))
            send(thing, wanted)
            answer = receive(thing)
            self._silent_since_s = 0.0
            return answer
        except TimeoutError:
            with self._lock:
                if self._control is asked:  # else another has ended it, and the process there now was not asked
                    self._silent_since_s = self._silent_since_s or asked_s
                    if time.monotonic() - self._silent_since_s < _SILENT_S:
                        raise NixlError("NIXL did not answer by the deadline") from None
                    self._end_locked()
            raise NixlError("NIXL did not answer by the deadline, and is started anew") from None
        except (OSError, msgspec.DecodeError) as error:
            raise NixlError(f"the process of NIXL has ended: {error}") from None

    def _ended_locked(self) -> None:
        """The process has ended by itself, or is about to: say how, and forget it."""
        if (process := self._process) is not None:
            with suppress(subprocess.TimeoutExpired):
                log.warning("nixl.ended", status=process.wait(_DYING_S))
        self._end_locked()

    def _end_locked(self) -> None:
        """End the process, if there is one."""
        process, control = self._process, self._control
        self._process = self._control = None
        self._silent_since_s = 0.0
        if control is not None:
            control.close()
        if process is not None:
            process.kill()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)


def _pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _words(answer: Message | None) -> str:
    return answer.words if isinstance(answer, Failed) else "its process has ended"
