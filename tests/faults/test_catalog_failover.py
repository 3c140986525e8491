"""Two catalogs of one cluster under load, killed in turn: a client that knows both has an answer each time, and the right one.

FAILOVER_KILLS says how often one is killed (default 4).
"""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from kvbm.core.answers import LookupAnswer
from kvbm.core.errors import CatalogError
from kvbm.locate.http import CatalogClient
from kvbm.streams.nats.stream import NatsStream
from tests.nats_fixture import cluster, nats_url  # noqa: F401
from tests.servers import free_port, start_process, stop_process
from tests.snapshot_instances import SPACE, Instance, block_hashes

KILLS = int(os.environ.get("FAILOVER_KILLS", "4"))
ASKERS = 4
DEPTH = 40
READY_WAIT_S = 60.0


class Catalog:
    """One that is started anew on its port."""

    def __init__(self, folder: Path, nats: str, within: str) -> None:
        self.url, self._folder = f"http://127.0.0.1:{free_port()}", folder
        given = {
            "nats.url": nats, "instance.cluster": within, "instance.data_dir": folder / "data",
            "catalog.listen": self.url.removeprefix("http://"), "catalog.checkpoint_every_s": 1,
        }  # fmt: skip
        self._command = [
            sys.executable,
            "-m",
            "kvbm",
            "catalog",
            "serve",
            *(f"--set={k}={v}" for k, v in given.items()),
        ]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._folder.mkdir(exist_ok=True)
        self._process = start_process(self._command, self._folder / "catalog.log")
        with closing(CatalogClient(self.url)) as client:
            client.wait_ready(READY_WAIT_S)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait(10)

    def stop(self) -> None:
        if self._process is not None:
            stop_process(self._process)


class Askers:
    """Threads that ask without pause, and what came of it."""

    def __init__(self, urls: str) -> None:
        self.answers = 0
        self.wrong: list[LookupAnswer] = []
        self.failed: list[str] = []
        self._urls, self._ended = urls, threading.Event()
        self._guard = threading.Lock()

    @contextmanager
    def asking(self) -> Iterator[None]:
        threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(ASKERS)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._ended.set()
            for thread in threads:
                thread.join(60)

    def _ask(self, number: int) -> None:
        hashes = block_hashes(0, DEPTH)
        with closing(CatalogClient(self._urls, timeout_s=4.0)) as client:
            while not self._ended.is_set():
                try:
                    answer = client.lookup(SPACE.id, hashes)
                except CatalogError as error:
                    with self._guard:
                        self.failed.append(str(error))
                    continue
                found = {one.instance: one.depth for one in answer.instances}
                with self._guard:
                    self.answers += 1
                    if found != {"one": DEPTH} and not answer.view_age_s:
                        self.wrong.append(answer)


@contextmanager
def living(url: str, within: str) -> Iterator[None]:
    """An instance that holds the prompt and is heard."""
    ended, ready = threading.Event(), threading.Event()

    async def live() -> None:
        stream = await NatsStream.connect(url)
        one = Instance(stream, within, "one")
        one.create(0, DEPTH)
        await one.snapshot()
        async with one.alive():
            ready.set()
            await asyncio.to_thread(ended.wait)
        await stream.close()

    thread = threading.Thread(target=lambda: asyncio.run(live()))
    thread.start()
    try:
        assert ready.wait(READY_WAIT_S)
        yield
    finally:
        ended.set()
        thread.join(READY_WAIT_S)


def test_no_question_fails_while_one_of_two_catalogs_is_killed(nats_url: str, cluster: str, tmp_path: Path) -> None:  # noqa: F811
    dice = random.Random(1)
    with ExitStack() as opened:
        opened.enter_context(living(nats_url, cluster))
        catalogs = [Catalog(tmp_path / name, nats_url, cluster) for name in ("a", "b")]
        for catalog in catalogs:
            opened.callback(catalog.stop)
            catalog.start()
        askers = Askers(",".join(one.url for one in catalogs))
        with askers.asking():
            for kill in range(KILLS):
                before = askers.answers
                catalogs[kill % 2].kill()
                time.sleep(dice.uniform(0.0, 0.5))
                catalogs[kill % 2].start()
                assert askers.answers > before
    assert askers.failed == []
    assert askers.wrong == []
    print(f"{askers.answers} answers, {KILLS} kills")
