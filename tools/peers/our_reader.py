"""Our side over the wire: from JetStream into the index, as the catalog does it, by what `kvbm bench ingest` measures.

A message is one frame of 256 block events; all of them lie on a nats-server of its own before the clock runs. Reading,
scanning, sequencing, applying and comparing digests is in it, in this one process; the server's own work and SQL are
not.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path

from peers.measure import Service
from peers.ours import Index, OurStreams
from peers.workload import Part, Step, hashes

from kvbm.assembly import NATIVE
from kvbm.bench.ingest import take_in
from kvbm.catalog.follow.sequencer import Sequencer
from kvbm.core.ids import InstanceId
from kvbm.streams.nats.stream import NatsStream
from kvbm.streams.server import shared_server

_CLUSTER = "bench"


class OurReader(Service):
    """A Service over a stream, a sequencer and the index."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="kvbm-bench-")
        self._server = shared_server(Path(self._folder.name))
        self._runner = asyncio.Runner()
        self._stream = self._runner.run(NatsStream.connect(self._server.url, 5.0))
        self._index = Index()
        self._sequencer = Sequencer(self._index.native, NATIVE.scan_frames)
        self._streams = OurStreams()
        self._last = 0
        self.lay_ready([(instance, frame) for instance, frame in enumerate(self._streams.beginnings())])
        self.take_in()

    def mail(self, step: Step) -> list[tuple[int, bytes]]:
        """The frames, and whose they are."""
        return [(step.instance, frame) for frame in self._streams.mail(step, "runs")]

    def lay_ready(self, messages: list[tuple[int, bytes]]) -> None:
        """Publish them, each instance's in order."""
        self._runner.run(self._publish(messages))

    def take_in(self) -> bool:
        """Read them. Raises ValueError: the index and the streams disagree."""
        self._runner.run(take_in(self._stream, _CLUSTER, self._sequencer, self._last))
        counters = self._sequencer.counters
        if counters.digest_mismatches or counters.poison or counters.gaps:
            raise ValueError(f"the index disagrees with the streams: {counters}")
        return True

    def depth(self, chain: Part, instance: int) -> int:
        """Asked of the index."""
        return self._index.query(hashes(chain).tobytes()).get(str(instance), 0)

    def cpu_s(self) -> float:
        """This process's own, which does nothing else meanwhile."""
        return time.process_time()

    def close(self) -> None:
        """End the stream and its server."""
        self._runner.run(self._stream.close())
        self._runner.close()
        self._server.stop()
        self._folder.cleanup()

    async def _publish(self, messages: list[tuple[int, bytes]]) -> None:
        async def one(name: InstanceId, frames: list[bytes]) -> None:
            for frame in frames:
                self._last = max(self._last, await self._stream.publish(_CLUSTER, name, frame))

        by_instance: dict[int, list[bytes]] = {}
        for instance, frame in messages:
            by_instance.setdefault(instance, []).append(frame)
        await asyncio.gather(*(one(InstanceId(str(instance)), frames) for instance, frames in by_instance.items()))
