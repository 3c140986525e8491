"""A process beside the catalog, and the socket it is spoken with through."""

from __future__ import annotations

import asyncio
import socket
import subprocess
from collections.abc import Sequence
from contextlib import suppress

from kvbm.catalog.history.wire import MOST_BYTES, PREFIX, packed
from kvbm.catalog.threads import in_thread
from kvbm.core.errors import CatalogError

STOP_WAIT_S = 5.0
_BUFFER_BYTES = 256 << 10


class Beside:
    """A process that was started. One asyncio loop. `start` makes it; `close` ends it.

    Attributes:
        has_spoken: it has sent something; before, it may still be starting.
    """

    def __init__(
        self, process: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process, self._reader, self._writer = process, reader, writer
        self.has_spoken = False

    @classmethod
    async def start(cls, command: Sequence[str]) -> Beside:
        """Start a command, whose standard input and output are the socket.

        Raises: CatalogError: it cannot be started.
        """
        ours, theirs = socket.socketpair()
        try:
            process = await in_thread(_started, command, theirs)
        except OSError as error:
            ours.close()
            raise CatalogError(f"{command[0]} cannot be started ({error.strerror or error})") from None
        except BaseException:
            ours.close()
            raise
        reader, writer = await asyncio.open_connection(sock=ours, limit=_BUFFER_BYTES)
        return cls(process, reader, writer)

    @property
    def number(self) -> int:
        """Of the process."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended yet."""
        return self._process.poll() is None and not self._reader.at_eof()

    async def send(self, kind: int, part: bytes) -> None:
        """Send a part. Raises CatalogError: the process is gone."""
        try:
            self._writer.write(packed(kind, part))
            await self._writer.drain()
        except (OSError, RuntimeError) as error:
            raise CatalogError(self._gone(str(error))) from None

    async def receive(self) -> tuple[int, bytes]:
        """The next part. Raises CatalogError: the process is gone."""
        try:
            size, kind = PREFIX.unpack(await self._reader.readexactly(PREFIX.size))
            if not 1 <= size <= MOST_BYTES:
                raise CatalogError("the process has sent what is none of ours")
            part = await self._reader.readexactly(size - 1)
        except (asyncio.IncompleteReadError, OSError):
            raise CatalogError(self._gone("its socket is closed")) from None
        self.has_spoken = True
        return kind, part

    async def close(self) -> None:
        """End it: first by closing its socket, then by force. Idempotent."""
        self._writer.close()
        with suppress(OSError):
            await self._writer.wait_closed()
        await in_thread(_ended, self._process)

    def kill(self) -> None:
        """End it by force, without waiting; `close` still has to be called."""
        self._process.kill()

    def _gone(self, why: str) -> str:
        code = self._process.poll()
        return f"the process has ended ({why if code is None else f'exit status {code}'})"


def _started(command: Sequence[str], theirs: socket.socket) -> subprocess.Popen[bytes]:
    with theirs:  # closed here: who waits for this may be gone by now
        return subprocess.Popen(command, stdin=theirs.fileno(), stdout=theirs.fileno(), start_new_session=True)


def _ended(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(STOP_WAIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
