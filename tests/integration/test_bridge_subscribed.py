"""The bridge and workers of Dynamo's, over a real nats-server."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.bridge_site import Site, site
from tests.dynamo_workers import NAMESPACE, Lookup, Worker, heard, stored, subject
from tests.eventually import eventually
from tests.nats_fixture import cluster, nats_url

__all__ = ["cluster", "nats_url", "site", "subject"]


def test_what_a_worker_of_dynamos_holds_is_found_by_its_own_hashes(site: Site, nats_url: str, subject: str):
    worker, lookup = Worker(nats_url, subject), Lookup(site)
    site.bridge(a=worker.settings)
    heard(lookup, worker, stored(0, 1, 2), {"a": 3})
    worker.publish({"removed": {"block_hashes": [2]}})
    lookup.agrees({"a": 2})
    worker.publish({"removed": {"block_hashes": [1]}}, is_lost=True)
    worker.publish(stored(0))
    lookup.agrees({"a": 1})  # a hole: what was held is certain no more
    worker.publish(stored(0, 1))
    lookup.agrees({"a": 2})
    again = Worker(nats_url, subject)
    again.publish(stored(0))
    lookup.agrees({"a": 1})
    again.publish_bytes(b"\xc1")
    lookup.agrees({})
    again.publish(stored(0, 1))
    lookup.agrees({"a": 2})


def test_a_question_by_tokens_is_refused_for_want_of_the_hash(site: Site, nats_url: str, subject: str):
    worker, lookup = Worker(nats_url, subject), Lookup(site)
    site.bridge(a=worker.settings)
    heard(lookup, worker, stored(0), {"a": 1})
    with pytest.raises(Exception, match="dynamo-xxh3"):
        site.catalog.lookup_tokens(NAMESPACE, b"", list(range(32)))


def test_workers_of_one_subject_are_told_apart_by_their_numbers(site: Site, nats_url: str, subject: str):
    a, b, lookup = Worker(nats_url, subject, 7), Worker(nats_url, subject, 8), Lookup(site)
    site.bridge(a=a.settings | {"worker": 7}, b=b.settings | {"worker": 8})
    heard(lookup, a, stored(0, 1), {"a": 2})
    heard(lookup, b, stored(0), {"a": 2, "b": 1})


RECORDED = json.loads((Path(__file__).parents[1] / "golden" / "dynamo_recorded.json").read_text())


def test_what_dynamos_own_publishers_have_sent_is_found_rank_by_rank(site: Site, nats_url: str, subject: str):
    called, again = (
        [base64.b64decode(step["message"]) for step in RECORDED["runs"][run]] for run in ("called", "started_again")
    )
    worker = Worker(nats_url, subject)
    namespace = msgspec.structs.replace(NAMESPACE, block_tokens=RECORDED["block_tokens"])
    lookup = Lookup(site, RECORDED["tokens_hashes"]["plain"], namespace)
    more = {"block_tokens": RECORDED["block_tokens"], "ranks": 2, "worker": 7587869265905}
    site.bridge(a=worker.settings | more)

    def is_heard() -> bool:
        worker.publish_bytes(called[0])
        return lookup.depths() == {"a-dp0": 3}

    eventually(is_heard, state=lookup.depths)
    worker.publish_bytes(called[1])
    lookup.agrees({"a-dp0": 2})
    worker.publish_bytes(called[2])
    worker.publish_bytes(called[3])
    lookup.agrees({"a-dp0": 3, "a-dp1": 1})
    worker.publish_bytes(called[5])  # called[4] is lost
    lookup.agrees({"a-dp1": 1})
    worker.publish_bytes(again[0])
    lookup.agrees({"a-dp0": 3, "a-dp1": 1})


class Health:
    """Answers 200 while it lives, else 503."""

    def __init__(self) -> None:
        self.lives = True
        health = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200 if health.lives else 503)
                self.end_headers()

            def log_message(self, *args: Any) -> None:
                """Nothing: tests say what is wrong."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/health"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def health() -> Iterator[Health]:
    made = Health()
    yield made
    made.close()


@pytest.mark.parametrize("site", [2.0], indirect=True)
def test_a_worker_that_is_not_well_is_left_out_until_it_is(site: Site, nats_url: str, subject: str, health: Health):
    worker, lookup = Worker(nats_url, subject), Lookup(site)
    site.bridge(a=worker.settings | {"health": health.url})
    heard(lookup, worker, stored(0, 1), {"a": 2})
    health.lives = False
    lookup.agrees({})
    health.lives = True
    lookup.agrees({"a": 2})
