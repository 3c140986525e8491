"""Hypothesis strategies for events of few hashes, slots and namespaces, so that they meet: legal or not."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from kvbm.core.codec import Frame, encode_frame
from kvbm.core.events import (
    BlocksCreated,
    BlocksEvicted,
    BlocksMigrated,
    Event,
    EvictReason,
    InstanceStarted,
    InstanceStopped,
    MigrateCause,
    PoolStated,
    ResidenciesListed,
    SnapshotEnded,
    StopReason,
    UsageRecorded,
    UsageRow,
)
from kvbm.core.ids import Epoch, InstanceId, NamespaceId, Offset, Reach, SequenceHash, Tier, pack_slots

HASHES = [SequenceHash(bytes([number]) * 16) for number in range(12)]
OWNERS = [NamespaceId(bytes([200 + number]) * 16) for number in range(3)]
SLOTS = [0, 1, 2, 3, 4, 5, 6, 7, 1023, 1024, 1025, 5000, 2**32 - 1]  # on both sides of where the table becomes sparse

small_tiers = st.sampled_from([Tier.HBM, Tier.HBM, Tier.HOST, Tier.OBJECT])
owners = st.sampled_from(OWNERS)
pools = st.builds(
    PoolStated,
    tier=small_tiers,
    slots=st.sampled_from([0, 4, 2000, 2**40, -5]),
    block_bytes=st.sampled_from([64, -1, 2**64 - 1]),
    reach=st.sampled_from(Reach),
    name=st.sampled_from(["", "s3://é"]),
)


@st.composite
def packed_runs(draw: st.DrawFn) -> tuple[bytes, bytes]:
    run = draw(st.lists(st.sampled_from(HASHES), min_size=1, max_size=6))
    slots = draw(st.none() | st.lists(st.sampled_from(SLOTS), min_size=len(run), max_size=len(run)))
    return b"".join(run), b"" if slots is None else pack_slots(slots)


@st.composite
def usages(draw: st.DrawFn) -> UsageRecorded:
    """What tenants have used; any numbers that fit, and any names."""
    numbers = st.integers(0, 2**64 - 1)
    four = st.tuples(numbers, numbers, numbers, numbers)
    names = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=6)
    tenants = sorted(draw(st.sets(names, max_size=3)), key=str.encode)
    since_ms = draw(numbers)
    return UsageRecorded(
        since_ms=since_ms,
        until_ms=draw(st.integers(since_ms, 2**64 - 1)),
        block_bytes=draw(four),
        rows=tuple(
            UsageRow(name, draw(four), draw(four), draw(four), draw(numbers), draw(numbers), draw(numbers))
            for name in tenants
        ),
        is_last=draw(st.booleans()),
    )


@st.composite
def small_events(draw: st.DrawFn) -> Event:
    """Events of few hashes, slots and namespaces, so that they meet."""
    tier, namespace = draw(small_tiers), draw(owners)
    run, slots = draw(packed_runs())
    snapshot_ = draw(st.integers(0, 3))
    match draw(st.integers(0, 20)):
        case 0:
            return InstanceStarted(
                epoch=draw(st.sampled_from([-1, 0, 1, 2, 3, 2**64 - 1]).map(Epoch)),
                pools=tuple(draw(st.lists(pools, max_size=3))),
            )
        case 1 | 2 | 3 | 4 | 5:
            return BlocksCreated(namespace=namespace, tier=tier, hashes=run, slots=slots)
        case 6 | 7 | 8:
            source = draw(small_tiers | st.just(InstanceId("peer")))
            return BlocksMigrated(
                namespace=namespace,
                source=source,
                target=tier,
                kept=draw(st.booleans()),
                cause=MigrateCause.OFFLOAD,
                hashes=run,
                slots=slots,
            )
        case 9 | 10 | 11:
            return BlocksEvicted(namespace=namespace, tier=tier, reason=EvictReason.TTL, hashes=run)
        case 12 | 13 | 14 | 15:
            return ResidenciesListed(namespace=namespace, tier=tier, snapshot=snapshot_, hashes=run, slots=slots)
        case 20:
            return draw(usages())
        case 16 | 17 | 18:
            return SnapshotEnded(tier=tier, snapshot=snapshot_, count=draw(st.integers(0, 6)))
        case _:
            return InstanceStopped(reason=draw(st.sampled_from(StopReason)))


def small_frames(steps: Sequence[str | tuple[int, list[Event]]]) -> list[bytes | None]:
    """Frames of the steps, a second apart, epochs as told and offsets that go on; None: some were missed."""
    made: list[bytes | None] = []
    epoch = offset = 0
    for number, step in enumerate(steps):
        if isinstance(step, str):
            made.append(None)
            offset += 7
            continue
        told, events = step
        if told > epoch:
            epoch, offset = told, 0
        frame = Frame(
            instance=InstanceId("a"),
            epoch=Epoch(epoch),
            first_offset=Offset(offset),
            wall_time_ns=(number + 1) * 10**9,
            digest=0,
            events=tuple(events),
        )
        made.append(encode_frame(frame))
        offset += len(events)
    return made
