"""A cluster whose processes are each of one of two versions: catalogs and instances, started, replaced and asked.

Instances are told what to serve, and serve it one prompt after the other, so two clusters that are told the same hold
the same.
"""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from kvbm.core.answers import LookupAnswer, PositionWanted
from kvbm.core.errors import CatalogError
from kvbm.core.hashing import sequence_hashes
from kvbm.core.ids import Namespace
from kvbm.locate.http import CatalogClient
from kvbm.workload.processes import Child, ProcessError, start_http
from tests.eventually import eventually
from tests.servers import free_port
from tests.upgrade_builds import Side

PROMPTS, BLOCK_TOKENS, WAIT_S = 24, 4, 120.0
SERVED_A_ROUND = 6  # by each instance
ENGINE = Path(__file__).parent / "upgrade_engine.py"
SPACE = Namespace(model="upgrade", revision="1", block_tokens=BLOCK_TOKENS)
SLOTS = {"hbm": 12, "host": 16, "nvme": 32}  # less than the prompts have blocks: each tier evicts
Depths = dict[int, dict[str, int]]  # prompt → instance → blocks


def depth_of(prompt: int) -> int:
    """How many blocks a prompt has."""
    return 3 + prompt % 4


def hashes_of(prompt: int) -> bytes:
    """As upgrade_engine.py has them."""
    tokens = range(1000 * prompt, 1000 * prompt + depth_of(prompt) * BLOCK_TOKENS)
    return sequence_hashes(list(tokens), BLOCK_TOKENS, SPACE.root())


class Engine(NamedTuple):
    """An instance that runs. `epoch`: what it began with."""

    child: Child
    side: Side
    epoch: int

    def ask(self, **wanted: Any) -> dict[str, Any]:
        """Tell it a line, and give what it answers. Raises ProcessError: it has died."""
        assert self.child.process.stdin is not None
        try:
            self.child.process.stdin.write(json.dumps(wanted).encode() + b"\n")
            self.child.process.stdin.flush()
        except BrokenPipeError:
            raise self.child.failure("takes nothing") from None
        return answer_of(self.child)


def answer_of(child: Child) -> dict[str, Any]:
    """The next line of a child. Raises ProcessError: it ended instead."""
    assert child.process.stdout is not None
    line = child.process.stdout.readline()
    if not line:
        child.process.wait(WAIT_S)
        raise child.failure("says nothing")
    found: dict[str, Any] = json.loads(line)
    return found


class Cluster:
    """Catalogs and instances of one name on a nats-server.

    Attributes:
        catalogs: by name, a client of each. engines: by name.
    """

    def __init__(self, name: str, nats: str, database: str, folder: Path, opened: ExitStack) -> None:
        self.name, self._nats, self._database, self._folder = name, nats, database, folder / name
        self.catalogs: dict[str, CatalogClient] = {}
        self.engines: dict[str, Engine] = {}
        self._ports: dict[str, int] = {}
        self._children: dict[str, Child] = {}
        self._places: dict[str, dict[str, int]] = {}
        opened.callback(self.close)

    def close(self) -> None:
        """End all of it."""
        for child in (*(engine.child for engine in self.engines.values()), *self._children.values()):
            child.stop()
        for client in self.catalogs.values():
            client.close()

    # -- catalogs -----------------------------------------------------------------------------------------------------

    def url_of(self, name: str) -> str:
        """Where a catalog listens, whichever version it is of."""
        return f"http://127.0.0.1:{self._ports.setdefault(name, free_port())}"

    def catalog_command(self, name: str, side: Side, database: str = "") -> list[str]:
        """What starts a catalog."""
        sets = {
            "instance.cluster": self.name,
            "instance.data_dir": self._folder / name,
            "nats.url": self._nats,
            "nats.timeout_s": WAIT_S,
            "catalog.listen": self.url_of(name).removeprefix("http://"),
            "catalog.database": database or self._database,
            "catalog.liveness_s": WAIT_S,  # none falls silent on a busy machine
        }
        return [side.command("kvbm-catalog"), "serve", *(f"--set={key}={value}" for key, value in sets.items())]

    def start_catalog(self, name: str, side: Side, database: str = "") -> None:
        """Start one, in the place of one of that name that has run, and wait until it answers as a whole."""
        command = self.catalog_command(name, side, database)
        self._children[name] = start_http(name, command, f"{self.url_of(name)}/healthz", self._folder / "logs")
        self.catalogs[name] = CatalogClient(self.url_of(name), WAIT_S)
        self.catalogs[name].wait_ready(WAIT_S)

    def stop_catalog(self, name: str) -> None:
        """End one, as SIGTERM ends it."""
        self.catalogs.pop(name).close()
        self._children.pop(name).stop(WAIT_S)

    # -- instances ----------------------------------------------------------------------------------------------------

    def start_engine(self, name: str, side: Side, frame_version: int, has_variant: bool = False) -> None:
        """Start one on what one of that name has left. Raises ProcessError: it ends, with its words."""
        flags = {
            "instance.id": name,
            "instance.cluster": self.name,
            "instance.data_dir": str(self._folder / name),
            "nats.url": self._nats,
            "nats.timeout_s": WAIT_S,
            "nats.heartbeat_s": 0.2,
            "onboard.wait_s": WAIT_S,
            "snapshots.least_s": 0.1,
            "journal.frame_version": frame_version,
            "pools.hbm.device": "cpu",
            **{f"pools.{tier}.slots": slots for tier, slots in SLOTS.items()},
            **({"variant": True} if has_variant else {}),
        }
        command = [str(side.python), "-P", str(ENGINE), json.dumps(flags)]
        child = Child(name, command, self._folder / "logs", spoken=True)
        try:
            place = answer_of(child)
        except BaseException:
            child.stop()
            raise
        self.engines[name] = Engine(child, side, place["epoch"])

    def stop_engine(self, name: str) -> None:
        """End one cleanly."""
        self.engines.pop(name).child.stop(WAIT_S)

    # -- answers ------------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Wait until all that instances have said is published; answers are to have seen it from now on."""
        self._places = {name: engine.ask(place=True) for name, engine in self.engines.items()}

    def answer(self, catalog: str, prompt: int, unread: Iterable[str] = ()) -> LookupAnswer:
        """What a catalog says of a prompt once it has read all but what these instances said."""
        wanted = [
            PositionWanted(instance=name, epoch=place["epoch"], offset=place["offset"])
            for name, place in self._places.items()
            if name not in set(unread)
        ]
        return self.catalogs[catalog].lookup(SPACE, hashes_of(prompt), at_least=wanted, timeout_s=5.0, limit=100)

    def depths(self, catalog: str, unread: Iterable[str] = ()) -> Depths:
        """How deep each instance has each prompt, as a catalog answers."""

        def asked(prompt: int) -> LookupAnswer:
            found: list[LookupAnswer] = []

            def is_read() -> bool:
                try:
                    found.append(self.answer(catalog, prompt, unread))
                except CatalogError:  # it has not read so far yet
                    return False
                return True

            eventually(is_read, f"{catalog} of {self.name} does not read on", WAIT_S)
            return found[-1]

        return {
            prompt: {one.instance: one.depth for one in asked(prompt).instances if one.depth}
            for prompt in range(PROMPTS)
        }


