"""Three real nats-servers that keep streams together: JetStream's own cluster, on free ports and fresh stores."""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from pathlib import Path
from typing import Any

from kvbm.streams.nats.setup import PULSE, STREAM
from kvbm.streams.server import EmbeddedServer
from tests.eventually import eventually
from tests.servers import free_port

WAIT_S = 60.0
_POLL_S = 0.05


class NatsCluster:
    """Its servers by name, "n1" to "n3". Each keeps its ports and its store when it is started again.

    Attributes:
        url: all of them, as `nats.url` takes it.
    """

    def __init__(self, folder: Path, names: tuple[str, ...] = ("n1", "n2", "n3")) -> None:
        self.folder = folder
        self.names = names
        self._ports = {name: (free_port(), free_port(), free_port()) for name in names}  # clients, routes, monitoring
        self._servers: dict[str, EmbeddedServer] = {}
        self.url = ",".join(f"nats://127.0.0.1:{self._ports[name][0]}" for name in names)

    def __enter__(self) -> NatsCluster:
        try:
            for name in self.names:
                self.start(name)
            eventually(lambda: self.meta_leader() is not None, "no leader of the cluster")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End all of them."""
        for name in tuple(self._servers):
            self.kill(name)

    def start(self, name: str) -> None:
        """Start one, on what it had."""
        port, _, monitor = self._ports[name]
        routes = [f"nats://127.0.0.1:{self._ports[other][1]}" for other in self.names if other != name]
        settings = f"""\
http: "127.0.0.1:{monitor}"
cluster {{
  name: "kvbm-test"
  listen: "127.0.0.1:{self._ports[name][1]}"
  routes: {json.dumps(routes)}
}}
"""
        self._servers[name] = EmbeddedServer.start(
            self.folder / name, name, port=port, settings=settings, timeout_s=WAIT_S
        )

    def kill(self, name: str, how: int = signal.SIGKILL) -> None:
        """End one: -9, or with SIGTERM as an operator does."""
        server = self._servers.pop(name)
        os.kill(server.pid, how)
        server.stop()

    def freeze(self, name: str) -> None:
        """Stop one in its tracks; its connections stand."""
        os.kill(self._servers[name].pid, signal.SIGSTOP)

    def thaw(self, name: str) -> None:
        """Let it go on."""
        os.kill(self._servers[name].pid, signal.SIGCONT)

    @property
    def running(self) -> list[str]:
        """Those that were started and not killed."""
        return sorted(self._servers)

    def url_of(self, name: str) -> str:
        """One server's URL."""
        return f"nats://127.0.0.1:{self._ports[name][0]}"

    def meta_leader(self) -> str | None:
        """Who leads the cluster, as all that run say; None while they do not agree, or the leader is down."""
        said = {self._told(name).get("meta_cluster", {}).get("leader", "") for name in self.running}
        leader = said.pop() if len(said) == 1 else ""
        return leader if leader in self._servers else None

    def leader(self, stream: str = STREAM) -> str | None:
        """Who leads a stream, by the word of that server itself; None: nobody does."""
        for name in self.running:
            for account in self._told(name).get("account_details", []):
                for found in account.get("stream_detail", []):
                    if found["name"] == stream and found.get("cluster", {}).get("leader") == name:
                        return name
        return None

    def is_whole(self, streams: tuple[str, ...] = (STREAM, PULSE)) -> bool:
        """Whether all run, and each stream's leader says that its replicas are there and have caught up."""
        if self.running != sorted(self.names) or self.meta_leader() is None:
            return False
        return all(self._is_whole(stream) for stream in streams)

    def _is_whole(self, stream: str) -> bool:
        leader = self.leader(stream)
        if leader is None:
            return False
        for account in self._told(leader).get("account_details", []):
            for found in account.get("stream_detail", []):
                if found["name"] == stream:
                    replicas = found.get("cluster", {}).get("replicas") or []
                    return all(one.get("current") and not one.get("offline") for one in replicas)
        return False

    def _told(self, name: str) -> dict[str, Any]:
        url = f"http://127.0.0.1:{self._ports[name][2]}/jsz?streams=true"
        try:
            with urllib.request.urlopen(url, timeout=2.0) as answer:
                found: dict[str, Any] = json.load(answer)
        except (OSError, ValueError):
            return {}
        return found
