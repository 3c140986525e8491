"""Hypothesis strategies for what core speaks of: namespaces, hashes, runs, events, frames."""

from __future__ import annotations

import string

from hypothesis import strategies as st

from kvbm.core.codec import Frame
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
)
from kvbm.core.ids import (
    HASH_BYTES,
    NO_PARENT,
    SLOT_BYTES,
    Epoch,
    InstanceId,
    Namespace,
    NamespaceId,
    Offset,
    Reach,
    SequenceHash,
    Tier,
)

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)

tiers = st.sampled_from(Tier)
hashes = st.binary(min_size=HASH_BYTES, max_size=HASH_BYTES).map(SequenceHash)
parents = st.just(NO_PARENT) | hashes
namespace_ids = st.binary(min_size=HASH_BYTES, max_size=HASH_BYTES).map(NamespaceId)
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
instance_ids = st.text(string.ascii_lowercase + string.digits + "-é日🦊", min_size=1, max_size=20).map(InstanceId)

namespaces = st.builds(
    Namespace,
    model=text,
    block_tokens=st.integers(1, 1024),
    revision=text,
    kv_dtype=st.sampled_from(["float32", "bfloat16", "fp8"]),
    layout=text,
    kv_group=st.integers(0, 7),
    ranks=st.sampled_from(["tp1", "tp8", "tp4-pp2"]),
    lora=text,
    tenant=text,
    scheme=st.sampled_from(["sha256", "vllm"]),
    scheme_seed=U64,
)


def runs(max_blocks: int = 20) -> st.SearchStrategy[bytes]:
    """Packed runs of 1 to `max_blocks` distinct hashes."""
    return st.lists(hashes, min_size=1, max_size=max_blocks, unique=True).map(b"".join)


@st.composite
def slotted_runs(draw: st.DrawFn, max_blocks: int = 20) -> tuple[bytes, bytes]:
    """Packed runs of hashes, each with as many packed slots or none."""
    run = draw(runs(max_blocks))
    slot_bytes = len(run) // HASH_BYTES * SLOT_BYTES
    return run, draw(st.just(b"") | st.binary(min_size=slot_bytes, max_size=slot_bytes))


pools_stated = st.builds(PoolStated, tier=tiers, slots=U32, block_bytes=U64, reach=st.sampled_from(Reach), name=text)

instances_started = st.builds(
    InstanceStarted,
    epoch=U64.map(Epoch),
    pools=st.lists(pools_stated, max_size=4).map(tuple),
    namespaces=st.lists(namespaces, max_size=2).map(tuple),
    topology=st.lists(text, max_size=4).map(tuple),
    engine=text,
    version=text,
    attributes=st.dictionaries(st.sampled_from(["a", "é", "of a name that is longer"]), st.binary(max_size=20)),
)


@st.composite
def run_events(draw: st.DrawFn, ids: st.SearchStrategy[NamespaceId] = namespace_ids) -> Event:
    """Any event that covers a run of blocks, in one of the given namespaces."""
    namespace, tier = draw(ids), draw(tiers)
    run, slots = draw(slotted_runs())
    match draw(st.integers(0, 3)):
        case 0:
            return BlocksCreated(
                namespace=namespace, tier=tier, hashes=run, slots=slots, parent=draw(parents), start=draw(U32)
            )
        case 1:
            return BlocksMigrated(
                namespace=namespace,
                source=draw(tiers | instance_ids),
                target=tier,
                kept=draw(st.booleans()),
                cause=draw(st.sampled_from(MigrateCause)),
                hashes=run,
                slots=slots,
            )
        case 2:
            reason = draw(st.sampled_from(EvictReason))
            return BlocksEvicted(namespace=namespace, tier=tier, reason=reason, hashes=run)
        case _:
            return ResidenciesListed(namespace=namespace, tier=tier, snapshot=draw(U32), hashes=run, slots=slots)


snapshots_ended = st.builds(SnapshotEnded, tier=tiers, snapshot=U32, count=U32)
instances_stopped = st.builds(InstanceStopped, reason=st.sampled_from(StopReason))


@st.composite
def frames(draw: st.DrawFn, max_events: int = 6) -> Frame:
    """Frames that encode: 1 to `max_events` events of any kind in up to three namespaces."""
    ids = st.sampled_from(draw(st.lists(namespace_ids, min_size=1, max_size=3)))
    events = run_events(ids) | run_events(ids) | snapshots_ended | instances_stopped | instances_started
    return Frame(
        instance=draw(instance_ids),
        epoch=draw(U64.map(Epoch)),
        first_offset=draw(U64.map(Offset)),
        wall_time_ns=draw(U64),
        digest=draw(U64),
        events=tuple(draw(st.lists(events, min_size=1, max_size=max_events))),
    )
