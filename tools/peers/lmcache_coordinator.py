"""LMCache's coordinator (`python -m lmcache.v1.mp_coordinator`), fed as its HTTP event source is fed: `POST /events`.

The bodies are encoded before the clock runs and sent by this process one after the other, on one connection that is
kept; a body is one batch of 256 entries, all `store` or all `delete`. In it is what the coordinator does in production:
HTTP, JSON and validation, event gate, all its views. Not in it: a second copy of the events anywhere, it keeps none.
"""

from __future__ import annotations

import json
from importlib.metadata import version

from lmcache.v1.mp_coordinator.schemas import DirectoryLookupRequest
from peers.lmcache_directory import LmcacheDirectory
from peers.measure import Service, serve
from peers.process import Process, free_port
from peers.workload import Part, Step


class LmcacheCoordinator(Service):
    """A Service over the coordinator."""

    def __init__(self) -> None:
        port = free_port()
        self._process = Process("lmcache.v1.mp_coordinator", "--host", "127.0.0.1", "--port", str(port), port=port)
        self._process.wait_until("/healthz")
        self._words = LmcacheDirectory()
        self._ready: list[bytes] = []

    def mail(self, step: Step) -> list[bytes]:
        """A request of what was stored and one of what was deleted."""
        return [request.model_dump_json().encode() for request in self._words.requests(step, "runs")]

    def lay_ready(self, messages: list[bytes]) -> None:
        """Keep them."""
        self._ready = messages

    def take_in(self) -> bool:
        """Send them; each answer says that its batch was applied. Raises ValueError: it was not."""
        for body in self._ready:
            answer = self._process.ask("POST", "/events", body)
            if b'"applied":1' not in answer:
                raise ValueError(f"a batch was not applied: {answer!r}")
        return True

    def depth(self, chain: Part, instance: int) -> int:
        """Asked of /directory/lookup."""
        asked = DirectoryLookupRequest(keys=[key.to_encoded_object_key() for key in self._words.question(chain)])
        results = json.loads(self._process.ask("POST", "/directory/lookup", asked.model_dump_json().encode()))[
            "results"
        ]
        held = [any(place["instance_id"] == str(instance) for place in found["placements"]) for found in results]
        return held.index(False) if False in held else len(held)

    def cpu_s(self) -> float:
        """The coordinator's."""
        return self._process.cpu_s()

    def close(self) -> None:
        """End it."""
        self._process.close()


if __name__ == "__main__":
    serve("LMCache coordinator", version("lmcache"), LmcacheCoordinator)
