"""Runs of plain frames against the sequencer that takes every message by itself: the same stream leaves the same of
both.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from kvbm.catalog.follow.instance_sequence import Changes
from kvbm.catalog.follow.message_applier import MessageApplier
from kvbm.catalog.follow.sequencer import Sequencer
from kvbm.catalog.index.cluster_index import ClusterIndex, PlainApplied
from kvbm.catalog.index.plain_frames import InPlace, InThread, PlainRun, applier_of
from kvbm.core.codec import Frame, encode_frame
from kvbm.core.errors import LayoutError
from kvbm.core.ids import Epoch, InstanceId, Offset, Tier, split_hashes
from kvbm.streams.base import Fence, Heartbeat, StreamMessage, fence_data
from tests.indexes import NATIVE, REFERENCE, Twin, held_of
from tests.ledger_driver import NAMESPACES, Driver, chain, finish_snapshot
from tests.native_threads import no_native_threads

NAMES = [InstanceId(f"i-{number}") for number in range(3)]
KEYS = {(space.id, block) for space in NAMESPACES for prompt in range(6) for block in split_hashes(chain(prompt, 8))}


def commanded(rng: random.Random, driver: Driver) -> None:
    """Give a ledger a few commands, and cut."""
    for _ in range(rng.randint(1, 4)):
        prompt, depth = rng.randrange(6), rng.randint(1, 5)
        driver.run(
            rng.choice(
                [
                    ("prefill", prompt, depth),
                    ("prefill", prompt, depth),
                    ("finish", rng.randrange(9)),
                    ("copy", rng.choice(list(Tier)[:3]), Tier.OBJECT, prompt, depth),
                    ("arrive", rng.randrange(9), rng.randrange(32), rng.random() < 0.5),
                    ("evict", rng.choice(list(Tier)[:3]), prompt, depth),
                    ("missing", prompt),
                    ("found", prompt, depth),
                ]
            )
        )
    if rng.random() < 0.05:
        driver.ledger.begin_snapshot()
        finish_snapshot(driver, 4)
    if rng.random() < 0.02:
        driver.run(("restart",))
    driver.cut()


KINDS = ["twice", "lost", "swapped", "digest", "flip", "foreign", "newer", "fence", "unread", "cut", "late", "empty"]


class Story:
    """A stream of three instances, with what goes wrong on streams: one list of messages for whoever reads it."""

    def __init__(self, seed: int, trouble: float) -> None:
        self.rng = rng = random.Random(seed)
        self.trouble = trouble
        self.kinds = rng.sample(
            KINDS, rng.choice([1, 2, 2, len(KINDS)])
        )  # of trouble; many at once leave nothing plain
        self.messages: list[StreamMessage] = []
        self.drivers = {name: Driver() for name in NAMES}
        self.fences: dict[InstanceId, Fence | None] = dict.fromkeys(NAMES)
        sent = dict.fromkeys(NAMES, 0)
        for _ in range(rng.randint(60, 250)):
            name = rng.choice(NAMES)
            driver = self.drivers[name]
            for _ in range(rng.choice([1, 1, 3])):  # messages of one frame, and of some
                commanded(rng, driver)
            frames = [msgspec.structs.replace(one, instance=name) for one in driver.frames[sent[name] :]]
            sent[name] = len(driver.frames)
            while frames:
                count = rng.randint(1, 3)
                self._send(name, frames[:count], trouble)
                frames = frames[count:]

    def _send(self, name: InstanceId, frames: list[Frame], trouble: float) -> None:
        rng, data = self.rng, b"".join(encode_frame(frame) for frame in frames)
        if rng.random() >= trouble:
            self._put(name, data)
            return
        match rng.choice(self.kinds):
            case "twice":
                self._put(name, data)
                self._put(name, data)
            case "lost":
                pass
            case "swapped":
                self._put(name, data)
                mine = [at for at, message in enumerate(self.messages) if message.subject.endswith(name)][-2:]
                if len(mine) == 2:
                    one, two = (self.messages[at] for at in mine)
                    self.messages[mine[0]] = two._replace(sequence=one.sequence)
                    self.messages[mine[1]] = one._replace(sequence=two.sequence)
            case "digest":
                at = rng.randrange(len(frames))
                frames[at] = msgspec.structs.replace(frames[at], digest=frames[at].digest ^ 1)
                self._put(name, b"".join(encode_frame(frame) for frame in frames))
            case "flip":
                spoilt = bytearray(data)
                spoilt[rng.randrange(len(spoilt))] ^= 1 << rng.randrange(8)
                self._put(name, bytes(spoilt))
            case "foreign":
                self._put(rng.choice(NAMES), data)
            case "newer":
                self._put(name, data[:4] + b"\x63" + data[5:])
            case "fence":
                epoch, run = self.drivers[name].epoch, rng.choice(["first", "second"])
                self._put(name, fence_data(Epoch(epoch), run, ()), kind="fence")
                self.fences[name] = Fence(Epoch(epoch), run, len(self.messages))
                self._put(name, data)
            case "unread":  # events that go on where their instance stands, behind a fence that the stream has lost
                epoch, run = self.drivers[name].epoch, rng.choice(["first", "second"])
                self.fences[name] = Fence(Epoch(epoch), run, len(self.messages) + rng.randrange(2))
                self._put(name, data)
            case "cut":
                self._put(name, data[: rng.randrange(len(data))])
            case "late":  # a repeat of something old
                if self.messages:
                    old = rng.choice(self.messages)
                    self.messages.append(old._replace(sequence=len(self.messages) + 1))
                self._put(name, data)
            case "empty":
                self._put(name, b"")
                self._put(name, data)

    def _put(self, name: InstanceId, data: bytes, kind: str = "events") -> None:
        fence = self.fences[name] if kind == "events" and self.rng.random() < 0.9 else None
        self.messages.append(StreamMessage(len(self.messages) + 1, f"kvbm.v1.{kind}.c.{name}", data, 0, fence))

    def heartbeat(self) -> Heartbeat:
        """What an instance says it has published."""
        name = self.rng.choice(NAMES)
        driver = self.drivers[name]
        published = Offset(self.rng.randint(0, driver.ledger.applied))
        return Heartbeat(instance=name, cluster="c", epoch=driver.epoch, published=published, wall_time_ns=0)


class Read:
    """One way of reading: a sequencer and all that it has changed."""

    def __init__(self, twin: Twin, at_once: bool, applier: Callable[[ClusterIndex], Any] = applier_of) -> None:
        self.sequencer = Sequencer(twin.index(), twin.scan_frames, gap_wait_s=0.0)
        self.plain = 0  # messages that were applied in runs
        self.changes: list[Changes] = []
        self._applier = None
        if at_once:
            taken = self.sequencer.take_plain

            def take_plain(messages: Any, run: PlainRun, applied: PlainApplied) -> Changes:
                self.plain += applied.messages
                return taken(messages, run, applied)

            self.sequencer.take_plain = take_plain  # type: ignore[method-assign]
            self._applier = MessageApplier(
                self.sequencer, asyncio.Lock(), self.changes.append, applier(self.sequencer.index)
            )

    async def read(self, messages: list[StreamMessage], at_end: bool) -> None:
        if self._applier is not None:
            await self._applier.apply(messages, at_end)
            return
        for message in messages:
            self.changes.append(self.sequencer.step(time.monotonic(), [message]))
        self.changes.append(self.sequencer.step(time.monotonic(), [], at_end))

    def close(self) -> None:
        if self._applier is not None:
            self._applier.close()

    def seen(self) -> dict[str, Any]:
        """Everything there is to compare."""
        sequencer, changes = self.sequencer, self.changes
        index = sequencer.index
        return {
            "counters": msgspec.structs.asdict(sequencer.counters),
            "state": sequencer.state(),
            "safe": sequencer.safe_mark(),
            "rows": {name: sequencer.rows(name) for name in sequencer.followed},
            "troubles": {name: trouble.reasons() for name, trouble in sequencer.suspicions.by_instance.items()},
            "views": {name: index.view(name) for name in NAMES},
            "anomalies": index.anomalies(),
            "held": held_of(index, KEYS),
            "claims": [one for change in changes for one in change.claims],
            "epochs": [one for change in changes for one in change.epochs],
            "namespaces": [one for change in changes for one in change.namespaces],
            "gaps": [one for change in changes for one in change.gaps],
            "lacks": any(change.lacks_claims for change in changes),
            "advanced": {name: at for change in changes for name, at in change.advanced.items()},
            "changed": {name: at for change in changes for name, at in change.changed.items()},
        }


async def compare(story: Story) -> int:
    """Read a story in every way, in stretches; how many messages runs had applied."""
    alone = Read(NATIVE, at_once=False)
    others = {
        "in a thread": Read(NATIVE, True),
        "in place": Read(NATIVE, True, InPlace),
        "by the specification": Read(REFERENCE, True),
    }
    at = 0
    try:
        while at < len(story.messages):
            stretch = story.messages[at : at + story.rng.randint(1, 40)]
            at += len(stretch)
            at_end = story.rng.random() < 0.3
            heartbeat = story.heartbeat() if story.trouble and story.rng.random() < 0.3 else None
            for one in (alone, *others.values()):
                if heartbeat is not None:
                    one.sequencer.on_heartbeat(0.0, heartbeat)
                await one.read(stretch, at_end)
            expected = alone.seen()
            for how, one in others.items():
                seen = one.seen()
                for what, value in expected.items():
                    assert seen[what] == value, f"{what}, read {how}, differs at message {at}"
        assert len({one.plain for one in others.values()}) == 1
        return others["in a thread"].plain
    finally:
        for one in others.values():
            one.close()


@pytest.mark.parametrize("trouble", [0.0, 0.05, 0.3])
@pytest.mark.parametrize("first", range(0, 40, 10))
def test_runs_leave_what_single_messages_leave(trouble: float, first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "kvbm.catalog.index.plain_frames.THREAD_BYTES", 1 << 10
    )  # so that short runs go to the thread, too
    plain = messages = 0
    for seed in range(first, first + 10):
        story = Story(seed, trouble)
        plain += asyncio.run(compare(story))
        messages += len(story.messages)
    assert plain > messages * (0.5 if not trouble else 0.05)  # what is compared has happened


def test_a_run_that_ends_in_a_cancelled_task_is_known() -> None:
    story = Story(7, 0.0)
    reader = Read(NATIVE, True)
    thread = applier_of(reader.sequencer.index)

    async def cancelled() -> None:
        first = {name: next(i for i, m in enumerate(story.messages) if m.subject.endswith(name)) for name in NAMES}
        begun = max(first.values()) + 1
        reader.sequencer.step(0.0, story.messages[:begun])
        run = reader.sequencer.plain_run(story.messages, begun)
        assert run.messages
        taken: list[PlainApplied] = []
        task = asyncio.create_task(thread.apply(run._replace(bytes=1 << 20), taken.append))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert taken[0].messages > 0

    asyncio.run(cancelled())
    thread.close()
    thread.close()


def test_a_run_for_which_there_is_no_thread_is_applied_at_once_and_the_next_one_asks_again() -> None:
    story = Story(7, 0.0)
    reader = Read(NATIVE, True)
    applier = applier_of(reader.sequencer.index)
    assert isinstance(applier, InThread)
    first = {name: next(i for i, m in enumerate(story.messages) if m.subject.endswith(name)) for name in NAMES}
    begun = max(first.values()) + 1
    reader.sequencer.step(0.0, story.messages[:begun])
    run = reader.sequencer.plain_run(story.messages, begun)._replace(bytes=1 << 20)
    taken: list[PlainApplied] = []
    with no_native_threads(), capture_logs() as logs:
        for _ in range(2):
            asyncio.run(applier.apply(run._replace(messages=run.messages[:0]), taken.append))
        asyncio.run(applier.apply(run, taken.append))
    assert [one.messages for one in taken[:2]] == [0, 0] and taken[2].messages > 0
    assert [line["event"] for line in logs] == ["catalog.apply_thread_lacking"]
    asyncio.run(applier.apply(run._replace(messages=[]), taken.append))
    assert applier._thread is not None
    applier.close()


def test_the_thread_takes_one_run_at_a_time_and_none_once_closed() -> None:
    thread = NATIVE.index().apply_thread()  # type: ignore[attr-defined]
    with pytest.raises(LayoutError, match="no run was begun"):
        thread.finish()
    thread.begin([], [])
    with pytest.raises(LayoutError, match="under way"):
        thread.begin([], [])
    assert thread.finish() == PlainApplied(0, None, 0, 0, 0, [], [])
    with pytest.raises(LayoutError, match="number of a place"):
        thread.begin([(0, b"")], [])
    thread.close()
    with pytest.raises(LayoutError, match="closed"):
        thread.begin([], [])
