"""Lives of one instance on one folder: each a process that opens a manager, holds what it recovered to the journal,
serves, and is killed.

A life is forked, so that hundreds of them take minutes. It says what it has found in lines of JSON on a pipe; who kills
it reads them. The fold it compares with is made from the journal's files by the specification, not by what recovers.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import structlog

from kvbm.assembly import NATIVE, journal_folder, open_manager
from kvbm.bench.measure import resident_bytes
from kvbm.config import Settings, load_settings
from kvbm.core.errors import FrameError
from kvbm.core.fold import Residencies
from kvbm.core.ids import HASH_BYTES, NO_PARENT, Epoch, Namespace, SequenceHash, Tier, split_hashes
from kvbm.manager.owned_hbm import Manager
from kvbm.manager.stats import ManagerStats
from kvbm.pools.base import ReadOutcome
from kvbm.streams.journal.segments import segment_files
from tests.faults.processes.disk_speed import Speed, speed_alone, speed_of_mix
from tests.faults.processes.noise import Noise
from tests.held import slots_of

NAMESPACE = Namespace(model="lives", revision="r1", block_tokens=16)
WAIT_S = 90.0  # only who hangs takes it
_VERIFY_BLOCKS = 64  # read back at a time
_AHEAD_S = 1.0


class Load(NamedTuple):
    """What a life serves.

    Attributes:
        prompts, depth: how many prompts there are, and their blocks.
        skew: how much the first prompts are preferred; 0: all are as likely.
        slots: of HBM, HOST and NVME.
        engines: threads that serve.
        ahead: blocks that may wait for their copies before the engines stop creating others; 0: any number.
        device: of HBM; "memory" or "cpu".
        nvme: further settings of the NVME pool, by name; where it is encrypted, the keys lie in the folder.
    """

    block_bytes: int = 20_000  # with its header no whole number of pages
    prompts: int = 14
    depth: int = 6
    skew: float = 3.0
    slots: tuple[int, int, int] = (24, 12, 40)
    engines: int = 1
    ahead: int = 0
    device: str = "memory"
    nvme: tuple[tuple[str, Any], ...] = ()

    def settings(self, folder: Path) -> Settings:
        """Of a manager on this folder."""
        hbm, host, nvme = self.slots
        flags = {
            "instance.data_dir": str(folder),
            "pools.hbm.slots": hbm,
            "pools.hbm.device": self.device,
            "pools.host.slots": host,
            "pools.nvme.slots": nvme,
            "nats.enabled": False,
            "journal.segment_bytes": 1 << 16,
        }
        if ("encrypt", True) in self.nvme:
            flags["pools.object.keys"] = str(folder / "keys.toml")
        return load_settings(flags=flags | {f"pools.nvme.{name}": value for name, value in self.nvme})

    def hashes(self, prompt: int, depth: int) -> bytes:
        """Packed hashes of a prompt's first blocks. Three prompts each share their first two."""
        names = [(prompt // 3 * 3 if at < 2 else prompt) * self.depth + at for at in range(depth)]
        return b"".join((1 + name).to_bytes(HASH_BYTES, "little") for name in names)

    def noise(self) -> Noise:
        """The bytes these blocks must have."""
        return Noise.of(self.block_bytes, 1 + self.prompts * self.depth)

    def draw(self, rng: random.Random) -> int:
        """The next prompt."""
        if not self.skew:
            return rng.randrange(self.prompts)
        return min(int(rng.expovariate(self.skew / self.prompts)), self.prompts - 1)


SMALL = Load()


class Folded(NamedTuple):
    """What the journal says.

    Attributes:
        epoch: the last one with frames.
        held: NVME's blocks and their slots, as the newest epoch with a completed snapshot says.
        digest: after that epoch's last frame.
    """

    epoch: Epoch
    held: dict[SequenceHash, int | None]
    digest: int


def folded(settings: Settings) -> Folded:
    """The strict fold of every frame that is whole.

    Raises AssertionError, IllegalEventError: the journal contradicts itself.
    """
    epochs: dict[Epoch, Residencies] = {}
    ends: dict[Epoch, int] = {}
    for _, _, path in segment_files(journal_folder(settings)):
        data, at = path.read_bytes(), 0
        while at < len(data):
            try:
                frame, at = NATIVE.decode_frame(data, at)
            except FrameError:
                break  # a torn tail
            fold = epochs.setdefault(frame.epoch, Residencies(strict=True))
            assert frame.first_offset == ends.get(frame.epoch, 0), f"epoch {frame.epoch} has a hole in {path.name}"
            ends[frame.epoch] = frame.next_offset
            for event in frame.events:
                fold.evolve(event)
            assert fold.digest == frame.digest, f"epoch {frame.epoch}: digest before offset {frame.next_offset}"
    for epoch in sorted(epochs, reverse=True):
        fold = epochs[epoch]
        if fold.is_whole(Tier.NVME):
            held = {block: entry.slot for block, entry in fold.held[Tier.NVME].items()}
            return Folded(max(epochs), held, fold.digest)
    return Folded(max(epochs, default=Epoch(0)), {}, 0)


class Life:
    """Inside the process."""

    def __init__(self, folder: Path, load: Load, seed: int, say: int) -> None:
        self._load, self._seed, self._say = load, seed, say
        self._settings = load.settings(folder)
        self._noise = load.noise()
        self._before: ManagerStats | None = None  # it served
        self._serving_from_s = 0.0

    def run(self) -> None:
        """Recover, verify, serve until SIGTERM asks for a clean end or SIGKILL makes one."""
        asked = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: asked.set())
        before = folded(self._settings)
        with open_manager(self._settings, [NAMESPACE], self._load.block_bytes) as manager:
            self._verify(manager, before)
            self._before, self._serving_from_s = manager.stats(), time.monotonic()
            engines = [
                threading.Thread(target=self._serve, args=(manager, n, asked)) for n in range(self._load.engines)
            ]
            for engine in engines:
                engine.start()
            while not asked.wait(0.1):
                self._tell(manager)
            for engine in engines:
                engine.join(WAIT_S)
            assert manager.settle(WAIT_S), "copies do not end"
            self._tell(manager)
            digest = 0
            for tier in (Tier.HBM, Tier.HOST):  # what dies with the process; the digest of the rest is the journal's
                manager.evict(tier, b"".join(manager.held(tier)))
            assert manager.settle(WAIT_S)
            digest = manager.digest()[1]
        assert folded(self._settings).digest == digest, "the journal folds to another digest than the manager's"
        self._line(ended=True, digest=f"{digest:016x}")

    def _verify(self, manager: Manager, before: Folded) -> None:
        """What was recovered is what the journal says, every block of it good, and served at once."""
        blocks = manager.held(Tier.NVME)
        with manager._lock:
            slots = slots_of(manager._ledger, Tier.NVME, blocks)
        assert manager.epoch > before.epoch, f"epoch {manager.epoch} after {before.epoch}"
        assert slots == before.held, f"{len(slots)} blocks recovered, the journal has {len(before.held)}"
        rows = np.empty((_VERIFY_BLOCKS, self._load.block_bytes), dtype=np.uint8)
        entered = list(slots.items())
        for at in range(0, len(entered), _VERIFY_BLOCKS):
            run = entered[at : at + _VERIFY_BLOCKS]
            hashes, places = b"".join(block for block, _ in run), range(len(run))
            nvme = manager.pools.slots[Tier.NVME]
            result = nvme.read([slot for _, slot in run], NAMESPACE.id, hashes, rows, places)
            bad = [outcome.name for outcome in result.outcomes if outcome != ReadOutcome.GOOD]
            assert not bad, f"{len(bad)} of {len(run)} recovered blocks are {bad[0]}"
            self._noise.check(hashes, rows, places, "NVME")
        served = 0
        for prompt in range(self._load.prompts):
            hashes = self._load.hashes(prompt, self._load.depth)
            wanted = 0
            while wanted < self._load.depth and split_hashes(hashes)[wanted] in slots:
                wanted += 1
            prefix = manager.acquire(NAMESPACE.id, hashes, wait_s=WAIT_S)
            self._check(manager, hashes, prefix.slots)
            manager.unpin(prefix.slots)
            assert prefix.depth >= wanted, f"{prefix.depth} of {wanted} recovered blocks were served"
            served += prefix.hits.get(Tier.NVME, 0)
        self._line(epoch=manager.epoch, recovered=len(slots), served=served)

    def _serve(self, manager: Manager, number: int, asked: threading.Event) -> None:
        """One engine: prompts drawn at full speed, every byte checked before and after."""
        load = self._load
        try:
            rng = random.Random(self._seed * 31 + number)
            while not asked.is_set():
                hashes = load.hashes(load.draw(rng), rng.randint(1, load.depth))
                prefix = manager.acquire(NAMESPACE.id, hashes)
                self._check(manager, hashes, prefix.slots)
                slots, depth = prefix.slots, len(hashes) // HASH_BYTES
                self._let_copies_follow(manager)
                fresh = manager.allocate(depth - prefix.depth)
                if fresh:
                    at = prefix.depth * HASH_BYTES
                    self._noise.fill(hashes[at:], self._hbm(manager), fresh)
                    parent = SequenceHash(hashes[at - HASH_BYTES : at]) if at else NO_PARENT
                    slots = slots + manager.create(NAMESPACE.id, parent, prefix.depth, hashes[at:], fresh)
                elif fresh is None:
                    time.sleep(0.0005)  # every slot is in copy
                self._check(manager, hashes, slots)
                manager.unpin(slots)
                dice = rng.random()
                if dice < 0.03:
                    manager.evict(Tier(rng.choice((Tier.HBM, Tier.HOST, Tier.NVME))), hashes)
                elif dice < 0.035:
                    manager.take_snapshot()
        except BaseException:  # noqa: BLE001 - told to the parent, then gone
            self._fail()

    def _let_copies_follow(self, manager: Manager) -> None:
        """An engine computes while its blocks are copied; one that only made more of them would find its own offloads
        skipped.
        """
        until_s = time.monotonic() + _AHEAD_S
        while self._load.ahead and manager._offloader.waiting_blocks > self._load.ahead and time.monotonic() < until_s:
            time.sleep(0.001)

    def _hbm(self, manager: Manager) -> np.ndarray:
        memory = manager.pools.slots[Tier.HBM].memory
        assert memory is not None
        return memory

    def _check(self, manager: Manager, hashes: bytes, slots: Sequence[int]) -> None:
        if slots:
            self._noise.check(hashes[: len(slots) * HASH_BYTES], self._hbm(manager), slots, "HBM")

    def _tell(self, manager: Manager) -> None:
        stats, before = manager.stats(), self._before
        assert before is not None
        assert not stats.corrupt_blocks, f"{stats.corrupt_blocks} blocks were corrupt"
        assert not stats.quarantined_slots, "a pool broke its promise"
        self._line(
            created=stats.created_blocks,
            verified=stats.verified_reads,
            hits=sum(stats.hit_blocks.values()),
            written=stats.offloaded_blocks[Tier.NVME],
            skipped=stats.skipped_offloads,
            late=stats.late_copies,
            failed=stats.failed_copies,
            rss=resident_bytes(),
            serving_s=time.monotonic() - self._serving_from_s,
            serving_reads=stats.verified_reads - before.verified_reads,
            serving_writes=stats.offloaded_blocks[Tier.NVME] - before.offloaded_blocks[Tier.NVME],
        )

    def _line(self, **fields: Any) -> None:
        try:
            os.write(self._say, json.dumps(fields).encode() + b"\n")
        except BrokenPipeError:  # who began it is gone
            os._exit(1)

    def _fail(self) -> NoReturn:
        """Say why, and be gone without another word."""
        self._line(error=traceback.format_exc(limit=-6))
        os._exit(1)


class Begun:
    """A life, as seen by who began it."""

    def __init__(self, folder: Path, load: Load, seed: int) -> None:
        """Fork one."""
        self.lines: list[dict[str, Any]] = []
        self.began_s = time.monotonic()
        read, write = os.pipe()
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(read)
            structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
            life = Life(folder, load, seed, write)
            try:
                life.run()
            except BaseException:  # noqa: BLE001 - told to the parent, then gone
                life._fail()
            os._exit(0)
        os.close(write)
        self._pipe, self._rest = read, b""

    def read(self, timeout_s: float) -> bool:
        """Take what it says within a time; False when it has ended. Raises AssertionError: it found something wrong."""
        if not select.select([self._pipe], [], [], timeout_s)[0]:
            return True
        data = os.read(self._pipe, 1 << 16)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            fields = json.loads(line)
            assert "error" not in fields, fields["error"]
            self.lines.append(fields)
        return bool(data)

    def wait(self, until_s: float, field: str = "") -> bool:
        """Read until a time has come, or it has said something; whether it still lives."""
        while (left_s := until_s - time.monotonic()) > 0 and not (field and self.said(field) is not None):
            if not self.read(left_s):
                return False
        return True

    def wait_at_least(self, field: str, least: int) -> None:
        """Read until it has said so many of something. Raises AssertionError: it has ended, or not within the time."""
        until_s = time.monotonic() + WAIT_S
        while (self.said(field) or 0) < least:
            assert self.read(1.0), f"it has ended at {self.said(field)} {field}"
            assert time.monotonic() < until_s, f"{self.said(field)} {field}, not {least}"

    def said(self, field: str) -> Any:
        """The last it said of something; None where it has not."""
        return next((line[field] for line in reversed(self.lines) if field in line), None)

    def end(self, how: signal.Signals) -> None:
        """Kill it, or ask it to end cleanly; returns when it is gone and has been read.

        Raises AssertionError: see `read`.
        """
        try:
            os.kill(self.pid, how)
            alive = self.wait(time.monotonic() + 2 * WAIT_S, "ended")
            while alive and self.read(WAIT_S):
                pass
        finally:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            os.close(self._pipe)
        assert how == signal.SIGKILL or self.said("ended"), "it did not end cleanly"


class Killed(NamedTuple):
    """What became of an instance that was killed again and again.

    Attributes:
        points: kills.
        opening: of them, those that hit before it had opened and verified everything.
        recovered, served: blocks that came back, and of them those served from NVME; each byte was compared.
        written: blocks that went to NVME.
    """

    points: int
    opening: int
    recovered: int
    served: int
    written: int

    def sentence(self) -> str:
        """In one line."""
        return (
            f"ok: {self.points} kills, {self.opening} of them while it opened; {self.recovered} blocks recovered, "
            f"{self.served} served "
            f"from NVME at once, {self.written} written; 0 wrong bytes, every fold as recovered"
        )


def kill_again_and_again(
    folder: Path, seed: int, points: int, load: Load = SMALL, say: Callable[[int], None] = lambda point: None
) -> Killed:
    """Kill an instance at seeded instants, each time on the same files. The first kill comes once its pool is full.

    Args:
        say: told of each kill.
    Raises: AssertionError: at which point, and what was wrong.
    """
    rng = random.Random(seed)
    opening = recovered = served = written = 0
    for point in range(points):
        life = Begun(folder, load, seed * 1000 + point)
        try:
            if not point:
                life.wait_at_least("written", load.slots[2])
            elif rng.random() < 0.25:
                life.wait(time.monotonic() + rng.uniform(0.002, 0.06))
            else:
                life.wait(time.monotonic() + WAIT_S, "recovered")
                life.wait(time.monotonic() + rng.expovariate(1 / 0.05))
            life.end(signal.SIGKILL)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, after kill {point}: {error}") from None
        say(point)
        opening += life.said("recovered") is None
        recovered += life.said("recovered") or 0
        served += life.said("served") or 0
        written += life.said("written") or 0
    last = Begun(folder, load, seed)
    last.wait(time.monotonic() + WAIT_S, "recovered")
    last.end(signal.SIGTERM)
    return Killed(points, opening, recovered + last.said("recovered"), served + last.said("served"), written)


class Churned(NamedTuple):
    """What became of an instance at full speed, killed and restarted.

    Attributes:
        reached: what NVME read and wrote, all of it compared, while engines were served: not while lives opened and
            ended.
        alone: what the disk does of one kind, one transfer at a time; the better of before and after.
        mix: what it does of both kinds at once, of as many reads among them, as fio finds it on a file of NVME's size:
            before the lives, between two of them, and after; the median of it. None without fio.
        served_share: of the seconds, how many engines were served.
        digest: the manager's at its clean end, and the journal's fold's.
        growth_bytes: by how much the memory of a life grew after its first third, at most.
    """

    seconds: float
    lives: int
    kills: int
    created: int
    hits: int
    verified: int
    written: int
    skipped: int
    late: int
    failed: int
    reached: Speed
    alone: Speed
    mix: Speed | None
    served_share: float
    recovered: int
    served: int
    rss_bytes: int
    growth_bytes: int
    digest: str

    def sentence(self) -> str:
        """In one line."""
        reached, alone = self.reached, self.alone
        fio = (
            ""
            if self.mix is None
            else (
                f", together {reached.both / self.mix.both:.0%} of what fio does in this mix ({_mb(self.mix.reads)} + "
                f"{_mb(self.mix.writes)} MB/s)"
            )
        )
        return (
            f"ok: {self.seconds:.0f} s, {self.lives} lives, {self.kills} kills; {self.created} blocks created, "
            f"{self.hits} hits, "
            f"{self.verified} verified reads of NVME, {self.written} written to it; while served "
            f"({self.served_share:.0%} of the time) "
            f"{_mb(reached.reads)} MB/s read, {_of(reached.reads, alone.reads)}, and {_mb(reached.writes)} MB/s "
            "written, "
            f"{_of(reached.writes, alone.writes)}{fio}; {self.skipped} offloads skipped, {self.late} late, "
            f"{self.failed} failed; "
            f"{self.recovered} recovered, {self.served} of them served at once; 0 wrong bytes, digest {self.digest} as "
            "the journal "
            f"folds; memory {self.rss_bytes >> 20} MiB, grew {self.growth_bytes >> 20} MiB"
        )


def _mb(bytes_s: float) -> str:
    return f"{bytes_s / 1e6:.0f}"


def _of(bytes_s: float, alone_bytes_s: float) -> str:
    """A speed as a share of what the disk does alone."""
    return (
        f"{bytes_s / alone_bytes_s:.0%} of the disk's {_mb(alone_bytes_s)}" if alone_bytes_s else "of an unknown speed"
    )


CHURN = Load(
    block_bytes=1 << 20,
    prompts=240,
    depth=16,
    skew=0.0,
    slots=(384, 192, 1536),
    engines=4,
    ahead=96,
)
FLAT_BYTES = 48 << 20  # what a life may grow by after its first third and still be called flat


def churn(
    folder: Path, seed: int, seconds: float, load: Load = CHURN, life_s: float = 12.0, mix_s: float = 5.0
) -> Churned:
    """Full speed with kills and clean ends at seeded instants.

    Args:
        seconds: of lives; measuring the disk comes on top.
        mix_s: for how long fio shows what the disk does, three times; 0: not asked.
    Raises: AssertionError: what was wrong.
    """
    rng = random.Random(seed)
    load.noise()  # once, for every life
    disk = _Disk(folder, load, mix_s)
    disk.measure([])
    elapsed_s = 0.0
    lives: list[Begun] = []
    kills = 0
    while (left_s := seconds - elapsed_s) > 0 or not lives:
        if left_s < seconds / 2 and len(disk.mixes) == 1:
            disk.measure(lives)
        life = Begun(folder, load, seed * 1000 + len(lives))
        lives.append(life)
        life.wait(time.monotonic() + WAIT_S, "recovered")
        span_s = max(1.0, rng.expovariate(1 / life_s))
        is_last = span_s >= left_s
        life.wait(time.monotonic() + min(span_s, max(left_s, 1.0)))
        is_kill = not is_last and rng.random() < 0.75
        kills += is_kill
        life.end(signal.SIGKILL if is_kill else signal.SIGTERM)
        elapsed_s += time.monotonic() - life.began_s
    last = Begun(folder, load, seed)
    last.wait(time.monotonic() + WAIT_S, "recovered")
    last.end(signal.SIGTERM)
    lives.append(last)
    elapsed_s += time.monotonic() - last.began_s
    disk.measure(lives)
    growth_bytes = max((_growth_bytes(life) for life in lives), default=0)
    assert growth_bytes <= FLAT_BYTES, f"memory grew by {growth_bytes} bytes within one life"
    serving_s = max(_total(lives, "serving_s"), 0.1)
    reads, writes = (_total(lives, field) * load.block_bytes for field in ("serving_reads", "serving_writes"))
    counts = [
        int(_total(lives, field)) for field in ("created", "hits", "verified", "written", "skipped", "late", "failed")
    ]
    return Churned(
        elapsed_s,
        len(lives),
        kills,
        *counts,
        Speed(reads / serving_s, writes / serving_s),
        disk.alone,
        disk.mix,
        serving_s / elapsed_s,
        int(_total(lives, "recovered")),
        int(_total(lives, "served")),
        max(life.said("rss") or 0 for life in lives),
        growth_bytes,
        last.said("digest"),
    )


class _Disk:
    """What the disk did each time it was asked while no life had it.

    Attributes:
        alone: the best of each kind.
        mixes: one a time; None without fio, or where it is not asked.
    """

    def __init__(self, folder: Path, load: Load, mix_s: float) -> None:
        self._folder, self._load, self._mix_s = folder, load, mix_s
        self.alone = Speed(0.0, 0.0)
        self.mixes: list[Speed | None] = []

    def measure(self, lives: list[Begun]) -> None:
        """Ask it for as many reads among its transfers as these lives had."""
        alone = speed_alone(self._folder)
        self.alone = Speed(max(self.alone.reads, alone.reads), max(self.alone.writes, alone.writes))
        reads, writes = _total(lives, "serving_reads"), _total(lives, "serving_writes")
        share = reads / (reads + writes) if reads + writes else 0.5
        file_bytes, block_bytes = self._load.slots[2] * self._load.block_bytes, self._load.block_bytes
        self.mixes.append(
            speed_of_mix(self._folder, file_bytes, block_bytes, share, self._mix_s) if self._mix_s else None
        )

    @property
    def mix(self) -> Speed | None:
        """The median."""
        found = sorted((mix for mix in self.mixes if mix is not None), key=lambda mix: mix.both)
        return found[len(found) // 2] if found else None


def _total(lives: list[Begun], field: str) -> float:
    """Of what each life said last."""
    return sum(life.said(field) or 0 for life in lives)


def _growth_bytes(life: Begun) -> int:
    """By how much a life's memory grew between its second third and its last; 0 for one too short to tell."""
    samples = [line["rss"] for line in life.lines if "rss" in line]
    if len(samples) < 12:
        return 0
    third = len(samples) // 3
    return int(np.median(samples[-third:]) - np.median(samples[third : 2 * third]))
