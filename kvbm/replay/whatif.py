"""Another eviction policy, another capacity: what would they have kept of the prompts that were really asked?

A pool of N slots sees one prompt after another. Blocks found from the first on are hits; the others enter, if need be
in the place of others. No bytes, no clock: only order counts. Prompts come from a catalog's archive, where a share
`rate` of them was sampled, chosen by their first block; a pool of rate × N slots then has the hit ratio that N slots
have under all prompts.

Source: SHARDS, Waldspurger et al., FAST 2015, for scaling the capacity by the share that is sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from kvbm.core.ids import SequenceHash, split_hashes
from kvbm.core.policy import EVICTION_POLICIES, EvictionPolicy
from kvbm.progress import Watch
from kvbm.replay.costaware import CostAware
from kvbm.replay.format import counted
from kvbm.replay.source import SourceError
from kvbm.streams.access_samples import SUFFIX, read_samples

POLICIES = (*EVICTION_POLICIES, "cost")
SAMPLES_FOLDER = "samples"  # of an archive
TRACE_BLOCK_TOKENS = 512  # of Mooncake's format
SAMPLE_BLOCK_TOKENS = 16
_FEWEST_SLOTS = 100
_TRACE_SUFFIXES = (".jsonl", ".json")


class TraceLine(Protocol):
    """One request of a trace in Mooncake's format; see `workload.trace`."""

    @property
    def input_tokens(self) -> int: ...
    @property
    def hash_ids(self) -> tuple[int, ...]: ...


ReadTrace = Callable[[Path], Iterable[TraceLine]]


class ComputeCost(NamedTuple):
    """What computing a block takes.

    Attributes:
        tokens_per_s: of prefill at the beginning of a prompt.
        double_tokens: where in a prompt a token takes twice as long, because attention looks at all before it. 53,000
            for 70 G parameters in 80 layers of width 8,192: 2 × parameters / (4 × layers × width).
    """

    tokens_per_s: float = 10_000.0
    double_tokens: float = 53_000.0

    def block_s(self, position: int, block_tokens: int) -> float:
        """Seconds to compute the block at a position of its prompt, counted in blocks."""
        middle = (position + 0.5) * block_tokens
        return block_tokens / self.tokens_per_s * (1 + middle / self.double_tokens)


COST = ComputeCost()


class Accesses(NamedTuple):
    """The prompts of one source, as the pools of `instances` saw them.

    Attributes:
        prompts: (instance, blocks of the prompt), in order.
        rate: share of all prompts that these are.
        notes: what is worth saying of them.
    """

    source: str
    prompts: list[tuple[int, list[SequenceHash]]]
    instances: int
    block_tokens: int
    rate: float
    notes: list[str]


class WhatIf(msgspec.Struct, frozen=True, kw_only=True):
    """One policy at one capacity.

    Attributes:
        policy: "unbounded" for a pool that never evicts: what no policy can beat.
        capacity: slots of each instance's pool, as asked for; 0 for unbounded.
        hit_blocks: of `blocks` that were asked for, those that were held, from the first of their prompt on.
        saved_s: prefill time that they spared.
        tier_hits: hit_blocks by the tier that held them, the hottest first.
    """

    policy: str
    capacity: int
    blocks: int
    hit_blocks: int
    hit_ratio: float
    saved_s: float
    tier_hits: list[int]


class WhatIfs(msgspec.Struct, kw_only=True):
    """All that was tried, by capacity, and within one the best first."""

    source: str
    prompts: int
    instances: int
    rate: float
    results: list[WhatIf] = []
    notes: list[str] = []

    def lines(self) -> Iterator[str]:
        """A table for people."""
        yield from self.notes
        most = next((one for one in self.results if not one.capacity), None)
        whose = f" of {counted(self.instances, 'instance')}" if self.instances > 1 else ""
        yield f"{counted(self.prompts, 'prompt')}{whose}, {counted(most.blocks if most else 0, 'block')} asked for"
        tiers = max((len(one.tier_hits) for one in self.results), default=1)
        heads = [f"{f'tier {tier}':>12}" for tier in range(tiers)] if tiers > 1 else []
        yield (
            f"{'capacity':>12}  {'policy':<10} {'hit blocks':>12} {'hit ratio':>9} {'saved s':>12} {'of most':>8} "
            f"{' '.join(heads)}"
        ).rstrip()
        for one in self.results:
            share = f"{one.saved_s / most.saved_s:>8.1%}" if most and most.saved_s else f"{'':>8}"
            hits = [f"{count:>12,}" for count in one.tier_hits] if tiers > 1 and one.capacity else []
            size = f"{one.capacity:,}" if one.capacity else "∞"
            yield (
                f"{size:>12}  {one.policy:<10} {one.hit_blocks:>12,} {one.hit_ratio:>9.4f} {one.saved_s:>12,.1f} "
                f"{share} "
                f"{' '.join(hits)}"
            ).rstrip()


