"""Text scenarios of the ledger: commands behind "> ", the results (=) and the events (offset) they cause below.

Both ledgers play them.

`pytest tests/scenarios --rewrite` writes what happens now into the files; review the diff like code.

    > pools HBM=4 HOST=4 NVME=4 OBJECT     begins epoch 1 with these pools
    > pools s3fifo HBM=4                   … and evicts by another policy
    > prefill A 3 [as r]                   match, pin, allocate, create three blocks of prompt A; r: its pinned slots
    > finish r                             unpin
    > copy 1 HBM HOST A 3                  begin copy 1 of three blocks;  > arrive 1 [mask] [moved] [pinned]  ends it
    > keep HBM A 3 10 [50]                 keep three blocks until second 10, priority 0 or as given;  > expire 10
    > allocate HBM 2 / release HBM 0 1 / pin HBM 0 / unpin HBM 0 / create HBM A 0:2 in 0 1
    > evict HOST A 2 / missing A 1 / claim janitor A 2 / match A 3 / holders A 3 / counts HBM / shares HBM
    > snapshot / step 2                    begin a snapshot / state a run of at most two blocks
    > stop / restart 2                     end the stream / begin epoch 2 in place
    > recover 7 NVME A0@3 on HBM=2 NVME=4  begin epoch 7 after a crash, in which NVME has kept A0 in slot 3
    > tenants a=2,NVME=4 b=1               the next pools are shared: weight 2, a quota of 4 slots; a/A: prompt A of a
    > pools room=1 HBM=4                   1 MiB for events that wait

Where a number of blocks stands, 1:3 stands for the blocks 1 and 2. Long runs and many events are shown by their ends,
with … between.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import pytest

from kvbm import _native
from kvbm.core.backend import LedgerProtocol, NewLedger
from kvbm.core.codec import decode_frame
from kvbm.core.errors import KvbmError
from kvbm.core.events import (
    BlocksCreated,
    BlocksEvicted,
    BlocksMigrated,
    Event,
    EvictReason,
    InstanceStopped,
    MigrateCause,
    PoolStated,
    ResidenciesListed,
    SnapshotEnded,
    StopReason,
)
from kvbm.core.ids import (
    HASH_BYTES,
    NO_PARENT,
    SLOT_BYTES,
    Epoch,
    InstanceId,
    Namespace,
    NamespaceId,
    Reach,
    SequenceHash,
    Tier,
    pack_slots,
    split_hashes,
    split_slots,
)
from kvbm.core.policy import EVICTION_POLICIES, Share
from kvbm.core.results import NOT_HELD, Copy, Recovered
from kvbm.reference.ledger import Ledger

FOLDER = Path(__file__).parent
NAMESPACE = Namespace(model="scenario", block_tokens=16)
MOST_BLOCKS, MOST_EVENTS = 16, 8  # shown whole


class Scenario:
    """Runs the commands of one file and says what happens."""

    def __init__(self, new_ledger: NewLedger) -> None:
        self.new_ledger = new_ledger
        self.ledger: LedgerProtocol = new_ledger([])
        self.shares: list[Share] = []
        self.names: dict[bytes, str] = {NO_PARENT: "-"}
        self.copies: dict[str, Copy] = {}
        self.pinned: dict[str, bytes] = {}

    def chain(self, prompt: str, blocks: str) -> bytes:
        """Blocks of a prompt: the first so many, or those from … up to …; each prompt letter is its own chain."""
        start, _, end = blocks.rpartition(":")
        return b"".join(self.block(f"{prompt}{position}") for position in range(int(start or 0), int(end)))

    def block(self, name: str) -> SequenceHash:
        """The block of a name such as A0."""
        block = SequenceHash(hashlib.sha256(name.encode()).digest()[:HASH_BYTES])
        self.names[block] = name
        return block

    def run(self, line: str) -> list[str]:
        """One command: its result, then its events."""
        name, *words = line.split()
        try:
            result = getattr(self, f"do_{name}")(*words)
        except KvbmError as error:
            result = f"error {error}"
        lines: list[str] = []
        for taken in self.ledger.take_frames(InstanceId("scenario"), 0):
            frame, _ = decode_frame(taken.data)
            for offset, event in enumerate(frame.events, frame.first_offset):
                lines.append(f"{offset} {self.words(event)}")
        if len(lines) > MOST_EVENTS:
            lines = [lines[0], "…", *lines[-2:]]
        return [f"= {result}", *lines] if result else lines

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
            case ResidenciesListed():
                return (
                    f"{name} {event.tier.name} snapshot {event.snapshot}: {self.run_words(event.hashes, event.slots)}"
                )
            case SnapshotEnded():
                return f"{name} {event.tier.name} snapshot {event.snapshot}: {event.count} listed"
            case InstanceStopped() if event.reason != StopReason.SHUTDOWN:
                return f"{name} ({event.reason.name.lower()})"
            case _:
                return name

    def run_words(self, hashes: bytes, slots: bytes) -> str:
        blocks = [self.names[block] for block in split_hashes(hashes)]
        if slots:
            blocks = [f"{block}@{slot}" for block, slot in zip(blocks, split_slots(slots), strict=True)]
        return " ".join(blocks) if len(blocks) <= MOST_BLOCKS else f"{blocks[0]} … {blocks[-1]}"

    def slot_words(self, slots: bytes) -> str:
        numbers = split_slots(slots)
        return f"slots {numbers}" if len(numbers) <= MOST_BLOCKS else f"slots [{numbers[0]} … {numbers[-1]}]"

    def begin(
        self, words: Sequence[str], epoch: int = 1, recovered: Mapping[Tier, Sequence[Recovered]] | None = None
    ) -> None:
        listed, eviction, room = [], "lru", 64
        for word in words:
            tier, _, slots = word.partition("=")
            if tier in EVICTION_POLICIES:
                eviction = tier
            elif tier == "room":
                room = int(slots)
            else:
                reach = Reach.INSTANCE if slots else Reach.CLUSTER
                listed.append(PoolStated(Tier[tier], int(slots or 0), 64, reach, "" if slots else "s3://scenario"))
        self.ledger = self.new_ledger(listed, eviction, room << 20, self.shares)
        self.ledger.start(Epoch(epoch), [NAMESPACE], recovered=recovered)

    def do_pools(self, *words: str) -> None:
        self.begin(words)

    def do_recover(self, epoch: str, tier: str, *words: str) -> None:
        at = words.index("on")
        places = [word.partition("@") for word in words[:at]]
        kept = [Recovered(self.block(name), namespace_of(name), int(slot)) for name, _, slot in places]
        self.begin(words[at + 1 :], int(epoch), {Tier[tier]: kept})

    def do_tenants(self, *words: str) -> None:
        self.shares = []
        for word in words:
            first, *quotas = word.split(",")
            tenant, _, weight = first.partition("=")
            slots = {Tier[tier]: int(count) for tier, _, count in (quota.partition("=") for quota in quotas)}
            self.shares.append(Share(tenant, int(weight), slots))

    def do_prefill(self, prompt: str, depth: str, _as: str = "", name: str = "") -> str:
        hashes, namespace = self.chain(prompt, depth), self.namespace(prompt)
        match = self.ledger.match(hashes)
        held = next((i for i, tier in enumerate(match.tiers) if tier != Tier.HBM), match.depth)
        slots = match.slots[: held * SLOT_BYTES]
        self.ledger.pin(Tier.HBM, slots)
        allocation = self.ledger.allocate(Tier.HBM, int(depth) - held, namespace)
        if allocation is None:
            self.ledger.unpin(Tier.HBM, slots)
            return "short"
        parent = SequenceHash(hashes[(held - 1) * HASH_BYTES : held * HASH_BYTES]) if held else NO_PARENT
        rest = hashes[held * HASH_BYTES :]
        slots = slots + self.ledger.create(namespace, Tier.HBM, parent, held, rest, allocation.slots)
        self.pinned[name] = slots
        if not name:
            self.ledger.unpin(Tier.HBM, slots)
        return f"{held} held, {self.slot_words(slots)}"

    def namespace(self, prompt: str) -> NamespaceId:
        """The namespace of a prompt, its tenant known to the ledger."""
        namespace = namespace_of(prompt)
        self.ledger.assign(namespace, prompt.rpartition("/")[0])
        return namespace

    def do_finish(self, name: str) -> None:
        self.ledger.unpin(Tier.HBM, self.pinned.pop(name))

    def do_pin(self, tier: str, *slots: str) -> None:
        self.ledger.pin(Tier[tier], pack_slots(int(slot) for slot in slots))

    def do_unpin(self, tier: str, *slots: str) -> None:
        self.ledger.unpin(Tier[tier], pack_slots(int(slot) for slot in slots))

    def do_create(self, tier: str, prompt: str, blocks: str, _in: str, *slots: str) -> str:
        start, given = int(blocks.partition(":")[0]), pack_slots(int(slot) for slot in slots)
        parent = SequenceHash(self.chain(prompt, f"{start - 1}:{start}")) if start else NO_PARENT
        hashes = self.chain(prompt, blocks)
        return self.slot_words(self.ledger.create(self.namespace(prompt), Tier[tier], parent, start, hashes, given))

    def do_match(self, prompt: str, depth: str) -> str:
        match = self.ledger.match(self.chain(prompt, depth))
        places = zip(match.tiers, split_slots(match.slots), strict=True)
        return " ".join(f"{Tier(tier).name}@{slot}" for tier, slot in places) or "nothing"

    def do_holders(self, prompt: str, depth: str) -> str:
        tiers = self.ledger.holders(self.chain(prompt, depth))
        return " ".join("-" if tier == NOT_HELD else Tier(tier).name for tier in tiers)

    def do_allocate(self, tier: str, count: str) -> str:
        allocation = self.ledger.allocate(Tier[tier], int(count))
        if allocation is None:
            return "short"
        return f"slots {split_slots(allocation.slots)}, written after offset {allocation.after}"

    def do_release(self, tier: str, *slots: str) -> None:
        self.ledger.release(Tier[tier], pack_slots(int(slot) for slot in slots))

    def do_copy(self, name: str, source: str, target: str, prompt: str, depth: str) -> str:
        place = Tier[source] if source in Tier.__members__ else InstanceId(source)
        copy = self.ledger.begin_copy(self.namespace(prompt), place, Tier[target], self.chain(prompt, depth))
        if copy is None:
            return "nothing to copy"
        self.copies[name] = copy
        blocks = " ".join(self.names[block] for block in split_hashes(copy.hashes))
        source_slots, target_slots = split_slots(copy.source_slots), split_slots(copy.target_slots)
        return f"{blocks} from {source_slots} to {target_slots}, written after offset {copy.after}"

    def do_arrive(self, name: str, *how: str) -> str:
        copy = self.copies.pop(name)
        count = len(copy.hashes) // HASH_BYTES
        mask = next((word for word in how if set(word) <= {"0", "1"}), "1" * count)
        if not isinstance(copy.source, Tier):
            cause = MigrateCause.FETCH
        else:
            cause = MigrateCause.OFFLOAD if copy.source < copy.target else MigrateCause.ONBOARD
        arrived = [bit == "1" for bit in mask]
        holders = self.ledger.end_copy(copy, arrived, cause, "moved" not in how, "pinned" in how)
        return f"holders {holders}"

    def do_evict(self, tier: str, prompt: str, depth: str) -> str:
        return f"{self.ledger.evict(Tier[tier], self.chain(prompt, depth), EvictReason.CLEARED)} evicted"

    def do_missing(self, prompt: str, depth: str) -> None:
        self.ledger.forget(Tier.OBJECT, self.namespace(prompt), self.chain(prompt, depth), EvictReason.MISSING)

    def do_claim(self, finder: str, prompt: str, depth: str) -> None:
        self.ledger.claim(Tier.OBJECT, self.namespace(prompt), self.chain(prompt, depth), InstanceId(finder))

    def do_keep(self, tier: str, prompt: str, depth: str, until_s: str, priority: str = "0") -> str:
        return f"{self.ledger.keep(Tier[tier], self.chain(prompt, depth), float(until_s), int(priority))} kept"

    def do_expire(self, now_s: str) -> str:
        return f"{self.ledger.expire(float(now_s))} expired"

    def do_counts(self, tier: str) -> str:
        counts = self.ledger.counts(Tier[tier])
        return f"free {counts.free}, held {counts.held}, evictable {counts.evictable}, allocated {counts.allocated}"

    def do_shares(self, tier: str) -> str:
        counts = self.ledger.share_counts(Tier[tier])
        return ", ".join(
            f"{one.tenant} {one.held}" + ("" if one.quota_slots is None else f" of {one.quota_slots}") for one in counts
        )

    def do_snapshot(self) -> str:
        return "begun" if self.ledger.begin_snapshot() else "one is under way"

    def do_step(self, limit: str) -> str:
        return "goes on" if self.ledger.step_snapshot(int(limit)) else "ended"

    def do_restart(self, epoch: str) -> str:
        return f"offset {self.ledger.restart(Epoch(int(epoch)))} comes next"

    def do_stop(self) -> None:
        self.ledger.stop()


def namespace_of(name: str) -> NamespaceId:
    """The namespace of a prompt or block: a/A is tenant a's."""
    tenant = name.rpartition("/")[0]
    return msgspec.structs.replace(NAMESPACE, tenant=tenant).id


def played(text: str, new_ledger: NewLedger) -> str:
    """The file as it should be: commands and comments kept, everything between them made anew."""
    scenario = Scenario(new_ledger)
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith("> "):
            lines += [line, *scenario.run(line[2:])]
        elif not line or line.startswith("#"):
            lines.append(line)
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("new_ledger", [Ledger, _native.Ledger], ids=["reference", "native"])
@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.txt")), ids=lambda path: path.stem)
def test_the_scenario_goes_as_written(path: Path, new_ledger: NewLedger, request: pytest.FixtureRequest) -> None:
    text = path.read_text(encoding="utf-8")
    if request.config.getoption("--rewrite") and new_ledger is Ledger:
        text = played(text, new_ledger)
        path.write_text(text, encoding="utf-8")
    assert played(text, new_ledger) == text
