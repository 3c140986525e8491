"""A NATS cluster of three under load, its stream's leader killed again and again: who is back when, and does everybody
agree?
"""

from __future__ import annotations

import bisect
import random
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from kvbm.assembly import open_manager
from kvbm.config import load_settings
from kvbm.core.errors import KvbmError
from kvbm.core.ids import HASH_BYTES, NO_PARENT, Namespace
from kvbm.manager.owned_hbm import Manager
from kvbm.streams.base import Position
from kvbm.workload.processes import start_catalog_process
from tests.eventually import eventually
from tests.faults.processes.nats_cluster import NatsCluster

NAMESPACE = Namespace(model="kills", block_tokens=16)
CLUSTER = "kills"
LIVENESS_S = 2.0
HONEST_S = 2 * LIVENESS_S  # what is older than this must be said to be old, or suspect
AGREE_S = 120.0
BACK_S = 120.0
_SLOTS = 2048
_RUN_BLOCKS = 16
_LOOK_S = 0.05


class Kill(NamedTuple):
    """One leader killed.

    Attributes:
        leader_s: from the kill until there was another leader, of the stream and of the cluster.
        publishers_s, reader_s: from then on until the last instance had something new on the stream, and the catalog
            had read something new of each.
        goodput_s: from then on until events of a second were 80 % of those before the kill; None: not within ten
            seconds.
        oldest_s: the greatest age of the view that an answer told.
        untold: answers that were older than HONEST_S, and said neither so nor that the instance is suspect.
        differences: empty when everybody agreed at the end.
    """

    number: int
    rate: float
    leader_s: float
    publishers_s: float
    reader_s: float
    goodput_s: float | None
    oldest_s: float
    untold: int
    differences: list[str]

    def sentence(self) -> str:
        """In words."""
        goodput = f"{self.goodput_s:.1f} s" if self.goodput_s is not None else "not within 10 s"
        return (
            f"{self.number:3} at {self.rate:g} runs/s: new leader after {self.leader_s:.1f} s; then publishers back in "
            f"{self.publishers_s:.1f} s, reader in {self.reader_s:.1f} s, 80 % of the goodput in {goodput}; oldest "
            "view told "
            f"{self.oldest_s:.1f} s, {self.untold} stale answers untold"
        )