class Load:
    """Prompts that instances of several clusters serve, each cluster's the same."""

    def __init__(self, clusters: list[Cluster]) -> None:
        self._clusters, self._rounds = clusters, 0
        self.served: set[tuple[str, int]] = set()
        self.computed = 0  # blocks

    @contextmanager
    def under(self, left_out: Iterable[str] = ()) -> Iterator[None]:
        """One round, while the block runs; it ends after both. Raises AssertionError: two clusters differed."""
        self._rounds += 1
        names = [name for name in self._clusters[0].engines if name not in set(left_out)]
        wanted = {name: self._prompts(name) for name in names}
        hits: dict[tuple[str, str], list[int]] = {}
        failed: list[BaseException] = []

        def work(cluster: Cluster, name: str) -> None:
            try:
                hits[cluster.name, name] = [
                    cluster.engines[name].ask(serve=prompt, depth=depth_of(prompt), space=0)["depth"]
                    for prompt in wanted[name]
                ]
            except BaseException as error:  # noqa: BLE001 - told below
                failed.append(error)

        threads = [threading.Thread(target=work, args=(one, name)) for one in self._clusters for name in names]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            for thread in threads:
                thread.join(5 * WAIT_S)
        assert not failed and not any(thread.is_alive() for thread in threads), failed
        for name in names:
            found = {cluster.name: hits[cluster.name, name] for cluster in self._clusters}
            assert len({tuple(each) for each in found.values()}) == 1, f"{name} finds other blocks: {found}"
            self.served |= {(name, prompt) for prompt in wanted[name]}
            self.computed += sum(map(depth_of, wanted[name])) - sum(hits[self._clusters[0].name, name])

    def _prompts(self, name: str) -> list[int]:
        rng = random.Random(f"{name}-{self._rounds}")
        return [rng.randrange(PROMPTS) for _ in range(SERVED_A_ROUND)]


class Asker:
    """A router that asks all the time, with every catalog's address, and notices no replacement of one."""

    def __init__(self, urls: list[str]) -> None:
        self._urls, self._ends = urls, threading.Event()
        self.asked = 0
        self.wrong: list[str] = []
        self.failed: list[str] = []
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Asker:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ends.set()
        self._thread.join(WAIT_S)

    def _run(self) -> None:
        client = CatalogClient(",".join(self._urls), WAIT_S)
        while not self._ends.is_set():
            prompt = self.asked % PROMPTS
            try:
                found = client.lookup(SPACE, hashes_of(prompt), limit=100)
            except CatalogError as error:
                self.failed.append(str(error))
            else:
                deepest = max((one.depth for one in found.instances), default=0)
                if deepest > depth_of(prompt):
                    self.wrong.append(f"{deepest} blocks of prompt {prompt}, which has {depth_of(prompt)}")
            self.asked += 1
            self._ends.wait(0.01)
        client.close()


def refusal(start: Callable[[], object]) -> str:
    """The words of a process that does not start. Raises AssertionError: it does."""
    try:
        start()
    except ProcessError as error:
        return f"{error}\n{_log_of(error)}"
    raise AssertionError("it has started")


def _log_of(error: Exception) -> str:
    path = Path(str(error).rpartition("log: ")[2])
    return path.read_text(errors="replace") if path.is_file() else ""
