"""The crash loop: faults from one seed, over real processes, and after each the question whether everybody agrees."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import msgspec

from kvbm.replay.findings import MISSING
from kvbm.replay.scan import CORRUPT, NEWER
from kvbm.replay.source import TRUNCATED
from kvbm.streams.base import events_subject
from kvbm.workload.processes import ProcessError
from tests.eventually import eventually
from tests.faults.processes import disk as disks
from tests.faults.processes.checker import ANOMALIES, Checker, run_replay
from tests.faults.processes.injector import inject
from tests.faults.processes.parties import CLUSTER, CatalogParty, NatsParty, Party, PostgresParty, WorkerParty
from tests.faults.processes.proxy import FREE, Proxy, ProxyHub, Rules

HEARTBEAT_S = 0.5
LIVENESS_S = 3.0
WHOLE_S = 90.0  # only a divergence takes it
TAIL_BYTES = 4096
ARCHIVES_EVERY = 5  # faults between two folds of the archives

WORKER_SETTINGS: dict[str, object] = {
    "nats.heartbeat_s": HEARTBEAT_S,
    "nats.timeout_s": 2,
    "snapshots.least_s": 1,
    "pools.hbm.slots": 120,
    "pools.host.slots": 160,
    "pools.nvme.slots": 300,
    "onboard.wait_s": 1,
    "journal.segment_bytes": 64 << 10,
    "journal.capacity_bytes": 4 << 20,
    "journal.waiting_bytes": 1 << 20,
}
CATALOG_SETTINGS: dict[str, object] = {
    "nats.timeout_s": 5,
    "instance.cluster": CLUSTER,
    "catalog.liveness_s": LIVENESS_S,
    "catalog.capacity": 1_000_000,
    "catalog.checkpoint_every_s": 3,
    "snapshots.least_s": 1,
}


class Options(NamedTuple):
    """What a loop is made of.

    Attributes:
        folder: where everything lies; it must not exist.
        rate: prompts a second and worker.
        disk: whether disks that can be full are made.
        slow: factor on what checks may take: a busy machine is no divergence.
    """

    folder: Path
    seed: int
    workers: int = 3
    catalogs: int = 1
    rate: float = 6.0
    disk: bool = True
    slow: float = 1.0


class Fault(NamedTuple):
    """One fault that was inflicted, and what came of it.

    Attributes:
        what: in words, with what dice decided.
        fault_s: how long it was inflicted, until everybody ran again.
        whole_s: from then on until everybody agreed.
        differences: empty when they did.
    """

    number: int
    kind: str
    what: str
    fault_s: float
    whole_s: float
    differences: list[str]


class System:
    """All the processes of a loop, running. Leave it with `close`."""

    def __init__(
        self,
        options: Options,
        worker_settings: dict[str, object] | None = None,
        catalog_settings: dict[str, object] | None = None,
    ) -> None:
        self.options = options
        options.folder.mkdir(parents=True)
        self._opened = ExitStack()
        try:
            self._start(
                {**WORKER_SETTINGS, **(worker_settings or {})}, {**CATALOG_SETTINGS, **(catalog_settings or {})}
            )
        except BaseException:
            self.close()
            raise

    def _start(self, worker_settings: dict[str, object], catalog_settings: dict[str, object]) -> None:
        options = self.options
        self.hub = ProxyHub()
        self._opened.callback(self.hub.close)
        self.nats = NatsParty(options.folder, options.disk)
        self._opened.callback(self.nats.close)
        self.postgres = PostgresParty(options.folder)
        self._opened.callback(self.postgres.close)
        self.postgres.prepare()
        self.nats.start()
        self.postgres.start()
        self.catalogs: list[CatalogParty] = []
        for number in range(options.catalogs):
            catalog = CatalogParty(
                f"catalog{number}", options.folder, self.hub, self.nats, self.postgres, options.disk, catalog_settings
            )
            self._opened.callback(catalog.close)
            self.catalogs.append(catalog)
            catalog.start()
        self._worker_settings = worker_settings
        self.workers: list[WorkerParty] = []
        for number in range(options.workers):
            worker = self.new_worker(f"worker{number}", f"w{number}")
            self.workers.append(worker)
            worker.start()
        self.checker = Checker(self.workers, self.catalogs, self.postgres, options.seed)

    def new_worker(self, name: str, instance: str) -> WorkerParty:
        """Another process with a data folder of its own, not started yet."""
        worker = WorkerParty(
            name,
            instance,
            self.options.folder,
            self.hub,
            self.nats,
            self.options.disk,
            self.options.seed * 1000 + 100 * len(self.workers),
            self.options.rate,
            self._worker_settings,
        )
        self._opened.callback(worker.close)
        return worker

    def parties(self) -> list[Party]:
        """All of them."""
        return [self.nats, self.postgres, *self.catalogs, *self.workers]

    def keep_disks(self) -> None:
        """Copy what would be gone with the disks."""
        for party in self.parties():
            disk = getattr(party, "disk", None)
            if disk is not None and disk.kind == "tmpfs":
                shutil.copytree(
                    disk.folder,
                    self.options.folder / "kept" / party.name,
                    dirs_exist_ok=True,
                    ignore=shutil.ignore_patterns("filler"),
                )

    def close(self) -> None:
        """End every process and every disk."""
        self._opened.close()


class CrashLoop:
    """Inflicts faults on a system, one after the other.

    Args:
        kinds: of faults to draw from; each comes once before one comes again.
        tell: called with each fault that is over.
    """

    def __init__(
        self, system: System, kinds: Sequence[str] = (), tell: Callable[[Fault], None] = lambda fault: None
    ) -> None:
        self._system = system
        self._dice = random.Random(system.options.seed)
        self._kinds = _drawn(system.options.seed, list(kinds) or sorted(KINDS))
        self._tell = tell
        self._twins = 0
        self._log = system.options.folder / "faults.jsonl"

    @staticmethod
    def draw(seed: int, count: int) -> list[str]:
        """The kinds of a seed's first faults."""
        return list(islice(_drawn(seed, sorted(KINDS)), count))

    def run(self, count: int) -> list[Fault]:
        """Inflict so many faults, or as many as it takes until somebody disagrees."""
        done = [self._judge(0, "start", "everything was started", 0.0)]
        for number in range(1, count + 1):
            if done[-1].differences:
                break
            kind = next(self._kinds)
            begin_s = time.monotonic()
            self._system.checker.allowed.clear()
            try:
                what = KINDS[kind](self)
            except (ProcessError, OSError, AssertionError) as error:
                done.append(self._note(Fault(number, kind, "", time.monotonic() - begin_s, 0.0, [f"{error!r}"])))
                break
            done.append(self._judge(number, kind, what, time.monotonic() - begin_s))
        if done[-1].differences:
            self._system.keep_disks()
        return done[1:] if len(done) > 1 else done

    def _judge(self, number: int, kind: str, what: str, fault_s: float) -> Fault:
        died = [
            f"{party.name} has died by itself"
            for party in self._system.parties()
            if party.expected and not party.alive()
        ]
        if died:
            return self._note(Fault(number, kind, what, fault_s, 0.0, died))
        # folding the archives costs the more the longer the run; what a fault adds to their findings is looked for at
        # once
        archives = number % ARCHIVES_EVERY == 0 or bool(self._system.checker.allowed)
        verdict = self._system.checker.check(WHOLE_S * self._system.options.slow, archives)
        return self._note(Fault(number, kind, what, fault_s, verdict.wait_s, verdict.differences))

    def _note(self, fault: Fault) -> Fault:
        with self._log.open("ab") as log:
            log.write(msgspec.json.encode({"at": time.strftime("%H:%M:%S"), **fault._asdict()}) + b"\n")
        self._tell(fault)
        return fault

    # -- what the faults choose from ----------------------------------------------------------------------------------

    def _hold(self, least_s: float = 0.3, most_s: float = 2.5) -> float:
        """Let time pass."""
        hold_s = self._dice.uniform(least_s, most_s)
        time.sleep(hold_s)
        return hold_s

    def _worker(self) -> WorkerParty:
        return self._dice.choice(self._system.workers)

    def _catalog(self) -> CatalogParty:
        return self._dice.choice(self._system.catalogs)

    def _links(self) -> Iterator[tuple[str, Proxy]]:
        for worker in self._system.workers:
            yield f"{worker.name}–nats", worker.to_nats
        for catalog in self._system.catalogs:
            yield f"{catalog.name}–nats", catalog.to_nats
            yield f"{catalog.name}–sql", catalog.to_sql

    def _explain(self, *kinds: str) -> None:
        """The next check's `verify` may find what this fault does to the stream, of which the archive is a copy."""
        for source in ("archive", "stream", "index"):
            self._system.checker.allowed.setdefault(source, set()).update(kinds)

    # -- processes ----------------------------------------------------------------------------------------------------

    def _restart(self, party: Party, between: Callable[[], str] = lambda: "") -> str:
        """kill -9, a pause, what happens to its files meanwhile, and a start."""
        party.kill()
        if self._dice.random() < 0.5:
            self._hold(0.1, LIVENESS_S + 1.5)
        what = between()
        party.start()
        return f"{party.name} killed; {what}" if what else f"{party.name} killed"

    def kill_nats(self) -> str:
        return self._restart(self._system.nats)

    def kill_postgres(self) -> str:
        return self._restart(self._system.postgres)

    def kill_catalog(self) -> str:
        return self._restart(self._catalog())

    def kill_worker(self) -> str:
        worker = self._worker()
        fsync = self._dice.choice(("off", "interval", "always"))
        worker.kill()
        if self._dice.random() < 0.5:
            self._hold(0.1, LIVENESS_S + 1.5)
        worker.start(journal__fsync=fsync)
        return f"{worker.name} killed, started with fsync {fsync}"

    def kill_two(self) -> str:
        first, second = self._dice.sample(self._system.parties(), 2)
        first.kill()
        second.kill()
        self._hold(0.0, 1.5)
        order = {self._system.nats.name: 0, self._system.postgres.name: 1}
        for party in sorted((first, second), key=lambda one: order.get(one.name, 2)):
            party.start()
        return f"{first.name} and {second.name} killed"

    def restart_worker(self) -> str:
        worker = self._worker()
        worker.stop()
        self._hold(0.0, LIVENESS_S + 0.5)
        worker.start()
        return f"{worker.name} stopped and started"

    def restart_catalog(self) -> str:
        catalog = self._catalog()
        catalog.stop()
        self._hold(0.0, 1.0)
        catalog.start()
        return f"{catalog.name} stopped and started"

    def _freeze(self, party: Party) -> str:
        party.freeze()
        try:
            hold_s = self._hold(0.5, LIVENESS_S + 2.5)
        finally:
            party.thaw()
        return f"{party.name} stopped for {hold_s:.1f} s"

    def freeze_nats(self) -> str:
        return self._freeze(self._system.nats)

    def freeze_postgres(self) -> str:
        return self._freeze(self._system.postgres)

    def freeze_catalog(self) -> str:
        return self._freeze(self._catalog())

    def freeze_worker(self) -> str:
        return self._freeze(self._worker())

    def zombie(self) -> str:
        """A process that stands still is replaced by another with its name; then it goes on."""
        old = self._worker()
        old.freeze()
        try:
            self._hold(LIVENESS_S, LIVENESS_S + 1.0)
            new = self._twin(old)
        finally:
            old.thaw()
        return f"{old.name} stood still while {new.name} took its name; then {self._end_one(old, new)}"

    def twin(self) -> str:
        """Two processes with one name, both alive: one is quiet."""
        old = self._worker()
        new = self._twin(old)
        return f"{new.name} took the name of {old.name}, which goes on; then {self._end_one(old, new)}"

    def _twin(self, old: WorkerParty) -> WorkerParty:
        self._twins += 1
        new = self._system.new_worker(f"{old.instance}-twin{self._twins}", old.instance)
        new.start()
        self._hold(0.5, 2.0)
        return new

    def _end_one(self, old: WorkerParty, new: WorkerParty) -> str:
        self._hold(0.5, 2.0)
        gone, stays = (old, new) if self._dice.random() < 0.5 else (new, old)
        gone.kill()
        workers = self._system.workers
        workers[workers.index(old)] = stays
        return f"{gone.name} was killed"

    def lose_journal(self) -> str:
        """An instance comes back with an empty folder."""
        worker = self._worker()

        def wipe() -> str:
            shutil.rmtree(worker.folder / "instances")
            return "its journal and pool were lost"

        return self._restart(worker, wipe)

    # -- the network --------------------------------------------------------------------------------------------------

    def _partition(self, link: tuple[str, Proxy], how: str) -> str:
        name, proxy = link
        ways = self._dice.choice(("up", "down", "both"))
        rules = Rules(stall=how == "stalled", swallow=how == "swallowed")
        if how == "cut":
            proxy.cut()
        else:
            proxy.set(rules if ways != "down" else FREE, rules if ways != "up" else FREE)
        meanwhile = ""
        try:
            hold_s = self._hold(0.3, LIVENESS_S + 3.0)
            if self._dice.random() < 0.3:
                meanwhile = "; meanwhile " + self.kill_worker()
        finally:
            proxy.heal()
        return f"{name} {how} ({ways}) for {hold_s:.1f} s{meanwhile}"

    def cut_link(self) -> str:
        return self._partition(self._dice.choice(list(self._links())), "cut")

    def stall_link(self) -> str:
        return self._partition(self._dice.choice(list(self._links())), "stalled")

    def swallow_link(self) -> str:
        return self._partition(self._dice.choice(list(self._links())), "swallowed")

    def reset_connections(self) -> str:
        """Many short cuts on every link."""
        count = self._dice.randrange(3, 12)
        for _ in range(count):
            proxy = self._dice.choice(list(self._links()))[1]
            proxy.reset()
            self._hold(0.0, 0.3)
        return f"{count} times all connections of a link ended"

    def cut_catalogs_off(self) -> str:
        """Everybody falls silent at once, as the catalogs see it."""
        for catalog in self._system.catalogs:
            catalog.to_nats.cut()
        try:
            hold_s = self._hold(LIVENESS_S, LIVENESS_S + 3.0)
        finally:
            for catalog in self._system.catalogs:
                catalog.to_nats.heal()
        return f"all catalogs cut off from nats for {hold_s:.1f} s"

    def slow_catalog(self) -> str:
        """A consumer that cannot follow."""
        catalog, worker = self._catalog(), self._worker()
        speed = self._dice.choice((3_000, 10_000, 30_000))
        catalog.to_nats.set(down=Rules(bytes_per_s=speed))
        try:
            worker.ask(op="burst", blocks=self._dice.randrange(1000, 6000), wait_s=180.0)
            self._hold(0.5, 3.0)
        finally:
            catalog.to_nats.heal()
        return f"{catalog.name} reads {speed} bytes a second while {worker.name} has a burst"

    def slow_worker(self) -> str:
        worker = self._worker()
        worker.to_nats.set(up=Rules(bytes_per_s=4_000, delay_s=0.02), down=Rules(delay_s=0.1))
        try:
            worker.ask(op="burst", blocks=self._dice.randrange(500, 3000), wait_s=180.0)
            self._hold(0.5, 3.0)
        finally:
            worker.to_nats.heal()
        return f"{worker.name} has a slow way to nats and a burst"

    # -- disks --------------------------------------------------------------------------------------------------------

    def full_worker(self) -> str:
        worker = self._worker()
        if worker.disk is None:
            return "no disk"
        before = worker.ask(op="status")["served"]
        has_burst = self._dice.random() < 0.5
        worker.disk.fill(worker.pid())
        try:
            if has_burst:  # more than the ledger keeps waiting: the epoch ends
                worker.ask(op="burst", blocks=self._dice.randrange(10_000, 40_000), wait_s=180.0)
            hold_s = self._hold(2.0, 6.0)
            served = eventually(
                lambda: worker.ask(op="status")["served"] - before,
                f"{worker.name} serves nothing while its disk is full",
            )
            restarted = self._dice.random() < 0.2
            if restarted:
                worker.kill()
        finally:
            if worker.alive():
                worker.disk.free(worker.pid())
        if restarted:
            worker.disk.free(0)
            worker.start()
        return (
            f"disk of {worker.name} full for {hold_s:.1f} s, {served} prompts served meanwhile, burst: "
            f"{has_burst}, "
            f"killed: {restarted}"
        )

    def full_journal(self) -> str:
        """More events than the journal may keep while the stream takes none: an epoch ends, and another begins by
        itself.
        """
        worker = self._worker()
        worker.to_nats.cut()
        try:
            worker.ask(op="burst", blocks=self._dice.randrange(60_000, 100_000), wait_s=300.0)
            self._hold(0.0, 1.0)
        finally:
            worker.to_nats.heal()
        return f"{worker.name} cut off from nats with more events than its journal may keep"

    def full_nats(self) -> str:
        nats = self._system.nats
        if nats.disk is None:
            return "no disk"
        nats.disk.fill(nats.pid())
        hold_s = self._hold(1.0, 4.0)
        nats.kill()  # nats-server ends JetStream when its disk is full, and only a restart brings it back
        nats.disk.free(0)
        nats.start()
        return f"disk of nats full for {hold_s:.1f} s, then it was killed and started"

    def full_catalog(self) -> str:
        catalog = self._catalog()
        if catalog.disk is None:
            return "no disk"
        catalog.disk.fill(catalog.pid())
        try:
            hold_s = self._hold(1.0, 5.0)
        finally:
            catalog.disk.free(catalog.pid())
        return f"disk of {catalog.name} full for {hold_s:.1f} s"

    def full_everywhere(self) -> str:
        """A process that can write to no file at all, its log and its pool included."""
        party = self._dice.choice([*self._system.catalogs, *self._system.workers])
        disks.forbid_writes(party.pid())
        try:
            hold_s = self._hold(1.0, 4.0)
        finally:
            disks.allow_writes(party.pid())
        return f"{party.name} could write no file for {hold_s:.1f} s"

    def damage_journal(self) -> str:
        worker = self._worker()
        unpublished = self._dice.random() < 0.5
        if unpublished:
            worker.to_nats.cut()
            self._hold(0.3, 1.5)

        def damage() -> str:
            worker.to_nats.heal()
            segment = disks.newest(worker.journal, "*.kvbj")
            if segment is None:
                return "no journal"
            if self._dice.random() < 0.5:
                return disks.tear(segment, self._dice, TAIL_BYTES)
            return disks.flip_bits(segment, self._dice, 1, TAIL_BYTES)

        return f"{self._restart(worker, damage)}; unpublished events: {unpublished}"

    def damage_pool(self) -> str:
        worker = self._worker()

        def damage() -> str:
            if self._dice.random() < 0.5:
                return disks.scribble(worker.pool_file, self._dice, 40)
            return disks.flip_bits(worker.pool_file, self._dice, 60)

        return self._restart(worker, damage)

    def damage_checkpoint(self) -> str:
        catalog = self._catalog()

        def damage() -> str:
            kind = self._dice.choice(("*.index", "*.json"))
            file = disks.newest(catalog.folder / "checkpoints", kind)
            if file is None:
                return "no checkpoint"
            how = disks.tear if self._dice.random() < 0.3 else disks.flip_bits
            return how(file, self._dice, 3)

        return self._restart(catalog, damage)

    def damage_store(self) -> str:
        """Bits flipped in what the server keeps, or its end torn off. Messages are then hidden, or gone."""
        nats = self._system.nats
        behind = self._dice.random() < 0.6
        if behind:  # what nobody has read yet is what hurts
            for catalog in self._system.catalogs:
                catalog.to_nats.cut()
            self._hold(0.5, 1.5)
        nats.kill()
        file = disks.newest(nats.folder / "jetstream", "KVBM/msgs/*.blk")
        what = "no block"
        if file is not None:
            torn = self._dice.random() < 0.4
            what = (
                disks.tear(file, self._dice, TAIL_BYTES)
                if torn
                else disks.flip_bits(file, self._dice, 2, 16 * TAIL_BYTES)
            )
        self._explain(
            MISSING, CORRUPT, NEWER, TRUNCATED
        )  # what is hidden is in no archive; old poison may be read anew
        self._explain(ANOMALIES)
        nats.start()
        for catalog in self._system.catalogs:
            catalog.to_nats.heal()
        if self._dice.random() < 0.3:
            what += "; " + self._restart(self._catalog())
        self._system.checker.wants_snapshots = True
        return f"nats killed; {what}; catalogs behind: {behind}"

    # -- clocks -------------------------------------------------------------------------------------------------------

    def step_worker_clock(self) -> str:
        worker, offset_s = self._worker(), self._step()
        worker.ask(op="clock", offset_s=offset_s)
        self._hold()
        return f"wall clock of {worker.name} {offset_s:+.0f} s"

    def step_catalog_clock(self) -> str:
        catalog, offset_s = self._catalog(), self._step()
        catalog.step_clock(offset_s)
        self._hold()
        return f"wall clock of {catalog.name} {offset_s:+.0f} s"

    def _step(self) -> float:
        return self._dice.choice((0.0, -0.5, 5.0, -5.0, 120.0, -120.0, 86_400.0, -86_400.0, 40_000_000.0))

    # -- messages -----------------------------------------------------------------------------------------------------

    def _inject(self, kind: str) -> str:
        """Send them, and often make somebody look at them who has not seen them pass."""
        subjects = [events_subject(CLUSTER, worker.instance) for worker in self._system.workers]
        worker = self._worker()
        is_quiet = self._dice.random() < 0.5  # then they stay the last of their subjects
        if is_quiet:
            worker.ask(op="pause")
        what = inject(self._system.nats.url, kind, self._dice, subjects)
        match self._dice.randrange(4):
            case 0:
                worker.to_nats.reset()
                after = f"{worker.name} connected anew"
            case 1:
                after = self._restart(worker)
            case 2:
                after = self._restart(self._catalog())
            case _:
                after = "nobody looked"
        self._hold(0.1, 1.0)
        return f"{what}; {after}"

    def repeat_messages(self) -> str:
        return self._inject("repeat")

    def late_messages(self) -> str:
        return self._inject("late")

    def reorder_messages(self) -> str:
        return self._inject("reorder")

    def foreign_messages(self) -> str:
        return self._inject("foreign")

    def poison_messages(self) -> str:
        self._explain(CORRUPT, NEWER, TRUNCATED)
        return self._inject("poison")