class _Instance:
    """A manager that replaces runs of blocks at a rate, and what it had decided when."""

    def __init__(self, folder: Path, name: str, url: str) -> None:
        flags = {
            "instance.id": name,
            "instance.cluster": CLUSTER,
            "instance.data_dir": str(folder),
            "nats.url": url,
            "nats.replicas": 3,
            "nats.heartbeat_s": 0.5,
            "pools.hbm.device": "memory",
            "pools.hbm.slots": _SLOTS,
            "snapshots.least_s": 2,
        }
        self.manager: Manager = open_manager(load_settings(flags=flags), [NAMESPACE], 16)
        self.name = name
        self.rate = 0.0
        self._dice = random.Random(name)
        self.times: list[float] = []
        self.decided: list[int] = []
        self._ended = threading.Event()
        self._idle = threading.Event()
        self._thread = threading.Thread(target=self._work, name=f"work-{name}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._thread.join(BACK_S)
        self.manager.close()

    def pause(self) -> None:
        """Decide nothing more for now."""
        self._idle.clear()
        self.rate = 0.0
        assert self._idle.wait(BACK_S)

    def decided_at_s(self, offset: int) -> float:
        """When the event at an offset had been decided, at the latest; in the future when it is not yet."""
        at = bisect.bisect_right(self.decided, offset)
        return self.times[at] if at < len(self.times) else float("inf")

    def _work(self) -> None:
        next_s = time.monotonic()
        while not self._ended.is_set():
            rate, now_s = self.rate, time.monotonic()
            if not rate:
                self._idle.set()
                self._ended.wait(0.02)
                next_s = time.monotonic()
                continue
            while next_s <= now_s:
                slots = self.manager.allocate(_RUN_BLOCKS)
                assert slots is not None
                hashes = self._dice.randbytes(_RUN_BLOCKS * HASH_BYTES)
                self.manager.unpin(self.manager.create(NAMESPACE.id, NO_PARENT, 0, hashes, slots))
                next_s += 1 / rate
            self.times.append(time.monotonic())
            self.decided.append(self.manager.applied())
            self._ended.wait(0.005)
            next_s = max(next_s, time.monotonic() - 0.2)


class LeaderKills:
    """The cluster, a catalog process and instances, running. Leave it with `close`."""

    def __init__(self, folder: Path, instances: int = 3) -> None:
        self._opened = ExitStack()
        try:
            self.nats = self._opened.enter_context(NatsCluster(folder / "nats"))
            settings = {
                "instance.cluster": CLUSTER,
                "catalog.liveness_s": LIVENESS_S,
                "nats.replicas": 3,
                "nats.timeout_s": 10,
                "snapshots.least_s": 2,
            }
            catalog, self.client = start_catalog_process(folder / "catalog", self.nats.url, settings)
            self._opened.callback(catalog.stop)
            self._opened.callback(self.client.close)
            self.instances = [_Instance(folder, f"i{number}", self.nats.url) for number in range(instances)]
            for instance in self.instances:
                self._opened.callback(instance.close)
            self.client.wait_ready(BACK_S)
            eventually(self.nats.is_whole, "the cluster is not whole")
        except BaseException:
            self.close()
            raise
        self._log: list[
            tuple[float, dict[str, int], dict[str, int]]
        ] = []  # when; published and read offsets by instance
        self._oldest_s, self._untold = 0.0, 0

    def close(self) -> None:
        """End everything."""
        self._opened.close()

    def kill(self, number: int, rate: float, *, victim: str | None = None) -> Kill:
        """Load, kill the leader (or another server), wait until all are back, start it again, stop the load,
        compare.
        """
        for instance in self.instances:
            instance.rate = rate
        self._log, self._oldest_s, self._untold = [], 0.0, 0
        self._look_for(3.0)
        before = self._goodput(self._log[-1][0])
        victim = victim or eventually(self.nats.leader, "no leader")
        self.nats.kill(victim)
        killed_s = time.monotonic()
        while not (self.nats.leader() and self.nats.meta_leader()):
            self._look()
            assert time.monotonic() < killed_s + BACK_S, "no new leader"
        self._look()
        leader_s, published, read = self._log[-1]
        publishers_s = reader_s = goodput_s = None
        while publishers_s is None or reader_s is None or goodput_s is None:
            self._look()
            now_s, published_now, read_now = self._log[-1]
            since_s = now_s - leader_s
            if publishers_s is None and all(published_now[name] > published[name] for name in published):
                publishers_s = since_s
            if reader_s is None and all(read_now[name] > read[name] for name in read):
                reader_s = since_s
            if goodput_s is None and self._goodput(now_s) >= 0.8 * before:
                goodput_s = since_s
            if since_s > 10 and publishers_s is not None and reader_s is not None:
                break
            assert since_s < BACK_S, f"not back: published {published_now}, read {read_now}"
        self.nats.start(victim)
        eventually(lambda: (self._look(), self.nats.is_whole())[1], "the cluster is not whole")
        for instance in self.instances:
            instance.pause()
        return Kill(
            number,
            rate,
            leader_s - killed_s,
            publishers_s,
            reader_s,
            goodput_s,
            self._oldest_s,
            self._untold,
            self.differences(),
        )

    def differences(self) -> list[str]:
        """What the catalog does not know as the instances have it, once it had time for it. They must be paused."""
        deadline_s = time.monotonic() + AGREE_S
        while True:
            found = [text for instance in self.instances if (text := self._difference(instance))]
            if not found or time.monotonic() >= deadline_s:
                return found
            time.sleep(_LOOK_S)

    def _difference(self, instance: _Instance) -> str:
        manager = instance.manager
        offset, digest = manager.digest()
        published = manager.published()
        if published != Position(manager.epoch, offset):
            return f"{instance.name}: published {published}, decided {manager.epoch}:{offset}: {manager.trouble()}"
        try:
            told = self.client.instance(instance.name)
        except KvbmError as error:
            return f"{instance.name}: {error}"
        wanted = (manager.epoch, offset, f"{digest:016x}", False, "")
        got = None if told is None else (told.epoch, told.offset, told.digest, told.suspect, told.excluded)
        return "" if got == wanted else f"{instance.name}: the catalog has {got}, it has {wanted}"

    def _look_for(self, wait_s: float) -> None:
        until_s = time.monotonic() + wait_s
        while time.monotonic() < until_s:
            self._look()

    def _look(self) -> None:
        """One look at everybody, and whether the catalog's answers say how old they are."""
        time.sleep(_LOOK_S)
        asked_s = time.monotonic()
        published = {one.name: int(one.manager.published().offset) for one in self.instances}
        told = {one.instance: one for one in self.client.instances()}
        age_s = self.client.lookup(NAMESPACE, bytes(HASH_BYTES)).view_age_s
        self._oldest_s = max(self._oldest_s, age_s)
        read = {}
        for instance in self.instances:
            one = told.get(instance.name)
            read[instance.name] = one.offset if one is not None else 0
            if one is not None and not (one.suspect or one.excluded or age_s):
                is_old = asked_s - instance.decided_at_s(one.offset) > HONEST_S
                if is_old:
                    print(f"    UNTOLD {one}", flush=True)
                self._untold += is_old
        self._log.append((asked_s, published, read))

    def _goodput(self, until_s: float) -> float:
        """Events published a second, over the last one before a time."""
        looks = [look for look in self._log if until_s - 1.0 <= look[0] <= until_s]
        if len(looks) < 2 or looks[-1][0] - looks[0][0] < 0.5:
            return 0.0
        (first_s, first, _), (last_s, last, _) = looks[0], looks[-1]
        return (sum(last.values()) - sum(first.values())) / (last_s - first_s)
