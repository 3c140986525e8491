"""Our catalog as a user starts it, in a process of its own, filled over a nats-server, asked over HTTP.

This process publishes the frames and the heartbeats.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
from peers.measure import Question
from peers.ours import NAMESPACE, OurStreams
from peers.workload import BLOCK_TOKENS, INSTANCES, Part, Step, hashes

from kvbm.core.answers import LookupRequest, RouteRequest
from kvbm.core.errors import KvbmError
from kvbm.core.ids import Epoch, InstanceId, Offset
from kvbm.locate.http import CatalogClient
from kvbm.streams.base import Heartbeat
from kvbm.streams.nats.stream import NatsStream
from kvbm.streams.server import EmbeddedServer
from kvbm.workload.processes import START_WAIT_S, start_catalog_process

_CLUSTER = "local"
_WAIT_S = 120.0
_PULSE_S = 0.5


class OurService:
    """A Served over the catalog."""

    def __init__(self) -> None:
        self._opened = ExitStack()
        folder = Path(self._opened.enter_context(tempfile.TemporaryDirectory(prefix="kvbm-bench-")))
        server = EmbeddedServer.start(folder / "nats")
        self._opened.callback(server.stop)
        child, self._client = start_catalog_process(folder / "catalog", server.url)
        self._opened.callback(child.stop)
        self._opened.callback(self._client.close)
        self._client.wait_ready(START_WAIT_S)
        self._pid = child.process.pid
        self._url, self.port = server.url, int(urlsplit(self._client.url).port or 0)
        self._streams = OurStreams()
        self._ended = threading.Event()
        self._frames = [(instance, frame) for instance, frame in enumerate(self._streams.beginnings())]

    def tell(self, steps: list[Step]) -> None:
        """Publish them, begin the heartbeats, and wait until the catalog has read all."""
        for step in steps:
            self._frames += [(step.instance, frame) for frame in self._streams.mail(step, "runs")]
        told = sum(step.created.count for step in steps if step.created is not None)
        failed: list[Exception] = []
        published = threading.Event()

        def run() -> None:
            try:
                asyncio.run(self._run(published))
            except (KvbmError, OSError) as error:
                failed.append(error)
                published.set()

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        self._opened.callback(thread.join, _WAIT_S)
        self._opened.callback(self._ended.set)
        deadline_s = time.monotonic() + _WAIT_S
        while not published.wait(0.1) or failed or _held(self._client) < told:
            if failed or time.monotonic() > deadline_s:
                raise TimeoutError(f"the catalog has {_held(self._client)} of {told} blocks: {failed}")

    def kinds(self) -> list[str]:
        """Lookups and routes."""
        return ["lookup", "route"]

    def question(self, kind: str, chain: Part) -> Question:
        """One of a prompt, which names as many instances as there are."""
        packed = hashes(chain).tobytes().hex()
        asked: dict[str, Any] = {"namespace": NAMESPACE.id.hex(), "hashes": packed, "limit": INSTANCES}
        if kind == "lookup":
            return Question("/v1/lookup", msgspec.json.encode(LookupRequest(**asked)))
        # A prompt counts as held where it was routed to, soon
        route = RouteRequest(**asked, input_tokens=chain.count * BLOCK_TOKENS)
        checked = msgspec.structs.replace(route, remember=False)
        return Question("/v1/route", msgspec.json.encode(route), msgspec.json.encode(checked))

    def depths(self, kind: str, answer: bytes) -> list[int]:
        """Of each instance."""
        said = msgspec.json.decode(answer)
        found = {one["instance"]: one["depth"] for one in said["instances" if kind == "lookup" else "ranked"]}
        return [found.get(str(instance), 0) for instance in range(INSTANCES)]

    def cpu_s(self) -> float:
        """The catalog's, all threads."""
        user, system = Path(f"/proc/{self._pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        """End it."""
        self._opened.close()

    async def _run(self, published: threading.Event) -> None:
        stream = await NatsStream.connect(self._url, 5.0)
        try:
            ends = self._streams.ends()
            for instance, frame in self._frames:
                await stream.publish(_CLUSTER, InstanceId(str(instance)), frame)
            self._frames.clear()
            published.set()
            while not self._ended.is_set():
                for instance, end in enumerate(ends):
                    await stream.send_pulse(_pulse(InstanceId(str(instance)), end))
                await asyncio.sleep(_PULSE_S)
        finally:
            await stream.close()


def _pulse(name: InstanceId, end: Offset) -> Heartbeat:
    return Heartbeat(
        instance=name,
        cluster=_CLUSTER,
        epoch=Epoch(1),
        published=end,
        applied=end,
        wall_time_ns=time.time_ns(),
        run="bench",
        namespaces=(NAMESPACE.id,),
    )


def _held(client: CatalogClient) -> int:
    return sum(sum(one.held_blocks.values()) for one in client.instances() if one.state == "live")