def read_accesses(name: str, read_trace: ReadTrace, block_tokens: int | None = None) -> Accesses:
    """The prompts of an archive, a folder or file of samples, or a trace in Mooncake's format.

    Args:
        block_tokens: of the samples, which do not say; a trace does.
    Raises: SourceError: there are none. TraceError: a line of a trace cannot be used.
    """
    path = Path(name)
    if not path.exists():
        raise SourceError(f"{name} does not exist; give an archive folder with samples, or a trace as JSONL")
    if path.is_file() and path.suffix in _TRACE_SUFFIXES:
        return _trace_accesses(name, read_trace(path))
    if path.is_dir() and (path / SAMPLES_FOLDER).is_dir():
        path = path / SAMPLES_FOLDER
    is_samples = path.suffix == SUFFIX or (path.is_dir() and any(path.glob(f"*{SUFFIX}")))
    accesses = _sampled_accesses(name, path, block_tokens or SAMPLE_BLOCK_TOKENS) if is_samples else None
    if accesses is None or not accesses.prompts:
        raise SourceError(
            f"{name} holds no sampled prompts; set samples.rate at the instances and let kvbm-catalog serve --archive "
            "keep them, or "
            "give a trace in Mooncake's format as *.jsonl"
        )
    return accesses


def _trace_accesses(name: str, lines: Iterable[TraceLine]) -> Accesses:
    prompts = [
        (
            0,
            [
                SequenceHash(one.to_bytes(16, "little"))
                for one in line.hash_ids[: line.input_tokens // TRACE_BLOCK_TOKENS]
            ],
        )
        for line in lines
    ]
    if not prompts:
        raise SourceError(f"{name} holds no request")
    return Accesses(name, prompts, 1, TRACE_BLOCK_TOKENS, 1.0, [])


def _sampled_accesses(name: str, path: Path, block_tokens: int) -> Accesses:
    instances: dict[tuple[str, str], int] = {}
    prompts: list[tuple[int, list[SequenceHash]]] = []
    rates: list[float] = []
    for sample in read_samples(path):
        number = instances.setdefault((sample.cluster, sample.instance), len(instances))
        key = sample.namespace[:8]  # equal hashes of two namespaces are two blocks
        prompts.append((number, [SequenceHash(key + block) for block in split_hashes(sample.hashes)]))
        rates.append(sample.rate)
    rate = sum(rates) / len(rates) if rates else 1.0
    notes = [f"blocks are taken to have {block_tokens} tokens; --block-tokens says otherwise"]
    if rate < 1:
        notes.append(
            f"{rate:.2%} of the prompts were sampled, so pools have that share of the capacity, and hits and seconds "
            "are scaled up"
        )
    if rates and min(rates) < max(rates):
        notes.append(
            f"the share that was sampled changed ({min(rates):.2%} to {max(rates):.2%}); its mean is used, so sizes "
            "are rough"
        )
    return Accesses(name, prompts, len(instances), block_tokens, rate, notes)


def what_if(
    accesses: Accesses,
    policies: Sequence[str],
    capacities: Sequence[int],
    tiers: Sequence[float] = (),
    cost: ComputeCost = COST,
) -> WhatIfs:
    """Run policies at capacities.

    Args:
        capacities: slots of the hottest tier of each instance.
        tiers: sizes of colder tiers, as multiples of the capacity; each takes what the one above it evicts.
    """
    report = WhatIfs(
        source=accesses.source,
        prompts=len(accesses.prompts),
        instances=accesses.instances,
        rate=accesses.rate,
        notes=list(accesses.notes),
    )
    blocks = _Blocks(accesses, cost)
    with Watch(accesses.source, len(accesses.prompts) * (1 + len(policies) * len(capacities))) as watch:
        for capacity in sorted(set(capacities)):
            slots = [max(1, round(capacity * accesses.rate * size)) for size in (1.0, *tiers)]
            found = [blocks.run(policy, capacity, slots, watch) for policy in dict.fromkeys(policies)]
            report.results += sorted(found, key=lambda one: (-one.saved_s, -one.hit_blocks))
        report.results.append(blocks.run("unbounded", 0, [], watch))
    if accesses.rate < 1 and min(capacities) * accesses.rate < _FEWEST_SLOTS:
        report.notes.append(
            f"fewer than {_FEWEST_SLOTS} slots are left of the smallest capacity: too few to tell policies apart"
        )
    return report


class _Blocks:
    """The prompts of a source, run again and again."""

    def __init__(self, accesses: Accesses, cost: ComputeCost) -> None:
        self._accesses = accesses
        self._cost: dict[SequenceHash, float] = {}
        self._parent: dict[SequenceHash, SequenceHash | None] = {}
        for _, prompt in accesses.prompts:
            before: SequenceHash | None = None
            for position, block in enumerate(prompt):
                if block not in self._cost:
                    self._cost[block] = cost.block_s(position, accesses.block_tokens)
                    self._parent[block] = before
                before = block

    def run(self, policy: str, capacity: int, slots: Sequence[int], watch: Watch) -> WhatIf:
        """One policy on pools of these sizes, the hottest first; without sizes, one that never evicts."""
        accesses = self._accesses
        instances = [
            Tiers([(size, self._policy(policy, size)) for size in slots]) if slots else Unbounded()
            for _ in range(accesses.instances)
        ]
        asked = 0
        saved_s = 0.0
        tier_hits = [0] * max(1, len(slots))
        for instance, prompt in accesses.prompts:
            asked += len(prompt)
            found = instances[instance].ask(prompt)
            for tier, block in zip(found, prompt, strict=False):
                tier_hits[tier] += 1
                saved_s += self._cost[block]
            watch.done += 1
        hits = sum(tier_hits)
        scale = 1 / accesses.rate
        return WhatIf(
            policy=policy,
            capacity=capacity,
            blocks=round(asked * scale),
            hit_blocks=round(hits * scale),
            hit_ratio=hits / asked if asked else 0.0,
            saved_s=saved_s * scale,
            tier_hits=[round(count * scale) for count in tier_hits],
        )

    def _policy(self, name: str, slots: int) -> EvictionPolicy:
        if name == "cost":
            return CostAware(self._cost.__getitem__, self._parent.__getitem__)
        return EVICTION_POLICIES[name](slots)


class Unbounded:
    """A pool that never evicts."""

    def __init__(self) -> None:
        self._held: set[SequenceHash] = set()

    def ask(self, prompt: list[SequenceHash]) -> list[int]:
        """See `Tiers.ask`."""
        depth = next((at for at, block in enumerate(prompt) if block not in self._held), len(prompt))
        self._held.update(prompt)
        return [0] * depth

    def holds(self, block: SequenceHash) -> bool:
        """Whether the block is held."""
        return block in self._held


class Tiers:
    """The pools of one instance, the hottest first; a block is in one of them. What a pool evicts, the next takes."""

    def __init__(self, pools: Sequence[tuple[int, EvictionPolicy]]) -> None:
        self._slots = [slots for slots, _ in pools]
        self._policies = [policy for _, policy in pools]
        self._held: list[set[SequenceHash]] = [set() for _ in pools]

    def ask(self, prompt: list[SequenceHash]) -> list[int]:
        """Serve a prompt: the tier of each block that was found, from the first on.

        Afterwards the hottest tier holds the prompt, or as many blocks from its first on as it has slots.
        """
        found: list[int] = []
        for block in prompt:
            tier = next((tier for tier, held in enumerate(self._held) if block in held), None)
            if tier is None:
                break
            found.append(tier)
        kept = prompt[: self._slots[0]]
        policy, held = self._policies[0], self._held[0]
        absent = []
        for block in kept:
            if block in held:
                policy.hold(block)
            else:
                absent.append(block)
        for tier, colder in enumerate(self._held[1:], 1):
            for block in absent:
                if block in colder:
                    colder.discard(block)
                    self._policies[tier].lose(block)
        self._enter(0, absent, pinned=True)
        for block in reversed(kept):  # the deepest goes first, as the ledger has it
            policy.free(block)
        return found

    def holds(self, block: SequenceHash) -> bool:
        """Whether some tier holds the block."""
        return any(block in held for held in self._held)

    def _enter(self, tier: int, blocks: list[SequenceHash], pinned: bool) -> None:
        policy, held = self._policies[tier], self._held[tier]
        blocks = blocks[: self._slots[tier]]
        victims = policy.victims(max(0, len(held) + len(blocks) - self._slots[tier]))
        held.difference_update(victims)
        for block in blocks:
            policy.gain(block, pinned)
        held.update(blocks)
        if victims and tier + 1 < len(self._held):
            self._enter(tier + 1, victims, pinned=False)
