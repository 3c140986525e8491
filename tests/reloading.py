"""A nats-server whose configuration changes while it runs."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from kvbm.streams.server import EmbeddedServer
from tests.eventually import eventually

_SAID = "Reloaded server configuration"


class ReloadingServer:
    """A real server on a folder, with further lines of configuration that `reload` replaces.

    Attributes:
        url: where it listens.
    """

    def __init__(self, folder: Path, settings: str) -> None:
        self.folder = folder
        self._settings = settings
        self._server = EmbeddedServer.start(folder, settings=settings)
        self.url = self._server.url

    def reload(self, settings: str) -> None:
        """Replace the lines and have the server read them, as `nats-server --signal reload` does; waits until
        it has.
        """
        config = self.folder / "nats-server.conf"
        text = config.read_text()
        assert self._settings in text
        config.write_text(text.replace(self._settings, settings))
        self._settings = settings
        before = self._count()
        os.kill(self._server.pid, signal.SIGHUP)
        eventually(lambda: self._count() > before, "the server has not reloaded", state=self.log)

    def _count(self) -> int:
        return self.log().count(_SAID)

    def log(self) -> str:
        """What the server has said."""
        return (self.folder / "nats-server.log").read_text()

    def stop(self) -> None:
        """End it."""
        self._server.stop()