def _drawn(seed: int, kinds: Sequence[str]) -> Iterator[str]:
    """Kinds for ever, each once before one comes again."""
    dice = random.Random(f"kinds {seed}")
    while True:
        yield from dice.sample(kinds, len(kinds))


def _kinds() -> dict[str, Callable[[CrashLoop], str]]:
    """Every fault by its name: the loop's public methods."""
    return {
        name: method
        for name, method in vars(CrashLoop).items()
        if callable(method) and not name.startswith("_") and name not in ("run", "draw")
    }


KINDS = _kinds()


def ends_with_us() -> None:
    """SIGTERM and SIGHUP end a program as Ctrl-C does, so that nothing it has started stays."""

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    for which in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(which, stop)


def archive_verdicts(system: System) -> Iterator[tuple[str, list[str]]]:
    """What `kvbm-replay verify` says of each archive, in one line; and what of it the loop has not done itself."""
    for catalog in system.catalogs:
        if catalog.archive.exists():
            system.checker.allowed.clear()
            code, _, words = run_replay("verify", str(catalog.archive))
            line = next((line for line in words.splitlines() if line.startswith(("verified", "FAILED"))), words.strip())
            unexplained = system.checker.verify(catalog.archive, "archive")
            name = os.path.relpath(catalog.archive, system.options.folder)
            yield f"kvbm-replay verify {name}: {line} (exit {code}; {len(unexplained)} unexplained)", unexplained
