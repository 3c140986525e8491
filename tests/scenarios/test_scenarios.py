"""Text scenarios of the ledger: commands behind "> ", the results (=) and the events (offset) they cause below.

`pytest tests/scenarios --rewrite` writes what happens now into the files; review the diff like code.

    > pools HBM=4 HOST=4 NVME=4 OBJECT     begins epoch 1 with these pools;  > pools s3fifo HBM=4  evicts by another policy
    > prefill A 3 [as r]                   match, pin, allocate, create three blocks of prompt A; r names its pinned slots
    > finish r                             unpin
    > copy 1 HBM HOST A 3                  begin copy 1 of three blocks;  > arrive 1 [mask] [moved] [pinned]  ends it
    > keep HBM A 3 10 [50]                 keep three blocks until second 10, priority 0 or as given;  > expire 10
    > allocate HBM 2 / release HBM 0 1 / evict HOST A 2 / missing A 1 / match A 3 / counts HBM
    > round / step 2                       begin a round / state a run of at most two blocks
    > stop / restart 2                     end the stream / begin epoch 2 in place
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from kvbm.core.codec import decode_frame
from kvbm.core.errors import KvbmError
from kvbm.core.events import (
    BlocksCreated,
    BlocksEvicted,
    BlocksMigrated,
    Event,
    EvictReason,
    MigrateCause,
    PoolStated,
    ResidenciesStated,
    RoundEnded,
)
from kvbm.core.ids import (
    HASH_BYTES,
    NO_PARENT,
    SLOT_BYTES,
    Epoch,
    InstanceId,
    Namespace,
    Reach,
    SequenceHash,
    Tier,
    pack_slots,
    split_hashes,
    split_slots,
)
from kvbm.core.ledger import Copy, Ledger
from kvbm.core.policy import EVICTION_POLICIES

FOLDER = Path(__file__).parent
NAMESPACE = Namespace(model="scenario", block_tokens=16)


class Scenario:
    """Runs the commands of one file and says what happens."""

    def __init__(self) -> None:
        self.ledger = Ledger([])
        self.names: dict[bytes, str] = {NO_PARENT: "-"}
        self.copies: dict[str, Copy] = {}
        self.pinned: dict[str, bytes] = {}

    def chain(self, prompt: str, depth: int) -> bytes:
        """Blocks of a prompt; each prompt letter is its own chain."""
        blocks = []
        for position in range(depth):
            block = hashlib.sha256(f"{prompt}{position}".encode()).digest()[:HASH_BYTES]
            self.names[block] = f"{prompt}{position}"
            blocks.append(block)
        return b"".join(blocks)

    def run(self, line: str) -> list[str]:
        """One command: its result, then its events."""
        name, *words = line.split()
        try:
            result = getattr(self, f"do_{name}")(*words)
        except KvbmError as error:
            result = f"error {error}"
        lines = [f"= {result}"] if result else []
        for taken in self.ledger.take_frames(InstanceId("scenario"), 0):
            frame, _ = decode_frame(taken.data)
            for offset, event in enumerate(frame.events, frame.first_offset):
                lines.append(f"{offset} {self.words(event)}")
        return lines

    def words(self, event: Event) -> str:
        name = type(event).__name__
        match event:
            case BlocksCreated():
                place = f"{event.tier.name} from {event.start} after {self.names[event.parent]}"
                return f"{name} {place}: {self.run_words(event.hashes, event.slots)}"
            case BlocksMigrated():
                source = event.source.name if isinstance(event.source, Tier) else event.source
                how = f"{event.cause.name.lower()}, {'kept' if event.kept else 'moved'}"
                return f"{name} {source} to {event.target.name} ({how}): {self.run_words(event.hashes, event.slots)}"
            case BlocksEvicted():
                return f"{name} {event.tier.name} ({event.reason.name.lower()}): {self.run_words(event.hashes, b'')}"
            case ResidenciesStated():
                return f"{name} {event.tier.name} round {event.round}: {self.run_words(event.hashes, event.slots)}"
            case RoundEnded():
                return f"{name} {event.tier.name} round {event.round}: {event.count} stated"
            case _:
                return name

    def run_words(self, hashes: bytes, slots: bytes) -> str:
        blocks = [self.names[block] for block in split_hashes(hashes)]
        numbers = split_slots(slots)
        return (
            " ".join(f"{block}@{slot}" for block, slot in zip(blocks, numbers, strict=True))
            if numbers
            else " ".join(blocks)
        )

    def do_pools(self, *words: str) -> None:
        stated = []
        eviction = words[0] if words[0] in EVICTION_POLICIES else "lru"
        for pool in words[1:] if words[0] == eviction else words:
            tier, _, slots = pool.partition("=")
            reach = Reach.INSTANCE if slots else Reach.CLUSTER
            stated.append(PoolStated(Tier[tier], int(slots or 0), 64, reach, "" if slots else "s3://scenario"))
        self.ledger = Ledger(stated, eviction)
        self.ledger.start(Epoch(1), [NAMESPACE])

    def do_prefill(self, prompt: str, depth: str, _as: str = "", name: str = "") -> str:
        hashes = self.chain(prompt, int(depth))
        match = self.ledger.match(hashes)
        held = next((i for i, tier in enumerate(match.tiers) if tier != Tier.HBM), match.depth)
        slots = match.slots[: held * SLOT_BYTES]
        self.ledger.pin(Tier.HBM, slots)
        allocation = self.ledger.allocate(Tier.HBM, int(depth) - held)
        if allocation is None:
            self.ledger.unpin(Tier.HBM, slots)
            return "short"
        parent = SequenceHash(hashes[(held - 1) * HASH_BYTES : held * HASH_BYTES]) if held else NO_PARENT
        rest = hashes[held * HASH_BYTES :]
        slots = slots + self.ledger.create(NAMESPACE.id, Tier.HBM, parent, held, rest, allocation.slots)
        self.pinned[name] = slots
        if not name:
            self.ledger.unpin(Tier.HBM, slots)
        return f"{held} held, slots {split_slots(slots)}"

    def do_finish(self, name: str) -> None:
        self.ledger.unpin(Tier.HBM, self.pinned.pop(name))

    def do_match(self, prompt: str, depth: str) -> str:
        match = self.ledger.match(self.chain(prompt, int(depth)))
        places = zip(match.tiers, split_slots(match.slots), strict=True)
        return " ".join(f"{Tier(tier).name}@{slot}" for tier, slot in places) or "nothing"

    def do_allocate(self, tier: str, count: str) -> str:
        allocation = self.ledger.allocate(Tier[tier], int(count))
        if allocation is None:
            return "short"
        return f"slots {split_slots(allocation.slots)}, written after offset {allocation.after}"

    def do_release(self, tier: str, *slots: str) -> None:
        self.ledger.release(Tier[tier], pack_slots(int(slot) for slot in slots))

    def do_copy(self, name: str, source: str, target: str, prompt: str, depth: str) -> str:
        copy = self.ledger.begin_copy(NAMESPACE.id, Tier[source], Tier[target], self.chain(prompt, int(depth)))
        if copy is None:
            return "nothing to copy"
        self.copies[name] = copy
        blocks = " ".join(self.names[block] for block in split_hashes(copy.hashes))
        source, target_slots = split_slots(copy.source_slots), split_slots(copy.target_slots)
        return f"{blocks} from {source} to {target_slots}, written after offset {copy.after}"

    def do_arrive(self, name: str, *how: str) -> str:
        copy = self.copies.pop(name)
        count = len(copy.hashes) // HASH_BYTES
        mask = next((word for word in how if set(word) <= {"0", "1"}), "1" * count)
        cause = (
            MigrateCause.OFFLOAD
            if isinstance(copy.source, Tier) and copy.source < copy.target
            else MigrateCause.ONBOARD
        )
        arrived = [bit == "1" for bit in mask]
        holders = self.ledger.end_copy(copy, arrived, cause, "moved" not in how, "pinned" in how)
        return f"holders {holders}"

    def do_evict(self, tier: str, prompt: str, depth: str) -> str:
        return f"{self.ledger.evict(Tier[tier], self.chain(prompt, int(depth)), EvictReason.CLEARED)} evicted"

    def do_missing(self, prompt: str, depth: str) -> None:
        self.ledger.forget(Tier.OBJECT, NAMESPACE.id, self.chain(prompt, int(depth)), EvictReason.MISSING)

    def do_keep(self, tier: str, prompt: str, depth: str, until_s: str, priority: str = "0") -> str:
        return f"{self.ledger.keep(Tier[tier], self.chain(prompt, int(depth)), float(until_s), int(priority))} kept"

    def do_expire(self, now_s: str) -> str:
        return f"{self.ledger.expire(float(now_s))} expired"

    def do_counts(self, tier: str) -> str:
        counts = self.ledger.counts(Tier[tier])
        return f"free {counts.free}, held {counts.held}, evictable {counts.evictable}, allocated {counts.allocated}"

    def do_round(self) -> str:
        return "begun" if self.ledger.begin_round() else "one is under way"

    def do_step(self, limit: str) -> str:
        return "goes on" if self.ledger.step_round(int(limit)) else "ended"

    def do_restart(self, epoch: str) -> str:
        return f"offset {self.ledger.restart(Epoch(int(epoch)))} comes next"

    def do_stop(self) -> None:
        self.ledger.stop()


def played(text: str) -> str:
    """The file as it should be: commands and comments kept, everything between them made anew."""
    scenario = Scenario()
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith("> "):
            lines += [line, *scenario.run(line[2:])]
        elif not line or line.startswith("#"):
            lines.append(line)
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.txt")), ids=lambda path: path.stem)
def test_the_scenario_goes_as_written(path: Path, request: pytest.FixtureRequest) -> None:
    text = path.read_text()
    if request.config.getoption("--rewrite"):
        path.write_text(played(text))
        return
    assert played(text) == text
